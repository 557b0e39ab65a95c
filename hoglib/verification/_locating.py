"""Which module, and which operation in it, loses a derivative: by judging each call by itself.

A call of a module is a function of what it was given, of its parameters, and of the gradient that
comes in: f(x, p, u) = <u, module(x, p)>. Where the derivative of the whole loss is wrong, so is that of
one of the calls that it makes, and of one of the calls in that, down to one whose parts are all right;
there the torch calls and custom Functions of its own code are judged in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hoglib import _tree
from hoglib._functional import call_with
from hoglib._leaves import Vector
from hoglib.verification._call import is_float
from hoglib.verification._judging import Judge, Verdict
from hoglib.verification._module_calls import ModuleCall, Operation, operations
from hoglib.verification._routes import Scalar
from hoglib.verification._stops import Stops

Ask = Callable[[Judge], Verdict]  # the derivative in question
MOST = 40  # operations of a module's own code that are judged


class Fault(NamedTuple):
    """Where a derivative is lost. operations: those of the module's own code that lose it."""

    call: ModuleCall
    verdict: Verdict
    operations: list[tuple[Operation, Verdict]]
    own: list[Operation]  # all of its own code
    unknown: list[ModuleCall]  # parts that could not be judged by themselves


class Locator:
    """Finds faults in the tree of calls of a loss.

    whole: runs the loss; begin: puts the state of its modules as at first, before each run.
    """

    def __init__(
        self, root: ModuleCall, whole: Callable[[], Any], begin: Callable[[], None]
    ) -> None:
        self._root, self._whole, self._begin = root, whole, begin
        self._judges: dict[int, Judge | None] = {}
        self._own: dict[int, list[tuple[Operation, Judge]]] = {}

    def faults(self, ask: Ask, verdict: Verdict) -> list[Fault]:
        """Of a derivative that is wrong, or raises, for the whole loss; one for each module."""
        found: dict[str, Fault] = {}
        for fault in self._descend(self._root, ask, verdict, verdict.raised is not None):
            found.setdefault(fault.call.name, fault)
        return list(found.values())

    def _descend(
        self, call: ModuleCall, ask: Ask, verdict: Verdict, raises: bool
    ) -> Iterator[Fault]:
        below: list[Fault] = []
        unknown = []
        for part in call.parts:
            judge = self._judge(part)
            if judge is None:
                unknown.append(part)
                continue
            one = _asked(judge, ask, raises)
            if one.at_fault:
                below += self._descend(part, ask, one, raises)
        own = self._operations(call)
        wrong = [(op, one) for op, judge in own if (one := _asked(judge, ask, raises)).at_fault]
        if wrong or not below:
            yield Fault(call, verdict, wrong, [op for op, _ in own], unknown)
        yield from below

    def _judge(self, call: ModuleCall) -> Judge | None:
        """None where a call cannot be run by itself."""
        if id(call) not in self._judges:
            self._judges[id(call)] = None
            if not (call.inside_transforms or call.module is None):
                with suppress(Exception):  # it does not run by itself
                    self._judges[id(call)] = Judge(*self._of_call(call), Stops())
        return self._judges[id(call)]

    def _of_call(self, call: ModuleCall) -> tuple[Scalar, Vector]:
        """A call of a module as a scalar function of its variables, and their values."""
        module, names = call.module, list(call.parameters)
        assert module is not None

        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            self._begin()
            return call_with(module, dict(zip(names, values, strict=True)), *args, **kwargs)

        values = [call.parameters[name] for name in names]
        return _as_scalar(run, (call.args, call.kwargs), values)

    def _operations(self, call: ModuleCall) -> list[tuple[Operation, Judge]]:
        """Of a module's own code, each kind once."""
        if id(call) not in self._own:
            kinds: dict[Any, Operation] = {}
            with suppress(Exception):  # no better told than by the verdict on the module
                for op in operations(call.module, lambda: self._run(call)):
                    kinds.setdefault((op.name, op.place, _shapes(op)), op)
            judges = [(op, self._of_operation(op)) for op in list(kinds.values())[:MOST]]
            self._own[id(call)] = [(op, judge) for op, judge in judges if judge is not None]
        return self._own[id(call)]

    def _run(self, call: ModuleCall) -> Any:
        """Once more, with the variables that it had."""
        if call.module is None:
            return self._whole()
        self._begin()
        values = {name: p.clone().requires_grad_() for name, p in call.parameters.items()}
        # a module may change in place what it is given, which a leaf does not allow
        args, kwargs = _tree.map_tensors(
            lambda x: x.detach().clone().requires_grad_(x.requires_grad).view_as(x),
            (call.args, call.kwargs),
        )
        return call_with(call.module, values, *args, **kwargs)

    def _of_operation(self, op: Operation) -> Judge | None:
        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            self._begin()
            return op.func(*args, **kwargs)

        try:
            return Judge(*_as_scalar(run, (op.args, op.kwargs), []), Stops())
        except Exception:  # it does not run by itself
            return None


def _asked(judge: Judge, ask: Ask, raises: bool) -> Verdict:
    if not judge.leaves:
        return Verdict(False)
    judge.differences = not raises
    return ask(judge)


def _shapes(op: Operation) -> tuple[Any, ...]:
    leaves = _tree.leaves((op.args, op.kwargs))
    return tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor))


def _as_scalar(
    run: Callable[[Any, Vector], Any], inputs: Any, parameters: Vector
) -> tuple[Scalar, Vector]:
    """<u, run(inputs, parameters)> as a function of the inputs that require grad, parameters and u.

    Complex variables are given by their real and imaginary parts.
    """
    leaves, structure = _tree.flatten(inputs)
    slots = [i for i, x in enumerate(leaves) if is_float(x) and x.requires_grad]
    variables = [leaves[i].detach() for i in slots] + [p.detach() for p in parameters]
    complex_ones = [x.is_complex() for x in variables]
    variables = [torch.view_as_real(x) if x.is_complex() else x for x in variables]
    count = len(variables)

    def outputs(*values: Tensor) -> list[Any]:
        given = [
            torch.view_as_complex(x) if parts else x
            for x, parts in zip(values, complex_ones, strict=True)
        ]
        filled_in = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        for i, x in zip(slots, given, strict=False):
            filled_in[i] = x.clone()  # it may be changed in place
        found = run(_tree.unflatten(filled_in, structure), given[len(slots) :])
        return _tensors(found)

    first = outputs(*(x.clone().requires_grad_() for x in variables))
    which = [i for i, y in enumerate(first) if y.requires_grad and y.numel()]
    random = torch.Generator().manual_seed(1)
    u = [
        torch.randn(y.shape, dtype=torch.float64, generator=random).to(y.device, real_dtype(y))
        for y in (first[i] for i in which)
    ]
    if not u:
        return (lambda *values: torch.zeros(())), []

    def f(*values: Tensor) -> Tensor:
        found = outputs(*values[:count])
        terms = []
        for i, weights in zip(which, values[count:], strict=True):
            y = found[i]
            # of a complex output both parts count
            terms += [((y.real + 0.7 * y.imag if y.is_complex() else y) * weights).sum()]
        return _tree.sum_scalars(terms)

    return f, [*variables, *u]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an output, also of one in an object that torch does not take apart."""
    found = []
    for leaf in _tree.leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += [x for x in _tree.leaves(dict(vars(leaf))) if isinstance(x, Tensor)]
    return [y for y in found if is_float(y)]


def real_dtype(y: Tensor) -> torch.dtype:
    return y.dtype.to_real() if y.is_complex() else y.dtype
