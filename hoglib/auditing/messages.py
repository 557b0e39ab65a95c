"""What an audit says of a fault: which module, which operation, why, and what to do."""

import re
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hoglib._core import pytree
from hoglib._core.module_names import ModuleNames
from hoglib._core.pytree import is_float
from hoglib.auditing.locating import Fault, Operation, Running
from hoglib.auditing.route_checker import CheckResult
from hoglib.auditing.routes import Route
from hoglib.auditing.stop_gradients import Stop
from hoglib.functional import FunctionalLoss
from hoglib.stand_ins.mode import stand_in_of
from hoglib.verification.api import verify
from hoglib.verification.call import name_of
from hoglib.verification.fix_hints import is_culprit

LARGEST = 200_000  # numbers that a Function is given, for the doctor to be called
LONGEST = 160  # characters of an error
_KNOWN = {
    "must override the setup_context": "torch.func needs a Function with setup_context",
    "ZeroTensors are immutable": "its tangent is one of torch's ZeroTensors, which are immutable",
    r"forward AD with (\w+)": r"\1 has no forward mode",
    r"derivative for (\S+) is not implemented": r"\1 has no derivative",
    "does not currently support double backward": "compiled code has no double backward",
    "saved tensor hooks": "torch.func does not support saved tensor hooks, as of a checkpoint",
}
MOST = 3  # operations in a sentence


def title(loss: Any) -> str:
    if isinstance(loss, FunctionalLoss):
        return type(loss.model).__name__
    return name_of(loss).rpartition("<locals>.")[2]


def inside(running: Running) -> str:
    """The module in which an error was raised, as a sentence."""
    failed = running.failed
    return "" if failed is None else f" In {running.names.called(failed)}."


def off(verdict: CheckResult) -> str:
    """What is the matter with a derivative."""
    if verdict.raised is not None:
        return f"raises {_short(verdict.raised)}"
    if verdict.error is None or verdict.error != verdict.error:
        return "is not finite"
    return f"is off by {_percent(verdict.error)}"


def _short(error: Exception) -> str:
    """An error of torch without its advice, which is not for the user of a model."""
    kind, text = type(error).__name__, f"{error}".partition("\n")[0].rstrip(". ")
    for known, instead in _KNOWN.items():
        found = re.search(known, text)
        if found:
            return f"{kind} ({found.expand(instead)})"
    return f"{kind} ({text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'})"


def _percent(error: float) -> str:
    if error > 10:
        return "more than its own size"
    return f"{error:.0%}" if error >= 0.01 else f"{100 * error:.1g}%"


class Telling:
    """Sentences on the faults of one audit.

    What is said of an operation is said once, however many modules have it.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._told: dict[Any, str] = {}  # by operation, in which module

    def where(self, faults: list[Fault]) -> str:
        """The modules at fault, with the operations, in one line."""
        found = []
        for fault in faults:
            names = ", ".join(dict.fromkeys(op.name for op, _ in fault.operations[:MOST]))
            found.append(self._names.called(fault.module) + (f": `{names}`" if names else ""))
        return "; ".join(found)

    def culprit(self, fault: Fault, what: str) -> str:
        """All that is known of one fault."""
        raised = fault.verdict.raised is not None
        there = f"{what} {off(fault.verdict)} {'in' if raised else 'through'} it"
        text = f"{self._names.called(fault.module)}: {there}."
        if not fault.operations:
            return f"{text} {_no_operation(fault, self._names)}"
        kinds = {op.name: op for op, _ in reversed(fault.operations)}
        for op in [*reversed(kinds.values())][:MOST]:
            at = f" at {op.place}" if op.place else ""
            kind = "operation" if op.function is None else "custom Function"
            where = self._told.setdefault(op.function or op.name, self._names.briefly(fault.module))
            known = where != self._names.briefly(fault.module)
            words = f"See {where}." if known else _of_operation(op)
            text += f"\nThe {kind} `{op.name}`{at} is at fault. {words}"
        return text

    def elsewhere(self, faults: list[Fault]) -> str:
        """Of a route that nobody asked for."""
        return (
            f"It is wrong, first of all in {self.where(faults)}. It was not asked for: this warns "
            "whoever takes it."
        )

    def stopped(self, stops: list[Stop], change: float) -> str:
        """What ends the graph, and what that changes."""
        places = dict.fromkeys(
            f"{stop.how} in {self._names.briefly(stop.module)}"
            + (f" at {stop.place}" if stop.place else "")
            for stop in stops
        )
        more = f" and {len(places) - MOST} more" if len(places) > MOST else ""
        return (
            f"The gradient is stopped by {'; '.join([*places][:MOST])}{more}. The second derivative "
            f"holds constant what is stopped, as the first does; without the stop it would differ by "
            f"{_percent(change)}. If it is not on purpose, take the stop out."
        )


def _of_operation(op: Operation) -> str:
    """Why, and what to do."""
    if op.function is not None:
        words = _doctor(op.function, op.args)
        return words or f"`hoglib.verify({op.name}, inputs)` tells more."
    namespace = str(getattr(op.func, "namespace", "aten"))
    if namespace != "aten":
        return (
            f"It is a custom op, of {namespace}. See what its torch.library.register_autograd gets: "
            "setup_context must save inputs and outputs themselves, and backward must be of "
            "differentiable torch operations."
        )
    stand_in = stand_in_of(op.func)
    if stand_in is None:
        return "Use another route or another operation."
    lacks = f"What torch has there: {stand_in.lacks}."
    if not stand_in.replaces:
        return f"{lacks} {stand_in.instead}"
    return (
        f"{lacks} hoglib has a stand-in, which `hoglib.second_order()` puts in its place, and hvp, "
        "hessian, MAML and the penalties by themselves; audit(..., stand_ins=True) judges that."
    )


def _doctor(function: type[Function], args: tuple[Any, ...]) -> str:
    given = [x for x in pytree.leaves(args) if isinstance(x, Tensor)]
    if sum(x.numel() for x in given) > LARGEST:
        return ""
    marked = pytree.map_tensors(
        lambda x: x.detach().requires_grad_(x.requires_grad and is_float(x)), args
    )
    with suppress(Exception):  # words are not worth an error
        report = verify(function, marked)
        culprits = [row for row in report.failed if is_culprit(row)] or list(report.failed)
        words = " ".join(dict.fromkeys(row.text for row in culprits[:2]))
        return words.replace("pass surrogate=True", "set `surrogate = True` on the Function")
    return ""


def _no_operation(fault: Fault, names: ModuleNames) -> str:
    """Where to look where no single operation is at fault."""
    module = fault.call.module
    hooked = any(op.name == "register_hook" for op in fault.own)
    if module is not None and (module._backward_hooks or module._backward_pre_hooks or hooked):
        return (
            "Its operations are right by themselves; it has a backward hook, which runs in every "
            "backward pass, and may neither change nor detach the gradient."
        )
    applied = dict.fromkeys(op.name for op in fault.own if op.function is not None)
    if applied:
        return (
            f"Its operations are right by themselves; it applies {', '.join(applied)}: does that run "
            "other code in backward? What that closes over, modules and tensors, gets no gradient. "
            "Give it them as arguments; checkpoints need use_reentrant=False, or `hoglib.ops.remat`."
        )
    if fault.unknown:
        parts = ", ".join(names.briefly(part.module) for part in fault.unknown[:MOST])
        return f"It is its own code or that of {parts}, which do not run by themselves."
    if module is None:
        return "The modules are right by themselves: it is the code around them."
    return (
        "Its parts and its operations are right by themselves: look for tensors or modules that it "
        "keeps from an earlier call, hooks, and memory that is written in place."
    )


def second(route: Route) -> str:
    """What a route gives, in a sentence."""
    return {
        "hessian": f"H v by {route.title}",
        "curvature": f"w^T H v by {route.title}",
        "third": f"the third derivative by {route.title}",
    }[route.of]
