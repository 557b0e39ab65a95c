"""Errors of torch's communication, in which a process learns that another one failed.

An error ends its process, and what waits for that process then raises within seconds. Where the error
is caught, and the process lives, the others wait until the timeout of their group.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hoglib.errors import DistributedError, HoglibError

# what the backends of torch.distributed say where a process does not take part
COMMUNICATION = (
    "Connection closed", "Connection reset", "Connection refused", "Broken pipe", "imed out", "imeout",
    "gloo", "NCCL", "ncclUnhandled",
)  # fmt: skip


@contextmanager
def translate_distributed_errors(caller: str) -> Iterator[None]:
    """Says of an error of the communication that another process ended, raised or made another call."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HoglibError) or not any(word in str(error) for word in COMMUNICATION):
            raise
        raise DistributedError(
            f"{caller}: expected all processes to make the same calls, got one that ended, raised an "
            "error of its own or made another call: look at the output of the others. "
            f"(torch says: {str(error).splitlines()[0][:200]})"
        ) from error
