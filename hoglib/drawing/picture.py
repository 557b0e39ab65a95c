"""`hog.graph`: the picture of a function's graph and of its gradient's."""

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.autograd import Function

from hoglib._core import validation
from hoglib.drawing.backward_graph import collect
from hoglib.drawing.dot import collapsed, dot
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DrawingError,
    MissingDependencyError,
    OutputError,
)

TEXTS, PICTURES = (".dot", ".gv"), (".svg", ".png", ".pdf")
INSTALL = (
    "install it: `apt install graphviz`, `brew install graphviz` or `conda install graphviz` (the pip "
    "package of that name is not enough)"
)


def graph(
    fn: Callable[..., Any] | type[Function],
    inputs: Any,
    *,
    order: int = 2,
    saved: bool = True,
    max_nodes: int = 150,
) -> "Graph":
    r"""A picture of the graph that a second derivative goes through, with what is missing in it.

        y = f(x)        the graph of f
        g = J(x)^T u    the graph of the gradient, by which it is differentiated again

    fn and inputs are those of `hoglib.verify`: a Function class or its `apply`, an `nn.Module`, a loss
    with `(params, batch)`, any function of tensors; it is differentiated by the floating-point tensors
    in the inputs (only by those that require grad, if any does) and by a module's trainable parameters.
    order: 1 for the graph of f alone, 2 with that of the gradient, 3 with that of the next one.
    saved: also what is kept for backward. max_nodes: a graph with more, or with twice as many
    edges, is joined by module, and says so.

    Custom Functions have their names, and a box around what their backward made; modules have boxes
    with their qualified names. Red is what makes a second derivative zero or raise: a backward that
    gives a gradient without a graph (`no_grad`, `.detach()`, NumPy, a raw kernel,
    `@once_differentiable`), and an operation that has no further derivative. Orange may do so: a tensor
    that forward made and saved, which is neither input nor output, and a `.detach()` beside a graph.

    Returns a `Graph`: `cuts`, a tuple of sentences; `str(graph)`, the text of a DOT file;
    `save("picture.svg")`; and a picture in a notebook. Nothing that was passed is changed.
    Raises TypeError for what is no function, ValueError where there is nothing to differentiate by,
    and whatever fn raises.
    """
    validation.function("fn", fn)
    if validation.at_least("order", order, 1) > 3:
        raise ArgumentValueError(f"order: expected 1, 2 or 3, got {order}.")
    validation.flag("saved", saved)
    validation.at_least("max_nodes", max_nodes, 1)
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of what is told here
        found = collect(fn, given, order, saved)
    return Graph(found.name, dot(*collapsed(found, max_nodes)), tuple(found.cuts))


class Graph:
    """A picture of a graph, made by `hoglib.graph`. `str(graph)` is the text of a DOT file."""

    def __init__(self, name: str, text: str, cuts: tuple[str, ...]) -> None:
        self.name, self.cuts = name, cuts
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        cuts = f"{len(self.cuts)} cut{'' if len(self.cuts) == 1 else 's'}"
        return f"<Graph of {self.name}: {cuts}; .save('graph.svg') draws it>"

    def save(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> Path:
        """Write .dot or .gv text, or draw .svg, .png or .pdf by graphviz; the path.

        Raises ValueError for another suffix, ImportError for a picture without graphviz, RuntimeError
        where graphviz fails or takes longer than `timeout` seconds, OSError where nothing can be
        written. What was at the path before stays until the new one is there.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"path: expected a path, got {validation.describe(path)}.")
        path = Path(path)
        suffix = path.suffix.lower()
        validation.one_of(f"the suffix of {str(path)!r}", suffix, TEXTS + PICTURES)
        seconds = validation.positive("timeout", timeout)
        if not path.parent.is_dir():
            raise OutputError(
                f"{path}: expected a folder that is there, got {str(path.parent)!r}; make it first."
            )
        text = self._text.encode()
        _write(path, text if suffix in TEXTS else _drawn(text, suffix[1:], seconds))
        return path

    def _repr_svg_(self) -> str | None:
        """For notebooks; None without graphviz."""
        with suppress(MissingDependencyError, DrawingError):
            return _drawn(self._text.encode(), "svg", 20.0).decode()
        return None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """For notebooks: the picture, or the text where there is no graphviz."""
        picture = self._repr_svg_()
        if picture is None:
            return {"text/plain": self._text}
        return {"image/svg+xml": picture, "text/plain": repr(self)}


def _drawn(text: bytes, form: str, seconds: float) -> bytes:
    dot_program = shutil.which("dot")
    if dot_program is None:
        raise MissingDependencyError(
            f"a .{form}: expected graphviz's program `dot`, found none; {INSTALL}, or save as .dot, "
            "which needs nothing and which many viewers show."
        )
    try:
        done = subprocess.run(
            [dot_program, f"-T{form}"], input=text, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise DrawingError(
            f"graphviz took longer than {seconds:g} s; draw less (a smaller max_nodes, saved=False), "
            "give `save` a longer timeout, or save as .dot."
        ) from None
    except OSError as error:
        raise DrawingError(f"{dot_program} could not be run: {error}; {INSTALL}.") from error
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode(errors="replace").strip() or "nothing"
        raise DrawingError(
            f"{dot_program} -T{form} ended with status {done.returncode} and said: {said[-500:]}. "
            "Save as .dot, and try it by hand."
        )
    return done.stdout


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing: a full disk leaves what was there."""
    part: str | None = None
    try:
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except OSError as error:
        if part is not None:
            with suppress(OSError):
                os.unlink(part)
        raise OutputError(
            f"{path}: it could not be written: {error.strerror or error}; free some space, or choose "
            "another folder."
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
