"""All operations of torch's own list, against nested derivatives."""

import sys
import types
import unittest

import pytest
import torch
from torch.utils import _pytree as pytree

import hoglib as hog

# Those that are refused by name, and then nested with the whole function.
REFUSED = {
    "sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse",  # sparse layouts
    "normal", "normal.number_mean", "nn.functional.rrelu",  # draw random numbers
    "_native_batch_norm_legit", "_batch_norm_with_update",  # write the running statistics
    "linalg.eig", "linalg.eigvals",  # eigenvectors have no fixed phase
    "linalg.eigh", "linalg.eigvalsh",  # of matrices of which one triangle is read
    "linalg.lstsq", "linalg.lstsq.grad_oriented", "as_strided_scatter",
}  # fmt: skip
# Torch's own derivative is not that of the values: the statistics of norms, repeated indices, and
# a triangle that is not read.
OF_TORCH = {
    "native_layer_norm", "native_group_norm", "native_batch_norm", "cholesky_solve",
    "nn.functional.max_unpool1d", "nn.functional.max_unpool2d", "nn.functional.max_unpool3d",
    "masked.logaddexp", "logcumsumexp",
}  # fmt: skip
# A sample that is no tensor of its own; a norm at zero, where it has no second derivative.
OTHERS = {"as_strided.partial_views", "linalg.norm.subgradients_at_zero"}


def operations():
    # torch imports this package for its TestCase only
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def outcome(op, sample):
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [
        i for i, x in enumerate(leaves)
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64 and x.requires_grad and x.numel()
    ]  # fmt: skip
    if not places:
        return None
    primals = tuple(leaves[i].detach().clone() for i in places)

    def func(*xs):
        own = list(leaves)
        for i, x in zip(places, xs, strict=True):
            own[i] = x
        first, args, kwargs = pytree.tree_unflatten(own, structure)
        y = sample.output_process_fn_grad(op(first, *args, **kwargs))
        found = [y for y in pytree.tree_leaves(y) if isinstance(y, torch.Tensor)]
        return [y for y in found if y.is_floating_point() or y.is_complex()]

    series = tuple([torch.randn_like(x) for _ in range(3)] for x in primals)
    try:
        found = hog.jet(func, primals, series, mode="taylor")[1]
    except hog.errors.UnsupportedError:
        return "refused"
    except hog.errors.NoSecondDerivative:
        return None
    expected = hog.jet(func, primals, series, mode="nested")[1]
    for part, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        a, b = (y.to(torch.complex128) for y in (part, other))
        scale = 1 + b.abs().nan_to_num().amax() if b.numel() else 1
        if not torch.allclose(a / scale, b / scale, rtol=0, atol=1e-8, equal_nan=True):
            return "differs"
    return "right"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_every_operation_of_torch_is_right_or_refused_by_name():
    refused, differ, right = set(), set(), 0
    for op in operations():
        name = f"{op.name}.{op.variant_test_name}".strip(".")
        if torch.float64 not in op.supported_dtypes("cpu") or not op.supports_autograd:
            continue
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))[:60]
        found = set()
        for sample in samples[:: max(1, len(samples) // 3)]:
            try:
                found.add(outcome(op, sample))
            except RuntimeError:
                assert name in OTHERS, name
        refused |= {name} if "refused" in found else set()
        differ |= {name} if "differs" in found else set()
        right += "right" in found and not {"refused", "differs"} & found
    assert refused <= REFUSED
    assert differ <= OF_TORCH | OTHERS
    assert right > 500
