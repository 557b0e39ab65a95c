"""The parts of a block, as the attention and the MLP of a transformer's block.

With tangents a block holds twice what its gradient does. Then its parts are recomputed one by one: the
block keeps their inputs, and what is inside of a part is there while its own gradient is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core import closures, pytree
from hoglib._core.references import is_plain


def parts_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules inside that consist of modules themselves, outermost ones.

    One that has all the parameters of the block gives its own parts: it would keep what the block does.
    """
    found: list[nn.Module] = []
    for module in modules:
        count = sum(1 for _ in module.parameters())
        for child in module.children():
            if isinstance(child, torch.jit.ScriptModule) or next(child.children(), None) is None:
                continue
            without_forward = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if without_forward or sum(1 for _ in child.parameters()) == count:
                found += parts_of([child])
            else:
                found.append(child)
    return list({id(part): part for part in found}.values())


@contextmanager
def replaced_forwards(parts: Sequence[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Inside, a part runs as run(part, its forward, args, kwargs)."""
    before = [(vars(part), vars(part).get("forward")) for part in parts]
    try:
        for part in parts:
            vars(part)["forward"] = partial(_forward, run, part, part.forward)
        yield
    finally:
        for fields, forward in before:
            if forward is None:
                del fields["forward"]
            else:
                fields["forward"] = forward


def _forward(run: Any, part: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return run(part, forward, args, kwargs)


@final
class PartsWatch:
    """Sees the parts of a block in one run, and tells which of them can be recomputed alone: those
    that are functions of their tensor arguments, parameters and buffers, and change none of these."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parts = parts_of(modules)
        self._fit: dict[int, bool] = {}

    def watching(self) -> Any:
        """Inside, they are seen."""
        return replaced_forwards(self._parts, self._run)

    def fit(self) -> list[nn.Module]:
        """Those that can be."""
        return [part for part in self._parts if self._fit.get(id(part))]

    def _run(self, part: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        leaves, structure = pytree.flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        state = [*tensors, *part.parameters(), *part.buffers()]
        versions = [_version(x) for x in state]
        closed = _is_closed(leaves) and next(_hidden(part), None) is None
        outputs = forward(*args, **kwargs)
        unchanged = (
            versions == [_version(x) for x in state]
            and pytree.flatten((args, kwargs))[1] == structure
            and next(_hidden(part), None) is None
        )
        fits = closed and unchanged and _is_closed(pytree.leaves(outputs))
        self._fit[id(part)] = fits and self._fit.get(id(part), True)
        return outputs


def _is_closed(leaves: Sequence[Any]) -> bool:
    return all(isinstance(x, Tensor) or is_plain(x) for x in leaves)


def _hidden(part: nn.Module) -> Iterator[Any]:
    """What a part holds beside what it registers; its forward is replaced."""
    return (one for one in closures.unregistered(part) if not one.path.startswith("forward"))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
