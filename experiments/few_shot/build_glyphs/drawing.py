"""Images of 28 x 28 pixels of the characters of a typeface."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from experiments.few_shot.build_glyphs.fonts import Typeface

SIZE, INK = 28, 22
LARGE = 128  # pixels of an em before scaling down: enough that hinting does not show
LEVELS = 15  # grey values are multiples of 255 / 15: 28 x 28 shows no more, and they compress


def render_typeface(task: tuple[Typeface, Sequence[str]]) -> dict[str, np.ndarray]:
    """The images of a typeface, by character, without blanks and fallback boxes.

    Takes one argument, the typeface and the wanted characters, so that processes can map it.
    """
    typeface, characters = task
    try:
        # BASIC: one glyph for a character, without the shaping of words
        font = ImageFont.truetype(
            typeface.path, LARGE, typeface.number, layout_engine=ImageFont.Layout.BASIC
        )
        missing = {
            image.tobytes()
            for c in ("\U0010fffd", "\uffff", "\u0378", "\u25cc")  # the last is the dotted circle
            if (image := draw_character(font, c)) is not None
        }
        images = {
            c: image
            for c in characters
            if c in typeface.characters and (image := draw_character(font, c)) is not None
        }
    except (OSError, ValueError):
        return {}
    repeated = Counter(image.tobytes() for image in images.values())
    # One image for many characters is a box or a placeholder. At most six characters are drawn alike
    # with reason: o and O in Latin, Greek and Cyrillic.
    return {
        c: image
        for c, image in images.items()
        if image.tobytes() not in missing and repeated[image.tobytes()] <= 8
    }


def draw_character(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray | None:
    """The image of a character [28, 28] in grey levels; None where it is blank or oversized."""
    left, top, right, bottom = font.getbbox(character)
    width, height = int(right - left) + 8, int(bottom - top) + 8
    if not (0 < width < 20 * LARGE and 0 < height < 20 * LARGE):
        return None
    mask = Image.new("L", (width, height))
    ImageDraw.Draw(mask).text((4 - left, 4 - top), character, font=font, fill=255)
    return fit_ink(mask)


def fit_ink(mask: Image.Image) -> np.ndarray | None:
    """The ink of a mask, scaled and centred in 28 x 28, in grey levels; None without ink."""
    box = mask.getbbox()
    if box is None:
        return None
    ink = mask.crop(box)
    scale = INK / max(ink.size)
    width, height = (max(1, round(side * scale)) for side in ink.size)
    # BOX averages where it shrinks; where it enlarges it would leave blocks
    small = ink.resize(
        (width, height), Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR
    )
    image = Image.new("L", (SIZE, SIZE))
    image.paste(small, ((SIZE - width) // 2, (SIZE - height) // 2))
    levels = np.rint(np.asarray(image, dtype=np.float32) * (LEVELS / 255)).astype(np.uint8)
    # fewer dark pixels are a dot, which many characters come down to
    return levels if (levels > LEVELS // 2).sum() >= 5 else None
