"""Checks of an operator: that the loss is the same at every pass over the data, and that the matrix is
symmetric.

Every product computes the loss of each batch anyway. The first pass records them and later passes
compare: an operator whose matrix changes has no eigenvalues, and no solver converges on it.
"""

from collections.abc import Callable, Sequence
from math import fsum, isfinite
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core import module_kinds
from hoglib._core.device_reads import DeviceRead
from hoglib._core.module_kinds import BATCH_NORMS
from hoglib._core.pytree import tensors_in
from hoglib._core.source_location import warn
from hoglib._core.state import line_that_draws
from hoglib._core.trust import DERIVATIVES, agree, found_once
from hoglib._core.validation import listing
from hoglib.curvature.data import numbers_of
from hoglib.curvature.vector_space import Space
from hoglib.errors import NondeterministicError, NonFiniteError

DROPOUTS = (module_kinds.DROPOUTS, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
# the loss of a batch in one pass, and its fingerprint
BatchRecord = tuple[float, tuple[float, ...]]
LossOf = Callable[[Any], Tensor]  # of a batch


@final
class Determinism:
    """Compares the losses and the batches of each pass with those of the first."""

    def __init__(self, loss: Any, enabled: bool, fixed_batches: bool = False) -> None:
        self._model = getattr(loss, "model", None)
        self._enabled, self._fixed_batches = enabled, fixed_batches
        self.first: list[BatchRecord] = []  # of the first pass at these parameters
        self._now: list[BatchRecord] = []  # of the current pass
        self._pending: list[Callable[[], None]] = []  # the last batch, which is compared later
        self._total: float | None = None  # the loss over all of the data, of all processes

    def start(self) -> None:
        self._now, self._pending = [], []

    def forget(self) -> None:
        """Forget the losses, because the parameters changed."""
        self.first = []
        self.forget_total()

    def forget_total(self) -> None:
        """Forget the total, because parameters changed in another process."""
        self._total = None

    def record(
        self, batch: Any, value: Tensor, loss_of: LossOf, known: tuple[float, ...] | None = None
    ) -> None:
        """Record the loss of a batch, and compare a batch with the first pass: this one on the CPU, the
        one before on a device, which need not wait for it.

        loss_of: computes it again, to find the line that draws random numbers.
        known: the fingerprint of the batch, where it is that of several processes.
        """
        numbers = [value.detach()]
        if self._enabled and known is None:
            numbers += [x.to(value.device) for x in numbers_of(batch)]
        read = DeviceRead(torch.stack([x.double() for x in numbers]))

        def compare() -> None:
            number, *found = read.numbers().tolist()
            if not isfinite(number):
                raise NonFiniteError(
                    f"loss: expected a finite number, got {number} at batch {len(self._now)}"
                    + (", which holds NaN or infinity itself" if _not_finite(batch) else "")
                    + ". Look for NaN in the data and in the parameters, and for overflow."
                )
            self._now.append((number, tuple(found) if known is None else known))
            if self._enabled:
                self._compare_batch(batch, value, loss_of)

        self.compare_last()
        self._pending.append(compare)
        if value.device.type == "cpu":
            self.compare_last()

    def compare_last(self) -> None:
        """Compare the batch that was recorded last, if it has not been."""
        while self._pending:
            self._pending.pop()()

    @property
    def losses(self) -> list[float]:
        """The losses of this pass."""
        self.compare_last()
        return [loss for loss, _ in self._now]

    def finish_pass(self) -> list[BatchRecord]:
        """End a pass; its records."""
        self.compare_last()
        now, self._now = self._now, []
        self.first = self.first or now
        return now

    def finish(self, total: float, largest: float, dtype: torch.dtype) -> None:
        """End a pass over all data, and compare its mean loss, of losses of at most that size."""
        now = self.finish_pass()
        if not self._enabled:
            return
        if self._total is None:
            self._total = total
        elif not close(self._total, total, dtype, [largest]):
            raise NondeterministicError(
                f"data: expected the same loss at every pass, got {self._total:.8g} and then "
                f"{total:.8g}: {self._cause_in_data(now)}"
            )

    def _compare_batch(self, batch: Any, value: Tensor, loss_of: LossOf) -> None:
        """Raise where the same batch as in the first pass has another loss."""
        k = len(self._now) - 1
        if k >= len(self.first):
            return
        (was, before), (now, after) = self.first[k], self._now[k]
        if before != after and self._fixed_batches:
            raise NondeterministicError(
                f"data: expected the same batches at every pass, got another one for batch {k}: "
                "samples of kind='mc' are drawn for each batch by its number, and outputs are stacked "
                "in this order. Use a loader with shuffle=False, or kind='exact'."
            )
        if before == after and not close(was, now, value.dtype):
            cause = self.random_cause(lambda: loss_of(batch), value.device) or (
                "the model or the criterion draws random numbers outside of torch, or changes a state "
                "of its own. Look for noise and counters in forward, and call model.eval(); or allow "
                "it by check_deterministic=False."
            )
            raise NondeterministicError(
                f"loss: expected the same value for the same batch, got {was:.8g} and then {now:.8g} "
                f"at batch {k}: {cause}"
            )

    def random_cause(self, loss: Callable[[], Tensor], device: torch.device) -> str:
        """What draws random numbers in a loss, and what to do; "" if nothing does."""
        modules = self._random_modules()
        line = None if modules else line_that_draws(loss, device)
        if line is None:
            return modules
        return (
            f"random numbers are drawn at {line}. Pass them in the batch, or turn them off, as "
            "model.eval() may do; or allow it by check_deterministic=False."
        )

    def _random_modules(self) -> str:
        """A sentence on the modules that draw random numbers in train mode; "" for none."""
        random = self._training(_draws_in_training)
        if not random:
            return ""
        return (
            f"{listing(random)} {'draw' if len(random) > 1 else 'draws'} at random in train mode. "
            "Call model.eval(), or allow it by check_deterministic=False."
        )

    def _cause_in_data(self, now: list[BatchRecord]) -> str:
        random = self._random_modules()
        if random:  # shuffled batches differ too, but eval mode may be all that is missing
            return random
        before, after = ([record for _, record in batches] for batches in (self.first, now))
        lengths = {len(numbers) for numbers in (*before, *after)}
        sums = range(0, lengths.pop() if len(lengths) == 1 else 0, 2)  # sums, in any order
        totals = [(fsum(x[i] for x in before), fsum(x[i] for x in after)) for i in sums]
        pairs = zip(totals, ([x[i] for x in before] for i in sums), strict=True)
        same = all(close(*total, torch.float32, size) for total, size in pairs)
        if same and len(before) == len(after):
            norms = self._training(lambda m: isinstance(m, BATCH_NORMS))
            return (
                "the batches hold the same examples, shuffled, and the loss depends on which examples "
                f"share a batch{' (' + ', '.join(norms) + ' in train mode)' if norms else ''}. Use a "
                "loader with shuffle=False, or call model.eval()."
            )
        return (
            "the data differs from pass to pass. Look for random augmentation, a sampler, or "
            "shuffle=True with drop_last=True; turn them off, or pass a list of fixed batches."
        )

    def _training(self, chosen: Callable[[nn.Module], bool]) -> list[str]:
        """The modules of a kind that are in train mode."""
        named = self._model.named_modules() if isinstance(self._model, nn.Module) else ()
        return [f"{name} ({type(m).__name__})" for name, m in named if m.training and chosen(m)]


def _draws_in_training(module: nn.Module) -> bool:
    """Whether a module draws random numbers in train mode."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return bool(module.dropout)
    return isinstance(module, DROPOUTS) and getattr(module, "p", None) != 0


def close(a: float, b: float, dtype: torch.dtype, terms: Sequence[float] = ()) -> bool:
    """Whether two losses of that dtype, made of terms of that size, are the same to rounding."""
    return agree(a, b, DERIVATIVES, terms=terms, dtype=dtype)


def _not_finite(batch: Any) -> bool:
    floats = (x for _, x in tensors_in("", batch) if x.is_floating_point())
    return not all(bool(x.isfinite().all()) for x in floats)


# by how much of their size v.Aw and w.Av may differ: for random vectors, over sqrt(P), by which their
# products are smaller than their size; and for any vectors, by rounding
BOUNDS = {
    torch.float64: (1e-6, 1e-10),
    torch.float32: (1e-2, 1e-5),
    torch.float16: (5e-2, 2e-3),
    torch.bfloat16: (0.2, 1e-2),
}


@final
class Symmetry:
    """Warns where the first two products show a matrix that is not symmetric: v.Aw = w.Av.

    A backward that is not the derivative, or that is detached in part, mostly makes a Hessian
    asymmetric; the check costs two inner products, once.

    loss: the asymmetry of which is warned of once.
    """

    def __init__(self, name: str, enabled: bool, space: Space, loss: Any) -> None:
        self._name, self._space, self._loss = name, space, loss
        wide = space.precision in (torch.float64, torch.float32)
        self._bound = BOUNDS[space.precision] if enabled and wide else None
        self._first: list[tuple[Tensor, Tensor]] = []
        self._done = False

    def forget(self) -> None:
        """Check again, because the matrix is another one now."""
        self._first, self._done = [], False

    def record(
        self,
        rows: Tensor,
        products: Tensor,
        half: Callable[[], torch.dtype | None],
        in_double: Callable[[Tensor], Tensor | None],
    ) -> None:
        """Compare the first two vectors and products, of one call or of two that follow each other.

        half: the dtype of half precision that the loss computes in, if any; in_double: the products of
        rows in float64, for a matrix whose own products are rounding, as of a classifier that fits all
        examples. Both are asked for only where the matrix is not symmetric to its dtype's rounding.
        """
        bound, key = self._bound, ("symmetric", self._name)
        known = rows.device.type != "cpu" and found_once(self._loss, key, lambda: None)
        self._done = self._done or bool(known)
        if self._done or bound is None:
            return
        pairs = list(zip(rows, products, strict=True))[:2]
        if len(pairs) + len(self._first) < 2:
            # copies, because the tensors belong to the caller
            self._first = [(v.clone(), Av.clone()) for v, Av in pairs]
            return
        (v, Av), (w, Aw) = (self._first + pairs)[:2]
        self._first, self._done = [], True
        gap, size = asymmetry(self._space, v, Av, w, Aw)
        if not exceeds(self._space, gap, size, bound):
            found_once(self._loss, key, lambda: True)
        elif (dtype := half()) is None or exceeds(self._space, gap, size, BOUNDS[dtype]):
            if self._is_rounding(torch.stack([v, w]), in_double):
                return
            own = object()  # the first operator of a loss that finds it warns
            if found_once(self._loss, ("asymmetry", self._name), lambda: own) is not own:
                return
            warn(
                f"{self._name}: expected a symmetric matrix, got v.Aw and w.Av that differ by "
                f"{gap / size:.1g} of their size. A backward in the loss is not the derivative of its "
                "forward, or cannot be differentiated: `hoglib.verify` of its custom Functions names "
                "it, and mode='finite-differences' computes the product to compare with. Or the loss "
                "draws random numbers, as dropout does in train mode."
            )

    def _is_rounding(self, rows: Tensor, in_double: Callable[[Tensor], Tensor | None]) -> bool:
        """Whether the products of two vectors in float64 show a symmetric matrix."""
        products = in_double(rows) if rows.dtype == torch.float32 else None
        if products is None:
            return False
        v, w = rows.double()
        gap, size = asymmetry(self._space, v, products[0], w, products[1])
        return not exceeds(self._space, gap, size, BOUNDS[torch.float32])


def asymmetry(space: Space, v: Tensor, Av: Tensor, w: Tensor, Aw: Tensor) -> tuple[float, float]:
    """|v.Aw - w.Av|, and the size of these products, in float64."""
    v, Av, w, Aw = (x[None] for x in (v, Av, w, Aw))
    each = (v, v), (w, w), (Av, Av), (Aw, Aw), (v, Aw), (w, Av)
    vv, ww, AvAv, AwAw, lhs, rhs = space.dots(*each, dtype=torch.float64)[:, 0].tolist()
    return abs(lhs - rhs), (vv * AwAw) ** 0.5 + (ww * AvAv) ** 0.5


def exceeds(space: Space, gap: float, size: float, bound: tuple[float, float]) -> bool:
    """Whether two products differ by more than the bound of their dtype."""
    # products of vanishing numbers underflow
    return size > 0 and gap > size * max(bound[0] / space.size**0.5, bound[1])
