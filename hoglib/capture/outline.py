"""Finds the parts of a graph that repeat, so that a deep network compiles in the time of one block.

    x_1 = f(x_0, W_1), ..., x_L = f(x_{L-1}, W_L)        f is compiled once and called L times

A captured second-order function is one flat graph, in which equal blocks give equal runs of operations:
forward, backward, and backward again. The graph is read as a sequence of operations without their
operands. Operations that always follow one another belong to one part; where runs of them meet or
branch, a part ends, as in the compaction of a de Bruijn graph. Parts are then joined as long as that
saves more in calls than it costs in compilation. Parts are the same if their operations, constants,
inner operands, and the layouts of all tensors are.

Views are not operations here: they cost nothing, so each part makes those that it needs, and only
tensors that own their memory pass from one part to another.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hoglib.capture.passes import VIEWS
from hoglib.capture.writes import writes_in_place

aten: Any = torch.ops.aten

SHORTEST = 8  # operations that must be equal before two runs are taken for one part
SECONDS_PER_PART = 1.3  # to compile a part, on one core
SECONDS_PER_OPERATION = 0.02  # and for each operation in it, views not counted
SECONDS_PER_CALL = 8e-5  # while a graph runs, with the fusion that is lost around a part
SECONDS_PER_PERCENT = 1.0  # of compilation, for which a graph may run one percent slower
MOST_LOST = 0.05  # of the time of the whole graph
SAVING = 0.9  # of the seconds to compile the whole graph, at most

Symbol = int  # a run of operations, without their operands
Span = tuple[int, int]  # operations from, to


class Source(NamedTuple):
    """A tensor that owns its memory: an input, or what an operation computes."""

    node: fx.Node
    element: int | None  # which one, if the operation has several outputs


class Part(NamedTuple):
    """Operations that are compiled once."""

    graph: fx.GraphModule
    inputs: list[Tensor]  # fake tensors, as are the outputs
    outputs: list[Tensor]


class Call(NamedTuple):
    """One call of a part, in terms of the whole graph."""

    part: int
    inputs: list[Source]
    outputs: list[Source]


class Outline(NamedTuple):
    """A graph as calls of parts, one after the other."""

    parts: list[Part]
    calls: list[Call]


def outline(module: fx.GraphModule) -> Outline | None:
    """The parts of a graph without in-place operations; None if it should be compiled as a whole."""
    operations = _operations(module.graph)
    if operations is None:
        return None
    tokens = _numbered(_token(node) for node in operations)
    ends = _part_ends(tokens, _seconds(operations))
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    found = _Outliner(module.graph, operations, tokens, spans)
    total = sum(seconds_to_compile(end - start) for (start, end), *_ in found.members)
    if total > SAVING * seconds_to_compile(len(operations)):
        return None
    return found.result()


def count_operations(graph: fx.Graph) -> int:
    """The number of operations of a graph besides views."""
    return sum(node.op == "call_function" and not is_view(node) for node in graph.nodes)


def seconds_to_compile(operations: int) -> float:
    """An estimate, from the number of operations of a graph besides views."""
    return SECONDS_PER_PART + SECONDS_PER_OPERATION * operations


def source_of(node: fx.Node) -> Source:
    """The tensor that a node is a view of."""
    views = views_of(node)
    base: Any = views[0].args[0] if views else node
    return Source(*base.args) if base.target is getitem else Source(base, None)


def views_of(node: fx.Node) -> list[fx.Node]:
    """The views that lead to a node from the tensor that owns its memory, in order."""
    found = []
    while node.op == "call_function" and node.target is not getitem and is_view(node):
        found.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return found[::-1]


def is_view(node: fx.Node) -> bool:
    """Whether a node returns its argument in another shape, or an element of a list of tensors."""
    if node.target is getitem:
        return True
    if node.target is not aten.reshape.default:
        return node.target in VIEWS
    value: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(node.meta["val"].shape)
    except RuntimeError:  # it copies
        return False
    return True


def _operations(graph: fx.Graph) -> list[fx.Node] | None:
    """The operations of a graph besides views; None if there is something that parts cannot contain."""
    found = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_op = isinstance(node.target, torch._ops.OpOverload)
        if node.op != "call_function" or not (is_op or node.target is getitem):
            return None
        if writes_in_place(node) or any("val" not in x.meta for x in (node, *node.all_input_nodes)):
            return None
        if not is_view(node):
            found.append(node)
    return found


def _layout(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride(), str(value.device)
    return tuple(map(_layout, value)) if isinstance(value, list | tuple) else repr(value)


def _token(node: fx.Node) -> Hashable:
    """An operation with its constants, and the layouts of its operands and outputs."""

    def of(value: Any) -> Hashable:
        if not isinstance(value, fx.Node):
            if isinstance(value, list | tuple):
                return type(value), *map(of, value)
            return type(value), repr(value)
        if is_view(value):
            return value.target, *map(of, value.args), of(list(value.kwargs.items()))
        return _layout(value.meta["val"])

    kwargs = of([list(item) for item in node.kwargs.items()])
    return node.target, of(list(node.args)), kwargs, _layout(node.meta["val"])


def _numbered(items: Iterator[Hashable]) -> list[int]:
    """Small numbers, equal where the items are."""
    known: dict[Hashable, int] = {}
    return [known.setdefault(item, len(known)) for item in items]


def _seconds(operations: Sequence[fx.Node]) -> float:
    """An estimate of the time that a graph runs on one core, from shapes."""
    total = 0.0
    for node in operations:
        values = node.meta["val"]
        outputs = [
            x for x in (values if isinstance(values, list | tuple) else [values]) if x is not None
        ]
        written = sum(x.numel() * x.element_size() for x in outputs if isinstance(x, Tensor))
        total += 5e-7 + written / 1e10
        shapes = [
            x.meta["val"].shape for x in node.all_input_nodes if isinstance(x.meta["val"], Tensor)
        ]
        if "mm" in node.name or "affine" in node.name or "mv" in node.name:
            inner = max((shape[-1] for shape in shapes if shape), default=1)
            total += 2 * inner * sum(x.numel() for x in outputs) / 1e11
        elif "conv" in node.name and len(shapes) > 1:
            kernel = max(shape[1:].numel() for shape in shapes[1:])
            total += 2 * kernel * max(shape.numel() for shape in shapes) / 1e11
    return total


def _part_ends(tokens: list[int], seconds: float) -> list[int]:
    """Where the cheapest parts end."""
    price = 100 * SECONDS_PER_PERCENT * SECONDS_PER_CALL / seconds
    best, lowest = [len(tokens)], seconds_to_compile(len(tokens)) + price
    runs, context = tokens, 1
    while len(runs) > context:
        # Numbers that are equal where the next `context` operations are.
        runs = _numbered(zip(runs, runs[context:], strict=False))
        context *= 2
        if context < SHORTEST:
            continue
        ends = _branches(runs, context)
        known: dict[tuple[int, ...], Symbol] = {}
        spans = zip([0, *ends[:-1]], ends, strict=True)
        symbols = [known.setdefault(tuple(tokens[a:b]), len(known)) for a, b in spans]
        sizes = [len(run) for run in known]
        for joined in _joined(symbols, sizes):
            total = sum(seconds_to_compile(sizes[x]) for x in set(joined)) + len(joined) * price
            if total < lowest and len(joined) * SECONDS_PER_CALL <= MOST_LOST * seconds:
                best, lowest = [*accumulate(sizes[x] for x in joined)], total
    return best


def _branches(runs: list[int], context: int) -> list[int]:
    """The ends of the longest parts inside of which each run has one successor and one predecessor.

    runs: numbers of runs of ``context`` operations, from each operation on.
    """
    after, before = defaultdict(set), defaultdict(set)
    none = -1  # what is before the first run and after the last one
    for a, b in pairwise([none, *runs, none]):
        after[a].add(b)
        before[b].add(a)
    starts = {i for i, run in enumerate(runs) if len(before[run]) > 1}
    ends = {i + context for i, run in enumerate(runs) if len(after[run]) > 1}
    return sorted((starts | ends | {len(runs) + context - 1}) - {0})


def _joined(symbols: list[Symbol], sizes: list[int]) -> Iterator[list[Symbol]]:
    """A sequence of parts, then with the neighbours joined that add least to compile, and so on.

    sizes: operations of each symbol; those of new ones are added.
    """
    yield symbols
    while len(symbols) > 1:
        counts, pairs = Counter(symbols), _count_pairs(symbols)
        best = min(
            pairs,
            key=lambda pair, pairs=pairs, counts=counts: _added(  # type: ignore[misc]
                pair, pairs[pair], counts, sizes
            ),
        )
        symbols = _replace_pair(symbols, best, len(sizes))
        sizes.append(sizes[best[0]] + sizes[best[1]])
        yield symbols


def _added(
    pair: tuple[Symbol, Symbol], count: int, counts: Counter[Symbol], sizes: list[int]
) -> float:
    """Seconds of compilation that joining a pair adds; those of parts that no call is left of go."""
    a, b = pair
    gone = {x for x in pair if counts[x] == count * ((a == x) + (b == x))}
    return seconds_to_compile(sizes[a] + sizes[b]) - sum(seconds_to_compile(sizes[x]) for x in gone)


def _count_pairs(symbols: list[Symbol]) -> Counter[tuple[Symbol, Symbol]]:
    """How often each pair of neighbours occurs; pairs of one symbol do not overlap."""
    counts: Counter[tuple[Symbol, Symbol]] = Counter()
    last = -2
    for i, pair in enumerate(pairwise(symbols)):
        if pair[0] == pair[1] and last == i - 1:
            continue
        last = i if pair[0] == pair[1] else -2
        counts[pair] += 1
    return counts


def _replace_pair(symbols: list[Symbol], pair: tuple[Symbol, Symbol], new: Symbol) -> list[Symbol]:
    found, i = [], 0
    while i < len(symbols):
        matches = tuple(symbols[i : i + 2]) == pair
        found.append(new if matches else symbols[i])
        i += 1 + matches
    return found


class _Outliner:
    """Turns runs of operations into parts and calls."""

    def __init__(
        self, graph: fx.Graph, operations: list[fx.Node], tokens: list[int], spans: list[Span]
    ) -> None:
        self.operations, self.spans = operations, spans
        self.place = {node: i for i, node in enumerate(operations)}
        self.reads = [_reads(node) for node in operations]
        self.kinds = _numbered(self._kind(span, tokens) for span in spans)
        self.members: list[list[Span]] = [[] for _ in range(max(self.kinds) + 1)]
        for kind, span in zip(self.kinds, spans, strict=True):
            self.members[kind].append(span)
        self.needed = self._needed(graph)

    def result(self) -> Outline:
        outer = [self._outer(members) for members in self.members]
        parts = [
            self._part(members[0], columns, list(needed))
            for members, columns, needed in zip(self.members, outer, self.needed, strict=True)
        ]
        calls, counts = [], Counter[int]()
        for kind, (start, _) in zip(self.kinds, self.spans, strict=True):
            inputs = [column[counts[kind]] for column in dict.fromkeys(outer[kind])]
            outputs = [Source(self.operations[start + i], which) for i, which in self.needed[kind]]
            calls.append(Call(kind, inputs, outputs))
            counts[kind] += 1
        return Outline(parts, calls)

    def _is_inside(self, source: Source, span: Span) -> bool:
        return span[0] <= self.place.get(source.node, -1) < span[1]

    def _kind(self, span: Span, tokens: list[int]) -> Hashable:
        """What calls of one part have in common."""
        inner = [
            (self.place[x.node] - span[0], x.element) if self._is_inside(x, span) else None
            for reads in self.reads[slice(*span)]
            for x in reads
        ]
        return tuple(tokens[slice(*span)]), tuple(inner)

    def _needed(self, graph: fx.Graph) -> list[dict[tuple[int, int | None], None]]:
        """What each part returns: all that one of its calls has to. Operations count from its start."""
        span_of = [i for i, (a, b) in enumerate(self.spans) for _ in range(a, b)]
        needed: list[dict[tuple[int, int | None], None]] = [{} for _ in self.members]
        readers = [*zip(self.reads, span_of, strict=True)]
        readers.append(([source_of(x) for x in graph.output_node().all_input_nodes], -1))
        for reads, reader in readers:
            for x in reads:
                at = self.place.get(x.node)
                if at is not None and span_of[at] != reader:
                    i = span_of[at]
                    needed[self.kinds[i]][at - self.spans[i][0], x.element] = None
        return needed

    def _outer(self, members: list[Span]) -> list[tuple[Source, ...]]:
        """For each operand from outside of a part, the tensor in each call.

        Operands are one input if they are one tensor in all calls.
        """
        rows = [
            [x for reads in self.reads[slice(*span)] for x in reads if not self._is_inside(x, span)]
            for span in members
        ]
        return list(zip(*rows, strict=True))

    def _part(
        self, span: Span, columns: list[tuple[Source, ...]], needed: list[tuple[int, int | None]]
    ) -> Part:
        own = fx.Graph()
        placeholders: dict[tuple[Source, ...], fx.Node] = {}
        values = []
        for column in dict.fromkeys(columns):
            values.append(_value(column[0]))
            placeholders[column] = own.placeholder(f"x{len(placeholders)}")
            placeholders[column].meta["val"] = values[-1]
        left = iter(columns)
        copies: dict[fx.Node, fx.Node] = {}
        made: dict[tuple[Any, ...], fx.Node] = {}

        def call(target: Any, args: tuple[Any, ...], kwargs: Any, value: Any) -> fx.Node:
            found = own.call_function(target, args, kwargs)
            found.meta["val"] = value
            return found

        def inside(x: Source) -> fx.Node:
            if x.element is None:
                return copies[x.node]
            if x not in made:
                made[x] = call(getitem, (copies[x.node], x.element), {}, _value(x))
            return made[x]

        def operand(x: fx.Node) -> fx.Node:
            """A tensor, with the views of it that an operation reads."""
            source = source_of(x)
            at = inside(source) if self._is_inside(source, span) else placeholders[next(left)]
            for view in views_of(x):
                key = at, view.target, repr(view.args[1:]), repr(view.kwargs)
                if key not in made:
                    made[key] = call(
                        view.target, (at, *view.args[1:]), view.kwargs, view.meta["val"]
                    )
                at = made[key]
            return at

        for node in self.operations[slice(*span)]:
            args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
            copies[node] = call(node.target, args, kwargs, node.meta["val"])
        outputs = [inside(Source(self.operations[span[0] + i], which)) for i, which in needed]
        own.output(outputs)
        return Part(fx.GraphModule({}, own), values, [x.meta["val"] for x in outputs])


def _reads(node: fx.Node) -> list[Source]:
    """The tensors that an operation reads, through views, each as often as it is named."""
    found: list[Source] = []

    def add(x: fx.Node) -> fx.Node:
        found.append(source_of(x))
        return x

    fx.map_arg((node.args, node.kwargs), add)
    return found


def _value(source: Source) -> Tensor:
    value: Any = source.node.meta["val"]
    return value if source.element is None else value[source.element]
