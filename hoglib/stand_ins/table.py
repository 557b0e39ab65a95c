"""All stand-ins: those that the ops of hoglib register, and torch's own calls in another form.

A test shows for each row that the installed torch still needs it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib._core.mixed_precision import autocast_on
from hoglib._core.torch_internals import forward_mode_active, native_kernels
from hoglib.ops import _special_points  # noqa: F401 registers its functions
from hoglib.ops._stand_in import IN_FORWARD, TABLE, StandIn, stands_in_for


@stands_in_for(
    torch.group_norm,
    lacks="channels-last, its forward mode raises",
    modes=IN_FORWARD,
)
def group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.group_norm of an input whose layout its forward mode can view as groups."""
    return torch.group_norm(input.contiguous() if forward_mode_active() else input, *args, **kwargs)


@stands_in_for(
    torch.lstm,
    lacks="cuDNN's has no double backward, oneDNN's (float32) no forward mode; torch's own has both",
    modes=("fr",),
)
def lstm(*args: Any, **kwargs: Any) -> Any:
    """torch.lstm by torch's own kernels, in the dtype of autocast."""
    with native_kernels():
        outputs = torch.lstm(*args, **kwargs)
    device = outputs[0].device.type
    if not autocast_on(device):
        return outputs
    dtype = torch.get_autocast_dtype(device)
    return tuple(y if y.dtype == torch.float64 else y.to(dtype) for y in outputs)


def with_native_kernels(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run by torch's own kernels instead of those of oneDNN and cuDNN."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with native_kernels():
            return function(*args, **kwargs)

    return run


for _layer in (torch.gru, torch.rnn_tanh, torch.rnn_relu):
    stands_in_for(
        _layer,
        lacks="cuDNN's kernel has no double backward, torch's own has one",
        modes=("rr",),
        device="cuda",
    )(with_native_kernels(_layer))

STAND_INS = (
    *TABLE.values(),
    StandIn(
        "sparse_coo_tensor",
        "its values get no second derivative",
        ("rr", "fr"),
        refuses=(torch.sparse_coo_tensor, torch.sparse_csr_tensor),
        instead="Build it from values that do not require grad, or multiply by index_select and "
        "index_add.",
    ),
)
