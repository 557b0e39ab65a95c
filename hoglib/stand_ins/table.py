"""The table of all stand-ins: functions of hoglib.ops, rearranged calls of torch's own functions, and
all names of each replaced function.

    torch.layer_norm, torch.ops.aten.layer_norm, torch.ops.aten.layer_norm.default
    torch.native_layer_norm, torch.ops.aten.native_layer_norm, ...

Exported programs and decompositions call operators. A test shows for each row that the installed torch
still needs the row.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hoglib import ops
from hoglib._core.torch_api import pytree, torch_library
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.mixed_precision import autocast_on
from hoglib._core.torch_api.torch_forward_mode import tangents_enabled
from hoglib._core.torch_api.torch_internals import forward_mode_active, native_kernels
from hoglib._core.torch_api.torch_private import private
from hoglib.ops import _special_points  # noqa: F401 registers its functions
from hoglib.ops._attention_blocks import softmax_of
from hoglib.ops._indexing import torch_embedding_bag
from hoglib.ops._norms import torch_batch_norm
from hoglib.ops._stand_in import (
    EVERY,
    IN_FORWARD,
    NO_DOUBLE_BACKWARD,
    SILENT,
    TABLE,
    StandIn,
    stands_in_for,
)


@stands_in_for(
    torch.group_norm,
    lacks="channels-last, its forward mode raises",
    modes=IN_FORWARD,
    until=dict.fromkeys(IN_FORWARD, (2, 13)),
)
def group_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.group_norm of a contiguous input: torch's forward-mode rule calls view() on the input."""
    return torch.group_norm(input.contiguous() if forward_mode_active() else input, *args, **kwargs)


@stands_in_for(
    torch.lstm,
    lacks="cuDNN's has no double backward, oneDNN's (float32) no forward mode; torch's own has both",
    modes=("fr",),
)
def lstm(*args: Any, **kwargs: Any) -> Any:
    """torch.lstm by torch's own kernels, with results in autocast's dtype."""
    with native_kernels():
        outputs = torch.lstm(*args, **kwargs)
    device = outputs[0].device.type
    if not autocast_on(device):
        return outputs
    dtype = torch.get_autocast_dtype(device)
    return tuple(y if y.dtype == torch.float64 else y.to(dtype) for y in outputs)


@stands_in_for(torch.cond, lacks="no double backward, no forward mode")
def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """The chosen branch of torch.cond, in Python."""
    return (true_fn if pred else false_fn)(*operands)


@stands_in_for(
    private("torch._higher_order_ops.scan"),
    private("torch._higher_order_ops.map"),
    private("torch._higher_order_ops.while_loop"),
    name="scan, map, while_loop",
    lacks=f"tensors that their functions close over are constants{SILENT}; no double backward",
)
def scan(combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = (), **_: Any) -> Any:
    """The steps of a scan. A user's function returns (carry, row), a GraphModule one flat list."""
    # **_: torch 2.15 passes `mutated_arg_indices` to loops
    carry, rows = init, []
    for i in range(len(xs[0])):
        found = combine_fn(*carry, *(x[i] for x in xs), *additional_inputs)
        nested = len(found) == 2 and not isinstance(combine_fn, torch.fx.GraphModule)
        own, row = found if nested else (found[: len(init)], found[len(init) :])
        carry = pytree.leaves(own)
        rows.append(row)
    stacked = _stack_rows(rows)
    return (own, stacked) if nested else [*carry, *stacked]


def map_rows(f: Any, xs: Any, pos_args: Any = (), **_: Any) -> Any:
    """f of each row, stacked."""
    return _stack_rows([f(*(x[i] for x in xs), *pos_args) for i in range(len(xs[0]))])


def while_loop(
    cond_fn: Any, body_fn: Any, carried: Any, additional_inputs: Any = (), **_: Any
) -> Any:
    """torch's while_loop, in Python."""
    while cond_fn(*carried, *additional_inputs):
        carried = body_fn(*carried, *additional_inputs)
    return carried


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_tensors: tuple[Any, ...] = (),
    mask_tensors: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors: softmax(score_mod(scale Q K^T)) V over the positions that block_mask
    allows; the logsumexp of the scores in each row, and the largest score, both in units of ln 2.

    If neither score_mod nor the last two results are needed, scaled_dot_product_attention computes the
    first by blocks, and the last two are empty.
    """
    shape, device = (*query.shape[:3], key.shape[-2]), query.device
    places = [torch.arange(n, device=device) for n in shape]
    allowed = None
    with _TensorIndices():
        if not _is_torchs(block_mask[-1], "noop_mask"):
            allowed = _over_places(block_mask[-1], (), mask_tensors)(*places, *mask_tensors)
        sums = kernel_options.get("OUTPUT_LOGSUMEXP") or kernel_options.get("OUTPUT_MAX")
        if _is_torchs(score_mod, "_identity") and not sums:
            found = ops.scaled_dot_product_attention(
                query, key, value, allowed, scale=scale, enable_gqa=True
            )
            return found, query.new_empty(0), query.new_empty(0)
        dtype = query.dtype if query.dtype == torch.float64 else torch.float32
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = scale * (query.to(dtype) @ k.to(dtype).mT)
        scores = _over_places(score_mod, (0,), score_tensors)(scores, *places, *score_tensors)
    seen = scores > -math.inf if allowed is None else allowed & (scores > -math.inf)
    scores = scores.masked_fill(~seen, 0.0)  # derivatives by masked scores are zero
    found = softmax_of(scores, seen, None).to(query.dtype) @ v.to(query.dtype)
    none = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | none), -math.inf)
    sums, largest = scores.logsumexp(-1), scores.detach().amax(-1)
    return found, *(x.masked_fill(none[..., 0], -math.inf) / math.log(2) for x in (sums, largest))


def _is_torchs(function: Any, name: str) -> bool:
    """Whether a function is flex_attention's default of this name, which does nothing."""
    home = "torch.nn.attention.flex_attention"
    return getattr(function, "__module__", "") == home and function.__name__ == name


def _over_places(function: Any, before: tuple[int, ...], after: tuple[Any, ...]) -> Any:
    """A function of one (batch, head, row, column), mapped over all positions by vmap."""
    for own in reversed(range(4)):
        dims: list[int | None] = [None] * 4
        dims[own] = 0
        function = torch.vmap(function, in_dims=(*before, *dims, *[None] * len(after)))
    return function


class _TensorIndices(TorchFunctionMode):
    """Makes x[i, j] with batched indices a gather; torch would call .item() on them, which vmap
    refuses."""

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        index = pytree.leaves(args[1]) if func is Tensor.__getitem__ else []
        if any(isinstance(i, Tensor) for i in index) and all(
            isinstance(i, Tensor | int) for i in index
        ):
            return torch.ops.aten.index(args[0], [torch.as_tensor(i) for i in index])
        return func(*args, **(kwargs or {}))


def requires_grad(x: Tensor) -> bool:
    """x.requires_grad; False inside flex_attention's _validate_device, which refuses gradients on a
    CPU."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    if frame.f_code.co_name != "_validate_device":
        return x.requires_grad
    check = private("torch.nn.attention.flex_attention._validate_device")
    return x.requires_grad and frame.f_code is not check.__code__


def _stack_rows(rows: list[Any]) -> Any:
    structure = pytree.flatten(rows[0])[1]
    parts = zip(*map(pytree.leaves, rows), strict=True)
    return pytree.unflatten([torch.stack(part) for part in parts], structure)


# Higher-order operators, which Dynamo and exported programs call. Not in the table: with such a key in
# a dict that the mode reads, torch.compile could not trace the mode.
HIGHER_ORDER: dict[Any, Any] = {
    getattr(torch.ops.higher_order, name): function
    for name, function in {
        "cond": cond, "scan": scan, "map_impl": map_rows, "while_loop": while_loop,
        "flex_attention": flex_attention,
    }.items()
}  # fmt: skip

for _layer in (torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _lacks = "cuDNN's kernel has no double backward, torch's own has one"
    stands_in_for(_layer, lacks=_lacks, modes=("rr",), device="cuda")(native_kernels()(_layer))

_SERIES = ("airy", "bessel", "polynomial")
_CONSTANT = {name for name in vars(torch.special) if any(part in name for part in _SERIES)}
_BESSEL = {f"{kind}{n}" for kind in ("bessel_j", "bessel_y") for n in (0, 1)} | {
    f"modified_bessel_{kind}{n}" for kind in "ik" for n in (0, 1)
}
_IS_CONSTANT = f"torch takes the result for a constant{SILENT}"
_DEFINE = "Give it its derivatives, of bessel_j0 -bessel_j1, by `hoglib.ops.define`."
STAND_INS = (
    *TABLE.values(),
    StandIn("flex_attention", f"{NO_DOUBLE_BACKWARD}; on a CPU no backward", EVERY),
    StandIn(
        "sparse_coo_tensor",
        "its values get no second derivative",
        ("rr", "fr"),
        refuses=(torch.sparse_coo_tensor, torch.sparse_csr_tensor),
        instead="Build it from values that do not require grad, or multiply by index_select and "
        "index_add.",
    ),
    StandIn(
        "special.airy_ai, spherical_bessel_j0, hermite_polynomial_h",
        f"{_IS_CONSTANT}; so of scaled_modified_bessel_k0 and k1, and of all orthogonal polynomials",
        EVERY,
        refuses=tuple(getattr(torch.special, name) for name in sorted(_CONSTANT - _BESSEL)),
        instead=_DEFINE,
    ),
    StandIn(
        "special.bessel_j0, modified_bessel_k0",
        f"{_IS_CONSTANT}; so of bessel_y0, modified_bessel_i0, and those of order 1",
        EVERY,
        refuses=tuple(getattr(torch.special, name) for name in sorted(_BESSEL)),
        instead=_DEFINE,
        until=dict.fromkeys(EVERY, (2, 14)),
    ),
)


def _updates_nothing(running_mean: Tensor, running_var: Tensor, **given: Any) -> Tensor:
    """`torch.batch_norm` for an operator that returns new running statistics."""
    # None in train mode: torch_batch_norm then takes the batch's statistics, and writes none
    used = (None, None) if given["training"] else (running_mean, running_var)
    return torch_batch_norm(running_mean=used[0], running_var=used[1], **given)


def _in_layout_of_query(**given: Any) -> Tensor:
    """Attention in the memory layout of torch's operator: programs call view() on its result."""
    query, y = given["query"], ops.scaled_dot_product_attention(**given)
    # dimensions of the query by decreasing stride
    order = sorted(range(y.dim()), key=query.stride, reverse=True)
    return y.permute(order).contiguous().permute([order.index(d) for d in range(y.dim())])


# Operators that a replaced function calls: operator -> (the function, a stand-in for the operator's
# differentiable outputs, called with the operator's argument names, more arguments of the stand-in).
_BATCH_NORM = (torch.batch_norm, torch_batch_norm, dict.fromkeys(("running_mean", "running_var")))
_BENEATH: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
    "native_layer_norm": (torch.layer_norm, ops.layer_norm, {}),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_impl_index"), _BATCH_NORM
    ),
    "_batch_norm_with_update": (torch.batch_norm, torch_batch_norm, {"training": True}),
    "_native_batch_norm_legit_functional": (torch.batch_norm, _updates_nothing, {}),
    "_cdist_forward": (torch.cdist, ops.cdist, {}),
    "_euclidean_dist": (torch.cdist, ops.cdist, {}),
    "_pdist_forward": (torch.cdist, ops.pdist, {}),
    "_ctc_loss": (torch.ctc_loss, ops.ctc_loss, {"reduction": "none"}),
    "multilabel_margin_loss_forward": (F.multilabel_margin_loss, ops.multilabel_margin_loss, {}),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        (F.scaled_dot_product_attention, _in_layout_of_query, {}),
    ),
    "_embedding_bag": (torch.embedding_bag, torch_embedding_bag, {}),
    "_linalg_det": (torch.linalg.det, ops.det, {}),
    "_linalg_slogdet": (torch.linalg.slogdet, ops.slogdet, {}),
    "_linalg_solve_ex": (torch.linalg.solve, lambda **given: ops.solve_ex(**given)[0], {}),
}  # fmt: skip
_MODES = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist")
# Options with a string in Python functions, and an integer in operators: name -> strings by integer.
_WORDS = {"reduction": ("none", "mean", "sum"), "compute_mode": (*_MODES, f"donot_{_MODES[1]}")}


def by_operator(
    table: Mapping[Any, tuple[StandIn, Callable[..., Any]]],
) -> dict[Any, tuple[StandIn, Callable[..., Any]]]:
    """(row, stand-in) for torch's operators and C bindings, from the table of torch functions."""
    found: dict[Any, tuple[StandIn, Callable[..., Any]]] = {}
    # torch.* before torch.nn.functional.*: an operator has the arguments of the former
    for original in sorted(table, key=lambda original: type(original) is FunctionType):
        row, op = table[original]
        by_name = type(original) is FunctionType
        for called, operator in torch_library.callables(original.__name__):
            run = functools.partial(_run, operator, op, by_name, {})
            found.setdefault(called, (row, run))
    for name, (original, op, given) in _BENEATH.items():
        for called, operator in torch_library.callables(name) if original in table else ():
            row, run = table[original][0], functools.partial(_run, operator, op, True, given)
            found[called] = row, run
    return found


def _run(
    operator: object, op: Any, by_name: bool, given: dict[str, Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run the stand-in of an operator, with arguments in the operator's order, or by name. The operator
    itself computes the outputs that the stand-in does not return."""
    overload = torch_library.overload_of(operator, args, kwargs)
    positional = [a for a in overload._schema.arguments if not a.kwarg_only]
    named = dict(zip((a.name for a in positional), args, strict=False)) | kwargs
    if by_name:
        # operators call their first argument self, Python functions call it input
        named = {"input" if name == "self" else name: x for name, x in (given | named).items()}
        for name, words in _WORDS.items():
            if not isinstance(named.get(name, ""), str):
                named[name] = words[named[name] or 0]
        found = op(**named)
    else:
        # positional up to the last given argument, with defaults in the gaps
        last = max((k for k, a in enumerate(positional) if a.name in named), default=-1)
        values = [named.pop(a.name, a.default_value) for a in positional[: last + 1]]
        found = op(*values, **named)
    found = found if isinstance(found, tuple) else (found,)
    if len(found) < len(overload._schema.returns):
        # on copies: the stand-in has already updated running statistics
        copies = pytree.map_tensors(torch.clone, args)
        try:
            rest = overload(*copies, **kwargs)
        except NotImplementedError:  # no forward mode: compute these outputs as constants
            with torch.no_grad(), tangents_enabled(False):
                rest = overload(*copies, **kwargs)
        found = (*found, *rest[len(found) :])
    return found if len(found) > 1 else found[0]
