"""What torch lacks or has wrong at second order: data, with the torch versions and the upstream issues.

`tests/test_stand_ins.py` shows for each row that the installed torch still needs it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hoglib._functorch import own_kernels
from hoglib.ops import (
    _batch_norm,
    _cholesky_inverse,
    _ctc_loss,
    _distance,
    _embedding_bag,
    _glu,
    _grid_sample,
    _hardsigmoid,
    _instance_norm,
    _layer_norm,
    _linalg_det,
    _linalg_solve,
    _linear_cross_entropy,
    _margin,
    _regression,
    _scatter_reduce,
    _segment_reduce,
    _soft_margin,
    _sparse,
    _weight_norm,
)
from hoglib.ops._attention import scaled_dot_product_attention
from hoglib.ops._halves import autocast_on

Version = tuple[int, int]


def version_of(text: str) -> Version:
    major, minor, *_ = text.split("+")[0].split(".")
    return int(major), int(minor)


INSTALLED = version_of(torch.__version__)


class Need(NamedTuple):
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
    with own_kernels():
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
        with own_kernels():
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

NEEDS: tuple[Need, ...] = (
    Need(
        "scaled_dot_product_attention", f"{NO_TWICE}: its fused kernels", EVERY,
        {F.scaled_dot_product_attention: scaled_dot_product_attention}, issue="116350",
    ),
    Need("cdist, pdist, pairwise_distance", NO_TWICE, EVERY, _distance.REPLACES, issue="83510"),
    Need("embedding_bag", NO_TWICE, EVERY, _embedding_bag.REPLACES),
    Need("ctc_loss", NO_TWICE, EVERY, _ctc_loss.REPLACES, issue="70108"),
    Need("segment_reduce", NO_TWICE, EVERY, _segment_reduce.REPLACES),
    Need("multi_margin_loss", NO_TWICE, EVERY, _margin.REPLACES),
    Need("hardsigmoid", NO_TWICE, ("rr", "fr", "ff"), _hardsigmoid.REPLACES),
    Need(
        "linear_cross_entropy", f"chunked, a wrong double backward{SILENT}", ("rr",),
        _linear_cross_entropy.REPLACES, since=(2, 13),
    ),
    Need("weight_norm", f"a wrong double backward{SILENT}", ("rr",), _weight_norm.REPLACES),
    Need("layer_norm", THIRD, OVER, _layer_norm.REPLACES, issue="196700"),
    Need("batch_norm", THIRD, OVER, _batch_norm.REPLACES, issue="196699"),
    Need("instance_norm", THIRD, OVER, _instance_norm.REPLACES, issue="196699"),
    Need("linalg.solve", OVER_FORWARD, OVER, _linalg_solve.REPLACES, issue=UMBRELLA),
    Need("det, slogdet, logdet", DET, OVER, _linalg_det.REPLACES, issue=UMBRELLA),
    Need(
        "cholesky_inverse", f"a wrong forward mode{SILENT}", ("fr", "ff"),
        _cholesky_inverse.REPLACES, issue=UMBRELLA,
    ),
    Need(
        "mse_loss, huber_loss", "forward mode raises over a backward", ("fr",), _regression.REPLACES,
        issue="123996",
    ),
    Need("soft_margin_loss", NO_FORWARD, ("fr",), _soft_margin.REPLACES),
    Need(
        "sparse_coo_tensor", "its values get no second derivative", ("rr", "fr"),
        refuses=(torch.sparse_coo_tensor, torch.sparse_csr_tensor),
        instead="Build it of values that need no gradient, or multiply by index_select and index_add.",
    ),
    Need(
        "triangular_solve", f"a wrong forward mode{SILENT}", ("fr", "ff"),
        {
            torch.triangular_solve: _linalg_solve.triangular_solve,
            torch.Tensor.triangular_solve: _linalg_solve.triangular_solve,
        },
        issue=UMBRELLA,
    ),
    Need("glu", "no derivative of its tangent", OVER, _glu.REPLACES),
    Need("grid_sample", NO_FORWARD, ("fr", "rf", "ff"), _grid_sample.REPLACES, issue="117582"),
    Need(
        "scatter_reduce, index_reduce", f"products with a wrong forward mode{SILENT}, or none",
        ("fr", "rf", "ff"), _scatter_reduce.REPLACES,
    ),
    Need("sparse.mm", NO_FORWARD, ("fr", "rf", "ff"), _sparse.REPLACES),
    Need("lstm", VENDOR, ("fr",), {torch.lstm: lstm}),
    *(
        Need(
            name, "cuDNN's has no double backward, torch's own has", ("rr",),
            {getattr(torch, name): natively(getattr(torch, name))}, device="cuda",
        )
        for name in ("gru", "rnn_tanh", "rnn_relu")
    ),
)  # fmt: skip
