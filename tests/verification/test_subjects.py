"""What is verified rightly: inputs, modules and functions that take some care."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib.errors import UnsupportedError
from tests.functions import by_saved, saving_inputs
from tests.verification.faults import Frees
from tests.zoo.right import InSingle

draw = torch.Generator().manual_seed(0)
x = torch.randn(4, 3, generator=draw)
square = torch.randn(3, 3, generator=draw, dtype=torch.float64)
spd = square @ square.T + 3 * torch.eye(3)


def right(function, inputs, **options):
    report = hog.verify(function, inputs, **options)
    assert report.ok, report
    assert report.judged
    return report


class LogDet(Function):
    """By the lower triangle; the gradient as torch gives it, symmetric."""

    forward = saving_inputs(lambda a: 2 * torch.linalg.cholesky(a).diagonal().log().sum())

    backward = by_saved(lambda g, a: g * torch.linalg.inv(a))


def test_a_matrix_of_which_one_triangle_is_read():
    report = right(LogDet, spd)
    row = report["first derivative: other directions"]
    assert row.status == "skip"
    assert "reads one triangle only" in row.text
    right(torch.linalg.cholesky, spd)
    right(torch.linalg.eigvalsh, spd)
    hermitian = torch.complex(spd, square - square.T)
    right(torch.linalg.eigvalsh, hermitian)

    class Half(LogDet):
        backward = by_saved(lambda g, a: 0.5 * g * torch.linalg.inv(a))

    assert not hog.verify(Half, spd).ok


def test_a_symmetric_input_of_which_all_is_read_hides_nothing():
    class Product(Function):
        forward = saving_inputs(lambda a, w: a @ w)

        @staticmethod
        def backward(ctx, g):
            a, w = ctx.saved_tensors
            return g @ w, a.T @ g  # a transpose is missing

    assert not hog.verify(Product, (torch.eye(3), square)).ok


def test_a_function_that_takes_symmetric_matrices_only():
    class Checked(LogDet):
        @staticmethod
        def forward(ctx, a):
            if not torch.equal(a, a.T):
                raise ValueError("not symmetric")
            return LogDet.forward(ctx, a)

    right(Checked, spd)


def test_nothing_that_can_be_compared_is_not_right():
    def only_there(t):
        if not torch.equal(t, x.double()):
            raise ValueError("another point")
        return t**2

    report = hog.verify(only_there, x)
    assert report.ok
    assert not report.judged
    assert "NOT JUDGED" in str(report)
    assert "refuses points near" in str(report)
    with pytest.raises(hog.VerificationError, match="NOT JUDGED"):
        hog.testing.assert_double_differentiable(only_there, x)


class Sparse(Function):
    @staticmethod
    def forward(ctx, s, t):
        ctx.save_for_backward(s)
        return torch.sparse.mm(s, t)

    backward = by_saved(lambda g, s: (None, torch.sparse.mm(s.t(), g)))


def test_a_sparse_tensor_is_a_constant():
    right(Sparse, (torch.eye(4).to_sparse(), x))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_tensor_that_requires_grad_is_refused(layout):
    """Its gradient would be taken for none."""
    matrix = getattr(torch.eye(4, dtype=torch.float64), layout)().requires_grad_()
    with pytest.raises(UnsupportedError, match=r"got inputs\[0\] with torch.sparse"):
        hog.verify(Sparse, (matrix, x.detach().requires_grad_()))


class Dropped(Function):
    @staticmethod
    def forward(ctx, t, generator):
        ctx.mask = torch.rand(t.shape, generator=generator).to(t.dtype) > 0.5
        return t * ctx.mask

    backward = staticmethod(lambda ctx, g: (g * ctx.mask, None))


def test_a_generator_gives_the_same_numbers_each_time():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    right(Dropped, (x, generator))
    assert torch.equal(generator.get_state(), before)


class Recomputing(Function):
    """Keeps a module on ctx, and runs it again in backward, as checkpoints and solvers do."""

    @staticmethod
    def forward(ctx, module, t, *params):
        ctx.module = module
        ctx.save_for_backward(t, *params)
        return module(t)

    @staticmethod
    def backward(ctx, g):
        t, *params = ctx.saved_tensors
        with torch.enable_grad():
            y = ctx.module(t)
        wanted = [p for p in (t, *params) if p.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, g, create_graph=torch.is_grad_enabled()))
        return None, *(next(found) if p.requires_grad else None for p in (t, *params))


class Block(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.way = nn.Linear(3, 4), nn.Linear(4, 2), way

    def block(self, t):
        return torch.tanh(self.inner(t))

    def forward(self, t):
        if self.way == "checkpoint":
            return self.outer(checkpoint(self.block, t, use_reentrant=False))
        if self.way == "function":
            return self.outer(
                torch.tanh(Recomputing.apply(self.inner, t, *self.inner.parameters()))
            )
        return self.outer(self.block(t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["checkpoint", "function"])
def test_a_module_that_runs_again_in_backward(way, dtype):
    model = Block(way).to(dtype)
    before = dict(model.named_parameters())
    right(model, x.to(dtype))
    assert all(p is before[name] for name, p in model.named_parameters())


def test_a_module_that_differentiates_by_its_input():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def forward(self, positions):
            positions.requires_grad_(True)
            energy = torch.tanh(self.net(positions)).sum()
            return -torch.autograd.grad(energy, positions, create_graph=True)[0]

    right(Force(), x)
    assert not x.requires_grad


@pytest.mark.parametrize("given", [x, x.double()], ids=["in float32", "in float64"])
def test_maths_in_float32_is_right_and_told(given):
    row = right(InSingle, given)["dtype: float64"]
    assert row.status == "warn"
    assert "it computes in float32" in row.text


@pytest.mark.parametrize("given", [x, x.double()], ids=["in float32", "in float64"])
def test_a_table_in_float32_is_told_and_is_right(given):
    table = torch.linspace(0.1, 1.0, 3)
    report = right(lambda t: t.sin() * table, given)
    assert report["dtype: constants"].status == "warn"


def test_a_backward_that_needs_every_input_is_a_warning():
    class All(Function):
        forward = saving_inputs(lambda t, w: t.sin() * w)

        @staticmethod
        def backward(ctx, g):
            t, w = ctx.saved_tensors
            with torch.enable_grad():
                y = t.sin() * w
            return torch.autograd.grad(y, (t, w), g, create_graph=True)

    report = right(All, (x, x + 1))
    assert report["inputs: each subset"].status == "warn"
    assert "needs_input_grad" in report["inputs: each subset"].text


@pytest.mark.parametrize(
    "function", [torch.sort, torch.median, lambda t: t.topk(2)[0], lambda t: t.clamp(0, 0.5).relu()]
)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_ties_are_no_error(function, value):
    assert hog.verify(function, torch.full((5,), value)).ok


@pytest.mark.parametrize("seed", range(2))
def test_a_network_on_its_kinks_is_no_error(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3))
    assert hog.verify(net, torch.zeros(5, 4)).ok


@pytest.mark.parametrize("seed", range(2))
def test_fast_oscillations_are_no_error(seed):
    t = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    report = hog.verify(lambda t: torch.sin(1e6 * t), t)
    assert report.ok, report.failed
    assert not hog.verify(lambda t: torch.sin(1e3 * t) + (t - t.detach()), x).ok


def test_dropout_is_right_in_a_transposed_layout():
    report = right(lambda t: nn.functional.dropout(t.T, 0.5), x)
    assert report["vmap"].status == "skip"


def test_options_are_checked():
    for options in ({"eps": 0.0}, {"eps": float("nan")}, {"atol": -1.0}, {"nondet_tol": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            hog.verify(torch.sin, x, **options)
    for options in ({"eps": "a"}, {"rtol": "1"}, {"atol": torch.ones(())}):
        with pytest.raises(TypeError, match=next(iter(options))):
            hog.verify(torch.sin, x, **options)


def test_a_reference_that_leaves_torch_is_compared_by_value():
    report = right(torch.sin, x, reference=lambda t: torch.as_tensor(t.detach().numpy()).sin())
    assert report["reference: value"].status == "pass"
    assert "leaves torch" in report["reference: first derivative"].text


def test_a_function_that_frees_the_memory_of_its_argument():
    row = right(Frees, x)["in-place: inputs"]
    assert row.status == "warn"
    assert "frees the memory of `x`" in row.text


class Rounding(Function):
    """Rounds, with the gradient of tanh, which its class says."""

    surrogate = True

    forward = saving_inputs(lambda x: x.round())

    backward = by_saved(lambda g, x: g * (1 - x.tanh() ** 2))


class RoundingDetached(Rounding):
    backward = staticmethod(lambda ctx, g: Rounding.backward(ctx, g).detach())


class ClippedTwice(Function):
    surrogate = True

    forward = staticmethod(lambda ctx, x: (x.sign(), x.view_as(x)))
    backward = staticmethod(lambda ctx, a, b: (a + b).clamp(-0.01, 0.01))


@pytest.mark.parametrize("options", [{}, {"surrogate": True}])
def test_a_function_with_a_marked_surrogate_in_it(options):
    layer = nn.Linear(3, 3)
    report = right(lambda x: Rounding.apply(layer(x)).sin(), x, **options)
    assert "Rounding is marked" in report["first derivative: reverse"].text
    assert report["second derivative: of Rounding"].status == "pass"
    right(lambda x: ClippedTwice.apply(layer(x)), x, **options)  # though it is not linear
    report = hog.verify(lambda x: RoundingDetached.apply(layer(x)).sin(), x, **options)
    assert [row.name for row in report.failed] == ["second derivative: of RoundingDetached"]
