"""Sampling between pixels, for which torch has no second derivative and no forward mode."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.torch_api.mixed_precision import is_autocast, upcast_half
from hoglib.errors import ArgumentValueError
from hoglib.ops._stand_in import IN_FORWARD, NO_FORWARD, OVER, stands_in_for

_MODES = ("bilinear", "nearest", "bicubic")  # in the order of torch's numbers
_PADDING_MODES = ("zeros", "border", "reflection")
# torch's parameter of the cubic kernel; -0.5 in Keys' article
_CUBIC = -0.75
_NAN_PLACE = -2.0  # the place that stands for a NaN coordinate


@stands_in_for(
    F.grid_sample,
    lacks=NO_FORWARD,
    modes=IN_FORWARD,
    issue="117582",
    until=dict.fromkeys(OVER, (2, 14)),
)
def grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    r"""Values between pixels, as `torch.nn.functional.grid_sample`.

        y(p) = sum_k w_k(x) v_k(y)        v_k: pixels around (x, y)(p), w_k: of the distance to them

    F.grid_sample has no second derivative and no forward mode. The grid runs from -1 to 1.
    Derivatives are one-sided, as in torch: at a pixel to the right, and 0 by a coordinate at or
    outside of the border. Half precision is computed in float32, from the grid on; under
    autocast the result is float32. A NaN coordinate gives NaN, or for "nearest" a pixel of the border
    or 0, as in torch; also for "bilinear" with "border" or "reflection", where torch reads memory
    outside of the tensor. Differentiable to any order, in every mode, under vmap.

    Args:
        input: The pixels, a real floating-point tensor.
        grid: The places to sample at, x first, of the dtype of input.
        mode: "bilinear" (w = 1 - |d| of two pixels in each dimension), "bicubic" (cubic convolution of
            four, 4D input only) or "nearest" (one, halves to even, no gradient by grid). Default:
            "bilinear".
        padding_mode: What lies outside: "zeros", "border" (the pixels there) or "reflection". Default:
            "zeros".
        align_corners: Whether -1 and 1 are the centres of the outermost pixels, not their edges.
            Default: False, with torch's warning.
    Returns:
        y, of the dtype of input.
    Raises:
        TypeError: for integer or complex tensors.
        ValueError: for an unknown mode or padding_mode.
        RuntimeError: for shapes and dtypes that do not fit, as torch.
    Shape:
        - input: [N, C, H, W] or [N, C, D, H, W]
        - grid: [N, h, w, 2] or [N, d, h, w, 3]
        - y: [N, C, h, w] or [N, C, d, h, w]
    References:
        - Jaderberg et al., Spatial Transformer Networks, 2015.
        - Keys, Cubic Convolution Interpolation for Digital Image Processing, 1981.
    Example:
        >>> x, grid = torch.tensor([[[[0.0, 1.0], [2.0, 5.0]]]]), torch.zeros(1, 1, 1, 2)
        >>> f = lambda grid: hog.ops.grid_sample(x, grid, align_corners=True)
        >>> f(grid)
        tensor([[[[2.]]]])
        >>> hog.hvp(lambda grid: f(grid).sum(), grid, torch.tensor([[[[1.0, 0.0]]]]))[1]
        tensor([[[[0.0000, 0.5000]]]])
    """
    validation.choice("mode", mode, _MODES)
    validation.choice("padding_mode", padding_mode, _PADDING_MODES)
    if align_corners is None:
        warnings.warn(
            "Default grid_sample and affine_grid behavior has changed to align_corners=False since "
            "1.3.0. Please specify align_corners=True if the old behavior is desired. "
            "See the documentation of grid_sample for details.",
            stacklevel=2,
        )
        align_corners = False
    validation.real("input", input)
    validation.real("grid", grid)
    input, grid = (x.float() if is_autocast(x) else x for x in (input, grid))
    if not _is_supported(input, grid, mode):
        return F.grid_sample(input, grid, mode, padding_mode, align_corners)  # torch's error
    dtype = input.dtype
    input, grid = upcast_half(input), upcast_half(grid)
    # the last coordinate belongs to the first spatial dimension
    for axis in range(grid.shape[-1]):
        size = input.shape[-1 - axis]
        g = grid[..., axis].flatten(1) + 1
        # from -1 ... 1 to pixels, 0 ... size - 1
        x = g * ((size - 1) / 2) if align_corners else g * (size / 2) - 0.5
        i, w = _neighbours(x, size, mode, padding_mode, align_corners)
        if axis == 0:
            places, weights, stride = i, w, size
        else:
            # combine each pixel of this axis with each combination of the previous axes
            places = (i.unsqueeze(2) * stride + places.unsqueeze(1)).flatten(1, 2)
            weights = (w.unsqueeze(2) * weights.unsqueeze(1)).flatten(1, 2)
            stride *= size
    N, C = input.shape[:2]
    K, P = places.shape[1:]
    index = places.reshape(N, 1, K * P).expand(N, C, K * P)
    values = input.flatten(2).gather(2, index).unflatten(2, (K, P))
    product = values * weights.unsqueeze(1)
    y = product.squeeze(2) if K == 1 else product.sum(2)  # a sum of one term would copy
    return y.reshape(N, C, *grid.shape[1:-1]).to(dtype)


@stands_in_for(torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d, name="grid_sample")
def torch_grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """With the signature of `torch.grid_sampler`: options are numbers."""
    options = {"interpolation_mode": interpolation_mode, "padding_mode": padding_mode}
    for what, number in options.items():
        if number not in (0, 1, 2):
            raise ArgumentValueError(f"grid_sampler: expected {what} 0, 1 or 2, got {number!r}.")
    modes = _MODES[interpolation_mode], _PADDING_MODES[padding_mode]
    return grid_sample(input, grid, *modes, align_corners)


def _neighbours(
    x: Tensor, size: int, mode: str, padding_mode: str, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """The pixels around each position, [N, K, P], and their weights."""
    if mode != "bicubic":  # bicubic brings each pixel inside, not the position
        x = _bring_inside(x, size, padding_mode, align_corners)
    if mode == "nearest":
        taps = x.nan_to_num(_NAN_PLACE).round().unsqueeze(1)
        w = 1 + (taps - taps.detach())  # the gradient by grid is 0, not missing
        taps = taps.detach()
    else:
        first = x.detach().floor()
        t = x - first  # the floor is detached: constant, as in torch
        w = torch.stack((1 - t, t) if mode == "bilinear" else _cubic(t), 1)
        taps = torch.stack([first + k for k in _OFFSETS[mode]], 1)
    if mode == "bicubic":
        taps = _bring_inside(taps, size, padding_mode, align_corners)
    if padding_mode == "zeros":  # multiply instead of `where`, so that NaN stays NaN
        w = w * ((taps >= 0) & (taps <= size - 1))
    return taps.nan_to_num(_NAN_PLACE).clamp(0, size - 1).long(), w


_OFFSETS = {"bilinear": (0, 1), "bicubic": (-1, 0, 1, 2)}


def _cubic(t: Tensor) -> tuple[Tensor, ...]:
    """Weights of the pixels at distances 1 + t, t, 1 - t, 2 - t; sum 1."""
    s = 1 - t
    return (
        _CUBIC * t * s * s,
        1 - t * t * ((_CUBIC + 3) - (_CUBIC + 2) * t),
        1 - s * s * ((_CUBIC + 3) - (_CUBIC + 2) * s),
        _CUBIC * s * t * t,
    )


def _bring_inside(x: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    if padding_mode == "zeros":
        return x
    if padding_mode == "reflection":
        low, period = (0.0, 2.0 * (size - 1)) if align_corners else (-0.5, 2.0 * size)
        if period:
            x = _reflect(x - low, period) + low
    # like clamp, but with the derivative 0 at the bounds
    return F.hardtanh(x, 0.0, float(size - 1))


def _reflect(x: Tensor, period: float) -> Tensor:
    """The distance to the nearest multiple of the period; at 0 its derivative is 1."""
    x = torch.where(x < 0, -x, x)
    # the floor is detached: constant between jumps, as in torch's derivative
    x = x - (x.detach() / period).floor() * period
    back = period - x
    return torch.where(x > back, back, x)


def _is_supported(input: Tensor, grid: Tensor, mode: str) -> bool:
    """Whether torch accepts these tensors."""
    rank = input.dim()
    of_rank = rank in ((4,) if mode == "bicubic" else (4, 5)) and grid.dim() == rank
    fits = of_rank and (grid.shape[0], grid.shape[-1]) == (input.shape[0], rank - 2)
    return fits and 0 not in input.shape[2:] and input.dtype == grid.dtype
