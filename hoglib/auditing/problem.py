"""What is audited: a loss, its parameters and a batch; and that loss as a function that gives the same
value in every run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
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
from hoglib._core.finite_differences import to_double
from hoglib._core.module_names import ModuleNames
from hoglib._core.state import StateGuard
from hoglib._core.torch_internals import no_autocast, transforms_active
from hoglib.auditing.locator import Locator, ModuleStack, record_calls
from hoglib.auditing.route_checker import RouteChecker, normal, padding_rows, scale
from hoglib.auditing.routes import Route
from hoglib.auditing.stop_gradients import StopGradientReplay
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

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
    if _is_problem(value):
        return [NamedProblem("", *value)]
    if isinstance(value, Mapping):
        named = {str(name): problem for name, problem in value.items()}
    elif isinstance(value, list):
        named = {str(number): problem for number, problem in enumerate(value)}
    else:
        raise _not_a_problem(what, value)
    if not named:
        raise ArgumentValueError(f"{what}: expected at least one {PROBLEM}, got none.")
    for name, problem in named.items():
        if not _is_problem(problem):
            raise _not_a_problem(f"{what}[{name}]", problem)
    return [NamedProblem(name, *problem) for name, problem in named.items()]


def _is_problem(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and callable(value[0])


def _not_a_problem(what: str, value: Any) -> ArgumentTypeError:
    if isinstance(value, tuple):
        got = f"a tuple ({', '.join(type(part).__name__ for part in value)})"
    else:
        got = validation.describe(value)
    return ArgumentTypeError(
        f"{what}: expected {PROBLEM}, where loss is a function of params and batch, a list of such "
        f"tuples, or a dict of them by name, got {got}; for instance `return "
        "hoglib.functional_loss(model, criterion), hoglib.trainable_params(model), batch`."
    )


DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def check_arguments(loss: Any, params: Any, batch: Any) -> None:
    """Raises for a loss, parameters or a batch of the wrong kind."""
    if isinstance(loss, nn.Module):
        raise ArgumentTypeError(
            "loss: expected a function (params, batch) -> scalar, got the module "
            f"{type(loss).__name__}; make one with `hoglib.functional_loss(model, criterion)`."
        )
    validation.function("loss", loss)
    if not isinstance(params, dict | list | tuple | Tensor):
        raise ArgumentTypeError(
            f"params: expected a dict of tensors by qualified name, or another pytree, got "
            f"{validation.describe(params)}; make one with `hoglib.trainable_params(model)`."
        )
    validation.parameters(params)
    if isinstance(batch, DataLoader):
        raise ArgumentTypeError(
            "batch: expected one batch, got a DataLoader; pass `next(iter(loader))`."
        )
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
            kind = "a nested tensor" if x.is_nested else validation.describe(x)
            more = "" if x.is_nested else f" ({x.layout}, on {x.device})"
            raise ArgumentTypeError(
                f"{what}: expected a dense tensor with values, of dtype "
                f"{', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {kind}{more}; "
                "convert it here, and convert it back inside the loss."
            )
    for x in pytree.leaves(batch):
        if isinstance(x, Iterator):
            raise ArgumentTypeError(
                f"batch: expected one that the loss can read many times, got {validation.describe(x)}, "
                "which is empty after the first run; pass list(...) of it."
            )


def check_modules(names: ModuleNames) -> None:
    """Raises ArgumentValueError for a lazy module that has no values yet."""
    for module in names.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(x is not None and is_lazy(x) for x in tensors):
            raise ArgumentValueError(
                f"loss: expected modules with values, got {names.called(module)}, which is "
                "lazy and has not run; call the model on a batch once."
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

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators other than torch's own that the loss may draw from."""
        in_batch = [g for g in pytree.leaves(self.batch) if isinstance(g, torch.Generator)]
        return [*self.names.generators(), *in_batch]

    def padding_rows(self) -> dict[int, int]:
        """For each leaf that is the weight of an embedding with padding_idx, the row whose gradient is
        zero by definition."""
        index = {id(x): i for i, x in enumerate(self.originals)}
        found = [row for module in self.names.roots for row in padding_rows(module)]
        return {index[id(weight)]: row for _, weight, row in found if id(weight) in index}

    def value(self, leaves: Vector, batch: Any) -> Tensor:
        """The loss at leaves, on a copy of the batch, which the loss may change in place."""
        params = pytree.unflatten(list(leaves), self.structure)
        return validation.scalar("loss(params, batch)", self.loss(params, _copy_of_batch(batch)))


def _copy_of_batch(tree: Any) -> Any:
    """A copy with the same aliasing: a tensor that occurs twice is copied once."""
    copies: dict[int, Tensor] = {}

    def copy_of(x: Tensor) -> Tensor:
        if id(x) not in copies:
            copied = x.detach().clone()
            # torch.func refuses requires_grad_() inside its transforms
            wanted = x.requires_grad and not transforms_active()
            copies[id(x)] = copied.requires_grad_() if wanted else copied
        return copies[id(x)]

    return _map_tensors(copy_of, tree)


def _map_tensors(function: Callable[[Tensor], Tensor], tree: Any, depth: int = 4) -> Any:
    """`function` applied to the tensors of a pytree, and of plain objects in it, which are then copied.

    depth: how many objects within objects are searched.
    """

    def map_leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        fields = getattr(x, "__dict__", None)
        if not fields or not depth or callable(x) or isinstance(x, type | nn.Module):
            return x
        found = {name: _map_tensors(function, value, depth - 1) for name, value in fields.items()}
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


@final
class ReproducibleLoss:
    """A problem's loss as a scalar function of real leaves that gives the same value in every run.

    Every run starts from the same random numbers and the same state of the modules; values that the
    loss takes out of the graph can be replayed. A complex parameter is a leaf of real and imaginary
    parts. double: in float64, or in the dtype of the parameters. keep: the keys of routes whose
    products along the first direction are asked for again. On exit the state of the modules is
    restored.
    """

    def __init__(self, problem: Problem, *, double: bool, keep: Iterable[str] = ()) -> None:
        self._keep = set(keep)
        self._problem, self._double = problem, double
        self._is_complex = [x.is_complex() for x in problem.leaves]
        self.batch = _map_tensors(to_double, problem.batch) if double else problem.batch
        leaves = to_double(problem.leaves) if double else problem.leaves
        self.initial_leaves = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
        self.leaves = self.initial_leaves
        self.modules = ModuleStack(problem.names)
        self.stop_gradients = StopGradientReplay(lambda: self.modules.current)
        self._checkers: dict[int, RouteChecker] = {}
        self._locator: Locator | None = None

    def __enter__(self) -> "ReproducibleLoss":
        problem = self._problem
        self._padding = problem.padding_rows()
        self._state = StateGuard(problem.names.modules(), problem.generators, self._double)
        return self

    def __exit__(self, *error: Any) -> None:
        self._state.__exit__(*error)

    def f(self, *leaves: Tensor) -> Tensor:
        """The loss at leaves; modules and random number generators start from their first state."""
        pairs = zip(leaves, self._is_complex, strict=True)
        values = [torch.view_as_complex(x) if is_complex else x for x, is_complex in pairs]
        with self._initial_state(), self.modules.tracking():
            return self._problem.value(values, self.batch)

    @contextmanager
    def _initial_state(self, module: nn.Module | None = None) -> Iterator[None]:
        """The context in which the loss runs, or one of its modules by itself."""
        self._state.begin(of=module)
        with _in_float64() if self._double else nullcontext():
            yield

    def move_to_perturbed_point(self) -> None:
        """Perturb the leaves, if the loss is finite there."""
        random = torch.Generator("cpu").manual_seed(0)
        moved = [
            x + PERTURBATION * (scale(x) if x.any() else 1.0) * normal(x, random)
            for x in self.initial_leaves
        ]
        try:
            finite = bool(self.f(*fresh_leaves(moved, False)).isfinite())
        except Exception:  # the loss may accept its own parameters only
            finite = False
        if finite:
            self.move_to(moved)

    def move_to(self, leaves: Vector) -> None:
        """Evaluate at other leaves; results at the old ones are dropped."""
        self.leaves = leaves
        self._checkers.clear()
        self._locator = None

    def checker(self, seed: int = 0) -> RouteChecker:
        """Checks routes along the random direction of this seed."""
        if seed not in self._checkers:
            self._checkers[seed] = RouteChecker(
                self.f, self.leaves, self.stop_gradients, seed, self._padding
            )
            if not seed:
                self._checkers[seed].keep = self._keep
        return self._checkers[seed]

    def product(self, route: Route) -> Vector | None:
        """The product of a route along the first direction, or None where it raises."""
        try:
            return self.checker().product(route)
        except Exception:  # reported in the row of the route
            return None

    def draws_differ_in_transforms(self) -> bool:
        """Whether the loss has another value under torch.func, because it draws other random
        numbers."""
        leaves, v = tuple(self.leaves), tuple(self.checker().v)
        with suppress(Exception):
            grad_and_value = torch.func.grad_and_value(self.f)
            value = self.f(*leaves)
            inside = grad_and_value(*leaves)[1], torch.func.jvp(grad_and_value, leaves, v)[0][1]
            return not all(torch.allclose(value, other) for other in inside)
        return False

    def forward_flops(self) -> float:
        """Multiplications and additions of one forward pass as torch counts them; 0 where it cannot."""
        with suppress(Exception), FlopCounterMode(display=False) as counter:
            self.f(*fresh_leaves(self.leaves, False))
            return float(counter.get_total_flops())
        return 0.0

    @property
    def locator(self) -> Locator:
        """Locates faults in the modules that the loss calls."""
        if self._locator is None:

            def run() -> Tensor:
                return self.f(*fresh_leaves(self.leaves, False))

            root = record_calls(self._problem.names, run)
            self._locator = Locator(root, run, self._initial_state)
        return self._locator


_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_DOUBLE = (torch.float64, torch.complex128)


@contextmanager
def _in_float64() -> Iterator[None]:
    """Autocast is off, and casts of float64 tensors to narrower dtypes have no effect.

    Code such as `x.float()` or `softmax(x, dtype=torch.float32)` would round what is to be compared, or
    fail on float64 weights.
    """
    with no_autocast(), _KeepFloat64():
        yield


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0] if args[0].dtype in _DOUBLE else func(*args, **kwargs)
        if any(x in _NARROW for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)):
            tensors = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, Tensor)]
            if any(x.dtype in _DOUBLE for x in tensors):
                args = tuple(_float64_for_narrow(x) for x in args)
                kwargs = {name: _float64_for_narrow(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)


def _float64_for_narrow(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
