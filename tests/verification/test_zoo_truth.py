"""Every exhibit of the zoo is what it says: judged by differences, sharing no code with hoglib."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

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


def leaves(inputs, only=None) -> list[Tensor]:
    """Copies of the inputs, in their layout, which require grad (or only one of them)."""
    copies = [x.detach().clone() for x in inputs]  # a clone keeps the order of strides
    for i, x in enumerate(copies):
        x.requires_grad_(is_smooth(x) if only is None else i == only)
    return copies


def random_like(tensors) -> list[Tensor]:
    return [torch.randn(t.shape, dtype=t.dtype) for t in tensors]


def dot(a, b) -> Tensor:
    """The real inner product of two lists."""
    zero = torch.zeros((), dtype=torch.float64)
    return sum(((p.conj() * q).real.sum() for p, q in zip(a, b, strict=True)), zero)


def gradients(function, inputs, weights, create_graph=False, only=None):
    """The gradients of sum_k w_k y_k by the inputs that can have one, zeros for None."""
    copies = leaves(inputs, only)
    pairs = zip(call(function, copies), weights, strict=True)
    pairs = [(y, w) for y, w in pairs if y.requires_grad]
    wanted = [x for x in copies if x.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in pairs],
        wanted,
        [w for _, w in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
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


def all_near(a, b) -> bool:
    return all(x.shape == y.shape and near(x, y) for x, y in zip(a, b, strict=True))


# --- what can be wrong: each is a question of (function, inputs, weights), True when something is -


def first(function, inputs, weights):
    d = random_like(smooth(inputs))
    value = slope(lambda t: dot(weights, call(function, along(inputs, d, t))))
    return not near(dot(gradients(function, inputs, weights), d), value)


def second(function, inputs, weights, only=None):
    """The derivative of a gradient along (inputs, weights), against differences of gradients."""
    places = [i for i, x in enumerate(inputs) if is_smooth(x)]
    moved = places if only is None else [only]
    d = [random_like([inputs[i]])[0] if i in moved else torch.zeros_like(inputs[i]) for i in places]
    dw, v = random_like(weights), random_like([inputs[i] for i in moved])

    def at(t):
        return dot(v, gradients(function, along(inputs, d, t), along(weights, dw, t), only=only))

    w = leaves(weights)
    grads, wanted = gradients(function, inputs, [x * 1 for x in w], create_graph=True, only=only)
    s = dot(v, grads)
    if not s.requires_grad:
        return not near(torch.zeros_like(s), slope(at))
    found = torch.autograd.grad(s, wanted + w, materialize_grads=True)
    return not near(dot(found, [d[places.index(i)] for i in moved] + dw), slope(at))


def dtype(function, inputs, weights):
    kind = smooth(inputs)[0].dtype
    return any(y.dtype != kind for y in smooth(call(function, inputs)))


def changes(function, inputs, weights) -> Iterator[str]:
    copies, w = leaves(inputs), [x.clone() for x in weights]
    outputs = call(function, copies)
    after_forward = [y.detach().clone() for y in outputs]
    pairs = [(y, x) for y, x in zip(outputs, w, strict=True) if y.requires_grad]
    torch.autograd.backward([y for y, _ in pairs], [x for _, x in pairs])
    if not all(torch.equal(x, y) for x, y in zip(copies, inputs, strict=True)):
        yield "changes an input"
    if not all(torch.equal(x, y) for x, y in zip(w, weights, strict=True)):
        yield "changes the gradient"
    if not all(torch.equal(x, y) for x, y in zip(outputs, after_forward, strict=True)):
        yield "changes an output"


def shape(function, inputs, weights):
    """Number and shapes of what the backward itself returns, before the engine mends them."""
    copies = leaves(inputs)
    outputs = call(function, copies)  # until torch 2.12 a node loses what it saved with its output
    node = next(y.grad_fn for y in outputs if y.requires_grad)
    grads = node.apply(*weights)
    grads = (grads,) if isinstance(grads, Tensor) else grads
    if len(grads) != len(inputs):
        return True
    pairs = zip(grads, inputs, strict=True)
    return any(g is not None and g.shape != x.shape for g, x in pairs)


def turned(tensors) -> list[Tensor]:
    """The same numbers in the transposed layout."""
    return [t.mT.contiguous().mT if t.dim() > 1 else t for t in tensors]


def layout(function, inputs, weights):
    """Other strides of inputs and of gradients change nothing."""
    values = (call(function, [x.clone() for x in xs]) for xs in (turned(inputs), inputs))
    if not all_near(*values):
        return True
    expected = gradients(function, inputs, [w.clone() for w in weights])
    if not all_near(gradients(function, turned(inputs), weights), expected):
        return True
    expanded = [w[:1].expand(w.shape) if w.dim() else w for w in weights]  # from a sum over rows
    constant = [torch.full((), 0.3, dtype=w.dtype).expand(w.shape) for w in weights]
    for strange in (turned(weights), expanded, constant):
        expected = gradients(function, inputs, [w.contiguous().clone() for w in strange])
        if not all_near(gradients(function, inputs, strange), expected):
            return True
    return False


def alone(function, inputs, weights):
    """A gradient is the same when no other is wanted."""
    together = iter(gradients(function, inputs, weights))
    return not all(
        all_near(gradients(function, inputs, weights, only=i), [next(together)])
        for i, x in enumerate(inputs)
        if is_smooth(x)
    )


def second_alone(function, inputs, weights):
    """So is a second derivative."""
    places = [i for i, x in enumerate(inputs) if is_smooth(x)]
    return len(places) > 1 and any(second(function, inputs, weights, only=i) for i in places)


def undefined(function, inputs, weights):
    """An output that is not used has no gradient, which is a gradient of zero."""
    for k in range(len(weights)):
        copies = leaves(inputs)
        y = call(function, copies)[k]
        if not y.requires_grad:
            continue
        wanted = [x for x in copies if x.requires_grad]
        grads = torch.autograd.grad(y, wanted, weights[k], materialize_grads=True)
        others = [w if j == k else torch.zeros_like(w) for j, w in enumerate(weights)]
        if not all_near(grads, gradients(function, inputs, others)):
            return True
    return False


def again(function, inputs, weights):
    """Two backwards through one graph are the same."""
    copies = leaves(inputs)
    pairs = zip(call(function, copies), weights, strict=True)
    loss = dot(*zip(*[(w, y) for y, w in pairs if y.requires_grad], strict=True))
    wanted = [x for x in copies if x.requires_grad]
    once, twice = (
        torch.autograd.grad(loss, wanted, retain_graph=True, materialize_grads=True)
        for _ in range(2)
    )
    return not all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def calls(function, inputs, weights):
    """A second call does not disturb the backward of the first."""
    copies = leaves(inputs)
    outputs = call(function, copies)
    call(function, along(inputs, random_like(smooth(inputs)), 0.1))
    pairs = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    wanted = [x for x in copies if x.requires_grad]
    ys, ws = zip(*pairs, strict=True)
    grads = torch.autograd.grad(ys, wanted, ws, materialize_grads=True)
    return not all_near(grads, gradients(function, inputs, weights))


def jvp(function, inputs, weights):
    if function.jvp is Function.jvp:
        return False
    d = random_like(inputs)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs, d, strict=True)]
        tangents = [forward_ad.unpack_dual(y).tangent for y in call(function, duals)]
        found = dot(weights, tangents)
    return not near(found, slope(lambda t: dot(weights, call(function, along(inputs, d, t)))))


def vmap(function, inputs, weights):
    """A batch in the last dimension, values and gradients, against a loop."""
    if not function.generate_vmap_rule and function.vmap is Function.vmap:
        return False
    batch = [torch.stack([x, x + 0.1, x - 0.1], -1) for x in inputs]
    many = [[x.select(-1, i) for x in batch] for i in range(3)]

    def value(*xs):
        y = function.apply(*xs)
        return dot(weights, [y] if isinstance(y, Tensor) else y)

    places = tuple(range(len(inputs)))
    for f in (lambda *xs: (value(*xs),), torch.func.grad(value, places)):
        found = torch.func.vmap(f, in_dims=-1)(*batch)
        expected = [torch.stack(t) for t in zip(*(f(*xs) for xs in many), strict=True)]
        if not all_near(found, expected):
            return True
    return False


QUESTIONS = {
    "first derivative": first,
    "second derivative": second,
    "dtype": dtype,
    "shape": shape,
    "layout": layout,
    "alone": alone,
    "second derivative alone": second_alone,
    "undefined": undefined,
    "again": again,
    "calls": calls,
    "jvp": jvp,
    "vmap": vmap,
}


def symptoms(function, inputs, surrogate=False) -> set[str]:
    """Everything that is wrong with a Function; an exception is an answer too."""
    inputs = double(inputs)
    outputs = call(function, leaves(inputs))
    weights = [w * y.requires_grad for w, y in zip(random_like(outputs), outputs, strict=True)]
    found = set()
    for name, question in QUESTIONS.items():
        if surrogate and question in (first, jvp):
            continue
        try:
            if question(function, [x.clone() for x in inputs], [w.clone() for w in weights]):
                found.add(name)
        except (RuntimeError, TypeError, UserWarning) as error:
            found.add(f"{name} raises {type(error).__name__}")
    try:
        found.update(changes(function, inputs, weights))
    except (RuntimeError, TypeError, UserWarning):
        found.add("raises")
    return found


# --- what is claimed ------------------------------------------------------------------------------

SECOND = {"second derivative"}  # what an exhibit shows unless it stands below
CUT_ELSEWHERE = "a cut for large values only"
CLAIMS = {
    CUT_ELSEWHERE: set(),  # at the inputs
    "in-place on the input": {"changes an input"},
    "in-place on another input": {"changes an input"},
    "in-place on grad_output, by index": {"changes the gradient", "layout"},
    "in-place on grad_output": {"changes the gradient", "layout"},
    "in-place on a saved tensor": {"changes an output", "again", "second derivative"},
    "gradients in the wrong order": {"first derivative"},
    "None for an input that needs a gradient": {"first derivative"},
    "needs_input_grad read at the wrong place": {"alone"},
    "a short cut for a frozen input": {"second derivative alone"},
    "a jvp that disagrees with the backward": {"jvp"},
    "no sum over broadcast dims": {"shape"},
    "a sum over the wrong dims": {"first derivative"},
    "a wrong sign": {"first derivative"},
    "a missing term": {"first derivative"},
    "no transpose": {"first derivative"},
    "the incoming gradient ignored": {"first derivative"},
    "a vmap rule that assumes the first dimension": {"vmap"},
    "the input viewed as contiguous": {"layout"},  # aloud, which is a warning
    "the gradient viewed as contiguous": {"layout"},
    "strides of a contiguous input assumed": {"layout"},
    "strides of a contiguous gradient assumed": {"layout"},
    "a float32 constant in float64 maths": {"first derivative"},
    "a gradient in float32": {"first derivative", "second derivative"},
    "a forward in float32": {"first derivative"},
    "an output in the default dtype": {"dtype", "first derivative", "second derivative"},
    "a nondeterministic backward": {"again", "first derivative"},
    "state kept on the class": {"calls"},
    "the gradients of extra outputs left out": {"first derivative", "second derivative"},
    "the gradient of a second output left out": {"first derivative"},
    "an undefined gradient not handled": {"undefined"},
    "straight-through sign, gradient in place": {"changes the gradient", "layout"},
    "gradient clipping in place": {"changes the gradient", "layout", "second derivative", "vmap"},
    "dropout, mask drawn twice": {"again", "first derivative"},
    "complex product, no conjugate": {"first derivative"},
}
REFUSED = {"too few gradients", "too many gradients", "a gradient of the wrong shape"}


def claimed(name, verdict) -> set[str]:
    return CLAIMS.get(name, SECOND if verdict == "fail" else set())


def seeded(inputs):
    torch.manual_seed(0)
    drawn = inputs()
    torch.manual_seed(3)
    return drawn


def plain(found) -> set[str]:
    """Symptoms without how they were noticed; what is wrong for all is wrong for one."""
    found = {s.split(" raises ")[0] for s in found}
    return found - {"second derivative alone"} if "second derivative" in found else found


each_exhibit = rows("exhibit", ZOO, ids=lambda e: e.name)
each_specimen = rows("specimen", PUBLISHED, ids=lambda s: s.name)


def test_names_are_unique_and_claims_have_exhibits():
    names = [e.name for e in (*ZOO, *PUBLISHED)]
    assert len(set(names)) == len(names)
    assert set(names) >= {*CLAIMS, *REFUSED}


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
def test_wrong_ones_have_the_one_mistake(exhibit):
    found = symptoms(exhibit.wrong, seeded(exhibit.inputs), **exhibit.options)
    if exhibit.name in REFUSED:
        assert found >= {"shape", "first derivative raises RuntimeError"}
    else:
        assert plain(found) == claimed(exhibit.name, exhibit.verdict)


def test_a_branch_is_cut_where_it_is_taken():
    (exhibit,) = (e for e in ZOO if e.name == CUT_ELSEWHERE)
    large = (torch.full((3, 4), 6.0, dtype=torch.float64),)
    assert plain(symptoms(exhibit.wrong, large)) == SECOND
    assert symptoms(exhibit.right, large) == set()


@each_specimen
def test_specimens_are_as_right_as_they_claim(specimen):
    found = symptoms(specimen.function, seeded(specimen.inputs), **specimen.options)
    assert plain(found) == claimed(specimen.name, specimen.verdict)
