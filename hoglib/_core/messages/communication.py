"""Collective calls of torch.distributed: how every process learns that another process failed.

    with together("hvp", mesh):  # around every call that sends messages, and around every message
        ...

If an exception leaves such a call in one process, all other processes still wait for a message.

- The failed process writes the error into the group's store (`dist.Store`). All other processes read
  the text when their own message fails.
- At its next call, the failed process waits until every process has ended the failed call. After the
  group's timeout it raises instead, so messages of different calls are never paired.
- An error of the backend (gloo, NCCL) becomes a DistributedError, which names the processes that have
  not ended the call as well; this process then sends no message.
- Messages pair by their order, so a call in a second thread raises, and the running one at its end.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hoglib._core.runtime.ambient import logical_thread
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib.errors import DistributedError, HoglibError

LONGEST = 500  # characters of an error that other processes quote
ANEW = "start all of them again, or destroy_process_group() and init_process_group() in each"
LOST = "!"  # prefix of an error text: the writer sends no further message
ALONE = "!!"  # and it has no error of another process to quote
GRACE = timedelta(seconds=1)  # for other processes to notice that a call failed

Ranks = tuple[int, ...]  # the processes that make a call together


@final
@dataclass
class _Failures:
    """The failed calls of this process in one default group.

    open: Ranks of failed calls that another process may still be inside.
    lost: Why this process sends no further message; empty while it sends messages.
    """

    open: set[Ranks] = field(default_factory=set)
    lost: str = ""


_FAILURES: WeakKeyDictionary[Any, _Failures] = WeakKeyDictionary()  # default group -> failures
# Ranks -> number of failed calls in this process. A new group does not reset the number: torchrun's
# store outlives a group.
_FAILED: Counter[Ranks] = Counter()


@final
@dataclass
class _Call:
    """A running call. other: A call that another thread began meanwhile."""

    caller: str
    thread: int
    other: str = ""


_RUNNING: WeakKeyDictionary[Any, _Call] = WeakKeyDictionary()  # default group -> the running call


def _store() -> Any:
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def _key(ranks: Ranks, number: int, rank: int) -> str:
    return f"hoglib/{','.join(map(str, ranks))}/{number}/{rank}"


def _check(caller: str) -> None:
    """Raise if another process has not ended a call that failed here."""
    failures = _FAILURES.get(dist.group.WORLD) if shares_messages() else None
    if failures is None:  # no failure since the group was made
        return
    while failures.open and not failures.lost:
        failures.lost = _wait(failures.open.pop())
    if failures.lost:
        raise _told(
            DistributedError(
                f"{caller}: expected processes that make the same calls, got an earlier call that "
                f"failed: {failures.lost.rstrip('.')}; {ANEW}."
            )
        )


def _wait(ranks: Ranks) -> str:
    """Wait until all ranks have ended the failed call; return why no message can follow, or ""."""
    keys = [_key(ranks, _FAILED[ranks], rank) for rank in ranks]
    try:
        _store().wait(keys)  # as long as a message would
        ended = [_store().get(key).decode() for key in keys]
    except RuntimeError:
        return "the others did not end the call that ended here by an error"
    return next((words.lstrip(LOST) for words in ended if words.startswith(LOST)), "")


def _end(error: BaseException, ranks: Ranks, words: str) -> None:
    """Write into the store that this process ended the call, and the error's text."""
    _told(error)
    failures = _FAILURES.setdefault(dist.group.WORLD, _Failures())
    failures.open.add(ranks)
    if words.startswith(LOST):
        failures.lost = words.lstrip(LOST)
    _FAILED[ranks] += 1
    with suppress(Exception):  # the process that holds the store may have ended
        _store().set(_key(ranks, _FAILED[ranks], dist.get_rank()), words)


def _told(error: BaseException) -> BaseException:
    """Mark an error that `tell` leaves out: it is told, or its call sends no message."""
    error.__hoglib_told__ = True  # type: ignore[attr-defined]
    return error


def _ended(ranks: Ranks, number: int) -> dict[int, str]:
    """What each other process that ended call `number` has written; raises if the store is lost."""
    keys = {rank: _key(ranks, number, rank) for rank in ranks if rank != dist.get_rank()}
    return {rank: _store().get(key).decode() for rank, key in keys.items() if _store().check([key])}


def _words(ranks: Ranks) -> str:
    """The error text of another process that ended the running call, or ""."""
    with suppress(Exception):
        for rank, words in _ended(ranks, _FAILED[ranks] + 1).items():
            if words and not words.startswith(ALONE):
                return words[1:] if words.startswith(LOST) else f"process {rank}: {words}"
    return ""


def _absent(ranks: Ranks, timed_out: bool) -> str:
    """For messages: the processes that do not end the call that failed here."""
    who = "one"
    with suppress(Exception):  # the process that holds the store may have ended
        with suppress(RuntimeError):
            _store().wait([_key(ranks, _FAILED[ranks], rank) for rank in ranks], GRACE)
        ended = _ended(ranks, _FAILED[ranks])
        absent = [str(rank) for rank in ranks if rank not in ended and rank != dist.get_rank()]
        if not absent:
            return next(filter(None, ended.values())).lstrip(LOST)
        who = f"process {' and '.join(absent)}"
    if timed_out:
        return (
            f"no answer from {who} within the timeout of their group: it ended, waits elsewhere, or "
            "takes longer than timeout= allows"
        )
    return f"no answer from {who}: it ended, as where it is killed or interrupted, or made another call"


def _ranks(mesh: Any) -> Ranks:
    """The ranks of a mesh; of the default group for None."""
    return tuple(range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist())


def shares_messages() -> bool:
    """Whether there is another process of torch.distributed."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor, without importing torch.distributed.tensor."""
    library: Any = sys.modules.get("torch.distributed.tensor")  # None before the first import
    return library is not None and isinstance(value, library.DTensor)


def mesh_of(tensors: Iterable[Any]) -> Any:
    """The largest mesh of DTensors among the tensors; None without a DTensor."""
    meshes = (x.device_mesh for x in tensors if is_sharded(x))
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def timeout() -> Any:
    """The timeout of the default group."""
    return _store().timeout


@contextmanager
def together(caller: str, mesh: Any = None) -> Iterator[None]:
    """Mark a call that all processes of a mesh (by default of the group) make. Does nothing inside
    another `together`; raises in another thread."""
    if not shares_messages():
        yield
        return
    group, mine = dist.group.WORLD, _Call(caller, logical_thread())
    running = _RUNNING.setdefault(group, mine)  # of two threads that begin, one finds the other's
    if running is not mine:
        _check_thread(running, mine)
        yield
        return
    try:
        if _FAILED:
            _check(caller)
        try:
            yield
            if mine.other:
                said = _two_threads(caller, mine.other)
                _end(said, _ranks(mesh), str(said))
                raise said
        except BaseException as error:
            translate(caller, error, mesh)
            tell(error, mesh)
            raise
    finally:
        del _RUNNING[group]


def _check_thread(running: _Call, mine: _Call) -> None:
    """Raise for a call in another thread than the running one, which raises at its end, too."""
    # autograd's worker threads, which Python did not start, run nodes of the running call
    workers = isinstance(threading.current_thread(), threading._DummyThread)
    if running.thread != mine.thread and not workers:
        running.other = mine.caller
        raise _told(_two_threads(mine.caller, running.caller))  # the running call tells it


def _two_threads(caller: str, other: str) -> DistributedError:
    return DistributedError(
        f"{caller}: expected one call at a time that processes make together, got {other} in another "
        "thread. Messages pair by their order, which threads change: make these calls in one thread."
    )


def tell(error: BaseException, mesh: Any = None) -> None:
    """Write an error that ends a collective call into the store, for all other ranks of the mesh."""
    if shares_messages() and not (hasattr(error, "__hoglib_told__") or _is_of_backend(error)):
        words = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")[:LONGEST]
        # every process raises this DistributedError, or it quotes another process
        _end(error, _ranks(mesh), "" if isinstance(error, DistributedError) else words)


def tell_sharers(error: BaseException, arguments: Tree, processes: object = None) -> None:
    """`tell`, for a call with sharded parameters among its arguments, or with `processes=`."""
    if shares_messages():
        mesh = mesh_of(pytree.leaves(arguments))
        if mesh is not None or processes is not None:
            tell(error, mesh)


def words_of_others(mesh: Any = None) -> str:
    """For messages: the failed process and its error, or advice on where to look."""
    return _words(_ranks(mesh)) or "one of them: look at its own output"


def _is_of_backend(error: BaseException) -> bool:
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    plain = isinstance(error, RuntimeError) and not isinstance(error, HoglibError)
    # gloo's errors contain the path of a source file; "timed out" alone may be a DataLoader's error
    return plain and any(name in str(error).lower() for name in ("gloo", "nccl"))


def translate(caller: str, error: BaseException, mesh: Any = None) -> None:
    """Raise a DistributedError for an error of the backend."""
    if not _is_of_backend(error) or not shares_messages():
        return
    text = str(error)
    ranks, (first, *_) = _ranks(mesh), text.splitlines()
    words, timed_out = _words(ranks), "imed out" in text or "imeout" in text
    why = "waited longer than the timeout of the group" if timed_out else "lost a connection"
    mine = f"{ALONE}process {dist.get_rank()}: {caller} {why}"
    _end(error, ranks, LOST + words if words else mine)
    got = f"an error in {words.rstrip('.')}" if words else _absent(ranks, timed_out)
    advice = "correct it there" if words else "look at the output of each"
    said = DistributedError(
        f"{caller}: expected all {len(ranks)} processes to make the same calls, got {got}; {advice}, "
        f"and {ANEW}. (torch says: {first[:200]})"
    )
    raise _told(said) from error
