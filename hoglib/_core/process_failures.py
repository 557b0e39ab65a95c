"""An error of one process inside a call that several make together ends the call in all of them.

While gradients are gathered and averaged a process that fails cannot say so by a message of its own:
the others wait for one of another kind. It writes its error into the store by which the processes
found each other. Who waits on a processor for longer than a second looks there, and raises too. Where
all fail alike nothing is lost; where some were interrupted while they waited, their group of processes
is in no known state, and later calls raise at once.

On GPUs a process does not wait in Python: there the others end with the timeout of their group.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hoglib._core import torch_sharding
from hoglib.errors import DistributedError, HoglibError

POLL_SECONDS = 1.0  # between two looks of a waiting process for errors of the others
GRACE_SECONDS = 3.0  # in which what it waits for may still arrive, after it has found one
LEAVE_SECONDS = 10.0  # for the others to raise too
# what the backends of torch.distributed say where a process does not take part
COMMUNICATION = (
    "Connection closed", "Connection reset", "Connection refused", "Broken pipe", "imed out", "imeout",
    "gloo", "NCCL", "ncclUnhandled",
)  # fmt: skip

_EXCHANGES: dict[tuple[int, ...], "_ErrorExchange"] = {}  # by the ranks of their processes
_RUNNING: list["_ErrorExchange"] = []  # calls that are running


@contextmanager
def together(caller: str, mesh: Any) -> Iterator[None]:
    """A call that all processes of a mesh make; raises in all of them where one raises inside."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    if _RUNNING or len(ranks) == 1 or not dist.is_initialized():  # or a call inside of another one
        yield
        return
    exchange = _EXCHANGES.get(ranks)
    if exchange is None or exchange.world is not dist.group.WORLD:
        exchange = _EXCHANGES[ranks] = _ErrorExchange(ranks)
    exchange.check(caller)
    _RUNNING.append(exchange)
    try:
        with translate_distributed_errors(caller):
            yield
    except Exception as error:
        exchange.leave(error)
        raise
    finally:
        _RUNNING.remove(exchange)


@contextmanager
def translate_distributed_errors(caller: str) -> Iterator[None]:
    """Says of an error of the communication that another process ended, raised or made another call."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, HoglibError) or not any(word in str(error) for word in COMMUNICATION):
            raise
        told = _RUNNING[-1].told() if _RUNNING else ""
        raise DistributedError(
            f"{caller}: expected all processes to make the same calls, got one that ended, raised an "
            f"error of its own or made another call: {told or 'look at the output of the others'}. "
            f"(torch says: {str(error).splitlines()[0][:200]})"
        ) from error


def waiting(mesh: Any) -> AbstractContextManager[Any]:
    """Inside, what is gathered or averaged is waited for as `wait` does."""
    on_processor = bool(_RUNNING) and mesh.device_type == "cpu"
    return _WatchedWait(_RUNNING[-1]) if on_processor else nullcontext()


def wait(work: Any, device: torch.device) -> None:
    """Wait for a collective until other processes have called it too, or one of them has raised."""
    if _RUNNING and device.type == "cpu":
        _RUNNING[-1].wait(work)
    else:
        work.wait()


@final
class _ErrorExchange:
    """The processes of a mesh, as their errors are known to this one."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.world = dist.group.WORLD
        self._ranks, self._round, self._reason = ranks, 0, ""
        self._store: Any = torch_sharding.default_store()
        self._interrupted = False

    def _key(self, name: str) -> str:
        return f"hoglib/{'-'.join(map(str, self._ranks))}/{self._round}/{name}"

    def _count(self, name: str) -> int:
        """How many processes have written under a name; -1 where the store has gone."""
        try:
            return int(self._store.add(self._key(name), 0))
        except Exception:
            return -1

    def _write(self, name: str) -> None:
        try:
            self._store.add(self._key(name), 1)
        except Exception:  # its process has ended
            self._reason = "a process that ended"

    def check(self, caller: str) -> None:
        """Raise after a call in which some were interrupted."""
        if self._reason:
            raise DistributedError(
                f"{caller}: expected {len(self._ranks)} processes that go on together, got "
                f"{self._reason} in an earlier call, in which others were waiting; start them again."
            )

    def told(self) -> str:
        """The error of another process in this call; "" if none is known."""
        if self._count("raised") <= 0:
            return ""
        for rank in self._ranks:
            key = self._key(f"error/{rank}")
            try:
                if self._store.check([key]):
                    return str(self._store.get(key).decode())
            except Exception:
                return ""
        return ""

    def wait(self, work: Any) -> None:
        found = 0.0
        while not self._waited(work):
            if not found and self._count("raised"):
                found = time.monotonic()
            if found and time.monotonic() - found > GRACE_SECONDS:
                self._interrupted = True
                raise DistributedError(
                    "expected all processes to make the same calls, got an error in one of them, which "
                    f"has to be fixed there: {self.told() or 'look at its own output'}"
                )

    def _waited(self, work: Any) -> bool:
        try:
            return torch_sharding.waited(work, POLL_SECONDS)
        except RuntimeError:  # such as of a lost connection, after which nothing can be sent
            self._interrupted = True
            raise

    def leave(self, error: Exception) -> None:
        """Tell the others of an error, and wait for them to raise too."""
        agreed = isinstance(error, DistributedError)
        if not agreed:
            text = (str(error).splitlines() or [""])[0][:300]
            try:
                self._store.set(
                    self._key(f"error/{dist.get_rank()}"),
                    f"process {dist.get_rank()}: {type(error).__name__}: {text}",
                )
            except Exception:
                self._reason = "a process that ended"
        if self._interrupted:
            self._write("interrupted")
        self._write("raised")
        start = time.monotonic()
        while not agreed and 0 <= self._count("raised") < len(self._ranks):
            if time.monotonic() - start > LEAVE_SECONDS:
                self._reason = "an error in this one"
                break
            time.sleep(0.01)
        if self._interrupted or self._count("interrupted"):
            self._reason = self._reason or "an error in one of them"
        self._round, self._interrupted = self._round + 1, False


class _WatchedWait(TorchDispatchMode):
    """Runs torch's functional collectives, which wait without end, as ones that `wait` waits for."""

    def __init__(self, exchange: _ErrorExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = torch_sharding.start_collective(func, args)
        if started is None:
            return func(*args, **(kwargs or {}))
        work, result = started
        self._exchange.wait(work)
        return result()
