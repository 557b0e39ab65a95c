"""A whole second-order function as one graph."""

from hoglib._core.runtime.provided import provide
from hoglib.capture.api import Compiled, CompiledLoss, compile, compiled_loss
from hoglib.capture.capturing import GraphEntry
from hoglib.capture.recomputed import run_level
from hoglib.capture.runners import inductor_options

__all__ = ["Compiled", "CompiledLoss", "GraphEntry", "compile", "compiled_loss", "inductor_options"]

provide("compile_level", run_level)  # for `hoglib.ops.remat(compile=True)`
