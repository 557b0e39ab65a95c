"""Finite differences, factorizations, and tolerances for comparing two results."""
