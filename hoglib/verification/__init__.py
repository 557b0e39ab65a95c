"""Verification: are the derivatives of a function right, and if not, what is at fault?"""

from hoglib.verification._audit import audit
from hoglib.verification._verify import verify
from hoglib.verification.drawing import Graph, graph
from hoglib.verification.report import Report, Row, VerificationError

__all__ = ["Graph", "Report", "Row", "VerificationError", "audit", "graph", "verify"]
