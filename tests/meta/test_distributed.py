"""Tasks shared out over two processes give what one process gives."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hoglib as hog
from tests.several_processes import found_by_each, raised_by


def tasks(count):
    generator = torch.Generator().manual_seed(0)
    rand = lambda n: torch.randn(count, n, 2, dtype=torch.float64, generator=generator)  # noqa: E731
    return (rand(4), rand(4)), (rand(5), rand(5))


def learner(**options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2)).double()
    options = {"inner_lr": 0.1, "inner_steps": 3, "learn_lr": "parameter", **options}
    kind = options.pop("kind", hog.MAML)
    if kind is not hog.MAML:
        options.pop("learn_lr")
    return kind(model, F.mse_loss, **options)


class Loss(nn.Module):
    """What DistributedDataParallel wraps."""

    def __init__(self, maml):
        super().__init__()
        self.maml = maml

    def forward(self, tasks):
        mine, weight = hog.meta.shard(tasks)
        return weight * self.maml.loss(mine)


CASES = {
    "even": (4, {}),
    "uneven": (5, {}),
    "uneven, remat, looped": (5, {"memory": "remat", "over_tasks": "loop"}),
    "Reptile": (5, {"kind": hog.meta.Reptile}),
    "IMAML": (5, {"kind": hog.meta.IMAML, "inner_steps": 10, "strength": 4.0}),
}


def gradients(count, options):
    maml = learner(**options)
    loss = Loss(maml)
    if dist.is_initialized():
        loss = DistributedDataParallel(loss)
    loss(tasks(count)).backward()
    return [x for p in maml.parameters() for x in p.grad.flatten().tolist()]


def run(rank, folder, found):
    found["too few"] = raised_by({"shard": lambda: hog.meta.shard(tasks(1))})["shard"]
    found |= {name: gradients(*case) for name, case in CASES.items()}


def test_two_processes_equal_one(tmp_path):
    """One test of all cases: to start two processes takes longer than what they do."""
    for found in found_by_each(run, tmp_path):
        assert "at least one task for each of the 2 processes, got 1" in found["too few"][1]
        for name, case in CASES.items():
            ours, theirs = torch.tensor(found[name]), torch.tensor(gradients(*case))
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


def test_alone_every_task_is_mine():
    every = tasks(3)
    mine, weight = hog.meta.shard(every)
    assert mine is every
    assert weight == 1.0
