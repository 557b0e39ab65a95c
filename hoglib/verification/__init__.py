"""Verification: are the derivatives of a function right, and if not, what is at fault?"""

from hoglib.verification._verify import verify
from hoglib.verification.auditing.run import audit
from hoglib.verification.drawing.picture import Graph, graph
from hoglib.verification.report import Report, Row, VerificationError

__all__ = ["Graph", "Report", "Row", "VerificationError", "audit", "graph", "verify"]
