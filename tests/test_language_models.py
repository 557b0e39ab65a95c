"""language_model_loss beside the same loss with all logits, and models that compute their own loss."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from tests.language_models import CONFIGS, VOCABULARY, language_model, padded_batch
from tests.memory import peak_bytes
from tests.models import Fn
from tests.oracles import random_like, relative
from tests.refused import refused
from tests.rows import rows

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

SHIFTED = torch.tensor([[0, 1, 4, 2, 3], [3, 2, -100, 0, -100]])


def with_all_logits(model, shift, **options):
    """The same loss, of logits that exist as a whole."""

    def criterion(logits, batch):
        labels = batch["labels"]
        if shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **options)

    return hog.functional_loss(model, criterion, forward=lambda m, batch: m(**batch).logits)


class Small(nn.Module):
    """Embedding, a layer, a head with a bias; weights are tied where asked."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.mix, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, input_ids, labels=None):
        return SimpleNamespace(logits=self.head(self.mix(self.embed(input_ids)).tanh()), loss=None)


def small(*names, tied=False, **options):
    """The loss in chunks, parameters, a vector and a batch."""
    model = Small(tied)
    batch = {"input_ids": SHIFTED.clamp(min=0), "labels": SHIFTED}
    chunked = hog.language_model_loss(model, head="head", shift=True, chunk_size=3, **options)
    params = hog.trainable_params(model, *names)
    return chunked, params, random_like(params), batch


@pytest.mark.parametrize("name", CONFIGS)
def test_products_of_architectures(name):
    compare(language_model(name), "MaskedLM" not in name and "Conditional" not in name)


def test_gradient_checkpointing():
    model = language_model("LlamaForCausalLM").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(model, True)


def compare(model, shift):
    batch = padded_batch()
    params = hog.trainable_params(model)
    v = random_like(params)
    chunked = hog.language_model_loss(model, chunk_size=4)
    whole = with_all_logits(model, shift)
    for product in (hog.hvp, hog.ggn_vp):
        (a, x), (b, y) = (product(f, params, v, batch) for f in (chunked, whole))
        # some models return logits in float32, or compute in it inside
        assert_close(a, b.double(), rtol=1e-9 if b.dtype == a.dtype else 1e-6, atol=0)
        assert relative(x, y) < 1e-6
    assert_close(chunked(params, batch), model(**batch).loss.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_third_derivatives(smoothing):
    chunked, params, v, batch = small(label_smoothing=smoothing)
    whole = with_all_logits(chunked.model, True, label_smoothing=smoothing)
    found = []
    for loss in (chunked, whole):
        for product in (hog.hvp, hog.ggn_vp):
            _, out = product(loss, params, v, batch, create_graph=True)
            total = sum((out[k] * v[k].sin()).sum() for k in out)
            found.append(torch.autograd.grad(total, list(params.values())))
    assert_close(found[0], found[2], rtol=1e-9, atol=1e-12)
    assert_close(found[1], found[3], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("product", "mode"),
    [
        (hog.ggn_vp, "forward"), (hog.ggn_vp, "reverse"), (hog.ggn_vp, "finite-differences"),
        (hog.hvp, "reverse-over-reverse"), (hog.hvp, "forward-over-reverse"),
    ],
)  # fmt: skip
def test_products_in_each_mode(product, mode):
    chunked, params, v, batch = small(label_smoothing=0.1)
    whole = with_all_logits(chunked.model, True, label_smoothing=0.1)
    _, expected = product(whole, params, v, batch)
    limit = 1e-8 if product is hog.ggn_vp else 1e-9
    assert relative(product(chunked, params, v, batch, mode=mode)[1], expected) < limit


@rows(("tied", "names"), [(False, ["mix.*"]), (True, [])], ids=["frozen", "tied"])
def test_frozen_and_tied_heads(tied, names):
    chunked, params, v, batch = small(*names, tied=tied)
    assert "head.weight" not in params
    whole = with_all_logits(chunked.model, True)
    for product in (hog.hvp, hog.ggn_vp):
        x, y = (product(f, params, v, batch)[1] for f in (chunked, whole))
        assert relative(x, y) < 1e-9


def test_half_precision_is_near():
    model = language_model("LlamaForCausalLM")
    params, batch = hog.trainable_params(model), padded_batch()
    v = random_like(params)
    _, expected = hog.ggn_vp(hog.language_model_loss(model), params, v, batch)
    model.bfloat16()
    params = hog.trainable_params(model)
    v = {k: x.bfloat16() for k, x in v.items()}
    _, found = hog.ggn_vp(hog.language_model_loss(model, chunk_size=4), params, v, batch)
    assert relative({k: x.double() for k, x in found.items()}, expected) < 0.05


NOT_APPLICABLE = {
    "a Fisher matrix of squares": (lambda: hog.fisher_vp(*small(), likelihood="gaussian"), ArgumentValueError, "likelihood=None or 'categorical'"),
    "a Fisher matrix of a sum": (lambda: hog.fisher_vp(*small(), reduction="sum"), ArgumentValueError, "reduction='mean'"),
    "a Fisher matrix of smoothed labels": (lambda: hog.fisher_vp(*small(label_smoothing=0.1)), ArgumentValueError, "label_smoothing=0"),
    "the criterion of another model": (lambda: hog.functional_loss(Small(), small()[0]), ArgumentValueError, "another model"),
    "a masked model without labels": (lambda: hog.language_model_loss(language_model("BertForMaskedLM"))({}, {k: x for k, x in padded_batch().items() if k != "labels"}), ArgumentValueError, "labels"),
}  # fmt: skip


test_what_is_not_applicable = refused(NOT_APPLICABLE)


def test_exact_is_the_ggn():
    chunked, params, v, batch = small()
    a, b = hog.fisher_vp(chunked, params, v, batch), hog.ggn_vp(chunked, params, v, batch)
    assert relative(a[1], b[1]) < 1e-12


def test_the_empirical_fisher_matrix():
    chunked, params, _, batch = small("head.*", "mix.bias")
    count = (SHIFTED[:, 1:] != -100).sum()
    expected = 0
    for n in range(len(SHIFTED)):
        logits = chunked.model(batch["input_ids"][n : n + 1]).logits[0, :-1]
        own = F.cross_entropy(logits, SHIFTED[n, 1:], reduction="sum") / count
        grads = torch.autograd.grad(own, list(params.values()))
        flat = torch.cat([g.reshape(-1) for g in grads])
        expected = expected + len(SHIFTED) * torch.outer(flat, flat)
    operator = hog.FisherOperator(chunked, params, batch, kind="empirical")
    assert_close(operator.to_dense(), expected)


def test_sampled_is_an_estimate_of_the_exact():
    chunked, params, _, batch = small("head.*")
    exact = hog.FisherOperator(chunked, params, batch, kind="exact").to_dense()
    errors = []
    for samples in (10, 160):
        operator = hog.FisherOperator(
            chunked, params, batch, kind="mc", num_samples=samples,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        errors.append(float((operator.to_dense() - exact).norm() / exact.norm()))
    assert errors[1] < 0.1
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize(
    ("product", "options"),
    [(hog.hvp, {}), (hog.ggn_vp, {}), (hog.hvp, {"compile": "eager"})],
    ids=["hvp", "ggn", "captured hvp"],
)
def test_memory_is_a_few_chunks(product, options):
    rows, classes, width, chunk = 128, 4000, 8, 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, width), nn.Linear(width, classes, bias=False))
    batch = (torch.randint(10, (1, rows)), torch.randint(classes, (1, rows)))
    loss = hog.language_model_loss(model, head="1", shift=False, chunk_size=chunk)
    params = hog.trainable_params(model)
    v = random_like(params)
    product(loss, params, v, batch, **options)
    peak = peak_bytes(lambda: product(loss, params, v, batch, **options), torch.device("cpu"))
    chunk_bytes, weight_bytes = 4 * chunk * classes, 4 * width * classes
    assert peak < 2.5 * chunk_bytes + 7 * weight_bytes
    assert peak < 4 * rows * classes  # less than one tensor of logits


def test_operators_weight_batches_by_labels():
    chunked, params, v, batch = small()
    parts = [{k: x[n : n + 1] for k, x in batch.items()} for n in range(2)]
    _, expected = hog.hvp(chunked, params, v, batch)
    as_mapping = UserDict(batch), {"micro_batch": 1}  # as BatchEncoding is
    for data, options in ((parts, {}), (batch, {"micro_batch": 1}), as_mapping):
        found = hog.HessianOperator(chunked, params, data, **options) @ v
        assert relative(found, expected) < 1e-9


def test_kinds_of_batches():
    chunked, params, _, batch = small()
    ids, labels = batch["input_ids"], batch["labels"]
    for given in (UserDict(batch), (ids, labels), {**batch, "labels": labels.int()}):
        assert_close(chunked(params, given), chunked(params, batch))


def test_labels_are_the_tokens_without_padding():
    model = language_model("GPT2LMHeadModel")
    loss, params = hog.language_model_loss(model), hog.trainable_params(model)
    batch = padded_batch()
    without = {k: x for k, x in batch.items() if k != "labels"}
    assert torch.equal(loss(params, without), loss(params, batch))
    ids = batch["input_ids"][1:]
    assert_close(loss(params, ids), loss(params, {"input_ids": ids, "labels": ids}))


def test_no_label_counts():
    chunked, params, _, batch = small()
    nothing = {**batch, "labels": torch.full_like(SHIFTED, -100)}
    assert chunked({}, nothing).isnan()
    both, one = (hog.HessianOperator(chunked, params, d) for d in ([batch, nothing], batch))
    v = torch.ones(one.shape[0], dtype=one.dtype)
    assert_close(both @ v, one @ v)
    with pytest.raises(ArgumentValueError, match="labels are all ignore_index"):
        hog.HessianOperator(chunked, params, nothing).trace()


def test_a_body_of_ones_own():
    chunked, params, v, batch = small()
    loss = hog.language_model_loss(
        chunked.model, head=chunked.model.head, shift=True,
        body=lambda m, batch: m.mix(m.embed(batch["input_ids"])).tanh(),
    )  # fmt: skip
    found, expected = (hog.hvp(one, params, v, batch)[1] for one in (loss, chunked))
    assert relative(found, expected) < 1e-12


def test_nothing_of_the_model_changes():
    model = language_model("GPT2LMHeadModel").train()  # with dropout
    loss, params = hog.language_model_loss(model), hog.trainable_params(model)
    batch = padded_batch()
    state = torch.get_rng_state()
    first = loss(params, batch)
    torch.set_rng_state(state)
    assert torch.equal(loss(params, batch), first)  # the check of the first call draws nothing
    assert "forward" not in vars(model.lm_head)


ARGUMENTS = {
    "shift": ({"head": "head"}, ArgumentValueError, "whose name does not tell"),
    "no head": ({"shift": True}, ArgumentValueError, r"which has none.* For a classifier write `hoglib\.functional_loss"),
    "name": ({"head": "haed", "shift": True}, ArgumentValueError, "the name of a layer"),
    "another head": ({"head": nn.Linear(2, 2), "shift": True}, ArgumentValueError, "not in Small"),
    "no linear layer": ({"head": "embed", "shift": True}, ArgumentTypeError, r"plain nn\.Linear"),
    "chunk size": ({"head": "head", "shift": True, "chunk_size": 0}, ArgumentValueError, "chunk_size"),
    "smoothing": ({"head": "head", "shift": True, "label_smoothing": 2}, ArgumentValueError, "from 0 to 1"),
    "ignored": ({"head": "head", "shift": True, "ignore_index": None}, ArgumentTypeError, "ignore_index: expected an integer"),
}  # fmt: skip
TOKENS = SHIFTED.clamp(min=0)
LABELS = {
    "other shape": ((TOKENS, SHIFTED[:1]), ArgumentValueError, "one for each position"),
    "floating-point": ((TOKENS, SHIFTED.double()), ArgumentValueError, "integers"),
    "boolean": ((TOKENS, SHIFTED > 0), ArgumentValueError, "integers"),
    "too large": ((TOKENS, 0 * SHIFTED + 99), ArgumentValueError, "tokens from 0 to .* got 99"),
    "negative": ((TOKENS, 0 * SHIFTED - 5), ArgumentValueError, "tokens from 0 to .* got -5"),
    "labels on another device": ((TOKENS, SHIFTED.to("meta")), ArgumentValueError, r"batch\[1\]: expected a tensor on cpu"),
    "another device": (TOKENS.to("meta"), ArgumentValueError, "expected a tensor on cpu"),
    "lists": (([[1, 2]], [[1, 2]]), ArgumentTypeError, "tensor of tokens"),
    "text": ("text", ArgumentTypeError, "tensor of tokens"),
    "nothing": ({}, ArgumentTypeError, "tensor of tokens"),
}  # fmt: skip


CHANGED = {
    "bounded": (lambda net, ids: 30 * (net.inner(ids).logits / 30).tanh(), ArgumentValueError, "bounds them"),
    "scaled": (lambda net, ids: net.inner(ids).logits * 1.001, ArgumentValueError, "bounds them"),
    "shifted": (lambda net, ids: net.inner(ids).logits + torch.arange(5.0) / 10, ArgumentValueError, "bounds them"),
    "cut": (lambda net, ids: net.inner(ids).logits[..., :3], ArgumentValueError, "expected logits"),
    "a head that is not called": (lambda net, ids: net.inner.embed(ids), ArgumentValueError, "does not call"),
}  # fmt: skip


def with_logits(run):
    loss = hog.language_model_loss(Fn(run, inner=Small()), head="inner.head", shift=True)
    return loss({}, TOKENS)


test_arguments = refused(ARGUMENTS, lambda given: hog.language_model_loss(Small(), **given))
test_logits_that_change_after_the_head = refused(CHANGED, with_logits)
test_labels = refused(LABELS, lambda batch: small()[0]({}, batch))


def products(batch):
    loss, *_ = small()
    outputs = loss.outputs({}, TOKENS)
    return loss.gauss_newton(outputs, batch)([x for x in outputs if x is not None])


test_labels_of_products = refused({"away": LABELS["labels on another device"]}, products)


WITH_LOSSES = {
    "mapping": (lambda loss: {"loss": loss, "logits": loss}, {"x": 2.0}),
    "attribute": (lambda loss: SimpleNamespace(loss=loss), (2.0,)),
    "tuple": (lambda loss: (loss, None), (2.0,)),
    "itself": (lambda loss: loss, torch.tensor(2.0)),
}
WITHOUT_LOSSES = {
    "none": (SimpleNamespace(loss=None), ArgumentValueError, "got None"),
    "no loss": ({"logits": torch.ones(2)}, ArgumentValueError, "with logits"),
    "outputs": (torch.ones(2), ArgumentValueError, "scalar"),
    "vector": (SimpleNamespace(loss=torch.ones(2)), ArgumentValueError, "scalar"),
}
test_no_loss = refused(
    WITHOUT_LOSSES, lambda out: hog.functional_loss(Fn(lambda net, x: out))({}, torch.ones(2))
)


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
def test_the_hessian_of_the_loss_of_a_model(name):
    model, batch = language_model(name), padded_batch()
    params = hog.trainable_params(model)
    v = random_like(params)
    value, product = hog.hvp(hog.functional_loss(model), params, v, UserDict(batch))
    shift = name == "GPT2LMHeadModel"
    expected, other = hog.hvp(with_all_logits(model, shift), params, v, batch)
    assert_close(value.double(), expected, rtol=1e-5, atol=0)
    assert relative(product, other) < 1e-5


@rows(("outputs", "batch"), WITH_LOSSES.values(), ids=WITH_LOSSES)
def test_where_the_loss_is(outputs, batch):
    w = nn.Parameter(torch.tensor(3.0))
    model = Fn(lambda net, x: outputs(net.w**2 * x), w=w)
    assert hog.functional_loss(model)({}, batch) == 18


def test_it_has_no_ggn():
    model = language_model("GPT2LMHeadModel")
    loss, p, b = hog.functional_loss(model), hog.trainable_params(model), padded_batch()
    for run in (
        lambda: hog.ggn_vp(loss, p, p, b),
        lambda: hog.fisher_vp(loss, p, p, b, kind="empirical"),
        lambda: hog.GGNOperator(loss, p, b),
        lambda: hog.ggn(loss, p, b),
    ):
        with pytest.raises(ArgumentValueError, match="apart"):
            run()


@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "finite-differences"])
def test_a_criterion_that_takes_the_loss_of_the_outputs(mode):
    model = language_model("GPT2LMHeadModel")
    params, batch = hog.trainable_params(model), padded_batch()
    loss = hog.functional_loss(model, lambda out, b: out.loss, forward=lambda m, b: m(**b))
    with pytest.raises(ArgumentValueError, match="linear in the model's outputs"):
        hog.ggn_vp(loss, params, params, batch, mode=mode)


def test_one_of_the_same_model_is_a_criterion():
    chunked, *_ = small()
    assert hog.functional_loss(chunked.model, chunked) is chunked


def task(seed):
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, VOCABULARY, (2, 5), generator=generator)}


def test_maml_of_adapters():
    peft = pytest.importorskip("peft")
    base = language_model("LlamaForCausalLM", attn_implementation="eager")  # as torch by hand needs
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).double()
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "lora_B" in name:  # zero at first
                p.copy_(0.1 * torch.sin(torch.arange(p.numel()) + i).reshape(p.shape))
    params = hog.trainable_params(model, "*lora_*")
    support, query = task(0), task(1)
    maml = hog.MAML(
        model, hog.language_model_loss(model, chunk_size=4), inner_lr=0.5, inner_steps=2
    )
    maml.loss([(support, query)]).backward()

    def plain(p, batch):
        ids = batch["input_ids"]
        z = torch.func.functional_call(model, p, kwargs={"input_ids": ids}).logits
        return F.cross_entropy(z[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    start = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    fast = start
    for _ in range(2):
        grads = torch.autograd.grad(plain(fast, support), list(fast.values()), create_graph=True)
        fast = {k: p - 0.5 * g for (k, p), g in zip(fast.items(), grads, strict=True)}
    expected = torch.autograd.grad(plain(fast, query), list(start.values()))
    found = {k: p.grad for k, p in params.items()}
    assert relative(found, dict(zip(params, expected, strict=True))) < 1e-8


def test_logits_at_other_values_for_parameters_that_a_call_is_not_given():
    loss, params, _, batch = small("mix.*")
    at = {"head.bias": torch.linspace(0, 1, 5).double()}
    expected = loss({**params, **at}, batch)
    assert_close(loss.with_parameters(at)(params, batch), expected)
    assert_close(loss.with_parameters(at).with_logits()(params, batch), expected)
    assert (expected - loss(params, batch)).abs() > 1e-2


def test_by_name_and_glob():
    model = Small()
    found = list(hog.trainable_params(model, "head.bias", "m*"))
    assert found == ["mix.weight", "mix.bias", "head.bias"]


def test_what_none_matches():
    model = Small()
    model.embed.requires_grad_(False)
    for pattern, words in (("haed.bias", "for instance 'head.bias'"), ("embed*", "is frozen")):
        with pytest.raises(ArgumentValueError, match=words):
            hog.trainable_params(model, "mix.*", pattern)
    with pytest.raises(ArgumentTypeError, match="strings"):
        hog.trainable_params(Small(), nn.Linear)
