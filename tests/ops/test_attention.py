"""Attention beside torch's own, and where torch has none: by its formula and by blocks of rows."""

import itertools
import math
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hoglib as hog
from hoglib.ops import _attention, _attention_blocks
from tests.language_models import language_model, padded_batch
from tests.memory import peak_bytes
from tests.ops.checks import same
from tests.refused import refused
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as draw

attention = hog.ops.scaled_dot_product_attention


@pytest.fixture
def blocks(monkeypatch):
    """All lengths run by blocks, of which small tensors have several."""
    small = _attention_blocks.Sizes(formula=0, block=24)
    monkeypatch.setattr(_attention_blocks, "SIZES", {"cpu": small})
    monkeypatch.setattr(_attention_blocks, "FEWEST_ROWS", 2)
    monkeypatch.setattr(_attention_blocks, "FUSED_MASK_ELEMENTS", 40)


@pytest.fixture(params=["formula", "blocks"])
def route(request):
    if request.param == "blocks":
        request.getfixturevalue("blocks")
    return request.param


either_route = pytest.mark.usefixtures("route")


def qkv(dtype=F64, heads=4, keys=4):
    return (
        draw(2, heads, 5, 8, dtype=dtype), draw(2, keys, 6, 8, dtype=dtype, seed=1),
        draw(2, keys, 6, 3, dtype=dtype, seed=2),
    )  # fmt: skip


SEEN = torch.rand(5, 6, generator=torch.Generator().manual_seed(0)) > 0.4
HIDDEN = SEEN.clone()
HIDDEN[2] = False  # a row that sees nothing
# fmt: off
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "a boolean mask": {"attn_mask": SEEN},
    "a mask for each head": {"attn_mask": torch.rand(2, 4, 5, 6, generator=torch.Generator().manual_seed(1)) > 0.3},
    "a float mask": {"attn_mask": draw(5, 6)},
    "a float mask with -inf": {"attn_mask": torch.zeros(5, 6, dtype=F64).masked_fill(~SEEN, -math.inf)},
    "a hidden row": {"attn_mask": HIDDEN},
    "a row of -inf": {"attn_mask": torch.zeros(5, 6, dtype=F64).masked_fill(~HIDDEN, -math.inf)},
    "another scale": {"scale": 0.3},
    "grouped heads": {"enable_gqa": True},
}
# fmt: on


@either_route
@rows("name", OPTIONS)
def test_values_and_gradients_are_torchs(name):
    options = OPTIONS[name]
    ours, theirs = (partial(f, **options) for f in (attention, F.scaled_dot_product_attention))
    with sdpa_kernel(SDPBackend.MATH):
        same(ours, theirs, *qkv(keys=2 if name == "grouped heads" else 4))


@either_route
def test_a_hidden_row_is_zero_and_so_are_its_derivatives():
    inputs = [x.requires_grad_() for x in qkv()]
    for mask in (HIDDEN, torch.zeros(5, 6, dtype=F64).masked_fill(~HIDDEN, -math.inf)):
        y = attention(*inputs, attn_mask=mask)
        assert not y[..., 2, :].any()
        grads = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        assert not grads[0][..., 2, :].any()
        twice = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
        assert all(t.isfinite().all() for t in (*grads, *twice))


@either_route
def test_large_logits():
    q, k, v = (1e4 * qkv()[0], 1e4 * qkv()[1], qkv()[2])
    q.requires_grad_()
    y = attention(q, k, v)
    (g,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), q)
    assert all(t.isfinite().all() for t in (y, g, h))


@either_route
@rows("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    narrow = qkv(dtype)
    rounded = [x.double() for x in narrow]
    y = attention(*narrow)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), attention(*rounded), rtol=torch.finfo(dtype).eps, atol=4e-7
    )


@either_route
@rows("mode", ["reverse-over-reverse", "forward-over-reverse"])
@rows("dtype", [torch.float16, torch.bfloat16])
def test_products_in_half_precision_are_summed_in_float32(dtype, mode):
    """Sums over 500 keys: in half precision they would be off by many units in the last place."""
    x, v = ([draw(2, n, 4, seed=s + n).to(dtype) for n in (3, 500, 500)] for s in (0, 1))
    loss = lambda x: attention(x[0], x[1], x[2] + 1).double().square().sum()  # noqa: E731
    ours = hog.hvp(loss, x, v, mode=mode)[1]
    right = hog.hvp(loss, [y.double() for y in x], [y.double() for y in v])[1]
    for a, b in zip(ours, right, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() < torch.finfo(dtype).eps * b.norm()


@either_route
def test_autocast_takes_several_dtypes():
    q, k, v = qkv(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(q.bfloat16(), k, v)
        right = F.scaled_dot_product_attention(q.bfloat16(), k, v)
    assert ours.dtype == right.dtype
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


# fmt: off
MASK_DTYPES = [  # of query, mask and autocast
    (torch.float64, torch.float32, None), (torch.bfloat16, torch.float32, None), (torch.float16, torch.float32, None),
    (torch.float32, torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float16), (torch.float64, torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, None), (torch.float16, torch.float16, None),
    (torch.float32, torch.float64, None), (torch.float32, torch.float16, None), (torch.bfloat16, torch.float64, None),
    (torch.bfloat16, torch.float64, torch.bfloat16), (torch.float32, torch.int64, None),
]
# fmt: on


@either_route
@rows("dtypes", MASK_DTYPES, ids=lambda x: " ".join(map(str, x)))
def test_a_mask_of_another_dtype_is_taken_where_torch_takes_it(dtypes):
    dtype, of_mask, lower = dtypes
    q, k, _ = qkv(dtype)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, k.flip(-1)))  # as wide: the fused kernel
    mask = draw(5, 6).to(of_mask)
    mask.requires_grad_(of_mask.is_floating_point)

    def run(function):
        with torch.autocast("cpu", lower, enabled=lower is not None):
            y = function(q, k, v, attn_mask=mask)
        return y, torch.autograd.grad(y.float().square().sum(), [q, k, v, mask])

    try:
        right = run(F.scaled_dot_product_attention)
    except RuntimeError:
        with pytest.raises(TypeError, match="attn_mask: expected a boolean mask"):
            run(attention)
        return
    ours = run(attention)
    assert ours[0].dtype == right[0].dtype
    assert [g.dtype for g in ours[1]] == [g.dtype for g in right[1]]
    eps = 1e-10 if dtype == F64 else 3e-2
    torch.testing.assert_close(ours, right, rtol=eps, atol=eps)


@either_route
def test_heads_can_be_viewed_as_one():
    q, k, v = (draw(2, 5, 4, 8, seed=i).transpose(1, 2) for i in range(3))
    y = attention(q, k, v)
    assert y.stride() == F.scaled_dot_product_attention(q, k, v).stride()
    assert y.transpose(1, 2).view(2, 5, 32).shape == (2, 5, 32)
    q, k, v = (x.contiguous() for x in (q, k, v))
    assert attention(q, k, v).view(8, 5, 8).shape == (8, 5, 8)


@either_route
def test_no_keys_and_no_queries():
    assert not attention(draw(2, 5, 8), draw(2, 0, 8), draw(2, 0, 3)).any()
    assert attention(draw(2, 0, 8), draw(2, 6, 8), draw(2, 6, 3)).shape == (2, 0, 3)
    assert attention(draw(0, 5, 8), draw(0, 6, 8), draw(0, 6, 3)).shape == (0, 5, 3)
    v = draw(2, 6, 3)
    y = attention(draw(2, 5, 0), draw(2, 6, 0), v)  # all scores are zero
    torch.testing.assert_close(y, v.mean(1, keepdim=True).expand(2, 5, 3))


@either_route
def test_dropout_of_everything():
    assert not attention(*qkv(), dropout_p=1.0).any()


# fmt: off
BLOCKS = {  # shapes of query, key, value and, where it is differentiated, of the mask; options
    "two widths": ([(2, 4, 7, 3), (2, 4, 6, 3), (2, 4, 6, 2)], {}),
    "causal, grouped": ([(2, 4, 7, 3), (2, 2, 6, 3), (2, 2, 6, 3)], {"is_causal": True, "enable_gqa": True}),
    "padding, grouped": ([(2, 4, 7, 3), (2, 2, 6, 3), (2, 2, 6, 3)], {"enable_gqa": True, "attn_mask": (2, 1, 1, 6)}),
    "a hidden row": ([(2, 4, 7, 3), (2, 4, 6, 3), (2, 4, 6, 3)], {"attn_mask": (2, 1, 7, 6)}),
    "a bias by head": ([(2, 4, 7, 3), (2, 4, 6, 3), (2, 4, 6, 3), (4, 7, 6)], {}),
    "a bias, grouped": ([(2, 4, 7, 3), (2, 2, 6, 3), (2, 2, 6, 3), (2, 4, 7, 6)], {"enable_gqa": True}),
    "a bias of columns": ([(2, 4, 7, 3), (2, 4, 6, 3), (2, 4, 6, 3), (2, 1, 1, 6)], {}),
    "broadcast": ([(3, 1, 7, 3), (2, 6, 3), (6, 3)], {}),
    "dropout, causal, grouped": ([(2, 4, 7, 3), (2, 2, 6, 3), (2, 2, 6, 2)], {"dropout_p": 0.3, "is_causal": True, "enable_gqa": True}),
    "dropout and a bias": ([(2, 4, 7, 3), (2, 4, 6, 3), (2, 4, 6, 3), (4, 7, 6)], {"dropout_p": 0.3}),
}
# fmt: on


def by_formula(q, k, v, bias=None, *, kept=None, dropout_p=0.0, is_causal=False, enable_gqa=False, attn_mask=None):  # fmt: skip
    """The formula in the plainest of operations; kept: what dropout keeps."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = torch.einsum("...le,...se->...ls", q, k) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    weights = (scores - scores.detach().amax(-1, True)).exp()
    if is_causal:
        weights = weights * torch.ones(scores.shape[-2:]).tril()
    if attn_mask is not None:
        weights = weights * attn_mask
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1)
    return (weights if kept is None else weights * kept / (1 - dropout_p)) @ v


def nested(loss, inputs, along, third):
    """The derivatives of a loss to second or third order, by all ways to nest reverse and forward mode."""

    def gradient(f):
        return torch.func.grad(lambda *x: f(*x), argnums=tuple(range(len(inputs))))

    def slope(f, v):
        return lambda *x: torch.func.jvp(f, x, v)[1]

    def dot(f, v):
        return lambda *x: sum((a * b).sum() for a, b in zip(f(*x), v, strict=True))

    v, w = along
    yield "r", gradient(loss)(*inputs)
    yield "f", [slope(loss, v)(*inputs)]
    yield "rr", gradient(dot(gradient(loss), v))(*inputs)
    yield "fr", slope(gradient(loss), v)(*inputs)
    yield "rf", gradient(slope(loss, v))(*inputs)
    yield "ff", [slope(slope(loss, v), w)(*inputs)]
    if third:
        yield "rrr", gradient(dot(gradient(dot(gradient(loss), v)), w))(*inputs)
        yield "rrf", gradient(dot(gradient(slope(loss, v)), w))(*inputs)
        yield "frr", slope(gradient(dot(gradient(loss), v)), w)(*inputs)
    both = [torch.stack(pair) for pair in zip(v, w, strict=True)]
    products = torch.func.vmap(lambda *u: slope(gradient(loss), u)(*inputs), randomness="same")
    yield "vectors at once", products(*both)
    for i in range(len(inputs)):

        def of_one(x, i=i):
            return gradient(loss)(*inputs[:i], x, *inputs[i + 1 :])

        samples = torch.stack([inputs[i], v[i]])
        yield f"samples of input {i}", torch.func.vmap(of_one, randomness="same")(samples)


OF_THIRD_ORDER = ("two widths", "a hidden row", "a bias, grouped", "dropout, causal, grouped")


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_the_formula_at_every_order(name):
    shapes, options = BLOCKS[name]
    inputs = tuple(draw(*shape, seed=i) for i, shape in enumerate(shapes))
    along = [tuple(draw(*s, seed=10 * n + i) for i, s in enumerate(shapes)) for n in (1, 2)]
    if "attn_mask" in options:
        seen = draw(*options["attn_mask"], seed=5) > -0.5
        seen[..., seen.shape[-2] // 2, :] = seen[..., seen.shape[-2] // 2, :] & (
            seen.shape[-2] == 1
        )
        options = {**options, "attn_mask": seen}
    kept = None
    if "dropout_p" in options:
        torch.manual_seed(0)
        others = {key: value for key, value in options.items() if key != "is_causal"}
        kept = hog.ops.attention_dropout_mask(*inputs, **others)

    def ours(*x):
        torch.manual_seed(0)
        return attention(*x[:3], **({"attn_mask": x[3]} if len(x) > 3 else {}), **options)

    def right(*x):
        return by_formula(*x, **options, kept=kept)

    weights = draw(*right(*inputs).shape, seed=7)
    third = name in OF_THIRD_ORDER
    found = nested(lambda *x: (ours(*x).sin() * weights).sum(), inputs, along, third)
    expected = nested(lambda *x: (right(*x).sin() * weights).sum(), inputs, along, third)
    for (way, a), (_, b) in zip(found, expected, strict=True):
        torch.testing.assert_close(
            list(a), list(b), rtol=1e-9, atol=1e-9, msg=lambda m, way=way: f"{way}: {m}"
        )


@pytest.mark.usefixtures("blocks")
def test_blocks_of_batched_cotangents():
    """torch.autograd.grad(is_grads_batched=True), whose vmap is not that of torch.func."""
    q, k, v = (x.requires_grad_() for x in qkv())
    y = attention(q, k, v)
    g = torch.eye(y.numel(), dtype=F64)[:3].reshape(3, *y.shape)
    rows = torch.autograd.grad(y, (q, k, v), g, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        expected = torch.autograd.grad(y, (q, k, v), g[i], retain_graph=True)
        torch.testing.assert_close([row[i] for row in rows], list(expected))


def products(x, mode):
    return hog.hvp(lambda x: attention(*x).square().sum(), x, x, mode=mode)


def slopes_gradient(x, mode):
    def slope(*x):
        return torch.func.jvp(attention, x, x)[1].square().sum()

    return torch.func.grad(slope, argnums=(0, 1, 2))(*x)


@rows(
    ("run", "mode"),
    [
        (products, "reverse-over-reverse"),
        (products, "forward-over-reverse"),
        (slopes_gradient, "reverse-over-forward"),
    ],
)
def test_memory_grows_with_the_length(run, mode):
    peaks = []
    for length in (400, 800, 1600):
        x = tuple(torch.randn(1, 2, length, 4) for _ in range(3))
        peaks.append(peak_bytes(lambda x=x: run(x, mode), torch.device("cpu")))
    assert peaks[1] < 2.1 * peaks[0]
    assert peaks[2] < 2.1 * peaks[1]
    assert peaks[2] < 2 * 1600 * 1600  # a quarter of the scores of both heads


@rows("p", [0.0, 0.2])
@pytest.mark.usefixtures("blocks")
def test_blocks_in_a_captured_graph(p):
    def loss(x):
        return attention(*x, is_causal=True, dropout_p=p).square().sum()

    x = qkv()
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        torch.manual_seed(0)
        right = hog.hvp(loss, x, x, mode=mode)
        hog.hvp(loss, x, x, mode=mode, compile="eager")  # captures, and draws once more
        torch.manual_seed(0)
        torch.testing.assert_close(hog.hvp(loss, x, x, mode=mode, compile="eager"), right)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"]
)
def test_unmodified_models(name, monkeypatch):
    loss = hog.functional_loss(language_model(name, attn_implementation="sdpa"))
    batch = padded_batch()
    params = hog.trainable_params(loss.model)
    torch.manual_seed(0)
    v = {key: torch.randn_like(x) for key, x in params.items()}
    called = []
    run = _attention._Form.attention
    monkeypatch.setattr(_attention._Form, "attention", lambda *x: called.append(x) or run(*x))
    found = [
        hog.hvp(loss, params, v, batch, mode=mode)
        for mode in ("reverse-over-reverse", "forward-over-reverse")
    ]
    assert called
    monkeypatch.setattr(_attention_blocks, "SIZES", {"cpu": _attention_blocks.Sizes(2**40, 24)})
    expected = hog.hvp(loss, params, v, batch)
    for one in found:
        for key, right in expected[1].items():  # these models have parts in float32
            assert (one[1][key] - right).norm() < 1e-5 * right.norm() + 1e-9


def test_philox_is_that_of_its_authors():
    """A known answer of Random123, and one by Python's integers."""
    zero = torch.zeros(1, 2, dtype=torch.long)
    words = _attention_blocks.random_words(zero, torch.zeros(1, dtype=torch.long), 4)
    assert words.flatten().tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@either_route
def test_what_dropout_keeps_is_what_the_attention_drops():
    """Values that tell which weights were dropped: the rows of an identity."""
    q, k = draw(2, 4, 5, 8), draw(2, 2, 6, 8)
    v = torch.eye(6, dtype=F64).expand(2, 2, 6, 6)
    torch.manual_seed(3)
    kept = hog.ops.attention_dropout_mask(q, k, v, dropout_p=0.4, enable_gqa=True)
    torch.manual_seed(3)
    y = attention(q, k, v, dropout_p=0.4, enable_gqa=True)
    assert kept.shape == (2, 4, 5, 6)
    assert torch.equal(y != 0, kept)
    assert len({tuple(row) for row in kept.flatten(0, 2).tolist()}) > 10  # heads and rows differ
    assert not torch.equal(attention(q, k, v, dropout_p=0.4, enable_gqa=True), y)  # nor the next
    torch.testing.assert_close(y, attention(q, k, v, enable_gqa=True) * kept / 0.6)
    assert hog.ops.attention_dropout_mask(q, k, v, enable_gqa=True).all()


# fmt: off
ERRORS = {
    "a mask and causal": (lambda: attention(*qkv(), attn_mask=SEEN, is_causal=True), ValueError, "is_causal"),
    "two dtypes": (lambda: attention(qkv()[0].float(), *qkv()[1:]), TypeError, "one dtype"),
    "no probability": (lambda: attention(*qkv(), dropout_p=1.5), ValueError, "from 0 to 1"),
    "complex": (lambda: attention(*(x.cfloat() for x in qkv())), TypeError, "real"),
    "heads that do not divide": (lambda: attention(*qkv(keys=3), enable_gqa=True), ValueError, "multiple"),
    "no tensor": (lambda: attention(qkv()[0], None, qkv()[2]), TypeError, "key: expected a torch.Tensor"),
    "another order": (lambda: attention(qkv()[1], qkv()[0], qkv()[2]), ValueError, r"expected \[..., L, E\]"),
    "fewer values than keys": (lambda: attention(*qkv()[:2], qkv()[2][:, :, :4]), ValueError, r"\[..., S, Ev\]"),
    "one dimension": (lambda: attention(*(x[0, 0, 0] for x in qkv())), ValueError, "at least 2 dimensions"),
    "grouped without heads": (lambda: attention(*(x[0, 0] for x in qkv()), enable_gqa=True), ValueError, "at least 3"),
    "heads that do not broadcast": (lambda: attention(*qkv(keys=3)), ValueError, "leading dimensions"),
    "a mask of another shape": (lambda: attention(*qkv(), attn_mask=SEEN[:4]), ValueError, r"broadcasts to \[..., 5, 6\]"),
    "a list as a mask": (lambda: attention(*qkv(), attn_mask=[[True]]), TypeError, "attn_mask: expected a torch.Tensor"),
    "a mask on another device": (lambda: attention(*qkv(), attn_mask=SEEN.to("meta")), ValueError, "attn_mask: expected a tensor on cpu"),
    "keys on another device": (lambda: attention(qkv()[0], qkv()[1].to("meta"), qkv()[2]), ValueError, "key: expected a tensor on cpu"),
    "no number": (lambda: attention(*qkv(), dropout_p="0.1"), TypeError, "dropout_p: expected a real"),
    "no flag": (lambda: attention(*qkv(), is_causal="no"), TypeError, "is_causal: expected True or False"),
    "no scale": (lambda: attention(*qkv(), scale="1"), TypeError, "scale: expected"),
    "sparse": (lambda: attention(qkv()[0].to_sparse(), *qkv()[1:]), TypeError, "query: expected a dense tensor"),
}
# fmt: on


test_errors = either_route(refused(ERRORS))


RESIDENT = """
import sys
import torch
from experiments.benchmarks.memory import peak_resident
from experiments.benchmarks.resident import CASES

torch.set_num_threads(1)
make, size = CASES[sys.argv[1]][0], int(sys.argv[2])
make(size // 2)()
print(*(peak_resident(make(int(n))) / 2**20 for n in sys.argv[2:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("attention", (4096, 8192), 70),
        ("remat, 32 blocks", (1024,), 120),
        ("hypergradient, remat", (100,), 62),
    ],
    ids=["attention", "remat", "hypergradient"],
)
def test_resident_memory_is_what_is_held(name: str, sizes: tuple[int], most: float) -> None:
    # results between freed temporaries made it 140, 150 and 72 MiB; tensors have 25, 60 and 45 MiB
    command = [sys.executable, "-c", RESIDENT, name, *map(str, sizes)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = [*map(float, found.stdout.split())]
    assert 10 < peaks[-1] < most
    assert all(2.5 * a > b for a, b in itertools.pairwise(peaks))
