"""Scripted code, whose calls have stand-ins as those of Python have."""

import io
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as draw

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*deprecated", "ignore::torch.jit.TracerWarning"
)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor, power: int = 3) -> Tensor:
        return (F.layer_norm(self.norm(self.first(x)).tanh(), [4]) * x.exp()).pow(power).sum()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch._weight_norm(x, x[:, :1].exp(), 0)
        return F.mse_loss(self.last(weight).sin(), self.last(x), reduction="sum")


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        norms = F.batch_norm(x, None, None, training=True) + F.hardsigmoid(x)
        return (torch.cdist(x, 2 * x + 1) ** 2).sin().sum() + (norms.sin() ** 3).sum()


class Flow(nn.Module):
    """Loops, branches and containers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.count = 3

    def forward(self, x: Tensor) -> Tensor:
        rows: list[Tensor] = []
        named: dict[str, Tensor] = {"x": x}
        for i, layer in enumerate(self.layers):
            rows.append(F.layer_norm(layer(x), [4]) * (i + 1))
            named[f"{i}"] = rows[-1].tanh()
        i = 0
        while i < self.count and i < x.shape[0]:
            if x[i].sum() > 0:  # noqa: SIM108 a branch of a script
                x = x * 1.5
            else:
                x = torch.cat([x[1:], -x[:1]])
            i += 1
        for key, value in named.items():
            if key != "x" and "1" in named:
                x = x + value
        both, (last, half) = rows[::-1], (rows[1], self.count / 2)
        assert len(both) == 2, "two rows"
        return (both[0] * last * half).pow(2).sum() + x.softmax(-1).square().sum() + x.shape[1] // 3


class Lists(nn.Module):
    """What TorchScript has operators for that take no list from Python."""

    def forward(self, x: Tensor) -> Tensor:
        numbers = sorted([3.0, 1.0, 2.0])
        numbers.sort(reverse=True)
        del numbers[1]
        parts = [x.sin()]
        parts += [x.exp()] * 2
        size = float(len("%d rows" % len(parts)))  # noqa: UP031 as scripts have it
        weight = torch.tensor([numbers, numbers], dtype=x.dtype) + torch.tensor(0.1)
        steps = torch.as_tensor([1, 2]) + torch.as_tensor(x).sum()
        return (torch.cat(parts).pow(3)[:, :2] @ weight).sum() * size + (x[0, :2] * steps).sum()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.steps = nn.MultiheadAttention(4, 2), nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.heads(x, x, x)
        z, last = self.steps(y)
        return z.square().sum() + last.sin().sum()


class Ignoring(nn.Module):
    @torch.jit.ignore
    def plain(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.sin(), (4,))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x).pow(3).sum()


def loaded(model):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    return torch.jit.load(file)


X, V = draw(5, 4), draw(5, 4, seed=1)
MADE = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, X, check_trace=False),
    "load": loaded,
    "freeze": lambda model: torch.jit.freeze(torch.jit.script(model.eval())),
}


def derivatives(f):
    """Of order 1 to 3, in every mode."""

    def turned(f, **options):
        x = X.clone().requires_grad_()
        found = f(x, **options)
        return torch.autograd.grad((found * found.detach().cos()).sum(), x)

    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        yield hog.hvp(f, X, V, mode=mode)
        yield turned(lambda x, mode=mode: hog.hvp(f, x, V, mode=mode, create_graph=True)[1])
    yield turned(lambda x: hog.jvp(f, (x,), (V,))[1])
    yield hog.jet(f, X, [V, None, None])
    yield hog.HessianOperator(lambda p, b: f(p), X, X) @ V
    yield hog.per_example_gradients(lambda p, b: f(p * b[0]), X, torch.ones(2, 1, dtype=F64))


@pytest.mark.parametrize("made", MADE)
@rows("kind", [Normed, Weighted, Distances, Flow, Lists, Layers, Ignoring])
def test_scripted_code_has_the_derivatives_of_its_python(made, kind):
    torch.manual_seed(0)
    model = kind().to(F64)
    if kind is Ignoring and made != "script":
        return  # torch saves no Python
    scripted = MADE[made](model)
    for _ in range(3):  # torch optimizes the second run
        scripted(X.clone().requires_grad_()).backward()
    torch.testing.assert_close(list(derivatives(scripted)), list(derivatives(model)))


def several(
    x: Tensor, names: list[str], factor: float = 2.0
) -> tuple[list[Tensor], dict[str, Tensor]]:
    y, z = x.chunk(2, 1)
    return [(y * factor).pow(3).sum(), z], {names[0]: F.layer_norm(z, [2])}


def test_arguments_and_results_are_those_of_the_script():
    def total(call):
        def f(x):
            (a, b), named = call(x)
            return a + (b.sin() * named["b"] ** 3).sum()

        return f

    script = torch.jit.script(several)
    scripted = total(lambda x: script(x, names=["b"], factor=0.5))
    plain = total(
        lambda x: ([(x[:, :2] * 0.5).pow(3).sum(), x[:, 2:]], {"b": F.layer_norm(x[:, 2:], (2,))})
    )
    torch.testing.assert_close(hog.hvp(scripted, X, V), hog.hvp(plain, X, V))
    for args, options in (((), {}), ((X, ["a"], 2.0, 2), {}), ((X, ["a"]), {"no": 1})):
        with hog.second_order(), pytest.raises(TypeError, match="argument"):
            script(*args, **options)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def forked(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(F.layer_norm, x, [4])).sin().sum()


def smooth_fork(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(torch.sin, x)).sum()


def named(x: Tensor) -> Pair:
    return Pair(F.layer_norm(x, [4]), x)


OTHER = {  # a function, what is said of it, and whether the reverse mode runs
    "fork": (forked, "calls of layer_norm in Python.*prim::fork", False),
    "fork of others": (smooth_fork, "derivatives in Python.*prim::fork", True),
    "named tuple": (named, "calls of layer_norm in Python.*prim::TupleConstruct", False),
}


@rows("name", OTHER)
def test_scripted_code_that_python_does_not_run_is_refused_where_it_is_wrong(name):
    function, message, reverse = OTHER[name]
    scripted = torch.jit.script(function)
    f = lambda x: torch.as_tensor(scripted(x)[0] if name == "named tuple" else scripted(x)).sum()  # noqa: E731
    if reverse:
        torch.testing.assert_close(hog.hvp(f, X, V)[1], -X.sin() * V)
    for mode in ("reverse-over-reverse", "forward-over-reverse")[reverse:]:
        with pytest.raises(NotImplementedError, match=f"{function.__name__}: expected {message}"):
            hog.hvp(f, X, V, mode=mode)
