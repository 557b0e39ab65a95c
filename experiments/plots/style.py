"""One style for all pictures: readable in print, and by people who do not see all colours.

Colours are those of Okabe and Ito; lines differ also in dashes and markers, so that pictures can be
read without colour. No screen is needed, and no global setting of matplotlib is changed.

References:
    Okabe and Ito, Color Universal Design, 2008.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.runs import is_rank_zero

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT, BAND = "#767676", "#B8B8B8", "#F3F3F3"  # secondary lines, marks, and stripes of tables
SMALL = 8.0  # font size of annotations

P = ParamSpec("P")


class Series(NamedTuple):
    """How one of several lines is drawn."""

    colour: str
    dashes: Any
    marker: str

    def line(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments for `plot`, without markers."""
        return {"color": self.colour, "linestyle": self.dashes, **more}

    def marked(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments for `plot`, with markers."""
        return {**self.line(), "marker": self.marker, **more}


SERIES = (
    Series(BLUE, "-", "o"),
    Series(ORANGE, "--", "s"),
    Series(GREEN, "-.", "^"),
    Series(PURPLE, (0, (1, 1)), "D"),
    Series(BLACK, (0, (5, 1, 1, 1, 1, 1)), "v"),
    Series(VERMILLION, (0, (8, 2)), "P"),
)
STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10.0,
    "legend.fontsize": 9.0,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "figure.titlesize": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.prop_cycle": cycler(color=[s.colour for s in SERIES])
    + cycler(linestyle=[s.dashes for s in SERIES]),
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
}


def picture(draw: Callable[P, Figure]) -> Callable[Concatenate[Path, P], Path]:
    """Make a function that draws a figure into one that saves it, in the common style.

    Args:
        draw: Function that returns a figure.
    Returns:
        The same function with a leading argument, the file, which it returns.
    """

    @wraps(draw)
    def save(file: Path, /, *args: P.args, **kwargs: P.kwargs) -> Path:
        if not is_rank_zero():
            return file
        with mpl.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file)
        return file

    return save


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height))


def decimal_ticks(axis: Any) -> None:
    """Ticks of a logarithmic x or y axis at 1, 2 and 5 times powers of ten, as decimal numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def hide_frame(axes: Any) -> None:
    """Axes for images: no grid, no ticks, no frame; tick labels stay."""
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
