"""Curvature of scalar functions of parameters: products with vectors, whole matrices, operators.

    batches     batches of data: weights, pieces, and the processes that share them
    points      derivatives by the inputs at many points: Laplacians, directional derivatives
    algebra     linear operators known by their products: eigenvalues, traces, linear systems
    maps        products at one point: Hessian, Gauss-Newton, Fisher and Jacobian as linear maps
    sums        sums over data, batch by batch, and the checks of each pass
    operators   operators over data, made of maps and sums
    kronecker   KFAC: the recorded layers of a model, their Kronecker factors, the operator
    training    optimizers, and sharpness along their steps
    examples    gradients of single examples: norms, products, influence, noise scale

Each sub-package imports only those above it in this list.
"""

from hoglib._core.numerics.sparsity import Band, DiagonalBlocks
from hoglib.curvature.algebra.linear_operator import (
    LinearOperator,
    LowRankOperator,
    RectangularOperator,
)
from hoglib.curvature.examples.diagonals import per_example_diagonals
from hoglib.curvature.examples.example_gradients import (
    NoiseScale,
    gradient_noise_scale,
    influence,
    per_example_gradient_norms,
    per_example_gradient_products,
    per_example_gradients,
)
from hoglib.curvature.examples.gradient_store import GradientStore, gradient_store
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
from hoglib.curvature.operators.sparse_matrices import sparse_hessian, sparse_jacobian
from hoglib.curvature.points.point_derivatives import (
    bilaplacian,
    directional,
    laplacian,
    partial_derivative,
)
from hoglib.curvature.sums.dataset_sum import DataOptions, OperatorOptions
from hoglib.curvature.training.least_squares import LevenbergMarquardt, LevenbergMarquardtStep
from hoglib.curvature.training.optimizers import KFAC, KFACStep, NewtonCG, NewtonStep
from hoglib.curvature.training.sharpness import CriticalSharpness, critical_sharpness

__all__ = [
    "KFAC",
    "Band",
    "CriticalSharpness",
    "DataOptions",
    "DiagonalBlocks",
    "FisherOperator",
    "GGNOperator",
    "GradientStore",
    "HessianOperator",
    "JacobianOperator",
    "KFACError",
    "KFACOperator",
    "KFACStep",
    "LevenbergMarquardt",
    "LevenbergMarquardtStep",
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
    "gradient_store",
    "hessian",
    "hessian_spectrum",
    "hvp",
    "influence",
    "jvp",
    "laplacian",
    "partial_derivative",
    "per_example_diagonals",
    "per_example_gradient_norms",
    "per_example_gradient_products",
    "per_example_gradients",
    "sparse_hessian",
    "sparse_jacobian",
]
