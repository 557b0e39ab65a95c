"""A model in float64 whose code names other dtypes: `x.float()`, `softmax(x, dtype=torch.float32)`.

Such a line would round what is to be compared, or not go together with float64 weights. Inside
`in_float64()` a call that is given a float64 tensor, and asked for a narrower dtype, stays in float64;
autocast does nothing.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hoglib._core import pytree
from hoglib._core.autograd import Vector, fresh_leaves
from hoglib._core.finite_differences import to_double
from hoglib._core.state import StateGuard
from hoglib._core.torch_internals import no_autocast
from hoglib.auditing.locating import Locator, Running, calls_of
from hoglib.auditing.problem import Problem, mapped
from hoglib.auditing.route_checker import RouteChecker, normal, scale
from hoglib.auditing.routes import Route
from hoglib.auditing.stop_gradients import StopGradientReplay

NARROW = (torch.float32, torch.float16, torch.bfloat16)
WIDE = {Tensor.float, Tensor.half, Tensor.bfloat16}
DOUBLE = (torch.float64, torch.complex128)


class _InFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WIDE:
            return args[0] if args[0].dtype in DOUBLE else func(*args, **kwargs)
        if any(x in NARROW for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)):
            tensors = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)]
            if any(x.dtype in DOUBLE for x in tensors):
                args = tuple(_wider(x) for x in args)
                kwargs = {name: _wider(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


@contextmanager
def in_float64() -> Iterator[None]:
    with no_autocast(), _InFloat64():
        yield


# === A loss as a scalar function of leaves that is the same in every run, in a dtype.

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
        self.batch = mapped(to_double, problem.batch) if double else problem.batch
        leaves = to_double(problem.leaves) if double else problem.leaves
        self.given = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
        self.leaves = self.given
        self.running = Running(problem.names)
        self.stops = StopGradientReplay(self._owner)
        self._judges: dict[int, RouteChecker] = {}
        self._locator: Locator | None = None

    def __enter__(self) -> "Setting":
        problem = self._problem
        self._frozen = problem.frozen()
        self.state = StateGuard(problem.names.modules(), problem.generators, self._double)
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
            finite = bool(self.f(*fresh_leaves(moved, False)).isfinite())
        except Exception:  # whatever it says of other parameters
            finite = False
        if finite:
            self.move_to(moved)

    def move_to(self, leaves: Vector) -> None:
        """What was known of other leaves is not known of these."""
        self.leaves = leaves
        self._judges.clear()
        self._locator = None

    def judge(self, seed: int = 0) -> RouteChecker:
        """Along a random direction."""
        if seed not in self._judges:
            self._judges[seed] = RouteChecker(self.f, self.leaves, self.stops, seed, self._frozen)
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
            self.f(*fresh_leaves(self.leaves, False))
            return float(counter.get_total_flops())
        return 0.0

    def _owner(self) -> nn.Module | None:
        return self.running.stack[-1] if self.running.stack else None

    @property
    def locator(self) -> Locator:
        if self._locator is None:

            def run() -> Tensor:
                return self.f(*fresh_leaves(self.leaves, False))

            tree = calls_of(self._problem.names, run)
            self._locator = Locator(tree, run, self._around)
        return self._locator
