"""What can be audited: the loss, the parameters and the batch, and what to do about the rest."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from hoglib._core import pytree, validation
from hoglib._core.autograd import clone_inference_tensors, grad_enabled
from hoglib._core.module_names import ModuleNames
from hoglib._core.torch_internals import transforms_active
from hoglib.auditing.checks import Checks
from hoglib.auditing.problem import Problem
from hoglib.auditing.routes import asked_for
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.report import Report
from hoglib.verification.rounding import exact_products

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def check(loss: Any, params: Any, batch: Any) -> None:
    """Raises TypeError or ValueError for what is no loss, no parameters, or no batch."""
    if isinstance(loss, nn.Module):
        raise ArgumentTypeError(
            "loss: expected a function (params, batch) -> scalar, got the module "
            f"{type(loss).__name__}; make one: `hoglib.functional_loss(model, criterion)`."
        )
    validation.function("loss", loss)
    if not isinstance(params, dict | list | tuple | Tensor):
        raise ArgumentTypeError(
            f"params: expected a dict of tensors by qualified name, or another pytree, got "
            f"{validation.describe(params)}; make one with `hoglib.trainable_params(model)`."
        )
    validation.parameters(params)
    if isinstance(batch, DataLoader):
        raise ArgumentTypeError(
            "batch: expected one batch, got a DataLoader; take one: `next(iter(loader))`."
        )
    if transforms_active():
        raise UnsupportedError(
            "audit: expected to be called outside of torch.func transforms, got called inside of one; "
            "audit the function that is transformed before."
        )
    for path, x in zip(pytree.paths(params), pytree.leaves(params), strict=True):
        what = f"params[{path!r}]" if path else "params"
        if is_lazy(x):
            raise ArgumentValueError(
                f"{what}: expected a tensor with values, got one of a lazy module that has not run; "
                "call the model on a batch once."
            )
        if x.is_nested or x.layout is not torch.strided or x.is_meta or x.dtype not in DTYPES:
            kind = "a nested tensor" if x.is_nested else validation.describe(x)
            more = "" if x.is_nested else f" ({x.layout}, on {x.device})"
            raise ArgumentTypeError(
                f"{what}: expected a dense tensor with values, of "
                f"{', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {kind}{more}; "
                "convert it, and let the loss convert it back."
            )
    for x in pytree.leaves(batch):
        if isinstance(x, Iterator):
            raise ArgumentTypeError(
                f"batch: expected one that the loss can be run on many times, got "
                f"{validation.describe(x)}, which is empty after the first; pass list(...) of it."
            )


def check_modules(names: ModuleNames) -> None:
    """Raises ValueError for a module that has no values yet."""
    for module in names.modules():
        places = (*module._parameters.values(), *module._buffers.values())
        if any(x is not None and is_lazy(x) for x in places):
            raise ArgumentValueError(
                f"loss: expected modules with values, got {names.called(module)}, which is "
                "lazy and has not run; call the model on a batch once."
            )


# === `hog.audit`: whether the second derivatives of a model's loss are right, and whose are not.

Loss = Callable[..., Tensor]


def audit(
    loss: Loss,
    params: Any,
    batch: Any,
    *,
    routes: Sequence[str] | str | None = None,
    stand_ins: bool = False,
) -> Report:
    r"""Are the second derivatives of a model's loss right? If not, which module is at fault, and how?

        H v = d/de grad loss(params + e v, batch) at e = 0

    by each route, compared with central differences of the gradient, and the gradient with those of
    the loss, in a float64 copy, along random directions, at a point beside params (by a hundredth of
    their size, so that no zero of an initialisation hides a fault). Where a derivative is wrong or
    missing, each call of a module is judged by itself, from the model down to the one whose own code
    loses it, and there each operation; so the report names the module as its parameters are named, the
    operation or custom Function, the line, and what to do.

    loss: from `hoglib.functional_loss`, or any function (params, batch) -> scalar. params: a pytree of
    floating-point tensors, a dict by qualified name as `hoglib.trainable_params` gives it. batch:
    whatever the loss takes.
    routes: which must be right, of "reverse-over-reverse", "forward-over-reverse",
    "reverse-over-forward", "forward-over-forward" (or rr, fr, rf, ff), "torch.func.hessian",
    "jacrev of jacrev", "grad of vmap" (the usual functional MAML, grad(vmap(grad))) and "third order".
    None is the one that `hvp(mode="auto")` takes, "reverse-over-reverse". The others are tried too:
    where one is wrong the report warns, where it raises it says so.
    stand_ins: judge what hoglib runs, inside `hoglib.second_order()`, rather than what torch does by
    itself.

    What is stopped on purpose (`detach`, `no_grad`, ...) is held constant, as autograd does, and told
    where it matters. Random numbers are the same in every run. Also warned of: dropout, train-mode
    batch norm, autocast, `once_differentiable`, compiled modules, reentrant checkpoints, unused
    parameters.

    Returns a `Report`: `ok` is False exactly where the gradient or a requested route is wrong;
    `culprits` are the names of the modules at fault. Nothing is changed: parameters, buffers, modes,
    `.grad`, random numbers.
    Raises TypeError and ValueError for arguments of the wrong kind, RuntimeError for a loss that does
    not depend on params. One that does not run is told in the report.
    """
    check(loss, params, batch)
    validation.flag("stand_ins", stand_ins)
    chosen = asked_for(routes)
    with (
        _ONE_AT_A_TIME,
        grad_enabled(),
        exact_products(),
        warnings.catch_warnings(),
        stand_ins_if(stand_ins),
    ):
        warnings.simplefilter("ignore")  # what is tried on purpose is no news
        params, batch = clone_inference_tensors((params, batch))
        problem = Problem(loss, params, batch)
        check_modules(problem.names)
        return Checks(problem, chosen).report()


# What is random, and what precision is, is the process's: another thread's audit waits.
_ONE_AT_A_TIME = threading.RLock()
