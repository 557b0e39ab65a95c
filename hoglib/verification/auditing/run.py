"""`hog.audit`: whether the second derivatives of a model's loss are right, and whose are not."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hoglib import _arguments as arguments
from hoglib._recording import recordable, recording
from hoglib.stand_ins import stand_ins_if
from hoglib.verification._exact import exact_products
from hoglib.verification.auditing.checks import Checks
from hoglib.verification.auditing.problem import Problem
from hoglib.verification.auditing.routes import asked_for
from hoglib.verification.auditing.usable import check, check_modules
from hoglib.verification.report import Report

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
    arguments.flag("stand_ins", stand_ins)
    chosen = asked_for(routes)
    with (
        _ONE_AT_A_TIME,
        recording(),
        exact_products(),
        warnings.catch_warnings(),
        stand_ins_if(stand_ins),
    ):
        warnings.simplefilter("ignore")  # what is tried on purpose is no news
        params, batch = recordable((params, batch))
        problem = Problem(loss, params, batch)
        check_modules(problem.names)
        return Checks(problem, chosen).report()


# What is random, and what precision is, is the process's: another thread's audit waits.
_ONE_AT_A_TIME = threading.RLock()
