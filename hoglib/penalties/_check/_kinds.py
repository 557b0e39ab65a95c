"""The penalties that can be examined: what their term is, at which points, and options."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hoglib import _arguments as arguments


class Kind(NamedTuple):
    """factor mean_n T(|g_n|), at points `at`: T is (|g| - target)^2 or, without a target, |g|^2."""

    name: str
    at: str  # "between" real and fake, "real", "fake", "both", or "beside" real
    target: bool
    factor: float
    formula: str

    @property
    def sets(self) -> int:
        """How many sets of points it sums over."""
        return 2 if self.at == "both" else 1


KINDS = {
    kind.name: kind
    for kind in (
        Kind("wgan_gp", "between", True, 1.0, "mean_n (|g_n| - target)^2 between real and fake"),
        Kind("zero_centred", "between", False, 1.0, "mean_n |g_n|^2 between real and fake"),
        Kind("r1", "real", False, 0.5, "mean_n |g_n|^2 / 2 at real"),
        Kind("r2", "fake", False, 0.5, "mean_n |g_n|^2 / 2 at fake"),
        Kind(
            "r1_r2", "both", False, 0.5, "mean_n |g_n|^2 / 2 at real, and the same at fake, summed"
        ),
        Kind("dragan", "beside", True, 1.0, "mean_n (|g_n| - target)^2 at real and noise"),
    )
}


class Options(NamedTuple):
    """What a penalty is meant to be."""

    kind: Kind
    shape: tuple[int, ...]
    every: int
    weight: float
    target: float
    one_sided: bool
    noise: float | None


def chosen(
    kind: str, shape: Sequence[int], every: int, weight: float, target: float | None,
    one_sided: bool, noise: float | None,
) -> Options:  # fmt: skip
    """The options of a check, checked."""
    meant = KINDS[arguments.one_of("kind", str(kind).replace("-", "_"), KINDS)]
    arguments.flag("one_sided", one_sided)
    if not meant.target and (target is not None or one_sided):
        raise arguments.WrongValue(
            f"target, one_sided: expected neither for {kind}, which has no target; got "
            f"target={target}, one_sided={one_sided}. Leave them out, or check another kind."
        )
    if noise is not None and meant.at != "beside":
        raise arguments.WrongValue(f"noise: expected none for {kind}, got {noise}; it is dragan's.")
    sizes = tuple(arguments.at_least("shape", n, 1) for n in shape)
    if not sizes or torch.Size(sizes).numel() < 2:
        raise arguments.WrongValue(
            f"shape: expected that of one sample, without the batch, of two elements or more, got "
            f"{tuple(shape)}; a batch of vectors has shape=(d,)."
        )
    return Options(
        meant, sizes, arguments.at_least("every", every, 1), arguments.positive("weight", weight),
        1.0 if target is None else arguments.number("target", target, minimum=0.0), one_sided,
        None if noise is None else arguments.positive("noise", noise),
    )  # fmt: skip
