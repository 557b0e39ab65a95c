"""Several inner steps on one batch, in memory or through files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib._core import closures, pytree, torch_internals, validation
from hoglib._core.autograd import clone_inference_tensors
from hoglib._core.state import RunState
from hoglib._core.swap import Params, keep_swapped
from hoglib._core.torch_modes import ActiveStandIns
from hoglib.errors import UnsupportedError
from hoglib.functional import FunctionalLoss
from hoglib.meta.checkpoints import check_directory
from hoglib.meta.inner_loop import (
    MEMORY,
    InnerSteps,
    Loss,
    check_truncate,
    is_truncated,
    unroll,
)
from hoglib.meta.optimizers import GradientTransformation
from hoglib.meta.replay import (
    SCHEDULES,
    Replay,
    Steps,
    add,
    describe_call,
    open_checkpoints,
    vjp,
)
from hoglib.verification.entry_points import examined_functions


def adapt(
    loss: Loss,
    params: Params,
    batch: Any,
    rule: GradientTransformation,
    *,
    steps: int,
    first_order: bool = False,
    truncate: int | None = None,
    memory: str = "store",
    schedule: str = "sqrt",
    directory: str | Path | None = None,
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
            least where parameters outweigh activations. "disk": the parameters after a few steps, in
            files of the directory; backward holds the graph of one step, and a backward with
            create_graph runs as by "remat". Not inside torch.func transforms.
        schedule: What "disk" keeps: "sqrt" the parameters after every sqrt(steps)-th step and, in
            memory, those of sqrt(steps) steps that are run again; "log" those after log2(steps) steps.
        directory: Where "disk" keeps its files. The same call goes on there after an interruption, also
            its backward; another call is refused.

    Returns:
        The parameters after the last step, in the structure of params.

    Raises:
        NoSecondDerivative: for a loss that does not depend on params, and for a custom Function
            that is ``@once_differentiable``.
        ArgumentValueError: for another ``memory`` than "store" with a loss or rule that closes over
            tensors, since their gradients would be lost; for a directory of another call.
        NondeterministicError: with "disk", in backward, for steps that are not the same when they are
            run again.
        OutputError: for a directory that cannot be written to, and for a full disk.

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
    check_truncate(truncate)
    validation.one_of("memory", memory, (*MEMORY, "disk"))
    validation.one_of("schedule", schedule, SCHEDULES)
    where = check_directory(memory, directory)
    rest, modules = ({}, []) if memory == "store" else _lifted_from(loss, rule, params)

    def loss_at(i: int, params: Params, constants: Any) -> tuple[Tensor, Any]:
        batch, rest = constants[:2]
        value = loss({**rest, **params} if rest else params, batch)
        return validation.scalar("loss(params, batch)", value), ()

    inner = InnerSteps(
        loss_at, lambda i, _: rule, lambda i: first_order or is_truncated(i, steps, truncate)
    )
    with examined_functions("adapt"):
        if where is not None:
            options = {
                "loss": closures.name_of(loss),
                "first_order": first_order,
                "truncate": truncate,
            }
            kept = _Kept(where, schedule, options)
            return _on_disk(inner, steps, params, (batch, rest), loss, rule, modules, kept)
        return unroll(
            inner, steps, params, (batch, rest, modules), memory, _modules_of(loss, modules)
        ).params


class _Kept(NamedTuple):
    """Where and how the states of memory="disk" are kept."""

    directory: Path
    schedule: str
    options: dict[str, Any]  # of adapt, that tell a call from another one


def _on_disk(
    inner: InnerSteps, steps: int, params: Params, constants: Any, loss: Loss,
    rule: GradientTransformation, modules: Sequence[nn.Module], kept: _Kept,
) -> Params:  # fmt: skip
    """The steps with their states in files, as one Function of all tensors."""
    if torch_internals.transforms_active() or torch_internals.forward_mode_active():
        raise UnsupportedError(
            "adapt(memory='disk'): expected to be called outside of torch.func transforms and forward "
            "mode, got called inside; use memory='remat'."
        )
    for module in modules:
        if any(p.requires_grad for p in module.parameters()):
            raise UnsupportedError(
                f"adapt(memory='disk'): expected a criterion without trainable parameters, got "
                f"{type(module).__name__}, whose gradients it does not take; use memory='remat'."
            )
    if not steps:
        return params
    leaves, structure = pytree.flatten((params, clone_inference_tensors(constants)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]

    def tree(given: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for i, leaf in zip(places, given, strict=True):
            filled[i] = leaf
        return pytree.unflatten(filled, structure)

    parts = _modules_of(loss, modules)
    generators = closures.refuse("adapt(rule=...)", rule.update)
    generators += [] if isinstance(loss, FunctionalLoss) else closures.refuse("adapt", loss)
    call = _DiskLoop(inner, steps, rule, tree, kept, generators, parts, tensors)
    adapted: Any = pytree.flatten(params)[1]
    return pytree.unflatten(list(_FromDisk.apply(call, *tensors)), adapted)


class _DiskLoop:
    """The steps as a function of tensors that runs, and is differentiated, through files."""

    def __init__(
        self, inner: InnerSteps, steps: int, rule: GradientTransformation,
        tree: Callable[[Sequence[Tensor]], Any], kept: _Kept, generators: list[torch.Generator],
        modules: list[nn.Module], tensors: list[Tensor],
    ) -> None:  # fmt: skip
        self.inner, self.count, self.rule, self.tree = inner, steps, rule, tree
        self.kept, self.generators, self.modules = kept, generators, modules
        self.stand_ins = ActiveStandIns()
        self.run_state = RunState(tensors, generators, modules)

    def run(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None] | None = None
    ) -> Any:
        """The adapted leaves; with cotangents of these, the gradients by all tensors."""
        own = [_variable(x) for x in tensors]
        params, constants = self.tree(own)
        with torch.enable_grad():
            start = params, self.rule.init(params)
        first = pytree.map_tensors(Tensor.detach, start)
        steps = Steps(
            self.count, lambda i: [lambda p, c: self.inner.loss(i, p, c)[0]],
            lambda _: self.rule, self.inner.constant,
        )  # fmt: skip
        call = describe_call(
            "adapt", self.count, self.kept.schedule, first, constants, **self.kept.options
        )
        directory = self.kept.directory
        with keep_swapped(), open_checkpoints(directory, call, pytree.leaves(first)) as kept:
            replay = Replay(
                "adapt", steps, first, constants, schedule=self.kept.schedule,
                checkpoints=kept, generators=self.generators,
            )  # fmt: skip
            (adapted, memory), _ = replay.run()
            if cotangents is None:
                return tuple(pytree.leaves(adapted))
            form = pytree.flatten(adapted)[1]
            end = pytree.unflatten(list(cotangents), form), pytree.map(lambda _: None, memory)
            wanted = [x for x in own if x.requires_grad]
            constants = {id(x) for x in pytree.leaves(constants)}
            found = replay.pull(end, [None for x in wanted if id(x) in constants])
        of_constants = iter(found.constants)
        direct = [next(of_constants) if id(x) in constants else None for x in wanted]
        grads = iter(add(direct, vjp(pytree.leaves(start), found.carry, wanted)))
        return [next(grads) if x.requires_grad else None for x in own]

    def rerun(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The adapted leaves with a graph of all steps, for derivatives of higher order."""
        params, constants = self.tree(tensors)
        found = unroll(self.inner, self.count, params, (*constants, []), "remat", self.modules)
        return pytree.leaves(found.params)


class _FromDisk(torch.autograd.Function):
    """Saves its inputs; the rest is in files."""

    recomputes = True

    @staticmethod
    def forward(ctx: Any, loop: _DiskLoop, *tensors: Tensor) -> Any:
        ctx.loop = loop
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return loop.run(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        loop, tensors = ctx.loop, ctx.saved_tensors
        again = (
            loop.run_state.restored(),
            loop.stand_ins.resume(),
            loop.run_state.autocast.restored(),
        )
        with again[0], again[1], again[2]:
            if not torch.is_grad_enabled():
                return None, *loop.run(tensors, cotangents)
            own = [x.view_as(x) if x.requires_grad else x for x in tensors]
            outputs = loop.rerun(own)
            wanted = [x for x in own if x.requires_grad]
            pairs = [(y, u) for y, u in zip(outputs, cotangents, strict=True) if u is not None]
            ys, us = zip(*pairs, strict=True)
            grads = iter(torch.autograd.grad(ys, wanted, us, create_graph=True, allow_unused=True))
            return None, *[next(grads) if x.requires_grad else None for x in own]


def _modules_of(loss: Loss, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """All modules whose train or eval mode the loss depends on."""
    models = [loss.model] if isinstance(loss, FunctionalLoss) else []
    return [part for module in (*models, *modules) for part in module.modules()]


def _variable(x: Tensor) -> Tensor:
    """The tensor by itself, to differentiate by where the caller does."""
    return x.detach().requires_grad_(x.requires_grad)


def _lifted_from(
    loss: Loss, rule: GradientTransformation, params: Params
) -> tuple[Params, list[nn.Module]]:
    """The model's other parameters and the modules that a loss reads, as inputs of a recomputation."""
    closures.refuse("adapt(rule=...)", rule.update)
    if not isinstance(loss, FunctionalLoss):
        closures.refuse("adapt", loss)
        return {}, []
    rest: Params = {
        n: p for n, p in loss.model.named_parameters() if p.requires_grad and n not in params
    }
    criterion = loss.user_criterion
    return rest, [criterion] if isinstance(criterion, nn.Module) else []
