"""The same derivatives in other circumstances: fewer inputs, other layouts, sizes and dtypes.

Each is compared with what the same code gave in plain circumstances, which the derivative checks have
judged: here only a difference is at fault.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib.verification import _maps as maps
from hoglib.verification import _where as where
from hoglib.verification._call import Arrange, Call
from hoglib.verification._differences import largest, uniform
from hoglib.verification._maps import Map
from hoglib.verification.report import Row
from hoglib.verification._subject import Subject

MOST_SUBSETS = 14
REFUSED = "forward refuses it aloud: {error}"


class Circumstances:
    """The checks of one subject, at one point."""

    def __init__(self, subject: Subject, x: list[Tensor], nondet_tol: float = 0.0) -> None:
        self._subject, self._x = subject, x
        self._f, self._n, self._names = subject.map, len(x), subject.names
        self._nondet_tol = nondet_tol
        self._values = values = [y.detach() for y in self._f(*x)]
        self.u = [uniform(y, subject.random) for y in values]
        self._w = [uniform(y, subject.random) for y in x]
        self._every = list(range(self._n))
        try:
            self._second: list[Tensor] | None = self._twice(self._f, x, self._every)
        except Exception:  # the derivative checks say it
            self._second = None
        self._first = maps.gradient(self._f, self._n)(*x, *self.u)
        # what is below it may be a sum that cancelled
        self._floor = 1e-4 * max(max(map(largest, values)), 1e-3 * max(map(largest, x)))

    def _worst(
        self, a: Sequence[Tensor], b: Sequence[Tensor], *, relative: bool = True
    ) -> tuple[float, int]:
        """The largest difference of two lists of tensors, and where it is."""
        errors = []
        for x, y in zip(a, b, strict=True):
            x, y = x.detach(), y.detach()
            same = (x == y) | (x.isnan() & y.isnan())
            off = torch.where(same, 0.0, (x - y).abs()) if x.numel() else torch.zeros(1)
            size = max(largest(y), self._floor, 1e-300) if relative else 1.0
            errors.append(float(off.nan_to_num(torch.inf).max()) / size if off.any() else 0.0)
        j = max(range(len(errors)), key=errors.__getitem__, default=0)
        return (errors[j] if errors else 0.0), j

    def _twice(
        self, f: Map, x: Sequence[Tensor], requires: Sequence[int], by: Sequence[int] | None = None
    ) -> list[Tensor]:
        """d<w, G>/dx by some inputs, where G are the gradients by the same ones."""
        by = requires if by is None else by
        leaves = [y.detach().clone().requires_grad_(j in requires) for j, y in enumerate(x)]
        u = [y.clone().requires_grad_() for y in self.u]
        grads = maps.gradient(f, self._n, requires)(*leaves, *u)
        rows = [(grads[list(requires).index(j)], self._w[j]) for j in by]
        live = [(g, w) for g, w in rows if g.requires_grad]
        columns = [leaves[j] for j in by]
        if not live:
            return [torch.zeros_like(y) for y in columns]
        return list(
            torch.autograd.grad(
                [g for g, _ in live], columns, [w for _, w in live], materialize_grads=True
            )
        )

    # Which inputs require grad, and which outputs have a gradient.

    def subsets(self) -> tuple[Row, tuple[int, ...]]:
        """The row, and the subset of which the second derivative is another one."""
        name = "inputs: each subset"
        if self._n < 2:
            return Row(name, "skip", None, "there is one input only."), ()
        worst = 0.0
        for subset in _subsets(self._n):
            only = " and ".join(self._names[j] for j in subset)
            how = f"when only {only} require{'s' if len(subset) == 1 else ''} grad"
            try:
                first = maps.gradient(self._f, self._n, subset)(*self._x, *self.u)
                error, j = self._worst(first, [self._first[j] for j in subset])
                if error > self._tolerance:
                    text = (
                        f"{how}, the gradient by {self._names[subset[j]]} is another one. Does "
                        "backward mix up ctx.needs_input_grad, or forward save less?"
                    )
                    return Row(name, "fail", error, text), ()
                worst = max(worst, error)
                if self._second is None:
                    continue
                second = self._twice(self._f, self._x, subset)
                right = self._twice(self._f, self._x, self._every, subset)
                error, j = self._worst(second, right)
                if error > self._tolerance:
                    text = f"{how}, the second derivative by {self._names[subset[j]]} is another one."
                    return Row(name, "fail", error, text), subset
                worst = max(worst, error)
            except Exception as raised:
                return Row(name, "fail", None, f"{how}, it raised {_told(raised)}"), ()
        return Row(name, "pass", worst), ()

    def undefined(self) -> Row:
        """No gradient comes in at all, or only that of one output."""
        name = "outputs: undefined gradients"
        advice = (
            "An incoming gradient may be None (undefined): ask `if g is not None`, or leave "
            "ctx.set_materialize_grads at True, which makes it zeros."
        )
        leaves = [y.detach().clone().requires_grad_() for y in self._x]
        try:
            values = [_Nothing.apply(y) for y in self._f(*leaves)]
            total = sum((y.sum() for y in values[1:]), values[0].sum())
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
        except Exception as error:
            return Row(
                name, "fail", None, f"with an undefined gradient it raised {_told(error)}. {advice}"
            )
        if any(g is not None and bool((g != 0).any()) for g in grads):
            return Row(
                name, "fail", None, f"with an undefined gradient its gradient is not zero. {advice}"
            )
        if len(self.u) < 2:
            return Row(name, "pass")
        total_of: list[Tensor] | None = None
        for k in range(len(self.u)):
            try:
                part = maps.pull(self._f, self._x, [(k, self.u[k])])[0]
            except Exception as error:
                return Row(
                    name, "fail", None,
                    f"when only {self._subject.rows[k]} has a gradient it raised {_told(error)}. "
                    f"{advice}",
                )  # fmt: skip
            total_of = part if total_of is None else [a + b for a, b in zip(total_of, part, strict=True)]
        error, j = self._worst(total_of or [], self._first)
        if error > self._tolerance:
            return Row(
                name, "fail", error,
                f"the gradient by {self._names[j]} of all outputs is not the sum of those of each "
                f"output alone. {advice}",
            )  # fmt: skip
        return Row(name, "pass", error)

    # Layouts.

    def layouts(self) -> Iterator[Row]:
        if self._subject.call.reseed:
            for name in ("layout: non-contiguous inputs", "layout: stride-0 inputs"):
                yield Row(name, "skip", None, DRAWS)
        else:
            yield self._relaid("layout: non-contiguous inputs", strided, None)
            yield self._repeated()
        yield self._relaid("layout: non-contiguous gradients", None, strided)
        yield self._expanded()

    def _relaid(self, name: str, before: Arrange | None, after: Arrange | None) -> Row:
        f = self._subject.call.map(self._subject.which, before=before, after=after)
        try:
            values = f(*self._x)
        except Exception as error:
            advice = "Call .contiguous() first, or reshape rather than view."
            return Row(name, "warn", None, f"{REFUSED.format(error=_told(error))} {advice}")
        error_, i = self._worst(values, self._values)
        if error_ > self._tolerance:
            return Row(
                name, "fail", error_, f"{self._subject.rows[i]} is another one. {LAYOUT}"
            )
        return self._compare(
            name, lambda: self._both(f, self._x), self._first, self._second, LAYOUT
        )

    def _repeated(self) -> Row:
        """Inputs of stride 0, against copies of them."""
        name = "layout: stride-0 inputs"
        call, which = self._subject.call, self._subject.which
        f = call.map(which, before=_stretched)
        try:
            f(*self._x)
            plain = self._both(call.map(which, before=lambda x: _stretched(x).clone()), self._x)
        except Exception as error:
            return Row(name, "skip", None, REFUSED.format(error=_told(error)))
        return self._compare(name, lambda: self._both(f, self._x), *plain, LAYOUT)

    def _both(self, f: Map, x: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        first = maps.gradient(f, self._n)(*x, *self.u)
        return first, None if self._second is None else self._twice(f, x, self._every)

    def _expanded(self) -> Row:
        """The gradient of a sum is one number, expanded; that of the other sum is contiguous."""
        name = "layout: stride-0 gradients"
        call, which = self._subject.call, self._subject.which

        def run(after: Arrange) -> tuple[list[Tensor], list[Tensor] | None]:
            f = call.map(which, after=after)
            leaves = [y.detach().clone().requires_grad_() for y in self._x]
            total = sum(y.sum() for y in f(*leaves))
            first = torch.autograd.grad(
                total, leaves, create_graph=self._second is not None, materialize_grads=True
            )
            live = [(g, w) for g, w in zip(first, self._w, strict=True) if g.requires_grad]
            if not live:
                return list(first), None
            second = torch.autograd.grad(
                [g for g, _ in live], leaves, [w for _, w in live], materialize_grads=True
            )
            return list(first), list(second)

        right, twice = run(lambda y: (y * torch.ones_like(y)).sum())
        return self._compare(name, lambda: run(torch.sum), right, twice, LAYOUT)

    def _compare(
        self, name: str, run: Callable[[], tuple[list[Tensor], list[Tensor] | None]],
        first: list[Tensor], second: list[Tensor] | None, advice: str,
    ) -> Row:  # fmt: skip
        try:
            found, twice = run()
        except Exception as error:
            return Row(name, "fail", None, f"backward raised {_told(error)}. {advice}")
        error, j = self._worst(found, first)
        if error > self._tolerance:
            return Row(
                name, "fail", error, f"the gradient by {self._names[j]} is another one. {advice}"
            )
        if second is not None and twice is not None:
            also, j = self._worst(twice, second)
            if also > self._tolerance:
                return Row(
                    name, "fail", also,
                    f"the second derivative by {self._names[j]} is another one. {advice}",
                )  # fmt: skip
            error = max(error, also)
        return Row(name, "pass", error)

    @property
    def _tolerance(self) -> float:
        return float(torch.finfo(self._subject.dtype).eps ** 0.5)

    # Values that are not finite, and the same twice.

    def finite(self) -> Row:
        name = "finite"
        values, grads = self._f(*self._x), self._first
        for row, y in zip(self._subject.rows, values, strict=True):
            if bool(y.isnan().any()):
                return Row(name, "fail", None, f"{row} is NaN at the inputs. Are they in its domain?")
        for j, g in enumerate(grads):
            if bool(g.isnan().any()):
                return Row(
                    name, "fail", None,
                    f"the gradient by {self._names[j]} is NaN at the inputs, and the values are not. "
                    "Choose the derivative there by convention, with torch.where on the argument of "
                    "the function and on the result.",
                )  # fmt: skip
        second = self._second or []
        for j, g in enumerate(second):
            if bool(g.isnan().any()):
                return Row(
                    name, "fail", None,
                    f"the second derivative by {self._names[j]} is NaN at the inputs, and the first is "
                    "not. A torch.where lets NaN through where its other branch is infinite: guard the "
                    "argument, not only the result.",
                )  # fmt: skip
        for text, tensors in (("a value", values), ("a gradient", grads), ("a second derivative", second)):
            if any(bool(t.isinf().any()) for t in tensors):
                return Row(name, "warn", None, f"{text} is infinite at the inputs.")
        most = max((largest(g) for g in grads), default=0.0)
        scale = max(
            (largest(y) / max(largest(x), 1e-30) for y in values for x in self._x), default=0.0
        )
        if most > 1e8 * max(scale, 1.0):
            return Row(
                name, "warn", most,
                f"a gradient of suspicious size: {most:.3g}, at values of {max(map(largest, values)):.3g}.",
            )  # fmt: skip
        if most == 0.0:
            return Row(
                name, "warn", 0.0,
                "every gradient is zero at the inputs. If that is not meant, is something detached or "
                "rounded in forward?",
            )  # fmt: skip
        return Row(name, "pass")

    def extremes(self) -> Row:
        """Gradients at zeros and far out, where values are finite still."""
        name = "finite: extreme inputs"
        bad = []
        for what, x in (
            ("zeros", [torch.zeros_like(y) for y in self._x]),
            ("the inputs times 100", [100 * y for y in self._x]),
        ):
            try:
                values = self._f(*x)
                if not all(bool(y.isfinite().all()) for y in values):
                    continue
                first = maps.gradient(self._f, self._n)(*x, *self.u)
                found = "gradient" if any(bool(g.isnan().any()) for g in first) else ""
                if not found and self._second is not None:
                    twice = self._twice(self._f, x, self._every)
                    found = "second derivative" if any(bool(g.isnan().any()) for g in twice) else ""
            except Exception:  # a function is free to refuse them
                continue
            if found:
                bad.append(f"the {found} is NaN at {what}, where the value is finite")
        if bad:
            return Row(name, "warn", None, "; ".join(bad) + ".")
        return Row(name, "pass")

    def deterministic(self, *, surrogate: bool = False) -> Row:
        name = "deterministic"
        leaves = [y.detach().clone().requires_grad_() for y in self._x]
        values = self._f(*leaves)

        def once() -> list[Tensor]:
            return list(
                torch.autograd.grad(
                    values, leaves, self.u, retain_graph=True, materialize_grads=True,
                    create_graph=self._second is not None,
                )
            )  # fmt: skip

        a, b = once(), once()
        what = "the gradient"
        error, j = self._worst(a, b, relative=False)
        if error <= self._nondet_tol and self._second is not None:
            live = [(g, w) for g, w in zip(a, self._w, strict=True) if g.requires_grad]
            if live:
                twice = [
                    torch.autograd.grad(
                        [g for g, _ in live], leaves, [w for _, w in live], retain_graph=True,
                        materialize_grads=True,
                    )
                    for _ in range(2)
                ]  # fmt: skip
                error, j = self._worst(*twice, relative=False)
                what = "the second derivative"
        if error > self._nondet_tol:
            text = (
                f"{what} by {self._names[j]} is not the same twice (nondeterministic), by {error:.2g}. "
                "backward draws random numbers or sums in no fixed order; draw in forward and save, or "
                "set nondet_tol."
            )
            return Row(name, "warn" if surrogate else "fail", error, text)
        if self._subject.call.reseed:
            return Row(
                name, "warn", error,
                "forward draws random numbers; it was checked with the same ones each time.",
            )  # fmt: skip
        return Row(name, "pass", error)

    def state(self) -> Row:
        """A second call between forward and backward of a first one."""
        name = "state"
        other = [1.1 * y for y in self._x]
        try:
            leaves = [y.detach().clone().requires_grad_() for y in self._x]
            values = self._f(*leaves)
            self._f(*(y.clone().requires_grad_() for y in other))
            found = torch.autograd.grad(values, leaves, self.u, materialize_grads=True)
        except Exception as error:
            return Row(name, "skip", None, f"two calls at once raised {_told(error)}")
        error, j = self._worst(found, self._first)
        if error > self._tolerance:
            return Row(
                name, "fail", error,
                f"the gradient by {self._names[j]} of one call is another one after a second call: "
                "something that backward needs is kept on the class, or elsewhere outside of ctx. "
                "Save it with ctx.save_for_backward.",
            )  # fmt: skip
        return Row(name, "pass", error)

    # Sizes.

    def zero_size(self) -> Row:
        name = "layout: zero size"
        if not self._subject.functions:  # kernels of torch itself may stop the process
            return Row(name, "skip", None, "it is made of torch's own functions.")
        batch = self._x[0].shape[0] if self._x[0].dim() else None
        if batch is None:
            return Row(name, "skip", None, "its inputs have no dimensions.")
        x = [y[:0] if y.dim() and y.shape[0] == batch else y for y in self._x]
        try:
            values = self._f(*x)
        except Exception as error:
            return Row(name, "skip", None, REFUSED.format(error=_told(error)))
        try:
            u = [torch.ones_like(y) for y in values]
            grads = maps.gradient(self._f, self._n)(*x, *u)
        except Exception as error:
            return Row(
                name, "warn", None, f"forward takes inputs without elements, backward {_told(error)}"
            )
        odd = [self._names[j] for j, (g, y) in enumerate(zip(grads, x, strict=True)) if g.shape != y.shape]
        if odd:
            return Row(name, "warn", None, f"the gradient by {odd[0]} has another shape there.")
        return Row(name, "pass")

    def no_dimensions(self) -> Row:
        name = "layout: 0-d"
        if not self._subject.functions:  # kernels of torch itself may stop the process
            return Row(name, "skip", None, "it is made of torch's own functions.")
        shapes = {tuple(y.shape) for y in self._x}
        if len(shapes) > 1 or shapes == {()} or any(self._subject.call.complex_variables):
            return Row(name, "skip", None, "its inputs are not of one shape with dimensions.")
        x = [y.reshape(-1)[0].clone() for y in self._x]
        try:
            values = self._f(*x)
        except Exception as error:
            return Row(name, "skip", None, REFUSED.format(error=_told(error)))
        try:
            grads = maps.gradient(self._f, self._n)(*x, *[torch.ones_like(y) for y in values])
        except Exception as error:
            return Row(
                name, "warn", None, f"forward takes inputs without dimensions, backward {_told(error)}"
            )
        odd = [self._names[j] for j, g in enumerate(grads) if g.dim()]
        if odd:
            return Row(name, "warn", None, f"the gradient by {odd[0]} has dimensions there.")
        return Row(name, "pass")

    # Dtypes.

    def dtypes(self) -> Iterator[Row]:
        yield self._in_dtype("dtype: float32", torch.float32, 1e-3)
        yield self._in_dtype("dtype: bfloat16", torch.bfloat16, 0.1)
        yield self._complex()

    def _in_dtype(self, name: str, dtype: torch.dtype, tolerance: float) -> Row:
        if self._subject.dtype != torch.float64:
            return Row(name, "skip", None, f"it was checked in {self._subject.dtype}, as float64 is refused.")
        if self._subject.call.reseed:
            return Row(name, "skip", None, DRAWS)
        call = self._again(dtype)
        x = [y.to(dtype) for y in self._x]
        rounded = [y.to(torch.float64) for y in x]
        try:
            found, _ = self._gradients(call, x)
        except Exception as error:
            return Row(name, "skip", None, f"it refuses {_short(dtype)}: {_told(error)}")
        right, scale = self._gradients(self._subject.call, rounded)
        for j, (a, b) in enumerate(zip(found, right, strict=True)):
            off = _relative(a.double(), b, scale)
            if off > tolerance:
                return Row(
                    name, "warn", off,
                    f"the gradient by {self._names[j]} is {off:.0e} off in {_short(dtype)}, more than "
                    "its rounding explains. Are sums or differences of large numbers taken in it?",
                )  # fmt: skip
        return Row(name, "pass", max((_relative(a.double(), b, scale) for a, b in zip(found, right, strict=True)), default=0.0))

    def _again(self, dtype: torch.dtype) -> Call:
        call = Call(self._subject.fn, self._subject.inputs, dtype)
        call.reseed, call.clone = self._subject.call.reseed, self._subject.call.clone
        return call

    def _gradients(self, call: Call, x: Sequence[Tensor]) -> tuple[list[Tensor], float]:
        f = call.map(self._subject.which)
        values = f(*x)
        u = [a.to(b.dtype) for a, b in zip(self.u, values, strict=True)]
        grads = maps.gradient(f, self._n)(*x, *u)
        return grads, max(map(largest, values), default=0.0)

    def _complex(self) -> Row:
        name = "dtype: complex"
        if any(self._subject.call.complex_variables):
            return Row(name, "pass", None)
        if self._subject.num_parameters or self._subject.dtype != torch.float64:
            return Row(name, "skip", None, "its inputs are real.")
        return Row(name, "skip", None, "its inputs are real; pass complex ones to have them checked.")

    # Autocast and the compiler.

    def autocast(self) -> Row:
        name = "autocast"
        if self._subject.dtype != torch.float64:
            return Row(name, "skip", None, "it was not checked in float64.")
        call = self._again(torch.float32)
        x = [y.float() for y in self._x]
        f = call.map(self._subject.which)
        try:
            right, scale = self._gradients(call, x)
        except Exception as error:
            return Row(name, "skip", None, f"it refuses float32: {_told(error)}")
        try:
            leaves = [y.detach().clone().requires_grad_() for y in x]
            with torch.autocast(x[0].device.type, torch.bfloat16):
                values = f(*leaves)
            u = [a.to(b.dtype) for a, b in zip(self.u, values, strict=True)]
            found = torch.autograd.grad(values, leaves, u, materialize_grads=True)
        except Exception as error:
            return Row(
                name, "warn", None,
                f"under torch.autocast it raised {_told(error)}. Decorate forward and backward with "
                "torch.amp.custom_fwd and custom_bwd.",
            )  # fmt: skip
        error, j = max(
            ((_relative(a.double(), b.double(), scale), j) for j, (a, b) in enumerate(zip(found, right, strict=True))),
            default=(0.0, 0),
        )
        if error > 0.1:
            return Row(
                name, "warn", error,
                f"under torch.autocast the gradient by {self._names[j]} is off by {error:.0%}. Keep sums "
                "in float32, or decorate with torch.amp.custom_fwd(cast_inputs=torch.float32).",
            )  # fmt: skip
        return Row(name, "pass", error)

    def compiled(self, asked: bool) -> Row:
        name = "compile"
        if not asked:
            return Row(name, "skip", None, "not asked for: it takes seconds; pass compile=True.")
        torch._dynamo.reset()
        try:
            f = torch.compile(self._f, backend="aot_eager")
            leaves = [y.detach().clone().requires_grad_() for y in self._x]
            values = f(*leaves)
            found = torch.autograd.grad(values, leaves, self.u, materialize_grads=True)
        except Exception as error:
            return Row(name, "warn", None, f"torch.compile raised {_told(error)}")
        finally:
            torch._dynamo.reset()
        error, j = self._worst(list(found), self._first)
        if error > self._tolerance:
            return Row(
                name, "fail", error,
                f"compiled, the gradient by {self._names[j]} is another one. Does forward or backward "
                "use something that the compiler takes for a constant (NumPy, Python numbers)?",
            )  # fmt: skip
        return Row(name, "pass", error)


DRAWS = "it draws random numbers, and others for another layout or dtype."
LAYOUT = (
    "Nothing may be assumed of strides: use reshape rather than view, and .contiguous() before code "
    "that reads memory."
)


class _Nothing(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def strided(x: Tensor) -> Tensor:
    """x stored with its dimensions reversed and gaps between elements; its gradient too."""
    order = tuple(reversed(range(x.dim())))
    turned = x.permute(order)
    return torch.stack([turned, torch.zeros_like(turned)], -1)[..., 0].permute(order)


def _stretched(x: Tensor) -> Tensor:
    """One entry of the first dimension, repeated without a copy."""
    return x[:1].expand_as(x) if x.dim() else x


def _subsets(count: int) -> list[tuple[int, ...]]:
    """Each proper subset; of many inputs, each alone and all but each."""
    if count <= 3:
        sizes = range(1, count)
        return [s for size in sizes for s in itertools.combinations(range(count), size)]
    singles = [(j,) for j in range(count)]
    others = [tuple(k for k in range(count) if k != j) for j in range(count)]
    return [*singles[:MOST_SUBSETS], *others[:MOST_SUBSETS]]


def _relative(a: Tensor, b: Tensor, scale: float) -> float:
    if not a.numel():
        return 0.0
    size = max(largest(b), 1e-3 * scale, 1e-30)
    known = b.isfinite() & a.isfinite()
    return largest(torch.where(known, a - b, 0.0)) / size


def _told(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    place = where.of_error(error)
    return f"{text} (at {place})" if place else text


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


