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

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from threading import local
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from hoglib._core import torch_internals
from hoglib._core.block_parts import replaced_forwards
from hoglib._core.blocks import call_forward, find_blocks
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.pytree import is_float
from hoglib._core.recomputation import recompute
from hoglib._core.references import is_plain
from hoglib._core.state import AutocastState
from hoglib._core.swap import keep_swapped
from hoglib.capture.block_keys import HOOKS, MAX_CONSTANT, HookCalls, call_keys
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

    def apply(self, run: Any, *tensors: Tensor | None) -> Tensors:
        """run(*tensors) for a call of a block, with vjps that are recorded and copied too."""
        block, outputs = self._forward(run, list(tensors))
        call = _Call(self, run, block)
        *found, call.token = _Forward.apply(call, outputs, *tensors)
        return tuple(found)

    def level(
        self, key: Hashable, run: Callable[..., Tensors], tensors: Sequence[Tensor | None]
    ) -> Tensors:
        """run(*tensors) as operations that are recorded, or as a copy of those of an equal level."""
        layouts = tuple(None if x is None else _layout(x) for x in tensors)
        autocast = AutocastState(x for x in tensors if x is not None)
        key = key, layouts, autocast.key
        known = self._levels.get(key)
        if known is None:
            with keep_swapped():
                known, outputs = self._record(run, tensors)
            self._levels[key] = known
            if known is None:
                return outputs
        return self._copy(known, tensors)

    def _forward(self, run: Any, tensors: list[Tensor | None]) -> tuple["_Block", Tensors]:
        call, layouts = run.call, tuple(None if x is None else _layout(x) for x in tensors)
        key, family, shared = call_keys(call, tensors)
        self._shared += shared
        if (key, layouts) not in self._known:
            self._known[key, layouts] = None
            self._known[key, layouts] = self._first(run, tensors, (family, layouts))
        block = self._known[key, layouts]
        if block is None:
            raise CannotReplayError
        outputs, call.output_structure, call.output_slots = self._outputs[block.number]
        call.outputs = list(outputs)
        level = self._levels[block.number]
        assert level is not None
        return block, self._copy(level, tensors)

    def _first(self, run: Any, tensors: list[Tensor | None], family: Hashable) -> "_Block":
        """Records the forward of a block that differs from others at least in a number or name."""
        call, hooks, by_user = run.call, HookCalls(), list[bool]()

        def forward(*tensors: Tensor | None) -> Tensors:
            with hooks:
                outputs: Tensors = run(*tensors)
            by_user.append(graph_summary(outputs).has_user_code)
            return outputs

        requires = tuple(
            x is not None and is_float(x) and i not in call.buffers for i, x in enumerate(tensors)
        )
        level, _ = self._record(_with_graph(forward, requires), tensors)
        if level is None or hooks.registered or not all(map(is_float, level.examples)):
            raise CannotReplayError
        compared = None
        if all(map(is_plain, call.outputs)) and not any(by_user):
            root = get_proxy_mode().tracer.root  # type: ignore[union-attr]
            with outside_trace():  # the values of constants
                operations = _signature(level, root)
            compared = Forward(
                operations, list(call.outputs), call.output_structure, call.output_slots
            )
        alike = self._families.setdefault(family, [])
        for block in alike:
            if compared is not None and block.forward == compared:
                return block
        found = _Block(len(self._outputs), compared)
        self._outputs.append((list(call.outputs), call.output_structure, call.output_slots))
        self._levels[found.number] = level
        alike.append(found)
        return found

    def _record(
        self, run: Callable[..., Tensors], given: Sequence[Tensor | None]
    ) -> tuple[Level | None, Tensors]:
        """A level as a graph, None if its copies might differ; and its outputs."""
        mode: Any = get_proxy_mode()
        graph, root = mode.tracer.graph, mode.tracer.root
        reads = len(self._values.reads)
        given = [None if x is None else x.detach() for x in given]  # each a node of its own
        last = next(iter(reversed(graph.nodes)))
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
        for node in reversed(nodes):  # a copy is taken, in which the order is that of all copies
            if node.op != "get_attr":  # a constant, which the module of the graph has to hold
                graph.erase_node(node)
        module = fx.GraphModule(root, own)
        pin_strides(module)
        simplify(module)
        places = iter(range(len(results)))
        return Level(
            module.graph,
            [None if y is None else next(places) for y in outputs],
            [node.meta["val"] for node in results],
        ), outputs

    def _copy(self, level: Level, given: Sequence[Tensor | None]) -> Tensors:
        self.copies += 1
        number = next((i for i, x in enumerate(self.numbered) if x is level), len(self.numbered))
        if number == len(self.numbered):
            self.numbered.append(level)
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


class _Call:
    """A call of a block y = f(x), and of its vjp g -> f'(x)^T g."""

    def __init__(self, replay: Replay, run: Any, block: _Block) -> None:
        self.replay, self.run, self.block = replay, run, block
        self.token: Any = None
        # backward pass -> what each vjp was computed from, and the cotangents of its outputs
        self.pending = defaultdict[int, list[tuple[Vjp, Tensors, Tensors]]](list)

    def vjp(
        self, vjp: "Vjp", inputs: Tensors, cotangents: Tensors, differentiable: bool
    ) -> Tensors:
        """The gradients of the wanted inputs."""

        def run(*tensors: Tensor | None) -> Tensors:
            own, given = tensors[: len(inputs)], tensors[len(inputs) :]
            if not differentiable:
                own = _variables(own, vjp.wanted)
            with torch.enable_grad():
                outputs = self.run(*own)
                return vjp.gradients(own, outputs, given, differentiable)

        tensors = (*inputs, *cotangents)
        requires = differentiable and tuple(x is not None and x.requires_grad for x in tensors)
        key = self.block.number, "vjp", vjp, requires
        return self.replay.level(key, _with_graph(run, requires) if requires else run, tensors)

    def vjp_of_cotangents(
        self, vjp: "Vjp", inputs: Tensors, cotangents: Tensors, of_gradients: Tensors
    ) -> Tensors:
        """The gradients of the cotangents of a vjp, which is linear in them."""
        count, ends = len(inputs), len(inputs) + len(cotangents)

        def run(*tensors: Tensor | None) -> Tensors:
            own = _variables(tensors[:count], vjp.wanted)
            given = _variables(tensors[count:ends], range(len(cotangents)))
            with torch.enable_grad():
                found = vjp.gradients(own, self.run(*own), given, True)
            return _pull([*zip(found, tensors[ends:], strict=True)], given)

        given = tuple(x is not None for x in of_gradients)
        key = self.block.number, "vjp of cotangents", vjp, given
        return self.replay.level(key, run, (*inputs, *cotangents, *of_gradients))

    def combined(
        self, wanted: tuple[int, ...], inputs: Tensors, cotangents: Tensors,
        pending: list[tuple["Vjp", Tensors, Tensors]],
    ) -> Tensors:  # fmt: skip
        """The gradients by the inputs of f, and of the vjps that were computed from them, in one pass
        over f as autograd makes it."""
        lengths = [len(inputs), len(cotangents)]
        for _, of_vjp, of_gradients in pending:
            lengths += [len(of_vjp), len(of_gradients)]

        def run(*tensors: Tensor | None) -> Tensors:
            left = iter(tensors)
            parts = [tuple(islice(left, n)) for n in lengths]
            own = _variables(parts[0], wanted)
            with torch.enable_grad():
                outputs = self.run(*own)
                pairs = [*zip(outputs, parts[1], strict=True)]
                for (vjp, *_), given, weights in zip(
                    pending, parts[2::2], parts[3::2], strict=True
                ):
                    pairs += zip(vjp.gradients(own, outputs, given, True), weights, strict=True)
            return _pull(pairs, [own[i] for i in wanted])

        every = [*inputs, *cotangents]
        for _, of_vjp, of_gradients in pending:
            every += [*of_vjp, *of_gradients]
        key = (
            self.block.number, "combined", wanted, tuple(vjp for vjp, *_ in pending),
            tuple(x is not None for x in every),
        )  # fmt: skip
        return self.replay.level(key, run, every)


class Vjp(NamedTuple):
    """Which inputs' gradients, for cotangents of which outputs."""

    wanted: tuple[int, ...]
    arrived: tuple[int, ...]

    def gradients(
        self, own: Tensors, outputs: Tensors, cotangents: Tensors, create_graph: bool
    ) -> Tensors:
        pairs = [(outputs[j], g) for j, g in zip(self.arrived, cotangents, strict=True)]
        return _pull(pairs, [own[i] for i in self.wanted], create_graph)


def _pull(
    pairs: list[tuple[Tensor | None, Tensor | None]], inputs: Sequence[Tensor | None],
    create_graph: bool = False,
) -> Tensors:  # fmt: skip
    """The gradients of sum <y, g> over the pairs (y, g) that have both."""
    pairs = [(y, g) for y, g in pairs if y is not None and g is not None and y.requires_grad]
    if not pairs:
        return (None,) * len(inputs)
    values, weights = zip(*pairs, strict=True)
    variables: Any = inputs
    return torch.autograd.grad(
        values, variables, weights, create_graph=create_graph, allow_unused=True
    )


def _variables(tensors: Tensors, wanted: Sequence[int]) -> Tensors:
    return tuple(
        x if x is None else x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)
    )


class _Forward(torch.autograd.Function):
    """A call of a block. Its last output is a token, by which its vjps depend on it: the gradient of a
    vjp by the block's inputs is computed here, together with that of the block's outputs."""

    recomputes = True

    @staticmethod
    def forward(ctx: Any, call: _Call, outputs: Tensors, *inputs: Tensor | None) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        token = torch.zeros(())
        ctx.save_for_backward(*inputs)
        return (*outputs, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call, inputs = ctx.call, ctx.saved_tensors
        wanted = tuple(
            i for i, x in enumerate(inputs)
            if x is not None and ctx.needs_input_grad[i + 2] and is_float(x)
        )  # fmt: skip
        *cotangents, _ = grads
        pending = call.pending.pop(torch_internals.running_backward(), [])
        arrived = tuple(j for j, g in enumerate(cotangents) if g is not None)
        vjp, given = Vjp(wanted, arrived), tuple(cotangents[j] for j in arrived)
        found: Tensors = (None,) * len(wanted)
        if pending and torch.is_grad_enabled():
            raise CannotReplayError
        if pending:
            found = call.combined(wanted, inputs, tuple(cotangents), pending)
        elif arrived and wanted:
            if torch.is_grad_enabled():
                found = _Vjp.apply(call, vjp, call.token, *inputs, *given)
            else:
                found = call.vjp(vjp, inputs, given, False)
        result: list[Tensor | None] = [None] * len(inputs)
        for i, grad in zip(wanted, found, strict=True):
            result[i] = grad
        return None, None, *result


class _Vjp(torch.autograd.Function):
    """The vjp of a call of a block."""

    recomputes = True

    @staticmethod
    def forward(ctx: Any, call: _Call, vjp: Vjp, token: Tensor, *tensors: Tensor | None) -> Any:
        ctx.call, ctx.vjp = call, vjp
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        count = len(tensors) - len(vjp.arrived)
        return call.vjp(vjp, tensors[:count], tensors[count:], True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call, vjp, tensors = ctx.call, ctx.vjp, ctx.saved_tensors
        if torch.is_grad_enabled():  # the third derivative
            raise CannotReplayError
        count = len(tensors) - len(vjp.arrived)
        inputs, cotangents = tensors[:count], tensors[count:]
        needed = ctx.needs_input_grad[3 + count :]
        found: Tensors = (None,) * len(cotangents)
        if any(needed):
            found = call.vjp_of_cotangents(vjp, inputs, cotangents, grads)
        call.pending[torch_internals.running_backward()].append((vjp, cotangents, grads))
        return None, None, torch.zeros(()), *[None] * count, *found


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
            found = recompute(run, self._block, args, kwargs, apply=self._replay.apply)
        except Exception:  # where it is the user's, it is raised again
            while (node := next(iter(reversed(graph.nodes)))) is not last:
                graph.erase_node(node)
            return self._forward(*args, **kwargs)
        self._replay.modules += self._block.modules()
        return found


def _with_graph(run: Callable[..., Tensors], requires: tuple[bool, ...]) -> Callable[..., Tensors]:
    """A level as it runs where its derivatives are taken, for inputs some of which require grad."""

    def recorded(*tensors: Tensor | None) -> Tensors:
        with torch.enable_grad():
            outputs = run(
                *[
                    None if x is None else x.detach().requires_grad_(needed)
                    for x, needed in zip(tensors, requires, strict=True)
                ]
            )
        return tuple(None if y is None else y.detach() for y in outputs)

    return recorded


def _node(x: Tensor) -> fx.Node:
    """The node of a traced tensor; raises KeyError for others."""
    mode: Any = get_proxy_mode()
    slot: Any = get_proxy_slot(x, mode.tracer)
    return slot.proxy.node


def _layout(x: Tensor) -> Hashable:
    return x.dtype, tuple(x.shape), x.stride(), str(x.device)


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
