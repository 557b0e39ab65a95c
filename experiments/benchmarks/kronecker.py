"""Kronecker factors of linear and convolutional layers, and a product with them, each way.

    K = blocks G ⊗ A,  A = mean of a a^T over rows,  G = sum over columns s of M of g g^T / N

The layers are those that curvlinops finds: modules that are called. The projections of torch's
attention are not, and are left out on every side.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.problems import Problem, plain_attention
from experiments.benchmarks.with_torch import with_plain_attention
from experiments.benchmarks.workload import Call, peer


def layers(problem: Problem) -> dict[str, nn.Module]:
    """The layers by name."""
    return {
        name: module
        for name, module in problem.model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and "self_attn" not in name
    }


def params_of_layers(problem: Problem) -> dict[str, Tensor]:
    """Their parameters: weight and bias of each."""
    return {
        f"{name}.{part}": problem.params[f"{name}.{part}"]
        for name in layers(problem)
        for part in ("weight", "bias")
    }


def vector_of(problem: Problem) -> Tensor:
    """The vector that is multiplied, [P]."""
    return problem.vectors[: sum(p.numel() for p in params_of_layers(problem).values()), 0]


def columns(logits: Tensor, y: Tensor, kind: str) -> list[Tensor]:
    """The columns s [N, C] of M = sum of s s^T: its root, a draw of labels, or the labels."""
    p = logits.detach().softmax(1)
    if kind == "exact":
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
        return list(root.unbind(2))
    labels = y if kind == "empirical" else p.multinomial(1)[:, 0]
    return [p - F.one_hot(labels, p.shape[1])]


def factors_by_hand(problem: Problem, kind: str) -> Callable[[], list[tuple[Tensor, Tensor]]]:
    """A and G of each layer, by hooks."""

    def run() -> list[tuple[Tensor, Tensor]]:
        calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        hooks = [
            module.register_forward_hook(lambda m, args, out: calls.append((m, args[0], out)))
            for module in layers(problem).values()
        ]
        try:
            logits = problem.model(problem.x)
        finally:
            for hook in hooks:
                hook.remove()
        A = []
        for module, x, _ in calls:
            a = x.detach()
            if isinstance(module, nn.Conv2d):
                size: Any = module.kernel_size
                a = F.unfold(a, size, padding=module.padding).mT  # type: ignore[arg-type]
            a = a.reshape(-1, a.shape[-1])
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            A.append(a.T @ a / len(a))
        outputs = [out for _, _, out in calls]
        G: list[Any] = [0.0] * len(outputs)
        for column in columns(logits, problem.y, kind):
            grads = torch.autograd.grad(logits, outputs, column, retain_graph=True)
            for i, g in enumerate(grads):
                rows = g.movedim(1, -1) if g.dim() == 4 else g
                rows = rows.reshape(-1, rows.shape[-1])
                G[i] += rows.T @ rows / len(logits)
        return list(zip(A, G, strict=True))

    return run


def product_by_hand(
    problem: Problem, factors: list[tuple[Tensor, Tensor]], vector: Tensor
) -> Tensor:
    """K v."""
    v, parts = vector.split([p.numel() for p in params_of_layers(problem).values()]), []
    for (A, G), weight, bias in zip(factors, v[::2], v[1::2], strict=True):
        found = G @ torch.cat([weight.view(len(G), -1), bias[:, None]], 1) @ A
        parts += [found[:, :-1].reshape(-1), found[:, -1]]
    return torch.cat(parts)


def truth(problem: Problem, kind: str = "exact") -> Tensor:
    """K v in float64."""
    exact = problem.double()
    with plain_attention():
        factors = factors_by_hand(exact, kind)()
    return product_by_hand(exact, factors, vector_of(exact))[:, None]


@with_plain_attention
def by_hand(problem: Problem, kind: str = "exact") -> Call:
    make, v = factors_by_hand(problem, kind), vector_of(problem)
    return lambda: product_by_hand(problem, make(), v)


def hoglib(problem: Problem, kind: Any = "exact") -> Call:
    loss, params = hog.functional_loss(problem.model, F.cross_entropy), params_of_layers(problem)
    v, random = vector_of(problem), torch.Generator(problem.device).manual_seed(0)
    options = {"kind": kind, "generator": random, "check_deterministic": False}
    return lambda: hog.KFACOperator(loss, params, problem.batch, **options) @ v


@with_plain_attention
def curvlinops(problem: Problem, kind: str = "exact") -> Call:
    operator, v = peer("curvlinops").KFACLinearOperator, vector_of(problem)
    given = problem.model, nn.CrossEntropyLoss(), list(params_of_layers(problem).values())
    options = {
        "fisher_type": "type-2" if kind == "exact" else kind, "check_deterministic": False,
        "separate_weight_and_bias": False, "num_data": len(problem.x),
        "num_per_example_loss_terms": 1,
    }  # fmt: skip
    return lambda: operator(*given, [problem.batch], **options) @ v
