"""What a benchmark is made of: methods that compute the same thing, and the truth they are held to."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.benchmarks.problems import Problem


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
    error |result - truth| / |truth| of a right method.
    """

    value: Callable[[Problem], Tensor]
    tolerance: Callable[[Problem], float] = lambda _: 1e-4
    seen: Callable[[Problem, Tensor], Tensor] = lambda _, result: result


@dataclass(frozen=True)
class Method:
    """One way to compute it.

    make(problem) prepares what the user has at hand and returns a call, which is what is timed. The
    call returns a tensor [P] or [P, k], a tuple or dict with one leaf a parameter (and k as last
    dimension), an iterator over k products, or `Eigenvalues`. ours: drawn in colour. truth: a name in
    TRUTHS. beside: another method of the workload, whose time is a second unit. few: it keeps nothing
    from one vector to the next, so that two vectors tell what each costs. compiled: the first call, and
    what it takes to get there, is reported too.
    """

    make: Callable[[Problem], Callable[[], Any]]
    ours: bool = False
    truth: str = "hessian"
    beside: str | None = None
    few: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Workload:
    """Methods side by side: title, the networks it runs on, k vectors, the methods by name.

    per_vector: whether times are per vector. memory: whether peaks are taken, of tensors; resident: of
    the process.
    """

    title: str
    problems: tuple[str, ...]
    methods: Mapping[str, Method]
    vectors: int = 1
    per_vector: bool = False
    memory: bool = False
    resident: bool = False


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
    tensor = result if isinstance(result, Tensor) else torch.from_numpy(_writable(result))
    return tensor.detach().double().reshape(-1, vectors)


def _writable(array: Any) -> Any:
    return importlib.import_module("numpy").array(array)
