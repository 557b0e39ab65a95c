"""Gradients of single examples, and what each contributes."""
