"""The audit of what is out of the ordinary: it changes nothing, and has no false errors."""

import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jvp, vmap

import hoglib as hog
from hoglib._core.torch_internals import watching_functions
from hoglib.errors import ArgumentTypeError, ArgumentValueError, HoglibError, UnsupportedError
from tests.auditing.cases import Applies, Cached, problem, smooth

AUTO = "second derivative: reverse-over-reverse"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
    rows = {row.name: row for row in report.rows}
    return report.ok and report.judged and "dtype: float64" not in rows


# What may not change.


class Keeps(Base):
    """Changes what it keeps, and not its value."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[int] = deque(maxlen=3)
        self.by_name: defaultdict[str, list[int]] = defaultdict(list)
        self.ordered: OrderedDict[str, int] = OrderedDict()
        self.nested = {"log": [[0]], "tensor": torch.zeros(2)}
        self.space, self.array = SimpleNamespace(n=0), np.zeros(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.torch = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.recent.append(1)
        self.by_name["a"].append(1)
        self.ordered["a"] = 1
        self.nested["log"][0].append(1)  # type: ignore[union-attr]
        self.nested["tensor"].add_(1)  # type: ignore[union-attr]
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
        return super().forward(x)


def kept(model: Keeps) -> list[str]:
    numbers = (
        model.python.getstate(),
        model.numpy.bit_generator.state,
        model.torch.get_state().tolist(),
    )
    plain = (model.recent, model.by_name, model.ordered, model.nested, model.space, model.array)
    others = (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())
    parameters = [(name, id(p), p.data_ptr(), p.tolist()) for name, p in model.named_parameters()]
    parts = ([*model._modules], [*model.first._parameters], len(model.first._forward_hooks))
    return [str(x) for x in (*numbers, *plain, *others, parameters, parts)]


def test_what_modules_keep_is_as_it_was() -> None:
    model = Keeps()
    before = kept(model)
    report = audited(model)
    assert kept(model) == before
    assert judged(report)
    assert "random numbers" in {row.name for row in report.warnings}


class InPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.bias.mul_(0.9)
        return super().forward(x)


def test_parameters_that_a_loss_writes_to_are_as_they_were() -> None:
    model = InPlace()
    before = [p.detach().clone() for p in model.parameters()]
    audited(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


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


class Interrupted(Base):
    def __init__(self, at: int, error: type[BaseException], every: bool = False) -> None:
        super().__init__()
        self.norm, self.left, self.error, self.every = nn.BatchNorm1d(4), [at], error, every
        self.box = Box(at)

    def forward(self, x: Tensor) -> Tensor:
        self.box.left -= 1
        if self.box.left == 0 or (self.every and self.box.left < 0):
            raise self.error("bad luck")
        return super().forward(self.norm(x) + torch.rand(()))


class Box:
    """What the audit does not put back."""

    def __init__(self, left: int) -> None:
        self.left = left


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13, 21])
def test_after_ctrl_c_everything_is_as_it_was(at: int) -> None:
    model = Interrupted(at, KeyboardInterrupt)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (id(x), x.tolist()) for name, x in tensors.items()}
    state, given = torch.get_rng_state(), problem(model)
    with pytest.raises(KeyboardInterrupt):
        hog.audit(*given)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before == {name: (id(x), x.tolist()) for name, x in tensors.items()}
    assert torch.equal(state, torch.get_rng_state())
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 10, 30])
@pytest.mark.parametrize("every", [False, True])
def test_an_error_in_any_run_is_reported(at: int, every: bool) -> None:
    report = audited(Interrupted(at, ValueError, every))
    assert report.ok or "bad luck" in str(report)


@pytest.mark.parametrize("same", [False, True])
def test_two_threads_at_once(same: bool) -> None:
    models = [smooth(nn.BatchNorm1d(6), Applies(Cached.apply)) for _ in range(2)]
    models = models[:1] * 2 if same else models
    given = [problem(model) for model in models]
    found: list[Any] = [None, None]
    state = torch.get_rng_state()

    def run(i: int) -> None:
        found[i] = hog.audit(*given[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.culprits for report in found] == [("3",), ("3",)]
    assert all(x.dtype != torch.float64 for m in models for x in m.state_dict().values())
    assert torch.equal(state, torch.get_rng_state())


def test_a_watch_on_functions_may_stand_inside_of_another() -> None:
    outer: list[Any] = []
    inner: list[Any] = []
    x = torch.ones(2)
    with watching_functions(lambda function, args: outer.append(function)):
        with watching_functions(lambda function, args: inner.append(function)):
            Cached.apply(x)  # type: ignore[no-untyped-call]
        Cached.apply(x)  # type: ignore[no-untyped-call]
    assert (outer, inner) == ([Cached, Cached], [Cached])


def test_a_model_that_another_thread_runs_is_not_seen() -> None:
    other, mine = nn.Linear(4, 4), smooth()

    class Starts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=other, args=(torch.ones(1, 4),))
            thread.start()
            thread.join()
            seen.add(other.weight.dtype)
            return x

    seen: set[torch.dtype] = set()
    assert judged(audited(mine.append(Starts())))
    assert seen == {torch.float32}


# No false errors.


class Holds(Base):
    """Constants in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.by_name = [torch.ones(6, 6)], {"a": (torch.eye(6), [torch.eye(6)])}
        self.space = SimpleNamespace(a=torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) @ self.scales[0] @ self.by_name["a"][1][0] @ self.space.a
        y: Tensor = self.last(h.tanh())
        return y


def test_tensors_in_containers_go_to_float64_too() -> None:
    assert judged(audited(Holds()))


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
    assert judged(report), str(report)


def test_a_stopped_gradient_inside_a_transform_is_not_judged() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return vmap(lambda row: (w @ row).sin().sum() * (w @ row).detach().sum())(x).mean()

    report = hog.audit(loss, torch.randn(3, 4), torch.randn(5, 4))
    assert report.ok
    assert not report.judged
    assert "inside of a torch.func transform" in report[AUTO].text


def test_third_derivatives_hold_what_is_stopped() -> None:
    model = smooth(Applies(lambda x: x * x.norm().detach()))
    assert judged(audited(model, routes="rrr"))


def test_an_embedding_that_is_renormalised_and_has_padding() -> None:
    model = nn.Sequential(nn.Embedding(5, 6, padding_idx=0, max_norm=1.0), nn.Linear(6, 3))
    nn.init.normal_(model[0].weight)
    batch = (torch.tensor([0, 1, 2, 0, 3]), torch.tensor([0, 1, 2, 0, 1]))
    loss = hog.functional_loss(model, lambda out, y: F.cross_entropy(out.sin(), y))
    assert judged(hog.audit(loss, hog.trainable_params(model), batch))
    assert model[0].max_norm == 1.0


def test_the_default_device_is_not_that_of_the_audit() -> None:
    given = problem(smooth())
    torch.set_default_device("meta")
    try:
        assert judged(hog.audit(*given))
    finally:
        torch.set_default_device(None)


def test_a_model_that_runs_at_its_own_parameters_alone_is_not_judged() -> None:
    class Asserts(Base):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.equal(self.last.bias, self.last.bias.round())
            return super().forward(x)

    model = Asserts()
    nn.init.zeros_(model.last.bias)
    report = audited(model)
    assert report.ok
    assert not report.judged


# What is explained.


def test_a_backward_hook_that_raises_is_named() -> None:
    def hook(*args: Any) -> None:
        raise ValueError("no")

    model = smooth()
    model[0].register_full_backward_hook(hook)
    report = audited(model)
    assert report.culprits == ("0",)
    assert "ValueError (no)" in str(report)


def test_a_loss_that_is_not_finite_is_reported() -> None:
    loss, params, (x, y) = problem(smooth())
    report = hog.audit(loss, params, (x / 0, y))
    assert not report.ok
    assert "`0` (Linear)" in report["finite"].text


REFUSED: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.ones(3, device="meta"),
    "complex32": lambda: torch.ones(3).to(torch.complex32),
    "float8_e4m3fn": lambda: torch.ones(3).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # as torch says of it
def test_params_of_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"params\['w'\]: expected a dense tensor.*{kind}"):
        hog.audit(lambda p, b: p["w"].sum(), {"w": REFUSED[kind]()}, None)


def test_a_batch_that_is_used_up_is_refused() -> None:
    loss, params, (x, y) = problem(smooth())
    with pytest.raises(ArgumentTypeError, match=r"batch: expected one .* pass list\(...\)"):
        hog.audit(loss, params, iter([x, y]))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")  # as torch says of it
def test_lazy_modules_are_refused() -> None:
    lazy = nn.LazyLinear(3)
    model = nn.Sequential(lazy)
    refused: type[HoglibError] = ArgumentValueError
    with pytest.raises(refused, match="lazy module that has not run"):
        hog.audit(hog.functional_loss(model, F.cross_entropy), dict(lazy.named_parameters()), None)
    with pytest.raises(refused, match="lazy and has not run"):
        hog.audit(lambda w, x: lazy(x @ w).square().sum(), torch.ones(4, 4), torch.ones(2, 4))


def test_transforms_around_the_call_are_refused() -> None:
    given = problem(smooth())

    def inside(x: Tensor) -> Tensor:
        hog.audit(*given)
        return x

    with pytest.raises(UnsupportedError, match=r"outside of torch\.func transforms"):
        torch.func.grad(inside)(torch.ones(()))


OTHER_NAMES = {"auto": AUTO, "rrr": "third derivative: reverse-over-reverse-over-reverse"}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_of_routes(name: str) -> None:
    report = hog.audit(lambda w, b: w.sin().sum(), torch.ones(3), None, routes=name)
    assert report[f"{OTHER_NAMES[name]}, in float32"].status == "pass"
