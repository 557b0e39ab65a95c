"""What products with a Hessian tell of all its eigenvalues, in one object."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.source_location import warn
from hoglib.curvature.density import SpectralDensity
from hoglib.curvature.operators import HessianOperator
from hoglib.errors import ArgumentValueError, ConvergenceError


class Spectrum(NamedTuple):
    """What products with a Hessian tell of its eigenvalues."""

    size: int
    smallest: Tensor  # ascending, as are the largest
    largest: Tensor
    trace: tuple[float, float]  # and its standard error
    negative: tuple[float, float]  # the part of the eigenvalues that is below
    below: float  # zero, but for rounding: a thousandth of the largest in magnitude
    density: SpectralDensity
    products: int

    def told(self) -> str:
        lines = {
            "largest": _listed(reversed(self.largest.tolist())),
            "smallest": _listed(self.smallest.tolist()),
            "trace": f"{self.trace[0]:.4g} ± {self.trace[1]:.2g}",
            "negative": f"{100 * self.negative[0]:.2g}% ± {100 * self.negative[1]:.1g}% of them are "
            f"below {self.below:.2g}",
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items())

    def numbers(self) -> dict[str, Any]:
        """What JSON holds of it."""
        of = self.density
        return {
            "size": self.size, "products": self.products, "trace": self.trace,
            "negative": self.negative, "below": self.below, "smallest": self.smallest.tolist(),
            "largest": self.largest.tolist(), "grid": of.grid.tolist(),
            "density": of.density.tolist(), "error": of.error.tolist(), "width": of.width,
        }  # fmt: skip


def spectrum_of(
    loss: Any, params: Any, batch: Any, k: int, num_samples: int, steps: int,
    stand_ins: bool = True, progress: bool = False, generator: torch.Generator | None = None,
    processes: str | None = None, max_iter: int | None = None,
) -> Spectrum:  # fmt: skip
    """The spectrum of the Hessian of a loss at a batch, from products with it alone.

    k: eigenvalues of each end, by `eigsh`. num_samples, steps: of `spectral_density`, of which the
    trace is an average, as is the part that is negative. generator: of all random vectors; by
    default one of the seed. stand_ins, progress, processes: as in `HessianOperator`; max_iter: as
    in `eigsh`. Where eigsh does not converge, a warning says so and the ends are those of the
    density's nodes.
    """
    if batch is None:  # which is no data to go through
        loss, batch = partial(_without, loss), ()
    operator = HessianOperator(
        loss, params, batch, stand_ins=stand_ins, progress=progress, processes=processes
    )
    size = operator.shape[0]
    if 2 * validation.at_least("k", k, 1) > size:
        raise ArgumentValueError(
            f"k: expected at most {size // 2}, half of the {size} parameters, got {k}; give fewer."
        )
    if generator is None:
        generator = torch.Generator().manual_seed(torch.initial_seed())
    failed: Exception | None = None
    try:
        pairs = operator.eigsh(2 * k, which="BE", max_iter=max_iter, generator=generator)
        ends = pairs.values.cpu()
    except ConvergenceError as error:
        failed = error
    density = operator.spectral_density(num_samples, steps=steps, generator=generator)
    if failed is not None:
        ends = _ends_of(density, k, failed)
    mean, deviation = density.average(lambda x: x)
    below = -1e-3 * float(ends.abs().max())
    negative = density.average(lambda x: (x < below).to(x))
    return Spectrum(
        size, ends[:k], ends[k:], (size * float(mean), size * float(deviation)),
        (float(negative[0]), float(negative[1])), below, density, operator.count,
    )  # fmt: skip


def _without(loss: Any, params: Any, _: tuple[()]) -> Tensor:
    value: Tensor = loss(params, None)
    return value


def _ends_of(density: SpectralDensity, k: int, failed: Exception) -> Tensor:
    """The k outermost nodes of each side, which lie within the spectrum."""
    there = density.weights > torch.finfo(density.weights.dtype).eps
    rows = [nodes[real] for nodes, real in zip(density.nodes, there, strict=True)]
    if min(map(len, rows)) < 2 * k:
        raise failed
    warn(
        f"{failed} The ends of the spectrum are taken from the Lanczos steps of its density, which "
        "reach them from inside."
    )
    low = min(rows, key=lambda nodes: float(nodes[0]))
    high = max(rows, key=lambda nodes: float(nodes[-1]))
    return torch.cat([low[:k], high[-k:]])


def _listed(values: Any) -> str:
    return "  ".join(f"{value:.4g}" for value in values)
