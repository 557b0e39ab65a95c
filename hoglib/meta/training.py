"""A training as a function of what it was set up with, which `hypergradient` differentiates, and the
batches of its steps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import closures, pytree, validation
from hoglib._core.autograd import clone_inference_tensors, grad_enabled
from hoglib._core.state import preserve_random_state, random_state, set_random_state
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.meta.checkpoints import OnDisk
from hoglib.meta.checks import check_inner_losses
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import InnerSteps, is_truncated, unroll
from hoglib.meta.optimizers import is_transformation, resolve_rule
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.entry_points import examined_functions

Get = Callable[[int], Any]


class Batches:
    """The batch of each step of a training, by a function of the step."""

    def __init__(self, get: Get | None, end: int | None = None) -> None:
        self.given = get is not None  # whether the loss takes one
        self._get, self._end = get, end

    def at(self, i: int) -> Any:
        """The batch of step i, the same in each call."""
        return None if self._get is None else clone_inference_tensors(self._get(i))

    def last(self, steps: int) -> Any:
        """That of the last step, or of the last one that there is."""
        return self.at((self._end or max(steps, 1)) - 1)

    def begin(self, kept: OnDisk) -> None:
        """Take random numbers from where the first process of a call did."""


@final
class Passes(Batches):
    """A DataLoader, or another iterable, which is read again and again.

    Its random numbers (shuffling, augmentation) are those of a stream of its own, which starts at the
    state of the global generators and whose state is noted at the start of each pass. So a pass can be
    repeated, whatever the training draws in between. The last sqrt(n) batches are kept, since a replay
    asks for them in reverse.
    """

    def __init__(self, source: Iterable[Any], steps: int) -> None:
        super().__init__(None)
        self.given, self._source = True, source
        held = (capture.value for capture in closures.held(source))
        self._generators = [value for value in held if isinstance(value, torch.Generator)]
        self._starts = [(0, self._random())]  # of the passes: the first step, and the random state
        self._kept: dict[int, Any] = {}
        self._window = isqrt(steps) + 2
        self._iterator: Iterator[Any] | None = None
        self._next = 0

    def begin(self, kept: OnDisk) -> None:
        self._starts = [(0, kept.first("data", self._starts[0][1]))]
        self._kept, self._iterator, self._next = {}, None, 0

    def at(self, i: int) -> Any:
        if i not in self._kept:
            if i < self._next:
                self._starts = [start for start in self._starts if start[0] <= i]
                self._iterator = None
            while i not in self._kept:
                self._read()
        return self._kept[i]

    def _read(self) -> None:
        """The next batch, with random numbers of the stream."""
        with preserve_random_state(*self._generators):
            if self._iterator is None:
                self._next, self._stream = self._starts[-1]
            self._set_random(self._stream)
            if self._iterator is None:
                self._iterator = iter(self._source)
            batch = next(self._iterator, _END)
            if batch is _END:
                if self._starts[-1][0] == self._next:
                    raise ArgumentValueError(
                        "batches: expected an iterable that gives batches in each pass, got one that "
                        "gave none; make it iterable again, such as a list or a DataLoader."
                    )
                self._starts.append((self._next, self._random()))
                self._iterator = None
                return
            self._stream = self._random()
        self._kept[self._next] = clone_inference_tensors(batch)
        self._next += 1
        while len(self._kept) > self._window:
            del self._kept[next(iter(self._kept))]

    def _random(self) -> dict[str, Any]:
        """The random state in plain values and tensors, which a file can hold."""
        state = random_state()
        if state["numpy"] is not None:
            name, keys, *rest = state["numpy"]
            state["numpy"] = (name, keys.tolist(), *rest)
        return {**state, "own": [generator.get_state() for generator in self._generators]}

    def _set_random(self, state: dict[str, Any]) -> None:
        set_random_state(state)
        for generator, own in zip(self._generators, state["own"], strict=True):
            generator.set_state(own)


_END = object()


@dataclass(frozen=True)
class Training:
    """An inner training as a function of hyper."""

    inner: Callable[..., Tensor]
    start: Any  # the initial parameters, or a function of hyper
    rule: Any
    count: int  # of steps
    batches: Batches
    truncate: int | None = None

    def unrolled(self, hyper: Any) -> tuple[Any, list[Tensor]]:
        """The parameters at the end, with the graph of all steps, and the loss of each step."""

        def loss(i: int, params: Any, hyper: Any) -> tuple[Tensor, Any]:
            return self.value(params, hyper, self.batches.at(i)), ()

        inner = InnerSteps(loss, lambda _, hyper: self.rule_of(hyper), self.is_constant)
        found = unroll(inner, self.count, self.initial(hyper), hyper, "store")
        return found.params, found.losses

    def initial(self, hyper: Any) -> Any:
        """The parameters before the first step."""
        return self.start(hyper) if callable(self.start) else detached(self.start)

    def rule_of(self, hyper: Any) -> GradientTransformation:
        return resolve_rule(self.rule, hyper, {})

    def is_constant(self, i: int) -> bool:
        return is_truncated(i, self.count, self.truncate)

    def value(self, params: Any, hyper: Any, batch: Any) -> Tensor:
        """The inner loss."""
        more = (batch,) if self.batches.given else ()
        return validation.scalar("inner(params, hyper)", self.inner(params, hyper, *more))

    def generators(self) -> list[torch.Generator]:
        """The generators that the loss and the rule draw from, besides torch's own."""
        held = (c.value for fn in (self.inner, self.rule) for c in closures.held(fn))
        return [value for value in held if isinstance(value, torch.Generator)]

    def check_finite(self, losses: list[Tensor]) -> None:
        if losses:
            check_inner_losses(
                torch.stack(losses), "Look for NaN in params, hyper or the data.",
                "The inner training diverges: lower its learning rate.", self.count,
            )  # fmt: skip


def check_steps(steps: int | None, batches: Any, method: str, rule: Any) -> int:
    """The number of steps."""
    known = _check_batches(batches, steps)
    if steps is None:
        steps = int(method == "unrolled") if known is None else known
    count = validation.at_least("steps", steps, 1 if method == "unrolled" else 0)
    if count and rule is None:
        raise ArgumentValueError(
            f"rule: expected an update rule for {count} inner steps, got None; for instance "
            "`rule=hoglib.meta.sgd(0.1)`."
        )
    if isinstance(rule, str):
        raise ArgumentTypeError(
            f"rule: expected a rule with its rate, got the name {rule!r}; for instance "
            "`rule=hoglib.meta.sgd(0.1)`."
        )
    if rule is not None and not is_transformation(rule):
        validation.function("rule", rule)
    return count


def _check_batches(batches: Any, steps: int | None) -> int | None:
    """The number of batches if it is known; raises for what is no source of batches."""
    if batches is None or _is_function(batches):
        return None
    if isinstance(batches, Iterator):
        raise ArgumentTypeError(
            f"batches: expected a source that can be read again, got {validation.describe(batches)}, "
            "which can be read once; pass list(...), a DataLoader, or a function of the step."
        )
    indexed = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
    if not indexed and not isinstance(batches, Iterable):
        raise ArgumentTypeError(
            "batches: expected a sequence, a DataLoader or another iterable, or a function of the "
            f"step, got {validation.describe(batches)}."
        )
    if not hasattr(batches, "__len__"):
        return None
    count = len(batches)
    if not count or (indexed and steps is not None and count < steps):
        raise ArgumentValueError(
            f"batches: expected one for each of {max(steps or 1, 1)} steps, got {count}."
        )
    return count


def make_batches(batches: Any, steps: int) -> Batches:
    """The batches of a training of so many steps, which `check_steps` has checked."""
    if batches is None or _is_function(batches):
        return Batches(batches)
    if hasattr(batches, "__getitem__") and hasattr(batches, "__len__"):
        return Batches(batches.__getitem__, len(batches))
    return Passes(batches, steps)


def _is_function(batches: Any) -> bool:
    return callable(batches) and not isinstance(batches, Iterable)


def detached(tree: Any) -> Any:
    return pytree.map_tensors(Tensor.detach, tree)


@contextmanager
def prepared_training(
    what: str, inner: Any, params: Any, hyper: Any, rule: Any, count: int, batches: Any,
    stand_ins: bool, truncate: int | None = None,
) -> Iterator[tuple[Training, Any]]:  # fmt: skip
    """The training, and hyper; inside, autograd records, with stand-ins if wanted."""
    with examined_functions(what), grad_enabled(), stand_ins_if(stand_ins):
        source, start = make_batches(batches, count), clone_inference_tensors(params)
        yield Training(inner, start, rule, count, source, truncate), clone_inference_tensors(hyper)
