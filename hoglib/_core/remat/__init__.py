"""Recomputation in backward, and the blocks of a model that are recomputed (the option ``remat=``)."""
