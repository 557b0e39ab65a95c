"""The inner loop: gradient steps on one task, as a function that can be differentiated.

    g = grad loss(theta)        theta', state' = rule.update(theta, g, state)

`InnerSteps.step` is this step. `unroll` takes many, whose graph is kept or recomputed in backward;
`hoglib.meta.training` goes through them backwards, one at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isqrt
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from hoglib._core.messages import closures, validation
from hoglib._core.modules.swap import Params
from hoglib._core.problem import Policy
from hoglib._core.remat.call import ByTangents
from hoglib._core.remat.recomputation import inside_recomputation, recompute
from hoglib._core.substrate import autograd
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_summary
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.torch_modes import without_stand_ins
from hoglib.errors import ArgumentValueError, NonFiniteError, NoSecondDerivative
from hoglib.functional import FunctionalLoss
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.ring import ring

Loss = Callable[[Params, Any], Tensor]
LossWithNotes = Callable[[Params], tuple[Tensor, Any]]
Memory = Literal["store", "remat", "checkpoint", "mixed"]
RECOMPUTES = (
    "expected a model whose graph keeps its tensors, got one with saved-tensor hooks, as "
    "torch.utils.checkpoint has: a later backward would recompute it with the model's own "
    "parameters instead of the adapted ones. Use memory='remat', which recomputes whole steps."
)
UNUSED = (
    "the {which} loss: expected a value that depends on the parameters{whom}, got one that does not; "
    "look for .detach(), .item(), .data or torch.no_grad() in the model or the loss, and for "
    "parameters that nothing uses."
)


def inner_step(
    loss: Loss, params: Params, batch: object, rule: GradientTransformation, state: object
) -> tuple[Params, Any]:
    r"""Take one step of the inner loop.

        g = grad loss(theta, batch)        (theta', state') = rule.update(theta, g, state)

    The new parameters are differentiable with respect to theta, also through g. It runs under vmap and
    inside other transforms of torch.func, under no_grad and in inference mode. `adapt` takes several
    steps, also of first order.

    Args:
        loss: The loss, a function ``loss(params, batch)`` with a scalar value.
        params: The parameters theta, a pytree of tensors.
        batch: What the loss is computed on, handed to it as it is.
        rule: The update rule, for instance ``hog.meta.sgd(0.1)``.
        state: The state of the rule; ``rule.init(params)`` before the first step.

    Returns:
        The new parameters and the new state of the rule, ``(theta', state')``.

    Raises:
        NoSecondDerivative: for a loss that does not depend on params, and for a custom Function
            that is ``@once_differentiable``.

    Example:
        >>> rule = hog.meta.sgd(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> loss = lambda params, x: (params["w"] * x).square()
        >>> params, state = hog.meta.inner_step(loss, params, 2.0, rule, rule.init(params))
        >>> params["w"].detach()
        tensor(0.2000)
    """
    steps = InnerSteps(_value_of(loss), lambda i, _: rule)
    with _ring("inner_step"):
        params, batch = autograd.clone_inference_tensors((params, batch))
        params, state, _ = steps.step(0, params, state, (batch, {}))
    return params, state


def adapt(
    loss: Loss,
    params: Params,
    batch: object,
    rule: GradientTransformation,
    *,
    steps: int,
    first_order: bool = False,
    truncate: int | None = None,
    memory: Memory = "store",
) -> Params:
    r"""Take several inner steps on one batch.

        theta_0 = params        theta_{i+1} = inner_step(theta_i)        returns theta_steps

    Gradients flow to params, to tensors of the batch, to those of the rule and, if loss is a
    :func:`hoglib.functional_loss`, to the model's other parameters.

    Args:
        loss: The loss, a function ``loss(params, batch)`` with a scalar value.
        params: The initial parameters, a pytree of tensors.
        batch: What the loss is computed on, handed to it as it is.
        rule: The update rule, for instance ``hog.meta.sgd(0.1)``.
        steps: The number of steps, 0 or more.
        first_order: Treat the gradient of every step as a constant.
        truncate: Differentiate through the last so many steps only; the gradients of those before
            are constants. Default: all steps.
        memory: What is kept for backward. "store": the graph of every step. "remat": the parameters
            after every step, which is run again in backward. "checkpoint": the parameters after
            every sqrt(steps)-th step and, during backward, the graphs of as many steps, which needs
            least where parameters outweigh activations. "mixed": the parameters after every step, whose
            gradient is differentiated forward over reverse, as MAML's; it runs inside
            `hoglib.second_order()`. Longer trainings are for `hypergradient`.

    Returns:
        The parameters after the last step, in the structure of params.

    Raises:
        NoSecondDerivative: for a loss that does not depend on params, and for a custom Function
            that is ``@once_differentiable``.
        ArgumentValueError: for another ``memory`` than "store" with a loss or rule that closes over
            tensors, since their gradients would be lost.
        UnsupportedError: with "mixed", for an operation without a forward mode.
        NondeterministicError: with "mixed", for a loss that is another one when it is run again.

    References:
        Finn, Abbeel and Levine, Model-Agnostic Meta-Learning, 2017; Shaban et al., Truncated
        Back-propagation for Bilevel Optimization, 2019 (truncate).

    Example:
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> loss = lambda params, x: (params["w"] * x).square()
        >>> adapted = hog.meta.adapt(loss, {"w": w}, 2.0, hog.meta.sgd(0.1), steps=2)
        >>> torch.autograd.grad(adapted["w"], w)  # of w (1 - 0.8)^2
        (tensor(0.0400),)
    """
    validation.at_least("steps", steps, 0)
    validation.none_or_at_least("truncate", truncate, 0)
    validation.choice("memory", memory, get_args(Memory))
    lifted = _lifted_from(loss, rule, params) if memory != "store" else ({}, [], [], [])
    rest, modules, modes, drawn_from = lifted
    constant = lambda i: first_order or is_truncated(i, steps, truncate)  # noqa: E731
    own: Any = {"modes_of": modes, "generators": drawn_from}
    inner = InnerSteps(_value_of(loss), lambda i, _: rule, constant, **own)
    with _ring("adapt", stand_ins=memory == "mixed", first_order=first_order):
        params, batch = autograd.clone_inference_tensors((params, batch))
        return unroll(inner, steps, params, (batch, rest, modules), memory).params


def _ring(caller: str, stand_ins: bool = False, first_order: bool = False) -> ring:
    """Stand-ins and grad mode are those of the caller, since the result has the caller's graph.

    stand_ins: on, for a graph of Functions that run the loss again in forward mode.
    """
    policy, around = Policy(caller, stand_ins=stand_ins), autograd.outside_inference_mode
    return ring(policy, first_order=first_order, gradients=around)


def _value_of(loss: Loss) -> Callable[[int, Params, Any], tuple[Tensor, Any]]:
    """The loss as that of `InnerSteps`, of constants (batch, the model's other parameters, ...)."""

    def loss_at(i: int, params: Params, constants: Any) -> tuple[Tensor, Any]:
        batch, rest, *_ = constants
        value = loss({**rest, **params} if rest else params, batch)
        return validation.scalar("loss(params, batch)", value), ()

    return loss_at


class Unrolled(NamedTuple):
    """What an inner loop computes."""

    params: Params
    outer: Tensor | None  # the sum of the outer losses after steps
    losses: list[Tensor]  # the inner loss of each step, without a graph
    notes: list[Any]  # what the loss returned besides, in each step


class InnerSteps(NamedTuple):
    """The steps of an inner loop, by their number i.

    ``constants`` is all that the steps depend on besides parameters and state, so that gradients
    reach it.
    """

    loss: Callable[[int, Params, Any], tuple[Tensor, Any]]  # (i, params, constants) -> loss, notes
    rule: Callable[[int, Any], GradientTransformation]  # (i, constants)
    # whether the gradient of step i is a constant
    constant: Callable[[int], bool] = lambda _: False
    # (i, params, constants): the weighted outer loss after step i, if it has one
    outer: Callable[[int, Params, Any], Tensor | None] | None = None
    mixed: ByTangents | None = None  # how the gradients of steps are differentiated
    modes_of: Sequence[nn.Module] = ()  # modules whose train or eval mode a recomputation restores
    generators: Sequence[torch.Generator] = ()  # whose numbers it draws again

    def step(
        self,
        i: int,
        params: Params,
        state: object,
        constants: object,
        *,
        alone: bool = False,
        made: bool = False,
    ) -> tuple[Params, Any, tuple[Tensor, Any]]:
        """The parameters and the state after step i; and the loss with its notes, without a graph.

            g = grad loss(theta)        theta', state' = rule.update(theta, g, state)

        alone: the step is differentiated, if at all, before the model is run again. made: params are
        the result of a step, which the loss has from its argument alone, so that they need no views to
        differentiate by.
        """

        def loss(params: Params) -> tuple[Tensor, Any]:
            return self.loss(i, params, constants)

        if self.mixed is not None and not self.constant(i):
            # a constant gradient is not differentiated, so that there is nothing to take forward
            # over reverse
            loss, alone = partial(self._mixed_loss, i, constants), False
        grad = _grad_by_transform if torch_internals.transforms_active() else _grad
        constant = self.constant(i)
        check = i == 0 and not constant  # of custom Functions: the first step does for all
        g, found = grad(loss, params, constant=constant, check=check, alone=alone, made=made)
        params, state = self.rule(i, constants).update(params, g, state)
        return params, state, found

    def _mixed_loss(self, i: int, constants: object, params: Params) -> tuple[Tensor, Any]:
        """The loss of step i, of whose graph its parameters are kept."""
        loss, lifted = _lift_tensors(self.loss, constants)
        value, notes = self.recomputed(loss, i, params, lifted, by_tangents=self.mixed)
        return value, pytree.map_tensors(Tensor.detach, notes)

    def recomputed(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """run(*args), which backward runs again, with the same random numbers and modes."""
        options = {"generators": self.generators, "modes_of": self.modes_of, **options}
        return recompute(run, *args, nested=True, **options)

    def run(self, start: int, end: int, carry: Any, constants: Any) -> tuple[Any, list[Any]]:
        """Steps start to end: (params, state, sum of outer losses), and each loss with its notes."""
        params, state, total = carry
        # backward follows at once on one step that is run again by itself, while the model still
        # holds its parameters
        alone = end - start == 1 and self.outer is None and inside_recomputation()
        found = []
        for i in range(start, end):
            params, state, new = self.step(i, params, state, constants, alone=alone, made=i > start)
            found.append(new)
            value = None if self.outer is None else self.outer(i, params, constants)
            if value is not None:
                total = value if total is None else total + value
        return (params, state, total), found


def unroll(inner: InnerSteps, steps: int, params: Params, constants: Any, memory: str) -> Unrolled:
    """Run the steps in chunks, each of which is stored or recomputed in backward as a whole."""
    carry = params, inner.rule(0, constants).init(params) if steps else {}, None
    if memory == "mixed":
        inner, memory = inner._replace(mixed=mixed()), "store"
    run: Callable[..., Any] = inner.run
    if memory != "store":
        run, constants = _lift_tensors(run, constants)
    constant = inner.constant
    # a chunk holds steps of one kind: of constant gradients there is nothing to recompute
    changes = (i for i in range(1, steps) if constant(i) != constant(i - 1))
    found: list[tuple[Tensor, Any]] = []
    begin = 0
    for end in sorted({*kept_states(memory, 0, steps), *changes, steps} - {0}):
        if memory == "store" or constant(begin):  # a constant gradient has no graph to be saved
            carry, new = run(begin, end, carry, constants)
        else:
            carry, new = inner.recomputed(run, begin, end, carry, constants)
        found, begin = [*found, *new], end
    adapted, _, outer = carry
    return Unrolled(adapted, outer, [loss for loss, _ in found], [notes for _, notes in found])


def check_mixed(caller: str, policy: Policy) -> None:
    """Raise for options of an evaluation that do not go with memory="mixed"."""
    if policy.one_graph:
        raise ArgumentValueError(
            f"{caller}(memory='mixed', compile=...): expected steps that are run again, got a graph of "
            "all, of which the compiler decides what is kept. Leave out one of the two, or add remat=."
        )
    if not policy.stand_ins:
        raise ArgumentValueError(
            f"{caller}(memory='mixed', stand_ins=False): expected stand-ins, without which no_grad "
            "stops no tangents, got none. Leave out stand_ins, or take memory='remat'."
        )


def mixed() -> ByTangents:
    """The gradients of one loop with memory="mixed"."""
    return ByTangents("memory='mixed'", "Take memory='remat'.")


def _grad(
    loss: LossWithNotes, params: Params, *, constant: bool, check: bool, alone: bool, made: bool
) -> tuple[Params, Any]:
    """g = grad loss(params), and (the loss, its notes) without a graph.

    g has a graph where grad mode is on, unless it is a constant.
    """
    create_graph = torch.is_grad_enabled() and not constant
    leaves, structure = pytree.flatten(params)
    with without_stand_ins() as stand_ins:  # what is not the loss itself needs none
        taken = made and create_graph and _are_apart(leaves)
        own = leaves if taken else autograd.fresh_leaves(leaves, create_graph)
        hooks = nullcontext() if constant or alone else refuse_saved_tensor_hooks()
        with torch.enable_grad(), hooks:
            with stand_ins.resumed():
                value, notes = loss(pytree.unflatten(own, structure))
            if not value.requires_grad:
                raise NoSecondDerivative(UNUSED.format(which="inner", whom=" that adapt"))
            # not beyond the parameters: the steps that made these were looked at in their turn
            graph = graph_summary(value, since=own)
            if check and create_graph:
                check_custom_functions(graph, "the inner step")
            with stand_ins.resumed() if graph.needs_stand_ins else nullcontext():
                g = torch_internals.gradients([value], own, create_graph=create_graph)
            grads = autograd.materialize_grads(g, own)
        # the loss of every step is reported, and must not hold the graph of its step
        return pytree.unflatten(grads, structure), (value.detach(), notes)


def _are_apart(leaves: Sequence[Tensor]) -> bool:
    """Whether each is a tensor of its own that has a graph, by which a loss can be differentiated."""
    distinct = len({id(leaf) for leaf in leaves}) == len(leaves)
    return distinct and all(leaf.grad_fn is not None for leaf in leaves)


def _grad_by_transform(
    loss: LossWithNotes, params: Params, *, constant: bool, check: bool, **_: bool
) -> tuple[Params, Any]:
    """`_grad` inside of torch.func, where plain autograd, several times as fast, has no graph."""

    def checked(params: Params) -> tuple[Tensor, Any]:
        value, notes = loss(params)
        if check:
            check_custom_functions(graph_summary(value), "the inner step")
        return value, (value, notes)

    # detached and under no_grad, as torch.func.grad alone would let the transform outside
    # differentiate the constant
    at = pytree.map_tensors(Tensor.detach, params) if constant else params
    with torch.no_grad() if constant else nullcontext():
        g, (value, notes) = torch.func.grad(checked, has_aux=True)(at)
    return g, (value.detach(), notes)


def check_inner_losses(losses: Tensor, at_first: str, later: str, steps: int | None = None) -> None:
    """Raise NonFiniteError at the first of losses [steps] or [tasks, steps] that is not finite.

    at_first, later: what to do about one in the first step, and in another. steps: of which these are
    the first. Default: all.
    """
    bad = (~torch.isfinite(losses)).nonzero()
    if len(bad):
        *task, step = bad[0].tolist()
        raise NonFiniteError(
            f"inner loss: expected a finite number, got {losses[*task, step].item()} at "
            + (f"task {task[0]} of {len(losses)}, " if task else "")
            + f"step {step + 1} of {steps or losses.shape[-1]}. {later if step else at_first}"
        )


def refuse_saved_tensor_hooks(message: str = RECOMPUTES) -> AbstractContextManager[None]:
    """Raise for saved-tensor hooks where a graph is kept until the model holds other parameters.

    A step that is recomputed alone needs no such check: its derivatives are taken while its
    parameters are in the model.
    """
    wanted = torch.is_grad_enabled() and not torch_internals.transforms_active()
    return disable_saved_tensors_hooks(message) if wanted else nullcontext()


def is_truncated(i: int, steps: int, truncate: int | None) -> bool:
    """Whether step i is before the last `truncate` steps."""
    return truncate is not None and i < steps - truncate


def kept_states(memory: str, begin: int, end: int) -> Iterator[int]:
    """The states between two that are kept, for those after each of them to be computed again.

    "store"                 none, but the graph of every step
    "remat"                 all
    "checkpoint", "sqrt"    every sqrt(n)-th
    "log"                   log2(n), by recursive halving
    """
    if memory == "log":
        while end - begin > 1:
            begin = (begin + end) // 2
            yield begin
    elif memory != "store":
        stride = 1 if memory == "remat" else max(1, isqrt(end - begin))
        yield from range(begin + stride, end, stride)


def _lift_tensors(run: Callable[..., Any], constants: Any) -> tuple[Callable[..., Any], list[Any]]:
    """`run` as a function of the tensors and modules among its constants.

    Other objects are fixed: a batch may be one that holds tensors, which a recomputation refuses.
    """

    def is_lifted(leaf: object) -> bool:
        return isinstance(leaf, Tensor | nn.Module)

    def run_lifted(*args: Any) -> Any:
        return run(*args[:-1], pytree.filled(constants, args[-1], is_lifted))

    return run_lifted, [*filter(is_lifted, pytree.leaves(constants))]


def _lifted_from(loss: Loss, rule: Any, params: Params) -> tuple[Params, Any, Any, Any]:
    """The model's other parameters and the modules that a loss reads, as inputs of a recomputation, all
    modules on whose modes it depends, and the generators that it draws from."""
    drawn_from = closures.refuse("adapt(rule=...)", rule.update)
    if not isinstance(loss, FunctionalLoss):
        return {}, [], [], [*drawn_from, *closures.refuse("adapt", loss)]
    # as inputs of the recomputation, which gives a gradient to its inputs alone
    own = loss.model.named_parameters()
    rest: Params = {n: p for n, p in own if p.requires_grad and n not in params}
    criterion = loss.user_criterion
    modules = [criterion] if isinstance(criterion, nn.Module) else []
    modes = [part for module in (loss.model, *modules) for part in module.modules()]
    return rest, modules, modes, [*drawn_from, *closures.generators(criterion)]
