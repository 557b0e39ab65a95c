"""Every public operator, and every product of a matrix, beside dense matrices by differences and definitions."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import hoglib as hog
from hoglib.curvature import LinearOperator
from tests.conformance.operators import EVERYWHERE, check_operator, check_product, like
from tests.curvature.kronecker_by_definition import dense_kfac
from tests.curvature.problems import (
    CRITERIA,
    MODELS,
    columns,
    dense_ggn,
    dense_hessian,
    expected_matrix,
    flat,
    nested_to_matrix,
    problem,
    relative,
)
from tests.curvature.test_operators import DATA
from tests.long_tail import all_but
from tests.unchanged import unchanged

SOME = ["layers of hoglib", "LayerNorm", "tied and frozen"]
REMAT = [{"remat": ["0"]}, {"remat": ["0"], "compile": "eager"}]


def empirical_fisher(loss, params, batch):
    rows = []
    for i in range(len(batch[1])):
        one = tuple(part[i : i + 1] for part in batch)
        rows.append(flat(torch.autograd.grad(loss(params, one), list(params.values()))))
    return torch.stack(rows).T @ torch.stack(rows) / len(rows)


def kronecker_factors(loss, params, batch, corrected=False):
    layers = [(f"{name}.weight", f"{name}.bias", [name], 1) for name in ("0", "2")]
    n = len(batch[1])
    return dense_kfac(loss, params, batch, layers, "exact", "expand", corrected) / n


def low_rank(loss, params, data, **options):
    G = hog.GGNOperator(loss, params, data, **options)
    return G.low_rank(G.shape[0], generator=torch.Generator().manual_seed(0))


def gram(loss, params, batch):
    with torch.no_grad():
        J = columns(lambda p: loss.outputs(p, batch), params)
    return J.T @ J


def of_jacobian(loss, params, data, **options):
    J = hog.JacobianOperator(loss, params, data, **options)
    return J.T @ J


def given(loss, params, data):
    return LinearOperator.from_matvec(lambda v: hog.hvp(loss, params, v, data)[1], params)


class Row(NamedTuple):
    """An operator of (loss, params, data, **options), its matrix of (loss, params, batch), and models; whether
    it is one of products, which take data in any form and are recomputed and compiled."""

    make: Callable[..., LinearOperator]
    dense: Callable[..., torch.Tensor]
    models: Any = (*MODELS,)
    of_products: bool = True


OPERATORS = {
    "Hessian": Row(hog.HessianOperator, dense_hessian),
    "Hessian, forward": Row(partial(hog.HessianOperator, mode="forward-over-reverse"), dense_hessian, SOME),
    "Gauss-Newton": Row(hog.GGNOperator, dense_ggn),
    "Gauss-Newton, reverse": Row(partial(hog.GGNOperator, mode="reverse"), dense_ggn, SOME),
    "Fisher": Row(hog.FisherOperator, dense_ggn, SOME),
    "empirical Fisher": Row(partial(hog.FisherOperator, kind="empirical"), empirical_fisher, SOME),
    "Kronecker factors": Row(hog.KFACOperator, kronecker_factors, ["ReLU"], False),
    "corrected factors": Row(
        partial(hog.KFACOperator, eigenvalue_corrected=True), partial(kronecker_factors, corrected=True), ["ReLU"], False
    ),
    "low rank": Row(low_rank, dense_ggn, ["ReLU"], False),
    "Gram matrix of a Jacobian": Row(of_jacobian, gram, of_products=False),
    "a given function": Row(given, dense_hessian, SOME, False),
    "all of a Hessian": Row(lambda *g: hog.HessianOperator(*g).submatrix("*"), dense_hessian, ["ReLU"], False),
}  # fmt: skip
WITHOUT_A_LOSS = low_rank, of_jacobian, given, OPERATORS["all of a Hessian"].make


def cases(rows):
    return [
        pytest.param(row, name, id=f"{key}-{name}")
        for key, row in rows.items()
        for name in row.models
    ]


@pytest.mark.parametrize(("row", "name"), cases(OPERATORS))
def test_an_operator(row, name):
    loss, params, batch = problem(name)
    variants = [{}]
    if row.of_products and name == "LayerNorm":
        variants += [*({"data": form} for form in DATA), *REMAT, {"compile": "eager"}]

    def make(data="one batch", **options):
        given, how = DATA[data](batch)
        return row.make(loss, params, given, **how, **options)

    gradient = None
    if row.make not in WITHOUT_A_LOSS:
        value = loss(params, batch)
        gradient = value.detach(), flat(torch.autograd.grad(value, list(params.values())))
    dense = expected_matrix(row.dense, name)
    check_operator(make, dense, loss.model, gradient=gradient, variants=variants)


def test_every_public_operator_has_a_row():
    loss, params, batch = problem("ReLU")
    made = {type(row.make(loss, params, batch)) for row in OPERATORS.values()}
    public = {getattr(hog.curvature, name) for name in hog.curvature.__all__}
    operators = {x for x in public if isinstance(x, type) and issubclass(x, LinearOperator)}
    assert made >= operators - {LinearOperator}


GGN = ["auto", "forward", "reverse", "finite-differences"]
HVP = ["auto", "reverse-over-reverse", "forward-over-reverse", "finite-differences"]


class Product(NamedTuple):
    """hvp or one like it, its matrix of (loss, params, batch), modes, a criterion, models, and whether it can be
    differentiated."""

    product: Callable[..., Any]
    dense: Callable[..., torch.Tensor]
    modes: list[str] = GGN
    criterion: str = "cross entropy"
    models: Any = (*MODELS,)
    graphs: bool = True


PRODUCTS = {
    "hvp": Product(hog.hvp, dense_hessian, HVP),
    "ggn_vp": Product(hog.ggn_vp, dense_ggn),
    "ggn_vp, mean square": Product(hog.ggn_vp, dense_ggn, criterion="mean square", models=SOME),
    "ggn_vp, binary": Product(hog.ggn_vp, dense_ggn, criterion="binary cross entropy", models=SOME),
    "fisher_vp": Product(hog.fisher_vp, dense_ggn, models=SOME, graphs=False),
    "fisher_vp, empirical": Product(partial(hog.fisher_vp, kind="empirical"), empirical_fisher, models=SOME, graphs=False),
}  # fmt: skip


@pytest.mark.parametrize(("row", "name"), cases(PRODUCTS))
def test_a_product(row, name):
    variants = [{"mode": mode} for mode in row.modes]
    if name == "LayerNorm" and row.criterion == "cross entropy":
        variants += [*REMAT, {"compile": "eager"}]
    given, dense = problem(name, row.criterion), expected_matrix(row.dense, name, row.criterion)
    check_product(row.product, *given, dense, variants=variants, graphs=row.graphs and name in SOME)


@pytest.mark.parametrize(
    ("name", "criterion"),
    all_but(
        lambda name, criterion: name in SOME or criterion == "cross entropy",
        itertools.product(MODELS, CRITERIA),
    ),
)
def test_whole_matrices(name, criterion):
    loss, params, batch = problem(name, criterion)
    for matrix, oracle in ((hog.ggn, dense_ggn), (hog.hessian, dense_hessian)):
        for context in EVERYWHERE if name in SOME else EVERYWHERE[:1]:
            with unchanged(loss.model), context():
                M = nested_to_matrix(matrix(loss, params, tuple(map(torch.clone, batch))), params)
            assert relative(M, expected_matrix(oracle, name, criterion)) < 1e-7
            assert relative(M, M.T) < 1e-10
        assert matrix is hog.hessian or float(torch.linalg.eigvalsh(M)[0]) > -1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOME)
def test_on_a_gpu(name):
    """Products of models there, and operators, whose data come from the CPU."""
    loss, params, batch = problem(name)
    v, moved = like(params), tuple(part.cuda() for part in batch)
    loss.model.cuda()
    params, there = hog.trainable_params(loss.model), {n: x.cuda() for n, x in v.items()}
    for row in PRODUCTS.values():
        if row.criterion == "cross entropy":
            found = row.product(loss, params, there, moved)[1]
            expected = expected_matrix(row.dense, name) @ flat(v)
            assert relative(flat(found).cpu(), expected) < 1e-7
    for row in OPERATORS.values():
        for form in DATA if row.of_products else ():
            given, how = DATA[form](batch)
            found = row.make(loss, params, given, **how) @ there
            assert relative(flat(found).cpu(), expected_matrix(row.dense, name) @ flat(v)) < 1e-7
