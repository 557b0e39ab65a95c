"""Images by class: the glyphs of this repository, or folders of images of one's own."""

import csv
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.checks import at_least, one_of
from experiments.shared.stream import seeded
from hoglib.errors import ArgumentValueError

GLYPHS = Path(__file__).parent / "glyphs"
CACHE = Path("runs") / "images"
SPLITS = ("train", "val", "test")
SHARES = (0.16, 0.2)  # val and test, of the classes or groups of a folder, as in miniImageNet
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
MODES = {1: "L", 3: "RGB"}


class ImageClasses(NamedTuple):
    """Images sorted into classes.

    Attributes:
        images: All images [n, channels, height, width], from 0 to 255.
        names: Name of each class.
        members: Numbers of the images of each class.
    """

    images: Tensor
    names: tuple[str, ...]
    members: tuple[Tensor, ...]

    def only(self, classes: Iterable[int]) -> "ImageClasses":
        """The classes with these numbers."""
        kept = [(self.names[n], self.members[n]) for n in classes]
        return self._replace(names=tuple(n for n, _ in kept), members=tuple(m for _, m in kept))


def by_class(images: Tensor, label: Tensor, names: Sequence[str]) -> ImageClasses:
    """Images [n, ...] with labels [n], sorted into classes."""
    # stable: tasks name images by their place in a class
    order = label.argsort(stable=True)
    counts = torch.bincount(label, minlength=len(names)).tolist()
    return ImageClasses(images, tuple(names), order.split(counts))


@cache
def _glyphs() -> tuple[Tensor, Tensor, list[dict[str, str]]]:
    with np.load(GLYPHS / "glyphs.npz") as file:
        images = torch.from_numpy(file["images"]).unsqueeze(1)
        label = torch.from_numpy(file["label"].astype(int))
    with (GLYPHS / "classes.csv").open(encoding="utf-8", newline="") as rows:
        return images, label, list(csv.DictReader(rows))


def glyphs(split: str) -> ImageClasses:
    """The characters of a split, white on black."""
    one_of("split", split, SPLITS)
    images, label, rows = _glyphs()
    every = by_class(images, label, [row["character"] for row in rows])
    return every.only(n for n, row in enumerate(rows) if row["split"] == split)


def folder_classes(root: Path) -> dict[str, list[Path]]:
    """The images of each folder at the first or second level that has some, by its path in root."""
    if not root.is_dir():
        kind = "a file" if root.exists() else "nothing"
        raise ArgumentValueError(
            f"source: expected a folder of class folders of images, got {str(root)!r}, which is {kind}"
            "; null takes the glyphs that come with the repository."
        )
    places = [p for p in sorted(root.iterdir()) if p.is_dir()]
    places += [q for p in places for q in sorted(p.iterdir()) if q.is_dir()]
    found = {
        place.relative_to(root).as_posix(): files
        for place in places
        if (files := sorted(p for p in place.iterdir() if p.suffix.lower() in ENDINGS))
    }
    if not found:
        raise ArgumentValueError(
            f"source: expected class folders of images in {str(root)!r}, at its first or second level, "
            f"got none; images end in {', '.join(ENDINGS)}."
        )
    return dict(sorted(found.items()))


def folder_splits(root: Path, seed: int) -> dict[str, dict[str, list[Path]]]:
    """Class folders of each split: those in root/train, val and test, else drawn by a seed.

    The folders at the first level are drawn, so that groups, such as alphabets, stay whole.
    """
    present = [split for split in SPLITS if (root / split).is_dir()]
    if present:
        if len(present) < len(SPLITS):
            raise ArgumentValueError(
                f"source: expected train, val and test in {str(root)!r}, or none of these, got "
                f"{', '.join(present)} alone; make the others, or rename it."
            )
        return {split: folder_classes(root / split) for split in SPLITS}
    classes = folder_classes(root)
    # sorted, since a file system lists folders in any order
    groups = sorted({name.split("/")[0] for name in classes})
    if len(groups) < len(SPLITS):
        raise ArgumentValueError(
            f"source: expected three folders or more in {str(root)!r}, one for each of train, val and "
            f"test, got {len(groups)}; add some."
        )
    # of few groups, one each for validation and test all the same
    held = [max(1, round(share * len(groups))) for share in SHARES]
    order = torch.randperm(len(groups), generator=seeded(seed))
    splits: dict[str, dict[str, list[Path]]] = {}
    for split, picks in zip(SPLITS, order.split([len(groups) - sum(held), *held]), strict=True):
        drawn = {groups[n] for n in picks.tolist()}
        splits[split] = {n: files for n, files in classes.items() if n.split("/")[0] in drawn}
    return splits


def read_image(path: Path, size: int, channels: int) -> np.ndarray:
    """The central square of an image, scaled: [channels, size, size]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = file.convert(MODES[channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ArgumentValueError(
            f"source: expected an image that Pillow can read, got {str(path)!r} ({error}); repair it "
            "or remove it."
        ) from error
    # BOX averages the pixels that fall into one
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.BOX)
    return np.asarray(fitted, dtype=np.uint8).reshape(size, size, channels).transpose(2, 0, 1)


def folder_images(classes: dict[str, list[Path]], size: int, channels: int) -> ImageClasses:
    """The images of class folders, cached in runs/images for a quick start."""
    at_least("size", size, 1)
    one_of("channels", str(channels), [str(n) for n in MODES])
    files = [(n, path) for n, paths in enumerate(classes.values()) for path in paths]
    # size and time of change, as reading the pixels is what the cache saves
    fingerprint = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for _, p in files]
    key = hashlib.sha256(repr((fingerprint, size, channels)).encode()).hexdigest()[:16]
    cached = CACHE / f"{key}.npy"
    if cached.exists():
        images = np.load(cached)
    else:
        images = np.stack([read_image(path, size, channels) for _, path in files])
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_suffix(".part.npy")  # another process must not read a file half written
        np.save(part, images)
        part.replace(cached)
    label = torch.tensor([n for n, _ in files])
    return by_class(torch.from_numpy(images), label, [*classes])


def folders(root: Path, seed: int, size: int, channels: int) -> dict[str, ImageClasses]:
    """The images of each split of a folder."""
    splits = folder_splits(root, seed)
    return {split: folder_images(classes, size, channels) for split, classes in splits.items()}
