"""A training as a function of what it was set up with, which `hypergradient` differentiates, and the
batches of its steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, TypedDict, final

import torch
from torch import Tensor

from hoglib._core import closures, pytree, validation
from hoglib._core.autograd import clone_inference_tensors
from hoglib._core.problem import Policy, check_option_names
from hoglib._core.state import preserve_random_state, random_state, set_random_state
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.meta.checkpoints import OnDisk
from hoglib.meta.checks import check_inner_losses
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import InnerSteps, check_truncate, is_truncated, unroll
from hoglib.meta.optimizers import is_transformation, resolve_rule

Get = Callable[[int], Any]


class TrainingOptions(TypedDict, total=False):
    """The keyword options of :func:`~hoglib.meta.hypergradient` and
    :func:`~hoglib.meta.leave_k_out`: what a training is, besides its loss.

    Args:
        rule: The update rule, such as ``hog.meta.sgd(0.1)``, or a function from hyper to one, such
            as ``lambda hyper: hog.meta.sgd(hyper["lr"])``. Needed where there are steps.
        steps: The number of steps. Default: one for each batch, or 1; 0 for an implicit method
            without batches, which takes params for theta*.
        batches: What inner is given in each step: a sequence, a function of the step, or a DataLoader
            or other iterable, which is read again and again. An implicit method uses the last for the
            minimum. Default: none, inner takes (params, hyper).
        progress: Show a bar that counts steps, or trainings (needs tqdm). Not of a hypergradient with
            memory="store". Default: False.
        stand_ins: Run inside `hoglib.second_order()`, where torch calls without a right second
            derivative are replaced by their stand-ins. Default: True.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> options = hog.meta.TrainingOptions(rule=hog.meta.sgd(0.25), steps=1)
        >>> loss = lambda params, hyper: (params - hyper).square()
        >>> hog.meta.hypergradient(loss, loss, torch.tensor(0.0), torch.tensor(1.0), **options).value
        tensor(0.2500)
    """

    rule: GradientTransformation | Callable[[Any], GradientTransformation] | None
    steps: int | None
    batches: Sequence[Any] | Iterable[Any] | Get | None
    progress: bool
    stand_ins: bool


OPTION_NAMES = tuple(TrainingOptions.__annotations__)


class Batches:
    """The batch of each step of a training, by a function of the step."""

    def __init__(self, get: Get | None, end: int | None = None) -> None:
        self.given = get is not None  # whether the loss takes one
        self.count = self._end = end  # how many there are, if that is known
        self._get = get

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

    def __init__(self, source: Iterable[Any], steps: int | None, count: int | None) -> None:
        super().__init__(None)
        self.given, self._source, self.count = True, source, count
        held = (capture.value for capture in closures.held(source))
        self._generators = [value for value in held if isinstance(value, torch.Generator)]
        self._starts = [(0, self._random())]  # of the passes: the first step, and the random state
        self._kept: dict[int, Any] = {}
        self._window = isqrt(steps or count or 1) + 2
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


@dataclass(frozen=True, eq=False)
class Training:
    """An inner training as a function of hyper, and the loss after it; its options are checked."""

    policy: Policy
    outer: Callable[..., Tensor]
    inner: Callable[..., Tensor]
    start: Any  # the initial parameters, or a function of hyper
    rule: Any
    count: int  # of steps
    batches: Batches
    progress: bool = False
    truncate: int | None = None

    @classmethod
    def of(
        cls, caller: str, outer: Any, inner: Any, start: Any, hyper: Any, options: Mapping[str, Any],
        method: str = "unrolled", truncate: int | None = None,
    ) -> "Training":  # fmt: skip
        check_option_names(caller, options, OPTION_NAMES)
        validation.function("outer", outer)
        validation.function("inner", inner)
        check_truncate(truncate)
        validation.parameters(hyper, "hyper")
        least, steps = int(method == "unrolled"), options.get("steps")
        if steps is not None:
            validation.at_least("steps", steps, least)
        batches, rule = make_batches(options.get("batches"), steps), options.get("rule")
        count = next(n for n in (steps, batches.count, least) if n is not None)
        _check_rule(rule, count)
        progress = validation.flag("progress", options.get("progress", False))
        policy = Policy(
            caller, stand_ins=validation.flag("stand_ins", options.get("stand_ins", True))
        )
        return cls(policy, outer, inner, start, rule, count, batches, progress, truncate)

    def unrolled(self, hyper: Any) -> tuple[Any, list[Tensor]]:
        """The parameters at the end, with the graph of all steps, and the loss of each step."""
        found = unroll(self.steps, self.count, self.initial(hyper), hyper, "store")
        return found.params, found.losses

    @property
    def steps(self) -> InnerSteps:
        """The steps, with hyper as their constants."""
        return InnerSteps(
            lambda i, params, hyper: (self.value(params, hyper, self.batches.at(i)), ()),
            lambda _, hyper: resolve_rule(self.rule, hyper, {}),
            lambda i: is_truncated(i, self.count, self.truncate),
        )

    def initial(self, hyper: Any) -> Any:
        """The parameters before the first step."""
        given = clone_inference_tensors(self.start)
        return given(hyper) if callable(given) else detached(given)

    def value(self, params: Any, hyper: Any, batch: Any) -> Tensor:
        """The inner loss."""
        more = (batch,) if self.batches.given else ()
        return validation.scalar("inner(params, hyper)", self.inner(params, hyper, *more))

    def outer_value(self, params: Any, hyper: Any) -> Tensor:
        """The outer loss."""
        return validation.scalar("outer(params, hyper)", self.outer(params, hyper))

    def generators(self) -> list[torch.Generator]:
        """The generators that the loss and the rule draw from, besides torch's own."""
        held = (c.value for fn in (self.inner, self.rule) for c in closures.held(fn))
        return [value for value in held if isinstance(value, torch.Generator)]

    def check_finite(self, losses: list[Tensor], value: Tensor | None = None) -> None:
        """Raise for a loss of a step, or an outer one, that is not finite."""
        if losses:
            check_inner_losses(
                torch.stack(losses), "Look for NaN in params, hyper or the data.",
                "The inner training diverges: lower its learning rate.", self.count,
            )  # fmt: skip
        if value is not None:
            validation.finite("outer(params, hyper)", value.detach(), "Look for NaN in its data.")


def _check_rule(rule: Any, count: int) -> None:
    """Raise for what is no update rule of so many steps."""
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


def make_batches(source: Any, steps: int | None) -> Batches:
    """The batches of a training; raises for what is no source of batches."""
    if source is None or (callable(source) and not isinstance(source, Iterable)):
        return Batches(source)
    if isinstance(source, Iterator):
        raise ArgumentTypeError(
            f"batches: expected a source that can be read again, got {validation.describe(source)}, "
            "which can be read once; pass list(...), a DataLoader, or a function of the step."
        )
    sized = hasattr(source, "__len__")
    indexed = sized and hasattr(source, "__getitem__")
    if not indexed and not isinstance(source, Iterable):
        raise ArgumentTypeError(
            "batches: expected a sequence, a DataLoader or another iterable, or a function of the "
            f"step, got {validation.describe(source)}."
        )
    count = len(source) if sized else None
    needed = steps if indexed and steps is not None else 1
    if count is not None and count < max(needed, 1):
        raise ArgumentValueError(
            f"batches: expected one for each of {max(steps or 1, 1)} steps, got {count}."
        )
    return Batches(source.__getitem__, count) if indexed else Passes(source, steps, count)


def detached(tree: Any) -> Any:
    return pytree.map_tensors(Tensor.detach, tree)
