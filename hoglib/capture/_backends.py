"""What runs a graph: torch's compiler, its operations one by one, or a function of the user's."""

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor, fx

from hoglib import _arguments as arguments
from hoglib._cache import cache_dir
from hoglib._warning import warn
from hoglib.capture import _inductor as inductor

NAMES = ("inductor", "eager")


class Options(Protocol):
    """What a graph is made to run with."""

    backend: Any
    dynamic: bool
    progress: bool
    name: str


def made(
    options: Options, graph: fx.GraphModule, inputs: list[Tensor]
) -> tuple[inductor.Made, str]:
    """What runs a graph at tensors like the inputs, and the name of the backend that made it."""
    name = options.name
    if callable(options.backend):
        began = perf_counter()
        run = options.backend(graph, inputs)
        if not callable(run):
            raise arguments.WrongType(
                f"backend: expected a function of (graph module, inputs) that gives a function, got "
                f"one that gives {arguments.describe(run)}; return `graph.forward` to run it as it is."
            )
        return inductor.Made(run, perf_counter() - began, "compiled"), named(options.backend)
    if options.backend == "eager":
        return inductor.Made(_in_order(graph), 0.0, "compiled"), "eager"
    say = inductor.to_stderr if options.progress else _silent
    try:
        found = inductor.make(
            graph, inputs, options.dynamic, lambda text: say(f"{text} of {name} ...")
        )
    except inductor.NoCompiler as error:
        warn(
            f"{name} is not compiled, and runs its {len(graph.graph.nodes):,} operations one by one: "
            f"{error}. Pass backend='eager' to say so yourself."
        )
        return inductor.Made(_in_order(graph), 0.0, "compiled"), "eager"
    if found.source == "compiled":
        say(f"compiled {name} in {found.seconds:.1f} s, and kept it in {cache_dir()}")
    return found, "inductor"


def named(backend: Any) -> str:
    return str(getattr(backend, "__name__", None) or repr(backend))


def _in_order(graph: fx.GraphModule) -> Callable[..., Any]:
    run: Callable[..., Any] = graph.forward
    return run


def _silent(text: str) -> None: ...
