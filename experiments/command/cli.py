"""The command ``python -m experiments``: LightningCLI with readable errors and exact resumption."""

import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import yaml  # type: ignore[import-untyped] # comes with jsonargparse, its stubs do not
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger

from experiments import runs
from experiments.checks import at_least
from experiments.command import options
from experiments.command.checkpoint import LastCheckpoint
from experiments.command.errors import CommandError, causes, user_error
from experiments.command.messages import shorten_parser_error
from experiments.command.progress import FitAndTestBar
from experiments.command.trainer import Trainer
from experiments.configs import with_full_configs
from experiments.logs import PictureLogger, RunLogger
from experiments.shared import processes
from hoglib.lightning import RNGState

DESCRIPTION = (
    "Runs the experiments. `python -m experiments list` lists the configs with the minutes each "
    "takes; `python -m experiments fit --config configs/maml/sinusoid.yaml` trains one into runs/; "
    "`test` in place of `fit` tests it. `fit --help` lists the options."
)
# of verify and spectrum: by the CLI, not by options of their own
FILLED_IN = {"model", "datamodule"}


def main(args: list[str] | None = None) -> int:
    """Run a command.

    Args:
        args: The words after ``python -m experiments``. Default: those of the process.
    Returns:
        The exit status: 0; 1 where ``verify`` found a wrong derivative; 2 for an error of the user's;
        129, 130, 143 after SIGHUP, Ctrl-C, SIGTERM.
    Raises:
        BrokenPipeError: Where the reader of its output has ended.
    """
    silence_dependencies()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal is no reason to end a run
    with runs.handled_by(stop, runs.signals_that_end()[1:]), runs.LOCKS:
        return run(sys.argv[1:] if args is None else args)


def run(args: list[str]) -> int:
    """Run a command; its exit status."""
    try:
        words = options.with_saved_config(with_full_configs(args))
        command = with_one_command(words)(
            args=words,
            trainer_class=Trainer,
            parser_class=Parser,
            parser_kwargs={"description": DESCRIPTION},
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
        )
    except (SystemExit, KeyboardInterrupt) as error:
        # Lightning ends a run that a signal stopped with status 1.
        for cause in causes(error):
            if isinstance(cause, KeyboardInterrupt):
                return 128 + (*cause.args, signal.SIGINT)[0]
        raise
    except Exception as error:
        if any(isinstance(cause, BrokenPipeError) for cause in causes(error)):
            raise BrokenPipeError from error
        message = user_error(error)
        if message is None:
            raise
        if message != processes.LOST or processes.tells_of_lost_process():
            print(f"\nerror: {message}", file=sys.stderr)
        if message == processes.LOST:
            # threads that still wait for that process would abort an exit
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)
        return 2
    processes.leave_processes()
    return command.trainer.status


class Parser(LightningArgumentParser):
    """A parser whose errors are one paragraph, and whose options have their whole names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse_path(path, *args, **kwargs)
        except CommandError as error:
            raise CommandError(str(error).replace("<unicode string>", str(path))) from error
        except UnicodeDecodeError as error:
            raise CommandError(f"config: {path} is no text: {error}") from error

    def parse_string(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with suppress(yaml.YAMLError):  # which is told by the parser
                options.check_keys(yaml.compose([*args, *kwargs.values()][0]))
        except RecursionError as error:
            raise CommandError("config: expected no part that holds itself, got one.") from error
        return super().parse_string(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        commands = [a.choices.values() for a in self._actions if isinstance(a.choices, dict)]
        parsers = [self, *(parser for choices in commands for parser in choices)]
        known = [a.dest for parser in parsers for a in parser._actions if a.dest != "help"]
        raise CommandError(shorten_parser_error(message, known)) from ex


class SaveConfig(SaveConfigCallback):
    """Saves config.yaml beside the checkpoint of the run that trains it, in ``fit`` only, and once the
    checkpoint that it resumes has been loaded: a refused one leaves the run's own config."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pass

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:  # those of torchrun each have a command line
            every: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(every, self._trained)
            options.check_same(every)
        super().setup(trainer, pl_module, "fit")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[runs.CONFIG] = self._trained

    @cached_property
    def _trained(self) -> dict[str, Any]:
        return options.trained_with(self.parser.dump(self.config))


class ExperimentCLI(LightningCLI):
    """LightningCLI that resumes into the run's own folder and ends a fit with its test."""

    trainer: Trainer

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        kept = {name: LightningCLI.subcommands()[name] for name in ("fit", "validate", "test")}
        return {**kept, "verify": FILLED_IN, "spectrum": FILLED_IN}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add = parser.add_argument
        threads = "torch threads; 1 is best for small networks. Default: torch's own choice."
        add("--num_threads", type=int | None, default=None, help=threads)
        every = "optimizer steps between two checkpoints."
        add("--checkpoint_every", type=int, default=1000, help=every)
        end = "whether a fit ends with the test, its table and its pictures."
        add("--test_after_fit", type=bool, default=True, help=end)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        super().parse_arguments(parser, args)
        given = self.config[self.config["subcommand"]]
        options.check_options(given.as_dict())
        if given.get("ckpt_path") not in (None, "last"):
            # Lightning reads it next, and its errors are harder to read
            runs.load_checkpoint(runs.find_checkpoint(given["ckpt_path"]))

    def before_instantiate_classes(self) -> None:
        threads = self._get(self.config, "num_threads")
        if threads is not None:
            torch.set_num_threads(at_least("num_threads", threads, 1))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        settings = self._get(self.config_init, "trainer")
        saved_every = at_least("checkpoint_every", self._get(self.config, "checkpoint_every"), 1)
        at_least("accumulate_grad_batches", settings.get("accumulate_grad_batches", 1), 1)
        settings["strategy"] = processes.choose_strategy(settings.get("strategy"), self.model)
        if isinstance(every := settings.get("val_check_interval"), int):
            # a run that is shorter than the interval is validated at its end
            end = getattr(self.datamodule, "iterations", None) or every
            settings["val_check_interval"] = min(at_least("val_check_interval", every, 1), end)
        if isinstance(given := settings.get("logger"), Logger | list):
            settings["logger"] = self._loggers(given, settings.get("default_root_dir"))
        if settings.get("fast_dev_run") and settings.get("default_root_dir") is None:
            settings["default_root_dir"] = mkdtemp()  # without a logger there is no run's folder
        more = settings.get("callbacks") or []
        own = [processes.ProcessWatch(), processes.ProcessSeeds(), RNGState()]
        own += [LastCheckpoint(saved_every), PictureLogger()]
        own += [FitAndTestBar()] if settings.get("enable_progress_bar") is not False else []
        settings["callbacks"] = [*own, *(more if isinstance(more, list) else [more])]
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, MisconfigurationException) as error:
            # Lightning's own checks of its arguments
            advice = " Give --trainer.accelerator cpu, or auto." if "backend" in str(error) else ""
            raise CommandError(f"trainer: {error}{advice}") from error

    def _loggers(self, given: Any, root: Any) -> list[Logger]:
        """The loggers, of which a RunLogger is the first: the run's folder is the same whatever other
        logger gets its numbers."""
        loggers = given if isinstance(given, list) else [given]
        own = [x for x in loggers if isinstance(x, RunLogger)]
        if not own:
            config: Any = self._get(self.config, "trainer").logger
            name = config.init_args.get("name") if isinstance(given, Logger) else None
            own = [RunLogger(name or "run")]
        if root is not None:
            own[0].use_root(str(root))
        return [*own, *(x for x in loggers if x not in own)]

    def after_instantiate_classes(self) -> None:
        """Resolve the checkpoint, and continue in the folder of the run that it belongs to."""
        processes.check_processes(self.trainer, self.model)
        settings, fitting = self.config_init[self.subcommand], self.subcommand == "fit"
        # Checkpoints hold tensors and plain values only, so loading one never runs foreign code.
        settings["weights_only"] = True
        if self.subcommand == "test":
            settings["verbose"] = False  # the experiment prints its own table
        newest = None if self.subcommand in ("fit", "verify") else "last"
        path = settings.get("ckpt_path") or newest
        logger = self.trainer.logger if isinstance(self.trainer.logger, RunLogger) else None
        folder = None
        if path is not None:
            if logger is not None and path == "last":
                path = Path(logger.save_dir or "") / str(logger.name)
            checkpoint = runs.find_checkpoint(path)
            settings["ckpt_path"], folder = str(checkpoint), runs.version_folder(checkpoint)
            content = runs.load_checkpoint(checkpoint)
            if fitting and runs.CONFIG in content:
                given = options.trained_with(self._parser("fit").dump(self.config["fit"]))
                options.check_resumed(content[runs.CONFIG], given)
        if logger is not None and folder is not None:
            logger.resume(folder, runs.logged_steps(content) if fitting else None)
        elif logger is not None and self.subcommand != "verify":
            logger.check_free()

    def after_fit(self) -> None:
        if self._get(self.config, "test_after_fit"):
            self.trainer.test(self.model, self.datamodule, verbose=False)
        elif (checkpoint := runs.run_folder(self.trainer) / runs.LAST).exists():
            print(f"Saved {checkpoint}")


def with_one_command(words: list[str]) -> type[ExperimentCLI]:
    """The CLI with the command that a command line begins with, and with all commands where the first
    word is none of them, as in ``--help``: to make the parsers of all takes a quarter of the start."""
    commands = ExperimentCLI.subcommands()
    if not words or words[0] not in commands:
        return ExperimentCLI
    only = staticmethod(lambda: {words[0]: commands[words[0]]})
    return type("OneCommand", (ExperimentCLI,), {"subcommands": only})


def stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM and SIGHUP as Ctrl-C: of the scheduler that preempts a run, a container's stop, a
    terminal that is closed (unless `nohup` ignores it)."""
    signal.signal(signum, signal.SIG_IGN)  # the cleanup is not interrupted
    raise KeyboardInterrupt(signum)


def silence_dependencies() -> None:
    """Ignore warnings of dependencies that a user can do nothing about."""
    # Lightning 2.6 asks torch for a class that torch has renamed.
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
    for ignored in (
        # main(args) is called from Python in tests, whose own command line has arguments too.
        "LightningCLI's args parameter",
        # It is the experiments' own way to share a batch; no data module has a hook of that name.
        "You have overridden `on_before_batch_transfer`",
        # The streams of tasks are computed, not read: worker processes would only cost time.
        "does not have many workers",
    ):
        warnings.filterwarnings("ignore", f".*{ignored}.*")

    def useful(record: logging.LogRecord) -> bool:
        """Not the advertisement of a service at every start, nor a default that is the right one."""
        return not any(text in str(record.msg) for text in ("Tip:", "`weights_only` was"))

    for name in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector"):
        logging.getLogger(f"lightning.pytorch.{name}").addFilter(useful)
