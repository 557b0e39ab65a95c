"""Sharded parameters on GPUs by NCCL: products, spectra, penalties and meta-gradients, with one process
for each GPU, equal those of one process on the CPU."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hoglib as hog
from hoglib._core.substrate import placement
from tests.meta.test_sharded import tasks
from tests.several_processes import found_by_each
from tests.test_sharded_models import (
    Critic,
    critic_loss,
    data,
    gathered,
    model,
    part,
    shard,
    vectors,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not dist.is_nccl_available(), reason="processes on GPUs need NCCL"),
]
PRODUCTS = {
    "hvp": hog.hvp,
    "hvp, remat": partial(hog.hvp, remat=["block"]),
    "hvp, forward": partial(hog.hvp, mode="forward-over-reverse"),
    "ggn_vp": hog.ggn_vp,
    "fisher_vp": hog.fisher_vp,
}


def moved(tree, device):
    return {name: x.to(device) for name, x in tree.items()}


def error(found, expected):
    """The largest difference of two trees, of which one is on GPUs."""
    return max(
        float((placement.full_tensor(x).detach().cpu() - expected[name].detach()).abs().max())
        for name, x in found.items()
    )


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}


def on_gpus(rank, folder, found):
    world, device = dist.get_world_size(), torch.device("cuda", rank)
    rows, (x, y) = part(rank, world), data()
    mine = x[rows].to(device), y[rows].to(device)
    net, one = shard(model().to(device)), model()
    params, own = hog.trainable_params(net), dict(one.named_parameters())
    ours, theirs = (hog.functional_loss(each, F.cross_entropy) for each in (net, one))
    v = vectors(params)
    along = moved(gathered(v), "cpu")
    for name, product in PRODUCTS.items():
        (value, got), (expected, want) = (
            product(ours, params, v, mine),
            product(theirs, own, along, (x, y)),
        )
        found[name] = max(abs(float(value) - float(expected)), error(got, want))
    A = hog.GGNOperator(ours, params, [mine])
    B = hog.GGNOperator(theirs, own, [(x, y)])
    found["solve"] = error(
        A.solve(v, damping=3.0, tol=1e-12), B.solve(along, damping=3.0, tol=1e-12)
    )
    for basis in (None, "cpu"):
        pairs = [
            op.eigsh(2, generator=torch.Generator().manual_seed(0), basis_device=basis)
            for op in (A, B)
        ]
        found[f"eigsh, {basis}"] = float((pairs[0].values.cpu() - pairs[1].values).abs().max())
    # training steps with penalties, and the meta-gradient of tasks
    critic, whole = shard(Critic().double().to(device)), Critic().double()
    for step in (0, 1):
        critic_loss(critic, mine[0], step).backward()
        critic_loss(whole, x, step).backward()
        found[f"penalties, {step}"] = error(gradients(critic), gradients(whole))
    for each, these in ((net, tasks(rows)), (one, tasks())):
        on = next(each.parameters()).device
        these = [tuple(t.to(on) for t in pair) for pair in these]
        maml = hog.MAML(each, F.cross_entropy, inner_lr=0.3, inner_steps=2, over_tasks="loop")
        maml.loss(tuple(these)).backward()
    found["MAML"] = error(gradients(net), gradients(one))


def processes():
    """One for each GPU, of at most two, which share the batches evenly."""
    return min(torch.cuda.device_count(), 2)


def test_processes_on_gpus_equal_one_on_the_cpu(tmp_path):
    for rank, found in enumerate(found_by_each(on_gpus, tmp_path, processes(), "nccl")):
        for name, difference in found.items():
            assert difference < 1e-9, (rank, name, difference)
