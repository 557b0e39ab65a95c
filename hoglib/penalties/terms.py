"""From a rule for the terms of a penalty to its value: evaluation, checks, reduction, micro-batches.

penalty = reduce_n rule(J)_n        J the function's InputVJP at the points
"""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, materialize_grads, translate_errors, with_gradients
from hoglib._core.closures import owner_of
from hoglib._core.gradient_graph import depends_on_any
from hoglib._core.source_location import warn
from hoglib._core.torch_internals import transforms_active
from hoglib._core.torch_modes import value_checks_on
from hoglib.errors import ArgumentValueError
from hoglib.penalties.compiled import RecordedDraws, backend_of, leaves_of, run_as_graph
from hoglib.penalties.distributed import averaged
from hoglib.penalties.input_vjp import (
    NOT_OF_PARAMETERS,
    Function,
    InputVJP,
    autocast_devices,
    input_vjp,
    without_autocast,
)
from hoglib.penalties.options import CheckedOptions
from hoglib.penalties.samples import EMPTY, check_points

Rule = Callable[[InputVJP], Tensor]  # the terms at the points, one per sample: [N]


class PenaltyWithOutputs(NamedTuple):
    """What a penalty returns with ``return_outputs=True``; it can be unpacked.

    Attributes:
        penalty: The penalty, a scalar, or [N] with ``reduction="none"``.
        outputs: All that the function returned at the points, of one forward pass.
    """

    penalty: Tensor
    outputs: Any


def penalty(
    func: Function, x: Any, args: tuple[Any, ...], rule: Rule, options: CheckedOptions
) -> Any:
    """The reduced terms of a rule at x; with return_outputs also what func returned there."""
    if options.micro_batch is not None:
        return _in_micro_batches(func, x, args, rule, options)
    backend = backend_of(options.compile, options.remat)
    if backend is not None:  # a compiled graph: of the value and its gradients if it comes alone
        terms = Terms(func, rule, options._replace(batch=None))
        found = run_as_graph(
            options.name, terms, (x, args, options.batch), backend, options.generator,
            with_gradients=options.reduction != "none" and not options.return_outputs,
        )  # fmt: skip
        value, *returned = found if options.return_outputs else (found,)
        value = averaged(options.name, value, leaves_of(value), returned)
        return PenaltyWithOutputs(value, *returned) if options.return_outputs else value
    value, outputs, point = evaluate(func, x, args, rule, options)
    if point.create_graph:
        value = averaged(options.name, value, point.trainable, outputs)
    return PenaltyWithOutputs(value, outputs) if options.return_outputs else value


@final
class Terms:
    """The reduced terms of a rule, as a function of tensors that depends on its attributes alone:
    what is compiled."""

    def __init__(self, func: Function, rule: Rule, options: CheckedOptions) -> None:
        self.func, self.rule, self.options = func, rule, options

    def __call__(
        self, x: Any, args: tuple[Any, ...], batch: Any, draws: RecordedDraws | list[Tensor] | None
    ) -> Any:
        """The value, and outputs where they are returned. A list of draws is given in a graph."""
        drawn = RecordedDraws(draws) if isinstance(draws, list) else draws
        options = self.options._replace(batch=batch)
        value, outputs, _ = evaluate(self.func, x, args, self.rule, options, drawn)
        return (value, outputs) if self.options.return_outputs else value


def evaluate(
    func: Function, x: Any, args: tuple[Any, ...], rule: Rule, options: CheckedOptions,
    draws: RecordedDraws | None = None,
) -> tuple[Tensor, Any, InputVJP]:  # fmt: skip
    """The reduced terms, with all checks done, the outputs of the function, and its InputVJP."""
    with input_vjp(func, x, args, options) as point:
        point.draws = draws
        terms = rule(point)
        if point.create_graph and not transforms_active():
            if not terms.requires_grad or not depends_on_any(terms, point.trainable):
                raise point.no_gradient_flow(NOT_OF_PARAMETERS)
            if value_checks_on():
                check_batch_dependence(point)
        if options.reduction != "none":
            terms = terms.mean() if options.reduction == "mean" else terms.sum()
        value, outputs = terms, point.outputs
    if not point.create_graph:
        value, outputs = value.detach(), pytree.map_tensors(Tensor.detach, outputs)
    return value, outputs, point


# Samples whose scores depend on one another

USE_OTHER_NORM = (
    "Use LayerNorm, GroupNorm or InstanceNorm instead (Gulrajani et al., Improved Training of "
    "Wasserstein GANs, 2017, section 4)."
)
FIND_DEPENDENCE = (
    "Look for a mean, a standard deviation or attention along the batch, for batch_first=False, and "
    "for rows that belong to one sample (pass batch=). Where a statistic of the batch is intended, "
    "filter this warning."
)
TOLERANCE = 1e-6  # of the gradient by the sample's own points
# Whether a critic was found to be batch dependent at its first gradient: by a parameter, then by the
# owner and name of the function and the modes of its modules. A function that is created anew for
# each call goes by its code, which critics may share.
_FOUND_DEPENDENT: Any = WeakIdKeyDictionary()


def check_batch_dependence(point: InputVJP) -> None:
    """Warns of layers that normalise by the batch, and of any other dependence of one sample's score on
    the other samples, which is looked for once for each function."""
    layers = [
        name
        for module in point.modules
        if isinstance(module, _BatchNorm) and (name := _batch_norm_name(module, point.func))
    ]
    if not layers and not _found_dependent(point):
        return
    how = f", through {', '.join(layers)}, which normalises by the whole batch" if layers else ""
    warn(
        f"{point.options.name}: expected each sample's score to depend on that sample alone, got "
        f"one that depends on the others{how}. The gradient by a sample then has parts of the "
        "scores of all samples, and its norm is not the slope of that sample's score. "
        f"{USE_OTHER_NORM if layers else FIND_DEPENDENCE}"
    )


def is_batch_dependent(point: InputVJP) -> bool | None:
    """Whether the last sample's output has a gradient by another's points; None if that is unknown.

    The last, because in a recurrent or causal layer that takes samples for steps the first depends on
    no other.
    """
    samples = point.samples
    if samples is None or not samples.count or samples.count < 2 or not point.y.requires_grad:
        return None
    if point.y.is_meta:
        return None
    last = samples.count - 1
    score = point.y.reshape(samples.count, -1)[last].sum()
    with translate_errors(point.options.name):
        grads = torch.autograd.grad(score, point.leaves, retain_graph=True, allow_unused=True)
    own = others = 0.0
    for grad, index in zip(grads, samples.index, strict=True):
        if grad is None or not grad.numel():
            continue
        size = grad.detach().abs().reshape(len(grad), -1).amax(1)
        rows = torch.arange(len(grad), device=grad.device) if index is None else index
        mine = rows == last
        own = max(own, float(size[mine].amax()) if mine.any() else 0.0)
        others = max(others, float(size[~mine].amax()) if not mine.all() else 0.0)
    return None if not own and not others else others > TOLERANCE * own


def _batch_norm_name(module: _BatchNorm, func: Any) -> str:
    """The name of a layer that normalises by the batch; empty for one that does not."""
    if not module.training and module.running_mean is not None:
        return ""
    owner = owner_of(func)
    named = owner.named_modules() if isinstance(owner, nn.Module) else ()
    name = next((f" {name!r}" for name, each in named if each is module), "")
    return f"{type(module).__name__}{name}{' in training mode' if module.training else ''}"


def _found_dependent(point: InputVJP) -> bool:
    """`is_batch_dependent`, remembered."""
    func, modes = point.func, tuple([module.training for module in point.modules])
    # by the type: isinstance asks the metaclass of Parameter, which takes its time
    parameter = next((t for t in point.trainable if type(t) is nn.Parameter), point.trainable[0])
    # a module would take long to say that it has no name
    name = "" if isinstance(func, nn.Module) else getattr(func, "__name__", "")
    key = id(owner_of(func)), name, modes
    known: dict[Any, bool] = _FOUND_DEPENDENT.setdefault(parameter, {})
    if key not in known:
        found = is_batch_dependent(point)
        if found is None:
            return False
        known[key] = found
    return known[key]


# Micro-batches

NO_SECOND_BACKWARD = (
    "a penalty with micro_batch: expected backward() without create_graph, got create_graph=True; its "
    "gradients are computed before backward and have no graph. Leave micro_batch out."
)


def _in_micro_batches(
    func: Function, x: Any, args: tuple[Any, ...], rule: Rule, options: CheckedOptions
) -> Tensor:
    """The penalty as a sum over pieces of the samples, each with its gradients before the next."""
    assert options.micro_batch is not None
    validation.refuse_transforms(f"{options.name}(micro_batch=...)", "leave micro_batch out there.")
    leaves = check_points(options.name, "the points", x)
    count = len(leaves[0])
    if not count:
        raise ArgumentValueError(EMPTY.format(options.name))
    detached = pytree.map_tensors(Tensor.detach, x)
    options_of_piece = options._replace(reduction="sum", micro_batch=None)
    total: Tensor | None = None
    trainable: dict[int, Tensor] = {}  # by its id
    gradients: dict[int, Tensor] = {}  # of a trainable tensor, summed over the pieces
    point_gradients: list[Vector] = []  # one for each piece
    for start in range(0, count, options.micro_batch):
        piece = pytree.rows((detached, args), count, start, start + options.micro_batch)
        points = [leaf.requires_grad_(old.requires_grad) for leaf, old in
                  zip(pytree.leaves(piece[0]), leaves, strict=True)]  # fmt: skip
        value = penalty(func, piece[0], piece[1], rule, options_of_piece)
        reached = leaves_of(value)
        value = value / (count if options.reduction == "mean" else 1)
        total = value.detach() if total is None else total + value.detach()
        if not reached:
            continue
        with without_autocast(() if options.autocast else autocast_devices(leaves)):  # as the piece
            grads = torch.autograd.grad(value, reached, retain_graph=True, allow_unused=True)
        trainable |= {id(leaf): leaf for leaf in reached}
        own = {id(leaf) for leaf in points}
        for leaf, grad in zip(reached, grads, strict=True):
            if grad is not None and id(leaf) not in own:
                before = gradients.get(id(leaf))
                gradients[id(leaf)] = grad.clone() if before is None else before.add_(grad)
        by_id = {id(leaf): grad for leaf, grad in zip(reached, grads, strict=True)}
        point_gradients.append(materialize_grads([by_id.get(id(leaf)) for leaf in points], points))
    assert total is not None
    if not gradients and not point_gradients:
        return total
    pairs = [(trainable[key], grad) for key, grad in gradients.items()]
    for k, leaf in enumerate(leaves):
        if leaf.requires_grad:
            pairs.append((leaf, torch.cat([grads[k] for grads in point_gradients])))
    tensors, known = zip(*pairs, strict=True)
    value = with_gradients(total, known, tensors, NO_SECOND_BACKWARD)
    return averaged(options.name, value, trainable.values(), list(trainable.values()))
