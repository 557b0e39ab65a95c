"""The digits: the split, the stream, bad input."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch.testing import assert_close

from experiments.data.digits import Digits


def rows(images):
    return {tuple(x.tolist()) for x in images.x}


def test_the_parts_have_no_image_in_common_and_are_scikit_learns():
    data = Digits(seed=3)
    (batch,) = data.val_dataloader()
    assert (len(data.train.x), len(batch.x)) == (1297, 500)
    assert not rows(data.train) & rows(batch)
    x, label = load_digits(return_X_y=True)
    expected = sorted((*(row / 8 - 1), digit) for row, digit in zip(x, label, strict=True))
    parts = [torch.cat([part.x, part.label[:, None]], 1) for part in (data.train, batch)]
    assert_close(torch.tensor(expected).float(), torch.tensor(sorted(torch.cat(parts).tolist())))


def test_there_may_be_a_third_part_to_choose_by():
    data = Digits(train=1000, test=500, val=200, seed=3)
    (chosen_by,), (tested,) = data.val_dataloader(), data.test_dataloader()
    assert (len(data.train.x), len(chosen_by.x), len(tested.x)) == (1000, 200, 500)
    parts = [rows(part) for part in (data.train, chosen_by, tested)]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    without = Digits(train=1000, test=500, seed=3)
    assert_close(without.train, data.train, rtol=0, atol=0)
    assert_close(without.held_out, tested, rtol=0, atol=0)
    assert_close([*without.val_dataloader()], [tested], rtol=0, atol=0)
    assert (data.options["val"], without.options.get("val")) == (200, None)


def test_the_split_and_the_stream_belong_to_the_seed():
    ours, same, other = (
        list(Digits(seed=seed, batch=50, iterations=3).train_dataloader()) for seed in (0, 0, 1)
    )
    for a, b in zip(ours, same, strict=True):
        assert_close(a, b, rtol=0, atol=0)
        assert a.x.shape == (50, 64)
        assert len(rows(a)) == 50
    assert not torch.equal(ours[0].x, other[0].x)
    assert not torch.equal(ours[0].x, ours[1].x)


def test_a_whole_batch_is_all_of_train():
    data = Digits(train=100, test=10, iterations=2)
    for batch in data.train_dataloader():
        assert_close(batch, data.train, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 1500, "test": 298}, "expected 1797 images in both, got 1500 and 298"),
        ({"train": 1297, "val": 1}, "train, test, val: .* in all, got 1297, 500 and 1"),
        ({"val": -1}, "val: expected"),
        ({"train": 0}, "train: expected"),
        ({"test": 1}, "test: expected"),
        ({"iterations": 0}, "iterations: expected"),
        ({"train": 100, "batch": 101}, "at most the 100 images of train, got 101"),
    ],
    ids=[
        "too many",
        "too many of three",
        "fewer than none",
        "none",
        "one",
        "no batch",
        "more than there are",
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Digits(**options)
