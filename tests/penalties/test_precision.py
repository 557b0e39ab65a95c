"""Mixed precision: the gradient of a penalty is that of float32, under autocast, GradScaler and in half."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hoglib import penalties
from hoglib._core.numerics.tolerances import TOLERANCES

HALVES = [torch.bfloat16, torch.float16]


def critic():
    state = torch.get_rng_state()
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Flatten(), nn.LayerNorm(288), nn.Linear(288, 32), nn.SiLU(),
        nn.Linear(32, 1),
    )  # fmt: skip
    torch.set_rng_state(state)
    return model


def images(seed=0):
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def seeded():
    return torch.Generator().manual_seed(2)


KINDS = {
    "wgan_gp": lambda c, x, y, **k: penalties.wgan_gp(c, x, y, generator=seeded(), **k),
    "r1": lambda c, x, y, **k: penalties.r1(c, x, **k),
    "r1 in micro-batches": lambda c, x, y, **k: penalties.r1(c, x, micro_batch=3, **k),
    "dragan": lambda c, x, y, **k: penalties.dragan(c, x, generator=seeded(), **k),
    "jacobian": lambda c, x, y, **k: penalties.jacobian(c, x, generator=seeded(), **k),
    "lipschitz": lambda c, x, y, **k: penalties.lipschitz(c, x, bound=0.01, **k),
}


def gradient(model):
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def assert_like_float32(ours, expected, dtype):
    """Within the tolerance of the dtype, of the size of the whole gradient."""
    tolerance = TOLERANCES[dtype]
    assert torch.isfinite(ours).all()
    assert float((ours - expected).norm() / expected.norm()) < tolerance.rtol
    assert expected.norm() > 1e-3


def reference(kind, x, y):
    model = critic()
    value = KINDS[kind](model, x, y)
    value.backward()
    return value.detach(), gradient(model)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_it_is_computed_in_float32(kind, dtype):
    x, y = images(), images(1).to(dtype)  # fake samples made under autocast are in half precision
    value, expected = reference(kind, x, y.float())
    model = critic()
    with torch.autocast("cpu", dtype):
        ours = KINDS[kind](model, x, y)
        assert torch.is_autocast_enabled("cpu")
        scores = model(x)
    assert scores.dtype == dtype  # autocast itself is at work
    assert_close(ours.detach(), value, rtol=0, atol=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(ours).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    assert_close(gradient(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_if_asked(kind, dtype):
    x, y = images(), images(1)
    _, expected = reference(kind, x, y)
    model = critic()
    with torch.autocast("cpu", dtype):
        value = KINDS[kind](model, x, y, autocast=True)
    value.backward()
    assert_like_float32(gradient(model), expected, dtype)
    assert not torch.equal(gradient(model), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_in_half_precision_all_through(kind, dtype):
    x, y = images().to(dtype), images(1).to(dtype)
    model, wide = critic().to(dtype), critic().to(dtype).float()
    value = KINDS[kind](model, x, y)
    assert value.dtype == torch.float32
    value.backward()
    KINDS[kind](wide, x.float(), y.float()).backward()
    assert_like_float32(gradient(model), gradient(wide), dtype)
    with pytest.raises(RuntimeError) as raised:
        KINDS[kind](model, x.float(), y.float())
    assert f"by `.to({dtype})`, or call it inside" in raised.value.__notes__[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_as_on_the_cpu_and_under_autocast(kind):
    x, y = images(), images(1).to(torch.bfloat16)
    value, expected = reference(kind, x, y.float())
    for enabled in (False, True):
        model = critic().cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            found = KINDS[kind](model, x.cuda(), y.cuda())
        found.backward()
        assert_close(found.detach().cpu(), value, rtol=1e-3, atol=1e-5)
        assert_close(gradient(model).cpu(), expected, rtol=1e-3, atol=1e-5)
