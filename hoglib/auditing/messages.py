"""What an audit reports about a fault: which module, which operation, why, and what to do."""

from contextlib import suppress
from typing import Any, final

from torch.autograd import Function

from hoglib._core import pytree, validation
from hoglib._core.module_names import ModuleNames
from hoglib._core.pytree import is_float
from hoglib.auditing.checker import CheckResult
from hoglib.auditing.locator import Fault, RecordedCall
from hoglib.auditing.stop_gradients import StopGradient
from hoglib.stand_ins.mode import stand_in_of
from hoglib.verification.api import verify
from hoglib.verification.fix_hints import is_culprit

MAX_NAMES = 3  # names in a sentence
MAX_VERIFIED = 200_000  # numbers in the inputs of a Function, above which it is not verified
MAX_ERROR_LENGTH = 160  # characters of an error message


def describe_failure(result: CheckResult) -> str:
    """What is wrong with a derivative, as a verb phrase."""
    if result.raised is not None:
        text = f"{result.raised}".partition("\n")[0].rstrip(". ")
        return f"raises {type(result.raised).__name__} ({text[:MAX_ERROR_LENGTH]})"
    if result.error is None or result.error != result.error:
        return "is not finite"
    return f"is off by {percent(result.error)}"


def percent(error: float) -> str:
    """A relative error in words."""
    if error > 10:
        return "more than its own size"
    return f"{error:.0%}" if error >= 0.01 else f"{100 * error:.1g}%"


@final
class FaultMessages:
    """The sentences about the faults of one audit.

    An operation is explained once; other modules that contain it refer to that explanation.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._explained_in: dict[Any, str] = {}  # module by operation

    def where(self, faults: list[Fault]) -> str:
        """The modules at fault, with their operations, in one line."""
        found = []
        for fault in faults:
            names = ", ".join(dict.fromkeys(op.operation for op in fault.operations[:MAX_NAMES]))
            found.append(self._names.called(fault.module) + (f": `{names}`" if names else ""))
        return "; ".join(found)

    def culprit(self, fault: Fault, what: str) -> str:
        """Everything known about one fault."""
        preposition = "in" if fault.result.raised is not None else "through"
        failure = f"{what} {describe_failure(fault.result)} {preposition} it"
        text = f"{self._names.called(fault.module)}: {failure}."
        if not fault.operations:
            return f"{text} {self._without_operation(fault)}"
        kinds: dict[str, RecordedCall] = {}
        for op in fault.operations:
            kinds.setdefault(op.operation, op)
        here = self._names.briefly(fault.module)
        for op in [*kinds.values()][:MAX_NAMES]:
            line = f" at {op.line}" if op.line else ""
            kind = "operation" if op.function is None else "custom Function"
            first = self._explained_in.setdefault(op.function or op.operation, here)
            why = f"See {first}." if first != here else _explain(op)
            text += f"\nThe {kind} `{op.operation}`{line} is at fault. {why}"
        return text

    def _without_operation(self, fault: Fault) -> str:
        """Where to look if no single operation is at fault."""
        module = fault.call.module
        applied = dict.fromkeys(op.operation for op in fault.call.operations if op.function)
        if module is not None and (module._backward_hooks or module._backward_pre_hooks):
            more = "it has a backward hook, which must neither change nor detach the gradient."
        elif applied:
            more = (
                f"it applies {', '.join(applied)}: does its backward run other code? Modules and "
                "tensors in the closure of that code get no gradient; pass them as arguments. "
                "Checkpoints need use_reentrant=False, or use `hoglib.ops.remat`."
            )
        elif module is None:
            return "The modules are right by themselves: the fault is in the code around them."
        else:
            more = (
                "look for tensors or modules kept from an earlier call, for hooks, for tensors "
                "written in place, and for parts that cannot run alone (scripted, or in torch.func)."
            )
        return f"Its operations are right by themselves, but {more}"

    def stopped(self, stops: list[StopGradient]) -> str:
        """Where gradients are stopped."""
        places = [
            f"{stop.how} in {self._names.briefly(stop.module)}"
            + (f" at {stop.line}" * bool(stop.line))
            for stop in stops
        ]
        return validation.listing([*dict.fromkeys(places)], MAX_NAMES)


def _explain(op: RecordedCall) -> str:
    """Why an operation loses a derivative, and what to do."""
    if op.function is not None:
        words = _verification_result(op.function, op.args)
        return words or f"`hoglib.verify({op.operation}, inputs)` explains why."
    stand_in = stand_in_of(op.run)
    if stand_in is None:
        return "Use another route or another operation."
    reason = f"The reason in torch: {stand_in.lacks}."
    if not stand_in.replaces:
        return f"{reason} {stand_in.instead}"
    return (
        f"{reason} hoglib has a stand-in for it: hvp, hessian, MAML and the penalties use it by "
        "default, other code inside `hoglib.second_order()`. audit(..., stand_ins=True), the "
        "default, checks the stand-in."
    )


def _verification_result(function: type[Function], args: tuple[Any, ...]) -> str:
    """What `hoglib.verify` says about a Function on these arguments; empty if it says nothing."""
    given = pytree.tensors(args)
    if sum(x.numel() for x in given) > MAX_VERIFIED:
        return ""
    inputs = pytree.map_tensors(
        lambda x: x.detach().requires_grad_(x.requires_grad and is_float(x)), args
    )
    with suppress(Exception):  # an explanation is not worth an error
        report = verify(function, inputs)
        culprits = [row for row in report.failed if is_culprit(row)] or list(report.failed)
        words = " ".join(dict.fromkeys(row.text for row in culprits[:2]))
        return words.replace("pass surrogate=True", "set `surrogate = True` on the Function")
    return ""
