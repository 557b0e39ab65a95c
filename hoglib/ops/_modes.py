"""Which derivatives may be taken of what runs now, and who looks on."""

from torch.overrides import TorchFunctionMode

from hoglib import _functorch as functorch


class StandingIn(TorchFunctionMode):
    """The mode by which torch's functions go to hoglib's; what it does is in `hoglib.stand_ins`."""


def aside() -> functorch.Aside:
    """Inside, an op of hoglib runs without that mode, which has nothing to do there."""
    return functorch.Aside(StandingIn)


def reverse_only() -> bool:
    """Whether forward mode has no part in it: none is active, and no tracer records for later."""
    return not functorch.tracing() and not functorch.forward_mode_active()
