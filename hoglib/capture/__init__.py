"""A whole second-order function as one graph."""

from hoglib.capture.compiled import Captured, Compiled, compile
from hoglib.capture.loss import CompiledLoss, compiled_loss

__all__ = ["Captured", "Compiled", "CompiledLoss", "compile", "compiled_loss"]
