"""Curvature of scalar functions of parameters: products with vectors, whole matrices, operators."""

from hoglib.curvature.dense import ggn, hessian
from hoglib.curvature.density import spectral_density
from hoglib.curvature.eigenvalues import eigsh
from hoglib.curvature.example_gradients import per_example_gradients
from hoglib.curvature.ghost_gradients import (
    per_example_gradient_norms,
    per_example_gradient_products,
)
from hoglib.curvature.influence_scores import influence
from hoglib.curvature.jacobian_product import jvp
from hoglib.curvature.kfac import KFAC, KFACStep
from hoglib.curvature.kfac_operator import KFACError, KFACOperator
from hoglib.curvature.laplacians import bilaplacian, laplacian
from hoglib.curvature.linear_operator import LinearOperator
from hoglib.curvature.linear_systems import cg
from hoglib.curvature.low_rank import LowRankOperator, low_rank
from hoglib.curvature.matrix_functions import logdet, matrix_function
from hoglib.curvature.newton import NewtonCG, NewtonStep
from hoglib.curvature.noise_scale import NoiseScale, gradient_noise_scale
from hoglib.curvature.operators import FisherOperator, GGNOperator, HessianOperator
from hoglib.curvature.partial_derivatives import directional, partial_derivative
from hoglib.curvature.products import fisher_vp, ggn_vp, hvp
from hoglib.curvature.projected_estimators import hutchpp, xdiag
from hoglib.curvature.spectrum import Spectrum, hessian_spectrum
from hoglib.curvature.traces import (
    hutchinson_diagonal,
    hutchinson_frobenius,
    hutchinson_trace,
    xtrace,
)

__all__ = [
    "KFAC",
    "FisherOperator",
    "GGNOperator",
    "HessianOperator",
    "KFACError",
    "KFACOperator",
    "KFACStep",
    "LinearOperator",
    "LowRankOperator",
    "NewtonCG",
    "NewtonStep",
    "NoiseScale",
    "Spectrum",
    "bilaplacian",
    "cg",
    "directional",
    "eigsh",
    "fisher_vp",
    "ggn",
    "ggn_vp",
    "gradient_noise_scale",
    "hessian",
    "hessian_spectrum",
    "hutchinson_diagonal",
    "hutchinson_frobenius",
    "hutchinson_trace",
    "hutchpp",
    "hvp",
    "influence",
    "jvp",
    "laplacian",
    "logdet",
    "low_rank",
    "matrix_function",
    "partial_derivative",
    "per_example_gradient_norms",
    "per_example_gradient_products",
    "per_example_gradients",
    "spectral_density",
    "xdiag",
    "xtrace",
]
