"""A whole second-order function as one graph."""

from hoglib.capture._graphs import Captured
from hoglib.capture._inductor import to_stderr
from hoglib.capture.compiled import Compiled, compile, operations
from hoglib.capture.loss import CompiledLoss, compiled_loss

__all__ = [
    "Captured",
    "Compiled",
    "CompiledLoss",
    "compile",
    "compiled_loss",
    "operations",
    "to_stderr",
]
