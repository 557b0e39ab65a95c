"""What all entry points share that differentiate a user's function: its custom Functions are examined.

    with examined_functions("hvp"):
        value = func(params)        # a Function of the user's is applied: its arguments are noted
        ...                         # the derivatives that the entry point is for
                                    # at the end it is examined by itself, and a wrong one is told

A Function is examined once for each kind of arguments. The verdict is kept for the process.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core import torch_internals
from hoglib._core.source_location import warn
from hoglib._core.torch_internals import watching_functions
from hoglib._core.torch_modes import value_checks_on
from hoglib.errors import VerificationError
from hoglib.stand_ins.mode import on_wrong
from hoglib.verification.examination import Applied, Verdict, applied, examine
from hoglib.verification.subject import is_users

_VERDICTS: WeakKeyDictionary[type[Function], dict[Any, Verdict]] = WeakKeyDictionary()
_TOLD: WeakKeyDictionary[type[Function], set[str]] = WeakKeyDictionary()  # the entry points
# Ambient, because entry points call one another, also from within the user's function.
_THREAD = threading.local()


@contextmanager
def examined_functions(caller: str) -> Iterator[None]:
    """Examines the custom Functions of the user that are applied inside, and tells which are wrong.

    Within another one it does nothing: the outermost entry point tells. So it does in an examination.

    Args:
        caller: The entry point, as messages name it.
    Raises:
        VerificationError: at the end, for a wrong Function, inside `second_order(on_wrong="raise")`.
    """
    action = on_wrong()
    if action == "ignore" or getattr(_THREAD, "examining", False) or not value_checks_on():
        yield
        return
    met = _Met()
    _THREAD.examining = True
    try:
        with watching_functions(met.see):
            yield
        for (function, kinds), application in met.applied.items():
            verdict = _VERDICTS[function].get(kinds)
            if verdict is None:
                assert application is not None
                verdict = _VERDICTS[function][kinds] = examine(application)
            if verdict.is_told:
                _tell(caller, function, verdict, action)
    finally:
        _THREAD.examining = False


def forget_verdicts() -> None:
    """Forgets what is known of Functions, and what was told."""
    _VERDICTS.clear()
    _TOLD.clear()


@final
class _Met:
    """The Functions that are applied within one entry point, but for those that are known to be right.

    applied: by Function and kinds of arguments; None where the verdict is known.
    """

    def __init__(self) -> None:
        self.applied: dict[tuple[type[Function], Any], Applied | None] = {}

    def see(self, function: type[Function], args: tuple[Any, ...]) -> None:
        if function.__module__.startswith("hoglib.") or torch_internals.tracing():
            return
        if not torch.is_grad_enabled():
            return
        function, args, by = torch_internals.outside_transforms(function, args)
        if not any(by) or not is_users(function):
            return
        kinds = tuple(map(_kind, args, by))
        verdict = _VERDICTS.setdefault(function, {}).get(kinds)
        if verdict is not None and not verdict.is_told:
            return
        if (function, kinds) not in self.applied:
            known = verdict is not None
            self.applied[function, kinds] = None if known else applied(function, args, by)


def _kind(x: Any, needs_grad: bool) -> Any:
    """What a verdict depends on, of an argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.layout, x.device.type, x.dim(), needs_grad
    return x if x is None or isinstance(x, bool | str) else type(x)


def _tell(caller: str, function: type[Function], verdict: Verdict, action: str) -> None:
    """Raises, or warns once for a Function and an entry point."""
    text = f"{caller}: {verdict.text}"
    if action == "raise":
        raise VerificationError(text)
    told = _TOLD.setdefault(function, set())
    if caller not in told:
        told.add(caller)
        warn(text)
