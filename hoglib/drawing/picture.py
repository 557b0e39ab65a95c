"""`hoglib.graph`: a picture of a function's graph and of its gradient's."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from torch.autograd import Function

from hoglib._core import validation
from hoglib.drawing.backward_graph import collect
from hoglib.drawing.dot import dot
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
    "package of that name does not contain it)"
)
TIMEOUT = 60.0  # seconds


def graph(
    fn: Callable[..., Any] | type[Function],
    inputs: Any,
    *,
    order: int = 2,
    saved: bool = True,
    max_nodes: int = 150,
) -> "Graph":
    r"""Draw the graph that a second derivative goes through, and mark where it is lost.

        y = f(x)        the graph of f
        g = J(x)^T u    the graph of the gradient, which is differentiated again

    Custom Functions have their names, and a box around what their backward made; modules have boxes
    with their qualified names. Octagons are faults: a backward that returns a gradient without a graph
    (``no_grad``, ``.detach()``, NumPy, a raw kernel, ``@once_differentiable``), so that a second
    derivative is zero; an operation that has no further derivative, or whose derivative is NaN at these
    inputs. Hexagons may make it incomplete: a tensor that forward made and saved, which is neither
    input nor output, and a ``.detach()`` in a backward whose gradient still has a graph. Nothing that
    is passed is changed.

    Args:
        fn: What to draw: a Function class or its ``apply``, an ``nn.Module``, a loss
            ``(params, batch) -> scalar``, or any function of tensors.
        inputs: The arguments of fn, a tuple, or its only argument. fn is differentiated by their
            floating-point tensors (if any requires grad, by those that do) and by the trainable
            parameters of a module.
        order: 1 for the graph of f, 2 to add that of the gradient, 3 to add that of the second
            derivative.
        saved: Whether to draw the tensors that custom Functions save for backward.
        max_nodes: A graph with more nodes, or with twice as many edges, is joined by module; the title
            says so.
    Returns:
        A :class:`Graph`. Its attribute ``faults`` describes the faults, ``str(graph)`` is the text of a
        DOT file, ``graph.save("picture.svg")`` draws it, and a notebook shows it.
    Raises:
        ArgumentTypeError: if fn is not a function.
        ArgumentValueError: if there is nothing to differentiate by; fn may raise any other error.
    Example:
        >>> picture = hog.graph(lambda x: x.sin().sum(), torch.ones(3))
        >>> picture.faults
        ()
        >>> print(picture)
        digraph "<lambda>" {
        ...
        }
    """
    validation.function("fn", fn)
    if validation.at_least("order", order, 1) > 3:
        raise ArgumentValueError(f"order: expected 1, 2 or 3, got {order}.")
    validation.flag("saved", saved)
    validation.at_least("max_nodes", max_nodes, 1)
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the picture shows what torch would warn about
        data = collect(fn, given, order, saved)
    return Graph(data.name, dot(data, max_nodes), tuple(data.faults))


@final
class Graph:
    """A picture of a graph, which :func:`hoglib.graph` returns.

    ``str(graph)`` is the text of a DOT file, the same for the same graph. A notebook shows the picture,
    or the text if graphviz is not installed.

    Args:
        name: Name of the function.
        text: Text of the DOT file.
        faults: Sentences about what makes a second derivative zero, incomplete or NaN, or raise.
    Attributes:
        name: Name of the function.
        faults: Sentences about what makes a second derivative zero, incomplete or NaN, or raise.
    Example:
        >>> hog.graph(lambda x: x.detach() * 2, torch.ones(3))
        <Graph of <lambda>: 1 fault; draw it with .save('graph.svg')>
    """

    def __init__(self, name: str, text: str, faults: tuple[str, ...]) -> None:
        self.name, self.faults = name, faults
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        faults = f"{len(self.faults)} fault{'' if len(self.faults) == 1 else 's'}"
        return f"<Graph of {self.name}: {faults}; draw it with .save('graph.svg')>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the text, or draw the picture with graphviz.

        A file at the path is replaced only when the new one is complete.

        Args:
            path: A file .dot or .gv for the text, or .svg, .png or .pdf for the picture.
        Returns:
            The path.
        Raises:
            ArgumentValueError: for any other suffix.
            MissingDependencyError: for a picture, if graphviz is not installed.
            DrawingError: if graphviz fails or takes longer than a minute.
            OutputError: if the file cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentTypeError(f"path: expected a path, got {validation.describe(path)}.")
        path = Path(path)
        suffix = path.suffix.lower()
        validation.one_of(f"the suffix of {str(path)!r}", suffix, TEXTS + PICTURES)
        if not path.parent.is_dir():
            raise OutputError(
                f"{path}: expected an existing folder, got {str(path.parent)!r}; make it first."
            )
        content = self._text.encode() if suffix in TEXTS else self._draw(suffix[1:])
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_bytes(content)
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise OutputError(
                f"{path}: the file could not be written: {error.strerror or error}; free some space, "
                "or choose another folder."
            ) from error
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """The picture for notebooks, or the text without graphviz."""
        try:
            return {"image/svg+xml": self._draw("svg").decode(), "text/plain": repr(self)}
        except (MissingDependencyError, DrawingError):
            return {"text/plain": self._text}

    def _draw(self, form: str) -> bytes:
        program = shutil.which("dot")
        if program is None:
            raise MissingDependencyError(
                f"a .{form} file: expected graphviz's program `dot`, found none; {INSTALL}, or save as "
                ".dot, which needs no program and which many viewers show."
            )
        try:
            done = subprocess.run(
                [program, f"-T{form}"],
                input=self._text.encode(),
                capture_output=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise DrawingError(
                f"graphviz took longer than {TIMEOUT:g} s; draw less (a smaller max_nodes, "
                "saved=False), or save as .dot."
            ) from None
        except OSError as error:
            raise DrawingError(f"{program} could not be run: {error}; {INSTALL}.") from error
        if done.returncode != 0 or not done.stdout:
            said = done.stderr.decode(errors="replace").strip() or "nothing"
            raise DrawingError(
                f"{program} -T{form} ended with status {done.returncode} and said: {said[-500:]}. "
                "Save as .dot, and run `dot` on that file by hand."
            )
        return done.stdout
