"""Propagates Taylor coefficients through a function while it runs.

    with Propagation(algebra, record=True) as run:
        run.seed(x, coefficients)
        y = func(x)
    run.coefficients(y)

A TorchDispatchMode sees each operation of torch below autograd, where composite functions have become
plain operations. The function runs once, unchanged, and its control flow may depend on values.

The coefficients of an operation are computed when the next operation arrives: only then has autograd
attached the output to its graph, so that the coefficients can be differentiated.

Constants of autograd are constant here: results under no_grad, and of `.detach()`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.weak import WeakTensorKeyDictionary

from hoglib._core.runtime.logger import LOGGER
from hoglib._core.torch_api import function_watch, pytree, torch_internals
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_modes import LayerMode, layer_mode, plain_operations
from hoglib.taylor.kinks import Kink, Kinks, kink_here
from hoglib.taylor.rules import composite_of, is_composite, is_constant, names_of, rule_of
from hoglib.taylor.series import Algebra, Call, NoRule, Parts, Rule, align, to_dtype

aten = torch.ops.aten


# The last operation, before its coefficients are computed: its rule; the call; the tensor that it
# changed in place, or None; its name and line, if first_infinite looks for them.
_Pending = tuple[Rule, Call, Tensor | None, Kink | None]


@final
class Propagation(torch_internals.TorchDispatchMode):
    """Propagates the coefficients of an algebra through the operations that run inside.

    record: compute coefficients with autograd on, so that they can be differentiated.
    side: at a kink, take the derivatives before (-1) or after it (1) along the path; 0: torch's rules.
    first_infinite: look for the first operation with infinite or NaN coefficients.
    """

    def __init__(
        self, algebra: Algebra, record: bool, *, side: int = 0, first_infinite: bool = False
    ) -> None:
        super().__init__()
        self._algebra, self._record, self._side = algebra, record, side
        self._first_infinite = first_infinite
        self.kinks = Kinks()  # the kinks that were passed
        self._series = WeakTensorKeyDictionary()  # tensor -> its coefficients; constants are absent
        self._pending: _Pending | None = None
        self._inside_composite = 0  # depth of operations that are being decomposed
        self._changed_in_place = False  # a tensor with coefficients was, so its views must be found
        self._layers: LayerMode | None = None  # records the layers of Kronecker factors
        self._outside: Any = None  # context: below this mode, with autograd on or off
        self._backward = torch_internals.running_backward()  # the backward pass that encloses us
        self._stack = ExitStack()  # the contexts entered with the mode, until close()

    def __enter__(self) -> "Propagation":
        # entered again for each operation that is decomposed
        if self._outside is None:
            self._outside = torch_internals.RecordingBelow()
            self._layers = layer_mode()
            if self._layers is not None:
                self._layers.propagates = True
            self._stack.enter_context(plain_operations())
            self._stack.enter_context(function_watch.watching_functions(self._see_function))
        super().__enter__()
        return self

    def seed(self, x: Tensor, parts: Parts) -> None:
        """Set the coefficients of an input."""
        if self._layers is not None:
            # a direction that all points share would be one row of a layer, not one of each point
            parts = [None if part is None else part.contiguous() for part in parts]
        self._series[x] = parts

    def coefficients(self, y: Tensor) -> Parts | None:
        """The coefficients of y, expanded to its shape; None if y is constant."""
        self._flush()
        parts = self._parts(y)
        if parts is None:
            return None
        return self._algebra.of_each(lambda p, lead: p.expand(p.shape[:lead] + y.shape), parts)

    def close(self) -> None:
        """Frees the coefficients of the intermediate tensors."""
        self._series.clear()
        self._pending = None
        self._stack.close()

    def __torch_dispatch__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        # no flush: such an operation may come before autograd has attached the last output
        if _reads_no_values(func):
            return func(*args, **kwargs)
        self._flush()
        # results under no_grad are constants
        if not (self._inside_composite or torch.is_grad_enabled()):
            return func(*args, **kwargs)
        if torch_internals.running_backward() != self._backward:
            # autograd's saved tensors are other objects than the keys of _series, so that their
            # coefficients would be lost: refuse every operation of a backward pass
            raise NoRule("a derivative that the function takes itself (torch.autograd.grad)")
        if not any(self._parts(x) is not None for x in _tensor_arguments(args, kwargs)):
            out = func(*args, **kwargs)
            self.kinks.record_derived_mask(args, out)
            return out
        if func._schema.is_mutable:
            return self._run_in_place(func, args, kwargs)
        out = func(*args, **kwargs)
        if is_constant(func) or not any(map(pytree.is_float, pytree.tensors(out))):
            self.kinks.record_mask(names_of(func)[1], out)
            return out
        rule = None if is_composite(func, args) else rule_of(func)
        rule = rule or self._taken_apart(func, args, kwargs)
        self._defer(rule, func, args, kwargs, out, None)
        return out

    def _see_function(self, function: type[Function], args: tuple[Any, ...]) -> None:
        with function_watch.as_around():
            self._flush()
        if function is torch_internals.SAVES_INPUTS:
            return  # a checkpoint's Function of torch 2.11; its result has no elements
        if function_watch.records_gradients() and any(self._parts(x) is not None for x in args):
            raise NoRule(f"the custom Function {function.__name__}")

    def _defer(self, rule: Rule, func: Any, args: Any, kwargs: Any, out: Any, written: Any) -> None:
        names = names_of(func)
        if torch.Tag.pointwise in func.tags and isinstance(out, Tensor):
            # give operands the output's rank, or the leading dimension of directions would broadcast
            args = [self._of_rank(x, out.dim()) for x in args]
        call = Call(names[1], self._algebra, self._parts, args, kwargs, out, self._side)
        if self._algebra.order > 1:
            self.kinks.record(names, call, self._inside_composite > 0)
        looked = self._first_infinite and not self._inside_composite
        # computed at the next operation, when autograd has attached the output to its graph
        self._pending = rule, call, written, kink_here(names[1]) if looked else None

    def _of_rank(self, x: object, rank: int) -> Any:
        """An operand x that broadcasts, as a view of the given rank with coefficients of that rank.

        Torch aligns dimensions from the right: a coefficient [R, d] of x [d] would broadcast with an
        output [n, d] as if R were n.
        """
        if not isinstance(x, Tensor) or x.dim() >= rank or (parts := self._parts(x)) is None:
            return x
        with self._outside(self._record):
            view = x[(None,) * (rank - x.dim())]
            self._series[view] = self._algebra.of_each(partial(align, rank=rank), parts)
        return view

    def _flush(self) -> None:
        """Compute the coefficients of the pending operation."""
        if self._pending is None:
            return
        (rule, call, written, where), self._pending = self._pending, None
        with self._outside(self._record, self._layers):
            found = rule(call)
            several = isinstance(call.out, tuple | list)
            outputs = call.out if several else [call.out]
            given = found if several and found is not None else [found] * len(outputs)
            for out, parts in zip(outputs, given, strict=False):
                if not pytree.is_float(out):
                    continue
                fitted = partial(_fit_to_output, out)
                known = self._algebra.zeros() if parts is None else parts
                self._series[out] = self._algebra.of_each(fitted, known)
            if where is not None:
                self.kinks.check_finite(where, [self._parts(y) for y in outputs])
            if written is not None:
                self._write_through(written)

    def _parts(self, x: object) -> Parts | None:
        """The coefficients of x, or of its base if x is a view that has none; None if constant."""
        if not isinstance(x, Tensor):
            return None
        found: Parts | None = self._series.get(x)
        if found is None and self._changed_in_place and x._is_view():
            base = self._series.get(x._base)
            return None if base is None else self._viewed(base, x)
        return found

    # ---- operations without a rule

    def _taken_apart(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Rule:
        """A rule for an operation without one: run its decomposition inside the mode.

        The rule returns the coefficients that the decomposition's result got.
        """
        composite, refused = composite_of(func), NoRule(f"torch.ops.{func}")
        if composite is None:
            raise refused
        self._inside_composite += 1
        try:
            with self._outside(self._record, self._layers), self:
                inner = composite(*args, **kwargs)
                self._flush()
        except (NoRule, NotImplementedError, TypeError, AttributeError) as error:
            LOGGER.debug("torch.ops.%s was not taken apart: %s", func, error)
            raise refused from error
        finally:
            self._inside_composite -= 1
            self._pending = None
        if inner is NotImplemented:  # torch's decomposition does not take these arguments
            raise refused
        several = isinstance(inner, tuple | list)
        found = list(map(self._parts, inner)) if several else self._parts(inner)
        found = self._algebra.zeros() if found is None else found
        return lambda call: found

    # ---- in-place operations

    def _run_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = args[0] if args else None
        writes = [i for i, a in enumerate(func._schema.arguments) if a.is_write]
        if writes != [0] or not isinstance(target, Tensor) or len(func._schema.returns) != 1:
            raise NoRule(f"torch.ops.{func}, which writes into its arguments")
        packet = names_of(func)[1]
        if packet in ("copy", "fill", "zero"):
            # the coefficients of the source, args[1]; "zero" has none
            rule: Rule | None = lambda call: call.parts((*call.args, None)[1])  # noqa: E731
        else:
            functional = _out_of_place(func, packet)
            if functional is None:
                raise NoRule(f"torch.ops.{func}, an in-place operation")
            rule = None if is_composite(functional, args) else rule_of(functional)
        with self._outside(self._record):
            # rules read the value before the write
            old = target.clone()
        parts = self._parts(target)
        if parts is not None:
            self._series[old] = parts
        rule = rule or self._taken_apart(functional, (old, *args[1:]), kwargs)
        out = func(*args, **kwargs)
        self._defer(rule, func, (old, *args[1:]), kwargs, out, target)
        return out

    def _write_through(self, target: Tensor) -> None:
        """After a write to target, update the coefficients of its base and the base's other views."""
        base = target._base if target._is_view() else target
        assert base is not None
        if base is not target:
            # as_strided of a coefficient finds the view, if the base is contiguous
            if not base.is_contiguous():
                raise NoRule("an in-place operation on a view of a tensor that is not contiguous")
            known = self._parts(base) or self._algebra.zeros()
            rows = zip(known, self._series[target], self._algebra.leads, strict=True)
            self._series[base] = [self._scattered(*row, base, target) for row in rows]
        for view in list(self._series.keys()):
            if view is not target and view._is_view() and view._base is base:
                self._series[view] = self._viewed(self._series[base], view)
        self._changed_in_place = True

    def _scattered(
        self, p: Tensor | None, q: Tensor | None, lead: bool, base: Tensor, view: Tensor
    ) -> Tensor | None:
        """The coefficient p of base, with the coefficient q of view written into the view's place."""
        if p is None and q is None:
            return None
        size = (p if p is not None else q).shape[: int(lead)]  # type: ignore[union-attr]
        p = base.new_zeros(size + base.shape) if p is None else p
        q = view.new_zeros(size + view.shape) if q is None else q.expand(size + view.shape)
        p = p.expand(size + base.shape).clone(memory_format=torch.contiguous_format)
        return torch.as_strided_scatter(p, q, *_geometry(size, base, view))

    def _viewed(self, parts: Parts, view: Tensor) -> Parts:
        """The coefficients of a view, from the coefficients of its base."""
        base = view._base
        assert base is not None
        if not base.is_contiguous():
            raise NoRule("a view of a tensor that was changed in place and is not contiguous")

        def viewed(part: Tensor, lead: int) -> Tensor:
            size = part.shape[:lead]
            part = part.expand(size + base.shape).clone(memory_format=torch.contiguous_format)
            return part.as_strided(*_geometry(size, base, view))

        return self._algebra.of_each(viewed, parts)


def _fit_to_output(out: Tensor, part: Tensor, lead: int) -> Tensor:
    """A coefficient, converted to the output's dtype and expanded to its shape."""
    part = align(part, lead, out.dim())
    if part.dtype != out.dtype:
        part = to_dtype(part, out.dtype)
    full = part.shape[:lead] + out.shape
    return part if part.shape == full else part.expand(full)


@cache
def _reads_no_values(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return func.namespace == "prim" or name == "detach" or name.startswith(("sym_", "is_"))


@cache
def _out_of_place(func: Any, packet: str) -> Any:
    """The out-of-place overload of an in-place operation, or None.

    Found by its argument types, since overloads may have other names (ldexp_.default, ldexp.Tensor).
    """
    found = getattr(aten, packet, None)
    arguments = [(str(a.type), a.kwarg_only) for a in func._schema.arguments]
    for overload in () if found is None else map(partial(getattr, found), found.overloads()):
        if [(str(a.type), a.kwarg_only) for a in overload._schema.arguments] == arguments:
            return overload
    return None


def _geometry(size: torch.Size, base: Tensor, view: Tensor) -> Any:
    """Size, strides and offset of view in a contiguous tensor [*size, *base.shape]."""
    strides = (base.numel(),) * len(size) + view.stride()
    return size + view.shape, strides, view.storage_offset() - base.storage_offset()


def _tensor_arguments(args: Sequence[Any], kwargs: Any) -> Any:
    """The tensors among the arguments, also in lists."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from (y for y in x if isinstance(y, Tensor))
