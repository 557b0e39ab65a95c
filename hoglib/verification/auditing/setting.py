"""A loss as a scalar function of leaves that is the same in every run, in a dtype."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hoglib._differences import in_double
from hoglib._leaves import Vector, own_leaves
from hoglib.verification.auditing.judging import Judge, normal, scale
from hoglib.verification.auditing.locating import Locator
from hoglib.verification.auditing.module_calls import Running, calls_of
from hoglib.verification.auditing.problem import Problem, mapped
from hoglib.verification.auditing.routes import Route
from hoglib.verification.auditing.stops import Stops
from hoglib.verification.auditing.unchanged import Unchanged
from hoglib.verification.auditing.wide import in_float64

BESIDE = 0.01  # of the size of each tensor


class Setting:
    """A problem in float64, or as it is, at its parameters or beside them.

    Complex parameters are leaves of two real numbers each. keep: keys of routes whose products along
    the first direction are asked for twice. A context: the modules' state is put back at its end.
    """

    def __init__(self, problem: Problem, *, double: bool, keep: Iterable[str] = ()) -> None:
        self._keep = set(keep)
        self._problem, self._double = problem, double
        self._complex = [x.is_complex() for x in problem.leaves]
        self.batch = mapped(in_double, problem.batch) if double else problem.batch
        leaves = in_double(problem.leaves) if double else problem.leaves
        self.given = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
        self.leaves = self.given
        self.running = Running(problem.names)
        self.stops = Stops(self._owner)
        self._judges: dict[int, Judge] = {}
        self._locator: Locator | None = None

    def __enter__(self) -> "Setting":
        problem = self._problem
        self._frozen = problem.frozen()
        self.state = Unchanged(problem.names.modules(), problem.generators, self._double)
        return self

    def __exit__(self, *error: Any) -> None:
        self.state.__exit__(*error)

    def f(self, *leaves: Tensor) -> Tensor:
        """The loss; modules, generators and random numbers are as at first."""
        pairs = zip(leaves, self._complex, strict=True)
        values = [torch.view_as_complex(x) if parts else x for x, parts in pairs]
        with self._around(), self.running.watching():
            return self._problem.value(values, self.batch)

    @contextmanager
    def _around(self, module: nn.Module | None = None) -> Iterator[None]:
        """Where the loss runs, or a module of it by itself."""
        self.state.begin(of=module)
        with in_float64() if self._double else nullcontext():
            yield

    def move_beside(self) -> None:
        """To parameters a little off, where the loss is finite there."""
        random = torch.Generator("cpu").manual_seed(0)
        moved = [
            x + BESIDE * (scale(x) if x.any() else 1.0) * normal(x, random) for x in self.given
        ]
        try:
            finite = bool(self.f(*own_leaves(moved, False)).isfinite())
        except Exception:  # whatever it says of other parameters
            finite = False
        if finite:
            self.move_to(moved)

    def move_to(self, leaves: Vector) -> None:
        """What was known of other leaves is not known of these."""
        self.leaves = leaves
        self._judges.clear()
        self._locator = None

    def judge(self, seed: int = 0) -> Judge:
        """Along a random direction."""
        if seed not in self._judges:
            self._judges[seed] = Judge(self.f, self.leaves, self.stops, seed, self._frozen)
            if not seed:
                self._judges[seed].keep = self._keep
        return self._judges[seed]

    def product(self, route: Route) -> Vector | None:
        """What a route gives along the first direction, or None where it raises."""
        try:
            return self.judge().product(route)
        except Exception:  # told by its row
            return None

    def draws_otherwise(self) -> bool:
        """Whether the loss is another one inside of torch.func, by other random numbers."""
        leaves, v = tuple(self.leaves), tuple(self.judge().v)
        with suppress(Exception):
            of_gradient = torch.func.grad_and_value(self.f)
            value = self.f(*leaves)
            inside = of_gradient(*leaves)[1], torch.func.jvp(of_gradient, leaves, v)[0][1]
            return not all(torch.allclose(value, other) for other in inside)
        return False

    def work(self) -> float:
        """Multiplications and additions of one forward, as torch counts them; 0 where it cannot."""
        with suppress(Exception), FlopCounterMode(display=False) as counter:
            self.f(*own_leaves(self.leaves, False))
            return float(counter.get_total_flops())
        return 0.0

    def _owner(self) -> nn.Module | None:
        return self.running.stack[-1] if self.running.stack else None

    @property
    def locator(self) -> Locator:
        if self._locator is None:

            def run() -> Tensor:
                return self.f(*own_leaves(self.leaves, False))

            tree = calls_of(self._problem.names, run)
            self._locator = Locator(tree, run, self._around)
        return self._locator
