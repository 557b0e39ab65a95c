"""The contract of a custom Function with autograd, apart from correct numbers.

forward, backward and jvp run as plain functions, partly under a mode that sees every torch call.
Checked are the number, shape, dtype and device of gradients, their linearity in the incoming gradient,
the contents of ctx, unneeded gradients, and in-place changes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hoglib._core.messages.closures import STATE, ClosureWalker
from hoglib._core.modules.state import is_freed, put_back, same
from hoglib._core.numerics.element_differences import max_abs
from hoglib._core.runtime import source_location
from hoglib._core.runtime.source_location import error_line
from hoglib._core.substrate.detachment import tensors_written
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_internals import backward_rule, storage_id
from hoglib.verification import function_rules
from hoglib.verification.comparison import Discrepancies, largest_difference
from hoglib.verification.function_rules import kind_of
from hoglib.verification.maps import as_function, seed_all
from hoglib.verification.precision import PrecisionWatch
from hoglib.verification.report import Row, Rows, finding
from hoglib.verification.subject import Application, Subject

SETUP = (
    "Its forward takes ctx, which torch.func (grad, vmap, jvp, hessian) refuses. Split it: "
    "`forward(*inputs)` without ctx, and `setup_context(ctx, inputs, output)`, which saves."
)

ATTRIBUTE = (
    "Save it with ctx.save_for_backward, which frees it after backward and notices changes in place; "
    "an output on ctx is a reference cycle and leaks its graph."
)

CLONE = (
    "Save the tensor itself: a clone costs memory, and has no graph, so that a second derivative "
    "through it is lost."
)

UNSUMMED = (
    "Sum it back over the broadcast dimensions, `grad.sum_to_size({bare}.shape)`: autograd does so "
    "for gradients that are too large, but only where the shapes allow it, and after the full size "
    "was computed."
)


def check(app: Application, *, surrogate: bool = False) -> list[Row]:
    """The rows about one Function; it runs as plain functions."""
    classic = function_rules.is_classic(app.function)
    text = f"{app.function.__name__} has no setup_context. {SETUP}" if classic else ""
    rows = [finding("setup_context", text, "warn")]
    problems = []
    checks = [check_gradients, check_in_place, check_grad_fields, check_context, check_linearity]
    for part in (*checks, check_needs, check_device):
        if surrogate and part is check_linearity:  # it may clip the incoming gradient on purpose
            continue
        try:
            with torch.no_grad():
                rows += list(part(app))
        except Exception as error:  # the derivative checks report errors under autograd
            problems.append(str(error_line(error) or ""))
    if problems:
        places = "; ".join(filter(None, dict.fromkeys(problems)))
        at = f" (it raises at {places})" if places else ""
        text = f"not judged: it does not run as plain functions, outside of autograd{at}."
        rows.append(Row("contract", "skip", None, text))
    return rows


def check_gradients(app: Application) -> Rows:
    run = app.seeded()
    returned, count = app.backward(run), len(run.inputs)
    odd = [
        f"a {type(grad).__name__} for {app.name(i)}, a {type(x).__name__}"
        for i, (grad, x) in enumerate(zip(returned, run.inputs, strict=False))
        if grad is not None and not (isinstance(grad, Tensor) and isinstance(x, Tensor))
    ]
    number = ""
    if len(returned) < count or odd or any(g is not None for g in returned[count:]):
        also = f", among them {', '.join(odd)}" if odd else ""
        number = (
            f"the wrong number of gradients: backward returns {len(returned)} for {count} "
            f"inputs{also}. Return a tensor for each tensor among the inputs, in their order, as a "
            "tuple, and None for what has no gradient."
        )
    yield finding("gradients: number", number)
    if number:  # gradients cannot be assigned to inputs
        return
    shapes, dtypes, harmful = [], [], set()
    for i, (x, grad) in enumerate(zip(run.inputs, returned, strict=False)):
        if i not in app.by or not isinstance(grad, Tensor):
            continue
        name, bare = app.name(i), app.name(i).strip("`")
        if grad.shape != x.shape:
            text = f"the gradient of {name} has shape {tuple(grad.shape)}, and {name} {tuple(x.shape)}."
            if _is_expanded(x.shape, grad.shape):  # autograd sums such a gradient
                missing = "The sum over broadcast dimensions is missing."
                shapes.append(f"{text} {missing} {UNSUMMED.format(bare=bare)}")
            else:
                harmful.add("shape")
                shapes.append(f"{text} A gradient has the shape of its input.")
        if grad.dtype != x.dtype:
            harmful |= set() if is_float(grad) else {"dtype"}
            dtypes.append(
                f"the gradient of {name} is {grad.dtype}, and {name} {x.dtype}: autograd casts it, "
                f"and the digits are lost. Make constants with `dtype={bare}.dtype`."
            )
    for what, texts in (("shape", shapes), ("dtype", dtypes)):
        yield finding(f"gradients: {what}", " ".join(texts), "fail" if what in harmful else "warn")


def _is_expanded(small: Sequence[int], large: Sequence[int]) -> bool:
    pairs = zip(reversed(small), reversed(large), strict=False)
    return len(small) <= len(large) and all(a in (1, b) for a, b in pairs)


def check_linearity(app: Application) -> Rows:
    """Whether B(2 g) = 2 B(g): a gradient is linear in the incoming gradient g."""
    grads = app.seeded().incoming()

    def returned(factor: float) -> list[Tensor]:
        run = app.seeded()
        seed_all()
        scaled = [None if g is None else factor * g for g in grads]
        return [g for g in app.backward(run, scaled) if is_float(g)]

    # a negative factor: a backward that drops the sign is not linear either
    is_linear = all(
        largest_difference([-2.0 * a], [b], max_abs(a))[0] <= torch.finfo(a.dtype).eps ** 0.5
        for a, b in zip(returned(1.0), returned(-2.0), strict=True)
    )
    text = (
        "backward is not linear in grad_output: twice the incoming gradient is not twice the result. "
        "Is grad_output ignored, or used twice? If it is clipped on purpose, pass surrogate=True, or "
        "set `surrogate = True` on the class."
    )
    yield finding("gradients: linear", "" if is_linear else text)


def check_needs(app: Application) -> Rows:
    name = "needs_input_grad"
    if len(app.by) < 2:
        yield Row(name, "skip", None, "it is differentiated by one input only.")
        return
    idle: list[int] = []
    for i in app.by:
        run = app._replace(by=tuple(j for j in app.by if j != i)).seeded()
        grads = run.incoming()
        grad = dict(enumerate(app.backward(run, grads))).get(i)
        # returning an incoming gradient unchanged costs nothing
        if isinstance(grad, Tensor) and not any(grad is g for g in grads):
            idle.append(i)
    text = idle and (
        f"needs_input_grad is ignored: backward computes a gradient for "
        f"{', '.join(map(app.name, idle))} even if "
        f"none is needed. Check first: `if ctx.needs_input_grad[{idle[0]}]:`."
    )
    yield finding(name, text or "", "warn")


def check_context(app: Application) -> Rows:
    run = app.seeded()
    attributes = []
    for attribute, value in run.record.attributes.items():
        for tensor in pytree.tensors(value)[:1]:
            _, what = kind_of(tensor, run, app.names)
            place = run.record.noted(f"ctx.{attribute}").place
            attributes.append(f"ctx.{attribute} ({what}{f', {place}' if place else ''})")
    kinds = {label: kind_of(slot, run, app.names) for label, slot in run.record.slots().items()}
    copies = [f"{label} is {what}" for label, (kind, what) in kinds.items() if kind == "copy"]
    kept = f"a tensor is kept as an attribute: {'; '.join(attributes)}. {ATTRIBUTE}"
    cloned = f"a clone is saved: {'; '.join(copies)}. {CLONE}"
    yield finding("ctx: attributes", kept if attributes else "", "warn")
    yield finding("ctx: copies", cloned if copies else "", "warn")


# changed tensor -> the changing call, if seen
Changes = dict[str, source_location.SourceLine | None]
# For each kind of tensor that must not change: a clause, a better way, and a further hint.
IN_PLACE = {
    "inputs": (
        "forward changes its input", "`x.mul(2)`, not `x.mul_(2)`",
        " If it is intended, declare it with ctx.mark_dirty and return it.",
    ),
    "grad_output": (
        "backward changes grad_output, the incoming gradient,", "`g * x`, not `g.mul_(x)`", "",
    ),
    "saved tensors": ("backward changes a saved tensor", "`x * 2`, not `x.mul_(2)`", ""),
}  # fmt: skip

FREES = (
    "forward frees the memory of {}: whatever else reads it ends the process. Free what forward "
    "computed itself, or a copy that nothing else holds."
)


def check_in_place(app: Application) -> Rows:
    seed_all()
    args = app.fresh()
    named = {app.name(i): x for i, x in enumerate(args)}
    inputs = Snapshot(named)
    with InPlaceWatch() as watch:
        run = app.run(args)
    changed = {"inputs": inputs.changed(watch.places)}
    freed = [name for name, x in named.items() if isinstance(x, Tensor) and is_freed(x)]
    for name, x in named.items():
        # declared by mark_dirty: autograd allows the change
        if any(x is declared for declared in run.record.dirty):
            changed["inputs"].pop(name, None)
    grads = run.incoming()
    given = Snapshot({f"grad_output {k}": g for k, g in enumerate(grads)})
    held = [(label, x) for label, slot in run.record.slots().items() for x in pytree.tensors(slot)]
    saved = Snapshot({f"{label} ({kind_of(x, run, app.names)[1]})": x for label, x in held})
    # a second snapshot of the inputs: changes from here on are made by backward
    again = Snapshot(named)
    with InPlaceWatch() as watch:
        app.backward(run, grads)
    changed["grad_output"] = given.changed(watch.places)
    changed["saved tensors"] = saved.changed(watch.places) or again.changed(watch.places)
    for what, places in changed.items():
        changes, example, also = IN_PLACE[what]
        listed = "; ".join(n + (f", at {place}" if place else "") for n, place in places.items())
        text = (
            f"{changes} in place (in-place): {listed}. Work on a new tensor ({example}). The changed "
            "tensor belongs to the caller: other branches of the graph and the second backward pass "
            f"read it.{also}"
        )
        # a change of an input without a gradient, such as a buffer, may be intended
        only_buffers = what == "inputs" and not any(app.name(i) in places for i in app.by)
        status = "warn" if only_buffers else "fail"
        if what == "inputs" and places.keys() <= {*freed}:
            places, status, text = dict.fromkeys(freed), "warn", FREES.format(", ".join(freed))
        yield finding(f"in-place: {what}", text if places else "", status)


def check_device(app: Application) -> Rows:
    watch = DeviceWatch()
    run_rules(app, watch)
    text = watch.found and (
        f"a device is hard-coded: {watch.found}. It fails with inputs on another device; make new "
        "tensors with `torch.zeros_like(x)` or `device=x.device`."
    )
    yield finding("device", text, "warn")


OFF_BY_STEPS = 1e-5  # error of differences at float64 values
OFF_IF_ROUNDED = 1e-3  # error of differences at values rounded to float32, with steps >= 1e-4


def constants_row(subject: Subject, found: Discrepancies) -> Row:
    """Narrow constants in float64 computations cost digits. The row fails if the derivatives are less
    accurate than with float32 inputs."""
    name = "dtype: constants"
    if subject.dtype != torch.float64 or subject.precision.half is not None:
        return Row(name, "skip", None, "it was not checked in float64.")
    watch = PrecisionWatch()
    with watch:
        subject.map(*subject.x)
    for app in subject.applications:
        with suppress(Exception):  # reported by other checks
            run_rules(app, watch)
    met = watch.rounded or watch.met
    if met:
        harm = _is_further_off(subject, found, OFF_IF_ROUNDED if watch.rounded else OFF_BY_STEPS)
        text = (
            f"a float32 constant or intermediate enters a float64 computation: {met}. Give it the "
            "dtype of the inputs, `torch.tensor(0.1, dtype=x.dtype)`, or use a Python number."
        )
        text += " The error is above what float32 inputs would have." if harm else ""
        return Row(name, "fail" if harm else "warn", None, text)
    text = watch.foreign and (
        f"a tensor of lower precision, from outside, enters a float64 computation: "
        f"{watch.foreign}. Pass it as an input, or convert it, `table.to(x.dtype)`."
    )
    return finding(name, text, "warn")


def _is_further_off(subject: Subject, found: Discrepancies, least: float) -> bool:
    """Whether the error of the first derivative exceeds the effect of rounding the inputs to
    float32."""
    first = found.get("first derivative: reverse")
    if first is None or first.raised is not None:
        return False
    rounded = [(x, x.float().to(x.dtype)) for x in subject.x]
    # move inputs that float32 represents exactly by half a unit of rounding
    moved = [torch.where(a == b, a * (1 + 6e-8), b) for a, b in rounded]
    there, here = (subject.gradient_of_sum(x) for x in (moved, subject.x))
    return bool(first.wrong) or first.error > max(10 * largest_difference(there, here)[0], least)


def run_rules(app: Application, watch: AbstractContextManager[Any]) -> None:
    """Run forward, backward and jvp as plain functions, each under the watch."""
    seed_all()
    args = app.fresh()
    with torch.no_grad():
        with watch:
            run = app.run(args)
        grads = run.incoming()
        with watch:
            app.backward(run, grads)
        if function_rules.offers_jvp(app.function):
            inputs = enumerate(run.inputs)
            tangents = [torch.ones_like(x) if i in app.by else None for i, x in inputs]
            with watch:
                app.function.jvp(function_rules.Context(run.record, in_jvp=True), *tangents)


@final
class Snapshot:
    """Copies of tensors and their version counters, to find in-place changes later."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        held = [(n, x) for n, x in tensors.items() if isinstance(x, Tensor) and not is_freed(x)]
        # (tensor, version, copy) by name
        self._was = {name: (x, x._version, x.detach().clone()) for name, x in held}

    def changed(self, places: dict[int, source_location.SourceLine | None]) -> Changes:
        was = self._was.items()
        # compare values, too: writes through .data or by foreign code do not raise the version
        other = [(n, x) for n, (x, version, y) in was if x._version != version or not same(x, y)]
        return {name: places.get(storage_id(x)) for name, x in other}


@final
class InPlaceWatch(TorchFunctionMode):
    """Records the line of the first in-place call on each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, source_location.SourceLine | None] = {}  # by storage_id

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        name = getattr(func, "__name__", "")
        written = tensors_written(name, args, kwargs or {})
        place = source_location.torch_call_line() if written else None
        for x in written if place is not None else ():
            self.places.setdefault(storage_id(x), place)
        return func(*args, **(kwargs or {}))


TO_DEVICE = ("cpu", "cuda")  # methods that move a tensor to a device

INDEXING = ("__getitem__", "__setitem__")  # indices may be on the CPU


@final
class DeviceWatch(TorchFunctionMode):
    """Notices a hard-coded device, even on a machine with a single device. `found` describes the first
    call.

    A tensor made without other tensors, and without a `device=` taken from one, is on the default
    device. A call that mixes it with a tensor computed from the inputs fails on every other device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = ""
        # tensors on the default device, by id; kept alive so that ids stay unique
        self._made: dict[int, Tensor] = {}

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = pytree.tensors((args, kwargs))
        device = kwargs.get("device")
        named = device if isinstance(device, str) else None
        if name == "to" and len(args) > 1 and isinstance(args[1], str):
            named = args[1]
        if given and (name in TO_DEVICE or named):
            how = f'device="{named}"' if named else f".{name}()"
            self._note(f"{how} names a device")
        result = func(*args, **kwargs)
        foreign = [x for x in given if id(x) in self._made]
        sized = [x for x in foreign if x.dim()]  # 0-dim tensors mix with any device
        if sized and len(foreign) < len(given) and name not in INDEXING:
            self._note("a tensor made on the default device is mixed with the inputs")
        # results of default-device tensors alone are on the default device, too
        made_here = not given and (device is None or named is not None)
        if made_here or (given and len(foreign) == len(given)):
            self._made |= {id(y): y for y in pytree.tensors(result)}
        return result

    def _note(self, what: str) -> None:
        if not self.found:
            place = source_location.torch_call_line()
            self.found = what + (f", at {place}" if place else "")


ACCUMULATES = (
    "backward accumulates into .grad of {}, which no derivative with a graph passes through: a second "
    "derivative by it is lost, and by all that depends on it. Pass these tensors to `apply`, and "
    "return their gradients."
)


def check_grad_fields(app: Application) -> Rows:
    """Whether backward changes the .grad of a tensor; all .grad are restored."""
    run = app.seeded()
    with preserve_grads(app.function, *app.args) as changed:
        with torch.enable_grad():  # a backward may build a graph and call .backward() on it
            app.backward(run)
        found = changed()
    yield finding("in-place: .grad", ACCUMULATES.format(", ".join(found[:3])) if found else "")


def reachable(fn: Callable[..., Any], held: Iterable[Any]) -> list[Any]:
    """The tensors, modules and generators that a function reaches by its closures, globals and
    attributes, or through the objects in `held`."""
    function = as_function(fn)
    rules: Any = fn
    if function is not None:
        rules = (function.forward, backward_rule(function), function.setup_context)
    walk = ClosureWalker((rules, [x for x in held if not isinstance(x, Tensor)]), STATE)
    return [walk.objects[i] for i in walk.found]


@contextmanager
def preserve_grads(fn: Callable[..., Any], *held: Any) -> Iterator[Callable[[], list[str]]]:
    """Restore the .grad of leaves that a function reaches besides its arguments. Yields a function that
    describes leaves with a changed .grad."""
    found = reachable(fn, held)
    named: dict[int, tuple[str, Tensor]] = {
        id(p): (f"the parameter {name} of a {type(m).__name__}", p)
        for m in found
        if isinstance(m, nn.Module)
        for name, p in m.named_parameters()
        if not is_lazy(p)
    }
    for x in found:
        if isinstance(x, Tensor) and x.is_leaf and x.requires_grad and not is_lazy(x):
            named.setdefault(id(x), (f"a tensor of shape {tuple(x.shape)}", x))
    kept: list[tuple[str, Tensor, Any, Any]] = [
        # keep the object and its values: backward may add in place, or assign a new tensor
        (label, x, x.grad, None if x.grad is None else x.grad.detach().clone())
        for label, x in named.values()
    ]

    def changed() -> list[tuple[str, Tensor, Any, Any]]:
        return [
            (label, x, grad, value)
            for label, x, grad, value in kept
            if x.grad is not grad or not (value is None or same(value, grad))
        ]

    try:
        yield lambda: [label for label, *_ in changed()]
    finally:
        for _, x, grad, value in changed():
            x.grad = grad
            if value is not None:
                put_back(grad, value)
