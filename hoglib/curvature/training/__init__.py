"""Optimizers by curvature, and sharpness along their steps."""
