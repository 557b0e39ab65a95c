"""Whether norms update their running statistics.

What only computes a derivative must leave them alone. The norm is called by the user's model, through
which no argument can be passed, so this is a context variable.
"""

from contextvars import ContextVar
from typing import final

# Ambient state, because an argument could not reach the normalization layers of an unmodified module.
_FROZEN: ContextVar[bool] = ContextVar("running_statistics_frozen", default=False)


@final
class frozen_running_statistics:  # noqa: N801 a context manager
    """Inside, `hoglib.ops.batch_norm` and `instance_norm` leave running statistics unchanged."""

    def __enter__(self) -> None:
        self._token = _FROZEN.set(True)

    def __exit__(self, *raised: object) -> None:
        _FROZEN.reset(self._token)


def running_statistics_frozen() -> bool:
    return _FROZEN.get()
