"""Right Functions of many kinds: none fails, no derivative is doubted, and no entry point warns of one."""

import warnings

import pytest
import torch

import hoglib as hog
from hoglib._core import pytree
from hoglib.verification.entry_points import examined_functions
from tests.zoo.right import RIGHT


@pytest.mark.parametrize("one", RIGHT, ids=[one.name for one in RIGHT])
def test_it_is_right(one):
    torch.manual_seed(0)
    report = hog.verify(one.function, one.inputs(), **one.options)
    doubts = [row for row in report.warnings if " derivative: " in row.name or row.name == "finite"]
    assert not report.failed, report
    assert not doubts, report
    assert report.judged


@pytest.mark.parametrize("one", RIGHT, ids=[one.name for one in RIGHT])
def test_no_entry_point_warns_of_it(one):
    torch.manual_seed(0)
    leaves, structure = pytree.flatten(one.inputs())
    asked = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
    leaves = [
        x.detach().contiguous().requires_grad_() if pytree.is_float(x) and not asked else x
        for x in leaves
    ]
    apply = one.function.apply if isinstance(one.function, type) else one.function
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with examined_functions("hvp"):
            outputs = pytree.leaves(apply(*pytree.unflatten(leaves, structure)))
            live = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
            by = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            torch.autograd.grad(
                live, by, list(map(torch.ones_like, live)), create_graph=True, allow_unused=True
            )
    assert [str(w.message) for w in found] == []
