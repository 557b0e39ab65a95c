"""The errors that hoglib raises.

Each is a :class:`HoglibError` and also the built-in error of its kind, so both of these work::

    try:
        value, product = hoglib.hvp(loss, params, v, batch)
    except hoglib.errors.NoSecondDerivative:
        ...                                     # this condition alone
    except RuntimeError:
        ...                                     # as for any other library

A message says what was expected, what was passed, and what to do next. The commands print it
without a traceback.
"""

__all__ = [
    "ArgumentIndexError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "ConvergenceError",
    "DistributedError",
    "DrawingError",
    "HoglibError",
    "MissingDependencyError",
    "NoSecondDerivative",
    "NonFiniteError",
    "NondeterministicError",
    "NotPositiveDefiniteError",
    "OutputError",
    "UnsupportedError",
    "VerificationError",
]


class HoglibError(Exception):
    """Base class of all errors that hoglib raises itself."""


class ArgumentTypeError(HoglibError, TypeError):
    """An argument has the wrong type or dtype."""


class ArgumentValueError(HoglibError, ValueError):
    """An argument has the right type and a value, shape or device that cannot be used."""


class ArgumentIndexError(ArgumentValueError, IndexError):
    """A dimension is out of range. Also an :class:`IndexError`, which torch raises there."""


class NoSecondDerivative(HoglibError, RuntimeError):
    """A second derivative does not exist, or part of it would be missing without an error.

    Raised where the value does not depend on the parameters, where a custom Function is
    ``@once_differentiable``, and where a graph that is needed has been detached.
    """


class UnsupportedError(HoglibError, NotImplementedError):
    """The request is valid, and torch or hoglib has no implementation for it."""


class NonFiniteError(HoglibError, FloatingPointError):
    """A loss, gradient, product or penalty is NaN or infinite."""


class NondeterministicError(HoglibError, RuntimeError):
    """A loss has different values in two evaluations at the same parameters and data."""


class ConvergenceError(HoglibError, RuntimeError):
    """An iterative method did not reach its tolerance."""


class NotPositiveDefiniteError(HoglibError, ArithmeticError):
    """A linear solve met a direction of zero or negative curvature.

    Attributes:
        iterations: the iteration of conjugate gradients in which it was met.
    """

    iterations = 1


class DistributedError(HoglibError, RuntimeError):
    """Processes of torch.distributed disagree, or one of them failed."""


class VerificationError(HoglibError, AssertionError):
    """Raised by :meth:`hoglib.Report.raise_if_failed`; its text is the report."""


class MissingDependencyError(HoglibError, ImportError):
    """An optional package that the call needs is not installed."""


class OutputError(HoglibError, OSError):
    """A file could not be written."""


class DrawingError(HoglibError, RuntimeError):
    """Graphviz could not draw a graph."""
