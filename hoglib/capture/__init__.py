"""A whole second-order function as one graph."""

from hoglib.capture._graphs import Captured
from hoglib.capture.compiled import Compiled, compile
from hoglib.capture.loss import CompiledLoss, compiled_loss

__all__ = [
    "Captured",
    "Compiled",
    "CompiledLoss",
    "compile",
    "compiled_loss",
]
