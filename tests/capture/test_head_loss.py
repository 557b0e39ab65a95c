"""Captured graphs compute the cross-entropy of a linear layer in chunks of its logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import hoglib as hog
from hoglib.ops import _linear_cross_entropy
from tests.capture.models import draw
from tests.language_models import language_model, padded_batch

H, W, B = draw(2, 6, 3), draw(5, 3, seed=1), draw(5, seed=2)
LABELS = torch.tensor([[0, 1, -100, 3, 4, 0], [1, -100, 2, 3, 0, 1]])


def masked(h, W):
    z = F.linear(h, W)
    z[..., 0] = -1e3
    return F.cross_entropy(z.flatten(0, 1), LABELS.view(-1))


def with_a_hook(h, W):
    z = F.linear(h, W)
    z.register_hook(lambda g: 2 * g)
    return F.cross_entropy(z.flatten(0, 1), LABELS.view(-1))


CHUNKED = {
    "a view": lambda h, W: F.cross_entropy(F.linear(h, W).view(-1, 5), LABELS.view(-1)),
    "shifted, with a bias": lambda h, W: F.cross_entropy(
        F.linear(h, W, B)[..., :-1, :].contiguous().view(-1, 5), LABELS[..., 1:].reshape(-1).clamp(min=0), ignore_index=3
    ),
    "a sum": lambda h, W: F.cross_entropy(F.linear(h, W)[:, 1:].reshape(-1, 5), LABELS[:, 1:].reshape(-1), reduction="sum"),
    "one sample": lambda h, W: F.cross_entropy(F.linear(h, W)[1], LABELS[1], label_smoothing=0.1),
    "each row": lambda h, W: F.cross_entropy(F.linear(h, W).flatten(0, 1), LABELS.view(-1), reduction="none").sin().sum(),
    "in float32": lambda h, W: F.cross_entropy(F.linear(h, W).float().view(-1, 5), LABELS.view(-1)),
}  # fmt: skip
WHOLE = {
    "changed in place": masked,
    "with a hook": with_a_hook,
    "used elsewhere": lambda h, W: (z := F.linear(h, W)).square().sum() + F.cross_entropy(z[:, 1:].reshape(-1, 5), LABELS[:, 1:].reshape(-1)),
    "other classes": lambda h, W: F.cross_entropy(F.linear(h, W)[..., :4].flatten(0, 1), LABELS.view(-1) % 4),
    "weighted classes": lambda h, W: F.cross_entropy(F.linear(h, W).view(-1, 5), LABELS.view(-1), B.abs()),
    "reshaped": lambda h, W: F.cross_entropy(F.linear(h, W).view(-1, 6), torch.arange(10) % 6),
}  # fmt: skip


@pytest.fixture(autouse=True)
def chunks_of_two_rows(monkeypatch):
    monkeypatch.setattr(_linear_cross_entropy, "CHUNK_ELEMENTS", 10)


@pytest.mark.parametrize("name", [*CHUNKED, *WHOLE])
def test_products_are_those_of_all_logits(name):
    f = (CHUNKED | WHOLE)[name]

    def loss(p):
        return f(*p) ** 2

    given = (H, W), (H.cos(), W.sin())
    fast = hog.compile(lambda p, v: hog.hvp(loss, p, v), backend="eager")
    assert_close(fast(*given), hog.hvp(loss, *given), rtol=1e-5, atol=1e-5)  # some are in float32
    shapes = products(fast)
    assert ((12, 5) in shapes) == (name in WHOLE)  # of the logits
    assert ((2, 5) in shapes) == (name in CHUNKED)


def products(fast):
    """The shapes of the matrix products of a captured graph."""
    graph = fast.signatures[0].run.__self__.graph
    return {tuple(n.meta["val"].shape) for n in graph.nodes if "mm" in str(n.target)}


def test_the_loss_of_transformers_is_recognized():
    model, batch = language_model("GPT2LMHeadModel", n_layer=1), padded_batch()
    loss, params = hog.functional_loss(model), hog.trainable_params(model)
    fast = hog.compile(lambda p: loss(p, batch), backend="eager")
    assert_close(fast(params), loss(params, batch))
    assert "_log_softmax" not in fast.signatures[0].code
