"""Curvature of scalar functions of parameters: products with vectors, whole matrices, operators.

    batches     what a batch is: its examples, its pieces, the processes that share it
    points      derivatives by the coordinates of many points: Laplacians, directions
    algebra     operators known by their products: sums, eigenvalues, traces, linear systems
    maps        products at one point: Hessian, Gauss-Newton, Fisher and Jacobian as linear maps
    sums        a loss over data, summed up batch by batch, and what watches a pass
    operators   the operators over data, made of maps and sums
    kronecker   the layers of a run, their Kronecker factors, the operator of these
    training    optimizers, and what is measured along their steps
    examples    gradients of single examples, and what each contributes

Each room imports those above it in this list.
"""

from hoglib.curvature.algebra.linear_operator import (
    LinearOperator,
    LowRankOperator,
    RectangularOperator,
)
from hoglib.curvature.examples.example_gradients import (
    NoiseScale,
    gradient_noise_scale,
    influence,
    per_example_gradient_norms,
    per_example_gradient_products,
    per_example_gradients,
)
from hoglib.curvature.kronecker.kfac_operator import KFACError, KFACOperator
from hoglib.curvature.maps.jacobian_product import jvp
from hoglib.curvature.maps.products import fisher_vp, ggn, ggn_vp, hessian, hvp
from hoglib.curvature.operators.jacobian_operator import JacobianOperator
from hoglib.curvature.operators.operators import (
    FisherOperator,
    GGNOperator,
    HessianOperator,
    Spectrum,
    hessian_spectrum,
)
from hoglib.curvature.points.point_derivatives import (
    bilaplacian,
    directional,
    laplacian,
    partial_derivative,
)
from hoglib.curvature.sums.dataset_sum import DataOptions, OperatorOptions
from hoglib.curvature.training.optimizers import KFAC, KFACStep, NewtonCG, NewtonStep
from hoglib.curvature.training.sharpness import CriticalSharpness, critical_sharpness

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
