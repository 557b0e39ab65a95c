"""Whether a penalty can have an effect, and if not, where its gradient ends."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from hoglib._core.detachment import DetachedGradient, DetachmentWatch
from hoglib._core.gradient_graph import GraphSummary, check_custom_functions, graph_summary
from hoglib._core.torch_internals import watching_functions
from hoglib.errors import NoSecondDerivative, UnsupportedError
from hoglib.stand_ins.mode import in_module

OF_X = "what it returns does not depend on the points"
OF_PARAMETERS = "its gradient by the points does not reach any parameter that learns"


def check_gradient_flow(what: str, graph: GraphSummary) -> None:
    """Raises for a custom Function that cuts the gradient's graph, and for compiled code, which has no
    second derivative; warns of a Function that may cut it."""
    if graph.has_compiled_code:
        raise UnsupportedError(
            f"{what}: expected operations that torch can differentiate twice, got a part that "
            "torch.compile made, which it cannot. Compile the critic as a whole, whose own code a "
            "penalty then runs, or call it in here inside `torch.compiler.set_stance('force_eager')`."
        )
    try:
        check_custom_functions(graph, what)
    except NoSecondDerivative as error:
        raise NoSecondDerivative(
            f"{what}: this penalty has no effect because its gradient is cut in a custom Function. "
            f"{error}"
        ) from error


def no_gradient_flow(
    what: str, how: str, func: Callable[..., Any], x: Any, args: tuple[Any, ...]
) -> NoSecondDerivative:
    """The error of a penalty without effect, with the places where the graph is cut."""
    cuts = _cuts(func, x, args)
    where = (
        f"The graph is cut by {'; by '.join(cuts)}."
        if cuts
        else "No call cuts the graph: what the points go through is frozen, or of one slope "
        "whatever the parameters are."
    )
    return NoSecondDerivative(
        f"{what}: this penalty has no effect because {how}. {where} Mend that, or compute it under "
        "torch.no_grad() where it is only looked at."
    )


def _cuts(func: Callable[..., Any], x: Any, args: tuple[Any, ...]) -> list[str]:
    """Where a call of the function leaves the graph; and its Functions whose gradient has none."""
    with _InModules() as watch, suppress(Exception):
        with watching_functions(lambda function, given: None) as applying:
            watch.applying = applying
            result = func(x, *args)
        found = [watch.said(cut) for cut in watch.detached]
        if not found and isinstance(result, Tensor):
            functions = [entry.function for entry in graph_summary(result).user_functions]
            found = [f"the backward of {f.__qualname__}" for f in functions if f is not None]
        return list(dict.fromkeys(found))
    return []


class _InModules(DetachmentWatch):
    """A watch that knows which module runs when it sees a cut."""

    def __init__(self) -> None:
        super().__init__()
        self._where: dict[int, str] = {}

    def said(self, cut: DetachedGradient) -> str:
        return f"{cut}{self._where[id(cut)]}"

    def _note(self, how: str, kind: str) -> DetachedGradient:
        cut = super()._note(how, kind)
        self._where.setdefault(id(cut), in_module())
        return cut
