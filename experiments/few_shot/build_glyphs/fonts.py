"""Typefaces: reading them from fonts, and choosing those that draw a script."""

import hashlib
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from fontTools.ttLib import TTCollection, TTFont, TTLibError
from tqdm import tqdm

from experiments.few_shot.build_glyphs.scripts import AT_MOST, SPLIT_OF_SCRIPT, script_of
from hoglib.errors import ArgumentValueError

# Characters of a script that a typeface must have, and typefaces that must have a character.
LEAST = 20
POOL = 70  # typefaces tried for a script: those first by hash, and as many of widest coverage

# Families that draw many scripts go to the split that needs them; all others by `assign_families`.
SPLIT_OF_FAMILY = {"Noto Serif": "test"} | dict.fromkeys(
    ("Noto Sans", "DejaVu", "FreeSans", "FreeSerif", "FreeMono", "MPH 2B Damase"), "train"
)

# Prefixes of names under which one design is distributed, and the family that they count as.
ALIASES = {
    "Bitstream Vera": "DejaVu", "Arimo": "Liberation Sans", "Tinos": "Liberation Serif",
    "Cousine": "Liberation Mono", "Arial for Povray": "Liberation Sans",
}  # fmt: skip
OWN_NAMES = (  # whose styles have words that STYLE does not know
    "Noto Sans", "Noto Serif", "DejaVu", "Monlam Uni", "Khmer Busra", "Khmer Mondulkiri", "Shimenkan",
    "Linux Libertine", "Linux Biolinum", "PakType Naskh Basic", "KacstTitle", "FreeFarsi", "Ezra SIL",
    "Averia", "Monoid",
)  # fmt: skip
STYLE = re.compile(
    r"\b(regular|roman|book|bold|demi|semi|extra|ultra|light|medium|black|thin|heavy|hairline|italic|"
    r"oblique|slanted|condensed|cond|narrow|compressed|extended|expanded|normal|otf|ttf|std|pro|"
    r"(extra|semi|demi|ultra)(bold|light|condensed|expanded))\b",
    re.IGNORECASE,
)


class Typeface(NamedTuple):
    """A font in a file.

    Attributes:
        path: The file.
        number: Number of the font in the file.
        package: Debian package, or matplotlib.
        family: Name of the family.
        style: Full name.
        characters: Its letters and digits.
    """

    path: str
    number: int
    package: str
    family: str
    style: str
    characters: frozenset[str]


def find_typefaces(folders: Sequence[Path], jobs: int) -> list[Typeface]:
    """All typefaces of unpacked packages and of matplotlib, once each, in a fixed order.

    Args:
        folders: Folders whose subfolders are packages.
        jobs: Number of processes.
    Returns:
        The typefaces, by family and style.
    """
    import matplotlib

    files = [(Path(matplotlib.get_data_path()) / "fonts" / "ttf", "matplotlib")]
    for folder in folders:
        if not folder.is_dir():
            raise ArgumentValueError(
                f"--fonts: expected a folder of unpacked packages, got {str(folder)!r}; the commands "
                "at the head of experiments/few_shot/build_glyphs/__main__.py make one."
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
        read = executor.map(read_typefaces, places, chunksize=16)
        bar = tqdm(read, "fonts", len(places), disable=None)
        typefaces = [typeface for of_file in bar for typeface in of_file]
    # of several files with one typeface the first counts
    once = {(t.family, t.style): t for t in reversed(typefaces)}
    return sorted(once.values(), key=lambda t: (t.family, t.style))


def read_typefaces(place: tuple[Path, str]) -> list[Typeface]:
    """The typefaces of a font file with a name and outlines of letters; none if it is unreadable."""
    path, package = place
    logging.getLogger("fontTools").setLevel(logging.CRITICAL)  # it warns of harmless irregularities
    typefaces = []
    try:
        for number in range(count_fonts(path)):
            with TTFont(str(path), lazy=True, fontNumber=number) as font:
                if not {"glyf", "CFF ", "CFF2"} & set(font.keys()) or "name" not in font:
                    continue
                names, cmap = font["name"], font.getBestCmap() or {}
                family, style = names.getBestFamilyName() or "", names.getBestSubFamilyName() or ""
                style = names.getDebugName(4) or f"{family} {style}".strip()
                letters = frozenset(chr(code) for code in cmap if script_of(chr(code)))
            if family and letters:
                typefaces.append(
                    Typeface(str(path), number, package, family_of(family), style, letters)
                )
    except (TTLibError, OSError, ValueError, KeyError, AssertionError):
        return []
    return typefaces


def count_fonts(path: Path) -> int:
    if path.suffix.lower() != ".ttc":
        return 1
    with TTCollection(str(path), lazy=True) as collection:
        return len(collection.fonts)


def family_of(name: str) -> str:
    """The family of a full name: the name without words of weight, width and slope."""
    name = re.sub(r"[-_]", " ", name.split(",")[0])
    plain = " ".join(STYLE.sub(" ", name).split()) or " ".join(name.split())
    for begin, family in {**ALIASES, **dict(zip(OWN_NAMES, OWN_NAMES, strict=True))}.items():
        if plain.startswith(begin):
            return family
    return plain


def assign_families(typefaces: Iterable[Typeface]) -> dict[str, str]:
    """The split of each family: test if it draws a script of test, else val likewise, else train.

    Held-out scripts have few families and Latin has more than a thousand, so train can do without them.
    """
    letters: dict[str, Counter[str]] = defaultdict(Counter)
    for typeface in typefaces:
        letters[typeface.family] |= Counter(str(script_of(c)) for c in typeface.characters)
    splits = {}
    for family, counts in letters.items():
        drawn = {SPLIT_OF_SCRIPT[s] for s, n in counts.items() if n >= LEAST}
        splits[family] = SPLIT_OF_FAMILY.get(family) or next(
            (s for s in ("test", "val") if s in drawn), "train"
        )
    return splits


def choose_typefaces(
    typefaces: Sequence[Typeface], script: str
) -> tuple[list[Typeface], list[str]]:
    """Typefaces to try for a script, and its characters that enough of them have."""
    letters = {t: [c for c in t.characters if script_of(c) == script] for t in typefaces}
    ordered = round_robin(t for t in typefaces if len(letters[t]) >= LEAST)
    widest = sorted(ordered, key=lambda t: -len(letters[t]))
    pool = set(ordered[:POOL]) | set(widest[:POOL])
    chosen = [t for t in ordered if t in pool]
    count: Counter[str] = Counter(c for t in chosen for c in letters[t])
    common = sorted(
        (c for c in count if count[c] >= LEAST), key=lambda c: (-count[c], hash_order(c))
    )
    return chosen, sorted(common[: AT_MOST.get(script)])


def round_robin(typefaces: Iterable[Typeface]) -> list[Typeface]:
    """The plainest typeface of each family in hashed order, then the second of each, and so on."""
    families: dict[str, list[Typeface]] = defaultdict(list)
    for typeface in sorted(typefaces, key=plainness):
        families[typeface.family].append(typeface)
    turns = [
        (order, hash_order(family), typeface)
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
    return rank, hash_order(f"{typeface.style} {Path(typeface.path).name}")


def hash_order(text: str) -> str:
    """A key that sorts texts in a fixed order unrelated to their letters."""
    return hashlib.sha256(text.encode()).hexdigest()
