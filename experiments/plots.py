"""Every picture: one function each, which returns the file it wrote. No screen is needed."""

import csv
from collections.abc import Callable
from itertools import pairwise
from math import asinh, ceil, floor, log, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch

from hoglib.meta import Learner

if TYPE_CHECKING:  # what brings Lightning, which benchmarks do without
    from experiments.benchmarks.summary import Line
    from experiments.data.noisy_digits import Examples
    from hoglib.curvature.spectrum import Spectrum
    from hoglib.lightning.curvature import Measurement

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

INK, TRUTH, BEFORE, ONE, TEN = "#222222", "#999999", "#c7c7c7", "#e08214", "#2166ac"
DIGITS = 14  # in each group of the picture of weights
# of the times beside those by hand
CALLED = {"hoglib": "hoglib", "compiled": "hoglib compiled", "jax": "JAX jit"}
LOOKS: dict[str, dict[str, Any]] = {
    "jax": {"marker": "o", "color": ONE, "markersize": 7, "mew": 0, "zorder": 3},
    "hoglib": {"marker": "o", "color": TEN, "markersize": 7, "mew": 0, "zorder": 4},
    "compiled": {
        "marker": "D", "markerfacecolor": "none", "markeredgecolor": TEN, "markersize": 6.5,
        "mew": 1.6, "zorder": 5,
    },
}  # fmt: skip
OTHERS = ["s", "^", "v", "P", "X", "<", ">", "*", "p", "h"]  # markers of other libraries
KEPT = {"store": INK, "checkpoint": ONE, "remat": TEN}  # of an inner loop, for its backward


def adaptation(maml: Learner, waves: Any, label: str, file: Path, tasks: int = 3) -> Path:
    """Held-out sine waves: truth, support points, prediction before, after 1 and after 10 steps."""
    grid = torch.linspace(-5, 5, 200, device=next(maml.parameters()).device).unsqueeze(-1)
    figure, axes = plt.subplots(1, tasks, figsize=(4 * tasks, 3.2), sharey=True)
    for i, axis in enumerate(axes):
        x, y = (part[i].to(grid) for part in waves.support)
        truth = waves.amplitude[i] * torch.sin(grid.cpu() - waves.phase[i])
        axis.plot(grid.cpu(), truth, color=TRUTH, linewidth=5, alpha=0.5, label="truth")
        with torch.no_grad():
            for steps, colour, style in ((0, INK, ":"), (1, ONE, "--"), (10, TEN, "-")):
                prediction = maml(grid, params=maml.adapt((x, y), steps=steps)).cpu()
                name = "before" if steps == 0 else f"after {steps} step{'s' * (steps > 1)}"
                axis.plot(grid.cpu(), prediction, style, color=colour, label=name)
        axis.plot(x.cpu(), y.cpu(), "o", color=INK, markersize=5, label="support points")
        axis.set(xlabel="x", xlim=(-5, 5), title=f"held-out task {i + 1}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("y")
    figure.suptitle(f"{label}: a new sine wave from {len(waves.support[0][0])} points")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return _save(figure, file)


def training_curve(metrics: Path, file: Path) -> Path:
    """Every column of a metrics.csv that has more than one row, against the step."""
    figure, axis = plt.subplots(figsize=(6, 4))
    for key, points in columns(metrics).items():
        _curve(axis, key, points)
    axis.set(xlabel="meta-step", ylabel="mean squared error", yscale="log")
    axis.spines[["top", "right"]].set_visible(False)
    if axis.lines:
        axis.legend(frameon=False)
    figure.tight_layout()
    return _save(figure, file)


def gan_curves(metrics: Path, file: Path) -> Path:
    """Losses and penalty of a metrics.csv above, quality of held-out points below."""
    from experiments.data.mixture import PARTS  # brings Lightning, which benchmarks do without

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
    for key, points in columns(metrics).items():
        if key == "val/covered":
            points = [(step, value / PARTS) for step, value in points]
            key = "val/covered (share)"
        losses = key.startswith("train/") or key == "val/penalty"
        _curve(above if losses else below, key, points)
    above.set(ylabel="loss")
    below.set(xlabel="step", ylabel="quality")
    below.set_ylim(bottom=0)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    return _save(figure, file)


def points(
    critic: Callable[[torch.Tensor], torch.Tensor],
    real: torch.Tensor,
    fake: torch.Tensor,
    title: str,
    file: Path,
) -> Path:
    """Real and generated points [n, 2] over contours of the critic."""
    margin = 0.12 * (real.max() - real.min())
    low, high = (real.min() - margin).item(), (real.max() + margin).item()
    line = torch.linspace(low, high, 200, device=real.device, dtype=real.dtype)
    with torch.no_grad():
        scores = critic(torch.cartesian_prod(line, line)).reshape(200, 200).T.cpu()
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 5.2), sharex=True, sharey=True, layout="constrained"
    )
    for axis, name, sample in ((axes[0], "real", real), (axes[1], "generated", fake)):
        contours = axis.contourf(
            line.cpu(), line.cpu(), scores, levels=20, cmap="PuOr_r", alpha=0.6
        )
        axis.plot(*sample.cpu().T, ".", color=INK, markersize=2, alpha=0.5, markeredgewidth=0)
        axis.set(title=f"{len(sample)} {name} points", xlim=(low, high), ylim=(low, high))
        axis.set_aspect("equal")
    figure.suptitle(title)
    figure.colorbar(contours, ax=axes, label="critic's score: higher is more real", shrink=0.8)
    return _save(figure, file)


def save_grid(images: torch.Tensor, across: int, file: Path) -> Path:
    """Images [n, 1, h, w] from -1 to 1, `across` in a row, without a gap; black on white."""
    from PIL import Image  # comes with matplotlib

    shades = (127.5 - 127.5 * images.detach().cpu()).round().clamp(0, 255).to(torch.uint8)
    count, _, height, width = images.shape
    rows = shades.reshape(count // across, across, height, width).transpose(1, 2)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rows.reshape(-1, across * width).numpy()).save(file)
    return file


def drawn(
    grids: dict[int, Path],
    across: int,
    columns: dict[str, list[tuple[int, float]]],
    floor: float,
    shares: torch.Tensor,
    title: str,
    file: Path,
) -> Path:
    """The first row of some grids of `save_grid` by step, the whole last one, scores and classes.

    columns: val/frechet by step; floor: of real digits; shares [10]: of the classes at the end.
    """
    from PIL import Image

    figure: Any = plt.figure(figsize=(11.5, 6.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
    early, below = left.subfigures(2, 1, height_ratios=(1.15, 1))
    steps = spread([*grids], 6)
    strips = []
    for step in steps:
        with Image.open(grids[step]) as image:
            pixels = torch.tensor(np.asarray(image))
        strips.append(
            torch.nn.functional.pad(pixels[: len(pixels) // across], (0, 0, 0, 8), value=255)
        )
    axis = early.subplots()
    axis.imshow(torch.cat(strips).numpy(), cmap="gray", vmin=0, vmax=255)
    tall = len(strips[0])
    axis.set_yticks(
        [tall * i + (tall - 8) / 2 for i in range(len(steps))], [f"{s:,}" for s in steps]
    )
    axis.set(xticks=[], ylabel="step", title=f"the same {across} points over time")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    score, classes = below.subplots(1, 2, width_ratios=(1.3, 1))
    points = columns.get("val/frechet", [])
    score.plot(*zip(*points, strict=True) if points else ([], []), color=TEN, lw=1.8)
    score.axhline(floor, color=INK, ls="--", lw=1.2)
    score.annotate(
        "real training digits", (1, floor), (-4, 3), ("axes fraction", "data"),
        textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    score.set_xlim(left=0)
    score.set(xlabel="step", ylabel="Frechet distance to held-out digits", yscale="log")
    score.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    score.yaxis.set_major_formatter("{x:g}")
    score.yaxis.set_minor_locator(NullLocator())
    classes.bar(range(len(shares)), (100 * shares).tolist(), color=TEN)
    classes.axhline(100 / len(shares), color=INK, ls="--", lw=1.2)
    classes.set(xlabel="class, by the classifier", ylabel="share of generated digits, %")
    classes.set_xticks(range(len(shares)))
    for axis in (score, classes):
        axis.spines[["top", "right"]].set_visible(False)
    axis = right.subplots()
    with Image.open(grids[steps[-1]]) as image:
        axis.imshow(np.asarray(image), cmap="gray", vmin=0, vmax=255)
    axis.set_axis_off()
    axis.set_title(f"after {steps[-1]:,} steps, none picked")
    figure.suptitle(title)
    return _save(figure, file)


def spread(steps: list[int], count: int) -> list[int]:
    """At most `count` of some increasing steps, first and last with them, evenly by their logarithm."""
    if len(steps) <= count:
        return steps
    low, high = log(steps[0]), log(steps[-1])
    wanted = [low + (high - low) * i / (count - 1) for i in range(count)]
    return sorted({min(steps, key=lambda step: abs(log(step) - at)) for at in wanted})


def reweighted(
    examples: "Examples",
    weights: torch.Tensor,
    curves: dict[str, list[tuple[int, float]]],
    title: str,
    file: Path,
) -> Path:
    """Digits of lowest and highest weight [n]; weights of right and wrong labels; (step, accuracy)."""
    figure: Any = plt.figure(figsize=(11, 6.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.2))
    order = weights.argsort(stable=True)
    lowest, highest = above.subfigures(1, 2)
    _digits(lowest, "lowest average weights", examples, order[:DIGITS])
    _digits(highest, "highest average weights", examples, order.flip(0)[:DIGITS])
    left, right = below.subplots(1, 2)
    wrong = examples.label != examples.truth
    bins = torch.linspace(0, weights.max().item() if len(weights) else 1, 41)
    for name, some, colour in (("wrong labels", wrong, ONE), ("right labels", ~wrong, TEN)):
        left.hist(weights[some].numpy(), bins.numpy(), color=colour, alpha=0.6, label=name)
    left.set(xlabel="average weight (1: as in plain training)", ylabel="training examples")
    left.set_yscale("symlog", linthresh=10)  # a few have weights of ten, hundreds have none
    left.set_yticks([0, 10, 100, 1000], ["0", "10", "100", "1000"])
    for (name, points), colour in zip(curves.items(), (TEN, ONE, TRUTH, INK), strict=False):
        right.plot(*zip(*points, strict=True) if points else ([], []), color=colour, label=name)
    right.set(xlabel="step", ylabel="accuracy on held-out digits")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=9)
    figure.suptitle(f'{title}; "0, is 9": the label says 0, truth is 9', fontsize=11)
    return _save(figure, file)


def race(
    columns: dict[str, list[tuple[int, float]]],
    labels: dict[str, str],
    images: dict[str, torch.Tensor],
    file: Path,
) -> Path:
    """Errors of optimizers by seconds and by gradients; below, images [n, 64] and what became of them.

    columns: train, val, gradients and seconds, each with the name of an optimizer behind a slash.
    """
    figure: Any = plt.figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1))
    axes = above.subplots(1, 2, sharey=True)
    costs = {"seconds": "seconds", "gradients": "gradients of the whole training set"}
    for axis, (cost, label) in zip(axes, costs.items(), strict=True):
        for (name, of), colour in zip(labels.items(), (TEN, ONE), strict=False):
            spent = [value for _, value in columns.get(f"{cost}/{name}", [])]
            for part, what, style in (("val", "held out", "-"), ("train", "training", ":")):
                errors = [value for _, value in columns.get(f"{part}/{name}", [])]
                axis.plot(spent, errors, style, color=colour, lw=1.8, label=f"{of}, {what}")
        axis.set(xlabel=label, yscale="log")
        axis.set_xlim(left=0)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("squared error of an image")
    axes[1].legend(frameon=False)
    above.suptitle("An autoencoder of digits")
    _tiles(below, {name: some[:16].detach() for name, some in images.items()}, {})
    return _save(figure, file)


def episode(
    support: torch.Tensor,
    query: torch.Tensor,
    label: torch.Tensor,
    predicted: torch.Tensor,
    title: str,
    file: Path,
    most: int = 10,
) -> Path:
    """A task: what was shown of each class, and to the right what was told of other images of it.

    support, query [n, channels, size, size] from 0 to 1; label, predicted [n] of query. Classes have a
    letter each; an image that was taken for another class has that one's, in a frame.
    """
    ways, size = int(label.max()) + 1, query.shape[-1]
    shots = len(support) // ways
    asked = min(most, int((label == 0).sum()))
    figure, axis = plt.subplots(
        figsize=(0.62 * (shots + asked) + 1.2, 0.62 * ways + 1), layout="constrained"
    )
    apart, pad = size + 6, 3
    rows = []
    for way in range(ways):
        # of 20 ways as of 5: all images of a class lie together
        shown = [support[way * shots + i] for i in range(shots)]
        shown += list(query[label == way][:asked])
        rows.append(torch.cat([torch.nn.functional.pad(x, (pad,) * 4) for x in shown], -1))
        told = predicted[label == way][:asked].tolist()
        for i, guess in enumerate(told):
            if guess != way:
                left, top = (shots + i) * apart + 0.5, way * apart + 0.5
                frame = Rectangle((left, top), apart - 2, apart - 2, fill=False, ec=ONE, lw=2)
                axis.add_patch(frame)
                axis.text(left + 2, top + 2, _letter(guess), color=ONE, va="top", fontsize=9)
    image = torch.cat(rows, -2).movedim(0, -1).squeeze(-1).numpy()
    axis.imshow(1 - image, cmap="gray", vmin=0, vmax=1)
    axis.axvline(shots * apart - 0.5, color=TEN, lw=2)
    axis.set_yticks([apart * (i + 0.5) for i in range(ways)], [_letter(i) for i in range(ways)])
    axis.set_xticks(
        [shots * apart / 2, (shots + asked / 2) * apart], ["shown", "asked; framed: taken for"]
    )
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    right = (predicted == label).float().mean().item()
    axis.set_title(f"{title}\na held-out task, {right:.0%} of {len(label)} right", fontsize=10)
    return _save(figure, file)


def _letter(number: int) -> str:
    return chr(ord("A") + number % 26)


def few_shot_curves(metrics: Path, file: Path) -> Path:
    """Accuracy on validation tasks by meta-step."""
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    points = columns(metrics).get("val/accuracy", [])
    axis.plot(*zip(*points, strict=True) if points else ([], []), color=TEN, marker=".")
    axis.set(xlabel="meta-step", ylabel="accuracy on validation tasks")
    axis.spines[["top", "right"]].set_visible(False)
    return _save(figure, file)


class Row(NamedTuple):
    """Images [n, 64], what a network says of them [n] and what they are [n]."""

    x: torch.Tensor
    said: torch.Tensor
    label: torch.Tensor


def robust(
    epsilons: list[float],
    right: dict[str, dict[str, torch.Tensor]],
    epsilon: float,
    rows: dict[str, Row],
    slopes: dict[str, torch.Tensor],
    file: Path,
) -> Path:
    """Accuracy by the bound of each attack, with 95% intervals; below, images attacked within epsilon
    with what the networks say of them, and the slopes [n, 64] of their losses.

    right: by network and attack, which images it tells right [epsilons, n].
    """
    figure: Any = plt.figure(figsize=(11, 6.3), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 0.8))
    attacks = [*next(iter(right.values()))]
    axes = above.subplots(1, len(attacks), sharey=True)
    for axis, attack in zip(axes, attacks, strict=True):
        for (label, by_attack), colour in zip(right.items(), (INK, TEN, ONE), strict=False):
            flags = by_attack[attack].double()
            mean, half = flags.mean(1), 1.96 * flags.std(1, correction=0) / flags.shape[1] ** 0.5
            axis.fill_between(epsilons, mean - half, mean + half, color=colour, alpha=0.15, lw=0)
            axis.plot(epsilons, mean, "o-", color=colour, ms=4, lw=1.8, label=label)
        axis.set(title=attack, xlabel="bound of the attack (white to black is 1)", ylim=(0, 1.02))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("accuracy on held-out digits")
    axes[0].legend(frameon=False, loc="lower left", title="trained with penalty, weight")
    left, right_half = below.subfigures(1, 2)
    left.suptitle(f"attacked by PGD within {epsilon:g}; above each, what is said", fontsize=10)
    right_half.suptitle("slope of the loss (red: more ink raises it, blue: lowers it)", fontsize=10)
    axis = _tiles(left, {label: row.x for label, row in rows.items()}, {})
    for i, row in enumerate(rows.values()):
        for j, (said, label) in enumerate(zip(row.said.tolist(), row.label.tolist(), strict=True)):
            colour = TEN if said == label else ONE
            axis.text(*_at(i, j), said, color=colour, ha="center", va="bottom", fontsize=10)
    _tiles(right_half, {"digit": rows["digit"].x}, slopes)
    return _save(figure, file)


def _at(row: int, column: int) -> tuple[float, float]:
    """Where to write above a tile of `_tiles`."""
    return 10 * column + 4.5, 12 * row + 3.5


def _tiles(figure: Any, images: dict[str, torch.Tensor], slopes: dict[str, torch.Tensor]) -> Any:
    """A row [n, 64] for each name: images from -1 to 1, then slopes, each from its own -max to max."""
    scaled = {name: some / some.abs().amax(1, keepdim=True) for name, some in slopes.items()}
    lines = []
    for colours, rows in (("gray_r", images), ("RdBu_r", scaled)):
        for some in rows.values():
            tones = torch.from_numpy(mpl.colormaps[colours](((some + 1) / 2).cpu().numpy()))
            tiles = tones.reshape(-1, 8, 8, 4).permute(0, 3, 1, 2)
            apart = torch.nn.functional.pad(tiles, (1, 1, 4, 0), value=1.0)
            lines.append(torch.cat([*apart], 2))
    axis = figure.subplots()
    axis.imshow(torch.cat(lines, 1).permute(1, 2, 0).numpy())
    names = [name.replace(", ", "\n") for name in (*images, *slopes)]
    axis.set_yticks([12 * i + 7.5 for i in range(len(names))], names, fontsize=9)
    axis.set_anchor("N")
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return axis


class Cut(NamedTuple):
    """Energies [m] where an atom is at distances [m] from the others' centre, by what was learned from.

    start: where it is in the cluster that is cut; training: where outermost atoms of training clusters
    are [n].
    """

    distances: torch.Tensor
    truth: torch.Tensor
    energies: dict[str, torch.Tensor]
    start: float
    training: torch.Tensor


def forces(truth: torch.Tensor, predicted: dict[str, torch.Tensor], cut: Cut, file: Path) -> Path:
    """Predicted components of forces by true ones, by what was learned from; and a cut through E."""
    count = len(predicted)
    figure, axes = plt.subplots(
        1, count + 1, figsize=(4.1 * (count + 1), 4.2), layout="constrained"
    )
    true = truth.flatten()
    end = 1.05 * float(true.abs().max())
    for axis, (label, found), colour in zip(axes, predicted.items(), (ONE, TEN), strict=False):
        axis.plot([-end, end], [-end, end], color=TRUTH, lw=1, zorder=0)
        axis.plot(true, found.flatten(), ".", color=colour, ms=2.5, alpha=0.35, mew=0)
        error = float((found - truth).square().mean().sqrt() / truth.square().mean().sqrt())
        said = f"RMS error: {error:.1%} of the RMS force"
        beyond = int((found.abs() > end).sum())
        if beyond:
            said += f"\n{beyond} of {found.numel()} lie beyond"
        axis.text(0.04, 0.96, said, transform=axis.transAxes, va="top")
        axis.set(title=f"trained on {label}", xlim=(-end, end), ylim=(-end, end))
        axis.set(xlabel="true force component", aspect="equal")
    axes[0].set_ylabel("predicted")
    axis = axes[-1]
    axis.plot(cut.distances, cut.truth, color=TRUTH, lw=5, alpha=0.5, label="truth")
    for (label, energies), colour in zip(cut.energies.items(), (ONE, TEN), strict=False):
        axis.plot(cut.distances, energies, color=colour, lw=1.8, label=label)
    low, at_end = float(cut.truth.min()), float(cut.truth[-1])
    high = at_end + 0.6 * (at_end - low)
    axis.set_ylim(low - 0.25 * (at_end - low), high)
    inside = cut.training[cut.training <= cut.distances[-1]]
    axis.plot(
        inside, torch.full_like(inside, 0.02), "|", color=INK, ms=7, alpha=0.4,
        transform=axis.get_xaxis_transform(), label="training clusters",
    )  # fmt: skip
    axis.axvline(cut.start, color=BEFORE, lw=0.8, zorder=0, label="where it was")
    axis.set(xlabel="distance of the outermost atom, sigma", ylabel="energy of a held-out cluster")
    axis.set_title("one atom is pulled out")
    axis.legend(frameon=False, fontsize=9)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return _save(figure, file)


def _digits(figure: Any, title: str, examples: "Examples", picks: torch.Tensor) -> None:
    """Images in two rows, each with the label that was given and, if that is wrong, the true one."""
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, DIGITS // 2).flatten()
    for axis in axes:
        axis.set_axis_off()
    for axis, pick in zip(axes, picks.tolist(), strict=False):
        given, truth = int(examples.label[pick]), int(examples.truth[pick])
        axis.imshow(examples.x[pick].reshape(8, 8).numpy(), cmap="gray_r")
        axis.set_title(
            f"{given}" if given == truth else f"{given}, is {truth}",
            fontsize=9,
            color=TEN if given == truth else ONE,
        )


def columns(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each column of training and validation that has more than one row."""
    with metrics.open(newline="") as stream:
        every = list(csv.DictReader(stream))
    # a later `validate` or `test` writes its rows at step 0 again: they are of no training
    last = next(
        (i for i, (a, b) in enumerate(pairwise(every), 1) if int(b["step"]) < int(a["step"])), None
    )
    rows = every[:last]
    columns = {
        key: [(int(row["step"]) + 1, float(row[key])) for row in rows if row[key] != ""]
        for key in (rows[0] if rows else ())
        if key not in ("step", "epoch") and not key.startswith("test/")
    }
    return {key: points for key, points in columns.items() if len(points) > 1}


def _curve(axis: Any, key: str, points: list[tuple[int, float]]) -> None:
    faint = key.startswith("train/")
    axis.plot(
        *zip(*points, strict=True),
        label=key,
        alpha=0.4 if faint else 1,
        linewidth=1 if faint else 1.8,
        zorder=1 if faint else 2,
    )


def benchmarks(
    lines: "dict[str, Line]", curves: dict[str, dict[int, tuple[float, float]]], file: Path
) -> Path:
    """Left, times to those by hand, a row for each of the lines; right, memory against inner steps.

    curves: as of `meta_memory`.
    """
    rows = len(lines)
    both = bool(lines) and bool(curves)
    figure, axes = plt.subplots(
        1,
        1 + both,
        squeeze=False,
        figsize=(10 if both else 7, max(4.0, 0.31 * rows + 1.9)),
        width_ratios=[1.7, 1] if both else [1],
        layout="constrained",
    )
    if lines:
        _times(axes[0, 0], lines)
    if curves:
        axis = axes[0, -1]
        _by_steps(axis, curves, 0)
        axis.set(title="memory of inner loops", yscale="log", ylabel="peak memory, MiB")
        axis.title.set_fontsize(10)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.legend(
            frameon=False,
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, _below(rows)),
            ncols=1,
        )
    return _save(figure, file)


def _below(rows: int) -> float:
    """Where a legend is out of the way of what axes of so many rows say below."""
    return -0.52 / max(2.4, 0.31 * rows)


def _times(axis: Any, lines: "dict[str, Line]") -> None:
    markers = dict(zip(_called(lines), OTHERS, strict=False))
    axis.axvline(1, color=INK, lw=0.8, zorder=0)
    seen: dict[str, Any] = {}
    for row, line in enumerate(lines.values()):
        if row % 2:
            axis.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", lw=0, zorder=-1)
        for other in line.entries.get("other", []):
            if other.ratio is not None:
                marker = markers.get(other.called, ".")
                look = {"marker": marker, "color": TRUTH, "markersize": 5, "mew": 0, "zorder": 2}
                seen[other.called] = axis.plot(other.ratio, row, ls="", **look)[0]
        for column, look in LOOKS.items():
            found = line.best(column)
            if found is not None and found.ratio is not None:
                label = CALLED[column]
                seen[label] = axis.plot(found.ratio, row, ls="", **look)[0]
    axis.set(xscale="log", ylim=(len(lines) - 0.5, -0.5), xlabel="time, to torch by hand")
    axis.set_title("to the left of the line: faster than by hand", fontsize=10)
    axis.set_yticks(range(len(lines)), list(lines), fontsize=9)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    order = [*CALLED.values(), *markers]
    names = [name for name in order if name in seen]
    axis.legend(
        [seen[name] for name in names], names, frameon=False, fontsize=8, ncols=4,
        loc="upper center", bbox_to_anchor=(0.35, _below(len(lines))), handletextpad=0.1,
        columnspacing=1.0,
    )  # fmt: skip


def _called(lines: "dict[str, Line]") -> list[str]:
    every = (other.called for line in lines.values() for other in line.entries.get("other", []))
    return list(dict.fromkeys(every))


def spectra(found: "dict[str, Spectrum]", file: Path) -> Path:
    """The density of eigenvalues, with one standard error, and those at the ends as ticks."""
    figure, axes = plt.subplots(len(found), 1, figsize=(7, 3.2 * len(found)), squeeze=False)
    for axis, (name, one) in zip(axes[:, 0], found.items(), strict=True):
        of = one.density
        low = float(of.density.max()) * 1e-6  # what is below is the tails of the Gaussians
        axis.fill_between(
            of.grid, (of.density - of.error).clamp(min=low), of.density + of.error, color=TRUTH, lw=0
        )  # fmt: skip
        axis.plot(of.grid, of.density, color=TEN, lw=1.2)
        ends = torch.cat([one.smallest, one.largest])
        axis.plot(ends, torch.full_like(ends, 2 * low), "|", color=ONE, ms=12, mew=1.5)
        axis.set(yscale="log", ylim=(low, 4e6 * low), ylabel="density", title=name)
        axis.axvline(0, color=BEFORE, lw=0.8, zorder=0)
    axes[-1, 0].set_xlabel("eigenvalue of the Hessian")
    figure.tight_layout()
    return _save(figure, file)


def spectrum_over_training(
    history: "list[Measurement]", losses: dict[int, float], lr: float, title: str, file: Path
) -> Path:
    """Loss and largest eigenvalue by step; below, the density of all. Dashed: 2 / lr, if near."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 7), sharex=True, layout="constrained", height_ratios=(1, 1.3)
    )
    steps = [one.batch for one in history]
    above.plot([*losses], [*losses.values()], color=TEN, lw=1.3)
    above.set(yscale="log", title=title)
    above.set_ylabel("training loss", color=TEN)
    above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_locator(NullLocator())
    sharp = above.twinx()
    largest = [float(one.spectrum.largest[-1]) for one in history]
    sharp.plot(steps, largest, color=ONE, lw=2)
    sharp.set_ylabel("largest eigenvalue of the Hessian", color=ONE)
    near = 2 / lr < 4 * max(largest)  # a line far above would press all else to the ground
    if near:
        sharp.axhline(2 / lr, color=INK, ls="--", lw=1.3)
        sharp.annotate(
            f"2 / lr = {2 / lr:.3g}", (1, 2 / lr), (-4, -5), ("axes fraction", "data"),
            textcoords="offset points", ha="right", va="top",
        )  # fmt: skip
    sharp.set_ylim(min(0, *largest), 1.05 * max(2 / lr if near else 0, *largest))
    for axis in (above, sharp):
        axis.spines["top"].set_visible(False)
    edges, counts, linear = _by_decade([one.spectrum for one in history])
    colours = below.pcolormesh(
        _between(steps),
        edges,
        counts,
        norm=LogNorm(1, max(10, counts.max())),
        cmap="magma",
        rasterized=True,
    )
    below.set_yscale("asinh", linear_width=linear)
    highest = floor(log10(abs(edges).max()))
    sizes = [10.0**e for e in range(ceil(log10(linear)), highest + 1)]
    ticks = [*(-size for size in reversed(sizes)), 0, *sizes]
    ticks = [tick for tick in ticks if edges[0] < tick < edges[-1]]
    below.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    below.yaxis.set_minor_locator(NullLocator())
    if near:
        below.axhline(2 / lr, color="white", ls="--", lw=1.3)
    below.set(xlabel="step", ylabel="all eigenvalues of the Hessian", facecolor="black")
    figure.colorbar(colours, ax=below, label="eigenvalues per decade", pad=0.02)
    return _save(figure, file)


def _by_decade(spectra: "list[Spectrum]") -> tuple[Any, Any, float]:
    """Edges [n + 1] of rows, eigenvalues in a decade there [n, spectra], and what is linear.

    Each node of a density is a Gaussian of the same width on an axis of asinh(eigenvalue / linear),
    which is logarithmic beyond `linear` and linear within: nearer to zero than a hundredth of the
    largest, a few dozen steps of Lanczos do not tell eigenvalues apart.
    """
    ends = torch.stack([torch.stack([s.smallest[0], s.largest[-1]]).double() for s in spectra])
    linear = 1e-2 * float(ends.abs().max()) or 1.0
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    width = 0.15
    rows = torch.linspace(asinh(low / linear) - 4 * width, asinh(high / linear) + 4 * width, 241)
    edges, rows = rows.double(), ((rows[1:] + rows[:-1]) / 2).double()
    counts = []
    for s in spectra:
        z = (rows[:, None] - torch.asinh(s.density.nodes / linear).reshape(-1)) / width
        each = torch.exp(-z.square() / 2) / (width * (2 * torch.pi) ** 0.5)
        of_sample = s.density.weights.reshape(-1) / len(s.density.nodes)
        counts.append(s.size * log(10) * each @ of_sample)
    return (torch.sinh(edges) * linear).numpy(), torch.stack(counts, 1).numpy(), linear


def _between(steps: list[int]) -> list[float]:
    """Edges around steps, half-way between them."""
    inner = [(a + b) / 2 for a, b in pairwise(steps)]
    return [steps[0], *inner, steps[-1] + (not inner)]


def meta_memory(methods: dict[str, dict[int, tuple[float, float]]], file: Path) -> Path:
    """Inner loops of many steps: peak memory on the left, time on the right; by hand dashed.

    methods: {name: {steps: (peak MiB, time to the graphs stored by hand)}}, the name with what is kept.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    for part, axis in enumerate((left, right)):
        _by_steps(axis, methods, part)
    left.set(yscale="log", ylabel="peak memory, MiB")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.minorticks_off()
    right.set(ylabel="time, to the graphs stored by hand")
    right.set_ylim(bottom=0)
    figure.suptitle("conv4-32, 5-way 1-shot: the meta-gradient of one task")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    return _save(figure, file)


def _by_steps(axis: Any, methods: dict[str, dict[int, tuple[float, float]]], part: int) -> None:
    """One of the two numbers against the inner steps, hoglib solid."""
    for name, found in methods.items():
        colour = next((c for kept, c in KEPT.items() if kept in name), TRUTH)
        look: dict[str, Any] = {"marker": "o", "markersize": 7, "linestyle": "-", "zorder": 2}
        if not name.startswith("hoglib"):
            look = {"marker": "s", "markersize": 4, "linestyle": "--", "zorder": 3}
        steps = sorted(found)
        values = [found[count][part] for count in steps]
        axis.plot(steps, values, color=colour, alpha=0.8, label=name, **look)
    every = sorted({count for found in methods.values() for count in found})
    axis.set(xscale="log", xlabel="inner steps")
    axis.set_xticks(every, [str(count) for count in every])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, dpi=150)
    plt.close(figure)
    return file
