"""What Fisher matrices need of torch.distributions: samples by a generator, scores, and checks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Generator, Tensor
from torch import distributions as D
from torch.distributions import constraints

from hoglib._core import validation
from hoglib._core.autograd import Vector
from hoglib._core.state import draw_from
from hoglib._core.torch_internals import tracing
from hoglib.curvature.likelihood import Likelihood
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NonFiniteError, UnsupportedError

Tree = Any


def make(likelihood: Likelihood, outputs: Tree) -> D.Distribution:
    """The distribution of a likelihood at some outputs."""
    try:
        found = likelihood.distribution(outputs)
    except Exception as error:
        if likelihood.family is not None or not tracing():
            raise
        raise UnsupportedError(
            "likelihood: expected a function that can be captured where compile=True, got one that "
            f"raises {type(error).__name__} there; a torch.distributions.Distribution checks values "
            "unless it is made with validate_args=False."
        ) from error
    if not isinstance(found, D.Distribution):
        raise ArgumentTypeError(
            "likelihood: expected a function that makes a torch.distributions.Distribution of the "
            f"outputs, got {validation.describe(found)} from it."
        )
    return found


def sample(p: D.Distribution, count: int, like: Tensor, generator: Generator | None) -> Tensor:
    """Samples [count, *terms, *event] by the generator, or by torch's own for None.

    The samplers of torch.distributions take no generator, so its state becomes that of torch's own
    while they run.
    """
    context: AbstractContextManager[Any] = nullcontext()
    if (own := validation.generator(generator)) is not None:
        device = like.device
        if own.device.type != device.type or own.device.index not in (None, device.index):
            raise ArgumentValueError(
                f"generator: expected one on the device of the outputs, {device}, got one on "
                f"{own.device}; make it with `torch.Generator({str(device)!r})`."
            )
        context = draw_from(own, device)
    try:
        with context:
            return p.sample(torch.Size([count]))
    except NotImplementedError as error:
        raise UnsupportedError(
            f"kind='mc': expected a distribution that can be sampled, got {type(p).__name__}, which "
            "torch cannot sample; use kind='exact' or 'empirical'."
        ) from error


def scores(q: D.Distribution, samples: Tensor, own: Vector) -> tuple[Vector, bool]:
    """d(-log p(y))/doutputs for each sample, summed over terms; and whether they separate by example.

    They do if the terms, and every leaf, have one leading dimension, and the terms of an example
    depend on the outputs of that example only.
    """

    def gradient(y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        nll = -q.log_prob(y)
        if not nll.requires_grad:
            refuse_constant()
        if weights is not None:
            nll = nll.reshape(len(weights), -1) * weights.to(nll).unsqueeze(1)
        return torch.autograd.grad(
            nll.sum(), own, allow_unused=True, materialize_grads=True, retain_graph=True
        )

    each = [gradient(y) for y in samples]
    stacked = [torch.stack(parts) for parts in zip(*each, strict=True)]
    for part in stacked:
        advice = (
            "Use a named likelihood, which is in closed form, or bound the outputs of the model."
        )
        validation.finite("the gradient of log p at a sample", part, advice)
    examples = q.batch_shape[:1]
    if not examples or not examples[0] or any(leaf.shape[:1] != examples for leaf in own):
        return stacked, False
    # No two weights are alike: a term's gradient by another example's outputs has the wrong one.
    order = torch.arange(examples[0], dtype=torch.float64, device=own[0].device)
    weights = 1 + (order * 0.6180339887498949).frac()
    for whole, weighted in zip(each[0], gradient(samples[0], weights), strict=True):
        expected = whole * weights.to(whole).reshape(-1, *[1] * (whole.dim() - 1))
        rounding = 1e3 * torch.finfo(whole.dtype).eps * whole.abs().amax()
        if (weighted - expected).abs().amax() > rounding:
            return stacked, False
    return stacked, True


def refuse_moving_support(q: D.Distribution) -> None:
    """Raise where the support depends on the outputs: without E[s] = 0 there is no Fisher matrix."""
    try:
        support = q.support
    except NotImplementedError:
        return
    if _differentiable(support):
        raise ArgumentValueError(
            f"likelihood: expected a distribution whose support does not depend on the outputs, got "
            f"{type(q).__name__}, which has no Fisher matrix there; fix the bounds, or use the GGN."
        )


def refuse_wrong_divergence(q: D.Distribution) -> None:
    """Raise where autograd's second derivative of torch's KL(p || q) is not the Fisher matrix.

    For Laplace it is zero by the location, because the derivative of |x| at 0 is. The divergence of a
    TransformedDistribution is that of its bases, which is right only if the transforms are constant.
    """
    part: Any = q
    while part is not None:
        transforms = getattr(part, "transforms", ())
        if isinstance(part, D.Laplace) or (
            not isinstance(part, D.Gumbel) and any(map(_differentiable, transforms))
        ):
            raise UnsupportedError(
                f"kind='exact': expected a KL divergence that autograd can differentiate twice, got "
                f"that of {type(q).__name__}, whose second derivative is silently wrong"
                + (
                    " at equal locations"
                    if isinstance(part, D.Laplace)
                    else ": torch leaves out transforms that depend on the outputs"
                )
                + "; use kind='mc'."
            )
        part = getattr(part, "base_dist", None)


@contextmanager
def translate_divergence_errors(q: D.Distribution) -> Iterator[None]:
    """Explain errors where torch has no KL divergence, or none with a second derivative."""
    try:
        yield
    except ArgumentValueError:
        raise
    except NonFiniteError as error:
        raise UnsupportedError(_no_divergence(q, str(error))) from error
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UnsupportedError(_no_divergence(q, str(error).splitlines()[0])) from error


def _no_divergence(q: D.Distribution, why: str) -> str:
    return (
        "kind='exact': expected a distribution with a KL divergence that is twice differentiable, got "
        f"{type(q).__name__}: {why.rstrip('.')}. Use kind='mc', or a named likelihood, which is in "
        "closed form."
    )


def refuse_constant() -> None:
    """Raise for a distribution that does not depend on the outputs."""
    raise ArgumentValueError(
        "likelihood: expected a distribution that depends on the outputs, got one that does not; look "
        "for .detach(), .item() or a torch.no_grad() in the function."
    )


def _differentiable(value: Any) -> bool:
    """Whether a tensor in a constraint or transform, or in the parts of one, requires grad."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, list | tuple):
        return any(map(_differentiable, value))
    if isinstance(value, constraints.Constraint | D.Transform):
        return any(map(_differentiable, vars(value).values()))
    return False
