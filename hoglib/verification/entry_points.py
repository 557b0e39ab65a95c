"""Wherever hoglib differentiates a user's function, the custom Functions in it are examined.

    with examined_functions("hvp"):
        value = func(params)        # a Function of the user's is applied: its arguments are noted
        ...                         # the derivatives that the entry point is for
                                    # at the end it is examined by itself, and a wrong one is reported

A Function is examined once for each kind of arguments, at the values that it is applied to and next to
them, and again when later values are far from these. The verdict is kept for the process.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.remat.recomputation import inside_recomputation
from hoglib._core.runtime.ambient import AMBIENT, Examination, inside
from hoglib._core.runtime.provided import provide
from hoglib._core.runtime.source_location import frames_of, user_line, warn, warn_once
from hoglib._core.substrate.autograd import Gradient
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.function_watch import (
    Ended,
    as_around,
    records_gradients,
    sees_applications,
    watching_functions,
)
from hoglib._core.torch_api.torch_internals import transforms_active
from hoglib._core.torch_api.torch_modes import (
    needs_linear_backward,
    value_checks_on,
    without_stand_ins,
)
from hoglib._core.torch_api.torch_private import EXAMINATION, REFUSED, missing
from hoglib.errors import HoglibError, NoSecondDerivative, UnsupportedError, VerificationError
from hoglib.verification import function_rules
from hoglib.verification.contract import Snapshot, in_place
from hoglib.verification.examination import (
    Applied,
    Range,
    Verdict,
    applied,
    examine,
    held_by,
    held_kinds,
    ranges_of,
    without_outputs,
)
from hoglib.verification.function_identity import Identity, identity_of
from hoglib.verification.gradient_hooks import watch_module_hooks, watched
from hoglib.verification.layouts import layout_of
from hoglib.verification.subject import Application, application, is_users

Known = Identity | type[Function]
_VERDICTS: WeakKeyDictionary[Known, dict[Any, Verdict]] = WeakKeyDictionary()
Key = tuple[type[Function], Any]  # a Function, and the kinds of its arguments
Args = tuple[Any, ...]
# What to use instead of Functions that their users cannot change, by module.
INSTEAD = {
    "gpytorch.functions.": "Inside `gpytorch.settings.trace_mode(True)` the kernels of GPyTorch are "
    "made of operations of torch, which have all derivatives.",
    "linear_operator.functions.": "GPyTorch estimates these derivatives by conjugate gradients; it "
    "takes the exact ones by a Cholesky factor inside `gpytorch.settings.fast_computations(False, "
    "False, False)`, or up to `gpytorch.settings.max_cholesky_size` points.",
    "torchdiffeq._impl.adjoint": "Use `torchdiffeq.odeint` instead of odeint_adjoint: torch "
    "differentiates its steps to any order.",
}
RAISED = (
    "The backward of {name} raised it, at {line}. `hoglib.verify({name}, inputs)` shows whether it "
    "runs with a graph, which a second derivative needs."
)
IN_CPP = (
    "{} was not examined, a backward in C++. Whether its derivatives are right is not known. "
    "`hoglib.verify(function, inputs)` checks the function that applies it."
)
OUTSIDE = (
    "{name} was not examined: it was applied before the context was entered. Whether its derivatives "
    "are right is not known. Apply it inside, or check it by `hoglib.verify({name}, inputs)`."
)
# A private name of torch that the examination needs and torch does not have; "" if it has all.
_LACKING = missing(EXAMINATION) or "_backward_cls" * (not sees_applications())
NOT_EXAMINED = (
    f"custom Functions are not examined on torch {torch.__version__}, which has no `{{}}`: whether "
    "their derivatives are right is not known. `hoglib check` lists what does not hold."
)
THIRD = "where a third derivative is taken, such as the gradient of this result, "
# Torch's errors about tensors of another call or of a transform that is over.
OF_ANOTHER_CALL = ("INTERNAL ASSERT", "escaped from inside", "through the graph a second time")
STALE = "Look for a module or global that keeps a result (`self.x = y`), or a nested `.backward()`."
CHANGED = "It may be in the backward of {}, which `hoglib.verify` checks."
# What a Function changes in place that others read.
MUTATES = {
    "inputs": "{name} modifies an argument in place without ctx.mark_dirty: the derivative by it is "
    "wrong. {changes} `hoglib.verify({name}, inputs)` shows all checks.",
    "grad_output": "{name} modifies grad_output in place; it is shared with other nodes, whose "
    "gradients are then wrong. {changes} `hoglib.verify({name}, inputs)` shows all checks.",
}
AOT = (
    "code that `aot_function` made is differentiated: its backward was traced without a graph, and no "
    "part of the second derivative is left of it. Call the function that it was made of."
)
CHECKPOINT = (
    "the checkpoint with use_reentrant=True at {} gives no gradient to the parameters inside: torch "
    "hands it on by `.backward()` alone, and where an input needs one. Pass use_reentrant=False."
)
KEPT = (
    "the derivative of {name} is wrong: {kept} was changed in place after forward had put it there. "
    "Keep it by `ctx.save_for_backward`: torch then raises at such a change."
)
FURTHER_POINTS = 4  # of one Function in one call, at values far from those of the others
# The entry points, and what they reported.
_REPORTED: WeakKeyDictionary[Known, set[tuple[str, str]]] = WeakKeyDictionary()
# Those that were seen to change an argument in place, undeclared, or the incoming gradient: each
# application is watched.
_MUTATING: WeakSet[Known] = WeakSet()
# Those that keep an argument or an output on ctx, unsaved: each application is watched, too.
_KEEPING: WeakSet[Known] = WeakSet()


@final
class examined_functions:  # noqa: N801 a context manager
    """Examines the custom Functions of the user that are applied inside, and reports which are wrong.

    Within another one it does nothing: the outermost entry point reports. A class, as it stands around
    each derivative: generators of contextlib take several times as long to enter and to leave.

    Args:
        caller: The entry point, as messages name it.
        first_order: It takes first derivatives only, so that a wrong second one does no harm. Default:
            by whether backward runs with a graph, which inside of torch.func is not known.
        by_hand: It is no derivative, but what the user's own are taken inside of; entry points in it
            report by themselves.
    Returns:
        From entering, the Functions that are applied; None where nothing is examined.
    Raises:
        VerificationError: at the end, for a wrong Function, inside `second_order(on_wrong="raise")`.
        NoSecondDerivative: at the end, for a Function whose second derivative is wrong, where nothing
            of the gradient can be differentiated.
    """

    def __init__(self, caller: str, *, first_order: bool = False, by_hand: bool = False) -> None:
        self._caller, self._first_order, self._by_hand = caller, first_order, by_hand
        self._functions: AppliedFunctions | None = None

    def __enter__(self) -> "AppliedFunctions | None":
        outside = AMBIENT.examination
        self._action = outside.on_wrong or "warn"
        if self._action == "ignore" or outside.by_entry_point or not value_checks_on():
            return None
        if _LACKING:
            warn_once(NOT_EXAMINED.format(_LACKING))
            return None
        self._functions = functions = AppliedFunctions()
        if self._by_hand:
            functions.by_hand = self._report_by_hand
        self._watching = watching_functions(functions.record)
        self._watching.__enter__()
        self._outside = outside
        AMBIENT.examination = Examination(outside.on_wrong, not self._by_hand, functions)
        return functions

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        functions, self._functions = self._functions, None
        if functions is None:
            return
        try:
            self._watching.__exit__()
            del self._watching  # a cycle: what was noted is freed with the graph
            if isinstance(error, Exception):
                _explain_backward_error(self._caller, error, functions)
            elif error is None:
                self._report_wrong(functions)
                # of what was not differentiated here, but is by the user's backward through the result
                functions.by_hand = self._report_by_hand
        finally:
            AMBIENT.examination = self._outside

    def _report_by_hand(self, functions: "AppliedFunctions", of: Sequence[Tensor] = ()) -> None:
        """After a derivative by the user's own call. of: of what, if with a graph."""
        if value_checks_on():
            graph = graph_summary(of)  # which notes the Functions in C++ that it meets
            functions.outside |= {f for _, f in graph.user_functions if f not in functions.met}
            with no_examination():
                self._report_wrong(functions)

    def _report_wrong(self, functions: "AppliedFunctions") -> None:
        for key, order in functions.differentiated.items():
            verdict = functions.verdict(key)
            if functions.must_report(key, verdict, 1 if self._first_order else order):
                lost = functions.gradient_has_no_graph and verdict.of_second
                if key in functions.parts:
                    verdict = verdict._replace(text=THIRD + verdict.text)
                self._report_verdict(key[0], verdict, nothing_is_left=lost)
            elif text := functions.mutation(key):
                self._report_verdict(key[0], Verdict("wrong", text))
        for text, order in sorted(functions.faults.items()):
            if order == 1 or not self._first_order:
                self._report_verdict(Function, Verdict("wrong", text))
        for function in functions.outside:
            verdicts = _VERDICTS.get(identity_of(function), {}).values()
            if is_users(function) and (not verdicts or any(v.is_reported for v in verdicts)):
                text = OUTSIDE.format(name=function.__qualname__)
                self._report_verdict(function, Verdict("not examined", text))
        if functions.in_cpp:
            text = IN_CPP.format(", ".join(sorted(functions.in_cpp)))
            self._report_verdict(Function, Verdict("not examined", text))

    def _report_verdict(
        self, function: type[Function], verdict: Verdict, *, nothing_is_left: bool = False
    ) -> None:
        """Raises, or warns once for a Function and an entry point."""
        text = f"{self._caller}: {verdict.text}"
        for module, instead in INSTEAD.items():
            text += f" {instead}" * function.__module__.startswith(module)
        if self._action == "raise":
            raise VerificationError(text)
        if nothing_is_left:
            raise NoSecondDerivative(
                f"{text} Nothing of the second derivative is left in this loss: the gradient that "
                "would be differentiated has no graph. `hvp(mode='finite-differences')` needs none."
            )
        reported = _REPORTED.setdefault(identity_of(function), set())
        # those in C++ have no class of their own, so that their text tells them apart
        what = verdict.text if function is Function else verdict.status
        if (self._caller, what) not in reported:
            reported.add((self._caller, what))
            warn(text)


provide("examine_users_derivatives", partial(examined_functions, "second_order", by_hand=True))


def no_examination() -> inside:
    """Inside, entry points examine and report nothing: for what judges Functions by itself."""
    return inside(examination=Examination(AMBIENT.examination.on_wrong, by_entry_point=True))


def forget_verdicts() -> None:
    """Forgets what is known of Functions, and what was reported."""
    _VERDICTS.clear()
    forget_reports()


def forget_reports() -> None:
    """Forgets what was reported, so that it is reported again."""
    _REPORTED.clear()


@final
class AppliedFunctions:
    """The Functions that are applied within one entry point, but for those that are known to be right.

    unjudged: those without a verdict. differentiated: those whose backward ran, or may have run:
    once, or twice, if it ran with a graph. by_hand: what is called after a derivative by the user's own
    call, with what it was taken of if with a graph; of an entry point, after it was left.
    """

    by_hand: Callable[..., None] | None = None

    def __init__(self) -> None:
        self.unjudged: dict[Key, Applied] = {}
        self.differentiated: dict[Key, int] = {}
        self.gradient_has_no_graph = False
        self.in_cpp: set[str] = set()
        self.met: set[Any] = set()  # Functions that were applied, by whomever
        self.outside: set[Any] = set()  # those that were not, in graphs with a second derivative
        # texts about hooks and checkpoints, and the order of the derivative that each makes wrong
        self.faults: dict[str, int] = {}
        # those that change in place, undeclared, an argument of which the gradient is not theirs
        # alone, or an incoming gradient that others get, too: what, by MUTATES
        self._mutates: dict[Key, str] = {}
        self._mutating: dict[Key, Application] = {}
        self._traced: set[type[Function]] = set()
        self._moved: set[Key] = set()  # known as right, at other values
        self.parts: set[Key] = set()  # of backwards alone, differentiated twice
        self._unused: dict[Key, frozenset[int]] = {}  # outputs that no gradient has arrived for

    @property
    def only_traced(self) -> bool:
        """Whether one that is not known as right was applied only where tensors have no values."""
        others = {function for function, _ in self.differentiated}
        return any(
            not (verdicts := _VERDICTS.get(identity_of(function)))
            or identity_of(function) in _MUTATING
            or any(v.is_reported or v.domain for v in verdicts.values())
            for function in self._traced - others
        )

    def note_once(self, before: Mapping[Key, int]) -> None:
        """Notes that Functions applied since `before` are differentiated once: no graph is left."""
        self.differentiated = {key: before.get(key, 1) for key in self.differentiated}

    def note_gradient(self, gradient: Gradient) -> None:
        """Notes whether nothing of a gradient can be differentiated, so that its product is zero. That
        is right for a linear loss, but not with a Function that has a wrong second derivative."""
        if self.differentiated and gradient.graph.user_functions:
            with without_stand_ins():
                self.gradient_has_no_graph |= gradient.has_no_graph

    def note_cpp(self, names: Set[str]) -> None:
        """Notes Functions in C++, which are reported as not examined."""
        self.in_cpp |= names

    def watched_hook(self, hook: Callable[..., Any], line: object) -> Callable[..., Any]:
        """The hook of a tensor, registered in this line; it notes here that it returns another gradient
        than it gets."""
        return watched(hook, self._noting_hooks(), 0, f"the hook registered at {line}")

    def _noting_hooks(self) -> Callable[[str], None]:
        """What notes hooks; of a matrix of gradients by outputs, one backward pass is enough."""
        return partial(self._note_hook, 1 if needs_linear_backward() == "KFACOperator" else 2)

    def _note_hook(self, order: int, text: str) -> None:
        # by hand a hook that changes a first derivative does what it is for
        if self.by_hand is None or torch.is_grad_enabled():
            self.faults[text] = min(order, self.faults.get(text, order))
            self._report_after_backward()

    def record(self, function: type[Function], args: Args) -> Ended | None:
        """Notes an application; what is returned is called with its node and results."""
        self.met.add(function)
        if function.__module__.startswith("torch."):
            self.met.add(torch_internals.outside_transforms(function, ())[0])
            self._record_torchs(function.__name__, args)
        if function.__module__.startswith("hoglib.") or not records_gradients():
            return None
        if self.by_hand is not None and (
            AMBIENT.examination.by_entry_point or AMBIENT.examination.on_wrong == "ignore"
        ):
            return None  # that is what is inside asked for, or reports
        if torch_internals.tracing():
            self._traced |= {function} if is_users(function) else set()
            return None
        if not _is_ours(torch_internals.running_function()):
            # A part of another one's backward, which is examined as a whole, to the second derivative.
            # The third one differentiates the part twice; in a transform that is not known.
            known = is_users(function) and not (inside_recomputation() or transforms_active())
            return partial(self._watch_part, function, args) if known else None
        noted = self._noted(function, args)
        if noted is None:
            return None
        key, by = noted
        self.parts.discard(key)
        # before it runs: afterwards a version does not say who raised it
        versions = [(i, x, x._version) for i, x in enumerate(args) if by[i] and _counts_changes(x)]
        return partial(self._watch_application, key, args, versions)

    def _record_torchs(self, name: str, args: Args) -> None:
        """Notes Functions of torch's that harm derivatives."""
        if name == "BackwardHookFunction":  # of a module with hooks
            watch_module_hooks(self._noting_hooks())
        elif name == "CompiledFunction":
            self.faults[AOT] = 2
        elif name == "CheckpointFunction" and records_gradients():
            # the user's own `.backward()` reaches parameters, where an input needs a gradient
            needed = any(isinstance(x, Tensor) and x.requires_grad for x in args)
            if self.by_hand is None or not needed:
                self.faults[CHECKPOINT.format(user_line())] = 1

    def _noted(self, function: type[Function], given: Args) -> tuple[Key, tuple[bool, ...]] | None:
        """Notes an application that may be wrong: its key, and which arguments need gradients."""
        # a mode would see each attribute of a tensor that is read, which takes it a microsecond
        with torch_internals.without_functions_seen():
            made, (function, args, by) = (
                function,
                torch_internals.outside_transforms(function, given),
            )
            if _is_ours(function) or not is_users(function):
                return None
            if not any(needed and x.numel() for x, needed in zip(args, by, strict=True)):
                return None  # its derivative has no elements
            mapped = function_rules.offers_vmap(function)
            mapped = mapped and torch_internals.under_vmap(function, made)
            each = [_verdict_key(x, needed, given) for x, needed in zip(args, by, strict=True)]
        known = identity_of(function)
        verdicts = _VERDICTS.setdefault(known, {})
        forward = _forward_mode()
        kinds: Any = (forward, mapped, torch_internals.autocasts(), *each)
        verdict = verdicts.get(kinds)
        # right for arguments of a structure, which these have not: they are a kind of their own
        if verdict is not None and verdict.domain and not _are_within(verdict, given, args):
            kinds = ("other values", *kinds)
            verdict = verdicts.get(kinds)
        key = function, kinds
        # applied here already, at values that say nothing about these
        for _ in range(FURTHER_POINTS if key in self.unjudged else 0):
            noted = self.unjudged.get(key)
            if noted is None or _are_near(args, ranges_of(noted.app.args)):
                break
            kinds = ("further values", *kinds)
            key, verdict = (function, kinds), verdicts.get(kinds)
        is_right = verdict is not None and not verdict.is_reported
        watched = known in _MUTATING or known in _KEEPING
        if verdict is not None and is_right and self._has_moved(key, verdict, args, given):
            is_right, verdict = False, None
        # nothing is left to find out: it is right, or was seen to be differentiated twice
        if (is_right and not watched) or self.differentiated.get(key) == 2:
            return None
        if (verdict is None or verdict.retries) and key not in self.unjudged:
            # what runs in a recomputation has other graphs than the arguments had
            graphed = None if _runs_again() else given
            with as_around():
                self.unjudged[key] = applied(function, args, by, forward, graphed, given, mapped)
        return key, by

    def _has_moved(self, key: Key, verdict: Verdict, args: Args, given: Args) -> bool:
        """Counts an application; says whether its values are far from the examined ones, or its objects
        hold other tensors: values move in a training, and may reach another branch of a backward.
        Looking takes time, and a device is waited for: it is done at the first applications, and at
        the 32nd, 64th, ... of them."""
        if key in self.differentiated:  # examined in this entry point
            return False
        times = verdict.times + 1
        _VERDICTS[identity_of(key[0])][key[1]] = verdict._replace(times=times)
        looks = key not in self._moved and (times < 32 or not times & (times - 1))
        if looks and not (_are_near(args, verdict.ranges) and held_by(given) == verdict.held):
            self._moved.add(key)
        return key in self._moved

    def _watch_part(self, function: type[Function], args: Args, node: Any, result: object) -> None:
        """Notes a part of a backward when its own backward runs with a graph."""

        def note(_: object) -> None:
            if torch.is_grad_enabled() and AMBIENT.examination.examiner is self:
                noted = self._noted(function, args)
                if noted is not None and noted[0] not in self.differentiated:
                    self.differentiated[noted[0]] = 2
                    self.parts.add(noted[0])

        if any(node.needs_input_grad):
            node.register_prehook(note)

    def verdict(self, key: Key) -> Verdict:
        """The verdict on a Function that was applied, of the outputs that are used; it is examined if
        there is none yet."""
        verdict, unused = self._verdict(key), self._unused.get(key)
        if not (verdict.is_reported and unused):
            return verdict
        verdicts, of_used = _VERDICTS[identity_of(key[0])], ("without outputs", unused, key[1])
        if of_used not in verdicts and key in self.unjudged:
            verdicts[of_used] = examine(without_outputs(self.unjudged[key], unused))
        return verdicts.get(of_used, verdict)

    def _verdict(self, key: Key) -> Verdict:
        verdicts, kinds = _VERDICTS[identity_of(key[0])], key[1]
        verdict = verdicts.get(kinds)
        if verdict is None or verdict.retries or key in self._moved:
            refused = len(REFUSED)
            before, verdict = verdict, examine(self.unjudged[key])
            if len(REFUSED) > refused:  # which was taken for an error of the Function's
                verdict = Verdict("not examined", NOT_EXAMINED.format(REFUSED[-1]))
            if before is not None and verdict.retries:  # there may be a next one, at other values
                verdict = verdict._replace(retries=max(0, before.retries - 1))
            ranges = ranges_of(self.unjudged[key].app.args)
            if before is not None and key in self._moved:
                pairs = zip(ranges, before.ranges, strict=True)
                ranges = tuple(a.joined(b) for a, b in pairs)
                verdict = verdict._replace(times=before.times)
            verdict = verdict._replace(ranges=ranges, held=self.unjudged[key].held)
            self._moved.discard(key)
            verdicts[kinds] = verdict
        return verdict

    def must_report(self, key: Key, verdict: Verdict, order: int) -> bool:
        """Whether a verdict on a Function that was differentiated `order` times is reported. A part of
        a backward may give to one argument what is due to another: only its second derivative tells."""
        if key in self.parts:
            return verdict.is_reported and order == 2 and (verdict.of_second or verdict.order == 2)
        return verdict.is_reported and verdict.order <= order

    def mutation(self, key: Key) -> str:
        """What a Function changes in place that others read, and in which line; empty if nothing."""
        what = self._mutates.get(key)
        if what is None:
            return ""
        if what not in MUTATES:
            kept = filter(partial(_backward_reads, self._mutating[key]), what.split())
            return "".join(KEPT.format(name=key[0].__qualname__, kept=one) for one in [*kept][:1])
        rows = in_place(self._mutating[key])
        changes = next((r.text for r in rows if r.status == "fail" and what in r.name), "")
        return MUTATES[what].format(name=key[0].__qualname__, changes=changes)

    def _watch_application(
        self, key: Key, given: Args, versions: list[Any], node: Any, result: object
    ) -> None:
        results = result if isinstance(result, tuple) else (result,)
        changed = [(i, x) for i, x, version in versions if x._version != version]
        declared = node.dirty_tensors or ()
        changed = [(i, x) for i, x in changed if not any(x is y for y in declared)]
        self._note_backward(key, node, results)
        if not any(node.needs_input_grad):
            return
        self._watch_kept(key, node, given, results)
        self._watch_gradients(key, node, given)
        if changed and self._mark_mutating(key, given):
            for i, x in changed:
                self._watch_changed(key, node, sum(isinstance(y, Tensor) for y in given[:i]), x)

    def _mark_mutating(self, key: Key, given: Args) -> bool:
        app = application(key[0], given)
        if app is not None:
            _MUTATING.add(identity_of(key[0]))
            self._mutating[key] = app
        return app is not None

    def _watch_changed(self, key: Key, node: Any, position: int, x: Tensor) -> None:
        """Notes a tensor that the Function of a node changed, if others read it: gradients other than
        those of that node reach what it was computed by. That is the user's leaf, at worst."""
        # a view has a chain of nodes down to its base, and at each of them others may join
        base = x._base if x._is_view() else x
        parent: Any = x.grad_fn
        links = [(node, position, parent, x.output_nr)]
        while parent is not None and base is not None and parent is not base.grad_fn:
            links.append((parent, 0, *parent.next_functions[0]))
            parent = parent.next_functions[0][0]
        if base is None or base.grad_fn is None:
            self._mutates[key] = "inputs"
            return
        for giver, which, taker, output in links:
            given: list[Tensor | None] = []
            giver.register_hook(lambda g, _, which=which, given=given: given.append(g[which]))
            taker.register_prehook(partial(self._compare_gradients, key, given, output))

    def _watch_gradients(self, key: Key, node: Any, given: Args) -> None:
        """Notes a Function whose backward changes an incoming gradient that others get, too."""
        seen: list[tuple[Snapshot, bool]] = []

        def before(grads: tuple[Tensor | None, ...]) -> None:
            own = (g for g in grads if g is not None and torch_internals.unwrap(g) is g)
            held = [(g, torch_internals.is_held_elsewhere(g)) for g in own]
            with torch.no_grad(), without_stand_ins():
                seen.extend((Snapshot({"": g}), by_others) for g, by_others in held)

        def after(*_: Any) -> None:
            with torch.no_grad(), without_stand_ins():
                changed = [held for snapshot, held in seen if snapshot.changed({})]
            seen.clear()
            if changed and self._mark_mutating(key, given) and any(changed):
                self._mutates.setdefault(key, "grad_output")

        node.register_prehook(before)
        node.register_hook(after)

    def _watch_kept(self, key: Key, node: Any, given: Args, results: Args) -> None:
        """Notes a tensor of those that is on ctx by itself, and changed before the first backward."""
        memory = {torch_internals.storage_id(x) for x in pytree.tensors((given, results))}
        own = ((name, x) for name, x in vars(node).items() if isinstance(x, Tensor))
        found = [(f"ctx.{name}", x) for name, x in own if torch_internals.storage_id(x) in memory]
        kept = [(label, x, x._version) for label, x in found if _counts_changes(x)]

        def before(_: object) -> None:
            changed = " ".join(name for name, x, version in kept if x._version != version)
            kept.clear()
            if changed and self._mark_mutating(key, given):
                self._mutates.setdefault(key, changed)

        if kept:
            _KEEPING.add(identity_of(key[0]))
            node.register_prehook(before)

    def _compare_gradients(
        self, key: Key, given: list[Tensor | None], output: int, grads: tuple[Tensor | None, ...]
    ) -> None:
        """In the first backward pass: in a second one the saved tensors have gradients, too."""
        if len(given) == 1 and given[0] is not None:
            total = grads[output]
            if total is None or not torch.equal(total.detach(), given[0].detach()):
                self._mutates[key] = "inputs"

    def _note_backward(self, key: Key, node: Any, results: Args) -> None:
        """Notes it as differentiated when its backward runs; in a transform, of which that is not
        known, at once."""
        runs_again = inside_recomputation()  # in a later backward, with a graph
        once = AMBIENT.examination.first_order

        def note(grads: Sequence[Tensor | None]) -> None:
            unused = frozenset(i for i, g in enumerate(grads) if g is None)
            self._unused[key] = self._unused.get(key, unused) & unused
            twice = not once and (runs_again or torch.is_grad_enabled())
            self.differentiated[key] = max(1 + twice, self.differentiated.get(key, 1))
            self._report_after_backward()

        if any(isinstance(y, Tensor) and torch_internals.unwrap(y) is not y for y in results):
            self.differentiated[key] = max(1 if once else 2, self.differentiated.get(key, 1))
            self._unused[key] = frozenset()
        elif any(node.needs_input_grad):
            node.register_prehook(note)

    def _report_after_backward(self) -> None:
        """Reports at the end of the backward that runs, after the context."""
        if self.by_hand is not None and AMBIENT.examination.examiner is not self:
            torch_internals.after_backward(partial(self.by_hand, self))


def _are_near(args: Args, ranges: Sequence[Range]) -> bool:
    """Whether an examination at values of these ranges is one of arguments too."""
    pairs = zip(ranges_of(args), ranges, strict=False)
    return all(known.contains(now) for now, known in pairs)


def _counts_changes(x: Tensor) -> bool:
    """Whether a tensor counts what changes it in place: no wrapper of torch.func, nor an inference
    tensor, does."""
    return torch_internals.unwrap(x) is x and not x.is_inference()


def _backward_reads(app: Application, name: str) -> bool:
    """Whether its backward depends on the values of what it keeps on ctx by this name."""
    with suppress(Exception), torch.no_grad():
        run = app.seeded()
        moved = run.record.with_slots({name: run.record.held()[name] + 1})
        runs = (run, run._replace(record=moved))
        return not all(map(torch.equal, *(pytree.tensors(app.backward(one)) for one in runs)))
    return True


def _explain_backward_error(caller: str, error: Exception, functions: AppliedFunctions) -> None:
    """Adds to an error which Function's backward raised it, also within that of another one, or which
    of those that were differentiated lost the graph, and in which line; raises another one for torch's
    errors about tensors of another call."""
    raw = not isinstance(error, HoglibError) and any(x in str(error) for x in OF_ANOTHER_CALL)
    lines = dict(torch_internals.backward_lines(frames_of(error))).items()
    own = [(function, line) for function, line in lines if not _is_ours(function)]
    texts = [RAISED.format(name=function.__qualname__, line=line) for function, line in own[-1:]]
    if texts and "backward through the graph a second time" in str(error):
        texts[0] += " `hoglib.ops.remat` recomputes what can be differentiated again."
    for key in functions.differentiated:
        if not texts and (raw or isinstance(error, NoSecondDerivative)):
            verdict = functions.verdict(key)
            texts += [verdict.text] * (verdict.status == "wrong" and (raw or verdict.of_second))
    if raw:
        raise UnsupportedError(
            f"{caller}: expected tensors of one call, got torch's error about one of another call, or "
            f"of a transform that is over: {str(error).partition(' INTERNAL')[0].partition('. ')[0]}. "
            + " ".join(texts or [STALE])
        ) from error
    if not texts and functions.in_cpp and isinstance(error, NoSecondDerivative):
        texts = [IN_CPP.format(", ".join(sorted(functions.in_cpp)))]
    if isinstance(error, NoSecondDerivative):
        texts += sorted(functions.faults)
    names = [f.__qualname__ for f, _ in functions.differentiated]
    names = [name for name in names if name not in str(error)]
    if "modified by an inplace operation" in str(error) and names and not texts:
        texts = [CHANGED.format(", ".join(dict.fromkeys(names)))]
    for text in (text for text in texts if text not in str(error)):
        if isinstance(error, HoglibError):
            error.args = (f"{error} {text[0].upper()}{text[1:]}", *error.args[1:])
        else:
            error.add_note(text)


def _runs_again() -> bool:
    """Whether what runs is computed again later, so that its arguments are not what they were computed
    by."""
    return inside_recomputation() or torch_internals.checkpoint_frame() is not None


def _are_within(verdict: Verdict, given: Args, args: Args) -> bool:
    """Whether arguments have the structures in which alone the Function is right, and are no leaves,
    which need not keep them. given: the arguments with their graph."""
    leaves, graphed = pytree.leaves(args), pytree.leaves(given)
    with torch_internals.without_transforms(), torch.no_grad():
        fit = all(one.fits(leaves[i]) for i, one in verdict.domain)
    return fit and (_runs_again() or all(graphed[i].grad_fn is not None for i, _ in verdict.domain))


def _is_ours(function: type[Function] | None) -> bool:
    return function is None or function.__module__.startswith(("hoglib.", "torch."))


def _forward_mode() -> str:
    """The mode of second derivatives in which a jvp is used: "fr" or "rf"; empty where none is."""
    if not torch_internals.forward_mode_active():
        return ""
    return "rf" if torch_internals.innermost_is_forward() else "fr"


def _verdict_key(x: object, needs_grad: bool, given: Args) -> Any:
    """What a verdict depends on, of an argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.layout, layout_of(x), x.device.type, x.dim(), needs_grad
    if x is None or isinstance(x, bool | str):
        return x
    # to search other objects takes longer: `_has_moved` does now and then
    return type(x), held_kinds(x, given) if isinstance(x, list | tuple | dict) else ()
