"""Matrix products in full precision, modes that notice where float64 numbers lose digits, and the dtype
in which a function is judged."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hoglib._core import pytree, source_location, validation
from hoglib._core.element_differences import element_scales, max_abs, random_like
from hoglib._core.mixed_precision import is_half
from hoglib._core.pytree import is_float
from hoglib._core.restoring import preserve_settings
from hoglib._core.source_location import format_error
from hoglib.verification import call as calls
from hoglib.verification.call import Call

_BACKENDS: Any = torch.backends  # its members are made at run time
_OPERATORS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
    _BACKENDS.mkldnn.rnn,
    _BACKENDS.cudnn,  # before its older setting, which has to agree with it
)
_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def exact_products() -> AbstractContextManager[None]:
    """Inside, float32 matrix products and convolutions are computed in float32, not in TF32 or less."""
    settings: list[tuple[Any, str, Any]] = [(_BACKENDS, "fp32_precision", "ieee")]
    settings += [(backend, "fp32_precision", "ieee") for backend in _OPERATORS]
    settings += _cudnn()
    settings += [(_BACKENDS.cuda.matmul, name, False) for name in _REDUCED]
    return preserve_settings(settings)


def _cudnn() -> list[tuple[Any, str, Any]]:
    """By the older setting, as some code reads it (`with cudnn.flags(allow_tf32=...)`), which raises
    where the newer ones were set by operator."""
    cudnn = _BACKENDS.cudnn
    try:
        bool(cudnn.allow_tf32)
    except RuntimeError:
        return [(backend, "fp32_precision", "ieee") for backend in (cudnn.conv, cudnn.rnn)]
    return [(cudnn, "allow_tf32", False)]


DOUBLE = (torch.float64, torch.complex128)
CASTS = ("to", "half", "bfloat16", "float", "type", "type_as")
RANDOM = ("rand", "normal", "bernoulli", "empty", "uniform", "exponential")
ONLY_SHAPE = ("view_as", "expand_as", "reshape_as", "type_as")


@final
class PrecisionWatch(TorchFunctionMode):
    """Describes the first call that rounded float64 numbers (`rounded`), the
    first that got a number of lower precision which was made inside (`met`), and the first that got one
    from elsewhere (`foreign`).

    A constant whose digits fit into half precision (1, 0.5, a mask) lost nothing; a Python number has
    no precision to judge.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded = self.met = self.foreign = ""
        self._made: list[Tensor] = []
        self._drawn: list[Tensor] = []  # random numbers: their last digits say nothing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        given = [x for x in pytree.leaves((args, kwargs)) if is_float(x)]
        written = args[0] if name == "__setitem__" else result
        results = [y for y in pytree.leaves(written) if is_float(y)]
        if name.startswith(RANDOM):
            self._drawn += results
        elif not given or any(self._is_made(x) for x in given):
            self._made += [y for y in results if y.dtype not in DOUBLE]
        given = [x for x in given if not any(x is y for y in self._drawn)]
        if name in ONLY_SHAPE:
            given = given[:1]
        if any(y.dtype in DOUBLE for y in results):
            narrow = [x for x in given if _loses_digits(x)]
            made = [x for x in narrow if x.ndim == 0 or self._is_made(x)]
            self.met = self.met or _described(name, "got", made)
            self.foreign = self.foreign or _described(name, "got", narrow)
        elif any(x.dtype in DOUBLE for x in given):
            lossy = [y for y in results if _loses_digits(y) or _cast(name, args, y)]
            self.rounded = self.rounded or _described(name, "rounded float64 numbers to", lossy)
        return result

    def _is_made(self, tensor: Tensor) -> bool:
        return any(tensor is other for other in self._made)


@final
class HalfWatch(TorchDispatchMode):
    """The first operation, if any, that rounds what it was given to half precision: also inside
    backward and under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None
        self.where = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.dtype is None:
            given = [x for x in pytree.leaves((args, kwargs or {})) if is_float(x)]
            found = [y for y in pytree.leaves(result) if is_float(y) and is_half(y) and y.numel()]
            if found and given:
                self.dtype = found[0].dtype
                self.where = str(source_location.torch_call_line() or "")
        return result


def _described(name: str, did: str, culprits: list[Tensor]) -> str:
    if not culprits:
        return ""
    place = source_location.torch_call_line()
    at = f" at {place}" if place else ""
    return f"`{name}` {did} {validation.describe(culprits[0])}{at}"


def _cast(name: str, args: Any, result: Tensor) -> bool:
    """Whether it is a conversion that lost digits, also to half precision."""
    if name not in CASTS or result.dtype in DOUBLE:
        return False
    before = args[0].detach()
    return before.shape == result.shape and not torch.equal(
        result.detach().to(before.dtype), before
    )


def _loses_digits(tensor: Tensor) -> bool:
    """Whether a narrow tensor has digits that half precision would lose: it is no mask or count."""
    if tensor.dtype in DOUBLE or tensor.layout is not torch.strided:
        return False
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    mantissa, _ = torch.frexp(values.detach().double())
    digits = (mantissa * 2**11).frac()
    return bool((values.isfinite() & (digits != 0)).any())


# In which dtype a function is judged: float64, unless it refuses that, or works in less anyway.

POINTS = 6
# In units of rounding. Noise of float64 numbers is far less; more is no rounding, but a step of the
# function.
NOISE = (1 / 60, 840.0)
LEAST = 1e-4  # of the largest element: less is what cancellation leaves


class Chosen(NamedTuple):
    """A call, and why it is not in float64."""

    call: Call
    refused: str = ""
    computes_narrow: bool = False  # it works in float32 or less, whatever it is given
    half: torch.dtype | None = None  # the dtype, if that is half precision


def call_for(fn: Any, inputs: Sequence[Any], *, in_own_dtype: bool = False) -> Chosen:
    """The call in float64; in its own dtypes if only these get as far as a second derivative; in
    float32 if it computes in float32 anyway. Raises its error if it does not run at all.

    Args:
        fn: What `verify` takes.
        inputs: Its arguments.
        in_own_dtype: Whether to leave the dtypes as they are, because it runs code that is not torch's.
    """
    call = Call(fn, inputs, None if in_own_dtype else torch.float64)
    validation.something_to_differentiate_by(call.names, call.point)
    if in_own_dtype:
        _run(call)
        return _in_half(call) or Chosen(call, "it runs code that is not torch's")
    reached, error = _reached(call)
    if error is not None and any(x.dtype != torch.float64 for x in Call(fn, inputs, None).point):
        own = Call(fn, inputs, None)
        if _reached(own)[0] > reached:
            return _in_half(own) or Chosen(own, format_error(error))
    if error is not None:
        if reached == 0:
            raise error
        return Chosen(call)
    if (half := _in_half(call)) is not None:
        return half
    watch = PrecisionWatch()
    with watch:
        _reached(call)
    met = watch.rounded or watch.met or watch.foreign or _returned_narrow(call)
    if not (met and _is_noisy(call)):
        return Chosen(call)
    narrow = Call(fn, inputs, torch.float32)
    narrow.clone, narrow.needs_graph = call.clone, call.needs_graph
    if _reached(narrow)[0] < reached:
        return Chosen(call)
    given_double = any(x.dtype == torch.float64 for x in Call(fn, inputs, None).point)
    if given_double and not _agree(call, narrow):
        return Chosen(call)  # a cast that copies, which it does in float64 only, cuts its graph
    return Chosen(narrow, f"it computes in float32: {met}", computes_narrow=True)


def _in_half(call: Call) -> Chosen | None:
    """The choice for what computes in half precision, if it rounds to that and its values or gradients
    show it; the inputs stay what they are, as all else may be of a higher precision."""
    if any(is_half(x) for x in call.point):
        return None
    watch = HalfWatch()
    with watch:
        _reached(call)
    if watch.dtype is None or not _is_noisy(call, torch.finfo(watch.dtype).eps):
        return None
    name = str(watch.dtype).removeprefix("torch.")
    at = f" at {watch.where}" if watch.where else ""
    return Chosen(call, f"it computes in {name}{at}", computes_narrow=True, half=watch.dtype)


def _returned_narrow(call: Call) -> str:
    """What it returns in less than float64; "" if nothing."""
    outputs = [y for y in call.run_with_grad() if is_float(y) and y.requires_grad]
    narrow = [y for y in map(calls.real, outputs) if y.dtype != torch.float64]
    return f"it returned {validation.describe(narrow[0])} for float64 inputs" if narrow else ""


def _reached(call: Call) -> tuple[int, Exception | None]:
    """How far it gets: 0 it does not run, 1 forward, 2 first derivative, 3 second; and its error."""
    reached = 0
    try:
        _run(call)
        reached = 1
        leaves, values = _fresh_run(call)
        grads = calls.watched_gradient(values, leaves)
        reached = 2
        calls.grad(grads, leaves, list(map(torch.ones_like, grads)))
    except Exception as error:
        return reached, error
    return 3, None


def _agree(wide: Call, narrow: Call) -> bool:
    """Whether the second derivatives are the same, but for digits."""
    found = []
    for call in (wide, narrow):
        leaves, values = _fresh_run(call)
        grads = calls.grad(values, leaves, list(map(torch.ones_like, values)), create_graph=True)
        random = torch.Generator().manual_seed(11)
        found.append(calls.grad(grads, leaves, [random_like(g, random) for g in grads]))
    pairs = zip(*found, strict=True)
    return all(max_abs(a - b) <= 0.03 * max(max_abs(a), max_abs(b)) + 1e-6 for a, b in pairs)


def _fresh_run(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in call.point]
    values = [calls.real(y) for y in call.leaves(*leaves) if is_float(y) and y.requires_grad]
    return leaves, values


def _run(call: Call) -> list[Any]:
    """Run it, on copies if it changes its inputs and says so, which autograd allows for no leaf; and
    note whether it runs on inputs that require grad only."""
    try:
        found = call.run_with_grad()
    except RuntimeError as error:
        if "in-place" not in str(error):
            raise
        call.clone = True
        found = call.run_with_grad()
    try:
        call.leaves(*(x.clone() for x in call.point))
    except RuntimeError as error:
        call.needs_graph = "require grad" in str(error)
    return found


def _is_noisy(call: Call, eps: float = torch.finfo(torch.float32).eps) -> bool:
    """Whether values or gradients move in steps of the size of eps, where float64 numbers are smooth.

    Along a line of points less than eps apart, second differences of a smooth function are rounding.
    They grow fourfold with twice the distance; those of a staircase do not. The incoming gradients move
    along a line, too: a backward may round these alone.
    """
    random = torch.Generator().manual_seed(7)
    v = [random_like(x, random) * element_scales(x) * eps / 2 for x in call.point]
    before, call.reseed = call.reseed, True
    try:
        ends = [_numbers(call, k, v, k * eps / 2) for k in range(1, POINTS)]
    except Exception:  # reported by the derivative checks
        return False
    finally:
        call.reseed = before
    for line in zip(*ends, strict=True):
        if not line[0].numel():
            continue
        size = torch.stack([y.abs() for y in line]).amax(0)
        counts = size > LEAST * max(map(max_abs, line))
        near, far = _bend(line, 1), _bend(line, 2)
        least, most = eps * NOISE[0], min(eps * NOISE[1], 0.5)
        steps = (least * size < near) & (near < most * size) & (far < 2.5 * near)
        if bool((steps & counts).any()):
            return True
    return False


def _bend(line: Sequence[Tensor], stride: int) -> Tensor:
    """The largest second difference of each element."""
    triples = zip(line, line[stride:], line[2 * stride :], strict=False)
    return torch.stack([(a - 2 * b + c).abs() for a, b, c in triples]).amax(0)


def _numbers(call: Call, k: int, v: Sequence[Tensor], moved: float) -> list[Tensor]:
    """Values and gradients at the point k of the line, in float64.

    moved: how far the incoming gradients are, relative to their elements.
    """
    leaves = [(x + k * d).requires_grad_() for x, d in zip(call.point, v, strict=True)]
    values = [calls.real(y) for y in call.leaves(*leaves) if is_float(y) and y.requires_grad]
    random = torch.Generator().manual_seed(8)  # not ones: the gradient of a softmax is zero then
    incoming = [(random_like(y, random), random_like(y, random)) for y in values]
    grads = calls.grad(values, leaves, [u * (1 + moved * r) for u, r in incoming])
    return [t.detach().double() for t in (*values, *grads)]
