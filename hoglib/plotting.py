"""The pictures of results, `result.plot(ax)`, and their one style, which the experiments share.

matplotlib is imported when a picture is drawn, and none of its settings stays changed. The colours are
those of Okabe and Ito (Color Universal Design, 2008); lines differ also in dashes and markers, so that
pictures can be read without colour.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import cycle
from math import isfinite, nan
from typing import Any, NamedTuple

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT, BAND = "#767676", "#B8B8B8", "#F3F3F3"  # secondary lines, marks, and stripes of tables
STATUS = {"pass": (BLUE, "o"), "warn": (ORANGE, "^"), "fail": (VERMILLION, "X")}
MOST_ROWS = 40  # names that fit below each other
LONGEST = 48  # characters of a name


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
STYLE: dict[str, Any] = {
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
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
}


def picture(draw: Callable[[Any, Any], int]) -> Callable[[Any, Any], Any]:
    """Make a function that draws a result on axes, and returns the number of rows of names beside
    them, into one that makes axes in the common style where it is given None, and returns the axes."""

    @wraps(draw)
    def plot(result: Any, ax: Any) -> Any:
        mpl = validation.package("matplotlib", "plot", "'hoglib[plot]'")
        pyplot = validation.package("matplotlib.pyplot", "plot", "'hoglib[plot]'")
        if ax is None:
            with mpl.rc_context(STYLE):
                figure, ax = pyplot.subplots(figsize=(7, 3.4))
                figure.set_figheight(max(3.4, 1 + 0.22 * draw(result, ax)))
        elif isinstance(ax, mpl.axes.Axes):
            draw(result, ax)
        else:
            raise ArgumentTypeError(
                f"ax: expected Axes of matplotlib or None, got {validation.describe(ax)}; of several "
                "pass one, such as `axes[0]`, of a figure `figure.gca()`."
            )
        return ax

    return plot


@picture
def density(of: Any, ax: Any) -> int:
    """The density of all eigenvalues, with one standard error."""
    grid, height, error = of.grid.tolist(), of.density.tolist(), of.error.tolist()
    low = 1e-6 * max(filter(isfinite, height), default=1.0)  # lower: the tails of the Gaussians
    if all(map(isfinite, error)):
        below = [max(y - e, low) for y, e in zip(height, error, strict=True)]
        above = [y + e for y, e in zip(height, error, strict=True)]
        ax.fill_between(grid, below, above, color=LIGHT, lw=0, label="± one standard error")
    ax.plot(grid, height, label="density", **_next_series(ax).line(lw=1.2))
    ax.set(yscale="log", ylim=(low, 4e6 * low), xlabel="eigenvalue", ylabel="density")
    ax.legend()
    return 0


@picture
def spectrum(of: Any, ax: Any) -> int:
    """The density of all eigenvalues, and those at both ends as ticks."""
    density(of.density, ax)
    ends = [*of.smallest.tolist(), *of.largest.tolist()]
    ax.plot(
        ends, [0.03] * len(ends), "|", color=VERMILLION, ms=12, mew=1.5,
        transform=ax.get_xaxis_transform(), label="eigenvalues at the ends",
    )  # fmt: skip
    ax.axvline(0, color=GREY, lw=0.8, zorder=0)
    ax.set_title(f"{of.size:,} eigenvalues, trace {of.trace[0]:.4g} ± {of.trace[1]:.2g}")
    ax.legend()
    return 0


@picture
def eigenpairs(of: Any, ax: Any) -> int:
    """The eigenvalues in descending order; an eigenvalue of the matrix is within the residual."""
    values, residuals = of.values.tolist()[::-1], of.residuals.tolist()[::-1]
    ranks = range(1, len(values) + 1)
    look = _next_series(ax).marked(linestyle="", markersize=5 if len(values) < 50 else 2.5)
    ax.errorbar(ranks, values, residuals, label="eigenvalue ± residual", capsize=2, lw=1, **look)
    _scale_by_size(ax, "y", values)
    ax.set(xlabel="number, from the largest", ylabel="eigenvalue", title=f"which={of.which!r}")
    ax.locator_params(axis="x", integer=True)
    ax.legend()
    return 0


@picture
def history(measurements: Any, ax: Any) -> int:
    """The largest eigenvalue by batch, of each problem; of a single one also the smallest, and the
    critical sharpness."""
    names = list(dict.fromkeys(one.name for one in measurements))
    drawn: list[float] = []

    def line(label: str, of: Sequence[Any], values: list[float], look: dict[str, Any]) -> None:
        if any(map(isfinite, values)):
            ax.plot([one.batch for one in of], values, label=label, **look)
            drawn.extend(values)

    for name, series in zip(names, cycle(SERIES)):
        own = [one for one in measurements if one.name == name]
        largest = [float(one.spectrum.largest[-1]) for one in own]
        line(f"largest of {name}" if name else "largest", own, largest, series.marked())
    if len(names) == 1:
        smallest = [float(one.spectrum.smallest[0]) for one in measurements]
        line("smallest", measurements, smallest, SERIES[1].marked())
        critical = [nan if one.critical is None else one.critical for one in measurements]
        line("critical sharpness", measurements, critical, SERIES[2].marked())
    unstable = [one for one in measurements if one.edge is not None and one.edge > 2]
    beyond = [float(one.spectrum.largest[-1]) for one in unstable]
    ring = {"ls": "", "marker": "o", "ms": 11, "mfc": "none", "color": VERMILLION}
    line("beyond the edge of stability", unstable, beyond, ring)
    _scale_by_size(ax, "y", drawn)
    ax.set(xlabel="training batches", ylabel="eigenvalue of the Hessian")
    ax.locator_params(axis="x", integer=True)
    if not drawn:
        return _say_empty(ax, "no measurement yet")
    ax.legend(ncols=1 + (len(names) > 5))
    return 0


@picture
def kfac_error(of: Any, ax: Any) -> int:
    """The relative distances with one standard error, of the whole matrix and of each layer's block."""
    known = sorted(of.layers, key=lambda name: -_or_nan(of.layers[name].value))[:MOST_ROWS]
    whole = dict(zip(("all: from the GGN", "all: its blocks", "all: the Hessian"), of, strict=True))
    rows = {**whole, **{name: one for name, one in of.layers.items() if name in known}}
    values = [float(one.value) for one in rows.values()]
    errors = [_or_nan(one.error) for one in rows.values()]
    ax.errorbar(values, range(len(rows)), xerr=errors, fmt="o", color=BLUE, lw=1, capsize=2)
    _scale_by_size(ax, "x", values)
    left_out = len(of.layers) - len(known)
    title = f"the {MOST_ROWS} layers farthest off, of {len(of.layers)}" if left_out else ""
    ax.set(xlabel="relative distance |K - M| / |M|", title=title)
    return _name_rows(ax, list(rows))


@picture
def leave_k_out(of: Any, ax: Any) -> int:
    """Predicted against actual changes of the outer loss, one point for each subset."""
    ends = [f(of.predicted.tolist()) for f in (min, max)]
    ax.plot(ends, ends, color=GREY, lw=1, label="equal")
    look = SERIES[0].marked(linestyle="", alpha=0.8)
    ax.plot(of.predicted.tolist(), of.actual.tolist(), label="a subset", **look)
    ax.set(
        xlabel="change of the outer loss, predicted", ylabel="after a training without the subset",
        title=f"{of.subsets.shape[1]} left out: rank correlation {of.correlation:.3f}",
    )  # fmt: skip
    ax.legend()
    return 0


@picture
def report(of: Any, ax: Any) -> int:
    """The relative error of each check that compares numbers, and what failed or warns without one.

    Without an error, or with an error of zero, a mark is at the left end, and beyond all numbers at the
    right.
    """
    told = [row for row in of.rows if row.status in ("fail", "warn") or row.error is not None]
    first = sorted(told, key=lambda row: [*STATUS].index(row.status), reverse=True)[:MOST_ROWS]
    rows = [row for row in told if row in first]
    ax.set(xscale="log", xlabel="relative error")
    for status, (colour, marker) in STATUS.items():
        look = {"ls": "", "marker": marker, "color": colour, "ms": 6}
        own = [(y, row.error or 0.0) for y, row in enumerate(rows) if row.status == status]
        inside = [(x, y) for y, x in own if x and isfinite(x)]
        outside = [(0.99 if x else 0.01, y) for y, x in own if not (x and isfinite(x))]
        label = f"{status}: {sum(row.status == status for row in of.rows)}"
        ax.plot(*zip(*inside, strict=True) if inside else ([], []), label=label, **look)
        for x, y in outside:
            ax.plot(x, y, transform=ax.get_yaxis_transform(), **look)
    ax.set_title(_cut(of.name), parse_math=False)
    if not rows:
        return _say_empty(ax, "nothing was compared")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
    return _name_rows(ax, [row.name for row in rows])


def _or_nan(x: Any) -> float:
    return float(x) if isfinite(x) else nan


def _next_series(ax: Any) -> Series:
    """Another one for each result that is drawn on the same axes."""
    return SERIES[len(ax.lines) % len(SERIES)]


def _scale_by_size(ax: Any, axis: str, values: Iterable[float]) -> None:
    """A logarithmic axis for values of several sizes, which is linear near zero if one is negative."""
    known = [x for x in values if isfinite(x)]
    sizes = [abs(x) for x in known if x]
    if sizes and max(sizes) > 100 * min(sizes):
        linear = {"linthresh": max(min(sizes), 1e-3 * max(sizes))}
        set_scale = getattr(ax, f"set_{axis}scale")
        set_scale("log") if min(known) > 0 else set_scale("symlog", **linear)


def _name_rows(ax: Any, names: Sequence[str]) -> int:
    ax.set_yticks(range(len(names)), [_cut(name) for name in names], parse_math=False)
    ax.set_ylim(len(names) - 0.5, -0.5)
    return len(names)


def _cut(name: str) -> str:
    half = LONGEST // 2
    return name if len(name) <= LONGEST else f"{name[: half - 1]}…{name[-half:]}"


def _say_empty(ax: Any, text: str) -> int:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY)
    return 0


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A data frame of pandas."""
    return validation.package("pandas", "to_dataframe", "pandas").DataFrame(list(rows))
