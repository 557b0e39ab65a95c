"""Samples, references and formulas of every op: what the op tests and `hoglib ops` read."""

from hoglib.testing.opinfo.catalogue import CATALOGUE
from hoglib.testing.opinfo.op_info import OpInfo, SampleInput

__all__ = ["CATALOGUE", "OpInfo", "SampleInput"]
