"""The cells of the test matrix: each is a function of an op and one of its samples, and asserts.

The oracle is the op's reference, plain torch differentiated by torch, and finite differences for the
derivatives that have them.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

import hoglib as hog
from hoglib._core.numerics.tolerances import TOLERANCES
from hoglib._core.torch_api.torch_modes import plain_operations
from tests.ops.opinfo import OpInfo, SampleInput

F64 = torch.float64
Function = Callable[..., Any]


class Case:
    """An op and its reference as functions of the differentiable inputs of one sample."""

    def __init__(self, info: OpInfo, sample: SampleInput, dtype: torch.dtype = F64) -> None:
        self.info = info
        inputs = sample.make(dtype, torch.Generator().manual_seed(3))
        self.places = [i for i, value in enumerate(inputs) if is_floating(value)]
        self.inputs, self.kwargs = inputs, sample.kwargs
        self.tensors = [inputs[i] for i in self.places]
        self.ours = self.bind(info.op)
        self.theirs = self.bind(info.ref)

    def bind(self, function: Function) -> Function:
        def call(*tensors: Tensor) -> Any:
            inputs = list(self.inputs)
            for place, tensor in zip(self.places, tensors, strict=True):
                inputs[place] = tensor
            return function(*inputs, **self.kwargs)

        return call

    def leaves(self) -> list[Tensor]:
        return [copy(tensor).requires_grad_() for tensor in self.tensors]


def is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def copy(tensor: Tensor) -> Tensor:
    """A detached copy that keeps the strides, those of stride 0 too."""
    return tensor.detach().clone() if 0 not in tensor.stride() else tensor.detach()


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def weights(like: Tensor, seed: int = 0) -> Tensor:
    """Fixed numbers of the shape and dtype of another tensor; vmap allows no random ones."""
    phases = torch.arange(1, like.numel() + 1, dtype=F64, device=like.device) * 1.7 + seed
    values = torch.complex(phases.sin(), phases.cos()) if like.is_complex() else phases.sin()
    return values.reshape(like.shape).to(like.dtype)


def projected(function: Function, bend: Function = torch.tanh) -> Function:
    """A scalar that depends on every output, and not linearly, so that all second derivatives count."""

    def total(*tensors: Tensor) -> Tensor:
        values = as_tuple(function(*tensors))
        parts = [(weights(v, i) * bend(v)).real.sum() for i, v in enumerate(values)]
        return sum(parts[1:], parts[0])

    return total


def close(ours: Any, theirs: Any, dtype: torch.dtype = F64) -> None:
    a, b = torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:  # a zero may be structural on one side
            other = y if x is None else x
            assert other is None or not other.any()
            continue
        assert_close(x, y, **TOLERANCES[dtype]._asdict(), equal_nan=True)


def orders(function: Function, tensors: list[Tensor], bend: Function = torch.tanh) -> list[Any]:
    """Values, gradients, and a product of the Hessian with a fixed vector, by torch.autograd."""
    values = as_tuple(function(*tensors))
    scalar = projected(lambda: values, bend)()
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not scalar.requires_grad:
        return [[v.detach() for v in values], [None] * len(wanted), [None] * len(wanted)]
    grads = torch.autograd.grad(scalar, wanted, create_graph=True, allow_unused=True)
    inner = [
        (weights(g, i + 7) * g).real.sum()
        for i, g in enumerate(grads)
        if g is not None and g.requires_grad
    ]
    products: Any = [None] * len(wanted)
    if inner:
        products = torch.autograd.grad(sum(inner[1:], inner[0]), wanted, allow_unused=True)
    return [
        [v.detach() for v in values],
        [None if g is None else g.detach() for g in grads],
        list(products),
    ]


def same_orders(case: Case, tensors: list[Tensor]) -> None:
    fresh = [
        copy(t).requires_grad_(t.requires_grad) if t.is_leaf else t for t in tensors
    ]  # fmt: skip
    close(orders(case.ours, tensors), orders(case.theirs, fresh))


# Finite differences: of the values in each element, above along random directions, where the cells below
# compare the elements.


def first_derivative(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    assert gradcheck(
        case.ours, case.leaves(), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
    )  # fmt: skip


def second_derivative(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    assert gradgradcheck(
        case.ours, case.leaves(), check_fwd_over_rev=True, check_batched_grad=True, fast_mode=True
    )


def third_derivative(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    scalar = projected(case.ours)

    def gradient(*tensors: Tensor) -> Any:
        return torch.autograd.grad(scalar(*tensors), tensors, create_graph=True)

    assert gradgradcheck(gradient, case.leaves(), fast_mode=True)


# torch.func, against the reference.


def same_transform(transform: Callable[[Function, list[Tensor]], Any]) -> Function:
    def cell(info: OpInfo, sample: SampleInput) -> None:
        case = Case(info, sample)
        close(transform(case.ours, case.tensors), transform(case.theirs, case.tensors))

    return cell


def func_vjp(function: Function, tensors: list[Tensor]) -> Any:
    values, pull = torch.func.vjp(function, *tensors)
    cotangents = tuple(weights(v, i) for i, v in enumerate(as_tuple(values)))
    return values, pull(cotangents if isinstance(values, tuple) else cotangents[0])


def func_jvp(function: Function, tensors: list[Tensor]) -> Any:
    tangents = [weights(tensor, i) for i, tensor in enumerate(tensors)]
    one_at_a_time = [
        torch.func.jvp(lambda t, i=i: function(*tensors[:i], t, *tensors[i + 1 :]), (x,), (v,))
        for i, (x, v) in enumerate(zip(tensors, tangents, strict=True))
    ]
    return torch.func.jvp(function, tuple(tensors), tuple(tangents)), one_at_a_time


def func_vmap(function: Function, tensors: list[Tensor]) -> Any:
    """Each input alone along the first dimension and all together along the last; and nested."""
    every = tuple(range(len(tensors)))
    gradient = torch.func.grad(projected(function), every)
    results = []
    for subset, dim in [*(((i,), 0) for i in every), (every, -1)]:
        batched = [
            torch.stack([tensor, 0.5 * tensor + 0.1, tensor.sin()], dim) if i in subset else tensor
            for i, tensor in enumerate(tensors)
        ]
        in_dims = tuple(dim if i in subset else None for i in every)
        results.append(torch.func.vmap(function, in_dims)(*batched))
        inner = torch.func.vmap(gradient, in_dims)
        results.append(inner(*batched))
        if subset == every:
            results.append(torch.func.vmap(inner)(*[torch.stack([b, -b]) for b in batched]))
    return results


def func_hessian(function: Function, tensors: list[Tensor]) -> Any:
    every = tuple(range(len(tensors)))
    return torch.func.hessian(projected(function), every)(*tensors)


def reverse_over_forward(function: Function, tensors: list[Tensor]) -> Any:
    every = tuple(range(len(tensors)))
    tangents = tuple(weights(tensor, i) for i, tensor in enumerate(tensors))

    def slope(*inputs: Tensor) -> Tensor:
        return torch.func.jvp(projected(function), inputs, tangents)[1]

    return torch.func.grad(slope, every)(*tensors)


def forward_over_forward(function: Function, tensors: list[Tensor]) -> Any:
    inner, outer = (tuple(weights(t, i + k) for i, t in enumerate(tensors)) for k in (0, 5))

    def slope(*inputs: Tensor) -> Any:
        return torch.func.jvp(function, inputs, inner)[1]

    return torch.func.jvp(slope, tuple(tensors), outer)


def hvp(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    params = dict(enumerate(case.tensors))
    v = {i: weights(tensor, i) for i, tensor in params.items()}
    _, product = hog.hvp(lambda p: projected(case.ours)(*p.values()), params, v)
    gradient = torch.func.grad(lambda p: projected(case.theirs)(*p.values()))
    close(product, torch.func.jvp(gradient, (params,), (v,))[1])


# Layouts, shapes and which inputs require grad.


def relaid(change: Callable[[Tensor], Tensor]) -> Function:
    def cell(info: OpInfo, sample: SampleInput) -> None:
        case = Case(info, sample)
        tensors = [change(tensor).detach().requires_grad_() for tensor in case.tensors]
        plain = [t.detach().contiguous().clone().requires_grad_() for t in tensors]
        close(orders(case.ours, tensors), orders(case.theirs, plain))

    return cell


def every_other(tensor: Tensor) -> Tensor:
    """The same values in every other place of a larger tensor."""
    if tensor.dim() == 0:
        return torch.stack([tensor, tensor])[1]
    return torch.stack([tensor, torch.full_like(tensor, 9.0)], -1)[..., 0]


def transposed(tensor: Tensor) -> Tensor:
    """The same values, stored in the reverse order of dimensions."""
    reverse = tuple(reversed(range(tensor.dim())))
    return tensor.permute(reverse).contiguous().permute(reverse)


def stretched(tensor: Tensor) -> Tensor:
    """One entry of the first dimension, repeated without a copy."""
    return tensor[:1].expand_as(tensor) if tensor.dim() else tensor


def corner(name: str) -> Function:
    def cell(info: OpInfo, sample: SampleInput) -> None:
        case = Case(info, info.corners[name])
        same_orders(case, case.leaves())
        backward_as_functions_do_it(projected(case.ours)(*case.leaves()))
        if name != "zero size" and "first derivative" not in info.skips:
            assert gradcheck(case.ours, case.leaves(), check_forward_ad=True)
            assert gradgradcheck(case.ours, case.leaves())
        close(*(func_vmap(f, case.tensors) for f in (case.ours, case.theirs)))
        close(*(func_jvp(f, case.tensors) for f in (case.ours, case.theirs)))

    return cell


def subsets_of_inputs(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    count = len(case.tensors)
    for wanted in itertools.product((False, True), repeat=count):
        tensors = [copy(t).requires_grad_(w) for t, w in zip(case.tensors, wanted, strict=True)]
        if not any(wanted):
            assert not any(v.requires_grad for v in as_tuple(case.ours(*tensors)))
            continue
        same_orders(case, tensors)
        backward_as_functions_do_it(projected(case.ours)(*tensors))


def backward_as_functions_do_it(scalar: Tensor) -> None:
    """Backward, where each custom Function must give the gradients asked for, in the right shapes.

    torch itself drops a gradient that is not needed, and sums one that is larger than its input.
    """
    for node in function_nodes(scalar):
        node.register_prehook(partial(check_gradients, node))
    if scalar.requires_grad:
        scalar.backward()


def check_gradients(node: Any, incoming: tuple[Any, ...]) -> None:
    zeros = [torch.zeros(like.shape, dtype=like.dtype) for like in node._input_metadata]
    filled = [zero if g is None else g for g, zero in zip(incoming, zeros, strict=True)]
    name, grads, needed = node.name(), as_tuple(node.apply(*filled)), node.needs_input_grad
    for grad, need in zip(grads, needed, strict=True):
        assert grad is None or need, f"{name} computed a gradient that is not needed"
    given = [grad for grad, need in zip(grads, needed, strict=True) if need]
    parents = [(parent, k) for parent, k in node.next_functions if parent is not None]
    for grad, (parent, k) in zip(given, parents, strict=True):
        expected = tuple(parent._input_metadata[k].shape)
        if grad is not None:
            assert tuple(grad.shape) == expected, f"{name} gave {grad.shape} for {expected}"


def function_nodes(value: Tensor) -> Iterator[Any]:
    """The nodes of custom Functions in a graph."""
    pending, seen = [value.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(parent for parent, _ in node.next_functions)
        if hasattr(node, "needs_input_grad"):
            yield node


class Nothing(torch.autograd.Function):
    """The identity, whose gradient is undefined."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def undefined_gradients(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    tensors = case.leaves()
    values = as_tuple(case.ours(*tensors))
    for create_graph in (False, True):
        scalar = sum(Nothing.apply(v).real.sum() for v in values)
        grads = torch.autograd.grad(
            scalar, tensors, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        close(grads, [None] * len(grads))
    for k in range(len(values)):
        same_orders_of(case, k)


def same_orders_of(case: Case, k: int) -> None:
    """Only output k counts, so the gradients of the others are undefined."""

    def pick(function: Function) -> Function:
        return lambda *tensors: as_tuple(function(*tensors))[k]

    close(orders(pick(case.ours), case.leaves()), orders(pick(case.theirs), case.leaves()))


# Dtypes.


def in_dtype(dtype: torch.dtype) -> Function:
    def cell(info: OpInfo, sample: SampleInput) -> None:
        case = Case(info, sample, dtype)
        wide = [t.to(F64).requires_grad_() for t in case.tensors]
        case_wide = Case(info, sample)
        case_wide.inputs = tuple(v.to(F64) if is_floating(v) else v for v in case.inputs)
        ours = orders(case.ours, case.leaves(), torch.sin)
        theirs = orders(case_wide.theirs, wide, torch.sin)
        for tensor in torch.utils._pytree.tree_leaves(ours):
            assert tensor is None or tensor.dtype == dtype
        narrow = torch.utils._pytree.tree_map(
            lambda t: t.to(dtype) if isinstance(t, Tensor) else t, theirs
        )
        close(ours, narrow, dtype)

    return cell


def complex_numbers(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample, torch.complex128)
    if torch.complex128 not in info.dtypes:
        with pytest.raises(TypeError, match="complex"):
            case.ours(*case.tensors)
        return
    same_orders(case, case.leaves())
    for transform in (func_jvp, reverse_over_forward):
        close(transform(case.ours, case.tensors), transform(case.theirs, case.tensors))


# The compiler, side effects, and the device.


def compiled(info: OpInfo, sample: SampleInput) -> None:
    in_one_graph([Case(info, sample)], "aot_eager")


def plainly(info: OpInfo, sample: SampleInput) -> None:
    """As torch operations, which Taylor mode and compiled code take in the place of the Function."""
    case, results = Case(info, sample), []
    for function, context in ((case.ours, plain_operations()), (case.theirs, nullcontext())):
        tensors = case.leaves()
        with context:
            value = projected(function)(*tensors)
        if value.requires_grad:
            value.backward()
        results.append([value.detach(), [t.grad for t in tensors]])
    close(*results)


def in_one_graph(cases: list[Case], backend: str) -> None:
    """Forward and backward of the cases as one compiled function, against the references."""
    torch._dynamo.reset()

    def ours(inputs: list[list[Tensor]]) -> Tensor:
        return total([projected(c.ours)(*i) for c, i in zip(cases, inputs, strict=True)])

    def theirs(inputs: list[list[Tensor]]) -> Tensor:
        return total([projected(c.theirs)(*i) for c, i in zip(cases, inputs, strict=True)])

    results = []
    for function in (torch.compile(ours, fullgraph=True, backend=backend), theirs):
        inputs = [case.leaves() for case in cases]
        value = function(inputs)
        if value.requires_grad:
            value.backward()
        results.append([value.detach(), [[t.grad for t in tensors] for tensors in inputs]])
    close(*results)


def total(values: list[Tensor]) -> Tensor:
    return sum(values[1:], values[0])


def nothing_changed_in_place(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    tensors = case.leaves()
    watched: dict[str, Tensor] = {f"input {i}": t for i, t in enumerate(tensors)}
    values = as_tuple(case.ours(*tensors))
    watched |= {f"output {i}": v for i, v in enumerate(values) if not v._is_view()}
    incoming = [weights(v, i).requires_grad_() for i, v in enumerate(values)]
    watched |= {f"gradient {i}": g for i, g in enumerate(incoming)}
    before = {name: (t._version, t.detach().clone()) for name, t in watched.items()}
    live = [(v, g) for v, g in zip(values, incoming, strict=True) if v.requires_grad]
    if live:
        outputs, gradients = zip(*live, strict=True)
        grads = torch.autograd.grad(
            outputs, tensors, gradients, create_graph=True, allow_unused=True
        )
        first = [g for g in grads if g is not None and g.requires_grad]
        second = [weights(g, i) for i, g in enumerate(first)]
        watched |= {f"second gradient {i}": g for i, g in enumerate(second)}
        before |= {n: (t._version, t.clone()) for n, t in watched.items() if n not in before}
        torch.autograd.grad(first, [*tensors, *incoming], second, allow_unused=True)
    func_jvp(case.ours, [t.detach() for t in tensors])
    for name, (version, value) in before.items():
        assert watched[name]._version == version, f"{name} was changed in place"
        assert torch.equal(watched[name].detach(), value), f"{name} was changed"


def deterministic(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    once, again = (orders(case.ours, case.leaves()) for _ in range(2))
    a, b = torch.utils._pytree.tree_leaves(once), torch.utils._pytree.tree_leaves(again)
    for x, y in zip(a, b, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def cuda(info: OpInfo, sample: SampleInput) -> None:
    case = Case(info, sample)
    here = orders(case.ours, case.leaves())
    given = (case.inputs, case.kwargs)
    case.inputs, case.kwargs = tree_map_only(Tensor, Tensor.cuda, given)
    there = orders(case.ours, [t.detach().cuda().requires_grad_() for t in case.tensors])
    close([[None if t is None else t.cpu() for t in row] for row in there], here)


CELLS: dict[str, Function] = {
    "first derivative": first_derivative,
    "second derivative": second_derivative,
    "third derivative": third_derivative,
    "func vjp": same_transform(func_vjp),
    "func jvp": same_transform(func_jvp),
    "func vmap": same_transform(func_vmap),
    "func hessian": same_transform(func_hessian),
    "reverse over forward": same_transform(reverse_over_forward),
    "forward over forward": same_transform(forward_over_forward),
    "hvp": hvp,
    "non-contiguous": relaid(every_other),
    "transposed": relaid(transposed),
    "stride 0": relaid(stretched),
    "zero size": corner("zero size"),
    "no dimensions": corner("no dimensions"),
    "broadcasting": corner("broadcasting"),
    "subsets of inputs": subsets_of_inputs,
    "undefined gradients": undefined_gradients,
    "float32": in_dtype(torch.float32),
    "bfloat16": in_dtype(torch.bfloat16),
    "complex": complex_numbers,
    "plain operations": plainly,
    "compile": compiled,
    "nothing changed in place": nothing_changed_in_place,
    "deterministic": deterministic,
    "cuda": cuda,
}

# Cells of one sample an op, which is their own.
ONCE = {"zero size", "no dimensions", "broadcasting"}
