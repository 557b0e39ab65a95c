"""What an audit says of a fault: which module, which operation, why, and what to do."""

from contextlib import suppress
from typing import Any

from torch import Tensor

from hoglib import _tree
from hoglib._functional import FunctionalLoss
from hoglib.stand_ins import need_of
from hoglib.verification._around import told
from hoglib.verification._call import is_float, name_of
from hoglib.verification._judging import Verdict
from hoglib.verification._locating import Fault
from hoglib.verification._module_calls import Operation
from hoglib.verification._routes import Route
from hoglib.verification._treatment import is_culprit
from hoglib.verification._verify import verify

LARGEST = 200_000  # numbers that a Function is given, for the doctor to be called
MOST = 3  # operations in a sentence


def title(loss: Any) -> str:
    if isinstance(loss, FunctionalLoss):
        return type(loss.model).__name__
    return name_of(loss).rpartition("<locals>.")[2]


def off(verdict: Verdict, what: str) -> str:
    """How wrong a derivative is."""
    if verdict.raised is not None:
        return f"{what} raises {told(verdict.raised)}"
    if verdict.error is None or verdict.error != verdict.error:
        return f"{what} is not finite"
    return f"{what} is off by {_percent(verdict.error)}"


def _percent(error: float) -> str:
    if error > 10:
        return "more than its own size"
    return f"{error:.0%}" if error >= 0.01 else f"{error:.0e} of its size"


def where(faults: list[Fault]) -> str:
    """The modules at fault, with the operations, in one line."""
    found = []
    for fault in faults:
        names = ", ".join(dict.fromkeys(op.name for op, _ in fault.operations[:MOST]))
        found.append(fault.call.called + (f": `{names}`" if names else ""))
    return "; ".join(found)


def culprit(fault: Fault, what: str) -> str:
    """All that is known of one fault."""
    text = f"{fault.call.called}: {off(fault.verdict, what)} through it."
    if not fault.operations:
        return f"{text} {_no_operation(fault)}"
    seen: set[str] = set()
    for op, verdict in fault.operations:
        if op.name in seen or len(seen) == MOST:
            continue
        seen.add(op.name)
        text += f"\n{_of_operation(op, verdict, what)}"
    return text


def _of_operation(op: Operation, verdict: Verdict, what: str) -> str:
    at = f" at {op.place}" if op.place else ""
    if op.function is not None:
        text = f"The custom Function {op.name}{at} is at fault: {off(verdict, what)}."
        words = _doctor(op)
        return f"{text} {words}" if words else f"{text} `hoglib.verify({op.name}, inputs)` tells more."
    whose = "The operation"
    namespace = str(getattr(op.func, "namespace", ""))
    if namespace and namespace != "aten":
        whose = f"The custom op {namespace}::"
        return (
            f"{whose}{op.name}{at} is at fault: {off(verdict, what)}. See what its "
            "torch.library.register_autograd gets: setup_context must save inputs and outputs "
            "themselves, and backward must be of differentiable torch operations."
        )
    text = f"{whose} `{op.name}`{at} is at fault: {off(verdict, what)}."
    need = need_of(op.func)
    if need is not None and need.replaces:
        return (
            f"{text} torch has {need.lacks}. hoglib has a stand-in for it, which `hoglib.second_order()` "
            "puts in its place, and hvp, hessian, MAML and the penalties by themselves; "
            "audit(..., stand_ins=True) judges that."
        )
    if need is not None:
        return f"{text} torch has {need.lacks}. {need.instead}"
    return f"{text} Use another route or another operation."


def _doctor(op: Operation) -> str:
    """Why the derivatives of a custom Function are wrong, as `verify` tells it."""
    given = [x for x in _tree.leaves(op.args) if isinstance(x, Tensor)]
    if sum(x.numel() for x in given) > LARGEST:
        return ""
    marked = _tree.map_tensors(
        lambda x: x.detach().requires_grad_(x.requires_grad and is_float(x)), op.args
    )
    with suppress(Exception):  # words are not worth an error
        report = verify(op.function, marked)
        culprits = [row for row in report.failed if is_culprit(row)] or list(report.failed)
        return " ".join(dict.fromkeys(row.text for row in culprits[:2]))
    return ""


def _no_operation(fault: Fault) -> str:
    module = fault.call.module
    hooks = [op.name for op in fault.own if op.name == "register_hook"]
    if module is not None and (module._backward_hooks or module._backward_pre_hooks or hooks):
        return (
            "Its operations are right by themselves; it has a backward hook, which runs in every backward "
            "pass and may not change or detach the gradient."
        )
    if fault.unknown:
        parts = ", ".join(f"`{part.name}`" for part in fault.unknown[:MOST])
        return f"It is its own code or that of {parts}, which could not be run by themselves."
    if module is None:
        return "The modules are right by themselves: it is the code around them."
    return (
        "Its parts and its operations are right by themselves: look for tensors or modules that it keeps "
        "from an earlier call, hooks, and memory that is written in place."
    )


def second(route: Route) -> str:
    """What a route gives, in a sentence."""
    return {
        "hessian": f"H v by {route.title}",
        "curvature": f"w^T H v by {route.title}",
        "third": f"the third derivative by {route.title}",
    }[route.of]
