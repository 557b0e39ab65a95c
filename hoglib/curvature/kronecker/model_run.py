"""One run of a model, in which its layers are recorded, and checked against autograd.

The one idea is that of weights which are shared. A layer uses its weight at every position t of an
example n: the pixels of an image, the tokens of a text, the calls of a recurrent layer. Whatever its
type, what went in and the gradients by what came out are brought into one form, the weight sharing
format [batch, shared, features]; for a convolution a position is a patch, for an embedding an index.
There every layer is s_nt = W a_nt, and the gradient of an example is

    dW_n = sum_t g_nt a_nt^T        a_nt [into], g_nt [out] = dl_n / ds_nt

of which the factors of Kronecker products are made, with rows r = (n, t) that are one dimension:

    expand    each row counts as an example of its own:   A = mean_r a_r a_r^T,  G = sum_r g_r g_r^T
    reduce    the rows of an example are one:             a_n = mean_t a_nt,     g_n = sum_t g_nt

How rows are ordered, examples or positions first, is not written on a tensor: it is found by which rows
have gradients of which examples' outputs (`RowOrder`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core.messages.validation import listing
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import keep_swapped, reapply
from hoglib._core.numerics.trust import SUMS, agree
from hoglib._core.problem import Problem
from hoglib._core.substrate.autograd import (
    Vector,
    fresh_leaves,
    materialize_grads,
    translate_errors,
    without_graph,
)
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_modes import plain_operations
from hoglib.curvature.algebra.vector_space import Space
from hoglib.curvature.batches.data import as_dict, first_examples, row_count
from hoglib.curvature.batches.single_examples import by_vmap_or_loop
from hoglib.curvature.kronecker.kronecker import BlockLayout, not_none
from hoglib.curvature.kronecker.layer_calls import (
    LayerCall,
    LayerRecorder,
    Region,
    Role,
    unlike_rows,
)
from hoglib.curvature.maps.fisher_metric import FisherMetric, columns, examples_of
from hoglib.curvature.maps.gauss_newton import CompositeLoss, check_depends
from hoglib.curvature.maps.jacobian_product import with_graph
from hoglib.errors import UnsupportedError

AT_ONCE = 2**24  # numbers of examples' gradients that are held at once


class Layer(NamedTuple):
    """A block and the calls that it is of, in one run of the model."""

    layout: BlockLayout
    calls: list[LayerCall]


@final
class Gradients:
    """The gradients of one column by the outputs of calls, as rows."""

    def __init__(
        self, run: "ModelRun", calls: list[LayerCall], found: list[Tensor | None], column: Vector
    ) -> None:
        self.column, self._dtype, self._device = column, run.dtype, run.device
        self._found = {id(call): part for call, part in zip(calls, found, strict=True)}

    def of(self, call: LayerCall) -> Tensor:
        """g_r of one call, [groups, rows, out]."""
        return call.rows_of_outputs(self.like_output(call)).to(self._dtype)

    def rows(self, layer: Layer) -> list[Tensor]:
        """g_r of each call of a layer, [groups, rows, out], of a block of a bias alone of one group; of
        layers that scale and shift the gradient of each row by scale and shift, [rows, into]."""
        found = []
        for call in layer.calls:
            g = self.of(call)
            if layer.layout.role.matrix == "diagonal":
                parts = [] if layer.layout.bias is None else [g[0]]
                if layer.layout.weight is not None:
                    parts.insert(0, g[0] * call.inputs()[0].to(g.dtype))
                g = torch.cat(parts, -1)
            elif layer.layout.weight is None and len(g) > 1:
                g = g.movedim(0, 1).reshape(1, g.shape[1], -1)
            found.append(g)
        return found

    def of_examples(self, layer: Layer, examples: int) -> Tensor:
        """g_r of all calls by example, [..., examples, positions of all calls, features]."""
        return by_example(layer, self.rows(layer), examples)

    def like_output(self, call: LayerCall) -> Tensor:
        """The gradient by the output of a call, like that output."""
        found = self._found[id(call)]
        if found is None:
            return torch.zeros(call.shape, dtype=self._dtype, device=self._device)
        return found


def input_rows(layer: Layer, call: LayerCall, dtype: torch.dtype) -> Tensor:
    """a_r with a 1 for the bias, [groups, rows, into]; of a block of a bias alone the 1."""
    groups, _, _ = layer.layout.sizes
    if layer.layout.weight is None:
        return torch.ones(1, call.rows, 1, dtype=dtype, device=call.device)
    a = call.inputs().to(dtype)
    return a if layer.layout.bias is None else torch.cat([a, a.new_ones(groups, a.shape[1], 1)], -1)


def mean_inputs(layer: Layer, examples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """a_n, the mean over the rows of an example of all calls, [groups, examples, into]."""
    groups, _, _ = layer.layout.sizes
    ones = torch.ones(groups, examples, 1, dtype=dtype, device=device)
    if layer.layout.weight is None:
        return ones
    total = sum(call.rows for call in layer.calls)
    given = ((call, call.by_example(call.inputs().to(dtype), examples)) for call in layer.calls)
    # the mean is over the rows of all calls: a call with more of them weighs more
    weighted = [call.rows / total * a.mean(2) for call, a in given]
    mean = torch.stack(weighted).sum(0) if len(weighted) > 1 else weighted[0]
    return mean if layer.layout.bias is None else torch.cat([mean, ones], -1)


def is_embedding(layer: Layer) -> bool:
    """Whether inputs are indices."""
    return layer.layout.role.name == "embedding"


def summed_gradient(layer: Layer, gradients: Gradients, dtype: torch.dtype) -> Tensor:
    """The gradient by V, summed over all rows."""
    _, out, into = layer.layout.sizes
    role = layer.layout.role
    total: Any = 0.0
    for call, rows in zip(layer.calls, gradients.rows(layer), strict=True):
        if role.matrix == "diagonal":
            part = rows.sum(0).reshape(1, 1, -1)
        elif is_embedding(layer):
            at, g = call.inputs()[0, :, 0], rows[0]
            seen = at >= 0
            part = g.new_zeros(into, out).index_add(0, at[seen], g[seen]).T.unsqueeze(0)
        elif call.has_patches() and layer.layout.weight is not None:
            g = gradients.like_output(call).to(dtype)
            part = call.weight_gradients(g, 0, len(g)).sum(0)
            if layer.layout.bias is not None:
                part = torch.cat([part, rows.sum(1).unsqueeze(-1)], -1)
        else:
            part = rows.mT @ input_rows(layer, call, dtype)
        if role.matrix == "elementwise":
            # all calls have one slope: others show, as the gradient then differs from autograd's
            part = (role.stored(part.unsqueeze(0)) * not_none(layer.calls[0].slope)).unsqueeze(0)
        total = total + part
    return total


def by_example(layer: Layer, rows: Sequence[Tensor], examples: int) -> Tensor:
    """Rows of each call as [..., examples, positions of all calls, features]."""
    parts = [call.by_example(x, examples) for call, x in zip(layer.calls, rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def layer_gradients(layer: Layer, gradients: Gradients, run: "ModelRun") -> Iterator[list[Tensor]]:
    """The gradients of the examples by the weight and the bias of a layer, [n, numbers] each, some at a
    time."""
    N, role = run.examples, layer.layout.role
    g = gradients.of_examples(layer, N)
    if layer.layout.weight is None:
        yield [g.sum(2).movedim(1, 0).flatten(1)]
        return
    direct = all(call.has_patches() and call.shape[0] == N for call in layer.calls)
    inputs = [] if direct else [call.inputs().to(run.dtype) for call in layer.calls]
    a = None if direct else by_example(layer, inputs, N)
    size = max(1, AT_ONCE // (role.groups * role.into * role.out))
    for start in range(0, N, size):
        stop = min(start + size, N)
        # patches of a convolution are many times its input
        if a is None:
            given = ((call, gradients.like_output(call).to(run.dtype)) for call in layer.calls)
            parts = [call.weight_gradients(u, start, stop) for call, u in given]
            found = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        else:
            found = (g[:, start:stop].mT @ a[:, start:stop]).movedim(1, 0)
        if role.matrix == "elementwise":
            found = role.stored(found) * not_none(layer.calls[0].slope)
        rows = [found.flatten(1)]
        if layer.layout.bias is not None:
            rows.append(g[:, start:stop].sum(2).movedim(1, 0).flatten(1))
        yield rows


def _leave_out(names: Sequence[str]) -> str:
    """The advice, with the names of all parameters that are refused."""
    given = ", ".join(map(repr, names))
    return f"leave out all of these: `{{n: p for n, p in params.items() if n not in [{given}]}}`."


@final
@dataclass(frozen=True)
class FactorOptions:
    """What factors are of, checked."""

    metric: FisherMetric
    approximation: str
    joint_bias: bool
    unsupported: str = "raise"


class RowOrder(NamedTuple):
    """How the calls of layers are read, as was found at a first batch.

    Attributes:
        time_first: Of each call, in the order of calls, whether positions come before examples.
        expand: Embeddings that are computed once for all examples are taken as one of each.
        unexplained: The leaves whose gradients are not those of layers; None where any may be.
        separable: Whether an example by itself may show these.
    """

    time_first: tuple[bool, ...] = ()
    expand: bool = True
    unexplained: frozenset[int] | None = None
    separable: bool = True


DEFAULT_ORDER = RowOrder()
EXACT_DIAGONAL = "unsupported"  # the name of the role of those leaves


@final
class Unexplained(UnsupportedError):
    """Layers do not give the gradients by these leaves."""

    def __init__(self, message: str, leaves: Iterable[int]) -> None:
        super().__init__(message)
        self.leaves = frozenset(leaves)


@final
class ModelRun:
    """A model's outputs at a batch, and the calls of its layers."""

    def __init__(
        self, problem: Problem, space: Space, options: FactorOptions, order: RowOrder | None = None
    ) -> None:
        order = order or DEFAULT_ORDER
        self.problem, self.space, self.options = problem, space, options
        self._names, self._caller = pytree.paths(space.params), problem.policy.caller
        self._leaves = fresh_leaves(problem.leaves, False)
        (batch,) = problem.args
        self._composite = CompositeLoss(problem, options.metric, "reverse")
        recorder = self._run(row_count(batch) or 1 if order.expand else 1)
        self.expanded, self.selects = recorder.expanded, recorder.selects
        check_depends(with_graph(self._outputs))
        self._recorded = recorder.calls
        self._expand, self.separable = order.expand, order.separable
        self._leave_to_examples(order.unexplained or frozenset())
        try:
            self._check_covered(recorder)
        except Unexplained as error:
            if options.unsupported == "raise" or order.unexplained is not None:
                raise UnsupportedError(str(error)) from None
            self._leave_to_examples(error.leaves)
        self.set_row_order(order)
        self.examples = examples_of(self._composite, self._outputs)
        # accumulate in float32 at least
        self.dtype, self.device = torch.promote_types(space.dtype, torch.float32), space.device

    def _leave_to_examples(self, leaves: frozenset[int]) -> None:
        """Take these leaves out of the layers: their blocks are exact diagonals, by single examples."""
        for call in self._recorded:
            call.weight = None if call.weight and call.weight.leaf in leaves else call.weight
            call.bias = None if call.bias and call.bias.leaf in leaves else call.bias
        self._recorded = [call for call in self._recorded if call.weight or call.bias]
        self.layers = layers_of(self._recorded, self.options.joint_bias)
        self.unexplained: dict[int, BlockLayout] = {}
        for i in sorted(leaves):
            role = Role(EXACT_DIAGONAL, "elementwise", into=self._leaves[i].numel())
            self.unexplained[i] = BlockLayout(role, Region.of_all(i, self._leaves[i]), None)

    def _run(self, examples: int) -> LayerRecorder:
        """Run the model, recorded."""
        recorder = LayerRecorder(self._leaves, examples)
        try:
            with keep_swapped() as swapped, plain_operations(self._caller), recorder:
                self._outputs = self._composite.outputs(self._leaves)
                # a Function that calls the model in its backward finds the leaves of this run there
                self._patches = swapped.values()
        except Exception:
            if not recorder.expanded:
                raise
            return self._run(1)  # code that counts on one row of positions for all examples
        return recorder

    def rerun(self, batch: Any, order: RowOrder = DEFAULT_ORDER) -> "ModelRun":
        """A run at another batch, or with rows read otherwise."""
        order = order._replace(unexplained=frozenset(self.unexplained), separable=self.separable)
        return ModelRun(self.problem.with_args(batch), self.space, self.options, order)

    def without_layers_of(self, error: Unexplained) -> "ModelRun":
        """A run in which the leaves of an error are left to single examples; raises where that is not
        asked for, or was tried."""
        more = error.leaves - self.unexplained.keys()
        if self.options.unsupported == "raise" or not (more or self.separable):
            raise UnsupportedError(str(error)) from None
        leaves, separable = (error.leaves | self.unexplained.keys(), self.separable and bool(more))
        order = RowOrder(expand=self.expanded, unexplained=leaves, separable=separable)
        with preserve_random_state():
            return ModelRun(self.problem, self.space, self.options, order)

    def outputs_of_an_example(self) -> int:
        """How many numbers the outputs of an example have, those of all its positions."""
        return sum(y.numel() for y in self._outputs) // self.examples

    def value(self) -> Tensor:
        """The loss."""
        values = [y.detach() for y in self._outputs]
        return without_graph(lambda: self._composite.criterion(*values))

    def outputs(self) -> tuple[Any, Vector]:
        """The outputs without a graph, in the form of ``loss.outputs``, and their tensors."""
        values = [y.detach() for y in self._outputs]
        return self._composite.with_values(values), values

    def columns(self) -> Iterator["Gradients"]:
        """For each column s_c of M the gradients by the outputs of all calls."""
        given = [y.detach() for y in self._outputs]
        return map(self.gradients, columns(self.options.metric, self._composite, given))

    def gradients(self, column: Vector) -> "Gradients":
        calls = self._calls()
        found = self._backward([call.edge for call in calls], column)
        return Gradients(self, calls, found, column)

    def of_single_examples(self, column: Vector) -> Iterator[Vector]:
        """The gradients of the examples by each leaf that layers do not explain, [n, numbers], some at
        a time: of an example alone, where it has the same outputs as in the batch; else of the batch,
        by a backward pass for each example."""
        own = [self._leaves[i] for i in self.unexplained]
        size = max(1, AT_ONCE // max(sum(p.numel() for p in own), 1))
        for start in range(0, self.examples if own else 0, size):
            stop = min(start + size, self.examples)
            found = self._of_separate_examples(column, start, stop)
            if found is None:
                number = torch.arange(self.examples, device=self.device)
                ones = (number == n if len(number) > 1 else None for n in range(start, stop))
                each = [self._backward(own, _mask_examples(column, one)) for one in ones]
                rows = (materialize_grads(parts, own) for parts in each)
                found = [torch.stack(parts) for parts in zip(*rows, strict=True)]
            yield [x.flatten(1).to(self.dtype) for x in found]

    def _of_separate_examples(self, column: Vector, start: int, stop: int) -> Vector | None:
        """The same of examples by themselves; None where these have other outputs, or none."""
        batch, leaves = as_dict(self.problem.args[0]), self.problem.leaves
        if not self.separable or self.examples < 2 or row_count(batch) != self.examples:
            return None

        def along(own: Vector, given: Any) -> Tensor:
            one, u = given
            # copies: a model may assign to what it finds
            at = {i: p.detach() for i, p in enumerate(leaves)}
            # all other parameters are constants
            at |= dict(zip(self.unexplained, own, strict=True))
            composite = CompositeLoss(self.problem.with_args(one), self.options.metric, "reverse")
            every = zip(composite.outputs(list(at.values())), u, strict=True)
            return torch.stack([(y * part).sum() for y, part in every]).sum()

        piece = pytree.rows((batch, list(column)), self.examples, start, stop)
        given = [leaves[i] for i in self.unexplained]
        problem = Problem(self.problem.policy, along, pytree.flatten(given)[1], given, (piece,))
        same, found = False, None
        with suppress(Exception), preserve_random_state():  # else the batch is differentiated
            values, found = by_vmap_or_loop(problem)
            pairs = zip(self._outputs, column, strict=True)
            terms = [(y.detach() * u)[start:stop].flatten(1) for y, u in pairs]
            sums, sizes = torch.cat(terms, 1).sum(1), torch.cat(terms, 1).abs().sum(1)
            # trusted only where an example by itself has the outputs that it has in the batch
            same = agree(values, sums, SUMS, terms=[sizes])
        self.separable = same
        return found if same else None

    def _calls(self) -> list[LayerCall]:
        found = {id(call): call for layer in self.layers for call in layer.calls}
        return list(found.values())

    def _backward(self, inputs: Sequence[Any], column: Vector) -> list[Tensor | None]:
        if not inputs:
            return []
        pairs = [(y, u) for y, u in zip(self._outputs, column, strict=True) if y.requires_grad]
        values, weights = zip(*pairs, strict=True)
        # a backward that calls the model again has to find the parameters of this run
        with translate_errors(self._caller), reapply(self._patches):
            grad: Any = torch.autograd.grad
            return list(grad(values, inputs, weights, retain_graph=True, allow_unused=True))

    def check(self, needs_examples: bool) -> None:
        """Compare the gradient of some examples' outputs, as the layers give it, with autograd's.

        It shows uses of parameters that were not seen, and layers that mix examples.
        """
        calls = self._calls()
        half = next(iter(self._halves()), None)
        column = self._probe(half)
        found = self._backward([*(call.edge for call in calls), *self._leaves], column)
        gradients = Gradients(self, calls, found[: len(calls)], column)
        wanted = materialize_grads(found[len(calls) :], self._leaves)
        self.check_apart(needs_examples, gradients)
        ours = [p.new_zeros((1, *(p.shape or (1,))), dtype=self.dtype) for p in self._leaves]
        summed: list[Any] = [0.0] * len(self._leaves)
        everything: Any = 0.0
        if self.unexplained:
            everything = torch.stack([x.norm().to(self.dtype) for x in wanted]).norm().double()
        for parts in self.of_single_examples(column) if self.separable else ():
            for i, part in zip(self.unexplained, parts, strict=True):
                summed[i] = everything
                ours[i] += part.sum(0).view(ours[i].shape)
        for layer in self.layers:
            terms = sum(call.rounding(gradients.like_output(call)).double() for call in layer.calls)
            for region in layer.layout.regions:
                summed[region.leaf] += terms
            layer.layout.scatter(summed_gradient(layer, gradients, self.dtype).unsqueeze(0), ours)
        off = []
        for one, p, given, terms in zip(ours, self._leaves, wanted, summed, strict=True):
            difference = one.view(p.shape).sub_(given).norm()
            # ten times the root of the rounding: TensorFloat-32 and sums in another order; a gradient
            # that is zero, as that of the bias of keys, is only rounding
            eps = torch.finfo(p.dtype).eps
            off.append(difference > 10 * (eps**0.5 * given.norm().to(self.dtype) + eps * terms))
        answers = torch.stack(off).tolist()  # a device is waited for once
        # backward passes of the batch are right by themselves
        right = () if self.separable else self.unexplained
        wrong = [i for i, one in enumerate(answers) if one and i not in right]
        refused = [self._names[i] for i in wrong]
        if refused:
            raise Unexplained(
                f"{self._caller}: expected params[{refused[0]!r}] to be used by layers "
                "alone, got a gradient of which these are only a part: a custom Function, scripted "
                f"or compiled code uses it too; {_leave_out(refused)}",
                wrong,
            )

    def check_apart(self, needs_examples: bool, first: Gradients | None = None) -> None:
        """Raise where a row has gradients of the outputs of several examples, or, where rows have to be
        those of an example, where they are in another order. Find that order.

        first: the gradients of the probe of the first half, where they are known.
        """
        if self.examples < 2 or not self.layers:
            return
        calls, halves = self._calls(), self._halves()
        touched: dict[int, list[Tensor]] = {id(call): [] for call in calls}
        for half in halves:
            gradients, first = first or self.gradients(self._probe(half)), None
            for call in calls:
                touched[id(call)].append((gradients.of(call) != 0).any(-1).any(0))
        both = [(layer, call) for layer in self.layers for call in layer.calls]
        asked: list[Tensor] = []
        for _, call in both:
            of_call = touched[id(call)]
            pairs = zip(of_call[::2], of_call[1::2], strict=True)
            asked += [_any_of(a & b for a, b in pairs), *self._mismatches(halves, of_call)]
        # all questions in one read, for which a device waits once
        answers = iter(torch.stack(asked).tolist())
        refused: list[tuple[Layer, LayerCall]] = []
        for layer, call in both:
            needed = needs_examples or layer.layout.role.matrix != "kronecker"
            mixed, example_first, time_first = next(answers), not next(answers), not next(answers)
            if needed and not mixed and (example_first or time_first):
                if example_first and time_first:
                    # one position has gradients, for instance: by the shape
                    time_first = call.shape[0] != self.examples
                    time_first = time_first and call.shape[1:2] == (self.examples,)
                call.time_first = time_first
            elif mixed or needed:
                refused.append((layer, call))
        if refused:
            layer, call = refused[0]
            leaves = [r.leaf for one, _ in refused for r in one.layout.regions]
            names = [self._names[i] for i in leaves]
            raise Unexplained(
                f"{self._caller}: expected layers that treat the "
                f"{self.examples} examples apart, in the rows of their leading dimension, got "
                f"{self._name(layer)} with outputs {tuple(call.shape)}. Batch norm in train mode mixes "
                "examples, and dropout hides which belong to a row: call model.eval(). What is called "
                f"once for all examples, as position embeddings are, or for some of them, has no "
                f"gradients of each: {_leave_out(names)}",
                leaves,
            )

    def check_if_rows_selected(self, needs_examples: bool) -> None:
        """Check this batch where its values can decide which rows are of which example."""
        roles = (layer.layout.role.matrix for layer in self.layers)
        # rows that values choose (sorting, routing, masks) may be others in each batch
        if self.selects and (needs_examples or {*roles} - {"kronecker"}):
            self.check_apart(needs_examples)

    def _halves(self) -> list[Tensor]:
        """Which examples [N] are in a half, and in the other: those whose number has a bit, for each
        bit, which tells every two examples apart."""
        # one halving is not enough: a class token behind attention took the rows of other examples
        numbers = torch.arange(self.examples, device=self.device)
        bits = range((self.examples - 1).bit_length())
        return [(numbers >> bit) % 2 == value for bit in bits for value in (0, 1)]

    def _probe(self, half: Tensor | None) -> Vector:
        """A random column of the outputs of half of the examples, and zeros; of all for None."""
        # of its own: the check leaves torch's random numbers as they are
        generator = torch.Generator().manual_seed(0)
        column = []
        for y in self._outputs:
            u = torch.randn(y.shape, generator=generator, dtype=torch.float32, device="cpu")
            u = u.to(y.device, y.dtype, non_blocking=True)
            column.append(u)
        return _mask_examples(column, half)

    def _mismatches(self, halves: Sequence[Tensor], touched: Sequence[Tensor]) -> list[Tensor]:
        """Whether rows are in another order than that of examples, and of positions first, from those
        that halves of the examples touch."""
        count, rows = self.examples, len(touched[0])
        if rows % count:
            return [torch.ones((), dtype=torch.bool, device=self.device)] * 2
        at = torch.arange(rows, device=self.device)
        orders = at // (rows // count), at % count
        both = list(zip(halves, touched, strict=True))
        return [_any_of(has & ~half[order] for half, has in both) for order in orders]

    def time_first(self) -> tuple[bool, ...]:
        """Of each call, whether positions come before examples."""
        return tuple(call.time_first for call in self._recorded)

    def set_row_order(self, order: RowOrder) -> None:
        """Order rows as in another run."""
        for call, time_first in zip(self._recorded, order.time_first, strict=False):
            call.time_first = time_first

    def row_order(self) -> RowOrder:
        """How calls are read. Where something was expanded, the outputs have to be those of a run
        without it."""
        (batch,), expand = self.problem.args, self._expand
        if self.expanded:
            with preserve_random_state():
                others = self.rerun(batch, RowOrder(expand=False))._outputs
            expand = all(agree(a, b, SUMS) for a, b in zip(self._outputs, others, strict=True))
        return RowOrder(self.time_first(), expand, frozenset(self.unexplained), self.separable)

    def first_mismatch(self, other: "ModelRun") -> LayerCall | None:
        """The first call of another run of the same model that has more or fewer rows of an example."""
        mine, theirs = self._recorded, other._recorded
        for a, b in zip_longest(mine, theirs):
            if a is None or b is None:
                return b or theirs[-1]
            if a.rows * other.examples != b.rows * self.examples:
                return b
        return None

    def _name(self, layer: Layer) -> str:
        return f"{layer.layout.role.name} with {self._names[layer.layout.first.leaf]}"

    def _check_covered(self, recorder: LayerRecorder) -> None:
        """Raise for parameters, or rows of them, that no layer uses, or more than one."""
        known = "parameters of linear, convolutional, embedding and normalization layers"
        refused = {}
        for number, (name, leaf) in enumerate(zip(self._names, self._leaves, strict=True)):
            if number in self.unexplained:
                continue
            regions = (region for layer in self.layers for region in layer.layout.regions)
            uses = sorted(region for region in regions if region.leaf == number)
            ends = [0, *(region.stop for region in uses)]
            starts = [*(region.start for region in uses), len(leaf) if leaf.dim() else 1]
            if other := recorder.other_uses.get(number):
                refused[name] = f"{known}, got params[{name!r}], which {other} uses"
            elif not uses:
                refused[name] = (
                    f"{known}, got params[{name!r}], which no such layer uses: the loss does not "
                    "depend on it, or a custom Function uses it"
                )
            elif starts != ends:
                refused[name] = (
                    f"every row of params[{name!r}] to be used by one kind of layer, got rows "
                    f"{listing([f'{r.start} to {r.stop}' for r in uses])} used by layers of different "
                    "kinds (an embedding tied to the output layer, for instance)"
                )
        if refused:
            first = next(iter(refused.values()))
            raise Unexplained(
                f"{self._caller}: expected {first}; {_leave_out([*refused])}",
                map(self._names.index, refused),
            )


def _mask_examples(column: Vector, of: Tensor | None) -> Vector:
    """A column of some examples, with zeros for the others; as it is for None."""
    return column if of is None else [u.where(of.view(-1, *[1] * (u.dim() - 1)), 0) for u in column]


def _any_of(masks: Iterable[Tensor]) -> Tensor:
    return torch.stack([mask.any() for mask in masks]).any()


def checked_run(run: ModelRun, needs_examples: bool) -> tuple[ModelRun, RowOrder]:
    """The run of a model, after the layers were compared with autograd: at two examples, where a batch
    can be split. With how the rows of calls are read."""
    try:
        return _checked_run(run, needs_examples)
    except Unexplained as error:
        return checked_run(run.without_layers_of(error), needs_examples)


def _checked_run(run: ModelRun, needs_examples: bool) -> tuple[ModelRun, RowOrder]:
    (batch,) = run.problem.args
    # at two examples the check costs little
    small, mismatch = first_examples(batch, 2), None
    checked: RowOrder | None = None
    if small is not None:
        # whatever two examples alone run into, the whole batch decides
        with suppress(Exception), preserve_random_state():
            few = run.rerun(small)
            few.check(needs_examples)
            order = few.row_order()
            if run.expanded and not order.expand:
                run = run.rerun(batch, order)
            run.set_row_order(order)
            if few.expanded == run.expanded:
                mismatch = few.first_mismatch(run) if needs_examples else None
                if mismatch is None:
                    checked = order
        if mismatch is not None:
            leaves = [r.leaf for r in (mismatch.weight, mismatch.bias) if r]
            raise Unexplained(unlike_rows(mismatch, run.examples), leaves)
        if checked is not None:
            run.check_if_rows_selected(needs_examples)
            return run, checked._replace(time_first=run.time_first(), separable=run.separable)
    run.check(needs_examples)
    order = run.row_order()
    if run.expanded and not order.expand:
        run = run.rerun(batch, order)
        run.check(needs_examples)
    return run, order


def layers_of(calls: Sequence[LayerCall], joint_bias: bool) -> list[Layer]:
    """The calls by the block that they belong to, in the order of the parameters.

    A bias is in the block of its weight where the calls of both are the same.
    """
    by_weight: dict[Any, list[LayerCall]] = {}
    by_bias: dict[Region, list[LayerCall]] = {}
    for call in calls:
        if call.weight is not None:
            by_weight.setdefault((call.weight, call.role), []).append(call)
        if call.bias is not None:
            by_bias.setdefault(call.bias, []).append(call)
    layers = []
    for (weight, role), calls in by_weight.items():
        biases = {call.bias for call in calls}
        bias = biases.pop() if len(biases) == 1 else None
        shared = bias is None or len(by_bias[bias]) != len(calls)
        if shared or role.matrix == "elementwise" or not (joint_bias or role.matrix == "diagonal"):
            bias = None
        else:
            assert bias is not None
            del by_bias[bias]
        layers.append(Layer(BlockLayout(role, weight, bias), calls))
    for bias, calls in by_bias.items():
        role = calls[0].role._replace(transposed=False, kernel=1)
        role = role._replace(matrix="kronecker") if role.matrix == "elementwise" else role
        layers.append(Layer(BlockLayout(role, None, bias), calls))
    return sorted(layers, key=lambda layer: layer.layout.first)
