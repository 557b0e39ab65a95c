"""Curvature of scalar functions of parameters: products with vectors, whole matrices, operators."""

from hoglib.curvature._laplacian import laplacian
from hoglib.curvature._linear import LinearOperator
from hoglib.curvature.dense import ggn, hessian
from hoglib.curvature.density import spectral_density
from hoglib.curvature.newton import NewtonCG, NewtonStep
from hoglib.curvature.operator import FisherOperator, GGNOperator, HessianOperator
from hoglib.curvature.products import fisher_vp, ggn_vp, hvp
from hoglib.curvature.solve import cg
from hoglib.curvature.spectrum import eigsh
from hoglib.curvature.trace import hutchinson_diagonal, hutchinson_frobenius, hutchinson_trace
from hoglib.curvature.xtrace import xtrace

__all__ = [
    "FisherOperator",
    "GGNOperator",
    "HessianOperator",
    "LinearOperator",
    "NewtonCG",
    "NewtonStep",
    "cg",
    "eigsh",
    "fisher_vp",
    "ggn",
    "ggn_vp",
    "hessian",
    "hutchinson_diagonal",
    "hutchinson_frobenius",
    "hutchinson_trace",
    "hvp",
    "laplacian",
    "spectral_density",
    "xtrace",
]
