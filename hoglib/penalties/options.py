"""What every penalty of inputs takes besides its own arguments."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict

from hoglib._core import validation
from hoglib.errors import ArgumentTypeError, ArgumentValueError

REDUCTIONS = ("mean", "sum", "none")
Output = int | str | Callable[[Any], Any] | None


class Options(TypedDict, total=False):
    """The options that all penalties of inputs share.

    reduction: "mean" over samples, their "sum", or "none": the terms, one a sample, [N].
    output: which of several outputs the penalty is of: a position, a key or attribute, or a function of
    what was returned; None takes the first of a tuple or list.
    batch: for inputs whose rows are not samples (nodes of graphs, atoms): the sample that each row
    belongs to, whole numbers [rows]; or a tree of such tensors like the inputs, None for a leaf with a
    row a sample. One or the other is differentiated and summed up by sample.
    autocast: False computes in the parameters' own dtype where the caller stands under autocast; True
    leaves autocast on.
    micro_batch: at most so many samples at once, of the inputs and of each further argument that is a
    tensor with as many rows: their gradients are computed right away, and backward hands them on. The
    memory is that of one piece; backward(create_graph=True) is refused.
    stand_ins: run inside `hoglib.second_order()`.
    compile: True computes it and its gradients as one graph, captured and compiled once for each
    signature (`hoglib.compile`; "eager" runs the graph without compiling it). Functions made anew for
    each call share graphs where their code, and the numbers and objects they hold, are the same. Where
    no gradient is wanted (no_grad, frozen critics) and inside of transforms it is as without.
    return_outputs: return (penalty, what the function returned at the same points), of one forward.
    """

    reduction: str
    output: Output
    batch: Any
    autocast: bool
    micro_batch: int | None
    stand_ins: bool
    return_outputs: bool
    compile: bool | str


class Settings(NamedTuple):
    """Options, checked."""

    reduction: str = "mean"
    output: Output = None
    batch: Any = None
    autocast: bool = False
    micro_batch: int | None = None
    stand_ins: bool = True
    return_outputs: bool = False
    compile: Any = False


def settings(what: str, options: Mapping[str, Any]) -> Settings:
    for name in options:
        if name not in Settings._fields:
            close = get_close_matches(name, Settings._fields, n=1)
            raise ArgumentTypeError(
                f"{what}: expected options among {', '.join(Settings._fields)}, got {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else ".")
            )
    chosen = Settings(**options)
    backend(chosen.compile)
    validation.one_of("reduction", chosen.reduction, REDUCTIONS)
    for name in ("autocast", "stand_ins", "return_outputs"):
        validation.flag(name, getattr(chosen, name))
    if isinstance(chosen.output, bool) or not (
        chosen.output is None or isinstance(chosen.output, int | str) or callable(chosen.output)
    ):
        raise ArgumentTypeError(
            f"output: expected a position, a key, an attribute or a function, got "
            f"{validation.describe(chosen.output)}."
        )
    if chosen.micro_batch is not None:
        validation.at_least("micro_batch", chosen.micro_batch, 1)
        for name, bad in (
            ("batch", chosen.batch is not None),
            ("return_outputs", chosen.return_outputs),
            ("reduction", chosen.reduction == "none"),
        ):
            if bad:
                raise ArgumentValueError(
                    f"{what}(micro_batch={chosen.micro_batch}): expected it without {name}="
                    f"{getattr(chosen, name) if name == 'reduction' else '...'}, got both; pieces are "
                    "of samples that are rows, and only their sum is kept. Leave one of them out."
                )
    return chosen


def backend(value: Any) -> Any:
    """compile= of a penalty: True, False, or a backend of `hoglib.compile`."""
    if isinstance(value, bool) or callable(value):
        return value
    return validation.one_of("compile", value, ("inductor", "eager"))


def picked(outputs: Any, output: Output) -> Any:
    """The one of several outputs that is meant."""
    if output is None:
        return outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if callable(output):
        return output(outputs)
    try:
        if isinstance(output, str) and not isinstance(outputs, Mapping):
            return getattr(outputs, output)
        return outputs[output]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise ArgumentValueError(
            f"output: expected one of what the function returned, got {output!r} of "
            f"{_parts(outputs)}; name another, or pass a function of it."
        ) from error


def _parts(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with {', '.join(map(repr, outputs))}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return validation.describe(outputs)
