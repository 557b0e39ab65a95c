"""The table of what torch lacks: the installed torch needs each row still, and its stand-in has it."""

import functools
import inspect
import json

import pytest
import torch
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import hoglib as hog
from hoglib._core.torch_api.torch_version import TORCH_VERSION, parse_version
from hoglib.cli.main import main
from hoglib.stand_ins import mode as stand_in_mode
from hoglib.stand_ins.table import STAND_INS
from tests.rows import rows
from tests.tensors import F64
from tests.tensors import randn as draw

X, Y, SQUARE = draw(2, 3), draw(4, 3, seed=1), draw(3, 3)
HEADS = draw(1, 1, 3, 4)
SPD = SQUARE @ SQUARE.T + torch.eye(3, dtype=F64)
WORDS, LABELS = torch.tensor([[0, 2], [1, 1]]), torch.tensor([0, 2])
SPARSE = X.to_sparse()
PLACES, VALUES = torch.tensor([[0, 1, 2], [1, 2, 0]]), draw(3)
LENGTHS = torch.tensor([1, 1])
NOUGHT = torch.zeros(3, dtype=F64)
FAR = torch.tensor([1e-200, 1e200, 1.0], dtype=F64)  # apart
IMAGE, GRID = draw(1, 1, 3, 3), 0.5 * draw(1, 2, 2, 2)


def recurrent(cls):
    """In float32, which is what oneDNN takes."""
    torch.manual_seed(0)
    layer = cls(3, 2)
    return lambda x: layer.to(x.device)(x.float())[0].to(x.dtype)


# name of the row -> calls of torch's own that show it, with inputs
def by_rows(x):
    """The operator that an exported program calls, of a function that closes over a tensor."""
    return torch.ops.higher_order.map_impl(lambda row: ((row * x[0]).sin(),), [x], ())[0].sum()


# fmt: off
SAMPLES = {
    "scaled_dot_product_attention": [(lambda x: F.scaled_dot_product_attention(x, x, x), HEADS)],
    "cdist, pdist, pairwise_distance": [(lambda x: torch.cdist(x, Y), X), (F.pdist, Y)],
    "embedding_bag": [(lambda w: F.embedding_bag(WORDS, w), Y)],
    "ctc_loss": [(lambda x: F.ctc_loss(x.log_softmax(-1)[:, None], torch.tensor([[1]]), (4,), (1,)), Y)],
    "segment_reduce": [(lambda x: torch.segment_reduce(x, "max", lengths=LENGTHS, axis=0), X)],
    "multi_margin_loss": [(lambda x: F.multi_margin_loss(x, LABELS), X), (lambda x: F.multilabel_margin_loss(x, torch.tensor([[0, -1, -1], [2, 1, -1]])), X)],
    "hardsigmoid": [(lambda x: F.hardsigmoid(x).square(), X)],
    "weight_norm": [(lambda v, g: torch._weight_norm(v, g, 0), (X, draw(2, 1)))],
    "layer_norm": [(lambda x: F.layer_norm(x, (3,)), X)],
    "batch_norm": [(lambda x: F.batch_norm(x, None, None, training=True), Y)],
    "instance_norm": [(lambda x: F.instance_norm(x), IMAGE)],
    "group_norm": [(lambda x: F.group_norm(x.contiguous(memory_format=torch.channels_last), 2), draw(2, 4, 2, 2))],
    "linalg.solve": [(torch.linalg.solve, (SQUARE, Y.T))],
    "det": [(torch.linalg.det, torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=F64))],
    "slogdet, logdet": [(torch.logdet, SPD), (lambda a: torch.linalg.slogdet(a)[1], SQUARE)],
    "cholesky_inverse": [(lambda a: torch.cholesky_inverse(a.tril()), SPD)],
    "mse_loss, huber_loss": [(lambda x: F.huber_loss(x, torch.zeros_like(x)), X)],
    "soft_margin_loss": [(lambda x: F.soft_margin_loss(x, torch.ones_like(X)), X)],
    "glu": [(F.glu, draw(2, 4))],
    "grid_sample": [(lambda x, g: F.grid_sample(x, g, align_corners=False), (IMAGE, GRID))],
    "scatter_reduce, index_reduce": [(lambda x: torch.ones(2, 3, dtype=F64).scatter_reduce(0, torch.zeros(2, 3, dtype=torch.long), x, "prod"), X)],
    "sparse.mm": [(lambda y: torch.sparse.mm(SPARSE, y), Y[:3])],
    "sparse_coo_tensor": [(lambda w: torch.sparse_coo_tensor(PLACES, w, (3, 3)).to_dense().square().sum(), VALUES)],
    "triangular_solve": [(lambda b, a: torch.triangular_solve(b, a)[0], (Y.T, SQUARE + 3 * torch.eye(3)))],
    "cond": [(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), X)],
    "scan, map, while_loop": [(by_rows, X)],
    "flex_attention": [(lambda x: flex_attention(x, x, x, lambda s, b, h, i, j: s * s + (i - j).abs()), HEADS)],
    "lstm": [(recurrent(torch.nn.LSTM), X.float())],
    "vector_norm, norm, abs, hypot": [(lambda x: x.norm() ** 2, NOUGHT), (lambda x: torch.linalg.vector_norm(x, dim=-1).square().sum(), NOUGHT[None]), (lambda x: torch.fft.fft(x).abs().square().sum(), NOUGHT), (lambda x: torch.hypot(x[0], x[1]) ** 2, NOUGHT), (lambda x: torch.dist(x, NOUGHT) ** 2, NOUGHT), (lambda x: x.std() ** 2, NOUGHT), (lambda x: torch.linalg.matrix_norm(x[None]) ** 2, NOUGHT)],
    "special.bessel_j0, modified_bessel_k0": [(lambda x: torch.special.bessel_j0(x) + x.sin(), X), (lambda x: torch.special.modified_bessel_k1(x.exp()).sin() + x, X)],
    "special.airy_ai, spherical_bessel_j0, hermite_polynomial_h": [(lambda x: x * torch.special.airy_ai(x), X), (lambda x: torch.special.chebyshev_polynomial_t(x, 3) * x, X)],
    "logaddexp, sinc, pow, polar, i1, mish, logit, vander": [(lambda x: torch.logaddexp(x, 2 * x - 800), NOUGHT), (torch.sinc, NOUGHT), (lambda x: (x[:, None] ** torch.arange(4)).sum(), NOUGHT), (lambda x: torch.polar(x, 2 * x + 1).real, NOUGHT), (F.mish, NOUGHT + 1e3), (lambda x: torch.logit(x, 0.1), NOUGHT)],
    "prod": [(lambda x: (x * FAR).prod(), VALUES), (lambda x: torch.prod((x * FAR)[None], 1, dtype=F64), VALUES)],
    "cumprod, householder_product, safe_softmax": [(lambda x: x.cumprod(0, dtype=F64), torch.tensor([2.0, 0.0, -1.5], dtype=F64)), (lambda x: x.cumprod(0), torch.tensor([2.0, 0.0, -1.5], dtype=F64)), (lambda x: torch.linalg.householder_product(x, draw(3)), draw(4, 3)), (lambda x: torch._safe_softmax(x + torch.tensor([0, -torch.inf])[:, None], -1), X)],
    "logcumsumexp": [(lambda x: F.pad(x, (0, 0, 1, 0), value=-torch.inf).logcumsumexp(0)[1:], X)],
    "eigh, svdvals": [(lambda x: torch.linalg.eigvalsh(torch.diag(x)).exp().sum(), torch.ones(3, dtype=F64)), (lambda x: torch.linalg.svdvals(torch.diag(x)).exp().sum(), torch.ones(3, dtype=F64))],
    "gru": [(recurrent(torch.nn.GRU), X.float())],
    "rnn_tanh": [(recurrent(torch.nn.RNN), X.float())],
    "rnn_relu": [(recurrent(lambda *sizes: torch.nn.RNN(*sizes, nonlinearity="relu")), X.float())],
}
if TORCH_VERSION >= (2, 13):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    SAMPLES["linear_cross_entropy"] = [(lambda x, w: F.linear_cross_entropy(x, w, LABELS, options=LinearCrossEntropyOptions()), (X, Y))]
# fmt: on

CASES = [
    pytest.param(row, fn, inputs, mode, id=f"{row.name} {i} {mode}",
                 marks=[pytest.mark.gpu] if row.device == "cuda" else [])
    for row in stand_in_mode.stand_in_table()
    for i, (fn, inputs) in enumerate(SAMPLES[row.name])
    # torch traces these operators in each evaluation, which takes long
    for mode in row.modes[: 1 if row.name == "scan, map, while_loop" else None]
]  # fmt: skip


def test_every_row_has_a_sample():
    assert {row.name for row in STAND_INS if row.since <= TORCH_VERSION} == set(SAMPLES)


def needs_a_graph(fn, inputs):
    """Whether forward mode over a backward depends on create_graph, which hvp leaves out."""
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)

    def gradient(create_graph, *x):
        y, pull = torch.func.vjp(fn, *x)
        return pull(torch.ones_like(y), retain_graph=True, create_graph=create_graph)

    with_graph, without = (
        torch.func.jvp(functools.partial(gradient, graph), inputs, tuple(x.cos() for x in inputs))[
            1
        ]
        for graph in (True, False)
    )
    return any(not torch.allclose(a, b) for a, b in zip(with_graph, without, strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(("row", "fn", "inputs", "mode"), CASES)
def test_torch_needs_it_still_and_the_stand_in_is_right(row, fn, inputs, mode):
    if row.device == "cuda":
        if not torch.backends.cudnn.is_available() and row.name != "lstm":
            pytest.skip("needs cuDNN, whose kernel has no second derivative")
        inputs = inputs.cuda()
    alone = hog.verify(fn, inputs, modes=mode)
    assert not alone.ok or needs_a_graph(fn, inputs), (
        f"torch {torch.__version__} no longer needs {row.name} in {mode}"
    )

    def replaced(*given):
        with hog.second_order():
            return fn(*given)

    if row.refuses:
        with pytest.raises(NotImplementedError, match=f"{row.name}: expected an operation with a"):
            replaced(*(x.clone().requires_grad_() for x in (inputs,)))
    else:
        assert hog.verify(replaced, inputs, modes=mode).ok


def step(carry, row, y):
    new = torch.tanh(carry["c"] + row[0] @ y.T @ y)
    return {"c": new}, (row[0] * carry["c"], row[1])


def by_scan(x, y, loops):
    if loops:
        carry, rows = {"c": x[0]}, []
        for i in reversed(range(len(x))):
            carry, row = step(carry, (x[i], 2 * x[i]), y)
            rows.append((row[0] * row[1]).sum())
        return carry["c"].sum() + sum(rows)
    own = lambda carry, row: step(carry, row, y)  # noqa: E731
    carry, rows = scan(own, {"c": x[0]}, (x, 2 * x), reverse=True)
    return carry["c"].sum() + (rows[0] * rows[1]).sum()


def by_map(x, y, loops):
    of_row = lambda row, w: (row * w).sin() + (row @ y.T).sum()  # noqa: E731
    w = 2 * x[0]
    return (torch.stack([of_row(row, w) for row in x]) if loops else map_rows(of_row, x, w)).sum()


def by_while_loop(x, y, loops):
    body = lambda i, z: (i + 1, torch.tanh(z @ y.T @ y))  # noqa: E731
    if loops:
        return functools.reduce(lambda z, i: body(i, z)[1], range(3), x).sum()
    return while_loop(lambda i, z: i < 3, body, (torch.tensor(0), x))[1].sum()


def by_branches(x, y, loops):
    """A loop in a branch in a loop, and a call that has a stand-in."""

    def normalized(row):
        return F.layer_norm(row, (3,), weight=y[0])

    def looped(row):
        return by_while_loop(row[None], y, loops).expand(3)

    if loops:
        return sum((normalized if row.sum() > 0 else looped)(row).sum() for row in x)
    return map_rows(lambda row: torch.cond(row.sum() > 0, normalized, looped, (row,)), x).sum()


LOOPS = {"scan": by_scan, "map": by_map, "while_loop": by_while_loop, "nested": by_branches}


@rows("name", LOOPS)
@rows("mode", ["reverse-over-reverse", "forward-over-reverse"])
def test_loops_of_control_flow_are_those_of_python(name, mode):
    points = {"x": X, "y": Y}
    found, expected = (
        hog.hvp(lambda p, loops=loops: LOOPS[name](p["x"], p["y"], loops) + p["y"].pow(3).sum(), points, points, mode=mode)
        for loops in (False, True)
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    assert expected[1]["y"].abs().min() > 0


# torch says so once a process, at the first sparse tensor
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_refused_call_is_named_with_its_module_and_runs_where_nothing_is_differentiated():
    class Graph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(VALUES.clone())

        def forward(self, x):
            return torch.sparse_coo_tensor(PLACES, self.weight, (3, 3)).to_dense() @ x

    model = Graph()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    for mode in ("reverse-over-reverse", "forward-over-reverse"):
        with pytest.raises(
            NotImplementedError, match=r"sparse_coo_tensor in Graph: .*index_select"
        ):
            hog.hvp(loss, params, params, (Y.T, Y.T), mode=mode)
    with hog.second_order(), torch.no_grad():
        model(Y.T)
    with hog.second_order():
        torch.sparse_coo_tensor(PLACES, VALUES, (3, 3))


def signature(function):
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


def test_a_stand_in_has_the_signature_of_the_python_function_that_it_replaces():
    pairs = [pair for row in STAND_INS for pair in row.replaces.items()]
    # Tensor.__pow__ is a wrapper of a builtin, which has none; loops are replaced as operators
    others = {torch.Tensor.__pow__, scan, map_rows, while_loop}
    compared = [(o, t) for t, o in pairs if inspect.isfunction(t) and t not in others]
    assert len(compared) > 12
    for ours, theirs in compared:
        assert signature(ours) == signature(theirs)


SIX, IMAGES, WEIGHT = draw(4, 3, 2), draw(1, 1, 3, 3), draw(3)
ATEN = torch.ops.aten
# an operator beneath a function -> a call of each with the same result
# fmt: off
OPERATORS = {
    "layer_norm.default": (lambda x: ATEN.layer_norm.default(x, [3], eps=1e-3), lambda x: F.layer_norm(x, (3,), eps=1e-3), X),
    "layer_norm": (lambda x: ATEN.layer_norm(x, [3]), lambda x: F.layer_norm(x, (3,)), X),
    "native_layer_norm": (lambda x: ATEN.native_layer_norm(x, [3], None, None, 1e-5)[0], lambda x: F.layer_norm(x, (3,)), X),
    "torch.native_batch_norm": (lambda x: torch.native_batch_norm(x, WEIGHT, WEIGHT, None, None, True, 0.1, 1e-5)[0], lambda x: F.batch_norm(x, None, None, WEIGHT, WEIGHT, True), SIX),
    "no_stats": (lambda x: ATEN._native_batch_norm_legit(x, None, None, True, 0.1, 1e-5)[0], lambda x: F.batch_norm(x, None, None, training=True), SIX),
    "legit": (lambda x: ATEN._native_batch_norm_legit.default(x, None, None, WEIGHT * 1, WEIGHT**2, True, 0.1, 1e-5)[0], lambda x: F.batch_norm(x, None, None, training=True), SIX),
    "functional": (lambda x: ATEN._native_batch_norm_legit_functional(x, None, None, WEIGHT, WEIGHT**2, True, 0.1, 1e-5)[0], lambda x: F.batch_norm(x, None, None, training=True), SIX),
    "with update": (lambda x: ATEN._batch_norm_with_update(x, None, None, WEIGHT * 1, WEIGHT**2, 0.1, 1e-5)[0], lambda x: F.batch_norm(x, None, None, training=True), SIX),
    "_cdist_forward": (lambda x: ATEN._cdist_forward(x, Y, 2.0, None), lambda x: torch.cdist(x, Y), X),
    "cdist": (lambda x: ATEN.cdist.default(x, Y, 2.0, 1), lambda x: torch.cdist(x, Y), X),
    "_pdist_forward": (ATEN._pdist_forward, F.pdist, Y),
    "mse_loss": (lambda x: ATEN.mse_loss(x, X + 1, 2), lambda x: F.mse_loss(x, X + 1, reduction="sum"), X),
    "a binding": (lambda x: torch._C._nn.huber_loss(x, 2 * X, 1, 0.5), lambda x: F.huber_loss(x, 2 * X, delta=0.5), X),
    "_linalg_det": (lambda a: ATEN._linalg_det(a)[0], torch.linalg.det, SQUARE),
    "_linalg_slogdet": (lambda a: ATEN._linalg_slogdet(a)[1], lambda a: torch.linalg.slogdet(a)[1], SQUARE),
    "_linalg_solve_ex": (lambda a: ATEN._linalg_solve_ex(a, Y.T)[0], lambda a: torch.linalg.solve(a, Y.T), SPD),
    "grid_sampler_2d": (lambda x: ATEN.grid_sampler_2d(x, GRID.reshape(1, 2, 2, 2), 0, 0, False), lambda x: F.grid_sample(x, GRID, align_corners=False), IMAGES),
    "scatter_reduce.two": (lambda x: ATEN.scatter_reduce.two(x, 0, torch.tensor([[0, 0, 1]]), x[:1] + 3, "prod"), lambda x: x.scatter_reduce(0, torch.tensor([[0, 0, 1]]), x[:1] + 3, "prod"), X),
    "attention": (lambda x: ATEN._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0], lambda x: F.scaled_dot_product_attention(x, x, x), HEADS),
    "glu": (ATEN.glu.default, F.glu, draw(2, 4)),
}
# fmt: on


@rows("name", OPERATORS)
def test_an_operator_runs_the_stand_in_of_the_function(name):
    operator, function, x = OPERATORS[name]
    scalar = lambda f: lambda x: (f(x).flatten() * (1 + torch.arange(f(x).numel()))).sin().sum()  # noqa: E731
    v = torch.ones_like(x)

    def found(f):
        yield from (
            hog.hvp(f, x, v, mode=mode)[1]
            for mode in ("reverse-over-reverse", "forward-over-reverse")
        )
        moved = x.clone().requires_grad_()
        yield torch.autograd.grad(hog.jvp(f, (moved,), (v,))[1], moved)[0]
        yield hog.jet(f, x, [v, None, None], mode="nested")[1][2]

    for ours, expected in zip(found(scalar(operator)), found(scalar(function)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_versions():
    assert parse_version("2.13.0+cpu") == (2, 13)
    assert parse_version("2.14.0a0+git1234") == (2, 14)
    row = STAND_INS[0]
    assert row.needed == row.modes == ("rr", "fr", "rf", "ff")
    assert row._replace(until={"rr": (2, 9), "ff": TORCH_VERSION}).needed == ("fr", "rf", "ff")
    for other in ({"until": dict.fromkeys(row.modes, (2, 9))}, {"since": (9, 0)}):
        assert not row._replace(**other).needed


# name of a row -> the first release of torch with right derivatives
MENDED = {"group_norm": (2, 14), "special.bessel_j0, modified_bessel_k0": (2, 15)}  # fmt: skip


@rows("name", MENDED)
def test_a_release_with_right_derivatives_keeps_its_own(name):
    (row,) = (row for row in STAND_INS if row.name == name)
    entered = name in {listed.name for listed, _ in stand_in_mode._table_rows().values()}
    assert entered == bool(row.needed) == (MENDED[name] > TORCH_VERSION)
    for fn, inputs in () if entered else SAMPLES[name]:
        assert all(hog.verify(fn, inputs, modes=mode).ok for mode in row.modes)


def test_env_lists_them(capsys):
    names = [row.name for row in stand_in_mode.stand_in_table()]
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in (*names, torch.__version__))
    assert main(["env", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)["stand_ins"]
    assert [row["name"] for row in known] == names
    assert all(row["lacks"] for row in known)
