"""Graphs that torch's compiler makes, and the directory that keeps them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from hoglib._core import cache as disk_cache
from hoglib.capture import backend as backends
from tests.capture.models import draw
from tests.long_tail import FULL

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec")


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def cache(shared_cache, monkeypatch):
    """A directory that one test fills and others read."""
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(shared_cache))
    backends.clear_compiled()
    return shared_cache


@pytest.fixture
def other_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    backends.clear_compiled()
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch):
    """Whatever is compiled fails the test."""

    def fail(*args):
        raise AssertionError("compiled")

    monkeypatch.setattr(backends, "_compile", fail)


def function():
    """The same function, made anew."""
    weight = draw(3).requires_grad_()

    def fn(x):
        return torch.func.grad(lambda x: (x * weight).sin().prod())(x)

    return fn


def graph_and_inputs():
    seen = []

    def keep(graph, inputs):
        seen.append((graph, inputs))
        return graph.forward

    fast = hog.compile(function(), backend=keep)
    fast(draw(3))
    return seen[0]


def machine_code(cache):
    return {path: path.stat().st_mtime_ns for path in cache.glob("torch/**/*.so")}


@pytest.fixture
def compiled(cache, capfd):
    """What the first compilation gave, and what it said."""
    fast = hog.compile(function())
    x = draw(3)
    return fast, fast(x), capfd.readouterr().err


def test_the_first_process_compiles_and_says_so(compiled, cache):
    fast, result, said = compiled
    assert_close(result, function()(draw(3)), rtol=1e-12, atol=1e-12)
    (one,) = fast.signatures
    assert one.backend == "inductor"
    if one.source == "compiled":
        assert said.startswith("hoglib: compiling ")
        assert f"compiled {fast.name} in" in said
        assert str(cache) in said
    assert {path.suffix or path.name for path in cache.iterdir()} == {".bin", "torch"}
    assert_close(fast(draw(3, seed=1)), function()(draw(3, seed=1)))


def test_a_graph_that_is_equal_is_found_in_memory_and_on_disk(compiled, cache, no_compiler, capfd):
    again = hog.compile(function())
    assert_close(again(draw(3)), compiled[1])
    assert again.signatures[0].source == "memory"
    backends.clear_compiled()
    later = hog.compile(function())
    assert_close(later(draw(3)), compiled[1])
    assert later.signatures[0].source == "disk"
    assert capfd.readouterr().err == ""


def test_derivatives_of_a_compiled_function_are_compiled(other_cache, capfd):
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


def test_a_second_process_reads_what_the_first_wrote(compiled, cache):
    program = """
        import sys, torch
        import hoglib as hog
        from hoglib.capture import backend as inductor
        from tests.capture.test_inductor import function
        from tests.capture.models import draw
        torch.set_num_threads(1)
        inductor._compile = None
        fast = hog.compile(function())
        print(fast(draw(3)).tolist(), fast.signatures[0].source)
    """
    before = machine_code(cache)
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False,
    )  # fmt: skip
    # No graph is compiled. Torch may try its compiler in a process, whose results it also keeps here.
    assert before
    assert before.items() <= machine_code(cache).items()
    assert found.stdout.strip() == f"{compiled[1].tolist()} disk", found.stderr


@pytest.mark.parametrize("damage", ["cut short", "empty", "something else", "of another user"])
def test_a_file_that_cannot_be_read_is_compiled_anew(compiled, cache, monkeypatch, damage):
    (path,) = cache.glob("*.bin")
    whole = path.read_bytes()
    backends.clear_compiled()
    made = []
    monkeypatch.setattr(
        backends, "_compile", lambda graph, *rest: (made.append(1), graph.forward)[1]
    )
    try:
        if damage == "of another user":
            monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
        else:
            path.write_bytes(
                {"cut short": whole[:100], "empty": b"", "something else": b"not a graph"}[damage]
            )
        fast = hog.compile(function())
        assert_close(fast(draw(3)), compiled[1])
        assert fast.signatures[0].source == "compiled"
        assert made == [1]
    finally:
        path.write_bytes(whole)


class Artifact:
    def __init__(self, error=None, size=10):
        self.error, self.size = error, size

    def save(self, path):
        if self.error:
            raise self.error
        with open(path, "wb") as file:
            file.write(b"x" * self.size)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError("read-only")]
)
def test_a_directory_that_cannot_be_written_is_told_of(tmp_path, monkeypatch, error):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "new"))
    with pytest.warns(
        UserWarning, match=r"could not write compiled code to .*Set HOGLIB_CACHE_DIR"
    ):
        backends._save(Artifact(error), "key")
    assert list((tmp_path / "new").iterdir()) == []  # nothing half written
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not write"):
        backends._save(Artifact(), "key")


def test_what_torch_cannot_write_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    backends._save(Artifact(AssertionError("no")), "key")
    assert list(tmp_path.iterdir()) == []
    backends._save(Artifact(), "key")
    assert [path.name for path in tmp_path.iterdir()] == ["key.bin"]


def test_the_directory_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "a" / "b"))
    backends._save(Artifact(), "key")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("HOGLIB_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk_cache.cache_dir() == tmp_path / "hoglib"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.cache_dir() == tmp_path / ".cache" / "hoglib"


def test_the_oldest_go_where_the_directory_grows_too_large(tmp_path, monkeypatch):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backends, "MAX_BYTES", 25)
    for i, name in enumerate("abcd"):
        backends._save(Artifact(), name)
        os.utime(tmp_path / f"{name}.bin", (i, i))
        backends._evict(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["c", "d"]
    backends._save(Artifact(size=100), "e")
    assert [path.stem for path in tmp_path.iterdir()] == [
        "e"
    ]  # the newest stays, whatever its size


def test_what_is_kept_in_memory_is_limited(monkeypatch):
    graph, inputs = graph_and_inputs()
    monkeypatch.setattr(backends, "MAX_IN_MEMORY", 3)
    monkeypatch.setattr(backends, "_load", lambda key: None)
    monkeypatch.setattr(backends, "_compile", lambda *args: object())
    keys = iter(range(10))
    monkeypatch.setattr(backends, "_key", lambda *args: str(next(keys)))
    backends.clear_compiled()
    for _ in range(5):
        backends.compile_graph(graph, inputs, False, lambda text: None)
    assert list(backends._IN_MEMORY) == ["2", "3", "4"]
    backends.clear_compiled()


KEYS = {
    "inputs": lambda g, x: (g, [*x[:-1], x[-1].double() if x[-1].dtype is not torch.float64 else x[-1].float()]),
    "strides": lambda g, x: (g, [*x[:-1], torch.empty_strided((3,), (2,), dtype=torch.float64)]),
}  # fmt: skip


def test_code_is_for_one_kind_of_input_and_number_of_threads(monkeypatch):
    graph, inputs = graph_and_inputs()
    key = backends._key(graph, inputs, False)
    assert backends._key(graph, [x.clone() for x in inputs], False) == key
    for change in KEYS.values():
        assert backends._key(*change(graph, inputs), False) != key
    assert backends._key(graph, inputs, True) != key
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert backends._key(graph, inputs, False) != key


def test_without_a_compiler_it_runs_one_by_one_and_says_so(tmp_path, monkeypatch):
    import torch._inductor.config as config

    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    backends.clear_compiled()
    fast = hog.compile(function())
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.warns(UserWarning, match=r"is not compiled, and runs its \d+ operations one by one: no C\+\+ compiler was found"):  # fmt: skip
        result = fast(draw(3))
    assert_close(result, function()(draw(3)))
    assert fast.signatures[0].backend == "eager"
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_compilation_left_is_compiled_anew(tmp_path, monkeypatch):
    import torch._inductor as torchs
    import torch._inductor.config as config

    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path / "ours"))
    backends.clear_compiled()
    compile, seen = torchs.standalone_compile, []

    def tried(*args, **kwargs):
        seen.append((os.environ["TORCHINDUCTOR_CACHE_DIR"], config.cpp_wrapper))
        if len(seen) == 1:
            raise ImportError("file too short")
        return compile(*args, **kwargs)

    monkeypatch.setattr(torchs, "standalone_compile", tried)
    fast = hog.compile(function())
    assert_close(fast(draw(3)), function()(draw(3)))
    (first, compact), (second, one_by_one) = seen
    assert first == str(tmp_path / "ours" / "torch") != second
    assert compact
    assert not one_by_one
    assert len(list((tmp_path / "ours").glob("*.bin"))) == 1


def test_an_interruption_while_code_is_written_leaves_no_file(tmp_path, monkeypatch):
    class Half:
        def save(self, path):
            Path(path).write_bytes(b"half")
            raise KeyboardInterrupt

    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        backends._save(Half(), "key")
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_compiler_leaves_no_graph(tmp_path, monkeypatch):
    monkeypatch.setenv("HOGLIB_CACHE_DIR", str(tmp_path))
    backends.clear_compiled()

    def fails(*args):
        raise RuntimeError("inductor is at fault")

    monkeypatch.setattr(backends, "_compile", fails)
    fast = hog.compile(function())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="inductor is at fault"):
            fast(draw(3))
        assert fast.signatures == []
    assert backends._IN_MEMORY == {}


def test_random_numbers_and_layouts_in_one_compiled_graph(other_cache):
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


def test_sizes_that_change_in_one_compiled_graph(other_cache):
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


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=FULL)])
def test_factors_in_the_options_of_sums_are_heeded(other_cache, dynamic):
    def fn(x, a, b):
        return [case(x, a, b) for case in SCALED.values()]

    given = draw(5, 4), draw(5, 3, seed=1), draw(3, 4, seed=2)
    fast = hog.compile(fn, dynamic=dynamic, check=False)
    for ours, expected in zip(fast(*given), fn(*given), strict=True):
        assert_close(ours, expected, rtol=1e-12, atol=1e-12)


NOTHING = torch.empty(0, dtype=torch.float64)
CONCATENATED = {
    "nothing and a transpose": lambda x: torch.cat([NOTHING, x.mT], -2).view(2, 12),
    "a transpose and no rows": lambda x: torch.cat([x.mT, x.mT[:, :0]], -2).view(2, 12),
    "one": lambda x: torch.cat([x.mT]).view(8, 3),
    "two and nothing": lambda x: torch.cat([x.mT, NOTHING, x.mT], 1).view(2, 24),
    "one of another dtype": lambda x: torch.cat([NOTHING, x.mT.float()], 1).view(2, 12),
    "channels last": lambda x: torch.cat([x[None].to(memory_format=torch.channels_last)]).permute(0, 2, 3, 1).view(24),
}  # fmt: skip


def test_a_concatenation_with_nothing_is_laid_out_as_torch_does(other_cache):
    def fn(x):
        return [case(x) for case in CONCATENATED.values()]

    x = draw(2, 3, 4)
    for ours, expected in zip(hog.compile(fn, check=False)(x), fn(x), strict=True):
        assert_close(ours, expected, rtol=0, atol=0)


def test_machine_code_goes_with_them_and_what_is_not_ours_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "MAX_BYTES", 25)
    (tmp_path / "torch" / "a").mkdir(parents=True)
    files = ["torch/a/x.so", "a.bin", "torch/a/y.so", "b.bin", "mine.txt", "mine/of.so"]
    (tmp_path / "mine").mkdir()
    for i, name in enumerate(files):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (i, i))
    backends._evict(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"torch/a/y.so", "b.bin", "mine.txt", "mine/of.so"}


def test_operators_with_lists_of_tensors(cache):
    """As one C++ program, a call of such an operator ends the process."""
    sine = hog.ops.external(np.sin, np.cos, lambda x: -np.sin(x))
    x = draw(3)

    def loss(x):
        return sine(2 * x).square().sum()

    assert_close(hog.hvp(loss, x, x, compile=True), hog.hvp(loss, x, x))
