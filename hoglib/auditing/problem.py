"""What is audited: a loss, its parameters and a batch; and the loss as a scalar function of real leaves
that gives the same value in every run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, fresh_leaves
from hoglib._core.element_differences import random_like
from hoglib._core.finite_differences import to_double
from hoglib._core.module_names import ModuleNames
from hoglib._core.state import StateGuard
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import no_autocast, transforms_active
from hoglib.auditing.locator import Locator
from hoglib.auditing.routes import Checker, scale
from hoglib.auditing.stop_gradients import StopGradientReplay
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.verification.call import real

PROBLEM = "(loss, params, batch)"


class NamedProblem(NamedTuple):
    """A loss(params, batch) to audit; the name is empty where there is only one."""

    name: str
    loss: Any
    params: Any
    batch: Any


def problems(what: str, value: Any) -> list[NamedProblem]:
    """The problems in (loss, params, batch), in a list of such tuples, or in a dict of them by name.

    Raises ArgumentTypeError for anything else, ArgumentValueError for no problem at all.
    """
    named: dict[str, Any] = {"": value}
    if isinstance(value, Mapping):
        named = {str(name): problem for name, problem in value.items()}
    elif isinstance(value, list):
        named = {str(number): problem for number, problem in enumerate(value)}
    if not named:
        raise ArgumentValueError(f"{what}: expected at least one {PROBLEM}, got none.")
    for name, found in named.items():
        if isinstance(found, tuple) and len(found) == 3 and callable(found[0]):
            continue
        got = validation.describe(found)
        if isinstance(found, tuple):
            got = f"a tuple ({', '.join(type(part).__name__ for part in found)})"
        raise ArgumentTypeError(
            f"{what}{f'[{name}]' if name else ''}: expected {PROBLEM}, where loss is a function of "
            f"params and batch, a list of such tuples, or a dict of them by name, got {got}; for "
            "instance `return hoglib.functional_loss(model, criterion), "
            "hoglib.trainable_params(model), batch`."
        )
    return [NamedProblem(name, *problem) for name, problem in named.items()]


DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def check_arguments(loss: Any, params: Any, batch: Any) -> None:
    """Raises for a loss, parameters or a batch of the wrong kind."""
    validation.loss_function("loss", loss)
    if not isinstance(params, dict | list | tuple | Tensor):
        raise ArgumentTypeError(
            f"params: expected a dict of tensors by qualified name, or another pytree, got "
            f"{validation.describe(params)}; make one with `hoglib.trainable_params(model)`."
        )
    validation.parameters(params)
    if transforms_active():
        raise UnsupportedError(
            "audit: expected to be called outside of torch.func transforms, got called inside one; "
            "audit the function before it is transformed."
        )
    for path, x in zip(pytree.paths(params), pytree.leaves(params), strict=True):
        what = f"params[{path!r}]" if path else "params"
        if is_lazy(x):
            raise ArgumentValueError(
                f"{what}: expected a tensor with values, got one of a lazy module that has not run; "
                "call the model on a batch once."
            )
        if x.is_nested or x.layout is not torch.strided or x.is_meta or x.dtype not in DTYPES:
            kind = "a nested tensor" if x.is_nested else f"{validation.describe(x)} ({x.layout})"
            raise ArgumentTypeError(
                f"{what}: expected a dense tensor with values, of dtype "
                f"{', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {kind} on {x.device}; "
                "convert it here, and convert it back inside the loss."
            )
    for x in pytree.leaves(batch):
        if isinstance(x, Iterator | DataLoader):
            raise ArgumentTypeError(
                "batch: expected one batch that the loss can read many times, got "
                f"{validation.describe(x)}; pass list(...) of it, or of a DataLoader "
                "next(iter(loader))."
            )


@final
class Problem:
    """A loss, parameters and a batch as they were given to `audit`, with the names of the modules."""

    def __init__(self, loss: Callable[..., Tensor], params: Any, batch: Any) -> None:
        self.loss, self.batch = loss, batch
        self.originals, self.structure = pytree.flatten(params)
        # copies: the loss may change its parameters in place
        self.leaves: Vector = [x.detach().clone() for x in self.originals]
        self.paths = pytree.paths(params)
        self.names = ModuleNames(loss)
        for module in self.names.modules():
            tensors: list[Any] = [*module._parameters.values(), *module._buffers.values()]
            if any(map(is_lazy, tensors)):
                raise ArgumentValueError(
                    f"loss: expected modules with values, got {self.names.called(module)}, which is "
                    "lazy and has not run; call the model on a batch once."
                )

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators other than torch's own that the loss may draw from."""
        in_batch = [g for g in pytree.leaves(self.batch) if isinstance(g, torch.Generator)]
        return [*self.names.generators(), *in_batch]

    def value(self, leaves: Vector, batch: Any) -> Tensor:
        """The loss at leaves, on a copy of the batch, which the loss may change in place."""
        params = pytree.unflatten(list(leaves), self.structure)
        return validation.scalar("loss(params, batch)", self.loss(params, _copy_of_batch(batch)))


def _copy_of_batch(tree: Any) -> Any:
    """A copy with the same aliasing: a tensor that occurs twice is copied once."""
    copies: dict[int, Tensor] = {}

    def copy_of(x: Tensor) -> Tensor:
        if id(x) not in copies:
            # torch.func refuses requires_grad_() inside its transforms
            wanted = x.requires_grad and not transforms_active()
            copied = x.detach().clone()
            copies[id(x)] = copied.requires_grad_() if wanted else copied
        return copies[id(x)]

    return map_tensors(copy_of, tree)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, depth: int = 4) -> Any:
    """`function` applied to the tensors of a pytree, and of plain objects in it, which are then copied.

    depth: how many objects within objects are searched.
    """

    def map_leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        fields = getattr(x, "__dict__", None)
        if not fields or not depth or callable(x) or isinstance(x, type | nn.Module):
            return x
        found = {name: map_tensors(function, value, depth - 1) for name, value in fields.items()}
        before, after = pytree.leaves(fields), pytree.leaves(found)
        if len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True)):
            return x
        try:
            copied = copy(x)
            for name, value in found.items():
                object.__setattr__(copied, name, value)
        except Exception:  # the object cannot be copied
            return x
        return copied

    return pytree.map(map_leaf, tree)


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
