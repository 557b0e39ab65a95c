"""Calls that processes of torch.distributed make together, and how each learns that another one failed.

    with together("hvp", mesh):  # around every call that sends messages, and around every message
        ...

An exception that leaves such a call ends it in one process; the others still wait for its messages.

- Its words are written into the store of the group. The others read them when their message fails.
- The next call of that process waits until all others have ended theirs by an error as well. Where they
  have not within the timeout of the group, it raises: messages of different calls are never paired.
- What the backend raises becomes a DistributedError. After it no further message is sent.
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
LOST = "!"  # before the words of a process that sends no further message

Ranks = tuple[int, ...]


@final
@dataclass
class _Failures:
    """Calls of this process that ended by an error, in one default group.

    open: the sets of processes, some of which may not have ended their last failed call.
    lost: why no message is sent any more; empty while messages are sent.
    """

    open: set[Ranks] = field(default_factory=set)
    lost: str = ""


_FAILURES: WeakKeyDictionary[Any, _Failures] = WeakKeyDictionary()  # of default groups
# How many calls of each set of processes have failed here: over all groups, because torchrun's store
# outlives a group.
_FAILED: Counter[Ranks] = Counter()
# The running call, in any thread: messages of two threads would meet the wrong ones in any case.
_RUNNING: list[str] = []


def _store() -> Any:
    return dist.group.WORLD.get_group_store()  # type: ignore[union-attr]


def _key(ranks: Ranks, number: int, rank: int) -> str:
    return f"hoglib/{','.join(map(str, ranks))}/{number}/{rank}"


def _check(caller: str) -> None:
    """Raise if a call that failed here has not ended in the others."""
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
    """Wait until processes have ended their failed call; return why no message can follow."""
    keys = [_key(ranks, _FAILED[ranks], rank) for rank in ranks]
    try:
        _store().wait(keys)  # as long as a message would
        ended = [_store().get(key).decode() for key in keys]
    except RuntimeError:
        return "the others did not end the call that ended here by an error"
    return next((words.removeprefix(LOST) for words in ended if words.startswith(LOST)), "")


def _end(error: BaseException, ranks: Ranks, words: str) -> None:
    """Write into the store that the call of these processes ended here, and why."""
    error.__hoglib_told__ = True  # type: ignore[attr-defined]
    failures = _FAILURES.setdefault(dist.group.WORLD, _Failures())
    failures.open.add(ranks)
    if words.startswith(LOST):
        failures.lost = words.removeprefix(LOST)
    _FAILED[ranks] += 1
    with suppress(Exception):  # the process that holds the store may have ended
        _store().set(_key(ranks, _FAILED[ranks], dist.get_rank()), words)


def _words(ranks: Ranks) -> str:
    """The error by which another process has ended the present call; empty if none has."""
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
    """Those of a mesh; None is the default group."""
    return tuple(range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist())


def shares_messages() -> bool:
    """Whether there is another process of torch.distributed."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_sharded(value: object) -> bool:
    """Whether it is a DTensor, without importing the module that defines them."""
    library: Any = sys.modules.get("torch.distributed.tensor")  # None where nothing imported it
    return library is not None and isinstance(value, library.DTensor)


def mesh_of(tensors: Iterable[Any]) -> Any:
    """The processes that share tensors, of several meshes the largest; None without a DTensor."""
    meshes = (x.device_mesh for x in tensors if is_sharded(x))
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def timeout() -> Any:
    """How long a message of the default group is waited for."""
    return _store().timeout


@contextmanager
def together(caller: str, mesh: Any = None) -> Iterator[None]:
    """Inside, the processes of a mesh, by default all, make one call together. Within another one it
    does nothing."""
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
    """Let the other processes of a mesh read an error that ends a call that they make together."""
    if shares_messages() and not (hasattr(error, "__hoglib_told__") or _is_of_backend(error)):
        words = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")[:LONGEST]
        # a DistributedError is raised in all, or says what another process wrote
        _end(error, _ranks(mesh), "" if isinstance(error, DistributedError) else words)


def tell_sharers(error: BaseException, arguments: Tree, processes: object = None) -> None:
    """Let the processes that share parameters, or by `processes=` data, know of an error of a call."""
    if shares_messages():
        mesh = mesh_of(pytree.leaves(arguments))
        if mesh is not None or processes is not None:
            tell(error, mesh)


def words_of_others(mesh: Any = None) -> str:
    """Which of the other processes ended the call, and by what error; else where to look."""
    return _words(_ranks(mesh)) or "one of them: look at its own output"


def _is_of_backend(error: BaseException) -> bool:
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    plain = isinstance(error, RuntimeError) and not isinstance(error, HoglibError)
    # gloo's messages begin with its file; other time-outs are the user's, as those of a DataLoader
    return plain and any(name in str(error).lower() for name in ("gloo", "nccl"))


def translate(caller: str, error: BaseException, mesh: Any = None) -> None:
    """Raise DistributedError for an error of the communication."""
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
