"""What a captured function reaches besides its arguments is what stands there at each call."""

import gc
import types
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import hoglib as hog
from tests.capture.models import captured, draw

WEIGHT = draw(3)
NUMBER = 2.0
constants = types.ModuleType("constants")
constants.__file__ = __file__
constants.weight = draw(3)


class Holder:
    """Anything with an attribute."""

    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class OnClass:
    value = draw(3)

    def __call__(self, x):
        return x * self.value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(2))
        self.scale = 2.0
        self.double()

    def forward(self, x):
        return self.head(self.body(x)) * self.scale + self.shift * NUMBER


def eager_and_captured(fn, change, graphs):
    """Before and after a change, twice, the graph gives what the function does."""
    fast, x = captured(fn), draw(5, 3)
    assert_close(fast(x), fn(x), rtol=0, atol=0)
    before = fn(x)
    change()
    assert not torch.equal(fn(x), before), "the change changes nothing"
    for _ in range(2):
        assert_close(fast(x), fn(x), rtol=0, atol=0)
    assert len(fast.signatures) == graphs


def set_weight(net, weight):
    net.head.weight = weight


def parametrized(net):
    set_weight(net, nn.Parameter(3 * net.head.weight))
    parametrizations.orthogonal(net.head)


def frozen_and_new(net):
    net.head.weight.requires_grad_(False).mul_(2)


# Changes of a model, and how many graphs there are then.
CHANGES = {
    "in place": (lambda net: net.head.weight.detach().mul_(2), 1),
    "a buffer in place": (lambda net: net.shift.add_(1), 1),
    "by .data": (lambda net: setattr(net.head.weight, "data", draw(2, 4, seed=5)), 1),
    "a new parameter": (lambda net: set_weight(net, nn.Parameter(draw(2, 4, seed=5))), 1),
    "a new buffer": (lambda net: setattr(net, "shift", torch.zeros(2, dtype=torch.float64)), 1),
    "loaded": (lambda net: net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()}, assign=True), 1),
    "a new submodule": (lambda net: setattr(net, "head", nn.Linear(4, 2).double()), 2),
    "a new layer": (lambda net: net.body.append(nn.Tanh()), 2),
    "fewer layers": (lambda net: net.body.__delitem__(1), 2),
    "a layer of another kind": (lambda net: net.body.__setitem__(1, nn.Sigmoid()), 2),
    "parametrized": (parametrized, 2),
    "hooked": (lambda net: net.head.register_forward_hook(lambda module, args, out: 2 * out), 2),
    "another number": (lambda net: setattr(net, "scale", 3.0), 2),
    "without a bias": (lambda net: setattr(net.head, "bias", None), 2),
    "frozen and new": (frozen_and_new, 2),
}  # fmt: skip


@pytest.mark.parametrize(("change", "graphs"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("way", ["the module", "a closure", "a method", "a functional loss"])
def test_a_model_is_as_it_is_now(change, graphs, way):
    net = Net()
    fn = {
        "the module": net,
        "a closure": lambda x: net(x),
        "a method": net.forward,
        "a functional loss": lambda x: loss({}, x),
    }[way]
    loss = hog.functional_loss(net, lambda out, x: out.square().sum(), forward=lambda m, x: m(x))
    eager_and_captured(fn, partial(change, net), graphs)


def test_train_and_eval_mode_have_graphs_of_their_own():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5))).double()
    fast, x = captured(net), draw(5, 3)
    for training in (True, False, True, False):
        net.train(training)
        torch.manual_seed(0)
        result = fast(x)
        torch.manual_seed(0)
        assert_close(result, net(x), rtol=0, atol=0)
    net[2][0].train()
    torch.manual_seed(0)
    result = fast(x)
    torch.manual_seed(0)
    assert_close(result, net(x), rtol=0, atol=0)
    assert len(fast.signatures) == 3


# Places: where a tensor stands; each is (function, change)


def closure():
    weight = draw(3)

    def change():
        nonlocal weight
        weight = draw(3, seed=7)

    return lambda x: x * weight, change


def global_variable():
    return lambda x: x * WEIGHT, lambda: globals().update(
        WEIGHT=draw(3, seed=len(gc.get_objects()))
    )


def of_a_python_module():
    return lambda x: x * constants.weight, lambda: setattr(
        constants, "weight", 2 * constants.weight
    )


def attribute_of_an_attribute():
    held = Holder(Holder(draw(3)))
    return lambda x: x * held.value.value, lambda: setattr(held, "value", Holder(draw(3, seed=7)))


def slot():
    held = Slots(draw(3))
    return lambda x: x * held.value, lambda: setattr(held, "value", draw(3, seed=7))


def attribute_of_a_class():
    return OnClass(), lambda: setattr(OnClass, "value", 2 * OnClass.value)


def item_of_a_dict():
    held = {"a": {"b": draw(3)}}
    return lambda x: x * held["a"]["b"], lambda: held.update(a={"b": draw(3, seed=7)})


def item_of_a_list():
    held = [draw(3), (draw(3), draw(3))]
    return lambda x: x * held[1][1], lambda: held.__setitem__(1, (draw(3), draw(3, seed=7)))


def default():
    def fn(x, *, weight=draw(3)):  # noqa: B008
        return x * weight

    return fn, lambda: fn.__kwdefaults__.update(weight=draw(3, seed=7))


def argument_of_a_partial():
    held = {"weight": draw(3)}
    return partial(lambda held, x: x * held["weight"], held), lambda: held.update(
        weight=draw(3, seed=7)
    )


def of_a_decorated_function():
    inner, change = closure()
    return torch.no_grad()(inner), change


def attribute_of_a_function():
    def fn(x):
        return x * fn.weight

    fn.weight = draw(3)
    return fn, lambda: setattr(fn, "weight", draw(3, seed=7))


def by_a_method_and_a_property():
    class Scaled:
        def __init__(self):
            self._held = {"w": draw(3)}

        @property
        def weight(self):
            return self._held["w"]

        def times(self, x):
            return x * self.weight

    one = Scaled()
    return lambda x: one.times(x), lambda: one._held.update(w=draw(3, seed=7))


PLACES = [
    closure, global_variable, of_a_python_module, attribute_of_an_attribute, slot,
    attribute_of_a_class, item_of_a_dict, item_of_a_list, default, argument_of_a_partial,
    of_a_decorated_function, attribute_of_a_function,
    by_a_method_and_a_property,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=[p.__name__ for p in PLACES])
def test_a_tensor_is_found_where_it_stands_now(place):
    fn, change = place()
    eager_and_captured(fn, change, graphs=1)


# Numbers, texts and functions: each is (function, change)


def number_of_a_closure():
    number = 2.0

    def change():
        nonlocal number
        number = 3.0

    return lambda x: x * number, change


def global_number():
    return lambda x: x * NUMBER, lambda: globals().update(NUMBER=NUMBER + 1)


def number_that_a_layer_reads():
    layer = nn.Softplus(beta=1)
    return layer, lambda: setattr(layer, "beta", 2)


def length_of_a_list():
    held = [draw(3)]
    return lambda x: x * sum(held), lambda: held.append(draw(3, seed=1))


def function_of_a_closure():
    act = torch.sin

    def change():
        nonlocal act
        act = torch.cos

    return lambda x: act(x), change


def function_of_an_object():
    held = Holder(lambda x: x * 2)
    return lambda x: held.value(x), lambda: setattr(held, "value", lambda x: x * 3)


NUMBERS = [
    number_of_a_closure, global_number,
    number_that_a_layer_reads, length_of_a_list, function_of_a_closure, function_of_an_object,
]  # fmt: skip


@pytest.mark.parametrize("place", NUMBERS, ids=[p.__name__ for p in NUMBERS])
def test_another_number_has_a_graph_of_its_own(place):
    fn, change = place()
    eager_and_captured(fn, change, graphs=2)


def test_numbers_that_no_code_of_the_function_reads_do_not_matter():
    class Training:
        def __init__(self):
            self.weight, self.step, self.log = draw(3), 0, []
            self.trainer = Holder({"epoch": 0, "owner": self})

        def loss(self, x):
            return (x * self.weight).sum()

        def after(self):
            self.step += 1
            self.log.append(self.step)
            self.trainer.value["epoch"] += 1

    training, x = Training(), draw(3)
    fast = captured(training.loss)
    for _ in range(3):
        fast(x)
        training.after()
    assert len(fast.signatures) == 1


# Several ways to one tensor


def test_a_tensor_that_is_reached_two_ways_is_the_one_that_is_used():
    class Listed(nn.Module):
        """Keeps its weights in a list besides, which is the shorter way."""

        def __init__(self, uses_list):
            super().__init__()
            self.layer = nn.Linear(3, 3, bias=False).double()
            self.weights = [self.layer.weight]
            self.uses_list = uses_list

        def forward(self, x):
            return x @ (self.weights[0] if self.uses_list else self.layer.weight)

    for uses_list in (True, False):
        for change in (
            lambda net: setattr(net.layer, "weight", nn.Parameter(draw(3, 3, seed=9))),
            lambda net: net.weights.__setitem__(0, draw(3, 3, seed=8).requires_grad_()),
        ):
            net, x = Listed(uses_list), draw(4, 3)
            fast = captured(net)
            assert_close(fast(x), net(x), rtol=0, atol=0)
            change(net)
            for _ in range(2):
                assert_close(fast(x), net(x), rtol=0, atol=0)


def test_tied_weights_that_come_apart():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    net[1].weight = net[0].weight
    fast, x = captured(net), draw(4, 3)
    fast(x)
    net[1].weight = nn.Parameter(draw(3, 3))
    assert_close(fast(x), net(x))
    net[1].weight = net[0].weight
    assert_close(fast(x), net(x))
    assert len(fast.signatures) == 2


def test_a_tensor_that_no_way_leads_to_is_the_one_of_the_capture():
    kept = draw(3)
    fast = captured(kept.mul)
    kept.mul_(2)
    assert_close(fast(draw(3)), kept * draw(3))


# What a module keeps


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.kept, self.calls, self.log = nn.Linear(3, 2).double(), None, 0, []

    def forward(self, x):
        self.calls += 1
        self.kept = self.layer(x)
        self.log.append(self.kept)
        return self.kept


@pytest.mark.parametrize("check", [True, False])
def test_what_a_module_keeps_has_values(check):
    net, x = Keeping(), draw(4, 3)
    fast = captured(net, check=check)
    assert_close(fast(x), net.layer(x))
    assert_close(fast(2 * x), net.layer(2 * x))
    assert len(fast.signatures) == 1
    if check:
        assert_close(net.kept, net.layer(x))  # of the last run that was eager, at the values given
    else:
        assert (net.kept, net.log) == (None, [])


def test_nothing_of_a_trace_is_left_in_a_closure_or_a_gradient():
    last, weight = None, nn.Parameter(draw(3))

    def fn(x):
        nonlocal last
        last = x * weight
        torch.autograd.backward(last.sum())
        return last

    with pytest.raises(NotImplementedError, match="calls backward"):
        captured(fn)(draw(3).requires_grad_())
    assert last is None
    assert weight.grad is None


# Lifetimes


def test_graphs_keep_neither_the_function_nor_its_model_alive():
    def make():
        model = nn.Linear(3, 3).double()
        fn = lambda x: model(x).square().sum()  # noqa: E731
        fast, loss, whole = captured(fn), hog.compiled_loss(fn, backend="eager"), captured(model)
        x = draw(2, 3).requires_grad_()
        torch.autograd.grad(torch.autograd.grad(fast(x), x, create_graph=True)[0].sum(), x)
        loss(x).backward()
        whole(x).sum().backward()
        return [weakref.ref(one) for one in (fn, model, model.weight)]

    alive = make()
    gc.collect()
    assert [one() for one in alive] == [None, None, None]


def test_graphs_keep_no_argument_alive():
    fast = captured(lambda model, x: model(x))

    def call():
        model, x = nn.Linear(3, 3).double(), draw(2, 3)
        fast(model, x).sum().backward()
        return weakref.ref(model), weakref.ref(x), weakref.ref(model.weight)

    alive = call()
    gc.collect()
    assert [one() for one in alive] == [None, None, None]


class WithoutLength(tuple):
    """A tuple whose class refuses `len` and iteration, as the irreducible representations of e3nn."""

    __slots__ = ()

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


@pytest.mark.parametrize("items", [(1, 2), (draw(3), 2)], ids=["numbers", "a tensor"])
def test_a_tuple_without_a_length_is_followed(items):
    net = Net()
    net.representation = WithoutLength(items)

    def fn(x):
        return net(x) * net.representation[1]

    fast, x = captured(fn), draw(5, 3)
    assert_close(fast(x), fn(x), rtol=0, atol=0)
    net.representation = WithoutLength((*items[:1], 3))
    assert_close(fast(x), fn(x), rtol=0, atol=0)
    assert len(fast.signatures) == 2
