"""Curvature of scalar functions of parameters: products with vectors, whole matrices, operators."""

from hoglib.curvature.dataset_sum import DataOptions, OperatorOptions
from hoglib.curvature.example_gradients import (
    NoiseScale,
    gradient_noise_scale,
    influence,
    per_example_gradient_norms,
    per_example_gradient_products,
    per_example_gradients,
)
from hoglib.curvature.jacobian_operator import JacobianOperator
from hoglib.curvature.jacobian_product import jvp
from hoglib.curvature.kfac_operator import KFACError, KFACOperator
from hoglib.curvature.linear_operator import LinearOperator, LowRankOperator, RectangularOperator
from hoglib.curvature.operators import (
    FisherOperator,
    GGNOperator,
    HessianOperator,
    Spectrum,
    hessian_spectrum,
)
from hoglib.curvature.optimizers import KFAC, KFACStep, NewtonCG, NewtonStep
from hoglib.curvature.point_derivatives import (
    bilaplacian,
    directional,
    laplacian,
    partial_derivative,
)
from hoglib.curvature.products import fisher_vp, ggn, ggn_vp, hessian, hvp
from hoglib.curvature.sharpness import CriticalSharpness, critical_sharpness

__all__ = [
    "KFAC",
    "CriticalSharpness",
    "DataOptions",
    "FisherOperator",
    "GGNOperator",
    "HessianOperator",
    "JacobianOperator",
    "KFACError",
    "KFACOperator",
    "KFACStep",
    "LinearOperator",
    "LowRankOperator",
    "NewtonCG",
    "NewtonStep",
    "NoiseScale",
    "OperatorOptions",
    "RectangularOperator",
    "Spectrum",
    "bilaplacian",
    "critical_sharpness",
    "directional",
    "fisher_vp",
    "ggn",
    "ggn_vp",
    "gradient_noise_scale",
    "hessian",
    "hessian_spectrum",
    "hvp",
    "influence",
    "jvp",
    "laplacian",
    "partial_derivative",
    "per_example_gradient_norms",
    "per_example_gradient_products",
    "per_example_gradients",
]
