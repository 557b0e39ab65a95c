"""Sums over data, batch by batch, and the checks of each pass."""
