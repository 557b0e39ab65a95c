"""Pictures as files, in the style of `hoglib.plotting`. No screen is needed, and no global setting of
matplotlib is changed."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec

import matplotlib as mpl
import torch
from cycler import cycler
from lightning_utilities.core.apply_func import apply_to_collection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

from experiments.runs import Picture, is_rank_zero
from hoglib import plotting

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


SERIES = tuple(Series(*look) for look in plotting.SERIES)
CYCLE = cycler(color=[s.colour for s in SERIES], linestyle=[s.dashes for s in SERIES])
STYLE: dict[Any, Any] = {**plotting.STYLE, "axes.prop_cycle": CYCLE}


def picture(draw: Callable[P, Figure]) -> Callable[Concatenate[Path, P], Picture]:
    """Make a function that draws a figure into one of a Picture, in the common style.

    Args:
        draw: Function that returns a figure.
    Returns:
        The same function with a leading argument, the file. Tensors of half precision, as of a training
        in bf16-mixed, are drawn in float32.
    """

    @wraps(draw)
    def made(file: Path, /, *args: P.args, **kwargs: P.kwargs) -> Picture:
        given = apply_to_collection((args, kwargs), Tensor, _in_float, allow_frozen=True)

        def save() -> Path:
            if not is_rank_zero():
                return file
            with ExitStack() as stack:
                # inside, when a figure reads its style, and nowhere else
                stack.enter_context(mpl.rc_context(STYLE))
                for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                    stack.enter_context(torch.autocast(device, enabled=False))
                figure = draw(*given[0], **given[1])
                file.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(file)
            return file

        return Picture(file, save)

    return made


def _in_float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


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
