"""Penalties in several processes: under DistributedDataParallel the gradient is the mean, or an error.

DistributedDataParallel (DDP) averages gradients if every one of its parameters gets a gradient in a
backward that follows a call of the DDP module. Else DDP is silent, or raises only at the next step:

- A last bias, for instance, has no part in a gradient by the inputs, so the backward of a penalty alone
  does not reach it. `_AverageGradients` makes the backward reach such parameters through the outputs,
  with gradients of None, which suffices for DDP.
- Three mistakes cannot be corrected here: calling the critic as `ddp.module` instead of the DDP module;
  a static graph (the gradient inside the penalty triggers DDP's only reduction); and a second backward
  after one call. Therefore one small all-reduce compares the gradients' norms between the processes at
  the end of backward, and a difference raises before an optimizer can step.

Nothing is compared without a DDP module around the parameters, under `no_sync()`, in `ddp.join()`, with
a communication hook (which may average differently or later), and if no `.grad` was accumulated
(`torch.autograd.grad`, which a single process may call).

A lazy penalty (`every=`) runs the critic at some steps only, and all processes have to run it together.
So each call compares the numbers of calls, by an all-reduce on the CPU, without a synchronization of
devices. It uses a separate group: in a process without this call, the default group would pair it with
a message of another size.

fully_shard (FSDP2) frees a critic's gathered parameters after the first backward, here the gradient
inside the penalty; but the penalty's backward needs them (``setStorage ... storage of size 0``).
``set_reshard_after_backward(False)`` keeps them also after an optimizer step, so that the next forward
silently uses old values. `GatheredParameters` keeps them for one backward.
"""

import functools
import gc
import itertools
from collections.abc import Iterable
from typing import Any, final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hoglib._core.messages.closures import STATE, ClosureWalker, owner_of
from hoglib._core.messages.communication import mesh_of, timeout, together
from hoglib._core.runtime.source_location import warn_once
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree, torch_internals, torch_sharding
from hoglib.curvature.batches.data import world_size
from hoglib.errors import DistributedError

# all living DDP modules, by order of creation
_WRAPPERS: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()
_CREATION_ORDER = itertools.count()


# a DDP module, and the parameters of a critic that it averages, by name
DDPParameters = tuple[DistributedDataParallel, dict[str, Tensor]]


def average_gradients(name: str, penalty: Tensor, outputs: object = ()) -> Tensor:
    """The penalty, with a backward that gives the mean gradient over the processes or raises.

    outputs: everything that the critic returned, with its graph, which may reach further parameters.
    Without torch.distributed, or without a DDP module around the parameters, the penalty is returned
    unchanged. Backward raises DistributedError in all processes.
    """
    if world_size() == 1 or not penalty.requires_grad:
        return penalty
    if torch_internals.transforms_active() or torch_internals.tracing():
        return penalty
    seen = [y for y in pytree.tensors(outputs) if y.requires_grad]
    groups = _ddp_groups(graph_summary([penalty, *seen]).leaves)
    return _AverageGradients.apply(penalty, name, groups, *seen) if groups else penalty


class _AverageGradients(Function):
    """The identity; its backward also reaches the outputs, and compares gradients at the end."""

    @staticmethod
    def forward(ctx: Any, penalty: Tensor, name: str, groups: Any, *outputs: Tensor) -> Any:
        ctx.name, ctx.groups, ctx.outputs = name, groups, len(outputs)
        return penalty.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for ddp, params in ctx.groups:
            _compare_after(ctx.name, ddp, params)
        # None, not zeros: 0 * inf is NaN, and with find_unused_parameters=True .grad stays unchanged
        return grads[0], None, None, *(None,) * ctx.outputs


def _compare_after(name: str, ddp: DistributedDataParallel, params: dict[str, Tensor]) -> None:
    """Compare the gradients at the end of the running backward, if it accumulates any.

    Compare again if another backward adds to these gradients before an optimizer step: DDP does not
    average the gradient of a loss that was computed before the penalty's backward.
    """
    before = {key: _grad_version(p) for key, p in params.items()}

    def compare() -> None:
        changed = [p for key, p in params.items() if _grad_version(p) != before[key]]
        # torch.autograd.grad accumulates nothing, and one process may call it alone: an all-reduce
        # would wait forever
        if not changed or not ddp.require_backward_grad_sync:
            return
        # join() and communication hooks may average later, or in another way
        if torch_sharding.averages_otherwise(ddp):
            return
        _raise_if_different(name, ddp, params)
        # a hook on one parameter (the smallest) suffices to notice a further backward
        param = min(changed, key=Tensor.numel)
        grad, version = param.grad, param._version

        def added(p: Tensor) -> None:
            handle.remove()
            if p.grad is grad and p._version == version:
                _compare_after(name, ddp, params)

        handle = param.register_post_accumulate_grad_hook(added)

    torch_internals.after_backward(compare)


def _raise_if_different(name: str, ddp: DistributedDataParallel, params: dict[str, Tensor]) -> None:
    """Raise if a gradient's norm differs between processes; gradients of equal norm count as equal."""
    norms = torch.stack([_norm(p) for p in params.values()]).double().nan_to_num(nan=torch.inf)
    # min(x) = -max(-x): one all-reduce gives both extremes
    extremes = torch.cat([norms, -norms])
    with together(name):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=ddp.process_group)
    most, least = extremes[: len(params)], -extremes[len(params) :]
    coarse = any(p.dtype not in (torch.float64, torch.complex128) for p in params.values())
    rounding = 64 * torch.finfo(torch.float32 if coarse else torch.float64).eps
    different = (most > least * (1 + rounding)).tolist()
    names = [name for name, differs in zip(params, different, strict=True) if differs]
    if names:
        raise DistributedError(
            f"{name}: expected gradients that are the same in all "
            f"{dist.get_world_size(ddp.process_group)} processes at the end of backward, got different "
            f"ones of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, which "
            f"DistributedDataParallel has not averaged. {_advise(ddp, params)}"
        )


def _advise(ddp: DistributedDataParallel, params: dict[str, Tensor]) -> str:
    """What to do about gradients that DDP did not average, by its settings."""
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
    dtype = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(values, dtype=dtype).double()


def _grad_version(param: Tensor) -> tuple[int, int]:
    """A key of .grad that changes when a backward writes it: its id and version counter."""
    return (id(param.grad), -1 if param.grad is None else param.grad._version)


def _ddp_groups(params: Iterable[int]) -> list[DDPParameters]:
    """The DDP modules around the parameters (ids); of several around one parameter the newest."""
    wanted, groups = set(params), []
    _find_and_watch()
    for ddp in reversed(list(_WRAPPERS.values())):
        named = ddp.module.named_parameters()
        own = {n: p for n, p in named if id(p) in wanted and n not in ddp.parameters_to_ignore}
        wanted -= {id(p) for p in own.values()}
        if own:
            groups.append((ddp, own))
    return groups


@functools.cache
def _find_and_watch() -> None:
    """Register all DDP modules, oldest first.

    A module does not know its wrapper. DDP modules from before the first call are found among the
    objects of the garbage collector (60 to 200 ms, once); later ones by torch's hook on registrations
    of submodules.
    """
    for found in gc.get_objects():
        # not isinstance, which reads __class__ of proxies
        if issubclass(type(found), DistributedDataParallel):
            _register_hooks(found)
    register_module_module_registration_hook(_register_hooks)


def _register_hooks(module: nn.Module, *_: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        _WRAPPERS[next(_CREATION_ORDER)] = module


# Agreement of processes on schedules and numbers of samples

_ON_CPU: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # default group -> its gloo group


def check_schedule(calls: int, every: int, critic: Any) -> None:
    """Raise in all processes that share a critic if their numbers of calls, or `every`, differ."""
    if world_size() == 1 or not is_shared(critic):
        return
    different = _extremes("GradientPenalty", [calls, every])
    for what, (least, most), mine in zip(
        ("calls", "every="), different, (calls, every), strict=True
    ):
        if least != most:
            raise DistributedError(
                f"GradientPenalty(every={every}): expected the same {what} in all {world_size()} "
                f"processes, which run the critic together, got {least} to {most}, here {mine}: call "
                "it at the same steps in all, and load its state_dict(), which counts calls, in all."
            )


def warn_of_uneven_samples(name: str, modules: Iterable[nn.Module], count: int) -> None:
    """Warn if processes that share parameters have different numbers of samples."""
    if world_size() > 1 and any(map(_spans_all, modules)):
        ((least, most),) = _extremes(name, [count])
        if least != most:
            warn_once(
                f"{name}: expected as many samples in each of {world_size()} processes, got {least} to "
                f"{most}: fully_shard averages the gradients of their means, where a sample of a small "
                "batch counts more. Give batches of equal size, or multiply the penalty by the samples "
                "here, times the processes, over the samples of all."
            )


def is_shared(critic: Any) -> bool:
    """Whether all processes share the parameters of a critic, or average their gradients."""
    owner = owner_of(critic)
    found = [owner] if isinstance(owner, nn.Module) else ClosureWalker(critic, STATE).objects
    modules = [x for x in found if isinstance(x, nn.Module)]
    if any(map(_spans_all, modules)):
        return True
    groups = _ddp_groups(id(p) for module in modules for p in module.parameters())
    return any(dist.get_world_size(ddp.process_group) == world_size() for ddp, _ in groups)


def _spans_all(module: nn.Module) -> bool:
    mesh = mesh_of(module.parameters())
    return mesh is not None and mesh.size() == world_size()


def _extremes(name: str, numbers: list[int]) -> list[tuple[int, int]]:
    """The least and the largest of each number over all processes."""
    with together(name):
        default = dist.group.WORLD
        if default not in _ON_CPU:
            _ON_CPU[default] = dist.new_group(backend="gloo", timeout=timeout())
        both = torch.tensor([numbers, [-x for x in numbers]], device="cpu")
        dist.all_reduce(both, dist.ReduceOp.MAX, group=_ON_CPU[default])
    return [(-least, most) for most, least in both.T.tolist()]


# FSDP2

_HELD: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # FSDP2 module -> number of penalties


@final
class GatheredParameters:
    """Keeps the parameters of FSDP2 modules gathered until a backward, or until it is deleted.

    Args:
        modules: The modules that ran in a forward; modules without FSDP2 are ignored.
    Attributes:
        sharded: Whether one of the modules has FSDP2.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: list[Any] = []
        self.sharded = False
        if torch_sharding.has_fsdp():
            found = [m for m in modules if torch_sharding.fsdp_state(m) is not None]
            self.sharded = bool(found)
            reshards = torch_sharding.reshards_after_backward
            self._modules = [m for m in found if reshards(m) or m in _HELD]
        for module in self._modules:
            _HELD[module] = _HELD.get(module, 0) + 1
            module.set_reshard_after_backward(False, recurse=False)

    def until_backward_of(self, tensors: Iterable[Tensor | None]) -> None:
        """Release the parameters at the end of the backward that reaches one of the tensors."""
        for tensor in tensors if self._modules else ():
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda _: torch_internals.after_backward(self.release))

    def release(self) -> None:
        """Free the gathered parameters, as FSDP2 does after a backward."""
        modules, self._modules = self._modules, []
        for module in modules:
            _HELD[module] -= 1
            if not _HELD[module]:
                del _HELD[module]
                module.set_reshard_after_backward(True, recurse=False)
                module.reshard()

    def __del__(self) -> None:
        self.release()
