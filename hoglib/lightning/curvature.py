"""The spectrum of the Hessian, measured during a fit."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import ceil, isfinite
from time import monotonic
from typing import Any, NamedTuple, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, distributed

from hoglib import errors, plotting
from hoglib._core.messages import results, validation
from hoglib._core.messages.communication import is_sharded
from hoglib._core.modules.swap import restore_buffers
from hoglib._core.runtime.source_location import warn
from hoglib._core.torch_api import pytree
from hoglib.curvature import Spectrum, critical_sharpness, hessian_spectrum
from hoglib.curvature.algebra.estimates import SpectralDensity
from hoglib.curvature.batches.data import as_one_batch, gathered, world_size
from hoglib.curvature.sums.watchers import ALLOW
from hoglib.lightning.audit import METHOD, check_method, second_order_problems

PLAIN = (bool, int, float, str, type(None))  # types that a checkpoint may hold besides tensors
# an example for the error message about a loss that draws random numbers
QUIET = f"""
    def {METHOD}(self, batch):
        quiet = copy.deepcopy(self.net).eval()  # its own parameters are replaced by those below
        loss = hoglib.functional_loss(quiet, torch.nn.functional.mse_loss)
        return loss, hoglib.trainable_params(self.net), batch
"""


@results.result
class Measurement(NamedTuple):
    """One measurement of :class:`CurvatureMonitor`.

    Attributes:
        batch: Number of training batches before the measurement.
        name: Name of the problem, if the module declares several; "" for a single problem.
        spectrum: Spectrum of the Hessian, a :class:`hoglib.curvature.Spectrum`.
        edge: The largest eigenvalue times the learning rate, scaled so that gradient descent becomes
            unstable at 2; None for other optimizers than SGD.
        critical: The critical sharpness along the gradient; None if not asked for, or not found.
    """

    batch: int
    name: str
    spectrum: Spectrum
    edge: float | None = None
    critical: float | None = None

    def values(self) -> dict[str, float]:
        """Return the logged values by name."""
        trace, error = self.spectrum.trace
        of = {
            "largest": float(self.spectrum.largest[-1]), "smallest": float(self.spectrum.smallest[0]),
            "trace": trace, "trace_error": error, "edge": self.edge, "critical": self.critical,
        }  # fmt: skip
        return {self.metric(name): value for name, value in of.items() if value is not None}

    def metric(self, name: str) -> str:
        """Return the name of a value in the loggers.

        Args:
            name: Name of the value, such as "largest".
        """
        return f"curvature[{self.name}]/{name}" if self.name else f"curvature/{name}"


@final
class CurvatureMonitor(pl.Callback):
    """Measure the spectrum of the Hessian at the start, every so many batches or epochs, and at the end
    of a fit.

        H = d^2 loss(params, batch) / d params^2        at the parameters of that moment
        module.second_order_problem(batch) -> (loss, params, batch), or a list or dict of such tuples

    In place of ``batch`` the method may return a loader of its own, not the trainer's, or a list of
    batches: H is then the Hessian of the mean loss over all of them, in distributed training over the
    parts that the processes return.

    The loggers get ``curvature/largest`` and ``curvature/smallest`` (the extreme eigenvalues),
    ``curvature/trace`` and ``curvature/trace_error`` (one standard error) at each measurement, whatever
    ``log_every_n_steps`` is; for named problems ``curvature[name]/...``. The progress bar and
    ``callback_metrics`` get the largest eigenvalue, which ``EarlyStopping`` can monitor.

    For `torch.optim.SGD` with one learning rate, ``curvature/edge`` is the learning rate times the
    largest eigenvalue: beyond 2, the edge of stability, steps diverge on a quadratic loss. With weight
    decay w and momentum b it is ``lr (largest + w) / (1 + b)``, and for Nesterov momentum (1 + 2 b)
    times as much. Adaptive optimizers and several learning rates have no such product, and log none.

    The fit does not depend on the callback: random numbers, parameters, buffers, gradients and modes
    are left unchanged. A resumed fit has the history of an uninterrupted one. In distributed training
    (also under ``ModelParallelStrategy``, with DTensors as parameters) H is the Hessian of the mean
    loss over the batches of all processes. Autocast is off. A measurement takes ``num_samples * steps``
    products with H, and some 20 or more for the extreme eigenvalues, of about two gradients each.

    Args:
        every: Training batches between measurements. Default: 100, without ``every_n_epochs``.
        every_n_epochs: Epochs between measurements, each after the last batch of an epoch, as for
            Lightning's ``ModelCheckpoint``; instead of ``every``.
        k: Number of eigenvalues at each end of the spectrum. Default: 1.
        num_samples: Random vectors for the density and the trace. Default: 5.
        steps: Lanczos steps for each random vector. Default: 40.
        fixed_batch: If True, every measurement uses the first batch of the fit, and checkpoints hold
            it; if False, the batch just trained on. Default: True.
        stand_ins: Whether to use hoglib's stand-ins for torch calls without a right second derivative,
            as :class:`hoglib.HessianOperator` does. Default: True.
        max_iter: Restarts of the eigenvalue solver. If it does not converge, there is a warning, and
            the extreme eigenvalues are taken from the density. Default: 100.
        seed: Seed of the random vectors, together with the number of the batch. Default: 0.
        critical: Whether to log ``curvature/critical``, the `hoglib.critical_sharpness` along the
            gradient; it takes a gradient and some evaluations of the loss. Default: False.
        max_seconds: Limit of the time of a measurement, on average over the interval. After a
            measurement of n times the limit, the next ones are n times as far apart, and there is a
            warning once. A resumed fit may then measure at other batches than an uninterrupted one.
            Default: no limit.
        images: Whether to send the picture of each spectrum, ``curvature/spectrum``, to loggers that
            take images, such as TensorBoard and W&B; needs matplotlib. Default: False.
    Attributes:
        history: Every :class:`Measurement`, with the k eigenvalues of each end and the density.
    Raises:
        ArgumentTypeError: at the start of the fit, for a module without ``second_order_problem``.
        ArgumentValueError: for both ``every`` and ``every_n_epochs``;
            at the first batch, if k is larger than the number of eigenvalues; or for a
            checkpoint with a batch of another structure, or from another number of processes.
        NonFiniteError: for a loss that is not finite.
        NondeterministicError: for a loss that draws random numbers, such as one with dropout.
    Example:
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from hoglib.lightning import CurvatureMonitor
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
        >>> monitor = CurvatureMonitor(every=1, num_samples=2, steps=3)
        >>> trainer = Trainer(
        ...     callbacks=[monitor], fast_dev_run=2, accelerator="cpu",
        ...     enable_progress_bar=False, enable_model_summary=False,
        ... )
        >>> data = torch.utils.data.TensorDataset(torch.eye(2).repeat(2, 1), torch.ones(4, 1))
        >>> trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=2))
        >>> [(one.batch, one.spectrum.largest.round(decimals=3)) for one in monitor.history]
        [(0, tensor([3.])), (1, tensor([3.])), (2, tensor([3.]))]
    """

    @validation.explain_arguments
    def __init__(
        self,
        every: int | None = None,
        k: int = 1,
        num_samples: int = 5,
        steps: int = 40,
        fixed_batch: bool = True,
        stand_ins: bool = True,
        max_iter: int = 100,
        seed: int = 0,
        critical: bool = False,
        max_seconds: float | None = None,
        images: bool = False,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__()
        if every is not None and every_n_epochs is not None:
            raise errors.ArgumentValueError(
                f"every_n_epochs: expected either every or every_n_epochs, got every={every} and "
                f"every_n_epochs={every_n_epochs}; leave one out."
            )
        self.every_n_epochs = validation.none_or_at_least("every_n_epochs", every_n_epochs, 1)
        self.every = validation.at_least("every", 100 if every is None else every, 1)
        self._spectrum_options: dict[str, Any] = {  # of hessian_spectrum
            "k": validation.at_least("k", k, 1),
            "num_samples": validation.at_least("num_samples", num_samples, 1),
            "steps": validation.at_least("steps", steps, 1),
            "max_iter": validation.at_least("max_iter", max_iter, 1),
        }
        self.fixed_batch = validation.boolean("fixed_batch", fixed_batch)
        self.stand_ins = validation.boolean("stand_ins", stand_ins)
        self.seed = validation.at_least("seed", seed, 0)
        self.critical = validation.boolean("critical", critical)
        self.max_seconds = None
        if max_seconds is not None:
            self.max_seconds = validation.number("max_seconds", max_seconds, minimum=1e-9)
        self.images = validation.boolean("images", images)
        self._rarer = 1  # measurements are this many times the interval apart
        self.history: list[Measurement] = []
        self._saved: dict[str, Any] | None = None  # the fixed batch, in the form for checkpoints
        self._batch: Any = None  # the batch to measure; None before the fit has begun

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the module declares a problem."""
        check_method(pl_module)
        if self.images:
            plotting.load_pyplot("CurvatureMonitor(images=True)")
        self._batch = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure at the start of the fit, and log the measurement made after the last batch."""
        done = _batches(trainer) - 1  # Lightning has already counted the batch that starts
        due = self._due(done, batch_idx == 0, trainer.current_epoch)
        if self._batch is None:
            self._start(done, batch, due)
        # log now: only here has Lightning's step count reached the batch of the measurement
        if due:
            self._measure(pl_module, done, batch)
            self._show(pl_module, done)
            self._log(trainer, done)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Measure before the checkpoints of this batch are written, so that they hold the
        measurement."""
        if not self.fixed_batch:
            self._batch = batch
        done = _batches(trainer)
        if self._due(done, trainer.is_last_batch, trainer.current_epoch + 1):
            self._measure(pl_module, done, batch)
            self._show(pl_module, done)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure at the end of the fit."""
        if self._batch is None:
            return  # the fit had no batch
        done = _batches(trainer)
        self._measure(pl_module, done, self._batch)
        self._log(trainer, done)

    def plot(self, ax: Any = None) -> Any:
        """Draw the largest eigenvalue by batch, one line for each problem.

        For a single problem also the smallest eigenvalue, and the critical sharpness if it was asked
        for. Rings mark measurements beyond the edge of stability.

        Args:
            ax: Axes of matplotlib. Default: axes of a new figure of pyplot.
        Returns:
            The axes.
        Raises:
            MissingDependencyError: if matplotlib is not installed.
        """
        return plotting.history(self.history, ax)

    def state_dict(self) -> dict[str, Any]:
        """The history and the fixed batch, for checkpoints."""
        history = [_pack(one) for one in self.history]
        return {"history": history, "batch": self._saved, "rarer": self._rarer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the history and the fixed batch."""
        self.history = [_unpack(one) for one in state_dict["history"]]
        self._rarer = state_dict.get("rarer", 1) if self.max_seconds else 1
        self._saved = state_dict["batch"]

    def _start(self, done: int, batch: Any, due: bool) -> None:
        """Set the history and the batch at the first batch of a fit, resumed or not. due: whether a
        measurement is due before this batch."""
        if done == 0:  # not a resumed fit
            self.history, self._saved, self._rarer = [], None, 1
        # drop the measurement at the end of the interrupted fit, unless this batch is due for one
        self.history = [one for one in self.history if one.batch < done + due]
        if not self.fixed_batch:
            self._batch = batch
            return
        if self._saved is None:
            self._saved = _saved(batch)
        self._batch = _restore_batch(self._saved, batch)

    def _due(self, done: int, between_epochs: bool, epochs: int) -> bool:
        """Whether a measurement is due after this many batches, which are so many whole epochs if
        `between_epochs`."""
        if self.every_n_epochs is None:
            return done % (self.every * self._rarer) == 0
        return between_epochs and epochs % (self.every_n_epochs * self._rarer) == 0

    def _slow_down(self, seconds: float) -> None:
        """Measure less often after a measurement above the time limit, in any process."""
        slowest = max(gathered("CurvatureMonitor", seconds)) if self.max_seconds else 0
        times = ceil(slowest / self.max_seconds) if self.max_seconds else 1
        if times > self._rarer:
            if self._rarer == 1:
                apart = f"{times * (self.every_n_epochs or self.every)} "
                apart += "epochs" if self.every_n_epochs else "batches"
                warn(
                    f"CurvatureMonitor: expected measurements of at most {self.max_seconds:g} seconds, "
                    f"got one of {seconds:.3g}: the next ones are {apart} apart. "
                    "Fewer num_samples and steps take less time."
                )
            self._rarer = times

    def _measure(self, module: pl.LightningModule, done: int, batch: Any) -> None:
        if self.history and self.history[-1].batch == done:
            return  # measured already
        when = f"CurvatureMonitor, {type(module).__name__}.{METHOD} after {done} batches"
        began = monotonic()
        try:
            # leave random numbers and buffers of the fit unchanged
            with isolate_rng(), restore_buffers(), torch.enable_grad():
                problems = second_order_problems(module, self._batch if self.fixed_batch else batch)
                found = [self._measure_problem(module, done, *problem) for problem in problems]
        except errors.NondeterministicError as error:
            cause = str(error).replace(ALLOW, "")  # an option that the monitor does not have
            raise errors.NondeterministicError(
                f"{when}: expected a loss that is the same at each call, got one that is not ({cause}) "
                f"Measure a copy of the network in eval mode, for instance\n{QUIET}"
            ) from error
        except errors.NonFiniteError as error:
            raise errors.NonFiniteError(
                f"{when}: {error} The training has diverged, or its first loss is not finite: lower "
                "the learning rate, or look at the initial parameters."
            ) from error
        self.history += found  # all problems or none
        self._slow_down(monotonic() - began)

    def _measure_problem(
        self, module: pl.LightningModule, done: int, name: str, loss: Any, params: Any, batch: Any
    ) -> Measurement:
        # DTensors combine the processes already
        shared = any(map(is_sharded, pytree.leaves(params)))
        alone, batch = shared or world_size() == 1, as_one_batch(batch)
        options: Any = {"stand_ins": self.stand_ins, "processes": None if alone else "sharded"}
        # seeded by the batch, so that a resumed fit measures with the same vectors
        seed = (self.seed * 2**20 + done) % 2**32  # torch uses only the lower bits of a larger seed
        spectrum = hessian_spectrum(
            loss,
            params,
            batch,
            generator=torch.Generator().manual_seed(seed),
            **self._spectrum_options,
            **options,
        )
        critical = None
        if self.critical:
            with suppress(errors.ArgumentValueError):  # the gradient is zero
                step = critical_sharpness(loss, params, batch, **options)
                critical = step.value if isfinite(step.value) else None
        edge = _times_learning_rate(module.trainer, params, float(spectrum.largest[-1]))
        _, _, key = name.partition("[")
        return Measurement(done, key.removesuffix("]"), spectrum, edge, critical)

    def _at(self, done: int) -> Iterator[Measurement]:
        return (one for one in self.history if one.batch == done)

    def _show(self, module: pl.LightningModule, done: int) -> None:
        """Log the largest eigenvalue to the progress bar and callback_metrics."""
        for one in self._at(done):
            # the first value is the largest eigenvalue
            name, value = next(iter(one.values().items()))
            module.log(name, value, prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def _log(self, trainer: pl.Trainer, done: int) -> None:
        values = {name: value for one in self._at(done) for name, value in one.values().items()}
        if values and trainer.is_global_zero:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics(values, step)
                for one in self._at(done) if self.images else ():
                    log_image(logger, one.metric("spectrum"), partial(_draw, one.spectrum), step)


def _draw(spectrum: Spectrum) -> Any:
    return plotting.draw_pixels(spectrum.plot())


def log_image(logger: Any, name: str, draw: Callable[[], Any], step: int) -> None:
    """Draw an image, uint8 [height, width, 3], if the logger takes images, as for TensorBoard and
    W&B."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(name, draw(), step, dataformats="HWC")
    elif hasattr(logger, "log_image"):
        logger.log_image(name, [draw()], step)


def _times_learning_rate(trainer: pl.Trainer, params: Any, largest: float) -> float | None:
    """The largest eigenvalue times the learning rate; gradient descent becomes unstable at 2. None for
    parameters with another optimizer, or with several learning rates."""
    left, found = {id(p) for p in pytree.leaves(params)}, set()
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            own = left & {id(p) for p in group["params"]}
            left -= own
            if own and type(optimizer) is torch.optim.SGD and not group["maximize"]:
                # with momentum b, steps diverge beyond lr (largest + w) = 2 (1 + b), and for
                # Nesterov momentum beyond 2 (1 + b) / (1 + 2 b)
                b, damped = group["momentum"], 1 - group["dampening"] * bool(group["momentum"])
                factor = (1 + 2 * b * group["nesterov"]) / (1 + b) * damped
                found.add(float(group["lr"]) * (largest + group["weight_decay"]) * factor)
            elif own:
                return None
    return found.pop() if len(found) == 1 and not left else None


def _batches(trainer: pl.Trainer) -> int:
    """The number of batches in all epochs, including the one in progress or just ended."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def _saved(batch: Any) -> dict[str, Any]:
    """The paths of a batch and, for every process, its leaves: tensors and plain values."""
    leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in pytree.leaves(batch)]
    for path, leaf in zip(pytree.paths(batch), leaves, strict=True):
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise errors.ArgumentTypeError(
                f"CurvatureMonitor: expected a batch of tensors and plain values, which "
                f"checkpoints can hold, got {validation.describe(leaf)} at batch{path and f' {path}'}; "
                "give fixed_batch=False, or let the loader return a tuple or dict of tensors."
            )
    if world_size() > 1:  # gathered now, because a single process writes the checkpoint
        leaves = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return {"paths": pytree.paths(batch), "leaves": gathered("CurvatureMonitor", leaves)}


def _restore_batch(saved: dict[str, Any], like: Any) -> Any:
    """The saved batch of this process, with the structure and devices of another batch."""
    now, structure = pytree.flatten(like)
    paths = pytree.paths(like)
    if paths != saved["paths"]:
        raise errors.ArgumentValueError(
            f"CurvatureMonitor: expected batches like the first one of the fit, which the "
            f"checkpoint holds, with tensors at {_format_paths(saved['paths'])}, got one with "
            f"{_format_paths(paths)}; resume with the data of that fit, or with fixed_batch=False."
        )
    if len(saved["leaves"]) != world_size():
        raise errors.ArgumentValueError(
            f"CurvatureMonitor: expected {len(saved['leaves'])} processes, as in the fit of the "
            f"checkpoint, each of which had a first batch, got {world_size()}; resume with as many, or "
            "with fixed_batch=False."
        )
    rank = distributed.get_rank() if world_size() > 1 else 0
    leaves = [
        was.to(leaf.device) if isinstance(was, Tensor) and isinstance(leaf, Tensor) else was
        for was, leaf in zip(saved["leaves"][rank], now, strict=True)
    ]
    return pytree.unflatten(leaves, structure)


def _format_paths(paths: list[str]) -> str:
    return ", ".join(path or "the batch itself" for path in paths) or "nothing"


def _pack(one: Measurement) -> dict[str, Any]:
    """A measurement as tensors and plain values."""
    spectrum = one.spectrum._asdict()
    return {**one._asdict(), "spectrum": {**spectrum, "density": one.spectrum.density._asdict()}}


def _unpack(packed: dict[str, Any]) -> Measurement:
    spectrum = packed["spectrum"]
    density = SpectralDensity(**spectrum["density"])
    return Measurement(**{**packed, "spectrum": Spectrum(**{**spectrum, "density": density})})
