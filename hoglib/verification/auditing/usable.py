"""What can be audited: the loss, the parameters and the batch, and what to do about the rest."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._functorch import transforms_active
from hoglib.verification._module_names import Names

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def check(loss: Any, params: Any, batch: Any) -> None:
    """Raises TypeError or ValueError for what is no loss, no parameters, or no batch."""
    if isinstance(loss, nn.Module):
        raise arguments.WrongType(
            "loss: expected a function (params, batch) -> scalar, got the module "
            f"{type(loss).__name__}; make one: `hoglib.functional_loss(model, criterion)`."
        )
    arguments.function("loss", loss)
    if not isinstance(params, dict | list | tuple | Tensor):
        raise arguments.WrongType(
            f"params: expected a dict of tensors by qualified name, or another pytree, got "
            f"{arguments.describe(params)}; make one with `hoglib.trainable_params(model)`."
        )
    arguments.parameters(params)
    if isinstance(batch, DataLoader):
        raise arguments.WrongType(
            "batch: expected one batch, got a DataLoader; take one: `next(iter(loader))`."
        )
    if transforms_active():
        raise arguments.NotSupported(
            "audit: expected to be called outside of torch.func transforms, got called inside of one; "
            "audit the function that is transformed before."
        )
    for path, x in zip(_tree.paths(params), _tree.leaves(params), strict=True):
        what = f"params[{path!r}]" if path else "params"
        if is_lazy(x):
            raise arguments.WrongValue(
                f"{what}: expected a tensor with values, got one of a lazy module that has not run; "
                "call the model on a batch once."
            )
        if x.is_nested or x.layout is not torch.strided or x.is_meta or x.dtype not in DTYPES:
            kind = "a nested tensor" if x.is_nested else arguments.describe(x)
            more = "" if x.is_nested else f" ({x.layout}, on {x.device})"
            raise arguments.WrongType(
                f"{what}: expected a dense tensor with values, of "
                f"{', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {kind}{more}; "
                "convert it, and let the loss convert it back."
            )
    for x in _tree.leaves(batch):
        if isinstance(x, Iterator):
            raise arguments.WrongType(
                f"batch: expected one that the loss can be run on many times, got "
                f"{arguments.describe(x)}, which is empty after the first; pass list(...) of it."
            )


def check_modules(names: Names) -> None:
    """Raises ValueError for a module that has no values yet."""
    for module in names.modules():
        places = (*module._parameters.values(), *module._buffers.values())
        if any(x is not None and is_lazy(x) for x in places):
            raise arguments.WrongValue(
                f"loss: expected modules with values, got {names.called(module)}, which is "
                "lazy and has not run; call the model on a batch once."
            )
