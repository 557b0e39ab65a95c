"""Verification: check the derivatives of a function, and name the cause of a wrong one."""

from hoglib.errors import VerificationError
from hoglib.verification.api import verify
from hoglib.verification.report import Report, Row

__all__ = ["Report", "Row", "VerificationError", "verify"]
