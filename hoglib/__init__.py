"""hoglib: second-order training for PyTorch that one can trust."""

# isort: off
from hoglib._core.torch_api import torch_version as _torch_version  # noqa: F401 (refuses an old one)

# isort: on
from hoglib import capture, curvature, errors, meta, nn, ops, penalties, testing
from hoglib._core.messages.validation import did_you_mean as _did_you_mean
from hoglib._core.messages.validation import package as _package
from hoglib._core.problem import Options
from hoglib._version import __version__
from hoglib.auditing import audit
from hoglib.capture import compile, compiled_loss
from hoglib.curvature import (
    FisherOperator,
    GGNOperator,
    HessianOperator,
    JacobianOperator,
    KFACOperator,
    bilaplacian,
    critical_sharpness,
    directional,
    fisher_vp,
    ggn,
    ggn_vp,
    gradient_store,
    hessian,
    hvp,
    influence,
    jvp,
    laplacian,
    partial_derivative,
    per_example_gradients,
    sparse_hessian,
    sparse_jacobian,
)
from hoglib.drawing import Graph, graph
from hoglib.functional import functional_loss, trainable_params
from hoglib.language_models import language_model_loss
from hoglib.meta import MAML
from hoglib.penalties import GradientPenalty
from hoglib.stand_ins import second_order
from hoglib.taylor import jet
from hoglib.verification import Report, VerificationError, verify

_OF_LIGHTNING = (
    "CurvatureMonitor", "EvalGradients", "Measurement", "MetaAnnealing", "RNGState", "SecondOrderAudit",
    "second_order_problems",
)  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports hoglib.lightning, which needs Lightning, at its first use; for other names raises an
    error that says which package has them."""
    if name == "lightning":
        from importlib import import_module

        _package("lightning", "hoglib.lightning", "`pip install lightning`")
        return import_module("hoglib.lightning")
    places = [part for part in (penalties, meta, curvature, ops, nn) if name in part.__all__]
    place = places[0].__name__ if places else "hoglib.lightning" if name in _OF_LIGHTNING else ""
    where = f"; it is `{place}.{name}`" if place else _did_you_mean(name, __all__).rstrip(".")
    raise AttributeError(f"module 'hoglib' has no attribute {name!r}{where}", name=name)


__all__ = [
    "MAML",
    "FisherOperator",
    "GGNOperator",
    "GradientPenalty",
    "Graph",
    "HessianOperator",
    "JacobianOperator",
    "KFACOperator",
    "Options",
    "Report",
    "VerificationError",
    "__version__",
    "audit",
    "bilaplacian",
    "capture",
    "compile",
    "compiled_loss",
    "critical_sharpness",
    "curvature",
    "directional",
    "errors",
    "fisher_vp",
    "functional_loss",
    "ggn",
    "ggn_vp",
    "gradient_store",
    "graph",
    "hessian",
    "hvp",
    "influence",
    "jet",
    "jvp",
    "language_model_loss",
    "laplacian",
    "meta",
    "nn",
    "ops",
    "partial_derivative",
    "penalties",
    "per_example_gradients",
    "second_order",
    "sparse_hessian",
    "sparse_jacobian",
    "testing",
    "trainable_params",
    "verify",
]
