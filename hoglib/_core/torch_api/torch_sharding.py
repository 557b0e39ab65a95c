"""What shares the parameters or the data of a module among processes: fully_shard and
parallelize_module by hooks of its forward, DistributedDataParallel by hooks of its gradients.

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
    """Whether its gradients are averaged by a communication hook of the user, or in `join()`."""
    hooked = bool(ddp._comm_hooks) and ddp.mixed_precision is None  # mixed precision uses a hook
    return hooked or bool(ddp._join_config.enable)


# the modules that define the hooks of a forward
_SHARDING_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.tensor.")


def has_fsdp() -> bool:
    """Whether anything can have been wrapped by FSDP in this process."""
    return "torch.distributed.fsdp" in sys.modules


def fsdp_state(module: nn.Module) -> Any:
    """That of fully_shard (FSDP2); None for a module that it was not called on."""
    library: Any = sys.modules.get("torch.distributed.fsdp")  # None where nothing imported it
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
    """Whether fully_shard frees the gathered parameters of a module after each backward."""
    return any(group.reshard_after_backward for group in fsdp_groups(module))


def computed_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """The dtypes in which fully_shard's mixed precision computes with parameters, by their ids."""
    shards = [p for group in fsdp_groups(module) for p in group.fsdp_params]
    dtypes = {id(p.sharded_param): p.mp_policy.param_dtype for p in shards}
    return {i: dtype for i, dtype in dtypes.items() if dtype is not None}


def wrapped_attributes(module: nn.Module, mixed_precision: bool) -> dict[str, Any]:
    """The attributes with which a wrapped module computes with the parameters that are in it, alone.

    fully_shard gathers parameters in hooks, and parallelize_module makes DTensors of inputs.
    mixed_precision: whether inputs and outputs are converted as the policy of fully_shard says.
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
            found["_forward_pre_hooks"].move_to_end(-1, last=False)
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
