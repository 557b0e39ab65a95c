"""The options of learners: described once, and checked once into a frozen value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor, nn

from hoglib._core import problem, validation
from hoglib._core.problem import EvaluationOptions, Policy
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.functional import Criterion, Forward
from hoglib.meta.gradient_transformation import GradientTransformation
from hoglib.meta.inner_loop import Memory, check_truncate
from hoglib.meta.norms import NormKind

# by name, itself, or as a function of the learning rate
UpdateRule = str | GradientTransformation | Callable[[Any], GradientTransformation] | nn.Module
InnerParams = Callable[[str, Tensor], bool] | Sequence[str] | str | None
OverTasks = Literal["auto", "vmap", "loop"]
StepWeights = Sequence[float | Tensor] | None  # of the outer losses after each step


class LearnerOptions(EvaluationOptions, total=False):
    """The keyword options that :class:`hoglib.MAML`, :class:`~hoglib.meta.Reptile` and
    :class:`~hoglib.meta.IMAML` share.

    Args:
        inner_lr: The learning rate of the inner loop; with learn_lr, where the learned rates start.
            Default: 0.01.
        rule: The update rule: "sgd", "momentum", "adam", "adamw" or "rmsprop"; a function from a
            learning rate to a `hoglib.meta.GradientTransformation`; or an object with ``init`` and
            ``update``, whose parameters MAML learns if it is a module. Default: "sgd".
        rule_options: Keyword arguments of a rule that is given by name.
        inner_loss: The criterion of the inner loop, which MAML and IMAML learn if it is a module with
            parameters. Default: criterion.
        inner_params: The parameters that adapt: a predicate ``(name, tensor) -> bool``, or names
            and prefixes (ANIL: ``["head"]``). All parameters are meta-learned. Default: all adapt.
        batch_norm: What batch norm layers normalise by. "by_mode": in train mode the statistics of
            the batch, without updating the running ones, which they use in eval mode.
            "transductive": the batch's in either mode. "per_step" (not of IMAML): the batch's in train
            mode; in eval mode running averages that are kept for each step. "frozen": the model's
            running statistics in either mode. Default: "by_mode".
        forward: How the model is called, ``forward(model, batch)``. Default: by the parts of the
            batch.
        stand_ins: Run inside `hoglib.second_order()`, where torch calls without a right second
            derivative are replaced by their stand-ins. Default: True.
        remat: Blocks of the model whose intermediate values are recomputed in backward instead of kept,
            by `hoglib.ops.remat`: True for the blocks that it repeats, or their names or globs, as
            "layers.*". It is about layers, as MAML's ``memory`` is about steps, and may be combined
            with each of its values. With compile, the passes of a block are compiled instead of the
            meta-gradient, once for all equal blocks, and tasks run one after the other.
            Default: False.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> options = hog.meta.LearnerOptions(inner_lr=0.1, rule="adam")
        >>> maml = hog.MAML(nn.Linear(2, 1), F.mse_loss, inner_steps=3, **options)
        >>> maml.inner_lr
        0.1
    """

    inner_lr: float
    rule: UpdateRule
    rule_options: dict[str, Any] | None
    inner_loss: Criterion | None
    inner_params: InnerParams
    batch_norm: NormKind
    forward: Forward | None


# its own, then those of EvaluationOptions
OPTION_NAMES = (*sorted(LearnerOptions.__annotations__, key=problem.OPTION_NAMES.__contains__),)


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How an inner loop runs, checked whenever one is made.

    evaluation: how the model is evaluated, as it was given to the learner, by names; policy has it
    checked.
    """

    caller: str  # the class of the learner, for messages
    evaluation: problem.Options
    inner_lr: float = 0.01
    inner_steps: int
    rule_options: dict[str, Any] | None = None
    inner_params: InnerParams = None
    batch_norm: str = "by_mode"
    first_order: bool = False
    truncate: int | None = None
    step_weights: Sequence[float] | None = None
    memory: str = "store"
    over_tasks: str = "loop"
    policy: Policy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checked = {
            "inner_lr": validation.positive("inner_lr", self.inner_lr),
            "inner_steps": validation.at_least("inner_steps", self.inner_steps, 1),
            "rule_options": _check_rule_options(self.rule_options),
            "inner_params": _check_inner_params(self.inner_params),
            "batch_norm": validation.one_of("batch_norm", self.batch_norm, get_args(NormKind)),
            "first_order": validation.flag("first_order", self.first_order),
            "truncate": check_truncate(self.truncate),
            "step_weights": _check_step_weights(self.step_weights),
            "memory": validation.one_of("memory", self.memory, get_args(Memory)),
            "over_tasks": validation.one_of("over_tasks", self.over_tasks, get_args(OverTasks)),
            "policy": Policy.of(self.caller, self.evaluation),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.policy.compiles_blocks and self.over_tasks == "vmap":
            raise ArgumentValueError(
                "MAML: expected over_tasks='loop' or 'auto' with remat= and compile=, got 'vmap', in "
                "which blocks are not compiled. Leave out one of the three."
            )

    def weights_for(self, steps: int) -> StepWeights:
        """The weights of the outer losses after each step; None for the last loss alone."""
        weights = self.step_weights
        if weights is not None and (len(weights) != steps or not any(weights)):
            raise ArgumentValueError(
                f"step_weights: expected {steps} weights, one after each inner step and not all "
                f"of them zero, got {list(weights)}; see `hoglib.meta.multi_step_weights`."
            )
        return weights


def _check_inner_params(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not (value is None or callable(value) or all(isinstance(name, str) for name in names)):
        raise ArgumentTypeError(
            "inner_params: expected a predicate (name, tensor) -> bool, or names or prefixes, got "
            f"{validation.describe(value)}."
        )
    return value


def _check_rule_options(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ArgumentTypeError(f"rule_options: expected a dict, got {validation.describe(value)}.")
    return dict(value or {})


def _check_step_weights(value: Any) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ArgumentTypeError(
            f"step_weights: expected a list of numbers, got {validation.describe(value)}."
        )
    return [validation.number("step_weights", weight, minimum=0) for weight in value]
