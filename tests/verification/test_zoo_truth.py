"""The derivatives of every exhibit of the zoo are as right and as wrong as it says: judged by differences, sharing
no code with hoglib. Mistakes that are no wrong derivative, `verify` names in test_zoo.py."""

import pytest
import torch
from torch import Tensor

from tests.rows import rows
from tests.zoo import ZOO
from tests.zoo.published import PUBLISHED

# torch says so where a kernel without a formula is differentiated, which is what that exhibit shows
pytestmark = pytest.mark.filterwarnings("ignore:hoglib_zoo..cube_grad. an autograd kernel")

CLOSE = 1e-9  # the differences below are of fourth order: good to 1e-10, and float32 is off by 3e-8


# --- the oracle -----------------------------------------------------------------------------------


def double(inputs):
    """The inputs in double precision."""
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return [x.to(wider.get(x.dtype, x.dtype)) for x in inputs]


def is_smooth(t) -> bool:
    return t.is_floating_point() or t.is_complex()


def smooth(tensors) -> list[Tensor]:
    return [t for t in tensors if is_smooth(t)]


def call(function, inputs) -> list[Tensor]:
    """The outputs; whatever the forward draws, it draws the same."""
    torch.manual_seed(1)
    outputs = function.apply(*inputs)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def leaves(inputs) -> list[Tensor]:
    """Copies of the inputs, in their layout, which require grad."""
    # a clone keeps the order of strides
    return [x.detach().clone().requires_grad_(is_smooth(x)) for x in inputs]


def random_like(tensors) -> list[Tensor]:
    return [torch.randn(t.shape, dtype=t.dtype) for t in tensors]


def dot(a, b) -> Tensor:
    """The real inner product of two lists."""
    zero = torch.zeros((), dtype=torch.float64)
    return sum(((p.conj() * q).real.sum() for p, q in zip(a, b, strict=True)), zero)


def gradients(function, inputs, weights, create_graph=False):
    """The gradients of sum_k w_k y_k by the inputs that can have one, zeros for None."""
    copies = leaves(inputs)
    pairs = zip(call(function, copies), weights, strict=True)
    ys, ws = zip(*[(y, w) for y, w in pairs if y.requires_grad], strict=True)
    wanted = [x for x in copies if x.requires_grad]
    options = {"create_graph": create_graph, "materialize_grads": True}
    grads = torch.autograd.grad(ys, wanted, ws, **options)
    return (grads, wanted) if create_graph else grads


def slope(f, h=3e-4) -> Tensor:
    """f'(0), by central differences of fourth order."""
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


def along(inputs, direction, t):
    """inputs + t direction, for those that are smooth."""
    steps = iter(direction)
    return [x + t * next(steps) if is_smooth(x) else x for x in inputs]


def near(a, b) -> bool:
    return bool(torch.isfinite(a).all()) and bool(((a - b).abs() <= CLOSE * (1 + b.abs())).all())


# --- what can be wrong: each is a question of (function, inputs, weights), True when something is -


def first(function, inputs, weights):
    d = random_like(smooth(inputs))
    value = slope(lambda t: dot(weights, call(function, along(inputs, d, t))))
    return not near(dot(gradients(function, inputs, weights), d), value)


def second(function, inputs, weights):
    """The derivative of a gradient along (inputs, weights), against differences of gradients."""
    d, dw, v = (random_like(x) for x in (smooth(inputs), weights, smooth(inputs)))

    def at(t):
        return dot(v, gradients(function, along(inputs, d, t), along(weights, dw, t)))

    w = leaves(weights)
    grads, wanted = gradients(function, inputs, [x * 1 for x in w], create_graph=True)
    s = dot(v, grads)
    if not s.requires_grad:
        return not near(torch.zeros_like(s), slope(at))
    found = torch.autograd.grad(s, wanted + w, materialize_grads=True)
    return not near(dot(found, d + dw), slope(at))


def symptoms(function, inputs, surrogate=False) -> set[str]:
    """Which derivatives are wrong, or raise."""
    inputs = double(inputs)
    outputs = call(function, leaves(inputs))
    weights = [w * y.requires_grad for w, y in zip(random_like(outputs), outputs, strict=True)]
    found = set()
    for name, question in {"first derivative": first, "second derivative": second}.items():
        if surrogate and question is first:
            continue
        try:
            wrong = question(function, [x.clone() for x in inputs], [w.clone() for w in weights])
        except (RuntimeError, TypeError, UserWarning):
            wrong = True
        if wrong:
            found.add(name)
    return found


# --- what is claimed ------------------------------------------------------------------------------

NONE, FIRST = set(), {"first derivative"}
SECOND = {"second derivative"}  # what an exhibit shows unless it stands below
CUT_ELSEWHERE = "a cut for large values only"
CLAIMS = {
    **dict.fromkeys(
        ("gradients in the wrong order", "None for an input that needs a gradient", "a sum over the wrong dims", "a wrong sign",
         "a missing term", "no transpose", "the incoming gradient ignored", "a float32 constant in float64 maths",
         "a forward in float32", "a nondeterministic backward", "the gradient of a second output left out",
         "dropout, mask drawn twice", "complex product, no conjugate"),
        FIRST,
    ),
    **dict.fromkeys(
        ("too few gradients", "too many gradients", "a gradient of the wrong shape", "a gradient in float32",
         "an output in the default dtype", "the gradients of extra outputs left out"),
        FIRST | SECOND,
    ),
    # in another place, layout, mode or call, or of other memory: here all derivatives are right
    **dict.fromkeys(
        (CUT_ELSEWHERE, "in-place on the input", "in-place on another input", "in-place on grad_output, by index",
         "in-place on grad_output", "needs_input_grad read at the wrong place", "a short cut for a frozen input",
         "a jvp that disagrees with the backward", "a vmap rule that assumes the first dimension", "the gradient viewed as contiguous",
         "strides of a contiguous input assumed", "strides of a contiguous gradient assumed", "state kept on the class",
         "an undefined gradient not handled", "straight-through sign, gradient in place"),
        NONE,
    ),
}  # fmt: skip


def claimed(name, verdict) -> set[str]:
    return CLAIMS.get(name, SECOND if verdict == "fail" else NONE)


def seeded(inputs):
    torch.manual_seed(0)
    drawn = inputs()
    torch.manual_seed(3)
    return drawn


each_exhibit = rows("exhibit", ZOO, ids=lambda e: e.name)
each_specimen = rows("specimen", PUBLISHED, ids=lambda s: s.name)


def test_names_are_unique_and_claims_have_exhibits():
    names = [e.name for e in (*ZOO, *PUBLISHED)]
    assert len(set(names)) == len(names)
    assert set(names) >= CLAIMS.keys()


def test_words_are_lower_case_and_verdicts_known():
    for e in (*ZOO, *PUBLISHED):
        assert all(word == word.lower() for word in e.says)
        assert e.verdict in ("fail", "warn", "right")
        assert bool(e.says) == (e.verdict != "right")


@rows("exhibit", {e.right: e for e in ZOO}.values(), ids=lambda e: e.name)
def test_right_twins_are_right(exhibit):
    assert symptoms(exhibit.right, seeded(exhibit.inputs), **exhibit.options) == set()


@each_exhibit
def test_wrong_ones_compute_what_their_twins_do(exhibit):
    wrong, right = (
        call(f, [x.clone() for x in double(seeded(exhibit.inputs))])
        for f in (exhibit.wrong, exhibit.right)
    )
    torch.testing.assert_close(wrong, right, rtol=1e-6, atol=1e-7, check_dtype=False)


@each_exhibit
def test_wrong_ones_have_the_wrong_derivatives_that_are_claimed(exhibit):
    found = symptoms(exhibit.wrong, seeded(exhibit.inputs), **exhibit.options)
    assert found == claimed(exhibit.name, exhibit.verdict)


def test_a_branch_is_cut_where_it_is_taken():
    (exhibit,) = (e for e in ZOO if e.name == CUT_ELSEWHERE)
    large = (torch.full((3, 4), 6.0, dtype=torch.float64),)
    assert symptoms(exhibit.wrong, large) == SECOND
    assert symptoms(exhibit.right, large) == set()


@each_specimen
def test_specimens_are_as_right_as_they_claim(specimen):
    found = symptoms(specimen.function, seeded(specimen.inputs), **specimen.options)
    assert found == claimed(specimen.name, specimen.verdict)
