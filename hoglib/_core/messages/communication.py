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
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch.distributed as dist

from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_private import private
from hoglib.errors import DistributedError, HoglibError

# what backends of torch.distributed say where a process does not take part
COMMUNICATION = (
    "Connection closed", "Connection reset", "Connection refused", "Broken pipe", "imed out", "imeout",
    "gloo", "NCCL", "ncclUnhandled",
)  # fmt: skip
LONGEST = 500  # of the words of an error that other processes quote
ANEW = "start all of them again, or destroy_process_group() and init_process_group() in each"
_default_store = private("torch.distributed.distributed_c10d._get_default_store", None)

Ranks = tuple[int, ...]
# how a call ended, in the order in which the words are quoted
OWN, OF_ANOTHER, LOST = "0", "1", "2"


@final
class _Calls:
    """The calls of this process that ended by an error.

    inside: whether a call is running. lost: why no message is sent any more. failed: how many calls of
    each set of processes have failed in this one; over all groups, because a store may outlive a group.
    waiting: the sets whose last call has perhaps not ended in all.
    """

    def __init__(self) -> None:
        self.inside, self.lost = False, ""
        self.failed: dict[Ranks, int] = {}
        self.waiting: set[Ranks] = set()
        self._group: Any = lambda: None

    def check(self, caller: str) -> None:
        """Raise where a call that failed here may not have ended in the others."""
        if self._group() is not dist.group.WORLD:  # another one since
            self.waiting.clear()
            self.lost = ""
        while self.waiting and not self.lost:
            self._wait(self.waiting.pop())
        if self.lost:
            raise DistributedError(
                f"{caller}: expected processes that make the same calls, got an earlier call that "
                f"failed: {self.lost.rstrip('.')}; {ANEW}."
            )

    def _wait(self, ranks: Ranks) -> None:
        keys = [_key(ranks, self.failed[ranks], rank) for rank in ranks]
        if _default_store is None:
            return
        try:
            _default_store().wait(keys)  # as long as a message would
            ended = [_default_store().get(key).decode() for key in keys]
        except RuntimeError:
            self.lost = "the others did not end the call that ended here by an error"
            return
        self.lost = next((words[1:] for words in ended if words[0] == LOST), "")

    def tell(self, error: BaseException, ranks: Ranks, how: str, words: str) -> None:
        """Write into the store that the call of these processes ended here, and why."""
        error.__hoglib_told__ = True  # type: ignore[attr-defined]
        self._group = weakref.ref(dist.group.WORLD)
        self.failed[ranks] = self.failed.get(ranks, 0) + 1
        self.waiting.add(ranks)
        if how == LOST:
            self.lost = words
        with suppress(Exception):  # of a store whose process has ended
            _default_store().set(_key(ranks, self.failed[ranks], dist.get_rank()), how + words)

    def words(self, ranks: Ranks) -> str:
        """What another process wrote, whose present call has ended: the cause first."""
        found = []
        with suppress(Exception):
            for rank in ranks:
                key = _key(ranks, self.failed.get(ranks, 0) + 1, rank)
                if rank != dist.get_rank() and _default_store().check([key]):
                    how, words = (text := _default_store().get(key).decode())[0], text[1:]
                    found += [(how, words if how == LOST else f"process {rank}: {words}")]
        return min(found, default=("", ""))[1]


_CALLS = _Calls()


def _key(ranks: Ranks, number: int, rank: int) -> str:
    return f"hoglib/{','.join(map(str, ranks))}/{number}/{rank}"


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
    """How long a message of the default group is waited for; None where torch does not tell."""
    return _default_store and _default_store().timeout


@contextmanager
def together(caller: str, mesh: Any = None) -> Iterator[None]:
    """Inside, the processes of a mesh, by default all, make one call together. Within another one it
    does nothing."""
    if _CALLS.inside:
        yield
        return
    if _CALLS.failed:
        _CALLS.check(caller)
    _CALLS.inside = True
    try:
        yield
    except BaseException as error:
        _CALLS.inside = False  # before what is done with the error
        translate(caller, error, mesh)
        tell(error, mesh)
        raise
    finally:
        _CALLS.inside = False


def tell(error: BaseException, mesh: Any = None) -> None:
    """Let the other processes of a mesh read an error that ends a call that they make together."""
    if shares_messages() and not (hasattr(error, "__hoglib_told__") or _is_of_backend(error)):
        how = OF_ANOTHER if isinstance(error, DistributedError) else OWN
        words = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")[:LONGEST]
        _CALLS.tell(error, _ranks(mesh), how, words)


def tell_sharers(error: BaseException, arguments: Tree, processes: object = None) -> None:
    """Let the processes that share parameters, or by `processes=` data, know of an error of a call."""
    if shares_messages():
        mesh = mesh_of(pytree.leaves(arguments))
        if mesh is not None or processes is not None:
            tell(error, mesh)


def words_of_others(mesh: Any = None) -> str:
    """Which of the other processes ended the call, and by what error; else where to look."""
    return _CALLS.words(_ranks(mesh)) or "one of them: look at its own output"


def _is_of_backend(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, HoglibError):
        return False
    text, known = str(error), getattr(dist, "DistError", ())
    return isinstance(error, known) or any(word in text for word in COMMUNICATION)


def translate(caller: str, error: BaseException, mesh: Any = None) -> None:
    """Raise DistributedError for an error of the communication."""
    if not _is_of_backend(error) or not shares_messages():
        return
    text = str(error)
    ranks, (first, *_) = _ranks(mesh), text.splitlines()
    words, ended = _CALLS.words(ranks), ""
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
    _CALLS.tell(said, ranks, LOST, words or f"process {dist.get_rank()}: {caller} {ended}")
    raise said from error
