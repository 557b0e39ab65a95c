"""Meta-learners by the names that configs use."""

import inspect
from typing import Any

from torch import nn

import hoglib as hog
from experiments.checks import one_of
from hoglib.errors import ArgumentValueError, HoglibError
from hoglib.meta import Learner

ALGORITHMS: dict[str, type[Learner]] = {
    "maml": hog.MAML,
    "reptile": hog.meta.Reptile,
    "imaml": hog.meta.IMAML,
}
SET_BY_EXPERIMENTS = ("self", "model", "criterion", "compile")


def make_learner(
    algorithm: str, network: nn.Module, criterion: Any, options: dict[str, Any]
) -> Learner:
    """A learner of hoglib by name.

    Args:
        algorithm: A name in ALGORITHMS.
        network: The network that is meta-learned.
        criterion: Loss of outputs and targets.
        options: Further arguments of the learner's class.
    Returns:
        The learner.
    """
    kind = ALGORITHMS[one_of("algorithm", algorithm, ALGORITHMS)]
    try:
        if options.keys() & set(SET_BY_EXPERIMENTS):
            raise TypeError("some are set by the model itself")
        return kind(network, criterion, **options)
    except TypeError as error:
        if isinstance(error, HoglibError):
            raise
        known = [
            name
            for name in inspect.signature(kind.__init__).parameters
            if name not in SET_BY_EXPERIMENTS
        ]
        raise ArgumentValueError(
            f"options: expected arguments of {kind.__name__}, which are {', '.join(known)}, got "
            f"{', '.join(options)} ({error})."
        ) from error
