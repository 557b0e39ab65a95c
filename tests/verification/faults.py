"""Functions of a tensor [N, 3] with a fault that changes second derivatives without an error, and right
ones that look alike. Each entry point has to tell the first, and to be silent about the others."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Function

import hoglib as hog
from tests import functions
from tests.functions import by_saved, made, saving_inputs
from tests.zoo.cuts import SineProduct as Product
from tests.zoo.right import (
    ComplexSquare,
    CubeRoot,
    HermitianEigen,
    Reversal,
    SquareOfSymmetric,
    Transcription,
)

LABELS = torch.tensor([0, 2, 1, 1])  # of up to four samples
WEIGHT = nn.Parameter(torch.linspace(-1.0, 1.0, 9, dtype=torch.float64).reshape(3, 3))


class SavesExp(Function):
    """y = e^x - 1: what is saved is no output."""

    @staticmethod
    def forward(ctx, x):
        e = x.exp()
        ctx.save_for_backward(e)
        return e - 1

    backward = by_saved(lambda g, e: g * e)


class SavesExpCompiled(SavesExp):
    pass


class Frees(Function):
    """y = e^x, as a reversible block: the memory of x is free until backward computes it from y."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        x.untyped_storage().resize_(0)
        return y

    backward = by_saved(lambda g, y: g * y)


class FreesAndDetaches(Frees):
    backward = by_saved(lambda g, y: g * y.detach())


class LogLikelihood(Function):
    """-log softmax(x) at the labels, which need no gradient; the probabilities are saved."""

    @staticmethod
    def forward(ctx, x, labels):
        p = torch.softmax(x, 1)
        ctx.save_for_backward(p, labels)
        return -p.gather(1, labels[:, None]).log()

    @staticmethod
    def backward(ctx, g):
        p, labels = ctx.saved_tensors
        return g * (p - nn.functional.one_hot(labels, p.shape[1])), None


class LogLikelihoodAgain(LogLikelihood):
    """Right: the probabilities are computed again."""

    forward = saving_inputs(lambda x, labels: -torch.log_softmax(x, 1).gather(1, labels[:, None]))

    @staticmethod
    def backward(ctx, g):
        x, labels = ctx.saved_tensors
        return g * (torch.softmax(x, 1) - nn.functional.one_hot(labels, x.shape[1])), None


class ComplexCube(Function):
    """w = z^3, with z^2 from forward."""

    @staticmethod
    def forward(ctx, z):
        ctx.square = z * z
        return z**3

    backward = staticmethod(lambda ctx, g: 3 * g * ctx.square.conj())


class PartData(Product):
    backward = by_saved(lambda g, x: g * (x.sin() + x.data * x.cos()))


class AllDetached(Product):
    backward = by_saved(lambda g, x: g * (x.sin() + x * x.cos()).detach())


class RunAgain(PartData):
    """To be used under remat."""


class PartNumPy(Product):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (torch.from_numpy(np.sin(x.detach().numpy())) + x * x.cos())


CosineCut = made("CosineCut", lambda x: x.cos(), lambda g, x: -g * x.sin().detach())


class PartNested(Product):
    """The cosine in backward is a Function whose own first derivative is cut off from its input."""

    backward = by_saved(lambda g, x: g * (x.sin() + x * CosineCut.apply(x.detach())))


class Accumulates(Function):
    """y = x W, with the gradient of W added to W.grad in backward."""

    forward = saving_inputs(lambda x: x @ WEIGHT)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            grad = x.mT @ g
            WEIGHT.grad = grad if WEIGHT.grad is None else WEIGHT.grad + grad
        return g @ WEIGHT.mT.detach()


class WithoutGraph(Product):
    """The gradient is written into memory, which a backward with a graph leaves at zero."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        result = torch.zeros_like(x)
        if not torch.is_grad_enabled():
            result += g * (x.sin() + x * x.cos())
        return result


class WrongFactor(Product):
    """Wrong at first order already."""

    backward = by_saved(lambda g, x: g * (x.sin() + 2 * x * x.cos()))


class GapsSaved(HermitianEigen):
    """Eigenvectors up to a phase, with the gaps of the eigenvalues from forward."""

    @staticmethod
    def forward(ctx, a):
        w, v = HermitianEigen.forward(ctx, a)
        gaps = HermitianEigen.gaps(w)
        ctx.save_for_backward(v, gaps)
        return w, v

    backward = by_saved(lambda gw, gv, v, gaps: HermitianEigen.gradient(v, gaps, gw, gv))


class Packs(Product):
    """The derivative is right, and the second one for contiguous inputs only: of others a copy is saved."""

    @staticmethod
    def forward(ctx, x):
        packed = x.contiguous()
        ctx.save_for_backward(packed)
        return packed * packed.sin()


class PacksInBackward(Product):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return Product.backward(ctx, g.contiguous()) * torch.ones_like(x.contiguous())


class MemoryOrder(Product):
    """Reads the gradient in the order of its memory, as a kernel does that takes it for contiguous."""

    @staticmethod
    def backward(ctx, g):
        order = sorted(range(g.dim()), key=lambda d: -g.stride(d))
        return Product.backward(ctx, g.permute(order).reshape(g.shape))


class FineSteps(Function):
    """8 bits a row, in float32; the gradient goes straight through. Differences do not converge."""

    @staticmethod
    def forward(ctx, x):
        rows = x.float()
        steps = 127 / rows.abs().amax(-1, keepdim=True)
        return ((rows * steps).round() / steps).to(x.dtype)

    backward = staticmethod(lambda ctx, g: g)


class Changes(Product):
    """x sin x, after a change of x in place that autograd is not told of."""

    @staticmethod
    def forward(ctx, x):
        x += 1.0
        return Product.forward(ctx, x)


class Rotates(Function):
    """The rows turned by a quarter about the last axis. Backward turns the gradient that it gets, which
    is that of a sum's other term, too."""

    forward = staticmethod(lambda ctx, x: torch.stack([-x[:, 1], x[:, 0], x[:, 2]], 1))

    @staticmethod
    def backward(ctx, g):
        turned = torch.stack([g[:, 1], -g[:, 0], g[:, 2]], 1)
        g.copy_(turned)
        return g


class RotatesCopy(Rotates):
    backward = staticmethod(lambda ctx, g: Rotates.backward(ctx, g.clone()))


class Backwards(Product):
    """Backward runs a backward pass of its own, which accumulates into .grad."""

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x * x.sin()
        torch.autograd.backward(y, g)
        return x.grad


class Score(Function):
    """The gradient of sum (sin x)^2 / 2, by a forward that differentiates."""

    @staticmethod
    def of(x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (score,) = torch.autograd.grad(x.sin().square().sum() / 2, x, create_graph=True)
            return score.detach(), torch.autograd.grad(score.sum(), x)[0]

    forward = saving_inputs(lambda x: Score.of(x)[0])

    backward = by_saved(lambda g, x: g * (2 * x).cos())


class ScoreSaved(Score):
    """The derivative of the score is that of forward."""

    @staticmethod
    def forward(ctx, x):
        score, slope = Score.of(x)
        ctx.save_for_backward(slope)
        return score

    backward = by_saved(lambda g, slope: g * slope)


class SquareOfSymmetricCut(SquareOfSymmetric):
    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return g @ a + a.detach() @ g


class TranscriptionSaved(Transcription):
    @staticmethod
    def forward(ctx, p):
        ctx.paths = p[:, :2].softmax(1)
        return Transcription.forward(ctx, p)

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return g[:, None] * (p.exp() - nn.functional.pad(ctx.paths, (0, 1)))


class Sines(Function):
    """s_j sin x_j in float32, where the s_j differ by a factor of fifty."""

    SCALES = torch.tensor([1.0, 1.0, 0.02])

    forward = saving_inputs(lambda x: (x.float().sin() * Sines.SCALES).to(x.dtype))

    backward = by_saved(lambda g, x: (g.float() * x.float().cos() * Sines.SCALES).to(g.dtype))


class SinesSaved(Sines):
    """The cosines of the smallest are those of forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.last = x[:, 2:].float().cos()
        return Sines.forward(ctx, x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        cosines = torch.cat([x[:, :2].float().cos(), ctx.last], 1)
        return (g.float() * cosines * Sines.SCALES).to(g.dtype)


def by_symmetric(function):
    """F(x_n x_n^T) x_n for each row, where the matrices are symmetric for any x."""
    return lambda x: (function.apply(x[:, :, None] * x[:, None]) @ x[:, :, None])[:, :, 0]


def by_log_probabilities(function):
    return lambda x: x * function.apply(x.log_softmax(1))[:, None]


def with_another_use(function):
    """The function of a tensor which is read again afterwards."""

    def run(x):
        y = x * 1.0
        return function.apply(y) * y

    return run


def as_residual(function):
    """A block with a skip connection: both terms of the sum get the same gradient."""
    return lambda x: (function.apply(x.sin()) + x).sin()


def by_columns(function):
    """The function of a part of a tensor, whose rows have gaps."""
    return lambda x: function.apply(torch.cat([x, x], 1)[:, :3])


def by_eigenvectors(function):
    """The eigenvalues of a Hermitian [2, 2] matrix, and the size of the entries of an eigenvector."""

    def run(x):
        off = torch.complex(x[:, 1], x[:, 2] + 1)
        a = torch.stack([x[:, 0].to(off), off, off.conj(), 3 - x[:, 0].to(off)], 1)
        w, v = function.apply(a.reshape(-1, 2, 2))
        return torch.cat([w, v[:, 0, :1].abs().square()], 1)

    return run


def by_complex(function):
    def run(x):
        w = function.apply(torch.complex(x, 0.5 * x))
        return torch.view_as_real(w).sum(-1)

    return run


def by_labels(function):
    return lambda x: x * function.apply(x, LABELS[: len(x)])


# name -> (the function, what is told of it)
class InHalf(Function):
    """y = x s(x) in bfloat16, of which s is kept."""

    @staticmethod
    def forward(ctx, x):
        h = x.bfloat16()
        ctx.save_for_backward(x, h.sigmoid())
        return (h * h.sigmoid()).to(x.dtype)

    backward = by_saved(lambda g, x, s: InHalf.gradient(x.bfloat16(), s, g.bfloat16()).to(g.dtype))

    @staticmethod
    def gradient(h, s, g):
        return g * (s + h * s * (1 - s))


class InHalfAgain(InHalf):
    """Right: s is computed again."""

    @staticmethod
    def backward(ctx, g):
        h = ctx.saved_tensors[0].bfloat16()
        return InHalf.gradient(h, h.sigmoid(), g.bfloat16()).to(g.dtype)


class MixesHalf(Function):
    """y = x M for a fixed M: forward is exact, and backward computes in bfloat16."""

    matrix = torch.tensor([[0.5, 1.0, 0.0], [-1.0, 0.25, 0.0], [0.0, 2.0, 1.0]])

    forward = staticmethod(lambda ctx, x: x @ MixesHalf.matrix.to(x.dtype))

    @staticmethod
    def backward(ctx, g):
        return (g.bfloat16() @ MixesHalf.matrix.mT.bfloat16()).to(g.dtype)


class MixesHalfLost(MixesHalf):
    backward = staticmethod(lambda ctx, g: MixesHalf.backward(ctx, g.detach()))


ADJACENT = torch.tensor([[0.0, 2.0, 0.0], [-1.0, 0.0, 0.5], [0.0, 0.0, 1.5]], dtype=torch.float64)


class OnGraph(Function):
    """y = sin(x A^T) with a sparse matrix that the class holds; A x^T is kept."""

    matrix = ADJACENT.to_sparse()

    @classmethod
    def sums(cls, x):
        return torch.mm(cls.matrix, x.mT).mT

    @classmethod
    def back(cls, g):
        return torch.mm(cls.matrix.to_dense().mT, g.mT).mT

    @staticmethod
    def forward(ctx, x):
        z = OnGraph.sums(x)
        ctx.save_for_backward(x, z)
        return z.sin()

    backward = by_saved(lambda g, _, z: OnGraph.back(g * z.cos()))


class OnGraphAgain(OnGraph):
    """Right: A x^T is computed again."""

    backward = by_saved(lambda g, x, _: OnGraphAgain.back(g * OnGraphAgain.sums(x).cos()))


class InDouble(Function):
    """y = x^3 in float64, of any other dtype."""

    @staticmethod
    def forward(ctx, x):
        z = x.double()
        ctx.save_for_backward(z)
        return (z**3).to(x.dtype)

    backward = by_saved(lambda g, z: (3 * g * z**2).to(g.dtype))


# Operators of torch.library, in each way that their rules are registered. Right: y = 2 x^2.


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def in_library(name, backward, kernel=lambda x: 2 * x**2, setup_context=save):
    """An operator that is defined, implemented and differentiated by three calls."""
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"hoglib_faults::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )
    return getattr(torch.ops.hoglib_faults, name)


LIBRARY = torch.library.Library("hoglib_faults", "FRAGMENT")


def load_cpp(folder, source):
    """Builds an extension of operators; skips where there is no compiler."""
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    from torch.utils.cpp_extension import include_paths, library_paths

    (folder / "source.cpp").write_text(source)
    paths = [f"-I{p}" for p in include_paths()] + [f"-L{p}" for p in library_paths()]
    subprocess.run(
        [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", *paths, "source.cpp", "-o", "built.so",
         "-lc10", "-ltorch_cpu", "-ltorch"],
        cwd=folder, check=True,
    )  # fmt: skip
    torch.ops.load_library(folder / "built.so")


@torch.library.custom_op("hoglib_faults::squares_b", mutates_args=())
def squares_b(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return g * 4 * x


squares_b.register_fake(lambda g, x: torch.empty_like(g))
squares_b.register_autograd(lambda ctx, h: (h * 4 * ctx.saved_tensors[1], None), setup_context=save)


def of_lists(name, of_one):
    """Two tensors at once, as lists, and a factor by keyword."""

    @torch.library.custom_op(f"hoglib_faults::{name}", mutates_args=())
    def squares(xs: list[torch.Tensor], *, factor: float = 2.0) -> list[torch.Tensor]:
        return [factor * x**2 for x in xs]

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        ctx.save_for_backward(*inputs[0])
        ctx.factor = keyword_only_inputs["factor"]

    def backward(ctx, grads):
        assert list(map(bool, ctx.needs_input_grad[0])) == [True, False]
        pairs = zip(grads, ctx.saved_tensors, strict=True)
        return [2 * ctx.factor * g * of_one(x) for g, x in pairs]

    squares.register_fake(lambda xs, *, factor=2.0: list(map(torch.empty_like, xs)))
    squares.register_autograd(backward, setup_context=setup_context)
    return lambda x: squares([x, torch.ones(2, dtype=x.dtype)], factor=2.0)[0]


@torch.library.triton_op("hoglib_faults::squares_t", mutates_args=())
def squares_t(x: torch.Tensor) -> torch.Tensor:
    return 2 * x * x


squares_t.register_autograd(
    lambda ctx, g: g * ctx.slope,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "slope", 4 * inputs[0].detach()),
)


def rounded(ctx, g):
    return 2 * g


rounded.surrogate = True


class TakesList(Function):
    """2 x y, where torch does not see y."""

    @staticmethod
    def forward(ctx, x, others):
        ctx.others = others
        return 2 * x * others[0]

    backward = staticmethod(lambda ctx, g: (2 * g * ctx.others[0], None))


class ListAlone(TakesList):
    """2 x, which reads the shape of what is in the list."""

    @staticmethod
    def forward(ctx, x, others):
        ctx.others = [torch.ones_like(others[0])]
        return 2 * x


class ListAgain(TakesList):
    """2 x y, by the y in the list; the one beside it gets the gradient."""

    @staticmethod
    def forward(ctx, x, others, y):
        ctx.save_for_backward(x, y)
        return TakesList.forward(ctx, x, others)

    backward = by_saved(lambda g, x, y: (2 * g * y, None, 2 * g * x))


class ListHalf(ListAgain):
    @staticmethod
    def backward(ctx, g):
        return *ListAgain.backward(ctx, g)[:2], ctx.saved_tensors[0] * g


def with_shared(function):
    """Gives a tensor in a list, and by itself."""

    def shared(x):
        y = x.sin()
        return function.apply(x, [y], y)

    return shared


class Keeps(Function):
    """The logistic function, whose value is on ctx as it is."""

    @staticmethod
    def forward(ctx, x):
        ctx.y = torch.sigmoid(x)
        return ctx.y

    backward = staticmethod(lambda ctx, g: g * ctx.y * (1 - ctx.y))


class KeepsForShape(Keeps):
    @staticmethod
    def forward(ctx, x):
        ctx.y = 2 * x
        return ctx.y

    backward = staticmethod(lambda ctx, g: 2 * g * torch.ones_like(ctx.y))


WRONG = {
    "a tensor in a list": (lambda x: TakesList.apply(x, [x.sin()]), "`others` holds tensors that need"),
    "in a list and alone": (with_shared(ListHalf), "first derivative of ListHalf is wrong"),
    "kept on ctx, then changed": (lambda x: Keeps.apply(x).mul_(3), "derivative of Keeps is wrong: ctx.y was changed"),
    "frees its argument": (lambda x: FreesAndDetaches.apply(0.3 * x), "FreesAndDetaches"),
    "compiled by the user": (
        torch.compile(lambda x: SavesExpCompiled.apply(x) + x, backend="aot_eager"),
        "SavesExpCompiled",
    ),
    "an operator": (
        in_library("detaches", lambda ctx, g: g * 4 * ctx.saved_tensors[0].detach()),
        "torch.ops.hoglib_faults.detaches is wrong",
    ),
    "an operator, first order": (
        in_library("factor", lambda ctx, g: g * 3 * ctx.saved_tensors[0]),
        "first derivative of torch.ops.hoglib_faults.factor is wrong",
    ),
    "an operator in NumPy": (
        in_library(
            "numpy",
            lambda ctx, g: torch.from_numpy(
                g.detach().numpy() * 4 * ctx.saved_tensors[0].numpy(force=True)
            ),
        ),
        "torch.ops.hoglib_faults.numpy",
    ),
    "linked operators": (
        in_library("linked", lambda ctx, g: squares_b(g, *ctx.saved_tensors)),
        "torch.ops.hoglib_faults.squares_b",
    ),
    "an operator of lists": (of_lists("lists", torch.Tensor.detach), "hoglib_faults.lists"),
    "an operator of Triton": (squares_t, "ctx.slope"),
    "an intermediate saved": (SavesExp.apply, "SavesExp"),
    "an argument without gradient": (by_labels(LogLikelihood), "LogLikelihood"),
    "complex": (by_complex(ComplexCube), "ComplexCube"),
    ".data": (PartData.apply, "PartData"),
    "NumPy": (PartNumPy.apply, "PartNumPy"),
    "a nested Function": (PartNested.apply, "PartNested"),
    "accumulates": (Accumulates.apply, "Accumulates"),
    "half precision": (InHalf.apply, "InHalf"),
    "backward in half precision": (MixesHalfLost.apply, "MixesHalfLost"),
    "a sparse matrix": (OnGraph.apply, "OnGraph"),
    "first order": (WrongFactor.apply, "WrongFactor"),
    "zero with a graph": (WithoutGraph.apply, "WithoutGraph"),
    "all of it": (AllDetached.apply, "AllDetached"),
    "under remat": (hog.ops.remat(RunAgain.apply), "RunAgain"),
    "of eigenvectors": (by_eigenvectors(GapsSaved), "`gaps`"),
    "a contiguous copy": (by_columns(Packs), "`packed`"),
    "the gradient as it is stored": (MemoryOrder.apply, "wrong for non-contiguous gradients"),
    "a changed argument": (with_another_use(Changes), "`x += 1.0`"),
    "a changed gradient": (as_residual(Rotates), "`g.copy_(turned)`"),
    "a backward pass inside": (Backwards.apply, "`torch.autograd.backward(y, g)`"),
    "a derivative in forward": (ScoreSaved.apply, "`slope`"),
    "of a symmetric matrix": (by_symmetric(SquareOfSymmetricCut), "`return g @ a + a.detach() @ g`"),
    "of log-probabilities": (by_log_probabilities(TranscriptionSaved), "ctx.paths"),
    "a small part in float32": (SinesSaved.apply, "ctx.last"),
    "cast to float64": (lambda x: InDouble.apply(x.float()).to(x), "It saves input `x` as copies"),
    "fine steps": (FineSteps.apply, "rounds its input to fewer digits"),
}  # fmt: skip
RIGHT = {
    "in float64": InDouble.apply,
    "in a list and alone": with_shared(ListAgain),
    "kept on ctx": Keeps.apply,
    "kept on ctx for its shape": lambda x: KeepsForShape.apply(x).mul_(3),
    "also in a list": lambda x: x * ListAlone.apply(x, [x]),
    "constants in a list": lambda x: TakesList.apply(x, [x.detach().sin()]),
    "operators by their packets": lambda x: torch.ops.aten.mul(x, torch.ops.aten.softmax(x, -1)),
    "an operator marked as a surrogate": in_library("surrogate", rounded),
    "frees its argument": lambda x: Frees.apply(0.3 * x),
    "compiled by the user": torch.compile(lambda x: functions.Cube.apply(x), backend="aot_eager"),
    "an operator": in_library("right", lambda ctx, g: g * 4 * ctx.saved_tensors[0]),
    "an operator of lists": of_lists("lists_right", lambda x: x),
    "new style": functions.Cube.apply,
    "half precision": InHalfAgain.apply,
    "backward in half precision": MixesHalf.apply,
    "a sparse matrix": OnGraphAgain.apply,
    "classic": functions.ClassicCube.apply,
    "product": Product.apply,
    "a root": CubeRoot.apply,
    "a marked surrogate": Reversal.apply,
    "an argument without gradient": by_labels(LogLikelihoodAgain),
    "complex": by_complex(ComplexSquare),
    "an op of hoglib": hog.ops.tanh,
    "under remat": hog.ops.remat(Product.apply),
    "eigenvectors": by_eigenvectors(HermitianEigen),
    "a contiguous input": Packs.apply,
    "a changed argument": lambda x: Changes.apply(x * 1.0),
    "a changed gradient": lambda x: Rotates.apply(x.sin()).sin() + x,
    "a copy of the gradient": as_residual(RotatesCopy),
    "a derivative in forward": Score.apply,
    "of a symmetric matrix": by_symmetric(SquareOfSymmetric),
    "of log-probabilities": by_log_probabilities(Transcription),
    "a small part in float32": Sines.apply,
    "contiguous in backward": by_columns(PacksInBackward),
}
