"""Batches of data: weights, pieces, single examples, and the processes that share them."""
