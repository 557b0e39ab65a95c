"""`python -m experiments {fit,validate,test,verify,spectrum} --config configs/...`."""

import logging
import sys
import warnings
from collections.abc import Iterator
from errno import EACCES, EDQUOT, ENOENT, ENOSPC, ENOTDIR, EROFS
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from experiments import runs
from experiments.checkpoint import LastCheckpoint
from experiments.logs import RunLogger
from experiments.messages import cut
from experiments.progress import OneBar
from experiments.spectrum import Trainer
from hoglib._core.validation import at_least
from hoglib.errors import HoglibError
from hoglib.lightning import RNGState


class BadCommand(HoglibError):
    """A command line or config that cannot be read."""


class Parser(LightningArgumentParser):
    """jsonargparse with its account of an error cut to what the user wrote."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        known = [action.dest for action in self._actions if action.dest != "help"]
        raise BadCommand(cut(message, known)) from ex


class SaveConfig(SaveConfigCallback):
    """config.yaml beside the checkpoint, of the run that trained it."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class Experiments(LightningCLI):
    """LightningCLI that resumes into the run's own folder and ends a fit with its test."""

    trainer: Trainer

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        known = LightningCLI.subcommands()
        own = {name: known[name] for name in ("fit", "validate", "test")}
        given = {"model", "datamodule"}
        return {**own, "verify": given, "spectrum": given}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--num_threads",
            type=int | None,
            default=None,
            help="torch threads; 1 is best for small networks. Default: torch's own choice.",
        )
        parser.add_argument(
            "--checkpoint_every",
            type=int,
            default=1000,
            help="optimizer steps between two checkpoints.",
        )
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=True,
            help="whether a fit ends with the test, its table and its pictures.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        given = self.config[self.config["subcommand"]].get("ckpt_path")
        if given not in (None, "last"):
            runs.load(runs.find_checkpoint(given))  # Lightning reads it next, and less kindly

    def before_instantiate_classes(self) -> None:
        threads = self._get(self.config, "num_threads")
        if threads is not None:
            torch.set_num_threads(at_least("num_threads", threads, 1))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        settings = self._get(self.config_init, "trainer")
        every = at_least("checkpoint_every", self._get(self.config, "checkpoint_every"), 1)
        own: list[pl.Callback] = [RNGState(), LastCheckpoint(every)]
        if settings.get("enable_progress_bar") is not False:
            own.append(OneBar())
        settings["callbacks"] = [*own, *(settings.get("callbacks") or [])]
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError) as error:  # Lightning's own checks of its arguments
            raise BadCommand(f"trainer: {error}") from error

    def after_instantiate_classes(self) -> None:
        """A checkpoint continues, or is judged in, the run that it belongs to."""
        options = self.config_init[self.subcommand]
        # Checkpoints hold tensors and plain values only, so loading one never runs foreign code.
        options["weights_only"] = True
        if self.subcommand == "test":
            options["verbose"] = False  # the experiment prints its own table
        own = self.subcommand in ("fit", "verify")  # these start without a checkpoint
        chosen = options.get("ckpt_path") or (None if own else "last")
        if chosen is None:
            return
        logger = self.trainer.logger
        newest = isinstance(logger, RunLogger) and chosen == "last"
        where = Path(logger.save_dir or "") / str(logger.name) if newest else chosen  # type: ignore[union-attr]
        checkpoint = runs.find_checkpoint(where)
        content = runs.load(checkpoint)
        options["ckpt_path"] = str(checkpoint)
        folder = runs.version_folder(checkpoint)
        if isinstance(logger, RunLogger) and folder is not None:
            fitting = self.subcommand == "fit"
            logger.resume(folder, runs.logged_steps(content) if fitting else None)

    def after_fit(self) -> None:
        if self._get(self.config, "test_after_fit"):
            self.trainer.test(self.model, self.datamodule, verbose=False)
        else:
            print(f"Saved {runs.run_folder(self.trainer) / runs.LAST}")


def quiet() -> None:
    """Silence what a user can do nothing about."""
    # Lightning 2.6 asks torch for a class that torch has renamed.
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    # The advertisement of a service at every start, and a default that is the right one here.
    for name in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector"):
        logging.getLogger(f"lightning.pytorch.{name}").addFilter(
            lambda record: (
                not any(text in str(record.msg) for text in ("Tip:", "`weights_only` was"))
            )
        )
    # main(args) is called from Python in tests, whose own command line has arguments too.
    warnings.filterwarnings("ignore", ".*LightningCLI's args parameter.*")
    # The streams of tasks are computed, not read: worker processes would only cost time.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def main(args: list[str] | None = None) -> int:
    """Run a command; the exit status is 0, 2 for an error of the user's, 130 after Ctrl-C; of verify
    also 1, where a derivative is wrong."""
    quiet()
    try:
        command = Experiments(
            args=args,
            trainer_class=Trainer,
            parser_class=Parser,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
        )
    except SystemExit as error:
        # Lightning ends a run that Ctrl-C stopped with status 1.
        if any(isinstance(cause, KeyboardInterrupt) for cause in chain(error)):
            return 130
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # jsonargparse wraps what a constructor raises; the explanation is further down.
        for cause in chain(error):
            if isinstance(cause, HoglibError | MisconfigurationException):
                print(f"\nerror: {cause}", file=sys.stderr)
                return 2
            if isinstance(cause, OSError) and cause.errno in (
                ENOSPC,
                EDQUOT,
                EACCES,
                EROFS,
                ENOENT,
                ENOTDIR,
            ):
                print(
                    f"\nerror: expected to write in the run's folder, got {cause}; the last checkpoint "
                    f"there is intact. Free some space, or choose another folder with "
                    f"--trainer.logger.save_dir.",
                    file=sys.stderr,
                )
                return 2
        raise
    return command.trainer.status


if __name__ == "__main__":
    sys.exit(main())
