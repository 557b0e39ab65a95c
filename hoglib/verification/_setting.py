"""A loss as a scalar function of leaves that is the same in every run, in a dtype."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib._leaves import Vector, own_leaves
from hoglib.verification._judging import Judge, normal, scale
from hoglib.verification._locating import Locator
from hoglib.verification._module_calls import Names, Running, calls_of
from hoglib.verification._stops import Stops
from hoglib.verification._unchanged import Unchanged

BESIDE = 0.01  # of the size of each tensor
DEPTH = 4  # of objects in objects of a batch


class Problem:
    """What was given to `audit`, and the names of the modules in it."""

    def __init__(self, loss: Callable[..., Tensor], params: Any, batch: Any) -> None:
        self.loss, self.params, self.batch = loss, params, batch
        self.leaves, self.structure = _tree.flatten(params)
        self.leaves = [x.detach() for x in self.leaves]
        self.paths = _tree.paths(params)
        self.names = Names(loss)
        generators = [g for g in _tree.leaves(batch) if isinstance(g, torch.Generator)]
        self.generators = [*self.names.generators, *generators]

    def value(self, leaves: Vector, batch: Any) -> Tensor:
        params = _tree.unflatten(list(leaves), self.structure)
        return arguments.scalar("loss(params, batch)", self.loss(params, batch))


class Setting:
    """A problem in a dtype, or in its own for None, at its parameters or beside them.

    Complex parameters are leaves of two real numbers each. A context: the modules' state is put back at
    its end.
    """

    def __init__(
        self, problem: Problem, dtype: torch.dtype | None, *, at: Vector | None = None
    ) -> None:
        self._problem, self._dtype = problem, dtype
        self._complex = [x.is_complex() for x in problem.leaves]
        self.batch = problem.batch if dtype is None else in_dtype(problem.batch, dtype)
        leaves = [x if dtype is None else in_dtype(x, dtype) for x in problem.leaves]
        self.given = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
        self.leaves = self.given if at is None else at
        self.running = Running(problem.names)
        self.stops = Stops(lambda: self.running.name)
        self._judges: dict[int, Judge] = {}
        self._locator: Locator | None = None

    def __enter__(self) -> "Setting":
        problem = self._problem
        self.state = Unchanged(problem.names.modules(), problem.generators, self._dtype)
        self.state.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self.state.__exit__(*error)

    def f(self, *leaves: Tensor) -> Tensor:
        """The loss; modules, generators and random numbers are as at first."""
        self.state.begin()
        pairs = zip(leaves, self._complex, strict=True)
        values = [torch.view_as_complex(x) if parts else x for x, parts in pairs]
        with self.running.watching():
            return self._problem.value(values, self.batch)

    def move_beside(self) -> None:
        """To parameters a little off, where the loss is finite there."""
        random = torch.Generator().manual_seed(0)
        moved = [
            x + BESIDE * (scale(x) if x.any() else 1.0) * normal(x, random) for x in self.given
        ]
        try:
            finite = bool(self.f(*own_leaves(moved, False)).isfinite())
        except Exception:  # whatever it says of other parameters
            finite = False
        self.leaves = moved if finite else self.given

    def judge(self, seed: int = 0) -> Judge:
        """Along a random direction."""
        if seed not in self._judges:
            self._judges[seed] = Judge(self.f, self.leaves, self.stops, seed)
        return self._judges[seed]

    @property
    def locator(self) -> Locator:
        if self._locator is None:

            def run() -> Tensor:
                return self.f(*own_leaves(self.leaves, False))

            tree = calls_of(self._problem.names, run)
            self._locator = Locator(tree, run, self.state.begin)
        return self._locator


def in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """A copy of a tree with its tensors of floating point in a dtype, also those in plain objects."""

    def convert(x: Any, depth: int = DEPTH) -> Any:
        if isinstance(x, Tensor):
            if x.is_complex():
                return x.to(dtype.to_complex())
            return x.to(dtype) if x.is_floating_point() else x
        fields = getattr(x, "__dict__", None)
        if not fields or not depth or callable(x) or isinstance(x, type | torch.nn.Module):
            return x
        found = {name: _tree.map(lambda y: convert(y, depth - 1), v) for name, v in fields.items()}
        if all(found[name] is fields[name] for name in fields):
            return x
        other = copy(x)
        for name, value in found.items():
            object.__setattr__(other, name, value)
        return other

    return _tree.map(convert, tree)
