"""Products in a captured graph: by oneDNN where that is faster, and the same numbers."""

import json
import threading

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import hoglib as hog
from hoglib._core import torch_kernels
from hoglib.capture import backend as backends
from hoglib.capture import kernel_choice
from hoglib.capture.kernel_choice import Product
from hoglib.capture.product_passes import by_onednn, turn_narrow
from hoglib.cli.main import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.skipif(not torch_kernels.onednn_available(), reason="this torch has no oneDNN"),
]
N = 2 * kernel_choice.SMALLEST
aten = torch.ops.aten


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setenv(kernel_choice.SWITCH, "on")


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
def test_what_becomes_onednns(always, name, tmp_path):
    given, expected = GRAPHS[name]
    fn, *tensors = given()
    graph = traced(fn, *tensors)
    by_onednn(graph, tmp_path / "record.json")
    graph.graph.lint()
    assert targets(graph) == expected
    assert_close(graph(*tensors), fn(*tensors), rtol=1e-5, atol=1e-5)


def test_sizes_that_are_not_known_yet_stay(always, tmp_path):
    graph = traced(torch.mm, a, b, mode="symbolic")
    by_onednn(graph, tmp_path / "record.json")
    assert targets(graph) == ["mm"]


@pytest.fixture
def timed(monkeypatch):
    """oneDNN takes half of the time, but for matrices of 40 rows; the products that were timed."""
    found = []

    def seconds(a, b):
        found.append(Product.of(a, b))
        return (1e-3, 2e-3) if len(a) == 40 else (2e-3, 1e-3)

    monkeypatch.setenv(kernel_choice.SWITCH, "auto")
    monkeypatch.setattr(kernel_choice, "_seconds", seconds)
    return found


def products(a, b):
    return a @ b, a[:40] @ b, a.t() @ b, (a + 1) @ b


def test_each_product_is_timed_once_at_its_own_layout(timed, tmp_path):
    graph = traced(products, a, b)
    by_onednn(graph, tmp_path / "record.json")
    assert targets(graph) == ["oneDNN", "mm", "oneDNN", "add", "oneDNN"]
    assert timed == [
        (40, N, N, False, False), (N, N, N, False, False), (N, N, N, True, False)
    ]  # fmt: skip


def test_the_choice_is_recorded_beside_the_graph(timed, tmp_path, monkeypatch):
    record = tmp_path / "cache" / "record.json"
    by_onednn(traced(products, a, b), record)
    monkeypatch.setattr(kernel_choice, "_seconds", raising(AssertionError))
    again = traced(products, a, b)
    by_onednn(again, record)
    assert targets(again) == ["oneDNN", "mm", "oneDNN", "add", "oneDNN"]
    assert [path.name for path in record.parent.iterdir()] == ["record.json"]


def test_of_processes_that_time_at_once_all_use_the_choice_of_the_first(timed, tmp_path):
    record, seconds = tmp_path / "record.json", kernel_choice._seconds

    def late(a, b):
        record.write_text(json.dumps({"onednn": []}))
        return seconds(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "_seconds", late)
        graph = traced(products, a, b)
        by_onednn(graph, record)
    assert targets(graph) == ["mm", "mm", "mm", "add", "mm"]


@pytest.mark.parametrize("content", ["", "{}", '{"onednn": [[1, 2]]}'])
def test_a_damaged_record_is_not_used(timed, tmp_path, content):
    record = tmp_path / "record.json"
    record.write_text(content)
    graph = traced(products, a, b)
    by_onednn(graph, record)
    assert targets(graph).count("oneDNN") == 3


def test_without_a_place_for_the_record(timed, tmp_path):
    (tmp_path / "file").write_text("")
    graph = traced(products, a, b)
    by_onednn(graph, tmp_path / "file" / "record.json")
    assert targets(graph).count("oneDNN") == 3


def raising(kind):
    def fail(*given):
        raise kind("no such primitive")

    return fail


NOT_CHOSEN = {
    "wrong": lambda run: lambda *given: run(*given) * (1 + 1e-4),
    "nan": lambda run: lambda *given: run(*given) * torch.nan,
    "raises": lambda run: raising(RuntimeError),
}


@pytest.mark.parametrize("name", NOT_CHOSEN)
def test_a_product_that_is_wrong_or_raises_is_not_chosen(name, monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_choice.SWITCH, "auto")
    monkeypatch.setattr(kernel_choice, "SPEEDUP", 0.0)
    monkeypatch.setattr(kernel_choice, "SAVED", -1.0)  # the slower one is chosen too
    graph = traced(torch.mm, a, b)
    by_onednn(graph, tmp_path / "right.json")
    assert targets(graph) == ["oneDNN"]
    broken = NOT_CHOSEN[name](torch_kernels.onednn_affine)
    monkeypatch.setattr(torch_kernels, "onednn_affine", broken)
    graph = traced(torch.mm, a, b)
    by_onednn(graph, tmp_path / "wrong.json")
    assert targets(graph) == ["mm"]


def test_a_mistake_while_timing_is_not_hidden(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_choice.SWITCH, "auto")
    monkeypatch.setattr(torch_kernels, "onednn_affine", raising(TypeError))
    with pytest.raises(TypeError, match="no such primitive"):
        by_onednn(traced(torch.mm, a, b), tmp_path / "record.json")
    assert not list(tmp_path.iterdir())


def test_timing_leaves_the_caller_as_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_choice.SWITCH, "auto")
    graph = traced(torch.mm, a, b)
    before, state, seen = torch.get_num_threads(), torch.get_rng_state(), []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    try:
        torch.set_num_threads(3)
        with Mode(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            kernel_choice.choose_onednn([Product(N, N, N, True, False)], tmp_path / "record.json")
        threads = [torch.get_num_threads()]
        later = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        torch.set_num_threads(before)
    assert threads == [3, 3]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.mm not in seen
    del graph


def test_an_interrupt_ends_the_timing(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_choice.SWITCH, "auto")
    counted = []

    def interrupted(a, b):
        counted.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_choice, "_seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by_onednn(traced(products, a, b), tmp_path / "record.json")
    assert len(counted) < 4
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("switch", ["on", "off"])
def test_a_switch_needs_no_timing(monkeypatch, tmp_path, switch):
    monkeypatch.setenv(kernel_choice.SWITCH, switch)
    monkeypatch.setattr(kernel_choice, "_seconds", raising(AssertionError))
    graph = traced(torch.mm, a, b)
    by_onednn(graph, tmp_path / "record.json")
    assert targets(graph) == [{"on": "oneDNN", "off": "mm"}[switch]]


def test_an_unknown_switch_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_choice.SWITCH, "maybe")
    with pytest.raises(ValueError, match="HOGLIB_ONEDNN: expected"):
        by_onednn(traced(torch.mm, a, b), tmp_path / "record.json")


@pytest.mark.parametrize("setting", ["disabled", "low precision"])
def test_torchs_own_settings_turn_it_off(always, setting, tmp_path):
    settings = torch.backends.mkldnn
    matmul, graph = settings.matmul, traced(torch.mm, a, b)
    before = settings.enabled, matmul.fp32_precision
    try:
        if setting == "disabled":
            settings.enabled = False
        else:
            matmul.fp32_precision = "bf16"
        by_onednn(graph, tmp_path / "record.json")
    finally:
        settings.enabled, matmul.fp32_precision = before
    assert targets(graph) == ["mm"]


def test_env_states_the_setting(always, capsys):
    assert main(["env"]) == 0
    assert "compiled graphs use oneDNN (HOGLIB_ONEDNN=on)" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)["matrix_products"]
    assert known == {"switch": "on", "onednn": True}


def test_the_private_operation_is_the_one_that_is_called():
    schema = str(torch.ops.mkldnn._linear_pointwise.default._schema)
    assert schema == (
        "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
        "str? algorithm) -> Tensor Y"
    )


def drawn(*shape):
    return torch.randn(*shape)


LAYOUTS = {
    "rows": drawn,
    "columns": lambda *shape: drawn(*reversed(shape)).t(),
    "part": lambda *shape: drawn(shape[0], shape[1] + 3)[:, :-3],
    "every other": lambda *shape: drawn(shape[0], 2 * shape[1])[:, ::2],
    "repeated": lambda *shape: drawn(shape[1]).expand(shape),
}


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_layouts(first, second):
    x, y = LAYOUTS[first](N, N + 1), LAYOUTS[second](N + 1, N + 2)
    product = Product.of(x, y)
    assert (product is not None) is ({first, second} <= {"rows", "columns", "part"})
    if product is not None:
        assert_close(torch.ops.hoglib.affine(x, y.t(), y[0].contiguous()), torch.addmm(y[0], x, y))


# first and second factor, columns, and whether it is the product of few rows that is computed
NARROW = [
    ("columns", "rows", 2, True),
    ("rows", "rows", 8, True),
    ("columns", "columns", 3, True),
    ("rows", "columns", 2, False),  # fast as it is
    ("columns", "rows", 1, False),
    ("columns", "rows", 9, False),
]


@pytest.mark.parametrize(("first", "second", "columns", "turned"), NARROW)
def test_a_product_of_few_columns_is_one_of_few_rows(first, second, columns, turned):
    x, y = LAYOUTS[first](N, N), LAYOUTS[second](N, columns)
    graph = traced(lambda x, y: torch.mm(x, y).view(-1) * 2, x, y)
    turn_narrow(graph)
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert product.meta["val"].shape == ((columns, N) if turned else (N, columns))
    assert_close(graph(x, y), torch.mm(x, y).view(-1) * 2)


def ran(call) -> tuple[torch.Tensor, int]:
    """What a call gives, and how often oneDNN's product ran in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        result = call()
    return result, sum(event.name == "mkldnn::_linear_pointwise" for event in seen.events())


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_a_compiled_product(tmp_path, monkeypatch):
    """The switch is part of what a compiled graph depends on, in memory and on disk."""
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    for switch in ("on", "off", "on"):
        monkeypatch.setenv(kernel_choice.SWITCH, switch)
        backends.clear_compiled()
        product = hog.compile(lambda a, b: a @ b, check=False)
        product(a, b)
        found, count = ran(lambda product=product: product(a, b))
        assert bool(count) is (switch == "on")
        assert_close(found, a @ b, rtol=1e-5, atol=1e-5)
    assert len(list(tmp_path.glob("*.bin"))) == 2
