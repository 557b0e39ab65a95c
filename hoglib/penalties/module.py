"""`GradientPenalty`: a penalty with its weight and its schedule, as a module for configs."""

import inspect
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import pytree, validation
from hoglib.capture.capturing import runs_elsewhere
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.penalties import critics, jacobians
from hoglib.penalties import parameters as parameter_penalties
from hoglib.penalties.options import Settings, settings

# Which of (real, fake) each kind is given before the other arguments.
REAL, FAKE, BOTH = "real", "fake", "both"
KINDS: dict[str, tuple[Callable[..., Any], str]] = {
    "wgan_gp": (critics.wgan_gp, BOTH),
    "zero_centred": (critics.zero_centred, BOTH),
    "r1": (critics.r1, REAL),
    "r2": (critics.r2, FAKE),
    "r1_r2": (critics.r1_r2, BOTH),
    "dragan": (critics.dragan, REAL),
    "lipschitz": (jacobians.lipschitz, REAL),
    "input_gradient": (jacobians.input_gradient, REAL),
    "jacobian": (jacobians.jacobian, REAL),
    "sobolev": (jacobians.sobolev, REAL),
    "parameter_gradient": (parameter_penalties.parameter_gradient, REAL),
}


class GradientPenalty(nn.Module):
    r"""A penalty of `hoglib.penalties` with its weight, every step or lazily.

        penalty(critic, real, fake, *args) = weight * kind(critic, real, fake, *args)
        lazily, in training mode           = every * that at every `every`-th call, and 0 at the others

    so that its mean over calls is the same whatever `every` is. The first call computes it. In eval
    mode and under no_grad it is computed at every call, at its own size, and no call is counted. The
    number of calls is in `state_dict`, so a resumed run goes on in the same rhythm. With Adam, Karras
    et al. also scale the learning rate and betas by c = every / (every + 1): lr c, beta^c.

    kind: the name of a function of `hoglib.penalties`; options: its own options and those that all
    share, such as {target: 0.5} or {num_projections: 3}; micro_batch, autocast, output, compile as
    there. Kinds
    that need only real samples ignore fake; r2 ignores real. What comes after fake is handed on:
    labels to the critic, and for "sobolev" the derivatives first. For "jacobian" and the like `critic`
    is any function and `real` its inputs; for "parameter_gradient" a loss and its parameters.
    Further keywords of a call (generator=, batch=) go to the function.

    Raises TypeError and ValueError for arguments of the wrong kind; what the function raises.
    Source of the schedule: Karras et al., Analyzing and Improving the Image Quality of StyleGAN, 2020,
    section 3.1 and appendix B.
    """

    def __init__(
        self,
        kind: str = "wgan_gp",
        weight: float = 10.0,
        every: int = 1,
        micro_batch: int | None = None,
        autocast: bool = False,
        output: int | str | None = None,
        compile: bool | str = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        name = str(kind).replace("-", "_")
        self.kind = validation.one_of("kind", name, KINDS)
        self.weight = validation.number("weight", weight, minimum=0.0)
        self.every = validation.at_least("every", every, 1)
        if options is not None and not isinstance(options, Mapping):
            raise ArgumentTypeError(
                f"options: expected a dict of the penalty's options, got "
                f"{validation.describe(options)}."
            )
        chosen = {
            "micro_batch": micro_batch, "autocast": autocast or None, "output": output,
            "compile": compile or None,
        }  # fmt: skip
        given = {key: value for key, value in chosen.items() if value is not None}
        self.options = {**(options or {}), **given}
        known = _options_of(self.kind)
        for name in self.options:
            if name not in known:
                raise ArgumentTypeError(
                    f"options: expected those of hoglib.penalties.{self.kind}, {', '.join(known)}, got "
                    f"{name!r}."
                )
        self._returns_a_scalar(self.options)
        shared = {k: v for k, v in self.options.items() if k in Settings._fields}
        if self.kind != "parameter_gradient":
            settings(f"hoglib.penalties.{self.kind}", shared)
        # not as a number, which would be a constant of any graph that this module is a part of
        self._calls = array("q", [0])

    @property
    def calls(self) -> int:
        """How many calls were counted."""
        return self._calls[0]

    def forward(
        self, critic: Callable[..., Any], real: Any, fake: Any = None, *args: Any, **options: Any
    ) -> Tensor:
        self._returns_a_scalar(options)
        factor = self.factor()
        if not factor and self.weight:
            return _zero(real, fake)
        return self.value(critic, real, fake, *args, **options) * factor

    def factor(self) -> float:
        """Counts a call where calls are counted, and says what the penalty is multiplied by in it: the
        weight, or lazily 0 or every times the weight."""
        if not (self.training and torch.is_grad_enabled()):
            return self.weight
        if (
            runs_elsewhere()
        ):  # what is captured, and compared with that, is not a call of a training
            if self.every > 1:
                raise UnsupportedError(
                    f"GradientPenalty(every={self.every}): expected to run outside of what is "
                    "compiled, since a graph counts no calls: it would hold the penalty always, or "
                    "never. Call penalty.factor() outside, pass the number to what is compiled, where "
                    "`penalty.value(critic, real, fake)` is multiplied by it, or left out for 0."
                )
            return self.weight
        self._calls[0] += 1
        return 0.0 if (self.calls - 1) % self.every else self.weight * self.every

    def value(
        self, critic: Callable[..., Any], real: Any, fake: Any = None, *args: Any, **options: Any
    ) -> Tensor:
        """The penalty by itself, without weight and schedule."""
        function, given = KINDS[self.kind]
        if given != REAL and fake is None:
            raise ArgumentTypeError(
                f"GradientPenalty(kind={self.kind!r}): expected real and fake samples, got no fake; "
                "call it as penalty(critic, real, fake)."
            )
        if self.kind == "sobolev" and not args:
            raise ArgumentTypeError(
                "GradientPenalty(kind='sobolev'): expected the derivatives after fake, got none; call "
                "it as penalty(func, x, None, derivatives)."
            )
        points = {REAL: (real,), FAKE: (fake,), BOTH: (real, fake)}[given]
        value: Tensor = function(critic, *points, *args, **{**self.options, **options})
        return value

    def _returns_a_scalar(self, options: Mapping[str, Any]) -> None:
        for name in ("return_outputs", "reduction"):
            if options.get(name, "mean") not in ("mean", "sum", False):
                raise ArgumentValueError(
                    f"options: expected none that changes what is returned, got {name}="
                    f"{options[name]!r}; call hoglib.penalties.{self.kind} for that."
                )

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self._calls[0] = int(state)

    def extra_repr(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"kind={self.kind!r}, weight={self.weight:g}, every={self.every}{more}"


def _options_of(kind: str) -> list[str]:
    """The keywords of a kind's function, and those that all penalties of inputs share."""
    parameters = inspect.signature(KINDS[kind][0]).parameters.values()
    own = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    shares = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return [*own, *(Settings._fields if shares else ())]


def _zero(*trees: Any) -> Tensor:
    """A zero that can be added and that backward may be called on; it reaches no parameter."""
    like = next(x for x in pytree.leaves(trees) if isinstance(x, Tensor))
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return torch.zeros((), dtype=dtype, device=like.device, requires_grad=True)
