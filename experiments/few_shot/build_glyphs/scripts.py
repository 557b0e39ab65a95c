"""Which characters become classes, and which split each script belongs to."""

import unicodedata
from contextlib import suppress
from functools import cache

from fontTools.unicodedata import script as unicode_script

SCRIPTS = {
    "train": "Latn Grek Cyrl Armn Hani Hira Kana Hang Deva Beng Gujr Telu Cher Cans Runr",
    "val": "Arab Mymr",
    "test": "Hebr Thai Laoo Geor Khmr Ethi Mlym",
}
SPLIT_OF_SCRIPT = {
    script: split for split, scripts in SCRIPTS.items() for script in scripts.split()
}

# Scripts of thousands of characters contribute this many, those that most typefaces have.
AT_MOST = {"Hani": 240, "Hang": 160}

# Half of the fonts draw modern letters in the place of old Georgian capitals, so these are no classes.
UNCLEAR = frozenset(map(chr, range(0x10A0, 0x10D0)))


@cache
def script_of(character: str) -> str | None:
    """The script of a letter or digit that stands alone; None for any other character."""
    if unicodedata.category(character) not in ("Lu", "Ll", "Lo", "Nd"):
        return None
    hangul = "가" <= character <= "힣"  # letters, although Unicode decomposes them
    if unicodedata.normalize("NFKD", character) != character and not hangul:
        return None  # accents are too small for 28 pixels; forms of width or shape are duplicates
    if character.isascii():
        return "Latn"
    script = unicode_script(character)
    if script == "Hang" and not hangul:
        return None
    return script if script in SPLIT_OF_SCRIPT else None


def large_forms(character: str) -> set[str]:
    """The capital of a small letter, the large form of a small kana."""
    forms = {character.upper()}
    name = unicodedata.name(character, "").replace("LETTER SMALL ", "LETTER ")
    with suppress(KeyError):  # the name without "small" may be that of no character
        forms.add(unicodedata.lookup(name))
    return forms - {character}
