"""`hoglib.penalties.check`: compares a user's penalty with hoglib's penalty of the same name.

The user's penalty runs with a critic that records its arguments. hoglib's penalty is evaluated at the
recorded points; the values, and the gradients by the critic's parameter, must agree.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.modules.state import preserve_random_state, same
from hoglib._core.runtime.source_location import format_error
from hoglib._core.substrate.autograd import Vector, grad_enabled
from hoglib._core.substrate.detachment import INNER, DetachedGradient, DetachmentWatch
from hoglib._core.torch_api.torch_internals import unwrap
from hoglib.errors import ArgumentValueError
from hoglib.penalties.module import KINDS, Kind, kind_named
from hoglib.verification import maps
from hoglib.verification.comparison import agreement
from hoglib.verification.maps import name_of, seed_all
from hoglib.verification.report import Report, Row, Rows, finding

REACHES = "reaches the critic"
N = 64  # samples
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
CALLED = (
    "It is called as penalty(critic, {}), with samples of shape {} and a critic that returns scores "
    "[N, 1], and returns one number by itself. Say which shape it is written for with shape= and "
    "dtype=, take the size of the batch from real, and bind other arguments, or other scores, by a "
    "lambda."
)
TERM = (
    "Differentiate `score.sum()` by the points that went into the critic, take the norm over all "
    "elements of a sample, `g.flatten(1).norm(2, dim=1)`, then the term of each sample, then the mean. "
    "A weight is passed as weight=, and a lazy penalty is checked with every=."
)
DRAW = {
    "between": "Draw one number for each sample, `e = torch.rand(len(real), *[1] * (real.dim() - 1))`, "
    "and take `e * real + (1 - e) * fake`.",
    "noise": "Add noise of its own to each element of real: `real + std * torch.randn_like(real)`.",
}
STAY = "Use torch operations, with gradients on, from the gradient to the value."
CREATE = (
    "Without `create_graph=True` the gradient is a constant: the penalty is added to the loss and "
    "trains nothing. Pass it to torch.autograd.grad (or to backward)."
)
FROZEN = "The value does not depend on them: they were frozen while it ran, or it is a constant."
SAFE = (
    "one sample with a zero gradient makes it NaN: the derivative of a root at zero is infinite. Use "
    "`g.flatten(1).norm(2, dim=1)`, whose derivative at zero is zero, or add 1e-12 under the root."
)


def check(
    penalty: Callable[..., Any],
    kind: str,
    *,
    shape: Sequence[int] = (3, 4, 4),
    every: int = 1,
    weight: float = 1.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Report:
    r"""Checks that a penalty of your own has the right value, and trains the critic.

        wgan_gp       w mean_n (|g_n| - target)^2        at e_n real_n + (1 - e_n) fake_n
        zero_centred  w mean_n |g_n|^2                   likewise, e_n uniform in [0, 1]
        r1, r2        w mean_n |g_n|^2 / 2               at real; at fake
        r1_r2         the sum of both
        dragan        w mean_n (|g_n| - target)^2        at real and noise

    g_n is the gradient of sample n's score by its point, |.| over all elements of a sample. The penalty
    runs with a small critic that records its arguments, and is compared with hoglib's penalty at the
    recorded points.

    The report has one row for each check: "value", "points" (for kinds that draw points), "reaches the
    critic", and if the value is right, "parameter gradient" and "zero gradient" (the parameter
    gradient with one sample at which g_n is zero). A module or object is copied, so that it does not
    count the check's calls; the state of random generators is restored.

    Args:
        penalty: Called as penalty(critic, real, fake), and returns a scalar; r1 and dragan as
            penalty(critic, real), r2 as penalty(critic, fake). The critic returns scores [N, 1].
        kind: The intended penalty: "wgan_gp", "zero_centred", "r1", "r2", "r1_r2" or "dragan".
        shape: Shape of one sample. Default: (3, 4, 4).
        every: The number of calls per penalty, if the penalty is lazy. Default: 1.
        weight: w, the factor that your penalty contains. Default: 1.
        device: The device of critic and samples. Default: the CPU.
        dtype: The dtype of critic and samples, torch.float64 or torch.float32. Default: float64.
        **options: Options of hoglib's penalty, such as ``target`` and ``one_sided``.
    Returns:
        A `Report`: `ok`, `rows`, `str(report)`, `to_json()`, `raise_if_failed()`.
    Raises:
        ArgumentTypeError, ArgumentValueError: If the penalty is not a function, and for an unknown
            kind or option.
    References:
        Gulrajani et al., Improved Training of Wasserstein GANs, 2017, eq. 3. Mescheder, Geiger and
        Nowozin, Which Training Methods for GANs do actually Converge?, 2018, eq. 9. Kodali et al., On
        Convergence and Stability of GANs, 2017, eq. 4.
    Example:
        >>> def without_half(critic, real):
        ...     x = real.detach().requires_grad_()
        ...     (g,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        ...     return g.flatten(1).square().sum(1).mean()
        >>> report = hog.penalties.check(without_half, "r1")
        >>> [row.name for row in report.rows if row.status == "fail"]
        ['value']
    """
    validation.function("penalty", penalty)
    meant = KINDS[kind_named(kind, [name for name, kind in KINDS.items() if kind.term])]
    validation.at_least("every", every, 1)
    validation.positive("weight", weight)
    sizes = [validation.at_least("shape", n, 1) for n in shape]
    if not sizes:
        raise ArgumentValueError(
            "shape: expected that of one sample, without the batch, got (); a batch of vectors has "
            "shape=(d,)."
        )
    if dtype not in TOLERANCES:
        raise ArgumentValueError(f"dtype: expected torch.float64 or torch.float32, got {dtype}.")
    with suppress(Exception):  # without a copy, the penalty may count the check's calls
        penalty = copy.deepcopy(penalty)
    quiet = warnings.catch_warnings(action="ignore")  # the report tells what torch would warn of
    with grad_enabled(), quiet, preserve_random_state():
        seed_all()
        subject = _Subject(penalty, meant, options, every, weight)
        like = torch.empty(sizes, device=device, dtype=dtype)
        return Report(name_of(penalty), list(subject.rows(like)))


@final
class _Critic(nn.Module):
    """D(x) = k <a, max(0, x)^2> / 2, with the gradient k a max(0, x).

    The gradient is zero at negative points, so that a sample of -1 has a zero gradient.
    """

    def __init__(self, a: Tensor, k: float) -> None:
        super().__init__()
        self.a, self.k = nn.Parameter(a), k
        self.calls: list[Tensor] = []  # the argument x of each call

    def forward(self, x: Tensor) -> Tensor:
        # the plain tensor below torch.func's wrappers, if the penalty differentiates by torch.func
        self.calls.append(unwrap(x).detach().clone())
        above = (x + x.abs()) / 2  # not relu: its derivative 0 hides a NaN from the gradient of a
        return self.k * (self.a * above.square()).flatten(-self.a.dim()).sum(-1, keepdim=True) / 2

    def gradient(self, value: Tensor) -> Vector:
        """The gradient of a penalty by the parameter a; zero if the value has no graph."""
        return maps.grad([value], [self.a], retain_graph=True)


class _Evaluation(NamedTuple):
    """A call of the user's penalty."""

    value: Tensor  # the result; for a lazy penalty the mean over `every` calls
    drawn: list[Tensor]  # the points at which each call evaluated the critic, [N, *shape]
    given: list[Tensor]  # the samples that were passed
    detached: list[DetachedGradient]  # places that detached a gradient during the call


class _Subject(NamedTuple):
    """The user's penalty, and the penalty of hoglib that it should equal."""

    penalty: Callable[..., Any]  # the user's
    kind: Kind  # hoglib's
    options: dict[str, Any]  # of hoglib's penalty
    every: int  # calls per penalty
    weight: float  # the factor w in the user's penalty

    def rows(self, like: Tensor) -> Rows:
        """The checks in order, with samples of the shape, dtype and device of `like`.

        A later check runs only if the earlier checks that it relies on passed.
        """
        generator = Generator().manual_seed(0)

        def uniform(*sizes: int) -> Tensor:
            drawn = torch.rand(*sizes, generator=generator, dtype=torch.float64, device="cpu")
            return drawn.add(0.1).to(like)

        def samples() -> Tensor:  # norms, and so slopes, lie on both sides of the target
            norms = torch.linspace(0.3, 2.0, N, device="cpu").to(like)
            return F.normalize(uniform(N, like.numel())).mul(norms[:, None]).reshape(N, *like.shape)

        critic = _Critic(uniform(*like.shape) + 0.5, self.options.get("target") or 1.0)
        real, fake, at_zero = samples(), 3 * samples(), samples()
        at_zero[0] = -1.0
        # raises for an unknown option, before the penalty can
        self._right(critic, _Evaluation(real, [real], [real] * len(self.kind.sets), []))
        try:
            called = self._call(critic, real, fake)
            called_at_zero = self._call(critic, at_zero, at_zero.clone())
        except Exception as error:
            called_as = CALLED.format(", ".join(self.kind.sets), tuple(real.shape))
            yield Row("runs", "fail", None, f"it raises {format_error(error)}. {called_as}")
            return
        right = self._right(critic, called)
        text = f"it returned {float(called.value):.4g}, where w mean_n {self.kind.term} "
        text += f"is {float(right):.4g} at the points that the critic was called with. {TERM}"
        if not called.drawn:
            text = f"the critic that was passed was called with fewer than {N} points. "
            text += "Penalise each sample; if the penalty is lazy, pass every=."
        same_as = partial(agreement, tolerance=TOLERANCES[like.dtype], floor=1e-3)
        row = same_as("value", (text, [called.value], [right]))
        yield row
        if self.kind.draw and called.drawn:
            yield finding("points", _wrong_points(self.kind, called.drawn[0], real, fake))
        gradient = critic.gradient(called.value)
        if not gradient[0].any():
            inner = any(one.how == INNER for one in called.detached)
            fix = CREATE if inner else STAY if called.detached else FROZEN
            text = f"no gradient reaches the critic's parameters{_places(called.detached)}. {fix}"
            yield Row(REACHES, "fail", None, text)
            return
        yield Row(REACHES, "pass")
        if row.status == "pass":
            text = f"it is not the derivative of the value{_places(called.detached)}: a part of it "
            text += f"is lost, and training follows another penalty. {STAY}"
            yield same_as("parameter gradient", (text, gradient, critic.gradient(right)))
            value, gradient = called_at_zero.value, critic.gradient(called_at_zero.value)
            text = text if (value + gradient[0]).isfinite().all() else SAFE
            own = critic.gradient(self._right(critic, called_at_zero))
            yield same_as("zero gradient", (text, gradient, own))

    def _call(self, critic: _Critic, real: Tensor, fake: Tensor) -> _Evaluation:
        """Call the user's penalty `every` times, as often as a lazy penalty needs for one value."""
        given = [real if name == "real" else fake for name in self.kind.sets]
        values: list[Tensor] = []
        drawn: list[Tensor] = []
        with DetachmentWatch() as watch:
            for _ in range(self.every):
                critic.requires_grad_()  # the call before may have frozen it
                critic.calls = []
                returned = self.penalty(critic, *given)
                value = returned if isinstance(returned, Tensor) else torch.tensor(float(returned))
                values.append(value.reshape(()).to(real))
                # the critic may be called with real and fake for a loss, too
                others = [x for x in critic.calls if not (same(x, real) or same(x, fake))]
                rows = [x.reshape(-1, *real.shape[1:]) for x in others or critic.calls]
                whole = torch.cat(rows) if rows else real[:0]
                drawn += [whole[:N]] if len(whole) >= N else []
        # requires_grad_() looks like an operation without a derivative
        detached = [d for d in watch.detached if d.place and "requires_grad_" not in d.how]
        return _Evaluation(torch.stack(values).mean(), drawn, given, detached)

    def _right(self, critic: _Critic, called: _Evaluation) -> Tensor:
        """The value of hoglib's penalty at the drawn points, or at the given ones if kind draws none.

        Infinite if fewer points were drawn than there are samples.
        """
        critic.requires_grad_()
        # pass a drawn point as real and as fake: interpolation between equal points returns the point
        points = [[x, x] for x in called.drawn] if self.kind.draw else [called.given]
        if not points:
            return called.value.new_full((), torch.inf)
        own = self.kind.at_points or self.kind.function
        values = [own(critic, *sets, **self.options) for sets in points]
        return self.weight * torch.stack(values).mean()


def _wrong_points(kind: Kind, x: Tensor, real: Tensor, fake: Tensor) -> str:
    """How points differ from e_n real_n + (1 - e_n) fake_n, or from real and noise; "" if not."""
    tiny = 1e-6 if real.dtype == torch.float64 else 1e-3
    x, real, fake = x.flatten(1), real.flatten(1), fake.flatten(1)
    line, noise = real - fake, x - real
    # the coefficient of the nearest point on the line through fake and real
    e = ((x - fake) * line).sum(1) / line.square().sum(1)
    apart = bool(((x - torch.lerp(fake, real, e.unsqueeze(1))).abs() > tiny).any())
    fixed, low, high = float(e.max() - e.min()) < tiny, float(e.min()), float(e.max())
    interpolation = (
        (apart, "the points are not between the real and the fake sample of the same row"),
        (fixed, f"there is one coefficient for the whole batch, {low:.3g}"),
        (low < -tiny or high > 1 + tiny, f"coefficients are between {low:.2g} and {high:.2g}"),
    )
    shared, level = ((noise - n).abs().max() < tiny for n in (noise[:1], noise[:, :1]))
    added = (
        (shared, "there is no noise, or one for all samples"),
        (level, "the noise is one number per sample"),
        (not apart, "the points are between real and fake, as in WGAN-GP"),
    )
    ways = interpolation if kind.draw == "between" else added
    return next((f"{how}. {DRAW[kind.draw]}" for wrong, how in ways if wrong), "")


def _places(detached: Sequence[DetachedGradient]) -> str:
    """The places that detach, as the end of a sentence; "" if none is known."""
    places = list(dict.fromkeys(map(str, detached)))
    return f"; the gradient is detached by {'; by '.join(places[:3])}" if places else ""
