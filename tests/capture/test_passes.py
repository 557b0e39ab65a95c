"""A captured graph has no node that is not needed, and computes the same to the bit."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import hoglib as hog
from hoglib.capture.api import trace_graph
from hoglib.capture.passes import merge_sums
from tests.capture.models import draw

WEIGHT = draw(3)


def written(x):
    y = torch.zeros(3, dtype=x.dtype)
    a = y + 1
    y.add_(x)
    return a, y + 1


# a function, and how many operations its graph has
GRAPHS = {
    "what nothing uses goes": (lambda x: (x.exp(), x * 2)[1], 1),
    "what is computed twice is computed once": (lambda x: (x.sin() + 1, x.sin() + 1), 2),
    "numbers of another kind are other numbers": (lambda x: (x * 2, x * 2.0, x * True), 3),
    "views that come back": (lambda x: x[None].transpose(0, 1).t()[0:1].squeeze(0).unsqueeze(0).squeeze(0).sin(), None),
    "detached": (lambda x: x.detach().view_as(x).sin(), 1),
    "random numbers are drawn each": (lambda x: (torch.rand(3), torch.rand(3)), 2),
    "random numbers that nothing uses are drawn": (lambda x: (torch.rand(3), x * 2)[1], 2),
    "what is written to is not what it was": (written, None),
    "a weight that is used twice": (lambda x: (x * WEIGHT, WEIGHT * 2, x * WEIGHT), 2),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "count"), GRAPHS.values(), ids=GRAPHS)
def test_a_graph_is_small(fn, count):
    fast = hog.compile(fn, backend="eager")
    for seed in range(2):
        x = draw(3, seed=seed)
        torch.manual_seed(seed)
        ours = fast(x), torch.rand(2)
        torch.manual_seed(seed)
        assert_close(ours, (fn(x), torch.rand(2)), rtol=0, atol=0)
    assert count is None or fast.signatures[0].nodes == count
    assert fast.signatures[0].nodes == trace_graph(fn, draw(3))[0].nodes


def test_a_view_of_a_batch_of_one_has_the_layout_of_the_trace():
    """As in attention over the pixels of an image."""

    def fn(x):
        return F.group_norm(x.transpose(1, 2).view(1, 8, 2, 2), 2).square().mean((2, 3)).sin()

    x = draw(1, 4, 8)
    assert_close(hog.compile(fn, backend="eager")(x), fn(x))


@pytest.mark.parametrize(("rows", "products"), [(2, 1), (20, 2)])  # of many rows it does not pay
def test_a_sum_of_products_of_few_rows_is_one_product(rows, products):
    def fn(a, b, c, d, x):
        return (x + a.t() @ b) + (d.t() @ c).t()

    given = [draw(rows, n, seed=i) for i, n in enumerate((30, 25, 30, 25))] + [draw(30, 25)]
    graph = make_fx(fn, tracing_mode="fake")(*given)
    merge_sums(graph)
    graph.recompile()
    assert graph.code.count("aten.mm.default") == products
    assert_close(graph(*given), fn(*given))
