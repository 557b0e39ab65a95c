"""Warnings of what makes second-order training meaningless or fragile."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from hoglib._functorch import is_compiled, is_once_differentiable
from hoglib.verification._module_names import Names
from hoglib.verification.auditing.look import Look
from hoglib.verification.report import CULPRIT, Row

MOST = 5  # names in a sentence
EACH_TIME = (
    "Each product is of another function, and conjugate gradients, eigenvalues and differences of "
    "gradients mean nothing."
)


def rows(look: Look, names: Names) -> Iterator[Row]:
    """A row for each thing that a run showed."""
    for name, text in _texts(look, names):
        yield Row(name, "warn", None, text)


def not_finite(look: Look) -> list[Row]:
    """Of a loss that is not: then its derivatives mean nothing."""
    at = (
        f"The first output that is not finite is that of {look.not_finite[0]}. "
        if look.not_finite
        else ""
    )
    return [
        Row(
            "finite", "fail", None,
            "the loss is not a finite number at params, and nothing else was looked at. "
            f"{at}Look for NaN in the batch, and for log, sqrt and divisions at zero.",
        )
    ]  # fmt: skip


def culprits(look: Look, names: Names) -> Iterator[Row]:
    """A row for each thing that a run showed and that makes second derivatives wrong or impossible."""
    if look.compiled_raises is not None:
        for name in [*map(names.title, _compiled(names))] or ["the loss"]:
            yield Row(
                f"{CULPRIT}{name}", "fail", None,
                "It was compiled by torch.compile, and compiled code has no second derivative: "
                f"{str(look.compiled_raises).splitlines()[0][:160]}. Use the module that was compiled, "
                "or `hoglib.functional_loss`, which runs it uncompiled. All else is judged uncompiled.",
            )  # fmt: skip
    if not look.deterministic:
        yield Row(
            "deterministic", "fail", None,
            "the loss is not the same twice, from the same random numbers and the same state of its "
            "modules (hidden nondeterminism): does it read a clock, draw numbers of its own, or count "
            "in a global? Derivatives and differences of it mean nothing.",
        )  # fmt: skip
    if look.from_elsewhere:
        yield Row(
            f"{CULPRIT}the loss", "fail", None,
            f"It uses {_listed(look.from_elsewhere)} of the model itself beside the params that it is "
            "given: a part of the derivatives is missing. Look for model.parameters() or a list of "
            "weights in it; take them from params, or detach() what is meant as a constant.",
        )  # fmt: skip


def _compiled(names: Names) -> list[nn.Module]:
    return [m for m in names.modules() if is_compiled(m) or m._compiled_call_impl is not None]


def _texts(look: Look, names: Names) -> Iterator[tuple[str, str]]:
    if look.dropped:
        yield (
            "dropout",
            f"Dropout is on in {_listed(look.dropped)}. {EACH_TIME} Call model.eval(), or give every "
            "product the same seed (`torch.manual_seed` before each).",
        )
    if look.drew or look.drew_outside:
        who = _listed(look.drew) if look.drew else "The loss"
        by = f" by {_listed(look.drew_outside)}" if look.drew_outside else ""
        yield (
            "random numbers",
            f"{who} draws random numbers{by}. {EACH_TIME} Draw them before and pass them with the "
            "batch, or give every product the same seed.",
        )
    if look.remembers:
        yield (
            "state",
            f"The value is another one the next time: it depends on what a run leaves in "
            f"{_listed([f'`{name}`' for name in look.remembers])}. {EACH_TIME} Make it a part of the "
            "batch, or take it out while second derivatives are taken.",
        )
    training = [
        names.briefly(m) for m in look.ran.values() if isinstance(m, _BatchNorm) and m.training
    ]
    if training:
        yield (
            "batch norm",
            f"Batch norm is in train mode in {_listed(training)}: it couples the examples of a batch. "
            "The Hessian of a batch is no mean over examples, and that of a data set depends on its "
            "batches. hoglib leaves the running statistics as they are. Call .eval() on it, or use a "
            "norm within examples (GroupNorm, LayerNorm).",
        )
    if look.autocast_around:
        yield (
            "autocast",
            "Autocast is on around the call: derivatives are rounded to half precision twice. Take "
            "second derivatives outside of it, as hoglib's penalties do.",
        )
    elif look.autocast:
        yield (
            "autocast",
            f"Autocast is on inside {_listed(look.autocast)}: second derivatives are rounded to half "
            "precision twice there. Take the region out of the model, around the call.",
        )
    once = [f"{f.__qualname__} in {n}" for f, n in look.functions if is_once_differentiable(f)]
    if once:
        yield (
            "once_differentiable",
            f"{_listed(once)} is decorated with @once_differentiable: a second derivative through it "
            "raises, or under torch.autograd.grad(inputs=...) is silently zero. Take the decorator off "
            "and compute in backward by differentiable torch operations from the saved inputs.",
        )
    reentrant = [name for f, name in look.functions if f is CheckpointFunction]
    if reentrant:
        yield (
            "reentrant checkpoint",
            f"torch.utils.checkpoint runs with use_reentrant=True in {_listed(reentrant)}: it raises "
            "under torch.autograd.grad, and has no second derivative. Pass use_reentrant=False, or use "
            "`hoglib.ops.remat`.",
        )
    compiled = [*map(names.briefly, _compiled(names))]
    if look.compiled:
        yield (
            "compiled",
            f"{_listed(compiled) if compiled else 'A function'} was compiled by torch.compile, and "
            "compiled code has no second derivative: torch raises. hoglib runs what `functional_loss` "
            "is given uncompiled; elsewhere use the module that was compiled.",
        )
    if look.unused:
        yield (
            "unused parameters",
            f"The loss does not depend on {_listed(look.unused)}: their gradient is None, and their "
            "rows and columns of the Hessian are zero. Leave them out of params, or look for a "
            "branch that does not run.",
        )


def _listed(found: Sequence[str]) -> str:
    shown = list(dict.fromkeys(found))
    more = f" and {len(shown) - MOST} more" if len(shown) > MOST else ""
    return ", ".join(shown[:MOST]) + more
