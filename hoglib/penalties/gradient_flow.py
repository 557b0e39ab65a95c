"""Whether a gradient flows through a function, so that its penalty has an effect; what detaches it."""

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from hoglib._core.detachment import DetachmentWatch
from hoglib._core.gradient_graph import GraphSummary, check_custom_functions, graph_summary
from hoglib._core.problem import Problem
from hoglib._core.torch_internals import watching_functions
from hoglib.errors import NoSecondDerivative, UnsupportedError
from hoglib.stand_ins.mode import in_module

NOT_OF_POINTS = "what it returns does not depend on the points"
NOT_OF_PARAMETERS = "its gradient by the points does not reach any parameter that requires grad"


def check_gradient_flow(name: str, graph: GraphSummary) -> None:
    """Raises for a custom Function that detaches its gradient, and for compiled code, which has no
    second derivative; warns of a Function that may detach it."""
    if graph.has_compiled_code:
        raise UnsupportedError(
            f"{name}: expected operations that torch can differentiate twice, got a part that "
            "torch.compile made, which it cannot. Compile the critic as a whole (a penalty then "
            "runs its original code), or call that part inside "
            "`torch.compiler.set_stance('force_eager')`."
        )
    try:
        check_custom_functions(graph, name)
    except NoSecondDerivative as error:
        raise NoSecondDerivative(
            f"{name}: this penalty has no effect because its gradient is detached in a custom "
            f"Function. {error}"
        ) from error


def no_gradient_flow(problem: Problem, leaves: Sequence[Tensor], reason: str) -> NoSecondDerivative:
    """The error of a penalty without effect at these leaves, with the places that detach."""
    places = _detached_places(problem, leaves)
    where = (
        f"The gradient is detached by {'; by '.join(places)}."
        if places
        else "No call detaches it: the modules that the points go through are frozen, or the gradient "
        "by the points is the same for all values of the parameters."
    )
    return NoSecondDerivative(
        f"{problem.policy.caller}: this penalty has no effect because {reason}. {where} Change that, "
        "or compute the penalty under torch.no_grad() if only its value is needed."
    )


def _detached_places(problem: Problem, leaves: Sequence[Tensor]) -> list[str]:
    """Where a call of the function detaches; else its Functions, whose backward may."""
    with DetachmentWatch(module=in_module) as watch, suppress(Exception):
        with watching_functions(lambda function, given: None) as applying:
            watch.applying = applying
            result = problem.loss(problem.params(leaves), *problem.args)
        places = [str(detached) for detached in watch.detached]
        if not places and isinstance(result, Tensor):
            functions = [entry.function for entry in graph_summary(result).user_functions]
            places = [f"the backward of {f.__qualname__}" for f in functions if f is not None]
        return list(dict.fromkeys(places))
    return []
