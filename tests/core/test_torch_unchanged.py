"""No entry point leaves a change in torch: not after it returned, nor after an error, nor from threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType

import pytest
import torch
import torch._dynamo  # which changes torch when it is imported, as the first compilation does
import torch.utils.checkpoint
from torch import nn
from torch.autograd import Function, forward_ad
from torch.autograd import function as autograd_function

import hoglib as hog
from hoglib import penalties
from hoglib._core.substrate.detachment import DetachmentWatch
from hoglib._core.torch_api import function_watch, torch_internals
from tests.functions import Cube
from tests.verification.test_entry_points import ENTRY_POINTS, FIRST_ORDER, X, with_loss

HOLDERS = (
    torch, torch._C, torch.Tensor, torch.func, torch.nn.functional, nn.Module, nn.Parameter, type(nn.Parameter),
    torch.autograd, Function, *Function.__mro__[1:-1], type(Function), autograd_function,
    torch.autograd.Variable, type(torch.autograd.Variable), torch.autograd.graph, forward_ad, torch.overrides,
    torch._functorch.eager_transforms, torch._functorch.pyfunctorch, torch._functorch.autograd_function,
    torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction, torch.utils._pytree,
)  # fmt: skip
# What torch itself counts or notes there.
OF_TORCH = {"JVP_NESTING", "_current_level"}
JUDGES = {
    "verify": lambda function: hog.verify(function, X),
    "audit": with_loss(lambda loss, p, v, b: hog.audit(loss, p, b)),
    "check": lambda function: penalties.check(lambda critic, real: penalties.r1(critic, real), "r1"),
    "graph": with_loss(lambda loss, p, v, b: hog.graph(loss, p, b)),
}  # fmt: skip
CALLS = {**ENTRY_POINTS, **FIRST_ORDER, **JUDGES}
del CALLS["CurvatureMonitor"]  # Lightning, when it is imported, replaces torch.compile


def attributes():
    """Those of torch, by holder and name; modules that torch imports in the meantime are none."""
    return {
        (f"{getattr(holder, '__module__', '')}.{holder.__name__}", name): value
        for holder in HOLDERS
        for name, value in vars(holder).items()
        if name not in OF_TORCH and not isinstance(value, ModuleType)
    } | {("torch._dynamo.eval_frame", "_stance"): torch._dynamo.eval_frame._stance}


def changed(before):
    after = attributes()
    return [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]


def failing(x):
    y = Cube.apply(x)
    with DetachmentWatch():
        nn.Parameter(y.detach())
        raise ZeroDivisionError


def call(name, function):
    """Calls an entry point; what it raises or warns of is of no interest here."""
    with suppress(Exception):
        CALLS[name](function)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_nothing_of_torch_is_changed(name):
    before = attributes()
    call(name, Cube.apply)
    assert changed(before) == []
    call(name, failing)
    assert changed(before) == []


@pytest.mark.filterwarnings("ignore")
def test_nothing_of_torch_is_changed_by_two_threads():
    before, names = attributes(), ("hvp", "hessian", "verify", "r1")

    def run(_):
        for name in names:
            call(name, Cube.apply)
            call(name, failing)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert changed(before) == []


WATCHES = {
    "functions": lambda: function_watch.watching_functions(lambda function, args: None),
    "compiled pieces": torch_internals.eagerly,
    "constructors": lambda: torch_internals.watching_constructors(lambda make, *_: make),
}


@pytest.mark.parametrize("watching", WATCHES.values(), ids=WATCHES)
def test_what_watches_stands_in_torch_until_the_last_one_leaves(watching):
    before = attributes()
    entered, leave = threading.Event(), threading.Event()

    def other():
        with watching():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with watching():
        standing = changed(before)
        thread.start()
        entered.wait()
        assert standing
        assert set(changed(before)) == set(standing)
    assert set(changed(before)) == set(standing)
    leave.set()
    thread.join()
    assert changed(before) == []


def test_many_threads_enter_and_leave():
    before = attributes()

    def run(_):
        for watching in [*WATCHES.values()] * 300:
            with watching():
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert changed(before) == []
