"""Which derivatives may be taken of what runs now."""

from hoglib import _functorch as functorch


def reverse_only() -> bool:
    """Whether forward mode has no part in it: none is active, and no tracer records for later."""
    return not functorch.tracing() and not functorch.forward_mode_active()
