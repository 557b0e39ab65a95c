"""What type checkers infer for calls of hoglib, and mistakes that they report. mypy and pyright read
this file in `make lint`: a type that differs is an error, and so is an ignore of an error that they do
not find."""

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import hoglib as hog
from hoglib.curvature.algebra.estimates import Estimate
from hoglib.curvature.algebra.linear_operator import LinearOperator, RectangularOperator
from hoglib.curvature.algebra.linear_systems import Solution

Params = dict[str, Tensor]


def score(x: Tensor) -> Tensor:
    return x.square().sum(1)


def quadratic(p: Any, x: Tensor) -> Tensor:
    return (p["w"] @ x).square().sum()


def products_have_the_type_of_the_vector(x: Tensor, params: Params) -> None:
    assert_type(hog.hvp(quadratic, params, params, x), tuple[Tensor, Params])
    assert_type(hog.ggn_vp(quadratic, params, params, x), tuple[Tensor, Params])
    assert_type(hog.jvp(score, (x,), (x,)), tuple[Tensor, Tensor])
    H = hog.HessianOperator(quadratic, params, x)
    assert_type(H @ x, Tensor)
    assert_type(H @ params, Params)
    assert_type(H @ H, RectangularOperator)
    assert_type(2 * H + H, LinearOperator)
    assert_type(H.solve(params, damping=1.0), Params)
    assert_type(H.solve(x, return_info=True), tuple[Tensor, Solution])


def estimates_are_tensors(params: Params, x: Tensor) -> None:
    H = hog.GGNOperator(quadratic, params, x)
    assert_type(H.trace(method="xtrace"), Tensor)
    assert_type(H.trace(return_error=True), Estimate)
    assert_type(H.diagonal(), Tensor)
    assert_type(H.diagonal(return_error=True), Estimate)
    H.trace(method="exact")  # type: ignore[call-overload]


def derivatives_have_the_structure_of_their_point(x: Tensor, params: Params) -> None:
    assert_type(hog.hessian(torch.sum, x), Tensor)
    assert_type(hog.hessian(quadratic, params, x), dict[str, dict[str, Tensor]])
    assert_type(hog.laplacian(score, x), tuple[Tensor, Tensor])
    assert_type(hog.laplacian(score, x, return_gradient=True), tuple[Tensor, Tensor, Tensor])
    assert_type(hog.penalties.forces(score, x).energy, Tensor)


def penalties_are_tensors(x: Tensor) -> None:
    assert_type(hog.penalties.wgan_gp(score, x, x), Tensor)
    assert_type(hog.penalties.GradientPenalty("r1")(score, x), Tensor)
    hog.penalties.wgan_gp(score, x)  # type: ignore[call-arg]
    hog.penalties.r1(score, x, micro_batches=2)  # type: ignore[call-arg]


def adapted_parameters_are_a_dict(model: nn.Module, x: Tensor) -> None:
    maml = hog.meta.MAML(model, nn.functional.mse_loss)
    assert_type(maml.adapt((x, x)), Params)
    assert_type(maml.loss([((x, x), (x, x))]), Tensor)


def attributes_and_options_that_do_not_exist(x: Tensor, params: Params) -> None:
    H = hog.HessianOperator(quadratic, params, x, microbatch=2)  # type: ignore[call-arg]
    H.todense()  # type: ignore[attr-defined]
    H.microbatch  # type: ignore[attr-defined]  # noqa: B018
    hog.hvp(quadratic, params, params, x, creategraph=True)  # type: ignore[call-arg]
