"""The levels of recomputed functions (the function, its vjp, the vjp of that) as compiled graphs.

Each level is a function of tensors alone. Blocks that are equal but for their tensors run the graphs of
one template: a copy of the first such block, whose tensors have no memory. So do blocks that differ in
integers and strings too, such as the number of a layer, if the graphs of their forwards are equal.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from copy import copy, deepcopy
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib._core import recomputation, torch_internals
from hoglib._core.gradient_graph import graph_summary
from hoglib._core.references import is_plain
from hoglib._core.torch_modes import value_checks_off, without_stand_ins
from hoglib.capture.api import Compiled, trace_graph
from hoglib.capture.block_keys import (
    MAX_CONSTANT,
    HookCalls,
    as_variable,
    block_name,
    call_keys,
    state_of,
)
from hoglib.capture.capturing import Place

MAX_TEMPLATES = 64
_TEMPLATES: OrderedDict[Hashable, "Template"] = OrderedDict()


def run_level(run: Any, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """run(*tensors) by the graph of its template, without a graph of autograd."""
    call = run.call
    if call.template is None:
        call.template = _template_of(call, _inputs_of(run, tensors))
    level: Any = call.template.level(run)
    if torch_internals.forward_mode_active():  # of the caller; these tensors have no tangents
        level = level.run
    given = [None if x is None else x.detach().contiguous() for x in tensors]
    # The function runs with stand-ins where its call did; a backward after the call would need graphs
    # of its own if they were also on around it.
    with without_stand_ins():
        if run is call.first or getattr(run, "run", None) is call.first:
            outputs = level(given)
            call.adopt_outputs(call.template.call)
            return tuple(outputs)
        with call.run_state.restored():
            return tuple(level(given))


@final
class Template:
    """A call of a function whose modules have no memory, and the graphs of its levels.

    family: the key, of all but integers and strings.
    """

    def __init__(self, call: Any, fn: Any, constants: list[Any], family: Hashable) -> None:
        self.call = call.with_parts(fn, constants)
        self.family = family
        self.levels: dict[tuple[Any, ...], Compiled] = {}
        self._forwards: list[Forward | None] = []

    def forward(self, inputs: list[Tensor | None]) -> "Forward | None":
        """What the function computes; None if a backward may depend on more than its operations."""
        if not self._forwards:
            self._forwards.append(_forward_of(self.call, inputs))
        return self._forwards[0]

    def level(self, run: Any) -> Compiled:
        """The graph of a level, of this call or of an equal one."""
        found = self.levels.get(run.key)
        if found is None:
            name = f"{run.key[0]} of {block_name(self.call)}"
            found = self.levels[run.key] = Compiled(
                _Level(self._own(run)),
                backend=self.call.backend,
                name=name,
                place=Place(self, run.key),
            )
        return found

    def extra_inputs(
        self, run: Any, count: int, wanted: list[int], arrived: list[int], free: set[int]
    ) -> frozenset[int]:
        """The inputs, among those that are free, of a vjp that has a graph, beyond those wanted."""
        for key in self.levels:
            if key[:3] == ("the vjp", run.key, count) and key[4] == tuple(arrived):
                more = frozenset(key[3]).difference(wanted)
                if len(key[3]) == len(more) + len(wanted) and more <= free:
                    return more
        return frozenset()

    def _own(self, run: Any) -> Any:
        if isinstance(run, recomputation.Run):
            return self.call.first
        own = copy(run)
        own.run, own.rerun, own.call = self._own(run.run), own, self.call
        return own


class _Level:
    """What is captured."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        with value_checks_off():
            return list(self.run(*tensors))


class Forward(NamedTuple):
    """What a function computes, to compare: if equal, the graphs of all levels are."""

    code: str  # of the graph
    constants: list[Any]  # small tensors that it makes from numbers
    outputs: list[
        Any
    ]  # the results without their tensors, their structure, the places of the tensors
    structure: Any
    slots: list[int]


def _forward_of(call: Any, inputs: list[Tensor | None]) -> Forward | None:
    hooks = HookCalls()
    by_user: list[bool] = []

    def run(tensors: list[Tensor | None]) -> list[Tensor | None]:
        with torch.enable_grad(), hooks:
            outputs = call.first(*[None if x is None else as_variable(x) for x in tensors])
        by_user.append(graph_summary(outputs).has_user_code)
        return [None if y is None else y.detach() for y in outputs]

    given = [None if x is None else x.detach().contiguous() for x in inputs]
    with torch.no_grad():
        entry, lifted = trace_graph(run, given, name=f"the forward of {block_name(call)}")
    small = all(x.numel() <= MAX_CONSTANT for x in lifted)
    plain = small and entry.reads is None and all(map(is_plain, call.outputs))
    if not plain or hooks.registered or any(by_user):
        return None
    constants = [(x.dtype, x.tolist()) for x in lifted]
    return Forward(entry.code, constants, call.outputs, call.output_structure, call.output_slots)


def _inputs_of(run: Any, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The inputs of the function among those of a level."""
    while not isinstance(run, recomputation.Run):
        tensors, run = tensors[: run.count], run.run
    return list(tensors)


def _template_of(call: Any, inputs: list[Tensor | None]) -> Template:
    """The template of a call and of those that are equal, for inputs of these shapes."""
    key, family, shared = call_keys(call, inputs)
    found = _TEMPLATES.get(key)
    if found is None:
        memo: dict[int, Any] = {id(x): x for x in shared}
        for module in call.scope.modules():
            for x in state_of(module).values():
                memo[id(x)] = torch.empty_like(x, device="meta")
        made = Template(call, *deepcopy((call.fn, call.constants), memo), family)
        found = _TEMPLATES[key] = _equal_template(made, inputs) or made
        while len({id(x) for x in _TEMPLATES.values()}) > MAX_TEMPLATES:
            _TEMPLATES.popitem(last=False)
    _TEMPLATES.move_to_end(key)
    return found


def _equal_template(made: Template, inputs: list[Tensor | None]) -> Template | None:
    """A template that differs in integers and strings alone, and computes the same nevertheless."""
    alike = {id(x): x for x in _TEMPLATES.values() if x.family == made.family}
    if not alike or (forward := made.forward(inputs)) is None:
        return None
    return next((x for x in alike.values() if x.forward(inputs) == forward), None)
