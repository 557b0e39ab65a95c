"""Classes of different splits or scripts that look alike, of which one is kept."""

import logging
from collections.abc import Sequence

import numpy as np

from experiments.few_shot.build_glyphs.classes import Class, blur
from experiments.few_shot.build_glyphs.drawing import SIZE
from experiments.few_shot.build_glyphs.scripts import SCRIPTS

CONFUSED = 0.6  # two classes are confused if this fraction of their images is as near to the other


def drop_confused(classes: dict[str, list[Class]]) -> dict[str, list[Class]]:
    """Keep one class of those that look alike without a common typeface, such as circles.

    Two classes are confused if, in both, the nearest image of another family belongs to the other
    class about as often as to the own. The one in train is dropped first, then that in val, then that
    of fewer images.
    """
    everything = [(split, one) for split in SCRIPTS for one in classes[split]]
    owner, best = nearest_in_classes([one for _, one in everything])
    rank = [(("train", "val", "test").index(s), len(one.images)) for s, one in everything]
    dropped: set[int] = set()
    nearest = best.argmax(1)
    while True:
        confusion = np.zeros((len(everything), len(everything)))
        np.add.at(confusion, (owner, nearest), 1)
        confusion /= confusion.sum(1, keepdims=True)
        # a class whose images are near to no other of it would be confused with all
        to_own = np.maximum(confusion.diagonal(), 0.05)
        ratio = np.minimum(confusion / to_own[:, None], (confusion / to_own[:, None]).T)
        np.fill_diagonal(ratio, 0)
        ratio[[*dropped]] = 0
        a, b = (int(n) for n in np.unravel_index(ratio.argmax(), ratio.shape))
        if ratio[a, b] < CONFUSED:
            break
        drop, keep = sorted((a, b), key=lambda n: (rank[n], -n))
        logging.info(
            "dropped: %s (%s), which looks like %s (%s)",
            everything[drop][1].characters[0], everything[drop][0],
            everything[keep][1].characters[0], everything[keep][0],
        )  # fmt: skip
        dropped.add(drop)
        # images that were nearest to the dropped class have another nearest one now
        best[:, drop] = -1
        again = nearest == drop
        nearest[again] = best[again].argmax(1)
    kept = [pair for n, pair in enumerate(everything) if n not in dropped]
    return {split: [one for s, one in kept if s == split] for split in SCRIPTS}


def nearest_in_classes(classes: Sequence[Class]) -> tuple[np.ndarray, np.ndarray]:
    """The class of each image, and its largest cosine [image, class] with images of other families."""
    rows = [(n, face, image) for n, one in enumerate(classes) for face, image in one.images.items()]
    numbers = {family: n for n, family in enumerate(sorted({face.family for _, face, _ in rows}))}
    owner = np.array([n for n, *_ in rows])
    family = np.array([numbers[face.family] for _, face, _ in rows])
    x = downsample(np.stack([image for *_, image in rows]))
    begins = np.searchsorted(owner, np.arange(len(classes)))
    parts = []
    for part in np.array_split(np.arange(len(rows)), len(rows) // 500 + 1):
        # some images at a time, since all pairs are billions
        cosine = x[part] @ x.T
        # weights and widths of a family are near copies of one another
        cosine[family[part, None] == family[None]] = -1
        parts.append(np.maximum.reduceat(cosine, begins, axis=1).astype(np.float16))
    return owner, np.concatenate(parts)


def downsample(images: np.ndarray) -> np.ndarray:
    """Blurred images at half the size, [n, 196] of norm 1, to compare all with all."""
    x = blur(images).reshape(len(images), SIZE // 2, 2, SIZE // 2, 2).sum((2, 4))
    x = x.reshape(len(x), -1)
    return x / np.linalg.norm(x, axis=1, keepdims=True)
