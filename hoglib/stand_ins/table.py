"""The torch operations whose second derivative is missing or wrong, and what runs in their place.

Each row names the operation, what is missing or wrong, in which modes of differentiation, the torch
versions and the upstream issue. A test shows for each row that the installed torch still needs it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core.mixed_precision import autocast_on
from hoglib._core.torch_internals import forward_mode_active
from hoglib._core.torch_kernels import native_kernels
from hoglib._core.torch_version import TORCH_VERSION, Version
from hoglib.ops import replacements


class StandIn(NamedTuple):
    """A torch operation whose second derivative is missing or wrong, and its replacement.

    Attributes:
        name: The operation, or several of one kind.
        lacks: What is missing or wrong in torch.
        modes: The modes of differentiation in which it is: of "rr" (reverse over reverse), "fr"
            (forward over reverse), "rf" and "ff".
        replaces: From torch callables to the functions that run in their place.
        refuses: Torch callables without a replacement: a call that needs a gradient raises.
        instead: For those, what to write instead.
        issue: The number of the issue of pytorch/pytorch.
        since: The first torch version it was measured on.
        until: The last torch version that needs the replacement; None if the newest one does.
        device: The type of device on which the derivative is missing or wrong.
    """

    name: str
    lacks: str
    modes: tuple[str, ...]
    replaces: Mapping[Any, Callable[..., Any]] = {}
    refuses: tuple[Any, ...] = ()
    instead: str = ""
    issue: str = ""
    since: Version = (2, 11)
    until: Version | None = None
    device: str = "cpu"

    @property
    def applies(self) -> bool:
        """Whether the installed torch needs it."""
        return self.since <= TORCH_VERSION and (self.until is None or self.until >= TORCH_VERSION)


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


def group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.group_norm of an input whose layout its forward mode can view as groups."""
    return torch.group_norm(input.contiguous() if forward_mode_active() else input, *args, **kwargs)


NO_DOUBLE_BACKWARD = "no double backward, no forward mode"
NO_FORWARD = "no forward mode"
SILENT = ", without an error"
OVER_FORWARD = f"derivatives of its forward mode are wrong{SILENT}"
DET = f"{OVER_FORWARD}; near a singular matrix det is wrong in reverse over reverse too"
THIRD = f"{OVER_FORWARD}; so are third derivatives"
EVERY, OVER = ("rr", "fr", "rf", "ff"), ("rf", "ff")
VENDOR = "cuDNN's has no double backward, oneDNN's (float32) no forward mode; torch's own has both"
UMBRELLA = "198017"

STAND_INS: tuple[StandIn, ...] = (
    StandIn(
        "scaled_dot_product_attention", f"{NO_DOUBLE_BACKWARD}: its fused kernels", EVERY,
        replacements.ATTENTION, issue="116350",
    ),
    StandIn(
        "cdist, pdist, pairwise_distance", NO_DOUBLE_BACKWARD, EVERY, replacements.DISTANCE,
        issue="83510",
    ),
    StandIn("embedding_bag", NO_DOUBLE_BACKWARD, EVERY, replacements.EMBEDDING_BAG),
    StandIn("ctc_loss", NO_DOUBLE_BACKWARD, EVERY, replacements.CTC_LOSS, issue="70108"),
    StandIn("segment_reduce", NO_DOUBLE_BACKWARD, EVERY, replacements.SEGMENT_REDUCE),
    StandIn("multi_margin_loss", NO_DOUBLE_BACKWARD, EVERY, replacements.MARGIN_LOSS),
    StandIn("hardsigmoid", NO_DOUBLE_BACKWARD, ("rr", "fr", "ff"), replacements.HARDSIGMOID),
    StandIn(
        "linear_cross_entropy", f"chunked, a wrong double backward{SILENT}", ("rr",),
        replacements.LINEAR_CROSS_ENTROPY, since=(2, 13),
    ),
    StandIn("weight_norm", f"a wrong double backward{SILENT}", ("rr",), replacements.WEIGHT_NORM),
    StandIn("layer_norm", THIRD, OVER, replacements.LAYER_NORM, issue="196700"),
    StandIn("batch_norm", THIRD, OVER, replacements.BATCH_NORM, issue="196699"),
    StandIn("instance_norm", THIRD, OVER, replacements.INSTANCE_NORM, issue="196699"),
    StandIn(
        "group_norm", "channels-last, its forward mode raises", ("fr", "rf", "ff"),
        {torch.group_norm: group_norm},
    ),
    StandIn("linalg.solve", OVER_FORWARD, OVER, replacements.SOLVE, issue=UMBRELLA),
    StandIn("det, slogdet, logdet", DET, OVER, replacements.DETERMINANT, issue=UMBRELLA),
    StandIn(
        "cholesky_inverse", f"a wrong forward mode{SILENT}", ("fr", "ff"),
        replacements.CHOLESKY_INVERSE, issue=UMBRELLA,
    ),
    StandIn(
        "mse_loss, huber_loss", "forward mode over a backward raises", ("fr",),
        replacements.REGRESSION_LOSS, issue="123996",
    ),
    StandIn("soft_margin_loss", NO_FORWARD, ("fr",), replacements.SOFT_MARGIN_LOSS),
    StandIn(
        "sparse_coo_tensor", "its values get no second derivative", ("rr", "fr"),
        refuses=(torch.sparse_coo_tensor, torch.sparse_csr_tensor),
        instead="Build it from values that do not require grad, or multiply by index_select and "
        "index_add.",
    ),
    StandIn(
        "triangular_solve", f"a wrong forward mode{SILENT}", ("fr", "ff"),
        replacements.TRIANGULAR_SOLVE, issue=UMBRELLA,
    ),
    StandIn("glu", "its tangent has no derivative", OVER, replacements.GLU),
    StandIn("grid_sample", NO_FORWARD, ("fr", "rf", "ff"), replacements.GRID_SAMPLE, issue="117582"),
    StandIn(
        "scatter_reduce, index_reduce", f"for products a wrong forward mode{SILENT}, or none",
        ("fr", "rf", "ff"), replacements.SCATTER_REDUCE,
    ),
    StandIn("sparse.mm", NO_FORWARD, ("fr", "rf", "ff"), replacements.SPARSE_MM),
    StandIn("lstm", VENDOR, ("fr",), {torch.lstm: lstm}),
    *(
        StandIn(
            name, "cuDNN's kernel has no double backward, torch's own has one", ("rr",),
            {getattr(torch, name): with_native_kernels(getattr(torch, name))}, device="cuda",
        )
        for name in ("gru", "rnn_tanh", "rnn_relu")
    ),
)  # fmt: skip
