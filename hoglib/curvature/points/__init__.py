"""Derivatives of a function by the coordinates of many points: Laplacians, directions, mixed ones."""
