"""The spectrum of a Hessian in one object: both ends, the trace, the density."""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hoglib._core import validation
from hoglib._core.source_location import warn
from hoglib.curvature.lanczos_quadrature import SpectralDensity
from hoglib.curvature.operators import HessianOperator
from hoglib.errors import ArgumentValueError, ConvergenceError


class Spectrum(NamedTuple):
    """The eigenvalues of a Hessian, as far as products with vectors determine them.

    Attributes:
        size: Number of parameters P, and so of eigenvalues.
        smallest: The k smallest eigenvalues [k], ascending.
        largest: The k largest eigenvalues [k], ascending.
        trace: Estimate of the trace, and its standard error.
        negative: Estimate of the fraction of eigenvalues below ``below``, and its standard error.
        below: Threshold for negative eigenvalues: minus a thousandth of the largest magnitude, which
            is zero up to rounding.
        density: Density of all eigenvalues.
        products: Number of products with the Hessian that were computed.
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
        """Return the eigenvalues, the trace and the negative fraction as four lines of text."""
        lines = {
            "largest": _listed(reversed(self.largest.tolist())),
            "smallest": _listed(self.smallest.tolist()),
            "trace": f"{self.trace[0]:.4g} ± {self.trace[1]:.2g}",
            "negative": f"{100 * self.negative[0]:.2g}% ± {100 * self.negative[1]:.1g}% of them are "
            f"below {self.below:.2g}",
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items())

    def to_dict(self) -> dict[str, Any]:
        """Return numbers and lists only, for JSON."""
        of = self.density
        return {
            "size": self.size, "products": self.products, "trace": self.trace,
            "negative": self.negative, "below": self.below, "smallest": self.smallest.tolist(),
            "largest": self.largest.tolist(), "grid": of.grid.tolist(),
            "density": of.density.tolist(), "error": of.error.tolist(), "width": of.width,
        }  # fmt: skip


def hessian_spectrum(
    loss: Any,
    params: Any,
    batch: Any,
    *,
    k: int = 5,
    num_samples: int = 10,
    steps: int = 80,
    stand_ins: bool = True,
    progress: bool = False,
    generator: torch.Generator | None = None,
    processes: Literal["shard", "sharded"] | None = None,
    max_iter: int | None = None,
) -> Spectrum:
    r"""Estimate the spectrum of the Hessian of a loss from matrix-vector products.

        H = d^2 loss(params, batch) / d params^2

    The k eigenvalues of each end come from :meth:`HessianOperator.eigsh`; the density of all
    eigenvalues, and with it the trace and the negative fraction, from ``spectral_density``. Where
    ``eigsh`` does not converge, a warning says so, and the ends are the outermost nodes of the density.

    Args:
        loss: Scalar function ``loss(params, batch)``.
        params: Parameters with P entries in total, a tree of tensors.
        batch: Data of the loss: one batch or batches, as for :class:`HessianOperator`; None for a
            loss that needs none, which is called as ``loss(params, None)``.
        k: Number of eigenvalues of each end, at most P / 2.
        num_samples: Number of random vectors for the density.
        steps: Lanczos steps for each random vector, of one product each.
        stand_ins: Whether to differentiate inside :class:`hoglib.second_order`.
        progress: Whether to show a progress bar.
        generator: Generator of the random vectors. Default: a new one, seeded with
            ``torch.initial_seed()``.
        processes: How several processes share the data, as for :class:`HessianOperator`.
        max_iter: Largest number of restarts of ``eigsh``. Default: that of ``eigsh``.
    Returns:
        A :class:`Spectrum`.
    Raises:
        ArgumentValueError: for k beyond P / 2.
        ConvergenceError: where ``eigsh`` does not converge and the density has fewer than 2 k nodes.
    Example:
        >>> spectrum = hog.curvature.hessian_spectrum(
        ...     lambda p, _: (torch.tensor([1.0, 2.0, 3.0, 4.0]) * p.square()).sum() / 2,
        ...     torch.zeros(4), None, k=1, num_samples=2, steps=4)
        >>> round(float(spectrum.smallest), 3), round(float(spectrum.largest), 3)
        (1.0, 4.0)
        >>> spectrum.size
        4
    """
    if batch is None:  # operators need data to iterate over
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
        ends = _outermost_nodes(density, k, failed)
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


def _outermost_nodes(density: SpectralDensity, k: int, failed: Exception) -> Tensor:
    """The k outermost Lanczos nodes of each end, which lie inside the spectrum."""
    real_nodes = density.weights > torch.finfo(density.weights.dtype).eps
    rows = [nodes[real] for nodes, real in zip(density.nodes, real_nodes, strict=True)]
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
