"""Which derivatives may be taken of what runs now, and who looks on."""

from contextlib import AbstractContextManager, nullcontext

from torch.overrides import TorchFunctionMode

from hoglib._core import torch_internals


class StandInMode(TorchFunctionMode):
    """The mode by which torch's functions go to hoglib's; what it does is in `hoglib.stand_ins`."""


def without_stand_ins() -> torch_internals.SuspendedMode:
    """Inside, an op of hoglib runs without that mode, which has nothing to do there."""
    return torch_internals.SuspendedMode(StandInMode)


class ActiveStandIns:
    """The stand-ins that are on, to be on again where something is run later, or by torch.func, which
    switches modes off while it applies a Function."""

    def __init__(self) -> None:
        self._mode = torch_internals.function_mode(StandInMode)

    def again(self) -> AbstractContextManager[object]:
        if self._mode is None or torch_internals.function_mode(StandInMode) is not None:
            return nullcontext()
        return self._mode


def reverse_only() -> bool:
    """Whether forward mode has no part in it: none is active, and no tracer records for later."""
    return not torch_internals.tracing() and not torch_internals.forward_mode_active()


def plain_reverse_mode() -> bool:
    """Whether reverse mode alone has a part in it, and no transform of torch.func."""
    return not torch_internals.transforms_active() and reverse_only()
