"""The audit notes what is fragile, changes nothing, and refuses what it cannot check."""

import os
import random
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib.auditing.routes import requested_routes
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NoSecondDerivative,
    UnsupportedError,
)
from hoglib.stand_ins import mode as stand_in_mode
from tests.auditing.cases import Applies, Cached, problem, smooth
from tests.functions import OnceDifferentiable
from tests.refused import refused
from tests.rows import rows


class Base(nn.Module):
    """Two layers, for what a subclass adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh())
        return y


def audited(model: nn.Module, **options: Any) -> hog.Report:
    return hog.audit(*problem(model), **options)


def judged(report: hog.Report) -> bool:
    """Right, in float64, with no doubt."""
    return report.ok and report.judged and "dtype: float64" not in {row.name for row in report}


# What is fragile.


class CastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = self.inner(x)
        return y.float()


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


def unused() -> nn.Module:
    model = Base()
    model.spare = nn.Linear(2, 2)
    return model


# its row of the report, and words of it: a warning, or what fails
FLAWED: dict[str, tuple[Callable[[], nn.Module], str, str, str]] = {
    "dropout": (lambda: smooth(nn.Dropout(0.5)), "dropout", "`2`", "warn"),
    "functional dropout": (lambda: smooth(Applies(lambda x: F.dropout(x))), "dropout", "`2`", "warn"),
    "noise": (lambda: smooth(Applies(lambda x: x + torch.randn_like(x))), "random numbers", "`2`", "warn"),
    "Python's numbers": (lambda: smooth(Applies(lambda x: x * random.random())), "random numbers", "Python's random", "warn"),
    "batch norm": (lambda: smooth(nn.BatchNorm1d(6)), "batch norm", "`2`", "warn"),
    "autocast": (lambda: smooth(CastInside()), "autocast", "`2.inner`", "warn"),
    "once": (lambda: smooth(Applies(OnceDifferentiable.apply)), "once_differentiable", "OnceDifferentiable in `2`", "warn"),
    "reentrant": (lambda: smooth(Applies(lambda x: checkpoint(torch.sin, x, use_reentrant=True))), "reentrant checkpoint", "`2`", "warn"),
    "compiled": (lambda: smooth(torch.compile(nn.Linear(6, 6), backend="eager")), "compiled", "`2`", "warn"),
    "state": (lambda: smooth(Counts()), "state", "`2.calls`", "warn"),
    "stopped": (lambda: smooth(Applies(lambda x: x * x.norm().detach())), "stopped gradients", "`2`", "warn"),
    "unused": (unused, "unused parameters", "spare.weight, spare.bias", "warn"),
    "nondeterministic": (lambda: smooth(Applies(lambda x: x * clock())), "deterministic", "two values", "fail"),
    "not finite": (lambda: smooth(Applies(lambda x: (-x.abs() - 1).log())), "finite", "`2` (Applies)", "fail"),
    "an error": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(5, 3)), "runs", "`1` (Linear)", "fail"),
}  # fmt: skip


@rows("name", FLAWED)
def test_what_is_fragile_or_broken_is_told_with_its_module(name: str) -> None:
    make, row, text, status = FLAWED[name]
    report = audited(make())
    assert report[row].status == status
    assert text in report[row].text


def test_autocast_around_the_call() -> None:
    given = problem(smooth())
    with torch.autocast("cpu", torch.bfloat16):
        report = hog.audit(*given)
    assert "around" in report["autocast"].text
    assert judged(report)


def clock() -> float:
    return int.from_bytes(os.urandom(4), "big") / 2**32


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


# What may not change.


class Keeps(Base):
    """Changes what it keeps, and not its value; has constants in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[int] = deque(maxlen=3)
        self.by_name: Any = defaultdict(list, constant=(torch.eye(6), [torch.ones(6, 6)]))
        self.nested: Any = {"log": [[0]], "tensor": torch.zeros(2)}
        self.space, self.array = SimpleNamespace(n=0, constant=torch.eye(6)), np.zeros(2)
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.Linear(2, 2).requires_grad_(False)
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.torch = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(1)
        self.by_name["a"].append(1)
        self.nested["log"][0].append(1)
        self.nested["tensor"].add_(1)
        self.space.n += 1
        self.array += 1
        with torch.no_grad():
            self.frozen.weight.mul_(0.9)
        self.frozen.bias.data = self.frozen.bias.data + 1
        self.python.random(), self.numpy.normal(), torch.rand((), generator=self.torch)
        random.random(), np.random.rand()
        self.first.register_forward_hook(lambda *args: None)
        weight = self.first.weight
        del self.first.weight
        self.first.weight = weight
        self.late = nn.Linear(2, 2)
        h = self.first(self.norm(x)) @ self.by_name["constant"][1][0] @ self.space.constant
        y: Tensor = self.last(h.tanh())
        return y


def kept(model: Keeps) -> list[str]:
    numbers = (
        model.python.getstate(),
        model.numpy.bit_generator.state,
        model.torch.get_state().tolist(),
    )
    plain = model.recent, model.by_name, model.nested, model.space, model.array
    others = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    parts = [*model._modules], [*model.first._parameters], len(model.first._forward_hooks)
    return [str(x) for x in (*numbers, *plain, *others, parts, model.training)]


def test_what_modules_keep_is_as_it_was() -> None:
    model = Keeps()
    before = kept(model), values(model)
    report = audited(model)
    assert (kept(model), values(model)) == before
    assert judged(report)


def test_a_batch_that_the_loss_changes_is_as_it_was() -> None:
    model = Base()
    _, params, (x, y) = problem(model)
    batch = {"x": x.clone(), "y": SimpleNamespace(y=y, scale=torch.ones(())), "log": [0]}

    def loss(params: Any, batch: Any) -> Tensor:
        batch["x"].mul_(0.9)
        batch["log"].append(1)
        batch["y"].scale.mul_(2)
        out = functional_call(model, params, (batch.pop("x").requires_grad_(),))
        return F.cross_entropy(out * batch["y"].scale, batch["y"].y)

    report = hog.audit(loss, params, batch)
    assert judged(report)
    assert torch.equal(batch["x"], x)  # type: ignore[arg-type]
    assert not batch["x"].requires_grad  # type: ignore[union-attr]
    assert batch["log"] == [0]
    assert batch["y"].scale == 1  # type: ignore[union-attr]


def values(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, id(x), x.data_ptr(), x.tolist(), x.requires_grad, x.grad) for name, x in tensors]


class Interrupted(Base):
    """Raises in one run. What `box` holds is not put back by the audit."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.norm, self.error, self.box = nn.BatchNorm1d(4), error, iter(range(at, -1000, -1))

    def forward(self, x: Tensor) -> Tensor:
        if next(self.box) == 1:
            raise self.error("bad luck")
        return super().forward(self.norm(x) + torch.rand(()))


@pytest.mark.parametrize("at", [1, 2, 8, 21])
def test_after_ctrl_c_everything_is_as_it_was(at: int) -> None:
    model = Interrupted(at, KeyboardInterrupt)
    before, state, given = values(model), torch.get_rng_state(), problem(model)
    with pytest.raises(KeyboardInterrupt):
        hog.audit(*given)
    assert values(model) == before
    assert torch.equal(state, torch.get_rng_state())
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_parameters_that_a_loss_writes_to_are_as_they_were() -> None:
    model = smooth(nn.BatchNorm1d(6), Applies(lambda x: x + model[0].bias.data.mul_(0.9)))
    before = values(model)
    audited(model)
    assert values(model) == before


def test_two_threads_at_once() -> None:
    model = smooth(nn.BatchNorm1d(6), Applies(Cached.apply))
    given, state = problem(model), torch.get_rng_state()
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda _: hog.audit(*given).culprits, range(2))
    assert list(found) == [("3",), ("3",)]
    assert all(x.dtype != torch.float64 for x in model.state_dict().values())
    assert torch.equal(state, torch.get_rng_state())


def test_it_is_the_same_twice_and_under_no_grad() -> None:
    loss, params, (x, y) = problem(smooth(nn.LayerNorm(6)))
    first = hog.audit(loss, params, (x, y)).to_json()
    with torch.inference_mode():
        assert hog.audit(loss, params, (x.clone(), y)).to_json() == first


# What is converted, and what stands around the call.


def test_an_embedding_that_is_renormalised_and_has_padding() -> None:
    model = nn.Sequential(nn.Embedding(5, 6, padding_idx=0, max_norm=1.0), nn.Linear(6, 3))
    nn.init.normal_(model[0].weight)
    batch = (torch.tensor([0, 1, 2, 0, 3]), torch.tensor([0, 1, 2, 0, 1]))
    loss = hog.functional_loss(model, lambda out, y: F.cross_entropy(out.sin(), y))
    assert judged(hog.audit(loss, hog.trainable_params(model), batch))
    assert (model[0].max_norm, model[0].padding_idx) == (1.0, 0)


def test_complex_parameters() -> None:
    w = torch.randn(3, dtype=torch.complex64)
    assert judged(hog.audit(lambda w, x: (w * x).sin().abs().square().sum(), w, torch.randn(3)))


def test_the_default_device_is_not_that_of_the_data() -> None:
    given = problem(smooth())
    with torch.device("meta"):
        assert judged(hog.audit(*given))
        hog.verify(torch.sin, given[2][0]).raise_if_failed()
        assert hog.curvature.hessian_spectrum(*given).largest[0] > 0
        assert (hog.influence(*given, None, damping=1.0) < 0).all()


# Arguments.


def lazily(w: Tensor, x: Tensor) -> Tensor:
    return LAZY(x @ w).square().sum()


ONE, LAZY = torch.ones(3), nn.LazyLinear(3)
ARGUMENTS: dict[str, Any] = {
    "a loss that is no function": (((3, ONE, None), {}), ArgumentTypeError, "loss: expected a function"),
    "a model as the loss": (((smooth(), ONE, None), {}), ArgumentTypeError, "functional_loss"),
    "an iterator of params": (((max, iter([ONE]), None), {}), ArgumentTypeError, "trainable_params"),
    "no params": (((max, {}, None), {}), ArgumentValueError, "params: expected at least one tensor"),
    "a used-up batch": (((max, ONE, iter([ONE])), {}), ArgumentTypeError, r"one batch .* pass list\(...\)"),
    "a loader": (((max, ONE, torch.utils.data.DataLoader([ONE])), {}), ArgumentTypeError, "one batch .* DataLoader"),
    "no scalar": (((lambda w, b: w, ONE, None), {}), ArgumentValueError, "expected a scalar"),
    "stand_ins": (((max, ONE, None), {"stand_ins": "yes"}), ArgumentTypeError, "expected True or False"),
    "an unknown route": (((max, ONE, None), {"routes": "rv"}), ArgumentValueError, r"routes: .*'rv'"),
    "no route": (((max, ONE, None), {"routes": []}), ArgumentTypeError, "routes: expected some of"),
    "lazy params": (((max, dict(LAZY.named_parameters()), None), {}), ArgumentValueError, "lazy module that has not run"),
    "sparse params": (((max, {"w": torch.eye(3).to_sparse()}, None), {}), ArgumentTypeError, r"\['w'\]: .*dense.*sparse"),
    "meta params": (((max, torch.ones(3, device="meta"), None), {}), ArgumentTypeError, "with values.*meta"),
    "float8 params": (((max, ONE.to(torch.float8_e4m3fn), None), {}), ArgumentTypeError, "float8_e4m3fn"),
    "a lazy module": (((lazily, ONE, ONE), {}), ArgumentValueError, "lazy and has not run"),
}  # fmt: skip


test_arguments_of_the_wrong_kind_are_refused = refused(
    ARGUMENTS, lambda given: hog.audit(*given[0], **given[1])
)


def test_transforms_around_the_call_are_refused() -> None:
    def inside(x: Tensor) -> Tensor:
        hog.audit(lambda w, b: w.sum(), ONE, None)
        return x

    with pytest.raises(UnsupportedError, match=r"outside of torch\.func transforms"):
        torch.func.grad(inside)(torch.ones(()))


def test_other_names_of_routes() -> None:
    names = requested_routes(["auto", "reverse-over-reverse", "rrr"])
    assert names == requested_routes(["rr", "third order"])


def test_a_value_that_a_stand_in_changes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    assert audited(model).ok
    other = lambda x, shape, *_, **__: F.rms_norm(x, shape)  # noqa: E731
    monkeypatch.setitem(stand_in_mode._replacements(), F.layer_norm, other)
    assert audited(model)["value"].status == "fail"


def test_the_value_of_data_that_is_fitted_exactly_is_rounding() -> None:
    x = torch.tensor([0.3, 0.7, 1.1, 1.9, 0.6], dtype=torch.float64)
    target = (3 * x).prod()
    report = hog.audit(lambda p, x: ((p * x).prod() - target).square(), 3 * torch.ones_like(x), x)
    assert report.ok, report
