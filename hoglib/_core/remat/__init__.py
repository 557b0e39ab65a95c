"""Blocks of a model that are computed again in backward."""
