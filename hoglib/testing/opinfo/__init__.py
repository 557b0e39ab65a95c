"""Samples, references and formulas of every op: what the op tests and `hoglib ops` read."""

from hoglib.testing.opinfo.catalogue import CATALOGUE

__all__ = ["CATALOGUE"]
