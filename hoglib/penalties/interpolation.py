"""Points between two batches, and around one, at which critics are penalised."""

from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree
from hoglib._core.mixed_precision import upcast_dtype
from hoglib.errors import ArgumentValueError, UnsupportedError
from hoglib.penalties.samples import Samples, inputs


def between(what: str, real: Any, fake: Any, batch: Any, generator: torch.Generator | None) -> Any:
    """x_n = e_n real_n + (1 - e_n) fake_n, e_n ~ U(0, 1): one e for all entries of a sample."""
    leaves, others = inputs(what, "real", real), inputs(what, "fake", fake)
    names = pytree.paths(real)
    structure = pytree.flatten(real)[1]
    if pytree.flatten(fake)[1] != structure:
        raise ArgumentValueError(
            f"{what}: expected fake with the structure of real, {_said(real)}, got {_said(fake)}."
        )
    for name, a, b in zip(names, leaves, others, strict=True):
        if a.shape != b.shape or a.device != b.device:
            which = f"[{name!r}]" if name else ""
            raise ArgumentValueError(
                f"{what}: expected fake{which} like real{which}, {tuple(a.shape)} on {a.device}, got "
                f"{tuple(b.shape)} on {b.device}; draw as many as there are real ones (a last batch "
                "may be smaller; graphs need the same rows), and move them there."
            )
    samples = Samples(what, leaves, structure, batch)
    if samples.count is None:
        raise UnsupportedError(
            f"{what}(batch=...): expected to run outside of what is captured, since how many numbers "
            "are drawn is read from the values of batch; pass compile=True to the penalty instead, or "
            "use r1 at points that are drawn outside."
        )
    first = leaves[0]
    e = drawn(torch.rand, (samples.count or 0,), first, generator)
    mixed = []
    for k, (a, b) in enumerate(zip(leaves, others, strict=True)):
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
        mixed.append(torch.lerp(b, a, samples.spread(e, a, k).expand_as(a)))
    return pytree.unflatten(mixed, structure)


def around(what: str, real: Any, noise: float | None, generator: torch.Generator | None) -> Any:
    """x = real + d, d ~ N(0, noise^2) for each entry; noise None: half the deviation of the batch."""
    leaves, structure = inputs(what, "real", real), pytree.flatten(real)[1]
    moved = []
    for leaf in leaves:
        d = drawn(torch.randn, leaf.shape, leaf, generator).to(leaf)
        scale = noise if noise is not None else _half_deviation(leaf)
        moved.append(leaf + scale * d)
    return pytree.unflatten(moved, structure)


def _half_deviation(leaf: Tensor) -> Tensor | float:
    return 0.5 * leaf.detach().std(correction=0) if leaf.numel() else 0.0


def drawn(
    draw: Any, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Random numbers on the tensor's device, drawn where the generator is."""
    where = like.device if generator is None else generator.device
    drawn: Tensor = draw(shape, generator=generator, device=where, dtype=upcast_dtype(like.dtype))
    return drawn.to(like.device)


def _said(tree: Any) -> str:
    names = pytree.paths(tree)
    listed = f"a {type(tree).__name__} of {len(names)} ({', '.join(names[:5])})"
    return "one tensor" if names == [""] else listed
