"""Curvature of scalar functions of parameters: products with vectors, whole matrices, operators."""

from hoglib.curvature.dense import ggn, hessian
from hoglib.curvature.products import fisher_vp, ggn_vp, hvp

__all__ = ["fisher_vp", "ggn", "ggn_vp", "hessian", "hvp"]
