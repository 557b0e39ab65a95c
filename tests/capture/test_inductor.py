"""Graphs that torch's compiler makes, and its cache that keeps them."""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib._core.torch_api.torch_version import TORCH_VERSION
from hoglib.capture import passes
from tests.capture.models import draw
from tests.long_tail import FULL
from tests.several_processes import exit_code_of

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """One directory for all tests: what one compiles, others find."""
    directory = tmp_path_factory.getbasetemp() / "graphs"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    return directory


def function():
    """The same function, made anew."""
    weight = draw(3).requires_grad_()

    def fn(x):
        return torch.func.grad(lambda x: (x * weight).sin().prod())(x)

    return fn


def test_what_is_compiled_is_found_again_in_this_process_and_in_the_next(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a" / "b"))
    expected = function()(draw(3))
    for source in ("compiled", "cache"):
        fast = hog.compile(function())
        assert_close(fast(draw(3)), expected, rtol=1e-12, atol=1e-12)
        assert_close(fast(draw(3, seed=1)), function()(draw(3, seed=1)))
        assert (fast.signatures[0].backend, fast.signatures[0].source) == ("inductor", source)
        said = f"compiled {fast.name} in" in (err := capfd.readouterr().err)
        assert said == (source == "compiled") == (str(tmp_path) in err)
        assert "for about" not in err
    assert exit_code_of(in_the_next_process, tmp_path) == 0
    assert (tmp_path / "found").read_text() == f"{fast(draw(3)).tolist()} cache"
    for path in tmp_path.rglob("*"):  # as a process that is interrupted leaves them
        if path.is_file():
            start = path.read_bytes()[:10]
            path.unlink()  # this process runs what it holds
            path.write_bytes(start)
    again = hog.compile(function())
    assert_close(again(draw(3)), expected)


def in_the_next_process(folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "a" / "b")
    torch.set_num_threads(1)
    fast = hog.compile(function())
    (folder / "found").write_text(f"{fast(draw(3)).tolist()} {fast.signatures[0].source}")


def test_code_is_for_a_number_of_threads_and_a_vector_instruction_set(cache, monkeypatch):
    threads, sources = torch.get_num_threads(), []
    try:
        for count, vectors in ((1, "avx2"), (2, "avx2"), (2, "default"), (1, "avx2")):
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", vectors)
            torch.set_num_threads(count)
            fast = hog.compile(lambda x: x.exp().sin() * 3)
            fast(draw(3))
            sources.append(fast.signatures[0].source)
    finally:
        torch.set_num_threads(threads)
    assert sources == ["compiled", "compiled", "compiled", "cache"]


def test_derivatives_of_a_compiled_function_are_compiled(cache, capfd):
    weight = draw(3).requires_grad_()
    x = draw(3, seed=1).requires_grad_()

    def fn(x):
        return (x * weight).sin().sum()

    fast = hog.compile(fn)
    value, expected = fast(x), fn(x)
    assert_close(value, expected)
    ours, theirs = (torch.autograd.grad(v, [x, weight]) for v in (value, expected))
    assert_close(ours, theirs)
    assert "compiled the backward of fn" in capfd.readouterr().err


def test_a_long_compilation_is_announced_and_a_directory_that_cannot_be_written(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("hoglib.capture.runners.SECONDS_PER_OPERATION", 10)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    fast = hog.compile(function())
    with pytest.warns(
        UserWarning, match="could not write compiled code to .*file .*Set TORCHINDUCTOR"
    ):
        assert_close(fast(draw(3)), function()(draw(3)))
    assert f"operations of {fast.name}, for about" in capfd.readouterr().err


def test_without_a_compiler_it_runs_one_by_one_and_says_so(tmp_path, monkeypatch):
    import torch._inductor.config as config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fast = hog.compile(function())
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.warns(UserWarning, match=r"is not compiled, and runs its \d+ operations one by one: no C\+\+ compiler was found"):  # fmt: skip
        result = fast(draw(3))
    assert_close(result, function()(draw(3)))
    assert fast.signatures[0].backend == "eager"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("times", [1, 2])
def test_what_fails_is_tried_once_more_without_the_cache(cache, monkeypatch, times):
    import torch._inductor as torchs
    import torch._inductor.config as config

    compile, seen = torchs.standalone_compile, []

    def tried(*args, **kwargs):
        seen.append((os.environ["TORCHINDUCTOR_CACHE_DIR"], config.cpp_wrapper))
        if len(seen) <= times:
            raise ImportError("file too short")
        return compile(*args, **kwargs)

    monkeypatch.setattr(torchs, "standalone_compile", tried)
    fast = hog.compile(function())
    if times == 1:
        assert_close(fast(draw(3)), function()(draw(3)))
    else:
        with pytest.raises(ImportError, match="too short"):
            fast(draw(3))
        assert fast.signatures == []
    (first, compact), (second, one_by_one) = seen
    assert first.startswith(str(cache))
    assert not second.startswith(str(cache))
    assert (compact, one_by_one) == (True, False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_mode_of_torch_compile_and_results_that_the_next_run_overwrites(
    cache, monkeypatch, device
):
    import torch._inductor as torchs
    import torch._inductor.config as config

    seen = []

    def standalone(graph, inputs, **_):
        seen.append((config.triton.cudagraphs, config.max_autotune))
        held = [torch.zeros(3, device=device)]  # a CUDA graph writes to the same memory at each run
        return lambda *given: [held[0].copy_(graph(*given)[0])]

    monkeypatch.setattr(torchs, "standalone_compile", standalone)
    fast = hog.compile(lambda x: x * 3, backend="max-autotune", check=False)
    first, second = (fast(torch.full((3,), value, device=device)) for value in (1.0, 2.0))
    assert second.tolist() == [6.0] * 3
    assert seen == [(device == "cuda", True)]
    assert fast.signatures[0].backend == "max-autotune"
    if device == "cuda":
        assert first.tolist() == [3.0] * 3
    del seen[:]
    with config.patch({"max_autotune": True}):  # settings of torch's compiler apply
        hog.compile(lambda x: x / 3, backend="reduce-overhead", check=False)(torch.ones(3))
    assert seen == [(False, True)]


def test_random_numbers_and_layouts_in_one_compiled_graph(cache):
    """What differs most between torch's compiler and torch, in one graph to save time."""

    def fn(x, y, z, n):
        noise = torch.rand(3, dtype=x.dtype) + torch.nn.functional.dropout(x, 0.5)
        return x * noise, y.T @ y, y[:, 0].contiguous(), z, (z > 0).sum(), x[1:], x, None, n

    fast = hog.compile(fn)
    for seed in range(2):
        given = draw(3, seed=seed), draw(4, 6, seed=seed).T, draw(0, 2), 2
        torch.manual_seed(seed)
        ours = fast(*given), torch.rand(2)
        torch.manual_seed(seed)
        expected = fn(*given), torch.rand(2)
        assert_close(ours[0][:-2], expected[0][:-2])
        assert ours[0][-2:] == (None, 2)
        assert_close(ours[1], expected[1])
    assert len(fast.signatures) == 1


def test_sizes_that_change_in_one_compiled_graph(cache):
    weight = draw(3)

    def fn(x):
        return torch.func.grad(lambda x: (x * weight).sin().square().sum())(x)

    fast = hog.compile(fn, dynamic=True)
    for size in (4, 7, 5):
        assert_close(fast(draw(size, 3)), fn(draw(size, 3)))
    assert len(fast.signatures) == 1


SCALED = {
    "a sum with a product": lambda x, a, b: torch.add(x, a @ b, alpha=-0.1),
    "a product with a sum": lambda x, a, b: torch.add(a @ b, x, alpha=3),
    "two products": lambda x, a, b: torch.add(x @ b.T, a @ (b @ b.T), alpha=0.5),
    "a difference": lambda x, a, b: torch.sub(x, a @ b, alpha=2),
    "with a number": lambda x, a, b: torch.add(x, 2, alpha=4),
    "addmm": lambda x, a, b: torch.addmm(x[0], a, b, alpha=-0.5, beta=2).relu(),
    "addmm of nothing": lambda x, a, b: torch.addmm(x / 0, a, b, beta=0),
    "addmv": lambda x, a, b: torch.addmv(x[:, 0], a, b[:, 0], alpha=3, beta=0.5),
    "in place": lambda x, a, b: x.clone().add_(a @ b, alpha=-0.1),
    "less in place": lambda x, a, b: x.clone().sub_(a @ b, alpha=-0.1),
    "addmm in place": lambda x, a, b: x.clone().addmm_(a, b, alpha=3, beta=0.5),
    "baddbmm": lambda x, a, b: torch.baddbmm(x[None], a[None], b[None], alpha=3, beta=0.5),
}


NOTHING = torch.empty(0, dtype=torch.float64)
CONCATENATED = {
    "nothing and a transpose": lambda x: torch.cat([NOTHING, x.mT], -2).view(2, 12),
    "a transpose and no rows": lambda x: torch.cat([x.mT, x.mT[:, :0]], -2).view(2, 12),
    "one": lambda x: torch.cat([x.mT]).view(8, 3),
    "two and nothing": lambda x: torch.cat([x.mT, NOTHING, x.mT], 1).view(2, 24),
    "one of another dtype": lambda x: torch.cat([NOTHING, x.mT.float()], 1).view(2, 12),
    "channels last": lambda x: torch.cat([x[None].to(memory_format=torch.channels_last)]).permute(0, 2, 3, 1).view(24),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=FULL)])
def test_factors_of_sums_are_heeded_and_a_concatenation_with_nothing_laid_out_as_torch_does(
    cache, dynamic
):
    def fn(x, a, b, y):
        joined = () if dynamic else CONCATENATED.values()
        return [case(x, a, b) for case in SCALED.values()], [case(y) for case in joined]

    y = draw(2, 3, 4)
    if TORCH_VERSION < (2, 13):  # inductor drops a cast to float32 and back, also for torch.compile
        y = y.float().double()
    given = draw(5, 4), draw(5, 3, seed=1), draw(3, 4, seed=2), y
    (sums, joined), expected = hog.compile(fn, dynamic=dynamic, check=False)(*given), fn(*given)
    assert_close(sums, expected[0], rtol=1e-12, atol=1e-12)
    assert_close(joined, expected[1], rtol=0, atol=0)


def test_operators_with_lists_of_tensors(cache):
    """As one C++ program, a call of such an operator ends the process."""
    sine = hog.ops.external(np.sin, np.cos, lambda x: -np.sin(x))
    x = draw(3)

    def loss(x):
        return sine(2 * x).square().sum()

    assert_close(hog.hvp(loss, x, x, compile=True), hog.hvp(loss, x, x))


def test_gradients_of_convolutions(cache, monkeypatch):
    """Which go to other kernels than in eager mode."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Tanh(),
        nn.ConvTranspose2d(3, 2, 3, stride=2, padding=1, output_padding=1),
    ).double()  # fmt: skip
    batch = draw(3, 2, 14, 14), draw(3, 2, 16, 16, seed=1)
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    product = lambda v: hog.hvp(loss, params, v, batch)  # noqa: E731
    assert_close(hog.compile(product, check=False)(params), product(params), rtol=1e-10, atol=1e-12)
    fewer, specialize = [], passes.specialize_in_inductor

    def counted(graph):
        kernel = torch.ops.aten.convolution.default
        before = len(graph.find_nodes(op="call_function", target=kernel))
        specialize(graph)
        fewer.append(before - len(graph.find_nodes(op="call_function", target=kernel)))

    monkeypatch.setattr(passes, "specialize_in_inductor", counted)
    around = torch.compile(product, options=hog.capture.inductor_options())
    assert_close(around(params), product(params), rtol=1e-10, atol=1e-12)
    assert fewer[0] > 0
