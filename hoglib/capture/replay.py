"""Equal blocks of a network are traced once: the graph of the first is copied for the others.

    x_1 = f(x_0, W_1), ..., x_L = f(x_{L-1}, W_L)        f and its vjps are traced once, and copied

As in `hoglib._core.recomputation`, each level of a block (the function, its vjp, the vjp of that) is a
function of tensors alone. When a level runs for the first time in a trace, its operations are recorded;
the same level of an equal block becomes one node, in whose place they are copied after the trace. A vjp
contains the forward again. In the whole graph these operations are repeated ones of the same tensors,
which `simplify` removes, so that intermediate values are kept and not recomputed.

A block runs as it is where a copy might differ: where it draws random numbers, writes to its inputs,
reads values or has hooks, and inside torch.func transforms and forward mode.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from hoglib._core import torch_internals
from hoglib._core.blocks import call_forward, find_blocks, replaced_forwards
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.recomputation import Run, recompute
from hoglib._core.references import is_plain
from hoglib.capture.block_keys import HOOKS, MAX_CONSTANT, HookCalls, as_variable, call_keys
from hoglib.capture.nodes import is_random
from hoglib.capture.passes import pin_strides, simplify
from hoglib.capture.reads import Recorder, outside_trace
from hoglib.capture.writes import replace_writes
from hoglib.errors import HoglibError

Tensors = tuple[Tensor | None, ...]
FEWEST = 3  # equal blocks for which recording pays
# Ambient state, because an operator of torch.library takes tensors and numbers only.
_THREAD = local()


class CannotReplayError(Exception):
    """What was recorded may depend on more than its operations."""


def equal_blocks(func: Any) -> list[nn.Module]:
    """The repeated blocks of the modules that a function reaches, of which enough are equal."""
    try:
        blocks = [block for block in find_blocks(True, func) if not _has_hooks(block)]
    except HoglibError:  # it has none, or they hide tensors
        return []
    kinds = [_kind(block) for block in blocks]
    counts = Counter(kinds)
    return [block for block, kind in zip(blocks, kinds, strict=True) if counts[kind] >= FEWEST]


def _has_hooks(block: nn.Module) -> bool:
    return any(vars(module).get(name) for module in block.modules() for name in HOOKS)


def _kind(block: nn.Module) -> Hashable:
    return type(block), *((name, x.shape, x.dtype) for name, x in block.state_dict().items())


class Level(NamedTuple):
    """A function of tensors as a graph."""

    graph: fx.Graph
    outputs: list[int | None]  # of the function: which output of the graph, or none
    examples: list[Tensor]  # fake tensors, as the outputs of the graph


class Forward(NamedTuple):
    """What a block computes besides its tensors, to compare."""

    operations: Hashable
    outputs: list[Any]
    structure: Any
    slots: list[int]


class _Block(NamedTuple):
    """A call of a block; equal ones share its number."""

    number: int
    forward: Forward | None  # None if a backward may depend on more than its operations

    def extra_inputs(self, *_: Any) -> frozenset[int]:
        """None: the vjp of a block whose input is data is traced too, as it computes less."""
        return frozenset()


@final
class Replay:
    """The levels of blocks in one trace.

    Attributes:
        failed: Whether the trace has to be made without copies.
        copies: How many levels were copied.
    """

    def __init__(self, blocks: Sequence[nn.Module], values: Recorder) -> None:
        self.failed, self.copies = False, 0
        self._blocks, self._values = blocks, values
        self._known: dict[Hashable, _Block | None] = {}  # None: it runs as it is
        self._families: dict[Hashable, list[_Block]] = {}
        self._levels: dict[Hashable, Level | None] = {}
        self._outputs: list[tuple[list[Any], Any, list[int]]] = []  # of blocks, without tensors
        self.numbered: list[Level] = []
        self._shared: list[Any] = []  # objects in keys by their identity
        self.modules: list[nn.Module] = []  # of blocks that were copied

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = getattr(_THREAD, "replay", None)
        _THREAD.replay = self
        try:
            with replaced_forwards(self._blocks, lambda block: _BlockForward(block, self)):
                yield
        finally:
            _THREAD.replay = before

    def run(self, run: Any, tensors: Sequence[Tensor | None]) -> Tensors:
        """run(*tensors), as operations that are recorded, or as a copy of recorded ones."""
        given = [None if x is None else x.detach() for x in tensors]
        layouts = tuple(None if x is None else _layout(x) for x in given)
        call = run.call
        if isinstance(run, Run):
            return self._forward(call, run, given, layouts)
        key = call.template.number, run.key, _autocast(run), layouts
        if key not in self._levels:
            self._levels[key], outputs = self._record(run, given)
            return outputs
        level = self._levels[key]
        if level is None:
            return tuple(run(*given))
        return self._copy(level, given, call)

    def _forward(
        self, call: Any, run: Any, given: list[Tensor | None], layouts: Hashable
    ) -> Tensors:
        key, family, shared = call_keys(call, given)
        key, family = (key, layouts), (family, layouts)
        self._shared += shared
        if key not in self._known:
            return self._first(call, run, given, key, family)
        known = self._known[key]
        if known is None:
            raise CannotReplayError
        call.template = known
        call.outputs, call.output_structure, call.output_slots = self._outputs[known.number]
        call.outputs = list(call.outputs)
        level = self._levels[known.number]
        assert level is not None
        return self._copy(level, given, call)

    def _first(
        self, call: Any, run: Any, given: list[Tensor | None], key: Hashable, family: Hashable
    ) -> Tensors:
        """Records the forward of a block that differs from others at least in a number or name."""
        self._known[key] = None
        hooks, by_user = HookCalls(), list[bool]()

        def forward(*tensors: Tensor | None) -> Tensors:
            with torch.enable_grad(), hooks:
                outputs = run(*[None if x is None else as_variable(x) for x in tensors])
            by_user.append(graph_summary(outputs).has_user_code)
            return tuple(None if y is None else y.detach() for y in outputs)

        level, outputs = self._record(forward, given)
        if level is None or hooks.registered or not all(map(_is_differentiable, level.examples)):
            raise CannotReplayError
        compared = None
        plain = all(map(is_plain, call.outputs))
        if plain and not any(by_user):
            compared = Forward(
                _signature(level, get_proxy_mode().tracer.root),  # type: ignore[union-attr]
                list(call.outputs), call.output_structure, call.output_slots,
            )  # fmt: skip
        alike = self._families.setdefault(family, [])
        found = None
        if compared is not None:
            found = next((x for x in alike if x.forward == compared), None)
        if found is None:
            found = _Block(len(self._outputs), compared)
            self._outputs.append((list(call.outputs), call.output_structure, call.output_slots))
            self._levels[found.number] = level
            alike.append(found)
        self._known[key] = call.template = found
        return outputs

    def _record(
        self, run: Callable[..., Tensors], given: list[Tensor | None]
    ) -> tuple[Level | None, Tensors]:
        """A level as a graph, None if its copies might differ; and its outputs."""
        mode: Any = get_proxy_mode()
        graph, root = mode.tracer.graph, mode.tracer.root
        last = next(iter(reversed(graph.nodes)))
        reads = len(self._values.reads)
        outputs = tuple(run(*given))
        self.failed |= len(self._values.reads) != reads
        nodes, at = [], last.next
        while at.op != "root":
            nodes.append(at)
            at = at.next
        try:
            own, copies = fx.Graph(), dict[fx.Node, fx.Node]()
            for x in given:
                if x is not None:
                    node = _node(x)
                    copies[node] = own.placeholder(f"x{len(copies)}")
                    copies[node].meta["val"] = node.meta["val"]
            for node in nodes:
                if node.op not in ("call_function", "get_attr") or is_random(node):
                    raise CannotReplayError
                if not copies.keys() >= {*node.all_input_nodes}:
                    raise CannotReplayError
                copies[node] = own.node_copy(node, copies.__getitem__)
            results = [_node(y) for y in outputs if y is not None]
            own.output([copies[node] for node in results])
        except (CannotReplayError, KeyError):
            return None, outputs
        with outside_trace():
            if not replace_writes(own):
                return None, outputs
        module = fx.GraphModule(root, own)
        pin_strides(module)
        simplify(module)
        places = iter(range(len(results)))
        return Level(
            module.graph,
            [None if y is None else next(places) for y in outputs],
            [node.meta["val"] for node in results],
        ), outputs

    def _copy(self, level: Level, given: list[Tensor | None], call: Any) -> Tensors:
        self.copies += 1
        if not any(level is x for x in self.numbered):
            self.numbered.append(level)
        number = next(i for i, x in enumerate(self.numbered) if x is level)
        found = _LEVEL([x for x in given if x is not None], number)
        return tuple(None if i is None else found[i] for i in level.outputs)

    def expand(self, graph: fx.Graph) -> None:
        """Puts the operations of each level in the place of the node that stands for it."""
        for node in graph.find_nodes(op="call_function", target=_LEVEL):
            inputs, number = node.args
            level = self.numbered[number]
            with graph.inserting_before(node):
                left = iter(inputs)
                copies: dict[fx.Node, fx.Node] = {}
                results: Any = []
                for x in level.graph.nodes:
                    if x.op == "placeholder":
                        copies[x] = next(left)
                    elif x.op == "output":
                        results = [copies[y] for y in x.args[0]]
                    else:
                        copies[x] = graph.node_copy(x, copies.__getitem__)
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)
        if self.copies and not replace_writes(graph):
            self.failed = True  # repeated operations would stay


class _BlockForward:
    """The forward of a block in a trace."""

    recomputes = True

    def __init__(self, block: nn.Module, replay: Replay) -> None:
        self._block, self._forward, self._replay = block, block.forward, replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch_internals.transforms_active() or torch_internals.forward_mode_active():
            return self._forward(*args, **kwargs)
        graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
        last = next(iter(reversed(graph.nodes)))
        try:
            run = partial(call_forward, self._forward)
            found = recompute(run, self._block, args, kwargs, levels=self._replay)
        except Exception:  # where it is the user's, it is raised again
            while (node := next(iter(reversed(graph.nodes)))) is not last:
                graph.erase_node(node)
            return self._forward(*args, **kwargs)
        self._replay.modules += self._block.modules()
        return found


def _node(x: Tensor) -> fx.Node:
    """The node of a traced tensor; raises KeyError for others."""
    mode: Any = get_proxy_mode()
    slot: Any = get_proxy_slot(x, mode.tracer)
    return slot.proxy.node


def _layout(x: Tensor) -> Hashable:
    return x.dtype, tuple(x.shape), x.stride(), str(x.device)


def _autocast(run: Any) -> Hashable:
    return () if isinstance(run, Run) else (run.autocast.key, *_autocast(run.run))


def _is_differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _signature(level: Level, root: Any) -> Hashable:
    """The operations of a graph, and the small tensors that it makes from numbers."""
    places = {node: f"%{i}" for i, node in enumerate(level.graph.nodes)}

    def of(node: fx.Node) -> Hashable:
        if node.op == "get_attr":
            value = getattr(root, str(node.target))
            small = value.numel() <= MAX_CONSTANT
            return "constant", value.dtype, str(value.tolist()) if small else id(value)
        args = fx.map_arg((node.args, node.kwargs), places.__getitem__)
        return node.op, node.target if node.op == "call_function" else "", repr(args)

    return tuple(map(of, level.graph.nodes))


torch.library.define("hoglib::level", "(Tensor[] inputs, int number) -> Tensor[]")
_LEVEL: Any = torch.ops.hoglib.level.default


def _outputs_of_level(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x in _THREAD.replay.numbered[number].examples
    ]


torch.library.register_fake("hoglib::level", _outputs_of_level)
