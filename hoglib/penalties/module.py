"""The penalties by name, and `GradientPenalty`: a penalty with weight and schedule, for configs.

    @register(REAL, term="|g_n|^2 / 2 at real")
    def r1(critic, real, *args, **options): ...

Each penalty registers itself where it is defined; `hoglib.penalties.check` and the tests find it here.
"""

import inspect
from array import array
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.problem import check_option_names
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib.capture.capturing import in_other_tracer
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.penalties.distributed import check_schedule
from hoglib.penalties.options import OPTION_NAMES, check_options

F = TypeVar("F", bound=Callable[..., Any])
REAL, FAKE, BOTH = ("real",), ("fake",), ("real", "fake")


class Kind(NamedTuple):
    """A penalty, and how to call it by its name."""

    function: Callable[..., Any]
    sets: tuple[str, ...]  # the sets of samples it takes first: "real", "fake"
    needs: str = ""  # the required argument after the sets, in words
    without: Collection[str] = ()  # names of `Options` that it lacks
    term: str = ""  # the term in words, for `check`; "" if `check` does not offer the penalty
    draw: Literal["", "between", "noise"] = ""  # how it draws points; "": it evaluates at its sets
    # if `function` draws points: the penalty at given points, called as (critic, points, points)
    at_points: Callable[..., Any] | None = None

    @property
    def keywords(self) -> list[str]:
        """The names of all keyword arguments of the function, and of `Options`."""
        parameters = inspect.signature(self.function).parameters.values()
        own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        return own + [name for name in OPTION_NAMES if name not in self.without]


KINDS: dict[str, Kind] = {}


def register(sets: tuple[str, ...], **facts: Any) -> Callable[[F], F]:
    """A decorator that enters a function into KINDS by its name.

    sets: REAL, FAKE or BOTH. facts: further fields of :class:`Kind`.
    """

    def registered(function: F) -> F:
        KINDS[function.__name__] = Kind(function, sets, **facts)
        return function

    return registered


def kind_named(name: object, known: Collection[str] = KINDS.keys()) -> str:
    """The name of a kind, which may have hyphens; raises with the closest known name."""
    wanted = str(name).replace("-", "_")
    if wanted in known:
        return wanted
    close = validation.did_you_mean(wanted, known)
    raise ArgumentValueError(f"kind: expected one of {', '.join(known)}; got {name!r}{close}")


@final
class GradientPenalty(nn.Module):
    r"""A penalty of `hoglib.penalties` with its weight, at every step or lazily.

        penalty(critic, real, fake, *args) = weight * kind(critic, real, fake, *args)
        lazily, in training mode           = every * weight * kind(...) at every `every`-th call, else 0

    so that the mean over calls does not depend on `every`. The first call computes the penalty. In eval
    mode and under no_grad every call returns weight * kind(...), and is not
    counted. The number of calls is in `state_dict`, so that a resumed run continues the schedule.
    With Adam, Karras et al. also scale the learning rate and betas by c = every / (every + 1): lr
    c, beta^c.

    Args:
        kind: The name of a function of `hoglib.penalties`. Default: "wgan_gp".
        weight: The factor of the penalty. Default: 10.
        every: The number of calls per computed penalty. Default: 1.
        micro_batch: How many samples are processed at once. Default: all.
        autocast: Whether the caller's autocast stays on. Default: False.
        output: Which of several outputs of the critic is differentiated: a position, a key or the
            name of an attribute. Default: the first.
        compile: Whether the penalty and its gradients are computed by one compiled graph; "eager"
            runs the graph without compiling it. Default: False.
        remat: Blocks of the critic that backward recomputes instead of keeping intermediate values:
            True for the critic's repeated blocks, or names or globs. With compile, blocks are
            compiled. Default: False.
        options: Further options of the function and of :class:`Options`, such as {"target": 0.5} or
            {"num_projections": 3}.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments of the wrong kind; calls raise the errors
            of the function.
        DistributedError: In all processes that share a critic, if their numbers of calls differ.
    References:
        The schedule: Karras et al., Analyzing and Improving the Image Quality of StyleGAN, 2020,
        section 3.1 and appendix B.
    Example:
        >>> penalty = hog.GradientPenalty(kind="r1", weight=10.0, every=2)
        >>> real = torch.tensor([[1.0]])
        >>> [penalty(torch.square, real).item() for _ in range(3)]  # 2 * 10 * |2 x|^2 / 2
        [40.0, 0.0, 40.0]
    """

    @validation.explain_arguments
    def __init__(
        self,
        kind: str = "wgan_gp",
        weight: float = 10.0,
        every: int = 1,
        micro_batch: int | None = None,
        autocast: bool = False,
        output: int | str | None = None,
        compile: bool | str = False,
        remat: bool | str | list[str] = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind_named(kind)
        self.weight = validation.number("weight", weight, minimum=0.0)
        self.every = validation.at_least("every", every, 1)
        if options is not None and not isinstance(options, Mapping):
            got = validation.describe(options)
            text = f"options: expected a dict of the penalty's options, got {got}."
            raise ArgumentTypeError(text)
        chosen = {
            "micro_batch": micro_batch, "autocast": autocast or None, "output": output,
            "compile": compile or None, "remat": None if remat is False else remat,
        }  # fmt: skip
        given = {key: value for key, value in chosen.items() if value is not None}
        self.options = {**(options or {}), **given}
        called = KINDS[self.kind]
        check_option_names(f"GradientPenalty(kind={self.kind!r})", self.options, called.keywords)
        self._check_returns_scalar(self.options)
        shared = {key: value for key, value in self.options.items() if key in OPTION_NAMES}
        check_options(f"hoglib.penalties.{self.kind}", shared, without=called.without)
        # an array, because a Python number would be a constant of a compiled graph around this module
        self._calls = array("q", [0])

    @property
    def calls(self) -> int:
        """The number of calls that were counted."""
        return self._calls[0]

    __call__: Callable[..., Tensor]  # torch's own annotation says Any

    def forward(
        self, critic: Callable[..., Any], real: Tree, fake: Tree = None, *args: Any, **options: Any
    ) -> Tensor:
        """The penalty times its weight, by the schedule.

        Args:
            critic: The critic; for "jacobian" and the like any function, for "parameter_gradient"
                a loss.
            real: Real samples, the inputs, or for "parameter_gradient" the parameters; r2 ignores them.
            fake: Generated samples; kinds that need only real samples ignore them.
            *args: Further arguments of the function: labels, and for "sobolev" the derivatives first.
            **options: Further keywords of the function, such as generator= and batch=.
        Returns:
            The penalty, a scalar.
        """
        self._check_returns_scalar(options)
        factor = self.factor()
        if self.every > 1 and self.training and torch.is_grad_enabled():  # the call was counted
            check_schedule(self.calls, self.every, critic)
        if not factor and self.weight:
            # backward of this zero must work; it reaches no parameter
            like = pytree.tensors((real, fake))[0]
            dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
            return torch.zeros((), dtype=dtype, device=like.device, requires_grad=True)
        return self.value(critic, real, fake, *args, **options) * factor

    def factor(self) -> float:
        """Counts a call, in training mode with gradients on.

        Returns:
            The factor of the penalty in this call: the weight, or lazily 0 or every * weight.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self.weight
        if in_other_tracer():  # a capture and its eager run are no training steps: do not count
            if self.every > 1:
                raise UnsupportedError(
                    f"GradientPenalty(every={self.every}): expected a call outside of compiled code, "
                    "since a graph counts no calls: it would compute the penalty always or never. Call "
                    "penalty.factor() outside, pass the number to the compiled function, and there "
                    "multiply `penalty.value(critic, real, fake)` by it, or leave it out for 0."
                )
            return self.weight
        self._calls[0] += 1
        return 0.0 if (self.calls - 1) % self.every else self.weight * self.every

    def value(
        self, critic: Callable[..., Any], real: Tree, fake: Tree = None, *args: Any, **options: Any
    ) -> Tensor:
        """The penalty by itself, without weight and schedule.

        Args:
            critic: The critic, or the function of the kind.
            real: Real samples, or the inputs of the function.
            fake: Generated samples, for kinds that need them.
            *args: Further arguments of the function.
            **options: Further keywords of the function.
        Returns:
            The penalty, a scalar.
        """
        kind, samples = KINDS[self.kind], {"real": real, "fake": fake}
        if "fake" in kind.sets and fake is None:
            raise ArgumentTypeError(
                f"GradientPenalty(kind={self.kind!r}): expected real and fake samples, got no fake; "
                "call it as penalty(critic, real, fake)."
            )
        if "fake" not in kind.sets and fake is not None:
            dims = {x.dim() for x in pytree.tensors(real)}
            if any(not x.is_floating_point() or x.dim() not in dims for x in pytree.tensors(fake)):
                raise ArgumentTypeError(
                    f"fake: expected None or samples like real, which {self.kind!r} ignores, got "
                    f"{validation.describe(fake)}; pass labels after it: penalty(critic, real, None, "
                    "labels)."
                )
        if kind.needs and not args:
            raise ArgumentTypeError(
                f"GradientPenalty(kind={self.kind!r}): expected the {kind.needs} after fake, got none; "
                f"call it as penalty(func, x, None, {kind.needs})."
            )
        points = [samples[name] for name in kind.sets]
        return kind.function(critic, *points, *args, **{**self.options, **options})

    def _check_returns_scalar(self, options: Mapping[str, Any]) -> None:
        for name in ("return_outputs", "reduction"):
            if options.get(name, "mean") not in ("mean", "sum", False):
                raise ArgumentValueError(
                    f"options: expected options with which a scalar is returned, got {name}="
                    f"{options[name]!r}; call hoglib.penalties.{self.kind} for that."
                )

    def get_extra_state(self) -> Tensor:
        """The number of calls, for `state_dict`."""
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Any) -> None:
        """Continues the schedule of a `state_dict`.

        Args:
            state: The number of calls.
        """
        self._calls[0] = int(state)

    def extra_repr(self) -> str:
        """Kind, weight, schedule and options."""
        more = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"kind={self.kind!r}, weight={self.weight:g}, every={self.every}{more}"
