"""What a custom Function must do, and not do, besides computing the right numbers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from hoglib import _tree
from hoglib.verification import _plain as plain
from hoglib.verification import _where as where
from hoglib.verification._call import is_float
from hoglib.verification._devices import Watch as DeviceWatch
from hoglib.verification._differences import largest
from hoglib.verification._plain import Run
from hoglib.verification._subject import Application
from hoglib.verification.doctor import kind_of
from hoglib.verification.report import Row

UNSUMMED = (
    "Sum it back over the broadcast dimensions, `grad.sum_to_size({bare}.shape)`: autograd does so "
    "for gradients that are too large, but only where the shapes allow it, and after the full size "
    "was computed."
)
IN_PLACE = (
    "Work on a new tensor ({example}). What is changed belongs to the caller: to other branches of the "
    "graph, and to the second backward pass."
)
SETUP = (
    "Its forward takes ctx, which torch.func (grad, vmap, jvp, hessian) refuses. Split it: "
    "`forward(*inputs)` without ctx, and `setup_context(ctx, inputs, output)`, which saves."
)
ATTRIBUTE = (
    "Save it with ctx.save_for_backward, which frees it after backward and notices changes in place; "
    "an output on ctx is a reference cycle and leaks its graph."
)


class Mutation(NamedTuple):
    """A tensor that was changed, and the call that did it, if that was seen."""

    name: str
    place: where.Place | None


def check(app: Application, *, surrogate: bool = False) -> list[Row]:
    """The contract of one Function, from running it as plain functions."""
    rows = [_setup_context(app.function)]
    try:
        with torch.no_grad():
            rows += [*_gradients(app), *_in_place(app), *_context(app)]
            rows += [] if surrogate else [_linear(app)]
            rows += [_needs_input_grad(app), _device(app)]
    except Exception as error:  # the derivatives say what it means under autograd
        place = where.of_error(error)
        at = f" at {place}" if place else ""
        rows.append(
            Row("contract", "skip", None, f"not run as a plain function: {_short(error)}{at}.")
        )
    return rows


def _setup_context(function: type[Function]) -> Row:
    if plain.is_classic(function):
        return Row(
            "setup_context", "warn", None, f"{function.__name__} has no setup_context. {SETUP}"
        )
    return Row("setup_context", "pass")


def incoming(run: Run, random: torch.Generator | None = None) -> list[Tensor | None]:
    """A gradient for each output, as autograd gives them."""
    random = random or torch.Generator().manual_seed(2)
    grads: list[Tensor | None] = []
    for y in run.outputs:
        if not isinstance(y, Tensor):
            grads.append(None)
        elif is_float(y) and not run.record.is_silent(y):
            parts = torch.randn(y.shape, generator=random, dtype=torch.float64)
            grads.append(parts.to(y.device, y.dtype))
        else:
            grads.append(torch.zeros_like(y) if run.record.materialize else None)
    return grads


def run_rules(app: Application, watch: AbstractContextManager[Any]) -> None:
    """forward, backward and jvp as plain functions, each under a watch."""
    torch.manual_seed(0)
    args = app.fresh()
    with torch.no_grad():
        with watch:
            run = app.run(args)
        grads = incoming(run)
        with watch:
            plain.backward(app.function, run.record, grads)
        if plain.offers_jvp(app.function):
            tangents = [
                torch.ones_like(x) if i in app.by else None for i, x in enumerate(run.inputs)
            ]
            with watch:
                plain.jvp(app.function, run.record, tangents)


# Number, shape, dtype and device of the gradients.


def _gradients(app: Application) -> list[Row]:
    run = _seeded(app)
    returned = plain.backward(app.function, run.record, incoming(run))
    number = _number(app, run, returned)
    if number.status == "fail":
        return [number]
    faults: dict[str, list[str]] = {"shape": [], "dtype": [], "device": []}
    for i, (x, grad) in enumerate(zip(run.inputs, returned, strict=False)):
        if i not in app.by or not isinstance(grad, Tensor):
            continue
        name = _name(app, i)
        if grad.shape != x.shape:
            faults["shape"].append(_shape(name, x, grad))
        if grad.dtype != x.dtype:
            faults["dtype"].append(
                f"the gradient of {name} is {grad.dtype}, and {name} {x.dtype}: autograd casts it, "
                f"and what was rounded is gone. Make constants with `dtype={name.strip('`')}.dtype`."
            )
        if grad.device != x.device:
            faults["device"].append(
                f"the gradient of {name} is on {grad.device}, and {name} on {x.device}."
            )
    return [
        number,
        *(
            Row(f"gradients: {what}", "fail" if texts else "pass", None, " ".join(texts))
            for what, texts in faults.items()
        ),
    ]


def _number(app: Application, run: Run, returned: Sequence[Any]) -> Row:
    name = "gradients: number"
    inputs, given = len(run.inputs), len(returned)
    extra = [grad for grad in returned[inputs:] if grad is not None]
    if given < inputs or extra:
        return Row(
            name, "fail", None,
            f"the wrong number of gradients: backward returns {given}, and forward has {inputs} "
            f"inputs. Return one for each input in their order, None for what has no gradient.",
        )  # fmt: skip
    for i, grad in enumerate(returned[:inputs]):
        x = run.inputs[i]
        if grad is not None and not isinstance(grad, Tensor):
            return Row(
                name, "fail", None,
                f"the gradient of {_name(app, i)} is no tensor but {type(grad).__name__}; return a "
                "tensor, or None.",
            )  # fmt: skip
        if grad is not None and not isinstance(x, Tensor):
            return Row(
                name, "fail", None,
                f"backward returns a gradient for {_name(app, i)}, which is no tensor; return None in "
                "its place. Are the gradients in the order of the inputs?",
            )  # fmt: skip
    return Row(name, "pass")


def _shape(name: str, x: Tensor, grad: Tensor) -> str:
    bare = name.strip("`")
    text = f"the gradient of {name} has shape {tuple(grad.shape)}, and {name} {tuple(x.shape)}."
    if tuple(x.shape) != () and tuple(grad.shape) == tuple(reversed(x.shape)):
        return f"{text} It is transposed: return its transpose."
    if _expands(x.shape, grad.shape):
        return f"{text} The sum over broadcast dimensions is missing. " + UNSUMMED.format(bare=bare)
    if _expands(grad.shape, x.shape):
        return (
            f"{text} It was summed over too many dimensions; expand it, "
            f"`grad.expand({bare}.shape)`, or sum over fewer."
        )
    return f"{text} A gradient has the shape of its input."


def _expands(small: Sequence[int], large: Sequence[int]) -> bool:
    if len(small) > len(large):
        return False
    pairs = zip(reversed(small), reversed(large), strict=False)
    return all(a in (1, b) for a, b in pairs)


def _linear(app: Application) -> Row:
    """B(2 g) = 2 B(g): a gradient is linear in the incoming one."""
    name = "gradients: linear"
    run = _seeded(app)
    grads = incoming(run)

    def returned(factor: float) -> list[Tensor]:
        torch.manual_seed(0)
        scaled = [None if g is None else factor * g for g in grads]
        found = plain.backward(app.function, _seeded(app).record, scaled)
        return [g for g in found if isinstance(g, Tensor) and is_float(g)]

    once, twice = returned(1.0), returned(-2.0)
    if all(_close(-2.0 * a, b) for a, b in zip(once, twice, strict=True)):
        return Row(name, "pass")
    return Row(
        name, "fail", None,
        "backward is not linear in grad_output: twice the incoming gradient is not twice the result. "
        "Is grad_output ignored, or used twice? If it is clipped on purpose, pass surrogate=True.",
    )  # fmt: skip


def _close(a: Tensor, b: Tensor) -> bool:
    size = max(largest(a), largest(b), 1e-300)
    return a.shape == b.shape and largest(a - b) <= torch.finfo(a.dtype).eps ** 0.5 * size


# Changes in place.


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
            if x._version != version or not _equal(x, value)
        ]


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num())) if is_float(a) else torch.equal(a, b)


def _in_place(app: Application) -> list[Row]:
    torch.manual_seed(0)
    args = app.fresh()
    inputs = Snapshot({_name(app, i): x for i, x in enumerate(args)})
    with _InPlace() as watch:
        run = app.run(args)
    declared = {_name(app, i) for i, x in enumerate(args) if _among(x, run.record.dirty)}
    forward = [m for m in inputs.changed(watch.places) if m.name not in declared]
    differentiated = {_name(app, i) for i in app.by}

    grads = incoming(run)
    given = Snapshot({f"grad_output {k}": g for k, g in enumerate(grads)})
    saved = Snapshot(
        {
            f"{label} ({_name_of(app, run, value)})": value
            for label, slot in run.record.slots().items()
            for value in plain.tensors(slot)
        }
    )
    again = Snapshot({_name(app, i): x for i, x in enumerate(args)})
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
    return kind_of(value, run, tuple(_name(app, i) for i in range(len(run.inputs))))[1]


# What is asked for, and what is kept.


def _needs_input_grad(app: Application) -> Row:
    name = "needs_input_grad"
    if len(app.by) < 2:
        return Row(name, "skip", None, "it is differentiated by one input only.")
    idle = []
    for i in app.by:
        alone = app._replace(by=tuple(j for j in app.by if j != i))
        run = _seeded(alone)
        grads = incoming(run)
        returned = plain.backward(app.function, run.record, grads)
        free = i < len(returned) and any(returned[i] is g for g in grads)
        if i < len(returned) and isinstance(returned[i], Tensor) and not free:
            idle.append(_name(app, i))
    if not idle:
        return Row(name, "pass")
    first = app.by.index(next(i for i in app.by if _name(app, i) == idle[0]))
    return Row(
        name, "warn", None,
        f"needs_input_grad is ignored: backward computes a gradient for {', '.join(idle)} also when "
        f"none is needed: wasted work. Ask first: `if ctx.needs_input_grad[{app.by[first]}]:`.",
    )  # fmt: skip


def _context(app: Application) -> list[Row]:
    run = _seeded(app)
    names = tuple(_name(app, i) for i in range(len(run.inputs)))
    attributes = []
    for attribute, value in run.record.attributes.items():
        for tensor in plain.tensors(value)[:1]:
            _, what = kind_of(tensor, run, names)
            place = run.record.noted(f"ctx.{attribute}").place
            attributes.append(f"ctx.{attribute} ({what}{f', {place}' if place else ''})")
    copies = []
    for label, value in run.record.slots().items():
        kind, what = kind_of(value, run, names)
        if kind == "copy":
            copies.append(f"{label} is {what}")
    return [
        Row(
            "ctx: attributes",
            "warn" if attributes else "pass",
            None,
            f"a tensor is kept as an attribute: {'; '.join(attributes)}. {ATTRIBUTE}"
            if attributes
            else "",
        ),
        Row(
            "ctx: copies",
            "warn" if copies else "pass",
            None,
            f"a clone is saved: {'; '.join(copies)}. Save the tensor itself: a clone costs memory, and "
            "has no graph, so that a second derivative through it is lost."
            if copies
            else "",
        ),
    ]


def _device(app: Application) -> Row:
    watch = DeviceWatch()
    run_rules(app, watch)
    if not watch.found:
        return Row("device", "pass")
    return Row(
        "device", "warn", None,
        f"a device is hard-coded: {watch.found}. It fails with inputs on another device; make new "
        "tensors with `torch.zeros_like(x)` or `device=x.device`.",
    )  # fmt: skip


def _seeded(app: Application) -> Run:
    torch.manual_seed(0)
    return app.run(app.fresh())


def _name(app: Application, i: int) -> str:
    return app.names[i] if i < len(app.names) else f"input {i}"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
