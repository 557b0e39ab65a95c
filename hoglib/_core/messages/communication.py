"""Collective calls of torch.distributed: how every process learns that another process failed.

    with together("hvp", mesh):  # around every call that sends messages, and around every message
        ...

If an exception leaves such a call in one process, all other processes still wait for a message.

- The failed process writes the error into the group's store (`dist.Store`). All other processes read
  the text when their own message fails.
- At its next call, the failed process waits until every process has ended the failed call. After the
  group's timeout it raises instead, so messages of different calls are never paired.
- An error of the backend (gloo, NCCL) becomes a DistributedError; this process then sends no message.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib.errors import DistributedError, HoglibError

LONGEST = 500  # characters of an error that other processes quote
ANEW = "start all of them again, or destroy_process_group() and init_process_group() in each"
LOST = "!"  # prefix of an error text: the writer sends no further message

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
# The running call, for all threads: collectives pair by order, so two threads must not call at once.
_RUNNING: list[str] = []


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
        raise DistributedError(
            f"{caller}: expected processes that make the same calls, got an earlier call that "
            f"failed: {failures.lost.rstrip('.')}; {ANEW}."
        )


def _wait(ranks: Ranks) -> str:
    """Wait until all ranks have ended the failed call; return why no message can follow, or ""."""
    keys = [_key(ranks, _FAILED[ranks], rank) for rank in ranks]
    try:
        _store().wait(keys)  # as long as a message would
        ended = [_store().get(key).decode() for key in keys]
    except RuntimeError:
        return "the others did not end the call that ended here by an error"
    return next((words.removeprefix(LOST) for words in ended if words.startswith(LOST)), "")


def _end(error: BaseException, ranks: Ranks, words: str) -> None:
    """Write into the store that this process ended the call, and the error's text."""
    error.__hoglib_told__ = True  # type: ignore[attr-defined]
    failures = _FAILURES.setdefault(dist.group.WORLD, _Failures())
    failures.open.add(ranks)
    if words.startswith(LOST):
        failures.lost = words.removeprefix(LOST)
    _FAILED[ranks] += 1
    with suppress(Exception):  # the process that holds the store may have ended
        _store().set(_key(ranks, _FAILED[ranks], dist.get_rank()), words)


def _words(ranks: Ranks) -> str:
    """The error text of another process that ended the running call, or ""."""
    with suppress(Exception):
        for rank in ranks:
            key = _key(ranks, _FAILED[ranks] + 1, rank)
            if rank != dist.get_rank() and _store().check([key]):
                words = _store().get(key).decode()
                if words.startswith(LOST):
                    return words.removeprefix(LOST)
                if words:
                    return f"process {rank}: {words}"
    return ""


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
    another `together`."""
    if _RUNNING:
        yield
        return
    if _FAILED:
        _check(caller)
    _RUNNING.append(caller)
    try:
        yield
    except BaseException as error:
        _RUNNING.clear()  # before the error is handled
        translate(caller, error, mesh)
        tell(error, mesh)
        raise
    finally:
        _RUNNING.clear()


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
    words, ended = _words(ranks), ""
    if words:
        got = f"an error in {words.rstrip('.')}. Correct it there, and {ANEW}"
    elif "imed out" in text or "imeout" in text:
        ended = "waited longer than the timeout of the group"
        got = (
            "one that took no part within the timeout of their group: it ended, waits elsewhere, or "
            f"takes longer than timeout= allows; look at the output of the others, and {ANEW}"
        )
    else:
        ended = "lost the connection to a process, which ended"
        got = (
            "one that ended, as a process that is killed or interrupted does, or made another call; "
            f"look at the output of the others, and {ANEW}"
        )
    said = DistributedError(
        f"{caller}: expected all {len(ranks)} processes to make the same calls, got {got}. "
        f"(torch says: {first[:200]})"
    )
    _end(said, ranks, LOST + (words or f"process {dist.get_rank()}: {caller} {ended}"))
    raise said from error
