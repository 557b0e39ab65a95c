"""What a user calls the inputs of a function."""

import inspect
from typing import Any

import torch
from torch import Tensor

from hoglib._core import pytree, torch_internals, validation
from hoglib._core.autograd import grad_enabled
from hoglib._core.gradient_graph import FunctionNode
from hoglib._core.pytree import is_float
from hoglib._core.swap import keep_swapped
from hoglib.drawing import gathering as gather
from hoglib.drawing.backward_pass import Pass
from hoglib.drawing.gathering import Gathering, ModuleCalls, Part, Parts
from hoglib.functional import FunctionalLoss
from hoglib.verification.call import Call
from hoglib.verification.subject import as_function, parameters


class Names:
    """What a user calls the inputs: `x` for inputs[0], `params.weight` for what is in it."""

    def __init__(self, fn: Any, count: int) -> None:
        function = as_function(fn)
        self._own: list[str] = []
        if function is not None:
            self._own = [name.strip("`") for name in parameters(function, count)]
            return
        fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
        try:
            given = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._own = [p.name for p in given if p.kind in plain]

    def __call__(self, name: str) -> str:
        if not name.startswith("inputs["):
            return name.removeprefix("the parameter ")
        place, _, rest = name.removeprefix("inputs[").partition("]")
        i = int(place)
        return f"{self._own[i]}{rest}" if i < len(self._own) else name


# === The graph of a function and of its gradient as plain data: parts, edges, and where it is cut.

DERIVATIVES = {
    2: "the gradient with a graph",
    3: "the second derivative",
    4: "the third derivative",
}
ZERO, PARTLY = "is taken for zero", "may lack a part"


def collect(fn: Any, inputs: tuple[Any, ...], order: int, saved: bool) -> Parts:
    """Run fn, differentiate it order - 1 times with a graph, and once more to see whether that goes."""
    devices = {x.device for x in pytree.leaves(inputs) if isinstance(x, Tensor) and x.is_cuda}
    applications = gather.Applications()
    with (
        grad_enabled(),
        keep_swapped() as places,
        torch.random.fork_rng(devices=list(devices)),
        torch_internals.record_backward_origins(),
        torch_internals.watching_functions(applications.seen) as applying,
    ):
        call = Call(fn, inputs, None)
        validation.something_to_differentiate_by(call.names, call.point)
        modules = ModuleCalls(fn)
        try:
            with modules.seen(places):
                ran = call.from_leaves()
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            call.clone, modules = True, ModuleCalls(fn)  # it changes its inputs, and says so
            with modules.seen(places):
                ran = call.from_leaves()
        variables, constants, result = ran
        name = repr(fn) if isinstance(fn, FunctionalLoss) else call.name
        names = Names(fn, len(inputs))
        known = {names(name): x for name, x in constants.items()}
        gathering = Gathering(Parts(name, order), modules, known)
        collector = _Collector(gathering, applications)
        collector.inputs(variables, [names(name) for name in call.names], call.num_inputs)
        values = collector.outputs([y for y in result if is_float(y)])
        for k in range(2, order + 2 if order > 1 else 2):
            values = collector.differentiate(values, k, Pass(applying), drawn=k <= order)
        collector.finish(saved)
        return collector.found


class _Collector:
    """The stages of a picture: inputs, outputs, gradients; and sentences on what is wrong in them."""

    def __init__(self, gathering: Gathering, applications: gather.Applications) -> None:
        self._parts, self.found, self._applications = gathering, gathering.found, applications
        self._alive: list[Any] = []  # graphs whose nodes are keys
        self._leaks: dict[Any, tuple[str, bool]] = {}

    def inputs(self, variables: list[Tensor], names: list[str], num_inputs: int) -> None:
        self._variables, self._names = variables, names
        for j, (x, name) in enumerate(zip(variables, names, strict=True)):
            self._parts.leaf(x, "input" if j < num_inputs else "parameter", name)

    def outputs(self, outputs: list[Tensor]) -> list[Tensor]:
        several = len(outputs) > 1
        names = [f"output {i}" if several else "output" for i in range(len(outputs))]
        self._parts.graph(outputs, 1)
        for y, name in zip(outputs, names, strict=True):
            self._parts.end("output", name, y, 1)
        pairs = [(y, n) for y, n in zip(outputs, names, strict=True) if y.requires_grad]
        if not pairs:
            self.found.cuts.append(
                f"{self.found.name}: no output has a graph. Is it a constant, detached, made under "
                "no_grad or outside of torch?"
            )
        self._of = [name for _, name in pairs]
        return [y for y, _ in pairs]

    def differentiate(
        self, values: list[Tensor], k: int, run: Pass, *, drawn: bool
    ) -> list[Tensor]:
        """The gradients of values, with their graph as the k-th part of the picture if drawn."""
        if not values:
            return []
        incoming = [torch.ones_like(y).requires_grad_() for y in values]
        grads = run.gradients(values, self._variables, incoming, create_graph=drawn)
        self._alive += [incoming, grads]
        if run.raised is not None:
            self._tell_of_error(run.raised.node, run.raised.text, k)
        if not drawn or run.raised is not None:
            return []
        for u, name in zip(incoming, self._of, strict=True):
            self._parts.leaf(u, "incoming", f"grad of {name}", k)
        for cut in run.cuts:
            self._tell_of_cut(cut.node, cut.leaf, cut.why, k)
        self._leaks.update({leak.node: (leak.why, leak.whole) for leak in run.leaks})
        name = "grad of {}" if k == 2 else "second derivative by {}"
        names = [name.format(own) for own in self._names]
        pairs = [(g, n) for g, n in zip(grads, names, strict=True) if g is not None]
        self._parts.graph([g for g, _ in pairs], k)
        for g, n in pairs:
            self._parts.end("gradient", n, g, k)
        self._of = [n for g, n in pairs if g.requires_grad]
        return [g for g, _ in pairs if g.requires_grad]

    def finish(self, saved: bool) -> None:
        """What the nodes keep, what that costs, and what is not used."""
        functions = [
            (n, f)
            for n in self._parts.operations
            if (f := torch_internals.custom_function(n)) is not None
        ]
        slots = {n: list(gather.by_custom(n, f, self._applications)) for n, f in functions}
        users = [node for node, function in functions if FunctionNode(node, function).by_user]
        for node in users:
            lost = [slot for slot in slots[node] if slot.lost]
            self._tell_of_leaks(node, lost)
            for slot in lost:
                self._parts.lose(self._parts.key(node), slot)
        if saved:
            for node in self._parts.operations:
                key = self._parts.key(node)
                for slot in slots.get(node, ()):
                    if not (slot.lost and node in users):
                        self._parts.keep(key, slot, slot.name.removeprefix("ctx."))
                for slot in () if node in slots else gather.by_torch(node):
                    self._parts.keep(key, slot, "")
        used = {key for edge in self.found.edges for key in edge}
        for key, part in self.found.parts.items():
            if key not in used and part.kind in ("input", "parameter", "incoming"):
                part.name += " (unused)"

    def _tell_of_cut(self, node: Any, leaf: Tensor, why: str, order: int) -> None:
        name = self._parts.part(node).name
        key = self._parts.leaf(leaf, "cut", f"CUT in {name}.backward", order)
        part = self.found.parts[key]
        part.inside = (*self._parts.part(node).inside, f"made in {name}.backward")
        part.wrong = why or "its gradient has no graph"
        self.found.join(self._parts.key(node), key, "lost")
        self.found.cuts.append(
            f"{name}.backward gives a gradient of shape {part.shape} without a graph"
            f"{f' ({why})' if why else ''}: {DERIVATIVES[order + 1]} through it {ZERO}."
        )

    def _tell_of_leaks(self, node: Any, lost: list[gather.Slot]) -> None:
        """Of a backward whose gradient has a graph, but not all of it."""
        key = self._parts.key(node)
        why, whole = self._leaks.get(node, ("", False))
        name, order = self.found.parts[key].name, self.found.parts[key].order
        effect = f"the second derivative through it {ZERO if whole else PARTLY}"
        if why:
            kind, what = ("cut", "CUT") if whole else ("doubt", "leaves the graph")
            inside = (*self.found.parts[key].inside, f"made in {name}.backward")
            what = f"{what} in {name}.backward"
            end = self.found.add(Part(kind, what, "", order + 1, inside, why))
            self.found.join(key, end, "lost")
            self.found.cuts.append(f"{name}.backward leaves the graph ({why}): {effect}.")
        if lost:
            self.found.cuts.append(
                f"{name} keeps {' and '.join(slot.name for slot in lost)}, made in "
                f"forward and neither input nor output, so without a graph: {effect}."
            )

    def _tell_of_error(self, node: Any, text: str, k: int) -> None:
        name = self.found.name
        if self._parts.knows(node):
            part = self._parts.part(node)
            part.wrong, name = f"raises in {DERIVATIVES[k]}: {text}", part.name
        self.found.cuts.append(f"{name} raises in {DERIVATIVES[k]}: {text}.")
