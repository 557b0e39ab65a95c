"""Hessian-vector products and Hessians of functions of parameters, and Laplacians in inputs."""

from hoglib.curvature._laplacian import laplacian
from hoglib.curvature.dense import hessian
from hoglib.curvature.products import hvp

__all__ = ["hessian", "hvp", "laplacian"]
