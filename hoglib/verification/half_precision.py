"""Derivatives of what computes in half precision: their means against differences over long steps.

    F(c + h v) - F(c - h v) = int_{-h}^{h} J(c + s v) v ds,    F the values, or the gradient

holds for any h, so that h need not be small, and the rounding of F, of size eps |F|, is divided by a
long step. The integral is estimated by one random point in each of a few intervals, which has no bias,
also across a kink. Around several centres c that lie close together, but many units of rounding apart,
the rounding errors differ and a fault stays what it is: the mean over the centres is compared with what
their spread allows. So the noise is measured, and not assumed from the dtype.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hoglib._core.element_differences import TensorMap, element_scales, random_like
from hoglib.verification import call as calls
from hoglib.verification.comparison import Discrepancy, Target

CENTRES = 16
AROUND = 0.04  # how far the centres are apart, relative to the elements
INTERVALS = 4
HALF_LENGTHS = (0.25, 0.06)  # h; the shorter one where the map is not defined at the ends
DRAWS = 3  # directions and covectors of an input and an output
SIGMAS = 6.0  # standard errors of the mean that are taken for noise
BIAS = 4.0  # units of rounding: a covector is rounded to the same number at each centre
CONCLUSIVE = 0.4  # noise of more than this share of the number hides it
DROWNED = "the noise of {dtype} exceeds the derivative"

Covectors = Sequence[tuple[int, Tensor]]  # with the output that each belongs to
Derivative = Callable[[TensorMap, list[Tensor], int, Tensor, Covectors], list[float]]


def compared(at: Target, key: str, dtype: torch.dtype, random: torch.Generator) -> Discrepancy:
    """<w, J v> along directions v of each input, for covectors w of each output.

    Args:
        at: The map, and the point; its slopes are not used.
        key: The mode of the derivative: reverse ("r") or forward ("f", or "ff" by torch.func) first.
        dtype: What it computes in.
        random: Of the directions.
    """
    found = Discrepancy()
    eps, short = torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")
    derivative = _in_reverse if key[0] == "r" else _in_forward(key)
    concluded, rows = set(), set()
    try:
        values = [y.detach() for y in at.map(*at.x)]
        for j in range(len(at.x)):
            for _ in range(DRAWS):
                v = random_like(at.x[j], random) * element_scales(at.x[j])
                covectors = [(i, random_like(y, random)) for i, y in enumerate(values) if y.numel()]
                ends = _integrals(at, j, v, covectors, derivative, random)
                if ends is None:
                    found.problem = found.problem or "it is not defined around the inputs"
                    continue
                for (i, w), got, expected, sizes in zip(covectors, *ends, strict=True):
                    if _note(found, at, i, j, w, got, expected, sizes, eps):
                        concluded.add(j)
                        rows.add(i)
                    else:
                        found.problem = found.problem or DROWNED.format(dtype=short)
    except Exception as error:
        text = f"it raised {type(error).__name__}: {error}".rstrip()
        return Discrepancy(error=float("inf"), wrong=text, raised=error)
    found.unknown = set(range(len(at.x))) - concluded
    found.blank = {row for i, row in enumerate(at.rows) if i not in rows and values[i].numel()}
    return found


def _in_reverse(
    f: TensorMap, x: list[Tensor], j: int, v: Tensor, covectors: Covectors
) -> list[float]:
    return [float((grads[j] * v).sum()) for grads in calls.vjps(f, x, covectors)]


def _in_forward(key: str) -> Derivative:
    def derivative(
        f: TensorMap, x: list[Tensor], j: int, v: Tensor, covectors: Covectors
    ) -> list[float]:
        tangents = calls.jvp(f, x, j, v, by_torch_func=key == "ff")
        return [float((w * tangents[i]).sum()) for i, w in covectors]

    return derivative


def _note(
    found: Discrepancy, at: Target, i: int, j: int, w: Tensor, got: Tensor, expected: Tensor,
    sizes: Tensor, eps: float,
) -> bool:  # fmt: skip
    """Count the means over the centres; whether something is concluded from them."""
    off = got - expected
    mean, error = abs(float(off.mean())), float(off.std()) / len(off) ** 0.5
    one, other = float(got.mean()), float(expected.mean())
    number = max(abs(one), abs(other))
    size = max(float(sizes.mean()), number)
    allowed = SIGMAS * error + BIAS * eps * size
    wrong = not mean <= allowed
    if not wrong and SIGMAS * error > CONCLUSIVE * size:
        return False
    where = ", along random directions"
    found.note(at, i, j, where, wrong, mean / size if size else 0.0, one, other)
    return True


def _integrals(
    at: Target, j: int, v: Tensor, covectors: Covectors,
    derivative: Derivative, random: torch.Generator,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:  # fmt: skip
    """For each covector, by centre: the integral of <w, J v> by the derivative, and the difference of
    <w, F> at the ends of the line, both divided by its length; and the size of a sum of its terms with
    random signs. None where the map is not defined."""
    state = random.get_state()
    for h in HALF_LENGTHS:
        random.set_state(state)
        try:
            lines = list(_lines(at, j, v, covectors, derivative, random, h))
        except Exception:
            if h == HALF_LENGTHS[-1]:
                raise
            continue
        # centre, covector, (got, expected, size)
        numbers = torch.tensor(lines, dtype=torch.float64)
        if bool(numbers[..., 1:].isfinite().all()):
            got, expected, sizes = (list(part.unbind(1)) for part in numbers.unbind(-1))
            return got, expected, sizes
    return None


def _lines(
    at: Target, j: int, v: Tensor, covectors: Covectors,
    derivative: Derivative, random: torch.Generator, h: float,
) -> Iterator[list[tuple[float, float, float]]]:  # fmt: skip
    for _ in range(CENTRES):
        centre = [y + AROUND * element_scales(y) * random_like(y, random) for y in at.x]

        def point(s: float, centre: list[Tensor] = centre) -> list[Tensor]:
            return [*centre[:j], centre[j] + s * v, *centre[j + 1 :]]

        above, below = at.map(*point(h)), at.map(*point(-h))
        shares = torch.rand(INTERVALS, generator=random, dtype=torch.float64)
        total = [0.0] * len(covectors)
        for k, share in enumerate(shares.tolist()):
            s = h * (2 * (k + share) / INTERVALS - 1)
            parts = derivative(at.map, point(s), j, v, covectors)
            total = [a + b / INTERVALS for a, b in zip(total, parts, strict=True)]
        row = []
        for (i, w), got in zip(covectors, total, strict=True):
            terms = w * (above[i].detach() - below[i].detach()) / (2 * h)
            row.append((got, float(terms.sum()), float(terms.norm())))
        yield row
