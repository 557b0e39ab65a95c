"""Results are saved by `torch.save`, and loaded as `torch.load` does by default, which refuses unknown classes."""

import io
import pkgutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib._core.torch_api import pytree
from hoglib.curvature import LinearOperator
from hoglib.curvature.algebra.estimates import Estimate
from tests.test_site import PUBLIC

# Arguments and parts of calls rather than results; a GradientStore holds a loss, and has a file of its own
NOT_RESULTS = {
    "Band",
    "DiagonalBlocks",
    "GradientStore",
    "GradientTransformation",
    "Shard",
    "StandIn",
    "Tolerance",
}


def loss(params, batch):
    return ((params["w"] * batch).sin().square() + params["w"] ** 2).mean()


PARAMS, BATCH = {"w": torch.tensor([0.3, 1.2, 0.7])}, torch.tensor([1.0, 2.0, 3.0])
SPD = LinearOperator.from_dense(torch.diag(torch.tensor([1.0, 2.0, 5.0, 9.0])))
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
DATA = torch.randn(8, 3), torch.randint(2, (8,))


TRAINING = {"steps": 60, "rule": hog.meta.sgd(0.1)}


def of_classifier():
    return hog.functional_loss(NET, F.cross_entropy), hog.trainable_params(NET)


def newton_step(optimizer):
    optimizer.step(DATA)
    return optimizer.info


def training():
    def inner(params, weights):
        return (weights * (params["w"] - BATCH).square()).sum()

    return (lambda params, weights: params["w"].square().sum()), inner, PARAMS, torch.ones(3)


def left_out():
    found = hog.meta.hypergradient(*training(), **TRAINING)
    return hog.meta.leave_k_out(found, *training(), k=1, subsets=3, **TRAINING)


def measurement():
    lightning = pytest.importorskip("hoglib.lightning")
    return lightning.Measurement(3, "", hog.curvature.hessian_spectrum(loss, PARAMS, BATCH, k=1))


def energy(x):
    return x.pow(3).sum((1, 2))


# The class of a result, and how it comes
RESULTS = {
    "Estimate": lambda: SPD.trace(2, return_error=True),
    "SpectralDensity": lambda: SPD.spectral_density(2, steps=3),
    "Eigenpairs": lambda: SPD.eigsh(2),
    "Solution": lambda: SPD.solve(torch.ones(4), return_info=True)[1],
    "LeastSquares": lambda: SPD.lstsq(torch.ones(4), return_info=True)[1],
    "SingularTriplets": lambda: SPD.svd(2),
    "LevenbergMarquardtStep": lambda: newton_step(hog.curvature.LevenbergMarquardt(lambda p, b: of_classifier()[0].outputs(p, b), of_classifier()[1])),
    "Spectrum": lambda: hog.curvature.hessian_spectrum(loss, PARAMS, BATCH, k=1, num_samples=2),
    "CriticalSharpness": lambda: hog.critical_sharpness(loss, PARAMS, BATCH),
    "NewtonStep": lambda: newton_step(hog.curvature.NewtonCG(of_classifier()[0])),
    "KFACStep": lambda: newton_step(hog.curvature.KFAC(of_classifier()[0])),
    "KFACError": lambda: hog.KFACOperator(*of_classifier(), DATA).error(),
    "NoiseScale": lambda: hog.curvature.gradient_noise_scale(*of_classifier(), DATA),
    "Hypergradient": lambda: hog.meta.hypergradient(*training(), method="cg", **TRAINING),
    "Residual": lambda: hog.meta.hypergradient(*training(), method="cg", **TRAINING).residual,
    "LeaveKOut": left_out,
    "EnergyForces": lambda: hog.penalties.forces(energy, torch.randn(2, 3, 3)),
    "EnergyForcesHessian": lambda: hog.penalties.forces(energy, torch.randn(2, 3, 3), hessian=True),
    "PenaltyWithOutputs": lambda: hog.penalties.r1(nn.Linear(3, 1), DATA[0], return_outputs=True),
    "Report": lambda: hog.verify(torch.sin, torch.ones(3)),
    "Row": lambda: hog.verify(torch.sin, torch.ones(3)).rows[0],
    "Measurement": measurement,
}  # fmt: skip


def parts(found):
    """All of a result: the tuple or the dataclass, and attributes beside it."""
    return {"": tuple(found) if isinstance(found, tuple) else (), **getattr(found, "__dict__", {})}


def numbers(found):
    """The text of all numbers, which of NaN is equal too."""
    leaves = pytree.leaves(parts(found))
    return [repr(x.tolist() if isinstance(x, torch.Tensor) else x) for x in leaves]


@pytest.mark.parametrize("name", RESULTS)
def test_a_saved_result_is_loaded_as_torch_does_by_default(name):
    torch.manual_seed(0)
    found, file = pytree.map_tensors(torch.Tensor.detach, RESULTS[name]()), io.BytesIO()
    assert type(found).__name__ == name
    torch.save(found, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert type(again) is type(found)
    assert parts(again).keys() == parts(found).keys()
    assert numbers(again) == numbers(found)
    assert repr(again) == repr(found)


def test_every_public_result_can_be_loaded():
    found = {type(RESULTS[name]()).__name__ for name in ("Estimate", "Eigenpairs")}
    for module in PUBLIC:
        for name in pkgutil.resolve_name(module).__all__:
            kind = getattr(pkgutil.resolve_name(module), name)
            if isinstance(kind, type) and issubclass(kind, tuple) and name not in NOT_RESULTS:
                found.add(name)
    assert found <= set(RESULTS)


def test_another_process_needs_the_import_alone(tmp_path):
    path = tmp_path / "found.pt"
    torch.save({"trace": Estimate(torch.tensor(2.0), torch.tensor(0.1))}, path)
    load = f"import torch; print(torch.load({str(path)!r})['trace'].value.item())"
    done = subprocess.run(
        [sys.executable, "-c", f"import hoglib; {load}"], capture_output=True, text=True
    )
    assert done.stdout == "2.0\n", done.stderr
