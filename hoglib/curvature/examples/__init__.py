"""Gradients of single examples: norms, products, influence, noise scale."""
