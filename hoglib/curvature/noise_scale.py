"""How noisy gradients of batches are, from those of single examples."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib.curvature.data import is_batch, to_device
from hoglib.curvature.example_gradients import gradient_rows
from hoglib.curvature.vector_space import Space
from hoglib.errors import ArgumentValueError

Tree = Any


class NoiseScale(NamedTuple):
    """The noise of gradients.

    Attributes:
        scale: tr S / |g|^2: of batches much smaller, gradients are mostly noise.
        variance: tr S, the sum of the variances of the gradient of one example.
        square: |g|^2, of the gradient of the loss over all examples of the distribution.
    """

    scale: Tensor
    variance: Tensor
    square: Tensor


def gradient_noise_scale(loss: Any, params: Tree, data: Any) -> NoiseScale:
    r"""The simple noise scale of gradients, an estimate of the largest useful batch size.

        B = tr S / |g|^2        tr S = sum_n |g_n - m|^2 / (N - 1)        |g|^2 = |m|^2 - tr S / N

    with the gradients g_n of examples and their mean m; both parts are unbiased. |g|^2 may come out
    negative where N is far too small, and so may B.

    Args:
        loss: The function ``loss(params, batch)``, of a mean over examples.
        params: Where the gradients are taken; any pytree of floating-point tensors.
        data: A batch, or a DataLoader or another re-iterable of batches.
    Returns:
        `NoiseScale`, of three scalar tensors.
    Raises:
        ArgumentValueError: for fewer than two examples.
    References:
        McCandlish, Kaplan, Amodei and the OpenAI Dota Team, An Empirical Model of Large-Batch Training,
        2018, section 2.2 and appendix A.1.
    Example:
        >>> loss = lambda p, x: (p * x).mean()
        >>> x = torch.tensor([1.0, 3.0])
        >>> hog.curvature.gradient_noise_scale(loss, torch.tensor(1.0), x).variance
        tensor(2.)
    """
    space = Space(params)
    space.refuse_sharded("gradient_noise_scale")
    count, mean = 0, torch.zeros(space.size, dtype=torch.float64, device=space.device)
    spread = torch.zeros((), dtype=torch.float64, device=space.device)
    for batch in [data] if is_batch(data) else data:
        for rows in gradient_rows(loss, params, to_device(batch, space.device), vmap=None):
            part = rows.double()
            own = part.mean(0)
            # two sets of examples together, by Chan's formula
            total = count + len(part)
            spread += (part - own).square().sum()
            spread += (own - mean).square().sum() * (count * len(part) / total)
            mean += (own - mean) * (len(part) / total)
            count = total
    if count < 2:
        raise ArgumentValueError(f"data: expected at least two examples, got {count}.")
    variance = spread / (count - 1)
    square = mean.square().sum() - variance / count
    return NoiseScale(*(x.to(space.dtype) for x in (variance / square, variance, square)))
