"""Builds the few-shot images of experiments.data.glyphs out of open fonts.

    mkdir -p build/fonts && cd build/fonts
    apt-get download $(cat ../../experiments/data/glyphs/packages.txt)
    for package in *.deb; do dpkg-deb -x $package ${package%%_*}; done
    cd ../..
    python -m experiments.data.build_glyphs --fonts build/fonts --out experiments/data/glyphs

packages.txt names Debian packages with their versions; each lies in a folder of its own name under
--fonts, with its copyright file. The fonts of matplotlib are always among them. The same fonts give
the same files: all choices are by fixed order or by hashes of names.

A class is a character, an image one typeface's drawing of it, cropped to its ink, scaled to 22 pixels
in the larger direction and set into the middle of 28 x 28. Scripts belong to one split each, and so do
font families: images of a split are those of its scripts in its families, so that neither characters
nor families of a test were seen in training.
"""

import argparse
import contextlib
import csv
import hashlib
import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fontTools.ttLib import TTCollection, TTFont, TTLibError
from fontTools.unicodedata import script as script_of
from PIL import Image, ImageDraw, ImageFont

from experiments.data.episodes import write_fixed
from hoglib.errors import ArgumentValueError

SIZE, INK = 28, 22
LARGE = 128  # pixels of an em before scaling down: enough that hinting does not show
LEVELS = 15  # grey values are multiples of 255 / 15: 28 x 28 shows no more, and they compress
MOST, LEAST = 28, 20  # images of a class
OF_A_FAMILY = 12  # images of a class at most: weights and widths are alike, families are not
POOL = 70  # typefaces tried for a script: those first by hash, and as many of widest coverage

SCRIPTS = {
    "train": "Latn Grek Cyrl Armn Hani Hira Kana Hang Deva Beng Gujr Telu Cher Cans Runr",
    "val": "Arab Mymr",
    "test": "Hebr Thai Laoo Geor Khmr Ethi Mlym",
}
SPLIT_OF = {script: split for split, scripts in SCRIPTS.items() for script in scripts.split()}

# Scripts of thousands of characters lend this many, those that most typefaces have.
AT_MOST = {"Hani": 240, "Hang": 160}

# Half of the fonts draw modern letters in the place of old Georgian capitals, so these are no classes.
UNCLEAR = frozenset(map(chr, range(0x10A0, 0x10D0)))

# Families that draw many scripts go where they are needed; all others by `splits_of`.
GIVEN = {
    "Noto Sans": "train",
    "Noto Serif": "test",
    "DejaVu": "train",
    "FreeSans": "train",
    "FreeSerif": "train",
    "FreeMono": "train",
    "MPH 2B Damase": "train",
}

# Names under which one design goes round, by how they begin; families otherwise are names.
ALIASES = {
    "Noto Sans": "Noto Sans",
    "Noto Serif": "Noto Serif",
    "DejaVu": "DejaVu",
    "Bitstream Vera": "DejaVu",
    "Arimo": "Liberation Sans",
    "Tinos": "Liberation Serif",
    "Cousine": "Liberation Mono",
    "Arial for Povray": "Liberation Sans",
    "Monlam Uni": "Monlam Uni",
    "Khmer Busra": "Khmer Busra",
    "Khmer Mondulkiri": "Khmer Mondulkiri",
    "Shimenkan": "Shimenkan",
    "Linux Libertine": "Linux Libertine",
    "Linux Biolinum": "Linux Biolinum",
    "PakType Naskh Basic": "PakType Naskh Basic",
    "KacstTitle": "KacstTitle",
    "FreeFarsi": "FreeFarsi",
    "Ezra SIL": "Ezra SIL",
    "Averia": "Averia",
    "Monoid": "Monoid",
}
STYLE = re.compile(
    r"\b(regular|roman|book|bold|demi|semi|extra|ultra|light|medium|black|thin|heavy|hairline|italic|"
    r"oblique|slanted|condensed|cond|narrow|compressed|extended|expanded|normal|otf|ttf|std|pro|"
    r"(extra|semi|demi|ultra)(bold|light|condensed|expanded))\b",
    re.IGNORECASE,
)


class Typeface(NamedTuple):
    """A font of a file; `style` is its full name."""

    path: str
    number: int
    package: str
    family: str
    style: str
    characters: frozenset[str]


class Class(NamedTuple):
    """Characters that look alike, named by the first of them, and each typeface's image."""

    characters: tuple[str, ...]
    images: dict[Typeface, np.ndarray]


def chance(text: str) -> str:
    """A fixed order that has nothing to do with names."""
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def script(character: str) -> str | None:
    """The script of a letter or digit that stands for itself and needs no other; or None."""
    if unicodedata.category(character) not in ("Lu", "Ll", "Lo", "Nd"):
        return None
    hangul = "가" <= character <= "힣"  # which alone are letters although Unicode takes them apart
    if unicodedata.normalize("NFKD", character) != character and not hangul:
        return None  # accents are too small for 28 pixels, and forms of width or shape are twins
    if character.isascii():
        return "Latn"
    found = script_of(character)
    if found == "Hang" and not hangul:
        return None
    return found if found in SPLIT_OF else None


def family_of(name: str) -> str:
    """The name without words of weight, width and slope."""
    name = re.sub(r"[-_]", " ", name.split(",")[0])
    plain = " ".join(STYLE.sub(" ", name).split()) or " ".join(name.split())
    for begin, family in ALIASES.items():
        if plain.startswith(begin):
            return family
    return plain


# Fonts are read.


def fonts_in(path: Path) -> int:
    if path.suffix.lower() != ".ttc":
        return 1
    with TTCollection(str(path), lazy=True) as collection:
        return len(collection.fonts)


def typefaces_of(place: tuple[Path, str]) -> list[Typeface]:
    """Those of a file: outlines of letters, with a name; none if it cannot be read as a font."""
    path, package = place
    logging.getLogger("fontTools").setLevel(logging.CRITICAL)  # it tells of harmless irregularities
    found = []
    try:
        for number in range(fonts_in(path)):
            with TTFont(str(path), lazy=True, fontNumber=number) as font:
                if not {"glyf", "CFF ", "CFF2"} & set(font.keys()) or "name" not in font:
                    continue
                names, cmap = font["name"], font.getBestCmap() or {}
                family, style = names.getBestFamilyName() or "", names.getBestSubFamilyName() or ""
                style = names.getDebugName(4) or f"{family} {style}".strip()
                letters = frozenset(chr(code) for code in cmap if script(chr(code)))
            if family and letters:
                found.append(
                    Typeface(str(path), number, package, family_of(family), style, letters)
                )
    except (TTLibError, OSError, ValueError, KeyError, AssertionError):
        return []
    return found


def scan(folders: Sequence[Path], jobs: int) -> list[Typeface]:
    """All typefaces, once each, in a fixed order."""
    import matplotlib

    files = [(Path(matplotlib.get_data_path()) / "fonts" / "ttf", "matplotlib")]
    for folder in folders:
        if not folder.is_dir():
            raise ArgumentValueError(
                f"--fonts: expected a folder of unpacked packages, got {str(folder)!r}; the commands "
                "at the head of this file make one."
            )
        files += [
            (package, package.name) for package in sorted(folder.iterdir()) if package.is_dir()
        ]
    places = [
        (path, package)
        for root, package in files
        for path in sorted(root.rglob("*"))
        if path.suffix.lower() in (".ttf", ".otf", ".ttc")
        and path.is_file()
        and not path.is_symlink()
        and "LastResort" not in path.name  # its glyphs are boxes that name a script
    ]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as executor:
        read = executor.map(typefaces_of, places, chunksize=16)
        typefaces = [typeface for found in read for typeface in found]
    once = {(t.family, t.style): t for t in reversed(typefaces)}
    return sorted(once.values(), key=lambda t: (t.family, t.style))


def in_turn(typefaces: Iterable[Typeface]) -> list[Typeface]:
    """One of each family in an order of chance, the plainest, then the second of each, and so on."""
    families: dict[str, list[Typeface]] = defaultdict(list)
    for typeface in sorted(typefaces, key=plainness):
        families[typeface.family].append(typeface)
    turns = [
        (order, chance(family), typeface)
        for family, styles in families.items()
        for order, typeface in enumerate(styles)
    ]
    return [typeface for *_, typeface in sorted(turns, key=lambda turn: turn[:2])]


def plainness(typeface: Typeface) -> tuple[int, str]:
    """Regular first, then bold and italic, then the others as they come by hash."""
    style = typeface.style.lower().replace("oblique", "italic")
    words = ("bold", "italic", "light", "thin", "black", "medium", "cond", "semi", "extra", "heavy")
    found = [word for word in words if word in style]
    rank = {(): 0, ("bold",): 1, ("italic",): 2, ("bold", "italic"): 3}.get(tuple(found), 4)
    return rank, chance(f"{typeface.style} {Path(typeface.path).name}")


# Families and typefaces are chosen.


def splits_of(typefaces: Iterable[Typeface]) -> dict[str, str]:
    """To each family its split: test if it draws a script of test, else val likewise, else train.

    Held-out scripts have few families and Latin has more than a thousand, so these can spare them.
    """
    letters: dict[str, Counter[str]] = defaultdict(Counter)
    for typeface in typefaces:
        letters[typeface.family] |= Counter(str(script(c)) for c in typeface.characters)
    splits = {}
    for family, counts in letters.items():
        has = {SPLIT_OF[s] for s, n in counts.items() if n >= LEAST}
        splits[family] = GIVEN.get(family) or next(
            (s for s in ("test", "val") if s in has), "train"
        )
    return splits


def chosen(typefaces: Sequence[Typeface], script_: str) -> tuple[list[Typeface], list[str]]:
    """Typefaces to try for a script, and its characters that enough of them have."""
    has = {t: [c for c in t.characters if script(c) == script_] for t in typefaces}
    drawn = [t for t in typefaces if len(has[t]) >= LEAST]
    turns = in_turn(drawn)
    widest = sorted(turns, key=lambda t: -len(has[t]))
    pool = set(turns[:POOL]) | set(widest[:POOL])
    ordered = [t for t in turns if t in pool]
    seen: Counter[str] = Counter(c for t in ordered for c in has[t])
    letters = sorted((c for c in seen if seen[c] >= LEAST), key=lambda c: (-seen[c], chance(c)))
    return ordered, sorted(letters[: AT_MOST.get(script_)])


# Glyphs are drawn.


def fitted(mask: Image.Image) -> np.ndarray | None:
    """The ink in the middle of 28 x 28, as grey levels; None where there is none."""
    box = mask.getbbox()
    if box is None:
        return None
    ink = mask.crop(box)
    scale = INK / max(ink.size)
    width, height = (max(1, round(side * scale)) for side in ink.size)
    small = ink.resize(
        (width, height), Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR
    )
    image = Image.new("L", (SIZE, SIZE))
    image.paste(small, ((SIZE - width) // 2, (SIZE - height) // 2))
    levels = np.rint(np.asarray(image, dtype=np.float32) * (LEVELS / 255)).astype(np.uint8)
    return levels if (levels > LEVELS // 2).sum() >= 5 else None


def drawn(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray | None:
    left, top, right, bottom = font.getbbox(character)
    width, height = int(right - left) + 8, int(bottom - top) + 8
    if not (0 < width < 20 * LARGE and 0 < height < 20 * LARGE):
        return None
    mask = Image.new("L", (width, height))
    ImageDraw.Draw(mask).text((4 - left, 4 - top), character, font=font, fill=255)
    return fitted(mask)


def render(task: tuple[Typeface, Sequence[str]]) -> dict[str, np.ndarray]:
    """The images of a typeface: those of its characters that are neither blank nor fallback boxes."""
    typeface, characters = task
    try:
        font = ImageFont.truetype(
            typeface.path, LARGE, typeface.number, layout_engine=ImageFont.Layout.BASIC
        )
        missing = {
            image.tobytes()
            for c in ("\U0010fffd", "\uffff", "\u0378", "\u25cc")  # the last is the dotted circle
            if (image := drawn(font, c)) is not None
        }
        images = {
            c: image
            for c in characters
            if c in typeface.characters and (image := drawn(font, c)) is not None
        }
    except (OSError, ValueError):
        return {}
    repeated = Counter(image.tobytes() for image in images.values())
    # One drawing for many characters is a box or a placeholder, whatever its name; twins are four at
    # most: o, O and their Greek and Cyrillic likes are drawn in six.
    return {
        c: image
        for c, image in images.items()
        if image.tobytes() not in missing and repeated[image.tobytes()] <= 8
    }


# Images are compared.


def blurred(images: np.ndarray) -> np.ndarray:
    """[n, 784] of norm 1: each image under a filter of 3 x 3, so that a pixel aside is near."""
    x = np.pad(images.astype(np.float32), ((0, 0), (1, 1), (1, 1)))
    x = x[:, :-2] + x[:, 1:-1] + x[:, 2:]
    x = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    x = x.reshape(len(x), -1)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


# Cosines of blurred images. Letters that differ by a stroke come to 0.97, since most of them is equal.
COPY = 0.995  # of one typeface: the same outline
SAME = 0.99  # of one class: copies of an outline, or weights that differ by less than a pixel
TWINS = (
    0.4  # share of the typefaces that draw two characters as copies, from which they are one class
)
CASES = 0.9  # median likeness of a small letter and its capital from which they are one class
CONFUSED = 0.6  # classes are twins if images are as near the other, but for this, as their own
TYPICAL = 0.15  # share of a typeface's characters, at least, that are nearest to their own class
BY_HAND = "O0 Il へヘ りリ 口ロ 二ニ 力カ 夕タ 卜ト 八ハ 工エ 才オ"  # in sans serif, or to the eye
Drawings = dict[str, dict[Typeface, np.ndarray]]


def means(drawings: Drawings) -> dict[str, np.ndarray]:
    return {c: np.mean(blurred(np.stack([*faces.values()])), 0) for c, faces in drawings.items()}


def typical(drawings: Drawings, scripts: dict[str, str]) -> Drawings:
    """Without typefaces that draw something else: pictures, or letters of an encoding of their own."""
    mean = means(drawings)
    of_face: dict[tuple[Typeface, str], list[str]] = defaultdict(list)
    for character, faces in drawings.items():
        for face in faces:
            of_face[face, scripts[character]].append(character)
    keys = {s: [c for c in drawings if scripts[c] == s] for s in set(scripts.values())}
    bad = set()
    for (face, script_), letters in of_face.items():
        m = np.stack([mean[c] for c in keys[script_]])
        m /= np.linalg.norm(m, axis=1, keepdims=True)
        x = blurred(np.stack([drawings[c][face] for c in letters]))
        at = np.array([keys[script_].index(c) for c in letters])
        # A character with twins is nearest to any of these, hence by likeness and not by name.
        right = np.mean((m[at] * m[(x @ m.T).argmax(1)]).sum(1) > 0.95)
        if right < TYPICAL:
            bad.add((face, script_))
            logging.info("not typical: %s in %s, %.2f", face.style, script_, right)
    return {
        c: {face: image for face, image in faces.items() if (face, scripts[c]) not in bad}
        for c, faces in drawings.items()
    }


def large_forms(character: str) -> set[str]:
    """The capital of a small letter, the large form of a small kana."""
    forms = {character.upper()}
    name = unicodedata.name(character, "").replace("LETTER SMALL ", "LETTER ")
    with contextlib.suppress(KeyError):  # a name without "small" may be no character's
        forms.add(unicodedata.lookup(name))
    return forms - {character}


class Twins:
    """Characters that belong together, by pairs that do."""

    def __init__(self, letters: Sequence[str]) -> None:
        self.number = {c: n for n, c in enumerate(letters)}
        self.first = {c: c for c in letters}

    def join(self, a: str, b: str) -> None:
        a, b = sorted((self.of(a), self.of(b)), key=lambda c: self.number[c])
        self.first[b] = a

    def of(self, c: str) -> str:
        while self.first[c] != c:
            c = self.first[c]
        return c


def joined(drawings: Drawings) -> list[Class]:
    """Classes: characters that many typefaces draw alike are one, of an image a typeface."""
    letters = list(drawings)
    number = {c: n for n, c in enumerate(letters)}
    both, alike = (np.zeros((len(letters), len(letters)), np.int32) for _ in range(2))
    of_face: dict[Typeface, list[str]] = defaultdict(list)
    for c in letters:
        for face in drawings[c]:
            of_face[face].append(c)
    copies: dict[Typeface, list[tuple[str, str]]] = {}
    likeness: dict[tuple[str, str], list[float]] = defaultdict(list)
    for face, own in of_face.items():
        x = blurred(np.stack([drawings[c][face] for c in own]))
        at = np.array([number[c] for c in own])
        cosine = x @ x.T
        both[np.ix_(at, at)] += 1
        alike[np.ix_(at, at)] += cosine > SAME
        copies[face] = [(own[i], own[j]) for i, j in np.argwhere(np.triu(cosine > COPY, 1))]
        place = {c: n for n, c in enumerate(own)}
        for c in own:
            for large in sorted(large_forms(c) & place.keys()):
                likeness[c, large].append(float(cosine[place[c], place[large]]))
    twins = Twins(letters)
    for i, j in np.argwhere(np.triu((both >= 3) & (alike >= TWINS * both), 1)):
        twins.join(letters[i], letters[j])
    for (a, b), cosines in likeness.items():
        if np.median(cosines) > CASES:
            twins.join(a, b)
    for a, b in map(tuple, BY_HAND.split()):
        if a in number and b in number:
            twins.join(a, b)
    mean = {c: m / np.linalg.norm(m) for c, m in means(drawings).items()}
    # What one typeface alone draws alike, such as small letters as capitals, stays in one class: that
    # to whose mean it is nearer.
    ambiguous: set[tuple[Typeface, str]] = set()
    for face, pairs in copies.items():
        for pair in pairs:
            if twins.of(pair[0]) != twins.of(pair[1]):
                near = {c: float(blurred(drawings[c][face][None])[0] @ mean[c]) for c in pair}
                ambiguous.add((face, min(pair, key=lambda c: near[c])))
    groups: dict[str, list[str]] = defaultdict(list)
    for c in letters:
        groups[twins.of(c)].append(c)
    classes = []
    for members in groups.values():
        if len(members) > 1:
            logging.info("one class: %s", " ".join(members))
        images: dict[Typeface, np.ndarray] = {}
        for c in members:
            for face, image in drawings[c].items():
                if (face, c) not in ambiguous:
                    images.setdefault(face, image)
        classes.append(Class(tuple(members), images))
    return classes


def thinned(found: Class, turns: dict[Typeface, int]) -> Class:
    """At most MOST images, as many families as can be; no copies."""
    kept: dict[Typeface, np.ndarray] = {}
    x = np.zeros((0, SIZE * SIZE), np.float32)
    families: Counter[str] = Counter()
    for face in sorted(found.images, key=lambda t: turns.get(t, len(turns))):
        if len(kept) == MOST:
            break
        one = blurred(found.images[face][None])
        if families[face.family] == OF_A_FAMILY or (len(x) and float((x @ one[0]).max()) > SAME):
            continue
        kept[face], x = found.images[face], np.concatenate([x, one])
        families[face.family] += 1
    return Class(found.characters, kept)


def halved(images: np.ndarray) -> np.ndarray:
    """[n, 196] of norm 1: blurred images at half the size, for comparing all with all."""
    x = blurred(images).reshape(len(images), SIZE // 2, 2, SIZE // 2, 2).sum((2, 4))
    x = x.reshape(len(x), -1)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def nearest_by_class(found: Sequence[Class]) -> tuple[np.ndarray, np.ndarray]:
    """The class of each image, and [image, class] how near the nearest of another family is."""
    rows = [(n, face, image) for n, one in enumerate(found) for face, image in one.images.items()]
    numbers = {family: n for n, family in enumerate(sorted({face.family for _, face, _ in rows}))}
    owner = np.array([n for n, *_ in rows])
    family = np.array([numbers[face.family] for _, face, _ in rows])
    x = halved(np.stack([image for *_, image in rows]))
    begins = np.searchsorted(owner, np.arange(len(found)))
    parts = []
    for part in np.array_split(np.arange(len(rows)), len(rows) // 500 + 1):
        cosine = x[part] @ x.T
        cosine[family[part, None] == family[None]] = -1
        parts.append(np.maximum.reduceat(cosine, begins, axis=1).astype(np.float16))
    return owner, np.concatenate(parts)


def apart(classes: dict[str, list[Class]]) -> dict[str, list[Class]]:
    """One class of those that look alike without a typeface in common, such as circles of all scripts.

    They are twins if an image's nearest one of another family is in the other class about as often as
    in its own, in both. The one in train goes first, then that in val, then that of fewer images.
    """
    everything = [(split, found) for split in SCRIPTS for found in classes[split]]
    owner, best = nearest_by_class([found for _, found in everything])
    rank = [(("train", "val", "test").index(s), len(found.images)) for s, found in everything]
    gone: set[int] = set()
    nearest = best.argmax(1)
    while True:
        confusion = np.zeros((len(everything), len(everything)))
        np.add.at(confusion, (owner, nearest), 1)
        confusion /= confusion.sum(1, keepdims=True)
        to_own = np.maximum(confusion.diagonal(), 0.05)
        ratio = np.minimum(confusion / to_own[:, None], (confusion / to_own[:, None]).T)
        np.fill_diagonal(ratio, 0)
        ratio[[*gone]] = 0
        a, b = (int(n) for n in np.unravel_index(ratio.argmax(), ratio.shape))
        if ratio[a, b] < CONFUSED:
            break
        drop, keep = sorted((a, b), key=lambda n: (rank[n], -n))
        logging.info(
            "dropped, a twin is kept: %s (%s) of %s (%s)",
            everything[drop][1].characters[0], everything[drop][0],
            everything[keep][1].characters[0], everything[keep][0],
        )  # fmt: skip
        gone.add(drop)
        best[:, drop] = -1
        again = nearest == drop
        nearest[again] = best[again].argmax(1)
    kept = [pair for n, pair in enumerate(everything) if n not in gone]
    return {split: [found for s, found in kept if s == split] for split in SCRIPTS}


def classes_of(
    drawings: Drawings, scripts_of: dict[str, str], turns: dict[str, dict[Typeface, int]]
) -> list[Class]:
    """The classes of a split, of enough images, out of all that was drawn."""
    drawings = typical({c: faces for c, faces in drawings.items() if faces}, scripts_of)
    found = joined({c: faces for c, faces in drawings.items() if faces})
    thin = [thinned(one, turns[scripts_of[one.characters[0]]]) for one in found]
    return [one for one in thin if len(one.images) >= LEAST]


def build(folders: Sequence[Path], jobs: int) -> dict[str, list[Class]]:
    """The classes of each split, in the order of their scripts and characters."""
    typefaces = scan(folders, jobs)
    splits = splits_of(typefaces)
    classes: dict[str, list[Class]] = {}
    for split, names in SCRIPTS.items():
        mine = [t for t in typefaces if splits[t.family] == split]
        wanted: dict[Typeface, list[str]] = defaultdict(list)
        turns: dict[str, dict[Typeface, int]] = {}
        scripts_of: dict[str, str] = {}
        for name in names.split():
            pool, letters = chosen(mine, name)
            for face in pool:
                wanted[face] += letters
            turns[name] = {face: n for n, face in enumerate(pool)}
            scripts_of |= dict.fromkeys(letters, name)
        drawings: Drawings = {c: {} for c in scripts_of}
        with ProcessPoolExecutor(jobs, get_context("spawn")) as executor:
            rendered = executor.map(render, list(wanted.items()), chunksize=4)
            for face, images in zip(wanted, rendered, strict=True):
                for c, image in images.items():
                    drawings[c][face] = image
        classes[split] = classes_of(drawings, scripts_of, turns)
    return {
        split: [one for one in found if not UNCLEAR.intersection(one.characters)]
        for split, found in apart(classes).items()
    }


# Licences are read in the copyright files of the packages.

LICENCES = {
    r"SIL Open Font|\bOFL\b|Open Font License|SIL-1": "OFL",
    r"\b[AL]?GPL|GNU (Lesser )?General Public": "GPL",
    r"Bitstream[- ]Vera": "Bitstream Vera",
    r"Apache": "Apache",
    r"\bMIT\b|Expat|X11 License|Permission is hereby granted, free of charge": "MIT",
    r"GUST": "GUST",
    r"LPPL|LaTeX Project Public": "LPPL",
    r"IPA[- ]": "IPA",
    r"Arphic|ARPHIC": "Arphic",
    r"Artistic": "Artistic",
    r"\bBSD\b": "BSD",
    r"CC0|[Pp]ublic[ -][Dd]omain": "public domain",
    r"CC-BY|Creative Commons": "Creative Commons",
    r"M\+ FONTS|mplus|M\+ Font": "M+",
}


def licence(folder: Path) -> str:
    """What a package's copyright file calls the licences of all but Debian's own files."""
    path = next(iter(sorted(folder.glob("usr/share/doc/*/copyright"))), None)
    text = path.read_text(errors="replace") if path else ""
    paragraphs = [p for p in re.split(r"\n\s*\n", text) if re.match(r"(?i)files:", p.strip())]
    others = [p for p in paragraphs if not re.match(r"(?i)files:\s*debian/", p.strip())]
    named = [re.search(r"(?mi)^license:[ \t]*(\S.*)$", p) for p in others]
    names = [" ".join(match[1].split()) for match in named if match]
    names = names or [name for pattern, name in LICENCES.items() if re.search(pattern, text)]
    return ", ".join(dict.fromkeys(names)) or "see the package"


def write(classes: dict[str, list[Class]], folders: Sequence[Path], out: Path) -> None:
    """glyphs.npz, tasks.npz, classes.csv, typefaces.csv and FONTS.csv."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    faces: list[int] = []
    rows: list[list[Any]] = []
    numbers: dict[Typeface, int] = {}
    split_of: dict[Typeface, str] = {}
    used: Counter[Typeface] = Counter()
    for split in SCRIPTS:
        every = sorted(
            {t for found in classes[split] for t in found.images},
            key=lambda t: (t.family, t.style, t.path),
        )
        for face in every:
            numbers[face], split_of[face] = len(numbers), split
        for found in classes[split]:
            first = found.characters[0]
            for face in sorted(found.images, key=lambda t: numbers[t]):
                images.append(found.images[face])
                labels.append(len(rows))
                faces.append(numbers[face])
                used[face] += 1
            rows.append(
                [len(rows), f"U+{ord(first):04X}", first, " ".join(found.characters[1:]), script(first),
                 split, len(found.images), len({t.family for t in found.images})]
            )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        out / "glyphs.npz",
        images=np.stack(images) * (255 // LEVELS),
        label=np.array(labels, np.uint16),
        typeface=np.array(faces, np.uint16),
    )
    counts = torch.tensor([len(found.images) for found in classes["test"]])
    write_fixed(counts, out / "tasks.npz")
    header = ["class", "code", "character", "also", "script", "split", "images", "families"]
    table(out / "classes.csv", header, rows)
    table(
        out / "typefaces.csv",
        ["typeface", "family", "style", "package", "split", "images"],
        [[n, t.family, t.style, t.package, split_of[t], used[t]] for t, n in numbers.items()],
    )
    roots = {path.name: path for folder in folders for path in folder.iterdir()}
    families: dict[tuple[str, str], int] = Counter((t.package, t.family) for t in numbers)
    licences = {package: licence(roots[package]) for package, _ in families if package in roots}
    licences["matplotlib"] = "Bitstream Vera, OFL (STIX), BaKoMa (Computer Modern)"
    table(
        out / "FONTS.csv",
        ["package", "version", "family", "typefaces", "licence"],
        [[p, version(roots.get(p)), f, n, licences[p]] for (p, f), n in sorted(families.items())],
    )


def version(folder: Path | None) -> str:
    """Of a package, from the name of the file that was unpacked beside its folder."""
    files = sorted(folder.parent.glob(f"{folder.name}_*.deb")) if folder else []
    if folder is None:
        import matplotlib

        return matplotlib.__version__
    return files[0].name.split("_")[1].replace("%3a", ":") if files else ""


def table(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Builds the few-shot images of glyphs out of fonts."
    )
    parser.add_argument(
        "--fonts", type=Path, nargs="+", default=[], help="folders of unpacked packages"
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder that is written")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(given)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    classes = build(options.fonts, options.jobs)
    write(classes, options.fonts, options.out)
    for split, found in classes.items():
        images = sum(len(c.images) for c in found)
        print(f"{split}: {len(found)} classes, {images} images")


if __name__ == "__main__":
    main()
