"""The options that the penalties of inputs share: their documentation, and one check of them."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict

import torch

from hoglib._core import validation
from hoglib._core.blocks import Remat, check_remat
from hoglib.errors import ArgumentTypeError, ArgumentValueError

REDUCTIONS = ("mean", "sum", "none")
Output = int | str | Callable[[Any], Any] | None


class Options(TypedDict, total=False):
    r"""The keyword options that all penalties of inputs share.

        penalty = reduce_n term_n        reduce is the mean or the sum over samples n, or nothing

    Args:
        reduction: "mean" over samples, their "sum", or "none" for the terms, one per sample, [N].
            Default: "mean".
        output: Which of several outputs of the function is differentiated: a position, a key, the
            name of an attribute, or a function of what was returned. Default: the first of a tuple
            or list.
        batch: For inputs whose rows are not samples (nodes of graphs, atoms): the index of the sample
            that each row belongs to, integers [rows]; or a tree of such tensors with the structure
            of the inputs, None for a leaf with one row per sample. Default: each row is a sample.
        autocast: With False, the penalty is computed in the dtype of the parameters also where the
            caller is under autocast; with True, autocast stays on. Default: False.
        micro_batch: How many samples are processed at once. Gradients of each piece are computed
            immediately and backward returns them, so that memory is that of one piece;
            backward(create_graph=True) raises. Further arguments with as many rows as the inputs
            are split with them. Default: all samples at once.
        stand_ins: Whether the function runs inside :func:`hoglib.second_order`. Default: True.
        remat: Blocks of the function's module whose intermediate values are recomputed in backward
            instead of kept, by :func:`hoglib.ops.remat`: True for the blocks that it repeats, or
            their names or globs, as "layers.*". Default: False.
        return_outputs: Whether to return (penalty, outputs of the function at the same points),
            from one forward pass. Default: False.
        compile: With True, the penalty and its gradients are computed by one graph, which is
            captured and compiled once for each signature (:func:`hoglib.compile`); "eager" runs
            the graph without compiling it. Functions that are created anew for each call share a
            graph if their code and the numbers and objects they hold are the same. Where no
            gradient is needed (under no_grad, or with frozen parameters) and inside torch.func
            transforms nothing is compiled. With remat, the passes of blocks are compiled instead,
            once for all equal ones. Default: False.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> options = hog.penalties.Options(reduction="none")
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> hog.penalties.r1(lambda x: x.square(), x, **options)
        tensor([2., 8.])
    """

    reduction: str
    output: Output
    batch: Any
    autocast: bool
    micro_batch: int | None
    stand_ins: bool
    remat: bool | str | Sequence[str]
    return_outputs: bool
    compile: bool | str


OPTION_NAMES = tuple(Options.__annotations__)


class CheckedOptions(NamedTuple):
    """The options of one call, checked, with the name of the penalty and its generator."""

    name: str  # of the public function, for messages
    generator: torch.Generator | None = None
    reduction: str = "mean"
    output: Output = None
    batch: Any = None
    autocast: bool = False
    micro_batch: int | None = None
    stand_ins: bool = True
    remat: Remat = False
    return_outputs: bool = False
    compile: Any = ""


def check_options(
    name: str, options: Mapping[str, Any], generator: torch.Generator | None = None
) -> CheckedOptions:
    """The options of the penalty with that name, with defaults, or an error."""
    for key in options:
        if key not in OPTION_NAMES:
            close = get_close_matches(key, OPTION_NAMES, n=1)
            raise ArgumentTypeError(
                f"{name}: expected options among {', '.join(OPTION_NAMES)}, got {key!r}"
                + (f"; did you mean {close[0]!r}?" if close else ".")
            )
    given: dict[str, Any] = {**options}
    if "remat" in given:
        given["remat"] = check_remat(given["remat"])
    if "compile" in given:
        given["compile"] = check_backend(given["compile"])
    checked = CheckedOptions(name, validation.generator(generator), **given)
    validation.one_of("reduction", checked.reduction, REDUCTIONS)
    for key in ("autocast", "stand_ins", "return_outputs"):
        validation.flag(key, getattr(checked, key))
    output = checked.output
    if output is not None and (
        isinstance(output, bool) or not (isinstance(output, int | str) or callable(output))
    ):
        raise ArgumentTypeError(
            "output: expected a position, a key, the name of an attribute, or a function of the "
            f"outputs, got {validation.describe(output)}."
        )
    if checked.micro_batch is None:
        return checked
    validation.at_least("micro_batch", checked.micro_batch, 1)
    for key, needs_all_samples in (
        ("batch", checked.batch is not None),
        ("return_outputs", checked.return_outputs),
        ("reduction", checked.reduction == "none"),
    ):
        if needs_all_samples:
            value = checked.reduction if key == "reduction" else "..."
            raise ArgumentValueError(
                f"{name}(micro_batch={checked.micro_batch}): expected it without {key}={value}, got "
                "both. micro_batch= splits the inputs by rows and keeps only the sum over the pieces; "
                "leave one of the two out."
            )
    return checked


def check_backend(value: Any) -> Any:
    """The backend of `hoglib.compile` that the option `compile` names or is; "" for none."""
    return value if callable(value) else validation.backend("compile", value)


def select_output(outputs: Any, output: Output) -> Any:
    """The one of several outputs that the option `output` names."""
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
            f"output: expected one of the outputs of the function, got {output!r}, which "
            f"{_describe_outputs(outputs)} does not have; name another one, or pass a function of the "
            "outputs."
        ) from error


def _describe_outputs(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a {type(outputs).__name__} with {', '.join(map(repr, outputs))}"
    if isinstance(outputs, tuple | list):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return validation.describe(outputs)
