"""The Hessian's spectrum, from products with vectors, in one object."""

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
    """The eigenvalues of a Hessian, as far as products with vectors give them.

    Attributes:
        size: P, the number of eigenvalues.
        smallest: [k], ascending.
        largest: [k], ascending.
        trace: And its standard error.
        negative: The fraction of eigenvalues smaller than `below`, and its standard error.
        below: Zero, but for rounding: minus a thousandth of the largest magnitude.
        density: Of all eigenvalues.
        products: Products of the Hessian with one vector.
    """

    size: int
    smallest: Tensor
    largest: Tensor
    trace: tuple[float, float]
    negative: tuple[float, float]
    below: float
    density: SpectralDensity
    products: int

    def summary(self) -> str:
        """Some lines of text."""
        lines = {
            "largest": _listed(reversed(self.largest.tolist())),
            "smallest": _listed(self.smallest.tolist()),
            "trace": f"{self.trace[0]:.4g} ± {self.trace[1]:.2g}",
            "negative": f"{100 * self.negative[0]:.2g}% ± {100 * self.negative[1]:.1g}% of them are "
            f"below {self.below:.2g}",
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items())

    def to_dict(self) -> dict[str, Any]:
        """Numbers and lists, for JSON."""
        density = self.density
        return {
            "size": self.size, "products": self.products, "trace": self.trace,
            "negative": self.negative, "below": self.below, "smallest": self.smallest.tolist(),
            "largest": self.largest.tolist(), "grid": density.grid.tolist(),
            "density": density.density.tolist(), "error": density.error.tolist(),
            "width": density.width,
        }  # fmt: skip


def spectrum_of(
    loss: Any, params: Any, batch: Any, k: int, num_samples: int, steps: int,
    stand_ins: bool = True, progress: bool = False, generator: torch.Generator | None = None,
    processes: str | None = None, max_iter: int | None = None,
) -> Spectrum:  # fmt: skip
    """The spectrum of the Hessian of a loss at a batch, from products with vectors alone.

    Where `eigsh` does not converge, a warning says so, and the ends are those of the density's nodes.

    Args:
        loss: The function ``loss(params, batch)`` that returns a scalar.
        params: Where the Hessian is taken.
        batch: What the loss takes; None for a loss without data.
        k: Eigenvalues of each end, by `eigsh`.
        num_samples: Random vectors of the density, from which the trace and the negative part follow.
        steps: Lanczos steps of each of them, a product a step.
        stand_ins: Run the loss inside `hoglib.second_order()`.
        progress: Show a bar that counts products (needs tqdm).
        generator: Of all random vectors; by default one of torch's initial seed.
        processes: Of torch.distributed, that share the data: None, "shard" or "sharded".
        max_iter: How often `eigsh` fills its basis, at most.
    Returns:
        `Spectrum`.
    """
    if batch is None:  # which is no data for an operator
        loss, batch = partial(_without_batch, loss), ()
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


def _without_batch(loss: Any, params: Any, _: tuple[()]) -> Tensor:
    value: Tensor = loss(params, None)
    return value


def _ends_of(density: SpectralDensity, k: int, failed: Exception) -> Tensor:
    """The k outermost nodes of each side, which lie within the spectrum."""
    present = density.weights > torch.finfo(density.weights.dtype).eps
    rows = [nodes[real] for nodes, real in zip(density.nodes, present, strict=True)]
    if min(map(len, rows)) < 2 * k:
        raise failed
    warn(
        f"{failed} The ends of the spectrum are taken from the Lanczos steps of its density instead, "
        "which lie within the spectrum."
    )
    low = min(rows, key=lambda nodes: float(nodes[0]))
    high = max(rows, key=lambda nodes: float(nodes[-1]))
    return torch.cat([low[:k], high[-k:]])


def _listed(values: Any) -> str:
    return "  ".join(f"{value:.4g}" for value in values)
