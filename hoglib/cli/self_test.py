"""Check in seconds that hoglib computes correct second derivatives on this machine.

Each check compares one part of hoglib with a closed form, or with central differences of torch's first
gradient. No check needs more than torch.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from tempfile import TemporaryFile
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import hoglib as hog
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.runtime.source_location import error_text
from hoglib._core.torch_api.torch_private import failing
from hoglib.capture.runners import cache_dir, cpp_compiler

Check = Callable[[torch.device], None]
STEP = 1e-5  # of central differences in float64: their error is about 1e-10
assert_equal_in_float64 = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)
assert_equal_in_float32 = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5)


class SkippedError(Exception):
    """This machine lacks the device, compiler or library that the check needs."""


class Outcome(NamedTuple):
    """The result of a check."""

    name: str
    status: str  # "ok", "WRONG" or "skipped"
    seconds: float
    why: str = ""  # why the status is not "ok"


def run() -> Iterator[Outcome]:
    """Run the checks in turn, on the CPU and on each GPU."""
    for name, check in CHECKS.items():
        yield _run_check(name, check, torch.device("cpu"))
    for i in range(torch.cuda.device_count()):
        for name in ON_GPU:
            yield _run_check(f"{name}, cuda:{i}", CHECKS[name], torch.device("cuda", i))


def _run_check(name: str, check: Check, device: torch.device) -> Outcome:
    began, status, why = perf_counter(), "ok", ""
    try:
        with preserve_random_state():
            # equal numbers on every machine, so that a failure can be repeated
            torch.manual_seed(0)
            check(device)
    except SkippedError as error:
        status, why = "skipped", str(error)
    except Exception as error:
        status, why = "WRONG", error_text(error)
    return Outcome(name, status, perf_counter() - began, why)


def hessian_vector_product(device: torch.device) -> None:
    """H v of a network with LayerNorm and attention, against central differences of the gradient. Torch
    lacks some of these second derivatives."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = x.chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v)

    layers = nn.Linear(3, 12), nn.LayerNorm(12), Attention(), nn.Tanh(), nn.Linear(4, 2)
    model = nn.Sequential(*layers).to(device, torch.float64)
    x, y = torch.randn(2, 5, 3).to(device).double(), torch.randn(2, 5, 2).to(device).double()
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    v = {name: torch.randn_like(p) for name, p in params.items()}
    _, product = hog.hvp(loss, params, v, (x, y))

    def gradient(step: float) -> dict[str, Tensor]:
        moved = {name: (p.detach() + step * v[name]).requires_grad_() for name, p in params.items()}
        # torch's own operations: their first derivatives are right without stand-ins
        value = F.mse_loss(torch.func.functional_call(model, moved, (x,)), y)
        return dict(zip(moved, torch.autograd.grad(value, list(moved.values())), strict=True))

    ahead, behind = gradient(STEP), gradient(-STEP)
    differences = {name: (ahead[name] - behind[name]) / (2 * STEP) for name in ahead}
    assert_equal_in_float64(product, differences)


def eigenvalues(device: torch.device) -> None:
    """The Hessian of w^T A w / 2 is A."""
    diagonal = torch.arange(1.0, 21.0, dtype=torch.float64, device=device)
    H = hog.HessianOperator(
        lambda w, batch: (diagonal * w**2).sum() / 2,
        torch.zeros_like(diagonal),
        [torch.ones(1, device=device)],
    )
    values, _ = H.eigsh(k=2)
    assert_equal_in_float64(values, torch.tensor([19.0, 20.0]).to(values))


def gradient_penalty(device: torch.device) -> None:
    """The penalty of the critic w^T x is P = (|w| - 1)^2, with dP/dw = 2 (|w| - 1) w / |w|."""
    critic = nn.Linear(3, 1, bias=False).to(device)
    real, fake = torch.randn(8, 3).to(device), torch.randn(8, 3).to(device)
    penalty = hog.penalties.wgan_gp(critic, real, fake)
    (found,) = torch.autograd.grad(penalty, critic.weight)
    w = critic.weight.detach()
    expected = (w.norm() - 1) ** 2, 2 * (w.norm() - 1) * w / w.norm()
    assert_equal_in_float32((penalty.detach(), found), expected)


def meta_gradient(device: torch.device) -> None:
    """With a step w' = w - 2 lr (w - a), the gradient of (w' - b)^2 is 2 (w' - b) (1 - 2 lr)."""
    model, lr, a, b = nn.Linear(1, 1, bias=False).to(device), 0.1, 2.0, -1.0
    # one task of one example with input 1: the output is the weight
    one = torch.ones(1, 1, 1, device=device)
    maml = hog.MAML(model, F.mse_loss, inner_lr=lr, inner_steps=1)
    maml.loss(((one, a * one), (one, b * one))).backward()
    w = model.weight.detach()
    adapted = w - 2 * lr * (w - a)
    assert_equal_in_float32(model.weight.grad, 2 * (adapted - b) * (1 - 2 * lr))


def wrong_function(device: torch.device) -> None:
    """verify reports a backward that leaves the graph, and passes hoglib.ops.swish."""

    class Detached(Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            return 3 * g * x.detach() ** 2

    x = torch.randn(3, device=device)
    if hog.verify(Detached, (x,)).ok:
        raise AssertionError("verify did not find a backward that calls detach()")
    hog.verify(hog.ops.swish, (x, torch.rand_like(x))).raise_if_failed()


def compiled(device: torch.device) -> None:
    """The compiled H v of sum(x^3) is 6 x v."""
    if device.type == "cpu" and cpp_compiler() is None:
        raise SkippedError("no C++ compiler; hoglib.compile runs graphs without compiling them")
    x, v = torch.rand(2, 5).to(device)
    fast = hog.compile(lambda x, v: hog.hvp(lambda x: x.pow(3).sum(), x, v))
    assert_equal_in_float32(fast(x, v), (x.pow(3).sum(), 6 * x * v))


def writable_cache(device: torch.device) -> None:
    """Compiled graphs can be kept for later processes."""
    try:
        os.makedirs(cache_dir(), exist_ok=True)
        with TemporaryFile(dir=cache_dir()):
            pass
    except OSError as error:
        text = (
            f"{error}; set TORCHINDUCTOR_CACHE_DIR to a directory of yours that can be written to"
        )
        raise OSError(text) from None


def private_names(device: torch.device) -> None:
    """Each private name of torch that hoglib uses exists, and its probe passes."""
    gone = [f"`{row.name}` (not available: {row.without})" for row in failing()]
    if gone:
        text = f"torch {torch.__version__} does not have, or has changed, {', '.join(gone)}"
        raise AssertionError(text)


CHECKS: dict[str, Check] = {
    "Hessian-vector product through LayerNorm and attention": hessian_vector_product,
    "largest eigenvalues of a Hessian": eigenvalues,
    "gradient penalty": gradient_penalty,
    "meta-gradient of one MAML step": meta_gradient,
    "verify finds a wrong Function": wrong_function,
    "directory of compiled graphs": writable_cache,
    "compiled Hessian-vector product": compiled,
    # last, because this imports torch's compiler
    "private names of torch": private_names,
}
ON_GPU = [name for name, check in CHECKS.items() if check not in (writable_cache, private_names)]
