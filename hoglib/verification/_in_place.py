"""Whether a Function changes what it was given: inputs, incoming gradients, saved tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib import _tree
from hoglib.verification import _plain as plain
from hoglib.verification import _where as where
from hoglib.verification._application import Application
from hoglib.verification._copies import same
from hoglib.verification._plain import Run
from hoglib.verification._slots import kind_of
from hoglib.verification.report import Row

IN_PLACE = (
    "Work on a new tensor ({example}). What is changed belongs to the caller: to other branches of the "
    "graph, and to the second backward pass."
)


class Mutation(NamedTuple):
    """A tensor that was changed, and the call that did it, if that was seen."""

    name: str
    place: where.Place | None


class _InPlace(TorchFunctionMode):
    """Notes where calls in place write, by the storage that they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, where.Place | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        out = (kwargs or {}).get("out")
        written = [x for x in _tree.leaves(out) if isinstance(x, Tensor)]
        in_place = (name.endswith("_") and not name.startswith("__")) or name in (
            "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__",
        )  # fmt: skip
        if in_place and args and isinstance(args[0], Tensor):
            written.append(args[0])
        for x in written:
            self.places.setdefault(_storage(x), where.here())
        return func(*args, **(kwargs or {}))


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else id(x)


class Snapshot:
    """Tensors as they were, to tell later which of them were changed."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._was = {
            name: (x, x._version, x.detach().clone())
            for name, x in tensors.items()
            if isinstance(x, Tensor)
        }

    def changed(self, places: dict[int, where.Place | None]) -> list[Mutation]:
        return [
            Mutation(name, places.get(_storage(x)))
            for name, (x, version, value) in self._was.items()
            if x._version != version or not same(x, value)
        ]


def in_place(app: Application) -> list[Row]:
    torch.manual_seed(0)
    args = app.fresh()
    inputs = Snapshot({app.name(i): x for i, x in enumerate(args)})
    with _InPlace() as watch:
        run = app.run(args)
    declared = {app.name(i) for i, x in enumerate(args) if _among(x, run.record.dirty)}
    forward = [m for m in inputs.changed(watch.places) if m.name not in declared]
    differentiated = {app.name(i) for i in app.by}

    grads = run.incoming()
    given = Snapshot({f"grad_output {k}": g for k, g in enumerate(grads)})
    saved = Snapshot(
        {
            f"{label} ({_name_of(app, run, value)})": value
            for label, slot in run.record.slots().items()
            for value in plain.tensors(slot)
        }
    )
    again = Snapshot({app.name(i): x for i, x in enumerate(args)})
    with _InPlace() as watch:
        plain.backward(app.function, run.record, grads)
    gradients, kept = given.changed(watch.places), saved.changed(watch.places)
    late = again.changed(watch.places)
    return [
        _mutated("in-place: inputs", "forward", forward, differentiated, "`x.mul(2)`, not `x.mul_(2)`",
                 " If it is meant, declare it with ctx.mark_dirty and return it."),
        _mutated("in-place: grad_output", "backward", gradients, None, "`g * x`, not `g.mul_(x)`"),
        _mutated("in-place: saved tensors", "backward", kept or late, None,
                 "`x * 2`, not `x.mul_(2)`"),
    ]  # fmt: skip


def _mutated(
    name: str, by: str, changes: list[Mutation], differentiated: set[str] | None, example: str,
    also: str = "",
) -> Row:  # fmt: skip
    if not changes:
        return Row(name, "pass")
    what = name.removeprefix("in-place: ").removesuffix("s")
    listed = "; ".join(m.name + (f", at {m.place}" if m.place else "") for m in changes)
    text = f"{by} changes {_article(what)} in place (in-place): {listed}. "
    text += IN_PLACE.format(example=example) + also
    only_buffers = differentiated is not None and not any(m.name in differentiated for m in changes)
    return Row(name, "warn" if only_buffers else "fail", None, text)


def _article(what: str) -> str:
    return {"input": "its input", "grad_output": "grad_output, the incoming gradient,"}.get(
        what, f"a {what}"
    )


def _among(x: Any, others: Sequence[Any]) -> bool:
    return any(x is other for other in others)


def _name_of(app: Application, run: Run, value: Any) -> str:
    return kind_of(value, run, tuple(app.name(i) for i in range(len(run.inputs))))[1]
