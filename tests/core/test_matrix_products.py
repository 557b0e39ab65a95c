"""Products by oneDNN: the same numbers and derivatives as torch's, and only where they are wanted."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib._core import matrix_products, timed_products, torch_internals
from hoglib.cli.main import main

pytestmark = pytest.mark.skipif(
    not torch_internals.onednn_available(), reason="this torch has no oneDNN"
)
N = 2 * matrix_products.SMALLEST


@pytest.fixture
def calls(monkeypatch):
    """oneDNN for all but small matrices; the shapes that it was called with."""
    found = []
    run = torch_internals.onednn_affine

    def seen(x, weight, bias=None):
        found.append((tuple(x.shape), tuple(weight.shape)))
        return run(x, weight, bias)

    monkeypatch.setattr(torch_internals, "onednn_affine", seen)
    monkeypatch.setenv(matrix_products.SWITCH, "on")
    return found


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine that has timed nothing yet."""
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(matrix_products.SWITCH, "auto")
    matrix_products.forget()
    yield tmp_path / "cache"
    matrix_products.forget()


@pytest.fixture
def quick(machine, monkeypatch):
    """The same, where all classes take a tenth of the time by oneDNN; how often they were timed."""
    counted = []
    everything = [
        timed_products.class_of(m, k, n, c)
        for m in SIZES
        for k in SIZES
        for n in SIZES
        for c in (0, 1)
    ]

    def measure():
        counted.append(1)
        return dict.fromkeys(everything, timed_products.Times(1e-2, 1e-3))

    monkeypatch.setattr(timed_products, "measure", measure)
    return counted


SIZES = timed_products.SIZES


def drawn(*shape, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def by_columns(*shape) -> Tensor:
    return drawn(*reversed(shape)).t()


def every_other(*shape) -> Tensor:
    return drawn(shape[0], 2 * shape[1])[:, ::2]


def wider(*shape) -> Tensor:
    return drawn(shape[0], shape[1] + 3)[:, :-3]


def negative(*shape) -> Tensor:
    return torch._neg_view(drawn(*shape))


def repeated(*shape) -> Tensor:
    return drawn(shape[1]).expand(shape)


def zeros(*shape) -> Tensor:
    return torch._efficientzerotensor(shape)


LAYOUTS = [drawn, by_columns, every_other, wider, negative, repeated, zeros]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64]
SHAPES = {
    "square": ((N, N), (N, N)),
    "oblong": ((70, 33), (33, 129)),
    "in batches": ((3, 40, N), (N, 50)),
    "tiny": ((2, 3), (3, 4)),
    "one row": ((1, N), (N, N)),
    "no rows": ((0, N), (N, N)),
    "nothing to sum": ((N, 0), (0, N)),
    "no columns": ((N, N), (N, 0)),
    "a vector": ((N, N), (N,)),
    "matrices for each": ((3, N, N), (3, N, N)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_product_is_torchs(calls, name):
    a, b = (drawn(*shape) for shape in SHAPES[name])
    found = matrix_products.product(a, b)
    assert_close(found, a @ b)
    assert found.is_contiguous()
    assert bool(calls) is (name in ("square", "oblong", "in batches"))


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_however_the_factors_lie(calls, first, second):
    a, b = first(N, N + 1), second(N + 1, N + 2)
    assert_close(matrix_products.product(a, b), a @ b)
    assert_close(matrix_products.affine(a, b.t(), b[0].contiguous()), torch.addmm(b[0], a, b))
    lies = {drawn, by_columns, wider, negative}
    assert bool(calls) is (lies >= {first, second}) or zeros in (first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_float32_goes_to_onednn(calls, dtype):
    a, b = (10 * drawn(N, N)).to(dtype), (10 * drawn(N, N)).to(dtype)
    assert_close(matrix_products.product(a, b), a @ b)
    assert bool(calls) is (dtype is torch.float32)


def test_dtypes_that_differ_are_torchs_error(calls):
    with pytest.raises(RuntimeError, match="dtype"):
        matrix_products.product(drawn(N, N), drawn(N, N).double())
    with pytest.raises(RuntimeError, match="shapes"):
        matrix_products.product(drawn(N, N), drawn(N + 1, N))
    with pytest.raises(RuntimeError):
        matrix_products.affine(drawn(N, N), drawn(N, N), drawn(N + 1))
    assert not calls


def test_what_is_not_finite_stays_so(calls):
    a, b = drawn(N, N), drawn(N, N)
    a[3, 4], a[5, 6] = torch.nan, torch.inf
    assert_close(matrix_products.product(a, b), a @ b, equal_nan=True)
    assert calls


NEEDS = {"both": (True, True, True), "x": (True, False, False), "weight": (False, True, False),
         "bias": (False, False, True)}  # fmt: skip


@pytest.mark.parametrize("needed", NEEDS)
def test_first_and_second_derivatives(calls, needed):
    """Of a loss with two layers, against the same by torch in float64."""
    weights = [drawn(N, N), drawn(N, N) / 8, drawn(N)]
    direction = [drawn(*w.shape) for w in weights]

    def derivatives(layer, dtype):
        given = [
            w.to(dtype).clone().requires_grad_(need)
            for w, need in zip(weights, NEEDS[needed], strict=True)
        ]
        wanted = [w for w in given if w.requires_grad]
        x, weight, bias = given
        loss = layer(layer(x, weight, bias).tanh(), weight.t(), bias).square().mean()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        along = [d.to(dtype) for d, w in zip(direction, given, strict=True) if w.requires_grad]
        second = torch.autograd.grad(first, wanted, along, create_graph=True)
        return [*first, *second, *torch.autograd.grad(second, wanted, along)]

    expected = derivatives(F.linear, torch.float64)
    found = derivatives(matrix_products.affine, torch.float32)
    assert len(calls) > 6
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("second", [drawn, by_columns])
@pytest.mark.parametrize("first", [drawn, by_columns])
def test_gradients_lie_as_the_factors_do(calls, first, second):
    """As torch's own do: sums of what lies differently are slow."""
    a, b = (make(N, N).requires_grad_() for make in (first, second))
    grads = torch.autograd.grad(matrix_products.product(a, b), (a, b), drawn(N, N))
    assert len(calls) == 3
    assert [g.stride() for g in grads] == [a.stride(), b.stride()]


TRANSFORMED = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum()),
    "vmap": lambda f: lambda x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "jvp of grad": lambda f: (
        lambda x: torch.func.jvp(torch.func.grad(lambda x: f(x).square().sum()), (x,), (x.cos(),))
    ),
    "make_fx": lambda f: lambda x: torch.fx.experimental.proxy_tensor.make_fx(f)(x)(x),
    "autocast": lambda f: lambda x: torch.autocast("cpu", torch.bfloat16)(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_inside_of_a_transform_products_are_torchs(calls, name):
    weight, x = drawn(N, N), drawn(N, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(matrix_products.SWITCH, "off")
        expected = TRANSFORMED[name](lambda x: x @ weight)(x)
    calls.clear()
    found = TRANSFORMED[name](lambda x: matrix_products.product(x, weight))(x)
    assert_close(found, expected, rtol=0, atol=0)
    assert not calls


def test_dual_numbers(calls):
    x, t, weight = drawn(N, N), drawn(N, N), drawn(N, N)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        value, tangent = forward_ad.unpack_dual(matrix_products.product(dual, weight))
    assert_close(value, x @ weight)
    assert_close(tangent, t @ weight)


def test_a_graph_with_products_takes_a_batch_of_gradients(calls):
    x, weight = drawn(N, N).requires_grad_(), drawn(N, N)
    y = matrix_products.product(x, weight)
    assert calls
    cotangents = drawn(3, N, N)
    (found,) = torch.autograd.grad(y, x, cotangents, is_grads_batched=True)
    assert_close(found, cotangents @ weight.t())


def test_a_weight_changed_in_place_is_noticed(calls):
    x, weight = drawn(N, N).requires_grad_(), drawn(N, N)
    y = matrix_products.product(x, weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, 40), nn.Tanh(), nn.Linear(40, 3))


USED = {
    "hvp": lambda loss, params, v, batch: hog.hvp(loss, params, v, batch),
    "ggn_vp": lambda loss, params, v, batch: hog.ggn_vp(loss, params, v, batch),
    "HessianOperator": lambda loss, params, v, batch: hog.HessianOperator(loss, params, batch) @ v,
}


@pytest.mark.parametrize("name", USED)
def test_curvature_of_an_unmodified_module(calls, monkeypatch, name):
    net, x, y = model(), drawn(N, N), torch.randint(3, (N,))
    loss, params = hog.functional_loss(net, F.cross_entropy), hog.trainable_params(net)
    v = {key: drawn(*p.shape) for key, p in params.items()}
    found = USED[name](loss, params, v, (x, y))
    assert calls or name == "ggn_vp"  # which is forward mode, and torch's
    monkeypatch.setenv(matrix_products.SWITCH, "off")
    calls.clear()
    assert_close(found, USED[name](loss, params, v, (x, y)), rtol=1e-4, atol=1e-5)
    assert not calls


def test_penalties_and_inner_loops(calls, monkeypatch):
    critic, x = nn.Sequential(nn.Linear(N, N), nn.SiLU(), nn.Linear(N, 1)), drawn(N, N)
    maml = hog.MAML(model(), F.cross_entropy, inner_lr=0.1, inner_steps=2)
    task = (drawn(N, N), torch.randint(3, (N,)))

    def computed():
        critic.zero_grad(), maml.zero_grad()
        hog.penalties.r1(critic, x).backward()
        maml.loss([(task, task)]).backward()
        return [p.grad for p in (*critic.parameters(), *maml.parameters()) if p.grad is not None]

    found = computed()
    assert calls
    monkeypatch.setenv(matrix_products.SWITCH, "off")
    assert_close(found, computed(), rtol=1e-4, atol=1e-5)


OPS = {
    "linear": lambda x, w: hog.ops.linear(x, w, w[0]),
    "linear_act": lambda x, w: hog.ops.linear_act(x, w, w[0], act="swish"),
    "matmul": hog.ops.matmul,
}


@pytest.mark.parametrize("name", OPS)
def test_the_linear_ops_take_it_forward_and_backward(calls, name):
    x, weight = drawn(N, N).requires_grad_(), (drawn(N, N) / 8).requires_grad_()
    value = OPS[name](x, weight).square().mean()
    forward = len(calls)
    grads = torch.autograd.grad(value, (x, weight), create_graph=True)
    backward = len(calls)
    sum(g.square().sum() for g in grads).backward()
    assert (forward, backward - forward) == (1, 2)
    assert len(calls) > backward
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    first = torch.autograd.grad(OPS[name](*exact).square().mean(), exact, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    for ours, theirs in zip((x, weight), exact, strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()


SPELLINGS = {
    "@": lambda a, b: a @ b, "matmul": torch.matmul, "mm": torch.mm, "Tensor.matmul": Tensor.matmul,
    "Tensor.mm": Tensor.mm, "linear": lambda a, b: F.linear(a, b.t()),
    "linear by name": lambda a, b: F.linear(input=a, weight=b.t()),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_second_order_sees_every_spelling(calls, name):
    a, b = drawn(N, N), drawn(N, N)
    expected = SPELLINGS[name](a, b)
    assert not calls
    with hog.second_order():
        assert_close(SPELLINGS[name](a, b), expected)
    assert bool(calls) is (name != "linear by name")


def test_what_a_checkpoint_runs_again_is_the_same(calls):
    layer, x = nn.Linear(N, N), drawn(N, N).requires_grad_()
    with hog.second_order():
        loss = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False).square().sum()
    loss.backward()
    found, x.grad = x.grad, None
    layer(x).tanh().square().sum().backward()
    assert_close(found, x.grad, rtol=1e-4, atol=1e-5)


class OfAUser(Tensor):
    pass


def strided(x: Tensor) -> Tensor:
    return x.to_dense() if x.layout is not torch.strided else x


UNUSUAL = {
    "sparse": lambda a, b: a.to_sparse() @ b,
    "sparse weight": lambda a, b: F.linear(a, b.to_sparse()),
    "compressed rows": lambda a, b: a.to_sparse_csr() @ b,
    "oneDNN's own layout": lambda a, b: F.linear(a.to_mkldnn(), b),
    "subclass": lambda a, b: a.as_subclass(OfAUser) @ b,
    "subclass as weight": lambda a, b: F.linear(a, b.as_subclass(OfAUser)),
    "vector": lambda a, b: a[0] @ b,
    "matrices for each": lambda a, b: a @ b.expand(2, N, N),
    "bias of one number": lambda a, b: F.linear(a, b, torch.ones(())),
    "bias of another dtype": lambda a, b: F.linear(a, b, torch.ones(N, dtype=torch.int64)),
    "out=": lambda a, b: torch.mm(a, b, out=torch.empty(N, N)),
    "no tensor": lambda a, b: torch.mm(a, 3),
    "no weight": lambda a, b: F.linear(a, None),
    "another device": lambda a, b: F.linear(a.to("meta"), b.to("meta")).shape.numel() * a,
    "nested": lambda a, b: F.linear(torch.nested.nested_tensor([a, a[1:]]), b).unbind()[1],
    "weight that has no values": lambda a, b: F.linear(a, nn.UninitializedParameter()),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", UNUSUAL)
def test_second_order_leaves_what_is_unusual_to_torch(calls, name):
    a, b = drawn(N, N), drawn(N, N)

    def result():
        try:
            return strided(UNUSUAL[name](a, b))
        except Exception as error:
            return type(error), str(error)

    expected = result()
    with hog.second_order():
        found = result()
    assert not calls
    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        assert found == expected
    else:
        assert_close(found, expected, rtol=0, atol=0)


# The choice.


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 127, 128), (64, 64, 256)),
        ((511, 512, 100_000), (256, 1024, 1024)),
    ],
)
def test_a_class_is_the_nearest_power_of_four(sizes, expected):
    assert timed_products.class_of(*sizes, False) == (*expected, False)


@pytest.mark.parametrize(
    ("mm", "dnn", "expected"),
    [
        (2e-3, 1e-3, [True, True]),
        (1.1e-3, 1e-3, [True, False]),
        (1.04e-3, 1e-3, [False, False]),
        (2e-5, 1e-5, [False, False]),
        (1e-3, 2e-3, [False, False]),
    ],
    ids=["twice as fast", "a tenth", "hardly faster", "too short to matter", "slower"],
)
def test_faster_is_clearly_faster(mm, dnn, expected):
    gains = (matrix_products.IN_GRAPHS, matrix_products.IN_FUNCTIONS)
    assert [
        matrix_products.is_faster(timed_products.Times(mm, dnn), gain) for gain in gains
    ] == expected


def test_off_touches_nothing(machine, monkeypatch):
    def never(*args):
        raise AssertionError("touched")

    for module, name in (
        (torch_internals, "onednn_affine"),
        (timed_products, "measure"),
        (timed_products, "kept"),
        (matrix_products, "kept"),
    ):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setenv(matrix_products.SWITCH, "off")
    a, b = drawn(N, N), drawn(N, N)
    assert torch.equal(matrix_products.product(a, b), a @ b)
    with hog.second_order():
        assert torch.equal(a @ b, torch.mm(a, b))
    assert matrix_products.state() == "off"
    assert not machine.exists()


def without_onednn(monkeypatch):
    monkeypatch.setattr(torch_internals, "_onednn_is_built", lambda: False)


def with_torchs_switch(monkeypatch):
    monkeypatch.setattr(torch_internals.torch.backends.mkldnn, "enabled", False)


def with_bfloat16(monkeypatch):
    monkeypatch.setattr(torch_internals, "onednn_full_precision", lambda: False)


@pytest.mark.parametrize("absent", [without_onednn, with_torchs_switch, with_bfloat16])
def test_where_it_is_absent_nothing_is_timed(machine, monkeypatch, absent):
    with monkeypatch.context() as patch:
        absent(patch)
        a, b = drawn(N, N), drawn(N, N)
        assert torch.equal(matrix_products.product(a, b), a @ b)
        assert matrix_products.state() == "off"
        assert "classes" not in matrix_products.facts()
    assert not machine.exists()


def test_less_than_full_precision_is_noticed():
    before = torch.get_float32_matmul_precision()
    assert torch_internals.onednn_full_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not torch_internals.onednn_full_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch_internals.onednn_full_precision()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's, of its own switch
def test_torchs_switch():
    assert torch_internals.onednn_available()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not torch_internals.onednn_available()


def test_a_switch_that_is_none(monkeypatch, capsys):
    monkeypatch.setenv(matrix_products.SWITCH, "of")
    with pytest.raises(ValueError, match="HOGLIB_ONEDNN: expected one of auto, off, on; got 'of'"):
        matrix_products.product(drawn(N, N), drawn(N, N))
    assert main(["env"]) == 2
    assert capsys.readouterr().err.startswith("error: HOGLIB_ONEDNN")


def test_it_is_timed_once_a_machine(machine, quick):
    for _ in range(2):
        matrix_products.product(drawn(N, N), drawn(N, N))
        matrix_products.forget()  # as another process
        assert len(matrix_products.faster(1.05)) == 54
    assert quick == [1]
    (file,) = machine.glob("products-*.json")
    assert json.loads(file.read_text())["torch"] == torch.__version__


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seconds": {"a": [1, 2]}}', '{"seconds": 3}'])
def test_a_broken_file_is_timed_anew(machine, quick, text):
    matrix_products.faster(1.05)
    (file,) = machine.glob("products-*.json")
    file.write_text(text)
    matrix_products.forget()
    assert len(matrix_products.faster(1.05)) == 54
    assert quick == [1, 1]
    assert list(machine.iterdir()) == [file]
    assert timed_products._read(file)


def test_who_measured_first_decides(machine, quick, monkeypatch):
    """Another process put its times there while this one was measuring."""
    slow = dict.fromkeys(
        [timed_products.class_of(64, 64, 64, False)], timed_products.Times(1.0, 2.0)
    )
    measure = timed_products.measure

    def late():
        assert timed_products._write(machine / f"products-{timed_products._key()}.json", slow)
        return measure()

    monkeypatch.setattr(timed_products, "measure", late)
    assert matrix_products.faster(1.05) == frozenset()


def test_without_a_place_to_keep_it(quick, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "file"))
    assert len(matrix_products.faster(1.05)) == len(matrix_products.faster(1.25)) == 54
    assert quick == [1]


def small(monkeypatch):
    monkeypatch.setattr(timed_products, "SIZES", (64,))


def test_measuring_leaves_the_number_of_threads(machine, monkeypatch):
    small(monkeypatch)
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        timed_products.measure()
        seen.append(torch.get_num_threads())
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 3]


def test_measuring_leaves_the_caller_as_it_was(machine, monkeypatch):
    small(monkeypatch)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        found = timed_products.measure()
    assert set(found) == {(64, 64, 64, False), (64, 64, 64, True)}
    assert all(0 < seconds < 1 for times in found.values() for seconds in times)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert not seen


def test_an_interrupt_ends_the_measuring(machine, monkeypatch):
    begun = []

    class Interrupted(threading.Thread):
        def join(self, timeout=None):
            begun.append(self)
            if len(begun) == 1:
                raise KeyboardInterrupt
            super().join(timeout)

    monkeypatch.setattr(timed_products.threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        matrix_products.faster(1.05)
    assert len(begun) == 2
    assert not begun[0].is_alive()
    assert not machine.exists()


def test_a_product_that_is_wrong_is_never_taken(machine, monkeypatch):
    small(monkeypatch)
    run = torch_internals.onednn_affine
    monkeypatch.setattr(torch_internals, "onednn_affine", lambda *given: run(*given) * (1 + 1e-4))
    assert timed_products.measure() == {}
    monkeypatch.setattr(torch_internals, "onednn_affine", lambda *given: run(*given) * torch.nan)
    assert timed_products.measure() == {}


def raising(kind):
    def fail(*given):
        raise kind("no such primitive")

    return fail


def test_where_onednn_raises_it_is_not_taken(machine, monkeypatch, capsys):
    monkeypatch.setattr(torch_internals, "onednn_affine", raising(RuntimeError))
    a = drawn(N, N)
    with hog.second_order():
        assert torch.equal(a @ a, torch.mm(a, a))
    assert matrix_products.state() == "[]"
    assert main(["env"]) == 0
    assert "oneDNN in 0 of 0 classes" in capsys.readouterr().out


def test_a_mistake_while_measuring_is_not_hidden(machine, monkeypatch):
    monkeypatch.setattr(torch_internals, "onednn_affine", raising(TypeError))
    with pytest.raises(TypeError, match="no such primitive"):
        timed_products.measure()


def test_a_process_of_its_own_measures_and_keeps(machine):
    """As a user has it: the first large product of a machine."""
    text = """
import torch, hoglib as hog
from hoglib._core import timed_products as timed
timed.SIZES = (64,)
x = torch.randn(64, 64)
assert torch.allclose(hog.ops.linear(x, x), x @ x.T, atol=1e-4)
"""
    given = os.environ | {"HOGLIB_ONEDNN": "auto"}
    subprocess.run([sys.executable, "-c", text], check=True, env=given)
    (file,) = machine.glob("products-*.json")
    assert len(json.loads(file.read_text())["seconds"]) == 2


def test_outside_of_graphs_it_takes_more(quick, monkeypatch, calls):
    """A Function in Python costs some of what oneDNN gains."""
    monkeypatch.setenv(matrix_products.SWITCH, "auto")
    measure = timed_products.measure
    slower = timed_products.Times(1.1e-2, 1e-2)
    monkeypatch.setattr(timed_products, "measure", lambda: dict.fromkeys(measure(), slower))
    matrix_products.product(drawn(N, N), drawn(N, N))
    assert not calls
    assert matrix_products.chosen(N, N, N, False)
    assert matrix_products.state() != "[]"


def test_env_says_what_was_found(machine, quick, capsys):
    assert main(["env"]) == 0
    assert "oneDNN in 54 of 54 classes of sizes in captured" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)["matrix_products"]
    assert known == {
        "switch": "auto", "available": True, "classes": 54, "in_graphs": 54, "in_functions": 54,
        "most": 10.0,
    }  # fmt: skip


def test_the_private_operation_is_the_one_that_is_called():
    schema = str(torch.ops.mkldnn._linear_pointwise.default._schema)
    assert schema == (
        "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
        "str? algorithm) -> Tensor Y"
    )
