"""Finds numbers of lower precision that enter float64 maths."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib import _arguments as arguments
from hoglib import _tree
from hoglib.verification import _where as where
from hoglib.verification import contract
from hoglib.verification._call import is_float
from hoglib.verification._subject import Subject
from hoglib.verification.report import Row

WIDE = (torch.float64, torch.complex128)


class Watch(TorchFunctionMode):
    """`found` describes the first call that rounded float64 numbers, or met rounded ones, and where.

    A constant whose digits fit into half precision (1, 0.5, a mask) lost nothing and is not rounded;
    a Python number has no precision to judge.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.found:
            given = [x for x in _tree.leaves((args, kwargs)) if is_float(x)]
            results = [y for y in _tree.leaves(result) if is_float(y)]
            if any(y.dtype in WIDE for y in results):
                self._note(func, "met", [x for x in given if _rounded(x)])
            elif any(x.dtype in WIDE for x in given):
                self._note(func, "rounded float64 numbers to", [y for y in results if _rounded(y)])
        return result

    def _note(self, func: Any, did: str, culprits: list[Tensor]) -> None:
        if culprits:
            place = where.here()
            at = f" at {place}" if place else ""
            name = getattr(func, "__name__", str(func))
            self.found = f"`{name}` {did} {arguments.describe(culprits[0])}{at}"


def _rounded(tensor: Tensor) -> bool:
    if tensor.dtype in WIDE:
        return False
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    mantissa, _ = torch.frexp(values.detach().double())
    digits = (mantissa * 2**11).frac()  # those that half precision, which has 11, would lose
    return bool((values.isfinite() & (digits != 0)).any())


def row(subject: Subject) -> Row:
    """Whether a number of lower precision enters float64 maths."""
    name = "dtype: constants"
    if subject.dtype != torch.float64:
        return Row(name, "skip", None, "it was not checked in float64.")
    watch = Watch()
    with watch:
        subject.map(*subject.x)
    for app in subject.applications:
        try:
            contract.run_rules(app, watch)
        except Exception:  # other checks say it
            continue
    if watch.found:
        return Row(
            name, "fail", None,
            f"a constant or a step in float32 enters float64 maths: {watch.found}. Give it the "
            "dtype of the inputs, `torch.tensor(0.1, dtype=x.dtype)`, or use a Python number.",
        )  # fmt: skip
    return Row(name, "pass")
