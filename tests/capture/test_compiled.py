"""hog.compile: what goes in and comes out, what decides which graph runs, and what is said of graphs."""

import copy
import pickle
import threading
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib.capture import api
from tests.capture.models import captured, draw, small
from tests.refused import refused

Pair = namedtuple("Pair", "left right")
EXACT = {"rtol": 0, "atol": 0}


# Pytrees in and out

TREES = {
    "a tensor": draw(3),
    "a tuple": (draw(3), draw(2)),
    "a dict of a list": {"a": [draw(3), draw(2)], "b": draw(1)},
    "a named tuple": Pair(draw(3), (draw(2),)),
    "an ordered dict": OrderedDict(z=draw(3), a=draw(2)),
    "nothing": (),
    "numbers, texts and None among tensors": {"x": draw(3), "n": 2, "s": "mean", "none": None, "flag": True},
    "a dtype, a device and a size": [draw(2), torch.float64, torch.device("cpu"), torch.Size([2, 3])],
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_what_goes_in_comes_out_in_the_same_structure(tree):
    twice = captured(
        lambda tree: torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: 2 * x, tree)
    )
    result = twice(tree)
    assert type(result) is type(tree)
    expected = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: 2 * x, tree)
    (ours, structure), (theirs, other) = map(torch.utils._pytree.tree_flatten, (result, expected))
    assert structure == other
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_keyword_arguments_and_their_defaults():
    def fn(x, *, scale=3.0, other=None):
        return x * scale if other is None else x * scale + other

    fast, x = captured(fn), draw(3)
    for kwargs in (
        {},
        {"scale": 2.0},
        {"other": draw(3, seed=1)},
        {"other": draw(3, seed=1), "scale": 5},
    ):
        assert_close(fast(x, **kwargs), fn(x, **kwargs), **EXACT)
    assert len(fast.signatures) == 4


@pytest.mark.parametrize(
    "values", [(1, 1.0, True), (0.0, -0.0), ("mean", "sum"), (1j, 2j), (None, 0)], ids=str
)
def test_a_constant_of_another_value_or_kind_has_a_graph_of_its_own(values):
    def fn(x, constant):
        if isinstance(constant, str):
            return getattr(x, constant)()
        return x if constant is None else torch.copysign(x, torch.tensor(constant)) if constant == 0 and isinstance(constant, float) else x * constant  # fmt: skip

    fast, x = captured(fn), draw(3)
    for value in (*values, *values):
        result, expected = fast(x, value), fn(x, value)
        assert result.dtype == expected.dtype
        assert_close(result, expected, **EXACT)
    assert len(fast.signatures) == len(values)


OUTPUTS = {
    "an argument": lambda x: x,
    "a view of an argument": lambda x: (x[1:], x.T),
    "the same tensor twice": lambda x: (lambda y: (y, y))(x * 2),
    "two views of one tensor": lambda x: (lambda y: (y[0], y[:, 0], y))(x * 2),
    "None and numbers": lambda x: (None, 3, "text", x.shape[0], x.shape, x * 2),
    "a constant": lambda x: (torch.ones(2), torch.tensor([1.0, 2.0]), x * 2),
    "integers and truth values": lambda x: (x > 0, (x * 10).long(), x * 2),
    "nothing": lambda x: None,
    "an empty tensor": lambda x: x[:0],
    "a scalar": lambda x: x.sum(),
}


@pytest.mark.parametrize("fn", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with a graph"])
def test_outputs_of_every_kind(fn, requires_grad):
    x = draw(3, 2).requires_grad_(requires_grad)
    fast = captured(fn)
    for scale in (1.0, 2.0):
        y = (scale * x).detach().requires_grad_(requires_grad)
        result, expected = fast(y), fn(y)
        ours, theirs = (torch.utils._pytree.tree_leaves(v) for v in (result, expected))
        assert list(map(type, ours)) == list(map(type, theirs))
        tensors = [(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, torch.Tensor)]
        assert [a.requires_grad for a, _ in tensors] == [b.requires_grad for _, b in tensors]
        assert all(torch.equal(a, b) for a, b in tensors)
        assert [a for a in ours if not isinstance(a, torch.Tensor)] == [
            b for b in theirs if not isinstance(b, torch.Tensor)
        ]
        sums = [
            [(i + 1) * x.sum() for i, x in enumerate(side) if x.requires_grad]
            for side in zip(*tensors, strict=True)
        ]
        if sums and sums[0]:
            assert_close(*[torch.autograd.grad(side, y) for side in sums], **EXACT)


def test_an_output_that_hides_a_tensor_is_refused():
    class Result:
        def __init__(self, value):
            self.value = value

    with pytest.raises(NotImplementedError, match="holds tensors that the graph would not update"):
        captured(lambda x: Result(2 * x))(draw(3))


# Arguments as they are laid out

LAYOUTS = {
    "by rows": lambda: draw(4, 6),
    "transposed": lambda: draw(6, 4).T,
    "every second": lambda: draw(8, 6)[::2],
    "expanded": lambda: draw(1, 6).expand(4, 6),
    "overlapping": lambda: draw(9).as_strided((4, 6), (1, 1)),
    "a row of size one with a stride of its own": lambda: draw(4, 6)[:1].as_strided((1, 6), (7, 1)),
    "with an offset": lambda: draw(5, 6)[1:],
    "channels last": lambda: draw(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "empty": lambda: draw(0, 6),
    "without dimensions": lambda: draw(1)[0],
    "conjugated": lambda: draw(4, 6, dtype=torch.complex128).conj(),
    "the imaginary part of what is conjugated": lambda: (
        draw(4, 6, dtype=torch.complex128).conj().imag
    ),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_arguments_of_every_layout(make):
    def fn(x):
        return torch.func.grad(lambda y: (y.abs() ** 3).sum().real)(x), x.reshape(-1), x + x.flip(0) if x.dim() else x  # fmt: skip

    fast, x = captured(fn), make()
    for y in (x, x.detach() * 2, x.contiguous()):
        assert_close(fast(y), fn(y), check_stride=True)


def test_a_layout_of_its_own_has_a_graph_of_its_own():
    fast = captured(lambda x: x * 2)
    for x in (draw(4, 4), draw(4, 4).T, draw(4, 8)[:, ::2]):
        assert_close(fast(x), x * 2)
    fast(draw(5, 4)[1:])  # as the first
    fast(draw(4, 4, seed=3))
    assert len(fast.signatures) == 3
    x = draw(3, 2, dtype=torch.complex128)
    for y in (x, x.conj(), x.resolve_conj(), x.conj().resolve_conj(), x.imag, x.conj().imag):
        assert_close(fast(y), y * 2)
    assert len(fast.signatures) == 3 + 4


def test_the_same_tensor_twice_is_one_variable_as_otherwise():
    def fn(a, b):
        return torch.autograd.grad((a * b).sum(), a)[0]

    fast, x = captured(fn), draw(3).requires_grad_()
    assert_close(fast(x, x), fn(x, x), **EXACT)  # 2 x
    y = draw(3, seed=1).requires_grad_()
    assert_close(fast(x, y), fn(x, y), **EXACT)  # y
    assert_close(fast(y, y), fn(y, y), **EXACT)
    assert len(fast.signatures) == 2


def test_views_of_one_tensor_are_variables_of_their_own():
    base = draw(5)
    fast = captured(lambda a, b: torch.func.grad(lambda a: (a * b).sum())(a))
    assert_close(fast(base[1:4], base[2:5]), base[2:5])


def test_a_parameter_that_is_an_argument_and_is_reached_is_one_variable():
    weight = draw(3).requires_grad_()

    def fn(p, x):
        return torch.autograd.grad((weight * p * x).sum(), p, allow_unused=True)[0]

    fast, x, other = captured(fn), draw(3, seed=1), draw(3, seed=2).requires_grad_()
    for p in (weight, other, weight):
        assert_close(fast(p, x), fn(p, x), **EXACT)
    assert len(fast.signatures) == 2


def test_what_an_argument_was_computed_from_does_not_count_inside():
    x = draw(3).requires_grad_()

    def fn(x, y):
        return torch.autograd.grad((x * y).sum(), x, retain_graph=True)[0]

    with pytest.raises(RuntimeError, match="expected a graph that computes what the function does"):
        captured(fn)(x, x * 2)  # eager torch goes through y to x


# What decides which graph runs

SIGNATURES = {
    "shape": lambda x: x[:2].clone(),
    "dtype": lambda x: x.float(),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "a list for a tensor": lambda x: [x],
}


@pytest.mark.parametrize("change", SIGNATURES.values(), ids=SIGNATURES)
def test_another_signature_is_captured_anew_and_found_again(change):
    def fn(x):
        return torch.sin(x[0] if isinstance(x, list) else x)

    fast, x = captured(fn), draw(3, 2)
    for _ in range(2):
        assert_close(fast(x), fn(x))
        assert_close(fast(change(x)), fn(change(x)))
    assert len(fast.signatures) == 2


AROUND = {
    "grad mode": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another type of autocast": lambda: torch.autocast("cpu", torch.float16),
    "stand-ins": hog.second_order,
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_is_on_around_a_call_decides(around):
    weight = torch.randn(3, 3, requires_grad=True)

    def fn(x):
        return F.layer_norm(x @ weight, (3,)), torch.zeros(2)

    fast, x = captured(fn), torch.randn(4, 3)
    for _ in range(2):
        a, b = fast(x), fn(x)
        assert_close(a, b)
        assert a[0].requires_grad
        with around():
            a, b = fast(x), fn(x)
        for ours, theirs in zip(a, b, strict=True):
            assert (ours.dtype, ours.device, ours.requires_grad) == (theirs.dtype, theirs.device, theirs.requires_grad)  # fmt: skip
        assert_close(a[0], b[0])
    assert len(fast.signatures) == 2


def test_the_default_dtype_decides():
    fast = captured(
        lambda x: x.double() + torch.ones(2).double().div(3).to(torch.get_default_dtype())
    )
    fast(draw(2))
    torch.set_default_dtype(torch.float64)
    try:
        assert_close(fast(draw(2)), draw(2) + 1 / 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(fast.signatures) == 2


# The graphs


def test_graphs_are_shared_by_all_that_compile_a_function_alike():
    def fn(x):
        return x * 2

    first, second = captured(fn), captured(fn)
    first(draw(3))
    assert first.signatures == second.signatures
    assert len(second.signatures) == 1
    assert captured(fn, check=False).signatures == []
    assert captured(fn, dynamic=True).signatures == []
    assert captured(lambda x: x * 2).signatures == []


def test_a_graph_can_be_looked_at():
    fast = captured(lambda x, n: torch.func.grad(lambda x: (x**n).sum())(x))
    fast(draw(3, 2), 3)
    (one,) = fast.signatures
    assert one.arguments == "float64[3, 2], 3"
    assert one.backend == "eager"
    assert one.source == "compiled"
    assert one.nodes == one.code.count("torch.ops") > 1
    assert one.seconds_to_trace > 0
    assert one.seconds_to_compile >= 0
    assert repr(one).startswith("GraphEntry(arguments='float64[3, 2], 3', nodes=")
    assert len(repr(one)) < 200
    assert repr(fast).startswith("hoglib.compile(<lambda>, backend='eager'), 1 graph")


def test_beyond_the_limit_it_runs_as_it_would_otherwise():
    runs = []

    def counting(graph, inputs):
        return lambda *tensors: (runs.append(1), graph.forward(*tensors))[1]

    fast, x = hog.compile(lambda x, n: x * n, backend=counting, check=False), draw(3)
    for n in range(16):
        fast(x, n)
    with pytest.warns(UserWarning, match=r"16 graphs.*float64\[3\], 99"):
        assert_close(fast(x, 99), x * 99)
    assert_close(fast(x, 100), x * 100)  # and says so once
    assert len(runs) == 16
    assert_close(fast(x, 7), x * 7)
    assert len(runs) == 17
    assert len(fast.signatures) == 16


def test_an_exception_leaves_no_graph_and_no_lock():
    wrong = True

    def fn(x):
        if wrong:
            raise KeyError("mine")
        return x * 2

    fast = captured(fn)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            fast(draw(3))
        assert fast.signatures == []
    wrong = False
    assert_close(fast(draw(3)), draw(3) * 2)
    assert len(fast.signatures) == 1
    with pytest.raises(RuntimeError, match="shape"):  # torch's own errors stay as they are
        captured(lambda x: x.reshape(7))(draw(3))


def test_a_backend_may_be_a_function():
    seen = []

    def backend(graph, inputs):
        seen.append((isinstance(graph, torch.fx.GraphModule), [tuple(x.shape) for x in inputs]))
        return graph.forward

    weight = draw(3)
    fast = hog.compile(lambda x: x * weight, backend=backend)
    assert_close(fast(draw(2, 3)), draw(2, 3) * weight)
    assert seen == [(True, [(2, 3), (3,)])]
    assert fast.signatures[0].backend == "backend"
    with pytest.raises(TypeError, match="returns a function"):
        hog.compile(lambda x: x * 2, backend=lambda graph, inputs: None)(draw(3))


WRONG = {
    "no function": (lambda: hog.compile(3), TypeError, "fn"),
    "no backend": (lambda: hog.compile(abs, backend="cuda"), ValueError, "inductor"),
    "dynamic": (lambda: hog.compile(abs, dynamic="yes"), TypeError, "dynamic"),
    "an array": (lambda: captured(lambda x, y: x)(draw(2), draw(2).numpy()), TypeError, "must be comparable"),
    "a set": (lambda: captured(lambda x, y: x)(draw(2), {1}), TypeError, "must be comparable"),
    "a sparse tensor": (lambda: captured(lambda x: x)(draw(2, 2).to_sparse()), NotImplementedError, "dense"),
}  # fmt: skip


test_errors_say_what_to_do = refused(WRONG)


def test_a_module_may_be_an_argument():
    def fn(model, x):
        return model(x)

    model, x = nn.Linear(3, 2).double(), draw(4, 3)
    fast = captured(fn)
    assert_close(fast(model, x), model(x))
    model.weight = nn.Parameter(draw(2, 3))
    assert_close(fast(model, x), model(x))
    other = nn.Linear(3, 2).double()
    assert_close(fast(other, x), other(x))
    assert len(fast.signatures) == 2


class Fitted(nn.Module):
    """Compiles methods of its own, in both ways."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.loss = hog.compiled_loss(self.value, backend="eager")

    def value(self, x):
        return self.layer(x).square().mean()

    @captured
    def slope(self, x):
        return torch.func.grad(self.value)(x)


def test_a_method_that_is_compiled_in_its_class():
    one, other, x = Fitted(), Fitted(), draw(4, 3)
    for model in (one, other, one):
        assert_close(model.slope(x), torch.func.grad(model.value)(x))
    assert len(Fitted.slope.signatures) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])  # fmt: skip
def test_a_copy_has_graphs_of_its_own(copied):
    model, x = Fitted(), draw(4, 3)
    model.loss(x)
    other = copied(model)
    with torch.no_grad():
        other.layer.weight.mul_(2)
    value = other.loss(x)
    value.backward()
    assert_close(value, other.value(x))
    assert other.layer.weight.grad is not None
    assert model.layer.weight.grad is None
    assert len(other.loss.signatures) == 1


def test_what_torch_compile_or_script_made_runs_inside():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), draw(5, 3)
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        scripted = torch.jit.script(net)
    for made in (torch.compile(net, backend="aot_eager"), scripted):
        fast = captured(lambda x, made=made: torch.autograd.grad(made(x).sum(), x, create_graph=True)[0].square().sum())  # fmt: skip
        leaf = x.clone().requires_grad_()
        expected = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)[0].square().sum()
        ours = fast(leaf)
        assert_close(ours, expected)
        assert_close(torch.autograd.grad(ours, leaf), torch.autograd.grad(expected, leaf))


# Threads


def in_threads(*functions):
    barrier = threading.Barrier(len(functions))
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda run: (barrier.wait(), run())[1], functions))


def penalty_of(model):
    def fn(x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(
            (slope.norm(dim=1) - 1).square().mean(), list(model.parameters())[:-1]
        )

    return fn


def test_threads_that_compile_one_function_make_one_graph():
    fn, x = penalty_of(small()), draw(5, 3)
    fast = captured(fn)
    for result in in_threads(*[partial(fast, x)] * 4):
        assert_close(result, fn(x), **EXACT)
    assert len(fast.signatures) == 1


def test_a_function_runs_and_others_are_compiled_meanwhile():
    functions, x = [penalty_of(small()) for _ in range(3)], draw(5, 3)
    ready = captured(functions[0])
    ready(x)

    def repeated(run, count):
        return [run(x) for _ in range(count)][-1]

    results = in_threads(
        partial(repeated, ready, 30), partial(repeated, functions[0], 30),
        *[partial(repeated, captured(lambda x, i=i: functions[i](x)), 3) for i in (1, 2)],
    )  # fmt: skip
    for result, i in zip(results, (0, 0, 1, 2), strict=True):
        assert_close(result, functions[i](x), **EXACT)
    assert len(ready.signatures) == 1


def test_what_other_threads_run_meanwhile_does_not_matter():
    other, weight, batch = nn.Linear(3, 3).double(), draw(3), draw(2, 3)

    def fn(x):
        in_threads(partial(other, batch))
        return x * weight

    fast, x = captured(fn), draw(3)
    fast(x)
    other.eval()
    fast(x)
    assert len(fast.signatures) == 1


# Sizes that change


def test_one_dynamic_graph_serves_all_sizes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def fn(x):
        return torch.func.grad(lambda x: model(x).square().mean())(x)

    fast = captured(fn, dynamic=True)
    for size in (4, 5, 9, 1, 4, 0):
        assert_close(fast(draw(size, 3)), fn(draw(size, 3)))
    assert len(fast.signatures) == 3  # 0 and 1 are sizes of their own
    x = draw(6, 3).requires_grad_()
    assert_close(torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


def test_a_size_that_is_looked_at_holds_for_its_graph():
    def fn(x):
        return x * sum(1 for n in range(5) if x.shape[0] > 5 * n)

    fast = captured(fn, dynamic=True)
    for size in (4, 9, 3, 7, 12, 17):
        assert_close(fast(draw(size)), fn(draw(size)))
    with pytest.warns(UserWarning, match="or sizes are other than the graph assumes"):
        fast(draw(22))
    assert len(fast.signatures) == 5
    with pytest.raises(NotImplementedError, match="do not depend on sizes"):
        captured(lambda x: (x, x.shape[0]), dynamic=True)(draw(4))


def test_a_prepared_graph_takes_tensors_alone():
    weight = draw(3)
    fast = captured(lambda a, n, b: (a * n * weight, [a + b]))
    run = fast.prepared(draw(3), 2, draw(3, seed=1))
    a, b = draw(3, seed=2), draw(3, seed=3)
    assert_close(run([a, b]), [2 * a * weight, a + b])
    x = draw(3)
    # Stand for any of their kind
    assert_close(fast.prepared(x, 2, x)([a, b]), [2 * a * weight, a + b])
    assert len(fast.signatures) == 1


INDICES = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "pairs": lambda x, i: x[i, i.flip(0)],
    "rows of a gradient": lambda x, i: torch.func.grad(lambda x: x[i].pow(3).sum())(x),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_are_tensors_of_integers(name):
    """torch tags this operation as if its shape depended on values, as it does for a mask."""
    i, x = torch.tensor([0, 2, 1, 0]), draw(4, 3)
    fast = captured(INDICES[name])
    for given in (i, i.flip(0)):
        assert_close(fast(x, given), INDICES[name](x, given), rtol=0, atol=0)
    assert len(fast.signatures) == 1


@pytest.mark.parametrize("checks_first", [True, False], ids=["in a run of its own", "none"])
def test_values_are_checked_once_where_a_run_before_the_capture_does_it(capsys, checks_first):
    def sine(x):
        if value_checks_on():
            print("checked")
        return x.sin()

    x = draw(3)
    compiled = api.Compiled(sine, backend="eager", precheck=sine if checks_first else None)
    assert_close(compiled(x), x.sin())
    assert_close(compiled(x), x.sin())
    checks = capsys.readouterr().out.count("checked")
    assert checks == 1 if checks_first else checks > 1
