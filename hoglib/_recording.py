"""Recording gradients wherever the caller stands: under no_grad, and in inference mode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hoglib import _tree

T = TypeVar("T")


@contextmanager
def recording() -> Iterator[None]:
    """Gradients are recorded inside; enable_grad alone does not suffice in inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Where tensors can be differentiated by: inference mode is left for no_grad."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def recordable(tree: T) -> T:
    """The tree with its inference tensors, which autograd refuses to save, replaced by copies."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.is_inference() else tensor

    result: T = _tree.map_tensors(copy, tree)
    return result


def plainly(function: Callable[[], Tensor]) -> Tensor:
    """A value without its graph; of a function that differentiates inside, with gradients on."""
    with torch.no_grad():
        try:
            return function()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
    return function().detach()
