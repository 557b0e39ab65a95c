"""The audit of whole models: right ones pass in silence, faults are named by module and operation."""

import copy
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import hoglib as hog
from hoglib.errors import NoSecondDerivative
from hoglib.stand_ins.table import TORCH_VERSION
from tests.auditing.cases import (
    Applies,
    Cached,
    Images,
    Matrices,
    Net,
    RawNorm,
    Recomputed,
    WrongScale,
    problem,
    smooth,
)
from tests.functions import Cube, OnceDifferentiable

AUTO = "second derivative: reverse-over-reverse"
RF, FF = "second derivative: reverse-over-forward", "second derivative: forward-over-forward"
THIRD = "third derivative: reverse-over-reverse-over-reverse"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def audited(model: nn.Module, **options: Any) -> hog.Report:
    given = {name: options.pop(name) for name in ("width", "rows", "criterion") if name in options}
    return hog.audit(*problem(model, **given), **options)


# What is right.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out((q @ k.mT / 6**0.5).softmax(-1) @ v)


class StraightThrough(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + ((x * 4).round() / 4 - x).detach()


def lstm() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.lstm(x.reshape(len(x), 2, 2))[0][:, -1])
            return y

    return Last()


def zeros_at_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    for p in model[2].parameters():
        nn.init.zeros_(p)
    return model


CLEAN: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: smooth(),
    "relu": lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)),
    "group norm and convolution": lambda: Images(nn.GroupNorm(2, 4)),
    "batch norm in eval mode": lambda: smooth(nn.BatchNorm1d(6)).eval(),
    "attention": lambda: smooth(Attention()),
    "rms norm": lambda: Net(nn.RMSNorm(6), nn.RMSNorm(6)),
    "lstm": lstm,
    "spectral norm": lambda: smooth(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    ).eval(),
    "zeros at first": zeros_at_first,
    "a Function of hoglib": lambda: smooth(Applies(lambda x: hog.ops.swish(x, 1.3))),
    "checkpoint": lambda: smooth(Applies(checkpointed)),
    "dropout that is off": lambda: smooth(nn.Dropout(0.5)).eval(),
}


def checkpointed(x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    y: Tensor = checkpoint(torch.sin, x, use_reentrant=False)
    return y


@pytest.mark.parametrize("name", CLEAN)
def test_right_models_raise_nothing(name: str) -> None:
    model = CLEAN[name]()
    width = 16 if isinstance(model, Images) else 4
    report = audited(model, width=width)
    assert report.ok
    assert report.judged
    assert not report.warnings, str(report)
    assert not report.culprits
    error = report[AUTO].error
    assert error is not None
    assert error < 1e-5


def test_a_transformer_is_right_with_stand_ins_and_raises_without() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    model = smooth(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    loss, params, (x, y) = problem(model)
    batch = (x[None].repeat(2, 1, 1), y[:2])

    def mean_over_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.mean(1), targets)

    loss = hog.functional_loss(model, mean_over_tokens)
    assert hog.audit(loss, params, batch, stand_ins=True).ok
    report = hog.audit(loss, params, batch)
    assert not report.ok
    assert all("self_attn" in name for name in report.culprits)
    assert "scaled_dot_product_attention" in str(report)
    assert "stand_ins=True" in str(report)


# What is wrong: by default, reverse-over-reverse.


def weight_norm() -> nn.Module:
    return smooth(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)))


POISONED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "raw kernel in a residual block": (
        lambda: Net(nn.Identity(), Applies(RawNorm.apply), nn.Identity()),
        "blocks.1.norm", "RawNorm",
    ),
    "cached tensor on ctx": (lambda: smooth(Applies(Cached.apply)), "2", "ctx.slope"),
    "once_differentiable": (
        lambda: Net(nn.Identity(), Applies(OnceDifferentiable.apply)), "blocks.1.norm", "once_differentiable",
    ),
    "weight_norm": (weight_norm, "2.parametrizations.weight.0", "_weight_norm"),
    "wrong first derivative": (lambda: smooth(Applies(WrongScale.apply)), "2", "0.5 times"),
    "recomputing over a closure": (Recomputed, "Recomputed", "Recompute"),
    "cdist": (
        lambda: smooth(Applies(lambda x: torch.cdist(x, x.detach() + 1)[:, :1] * x)), "2", "cdist",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POISONED)
def test_a_fault_is_named_by_module_and_operation(name: str) -> None:
    make, module, operation = POISONED[name]
    report = audited(make())
    assert not report.ok
    assert report.culprits == (module,)
    assert operation in report[f"culprit: {module}"].text
    assert report[AUTO].status == "fail"
    with pytest.raises(hog.VerificationError, match=re.escape(module)):
        report.raise_if_failed()


def test_two_faults_are_both_named() -> None:
    model = Net(Applies(Cached.apply), nn.Identity(), Applies(RawNorm.apply))
    assert audited(model).culprits == ("blocks.0.norm", "blocks.2.norm")


def test_stand_ins_are_right_where_torch_is_wrong() -> None:
    assert audited(weight_norm(), stand_ins=True).ok


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
def test_chunked_linear_cross_entropy_in_the_model_itself() -> None:
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h, last = self.first(x).tanh(), self.last
            options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
            value: Tensor = F.linear_cross_entropy(h, last.weight, y, options=options)
            return value

    model = Chunked()
    _, params, batch = problem(model)
    loss = hog.functional_loss(
        model, lambda value, batch: value, forward=lambda model, batch: model(*batch)
    )
    report = hog.audit(loss, params, batch)
    assert report.culprits == ("Chunked",)
    assert "linear_cross_entropy" in str(report)


# What is wrong by other routes: the rows of torch's silent errors.

SILENT: dict[str, tuple[Callable[[], nn.Module], str, str, int]] = {
    # route, model, module, width
    f"{route}: {name}": (make, route, module, width)
    for name, make, module, width, routes in (
        ("layer norm", lambda: Net(nn.LayerNorm(6)), "blocks.0.norm", 4,
         ("rf", "ff", "torch.func.hessian", "jacrev of jacrev", "grad of vmap", "third order")),
        ("batch norm", lambda: Images(nn.BatchNorm2d(4)), "norm", 16,
         ("rf", "ff", "grad of vmap", "third order")),
        ("instance norm", lambda: Images(nn.InstanceNorm2d(4, affine=True)), "norm", 16,
         ("rf", "ff", "grad of vmap", "third order")),
        ("solve", lambda: smooth(Matrices(torch.linalg.solve)), "2", 4, ("rf", "ff")),
        ("det", lambda: smooth(Matrices(lambda a, x: torch.linalg.det(a))), "2", 4, ("rf", "ff")),
        ("slogdet", lambda: smooth(Matrices(lambda a, x: torch.linalg.slogdet(a)[1])), "2", 4,
         ("rf", "ff")),
        ("logdet", lambda: smooth(Matrices(lambda a, x: torch.logdet(a))), "2", 4, ("rf", "ff")),
        ("a Function's own jvp", lambda: smooth(Applies(Cube.apply)), "2", 4, ("ff",)),
    )
    for route in routes
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_a_silently_wrong_route_is_refused_by_name(name: str) -> None:
    make, route, module, width = SILENT[name]
    report = audited(make(), width=width, routes=route)
    assert not report.ok
    assert report.culprits == (module,)


def test_a_route_that_was_not_requested_is_a_warning_that_names_the_module() -> None:
    report = audited(Net(nn.LayerNorm(6)))
    assert report.ok
    assert {row.name for row in report.warnings} >= {RF, FF, THIRD}
    assert all("blocks.0.norm" in row.text for row in report.warnings)


@pytest.mark.skipif(
    TORCH_VERSION < (2, 13), reason="grid_sample has no double backward either before torch 2.13"
)
def test_a_route_that_raises_is_a_skip_that_names_module_and_operation() -> None:
    class Sampled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            image = x.reshape(len(x), 1, 2, 3)
            grid = x.tanh().reshape(len(x), 3, 1, 2)
            y: Tensor = F.grid_sample(image, grid, align_corners=False).reshape(len(x), 3)
            return y

    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Sampled(), nn.Linear(3, 3))
    report = audited(model)
    assert report.ok
    row = report["second derivative: forward-over-reverse"]
    assert row.status == "skip"
    assert "`2` (Sampled)" in row.text
    assert "grid_sample" in row.text
    assert audited(model, routes="fr").culprits == ("2",)


# What is fragile.


def warned(report: hog.Report) -> dict[str, str]:
    return {row.name: row.text for row in report.warnings if " derivative: " not in row.name}


class CastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.inner(x)
        return y.float()


def reentrant(x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    y: Tensor = checkpoint(torch.sin, x, use_reentrant=True)
    return y


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


FRAGILE: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "dropout": (lambda: smooth(nn.Dropout(0.5)), "dropout", "`2`"),
    "functional dropout": (lambda: smooth(Applies(lambda x: F.dropout(x))), "dropout", "`2`"),
    "noise": (lambda: smooth(Applies(lambda x: x + torch.randn_like(x))), "random numbers", "`2`"),
    "batch norm": (lambda: smooth(nn.BatchNorm1d(6)), "batch norm", "`2`"),
    "autocast": (lambda: smooth(CastInside()), "autocast", "`2"),
    "once": (lambda: smooth(Applies(OnceDifferentiable.apply)), "once_differentiable", "OnceDifferentiable in `2`"),
    "reentrant": (lambda: smooth(Applies(reentrant)), "reentrant checkpoint", "`2`"),
    "compiled": (
        lambda: smooth(torch.compile(nn.Linear(6, 6), backend="eager")), "compiled", "`2`",
    ),
    "state": (lambda: smooth(Counts()), "state", "`2.calls`"),
    "stopped": (
        lambda: smooth(Applies(lambda x: x * x.norm().detach())), "stopped gradients", "`2`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAGILE)
def test_what_is_fragile_is_a_warning_that_names_the_module(name: str) -> None:
    make, row, module = FRAGILE[name]
    found = warned(audited(make()))
    assert module in found[row]


def test_unused_parameters() -> None:
    model = smooth()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    assert "spare.weight, spare.bias" in warned(audited(model))["unused parameters"]


def test_autocast_around_the_call() -> None:
    given = problem(smooth())
    with torch.autocast("cpu", torch.bfloat16):
        report = hog.audit(*given)
    assert "around" in warned(report)["autocast"]


def test_half_precision_inside_shows_in_the_own_dtype() -> None:
    report = audited(smooth(Applies(lambda x: x.half().float() * 3)))
    row = report[f"{AUTO}, in float32"]
    assert row.error is not None
    assert row.error > 1e-5
    assert report[AUTO].status == "pass"


# What is stopped on purpose is held.


def test_a_straight_through_estimator_is_right() -> None:
    report = audited(smooth(StraightThrough()))
    assert report.ok
    assert report["first derivative: reverse"].status == "pass"


def test_a_target_under_no_grad_is_held() -> None:
    online, target = smooth(), smooth()

    def loss(params: Any, batch: Any) -> Tensor:
        out = functional_call(online, params, (batch[0],))
        with torch.no_grad():
            goal = functional_call(online, params, (batch[0] + 0.1,)) + target(batch[0])
        return F.mse_loss(out, goal)

    _, _, batch = problem(online)
    report = hog.audit(loss, hog.trainable_params(online), batch)
    assert report.ok
    assert "no_grad" in warned(report)["stopped gradients"]


# What may not change.


def state_of(model: nn.Module) -> Any:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(x), x.detach().clone(), x.requires_grad, x.grad) for name, x in tensors.items()},
        {name: (part.training, sorted(vars(part))) for name, part in model.named_modules()},
        {
            name: (len(part._forward_hooks), len(part._forward_pre_hooks))
            for name, part in model.named_modules()
        },
        torch.get_rng_state(),
    )


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3),
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), Applies(Cached.apply), Counts(),
        nn.LayerNorm(6), nn.Linear(6, 3),
    )  # fmt: skip
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(problem(model)[2])
    loss, params, batch = problem(model)
    first = state_of(model)
    report = hog.audit(loss, params, batch)
    assert not report.ok
    (tensors, parts, hooks, rng), now = first, state_of(model)
    for name, (identity, value, wants, grad) in tensors.items():
        assert now[0][name][0] == identity
        assert torch.equal(now[0][name][1], value)
        assert now[0][name][2:] == (wants, grad)
    assert (parts, hooks) == now[1:3]
    assert torch.equal(rng, now[3])
    assert all(torch.equal(a, b) for a, b in zip(batch, before, strict=True))
    assert all(p.requires_grad for p in params.values())


def test_nothing_changes_when_the_loss_raises_in_the_middle() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(5, 3))
    first = state_of(model)
    report = audited(model)
    assert not report.ran
    assert "`2` (Linear)" in report["runs"].text
    assert torch.equal(first[0]["1.running_mean"][1], model[1].running_mean)
    assert state_of(model)[1:3] == first[1:3]


def test_it_is_the_same_twice_and_under_no_grad() -> None:
    given = problem(Net(nn.LayerNorm(6), Applies(Cached.apply)))
    first = hog.audit(*given).to_json()
    with torch.no_grad():
        assert hog.audit(*given).to_json() == first
    with torch.inference_mode():
        x = given[2][0].clone()
        assert hog.audit(given[0], given[1], (x, given[2][1])).to_json() == first


# Losses of any kind.


def test_a_closure_over_a_model_is_named_as_its_parameters_are() -> None:
    model = Net(nn.Identity(), Applies(RawNorm.apply))

    def loss(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (batch[0],)), batch[1])

    _, params, batch = problem(model)
    assert hog.audit(loss, params, batch).culprits == ("blocks.1.norm",)


def test_of_two_models_names_begin_with_what_the_loss_calls_them() -> None:
    encoder, decoder = smooth(), nn.Sequential(nn.Linear(3, 6), Applies(Cached.apply))

    def loss(params: Any, x: Tensor) -> Tensor:
        h = functional_call(encoder, params["encoder"], (x,))
        y: Tensor = functional_call(decoder, params["decoder"], (h,))
        return y.square().mean()

    params = {
        "encoder": hog.trainable_params(encoder),
        "decoder": hog.trainable_params(decoder),
    }
    report = hog.audit(loss, params, torch.randn(5, 4))
    assert report.culprits == ("decoder.1",)


def test_a_criterion_that_is_a_module_is_named() -> None:
    class Criterion(nn.Module):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            y: Tensor = Cached.apply(outputs)  # type: ignore[no-untyped-call]
            return y.mean()

    assert audited(smooth(), criterion=Criterion()).culprits == ("criterion",)


def test_a_loss_without_modules() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        y: Tensor = Cached.apply(w * x)  # type: ignore[no-untyped-call]
        return y.square().sum()

    report = hog.audit(loss, torch.randn(3), torch.randn(3))
    assert report.culprits == ("the loss",)
    assert "Cached" in str(report)


def test_casts_to_float32_have_no_effect_in_float64() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().softmax(-1, dtype=torch.float32).to(x.dtype) * x

    report = audited(smooth(Casts()))
    error = report[AUTO].error
    assert report.ok
    assert error is not None
    assert error < 1e-6


def test_a_model_that_does_not_run_in_float64_is_checked_in_float32() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            return x.sin()

    report = audited(smooth(Refuses()))
    assert report.ok
    assert report["dtype: float64"].status == "skip"
    wrong = audited(smooth(Refuses(), Applies(Cached.apply)))
    assert wrong.culprits == ("3",)


def test_a_second_derivative_that_is_not_finite_at_the_parameters() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.square().sum(-1, keepdim=True).sqrt()

    model = smooth(Norm())
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    report = audited(model)
    assert not report.ok
    assert report.culprits == ("2",)


# Arguments.


def test_unknown_routes_are_refused() -> None:
    given = problem(smooth())
    with pytest.raises(ValueError, match=r"routes: expected some of .*'rv'"):
        hog.audit(*given, routes="rv")
    with pytest.raises(TypeError, match="routes: expected some of"):
        hog.audit(*given, routes=[])


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    loss, params, batch = problem(smooth())
    with pytest.raises(TypeError, match="loss: expected a function"):
        hog.audit(3, params, batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params: expected at least one tensor"):
        hog.audit(loss, {}, batch)
    with pytest.raises(TypeError, match="stand_ins: expected True or False"):
        hog.audit(loss, params, batch, stand_ins="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a scalar"):
        hog.audit(lambda params, batch: params["0.weight"], params, batch)


def test_a_loss_of_other_parameters_than_those_given() -> None:
    model = smooth()
    _, params, batch = problem(model)
    with pytest.raises(NoSecondDerivative, match="depends on params"):
        hog.audit(lambda params, batch: model(batch[0]).sum(), params, batch)

    def both(params: Any, batch: Any) -> Tensor:
        out: Tensor = functional_call(model, params, (batch[0],)).square().sum()
        return out + model[0].weight.square().sum()

    report = hog.audit(both, params, batch)
    assert report.culprits == ("the loss",)
    assert "0.weight" in str(report)


def test_no_warning_escapes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audited(smooth(Applies(reentrant), Applies(OnceDifferentiable.apply)))


def test_a_loss_that_is_not_finite_names_the_module() -> None:
    report = audited(smooth(Applies(lambda x: (-x.abs() - 1).log())))
    assert not report.ok
    assert "`2` (Applies)" in report["finite"].text


def test_a_nondeterministic_loss_fails() -> None:
    class Clock(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + int.from_bytes(os.urandom(4)) / 2**32)

    report = audited(smooth(Clock()))
    assert report["deterministic"].status == "fail"
    assert not report.ok


def test_what_cannot_be_compared_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    from hoglib.auditing import checker

    monkeypatch.setattr(checker, "RIGHT", {torch.float64: 0.0, torch.float32: 0.0})
    monkeypatch.setattr(checker, "CLEARLY", 1e12)
    report = audited(smooth())
    assert report.ok
    assert not report.judged
    with pytest.raises(hog.VerificationError, match="NOT JUDGED"):
        report.raise_if_failed()


def test_a_declared_surrogate_is_skipped() -> None:
    class Declared(WrongScale):
        surrogate = True

    report = audited(smooth(Applies(Declared.apply)))
    assert report.ok
    assert "declared a surrogate" in report["first derivative: reverse"].text
    assert report["first derivative: reverse"].status == "skip"


def test_a_loss_that_differentiates_inside_names_the_module() -> None:
    model = smooth(Applies(Cached.apply))

    def loss(params: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = functional_call(model, params, (x,)).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return slope.square().sum()

    report = hog.audit(loss, hog.trainable_params(model), torch.randn(5, 4))
    assert report["first derivative: reverse"].status == "fail"
    assert report.culprits == ("2",)


def test_third_order_holds_stopped_gradients() -> None:
    assert audited(smooth(Applies(lambda x: x.sin() * x.norm().detach())), routes="rrr").ok


def test_an_operation_is_explained_once() -> None:
    report = audited(Net(Applies(RawNorm.apply), Applies(RawNorm.apply)))
    assert report.culprits == ("blocks.0.norm", "blocks.1.norm")
    assert "See `blocks.0.norm`." in report["culprit: blocks.1.norm"].text


def test_wrong_kinds_of_loss_and_batch() -> None:
    loss, params, batch = problem(smooth())
    with pytest.raises(TypeError, match="functional_loss"):
        hog.audit(smooth(), params, batch)
    with pytest.raises(TypeError, match="trainable_params"):
        hog.audit(loss, smooth().parameters(), batch)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch))
    with pytest.raises(TypeError, match="one batch"):
        hog.audit(loss, params, loader)


def test_a_module_without_variables_is_no_culprit() -> None:
    model, scaling = smooth(), nn.Softmax(-1)

    def loss(params: Any, x: Tensor) -> Tensor:
        y: Tensor = functional_call(model, params, (scaling(x),))
        y.register_hook(lambda g: 2 * g)
        return y.square().sum()

    report = hog.audit(loss, hog.trainable_params(model), torch.randn(5, 4))
    assert report.culprits == ("the loss",)
    assert "The modules are right by themselves" in report["culprit: the loss"].text
