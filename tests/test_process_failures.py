"""Where one process ends inside a call that several make together, the others raise, and none waits for
the timeout of their group."""

import json
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from tests.long_tail import FULL
from tests.several_processes import TIMED_OUT, found_by_each, raised_by
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
        assert ("got one that ended" in words) == (rank == 0)
        assert TIMED_OUT not in words
        assert len(words.splitlines()) == 1


def test_the_others_end_where_one_is_killed_in_a_backward(tmp_path):
    found, _ = found_by_each(one_is_killed, tmp_path, 2)
    kind, words = found["one"]
    assert kind == "DistributedError"
    assert "got one that ended" in words
    assert TIMED_OUT not in words
