"""What a product depends on, so that a change of it is noticed.

Pointers and version counters do not tell enough: fused optimizers, `.data` and NumPy write past them.
Nor does a sum: the gradient of a weight before a layer norm sums to zero, and so does a step. A sum
and a norm are two readings of each tensor.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._batches import tensors_in

PLAIN = (bool, int, float, str, type(None))


class Origin:
    """The tensors, modules and switches behind a loss; `now()` is the same twice if they are."""

    def __init__(
        self, loss: Any, leaves: Callable[[], list[Tensor]], data: Callable[[], Any]
    ) -> None:
        self._leaves, self._data = leaves, data
        self._roots = list(_reached(loss))

    def now(self) -> list[Any]:
        tensors = [*self._leaves(), *(t for _, t in tensors_in("", self._data()))]
        modules = [m for root in self._roots if isinstance(root, nn.Module) for m in root.modules()]
        tensors += [root for root in self._roots if isinstance(root, Tensor)]
        settings: list[Any] = []
        for module in modules:
            tensors += [t for t in module._parameters.values() if t is not None]
            tensors += [t for t in module._buffers.values() if t is not None]
            settings.append(id(module))
            settings += [(k, v) for k, v in vars(module).items() if type(v) in PLAIN]
        tensors = list({id(t): t for t in tensors}.values())
        kinds = sorted({t.device.type for t in tensors} - {"meta"})
        autocast = [torch.is_autocast_enabled(kind) for kind in kinds]
        versions = [t._version for t in tensors if not t.is_inference()]
        pointers = [t.data_ptr() for t in tensors]
        return [*settings, *autocast, *pointers, *versions, *numbers(tensors)]


def numbers(tensors: list[Tensor]) -> list[float]:
    """The sum of each tensor, of those that can be added up, and the norm of those of floats."""
    found = []
    for t in tensors:
        if t.layout is torch.strided and not t.is_quantized and t.device.type != "meta":
            t = (torch.view_as_real(t) if t.is_complex() else t).detach()
            sizes = [torch.linalg.vector_norm(t)] if t.is_floating_point() else []
            found += [x.to("cpu", torch.float64) for x in (t.sum(), *sizes)]
    return torch.stack(found).tolist() if found else []


def _reached(function: Any, depth: int = 3) -> Iterator[Any]:
    """Modules and tensors that a function holds: as a model, bound, in its closure, as globals."""
    if isinstance(function, nn.Module | Tensor):
        yield function
        return
    held: list[Any] = [getattr(function, name, None) for name in ("model", "user_criterion")]
    if isinstance(function, partial):
        held += [function.func, *function.args, *function.keywords.values()]
    held.append(getattr(function, "__self__", None))
    if inspect.isfunction(function):
        held += [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        held += [function.__globals__.get(name) for name in function.__code__.co_names]
    for value in held:
        if isinstance(value, nn.Module | Tensor):
            yield value
        elif depth and (inspect.isfunction(value) or hasattr(value, "user_criterion")):
            yield from _reached(value, depth - 1)


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
