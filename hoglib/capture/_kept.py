"""What a function leaves behind when it is traced, put back: tensors in attributes, lists and closures
that have no values."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hoglib import _functorch, _tree
from hoglib.capture._contents import Attributes, is_filled
from hoglib.capture._walk import Walk


@contextmanager
def nothing_left(walk: Walk) -> Iterator[None]:
    """What is reached holds none of the trace's tensors afterwards, but what it held before.

    Modules that keep an output or an attention map, for someone to look at, keep the last one that was
    computed outside of a graph.
    """
    before = [(x.fields if isinstance(x, Attributes) else x) for x in walk.objects]
    dicts = [(x, dict(x)) for x in before if isinstance(x, dict)]
    lists = [(x, list(x)) for x in before if isinstance(x, list)]
    cells = [
        (cell, cell.cell_contents)
        for x in before
        if isinstance(x, FunctionType)
        for cell in x.__closure__ or ()
        if is_filled(cell)
    ]
    grads = [(x, x.grad) for x in before if isinstance(x, Tensor) and x.is_leaf]
    try:
        yield
    finally:
        for fields, was in dicts:
            for name in [name for name, value in fields.items() if _is_traced(value)]:
                if name in was:
                    fields[name] = was[name]
                else:
                    del fields[name]
        for items, had in lists:
            if any(map(_is_traced, items)):
                items[:] = had
        for cell, contents in cells:
            if is_filled(cell) and _is_traced(cell.cell_contents):
                cell.cell_contents = contents
        for tensor, grad in grads:
            if isinstance(tensor.grad, FakeTensor):
                tensor.grad = grad


def _is_traced(value: Any) -> bool:
    return any(
        isinstance(_functorch.unwrapped(x), FakeTensor)
        for x in _tree.leaves(value)
        if isinstance(x, Tensor)
    )
