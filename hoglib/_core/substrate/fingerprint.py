"""Whether what a loss depends on has changed since a pass over the data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core.messages.closures import STATE, ClosureWalker
from hoglib._core.runtime.device_reads import DeviceRead
from hoglib._core.torch_api.pytree import tensors_in
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import NondeterministicError

_foreach_norm = private("torch._foreach_norm")
CHECKED_EVERY = 8  # products of an algorithm: a kept graph reads neither modules nor new tensors


@final
class StateFingerprint:
    """Numbers that change when a loss would give another value: two of :meth:`now` are then unequal.

    Pointers and version counters do not tell enough: fused optimizers, ``.data`` and NumPy write past
    them. Nor does a sum: the gradient of a weight before a layer norm sums to zero, and so does a step.
    So the sum and the norm of each tensor are compared.

    Args:
        loss: The function; the tensors and modules that its code reaches are looked up once.
        leaves: Gives the parameters.
        data: Gives a pytree of further tensors, such as the current batch.
    """

    def __init__(
        self, loss: Any, leaves: Callable[[], list[Tensor]], data: Callable[[], Any]
    ) -> None:
        self._leaves, self._data = leaves, data
        reached = ClosureWalker(loss, STATE).objects
        self._tensors = [x for x in reached if isinstance(x, Tensor)]
        self.roots = [x for x in reached if isinstance(x, nn.Module)]

    def now(self, values: bool = True) -> list[Any]:
        """Autocast, settings of modules, pointers and versions; if asked for, sums and norms of all
        tensors."""
        tensors = [*self._leaves(), *(t for _, t in tensors_in("", self._data())), *self._tensors]
        parts = [part for root in self.roots for part in root.modules()]
        settings: list[Any] = []
        for module in parts:
            tensors += [t for t in module._parameters.values() if t is not None]
            tensors += [t for t in module._buffers.values() if t is not None]
            settings.append(id(module))
            settings += [(k, v) for k, v in vars(module).items() if type(v) in _SETTINGS]
        # tied weights and shared buffers once
        tensors = [_local_part(t) for t in {id(t): t for t in tensors}.values()]
        kinds = sorted({t.device.type for t in tensors} - {"meta"})
        autocast = [torch.is_autocast_enabled(kind) for kind in kinds]
        # inference tensors count no versions
        versions = [t._version for t in tensors if not t.is_inference()]
        pointers = [t.data_ptr() for t in tensors]
        numbers = [sums_and_norms(tensors)] if values else []
        return [*settings, *autocast, *pointers, *versions, *numbers]


@final
class ComparedState:
    """Compares the state of a loss from pass to pass.

    While an algorithm runs, the state must not change. Sums and norms read all numbers, so they are
    compared at the first pass and at the end only, and in between if pointers, versions or settings
    changed.
    """

    def __init__(self, name: str, fingerprint: StateFingerprint) -> None:
        self._name, self._fingerprint = name, fingerprint
        self._seen: list[Any] = [object()]  # the fingerprint after the last pass
        self.algorithm = ""  # the name of the one that runs
        self._cheap: list[Any] | None = None  # without values, while an algorithm runs
        self._unchecked = 0  # products since the state was compared

    def changed(self, meanwhile: Callable[[], None]) -> bool:
        """Whether the state has changed since the last pass.

        meanwhile: called while a device computes the numbers.
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
            self._seen = now
        return changed

    def note(self) -> None:
        """A pass ended: a forward may count its calls."""
        self._seen = self._fingerprint.now()

    def may_skip(self) -> bool:
        """Whether the next product, by a kept graph, needs no comparison."""
        if self._cheap is None:
            return False
        self._unchecked += 1
        return self._unchecked < CHECKED_EVERY

    @contextmanager
    def during(self, algorithm: str) -> Iterator[None]:
        """While an algorithm runs."""
        self.algorithm = algorithm
        try:
            yield
        finally:
            self.algorithm, self._cheap = "", None

    def check(self, cause: Exception | None = None) -> None:
        """Raise where the state has changed since the first product of the algorithm."""
        if self._cheap is not None and self._fingerprint.now() != self._seen:
            raise NondeterministicError(
                f"{self._name}.{self.algorithm}: expected parameters, buffers and data that stay the "
                "same until it ends, got others; call it again when they do not change."
            ) from cause

    def __getstate__(self) -> dict[str, Any]:
        """A copy has other tensors."""
        return {**vars(self), "_seen": [object()]}


def _local_part(tensor: Any) -> Tensor:
    """Of a DTensor what this process holds, without communication."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


_SETTINGS = (bool, int, float, str, type(None))


def sums_and_norms(tensors: list[Tensor]) -> "Numbers":
    """The sums of strided tensors, then the norms of those of floating point."""
    found = [
        (torch.view_as_real(t) if t.is_complex() else t).detach()
        for t in tensors
        if t.layout is torch.strided and not t.is_quantized and t.device.type != "meta"
    ]
    floats = [t for t in found if t.is_floating_point()]
    norms: list[Tensor] = []
    for device in dict.fromkeys(t.device for t in floats):  # in one launch each
        norms += _foreach_norm([t for t in floats if t.device == device])
    return Numbers([*(t.sum() for t in found), *norms])


class Numbers:
    """The values of scalar tensors, copied in one piece for each device and dtype: a GPU would wait at
    each read, and does not wait for a copy that is read later."""

    def __init__(self, scalars: list[Tensor]) -> None:
        alike: dict[Any, list[int]] = {}
        for i, x in enumerate(scalars):
            alike.setdefault((x.device, x.dtype), []).append(i)
        self._places = list(alike.values())
        self._reads = [DeviceRead(torch.stack([scalars[i] for i in p])) for p in self._places]

    def read(self) -> list[float]:
        """The values in order."""
        found: dict[int, float] = {}
        for places, read in zip(self._places, self._reads, strict=True):
            found.update(zip(places, read.numbers().double().tolist(), strict=True))
        return [found[i] for i in range(len(found))]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no event of a device, which cannot be copied."""
        self.read()
        return vars(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbers):
            return False
        mine, theirs = self.read(), other.read()
        # NaN is the same as NaN
        pairs = zip_longest(mine, theirs)
        return mine == theirs or all(x == y or (x != x and y != y) for x, y in pairs)


def checksum(numbers: Sequence[float]) -> float:
    """One number that changes with each of them, and with their order."""
    values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    # no two sines of integers are alike, so that an exchange of two numbers shows
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64, device="cpu").sin()
    return float((values * weights).sum().nan_to_num())


def checksum_of_tensors(tensors: Sequence[Tensor]) -> float:
    """A number that changes with each of the tensors."""
    return checksum(sums_and_norms(list(tensors)).read())


def checksum_of_rows(rows: Tensor) -> float:
    """A number that changes with each number in the rows."""
    dtype = torch.promote_types(rows.dtype, torch.float32)  # half counts to 2048 only
    weights = torch.arange(1, rows.shape[1] + 1, dtype=dtype, device=rows.device).sin()
    return checksum((rows @ weights.to(rows.dtype)).tolist())
