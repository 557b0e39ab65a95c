"""Where one process ends inside a call that several make together, the others raise, and none waits for
the timeout of their group."""

import contextlib
import functools
import json
import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib._core.substrate import placement
from tests.long_tail import FULL
from tests.several_processes import (
    TIMED_OUT,
    found_by_each,
    found_by_those_left,
    new_group,
    raised_by,
)
from tests.test_sharded_models import data, part, vectors


class Fragile(torch.autograd.Function):
    """The identity, whose forward, backward or double backward ends in one process, or in all."""

    @staticmethod
    def forward(x, act, stage):
        if stage == 0:
            act()
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.act, ctx.stage = inputs

    @staticmethod
    def backward(ctx, grad):
        if ctx.stage == 1:
            ctx.act()
        return Fragile.apply(grad, ctx.act, {2: 1}.get(ctx.stage, 3)), None, None


class Layer(nn.Module):
    def __init__(self, width, act=None, stage=0):
        super().__init__()
        self.linear, self.act, self.stage = nn.Linear(width, width), act, stage

    def forward(self, x):
        x = self.linear(x).tanh()
        return x if self.act is None else Fragile.apply(x, self.act, self.stage)


def network(act, stage):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(Layer(5), Layer(5, act, stage), Layer(5)).double()
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def product(net, rows, remat=True):
    loss, params = hog.functional_loss(net, F.cross_entropy), hog.trainable_params(net)
    x, y = data()
    return hog.hvp(loss, params, vectors(params), (x[rows], y[rows]), remat=remat)


def by_operator(net, rows, remat=True):
    loss, params = hog.functional_loss(net, F.cross_entropy), hog.trainable_params(net)
    x, y = data()
    return hog.HessianOperator(loss, params, [(x[rows], y[rows])], remat=remat) @ vectors(params)


def meta_step(net, rows, remat=True):
    x, y = data()
    task = ((x[rows], y[rows]),) * 2
    return hog.MAML(net, F.cross_entropy, inner_lr=0.1, remat=remat).loss([task])


def raise_error():
    raise ValueError("a wrong label")


def raise_time_out():
    """As a DataLoader does, which is no error of the communication."""
    raise RuntimeError("DataLoader timed out after 1 seconds")


def end():
    os._exit(0)  # as a kill does, without a word to the others


def raised(call, *args):
    return raised_by({"call": lambda: call(*args)})["call"]


CALLS = {"hvp": product, "operator": by_operator, "MAML": meta_step}
STAGES = ("in a forward", "in a backward", "in a double backward")


def one_fails(call, stage, rank, folder, found):
    torch.manual_seed(0)
    rows = part(rank, 2)
    found["alike"] = raised(call, network(raise_error, stage), rows)
    found["after"] = raised(call, network(None, stage), rows)
    found["one"] = raised(call, network(raise_error if rank == 1 else None, stage), rows)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    end()  # as an error that is not caught does


def one_is_killed(rank, folder, found):
    (folder / f"{rank}.json").write_text("{}")
    found["one"] = raised(product, network(end if rank == 1 else None, 2), part(rank, 2))


CASES = [
    pytest.param(call, stage, id=f"{name} {words}", marks=() if (name, stage) in FIRST else FULL)
    for name, call in CALLS.items()
    for stage, words in enumerate(STAGES)
    for FIRST in [{("hvp", 2), ("operator", 0), ("MAML", 1)}]
]


@pytest.mark.parametrize(("call", "stage"), CASES)
def test_an_error_in_one_process_ends_all(call, stage, tmp_path):
    every = found_by_each(partial(one_fails, call, stage), tmp_path, 2)
    for rank, found in enumerate(every):
        # where all fail alike each has its own error, and the next call works
        assert "a wrong label" in found["alike"][1], found
        assert found["after"][1] == "nothing was raised", found
        kind, words = found["one"]
        assert kind == ("ValueError" if rank == 1 else "DistributedError"), found
        assert ("in process 1: ValueError: a wrong label" in words) == (rank == 0)
        assert TIMED_OUT not in words
        assert len(words.splitlines()) == 1


def test_the_others_end_where_one_is_killed_in_a_backward(tmp_path):
    found, _ = found_by_each(one_is_killed, tmp_path, 2)
    kind, words = found["one"]
    assert kind == "DistributedError"
    assert "no answer from process 1: it ended" in words
    assert TIMED_OUT not in words


# One of three processes ends a call otherwise than the others, and goes on where it lives. What the
# others are told of the first call; and each later call is right in all of them, or raises in all.
SECONDS = 5  # of the group


def sends(number):
    return lambda: os.kill(os.getpid(), number)


def product_with(net, rows, act=None, **options):
    """The sum of the entries of a product."""
    H = hog.HessianOperator(*given(net, act), [taken(rows)], **options)
    product = H @ vectors(H.params)
    return [sum(float(placement.full_tensor(x).sum()) for x in product.values())]


def scores_of(net, rows, act=None, train=None, **options):
    """The influence of examples on two others."""
    batches = [taken(rows)] if train is None else train
    options |= {"solver": "kfac", "kind": "exact", "damping": 1.0}
    return hog.influence(*given(net, act), batches, taken(slice(0, 2)), **options).tolist()


def given(net, act):
    act = functools.cache(act or list)

    def criterion(outputs, y):
        act()
        return F.cross_entropy(outputs, y)

    return hog.functional_loss(net, criterion), hog.trainable_params(net)


def taken(rows):
    return tuple(x[rows] for x in data())


def no_call(*_, **__):
    """As code that fails before the call."""
    time.sleep(2 * SECONDS)
    raise_error()


def plain():
    torch.manual_seed(0)
    return nn.Sequential(Layer(5), Layer(5)).double()


DATA, PARAMETERS = "data", "parameters"
NONE = "in process 1: ArgumentValueError: train: expected at least one batch, got none"
# what is shared -> what happens -> (the call, what process 1 does otherwise in it, what others are told)
ENDS = {
    DATA: {
        "no batches": (scores_of, {"train": []}, NONE),
        "another option": (product_with, {"reduction": "all"}, "in process 1: ArgumentValueError: reduction"),
        "an interrupt": (product_with, {"act": sends(signal.SIGINT)}, "in process 1: KeyboardInterrupt"),
        "late": (product_with, {"act": lambda: time.sleep(2 * SECONDS)}, "no answer from process 1 within the timeout"),
        "no call": (product_with, {"instead": no_call}, "no answer from process 1 within the timeout"),
        "killed": (product_with, {"act": sends(signal.SIGKILL)}, "to make the same calls, got no answer from process 1: it ended"),
    },
    PARAMETERS: {
        "no batches": (scores_of, {"train": []}, NONE),
        "no call": (product_with, {"instead": no_call}, "no answer from process 1 within the timeout"),
        "an error": (product_with, {"act": raise_time_out}, "in process 1: RuntimeError: DataLoader timed out"),
        "an interrupt": (product_with, {"act": sends(signal.SIGINT)}, "in process 1: KeyboardInterrupt"),
        "killed": (product_with, {"act": sends(signal.SIGKILL)}, "to make the same calls, got no answer from process 1: it ended"),
    },
}  # fmt: skip


# no message follows, as another process may still wait for one of the first call, and nobody waits for one
# that is killed
LOST = "an interrupt", "late", "killed"


def ended(*call, **options):
    """What a call returned, or the class and the message of what it raised, and how long it took."""
    start = time.monotonic()
    try:
        found = call[0](*call[1:], **options)
    except BaseException as error:
        found = [type(error).__name__, str(error)]
    return found, time.monotonic() - start


def goes_on(shared, rank, folder, found):
    from torch.distributed.fsdp import fully_shard

    options = {"processes": "sharded"} if shared == DATA else {}
    for name, (call, otherwise, _) in ENDS[shared].items():
        (folder / f"{rank}.json").write_text(json.dumps(found))  # before one is killed
        new_group(folder, name, SECONDS)
        net = plain() if shared == DATA else fully_shard(plain())
        mine = options | (otherwise if rank == 1 else {})
        first = ended(mine.pop("instead", call), net, slice(rank, 6, 3), **mine)
        then = [ended(call, net, slice(6 + rank, None, 3), **options) for _ in range(2)]
        of_all = call(plain(), slice(6, None))
        found[name] = first, then, of_all[rank::3] if call is scores_of else of_all
    (folder / f"{rank}.json").write_text(json.dumps(found))
    end()


@pytest.mark.parametrize("shared", ENDS)
def test_no_process_goes_on_with_a_call_that_ended_otherwise_in_another(shared, tmp_path):
    every = found_by_those_left(partial(goes_on, shared), tmp_path)
    for name, (_, _, words) in ENDS[shared].items():
        for rank, all_found in enumerate(every):
            if name not in all_found:
                assert (name, rank) == ("killed", 1)
                continue
            ((kind, text), seconds), then, of_all = all_found[name]
            if rank != 1:
                assert kind == "DistributedError", (name, rank, kind, text)
                assert words in text, (name, rank, text)
                assert len(text.splitlines()) == 1
                assert seconds < 3 * SECONDS, (name, rank, seconds)
            for later, seconds in then:
                if name in LOST:
                    assert seconds < SECONDS or name != "killed", (name, rank, seconds)
                    assert "an earlier call that failed" in later[1], (name, rank, later)
                assert later[0] == "DistributedError" or torch.allclose(
                    torch.tensor(later), torch.tensor(of_all), rtol=1e-6
                ), (name, rank, later, of_all)


def in_threads(shared, rank, folder, found):
    """Two threads of a process make calls of the same kind on other data, in another order in each."""
    from torch.distributed.fsdp import fully_shard

    new_group(folder, "threads", SECONDS)
    options = {"processes": "sharded"} if shared == DATA else {}
    nets = [plain() if shared == DATA else fully_shard(plain()) for _ in range(2)]
    calls, both = {}, threading.Barrier(2)

    def work(i):
        act = partial(both.wait, SECONDS)  # the second never gets there, and the first goes on
        rows = slice(6 * i + rank, 6 * i + 6, 2)
        calls[i] = ended(product_with, nets[i], rows, functools.partial(suppressed, act), **options)

    threads = [threading.Thread(target=work, args=(i,)) for i in ((0, 1), (1, 0))[rank]]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    (folder / f"{rank}.json").write_text(json.dumps([calls[0], calls[1]]))
    end()


def suppressed(act):
    with contextlib.suppress(threading.BrokenBarrierError):
        act()


@pytest.mark.parametrize("shared", ENDS)
def test_two_threads_make_no_calls_together(shared, tmp_path):
    for found in found_by_those_left(partial(in_threads, shared), tmp_path, 2):
        for (kind, text), _ in found:
            assert kind == "DistributedError", found
            assert "one call at a time that processes make together, got HessianOperator" in text
