"""torch's flex_attention, which has no backward on a CPU, beside its formula."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import hoglib as hog
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as draw

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning",  # what it says of memory is true
    "ignore:return_lse is deprecated:FutureWarning",
)
B, H, L, S, E = 2, 4, 6, 5, 3
POINT = {
    "q": draw(B, H, L, E), "k": draw(B, 2, S, E, seed=1), "v": draw(B, 2, S, 4, seed=2),
    "bias": draw(H, L + S, seed=3), "slope": draw(H, seed=4), "rows": draw(B, L, seed=5),
}  # fmt: skip
ALONG = {name: draw(*x.shape, seed=6 + i) for i, (name, x) in enumerate(POINT.items())}
DOCUMENTS = torch.tensor([0, 0, 1, 1, 2, 2])


def causal(b, h, i, j):
    return i >= j


def after_the_first(b, h, i, j):
    return i > j  # the first row attends to nothing


def same_document(b, h, i, j):
    return (DOCUMENTS[i] == DOCUMENTS[j]) & (h + b < 5)


def none(score, *_):
    return score


SCORES = {  # a score_mod of the parameters, the same over all places, and a mask
    "plain": (lambda p: None, lambda p, s, *_: s, None),
    "mask alone": (lambda p: None, lambda p, s, *_: s, causal),
    "documents, of score": (lambda p: none, lambda p, s, *_: s, same_document),
    "learned bias": (lambda p: lambda s, b, h, i, j: s + p["bias"][h, i - j + S], lambda p, s, b, h, i, j: s + p["bias"][h, i - j + S], causal),
    "capped": (lambda p: lambda s, b, h, i, j: 2 * torch.tanh(s * p["slope"][h].exp() / 2), lambda p, s, b, h, i, j: 2 * torch.tanh(s * p["slope"].exp()[h] / 2), after_the_first),
    "ALiBi": (lambda p: lambda s, b, h, i, j: s - p["slope"][h] * (i - j).abs(), lambda p, s, b, h, i, j: s - p["slope"][h] * (i - j).abs(), None),
    "masked by score": (lambda p: lambda s, b, h, i, j: torch.where(i > j, s * s, -torch.inf), lambda p, s, b, h, i, j: torch.where(i > j, s * s, -torch.inf), None),
    "rows, in half": (lambda p: lambda s, b, h, i, j: s + p["rows"][b][i].sin() * p["slope"][0], lambda p, s, b, h, i, j: s + p["rows"].sin()[b, i] * p["slope"][0], same_document),
}  # fmt: skip


def attention(name, p, **options):
    score_mod, _, mask = SCORES[name]
    block = None
    if mask is not None:
        block = create_block_mask(mask, B, H, L, S, device="cpu", BLOCK_SIZE=4)
    return flex_attention(p["q"], p["k"], p["v"], score_mod(p), block, enable_gqa=True, **options)


def by_formula(name, p, scale=3**-0.5, **_):
    _, score, mask = SCORES[name]
    sizes = p["q"].shape[0], H, L, S
    places = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    k, v = (x.repeat_interleave(2, 1) for x in (p["k"], p["v"]))
    scores = score(p, scale * p["q"] @ k.mT, *places)
    seen = (torch.ones(sizes) if mask is None else mask(*places)).bool() & (scores > -math.inf)
    weights = scores.exp().where(seen, 0.0)
    total = weights.sum(-1)
    P = weights / total.where(total > 0, 1.0)[..., None]
    lse = total.where(total > 0, 1.0).log()
    return P @ v, lse, scores.where(seen, -math.inf).amax(-1)


def total(found):
    return (found.sin() * torch.arange(1, found.numel() + 1).reshape(found.shape)).sum() / 10


def derivatives(f):
    def turned(run):
        x = {name: x.clone().requires_grad_() for name, x in POINT.items()}
        found = run(x)
        parts = found.values() if isinstance(found, dict) else [found]
        return torch.autograd.grad(sum(y.sin().sum() for y in parts), list(x.values()))

    yield f(POINT)
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        yield hog.hvp(f, POINT, ALONG, mode=mode)
    yield turned(lambda x: hog.hvp(f, x, ALONG, create_graph=True)[1])
    yield hog.jvp(f, (POINT,), (ALONG,))
    yield turned(lambda x: hog.jvp(f, (x,), (ALONG,))[1])
    ones = torch.ones(2, 1, dtype=F64)
    v = torch.cat([x.flatten() for x in ALONG.values()])
    yield hog.HessianOperator(lambda p, _: f(p), POINT, ones) @ v
    scaled = lambda p, b: f({name: x * b[0] for name, x in p.items()})  # noqa: E731
    yield hog.per_example_gradients(scaled, POINT, ones)
    yield hog.jet(lambda q: f({**POINT, "q": q}), POINT["q"], [ALONG["q"], None])


@rows("name", SCORES)
def test_every_derivative_is_that_of_the_formula(name):
    of_all = lambda p: sum(x.pow(3).sum() for x in p.values()) / 10  # noqa: E731
    found = derivatives(lambda p: total(attention(name, p)) + of_all(p))
    expected = derivatives(lambda p: total(by_formula(name, p)[0]) + of_all(p))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


AUX = {
    "scale": ({"scale": 0.3}, lambda y: y, lambda y, lse, m: y),
    "logarithm of the sums": ({"return_lse": True}, lambda y: y[1].where(y[1] > -math.inf, 0.0), lambda y, lse, m: lse),
    "both outputs": ({"return_aux": AuxRequest(lse=True)}, lambda y: y[0] * (y[1].lse > 0)[..., None] + y[1].lse.clamp(min=-9)[..., None], lambda y, lse, m: y * (lse > 0)[..., None] + lse[..., None]),
}  # fmt: skip


@rows("name", AUX)
@rows("score", ["plain", "learned bias", "ALiBi", "mask alone"])
def test_options_and_further_outputs(name, score):
    options, ours, theirs = AUX[name]
    found = hog.hvp(lambda p: total(ours(attention(score, p, **options))), POINT, ALONG)
    expected = hog.hvp(lambda p: total(theirs(*by_formula(score, p, **options))), POINT, ALONG)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.bias = nn.Linear(6, 18), nn.Parameter(torch.randn(2, 9) / 3)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        def score_mod(s, b, h, i, j):
            return s + self.bias[h, i - j + 4]

        q, k, v = self.heads(self.norm(x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, score_mod, create_block_mask(causal, None, None, 5, 5, "cpu"))
        return self.last(x + y.transpose(1, 2).flatten(-2)).mean(1)


class Plain(Block):
    def forward(self, x):
        q, k, v = self.heads(self.norm(x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        i = torch.arange(5)
        bias = self.bias[:, i[:, None] - i + 4].masked_fill(i[:, None] < i, -math.inf)
        y = ((q @ k.mT / math.sqrt(3) + bias).softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return self.last(x + y).mean(1)


def test_a_model_at_every_door():
    torch.manual_seed(0)
    own, plain = Block().to(F64), Plain().to(F64)
    plain.load_state_dict(own.state_dict())
    x, y = draw(4, 5, 6), torch.tensor([0, 2, 1, 1])
    batch = x, y

    def doors(model):
        loss, params = (
            hog.functional_loss(model, nn.functional.cross_entropy),
            hog.trainable_params(model),
        )
        v = {name: draw(*p.shape, seed=i) for i, (name, p) in enumerate(params.items())}
        yield hog.hvp(loss, params, v, batch)
        yield hog.ggn_vp(loss, params, v, batch)
        yield hog.per_example_gradients(loss, params, batch)
        yield hog.GGNOperator(loss, params, batch, micro_batch=2).to_dense()
        yield hog.laplacian(lambda x: model(x)[:, 0], x)
        penalty = hog.penalties.r1(lambda x: model(x).sum(1), x)
        yield torch.autograd.grad(penalty, model.heads.weight)
        maml = hog.MAML(model, nn.functional.cross_entropy, inner_lr=0.1)
        yield torch.autograd.grad(maml.loss(((x[None], y[None]), (x[None], y[None]))), model.bias)
        with hog.second_order():
            found = torch.autograd.grad(hog.ops.remat(model)(x).sin().sum(), model.bias)
        yield found  # outside: two contexts would end in the order in which they began
        yield hog.audit(loss, params, batch).ok

    for found, expected in zip(doors(own), doors(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_half_precision_is_rounded_once():
    p = {name: x.to(torch.bfloat16) for name, x in POINT.items()}
    found = hog.hvp(lambda p: total(attention("capped", p).float()), p, p)[1]["q"]
    exact = {name: x.to(F64) for name, x in p.items()}
    expected = hog.hvp(lambda p: total(by_formula("capped", p)[0]), exact, exact)[1]["q"]
    torch.testing.assert_close(found.to(F64), expected, rtol=0.1, atol=0.05)


def test_outside_of_hoglib_it_is_torchs_own():
    x = POINT["q"].clone().requires_grad_()
    with hog.second_order():
        flex_attention(x, x, x).sum().backward()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(x, x, x)
