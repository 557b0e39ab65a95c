"""The context: what it sees, where it stops, and what it costs nothing to."""

import math
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib.stand_ins import mode as stand_in_mode
from tests.functions import Cube
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as draw


def attend(x):
    x = x[:, None]  # of three dimensions torch takes its MATH backend, which has a double backward
    return F.scaled_dot_product_attention(x, x, x)[:, 0]


X = draw(1, 3, 4)


def twice(function, x, v):
    """H v by double backward."""
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
    return torch.autograd.grad((g * v).sum(), leaf)[0]


def differences(function, x, v, h=1e-5):
    def gradient(x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(function(leaf).square().sum(), leaf)[0]

    return (gradient(x + h * v) - gradient(x - h * v)) / (2 * h)


V = draw(1, 3, 4, seed=1)
RIGHT = differences(attend, X, V)


def close(found):
    torch.testing.assert_close(found, RIGHT, rtol=1e-6, atol=1e-8)


def test_without_it_torch_raises_and_with_it_the_product_is_right():
    with pytest.raises(RuntimeError, match="not implemented"):
        twice(attend, X, V)
    with hog.second_order():
        close(twice(attend, X, V))
    close(hog.second_order()(twice)(attend, X, V))


@hog.second_order()
def failing():
    with hog.second_order():
        assert stand_in_mode.active()
    assert stand_in_mode.active()
    close(twice(attend, X, V))
    raise ZeroDivisionError


@hog.second_order()
def test_a_result_that_is_written_into_a_tensor_is_torchs_own():
    index, src = torch.tensor([[0, 1, 1]]), torch.tensor([[2.0, 3, 4]])
    for out in (torch.empty(1, 2), None):
        found = torch.scatter_reduce(torch.ones(1, 2), 1, index, src, "prod", out=out)
        assert found.tolist() == [[2, 12]]
        assert out is None or found is out


def test_entering_it_twice_is_entering_it_once_and_it_is_left_after_an_error():
    with pytest.raises(ZeroDivisionError):
        failing()
    assert not stand_in_mode.active()
    with pytest.raises(RuntimeError, match="not implemented"):
        twice(attend, X, V)


@rows("backend", ["eager", "aot_eager"])
def test_what_torch_compiled_runs_as_it_was_before(backend):
    """torch raises for one, and is wrong for the other, without a word."""
    piece = torch.compile(lambda x: Cube.apply(x) + x, backend=backend)
    with hog.second_order():
        found = twice(piece, X, V)
    torch.testing.assert_close(found, twice(lambda x: x**3 + x, X, V))
    report = hog.verify(piece, X)
    assert report.ok
    assert report["compiled"].status == "warn"
    assert hog.audit(lambda p, x: piece(p * x).square().sum(), V, X).ok is (backend == "eager")


def test_another_thread_enters_it_itself():
    found = {}

    def work():
        found["outside"] = stand_in_mode.active()
        try:
            twice(attend, X, V)
        except RuntimeError as error:
            found["error"] = str(error)
        with hog.second_order():
            found["inside"] = twice(attend, X, V)

    with hog.second_order():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not found["outside"]
    assert "not implemented" in found["error"]
    close(found["inside"])


def scalar(x):
    return attend(x).square().sum()


def test_around_and_inside_of_transforms():
    def hvp(x):
        return jvp(grad(scalar), (x,), (V,))[1]

    with hog.second_order():
        outside = hvp(X)
        many = vmap(hvp)(X.expand(2, 1, 3, 4))
        whole = hessian(scalar)(X)

    def entering(x):
        with hog.second_order():
            return scalar(x)

    inside = jvp(grad(entering), (X,), (V,))[1]
    for found in (outside, inside, many[1], torch.tensordot(whole, V, 3)):
        close(found)


def test_make_fx_traces_the_stand_in():
    with hog.second_order():
        traced = make_fx(lambda x: jvp(grad(scalar), (x,), (V,))[1])(X)
    close(traced(X))


def test_autocast():
    x = draw(1, 3, 4).float()
    with torch.autocast("cpu", torch.bfloat16):
        plain = attend(x)
        with hog.second_order():
            ours = attend(x)
            product = twice(attend, x, V.float())
    assert ours.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(product.double(), RIGHT, rtol=0.2, atol=0.05)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.heads(x, x, x, need_weights=False)[0]


def test_it_sees_inside_of_multi_head_attention_of_which_verify_judges_torchs_own():
    model = Attention().double()
    with hog.second_order():
        found = twice(model, X, V)
    torch.testing.assert_close(found, differences(model, X, V), rtol=1e-6, atol=1e-8)
    assert not hog.verify(model, X, modes="rr").ok


def test_it_sees_what_backward_runs_again():
    def recomputing(x):
        return checkpoint(attend, x, use_reentrant=False)

    with hog.second_order():
        found = twice(recomputing, X, V)
        leaf = X.clone().requires_grad_()
        recomputing(leaf).square().sum().backward()  # Tensor.backward
    close(found)
    torch.testing.assert_close(leaf.grad, grad(scalar)(X), rtol=1e-6, atol=1e-8)


def test_another_mode_beside_it_sees_its_calls():
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Counting.calls += func is F.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    with hog.second_order(), Counting():
        close(twice(attend, X, V))
    assert Counting.calls == 1
    with Counting(), hog.second_order():
        close(twice(attend, X, V))


def test_hvp_and_hessian_enter_it_themselves_unless_told_not_to():
    model, batch = Attention().double(), (X, torch.zeros_like(X))
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    v = {name: torch.ones_like(p) for name, p in params.items()}
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        _, product = hog.hvp(loss, params, v, batch, mode=mode)
        with pytest.raises((RuntimeError, NotImplementedError)):
            hog.hvp(loss, params, v, batch, mode=mode, stand_ins=False)
    whole = hog.hessian(loss, params, batch)
    bias = whole["heads.out_proj.bias"]
    row = sum(bias[name].flatten(1).sum(1) for name in params)  # against ones
    torch.testing.assert_close(row, product["heads.out_proj.bias"])
    with pytest.raises(NotImplementedError, match="not implemented"):
        hog.hessian(loss, params, batch, stand_ins=False)


def test_maml_enters_it_itself_unless_told_not_to():
    model = Attention().double()
    tasks = ((draw(2, 5, 3, 4), draw(2, 5, 3, 4)), (draw(2, 5, 3, 4, seed=1), draw(2, 5, 3, 4)))
    hog.MAML(model, F.mse_loss, inner_lr=0.1, over_tasks="loop").loss(tasks).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    assert all(g.any() for g in grads)
    off = hog.MAML(model, F.mse_loss, inner_lr=0.1, over_tasks="loop", stand_ins=False)
    with pytest.raises((RuntimeError, NotImplementedError)):
        off.loss(tasks).backward()


NORMS = {
    "layer norm": nn.LayerNorm(4),
    "batch norm": nn.BatchNorm1d(3, track_running_stats=False),
    "instance norm": nn.InstanceNorm1d(3, affine=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_what_torch_has_wrong_through_norms_is_right_inside(name):
    model = nn.Sequential(nn.Linear(4, 4), NORMS[name], nn.Tanh()).double()
    params = {key: p.detach() for key, p in model.named_parameters()}
    batches = draw(2, 5, 3, 4)

    def task(params, x):
        return functional_call(model, params, (x,)).square().mean()

    def adapted(params, x):
        g = grad(task)(params, x)
        return task({key: p - 0.5 * g[key] for key, p in params.items()}, x.flip(0))

    def mean(params):
        return vmap(adapted, (None, 0))(params, batches).mean()

    v = {key: draw(*p.shape, seed=3) for key, p in params.items()}

    def along(h):
        return {key: p + h * v[key] for key, p in params.items()}

    with hog.second_order():
        found = grad(mean)(params)  # silently wrong without
        whole = hessian(task)(params, batches[0])
    expected = (float(mean(along(1e-5))) - float(mean(along(-1e-5)))) / 2e-5
    assert sum(float((found[key] * v[key]).sum()) for key in v) == pytest.approx(expected, rel=1e-6)
    right = hog.hessian(lambda p: task(p, batches[0]), params)
    torch.testing.assert_close(whole, right)


ORIGIN, CENTRES = torch.zeros(3, dtype=F64), torch.tensor([[0.0, 0, 0], [1, 2, 2]], dtype=F64)
TURN = torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=torch.Generator().manual_seed(0)))[0]
EQUAL = (TURN * torch.tensor([1.0, 1.0, 2.0], dtype=F64)) @ TURN.T
CLOSE = (TURN * torch.tensor([1.0, 1.0 + 1e-10, 2.0], dtype=F64)) @ TURN.T
RING = torch.eye(6, dtype=F64).roll(1, 0) + torch.eye(6, dtype=F64).roll(-1, 0)


FAR = torch.tensor([1e-200, 1e200, 1.0], dtype=F64)
SMALL = torch.tensor([1e-200, 1e-200, 2e200], dtype=F64)
SHIFTED = torch.tensor([0.5, 2.0, -1.5], dtype=F64)


def symmetric(a):
    return (a + a.mT) / 2


def squared_distances(p):
    return (p - CENTRES).square().sum(-1)


def matern(d):
    return ((1 + 3**0.5 * d) * torch.exp(-(3**0.5) * d)).sum()


def near(s):
    """Matern 3/2 of a squared distance, by its series about 0: 1 - 3 s / 2 + 3^1.5 s^1.5 / 3 - ..."""
    return 1 - 1.5 * s


# name -> a function whose parts have no second derivative at the point, the point, and the same function by others
AT_SPECIAL_POINTS = {
    "squared norm": (lambda p: p.norm() ** 2, ORIGIN, lambda p: (p * p).sum()),
    "norm times itself": (lambda p: (lambda n: n * n)(torch.linalg.norm(p)), ORIGIN, lambda p: (p * p).sum()),
    "half of it": (lambda p: (torch.linalg.vector_norm(p) / 2).square(), ORIGIN, lambda p: (p * p).sum() / 4),
    "proximal term": (lambda p: p.sin().sum() + (p - ORIGIN).norm(2) ** 2, ORIGIN, lambda p: (p.sin() + p * p).sum()),
    "Gaussian kernel": (lambda p: (-(torch.cdist(p[None], CENTRES) ** 2)).exp().sum(), ORIGIN, lambda p: (-squared_distances(p)).exp().sum()),
    "Matern kernel": (lambda p: matern((p - CENTRES).norm(dim=-1)), ORIGIN, lambda p: near(squared_distances(p)[0]) + matern((p - CENTRES[1]).norm())),
    "Gaussian kernel of many": (lambda x: (-(torch.cdist(x, x.detach()) ** 2)).exp().sum(), torch.arange(84, dtype=F64).reshape(28, 3).sin(), lambda x: (-(x[:, None] - x.detach()).square().sum(-1)).exp().sum()),
    "pairwise_distance": (lambda p: F.pairwise_distance(p, ORIGIN, eps=0.0) ** 2, ORIGIN, lambda p: (p * p).sum()),
    "modulus": (lambda p: (torch.complex(p, 2 * p).abs() ** 2).sum(), ORIGIN, lambda p: 5 * (p * p).sum()),
    "power spectrum": (lambda p: torch.fft.fft(p).abs().square().sum(), ORIGIN, lambda p: 3 * (p * p).sum()),
    "hypot": (lambda p: torch.hypot(p[0], p[1]) ** 2, ORIGIN, lambda p: p[0] ** 2 + p[1] ** 2),
    "abs": (lambda p: (p.abs() ** 2).sum(), ORIGIN, lambda p: (p * p).sum()),
    "std": (lambda p: p.std() ** 2, ORIGIN, lambda p: (p - p.mean()).square().sum() / 2),
    "Frobenius norm": (lambda p: torch.linalg.matrix_norm(p[None] * p.new_ones(2, 1)) ** 2, ORIGIN, lambda p: 2 * (p * p).sum()),
    "sinc": (lambda p: torch.sinc(p).sum(), ORIGIN, lambda p: (1 - (math.pi * p).square() / 6).sum()),
    "Vandermonde": (lambda p: (p[:, None] ** torch.arange(4)).sum(), ORIGIN, lambda p: (1 + p + p * p + p * p * p).sum()),
    "vander": (lambda p: (torch.vander(p, 4) * torch.arange(4)).sum(), ORIGIN, lambda p: (2 * p + p * p).sum()),
    "linalg.vander": (lambda p: (torch.linalg.vander(p) * torch.arange(3)).sum(), ORIGIN, lambda p: (p + 2 * p * p).sum()),
    "linalg.vander of a number": (lambda p: (torch.linalg.vander(p[0], N=3) * torch.arange(3)).sum(), ORIGIN, lambda p: p[0] + 2 * p[0] * p[0]),
    "rising powers": (lambda p: torch.vander(p, increasing=True).cumsum(1)[:, 2].sum(), ORIGIN, lambda p: (1 + p + p * p).sum()),
    "distance of order 0": (lambda p: torch.dist(p, CENTRES[1] - 9, p=0) * (p * p).sum(), CENTRES[1], lambda p: 3 * (p * p).sum()),
    "distance of order 3": (lambda p: torch.dist(p, CENTRES[1] + 1, p=3) ** 3, CENTRES[1], lambda p: (CENTRES[1] + 1 - p).pow(3).sum()),
    "logaddexp": (lambda p: torch.logaddexp(p, 2 * p + 1e3 * CENTRES[1]).sum(), ORIGIN, lambda p: 2 * p.sum() + p[0] ** 2 * 0),
    "forward algorithm from -inf": (lambda p: torch.logaddexp(p + ORIGIN.log(), p + CENTRES[1].log())[1:].sum(), ORIGIN, lambda p: p[1:].sum()),
    "factors far apart": (lambda p: (p * FAR).prod(), SHIFTED, lambda p: p[0] * p[1] * p[2]),
    "factors of rows": (lambda p: torch.prod((p * FAR).expand(2, 3), -1, keepdim=True).sum(), SHIFTED, lambda p: 2 * p[0] * p[1] * p[2]),
    "products so far": (lambda p: (p * FAR).cumprod(0)[1:].sum(), SHIFTED, lambda p: p[0] * p[1] + p[0] * p[1] * p[2]),
    "small products so far": (lambda p: (p * SMALL).cumprod(-1).sum() * 1e200, SHIFTED, lambda p: p[0] + p[0] * p[1] * 1e-200 * (1 + 2e200 * p[2])),
    "exp of equal eigenvalues": (lambda a: torch.linalg.eigvalsh(symmetric(a)).exp().sum(), EQUAL, lambda a: torch.linalg.matrix_exp(symmetric(a)).trace()),
    "exp of close ones": (lambda a: torch.linalg.eigh(symmetric(a))[0].exp().sum(), CLOSE, lambda a: torch.linalg.matrix_exp(symmetric(a)).trace()),
    "exp on a ring": (lambda a: torch.linalg.eigvalsh(symmetric(a)).exp().sum(), RING, lambda a: torch.linalg.matrix_exp(symmetric(a)).trace()),
    "singular values": (lambda a: (torch.linalg.svd(a)[1] ** 4).sum(), EQUAL, lambda a: (a.mT @ a).square().sum()),
    "log det by singular values": (lambda a: torch.linalg.svdvals(a).log().sum(), TURN, lambda a: torch.logdet(a.mT @ a) / 2),
    "nuclear norm": (lambda a: a.norm("nuc"), EQUAL, lambda a: torch.linalg.matrix_norm(a @ torch.diag(1 + 1e-5 * CENTRES[1] ** 2), "nuc")),
}  # fmt: skip


VANDER_REFUSES = {
    "a matrix": lambda: torch.vander(torch.ones(2, 2)),
    "a negative number of columns": lambda: torch.vander(torch.ones(2), -1),
    "a number": lambda: torch.linalg.vander(torch.tensor(1.0)),
    "one column": lambda: torch.linalg.vander(torch.ones(2), N=1),
    "one row": lambda: torch.linalg.vander(torch.ones(1)),
}


@rows("name", VANDER_REFUSES)
def test_vandermonde_matrices_that_torch_refuses_are_refused(name):
    with pytest.raises(RuntimeError) as torchs:
        VANDER_REFUSES[name]()
    with hog.second_order(), pytest.raises(RuntimeError) as ours:
        VANDER_REFUSES[name]()
    assert str(ours.value) == str(torchs.value)


@rows("mode", ["reverse-over-reverse", "forward-over-reverse", "gradient of a jvp"])
@rows("name", AT_SPECIAL_POINTS)
def test_second_derivatives_of_what_is_smooth_though_its_parts_are_not(name, mode):
    func, x, other = AT_SPECIAL_POINTS[name]
    v = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    _, right = hog.hvp(other, x, v)
    if mode == "gradient of a jvp":
        with hog.second_order():
            found = torch.func.grad(lambda x: torch.func.jvp(func, (x,), (v,))[1])(x)
    else:
        _, found = hog.hvp(func, x, v, mode=mode)
    loose = 1e-4 if name == "nuclear norm" else 1e-7
    torch.testing.assert_close(found, right, rtol=loose, atol=loose)


def under_no_grad(p):
    with torch.no_grad():
        with torch.enable_grad():
            kept = p * p
        q = p * p
    return (q * kept).sum()


def straight_through(p):
    with torch.set_grad_enabled(False):
        rounding = (3 * p).round() - p
    return (p + rounding).square().sum()


gradient = lambda p, **options: torch.autograd.grad((p**3).sum(), p, **options)[0]  # noqa: E731
# name -> a loss with a part that has no graph, and the same with that part as a constant c of the point
STOPPED = {
    "a gradient": (lambda p: (gradient(p) * p**2).sum(), lambda p, c: (3 * c * c * p**2).sum()),
    "its graph kept": (lambda p: (gradient(p, retain_graph=True) * p**2).sum(), lambda p, c: (3 * c * c * p**2).sum()),
    "with a graph": (lambda p: (gradient(p, create_graph=True) * p**2).sum(), lambda p, c: 3 * (p**4).sum()),
    "of torch.func": (lambda p: (torch.func.grad(lambda p: (p**3).sum())(p) * p**2).sum(), lambda p, c: 3 * (p**4).sum()),
    "under no_grad": (under_no_grad, lambda p, c: (c * c * p * p).sum()),
    "straight through": (straight_through, lambda p, c: (p + (3 * c).round() - c).square().sum()),
    "detached": (lambda p: ((p * p).detach() * p * p).sum(), lambda p, c: (c * c * p * p).sum()),
    "data": (lambda p: ((p * p).data * p * p).sum(), lambda p, c: (c * c * p * p).sum()),
}  # fmt: skip


@rows("mode", ["reverse-over-reverse", "forward-over-reverse"])
@rows("create_graph", [True, False])
@rows("name", STOPPED)
def test_what_has_no_graph_is_constant_in_both_modes(name, mode, create_graph):
    (func, other), x = STOPPED[name], torch.tensor([1.1, -2.0, 3.0], dtype=F64)
    right = torch.func.hessian(other)(x, x) @ x.cos()
    _, found = hog.hvp(func, x, x.cos(), mode=mode, create_graph=create_graph)
    torch.testing.assert_close(found, right)
    assert torch._C._is_fwd_grad_enabled()


# torch.func.vjp takes its products with create_graph=torch.is_grad_enabled()
@rows("derivative", [
    torch.func.hessian,
    lambda f: torch.func.jacfwd(torch.func.jacrev(f)),
    lambda f: lambda x: torch.func.jvp(torch.func.jacrev(f), (x,), (x,))[1],
    lambda f: lambda x: torch.func.jvp(lambda x: torch.func.vjp(f, x)[1](torch.ones((), dtype=F64))[0], (x,), (x,))[1],
])  # fmt: skip
def test_forward_mode_over_a_vjp_under_no_grad(derivative):
    x = torch.tensor([1.1, -2.0, 3.0], dtype=F64)
    derived = derivative(lambda x: (x**3).sum())
    with torch.no_grad(), hog.second_order():
        torch.testing.assert_close(
            derived(x), (6 * x).diag() if derived(x).dim() == 2 else 6 * x * x
        )
    # a value alone is computed under no_grad
    torch.testing.assert_close(
        hog.HessianOperator(lambda p, x: derived(p).sum(), x, x).value(), derived(x).sum()
    )


MISSING = {
    "norm": (lambda p: p.norm(), ORIGIN, "a norm at"),
    "Matern 1/2": (lambda p: (-torch.cdist(p[None], CENTRES)).exp().sum(), ORIGIN, "a norm at"),
    "largest of equal eigenvalues": (lambda a: torch.linalg.eigvalsh(-symmetric(a))[-1], EQUAL, "eigh at"),
    "eigenvectors of equal ones": (lambda a: torch.linalg.eigh(symmetric(a))[1].square()[0] @ ORIGIN.cos().cumsum(0), EQUAL, "eigh at"),
    "an antisymmetric function of equal ones": (lambda a: torch.linalg.eigh(symmetric(a))[1][0, :2].cumsum(0).prod(), EQUAL, "eigh at"),
    "square root": (lambda p: p.sqrt().sum() + p.sum(), ORIGIN, "first behind Sqrt at"),
    "power": (lambda p: p.pow(1.5).sum(), ORIGIN, "first behind Pow at"),
    "norm of squares": (lambda p: (p * p).sum().sqrt() ** 2, ORIGIN, "first behind "),
    "cosine": (lambda p: F.cosine_similarity(p, CENTRES[1], dim=0), ORIGIN, "first behind "),
}  # fmt: skip


@rows("mode", ["hvp", "hessian"])
@rows("name", MISSING)
def test_a_second_derivative_that_does_not_exist_is_told_by_its_operation(name, mode):
    func, x, words = MISSING[name]
    with pytest.warns(UserWarning, match=f"{words}.*test_second_order.py"):
        hog.hvp(func, x, torch.ones_like(x)) if mode == "hvp" else hog.hessian(func, x)


QUIET = {
    "distances to oneself": lambda p: torch.cdist(p.outer(p), p.outer(p)).sum(),
    "a norm of others": lambda p: p.norm() + (p.detach() - p.detach()).norm(),
    "weight decay at 0": lambda p: ((0 * p).abs()).sum() + p.square().sum(),
    "normalized": lambda p: F.normalize(p, dim=0).sum(),
    "distinct eigenvalues": lambda p: torch.linalg.eigh(p.diag())[1].square().sum() + p.sum() ** 2,
    "one eigenvector beside equal ones": lambda p: torch.linalg.eigh(torch.diag(torch.stack([p[0], p[0], p[2] + 9])))[1][:, 2].square().sum(),
    "projection onto equal ones": lambda p: (lambda V: (V @ V.mT)[0, 2].square())(torch.linalg.eigh(torch.diag(torch.stack([p[0], p[0], p[2] + 9])))[1][:, :2]),
    "no eigenvalues": lambda p: torch.linalg.eigvalsh(p[:0].diag()).sum() + p.square().sum(),
    "spectral norm beside equal ones": lambda p: torch.linalg.matrix_norm(torch.diag(torch.stack([p[0], p[0], p[2] + 9])), 2),
    "a mask of -inf": lambda p: (p.square() + torch.tensor([0.0, -torch.inf, 0.0])).softmax(0)[0],
    "L1": lambda p: p.norm(1) ** 2,
    "infinite value": lambda p: (p / 0.0).sum(),
}  # fmt: skip


@rows("mode", ["reverse-over-reverse", "forward-over-reverse"])
@rows("name", QUIET)
def test_right_work_at_such_points_is_not_told(name, mode):
    hog.hvp(QUIET[name], CENTRES[1] + torch.arange(3), torch.ones(3, dtype=F64), mode=mode)


def test_data_of_any_layout_is_set_within_a_transform():
    weight = nn.Parameter(torch.eye(2, dtype=F64).to_sparse())

    def doubled(x):
        weight.data = weight.data * 2
        return torch.sparse.mm(weight, x[:, None]).square().sum()

    x = torch.ones(2, dtype=F64)
    with hog.second_order():
        assert grad(doubled)(x).tolist() == [8.0, 8.0]
        with pytest.raises(TypeError, match="data has to be a tensor"):
            weight.data = 3
    assert weight.to_dense().tolist() == [[2.0, 0.0], [0.0, 2.0]]


def own_type(handled, by):
    """A subclass of Tensor that computes a call in its own way."""

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is handled:
                return by(
                    *[x.as_subclass(torch.Tensor) for x in args if isinstance(x, torch.Tensor)]
                )
            return super().__torch_function__(func, types, args, kwargs or {})

    return Own


class Held:
    """No tensor, but torch hands calls with it to it."""

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*[2 * a.x if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def attention(mask):
    return lambda x: F.scaled_dot_product_attention(x[:, :2], x, x.cos(), attn_mask=mask)


def handled(function, kind):
    return lambda x: function(x.as_subclass(kind)).as_subclass(torch.Tensor)


def normed(x):
    return F.layer_norm(x, (4,))


ones = torch.ones(2, 3, dtype=torch.bool)
OWN_TYPES = {  # f with arguments of such a type, and the same without
    "torch's mask, lower right": (attention(causal_lower_right(2, 3)), attention(ones.tril(1))),
    "torch's mask, upper left": (attention(causal_upper_left(2, 3)), attention(ones.tril())),
    "another norm": (
        handled(normed, own_type(F.layer_norm, lambda x: F.rms_norm(x, (4,)))),
        lambda x: F.rms_norm(x, (4,)),
    ),
    "another distance": (
        handled(lambda x: torch.cdist(x, x), own_type(torch.cdist, lambda x, y: (x @ y.mT).sin())),
        lambda x: (x @ x.mT).sin(),
    ),
    "another loss": (
        handled(lambda x: F.mse_loss(x, x.cos()), own_type(F.mse_loss, lambda x, y: (x * y).sin())),
        lambda x: (x * x.cos()).sin(),
    ),
    "one that handles other calls": (handled(normed, own_type(torch.sinh, torch.sin)), normed),
    "no tensor": (lambda x: torch.cdist(Held(x), x.sin()), lambda x: torch.cdist(2 * x, x.sin())),
}


@pytest.mark.parametrize("name", OWN_TYPES)
def test_a_type_that_handles_a_call_itself_gets_it(name):
    own, plain = [lambda x, f=f: f(x).sin().square().sum() for f in OWN_TYPES[name]]
    found, expected = hog.hvp(own, X, V), hog.hvp(plain, X, V)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Replaces(torch.overrides.TorchFunctionMode):
    """Computes a call in its own way."""

    def __init__(self, handled, by):
        super().__init__()
        self.handled, self.by = handled, by

    def __torch_function__(self, func, types, args=(), kwargs=None):
        called = self.by if func is self.handled else func
        return called(*args, **(kwargs or {}))


ATTENTION = F.scaled_dot_product_attention
OWN_MODES = {  # a mode of the user's, f, and the same without
    "another norm": (Replaces(F.layer_norm, lambda x, *_, **__: F.rms_norm(x, (4,))), normed, lambda x: F.rms_norm(x, (4,))),
    "another distance": (Replaces(torch.cdist, lambda x, y, **_: (x @ y.mT).sin()), lambda x: torch.cdist(x, x), lambda x: (x @ x.mT).sin()),
    "another loss": (Replaces(F.mse_loss, lambda x, y, **_: (x * y).sin()), lambda x: F.mse_loss(x, x.cos()), lambda x: (x * x.cos()).sin()),
    "what has a stand-in, otherwise": (Replaces(ATTENTION, lambda q, k, v: ATTENTION(2 * q, k, v)), lambda x: attend(x) + normed(x), lambda x: ATTENTION(2 * x[:, None], x[:, None], x[:, None])[:, 0] + normed(x)),
    "beneath a function": (Replaces(torch.layer_norm, torch.rms_norm), normed, normed),  # torch's mode does not see it
    "other calls": (Replaces(torch.sinh, torch.sin), normed, normed),
}  # fmt: skip


@rows("name", OWN_MODES)
@rows("inside", [False, True])
def test_a_mode_of_the_user_gets_a_call_first(name, inside):
    mode, function, plain = OWN_MODES[name]

    def own(x):
        with mode if inside else nullcontext():
            return function(x).sin().square().sum()

    def doors(f, around):
        batch, forward = torch.ones(2, 1, dtype=F64), "forward-over-reverse"
        with around:
            yield f(X)
            yield from hog.hvp(f, X, V)
            yield from hog.hvp(f, X, V, mode=forward)
            yield from hog.jvp(f, (X,), (V,))
            yield hog.HessianOperator(lambda p, _: f(p), X, batch) @ V
            yield hog.per_example_gradients(lambda p, b: f(p * b[0]), X, batch)
            yield hog.audit(lambda p, _: f(p), X, None).ok
            x = X.clone().requires_grad_()
            kept = hog.ops.remat(f)(x)
        yield torch.autograd.grad(kept, x)  # which recomputes where the mode was left

    found = list(doors(own, nullcontext() if inside else mode))
    expected = list(doors(lambda x: plain(x).sin().square().sum(), nullcontext()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_mode_around_a_compiled_product_is_not_that_of_another_call():
    mode, function, plain = OWN_MODES["another norm"]
    for around, of in 2 * [(nullcontext(), function), (mode, plain)]:
        with around:
            found = hog.hvp(lambda x: function(x).sin().sum(), X, V, compile="eager")
        torch.testing.assert_close(found, hog.hvp(lambda x, of=of: of(x).sin().sum(), X, V))


def test_a_type_that_refuses_a_call_has_the_error_of_torch():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    with hog.second_order(), pytest.raises(TypeError, match="no implementation found"):
        torch.cdist(X.as_subclass(Refusing), X)


PRODUCTS = {
    "no elements": (torch.ones(0), {}),
    "rows of none": (torch.ones(2, 0), {"dim": 1, "keepdim": True}),
    "a number": (torch.tensor(3.0), {}),
    "along a number": (torch.tensor(3.0), {"dim": 0}),
    "integers": (torch.arange(1, 6), {}),
    "integers to a float": (torch.arange(1, 6), {"dtype": torch.float64}),
    "five columns": (torch.arange(10.0).view(2, 5) + 1, {"dim": -1}),
    "complex": (torch.tensor([1j, 2.0, 1 + 1j]), {"dim": 0, "keepdim": True}),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_form_and_value_of_torchs(name):
    x, options = PRODUCTS[name]
    with hog.second_order():
        found = torch.prod(x, **options), x.prod(**options)
    torch.testing.assert_close(found, 2 * (torch.prod(x, **options),))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_third_derivative_of_logcumsumexp(dtype):
    x = torch.tensor([0.3, -40.0, 1.0, 0.2], dtype=dtype)
    third = lambda f: torch.func.jacrev(torch.func.hessian(f))(x)  # noqa: E731
    expected = third(lambda x: sum(torch.logsumexp(x[: i + 1], 0) for i in range(4)))
    with hog.second_order():
        found = third(lambda x: x.logcumsumexp(0).sum())
        again = torch.func.jacrev(
            torch.func.jacrev(torch.func.jacrev(lambda x: x.logcumsumexp(0).sum()))
        )(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected)
