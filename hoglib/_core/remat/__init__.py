"""Recomputation in backward, and the option ``remat=``, which chooses blocks of a model to
recompute."""
