"""What torch lacks or has wrong at second order: data, with the torch versions and the upstream issues.

`tests/test_stand_ins.py` shows for each row that the installed torch still needs it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hoglib._functorch import own_kernels
from hoglib.ops import _batch_norm, _instance_norm, _layer_norm, _weight_norm
from hoglib.ops._attention import scaled_dot_product_attention

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

    @property
    def applies(self) -> bool:
        return self.since <= INSTALLED and (self.until is None or self.until >= INSTALLED)


def natively(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same by torch's own kernels, without those of oneDNN and cuDNN."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with own_kernels():
            return function(*args, **kwargs)

    return run


CONSTANT = (
    "mean and variance are constants to its forward mode, and third derivatives are wrong; without an "
    "error"
)
TRANSFORM = "; torch.func.hessian too"
FUSED = "its fused kernels have no double backward and no forward mode"
VENDOR = "cuDNN's has no double backward, oneDNN's (float32) no forward mode; torch's own has both"

NEEDS: tuple[Need, ...] = (
    Need(
        "scaled_dot_product_attention", FUSED, ("rr", "fr"),
        {F.scaled_dot_product_attention: scaled_dot_product_attention},
    ),
    Need("layer_norm", CONSTANT + TRANSFORM, ("rf", "ff"), _layer_norm.REPLACES),
    Need("batch_norm", CONSTANT, ("rf", "ff"), _batch_norm.REPLACES),
    Need("instance_norm", CONSTANT, ("rf", "ff"), _instance_norm.REPLACES),
    Need("weight_norm", "the double backward of its kernel is wrong", ("rr",), _weight_norm.REPLACES),
    *(
        Need(name, VENDOR, ("fr",), {getattr(torch, name): natively(getattr(torch, name))})
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    ),
)  # fmt: skip
