"""The monitor: numbers of dense Hessians, a fit that is as without it, resumed fits, errors."""

import copy
import random
import traceback
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib.curvature import hessian_spectrum
from hoglib.errors import HoglibError
from hoglib.lightning import CurvatureMonitor
from tests.curvature.problems import nested_to_matrix
from tests.lightning.trainers import QUIET, state, trainer
from tests.rows import rows
from tests.several_processes import found_by_each

pytestmark = QUIET
SMALL = {"num_samples": 3, "steps": 10}


class Recorded(Logger):
    name, version = "recorded", 0

    def __init__(self):
        super().__init__()
        self.rows, self.images = [], []

    def log_hyperparams(self, *args):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_image(self, key, images, step):
        self.images.append((key, step, images[0].dtype, images[0].std() > 0, images[0].shape[2]))

    def curvature(self):
        return [(s, m) for s, m in self.rows if any(k.startswith("curvature") for k in m)]


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Training(pl.LightningModule):
    """Regression with noise of three generators, dropout and batch norm."""

    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 1)
        )
        self.automatic_optimization = not manual
        self.losses = []

    def second_order_problem(self, batch):
        """Runs the model, whose random numbers and statistics stay as they were."""
        x, y = batch
        random.random(), np.random.rand()
        with torch.no_grad():
            self.net(torch.randn(4, 3).to(x))
        quiet = copy.deepcopy(self.net).eval()
        return hog.functional_loss(quiet, F.mse_loss), hog.trainable_params(self.net), (x, y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = random.random() + np.random.rand() + torch.rand(())
        loss = F.mse_loss(self.net(x + noise.to(x)), y)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean(), batch_size=4)

    def configure_optimizers(self):
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        first, *rest = self.net.parameters()
        return [torch.optim.SGD([first], lr=0.05), torch.optim.SGD(rest, lr=0.01)]


class Quiet(Training):
    """Without anything at random, in float64."""

    def __init__(self, act=nn.Tanh):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), act(), nn.Linear(4, 1)).double()
        self.seen = []

    def second_order_problem(self, batch):
        x, y = batch
        params = hog.trainable_params(self.net)
        self.seen.append(({k: v.detach().clone() for k, v in params.items()}, (x, y)))
        return hog.functional_loss(self.net, F.mse_loss), params, (x, y)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])


def data(dtype=torch.float32, count=16):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [(x[i], x[i].sum(0, keepdim=True) ** 2) for i in range(count)]


def pair(rows):
    return Batch(*map(torch.stack, zip(*rows, strict=True)))


def loader(dtype=torch.float32, kind=pair, shuffle=True):
    return torch.utils.data.DataLoader(data(dtype), batch_size=4, shuffle=shuffle, collate_fn=kind)


def fit(folder, callbacks, module, checkpoint=None, batches=None, logger=False, **options):
    pl.seed_everything(3, verbose=False)
    saves = any(isinstance(one, pl.callbacks.Checkpoint) for one in callbacks)
    options = {"max_epochs": 2, "enable_checkpointing": saves, "logger": logger, **options}
    own = trainer(folder, callbacks, **options)
    dtype = next(module.parameters()).dtype
    batches = loader(dtype) if batches is None else batches
    own.fit(module, batches, loader(dtype, shuffle=False), ckpt_path=checkpoint, weights_only=True)
    return own


def same_history(ours, theirs):
    assert [(one.batch, one.name) for one in ours] == [(one.batch, one.name) for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.values() == other.values()
        assert one.spectrum._replace(density=None, smallest=None, largest=None) == (
            other.spectrum._replace(density=None, smallest=None, largest=None)
        )
        assert torch.equal(one.spectrum.largest, other.spectrum.largest)
        assert torch.equal(one.spectrum.smallest, other.spectrum.smallest)
        for name, value in one.spectrum.density._asdict().items():
            assert_close(value, getattr(other.spectrum.density, name), rtol=0, atol=0)


def dense(params, batch):
    """Eigenvalues by torch.func alone."""

    def loss(params):
        w, b, v, c = params.values()
        return F.mse_loss(F.linear(F.linear(batch[0], w, b).tanh(), v, c), batch[1])

    return torch.linalg.eigvalsh(nested_to_matrix(torch.func.hessian(loss)(params), params))


@pytest.mark.parametrize("fixed", [True, False])
def test_the_numbers_are_those_of_dense_hessians(fixed, tmp_path):
    module, logger = Quiet(), Recorded()
    options = {"num_samples": 30, "steps": 21, "critical": fixed, "images": fixed}
    callback = CurvatureMonitor(every=3, k=2, fixed_batch=fixed, **options)
    fit(tmp_path, [callback], module, logger=logger, log_every_n_steps=1000)
    assert [one.batch for one in callback.history] == [0, 3, 6, 8]
    rows = logger.curvature()
    assert [step for step, _ in rows] == [0, 3, 6, 8]
    drawn = [("curvature/spectrum", step, np.uint8, True, 3) for step, _ in rows]
    assert logger.images == (drawn if fixed else [])
    assert len(module.seen) == 4
    firsts = [batch[0][0] for _, batch in module.seen]
    assert all(torch.equal(firsts[0], x) for x in firsts) == fixed
    for one, (_, row), (params, batch) in zip(callback.history, rows, module.seen, strict=True):
        exact = dense(params, batch)
        assert_close(one.spectrum.largest, exact[-2:])
        assert_close(one.spectrum.smallest, exact[:2])
        trace, error = one.spectrum.trace
        assert abs(trace - float(exact.sum())) < 4 * error
        expected = {
            "curvature/largest": pytest.approx(float(exact[-1])), "curvature/smallest": pytest.approx(float(exact[0])),
            "curvature/trace": trace, "curvature/trace_error": error,
            "curvature/edge": pytest.approx(0.05 * float(exact[-1]) / 1.9),  # with a momentum of 0.9
            **({"curvature/critical": one.critical} if fixed else {}),
        }  # fmt: skip
        assert row == one.values() == expected
    assert not torch.equal(module.seen[0][0]["0.weight"], module.seen[1][0]["0.weight"])


def test_random_vectors_belong_to_the_seed_and_the_batch(tmp_path):
    class Still(Quiet):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    found = []
    for seed in (0, 0, 1):
        callback = CurvatureMonitor(every=4, seed=seed, **SMALL)
        fit(tmp_path, [callback], Still(), max_epochs=1)
        found.append(callback.history)
    same_history(found[0], found[1])
    first, last = found[0]
    assert first.spectrum.trace != found[2][0].spectrum.trace
    assert_close(first.spectrum.largest, last.spectrum.largest)
    assert first.spectrum.trace != last.spectrum.trace


# Of the trainer and the module, and the batches after which there is a measurement
WAYS = {
    "plain": ({}, {}, [0, 3, 6, 8]),
    "accumulation": ({"accumulate_grad_batches": 3}, {}, [0, 3, 6, 8]),
    "two optimizers by hand": ({}, {"manual": True}, [0, 3, 6, 8]),
    "some batches": ({"limit_train_batches": 2}, {}, [0, 3, 4]),
    "no batches": ({"limit_train_batches": 0}, {}, []),
    "max_steps": ({"max_steps": 5}, {}, [0, 3, 5]),
    "fast_dev_run": ({"fast_dev_run": True}, {}, [0, 1]),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {}, [0, 3, 6, 8]),
    "64-true": ({"precision": "64-true"}, {}, [0, 3, 6, 8]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fit_with_it_is_the_fit_without_it(way, tmp_path):
    options, of_module, expected = WAYS[way]
    runs = []
    callback = CurvatureMonitor(every=3, **SMALL)
    for callbacks in ([], [callback]):
        module = Training(**of_module)
        fit(tmp_path, callbacks, module, **options)
        module.losses.append((random.random(), np.random.rand(), torch.rand(()).item()))
        runs.append(module)
    without, with_it = runs
    assert without.losses == with_it.losses
    assert_close(state(with_it), state(without), rtol=0, atol=0)
    for (name, ours), theirs in zip(with_it.named_parameters(), without.parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad, name
        assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert [m.training for m in with_it.modules()] == [m.training for m in without.modules()]
    assert [one.batch for one in callback.history] == expected


# Of the trainer, and the batches after which every second epoch of 4 batches has ended
EPOCHS = {
    "plain": ({}, [0, 8, 16, 20]),
    "accumulation": ({"accumulate_grad_batches": 3}, [0, 8, 16, 20]),
    "some batches": ({"limit_train_batches": 3}, [0, 6, 12, 15]),
    "max_steps": ({"max_steps": 10}, [0, 8, 10]),
}


class Unsized:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize("way", EPOCHS)
@pytest.mark.parametrize("sized", [True, False])
def test_every_n_epochs_counts_epochs(way, sized, tmp_path):
    options, expected = EPOCHS[way]
    callback, logger = CurvatureMonitor(every_n_epochs=2, **SMALL), Recorded()
    batches = [pair(data(torch.float64)[i : i + 2]) for i in range(0, 8, 2)]
    batches = torch.utils.data.DataLoader(batches, batch_size=None) if sized else Unsized(batches)
    fit(tmp_path, [callback], Quiet(), None, batches, logger, **{"max_epochs": 5, **options})
    assert [one.batch for one in callback.history] == expected
    assert len(logger.curvature()) == len(expected)


@pytest.mark.parametrize("at", [3, 6, 7, 9, 12])
@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch.*")
def test_a_fit_that_is_measured_by_epochs_resumes_at_any_batch(at, tmp_path):
    def run(checkpoint=None, *callbacks):
        own, logger = CurvatureMonitor(every_n_epochs=2, **SMALL), Recorded()
        batches = Positioned([pair(data(torch.float64)[i : i + 4]) for i in range(0, 12, 4)])
        fit(tmp_path, [own, *callbacks], Quiet(), checkpoint, batches, logger, max_epochs=5)
        return own.history, logger.curvature()

    path = tmp_path / "some.ckpt"
    whole, logged = run(None, SaveInTheMiddle(path, at))
    assert [one.batch for one in whole] == [step for step, _ in logged] == [0, 6, 12, 15]
    history, later = run(path)
    same_history(history, whole)
    assert later == [row for row in logged if row[0] >= at]


def test_a_problem_may_be_a_loader(tmp_path):
    """H is then of the mean over all of it, whose last batch is smaller."""
    whole = pair(data(torch.float64)[:10])

    class OfTheData(Quiet):
        def second_order_problem(self, batch):
            loss, params, _ = super().second_order_problem(batch)
            self.seen.clear()
            rows = torch.utils.data.TensorDataset(*whole)
            return loss, params, torch.utils.data.DataLoader(rows, batch_size=4)

    callback, module = CurvatureMonitor(every=100, **SMALL), OfTheData()
    fit(tmp_path, [callback], module, max_epochs=1)
    exact = dense(hog.trainable_params(module.net), whole)
    assert float(callback.history[-1].spectrum.largest[-1]) == pytest.approx(float(exact[-1]))


def test_loggers_count_as_lightning_does(tmp_path):
    logger = Recorded()
    fit(
        tmp_path, [CurvatureMonitor(every=4, **SMALL)], Training(), logger=logger,
        accumulate_grad_batches=2, max_epochs=2,
    )  # fmt: skip
    assert [step for step, _ in logger.curvature()] == [0, 2, 4]


class SaveInTheMiddle(pl.callbacks.Checkpoint):
    """As ModelCheckpoint: after the hooks of all other callbacks."""

    def __init__(self, path, at):
        super().__init__()
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch.*")
def test_a_fit_resumes_at_any_batch(fixed, at, tmp_path):
    def run(checkpoint=None, *callbacks):
        own, logger = CurvatureMonitor(every=2, fixed_batch=fixed, **SMALL), Recorded()
        batches = Positioned([pair(data(torch.float64)[i : i + 4]) for i in range(0, 12, 2)])
        fit(tmp_path, [own, *callbacks], Quiet(), checkpoint, batches, logger, max_epochs=1)
        return own.history, logger.curvature()

    path = tmp_path / "some.ckpt"
    whole, logged = run(None, SaveInTheMiddle(path, at))
    assert [one.batch for one in whole] == [step for step, _ in logged] == [0, 2, 4, 6]
    kept = torch.load(path, weights_only=True)["callbacks"]
    assert [one["batch"] for one in kept["CurvatureMonitor"]["history"]] == [*range(0, at + 1, 2)]
    history, later = run(path)
    same_history(history, whole)
    assert later == [row for row in logged if row[0] >= at]


class Positioned:
    """A loader that knows where it is."""

    def __init__(self, batches):
        self.batches, self.position = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_another_fit_starts_anew(tmp_path):
    callback = CurvatureMonitor(every=100, **SMALL)
    first = fit(tmp_path, [callback], Training(), max_epochs=1)
    assert [one.batch for one in callback.history] == [0, 4]
    assert first.fit_loop.epoch_loop.total_batch_idx == 3
    fit(tmp_path, [callback], Quiet(), max_epochs=1)
    assert [(one.batch, one.spectrum.size) for one in callback.history] == [(0, 21), (4, 21)]


def test_a_checkpoint_with_other_batches_is_explained(tmp_path):
    trainer = fit(tmp_path, [CurvatureMonitor(**SMALL)], Quiet(), max_epochs=1)
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)

    def as_triple(rows):
        return (*map(torch.stack, zip(*rows, strict=True)), torch.zeros(1))

    words = r"holds, with tensors at x, y, got one with \[0\]"
    with pytest.raises(ValueError, match=words) as caught:
        fit(
            tmp_path, [CurvatureMonitor(**SMALL)], Quiet(), path,
            loader(torch.float64, as_triple), max_epochs=2,
        )  # fmt: skip
    assert isinstance(caught.value, HoglibError)


def test_batches_that_no_checkpoint_holds_are_explained(tmp_path):
    class Anything:
        def __init__(self, rows):
            self.parts = [*map(torch.stack, zip(*rows, strict=True))]

        def __iter__(self):
            return iter(self.parts)

        def __getitem__(self, index):
            return self.parts[index]

    batches = loader(torch.float64, Anything)
    with pytest.raises(TypeError, match=r"expected a batch of tensors.*fixed_batch=False"):
        fit(tmp_path, [CurvatureMonitor(**SMALL)], Quiet(), None, batches)
    callback = CurvatureMonitor(every=4, fixed_batch=False, **SMALL)
    fit(tmp_path, [callback], Quiet(), None, batches)
    assert len(callback.history) == 3


def test_several_problems(tmp_path):
    class Two(Quiet):
        def second_order_problem(self, batch):
            x, y = batch
            critic, of = hog.trainable_params(self.net), hog.functional_loss(self.net, F.mse_loss)
            size = {"w": torch.ones(3, dtype=torch.float64)}
            return {
                "critic": (of, critic, (x, y)),
                "points": (lambda p, _: (p["w"] ** 2 * torch.arange(1.0, 4)).sum(), size, None),
            }

    callback, logger = CurvatureMonitor(every=8, **SMALL), Recorded()
    fit(tmp_path, [callback], Two(), logger=logger)
    assert [(one.batch, one.name) for one in callback.history] == [
        (0, "critic"), (0, "points"), (8, "critic"), (8, "points"),
    ]  # fmt: skip
    for step, row in logger.curvature():
        assert step in (0, 8)
        assert len(row) == 9
        assert row["curvature[points]/largest"] == pytest.approx(6)
        assert row["curvature[points]/smallest"] == pytest.approx(2)
        assert row["curvature[points]/trace"] == pytest.approx(12)
        assert "curvature[critic]/trace_error" in row


def test_the_largest_can_be_watched(tmp_path):
    stop = EarlyStopping(
        "curvature/largest", divergence_threshold=-1.0, patience=100, check_on_train_epoch_end=True
    )
    logger = Recorded()
    trainer = fit(
        tmp_path, [CurvatureMonitor(every=2, **SMALL), stop], Quiet(), logger=logger,
        log_every_n_steps=1, max_epochs=5,
    )  # fmt: skip
    assert trainer.current_epoch < 5
    assert trainer.callback_metrics["curvature/largest"] > 0
    assert "curvature/largest" in trainer.progress_bar_metrics
    assert len(logger.curvature()) == 3  # and not once more by Lightning


OPTIMIZERS = {
    "SGD with weight decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), lambda largest: 0.1 * (largest + 0.5)),
    "Nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True), lambda largest: 0.1 * largest * 2 / 1.5),
    "dampening": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, dampening=0.2), lambda largest: 0.1 * 0.8 * largest / 1.5),
    "dampening of no momentum": (lambda p: torch.optim.SGD(p, lr=0.1, dampening=0.2), lambda largest: 0.1 * largest),
    "Adam": (torch.optim.Adam, None),
    "two learning rates": (lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 * (i + 1)} for i, q in enumerate(p)]), None),
    "some of them": (lambda p: torch.optim.SGD([*p][:2], lr=0.1), None),
}  # fmt: skip


@rows("name", OPTIMIZERS)
def test_the_edge_of_stability_belongs_to_gradient_descent(name, tmp_path):
    make, edge = OPTIMIZERS[name]
    callback, module = CurvatureMonitor(every=100, **SMALL), Quiet()
    module.configure_optimizers = lambda: make(module.net.parameters())
    fit(tmp_path, [callback], module, max_epochs=1)
    one = callback.history[0]
    assert one.edge == (edge and pytest.approx(edge(float(one.spectrum.largest[-1]))))


def test_a_measurement_that_takes_too_long_makes_the_next_ones_rarer(tmp_path, monkeypatch):
    clock = iter([0.0, 2.5, 3.0, 3.1, 4.0, 4.1, 5.0, 5.1])  # one of 2.5 seconds, then short ones
    monkeypatch.setattr("hoglib.lightning.curvature.monotonic", lambda: next(clock))
    callback = CurvatureMonitor(every=1, max_seconds=1.0, **SMALL)
    with pytest.warns(UserWarning, match="got one of 2.5: the next ones are 3 batches apart"):
        fit(tmp_path, [callback], Quiet())
    assert [one.batch for one in callback.history] == [0, 3, 6, 8]
    assert callback.state_dict()["rarer"] == 3
    unlimited = CurvatureMonitor(every=1, **SMALL)
    unlimited.load_state_dict(callback.state_dict())
    assert unlimited.state_dict()["rarer"] == 1


def test_a_loss_at_random_is_refused_with_a_way_out(tmp_path):
    class Noisy(Training):
        def second_order_problem(self, batch):
            return hog.functional_loss(self.net, F.mse_loss), hog.trainable_params(self.net), (
                batch[0], batch[1],
            )  # fmt: skip

    module = Noisy()
    with pytest.raises(RuntimeError, match=r"3 \(Dropout\)") as caught:
        fit(tmp_path, [CurvatureMonitor(**SMALL)], module)
    assert module.losses == []
    assert isinstance(caught.value, HoglibError)
    text = str(caught.value)
    assert "CurvatureMonitor, Noisy.second_order_problem after 0 batches" in text
    assert "check_deterministic" not in text  # an option of operators
    _, _, example = text.partition("\n\n")
    scope = {"hoglib": hog, "torch": torch, "copy": copy}
    exec(f"class Example:\n{example}", scope)
    example = scope["Example"].second_order_problem
    Noisy.second_order_problem = lambda self, batch: example(self, tuple(batch))
    fit(tmp_path, [CurvatureMonitor(**SMALL)], Noisy())


def test_a_diverged_training_is_reported(tmp_path):
    class Diverges(Quiet):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e200)

    words = "CurvatureMonitor, .*after [1-4] batch.*lower the"
    with pytest.raises(FloatingPointError, match=words):
        fit(tmp_path, [CurvatureMonitor(every=1, **SMALL)], Diverges(nn.Identity))


def test_what_does_not_converge_is_taken_from_the_density(tmp_path):
    net = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 4)).double()
    batch = torch.randn(64, 8).double(), torch.randn(64, 4).double()
    problem = hog.functional_loss(net, F.mse_loss), hog.trainable_params(net), batch
    exact = torch.linalg.eigvalsh(hog.HessianOperator(*problem).to_dense())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hoglib.curvature.algebra.eigenvalues.CHEAP", 0)
        with pytest.warns(UserWarning, match=r"eigsh: expected 4 .*taken from the Lanczos steps"):
            found = hessian_spectrum(*problem, k=2, num_samples=3, steps=60, max_iter=1)
        with pytest.raises(RuntimeError, match="eigsh: expected 4 eigenvalues"):
            hessian_spectrum(*problem, k=2, num_samples=3, steps=3, max_iter=1)
    assert_close(found.largest, exact[-2:], rtol=1e-2, atol=0)
    assert (found.largest <= exact[-2:] + 1e-9).all()
    assert (found.smallest >= exact[:2] - 1e-9).all()


def test_before_the_first_step(tmp_path):
    module, words = Quiet(), "k: expected at most 10, half of the 21 parameters, got 11"
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, [CurvatureMonitor(k=11)], module)
    raising = Training()
    raising.second_order_problem = lambda batch: 1 / 0
    with pytest.raises(ValueError, match="got ZeroDivisionError"):
        fit(tmp_path, [CurvatureMonitor()], raising)
    assert raising.losses == []


@pytest.mark.parametrize(
    "option",
    [
        {"every": 0}, {"every_n_epochs": 0}, {"every_n_epochs": 1, "every": 100}, {"every_n_steps": 10}, {"k": 0}, {"num_samples": 0}, {"steps": 0}, {"fixed_batch": 1},
        {"stand_ins": None}, {"max_iter": 0}, {"seed": -1}, {"every": 2.5}, {"max_seconds": 0},
    ],
    ids=str,
)  # fmt: skip
def test_errors(option):
    with pytest.raises((ValueError, TypeError), match=next(iter(option))) as caught:
        CurvatureMonitor(**option)
    assert isinstance(caught.value, HoglibError)


# In two processes, with the mean over both of their batches


def in_a_process(rank, folder, found):
    options = {"critical": True, "max_seconds": 100.0, **SMALL}
    module, callback, logger = Quiet(), CurvatureMonitor(every=2, **options), Recorded()
    try:
        trainer = fit(
            folder, [callback], module, logger=logger, devices=2, strategy="ddp", max_epochs=1
        )
        params, (x, y) = module.seen[0]
        found["x"], found["y"] = x.tolist(), y.tolist()
        found["params"] = {name: p.tolist() for name, p in params.items()}
        found["largest"] = [float(one.spectrum.largest[-1]) for one in callback.history]
        found["batches"] = [one.batch for one in callback.history]
        found["critical"] = callback.history[0].critical
        found["rows"] = len(logger.curvature())
        path = folder / "some.ckpt"
        trainer.save_checkpoint(path)
        dist.barrier()
        resumed = Quiet()  # each process has its own fixed batch again
        fit(folder, [CurvatureMonitor(every=2, **SMALL)], resumed, path, devices=2, strategy="ddp")
        found["resumed"] = all(torch.equal(x, batch[0]) for _, (batch) in resumed.seen)
        found["error"] = ""
    except Exception:
        found["error"] = traceback.format_exc()


def test_two_processes_measure_the_mean_of_both(tmp_path):
    first, second = found_by_each(in_a_process, tmp_path)
    assert (first["error"], second["error"]) == ("", "")
    assert first["largest"] == pytest.approx(second["largest"], rel=1e-12)
    assert first["batches"] == [0, 2]
    assert (first["rows"], second["rows"]) == (2, 0)
    assert first["x"] != second["x"]
    both = [torch.tensor([*first[key], *second[key]], dtype=torch.float64) for key in "xy"]
    params = {k: torch.tensor(v, dtype=torch.float64) for k, v in first["params"].items()}
    assert first["largest"][0] == pytest.approx(float(dense(params, both)[-1]))
    loss = hog.functional_loss(Quiet().net, F.mse_loss)
    assert first["critical"] == pytest.approx(hog.critical_sharpness(loss, params, both).value)
    assert first["resumed"]
    assert second["resumed"]
