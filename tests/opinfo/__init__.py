"""Samples, references and formulas of every op: what the tests of ops and docs/ops.md are made from."""

from tests.opinfo.catalogue import CATALOGUE
from tests.opinfo.op_info import OpInfo, SampleInput

__all__ = ["CATALOGUE", "OpInfo", "SampleInput"]
