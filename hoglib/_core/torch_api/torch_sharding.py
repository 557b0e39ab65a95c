"""Modules with parameters or data that processes share: fully_shard and parallelize_module work by
hooks of forward, DistributedDataParallel by hooks of gradients.

Private torch API, as `torch_internals`.
"""

import sys
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_private import refuse


def averages_otherwise(ddp: DistributedDataParallel) -> bool:
    """Whether a communication hook of the user, or `join()`, averages the gradients of a DDP module."""
    hooked = bool(ddp._comm_hooks) and ddp.mixed_precision is None  # mixed precision adds a hook
    return hooked or bool(ddp._join_config.enable)


# modules of torch that define sharding hooks of forward
_SHARDING_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.tensor.")


def has_fsdp() -> bool:
    """Whether a module in this process may be wrapped by FSDP."""
    return "torch.distributed.fsdp" in sys.modules


def fsdp_state(module: nn.Module) -> Any:
    """fully_shard's (FSDP2) state of a module; None if fully_shard was not called on the module."""
    library: Any = sys.modules.get("torch.distributed.fsdp")  # None if nothing has imported it
    if library is None or not isinstance(module, library.FSDPModule):
        return None
    return module._get_fsdp_state()


def fsdp_groups(module: nn.Module) -> list[Any]:
    """The groups of parameters that fully_shard gathers for a module."""
    state = fsdp_state(module)
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None and not hasattr(state, "_fsdp_param_group"):
        refuse("FSDPState._fsdp_param_groups")
    if groups is None:  # torch 2.11
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reshards_after_backward(module: nn.Module) -> bool:
    """Whether fully_shard frees a module's gathered parameters after each backward."""
    return any(group.reshard_after_backward for group in fsdp_groups(module))


def computed_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """id of a parameter -> the dtype of fully_shard's mixed precision for it."""
    shards = [p for group in fsdp_groups(module) for p in group.fsdp_params]
    dtypes = {id(p.sharded_param): p.mp_policy.param_dtype for p in shards}
    return {i: dtype for i, dtype in dtypes.items() if dtype is not None}


def wrapped_attributes(module: nn.Module, mixed_precision: bool) -> dict[str, Any]:
    """Attributes for a wrapped module that make it compute with its present parameters, without
    sharding.

    Otherwise fully_shard's hooks gather parameters, and parallelize_module's convert inputs to
    DTensors.
    mixed_precision: Cast inputs and outputs as fully_shard's policy says.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks
    if not any(map(_is_sharding, (*before.values(), *after.values()))):
        return {}
    found: dict[str, OrderedDict[int, Any]] = {
        name: OrderedDict((key, hook) for key, hook in hooks.items() if not _is_sharding(hook))
        for name, hooks in (("_forward_pre_hooks", before), ("_forward_hooks", after))
    }
    state = fsdp_state(module)
    policy = None if state is None else state._mp_policy
    if policy is not None and mixed_precision:
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            found["_forward_pre_hooks"][-1] = partial(_cast_inputs, policy.param_dtype)
            found["_forward_pre_hooks"].move_to_end(-1, last=False)  # cast before other hooks run
            with_kwargs = module._forward_pre_hooks_with_kwargs
            found["_forward_pre_hooks_with_kwargs"] = OrderedDict({-1: True, **with_kwargs})
        if policy.output_dtype is not None:
            found["_forward_hooks"][-1] = partial(_cast_output, policy.output_dtype)
    return found


def _is_sharding(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_SHARDING_HOOKS)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast_floats(args, dtype), _cast_floats(kwargs, dtype)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast_floats(output, dtype)


def _cast_floats(tree: Tree, dtype: torch.dtype) -> Any:
    return pytree.map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
