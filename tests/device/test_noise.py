"""Every public function has the CPU's results on a GPU. Where that adds in another order at each run, and
rounds convolutions to TF32, nothing that is right is refused, and results differ by that noise alone."""

import warnings
from functools import partial
from inspect import isfunction
from pathlib import Path
from tempfile import mkdtemp
from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hoglib as hog
from hoglib import curvature, meta, penalties
from hoglib._core.numerics import sparsity
from tests.device import simulation
from tests.taylor.operations import CASES

pytestmark = pytest.mark.gpu
DEVICE = ["cuda"]  # of networks and data; the CPU for what is expected


def network(out=5):
    torch.manual_seed(0)
    conv, head = nn.Conv2d(1, 4, 3, padding=1, device="cpu"), nn.Linear(64, out, device="cpu")
    return nn.Sequential(conv, nn.Softplus(), nn.MaxPool2d(2), nn.Flatten(), head).to(*DEVICE)


def drawn(*shape, seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, device="cpu").to(*DEVICE)


def data():
    return drawn(16, 1, 8, 8), (10 * drawn(16, seed=3)).long().remainder(5)


def field(function, **options):
    """A function of points, of a scalar of each."""
    u = network(1)
    return function(lambda x: u(x).squeeze(-1), data()[0][:2], **options)


def written(x):
    y = torch.zeros_like(x)
    y[0] = x[1] ** 3
    return y * x


def by_structure(x):
    return torch.stack([x[0] * x[3], x[1].exp() * x[2]]).sum(-1)


def of_the_loss(compute):
    def run():
        net = network()
        loss, params = hog.functional_loss(net, cross_entropy), hog.trainable_params(net)
        vector = {name: torch.ones_like(p) for name, p in params.items()}
        return compute(loss, params, vector, data())

    return run


def operator(kind, compute):
    def run(loss, params, vector, batch):
        made = kind(loss, params, [batch, batch])
        return compute(made, torch.ones(made.shape[0], device=DEVICE[0]))

    return of_the_loss(run)


def penalty(name, *others, **options):
    """A penalty of a critic, and its parameter gradients; others: further arguments."""
    critic, (x, _) = network(1), data()
    random = {"generator": torch.Generator().manual_seed(5)} if name in RANDOM else {}
    found = getattr(penalties, name)(critic, x, *(one(x) for one in others), **random, **options)
    found.backward()
    return [found, *(p.grad for p in critic.parameters() if p.grad is not None)]


RANDOM = {"wgan_gp", "zero_centred", "dragan", "jacobian", "lipschitz", "sobolev"}


def optimizer(made, **options):
    net = network()
    made = made(hog.functional_loss(net, cross_entropy), damping=1.0, **options)
    return [made.step(data()), made.step(data()), *net.parameters()]


def least_squares(**options):
    net = network()
    loss = hog.functional_loss(net, cross_entropy)
    made = curvature.LevenbergMarquardt(
        loss.outputs, hog.trainable_params(net), damping=1.0, **options
    )
    return [made.step(data()), made.step(data()), *net.parameters()]


def learner(kind, **options):
    net = network()
    made = kind(net, cross_entropy, inner_steps=2, **({"inner_lr": 0.1} | options))
    made.loss([(data(), data())] * 2).backward()
    return [p.grad for p in net.parameters()]


def maml(memory):
    return learner(meta.MAML, memory=memory)


def adapted(rule):
    net = network()
    loss, params = hog.functional_loss(net, cross_entropy), hog.trainable_params(net)
    first, _ = meta.inner_step(loss, params, data(), rule, rule.init(params))
    return [first, meta.adapt(loss, params, data(), rule, steps=3)]


def rooted():
    a = drawn(3).exp().requires_grad_()
    return torch.autograd.grad(meta.root(lambda x, a: x * x - a, a.detach().sqrt(), a).sum(), a)


def at_a_fixed_point():
    a = drawn(3).requires_grad_()
    z = meta.fixed_point(lambda z, a: (z + a).cos() / 2, drawn(3), a)
    return [z, *torch.autograd.grad(z.sum(), a)]


def hypergradient(memory):
    net, (x, y) = network(), data()

    def inner(params, hyper):
        decay = hyper.exp() * sum(p.square().sum() for p in params.values())
        return cross_entropy(functional_call(net, params, (x,)), y) + decay

    outer = lambda params, hyper: cross_entropy(functional_call(net, params, (x.flip(0),)), y)  # noqa: E731
    rate = meta.scheduled(0.1, lambda made: torch.optim.lr_scheduler.StepLR(made, 3), steps=6)
    return meta.hypergradient(
        outer, inner, hog.trainable_params(net), torch.tensor(-2.0, device=DEVICE[0]),
        rule=meta.sgd(rate, momentum=0.5), steps=6, memory=memory,
    ).gradient  # fmt: skip


def left_out():
    x, y, options = drawn(16, 3), drawn(16, seed=3), {"rule": meta.sgd(0.1), "steps": 5}
    outer = lambda p, w: (x[:4] @ p - 1).square().mean()  # noqa: E731
    inner = lambda p, w: (w * (x @ p - y) ** 2).mean() + p.square().sum()  # noqa: E731
    given = outer, inner, torch.zeros_like(x[0]), torch.ones_like(y)
    options |= {"k": 16, "subsets": 4, "generator": torch.Generator(*DEVICE)}
    found = meta.hypergradient(*given, rule=options["rule"], steps=5)
    return list(meta.leave_k_out(found, *given, **options)[:2])


def reported(make):
    make().raise_if_failed()
    return drawn(1)


def attention():
    """In blocks, which a device takes for more than 2^20 scores."""
    q, k, v = drawn(3, 1, 1100, 4, seed=2)

    def loss(weight):
        return scaled_dot_product_attention(q * weight, k, v, is_causal=True).square().mean()

    one = torch.ones(4, device=DEVICE[0])
    return hog.hvp(loss, one, one)


def unused():
    params = {"used": torch.ones(3, device=DEVICE[0]), "unused": torch.ones(2, device=DEVICE[0])}
    return hog.hvp(lambda p: p["used"].pow(4).sum() + 0 * p["unused"].sum(), params, params)


def language_model():
    torch.manual_seed(0)
    layers = nn.Embedding(7, 4, device="cpu"), nn.Linear(4, 7, device="cpu")
    model = nn.Sequential(*layers).to(*DEVICE)
    tokens = data()[1].view(2, 8)
    loss, params = hog.language_model_loss(model, head="1", shift=True), hog.trainable_params(model)
    return hog.hvp(loss, params, params, (tokens, tokens))


def entries(function, f):
    """The values of a sparse matrix: the simulated device has no sparse tensors."""
    with mock.patch.object(sparsity.SparseMatrix, "to_csr", lambda matrix: matrix.values):
        return function(f, drawn(12))


def signs():
    return torch.Generator().manual_seed(4)


KINDS = "HessianOperator", "GGNOperator", "KFACOperator", "FisherOperator"
H, G, K, F = (partial(operator, getattr(curvature, kind)) for kind in KINDS)
examples = lambda function, **options: of_the_loss(lambda f, p, v, b: function(f, p, b, **options))  # noqa: E731
ROWS = {
    "hvp": of_the_loss(hog.hvp),
    "ggn_vp": of_the_loss(hog.ggn_vp),
    "fisher_vp": of_the_loss(hog.fisher_vp),
    "fisher_vp, draws of the CPU": of_the_loss(lambda *g: hog.fisher_vp(*g, kind="mc", generator=signs())),
    "jvp": lambda: field(lambda f, x: hog.jvp(f, x, torch.ones_like(x))),
    "jet": lambda: field(lambda f, x: hog.jet(f, x, [torch.ones_like(x)] * 2)),
    "jet, nested": lambda: field(lambda f, x: hog.jet(f, x, [torch.ones_like(x)] * 2, mode="nested")),
    "jet, in vmap": lambda: field(lambda f, x: torch.func.vmap(lambda v: hog.jet(lambda x: x.exp() * x, v, [v, v]))(x)),
    "jet, written": lambda: field(lambda f, x: hog.jet(written, x, [torch.ones_like(x)] * 2)),
    "directional": lambda: field(lambda f, x: hog.directional(f, x, torch.ones_like(x), 2)),
    "partial_derivative": lambda: hog.partial_derivative(lambda x: x.exp().prod(-1), drawn(3, 2), index=(0, 1)),
    "laplacian": lambda: field(hog.laplacian),
    "laplacian, draws of the CPU": lambda: field(hog.laplacian, num_projections=2, generator=signs()),
    "sparse_hessian": lambda: entries(hog.sparse_hessian, lambda x: (x.diff() ** 3).sum() + x.exp().sum()),
    "sparse_jacobian": lambda: entries(hog.sparse_jacobian, lambda x: x.diff() * x[:-1]),
    "laplacian, sparse": lambda: hog.laplacian(lambda x: (x.diff(dim=1) ** 3).sum(1), drawn(3, 8), sparsity="auto"),
    "bilaplacian": lambda: hog.bilaplacian(lambda x: x.exp().prod(-1), drawn(3, 2)),
    "forces and their Hessian": lambda: field(penalties.forces, hessian=True),
    "forces, by structure": lambda: penalties.forces(by_structure, drawn(4, 3), batch=torch.tensor([0, 1, 1, 0], device=DEVICE[0]), hessian=True),
    "hessian": of_the_loss(lambda f, p, v, b: hog.hessian(f, p, b, blocks="parameter")),
    "ggn": of_the_loss(lambda f, p, v, b: hog.ggn(f, p, b, blocks="parameter")),
    "Hessian": H(lambda H, v: [H @ v, H.block_diagonal("parameter") @ v, H.squared_frobenius(4, generator=signs())]),
    "Fisher": F(lambda F, v: F @ v),
    "solve": G(lambda G, v: G.solve(v, damping=1.0)),
    "low_rank": G(lambda G, v: G.low_rank(5, generator=signs()).values),
    "logdet": G(lambda G, v: G.damped(1.0).logdet(4, steps=10, generator=signs())),
    "eigsh": H(lambda H, v: H.eigsh(2, which="LA").values),
    "least squares": of_the_loss(lambda f, p, v, b: (lambda J: [J.lstsq(J @ v, damping=100.0, tol=3e-5), J.svd(2).values])(hog.JacobianOperator(f, p, [b, b]))),
    "KFAC": K(lambda K, v: [K.inverse(damping=1.0) @ v, K.inverse(1.0, method="pi") @ v, K.damped(1.0).logdet()]),
    "exp(G)": G(lambda G, v: G.matrix_function(v, torch.exp)),
    "Jacobian": of_the_loss(lambda f, p, v, b: (lambda J: [J @ v, J @ J.T @ (J @ v), J.T @ J @ v])(hog.JacobianOperator(f, p, [b, b]))),
    "given": H(lambda H, v: [curvature.LinearOperator.from_matvec(lambda x: H @ x, v) @ v, curvature.LinearOperator.from_dense(H.to_dense()) @ v]),
    "submatrix": H(lambda H, v: [H.submatrix("0.*").to_dense(), (H @ H) @ v]),
    "trace": H(lambda H, v: [H.trace(4, generator=signs()), H.diagonal(4, generator=signs())]),
    "hessian_spectrum": examples(lambda *g: curvature.hessian_spectrum(*g, k=2, steps=9, generator=signs()).largest.to(*DEVICE)),
    "critical_sharpness": examples(lambda *g: torch.tensor(hog.critical_sharpness(*g, tol=1e-4).value).to(*DEVICE)),
    "spectral_density": H(lambda H, v: H.spectral_density(2, steps=9, generator=signs()).nodes.to(v)),
    "influence": of_the_loss(lambda f, p, v, b: curvature.influence(f, p, b, b, damping=1.0)),
    "influence, fitted": of_the_loss(lambda f, p, v, b: curvature.influence(f, p, b, None, damping=1.0, solver=curvature.KFACOperator(f, p, b))),
    "gradient_store": of_the_loss(lambda f, p, v, b: hog.gradient_store(f, p, b, out=f"{mkdtemp()}/rows.npy").products(b).to(*DEVICE)),
    "gradient_noise_scale": of_the_loss(lambda f, p, v, b: curvature.gradient_noise_scale(f, p, [b, b])),
    "per_example_gradients": examples(hog.per_example_gradients),
    "per_example_gradient_norms": examples(curvature.per_example_gradient_norms),
    "per_example_diagonals": of_the_loss(lambda f, p, v, b: curvature.per_example_diagonals(f, p, b)),
    "derivatives of a trace": G(lambda G, v: torch.autograd.grad(G.trace(4, generator=signs(), create_graph=True), [x for x in G.params.values() if x.requires_grad])),
    "per_example_gradient_products": examples(curvature.per_example_gradient_products),
    "NewtonCG": lambda: optimizer(curvature.NewtonCG, preconditioner="kfac"),
    "LevenbergMarquardt": lambda: [*least_squares(), *least_squares(method="lsmr")],
    "curvature.KFAC": lambda: optimizer(curvature.KFAC, kind="exact"),
    "language_model_loss": language_model,
    "attention": attention,
    "an unused parameter": unused,
    **{name: partial(penalty, name) for name in ("r1", "r2", "dragan", "jacobian", "lipschitz")},
    **{name: partial(penalty, name, torch.fliplr) for name in ("r1_r2", "wgan_gp", "zero_centred")},
    "sobolev": partial(penalty, "sobolev", torch.ones_like),
    "input_gradient": lambda: field(penalties.input_gradient),
    "parameter_gradient": examples(penalties.parameter_gradient),
    "GradientPenalty": lambda: penalties.GradientPenalty("r1")(network(1), data()[0], None),
    "IMAML": lambda: learner(meta.IMAML),
    "Reptile": lambda: learner(meta.Reptile),
    "root": rooted,
    "fixed_point": at_a_fixed_point,
    "leave_k_out": left_out,
    "audit": of_the_loss(lambda f, p, v, b: reported(lambda: hog.audit(f, p, b))),
    "verify": lambda: reported(lambda: hog.verify(lambda x: x.softmax(-1) * x, drawn(4, 5))),
    "compile": lambda: field(hog.compile(penalties.forces, backend="eager")),
    "compiled_loss": lambda: hog.hvp(hog.compiled_loss(lambda x: x.pow(3).sum(), backend="eager"), drawn(3), drawn(3)),
    **{name: partial(adapted, rule(0.1)) for name, rule in meta.RULES.items()},
    **{
        f"{call.__name__}, {memory}": partial(call, memory)
        for call in (maml, hypergradient)
        for memory in ("store", "remat", "checkpoint", "mixed")
    },
}  # fmt: skip
OTHERS = "multi_step_weights", "shard"  # no tensors, processes
ELSEWHERE = "graph", "second_order"  # tests/test_drawing.py, tests/stand_ins/test_table.py


def results(name):
    found = torch.utils._pytree.tree_leaves(ROWS[name]())
    return [x.detach() for x in found if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", ROWS)
def test_equal_to_the_cpu_and_noise_is_no_fault(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    DEVICE[:] = ["cpu"]
    on_the_cpu = results(name)
    DEVICE[:] = ["cuda"]
    with torch.device("cuda"):  # as torch.set_default_device: what is on the CPU says so
        expected = results(name)
    assert len(expected) > 0
    for a, b in zip(expected, on_the_cpu, strict=True):
        assert a.is_cuda
        assert (a.cpu() - b).norm() <= 1e-4 * b.norm()
    if simulation.C is None:
        return
    simulation.nondeterministic(), simulation.tf32()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = results(name)
    finally:
        simulation.nondeterministic(False), simulation.tf32(convolutions=False)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


@pytest.mark.filterwarnings("ignore")  # of kinks
def test_taylor_rules():
    ran = 0
    for name, (function, x) in CASES.items():
        try:
            function(x.cuda())
        except RuntimeError:  # it holds tensors of the CPU
            continue
        given = x, [torch.ones_like(x), torch.full_like(x, 0.3)]
        found = hog.jet(function, *torch.utils._pytree.tree_map(torch.Tensor.cuda, given))
        expected = torch.utils._pytree.tree_map(torch.Tensor.cuda, hog.jet(function, *given))
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
        ran += 1
    assert ran > 200


def test_every_public_function_has_a_row():
    packages, rows = (hog, curvature, penalties, meta), Path(__file__).read_text()
    every = {name: getattr(package, name) for package in packages for name in package.__all__}
    functions = {name for name, x in every.items() if isfunction(x)} - meta.RULES.keys()
    assert not [name for name in functions if name not in rows]
