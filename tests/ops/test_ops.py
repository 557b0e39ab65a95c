"""Each op against finite differences and against its composite, in every mode of differentiation."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import hoglib as hog
from hoglib.testing import assert_double_differentiable

ACTS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": partial(F.softplus, threshold=40),
    "swish": lambda z: z * torch.sigmoid(z),
}


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def composite(act):
    return lambda *inputs: ACTS[act](F.linear(*inputs))


def swish(x, beta=1.0):
    return x * torch.sigmoid(beta * x)


# name: op, composite of plain torch operations, inputs
CASES = {
    "tanh": (hog.ops.tanh, torch.tanh, lambda: [rand(3, 2)]),
    "tanh of a scalar": (hog.ops.tanh, torch.tanh, lambda: [rand()]),
    "sigmoid": (hog.ops.sigmoid, torch.sigmoid, lambda: [rand(3, 2)]),
    "swish": (hog.ops.swish, swish, lambda: [rand(3, 2), rand(3, 2)]),
    "swish, one beta": (hog.ops.swish, swish, lambda: [rand(3, 2), rand()]),
    "swish, beta a channel": (hog.ops.swish, swish, lambda: [rand(3, 2), rand(2)]),
    "swish, beta larger than x": (hog.ops.swish, swish, lambda: [rand(2), rand(3, 1)]),
    "linear": (hog.ops.linear, F.linear, lambda: [rand(3, 2), rand(4, 2), rand(4)]),
    "linear without bias": (hog.ops.linear, F.linear, lambda: [rand(3, 2), rand(4, 2)]),
    "linear of a vector": (hog.ops.linear, F.linear, lambda: [rand(2), rand(3, 2), rand(3)]),
    "linear, leading dims": (
        hog.ops.linear,
        F.linear,
        lambda: [rand(2, 2, 2), rand(3, 2), rand(3)],
    ),
    **{
        f"linear_act {act}": (
            partial(hog.ops.linear_act, act=act),
            composite(act),
            lambda: [rand(3, 2), rand(4, 2), rand(4)],
        )
        for act in ACTS
    },
    "linear_act swish, leading dims": (
        partial(hog.ops.linear_act, act="swish"),
        composite("swish"),
        lambda: [rand(2, 2, 2), rand(3, 2)],
    ),
}
cases = pytest.mark.parametrize("case", CASES)

ROUTES = {
    "torch.func.hessian": hessian,
    "reverse-over-reverse": lambda f, n: jacrev(jacrev(f, n), n),
    "reverse-over-forward": lambda f, n: jacrev(jacfwd(f, n), n),
    "forward-over-forward": lambda f, n: jacfwd(jacfwd(f, n), n),
}


@cases
def test_first_and_second_derivatives(case):
    op, reference, inputs = CASES[case]
    assert_double_differentiable(op, inputs(), reference=reference)


@pytest.mark.parametrize("route", ROUTES)
@cases
def test_hessian_equals_that_of_the_composite(case, route):
    op, reference, inputs = CASES[case]
    values = inputs()
    every = tuple(range(len(values)))
    ours, theirs = (
        ROUTES[route](lambda *t, g=g: g(*t).tanh().sum(), every)(*values) for g in (op, reference)
    )
    assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    largest = max(block.abs().max() for row in theirs for block in row)
    assert largest > 1e-3  # the comparison is not of zeros


@cases
def test_third_order(case):
    op, reference, inputs = CASES[case]
    values = inputs()
    every = tuple(range(len(values)))

    def third(g):
        return jacrev(jacrev(jacrev(lambda *t: g(*t).tanh().sum(), every), every), every)(*values)

    assert_close(third(op), third(reference), rtol=1e-8, atol=1e-9)


@cases
def test_vmap_over_each_subset_of_inputs(case):
    op, reference, inputs = CASES[case]
    values = inputs()
    batched = [torch.stack([v, 2 * v, -v], dim=-1) for v in values]
    for subset in range(1, 2 ** len(values)):
        dims = tuple(-1 if subset >> i & 1 else None for i in range(len(values)))
        given = [b if d is not None else v for b, v, d in zip(batched, values, dims, strict=True)]
        assert_close(vmap(op, dims)(*given), vmap(reference, dims)(*given))


@cases
def test_vmap_of_vmap_of_hessian(case):
    op, reference, inputs = CASES[case]
    values = [
        v.expand(2, 3, *v.shape) * torch.linspace(0.5, 1, 6).reshape(2, 3, *[1] * v.dim())
        for v in inputs()
    ]
    every = tuple(range(len(values)))
    ours, theirs = (
        vmap(vmap(hessian(lambda *t, g=g: g(*t).tanh().sum(), every)))(*values)
        for g in (op, reference)
    )
    assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@cases
def test_each_subset_of_inputs_needing_grad(case):
    op, reference, inputs = CASES[case]
    values = inputs()
    for subset in range(1, 2 ** len(values)):
        grads = []
        for g in (op, reference):
            given = [v.clone().requires_grad_(bool(subset >> i & 1)) for i, v in enumerate(values)]
            g(*given).square().sum().backward()
            grads.append([v.grad for v in given])
        for ours, theirs in zip(*grads, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert_close(ours, theirs)


LAYOUTS = {
    "transposed": lambda v: v.mT.contiguous().mT if v.dim() > 1 else v,
    "strided": lambda v: v.repeat_interleave(2, -1)[..., ::2] if v.dim() else v,
    "stride 0": lambda v: v.select(0, 0).expand(v.shape) if v.dim() else v,
    "no rows": lambda v: v,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@cases
def test_layouts(case, layout):
    op, reference, inputs = CASES[case]
    values = [LAYOUTS[layout](v) for v in inputs()]
    if layout == "no rows":
        rows = values[0].shape[0] if values[0].dim() > 1 else None
        values = [v[:0] if v.dim() > 1 and v.shape[0] == rows else v for v in values]
    results = []
    for g in (op, reference):
        given = [v.detach().requires_grad_() for v in values]
        value = g(*given)
        grads = torch.autograd.grad(value.square().sum(), given, create_graph=True)
        second = torch.autograd.grad(
            sum(x.square().sum() for x in grads), given, allow_unused=True, materialize_grads=True
        )
        results.append((value, grads, second))
    assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@cases
def test_narrow_dtypes(case, dtype):
    op, reference, inputs = CASES[case]
    values = inputs()
    narrow = [v.to(dtype).requires_grad_() for v in values]
    wide = [v.to(dtype).double().requires_grad_() for v in values]
    op(*narrow).square().sum().backward()
    reference(*wide).square().sum().backward()
    tolerance = hog.testing.TOLERANCES[dtype]
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad.dtype == dtype
        scale = theirs.grad.abs().max()
        assert_close(ours.grad.double() / scale, theirs.grad / scale, **tolerance._asdict())


@pytest.mark.parametrize("case", [c for c in CASES if "relu" not in c and "softplus" not in c])
def test_complex(case):
    op, reference, inputs = CASES[case]
    values = [torch.complex(v, v.flip(0) / 3 if v.dim() else v) / 2 for v in inputs()]
    results = []
    for g in (op, reference):
        given = [v.clone().requires_grad_() for v in values]
        grads = torch.autograd.grad(g(*given).abs().square().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(x.abs().square().sum() for x in grads), given)
        results.append((grads, second))
    assert_close(*results, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "case", ["tanh", "sigmoid", "swish", "linear", "linear_act tanh", "linear_act swish"]
)
def test_compiles_as_one_graph(case):
    op, reference, inputs = CASES[case]
    values = [v.requires_grad_() for v in inputs()]
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(*values).square().sum(), values)
    expected = torch.autograd.grad(reference(*values).square().sum(), values)
    assert_close(grads, expected)


@cases
def test_nothing_received_is_changed(case):
    op, _, inputs = CASES[case]
    values = [v.requires_grad_() for v in inputs()]
    before = [v.detach().clone() for v in values]
    output = op(*values)
    grad = torch.ones_like(output)
    torch.autograd.grad(output, values, grad, create_graph=True)
    assert_close([v.detach() for v in values], before, rtol=0, atol=0)
    assert_close(grad, torch.ones_like(grad), rtol=0, atol=0)


def test_the_derivatives_come_from_our_functions():
    x = rand(2).requires_grad_()
    for op in (hog.ops.tanh, hog.ops.sigmoid, hog.ops.swish):
        assert isinstance(op(x).grad_fn, torch.autograd.function.BackwardCFunction)
    layer = hog.ops.linear_act(x, rand(3, 2))
    assert type(layer.grad_fn).__name__ == "LinearTanhBackward"


def test_extremes_have_finite_derivatives():
    huge = torch.tensor([-1e30, -1e4, -0.0, 0.0, 1e4, 1e30])
    for op in (hog.ops.tanh, hog.ops.sigmoid, hog.ops.swish):
        x = huge.clone().requires_grad_()
        (grad,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert grad.isfinite().all()
        assert second.isfinite().all()


@pytest.mark.parametrize(
    ("x", "beta", "dtype"), [(1000.0, 100.0, torch.float16), (3e38, 2.0, torch.float32)]
)
def test_swish_where_its_argument_overflows(x, beta, dtype):
    given = torch.tensor([x, -x], dtype=dtype, requires_grad=True)
    hog.ops.swish(given, beta).sum().backward()
    assert_close(given.grad, torch.tensor([1, 0], dtype=dtype))


def test_beta_as_a_number_is_a_constant():
    x = rand(3).requires_grad_()
    assert_close(hog.ops.swish(x, 2.0), swish(x, 2.0))
    assert len(hog.ops.swish(x, 2.0).grad_fn.next_functions) == 1


@pytest.mark.parametrize("act", [None, *ACTS])
def test_autocast_as_torch_does_it(act):
    x, w, b = (torch.randn(*s, requires_grad=True) for s in [(3, 2), (4, 2), (4,)])
    op = hog.ops.linear if act is None else partial(hog.ops.linear_act, act=act)
    reference = F.linear if act is None else composite(act)
    grads = []
    for g in (op, reference):
        with torch.autocast("cpu", torch.bfloat16):
            y = g(x, w, b)
        assert y.dtype == torch.bfloat16
        (gw,) = torch.autograd.grad(y.float().square().sum(), w, create_graph=True)
        grads.append(torch.autograd.grad(gw.square().sum(), [x, w]))
    scale = max(g.abs().max() for g in grads[1])
    assert_close([g / scale for g in grads[0]], [g / scale for g in grads[1]], rtol=0.03, atol=0.03)


def test_autocast_leaves_float64_and_complex_alone():
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float64, torch.complex64):
            x, w = torch.ones(1, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype)
            assert hog.ops.linear(x, w).dtype == F.linear(x, w).dtype == dtype


SIZES = {
    "no features": (2, 4, 0),
    "vector without entries": (0,),
    "no outputs": (2, 4, 3),
    "no rows": (0, 4, 3),
}


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("op", [hog.ops.linear, hog.ops.linear_act])
def test_zero_sizes(op, shape):
    x = torch.zeros(SIZES[shape], requires_grad=True)
    w = torch.zeros(0 if shape == "no outputs" else 5, x.shape[-1], requires_grad=True)
    grads = torch.autograd.grad(op(x, w).sum(), [x, w])
    assert [g.shape for g in grads] == [x.shape, w.shape]


def test_shapes_without_data():
    assert hog.nn.LinearAct(3, 4, device="meta")(torch.zeros(2, 3, device="meta")).shape == (2, 4)


def test_relu_with_frozen_weights_can_be_differentiated_twice_as_in_torch():
    x = rand(5, 3).requires_grad_()
    (g,) = torch.autograd.grad(
        hog.ops.linear_act(x, rand(4, 3), act="relu").sum(), x, create_graph=True
    )
    assert torch.autograd.grad(g.square().sum(), x)[0].abs().sum() == 0


ERRORS = {
    "integer x": (lambda: hog.ops.tanh(torch.arange(3)), TypeError, r"x: .*int64.*x\.float\(\)"),
    "a list": (lambda: hog.ops.sigmoid([1.0]), TypeError, "expected a torch.Tensor, got list"),
    "integer beta": (
        lambda: hog.ops.swish(rand(2), torch.ones(2, dtype=torch.int)), TypeError, r"beta\.float\(\)",
    ),
    "transposed weight": (
        lambda: hog.ops.linear(rand(3, 2), rand(2, 4)), ValueError, r"weight \(2, 4\).*weight\.mT",
    ),
    "bias of another size": (
        lambda: hog.ops.linear_act(rand(3, 2), rand(4, 2), rand(3)), ValueError, r"bias \(3,\)",
    ),
    "x without dimensions": (
        lambda: hog.ops.linear(rand(), rand(4, 2)), ValueError, r"x \(\)",
    ),
    "unknown act": (
        lambda: hog.ops.linear_act(rand(3, 2), rand(4, 2), act="gelu"), ValueError, "one of relu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error):
    call, kind, message = ERRORS[error]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.gpu
@cases
def test_on_a_gpu(case):
    op, reference, inputs = CASES[case]
    values = [v.cuda() for v in inputs()]
    every = tuple(range(len(values)))
    ours, theirs = (
        hessian(lambda *t, g=g: g(*t).tanh().sum(), every)(*values) for g in (op, reference)
    )
    assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_jvp_inside_jvp_of_a_function():
    # torch gives zero for the second derivative of a custom Function here
    x = torch.tensor(0.7, dtype=torch.float64)
    one = torch.ones_like(x)
    first = lambda t: jvp(hog.ops.tanh, (t,), (one,))[1]  # noqa: E731
    y = torch.tanh(x)
    assert_close(jvp(first, (x,), (one,))[1], -2 * y * (1 - y * y))
