"""Runs the checks of a command: in this process, or in a child, which may die, or never return.

The child judges the Functions in turn and sends what it found. One at which it dies, or that takes too
long, is reported, and another child goes on behind it. What a Function forked ends with its child: that
leads a process group of its own.
"""

import contextlib
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any, NamedTuple

import torch

from hoglib._core.runtime.source_location import error_text
from hoglib.verification.report import Report

START = 300.0  # seconds for a child to import torch and the user's file


class Found(NamedTuple):
    """What is known of one check: its report, or why there is none; with neither, that it began."""

    place: int  # of the target in their order
    label: str
    report: Report | None = None
    why: str = ""


Check = tuple[str, Callable[[], Report]]  # its label, and what it runs
# names, and what makes the checks of each
Targets = Sequence[tuple[str, Callable[[], Iterator[Check]]]]
Make = Callable[[], Targets]


def found_here(
    targets: Targets, seed: int, start: int = 0, making: str = "its inputs could not be made: "
) -> Iterator[Found]:
    """What is found of each target from the start-th on, in this process."""
    for place, (name, checks) in enumerate(targets[start:], start):
        yield Found(place, name)
        torch.manual_seed(seed)
        try:
            made = list(checks())
        except BaseException as error:
            yield Found(place, name, why=making + _error_text(error))
            continue
        for label, check in made:
            yield Found(place, label)
            torch.manual_seed(seed)
            try:
                # the user's code runs, and would print, some hundred times
                with contextlib.redirect_stdout(io.StringIO()):
                    found = Found(place, label, check())
            except BaseException as error:
                found = Found(place, label, why=_error_text(error))
            yield found


def _error_text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt) and parent_process() is None:
        raise error  # in a child only the user's code raises it
    return error_text(error)


def found_in_child(make: Make, seed: int, names: list[str], limit: float) -> Iterator[Found]:
    """What is found of each target, with at most `limit` seconds for a check.

    Args:
        make: Makes the targets, in the child. It is pickled.
        seed: Of torch, set before each check.
        names: Of the targets.
        limit: In seconds.
    """
    start = 0
    while start < len(names):
        at = Found(start, names[start])
        for found in _of_child(make, seed, at, limit):
            at = found
            yield found
        start = at.place + 1


def _of_child(make: Make, seed: int, at: Found, limit: float) -> Iterator[Found]:
    """Until all targets are done, or the child is."""
    # not a fork: a copy of this process would have the locks of its threads, as they were
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(theirs, make, seed, at.place), daemon=True)
    child.start()
    # else the end of the child would not end the pipe
    theirs.close()
    allowed = START
    try:
        while True:
            if not ours.poll(allowed):
                yield at._replace(report=None, why=f"it did not return within {limit:g} seconds.")
                return
            try:
                found: Found | None = ours.recv()
            except EOFError:
                child.join()
                yield at._replace(report=None, why=_describe_exit(child.exitcode))
                return
            if found is None:
                return
            # the child tells when a check begins, so that the limit is of one check
            at, allowed = found, limit
            yield found
    finally:  # also at Ctrl-C
        assert child.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it had not begun, or nothing is left
            _kill_group(child.pid)
        child.kill()
        child.join()
        ours.close()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"it ended the process by {name}: does it write memory that is not its own?"
    return f"it ended the process with exit status {code}."


def _run_child(to: Connection, make: Make, seed: int, start: int) -> None:
    """The child: sends what it finds, and None at the end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports an interrupt
    generation = 0  # of copies, which a Function forks

    def count_copies() -> None:
        """Ends copies of copies at once: those of a Function that forks at each call, and that return
        from it as their original does, would double in number at each."""
        nonlocal generation
        generation += 1
        if generation > 1:
            os._exit(0)

    if hasattr(os, "fork"):  # not on Windows
        # a group of its own, in which what it forks is killed with it
        os.setpgid(0, 0)
        os.register_at_fork(after_in_child=count_copies)
    Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the user's code runs some hundred times

    def send(found: Found | None) -> None:
        if generation:  # a Function forked this one, which went on as its original does
            os._exit(0)
        to.send(found)

    for found in found_here(make(), seed, start):
        send(found)
    send(None)


def _end_with_parent() -> None:
    """What does not return would go on when the command is killed, which cannot end it then."""
    parent: Any = parent_process()
    wait([parent.sentinel])
    _kill_group(0)
    os._exit(1)


def _kill_group(leader: int) -> None:
    if hasattr(os, "killpg"):  # not on Windows
        os.killpg(leader, signal.SIGKILL)
