"""grid_sample against torch's own, and its derivatives where torch has none."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hoglib import ops
from hoglib._core.torch_api.torch_version import TORCH_VERSION
from tests.ops.checks import REPLACES, refused_as_by_torch, same, value_and_gradients
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as normal

NAN, INF = torch.nan, torch.inf
BOTH = ops.grid_sample, F.grid_sample
every_mode = rows("mode", ["bilinear", "nearest", "bicubic"])
every_padding = rows("padding", ["zeros", "border", "reflection"])
both_alignments = rows("align", [False, True], ids=["edges", "centres"])


def at(pixels: Tensor, sizes: tuple[int, ...], align: bool) -> Tensor:
    """The grid of given places in pixels."""
    size = torch.tensor(sizes[::-1], dtype=pixels.dtype)
    if align:
        return pixels / (size - 1).clamp(min=1) * 2 - 1
    return (pixels * 2 + 1) / size - 1


@every_mode
@every_padding
@both_alignments
@rows("sizes", [(4, 5), (1, 1), (3, 1)], ids=["image", "pixel", "column"])
def test_values_and_gradients_are_torchs(
    mode: str, padding: str, align: bool, sizes: tuple[int, int]
) -> None:
    image = normal(2, 3, *sizes)
    # on pixels, halfway between them, on the border and far beyond it: every tie there is
    halves = torch.cartesian_prod(*[torch.arange(-9, 18, dtype=F64) / 2] * 2)
    ties = at(halves, sizes, align).reshape(1, 27, 27, 2).expand(2, -1, -1, -1)
    both = [lambda x, g, f=f: f(x, g, mode, padding, align) for f in BOTH]
    for grid in (ties, 2 * normal(2, 7, 9, 2)):
        same(*both, image, grid)


@rows("mode", ["bilinear", "nearest"])
@every_padding
@both_alignments
@rows("sizes", [(3, 4, 2), (1, 1, 1)], ids=["volume", "voxel"])
def test_volumes_are_torchs(
    mode: str, padding: str, align: bool, sizes: tuple[int, int, int]
) -> None:
    halves = torch.cartesian_prod(*[torch.arange(-3, 9, dtype=F64) / 2] * 3)
    grid = at(halves, sizes, align).reshape(1, 12, 12, 12, 3).expand(2, -1, -1, -1, -1)
    options = (mode, padding, align)
    same(*(lambda x, g, f=f: f(x, g, *options) for f in BOTH), normal(2, 2, *sizes), grid)


@every_padding
@rows("place", [0.0, 3.0, 1.0], ids=["first", "last", "middle"])
def test_derivatives_on_a_pixel_are_one_sided_at_every_order(padding: str, place: float) -> None:
    """d2y/dgrid dinput on a pixel: the derivative of torch's first, by the image, which is linear."""
    image, grid = normal(1, 1, 4, 4), at(torch.tensor([[[[place, 1.5]]]]).to(F64), (4, 4), True)

    def slope(function: Callable[..., Tensor], image: Tensor) -> Tensor:
        leaf = grid.clone().requires_grad_()
        y = function(image, leaf, "bilinear", padding, True).sum()
        return torch.autograd.grad(y, leaf, create_graph=True)[0]

    pixel = image.clone().requires_grad_()
    (mixed,) = torch.autograd.grad(slope(ops.grid_sample, pixel)[..., 0].sum(), pixel)
    expected = torch.zeros_like(image)
    for k in range(16):
        unit = torch.zeros(16, dtype=F64)
        unit[k] = 1
        expected.view(-1)[k] = slope(F.grid_sample, unit.view_as(image))[..., 0].sum()
    assert_close(mixed, expected)


# What is no number or far away.


@every_mode
@every_padding
@rows("far", [1e6, -1e6, 1e18, -1e30])
def test_far_away(mode: str, padding: str, far: float) -> None:
    image = normal(1, 2, 4, 5, dtype=torch.float32)
    grid = torch.tensor([[[[far, 0.1], [0.1, far]]]])
    ours, theirs = (f(image, grid, mode, padding, False) for f in BOTH)
    if padding == "reflection" and mode != "nearest":
        # nothing is left of where in its period such a place is
        assert ours.isfinite().all()
    elif padding != "reflection":
        assert_close(ours, theirs)


@every_mode
@every_padding
@rows("value", [NAN, INF, -INF])
def test_a_place_that_is_no_number_harms_no_other(mode: str, padding: str, value: float) -> None:
    """Torch's own may end the process there, so that it cannot be asked."""
    image = normal(1, 2, 4, 5)
    grid = torch.tensor([[[[value, 0.0], [0.1, 0.2]]]], dtype=F64)
    alone = ops.grid_sample(image, grid[:, :, 1:], mode, padding, False)
    run = lambda x, g: ops.grid_sample(x, g, mode, padding, False)  # noqa: E731
    y, _, slope = value_and_gradients(run, image, grid)
    assert_close(y[..., 1:], alone)
    assert slope[0, 0, 1].isfinite().all()
    if mode == "nearest":
        assert y.isfinite().all()
        assert padding != "zeros" or not y[..., 0].any()
    elif value is NAN:
        assert y[..., 0].isnan().all()


# Dtypes, sizes, transforms.


@rows("dtypes", list(itertools.product([torch.bfloat16, torch.float32], repeat=2)), ids=str)
def test_autocast_gives_torchs_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    image, grid = normal(1, 2, 3, 4, dtype=dtypes[0]), normal(1, 2, 2, 2, dtype=dtypes[1])
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (f(image, grid, align_corners=False) for f in BOTH)
    assert_close(ours, theirs)


# Arguments.


def test_what_replaces_torchs_own_has_its_signature() -> None:
    image, grid = normal(1, 2, 3, 4), normal(1, 2, 2, 2)
    for numbers in itertools.product((0, 1, 2), (0, 1, 2), (False, True)):
        expected = torch.grid_sampler(image, grid, *numbers)
        for torchs in (torch.grid_sampler, torch.grid_sampler_2d):
            assert_close(REPLACES[torchs](image, grid, *numbers), expected)
    volume, places = normal(1, 2, 3, 4, 2), normal(1, 2, 2, 2, 3)
    assert_close(
        REPLACES[torch.grid_sampler_3d](volume, places, 0, 1, True),
        torch.grid_sampler_3d(volume, places, 0, 1, True),
    )
    assert REPLACES[F.grid_sample] is ops.grid_sample


def test_the_default_of_align_corners_warns_as_torch() -> None:
    image, grid = normal(1, 2, 3, 4), normal(1, 2, 2, 2)
    results = []
    for function in BOTH:
        with pytest.warns(UserWarning, match="align_corners=False since 1.3.0"):
            results.append(function(image, grid))
    assert_close(*results)


X, G = normal(1, 2, 3, 4), normal(1, 2, 2, 2)
VOLUME = (normal(1, 2, 3, 4, 2), normal(1, 2, 2, 2, 3))
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "an unknown mode": ((X, G, "linear"), "mode"),
    "an unknown padding": ((X, G, "nearest", "wrap"), "padding_mode"),
    "bicubic in a volume": ((*VOLUME, "bicubic", "zeros", True), "only supports 4D"),
    "another batch size": ((X, G.repeat(2, 1, 1, 1), "nearest", "zeros", True), "same batch size"),
    "one coordinate": ((X, G[..., :1], "nearest", "zeros", True), "size 2 in last dimension"),
    "a grid without rows": ((X, G[:, 0], "nearest", "zeros", True), "4D or 5D|same number"),
    "no batch": ((X[0], G, "nearest", "zeros", True), "batch size"),
    "no pixels": ((X[:, :, :0], G, "nearest", "zeros", True), "non-empty"),
    "two dtypes": ((X, G.float(), "nearest", "zeros", True), "expected"),
}


if TORCH_VERSION >= (2, 15):  # which has it; hoglib's stand-in has not
    del WRONG["bicubic in a volume"]

test_errors_are_torchs = refused_as_by_torch(ops.grid_sample, F.grid_sample, WRONG)


def test_a_number_that_is_no_option() -> None:
    with pytest.raises(ValueError, match="interpolation_mode 0, 1 or 2"):
        REPLACES[torch.grid_sampler](X, G, 3, 0, True)
