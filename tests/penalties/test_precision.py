"""Mixed precision: the gradient of a penalty is that of float32, under autocast, GradScaler, Lightning."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib import penalties
from hoglib._core.tolerances import TOLERANCES

HALVES = [torch.bfloat16, torch.float16]
# Lightning, on torch 2.13: nothing here can change it
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*`tensorboardX` has been removed.*"),
]


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
    ours.backward()
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


class Regularised(LightningModule):
    def __init__(self):
        super().__init__()
        self.critic, self.penalty = critic(), hog.GradientPenalty("r1", weight=1.0)
        self.seen = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return self.penalty(self.critic, x)

    def on_after_backward(self):
        self.seen.append(gradient(self.critic))

    def validation_step(self, batch, batch_idx):
        self.log("val/penalty", self.penalty(self.critic, batch[0]), batch_size=8)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(where, **options):
    return Trainer(
        default_root_dir=where, max_steps=1, accelerator="cpu", logger=False, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images()), batch_size=8)


PRECISIONS = {
    "32-true": torch.float32, "64-true": torch.float32, "bf16-mixed": torch.float32,
    "16-mixed": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16,
}  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
def test_under_the_precision_plugins_of_lightning(precision, tmp_path):
    module = Regularised()
    if precision == "16-mixed":  # on a CPU Lightning makes bf16 of it, unless it is given a scaler
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        how = {"plugins": MixedPrecision(precision, "cpu", scaler)}
    else:
        how = {"precision": precision}
    trainer(tmp_path, **how).fit(module, loader(), loader())
    (ours,) = module.seen
    if precision == "16-mixed":
        ours = ours / 2.0**16  # Lightning unscales after this hook
    _, expected = reference("r1", images(), None)
    assert_like_float32(ours, expected, PRECISIONS[precision])


@pytest.mark.parametrize("name", ["validate", "test"])
def test_validate_and_test_run_in_inference_mode(name, tmp_path):
    module = Regularised()
    run = trainer(tmp_path)
    assert run.evaluating is False
    (metrics,) = getattr(run, name)(module, loader(), verbose=False)
    value, _ = reference("r1", images(), None)
    assert_close(torch.tensor(metrics["val/penalty"]), value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_on_a_gpu(kind, dtype):
    x, y = images().cuda(), images(1).cuda()
    model, wide = critic().cuda(), critic().cuda()
    with torch.autocast("cuda", dtype):
        KINDS[kind](model, x, y.to(dtype)).backward()
    KINDS[kind](wide, x, y.to(dtype).float()).backward()
    assert_close(gradient(model), gradient(wide), rtol=1e-3, atol=1e-5)
