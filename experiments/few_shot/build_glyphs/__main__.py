"""Builds the few-shot images of experiments/few_shot/glyphs from open fonts.

    mkdir -p build/fonts && cd build/fonts
    apt-get download $(cat ../../experiments/few_shot/glyphs/packages.txt)
    for package in *.deb; do dpkg-deb -x $package ${package%%_*}; done
    cd ../..
    python -m experiments.few_shot.build_glyphs --fonts build/fonts --out experiments/few_shot/glyphs

packages.txt names Debian packages with their versions; each lies in a folder of its own name under
--fonts, with its copyright file. The fonts of matplotlib are always included. The same fonts give the
same files: all choices follow a fixed order or hashes of names.

A class is a character, an image one typeface's drawing of it, cropped to its ink, scaled to 22 pixels
in the larger direction and centred in 28 x 28. Scripts belong to one split each, and so do font
families: images of a split are those of its scripts in its families, so that neither characters nor
families of a test were seen in training.
"""

import argparse
import logging
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from experiments.few_shot.build_glyphs import fonts
from experiments.few_shot.build_glyphs.classes import Class, Drawings, make_classes
from experiments.few_shot.build_glyphs.confusion import drop_confused
from experiments.few_shot.build_glyphs.drawing import render_typeface
from experiments.few_shot.build_glyphs.files import write_files
from experiments.few_shot.build_glyphs.scripts import SCRIPTS, UNCLEAR


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the data set and write its files."""
    parser = argparse.ArgumentParser(description="Builds the few-shot images of glyphs from fonts.")
    parser.add_argument(
        "--fonts", type=Path, nargs="+", default=[], help="folders of unpacked packages"
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder that is written")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    classes = build(options.fonts, options.jobs)
    write_files(classes, options.fonts, options.out)
    for split, of_split in classes.items():
        images = sum(len(one.images) for one in of_split)
        print(f"{split}: {len(of_split)} classes, {images} images")


def build(folders: Sequence[Path], jobs: int) -> dict[str, list[Class]]:
    """The classes of each split, in the order of their scripts and characters."""
    typefaces = fonts.find_typefaces(folders, jobs)
    splits = fonts.assign_families(typefaces)
    classes: dict[str, list[Class]] = {}
    for split, names in SCRIPTS.items():
        of_split = [t for t in typefaces if splits[t.family] == split]
        wanted: dict[fonts.Typeface, list[str]] = defaultdict(list)
        order: dict[str, dict[fonts.Typeface, int]] = {}
        scripts: dict[str, str] = {}
        for name in names.split():
            chosen, letters = fonts.choose_typefaces(of_split, name)
            for face in chosen:
                # a typeface is opened once, for all scripts that it draws
                wanted[face] += letters
            order[name] = {face: n for n, face in enumerate(chosen)}
            scripts |= dict.fromkeys(letters, name)
        drawings: Drawings = {c: {} for c in scripts}
        with ProcessPoolExecutor(jobs, get_context("spawn")) as executor:
            rendered = executor.map(render_typeface, list(wanted.items()), chunksize=4)
            bar = tqdm(rendered, f"typefaces of {split}", len(wanted), disable=None)
            for face, images in zip(wanted, bar, strict=True):
                for c, image in images.items():
                    drawings[c][face] = image
        classes[split] = make_classes(drawings, scripts, order)
    # after all splits are made, since classes are compared across them
    return {
        split: [one for one in of_split if not UNCLEAR.intersection(one.characters)]
        for split, of_split in drop_confused(classes).items()
    }


if __name__ == "__main__":
    main()
