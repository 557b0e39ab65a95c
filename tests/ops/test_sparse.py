"""sparse_mm: torch's values and gradients, and every derivative above."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import hoglib as hog
from tests.ops.checks import REPLACES, same
from tests.rows import rows

F64 = torch.float64
pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


def matrix(dtype: torch.dtype = F64) -> Tensor:
    places = torch.tensor([[0, 1, 1, 3], [2, 0, 1, 1]])
    values = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=dtype)
    return torch.sparse_coo_tensor(places, values, (4, 3), check_invariants=False)


def dense(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(0))


@rows("columns", [0, 1, 5])
def test_values_and_gradients_are_those_of_torch(columns: int) -> None:
    ours, theirs = (partial(f, matrix()) for f in (hog.ops.sparse_mm, torch.sparse.mm))
    same(ours, theirs, dense(3, columns))


def test_under_vmap_and_autocast() -> None:
    a, batch = matrix(torch.float32), dense(2, 3, 5).float()
    ours = torch.func.vmap(lambda x: hog.ops.sparse_mm(a, x))(batch)
    assert_close(ours, torch.stack([torch.sparse.mm(a, x) for x in batch]))
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(
            hog.ops.sparse_mm(a, batch[0]), torch.sparse.mm(a, batch[0]), rtol=3e-2, atol=1e-2
        )


def test_entries_of_one_place_add_up() -> None:
    a = torch.sparse_coo_tensor(
        [[0, 0], [1, 1]], [1.0, 2.0], (1, 2), dtype=F64, check_invariants=False
    )
    assert hog.ops.sparse_mm(a, torch.eye(2, dtype=F64)).tolist() == [[0.0, 3.0]]


def test_half_precision_is_summed_in_float32() -> None:
    ones = torch.ones(1, 1024, dtype=torch.bfloat16).to_sparse_coo()
    assert hog.ops.sparse_mm(ones, torch.ones(1024, 1, dtype=torch.bfloat16)).item() == 1024


def test_what_is_left_to_torch() -> None:
    a, x = matrix(), dense(3, 2)
    product = hog.ops.sparse_mm(a, dense(3, 2).to_sparse_coo())
    assert product.is_sparse
    leaf = a.clone().requires_grad_()
    (grad,) = torch.autograd.grad(hog.ops.sparse_mm(leaf, x).sum(), leaf)
    assert grad.is_sparse
    for wrong in (x.T, x.float()):
        with pytest.raises(RuntimeError) as theirs:
            torch.sparse.mm(a, wrong)
        with pytest.raises(type(theirs.value)):
            hog.ops.sparse_mm(a, wrong)
    assert REPLACES[torch.sparse.mm] is hog.ops.sparse_mm
