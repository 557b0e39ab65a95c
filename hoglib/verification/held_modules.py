"""Functions that get a module, or a function that holds one, and its parameters as further arguments.

    Checkpoint.apply(block, x, *block.parameters())

A copy of such a parameter is not the one that the module computes with. So the call is verified through
a module that holds the block, by the parameters of which it is differentiated.
"""

from typing import Any, NamedTuple, final

import torch
from torch import nn

from hoglib._core import pytree
from hoglib._core.closures import held
from hoglib.verification.report import Row
from hoglib.verification.subject import as_function


class Lifted(NamedTuple):
    """A module that applies the Function, the other arguments, and what to tell of it."""

    fn: nn.Module
    inputs: tuple[Any, ...]
    row: Row


def lifted(fn: Any, inputs: tuple[Any, ...]) -> Lifted | None:
    """The call as that of a module; None if no argument is a parameter of another one."""
    function = as_function(fn)
    if function is None:
        return None
    leaves, structure = pytree.flatten(inputs)
    blocks = [m for leaf in leaves if callable(leaf) for m in _modules(leaf)]
    block = nn.ModuleList(dict.fromkeys(blocks))
    names = {id(p): name for name, p in block.named_parameters()}
    places = {i: names[id(x)] for i, x in enumerate(leaves) if id(x) in names}
    if not places:
        return None
    module = _Applied(function, block, leaves, structure, places)
    rest = pytree.unflatten([None if i in places else x for i, x in enumerate(leaves)], structure)
    name = function.__name__
    text = (
        f"{name} gets a module and {len(places)} of its parameters. The module computes with its own "
        "parameters, not with copies, so this call was verified through a module that holds it, by "
        "its parameters. To do that yourself, wrap it:\n"
        "    class Wrapped(torch.nn.Module):\n"
        "        def __init__(self, block):\n"
        "            super().__init__()\n"
        "            self.block = block\n"
        "        def forward(self, x):\n"
        f"            return {name}.apply(self.block, x, *self.block.parameters())"
    )
    return Lifted(module, rest, Row("arguments: a module", "warn", None, text))


def _modules(value: Any) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    return [capture.value for capture in held(value) if isinstance(capture.value, nn.Module)]


@final
class _Applied(nn.Module):
    """Applies a Function to arguments and to the parameters that its block has at that time."""

    def __init__(
        self, function: type[torch.autograd.Function], block: nn.ModuleList, leaves: list[Any],
        structure: Any, places: dict[int, str],
    ) -> None:  # fmt: skip
        super().__init__()
        self.block = block
        self._function, self._leaves, self._structure = function, leaves, structure
        self._places = places

    def forward(self, *inputs: Any) -> Any:
        own = dict(self.block.named_parameters())
        given = [
            own[self._places[i]] if i in self._places else x
            for i, x in enumerate(pytree.leaves(inputs))
        ]
        return self._function.apply(*pytree.unflatten(given, self._structure))
