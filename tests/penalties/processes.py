"""Training steps with a penalty in two processes, beside the same steps in one process.

What came of it is "mean", where the gradients of every step are those of one process with both shards;
"refused", where NotAveraged was raised in both processes before an optimizer could take the first wrong
gradient; or else what went wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hoglib.penalties._distributed import averaged

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


def bare(critic, x, give_outputs=False):
    x = x.detach().requires_grad_()
    y = critic(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    penalty = (g**2).flatten(1).sum(1).mean() / 2
    return (penalty, y) if give_outputs else penalty


def guarded(critic, x, give_outputs=False):
    penalty, y = bare(critic, x, give_outputs=True)
    penalty = averaged("r1", penalty, list(critic.parameters()), y)
    return (penalty, y) if give_outputs else penalty


def loss(critic, real, fake):
    return critic(fake).mean() - critic(real).mean()


def one_forward(r1, scored, penalised, real, fake):
    penalty, y = r1(penalised, real, give_outputs=True)
    (penalty - y.mean()).backward()


def both_forwards(r1, scored, penalised, real, fake, penalty_first):
    both = r1(penalised, real), loss(scored, real, fake)
    for value in both if penalty_first else reversed(both):
        value.backward()


def several(*values):
    for value in values:
        value().backward()


# How a step goes from the penalty and the loss to gradients
LAYOUTS = {
    "penalty alone": lambda r1, s, p, x, z: r1(p, x).backward(),
    "one backward": lambda r1, s, p, x, z: (loss(s, x, z) + r1(p, x)).backward(),
    "one backward, penalty first": lambda r1, s, p, x, z: (r1(p, x) + loss(s, x, z)).backward(),
    "one forward": one_forward,
    "penalty, then loss": lambda r1, s, p, x, z: several(lambda: r1(p, x), lambda: loss(s, x, z)),
    "loss, then penalty": lambda r1, s, p, x, z: several(lambda: loss(s, x, z), lambda: r1(p, x)),
    "three backwards": lambda r1, s, p, x, z: several(
        lambda: s(z).mean(), lambda: -s(x).mean(), lambda: r1(p, x)
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
    if all(e and e.startswith("NotAveraged") for e in all_errors):
        return "refused"
    if any(all_errors):
        return f"step {len(mine)}: {all_errors}"
    return "mean" if len(mine) == len(expected) else f"{len(mine)} of {len(expected)} steps"


def train(layout, call, wrap, r1=guarded):
    """Steps of one cell of the matrix."""
    plain, alone = critic(), critic()
    ddp = DistributedDataParallel(plain, **WRAPS[wrap])
    scored, penalised = CALLS[call](ddp, plain)
    sgd, alone_sgd = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, alone))
    mine, expected, error = [], [], None
    for step in range(STEPS):
        alone_sgd.zero_grad()
        LAYOUTS[layout](bare, alone, alone, *data(step))
        expected.append(gradients(alone))
        alone_sgd.step()
    for step in range(STEPS):
        sgd.zero_grad()
        try:
            LAYOUTS[layout](r1, scored, penalised, *shard(data(step)))
        except RuntimeError as e:
            error = e
            break
        mine.append(gradients(plain))
        sgd.step()
    return outcome(mine, expected, error)
