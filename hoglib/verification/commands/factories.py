"""What is audited: a loss, parameters and a batch, or several such."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hoglib import _arguments as arguments

ONE = "(loss, params, batch)"


class Problem(NamedTuple):
    """A loss(params, batch) to audit; the name is empty where there is only one."""

    name: str
    loss: Any
    params: Any
    batch: Any


def problems(what: str, value: Any) -> list[Problem]:
    """(loss, params, batch), a list of such tuples, or a dict of them by name; as a list of problems.

    Raises TypeError for anything else, and ValueError for no problem at all.
    """
    if _is_one(value):
        return [Problem("", *value)]
    if isinstance(value, Mapping):
        named = {str(name): one for name, one in value.items()}
    elif isinstance(value, list):
        named = {str(number): one for number, one in enumerate(value)}
    else:
        raise _wrong(what, value)
    if not named:
        raise arguments.WrongValue(f"{what}: expected at least one {ONE}, got none.")
    for name, one in named.items():
        if not _is_one(one):
            raise _wrong(f"{what}[{name}]", one)
    return [Problem(name, *one) for name, one in named.items()]


def _is_one(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and callable(value[0])


def _wrong(what: str, value: Any) -> arguments.WrongType:
    if isinstance(value, tuple):
        came = f"a tuple ({', '.join(type(part).__name__ for part in value)})"
    else:
        came = arguments.describe(value)
    return arguments.WrongType(
        f"{what}: expected {ONE} with a function of params and batch first, a list of such tuples or "
        f"a dict of them by name, got {came}; for instance `return hoglib.functional_loss(model, "
        "criterion), hoglib.trainable_params(model), batch`."
    )
