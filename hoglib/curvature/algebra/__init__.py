"""Operators known by their products, with sums, eigenvalues, traces and linear systems."""
