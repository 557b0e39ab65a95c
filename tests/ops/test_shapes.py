"""Dtypes of several operands, and targets under vmap, as torch has them."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from hoglib import ops
from hoglib._core.numerics.tolerances import TOLERANCES
from tests.ops.matrix import F64
from tests.ops.opinfo import references
from tests.rows import rows

ELEMENTWISE = {
    "mul": (2, ops.mul, torch.mul),
    "swish": (2, ops.swish, references.swish),
    "smooth_l1": (2, ops.smooth_l1, references.smooth_l1),
    "quadratic": (4, ops.quadratic, references.quadratic),
}


@rows("name", ELEMENTWISE)
@rows(
    "dtypes",
    list(itertools.product([torch.float32, F64, torch.bfloat16], repeat=2)),
    ids=lambda pair: " and ".join(str(dtype).removeprefix("torch.") for dtype in pair),
)
@rows(
    "batched",
    [(False, False), (True, True), (False, True), (True, False)],
    ids=["no vmap", "both mapped", "second mapped", "first mapped"],
)
@rows("shape", [(), (2,)], ids=["second without dimensions", "second a vector"])
def test_promotion_is_that_of_torch(
    name: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    batched: tuple[bool, bool],
    shape: tuple[int, ...],
) -> None:
    count, ours, theirs = ELEMENTWISE[name]
    x, p = torch.ones(2, dtype=dtypes[0]), torch.ones(shape, dtype=dtypes[1])
    dims = tuple(0 if b else None for b in batched)
    inputs = [t.expand(3, *t.shape) if b else t for t, b in zip((x, p), batched, strict=True)]
    inputs, dims = inputs + [1.0] * (count - 2), dims + (None,) * (count - 2)
    if not any(batched):
        assert ours(*inputs).dtype == theirs(*inputs).dtype
        return
    mapped = [torch.func.vmap(f, dims)(*inputs) for f in (ours, theirs)]
    assert mapped[0].dtype == theirs(x, p, *inputs[2:]).dtype
    places = (0, 1)
    grads = torch.func.vmap(torch.func.grad(lambda *v: ours(*v).sum(), places), dims)(*inputs)
    assert [g.dtype for g in grads] == list(dtypes)


def test_vmap_over_targets() -> None:
    logits, targets = torch.randn(4, 3, 5, dtype=F64), torch.randint(5, (4, 3))

    def losses(f: Callable[..., Tensor]) -> Any:
        return torch.func.vmap(torch.func.hessian(f), (0, 0))(logits, targets)

    assert_close(
        losses(ops.softmax_cross_entropy), losses(F.cross_entropy), **TOLERANCES[F64]._asdict()
    )
