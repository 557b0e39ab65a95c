"""Classes of a split: characters that typefaces draw alike are one, and each class is thinned.

Images are compared by the cosine of their blurred pixels. Letters that differ by a stroke come to 0.97,
since most of their pixels are equal.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from experiments.few_shot.build_glyphs.drawing import SIZE
from experiments.few_shot.build_glyphs.fonts import LEAST, Typeface
from experiments.few_shot.build_glyphs.scripts import large_forms

MOST = 28  # images of a class
MOST_PER_FAMILY = 12  # images of a class: weights and widths of a family are alike

COPY = 0.995  # cosine of two copies of an outline, in one typeface
SAME = 0.99  # of two images of a class that differ by less than a pixel, of which one is kept
TWINS = 0.4  # fraction of typefaces that draw two characters alike from which they are one class
CASES = 0.9  # median cosine of a small letter and its capital from which they are one class
TYPICAL = 0.15  # least fraction of a typeface's characters that are nearest to their own class
BY_HAND = "O0 Il へヘ りリ 口ロ 二ニ 力カ 夕タ 卜ト 八ハ 工エ 才オ"  # alike in sans serif
Drawings = dict[str, dict[Typeface, np.ndarray]]  # images by character and typeface


class Class(NamedTuple):
    """Characters that look alike, named by the first of them, and the image of each typeface."""

    characters: tuple[str, ...]
    images: dict[Typeface, np.ndarray]


def make_classes(
    drawings: Drawings, scripts: dict[str, str], order: dict[str, dict[Typeface, int]]
) -> list[Class]:
    """The classes of a split that have enough images.

    Args:
        drawings: All images of the split.
        scripts: Script of each character.
        order: For each script, the order in which typefaces are taken.
    Returns:
        The classes, in the order of their characters.
    """
    typical = drop_atypical({c: faces for c, faces in drawings.items() if faces}, scripts)
    joined = join_twins({c: faces for c, faces in typical.items() if faces})
    thinned = [thin(one, order[scripts[one.characters[0]]]) for one in joined]
    return [one for one in thinned if len(one.images) >= LEAST]


def drop_atypical(drawings: Drawings, scripts: dict[str, str]) -> Drawings:
    """Drop typefaces that draw something else: pictures, or letters in another encoding."""
    mean = mean_images(drawings)
    letters_of: dict[tuple[Typeface, str], list[str]] = defaultdict(list)
    for character, faces in drawings.items():
        for face in faces:
            letters_of[face, scripts[character]].append(character)
    keys = {s: [c for c in drawings if scripts[c] == s] for s in set(scripts.values())}
    atypical = set()
    for (face, script), letters in letters_of.items():
        m = np.stack([mean[c] for c in keys[script]])
        m /= np.linalg.norm(m, axis=1, keepdims=True)
        x = blur(np.stack([drawings[c][face] for c in letters]))
        numbers = np.array([keys[script].index(c) for c in letters])
        # The nearest mean need only look like the character's own, which may have twins.
        share = np.mean((m[numbers] * m[(x @ m.T).argmax(1)]).sum(1) > 0.95)
        if share < TYPICAL:
            atypical.add((face, script))
            logging.info("not typical: %s in %s, %.2f", face.style, script, share)
    return {
        c: {face: image for face, image in faces.items() if (face, scripts[c]) not in atypical}
        for c, faces in drawings.items()
    }


def join_twins(drawings: Drawings) -> list[Class]:
    """Classes of characters: those that many typefaces draw alike are one class."""
    comparison = compare_characters(drawings)
    groups = group_twins(list(drawings), comparison)
    ambiguous = ambiguous_images(drawings, groups, comparison.copies)
    members_of: dict[str, list[str]] = defaultdict(list)
    for c in drawings:
        members_of[groups[c]].append(c)
    classes = []
    for members in members_of.values():
        if len(members) > 1:
            logging.info("one class: %s", " ".join(members))
        images: dict[Typeface, np.ndarray] = {}
        for c in members:
            for face, image in drawings[c].items():
                if (face, c) not in ambiguous:
                    # one image of a typeface: that of the first character that it draws
                    images.setdefault(face, image)
        classes.append(Class(tuple(members), images))
    return classes


class Comparison(NamedTuple):
    """How alike typefaces draw pairs of characters.

    Attributes:
        both: How many typefaces draw both [characters, characters].
        alike: How many draw both alike [characters, characters].
        copies: The pairs that each typeface draws by one outline.
        cases: Cosines of the small and the large form in each typeface, by (small, large).
    """

    both: np.ndarray
    alike: np.ndarray
    copies: dict[Typeface, list[tuple[str, str]]]
    cases: dict[tuple[str, str], list[float]]


def compare_characters(drawings: Drawings) -> Comparison:
    """Compare all pairs of characters in each typeface."""
    number = {c: n for n, c in enumerate(drawings)}
    both, alike = (np.zeros((len(number), len(number)), np.int32) for _ in range(2))
    letters_of: dict[Typeface, list[str]] = defaultdict(list)
    for c in drawings:
        for face in drawings[c]:
            letters_of[face].append(c)
    copies: dict[Typeface, list[tuple[str, str]]] = {}
    cases: dict[tuple[str, str], list[float]] = defaultdict(list)
    for face, letters in letters_of.items():
        x = blur(np.stack([drawings[c][face] for c in letters]))
        cosine = x @ x.T
        numbers = np.array([number[c] for c in letters])
        both[np.ix_(numbers, numbers)] += 1
        alike[np.ix_(numbers, numbers)] += cosine > SAME
        pairs = np.argwhere(np.triu(cosine > COPY, 1))
        copies[face] = [(letters[i], letters[j]) for i, j in pairs]
        row = {c: n for n, c in enumerate(letters)}
        for c in letters:
            for large in sorted(large_forms(c) & row.keys()):
                cases[c, large].append(float(cosine[row[c], row[large]]))
    return Comparison(both, alike, copies, cases)


def group_twins(letters: Sequence[str], comparison: Comparison) -> DisjointSet:
    """Groups of characters that look alike."""
    groups = DisjointSet(letters)
    both, alike, _, cases = comparison
    for i, j in np.argwhere(np.triu((both >= 3) & (alike >= TWINS * both), 1)):
        groups.merge(letters[i], letters[j])
    for (small, large), cosines in cases.items():
        if np.median(cosines) > CASES:
            groups.merge(small, large)
    # whatever the fonts say: these differ by context alone
    for a, b in map(tuple, BY_HAND.split()):
        if a in letters and b in letters:
            groups.merge(a, b)
    return groups


def ambiguous_images(
    drawings: Drawings, groups: DisjointSet, copies: dict[Typeface, list[tuple[str, str]]]
) -> set[tuple[Typeface, str]]:
    """Images of one typeface that stand for two classes, such as small letters drawn as capitals.

    Of each pair of copies the one stays in its class that is nearer to the mean of its class.
    """
    mean = {c: m / np.linalg.norm(m) for c, m in mean_images(drawings).items()}
    ambiguous = set()
    for face, pairs in copies.items():
        for pair in pairs:
            if not groups.connected(*pair):
                cosine = {c: float(blur(drawings[c][face][None])[0] @ mean[c]) for c in pair}
                ambiguous.add((face, min(pair, key=cosine.__getitem__)))
    return ambiguous


def thin(full: Class, order: dict[Typeface, int]) -> Class:
    """At most MOST images without near copies, of as many families as possible."""
    kept: dict[Typeface, np.ndarray] = {}
    x = np.zeros((0, SIZE * SIZE), np.float32)
    families: Counter[str] = Counter()
    # typefaces come family by family in turn, so that the first MOST are of as many as there are
    for face in sorted(full.images, key=lambda t: order.get(t, len(order))):
        if len(kept) == MOST:
            break
        one = blur(full.images[face][None])
        if families[face.family] == MOST_PER_FAMILY or (
            len(x) and float((x @ one[0]).max()) > SAME
        ):
            continue
        kept[face], x = full.images[face], np.concatenate([x, one])
        families[face.family] += 1
    return Class(full.characters, kept)


def mean_images(drawings: Drawings) -> dict[str, np.ndarray]:
    """The mean blurred image of each character."""
    return {c: np.mean(blur(np.stack([*faces.values()])), 0) for c, faces in drawings.items()}


def blur(images: np.ndarray) -> np.ndarray:
    """Images under a 3 x 3 filter, [n, 784] of norm 1, so that a shift by one pixel changes little."""
    x = np.pad(images.astype(np.float32), ((0, 0), (1, 1), (1, 1)))
    x = x[:, :-2] + x[:, 1:-1] + x[:, 2:]
    x = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    x = x.reshape(len(x), -1)
    return x / np.linalg.norm(x, axis=1, keepdims=True)
