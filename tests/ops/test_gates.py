"""glu and the soft margin loss beside torch's own: values, gradients, dtypes, and the modes torch lacks."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

import hoglib as hog
from tests.ops.checks import same
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as draw

SIGNS = draw(3, 4, seed=1).sign()
# fmt: off
CALLS = {
    "glu": (hog.ops.glu, F.glu, {}),
    "glu along the first": (hog.ops.glu, F.glu, {"dim": 0}),
    "soft margin, mean": (hog.ops.soft_margin_loss, F.soft_margin_loss, {"target": SIGNS}),
    "soft margin, sum": (hog.ops.soft_margin_loss, F.soft_margin_loss, {"target": SIGNS, "reduction": "sum"}),
    "soft margin, each": (hog.ops.soft_margin_loss, F.soft_margin_loss, {"target": SIGNS, "reduction": "none"}),
    "soft margin, older words": (hog.ops.soft_margin_loss, F.soft_margin_loss, {"target": SIGNS, "size_average": False, "reduce": True}),
    "soft margin, any target": (hog.ops.soft_margin_loss, F.soft_margin_loss, {"target": draw(4, seed=2)}),
}
# fmt: on
# torch tells of the words that are older
pytestmark = pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")


@rows("scale", [1.0, 100.0])
@rows("name", CALLS)
def test_values_and_gradients_are_torchs(name, scale):
    ours, theirs, options = CALLS[name]
    x = scale * draw(4, 4)[: 4 if "glu" in name else 3]
    same(partial(ours, **options), partial(theirs, **options), x)


@rows("autocast", [False, True])
@rows("dtype", [F64, torch.float32, torch.float16, torch.bfloat16])
@rows("name", CALLS)
def test_dtypes_are_torchs(name, dtype, autocast):
    ours, theirs, options = CALLS[name]
    x = draw(4, 4)[: 4 if "glu" in name else 3].to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        a, b = ours(x, **options), theirs(x, **options)
    assert a.dtype == b.dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps)


def test_what_torch_refuses_is_refused():
    x = draw(3, 4)
    for target in (SIGNS.clone().requires_grad_(), draw(5)):
        for function in (hog.ops.soft_margin_loss, F.soft_margin_loss):
            with pytest.raises(RuntimeError):
                function(x, target)
    for function in (hog.ops.soft_margin_loss, F.soft_margin_loss):
        with pytest.raises(ValueError, match="foo"):
            function(x, SIGNS, reduction="foo")
    with pytest.raises(ValueError, match="even size"):
        hog.ops.glu(draw(3))
    with pytest.raises(TypeError, match="real"):
        hog.ops.glu(draw(4).cfloat())
