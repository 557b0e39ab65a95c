"""Operators of torch.library as custom Functions. Private torch API, as `torch_internals`.

    @torch.library.custom_op("mylib::sine", mutates_args=())
    def sine(x: Tensor) -> Tensor: ...

    sine.register_autograd(backward, setup_context=setup_context)

torch makes a Function of these rules. This Function has no setup_context, so torch.func refuses it.
Forward mode ignores it: the operator's results have no tangent, without an error. Its class is torch's,
and its last argument is the state of the dispatcher. hoglib makes another Function of the rules, in the
form in which a user writes one:

    forward(*args)                    the operator, below autograd
    setup_context, backward           the user's own

While hoglib's stand-ins are on, this Function is applied instead of the operator; the checks of custom
Functions see it, too.
"""

from collections.abc import Callable, Iterator
from functools import partial
from inspect import Parameter, Signature, getclosurevars
from types import BuiltinFunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_private import private, require

Overload = Any  # an OpOverload, one signature of an operator; or an OpOverloadPacket, all of them
OpOverloadPacket: Any = type(torch.ops.aten.sin)
OPERATORS = (type(torch.ops.aten.sin.default), OpOverloadPacket)
_is_list_of_tensors = private("torch._library.utils.is_tensorlist_like_type")
_fill_defaults = private("torch._library.utils.fill_defaults")
_tree_flatten = private("torch.utils._pytree.tree_flatten")
_DEFINITIONS = private("torch._library.custom_ops.OPDEFS")
_LIBRARIES = private("torch.library._impls")
_BINDINGS = private("torch._C._nn")
_resolve_packet = private("torch._C._jit_resolve_packet")
_BelowAutograd = private("torch._C._AutoDispatchBelowAutograd")
_made_functions = private("torch._library.autograd")  # makes torch's Functions of operators
_OWN = frozenset({"aten", "prim", "prims", "hoglib"})
Rules = tuple[Any, Any]  # (backward, setup_context)
Application = tuple[type[Function], tuple[Any, ...]]  # (Function, arguments)
# overload -> (its rules, the Function made of them)
_FUNCTIONS: WeakKeyDictionary[Overload, tuple[Rules, type[Function]]] = WeakKeyDictionary()
# overload with rules in torch's dispatcher only -> its Function; None if the rules are not in Python
_BY_LIBRARY: WeakKeyDictionary[Overload, type[Function] | None] = WeakKeyDictionary()


def call_as_function(
    operator: object, args: tuple[Any, ...], kwargs: dict[str, Any], applied: Callable[..., Any]
) -> Application | None:
    """A call of an operator as the application of a Function; None if the operator has no Python rules.

    applied: applied(operator, args, kwargs) returns the custom Functions that a call applies, each
    `as_written`.
    """
    if not is_users(operator):
        return None
    overload = overload_of(operator, args, kwargs)
    definition = _DEFINITIONS.get(overload._schema.name)
    if definition is not None and definition._opoverload is overload:
        backward, setup_context = definition._backward_fn, definition._setup_context_fn
        if backward is None or not _is_supported(overload):
            return None
        function: type[Function] | None = _function_of(overload, (backward, setup_context))
    else:
        if overload not in _BY_LIBRARY:
            _BY_LIBRARY[overload] = None
            if _has_python_rules(overload):
                found = applied(overload, args, kwargs)
                own = (f for f in found if getattr(f, "operator", None) is overload)
                _BY_LIBRARY[overload] = next(own, None)
        function = _BY_LIBRARY[overload]
    return None if function is None else (function, _flat(overload, args, kwargs))


def is_users(operator: object) -> bool:
    """Whether an operator is the user's, not torch's or hoglib's."""
    return operator.__module__.rpartition(".")[-1] not in _OWN  # "aten" of "torch._ops.aten"


def callables(name: str) -> Iterator[tuple[Any, Any]]:
    """Each callable that runs aten's operator `name`: its overloads without out=, its packet, and
    torch's bindings; each with the argument from which `overload_of` finds the overload of a call."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return
    for overload in map(partial(getattr, packet), packet.overloads()):
        if not any(argument.is_out for argument in overload._schema.arguments):
            yield overload, overload
    yield packet, packet
    for module in (torch, _BINDINGS, torch.linalg):
        if isinstance(binding := getattr(module, name, None), BuiltinFunctionType):
            yield binding, packet


def overload_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Overload:
    """The overload that a call of an operator runs."""
    if type(operator) is not OpOverloadPacket:
        return operator
    name, *more = operator.overloads()
    if more:
        qualified = operator._qualified_op_name
        name = _resolve_packet(qualified, *args, **kwargs) or "default"
    return getattr(operator, name)


def as_written(function: type[Function], args: tuple[Any, ...] = ()) -> Application:
    """An application of a Function. If torch made the Function of an operator, the Function and the
    arguments are as the user wrote them."""
    if not function.__module__.startswith("torch._library"):  # torch makes them in this package
        return function, args
    require(_made_functions)
    overload, rules = _made_of(function)
    if not _is_supported(overload):
        return function, args
    if args:
        if (structure := getattr(args[-1], "input_spec", None)) is not None:
            args = tuple(structure.unflatten(args[:-1]))
        args = _flat(overload, args[:-1], args[-1].keyword_only_args)
    return _function_of(overload, rules), args


def result_of(function: Any, outputs: Any) -> Any:
    """The operator's result, from the outputs of its Function: a list, not a tuple, if it returns
    one."""
    return list(outputs) if _returns_list(function.operator) else outputs


def _made_of(function: type[Function]) -> tuple[Overload, Rules]:
    """The operator and the rules that torch made a Function of."""
    cells = getclosurevars(function.backward).nonlocals
    if "orig_backward" in cells:  # torch's wrapper for operators with lists of tensors
        cells = getclosurevars(cells["orig_backward"]).nonlocals
    return cells["op"], (cells["info"]._backward_fn, cells["info"]._setup_context_fn)


def _has_python_rules(overload: Overload) -> bool:
    name = overload._schema.name.split("::")[-1]
    if overload._schema.overload_name:
        name += f".{overload._schema.overload_name}"
    return f"{overload.namespace}/{name}/Autograd" in _LIBRARIES


def _is_supported(overload: Overload) -> bool:
    """Whether an operator returns tensors, or a single list of tensors."""
    returns = overload._schema.returns
    return len(returns) == 1 or not any(_is_list_of_tensors(r.type) for r in returns)


def _returns_list(overload: Overload) -> bool:
    returns = overload._schema.returns
    return len(returns) == 1 and _is_list_of_tensors(returns[0].type)


def _has_structure(overload: Overload) -> bool:
    """Whether an operator has lists of tensors or keyword-only arguments, or returns a list."""
    arguments = overload._schema.arguments
    lists = any(_is_list_of_tensors(a.type) or a.kwarg_only for a in arguments)
    return lists or _returns_list(overload)


def _flat(overload: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments in the order of the schema, with defaults; if they have structure, as flat leaves
    with the structure last."""
    names = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    by_name = dict(kwargs)
    by_position = list(args)
    while len(by_position) < len(names) and names[len(by_position)] in by_name:
        by_position.append(by_name.pop(names[len(by_position)]))
    if len(by_position) < len(names):
        defaults = {a.name: a.default_value for a in overload._schema.arguments}
        by_position += [by_name.pop(n, defaults[n]) for n in names[len(by_position) :]]
    if not _has_structure(overload):
        return tuple(by_position)
    leaves, structure = _tree_flatten((by_position, by_name))
    return (*leaves, structure)


def _function_of(overload: Overload, rules: Rules) -> type[Function]:
    """The Function of an operator with these rules, made once."""
    known = _FUNCTIONS.get(overload)
    if known is None or known[0] != rules:
        _FUNCTIONS[overload] = known = rules, _make_function(overload, *rules)
    return known[1]


def _make_function(overload: Overload, backward: Any, setup_context: Any) -> type[Function]:
    leaves = pytree.leaves
    schema, structured = overload._schema, _has_structure(overload)
    keywords = any(a.kwarg_only for a in schema.arguments)

    def opened(args: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
        if not structured:
            return list(args), {}
        *flat, structure = args
        return structure.unflatten(flat)

    def run(*args: Any) -> Any:
        given, named = opened(args)
        # below autograd, because this Function has the operator's autograd rules
        with _BelowAutograd():
            result = overload(*given, **named)
        return tuple(result) if isinstance(result, list) else result

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if structured:
            ctx.structure = inputs[-1]
        if setup_context is not None:
            given, named = _fill_defaults(schema, *opened(inputs))
            output = list(output) if _returns_list(overload) else output
            more = {"keyword_only_inputs": named} if keywords else {}
            setup_context(ctx=ctx, inputs=given, output=output, **more)

    def structured_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        ctx.needs_input_grad, named = opened((*needed[:-1], ctx.structure))
        try:
            found = backward(ctx, list(grads)) if _returns_list(overload) else backward(ctx, *grads)
            found = found if isinstance(found, tuple) else (found,)
            flat: list[Tensor | None] = []
            for one, given in zip(found, ctx.needs_input_grad, strict=True):
                flat += one if isinstance(one, list | tuple) else [one] * len(leaves(given))
        finally:
            ctx.needs_input_grad = needed
        return (*flat, *[None] * len(leaves(named)), None)

    if not structured:
        run.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(a.name, Parameter.POSITIONAL_OR_KEYWORD) for a in schema.arguments]
        )
    # a vmap rule can be generated if the operator itself has a kernel for vmap
    maps = overload.has_kernel_for_dispatch_key("FuncTorchBatched")
    name = f"torch.ops.{str(overload).removesuffix('.default')}"
    rules = {
        "forward": staticmethod(run),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(structured_backward if structured else backward),
        "generate_vmap_rule": maps,
        "__module__": getattr(backward, "__module__", None) or "__main__",
        "operator": overload,
        "surrogate": getattr(backward, "surrogate", False) is True,
    }
    return type(name, (Function,), rules)
