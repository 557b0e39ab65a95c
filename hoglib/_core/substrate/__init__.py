"""Gradients that can be differentiated again, the graph they come from, and where tensors live."""
