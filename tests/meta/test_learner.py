"""What an inner loop can be made of: rates, losses, rules, parts that adapt, batches of any kind."""

import copy
import functools
import pickle
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import hoglib as hog
from tests.meta.networks import Scaled, as_list, image_tasks, meta_gradient, network
from tests.models import Fn, Sample
from tests.oracles import random_like, relative
from tests.refused import refused
from tests.rows import rows
from tests.tensors import randn as rand

MEMORY = ["store", "remat", "checkpoint", "mixed"]
MAPPED = pytest.mark.parametrize("over_tasks", ["loop", "vmap"])


class Learned(nn.Module):
    """An inner loss with parameters."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Softplus(), nn.Linear(3, 1)).double()

    def forward(self, outputs, targets):
        return self.net(outputs - targets).square().mean()


class LearnedRule(nn.Module):
    """A rule with parameters: a step size and a decay."""

    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.tensor(0.05, dtype=torch.float64))
        self.decay = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def init(self, params):
        return {name: torch.zeros_like(p) for name, p in params.items()}

    def update(self, params, grads, state):
        state = {name: 0.5 * state[name] + grads[name] for name in params}
        new = {n: p * (1 - self.decay) - self.size * state[n] for n, p in params.items()}
        return new, state


class RuleOfRate(nn.Module):
    """A rule with a parameter, as a function of the learning rate."""

    def __init__(self):
        super().__init__()
        self.mu = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, lr):
        return hog.meta.sgd(lr, momentum=self.mu)


class Step(NamedTuple):
    """What a step by hand is given; state: of the step before, {} in the first."""

    model: nn.Module
    learned: dict
    params: dict
    state: dict
    support: tuple
    i: int

    def gradients(self, loss=F.mse_loss, names=None):
        """By plain autograd, of the parameters of these names."""
        x, y = self.support
        names = list(self.params) if names is None else names
        value = loss(functional_call(self.model, self.params, (x,)), y)
        own = [self.params[n] for n in names]
        return dict(zip(names, torch.autograd.grad(value, own, create_graph=True), strict=True))


def descend(at, g, rate=0.05):
    return {n: p - rate * g[n] if n in g else p for n, p in at.params.items()}, {}


def of_rates(of, per_step, constant=False):
    def step(at):
        rates = {n: at.learned[RATES[of](n)] for n in at.params}
        rates = {n: rate[at.i] if per_step else rate for n, rate in rates.items()}
        g = {n: x.detach() if constant else x for n, x in at.gradients().items()}
        return {n: p - rates[n] * g[n] for n, p in at.params.items()}, {}

    return step


def of_first_order(at):
    return descend(at, {n: g.detach() for n, g in at.gradients().items()})


def of_learned_loss(at):
    own = {n.removeprefix("inner_loss."): p for n, p in at.learned.items() if "inner_loss." in n}
    return descend(at, at.gradients(lambda *given: functional_call(LOSS, own, given)))


def of_learned_rule(at):
    g = at.gradients()
    state = {n: 0.5 * at.state[n] + g[n] if at.state else g[n] for n in g}
    size, decay = at.learned["rule.size"], at.learned["rule.decay"]
    return {n: p * (1 - decay) - size * state[n] for n, p in at.params.items()}, state


def of_learned_momentum(at):
    g = at.gradients()
    state = {n: at.learned["rule.mu"] * at.state[n] + g[n] if at.state else g[n] for n in g}
    return descend(at, state)[0], state


def of_the_head(at):
    return descend(at, at.gradients(names=["4.weight", "4.bias"]))


def truncated(rule):
    def step(at):  # the steps before the last two are taken at face value
        g = {n: x.detach() if at.i < 1 else x for n, x in at.gradients().items()}
        return rule.update(at.params, g, at.state or rule.init(at.params))

    return step


RATES = {
    "model": lambda name: "rates.values.model",
    "layer": lambda name: f"rates.values.{name.rpartition('.')[0]}",
    "parameter": lambda name: f"rates.values.{name.replace('.', '/')}",
    "element": lambda name: f"rates.values.{name.replace('.', '/')}",
}
LOSS, WEIGHTS = Learned(), [0.5, 0.0, 0.5]
BY_HAND = {
    **{f"a rate for each {of}": ({"learn_lr": of}, of_rates(of, False)) for of in RATES},
    **{f"a rate for each {of} and step": ({"learn_lr": of, "lr_per_step": True}, of_rates(of, True)) for of in RATES},
    "rates, first order": ({"learn_lr": "parameter", "first_order": True}, of_rates("parameter", False, True)),
    "first order": ({"first_order": True}, of_first_order),
    "an inner loss": ({"inner_loss": LOSS}, of_learned_loss),
    "a rule": ({"rule": LearnedRule()}, of_learned_rule),
    "a rule of the rate": ({"rule": RuleOfRate()}, of_learned_momentum),
    "the head adapts": ({"inner_params": ["4"]}, of_the_head),
    "losses after steps": ({"step_weights": WEIGHTS}, lambda at: descend(at, at.gradients())),
    "truncated": ({"truncate": 2}, truncated(hog.meta.sgd(0.05))),
    "truncated, adam": (
        {"truncate": 2, "rule": "adam", "rule_options": {"eps": 0.1}}, truncated(hog.meta.adam(0.05, eps=0.1)),
    ),
}  # fmt: skip


# Of each memory a way over the tasks, in turn
WAYS = [(memory, ("loop", "vmap")[i % 2]) for i, memory in enumerate(MEMORY)]


@pytest.mark.parametrize(("memory", "over_tasks"), [*WAYS, (MEMORY[0], "vmap")])
@pytest.mark.parametrize("case", BY_HAND)
def test_what_is_learned_by_hand(case, memory, over_tasks):
    """The meta-gradient of everything, by torch's own backward through steps that are written here."""
    options, step = BY_HAND[case]
    tasks, model = image_tasks(), network("LayerNorm")
    maml = hog.MAML(
        model, F.mse_loss, inner_lr=0.05, inner_steps=3, memory=memory, over_tasks=over_tasks, **options
    )  # fmt: skip
    torch.manual_seed(0)
    for rate in [] if maml.rates is None else maml.rates.parameters():
        with torch.no_grad():
            rate.mul_(1 + 0.2 * torch.rand_like(rate))
    learned = {n: p.detach().clone().requires_grad_() for n, p in maml.named_parameters()}
    value = 0.0
    for support, (x, y) in as_list(tasks):
        params = {n.removeprefix("model."): p for n, p in learned.items() if n.startswith("model.")}
        state = {}
        for i, weight in enumerate(options.get("step_weights", [0, 0, 1])):
            params, state = step(Step(model, learned, params, state, support, i))
            value = value + weight * F.mse_loss(functional_call(model, params, (x,)), y) / 2
    grads = torch.autograd.grad(value, list(learned.values()), materialize_grads=True)
    expected = dict(zip(learned, grads, strict=True))
    assert abs(maml.loss(tasks).detach() - value) < 1e-12
    ours = meta_gradient(maml, tasks)
    assert relative([ours[n] for n in expected], list(expected.values())) < 1e-12
    flat = "inner_loss.net.2.bias"  # of a loss of differences alone
    assert all(g.abs().sum() > 0 for n, g in expected.items() if "model" not in n and n != flat)


HEADS = {
    "prefix": ["4"],
    "one name": "4",
    "names": ["4.weight", "4.bias"],
    "predicate": lambda name, p: name.startswith("4") and p.dim() > 0,
}


@pytest.mark.parametrize("head", HEADS)
def test_the_parts_that_adapt(head):
    maml = hog.MAML(network("BatchNorm"), F.mse_loss, inner_params=HEADS[head])
    before = dict(maml.model.named_parameters())
    adapted = maml.adapt(as_list(image_tasks())[0][0])
    assert [n for n in before if not torch.equal(adapted[n], before[n])] == ["4.weight", "4.bias"]


def test_a_tied_parameter_adapts_by_each_of_its_names():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    for head, expected in {"2": ["0.weight", "2.bias"], "2.weight": ["0.weight"]}.items():
        maml = hog.MAML(model, F.mse_loss, inner_params=head)
        adapted = maml.adapt((torch.ones(2, 3), torch.zeros(2, 3)))
        before = dict(model.named_parameters())
        assert [n for n in before if not torch.equal(adapted[n], before[n])] == expected


def test_a_step_of_no_weight_has_no_outer_loss():
    counts = []
    for weights in (None, [0, 0, 1.0]):
        maml = hog.MAML(network("LayerNorm"), F.mse_loss, inner_steps=3, step_weights=weights)
        maml.model.register_forward_hook(lambda *_: counts.append(weights))  # noqa: B023
        maml.loss(as_list(image_tasks())[:1])
    assert counts.count(None) == counts.count([0, 0, 1.0]) > 0


def test_annealed_weights():
    assert hog.meta.multi_step_weights(4, 0, 10) == [0.25] * 4
    assert hog.meta.multi_step_weights(4, 10, 10) == hog.meta.multi_step_weights(4, 99, 10)
    assert hog.meta.multi_step_weights(4, 10, 10) == [0, 0, 0, 1]
    halfway = hog.meta.multi_step_weights(4, 5, 10)
    assert halfway == [0.125] * 3 + [0.625]


# Batches of any kind


class TwoInputs(nn.Linear):
    def forward(self, a, b):
        return super().forward(a) * b


class OfDict(nn.Linear):
    def forward(self, batch):
        return {"out": super().forward(batch["x"]) * batch["scale"]}


class OfPairs(nn.Linear):
    def forward(self, batch):
        return super().forward(batch.x)


# the model, its criterion and forward, and a batch of x, y and a number
KINDS = {
    "several inputs": (TwoInputs, F.mse_loss, None, lambda x, y, n: (x, n, y)),
    "a dict": (
        OfDict, lambda out, batch: F.mse_loss(out["out"], batch["y"]), None, lambda x, y, n: {"x": x, "y": y, "scale": n},
    ),
    "a tensor": (nn.Linear, lambda out, x: F.mse_loss(out, x), None, lambda x, y, n: x),
    "by forward": (
        TwoInputs, lambda out, batch: F.mse_loss(out, batch["y"]), lambda model, batch: model(b=batch["n"], a=batch["x"]),
        lambda x, y, n: {"x": x, "n": n, "y": y},
    ),
    "objects": (OfPairs, lambda out, batch: F.mse_loss(out, batch.y), None, lambda x, y, n: Sample(x, y)),
}  # fmt: skip


@MAPPED
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_kind(kind, memory, over_tasks):
    make, criterion, forward, batch = KINDS[kind]
    torch.manual_seed(0)
    model, numbers = make(2, 2).double(), rand(3)
    one_by_one = [
        tuple(batch(rand(3, k, 2)[i], rand(3, k, 2)[i].cos(), numbers[i]) for k in (4, 5)) for i in range(3)
    ]  # fmt: skip
    options = {"forward": forward, "inner_lr": 0.1, "inner_steps": 2, "memory": memory}
    maml = hog.MAML(model, criterion, over_tasks=over_tasks, **options)
    loss = hog.functional_loss(model, criterion, forward=forward)

    def meta_loss(params):
        values = []
        for support, query in one_by_one:
            theta = params
            for _ in range(2):
                g = torch.func.grad(loss)(theta, support)
                theta = {n: p - 0.1 * g[n] for n, p in theta.items()}
            values.append(loss(theta, query))
        return torch.stack(values).mean()

    params = {n: p.detach() for n, p in model.named_parameters()}
    expected = {f"model.{n}": g for n, g in torch.func.grad(meta_loss)(params).items()}
    if kind != "objects" or over_tasks == "loop":
        assert relative(meta_gradient(maml, one_by_one), expected) < 1e-12
    if kind != "objects":
        collated = torch.utils.data.default_collate(one_by_one)
        assert relative(meta_gradient(maml, collated), expected) < 1e-12


def test_a_list_of_equal_tasks_is_stacked_where_that_pays():
    tasks = [
        (tuple(x[i] for x in s), tuple(x[i] for x in q)) for s, q in [fixed()] for i in range(3)
    ]
    calls = []
    model = nn.Linear(2, 2).double()
    model.register_forward_hook(lambda *a: calls.append(1))
    hog.MAML(model, F.mse_loss).loss(tasks)
    stacked = len(calls)
    calls.clear()
    hog.MAML(model, F.mse_loss, over_tasks="loop").loss(tasks)
    assert len(calls) > stacked


def fixed():
    return (rand(3, 4, 2), rand(3, 4, 2)), (rand(3, 5, 2), rand(3, 5, 2))


# Batch norm


def test_policies_of_batch_norm():
    model = network("BatchNorm")
    model[1].running_mean.fill_(0.3)
    model[1].running_var.fill_(2.0)
    tasks, support = image_tasks(), as_list(image_tasks())[0][0]

    def of(policy, training):
        model.train(training)
        maml = hog.MAML(model, F.mse_loss, inner_lr=0.1, batch_norm=policy)
        return torch.cat([p.reshape(-1) for p in maml.adapt(support).values()])

    by_batch, by_running = of("by_mode", True), of("by_mode", False)
    assert not torch.allclose(by_batch, by_running)
    for training in (True, False):
        assert torch.equal(of("transductive", training), by_batch)
        assert torch.equal(of("frozen", training), by_running)
    state = copy.deepcopy(model.state_dict())
    for policy in ("by_mode", "transductive", "frozen", "per_step"):
        hog.MAML(model.train(), F.mse_loss, batch_norm=policy).loss(tasks).backward()
    assert all(
        torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True)
    )


@MAPPED
@pytest.mark.parametrize("memory", MEMORY)
def test_statistics_per_step(memory, over_tasks):
    tasks, model = image_tasks(), network("BatchNorm")
    maml = hog.MAML(
        model, F.mse_loss, inner_lr=0.1, inner_steps=2, batch_norm="per_step", memory=memory,
        over_tasks=over_tasks,
    )  # fmt: skip
    plain = hog.MAML(model, F.mse_loss, inner_lr=0.1, inner_steps=2, over_tasks=over_tasks)
    assert relative(meta_gradient(maml, tasks), meta_gradient(plain, tasks)) < 1e-12
    mean, var = (maml.statistics.get_buffer(f"{kind}/1") for kind in ("mean", "var"))
    assert mean.shape == var.shape == (3, 3)
    means, variances = torch.zeros_like(mean), torch.zeros_like(var)
    for i in range(3):
        for support, query in as_list(tasks):
            x = (support if i < 2 else query)[0]
            theta = plain.adapt(support, steps=i)
            y = F.conv2d(x, theta["0.weight"], theta["0.bias"], padding=1)
            # with a momentum of 1 torch's running statistics are those of the batch
            of_task = torch.zeros(3).to(y), torch.ones(3).to(y)
            F.batch_norm(y, *of_task, training=True, momentum=1.0)
            means[i] += of_task[0] / len(as_list(tasks))
            variances[i] += of_task[1] / len(as_list(tasks))
    torch.testing.assert_close(mean, 0.1 * means)
    torch.testing.assert_close(var, 0.9 + 0.1 * variances)
    # in eval mode step i normalises by entry i
    model.eval()
    x, support = tasks[1][0][0], as_list(tasks)[0][0]
    maml.statistics.get_buffer("var/1")[2] = 3.0
    adapted = maml.adapt(support)
    twin = copy.deepcopy(model)
    twin[1].running_mean, twin[1].running_var = mean[2].clone(), torch.full((3,), 3.0).double()
    torch.testing.assert_close(maml(x, params=adapted), functional_call(twin, adapted, (x,)))
    again = pickle.loads(pickle.dumps(maml))
    torch.testing.assert_close(again.adapt(support), adapted)
    other = hog.MAML(
        network("BatchNorm"), F.mse_loss, inner_lr=0.1, inner_steps=2, batch_norm="per_step"
    )
    other.load_state_dict(maml.state_dict())
    torch.testing.assert_close(other.eval().adapt(support), adapted)


def test_evaluation_by_initial_statistics_warns():
    maml = hog.MAML(network("BatchNorm"), F.mse_loss)
    tasks = image_tasks()
    maml.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maml.loss(tasks)  # as it was trained elsewhere, for all that is known
        maml.train()
        maml.loss(tasks)
    maml.eval()
    with pytest.warns(UserWarning, match="batch_norm='transductive'"):
        maml.adapt(as_list(tasks)[0][0])


# Errors


def nan_at(step):
    """An inner loss that is NaN in the second task from a step on."""
    tasks = image_tasks()
    lr = {1: 0.05, 3: 1e80}[step]
    if step == 1:
        tasks[0][1][1] = float("nan")
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).double()
    if step == 3:
        tasks[0][0][0].zero_()  # the first task stays where it is, almost
        tasks[0][1][0].zero_()
        nn.init.zeros_(model[1].bias)
        tasks[1][1][0].zero_()
    return hog.MAML(model, F.mse_loss, inner_lr=lr, inner_steps=5), tasks


@MAPPED
@pytest.mark.parametrize("step", [1, 3])
def test_an_inner_loss_that_is_not_finite_names_task_and_step(step, over_tasks):
    maml, tasks = nan_at(step)
    maml.over_tasks = over_tasks
    with pytest.raises(FloatingPointError, match=f"at task 1 of 2, step {step} of 5"):
        maml.loss(tasks)


class Power(nn.Module):
    def __init__(self, exponent):
        super().__init__()
        self.exponent = exponent

    def forward(self, x):
        return x.abs() ** self.exponent


@pytest.mark.parametrize(
    ("exponent", "at"), [(1.5, 0), (0.5, 1)]
)  # in the support set, in the query
def test_a_derivative_that_is_not_finite_is_told_by_its_operation(exponent, at):
    x, y = [torch.ones(3, 2), torch.ones(3, 2)], torch.ones(3, 1)
    x[at].zero_()
    maml = hog.MAML(
        nn.Sequential(nn.Linear(2, 1, bias=False), Power(exponent)), F.mse_loss, inner_lr=0.1
    )
    with pytest.warns(UserWarning, match="MAML: .*first behind Pow at"):
        maml.loss([tuple((points, y) for points in x)])


IDLE = nn.Linear(2, 2).double()
IDLE.idle = nn.Parameter(torch.zeros(2))


def make(**options):
    return lambda: hog.MAML(nn.Linear(2, 2), F.mse_loss, **options)


def of_another_model():
    maml = hog.MAML(network("BatchNorm"), F.mse_loss, batch_norm="per_step")
    maml.model = network("LayerNorm")
    return maml


def from_elsewhere(kind):
    a = nn.Linear(2, 2)
    net = Fn(lambda net, x: net.a(x) @ net.weights[0], a=a, weights=[a.weight])
    return kind(net.double(), F.mse_loss).loss(fixed())


def thawed():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)).double()
    maml = hog.MAML(model, F.mse_loss, learn_lr="parameter")
    model.requires_grad_(True)
    return maml.loss(fixed())


ERRORS = {
    "rates a step of nothing": (make(lr_per_step=True), ValueError, "learn_lr.*got None"),
    "unknown granularity": (make(learn_lr="channel"), ValueError, "model, layer, parameter, element"),
    "rates for a rule that has its own": (make(rule=hog.meta.sgd(0.1), learn_lr="model"), ValueError, "give the function that makes it"),
    "unknown rule": (make(rule="lion"), ValueError, "sgd, momentum, adam, adamw, rmsprop"),
    "rule that is none": (make(rule=lambda lr: lr), TypeError, "hoglib.meta.GradientTransformation"),
    "options of no name": (make(rule=hog.meta.adam, rule_options={"eps": 1}), ValueError, "functools.partial"),
    "a rate for a rule": (make(rule=0.1), TypeError, r"a rule with its rate, got float 0\.1; for instance `rule=hoglib\.meta\.sgd"),
    "an optimizer of torch": (make(rule=torch.optim.SGD), TypeError, "SGD of torch.optim"),
    "no such option": (make(rule="adam", rule_options={"ep": 1}), ValueError, "betas, eps.*got 'ep'"),
    "half a rule": (make(rule=hog.meta.GradientTransformation(None, None)), TypeError, "rule: expected"),
    "negative weight": (make(step_weights=[-1.0]), ValueError, "at least 0"),
    "weights of one number": (make(step_weights=1.0), TypeError, "a list of numbers"),
    "inner loss is a class": (make(inner_loss=nn.MSELoss), TypeError, "inner_loss: .*make one"),
    "no such part": (make(inner_params=["head"]), ValueError, "got 'head'; it has weight, bias"),
    "nothing adapts": (make(inner_params=lambda n, p: False), ValueError, "at least one parameter"),
    "weights of other steps": (make(inner_steps=3, step_weights=[1.0]), ValueError, "expected 3 weights"),
    "no weight": (make(inner_steps=2, step_weights=[0, 0]), ValueError, "not all of them"),
    "truncated below none": (make(truncate=-1), ValueError, "truncate.*at least 0"),
    "unknown policy": (make(batch_norm="batch"), ValueError, "by_mode, transductive, per_step, frozen"),
    "tasks of other sizes by vmap": (lambda: hog.MAML(nn.Linear(2, 2).double(), F.mse_loss, over_tasks="vmap").loss([((rand(2, 2), rand(2, 2)), (rand(2, 2), rand(2, 2))), ((rand(3, 2), rand(3, 2)), (rand(3, 2), rand(3, 2)))]), ValueError, "same shapes"),
    "stacks of other lengths": (lambda: hog.MAML(OfDict(2, 2).double(), lambda o, b: o["out"].mean()).loss(({"x": rand(3, 4, 2), "scale": rand(2)}, {"x": rand(3, 4, 2), "scale": rand(3)})), ValueError, "support: .*leading dimension is that of the tasks"),
    "an inner loss of nothing": (lambda: hog.MAML(nn.Linear(2, 2).double(), F.mse_loss, inner_loss=lambda o, y: o.detach().sum(), over_tasks="loop").loss(fixed()), RuntimeError, "inner loss: .*does not; look for .detach"),
    "an inner loss of nothing, by vmap": (lambda: hog.MAML(nn.Linear(2, 2).double(), lambda o, y: o.detach().sum()).loss(fixed()), RuntimeError, "inner loss: .*does not; look for .detach"),
    "an outer loss of nothing": (lambda: hog.MAML(nn.Linear(2, 2).double(), lambda o, y: o.detach().sum(), inner_loss=F.mse_loss).loss(fixed()), RuntimeError, "outer loss: .*does not; look for .detach"),
    "inner parameters that nothing uses": (lambda: hog.MAML(IDLE, F.mse_loss, inner_params="idle").loss(fixed()), RuntimeError, "parameters that adapt.*that nothing uses"),
    **{f"a parameter from elsewhere, {kind.__name__}": (lambda kind=kind: from_elsewhere(kind), RuntimeError, r"uses a\.weight from elsewhere") for kind in (hog.MAML, hog.meta.Reptile, hog.meta.IMAML)},
    "a layer that thaws, without a learned rate": (thawed, ValueError, "got 0.weight as well"),
    "another rate, where it is learned": (lambda: setattr(make(learn_lr="model")(), "inner_lr", 0.5), ValueError, r"learner\.rates"),
    "statistics of another model": (lambda: of_another_model().loss(image_tasks()), ValueError, "expected the layers 1, got none; make a new learner"),
}  # fmt: skip


test_errors = refused(ERRORS)


def test_random_directions_of_the_whole_kitchen_sink():
    """Everything at once, against differences."""
    maml = hog.MAML(
        network("GroupNorm"), Scaled(), inner_lr=0.02, inner_steps=4, learn_lr="parameter",
        lr_per_step=True, rule="adam", rule_options={"eps": 0.1}, inner_loss=Learned(),
        inner_params=["4", "1"], step_weights=[0.1, 0.2, 0.3, 0.4], memory="checkpoint",
    )  # fmt: skip
    tasks = image_tasks()
    ours = meta_gradient(maml, tasks)
    learned = dict(maml.named_parameters())
    assert set(ours) == set(learned)
    torch.manual_seed(0)
    v = random_like(learned)

    def at(t):
        with torch.no_grad():
            for n, p in learned.items():
                p.add_(t * v[n])
            value = maml.loss(tasks)
            for n, p in learned.items():
                p.sub_(t * v[n])
        return value

    slope = (at(1e-6) - at(-1e-6)) / 2e-6
    along = sum((g * v[n]).sum() for n, g in ours.items())
    assert abs(along - slope) < 1e-6 * abs(slope)


def test_two_tasks_of_single_tensors_are_tasks():
    maml = hog.MAML(nn.Linear(2, 2).double(), F.mse_loss)
    tasks = [(rand(4, 2), rand(4, 2)), (rand(4, 2) + 1, rand(4, 2) - 1)]
    values = [maml.loss([task]).item() for task in tasks]
    with pytest.warns(UserWarning, match="the list as two tasks"):
        assert abs(maml.loss(tasks).item() - sum(values) / 2) < 1e-12
    collated = [torch.stack([s for s, _ in tasks]), torch.stack([q for _, q in tasks])]
    assert abs(maml.loss(collated).item() - sum(values) / 2) < 1e-12


def test_a_tensor_outside_of_modules_warns():
    mu = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    rule = functools.partial(hog.meta.sgd, momentum=mu)
    maml = hog.MAML(network("none"), F.mse_loss, rule=rule, inner_steps=2)
    with pytest.warns(UserWarning, match="gets no gradient from loss"):
        maml.loss(image_tasks())
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    maml = hog.MAML(network("none"), lambda out, y: weight * F.mse_loss(out, y))
    with pytest.warns(UserWarning, match="a float64 tensor of shape"):
        maml.loss(image_tasks())


CHANGES = {
    "first_order": ("no", TypeError), "memory": ("disk", ValueError), "inner_steps": (0, ValueError),
    "batch_norm": ("per_step", ValueError), "truncate": ("no", TypeError), "inner_lr": (-1.0, ValueError),
    "over_tasks": ("map", ValueError), "inner_params": (3, TypeError), "rule_options": ([1], TypeError),
    "stand_ins": (1, TypeError), "step_weights": ([-1.0], ValueError),
}  # fmt: skip


@rows("name", CHANGES)
def test_options_are_checked_when_they_change(name):
    value, error = CHANGES[name]
    maml = hog.MAML(nn.Linear(2, 2), F.mse_loss)
    before = getattr(maml, name)
    with pytest.raises(error, match=name):
        setattr(maml, name, value)
    assert getattr(maml, name) is before


class Constrained(nn.Module):
    """Clips its weights in place whenever it runs, as weight-clipping layers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)


def in_place(lr):
    def update(params, grads, state):
        with torch.no_grad():
            for name, p in params.items():
                p.sub_(lr * grads[name])
        return params, state

    return hog.meta.GradientTransformation(lambda params: (), update)


@pytest.mark.filterwarnings("ignore:.*loops over the tasks")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [hog.MAML, hog.meta.Reptile, hog.meta.IMAML])
def test_models_and_rules_that_work_in_place_leave_the_parameters(kind, grad):
    tasks = fixed()
    for model, rule in ((Constrained().double(), "sgd"), (nn.Linear(2, 2).double(), in_place)):
        learner = kind(model, F.mse_loss, rule=rule, inner_lr=0.1, inner_steps=2)
        before = copy.deepcopy(model.state_dict())
        with torch.set_grad_enabled(grad and rule == "sgd"):
            learner.loss(tasks)
            learner.adapt(tuple(x[0] for x in tasks[0]))
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_a_model_that_clips_its_weights_adapts_as_in_training():
    model, (x, y) = Constrained().double(), (rand(4, 2), rand(4, 2))
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(twin(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        adapted = hog.MAML(model, F.mse_loss, inner_lr=0.1, inner_steps=3).adapt((x, y))
    torch.testing.assert_close(adapted, dict(twin.named_parameters()))
