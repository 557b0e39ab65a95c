"""One call of a recomputed function: a frozen description without tensors, and its runs.

    Call           fn, its arguments, and the conditions of the call
    FirstRun       runs fn with its side effects; makes the Rerun
    Rerun          runs fn again, in a backward: the Call, and values from the first run
    CapturedRun    runs fn while a graph is captured, for all equal calls

Only the autograd graph keeps the input tensors of a call alive: each run takes them as arguments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast, final

from torch import Tensor, nn
from torch.func import functional_call

from hoglib._core.messages import closures, validation
from hoglib._core.modules.state import RunState
from hoglib._core.modules.swap import batch_statistics
from hoglib._core.numerics.trust import SUMS, agree
from hoglib._core.remat.block_parts import SlicedOperations, version_of, watched_parts
from hoglib._core.runtime.ambient import AMBIENT, RunningRemat, inside
from hoglib._core.substrate.autograd import no_forward_mode
from hoglib._core.substrate.gradient_graph import check_custom_functions, graph_summary
from hoglib._core.torch_api import pytree, torch_forward_mode, torch_internals
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_modes import ActiveStandIns, ContiguousDropout
from hoglib.errors import ArgumentValueError, NondeterministicError, UnsupportedError

Tensors = tuple[Tensor | None, ...]


class StaticTree(NamedTuple):
    """A pytree without its tensors.

    leaves: The leaves; None in the place of a tensor.
    slots: The indices of the tensors among the leaves.
    structure: From `pytree.flatten`.
    """

    leaves: list[Any]
    slots: tuple[int, ...]
    structure: Any

    @classmethod
    def split(cls, tree: Tree) -> tuple["StaticTree", list[Tensor]]:
        """The tree without its tensors, and the tensors."""
        leaves, structure = pytree.flatten(tree)
        slots = tuple([i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)])
        static = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(static, slots, structure), [leaves[i] for i in slots]

    def filled(self, tensors: Iterable[Tensor | None]) -> Any:
        """The tree with these tensors."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.slots, tensors, strict=True):
            leaves[i] = tensor
        return pytree.unflatten(leaves, self.structure)


@final
class Scope(nn.Module):
    """The modules of a call as one module, for `functional_call`."""

    def __init__(self, leaves: Iterable[Any]) -> None:
        super().__init__()
        self.held = nn.ModuleList([leaf for leaf in leaves if isinstance(leaf, nn.Module)])

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class Inputs(NamedTuple):
    """The order of the inputs of a run: tensor arguments, then parameters, then buffers.

    A tensor that occurs twice is one input. An argument that is also a parameter is two inputs,
    because the two gradients differ.

    arguments: The arguments without their tensors.
    places: The index of the input for each tensor argument.
    scope: The modules among the arguments.
    state: Name of a parameter or buffer in the scope -> the index of its input.
    buffers: The indices of the buffers.
    """

    arguments: StaticTree
    places: tuple[int, ...]
    scope: Scope
    state: dict[str, int]
    buffers: range

    @classmethod
    def of(cls, tree: Tree) -> tuple["Inputs", list[Tensor]]:
        """The order for a tree of arguments, and the inputs."""
        arguments, given = StaticTree.split(tree)
        scope = Scope(arguments.leaves)
        distinct = {id(x): x for x in given}
        order = dict(zip(distinct, range(len(distinct)), strict=True))
        places = tuple([order[id(x)] for x in given])
        tensors = [*distinct.values()]
        index: dict[int, int] = {}
        state: dict[str, int] = {}
        for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
            start = len(tensors)
            for prefix, module in scope.named_modules():
                for name, tensor in kind(module, recurse=False, remove_duplicate=False):
                    if id(tensor) not in index:
                        index[id(tensor)] = len(tensors)
                        tensors.append(tensor)
                    state[f"{prefix}.{name}"] = index[id(tensor)]
        return cls(arguments, places, scope, state, range(start, len(tensors))), tensors


@final
@dataclass(frozen=True, eq=False)
class Call:
    """One call of a recomputed function, without its tensors: known before it runs, never changed.

    Attributes:
        fn: The function.
        inputs: The order of the inputs of a run.
        run_state: The random generators, autocast and modes at the call.
        stand_ins: The modes that were active at the call.
        transformed: The call is inside torch.func transforms, where torch cannot change buffers.
        contiguous_dropout: Some run is inside torch.func, where dropout draws in contiguous order.
        nested: Remats inside fn recompute too.
        backend: Compiles fn and its vjps; "" for none.
        by_tangents: For a loss fn: differentiates its gradient forward over reverse.
    """

    fn: Callable[..., Any]
    inputs: Inputs
    run_state: RunState
    stand_ins: ActiveStandIns
    transformed: bool
    contiguous_dropout: bool
    nested: bool
    backend: str
    by_tangents: "ByTangents | None"

    def run(self, tensors: Sequence[Tensor | None], slices: bool = False) -> Any:
        """Run fn with these inputs, under the conditions of the call.

        slices: run activations, softmax and attention on slices, to take less memory.
        """
        arguments = self.inputs.arguments
        args, keywords = given = arguments.filled(map(tensors.__getitem__, self.inputs.places))
        slices = slices and not torch_internals.tracing()  # the compiler chooses what to keep
        nested = self.nested and (AMBIENT.remat is None or AMBIENT.remat.nested)
        # torch calls the mode entered last first: SlicedOperations passes slices on to
        # ContiguousDropout, which passes a contiguous input on to the stand-ins.
        with (
            inside(remat=RunningRemat(nested, slices)),
            self.stand_ins.resume(),
            self.run_state.autocast.restored(),
            ContiguousDropout() if self.contiguous_dropout else nullcontext(),
            SlicedOperations() if slices else nullcontext(),
        ):
            outputs = self.fn(*args, **keywords)
        refuse_changed(self.fn, given, arguments.structure)
        return outputs

    def run_with_state(
        self, tensors: Sequence[Tensor | None], changed: Mapping[int, Tensor], slices: bool
    ) -> Any:
        """`run`, with the parameters and buffers among the inputs swapped into the modules.

        changed: values before the first run of the buffers that fn changes.
        """
        if not self.inputs.state:
            return self.run(tensors, slices)
        # inside torch.func the first run could not see which buffers fn changes
        copied: Any = {i: tensors[i] for i in self.inputs.buffers} if self.transformed else changed
        state = [copied[i].clone() if i in copied else x for i, x in enumerate(tensors)]
        with batch_statistics(self.inputs.scope):
            return self.swapped(state, partial(self.run, tensors, slices))

    def swapped(self, state: Sequence[Tensor | None], run: Callable[[], Any]) -> Any:
        """run(), with this state, indexed as the inputs, swapped into the modules."""
        named: Any = {name: state[i] for name, i in self.inputs.state.items()}
        scope = self.inputs.scope
        return functional_call(scope, named, (run,), tie_weights=False) if named else run()

    def split(self, outputs: object) -> tuple[StaticTree, Tensors]:
        """The results without their tensors, and the tensors. Refuses objects that hold a tensor."""
        static, tensors = StaticTree.split(outputs)
        for leaf in static.leaves:
            held = () if leaf is None else closures.held(leaf)
            if kept := next((one for one in held if isinstance(one.value, Tensor)), None):
                raise ArgumentValueError(
                    f"remat: expected results in tuples, lists and dicts, got a {type(leaf).__name__} "
                    f"that holds a tensor ({kept.path}) from `{closures.name_of(self.fn)}`; it would "
                    "have no gradient. Return a tuple or dict, or register the type with "
                    "torch.utils._pytree.register_dataclass."
                )
        return static, tuple(tensors)


def refuse_changed(fn: Callable[..., Any], arguments: object, structure: object) -> None:
    """Raise if fn has added to or removed from a list or dict in a tree of this structure."""
    if pytree.flatten(arguments)[1] != structure:
        raise ArgumentValueError(
            f"remat: expected a function that returns what it computes, got `{closures.name_of(fn)}`, "
            "which changes a list or dict among its arguments; what it puts there would have no "
            "gradient. Return it."
        )


class Level:
    """A function of tensors that a node of the graph runs: fn of one call, or a derivative of it."""

    call: Call
    key: tuple[Any, ...]  # equal for levels of equal calls that have one graph
    changed_buffers: Mapping[int, Tensor]  # index of an input -> its value before the first run
    padded_inputs = frozenset[int]()  # inputs with a gradient that is computed for equal calls only
    by_tangents: "ByTangents | None" = None  # differentiates this level, the gradient of a loss
    as_tangents = False  # this level returns tangents in the place of results

    def rerun(self) -> "Level":
        """The level that backward runs."""
        return self

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        raise NotImplementedError


class Run(Level):
    """fn of one call as a function of its inputs, see `Inputs`. `Rerun` documents the attributes."""

    key = ("the forward",)
    parts: Sequence[nn.Module] = ()
    value: Tensor | None = None
    template: Any = None

    def __call__(self, *tensors: Tensor | None, slices: bool = False) -> Tensors:
        raise NotImplementedError


@final
@dataclass(frozen=True, eq=False)
class Rerun(Run):
    """A later run, with the random numbers and modes of the first.

    Attributes:
        call: The call.
        changed_buffers: Index of a buffer that fn changes -> its value before the first run.
        parts: Modules that can be recomputed one by one.
        value: The loss of the first run, if the call has `by_tangents`.
        template: The compiled graphs of equal calls.
    """

    call: Call
    changed_buffers: Mapping[int, Tensor]
    parts: Sequence[nn.Module] = ()
    value: Tensor | None = None
    template: Any = None

    def __call__(self, *tensors: Tensor | None, slices: bool = False) -> Tensors:
        with self.call.run_state.restored():
            outputs = self.call.run_with_state(tensors, self.changed_buffers, slices)
        return tuple(pytree.tensors(outputs))


@final
class FirstRun(Run):
    """The first run, with the side effects of fn on its modules, which torch.func does not allow.

    `autograd.Function` returns tensors only, so a run sets its other results: the `rerun()`, and
    `outputs`.

    outputs: The result of fn without its tensors.
    is_part: fn is a part of a block that recomputes its parts one by one.
    """

    changed_buffers: Mapping[int, Tensor] = {}  # known after the run
    outputs: StaticTree
    _rerun: Rerun

    def __init__(self, call: Call, is_part: bool) -> None:
        self.call, self._is_part = call, is_part

    def rerun(self) -> Rerun:
        return self._rerun

    def __call__(self, *tensors: Tensor | None, slices: bool = False) -> Tensors:
        call, buffers = self.call, self.call.inputs.buffers
        versions = [version_of(tensor) for tensor in tensors]
        copied = () if call.transformed else buffers
        before = {i: cast(Tensor, tensors[i]).clone() for i in copied}
        parts: list[nn.Module] = []
        if call.transformed:
            in_parts = torch_internals.forward_mode_active() and not self._is_part
            with watched_parts(call.inputs.scope.held) if in_parts else nullcontext(parts) as parts:
                result = call.run_with_state(tensors, {}, slices)
        else:
            result = call.run(tensors, slices)
        changed = [i for i, version in enumerate(versions) if version_of(tensors[i]) != version]
        if wrong := [i for i in changed if i not in buffers]:
            raise ArgumentValueError(
                f"remat: expected a function that does not change its inputs, got "
                f"`{closures.name_of(call.fn)}`, which changed "
                f"{validation.describe(tensors[wrong[0]])} in place, so that it cannot be run again. "
                "Change a copy, `x = x.clone()`, or return the new value."
            )
        self.outputs, found = call.split(result)
        value = None
        if call.by_tangents is not None:
            # clone(): the result of torch's mse_loss keeps the memory of all its terms alive
            value = torch_internals.unwrap(found[0]).detach().clone()
        changed_buffers = {i: x for i, x in before.items() if i in changed}
        self._rerun = Rerun(call, changed_buffers, parts, value)
        return found

    def adopt(self, template: Any) -> None:
        """Take the results from a template that an equal call has filled."""
        self.outputs, self._rerun = template.run.outputs, Rerun(self.call, {}, template=template)

    def result(self, tensors: Tensors) -> Any:
        """The result of fn. It is not kept: a node of the graph may keep this run alive."""
        outputs = self.outputs
        del self.outputs
        return outputs.filled(tensors)


@final
class CapturedRun(Run):
    """A run that is captured for all equal calls: without side effects, and without a random state.

    outputs: The result of fn without its tensors; set by a run.
    """

    outputs: StaticTree

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, *tensors: Tensor | None, slices: bool = False) -> Tensors:
        run = partial(self.call.run, tensors, slices)
        self.outputs, found = self.call.split(self.call.swapped(tensors, run))
        return found


@final
class ByTangents:
    """Differentiates gradients of losses forward over reverse, in all steps of a loop.

    option: The user's option, for messages.
    instead: The advice in messages.
    needs_graph: torch lacks the forward mode of some operation while gradients are disabled.
    """

    def __init__(self, option: str, instead: str) -> None:
        self.option, self.instead = option, instead
        self.needs_graph = False

    def check(self, outputs: Tensors) -> None:
        """Raise for custom Functions in the graph of a loss that have no forward mode."""
        graph = graph_summary(outputs)
        check_custom_functions(graph, self.option)
        for function in (entry.function for entry in graph.functions if entry.by_user):
            if function is not None and not torch_internals.has_forward_mode(function):
                raise UnsupportedError(
                    f"{self.option}: expected custom Functions with setup_context and jvp, got "
                    f"{function.__qualname__}, which has no forward mode. {self.instead}"
                )

    def check_value(self, first: Tensor | None, again: Tensor | None) -> None:
        """Raise if a rerun gives another loss. Not checked on a device: reading the loss would wait."""
        if first is None or again is None or not first.is_cpu:
            return
        again = torch_internals.unwrap(again)
        known = first.shape == again.shape and bool(first.isfinite().all())
        if known and not agree(first, again, SUMS):
            raise NondeterministicError(
                f"{self.option}: expected a loss that is the same when it is run again, got "
                f"{first.tolist()} and {again.tolist()}. Look for random numbers that are not torch's "
                "(NumPy, random), and for modules that count or keep statistics."
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Inside, errors of torch name operations that have no forward mode."""
        try:
            with torch_forward_mode.one_thread_in_forward_mode(self.option):
                yield
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            raise no_forward_mode(self.option, error, self.instead) from error
