"""What torch itself has wrong is caught and named; what it has right raises no alarm."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hoglib as hog
from hoglib._core.torch_api.torch_version import TORCH_VERSION
from tests.long_tail import all_but

r = torch.randn
FOUR = ("rr", "fr", "rf", "ff")


def math_attention(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def weight(*shape):
    return torch.rand(*shape) + 0.5


# fmt: off
WRONG = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), lambda: (r(3, 5), weight(5), r(5)), ("rf", "ff"), "layer_norm"),
    "train-mode batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), lambda: (r(6, 3), weight(3), r(3)), ("rf", "ff"), "batch_norm"),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, None, None, w, b), lambda: (r(2, 3, 5), weight(3), r(3)), ("rf", "ff"), "instance_norm"),
    "solve": (torch.linalg.solve, lambda: (r(3, 3) + 3 * torch.eye(3), r(3, 2)), ("rf", "ff"), "linalg_solve"),
    "det": (torch.linalg.det, lambda: (r(3, 3),), ("rf", "ff"), "linalg_det"),
    "slogdet": (lambda a: torch.linalg.slogdet(a)[1], lambda: (r(3, 3),), ("rf", "ff"), "linalg_slogdet"),
    "logdet": (lambda a: torch.logdet(a @ a.mT + torch.eye(3)), lambda: (r(3, 3),), ("rf", "ff"), "logdet"),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), lambda: (r(3, 4), weight(3, 1)), ("rr",), "_weight_norm"),
    "attention, flash on the CPU": (F.scaled_dot_product_attention, lambda: (r(1, 2, 4, 3), r(1, 2, 4, 3), r(1, 2, 4, 3)), ("rr",), "scaled_dot_product_attention"),
    "cdist": (torch.cdist, lambda: (r(3, 2), r(4, 2)), ("rr",), "cdist"),
}
RIGHT = {
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda: (r(3, 4, 3), weight(4), r(4))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), lambda: (r(3, 5), weight(5))),
    "softmax": (lambda x: x.softmax(-1), lambda: (r(3, 5),)),
    "attention in MATH mode": (math_attention, lambda: (r(1, 2, 4, 3), r(1, 2, 4, 3), r(1, 2, 4, 3))),
    "a convolution": (F.conv1d, lambda: (r(2, 3, 6), r(4, 3, 3), r(4))),
    "an MLP": (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)), lambda: (r(5, 3),)),
    "cholesky of a symmetric matrix": (lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(3)), lambda: (r(3, 3),)),
}
# fmt: on
OF_PARTS = ("an MLP", "attention in MATH mode")  # that stand beside them


# the first releases that have them right
MENDED = {"cdist": (2, 14), "solve": (2, 15), "det": (2, 15), "slogdet": (2, 15), "logdet": (2, 15)}


@pytest.mark.parametrize(
    "case", [case for case in WRONG if MENDED.get(case, (9, 0)) > TORCH_VERSION]
)
def test_what_is_wrong_is_named(case):
    function, inputs, modes, culprit = WRONG[case]
    report = hog.verify(function, inputs())
    titles = {mode: title for mode, title in zip(FOUR, TITLES, strict=True)}  # noqa: C416
    failed = {row.name for row in report.failed}
    for mode in FOUR:
        row = report[f"second derivative: {titles[mode]}"]
        assert (row.status == "fail") == (mode in modes), row
    assert any(name.startswith(f"culprit: {culprit} in ") for name in failed), failed


TITLES = (
    "reverse-over-reverse", "forward-over-reverse", "reverse-over-forward", "forward-over-forward",
)  # fmt: skip


@pytest.mark.parametrize("case", all_but(lambda case: case not in OF_PARTS, RIGHT))
def test_what_is_right_raises_no_alarm(case):
    function, inputs = RIGHT[case]
    report = hog.verify(function, inputs(), orders=(1, 2, 3))
    assert report.ok, str(report)
    for title in TITLES:
        assert report[f"second derivative: {title}"].status == "pass"
        assert report[f"third derivative: {title}"].status == "pass"


@pytest.mark.parametrize("case", ["layer_norm", "train-mode batch_norm", "instance_norm"])
def test_third_derivatives_of_norms_are_wrong(case):
    function, inputs, _, culprit = WRONG[case]
    report = hog.verify(function, inputs(), orders=(1, 2, 3), modes="rr")
    assert report["second derivative: reverse-over-reverse"].status == "pass"
    assert report["third derivative: reverse-over-reverse"].status == "fail"
    assert f"culprit: {culprit} in reverse-over-reverse" in {row.name for row in report.failed}


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has none")
def test_linear_cross_entropy_in_chunks_is_wrong():
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, chunking_method=None)
    target = torch.randint(9, (6,))

    def loss(x, w):
        return F.linear_cross_entropy(x, w, target, options=options)

    report = hog.verify(loss, (r(6, 3), r(9, 3)), modes="rr")
    assert report["first derivative: reverse"].status == "pass", str(report)
    assert report["second derivative: reverse-over-reverse"].status == "fail"
    failed = {q.name for q in report.failed}
    assert "culprit: linear_cross_entropy in reverse-over-reverse" in failed


def test_forward_over_forward_of_a_jvp_is_skipped_with_its_reason():
    row = hog.verify(hog.ops.square, r(3))["second derivative: forward-over-forward"]
    assert row.status == "skip"
    assert "returns zero" in row.text


def test_a_module_is_verified_by_its_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    report = hog.verify(model, r(4, 3))
    assert "culprit: layer_norm in reverse-over-forward" in {row.name for row in report.failed}
    assert hog.verify(model, r(4, 3), modes=("rr", "fr")).ok
