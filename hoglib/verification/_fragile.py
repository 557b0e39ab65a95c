"""Warnings of what makes second-order training meaningless or fragile."""

from collections.abc import Iterator, Sequence

from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from hoglib._functorch import is_compiled, is_once_differentiable
from hoglib.verification._look import Look
from hoglib.verification._module_calls import Names
from hoglib.verification.report import Row

MOST = 5  # names in a sentence
EACH_TIME = (
    "Each product is of another function, and conjugate gradients, eigenvalues and differences of "
    "gradients mean nothing."
)


def rows(look: Look, names: Names) -> Iterator[Row]:
    """A row for each thing that a run showed."""
    for name, text in _texts(look, names):
        yield Row(name, "warn", None, text)


def _texts(look: Look, names: Names) -> Iterator[tuple[str, str]]:
    if look.dropped:
        yield (
            "dropout",
            f"Dropout is on in {_modules(look.dropped)}. {EACH_TIME} Call model.eval(), or give every "
            "product the same seed (`torch.manual_seed` before each).",
        )
    if look.drew or look.by_generator:
        who = _modules(look.drew) if look.drew else "The loss, by a torch.Generator,"
        yield (
            "random numbers",
            f"{who} draws random numbers. {EACH_TIME} Draw them before and pass them with the batch, "
            "or give every product the same seed.",
        )
    training = [names.of(m) for m in look.ran.values() if isinstance(m, _BatchNorm) and m.training]
    if training:
        yield (
            "batch norm",
            f"Batch norm is in train mode in {_modules(training)}: it couples the examples of a batch. "
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
            f"Autocast is on inside {_modules(look.autocast)}: second derivatives are rounded to half "
            "precision twice there. Take the region out of the model, around the call.",
        )
    once = [f"{f.__qualname__} in {_in(n)}" for f, n in look.functions if is_once_differentiable(f)]
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
            f"torch.utils.checkpoint runs with use_reentrant=True in {_modules(reentrant)}: it raises "
            "under torch.autograd.grad, and has no second derivative. Pass use_reentrant=False, or use "
            "`hoglib.ops.remat`.",
        )
    compiled = [
        names.of(m) for m in names.modules() if is_compiled(m) or m._compiled_call_impl is not None
    ]
    if compiled or look.compiled:
        yield (
            "compiled",
            f"{_modules(compiled) if compiled else 'A function'} was compiled by torch.compile, and "
            "compiled code has no second derivative: torch raises. hoglib runs what `functional_loss` "
            "is given uncompiled; elsewhere use the module that was compiled.",
        )
    if look.unused:
        yield (
            "unused parameters",
            f"The loss does not depend on {_listed(look.unused)}: their gradient is None, and their "
            "rows and columns of the Hessian are zero. Leave them out of params, or look for a branch that "
            "does not run.",
        )


def _in(name: str) -> str:
    return f"`{name}`" if name else "the model itself"


def _modules(names: Sequence[str]) -> str:
    return _listed([_in(name) for name in names])


def _listed(found: Sequence[str]) -> str:
    shown = list(dict.fromkeys(found))
    more = f" and {len(shown) - MOST} more" if len(shown) > MOST else ""
    return ", ".join(shown[:MOST]) + more
