"""Equal blocks of a network as graphs that are compiled once, and keep their intermediate values.

    y, r = F(x)                        the block
    g_x, s = B(x, g; r)                its vjp
    h_g, q = U(x, g, h; r, s)          the vjp of that by g, on the way up
    c_x = D(x, g, h, c; r, s, q)       d (<h, B(x, g)> + <c, F(x)>) / d x, on the way down

The values r, s and q, which one level computes on its way, are kept for those after it, as autograd
keeps them. The graphs of the levels are traced apart; an operation of one with the operands of an
operation of another is the same one. What B contributes to the derivative by x waits for c, so that
both go back through the block in one pass, as in one graph of everything: B depends on F by a token
alone, whose gradient tells F that there is something to wait for.

Which derivatives are needed, and by what, is seen in a run of the levels without graphs.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, fx

from hoglib._core.blocks import find_blocks
from hoglib._core.state import random_state, set_random_state
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_modes import value_checks_off, without_stand_ins
from hoglib.capture import backend as backends
from hoglib.capture.api import trace_graph
from hoglib.capture.check import OF_BACKEND, Comparison, tolerance_of
from hoglib.capture.nodes import is_random
from hoglib.capture.outline import SAVING, is_view, seconds_to_compile, seconds_to_run
from hoglib.capture.passes import simplify
from hoglib.capture.recomputed import template_of
from hoglib.capture.residuals import residuals_of
from hoglib.capture.trace import OutputSlot
from hoglib.capture.writes import functionalize
from hoglib.errors import HoglibError, UnsupportedError

T = TypeVar("T")
Tensors = Sequence[Tensor | None]
FEWEST = 4  # blocks
SECONDS_PER_CALL = 5e-4  # of a compiled level, besides its operations
OF_FORWARD = 12  # times the forward, a product takes at most
MOST_LOST = 0.1  # of the time of the operations, by calls
RUNS = 4  # a run may need derivatives that the one before has not shown


class Key(NamedTuple):
    """A level.

    wanted, arrived: the inputs by which a vjp differentiates, and the outputs that have a cotangent.
    """

    level: str  # "F", "B", "U" or "D"
    wanted: tuple[int, ...] = ()
    arrived: tuple[int, ...] = ()

    def before(self) -> list["Key"]:
        """The levels whose values this one takes."""
        return [
            FORWARD if level == "F" else self._replace(level=level)
            for level in "FBUD"[: "FBUD".index(self.level)]
        ]


FORWARD = Key("F")


@final
class Keeping:
    """Runs the blocks of one run, and notes their levels."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[KeptLevels, Key]] = Counter()
        self.uncompiled: dict[KeptLevels, None] = {}  # that ran without graphs

    def __deepcopy__(self, memo: Any) -> None:
        """The block of a template, which is a copy, runs by none."""

    def outputs(self, call: Any, tensors: Tensors) -> tuple[Tensor | None, ...]:
        """The outputs of a call, with a graph."""
        template = template_of(call, list(tensors))
        if template.kept is None:
            template.kept = KeptLevels(template)
        found: tuple[Tensor | None, ...] = _Forward.apply(
            _Block(call, template.kept, self), *tensors
        )
        return found[1:]


@final
class BlockChoice:
    """Whether a function is compiled as its blocks or as one graph: of one signature, made once."""

    def __init__(self) -> None:
        self._one_graph: bool | None = None

    def run(self, func: Any, leaves: Sequence[Tensor], run: Callable[[Keeping], T]) -> T | None:
        """run(keeping), by compiled blocks of the modules that func reaches; None for one graph."""
        if self._one_graph is None:
            self._one_graph = any(x.device.type != "cpu" for x in leaves) or not _repeats(func)
        if self._one_graph:
            return None
        found = run_by_blocks(run)
        self._one_graph = found is None
        return found


def _repeats(func: Any) -> bool:
    try:
        return len(find_blocks(True, func)) >= FEWEST
    except HoglibError:
        return False


def run_by_blocks(run: Callable[[Keeping], T]) -> T | None:
    """run(keeping), whose blocks keep intermediate values; None where one graph of everything is to be
    preferred: blocks cannot be graphs of their own, or would save no compilation, or run slower."""
    state = random_state()
    for _ in range(RUNS):
        keeping = Keeping()
        try:
            result = run(keeping)
            if not keeping.uncompiled:
                return result
            if not _compile(keeping):
                break
        except HoglibError:  # one graph of everything tells it, or can do it
            break
        finally:
            if keeping.uncompiled:
                set_random_state(state)
    set_random_state(state)
    return None


def _compile(keeping: Keeping) -> bool:
    """Compiles the levels that ran without graphs, if that is worth it."""
    calls = sum(keeping.calls.values())
    forwards = {levels: n for (levels, key), n in keeping.calls.items() if key == FORWARD}
    if len(forwards) * FEWEST > sum(forwards.values()):
        return False
    estimate = OF_FORWARD * sum(levels.seconds_of_forward() * n for levels, n in forwards.items())
    if calls * SECONDS_PER_CALL > MOST_LOST * estimate:  # before the other levels are traced
        return False
    for levels in keeping.uncompiled:
        levels.split()
    found = [(levels.parts[key], count) for (levels, key), count in keeping.calls.items()]
    operations = sum(part.operations * count for part, count in found)
    to_compile = sum(seconds_to_compile(part.operations) for part, _ in found)
    seconds = sum(part.seconds * count for part, count in found)
    if to_compile > SAVING * seconds_to_compile(operations):
        return False
    if calls * SECONDS_PER_CALL > MOST_LOST * seconds:
        return False
    for levels in keeping.uncompiled:
        levels.compile()
    return True


class _Values(NamedTuple):
    """What a level reads."""

    x: Tensors
    g: Tensors = ()
    h: Tensors = ()
    c: Tensors = ()
    kept: tuple[Tensor, ...] = ()  # by the levels before

    def given(self) -> list[tuple[tuple[str, int], Tensor]]:
        """The inputs, with their names."""
        return [
            ((name, i), x)
            for name, values in zip("xghc", self, strict=False)
            for i, x in enumerate(values)
            if x is not None
        ]


@final
class _Block:
    """One call of a block."""

    def __init__(self, call: Any, levels: "KeptLevels", keeping: Keeping) -> None:
        self.call, self.levels, self.keeping = call, levels, keeping
        self.waiting: list[tuple[Key, _Values]] = []  # for c
        self.count = len(call.slots)

    def run(self, key: Key, values: _Values) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
        """The outputs of a level, and what was kept so far."""
        found = self.levels.run(key, values)
        self.keeping.calls[self.levels, key] += 1
        if found is not None:
            if key == FORWARD:
                self.call.adopt_outputs(self.levels.outputs_of)
            return found[0], (*values.kept, *found[1])
        self.keeping.uncompiled[self.levels] = None
        function = self.call.first if key == FORWARD else self.call.rerun
        return _computed(function, key, values), values.kept


def _computed(function: Any, key: Key, values: _Values) -> list[Tensor | None]:
    """A level of a function of tensors, by autograd."""
    if key == FORWARD:
        return list(function(*values.x))
    with torch.enable_grad(), keep_swapped():
        x = [None if t is None else t.detach() for t in values.x]
        variables = [x[i].requires_grad_() for i in key.wanted]  # type: ignore[union-attr]
        outputs = function(*x)
        y = [outputs[j] for j in key.arrived]
        if key.level == "B":
            return _gradients(y, variables, values.g, False)
        g = [t.detach().requires_grad_() for t in values.g]  # type: ignore[union-attr]
        gradients = _gradients(y, variables, g, True)
        if key.level == "U":
            return _gradients(gradients, g, values.h, False)
        return _gradients([*gradients, *y], variables, [*values.h, *values.c], False)


def _gradients(
    outputs: Tensors, inputs: Tensors, cotangents: Tensors, create_graph: bool
) -> list[Tensor | None]:
    pairs = [
        (y, u)
        for y, u in zip(outputs, cotangents, strict=True)
        if y is not None and u is not None and y.requires_grad
    ]
    if not pairs:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [y for y, _ in pairs], inputs, [u for _, u in pairs],  # type: ignore[arg-type]
        create_graph=create_graph, allow_unused=True,
    )  # fmt: skip
    return list(found)


class _Forward(torch.autograd.Function):
    """A block. Its first output is the token."""

    recomputes = True

    @staticmethod
    def forward(ctx: Any, block: _Block, *x: Tensor | None) -> Any:
        outputs, kept = block.run(FORWARD, _Values(x))
        token = torch.zeros((), device=next(t.device for t in x if t is not None))
        outputs = _not_inputs(outputs, x)
        ctx.block, ctx.count = block, len(x)
        ctx.save_for_backward(token, *x, *kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in outputs if y is not None and not _moves(y)))
        return token, *outputs

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *c: Tensor | None) -> Any:
        token, *saved = ctx.saved_tensors
        block: _Block = ctx.block
        x, kept = saved[: ctx.count], tuple(saved[ctx.count :])
        needed = [i for i in range(ctx.count) if ctx.needs_input_grad[i + 1] and _moves(x[i])]
        result: list[Tensor | None] = [None] * ctx.count
        if block.waiting:
            if torch.is_grad_enabled() or len(block.waiting) > 1:
                raise UnsupportedError("a block that is differentiated again")
            key, values = block.waiting.pop()
            cotangents = [
                torch.zeros_like(g) if c[j] is None else c[j]  # type: ignore[arg-type]
                for j, g in zip(key.arrived, values.g, strict=True)
            ]
            others = any(u is not None for j, u in enumerate(c) if j not in key.arrived)
            if others or not {*needed} <= {*key.wanted}:
                raise UnsupportedError("a block with other derivatives than before")
            found, _ = block.run(key._replace(level="D"), values._replace(c=cotangents))
        else:
            arrived = tuple(j for j, u in enumerate(c) if u is not None)
            if not needed or not arrived:
                return None, *result
            free = {i for i in range(block.count) if _moves(x[i])}
            key = block.levels.vjp(needed, arrived, free)
            values = _Values(x, [c[j] for j in arrived], kept=kept)
            if torch.is_grad_enabled():
                found = _Vjp.apply(block, key, values, token, *values.g)
            else:
                found, _ = block.run(key, values)
        for i, gradient in zip(key.wanted, found, strict=True):
            result[i] = gradient if ctx.needs_input_grad[i + 1] else None
        return None, *result


class _Vjp(torch.autograd.Function):
    """The vjp of a block, of which the token and the cotangents are the inputs."""

    recomputes = True

    @staticmethod
    def forward(ctx: Any, block: _Block, key: Key, values: _Values, *inputs: Tensor) -> Any:
        _, *g = inputs
        outputs, kept = block.run(key, values._replace(g=g))
        outputs = _not_inputs(outputs, [*values.x, *g])
        ctx.block, ctx.key, ctx.counts = block, key, (len(values.x), len(g))
        ctx.like = [None if y is None else torch.empty_like(y, device="meta") for y in outputs]
        ctx.save_for_backward(*values.x, *g, *kept)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *h: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError("a block that is differentiated three times")
        saved, (count, more) = ctx.saved_tensors, ctx.counts
        block, key = ctx.block, ctx.key
        x, g = saved[:count], saved[count : count + more]
        # An output without a cotangent gets zeros, so that all equal blocks have one graph.
        full = [
            torch.zeros_like(like, device=g[0].device) if u is None and like is not None else u
            for u, like in zip(h, ctx.like, strict=True)
        ]
        values = _Values(x, g, full, kept=saved[count + more :])
        found, kept = block.run(key._replace(level="U"), values)
        block.waiting.append((key, values._replace(kept=kept)))
        return None, None, None, torch.zeros((), device=g[0].device), *found


def _not_inputs(outputs: list[Tensor | None], inputs: Tensors) -> list[Tensor | None]:
    ids = {id(t) for t in inputs}
    return [y if y is None or id(y) not in ids else y.view_as(y) for y in outputs]


def _moves(x: Tensor | None) -> bool:
    return x is not None and (x.is_floating_point() or x.is_complex())


class _Record(NamedTuple):
    """The inputs with which a level ran."""

    values: _Values
    names: list[tuple[str, int]]
    tensors: list[Tensor]


class _Part(NamedTuple):
    """The graph of a level that takes what the levels before it have computed."""

    whole: fx.GraphModule  # without that
    graph: fx.GraphModule
    takes: list[int]  # places among the values that the levels before it keep
    slots: list[int | None]  # the place of each output of the level among those of the graph
    own: int  # the outputs of the graph before those that are kept
    before: int  # the values that the levels before it keep
    operations: int
    seconds: float  # to run, an estimate


@final
class KeptLevels:
    """The levels of one template: recorded, then compiled."""

    def __init__(self, template: Any) -> None:
        modules = list(template.call.scope.held)
        self.name = type(modules[0]).__name__ if modules else "a function"
        self.backend, self.dynamic = template.call.backend, False
        self.outputs_of = template.call  # the structure of the outputs, from a first run
        self.recorded: dict[Key, _Record] = {}
        self.parts: dict[Key, _Part] = {}
        self._wholes: dict[Key, tuple[fx.GraphModule, list[int | None]]] = {}
        self._runs: dict[Key, Callable[..., Any]] = {}

    def vjp(self, needed: list[int], arrived: tuple[int, ...], free: set[int]) -> Key:
        """The vjp by these inputs, or one that is known and differs by arguments of the block: those of
        the first block, which is given data."""
        for key in self.recorded:
            more = {*key.wanted} - {*needed}
            covers = len(key.wanted) == len(more) + len(needed) and more <= free
            if key.level == "B" and key.arrived == arrived and covers:
                return key
        return Key("B", tuple(needed), arrived)

    def run(self, key: Key, values: _Values) -> tuple[list[Tensor | None], list[Tensor]] | None:
        """The outputs of a level and what it keeps, by its graph; None if there is none yet."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            given = values.given()
            tensors = [x.detach().contiguous() for _, x in given]
            compiled = self._runs.get(key)
            if compiled is None or len(values.kept) != self.parts[key].before:
                if self._runs and key not in self._runs:  # other levels may then keep other values
                    self.recorded, self._wholes, self._runs = {}, {}, {}
                if key not in self.recorded:
                    self.recorded[key] = _Record(values, [name for name, _ in given], tensors)
                return None
            part = self.parts[key]
            found = compiled(*tensors, *[values.kept[i] for i in part.takes])
            return [None if i is None else found[i] for i in part.slots], found[part.own :]

    def seconds_of_forward(self) -> float:
        """An estimate of the time that a forward runs."""
        if FORWARD not in self._wholes:
            self._wholes[FORWARD] = self._traced(FORWARD, self.recorded[FORWARD])
        nodes = self._wholes[FORWARD][0].graph.nodes
        return seconds_to_run([x for x in nodes if x.op == "call_function" and not is_view(x)])

    def split(self) -> None:
        """Traces the levels that are recorded, and decides what each keeps for those after it."""
        for key in self.recorded:
            if key not in self._wholes:
                self._wholes[key] = self._traced(key, self.recorded[key])
        self.parts = _split(self._wholes, {k: record.names for k, record in self.recorded.items()})

    def compile(self) -> None:
        """Compiles the parts, and compares them with the levels."""
        sizes = [part.operations for part in self.parts.values()]
        if self.backend == "inductor":
            backends.announce(f"blocks {self.name}", sum(sizes), sizes)
        self._runs = {}
        with torch.no_grad():
            for key, part in self.parts.items():
                given = self.recorded[key].tensors
                inputs = [*given, *self._values_before(key, given)]
                self._runs[key] = backends.make_runner(self, part.graph, inputs)[0].run
                chain = _Chain(self, key)
                comparison = Comparison(
                    self.name, part.whole.forward, given, chain, tolerance_of(part.whole),
                    independent=True,
                )  # fmt: skip
                comparison.check(chain, [], OF_BACKEND, part.whole)
        for key, record in self.recorded.items():  # without the tensors
            self.recorded[key] = _Record(_Values(()), record.names, [])

    def execute(self, key: Key, given: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a level, then what it keeps, from its inputs alone."""
        found: list[Tensor] = list(self._runs[key](*given, *self._values_before(key, given)))
        return found

    def _values_before(self, key: Key, given: Sequence[Tensor]) -> list[Tensor]:
        """What a level takes from those before it."""
        kept: list[Tensor] = []
        named = dict(zip(self.recorded[key].names, given, strict=True))
        for before in key.before():
            part = self.parts[before]
            inputs = [named[name] for name in self.recorded[before].names]
            inputs += [kept[i] for i in part.takes]
            kept += list(self._runs[before](*inputs))[part.own :]
        return [kept[i] for i in self.parts[key].takes]

    def _traced(self, key: Key, record: _Record) -> tuple[fx.GraphModule, list[int | None]]:
        """The graph of a level, and the place of each output among those of the graph."""

        def level(given: list[Tensor]) -> list[Tensor | None]:
            named = dict(zip(record.names, given, strict=True))
            x, g, h, c = (
                [named.get((name, i)) for i in range(len(values))]
                for name, values in zip("xghc", record.values, strict=False)
            )
            if key == FORWARD:  # with gradients it takes the path that its vjp differentiates
                x = [t.detach().requires_grad_() if _moves(t) else t for t in x]  # type: ignore[union-attr]
            with value_checks_off(), torch.set_grad_enabled(key == FORWARD):
                outputs = _computed(self.outputs_of.first, key, _Values(x, g, h, c))
            return [None if y is None else y.detach() for y in outputs]

        tensors = [x.clone() for x in record.tensors]
        with torch.no_grad(), without_stand_ins():
            name = f"level {key.level} of {self.name}"
            entry, lifted = trace_graph(level, tensors, name=name, check=True)
        graph: fx.GraphModule = entry.run.__self__  # type: ignore[attr-defined]
        if lifted or entry.reads is not None or entry.shared:
            raise UnsupportedError(f"{self.name} reads more than its inputs")
        if any(map(is_random, graph.graph.nodes)):
            raise UnsupportedError(f"{self.name} draws random numbers")
        graph = functionalize(graph, tensors)
        simplify(graph)
        graph.recompile()
        return graph, [x.index if isinstance(x, OutputSlot) else None for x in entry.leaves]


class _Chain(NamedTuple):
    """A compiled level with those before it, as a graph of the inputs of the level, to compare."""

    levels: KeptLevels
    key: Key
    shared: Any = ()

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return self.levels.execute(self.key, inputs)[: self.levels.parts[self.key].own]

    def graph_inputs(self, tensors: list[Tensor], lifted: list[Tensor]) -> list[Tensor]:
        return tensors


class _Number(NamedTuple):
    """What equal operations with equal operands compute, in all levels."""

    number: int


def _split(
    wholes: dict[Key, tuple[fx.GraphModule, list[int | None]]],
    names: dict[Key, list[tuple[str, int]]],
) -> dict[Key, _Part]:
    """The part of each level that the levels before it have not computed.

    wholes: the graph of each level, and the places of its outputs. names: of its inputs.
    """
    keys = sorted(wholes, key=lambda key: "FBUD".index(key.level))
    known: dict[Hashable, int] = {}
    numbers = {key: _numbered(key, wholes[key][0].graph, names[key], known) for key in keys}
    nodes_of = {key: {n: node for node, n in numbers[key].items()} for key in keys}
    exports: dict[Key, dict[int, None]] = {key: {} for key in keys}
    needs: dict[Key, tuple[list[fx.Node], set[fx.Node]]] = {}
    for key in keys:
        before = key.before()
        nodes = list(wholes[key][0].graph.nodes)
        depends = {
            node
            for node in nodes
            if node.op == "call_function"
            and not any(numbers[key][node] in nodes_of[level] for level in before)
        }
        residuals, recomputed = residuals_of(nodes, depends, nodes[-1].all_input_nodes)
        needs[key] = residuals, depends | recomputed
        for node in residuals:
            number = numbers[key][node]
            owner = next(level for level in before if number in nodes_of[level])
            exports[owner][number] = None
    parts = {}
    for key in keys:
        whole, slots = wholes[key]
        residuals, own = needs[key]
        kept = [number for level in key.before() for number in exports[level]]
        exported = [nodes_of[key][number] for number in exports[key]]
        graph = _part(whole, residuals, own, exported)
        computing = [x for x in graph.graph.nodes if x.op == "call_function" and not is_view(x)]
        parts[key] = _Part(
            whole=whole, graph=graph, takes=[kept.index(numbers[key][x]) for x in residuals],
            slots=slots, own=sum(i is not None for i in slots), before=len(kept),
            operations=len(computing), seconds=seconds_to_run(computing),
        )  # fmt: skip
    return parts


def _numbered(
    key: Key, graph: fx.Graph, names: list[tuple[str, int]], known: dict[Hashable, int]
) -> dict[fx.Node, int]:
    """A number for each node, which is that of an equal one in another level."""
    found: dict[fx.Node, int] = {}
    inputs = iter(names)
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            name, i = next(inputs)
            what: Hashable = "input", name, i, () if name == "x" else key[1:]
        else:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs),
                lambda x: _Number(found[x]),
            )
            what = node.target, repr(args), repr(kwargs)
        found[node] = known.setdefault(what, len(known))
    return found


def _part(
    whole: fx.GraphModule, residuals: list[fx.Node], own: set[fx.Node], exported: list[fx.Node]
) -> fx.GraphModule:
    """The graph of some nodes, from the inputs and the residuals."""
    graph = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    nodes = list(whole.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            places[node] = graph.node_copy(node)
    for node in residuals:
        places[node] = graph.placeholder(f"kept_{node.name}")
        places[node].meta.update(node.meta)
    for node in nodes:
        if node.op == "call_function" and node in own:
            places[node] = graph.node_copy(node, places.__getitem__)
    (outputs,) = nodes[-1].args
    graph.output([places[x] for x in (*outputs, *exported)])
    graph.eliminate_dead_code(lambda node: node.is_impure())
    return fx.GraphModule(whole, graph)
