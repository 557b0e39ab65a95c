"""The audit of whole models: right ones pass in silence, faults are named by module and operation."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib._core.torch_api.torch_version import TORCH_VERSION
from hoglib.auditing.routes import ROUTES
from tests.auditing.cases import Applies, Cached, Images, Matrices, Net, WrongScale, problem, smooth
from tests.functions import Cube, OnceDifferentiable
from tests.rows import rows

ROWS = {route.key: route.row for route in ROUTES}
AUTO, FIRST = ROWS["rr"], "first derivative: reverse"


def audited(model: nn.Module, **options: Any) -> hog.Report:
    given = {name: options.pop(name) for name in ("width", "rows", "criterion") if name in options}
    return hog.audit(*problem(model, **given), **options)


# What is right.


class CastsToFloat32(nn.Module):
    """In float64 the casts have no effect."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().softmax(-1, dtype=torch.float32).to(x.dtype) * x


def zeros_at_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    for p in model[2].parameters():
        nn.init.zeros_(p)
    return model


CLEAN: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)),
    "group norm and convolution": lambda: Images(nn.GroupNorm(2, 4)),
    "batch norm in eval mode": lambda: smooth(nn.BatchNorm1d(6)).eval(),
    "rms norm": lambda: Net(nn.RMSNorm(6), nn.RMSNorm(6)),
    "spectral norm": lambda: smooth(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    ).eval(),
    "zeros at first": zeros_at_first,
    "a Function of hoglib": lambda: smooth(Applies(lambda x: hog.ops.swish(x, 1.3))),
    "checkpoint": lambda: smooth(Applies(lambda x: checkpoint(torch.sin, x, use_reentrant=False))),
    "dropout that is off": lambda: smooth(nn.Dropout(0.5)).eval(),
    "casts": lambda: smooth(CastsToFloat32()),
}


@pytest.mark.parametrize("name", CLEAN)
def test_right_models_raise_nothing(name: str) -> None:
    model = CLEAN[name]()
    report = audited(model, width=16 if isinstance(model, Images) else 4)
    assert report.ok
    assert report.judged
    assert not report.warnings, str(report)
    error = report[AUTO].error
    assert error is not None
    assert error < 1e-5


def straight_through(x: Tensor) -> Tensor:
    return x + ((x * 4).round() / 4 - x).detach()


def under_no_grad(x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    with torch.no_grad():
        total.add_(x)  # into a buffer
    return x.sin() * total


HELD = {"straight-through": straight_through, "no_grad": under_no_grad}


@pytest.mark.parametrize("name", HELD)
def test_what_is_stopped_on_purpose_is_held(name: str) -> None:
    report = audited(smooth(Applies(HELD[name])), routes=["rr", "third order"])
    assert report.ok
    assert report.judged
    assert report[FIRST].status == "pass"
    assert "`2`" in report["stopped gradients"].text


INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vmap": lambda w, x: vmap(lambda row: (w @ row).tanh().square().sum())(x).mean(),
    "jvp": lambda w, x: jvp(lambda u: (u @ x.T).tanh(), (w,), (w * 2,))[1].square().sum(),
    "hessian": lambda w, x: hessian(lambda u: (u @ x.T).tanh().sum())(w).square().sum(),
    "an inner gradient that is held": lambda w, x: (
        torch.autograd.grad((w @ x.T).tanh().sum(), w)[0] * w.square()
    ).sum(),
    "two ways": lambda w, x: (w * (w.detach() if w.sum() > 0 else w.data)).sum(),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_loss_that_differentiates_inside_is_right(name: str) -> None:
    report = hog.audit(INSIDE[name], torch.randn(3, 4) / 2, torch.randn(5, 4))
    assert report.ok, str(report)
    assert report.judged, str(report)


# At the parameters themselves.


def rotation(p: Tensor, _: Tensor) -> Tensor:
    """sin |p| / |p|, with a branch for one point, as of exponential maps."""
    small = (square := p.square().sum()) < 1e-16
    angle = torch.where(small, torch.ones_like(square), square).sqrt()
    return torch.where(small, 1 - torch.zeros_like(square) * square, angle.sin() / angle)


AT = {
    "branch for one point": (
        lambda p, x: torch.where(p == 0, 1 + 0 * p, p.sin() / torch.where(p == 0, 1, p)).sum(),
        torch.zeros(3), "fail",
    ),
    "branch near one point": (rotation, torch.zeros(3), "fail"),
    "maximum of squares": (lambda p, x: torch.maximum(p**2, 2 * p**2).sum(), torch.zeros(3), "fail"),
    "maximum of both signs": (lambda p, x: torch.maximum(p, -p).square().sum(), torch.zeros(3), "fail"),
    "kernel at its points": (
        lambda p, x: ((1 + torch.cdist(p, x)) * (-torch.cdist(p, x)).exp()).sum(),
        torch.eye(3), "fail",
    ),
    "squared range": (lambda p, x: (p.amax() - p.amin()) ** 2, torch.ones(6), "warn"),
    "largest square": (lambda p, x: p.abs().max() ** 2, torch.zeros(6), "warn"),
    "absolute value": (lambda p, x: p.abs().sum() + (p**3).sum(), torch.zeros(3), "warn"),
    "huber at its kink": (lambda p, x: F.huber_loss(p, 0 * p), torch.ones(3), "warn"),
    "relu of zeros": (lambda p, x: (x @ p.relu()).square().sum(), torch.zeros(3), "warn"),
    "squared norm": (lambda p, x: p.norm() ** 2, torch.zeros(3), "pass"),
    "fourth powers": (lambda p, x: (p**4).sum() + (p.abs() ** 3).sum(), torch.zeros(3), "pass"),
    "cumprod": (lambda p, x: p.cumprod(0).square().sum(), torch.tensor([1.0, 0.0, 2.0]), "pass"),
    "equal eigenvalues": (
        lambda p, x: torch.linalg.eigvalsh(torch.outer(p, p) + 4 * x).exp().sum(),
        torch.zeros(3), "pass",
    ),
    "smooth kernel": (lambda p, x: (-(torch.cdist(p, x) ** 2)).exp().sum(), torch.eye(3), "pass"),
    "dead units": (lambda p, x: (x @ p - 9).relu().sum() + p.square().sum(), torch.ones(3), "pass"),
}  # fmt: skip


@rows("name", AT)
@rows("route", ["rr", "fr"])
def test_a_route_is_judged_at_params_too(name: str, route: str) -> None:
    loss, params, expected = AT[name]
    report = hog.audit(loss, params, torch.eye(3), routes=route)
    found = {row.name: row for row in report}.get(f"{ROWS[route]}, at params")
    assert (found.status if found else "pass") == expected, str(report)
    assert report.ok == (expected != "fail"), str(report)
    assert report.judged
    if expected == "fail":
        assert found is not None
        assert "a branch of torch.where" in found.text
        assert report.culprits == ("the loss",)


# What is wrong: by default, reverse-over-reverse.


def weight_norm() -> nn.Module:
    return smooth(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)))


class Float32Only(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x.sin()


def with_a_hook() -> nn.Module:
    def hook(*args: Any) -> None:
        raise ValueError("no")

    model = smooth()
    model[0].register_full_backward_hook(hook)
    return model


POISONED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "cached tensor in a residual block": (
        lambda: Net(nn.Identity(), Applies(Cached.apply), nn.Identity()),
        "blocks.1.norm", "ctx.slope",
    ),
    "cached tensor on ctx": (lambda: smooth(Applies(Cached.apply)), "2", "ctx.slope"),
    "once_differentiable": (
        lambda: Net(nn.Identity(), Applies(OnceDifferentiable.apply)), "blocks.1.norm", "once_differentiable",
    ),
    "weight_norm": (weight_norm, "2.parametrizations.weight.0", "_weight_norm"),
    "wrong first derivative": (lambda: smooth(Applies(WrongScale.apply)), "2", "0.5 times"),
    "wrong first derivative beside kinks": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.ReLU(), Applies(WrongScale.apply), nn.Linear(6, 3)),
        "3", "0.5 times",
    ),
    "hardsigmoid": (lambda: smooth(Applies(lambda x: F.hardsigmoid(x) * x)), "2", "hardsigmoid"),
    "a backward hook that raises": (with_a_hook, "0", "ValueError (no)"),
    "what does not run in float64": (lambda: smooth(Float32Only(), Applies(Cached.apply)), "3", "ctx.slope"),
}  # fmt: skip


@pytest.mark.parametrize("name", POISONED)
def test_a_fault_is_named_by_module_and_operation(name: str) -> None:
    make, module, operation = POISONED[name]
    report = audited(make(), stand_ins=False)
    assert not report.ok
    assert report.culprits == (module,)
    assert operation in report[f"culprit: {module}"].text
    assert any(row.name.startswith(AUTO) for row in report.failed)
    with pytest.raises(hog.VerificationError, match=re.escape(module)):
        report.raise_if_failed()


def test_two_faults_are_named_and_one_operation_explained_once() -> None:
    report = audited(Net(Applies(Cached.apply), nn.Identity(), Applies(Cached.apply)))
    assert report.culprits == ("blocks.0.norm", "blocks.2.norm")
    assert "See `blocks.0.norm`." in report["culprit: blocks.2.norm"].text


def test_a_transformer_is_right_with_stand_ins_and_raises_without() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    model = smooth(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))
    _, params, (x, y) = problem(model)
    batch = (x[None].repeat(2, 1, 1), y[:2])
    loss = hog.functional_loss(model, lambda out, y: F.cross_entropy(out.mean(1), y))
    report = hog.audit(loss, params, batch)
    assert report.ok
    row = report[f"{AUTO}, without stand-ins"]  # what code outside of hoglib would run
    assert row.status == "warn"
    assert "`2.layers.0.self_attn` (MultiheadAttention): `scaled_dot_product_attention`" in row.text
    assert "hoglib.second_order()" in row.text
    report = hog.audit(loss, params, batch, stand_ins=False)
    assert report.culprits == ("2.layers.0.self_attn",)
    assert "scaled_dot_product_attention" in str(report)
    assert "stand_ins=True" in str(report)


# What is wrong by other routes: the rows of torch's silent errors.

NORM, FORWARD = ("rf", "ff", "grad of vmap", "third order"), ("rf", "ff")
SILENT: dict[str, tuple[Callable[[], nn.Module], str, int, tuple[str, ...]]] = {
    # model, module, width, routes
    "layer norm": (lambda: Net(nn.LayerNorm(6)), "blocks.0.norm", 4,
                   (*NORM, "torch.func.hessian", "jacrev of jacrev")),
    "batch norm": (lambda: Images(nn.BatchNorm2d(4)), "norm", 16, NORM),
    "instance norm": (lambda: Images(nn.InstanceNorm2d(4, affine=True)), "norm", 16, NORM),
    "solve": (lambda: smooth(Matrices(torch.linalg.solve)), "2", 4, FORWARD),
    "det": (lambda: smooth(Matrices(lambda a, x: torch.linalg.det(a))), "2", 4, FORWARD),
    "slogdet": (lambda: smooth(Matrices(lambda a, x: torch.linalg.slogdet(a)[1])), "2", 4, FORWARD),
    "logdet": (lambda: smooth(Matrices(lambda a, x: torch.logdet(a))), "2", 4, FORWARD),
    "a Function's own jvp": (lambda: smooth(Applies(Cube.apply)), "2", 4, ("ff",)),
}  # fmt: skip


# right from torch 2.15 on
LINEAR_ALGEBRA = ("solve", "det", "slogdet", "logdet")


@pytest.mark.parametrize(
    "name", [n for n in SILENT if n not in LINEAR_ALGEBRA or TORCH_VERSION < (2, 15)]
)
def test_a_silently_wrong_route_is_refused_by_name(name: str) -> None:
    make, module, width, routes = SILENT[name]
    report = audited(make(), width=width, routes=routes, stand_ins=False)
    assert report.culprits == (module,)
    for route in routes:
        assert report[ROWS[route]].status == "fail"
        # from torch 2.15 on batch_norm says that it has no third derivative
        assert re.search("is off by|3rd. order derivatives", report[ROWS[route]].text)
        assert f"`{module}`" in report[ROWS[route]].text


def test_a_route_that_was_not_requested_is_a_warning_that_names_the_module() -> None:
    for stand_ins, suffix in ((False, ""), (True, ", without stand-ins")):
        report = audited(Net(nn.LayerNorm(6)), stand_ins=stand_ins)
        assert report.ok
        assert {row.name for row in report.warnings} >= {ROWS[key] + suffix for key in NORM}
        assert all("blocks.0.norm" in row.text for row in report.warnings)


def test_a_route_that_raises_is_a_skip_that_names_module_and_operation() -> None:
    model = smooth(Applies(lambda x: F.mse_loss(x, x.detach() + 1) * x))
    report = audited(model, stand_ins=False)
    assert report.ok
    row = report[ROWS["fr"]]
    assert row.status == "skip"
    assert "`2` (Applies): `mse_loss`" in row.text
    assert audited(model, routes="fr", stand_ins=False).culprits == ("2",)


# Losses of any kind, and where their faults are.


def test_of_two_models_names_begin_with_what_the_loss_calls_them() -> None:
    encoder, decoder = smooth(), nn.Sequential(nn.Linear(3, 6), Applies(Cached.apply))

    def loss(params: Any, x: Tensor) -> Tensor:
        h = functional_call(encoder, params["encoder"], (x,))
        y: Tensor = functional_call(decoder, params["decoder"], (h,))
        return y.square().mean()

    params = {"encoder": hog.trainable_params(encoder), "decoder": hog.trainable_params(decoder)}
    assert hog.audit(loss, params, torch.randn(5, 4)).culprits == ("decoder.1",)


def test_a_criterion_that_is_a_module_is_named() -> None:
    class Criterion(Applies):
        def forward(self, outputs: Tensor, targets: Any) -> Tensor:
            return super().forward(outputs).mean()

    report = audited(smooth(), criterion=Criterion(Cached.apply))
    assert report.culprits == ("criterion",)


def test_a_loss_without_modules() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        y: Tensor = Cached.apply(w * x)  # type: ignore[no-untyped-call]
        return y.square().sum()

    report = hog.audit(loss, torch.randn(3), torch.randn(3))
    assert report.culprits == ("the loss",)
    assert "Cached" in str(report)


def test_a_loss_that_differentiates_inside_names_the_module() -> None:
    model = smooth(Applies(Cached.apply))

    def loss(params: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = functional_call(model, params, (x,)).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return slope.square().sum()

    report = hog.audit(loss, hog.trainable_params(model), torch.randn(5, 4))
    assert report[FIRST].status == "fail"
    assert report.culprits == ("2",)


def test_a_module_without_variables_is_no_culprit() -> None:
    model, scaling = smooth(), nn.Softmax(-1)

    def loss(params: Any, x: Tensor) -> Tensor:
        y: Tensor = functional_call(model, params, (scaling(x),))
        y.register_hook(lambda g: 2 * g)
        return y.square().sum()

    report = hog.audit(loss, hog.trainable_params(model), torch.randn(5, 4))
    assert report.culprits == ("the loss",)
    assert "The modules are right by themselves" in report["culprit: the loss"].text


def test_a_declared_surrogate_is_skipped() -> None:
    class Declared(WrongScale):
        surrogate = True

    report = audited(smooth(Applies(Declared.apply)))
    assert report.ok
    assert "declared a surrogate" in report[FIRST].text
    assert report[FIRST].status == "skip"


# What cannot be judged.


def test_a_stopped_gradient_inside_a_transform_is_not_judged() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return vmap(lambda row: (w @ row).sin().sum() * (w @ row).detach().sum())(x).mean()

    report = hog.audit(loss, torch.randn(3, 4), torch.randn(5, 4))
    assert report.ok
    assert not report.judged
    assert "inside of a torch.func transform" in report[AUTO].text


def test_a_loss_that_runs_at_its_own_parameters_alone_is_not_judged() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        assert torch.equal(w, w.round())
        return (w * x).sin().sum()

    report = hog.audit(loss, torch.ones(3), torch.randn(3))
    assert report.ok
    assert not report.judged


def test_half_precision_inside_shows_in_the_own_dtype() -> None:
    report = audited(smooth(Applies(lambda x: x.half().float() * 3)))
    error = report[f"{AUTO}, in float32"].error
    assert error is not None
    assert error > 1e-5
    assert report[AUTO].status == "pass"
