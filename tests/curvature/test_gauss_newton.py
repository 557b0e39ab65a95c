"""Products with the generalised Gauss-Newton matrix, and the matrix itself, against differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import (
    CRITERIA,
    MODELS,
    SMOOTH,
    dense_ggn,
    draw,
    expected_matrix,
    flat,
    nested_to_matrix,
    problem,
    relative,
)
from tests.functions import ClassicCube
from tests.models import Fn, Through
from tests.refused import refused

MODES = ["auto", "forward", "reverse", "finite-differences"]


def vector(params, seed=7):
    return {name: draw(*p.shape, seed=seed) for name, p in params.items()}


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("name", MODELS)
def test_the_product_in_every_mode(name, criterion):
    loss, params, batch = problem(name, criterion)
    G, v = expected_matrix(dense_ggn, name, criterion), vector(params)
    for mode in MODES:
        value, product = hog.ggn_vp(loss, params, v, batch, mode=mode)
        assert_close(value, loss(params, batch).detach())
        assert list(product) == list(params)
        assert relative(flat(product), G @ flat(v)) < 1e-7, mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["layers of hoglib", "transformer block", "tied and frozen"])
def test_a_block_is_its_columns(name, mode):
    loss, params, batch = problem(name)
    block = {n: draw(*p.shape, 3, seed=8) for n, p in params.items()}
    _, products = hog.ggn_vp(loss, params, block, batch, mode=mode)
    _, of_hessian = hog.hvp(loss, params, block, batch)
    for j in range(3):
        v = {n: b[..., j] for n, b in block.items()}
        assert relative(flat({n: p[..., j] for n, p in products.items()}), flat(hog.ggn_vp(loss, params, v, batch)[1])) < 1e-7  # fmt: skip
        assert relative(flat({n: p[..., j] for n, p in of_hessian.items()}), flat(hog.hvp(loss, params, v, batch)[1])) < 1e-12  # fmt: skip


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("name", MODELS)
def test_the_matrix(name, criterion):
    loss, params, batch = problem(name, criterion)
    G = nested_to_matrix(hog.ggn(loss, params, batch), params)
    assert relative(G, expected_matrix(dense_ggn, name, criterion)) < 1e-7
    assert relative(G, G.T) < 1e-12
    assert float(torch.linalg.eigvalsh(G)[0]) > -1e-12


@pytest.mark.parametrize("blocks", ["parameter", "module"])
@pytest.mark.parametrize("name", ["layers of hoglib", "LayerNorm", "tied and frozen"])
def test_blocks_are_those_of_the_whole(name, blocks):
    loss, params, batch = problem(name)
    for whole, part in (
        (hog.hessian(loss, params, batch), hog.hessian(loss, params, batch, blocks=blocks)),
        (hog.ggn(loss, params, batch), hog.ggn(loss, params, batch, blocks=blocks)),
    ):
        group = (lambda n: n) if blocks == "parameter" else (lambda n: n.rpartition(".")[0])
        for a in params:
            assert list(part[a]) == [b for b in params if group(a) == group(b)]
            for b in part[a]:
                assert_close(part[a][b], whole[a][b])


def test_blocks_by_a_function_and_by_names():
    loss, params, batch = problem("LayerNorm")
    names = [["0.weight", "3.bias"], ["0.bias", "1.weight", "1.bias", "3.weight"]]
    whole = hog.hessian(loss, params, batch)
    by_names = hog.hessian(loss, params, batch, blocks=names)
    by_function = hog.hessian(loss, params, batch, blocks=lambda n: n in names[0])
    assert set(by_names["3.bias"]) == {"0.weight", "3.bias"}
    for a in params:
        assert by_names[a].keys() == by_function[a].keys()
        for b in by_names[a]:
            assert_close(by_names[a][b], whole[a][b])
            assert_close(by_function[a][b], whole[a][b])
    with pytest.raises(ValueError, match="exactly one block"):
        hog.hessian(loss, params, batch, blocks=names[:1])
    with pytest.raises(ValueError, match="parameter, module"):
        hog.hessian(loss, params, batch, blocks="layer")
    with pytest.raises(TypeError, match="trainable_params"):
        hog.hessian(lambda p: p.pow(3).sum(), draw(3), blocks="parameter")


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_create_graph_differentiates_by_params_and_vector(mode):
    loss, params, batch = problem("layers of hoglib", "mean square")
    v = {n: t.requires_grad_() for n, t in vector(params).items()}
    u = vector(params, seed=9)

    def inner(p, w, **options):
        product = hog.ggn_vp(loss, p, w, batch, mode=mode, **options)[1]
        return sum((product[n] * u[n]).sum() for n in product)

    by_v = torch.autograd.grad(inner(params, v, create_graph=True), list(v.values()))
    assert relative(flat(by_v), flat(hog.ggn_vp(loss, params, u, batch)[1])) < 1e-10
    by_p = torch.autograd.grad(
        inner(params, v, create_graph=True),
        list(params.values()),
        materialize_grads=True,
        allow_unused=True,
    )
    h = 1e-4
    ends = [
        inner({n: p.detach() + s * h * u[n] for n, p in params.items()}, v) for s in (1, -1)
    ]  # fmt: skip
    along = sum((g * u[n]).sum() for g, n in zip(by_p, params, strict=True))
    assert_close(along, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", MODES)
def test_works_where_gradients_are_off(mode, context):
    loss, params, _ = problem("LayerNorm")
    v = vector(params)
    with context():
        batch = (draw(7, 3, seed=3) + 0, torch.arange(7) % 3)
        _, product = hog.ggn_vp(loss, params, v, batch, mode=mode)
    assert relative(flat(product), expected_matrix(dense_ggn, "LayerNorm") @ flat(v)) < 1e-7
    assert not any(p.requires_grad for p in product.values())


def test_inside_vmap():
    loss, params, batch = problem("LayerNorm")
    params = {n: p.detach() for n, p in params.items()}
    block = {n: draw(3, *p.shape, seed=8) for n, p in params.items()}
    products = torch.func.vmap(lambda v: hog.ggn_vp(loss, params, v, batch)[1])(block)
    G = expected_matrix(dense_ggn, "LayerNorm")
    for j in range(3):
        v = flat({n: b[j] for n, b in block.items()})
        assert relative(flat({n: p[j] for n, p in products.items()}), G @ v) < 1e-7


def test_a_function_without_forward_mode_takes_the_reverse():
    loss = hog.functional_loss(
        nn.Sequential(nn.Linear(3, 4), Through(ClassicCube.apply), nn.Linear(4, 3)).double(),
        F.cross_entropy,
    )
    params, batch = hog.trainable_params(loss.model), (draw(5, 3), torch.arange(5) % 3)
    v, G = vector(params), dense_ggn(loss, hog.trainable_params(loss.model), batch)
    for mode in ("auto", "reverse"):
        assert relative(flat(hog.ggn_vp(loss, params, v, batch, mode=mode)[1]), G @ flat(v)) < 1e-7
    with pytest.raises(NotImplementedError, match="mode='forward'"):
        hog.ggn_vp(loss, params, v, batch, mode="forward")


class Several(nn.Module):
    """Outputs in a dict: two that are differentiated, one that is a constant, one of whole numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return {
            "mean": y.tanh(),
            "log_scale": y.sin(),
            "mask": x > 0,
            "inputs": x,
            "best": y.argmax(-1),
        }


def gaussian(outputs, targets):
    z = (targets - outputs["mean"]) * torch.exp(-outputs["log_scale"])
    return (z.square() / 2 + outputs["log_scale"]).where(outputs["mask"], 0).mean()


@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_any_structure(mode):
    loss = hog.functional_loss(Several().double(), gaussian)
    params, batch = hog.trainable_params(loss.model), (draw(5, 3), draw(5, 3, seed=2))
    # the same with one tensor for outputs, which the oracle can read
    whole = hog.functional_loss(
        Joined(loss.model), lambda y, t: gaussian(Joined.parted(y, batch[0]), t)
    )
    inner = {f"inner.{n}": p for n, p in params.items()}
    v = vector(params)
    expected = dense_ggn(whole, inner, batch) @ flat(v)
    assert relative(flat(hog.ggn_vp(loss, params, v, batch, mode=mode)[1]), expected) < 1e-7


class Joined(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x)
        return torch.stack([out["mean"], out["log_scale"]])

    @staticmethod
    def parted(y, x):
        return {"mean": y[0], "log_scale": y[1], "mask": x > 0}


@pytest.mark.parametrize("name", SMOOTH)
def test_differences_agree_with_the_exact_product(name):
    loss, params, batch = problem(name)
    v = vector(params)
    exact = hog.hvp(loss, params, v, batch)[1]
    assert relative(flat(hog.hvp(loss, params, v, batch, mode="finite-differences")[1]), flat(exact)) < 1e-8  # fmt: skip


def test_differences_are_in_float64_for_any_dtype():
    loss, params, batch = problem("LayerNorm")
    v = vector(params)
    exact = flat(hog.hvp(loss, params, v, batch)[1])
    loss.model.float()
    params = hog.trainable_params(loss.model)
    v, batch = {n: t.float() for n, t in v.items()}, (batch[0].float(), batch[1])
    value, product = hog.hvp(loss, params, v, batch, mode="finite-differences")
    assert value.dtype == torch.float32
    assert {p.dtype for p in product.values()} == {torch.float32}
    assert relative(flat(product).double(), exact) < 1e-6  # of the rounded parameters
    assert next(loss.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_differences_find_their_step(scale):
    x, v = draw(4, seed=1), scale * draw(4, seed=2)
    _, product = hog.hvp(lambda p: p.exp().sum(), x, v, mode="finite-differences")
    assert_close(product, x.exp() * v, rtol=1e-8, atol=0)


def test_differences_refuse_graphs_and_transforms():
    func, x = lambda p: p.pow(3).sum(), draw(3)
    with pytest.raises(ValueError, match="create_graph=False"):
        hog.hvp(func, draw(3), draw(3), mode="finite-differences", create_graph=True)
    with pytest.raises(NotImplementedError, match=r"outside of torch\.func"):
        torch.func.vmap(lambda v: hog.hvp(func, x, v, mode="finite-differences")[1])(draw(2, 3))  # fmt: skip
    with pytest.raises(ValueError, match="strict=True"):
        hog.hvp(func, draw(3), draw(3), mode="finite-differences", strict=True)


def constant():
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    return Fn(lambda net, x: x * net.weight.detach().sum(), weight=weight)


ERRORS = {
    "a loss in one piece": (lambda loss, p, b: hog.ggn_vp(lambda p, b: 0.0, p, p, b), TypeError, "functional_loss"),
    "an unknown mode": (lambda loss, p, b: hog.ggn_vp(loss, p, p, b, mode="reverse-over-reverse"), ValueError, "forward, reverse"),
    "a vector of another shape": (lambda loss, p, b: hog.ggn_vp(loss, p, {**p, "0.weight": p["0.weight"][:2]}, b), ValueError, r"v\['0.weight'\]: expected \(4, 3\), got \(2, 3\).*block"),
    "a block with uneven leaves": (lambda loss, p, b: hog.ggn_vp(loss, p, {n: torch.ones(*t.shape, 2 + (n == "2.bias"), dtype=t.dtype) for n, t in p.items()}, b), ValueError, r"v\['2.bias'\]: expected \(3, 2\), got \(3, 3\); all leaves of a block have 2 columns"),
    "a block of none": (lambda loss, p, b: hog.hvp(loss, p, {n: t[..., None][..., :0] for n, t in p.items()}, b), ValueError, "at least one vector"),
    "outputs without params": (lambda loss, p, b: hog.ggn_vp(hog.functional_loss(constant(), F.mse_loss), {"weight": p["0.bias"]}, {"weight": p["0.bias"]}, b), RuntimeError, "outputs that depend on params"),
}  # fmt: skip


test_errors_say_what_to_do = refused(ERRORS, lambda call: call(*problem("layers of hoglib")))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name):
    loss, params, batch = problem(name)
    v = vector(params)
    expected = flat(hog.ggn_vp(loss, params, v, batch)[1])
    loss.model.cuda()
    params, batch = hog.trainable_params(loss.model), tuple(t.cuda() for t in batch)
    for mode in ("auto", "reverse"):
        product = hog.ggn_vp(loss, params, {n: t.cuda() for n, t in v.items()}, batch, mode=mode)[1]
        assert relative(flat(product).cpu(), expected) < 1e-9
