"""functional_loss with any module and any batch, against copies of the model called plainly."""

import copy
from collections import OrderedDict, UserDict, namedtuple
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import hoglib as hog
from hoglib._core.modules.swap import keep_swapped
from tests.models import Fn, Remembers, Sample, Tied
from tests.oracles import random_like, relative
from tests.refused import refused
from tests.rows import rows
from tests.unchanged import unchanged


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def mean_square(outputs, targets):
    return (outputs - targets).square().mean()


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


class Of(nn.Module):
    """A net whose forward is given."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.net = net()
        for name, part in parts.items():
            setattr(self, name, part)
        self._given = forward

    def forward(self, x):
        return self._given(self, x)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = net(), net()

    def forward(self, a, b):
        return self.left(a) * self.right(b)


def siamese():
    """Of which only the encoder is called."""
    return Fn(None, encoder=net(), scale=nn.Parameter(torch.ones(2)))


def looks():
    parts = {"table": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)}
    parts["head"].weight = parts["table"].weight
    return Fn(lambda self, tokens: torch.tanh(self.head(self.table(tokens) + 1)), **parts)


class ModelOutput(OrderedDict):
    """As Hugging Face's: a dict whose entries are attributes."""

    def __getattr__(self, name):
        return self[name]


class Graph:
    def __init__(self, **parts):
        self.__dict__.update(parts)


Three = namedtuple("Three", ["a", "b", "target"])
X, Y, Z = (torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))  # fmt: skip
TOKENS = torch.tensor([0, 1, 3, 1])


class Case(NamedTuple):
    """A model, a batch, the loss, and the same number from a plain call of the model."""

    build: object
    batch: object
    criterion: object
    plain: object
    forward: object = None
    transforms: bool = True  # whether torch.func can run it
    vmaps: bool = True

    def problem(self):
        torch.manual_seed(3)
        model = self.build().double()
        params = hog.trainable_params(model)
        return model, params, hog.functional_loss(model, self.criterion, forward=self.forward)


def both(model, batch):
    """Two calls of a part, and a parameter of the model itself."""
    return model.encoder(batch["a"]) * model.encoder(batch["b"]) * model.scale


def twice(model, batch):
    return model(batch) + 0.5 * model(batch.flip(0))


def checkpointed(model, batch):
    x = checkpoint(model[0], batch, use_reentrant=False)
    return checkpoint(model[2], torch.tanh(x), use_reentrant=False)


def to_itself(outputs, batch):
    return mean_square(outputs, batch)


def by_entry(outputs, batch):
    return mean_square(outputs, batch["y"])


CASES = {
    "a pair": Case(net, (X, Y), mean_square, lambda m: mean_square(m(X), Y)),
    "a list of two": Case(net, [X, Y], mean_square, lambda m: mean_square(m(X), Y)),
    "a pair with a tuple as input": Case(lambda: Of(lambda self, x: self.net(x[0]) * x[1]), ((X, Z), Y), mean_square, lambda m: mean_square(m.net(X) * Z, Y)),
    "a pair with a dict as input": Case(lambda: Of(lambda self, x: self.net(x["x"])), ({"x": X}, Y), mean_square, lambda m: mean_square(m.net(X), Y)),
    "a pair with a dict as targets": Case(net, (X, {"y": Y}), by_entry, lambda m: mean_square(m(X), Y)),
    "a tuple of three": Case(TwoInputs, (X, Y, Z), mean_square, lambda m: mean_square(m(X, Y), Z)),
    "a list of three": Case(TwoInputs, [X, Y, Z], mean_square, lambda m: mean_square(m(X, Y), Z)),
    "a named tuple": Case(TwoInputs, Three(X, Y, Z), mean_square, lambda m: mean_square(m(X, Y), Z)),
    "a tensor": Case(net, X, to_itself, lambda m: mean_square(m(X), X)),
    "a dict": Case(lambda: Of(lambda self, x: self.net(x["x"])), {"x": X, "y": Y}, by_entry, lambda m: mean_square(m.net(X), Y)),
    "a mapping that is no dict": Case(lambda: Of(lambda self, x: self.net(x["x"])), UserDict(x=X, y=Y), by_entry, lambda m: mean_square(m.net(X), Y)),
    "a dataclass": Case(lambda: Of(lambda self, x: self.net(x.x)), Sample(X, Y), lambda outputs, batch: mean_square(outputs, batch.y), lambda m: mean_square(m.net(X), Y)),
    "a graph": Case(
        lambda: Of(lambda self, g: self.net(g.x[g.edges]).sum(0)), Graph(x=X, edges=TOKENS, y=Y[0]),
        lambda outputs, batch: mean_square(outputs, batch.y),
        lambda m: mean_square(m.net(X[TOKENS]).sum(0), Y[0]),
    ),
    "a packed sequence": Case(
        lambda: nn.GRU(2, 3), pack_sequence([X, Y[:2]]),
        lambda outputs, batch: outputs[1].square().mean() * batch.data.square().mean(),
        lambda m: m(pack_sequence([X, Y[:2]]))[1].square().mean() * torch.cat([X, Y[:2]]).square().mean(),
        transforms=False,  # the kernel reads the lengths' memory, which a wrapped tensor has not
    ),
    "forward= of keywords": Case(
        TwoInputs, {"b": Y, "a": X}, lambda outputs, batch: mean_square(outputs, batch["a"]),
        lambda m: mean_square(m(X, Y), X), lambda model, batch: model(**batch),
    ),
    "forward= of a pair": Case(
        TwoInputs, (X, Y), lambda outputs, batch: mean_square(outputs, batch[1]),
        lambda m: mean_square(m(X, Y), Y), lambda model, batch: model(*batch),
    ),
    "forward= of a list of one": Case(net, [X], lambda outputs, batch: mean_square(outputs, batch[0]), lambda m: mean_square(m(X), X), lambda model, batch: model(batch[0])),
    "forward= calls a part twice": Case(
        siamese, {"a": X, "b": Y}, lambda outputs, batch: outputs.square().mean(),
        lambda m: (m.encoder(X) * m.encoder(Y) * m.scale).square().mean(), both,
    ),
    "forward= of a model without forward": Case(
        lambda: nn.ModuleDict({"f": net(), "g": net()}), X, to_itself,
        lambda m: mean_square(m["g"](m["f"](X)), X), lambda model, x: model["g"](model["f"](x)),
    ),
    "forward= with tied weights": Case(Tied, X, to_itself, lambda m: mean_square(m.second(m.first(X).sin()), X), lambda model, x: model.second(model.first(x).sin())),
    "forward= with BatchNorm in train mode": Case(
        lambda: nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
        X, to_itself, lambda m: mean_square(twice(m, X), X), twice,
    ),
    "forward= with buffers that change": Case(Remembers, X, to_itself, lambda m: mean_square(twice(m, X), X), twice),
    "forward= with checkpoints": Case(net, X, to_itself, lambda m: mean_square(m(X), X), checkpointed, transforms=False),
    "weights that are computed": Case(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2), orthogonal_map="cayley"), X, to_itself, lambda m: mean_square(m(X), X)),
    "a tied embedding": Case(looks, TOKENS, lambda outputs, tokens: F.cross_entropy(outputs, tokens), lambda m: F.cross_entropy(m(TOKENS), TOKENS)),
    "an LSTM, which returns a tuple": Case(
        lambda: nn.LSTM(2, 2), (X, Y), lambda outputs, y: mean_square(outputs[0], y) + outputs[1][1].sum(),
        lambda m: mean_square(m(X)[0], Y) + m(X)[1][1].sum(),
    ),
    "an LSTM with its state as second input": Case(
        lambda: nn.LSTM(2, 2), (X, (Y[:1], Z[:1]), Y), lambda outputs, y: mean_square(outputs[0], y),
        lambda m: mean_square(m(X, (Y[:1], Z[:1]))[0], Y),
    ),
    "a transformer encoder": Case(
        lambda: nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0), (X[:, None], Y[:, None]), mean_square,
        lambda m: mean_square(m(X[:, None]), Y[:, None]), vmaps=False,  # of attention torch warns
    ),
    "a model that returns a dict": Case(
        lambda: Of(lambda self, x: {"y": self.net(x), "x": x}), (X, Y),
        lambda outputs, y: mean_square(outputs["y"], y), lambda m: mean_square(m.net(X), Y),
    ),
    "a model that returns a ModelOutput": Case(
        lambda: Of(lambda self, batch: ModelOutput(loss=self.net(batch["x"]).square().mean())), {"x": X},
        lambda outputs, batch: outputs.loss, lambda m: m.net(X).square().mean(),
    ),
}  # fmt: skip
TRANSFORMED = [name for name, case in CASES.items() if case.transforms]


def at(model, params):
    """A copy of the model that has these parameters as its own."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in params:
                parameter.copy_(params[name])
    return twin


def plain_gradient(case, model, params):
    twin = at(model, params)
    own = [dict(twin.named_parameters())[name] for name in params]
    grads = torch.autograd.grad(case.plain(twin), own, allow_unused=True, materialize_grads=True)
    return dict(zip(params, grads, strict=True))


def plain_hvp(case, model, params, v, eps=1e-5):
    above, below = (
        plain_gradient(case, model, {n: p + sign * eps * v[n] for n, p in params.items()})
        for sign in (1, -1)
    )
    return {n: (above[n] - below[n]) / (2 * eps) for n in params}


def shifted(params):
    return {n: (p + 0.1 * torch.randn_like(p)).detach() for n, p in params.items()}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_a_plain_call(name):
    case = CASES[name]
    model, params, loss = case.problem()
    before = copy.deepcopy(model.state_dict())
    other = shifted(params)
    assert_close(loss({}, case.batch), case.plain(at(model, {})))
    assert_close(loss(other, case.batch), case.plain(at(model, other)))
    outputs = loss.outputs(other, case.batch)
    assert_close(loss.criterion(outputs, case.batch), case.plain(at(model, other)))
    value = loss(params, case.batch)
    if name != "forward= with checkpoints":  # whose backward comes after the model has its own
        other = {n: p.requires_grad_() for n, p in other.items()}
        value = loss(other, case.batch)
        grads = torch.autograd.grad(
            value, list(other.values()), allow_unused=True, materialize_grads=True
        )
        assert_close(dict(zip(other, grads, strict=True)), plain_gradient(case, model, other))
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p is params[n] for n, p in hog.trainable_params(model).items())


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_hvp_equals_differences_of_plain_gradients(name, context):
    case = CASES[name]
    model, params, loss = case.problem()
    other, v = shifted(params), random_like(params)  # not those that the model has
    with unchanged(model), context():
        value, product = hog.hvp(loss, other, v, case.batch)
        assert_close(loss(other, case.batch), value)
    assert relative(product, plain_hvp(case, model, other, v)) < 1e-6


@pytest.mark.parametrize("name", TRANSFORMED)
def test_inside_grad_and_vmap(name):
    case = CASES[name]
    model, params, loss = case.problem()
    others = [shifted(params) for _ in range(3)]
    for other in others:
        assert_close(torch.func.grad(loss)(other, case.batch), plain_gradient(case, model, other))
    if case.vmaps:
        stacked = {n: torch.stack([other[n] for other in others]) for n in params}
        over = torch.func.vmap(lambda p: torch.func.grad(loss)(p, case.batch))
        for i, other in enumerate(others):
            ours = {n: g[i] for n, g in over(stacked).items()}
            assert_close(ours, plain_gradient(case, model, other))


@pytest.mark.parametrize("name", CASES)
def test_in_float64_it_is_the_model_converted(name):
    case = CASES[name]
    model, _, _ = case.problem()
    exact = at(model.float(), {}).double()  # what a float32 model is in float64
    loss = hog.functional_loss(model, case.criterion, forward=case.forward)
    before, batch = copy.deepcopy(model.state_dict()), case.batch
    some = dict(list(hog.trainable_params(model).items())[1:])  # the first is the model's own
    some = {n: p.double() for n, p in some.items()}
    assert_close(loss.double()(some, batch), case.plain(copy.deepcopy(exact)), rtol=1e-13, atol=0)
    if some:
        v = random_like(some)
        _, product = hog.hvp(loss.double(), some, v, batch)
        some = {n: p.detach() for n, p in some.items()}
        assert relative(product, plain_hvp(case, exact, some, v)) < 1e-6
    assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert "double" not in repr(loss)
    assert repr(loss.double()).endswith(".double()")


class Signals(nn.Module):
    """Half-precision, complex and integer state, frozen and not."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("low", torch.rand(2, dtype=torch.bfloat16))
        self.register_buffer("index", torch.tensor([1, 0]))

    def forward(self, x):
        parts = [self.frozen, self.phase, self.low, self.index]
        self.seen = [t.dtype for t in (self.linear.weight, *parts)]
        return (self.linear(x)[:, self.index] * self.frozen * self.phase * self.low).abs()


def test_dtypes_in_float64():
    model = Signals()
    loss = hog.functional_loss(model, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
    target = torch.tensor([0, 1, 0, 1, 1])
    value = loss.double()({}, (X, target))
    double = torch.float64
    assert model.seen == [double, double, torch.complex128, double, torch.int64]
    assert value.dtype is torch.float64
    loss({}, (X.float(), target))  # the loss that it was made of is as before
    single = torch.float32
    assert model.seen == [single, single, torch.complex64, torch.bfloat16, torch.int64]
    frozen = model.frozen
    before = loss.double()({}, (X, target))
    with torch.no_grad():
        frozen += 1
    assert not torch.equal(before, loss.double()({}, (X, target)))  # it follows the model


def test_float64_of_a_model_with_an_output_of_its_own():
    model = Of(lambda self, x: self.net(x * self.output.detach().mean()))
    model.output = model.net(X.float())  # deepcopy refuses
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    assert hog.functional_loss(model, to_itself).double()({}, X).dtype is torch.float64


def test_a_float32_attribute_is_not_hidden():
    model = Of(lambda self, x: F.linear(self.net(x), self.fixed))
    model.fixed = torch.eye(2)
    with pytest.raises(RuntimeError, match="dtype"):
        hog.functional_loss(model, to_itself).double()({}, X)


def test_a_checkpoint_in_forward_uses_swapped_parameters_inside_keep_swapped():
    case = CASES["forward= with checkpoints"]
    model, params, loss = case.problem()
    other = {n: p.requires_grad_() for n, p in shifted(params).items()}
    with keep_swapped():
        grads = torch.autograd.grad(loss(other, X), list(other.values()))
    assert_close(dict(zip(other, grads, strict=True)), plain_gradient(case, model, other))
    stale = torch.autograd.grad(loss(other, X), list(other.values()))  # without: the model's own
    assert relative(stale, grads) > 1e-3
    assert all(p is params[n] for n, p in model.named_parameters())


@pytest.mark.parametrize("within", ["keep_swapped", "no context"])
def test_a_loss_of_the_same_model_inside_forward(within):
    model = net().double()
    own, a, b = (shifted(hog.trainable_params(model)) for _ in range(3))
    inner = hog.functional_loss(model, to_itself)

    def forward(model, x):
        return model(x) * inner(b, x) + model(x)  # the second call again has the outer parameters

    loss = hog.functional_loss(model, to_itself, forward=forward)
    y = at(model, a)(X)
    expected = mean_square(y * mean_square(at(model, b)(X), X) + y, X)
    own = dict(model.named_parameters())
    if within == "keep_swapped":
        with keep_swapped():
            assert_close(loss(a, X), expected)
            assert_close(loss(a, X), expected)
    else:
        assert_close(loss(a, X), expected)
    assert all(p is own[n] for n, p in model.named_parameters())


def test_a_recurrent_layer_does_not_keep_swapped_parameters():
    model = nn.LSTM(2, 2).double()
    own = [id(p) for p in model._flat_weights]
    hog.functional_loss(model, lambda outputs, y: outputs[0].sum())(
        shifted(hog.trainable_params(model)), (X, Y)
    )
    assert [id(p) for p in model._flat_weights] == own == [id(p) for p in model.parameters()]


def test_parts_of_the_loss_with_forward():
    model = TwoInputs().double()
    loss = hog.functional_loss(
        model, lambda outputs, batch: mean_square(outputs, batch[1]), forward=lambda m, b: m(*b)
    )
    assert_close(loss.outputs({}, (X, Y)), model(X, Y))
    assert_close(loss.call({}, X, b=Y), model(X, Y))
    assert_close(loss.criterion(model(X, Y), (X, Y)), mean_square(model(X, Y), Y))
    assert "forward=<lambda>" in repr(loss)


def of(model, batch, criterion=to_itself, **options):
    return partial(hog.functional_loss(model.double(), criterion, **options), {}, batch)


def fails_inside(self, x):
    return self.net(x, x)  # a binding error, but not of the model's own call


class OwnLoss(nn.Module):
    """It is given its targets, if by keyword, as transformers are."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels=None):
        return mean_square(self.net(x), labels)


class Wrapped(TwoInputs):
    forward = torch.autocast("cpu", enabled=False)(TwoInputs.forward)


class Hooked(nn.Module):
    """Its pre-hook makes the call bind; forward then has a TypeError of its own."""

    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_forward_pre_hook(lambda module, args: (*args, 1))

    def forward(self, x, number):
        return self.net(x) + None


ELSEWHERE = torch.empty(5, 2, dtype=torch.float64, device="meta")
ERRORS = {
    "a tuple of none": (of(net(), ()), ValueError, r"expected a pair .*, got a tuple of 0"),
    "a list of one": (of(net(), [X]), ValueError, r"got a list of 1; .* pass its one element"),
    "too many arguments": (of(net(), (X, Y, Z)), TypeError, r"Sequential\.forward\(input\), got 2 .* a float64 tensor of shape \(5, 2\), a .*too many .*model\(batch\[0\]\)"),
    **{f"a dict of {a} and {b}": (of(net(), {a: X, b: Y}, mean_square), TypeError, rf"lambda model, batch: model\(batch\['{wanted}'\]\)")
       for a, b, wanted in (("inputs", "targets", "inputs"), ("label", "img", "img"), ("x", "y", "x"), ("labels", "pixel_values", "pixel_values"))},
    "a dict for a model with two inputs": (of(TwoInputs(), {"a": X, "b": Y}), TypeError, r"TwoInputs\.forward\(a, b\), got 1 .*: dict with 'a', 'b' \(missing .*'b'.*forward=lambda model, batch: model\(\*\*batch\)"),
    "a pair for a model with two inputs": (of(TwoInputs(), (X, Y)), TypeError, r"model\(\*batch\)"),
    "a loader": (of(net(), DataLoader(X)), TypeError, "expected one batch, got a DataLoader"),
    "inputs as a tuple": (of(TwoInputs(), ((X, Y), Z)), TypeError, r"model\(\*batch\[0\]\)"),
    "inputs as a dict": (of(TwoInputs(), ({"a": X}, Z)), TypeError, r"model\(\*\*batch\[0\]\)"),
    "a mapping for a model of a tensor": (of(Of(lambda self, x: self.net(x.view(5, 2))), UserDict(x=X)), TypeError, r"Of\.forward\(x\), got 1 .*: UserDict with 'x' \('UserDict' object has no attribute 'view'\).*model\(\*\*batch\)"),
    "a mapping with labels": (of(OwnLoss(), {"x": X, "labels": Y}), TypeError, r"model\(\*\*batch\).* `functional_loss\(model\)` passes .* as keywords"),
    "a mapping with other names": (of(net(), {"x": X}), TypeError, r"must be Tensor, not dict\).*model\(batch\['x'\]\)"),
    "a mapping of which the model takes a part": (of(Of(lambda self, x: self.net(x)), ({"x": X, "id": Y}, Z)), TypeError, r"model\(x=batch\[0\]\['x'\]\)"),
    "a pair with a mapping, without a criterion": (of(Of(lambda self, x: self.net(x)), [{"x": X}], None), TypeError, r"functional_loss\(model, forward=.*\*\*batch\[0\]\)\)`\.$"),
    "an attribute of the user's own": (of(Of(lambda self, x: x.image), {"x": X}), AttributeError, "image"),
    "a criterion of one argument": (of(net(), (X, Y), lambda outputs: outputs.mean()), TypeError, r"function of \(outputs, targets\), got <lambda>\(outputs\) \(too many .*: criterion\(outputs\)`"),
    "a criterion of three": (of(net(), X, lambda outputs, batch, weight: 1.0), TypeError, r"\(outputs, batch\), got .*'weight'\).* functools\.partial"),
    "a criterion of tensors and a batch": (of(net(), {"x": X, "labels": Y}, nn.MSELoss(), forward=lambda model, batch: {"logits": model(batch["x"])}), TypeError, r"got MSELoss\.forward\(input, target\) \(.*has no.* 'size'\).* dict with 'x', 'labels'.* criterion\(outputs\['logits'\], batch\['labels'\]\)"),
    "a TypeError inside of a criterion": (of(net(), (X, Y), lambda outputs, targets: mean_square(outputs)), TypeError, r"^mean_square\(\) missing"),
    "an object": (of(TwoInputs(), Sample(X, Y)), TypeError, r"model\(batch\.x, batch\.y\)"),
    "a decorated forward": (of(Wrapped(), (X, Y)), TypeError, r"Wrapped\.forward\(a, b\), got 1"),
    "a TypeError deep inside": (of(Of(fails_inside), X), TypeError, r"^Sequential\.forward\(\) takes 2 positional arguments"),
    "a TypeError after a hook": (of(Hooked(), X), TypeError, "^unsupported operand"),
    "a criterion of targets, and forward= of the batch": (lambda: hog.functional_loss(net(), F.cross_entropy, forward=lambda m, b: m(b[0]))({}, (X.float(), Y)), TypeError, r"criterion\(outputs, batch\[1\]\)"),
    "forward of one argument": (lambda: hog.functional_loss(net(), to_itself, forward=lambda batch: batch), TypeError, r"forward: expected a function of two arguments, \(model, batch\)"),
    "forward is a name": (lambda: hog.functional_loss(net(), to_itself, forward="encoder"), TypeError, "forward: expected a function"),
    "forward is a class": (lambda: hog.functional_loss(net(), to_itself, forward=Case), TypeError, r"make one: `Case\(\)`"),
    "a loss per sample": (of(net(), X, lambda o, b: (o - b).square().mean(1)), ValueError, r"criterion\(outputs, batch\): expected a scalar, got .*\(5,\).*\.mean\(\)"),
    "a loss of shape (1,)": (of(net(), X, lambda o, b: (o - b).square().mean().reshape(1)), ValueError, r"expected a scalar, got .*\(1,\).*\.squeeze\(\).*reduction='mean'"),
    "a number as loss": (of(net(), X, lambda o, b: 1.0), TypeError, r"torch.Tensor, got float 1.0; return .* without `\.item\(\)`"),
    "a model without forward": (of(type("Typo", (nn.Module,), {})(), (X, Y), mean_square), NotImplementedError, r"raised in the model, Typo\(\), .* Write a forward, or .*forward=lambda"),
    "inputs in float32": (of(net(), (X.float(), Y), mean_square), RuntimeError, r"module '0', .* batch\[0\], a float32 .* Convert numbers to the dtype of the parameters"),
    "arrays": (of(net(), (X.numpy(), Y.numpy()), mean_square), TypeError, r"for batch, tuple \(array.* Make tensors of arrays by `torch\.as_tensor`"),
    "targets [N, 1]": (of(net(), (X, torch.zeros(5, 1).long()), nn.CrossEntropyLoss()), RuntimeError, r"in the criterion, of outputs that are a float64 .*\(5, 2\), .*squeeze\(1\)"),
    "a criterion with its arguments swapped": (of(net(), (X, torch.zeros(5).long()), lambda y, o: F.cross_entropy(o, y)), NotImplementedError, r"gets \(outputs, targets\), in this order"),
    "inputs alone": (of(net(), X[:, :1], F.cross_entropy, forward=lambda model, x: model(x.expand(5, 2))), RuntimeError, r"of one tensor is its own target: pass \(inputs, targets\)"),
    "inputs alone, which broadcast": (of(nn.Linear(2, 1), X, F.mse_loss), ValueError, r"of shape \(5, 1\), .*of shape \(5, 2\); pass \(inputs, targets\)"),
    "inputs alone, as classes": (of(net(), X, F.cross_entropy), ValueError, r"whose rows are no probabilities, as cross_entropy compares; pass \(inputs, targets\)"),
    "positive inputs alone, as classes": (of(net(), X.sigmoid(), nn.CrossEntropyLoss()), ValueError, "whose rows are no probabilities, as CrossEntropyLoss"),
    "inputs alone, as labels": (of(net(), X, F.binary_cross_entropy_with_logits), ValueError, "whose rows are no probabilities"),
    "a batch elsewhere": (of(net(), ELSEWHERE), ValueError, r"batch: expected a tensor on cpu, .* on meta; .*\.to\('cpu'\)"),
    "one tensor of a dict elsewhere": (of(TwoInputs(), {"a": X, "b": [ELSEWHERE]}, forward=lambda m, b: m(b["a"], b["b"][0])), ValueError, r"batch\['b'\]\[0\]: expected a tensor on cpu"),
    "a dataclass elsewhere": (of(net(), Sample(ELSEWHERE, Y), forward=lambda m, b: m(b.x)), ValueError, r"batch\.x: expected a tensor on cpu"),
    "targets elsewhere": (of(net(), (X, ELSEWHERE), mean_square), ValueError, r"batch\[1\]: expected a tensor on cpu, .* on meta"),
    "an error of another kind with a tensor elsewhere": (of(net(), (X[:, :1], {"unused": ELSEWHERE}), mean_square), RuntimeError, "shapes cannot be multiplied"),
    "another width": (of(net(), (X[:, :1], Y), mean_square), RuntimeError, r"raised in module '0', Linear\(.*\), for batch\[0\], a float64 tensor of shape \(5, 1\);"),
    "one example": (of(net(), (X[0, :1], Y[0]), mean_square), RuntimeError, r"a batch of one: `x\[None\]`"),
    "a target out of range": (of(net(), (X, torch.full((5,), 9)), F.cross_entropy), IndexError, r"for batch\[0\], .*; batch\[1\], a int64 tensor.*Labels and tokens count from 0"),
    "a decomposition of NaN": (of(net(), (X, Y), lambda o, y: torch.linalg.cholesky(o.T @ o * torch.nan).sum()), RuntimeError, "NaN and infinity raise this too"),
    "another width of a module without a text": (of(type("Untold", (nn.Linear,), {"extra_repr": None})(2, 9), (X[:, :1], Y), mean_square), RuntimeError, "cannot be multiplied"),
}  # fmt: skip


test_errors = refused(ERRORS)
PROBABILITIES = {
    "distributions": (F.cross_entropy, X.softmax(1)),
    "pixels": (nn.BCEWithLogitsLoss(), X.sigmoid()),
    "inputs and targets": (F.cross_entropy, (X, X)),
    "a criterion of one's own": (lambda y, x: F.cross_entropy(y, x), X),
}


@rows(("criterion", "batch"), PROBABILITIES.values(), ids=PROBABILITIES)
def test_a_batch_may_be_its_own_target(criterion, batch):
    model = net().double()
    x, y = batch if isinstance(batch, tuple) else (batch, batch)
    assert_close(hog.functional_loss(model, criterion)({}, batch), criterion(model(x), y))


def test_own_parameters_that_are_constants():
    """An anchor of a proximal term; the parameters that are not given; those that are given as they are."""
    model = net().double()
    own = dict(model.named_parameters())

    def anchored(out, y):
        away = [(p - own[name]).square().sum() for name, p in model.named_parameters()]
        return F.mse_loss(out, y) + sum(away)

    params = {name: p.detach() for name, p in hog.trainable_params(model).items()}
    v = random_like(params)
    plain, prox = (
        hog.hvp(hog.functional_loss(model, c), params, v, (X, Y))[1] for c in (F.mse_loss, anchored)
    )
    for name in v:
        assert_close(prox[name] - plain[name], 2 * v[name])
    some = {"2.weight": params["2.weight"]}
    hog.hvp(hog.functional_loss(model, F.mse_loss), some, random_like(some), (X, Y))
    hog.functional_loss(model, F.mse_loss)(own, (X, Y)).backward()


def test_a_data_parallel_of_several_devices_is_refused():
    model = nn.DataParallel(net())
    hog.functional_loss(model, to_itself)
    model.device_ids = [0, 1]
    with pytest.raises(TypeError, match=r"pass `model\.module`"):
        hog.functional_loss(model, to_itself)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Conv1d(5, 2, 1), nn.LSTM(2, 2)])
def test_a_batch_on_the_cpu_for_a_model_on_a_gpu(layer):
    loss = hog.functional_loss(copy.deepcopy(layer).double().cuda(), lambda o, b: o.sum())
    with pytest.raises(ValueError, match=r"on cuda:0, .* on cpu; move .*\.to\('cuda:0'\)"):
        loss({}, X)


class PerExample(nn.Module):
    """A wrapper with hooks for one forward and one backward, as opacus.GradSampleModule has."""

    def __init__(self, model):
        super().__init__()
        self.model, self.inputs, self.hooks = model, [], []
        for layer in model:
            for p in layer.parameters():
                p.calls = 0
            self.hooks += [
                layer.register_forward_hook(self.keep),
                layer.register_full_backward_hook(self.use),
            ]

    def forward(self, x):
        return self.model(x)

    def keep(self, layer, args, output):
        self.inputs.append(args[0])
        for p in layer.parameters():
            p.calls += 1

    def use(self, layer, grad_inputs, grad_outputs):
        self.inputs.pop()

    def disable_hooks(self):
        for hook in self.hooks:
            hook.remove()


TURN_OFF = r"`disable_hooks\(\)` of the PerExample before"


def test_hooks_that_count_passes_on_the_parameters():
    model = PerExample(net().double())
    loss, params = hog.functional_loss(model, mean_square), hog.trainable_params(model)
    with pytest.raises(hog.errors.UnsupportedError, match=f"'calls'.*{TURN_OFF}"):
        hog.hvp(loss, params, params, (X, Y))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # not the hooks'
        hog.hvp(loss, params, params, (X[:, :1], Y))
    model.disable_hooks()
    hog.hvp(loss, params, params, (X, Y))


def test_other_values_for_parameters_that_a_call_is_not_given():
    model = nn.Linear(2, 1).requires_grad_(False)
    given = {"weight": torch.ones(1, 2)}
    at, batch = {"bias": torch.full((1,), 3.0)}, (torch.ones(4, 2), torch.zeros(4, 1))
    batch64 = [x.double() for x in batch]
    loss = hog.functional_loss(model, F.mse_loss)
    assert loss.with_parameters(at)(given, batch) == 25
    assert loss.with_parameters(at)({**given, "bias": torch.zeros(1)}, batch) == 4
    in_double = loss.with_parameters(at).double()({"weight": given["weight"].double()}, batch64)
    assert in_double.dtype == torch.float64
    assert in_double == 25


def _ones(params):
    return {name: torch.ones_like(p) for name, p in params.items()}


# Each makes what it needs of a loss, parameters and a batch, and returns a call that derives.
DERIVATIVES = {
    "hvp": lambda loss, p, b: lambda: hog.hvp(loss, p, _ones(p), b),
    "ggn_vp": lambda loss, p, b: lambda: hog.ggn_vp(loss, p, _ones(p), b),
    "per_example_gradients": lambda loss, p, b: lambda: hog.per_example_gradients(loss, p, b),
    "HessianOperator": lambda loss, p, b: partial(lambda H: H @ _ones(p), hog.HessianOperator(loss, p, [b, b])),
    "GGNOperator": lambda loss, p, b: hog.GGNOperator(loss, p, b).gradient,
    "KFACOperator": lambda loss, p, b: hog.KFACOperator(loss, p, b).update,
}  # fmt: skip


def _assigned(model, params):
    model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)


def _loaded(model, params):
    model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})


def _made_anew(model, params):
    _assigned(model, params)
    params.update(hog.trainable_params(model))


def _of_another(model, params):
    params.update(hog.trainable_params(copy.deepcopy(model)))


CHANGES = {
    "other parameters in the model": (_assigned, True),
    "one other module": (lambda model, params: model.__setitem__(0, nn.Linear(3, 4)), True),
    "other values": (_loaded, False),
    "parameters made anew": (_made_anew, False),
    "parameters of a copy": (_of_another, False),
    "nothing": (lambda model, params: None, False),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_the_model_has_no_longer_are_told(name, change, recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    derive = DERIVATIVES[name](loss, params, (torch.randn(5, 3), torch.randn(5, 2)))
    derive()
    assert not recwarn
    make, told = CHANGES[change]
    make(model, params)
    derive()
    texts = [str(one.message) for one in recwarn]
    assert ["params['0.weight'] was the model's parameter" in text for text in texts] == [
        True
    ] * told


class Centred(nn.Module):
    """A criterion with a running mean of the outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(2))

    def forward(self, outputs, targets):
        self.mean.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return (outputs - targets - self.mean).square().mean()


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_buffers_of_a_criterion_stay_as_they_are(mode):
    model, criterion = nn.Linear(3, 2), Centred()
    loss, params = hog.functional_loss(model, criterion), hog.trainable_params(model)
    batch = torch.randn(4, 3), torch.randn(4, 2)
    hog.hvp(loss, params, params, batch, mode=mode)
    hog.GGNOperator(loss, params, batch) @ params
    assert torch.equal(criterion.mean, torch.ones(2))
