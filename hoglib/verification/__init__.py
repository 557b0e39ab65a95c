"""Verification: whether the derivatives of a function are right, and what is at fault if not."""

from hoglib.errors import VerificationError
from hoglib.verification.api import verify
from hoglib.verification.report import Report, Row

__all__ = ["Report", "Row", "VerificationError", "verify"]
