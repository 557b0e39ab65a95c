"""What is not of the matrix: steps that must not be refused, and modules out of the ordinary."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from hoglib import functional_loss, penalties, trainable_params
from hoglib.penalties.distributed import average_gradients
from tests.penalties.processes import (
    HALF,
    LAYOUTS,
    by_hand,
    by_hoglib,
    critic,
    data,
    gradients,
    loss,
    outcome,
    shard,
    train,
)  # fmt: skip


def wrapped(**options):
    net = critic()
    return net, DistributedDataParallel(net, **options)


def of_one_process(*steps):
    """The gradients of one process, summed over steps."""
    alone = critic()
    for step in steps:
        (loss(alone, *data(step)) + by_hand(alone, data(step)[0])).backward()
    return gradients(alone)


def backward(ddp, step, gp=by_hoglib):
    real, fake = shard(data(step))
    (loss(ddp, real, fake) + gp(ddp, real)).backward()


def raised(step):
    """The error of a step; None if it went through."""
    try:
        step()
    except RuntimeError as error:
        return error
    return None


def accumulating():
    """no_sync() around the first of two backwards."""
    net, ddp = wrapped()
    with ddp.no_sync():
        backward(ddp, 0)
    backward(ddp, 1)
    return outcome([gradients(net)], [of_one_process(0, 1)])


def differentiated_by_one_process():
    """autograd.grad of the penalty in the first process only: no other process is waited for."""
    net, ddp = wrapped()
    if dist.get_rank() == 0:
        torch.autograd.grad(by_hoglib(ddp.module, shard(data(0))[0]), net[0].weight)
        by_hoglib(ddp.module, shard(data(0))[0])
    backward(ddp, 0)
    return outcome([gradients(net)], [of_one_process(0)])


def generator_step(then):
    """A generator learns through ddp.module, whose own gradients are then thrown away."""
    net, ddp = wrapped()
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    mine = []
    for _ in range(2):
        sgd.zero_grad(set_to_none=then != "zeros")
        backward(ddp, 0)
        mine.append(gradients(net))
        if then == "skipped":  # as a GradScaler does
            sgd.zero_grad()
        else:
            sgd.step()
        ddp.module(shard(data(1))[0].requires_grad_()).mean().backward()
    return outcome(mine, [of_one_process(0)] * 2)


def wrapped_late():
    """A module that had a penalty before it was wrapped is known to be wrapped."""
    net = critic()
    by_hoglib(net, shard(data(0))[0]).backward()
    net.zero_grad()
    ddp = DistributedDataParallel(net)
    return outcome([], [0], raised(by_hoglib(ddp.module, shard(data(0))[0]).backward))


def copied():
    """A copy of the critic (such as an average of it) is not averaged, also while gradients are compared."""
    net, ddp = wrapped()
    backward(ddp, 0)
    twin = copy.deepcopy(net)
    twin.zero_grad()
    by_hoglib(twin, shard(data(1))[0]).backward()
    ddp.zero_grad()
    backward(ddp, 0)
    return outcome([gradients(net)], [of_one_process(0)])


def joined():
    """More batches in one process than in the other, one call a step, as join() wants it."""
    net, ddp = wrapped()
    with ddp.join():
        for step in range(2 + dist.get_rank()):
            ddp.zero_grad()
            LAYOUTS["one forward"](by_hoglib, ddp, ddp, *shard(data(step)))
    return "mean" if gradients(net).isfinite().all() else "not finite"


def with_hook(hook):
    """A communication hook may round, or leave gradients apart on purpose."""
    net, ddp = wrapped()
    ddp.register_comm_hook(None, hook)
    backward(ddp, 0)
    return "went through" if gradients(net).isfinite().all() else "not finite"


def keeping_apart(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# Each of (critic, x): without random numbers, or where they make no difference
PENALTIES = {
    "wgan_gp": lambda f, x: penalties.wgan_gp(f, x, x.clone()),
    "zero_centred": lambda f, x: penalties.zero_centred(f, x, x.clone()),
    "r1_r2": lambda f, x: penalties.r1_r2(f, x, x + 1),
    "dragan": lambda f, x: penalties.dragan(f, x, noise=0.0),
    "lipschitz": lambda f, x: penalties.lipschitz(f, x, bound=0.01),
    "input_gradient": lambda f, x: penalties.input_gradient(lambda x: f(x).square(), x),
    "jacobian": lambda f, x: penalties.jacobian(f, x, num_projections=None),
    "sobolev": lambda f, x: penalties.sobolev(f, x, torch.ones_like(x)),
    "forces": lambda f, x: penalties.forces(f, x)[1].square().mean(),
    "in micro-batches": lambda f, x: penalties.r1(f, x, micro_batch=3),
    "one a sample": lambda f, x: penalties.r1(f, x, reduction="none").mean(),
    "module": lambda f, x: penalties.GradientPenalty("r1", weight=2.0, every=2)(f, x),
}


def each(name, around):
    """A step of this penalty alone."""
    alone, (net, ddp) = critic(), wrapped()
    whole, (own, _) = data(0)[0], shard(data(0))
    PENALTIES[name](alone, whole).backward()
    if error := raised(PENALTIES[name](ddp.module if around else ddp, own).backward):
        return outcome([], [0], error)
    return outcome([gradients(net)], [gradients(alone)])


def overflow(where):
    """Gradients that are not finite, as a GradScaler first finds, in all processes, or in one."""
    net, ddp = wrapped()
    real, fake = shard(data(0))
    factor = torch.nan if where == "everywhere" or dist.get_rank() else 1.0
    module = ddp if where == "everywhere" else ddp.module
    if error := raised((factor * loss(module, real, fake) + by_hoglib(module, real)).backward):
        return outcome([], [0], error)
    return "went through" if not gradients(net).isfinite().all() else "finite"


class Conditional(nn.Module):
    """Sparse gradients of an embedding, a frozen layer, a parameter that DDP ignores, and beside the
    score a root of zero, whose derivative is infinite."""

    def __init__(self):
        super().__init__()
        self.net, self.embed = critic(), nn.Embedding(5, 3, sparse=True).double()
        self.frozen, self.ignored = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.frozen.requires_grad_(False)
        self._ddp_params_and_buffers_to_ignore = ["ignored.weight", "ignored.bias"]

    def forward(self, x):
        label = torch.arange(len(x)) % 4
        y = self.net(self.ignored(self.frozen(x)) * self.embed(label))
        return y, (0 * y).sqrt()


def conditional(around):
    torch.manual_seed(0)
    alone = Conditional()
    net = copy.deepcopy(alone)
    ddp = DistributedDataParallel(net)
    by_hand(lambda x: alone(x)[0], data(0)[0]).backward()
    real = shard(data(0))[0]
    if around:
        return outcome([], [0], raised(by_hoglib(ddp.module, real).backward))
    by_hoglib(ddp, real).backward()

    def flat(module):
        dense = [module.embed.weight.grad.to_dense().flatten(), gradients(module.net)]
        return torch.cat(dense)

    return outcome([flat(net)], [flat(alone)])


def of_parameters(around):
    """The norm of a gradient by the parameters is that of each process: its gradient is their mean."""
    alone, (net, ddp) = critic(), wrapped()

    def penalise(module, x):
        params = trainable_params(module)
        penalties.parameter_gradient(
            functional_loss(module, mse_loss), params, (x, x[:, :1])
        ).backward()

    for x in data(0)[0].split(HALF):
        penalise(alone, x)
    if error := raised(lambda: penalise(ddp.module if around else ddp, shard(data(0))[0])):
        return outcome([], [0], error)
    return outcome([gradients(net)], [gradients(alone) / 2])


def not_wrapped():
    """Nothing is put between a penalty and its graph where it needs no watch."""
    net = critic()
    x = shard(data(0))[0]
    penalty = by_hand(net, x)
    same = average_gradients("r1", penalty) is penalty
    value = penalty.detach()
    same &= average_gradients("r1", value) is value
    return "the same" if same else "another tensor"


def message(part, **options):
    """What the error says; of a wrong call, or of a wrong wrapper."""
    _, ddp = wrapped(**options)
    error = raised(lambda: backward(ddp if options else ddp.module, 0))
    return "said" if part in str(error) else str(error)


def out_of_step(lazily, otherwise):
    """Calls of a lazy penalty, of which the second process makes one more before, or less often."""
    _, ddp = wrapped()
    x, later = shard(data(0))[0], dist.get_rank() == 1
    penalty = penalties.GradientPenalty(
        "r1", every=3 if later and otherwise == "less often" else lazily
    )
    if later and otherwise == "once more":
        penalty.set_extra_state(1)
    error = raised(lambda: penalty(ddp, x).backward())
    again = penalties.r1(ddp, x)  # the error was raised in both before any message of the penalty
    again.backward()
    return str(error).partition(": ")[2].partition(" in all")[0]


def silent(*cell):
    found = train(*cell, gp=by_hand)
    return "silent" if found.startswith("step 0: processes differ") else found


CASES = {
    "accumulating under no_sync": ("mean", accumulating),
    "autograd.grad in one process": ("mean", differentiated_by_one_process),
    "a generator's step through ddp.module": ("mean", generator_step, "step"),
    "a generator's step through ddp.module, zeros kept": ("mean", generator_step, "zeros"),
    "a generator's step through ddp.module after a skipped one": ("mean", generator_step, "skipped"),
    "wrapped after its first penalty": ("refused", wrapped_late),
    "a copy of the critic": ("mean", copied),
    "uneven numbers of batches in join": ("mean", joined),
    "a hook that rounds": ("went through", with_hook, fp16_compress_hook),
    "a hook that keeps processes apart": ("went through", with_hook, keeping_apart),
    "gradients that overflow": ("went through", overflow, "everywhere"),
    "gradients that overflow in one process around ddp": ("refused", overflow, "in one"),
    "sparse, frozen and ignored parameters": ("mean", conditional, False),
    "sparse, frozen and ignored parameters around ddp": ("refused", conditional, True),
    "parameter_gradient": ("mean", of_parameters, False),
    "parameter_gradient around ddp": ("refused", of_parameters, True),
    "no wrapper around the critic": ("the same", not_wrapped),
    "a lazy penalty called once more": ("expected the same calls", out_of_step, 2, "once more"),
    "a lazy penalty called less often": ("expected the same every=", out_of_step, 2, "less often"),
    "a lazy penalty in step": ("", out_of_step, 2, "nothing"),
    "the error names the parameters": ("said", message, "got different ones of 0.weight"),
    "the error says how to call": ("said", message, "not as its `.module`"),
    "torch alone: penalty alone": ("silent", silent, "penalty alone", "ddp", "plain"),
    "torch alone: ddp.module": ("silent", silent, "one backward", "ddp.module", "plain"),
    "torch alone: static_graph": ("silent", silent, "one backward", "ddp", "static_graph"),
    "the error speaks of static_graph": ("said", partial(message, static_graph=True), "Leave static_graph=True out"),
}  # fmt: skip
CASES |= {f"{name}, ddp": ("mean", each, name, False) for name in PENALTIES}
CASES |= {f"{name}, ddp.module": ("refused", each, name, True) for name in PENALTIES}
