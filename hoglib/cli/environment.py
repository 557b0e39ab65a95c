"""What `hoglib env` prints: versions, devices, and what hoglib puts in the place of torch's calls."""

import json
import platform
import textwrap
from typing import Any

import torch

from hoglib._core import matrix_products
from hoglib._version import __version__
from hoglib.stand_ins.mode import stand_in_table
from hoglib.verification.report import MODES

WIDTH = 100


def facts() -> dict[str, Any]:
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "hoglib": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "threads": torch.get_num_threads(),
        "matrix_products": matrix_products.facts(),
        "stand_ins": [
            {
                "name": row.name,
                "lacks": row.lacks,
                "modes": list(row.modes),
                "replaced": bool(row.replaces),
                "instead": row.instead,
                "issue": row.issue,
            }
            for row in stand_in_table()
        ],
    }


def as_json() -> str:
    return json.dumps(facts(), indent=2)


def text() -> str:
    known = facts()
    cuda = f"CUDA {known['cuda']}, {', '.join(known['devices'])}" if known["devices"] else "no GPU"
    lines = [
        f"hoglib {known['hoglib']}, Python {known['python']}, torch {known['torch']}, {cuda}, "
        f"{known['threads']} threads",
        *textwrap.wrap(_products(known["matrix_products"]), WIDTH),
    ]
    replaced = [row for row in stand_in_table() if row.replaces]
    refused = [row for row in stand_in_table() if not row.replaces]
    keys = ", ".join(f"{mode.key} {mode.title}" for mode in MODES.values())
    for title, table in (
        ("Inside hoglib.second_order() these torch calls go to stand-ins:", replaced),
        ("These have no second derivative and no stand-in; a call raises:", refused),
    ):
        if table:
            lines += ["", title, ""]
            width = max(len(row.name) for row in table)
            for row in table:
                why = f"{row.lacks} ({', '.join(row.modes)})"
                why += f"; pytorch/pytorch#{row.issue}" if row.issue else ""
                why += f". {row.instead}" if row.instead else ""
                first, *rest = textwrap.wrap(why, WIDTH - width - 4)
                lines.append(f"  {row.name:{width}}  {first}")
                lines += [" " * (width + 4) + line for line in rest]
    return "\n".join([*lines, "", *textwrap.wrap(f"Modes: {keys}.", WIDTH)])


def _products(known: dict[str, Any]) -> str:
    if not known["available"]:
        return "Matrix products: torch's BLAS (this torch has no oneDNN, or it is switched off)."
    if known["switch"] != "auto":
        return f"Matrix products: {matrix_products.SWITCH}={known['switch']}."
    found = f"oneDNN in {known['in_graphs']} of {known['classes']} classes of sizes"
    found += f" in captured graphs, {known['in_functions']} elsewhere"
    most = f", up to {known['most']:.2f} times as fast" if known["most"] else ""
    return (
        f"Matrix products in float32: {found}{most}; {matrix_products.SWITCH}=off switches it off."
    )
