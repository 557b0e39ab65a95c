"""Pictures of the benchmarks: times relative to hand-written torch, and memory of inner loops."""

from typing import Any

from matplotlib.figure import Figure

from experiments.benchmarks.summary import Line
from experiments.shared.style import SMALL, decimal_ticks, new_figure, picture
from hoglib.plotting import BAND, BLACK, BLUE, GREEN, GREY, ORANGE

Curves = dict[str, dict[int, tuple[float, float]]]  # {method: {steps: (peak MiB, relative time)}}

LABELS = {"hoglib": "hoglib", "compiled": "hoglib compiled", "jax": "JAX jit"}
MARKS: dict[str, dict[str, Any]] = {
    "jax": {"marker": "o", "color": ORANGE, "ms": 7, "mew": 0, "zorder": 3},
    "hoglib": {"marker": "o", "color": BLUE, "ms": 7, "mew": 0, "zorder": 4},
    "compiled": {"marker": "D", "mfc": "none", "mec": BLUE, "ms": 6.5, "mew": 1.6, "zorder": 5},
}
OTHER_MARKERS = ["s", "^", "v", "P", "X", "<", ">", "*", "p", "h"]  # of other libraries
MEMORY_COLOURS = {"store": BLACK, "checkpoint": ORANGE, "remat": BLUE}


@picture
def plot_benchmarks(lines: dict[str, Line], curves: Curves) -> Figure:
    """Left: times relative to hand-written torch, one row for each line. Right: memory of inner
    loops."""
    rows, both = len(lines), bool(lines) and bool(curves)
    figure = new_figure(10 if both else 7, max(4.0, 0.31 * rows + 1.9))
    axes = figure.subplots(
        1, 1 + both, squeeze=False, gridspec_kw={"width_ratios": [1.7, 1] if both else [1]}
    )
    if lines:
        _plot_times(axes[0, 0], lines)
    if curves:
        axis = axes[0, -1]
        _plot_by_steps(axis, curves, 0)
        axis.set(title="memory of inner loops", yscale="log", ylabel="peak memory, MiB")
        decimal_ticks(axis.yaxis)
        axis.legend(
            fontsize=SMALL, loc="upper center", bbox_to_anchor=(0.5, _legend_offset(rows)), ncols=1
        )
    return figure


@picture
def plot_meta_memory(curves: Curves) -> Figure:
    """Peak memory and time of meta-gradients against the number of inner steps."""
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    for part, axis in enumerate((left, right)):
        _plot_by_steps(axis, curves, part)
    left.set(yscale="log", ylabel="peak memory, MiB")
    decimal_ticks(left.yaxis)
    right.set(ylabel="time / time of stored graphs by hand")
    right.set_ylim(bottom=0)
    figure.suptitle("conv4-32, 5-way 1-shot: the meta-gradient of one task")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def _plot_times(axis: Any, lines: dict[str, Line]) -> None:
    others = [other for line in lines.values() for other in line.entries.get("other", [])]
    libraries = dict.fromkeys(other.called for other in others)
    markers = dict(zip(libraries, OTHER_MARKERS, strict=False))
    axis.axvline(1, color=BLACK, lw=0.8, ls="-", zorder=0)
    handles: dict[str, Any] = {}
    for row, line in enumerate(lines.values()):
        if row % 2:
            axis.axhspan(row - 0.5, row + 0.5, color=BAND, lw=0, zorder=-1)
        for other in line.entries.get("other", []):
            if other.ratio is not None:
                mark = {"marker": markers.get(other.called, "."), "color": GREY, "ms": 5, "mew": 0}
                handles[other.called] = axis.plot(other.ratio, row, ls="", zorder=2, **mark)[0]
        for column, mark in MARKS.items():
            found = line.best(column)
            if found is not None and found.ratio is not None:
                handles[LABELS[column]] = axis.plot(found.ratio, row, ls="", **mark)[0]
    axis.set(xscale="log", ylim=(len(lines) - 0.5, -0.5), xlabel="time / time by hand in torch")
    axis.set_title("left of the line: faster than by hand")
    axis.set_yticks(range(len(lines)), list(lines))
    decimal_ticks(axis.xaxis)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.spines["left"].set_visible(False)
    names = [name for name in (*LABELS.values(), *markers) if name in handles]
    axis.legend(
        [handles[name] for name in names], names, fontsize=SMALL, ncols=4, loc="upper center",
        bbox_to_anchor=(0.35, _legend_offset(len(lines))), handletextpad=0.1, columnspacing=1.0,
    )  # fmt: skip


def _plot_by_steps(axis: Any, curves: Curves, part: int) -> None:
    """One of the two numbers against the inner steps: hoglib solid, other libraries dashed."""
    for name, found in curves.items():
        colour = next((c for memory, c in MEMORY_COLOURS.items() if memory in name), GREEN)
        look: dict[str, Any] = {"marker": "o", "ms": 7, "ls": "-", "zorder": 2}
        if not name.startswith("hoglib"):
            look = {"marker": "s", "ms": 4, "ls": "--", "zorder": 3}
        steps = sorted(found)
        values = [found[count][part] for count in steps]
        axis.plot(steps, values, color=colour, alpha=0.8, label=name, **look)
    every = sorted({count for found in curves.values() for count in found})
    axis.set(xscale="log", xlabel="inner steps")
    axis.set_xticks(every, [str(count) for count in every])
    axis.minorticks_off()


def _legend_offset(rows: int) -> float:
    """The position of a legend below the labels of axes with so many rows."""
    return -0.52 / max(2.4, 0.31 * rows)
