"""Values of integer and boolean tensors that a captured function reads: guards of its graph."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.errors import UnsupportedError
from tests.language_models import ENCODER_DECODER, language_model, padded_batch
from tests.long_tail import FULL

W = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)
X = torch.linspace(0, 2, 12, dtype=torch.float64).reshape(4, 3)
MASKS = [
    torch.tensor(rows, dtype=torch.bool)
    for rows in ([1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0])
]

READERS = {
    "if": lambda p, x, mask: ((x @ p) ** (3 if mask.all() else 2)).sum(),
    "item": lambda p, x, mask: ((x @ p) ** 3).sum() * mask.sum().item(),
    "a shape": lambda p, x, mask: ((x @ p)[: int(mask.sum())] ** 3).sum(),
    "tolist": lambda p, x, mask: sum(((x @ p)[i] ** 3).sum() for i, m in enumerate(mask.tolist()) if m),
    "a boolean index": lambda p, x, mask: ((x @ p)[mask] ** 3).sum(),
    "nonzero": lambda p, x, mask: ((x @ p)[mask.nonzero().squeeze(1)] ** 3).sum(),
    "computed": lambda p, x, mask: ((x @ p) ** 3).sum() * (int(mask.long().argmin()) + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_another_value_is_another_graph(name):
    f = READERS[name]
    graph = hog.compile(f, backend="eager")
    for mask in MASKS:  # the third is the first again
        p = W.clone().requires_grad_()
        value, expected = graph(p, X, mask), f(p, X, mask)
        assert_close(value, expected)
        v = torch.ones_like(p)
        found = hog.hvp(f, p, v, X, mask, compile="eager")
        assert_close(found, hog.hvp(f, p, v, X, mask))
    assert len([one for group in graph._graphs.by_signature.values() for one in group]) > 1


def test_the_same_value_is_the_same_graph():
    traced = []

    def f(p, x, mask):
        traced.append(1)
        return ((x @ p) ** 2).sum() * int(mask.sum())

    graph = hog.compile(f, backend="eager", check=False)
    graph(W, X, MASKS[1])
    before = len(traced)
    graph(W, X, MASKS[1].flip(0))  # another mask with as many
    assert len(traced) == before


def test_a_buffer_that_changes_in_place():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2, dtype=torch.float64)
            self.register_buffer("on", torch.tensor(True))

        def forward(self, x):
            y = self.lin(x)
            return y**3 if self.on else y**2

    model = Gate()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    v, batch = {k: torch.ones_like(p) for k, p in params.items()}, (X, X[:, :2])
    for on in (True, False, True):
        model.on.fill_(on)
        assert_close(
            hog.hvp(loss, params, v, batch, compile="eager"), hog.hvp(loss, params, v, batch)
        )


FLOATS = {
    "a comparison": lambda p, x, mask: (x @ p).sum() if x.sum() > 0 else p.sum(),
    "an integer of a float": lambda p, x, mask: (x @ p).sum() * int(x.sum().long()),
    "the parameter": lambda p, x, mask: (x @ p).sum() * p.sum().item(),
    "whether results are equal": lambda p, x, mask: (
        p.sum() if torch.equal(x @ p, x[:, :2]) else (x @ p).sum()
    ),
    "torch.tensor of an element": lambda p, x, mask: (
        (x @ p).sum() * torch.tensor([p[0, 0], 1.0]).sum()
    ),
    "new of an element": lambda p, x, mask: (x @ p).sum() * x.new([[p[0, 0]]]).sum(),
    "of mask and float": lambda p, x, mask: (x @ p).sum() * int((mask * x[:, 0] > 0).sum()),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_stay_refused_with_the_line(name):
    with pytest.raises(UnsupportedError, match=r"reads them \(.*test_reads\.py:\d+"):
        hog.compile(FLOATS[name], backend="eager")(W, X, MASKS[0])


def test_random_numbers_stay_refused():
    def f(p):
        return p.sum() * int(torch.randint(3, ()))

    with pytest.raises(UnsupportedError, match="reads them"):
        hog.compile(f, backend="eager")(W)


def test_a_value_that_differs_at_each_call_is_told_and_then_refused():
    def f(p, step):
        return (p**2).sum() * int(step)

    graph = hog.compile(f, backend="eager", check=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(8):
            graph(W, torch.tensor(step))
        with pytest.raises(UnsupportedError, match="reads other ones in each of the last 8 calls"):
            graph(W, torch.tensor(8))
    (message,) = (str(one.message) for one in told)
    assert "captured again in each of the last 3 calls" in message
    assert "reads 3 instead of 2" in message


class Items(dict):
    """Makes a new object at each look, as transformers' table of activations does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


ACTIVATIONS = Items(tanh=nn.Tanh)


def test_a_table_that_makes_objects_is_captured_once():
    traced = []

    def f(p, x):
        traced.append(1)
        return ACTIVATIONS["tanh"](x @ p).sum()

    graph = hog.compile(f, backend="eager", check=False)
    graph(W, X)
    before = len(traced)
    assert_close(graph(2 * W, X), torch.tanh(2 * X @ W).sum())
    assert len(traced) == before


def convolved(p, x, edges):
    """A convolution on a graph, whose number of nodes is that of its edges, as torch_geometric's."""
    count = int(edges.max()) + 1
    source, target = torch.cat([edges, torch.arange(count).expand(2, -1)], 1)
    degree = torch.zeros(count, dtype=x.dtype).scatter_add(0, target, torch.ones_like(target).to(x))
    scale = degree.pow(-0.5)
    messages = (scale[source] * scale[target])[:, None] * (x @ p)[source]
    return torch.zeros(count, 2, dtype=x.dtype).index_add(0, target, messages).tanh().square().sum()


def test_graphs_of_other_sizes():
    for edges in ([[0, 1, 2], [1, 2, 0]], [[1, 0, 1], [0, 1, 1]], [[2, 3, 0], [3, 1, 2]]):
        given = W, torch.ones_like(W), X, torch.tensor(edges)
        assert_close(hog.hvp(convolved, *given, compile="eager"), hog.hvp(convolved, *given))


def whisper():
    """Encoder and decoder are those of BART; sounds are its input."""
    options = {"num_mel_bins": 4, "max_source_positions": 4, "max_target_positions": 8}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    name = "WhisperForConditionalGeneration"
    model = language_model(name, **ENCODER_DECODER, **options, **special)
    sounds = torch.linspace(-1, 1, 64, dtype=torch.float64).sin().reshape(2, 4, 8)
    return model, {"input_features": sounds, "labels": torch.tensor([[3, 4, 5], [6, 7, 8]])}


@pytest.mark.parametrize(
    "make",
    [
        lambda: (language_model("BartForConditionalGeneration"), padded_batch()),
        lambda: (language_model("FalconForCausalLM"), padded_batch()),
        pytest.param(whisper, marks=FULL),  # its masks are those of BART
    ],
    ids=["BART", "Falcon", "Whisper"],
)
def test_models_of_transformers_that_read_their_masks(make):
    model, batch = make()
    loss, params = hog.functional_loss(model), hog.trainable_params(model)
    v = {
        k: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape)
        for k, p in params.items()
    }
    (a, x), (b, y) = (hog.hvp(loss, params, v, batch, compile=c) for c in ("eager", False))
    assert_close(a, b)
    assert_close(x, y, rtol=1e-5, atol=1e-7)  # models compute the loss in float32


FACTORS = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def solved(p, A):
    """What libraries of Gaussian processes do: more on the diagonal where a factorization fails."""
    L, info = torch.linalg.cholesky_ex(A)
    if info.any():
        L = torch.linalg.cholesky(A + 3 * torch.eye(2, dtype=A.dtype))
    return (p[:2].T @ L).square().sum()


def same(p, A):
    return (p[:2] * A).sum() if torch.equal(A, A) else p.square().sum()


STORED = FACTORS.clone()


def stored(p, A):
    """Whether data is that of training, as libraries of Gaussian processes ask."""
    return (p[:2] * A).sum() if torch.equal(A[:, None], STORED[:, None]) else p.square().sum()


@pytest.mark.parametrize(
    ("f", "other"), [(solved, FACTORS - 2 * torch.eye(2, dtype=torch.float64)), (same, FACTORS * torch.nan), (stored, FACTORS + 1)]
)  # fmt: skip
def test_reads_of_floats_that_are_guards(f, other):
    graph = hog.compile(f, backend="eager", check=False)
    for A in (FACTORS, other, FACTORS):
        assert_close(graph(W, A), f(W, A))
