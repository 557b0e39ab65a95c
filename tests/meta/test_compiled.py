"""The meta-gradient as graphs, compiled and operation by operation; each equal to plain."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from tests.graphs import graphs_of
from tests.meta.networks import as_list, meta_gradient
from tests.meta.test_maml import stacks
from tests.models import Fn
from tests.oracles import relative
from tests.rows import rows


def named():
    """A body and a head, with a layer that vmap of a loss gets wrong."""
    return Fn(
        lambda net, x: net.head(torch.tanh(net.norm(net.body(x)))),
        body=nn.Linear(2, 6), norm=nn.LayerNorm(6), head=nn.Linear(6, 2),
    )  # fmt: skip


def plain_net():
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2))


def with_batch_norm():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def with_a_frozen_layer():
    net = plain_net()
    net[0].requires_grad_(False)
    return net


CASES = {
    "gradient descent": (plain_net, {}),
    "AdamW, learned rates": (plain_net, {"rule": "adamw", "learn_lr": "parameter"}),
    "rates for each step": (plain_net, {"learn_lr": "layer", "lr_per_step": True}),
    "layer norm, multi-step loss": (named, {"step_weights": [0.2, 0.8]}),
    "ANIL, momentum": (named, {"inner_params": ["head"], "rule": "momentum"}),
    "first order": (plain_net, {"first_order": True}),
    "truncated, one task after the other": (plain_net, {"truncate": 1, "over_tasks": "loop"}),
    "batch norm for each step": (with_batch_norm, {"batch_norm": "per_step"}),
    "frozen layer, remat": (with_a_frozen_layer, {"memory": "remat"}),
    "checkpoint": (plain_net, {"memory": "checkpoint"}),
}


def learner(make, compile, **options):
    torch.manual_seed(0)
    model = make().double()
    return hog.MAML(model, F.mse_loss, inner_lr=0.1, inner_steps=2, compile=compile, **options)


def test_weights_of_steps_that_change_take_no_graph_of_their_own():
    ours, plain = (learner(plain_net, mode, step_weights=[1, 1]) for mode in ("eager", False))
    for epoch in range(6):
        ours.step_weights = plain.step_weights = hog.meta.multi_step_weights(2, epoch, 4)
        tasks = stacks()
        assert relative(meta_gradient(ours, tasks), meta_gradient(plain, tasks)) < 1e-12
    # looks inside: how many graphs there are is no public property of a learner
    assert len(graphs_of(ours)) == 2  # with an outer loss after the first step, and without


@rows("case", [*CASES, "a list of tasks"])
def test_a_graph_gives_the_meta_gradient(case):
    tasks = stacks if case in CASES else lambda: as_list(stacks())
    make, options = CASES.get(case, (plain_net, {}))
    torch.manual_seed(1)
    first, second = tasks(), tasks()
    ours, plain = (learner(make, mode, **options) for mode in ("eager", False))
    for given in (first, second):  # the second finds the graph of the first, at other parameters
        assert relative(meta_gradient(ours, given), meta_gradient(plain, given)) < 1e-12
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            with torch.no_grad():
                step = 0.01 * torch.randn_like(p)
                p += step
                q += step
    with torch.no_grad():
        assert abs(ours.loss(first) - plain.loss(first)) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True)), (
        "running statistics"
    )


def test_options_that_change_between_steps_are_heeded():
    tasks = stacks()
    ours, plain = learner(plain_net, "eager"), learner(plain_net, False)
    for name, value in (("inner_steps", 3), ("first_order", True), ("inner_lr", 0.3)):
        setattr(ours, name, value)
        setattr(plain, name, value)
        assert relative(meta_gradient(ours, tasks), meta_gradient(plain, tasks)) < 1e-12


def test_dropout_is_drawn_once_for_a_step_and_its_backward():
    def make():
        return nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.5), nn.Linear(6, 2))

    tasks = stacks()
    ours, plain = learner(make, "eager"), learner(make, False)
    meta_gradient(ours, tasks), meta_gradient(plain, tasks)  # both look at the model at first
    torch.manual_seed(5)
    found = meta_gradient(ours, tasks)
    torch.manual_seed(5)
    assert relative(found, meta_gradient(plain, tasks)) < 1e-12


@pytest.mark.parametrize("wrong", ["fast", "step", 1, None])
def test_a_wrong_way_is_explained(wrong):
    with pytest.raises((TypeError, ValueError), match="compile"):
        learner(plain_net, wrong)


def test_what_cannot_be_captured_is_refused_by_name():
    class Peeks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    maml = hog.MAML(Peeks(2, 2).double(), F.mse_loss, compile="eager", over_tasks="loop")
    with pytest.raises(NotImplementedError, match=r"test_compiled\.py"):
        maml.loss(stacks())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda maml: pickle.loads(pickle.dumps(maml))])
def test_a_copy_has_graphs_of_its_own(again):
    tasks = stacks()
    maml = learner(plain_net, "eager")
    expected = meta_gradient(maml, tasks)
    twin = again(maml)
    with torch.no_grad():
        maml.model[0].weight.zero_()
    assert relative(meta_gradient(twin, tasks), expected) < 1e-12
