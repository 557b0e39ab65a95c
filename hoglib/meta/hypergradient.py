"""Gradients of a validation loss with respect to the hyperparameters of an inner training, and a check
of gradients by example weights: do they predict the result of a training without some examples?"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor

from hoglib import plotting
from hoglib._core.messages import results, validation
from hoglib._core.messages.closures import name_of
from hoglib._core.messages.files import digest
from hoglib._core.messages.progress import ProgressBar
from hoglib._core.modules.state import RandomState, preserve_random_state
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate import autograd
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.meta.checkpoints import OnDisk, check_directory
from hoglib.meta.implicit import (
    Residual,
    Solver,
    check_used,
    implicit_gradient,
    implicit_graph,
    warn_if_no_minimum,
)
from hoglib.meta.inner_loop import check_mixed, mixed_mode
from hoglib.meta.training import Replay, Training, TrainingOptions, add_grads, detach_all, pullback
from hoglib.ring import ring

Method = Literal["unrolled", "cg", "neumann"]
TrainingMemory = Literal["store", "remat", "checkpoint", "disk", "mixed"]
Schedule = Literal["sqrt", "log"]
# relative change of the outer loss by rounding of the parameters, above which to warn
TOO_MUCH = 1e-5
EXACT_EPS = 1e-12  # float64 rounds less than this, and needs no warning


@results.result
@validation.short_repr
class Hypergradient(NamedTuple):
    """The result of `hypergradient`."""

    value: Tensor  # the outer loss after the inner training
    gradient: Any  # gradient of value, in the structure of hyper
    params: Any  # after the inner training
    residual: Residual | None  # only from an implicit method


def hypergradient(
    outer: Callable[..., Tensor],
    inner: Callable[..., Tensor],
    params: Tree,
    hyper: Tree,
    *,
    method: Method = "unrolled",
    memory: TrainingMemory = "store",
    schedule: Schedule = "sqrt",
    directory: str | Path | None = None,
    truncate: int | None = None,
    iterations: int | None = None,
    damping: float = 0.0,
    tol: float | None = None,
    step_size: float | None = None,
    create_graph: bool = False,
    **options: Unpack[TrainingOptions],
) -> Hypergradient:
    r"""Differentiate a loss after a training with respect to any hyperparameters of the training.

        gradient = d outer(theta*(hyper), hyper) / d hyper
        theta_0 = params        theta_{i+1} = rule(theta_i, d inner(theta_i, hyper) / d theta)
        theta* = theta_steps

    Gradients flow where hyper is an argument; tensors that the functions close over are constants.
    Method "unrolled" differentiates the steps themselves, exactly. "cg" and "neumann" take theta* for a
    minimum of inner, regardless of the steps, and differentiate it by the implicit function theorem:

        d outer / d hyper - (d^2 inner / d hyper d theta) (H + damping I)^-1 d outer / d theta

    with H the Hessian of inner at theta*. The rule and the initial point then have no influence.
    Works under no_grad and in inference mode. Nothing is written to `.grad`.

    There is a warning if rounding of the parameters in all steps moves the outer loss by more than 1e-5
    of its value, to first order: sqrt(sum (d outer / d theta_i theta_i eps)^2). This is not measured
    with memory="store", nor in float64.

    Args:
        outer: The loss to differentiate, ``outer(params, hyper)``, a scalar.
        inner: The loss of the training, ``inner(params, hyper)``, or ``inner(params, hyper,
            batches[i])`` if there are batches.
        params: The initial parameters: a pytree of tensors, or a function of hyper that returns such a
            pytree.
        hyper: Any pytree of floating-point tensors: weights of examples, strengths of a
            regulariser, data, learning rates, an initial point.
        method: "unrolled", "cg" (conjugate gradients) or "neumann" (the Neumann series).
        memory: The tensors that "unrolled" keeps for backward. "store": the graph of every step.
            "remat": the parameters (with the state of the rule) after every step. "mixed": as "remat",
            with gradients differentiated forward over reverse, which takes less memory for a step.
            "checkpoint": the parameters after a few steps, by the schedule. "disk": as "checkpoint", in
            files of the directory. All but "store" hold the graph of one step at a time, and compare
            each repeated step with the training, bit for bit; on a GPU up to rounding, unless
            `torch.use_deterministic_algorithms(True)`.
        schedule: The steps kept by "checkpoint" and "disk". "sqrt": every sqrt(steps)-th step and,
            during backward, the sqrt(steps) steps of one segment; each step runs three times. "log":
            log2(steps) steps; each step runs log2(steps) / 2 + 2 times.
        directory: The directory for the files of "disk". After an interruption an equal call resumes
            there, and after the end it returns the result at once; any other call is refused.
        truncate: With "unrolled", differentiate only through this many last steps. Default: all.
        iterations: The iterations of the linear solver. Default: until tol for "cg", 100 for
            "neumann".
        damping: A number added to the diagonal of H, 0 or more.
        tol: The relative tolerance of conjugate gradients. Default: as for `LinearOperator.solve`.
        step_size: The step size of the Neumann series, below 2 over the largest eigenvalue of H.
        create_graph: Give value, gradient and params of an implicit method a graph to hyper, for
            derivatives of any order. Each linear system is solved like the first one; damping then
            means a minimum of inner + damping |theta - theta*|^2 / 2, with a constant theta*. There is
            a warning if theta* misses the minimum by more than 1e-3.
        **options: Options of :class:`hoglib.meta.TrainingOptions`: ``rule``, ``steps``, ``batches``,
            ``progress`` and ``stand_ins``.

    Returns:
        A `Hypergradient`: ``value``, ``gradient`` in the structure of hyper, ``params`` (theta*) and,
        for an implicit method, ``residual``. Without create_graph all are constants, whose derivatives
        `hoglib.hessian` and others refuse.

    Raises:
        NoSecondDerivative: for functions that do not depend on hyper as given.
        ArgumentValueError: for a missing rule, for a rule of an implicit method without steps or
            batches, and for create_graph=True without a tensor of hyper that requires grad.
        NonFiniteError: for an infinite or NaN inner or outer loss, naming the step.
        NotPositiveDefiniteError: for "cg" if theta* is no strict minimum of inner.
        NondeterministicError: for a training that differs when a step runs again.
        OutputError: for a directory without write permission, and for a full disk.
        UnsupportedError: for create_graph=True with method "unrolled", inside `torch.func`, and with
            memory="mixed" for an operation without a forward mode.

    References:
        Maclaurin, Duvenaud and Adams, Gradient-based Hyperparameter Optimization through Reversible
        Learning, 2015; Engstrom et al., Optimizing ML Training with Metagradient Descent, 2025
        (replay); Shaban et al., Truncated Back-propagation, 2019; Lorraine, Vicol and Duvenaud,
        Optimizing Millions of Hyperparameters by Implicit Differentiation, 2020.

    Example:
        >>> found = hog.meta.hypergradient(
        ...     lambda params, hyper: params["w"].square(),
        ...     lambda params, hyper: (params["w"] - hyper["target"]).square(),
        ...     {"w": torch.tensor(0.0)}, {"target": torch.tensor(1.0)},
        ...     rule=hog.meta.sgd(0.25), steps=1,
        ... )
        >>> found.value, found.gradient
        (tensor(0.2500), {'target': tensor(0.5000)})
    """
    hint = " Implicit differentiation is cg or neumann."
    validation.choice("method", method, get_args(Method), hint)
    validation.choice("memory", memory, get_args(TrainingMemory))
    validation.choice("schedule", schedule, get_args(Schedule))
    where = check_directory(memory, directory)
    validation.refuse_transforms(
        "hypergradient", "write it with `hoglib.meta.adapt`, which runs inside of any."
    )
    if validation.boolean("create_graph", create_graph) and method == "unrolled":
        raise UnsupportedError(
            "create_graph: expected False with method='unrolled', got True. For derivatives of every "
            "order use method='cg' at a minimum, or take outer at `hoglib.meta.adapt(...)`."
        )
    training = Training.of("hypergradient", outer, inner, params, hyper, options, method, truncate)
    if create_graph and not any(x.requires_grad for x in pytree.leaves(hyper)):
        raise ArgumentValueError(
            "create_graph: expected a tensor of hyper that requires grad, got none, so that there is "
            "no graph; call `.requires_grad_()` on those to differentiate by, or leave it out."
        )
    _check_together(memory, schedule, method, training)
    solver = None
    if method != "unrolled":
        solver = Solver(method, iterations, damping, tol, step_size)
    with ring(training.policy, inner):
        at = autograd.clone_inference_tensors(hyper)
        if solver is not None:
            found = _implicit(training, at, solver, create_graph)
        elif memory == "store":
            found = _unroll(training, at)
        else:
            at_every_step = memory in ("remat", "mixed")
            # a new object for each training: it learns from the first steps if forward mode needs
            # gradients enabled
            replayed = replace(training, mixed=mixed_mode() if memory == "mixed" else None)
            found = _replay(replayed, at, "remat" if at_every_step else schedule, where)
        leaves, form = pytree.flatten(at)

        def again(*own: Tensor) -> Tensor:
            hyper = pytree.unflatten(own, form)
            return training.outer_value(training.unrolled(hyper)[0], hyper)

        parts = pytree.tensors(found.gradient)
        around = preserve_random_state
        autograd.warn_if_not_finite("hypergradient", found.value, parts, again, leaves, around)
        return found


def _unroll(training: Training, hyper: Tree) -> Hypergradient:
    """The gradient through the graph of all steps."""
    given, own, at = _copy_leaves(hyper)
    params, losses = training.unrolled(at)
    value = training.outer_value(params, at)
    training.check_finite(losses, value)
    grads = _outer_grads(value, own, given)
    return Hypergradient(value.detach(), _gradient(grads, own, hyper), detach_all(params), None)


def _replay(training: Training, hyper: Tree, schedule: str, path: Path | None) -> Hypergradient:
    """The gradient by a replay of the steps, from last to first."""
    given, own, at = _copy_leaves(hyper)
    bar = ProgressBar("hypergradient", training.progress, unit="step")
    params = training.initial(at)
    start = params, training.steps.rule(0, at).init(params)
    files = None
    if path is not None:
        files = OnDisk(path, _describe_call(training, schedule, start, hyper))
    with nullcontext() if files is None else files.held(), bar.over("steps, forward and backward"):
        if files is not None:
            training.batches.begin(files)
        # before a training that may take hours: check on one evaluation that inner uses hyper
        if any(leaf.requires_grad for leaf in given):
            with preserve_random_state(*training.generators()):
                first = training.value(params, at, training.batches.at(0))
            autograd.check_uses_given_params(graph_summary(first), given, "hypergradient")
            del first
        replay = Replay(training, detach_all(start), at, schedule, files, lambda: bar.advance(1))
        (found, state), losses = replay.run()
        leaves, form = pytree.flatten(found)
        final = [x.detach().requires_grad_() for x in leaves]
        value = training.outer_value(pytree.unflatten(final, form), at)
        training.check_finite(losses, value)
        slopes = _outer_grads(value, [*final, *own], given)
        # the outer loss depends on the final parameters, but not on the state of the rule
        end = pytree.unflatten(slopes[: len(final)], form), pytree.map(lambda _: None, state)
        pulled = replay.pull(end, slopes[len(final) :])
        _warn_of_rounding(pulled.rounding.sqrt(), value.detach(), final)
        of_start = pullback(pytree.leaves(start), pulled.carry, own)
    gradient = _gradient(add_grads(pulled.constants, of_start), own, hyper)
    return Hypergradient(value.detach(), gradient, found, None)


def _outer_grads(value: Tensor, inputs: list[Tensor], given: list[Tensor]) -> list[Tensor | None]:
    """d value / d inputs for an outer loss. given: the original leaves of hyper, which the loss must
    not use, because it gets copies as its argument."""
    autograd.check_uses_given_params(graph_summary(value), given, "hypergradient")
    return autograd.vjp([value], inputs, [torch.ones_like(value)], "hypergradient")


def _describe_call(training: Training, schedule: str, start: Tree, hyper: Tree) -> dict[str, Any]:
    """The properties that tell calls apart, with names for messages."""
    tensors = pytree.tensors(start)
    return {
        "function": "hypergradient", "steps": training.count, "schedule": schedule,
        "torch": torch.__version__,
        "shapes": [list(x.shape) for x in tensors],
        "dtypes": sorted({str(x.dtype) for x in tensors}),
        "devices": sorted({str(x.device) for x in tensors}),
        "initial parameters": digest(pytree.leaves(start)),
        "arguments": digest(pytree.tensors(hyper)),
        "inner": name_of(training.inner), "truncate": training.truncate,
    }  # fmt: skip


def _copy_leaves(hyper: Tree) -> tuple[autograd.Vector, autograd.Vector, Any]:
    """The leaves of hyper; copies of them that require grad; and hyper made of the copies."""
    given, structure = pytree.flatten(hyper)
    own = [leaf.detach().requires_grad_() for leaf in given]
    return given, own, pytree.unflatten(own, structure)


def _gradient(grads: Sequence[Tensor | None], own: autograd.Vector, hyper: Tree) -> Any:
    check_used(grads)
    return pytree.unflatten(autograd.materialize_grads(list(grads), own), pytree.flatten(hyper)[1])


def _implicit(training: Training, hyper: Tree, solver: Solver, graph: bool) -> Hypergradient:
    """The gradient through the minimum at the end of the training."""
    with torch.no_grad():
        params, losses = training.unrolled(detach_all(hyper))
    # the minimum of a single loss: the loss on the last batch
    params, batch = detach_all(params), training.batches.last(training.count)
    inner = partial(training.value, batch=batch)
    given = training.outer_value, inner, params, hyper, solver
    if graph:
        value, grads, residual, params = implicit_graph(*given, training.policy)
    else:
        value, grads, residual = implicit_gradient(*given)
    training.check_finite(losses, value)
    warn_if_no_minimum(inner, params, hyper, residual.stationarity)
    return Hypergradient(value, grads, params, residual)


def _check_together(memory: str, schedule: str, method: str, training: Training) -> None:
    """Raise for options that do not fit the method and memory."""
    replayed = memory != "store" and method == "unrolled"
    if memory == "mixed":
        check_mixed("hypergradient", training.policy)
    if memory == "disk" and not replayed:
        raise ArgumentValueError(
            f"memory: expected 'store' with method={method!r}, which differentiates no steps, got "
            "'disk'; leave it out."
        )
    if schedule != "sqrt" and (memory not in ("checkpoint", "disk") or not replayed):
        raise ArgumentValueError(
            f"schedule: expected memory='checkpoint' or 'disk' with schedule={schedule!r}, got "
            f"memory={memory!r}, which keeps every step."
        )
    if training.progress and not replayed:
        raise ArgumentValueError(
            "progress: expected method='unrolled' with memory='remat', 'mixed', 'checkpoint' or "
            "'disk', which differentiate one step at a time, got method="
            f"{method!r} with memory={memory!r}."
        )


def _warn_of_rounding(change: Tensor, value: Tensor, params: list[Tensor]) -> None:
    """Warn if rounding of the parameters during the training decides the outer loss.

    change: sqrt(sum (u theta eps)^2) over steps and parameters, with u the gradient of the loss by the
    parameters of a step. To first order, this is the standard deviation of the loss for random rounding
    errors.
    """
    eps = max(torch.finfo(x.dtype).eps for x in params)
    size = float(change) / max(float(value.abs()), torch.finfo(torch.float32).tiny)
    if eps > EXACT_EPS and not size <= TOO_MUCH:
        warn(
            "hypergradient: rounding of the parameters, over all steps, moves the outer loss by about "
            f"{size:.2g} of its value, to first order; stable trainings stay below {TOO_MUCH:g}. Its "
            "gradient may be far off. Use float64 for params, hyper, data and modules, or make the "
            "training smoother: a lower learning rate, larger batches, smooth activations, a larger "
            "eps of Adam."
        )


@results.result
@validation.short_repr
class LeaveKOut(NamedTuple):
    """The result of `leave_k_out`; printed, it is a summary."""

    predicted: Tensor  # changes of the outer loss by the gradient, one for each subset
    actual: Tensor  # changes after a training without the subset
    subsets: Tensor  # [subsets, k]: indices of the changed weights
    correlation: float  # Spearman's rank correlation of predicted and actual changes

    def plot(self, ax: object = None) -> Any:
        """Draw the predicted against the actual changes.

        Args:
            ax: Axes of matplotlib. Default: axes of a new figure of pyplot.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.leave_k_out(self, ax)

    def __str__(self) -> str:
        count, k = self.subsets.shape
        return (
            f"leave {k} out, {count} random subsets: rank correlation {self.correlation:.3f} "
            "(Spearman) of predicted and actual changes of the outer loss\n"
            f"predicted {_format_range(self.predicted)}, actual {_format_range(self.actual)}"
        )


def leave_k_out(
    found: Hypergradient,
    outer: Callable[..., Tensor],
    inner: Callable[..., Tensor],
    params: Tree,
    hyper: Tree,
    *,
    k: int,
    subsets: int = 20,
    weights: str | None = None,
    factor: float = 0.0,
    generator: torch.Generator | None = None,
    **options: Unpack[TrainingOptions],
) -> LeaveKOut:
    r"""Train without random subsets of examples, and compare with the prediction by a hypergradient.

        predicted_S = (factor - 1) sum_{i in S} w_i d outer / d w_i        S a random subset of size k
        actual_S = outer after a training with w_i <- factor w_i for i in S, minus found.value

    The rank correlation of both, the linear datamodelling score, tells how far the values of examples
    can be trusted. It is low if the training is not smooth: for high learning rates, ReLU, or subsets
    so large that the loss is not linear in their weights.

    Args:
        found: The result of `hypergradient` for the same arguments.
        outer, inner, params, hyper: The arguments of `hypergradient`.
        k: The size of a subset.
        subsets: The number of subsets, at least 3; there is one training for each.
        weights: The leaf of hyper with the weights, by its name ("weights", "data[0]"). Default: hyper
            is a tensor itself.
        factor: The weights of a subset are multiplied by this: 0 leaves the examples out, 1 + 1e-3
            stays in the range where the gradient is exact.
        generator: Draws the subsets. Default: torch's own.
        **options: Options of :class:`hoglib.meta.TrainingOptions`, as given to `hypergradient`:
            ``rule``, ``steps``, ``batches``, ``progress`` and ``stand_ins``.

    Returns:
        A `LeaveKOut`.

    Raises:
        ArgumentValueError: for a k larger than the number of weights, and for a leaf that hyper does
            not have.

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
    training = Training.of("leave_k_out", outer, inner, params, hyper, options)
    validation.at_least("k", k, 1)
    validation.at_least("subsets", subsets, 3)
    validation.number("factor", factor)
    validation.generator(generator)
    place = _weights_index(hyper, weights)
    leaf: Tensor = pytree.leaves(hyper)[place]
    if k > leaf.numel():
        text = f"k: expected at most the number of weights, {leaf.numel()}, got {k}; take fewer."
        raise ArgumentValueError(text)
    slope = (leaf * pytree.leaves(found.gradient)[place]).flatten()
    device = "cpu" if generator is None else generator.device
    drawn = partial(torch.randperm, leaf.numel(), generator=generator, device=device)
    chosen = torch.stack([drawn()[:k] for _ in range(subsets)]).cpu()
    bar, values = ProgressBar("leave_k_out", training.progress, unit="training"), []
    shown = bar.over("without random subsets", subsets)
    restored = preserve_random_state(*training.generators())
    with ring(training.policy, inner), shown, torch.no_grad(), restored:
        at = detach_all(autograd.clone_inference_tensors(hyper))
        before = RandomState(training.generators())
        for subset in chosen:
            # equal random numbers in each training, so that only the subset makes a difference
            before.restore()
            changed = _with_scaled_weights(at, place, subset, factor)
            trained, losses = training.unrolled(changed)
            training.check_finite(losses)
            values.append(training.outer_value(trained, changed))
            bar.advance(1)
    predicted = (factor - 1) * slope[chosen.to(slope.device)].sum(1)
    actual = torch.stack(values) - found.value
    return LeaveKOut(predicted, actual, chosen, spearman(predicted, actual))


def spearman(a: Tensor, b: Tensor) -> float:
    """The rank correlation of two vectors; equal numbers share the mean of their ranks.

    References:
        Spearman, The proof and measurement of association between two things, 1904.
    """
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    # equal numbers get the mean of their ranks
    _, which, counts = values.double().unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts - 1) / 2)[which]


def _weights_index(hyper: Tree, weights: str | None) -> int:
    """The index of the leaf with the weights."""
    paths = pytree.paths(hyper)
    name = "" if weights is None else weights
    if name not in paths:
        raise ArgumentValueError(
            f"weights: expected the name of a leaf of hyper, {validation.listing(paths)}, got "
            f"{weights!r}; name the one with the weights of examples."
        )
    return paths.index(name)


def _with_scaled_weights(hyper: Tree, place: int, subset: Tensor, factor: float) -> Any:
    leaves, structure = pytree.flatten(hyper)
    leaf = leaves[place].clone()
    leaf.view(-1)[subset.to(leaf.device)] *= factor
    return pytree.unflatten([*leaves[:place], leaf, *leaves[place + 1 :]], structure)


def _format_range(values: Tensor) -> str:
    return f"{float(values.min()):.3g} to {float(values.max()):.3g}"
