"""An audit of second derivatives before the first step of a fit."""

from collections.abc import Sequence
from typing import Any, final

import lightning.pytorch as pl
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from hoglib._core.messages import validation
from hoglib._core.modules.swap import restore_buffers
from hoglib._core.runtime.source_location import error_text, warn
from hoglib.auditing.api import audit
from hoglib.auditing.problem import NamedProblem, parse_problems
from hoglib.auditing.routes import requested_routes
from hoglib.curvature.batches.data import gathered, to_device
from hoglib.errors import ArgumentTypeError, ArgumentValueError, HoglibError, VerificationError
from hoglib.verification.report import Report

METHOD = "second_order_problem"
EXAMPLE = f"""
    def {METHOD}(self, batch):
        loss = hoglib.functional_loss(self.net, torch.nn.functional.mse_loss)
        return loss, hoglib.trainable_params(self.net), batch  # or a loader
"""


class WrongSecondDerivative(VerificationError):
    """The fit was refused because of a wrong second derivative; the message names the culprit."""


@final
class SecondOrderAudit(pl.Callback):
    """Audit the second derivatives of a LightningModule on the first batch, before the first step.

        module.second_order_problem(batch) -> (loss, params, batch), or a list or dict of such tuples

    Each problem is passed to :func:`hoglib.audit`, and its report is printed. Of a ``DataLoader`` in
    place of ``batch`` the first batch is audited. If a report has failed,
    the fit is refused, or continues after a warning. The audit runs once in each fit, without
    autocast. It leaves random numbers, buffers and parameters unchanged, so the fit does not depend on
    it. In distributed training every process audits its own batch, and all raise if one has failed.

    Args:
        routes: The routes that must be right, as for :func:`hoglib.audit`: for instance "rr" or
            ["rr", "torch.func.hessian"]. Default: None, reverse-over-reverse.
        stand_ins: If True, audit the code inside :func:`hoglib.second_order`, as hoglib's penalties,
            products and learners run it; if False, torch as it is. Default: True.
        action: "refuse" raises if a second derivative is wrong, "warn" warns. Default: "refuse".
        verbose: Print the table of checks too. Default: False.
    Attributes:
        reports: The reports of the last fit.
    Raises:
        ArgumentTypeError: at the start of the fit, for a module without ``second_order_problem``; at
            the first batch, if the method returns anything else.
        ArgumentValueError: at the first batch, if ``second_order_problem`` raises.
        VerificationError: at the first batch, if a second derivative is wrong and ``action="refuse"``.
    Example:
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from hoglib.lightning import SecondOrderAudit
        >>> class Regression(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Linear(2, 1)
        ...     def second_order_problem(self, batch):
        ...         loss = hog.functional_loss(self.net, F.mse_loss)
        ...         return loss, hog.trainable_params(self.net), batch
        ...     def training_step(self, batch, batch_idx):
        ...         return F.mse_loss(self.net(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> trainer = Trainer(
        ...     callbacks=[SecondOrderAudit()], fast_dev_run=True, accelerator="cpu",
        ...     enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> data = torch.utils.data.TensorDataset(torch.randn(4, 2), torch.randn(4, 1))
        >>> trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=4))
        Regression.second_order_problem: right, by ... checks.
        <BLANKLINE>
    """

    def __init__(
        self,
        routes: Sequence[str] | None = None,
        stand_ins: bool = True,
        action: str = "refuse",
        verbose: bool = False,
    ) -> None:
        super().__init__()
        requested_routes(routes)  # raises for unknown names
        self.routes = routes
        self.stand_ins = validation.boolean("stand_ins", stand_ins)
        self.action = validation.choice("action", action, ("refuse", "warn"))
        self.verbose = validation.boolean("verbose", verbose)
        self.reports: tuple[Report, ...] = ()
        self._due = False  # whether this fit must still be audited

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the module declares a problem."""
        check_method(pl_module)
        self._due, self.reports = True, ()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Audit on the first batch."""
        if not self._due:
            return
        # once in each fit, even if the audit raises
        self._due = False
        error: Exception | None = None
        try:
            # the fit draws its random numbers as if there was no audit
            with isolate_rng():
                for one in second_order_problems(pl_module, batch):
                    data = one.batch
                    if isinstance(data, DataLoader):
                        data = to_device(next(iter(data)), pl_module.device)
                    options: Any = {"routes": self.routes, "stand_ins": self.stand_ins}
                    report = audit(one.loss, one.params, data, **options)
                    report.name = one.name
                    self.reports = (*self.reports, report)
        except Exception as caught:  # raised below, after all processes know
            error = caught
        why = "" if error is None else error_text(error)
        own = why, "\n\n".join(r.text(table=self.verbose) for r in self.reports if not r.ok)
        # gather before any process raises: all other processes would wait for it in the first step
        everywhere: list[tuple[str, str]] = gathered("SecondOrderAudit", own)
        if error is not None:
            raise error
        for report in self.reports:
            if report.ok or self.action == "warn":
                pl_module.print(report.text(table=self.verbose) + "\n")
        for rank, (why, wrong) in enumerate(everywhere):
            where = f" in process {rank}" if len(everywhere) > 1 else ""
            what = f"{type(pl_module).__name__}.{METHOD}{where}"
            if why:
                raise ArgumentValueError(f"{what}: {why}")
            if not wrong:
                continue
            message = f"{what}: expected right second derivatives, got these:\n\n{wrong}\n\n"
            if self.action == "warn":
                warn(f"{message}The training continues with them.")
            else:
                raise WrongSecondDerivative(
                    f"{message}No step was taken. Fix the modules that are named, or train with the "
                    "wrong derivatives: SecondOrderAudit(action='warn')."
                )


def check_method(module: pl.LightningModule) -> None:
    """Raises ArgumentTypeError, with an example, for a module without `second_order_problem`."""
    if not callable(getattr(module, METHOD, None)):
        raise ArgumentTypeError(
            f"{type(module).__name__}: expected a method {METHOD}(batch) that returns what is "
            f"differentiated twice, got none; add one, for instance\n{EXAMPLE}"
        )


def second_order_problems(module: pl.LightningModule, batch: Any) -> list[NamedProblem]:
    r"""Return the problems that a LightningModule declares for second derivatives.

        module.second_order_problem(batch) -> (loss, params, batch), or a list or dict of such tuples

    :class:`SecondOrderAudit` and :class:`CurvatureMonitor` work on them. In place of ``batch`` the
    method may return a loader of its own: the monitor takes the mean loss over all of it, the audit its
    first batch. The buffers of modules that run in the method are restored afterwards.

    Args:
        module: A LightningModule with a method ``second_order_problem(batch)``.
        batch: The argument of the method.
    Returns:
        A list of named tuples ``(name, loss, params, batch)``. The name is the module's class and
        method, with the key of the problem in brackets if there are several.
    Raises:
        ArgumentTypeError: for a module without the method, or a method that returns anything else.
        ArgumentValueError: if the method raises; the message holds its error.
    Example:
        >>> from lightning.pytorch import LightningModule
        >>> from hoglib.lightning import second_order_problems
        >>> class Regression(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Linear(2, 1)
        ...     def second_order_problem(self, batch):
        ...         loss = hog.functional_loss(self.net, F.mse_loss)
        ...         return loss, hog.trainable_params(self.net), batch
        >>> (problem,) = second_order_problems(Regression(), (torch.ones(3, 2), torch.ones(3, 1)))
        >>> problem.name, list(problem.params)
        ('Regression.second_order_problem', ['weight', 'bias'])
    """
    check_method(module)
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
            f"{error_text(error)}. It is called before the first step; correct it."
        ) from error
    found = parse_problems(f"{what}(batch)", made)
    return [one._replace(name=f"{what}[{one.name}]" if one.name else what) for one in found]
