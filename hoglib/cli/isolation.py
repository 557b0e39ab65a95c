"""Run the checks of a command in this process, or in a child process, which may die or never return.

A child judges the Functions in turn and sends its results. If it dies at a Function, or takes too long,
that is reported, and a new child continues with the next Function. The child leads a process group of
its own, so that processes forked by a Function end with it.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread, Timer, get_ident
from typing import Any, NamedTuple

import torch

from hoglib._core.runtime.source_location import error_text, user_line
from hoglib.verification.report import Report

START = 300.0  # seconds for a child to import torch and the user's file
LATE = 0.9  # share of the time limit, after which the child says where it is


class News(NamedTuple):
    """News of one check: its report, or why there is none; if it has neither, the check has begun, or
    is late."""

    place: int  # index of the target
    label: str  # name of the check
    report: Report | None = None
    why: str = ""
    late: str = ""  # the line that it is at, ", at file:line"


Check = tuple[str, Callable[[], Report]]  # label, function that runs the check
# name, function that makes the checks
Targets = Sequence[tuple[str, Callable[[], Iterator[Check]]]]
Make = Callable[[], Targets]


def run_here(
    targets: Targets, seed: int, start: int = 0, making: str = "its inputs could not be made: "
) -> Iterator[News]:
    """Run the checks of all targets from index `start` on, in this process."""
    for place, (name, checks) in enumerate(targets[start:], start):
        yield News(place, name)
        torch.manual_seed(seed)
        try:
            made = list(checks())
        except BaseException as error:
            yield News(place, name, why=making + _error_text(error))
            continue
        for label, check in made:
            yield News(place, label)
            torch.manual_seed(seed)
            try:
                # the user's code runs some hundred times: hide its output
                with contextlib.redirect_stdout(io.StringIO()):
                    found = News(place, label, check())
            except BaseException as error:
                found = News(place, label, why=_error_text(error))
            yield found


def _error_text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt) and parent_process() is None:
        raise error  # in a child only the user's code raises it
    return error_text(error)


def run_in_child(make: Make, seed: int, names: list[str], limit: float) -> Iterator[News]:
    """Run the checks of all targets in child processes, with at most `limit` seconds for each check.

    Args:
        make: Makes the targets, in the child; it is pickled.
        seed: Set in torch before each check.
        names: The names of the targets.
        limit: Seconds.
    """
    start = 0
    while start < len(names):
        at = News(start, names[start])
        for found in _of_child(make, seed, at, limit):
            at = found
            yield found
        start = at.place + 1


def _of_child(make: Make, seed: int, at: News, limit: float) -> Iterator[News]:
    """Results of one child, until all targets are done or the child ends."""
    # not fork: a copy of this process would inherit locks held by threads that it does not have
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(
        target=_run_child, args=(theirs, make, seed, at.place, limit), daemon=True
    )
    child.start()
    # otherwise the pipe would stay open after the child's end
    theirs.close()
    allowed = START
    try:
        while True:
            if not ours.poll(allowed):
                why = f"it did not return within {limit:g} seconds{at.late}."
                yield at._replace(report=None, why=why)
                return
            try:
                found: News | None = ours.recv()
            except EOFError:
                child.join()
                yield at._replace(report=None, why=_describe_exit(child.exitcode))
                return
            if found is None:
                return
            # the child announces each check, so that the limit holds for a single check
            at, allowed = found, limit * (1 - LATE if found.late else 1)
            if not found.late:
                yield found
    finally:  # also at Ctrl-C
        assert child.pid is not None
        with contextlib.suppress(ProcessLookupError):  # no group yet, or no process left in it
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


def _run_child(to: Connection, make: Make, seed: int, start: int, limit: float) -> None:
    """The child: sends its results, and None at the end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports an interrupt
    generation = 0  # 1 in a process forked by a Function, 2 in a fork of that process

    def count_copies() -> None:
        """End forks of forks at once. If a Function forks at each call and the copies return from it
        like the original, their number would double with each call."""
        nonlocal generation
        generation += 1
        if generation > 1:
            os._exit(0)

    if hasattr(os, "fork"):  # not on Windows
        # forked processes belong to this group, and are killed with it
        os.setpgid(0, 0)
        os.register_at_fork(after_in_child=count_copies)
    Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the user's code runs some hundred times

    def send(found: News | None) -> None:
        if generation:  # this copy was forked by a Function, and has continued like its original
            os._exit(0)
        to.send(found)

    def tell_line(at: News, own: int = get_ident()) -> None:
        to.send(at._replace(late=f", at {user_line(sys._current_frames()[own])}"))

    late: Timer | None = None  # of the check before
    for found in chain(run_here(make(), seed, start), (None,)):
        if late is not None:
            late.cancel()
            late.join()  # two threads that send at once would mix their bytes
        send(found)
        if found is not None:
            late = Timer(LATE * limit, tell_line, [found])
            late.daemon = True
            late.start()


def _end_with_parent() -> None:
    """Exit if the parent is killed: it can then not end a child that never returns."""
    parent: Any = parent_process()
    wait([parent.sentinel])
    _kill_group(0)
    os._exit(1)


def _kill_group(leader: int) -> None:
    if hasattr(os, "killpg"):  # not on Windows
        os.killpg(leader, signal.SIGKILL)
