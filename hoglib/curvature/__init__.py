"""Curvature of scalar functions of parameters: products with vectors, whole matrices, operators."""

from hoglib.curvature.dense import ggn, hessian
from hoglib.curvature.density import spectral_density
from hoglib.curvature.eigenvalues import eigsh
from hoglib.curvature.jacobian_product import jvp
from hoglib.curvature.laplacians import bilaplacian, laplacian
from hoglib.curvature.linear_operator import LinearOperator
from hoglib.curvature.linear_systems import cg
from hoglib.curvature.newton import NewtonCG, NewtonStep
from hoglib.curvature.operators import FisherOperator, GGNOperator, HessianOperator
from hoglib.curvature.partial_derivatives import directional, partial_derivative
from hoglib.curvature.products import fisher_vp, ggn_vp, hvp
from hoglib.curvature.spectrum import Spectrum, hessian_spectrum
from hoglib.curvature.traces import (
    hutchinson_diagonal,
    hutchinson_frobenius,
    hutchinson_trace,
    xtrace,
)

__all__ = [
    "FisherOperator",
    "GGNOperator",
    "HessianOperator",
    "LinearOperator",
    "NewtonCG",
    "NewtonStep",
    "Spectrum",
    "bilaplacian",
    "cg",
    "directional",
    "eigsh",
    "fisher_vp",
    "ggn",
    "ggn_vp",
    "hessian",
    "hessian_spectrum",
    "hutchinson_diagonal",
    "hutchinson_frobenius",
    "hutchinson_trace",
    "hvp",
    "jvp",
    "laplacian",
    "partial_derivative",
    "spectral_density",
    "xtrace",
]
