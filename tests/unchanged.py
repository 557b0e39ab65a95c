"""Nothing that a user passed in is changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.testing import assert_close


def snapshot(module: nn.Module) -> tuple[Any, list[torch.Tensor], list[torch.Tensor | None]]:
    """Modes, attributes, hooks and which parameters there are; values; gradients."""
    parts = [
        (m.training, sorted(vars(m)), len(m._forward_pre_hooks), len(m._forward_hooks))
        for m in module.modules()
    ]
    params, tensors = list(module.parameters()), [*module.parameters(), *module.buffers()]
    flags = [(id(p), p.requires_grad) for p in params]
    grads = [None if p.grad is None else p.grad.clone() for p in params]
    return (parts, flags), [t.detach().clone() for t in tensors], grads


@contextmanager
def unchanged(*modules: nn.Module, grads: bool = True) -> Iterator[None]:
    """Modules are after what is inside as they were before, and so are torch's random numbers; with
    grads=False all but the gradients, which a backward inside adds to."""
    before, state = [snapshot(module) for module in modules], torch.get_rng_state()
    try:
        yield
    finally:
        for module, (parts, tensors, own) in zip(modules, before, strict=True):
            parts_now, tensors_now, own_now = snapshot(module)
            assert parts_now == parts
            assert_close(tensors_now, tensors, rtol=0, atol=0)
            assert not grads or all(map(same, own_now, own))
        assert torch.equal(torch.get_rng_state(), state)


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))
