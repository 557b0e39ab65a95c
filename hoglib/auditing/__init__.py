"""The audit of a model's loss, `hoglib.audit`."""

from hoglib.auditing.api import audit

__all__ = ["audit"]
