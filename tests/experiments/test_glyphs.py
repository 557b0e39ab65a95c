"""The glyphs: families, how they load, and the script that builds them."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.few_shot.build_glyphs import drawing, fonts, scripts
from experiments.few_shot.build_glyphs.classes import Class, blur, join_twins
from experiments.few_shot.build_glyphs.confusion import drop_confused
from experiments.few_shot.image_classes import GLYPHS, SPLITS, glyphs


def table(name):
    with (GLYPHS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def data():
    with np.load(GLYPHS / "glyphs.npz") as file:
        return {name: file[name] for name in file.files}


CLASSES, TYPEFACES = table("classes.csv"), table("typefaces.csv")
FAMILY = np.array([row["family"] for row in TYPEFACES])


def test_families_are_those_of_names_and_no_name_is_in_two_splits():
    # Of what all fonts of one maker begin with, such as "Noto Sans", there is one family.
    for begin in ("Noto Sans", "Noto Serif", "DejaVu"):
        assert len({family for family in FAMILY if family.startswith(begin)}) == 1
    for name, family in {
        "Noto Sans Khmer Condensed ExtraBold": "Noto Sans",
        "Bitstream Vera Sans Mono": "DejaVu",
        "Frank_Ruehl-CLM Bold Oblique": "Frank Ruehl CLM",
        "Lato Black": "Lato",
        "Black": "Black",
    }.items():
        assert fonts.family_of(name) == family


def test_splits_load_as_uint8_with_names():
    for split in SPLITS:
        found = glyphs(split)
        rows = [row for row in CLASSES if row["split"] == split]
        assert list(found.names) == [row["character"] for row in rows]
        assert [len(m) for m in found.members] == [int(row["images"]) for row in rows]
        assert found.images.dtype == torch.uint8
        assert found.images.shape[1:] == (1, 28, 28)
    with pytest.raises(ValueError, match="split: expected"):
        glyphs("valid")


@pytest.fixture(scope="module")
def of_matplotlib():
    """Typefaces of matplotlib, which are always there, by their names."""
    import matplotlib

    files = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("*.ttf"))
    found = [face for file in files for face in fonts.read_typefaces((file, "matplotlib"))]
    return {face.style: face for face in found}


def test_the_script_draws_the_same_images_from_the_fonts_of_matplotlib(data, of_matplotlib):
    numbers = [n for n, row in enumerate(TYPEFACES) if row["package"] == "matplotlib"]
    assert len(numbers) >= 8
    compared = 0
    for number in numbers:
        face = of_matplotlib[TYPEFACES[number]["style"]]
        assert face.family == TYPEFACES[number]["family"]
        at = np.flatnonzero(data["typeface"] == number)
        of_class = {
            n: [CLASSES[n]["character"], *CLASSES[n]["also"].split()] for n in data["label"][at]
        }
        drawn = drawing.render_typeface((face, [c for found in of_class.values() for c in found]))
        for i in at:
            images = [drawn[c] for c in of_class[data["label"][i]] if c in drawn]
            likeness = blur(np.stack(images)) @ blur(data["images"][i][None])[0]
            # Releases of FreeType round outlines differently: a grey level here and there.
            assert likeness.max() > 0.995, (face.style, of_class[data["label"][i]])
            compared += 1
    assert compared > 500


def test_what_a_font_lacks_is_not_drawn(of_matplotlib):
    face = of_matplotlib["DejaVu Sans"]
    assert set(drawing.render_typeface((face, ["A", "漢"]))) == {"A"}
    lying = face._replace(characters=face.characters | {"漢"})  # as a font may, by a box of its own
    assert set(drawing.render_typeface((lying, ["A", "漢"]))) == {"A"}
    assert drawing.draw_character(drawing.ImageFont.truetype(face.path, 128), " ") is None
    letters = [c for c in "ABCDEFGHI" if c in face.characters]
    assert len(drawing.render_typeface((face, letters))) == len(letters)


def test_which_characters_are_taken():
    assert all(scripts.script_of(row["character"]) == row["script"] for row in CLASSES)
    # an accent, a ligature, a combining mark, a part of Hangul, a sign, a form of a letter
    assert not any(map(scripts.script_of, "é\ufb01\u05b8\u1100+\ufe80"))


def test_twins_are_one_class_of_one_image_a_typeface(of_matplotlib):
    letters = ["o", "O", "\u03bf", "\u041e", "X", "c", "C", "A"]
    faces = [f for name, f in of_matplotlib.items() if name.startswith("DejaVu Sans")]
    drawings = {c: {} for c in letters}
    for face in faces:
        for c, image in drawing.render_typeface((face, letters)).items():
            drawings[c][face] = image
    classes = {"".join(found.characters) for found in join_twins(drawings)}
    assert classes == {"oO\u03bf\u041e", "X", "cC", "A"}


def test_classes_that_look_alike_in_two_splits_stay_in_the_held_out_one(of_matplotlib):
    """Circles of two scripts, without a typeface in common: every other radius is the other's."""
    some = next(iter(of_matplotlib.values()))
    y, x = np.mgrid[:28, :28] - 13.5

    def found(name, start, radii, angle):
        images = {
            some._replace(family=f"{start} {r}", style=f"{start} {r}"): 12
            * ((np.abs(np.hypot(x, y) - r) < 2) & (np.abs(np.arctan2(y, x)) <= angle))
            for r in radii
        }
        return Class((name,), images)

    radii = np.linspace(6, 11, 40)
    classes = {
        "train": [found("o", "a", radii[::2], np.pi), found("c", "a", radii[::2], 1)],
        "val": [],
        "test": [found("\u05e1", "b", radii[1::2], np.pi)],
    }
    kept = drop_confused(classes)
    assert [c.characters for c in kept["train"]] == [("c",)]
    assert [c.characters for c in kept["test"]] == [("\u05e1",)]
