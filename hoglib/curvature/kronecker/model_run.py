"""One run of a model, with its layers recorded.

A layer uses its weight at every position t of an example n: a pixel of an image, a token of a text, a
call of a recurrent layer. The inputs and output gradients of every type of layer are brought into the
weight sharing format [batch, shared, features]: a position of a convolution is a patch, and the input
of an embedding is an index. Then every layer is s_nt = W a_nt, and the gradient of an example is

    dW_n = sum_t g_nt a_nt^T        a_nt [into], g_nt [out] = dl_n / ds_nt

Kronecker factors are made of rows r = (n, t), which are one dimension of a tensor:

    expand    each row counts as an example:              A = mean_r a_r a_r^T,  G = sum_r g_r g_r^T
    reduce    the rows of an example become one:          a_n = mean_t a_nt,     g_n = sum_t g_nt

A tensor does not tell whether its rows are ordered by example or by position first.
`layer_comparison` finds the order (`RowOrder`), and compares the gradients of layers with autograd's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, final

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
from hoglib._core.substrate.gradient_graph import leaf_tensors, walk
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_modes import plain_operations
from hoglib.curvature.algebra.vector_space import Space
from hoglib.curvature.batches.data import as_dict, row_count
from hoglib.curvature.batches.single_examples import by_vmap_or_loop
from hoglib.curvature.kronecker.kronecker import BlockLayout, not_none
from hoglib.curvature.kronecker.layer_calls import LayerCall, LayerRecorder, Region, Role
from hoglib.curvature.maps.fisher_metric import FisherMetric, columns, examples_of
from hoglib.curvature.maps.gauss_newton import CompositeLoss, check_depends
from hoglib.curvature.maps.jacobian_product import with_graph
from hoglib.errors import UnsupportedError

T = TypeVar("T")
AT_ONCE = 2**24  # numbers in the per-example gradients held at once


class Layer(NamedTuple):
    """A block and the calls of its layer in one run of the model."""

    layout: BlockLayout  # the parameters
    calls: list[LayerCall]  # all calls with these parameters


@final
class Gradients:
    """The gradients of column . outputs by the output of each call, as rows.

    found: these gradients, in the order of run.calls; None for an output that the column does not
    reach.
    """

    def __init__(self, run: "ModelRun", found: list[Tensor | None], column: Vector) -> None:
        self.column, self._dtype, self._device = column, run.dtype, run.device
        self._found = {id(call): part for call, part in zip(run.calls, found, strict=True)}

    def of(self, call: LayerCall) -> Tensor:
        """g_r of one call, [groups, rows, out]."""
        return call.rows_of_outputs(self.like_output(call)).to(self._dtype)

    def rows(self, layer: Layer) -> list[Tensor]:
        """g_r of each call of a layer, [groups, rows, out].

        A block of a bias alone has one group. A layer that scales and shifts features has the
        gradients by scale and shift of each row, [rows, into].
        """
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
        """The gradient by the output of a call, in the output's shape."""
        found = self._found[id(call)]
        if found is None:
            return torch.zeros(call.shape, dtype=self._dtype, device=self._device)
        return found


def input_rows(layer: Layer, call: LayerCall, dtype: torch.dtype) -> Tensor:
    """a_r with a 1 for the bias, [groups, rows, into]; for a block of a bias alone, only the 1."""
    groups, _, _ = layer.layout.sizes
    if layer.layout.weight is None:
        return torch.ones(1, call.rows, 1, dtype=dtype, device=call.device)
    a = call.inputs().to(dtype)
    return a if layer.layout.bias is None else torch.cat([a, a.new_ones(groups, a.shape[1], 1)], -1)


def mean_inputs(layer: Layer, examples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """a_n: the mean of a_r over the rows of an example in all calls, [groups, examples, into]."""
    groups, _, _ = layer.layout.sizes
    ones = torch.ones(groups, examples, 1, dtype=dtype, device=device)
    if layer.layout.weight is None:
        return ones
    total = sum(call.rows for call in layer.calls)
    given = ((call, call.by_example(call.inputs().to(dtype), examples)) for call in layer.calls)
    # The mean is over the rows of all calls: a call with more rows weighs more.
    weighted = [call.rows / total * a.mean(2) for call, a in given]
    mean = torch.stack(weighted).sum(0) if len(weighted) > 1 else weighted[0]
    return mean if layer.layout.bias is None else torch.cat([mean, ones], -1)


def is_embedding(layer: Layer) -> bool:
    """Whether the inputs of the layer are indices."""
    return layer.layout.role.name == "embedding"


def by_example(layer: Layer, rows: Sequence[Tensor], examples: int) -> Tensor:
    """The rows of all calls by example, [..., examples, positions of all calls, features]."""
    parts = [call.by_example(x, examples) for call, x in zip(layer.calls, rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def layer_gradients(layer: Layer, gradients: Gradients, run: "ModelRun") -> Iterator[list[Tensor]]:
    """Per-example gradients by the weight and the bias of a layer, [n, numbers] each, in chunks of
    examples."""
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
        # Without patches, which take many times the memory of a convolution's input.
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


@final
@dataclass(frozen=True)
class FactorOptions:
    """The validated options of Kronecker factors.

    Attributes:
        metric: The matrix M on the outputs.
        approximation: "expand" or "reduce".
        joint_bias: Whether a bias is a column of its weight's block.
        unsupported: "raise" or "diagonal", for parameters that no layer explains.
    """

    metric: FisherMetric
    approximation: str
    joint_bias: bool
    unsupported: str = "raise"


# Identifies a call across runs: its weight, its bias, the number of earlier calls with both.
CallPlace = tuple[Region | None, Region | None, int]


class RowOrder(NamedTuple):
    """How to read the calls of layers, as found at the first batch.

    Attributes:
        lengths: `LayerCall.consecutive` of each call without all rows of an example together.
        expand: Whether embeddings computed once for all examples get one row for each example.
        unexplained: The leaves with gradients that the layers do not explain.
        separable: Whether the gradients of these leaves may be computed by running an example alone.
        met: The blocks of the layers that were called so far, and compared with autograd.
    """

    lengths: frozenset[tuple[CallPlace, int]] = frozenset()
    expand: bool = True
    unexplained: frozenset[int] = frozenset()
    separable: bool = True
    met: frozenset[BlockLayout] = frozenset()


DEFAULT_ORDER = RowOrder()
SCRIPTED = "a scripted module"
EXACT_DIAGONAL = "unsupported"  # role name of the blocks of unexplained leaves


class Refusal(NamedTuple):
    """Why layers do not give the gradients of some leaves."""

    message: str  # the error
    leaves: frozenset[int]  # the numbers of the leaves


@final
@dataclass(frozen=True, eq=False)
class Recording:
    """One run of a model at a batch: its outputs, with their graph, and the calls of its layers."""

    problem: Problem  # the loss at the batch
    composite: CompositeLoss  # the loss as outputs and criterion
    leaves: Vector  # the parameters, as leaves of this run's graph
    outputs: Vector  # with their graph
    examples: int  # the number of examples in the batch
    patches: Any  # the swapped parameters, for a backward that calls the model again
    calls: Sequence[LayerCall]  # in the order of the run
    other_uses: Mapping[int, str]  # number of a leaf: what uses it besides layers
    expanded: bool  # whether an embedding was given one row for each example
    selects: bool  # whether rows were chosen or sorted, maybe by values of the batch

    def backward(self, inputs: Sequence[Any], column: Vector) -> list[Tensor | None]:
        """The gradients of column . outputs by the inputs."""
        if not inputs:
            return []
        pairs = [(y, u) for y, u in zip(self.outputs, column, strict=True) if y.requires_grad]
        values, weights = zip(*pairs, strict=True)
        # Checkpointed code calls the model again in backward, and must find the parameters of this
        # run.
        with translate_errors(self.problem.policy.caller), reapply(self.patches):
            grad: Any = torch.autograd.grad
            return list(grad(values, inputs, weights, retain_graph=True, allow_unused=True))


def record(problem: Problem, metric: FisherMetric, expand: bool) -> Recording:
    """Run a model at a batch, and record its layers.

    expand: Whether embeddings computed once for all examples get one row for each example. If
        the model's code then fails, because it counts on one row, it is run again without.
    """
    (batch,), leaves = problem.args, fresh_leaves(problem.leaves, False)
    composite = CompositeLoss(problem, metric, "reverse")
    recorder = LayerRecorder(leaves, row_count(batch) or 1 if expand else 1)
    try:
        with keep_swapped() as swapped, plain_operations(problem.policy.caller), recorder:
            outputs = composite.outputs(leaves)
            patches = swapped.values()
    except Exception:
        if not recorder.expanded:
            raise
        return record(problem, metric, False)
    check_depends(with_graph(outputs))
    # Scripted modules are those that do not store their parameters in a dict.
    scripted = {id(value) for store, _, value in patches if not isinstance(store, dict)}
    recorder.other_uses |= {i: SCRIPTED for i, x in enumerate(leaves) if id(x) in scripted}
    calls = recorder.calls
    if recorder.propagates:
        # Taylor mode computes more than it returns, such as the value beside a Laplacian, and runs a
        # function again to look at a kink: calls that no output depends on would be rows of A.
        nodes = {node for node, _ in walk(outputs)}
        calls = [call for call in calls if call.edge.node in nodes]
    seen = calls, recorder.other_uses, recorder.expanded, recorder.selects
    examples = examples_of(composite, outputs)
    return Recording(problem, composite, leaves, outputs, examples, patches, *seen)


def attempted(run: Callable[[], T]) -> T | None:
    """The result of a run at some of the examples; None if the model's code raises, as it may if it
    counts on the batch size. The RNG state is restored."""
    with preserve_random_state():
        try:
            return run()
        except Exception:
            return None


@final
class ModelRun:
    """A recording, read as layers.

    Attributes:
        recording: What one run of the model showed.
        space: The space of the parameters.
        options: The options of the factors.
        order: How to read the calls.
        examples: The number of examples in the batch.
        calls: The calls of the recording, without unexplained leaves and with their row order.
        layers: The calls by block.
        unexplained: For the number of each unexplained leaf its block, an exact diagonal.
        separable: Whether examples may be run alone; False once their outputs differ from the batch's.
        dtype: The dtype of the factors.
        device: The device of the parameters.
    """

    def __init__(
        self, recording: Recording, space: Space, options: FactorOptions, order: RowOrder
    ) -> None:
        self.recording, self.space, self.options, self.order = recording, space, options, order
        self.examples, own = recording.examples, order.unexplained
        self.calls = _read(recording.calls, own, order.lengths)
        self.layers = layers_of(self.calls, options.joint_bias)
        parts = ((i, recording.leaves[i]) for i in sorted(own))
        self.unexplained = {i: exact_diagonal(Region.of_all(i, p), p) for i, p in parts}
        self.separable = order.separable
        # Sums of squares: float32 at least.
        self.dtype, self.device = torch.promote_types(space.dtype, torch.float32), space.device

    @classmethod
    def of(
        cls, problem: Problem, space: Space, options: FactorOptions, order: RowOrder | None = None
    ) -> "ModelRun":
        """Run the model once. Parameters that layers do not explain raise, or are left to single
        examples."""
        order = order or DEFAULT_ORDER
        recording = record(problem, options.metric, order.expand)
        run = cls(recording, space, options, order)
        refusal = uncovered(run)
        if refusal is None:
            return run
        return run.without(refusal)

    def reread(self, **changes: Any) -> "ModelRun":
        """This recording with a changed `RowOrder`, keeping what was found about single
        examples."""
        known = {"unexplained": frozenset(self.unexplained), "separable": self.separable}
        order = self.order._replace(**{**known, **changes})
        return ModelRun(self.recording, self.space, self.options, order)

    def with_metric(self, metric: FisherMetric) -> "ModelRun":
        """This recording, for the factors of another metric."""
        options = replace(self.options, metric=metric)
        return ModelRun(self.recording, self.space, options, self.order)

    def rerun(self, batch: object, order: RowOrder = DEFAULT_ORDER) -> "ModelRun":
        """A new run, at another batch or with another row order."""
        problem = self.recording.problem.with_args(batch)
        order = order._replace(unexplained=frozenset(self.unexplained), separable=self.separable)
        recording = record(problem, self.options.metric, order.expand)
        return ModelRun(recording, self.space, self.options, order)

    def without(self, refusal: Refusal) -> "ModelRun":
        """This recording with the refused leaves left to single examples. Raises the refusal with
        unsupported="raise", or if nothing is left to try."""
        more = refusal.leaves - self.unexplained.keys()
        if self.options.unsupported == "raise" or not (more or self.separable):
            raise UnsupportedError(refusal.message)
        leaves = refusal.leaves | self.unexplained.keys()
        # Refused again: from now on by backward passes of the batch, not by examples alone.
        separable = self.separable and bool(more)
        return self.reread(lengths=frozenset(), unexplained=leaves, separable=separable)

    def has_new_layers(self) -> bool:
        """Whether this run calls layers that no earlier batch called."""
        return any(layer.layout not in self.order.met for layer in self.layers)

    def order_of_all(self, before: RowOrder | None) -> RowOrder:
        """The order of this run's layers, and of the layers that only earlier runs called."""
        lengths, met = self.order.lengths, frozenset(layer.layout for layer in self.layers)
        if before is not None:
            own = [region for layout in met for region in layout.regions]
            own += [layout.first for layout in self.unexplained.values()]
            met |= {one for one in before.met if not any(map(one.overlaps, own))}
            lengths = frozenset({**dict(before.lengths), **dict(lengths)}.items())
        return self.order._replace(lengths=lengths, met=met)

    def refusal(self, text: str, named: Iterable[int], leaves: Iterable[int] = ()) -> Refusal:
        """A refusal with the advice to leave out the named leaves. leaves: the refused leaves, if not
        all named ones."""
        caller, found = self.recording.problem.policy.caller, list(named)
        message = f"{caller}: {text}{_leave_out(self.space, found)}"
        return Refusal(message, frozenset(leaves or found))

    def outputs_of_an_example(self) -> int:
        """How many numbers the outputs have for each example, over all its positions."""
        return sum(y.numel() for y in self.recording.outputs) // self.examples

    def value(self) -> Tensor:
        """The loss, without a graph."""
        values = [y.detach() for y in self.recording.outputs]
        return without_graph(lambda: self.recording.composite.criterion(*values))

    def outputs(self) -> tuple[Any, Vector]:
        """The outputs without a graph: in the structure of ``loss.outputs``, and as a list of
        tensors."""
        values = [y.detach() for y in self.recording.outputs]
        return self.recording.composite.with_values(values), values

    def columns(self) -> Iterator["Gradients"]:
        """The gradients by the outputs of all calls, for each column s_c of M."""
        given = [y.detach() for y in self.recording.outputs]
        return map(self.gradients, columns(self.options.metric, self.recording.composite, given))

    def gradients(self, column: Vector) -> "Gradients":
        found = self.recording.backward([call.edge for call in self.calls], column)
        return Gradients(self, found, column)

    def of_single_examples(self, column: Vector) -> Iterator[Vector]:
        """Per-example gradients by each unexplained leaf, [n, numbers], in chunks: from each example
        alone if it then has the outputs that it has in the batch, else by one backward pass of the
        batch for each example."""
        own = [self.recording.leaves[i] for i in self.unexplained]
        size = max(1, AT_ONCE // max(sum(p.numel() for p in own), 1))
        for start in range(0, self.examples if own else 0, size):
            stop = min(start + size, self.examples)
            found = self._of_separate_examples(column, start, stop)
            if found is None:
                number = torch.arange(self.examples, device=self.device)
                ones = (number == n if len(number) > 1 else None for n in range(start, stop))
                each = [self.recording.backward(own, mask_examples(column, one)) for one in ones]
                rows = (materialize_grads(parts, own) for parts in each)
                found = [torch.stack(parts) for parts in zip(*rows, strict=True)]
            yield [x.flatten(1).to(self.dtype) for x in found]

    def _of_separate_examples(self, column: Vector, start: int, stop: int) -> Vector | None:
        """Per-example gradients from examples run alone; None if the model fails on them, or gives
        outputs that differ from the batch's."""
        given = self.recording.problem
        batch, leaves = as_dict(given.args[0]), given.leaves
        if not self.separable or self.examples < 2 or row_count(batch) != self.examples:
            return None

        def along(own: Vector, both: Any) -> Tensor:
            one, u = both
            # Detached copies: a model may assign to its parameters.
            at = {i: p.detach() for i, p in enumerate(leaves)}
            # Only the unexplained leaves are differentiated.
            at |= dict(zip(self.unexplained, own, strict=True))
            composite = CompositeLoss(given.with_args(one), self.options.metric, "reverse")
            every = zip(composite.outputs(list(at.values())), u, strict=True)
            return torch.stack([(y * part).sum() for y, part in every]).sum()

        def found() -> tuple[bool, Vector]:
            values, gradients = by_vmap_or_loop(problem)
            pairs = zip(self.recording.outputs, column, strict=True)
            terms = [(y.detach() * u)[start:stop].flatten(1) for y, u in pairs]
            sums, sizes = torch.cat(terms, 1).sum(1), torch.cat(terms, 1).abs().sum(1)
            return agree(values, sums, SUMS, terms=[sizes]), gradients

        piece = pytree.rows((batch, list(column)), self.examples, start, stop)
        own = [leaves[i] for i in self.unexplained]
        problem = Problem(given.policy, along, pytree.flatten(own)[1], own, (piece,))
        # Trusted only if each example alone gives the outputs that it has in the batch.
        self.separable, gradients = attempted(found) or (False, None)
        return gradients if self.separable else None


def _read(
    calls: Sequence[LayerCall], left_out: frozenset[int], lengths: frozenset[tuple[CallPlace, int]]
) -> list[LayerCall]:
    """The calls without the weights and biases of left-out leaves, each with its row order."""
    if left_out:
        keep = lambda r: None if r is None or r.leaf in left_out else r  # noqa: E731
        calls = [replace(call, weight=keep(call.weight), bias=keep(call.bias)) for call in calls]
        calls = [call for call in calls if call.weight or call.bias]
    if lengths:
        pairs = zip(calls, call_places(calls), strict=True)
        known = dict(lengths)
        calls = [replace(call, consecutive=known.get(place, 0)) for call, place in pairs]
    return list(calls)


def call_places(calls: Sequence[LayerCall]) -> list[CallPlace]:
    """For each call, an identifier that is equal in every run of the model."""
    counts: Counter[Any] = Counter()
    found = []
    for call in calls:
        found.append((call.weight, call.bias, counts[call.weight, call.bias]))
        counts[call.weight, call.bias] += 1
    return found


def exact_diagonal(region: Region, leaf: Tensor) -> BlockLayout:
    """The block of some rows of a parameter, with an exact diagonal as its matrix."""
    numbers = leaf.shape[1:].numel() * (region.stop - region.start)
    return BlockLayout(Role(EXACT_DIAGONAL, "elementwise", into=numbers), region, None)


def untiled(leaves: Vector, layouts: Iterable[BlockLayout]) -> dict[int, list[Region]]:
    """The leaves with a row in no block or in several, each with its regions that are in blocks."""
    uses: list[list[Region]] = [[] for _ in leaves]
    for layout in layouts:
        for region in layout.regions:
            uses[region.leaf].append(region)
    found = {}
    for number, (leaf, regions) in enumerate(zip(leaves, uses, strict=True)):
        end = 0
        for region in sorted(regions):
            # -1: no later region can begin there, and no leaf ends there
            end = region.stop if region.start == end else -1
        if end != (len(leaf) if leaf.dim() else 1):
            found[number] = sorted(regions)
    return found


def gaps(number: int, leaf: Tensor, regions: Sequence[Region]) -> list[Region] | None:
    """The rows of a leaf between sorted regions; None if the regions overlap."""
    ends = [0, *[region.stop for region in regions]]
    starts = [*[region.start for region in regions], len(leaf) if leaf.dim() else 1]
    pairs = list(zip(ends, starts, strict=True))
    if any(start < end for end, start in pairs):
        return None
    return [Region(number, end, start) for end, start in pairs if end < start]


def uncovered(run: ModelRun) -> Refusal | None:
    """A refusal of the parameters with rows that no layer uses, or more than one; None if there are
    none.

    A layer that this batch does not call, as an expert without examples, is not refused: it is not in
    the graph, and has no gradient.
    """
    leaves, others = run.recording.leaves, run.recording.other_uses
    left = untiled(leaves, [layer.layout for layer in run.layers])
    both = sorted({*left, *others} - run.unexplained.keys())
    if not both:
        return None
    reached = {id(leaf) for leaf in leaf_tensors(run.recording.outputs)}
    known = {region.leaf for layout in run.order.met for region in layout.regions}

    def is_wrong(i: int) -> bool:
        if i in others or gaps(i, leaves[i], left[i]) is None:
            return True
        # Some rows are in layers. With "raise", and for a leaf that an earlier batch compared, the
        # comparison with autograd shows other uses; else the leaf is left to single examples.
        apart = run.options.unsupported == "raise" or i in known
        return not apart if left[i] else id(leaves[i]) in reached

    wrong = [i for i in both if is_wrong(i)]
    if not wrong:
        return None
    why = _not_by_layers(run.space, wrong[0], left.get(wrong[0], ()), others.get(wrong[0]))
    return run.refusal(why, both, wrong)


def _not_by_layers(space: Space, leaf: int, regions: Sequence[Region], other: str | None) -> str:
    """The reason to refuse a leaf. regions: its rows in layers; other: what else uses it."""
    known = "parameters of linear, convolutional, embedding and normalization layers"
    name = f"params[{pytree.paths(space.params)[leaf]!r}]"
    if other == SCRIPTED:
        return (
            f"expected {known}, got {name}, which {SCRIPTED} uses, whose calls are not seen; use the "
            "module that was scripted, or "
        )
    if other:
        return f"expected {known}, got {name}, which {other} uses; "
    if not regions:
        return (
            f"expected {known}, got {name}, which no such layer uses: the loss does not depend on it, "
            "or a custom Function uses it; "
        )
    found = listing([f"{r.start} to {r.stop}" for r in regions])
    return (
        f"expected every row of {name} to be used by one kind of layer, got rows {found} used by "
        "layers of different kinds (an embedding tied to the output layer, for instance); "
    )


def fill(
    caller: str, space: Space, layouts: Sequence[BlockLayout], raises: bool
) -> list[BlockLayout]:
    """Blocks of zeros for the parameters that no batch used; with raises, an error instead."""
    leaves = pytree.leaves(space.params)
    left = {
        i: between
        for i, regions in untiled(leaves, layouts).items()
        if (between := gaps(i, leaves[i], regions)) is not None
    }
    if left and raises:
        first = next(iter(left))
        own = [r for layout in layouts for r in layout.regions if r.leaf == first]
        why = _not_by_layers(space, first, sorted(own), None)
        raise UnsupportedError(f"{caller}: {why}{_leave_out(space, left)}")
    return [exact_diagonal(region, leaves[i]) for i, parts in left.items() for region in parts]


def _leave_out(space: Space, leaves: Iterable[int]) -> str:
    """The advice to leave out all refused parameters, by name."""
    names = pytree.paths(space.params)
    given = ", ".join(repr(names[i]) for i in dict.fromkeys(leaves))
    return f"leave out all of these: `{{n: p for n, p in params.items() if n not in [{given}]}}`."


def mask_examples(column: Vector, of: Tensor | None) -> Vector:
    """A column with zeros for the examples outside the mask; unchanged for None."""
    return column if of is None else [u.where(of.view(-1, *[1] * (u.dim() - 1)), 0) for u in column]


def layers_of(calls: Sequence[LayerCall], joint_bias: bool) -> list[Layer]:
    """The layers of the calls, in the order of the parameters.

    A bias is in the block of its weight if every call with one of them has both.
    """
    by_weight: dict[Any, list[LayerCall]] = {}
    by_bias: dict[Region, list[LayerCall]] = {}
    for call in calls:
        if call.weight is not None:
            # a weight may be in calls of several functions, if their matrices are alike
            name = call.role.name if call.role.name == "embedding" else ""
            by_weight.setdefault((call.weight, call.role._replace(name=name)), []).append(call)
        if call.bias is not None:
            by_bias.setdefault(call.bias, []).append(call)
    layers = []
    for (weight, _), calls in by_weight.items():
        role = calls[0].role
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
        # A bias alone is a vector: how its layer's weight is stored does not matter.
        role = calls[0].role._replace(transposed=False, kernel=1)
        role = role._replace(matrix="kronecker") if role.matrix == "elementwise" else role
        layers.append(Layer(BlockLayout(role, None, bias), calls))
    return sorted(layers, key=lambda layer: layer.layout.first)
