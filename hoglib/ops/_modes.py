"""Which derivatives may be taken of what runs now, and who looks on."""

from contextlib import AbstractContextManager, nullcontext

from torch.overrides import TorchFunctionMode

from hoglib import _functorch as functorch


class StandingIn(TorchFunctionMode):
    """The mode by which torch's functions go to hoglib's; what it does is in `hoglib.stand_ins`."""


def aside() -> functorch.Aside:
    """Inside, an op of hoglib runs without that mode, which has nothing to do there."""
    return functorch.Aside(StandingIn)


class Standing:
    """The stand-ins that are on, to be on again where something is run later, or by torch.func, which
    switches modes off while it applies a Function."""

    def __init__(self) -> None:
        self._mode = functorch.function_mode(StandingIn)

    def again(self) -> AbstractContextManager[object]:
        if self._mode is None or functorch.function_mode(StandingIn) is not None:
            return nullcontext()
        return self._mode


def reverse_only() -> bool:
    """Whether forward mode has no part in it: none is active, and no tracer records for later."""
    return not functorch.tracing() and not functorch.forward_mode_active()


def plain() -> bool:
    """Whether reverse mode alone has a part in it, and no transform of torch.func."""
    return not functorch.transforms_active() and reverse_only()
