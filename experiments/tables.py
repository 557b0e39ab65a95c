"""Tables: what an experiment prints at its end."""

from collections.abc import Callable, Sequence
from math import nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

# An error beyond this is no fit that failed to improve but a descent that ran away: predicting zero
# costs at most 12.5 on average (amplitude 5).
DIVERGED = 100.0
CURVATURE_ROWS = 13  # of the table of a fit's curvature


class Summary(NamedTuple):
    """Mean and half-width of its 95% interval over the tasks that did not diverge."""

    mean: float
    interval: float
    diverged: int


def summary(errors: Tensor) -> Summary:
    """mean +- 1.96 s / sqrt(n) over the errors that are finite and at most DIVERGED."""
    kept = errors[torch.isfinite(errors) & (errors <= DIVERGED)].double()
    count = len(kept)
    mean = kept.mean().item() if count else nan
    interval = 1.96 * kept.std().item() / sqrt(count) if count > 1 else nan
    return Summary(mean, interval, len(errors) - count)


def few_shot(columns: dict[str, Tensor], steps: list[int]) -> str:
    """Query error after each number of steps: one column a method, errors [len(steps), tasks]."""
    tasks = next(iter(columns.values())).shape[1]
    head = ["gradient steps", *(cell for label in columns for cell in (label, "diverged"))]
    rows = [head]
    for i, count in enumerate(steps):
        row = [str(count)]
        for errors in columns.values():
            mean, interval, diverged = summary(errors[i])
            row += [f"{mean:.3f} ± {interval:.3f}", str(diverged)]
        rows.append(row)
    title = f"Query MSE on {tasks} held-out tasks, mean ± 95% interval"
    note = (
        f"diverged: tasks with an error that is not finite or over {DIVERGED:.0f}; not in the mean."
    )
    return "\n".join([title, "", *align(rows), "", note])


class FewShot(NamedTuple):
    """A row of the table of few-shot classifiers."""

    method: str
    accuracy: float
    interval: float
    parameters: int
    steps: int


NAMES = {"maml": "MAML", "reptile": "Reptile", "imaml": "iMAML", "prototypes": "prototypes"}


def described(algorithm: str, options: dict[str, Any]) -> str:
    """A learner in a few words: its name, and the options that it was given."""
    words = [NAMES[algorithm]]
    for name, value in options.items():
        if isinstance(value, bool):
            words += [name.replace("_", " ")] if value else []
        elif isinstance(value, int | float) and name.startswith("inner_"):
            words.append(f"{name.removeprefix('inner_')} {value:g}")
        else:
            words.append(f"{name} {value}")
    return ", ".join(words)


def mean_and_interval(values: Tensor) -> tuple[float, float]:
    """The mean of values [n], and 1.96 s / sqrt(n)."""
    return values.mean().item(), 1.96 * values.std().item() / sqrt(len(values))


def classified(
    own: FewShot, others: Sequence[FewShot], pixels: FewShot, title: str, tasks: int
) -> str:
    """A run, the newest one of each other method on the same tasks, and pixels by themselves."""
    kept = newest([own, *others], lambda r: r.method)
    rows = [["method", "accuracy", "parameters", "meta-steps", ""]]
    for r in [*sorted(kept, key=lambda r: -r.accuracy), pixels]:
        size, steps = (f"{r.parameters:,}", f"{r.steps:,}") if r.steps else ("", "")
        here = "<- this run" if r is own else ""
        rows.append([r.method, f"{r.accuracy:.1%} ± {r.interval:.1%}", size, steps, here])
    head = f"Accuracy on {tasks} held-out tasks, {title}, mean ± 95% interval"
    return "\n".join([head, "", *align(rows, left=1)])


class Generated(NamedTuple):
    """A row of the table of generators: how it was trained, and `experiments.quality` of its points."""

    penalty: str
    loss: str
    data: str
    steps: int
    covered: int
    high: float
    rarest: float
    distance: float


def generated(
    row: Generated, others: Sequence[Generated], truth: Generated, parts: str, points: int
) -> str:
    """A run, the newest one of each other penalty and loss on the same data, and real points."""
    rows = [["penalty", "loss", "steps", parts, "rarest", "within 3 sigma", "Wasserstein", ""]]
    for r in [*sorted(penalised(row, others), key=lambda r: r.distance), truth]:
        rows.append(
            [
                r.penalty,
                r.loss,
                str(r.steps or ""),
                str(r.covered),
                f"{r.rarest:.2f}",
                f"{r.high:.1%}",
                f"{r.distance:.3f}",
                "<- this run" if r is row else "",
            ]
        )
    head = f"{points} generated points beside as many real ones: {row.data}"
    note = (
        f"{parts}: of 25, those with a point within three sigma; rarest: how frequent the rarest of "
        f"them is (1: as\nall); Wasserstein: distance to held-out real points, for which real points "
        "are the floor."
    )
    return "\n".join([head, "", *align(rows, left=2), "", note])


def newest(rows: Sequence[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """Of rows from the newest on the first of each kind."""
    kept: dict[Any, Any] = {}
    for row in rows:
        kept.setdefault(kind(row), row)
    return [*kept.values()]


def penalised(row: Any, others: Sequence[Any]) -> list[Any]:
    """A row, and the newest of each other penalty and loss on the same data."""
    rows = [row, *(other for other in others if other.data == row.data)]
    return newest(rows, lambda r: (r.penalty, r.loss))


class DrawnRow(NamedTuple):
    """A row of the table of generated digits: how trained, and `experiments.quality.judge_digits`."""

    penalty: str
    loss: str
    data: str
    steps: int
    frechet: float
    confident: float
    classes: int
    entropy: float


def drawn(
    row: DrawnRow, others: Sequence[DrawnRow], truth: DrawnRow, shares: Tensor, images: int
) -> str:
    """A run, the newest one of each other penalty and loss, and real training digits.

    shares [10]: of the classes of this run's digits.
    """
    rows = [["penalty", "loss", "steps", "Frechet", "confident", "classes", "entropy", ""]]
    for r in [*sorted(penalised(row, others), key=lambda r: r.frechet), truth]:
        rows.append(
            [
                r.penalty,
                r.loss,
                str(r.steps or ""),
                f"{r.frechet:.3f}",
                f"{r.confident:.1%}",
                str(r.classes),
                f"{r.entropy:.3f}",
                "<- this run" if r is row else "",
            ]
        )
    listed = ", ".join(f"{digit}: {share:.1%}" for digit, share in enumerate(shares.tolist()))
    return "\n".join(
        [
            f"{images} generated digits beside as many held-out real ones: {row.data}",
            "",
            *align(rows, left=2),
            "",
            f"Of this run's: {listed}",
            "",
            "Frechet: distance of a small classifier's features to those of held-out digits, for "
            "which real training\ndigits are the floor; confident: digits that it gives a class a "
            "probability over 0.9; classes, entropy: of\nthese, how many of the 10 there are, and 1 "
            "if all are equally frequent.",
        ]
    )


class Detection(NamedTuple):
    """Average weights of examples with right and with wrong labels, and how well they tell these apart.

    auc: the probability that of a wrong and a right label, each drawn by chance, the wrong one has the
    lower weight (the area under the ROC curve); nan where there are none of a kind.
    """

    right: float
    wrong: float
    auc: float


def detection(weights: Tensor, wrong: Tensor) -> Detection:
    """weights [n]; wrong [n], whether a label is."""
    of_right, of_wrong = weights[~wrong].double(), weights[wrong].double()
    lower = of_wrong[:, None] < of_right
    equal = of_wrong[:, None] == of_right
    auc = (lower + 0.5 * equal).mean().item() if lower.numel() else nan
    return Detection(of_right.mean().item(), of_wrong.mean().item(), auc)


def reweighted(
    right: dict[str, Tensor],
    curves: dict[str, list[tuple[int, float]]],
    found: Detection,
    noise: str,
) -> str:
    """Accuracy of each network, and the weights of the first.

    right: which test examples [n] it tells right; curves: (step, accuracy) on the way.
    """
    rows = [["trained on", "accuracy", "behind", "best", "right labels", "wrong labels", "AUC"]]
    first, *_ = right.values()
    for label, flags in right.items():
        best = max((value for _, value in curves.get(label, [])), default=nan)
        row = [label, share(flags), "", f"{best:.1%}", "", "", ""]
        if flags is first:
            row[4:] = [f"{value:.2f}" for value in found]
        else:
            row[2] = share(first.double() - flags.double())
        rows.append(["-" if "nan" in cell else cell for cell in row])
    return "\n".join(
        [
            f"Accuracy on {len(first)} held-out digits, ± 95% interval; {noise}",
            "",
            *align(rows, left=1),
            "",
            "behind: the first, digit by digit; best: the highest on the way, by these same digits, "
            "which flatters;\nright, wrong labels: mean weight, 1 in plain training; AUC: of the "
            "weights as a detector of wrong labels.",
        ]
    )


def race(columns: dict[str, list[tuple[int, float]]], ends: dict[str, tuple[str, float]]) -> str:
    """Optimizers beside each other: ends are a label and the held-out error at the end, by name."""

    def last(key: str) -> float:
        return columns[key][-1][1] if key in columns else nan

    rows = [["optimizer", "held out", "best", "training", "gradients", "seconds"]]
    for name, (label, error) in ends.items():
        best = min([error, *(value for _, value in columns.get(f"val/{name}", []))])
        row = [label, f"{error:.4f}", f"{best:.4f}", f"{last(f'train/{name}'):.4f}"]
        row += [f"{last(f'gradients/{name}'):.0f}", f"{last(f'seconds/{name}'):.1f}"]
        rows.append(["-" if cell == "nan" else cell for cell in row])
    return "\n".join(
        [
            "Squared error of an image, pixels from 0 to 1",
            "",
            *align(rows, left=1),
            "",
            "best: the lowest on the way, by these same held-out images, which flatters;\n"
            "gradients: what the run cost, in gradients of the whole training set.",
        ]
    )


def robust(
    epsilons: Sequence[float],
    right: dict[str, dict[str, Tensor]],
    tried: Sequence[tuple[str, float, float, bool]],
    validation: int,
) -> str:
    """Accuracy of networks under attacks, beside the first; and the weights that were tried.

    right: by network and attack, which test images it tells right [epsilons, n]; tried: penalty,
    weight, area and whether it was chosen; validation: the number of images that the areas are of.
    """
    rows = [["", "attack", *(f"{e:g}" for e in epsilons)]]
    first, *others = right
    for label, by_attack in right.items():
        for attack, flags in by_attack.items():
            rows.append([label, attack, *map(share, flags)])
    for label in others:
        for attack, flags in right[label].items():
            gains = flags.double() - right[first][attack].double()
            rows.append([f"{label}: gain", attack, *map(share, gains)])
    count = next(iter(right[first].values())).shape[1]
    lines = [
        f"Accuracy on {count} held-out digits by the bound of the attack (white to black is 1), "
        "± 95% interval",
        "",
        *align(rows, left=2),
        "",
        f"gain: over {first}, digit by digit.",
    ]
    if tried:
        choice = [["penalty", "weight", "area", ""]]
        for kind, weight, area, chosen in tried:
            choice.append([kind, f"{weight:g}", f"{area:.1%}", "<- chosen" if chosen else ""])
        lines += [
            "",
            *align(choice, left=1),
            "",
            f"area: accuracy under PGD on {validation} other digits, the mean over the bounds.",
        ]
    return "\n".join(lines)


def forces(rows: dict[str, Any], atoms: int, clusters: int) -> str:
    """Errors of energies and of forces by what a potential was trained on; the last row is of nothing.

    rows: `experiments.forces.Errors`, of held-out clusters [n], in the same order.
    """
    cells = [["trained on", "energy error", "of it", "force error", "of it"]]
    first, *_, last = rows
    for label, found in rows.items():
        row = [label]
        for errors, known in zip(found, rows[last], strict=True):
            row += [interval(errors), f"{errors.mean() / known.mean():.1%}"]
        cells.append(row)
    for label in [*rows][1:-1]:
        row = [f"{label}: gain"]
        for errors, others in zip(rows[label], rows[first], strict=True):
            row += [interval(others.double() - errors.double()), ""]
        cells.append(row)
    count = len(rows[first].energy)
    return "\n".join(
        [
            f"Errors on {count} held-out clusters of {atoms} atoms, after training on {clusters}; "
            "mean ± 95% interval",
            "",
            *align(cells, left=1),
            "",
            "energy error: |difference| by atom; force error: the mean |difference| of a component;\n"
            f"of it: of that of {last}; gain: over {first}, cluster by cluster.",
        ]
    )


def interval(values: Tensor) -> str:
    """The mean of values [n], +- 1.96 s / sqrt(n)."""
    mean, half = mean_and_interval(values.double())
    return f"{mean:.4f} ± {half:.4f}"


def share(values: Tensor) -> str:
    """The mean of values [n] as a percentage, +- 1.96 s / sqrt(n)."""
    interval = 1.96 * values.double().std(correction=0).item() / sqrt(len(values))
    return f"{values.double().mean().item():.1%} ± {interval:.1%}"


def curvature(
    history: Sequence[Any], losses: dict[int, float], accuracies: dict[int, float], title: str
) -> str:
    """Some of the measurements of a fit, with training loss and test accuracy by step."""
    head = ["step", "train loss", "test accuracy", "largest", "smallest", "trace"]
    gaps = max(1, min(len(history), CURVATURE_ROWS) - 1)
    picks = sorted({round(i * (len(history) - 1) / gaps) for i in range(gaps + 1)})
    rows = [head]
    for one in (history[pick] for pick in picks):
        spectrum = one.spectrum
        trace, error = spectrum.trace
        loss, accuracy = losses.get(one.batch), accuracies.get(one.batch)
        rows.append(
            [
                str(one.batch),
                "-" if loss is None else f"{loss:.4f}",
                "-" if accuracy is None else f"{accuracy:.1%}",
                f"{float(spectrum.largest[-1]):.2f}",
                f"{float(spectrum.smallest[0]):.3f}",
                f"{trace:.1f} ± {error:.1f}",
            ]
        )
    note = "largest, smallest: eigenvalues of the Hessian; trace: estimate ± one standard error."
    return "\n".join([title, "", *align(rows), "", note])


def align(rows: list[list[str]], left: int = 0) -> list[str]:
    """Right-aligned columns under a ruled head; the first `left` ones left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
