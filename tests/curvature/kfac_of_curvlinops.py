"""What curvlinops 3.0.1 computes for small networks, as data for the tests: kfac_of_curvlinops.json.

    python -m tests.curvature.kfac_of_curvlinops        in an environment with torch 2.13.0 and
                                                        curvlinops-for-pytorch 3.0.1 of
                                                        constraints-peers.txt

Weights and inputs are sines of integers, so that no version of torch draws others, and so are the
targets in the place of those that "mc" draws. Matrices are stored as their lower triangles, with ten
digits.
"""

import json
from itertools import product
from pathlib import Path

import torch
from torch import nn

STORED = Path(__file__).with_suffix(".json")
F64 = torch.float64


def sines(*shape, start):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=F64) * 1.7 + start).sin().reshape(shape)


class Positions(nn.Module):
    """A linear layer that positions share."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).mean(1))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 2), nn.Linear(2, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).mean((2, 3)))


LABELS = torch.tensor([0, 1, 1, 0, 2, 1, 0, 2])
PROBLEMS = {
    "MLP, cross entropy": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)), nn.CrossEntropyLoss, (8, 2), LABELS),
    "MLP, mean square": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), nn.MSELoss, (8, 2), sines(8, 2, start=9.0)),
    "MLP, binary": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), nn.BCEWithLogitsLoss, (8, 2), (sines(8, 2, start=9.0) > 0).to(F64)),
    "positions": (Positions, nn.CrossEntropyLoss, (8, 3, 2), LABELS % 2),
    "CNN": (Pooled, nn.CrossEntropyLoss, (8, 1, 3, 3), LABELS),
}  # fmt: skip
SHARED = ("positions", "CNN")  # where weights are shared, and the two approximations differ
DAMPING = 0.03
SAMPLES = 2
INVERSES = {
    "exact": {"use_exact_damping": True},
    "pi": {"use_heuristic_damping": True},
    "factors": {},
}


def problem(name, reduction="mean"):
    """(model, criterion, batches of unlike sizes)."""
    make, criterion, shape, y = PROBLEMS[name]
    model = make().double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(sines(*p.shape, start=float(i)))
    x = sines(*shape, start=5.0)
    return model, criterion(reduction=reduction), [(x[:5], y[:5]), (x[5:], y[5:])]


def drawn(criterion, outputs, number):
    """The targets that stand for the draw of this number."""
    noise = sines(*outputs.shape, start=3.0 + number + len(outputs))
    if isinstance(criterion, nn.MSELoss):
        return outputs.detach() + noise
    if isinstance(criterion, nn.BCEWithLogitsLoss):
        return (noise > 0).to(outputs)
    return noise.argmax(1)


def cases():
    """(name, kind, approximation, whether a bias is joint, whether corrected)."""
    for name in PROBLEMS:
        approximations = ("expand", "reduce") if name in SHARED else ("expand",)
        yield from product(
            [name], ("exact", "mc", "empirical"), approximations, (True, False), (True, False)
        )


def key(case):
    return ", ".join(map(str, case))


def main():
    from curvlinops import EKFACLinearOperator, KFACInverseLinearOperator, KFACLinearOperator

    def draw_label(operator, outputs):
        count[0] += 1
        return drawn(operator._loss_func, outputs, count[0] % SAMPLES)

    count = [-1]
    KFACLinearOperator.draw_label = draw_label

    def triangle(operator):
        dense = torch.as_tensor(operator @ torch.eye(operator.shape[1], dtype=F64))
        i, j = torch.tril_indices(*dense.shape)
        return [float(f"{value:.10g}") for value in dense[i, j].tolist()]

    stored = {}
    for case in cases():
        name, kind, approximation, joint, corrected = case
        model, criterion, data = problem(name)
        kind = {"exact": "type-2"}.get(kind, kind)
        operator = (EKFACLinearOperator if corrected else KFACLinearOperator)(
            model, criterion, list(model.parameters()), data, fisher_type=kind,
            kfac_approx=approximation, separate_weight_and_bias=not joint,
            mc_samples=SAMPLES if kind == "mc" else 1,
        )  # fmt: skip
        stored[key(case)] = triangle(operator)
        if case[:4] == ("positions", "exact", "expand", True) and not corrected:
            for method, options in INVERSES.items():
                inverse = KFACInverseLinearOperator(operator, damping=DAMPING, **options)
                stored[f"inverse, {method}"] = triangle(inverse)
    rows = (f"{json.dumps(name)}: {json.dumps(values)}" for name, values in stored.items())
    STORED.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
