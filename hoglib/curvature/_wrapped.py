"""Modules and parameters that torch.distributed has wrapped, whose second derivatives cannot be had."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hoglib import _arguments as arguments


def refuse_wrapped(model: Any) -> None:
    """Wrappers that wait for gradients of the model's own parameters, or hold a part of each."""
    if not isinstance(model, nn.Module):
        return
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where it was not imported is none
    splitting = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(module, DistributedDataParallel):
            raise arguments.NotSupported(
                f"{where}: expected a module that runs by itself, got DistributedDataParallel, which "
                f"waits for gradients that do not come; pass {where}.module, whose parameters are the "
                "same. The data is shared by `processes=`."
            )
        if isinstance(module, splitting):
            raise arguments.NotSupported(
                f"{where}: expected a module that has its parameters, got {type(module).__name__} of "
                "FSDP, which are gathered for a first derivative only; use the module before it is "
                "wrapped. The data is shared by `processes=`."
            )


def refuse_split(params: Sequence[Tensor]) -> None:
    """Parameters of which a process holds a part only."""
    library: Any = sys.modules.get("torch.distributed.tensor")  # where it was not imported are none
    if library is not None and any(isinstance(p, library.DTensor) for p in params):
        raise arguments.NotSupported(
            "params: expected tensors that each process has all of, got DTensors, which fully_shard "
            "(FSDP2) and tensor parallelism make and which have no second derivatives; use the "
            "parameters before they are split, and `processes=` to share the data."
        )
