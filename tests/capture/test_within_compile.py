"""Inside torch.compile, hoglib is traced into one graph, which computes what it computes outside."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils import _pytree

import hoglib as hog
from hoglib.errors import UnsupportedError
from tests.capture.models import draw, net
from tests.functions import ClassicCube
from tests.long_tail import FULL
from tests.rows import rows

P = hog.penalties
# torch's own, while it traces
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Converting a tensor with requires_grad"
)


class Attention(nn.Module):
    """Norms and attention: what torch differentiates wrongly has stand-ins in the graph."""

    def __init__(self):
        super().__init__()
        self.norm, self.project, self.head = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 1)

    def forward(self, x):
        q, k, v = self.project(self.norm(x))[:, None].chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


torch.manual_seed(0)
critic = net(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)).double()
vector = net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
normed = net(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.SiLU(), nn.Linear(4, 1)).double()
attention = Attention().double()
learner = hog.MAML(vector, F.mse_loss, inner_lr=0.1, inner_steps=2)
layer = nn.Linear(3, 2).double()
one_layer = hog.MAML(layer, F.mse_loss, inner_lr=0.1, over_tasks="loop")
x, y, v = draw(5, 3), draw(5, 3, seed=1), draw(3, seed=2)
zero, xs = torch.zeros(3).double(), draw(2, 3, 4)
batch = x, torch.tensor([0, 1, 1, 0, 1])
tasks = (draw(4, 5, 3), draw(4, 5, 2)), (draw(4, 6, 3, seed=1), draw(4, 6, 2, seed=1))
loss, params = hog.functional_loss(vector, F.cross_entropy), hog.trainable_params(vector)
u = {name: draw(*p.shape, seed=3) for name, p in params.items()}
copied = deepcopy(loss)
operator = hog.HessianOperator(loss, params, batch)
gradient_penalty = hog.GradientPenalty("r1", weight=2.0)


def score(x):
    return critic(x).squeeze(-1)


def closure():
    """A function that is made in what is compiled, and uses what is computed there."""
    weight = score(x).sum()
    return hog.hvp(lambda p: (p * weight).exp().sum(), v, v, create_graph=True)


def made():
    return hog.functional_loss(vector, lambda outputs, y: F.cross_entropy(outputs, y))


def mapped(x):
    return {"a": x.sin(), "b": critic(x)}


CALLS = {
    "hvp": lambda: hog.hvp(loss, params, u, batch, create_graph=True),
    "hvp, forward": lambda: hog.hvp(loss, params, u, batch, mode="forward-over-reverse"),
    "hvp by keywords": lambda: hog.hvp(func=lambda p: p.pow(3).sum(), params=v, v=x[0]),
    "hvp of a closure": closure,
    "hvp of a norm at 0": lambda: hog.hvp(lambda p: p.norm() ** 2, zero, v),
    "hvp of a penalty": lambda: hog.hvp(lambda p: P.r1(lambda x: (x * p).sin().sum(1), x), v, v),
    "hessian": lambda: hog.hessian(lambda p: {"p": p}["p"].pow(3).sum() * p[0], v),
    "ggn_vp": lambda: hog.ggn_vp(loss, params, u, batch),
    "ggn_vp of a loss made inside": lambda: hog.ggn_vp(made(), params, u, batch),
    "fisher_vp of a copied loss": lambda: hog.fisher_vp(copied, params, u, batch),
    "fisher_vp": lambda: hog.fisher_vp(loss, params, u, batch),
    "fisher_vp, empirical": lambda: hog.fisher_vp(loss, params, u, batch, kind="empirical"),
    "jvp": lambda: hog.jvp(vector, x, y),
    "jvp of trees": lambda: hog.jvp(lambda a, b: {"s": a * b, "t": (a.sin(), b)}, (x, y), (y, x)),
    "laplacian": lambda: hog.laplacian(vector, x, return_gradient=True),
    "laplacian, nested": lambda: hog.laplacian(vector, x, mode="nested"),
    "directional": lambda: hog.directional(score, x, y, 3),
    "jet": lambda: hog.jet(score, x, [y, None]),
    "r1": lambda: P.r1(critic, x, return_outputs=True),
    "r1 of an output": lambda: P.r1(mapped, x, output="b", return_outputs=True),
    "r1 of attention": lambda: P.r1(attention, xs),
    "r1 of batch norm": lambda: P.r1(normed, x),
    "r1_r2": lambda: P.r1_r2(critic, x, y[:2]),
    "wgan_gp": lambda: P.wgan_gp(critic, x, x, reduction="none"),
    "zero_centred": lambda: P.zero_centred(critic, x, x),
    "dragan": lambda: P.dragan(critic, x, noise=1e-30),
    "jacobian": lambda: P.jacobian(vector, x, num_projections=None),
    "sobolev": lambda: P.sobolev(score, x, y),
    "lipschitz": lambda: P.lipschitz(vector, x, num_iterations=None, bound=0.1),
    "input_gradient": lambda: P.input_gradient(lambda x: critic(x).square().sum(1), x),
    "parameter_gradient": lambda: P.parameter_gradient(loss, params, batch),
    "GradientPenalty": lambda: gradient_penalty(critic, x),
    "forces": lambda: P.forces(score, x, hessian=True),
    "MAML": lambda: learner.loss(tasks),
    "MAML, task by task": lambda: one_layer.loss(tasks),
    "without gradients": lambda: (torch.no_grad()(lambda: P.r1(critic, x))(), score(x)),
}  # fmt: skip
MODULES = critic, vector, normed, attention, layer


def values(results):
    """What was computed, whether it can be differentiated, and its gradients by all parameters."""
    leaves = [leaf for leaf in _pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    total = sum((leaf.sin() * 1.7).sum() for leaf in leaves if leaf.requires_grad)
    for module in MODULES:
        module.zero_grad()
    if isinstance(total, torch.Tensor):
        total.backward()
    grads = [
        p.grad.clone() for module in MODULES for p in module.parameters() if p.grad is not None
    ]
    return [leaf.detach() for leaf in leaves], [leaf.requires_grad for leaf in leaves], grads


def compare(call, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    wanted = values(call())
    buffers = [b.clone() for module in MODULES for b in module.buffers()]
    torch.manual_seed(0)
    assert_close(values(compiled(call)()), wanted, rtol=1e-11, atol=1e-13)
    assert_close([b for module in MODULES for b in module.buffers()], buffers, rtol=0, atol=0)


def whole(call, backend="aot_eager"):
    return torch.compile(call, fullgraph=True, backend=backend)


@pytest.mark.filterwarnings("ignore:r1. expected each sample")
@rows("call", CALLS.values(), ids=CALLS)
def test_one_graph_computes_the_same(call):
    compare(call, whole)


# of a step of gradient descent on a linear layer inductor would forget the rate
@pytest.mark.parametrize("name", ["MAML, task by task", pytest.param("r1", marks=FULL)])
def test_by_inductor(name):
    compare(CALLS[name], lambda call: whole(call, "inductor"))


# what runs uncompiled, between graphs
LEFT = {
    "in pieces": lambda: P.r1(critic, x, micro_batch=3),
    "a generator": lambda: P.wgan_gp(critic, x, x, generator=torch.Generator().manual_seed(0)),
    "a Function in pieces": lambda: P.r1(lambda x: ClassicCube.apply(critic(x)), x, micro_batch=3),
    "an operator": lambda: operator @ u,
    "a dense matrix": lambda: hog.ggn(loss, params, batch),
    "gradients of examples": lambda: hog.curvature.per_example_gradient_norms(loss, params, batch),
    "influence": lambda: hog.influence(loss, params, batch, batch, damping=0.1),
    "adapt": lambda: learner(x, params=learner.adapt((tasks[0][0][0], tasks[0][1][0]))),
    "in torch.func.grad": lambda: torch.func.grad(lambda p: hog.laplacian(score, p)[1].sum())(x),
    "in vmap": lambda: torch.vmap(lambda p: hog.hvp(lambda q: q.pow(4).sum(), p, p)[1])(x),
    "batch norms": lambda: hog.MAML(normed, F.mse_loss).loss(((x[None], x[None, :, :1]),) * 2),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@rows("call", LEFT.values(), ids=LEFT)
def test_what_is_not_traced_runs_uncompiled(call):
    compare(call, lambda call: torch.compile(call, backend="aot_eager"))


def test_what_the_function_reads_is_guarded_and_sizes_stay_symbols():
    torch._dynamo.reset()
    state = nn.Module()
    state.scale = 2.0
    fast = whole(lambda x: P.r1(lambda x: critic(x * state.scale), x))
    torch._dynamo.mark_dynamic(first := draw(6, 3), 0)
    assert_close(fast(first), P.r1(critic, 2.0 * first) * 4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_close(fast(draw(9, 3)), P.r1(critic, 2.0 * draw(9, 3)) * 4)
    state.scale = 3.0
    assert_close(fast(x), P.r1(critic, 3.0 * x) * 9)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.options = nn.Linear(3, 1).double(), {"scale": 1.0}

    def forward(self, x):
        return torch.tanh(self.layer(x) * self.options["scale"])


scaled = Scaled()
scaled_loss, scaled_params = hog.functional_loss(scaled, F.mse_loss), hog.trainable_params(scaled)
scaled_learner = hog.MAML(scaled, F.mse_loss, inner_lr=0.1)
scaled_tasks = tuple((a, b[..., :1]) for a, b in tasks)
# of a number that changes torch makes a symbol
NUMBERS = {
    "hvp": lambda _: hog.hvp(scaled_loss, scaled_params, scaled_params, (x, y[:, :1])),
    "r1": lambda _: P.r1(scaled, x).detach(),
    "MAML": lambda _: scaled_learner.loss(scaled_tasks).detach(),
    "an argument": lambda c: P.r1(lambda x, c: critic(x) * c, x, c).detach(),
    "an option": lambda c: P.wgan_gp(critic, x, y, target=c).detach(),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@rows("call", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_change(call):
    torch._dynamo.reset()
    fast = torch.compile(call, backend="aot_eager")
    for number in (1.0, 1.5, 2.5, 1.5):
        scaled.options["scale"] = number
        torch.manual_seed(0)
        wanted = call(number)
        torch.manual_seed(0)
        assert_close(fast(number), wanted, rtol=1e-11, atol=1e-13)


def test_the_likelihood_of_a_loss_made_inside_is_not_guessed():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="functional_loss outside of what is compiled"):
        whole(lambda: hog.fisher_vp(made(), params, u, batch))()


@rows("mode", ["auto", "forward-over-reverse"])
def test_a_custom_function_is_refused_by_its_line(mode):
    torch._dynamo.reset()
    with pytest.raises(
        UnsupportedError,
        match=r"hvp inside torch.compile: .* custom Function at .*ClassicCube.apply",
    ):
        whole(lambda: hog.hvp(lambda p: ClassicCube.apply(p).sum(), v, v, mode=mode), "eager")()
