"""The spectrum of the Hessian, measured while a fit goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, distributed

from hoglib._core import pytree, validation
from hoglib.curvature.density import SpectralDensity
from hoglib.curvature.spectrum import Spectrum, spectrum_of
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NondeterministicError,
    NonFiniteError,
)
from hoglib.lightning.audit import METHOD, check_method, problems_of
from hoglib.penalties.critic_context import restore_buffers

LARGEST = "largest"
PLAIN = (bool, int, float, str, type(None))  # what a checkpoint may hold beside tensors
QUIET = f"""
    def {METHOD}(self, batch):
        quiet = copy.deepcopy(self.net).eval()  # the parameters below take the place of its own
        loss = hoglib.functional_loss(quiet, torch.nn.functional.mse_loss)
        return loss, hoglib.trainable_params(self.net), batch
"""


class Measurement(NamedTuple):
    """The spectrum of one problem's Hessian at the parameters after so many batches."""

    batch: int  # training batches that were gone through
    name: str  # of the problem, where the module has several; "" for its only one
    spectrum: Spectrum

    def values(self) -> dict[str, float]:
        """What is logged of it, by name."""
        where = f"curvature[{self.name}]" if self.name else "curvature"
        trace, error = self.spectrum.trace
        of = {
            LARGEST: float(self.spectrum.largest[-1]), "smallest": float(self.spectrum.smallest[0]),
            "trace": trace, "trace_error": error,
        }  # fmt: skip
        return {f"{where}/{name}": value for name, value in of.items()}


class CurvatureMonitor(pl.Callback):
    """Measures the spectrum of the Hessian at the start, after every so many batches, at the end.

        H = d^2 loss(params, batch) / d params^2        at the parameters of that moment

    The module says what is differentiated: `second_order_problem(batch)` returns (loss, params,
    batch), or a list of such tuples, or a dict of them by name, as for SecondOrderAudit. The
    loggers get curvature/largest and curvature/smallest (eigenvalues, not their magnitudes),
    curvature/trace and curvature/trace_error (one standard error), with curvature[name]/... where
    problems have names, at each measurement, whatever log_every_n_steps is; the progress bar and
    callback_metrics get the largest, for EarlyStopping to watch. `history` holds every
    `Measurement`, with the k eigenvalues of each end and the density.

    every: training batches from one measurement to the next. k: eigenvalues of each end.
    num_samples, steps: random vectors of density and trace, and Lanczos steps of each, a product
    each. fixed_batch: whether all measurements are on the first batch of the fit, which
    checkpoints then hold, or each on the batch just trained on. stand_ins: as in
    `HessianOperator`. max_iter: as in `eigsh`; where it does not converge, a warning says so, and
    the ends are taken from the density. seed: of the random vectors, with the number of the
    batch.

    The fit is the one that it would be without the callback: the global random numbers,
    parameters, buffers, gradients and modes stay as they were; and a resumed fit has the history
    of one that was not interrupted. Of several processes each adds its own batch: H is that of
    the mean loss. Autocast is off here. Time: a measurement is num_samples * steps products, and
    some 20 or more for the ends, of about two gradients each.
    Raises TypeError, at the start of the fit, for a module without the method; at the first
    batch, ValueError for more eigenvalues than there are; FloatingPointError for a loss that is
    not finite; RuntimeError for one that draws at random, as with dropout; ValueError for a
    checkpoint whose batch has another structure, or that is of another number of processes.
    """

    def __init__(
        self,
        every: int = 100,
        k: int = 1,
        num_samples: int = 5,
        steps: int = 40,
        fixed_batch: bool = True,
        stand_ins: bool = True,
        max_iter: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.every = validation.at_least("every", every, 1)
        self.k = validation.at_least("k", k, 1)
        self.num_samples = validation.at_least("num_samples", num_samples, 1)
        self.steps = validation.at_least("steps", steps, 1)
        self.fixed_batch = validation.flag("fixed_batch", fixed_batch)
        self.stand_ins = validation.flag("stand_ins", stand_ins)
        self.max_iter = validation.at_least("max_iter", max_iter, 1)
        self.seed = validation.at_least("seed", seed, 0)
        self.history: list[Measurement] = []
        self._saved: _Saved | None = None
        self._batch: Any = None
        self._starts = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_method(pl_module)
        self._starts, self._batch = True, None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        done = _batches(trainer) - 1  # the one that starts is counted already
        if self._starts:
            self._start(done, batch)
        # Lightning's count for the loggers has only now come to what was measured after a batch
        if done % self.every == 0:
            if not self._measured(done):
                self._measure(pl_module, done, batch)
            self._log(trainer, pl_module, done)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any,
        batch_idx: int,
    ) -> None:  # fmt: skip
        """Measures here, before the checkpoints of this batch are written, so that they hold it."""
        if not self.fixed_batch:
            self._batch = batch
        if _batches(trainer) % self.every == 0:
            self._measure(pl_module, _batches(trainer), batch)
            self._show(pl_module, _batches(trainer))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._batch is None:
            return  # there was nothing to train on
        done = _batches(trainer)
        if not self._measured(done):
            self._measure(pl_module, done, self._batch)
        self._log(trainer, pl_module, done, shown=False)

    def state_dict(self) -> dict[str, Any]:
        history = [_packed(one) for one in self.history]
        saved = None if self._saved is None else self._saved._asdict()
        return {"history": history, "batch": saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = [_unpacked(one) for one in state_dict["history"]]
        saved = state_dict["batch"]
        self._saved = None if saved is None else _Saved(**saved)

    def _start(self, done: int, batch: Any) -> None:
        self._starts = False
        if done == 0:  # a fit of its own
            self.history, self._saved = [], None
        # The end of a fit that goes on now is none, unless a measurement is due there.
        self.history = [one for one in self.history if one.batch < done + (done % self.every == 0)]
        if not self.fixed_batch:
            self._batch = batch
            return
        if self._saved is None:
            self._saved = _saved(batch)
        self._batch = _restored(self._saved, batch)

    def _measured(self, done: int) -> bool:
        return bool(self.history) and self.history[-1].batch == done

    def _measure(self, module: pl.LightningModule, done: int, batch: Any) -> None:
        own = f"{type(module).__name__}.{METHOD}"
        generator = torch.Generator()
        seed = (self.seed * 2**20 + done) % 2**32  # of a larger one torch takes the lower bits
        processes = "sharded" if _world() > 1 else None
        found = []
        with isolate_rng(), restore_buffers(), torch.enable_grad(), _explained(own, done):
            batch = self._batch if self.fixed_batch else batch
            for name, loss, params, given in problems_of(module, batch):
                spectrum = spectrum_of(
                    loss, params, given, self.k, self.num_samples, self.steps, self.stand_ins,
                    generator=generator.manual_seed(seed),
                    processes=processes, max_iter=self.max_iter,
                )  # fmt: skip
                short = name.removeprefix(own).removeprefix("[").removesuffix("]")
                found.append(Measurement(done, short, spectrum))
        self.history += found  # of all problems, or of none

    def _at(self, done: int) -> Iterator[Measurement]:
        return (one for one in self.history if one.batch == done)

    def _show(self, module: pl.LightningModule, done: int) -> None:
        """The largest to the progress bar and callback_metrics."""
        for one in self._at(done):
            for name, value in one.values().items():
                if name.endswith(f"/{LARGEST}"):
                    module.log(
                        name, value, prog_bar=True, logger=False, on_step=True, on_epoch=False
                    )

    def _log(
        self, trainer: pl.Trainer, module: pl.LightningModule, done: int, shown: bool = True
    ) -> None:
        if shown:
            self._show(module, done)
        values = {name: value for one in self._at(done) for name, value in one.values().items()}
        if values and trainer.is_global_zero:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics(values, step)


def _batches(trainer: pl.Trainer) -> int:
    """The batches of all epochs up to the one in progress, or that has just ended."""
    return trainer.fit_loop.epoch_loop.total_batch_idx + 1


def _world() -> int:
    there = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if there else 1


@contextmanager
def _explained(what: str, done: int) -> Iterator[None]:
    """Errors of a measurement say that they are of one, and what to do."""
    try:
        yield
    except NondeterministicError as error:
        raise NondeterministicError(
            f"CurvatureMonitor, {what} after {done} batches: expected a loss that is the same at "
            f"each call, got one that is not ({error}) Measure a copy of the network in eval mode, for "
            f"instance\n{QUIET}"
        ) from error
    except NonFiniteError as error:
        raise NonFiniteError(
            f"CurvatureMonitor, {what} after {done} batches: {error} The training has diverged, or "
            "starts from there: lower its learning rate."
        ) from error


class _Saved(NamedTuple):
    """A batch as checkpoints hold it: no classes of anybody's, and that of every process."""

    paths: list[str]
    leaves: list[list[Any]]


def _saved(batch: Any) -> _Saved:
    own = [
        leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in pytree.leaves(batch)
    ]
    for path, leaf in zip(pytree.paths(batch), own, strict=True):
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise ArgumentTypeError(
                f"CurvatureMonitor: expected a batch of tensors and plain values, which "
                f"checkpoints can hold, got {validation.describe(leaf)} at batch{path and f' {path}'}; "
                "give fixed_batch=False, or let the loader return a tuple or dict of tensors."
            )
    every: list[Any] = [own]
    if _world() > 1:  # now, where all are here; a checkpoint is the work of one
        every = [None] * _world()
        cpu = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in own]
        distributed.all_gather_object(every, cpu)
    return _Saved(pytree.paths(batch), every)


def _restored(saved: _Saved, like: Any) -> Any:
    """This process's part, in the structure and on the devices of a batch."""
    now, structure = pytree.flatten(like)
    paths = pytree.paths(like)
    if paths != saved.paths:
        raise ArgumentValueError(
            f"CurvatureMonitor: expected batches like the first one of the fit, which the "
            f"checkpoint holds, with tensors at {_named(saved.paths)}, got one with "
            f"{_named(paths)}; resume with the data of that fit, or with fixed_batch=False."
        )
    if len(saved.leaves) != _world():
        raise ArgumentValueError(
            f"CurvatureMonitor: expected {len(saved.leaves)} processes, as in the fit of the "
            f"checkpoint, each of which had a first batch, got {_world()}; resume with as many, or "
            "with fixed_batch=False."
        )
    rank = distributed.get_rank() if _world() > 1 else 0
    return pytree.unflatten(
        [
            was.to(leaf.device) if isinstance(was, Tensor) and isinstance(leaf, Tensor) else was
            for was, leaf in zip(saved.leaves[rank], now, strict=True)
        ],
        structure,
    )


def _named(paths: list[str]) -> str:
    return ", ".join(path or "the batch itself" for path in paths) or "nothing"


def _packed(one: Measurement) -> dict[str, Any]:
    """Of tensors and plain values."""
    spectrum = one.spectrum._asdict()
    return {**one._asdict(), "spectrum": {**spectrum, "density": one.spectrum.density._asdict()}}


def _unpacked(packed: dict[str, Any]) -> Measurement:
    spectrum = packed["spectrum"]
    density = SpectralDensity(**spectrum["density"])
    return Measurement(**{**packed, "spectrum": Spectrum(**{**spectrum, "density": density})})
