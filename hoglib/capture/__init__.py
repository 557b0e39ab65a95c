"""A whole second-order function as one graph."""

from hoglib.capture.api import Compiled, compile
from hoglib.capture.capturing import GraphEntry
from hoglib.capture.loss import CompiledLoss, compiled_loss

__all__ = [
    "Compiled",
    "CompiledLoss",
    "GraphEntry",
    "compile",
    "compiled_loss",
]
