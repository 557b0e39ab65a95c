"""The pictures of results, `result.plot(ax)`, and their style, which the experiments share.

matplotlib is imported when a picture is drawn; its settings are restored. The colours are Okabe and
Ito's (Color Universal Design, 2008); lines differ also in dashes and markers, not by colour alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import cycle
from math import ceil, inf, isfinite, log10
from typing import Any

from hoglib._core.messages import validation
from hoglib.errors import ArgumentTypeError

BLACK, ORANGE, GREEN = "#000000", "#E69F00", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
GREY, LIGHT, BAND = "#767676", "#B8B8B8", "#F3F3F3"  # secondary lines, marks, and stripes of tables
# colour, dashes and marker of a picture's first, second, ... line
SERIES: tuple[tuple[str, Any, str], ...] = (
    (BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (PURPLE, (0, (1, 1)), "D"),
    (BLACK, (0, (5, 1, 1, 1, 1, 1)), "v"), (VERMILLION, (0, (8, 2)), "P"),
)  # fmt: skip
STYLE: dict[str, Any] = {
    "font.size": 10.0, "axes.titlesize": 10.5, "axes.labelsize": 10.0, "legend.fontsize": 9.0,
    "xtick.labelsize": 9.0, "ytick.labelsize": 9.0, "figure.titlesize": 11.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#E3E3E3", "grid.linewidth": 0.6, "lines.linewidth": 1.8, "lines.markersize": 5.0,
    "legend.frameon": False, "legend.handlelength": 2.6, "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
}  # fmt: skip
VERDICTS = {"fail": (VERMILLION, "X"), "warn": (ORANGE, "^"), "pass": (BLUE, "o")}
MOST_ROWS = 40  # names that fit below each other


def load_pyplot(caller: str) -> Any:
    """matplotlib.pyplot, or MissingDependencyError, which says what to install."""
    return validation.package("matplotlib.pyplot", caller, "`pip install 'hoglib[plot]'`")


def picture(draw: Callable[[Any, Any], int | None]) -> Callable[[Any, Any], Any]:
    """Make plot(result, ax) of draw(result, ax): it returns the axes, and creates them for ax=None.

    New axes have the common style. draw returns the number of names beside the axes, which sets the
    height of the figure, or None.
    """

    @wraps(draw)
    def plot(result: object, ax: object) -> Any:
        pyplot = load_pyplot("plot")
        if ax is None:
            with pyplot.rc_context(STYLE):
                figure, ax = pyplot.subplots(figsize=(7, 3.4))
                # draw first: it returns the number of names beside the axes
                figure.set_figheight(max(3.4, 1 + 0.22 * (draw(result, ax) or 0)))
        elif isinstance(ax, pyplot.Axes):
            draw(result, ax)
        else:
            given = validation.describe(ax)
            raise ArgumentTypeError(f"ax: expected one Axes of matplotlib, or None, got {given}.")
        return ax

    return plot


def draw_pixels(ax: Any) -> Any:
    """The figure of axes as an array [height, width, 3] of uint8; the figure is closed."""
    import numpy as np
    from matplotlib import pyplot
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(ax.figure)  # pyplot's own canvas may be a window
    canvas.draw()
    pyplot.close(ax.figure)
    return np.asarray(canvas.buffer_rgba())[..., :3]


@picture
def density(of: Any, ax: Any) -> None:
    """The density of all eigenvalues, with one standard error."""
    colour, dashes, _ = SERIES[len(ax.lines) % len(SERIES)]  # a new colour for a second density
    bottom, top = ax.get_ylim() if ax.lines else (0.0, 0.0)
    highest = float(of.density.max())
    low = max(1e-6 * highest, bottom)  # lower values are the tails of the Gaussians
    if bool(of.error.isfinite().all()):
        below, above = (of.density - of.error).clamp(min=1e-3 * low), of.density + of.error
        ax.fill_between(of.grid, below, above, color=LIGHT, lw=0, label="± one standard error")
    ax.plot(of.grid, of.density, color=colour, ls=dashes, lw=1.2, label="density")
    ax.set(yscale="log", ylim=(low, max(4 * highest, top)), xlabel="eigenvalue", ylabel="density")
    ax.legend()


@picture
def spectrum(of: Any, ax: Any) -> None:
    """The density of all eigenvalues, and the computed eigenvalues at both ends as ticks."""
    density(of.density, ax)
    ends = [*of.smallest.tolist(), *of.largest.tolist()]
    look = {"ls": "", "marker": "|", "ms": 12, "mew": 1.5, "color": VERMILLION}
    line = ax.plot(ends, [0.03] * len(ends), label="eigenvalues at the ends", **look)
    line[0].set_transform(ax.get_xaxis_transform())  # at the foot of the axes
    ax.axvline(0, color=GREY, lw=0.8, zorder=0)
    trace, error = of.trace  # infinite for a single sample
    margin = f" ± {error:.2g}" if isfinite(error) else ""
    ax.set_title(f"{of.size:,} eigenvalues, trace {trace:.4g}{margin}")
    ax.legend()


@picture
def eigenpairs(of: Any, ax: Any) -> None:
    """The eigenvalues in descending order, with residuals: bounds of the distance to an exact one."""
    values, residuals = of.values.tolist()[::-1], of.residuals.tolist()[::-1]
    count = len(values)
    look = {"fmt": "o", "color": BLUE, "ms": 5 if count < 50 else 2.5, "lw": 1, "capsize": 2}
    ax.errorbar(range(1, count + 1), values, residuals, label="eigenvalue ± residual", **look)
    _scale_by_size(ax, "y", values)
    ax.axhline(0, color=GREY, lw=0.8, zorder=0)
    ax.set(xlim=(0.5, count + 0.5), xlabel="number, from the largest", ylabel="eigenvalue")
    ax.set_title(f"{count} eigenvalues, which={of.which!r}")
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    ax.legend()


@picture
def estimate(of: Any, ax: Any) -> None:
    """The means with one standard error, in the order of the entries."""
    values, errors = (x.detach().flatten().double().cpu() for x in (of.value, of.error))
    finite = errors.where(errors.isfinite(), 0)  # infinite for a single sample
    look = {"fmt": "o", "color": BLUE, "ecolor": LIGHT, "ms": 5 if len(values) < 50 else 2, "lw": 1}
    ax.errorbar(range(len(values)), values, finite, label="mean ± one standard error", **look)
    _scale_by_size(ax, "y", values.tolist())
    ax.set(xlabel="entry", ylabel="estimate")
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    ax.legend()


@picture
def critical_sharpness(of: Any, ax: Any) -> None:
    """The losses that were evaluated against the step, and the step that does not lower the loss."""
    points = sorted((step, loss) for step, loss in of.tried if isfinite(loss))
    ax.plot(*zip(*points, strict=True), color=BLUE, marker="o", label="loss along the step")
    ax.axhline(of.tried[0][1], color=GREY, lw=0.8, zorder=0, label="loss at step 0")
    if of.found:
        ax.axvline(of.step, color=VERMILLION, ls="--", label=f"2 / {of.value:.4g}")
    # a first step that was far too long would hide the crossing
    near = [loss for step, loss in points if step <= 4 * of.step]
    margin = 0.1 * (max(near) - min(near)) or 1.0
    ax.set(xlim=(-0.1 * of.step, 4.1 * of.step), ylim=(min(near) - margin, max(near) + margin))
    ax.set(xlabel="step", ylabel="loss", title=f"{len(of.tried)} evaluations of the loss")
    ax.legend()


@picture
def history(measurements: Any, ax: Any) -> int:
    """The largest eigenvalue over batches, by its logged name.

    For a single problem also the smallest eigenvalue and the critical sharpness.
    """
    single = len({one.name for one in measurements}) < 2
    ends = ("/largest", "/smallest", "/critical") if single else ("/largest",)
    points: dict[str, list[tuple[int, float]]] = {}
    for one in measurements:
        for name, value in one.values().items():
            if name.endswith(ends):
                points.setdefault(name, []).append((one.batch, value))
    for (name, known), (colour, dashes, marker) in zip(points.items(), cycle(SERIES)):
        look = {"color": colour, "ls": dashes, "marker": marker}
        ax.plot(*zip(*known, strict=True), label=name.replace("$", r"\$"), **look)
    _scale_by_size(ax, "y", [value for known in points.values() for _, value in known])
    unstable = [x for x in measurements if (x.edge or 0) > 2]
    beyond = [x.batch for x in unstable], [float(x.spectrum.largest[-1]) for x in unstable]
    look = {"marker": "o", "ms": 11, "mfc": "none", "color": VERMILLION}
    ax.plot(*beyond, ls="", label="beyond the edge of stability" if unstable else None, **look)
    ax.set(xlabel="training batches", ylabel="eigenvalue of the Hessian")
    ax.locator_params(axis="x", integer=True, min_n_ticks=1)
    if points:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    else:
        ax.set_title("nothing was measured yet")
    return len(points)


@picture
def leave_k_out(of: Any, ax: Any) -> None:
    """Predicted against actual changes of the outer loss, one point for each subset."""
    predicted = of.predicted.tolist()
    ax.axline((0, 0), slope=1, color=GREY, lw=1, label="equal")
    ax.plot(predicted, of.actual.tolist(), "o", color=BLUE, alpha=0.8, label="a subset")
    ax.set_title(f"subsets of {of.subsets.shape[1]}, rank correlation {of.correlation:.3f}")
    ax.set(xlabel="change of the outer loss, predicted", ylabel="after training again")
    ax.legend()


@picture
def kfac_error(of: Any, ax: Any) -> int:
    """The relative distances with one standard error, of the whole matrix and of each layer's block."""
    parts = {"all, from the GGN": of.ggn, "all, from its blocks": of.blocks}
    parts |= {"all, from the Hessian": of.hessian} | {f"layer {n}": x for n, x in of.layers.items()}
    ax.set_xlabel("relative distance |K - M| / |M|")
    return _by_name(ax, [(n, float(x.value), float(x.error), "pass") for n, x in parts.items()])


@picture
def report(of: Any, ax: Any) -> int:
    """The relative error of each check that compares numbers, and all checks that failed or warn."""
    shown = [row for row in of.rows if row.status in ("fail", "warn") or row.error is not None]
    ax.set_xlabel("relative error")
    ax.set_title(repr(of).removeprefix("Report(")[-60:-1], parse_math=False)
    return _by_name(ax, [(row.name, row.error, 0.0, row.status) for row in shown])


def _by_name(ax: Any, rows: Sequence[tuple[str, float | None, float, str]]) -> int:
    """Values with errors, one row for each name, the worst first; returns the number of rows.

    A value that a logarithmic axis cannot show is written beside its name.
    """

    def badness(row: Any) -> tuple[int, float]:
        _, x, _, verdict = row
        return [*VERDICTS].index(verdict), -inf if x is None or x != x else -x

    if len(rows) > MOST_ROWS:
        ax.set_ylabel(f"the worst {MOST_ROWS} of {len(rows)}")
    rows, names = sorted(rows, key=badness)[:MOST_ROWS], []
    for y, (name, x, error, verdict) in enumerate(rows):
        colour, marker = VERDICTS[verdict]
        name = name if len(name) < 49 else f"{name[:23]}…{name[-24:]}"
        if x is not None and 0 < x < inf:
            xerr = error if isfinite(error) else 0.0
            ax.errorbar(x, y, xerr=xerr, marker=marker, color=colour, lw=1, ms=6)
        else:
            name += f": {verdict if x is None else f'{x:g}'}"
        names.append(name)
    ax.set_yticks(range(len(rows)), names, parse_math=False)
    for label, (*_, verdict) in zip(ax.get_yticklabels(), rows, strict=True):
        label.set_color(VERMILLION if verdict == "fail" else BLACK)
    ax.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    _scale_by_size(ax, "x", [x for _, x, *_ in rows if x is not None])
    return len(rows)


def _scale_by_size(ax: object, axis: str, values: Iterable[float]) -> None:
    """A logarithmic axis for values of several sizes, linear near zero if one is negative."""
    known = [x for x in values if isfinite(x) and x]
    largest, least = (f(map(abs, known), default=1.0) for f in (max, min))
    if largest > 100 * least:
        # at most three decades, or noise around zero would fill the axis
        linear = 10 ** ceil(log10(max(least, 1e-3 * largest)))
        scale = {"value": "log"} if min(known) > 0 else {"value": "symlog", "linthresh": linear}
        getattr(ax, f"set_{axis}scale")(**scale)


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A data frame of pandas."""
    return validation.package("pandas", "to_dataframe", "`pip install pandas`").DataFrame([*rows])
