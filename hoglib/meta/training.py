r"""A training as a function of its hyperparameters, and reverse mode through it, one step at a time.

    c_{i+1} = F_i(c_i, h)          c = (parameters, state of the rule), h the constants
    u_i = (dF_i / dc)^T u_{i+1}    gradient of h += (dF_i / dh)^T u_{i+1}    for i = n - 1, ..., 0

Only the graph of one step is held at a time. The state before a step is kept from the forward run, or
recomputed from the last kept state. A `schedule` decides which states are kept:

    "remat"   every state                                      each step runs once more
    "sqrt"    every sqrt(n)-th, then all of one segment        each step runs twice more
    "log"     by recursive halving, log2(n) at a time          log2(n) / 2 + 1 times more

Each state of the replay is compared with the state of the forward run, bit for bit.

References:
    Griewank and Walther, Algorithm 799: revolve, 2000; Engstrom et al., Optimizing ML Training with
    Metagradient Descent, 2025, algorithm 1 (REPLAY).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple, TypedDict, final

import torch
from torch import Tensor, nn

from hoglib._core.messages import closures, validation
from hoglib._core.messages.call_errors import binding_error, function_name
from hoglib._core.messages.files import digest
from hoglib._core.modules.state import (
    GeneratorStates,
    preserve_random_state,
    random_state,
    set_random_state,
)
from hoglib._core.numerics.trust import BITS, SUMS, agree
from hoglib._core.problem import Policy, check_option_names
from hoglib._core.remat.call import ByTangents
from hoglib._core.runtime.freed_memory import return_freed_memory
from hoglib._core.substrate.autograd import clone_inference_tensors
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_internals import gradients
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NondeterministicError
from hoglib.meta import inner_loop
from hoglib.meta.checkpoints import BACKWARD, InMemory, OnDisk, State
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.optimizers import check_rule, resolve_rule

Get = Callable[[int], Any]  # step -> batch


class TrainingOptions(TypedDict, total=False):
    """The keyword options of :func:`~hoglib.meta.hypergradient` and
    :func:`~hoglib.meta.leave_k_out`: everything that defines a training, besides its loss.

    Args:
        rule: The update rule, such as ``hog.meta.sgd(0.1)``, or a function from hyper to a rule, such
            as ``lambda hyper: hog.meta.sgd(hyper["lr"])``. Required if there are steps.
        steps: The number of steps. Default: one for each batch, or 1. For an implicit method without
            batches the default is 0, which takes params for theta*.
        batches: The third argument of inner in each step: a sequence, a function of the step, or a
            DataLoader or other iterable, which is read again and again. An implicit method uses the
            last batch for the minimum. Default: none, inner takes (params, hyper).
        progress: Show a bar that counts steps, or trainings (needs tqdm); a hypergradient with
            memory="store" shows none. Default: False.
        stand_ins: Run inside `hoglib.second_order()`, which replaces torch calls without a right second
            derivative by stand-ins. Default: True.
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
    """The batch of each step of a training, from a function of the step."""

    def __init__(self, get: Get | None, end: int | None = None) -> None:
        self.given = get is not None  # the loss takes a batch
        self.count = self._end = end  # the number of batches; None if unknown
        self._get = get

    def at(self, i: int) -> Any:
        """The batch of step i; repeated calls return equal batches."""
        return None if self._get is None else clone_inference_tensors(self._get(i))

    def last(self, steps: int) -> Any:
        """The batch of the last step, or the last batch if there are fewer batches than steps."""
        return self.at((self._end or max(steps, 1)) - 1)

    def begin(self, kept: OnDisk) -> None:
        """Resume: restore the random state at the start of the interrupted run."""


@final
class Passes(Batches):
    """Batches from a DataLoader or another iterable, which is read again and again.

    Shuffling and augmentation draw from a random stream of their own, whatever the training draws in
    between. The stream starts at the state of the global generators, and its state is recorded at the
    start of each pass, so that a pass can be repeated. The last sqrt(n) batches are kept, because a
    replay asks for batches in reverse.
    """

    def __init__(self, source: Iterable[Any], steps: int | None, count: int | None) -> None:
        super().__init__(None)
        self.given, self._source, self.count = True, source, count
        self._generators = closures.generators(source)  # generators of the source itself
        self._starts = [(0, self._random())]  # for each pass: its first step, and the random state
        self._kept: dict[int, Any] = {}  # the latest batches, by step
        self._window = isqrt(steps or count or 1) + 2  # the number of batches to keep
        self._iterator: Iterator[Any] | None = None  # of the current pass
        self._next = 0  # the step of the next batch to read

    def begin(self, kept: OnDisk) -> None:
        self._starts = [(0, kept.first("data", self._starts[0][1]))]
        self._kept, self._iterator, self._next = {}, None, 0

    def at(self, i: int) -> Any:
        if i not in self._kept:
            if i < self._next:
                # an earlier batch: read its pass again from the start
                self._starts = [start for start in self._starts if start[0] <= i]
                self._iterator = None
            while i not in self._kept:
                self._read()
        return self._kept[i]

    def _read(self) -> None:
        """Read one batch, with random numbers from the stream."""
        with preserve_random_state(*self._generators):
            if self._iterator is None:
                self._next, self._stream = self._starts[-1]
            set_random_state(self._stream)
            for generator, own in zip(self._generators, self._stream["own"], strict=True):
                generator.set_state(own)
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
            self._stream = self._random()  # the stream continues here at the next batch
        self._kept[self._next] = clone_inference_tensors(batch)
        self._next += 1
        while len(self._kept) > self._window:
            del self._kept[next(iter(self._kept))]

    def _random(self) -> dict[str, Any]:
        """The random state as plain values and tensors, for a file."""
        state = random_state()
        if state["numpy"] is not None:
            name, keys, *rest = state["numpy"]
            state["numpy"] = (name, keys.tolist(), *rest)
        return {**state, "own": [generator.get_state() for generator in self._generators]}


_END = object()  # marks the end of a pass


@dataclass(frozen=True, eq=False)
class Training:
    """An inner training as a function of hyper, and the outer loss after it; options are checked."""

    policy: Policy
    outer: Callable[..., Tensor]  # outer(params, hyper)
    inner: Callable[..., Tensor]  # inner(params, hyper), or inner(params, hyper, batch)
    start: Any  # the initial parameters, or a function of hyper
    rule: Any  # an update rule, or a function from hyper to a rule
    count: int  # number of steps
    batches: Batches
    progress: bool = False
    truncate: int | None = None  # differentiate through this many last steps only
    mixed: ByTangents | None = None  # gradients of steps are differentiated forward over reverse

    @classmethod
    def of(
        cls,
        caller: str,
        outer: Any,
        inner: Any,
        start: Any,
        hyper: Any,
        options: Mapping[str, Any],
        method: str = "unrolled",
        truncate: int | None = None,
    ) -> "Training":
        check_option_names(caller, options, OPTION_NAMES)
        # a module is callable: refuse it before `initial` calls it
        if isinstance(start, nn.Module):
            validation.parameters(start, "params")
        validation.none_or_at_least("truncate", truncate, 0)
        validation.parameters(hyper, "hyper")
        least, steps = int(method == "unrolled"), options.get("steps")
        validation.none_or_at_least("steps", steps, least)
        batches, rule = make_batches(options.get("batches"), steps), options.get("rule")
        count = next(n for n in (steps, batches.count, least) if n is not None)
        _check_rule(rule, steps, count)
        for what, function, more in (("outer", outer, 0), ("inner", inner, int(batches.given))):
            validation.function(what, function)
            if reason := binding_error(function, (start, hyper, *[batches] * more)):
                raise ArgumentTypeError(
                    f"{what}: expected a function of (params, hyper{', batch' * more}), got "
                    f"{function_name(function)} ({reason})."
                )
        progress = validation.boolean("progress", options.get("progress", False))
        stand_ins = validation.boolean("stand_ins", options.get("stand_ins", True))
        policy = Policy(caller, stand_ins=stand_ins)
        return cls(policy, outer, inner, start, rule, count, batches, progress, truncate)

    def unrolled(self, hyper: Tree) -> tuple[Any, list[Tensor]]:
        """The final parameters, with the graph of all steps, and the loss of each step."""
        found = inner_loop.unroll(self.steps, self.count, self.initial(hyper), hyper, "store")
        return found.params, found.losses

    @property
    def steps(self) -> inner_loop.InnerSteps:
        """The inner steps, with hyper as their constants."""
        return inner_loop.InnerSteps(
            lambda i, params, hyper: (self.value(params, hyper, self.batches.at(i)), ()),
            lambda _, hyper: resolve_rule(self.rule, hyper, {}),
            lambda i: inner_loop.is_truncated(i, self.count, self.truncate),
            mixed=self.mixed,
            generators=self.generators() if self.mixed else (),
        )

    def initial(self, hyper: Tree) -> Any:
        """The parameters before the first step."""
        given = clone_inference_tensors(self.start)
        return given(hyper) if callable(given) else detach_all(given)

    def value(self, params: Tree, hyper: Tree, batch: object) -> Tensor:
        """The inner loss."""
        more = (batch,) if self.batches.given else ()
        return validation.scalar("inner(params, hyper)", self.inner(params, hyper, *more))

    def outer_value(self, params: Tree, hyper: Tree) -> Tensor:
        """The outer loss."""
        return validation.scalar("outer(params, hyper)", self.outer(params, hyper))

    def generators(self) -> list[torch.Generator]:
        """The generators of the loss and the rule, besides torch's own."""
        return closures.generators(self.inner, self.rule)

    def check_finite(self, losses: list[Tensor], value: Tensor | None = None) -> None:
        """Raise for an infinite or NaN loss of a step, or outer loss."""
        if losses:
            inner_loop.check_inner_losses(
                torch.stack(losses),
                "Look for NaN in params, hyper or the data.",
                "The inner training diverges: lower its learning rate.",
                self.count,
            )
        if value is not None:
            validation.finite("outer(params, hyper)", value.detach(), "Look for NaN in its data.")


def _check_rule(rule: object, steps: int | None, count: int) -> None:
    """Raise for a missing or wrong update rule, or one that no step uses."""
    if count and rule is None:
        raise ArgumentValueError(
            "rule: expected an update rule for the inner steps, got None; for instance "
            f"`rule=hoglib.meta.sgd(0.1), steps={steps or 100}`. If params are the end of a training, "
            "`method='cg'` needs neither."
        )
    if rule is not None and not count and steps is None:
        raise ArgumentValueError(
            "steps: expected a number of inner steps with this rule, got None; pass steps=, or leave "
            "out the rule if params are the end of a training."
        )
    if rule is not None and not callable(rule):
        check_rule(rule)


def make_batches(source: Any, steps: int | None) -> Batches:
    """The batches of a training; raises for a wrong source."""
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
        wanted = max(steps or 1, 1)
        raise ArgumentValueError(f"batches: expected one for each of {wanted} steps, got {count}.")
    return Batches(source.__getitem__, count) if indexed else Passes(source, steps, count)


def detach_all(tree: Tree) -> Any:
    return pytree.map_tensors(Tensor.detach, tree)


class Cotangents(NamedTuple):
    """The gradient of the result during the backward replay."""

    step: int  # `carry` belongs to the state after this many steps
    carry: list[Tensor | None]  # gradients by the leaves of that state
    constants: list[Tensor | None]  # gradients by the constants, summed over the replayed steps
    # sum of (u theta eps)^2 over steps and parameters: the effect of rounding each parameter
    rounding: Tensor


@final
class Replay:
    """A training that runs forward, and is then differentiated in reverse.

    Args:
        training: The training.
        start: The first state: (parameters, state of the rule), without a graph.
        constants: hyper; its floating-point tensors require grad if their gradient is wanted.
        schedule: "remat", "sqrt" or "log".
        files: Keeps states on disk. Default: states are kept in memory.
        advance: Called after each step, forward or backward.
    """

    def __init__(
        self,
        training: Training,
        start: Tree,
        constants: object,
        schedule: str,
        files: OnDisk | None,
        advance: Callable[[], None],
    ) -> None:
        self.training, self.constants, self._advance = training, constants, advance
        self._steps = training.steps
        self._leaves, self._structure = pytree.flatten(start)  # of the first state
        self._wanted = [x for x in pytree.leaves(constants) if _is_wanted(x)]  # require grad
        self._schedule, self._files = schedule, files
        self._kept: InMemory | OnDisk = InMemory() if files is None else files
        self._segment = InMemory()  # for "sqrt": the states of the segment in replay
        devices = [x for x in (*self._leaves, *self._wanted) if isinstance(x, Tensor)]
        self._generators = GeneratorStates({x.device for x in devices}, training.generators())
        drawn = self._generators.now()
        self._start = State(self._leaves, files.first("generators", drawn) if files else drawn)
        self._final: State | None = None  # set by `run`

    # Forward

    def run(self) -> tuple[Any, list[Tensor]]:
        """Run from the last kept state: the final state, and the loss of each step.

        Losses are checked every sqrt(n) steps; a diverged training raises.
        """
        count = self.training.count
        kept = set(inner_loop.states_to_keep(self._schedule, 0, count))
        begin, state, losses = self._last_kept()
        every = max(1, isqrt(count))
        # a state kept besides the schedule's, so that an interrupted run can resume
        rolling = None
        self._generators.set(state.generators)
        for i in range(begin, count):
            state, loss = self._step(i, state)
            losses.append(loss)
            done = i + 1
            if done == 1 and self._files is not None:
                self._files.first("step", digest(state.leaves))
            if done % every == 0:
                self.training.check_finite(losses)
            if done in kept:
                self._kept.save(done, state, losses)
            elif self._files is not None and (done % every == 0 or done == count):
                self._files.save(done, state, losses)
                if rolling is not None:
                    self._files.drop(rolling)
                rolling = done
        self._final = state
        self._generators.set(state.generators)
        return pytree.unflatten(state.leaves, self._structure), losses

    def _last_kept(self) -> tuple[int, State, list[Tensor]]:
        """The last state kept by an interrupted run (step, state, losses), or the start."""
        if self._files is not None:
            for step in reversed(self._files.positions()):
                state, losses = self._files.load(step), self._files.losses(step)
                if state is not None and len(losses) == step:
                    self._check_first_step(self._files, losses)
                    return step, state, losses
        return 0, self._start, []

    def _check_first_step(self, kept: OnDisk, losses: list[Tensor]) -> None:
        """Raise if the files are from another training: repeat its first step and compare."""
        self._generators.set(self._start.generators)
        state, loss = self._step(0, self._start)
        is_same, update = _is_equal(loss, losses[0].to(loss.device)), digest(state.leaves)
        if not is_same or (_has_equal_runs(loss) and kept.first("step", update) != update):
            raise ArgumentValueError(
                f"directory: expected that of the same call, got {kept.directory}, which holds another "
                f"one: its first step has the loss {losses[0].item()!r}, here {loss.item()!r}"
                + (", and another update" if is_same else "")
                + ". The loss, the rule, the data, their order or the random numbers differ; or "
                "only the last digits do, on another processor or with another number of threads. Name "
                "another directory, or delete this one."
            )

    def _step(self, i: int, state: State) -> tuple[State, Tensor]:
        """The state after step i and the loss, by the operations that the replay differentiates."""
        return_freed_memory()
        after, loss = self._after(i, _fresh_leaves(state.leaves))
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in after]
        self._advance()
        return State(leaves, self._generators.now()), loss

    def _after(self, i: int, leaves: list[Any]) -> tuple[list[Any], Tensor]:
        """The leaves of the state after step i, with a graph to the given leaves; and the loss."""
        params, memory = pytree.unflatten(leaves, self._structure)
        params, memory, (loss, _) = self._steps.step(i, params, memory, self.constants, alone=True)
        return self._in_order((params, memory)), loss

    # Backward

    def pull(self, cotangents: object, constants: Sequence[Tensor | None]) -> Cotangents:
        """Pull gradients by the final state back to the first state and the constants.

        Args:
            cotangents: By (parameters, state of the rule) at the end; leaves may be None.
            constants: Initial gradients by the constants; the gradients of all steps are added.
        """
        assert self._final is not None
        own: list[Tensor | None] = list(pytree.leaves(cotangents))
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        at = Cotangents(self.training.count, own, list(constants), zero)
        after = self._final.leaves
        name = digest([x for x in (*own, *constants) if x is not None])
        known = None if self._files is None else self._files.get(BACKWARD)
        if known is not None and known["of"] == name:  # resume an interrupted backward
            at, after = Cotangents(*(known[field] for field in Cotangents._fields)), known["after"]
        every = max(1, isqrt(self.training.count))
        try:
            while at.step:
                before = self._state_before(at.step - 1)
                at = self._pull_step(at, before, after)
                after = before.leaves
                # later states are no longer needed: free their memory for the next segment
                self._drop_from(at.step)
                if self._files is not None and at.step % every == 0:
                    self._files.put(BACKWARD, {"of": name, "after": after, **at._asdict()})
        finally:
            self._generators.set(self._final.generators)
        return at

    def _state_before(self, step: int) -> State:
        """The state after `step` steps, recomputed from the last kept state before it."""
        state, begin = self._start, 0
        for kept in (self._segment, self._kept):
            for position in reversed(kept.positions()):
                if begin < position <= step and (found := kept.load(position)) is not None:
                    state, begin = found, position
        # for "sqrt", keep all states of the current segment
        schedule = "remat" if self._schedule == "sqrt" else self._schedule
        keep = {*inner_loop.states_to_keep(schedule, begin, step + 1)} - {step}
        self._generators.set(state.generators)
        for i in range(begin, step):
            state, _ = self._step(i, state)
            if i + 1 in keep:
                where = self._segment if self._schedule == "sqrt" else self._kept
                where.save(i + 1, state, [])
        return state

    def _pull_step(self, at: Cotangents, before: State, after: list[Any]) -> Cotangents:
        """Pull back through step at.step - 1. before: the state before it. after: the leaves that the
        forward run had after it."""
        return_freed_memory()
        own = _fresh_leaves(before.leaves)
        self._generators.set(before.generators)
        leaves, _ = self._after(at.step - 1, own)
        self._check_replayed(at.step - 1, leaves, after)
        variables = [*filter(_is_wanted, own), *self._wanted]
        left = iter(pullback(leaves, at.carry, variables))
        carry = [next(left) if _is_wanted(x) else None for x in own]
        self._advance()
        rounding = at.rounding + self._rounding(at.carry, after)
        return Cotangents(at.step - 1, carry, add_grads(at.constants, [*left]), rounding)

    def _rounding(self, cotangents: list[Tensor | None], leaves: list[Any]) -> Tensor:
        """sum (u theta eps)^2 over a state: the squared effect of its rounding on the result."""
        pairs = zip(cotangents, leaves, strict=True)
        known = ((u * x, torch.finfo(x.dtype).eps) for u, x in pairs if u is not None)
        # sum on the CPU: leaves may be on several devices
        terms = [change.abs().double().square().sum().cpu() * eps**2 for change, eps in known]
        return pytree.sum_scalars(terms).double()

    def _check_replayed(self, i: int, leaves: list[Any], after: list[Any]) -> None:
        for j, (now, then) in enumerate(zip(leaves, after, strict=True)):
            if _is_equal(now, then):
                continue
            name = pytree.paths(pytree.unflatten(after, self._structure))[j]
            gap = ""
            if isinstance(now, Tensor) and isinstance(then, Tensor) and now.shape == then.shape:
                gap = f", by up to {float((now.detach() - then).abs().max()):.2g}"
            raise NondeterministicError(
                "hypergradient: expected a replay with the parameters of the training, got others "
                f"after step {i + 1} of {self.training.count}{gap} ({name}). Two runs of a step "
                "differ. Look for nondeterministic operations "
                "(`torch.use_deterministic_algorithms(True)`), random numbers that are not torch's "
                "(NumPy, random), data in another order or changed in place, and modules that count "
                "or keep statistics."
            )

    def _drop_from(self, step: int) -> None:
        for kept in (self._segment, self._kept):
            for position in kept.positions():
                if max(step, 1) <= position < self.training.count:
                    kept.drop(position)

    def _in_order(self, carry: object) -> list[Any]:
        leaves, structure = pytree.flatten(carry)
        if structure == self._structure:
            return leaves
        # cotangents are matched to leaves by position: use the order of the first state
        known = pytree.unflatten(self._leaves, self._structure)
        try:  # dicts in another order
            return pytree.leaves(pytree.map(lambda _, x: x, known, carry))
        except (ValueError, TypeError) as error:
            raise ArgumentValueError(
                "hypergradient: expected a rule whose parameters and state keep the structure of "
                "params and init(params), got one that changes it; make all slots of the state in init."
            ) from error


def pullback(outputs: list[Any], cotangents: Sequence[Any], inputs: list[Tensor]) -> list[Any]:
    """The gradients by inputs of <cotangents, outputs>; outputs without a graph or cotangent are
    skipped. None for an input without a gradient."""
    both = zip(outputs, cotangents, strict=True)
    pairs = [(y, u) for y, u in both if u is not None and _is_wanted(y)]
    if not pairs or not inputs:
        return [None] * len(inputs)
    return gradients([y for y, _ in pairs], inputs, [u for _, u in pairs])


def add_grads(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The sums of two lists of gradients; None stands for zero."""
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]


def _fresh_leaves(leaves: list[Any]) -> list[Any]:
    return [x.detach().requires_grad_() if pytree.is_float(x) else x for x in leaves]


def _is_wanted(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _has_equal_runs(x: Tensor) -> bool:
    """Whether two runs give equal bits: a GPU may add in another order."""
    return x.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def _is_equal(a: object, b: object) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b)
    return agree(a, b, BITS if _has_equal_runs(a) else SUMS)
