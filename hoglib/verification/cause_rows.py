"""The rows that name a cause of a wrong second derivative: what is lost, at which line, and the fix."""

from collections.abc import Sequence

from hoglib._core.detachment import DetachedGradient
from hoglib._core.source_location import format_error
from hoglib.verification.attribution import Diagnosis
from hoglib.verification.function_rules import Slot
from hoglib.verification.report import Row
from hoglib.verification.subject import Application

ONCE = (
    "Remove the decorator, which runs backward without a graph, and compute backward by differentiable "
    "torch operations."
)

FIXES = {
    "alias": "Use the tensor itself: without a second derivative, backward runs without a graph "
    "anyway, and the tensor costs nothing more.",
    "escape": "A number or an array outside of torch has no graph. Stay in torch operations; or, for "
    "NumPy, SciPy or C++ code, give it derivatives of its own with hog.ops.external.",
    "off": "Leave gradients enabled in backward: autograd disables them itself if no second derivative "
    "is asked for.",
    "inner": "Give torch.autograd.grad create_graph=torch.is_grad_enabled(), and the tensors "
    "themselves, not detached copies of them.",
    "backward": "It accumulates into .grad, which has no graph. Return the results of "
    "torch.autograd.grad(..., create_graph=torch.is_grad_enabled()), by the tensors themselves, not "
    "detached copies of them.",
    "write": "What is written there has no graph. Return a new tensor, computed by torch operations.",
    "kernel": "Write it in differentiable torch operations, or wrap it in a Function of its own, whose "
    "backward is its derivative.",
}


def title(cut: DetachedGradient) -> str:
    return cut.how.split(" under ")[-1].split(",")[0].strip("`")


def detached_row(
    name: str, function: str, rule: str, detached: Sequence[DetachedGradient], found: Diagnosis
) -> Row:
    through = [s for s in found.slots if s.kind in ("input", "output", "gradient")]
    lost = sum(s.share for s in through)
    share = ""
    if through:
        what = " and ".join(map(called, through))
        share = f" It loses {percent(lost)} of the missing second-order term, that of {what}."
    shown = "; ".join(map(str, detached[:3])) + (
        f"; and {len(detached) - 3} more" if len(detached) > 3 else ""
    )
    text = f"{function}.{rule} leaves the graph by {shown}.{share} {fix_of(detached[0])}"
    return Row(name, "fail", lost or None, text)


def fix_of(cut: DetachedGradient) -> str:
    return FIXES["escape" if cut.then else cut.kind]


def called(slot: Slot) -> str:
    return slot.what if slot.label == slot.what else f"{slot.what} ({slot.label})"


def raised_row(prefix: str, function: str, rule: str, found: Diagnosis, *, always: bool) -> Row:
    """The row of a rule that raises, with a graph only or always."""
    error = found.error
    assert error is not None
    name = f"{prefix}culprit: {rule}" if always else f"{prefix}detached: in {rule}"
    how = "" if always else "cannot be differentiated: with a graph it "
    text = f"{function}.{rule} {how}raised {format_error(error)}."
    if found.detached:
        text += " It leaves the graph by " + "; by ".join(map(str, found.detached)) + "."
    if not found.kept and rule == "backward":
        text += " Nothing is saved: ctx.save_for_backward is never called."
    return Row(name, "fail", None, f"{text} {_advice(rule, error, found)}".rstrip())


def _advice(rule: str, error: Exception, found: Diagnosis) -> str:
    """What to do about an error of a rule that runs with a graph."""
    message = str(error)
    if rule == "jvp" and found.only_backward:
        return (
            "In a jvp ctx.saved_tensors are those of ctx.save_for_forward: call it in setup_context "
            "too, with the same tensors."
        )
    if "in-place" in message or "inplace" in message:
        return "Work on new tensors, not in place."
    if "numpy" in message:
        return FIXES["escape"]
    return FIXES["kernel"] if "not implemented" in message or "formula" in message else ""


def saved_row(prefix: str, rule: str, slots: Sequence[Slot], app: Application) -> Row:
    """The row of slots without a graph, with two ways to give them one."""
    name = f"{prefix}saved: {', '.join(slot.label for slot in slots)}"
    lines = [_slot(slot) for slot in slots]
    made = [slot for slot in slots if slot.kind == "intermediate" and not slot.graphed]
    if made:
        inputs = ", ".join(app.names[i] for i in app.by if i < len(app.names))
        which = ", ".join(f"`{slot.name}`" if slot.name else slot.label for slot in made)
        lines.append(
            f"Forward runs without a graph, so {rule} cannot be differentiated through what forward "
            f"computed. Two ways to fix it:\n"
            f"1. save the inputs instead ({inputs}), and compute {which} from them again in {rule};\n"
            f"2. or return {which} from forward as one more output, and save that: then backward gets "
            f"the gradient of {which} as one more argument, and adds that gradient times the "
            f"derivative of {which} by the inputs."
        )
    return Row(name, "fail", sum(slot.share for slot in slots), "\n".join(lines))


def _slot(slot: Slot) -> str:
    place = f", saved at {slot.place}" if slot.place else ""
    called = f"`{slot.name}`, " if slot.name else ""
    share = f"It carries {percent(slot.share)} of the missing second-order term."
    if slot.graphed:
        return (
            f"{slot.label} is {called}part of a graph that forward built itself{place}, which ends "
            f"at detached copies of its inputs. {share} Save the inputs, and build that graph in "
            "backward from them: under torch.enable_grad(), and with torch.autograd.grad(..., "
            "create_graph=torch.is_grad_enabled())."
        )
    if slot.kind == "copy":
        original = slot.what.removeprefix("a copy of ")
        return (
            f"{slot.label} is {called}a copy (a clone, or detached) of {original}{place}. A copy made "
            f"in forward has no graph. {share} Save {original} itself."
        )
    what = slot.what.replace("an intermediate", f"an intermediate ({slot.type})")
    return f"{slot.label} is {called}{what}{place}. {share}"


def percent(share: float) -> str:
    return "less than 1 %" if share < 0.005 else f"{100 * share:.0f} %"
