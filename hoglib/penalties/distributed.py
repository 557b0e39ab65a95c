"""A penalty under DistributedDataParallel: its gradient is the mean over the processes, or an error.

DistributedDataParallel averages a gradient when each of its parameters has had one in a backward that
follows a call of itself, and says nothing, or something only in the next step, where that was not so:

- a penalty alone leaves out what no gradient by an input depends on, such as a last bias. Its share is
  handed on here as no gradient at all, which is all that DistributedDataParallel waits for;
- a critic called around it (`ddp.module`, the module from before it was wrapped), a static graph, whose
  one delayed reduction is spent by the gradient inside the penalty, or a second backward after one call
  cannot be mended from here. Gradients are compared between the processes at the end of the backward,
  by their norms in one small all-reduce, and what differs raises before an optimizer can step.

Nothing is compared where there is no DistributedDataParallel around the parameters, under `no_sync()`,
in `ddp.join()`, with a communication hook (which may average what and when it likes), and where no
`.grad` was filled, as by `torch.autograd.grad`, which a single process may call.
"""

import functools
import gc
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hoglib._core import pytree, torch_internals
from hoglib.errors import DistributedError

_WRAPPERS: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()
_NUMBERS = itertools.count()


class Share(NamedTuple):
    """The parameters of a critic that one DistributedDataParallel averages the gradients of."""

    ddp: DistributedDataParallel
    params: dict[str, Tensor]


def averaged(what: str, penalty: Tensor, params: Iterable[Tensor], outputs: Any = ()) -> Tensor:
    """The same penalty, whose backward gives the mean gradient over the processes or raises.

    params: what the critic was computed from; outputs: all that it returned, with its graph. Without
    torch.distributed, or a DistributedDataParallel around the parameters, it is the penalty itself.
    Raises DistributedError, from backward, in every process alike.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return penalty
    if (
        not penalty.requires_grad
        or torch_internals.transforms_active()
        or torch_internals.tracing()
    ):
        return penalty
    shares = _shares(params)
    if not shares:
        return penalty
    seen = [y for y in pytree.leaves(outputs) if isinstance(y, Tensor) and y.requires_grad]
    result: Tensor = _Averaged.apply(penalty, what, shares, *seen)
    return result


class _Averaged(Function):
    """The identity, whose backward goes through the outputs too and is looked at in the end."""

    @staticmethod
    def forward(ctx: Any, penalty: Tensor, what: str, shares: list[Share], *outputs: Tensor) -> Any:
        ctx.what, ctx.shares, ctx.outputs = what, shares, len(outputs)
        return penalty.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for share in ctx.shares:
            _compare_after(ctx.what, share)
        # None and no zeros: 0 times inf were NaN, and find_unused_parameters=True keeps .grad as it is
        return grads[0], None, None, *(None,) * ctx.outputs


def _compare_after(what: str, share: Share) -> None:
    """Compares the gradients at the end of the backward that runs, if it fills any."""
    before = {name: _state(p) for name, p in share.params.items()}

    def compare() -> None:
        filled = [p for name, p in share.params.items() if _state(p) != before[name]]
        if not filled or not _is_averaging(share.ddp):
            return
        _raise_if_different(what, share)
        _compare_again(what, share, min(filled, key=Tensor.numel))

    torch_internals.after_backward(compare)


def _compare_again(what: str, share: Share, param: Tensor) -> None:
    """Compares once more if another backward adds to these gradients before an optimizer uses them.

    The loss of a call before the penalty's backward is not averaged any more.
    """
    grad, version = param.grad, param._version

    def added(p: Tensor) -> None:
        handle.remove()
        if p.grad is grad and p._version == version:
            _compare_after(what, share)

    handle = param.register_post_accumulate_grad_hook(added)


def _raise_if_different(what: str, share: Share) -> None:
    """By the norm of each gradient, which says nothing of two that are a turn of one another."""
    ddp, params = share
    norms = torch.stack([_norm(p) for p in params.values()]).double().nan_to_num(nan=torch.inf)
    extremes = torch.cat([norms, -norms])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=ddp.process_group)
    most, least = extremes[: len(params)], -extremes[len(params) :]
    coarse = any(p.dtype not in (torch.float64, torch.complex128) for p in params.values())
    rounding = 64 * torch.finfo(torch.float32 if coarse else torch.float64).eps
    different = (most > least * (1 + rounding)).tolist()
    names = [name for name, differs in zip(params, different, strict=True) if differs]
    if names:
        raise DistributedError(
            f"{what}: expected gradients that are the same in all "
            f"{dist.get_world_size(ddp.process_group)} processes at the end of backward, got different "
            f"ones of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, which "
            f"DistributedDataParallel has not averaged. {_advice(share)}"
        )


def _advice(share: Share) -> str:
    ddp, params = share
    own = {id(p) for p in params.values()}
    idle = any(p.requires_grad and id(p) not in own for p in ddp.module.parameters())
    steps = [
        "Call the critic as the DistributedDataParallel module, not as its `.module` (or both inside "
        "its forward, as in Lightning's training_step, with self.manual_backward)",
        "and run one backward of loss and penalty together, or each one's backward before the next "
        "call.",
    ]
    if ddp.static_graph:
        steps.append(
            "Leave static_graph=True out: the gradient inside a penalty sets off its first reduction."
        )
    elif idle and not ddp.find_unused_parameters:
        steps.append(
            "It wraps parameters that are not the critic's: wrap the critic by itself, or set "
            "find_unused_parameters=True (strategy='ddp_find_unused_parameters_true')."
        )
    return " ".join(steps)


def _norm(param: Tensor) -> Tensor:
    grad = param.grad
    if grad is None:
        return param.new_zeros((), dtype=torch.float64)
    values = grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
    wide = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.double()


def _state(param: Tensor) -> tuple[int, int]:
    """What changes when a backward adds to .grad."""
    return (id(param.grad), -1 if param.grad is None else param.grad._version)


def _is_averaging(ddp: DistributedDataParallel) -> bool:
    return bool(ddp.require_backward_grad_sync) and not torch_internals.averages_otherwise(ddp)


def _shares(params: Iterable[Tensor]) -> list[Share]:
    """Which DistributedDataParallel averages which of the parameters; the newest, where two do."""
    wanted = {id(p) for p in params if p.requires_grad}
    shares = []
    for ddp in reversed(_wrappers()):
        own = {
            name: p
            for name, p in ddp.module.named_parameters()
            if id(p) in wanted and name not in ddp.parameters_to_ignore
        }
        wanted -= {id(p) for p in own.values()}
        if own:
            shares.append(Share(ddp, own))
    return shares


def _wrappers() -> list[DistributedDataParallel]:
    """All that are alive, in the order in which they were made.

    A module does not know what wraps it. Those of before the first call are among the objects that
    Python keeps account of (60 to 200 ms, once); later ones are seen as they take up their module.
    """
    _look_around()
    return list(_WRAPPERS.values())


@functools.cache
def _look_around() -> None:
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel):  # isinstance would ask proxies
            _note(found)
    register_module_module_registration_hook(_note)


def _note(module: nn.Module, *_: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        _WRAPPERS[next(_NUMBERS)] = module
