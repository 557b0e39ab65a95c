"""The files of the data set: images, tasks, and tables of classes, typefaces and licences."""

import csv
import re
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.few_shot.build_glyphs.classes import Class
from experiments.few_shot.build_glyphs.drawing import LEVELS
from experiments.few_shot.build_glyphs.fonts import Typeface
from experiments.few_shot.build_glyphs.scripts import SCRIPTS, script_of
from experiments.few_shot.episodes import write_fixed_tasks

# Names of licences, by phrases of copyright files that have no License field.
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


def write_files(classes: dict[str, list[Class]], folders: Sequence[Path], out: Path) -> None:
    """Write glyphs.npz, tasks.npz, classes.csv, typefaces.csv and FONTS.csv.

    Args:
        classes: Classes of each split.
        folders: Folders of unpacked packages, which hold versions and licences.
        out: Folder of the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    numbers: dict[Typeface, int] = {}
    split_of: dict[Typeface, str] = {}
    for split in SCRIPTS:
        every = {t for one in classes[split] for t in one.images}
        for face in sorted(every, key=lambda t: (t.family, t.style, t.path)):
            numbers[face], split_of[face] = len(numbers), split
    used = write_images(classes, numbers, out)
    write_csv(
        out / "typefaces.csv",
        ["typeface", "family", "style", "package", "split", "images"],
        [[n, t.family, t.style, t.package, split_of[t], used[t]] for t, n in numbers.items()],
    )
    roots = {path.name: path for folder in folders for path in folder.iterdir()}
    families: dict[tuple[str, str], int] = Counter((t.package, t.family) for t in numbers)
    licences = {name: read_licence(roots[name]) for name, _ in families if name in roots}
    licences["matplotlib"] = "Bitstream Vera, OFL (STIX), BaKoMa (Computer Modern)"
    write_csv(
        out / "FONTS.csv",
        ["package", "version", "family", "typefaces", "licence"],
        [
            [name, package_version(roots.get(name)), family, count, licences[name]]
            for (name, family), count in sorted(families.items())
        ],
    )


def write_images(
    classes: dict[str, list[Class]], numbers: dict[Typeface, int], out: Path
) -> Counter[Typeface]:
    """Write images, tasks and classes; returns the number of images of each typeface."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    faces: list[int] = []
    rows: list[list[Any]] = []
    used: Counter[Typeface] = Counter()
    for split in SCRIPTS:
        for one in classes[split]:
            for face in sorted(one.images, key=numbers.__getitem__):
                images.append(one.images[face])
                labels.append(len(rows))
                faces.append(numbers[face])
                used[face] += 1
            first, *also = one.characters
            families = {t.family for t in one.images}
            rows.append(
                [len(rows), f"U+{ord(first):04X}", first, " ".join(also), script_of(first), split,
                 len(one.images), len(families)]
            )  # fmt: skip
    np.savez_compressed(
        out / "glyphs.npz",
        # levels 0 to 15 as grey values 0 to 255
        images=np.stack(images) * (255 // LEVELS),
        label=np.array(labels, np.uint16),
        typeface=np.array(faces, np.uint16),
    )
    write_fixed_tasks(torch.tensor([len(one.images) for one in classes["test"]]), out / "tasks.npz")
    header = ["class", "code", "character", "also", "script", "split", "images", "families"]
    write_csv(out / "classes.csv", header, rows)
    return used


def read_licence(folder: Path) -> str:
    """The licences that a package's copyright file names, but for those of Debian's own files."""
    path = next(iter(sorted(folder.glob("usr/share/doc/*/copyright"))), None)
    text = path.read_text(errors="replace") if path else ""
    paragraphs = [p for p in re.split(r"\n\s*\n", text) if re.match(r"(?i)files:", p.strip())]
    others = [p for p in paragraphs if not re.match(r"(?i)files:\s*debian/", p.strip())]
    named = [re.search(r"(?mi)^license:[ \t]*(\S.*)$", p) for p in others]
    names = [" ".join(match[1].split()) for match in named if match]
    names = names or [name for pattern, name in LICENCES.items() if re.search(pattern, text)]
    return ", ".join(dict.fromkeys(names)) or "see the package"


def package_version(folder: Path | None) -> str:
    """A package's version, from the name of the .deb file beside its folder; None is matplotlib."""
    if folder is None:
        return metadata.version("matplotlib")
    files = sorted(folder.parent.glob(f"{folder.name}_*.deb"))
    return files[0].name.split("_")[1].replace("%3a", ":") if files else ""


def write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
