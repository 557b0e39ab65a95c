"""The errors that hoglib raises.

Each error is a :class:`HoglibError` and also a built-in error, so both handlers work::

    try:
        value, product = hoglib.hvp(loss, params, v, batch)
    except hoglib.errors.NoSecondDerivative:
        ...                                     # this condition alone
    except RuntimeError:
        ...                                     # as for any other library

A message names the expected and the passed value, and the next step. The commands print it without a
traceback.

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
    """A second derivative does not exist, or hoglib would silently compute only a part of it.

    Raised if the value does not depend on the parameters, if a custom Function is
    ``@once_differentiable``, if a gradient is detached although it must be differentiated, and if
    a loss reads the parameters otherwise than from its argument. Also a :class:`RuntimeError`. Look in
    the loss for ``.detach()``, ``.item()``, ``.data``, ``torch.no_grad()`` and custom Functions:
    :func:`hoglib.audit` and :func:`hoglib.verify` name the line.
    """


class UnsupportedError(HoglibError, NotImplementedError):
    """A valid call for which torch or hoglib has no implementation.

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

    Add damping, use a positive semi-definite matrix (Fisher, or the GGN of a criterion convex in the
    outputs) instead of the Hessian, or train the inner problem nearer to its minimum.

    Attributes:
        iterations: The number of the iteration of conjugate gradients that met the direction.
    """

    iterations = 1


class NondeterministicError(HoglibError, RuntimeError):
    """Two evaluations at equal parameters and data have different values.

    Raised by operators over a data set: all passes must agree. Also a :class:`RuntimeError`.
    Turn off dropout and random augmentation (``model.eval()``), and shuffling (``shuffle=False``).
    """


class ConvergenceError(HoglibError, RuntimeError):
    """An iterative method did not reach its tolerance. Also a :class:`RuntimeError`.

    Allow more iterations, a larger tolerance, or ask for fewer results.
    """


class DistributedError(HoglibError, RuntimeError):
    """Processes of torch.distributed disagree, or one process failed. Also a :class:`RuntimeError`.

    The message names the failed or different process, and its error. Correct the cause there.
    """


class VerificationError(HoglibError, AssertionError):
    """A verification failed; the message is the report. Also an :class:`AssertionError`.

    Raised by :meth:`hoglib.Report.raise_if_failed` and by audits that refuse a training. Each failed
    row of the report names the culprit and how to correct it.
    """


class MissingDependencyError(HoglibError, ImportError):
    """An optional package or program that the call needs is not installed.

    Also an :class:`ImportError`. The message says how to install it, or which option avoids it.
    """


class OutputError(HoglibError, OSError):
    """A file could not be written. Also an :class:`OSError`.

    Check that the folder exists and is writable, and that the disk has space.
    """


class DrawingError(HoglibError, RuntimeError):
    """Graphviz could not draw a graph. Also a :class:`RuntimeError`.

    Draw a smaller part of the graph, allow more time, or save it as ``.dot``.
    """
