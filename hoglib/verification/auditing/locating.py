"""Which module, and which operation in it, loses a derivative: by judging each call by itself.

A call of a module is a function of what it was given, of its parameters, and of the gradient that
comes in: f(x, p, u) = <u, module(x, p)>. Where the derivative of the whole loss is wrong, so is that of
one of the calls that it makes, and of one of the calls in that, down to one whose parts are all right;
there the torch calls and custom Functions of its own code are judged in the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib import _tree
from hoglib._functional import call_with
from hoglib._leaves import Vector
from hoglib.verification._call import is_float
from hoglib.verification.auditing.judging import Judge, Verdict
from hoglib.verification.auditing.module_calls import ModuleCall, Operation, operations
from hoglib.verification.auditing.problem import padding_rows
from hoglib.verification.auditing.routes import Scalar
from hoglib.verification.auditing.stops import Stops

Ask = Callable[[Judge], Verdict]  # the derivative in question
MOST = 40  # operations of a module's own code that are judged


class Fault(NamedTuple):
    """Where a derivative is lost. operations: those of the module's own code that lose it."""

    call: ModuleCall
    verdict: Verdict
    operations: list[tuple[Operation, Verdict]]
    own: list[Operation]  # all of its own code
    unknown: list[ModuleCall]  # parts that could not be judged by themselves

    @property
    def module(self) -> nn.Module | None:
        """The one whose code makes the operations; a method of it may be called by another one."""
        owners = {id(op.owner): op.owner for op, _ in self.operations}
        (owner,) = owners.values() if len(owners) == 1 else (None,)
        return owner or self.call.module


class Locator:
    """Finds faults in the tree of calls of a loss.

    whole: runs the loss; around: what a part of it runs in, so that it is the same in every run.
    """

    def __init__(
        self,
        root: ModuleCall,
        whole: Callable[[], Any],
        around: Callable[[nn.Module | None], AbstractContextManager[None]],
    ) -> None:
        self._root, self._whole, self._around = root, whole, around
        self._judges: dict[int, Judge | None] = {}
        self._constant: set[int] = set()  # calls without variables
        self._own: dict[int, list[tuple[Operation, Judge | None]]] = {}

    def faults(self, ask: Ask, verdict: Verdict) -> Iterator[Fault]:
        """Of a derivative that is wrong, or raises, for the whole loss; one for each module."""
        told: set[int] = set()
        for fault in self._descend(self._root, ask, verdict, verdict.raised is not None):
            if id(fault.module) not in told:
                told.add(id(fault.module))
                yield fault

    def _descend(
        self, call: ModuleCall, ask: Ask, verdict: Verdict, raises: bool
    ) -> Iterator[Fault]:
        below, unknown = False, []
        for part in call.parts:
            judge = self._judge(part)
            if judge is None:
                if id(part) not in self._constant:
                    unknown.append(part)
                continue
            one = _asked(judge, ask, raises)
            if one.at_fault:
                below = True
                yield from self._descend(part, ask, one, raises)
        own = self._operations(call)
        judged = [(op, _asked(judge, ask, raises)) for op, judge in own if judge is not None]
        wrong = [(op, one) for op, one in judged if one.at_fault]
        if wrong or not below:
            yield Fault(call, verdict, wrong, [op for op, _ in own], unknown)

    def _judge(self, call: ModuleCall) -> Judge | None:
        """None where a call cannot be run by itself, or has no variables."""
        if id(call) not in self._judges:
            self._judges[id(call)] = None
            if call.module is not None and not call.inside_transforms:
                with suppress(Exception):  # it does not run by itself
                    f, leaves, first = self._of_call(call)
                    if not leaves:
                        self._constant.add(id(call))
                        return None
                    padded = {name: row for name, _, row in padding_rows(call.module)}
                    frozen = {
                        first + i: padded[name]
                        for i, name in enumerate(call.parameters)
                        if name in padded
                    }
                    self._judges[id(call)] = Judge(f, leaves, Stops(), frozen=frozen)
        return self._judges[id(call)]

    def _of_call(self, call: ModuleCall) -> tuple[Scalar, Vector, int]:
        """A call of a module as a scalar function of its variables, their values, and the place of the
        first parameter among them."""
        module, names = call.module, list(call.parameters)
        assert module is not None

        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            with self._around(module):
                return call_with(module, dict(zip(names, values, strict=True)), *args, **kwargs)

        values = [call.parameters[name] for name in names]
        return _as_scalar(run, (call.args, call.kwargs), values)

    def _operations(self, call: ModuleCall) -> list[tuple[Operation, Judge | None]]:
        """Of a module's own code, each kind once."""
        if id(call) not in self._own:
            kinds: dict[Any, Operation] = {}
            with suppress(Exception):  # no better told than by the verdict on the module
                for op in operations(call.module, lambda: self._run(call)):
                    kinds.setdefault((op.name, op.place, _shapes(op)), op)
            self._own[id(call)] = [
                (op, self._of_operation(op, call.module)) for op in list(kinds.values())[:MOST]
            ]
        return self._own[id(call)]

    def _run(self, call: ModuleCall) -> Any:
        """Once more, with the variables that it had."""
        if call.module is None:
            return self._whole()
        values = {name: p.clone().requires_grad_() for name, p in call.parameters.items()}
        # a module may change in place what it is given, which a leaf does not allow
        args, kwargs = _tree.map_tensors(
            lambda x: x.detach().clone().requires_grad_(x.requires_grad).view_as(x),
            (call.args, call.kwargs),
        )
        with self._around(call.module):
            return call_with(call.module, values, *args, **kwargs)

    def _of_operation(self, op: Operation, module: nn.Module | None) -> Judge | None:
        """None where it does not run by itself, or has no variables."""

        def run(inputs: Any, values: Vector) -> Any:
            args, kwargs = inputs
            with self._around(module):
                return op.func(*args, **kwargs)

        try:
            f, leaves, _ = _as_scalar(run, (op.args, op.kwargs), [])
            return Judge(f, leaves, Stops()) if leaves else None
        except Exception:  # it does not run by itself
            return None


def _asked(judge: Judge, ask: Ask, raises: bool) -> Verdict:
    judge.compares = not raises
    return ask(judge)


def _shapes(op: Operation) -> tuple[Any, ...]:
    leaves = _tree.leaves((op.args, op.kwargs))
    return tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor))


def _as_scalar(
    run: Callable[[Any, Vector], Any], inputs: Any, parameters: Vector
) -> tuple[Scalar, Vector, int]:
    """<u, run(inputs, parameters)> as a function of the inputs that require grad, parameters and u; the
    values of these, and the place of the first parameter.

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
    random = torch.Generator("cpu").manual_seed(1)
    u = [
        torch.randn(y.shape, dtype=torch.float64, device="cpu", generator=random).to(
            y.device, real_dtype(y)
        )
        for y in (first[i] for i in which)
    ]
    if not u:
        return (lambda *values: torch.zeros(())), [], 0

    def f(*values: Tensor) -> Tensor:
        found = outputs(*values[:count])
        terms = []
        for i, weights in zip(which, values[count:], strict=True):
            y = found[i]
            # of a complex output both parts count
            terms += [((y.real + 0.7 * y.imag if y.is_complex() else y) * weights).sum()]
        return _tree.sum_scalars(terms)

    return f, [*variables, *u], len(slots)


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
