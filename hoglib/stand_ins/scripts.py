"""Scripted code, run in Python, because no mode sees the torch calls of TorchScript's interpreter.

    run = program(script)          # from torch.jit.script, trace or load
    y = run(x)                     # torch calls come from Python, so stand-ins replace them

Each node of the graph becomes a call: of torch's operators by `torch.ops`, of all others in Python.
"""

import operator
import re
import warnings
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, NoReturn

import torch
from torch import Tensor

from hoglib._core.torch_api.torch_internals import unwrap

Values = dict[str, Any]  # name of a value in the graph -> the value
Step = Callable[[Values], None]  # runs a node: reads its inputs, adds its outputs


class _Unknown(Exception):
    """A node cannot run in Python here; the message is its kind."""


def program(script: Any) -> Callable[..., Any] | str | None:
    """A function of the arguments of a scripted function or method. A str, the kind of a node such as
    prim::fork, if the node cannot run in Python. None for methods of C++ classes, such as distributed
    work, which have no graph."""
    try:
        graph = script.inlined_graph
    except RuntimeError:
        return None
    try:
        steps, (output,) = _steps(graph), _names(graph.outputs())
    except _Unknown as error:
        return str(error)
    names, owner = _names(graph.inputs()), [script.owner] if hasattr(script, "owner") else []
    kind, without = Parameter.POSITIONAL_OR_KEYWORD, Parameter.empty
    signature = Signature([
        Parameter(a.name, kind, default=a.default_value if a.has_default_value() else without)
        for a in script.schema.arguments
    ])  # fmt: skip

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*owner, *args, **kwargs)
        bound.apply_defaults()
        values = dict(zip(names, bound.arguments.values(), strict=True))
        _run(steps, values)
        return values[output]

    return run


def _names(values: Any) -> list[str]:
    return [value.debugName() for value in values]


def _run(steps: Sequence[Step], values: Values) -> None:
    for step in steps:
        step(values)


def _steps(block: Any) -> list[Step]:
    return [_step(node) for node in block.nodes()]


def _step(node: Any) -> Step:
    kind, inputs, outputs = node.kind(), _names(node.inputs()), _names(node.outputs())
    if kind in ("prim::If", "prim::Loop"):
        return (_branch if kind == "prim::If" else _loop)(node, inputs, outputs)
    if kind == "prim::Constant":
        # without a value: None, or a function, which the graph inlines
        has_value = any(map(node.hasAttribute, ("value", "ival")))
        constant = node.output().toIValue() if has_value else None
        return lambda values: values.update({outputs[0]: constant})
    function = _function(node)

    def call(values: Values) -> None:
        found = function(*[values[name] for name in inputs])
        values.update(zip(outputs, found if len(outputs) > 1 else [found], strict=False))

    return call


def _branch(node: Any, inputs: list[str], outputs: list[str]) -> Step:
    blocks = [(_steps(block), _names(block.outputs())) for block in node.blocks()]

    def run(values: Values) -> None:
        steps, found = blocks[0 if values[inputs[0]] else 1]
        _run(steps, values)
        values.update(zip(outputs, [values[name] for name in found], strict=True))

    return run


def _loop(node: Any, inputs: list[str], outputs: list[str]) -> Step:
    (block,) = node.blocks()
    steps, names, results = _steps(block), _names(block.inputs()), _names(block.outputs())

    def run(values: Values) -> None:
        most, going, *carried = [values[name] for name in inputs]
        count = 0
        while going and count < most:
            values.update(zip(names, [count, *carried], strict=True))
            _run(steps, values)
            going, *carried = [values[name] for name in results]
            count += 1
        values.update(zip(outputs, carried, strict=True))

    return run


def _raise(message: str, *_: object) -> NoReturn:
    raise RuntimeError(message)


def _tensor(data: Any, dtype: int | None, device: Any, requires_grad: bool = False) -> Tensor:
    """`torch.tensor` or `as_tensor`; their operators accept no lists. dtype: TorchScript's number."""
    kind = None if dtype is None else torch.ops.aten.to.dtype(torch.empty(0), dtype).dtype
    made = torch.as_tensor(data, dtype=kind, device=device)
    return made.requires_grad_() if requires_grad else made


_PLAIN: dict[str, Callable[..., Any]] = {
    "prim::ListConstruct": lambda *parts: list(parts),
    "prim::TupleConstruct": lambda *parts: parts,
    "prim::DictConstruct": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "prim::ListUnpack": lambda parts: parts if len(parts) > 1 else parts[0],
    "prim::TupleUnpack": lambda parts: parts if len(parts) > 1 else parts[0],
    "prim::TupleIndex": operator.getitem,
    "prim::unchecked_cast": lambda x: x,
    "prim::Uninitialized": lambda: None,
    "prim::RaiseException": _raise,
    "aten::_unwrap_optional": lambda x: x,
    "aten::__is__": operator.is_,
    "aten::__isnot__": operator.is_not,
    "aten::__not__": operator.not_,
    "aten::_set_item": operator.setitem,
    "aten::len": len,
    "aten::tensor": _tensor,
    "aten::as_tensor": _tensor,
    "aten::list": list,
    "aten::keys": lambda own: list(own.keys()),
    "aten::values": lambda own: list(own.values()),
    "aten::items": lambda own: list(own.items()),
    "aten::warn": lambda message, _: warnings.warn(message, stacklevel=2),
    "aten::dim": Tensor.dim,  # as an operator it has no rule for vmap
}


# operators on numbers, strings and containers only
_BY_NAME: dict[str, Callable[..., Any]] = {
    "slice": lambda own, *bounds: own[slice(*bounds)],
    "sort": lambda own, reverse=False: own.sort(reverse=reverse),
    "sorted": sorted,
    "Delete": operator.delitem,
    "add_": operator.iadd,
    "mul_": operator.imul,
    "percentFormat": operator.mod,
}


def _function(node: Any) -> Callable[..., Any]:
    """The function from the inputs of a node to its outputs."""
    kind, schema = node.kind(), node.schema()
    if kind in ("prim::GetAttr", "prim::SetAttr"):
        name, act = node.s("name"), getattr if kind == "prim::GetAttr" else setattr
        return lambda own, *value: act(own, name, *value)
    if kind == "prim::PythonOp" and not node.scalar_args():  # a call of a torch.jit.ignore function
        return node.pyobj()
    named = kind == "prim::TupleConstruct" and not str(node.output().type()).startswith("Tuple[")
    if kind in _PLAIN and not named:
        return _PLAIN[kind]
    match = re.match(r"(\w+)::(\w+)\.?(\w*)\(", schema)
    if match is None:
        raise _Unknown(kind)
    space, name, overload = match.groups()
    own = getattr(getattr(getattr(torch.ops, space), name, None), overload or "default", None)
    if "Tensor" not in schema:
        return _python_function(kind, name, own)
    if own is None:
        raise _Unknown(kind)
    if space == "prim":  # reads a property, such as a device, which vmap's wrappers lack
        return lambda *args: own(*(unwrap(x) if isinstance(x, Tensor) else x for x in args))
    by_name = [a.name for a in own._schema.arguments if a.kwarg_only]
    placed = len(own._schema.arguments) - len(by_name)
    return lambda *args: own(*args[:placed], **dict(zip(by_name, args[placed:], strict=False)))


def _python_function(kind: str, name: str, own: Any) -> Callable[..., Any]:
    """The function of a node on numbers, strings and containers: of Python, or a method."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    kinds = [own for own in (list, dict, str) if hasattr(own, name)]
    plain = getattr(operator, name, own)
    if plain is None and not kinds:
        raise _Unknown(kind)

    def call(*args: Any) -> Any:
        method = getattr(args[0], name) if args and type(args[0]) in kinds else None
        return plain(*args) if method is None else method(*args[1:])

    return call
