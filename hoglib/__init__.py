"""hoglib: second-order training for PyTorch that one can trust."""

from hoglib import curvature, meta, nn, ops, penalties, testing
from hoglib._functional import functional_loss, trainable_params
from hoglib._version import __version__
from hoglib.curvature import (
    FisherOperator,
    GGNOperator,
    HessianOperator,
    fisher_vp,
    ggn,
    ggn_vp,
    hessian,
    hvp,
    laplacian,
)
from hoglib.meta import MAML
from hoglib.penalties import GradientPenalty
from hoglib.stand_ins import second_order
from hoglib.verification import Report, VerificationError, audit, verify

__all__ = [
    "MAML",
    "FisherOperator",
    "GGNOperator",
    "GradientPenalty",
    "HessianOperator",
    "Report",
    "VerificationError",
    "__version__",
    "audit",
    "curvature",
    "fisher_vp",
    "functional_loss",
    "ggn",
    "ggn_vp",
    "hessian",
    "hvp",
    "laplacian",
    "meta",
    "nn",
    "ops",
    "penalties",
    "second_order",
    "testing",
    "trainable_params",
    "verify",
]
