"""Runs graphs: compiled by torch's compiler and cached on disk, one operation at a time, or by the
user.

All private API of torch's compiler that hoglib uses is in this file:
`torch._inductor.standalone_compile`, which compiles a graph as it is, and settings of
`torch._inductor.config`.
"""

import hashlib
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from tempfile import mkstemp
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from hoglib._core import validation
from hoglib._core.cache import cache_dir, make_private_dir
from hoglib._core.logger import LOGGER
from hoglib._core.source_location import warn
from hoglib._version import __version__
from hoglib.capture.kernel_choice import effective_switch, processor
from hoglib.capture.nodes import takes_lists
from hoglib.capture.outline import count_operations, outline, seconds_to_compile
from hoglib.capture.passes import (
    channels_last,
    expand_alpha_beta,
    lay_out_concatenations,
    simplify,
    specialize_convolutions,
)
from hoglib.capture.product_passes import arrange, by_onednn, merge, turn_narrow
from hoglib.capture.program import Program
from hoglib.capture.writes import functionalize
from hoglib.errors import ArgumentTypeError

Runnable = Callable[..., Any]
MAX_BYTES = 2**30  # of the cache directory
MAX_IN_MEMORY = 256  # compiled graphs
LONG = 10  # seconds of compilation that are announced


class Runner(NamedTuple):
    """What runs a graph."""

    run: Runnable
    seconds: float
    source: str  # "compiled", "disk" or "memory"


class NoCompilerError(Exception):
    """This machine has no compiler for the graph."""


NAMES = ("inductor", "eager")


class Options(Protocol):
    """The options that decide how a graph runs."""

    backend: Any
    dynamic: bool
    name: str


def make_runner(
    options: Options, graph: fx.GraphModule, inputs: list[Tensor]
) -> tuple[Runner, str]:
    """What runs a graph at tensors like the inputs, and the name of the backend."""
    name = options.name
    if callable(options.backend):
        began = perf_counter()
        run = options.backend(_copied(graph), inputs)  # which it may change
        if not callable(run):
            raise ArgumentTypeError(
                f"backend: expected a function of (graph module, inputs) that returns a function, got "
                f"one that returns {validation.describe(run)}. To run the graph as it is, return "
                "`graph.forward`."
            )
        return Runner(run, perf_counter() - began, "compiled"), backend_name(options.backend)
    if options.backend == "eager":
        return Runner(_interpret(graph), 0.0, "compiled"), "eager"
    try:
        found = compile_graph(graph, inputs, options.dynamic, name)
    except NoCompilerError as error:
        warn(
            f"{name} is not compiled, and runs its {len(graph.graph.nodes):,} operations one by one: "
            f"{error}. Pass backend='eager' to avoid this warning."
        )
        return Runner(_interpret(graph), 0.0, "compiled"), "eager"
    if found.source == "compiled":
        LOGGER.info("compiled %s in %.1f s, cached in %s", name, found.seconds, cache_dir())
    return found, "inductor"


def backend_name(backend: Any) -> str:
    return str(getattr(backend, "__name__", None) or repr(backend))


def _interpret(graph: fx.GraphModule) -> Callable[..., Any]:
    run: Callable[..., Any] = graph.forward
    return run


_TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_MISSING_COMPILER = ("InvalidCxxCompiler", "CppCompileError", "TritonMissing")
_IN_MEMORY: dict[str, Runnable] = {}
_COMPILING = threading.RLock()


def compile_graph(graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool, name: str) -> Runner:
    """Compiles a graph for tensors of these shapes. Raises NoCompilerError with the reason."""
    began = perf_counter()
    key = _key(graph, tensors, dynamic)
    with _COMPILING:
        known = _IN_MEMORY.get(key)
        if known is not None:
            return Runner(known, perf_counter() - began, "memory")
        run = _load(key)
        source = "compiled" if run is None else "disk"
        if run is None:
            run = _compile(graph, tensors, dynamic, key, name)
        _remember(key, run)
    return Runner(run, perf_counter() - began, source)


def clear_compiled() -> None:
    """Clears the compiled graphs of this process, and torch's kernels; the files stay."""
    _IN_MEMORY.clear()
    if "torch._inductor.utils" in sys.modules:
        from torch._inductor.utils import clear_caches

        clear_caches()


def _key(graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool) -> str:
    """What compiled code depends on: the graph, its inputs, the passes, torch, the processor,
    threads."""
    parts = [
        _source_hash(), torch.__version__, str(torch.version.git_version), platform.machine(),
        str(_cpu_capability()), str(torch.get_num_threads()), str(dynamic), graph.code,
        str([(x.dtype, tuple(x.shape), x.stride(), str(x.device)) for x in tensors]),
        str(sorted({torch.cuda.get_device_name(x.device) for x in tensors if x.is_cuda})),
        str(torch.are_deterministic_algorithms_enabled()), effective_switch(), processor(),
    ]  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _source_hash() -> str:
    """A hash of the version and of the passes, so that code of an older version is not reused."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("".join([__version__, *texts]).encode()).hexdigest()


def _cpu_capability() -> str:
    capability = getattr(torch.backends.cpu, "get_cpu_capability", None)
    return str(capability()) if capability is not None else ""


@contextmanager
def _inductor_settings(compact: bool) -> Iterator[None]:
    """Settings of torch's compiler.

    - Random numbers come from torch's generators in the order of the graph, so a compiled function
      draws the same numbers as the function itself.
    - At its first compilation ever, torch tests each vector instruction set of the processor by
      compiling a program, which takes eight seconds on two cores. This test is skipped unless
      TORCH_VEC_ISA_OK is set.
    - On a CPU, images keep the layout of `channels_last`.
    - With `compact`, a graph is one C++ program, instead of one per kernel called from Python, which is
      slower for small graphs. A program that calls an operator of torch.library with a list of tensors
      crashes the process (torch 2.13).
    """
    import torch._inductor.config as config

    given = {"fallback_random": True, "layout_optimization": torch.cuda.is_available()}
    if compact:
        given |= {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
    if "TORCH_VEC_ISA_OK" not in os.environ:
        given["cpp.vec_isa_ok"] = True
    with config.patch(given):
        yield


def _compile(
    graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool, key: str, name: str
) -> Runnable:
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    if on_cpu and cpp_compiler() is None:
        raise NoCompilerError("no C++ compiler was found: install g++ or clang++, or set CXX")
    with torch.no_grad(), _without_pytree_warning():
        module = _optimize(graph, tensors, dynamic, cache_dir() / f"{key}.json")
        found = outline(module) if on_cpu and not dynamic else None
    parts = [module] if found is None else [part.graph for part in found.parts]
    sizes = [count_operations(part.graph) for part in parts]
    _announce(name, count_operations(module.graph), sizes)
    if found is None:
        module.recompile()
        return _compile_whole(module, tensors, dynamic, key)
    with torch.no_grad():
        examples = [[_example(x) for x in part.inputs] for part in found.parts]
    keys = [f"part-{_key(part, x, False)}" for part, x in zip(parts, examples, strict=True)]
    runs = [
        _remembered(key, partial(_compile_whole, part, x, False, key))
        for part, x, key in zip(parts, examples, keys, strict=True)
    ]
    program = Program.of(module.graph, found, keys)
    _save(program, key, ".calls")
    return program.link(runs)


def _announce(name: str, operations: int, sizes: list[int]) -> None:
    """Logs what is compiled, and that it takes long, before."""
    distinct = "" if len(sizes) == 1 else f" ({sum(sizes):,} in {len(sizes)} distinct parts)"
    seconds = sum(map(seconds_to_compile, sizes))
    long = (
        f", for about {seconds:.0f} s (backend='eager' compiles nothing)" if seconds > LONG else ""
    )
    LOGGER.info("compiling %s operations of %s%s%s ...", f"{operations:,}", name, distinct, long)


def _example(value: Tensor) -> Tensor:
    """A tensor with the layout of a fake one."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _compile_whole(
    module: fx.GraphModule, tensors: list[Tensor], dynamic: bool, key: str
) -> Runnable:
    from torch._inductor import standalone_compile
    from torch._inductor.utils import fresh_cache

    given: list[Any] = list(tensors)
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    compact = on_cpu and not any(map(takes_lists, module.graph.nodes))
    # The second attempt is for files that an interrupted compilation left in torch's cache, and for
    # operations that the C++ wrapper does not support.
    for again in (False, True):
        try:
            with (
                torch.no_grad(),
                fresh_cache() if again else _torch_cache_in(cache_dir()),
                _inductor_settings(compact and not again),
                _without_pytree_warning(),
            ):
                artifact = standalone_compile(
                    _copied(module),
                    given,
                    dynamic_shapes="from_graph" if dynamic else "from_example_inputs",
                )
                _save(artifact, key)
        except Exception as error:
            if again and type(error).__name__ in _MISSING_COMPILER:
                raise NoCompilerError(str(error).strip().splitlines()[0]) from error
            if again:
                raise
        else:
            break
    run: Runnable = artifact
    return run


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    own = fx.Graph()
    own.output(own.graph_copy(module.graph, {}))
    return fx.GraphModule(module, own)


def _optimize(
    graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool, record: Path
) -> fx.GraphModule:
    """A faster graph that is equal up to rounding; the given one does not change.

    record: the file with the matrix products that oneDNN computes.
    """
    module = _copied(graph)
    expand_alpha_beta(module)
    lay_out_concatenations(module)
    if not dynamic:
        module = functionalize(module, tensors)
        simplify(module)
    arrange(module)
    specialize_convolutions(module)
    simplify(module)
    if dynamic:
        return module
    merge(module)
    turn_narrow(module)
    module = channels_last(module, tensors)
    by_onednn(module, record)
    return module


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that torch's compiler calls; None if there is none."""
    import torch._inductor.config as config

    named = config.cpp.cxx
    candidates = named if isinstance(named, list | tuple) else [named]
    found = (shutil.which(str(name)) for name in candidates if name is not None)
    return next(filter(None, found), None)


@contextmanager
def _without_pytree_warning() -> Iterator[None]:
    """Suppresses a warning that torch raises about its own use of pytrees."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        yield


def _load(key: str) -> Runnable | None:
    """What was compiled under this key, as a whole or in parts."""
    whole = _load_whole(key)
    path = cache_dir() / f"{key}.calls"
    if whole is not None or not _is_own(path):
        return whole
    try:
        program = Program.from_json(path.read_text())
    except (OSError, ValueError):
        return None
    parts = [_remembered(part, partial(_load_whole, part)) for part in program.parts]
    if any(part is None for part in parts):
        return None
    _touch(path)
    return program.link(parts)


def _remembered(key: str, make: Callable[[], Runnable | None]) -> Any:
    """What was compiled under this key, in memory, on disk, or now."""
    run = _IN_MEMORY.get(key) or _load_whole(key) or make()
    if run is not None:
        _remember(key, run)
    return run


def _remember(key: str, run: Runnable) -> None:
    _IN_MEMORY[key] = run
    while len(_IN_MEMORY) > MAX_IN_MEMORY:
        _IN_MEMORY.pop(next(iter(_IN_MEMORY)))


def _load_whole(key: str) -> Runnable | None:
    path = cache_dir() / f"{key}.bin"
    if not _is_own(path):
        return None
    from torch._inductor import CompiledArtifact  # type: ignore[attr-defined]

    try:
        with _torch_cache_in(cache_dir()), _inductor_settings(False), _without_pytree_warning():
            run: Runnable = CompiledArtifact.load(path=str(path))
    except Exception:  # from another build of torch, or incomplete: compile again
        return None
    _touch(path)
    return run


def _is_own(path: Path) -> bool:
    """Whether a file is there and of this user; reading it runs code."""
    try:
        return path.stat().st_uid == os.getuid()
    except (OSError, AttributeError):
        return False


def _touch(path: Path) -> None:
    with suppress(OSError):
        path.touch()


def _save(artifact: Any, key: str, suffix: str = ".bin") -> None:
    """Saves compiled code atomically; if that fails, the next process compiles again."""
    directory = cache_dir()
    try:
        make_private_dir(directory)
        handle, name = mkstemp(dir=directory)
        os.close(handle)
        try:
            artifact.save(path=name)
            os.replace(name, directory / f"{key}{suffix}")
        finally:
            with suppress(OSError):
                os.remove(name)
        _evict(directory)
    except OSError as error:
        warn(
            f"hoglib could not write compiled code to {directory} ({error}). Set HOGLIB_CACHE_DIR to a "
            "directory that can be written to."
        )
    except Exception:  # torch cannot save every graph that it can run
        return


@contextmanager
def _torch_cache_in(directory: Path) -> Iterator[None]:
    """Inside, torch's compiler caches machine code in the same directory, to which our files refer."""
    try:
        make_private_dir(directory)
    except OSError:  # `_save` warns about it
        yield
        return
    before = os.environ.get(_TORCH_CACHE)
    os.environ[_TORCH_CACHE] = str(directory / "torch")
    try:
        yield
    finally:
        os.environ.pop(_TORCH_CACHE)
        if before is not None:
            os.environ[_TORCH_CACHE] = before


def _evict(directory: Path) -> None:
    """Removes the oldest files if the directory exceeds its limit."""
    # tmp*: what a process that was killed had not finished to write
    patterns = ("*.bin", "*.calls", "*.json", "tmp*", "torch/**/*")
    found = [path for pattern in patterns for path in directory.glob(pattern)]
    sizes = {}
    for path in found:
        with suppress(OSError):  # removed by another process
            if path.is_file():
                sizes[path] = path.stat()
    total = sum(of.st_size for of in sizes.values())
    for path in sorted(sizes, key=lambda path: sizes[path].st_mtime)[:-1]:
        if total <= MAX_BYTES:
            return
        total -= sizes[path].st_size
        path.unlink(missing_ok=True)
