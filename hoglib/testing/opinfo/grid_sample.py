"""Sampling between pixels."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from hoglib.testing.opinfo.op_info import Normal, SampleInput, normals, op_info, sample_input


def _kernel(d: Tensor, mode: str) -> Tensor:
    """The weight of a pixel at distance d, as one function over the whole line."""
    d = d.abs()
    if mode == "nearest":
        return (d < 0.5).to(d.dtype) + 0.0 * d
    if mode == "bilinear":
        return torch.where(d < 1, 1 - d, 0)
    near = 1.25 * d**3 - 2.25 * d**2 + 1
    far = -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
    return torch.where(d < 1, near, torch.where(d < 2, far, 0))


def _copied(x: Tensor, size: int, mode: str, padding_mode: str, align: bool) -> Tensor:
    """Weights [N, P, size] of all pixels: those of an endless line of copies, added up."""
    repeats = range(-4 * size - 4, 5 * size + 4)
    line = torch.tensor(list(repeats), dtype=x.dtype, device=x.device)
    w = _kernel(x.unsqueeze(-1) - line, mode)
    if padding_mode == "zeros":
        return w[..., -repeats[0] : size - repeats[0]]
    period = 2 * (size - 1) if align else 2 * size
    source = []
    for k in repeats:
        folded = k % period if period else 0
        mirror = period - folded if align else period - 1 - folded
        source.append(
            min(folded, mirror) if padding_mode == "reflection" else max(0, min(size - 1, k))
        )
    columns = [w[..., [j for j, s in enumerate(source) if s == i]].sum(-1) for i in range(size)]
    return torch.stack(columns, -1)


def _all_pixels(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """Every pixel times its weight, in a plane of copies of the image: no indices."""
    N, dims = grid.shape[0], grid.shape[-1]
    weights = []
    for axis in range(dims):
        size = input.shape[-1 - axis]
        g = grid[..., axis].reshape(N, -1)
        x = (g + 1) / 2 * (size - 1) if align_corners else ((g + 1) * size - 1) / 2
        weights.append(_copied(x, size, mode, padding_mode, align_corners))
    y = torch.einsum("nc...x,npx->ncp...", input, weights[0])
    for w in weights[1:]:
        y = torch.einsum("ncp...y,npy->ncp...", y, w)
    return y.reshape(N, input.shape[1], *grid.shape[1:-1])


def _samples() -> tuple[SampleInput, ...]:
    samples = []
    for mode, padding, align in itertools.product(
        ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)
    ):
        if mode == "nearest" and (padding != "zeros") != align:
            continue  # three of the six will do, where there is no gradient by grid
        samples.append(
            sample_input(
                f"{mode}, {padding}, {'centres' if align else 'edges'}",
                _plane(1.4 if padding == "border" else 0.8),
                mode=mode,
                padding_mode=padding,
                align_corners=align,
            )
        )
    samples.append(
        sample_input(
            "volume",
            lambda n: (n(1, 1, 2, 2, 3), 0.8 * n(1, 1, 1, 2, 3)),
            align_corners=False,
        )
    )
    return tuple(samples)


def _plane(spread: float) -> Callable[[Normal], tuple[Tensor, ...]]:
    return lambda n: (n(1, 2, 2, 3), spread * n(1, 1, 2, 2))


OPS = (
    op_info("grid_sample", "missing", "sum_k w(x - k) v_k", _all_pixels).on(
        *_samples(),
        zero_size=normals((1, 2, 2, 3), (1, 0, 2, 2)),
        smooth=False,
        skips={
            "no dimensions": "needs images with two dimensions or three",
            "broadcasting": "input and grid have one batch size, by torch's rule",
        },
    ),
)
