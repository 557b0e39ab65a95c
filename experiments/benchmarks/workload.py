"""What a benchmark is made of: methods that compute the same thing, and the truth they are held to."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Call = Callable[[], Any]
Column = Literal["", "hoglib", "compiled", "other", "jax"]
Memory = Literal["", "allocated", "resident"]


@dataclass(frozen=True)
class Point:
    """What is differentiated, where: a network at its weights; its data are tensors of subclasses."""

    model: nn.Module

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def apart(self) -> Self:
        """The same with a model of its own, whose `.grad` nobody else sees."""
        return replace(self, model=deepcopy(self.model))

    def double(self) -> Self:
        return self._cast(lambda x: x.double() if x.is_floating_point() else x, torch.float64)

    def to(self, device: torch.device) -> Self:
        return self._cast(lambda x: x.to(device), device)

    def _cast(self, each: Callable[[Tensor], Tensor], whole: Any) -> Self:
        data = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "model"}
        model = deepcopy(self.model).to(whole)
        return replace(self, model=model, **tree_map_only(Tensor, each, data))


class Missing(Exception):
    """A method needs what is not here; the text is what to report."""


class Eigenvalues(NamedTuple):
    """What an eigensolver found, and the products with the matrix that it took."""

    values: Tensor
    products: int | None


@dataclass(frozen=True)
class Truth:
    """What the result of a method should be, computed in float64 by hand.

    value: the right result. seen: what of a result [P, k] is compared with it. tolerance: the largest
    error |result - truth| / |truth| of a right method. apart: so many of the first rows are compared by
    themselves, as a loss is that stands before its gradient.
    """

    value: Callable[[Any], Tensor]
    tolerance: Callable[[Any], float] = lambda _: 1e-4
    seen: Callable[[Any, Tensor], Tensor] = lambda _, result: result
    apart: int = 0


@dataclass(frozen=True)
class Method:
    """One way to compute it.

    make(point) prepares what the user has at hand and returns a call, which is what is timed. The call
    returns a tensor [P] or [P, k], a tuple or dict with one leaf a parameter (and k as last dimension),
    an iterator over k products, or `Eigenvalues`. ours: drawn in colour. truth: a name in TRUTHS.
    beside: other methods of the workload; the time of the fastest is a second unit. few: it keeps
    nothing from one vector to the next, so that two vectors tell what each costs. compiled: the first
    call, and what it takes to get there, is reported too; nothing is found in a cache. library: what is
    imported before. column: where it stands in the summary, by the name `called`. problems: where it
    runs, if not everywhere.
    """

    make: Callable[[Any], Call]
    ours: bool = False
    truth: str = "hessian"
    beside: tuple[str, ...] = ()
    few: bool = False
    compiled: bool = False
    library: str = ""
    column: Column = ""
    called: str = ""
    problems: tuple[str, ...] | None = None


class Unit(NamedTuple):
    """What times are given in: its name, and the call that takes one."""

    name: str
    make: Callable[[Any], Call]


@dataclass(frozen=True)
class Workload:
    """Methods side by side.

    problems: what it runs on; make(name, vectors, small) makes one of them, with k vectors. quick:
    those that take minutes with all methods. by_hand: the method without a library that the summary
    compares with. unit: of times, if it is not that method. page: where its long table stands. brief:
    its name in the summary; without one it is not there. per_vector: whether times are per vector.
    memory: whether peaks are taken, and of what: of what torch's allocator gives, compiled code
    included, or of the process. checked(name, small): on what methods are compared with the truth, if
    not on the problem. seconds: no new round beyond these.
    """

    title: str
    problems: tuple[str, ...]
    methods: Mapping[str, Method]
    make: Callable[[str, int, bool], Any]
    by_hand: str
    quick: tuple[str, ...] = ()
    unit: Unit | None = None
    page: str = "curvature"
    brief: str = ""
    vectors: int = 1
    per_vector: bool = False
    memory: Memory = ""
    checked: Callable[[str, bool], Any] | None = None
    seconds: float = 10.0

    def on(self, problem: str, device: str = "cpu") -> "Workload":
        """With the methods that run there: on a GPU hoglib's, and the one by hand."""
        kept = {
            name: method
            for name, method in self.methods.items()
            if (method.problems is None or problem in method.problems)
            and (device == "cpu" or method.ours or name == self.by_hand)
        }
        return replace(self, methods=kept)


def peer(name: str) -> Any:
    """A module of another library. Raises Missing where it is not installed or does not import."""
    root = name.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        raise Missing(f"missing: {root} is not installed")
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Missing(f"does not import: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def finished(result: Any, vectors: int) -> Any:
    """What a call returned, an iterator run for its first products and made a list of them."""
    return list(islice(result, vectors)) if isinstance(result, Iterator) else result


def columns(result: Any, vectors: int) -> Tensor:
    """The result of a call, run through `finished`, as [P, k] in float64."""
    if isinstance(result, Eigenvalues):
        return result.values.detach().double().reshape(-1, 1)
    if isinstance(result, list):
        return torch.cat([columns(one, 1) for one in result], 1)
    if isinstance(result, dict):
        result = tuple(result.values())
    if isinstance(result, tuple):
        return torch.cat([columns(leaf, vectors) for leaf in result])
    # JAX's arrays are not writable, a copy is
    tensor = result if isinstance(result, Tensor) else torch.from_numpy(np.array(result))
    return tensor.detach().double().reshape(-1, vectors)
