"""Examine the custom Functions in a user's function wherever hoglib differentiates it.

    with examined_functions("hvp"):
        value = func(params)        # func applies a custom Function: its arguments are recorded
        ...                         # hvp differentiates value
                                    # on exit: the Function is examined, and reported if it is wrong

A Function is examined once for each kind of arguments, at and near the recorded values, and once more
if later values are far away. The verdict holds for the rest of the process.
"""

import re
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
from hoglib._core.torch_api import function_watch, pytree, torch_internals, torch_modes
from hoglib._core.torch_api.torch_internals import transforms_active
from hoglib._core.torch_api.torch_private import EXAMINATION, REFUSED, missing
from hoglib.errors import HoglibError, NoSecondDerivative, UnsupportedError, VerificationError
from hoglib.verification import function_rules
from hoglib.verification.contract import Snapshot, check_in_place
from hoglib.verification.examination import (
    Case,
    Range,
    Verdict,
    examine,
    held_kinds,
    held_table,
    make_case,
    ranges_of,
    without_outputs,
)
from hoglib.verification.function_identity import Identity, identity_of
from hoglib.verification.gradient_hooks import watch_module_hooks, wrap_hook
from hoglib.verification.layouts import layout_of
from hoglib.verification.subject import Application, copy_application, is_users_own

FunctionKey = Identity | type[Function]
# The verdicts of all entry points, by Function and by the kinds of its arguments.
_VERDICTS: WeakKeyDictionary[FunctionKey, dict[Any, Verdict]] = WeakKeyDictionary()
Key = tuple[type[Function], Any]  # a Function, and the kinds of its arguments
Args = tuple[Any, ...]
# Advice for Functions of libraries, which users cannot change, by the start of the module's name.
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
# The first private name that the examination needs and this torch lacks; "" if torch has all.
_LACKING = missing(EXAMINATION) or "_backward_cls" * (not function_watch.sees_applications())
NOT_EXAMINED = (
    f"custom Functions are not examined on torch {torch.__version__}, which has no `{{}}`: whether "
    "their derivatives are right is not known. `hoglib check` lists what does not hold."
)
THIRD = "where a third derivative is taken, such as the gradient of this result, "
# Parts of torch's errors about a tensor that belongs to another call, or to a transform that has ended.
OF_ANOTHER_CALL = ("INTERNAL ASSERT", "escaped from inside", "through the graph a second time")
STALE = "Look for a module or global that keeps a result (`self.x = y`), or a nested `.backward()`."
CHANGED = "It may be in the backward of {}, which `hoglib.verify` checks."
# Messages about in-place changes, by the object that a Function changes.
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
FURTHER_POINTS = 4  # further values, far from earlier ones, to examine in one entry point
# Past reports: (entry point, text without values) by Function.
_REPORTED: WeakKeyDictionary[FunctionKey, set[tuple[str, str]]] = WeakKeyDictionary()
# Functions seen to change an argument (without mark_dirty) or grad_output in place. A correct verdict
# does not end the watch over them: whether the change does harm depends on who else reads the tensor.
_MUTATING: WeakSet[FunctionKey] = WeakSet()
# Functions that keep an argument or output as an attribute of ctx, unchecked by versions: watched, too.
_KEEPING: WeakSet[FunctionKey] = WeakSet()


@final
class examined_functions:  # noqa: N801 a context manager
    """Examines the user's custom Functions applied inside, and reports the wrong ones.

    Nested contexts do nothing: the outermost entry point reports. This is a class and not a generator,
    because every derivative enters it, and contextlib's generators cost several times as much.

    Args:
        caller: Name of the entry point in messages.
        first_order: The entry point takes first derivatives only, so a wrong second derivative does no
            harm. Default: decided by whether backward runs with a graph; inside a torch.func transform,
            where this is unknown, a second derivative is assumed.
        by_hand: The context (`second_order()`) takes no derivative itself: the user's code inside does.
            Entry points inside report for themselves.
    Returns:
        On entering, the record of applied Functions; None if nothing is examined.
    Raises:
        VerificationError: on exit, for a wrong Function, inside `second_order(on_wrong="raise")`.
        NoSecondDerivative: on exit, if a Function's second derivative is wrong and the gradient has no
            graph at all.
    """

    def __init__(self, caller: str, *, first_order: bool = False, by_hand: bool = False) -> None:
        self._caller, self._first_order, self._by_hand = caller, first_order, by_hand
        self._functions: AppliedFunctions | None = None  # None if nothing is examined

    def __enter__(self) -> "AppliedFunctions | None":
        outside = AMBIENT.examination
        self._action = outside.on_wrong or "warn"  # of the outermost second_order(on_wrong=)
        if self._action == "ignore" or outside.by_entry_point or not torch_modes.value_checks_on():
            return None
        if _LACKING:
            warn_once(NOT_EXAMINED.format(_LACKING))
            return None
        self._functions = functions = AppliedFunctions()
        if self._by_hand:
            functions.by_hand = self._report_by_hand
        self._watching = function_watch.watching_functions(functions.record)
        self._watching.__enter__()
        self._outside = outside  # restored on exit
        AMBIENT.examination = Examination(outside.on_wrong, not self._by_hand, functions)
        return functions

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        functions, self._functions = self._functions, None
        if functions is None:
            return
        try:
            self._watching.__exit__()
            del self._watching  # breaks a reference cycle, so that the arguments die with the graph
            if isinstance(error, Exception):
                _explain_backward_error(self._caller, error, functions)
            elif error is None:
                self._report_wrong(functions)
                # the user may still call backward() on the result: report that derivative, too
                functions.by_hand = self._report_by_hand
        finally:
            AMBIENT.examination = self._outside

    def _report_by_hand(self, functions: "AppliedFunctions", of: Sequence[Tensor] = ()) -> None:
        """Report after the user's own call of backward() or grad().

        of: the tensors that were differentiated, if with a graph; Functions in their graphs that were
        applied outside of the context are reported as not examined.
        """
        if torch_modes.value_checks_on():
            graph = graph_summary(of)  # also calls note_cpp() for Functions written in C++
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
            if is_users_own(function) and (not verdicts or any(v.is_reported for v in verdicts)):
                text = OUTSIDE.format(name=function.__qualname__)
                self._report_verdict(function, Verdict("not examined", text))
        if functions.in_cpp:
            text = IN_CPP.format(", ".join(sorted(functions.in_cpp)))
            self._report_verdict(Function, Verdict("not examined", text))

    def _report_verdict(
        self, function: type[Function], verdict: Verdict, *, nothing_is_left: bool = False
    ) -> None:
        """Raise, or warn once for each Function, entry point and cause."""
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
        # the cause, at whatever values; numbers of lines (model.py:12) tell causes apart
        what = re.sub(r"(?<![\w:.])-?\d[\d.]*(e[+-]\d+)?", "", verdict.text)
        if (self._caller, what) not in reported:
            reported.add((self._caller, what))
            warn(text)


provide("examine_users_derivatives", partial(examined_functions, "second_order", by_hand=True))


def no_examination() -> inside:
    """Inside, entry points examine and report nothing: for code that judges Functions itself."""
    return inside(examination=Examination(AMBIENT.examination.on_wrong, by_entry_point=True))


def forget_verdicts() -> None:
    """Forget all verdicts and reports."""
    _VERDICTS.clear()
    forget_reports()


def forget_reports() -> None:
    """Forget the reports, so that wrong Functions are reported again."""
    _REPORTED.clear()


@final
class AppliedFunctions:
    """The custom Functions applied within one entry point, except those known to be right.

    A Function with a verdict "right" is recorded again if its values moved, or if it is watched for
    in-place changes. A key is a Function with the kinds of its arguments.
    """

    # Called after each backward pass outside of an entry point: inside `second_order()`, or after the
    # entry point has returned. Gets this record, and the differentiated tensors if there is a graph.
    by_hand: Callable[..., None] | None = None

    def __init__(self) -> None:
        self.unjudged: dict[Key, Case] = {}  # recorded applications, for the examination on exit
        self.differentiated: dict[Key, int] = {}  # 1; 2 if backward ran, or may run, with a graph
        self.gradient_has_no_graph = False  # nothing of the gradient can be differentiated
        self.in_cpp: set[str] = set()  # names of Functions with a backward in C++
        self.met: set[Any] = set()  # all Functions applied inside, also by torch and by hoglib
        self.outside: set[Any] = set()  # in a differentiated graph, but applied before
        # message about a hook or a checkpoint -> order of the derivative that it makes wrong
        self.faults: dict[str, int] = {}
        # "inputs" or "grad_output": the Function changes this in place without declaring it, and other
        # nodes use the tensor. Otherwise the labels of tensors on ctx that were changed after forward.
        self._mutates: dict[Key, str] = {}
        self._mutating: dict[Key, Application] = {}  # applications for the message about the change
        self._traced: set[type[Function]] = set()  # applied to fake tensors, under torch.compile
        self._moved: set[Key] = set()  # right at the examined values; the present ones are far away
        self.parts: set[Key] = set()  # applied only in other backwards, and differentiated twice
        self._unused: dict[Key, frozenset[int]] = {}  # outputs that never received a gradient

    @property
    def only_traced(self) -> bool:
        """Whether a Function not known to be right was applied only during tracing, without values."""
        others = {function for function, _ in self.differentiated}
        return any(
            not (verdicts := _VERDICTS.get(identity_of(function)))
            or identity_of(function) in _MUTATING
            or any(v.is_reported or v.domain for v in verdicts.values())
            for function in self._traced - others
        )

    def note_once(self, before: Mapping[Key, int]) -> None:
        """Lower the order of keys added since `before` to 1: the result has no graph."""
        self.differentiated = {key: before.get(key, 1) for key in self.differentiated}

    def note_gradient(self, gradient: Gradient) -> None:
        """Note a gradient without any graph: its product is zero. A linear loss has such a gradient;
        but if a Function's second derivative is wrong, the zero is wrong, too."""
        if self.differentiated and gradient.graph.user_functions:
            with torch_modes.without_stand_ins():
                self.gradient_has_no_graph |= gradient.has_no_graph

    def note_cpp(self, names: Set[str]) -> None:
        """Note Functions written in C++; they are reported as not examined."""
        self.in_cpp |= names

    def watched_hook(self, hook: Callable[..., Any], line: object) -> Callable[..., Any]:
        """Wrap a tensor hook that was registered in this line, to note here if it changes a
        gradient."""
        return wrap_hook(hook, self._noting_hooks(), 0, f"the hook registered at {line}")

    def _noting_hooks(self) -> Callable[[str], None]:
        """A callback for a hook that changes a gradient. KFACOperator is wrong with such a hook after a
        single backward pass (order 1), because it multiplies by the Jacobian of the outputs."""
        return partial(
            self._note_hook, 1 if torch_modes.needs_linear_backward() == "KFACOperator" else 2
        )

    def _note_hook(self, order: int, text: str) -> None:
        # first derivatives by hand: the user registered the hook in order to change the gradient
        if self.by_hand is None or torch.is_grad_enabled():
            self.faults[text] = min(order, self.faults.get(text, order))
            self._report_after_backward()

    def record(self, function: type[Function], args: Args) -> function_watch.Ended | None:
        """Record an application. The returned function is called with its node and its results."""
        self.met.add(function)
        if function.__module__.startswith("torch."):
            # under torch.func the applied Function is torch's wrapper of the user's one
            self.met.add(torch_internals.outside_transforms(function, ())[0])
            self._record_torchs(function.__name__, args)
        if function.__module__.startswith("hoglib.") or not function_watch.records_gradients():
            return None
        if self.by_hand is not None and (
            AMBIENT.examination.by_entry_point or AMBIENT.examination.on_wrong == "ignore"
        ):
            return None  # an entry point inside `second_order()` reports, or on_wrong="ignore"
        if torch_internals.tracing():
            self._traced |= {function} if is_users_own(function) else set()
            return None
        if not _is_ours(torch_internals.running_function()):
            # Applied in the backward of another Function, which is examined as a whole up to its second
            # derivative. A third derivative differentiates the inner Function twice. In a recomputation
            # or a transform it is unknown whether we are inside a backward.
            known = is_users_own(function) and not (inside_recomputation() or transforms_active())
            return partial(self._watch_part, function, args) if known else None
        noted = self._noted(function, args)
        if noted is None:
            return None
        key, by = noted
        self.parts.discard(key)
        # read the versions before forward runs: afterwards its own changes cannot be told apart
        versions = [(i, x, x._version) for i, x in enumerate(args) if by[i] and _counts_changes(x)]
        return partial(self._watch_application, key, args, versions)

    def _record_torchs(self, name: str, args: Args) -> None:
        """Note torch's own Functions that break derivatives: hooks, AOT-compiled code, checkpoints."""
        if name == "BackwardHookFunction":  # applied by a module with backward hooks
            watch_module_hooks(self._noting_hooks())
        elif name == "CompiledFunction":
            self.faults[AOT] = 2
        elif name == "CheckpointFunction" and function_watch.records_gradients():
            # the user's own `.backward()` does reach the parameters, if an input requires grad
            needed = any(isinstance(x, Tensor) and x.requires_grad for x in args)
            if self.by_hand is None or not needed:
                self.faults[CHECKPOINT.format(user_line())] = 1

    def _noted(self, function: type[Function], given: Args) -> tuple[Key, tuple[bool, ...]] | None:
        """Record an application that may be wrong: its key, and which arguments need gradients."""
        # hide attribute reads from TorchFunctionModes: each would cost a microsecond
        with torch_internals.without_functions_seen():
            made, (function, args, by) = (
                function,
                torch_internals.outside_transforms(function, given),
            )
            if _is_ours(function) or not is_users_own(function):
                return None
            if not any(needed and x.numel() for x, needed in zip(args, by, strict=True)):
                return None  # the derivative has no elements
            mapped = function_rules.offers_vmap(function)
            mapped = mapped and torch_internals.under_vmap(function, made)
            each = [_verdict_key(x, needed, given) for x, needed in zip(args, by, strict=True)]
        known = identity_of(function)
        verdicts = _VERDICTS.setdefault(known, {})
        forward = _forward_mode()
        kinds: Any = (forward, mapped, torch_internals.autocasts(), *each)
        verdict = verdicts.get(kinds)
        # right only for arguments with a structure (symmetric, ...) that these lack: another kind
        if verdict is not None and verdict.domain and not _are_within(verdict, given, args):
            kinds = ("other values", *kinds)
            verdict = verdicts.get(kinds)
        key = function, kinds
        # recorded in this entry point already, but at values far from these: add a further point
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
        # nothing left to learn: right and not watched, or known to be differentiated twice
        if (is_right and not watched) or self.differentiated.get(key) == 2:
            return None
        if (verdict is None or verdict.retries) and key not in self.unjudged:
            # in a recomputation, the arguments' graphs are not from the first run: ignore them
            graphed = None if _runs_again() else given
            with function_watch.as_around():
                self.unjudged[key] = make_case(function, args, by, forward, graphed, given, mapped)
        return key, by

    def _has_moved(self, key: Key, verdict: Verdict, args: Args, given: Args) -> bool:
        """Count an application; True if its values are far from the examined ones, or its containers
        hold other tensors: in training, values may move to another branch of a backward.

        Reading the ranges synchronizes a device, so only the first 31 applications look, and after
        them the 32nd, 64th, 128th, ...
        """
        if key in self.differentiated:  # this entry point judges it anyway
            return False
        times = verdict.times + 1
        _VERDICTS[identity_of(key[0])][key[1]] = verdict._replace(times=times)
        looks = key not in self._moved and (times < 32 or not times & (times - 1))
        if looks and not (_are_near(args, verdict.ranges) and held_table(given) == verdict.held):
            self._moved.add(key)
        return key in self._moved

    def _watch_part(self, function: type[Function], args: Args, node: Any, result: object) -> None:
        """Note a Function applied in another backward once its own backward runs with a graph."""

        def note(_: object) -> None:
            if torch.is_grad_enabled() and AMBIENT.examination.examiner is self:
                noted = self._noted(function, args)
                if noted is not None and noted[0] not in self.differentiated:
                    self.differentiated[noted[0]] = 2
                    self.parts.add(noted[0])

        if any(node.needs_input_grad):
            node.register_prehook(note)

    def verdict(self, key: Key) -> Verdict:
        """The verdict on an applied Function, examined now if there is none yet; of a wrong Function
        with unused outputs, the verdict on its used outputs alone."""
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
            if len(REFUSED) > refused:  # torch lacks a name; it looked like the Function's error
                verdict = Verdict("not examined", NOT_EXAMINED.format(REFUSED[-1]))
            if before is not None and verdict.retries:  # unclear again: one retry fewer is left
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
        """Whether a verdict on a Function that was differentiated `order` times is reported.

        Of a Function applied in another backward only a wrong second derivative counts: the outer
        formula may compensate for its first one, e.g. if it swaps the gradients of two arguments.
        """
        if key in self.parts:
            return verdict.is_reported and order == 2 and (verdict.of_second or verdict.order == 2)
        return verdict.is_reported and verdict.order <= order

    def mutation(self, key: Key) -> str:
        """The message about an in-place change by a Function, with its line; empty if it made none."""
        what = self._mutates.get(key)
        if what is None:
            return ""
        if what not in MUTATES:
            kept = filter(partial(_backward_reads, self._mutating[key]), what.split())
            return "".join(KEPT.format(name=key[0].__qualname__, kept=one) for one in [*kept][:1])
        rows = check_in_place(self._mutating[key])
        changes = next((r.text for r in rows if r.status == "fail" and what in r.name), "")
        return MUTATES[what].format(name=key[0].__qualname__, changes=changes)

    def _watch_application(
        self, key: Key, given: Args, versions: list[Any], node: Any, result: object
    ) -> None:
        """Runs after forward: compare the versions of arguments, and register hooks on the node."""
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
        app = copy_application(key[0], given)
        if app is not None:
            _MUTATING.add(identity_of(key[0]))
            self._mutating[key] = app
        return app is not None

    def _watch_changed(self, key: Key, node: Any, position: int, x: Tensor) -> None:
        """Note an undeclared in-place change of x if other nodes use x, too.

        If no other node does, the gradient that this node returns for x is all that arrives at the node
        that computed x. If more arrives, the change reached other users of x. A leaf has no such node:
        it always counts as used by others, because the user holds it.
        """
        # a chain of nodes leads from a view to its base; other gradients may join at each node
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
        """Note a Function whose backward changes grad_output in place while others hold that tensor."""
        seen: list[tuple[Snapshot, bool]] = []

        def before(grads: tuple[Tensor | None, ...]) -> None:
            # inside a transform a gradient is a wrapper without memory: only plain tensors are compared
            own = (g for g in grads if g is not None and torch_internals.unwrap(g) is g)
            held = [(g, torch_internals.is_held_elsewhere(g)) for g in own]
            with torch.no_grad(), torch_modes.without_stand_ins():
                seen.extend((Snapshot({"": g}), by_others) for g, by_others in held)

        def after(*_: Any) -> None:
            with torch.no_grad(), torch_modes.without_stand_ins():
                changed = [held for snapshot, held in seen if snapshot.changed({})]
            seen.clear()
            if changed and self._mark_mutating(key, given) and any(changed):
                self._mutates.setdefault(key, "grad_output")

        node.register_prehook(before)
        node.register_hook(after)

    def _watch_kept(self, key: Key, node: Any, given: Args, results: Args) -> None:
        """Note an argument or output that sits on ctx as an attribute, and that was changed in place
        between forward and the first backward."""
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
        """Compare the gradient that one node returned with the total that arrived at the next node.

        Only in the first backward pass: in a second one, gradients of saved tensors arrive as well."""
        if len(given) == 1 and given[0] is not None:
            total = grads[output]
            if total is None or not torch.equal(total.detach(), given[0].detach()):
                self._mutates[key] = "inputs"

    def _note_backward(self, key: Key, node: Any, results: Args) -> None:
        """Note a Function as differentiated when its backward runs. Under a transform, where node hooks
        do not tell, note it at once."""
        runs_again = inside_recomputation()  # a later backward recomputes this, with a graph
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
        """Report when the running backward pass ends, if the entry point has been left."""
        if self.by_hand is not None and AMBIENT.examination.examiner is not self:
            torch_internals.after_backward(partial(self.by_hand, self))


def _are_near(args: Args, ranges: Sequence[Range]) -> bool:
    """Whether a verdict at values in `ranges` also holds for these arguments."""
    pairs = zip(ranges_of(args), ranges, strict=False)
    return all(known.contains(now) for now, known in pairs)


def _counts_changes(x: Tensor) -> bool:
    """Whether the tensor's version counter is of use: wrappers of torch.func and inference tensors have
    none."""
    return torch_internals.unwrap(x) is x and not x.is_inference()


def _backward_reads(app: Application, name: str) -> bool:
    """Whether backward depends on the values of the attribute `name` of ctx (tried with values + 1)."""
    with suppress(Exception), torch.no_grad():
        run = app.seeded()
        moved = run.record.with_slots({name: run.record.held()[name] + 1})
        runs = (run, run._replace(record=moved))
        return not all(map(torch.equal, *(pytree.tensors(app.backward(one)) for one in runs)))
    return True  # it raises: assume that it does


def _explain_backward_error(caller: str, error: Exception, functions: AppliedFunctions) -> None:
    """Add to an error the Function whose backward raised it, with the line, or the Functions that lost
    the graph. Replaces torch's errors about tensors of another call by UnsupportedError."""
    raw = not isinstance(error, HoglibError) and any(x in str(error) for x in OF_ANOTHER_CALL)
    lines = dict(torch_internals.backward_lines(frames_of(error))).items()
    # the innermost backward on the stack raised it, possibly called by the backward of another Function
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
    """Whether the running code is part of a recomputation, now or later: the graphs of its arguments
    are then not the ones that the arguments were computed by."""
    return inside_recomputation() or torch_internals.checkpoint_frame() is not None


def _are_within(verdict: Verdict, given: Args, args: Args) -> bool:
    """Whether the arguments have the structures for which alone the Function is right, and are
    computed: an optimizer step may take a leaf out of its structure. given: the arguments with their
    graph."""
    leaves, graphed = pytree.leaves(args), pytree.leaves(given)
    with torch_internals.without_transforms(), torch.no_grad():
        fit = all(one.fits(leaves[i]) for i, one in verdict.domain)
    return fit and (_runs_again() or all(graphed[i].grad_fn is not None for i, _ in verdict.domain))


def _is_ours(function: type[Function] | None) -> bool:
    return function is None or function.__module__.startswith(("hoglib.", "torch."))


def _forward_mode() -> str:
    """The second-order mode that uses jvp here: "fr" or "rf"; empty if forward mode is not active."""
    if not torch_internals.forward_mode_active():
        return ""
    return "rf" if torch_internals.innermost_is_forward() else "fr"


def _verdict_key(x: object, needs_grad: bool, given: Args) -> Any:
    """The properties of an argument that a verdict depends on."""
    if isinstance(x, Tensor):
        return x.dtype, x.layout, layout_of(x), x.device.type, x.dim(), needs_grad
    if x is None or isinstance(x, bool | str):
        return x
    # searching other objects for tensors takes longer: only `_has_moved` does, at a few applications
    return type(x), held_kinds(x, given) if isinstance(x, list | tuple | dict) else ()
