"""A loss as a scalar function of real leaves that gives the same value in every run."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hoglib._core import pytree
from hoglib._core.autograd import Vector, fresh_leaves
from hoglib._core.element_differences import random_like
from hoglib._core.finite_differences import to_double
from hoglib._core.state import StateGuard
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import no_autocast
from hoglib.auditing.checker import Checker, scale
from hoglib.auditing.locator import Locator
from hoglib.auditing.problem import Problem, map_tensors
from hoglib.auditing.stop_gradients import StopGradientReplay
from hoglib.verification.call import real

PERTURBATION = 0.01  # of the size of each tensor


@contextmanager
def reproducible(problem: Problem, *, double: bool) -> Iterator["ReproducibleLoss"]:
    """The loss in float64, or in the dtype of its parameters; the state of modules is restored."""
    modules, generators = problem.names.modules(), problem.generators
    with StateGuard(modules, generators, double) as state, keep_swapped():
        yield ReproducibleLoss(problem, state, double=double)


@final
class ReproducibleLoss:
    """Every run starts from the same random numbers and the same state of the modules; values that the
    loss takes out of the graph can be held. A complex parameter is a leaf of real and imaginary parts.
    """

    def __init__(self, problem: Problem, state: StateGuard, *, double: bool) -> None:
        self._problem, self._state, self._double = problem, state, double
        self._batch = map_tensors(to_double, problem.batch) if double else problem.batch
        leaves = to_double(problem.leaves) if double else problem.leaves
        self._are_complex = [x.is_complex() for x in leaves]
        self._move_to([real(x) for x in leaves])

    def _move_to(self, leaves: Vector) -> None:
        self.leaves = leaves
        self.stops = StopGradientReplay()
        self._checkers: dict[int, Checker] = {}
        self._locator: Locator | None = None

    def f(self, *leaves: Tensor) -> Tensor:
        """The loss at leaves; modules and random number generators start from their first state."""
        with self._initial_state():
            return self._value(leaves)

    def _value(self, leaves: Iterable[Tensor]) -> Tensor:
        pairs = zip(leaves, self._are_complex, strict=True)
        values = [torch.view_as_complex(x) if is_complex else x for x, is_complex in pairs]
        return self._problem.value(values, self._batch)

    def run(self, inside: AbstractContextManager[Any] | None = None) -> Tensor:
        """The loss at its point, with a graph; `inside` is entered at the first state, which has the
        hooks of modules as they were."""
        with self._initial_state(), inside or nullcontext():
            return self._value(fresh_leaves(self.leaves, False))

    @contextmanager
    def _initial_state(self, module: nn.Module | None = None) -> Iterator[None]:
        """The context in which the loss runs, or one of its modules by itself."""
        self._state.begin(of=module)
        with ExitStack() as stack:
            if self._double:
                stack.enter_context(no_autocast())
                stack.enter_context(_KeepFloat64())
            yield

    def perturb(self) -> None:
        """Move to a perturbed point, if the loss is finite there."""
        random = torch.Generator("cpu").manual_seed(0)
        moved = [
            x + PERTURBATION * (scale(x) if x.any() else 1.0) * random_like(x, random)
            for x in self.leaves
        ]
        with suppress(Exception):  # the loss may accept its own parameters only
            if self.f(*fresh_leaves(moved, False)).isfinite():
                self._move_to(moved)

    def checker(self, seed: int = 0) -> Checker:
        """Checks routes along the random directions of this seed."""
        if seed not in self._checkers:
            self._checkers[seed] = Checker(self.f, self.leaves, self.stops, seed)
        return self._checkers[seed]

    def forward_flops(self) -> float:
        """Multiplications and additions of one forward pass as torch counts them; 0 where it cannot."""
        with suppress(Exception), FlopCounterMode(display=False) as counter:
            self.run()
            return float(counter.get_total_flops())
        return 0.0

    @property
    def locator(self) -> Locator:
        """Locates faults in the modules that the loss calls."""
        if self._locator is None:
            self._locator = Locator(self._problem.names, self.run, self._initial_state)
        return self._locator


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_DOUBLE = (torch.float64, torch.complex128)


class _KeepFloat64(TorchFunctionMode):
    """Casts of float64 tensors to narrower dtypes have no effect.

    Code such as `x.float()` or `softmax(x, dtype=torch.float32)` would round what is to be compared, or
    fail on float64 weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0] if args[0].dtype in _DOUBLE else func(*args, **kwargs)
        if any(x in _NARROW for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)):
            tensors = pytree.tensors((args, kwargs))
            if any(x.dtype in _DOUBLE for x in tensors):
                args = tuple(_float64_for_narrow(x) for x in args)
                kwargs = {name: _float64_for_narrow(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _float64_for_narrow(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
