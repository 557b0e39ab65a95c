"""A network of every smooth op at once, its Hessian against that of the references."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from hoglib._core.tolerances import TOLERANCES
from hoglib.testing.opinfo import CATALOGUE, OpInfo

TOLERANCE = TOLERANCES[torch.float64]._asdict()
STAND_INS = ("missing", "wrong")  # composites of torch's operations, whose tests are their own
SMOOTH = {
    info.name: info
    for info in CATALOGUE
    if info.smooth and not info.surrogate and info.theme not in STAND_INS
}


def network(pick: Callable[[OpInfo], Callable[..., Any]]) -> Callable[..., Tensor]:
    """f(params, x) -> a scalar, its ops by name from `pick`, and every smooth op among them."""
    op = {name: pick(entry) for name, entry in SMOOTH.items()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        h = op["linear_act"](x, params["w"], params["b"], act="tanh")
        h = op["swish"](op["linear"](h, params["v"], None), params["beta"])
        h = op["bias_add"](op["matmul"](h, params["v"]), params["b"], dim=-1)
        h = op["quadratic"](op["sigmoid"](h), params["a"], params["b"], 0.5)
        h = op["mul"](op["tanh"](h), op["sinh"](op["mul"](h, 0.3)))
        h = op["sinh, returning intermediates"](h) + op["exp"](op["mul"](op["square"](h), -1.0))
        h = op["power"](h + 2, 1.5)
        c = op["conv1d"](op["tanh"](h)[None], params["w"][..., None], params["b"])
        c = op["tanh"](op["conv2d"](c[None], params["v"][None, None], None, padding=1))
        c = op["tanh"](
            op["conv3d"](c[None], params["v"][None, None, None], None, padding=(0, 1, 1))
        )
        e = op["external"](op["cube by hand"](c))
        parts = [
            op["sum"](op["external, two inputs"](e + 1, params["beta"]), (0, 1, 2, 3, 4)),
            op["sum"](op["remat"](op["tanh"](h), params["w"] / 4), (0, 1)),
            op["softmax_cross_entropy"](h, torch.tensor([0, 2]), label_smoothing=0.1),
            op["logsumexp"](op["mean"](h, 0), 0),
            op["sum"](op["square"](h), (0, 1)),
        ]
        return sum(parts[1:], parts[0])

    return loss


@pytest.fixture
def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return 0.5 * torch.randn(shape, dtype=torch.float64, generator=generator)

    return {"w": normal(3, 2), "v": normal(3, 3), "b": normal(3), "a": normal(), "beta": normal(3)}


X = torch.tensor([[0.3, -1.0], [0.8, 0.1]], dtype=torch.float64)
ours, theirs = network(lambda info: info.op), network(lambda info: info.ref)


def entries(hessian: Any) -> Iterator[tuple[str, Tensor]]:
    for row, columns in hessian.items():
        for column, block in columns.items():
            yield f"{row}, {column}", block


def test_every_smooth_op_is_in_the_network(params: dict[str, Tensor]) -> None:
    used: set[str] = set()

    def note(info: OpInfo) -> Callable[..., Any]:
        def call(*inputs: Any, **options: Any) -> Any:
            used.add(info.name)
            return info.op(*inputs, **options)

        return call

    network(note)(params, X)
    assert used == set(SMOOTH)


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.hessian,
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
        lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    ],
    ids=["forward-over-reverse", "reverse-over-reverse", "reverse-over-forward"],
)
def test_hessian(params: dict[str, Tensor], transform: Callable[..., Any]) -> None:
    expected = dict(entries(torch.func.hessian(theirs)(params, X)))
    for name, block in entries(transform(ours)(params, X)):
        assert_close(block, expected[name], **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_hvp(params: dict[str, Tensor], mode: str) -> None:
    v = {name: torch.cos(p + 1) for name, p in params.items()}
    _, product = hog.hvp(ours, params, v, X, mode=mode)
    dense = torch.func.hessian(theirs)(params, X)
    for name, value in product.items():
        terms = [torch.tensordot(block, v[k], v[k].dim()) for k, block in dense[name].items()]
        assert_close(value, sum(terms[1:], terms[0]), **TOLERANCE)
