"""Derivatives of a function by its inputs at many points: Laplacians, directional and mixed ones."""
