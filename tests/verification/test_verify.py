"""`hog.verify`: what it is asked for, what it leaves alone, what it says where nothing can be said."""

import json
import random
import re
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Function

import hoglib as hog
from hoglib import verification
from hoglib.verification.precision import exact_products
from tests.functions import (
    ClassicCube,
    Cube,
    Detached,
    WrongSign,
    by_saved,
    made,
    saving_inputs,
    saving_output,
)
from tests.refused import refused
from tests.zoo.cuts import Branch

x = torch.tensor([0.7, -1.3, 0.4])
Round = made("Round", lambda x: x.round(), lambda g, x: g)  # a straight-through gradient


class Sqrt(Function):
    """Right where it is defined, and NaN elsewhere."""

    forward = saving_output(lambda x: x.sqrt())

    backward = by_saved(lambda g, y: g / (2 * y))


def names(report, status):
    return {row.name for row in report if row.status == status}


# What is asked for.


def test_a_cut_for_other_values_than_the_inputs_is_found():
    report = hog.verify(Branch, x)
    assert report["second derivative: reverse-over-reverse"].status == "pass"
    row = report["second derivative: other values"]
    assert row.status == "fail"
    assert "leaves the graph by .detach()" in row.text
    # and one whose second derivative is zero at values that are larger by far
    cut = lambda g, x: g / torch.where(x.abs() > 2, x.detach(), x).cosh() ** 2  # noqa: E731
    saturating = hog.verify(made("Saturating", lambda x: x.tanh(), cut), x)
    assert saturating["second derivative: other values"].status == "fail"
    assert hog.verify(Cube, x)["second derivative: other values"].status == "pass"
    assert hog.verify(Sqrt, x.abs())["second derivative: other values"].status != "fail"


def test_every_mode_that_is_offered_is_checked():
    report = hog.verify(Cube, x)
    assert report.ok
    for title in ("reverse-over-reverse", "forward-over-reverse", "reverse-over-forward"):
        assert report[f"second derivative: {title}"].status == "pass"
    for name in ("vmap", "setup_context", "first derivative: forward"):
        assert report[name].status == "pass"
    assert not any(row.name.startswith("third") for row in report)


def test_orders_and_modes():
    report = hog.verify(Cube, x, orders=(1, 2, 3), modes=("rr", "forward-over-reverse"))
    rows = {row.name for row in report if "derivative" in row.name}
    third = {name for name in rows if name.startswith("third")}
    assert third == {f"third derivative: {by}-over-reverse" for by in ("reverse", "forward")}
    assert not any("over-forward" in name for name in rows)
    only = hog.verify(Cube, x, orders=2)
    assert "first derivative: reverse" not in {row.name for row in only}


def test_a_derivative_that_is_wrong_from_a_high_order_on():
    class Power(Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.save_for_backward(x)
            ctx.k = k
            return x**k

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            below = x.detach() ** 2 if ctx.k == 3 else Power.apply(x, ctx.k - 1)
            return g * ctx.k * below, None

    power = lambda x: Power.apply(x, 5)  # noqa: E731  # its slopes are right down to x^3
    assert hog.verify(power, x, orders=(1, 2, 3), modes="rr").ok
    report = hog.verify(power, x, orders=4, modes="rr")
    failed = {name for name in names(report, "fail") if " derivative: " in name}
    assert failed == {"fourth derivative: reverse-over-reverse"}
    assert hog.verify(lambda x: x.sin() * x.exp(), x, orders=(3, 4)).ok


def test_a_mode_that_was_asked_for_must_be_there():
    assert hog.verify(Round, x, surrogate=True).ok
    report = hog.verify(Round, x, surrogate=True, modes="fr")
    assert names(report, "fail") == {"second derivative: forward-over-reverse"}


def test_surrogates():
    report = hog.verify(Round, x)
    assert "pass surrogate=True" in report["first derivative: reverse"].text
    declared = hog.verify(Round, x, surrogate=True)
    assert declared.ok
    assert declared["first derivative: reverse"].status == "skip"
    assert declared["second derivative: reverse-over-reverse"].status == "pass"
    judged = {row.name for row in report} - {"gradients: linear", "state"}
    assert {"needs_input_grad", "device"} < judged
    assert {"needs_input_grad", "device"} < {row.name for row in declared}

    class Declares(Round):
        surrogate = True

    assert hog.verify(Declares, x).ok
    assert hog.verify(Declares.apply, x).ok
    assert hog.verify(hog.ops.define(torch.round, [lambda x, y: 1.0], surrogate=True), x).ok


def test_a_number_as_a_tensor_suits_every_device():
    forward, backward = (lambda x: torch.tensor(3.0) * x), (lambda g, x: torch.tensor(3.0) * g)
    assert hog.verify(made("Thrice", forward, backward), x)["device"].status == "pass"


def test_full_finds_one_wrong_element_of_many():
    class OneWrong(Cube):
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            slope = 3 * x**2
            factor = torch.ones_like(x)
            factor.view(-1)[17] = 1 + 1e-2
            return g * slope * factor

    many = torch.randn(30) + 2
    for full in (False, True):
        report = hog.verify(OneWrong, many, full=full, modes="rr", orders=1)
        assert "first derivative: reverse" in names(report, "fail"), full
    assert "element 17" in hog.verify(OneWrong, many).failed[0].text


def test_tolerances():
    class Slightly(Cube):
        backward = staticmethod(lambda ctx, g: 3 * (1 + 1e-5) * g * ctx.saved_tensors[0] ** 2)

    assert hog.verify(Slightly, x, modes="rr").ok
    assert not hog.verify(Slightly, x, modes="rr", rtol=1e-7, atol=1e-9).ok
    assert hog.verify(WrongSign, x, modes="rr", rtol=10.0, orders=1).ok
    assert hog.verify(Cube, x, eps=1e-4).ok


def test_a_reference():
    assert hog.verify(Cube, x, reference=lambda t: t**3).ok
    report = hog.verify(Cube, x, reference=lambda t: t**3 + 1e-4)
    assert names(report, "fail") == {"reference: value"}
    assert "output 0 differs from the reference" in report.failed[0].text
    broken = hog.verify(Cube, x, reference=lambda t: t @ torch.ones(7))
    assert "the reference raised" in broken.failed[0].text
    surrogate = hog.verify(Round, x, reference=torch.round, surrogate=True)
    assert surrogate["reference: first derivative"].status == "skip"


def test_nondeterminism():
    class Noisy(Cube):
        generate_vmap_rule = False

        @staticmethod
        def backward(ctx, g):
            return 3 * g * ctx.saved_tensors[0] ** 2 + 1e-9 * torch.rand_like(g) * g

    assert "deterministic" in names(hog.verify(Noisy, x), "fail")
    assert hog.verify(Noisy, x, nondet_tol=1e-6)["deterministic"].status == "pass"
    report = hog.verify(Noisy, x, surrogate=True)
    assert report["deterministic"].status == "warn"
    assert f"checks, with {len(report.warnings)} warning" in str(report)

    calls = []

    def counts(t):
        calls.append(1)
        return t * len(calls)

    assert "hidden nondeterminism" in hog.verify(counts, x).failed[0].text


def test_raise_exception():
    assert hog.verify(Cube, x, raise_exception=True).ok
    with pytest.raises(hog.VerificationError, match=r"the\s+sign is wrong"):
        hog.verify(WrongSign, x, raise_exception=True)


# How long it takes.


def slowly(seconds, seen):
    """x^3, which takes seconds for each row; the second derivative is lost."""

    class Slowly(Detached):
        @staticmethod
        def forward(x):
            seen.append(len(x))
            time.sleep(seconds * len(x))
            return x**3

    return Slowly


def test_of_inputs_that_would_take_too_long_the_first_rows_are_checked():
    seen = []
    hog.verify(Cube, x)  # the first one in a process imports parts of torch
    report = hog.verify(slowly(2e-6, seen), torch.linspace(0.5, 1.5, 20_000), time_limit=10)
    text = report["time"].text
    number, count = map(int, re.search(r"the first (\d+) of (\d+) rows", text).groups())
    assert report["time"].status == "skip"
    assert count == 20_000
    assert set(seen) == {number, count}
    assert seen.count(count) < 10
    assert [row.name for row in report.failed][:1] == ["detached: .detach()"]


def test_what_follows_is_left_out_when_the_time_is_over():
    function, inputs = slowly(2e-3, []), torch.linspace(0.5, 1.5, 2)
    report, whole = (hog.verify(function, inputs, time_limit=limit) for limit in (0.1, None))
    assert re.search(r"0.1 seconds were over after the check '\w+", report["time"].text)
    assert report["time"].status == "warn"
    assert not report.failed
    assert whole.failed
    assert "time" not in names(whole, "warn")


def test_a_bar_counts_the_checks(capfd):
    hog.verify(Cube, x, progress=True)
    assert re.search(r"verify Cube: [\d.]+check", capfd.readouterr().err)


# Where nothing can be said, and what is no fault.


def test_kinks_warn():
    at = torch.tensor([0.0, 1.0, -1.0])
    for function in (torch.relu, torch.abs, lambda t: t.clamp(-1, 1)):
        report = hog.verify(function, at)
        assert report.ok, str(report)
        assert report["kinks"].status == "warn"
    assert hog.verify(torch.relu, x)["kinks"].status == "pass"


def test_a_wrong_gradient_at_a_kink_is_still_wrong():
    Abs = made("Abs", lambda x: x.abs(), lambda g, x: g * torch.where(x == 0, 100.0, x.sign()))

    assert not hog.verify(Abs, torch.tensor([0.0, 1.0, -1.0])).ok


HARD = {
    "nearly singular": (torch.linalg.inv, torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-5]])),
    "far out": (torch.tanh, torch.tensor([30.0, -40.0])),
    "tiny": (lambda t: (1e9 * t).sin(), torch.tensor([1e-9, 3e-9])),
    "huge": (lambda t: t**2, torch.tensor([1e8, -3e9])),
    "fast oscillation": (lambda t: (1e3 * t).sin(), x),
    "many kinks": (lambda t: (97 * t).frac().abs(), torch.linspace(-1, 1, 31)),
    "the edge of a domain": (torch.log, torch.tensor([1e-8, 1.0])),
    "an edge itself": (lambda t: t.clamp(min=0).sqrt(), torch.tensor([0.0, 1.0])),
    "infinite values": (lambda t: torch.where(t > 0, t**2, torch.inf), x),
    "zeros by cancellation": (lambda t: t.softmax(0).sum(), x),
    "a constant function": (lambda t: 0 * t, x),
}


@pytest.mark.parametrize("case", HARD)
def test_ill_conditioning_is_no_fault(case):
    function, inputs = HARD[case]
    report = hog.verify(function, inputs)
    assert report.ok, str(report)


def test_nan():
    report = hog.verify(torch.sqrt, torch.tensor([-1.0, 2.0]))
    assert "is NaN at the inputs" in report["finite"].text
    assert not report.ok

    class Norm(Function):
        forward = saving_inputs(lambda x: x.norm())

        backward = by_saved(lambda g, x: g * x / x.norm())

    assert "NaN arises in Norm.backward" in hog.verify(Norm, torch.zeros(3))["finite"].text


def test_masks_and_targets_are_taken_for_constants():
    class Weighted(Function):
        forward = saving_inputs(lambda t, w: t**3 * w)

        backward = by_saved(lambda g, t, w: (3 * g * t**2 * w, None))

    class Masked(Function):
        forward = saving_inputs(lambda t, mask: t**3 * mask)

        backward = Weighted.backward

    mask = torch.tensor([0.0, 1.0, 1.0])
    report = hog.verify(Weighted, (x, mask))
    assert report.ok
    assert "inputs[1]" in report["constants"].text
    assert not hog.verify(Weighted, (x, mask + 0.3)).ok  # that is no mask
    asked = hog.verify(Weighted, (x.clone().requires_grad_(), mask.clone().requires_grad_()))
    assert not asked.ok
    assert hog.verify(Weighted, (x.clone().requires_grad_(), mask + 0.3)).ok
    report = hog.verify(Masked, (x, mask + 0.3))  # but here it is called one
    assert report.ok
    assert "inputs[1]" in report["constants"].text


def test_float64_is_refused():
    def narrow(t):
        if t.dtype != torch.float32:
            raise TypeError("float32 only")
        return t.sin()

    report = hog.verify(narrow, x)
    assert report.ok
    assert report["dtype: float64"].status == "skip"

    def wrong(t):
        if t.dtype != torch.float32:
            raise TypeError("float32 only")
        return WrongSign.apply(t)

    assert not hog.verify(wrong, x).ok


def test_what_does_not_run_is_said():
    report = hog.verify(lambda t: t @ torch.ones(7, dtype=t.dtype), x)
    assert [row.name for row in report.failed] == ["runs"]
    assert "test_verify.py:" in report.failed[0].text
    assert "one by one" in hog.verify(lambda a, b: a * b, x).failed[0].text


def test_a_change_in_place_that_is_declared_is_right():
    class Double(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        backward = staticmethod(lambda ctx, g: 2 * g)

    assert hog.verify(Double, x).ok


# What it leaves alone.


def test_nothing_of_the_caller_is_changed():
    given = x.clone().requires_grad_()
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    batch = torch.randn(6, 3)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    filters, precision = list(warnings.filters), torch.get_float32_matmul_precision()
    with torch.no_grad():
        hog.verify(Cube, given)
        hog.verify(module, batch)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    assert (warnings.filters, torch.get_float32_matmul_precision()) == (filters, precision)
    assert given.grad is None
    assert given.requires_grad
    assert module.training
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("backend", [torch.backends, torch.backends.cudnn])
def test_flags_of_cudnn_inside_where_the_precision_was_set(backend):
    class Flags(Cube):
        @staticmethod
        def backward(ctx, g):
            with torch.backends.cudnn.flags(enabled=True):  # reads the older setting
                return Cube.backward(ctx, g)

    def settings():
        names = ("matmul", "conv", "rnn")
        parts = [torch.backends, torch.backends.cudnn, torch.backends.cuda.matmul]
        parts += [getattr(torch.backends.mkldnn, name) for name in names]
        return [part.fp32_precision for part in parts]

    initial = backend.fp32_precision
    backend.fp32_precision = "tf32"
    try:
        before = settings()
        assert hog.verify(Flags, x).ok
        assert settings() == before
    finally:
        backend.fp32_precision = initial


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_reduced_precision_is_off_inside_and_back_afterwards(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        with exact_products():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


def test_precisions_may_be_fixed_by_tests_of_others(monkeypatch):
    """As an import of torch.testing._internal does, for the whole process."""
    flags = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="disable_global_flags"):
        torch.backends.cudnn.allow_tf32 = False
    assert hog.verify(Cube, x).ok


def test_it_is_the_same_twice():
    a, b = (hog.verify(WrongSign, x).to_json() for _ in range(2))
    assert a == b


# Wrong arguments.

REFUSED = {
    "no function": ((("Cube", x), {}), TypeError, "fn: expected a function"),
    "no reference": (((Cube, x), {"reference": 3}), TypeError, "reference: expected a function"),
    "no tensors": (((Cube, ()), {}), ValueError, "at least one floating-point"),
    "integers": (((Cube, torch.arange(3)), {}), ValueError, "at least one floating-point"),
    "inputs apart": (((Cube, x, x), {}), TypeError, r"verify: expected fn, inputs, .* `inputs=\("),
    "a misspelt option": (((Cube, x, x), {"refrence": Cube}), TypeError, "did you mean 'reference'"),
    "no inputs": (((Cube,), {}), TypeError, "verify: expected fn, inputs, .*missing 1"),
    "no elements": (((Cube, torch.randn(0)), {}), ValueError, "at least one element"),
    "an unknown mode": (((Cube, x), {"modes": "rx"}), ValueError, "modes: expected some of"),
    "modes that are none": (((Cube, x), {"modes": 3}), TypeError, "modes: expected some of"),
    "an unknown order": (((Cube, x), {"orders": 5}), ValueError, "orders: expected some of 1, 2, 3, 4"),
    "orders that are none": (((Cube, x), {"orders": "two"}), TypeError, "orders: expected some of"),
}  # fmt: skip


test_wrong_arguments_raise = refused(REFUSED, lambda given: hog.verify(*given[0], **given[1]))


# The report.


def test_a_derivative_that_was_not_compared_is_not_called_right():
    rows = [
        verification.Row(f"{order} derivative: reverse", "pass", 0.0)
        for order in ("first", "second")
    ]
    assert "f: right" in str(verification.Report("f", rows))
    rows[1] = rows[1]._replace(status="warn", text="nothing could be compared")
    assert str(verification.Report("f", rows)).startswith("f: NOT JUDGED in full.")


def test_the_report():
    report = hog.verify(WrongSign, x, modes="rr")
    assert repr(report).startswith("Report(WrongSign: ")
    assert len(report) == len(report.rows) == len(list(report))
    assert {row.status for row in report} <= {"pass", "fail", "warn", "skip"}
    text = str(report)
    assert text.startswith("WrongSign: WRONG, by 1 of ")
    assert max(map(len, text.splitlines())) <= 100
    table = json.loads(report.to_json())
    assert (table["name"], table["ok"]) == ("WrongSign", False)
    assert [row["name"] for row in table["rows"]] == [row.name for row in report]
    assert sum(table["counts"].values()) == len(report)
    with pytest.raises(KeyError, match="expected the name of a row"):
        report["nothing"]
    with pytest.raises(TypeError, match=r"report\.ok"):
        bool(report)
    assert hog.verify(Cube, x).raise_if_failed().ok


def test_a_skip_has_a_reason_and_a_failure_a_sentence():
    for report in (hog.verify(Cube, x), hog.verify(WrongSign, x), hog.verify(Round, x)):
        for row in report:
            assert row.text or row.status == "pass", row


def test_an_infinite_error_is_null_in_json():
    report = hog.Report("one", [hog.verification.Row("a", "fail", float("inf"), "b")])
    assert json.loads(report.to_json())["rows"][0]["error"] is None


class EmptyRule(ClassicCube):
    """y = x^3, with a jvp that somebody meant to write."""

    @staticmethod
    def jvp(ctx, *tangents):
        """The tangent of the output."""


class RefusedRule(EmptyRule):
    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("by reverse mode only")


class SometimesRefused(EmptyRule):
    @staticmethod
    def jvp(ctx, *tangents):
        if tangents[0].dim() < 9:
            raise NotImplementedError
        return tangents[0]


@pytest.mark.parametrize("function", [EmptyRule, RefusedRule])
def test_a_jvp_without_a_formula_offers_no_forward_mode(function):
    x = torch.linspace(0.5, 1.5, 4)
    report = hog.verify(function, x)
    assert not report.failed, report
    row = report["second derivative: forward-over-reverse"]
    assert row.status == "skip"
    assert "or with an empty one" in row.text
    asked = hog.verify(function, x, modes="fr")["second derivative: forward-over-reverse"]
    assert asked.status == "fail"


def test_a_jvp_with_a_formula_is_judged():
    report = hog.verify(SometimesRefused, torch.linspace(0.5, 1.5, 4))
    assert report["first derivative: forward"].status == "fail"
