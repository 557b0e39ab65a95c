"""A custom Function with the arguments that it was applied to."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib import _tree
from hoglib._functorch import watching_functions
from hoglib.verification import _plain as plain
from hoglib.verification._call import is_float, is_part
from hoglib.verification._copies import fresh


class Application(NamedTuple):
    """A custom Function with the arguments that it was applied to, detached."""

    function: type[Function]
    args: tuple[Any, ...]
    by: tuple[int, ...]  # which arguments it is differentiated by
    names: tuple[str, ...]  # of the arguments

    @property
    def needed(self) -> tuple[bool, ...]:
        return tuple(i in self.by for i in range(len(self.args)))

    def run(self, args: Sequence[Any] | None = None) -> plain.Run:
        return plain.forward(self.function, self.args if args is None else args, self.needed)

    def seeded(self) -> plain.Run:
        """A run on copies of the arguments, the same each time."""
        torch.manual_seed(0)
        return self.run(self.fresh())

    def name(self, i: int) -> str:
        return self.names[i] if i < len(self.names) else f"input {i}"

    def declares_changes(self) -> bool:
        """Whether it marks inputs as changed in place."""
        try:
            return bool(self.seeded().record.dirty)
        except Exception:  # judged elsewhere
            return False

    def fresh(self) -> list[Any]:
        """Copies of the arguments, with their layouts."""
        return [fresh(x) for x in self.args]


def applications(run: Callable[[], Any]) -> list[Application]:
    """The custom Functions that a run applies to something that requires grad, each kind once."""
    found: dict[Any, Application] = {}

    def seen(function: type[Function], args: tuple[Any, ...]) -> None:
        app = application(function, args)
        if app is not None:
            found.setdefault((function, tuple(_kind(x) for x in args)), app)

    with watching_functions(seen):
        run()
    return list(found.values())


def application(function: type[Function], args: tuple[Any, ...]) -> Application | None:
    """A call of a Function, if it is differentiated by anything."""
    if is_part(function) or function.__module__.startswith("torch."):  # a checkpoint, compiled code
        return None
    by = tuple(i for i, x in enumerate(args) if is_float(x) and x.requires_grad)
    values = tuple(map(fresh, args))
    return Application(function, values, by, parameters(function, len(args))) if by else None


def parameters(function: type[Function], count: int) -> tuple[str, ...]:
    """What forward calls its inputs."""
    try:
        given = list(signature(function.forward).parameters.values())
    except (TypeError, ValueError):  # it is written in C++, or is no function
        given = []
    given = given[1:] if plain.is_classic(function) else given
    names = [f"`{p.name}`" for p in given if p.kind is not p.VAR_POSITIONAL]
    rest = next((p.name for p in given if p.kind is p.VAR_POSITIONAL), "inputs")
    names += [f"`{rest}[{i}]`" for i in range(count - len(names))]
    return tuple(names[:count])


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    return repr(value) if not _tree.leaves(value) else type(value)
