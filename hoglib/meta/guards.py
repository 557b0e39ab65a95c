"""What is said of an inner loop that is not what it seems: losses that are not finite, Functions that
lose their second derivative."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.autograd import fresh_leaves
from hoglib._core.finite_differences import check_hessian_product, unchecked_functions
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.source_location import warn
from hoglib._core.swap import keep_swapped
from hoglib.errors import NonFiniteError, NoSecondDerivative
from hoglib.meta.mapping import TaskResult


def check_finite(found: TaskResult) -> None:
    """Raises FloatingPointError at the first inner loss that is not finite, or outer one.

    The notes' first entry are the inner losses [tasks, steps].
    """
    # what adds up to a finite number has none that is not
    if math.isfinite(float(found.notes[0].detach().sum() + found.value.detach().sum())):
        return
    stay = " The parameters are as they were before this step."
    inner_losses_finite(
        found.notes[0].detach(), "Look for NaN in its support set, or in the parameters." + stay,
        "The inner loop diverges: lower inner_lr, or take fewer steps." + stay,
    )  # fmt: skip
    validation.finite(
        "meta-loss",
        found.value,
        "Tasks whose inner loop diverges give this: lower inner_lr, clip the outer gradient, or look "
        "for NaN in the data. The parameters are as they were before this step.",
    )


def inner_losses_finite(losses: Tensor, at_first: str, later: str) -> None:
    """Raises FloatingPointError at the first of losses [steps] or [tasks, steps] that is not finite.

    at_first, later: what to do about one in the first step, and in another.
    """
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        *task, step = bad[0].tolist()
        raise NonFiniteError(
            f"inner loss: expected a finite number, got {losses[*task, step].item()} at "
            + (f"task {task[0]} of {len(losses)}, " if task else "")
            + f"step {step + 1} of {losses.shape[-1]}. {later if step else at_first}"
        )


def only_what_is_learned(
    what: str,
    losses: Callable[[], list[Tensor]],
    own: list[Tensor],
    learned: dict[str, Tensor],
) -> None:
    """The graphs of inner and outer losses end in tensors of their own.

    Raises NoSecondDerivative for a parameter of the model that it reaches by another way than its place
    in a module, since it never adapts; warns of other tensors that require grad, which get none.
    """
    found = _foreign(losses(), own)
    # What a forward makes for itself, to differentiate by, is another one at the next call.
    again = {id(x) for x in _foreign(losses(), own)} if found else set()
    names = {id(p): name for name, p in learned.items()}
    for leaf in found:
        if id(leaf) in names:
            raise NoSecondDerivative(
                f"{what}: expected a model that finds its parameters in their modules, got one that "
                f"uses {names[id(leaf)]} from elsewhere too (a list of weights, a closure): there it "
                "would neither adapt nor get a gradient. Read it from its module."
            )
        if id(leaf) in again:
            warn(
                f"{what}: the losses use {validation.describe(leaf)} that requires grad and belongs to "
                "none of the modules that are learned (model, criterion, inner_loss, rule): it gets no "
                "gradient from loss(tasks). Make it a parameter of one of them, or detach() it."
            )


def _foreign(values: list[Tensor], own: list[Tensor]) -> list[Tensor]:
    known = {id(x) for x in own}
    found: dict[int, Tensor] = {}
    for value in values:
        found |= graph_summary(value).leaves
    return [leaf for key, leaf in found.items() if key not in known]


def look_at_functions(what: str, loss: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    """Compares a product with the Hessian of an inner loss with differences, if it runs through
    custom Functions that no product ran through before, and warns where they are apart."""
    with keep_swapped():
        value = loss(*fresh_leaves(leaves, False))
        functions = unchecked_functions(value, graph_summary(value))
        if not functions:
            return
        generator = torch.Generator().manual_seed(0)
        vector = [torch.randn(x.shape, generator=generator).to(x) for x in leaves]
        check_hessian_product(what, functions, loss, leaves, vector)
