"""Meta-gradients by hand in torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from experiments.benchmarks.critics import taken
from experiments.benchmarks.meta.tasks import Batch, Learner
from experiments.benchmarks.with_torch import Params, with_plain_attention

# The meta-loss, and its gradient by each parameter in torch's order.
Found = tuple[Any, ...]
Call = Callable[[], Found]


def step(learner: Learner, params: Params, batch: Batch) -> Params:
    x, y = batch
    value = learner.criterion(functional_call(learner.model, params, (x,)), y)
    grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
    moved = zip(params.items(), grads, strict=True)
    return {name: p - learner.inner_lr * g for (name, p), g in moved}


def checkpointed(learner: Learner, params: Params, batch: Batch) -> Params:
    """A step whose graph is made again in backward."""
    return checkpoint(partial(step, learner), params, batch, use_reentrant=False)


def unrolled(step: Callable[[Learner, Params, Batch], Params]) -> Callable[[Learner], Call]:
    """Task by task; each one's graph is freed before the next."""

    @with_plain_attention
    def made(learner: Learner) -> Call:
        learner = learner.apart()
        start: Params = dict(learner.model.named_parameters())

        def run() -> Found:
            total = torch.zeros(())
            for support, (x, y) in learner.each():
                params = start
                for _ in range(learner.inner_steps):
                    params = step(learner, params, support)
                outputs = functional_call(learner.model, params, (x,))
                value = learner.criterion(outputs, y) / learner.count
                value.backward()
                total = total + value.detach()
            return taken(total, learner.model)

        return run

    return made


by_hand = unrolled(step)
checkpointed_by_hand = unrolled(checkpointed)


def task_loss(learner: Learner) -> Callable[[Params, Batch, Batch], Tensor]:
    def loss(params: Params, batch: Batch) -> Tensor:
        x, y = batch
        return learner.criterion(functional_call(learner.model, params, (x,)), y)

    def after(params: Params, support: Batch, query: Batch) -> Tensor:
        for _ in range(learner.inner_steps):
            grads = torch.func.grad(loss)(params, support)
            params = {name: p - learner.inner_lr * grads[name] for name, p in params.items()}
        return loss(params, query)

    return after


@with_plain_attention
def vmap_of_grad(learner: Learner) -> Call:
    params = {name: p.detach() for name, p in learner.model.named_parameters()}
    both = torch.func.grad_and_value(task_loss(learner))
    every = torch.func.vmap(both, in_dims=(None, 0, 0))

    def run() -> Found:
        grads, values = every(params, learner.support, learner.query)
        return values.mean(), *(g.mean(0) for g in grads.values())

    return run


@with_plain_attention
def grad_of_vmap(learner: Learner) -> Call:
    """The usual way round, which torch gets wrong through normalisation layers."""
    learner = learner.apart()
    params: Params = dict(learner.model.named_parameters())
    every = torch.func.vmap(task_loss(learner), in_dims=(None, 0, 0))

    def run() -> Found:
        value = every(params, learner.support, learner.query).mean()
        value.backward()
        return taken(value.detach(), learner.model)

    return run
