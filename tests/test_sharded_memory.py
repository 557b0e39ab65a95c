"""A product, a Lanczos run and a step of WGAN-GP of a model that four processes share: those of one process,
in a quarter of the memory of parameters and vectors, and what one block needs."""

import gc

import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from hoglib._core import sharding
from tests.several_processes import found_by_each
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
    real, fake = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=generator)
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


def computed(net, batch, remat):
    """What a product, a Lanczos run, and a step of SGD with the gradient of the critic's loss give."""
    params = hog.trainable_params(net)
    value, product = hog.hvp(regression(net), params, vector(params), batch, remat=remat)
    H = hog.HessianOperator(regression(net), params, [batch], remat=remat)
    density = H.spectral_density(1, steps=3, generator=torch.Generator().manual_seed(0))
    critic = hog.HessianOperator(critic_loss(net), params, [batch], remat=remat)
    loss, gradient = critic.gradient()
    for name, p in params.items():
        p.grad = gradient[name]
    torch.optim.SGD(net.parameters(), 0.1).step()
    stepped = dict(net.named_parameters())
    trees = {"product": product, "step": stepped}
    return {
        "values": torch.stack([value, loss]), "lanczos": density.nodes,
        **{
            key: torch.cat([sharding.whole(p).detach().flatten() for p in tree.values()])
            for key, tree in trees.items()
        },
    }  # fmt: skip


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
        gc.collect()
        # the least of some runs: the backend's threads free what they sent when they get to it
        found[name] = min(peak_allocated(call) for _ in range(3)) / BLOCK
    return found


def every(rank, folder, found):
    rows = slice(rank, rank + 1)
    ours = computed(network(BLOCKS, True), samples(rows), True)
    theirs = computed(network(BLOCKS, False), samples(), False)
    found["errors"] = {
        name: float((x - theirs[name]).norm() / theirs[name].norm()) for name, x in ours.items()
    }
    less, more = (peaks(blocks, samples(rows)) for blocks in (BLOCKS, 2 * BLOCKS))
    found["stored"] = peaks(BLOCKS, samples(rows), False, "product")["product"]
    # of the bytes of further blocks, how many times it takes them, and what it takes at any depth
    found["slope"] = {name: (more[name] - less[name]) / BLOCKS for name in less}
    found["rest"] = {name: 2 * less[name] - more[name] for name in less}


# vectors of the size of the parameters that are alive at one time, as shards, at most: gradient, product and two
# more; twelve of a Lanczos run of some steps between its products, and those of a product; of a step the gradient
# of a batch, the sum and two more
VECTORS = {"product": 4, "lanczos": 14, "step": 4}


def test_four_processes_equal_one_in_a_quarter_of_its_memory(tmp_path):
    for rank, found in enumerate(found_by_each(every, tmp_path, 4)):
        for name, error in found["errors"].items():
            assert error < 1e-10, (rank, name, error)
        for name, vectors in VECTORS.items():
            # activations and what is saved of each block: 1 / 97 for each row of numbers
            assert found["slope"][name] < vectors / 4 + 0.15, (rank, name, found)
            # of one block its parameters, vector, gradient and product, and what is being sent
            assert found["rest"][name] < 8, (rank, name, found)
        assert found["stored"] > 2 * BLOCKS, (rank, found)  # without remat: parameters and vector
