"""Processes that find each other by gloo, and what each of them wrote down."""

import datetime
import gc
import json
import os
import signal
import warnings
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from hoglib._core.torch_api import pytree
from tests.memory import peak_bytes

# A server imports once what takes seconds, and each process is a copy of it.
multiprocessing.set_forkserver_preload([
    "lightning.pytorch", "torch.distributed.fsdp", "torch._inductor.decomposition", "pytest", "hoglib",
])  # fmt: skip


# Of the group of processes. None waits for it but in a test that fails, however busy the machine is.
TIMEOUT = datetime.timedelta(seconds=300)
TIMED_OUT = "imed out"  # what torch says then
WAIT = torch.ops._c10d_functional.wait_tensor.default


def found_by_each(function, folder, count=2, backend="gloo"):
    """function(rank, folder, found) in each of count processes, which fills the dict `found` with what
    JSON can hold; the dicts. Of the backend nccl each process has a GPU."""
    multiprocessing.start_processes(
        _run, (function, folder, count, backend), nprocs=count, start_method="forkserver"
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def found_by_those_left(function, folder, count=3):
    """The same of processes that may end in any way; None of one that has written nothing down."""
    kind = multiprocessing.get_context("forkserver").Process
    given = [(rank, function, folder, count, "gloo") for rank in range(count)]
    processes = [kind(target=_run, args=args) for args in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT.total_seconds())
        process.kill()  # gloo waits for ever for a process that ended while they met
    files = [folder / f"{rank}.json" for rank in range(count)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def new_group(folder, name, seconds):
    """Make a new default group of the same processes, whose messages wait for so long."""
    rank, count = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    timeout = datetime.timedelta(seconds=seconds)
    meet = f"file://{folder}/{name.replace(' ', '-')}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count, timeout=timeout)


@contextmanager
def alone():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def exit_code_of(function, *args):
    """That of a process of its own that calls a function of a module; -n where signal n ended it."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def raised_by(calls):
    """The class and the message of what each of some named calls raises."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "", "nothing was raised"
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return found


def assert_raised(found, expected, rank):
    """What `raised_by` found is, of each name, the class and the words that are expected."""
    for name, (kind, words) in expected.items():
        assert found[name][0] == kind, (rank, name, found[name])
        assert words in found[name][1], (rank, name, found[name])


def peak_held(run):
    """The most bytes of tensors made by `run` that it held at one time: the same number on every run.

    What only the backend holds does not count: its threads free what they sent when they get to it, which
    is later where they share a processor.
    """
    gc.collect()
    with _BuffersOfTheirOwn():
        return peak_bytes(run, torch.device("cpu"))


class Wire(TorchDispatchMode):
    """Counts messages, and the bytes that a ring of processes sends for them from each."""

    def __init__(self):
        super().__init__()
        self.messages, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in PARTS:
            tensors = [x for x in pytree.leaves(list(args)) if isinstance(x, torch.Tensor)]
            size = sum(x.numel() * x.element_size() for x in tensors)
            self.messages[PARTS[name][0]] += 1
            self.bytes[PARTS[name][0]] += size * PARTS[name][1](dist.get_world_size())
        return func(*args, **(kwargs or {}))


PARTS = {  # how much a process sends, in units of what it gives to the operation
    "all_gather_into_tensor": ("gathers", lambda n: n - 1),
    "reduce_scatter_tensor": ("averages", lambda n: (n - 1) / n),  # how shards are averaged
    "allreduce_": ("sums", lambda n: 2 * (n - 1) / n),
}  # fmt: skip


class _BuffersOfTheirOwn(TorchDispatchMode):
    """Gives collectives of the backend copies of their tensors, and copies back what they wrote."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and func is not WAIT:
            return WAIT(func(*pytree.map_tensors(torch.clone, list(args)))).clone()
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        pairs = []

        def copy(x):
            pairs.append((x, x.clone()))
            return pairs[-1][1]

        returned = func(*pytree.map_tensors(copy, list(args)), **(kwargs or {}))
        (returned[-1] if isinstance(returned, tuple) else returned).wait()
        for x, filled in pairs:
            x.copy_(filled)
        own = {id(filled): x for x, filled in pairs}
        return pytree.map_tensors(lambda x: own[id(x)], returned)


def _run(rank, function, folder, count, backend):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    # what Lightning reads where processes are started for it
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=count,
        timeout=TIMEOUT,
    )  # fmt: skip
    found = {}
    function(rank, folder, found)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
