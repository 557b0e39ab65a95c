"""hvp and hessian against torch.func.hessian, finite differences and closed forms."""

import copy
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.models import Fn, Remembers
from tests.oracles import random_like, relative
from tests.refused import refused
from tests.rows import rows
from tests.unchanged import unchanged

MODES = ["auto", "reverse-over-reverse", "forward-over-reverse"]


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


Pair = namedtuple("Pair", ["a", "b"])
TREES = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, 2 * t),
    "named tuple": lambda t: Pair(t, 2 * t),
    "nested": lambda t: {"x": [t, {"y": 2 * t}], "z": (3 * t,)},
}


@rows("mode", MODES)
@rows("tree", TREES)
def test_any_pytree_in_and_the_same_out(tree, mode):
    x = torch.randn(2, 2, dtype=torch.float64)
    # v is a slice of a flat vector, at an odd offset
    params, v = TREES[tree](x), TREES[tree](torch.randn(5).double()[1:].view(2, 2))
    leaves = torch.utils._pytree.tree_leaves

    def func(p, scale):
        pairs = [torch.view_as_complex(leaf) for leaf in leaves(p)]
        return scale * torch.view_as_real(torch.cat(pairs)).pow(4).sum()

    _, product = hog.hvp(func, params, v, 2.0, mode=mode)
    assert type(product) is type(params)
    for ours, p, u in zip(leaves(product), leaves(params), leaves(v), strict=True):
        assert_close(ours, 24 * p**2 * u)
    expected = torch.func.hessian(func)(params, 2.0)
    for ours, theirs in zip(leaves(hog.hessian(func, params, 2.0)), leaves(expected), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_graph_takes_slices_at_any_offset(offset):
    func = lambda p: torch.view_as_complex(p).abs().pow(4).sum()  # noqa: E731
    x, flat = torch.randn(2, 2), torch.randn(6)
    for start in (offset, 1 - offset):
        v = flat[start:][:4].view(2, 2)
        assert_close(hog.hvp(func, x, v, compile="eager"), hog.hvp(func, x, v))


def test_grad_of_hvp_needs_no_create_graph_inside_transforms():
    x = torch.randn(3, dtype=torch.float64)
    func = lambda p: p.pow(4).sum()  # noqa: E731
    by_x = torch.func.grad(lambda p: hog.hvp(func, p, torch.ones_like(p))[1].sum())(x)
    assert_close(by_x, 24 * x)
    by_hessian = torch.func.grad(lambda p: hog.hessian(func, p).sum())(x)
    assert_close(by_hessian, 24 * x)


def shared_norm():
    norm = nn.BatchNorm1d(2)
    return nn.Sequential(norm, nn.Linear(2, 2), nn.Tanh(), norm)


CHANGEABLE = {
    "a BatchNorm in two places": shared_norm,
    "InstanceNorm with statistics": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2)),
        nn.InstanceNorm1d(1, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(2, 2),
    ),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    "a buffer that is assigned": Remembers,
    "an embedding with max_norm": lambda: Fn(
        lambda net, x: net.table(torch.arange(5)) * x, table=nn.Embedding(5, 2, max_norm=0.1)
    ),
}


@rows(
    ("name", "mode"),
    # torch's power iteration has no forward mode
    [
        (n, m)
        for n in CHANGEABLE
        for m in MODES
        if (n, m) != ("spectral norm", "forward-over-reverse")
    ],
)
def test_buffers_that_a_forward_changes_are_restored(name, mode):
    model = CHANGEABLE[name]().double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    batch = (torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64))
    v = random_like(params)
    with unchanged(model):
        first = hog.hvp(loss, params, v, batch, mode=mode)
    with unchanged(model, grads=False):
        assert_close(hog.hvp(loss, params, v, batch, mode=mode), first, rtol=0, atol=0)
        hog.MAML(model, F.mse_loss, over_tasks="loop").loss([(batch, batch)]).backward()
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def test_v_in_another_order():
    x, v = {"a": torch.randn(2), "b": torch.randn(3)}, {"b": torch.ones(3), "a": torch.ones(2)}
    func = lambda p: p[0]["a"].pow(3).sum() + p[0]["b"].pow(2).sum()  # noqa: E731
    One = namedtuple("One", "only")
    for wrap in (list, One._make):
        _, [product] = hog.hvp(func, wrap([x]), wrap([v]))
        assert list(product) == ["a", "b"]
    assert_close(product["b"], 2 * v["b"])


def test_a_structural_none_is_zero_and_strict_raises():
    x = {"used": torch.randn(2), "linear": torch.randn(2), "unused": torch.randn(2)}
    v = random_like(x)
    func = lambda p: p["used"].pow(2).sum() + p["linear"].sum()  # noqa: E731
    _, product = hog.hvp(func, x, v)
    assert_close(
        product, {"used": 2 * v["used"], "linear": 0 * v["linear"], "unused": 0 * v["unused"]}
    )
    assert hog.hessian(func, x)["linear"]["unused"].abs().sum() == 0
    with pytest.raises(RuntimeError, match="'linear', 'unused'"):
        hog.hvp(func, x, v, strict=True)
    # A linear loss: no second derivative at all
    _, product = hog.hvp(lambda p: p["used"].sum(), x, v)
    assert all(part.abs().sum() == 0 for part in product.values())


X, W = torch.randn(3), {"w": torch.randn(3, 2), "b": torch.randn(2)}
OWN = nn.Linear(3, 2)
OWN_LOSS = hog.functional_loss(OWN, F.mse_loss)
ERRORS = {
    "func is no function": (lambda: hog.hvp(3, X, X), TypeError, "func: expected a function"),
    "misspelt keyword of hvp": (lambda: hog.hvp(rosenbrock, X, X, creategraph=True), TypeError, "among mode, create_graph, strict, .* did you mean 'create_graph'"),
    "misspelt keyword of an operator": (lambda: hog.HessianOperator(OWN_LOSS, hog.trainable_params(OWN), (X, X), mod=1), TypeError, "did you mean 'mode'"),
    "inputs and targets apart": (lambda: hog.HessianOperator(OWN_LOSS, hog.trainable_params(OWN), X, X), TypeError, r"expected loss, params, data, and mode by name, .* `data=\("),
    "parameters of a model": (lambda: hog.hvp(OWN_LOSS, OWN.parameters(), X, (X, X)), TypeError, r"dict of tensors .*got generator .*trainable_params\(model\)"),
    "named parameters": (lambda: hog.HessianOperator(OWN_LOSS, OWN.named_parameters(), (X, X)), TypeError, r"got generator .*trainable_params\(model\)"),
    "the model for its parameters": (lambda: hog.hvp(OWN_LOSS, OWN, X, (X, X)), TypeError, r"got Linear\(in_features.*trainable_params\(model\)"),
    "no params": (lambda: hog.hvp(rosenbrock, {}, {}), ValueError, "at least one tensor"),
    "integer params": (lambda: hog.hvp(rosenbrock, torch.ones(2, dtype=torch.int), X), TypeError, "params: .*int32"),
    "a number among the params": (lambda: hog.hvp(rosenbrock, {"lr": 0.1}, {"lr": 0.1}), TypeError, r"params\['lr'\].*float 0.1"),
    "v of another structure": (lambda: hog.hvp(rosenbrock, W, {"w": W["w"], "c": W["b"]}), ValueError, "missing: b; not in params: c"),
    "v of another shape": (lambda: hog.hvp(rosenbrock, W, {**W, "w": W["w"].T}), ValueError, r"v\['w'\]: expected \(3, 2\), got \(2, 3\)"),
    "v of another dtype": (lambda: hog.hvp(rosenbrock, X, X.double()), TypeError, r"\.to\(torch\.float32\)"),
    "v on another device": (lambda: hog.hvp(rosenbrock, X, X.to("meta")), ValueError, "device cpu as in params, got meta"),
    "unknown mode": (lambda: hog.hvp(rosenbrock, X, X, mode="rr"), ValueError, "one of auto, reverse-over-reverse"),
    "value is a vector": (lambda: hog.hvp(lambda p: p * 2, X, X), ValueError, r"expected a scalar, got .*\(3,\).*mean"),
    "value is a number": (lambda: hog.hvp(lambda p: 1.0, X, X), TypeError, "expected a torch.Tensor, got float 1.0"),
    "value is complex": (lambda: hog.hvp(lambda p: (p * 1j).sum(), X, X), TypeError, "real floating-point scalar"),
    "value without a graph": (lambda: hog.hvp(lambda p: p.detach().sum(), X, X), RuntimeError, "depends on params"),
    "hessian without a graph": (lambda: hog.hessian(lambda p: torch.zeros(()), X), RuntimeError, "depends on params"),
    "func uses the model's own parameters": (lambda: hog.hvp(lambda p: OWN(X).sum(), *2 * [hog.trainable_params(OWN)]), RuntimeError, "model's own parameters"),
    "misspelt parameter": (lambda: hog.hvp(OWN_LOSS, *2 * [{"weigth": W["w"]}], (X, X)), ValueError, "did you mean 'weight'"),
    "the model itself": (
        lambda: hog.hvp(OWN, *2 * [hog.trainable_params(OWN)], (X, X)), TypeError,
        r"func: expected a function \(params, batch\).* module Linear; make one with .hoglib.functional_loss",
    ),
    "the model itself, whole": (lambda: hog.hessian(OWN, hog.trainable_params(OWN), (X, X)), TypeError, "got the module Linear"),
    "names for parameters": (lambda: hog.hvp(OWN_LOSS, ["weight"], X, (X, X)), TypeError, r"params\[0\]: expected a torch.Tensor, got str 'weight'; .hoglib.trainable_params"),
    "a vector that is one tensor": (lambda: hog.hvp(OWN_LOSS, hog.trainable_params(OWN), X, (X, X)), ValueError, "missing: weight, bias. Build v"),
    "parameters as a list": (lambda: OWN_LOSS([X], (X, X)), TypeError, "expected a dict of tensors by qualified name"),
    "criterion is a class": (lambda: hog.functional_loss(OWN, nn.MSELoss), TypeError, r"make one: `MSELoss\(\)`"),
    "mse_loss in forward mode": (
        lambda: hog.hvp(
            OWN_LOSS, *2 * [hog.trainable_params(OWN)], (X, X[:2]), mode="forward-over-reverse",
            stand_ins=False,
        ), NotImplementedError, "leave stand_ins at True",
    ),
    "complex hessian": (lambda: hog.hessian(lambda p: p.abs().sum(), X + 1j), TypeError, "view_as_real"),
    "strict forward mode": (lambda: hog.hvp(rosenbrock, X, X, mode="forward-over-reverse", strict=True), ValueError, "strict"),
    "reverse mode in a transform": (
        lambda: torch.func.vmap(lambda v: hog.hvp(rosenbrock, X, v, mode="reverse-over-reverse")[1])(X.expand(2, 3)), NotImplementedError, "inside torch.func",
    ),
    "batch is a list of one": (lambda: hog.functional_loss(nn.Linear(3, 1), F.mse_loss)({}, [X]), ValueError, "pair"),
    "model is a function": (lambda: hog.functional_loss(rosenbrock, F.mse_loss), TypeError, "expected a torch.nn.Module"),
    "nothing to train": (lambda: hog.trainable_params(nn.Linear(2, 1).requires_grad_(False)), ValueError, "all 2 are frozen"),
    "no parameters": (lambda: hog.trainable_params(nn.ReLU()), ValueError, "it has no parameters"),
}  # fmt: skip


test_errors = refused(ERRORS)


def test_modes_agree_where_v_is_zero_at_a_padding_row():
    """Reverse mode takes the row for a constant; the tangents of forward mode move it."""
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 2), nn.Tanh()).double()
    ids = torch.tensor([[0, 1, 2], [3, 0, 1]])
    loss = hog.functional_loss(model, lambda y, x: y.pow(3).mean())
    params = hog.trainable_params(model)
    v = random_like(params)

    def products():
        return [hog.hvp(loss, params, v, (ids, ids), mode=mode)[1] for mode in MODES[1:]]

    assert relative(*products()) > 0.01
    v["0.weight"][0] = 0
    assert relative(*products()) < 1e-12


@rows("moved", [range(1, 6), [3]], ids=["at each call", "at the third alone"])
def test_auto_is_reverse_at_each_call_whose_tangents_move_a_padding_row(moved):
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 2), nn.Tanh()).double()
    ids = torch.tensor([[0, 1, 2], [3, 0, 1]])
    loss = hog.functional_loss(model, lambda y, x: y.pow(3).mean())
    params = hog.trainable_params(model)
    for call in range(1, 6):
        v = random_like(params)
        v["0.weight"][0] *= call in moved
        expected = hog.ggn_vp(loss, params, v, (ids, ids), mode="reverse")[1]
        assert relative(hog.ggn_vp(loss, params, v, (ids, ids))[1], expected) < 1e-12


def _own_gradient(params):
    (w,) = params
    loss = (w.sin() * w).sum()
    return torch.autograd.grad(loss, w, create_graph=True)


# losses that take a gradient by the parameters themselves, of the parameters and of that gradient g
OWN_GRADIENTS = {
    "its norm": lambda w, g: g.norm(),
    "a step of MAML": lambda w, g: ((w - 0.3 * g) ** 3).sum(),
    "sharpness": lambda w, g: (w + 0.1 * g / g.norm()).cos().sum(),
    "its square beside a loss": lambda w, g: w.prod() + g.square().sum(),
}


@rows("name", OWN_GRADIENTS)
def test_forward_mode_of_a_loss_that_takes_a_gradient_by_the_parameters(name):
    loss = lambda params: OWN_GRADIENTS[name](params[0], *_own_gradient(params))  # noqa: E731
    w, v = torch.linspace(0.3, 1.4, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    expected = hog.hvp(loss, [w], [v], mode="reverse-over-reverse")[1][0]
    found = hog.hvp(loss, [w], [v], mode="forward-over-reverse")[1][0]
    torch.testing.assert_close(found, expected)


def _cube(in_backward):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            in_backward()
            return 3 * ctx.saved_tensors[0] ** 2 * g

        @staticmethod
        def jvp(ctx, dx):
            return 3 * ctx.saved_tensors[0] ** 2 * dx

    return Cube.apply


def _call_by_call():
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(not before)
    torch.set_grad_enabled(before)


def _within(*contexts):
    def run():
        for context in contexts:
            with context():
                _within(*contexts[1:])()

    return run


# what switches gradients while a backward without a graph runs, where tangents go on
SWITCHES = {
    "nothing": lambda: None,  # hoglib watches the first application
    "no_grad": _within(torch.no_grad),
    "enable_grad": _within(torch.enable_grad),
    "one within another": _within(torch.no_grad, torch.enable_grad, torch.no_grad),
    "set_grad_enabled": _within(lambda: torch.set_grad_enabled(True), lambda: torch.set_grad_enabled(False)),
    "a decorated function": torch.no_grad()(lambda: None),
    "call by call": _call_by_call,
}  # fmt: skip


def _hooked(x):
    y = x.sin()
    if y.requires_grad:
        y.register_hook(torch.no_grad()(lambda g: None))
    return y


@rows("switch", SWITCHES)
def test_a_backward_that_switches_gradients_keeps_its_tangents(switch):
    x, v = torch.linspace(1, 2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    cube = _cube(SWITCHES[switch])
    for _ in range(2):
        found = hog.hvp(lambda x: cube(x).sum(), x, v, mode="forward-over-reverse")[1]
        torch.testing.assert_close(found, 6 * x)
    found = hog.hvp(lambda x: _hooked(x).square().sum(), x, v, mode="forward-over-reverse")[1]
    torch.testing.assert_close(found, 2 * (2 * x).cos())


def test_forward_mode_has_what_reverse_mode_loses_and_says():
    x, v = torch.tensor([3e-37, 1e-3, 1, 1]), torch.ones(4)

    def loss(x):  # the quotient in torch's backward overflows
        return 1e30 * x.prod()

    with pytest.warns(UserWarning, match="try `hvp.mode='forward-over-reverse'"):
        assert not hog.hvp(loss, x, v, stand_ins=False)[1].isfinite().all()
    assert_close(hog.hvp(loss, x, v)[1], torch.tensor([1.002e30, 1e30, 1e27, 1e27]))
    found = hog.hvp(loss, x, v, mode="forward-over-reverse")[1]
    assert_close(found, torch.tensor([1.002e30, 1e30, 1e27, 1e27]))


def test_forward_mode_of_a_module_that_fills_tables_in_its_first_call():
    class Rotary(torch.nn.Linear):
        table, by_length = None, {}

        def forward(self, x):
            if self.table is None:
                self.table, self.by_length = x.cos(), {len(x): x.sin()}
            return super().forward(x) * self.table + self.by_length[len(x)]

    model, x = Rotary(3, 3).double(), torch.ones(2, 3, dtype=torch.float64)
    loss, params = (
        hog.functional_loss(model, torch.nn.functional.mse_loss),
        hog.trainable_params(model),
    )
    v = {name: torch.ones_like(p) for name, p in params.items()}
    first, second = (
        hog.hvp(loss, params, v, (x, x), mode="forward-over-reverse")[1] for _ in range(2)
    )
    torch.testing.assert_close(first, second)
    hog.jvp(model, (x,), (x,))
