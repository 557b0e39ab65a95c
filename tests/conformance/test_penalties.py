"""Every public penalty: of each kind of critic, beside differences."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from hoglib import penalties
from tests.conformance.penalties import check_penalty, jacobians
from tests.long_tail import all_but
from tests.penalties.critics import CRITICS, draw, generator

VARIANTS = [{"compile": "eager"}, {"remat": ["0"]}, {"remat": ["0"], "compile": "eager"}]
TERMS = [{"micro_batch": 3}, {"micro_batch": 3, "compile": "eager"}]


class Row(NamedTuple):
    """call(critic, real, fake, *args, **options); whether its terms are those of samples, with any fake
    (True), where fake is real ("alike") or not (False); its terms by another formula, oracle(critic, real,
    fake); whether it can be differentiated again."""

    call: Callable[..., Any]
    terms: bool | str = True
    oracle: Callable[..., Any] | None = None
    further: bool = True


def norms(f, x):
    return jacobians(f, x).norm(dim=(1, 2))


def halves(f, x):
    return norms(f, x).square() / 2


OF_CRITICS = {
    "wgan_gp": Row(
        lambda c, x, y, *a, **o: penalties.wgan_gp(c, x, y, *a, generator=generator(), **o),
        "alike", lambda f, x, y: (norms(f, x) - 1).square(),
    ),
    "wgan_gp one-sided": Row(
        lambda c, x, y, *a, **o: penalties.wgan_gp(c, x, y, *a, target=0.05, one_sided=True, generator=generator(), **o),
        "alike", lambda f, x, y: (norms(f, x) - 0.05).relu().square(),
    ),
    "zero_centred": Row(
        lambda c, x, y, *a, **o: penalties.zero_centred(c, x, y, *a, generator=generator(), **o),
        "alike", lambda f, x, y: norms(f, x).square(),
    ),
    "r1": Row(lambda c, x, y, *a, **o: penalties.r1(c, x, *a, **o), oracle=lambda f, x, y: halves(f, x)),
    "r2": Row(lambda c, x, y, *a, **o: penalties.r2(c, y, *a, **o), oracle=lambda f, x, y: halves(f, y)),
    "r1_r2": Row(penalties.r1_r2, oracle=lambda f, x, y: halves(f, x) + halves(f, y)),
    "dragan": Row(lambda c, x, y, *a, **o: penalties.dragan(c, x, *a, generator=generator(), **o), False),
    "lipschitz": Row(
        lambda c, x, y, *a, **o: penalties.lipschitz(c, x, *a, bound=0.05, **o),
        oracle=lambda f, x, y: (norms(f, x) - 0.05).relu().square(),
    ),
    "input_gradient": Row(
        lambda c, x, y, *a, **o: penalties.input_gradient(c, x, *a, **o), oracle=lambda f, x, y: halves(f, x)
    ),
}  # fmt: skip
# Formulas of one critic that are those of another kind at other points, or its half
SIMILAR = ("wgan_gp one-sided", "r1", "r2")
SIMILAR_TO_SAMPLES = (*SIMILAR, "zero_centred", "input_gradient")


@pytest.mark.parametrize(
    ("name", "kind"),
    all_but(
        lambda name, kind: (
            kind not in {"rows": (), "images": SIMILAR}.get(name, SIMILAR_TO_SAMPLES)
        ),
        itertools.product(CRITICS, OF_CRITICS),
    ),
)
def test_a_penalty_of_a_critic(name, kind):
    make, real, fake, args, options = CRITICS[name]
    row, plain = OF_CRITICS[kind], name == "rows"
    of_samples = TERMS if plain or kind == "r1_r2" else TERMS[:1]
    check_penalty(
        row.call, make, real, real if row.terms == "alike" else fake, *args, **options,
        terms=bool(row.terms) and name != "graphs",
        variants=[{}, *(of_samples if name != "graphs" else []), *(VARIANTS if plain else [])], further=plain,
        oracle=row.oracle if name in ("rows", "images") else None,
    )  # fmt: skip


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def by_class(f):
    return lambda x: F.cross_entropy(f(x), torch.ones(len(x), dtype=int), reduction="none")


def squares_of_forces(f, x, y, **options):
    return penalties.forces(lambda x: f(x).square().sum(1), x, **options)[1].square().mean()


def of_parameters(model_and_params, x, y, **options):
    model, params = model_and_params
    mean_square = lambda p, x: functional_call(model, p, x).square().mean()  # noqa: E731
    return penalties.parameter_gradient(mean_square, params, x, **options)


def largest(f, x, y):
    return (torch.linalg.matrix_norm(jacobians(f, x), 2) - 0.1).relu().square()


OF_FUNCTIONS = {
    "jacobian": Row(lambda f, x, y, **o: penalties.jacobian(f, x, generator=generator(), **o), False),
    "jacobian by two": Row(
        lambda f, x, y, **o: penalties.jacobian(f, x, num_projections=2, **o),
        oracle=lambda f, x, y: halves(f, x),
    ),
    "jacobian, exact": Row(
        lambda f, x, y, **o: penalties.jacobian(f, x, num_projections=None, **o),
        oracle=lambda f, x, y: halves(f, x),
    ),
    "sobolev": Row(
        lambda f, x, y, **o: penalties.sobolev(f, x, y, **o),
        oracle=lambda f, x, y: (jacobians(f, x) - y).square().sum((1, 2)),
    ),
    "lipschitz": Row(
        lambda f, x, y, **o: penalties.lipschitz(f, x, bound=0.1, num_iterations=30, generator=generator(), **o),
        False, largest, further=False,  # the power iteration is held fixed
    ),
    "lipschitz, exact": Row(
        lambda f, x, y, **o: penalties.lipschitz(f, x, bound=0.1, num_iterations=None, **o), oracle=largest
    ),
    "input_gradient": Row(
        lambda f, x, y, **o: penalties.input_gradient(by_class(f), x, **o),
        oracle=lambda f, x, y: halves(by_class(f), x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_FUNCTIONS)
def test_a_penalty_of_a_function(kind):
    row, x, derivatives = OF_FUNCTIONS[kind], draw(5, 3), draw(5, 2, 3, seed=7)
    variants = [{}, *TERMS, *VARIANTS]
    check_penalty(
        row.call, smooth, x, derivatives, terms=row.terms, variants=variants, further=row.further,
        oracle=row.oracle,
    )  # fmt: skip


def test_forces():
    check_penalty(squares_of_forces, smooth, draw(5, 3), (), terms=False, variants=[{}, *VARIANTS])


@pytest.mark.parametrize("squared", [False, True])
def test_the_gradient_by_the_parameters(squared):
    check_penalty(
        of_parameters, smooth, draw(5, 3), (), squared=squared, critic=lambda *own: own,
        terms=False, variants=[{}, *VARIANTS],
    )  # fmt: skip


def test_every_public_penalty_is_checked():
    named = {kind.split()[0].rstrip(",") for kind in (*OF_CRITICS, *OF_FUNCTIONS)}
    public = {name for name in penalties.__all__ if inspect.isfunction(getattr(penalties, name))}
    assert named | {"forces", "parameter_gradient"} == public - {"check"}
