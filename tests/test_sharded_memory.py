"""A product, a Lanczos run and a step of WGAN-GP of a model that several processes share: those of one
process, in a part of the memory of parameters and vectors, and what one block needs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib._core.substrate import placement
from hoglib.curvature.algebra import vector_space
from tests.long_tail import FULL
from tests.several_processes import found_by_each, peak_held
from tests.test_sharded_models import spread

WIDTH, BLOCKS = 96, 3
BLOCK = 8 * WIDTH * (WIDTH + 1)  # bytes of the parameters of a block


def network(blocks, sharded):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)]
    net = nn.Sequential(*parts, nn.Linear(WIDTH, 1)).double()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for part in (*parts, net):
            fully_shard(part)
    return net


def samples(rows=slice(None)):
    """One real and one fake sample for each process."""
    generator = torch.Generator().manual_seed(1)
    real, fake = torch.randn(
        2, dist.get_world_size(), WIDTH, dtype=torch.float64, generator=generator
    )
    return real[rows], fake[rows] + 1


def wgan_gp(critic, batch):
    real, fake = batch
    middle = (real + fake) / 2  # which all random points between equal samples are
    penalty = hog.penalties.wgan_gp(critic, middle, middle)
    return critic(fake).mean() - critic(real).mean() + 10 * penalty


def regression(net):
    return hog.functional_loss(
        net, lambda y, batch: F.mse_loss(y[:, 0], batch[1].sum(1)), forward=first
    )


def first(net, batch):
    return net(batch[0])


def critic_loss(net):
    return hog.functional_loss(net, lambda value, batch: value, forward=wgan_gp)


def vector(params):
    return {
        name: spread(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape), p)
        for name, p in params.items()
    }


def slope(net, batch, remat):
    """The gradient of the critic's loss; products and Lanczos runs are those of test_sharded_operators.py."""
    params = hog.trainable_params(net)
    critic = hog.HessianOperator(critic_loss(net), params, [batch], remat=remat)
    return torch.cat([placement.full_tensor(g).flatten() for g in critic.gradient()[1].values()])


def peaks(blocks, batch, remat=True, only=""):
    """The most bytes that each takes beside parameters and data, over those of a block."""
    net = network(blocks, True)
    params = hog.trainable_params(net)
    v = vector(params)
    options = {"remat": remat, "check_deterministic": False}
    H = hog.HessianOperator(regression(net), params, [batch], **options)
    critic = hog.HessianOperator(critic_loss(net), params, [batch], **options)
    generator = torch.Generator()
    calls = {
        "product": lambda: hog.hvp(regression(net), params, v, batch, remat=remat),
        "lanczos": lambda: H.spectral_density(1, steps=2, generator=generator.manual_seed(0)),
        "step": critic.gradient,
    }
    found = {}
    for name, call in calls.items():
        if only not in name:
            continue
        call()
        found[name] = peak_held(call) / BLOCK
    return found


def every(rank, folder, found):
    vector_space.DRAWN_AT_ONCE = 2**10  # fewer numbers than those of a block
    rows = slice(rank, rank + 1)
    ours, theirs = (
        slope(network(BLOCKS, shared), samples(mine), shared)
        for shared, mine in ((True, rows), (False, slice(None)))
    )
    found["error"] = float((ours - theirs).norm() / theirs.norm())
    found["stored"] = peaks(BLOCKS, samples(rows), False, "product")["product"]
    found["most"] = peaks(2 * BLOCKS, samples(rows))


# vectors of the size of the parameters, of which each process holds its part: the gradient and the product; of
# two steps of Lanczos the basis, and of a product of an operator the sum too; the gradient (the sum is made when
# no block runs)
VECTORS = {"product": 2, "lanczos": 2 + 3, "step": 1}
# of further blocks what their runs keep for the backward, the inputs of the process's own examples: 1 / 97 of a
# block for each row of numbers
KEPT = 0.03
# the block that runs: its parameters, a vector, its gradient, and what is averaged, as it is sent and received
ONE_BLOCK = 5


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=FULL)])
def test_processes_equal_one_in_a_part_of_its_memory(count, tmp_path):
    for rank, found in enumerate(found_by_each(every, tmp_path, count)):
        assert found["error"] < 1e-10, (rank, found)
        for name, vectors in VECTORS.items():
            allowed = 2 * BLOCKS * (vectors / count + KEPT) + ONE_BLOCK
            assert found["most"][name] < allowed, (rank, name, found)
        assert found["stored"] > 2 * BLOCKS, (rank, found)  # without remat: parameters and vector
