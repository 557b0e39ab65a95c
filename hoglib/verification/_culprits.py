"""Which of torch's own operations is at fault, where no custom Function is."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib import _tree
from hoglib.verification import _maps as maps
from hoglib.verification import _where as where
from hoglib.verification._call import Call, is_float
from hoglib.verification._compare import Bounds, in_forward, in_reverse, target
from hoglib.verification._differences import uniform
from hoglib.verification._subject import Subject
from hoglib.verification._triangles import one_triangle
from hoglib.verification._words import MODES, Mode
from hoglib.verification.derivatives import Stage, stage
from hoglib.verification.report import Row

BOUNDS = Bounds(1e-6, 1e-4)
MOST = 200  # calls
OWN = ("aten", "prim", "prims", "quantized", "_quantized", "torchvision", "mkldnn")


class _Calls(TorchFunctionMode):
    """The torch calls that something with a graph goes through, outermost only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], where.Place | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        graphed = any(is_float(x) and x.requires_grad for x in _tree.leaves((args, kwargs)))
        made = any(is_float(y) and y.requires_grad for y in _tree.leaves(result))
        if graphed and made and len(self.calls) < MOST:
            self.calls.append((func, _detached(args), _detached(kwargs), where.here()))
        return result


def _detached(tree: Any) -> Any:
    return _tree.map_tensors(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad and is_float(x)), tree
    )


def rows(subject: Subject, x: list[Tensor], wrong: list[str]) -> Iterator[Row]:
    """A row for each torch operation that is wrong by itself in a mode that is wrong."""
    with _Calls() as watch:
        subject.map(*(y.clone().requires_grad_() for y in x))
    seen: set[str] = set()
    for name in wrong:
        mode = next(mode for mode in MODES.values() if name.endswith(mode.title))
        for func, args, kwargs, place in watch.calls:
            called = getattr(func, "__name__", str(func))
            if f"{called} {mode.key}" in seen:
                continue
            seen.add(f"{called} {mode.key}")
            fault = _fault(func, args, kwargs, mode, 3 if name.startswith("third") else 2)
            if fault:
                at = f" at {place}" if place else ""
                library = _library(func)
                whose, mend = ("torch's own", "Use another mode, or another operation.")
                if library:
                    whose = f"the custom op {library}::"
                    mend = (
                        "See what its torch.library.register_autograd gets: setup_context must save "
                        "inputs and outputs themselves, not intermediates or detached copies, and "
                        "backward must be of differentiable torch operations."
                    )
                yield Row(
                    f"culprit: {called} in {mode.title}", "fail", None,
                    f"{whose} {called}{at} is at fault: its derivative in {mode.title} is wrong or "
                    f"missing: {fault}. {mend}".replace(":: ", "::"),
                )  # fmt: skip


def _library(func: Any) -> str:
    """The namespace of an op that is not torch's."""
    namespace = getattr(func, "namespace", "aten")
    return "" if namespace in OWN else str(namespace)


def _fault(func: Any, args: Any, kwargs: Any, mode: Mode, order: int) -> str:
    try:
        call = Call(lambda a, k: func(*a, **k), (args, kwargs), None)
        call.reseed, call.symmetric = True, one_triangle(call)
        which = [i for i, y in enumerate(call.recorded()) if is_float(y) and y.requires_grad]
        random = torch.Generator().manual_seed(5)
        f, x = call.map(which), call.point
        names = [f"argument {j}" for j in range(len(x))]
        first = Stage(f, x, [f"result {i}" for i in which], names)
        inner = stage(first, mode, order, lambda tensors: [uniform(t, random) for t in tensors])
        at = target(*inner, random)
    except Exception:  # judged by the mode below only
        return ""
    if mode.outer == "r":
        return in_reverse(at, BOUNDS, random).wrong
    return in_forward(at, BOUNDS, maps.func_push if mode.key == "ff" else maps.push).wrong
