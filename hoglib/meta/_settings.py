"""What a learner's options must be, at first and whenever they are changed between steps."""

from collections.abc import Callable
from typing import Any

from hoglib import _arguments as arguments
from hoglib.meta import norms
from hoglib.meta.inner import MEMORY, check_truncate

COMPILE = ("inductor", "step", "eager")  # besides True, which chooses


def _rate(learner: Any, value: Any) -> float:
    if learner.rates is not None:
        raise arguments.WrongValue(
            "inner_lr: expected to stay as it was, for the rates are learned from it on, got a new "
            "one; change `learner.rates` instead."
        )
    return arguments.positive("inner_lr", value)


def _policy(learner: Any, value: Any) -> str:
    arguments.one_of("batch_norm", value, norms.POLICIES)
    if (value == "per_step") != (learner.statistics is not None):
        raise arguments.WrongValue(
            "batch_norm: expected 'per_step' from the beginning or not at all, since it has "
            "statistics of its own; make a new learner."
        )
    return str(value)


def _parts(learner: Any, value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not (value is None or callable(value) or all(isinstance(name, str) for name in names)):
        raise arguments.WrongType(
            "inner_params: expected a predicate (name, tensor) -> bool, or names or prefixes, got "
            f"{arguments.describe(value)}."
        )
    return value


def _options(learner: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise arguments.WrongType(
            f"rule_options: expected a dict, got {arguments.describe(value)}."
        )
    return dict(value)


def _way(value: Any) -> bool | str:
    if isinstance(value, bool):
        return value
    if value not in COMPILE:
        raise arguments.WrongValue(
            f"compile: expected true, false or one of {', '.join(COMPILE)}; got {value!r}."
        )
    return str(value)


# What an attribute must be, whenever it is set
CHECKS: dict[str, Callable[[Any, Any], Any]] = {
    "inner_lr": _rate,
    "inner_steps": lambda _, value: arguments.at_least("inner_steps", value, 1),
    "first_order": lambda _, value: arguments.flag("first_order", value),
    "memory": lambda _, value: arguments.one_of("memory", value, MEMORY),
    "truncate": lambda _, value: check_truncate(value),
    "batch_norm": _policy,
    "inner_params": _parts,
    "rule_options": _options,
    "compiled": lambda _, value: _way(value),
    "compile_for": lambda _, value: (
        None if value is None else arguments.at_least("compile_for", value, 1)
    ),
    "stand_ins": lambda _, value: arguments.flag("stand_ins", value),
}
