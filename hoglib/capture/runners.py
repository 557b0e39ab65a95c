"""Runs graphs: compiled by torch's compiler, one operation at a time, or by the user's backend.

Private API of torch's compiler is used in this file only: settings of `torch._inductor.config`, and
`torch._inductor.standalone_compile`, which compiles a graph without changes, or finds it in torch's
caches.
"""

import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hoglib._core.messages import validation
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.runtime.source_location import warn
from hoglib._core.torch_api.torch_private import private
from hoglib.capture import passes
from hoglib.capture.passes import VIEWS, clone, optimize, takes_lists
from hoglib.errors import ArgumentTypeError

# seconds to compile a graph on one core, and to compile each operation in it except views
SECONDS, SECONDS_PER_OPERATION = 1.3, 0.02
LONG = 10  # seconds: longer compilations are announced


class Runner(NamedTuple):
    """A function that runs a graph.

    run: (*inputs) -> outputs.
    backend: The name of the backend.
    source: "compiled", or "cache" if compiled code was found there.
    seconds: The time of compilation.
    """

    run: Callable[..., Any]
    backend: str = "eager"
    source: str = "compiled"
    seconds: float = 0.0


class NoCompilerError(Exception):
    """This machine has no compiler for the graph."""


def make_runner(
    graph: fx.GraphModule, inputs: list[Tensor], backend: Any, name: str, dynamic: bool = False
) -> Runner:
    """The runner of a graph, for tensors like the inputs."""
    if callable(backend):
        began = perf_counter()
        run = backend(clone(graph), inputs)  # the user's function may change its graph
        if not callable(run):
            raise ArgumentTypeError(
                f"backend: expected a function of (graph module, inputs) that returns a function, got "
                f"one that returns {validation.describe(run)}. To run the graph as it is, return "
                "`graph.forward`."
            )
        own_name = str(getattr(backend, "__name__", None) or repr(backend))
        return Runner(run, own_name, seconds=perf_counter() - began)
    if backend == "eager":
        return Runner(graph.forward)
    try:
        found = compile_graph(graph, inputs, dynamic, name, backend)
    except NoCompilerError as error:
        warn(
            f"{name} is not compiled, and runs its {len(graph.graph.nodes):,} operations one by one: "
            f"{error}. Pass backend='eager' to avoid this warning."
        )
        return Runner(graph.forward)
    if found.source == "compiled":
        LOGGER.info("compiled %s in %.1f s, cached in %s", name, found.seconds, cache_dir())
    return found


_MISSING_COMPILER = ("InvalidCxxCompiler", "CppCompileError", "TritonMissing")
_COMPILING = threading.RLock()


def compile_graph(
    graph: fx.GraphModule, tensors: list[Tensor], dynamic: bool, name: str, mode: str = "inductor"
) -> Runner:
    """Compiles a graph for tensors of these shapes, or finds it in torch's caches. Raises
    NoCompilerError with the reason if there is no compiler.

    mode: "inductor", or a mode of torch.compile.
    """
    on_cpu = all(x.device.type == "cpu" for x in tensors)
    if on_cpu and cpp_compiler() is None:
        raise NoCompilerError("no C++ compiler was found: install g++ or clang++, or set CXX")
    config = private("torch._inductor.config")
    fresh_cache = private("torch._inductor.utils.fresh_cache")
    standalone_compile = private("torch._inductor.standalone_compile")
    began = perf_counter()
    module = optimize(graph, tensors, dynamic)
    _log_slow_compile(name, module.graph)
    compact = on_cpu and not any(map(takes_lists, module.graph.nodes))
    shapes: Any = "from_graph" if dynamic else "from_example_inputs"
    options = {} if mode == "inductor" else private("torch._inductor.list_mode_options")(mode)
    if on_cpu:
        options = {**options, "triton.cudagraphs": False}  # torch would log that it skips them
    with _COMPILING, torch.no_grad(), _without_pytree_warning(), config.patch(options):
        overwrites = config.triton.cudagraphs
        before = _count_cache_hits()
        try:
            with _inductor_settings(compact):
                run = standalone_compile(clone(module), list(tensors), dynamic_shapes=shapes)
        except Exception as first:
            cause = first.__cause__ or first
            if isinstance(cause, OSError):
                warn(
                    f"hoglib could not write compiled code to {cache_dir()} ({cause}). Set "
                    "TORCHINDUCTOR_CACHE_DIR to a directory of yours that can be written to."
                )
            # Try a new cache: an interrupted compilation left files in the old one, or it cannot be
            # written. And try without the C++ wrapper, which may not support an operation.
            try:
                with fresh_cache(), _inductor_settings(False):
                    run = standalone_compile(clone(module), list(tensors), dynamic_shapes=shapes)
            except Exception as error:
                if type(error).__name__ in _MISSING_COMPILER:
                    raise NoCompilerError(str(error).strip().splitlines()[0]) from error
                raise
        source = "compiled" if _count_cache_hits() == before else "cache"
    # the next run of a CUDA graph overwrites its results
    kept = (lambda *inputs: [x.clone() for x in run(*inputs)]) if overwrites else run
    return Runner(kept, mode, source, perf_counter() - began)


def _log_slow_compile(name: str, graph: fx.Graph) -> None:
    """Logs in advance that a graph takes long to compile."""
    count = sum(x.op == "call_function" and x.target not in VIEWS for x in graph.nodes)
    seconds = SECONDS + SECONDS_PER_OPERATION * count
    if seconds > LONG:
        text = (
            "compiling %s operations of %s, for about %.0f s unless they are cached "
            "(backend='eager' compiles nothing) ..."
        )
        LOGGER.info(text, f"{count:,}", name, seconds)


def cache_dir() -> str:
    """The directory of torch's compiled code: TORCHINDUCTOR_CACHE_DIR, or a temporary directory."""
    default_cache_dir = private("torch._inductor.runtime.cache_dir_utils.default_cache_dir")
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()


def _count_cache_hits() -> int:
    """The number of graphs that torch's compiler has found in its caches."""
    counters = private("torch._dynamo.utils.counters")
    return sum(n for kind in counters.values() for key, n in kind.items() if "cache_hit" in key)


@contextmanager
def _inductor_settings(compact: bool) -> Iterator[None]:
    """Settings of torch's compiler.

    - Random numbers come from torch's generators in the order of the graph, so a compiled function
      draws the same numbers as the function itself.
    - At its first compilation ever, torch tests each vector instruction set of the processor by
      compiling a program, which takes eight seconds on two cores. This test is skipped unless
      TORCH_VEC_ISA_OK is set.
    - On a CPU, images keep the layout of `channels_last`.
    - Compiled code is for one number of threads and one vector instruction set. As settings both are in
      the keys of torch's caches; in some versions of torch they are not by themselves.
    - With `compact`, a graph is one C++ program. Otherwise Python calls a program for each kernel,
      which is slower for small graphs. A program that calls an operator of torch.library with a list
      of tensors crashes the process (torch 2.13).
    """
    config = private("torch._inductor.config")
    pick_vec_isa = private("torch._inductor.cpu_vec_isa.pick_vec_isa")
    given: dict[str, Any] = {
        "fallback_random": True,
        "layout_optimization": torch.cuda.is_available(),
    }
    threads = torch.get_num_threads()
    # code for all cores follows later calls of set_num_threads; a number set in config is the user's
    if config.cpp.threads < 1 and not config.cpp.dynamic_threads and threads != os.cpu_count():
        given["cpp.threads"] = threads
    if compact:
        given |= {"cpp_wrapper": True, "cpp_wrapper_build_separate": True}
    if "TORCH_VEC_ISA_OK" not in os.environ:
        given["cpp.vec_isa_ok"] = True
    with config.patch(given), config.patch({"cpp.simdlen": pick_vec_isa().bit_width()}):
        yield


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that torch's compiler calls; None if there is none."""
    named = private("torch._inductor.config").cpp.cxx
    candidates = named if isinstance(named, list | tuple) else [named]
    found = (shutil.which(str(name)) for name in candidates if name is not None)
    return next(filter(None, found), None)


def inductor_options() -> dict[str, Any]:
    r"""Options of `torch.compile` for derivatives of convolutions, around calls of hoglib.

        fast = torch.compile(step, options=hog.capture.inductor_options())

    Two passes over the graph, which `hoglib.compile` makes anyway: the derivative of a convolution by
    its weight uses the kernel for it, where autograd convolves with a kernel as large as an image; and
    on a CPU, images stay in channels-last layout from one convolution to the next. No setting of the
    process changes. `torch.compile` takes either ``options`` or ``mode``; others can be added to the
    dict.

    Returns:
        A dict of settings of `torch._inductor.config`.
    Raises:
        UnsupportedError: if this torch has no such passes.
    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 1))
        >>> options = hog.capture.inductor_options()
        >>> penalty = torch.compile(lambda x: hog.penalties.r1(model, x), options=options)
    """
    graph_pass: Any = private("torch._inductor.custom_graph_pass.CustomGraphPass")
    # a part of the keys of torch's caches
    key = sha256(Path(passes.__file__).read_bytes()).hexdigest()

    class Convolutions(graph_pass):
        def __call__(self, graph: fx.Graph) -> None:
            passes.specialize_in_inductor(graph)

        def uuid(self) -> str:
            return key

    layout = {} if torch.cuda.is_available() else {"layout_optimization": False}
    return {"post_grad_custom_pre_pass": Convolutions(), **layout}


@contextmanager
def _without_pytree_warning() -> Iterator[None]:
    """Suppresses torch's warning about its own use of pytrees."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)
        yield
