"""Whether the gradient by weights of examples predicts what a training without some of them gives."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.state import RandomState, preserve_random_state
from hoglib.errors import ArgumentValueError
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.hypergradient import Hypergradient
from hoglib.meta.training import check_steps, detached, prepared_training


class LeaveKOut(NamedTuple):
    """The result of `leave_k_out`; printed, it is a summary."""

    predicted: Tensor  # changes of the outer loss by the gradient, one for each subset
    actual: Tensor  # changes after a training without the subset
    subsets: Tensor  # [subsets, k]: which weights were changed
    correlation: float  # Spearman's, of the ranks of predicted and actual changes

    def __str__(self) -> str:
        count, k = self.subsets.shape
        return (
            f"leave {k} out, {count} random subsets: rank correlation {self.correlation:.3f} "
            "(Spearman) of predicted and actual changes of the outer loss\n"
            f"predicted {_range(self.predicted)}, actual {_range(self.actual)}"
        )


def leave_k_out(
    found: Hypergradient,
    outer: Callable[..., Tensor],
    inner: Callable[..., Tensor],
    params: Any,
    hyper: Any,
    *,
    k: int,
    subsets: int = 20,
    weights: str | None = None,
    factor: float = 0.0,
    rule: GradientTransformation | Callable[[Any], GradientTransformation] | None = None,
    steps: int | None = None,
    batches: Sequence[Any] | Iterable[Any] | Callable[[int], Any] | None = None,
    generator: torch.Generator | None = None,
    stand_ins: bool = True,
) -> LeaveKOut:
    r"""Train without random subsets of examples, and compare with what a hypergradient predicts.

        predicted_S = (factor - 1) sum_{i in S} w_i d outer / d w_i        S a random subset of size k
        actual_S = outer after a training with w_i <- factor w_i for i in S, minus found.value

    The rank correlation of both, the linear datamodelling score, says how much the values of examples
    are worth. It is low where the training is not smooth: for high learning rates, ReLU, or subsets so
    large that the loss is not linear in them.

    Args:
        found: The result of `hypergradient` for the same arguments.
        outer, inner, params, hyper, rule, steps, batches, stand_ins: Those of `hypergradient`.
        k: The size of a subset.
        subsets: The number of subsets, each of which is a training; at least 3.
        weights: The leaf of hyper with the weights, by its name ("weights", "data[0]"). Default: hyper
            is a tensor itself.
        factor: What the weights of a subset are multiplied by: 0 leaves the examples out, 1 + 1e-3
            stays in the range where the gradient is exact.
        generator: Draws the subsets. Default: torch's own.

    Returns:
        A `LeaveKOut`.

    Raises:
        ArgumentValueError: for a k that is larger than the number of weights, and for a leaf that hyper
            does not have.

    References:
        Park et al., TRAK: Attributing Model Behavior at Scale, 2023 (linear datamodelling score); Ilyas
        and Engstrom, MAGIC: Near-Optimal Data Attribution for Deep Learning, 2025.

    Example:
        >>> x, y = torch.randn(20, 2), torch.randn(20)
        >>> inner = lambda params, w: (w * (x @ params["w"] - y).square()).mean()
        >>> outer = lambda params, w: (params["w"] - 1).square().sum()
        >>> problem = outer, inner, {"w": torch.zeros(2)}, torch.ones(20)
        >>> training = {"rule": hog.meta.sgd(0.1), "steps": 30}
        >>> found = hog.meta.hypergradient(*problem, memory="checkpoint", **training)
        >>> check = hog.meta.leave_k_out(found, *problem, k=2, subsets=5, **training)
        >>> check.predicted.shape, check.subsets.shape
        (torch.Size([5]), torch.Size([5, 2]))
    """
    validation.function("outer", outer)
    validation.function("inner", inner)
    validation.parameters(hyper, "hyper")
    validation.at_least("k", k, 1)
    validation.at_least("subsets", subsets, 3)
    validation.number("factor", factor)
    validation.generator(generator)
    place = _place(hyper, weights)
    count = check_steps(steps, batches, "unrolled", rule)
    leaf: Tensor = pytree.leaves(hyper)[place]
    if k > leaf.numel():
        raise ArgumentValueError(
            f"k: expected at most the number of weights, {leaf.numel()}, got {k}; take fewer."
        )
    slope = (leaf * pytree.leaves(found.gradient)[place]).flatten()
    chosen = torch.stack(
        [torch.randperm(leaf.numel(), generator=generator)[:k] for _ in range(subsets)]
    )
    values = []
    with (
        prepared_training("leave_k_out", inner, params, hyper, rule, count, batches, stand_ins) as (
            training,
            at,
        ),
        torch.no_grad(),
        preserve_random_state(*training.generators()),
    ):
        drawn = RandomState(training.generators())
        for subset in chosen:
            drawn.restore()
            changed = _changed(detached(at), place, subset, factor)
            trained, losses = training.unrolled(changed)
            training.check_finite(losses)
            values.append(validation.scalar("outer(params, hyper)", outer(trained, changed)))
    predicted = (factor - 1) * slope[chosen.to(slope.device)].sum(1)
    actual = torch.stack(values) - found.value
    return LeaveKOut(predicted, actual, chosen, spearman(predicted, actual))


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of the ranks of two vectors; equal numbers share the mean of their ranks.

    References:
        Spearman, The proof and measurement of association between two things, 1904.
    """
    x, y = (_ranks(v) - _ranks(v).mean() for v in (a, b))
    return float((x @ y) / (x.norm() * y.norm()))


def _ranks(values: Tensor) -> Tensor:
    _, which, counts = values.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[which]


def _place(hyper: Any, weights: str | None) -> int:
    """The place of the leaf with the weights."""
    paths = pytree.paths(hyper)
    name = "" if weights is None else weights
    if name not in paths:
        raise ArgumentValueError(
            f"weights: expected the name of a leaf of hyper, {validation.listing(paths)}, got "
            f"{weights!r}; name the one with the weights of examples."
        )
    return paths.index(name)


def _changed(hyper: Any, place: int, subset: Tensor, factor: float) -> Any:
    leaves, structure = pytree.flatten(hyper)
    leaf = leaves[place].clone()
    leaf.view(-1)[subset.to(leaf.device)] *= factor
    return pytree.unflatten([*leaves[:place], leaf, *leaves[place + 1 :]], structure)


def _range(values: Tensor) -> str:
    return f"{float(values.min()):.3g} to {float(values.max()):.3g}"
