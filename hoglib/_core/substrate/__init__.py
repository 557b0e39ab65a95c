"""Gradients that can be differentiated again, their graph, the state of a loss, sharded parameters."""
