"""Fingerprints of tensors, to notice changes of a loss's state between passes; and checksums of tensors
and calls, to compare processes."""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core.messages.closures import STATE, ClosureWalker
from hoglib._core.runtime.device_reads import DeviceRead
from hoglib._core.torch_api.pytree import tensors_in
from hoglib._core.torch_api.torch_modes import users_autocast
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import NondeterministicError

_foreach_norm = private("torch._foreach_norm")
# An algorithm with a kept graph compares the state at every eighth product only: the graph reads
# neither modules nor new tensors.
CHECKED_EVERY = 8


@final
class StateFingerprint:
    """The state that a loss depends on, as numbers: results of :meth:`now` differ if it has changed.

    Pointers and version counters do not suffice: fused optimizers, ``.data`` and NumPy write without
    changing them. A sum does not suffice either: a gradient step of a weight before a layer norm sums
    to zero. So the sum and the norm of each tensor are compared.

    Args:
        loss: The function; the tensors and modules that its code reaches are looked up once.
        leaves: Returns the parameters.
        data: Returns a pytree of further tensors, such as the current batch.
    """

    def __init__(
        self, loss: object, leaves: Callable[[], list[Tensor]], data: Callable[[], Any]
    ) -> None:
        self._leaves, self._data = leaves, data
        self.on_cpu = leaves()[0].is_cpu
        reached = ClosureWalker(loss, STATE).objects
        self._tensors = [x for x in reached if isinstance(x, Tensor)]
        self.roots = [x for x in reached if isinstance(x, nn.Module)]

    def now(self, values: bool = True) -> list[Any]:
        """The state: autocast, module attributes and hooks, data pointers and version counters; with
        values, the sums and norms of all tensors at the end."""
        found: list[Any] = [*self._leaves(), *self._tensors]
        found += [t for _, t in tensors_in("", self._data())]
        state: list[Any] = []
        pending: list[Any] = [*self.roots]
        seen = {id(None)}
        while pending:  # not `modules()`: its generators would take most of the time
            module = pending.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            found += module._parameters.values()
            found += module._buffers.values()
            pending += module._modules.values()
            state.append(id(module))
            for name, value in vars(module).items():
                if type(value) in _SETTINGS:
                    state += name, value
                elif type(value) in _FUNCTIONS:  # an activation, or a replaced forward
                    state += name, id(value)
                elif type(value) is OrderedDict and value:  # hooks, by their ids
                    state += name, *value
        tensors: list[Tensor] = []
        for t in {id(t): t for t in found if t is not None}.values():  # a shared tensor once
            # the local shard of a DTensor: no communication
            t = t.detach().to_local() if hasattr(t, "to_local") else t
            tensors.append(t)
            # inference tensors have no version counter
            state += t.data_ptr(), None if t.is_inference() else t._version
        # the user's autocast is part of the state; algorithms disable autocast for themselves
        with users_autocast():
            for kind in sorted({t.device.type for t in tensors} - {"meta"}):
                state.append(torch.is_autocast_enabled(kind))
            return [*state, sums_and_norms(tensors)] if values else state


@final
class ComparedState:
    """Compares the state of a loss between passes over data.

    The state must not change while an algorithm, such as a solver, runs. Sums and norms read every
    element, so an algorithm compares them at its first product and at its end, and in between only if
    pointers, version counters or attributes have changed.

    Attributes:
        algorithm: The name of the running algorithm; "" if none runs.
    """

    def __init__(self, name: str, fingerprint: StateFingerprint) -> None:
        self._name, self._fingerprint = name, fingerprint
        self._seen: list[Any] = [object()]  # the fingerprint after the last pass
        self._passes = 0  # passes since the state changed
        self.algorithm = ""
        # the fingerprint without values at the algorithm's last compared product
        self._cheap: list[Any] | None = None
        self._unchecked = 0  # products since the last compared one

    def changed(self, meanwhile: Callable[[], None]) -> bool:
        """Whether the state has changed since the last pass.

        meanwhile: Called while a device computes sums and norms.
        """
        self._unchecked = 0
        if self.algorithm:
            before, self._cheap = self._cheap, self._fingerprint.now(values=False)
            if before is not None:
                meanwhile()
                if before != self._cheap:
                    self.check()
                return False
        now = self._fingerprint.now()
        changed = now != self._seen
        meanwhile()
        if changed:
            self._seen, self._passes = now, 0
        return changed

    def note(self) -> None:
        """Take the fingerprint again after a pass, because forward may change the state (counters).

        Sums and norms are computed again after passes 1, 2, 4, 8, ... of an unchanged state, and if
        pointers, version counters or attributes have changed. On a device they are computed after each
        pass, because they delay nothing: the next pass reads its losses meanwhile.
        """
        self._passes += 1
        often = self._passes & (self._passes - 1) and self._fingerprint.on_cpu
        if not often or self._fingerprint.now(values=False) != self._seen[:-1]:
            self._seen = self._fingerprint.now()

    def may_skip(self) -> bool:
        """Whether an algorithm's next product with a kept graph needs no comparison; counts
        products."""
        if self._cheap is None:
            return False
        self._unchecked += 1
        return self._unchecked < CHECKED_EVERY

    @contextmanager
    def during(self, algorithm: str) -> Iterator[None]:
        """Inside, an algorithm of this name runs."""
        self.algorithm = algorithm
        try:
            yield
        finally:
            self.algorithm, self._cheap = "", None

    def check(self, cause: Exception | None = None) -> None:
        """Raise if the state has changed since :meth:`note`, or the algorithm's first product."""
        if self._cheap is not None and self._fingerprint.now() != self._seen:
            raise NondeterministicError(
                f"{self._name}.{self.algorithm}: expected parameters, buffers and data that stay the "
                "same until it ends, got others; call it again when they do not change."
            ) from cause

    def __getstate__(self) -> dict[str, Any]:
        """Drops the fingerprint: a copy's tensors have other pointers."""
        return {**vars(self), "_seen": [object()]}


# types of module attributes that a fingerprint contains
_SETTINGS = (bool, int, float, str, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def sums_and_norms(tensors: list[Tensor]) -> "Numbers":
    """The sums of all strided tensors, then the norms of all strided floating-point tensors."""
    found = [
        (torch.view_as_real(t) if t.is_complex() else t).detach()
        for t in tensors
        if t.layout is torch.strided and not t.is_quantized and t.device.type != "meta"
    ]
    floats: dict[torch.device, list[Tensor]] = {}
    for t in found:
        if t.is_floating_point():
            floats.setdefault(t.device, []).append(t)
    scalars = [*map(torch.sum, found)]
    for alike in floats.values():  # one kernel launch for each device
        scalars += _foreach_norm(alike)
    return Numbers(scalars)


class Numbers:
    """The values of scalar tensors: their copies to the CPU are started here, and read later.

    One copy for each device and dtype, so that a GPU does not wait at each number.
    """

    def __init__(self, scalars: list[Tensor]) -> None:
        alike: dict[Any, tuple[list[int], list[Tensor]]] = {}
        for i, x in enumerate(scalars):
            places, own = alike.setdefault((x.device, x.dtype), ([], []))
            places.append(i)
            own.append(x)
        self._values = [0.0] * len(scalars)
        # (indices in the values, copy) of values that were not read yet
        self._reads = [(places, DeviceRead(torch.stack(own))) for places, own in alike.values()]

    def read(self) -> list[float]:
        """The values in order."""
        while self._reads:
            places, read = self._reads.pop()
            for i, number in zip(places, read.numbers().double().tolist(), strict=True):
                self._values[i] = number
        return self._values

    def __getstate__(self) -> dict[str, Any]:
        """Reads first: a pending read's device event cannot be copied."""
        self.read()
        return vars(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers):
            return False
        mine, theirs = self.read(), other.read()
        # NaN counts as equal to NaN
        pairs = zip_longest(mine, theirs)
        return mine == theirs or all(x == y or (x != x and y != y) for x, y in pairs)


def checksum(numbers: Sequence[float]) -> float:
    """A number that changes if a number changes, or if two numbers change places."""
    values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    # sines of different integers differ, so an exchange of two numbers changes the sum
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64, device="cpu").sin()
    return float((values * weights).sum().nan_to_num())


def checksum_of_tensors(tensors: Sequence[Tensor]) -> float:
    """A number that changes if a tensor changes, or if two tensors change places."""
    return checksum(sums_and_norms(list(tensors)).read())


def checksum_of_rows(rows: Tensor) -> float:
    """A number that changes if an element of a matrix changes, or if two elements change places."""
    dtype = torch.promote_types(rows.dtype, torch.float32)  # float16 has no odd integers above 2048
    weights = torch.arange(1, rows.shape[1] + 1, dtype=dtype, device=rows.device).sin()
    return checksum((rows @ weights.to(rows.dtype)).tolist())


def checksum_of_call(*parts: object) -> float:
    """A number that changes with the arguments of a call, exact in float64.

    Options count by value, tensors by shape and dtype, losses by criterion, functions by name, other
    objects by class.
    """
    return float(zlib.crc32(repr([_call_part(x) for x in parts]).encode()))


def _call_part(x: Any) -> object:
    if type(x) in _SETTINGS:
        return x
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    if isinstance(x, FunctionType):
        return x.__qualname__
    if isinstance(x, partial):
        return _call_part(x.func), _call_part(x.args), _call_part(x.keywords)
    if isinstance(x, Mapping):
        return [(_call_part(k), _call_part(v)) for k, v in x.items()]
    if isinstance(x, list | tuple):
        return [_call_part(v) for v in x]
    own: Any = []
    if is_dataclass(x):
        own = [getattr(x, f.name) for f in fields(x) if f.compare]
    elif isinstance(x, nn.Module):  # a criterion
        own = {k: v for k, v in vars(x).items() if type(v) in _SETTINGS and k != "training"}
    elif hasattr(x, "_criterion"):  # a functional loss; its tensors have a checksum of their own
        own = x._criterion
    return type(x).__qualname__, _call_part(own)
