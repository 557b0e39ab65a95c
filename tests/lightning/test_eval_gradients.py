"""Gradients in validate, test and predict: with the mix-in, without it, and what needs none."""

import gc
import weakref
from collections import UserDict
from dataclasses import dataclass

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from hoglib.lightning import EvalGradients
from tests.lightning.trainers import QUIET, trainer

pytestmark = QUIET
LOOPS = ("validate", "test", "predict")
X = torch.linspace(-1, 1, 24).view(8, 3)


def slope(net, x):
    """sum |dnet/dx|^2, by autograd.grad."""
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return g.square().sum()


class Plain(pl.LightningModule):
    """Steps by autograd.grad. Each step returns the slope on its batch; `seen` keeps what callers got."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.seen = []

    def measure(self, batch):
        return slope(self.net, batch)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        value = self.measure(batch)
        self.log("val", value)
        return {"value": value, "number": batch_idx}

    def test_step(self, batch, batch_idx):
        value = self.measure(batch)
        self.log("test", value)
        return value

    def predict_step(self, batch, batch_idx):
        return self.measure(batch)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(outputs["value"])

    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(outputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Net(EvalGradients, Plain):
    """All steps inherited."""


class Heir(Net):
    """Steps of its own that call super()."""

    def validation_step(self, batch, batch_idx):
        found = super().validation_step(batch, batch_idx)
        assert torch.is_grad_enabled()
        assert found["value"].requires_grad
        return found

    def predict_step(self, batch, batch_idx):
        return super().predict_step(batch, batch_idx)


class Other(Plain):
    def test_step(self, batch, batch_idx):
        return 2 * super().test_step(batch, batch_idx)


class Diamond(Heir, Other):
    """Other's step comes before Plain's, as without the mix-in."""


class Decorated(EvalGradients, Plain):
    """Gradients in a step that takes one argument and has a decorator."""

    @torch.no_grad()
    def test_step(self, batch):
        with torch.enable_grad():
            return self.measure(batch)


def loader(data=X, **options):
    return torch.utils.data.DataLoader(data, batch_size=4, **options)


def expected(model):
    return [slope(model.net, batch.clone()).detach() for batch in X.split(4)]


def run(model, loop, own, data=None):
    """What each batch's step returned, as a caller gets it."""
    model.seen.clear()
    returned = getattr(own, loop)(model, loader() if data is None else data)
    return returned if loop == "predict" else model.seen


@pytest.mark.parametrize("kind", [Net, Heir])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("ignore:.*verbose.*")
def test_gradients_in_every_loop(kind, loop, tmp_path, capsys):
    model = kind()
    found = run(model, loop, trainer(tmp_path, max_epochs=1))
    assert_close(found, expected(model))
    assert not any(value.requires_grad or value.is_inference() for value in found)


@pytest.mark.parametrize("loop", LOOPS)
def test_without_it_they_raise(loop, tmp_path):
    with pytest.raises(RuntimeError, match="does not require grad"):
        run(Plain(), loop, trainer(tmp_path, max_epochs=1))


def test_inside_of_a_fit(tmp_path):
    model = Net()
    own = trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0)
    own.fit(model, loader(), loader())
    assert_close(model.seen, expected(model))
    assert not any(value.requires_grad for value in model.seen)
    assert_close(own.callback_metrics["val"], sum(model.seen) / 2)
    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer(tmp_path, max_epochs=1).fit(Plain(), loader(), loader())


@pytest.mark.parametrize(("kind", "times"), [(Diamond, 2), (Decorated, 1)])
def test_the_order_of_classes_is_that_of_python_and_steps_are_decorated(kind, times, tmp_path):
    model = kind()
    found = run(model, "test", trainer(tmp_path, max_epochs=1))
    assert_close(found, [times * value for value in expected(model)])


def test_predict_by_forward(tmp_path):
    class Field(EvalGradients, pl.LightningModule):
        """Lightning's own predict_step, which calls forward."""

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x)[0]

    model = Field()
    found = trainer(tmp_path, max_epochs=1).predict(model, loader())
    assert_close(torch.cat(found), model.net.weight.detach().expand(8, 3))


class OnlyTrains(EvalGradients, pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    training_step = Plain.training_step
    configure_optimizers = Plain.configure_optimizers


def test_no_step_is_made_up(tmp_path):
    """A loop that the module has no step for: the same words as without."""
    own = trainer(tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match="have no `validation_step`. Skipping val loop"):
        own.fit(OnlyTrains(), loader(), loader())
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="test_step"):
        own.test(OnlyTrains(), loader())


def test_by_hand():
    """A caller with gradients enabled gets the graph, any other does not."""
    model = Net()
    value = model.test_step.__wrapped__  # Lightning reads what is below
    assert value is Plain.test_step
    assert model.predict_step(X.clone(), 0).requires_grad
    with torch.no_grad():
        assert not model.predict_step(X.clone(), 0).requires_grad
    with torch.inference_mode():
        inner = X.clone()
        found = model.predict_step(inner, 0)
        assert torch.is_inference_mode_enabled()
        assert inner.is_inference()
    assert_close(found, slope(model.net, X.clone()).detach())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@dataclass(frozen=True, slots=True)
class Sample:
    x: Tensor
    name: str


# How a batch holds x, and how a step takes it out
BATCHES = {
    "tuple": (lambda x: (x, 1), lambda b: b[0]),
    "nested": (lambda x: {"a": [x, None]}, lambda b: b["a"][0]),
    "dataclass": (lambda x: Sample(x, "name"), lambda b: b.x),
    "mapping": (lambda x: UserDict(x=x), lambda b: b["x"]),
    "positional and by name": (lambda x: x, lambda b: b),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_of_every_kind(case):
    make, take = BATCHES[case]

    class Takes(EvalGradients, Plain):
        def predict_step(self, batch, batch_idx=0):
            x = take(batch)
            assert not x.is_inference()
            return make(self.measure(x))

    model = Takes()
    with torch.inference_mode():
        batch = make(X.clone())
        found = take(
            model.predict_step(batch=batch) if "name" in case else model.predict_step(batch)
        )
        assert take(batch).is_inference()  # the caller's stays as it was
    assert_close(found, slope(model.net, X.clone()).detach())
    assert not found.requires_grad


def test_no_graph_outlives_a_step():
    """Also where the module keeps what its trainer gets."""
    model = Net()
    graphs = []

    def measure(batch):
        value = Plain.measure(model, batch)
        mark = set()  # lives as long as the node
        value.grad_fn.metadata["mark"] = mark
        graphs.append(weakref.ref(mark))
        return value

    model.measure = measure
    with torch.inference_mode():
        kept = [model.predict_step(X.clone(), i) for i in range(3)]
    gc.collect()
    assert len(kept) == len(graphs) == 3
    assert all(graph() is None for graph in graphs)
