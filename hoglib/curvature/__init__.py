"""Hessian-vector products and Hessians of scalar functions of parameters."""

from hoglib.curvature.dense import hessian
from hoglib.curvature.products import hvp

__all__ = ["hessian", "hvp"]
