"""Second derivatives audited before the first step of a fit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng
from torch import distributed

from hoglib._core import validation
from hoglib._core.source_location import error_text, warn
from hoglib.auditing.api import audit
from hoglib.auditing.problem import NamedProblem, problems
from hoglib.auditing.routes import requested_routes
from hoglib.errors import ArgumentTypeError, ArgumentValueError, HoglibError, VerificationError
from hoglib.penalties.critic_context import restore_buffers
from hoglib.verification.report import Report

METHOD = "second_order_problem"
EXAMPLE = f"""
    def {METHOD}(self, batch):
        loss = hoglib.functional_loss(self.net, torch.nn.functional.mse_loss)
        return loss, hoglib.trainable_params(self.net), batch
"""
ACTIONS = ("refuse", "warn")


class WrongSecondDerivative(VerificationError):
    """A VerificationError of a training that was refused; it explains itself."""


class SecondOrderAudit(pl.Callback):
    """Audits what a LightningModule differentiates twice, on the first batch, before the first step.

    The module says what that is: `second_order_problem(batch)` returns (loss, params, batch) for
    `hoglib.audit`, or a list of such tuples, or a dict of them by name. Once in each fit their reports
    are printed; where one failed, action="refuse" raises WrongSecondDerivative, a VerificationError
    that names the culprit, and action="warn" warns and goes on. The run is the one that it would be
    without the callback: random numbers, buffers and parameters are left as they were. Autocast is off
    here, whatever the trainer's precision. Of several processes each audits its own batch, and where
    one fails all raise.

    routes, stand_ins: as in `hoglib.audit`; verbose: print the table of checks too. `reports` holds
    what was found in the last fit.
    Raises TypeError, at the start of the fit, for a module without the method; and, at the first
    batch, ValueError or TypeError for a method that raises or returns something else.
    """

    def __init__(
        self,
        routes: Sequence[str] | None = None,
        stand_ins: bool = False,
        action: str = "refuse",
        verbose: bool = False,
    ) -> None:
        super().__init__()
        requested_routes(routes)  # raises for names that are none
        self.routes = routes
        self.stand_ins = validation.flag("stand_ins", stand_ins)
        self.action = validation.one_of("action", action, ACTIONS)
        self.verbose = validation.flag("verbose", verbose)
        self.reports: tuple[Report, ...] = ()
        self._due = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_method(pl_module)
        self._due, self.reports = True, ()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._due:
            return
        self._due = False
        error: Exception | None = None
        try:
            with isolate_rng():
                self.reports = tuple(self._audited(pl_module, batch))
        except Exception as caught:  # raised below, once the other processes know of it
            error = caught
        own = _Outcome(
            "" if error is None else error_text(error),
            "\n\n".join(self._text(report) for report in self.reports if not report.ok),
        )
        found = _of_all_processes(own)
        if error is not None:
            raise error
        for report in self.reports:
            if report.ok or self.action == "warn":
                pl_module.print(self._text(report) + "\n")
        for rank, outcome in enumerate(found):
            if outcome.error or outcome.wrong:
                self._act(pl_module, outcome, f" in process {rank}" if len(found) > 1 else "")

    def _audited(self, module: pl.LightningModule, batch: Any) -> list[Report]:
        found = []
        for name, *problem in problems_of(module, batch):
            report = audit(*problem, routes=self.routes, stand_ins=self.stand_ins)
            report.name = name
            found.append(report)
        return found

    def _text(self, report: Report) -> str:
        return report.text(table=self.verbose)

    def _act(self, module: pl.LightningModule, outcome: "_Outcome", where: str) -> None:
        what = f"{type(module).__name__}.{METHOD}"
        if outcome.error:
            raise ArgumentValueError(f"{what}{where}: {outcome.error}")
        message = (
            f"{what}{where}: expected right second derivatives, got these:\n\n{outcome.wrong}\n\n"
        )
        if self.action == "warn":
            warn(f"{message}The training goes on with them.")
        else:
            raise WrongSecondDerivative(
                f"{message}No step was taken. Mend what is named, or train with them all the same: "
                "SecondOrderAudit(action='warn')."
            )


class _Outcome(NamedTuple):
    """What a process found: why it could not audit, and the reports that failed."""

    error: str
    wrong: str


def _of_all_processes(own: _Outcome) -> list[_Outcome]:
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


def check_method(module: pl.LightningModule) -> None:
    """Raises TypeError, with an example, for a module that does not say what it differentiates."""
    if not callable(getattr(module, METHOD, None)):
        raise ArgumentTypeError(
            f"{type(module).__name__}: expected a method {METHOD}(batch) that says what is "
            f"differentiated twice, got none; add one, for instance\n{EXAMPLE}"
        )


def problems_of(module: pl.LightningModule, batch: Any) -> list[NamedProblem]:
    """What a LightningModule says that it differentiates twice, under the names of its reports.

    Buffers of modules that run meanwhile stay as they are. Raises ValueError, with the reason, where
    the method raises; TypeError for anything but problems.
    """
    what = f"{type(module).__name__}.{METHOD}"
    method: Any = getattr(module, METHOD)
    try:
        with restore_buffers():
            made = method(batch)
    except Exception as error:
        if isinstance(error, HoglibError):
            raise
        raise ArgumentValueError(
            f"{what}(batch): expected (loss, params, batch) for the first training batch, got "
            f"{error_text(error)}. It is called before the first step; mend it there."
        ) from error
    return [
        one._replace(name=f"{what}[{one.name}]" if one.name else what)
        for one in problems(f"{what}(batch)", made)
    ]
