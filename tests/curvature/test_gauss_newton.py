"""Products with the generalised Gauss-Newton matrix, and the matrix itself, against differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import dense_ggn, draw, flat, problem, relative
from tests.functions import ClassicCube, saving_inputs
from tests.models import Fn, Through
from tests.refused import refused
from tests.rows import rows

MODES = ["auto", "forward", "reverse", "finite-differences"]


def vector(params, seed=7):
    return {name: draw(*p.shape, seed=seed) for name, p in params.items()}


@rows("blocks", ["parameter", "module"])
@rows("name", ["layers of hoglib", "LayerNorm", "tied and frozen"])
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


class Halved(torch.autograd.Function):
    """Whose gradient keeps half of its graph."""

    forward = saving_inputs(lambda x: x.sin())

    backward = staticmethod(lambda ctx, g: (g + g.detach()) / 2 * ctx.saved_tensors[0].cos())


@rows("scale", [1e-15, 1e-22, 1e-30, 1e-36, 1e-40, 1e20])
@rows("mode", ["auto", "reverse"])
def test_vectors_of_any_length_in_single_precision(scale, mode):
    """Inner products of which underflow: what is right is not refused, what is wrong is."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    batch, v = (draw(6, 3).float(), torch.arange(6) % 3), draw(31)

    def product(layers, dtype, mode, vector):
        loss = hog.functional_loss(layers.to(dtype), F.cross_entropy)
        own = batch[0].to(dtype), batch[1]
        G = hog.GGNOperator(loss, hog.trainable_params(layers), own, mode=mode)
        return G @ vector

    found = product(model, torch.float32, mode, (scale * v).float()).double() / scale
    wrong = nn.Sequential(*model[:2], Through(Halved.apply), model[2])
    if 1e-35 < scale < 1e10:  # below, the warning about Halved is all
        with pytest.raises(hog.errors.NoSecondDerivative, match="lost its graph"):
            product(wrong, torch.float32, "reverse", (scale * v).float())
    expected = product(model, torch.float64, "reverse", v)
    assert relative(found, expected) < (1e-5 if scale > 1e-37 else 1e-2)


def several(net, x):
    """Outputs in a dict: two that are differentiated, one that is a constant, one of integers."""
    y = net.linear(x)
    differentiated = {"mean": y.tanh(), "log_scale": y.sin()}
    return {**differentiated, "mask": x > 0, "inputs": x, "best": y.argmax(-1)}


def gaussian(outputs, targets):
    z = (targets - outputs["mean"]) * torch.exp(-outputs["log_scale"])
    return (z.square() / 2 + outputs["log_scale"]).where(outputs["mask"], 0).mean()


@rows("mode", MODES)
def test_outputs_of_any_structure(mode):
    loss = hog.functional_loss(Fn(several, linear=nn.Linear(3, 3)).double(), gaussian)
    params, batch = hog.trainable_params(loss.model), (draw(5, 3), draw(5, 3, seed=2))
    # the same with one tensor for outputs, which the oracle can read
    whole = hog.functional_loss(
        Fn(joined, inner=loss.model), lambda y, t: gaussian({"mean": y[0], "log_scale": y[1], "mask": batch[0] > 0}, t)
    )  # fmt: skip
    inner = {f"inner.{n}": p for n, p in params.items()}
    v = vector(params)
    expected = dense_ggn(whole, inner, batch) @ flat(v)
    assert relative(flat(hog.ggn_vp(loss, params, v, batch, mode=mode)[1]), expected) < 1e-7


def joined(net, x):
    out = net.inner(x)
    return torch.stack([out["mean"], out["log_scale"]])


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


@rows("scale", [1e-3, 1.0, 1e3])
def test_differences_find_their_step(scale):
    x, v = draw(4, seed=1), scale * draw(4, seed=2)
    _, product = hog.hvp(lambda p: p.exp().sum(), x, v, mode="finite-differences")
    assert_close(product, x.exp() * v, rtol=1e-8, atol=0)


@pytest.mark.parametrize("product", [hog.hvp, hog.ggn_vp])
def test_differences_of_a_model_that_changes_its_batch(product):
    loss, params, batch = problem("LayerNorm")
    v, own = vector(params), loss.model.forward
    loss.model.forward = lambda x: own(x.mul_(2))
    given = lambda: [x.clone() for x in batch]  # noqa: E731
    expected = flat(product(loss, params, v, given())[1])
    found = product(loss, params, v, given(), mode="finite-differences")[1]
    assert relative(flat(found), expected) < 1e-6


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


@pytest.mark.parametrize(
    "criterion",
    [nn.NLLLoss(), nn.NLLLoss(weight=torch.ones(3).double()), lambda z, y: z.abs().sum()],
)
@pytest.mark.parametrize("operator", [hog.GGNOperator, hog.KFACOperator])
def test_a_criterion_that_is_linear_in_the_outputs_is_told(operator, criterion):
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)).double()
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    build = lambda: operator(loss, params, (draw(8, 4), torch.arange(8) % 3)).to_dense()  # noqa: E731
    if operator is hog.KFACOperator and type(criterion) is nn.NLLLoss and criterion.weight is None:
        assert build().any()  # the Fisher matrix of the likelihood
        return
    with pytest.warns(UserWarning, match="zero, and so is the matrix.*cross_entropy of the logits"):
        assert not build().any()
