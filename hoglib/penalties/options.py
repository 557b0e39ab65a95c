"""The options that all penalties share, and their check."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch

from hoglib._core import problem
from hoglib._core.messages import validation
from hoglib._core.problem import Policy, check_option_names
from hoglib.errors import ArgumentTypeError, ArgumentValueError

Output = int | str | Callable[[Any], Any] | None
Reduction = Literal["mean", "sum", "none"]


class Options(problem.Options, total=False):
    r"""The keyword options of penalties: the options of :class:`hoglib.Options`, and more.

        penalty = reduce_n term_n        reduce is the mean or the sum over samples n, or nothing

    With ``compile`` the penalty and its gradients are computed by one graph (:func:`hoglib.compile`).
    If no gradient is needed (under no_grad, or with frozen parameters), and inside torch.func
    transforms, nothing is compiled.

    Args:
        reduction: "mean" over samples, their "sum", or "none" for the terms, one per sample, [N].
            Default: "mean".
        output: Which of several outputs of the function is differentiated: a position, a key, the
            name of an attribute, or a function of all outputs. Default: the first of a tuple or list.
        batch: If rows are not samples (nodes of graphs, atoms), the index of the sample
            that each row belongs to, integers [rows]; or a tree of index tensors with the structure
            of the inputs, None for a leaf with one row per sample. Default: each row is a sample.
        autocast: With False, the penalty is computed in the dtype of the parameters even if the
            caller is under autocast; with True, autocast stays on. Default: False.
        micro_batch: How many samples are processed at once. The gradients of each piece are computed
            immediately and kept for backward, so that memory holds the graph of one piece at a time;
            backward(create_graph=True) raises. Further arguments with as many rows as the inputs
            are split with them. Default: all samples at once.
        return_outputs: Whether to return (penalty, outputs of the function at its points),
            from one forward pass. Default: False.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> options = hog.penalties.Options(reduction="none")
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> hog.penalties.r1(lambda x: x.square(), x, **options)
        tensor([2., 8.])
    """

    reduction: Reduction
    output: Output
    batch: Any
    autocast: bool
    micro_batch: int | None
    return_outputs: bool


OPTION_NAMES = tuple(Options.__annotations__)


class CheckedOptions(NamedTuple):
    """The checked options of one call; fields without a comment are described at `Options`."""

    name: str  # the public function's name, for messages
    policy: Policy  # how the function is evaluated and differentiated
    generator: torch.Generator | None = None  # draws the call's random numbers
    reduction: str = "mean"
    output: Output = None
    batch: Any = None
    autocast: bool = False
    micro_batch: int | None = None
    return_outputs: bool = False


def check_options(
    name: str, options: Mapping[str, Any], generator: object = None, without: Collection[str] = ()
) -> CheckedOptions:
    """The checked options of the function `name`, with defaults; or an error.

    without: names of options that the function lacks.
    """
    for key in without:
        if key in options:
            known = ", ".join(name for name in OPTION_NAMES if name not in without)
            raise ArgumentTypeError(
                f"{name}: expected options among {known}; got {key!r}, which is an option of penalties "
                "of samples only. Leave it out."
            )
    if not options:
        policy = Policy.of(name, options, torch.is_grad_enabled())
        return CheckedOptions(name, policy, validation.generator(generator))
    advice = " Pass further inputs of the function by position, after the points."
    check_option_names(name, options, OPTION_NAMES, advice)
    of_function = {key: options[key] for key in options if key in problem.OPTION_NAMES}
    own = {key: options[key] for key in options if key not in of_function}
    # derivatives get a graph if the caller has gradients enabled
    policy = Policy.of(name, of_function, torch.is_grad_enabled(), functions=True)
    checked = CheckedOptions(name, policy, validation.generator(generator), **own)
    validation.choice("reduction", checked.reduction, get_args(Reduction))
    validation.boolean("autocast", checked.autocast)
    validation.boolean("return_outputs", checked.return_outputs)
    output = checked.output
    named = output is None or isinstance(output, int | str) or callable(output)
    if not named or isinstance(output, bool):
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


def select_output(outputs: Any, output: Output) -> Any:
    """The output that the option `output` names."""
    if output is None:
        return outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if callable(output):
        return output(outputs)
    try:
        if isinstance(output, str) and not isinstance(outputs, Mapping):
            return getattr(outputs, output)
        return outputs[output]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        if isinstance(outputs, Mapping):
            got = f"a {type(outputs).__name__} with {', '.join(map(repr, outputs))}"
        elif isinstance(outputs, tuple | list):
            got = f"a {type(outputs).__name__} of {len(outputs)}"
        else:
            got = validation.describe(outputs)
        raise ArgumentValueError(
            f"output: expected one of the outputs of the function, got {output!r}, which {got} does "
            "not have; name another one, or pass a function of the outputs."
        ) from error
