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

    class                      also a
    ArgumentTypeError          TypeError
    ArgumentValueError         ValueError
    ArgumentIndexError         ArgumentValueError, IndexError
    NoSecondDerivative         RuntimeError
    UnsupportedError           NotImplementedError, and so a RuntimeError
    NonFiniteError             FloatingPointError, and so an ArithmeticError
    NotPositiveDefiniteError   ArithmeticError
    NondeterministicError      RuntimeError
    ConvergenceError           RuntimeError
    DistributedError           RuntimeError
    VerificationError          AssertionError
    MissingDependencyError     ImportError
    OutputError                OSError
    DrawingError               RuntimeError
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
    """Base class of all errors that hoglib raises itself.

    Errors of torch, and of the functions and modules that hoglib calls, pass through unchanged.
    """


class ArgumentTypeError(HoglibError, TypeError):
    """An argument has the wrong type or dtype. Also a :class:`TypeError`.

    The message names the argument, or the leaf of a pytree, and the expected type. Convert the
    argument, or pass the object that the message asks for.
    """


class ArgumentValueError(HoglibError, ValueError):
    """An argument has the right type, but an invalid value. Also a :class:`ValueError`.

    Raised for shapes and devices that do not fit, unknown names and options, and options that cannot be
    combined. The message names the argument and the allowed values.
    """


class ArgumentIndexError(ArgumentValueError, IndexError):
    """A dimension or index is out of range. Also an :class:`IndexError`, as in torch.

    The message gives the range. Check the shape of the tensor, and whether dimensions are counted
    from 0.
    """


class NoSecondDerivative(HoglibError, RuntimeError):
    """A second derivative does not exist, or part of it would be missing without an error.

    Raised if the value does not depend on the parameters, if a custom Function is
    ``@once_differentiable``, if a gradient is detached although it must be differentiated, and if
    a loss reads the parameters from elsewhere than its argument. Also a :class:`RuntimeError`. Look in
    the loss for ``.detach()``, ``.item()``, ``.data``, ``torch.no_grad()`` and custom Functions:
    :func:`hoglib.audit` and :func:`hoglib.verify` name the line.
    """


class UnsupportedError(HoglibError, NotImplementedError):
    """The request is valid, and torch or hoglib has no implementation for it.

    Raised for operations without the necessary derivative, and for combinations without an
    implementation. Also a :class:`NotImplementedError`, and so a :class:`RuntimeError`. Use the
    mode, option or operation that the message names instead.
    """


class NonFiniteError(HoglibError, FloatingPointError):
    """A loss, gradient, product or penalty is NaN or infinite.

    Also a :class:`FloatingPointError`, and so an :class:`ArithmeticError`. Look for a square root, norm
    or logarithm at zero, for NaN in the data, and for overflow; if a training diverges, lower its
    learning rate.
    """


class NotPositiveDefiniteError(HoglibError, ArithmeticError):
    """A linear solve met a direction of zero or negative curvature. Also an :class:`ArithmeticError`.

    Add damping, use a positive semi-definite matrix (Fisher, or the GGN of a criterion that is convex
    in the outputs) instead of the Hessian, or train the inner problem nearer to its minimum.

    Attributes:
        iterations: The iteration of conjugate gradients that met the direction.
    """

    iterations = 1


class NondeterministicError(HoglibError, RuntimeError):
    """Two evaluations at the same parameters and data have different values.

    Raised by operators over a data set, because all passes must agree. Also a :class:`RuntimeError`.
    Turn off dropout and random augmentation (``model.eval()``), and shuffling (``shuffle=False``).
    """


class ConvergenceError(HoglibError, RuntimeError):
    """An iterative method did not reach its tolerance. Also a :class:`RuntimeError`.

    Allow more iterations, a larger tolerance, or ask for fewer results.
    """


class DistributedError(HoglibError, RuntimeError):
    """Processes of torch.distributed disagree, or one of them failed. Also a :class:`RuntimeError`.

    The message names the process that failed or differs, and its error. Correct the cause there.
    """


class VerificationError(HoglibError, AssertionError):
    """A verification failed; its text is the report. Also an :class:`AssertionError`.

    Raised by :meth:`hoglib.Report.raise_if_failed` and by audits that refuse a training. Each failed
    row of the report names the culprit and how to correct it.
    """


class MissingDependencyError(HoglibError, ImportError):
    """An optional package or program that the call needs is not installed.

    Also an :class:`ImportError`. The message says how to install it, and how to do without.
    """


class OutputError(HoglibError, OSError):
    """A file could not be written. Also an :class:`OSError`.

    Check that the folder exists and can be written to, and that there is space.
    """


class DrawingError(HoglibError, RuntimeError):
    """Graphviz could not draw a graph. Also a :class:`RuntimeError`.

    Draw a smaller part of the graph, allow more time, or save it as ``.dot``.
    """
