"""Training steps with a penalty in two processes, against the same steps in one process.

What came of it is "mean", where the gradients of every step are those of one process with both shards;
"refused", where DistributedError was raised in both processes before an optimizer could take the first wrong
gradient; or else what went wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hoglib import penalties

STEPS, HALF = 2, 4


def critic():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, 1))
    return net.double()


def data(step):
    """Both shards of real and fake."""
    g = torch.Generator().manual_seed(100 + step)
    shape, dtype = (2 * HALF, 3), torch.float64
    return torch.randn(shape, generator=g, dtype=dtype), 1 + torch.randn(
        shape, generator=g, dtype=dtype
    )


def shard(tensors):
    start = HALF * dist.get_rank()
    return [x[start : start + HALF] for x in tensors]


def by_hand(critic, x, give_outputs=False):
    x = x.detach().requires_grad_()
    y = critic(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    penalty = (g**2).flatten(1).sum(1).mean() / 2
    return (penalty, y) if give_outputs else penalty


def by_hoglib(critic, x, give_outputs=False):
    return penalties.r1(critic, x, return_outputs=give_outputs)


def loss(critic, real, fake):
    return critic(fake).mean() - critic(real).mean()


def one_forward(gp, scored, penalised, real, fake):
    penalty, y = gp(penalised, real, give_outputs=True)
    (penalty - y.mean()).backward()


def both_forwards(gp, scored, penalised, real, fake, penalty_first):
    both = gp(penalised, real), loss(scored, real, fake)
    for value in both if penalty_first else reversed(both):
        value.backward()


def several(*values):
    for value in values:
        value().backward()


# How a step goes from the penalty and the loss to gradients
LAYOUTS = {
    "penalty alone": lambda gp, s, p, x, z: gp(p, x).backward(),
    "one backward": lambda gp, s, p, x, z: (loss(s, x, z) + gp(p, x)).backward(),
    "one backward, penalty first": lambda gp, s, p, x, z: (gp(p, x) + loss(s, x, z)).backward(),
    "one forward": one_forward,
    "penalty, then loss": lambda gp, s, p, x, z: several(lambda: gp(p, x), lambda: loss(s, x, z)),
    "loss, then penalty": lambda gp, s, p, x, z: several(lambda: loss(s, x, z), lambda: gp(p, x)),
    "three backwards": lambda gp, s, p, x, z: several(
        lambda: s(z).mean(), lambda: -s(x).mean(), lambda: gp(p, x)
    ),
    "both forwards, then penalty, then loss": lambda *args: both_forwards(*args, True),
    "both forwards, then loss, then penalty": lambda *args: both_forwards(*args, False),
}

# What scores, and what is penalised
CALLS = {
    "ddp": lambda ddp, plain: (ddp, ddp),
    "ddp.module": lambda ddp, plain: (ddp.module, ddp.module),
    "the module from before": lambda ddp, plain: (plain, plain),
    "loss by ddp, penalty by ddp.module": lambda ddp, plain: (ddp, ddp.module),
    "loss by ddp.module, penalty by ddp": lambda ddp, plain: (ddp.module, ddp),
}

WRAPS = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


def gradients(module):
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return torch.cat([g.flatten() for g in grads]).clone()


def outcome(mine, expected, error=None):
    """Of the gradients of each step in this process, and those of one process."""
    all_errors = [None, None]
    dist.all_gather_object(all_errors, error and f"{type(error).__name__}: {error}")
    both = [None, None]
    dist.all_gather_object(both, mine)
    for step, (a, b) in enumerate(zip(*both, strict=True)):
        if not torch.equal(a, b):
            return f"step {step}: processes differ by {float((a - b).abs().max()):.0e}"
        off = float((a - expected[step]).norm() / expected[step].norm())
        if not off < 1e-12:
            return f"step {step}: {off:.0e} from one process"
    if all(e and e.startswith("DistributedError") for e in all_errors):
        return "refused"
    if any(all_errors):
        return f"step {len(mine)}: {all_errors}"
    return "mean" if len(mine) == len(expected) else f"{len(mine)} of {len(expected)} steps"


def train(layout, call, wrap, gp=by_hoglib):
    """Steps of one cell of the matrix."""
    plain, alone = critic(), critic()
    ddp = DistributedDataParallel(plain, **WRAPS[wrap])
    scored, penalised = CALLS[call](ddp, plain)
    sgd, alone_sgd = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, alone))
    mine, expected, error = [], [], None
    for step in range(STEPS):
        alone_sgd.zero_grad()
        LAYOUTS[layout](by_hand, alone, alone, *data(step))
        expected.append(gradients(alone))
        alone_sgd.step()
    for step in range(STEPS):
        sgd.zero_grad()
        try:
            LAYOUTS[layout](gp, scored, penalised, *shard(data(step)))
        except RuntimeError as e:
            error = e
            break
        mine.append(gradients(plain))
        sgd.step()
    return outcome(mine, expected, error)
