"""A function at one point, with the derivatives it has there in plain circumstances.

What it gives in other circumstances (fewer inputs, other layouts, sizes and dtypes) is compared with
these, which the derivative checks have judged: only a difference is at fault.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hoglib._core.element_differences import TensorMap, max_abs, random_like
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification.report import Row
from hoglib.verification.subject import Subject

REFUSED = "forward refuses it aloud: {error}"
DRAWS = "it draws random numbers, and others for another layout or dtype."


class PerturbedPoint:
    """Values, gradients G for random u, and d<w, G>/dx for random w."""

    def __init__(self, subject: Subject, x: list[Tensor]) -> None:
        self.subject, self.x = subject, x
        self.f, self.n, self.names = subject.map, len(x), subject.names
        self.every = list(range(self.n))
        self.values = [y.detach() for y in self.f(*x)]
        self.u = [random_like(y, subject.random) for y in self.values]
        self.w = [random_like(y, subject.random) for y in x]
        self.first = calls.gradient(self.f, self.n)(*x, *self.u)
        self.second: list[Tensor] | None
        try:
            self.second = self.twice(self.f, x, self.every)
        except Exception:  # the derivative checks say it
            self.second = None
        # a difference below it may be that of a sum that cancelled
        self._floor = 1e-4 * max(max(map(max_abs, self.values)), 1e-3 * max(map(max_abs, x)))

    @property
    def tolerance(self) -> float:
        return float(torch.finfo(self.subject.dtype).eps ** 0.5)

    def worst(
        self, a: Sequence[Tensor], b: Sequence[Tensor], *, relative: bool = True
    ) -> tuple[float, int]:
        """The largest difference of two lists of tensors, and where it is."""
        errors = []
        for x, y in zip(a, b, strict=True):
            x, y = x.detach(), y.detach()
            same = (x == y) | (x.isnan() & y.isnan())
            off = torch.where(same, 0.0, (x - y).abs()) if x.numel() else torch.zeros(1)
            size = max(max_abs(y), self._floor, 1e-300) if relative else 1.0
            errors.append(float(off.nan_to_num(torch.inf).max()) / size if off.any() else 0.0)
        j = max(range(len(errors)), key=errors.__getitem__, default=0)
        return (errors[j] if errors else 0.0), j

    def twice(
        self,
        f: TensorMap,
        x: Sequence[Tensor],
        requires: Sequence[int],
        by: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """d<w, G>/dx by some inputs, where G are the gradients by the same ones."""
        by = requires if by is None else by
        leaves = [y.detach().clone().requires_grad_(j in requires) for j, y in enumerate(x)]
        u = [y.clone().requires_grad_() for y in self.u]
        grads = calls.gradient(f, self.n, requires)(*leaves, *u)
        rows = [(grads[list(requires).index(j)], self.w[j]) for j in by]
        live = [(g, w) for g, w in rows if g.requires_grad]
        columns = [leaves[j] for j in by]
        if not live:
            return [torch.zeros_like(y) for y in columns]
        return list(
            torch.autograd.grad(
                [g for g, _ in live], columns, [w for _, w in live], materialize_grads=True
            )
        )

    def both(self, f: TensorMap, x: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        first = calls.gradient(f, self.n)(*x, *self.u)
        return first, None if self.second is None else self.twice(f, x, self.every)

    def compare(
        self, name: str, run: Callable[[], tuple[list[Tensor], list[Tensor] | None]],
        first: list[Tensor], second: list[Tensor] | None, advice: str,
    ) -> Row:  # fmt: skip
        try:
            found, twice = run()
        except Exception as raised:
            return Row(name, "fail", None, f"backward raised {format_error(raised)}. {advice}")
        error, j = self.worst(found, first)
        if error > self.tolerance:
            return Row(
                name, "fail", error, f"the gradient by {self.names[j]} is another one. {advice}"
            )
        if second is not None and twice is not None:
            also, j = self.worst(twice, second)
            if also > self.tolerance:
                return Row(
                    name, "fail", also,
                    f"the second derivative by {self.names[j]} is another one. {advice}",
                )  # fmt: skip
            error = max(error, also)
        return Row(name, "pass", error)
