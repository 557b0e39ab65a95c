"""Whether norms update their running statistics.

What only computes a derivative must leave them alone. The norm is called by the user's model, through
which no argument can be passed, so this is a context variable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Ambient state, because an argument could not reach the normalization layers of an unmodified module.
_FROZEN: ContextVar[bool] = ContextVar("running_statistics_frozen", default=False)


@contextmanager
def frozen_running_statistics() -> Iterator[None]:
    """Inside, `hoglib.ops.batch_norm` and `instance_norm` leave running statistics unchanged."""
    token = _FROZEN.set(True)
    try:
        yield
    finally:
        _FROZEN.reset(token)


def running_statistics_frozen() -> bool:
    return _FROZEN.get()
