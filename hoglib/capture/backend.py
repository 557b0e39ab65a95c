"""torch's compiler for graphs, and what it made kept on disk for the next process.

The private torch API that this needs is all in this file: `torch._inductor.standalone_compile`, which
takes a graph as it is, and settings of `torch._inductor.config`.
"""

import hashlib
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkstemp
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from hoglib._core import validation
from hoglib._core.cache import cache_dir
from hoglib._core.cache import made as made_directory
from hoglib._core.source_location import warn
from hoglib._version import __version__
from hoglib.capture.passes import (
    channels_last,
    expand_alpha_beta,
    functional,
    simplify,
    specialize_convolutions,
)
from hoglib.capture.product_passes import arrange, by_onednn, depends_on, merge
from hoglib.errors import ArgumentTypeError

Run = Callable[..., Any]
LIMIT = 2**30  # bytes of the directory
MOST = 256  # graphs kept in memory beside those in use


class Made(NamedTuple):
    """Machine code for a graph."""

    run: Run
    seconds: float
    source: str  # "compiled", "disk" or "memory"


class NoCompiler(Exception):
    """There is nothing here that could compile a graph."""


_TORCHS = "TORCHINDUCTOR_CACHE_DIR"
MISSING = ("InvalidCxxCompiler", "CppCompileError", "TritonMissing")
_IN_MEMORY: dict[str, Run] = {}
_COMPILING = threading.RLock()


def make(
    graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool, say: Callable[[str], None]
) -> Made:
    """Machine code for a graph at tensors of these shapes. Raises NoCompiler, saying why."""
    began = perf_counter()
    key = _key(graph, tensors, dynamic)
    with _COMPILING:
        known = _IN_MEMORY.get(key)
        if known is not None:
            return Made(known, perf_counter() - began, "memory")
        run = _load(key)
        source = "compiled" if run is None else "disk"
        if run is None:
            say(f"compiling {len(graph.graph.nodes):,} operations")
            run = _compile(graph, tensors, dynamic, key)
        _IN_MEMORY[key] = run
        while len(_IN_MEMORY) > MOST:
            _IN_MEMORY.pop(next(iter(_IN_MEMORY)))
    return Made(run, perf_counter() - began, source)


def forget() -> None:
    """Forgets what this process compiled, torch's kernels too; what is on disk stays."""
    _IN_MEMORY.clear()
    if "torch._inductor.utils" in sys.modules:
        from torch._inductor.utils import clear_caches

        clear_caches()


def _key(graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool) -> str:
    """What machine code depends on: the graph, its inputs, what we make of graphs, torch, the
    processor, its threads."""
    parts = [
        _of_our_own(), torch.__version__, str(torch.version.git_version), platform.machine(),
        str(_processor()), str(torch.get_num_threads()), str(dynamic), graph.code,
        str([(x.dtype, tuple(x.shape), x.stride(), str(x.device)) for x in tensors]),
        str(sorted({torch.cuda.get_device_name(x.device) for x in tensors if x.is_cuda})),
        str(torch.are_deterministic_algorithms_enabled()), depends_on(graph),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _of_our_own() -> str:
    """The version, and the text of what rewrites graphs: what an older one compiled is not taken."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("".join([__version__, *texts]).encode()).hexdigest()


def _processor() -> str:
    capability = getattr(torch.backends.cpu, "get_cpu_capability", None)
    return str(capability()) if capability is not None else ""


@contextmanager
def _settings(compact: bool) -> Iterator[None]:
    """What torch's compiler does otherwise for us.

    Random numbers come from torch's own generators, in the order of the graph: so a compiled function
    draws what it draws otherwise. Each vector instruction set that the processor has is tried out by
    compiling a program, at the first compilation ever, one after the other: eight seconds on two cores.
    They are taken as they are instead, unless TORCH_VEC_ISA_OK says otherwise. On a processor images
    have the layout that `channels_last` gave them, and a graph is `compact`: one program, and not one a
    kernel with Python between them, which takes a small graph longer to run.
    """
    import torch._inductor.config as config

    given = {"fallback_random": True, "layout_optimization": torch.cuda.is_available()}
    if compact:
        given["cpp_wrapper"] = True
    if "TORCH_VEC_ISA_OK" not in os.environ:
        given["cpp.vec_isa_ok"] = True
    with config.patch(given):
        yield


def _compile(graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool, key: str) -> Run:
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    if on_cpu and not has_cpp_compiler():
        raise NoCompiler("no C++ compiler was found: install g++ or clang++, or set CXX")
    from torch._inductor import standalone_compile
    from torch._inductor.utils import fresh_cache

    given: list[Any] = list(tensors)
    # Once more for what an interrupted compilation left in torch's cache, which it takes as it is, and
    # for operations that one program cannot have.
    for again in (False, True):
        try:
            with (
                torch.no_grad(),
                fresh_cache() if again else _of_torch(cache_dir()),
                _settings(on_cpu and not again),
                _quietly(),
            ):
                artifact = standalone_compile(
                    _faster(graph, tensors, dynamic),
                    given,
                    dynamic_shapes="from_graph" if dynamic else "from_example_inputs",
                )
                _save(artifact, key)
        except Exception as error:
            if again and type(error).__name__ in MISSING:
                raise NoCompiler(str(error).strip().splitlines()[0]) from error
            if again:
                raise
        else:
            break
    run: Run = artifact
    return run


def _faster(graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool) -> fx.GraphModule:
    """A graph that computes the same with other roundings; the given one stays as it is."""
    own = fx.Graph()
    own.output(own.graph_copy(graph.graph, {}))
    module = fx.GraphModule(graph, own)
    expand_alpha_beta(module)
    if not dynamic:
        module = functional(module, tensors)
        simplify(module)
    arrange(module)
    specialize_convolutions(module)
    simplify(module)
    if dynamic:
        return module
    merge(module)
    module = channels_last(module, tensors)
    by_onednn(module)
    return module


def has_cpp_compiler() -> bool:
    import torch._inductor.config as config

    named = config.cpp.cxx
    candidates = named if isinstance(named, list | tuple) else [named]
    return any(name is not None and shutil.which(str(name)) for name in candidates)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a warning of torch about its own use of its pytrees."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        yield


def _load(key: str) -> Run | None:
    path = cache_dir() / f"{key}.bin"
    try:
        if path.stat().st_uid != os.getuid():  # it is run when it is read
            return None
    except (OSError, AttributeError):
        return None
    from torch._inductor import CompiledArtifact  # type: ignore[attr-defined]

    try:
        with _of_torch(cache_dir()), _settings(False), _quietly():
            run: Run = CompiledArtifact.load(path=str(path))
    except Exception:  # of another build of torch, or cut short: it is compiled anew
        return None
    with suppress(OSError):
        path.touch()
    return run


def _save(artifact: Any, key: str) -> None:
    """Whole or not at all; without it the next process compiles again."""
    directory = cache_dir()
    try:
        made_directory(directory)
        handle, name = mkstemp(dir=directory)
        os.close(handle)
        try:
            artifact.save(path=name)
            os.replace(name, directory / f"{key}.bin")
        finally:
            with suppress(OSError):
                os.remove(name)
        _prune(directory)
    except OSError as error:
        warn(
            f"hoglib could not keep what it compiled in {directory} ({error}); set HOGLIB_CACHE_DIR."
        )
    except Exception:  # torch cannot write every graph that it can run
        return


@contextmanager
def _of_torch(directory: Path) -> Iterator[None]:
    """What torch's compiler keeps is kept beside ours: machine code, which ours only names."""
    try:
        made_directory(directory)
    except OSError:  # of which `_save` tells
        yield
        return
    before = os.environ.get(_TORCHS)
    os.environ[_TORCHS] = str(directory / "torch")
    try:
        yield
    finally:
        os.environ.pop(_TORCHS)
        if before is not None:
            os.environ[_TORCHS] = before


def _prune(directory: Path) -> None:
    """The oldest go where the directory grows beyond its limit."""
    found = [*directory.glob("*.bin"), *directory.glob("torch/**/*")]
    sizes = {}
    for path in found:
        with suppress(OSError):  # gone meanwhile
            if path.is_file():
                sizes[path] = path.stat()
    total = sum(of.st_size for of in sizes.values())
    for path in sorted(sizes, key=lambda path: sizes[path].st_mtime)[:-1]:
        if total <= LIMIT:
            return
        total -= sizes[path].st_size
        path.unlink(missing_ok=True)


def to_stderr(text: str) -> None:
    print(f"hoglib: {text}", file=sys.stderr, flush=True)


# === What runs a graph: torch's compiler, its operations one by one, or a function of the user's.

NAMES = ("inductor", "eager")


class Options(Protocol):
    """What a graph is made to run with."""

    backend: Any
    dynamic: bool
    progress: bool
    name: str


def made(options: Options, graph: fx.GraphModule, inputs: list[Tensor]) -> tuple[Made, str]:
    """What runs a graph at tensors like the inputs, and the name of the backend that made it."""
    name = options.name
    if callable(options.backend):
        began = perf_counter()
        run = options.backend(graph, inputs)
        if not callable(run):
            raise ArgumentTypeError(
                f"backend: expected a function of (graph module, inputs) that gives a function, got "
                f"one that gives {validation.describe(run)}; return `graph.forward` to run it as it is."
            )
        return Made(run, perf_counter() - began, "compiled"), named(options.backend)
    if options.backend == "eager":
        return Made(_in_order(graph), 0.0, "compiled"), "eager"
    say = to_stderr if options.progress else _silent
    try:
        found = make(graph, inputs, options.dynamic, lambda text: say(f"{text} of {name} ..."))
    except NoCompiler as error:
        warn(
            f"{name} is not compiled, and runs its {len(graph.graph.nodes):,} operations one by one: "
            f"{error}. Pass backend='eager' to say so yourself."
        )
        return Made(_in_order(graph), 0.0, "compiled"), "eager"
    if found.source == "compiled":
        say(f"compiled {name} in {found.seconds:.1f} s, and kept it in {cache_dir()}")
    return found, "inductor"


def named(backend: Any) -> str:
    return str(getattr(backend, "__name__", None) or repr(backend))


def _in_order(graph: fx.GraphModule) -> Callable[..., Any]:
    run: Callable[..., Any] = graph.forward
    return run


def _silent(text: str) -> None: ...
