"""Optimizers, and what is measured along their steps."""
