"""The command ``python -m experiments``: LightningCLI with readable errors and exact resumption."""

import logging
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EDQUOT, ENOENT, ENOSPC, ENOTDIR, EROFS
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from traceback import walk_tb
from types import FrameType, NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import lightning.pytorch as pl
import torch
import yaml  # type: ignore[import-untyped] # comes with jsonargparse, its stubs do not
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger

from experiments import runs
from experiments.checks import at_least
from experiments.command.checkpoint import LastCheckpoint
from experiments.command.messages import shorten_parser_error
from experiments.command.progress import FitAndTestBar
from experiments.command.trainer import Trainer
from experiments.configs import with_full_configs
from experiments.logs import PictureLogger, RunLogger
from experiments.shared.processes import (
    LOST,
    ProcessSeeds,
    ProcessWatch,
    check_processes,
    choose_strategy,
    leave_processes,
    lost_process,
    tells_of_lost_process,
)
from hoglib.errors import ArgumentValueError, HoglibError
from hoglib.lightning import RNGState

DESCRIPTION = (
    "Runs the experiments. `python -m experiments list` lists the configs with the minutes each "
    "takes; `python -m experiments fit --config configs/maml/sinusoid.yaml` trains one into runs/; "
    "`test` in place of `fit` tests it. `fit --help` lists the options."
)
TRAINED = ("seed_everything", "model", "data")  # the options of a training, beside its trainer's
OF_ROUNDING = ("compile", "remat")  # options that may change: they change the rounding alone
CANNOT_WRITE = (ENOSPC, EDQUOT, EACCES, EROFS, ENOENT, ENOTDIR)


def main(args: list[str] | None = None) -> int:
    """Run a command.

    Args:
        args: The words after ``python -m experiments``. Default: those of the process.
    Returns:
        The exit status: 0; 1 where ``verify`` found a wrong derivative; 2 for an error of the user's;
        130 after Ctrl-C, 143 after SIGTERM.
    """
    silence_dependencies()
    with ends_by_sigterm(), runs.LOCKS:
        return run(sys.argv[1:] if args is None else args)


def run(args: list[str]) -> int:
    """Run a command; its exit status."""
    try:
        words = with_saved_config(with_full_configs(args))
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
        message = user_error(error)
        if message is None:
            raise
        if message != LOST or tells_of_lost_process():
            print(f"\nerror: {message}", file=sys.stderr)
        return 2
    leave_processes()
    return command.trainer.status


class CommandError(HoglibError):
    """A command line or config that cannot be read."""


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

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        commands = [a.choices.values() for a in self._actions if isinstance(a.choices, dict)]
        parsers = [self, *(parser for choices in commands for parser in choices)]
        options = [a.dest for parser in parsers for a in parser._actions if a.dest != "help"]
        raise CommandError(shorten_parser_error(message, options)) from ex


class SaveConfig(SaveConfigCallback):
    """Saves config.yaml beside the checkpoint of the run that trains it, in ``fit`` only, and once the
    checkpoint that it resumes has been loaded: a refused one leaves the run's own config."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pass

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().setup(trainer, pl_module, "fit")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[runs.CONFIG] = self._trained

    @cached_property
    def _trained(self) -> dict[str, Any]:
        return trained_with(self.parser.dump(self.config))


def trained_with(config: str) -> dict[str, Any]:
    """The options of a training that stay the same where it is resumed."""
    options = yaml.safe_load(config)
    return {name: options.get(name) for name in TRAINED}


class ExperimentCLI(LightningCLI):
    """LightningCLI that resumes into the run's own folder and ends a fit with its test."""

    trainer: Trainer

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        of_lightning = LightningCLI.subcommands()
        kept = {name: of_lightning[name] for name in ("fit", "validate", "test")}
        filled_in = {"model", "datamodule"}  # by the CLI, not by options of their own
        return {**kept, "verify": filled_in, "spectrum": filled_in}

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
        given = self.config[self.config["subcommand"]]
        seed = at_least("seed_everything", int(given.get("seed_everything") or 0), 0)
        if seed >= 2**32:
            raise ArgumentValueError(f"seed_everything: expected less than 2**32, got {seed}.")
        every = given.as_dict()
        for name, value in _options(every, every):
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ArgumentValueError(f"{name}: expected an integer of 64 bits, got {value}.")
        for part in ("model", "data"):
            refuse_null(part, every.get(part))
        ckpt_path = given.get("ckpt_path")
        if ckpt_path not in (None, "last"):
            # Lightning reads it next, and its errors are harder to read
            runs.load_checkpoint(runs.find_checkpoint(ckpt_path))

    def before_instantiate_classes(self) -> None:
        threads = self._get(self.config, "num_threads")
        if threads is not None:
            torch.set_num_threads(at_least("num_threads", threads, 1))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        settings = self._get(self.config_init, "trainer")
        saved_every = at_least("checkpoint_every", self._get(self.config, "checkpoint_every"), 1)
        at_least("accumulate_grad_batches", settings.get("accumulate_grad_batches", 1), 1)
        callbacks: list[pl.Callback] = [
            ProcessWatch(),
            ProcessSeeds(),
            RNGState(),
            LastCheckpoint(saved_every),
            PictureLogger(),
        ]
        settings["strategy"] = choose_strategy(settings.get("strategy"), self.model)
        if settings.get("enable_progress_bar") is not False:
            callbacks.append(FitAndTestBar())
        if isinstance(given := settings.get("logger"), Logger | list):
            loggers = given if isinstance(given, list) else [given]
            options: Any = self._get(self.config, "trainer").logger
            name = options.init_args.get("name") if isinstance(given, Logger) else None
            # the first, so that the run's folder is the same whatever other logger gets its numbers
            own = [x for x in loggers if isinstance(x, RunLogger)] or [RunLogger(name or "run")]
            if (root := settings.get("default_root_dir")) is not None:
                own[0].use_root(str(root))
            settings["logger"] = [*own, *(x for x in loggers if x not in own)]
        if settings.get("fast_dev_run") and settings.get("default_root_dir") is None:
            settings["default_root_dir"] = mkdtemp()  # without a logger there is no run's folder
        if isinstance(every := settings.get("val_check_interval"), int):
            at_least("val_check_interval", every, 1)
        iterations, interval = getattr(self.datamodule, "iterations", None), "val_check_interval"
        if iterations is not None and isinstance(settings.get(interval), int):
            # a run that is shorter than the interval is validated at its end
            settings[interval] = min(settings[interval], iterations)
        more = settings.get("callbacks") or []
        settings["callbacks"] = [*callbacks, *(more if isinstance(more, list) else [more])]
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, MisconfigurationException) as error:
            # Lightning's own checks of its arguments
            advice = " Give --trainer.accelerator cpu, or auto." if "backend" in str(error) else ""
            raise CommandError(f"trainer: {error}{advice}") from error

    def after_instantiate_classes(self) -> None:
        """Resolve the checkpoint, and continue in the folder of the run that it belongs to."""
        check_processes(self.trainer, self.model)
        options = self.config_init[self.subcommand]
        # Checkpoints hold tensors and plain values only, so loading one never runs foreign code.
        options["weights_only"] = True
        if self.subcommand == "test":
            options["verbose"] = False  # the experiment prints its own table
        default = None if self.subcommand in ("fit", "verify") else "last"
        ckpt_path = options.get("ckpt_path") or default
        logger, folder = self.trainer.logger, None
        if ckpt_path is not None:
            if isinstance(logger, RunLogger) and ckpt_path == "last":
                ckpt_path = Path(logger.save_dir or "") / str(logger.name)
            checkpoint = runs.find_checkpoint(ckpt_path)
            content = runs.load_checkpoint(checkpoint)
            options["ckpt_path"] = str(checkpoint)
            folder = runs.version_folder(checkpoint)
            if self.subcommand == "fit" and runs.CONFIG in content:
                given = trained_with(self._parser("fit").dump(self.config["fit"]))
                check_resumed(content[runs.CONFIG], given)
        if isinstance(logger, RunLogger) and folder is not None:
            fitting = self.subcommand == "fit"
            logger.resume(folder, runs.logged_steps(content) if fitting else None)
        elif isinstance(logger, RunLogger) and self.subcommand != "verify":
            logger.check_free()

    def after_fit(self) -> None:
        if self._get(self.config, "test_after_fit"):
            self.trainer.test(self.model, self.datamodule, verbose=False)
        elif (checkpoint := runs.run_folder(self.trainer) / runs.LAST).exists():
            print(f"Saved {checkpoint}")


def check_resumed(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise for options of model, data and seed that are not those of the run that is resumed."""
    before, now = (dict(_options(config, TRAINED)) for config in (saved, given))
    every = [name for name in {**before, **now} if name.split(".")[-1] not in OF_ROUNDING]
    other = [name for name in every if before.get(name) != now.get(name)]
    if other:
        listed = "; ".join(f"{name} {now.get(name)} for {before.get(name)}" for name in other)
        raise CommandError(
            f"checkpoint: expected the options that the run began with, got {listed}. Leave these out, "
            "or write them back where a config was edited: --ckpt_path alone reads the config beside "
            "the checkpoint."
        )


def _options(config: Any, parts: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The options of parts of a config by their whole names, as "model.hidden"."""
    for part in parts:
        value = config.get(part)
        if isinstance(value, dict):
            inner = _options(value, value)
            yield from ((f"{part}.{name.removeprefix('init_args.')}", x) for name, x in inner)
        else:
            yield part, value


def refuse_null(part: str, given: Any) -> None:
    """Raise for an option of the model or the data that is null and may not be, which jsonargparse
    leaves to the class."""
    if isinstance(given, dict) and "class_path" in given:
        module, _, kind = given["class_path"].rpartition(".")
        hints = get_type_hints(getattr(import_module(module), kind).__init__)
        for name, value in given.get("init_args", {}).items():
            hint = hints.get(name, Any)
            if value is None and hint is not Any and NoneType not in get_args(hint):
                expected = getattr(hint, "__name__", hint)
                raise ArgumentValueError(f"{part}.{name}: expected {expected}, got null.")


def with_saved_config(words: list[str]) -> list[str]:
    """A command line, with the config beside the checkpoint that it names where it names none."""
    options = [word.partition("=")[0] for word in words]
    if "--ckpt_path" not in options or {"--config", "-c"} & {*options}:
        return words
    at = options.index("--ckpt_path")
    path = words[at].partition("=")[2] or " ".join(words[at + 1 : at + 2])
    if path in ("", "last", "null"):  # of a run that a config names
        return words
    config = runs.find_checkpoint(path).with_name(runs.CONFIG)
    if config.exists():
        return [words[0], "--config", str(config), *words[1:]]
    if any(option.startswith("--model") for option in options):
        return words
    raise ArgumentValueError(
        f"--ckpt_path: expected a checkpoint with its {runs.CONFIG} beside it, got {path!r}, where "
        "there is none; name the config, too, by --config."
    )


def with_one_command(words: list[str]) -> type[ExperimentCLI]:
    """The CLI with the command that a command line begins with, and with all commands where the first
    word is none of them, as in ``--help``: to make the parsers of all takes a quarter of the start."""
    commands = ExperimentCLI.subcommands()
    if not words or words[0] not in commands:
        return ExperimentCLI

    class OneCommand(ExperimentCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {words[0]: commands[words[0]]}

    return OneCommand


def user_error(error: Exception) -> str | None:
    """The message for an error that the user can correct; None for any other."""
    # jsonargparse wraps what a constructor raises; the explanation is further down.
    for cause in causes(error):
        if isinstance(cause, HoglibError | MisconfigurationException):
            return str(cause)
        if isinstance(cause, ModuleNotFoundError) and "Requirement" in str(cause):  # of a logger
            return str(cause)
        if isinstance(cause, OSError) and cause.errno in CANNOT_WRITE:
            return (
                f"expected to write in the run's folder, got {cause}. Free some space, or choose "
                "another folder with --trainer.logger.save_dir."
            )
        if "Error(s) in loading state_dict" in str(cause):
            first = str(cause).splitlines()[1].strip().rstrip(".")
            return (
                f"checkpoint: expected one of this network, got one of another ({first}). "
                "Resume it with --ckpt_path alone, which reads the config beside it, or train the "
                "network anew."
            )
        if lost_process(cause):
            return LOST
        if isinstance(cause, ValueError | RuntimeError) and of_lightning(cause):
            return str(cause).strip()
    return None


def of_lightning(error: BaseException) -> bool:
    """Whether Lightning raised it: a check of the options of its trainer and callbacks."""
    raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][-1:]
    return any(Path(file).is_relative_to(Path(pl.__file__).parents[1]) for file in raised_in)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt: of the scheduler that preempts a run, a container's stop."""

    def stop(signum: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signum, signal.SIG_IGN)  # the cleanup is not interrupted
        raise KeyboardInterrupt(signum)

    previous = None
    with suppress(ValueError):  # signals can only be handled in the main thread
        previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def silence_dependencies() -> None:
    """Ignore warnings of dependencies that a user can do nothing about."""
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
    # It is the experiments' own way to share a batch; no data module has a hook of that name.
    warnings.filterwarnings("ignore", ".*You have overridden `on_before_batch_transfer`.*")
    # The streams of tasks are computed, not read: worker processes would only cost time.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
