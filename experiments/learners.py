"""The learners that configs name."""

import inspect
from typing import Any

from torch import nn

import hoglib as hog
from hoglib._core import validation
from hoglib.errors import ArgumentValueError, HoglibError
from hoglib.meta import Learner

ALGORITHMS: dict[str, type[Learner]] = {
    "maml": hog.MAML,
    "reptile": hog.meta.Reptile,
    "imaml": hog.meta.IMAML,
}
HANDED = ("self", "model", "criterion", "compile", "compile_for")


def learner(algorithm: str, network: nn.Module, criterion: Any, options: dict[str, Any]) -> Learner:
    """A learner by name, with options that are arguments of its class."""
    kind = ALGORITHMS[validation.one_of("algorithm", algorithm, ALGORITHMS)]
    try:
        if options.keys() & HANDED:
            raise TypeError("some are set by the model itself")
        return kind(network, criterion, **options)
    except TypeError as error:
        if isinstance(error, HoglibError):
            raise
        known = [n for n in inspect.signature(kind.__init__).parameters if n not in HANDED]
        raise ArgumentValueError(
            f"options: expected arguments of {kind.__name__}, which are {', '.join(known)}, got "
            f"{', '.join(options)} ({error})."
        ) from error
