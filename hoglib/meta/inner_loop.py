"""The inner loop: gradient steps on one task, as a differentiable function.

    g = grad loss(theta)        theta', state' = rule.update(theta, g, state)

`InnerSteps.step` is this step. `unroll` takes many steps; their graph is kept, or recomputed in
backward. `hoglib.meta.training` differentiates the steps in reverse, one at a time.
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
from hoglib.meta.optimizers import check_rule
from hoglib.ring import ring

Loss = Callable[[Params, Any], Tensor]  # (params, batch)
LossWithNotes = Callable[[Params], tuple[Tensor, Any]]  # params -> (loss, notes)
Memory = Literal["store", "remat", "checkpoint", "mixed"]
RECOMPUTES = (
    "expected a model whose graph keeps its tensors, got one with saved-tensor hooks, as "
    "torch.utils.checkpoint has: a later backward would recompute it with the model's own "
    "parameters instead of the adapted ones. Use memory='remat', which recomputes whole steps."
)
# A rerun would read what a name holds then: in a loop over tasks, the data of the last one.
IN_THE_BATCH = (
    "Pass tensors in `batch`, the second argument of the loss, and make the loss of a module by "
    "`hoglib.functional_loss`."
)
RATE = "Take memory='store', or `hoglib.meta.hypergradient`, where a rule may depend on hyper."
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
        batch: The second argument of loss, passed unchanged.
        rule: The update rule, for instance ``hog.meta.sgd(0.1)``.
        state: The state of the rule; ``rule.init(params)`` before the first step.

    Returns:
        The new parameters and the new state of the rule, ``(theta', state')``.

    Raises:
        NoSecondDerivative: for a loss that does not depend on params, and for a
            ``@once_differentiable`` custom Function.

    Example:
        >>> rule = hog.meta.sgd(0.1)
        >>> params = {"w": torch.tensor(1.0)}
        >>> loss = lambda params, x: (params["w"] * x).square()
        >>> params, state = hog.meta.inner_step(loss, params, 2.0, rule, rule.init(params))
        >>> params["w"].detach()
        tensor(0.2000)
    """
    check_rule(rule)
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

    Gradients flow to params, to tensors of the batch and of the rule and, if loss is a
    :func:`hoglib.functional_loss`, to the model's other parameters.

    Args:
        loss: The loss, a function ``loss(params, batch)`` with a scalar value.
        params: The initial parameters, a pytree of tensors.
        batch: The second argument of loss, passed unchanged.
        rule: The update rule, for instance ``hog.meta.sgd(0.1)``.
        steps: The number of steps, 0 or more.
        first_order: Treat the gradient of every step as a constant.
        truncate: Differentiate only through this many last steps; the gradients of earlier steps are
            constants. Default: all steps.
        memory: The tensors kept for backward. "store": the graph of every step. "remat": the parameters
            after every step; backward runs each step again. "checkpoint": the parameters after every
            sqrt(steps)-th step and, during backward, the graphs of as many steps, which needs least if
            parameters outweigh activations. "mixed": the parameters after every step, as with MAML: the
            step's gradient is differentiated forward over reverse, inside `hoglib.second_order()`. For
            longer trainings see `hypergradient`.

    Returns:
        The parameters after the last step, in the structure of params.

    Raises:
        NoSecondDerivative: for a loss that does not depend on params, and for a
            ``@once_differentiable`` custom Function.
        ArgumentValueError: for another ``memory`` than "store" with a loss or rule that closes over
            tensors, since their gradients would be lost.
        UnsupportedError: with "mixed", for an operation without a forward mode.
        NondeterministicError: with "mixed", for a loss with another value when it runs again.

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
    check_rule(rule)
    validation.at_least("steps", steps, 0)
    validation.none_or_at_least("truncate", truncate, 0)
    validation.choice("memory", memory, get_args(Memory))
    lifted = _lift_inputs(loss, rule, params) if memory != "store" else ({}, [], [], [])
    rest, modules, modes, drawn_from = lifted
    constant = lambda i: first_order or is_truncated(i, steps, truncate)  # noqa: E731
    own: Any = {"modes_of": modes, "generators": drawn_from}
    inner = InnerSteps(_value_of(loss), lambda i, _: rule, constant, **own)
    with _ring("adapt", stand_ins=memory == "mixed", first_order=first_order):
        params, batch = autograd.clone_inference_tensors((params, batch))
        return unroll(inner, steps, params, (batch, rest, modules), memory).params


def _ring(caller: str, stand_ins: bool = False, first_order: bool = False) -> ring:
    """The ring of a function that returns a graph to its caller: grad mode and stand-ins stay as they
    are, because the caller differentiates the graph.

    stand_ins: enter them for memory="mixed", which runs the loss again in forward mode.
    """
    policy, around = Policy(caller, stand_ins=stand_ins), autograd.outside_inference_mode
    return ring(policy, first_order=first_order, gradients=around)


def _value_of(loss: Loss) -> Callable[[int, Params, Any], tuple[Tensor, Any]]:
    """The loss in the form of `InnerSteps.loss`, for constants (batch, other parameters)."""

    def loss_at(i: int, params: Params, constants: Any) -> tuple[Tensor, Any]:
        batch, rest, *_ = constants
        value = loss({**rest, **params} if rest else params, batch)
        return validation.scalar("loss(params, batch)", value), ()

    return loss_at


class Unrolled(NamedTuple):
    """The result of an inner loop."""

    params: Params  # after the last step
    outer: Tensor | None  # the weighted sum of outer losses after earlier steps
    losses: list[Tensor]  # the inner loss of each step, without a graph
    notes: list[Any]  # the notes that the loss returned in each step


class InnerSteps(NamedTuple):
    """The steps of an inner loop; each function below takes the number i of the step.

    ``constants`` holds everything that the steps depend on besides parameters and state, so that it
    gets gradients.
    """

    loss: Callable[[int, Params, Any], tuple[Tensor, Any]]  # (i, params, constants) -> loss, notes
    rule: Callable[[int, Any], GradientTransformation]  # (i, constants)
    # whether the gradient of step i is treated as a constant
    constant: Callable[[int], bool] = lambda _: False
    # (i, params, constants) -> the weighted outer loss after step i, or None
    outer: Callable[[int, Params, Any], Tensor | None] | None = None
    mixed: ByTangents | None = None  # differentiate the steps' gradients forward over reverse
    # modules with a train or eval mode that recomputations restore
    modes_of: Sequence[nn.Module] = ()
    generators: Sequence[torch.Generator] = ()  # generators that recomputations reset

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
        """Step i: the new parameters and state; and the loss with its notes, without a graph.

            g = grad loss(theta)        theta', state' = rule.update(theta, g, state)

        alone: a backward through this step, if any, comes before the model runs again. made: params are
        the result of a previous step, distinct tensors with a graph, so the gradient can be taken by
        them directly, without new views.
        """

        def loss(params: Params) -> tuple[Tensor, Any]:
            return self.loss(i, params, constants)

        if self.mixed is not None and not self.constant(i):
            # forward over reverse differentiates the gradient: a constant one has no use for it
            loss, alone = partial(self._mixed_loss, i, constants), False
        grad = _grad_by_transform if torch_internals.transforms_active() else _grad
        constant = self.constant(i)
        check = i == 0 and not constant  # custom Functions are checked in the first step only
        g, found = grad(loss, params, constant=constant, check=check, alone=alone, made=made)
        params, state = self.rule(i, constants).update(params, g, state)
        return params, state, found

    def _mixed_loss(self, i: int, constants: object, params: Params) -> tuple[Tensor, Any]:
        """The loss of step i. Its graph keeps only its inputs; backward runs it again."""
        loss, lifted = _lift_tensors(self.loss, constants)
        value, notes = self.recomputed(loss, i, params, lifted, by_tangents=self.mixed)
        return value, pytree.map_tensors(Tensor.detach, notes)

    def recomputed(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """run(*args). Backward runs it again, with equal random numbers and module modes."""
        options = {"generators": self.generators, "modes_of": self.modes_of, **options}
        return recompute(run, *args, nested=True, **options)

    def run(self, start: int, end: int, carry: Any, constants: Any) -> tuple[Any, list[Any]]:
        """Steps start to end. carry: (params, state, sum of outer losses). Returns the new carry, and
        each loss with its notes."""
        params, state, total = carry
        # a single recomputed step: backward follows at once, and the model still holds its parameters
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
    """Run the steps in chunks; each chunk is stored, or recomputed in backward as a whole."""
    carry = params, inner.rule(0, constants).init(params) if steps else {}, None
    if memory == "mixed":
        inner, memory = inner._replace(mixed=mixed_mode()), "store"
    run: Callable[..., Any] = inner.run
    if memory != "store":
        run, constants = _lift_tensors(run, constants)
    constant = inner.constant
    # a chunk has steps of one kind: constant gradients need no recomputation
    changes = (i for i in range(1, steps) if constant(i) != constant(i - 1))
    found: list[tuple[Tensor, Any]] = []
    begin = 0
    for end in sorted({*states_to_keep(memory, 0, steps), *changes, steps} - {0}):
        if memory == "store" or constant(begin):  # a constant gradient has no graph to save
            carry, new = run(begin, end, carry, constants)
        else:
            carry, new = inner.recomputed(run, begin, end, carry, constants)
        found, begin = [*found, *new], end
    adapted, _, outer = carry
    return Unrolled(adapted, outer, [loss for loss, _ in found], [notes for _, notes in found])


def check_mixed(caller: str, policy: Policy) -> None:
    """Raise for options that do not work with memory="mixed"."""
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


def mixed_mode() -> ByTangents:
    """Forward over reverse for the gradients of one loop with memory="mixed"."""
    return ByTangents("memory='mixed'", "Take memory='remat'.")


def _grad(
    loss: LossWithNotes, params: Params, *, constant: bool, check: bool, alone: bool, made: bool
) -> tuple[Params, Any]:
    """g = grad loss(params), and (loss, notes) without a graph.

    g has a graph if grad mode is on, unless it is a constant.
    """
    create_graph = torch.is_grad_enabled() and not constant
    leaves, structure = pytree.flatten(params)
    with without_stand_ins() as stand_ins:  # only the loss and its backward need them
        taken = made and create_graph and _are_apart(leaves)
        own = leaves if taken else autograd.fresh_leaves(leaves, create_graph)
        hooks = nullcontext() if constant or alone else refuse_saved_tensor_hooks()
        with torch.enable_grad(), hooks:
            with stand_ins.resumed():
                value, notes = loss(pytree.unflatten(own, structure))
            if not value.requires_grad:
                raise NoSecondDerivative(UNUSED.format(which="inner", whom=" that adapt"))
            # stop at params: earlier steps have been looked at already
            graph = graph_summary(value, since=own)
            if check and create_graph:
                check_custom_functions(graph, "the inner step")
            with stand_ins.resumed() if graph.needs_stand_ins else nullcontext():
                g = torch_internals.gradients([value], own, create_graph=create_graph)
            grads = autograd.materialize_grads(g, own)
        # detach the loss: it is only reported, and would keep the graph of its step alive
        return pytree.unflatten(grads, structure), (value.detach(), notes)


def _are_apart(leaves: Sequence[Tensor]) -> bool:
    """Whether the leaves are distinct tensors with a graph, so that a loss can be differentiated by
    them without views."""
    distinct = len({id(leaf) for leaf in leaves}) == len(leaves)
    return distinct and all(leaf.grad_fn is not None for leaf in leaves)


def _grad_by_transform(
    loss: LossWithNotes, params: Params, *, constant: bool, check: bool, **_: bool
) -> tuple[Params, Any]:
    """`_grad` inside a torch.func transform. Outside, plain autograd is several times faster; inside,
    it has no graph."""

    def checked(params: Params) -> tuple[Tensor, Any]:
        value, notes = loss(params)
        if check:
            check_custom_functions(graph_summary(value), "the inner step")
        return value, (value, notes)

    # detach and no_grad: with torch.func.grad alone an outer transform would differentiate g
    at = pytree.map_tensors(Tensor.detach, params) if constant else params
    with torch.no_grad() if constant else nullcontext():
        g, (value, notes) = torch.func.grad(checked, has_aux=True)(at)
    return g, (value.detach(), notes)


def check_inner_losses(losses: Tensor, at_first: str, later: str, steps: int | None = None) -> None:
    """Raise NonFiniteError at the first infinite or NaN loss of [steps] or [tasks, steps].

    at_first, later: advice for the first step, and for later steps. steps: the number of all steps, if
    these losses are only the first ones.
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
    """A context that raises for saved-tensor hooks, if the graph will outlive the parameters that the
    model holds now.

    A step recomputed alone needs no such check: its backward runs while the model still holds
    its parameters.
    """
    wanted = torch.is_grad_enabled() and not torch_internals.transforms_active()
    return disable_saved_tensors_hooks(message) if wanted else nullcontext()


def is_truncated(i: int, steps: int, truncate: int | None) -> bool:
    """Whether step i is before the last `truncate` steps."""
    return truncate is not None and i < steps - truncate


def states_to_keep(memory: str, begin: int, end: int) -> Iterator[int]:
    """The states to keep between two states; all states in between can be recomputed from them.

    "store"                 none (the graph of every step is kept)
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

    Only these become inputs: a recomputation refuses other objects that hold tensors, such as a batch
    of the user's class.
    """

    def is_lifted(leaf: object) -> bool:
        return isinstance(leaf, Tensor | nn.Module)

    def run_lifted(*args: Any) -> Any:
        return run(*args[:-1], pytree.filled(constants, args[-1], is_lifted))

    return run_lifted, [*filter(is_lifted, pytree.leaves(constants))]


def _lift_inputs(loss: Loss, rule: Any, params: Params) -> tuple[Params, Any, Any, Any]:
    """Inputs for a recomputation of a loss: the model's other parameters, and a criterion module; also
    all modules with a mode, and the generators that loss and rule draw from."""
    drawn_from = closures.refuse("adapt(rule=...)", rule.update, RATE)
    if not isinstance(loss, FunctionalLoss):
        return {}, [], [], [*drawn_from, *closures.refuse("adapt", loss, IN_THE_BATCH)]
    # a recomputation gives gradients to its inputs only
    own = loss.model.named_parameters()
    rest: Params = {n: p for n, p in own if p.requires_grad and n not in params}
    criterion = loss.user_criterion
    modules = [criterion] if isinstance(criterion, nn.Module) else []
    modes = [part for module in (loss.model, *modules) for part in module.modules()]
    return rest, modules, modes, [*drawn_from, *closures.generators(criterion)]
