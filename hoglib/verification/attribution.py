r"""Measures what each slot on ctx, and each call that leaves the graph, loses of a second derivative.

A backward is a function B(S_1, ..., S_n, g) of the slots of its context and of the incoming gradients.
Along a direction v of the inputs its derivative is a sum over the slots,

    d/dv B(S(x), g) = sum_k  dB/dS_k  dS_k/dv

Autograd computes the terms of the slots that are inputs or outputs of the Function, unless backward
leaves the graph. Here each term is computed by central differences, which run forward and backward as
plain functions with one slot taken from x +- h v. What autograd computes of it comes from the graph of
backward as a plain function. The rest is what the slot loses. The same holds for a jvp.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core import pytree
from hoglib._core.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.element_differences import element_scales, random_like
from hoglib._core.finite_differences import difference_quotient, steps
from hoglib._core.pytree import is_float
from hoglib._core.state import same
from hoglib._core.torch_internals import backward_rule, is_once_differentiable
from hoglib.verification import function_rules
from hoglib.verification.call import laid_out_as, seed_all
from hoglib.verification.function_rules import Context, Record, Run, Slot, kind_of
from hoglib.verification.rounding import HalfWatch
from hoglib.verification.subject import Application, application

LOST = {torch.float64: 1e-5, torch.float32: 2e-3}  # of the whole term: less is rounding
LOST_NARROW = 0.03  # the same in other dtypes
WORTH_SAYING = 1e-3  # of what is lost
DRAWS = 4

Moves = dict[int, Tensor]  # by argument


class Diagnosis(NamedTuple):
    """How much of the second-order term is lost, where, and by which slots."""

    lost: float  # relative to the whole term
    slots: list[Slot]
    detached: list[DetachedGradient]  # those that do harm, or might
    once: bool  # @once_differentiable
    error: Exception | None  # what backward raised when its graph was asked for
    inner: list[Application]  # Functions that backward applies
    only_backward: bool = False  # a jvp, and nothing was saved for it
    kept: bool = True  # anything on the context


def step_of(tensors: Iterable[Any]) -> float:
    """The step of the differences, for the narrowest dtype."""
    return max((steps("slot", x.dtype.to_real())[0] for x in tensors if is_float(x)), default=1e-5)


def diagnose(app: Application, moves: Moves | None = None, *, in_jvp: bool = False) -> Diagnosis:
    """Measure what each slot of a Function loses; its arguments must not lie on a kink.

    moves: how the arguments move along some direction, (above - below) / 2h; by default each on its
    own, which some Functions do not allow (a symmetric matrix, probabilities).
    """
    return _Attribution(app, in_jvp, moves).diagnosis()


@final
class _Attribution:
    def __init__(self, app: Application, in_jvp: bool, moves: Moves | None) -> None:
        self._app, self._in_jvp = app, in_jvp
        self._random = torch.Generator().manual_seed(1)
        self._once = not in_jvp and is_once_differentiable(app.function)
        rule: Any = app.function.jvp if in_jvp else backward_rule(app.function)
        self._rule: Callable[..., Any] = rule.__wrapped__ if self._once else rule
        self._v = moves or {
            i: random_like(app.args[i], self._random) * element_scales(app.args[i]) for i in app.by
        }
        self._inner: list[Application] = []
        with HalfWatch() as watch:
            base = self._run(0.0)
            self._arguments = self._incoming(base)
            with suppress(Exception):  # reported by `diagnosis`
                self._results(base.record, self._arguments)
        given = [app.args[i].dtype.to_real() for i in app.by]
        dtypes = given if watch.dtype is None else [*given, watch.dtype]
        self._step = max(steps("slot", dtype)[0] for dtype in dtypes)
        self._least = max(LOST.get(dtype, LOST_NARROW) for dtype in dtypes)

    # Running forward and backward.

    def _run(self, h: float) -> Run:
        """A forward at x + h v."""
        seed_all()
        args = self._app.fresh()
        for i, v in self._v.items():
            args[i] = laid_out_as(args[i], args[i] + h * v)
        return self._app.run(args)

    def _incoming(self, run: Run) -> list[Tensor | None]:
        if not self._in_jvp:
            return run.incoming(self._random)
        return [
            random_like(x, self._random) if i in self._app.by else None
            for i, x in enumerate(run.inputs)
        ]

    def _results(self, record: Record, incoming: Iterable[Tensor | None]) -> list[Tensor]:
        """The floating-point results of backward, or of jvp, for what is on the context."""
        seed_all()
        context = Context(record, in_jvp=self._in_jvp)
        returned = function_rules.as_tuple(self._rule(context, *incoming))
        if self._in_jvp:
            return [r for r in returned if is_float(r)]
        kept = [r for i, r in enumerate(returned) if i in self._app.by]
        return [r for r in kept if is_float(r)]

    # What each slot contributes, by differences.

    def _results_with_moved(self, labels: Sequence[str], h: float) -> list[Tensor]:
        """The results of backward with some slots taken from a run at x + h v."""
        record, other = (self._as_saved(self._run(at)) for at in (0.0, h))
        slots, moved = (r.slots(in_jvp=self._in_jvp) for r in (record, other))
        slots |= {label: moved[label] for label in labels}
        with torch.no_grad():
            return self._results(record.with_slots(slots, in_jvp=self._in_jvp), self._arguments)

    def _as_saved(self, run: Run) -> Record:
        """The record, with inputs and outputs that require grad, as autograd gives them to backward."""
        own = [run.inputs[i] for i in self._app.by]
        for x in (*own, *(y for y in run.outputs if not run.record.is_silent(y))):
            with suppress(RuntimeError):
                if is_float(x):
                    x.requires_grad_()
        return run.record

    def _terms(self, labels: Sequence[str]) -> dict[str, list[Tensor]]:
        """The term of each slot, by central differences.

        Slots that cannot be taken from another run alone, such as a tensor and the leaf of its graph,
        are moved together, and get equal shares of the term.
        """
        terms, alone = {}, []
        above, below = (
            self._run(h).record.slots(in_jvp=self._in_jvp) for h in (self._step, -self._step)
        )
        for label in labels:
            if _is_same(above.get(label), below.get(label)):
                continue
            try:
                terms[label] = self._term([label])
            except Exception:
                alone.append(label)
        with suppress(Exception):
            together = self._term(alone) if alone else []
            terms |= {label: [t / len(alone) for t in together] for label in alone}
        return terms

    def _term(self, labels: Sequence[str]) -> list[Tensor]:
        ends = self._step, -self._step
        above, below = (self._results_with_moved(labels, h) for h in ends)
        return [slope.detach() for slope in difference_quotient(above, below, self._step)]

    # What autograd sees of it.

    def _autograd_terms(
        self, watch: DetachmentWatch
    ) -> tuple[list[Tensor], dict[str, list[tuple[Tensor, Tensor]]]]:
        """The results of backward with their graph; each slot's leaves, and how they move along v."""
        run, ends = self._run(0.0), (self._run(self._step), self._run(-self._step))
        slots = run.record.slots(in_jvp=self._in_jvp)
        moved = [end.record.slots(in_jvp=self._in_jvp) for end in ends]
        own = (*(run.inputs[i] for i in self._app.by), *run.outputs)
        owned = {id(t) for t in own if not run.record.is_silent(t)}
        leaves: dict[str, list[tuple[Tensor, Tensor]]] = {}
        held = {}
        for label, value in slots.items():
            flat, structure = pytree.flatten(value)
            ends_flat = [pytree.leaves(m.get(label)) for m in moved]
            for n, leaf in enumerate(flat):
                if is_float(leaf) and id(leaf) in owned:
                    above, below = (f[n] for f in ends_flat)
                    flat[n] = leaf.detach().clone().requires_grad_()
                    move = ((above - below) / (2 * self._step)).detach()
                    leaves.setdefault(label, []).append((flat[n], move))
            held[label] = pytree.unflatten(flat, structure)
        record = run.record.with_slots(held, in_jvp=self._in_jvp)
        incoming = [None if g is None else g.clone().requires_grad_() for g in self._arguments]
        for k, g in enumerate(incoming):
            if g is not None:
                leaves[self._argument_name(k)] = [(g, random_like(g, self._random))]
        with watch.outside_functions(self._apply), torch.enable_grad():
            results = self._results(record, incoming)
        return results, leaves

    def _apply(self, function: type[Function], args: tuple[Any, ...]) -> None:
        """Record a Function that backward applies."""
        app = application(function, args)
        # ops of hoglib may read outputs as if they were constants
        if function.__module__.startswith("hoglib.ops."):
            return
        if app is not None and function not in [other.function for other in self._inner]:
            self._inner.append(app)

    def _argument_name(self, k: int) -> str:
        return f"{'tangent' if self._in_jvp else 'grad_output'} {k}"

    def _measure_lost(
        self, repair: Iterable[DetachedGradient] = ()
    ) -> tuple[dict[str, float], float, DetachmentWatch]:
        """The loss of each slot and the whole term, root mean squares over random covectors."""
        watch = DetachmentWatch([(cut.how, cut.place) for cut in repair])
        seen, leaves = self._autograd_terms(watch)
        labels = list(self._run(0.0).record.slots(in_jvp=self._in_jvp))
        terms = self._terms(labels)
        for label, pairs in leaves.items():
            if label not in labels:
                terms[label] = self._linear_term(label, pairs[0][1])
        lost = dict.fromkeys(terms, 0.0)
        whole = 0.0
        for _ in range(DRAWS):
            w = [random_like(r, self._random) for r in seen]
            carried = self._terms_by_autograd(seen, w, leaves)
            for label, term in terms.items():
                expected = _dot(w, term)
                lost[label] += (expected - carried.get(label, 0.0)) ** 2
                whole += expected**2
        return {k: (v / DRAWS) ** 0.5 for k, v in lost.items()}, (whole / DRAWS) ** 0.5, watch

    def _linear_term(self, label: str, direction: Tensor) -> list[Tensor]:
        """The term of an incoming gradient, by central differences."""
        k = int(label.rsplit(" ", 1)[1])

        def at(sign: float) -> list[Tensor]:
            incoming = list(self._arguments)
            g = incoming[k]
            assert g is not None
            incoming[k] = g + sign * self._step * direction
            with torch.no_grad():
                return self._results(self._as_saved(self._run(0.0)), incoming)

        return [slope.detach() for slope in difference_quotient(at(1.0), at(-1.0), self._step)]

    def _terms_by_autograd(
        self, seen: list[Tensor], w: list[Tensor], leaves: dict[str, list[tuple[Tensor, Tensor]]]
    ) -> dict[str, float]:
        pairs = [pair for part in leaves.values() for pair in part]
        scalars = [(c * r).sum().real for c, r in zip(w, seen, strict=True) if r.requires_grad]
        if not scalars or not pairs:
            return {}
        grads = torch.autograd.grad(
            sum(scalars[1:], scalars[0]), [leaf for leaf, _ in pairs], retain_graph=True,
            allow_unused=True,
        )  # fmt: skip
        by_leaf = {id(leaf): g for (leaf, _), g in zip(pairs, grads, strict=True)}
        return {
            label: sum(
                float((g.conj() * move).sum().real)
                for leaf, move in part
                if (g := by_leaf[id(leaf)]) is not None
            )
            for label, part in leaves.items()
        }

    # Which of them do harm.

    def diagnosis(self) -> Diagnosis:
        """Measure the loss, and find what causes it."""
        inner = self._inner
        try:
            lost, whole, watch = self._measure_lost()
        except Exception as error:
            record = self._run(0.0).record
            lacking = self._in_jvp and bool(record.saved) and not record.for_forward
            kept = bool(record.slots(in_jvp=self._in_jvp))
            before = DetachmentWatch()
            with suppress(Exception):  # the calls that left the graph before backward raised
                self._autograd_terms(before)
            return Diagnosis(1.0, [], before.detached, self._once, error, [], lacking, kept)
        size = max(whole, 1e-300)
        total = sum(lost.values())
        if total <= self._least * size:
            return Diagnosis(0.0, [], [], self._once, None, inner)
        detached = self._harmful_detachments(watch.detached, total, size)
        slots = []
        for slot in self._describe_slots():
            slot.share = lost.get(slot.label, 0.0) / total
            if slot.share > max(WORTH_SAYING, self._least * size / total):
                slots.append(slot)
        return Diagnosis(total / size, slots, detached, self._once, None, inner)

    def _harmful_detachments(
        self, detached: list[DetachedGradient], total: float, size: float
    ) -> list[DetachedGradient]:
        """The detached gradients whose repair reduces the loss; also those beyond repair, if a loss
        remains."""
        repairable = [one for one in detached if one.repairable]
        least = self._lost_after_repair(repairable)
        guilty = []
        for cut in repairable:
            without = self._lost_after_repair([other for other in repairable if other is not cut])
            if without > least + max(0.01 * total, self._least * size):
                guilty.append(cut)
        others = [one for one in detached if not one.repairable]
        if others and least > self._least * size:
            guilty += others
        return guilty or (detached if self._lost_after_repair([]) > self._least * size else [])

    def _lost_after_repair(self, repair: list[DetachedGradient]) -> float:
        """What slots with a graph still lose if some detached gradients are repaired."""
        kinds = {slot.label: slot.kind for slot in self._describe_slots()}
        try:
            lost, _, _ = self._measure_lost(repair)
        except Exception:  # what was repaired does not run
            return 0.0
        graphed = ("input", "output", "gradient")
        return sum(value for label, value in lost.items() if kinds.get(label) in graphed)

    def _describe_slots(self) -> list[Slot]:
        """All slots and incoming gradients, with their kinds and the lines that saved them."""
        run = self._run(0.0)
        slots = []
        for label, value in run.record.slots(in_jvp=self._in_jvp).items():
            noted = run.record.noted(label)
            kind, what = kind_of(value, run, self._app.names)
            slot = Slot(label, kind, what, noted.name, noted.place, type(value).__name__)
            slot.graphed = any(t.requires_grad for t in pytree.tensors(value))
            slots.append(slot)
        names = [self._argument_name(k) for k, g in enumerate(self._arguments) if g is not None]
        return slots + [Slot(name, "gradient", name) for name in names]


def _is_same(a: Any, b: Any) -> bool:
    """Whether a slot does not move: the same tensor or number at both ends."""
    if isinstance(a, Tensor):
        return same(a, b)
    return a is None or (isinstance(a, bool | int | float | str | torch.dtype) and a == b)


def _dot(w: list[Tensor], term: list[Tensor]) -> float:
    return sum(float((a.conj() * b).sum().real) for a, b in zip(w, term, strict=True))
