"""Attention beside torch's own, and where torch has none: derivatives, hidden rows, half precision."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hoglib as hog

attention = hog.ops.scaled_dot_product_attention
F64 = torch.float64


def draw(*shape, dtype=F64, seed=0):
    return torch.randn(
        shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + len(shape))
    )


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


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_torchs(name):
    options = OPTIONS[name]
    inputs = [x.requires_grad_() for x in qkv(keys=2 if name == "grouped heads" else 4)]
    with sdpa_kernel(SDPBackend.MATH):
        right = F.scaled_dot_product_attention(*inputs, **options)
    ours = attention(*inputs, **options)
    torch.testing.assert_close(ours, right)
    w = draw(*right.shape, seed=9)
    torch.testing.assert_close(
        torch.autograd.grad((ours * w).sum(), inputs),
        torch.autograd.grad((right * w).sum(), inputs),
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_the_derivatives_in_every_mode(name):
    options = {
        k: v[:3, :4] if k == "attn_mask" and v.ndim == 2 else v for k, v in OPTIONS[name].items()
    }
    if options.get("attn_mask", SEEN).ndim > 2:
        options["attn_mask"] = options["attn_mask"][:, :, :3, :4]
    heads = 4 if name in ("grouped heads", "a mask for each head") else 1
    keys = 2 if name == "grouped heads" else heads
    inputs = (draw(2, heads, 3, 2), draw(2, keys, 4, 2, seed=1), draw(2, keys, 4, 2, seed=2))
    report = hog.verify(
        lambda q, k, v: attention(q, k, v, **options), inputs, modes=["rr", "fr", "rf", "ff"],
        orders=(1, 2, 3) if name == "a hidden row" else (1, 2),
    )  # fmt: skip
    assert report.ok, report


def test_a_hidden_row_is_zero_and_so_are_its_derivatives():
    inputs = [x.requires_grad_() for x in qkv()]
    for mask in (HIDDEN, torch.zeros(5, 6, dtype=F64).masked_fill(~HIDDEN, -math.inf)):
        y = attention(*inputs, attn_mask=mask)
        assert not y[..., 2, :].any()
        grads = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        assert not grads[0][..., 2, :].any()
        twice = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
        assert all(t.isfinite().all() for t in (*grads, *twice))


def test_large_logits():
    q, k, v = (1e4 * qkv()[0], 1e4 * qkv()[1], qkv()[2])
    q.requires_grad_()
    y = attention(q, k, v)
    (g,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), q)
    assert all(t.isfinite().all() for t in (y, g, h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    narrow = qkv(dtype)
    rounded = [x.double() for x in narrow]
    y = attention(*narrow)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), attention(*rounded), rtol=torch.finfo(dtype).eps, atol=4e-7
    )


def test_autocast_gives_torchs_dtype():
    inputs = qkv(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*inputs).dtype == F.scaled_dot_product_attention(*inputs).dtype


def test_autocast_takes_several_dtypes():
    q, k, v = qkv(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = attention(q.bfloat16(), k, v)
        right = F.scaled_dot_product_attention(q.bfloat16(), k, v)
    assert ours.dtype == right.dtype
    torch.testing.assert_close(ours, right, rtol=2e-2, atol=2e-2)


def test_heads_can_be_viewed_as_one():
    q, k, v = (draw(2, 5, 4, 8, seed=i).transpose(1, 2) for i in range(3))
    y = attention(q, k, v)
    assert y.stride() == F.scaled_dot_product_attention(q, k, v).stride()
    assert y.transpose(1, 2).view(2, 5, 32).shape == (2, 5, 32)
    q, k, v = (x.contiguous() for x in (q, k, v))
    assert attention(q, k, v).view(8, 5, 8).shape == (8, 5, 8)


def test_dropout_draws_as_torchs_generator_says():
    inputs = qkv()

    def drawn(seed):
        torch.manual_seed(seed)
        return attention(*inputs, dropout_p=0.5)

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    torch.manual_seed(0)
    mean = torch.stack([attention(*inputs, dropout_p=0.5) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, attention(*inputs), rtol=0, atol=0.15)


def test_a_learned_bias_gets_its_gradient():
    q, k, v = qkv()
    bias = draw(1, 4, 1, 6).requires_grad_()  # broadcast over batch and rows
    (g,) = torch.autograd.grad(attention(q, k, v, attn_mask=bias).square().sum(), bias)
    assert g.shape == bias.shape
    assert hog.verify(lambda b: attention(q, k, v, attn_mask=b), bias.detach()[..., :6]).ok


def test_no_keys_and_no_queries():
    assert not attention(draw(2, 5, 8), draw(2, 0, 8), draw(2, 0, 3)).any()
    assert attention(draw(2, 0, 8), draw(2, 6, 8), draw(2, 6, 3)).shape == (2, 0, 3)


# fmt: off
ERRORS = {
    "a mask and causal": (lambda: attention(*qkv(), attn_mask=SEEN, is_causal=True), ValueError, "is_causal"),
    "two dtypes": (lambda: attention(qkv()[0].float(), *qkv()[1:]), TypeError, "one dtype"),
    "complex": (lambda: attention(*(x.cfloat() for x in qkv())), TypeError, "real"),
    "heads that do not divide": (lambda: attention(*qkv(keys=3), enable_gqa=True), ValueError, "multiple"),
}
# fmt: on


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        call()
