"""Checks of the options of a command, beyond their types."""

from collections import ChainMap
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml  # type: ignore[import-untyped] # comes with jsonargparse, its stubs do not

from experiments import runs
from experiments.checks import at_least
from experiments.command.errors import CommandError
from hoglib.errors import ArgumentValueError

TRAINED = ("seed_everything", "model", "data")  # the options of a training, beside its trainer's
OF_ROUNDING = ("compile", "remat")  # options that may change: they change the rounding alone


def named(config: Any, parts: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The options of parts of a config by their whole names, as "model.hidden"."""
    for part in parts:
        value = config.get(part)
        if isinstance(value, dict):
            inner = named(value, value)
            yield from ((f"{part}.{name.removeprefix('init_args.')}", x) for name, x in inner)
        else:
            yield part, value


def check_keys(node: Any) -> None:
    """Raise for a part of a config that has a key twice: YAML takes the last without a word."""
    keys = set()
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        key, value = part if isinstance(node, yaml.MappingNode) else (None, part)
        if key is not None and str(key.value) in keys:
            line = f'line {key.start_mark.line + 1} of "{key.start_mark.name}"'
            raise CommandError(f"config: expected {key.value} once, got it again in {line}.")
        keys.add(key and str(key.value))
        check_keys(value)


def check_options(given: dict[str, Any]) -> None:
    """Raise for numbers that torch cannot take, and for null where a class takes none."""
    if at_least("seed_everything", int(given.get("seed_everything") or 0), 0) >= 2**32:
        seed = given["seed_everything"]
        raise ArgumentValueError(f"seed_everything: expected less than 2**32, got {seed}.")
    for name, value in named(given, given):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ArgumentValueError(f"{name}: expected an integer of 64 bits, got {value}.")
    for part in ("model", "data"):
        _refuse_null(part, given.get(part))


def _refuse_null(part: str, given: Any) -> None:
    """jsonargparse leaves it to the class."""
    if isinstance(given, dict) and "class_path" in given:
        module, _, name = given["class_path"].rpartition(".")
        kind = getattr(import_module(module), name)
        # a class that takes **options passes them to its bases
        hints = ChainMap(*(get_type_hints(base.__init__) for base in kind.__mro__))
        for name, value in given.get("init_args", {}).items():
            hint = hints.get(name, Any)
            if value is None and hint is not Any and NoneType not in get_args(hint):
                expected = getattr(hint, "__name__", hint)
                raise ArgumentValueError(f"{part}.{name}: expected {expected}, got null.")


def trained_with(config: str) -> dict[str, Any]:
    """The options of a training that stay the same where it is resumed."""
    options = yaml.safe_load(config)
    return {name: options.get(name) for name in TRAINED}


def check_resumed(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise for options of model, data and seed that are not those of the run that is resumed."""
    before, now = (dict(named(config, TRAINED)) for config in (saved, given))
    every = [name for name in {**before, **now} if name.split(".")[-1] not in OF_ROUNDING]
    other = [name for name in every if before.get(name) != now.get(name)]
    if other:
        listed = "; ".join(f"{name} {now.get(name)} for {before.get(name)}" for name in other)
        raise CommandError(
            f"checkpoint: expected the options that the run began with, got {listed}. Leave these out, "
            "or write them back where a config was edited: --ckpt_path alone reads the config beside "
            "the checkpoint."
        )


def check_same(every: list[Any]) -> None:
    """Raise in all processes where the options of model, data and seed differ between them."""
    first, *others = (dict(named(config, TRAINED)) for config in every)
    for rank, other in enumerate(others, 1):
        for name, value in other.items():
            if value != first.get(name):
                raise CommandError(
                    f"{name}: expected the same in all processes, got {value} in process {rank} and "
                    f"{first.get(name)} in process 0; give all the same options."
                )


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
