"""Products in a captured graph: by oneDNN where that is chosen, and the same numbers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import hoglib as hog
from hoglib._core import matrix_products, torch_internals
from hoglib.capture import backend as backends
from hoglib.capture.product_passes import by_onednn, depends_on

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.skipif(not torch_internals.onednn_available(), reason="this torch has no oneDNN"),
]
N = 2 * matrix_products.SMALLEST
aten = torch.ops.aten


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setenv(matrix_products.SWITCH, "on")


def traced(fn, *given, mode="fake") -> fx.GraphModule:
    return make_fx(fn, tracing_mode=mode)(*given)


def targets(graph: fx.GraphModule) -> list[str]:
    """The products of a graph, in order."""
    known = {aten.mm.default: "mm", aten.addmm.default: "addmm", aten.bmm.default: "bmm",
             torch.ops.hoglib.affine.default: "oneDNN", aten.add.Tensor: "add"}  # fmt: skip
    return [known[node.target] for node in graph.graph.nodes if node.target in known]


a, b, c = (torch.randn(N, N, generator=torch.Generator().manual_seed(i)) for i in range(3))
GRAPHS = {
    "mm": (lambda: (torch.mm, a, b), ["oneDNN"]),
    "both by columns": (lambda: (lambda a, b: a.t() @ b.t(), a, b), ["oneDNN"]),
    "a part of a matrix": (lambda: (lambda a, b: a[:40] @ b[:, :50], a, b), ["oneDNN"]),
    "a bias": (lambda: (torch.addmm, a[0], a, b), ["oneDNN"]),
    "a matrix added": (lambda: (torch.addmm, c, a, b), ["oneDNN", "add"]),
    "a number added": (lambda: (torch.addmm, torch.ones(()), a, b), ["oneDNN", "add"]),
    "a column added": (lambda: (torch.addmm, a[:, :1], a, b), ["oneDNN", "add"]),
    "with factors": (lambda: (lambda *g: torch.addmm(*g, beta=2, alpha=3), c, a, b), ["addmm"]),
    "every other column": (lambda: (lambda a, b: a[:, ::2] @ b[::2].contiguous(), a, b), ["mm"]),
    "small": (lambda: (torch.mm, a[:8, :8], b[:8, :8]), ["mm"]),
    "float64": (lambda: (torch.mm, a.double(), b.double()), ["mm"]),
    "in a batch": (lambda: (torch.bmm, a[None], b[None]), ["bmm"]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_becomes_onednns(always, name):
    given, expected = GRAPHS[name]
    fn, *tensors = given()
    graph = traced(fn, *tensors)
    by_onednn(graph)
    graph.graph.lint()
    assert targets(graph) == expected
    assert_close(graph(*tensors), fn(*tensors), rtol=1e-5, atol=1e-5)


def test_sizes_that_are_not_known_yet_stay(always):
    graph = traced(torch.mm, a, b, mode="symbolic")
    by_onednn(graph)
    assert targets(graph) == ["mm"]


def test_a_class_decides(monkeypatch):
    monkeypatch.setenv(matrix_products.SWITCH, "auto")
    monkeypatch.setattr(matrix_products, "faster", lambda gain: {(64, 64, 64, False)})
    graph = traced(lambda a, b: (a @ b, a.t() @ b), a, b)
    by_onednn(graph)
    assert targets(graph) == ["oneDNN", "mm"]
    monkeypatch.setenv(matrix_products.SWITCH, "off")
    graph = traced(lambda a, b: (a @ b, a.t() @ b), a, b)
    by_onednn(graph)
    assert targets(graph) == ["mm", "mm"]


NO_PRODUCTS = {
    "no product": lambda x: x.sin(),
    "in float64": lambda x: x.double() @ x.double(),
    "in a batch": lambda x: x[None] @ x[None],
}


@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_a_graph_without_such_products_waits_for_no_timing(monkeypatch, name):
    def never():
        raise AssertionError("timed")

    monkeypatch.setenv(matrix_products.SWITCH, "auto")
    monkeypatch.setattr(matrix_products, "kept", never)
    matrix_products.forget()
    assert depends_on(traced(NO_PRODUCTS[name], a)) == ""
    with pytest.raises(AssertionError, match="timed"):
        depends_on(traced(lambda x: x @ x, a))
    matrix_products.forget()


def product_of(dtype: torch.dtype):
    """A Hessian-vector product, made anew."""
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layers = [nn.Linear(N, N), nn.Tanh(), nn.Linear(N, 40), nn.Tanh(), nn.Linear(40, 3)]
    model = nn.Sequential(*layers).to(dtype)
    loss, params = hog.functional_loss(model, F.cross_entropy), hog.trainable_params(model)
    with torch.no_grad():
        for p in params.values():
            p.copy_(drawn(p.shape) / 8)
    v = {name: drawn(p.shape).to(dtype) for name, p in params.items()}
    batch = drawn(N, N).to(dtype), torch.arange(N) % 3
    return lambda **options: hog.hvp(loss, params, v, batch, **options)[1]


def ran(call) -> tuple[dict[str, torch.Tensor], int]:
    """What a call gives, and how often oneDNN's product ran in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        result = call()
    return result, sum(event.name == "mkldnn::_linear_pointwise" for event in seen.events())


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_a_compiled_product(tmp_path, monkeypatch):
    """The switch is part of what a compiled graph depends on, in memory and on disk."""
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    exact = product_of(torch.float64)()
    for switch in ("on", "off", "on"):
        monkeypatch.setenv(matrix_products.SWITCH, switch)
        backends.clear_compiled()
        product = product_of(torch.float32)
        product(compile=True)
        found, count = ran(lambda product=product: product(compile=True))
        assert bool(count) is (switch == "on")
        for name, p in exact.items():
            assert (found[name] - p).norm() <= 1e-5 * p.norm()
    assert len(list(tmp_path.glob("*.bin"))) == 2
