"""Losses and models that are hard for products: right results, or errors that name the cause."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from tests.curvature.problems import F64, dense_ggn, dense_hessian, draw, flat, relative
from tests.functions import WrongTangent
from tests.models import Fn, Sample, Through
from tests.refused import refused
from tests.rows import rows

BATCH = (draw(6, 3), torch.arange(6) % 2)


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def made(model, criterion=F.cross_entropy, **options):
    return hog.functional_loss(model, criterion, **options), hog.trainable_params(model)


# Changes past pointers and version counters


def test_a_change_of_an_attribute_or_a_closure_is_detected():
    model = Fn(lambda net, x: net.inner(x) / net.temperature, inner=net(), temperature=1.0)
    model.inner[1] = nn.Sequential(nn.BatchNorm1d(4, dtype=F64), nn.Tanh())
    loss, params = made(model)
    closure = lambda p, b: loss(p, b)  # noqa: E731
    v = draw(sum(p.numel() for p in params.values()))
    for func in (loss, closure):
        operator = hog.HessianOperator(func, params, BATCH)
        for change in (lambda: setattr(model, "temperature", model.temperature + 1), lambda: model.train(not model.training)):  # fmt: skip
            before = operator @ v
            change()
            after = hog.HessianOperator(func, params, BATCH) @ v
            assert_close(operator @ v, after)
            assert relative(before, after) > 1e-3


def test_a_batch_of_an_own_class():
    loss, params = made(net(), lambda z, g: F.cross_entropy(z, g.y), forward=lambda m, g: m(g.x))
    graph = Sample(BATCH[0].clone(), BATCH[1])
    operator, v = hog.HessianOperator(loss, params, graph), draw(26)
    A = dense_hessian(loss, params, graph)
    assert relative(operator @ v, A @ v) < 1e-7
    graph.x = 2 * graph.x
    assert relative(operator @ v, dense_hessian(loss, params, graph) @ v) < 1e-7
    listed = hog.HessianOperator(loss, params, [graph], batch_size=lambda g: len(g.y))
    assert relative(listed @ v, operator @ v) < 1e-12


# Models


class Plain(nn.Module):
    """Keeps its weights in a list besides, as some models do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4, dtype=F64), nn.Linear(4, 2, dtype=F64)
        self.weights = [self.first.weight]

    def forward(self, x):
        return self.last(torch.tanh(F.linear(x, self.weights[0], self.first.bias)))


@rows("detached", [False, True])
def test_parameters_used_from_elsewhere_raise(detached):
    loss, params = made(Plain())
    params = {name: p.detach() if detached else p for name, p in params.items()}
    v = {n: torch.ones_like(p) for n, p in params.items()}
    modes = ("auto", "forward", "reverse", "finite-differences")
    for call in (
        lambda: hog.hvp(loss, params, v, BATCH),
        lambda: hog.hvp(loss, params, v, BATCH, mode="forward-over-reverse"),
        lambda: hog.hvp(loss, params, v, BATCH, mode="forward-over-reverse", compile="eager"),
        lambda: hog.hvp(loss, params, v, BATCH, mode="finite-differences"),
        *(lambda mode=mode: hog.ggn_vp(loss, params, v, BATCH, mode=mode) for mode in modes),
        lambda: hog.fisher_vp(loss, params, v, BATCH),
        lambda: hog.GGNOperator(loss, params, BATCH) @ v,
        lambda: hog.hessian(loss, params, BATCH),
        lambda: hog.HessianOperator(loss, params, BATCH) @ v,
        lambda: hog.HessianOperator(loss, params, BATCH).gradient(),
        lambda: hog.curvature.per_example_gradient_norms(loss, params, BATCH),
        lambda: hog.per_example_gradients(loss, params, BATCH),
        lambda: hog.KFACOperator(loss, params, BATCH).trace(),
        lambda: hog.audit(loss, params, BATCH),
    ):
        with pytest.raises(RuntimeError, match=r"uses first\.weight from elsewhere too"):
            call()
    (others := dict(params)).pop("first.weight")
    hog.hvp(loss, others, {name: v[name] for name in others}, BATCH)


@rows("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_with_create_graph_the_same_tensors_from_elsewhere_are_arguments_held_fixed(mode):
    """f(q; p) = sum q^2 p^2 at q = p: H v = 2 p^2 v, whose derivative by p is 4 p v."""
    p, v = torch.tensor([2.0, -3.0], requires_grad=True), torch.tensor([5.0, 7.0])
    value, product = hog.hvp(lambda q: (q**2 * p**2).sum(), p, v, mode=mode, create_graph=True)
    assert torch.allclose(product, 2 * p**2 * v)
    by_both = torch.autograd.grad([value, product.sum()], p)[0]
    assert torch.allclose(by_both, 4 * p**3 + 4 * p * v)


def test_a_criterion_may_use_the_models_parameters():
    model = net()
    decay = lambda o, y: F.cross_entropy(o, y) + sum(p.square().sum() for p in model.parameters())  # noqa: E731  # fmt: skip
    loss, params = made(model, decay)
    elsewhere = {n: 1.3 * p.detach() for n, p in params.items()}
    plain, _ = made(net())
    A = dense_hessian(plain, elsewhere, BATCH) + 2 * torch.eye(26, dtype=F64)
    operator = hog.HessianOperator(loss, elsewhere, BATCH)
    assert relative(operator.to_dense(), A) < 1e-7
    _, gradient = operator.gradient()
    _, without = hog.HessianOperator(plain, elsewhere, BATCH).gradient()
    assert_close(flat(gradient), flat(without) + 2 * flat(elsewhere))
    assert relative(operator.to_dense(), A) < 1e-7


def penalised(net, x):
    """Differentiates inside, as losses of physics-informed networks do."""
    x = x.detach().requires_grad_()
    y = net.net(x)
    return y, torch.autograd.grad(y[:, 0].sum(), x, create_graph=True)[0]


@rows("options", [{}, {"micro_batch": 2}, {"memory_limit": 0}])
def test_a_loss_that_differentiates_inside(options):
    loss, params = made(
        Fn(penalised, net=net()), lambda out, y: F.cross_entropy(out[0], y) + out[1].square().mean()
    )
    A = dense_hessian(loss, params, BATCH)
    assert relative(hog.HessianOperator(loss, params, BATCH, **options).to_dense(), A) < 1e-7
    v = {n: draw(*p.shape) for n, p in params.items()}
    product = hog.hvp(loss, params, v, BATCH, mode="finite-differences")[1]
    assert relative(flat(product), A @ flat(v)) < 1e-7


def test_scripted_code_that_ran_before_is_differentiated_in_forward_mode():
    model = net()
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        tanh, norm = map(torch.jit.script, (model[:2], nn.LayerNorm(3, dtype=F64)))
    scripted = nn.Sequential(tanh, model[2])
    loss, params = made(scripted)
    v = {n: draw(*p.shape, seed=i) for i, (n, p) in enumerate(params.items())}
    for _ in range(3):
        loss(params, BATCH).backward()  # torch optimizes the second run, whose graph drops tangents
    for options in ({}, {"mode": "forward"}):
        product = hog.ggn_vp(loss, params, v, BATCH, **options)[1]
        assert relative(flat(product), dense_ggn(loss, params, BATCH) @ flat(v)) < 1e-7
    product = hog.hvp(loss, params, v, BATCH, mode="forward-over-reverse")[1]
    assert relative(flat(product), dense_hessian(loss, params, BATCH) @ flat(v)) < 1e-7
    x, square = BATCH[0], lambda net: lambda x: net(x)[:, 0] + x.square().sum(1)
    assert_close(hog.laplacian(square(scripted), x), hog.laplacian(square(model), x))
    assert_close(
        hog.laplacian(square(norm), x), hog.laplacian(square(nn.LayerNorm(3, dtype=F64)), x)
    )


def test_cached_parametrizations_are_those_of_the_parameters():
    model = net()
    nn.utils.parametrizations.weight_norm(model[0])
    loss, params = made(model)
    v = {n: draw(*p.shape, seed=i) for i, (n, p) in enumerate(params.items())}
    expected = dense_hessian(loss, params, BATCH) @ flat(v)
    with nn.utils.parametrize.cached():
        for _ in range(2):
            assert relative(flat(hog.hvp(loss, params, v, BATCH)[1]), expected) < 1e-10
        grads = torch.autograd.grad(model(BATCH[0]).sum(), model[0].parameters())
        assert all(grad.any() for grad in grads)  # of its own parameters
        assert relative(flat(hog.hvp(loss, params, v, BATCH)[1]), expected) < 1e-10


def test_a_wrong_jvp_raises_and_auto_avoids_it():
    loss, params = made(nn.Sequential(nn.Linear(3, 2, dtype=F64), Through(WrongTangent.apply)))
    v = {n: draw(*p.shape) for n, p in params.items()}
    with pytest.warns(UserWarning, match="the jvp of WrongTangent is wrong"):
        product = hog.ggn_vp(loss, params, v, BATCH)[1]
    assert relative(flat(product), dense_ggn(loss, params, BATCH) @ flat(v)) < 1e-7
    with pytest.raises(NotImplementedError, match="a wrong jvp"):
        hog.ggn_vp(loss, params, v, BATCH, mode="forward")


def test_a_sparse_gradient():
    embedding = nn.Embedding(5, 3, sparse=True, dtype=F64)
    loss, params = made(embedding, lambda out, _: out.sin().sum())
    rows = torch.tensor([0, 2, 2])
    batch = (rows, rows)
    dense, _ = made(nn.Embedding(5, 3, _weight=embedding.weight.detach().clone()), lambda out, _: out.sin().sum())  # fmt: skip
    A = dense_hessian(dense, hog.trainable_params(dense.model), batch)
    assert relative(hog.HessianOperator(loss, params, batch).to_dense(), A) < 1e-7
    assert hog.hvp(loss, params, params, batch)[1]["weight"].layout is torch.strided
    H = hog.hessian(loss, params, batch)["weight"]["weight"]
    assert relative(H.detach().reshape(15, 15), A) < 1e-7
    maml = hog.MAML(embedding, lambda out, _: out.sin().sum(), inner_lr=0.1, over_tasks="loop")
    with pytest.raises(NotImplementedError, match="sparse=False"):
        maml.loss([(batch, batch)])


def summed(net, x):
    """Layers on a nested tensor, whose rows are summed; or on a dense one, of rows with a 1 in front."""
    own = lambda x: net.last(net.first(x).tanh() * net.first(x).sigmoid())  # noqa: E731
    if not x.is_nested:
        return (own(x[..., 1:]) * x[..., :1]).sum(1)
    places = torch.arange(len(x)).repeat_interleave(x.offsets().diff())
    return x.values().new_zeros(len(x), 2).index_add(0, places, own(x).values())


def nested_model():
    torch.manual_seed(2)
    return Fn(summed, first=nn.Linear(3, 4, dtype=F64), last=nn.Linear(4, 2, dtype=F64))


PIECES = draw(9, 3).split((2, 3, 4))
NESTED = torch.nested.as_nested_tensor(list(PIECES), layout=torch.jagged)
PADDED = nn.utils.rnn.pad_sequence([F.pad(x, (1, 0), value=1.0) for x in PIECES], batch_first=True)
OF_NESTED = {
    "hvp": lambda L, p, v, b: hog.hvp(L, p, v, b)[1],
    "ggn_vp": lambda L, p, v, b: hog.ggn_vp(L, p, v, b)[1],
    "operator": lambda L, p, v, b: hog.HessianOperator(L, p, [b, b]) @ flat(v),
    "micro-batches": lambda L, p, v, b: hog.GGNOperator(L, p, b, micro_batch=2) @ flat(v),
    "per_example_gradients": lambda L, p, v, b: hog.per_example_gradients(L, p, b),
    "empirical Fisher": lambda L, p, v, b: hog.FisherOperator(L, p, b, kind="empirical") @ flat(v),
}


@rows("name", OF_NESTED)
def test_a_batch_of_nested_tensors_is_that_of_padded_ones(name):
    loss, params = made(nested_model())
    v = {n: draw(*p.shape, seed=i) for i, (n, p) in enumerate(params.items())}
    found, expected = (
        OF_NESTED[name](loss, params, v, (x, torch.tensor([0, 1, 1]))) for x in (NESTED, PADDED)
    )
    assert_close(found, expected)


def on_nested(function):
    def run(net, x):
        nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
        return function(net, net.first(nested))

    return run


def attended(x):
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)


def constant_in_inference_mode(net, x):
    with torch.inference_mode():
        scale = torch.ones(4, dtype=F64)
    return net.last(net.first(x) * scale)


def layer_in_inference_mode(net, x):
    with torch.inference_mode():
        hidden = net.first(x)
    return net.last(hidden.tanh())


PADDED_AGAIN = on_nested(lambda net, x: net.last(torch.nested.to_padded_tensor(x, 0.0)).sum((0, 1)).expand(6, 2))  # fmt: skip
LACKING = {  # model, "forward mode" where the reverse mode is right, and what is said
    "padded again": (PADDED_AGAIN, False, "a nested tensor.* mask"),
    "layer_norm of one": (on_nested(lambda net, x: net.last(F.layer_norm(x, (4,))).values()), False, "a nested tensor.* mask"),
    "abs of one": (on_nested(lambda net, x: net.last(x.abs()).values()), False, "a nested tensor.* mask"),
    "attention of one": (on_nested(lambda net, x: net.last(attended(x)).values()), False, "a nested tensor.* mask"),
    "forward mode of one": (on_nested(lambda net, x: net.last(x.tanh()).values()), True, "a nested tensor.*reverse-over-reverse"),
    "a constant": (constant_in_inference_mode, False, r"inference_mode\(\).*torch.no_grad"),
    "a layer": (layer_in_inference_mode, True, r"inference_mode\(\).*torch.no_grad"),
    "the model": (torch.inference_mode()(lambda net, x: net.last(net.first(x))), True, r"inference_mode\(\).*torch.no_grad"),
}  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # of torch's attention
@rows("name", LACKING)
def test_what_torch_lacks_of_nested_and_inference_tensors_is_said(name):
    model, forward, message = LACKING[name]
    loss, params = made(Fn(model, first=nn.Linear(3, 4, dtype=F64), last=nn.Linear(4, 2, dtype=F64)))  # fmt: skip
    calls = [lambda: hog.hvp(loss, params, params, BATCH, mode="forward-over-reverse")]
    if not forward:
        calls += [
            lambda: hog.hvp(loss, params, params, BATCH),
            lambda: hog.HessianOperator(loss, params, BATCH) @ flat(params),
            lambda: hog.MAML(loss.model, F.cross_entropy, inner_lr=0.1).loss([(BATCH, BATCH)]),
        ]
    if name == "a constant":
        calls.append(lambda: hog.penalties.r1(lambda x: loss.model(x).sum(1), BATCH[0]))
    if name == "the model":
        calls.append(lambda: hog.per_example_gradients(loss, params, BATCH))
    for call in calls:
        with pytest.raises(NotImplementedError, match=rf"(?s)^\w+: expected .*{message}"):
            call()


def in_two_precisions(net, x):
    y = net.linear(x).tanh()
    return y.double(), y.half()


@rows("mode", ["forward", "reverse"])
def test_outputs_of_several_dtypes_are_no_lost_graph(mode):
    criterion = lambda out, y: out[0].square().mean() + out[1].float().sin().mean()  # noqa: E731
    loss, params = made(Fn(in_two_precisions, linear=nn.Linear(3, 2)), criterion)
    batch = (BATCH[0].float(), BATCH[1])
    v = {n: draw(*p.shape).float() for n, p in params.items()}
    exact, _ = made(copy.deepcopy(loss.model), lambda out, y: out[0].square().mean() + out[0].sin().mean())  # fmt: skip
    expected = hog.ggn_vp(exact, params, v, batch)[1]
    product = hog.ggn_vp(loss, params, v, batch, mode=mode)[1]
    assert relative(flat(product), flat(expected)) < 1e-2


def test_a_criterion_that_works_in_place():
    loss, params = made(net(), lambda out, y: out.sub_(1).square_().mean())
    A = dense_ggn(made(net(), lambda out, y: (out - 1).square().mean())[0], params, BATCH)
    assert relative(hog.GGNOperator(loss, params, BATCH).to_dense(), A) < 1e-7


def test_parameters_in_another_layout():
    layers = nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2)
    model = nn.Sequential(*layers).double()
    loss, params = made(model.to(memory_format=torch.channels_last))
    batch = (draw(4, 2, 3, 3), torch.arange(4) % 2)
    A = dense_ggn(loss, params, batch)
    G = hog.ggn(loss, params, batch)
    v = draw(len(A))
    # without stand-ins the forward mode of group_norm raises, and "auto" is the reverse mode
    for options in ({"mode": "forward"}, {"mode": "auto", "stand_ins": False}):
        assert relative(hog.GGNOperator(loss, params, batch, **options) @ v, A @ v) < 1e-7
    assert_close(G["3.bias"]["3.bias"], A[-2:, -2:], rtol=1e-6, atol=1e-9)


# Randomness, copies and threads


def test_differences_of_a_random_loss_are_of_one_realisation():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)).double()
    loss, params = made(model)
    v = {n: draw(*p.shape) for n, p in params.items()}
    torch.manual_seed(5)
    exact = hog.hvp(loss, params, v, BATCH)[1]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    product = hog.hvp(loss, params, v, BATCH, mode="finite-differences")[1]
    assert not torch.equal(torch.get_rng_state(), state)  # the value itself was drawn
    torch.manual_seed(5)
    again = hog.hvp(loss, params, v, BATCH, mode="finite-differences")[1]
    assert_close(flat(again), flat(product))
    assert float(flat(product).norm()) < 10 * float(flat(exact).norm())


def test_sampled_fisher_matrices_need_fixed_batches():
    loss, params = made(net())
    dataset = torch.utils.data.TensorDataset(*BATCH)
    shuffled = torch.utils.data.DataLoader(dataset, 2, shuffle=True, generator=torch.Generator().manual_seed(0))  # fmt: skip
    operator = hog.FisherOperator(loss, params, shuffled, kind="mc")
    operator @ draw(26)
    with pytest.raises(RuntimeError, match="are drawn for each batch by its number"):
        operator @ draw(26)


def test_small_losses_are_compared_as_closely():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    loss, params = made(model, lambda o, y: 1e-6 * F.mse_loss(o, torch.ones_like(o)))
    operator = hog.HessianOperator(loss, params, [(BATCH[0].float(), BATCH[1])] * 2)
    operator @ torch.ones(operator.shape[0])
    with pytest.raises(RuntimeError, match="Dropout"):
        operator @ torch.ones(operator.shape[0])


def test_the_split_of_every_batch_is_checked():
    loss, params = made(net())
    ignored = BATCH[1].clone()
    ignored[:2] = -100
    data, v = [BATCH, (BATCH[0], ignored)], draw(26)
    whole, split = (hog.HessianOperator(loss, params, data, micro_batch=n) for n in (None, 4))
    assert_close(split @ v, whole @ v)  # which counts the labels that are not ignored
    own = hog.functional_loss(loss.model, lambda o, y: F.cross_entropy(o, y) * len(y))
    with pytest.raises(ValueError, match="got their sum"):
        hog.HessianOperator(own, params, data[:1], micro_batch=4) @ v


def test_copies_of_an_operator():
    model = net()
    operator, v = hog.HessianOperator(*made(model), BATCH), draw(26)
    expected = operator @ v
    assert_close(copy.deepcopy(operator) @ v, expected)
    assert_close(pickle.loads(pickle.dumps(operator)) @ v, expected)
    assert_close(operator @ v, expected)


class Slow(nn.Module):
    def __init__(self, started, go_on):
        super().__init__()
        self.inner, self.started, self.go_on = net(), started, go_on

    def forward(self, x):
        self.started.set()
        self.go_on.wait(10)
        return self.inner(x)


def test_two_threads_do_not_share_a_model():
    started, go_on = threading.Event(), threading.Event()
    model = Slow(started, go_on)
    loss, params = made(model)
    own = dict(model.named_parameters())
    v = {n: torch.ones_like(p) for n, p in params.items()}
    first = []
    thread = threading.Thread(target=lambda: first.append(hog.hvp(loss, params, v, BATCH)[1]))
    thread.start()
    started.wait(10)
    with pytest.raises(NotImplementedError, match="one thread at a time"):
        hog.hvp(loss, params, v, BATCH)
    go_on.set()
    thread.join()
    assert all(p is own[n] for n, p in model.named_parameters())
    assert_close(hog.hvp(loss, params, v, BATCH)[1], first[0])


# Forms


def test_one_tensor_of_several_dimensions():
    x = draw(3, 2)
    batch = torch.ones(1, dtype=F64)
    operator = hog.HessianOperator(lambda p, b: p.pow(3).sum() * b.mean(), x, batch)
    V = draw(3, 2, 4)
    assert_close(operator @ V, 6 * x[..., None] * V)
    assert_close(operator @ V[..., 0], 6 * x * V[..., 0])
    assert_close(operator @ V.reshape(6, 4), 6 * x.reshape(6, 1) * V.reshape(6, 4))


MORE_ERRORS = {
    "a reduction that is not the criterion's": (lambda loss, p: hog.HessianOperator(loss, p, BATCH, reduction="sum"), ValueError, "criterion's own, 'mean'"),
    "a module for a loss": (lambda loss, p: hog.HessianOperator(loss.model, p, BATCH), TypeError, "functional_loss"),
    "inputs and targets apart": (lambda loss, p: hog.hvp(loss, p, p, *BATCH), TypeError, r"\(x, y\)"),
    "a number for a generator": (lambda loss, p: hog.HessianOperator(loss, p, BATCH).trace(3, generator=4), TypeError, "torch.Generator"),
    "division by zero": (lambda loss, p: hog.HessianOperator(loss, p, BATCH) / 0, ValueError, "other than 0"),
    "a preconditioner of another size": (lambda loss, p: hog.GGNOperator(loss, p, BATCH).solve(draw(26), preconditioner=hog.GGNOperator(loss, {"0.bias": p["0.bias"]}, BATCH)), ValueError, "operator of shape"),
    "a number for blocks": (lambda loss, p: hog.hessian(loss, p, BATCH, blocks=3), TypeError, "blocks: expected"),
    "parameters without elements": (lambda loss, p: hog.HessianOperator(loss, {"w": draw(0)}, BATCH), ValueError, "at least one number"),
}  # fmt: skip


test_errors_say_what_to_do = refused(MORE_ERRORS, lambda call: call(*made(net())))
