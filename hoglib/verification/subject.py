"""The subject of a verification: a map, and the custom Functions that it runs.

This file decides by which inputs the map is differentiated, along which directions, and how fn is
called.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hoglib._core.messages.closures import held
from hoglib._core.modules.state import preserve_random_state, put_back, same
from hoglib._core.numerics.element_differences import (
    ORDINARY,
    SMALL,
    max_abs,
    random_like,
    unit_of,
)  # fmt: skip
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import function_watch, pytree, torch_internals
from hoglib._core.torch_api.pytree import is_float
from hoglib.verification import function_rules, layouts, maps
from hoglib.verification.maps import Map, real
from hoglib.verification.precision import Precision, choose_map
from hoglib.verification.report import Row

# Arguments with a structure: a Function may be right only along directions that keep the structure.
#
#     A = A^T,  A = tril(A),  A = triu(A),  sum_j p_j = 1,  logsumexp_j p_j = 0,  |x| = 1
#
# The backward of a matrix square root, for example, may assume a symmetric matrix. Along a direction
# that leaves the structure its gradient G is not the derivative. If the argument is always computed
# with the structure, x = h(z), that part of G has no effect. Let P be a map onto the structure, P(x) =
# x on it. Then h = P h, and
#
#     h'^T G = h'^T P'^T G,        h'^T n = 0  for each  n = w - P'(x)^T w
#
# So the derivatives of f P decide. The second equation tests whether x was computed by such an h.

MOST_DIMS = 4  # structures are looked for along this many last dimensions of a tensor
FEW_ROUNDINGS = 8  # units of rounding by which inputs move, to measure the size of small outputs
MOST_CHOICES = 24  # combinations of structures of several arguments to try


class Structure(NamedTuple):
    """A structure of an argument, and the map P onto it."""

    name: str  # completes "keep it ..."
    project: maps.Arrange  # P

    def fits(self, x: Tensor) -> bool:
        """Whether P(x) = x, to rounding."""
        rounding = 100 * torch.finfo(x.dtype).eps * max_abs(x)
        return bool(((x - self.project(x)).abs() <= rounding).all())  # False for NaN


# Structures of vectors along a dimension, with P.
VECTORS: dict[str, Callable[..., Tensor]] = {
    "summing to one": lambda x, dim: x / x.sum(dim, keepdim=True),
    "log-probabilities": lambda x, dim: x - x.logsumexp(dim, keepdim=True),
    "of length one": lambda x, dim: x / torch.linalg.vector_norm(x, dim=dim, keepdim=True),
}
MATRICES = (
    Structure("symmetric", lambda x: (x + x.mH) / 2),
    Structure("lower triangular", torch.tril),
    Structure("upper triangular", torch.triu),
)


def structures_of(x: Tensor) -> list[Structure]:
    """The structures of a tensor; those with more directions come first."""
    if not x.numel() or not bool(x.isfinite().all()) or not bool(x.any()):
        return []
    found: list[Structure] = []
    if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1:
        found += MATRICES
    for dim in range(max(0, x.ndim - MOST_DIMS), x.ndim):
        if x.shape[dim] > 1:
            along = f"along dimension {dim}" if x.ndim > 1 else "altogether"
            found += [
                Structure(f"{name} {along}", partial(project, dim=dim))
                for name, project in VECTORS.items()
            ]
    return [one for one in found if one.fits(x)]


Restriction = dict[int, Structure]  # index of a variable -> the structure to keep
Allowed = Callable[[int, Structure], bool]


def _in_given_precision(x: Tensor) -> Tensor:
    """x in single precision if that loses nothing: `sum = 1` then holds to single rounding only."""
    narrow = x.to(torch.complex64 if x.is_complex() else torch.float32)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x


def keeps_structure(x: Tensor, structure: Structure) -> bool:
    """Whether the computation of x guarantees its structure: no gradient along directions that leave
    the structure reaches a leaf. False for a leaf, and for a tensor that has the structure at these
    values only, such as an identity matrix at the start of training.

    True if a test would have to run the user's code, or raises.
    """
    if x.grad_fn is None:
        return False
    graph = graph_summary(x)
    if graph.has_user_code or not graph.leaves:
        return True
    with suppress(Exception), preserve_random_state():
        own = x.detach().requires_grad_()
        w = random_like(x, torch.Generator().manual_seed(6))
        with torch.enable_grad():
            (along,) = torch.autograd.grad(structure.project(own), own, w)
        leaves, keep = [*graph.leaves.values()], {"retain_graph": True, "materialize_grads": True}
        # n = w - P'^T w has no gradient by the leaves; w gives the size of gradients in general
        reaching, whole = (torch.autograd.grad(x, leaves, u, **keep) for u in (w - along, w))
        limit = torch.finfo(x.dtype).eps ** 0.5
        return _largest_element(reaching) <= limit * _largest_element(whole)
    return True


def guaranteed_structures(
    graphed: tuple[Any, ...] | None, copies: tuple[Any, ...], by: tuple[int, ...]
) -> Iterator[tuple[int, frozenset[str]]]:
    """The names of the structures that are guaranteed by the computation of the arguments, with their
    positions among the leaves. graphed: the arguments with their graphs; None accepts any structure.
    by: indices of the differentiated arguments."""
    place = 0
    for i, copy in enumerate(copies):
        if i in by:
            with torch_internals.without_transforms():
                found = structures_of(copy)
            kept = (one for one in found if graphed is None or keeps_structure(graphed[i], one))
            if names := frozenset(one.name for one in kept):
                yield place, names
        place += len(pytree.leaves(copy))


def _largest_element(tensors: Sequence[Tensor]) -> float:
    return max(map(max_abs, tensors), default=0.0)


def keep_symmetric(f: Map) -> tuple[Map, Restriction]:
    """Keep symmetric (Hermitian) matrices symmetric if the function reads only one triangle, or refuses
    other matrices.

    The gradient by such a matrix is a convention: some functions spread the gradient of one triangle
    over both, others leave it in the triangle that they read. Along symmetric directions all
    conventions agree.
    """
    found: Restriction = {}
    for j in range(len(f.point)):
        x = f.value(j)
        if x.ndim > 1 and x.shape[-1] == x.shape[-2] > 1 and torch.equal(x, x.mH):
            noise = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64, device="cpu")
            noise = noise.reshape(x.shape).to(x) * unit_of(max_abs(x))
            here = _values_at(f, j, x)
            # move one triangle at a time: the values stay equal if fn does not read it
            sides = [_values_at(f, j, x + part) for part in (noise.tril(-1), noise.triu(1))]
            unread = any(here and side and all(map(torch.equal, here, side)) for side in sides)
            small = 1e-3 * noise
            near = [_values_at(f, j, x + part) for part in (small.tril(-1), small.triu(1))]
            symmetric_only = near == [None, None] and _values_at(f, j, x + small + small.mH)
            if unread or symmetric_only:
                found[j] = MATRICES[0]
    return _project(f, found), found


def _project(f: Map, kept: Restriction) -> Map:
    return f.projected({j: one.project for j, one in kept.items()})


def _values_at(f: Map, j: int, x: Tensor) -> list[Tensor] | None:
    """The floating-point results of fn with another value x of variable j; None if it raises."""
    own = f.variables[j].coordinates(x)
    try:
        return [y for y in f.leaves(*f.point[:j], own, *f.point[j + 1 :]) if is_float(y)]
    except Exception:  # fn may refuse inputs that the user did not pass
        return None


# Outputs determined up to a sign or a phase of each column: eigenvectors, singular vectors.
#
#     y_j -> y_j conj(s_j),    s_j = <r, y_j> / |<r, y_j>|
#
# An algorithm chooses a phase, and backward is right for losses that do not depend on the phase, but
# wrong for the phases that the algorithm happens to choose. So the derivatives are compared after a
# fixed combination <r, y_j> of each column is made positive. That hides one real number of a column; a
# backward with another error stays wrong.

COLUMNS, ROWS = "columns", "rows"


def phase_fixings_of(outputs: Sequence[Tensor]) -> Iterator[maps.PhaseFixing]:
    """The functions that fix the phases of columns, or of rows, in the matrices among the outputs.

    Column j of all matrices gets a common phase, as in U and V of U diag(s) V^H. If V^H is the output,
    these columns are its rows, conjugated.
    """
    # fewer dims: a batch of eigenvalues, no matrix
    dims = max((y.dim() for y in outputs), default=0)
    dense = ((k, y) for k, y in enumerate(outputs) if is_float(y) and y.layout is torch.strided)
    matrices = [k for k, y in dense if y.dim() == dims > 1]
    if not 0 < len(matrices) < 3:
        return
    for sides in product((COLUMNS, ROWS), repeat=len(matrices)):
        side_of = dict(zip(matrices, sides, strict=True))
        vectors = [_as_columns(outputs[k], side) for k, side in side_of.items()]
        counts = {(*y.shape[:-2], y.shape[-1]) for y in vectors}
        if len(counts) == 1 and all(y.shape[-2] > 1 for y in vectors):
            yield partial(_fix_phases, side_of=side_of)


def _as_columns(y: Tensor, side: str) -> Tensor:
    return y if side == COLUMNS else y.mH


def _fix_phases(outputs: Sequence[Tensor], side_of: dict[int, str]) -> list[Tensor]:
    first, side = next(iter(side_of.items()))
    columns = _as_columns(outputs[first], side)
    random = torch.Generator().manual_seed(4)
    r = torch.randn(columns.shape[-2], 1, dtype=torch.complex128, generator=random, device="cpu")
    r = (r if columns.is_complex() else r.real).to(columns)
    s = (r.conj() * columns).sum(-2, keepdim=True).sgn()
    found = list(outputs)
    for k, side in side_of.items():
        found[k] = _as_columns(_as_columns(outputs[k], side) * s.conj(), side)
    return found


class Application(NamedTuple):
    """A custom Function, with detached copies of the arguments of one call."""

    function: type[Function]
    args: tuple[Any, ...]
    by: tuple[int, ...]  # indices of the arguments that required grad

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments in the signature of forward."""
        return argument_names(self.function, len(self.args))

    @property
    def needed(self) -> tuple[bool, ...]:
        return tuple(i in self.by for i in range(len(self.args)))

    def run(self, args: Sequence[Any]) -> function_rules.Run:
        return function_rules.forward(self.function, args, self.needed)

    def seeded(self) -> function_rules.Run:
        """A run on copies of the arguments; each call draws equal random numbers."""
        maps.seed_all()
        return self.run(self.fresh())

    def kept(self) -> set[str]:
        """Names of the arguments and outputs that a run saves as they are, not as copies."""
        run = self.seeded()
        slots = run.record.slots().values()
        kinds = (function_rules.kind_of(slot, run, self.names) for slot in slots)
        return {what for kind, what in kinds if kind in ("input", "output")}

    def backward(
        self, run: function_rules.Run, incoming: Sequence[Tensor | None] | None = None
    ) -> tuple[Any, ...]:
        """The results of backward, run as a plain function on the record of a forward run."""
        context = function_rules.Context(run.record)
        given = run.incoming() if incoming is None else incoming
        rule = torch_internals.backward_rule(self.function)
        return function_rules.as_tuple(rule(context, *given))

    def changed_by_backward(self) -> list[str]:
        """Labels of attributes that backward changes on ctx or on the class."""
        run, own = self.seeded(), self.function

        def state() -> dict[str, Any]:
            on_class = {f"{own.__name__}.{n}": v for n, v in vars(own).items() if n[:2] != "__"}
            held = run.record.held() | {n: v for n, v in on_class.items() if not callable(v)}
            return {
                name: (id(value), value._version) if isinstance(value, Tensor) else repr(value)
                for name, value in held.items()
            }

        before = state()
        with suppress(Exception), torch.no_grad():
            self.backward(run)
        return [label for label, now in state().items() if before.get(label) != now]

    def name(self, i: int) -> str:
        return self.names[i] if i < len(self.args) else f"input {i}"

    def fresh(self) -> list[Any]:
        """Copies of the arguments, with their layouts."""
        return [layouts.copy_argument(x) for x in self.args]

    def leaves(self) -> list[Any]:
        """Copies of the arguments; the differentiated ones require grad."""
        copies = enumerate(self.fresh())
        return [x.requires_grad_(i in self.by) if is_float(x) else x for i, x in copies]


def watch_applications(run: Callable[[], Any]) -> list[Application]:
    """The custom Functions that a run applies to tensors requiring grad, one application for each
    `_argument_kind` of the arguments."""
    found: dict[Any, Application] = {}

    def seen(function: type[Function], args: tuple[Any, ...]) -> None:
        app = copy_application(function, args)
        if app is not None:
            found.setdefault((function, tuple(_argument_kind(x) for x in args)), app)

    with function_watch.watching_functions(seen):
        run()
    return list(found.values())


def copy_application(function: type[Function], args: tuple[Any, ...]) -> Application | None:
    """A call of a user's Function; None if no argument requires grad."""
    if not is_users_own(function):
        return None
    by = tuple(i for i, x in enumerate(args) if is_float(x) and x.requires_grad)
    values = tuple(map(layouts.copy_argument, args))
    return Application(function, values, by) if by else None


def is_users_own(function: type[Function]) -> bool:
    """Whether a Function is judged by itself: it is not torch's, and not part of an op of hoglib."""
    return not (maps.is_part(function) or function.__module__.startswith("torch."))


def argument_names(function: type[Function], count: int) -> tuple[str, ...]:
    """The names of the first `count` inputs in forward."""
    try:
        given = list(signature(function.forward).parameters.values())
    except (TypeError, ValueError):  # forward is written in C++, or is no function
        given = []
    given = given[1:] if function_rules.is_classic(function) else given
    names = [f"`{p.name}`" for p in given if p.kind is not p.VAR_POSITIONAL]
    rest = next((p.name for p in given if p.kind is p.VAR_POSITIONAL), "inputs")
    names += [f"`{rest}[{i}]`" for i in range(count - len(names))]
    return tuple(names[:count])


def _argument_kind(value: object) -> Any:
    """A key; calls with equal keys are examined once."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    return repr(value) if not pytree.leaves(value) else type(value)


# Names of arguments by which a loss or a layer is usually not differentiated.
CONSTANTS = (
    "target", "targets", "label", "labels", "y_true", "ground_truth", "gt", "mask", "masks", "index",
    "indices", "idx", "ids", "lengths",
)  # fmt: skip


def constants_of(f: Map, names: Sequence[str]) -> list[int]:
    """The variables to take for constants: inputs without a gradient that have the name of a constant
    (target, mask, ...), or different integers as values. names: of the arguments of fn."""
    try:
        variables, found = maps.at_leaves(f.differentiable, f.point)
        grads = torch_internals.gradients(found, variables)
    except Exception:  # reported by the derivative checks
        return []
    without = [j for j, g in enumerate(grads) if g is None and j < f.num_inputs]
    constants = [j for j in without if _is_int(real(f.value(j))) or _is_named(names, f.names[j])]
    return constants if len(constants) < len(grads) else []


def _is_named(names: Sequence[str], name: str) -> bool:
    """Whether the argument inputs[i] has a name in CONSTANTS."""
    place = name.removeprefix("inputs[").removesuffix("]")
    return place.isdigit() and int(place) < len(names) and names[int(place)].strip("`") in CONSTANTS


def _is_int(x: Tensor) -> bool:
    return bool((x == x.round()).all()) and x.numel() > 1 and bool((x != x.reshape(-1)[0]).any())


def with_constants(inputs: Sequence[Any], constants: Sequence[int]) -> list[Any]:
    """Copies of the inputs; every floating-point tensor requires grad, except the leaves with indices
    in `constants`."""
    leaves, structure = pytree.flatten(tuple(inputs))
    chosen = [
        x.detach().clone().requires_grad_(i not in constants) if is_float(x) else x
        for i, x in enumerate(leaves)
    ]
    return list(pytree.unflatten(chosen, structure))


@final
@dataclass(frozen=True, eq=False)
class Subject:
    """The function under test, evaluated in float64 if it accepts float64.

    `subject_of` makes it, and `Derivatives` compares its derivatives. It is immutable: `restricted` and
    `prepared` return another subject.
    """

    map: Map  # to the differentiable outputs
    precision: Precision
    names: list[str]  # of the variables; for a Function with the names in its forward
    constants: list[str]  # names of inputs taken for constants
    symmetric: Restriction  # variables that `keep_symmetric` keeps symmetric
    applications: list[Application]  # custom Functions applied by fn
    functions: set[type[Function]]  # custom Functions in the graph of the outputs
    # structures kept by all directions, because the function is right along such directions only
    kept: Restriction = field(default_factory=dict)
    draws: bool = False  # whether the function draws random numbers
    # for directions and covectors
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def restricted(
        self, kept: Restriction, fix_phases: maps.PhaseFixing | None = None
    ) -> "Subject":
        """The subject with directions that keep these structures and `symmetric`, and with
        `fix_phases` applied to the outputs."""
        f = _project(self.map, kept)
        f = f if fix_phases is None else f.phase_fixed(fix_phases)
        return replace(self, map=f.to_differentiable(), kept=kept)

    def restrictions(self, allowed: Allowed = lambda j, one: True) -> Iterator["Subject"]:
        """The subject restricted to each combination of allowed structures of its variables, from one
        restricted variable to several."""
        values = [_in_given_precision(self.map.value(j)) for j in range(len(self.x))]
        options = [
            [None, *(one for one in structures_of(x) if allowed(j, one))]
            for j, x in enumerate(values)
        ]
        picked = sorted(product(*options), key=lambda of: sum(one is not None for one in of))
        for combination in picked[1 : 1 + MOST_CHOICES]:
            yield self.restricted({j: one for j, one in enumerate(combination) if one is not None})

    def phase_fixings(self, *, real_too: bool) -> Iterator["Subject"]:
        """The subject with each possible choice of outputs with fixed phases. real_too: also fix the
        signs of real outputs."""
        found = self.map.run_with_grad()
        outputs = [found[i] for i in self.map.which]
        if real_too or any(y.is_complex() for y in outputs):
            for fixing in phase_fixings_of(outputs):
                yield self.restricted(self.kept, fixing)

    def prepared(self) -> tuple["Subject", Row | None]:
        """The subject with `seeds` if the function draws random numbers, and with `clones` if it
        changes its inputs; and a failed row if nothing can be compared, otherwise None."""
        # restore inputs changed by this call: the point must not move
        before = [x.clone() for x in self.x]
        self.map.leaves(*self.x)  # may change its inputs, declared or not
        changed = any(not same(a, b) for a, b in zip(before, self.x, strict=True))
        for x, value in zip(self.x, before, strict=True):
            put_back(x, value)
        f = replace(self.map, clones=self.map.clones or changed).to_differentiable()
        subject = replace(self, map=f)
        if not f.which:
            text = (
                "the first derivative is missing: no output with elements requires grad. Is it a "
                "constant, detached, marked non-differentiable, in a list or dict that a Function "
                "gets or returns, or in an object that is no tuple, list or dict?"
            )
            return subject, Row("first derivative: reverse", "fail", None, text)

        def drawn(seed: int) -> tuple[list[Tensor], list[Tensor]]:
            maps.seed_all(seed)
            leaves, values = maps.at_leaves(f, self.x)
            try:
                grads = maps.grad(values, leaves, create_graph=True)
            except Exception:  # reported by the derivative checks
                grads = []
            return [y.detach() for y in values], [g.detach() for g in grads]

        # two seeds: without random numbers, values and gradients are equal
        (a, da), (b, db) = drawn(1), drawn(2)
        generators = any(isinstance(x, torch.Generator) for x in pytree.leaves(f.inputs))
        draws = generators or not _nearly_same(a, b)
        f = f.seeded() if draws or not _nearly_same(da, db) else f
        subject = replace(self, map=f, draws=draws)
        if draws and not _nearly_same(f(*self.x), f(*self.x)):
            text = (
                "two calls with the same seeds of torch, NumPy and random give other values (hidden "
                "nondeterminism), so nothing can be compared. Does it count its calls, or draw from a "
                "generator of its own? Pass random numbers as inputs."
            )
            return subject, Row("deterministic", "fail", None, text)
        subject = subject.in_units(() if f.seeds else a)  # a was drawn with another seed
        again = subject._second_backward_fault()
        return subject, Row("deterministic", "fail", None, again) if again else None

    def in_units(self, values: Sequence[Tensor] = ()) -> "Subject":
        """The subject with outputs in units of their sizes (`Map.in_units`). values: at its point.

        Small values do not show their size: they may be left over from terms that cancel. The size of
        the terms shows when the inputs move by a few units of rounding:

            |f(x + e x) - f(x)| / e  ~  |J x| + |terms|
        """
        f = self.map
        values = values or f(*self.x)
        sizes = [max_abs(y) for y in values]
        if self.precision.half is None and any(size < 1 / ORDINARY for size in sizes):
            least = SMALL * max(map(max_abs, self.x), default=0.0)
            with suppress(Exception):  # fn may refuse inputs that the user did not pass
                e = FEW_ROUNDINGS * self.eps
                random = torch.Generator().manual_seed(12)
                near = f(*(x + e * random_like(x, random) * x for x in self.x))
                moved = (max_abs(a - b) / e for a, b in zip(near, values, strict=True))
                sizes = [max(a, min(b, least)) for a, b in zip(sizes, moved, strict=True)]
        return replace(self, map=f.in_units(sizes))

    def _second_backward_fault(self) -> str:
        """A sentence if a second backward pass through one graph, with equal seeds, differs from the
        first; "" if it agrees or is refused."""
        leaves, values = maps.at_leaves(self.map, self.x)

        def once() -> list[Tensor]:
            maps.seed_all()
            return [g.detach().clone() for g in maps.grad(values, leaves, retain_graph=True)]

        try:
            first = once()
        except Exception:  # reported by the derivative checks
            return ""
        try:
            second, did = once(), "gives a different gradient"
        except RuntimeError:  # torch's error: the graph allows one pass only
            return ""
        except Exception as error:
            second, did = [], f"raises {type(error).__name__}: {error}".splitlines()[0]
        if _nearly_same(first, second, 1e-6):
            return ""
        changed = {name for app in self.applications for name in app.changed_by_backward()}
        why = (
            f"backward changes {', '.join(sorted(changed))}, which it must not do."
            if changed
            else "it draws from a generator of its own, counts its calls, adds to .grad of what it "
            "saved, or frees what it reads."
        )
        return (
            f"a second backward pass through the same graph {did}: {why} Nothing can be compared."
        )

    def perturbed_point(self) -> list[Tensor]:
        """A point near the inputs, without zeros; the inputs if fn is not defined there."""
        moved = []
        for x in self.x:
            part = torch.rand(x.shape, dtype=torch.float64, generator=self.random, device="cpu")
            part = part.to(x.device, x.dtype)
            moved.append(torch.where(x == 0, 0.005 * (1 + part), x * (1 - 0.02 * part)))
        try:
            pairs = zip(self.map(*moved), self.map(*self.x), strict=True)
            defined = all(bool((a.isfinite() | ~b.isfinite()).all()) for a, b in pairs)
        except Exception:  # fn may refuse inputs that the user did not pass
            defined = False
        return moved if defined else self.x

    def gradient_of_sum(self, x: Sequence[Tensor]) -> list[Tensor]:
        leaves, values = maps.at_leaves(self.map, x)
        return maps.grad(values, leaves)

    @property
    def x(self) -> list[Tensor]:
        return self.map.point

    @property
    def rows(self) -> list[str]:
        """The names of the outputs."""
        return [f"output {i}" for i in self.map.which]

    @property
    def dtype(self) -> torch.dtype:
        return maps.coarsest_dtype(self.x)

    @property
    def eps(self) -> float:
        """The unit roundoff of the function's working dtype."""
        return float(torch.finfo(self.precision.half or self.dtype).eps)

    @property
    def offers_forward(self) -> bool | None:
        """Whether every custom Function declares a jvp; None without custom Functions."""
        return all(map(function_rules.offers_jvp, self.functions)) if self.functions else None

    @property
    def offers_vmap(self) -> bool | None:
        """Whether every custom Function offers vmap; None if unknown, or without custom Functions."""
        offered = all(map(function_rules.offers_vmap, self.functions))
        if offered and any(hasattr(function, "operator") for function in self.functions):
            return None  # torch has vmap of an operator of torch.library, but not of its gradient
        return offered if self.functions else None


def subject_of(
    fn: object, inputs: Sequence[Any], *, own_dtype: bool = False, as_given: bool = False
) -> Subject:
    """The subject of a call fn(*inputs).

    own_dtype: keep the dtypes of the inputs. as_given: keep their memory layouts.
    """
    f, precision = choose_map(fn, inputs, own_dtype=own_dtype)
    asked = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.leaves(f.inputs))
    function = maps.as_function(fn)
    own_names = () if function is None else argument_names(function, len(inputs))
    # a call must show which inputs are constants; then the map is made again without them
    found = [] if asked else [f.variables[j] for j in constants_of(f, own_names)]
    if found:
        own = maps.map_of(fn, with_constants(inputs, [one.slot for one in found]), f.dtype).scaled()
        own = own if f.dtype else own.rounded()
        f = replace(own, clones=f.clones, needs_graph=f.needs_graph)
    f = f.laid_out_as_given() if as_given else f
    named = {f"inputs[{i}]": f"inputs[{i}] ({name})" for i, name in enumerate(own_names)}
    names, constants = [named.get(name, name) for name in f.names], [one.name for one in found]
    f, symmetric = keep_symmetric(f)
    outputs: list[Any] = []
    apps = watch_applications(lambda: outputs.extend(f.run_with_grad()))
    functions = maps.custom_functions(outputs)
    return Subject(f, precision, names, constants, symmetric, apps, functions)


def _nearly_same(a: Sequence[Tensor], b: Sequence[Tensor], rtol: float = 1e-12) -> bool:
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(torch.allclose(p, q, rtol=rtol, atol=0.0, equal_nan=True) for p, q in pairs)


class ModuleCall(NamedTuple):
    """The call of a Function as a call of a module, and the report row about it."""

    fn: nn.Module  # holds the user's module, and applies the Function
    inputs: tuple[Any, ...]  # the remaining arguments
    row: Row


def lift_to_module(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> ModuleCall | None:
    """The call of a Function through a module, if its arguments are a module (or a callable that holds
    one) together with its parameters; otherwise None."""
    function = maps.as_function(fn)
    if function is None:
        return None
    leaves, structure = pytree.flatten(inputs)
    blocks = [m for leaf in leaves if callable(leaf) for m in _modules_among(leaf)]
    block = nn.ModuleList(dict.fromkeys(blocks))
    names = {id(p): name for name, p in block.named_parameters()}
    places = {i: names[id(x)] for i, x in enumerate(leaves) if id(x) in names}
    if not places:
        return None
    module = _WithBlock(function, block, structure, places)
    rest = pytree.unflatten([None if i in places else x for i, x in enumerate(leaves)], structure)
    name = function.__name__
    text = (
        f"{name} gets a module and {len(places)} of its parameters. The module computes with its own "
        "parameters, not with copies, so this call was verified through a module that holds it, by "
        "its parameters. To do that yourself, wrap it:\n"
        "    class Wrapped(torch.nn.Module):\n"
        "        def __init__(self, block):\n"
        "            super().__init__()\n"
        "            self.block = block\n"
        "        def forward(self, x):\n"
        f"            return {name}.apply(self.block, x, *self.block.parameters())"
    )
    return ModuleCall(module, rest, Row("arguments: a module", "warn", None, text))


def _modules_among(value: object) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    return [capture.value for capture in held(value) if isinstance(capture.value, nn.Module)]


@final
class _WithBlock(nn.Module):
    """Applies a Function to arguments and to the current parameters of its block."""

    def __init__(
        self, function: type[Function], block: nn.ModuleList, structure: Any, places: dict[int, str]
    ) -> None:
        super().__init__()
        self.block = block
        self._function, self._structure, self._places = function, structure, places

    def forward(self, *inputs: Any) -> Any:
        own = dict(self.block.named_parameters())
        leaves = enumerate(pytree.leaves(inputs))
        given = [own[self._places[i]] if i in self._places else x for i, x in leaves]
        return self._function.apply(*pytree.unflatten(given, self._structure))
