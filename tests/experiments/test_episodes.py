"""Episodes: seeded and balanced, held-out tasks fixed, resume, folders of images, bad input."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from experiments.few_shot.episodes import KINDS, Episodes, draw_tasks, episode, fixed_tasks
from experiments.few_shot.image_classes import (
    CACHE,
    ImageClasses,
    folder_images,
    folder_splits,
    glyphs,
)

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")  # which a cache is written into


def batches(count=3, **options):
    return list(Episodes(iterations=count, tasks=4, **options).train_dataloader())


def numbered(counts):
    """Classes of images that are their own numbers: all pixels of image i of class c are 10 c + i."""
    members, images = [], []
    for c, count in enumerate(counts):
        members.append(torch.arange(count) + len(images))
        images += [torch.full((1, 2, 2), 10 * c + i, dtype=torch.uint8) for i in range(count)]
    return ImageClasses(torch.stack(images), tuple("abcdefgh"[: len(counts)]), tuple(members))


def test_a_batch_has_tasks_of_ways_and_shots():
    for (sx, sy), (qx, qy) in batches(ways=7, shots=2, queries=3, seed=0):
        assert sx.shape == (4, 14, 1, 28, 28)
        assert qx.shape == (4, 21, 1, 28, 28)
        assert sx.dtype == qx.dtype == torch.float32
        assert sy.dtype == torch.int64
        assert 0 <= qx.min() < qx.max() <= 1
        for y, each in ((sy, 2), (qy, 3)):
            assert y.shape == (4, 7 * each)
            assert all(torch.bincount(task, minlength=7).tolist() == [each] * 7 for task in y)


def test_labels_are_those_of_classes_and_no_image_comes_twice():
    counts = [5, 9, 6, 7, 8]
    data = numbered(counts)
    picks = draw_tasks(torch.tensor(counts), 200, 3, 5, torch.Generator().manual_seed(0))
    (sx, sy), (qx, qy) = episode(data, picks, shots=2)
    seen = set()
    for task in range(200):
        x, y = torch.cat([sx[task], qx[task]]), torch.cat([sy[task], qy[task]])
        value = (x[:, 0, 0, 0] * 255).round().long()
        assert len(set(value.tolist())) == 15
        for way in range(3):
            assert set((value[y == way] // 10).tolist()) == {int(picks.classes[task, way])}
        assert len(set(picks.classes[task].tolist())) == 3
        seen |= {(way, int(c)) for way, c in enumerate(picks.classes[task])}
        assert all((value % 10) < torch.tensor(counts)[value // 10])
    assert len(seen) == 15  # every class comes under every label
    drawn = torch.bincount(picks.classes.flatten(), minlength=5)
    assert drawn.min() > 80  # of 120 that are expected, with a standard deviation of 7


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_test_tasks_are_those_of_the_file_whatever_the_seed(kind):
    ways, shots = kind
    picks = fixed_tasks()[kind]
    assert picks.classes.shape == (600, ways)
    assert picks.images.shape == (600, ways, shots + KINDS[kind])
    counts = torch.tensor([len(members) for members in glyphs("test").members])
    assert (picks.images < counts[picks.classes, None]).all()
    for part in (picks.classes, picks.images):
        assert (part.sort(-1).values.diff(dim=-1) > 0).all()  # none twice
    for seed in (0, 1):
        loader = Episodes(ways=ways, shots=shots, seed=seed, tasks=2, queries=4).test_dataloader()
        assert len(loader) == 300
        (sx, _), (qx, qy) = next(iter(loader))
        data = glyphs("test")
        for task in range(2):
            for way in range(ways):
                own = data.images[data.members[picks.classes[task, way]]].float() / 255
                chosen = own[picks.images[task, way]]
                assert_close(sx[task, way * shots : (way + 1) * shots], chosen[:shots])
                assert_close(qx[task][qy[task] == way], chosen[shots : shots + 4])


def paint(path, value, mode="L", size=(9, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


@pytest.fixture
def alphabets(tmp_path):
    """Ten alphabets of three characters of four images, as Omniglot has them."""
    for a in range(10):
        for c in range(3):
            for i in range(4):
                paint(tmp_path / f"omniglot/alphabet{a}/character{c}/{i}.png", 20 * a + 5 * c + i)
    return tmp_path / "omniglot"


FEW = {"ways": 3, "shots": 1, "queries": 2, "tasks": 2, "iterations": 3, "seed": 0}


def test_a_folder_of_groups_is_split_by_groups(alphabets):
    data = Episodes(str(alphabets), size=14, test_tasks=4, **FEW)
    groups = [
        {name.split("/")[0] for name in part.data.names}
        for part in (data.train, data.val, data.test)
    ]
    assert [len(g) for g in groups] == [6, 2, 2]
    assert len(set.union(*groups)) == 10
    other = folder_splits(alphabets, seed=1)
    assert {name.split("/")[0] for name in other["test"]} != groups[2]
    for (x, y), (qx, _) in data.train_dataloader():
        assert x.shape == (2, 3, 1, 14, 14)
        value = (torch.cat([x, qx], 1)[:, :, 0, 0, 0] * 255).round().long()
        labels = torch.cat([y, torch.arange(3).repeat_interleave(2).expand(2, 6)], 1)
        for task in range(2):
            for way in range(3):
                assert len({v // 5 for v in value[task][labels[task] == way].tolist()}) == 1
    assert len(list(data.test_dataloader())) == 2


def test_a_folder_of_train_val_and_test_is_taken_as_it_is(tmp_path):
    for n, split in enumerate(("train", "val", "test")):
        for c in range(3):
            for i in range(3):
                paint(tmp_path / "mini" / split / f"n{n}{c}" / f"{i}.jpg", (80 * n, 9, 200), "RGB")
    data = Episodes(str(tmp_path / "mini"), size=84, channels=3, **FEW)
    for n, part in enumerate((data.train, data.val, data.test)):
        assert part.data.names == (f"n{n}0", f"n{n}1", f"n{n}2")
        assert part.data.images.shape == (9, 3, 84, 84)
        assert abs(int(part.data.images[:, 0].float().mean()) - 80 * n) < 5
    (x, _), _ = next(iter(data.train_dataloader()))
    assert x.shape == (2, 3, 3, 84, 84)


def test_images_are_read_once_and_again_when_they_change(alphabets, monkeypatch):
    options = {"size": 5, **FEW}
    before = list(Episodes(str(alphabets), **options).train_dataloader())
    assert len(list(CACHE.glob("*.npy"))) == 3
    with monkeypatch.context() as patch:
        patch.setattr("experiments.few_shot.image_classes.read_image", None)
        assert_close(list(Episodes(str(alphabets), **options).train_dataloader()), before)
    for a in range(10):
        paint(alphabets / f"alphabet{a}/character0/0.png", 255, size=(20, 20))
    changed = Episodes(str(alphabets), **options).train.data.images
    assert (changed == 255).all((1, 2, 3)).sum() == 6


def test_classes_of_too_few_images_are_left_out_with_a_warning(alphabets):
    for c in range(2):
        for i in range(2):
            (alphabets / f"alphabet0/character{c}/{i}.png").unlink()
    with pytest.warns(UserWarning, match=r"fewer than 3 images .* are left out: 2 of \d+ of"):
        data = Episodes(str(alphabets), **FEW)
    sizes = [len(part.data.members) for part in (data.train, data.val, data.test)]
    assert sum(sizes) == 28


def test_what_a_user_may_get_wrong_about_a_folder(alphabets, tmp_path):
    def refused(message, source, **options):
        with pytest.raises(ValueError, match=message):
            Episodes(str(source), **{**FEW, **options})

    refused("which is nothing", tmp_path / "nowhere")
    (tmp_path / "file.zip").write_text("")
    refused("which is a file", tmp_path / "file.zip")
    (tmp_path / "empty/folder").mkdir(parents=True)
    refused("at its first or second level, got none", tmp_path / "empty")
    refused("channels: expected", alphabets, channels=2)
    refused(r"expected at most the 6 classes of val that have 3 images .* got 7", alphabets, ways=7)
    broken = alphabets / "alphabet3/character1/2.png"
    broken.write_bytes(b"no image")
    refused(re.escape(repr(str(broken))), alphabets)
    (tmp_path / "half/train/a").mkdir(parents=True)
    refused("got train alone", tmp_path / "half")
    paint(tmp_path / "two/a/0.png", 3)
    refused("three folders or more", tmp_path / "two")


def test_glyphs_of_too_few_typefaces_are_left_out_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"fewer than 26 images .* of train, \d+ of \d+ of val, .* of test"
    ):
        Episodes(shots=5, queries=21)


def test_images_are_cut_to_their_middle_square(tmp_path):
    wide = np.zeros((4, 8), np.uint8)
    wide[:, 2:6] = 200
    for c in "abc":
        for i in range(3):
            (tmp_path / "set" / c).mkdir(parents=True, exist_ok=True)
            Image.fromarray(wide).save(tmp_path / "set" / c / f"{i}.png")
    found = folder_splits(tmp_path / "set", 0)
    (path, *_), *_ = found["train"].values()
    assert (folder_images({"a": [path]}, 4, 1).images == 200).all()
