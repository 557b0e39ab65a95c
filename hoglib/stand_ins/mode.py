"""The TorchFunctionMode that replaces torch calls without a right second derivative by stand-ins.

    with hoglib.second_order():
        loss = criterion(model(x), y)          # an unmodified module
        g = torch.autograd.grad(loss, model.parameters(), create_graph=True)

The mode intercepts every torch call of its thread. For a function in `STAND_INS` it calls a function of
hoglib with an equal signature; an argument of a Tensor subclass with its own `__torch_function__` goes
first. Other calls run unchanged. The mode does not see calls below Python: in torch's kernels, and in
scripted or compiled code.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from hoglib._core.messages import validation
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.runtime.ambient import AMBIENT, StandIns, inside
from hoglib._core.runtime.provided import provided
from hoglib._core.runtime.source_location import running_module, torch_call_line
from hoglib._core.torch_api import function_watch, pytree, torch_internals, torch_library
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.torch_forward_mode import follow_grad_mode
from hoglib._core.torch_api.torch_modes import StandInMode, copy_without_override_check
from hoglib._core.torch_api.torch_private import is_missing, require
from hoglib.errors import UnsupportedError
from hoglib.ops._stand_in import StandIn
from hoglib.stand_ins.scripts import program
from hoglib.stand_ins.table import HIGHER_ORDER, STAND_INS, by_operator, requires_grad

__all__ = ["active", "second_order", "stand_in_table"]

ACTIONS = ("warn", "raise", "ignore")
_OF_TENSOR = getattr(Tensor.__torch_function__, "__func__", None)
# True if this torch hides set_grad_enabled from modes; calls in forward mode are then refused.
_UNSEEN = is_missing(torch_internals.set_grad_enabled)


@contextmanager
def second_order(*, on_wrong: str | None = None) -> Iterator[None]:
    r"""Inside, stand-ins replace torch calls with a missing or wrong second derivative.

        torch call  ->  a function with equal value and first derivative, to rounding,
                        and the right second derivative

    `hoglib env` lists the calls. `hoglib.hvp`, `hoglib.hessian` and `hoglib.MAML` enter this context
    themselves, unless they are called with `stand_ins=False`.

    It is also a decorator. It works inside and outside torch.func transforms, under autocast and under
    make_fx. Entering it inside itself changes nothing. It holds for one thread: other threads enter it
    themselves. A checkpoint recomputes with stand-ins in a later backward, too, unless it is inside
    another checkpoint.

    Args:
        on_wrong: The reaction of hoglib's functions, and of the user's own derivatives inside, to a
            custom Function of the user with a wrong first or second derivative: "warn", once for each
            Function and entry point; "raise" :class:`~hoglib.errors.VerificationError`; or "ignore",
            which examines nothing. The outermost context with this argument decides, also for calls
            with ``stand_ins=False``. Default: as outside, where it is "warn". A Function that was
            applied before the context was entered is not examined; a message names it if its gradient
            is taken with ``create_graph=True``.
    Returns:
        A context manager without a value.
    Raises:
        UnsupportedError: inside, at a call on a tensor that requires grad, if the call has neither a
            second derivative nor a stand-in.
        VerificationError: for a wrong Function in a derivative of the user's own, with "raise".
    Example:
        >>> x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
        >>> with hog.second_order():
        ...     distance = torch.cdist(x, x)[0, 1]      # no double backward in torch
        ...     (g,) = torch.autograd.grad(distance, x, create_graph=True)
        ...     (h,) = torch.autograd.grad(g[0, 0], x)
        >>> h[0]
        tensor([ 0.1280, -0.0960])
    """
    examination = AMBIENT.examination
    if on_wrong is not None and examination.on_wrong is None:
        on_wrong = validation.choice("on_wrong", on_wrong, ACTIONS)
        examination = examination._replace(on_wrong=on_wrong)
    # inside second_order() or an entry point, custom Functions are examined already
    outermost = AMBIENT.stand_ins is None
    examined = provided("examine_users_derivatives")() if outermost else nullcontext()
    with inside(examination=examination), torch_internals.eagerly(), examined, _StandIns(True):
        yield


@final
class _StandIns:
    """A context that enters the mode, if wanted and not active; frozen=True freezes running statistics.

    A class, not a generator: each evaluation of a model enters it, and contextmanager takes several
    times as long.
    """

    def __init__(self, wanted: bool, frozen: bool = False) -> None:
        self._wanted, self._frozen = wanted, frozen
        self._entered: StandIns | None = None  # the mode that this object has entered

    def __enter__(self) -> None:
        if self._wanted and AMBIENT.stand_ins is None:
            # runs scripted code in Python (`run_script`); first, because this may raise
            self._scripts = torch_internals.watching_scripts()
            self._scripts.__enter__()
            mode = _SecondOrder()
            torch_internals.enter_beneath(mode)
            self._entered = AMBIENT.stand_ins = mode
        self._were_frozen = AMBIENT.statistics_frozen
        AMBIENT.statistics_frozen = self._were_frozen or self._frozen

    def __exit__(self, *raised: Any) -> None:
        AMBIENT.statistics_frozen = self._were_frozen
        if self._entered is not None:
            mode, self._entered = self._entered, None
            torch_internals.leave_beneath(mode)
            self._scripts.__exit__(*raised)
            AMBIENT.stand_ins = None


# stand_ins_if(wanted): stand-ins, and no updates of running statistics, for an evaluation of a model
# for a derivative only.
stand_ins_if: Callable[[bool], AbstractContextManager[None]] = functools.partial(
    _StandIns, frozen=True
)


def active() -> bool:
    """Whether the caller runs inside :func:`second_order`.

    Returns:
        True inside the context, in the thread that entered it.
    Example:
        >>> with hog.second_order():
        ...     hog.stand_ins.active()
        True
        >>> hog.stand_ins.active()
        False
    """
    return AMBIENT.stand_ins is not None


def stand_in_table() -> tuple[StandIn, ...]:
    """The torch operations replaced or refused on the installed version of torch.

    Returns:
        One :class:`StandIn` for each operation, as `hoglib env` prints them.
    Example:
        >>> row = hog.stand_ins.stand_in_table()[0]
        >>> row.name, row.modes
        ('scaled_dot_product_attention', ('rr', 'fr', 'rf', 'ff'))
    """
    return tuple(row._replace(modes=row.needed) for row in STAND_INS if row.needed)


def stand_in_of(func: object) -> StandIn | None:
    """The row of the table for a torch callable, or None."""
    return _table_rows().get(func, (None, None))[0]


class _SecondOrder(StandInMode):
    def __init__(self) -> None:
        super().__init__()
        self._replacements = _replacements()  # torch callable -> its stand-in
        # id of a script -> (the script, kept alive for its id; its program, see `scripts.program`)
        self._scripts: dict[int, Any] = {}

    def run_script(self, script: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run scripted code in Python, so that this mode sees its torch calls and can replace them."""
        if id(script) not in self._scripts:
            run = program(script)
            if run is None:
                return call(script, *args, **kwargs)
            self._scripts[id(script)] = script, run
        run = self._scripts[id(script)][1]
        if not isinstance(run, str):
            return run(*args, **kwargs)
        # `run` is a reason: the script does not run in Python. Names of the operators in its graph,
        # and of torch functions that are not inlined:
        called = dict.fromkeys(
            re.findall(r"(?:\baten::|\[name=\")(\w+)", str(script.inlined_graph))
        )
        rows = [(name, stand_in_of(getattr(torch.ops.aten, name, None))) for name in called]
        wrong = [name for name, row in rows if row is not None and row.device == "cpu"]
        if not wrong and not torch_internals.is_followed():
            return call(script, *args, **kwargs)
        what = f"calls of {', '.join(wrong)}" if wrong else "derivatives"
        raise UnsupportedError(
            f"{script.name}{in_module()}: expected {what} in Python, got scripted code, where they are "
            f"missing or wrong, and which does not run in Python because of its {run}. Use the code "
            "that was scripted."
        )

    def _by_types(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call `__torch_function__` of the arguments' types, in torch's order, with this mode on."""
        with self:
            for kind in filter(_overrides_calls, types):
                result = kind.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*args, **kwargs)  # raises torch's error

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        replacement = self._replacements.get(func)
        # torch calls a mode before the types' `__torch_function__`. Here the types go first: their own
        # calls with plain tensors reach this mode.
        if types and any(map(_overrides_calls, types)) and torch_internals.types_handle_calls():
            return self._by_types(func, types, args, kwargs)
        # with out= there is no derivative, so nothing to replace
        if replacement is not None and kwargs.get("out") is None:
            _recompute_inside()
            return replacement(*args, **{name: x for name, x in kwargs.items() if name != "out"})
        if type(func) in torch_library.OPERATORS:
            return run_operator(func, args, kwargs)
        if type(func) is FunctionType:
            copy = without_override_check(func)
            if copy is not None:
                with self:
                    result = copy(*args, **kwargs)
                    if func in _RUNS_BACKWARD:
                        _report_by_hand(func, args, kwargs)
                # Without create_graph the gradient is a constant, also for forward mode: drop its
                # tangent. Not under no_grad: there torch.func.vjp passes create_graph=False, too.
                first = func is torch.autograd.grad and torch_internals.forward_mode_active()
                if first and torch.is_grad_enabled() and not _creates_graph(func, args, kwargs):
                    result = pytree.map_tensors(Tensor.detach, result)
                return result
        if func in HIGHER_ORDER:
            # torch disables a mode in its handler; `with self` re-enables it for true_fn, body_fn, ...
            with self:
                return HIGHER_ORDER[func](*args, **kwargs)
        if func is Tensor.register_hook:
            return register_hook(*args, **kwargs)
        result = func(*args, **kwargs)
        if (
            func is torch_internals.set_grad_enabled or _UNSEEN
        ) and torch_internals.forward_mode_active():
            require(torch_internals.set_grad_enabled)
            # under no_grad forward mode must not propagate tangents either
            follow_grad_mode(args[0])
        return result


def register_hook(*args: Any, **kwargs: Any) -> Any:
    """`Tensor.register_hook`; if custom Functions are examined, so is the hook."""
    if AMBIENT.examination.examiner is None:
        return Tensor.register_hook(*args, **kwargs)
    hook, line = (args[1:] or [*kwargs.values()])[0], torch_call_line()
    # hoglib's own hooks may have a user's line if a user's mode lies in between
    home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    if line is not None and not home.startswith("hoglib."):
        hook = AMBIENT.examination.examiner.watched_hook(hook, line)
    return Tensor.register_hook(args[0], hook)


def _overrides_calls(kind: Any) -> bool:
    """Whether a type has its own `__torch_function__`, not torch.Tensor's and not disabled."""
    own = getattr(kind.__torch_function__, "__func__", None)  # None if disabled: a function in C++
    return own is not None and own is not _OF_TENSOR


def run_operator(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator of torch.library. In forward mode, or with inputs that require grad, apply its
    rules as a custom Function: forward mode and torch.func would treat the result as a constant."""
    records = torch.is_grad_enabled() and not torch_internals.tracing()
    graphed = records and any(map(_has_graph, pytree.leaves((args, kwargs))))
    if torch_internals.forward_mode_active() or graphed:
        call = torch_library.call_as_function(operator, args, kwargs, _functions_of)
        if call is not None:
            function, args = call
            return torch_library.result_of(function, function.apply(*args))
    result = operator(*args, **kwargs)
    if torch_internals.forward_mode_active() and torch_library.is_users(operator):
        _check_tangents(operator, args, kwargs, result)
    return result


def _check_tangents(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Raises for a user's operator that drops tangents, such as a C++ Function without a jvp."""
    moved = any(map(torch_internals.has_tangent, pytree.tensors((args, kwargs))))
    dropped = moved and not any(map(torch_internals.has_tangent, pytree.tensors(result)))
    if dropped and any(map(_has_graph, pytree.leaves(_run_on_copies(operator, args, kwargs)))):
        raise UnsupportedError(
            f"{operator}: expected an operator with tangents in forward mode, got one with a backward "
            "alone. Use the reverse mode."
        )


def _has_graph(x: object) -> bool:
    """Whether a tensor, or the tensor that it wraps at a level of torch.func, requires grad."""
    if not isinstance(x, Tensor):
        return False
    inner = torch_internals.beneath(x)
    return x.requires_grad or (inner is not x and _has_graph(inner))


def _functions_of(operator: Any, args: Any, kwargs: Any) -> list[type[Function]]:
    """The custom Functions that an operator applies, recorded in a run on copies of the arguments."""
    found: list[type[Function]] = []
    with function_watch.watching_functions(lambda function, _: found.append(function)):
        _run_on_copies(operator, args, kwargs)
    return found


def _run_on_copies(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    def fresh(x: Tensor) -> Tensor:
        return torch_internals.first_sample(x).detach().clone().requires_grad_(pytree.is_float(x))

    # without_transforms: inside transforms Functions and graphs are hidden
    with torch_internals.without_transforms(), preserve_random_state(), torch.enable_grad():
        copies = pytree.map_tensors(fresh, (args, kwargs))
        return operator(*copies[0], **copies[1])


@functools.cache
def _replacements() -> dict[Any, Callable[..., Any]]:
    """The stand-in for each torch callable."""
    # a mode receives `x.data` as a call of the descriptor's __get__ or __set__
    own = {original: op for original, (_, op) in _table_rows().items()}
    data: Any = Tensor.data
    asked: Any = Tensor.requires_grad
    return own | {
        data.__get__: torch_internals.get_data,
        data.__set__: torch_internals.set_data,
        asked.__get__: requires_grad,
    }


@functools.cache
def _table_rows() -> dict[Any, tuple[StandIn, Callable[..., Any]]]:
    """torch callable -> (its row, its stand-in)."""
    table = {old: (row, op) for row in stand_in_table() for old, op in row.replaces.items()}
    # a row of the table goes before a row derived from an operator
    table = by_operator(table) | table
    for row in stand_in_table():
        for original in row.refuses:
            for each in (original, *dict(torch_library.callables(original.__name__))):
                table[each] = row, functools.partial(_refuse, each, row)
    return table


def _refuse(original: Callable[..., Any], stand_in: StandIn, *args: Any, **kwargs: Any) -> Any:
    """Raises if a gradient is needed; otherwise runs the original."""
    tensors = pytree.tensors((args, kwargs))
    if not torch.is_grad_enabled() or not any(
        _has_graph(x) or torch_internals.has_tangent(x) for x in tensors
    ):
        return original(*args, **kwargs)
    # With first_order, the backward of a user's Function is differentiated by its incoming gradient
    # alone: calls in it need no second derivative.
    running = torch_internals.running_function() if AMBIENT.examination.first_order else None
    if running is not None and not running.__module__.startswith(("hoglib.", "torch.")):
        return original(*args, **kwargs)
    raise UnsupportedError(
        f"{stand_in.name}{in_module()}: expected an operation with a second derivative, got one "
        f"without: {stand_in.lacks}. {stand_in.instead}"
    )


def in_module() -> str:
    """For messages: " in Linear", the class of the innermost module in its forward, or ""."""
    module = running_module("forward")
    return "" if module is None else f" in {type(module).__name__}"


_RUNS_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def _report_by_hand(func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tells the examiner that the user's code calls torch.autograd itself; with create_graph=True also
    the differentiated tensors."""
    examiner = None if AMBIENT.examination.by_entry_point else AMBIENT.examination.examiner
    if examiner is not None and examiner.by_hand is not None:
        of = (args[:1], kwargs.get("outputs"), kwargs.get("tensors"))
        examiner.by_hand(examiner, pytree.tensors(of) if _creates_graph(func, args, kwargs) else ())


def _creates_graph(func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call in _RUNS_BACKWARD has create_graph=True."""
    place = 4 if func is torch.autograd.grad else 3  # of create_graph among positional arguments
    return bool(kwargs.get("create_graph") or any(args[place : place + 1]))


@functools.cache
def without_override_check(
    func: FunctionType, calls: frozenset[str] | None = None
) -> Callable[..., Any] | None:
    """A copy of a Python function of torch that lets a mode intercept its torch calls; None if it makes
    no such call.

    calls: The names of the calls to intercept. Default: calls with a stand-in.

    Python functions of torch check `has_torch_function` first, which is True under any mode; the mode
    then handles the whole function, and is disabled in its handler. In the copy `has_torch_function`
    returns False, so the body runs with the mode on. Functions that run backward are copied as well,
    because a backward may call Python code.
    """
    if func not in _RUNS_BACKWARD:
        # co_names has bare names: a function with an unrelated attribute of such a name is copied, too
        known = calls or {getattr(original, "__name__", "") for original in _replacements()}
        if func.__module__ != F.__name__ or not known & set(func.__code__.co_names):
            return None
    return copy_without_override_check(func)


def _recompute_inside() -> None:
    """Make the checkpoint around the caller recompute with stand-ins: torch compares the saved tensors
    of both runs, and a stand-in does not save the tensors of torch's operation."""
    frame = torch_internals.checkpoint_frame()
    if frame is not None and not isinstance(frame.recompute_fn, _Inside):
        frame.recompute_fn = _Inside(frame.recompute_fn)


class _Inside:
    """A function, run with stand-ins and with the values of `statistics_frozen` and `plain_operations`
    at the creation of this object."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self._frozen = function, AMBIENT.statistics_frozen
        self._plain = AMBIENT.plain_operations

    def __call__(self, *args: Any) -> None:
        # AMBIENT has a mode that is not on torch's stack: a backward without stand-ins suspended it
        mode = AMBIENT.stand_ins
        active = torch_internals.function_mode(StandInMode)
        again: AbstractContextManager[Any] = _StandIns(True) if mode is None or active else mode
        frozen = self._frozen or AMBIENT.statistics_frozen
        with again, inside(statistics_frozen=frozen, plain_operations=self._plain):
            self._function(*args)
