"""What torch lacks or has wrong at second order: data, with the torch versions and the upstream issues.

`tests/stand_ins/test_table.py` shows for each row that the installed torch still needs it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from hoglib._core.mixed_precision import autocast_on
from hoglib._core.torch_internals import native_kernels
from hoglib.ops import replacements

Version = tuple[int, int]


def version_of(text: str) -> Version:
    major, minor, *_ = text.split("+")[0].split(".")
    return int(major), int(minor)


INSTALLED = version_of(torch.__version__)


class StandIn(NamedTuple):
    """One operation."""

    name: str
    lacks: str  # what torch lacks, or has wrong
    modes: tuple[str, ...]  # in which, of "rr", "fr", "rf", "ff"
    replaces: Mapping[Any, Callable[..., Any]] = {}  # torch callable -> its stand-in
    refuses: tuple[Any, ...] = ()  # torch callables without one
    instead: str = ""  # the nearest workaround for those
    issue: str = ""  # of pytorch/pytorch
    since: Version = (2, 11)  # the first torch version it was measured on
    until: Version | None = None  # the last one that needs it
    device: str = "cpu"  # where it shows

    @property
    def applies(self) -> bool:
        return self.since <= INSTALLED and (self.until is None or self.until >= INSTALLED)


def lstm(*args: Any, **kwargs: Any) -> Any:
    """torch.lstm by torch's own kernels, in the dtype that autocast gives it."""
    with native_kernels():
        found = torch.lstm(*args, **kwargs)
    device = found[0].device.type
    if not autocast_on(device):
        return found
    dtype = torch.get_autocast_dtype(device)
    return tuple(y if y.dtype == torch.float64 else y.to(dtype) for y in found)


def natively(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same by torch's own kernels, without those of oneDNN and cuDNN."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with native_kernels():
            return function(*args, **kwargs)

    return run


NO_TWICE = "no double backward, no forward mode"
NO_FORWARD = "no forward mode"
SILENT = ", without an error"
OVER_FORWARD = f"derivatives of its forward mode are wrong{SILENT}"
DET = f"{OVER_FORWARD}; det near a singular matrix in reverse too"
THIRD = f"{OVER_FORWARD}; third derivatives too"
EVERY, OVER = ("rr", "fr", "rf", "ff"), ("rf", "ff")
VENDOR = "cuDNN's has no double backward, oneDNN's (float32) no forward mode; torch's own has both"
UMBRELLA = "198017"

STAND_INS: tuple[StandIn, ...] = (
    StandIn(
        "scaled_dot_product_attention", f"{NO_TWICE}: its fused kernels", EVERY,
        replacements.ATTENTION, issue="116350",
    ),
    StandIn("cdist, pdist, pairwise_distance", NO_TWICE, EVERY, replacements.DISTANCE, issue="83510"),
    StandIn("embedding_bag", NO_TWICE, EVERY, replacements.EMBEDDING_BAG),
    StandIn("ctc_loss", NO_TWICE, EVERY, replacements.CTC_LOSS, issue="70108"),
    StandIn("segment_reduce", NO_TWICE, EVERY, replacements.SEGMENT_REDUCE),
    StandIn("multi_margin_loss", NO_TWICE, EVERY, replacements.MARGIN_LOSS),
    StandIn("hardsigmoid", NO_TWICE, ("rr", "fr", "ff"), replacements.HARDSIGMOID),
    StandIn(
        "linear_cross_entropy", f"chunked, a wrong double backward{SILENT}", ("rr",),
        replacements.LINEAR_CROSS_ENTROPY, since=(2, 13),
    ),
    StandIn("weight_norm", f"a wrong double backward{SILENT}", ("rr",), replacements.WEIGHT_NORM),
    StandIn("layer_norm", THIRD, OVER, replacements.LAYER_NORM, issue="196700"),
    StandIn("batch_norm", THIRD, OVER, replacements.BATCH_NORM, issue="196699"),
    StandIn("instance_norm", THIRD, OVER, replacements.INSTANCE_NORM, issue="196699"),
    StandIn("linalg.solve", OVER_FORWARD, OVER, replacements.SOLVE, issue=UMBRELLA),
    StandIn("det, slogdet, logdet", DET, OVER, replacements.DETERMINANT, issue=UMBRELLA),
    StandIn(
        "cholesky_inverse", f"a wrong forward mode{SILENT}", ("fr", "ff"),
        replacements.CHOLESKY_INVERSE, issue=UMBRELLA,
    ),
    StandIn(
        "mse_loss, huber_loss", "forward mode raises over a backward", ("fr",),
        replacements.REGRESSION_LOSS, issue="123996",
    ),
    StandIn("soft_margin_loss", NO_FORWARD, ("fr",), replacements.SOFT_MARGIN_LOSS),
    StandIn(
        "sparse_coo_tensor", "its values get no second derivative", ("rr", "fr"),
        refuses=(torch.sparse_coo_tensor, torch.sparse_csr_tensor),
        instead="Build it of values that need no gradient, or multiply by index_select and index_add.",
    ),
    StandIn(
        "triangular_solve", f"a wrong forward mode{SILENT}", ("fr", "ff"),
        replacements.TRIANGULAR_SOLVE, issue=UMBRELLA,
    ),
    StandIn("glu", "no derivative of its tangent", OVER, replacements.GLU),
    StandIn("grid_sample", NO_FORWARD, ("fr", "rf", "ff"), replacements.GRID_SAMPLE, issue="117582"),
    StandIn(
        "scatter_reduce, index_reduce", f"products with a wrong forward mode{SILENT}, or none",
        ("fr", "rf", "ff"), replacements.SCATTER_REDUCE,
    ),
    StandIn("sparse.mm", NO_FORWARD, ("fr", "rf", "ff"), replacements.SPARSE_MM),
    StandIn("lstm", VENDOR, ("fr",), {torch.lstm: lstm}),
    *(
        StandIn(
            name, "cuDNN's has no double backward, torch's own has", ("rr",),
            {getattr(torch, name): natively(getattr(torch, name))}, device="cuda",
        )
        for name in ("gru", "rnn_tanh", "rnn_relu")
    ),
)  # fmt: skip
