"""The checks of `hoglib.testing`: each way to a derivative, in each circumstance, and by each input."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib import _jacobians as jacobians
from hoglib._call import Call, custom_functions, is_float
from hoglib._jacobians import Blocks, Expected, Map, differences, furthest, magnitude
from hoglib._precision import Watch

FIRST, SECOND = "the first derivative", "the second derivative"
CONSTANT = (
    "It was called within 1e-6 of the inputs; if one is a constant, such as a mask or a target, give "
    "the others requires_grad."
)
FORWARD = "If it is not meant for forward mode, pass forward_mode=False."
VMAP = "If it is not meant for vmap, pass vmap=False."
OVER_FORWARD = (
    "Torch itself is wrong in this mode through layer_norm, batch_norm, linalg.solve and det; "
    "forward_mode=False leaves it out."
)


class Point(NamedTuple):
    """Where derivatives were checked, and what central differences gave there."""

    x: list[Tensor]
    u: list[Tensor]  # random gradients of the outputs
    first: Expected
    second: Expected


class DoubleCheck:
    """The checks of one call. Each raises AssertionError that says what is wrong, and by what."""

    def __init__(
        self, call: Call, forward_mode: bool | None, vmap: bool | None, atol: float, rtol: float
    ) -> None:
        self._call, self._bounds = call, (atol, rtol)
        self._random = torch.Generator().manual_seed(0)
        outputs, again = self._run(
            "the value",
            "",
            lambda: (call.recorded(), call.recorded()),
            "The inputs are float64 copies: so must be the tensors that the function holds itself.",
        )
        self._which = [
            i for i, y in enumerate(outputs) if is_float(y) and y.requires_grad and y.numel()
        ]
        if not self._which:
            self._fail(
                f"{FIRST} is missing: no output with elements requires grad; is it a constant, or "
                "detached?"
            )
        if not all(torch.allclose(outputs[i], again[i], equal_nan=True) for i in self._which):
            self._fail(
                "the value is not the same twice: pass random numbers as inputs; eval() dropout."
            )
        self._map = call.map(self._which)
        self._count = len(call.point)
        self._outputs = [f"output {i}" for i in self._which]
        custom = custom_functions(outputs)
        self._forward = (
            all(f.jvp is not Function.jvp for f in custom) if forward_mode is None else forward_mode
        )
        self._reverse_over_forward = self._forward and (bool(custom) or forward_mode is True)
        self._vmap = bool(custom) and all(map(_offers_vmap, custom)) if vmap is None else vmap

    def beside(self) -> list[Tensor]:
        """A point near the inputs, without their zeros; the inputs where fn is not defined there."""
        moved = []
        for x in self._call.point:
            part = torch.rand(x.shape, dtype=x.dtype, generator=self._random).to(x.device)
            moved.append(torch.where(x == 0, 0.005 * (1 + part), x * (1 - 0.02 * part)))
        try:
            pairs = zip(self._map(*moved), self._map(*self._call.point), strict=True)
            defined = all(bool((a.isfinite() | ~b.isfinite()).all()) for a, b in pairs)
        except Exception:  # whatever fn says of inputs it was not given
            defined = False
        return moved if defined else self._call.point

    def precision(self) -> None:
        x = [value.clone().requires_grad_() for value in self._call.point]
        with Watch() as watch:
            try:
                if self._forward:
                    jacobians.tangent(self._map, self._count)(*x, *self._like(x))
                grads = jacobians.gradient(self._map, self._count)(*x, *self._like(self._map(*x)))
                torch.autograd.grad(
                    grads, x, [torch.ones_like(g) for g in grads], allow_unused=True
                )
            except Exception:  # the checks of derivatives say it better
                pass
        if watch.found:
            self._fail(
                f"the precision is wrong: {watch.found} amid float64; give it the dtype of the inputs."
            )

    def derivatives(self, x: list[Tensor]) -> Point:
        f, n, names = self._map, self._count, self._call.names
        values = f(*x)
        u, t = self._like(values), self._like(x)
        floor = jacobians.RESOLUTION * magnitude(values, x)
        first = self._run(
            FIRST, "", lambda: differences(f, x, self._outputs, names, floor), CONSTANT
        )
        self._check(FIRST, "", lambda: jacobians.reverse(f, x), first)
        if self._forward:
            self._check(FIRST, "in forward mode", lambda: jacobians.forward(f, x), first, FORWARD)

        g = jacobians.gradient(f, n)
        labels = self._labels(n)
        second = self._run(SECOND, "", lambda: differences(g, [*x, *u], *labels, floor))
        self._check(SECOND, "", lambda: jacobians.reverse(g, [*x, *u]), second)
        if self._forward:
            how = "in forward-over-reverse"
            self._check(SECOND, how, lambda: jacobians.forward(g, [*x, *u]), second, FORWARD)
        if self._reverse_over_forward:
            h = jacobians.tangent(f, n)
            rows = [f"the tangent of {name}" for name in self._outputs]
            columns = [*names, *(f"the tangent of {name}" for name in names)]
            how = "in reverse-over-forward"
            expected = self._run(
                SECOND, how, lambda: differences(h, [*x, *t], rows, columns, floor), FORWARD
            )
            self._check(SECOND, how, lambda: jacobians.reverse(h, [*x, *t]), expected, OVER_FORWARD)
        return Point(x, u, first, second)

    def each_input_alone(self, at: Point) -> None:
        f, n = self._map, self._count
        for j, name in enumerate(self._call.names):
            how = f"when only {name} requires grad"
            first = at.first.only(range(len(self._which)), [j])
            self._check(FIRST, how, partial(jacobians.reverse, f, at.x, [j]), first)
            g, second = jacobians.gradient(f, n, [j]), at.second.only([j], [j])
            self._check(SECOND, how, partial(jacobians.reverse, g, [*at.x, *at.u], [j]), second)

    def layouts(self, at: Point) -> None:
        try:
            self._call.leaves(*at.x, before=_strided)
            before = _strided
        except Exception:  # a function is free to refuse such inputs, aloud
            before = None
        f, n = self._call.map(self._which, before=before, after=_strided), self._count
        how = "for non-contiguous inputs and gradients"
        self._check(FIRST, how, lambda: jacobians.reverse(f, at.x), at.first)
        self._check(
            SECOND,
            how,
            lambda: jacobians.reverse(jacobians.gradient(f, n), [*at.x, *at.u]),
            at.second,
        )

        # the gradient of a sum is one number, expanded; that of the other sum is contiguous
        expanded = self._call.map(self._which, after=torch.sum)
        plain = self._call.map(self._which, after=lambda y: (y * torch.ones_like(y)).sum())
        how = "for expanded gradients"
        first = at.first._replace(blocks=jacobians.reverse(plain, at.x), again=None)
        self._check(FIRST, how, lambda: jacobians.reverse(expanded, at.x), first)
        arguments = [*at.x, *self._like(plain(*at.x))]
        second = at.second._replace(
            blocks=jacobians.reverse(jacobians.gradient(plain, n), arguments), again=None
        )
        self._check(
            SECOND,
            how,
            lambda: jacobians.reverse(jacobians.gradient(expanded, n), arguments),
            second,
        )

    def under_vmap(self, at: Point) -> None:
        if not self._vmap:
            return
        f, n = self._map, self._count
        how = "under vmap"
        self._check(FIRST, how, lambda: jacobians.reverse(f, at.x, batched=True), at.first, VMAP)
        second = partial(jacobians.reverse, jacobians.gradient(f, n), [*at.x, *at.u], batched=True)
        self._check(SECOND, how, second, at.second, VMAP)

        samples = [at.x, self.beside(), self.beside()]
        batch = [torch.stack(parts) for parts in zip(*samples, strict=True)]
        floor, every, how = at.first.floor, (0,) * n, "under vmap over all inputs"
        loop = [f(*sample) for sample in samples]
        self._check_batch("the value", how, f, batch, every, loop, floor)
        for j, name in enumerate(self._call.names):
            mixed = [*at.x[:j], batch[j].movedim(0, -1), *at.x[j + 1 :]]
            loop = [f(*at.x[:j], x, *at.x[j + 1 :]) for x in batch[j]]
            dims = tuple(-1 if k == j else None for k in range(n))
            self._check_batch("the value", f"under vmap over {name}", f, mixed, dims, loop, floor)

        def pulled(*given: Tensor) -> list[Tensor]:
            return list(torch.func.vjp(f, *given[:n])[1](list(given[n:])))

        loop = [jacobians.gradient(f, n)(*sample, *at.u) for sample in samples]
        dims = (*every, *(None for _ in at.u))
        self._check_batch(FIRST, how, pulled, [*batch, *at.u], dims, loop, floor)

    def agreement(self, reference: Call, x: list[Tensor], atol: float, rtol: float) -> None:
        """Values and derivatives by the inputs; parameters have no counterpart in the reference."""
        n, title = self._call.num_inputs, "agreement with the reference"
        x, ours_alone, theirs_alone = x[:n], self._call.point[n:], reference.point[n:]
        values = self._call.leaves(*x, *ours_alone)
        expected = self._run(title, "", lambda: reference.leaves(*x, *theirs_alone))
        if len(values) != len(expected):
            self._fail(f"{title} is wrong: expected {len(expected)} outputs, got {len(values)}.")
        for i, (a, b) in enumerate(zip(values, expected, strict=True)):
            try:
                near = (atol * min(1, magnitude([b], x)), rtol) if is_float(b) else (0.0, 0.0)
                torch.testing.assert_close(a, b, atol=near[0], rtol=near[1])
            except Exception as error:  # or TypeError, of what cannot be compared
                self._fail(f"{title} is wrong: the value of output {i}.\n{error}")
        if not n:
            return

        def ours(*given: Tensor) -> list[Tensor]:
            return self._map(*given, *ours_alone)

        def theirs(*given: Tensor) -> list[Tensor]:
            return reference.map(self._which)(*given, *theirs_alone)

        bounds, floor = (atol, rtol), atol * min(1, magnitude(ours(*x), x))
        with_u = [*x, *self._like(ours(*x))]
        rows, columns = self._labels(n)
        right = self._run(title, f"in {FIRST}", lambda: jacobians.reverse(theirs, x))
        first = Expected(right, self._outputs, columns[:n], floor)
        self._check(title, f"in {FIRST}", lambda: jacobians.reverse(ours, x), first, bounds=bounds)
        g, wanted = jacobians.gradient(ours, n), jacobians.gradient(theirs, n)
        right = self._run(title, f"in {SECOND}", lambda: jacobians.reverse(wanted, with_u))
        second = Expected(right, rows, columns, floor)
        self._check(
            title, f"in {SECOND}", lambda: jacobians.reverse(g, with_u), second, bounds=bounds
        )

    def _labels(self, count: int) -> tuple[list[str], list[str]]:
        """What the Jacobian of the gradient is of, and by what."""
        names = self._call.names[:count]
        given = [f"the gradient of {name}" for name in self._outputs]
        return [f"the gradient by {name}" for name in names], [*names, *given]

    def _like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.randn(x.shape, dtype=x.dtype, generator=self._random).to(x.device)
            for x in tensors
        ]

    def _check_batch(
        self, what: str, how: str, f: Map, batch: Sequence[Tensor], dims: tuple[int | None, ...],
        loop: list[list[Tensor]], floor: float,
    ) -> None:  # fmt: skip
        right = [[torch.stack(parts).reshape(-1, 1)] for parts in zip(*loop, strict=True)]
        rows = [f"result {i}" for i in range(len(right))]
        self._check(
            what,
            how,
            lambda: [
                [y.reshape(-1, 1)] for y in torch.func.vmap(f, dims, randomness="same")(*batch)
            ],
            Expected(right, rows, ["the batch"], floor),
            VMAP,
        )

    def _check(
        self, what: str, how: str, derive: Callable[[], Blocks], expected: Expected, hint: str = "",
        *, bounds: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        blocks = self._run(what, how, derive, hint)
        for i, row in enumerate(expected.blocks):
            for j, b in enumerate(row):
                difference = furthest(blocks[i][j], i, j, expected, *(bounds or self._bounds))
                if difference is not None:
                    k, m = divmod(difference, b.shape[1])
                    self._fail(
                        f"{what} is wrong{how and ' '}{how}, for {expected.columns[j]}: "
                        f"{expected.rows[i]}, element {k}, by element {m}: expected "
                        f"{b[k, m].item():.6g}, got {blocks[i][j][k, m].item():.6g}. {hint}"
                    )

    def _run(self, what: str, how: str, run: Callable[[], Any], hint: str = "") -> Any:
        try:
            return run()
        except Exception as error:
            self._fail(
                f"{what} is wrong or missing{how and ' '}{how}: "
                f"{type(error).__name__}: {error}\n{hint}", error,
            )  # fmt: skip

    def _fail(self, text: str, cause: Exception | None = None) -> NoReturn:
        raise AssertionError(f"{self._call.name}: {text.rstrip()}") from cause


def _offers_vmap(function: type[Function]) -> bool:
    rule = function.generate_vmap_rule or function.vmap is not Function.vmap
    return bool(rule) and function.setup_context is not Function.setup_context


def _strided(x: Tensor) -> Tensor:
    """x stored with its dimensions reversed and gaps between elements; its gradient too."""
    order = tuple(reversed(range(x.dim())))
    turned = x.permute(order)
    return torch.stack([turned, torch.zeros_like(turned)], -1)[..., 0].permute(order)
