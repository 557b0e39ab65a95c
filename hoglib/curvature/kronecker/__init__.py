"""Kronecker factors: the layers of a run, their factors, the operator."""
