"""remat=: the blocks that are found, and the same derivatives, with the inputs of blocks for a graph."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib._core.remat.blocks import find_blocks, repeated_blocks
from hoglib._core.remat.call import Rerun
from hoglib.capture import recomputed
from tests.models import Fn
from tests.oracles import random_like, relative

DOUBLE = torch.float64


class Residual(nn.Module):
    """A ResNet's basic block; only the first of a stage has a projection."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.drop = nn.Dropout(0.2)
        self.project = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return self.project(x) + self.drop(F.gelu(self.norm(self.conv(x))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(3, 3), Residual(3, 3))
        self.layer2 = nn.Sequential(Residual(3, 4), Residual(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((-2, -1)))


class Layer(nn.Module):
    """Keyword arguments, tuples and None go in and come out."""

    def __init__(self, width=4):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, h, *, memory=None, cache=None):
        out = h + torch.tanh(self.inner(self.norm(h)))
        if memory is not None:
            out = out * memory.mean(1, keepdim=True)
        if cache is not None:
            cache.append(out)
        return out, None, {"extra": (3, out.sin())}


class Cache:
    """Keys of earlier tokens, which each layer adds to."""

    def __init__(self):
        self.keys = []

    def append(self, x):
        self.keys.append(x)
        if len(self.keys) > 1:
            x += self.keys[-2]


class SharedCodec(nn.Module):
    """An encoder and a decoder with the same layers, and a head with the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = self.encoder
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        h = memory = self.embedding(tokens)
        for layer in self.encoder:
            memory = layer(memory)[0]
        for layer in self.decoder:
            h, _, more = layer(h, memory=memory)
            h = h + more["extra"][1]
        return self.head(h).flatten(0, 1)


def stack_of_layers():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    return Fn(lambda net, x: net.body(x).mean(1), body=nn.TransformerEncoder(layer, 2))


def images():
    return torch.randn(4, 1, 4, 4, dtype=DOUBLE), torch.tensor([0, 1, 1, 0])


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=4, n_head=2, vocab_size=7, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(0, 7, (2, 4))
    model = transformers.GPT2LMHeadModel(config)
    return hog.functional_loss(model), {"input_ids": tokens, "labels": tokens}


def shared_codec():
    tokens = torch.randint(0, 7, (2, 3))
    return hog.functional_loss(SharedCodec(), F.cross_entropy), (tokens, tokens.flatten())


def resnet():
    return hog.functional_loss(ResNet(), F.cross_entropy), images()


def transformer():
    x = torch.randn(2, 3, 4, dtype=DOUBLE)
    return hog.functional_loss(stack_of_layers(), F.mse_loss), (x, torch.randn(2, 4, dtype=DOUBLE))


def lists_of_parts():
    """Layers without a forward of their own, as many transformers have them: [attention, feed-forward]."""

    def run(net, x):
        for mix, feed in net.layers:
            x = x + mix(x)
            x = x + feed(x)
        return x

    def layer():
        feed = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        gate = Fn(lambda _, h: h * torch.no_grad()(torch.sin)(h) * h.detach())
        return nn.ModuleList([nn.Sequential(nn.Linear(4, 4), gate), feed])

    x = torch.randn(2, 4, dtype=DOUBLE)
    model = Fn(run, layers=nn.ModuleList([layer(), layer()]))
    return hog.functional_loss(model, F.mse_loss), (x, torch.randn(2, 4, dtype=DOUBLE))


MODELS = {
    "lists of parts": lists_of_parts, "ResNet": resnet, "transformer": transformer, "shared codec": shared_codec, "GPT-2": gpt2,
}  # fmt: skip
BLOCKS = {
    "lists of parts": ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"],
    "ResNet": ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
    "transformer": ["body.layers.0", "body.layers.1"],
    "shared codec": ["encoder.0", "encoder.1"],
    "GPT-2": ["transformer.h.0", "transformer.h.1"],
}


def problem(name, train=True):
    torch.manual_seed(0)
    loss, batch = MODELS[name]()
    loss.model.double().train(train)
    params = hog.trainable_params(loss.model)
    return loss, params, random_like(params), batch


@pytest.fixture
def runs(monkeypatch):
    """How often a block is recomputed."""
    counted = []
    rerun = Rerun.__call__

    def counting(self, *tensors, **options):
        counted.append(1)
        return rerun(self, *tensors, **options)

    monkeypatch.setattr(Rerun, "__call__", counting)
    return counted


@pytest.fixture
def levels(monkeypatch):
    """The graphs of blocks."""
    monkeypatch.setattr(recomputed, "_TEMPLATES", type(recomputed._TEMPLATES)())

    def found():
        templates = {id(x): x for x in recomputed._TEMPLATES.values()}.values()
        return [one for x in templates for level in x.levels.values() for one in level.signatures]

    return found


def flat(tree):
    return torch.cat([x.reshape(-1) for x in tree.values()])


PRODUCTS = {
    "hvp": (hog.hvp, ["reverse-over-reverse", "forward-over-reverse", "finite-differences"]),
    "ggn_vp": (hog.ggn_vp, ["forward", "reverse"]),
    "fisher_vp": (partial(hog.fisher_vp, kind="empirical"), ["forward", "reverse"]),
}
CASES = [
    (name, product, mode)
    for name in BLOCKS
    for product, (_, modes) in PRODUCTS.items()
    for mode in modes
    if product == "hvp" or name in ("ResNet", "shared codec")
    # differences of a loss with dropout see another mask at each step
]


@pytest.mark.parametrize(("name", "product", "mode"), CASES)
def test_products_are_the_same(name, product, mode, runs):
    loss, params, v, batch = problem(name, train=mode != "finite-differences")
    found = []
    for remat in (False, True):
        torch.manual_seed(1)  # of dropout
        found.append(PRODUCTS[product][0](loss, params, v, batch, mode=mode, remat=remat))
        assert bool(runs) is remat
    (value, plain), (same_value, recomputed) = found
    assert value == same_value
    limit = 1e-9 if mode == "finite-differences" else 1e-12  # differences amplify rounding
    assert relative(flat(recomputed), flat(plain)) < limit
    assert not any("forward" in vars(module) for module in loss.model.modules())


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_that_are_found(name):
    loss, *_ = problem(name)
    assert list(repeated_blocks(loss.model)) == BLOCKS[name]
    if name == "lists of parts":
        assert find_blocks("layers", loss) == list(repeated_blocks(loss.model).values())


def test_a_third_derivative_and_vectors_at_once():
    loss, params, v, batch = problem("transformer", train=False)

    def both(remat):
        _, product = hog.hvp(loss, params, v, batch, create_graph=True, remat=remat)
        third = torch.autograd.grad(flat(product).sin().sum(), list(params.values()))
        return torch.cat([t.reshape(-1) for t in third])

    assert relative(both(True), both(False)) < 1e-11
    V = {name: torch.stack([x, 2 * x, x.sin()]) for name, x in v.items()}
    found = [
        torch.func.vmap(lambda v, r=remat: hog.hvp(loss, params, v, batch, remat=r)[1])(V)
        for remat in (False, True)
    ]
    assert relative(flat(found[1]), flat(found[0])) < 1e-12


def test_buffers_are_left_alone_and_hooks_of_a_block_run_once():
    loss, params, v, batch = problem("ResNet")
    before = copy.deepcopy(loss.model.state_dict())
    calls = []
    loss.model.layer1[0].register_forward_hook(lambda *_: calls.append("block"))
    hog.hvp(loss, params, v, batch, remat=True)
    assert calls == ["block"]
    torch.testing.assert_close(loss.model.state_dict(), before, rtol=0, atol=0)


def test_a_backward_after_the_call_and_an_error_inside_it():
    loss, params, v, batch = problem("shared codec")
    results = []
    for remat in (False, True):
        value, _ = hog.hvp(loss, params, v, batch, create_graph=True, remat=remat)
        results.append(flat(dict(enumerate(torch.autograd.grad(value, list(params.values()))))))
    assert relative(results[1], results[0]) < 1e-12
    with pytest.raises(ValueError, match="batch_size"):
        hog.hvp(loss, params, v, (batch[0], batch[1][:2].repeat(2)), remat=True)
    assert not any("forward" in vars(module) for module in loss.model.modules())


class Cached(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.layers, self.shared = nn.ModuleList(Layer() for _ in range(2)), shared

    def forward(self, x):
        cache = self.shared()
        for layer in self.layers:
            x = layer(x, cache=cache)[0]
        return x


def test_a_cache_that_blocks_fill_is_one_of_their_own():
    loss = hog.functional_loss(Cached(Cache).double(), F.mse_loss)
    params, batch = hog.trainable_params(loss.model), (torch.randn(2, 3, 4, dtype=DOUBLE),) * 2
    v = random_like(params)
    without = hog.functional_loss(loss.model, F.mse_loss)
    _, found = hog.hvp(loss, params, v, batch, remat=True)
    loss.model.shared = lambda: None
    _, expected = hog.hvp(without, params, v, batch)
    assert relative(flat(found), flat(expected)) < 1e-12
    loss.model.shared = list
    with pytest.raises(ValueError, match="changes a list or dict among its arguments"):
        hog.hvp(loss, params, v, batch, remat=True)


# Names

NAMES = {
    "a name": ("transformer.h.1", 1),
    "a list": ("transformer.h", 2),
    "a glob": ("transformer.h.*", 2),  # of which the parts of blocks are no others
    "several": (["*.0.mlp", "*.1"], 2),
}


@pytest.mark.parametrize(("remat", "count"), NAMES.values(), ids=NAMES.keys())
def test_blocks_by_name(remat, count):
    loss, *_ = problem("GPT-2")
    assert len(find_blocks(remat, loss)) == count


WRONG = {
    "no such name": ("h.*", ValueError, r"none has. Repeated blocks.*'layers\.0', 'layers\.1'"),
    "one of two": (["layers.0", "x"], ValueError, "remat='x'"),
    "a number": (3, TypeError, "got int 3"),
    "None": (None, TypeError, "got NoneType"),
    "an empty list": ([], ValueError, "at least one name"),
    "an empty name": ("", ValueError, "at least one name"),
}


@pytest.mark.parametrize(("remat", "error", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_names_no_block_is_refused(remat, error, message):
    model = Cached(lambda: None)
    loss = hog.functional_loss(model, F.mse_loss)
    params = hog.trainable_params(model)
    doors = [
        partial(hog.hvp, loss, params, params, (torch.ones(2, 3, 4),) * 2),
        partial(hog.GGNOperator, loss, params, (torch.ones(2, 3, 4),) * 2),
        partial(hog.penalties.r1, model, torch.ones(2, 3, 4)),
        partial(hog.MAML, model, F.mse_loss),
    ]
    for door in doors:
        with pytest.raises(error, match=message):
            door(remat=remat)


def test_where_nothing_is_repeated():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"found none in Sequential.*`hoglib.ops.remat"):
        hog.MAML(model, F.mse_loss, remat=True)
    with pytest.raises(ValueError, match=r"none has\. It has '0', '1', '2'"):
        hog.MAML(model, F.mse_loss, remat="layers.*")
    with pytest.raises(ValueError, match=r"a function of a module.*which reaches none"):
        hog.hvp(lambda p: p.sin().sum(), torch.ones(2), torch.ones(2), remat=True)


# Operators

OPERATORS = {"Hessian": hog.HessianOperator, "GGN": hog.GGNOperator}


@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_keep_the_inputs_of_blocks(kind):
    loss, params, v, batch = problem("transformer", train=False)
    held, products = [], []
    for remat in (False, True):
        operator = OPERATORS[kind](loss, params, batch, remat=remat)
        products.append([flat(operator @ v), flat(operator @ v)])
        rows = torch.stack([flat(v), flat(v).sin()], -1)
        products[-1] += [operator @ rows, operator @ rows]  # the second of a kept graph
        held.append(operator._sum.kept.point.held_bytes())
    for plain, found in zip(*products, strict=True):
        assert relative(found, plain) < 1e-12
    assert held[1] < 0.5 * held[0]


# Penalties


def critic_of(**_):
    torch.manual_seed(0)
    critic = ResNet().double().train()
    for norm in [m for m in critic.modules() if isinstance(m, nn.BatchNorm2d)]:
        norm.eval()
    return (lambda x: critic(x)[:, 0]), critic


PENALTIES = {
    "in pieces": lambda critic, x, **o: hog.penalties.r1(critic, x, micro_batch=2, **o),
    "jacobian": lambda critic, x, **o: hog.penalties.jacobian(critic, x, num_projections=None, **o),
    "module": lambda critic, x, **o: hog.GradientPenalty("r1", **o)(critic, x),
}


@pytest.mark.parametrize(
    ("name", "compile"),
    [*((name, False) for name in PENALTIES), ("in pieces", "eager"), ("module", "eager")],
)
def test_penalties_are_the_same(name, compile, runs, levels):
    x, _ = images()
    results = []
    for options in ({}, {"remat": True, "compile": compile}):
        critic, model = critic_of(**options)
        torch.manual_seed(1)
        value = PENALTIES[name](critic, x, **options)
        value.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((value.detach(), flat(grads), model.state_dict()))
        assert bool(runs) is bool(options and not compile)
    (value, grad, state), (same_value, same_grad, same_state) = results
    torch.testing.assert_close(same_value, value)
    assert relative(same_grad, grad) < 1e-11
    torch.testing.assert_close(same_state, state, rtol=0, atol=0)
    # forward, vjp, and the vjp of that, of blocks with and without a projection
    assert len(levels()) == (9 if compile else 0)


# Meta-learning


def tasks():
    x = torch.randn(2, 3, 3, 4, dtype=DOUBLE)
    return (x, x[:, :, 0].sin()), (x + 1, x[:, :, 1].cos())


@pytest.mark.parametrize("over_tasks", ["loop", "vmap"])
@pytest.mark.parametrize("memory", ["store", "remat", "checkpoint", "mixed"])
def test_every_pair_of_memory_and_remat(memory, over_tasks, runs):
    grads = []
    for remat in ({}, {"remat": True}, {"remat": True, "compile": "eager"}):
        torch.manual_seed(0)
        model = stack_of_layers().double().eval()
        if "compile" in remat:
            over_tasks = "loop"
        maml = hog.MAML(
            model, F.mse_loss, inner_lr=0.1, inner_steps=2, memory=memory, over_tasks=over_tasks,
            **remat,
        )  # fmt: skip
        runs.clear()
        maml.loss(tasks()).backward()
        grads.append((flat({n: p.grad for n, p in model.named_parameters()}), len(runs)))
    (plain, fewer), (recomputed, more), (compiled, _) = grads
    assert relative(recomputed, plain) < 1e-10
    assert relative(compiled, plain) < 1e-10
    assert more > fewer


@pytest.mark.parametrize("learner", [hog.meta.Reptile, hog.meta.IMAML])
def test_other_learners(learner, runs):
    grads = []
    for remat in (False, "body.layers"):
        torch.manual_seed(0)
        model = stack_of_layers().double().eval()
        meta = learner(model, F.mse_loss, inner_lr=0.1, inner_steps=2, remat=remat)
        meta.loss(tasks()).backward()
        grads.append(flat({n: p.grad for n, p in model.named_parameters()}))
    assert runs
    assert relative(grads[1], grads[0]) < 1e-10


# Compiled blocks


def deep(layers):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, layers).double()
    x = torch.randn(2, 3, 4, dtype=DOUBLE)
    loss = hog.functional_loss(model, F.mse_loss)
    params = hog.trainable_params(model)
    return loss, params, random_like(params), (x, x.sin())


def test_equal_blocks_are_compiled_once(levels):
    """In each mode, which draw random numbers in orders of their own, one after the other."""
    counts = []
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        for layers in (2, 3):
            loss, params, v, batch = deep(layers)
            found = []
            for compile in (False, "eager"):
                torch.manual_seed(1)  # of dropout
                found.append(
                    hog.hvp(loss, params, v, batch, mode=mode, remat=True, compile=compile)
                )
            assert found[0][0] == pytest.approx(found[1][0].item(), rel=1e-12)
            assert relative(flat(found[1][1]), flat(found[0][1])) < 1e-10
            counts.append(len(levels()))
    assert 0 < counts[0] == counts[1] < counts[2] == counts[3]


def test_what_is_not_compiled_together():
    loss, params, v, batch = deep(2)
    with pytest.raises(ValueError, match="passes are compiled, got dual tensors"):
        hog.ggn_vp(loss, params, v, batch, mode="forward", remat=True, compile="eager")
    with pytest.raises(ValueError, match="got 'vmap'"):
        hog.MAML(loss.model, F.mse_loss, remat=True, compile=True, over_tasks="vmap")
    loss.model.layers[0].scale = torch.ones(1)
    with pytest.raises(hog.errors.UnsupportedError, match="in an attribute"):
        hog.hvp(loss, params, v, batch, remat=True, compile="eager")
