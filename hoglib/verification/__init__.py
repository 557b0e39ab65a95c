"""Verification: are the derivatives of a function right, and if not, what is at fault?"""

from hoglib.verification._verify import verify
from hoglib.verification.audit import audit
from hoglib.verification.report import Report, Row, VerificationError

__all__ = ["Report", "Row", "VerificationError", "audit", "verify"]
