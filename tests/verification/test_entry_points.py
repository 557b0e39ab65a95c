"""No wrong derivative of a custom Function passes an entry point without a word; no right one is accused.

ENTRY_POINTS x (WRONG, RIGHT of faults.py). All that is public is an entry point, or listed with a reason.
"""

import dataclasses
import functools
import gc
import itertools
import logging
import operator
import re
import time
import warnings
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib import curvature, meta, penalties
from hoglib._core.numerics import trust
from hoglib.errors import NoSecondDerivative, UnsupportedError, VerificationError
from hoglib.verification import entry_points, examination, function_identity
from tests.functions import Cube, Detached, Sine, by_saved, made, saving_inputs, saving_output
from tests.long_tail import all_but
from tests.rows import rows
from tests.verification.faults import (
    ADJACENT,
    RIGHT,
    WEIGHT,
    WRONG,
    Accumulates,
    OnGraphAgain,
    load_cpp,
)
from tests.verification.test_half_precision import CastCube, CastRelu, of_half_alone
from tests.zoo.gradients import Mul

F64 = torch.float64
X = torch.linspace(-1.2, 1.4, 12, dtype=F64).reshape(4, 3)
Y = torch.zeros(4, 1, dtype=F64)


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    """In this module verdicts are kept from one test to the next, and told again."""
    torch.manual_seed(0)
    entry_points.forget_reports()


class Net(nn.Module):
    """A Function between two linear layers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(3)
        self.function = function
        with torch.inference_mode(False):  # as where it was trained
            self.first, self.last = nn.Linear(3, 3, dtype=F64), nn.Linear(3, 1, dtype=F64)

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def with_loss(call):
    """A call of (loss, params, v, batch)."""

    def run(function):
        model = Net(function)
        loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        call(loss, params, {name: torch.ones_like(p) for name, p in params.items()}, (X, Y))

    return run


def learner(make, **options):
    def run(function):
        made = make(Net(function), F.mse_loss, inner_lr=0.05, inner_steps=2, **options)
        made.loss([((X, Y), (X, Y))]).backward()

    return run


def hypergradient(method, **options):
    def run(function):
        loss = hog.functional_loss(Net(function), F.mse_loss)
        meta.hypergradient(
            lambda params, hyper: loss(params, (X, Y)),
            lambda params, hyper: loss(params, (X, Y)) + hyper * sum(p.square().sum() for p in params.values()),
            hog.trainable_params(loss.model), torch.tensor(0.1, dtype=F64),
            rule=meta.sgd(0.05), steps=2, method=method, **options,
        )  # fmt: skip

    return run


def newton(loss, params, v, batch):
    curvature.NewtonCG(loss, dict(loss.model.named_parameters())).step(batch)


def marquardt(loss, params, v, batch):
    def residual(params, batch):
        return loss.outputs(params, batch) - batch[1]

    own = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    curvature.LevenbergMarquardt(residual, own, method="lsmr").step(batch)


def compiled_loss(loss, params, v, batch):
    hog.compiled_loss(lambda p: hog.penalties.parameter_gradient(loss, p, batch), backend="eager")(params).backward()  # fmt: skip


def by_hand(after):
    """The user's own derivatives, within the context or after it."""

    def run(loss, params, v, batch):
        leaves = [p.detach().requires_grad_() for p in params.values()]
        with hog.second_order():
            value = loss(dict(zip(params, leaves, strict=True)), batch)
            grads = None if after else torch.autograd.grad(value, leaves, create_graph=True)
        grads = grads or torch.autograd.grad(value, leaves, create_graph=True)
        depending = [g for g in grads if g.requires_grad]
        torch.autograd.grad(depending, leaves, [torch.ones_like(g) for g in depending])

    return run


def monitored(function):
    lightning = pytest.importorskip("lightning.pytorch")
    from hoglib.lightning import CurvatureMonitor

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(function)

        def second_order_problem(self, batch):
            return hog.functional_loss(self.net, F.mse_loss), hog.trainable_params(self.net), batch

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", callbacks=[CurvatureMonitor(every=1, num_samples=1, steps=3)],
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
    trainer.fit(Module(), data)


# name of the entry point in messages -> a call of it
ENTRY_POINTS = {
    "hvp": with_loss(lambda loss, p, v, b: hog.hvp(loss, p, v, b)),
    "hvp compiled": with_loss(lambda loss, p, v, b: hog.hvp(loss, p, v, b, compile="eager")),
    "second_order": with_loss(by_hand(after=False)),
    "second_order before": with_loss(by_hand(after=True)),
    "jvp": lambda function: hog.jvp(Net(function), X, torch.ones_like(X)),
    "ggn_vp": with_loss(lambda loss, p, v, b: hog.ggn_vp(loss, p, v, b)),
    "fisher_vp": with_loss(lambda loss, p, v, b: hog.fisher_vp(loss, p, v, b)),
    "hessian": with_loss(lambda loss, p, v, b: hog.hessian(loss, p, b)),
    "ggn": with_loss(lambda loss, p, v, b: curvature.ggn(loss, p, b)),
    "per_example_diagonals": with_loss(
        lambda loss, p, v, b: curvature.per_example_diagonals(loss, p, b, kind="hessian")
    ),
    "sparse_hessian": lambda function: hog.sparse_hessian(lambda x: function(x).sum(), X),
    "laplacian": lambda function: hog.laplacian(lambda x: function(x).sum(1), X),
    "bilaplacian": lambda function: hog.bilaplacian(lambda x: function(x).sum(1), X),
    "jet": lambda function: hog.jet(lambda x: function(x).sum(1), X, [torch.ones_like(X), None]),
    "directional": lambda function: hog.directional(lambda x: function(x).sum(1), X, torch.ones_like(X), 2),
    "partial_derivative": lambda function: hog.partial_derivative(lambda x: function(x).sum(1), X, index=(0, 0)),
    "HessianOperator": with_loss(lambda loss, p, v, b: hog.HessianOperator(loss, p, b) @ v),
    "GGNOperator": with_loss(lambda loss, p, v, b: hog.GGNOperator(loss, p, b) @ v),
    "FisherOperator": with_loss(lambda loss, p, v, b: hog.FisherOperator(loss, p, b) @ v),
    "hessian_spectrum": with_loss(
        lambda loss, p, v, b: curvature.hessian_spectrum(loss, p, b, k=1, num_samples=1, steps=3)
    ),
    "NewtonCG": with_loss(newton),
    "KFAC": with_loss(lambda loss, p, v, b: curvature.KFAC(loss, dict(loss.model.named_parameters()), lr=0.1).step(b)),
    "r1": lambda function: penalties.r1(Net(function), X),
    "r1 compiled": lambda function: penalties.r1(Net(function), X, compile="eager"),
    "r2": lambda function: penalties.r2(Net(function), X),
    "r1_r2": lambda function: penalties.r1_r2(Net(function), X, X),
    "wgan_gp": lambda function: penalties.wgan_gp(Net(function), X, X + 1),
    "zero_centred": lambda function: penalties.zero_centred(Net(function), X, X + 1),
    "dragan": lambda function: penalties.dragan(Net(function), X),
    "input_gradient": lambda function: penalties.input_gradient(Net(function), X),
    "jacobian": lambda function: penalties.jacobian(Net(function), X),
    "lipschitz": lambda function: penalties.lipschitz(Net(function), X),
    "sobolev": lambda function: penalties.sobolev(Net(function), X, torch.ones_like(X)),
    "parameter_gradient": with_loss(lambda loss, p, v, b: penalties.parameter_gradient(loss, p, b)),
    "GradientPenalty": lambda function: hog.GradientPenalty("r1")(Net(function), X),
    "forces": lambda function: penalties.forces(lambda x: Net(function)(x).sum(1), X),
    "forces with Hessian": lambda function: penalties.forces(lambda x: Net(function)(x).sum(1), X, hessian=True),
    "root": lambda function: meta.root(lambda z, x: z - function(x).sum(1), function(X).detach().sum(1), X),
    "fixed_point": lambda function: meta.fixed_point(lambda z, x: function(x), 0 * X, X),
    "MAML": learner(hog.MAML),
    "MAML over a loop": learner(hog.MAML, over_tasks="loop"),
    "MAML.adapt": lambda function: hog.MAML(Net(function), F.mse_loss).adapt((X, Y)),
    "IMAML": learner(meta.IMAML),
    "adapt": with_loss(lambda loss, p, v, b: meta.adapt(loss, p, b, meta.sgd(0.1), steps=2, memory="remat")),
    "inner_step": with_loss(lambda loss, p, v, b: meta.inner_step(loss, p, b, meta.sgd(0.1), {})),
    "hypergradient": hypergradient("unrolled"),
    "hypergradient implicit": hypergradient("cg", damping=10.0),
    "compile": with_loss(lambda loss, p, v, b: hog.compile(lambda p: hog.hvp(loss, p, v, b)[1], backend="eager")(p)),
    "compile without check": with_loss(
        lambda loss, p, v, b: hog.compile(
            lambda p: hog.hvp(loss, p, v, b)[1], backend="eager", check=False
        )(p)
    ),
    "compiled_loss": with_loss(compiled_loss),
    "CurvatureMonitor": monitored,
}  # fmt: skip
FIRST_ORDER = {
    "KFACOperator": with_loss(lambda loss, p, v, b: hog.KFACOperator(loss, p, b).update()),
    "influence": with_loss(lambda loss, p, v, b: hog.influence(loss, p, b, b, damping=1.0)),
    "influence by kfac": with_loss(
        lambda loss, p, v, b: hog.influence(loss, p, b, b, damping=1.0, solver="kfac")
    ),
    "JacobianOperator": with_loss(lambda loss, p, v, b: hog.JacobianOperator(loss, p, b) @ v),
    "LevenbergMarquardt": with_loss(marquardt),
    "sparse_jacobian": lambda function: hog.sparse_jacobian(function, X),
    "MAML, first order": learner(hog.MAML, first_order=True),
    "Reptile": learner(meta.Reptile),
    "adapt, first order": with_loss(
        lambda loss, p, v, b: meta.adapt(loss, p, b, meta.sgd(0.1), steps=1, first_order=True)
    ),
}


# Entry points of products J v and J^T M J v without a graph: a second derivative of the model does no harm.
JACOBIANS = ("ggn_vp", "fisher_vp", "ggn", "GGNOperator", "FisherOperator", "NewtonCG", "KFAC")
SECOND_ONLY = ("an operator", "an intermediate saved", "NumPy", "all of it")


def told(call, function):
    """What an entry point says of Functions; a refusal to capture what leaves torch is said, too."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            call(function)
        except (UnsupportedError, NoSecondDerivative) as error:
            warnings.warn(f"a derivative of {function}: {error}", stacklevel=1)
    texts = [str(w.message) for w in found]
    return [
        text
        for text in texts
        if "hoglib.verify(" in text or "derivative of" in text or ".grad of" in text
    ]


# One of each way in which a Function is reached; the others show with a few faults that they are ways in.
WAYS = ("hvp", "HessianOperator", "jet", "r1", "MAML", "hypergradient")
FEW = ("an intermediate saved", "NumPy", "all of it", "new style", "under remat", "an operator")
# Faults that do no harm at some entry points: Taylor mode differentiates what a forward does, in place or
# not, and needs no backward of the tensor that it changed.
RIGHT_ALL_THE_SAME = {"a changed argument": ("jet", "directional", "partial_derivative")}
# What is recomputed after the context is applied outside of it, as docs/second-order.md says.
NOT_SEEN = {"under remat": ("second_order before",)}


# What raises because of the kind of the tensors, right or wrong.
REFUSED = {  # a graph takes dense tensors only
    "a sparse matrix": (
        "compile", "compile without check", "compiled_loss", "hvp compiled", "r1 compiled",
    ),
}  # fmt: skip


SEEN: list[float] = []  # the largest element of each run


class CutBeyond(Function):
    """A sine that leaves the graph above 50."""

    @staticmethod
    def forward(ctx, x):
        SEEN.append(float(x.abs().max()))
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.detach() if x.max() > 50 else x).cos()


def test_a_function_is_examined_at_the_values_of_the_user_and_again_where_they_have_moved():
    def sum_of(x):
        return CutBeyond.apply(x).sum() + x.square().sum()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for scale in (1.0, 1.01, 0.5, 40.0, 30.0):
            SEEN.clear()
            hog.hvp(sum_of, scale * X, X)
            # next to them: 2%, and the step of a difference
            assert max(SEEN) < 1.1 * scale * float(X.abs().max())
    # 40 X is beyond 50
    (text,) = {str(one.message) for one in found}
    assert text.startswith("hvp: the second derivative of CutBeyond is wrong. ")


class EndsTheProcess(Function):
    """A right one, which a library ends the process in, for values that it was not made for."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        if (x != EndsTheProcess.allowed).any():
            raise SystemExit(3)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def test_a_function_that_ends_the_process_is_not_examined():
    EndsTheProcess.allowed = X
    with pytest.warns(UserWarning, match="EndsTheProcess was not examined: it raised SystemExit"):
        hog.hvp(lambda x: EndsTheProcess.apply(x).sum(), X, X)


def hooked(*hooks):
    def function(x):
        y = x.sin()
        for hook in hooks if y.requires_grad else ():
            y.register_hook(hook)
        return y

    return function


def hooked_module(register, hook):
    module = torch.nn.Tanh()
    getattr(module, register)(hook)
    return module


def solved(removed):
    """An equilibrium as it is often published: its hook solves the adjoint equation, without a graph."""

    def function(x):
        f = lambda z: (z / 3 + x).sin()  # noqa: E731
        with torch.no_grad():
            z = functools.reduce(lambda z, _: f(z), range(60), torch.zeros_like(x))
        z = f(z)
        start = z.detach().requires_grad_()
        value = f(start)

        def solve(g):
            if removed:
                handle.remove()
            step = lambda y, _: torch.autograd.grad(value, start, y, retain_graph=True)[0] + g  # noqa: E731
            return functools.reduce(step, range(60), g)

        handle = z.register_hook(solve) if z.requires_grad else None
        return z

    return function


class TanhOfProduct(nn.Module):
    def forward(self, x, y):
        return (x * y).tanh()


def of_two_inputs(hook):
    module = TanhOfProduct()
    module.register_full_backward_hook(hook)
    return lambda x: module(x, x + 1)


HOOK, PRE_HOOK = "register_full_backward_hook", "register_full_backward_pre_hook"
CHANGING_HOOKS = {
    "halved": hooked(lambda g: g / 2),
    "clipped": hooked(lambda g: g.clamp(-1e-3, 1e-3)),
    "a second hook": hooked(lambda g: None, lambda g: 2 * g),
    "a module": hooked_module(HOOK, lambda module, given, outgoing: (given[0] / 2,)),
    "a module, before it": hooked_module(PRE_HOOK, lambda module, outgoing: (outgoing[0] / 2,)),
    "one of two inputs": of_two_inputs(
        lambda module, given, outgoing: (given[0] * 1, given[1] / 2)
    ),
    "an equilibrium": solved(removed=False),
    "an equilibrium, once": solved(removed=True),
}
LOOKING_HOOKS = {
    "looked at": hooked(lambda g: None, lambda g: g),
    "a clip that does nothing": hooked(lambda g: g.clamp(-1e3, 1e3)),
    "a module": hooked_module(HOOK, lambda module, given, outgoing: None),
    "a module, before it": hooked_module(PRE_HOOK, lambda module, outgoing: outgoing),
}
# No backward runs, the first derivative alone is taken, or gradients are the user's own (see `adapt`).
NO_HOOKS = (
    "jvp", "jet", "directional", "adapt", "inner_step", "compile without check", "JacobianOperator", "sparse_jacobian",
    "MAML, first order", "Reptile", "adapt, first order",
)  # fmt: skip


# Taylor mode runs no backward, and "auto" may take it.
NESTED = {
    "laplacian": lambda f: hog.laplacian(lambda x: f(x).sum(1), X, mode="nested"),
    "bilaplacian": lambda f: hog.bilaplacian(lambda x: f(x).sum(1), X, mode="nested"),
    "partial_derivative": lambda f: hog.partial_derivative(
        lambda x: f(x).sum(1), X, index=(0, 0), mode="nested"
    ),
}


def told_of_hooks(name, function):
    entry_points.forget_reports()
    trust._MEMO.clear()  # `root` compares derivatives in the first call of a line of code
    call = {**ENTRY_POINTS, **FIRST_ORDER, **NESTED}[name]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            call(function)
        except (UnsupportedError, NoSecondDerivative) as error:
            warnings.warn(str(error), stacklevel=1)
    return [
        str(w.message) for w in found if "returns another gradient than it gets" in str(w.message)
    ]


@pytest.mark.parametrize("name", [*ENTRY_POINTS, *FIRST_ORDER])
def test_a_hook_that_changes_a_gradient_is_told_at_every_entry_point(name):
    assert len(told_of_hooks(name, CHANGING_HOOKS["halved"])) == (name not in NO_HOOKS)
    assert not told_of_hooks(name, LOOKING_HOOKS["looked at"])


@pytest.mark.parametrize("name", [*WAYS, "KFACOperator"])
@rows("hook", CHANGING_HOOKS)
def test_what_changes_a_gradient_is_told_by_its_line(name, hook):
    if name not in NO_HOOKS:
        (text,) = told_of_hooks(name, CHANGING_HOOKS[hook])
        assert "hog.meta.fixed_point" in text
        assert re.search(r"test_entry_points.py:\d+: `", text)


@pytest.mark.parametrize("name", [*WAYS, "KFACOperator"])
@rows("hook", LOOKING_HOOKS)
def test_a_hook_that_changes_nothing_is_not_told(name, hook):
    assert not told_of_hooks(name, LOOKING_HOOKS[hook])


def test_a_hook_by_hand_is_told_where_a_second_derivative_is_taken():
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with hog.second_order():
            CHANGING_HOOKS["halved"](x).sum().backward()  # as trainings clip
        assert not found
        with hog.second_order():
            torch.autograd.grad(CHANGING_HOOKS["halved"](x).sum(), x, create_graph=True)
    assert len(found) == 1


def test_a_hook_that_leaves_no_graph_is_named_in_the_error():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Identity()).double()
    model[1].forward = CHANGING_HOOKS["an equilibrium"]
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    with pytest.raises(
        NoSecondDerivative, match=r"test_entry_points.py.* returns another gradient"
    ):
        hog.ggn_vp(loss, params, params, (X, X), mode="reverse")


def test_hooks_of_parameters_are_told_where_inner_steps_leave_them_out():
    model = torch.nn.Linear(3, 3).double()
    model.weight.register_hook(lambda g: 0 * g)
    with pytest.warns(
        UserWarning, match=r"MAML: the hooks of model.weight do not run in inner steps"
    ):
        hog.MAML(model, F.mse_loss).loss([((X, X), (X, X))])


def test_a_changed_argument_does_no_harm_in_taylor_mode():
    function, _ = WRONG["a changed argument"]
    f = lambda x: function(x).sum(1)  # noqa: E731
    v, h = torch.ones_like(X), 1e-3
    expected = (f(X + h * v) - 2 * f(X) + f(X - h * v)) / h**2
    found = hog.directional(f, X, v, 2)
    assert_close(found[-1] if isinstance(found, tuple) else found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "faults"),
    all_but(
        lambda name, faults: (name in WAYS) == (faults == "all"),
        itertools.product(ENTRY_POINTS, ["few", "all"]),
    ),
)
def test_wrong_functions_are_told_and_right_ones_are_not(name, faults):
    call = ENTRY_POINTS[name]
    wrong, right = (
        {fault: case for fault, case in cases.items() if faults == "all" != skipped or fault in FEW}
        for cases, skipped in ((WRONG, ""), (RIGHT, "all" if name == "compile" else ""))
    )
    silent = [
        fault for fault, (function, words) in wrong.items()
        if name not in (RIGHT_ALL_THE_SAME | NOT_SEEN).get(fault, ()) and not (name in JACOBIANS and fault in SECOND_ONLY) and not any(words in text or "expected a function whose graph" in text for text in told(call, function))
    ]  # fmt: skip
    assert not silent
    accused = {
        kind: texts for kind, function in right.items()
        if name not in REFUSED.get(kind, ()) and (texts := told(call, function))
    }  # fmt: skip
    assert accused == {}


# What is predicted without gradients: a wrong first derivative is told by all, and a wrong second one by
# those that take it there.
PREDICTED = (
    "hvp", "jvp", "ggn_vp", "hessian", "laplacian", "jet", "HessianOperator", "r1", "jacobian", "forces",
    "forces with Hessian", "hypergradient",
)  # fmt: skip


# The contexts take turns, but where a way begins
CONTEXTS = [torch.no_grad, torch.inference_mode]
WITHOUT = [
    (name, context) for i, name in enumerate(PREDICTED) for k, context in enumerate(CONTEXTS)
    if name in WAYS or i % 2 == k
]  # fmt: skip


@rows("fault", ["first order", "an intermediate saved"])
@rows(("name", "context"), WITHOUT)
def test_wrong_functions_are_told_without_gradients(name, context, fault):
    def call(function):
        with context():
            ENTRY_POINTS[name](function)

    once = fault != "first order" and name in ("r1", "jacobian", "forces", "jvp", "ggn_vp")
    assert bool(told(call, WRONG[fault][0])) is not once


@pytest.mark.parametrize("name", [*FIRST_ORDER, *JACOBIANS])
def test_a_wrong_second_derivative_does_no_harm_where_none_is_taken(name):
    call = {**ENTRY_POINTS, **FIRST_ORDER}[name]
    assert told(call, WRONG["an intermediate saved"][0]) == []
    (text,) = told(call, WRONG["first order"][0])
    assert "first derivative of WrongFactor is wrong" in text
    assert "straight-through gradient, set `surrogate = True` on the class" in text


def test_a_product_of_jacobians_takes_a_second_derivative_where_it_has_a_graph_or_a_criterion_has_one():
    wrong = WRONG["an intermediate saved"][0]

    def product(model, criterion, **options):
        entry_points.forget_reports()
        params = hog.trainable_params(model)
        loss = hog.functional_loss(model, criterion)
        return told(lambda _: hog.ggn_vp(loss, params, params, (X, Y), **options), wrong)

    assert product(Net(wrong), F.mse_loss) == []
    assert "second derivative" in product(Net(wrong), F.mse_loss, create_graph=True)[0]
    criterion = lambda o, y: (wrong(o - y) + (o - y).square()).mean()  # noqa: E731
    assert "second derivative" in product(Net(torch.sin), criterion)[0]
    # of points alone a jvp has no graph
    entry_points.forget_reports()
    assert told(lambda _: hog.jvp(wrong, X, torch.ones_like(X)), wrong) == []
    x = X.clone().requires_grad_()
    assert told(lambda _: hog.jvp(wrong, x, x), wrong) != []


def third_chebyshev(factor):
    """4 x^3 - 3 x, whose backward is an operator that torch has no derivative of."""
    special = torch.special
    value, slope = special.chebyshev_polynomial_t, special.chebyshev_polynomial_u
    return made("Chebyshev", lambda x: value(x, 3), lambda g, x: factor * g * slope(x, 2)).apply


ONCE = {
    **{name: ENTRY_POINTS[name] for name in ("ggn_vp", "fisher_vp", "GGNOperator")},
    **{name: FIRST_ORDER[name] for name in ("JacobianOperator", "Reptile")},
    "jvp": lambda function: hog.jvp(function, X, X),
    "forces": lambda function: penalties.forces(lambda x: function(x).sum(1), X),
    "per_example_gradients": with_loss(lambda loss, p, v, b: hog.per_example_gradients(loss, p, b)),
}  # fmt: skip


@rows("name", ONCE)
def test_a_backward_that_has_no_derivative_is_right_or_wrong_to_first_order(name):
    assert told(ONCE[name], third_chebyshev(3.0)) == []
    (text,) = told(ONCE[name], third_chebyshev(6.0))
    assert "first derivative of Chebyshev is wrong" in text


def test_a_backward_that_has_no_derivative_gives_products():
    chebyshev = third_chebyshev(3.0)
    assert_close(hog.jvp(chebyshev, X, X)[1], (12 * X**2 - 3) * X)
    # the derivative of the product by the model's parameters is refused, as every second one is
    for name in ("jvp", "hvp"):
        with pytest.raises(UnsupportedError, match="got one without: torch takes the result for a"):
            ENTRY_POINTS[name](chebyshev)


# What is public and takes a function of the user's is an entry point, or listed here with a reason.
NO_ENTRY_POINTS = {
    "judges Functions itself": {"audit", "verify", "check", "assert_double_differentiable", "SecondOrderAudit"},
    "takes first derivatives only": {
        "EvalGradients", "gradient_noise_scale", "per_example_gradients",
        "per_example_gradient_norms", "per_example_gradient_products", "critical_sharpness",
        "gradient_store", "GradientStore",
    },
    "draws what it is given, right or wrong": {"graph", "Graph"},
    "takes an operator, which is an entry point": {"LinearOperator", "LowRankOperator", "RectangularOperator"},
    "its function is differentiated by an entry point": {
        "functional_loss", "language_model_loss", "trainable_params", "second_order_problems", "MetaAnnealing",
        "RNGState", "leave_k_out", "shard", "multi_step_weights", "Learner", "Compiled", "CompiledLoss",
    },
    "an update rule, differentiated in the inner loop": {"RULES", "GradientTransformation", "adadelta", "adagrad", "adam", "adamax", "adamw", "momentum", "radam", "rmsprop", "scheduled", "sgd"},
    "holds numbers or options": {
        "Band", "DiagonalBlocks", "inductor_options", "EnergyForces", "EnergyForcesHessian", "CriticalSharpness", "GraphEntry", "Hypergradient", "Measurement", "NewtonStep", "LevenbergMarquardtStep",
        "KFACError", "KFACStep", "LeaveKOut", "NoiseScale", "Options", "DataOptions", "OperatorOptions", "LearnerOptions", "TrainingOptions", "PenaltyWithOutputs", "Report", "Residual", "Shard", "Spectrum", "TOLERANCES", "Tolerance",
        "VerificationError", "__version__",
    },
    "a package": {"capture", "curvature", "errors", "meta", "nn", "ops", "penalties", "testing"},
}  # fmt: skip


def test_all_that_is_public_is_an_entry_point_or_listed_with_a_reason():
    import hoglib.lightning

    packages = (hog, curvature, penalties, meta, hog.capture, hog.testing, hoglib.lightning)
    public = {name for package in packages for name in package.__all__}
    entries = {
        name.split(" ")[0].split(".")[0].rstrip(",") for name in (*ENTRY_POINTS, *FIRST_ORDER)
    }
    reasons = [name for names in NO_ENTRY_POINTS.values() for name in names]
    assert len(reasons) == len(set(reasons))
    assert public - entries - set(reasons) == set()
    assert set(reasons) - public == set()
    assert entries <= public


# What is told, and when


def hvp(function, **options):
    loss, params, v, batch = problem(function)
    return hog.hvp(loss, params, v, batch, **options)


def problem(function):
    model = Net(function)
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    return loss, params, {name: torch.ones_like(p) for name, p in params.items()}, (X, Y)


def test_it_is_told_once_for_a_function_and_an_entry_point():
    function, _ = WRONG[".data"]
    (text,) = told(hvp, function)
    assert text.startswith("hvp: the second derivative of PartData is wrong. PartData.backward leaves the graph by .data at ")  # fmt: skip
    assert "faults.py:" in text
    assert told(hvp, function) == []
    assert told(ENTRY_POINTS["hessian"], function)[0].startswith("hessian: ")


class CutTwice(Function):
    """y = x^3 w^3, cut at another place for each input."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x**3 * w**3

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * 3 * x.detach() ** 2 * w**3, g * 3 * x**3 * w.data**2


def test_another_cause_is_told_too():
    w = torch.full_like(X, 1.5)
    by_x = lambda cut: hog.hvp(lambda x: cut(x, w).square().sum(), X, X)  # noqa: E731
    by_w = lambda cut: hog.hvp(lambda w: cut(X, w).square().sum(), w, w)  # noqa: E731
    (first,), (second,) = (told(call, CutTwice.apply) for call in (by_x, by_w))
    assert ".detach()" in first
    assert ".data" in second
    assert told(by_x, CutTwice.apply) == []


class AlmostLinear(Function):
    """y = x - 3e-6 cos x, whose second derivative is lost."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sin())
        return x - 3e-6 * x.cos()

    backward = by_saved(lambda g, s: g * (1 + 3e-6 * s))


def test_what_changes_no_product_is_not_told():
    """An iterative solver leaves as much of its saved result; `verify` is asked for the last digit."""
    assert told(hvp, AlmostLinear.apply) == []
    assert hog.verify(AlmostLinear, X)["second derivative: reverse-over-reverse"].status == "fail"


class Root(Function):
    """z with z^2 = x + 3, as it was solved for elsewhere: the implicit derivative is attached."""

    forward = saving_output(lambda z, x: z.clone())

    backward = by_saved(lambda g, y: (None, g / (2 * y)))


class RootOfConstant(Root):
    backward = staticmethod(lambda ctx, g: (None, g / (2 * ctx.saved_tensors[0].detach())))


class CubeSlope(Function):
    """3 x^2 g, whose derivative has no graph."""

    forward = saving_inputs(lambda x, g: 3 * x**2 * g)

    @staticmethod
    def backward(ctx, h):
        x, g = (t.detach() for t in ctx.saved_tensors)
        return 6 * x * g * h, 3 * x**2 * h


class BySlope(Cube):
    backward = staticmethod(lambda ctx, g: CubeSlope.apply(*ctx.saved_tensors, g))


class ExpSlope(Function):
    """y g for y = exp x: the part of y is given to x."""

    @staticmethod
    def forward(ctx, x, y, g):
        ctx.save_for_backward(x, g)
        return y * g

    backward = by_saved(lambda h, x, g: (h * g * x.exp(), None, h * x.exp()))


class ExpBySlope(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    backward = staticmethod(lambda ctx, g: ExpSlope.apply(*ctx.saved_tensors, g))


def test_a_part_of_a_backward_is_told_where_a_third_derivative_is_taken():
    for name in ("jet", "bilaplacian", "directional", "partial_derivative"):
        (text,) = told(ENTRY_POINTS[name], BySlope.apply)
        assert "where a third derivative is taken" in text
        assert "second derivative of CubeSlope is wrong" in text
    for name in ("hvp", "HessianOperator", "r1", "MAML", "laplacian", "hypergradient"):
        assert told(ENTRY_POINTS[name], BySlope.apply) == []
    for name in ("jet", "bilaplacian", "jvp", "hvp"):
        assert told(ENTRY_POINTS[name], ExpBySlope.apply) == []


def test_an_operator_with_a_vmap_rule():
    """torch has vmap of its value, but not of its gradient."""

    @torch.library.custom_op("hoglib_tests::squares_by_vmap", mutates_args=())
    def squares(x: torch.Tensor) -> torch.Tensor:
        return x * x

    squares.register_autograd(
        lambda ctx, g: 2 * g * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    squares.register_vmap(lambda info, dims, x: (squares(x), dims[0]))
    assert hog.verify(squares, X).ok
    assert_close(hog.jvp(torch.func.vmap(squares), X, X)[1], 2 * X * X)


class BatchesWrong(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return BatchesWrong.apply(x.flip(in_dims[0])), in_dims[0]


@torch.library.custom_op("hoglib_faults::batches", mutates_args=())
def batches(x: torch.Tensor) -> torch.Tensor:
    return x**3


batches.register_fake(torch.empty_like)
batches.register_autograd(
    lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
batches.register_vmap(lambda info, in_dims, x: (batches(x.flip(in_dims[0])), in_dims[0]))


@rows("function", [BatchesWrong.apply, batches])
def test_a_wrong_rule_of_vmap_is_told_where_vmap_runs(function):
    def over_samples(f):
        with hog.second_order():
            torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(X)

    assert told(hvp, function) == []
    (text,) = told(over_samples, function)
    assert "is wrong by its vmap rule: the value under vmap" in text
    assert told(over_samples, lambda x: x.exp() * Cube.apply(x)) == []


class Sample(Function):
    """z = mean + e^s n of a sampler that keeps no graph."""

    surrogate = True  # its first derivative is that of the sampler, which it cannot show

    @staticmethod
    def forward(ctx, z, mean, s):
        z = z.clone()
        ctx.save_for_backward(z, mean)
        return z

    backward = by_saved(lambda g, z, mean: (None, g, g * (z - mean)))


def from_elsewhere(function):
    def call(x):
        given = (x.sin(), 0.3 * x) if function is Sample else (x,)
        with torch.no_grad():
            z = given[0] + given[1].exp() if function is Sample else (x + 3).sqrt()
        return function.apply(z, *given)

    return call


@pytest.mark.parametrize("name", ["hvp", "r1", "MAML", "laplacian", "hypergradient"])
def test_a_derivative_that_is_attached_to_a_value_from_elsewhere(name):
    call = ENTRY_POINTS[name]
    (text,) = told(call, from_elsewhere(Root))
    assert "the first derivative of Root was not examined: its value is that of `z`" in text
    assert told(call, from_elsewhere(Sample)) == []
    (text,) = told(call, from_elsewhere(RootOfConstant))
    assert "the second derivative of RootOfConstant is wrong" in text
    for function in (Root, Sample):
        assert hog.verify(from_elsewhere(function), X).ok


def test_a_cause_is_measured_beside_a_point_where_it_vanishes():
    """The second derivative of a cube at zero."""
    entry_points.forget_verdicts()
    (text,) = told(lambda f: hog.hvp(lambda x: (f(x) + x.square()).sum(), 0 * X, X), Detached.apply)
    assert "leaves the graph by .detach()" in text
    assert hog.verify(Detached, 0 * X).failed[0].name == "detached: .detach()"


def test_a_backward_that_is_another_one_with_a_graph_is_told_as_that():
    (text,) = told(hvp, WRONG["zero with a graph"][0])
    assert text.startswith("hvp: the first derivative of WithoutGraph is wrong")
    assert "depends on whether gradients are enabled" in text


class OfWeights(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, weight):
        return self.function(weight)


# No derivative by the points runs through a Function of the weights: only the user's backward does.
LATER = {
    "r1": lambda critic: penalties.r1(critic, X),
    "jacobian": lambda critic: penalties.jacobian(critic, X),
    "forces": lambda critic: penalties.forces(critic, X).forces.square().sum(),
    "laplacian": lambda critic: hog.laplacian(lambda x: critic(x).squeeze(1), X)[1].square().sum(),
}


@rows("name", LATER)
def test_what_only_the_users_backward_differentiates_is_told_then(name):
    def call(function):
        critic = Net(torch.sin)
        parametrize.register_parametrization(critic.first, "weight", OfWeights(function))
        LATER[name](critic).backward()

    (text,) = told(call, WRONG["first order"][0])
    assert f"{name}: the first derivative of WrongFactor is wrong" in text
    assert told(call, WRONG["an intermediate saved"][0]) == []  # a first derivative is taken
    assert told(call, Cube.apply) == []


def applied_before(function):
    x = X.clone().requires_grad_()
    y = (function(x) + x**3).sum()
    with hog.second_order():
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        torch.autograd.grad(hog.ops.tanh(g).sum(), x, create_graph=True)


def test_what_was_applied_before_the_context_is_named():
    entry_points.forget_verdicts()
    for function in (
        Detached,
        Sine,
    ):  # the derivative of the latter is another Function, applied inside
        (text,) = told(applied_before, function.apply)
        assert f"second_order: {function.__name__} was not examined: it was applied before" in text
    assert told(applied_before, torch.sin) == []
    told(by_hand_of, Sine.apply)
    assert len(told(by_hand_of, lambda x: torch.func.vmap(Detached.apply)(x))) == 1
    entry_points.forget_reports()
    assert told(applied_before, Sine.apply) == []  # known to be right
    assert "Detached was not examined" in told(applied_before, Detached.apply)[0]


def test_on_wrong():
    function, _ = WRONG["an intermediate saved"]
    with hog.second_order(on_wrong="ignore"):
        assert told(hvp, function) == []
    with (
        hog.second_order(on_wrong="raise"),
        pytest.raises(VerificationError, match=r"hvp: .*SavesExp"),
    ):
        hvp(function)
    with hog.second_order(on_wrong="raise"), hog.second_order(on_wrong="ignore"):
        for stand_ins in (True, False):  # the outermost decides, each time
            with pytest.raises(VerificationError, match="SavesExp"):
                hvp(function, stand_ins=stand_ins)
    with hog.second_order(), hog.second_order(on_wrong="raise"), pytest.raises(VerificationError):
        hvp(function)
    assert told(hvp, function)
    with pytest.raises(ValueError, match="on_wrong: expected"), hog.second_order(on_wrong="shout"):
        pass


@pytest.mark.parametrize("error", [0.0, 1e-2])  # of the gradient, as of a differential equation
def test_a_second_derivative_of_which_nothing_is_left_raises(error):
    class Adjoint(Detached):
        __module__ = "torchdiffeq._impl.adjoint"

        backward = staticmethod(lambda ctx, g: (1 + error) * Detached.backward(ctx, g))

    def loss(p, batch=None):
        return Adjoint.apply(p).sum()

    message = (
        r"Adjoint is wrong.*Use `torchdiffeq.odeint` .*Nothing of .* is left.*finite-differences"
    )
    for call in (
        lambda: hog.hvp(loss, X, X),
        lambda: hog.hvp(loss, X, X),  # each time
        lambda: hog.hessian(loss, X),
        lambda: hog.HessianOperator(loss, X, torch.zeros(1)) @ X,
    ):
        with pytest.raises(NoSecondDerivative, match=message):
            call()
    with hog.second_order(on_wrong="ignore"):
        hog.hvp(loss, X, X)
    with pytest.warns(UserWarning, match=r"Adjoint is wrong.*Use `torchdiffeq.odeint`"):
        hog.hvp(lambda p: loss(p) + p.pow(4).sum(), X, X)  # a part is there
    assert told(lambda f: hog.hvp(lambda p: p.sum(), X, X), None) == []


def test_a_kernel_of_gpytorch_is_told_with_the_setting_that_avoids_it():
    class Covariance(Detached):
        __module__ = "gpytorch.functions.rbf_covariance"

    with pytest.warns(UserWarning, match=r"Covariance is wrong.*trace_mode\(True\)"):
        hog.hvp(lambda p: Covariance.apply(p).sum() + p.pow(4).sum(), X, X)


def test_what_does_not_enter_the_derivative_is_not_told():
    function, _ = WRONG["an intermediate saved"]
    assert told(hvp, lambda x: x + function(x).detach()) == []
    assert told(hvp, lambda x: x + function(torch.ones_like(x))) == []
    with torch.no_grad():
        assert told(lambda f: penalties.r1(Net(f), X), function) == []
    assert told(hvp, lambda x: x + function(x))


def test_judges_tell_by_their_reports():
    function = Detached.apply
    products = lambda p: hog.hvp(lambda p: function(p).sum(), p, torch.ones_like(p), create_graph=True)[1]  # noqa: E731  # fmt: skip
    assert told(lambda _: hog.verify(products, X), function) == []
    assert told(lambda _: hog.audit(*problem(function)[:2], (X, Y)), function) == []
    assert told(lambda _: products(X.clone().requires_grad_()), function)


def test_inside_transforms():
    function = Detached.apply
    loss = lambda p, x: function(p * x).sum()  # noqa: E731
    p, v = torch.ones(3, dtype=F64), torch.ones(3, dtype=F64)
    (text,) = told(lambda _: torch.func.vmap(lambda x: hog.hvp(loss, p, v, x)[1])(X), function)
    assert "hvp: the second derivative of Detached is wrong" in text


def test_kinds_of_arguments_are_examined_one_by_one(monkeypatch):
    class New(Cube):
        pass

    class Product(Mul):
        pass

    seen = []
    examine = entry_points.examine
    monkeypatch.setattr(entry_points, "examine", lambda app: seen.append(app) or examine(app))
    for dtype, count in ((F64, 1), (F64, 1), (torch.float32, 2), (torch.float32, 2)):
        hog.hvp(lambda p: New.apply(p).sum(), X.to(dtype), X.to(dtype))
        assert len(seen) == count
    hog.hvp(lambda p: New.apply(p).sum(), X.reshape(-1), X.reshape(-1))
    assert len(seen) == 3
    for _ in range(2):  # another memory layout
        hog.hvp(lambda p: New.apply(torch.cat([p, p], 1)[:, :3]).sum(), X, X)
    assert len(seen) == 4
    (x,) = seen[-1].app.args
    assert x.stride() != X.stride()
    for needed in (
        Product.apply,
        lambda a, b: Product.apply(a, b.detach()),
    ) * 2:  # which need gradients
        hog.hvp(lambda p, needed=needed: needed(p, p + 1).sum(), X, X)
    assert len(seen) == 6


# What is not examined


class Slow(Cube):
    pass


class Communicates(Cube):
    calls = 0

    @staticmethod
    def backward(ctx, g):
        Communicates.calls += 1
        torch.distributed.all_reduce(g.detach().clone())
        return Cube.backward(ctx, g)


def test_what_would_take_too_long_is_told(monkeypatch):
    monkeypatch.setattr(examination, "SECONDS", 0.0)
    (text,) = told(hvp, Slow.apply)
    assert "Slow was not examined: that would take some" in text
    assert told(hvp, Slow.apply) == []


def test_a_slow_function_is_run_a_few_times_only(monkeypatch):
    class Sleeps(Cube):
        @staticmethod
        def forward(x):
            seen.append(len(x))
            time.sleep(0.06)
            return x**3

    seen = []
    monkeypatch.setattr(examination, "SECONDS", 0.1)
    (text,) = told(hvp, Sleeps.apply)
    assert "Sleeps was not examined: that would take some" in text
    assert seen == [4, 4, 2]  # the user's, a trial, and one with fewer rows


@rows("count", [8, 64])  # there is time for 8, but not where these turn out to be wrong
def test_of_many_rows_some_are_examined(count, monkeypatch):
    class Rows(Cube):
        @staticmethod
        def forward(x):
            seen.add(len(x))
            time.sleep(2e-3 * len(x))
            return x**3

    seen = set()
    monkeypatch.setattr(examination, "SECONDS", 1.0)
    x = X.repeat(count // 4, 1000)
    assert told(lambda f: hog.hvp(lambda p: f(p).sum(), x, x), Rows.apply) == []
    assert min(seen) < max(seen) == count


def test_communication_is_not_run_again_and_told(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        (text,) = told(hvp, Communicates.apply)
        assert "not examined: it communicates between processes" in text
    finally:
        torch.distributed.destroy_process_group()


# What an examination leaves as it was


class Changes(Cube):
    """Draws random numbers, counts its calls, and updates a buffer of its own."""

    count = 0
    mean = torch.zeros((), dtype=F64)

    @staticmethod
    def forward(x):
        Changes.count += 1
        Changes.mean.add_(x.detach().mean())
        return x**3 * torch.rand((), dtype=x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.factor = (output / inputs[0] ** 3).mean()

    backward = staticmethod(lambda ctx, g: Cube.backward(ctx, g) * ctx.factor)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", [Changes, Accumulates])
def test_nothing_of_the_users_is_changed(function):
    def run(on_wrong):
        torch.manual_seed(0)
        Changes.count, WEIGHT.grad = 0, None
        Changes.mean.zero_()
        with hog.second_order(on_wrong=on_wrong):
            product = hvp(function.apply)[1]
        state = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.random.get_rng_state(),
        )
        return product, state, Changes.count, Changes.mean.clone(), WEIGHT.grad

    examined, plain = run("warn"), run("ignore")
    assert entry_points._VERDICTS[function]
    assert_close(examined, plain, rtol=0, atol=0)


LEFT = [  # the range of a point, what was examined, whether it is another one
    ((0, 1), (0, 1), False), ((-0.4, 1.4), (0, 1), False), ((-0.6, 1), (0, 1), True), ((0, 1.6), (0, 1), True),
    ((2, 2), (2, 2), False), ((1.1, 2.9), (2, 2), False), ((0.9, 2), (2, 2), True), ((2, 3.1), (2, 2), True),
]  # fmt: skip


@rows("now, known, left", LEFT)
def test_values_are_other_ones_beyond_half_of_the_width_that_was_examined(now, known, left):
    assert examination.Range(*known).contains(examination.Range(*now)) is not left


def test_a_step_after_the_first_costs_what_it_costs_without(monkeypatch):
    """Counted: the torch operations, attributes of tensors, and what is applied, copied or walked."""

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(func)
            return func(*args, **(kwargs or {}))

    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            operations.append(func)
            return func(*args, **(kwargs or {}))

    for _ in range(32):  # at the first ones the range of the values is looked at
        hvp(Cube.apply)
    counts = []
    monkeypatch.setattr(entry_points, "make_case", None)
    monkeypatch.setattr(entry_points, "examine", None)
    for on_wrong in ("warn", "ignore"):
        operations = []
        with hog.second_order(on_wrong=on_wrong), Counted(), Seen():
            hvp(Cube.apply)
        counts.append(operations)
    assert counts[0] == counts[1]


class Exponents:
    """Holds a number, as a module that makes a Function in its forward does."""

    exponent = 3


def power(x, exponent=3, factor=1.0, cut=False, holder=None, also=None):
    """A cube by a class that is made in each call, with what its methods close over."""
    read = lambda y: y.detach() if cut else y  # noqa: E731

    class Power(Function):
        doubled = factor == 2

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            assert also is None or len(also) == 2
            return factor * x ** (exponent if holder is None else holder.exponent)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            n = exponent if holder is None else holder.exponent
            return factor * n * g * read(x) ** (n - 1)

    return Power.apply(x)


HOLDER = Exponents()
# Calls of `power`, the second after the first, and whether the second one is examined.
MADE_ANEW = {
    "the same code": ({}, {}, False),
    "equal constants": ({"exponent": 2, "also": [1, "a"]}, {"exponent": 2, "also": [1, "a"]}, False),
    "the same object": ({"holder": HOLDER}, {"holder": HOLDER}, False),
    "tensors of one kind": ({"also": (X, X)}, {"also": (2 * X, X)}, False),
    "another constant": ({}, {"exponent": 2}, True),
    "another number": ({}, {"factor": 2.0}, True),
    "another flag": ({}, {"cut": True}, True),
    "another object": ({"holder": HOLDER}, {"holder": Exponents()}, True),
    "another container": ({"also": [1, 2]}, {"also": {1: 2, 3: 4}}, True),
    "tensors of another kind": ({"also": (X, X)}, {"also": (X.float(), X)}, True),
}  # fmt: skip


@rows("name", MADE_ANEW)
def test_classes_that_a_function_makes_anew_share_a_verdict(name, monkeypatch):
    first, second, again = MADE_ANEW[name]
    examined = []
    monkeypatch.setattr(
        entry_points, "examine", lambda given: examined.append(given) or examination.examine(given)
    )
    entry_points.forget_verdicts()

    def texts(options):
        return told(
            lambda _: hog.hvp(lambda x: (power(x, **options) + x.square()).sum(), X, X), None
        )

    assert texts(first) == []
    assert len(examined) == 1
    found = texts(second)
    assert len(examined) == 1 + again
    assert bool(found) == (name == "another flag")
    # told once, of all of these classes
    assert texts(second) == []
    assert len(examined) == 1 + again


def test_a_class_made_anew_holds_nothing_that_it_closes_over():
    gc.collect()  # of other tests' classes
    known = len(function_identity._IDENTITIES)

    def derive():
        holder, tensor = Exponents(), X.clone()
        hog.hvp(lambda x: power(x, holder=holder, also=(tensor, tensor)).sum(), X, X)
        assert len(function_identity._IDENTITIES) == known + 1
        return weakref.ref(holder), weakref.ref(tensor)

    gone = derive()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert len(function_identity._IDENTITIES) == known


class Weighted(Function):
    """x^2 w, of a weight that `read` finds in an object; other arguments are given its gradient."""

    @staticmethod
    def forward(ctx, x, read, held, *weights):
        ctx.save_for_backward(x)
        ctx.weight, ctx.count = lambda: read(held), len(weights)
        return x**2 * read(held)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * ctx.weight() * g, None, None, *[x**2 * g] * ctx.count


@dataclasses.dataclass(frozen=True)
class Config:
    weight: object


class Keeps(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight


by_name, first = operator.attrgetter("weight"), operator.itemgetter(0)
HOLDERS = {  # what makes an object of a weight, and what reads it
    "a list": (lambda w: [w], first),
    "a list that holds it twice": (lambda w: [w, w], first),
    "a dict of lists": (lambda w: {"a": [w]}, lambda x: x["a"][0]),
    "a deque": (lambda w: deque([w]), first),
    "a frozenset": (lambda w: frozenset([w]), lambda x: next(iter(x))),
    "a dataclass": (Config, by_name),
    "a namespace": (lambda w: SimpleNamespace(weight=w), by_name),
    "dataclasses in a list": (lambda w: [Config(w)], lambda x: x[0].weight),
    "a module's attribute": (Keeps, by_name),
    "a module in a list": (lambda w: nn.ModuleList([Keeps(w)]), lambda x: x[0].weight),
    "a lambda": (lambda w: lambda: w, lambda x: x()),
    "a partial": (lambda w: functools.partial(torch.mul, w), lambda x: x.args[0]),
}


@rows("name", HOLDERS)
def test_tensors_inside_an_object_are_found(name):
    hold, read = HOLDERS[name]
    weight = torch.linspace(1, 2, X.numel(), dtype=F64).reshape(X.shape)

    def texts(loss):
        entry_points.forget_verdicts()
        return told(lambda _: hog.hvp(loss, (X, weight), (X, weight)), None)

    # a constant; the weight is an argument too; its gradient is lost
    assert (
        texts(lambda p: Weighted.apply(p[0], read, hold(weight)).sum() + p[1].square().sum()) == []
    )

    def given(p):
        w = p[1] * 1
        return Weighted.apply(p[0], read, hold(w), w).sum()

    assert texts(given) == []
    (text,) = texts(lambda p: Weighted.apply(p[0], read, hold(p[1] * 1)).sum())
    assert "`held` holds tensors that need gradients" in text
    # an object that held a constant before
    entry_points.forget_verdicts()
    for w in (lambda p: weight, lambda p: p[1] * 1):

        def loss(p, w=w):
            return Weighted.apply(p[0], read, hold(w(p))).sum() + p[1].square().sum()

        found = told(lambda _, loss=loss: hog.hvp(loss, (X, weight), (X, weight)), None)
    assert "`held` holds tensors that need gradients" in found[0]
    # arguments that are given twice the gradient
    twice = type("Twice", (Weighted,), {"backward": staticmethod(
        lambda ctx, g: (*Weighted.backward(ctx, g)[:3], *(2 * h for h in Weighted.backward(ctx, g)[3:]))
    )})  # fmt: skip

    def wrong(p):
        w = p[1] * 1
        return twice.apply(p[0], read, hold(w), w).sum()

    (text,) = texts(wrong)
    assert "first derivative of Twice is wrong" in text


def _outputs(cut_second=False, first_of_second=1.0):
    """sin and cos as one Function."""

    class Outputs(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin(), x.cos()

        @staticmethod
        def backward(ctx, g, h):
            (x,) = ctx.saved_tensors
            return g * x.cos() - first_of_second * h * (x.detach() if cut_second else x).sin()

    return Outputs.apply


@rows("fault", ["", "cut_second", "first_of_second"])
@rows("used", [(0,), (1,), (0, 1)])
def test_the_verdict_is_of_the_outputs_that_are_used(fault, used):
    function = _outputs(**{fault: 2} if fault else {})
    doors = {
        "hvp": lambda f: hog.hvp(lambda x: f(x).sum(), X, X),
        "laplacian": lambda f: hog.laplacian(lambda x: f(x).sum(1), X),
        "second_order": by_hand_of,
    }
    for door in doors.values():
        entry_points.forget_reports()
        texts = told(
            lambda _, door=door: door(lambda x: sum(function(x)[i] for i in used) + x.square()),
            None,
        )
        assert bool(texts) == (bool(fault) and 1 in used)


def by_hand_of(function):
    x = X.clone().requires_grad_()
    with hog.second_order():
        torch.autograd.grad(function(x).sum(), x, create_graph=True)


OWN = torch.Generator()


def masked(draw, read):
    """x^3 times a mask that a generator of its own draws."""

    class Masked(Function):
        own = OWN

        @staticmethod
        def forward(ctx, x):
            mask = draw(Masked, x.shape)
            ctx.save_for_backward(x, mask.to(x.dtype))
            return x**3 * mask

        @staticmethod
        def backward(ctx, g):
            x, mask = ctx.saved_tensors
            return 3 * g * read(x) ** 2 * mask

    return Masked.apply


def _closing_over(generator):
    return lambda kind, shape: torch.rand(shape, generator=generator)


DRAWS = {
    "a global": lambda kind, shape: torch.rand(shape, generator=OWN),
    "an attribute": lambda kind, shape: torch.rand(shape, generator=kind.own),
    "a closure": _closing_over(torch.Generator()),
    "a closure that holds it in an object": _closing_over(Config(torch.Generator()).weight),
}


@rows("name", DRAWS)
def test_generators_of_a_function_draw_the_same_numbers_in_an_examination(name):
    hog.hvp(lambda x: x.sin().sum(), X, X)  # imports
    OWN.manual_seed(0)
    state = OWN.get_state()
    right, wrong = (masked(DRAWS[name], read) for read in (lambda x: x, torch.Tensor.detach))
    assert told(lambda f: hog.hvp(lambda x: f(x).sum(), X, X), right) == []
    drawn = torch.rand(X.shape, generator=OWN.set_state(state))
    if name in ("a global", "an attribute"):  # once, by the call itself
        (again,) = torch.autograd.functional.hvp(lambda x: (x**3 * drawn).sum(), X, X)[1:]
        OWN.set_state(state)
        assert_close(hog.hvp(lambda x: right(x).sum(), X, X)[1], again)
        assert_close(
            torch.rand(X.shape, generator=OWN),
            torch.rand(2, *X.shape, generator=OWN.set_state(state))[1],
        )
    (text,) = told(lambda f: hog.hvp(lambda x: (f(x) + x.square()).sum(), X, X), wrong)
    assert "second derivative of masked.<locals>.Masked is wrong" in text


class Checkpointed(nn.Module):
    """Two layers, one of which is recomputed in backward; `at` 0 is the first one."""

    def __init__(self, at, reentrant):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 1)]).double()
        self.at, self.reentrant = at, reentrant

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            recomputes = i == self.at
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if recomputes else layer(x)
        return x


FIRST_DERIVATIVES = {
    "hvp": lambda loss, p: hog.hvp(loss, p, p, (X, Y)),
    "gradient": lambda loss, p: hog.HessianOperator(loss, p, [(X, Y), (X, Y)]).gradient(),
    "gradient of a GGN": lambda loss, p: hog.GGNOperator(loss, p, (X, Y)).gradient(),
    "per_example_gradients": lambda loss, p: hog.per_example_gradients(loss, p, (X, Y)),
    "norms": lambda loss, p: curvature.per_example_gradient_norms(loss, p, (X, Y)),
    "noise": lambda loss, p: curvature.gradient_noise_scale(loss, p, (X, Y)),
    "sharpness": lambda loss, p: curvature.critical_sharpness(loss, p, (X, Y)),
    "MAML": lambda loss, p: hog.MAML(loss.model, F.mse_loss).loss([((X, Y), (X, Y))]),
}  # fmt: skip


@rows("name", FIRST_DERIVATIVES)
@rows(("at", "reentrant"), [(0, True), (0, False), (1, True), (1, False)])
@pytest.mark.filterwarnings("ignore:MAML loops over:UserWarning")
def test_a_checkpoint_that_loses_gradients_is_told(name, at, reentrant):
    model = Checkpointed(at, reentrant)
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    entry_points.forget_reports()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            FIRST_DERIVATIVES[name](loss, params)
        except UnsupportedError as error:  # torch refuses `autograd.grad` through some
            warnings.warn(f"test_entry_points.py: {error}", stacklevel=1)
    told_of = [text for one in found if "use_reentrant" in (text := str(one.message))]
    assert bool(told_of) == reentrant
    assert all("test_entry_points.py" in text for text in told_of)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_each_checkpoint_that_loses_gradients_is_told():
    model = nn.Linear(3, 1).double()
    weight = {"weight": model.weight}
    twice = (
        lambda x: checkpoint(model, x, use_reentrant=True),
        lambda x: checkpoint(model, x, use_reentrant=True),
    )  # differ in the number of their line
    entry_points.forget_reports()
    for recomputed in twice:
        loss = lambda p, x: (x @ p["weight"].T).square().sum() + recomputed(x).sum()  # noqa: B023, E731
        with pytest.warns(UserWarning, match="use_reentrant"):
            hog.hvp(loss, weight, weight, X)


class Softmax(Function):
    """By its output, which has no graph: the second derivative is cut."""

    cut = True

    @staticmethod
    def forward(ctx, x):
        p = x.softmax(-1)
        ctx.save_for_backward(p.clone() if Softmax.cut else p)
        return p

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * (g - (g * p).sum(-1, keepdim=True))


FILLS = [-torch.inf, -1e9, torch.finfo(torch.float32).min, -1e4, -30.0]


@rows(("fill", "width"), [*((fill, 3) for fill in FILLS), (-1e9, 24)])
def test_masked_scores_hide_no_fault(fill, width, monkeypatch):
    X = torch.linspace(-1.2, 1.4, 4 * width, dtype=F64).reshape(4, width)
    mask = torch.ones(4, width).triu(1).bool()  # of the wide ones more than nine in ten
    for cut in (True, False):
        monkeypatch.setattr(Softmax, "cut", cut)
        entry_points.forget_verdicts()
        loss = lambda f: hog.hvp(lambda x: f(x.masked_fill(mask, fill)).pow(3).sum(), X, X)  # noqa: E731
        texts = told(loss, Softmax.apply)
        assert ["second derivative of Softmax is wrong" in text for text in texts] == [True] * cut
        assert hog.verify(Softmax, X.masked_fill(mask, fill)).ok is not cut


def in_half(function, under):
    """The function of numbers in bfloat16."""

    def run(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=under):
            return function.apply(x.bfloat16()).to(x.dtype)

    return run


def test_what_autocast_casts_is_examined_as_it_is_cast():
    for name in ("hvp", "r1", "MAML"):
        assert told(ENTRY_POINTS[name], in_half(CastCube, False)) == []  # under one key no more
        (text,) = told(ENTRY_POINTS[name], in_half(CastCube, True))
        assert "second derivative of CastCube is wrong" in text
        assert "It saves input `x` as copies in other dtypes" in text
        assert told(ENTRY_POINTS[name], in_half(CastRelu, True)) == []


def test_a_kernel_of_half_precision_alone_is_examined_by_means():
    for wrong, words in ((None, ""), ({"factor": 2}, "first"), ({"wrong": torch.Tensor.detach}, "second")):  # fmt: skip
        texts = told(ENTRY_POINTS["hvp"], in_half(of_half_alone(**wrong or {}), False))
        assert [f"the {words} derivative of OfHalf is wrong" in text for text in texts] == [True] * bool(words)  # fmt: skip


def sine_cut_beyond(x, limit=4):
    """A sine whose second derivative is cut for values beyond a limit."""
    return CutFrom.apply(x, limit)


class CutFrom(Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.where(x > ctx.limit, x.detach(), x).cos(), None


ONE_CALL = {
    "two values": lambda f: hog.hvp(lambda x: (f(x) + f(x + 5)).sum(), X, X),
    "two layers": lambda f: hog.hvp(lambda x: f(5 + f(x)).sum(), X, X),
    "two numbers": lambda f: hog.hvp(lambda x: (f(x) + f(x, -9)).sum(), X, X),
    "two batches": lambda f: hog.HessianOperator(
        lambda p, b: f(p * b[0]).mean(), X[0].abs(), [(X,), (X.abs() + 9,)]
    ) @ X[0],
    "inner steps": lambda f: hog.MAML(Net(lambda x: f(x) + f(x + 9)), F.mse_loss).loss([((X, Y), (X, Y))]),
}  # fmt: skip


@rows("name", ONE_CALL)
def test_values_far_apart_in_one_call_are_examined_each(name):
    entry_points.forget_verdicts()
    assert any(
        "second derivative of CutFrom" in text for text in told(ONE_CALL[name], sine_cut_beyond)
    )
    entry_points.forget_verdicts()
    assert told(ONE_CALL[name], lambda x, *limit: sine_cut_beyond(x, 1e9)) == []


def test_code_of_aot_function_is_told():
    traced = aot_function(lambda a, x: (a @ x).sin(), lambda graph, inputs: graph)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        hog.hvp(
            lambda x: (traced(X.T, x).sum() + x.square()).sum(), X, X, mode="reverse-over-reverse"
        )
    texts = [text for one in found if (text := str(one.message)).startswith("hvp: ")]
    assert len(texts) == 1
    assert texts[0].startswith("hvp: code that `aot_function` made is differentiated")


class ForgetsFactor(Function):
    """factor x^2, whose backward is right for a factor of one."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        return factor * x**2

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0], None


@rows("numbers", [(1.0, 1.0, 2.0), (1, 1, 3), (1.0, 1.0, 1.1), (1.0, 1.0, -1.0)])
def test_a_function_is_examined_again_for_other_numbers(numbers):
    entry_points.forget_verdicts()
    found = [
        told(lambda f, n=n: hog.hvp(lambda x: f(x, n).sum(), X, X), ForgetsFactor.apply)
        for n in numbers
    ]
    assert [len(texts) for texts in found] == [0, 0, 1]


class NumberInMemory(Function):
    """y = x^2, computed by NumPy in the memory of y, in float32 alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty(x.shape, dtype=torch.float32)
        y.numpy()[:] = x.detach().float().numpy() ** 2
        return y.to(x.dtype)

    backward = by_saved(lambda g, x: 2 * g * x)


def test_code_that_is_not_torchs_is_examined_in_its_own_dtype():
    x = X.float()
    assert told(lambda f: hog.hvp(lambda p: f(p).sum(), x, x), NumberInMemory.apply) == []


class Columns(Function):
    """The columns of a matrix. Where the memory of their gradients is that of a matrix, backward returns
    it, and its graph has the first of them only."""

    forward = staticmethod(lambda ctx, x: x.unbind(1))

    @staticmethod
    def backward(ctx, *grads):
        first = grads[0]
        here = [g.data_ptr() - first.data_ptr() for g in grads]
        step = here[1] // first.element_size()
        if here == [k * step * first.element_size() for k in range(len(grads))] and step > 0:
            return first.as_strided((len(first), len(grads)), (first.stride(0), step))
        return torch.stack(grads, 1)


def test_incoming_gradients_may_be_parts_of_one_tensor():
    def columns(x):
        return torch.stack(Columns.apply(x), 1).sin()

    (text,) = told(lambda f: hog.hvp(lambda x: f(x).sum(), X, X), columns)
    assert "incoming gradients that are parts of one tensor" in text


class Scales(Function):
    """sum_j c_j sin x_j in NumPy, by float32 numbers, where the c_j differ by orders of magnitude."""

    @staticmethod
    def forward(ctx, x):
        c, x = np.array([1.0, 1e-2, 1e-4], "f"), x.detach().numpy().astype("f")
        ctx.kept = torch.from_numpy(c * np.cos(x))
        return torch.from_numpy(c * np.sin(x)).sum(1)

    backward = staticmethod(lambda ctx, g: g[:, None] * ctx.kept)


def test_what_is_exactly_zero_was_not_rounded():
    x = X.float()
    (text,) = told(lambda f: hog.hvp(lambda p: f(p).square().sum(), x, x), Scales.apply)
    assert "second derivative of Scales is wrong" in text


# sin(1e13 x), which no difference resolves.
Oscillates = made(
    "Oscillates", lambda x: (1e13 * x).sin(), lambda g, x: g * 1e13 * (1e13 * x).cos()
)


def test_what_cannot_be_compared_is_told():
    (text,) = told(lambda f: hog.hvp(lambda p: f(p).sum(), X, X), Oscillates.apply)
    assert "Oscillates was not examined in full" in text


class MaskedSoftmax(Function):
    """The softmax of all but the first column, whose second derivative has 0 (-inf)."""

    forward = saving_inputs(lambda x: MaskedSoftmax.softmax(x)[1])

    @staticmethod
    def backward(ctx, g):
        y, p = MaskedSoftmax.softmax(*ctx.saved_tensors)
        return p * (g - (p * g).sum(1, keepdim=True)) + 0 * torch.where(y.isinf(), 0.0, p * y)

    @staticmethod
    def softmax(x):
        y = x.index_fill(1, torch.tensor([0]), -torch.inf)
        return y, y.softmax(1)


def test_the_line_where_nan_arises_is_told():
    text, infinite = told(
        lambda f: hog.hvp(lambda p: f(p).square().sum(), X, X), MaskedSoftmax.apply
    )
    assert "infinite or NaN, first behind" in infinite
    assert "NaN arises in the derivative of" in text
    assert "0 * torch.where(y.isinf()" in text


class DropsLarge(Function):
    """The identity, whose gradient is zero where the incoming one is large."""

    forward = staticmethod(lambda ctx, x: x.clone())

    backward = staticmethod(lambda ctx, g: torch.where(g.abs() > 0.01, 0.0, g))


class Stops(DropsLarge):
    backward = staticmethod(lambda ctx, g: torch.zeros_like(g))


def test_a_gradient_that_is_zero_for_some_incoming_gradients_is_no_stop_gradient():
    (text,) = told(lambda f: hog.hvp(lambda p: f(p).square().sum(), X, X), DropsLarge.apply)
    assert "first derivative of DropsLarge is wrong" in text
    assert told(lambda f: hog.hvp(lambda p: (f(p) * p).sum(), X, X), Stops.apply) == []


def test_values_that_are_no_good_are_not_the_last_word(monkeypatch):
    class Cut(Detached):
        pass

    class Right(Cube):  # of its own: verdicts are kept in the process
        pass

    examined = []
    examine = entry_points.examine
    monkeypatch.setattr(entry_points, "examine", lambda a: examined.append(a) or examine(a))

    def at(scale, function=Cut):
        return told(lambda f: hog.hvp(lambda p: (f(p * scale) * p).sum(), X, X), function.apply)

    (text,) = at(float("nan"))
    assert "not examined in full" in text
    assert at(float("nan")) == []  # told once
    (text,) = at(1.0)
    assert "second derivative of" in text
    for _ in range(3):
        at(float("nan"), Right)
    assert len(examined) == 3 + 3  # of Cut; of Right, whose values were never good
    at(float("nan"), Right)
    assert len(examined) == 6


def test_a_derivative_without_elements_is_not_examined():
    class Cut(Detached):
        pass

    assert told(lambda f: hog.hvp(lambda p: f(p[:0]).sum() + p.sum(), X, X), Cut.apply) == []
    assert told(lambda f: hog.hvp(lambda p: f(p).sum(), X, X), Cut.apply)


class IntoBuffer(Cube):
    """Backward writes into memory, which raises with a graph."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        torch.mul(3 * x * x, g, out=result)
        return result


def test_an_error_in_a_backward_names_the_function_and_the_line():
    for call in (ENTRY_POINTS["hvp"], ENTRY_POINTS["r1"], ENTRY_POINTS["MAML"]):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call(IntoBuffer.apply)
        said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "The backward of IntoBuffer raised it, at" in said
        assert "`torch.mul(3 * x * x, g, out=result)`" in said


LAYOUTS = {
    "coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_are_left_as_they_are(layout):
    """One that a Function changes and restores itself, among those that it reaches."""

    class Shifted(OnGraphAgain):
        matrix = LAYOUTS[layout](ADJACENT)
        left = LAYOUTS[layout](torch.eye(3, dtype=F64))

        @staticmethod
        def forward(ctx, x):
            Shifted.left.values().add_(1)
            return OnGraphAgain.forward(ctx, x)

    class Lost(Shifted):
        backward = by_saved(lambda g, _, z: Lost.back(g * z.cos()))

    if layout == "coo":
        Shifted.left = Shifted.left.coalesce()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hog.hvp(lambda x: Shifted.apply(x).square().sum(), X, X)
    assert_close(Shifted.left.values(), torch.full((3,), 2.0, dtype=F64))  # by the user's run alone
    with pytest.warns(UserWarning, match=r"second derivative of .*Lost is wrong"):
        hog.hvp(lambda x: Lost.apply(x).square().sum(), X, X)


IN_CPP = """
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>
#include <ATen/ATen.h>
using namespace torch::autograd;
struct Squares : Function<Squares> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return 2 * x * x;
  }
  static variable_list backward(AutogradContext* ctx, variable_list g) {
    return {g[0] * 4 * ctx->get_saved_variables()[0]};
  }
};
struct ByHand : Node {
  SavedVariable saved;
  variable_list apply(variable_list&& g) override { return {g[0] * 4 * saved.unpack()}; }
};
at::Tensor by_hand(const at::Tensor& x) {
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    y = 2 * x * x;
  }
  if (!GradMode::is_enabled() || !x.requires_grad()) return y;
  auto node = c10::make_intrusive<ByHand>();
  node->set_next_edges(collect_next_edges(x));
  node->saved = SavedVariable(x, false);
  set_history(y, node);
  return y;
}
at::Tensor squares(const at::Tensor& x) { return Squares::apply(x); }
at::Tensor kernel(const at::Tensor& x) { return 2 * x * x; }
TORCH_LIBRARY(hoglib_cpp, m) { m.def("squares(Tensor x) -> Tensor"); m.def("by_hand", &by_hand); }
TORCH_LIBRARY_IMPL(hoglib_cpp, Autograd, m) { m.impl("squares", &squares); }
TORCH_LIBRARY_IMPL(hoglib_cpp, CompositeExplicitAutograd, m) { m.impl("squares", &kernel); }
"""


@pytest.fixture(scope="module")
def squares_in_cpp(tmp_path_factory):
    load_cpp(tmp_path_factory.mktemp("cpp"), IN_CPP)
    return torch.ops.hoglib_cpp


@pytest.mark.full
@rows("name", ["squares", "by_hand"])
def test_a_backward_in_cpp_is_named_as_not_examined(squares_in_cpp, name):
    """Of its node Python sees the name alone."""
    function = getattr(squares_in_cpp, name)
    words = {"squares": "Squares", "by_hand": "ByHand"}[name]
    refused = (
        "compile", "compile without check", "compiled_loss", "hvp compiled", "r1 compiled",
        "second_order before",  # no call of torch is seen after the context
    )  # fmt: skip
    for entry, call in ENTRY_POINTS.items():
        entry_points.forget_reports()
        texts = told(call, function)
        assert any(f"{words} was not examined" in text for text in texts) or entry in refused, entry
    with hog.second_order(on_wrong="ignore"):
        L = hog.laplacian(lambda x: function(x).sum(1), X)[1]
        tangent = hog.jvp(lambda x: function(x) + x, X, X)[
            1
        ]  # one term has no tangent in forward mode
    assert_close(L, torch.full_like(L, 12.0))
    assert_close(tangent, 4 * X**2 + X)
    assert hog.verify(squares_in_cpp.squares, X).ok


class Asserts(Function):
    """Refuses, within the backward of another Function."""

    forward = staticmethod(lambda ctx, x: x * 2)

    @staticmethod
    def backward(ctx, g):
        assert not g.any()
        return 2 * g


class ByAnother(Cube):
    backward = by_saved(lambda g, x: g * 1.5 * x * Asserts.apply(x))


class InPlaceInBackward(Cube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        slope = x * x
        grad = g * slope.sin()
        slope.mul_(3)
        return grad


class CallsAgain(Function):
    """Its backward runs the layer again, and leaves the gradients of it in .grad."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.layer(x).backward(g)
        return x.grad, None


class Again(nn.Linear):
    def forward(self, x):
        return CallsAgain.apply(x, super().forward)


SCALES = {}


class Kept(nn.Linear):
    """Keeps in a global what it made at first."""

    def forward(self, x):
        y = super().forward(x)
        return y * SCALES.setdefault(0, y.cos().mean())


def _again(kind, memory=None, mode="auto"):
    SCALES.clear()
    model, xs = nn.Sequential(nn.Linear(3, 3), kind(3, 3)), torch.randn(2, 4, 3)
    if memory:
        options = {"inner_lr": 0.1, "inner_steps": 2, "memory": memory, "over_tasks": "loop"}
        return lambda: hog.MAML(model, F.mse_loss, **options).loss(((xs, xs), (xs, xs)))
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    return lambda: [hog.hvp(loss, params, params, (xs[0], xs[0]), mode=mode) for _ in range(2)]


def _trained():
    model, xs = nn.Sequential(nn.Linear(3, 3), Again(3, 3)), torch.randn(4, 3)
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    decay = lambda p, h: loss(p, (xs, xs)) + h * sum(q.square().sum() for q in p.values())  # noqa: E731
    outer, h = lambda p, h: loss(p, (xs, xs)), torch.tensor(0.1)
    return lambda: meta.hypergradient(outer, decay, params, h, rule=meta.sgd(0.1), steps=2)


ANOTHERS = {
    "MAML, remat": (lambda: _again(Again, "remat"), "MAML: .*CallsAgain is wrong: .*accumulates into"),
    "MAML, checkpoint": (lambda: _again(Again, "checkpoint"), "MAML: .*CallsAgain is wrong"),
    "hypergradient": (_trained, "hypergradient: .*another call.*backward of CallsAgain raised it"),
    "kept, forward": (lambda: _again(Kept, mode="forward-over-reverse"), r"hvp: .*another call.*keeps a result"),
}  # fmt: skip


@rows("name", ANOTHERS)
def test_torchs_errors_about_tensors_of_another_call_are_explained(name):
    call, words = ANOTHERS[name]
    with pytest.raises(UnsupportedError, match=f"(?s){words}") as raised:
        call()()
    assert "INTERNAL ASSERT" not in str(raised.value)


@pytest.mark.parametrize("name", ["hvp", "MAML", "hypergradient"])
def test_what_raises_in_a_backward_is_named(name):
    with pytest.raises(AssertionError) as raised:
        ENTRY_POINTS[name](ByAnother.apply)
    (note,) = raised.value.__notes__
    assert "The backward of Asserts raised it, at " in note
    assert "`assert not g.any()`" in note
    with pytest.raises((RuntimeError, NoSecondDerivative)) as changed:
        ENTRY_POINTS[name](InPlaceInBackward.apply)
    text = " ".join([str(changed.value), *getattr(changed.value, "__notes__", [])])
    assert "backward of InPlaceInBackward" in text
