"""Update rules as a user says them: by name, by a function of the learning rate, or as they are."""

import inspect
from typing import Any

import torch

from hoglib import _arguments as arguments
from hoglib.meta.rules import RULES, Rule

EXPECTED = (
    f"one of {', '.join(RULES)}, a `hoglib.meta.Rule`, a module with init and update, or a function "
    "from a learning rate to one"
)


def rule_of(rule: Any, lr: Any, options: dict[str, Any]) -> Rule:
    """The update rule that a name, a function of the learning rate or an object stands for."""
    if isinstance(rule, str):
        return _named(arguments.one_of("rule", rule, RULES), lr, options)
    if options:
        raise arguments.WrongValue(
            "rule_options: expected none with a rule that is not a name, got "
            f"{', '.join(options)}; give them to the rule itself, for instance by functools.partial."
        )
    if has_both(rule):
        return Rule(rule.init, rule.update)
    if isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer):
        raise arguments.WrongType(
            f"rule: expected {EXPECTED}, got {rule.__name__} of torch.optim, which changes parameters "
            "in place; name the rule."
        )
    found = arguments.function("rule", rule)(lr)
    if not has_both(found):
        raise arguments.WrongType(
            f"rule: expected {EXPECTED}, got {arguments.describe(found)} from it."
        )
    return Rule(found.init, found.update)


def has_both(rule: Any) -> bool:
    """Whether it is a rule itself."""
    return callable(getattr(rule, "init", None)) and callable(getattr(rule, "update", None))


def name_of(rule: Any) -> str:
    if isinstance(rule, str):
        return repr(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def _named(name: str, lr: Any, options: dict[str, Any]) -> Rule:
    known = [n for n in inspect.signature(RULES[name]).parameters if n != "lr"] if options else []
    for option in options:
        if option not in known:
            raise arguments.WrongValue(
                f"rule_options: expected options of {name}, which are {', '.join(known)}, got "
                f"{option!r}."
            )
    return RULES[name](lr, **options)
