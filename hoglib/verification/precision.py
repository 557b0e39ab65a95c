"""Matrix products in full precision, modes that notice a loss of digits in float64 computations, and
the choice of the dtype in which a function is judged."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hoglib._core.messages import validation
from hoglib._core.numerics.element_differences import element_scales, max_abs, random_like
from hoglib._core.runtime import source_location
from hoglib._core.runtime.ambient import replaced
from hoglib._core.runtime.source_location import format_error
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.dispatch import Args, Kw, Op, Types
from hoglib._core.torch_api.mixed_precision import is_half
from hoglib._core.torch_api.pytree import is_float
from hoglib._core.torch_api.torch_internals import TorchDispatchMode, settable_precisions
from hoglib.verification.maps import Map, Tensors, at_leaves, grad, map_of, real

_BACKENDS: Any = torch.backends  # its members are made at run time
# Objects with a `fp32_precision`, in the order of setting.
_PRECISION_OWNERS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.mkldnn.matmul,
    _BACKENDS.mkldnn.conv,
    _BACKENDS.mkldnn.rnn,
    _BACKENDS.cudnn,  # before its older `allow_tf32`, which must agree with it
)
_REDUCED = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def exact_products() -> Iterator[None]:
    """Inside, float32 matrix products and convolutions are computed in float32, not in TF32 or less."""
    settings: list[tuple[Any, str, Any]] = [(_BACKENDS, "fp32_precision", "ieee")]
    settings += [(one, "fp32_precision", "ieee") for one in _PRECISION_OWNERS]
    settings += _cudnn_settings()
    settings += [(_BACKENDS.cuda.matmul, name, False) for name in _REDUCED]
    with settable_precisions(), replaced(settings):
        yield


def _cudnn_settings() -> list[tuple[Any, str, Any]]:
    """Settings of cuDNN. The older `allow_tf32` is set as well, because some code reads it (`with
    cudnn.flags(allow_tf32=...)`). Reading it raises if convolutions and RNNs were set separately."""
    cudnn = _BACKENDS.cudnn
    try:
        bool(cudnn.allow_tf32)
    except RuntimeError:
        return [(one, "fp32_precision", "ieee") for one in (cudnn.conv, cudnn.rnn)]
    return [(cudnn, "allow_tf32", False)]


DOUBLE = (torch.float64, torch.complex128)


@final
class PrecisionWatch(TorchFunctionMode):
    """Describes the first call of each of three kinds: it rounded float64 numbers (`rounded`), it mixed
    a tensor of lower precision into them, made inside the function (`met`) or outside (`foreign`).

    Not counted: constants that are exact in half precision (1, 0.5, a mask), and Python numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded = self.met = self.foreign = ""
        self._made: list[Tensor] = []  # narrow tensors that stem from no argument

    def __torch_function__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        given = [x for x in pytree.leaves((args, kwargs)) if is_float(x)]
        written = args[0] if name == "__setitem__" else result
        results = [y for y in pytree.leaves(written) if is_float(y)]
        if not given or any(self._is_made(x) for x in given):
            self._made += [y for y in results if y.dtype not in DOUBLE]
        if any(y.dtype in DOUBLE for y in results):
            narrow = [x for x in given if _loses_digits(x)]
            made = [x for x in narrow if x.ndim == 0 or self._is_made(x)]
            self.met = self.met or _describe_call(name, "got", made)
            self.foreign = self.foreign or _describe_call(name, "got", narrow)
        elif any(x.dtype in DOUBLE for x in given):
            lossy = [y for y in results if _loses_digits(y)]
            self.rounded = self.rounded or _describe_call(name, "rounded float64 numbers to", lossy)
        return result

    def _is_made(self, tensor: Tensor) -> bool:
        return any(tensor is other for other in self._made)


@final
class HalfWatch(TorchDispatchMode):
    """Finds the first operation that rounds its inputs to half precision, also inside backward and
    under autocast."""

    dtype: torch.dtype | None = None  # the half dtype
    where = ""  # the line of the operation

    def __torch_dispatch__(self, func: Op, types: Types, args: Args = (), kwargs: Kw = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.dtype is None:
            given = [x for x in pytree.leaves((args, kwargs or {})) if is_float(x)]
            found = [y for y in pytree.leaves(result) if is_float(y) and is_half(y) and y.numel()]
            if found and given:
                self.dtype = found[0].dtype
                self.where = str(source_location.torch_call_line() or "")
        return result


def _describe_call(name: str, did: str, culprits: list[Tensor]) -> str:
    if not culprits:
        return ""
    place = source_location.torch_call_line()
    at = f" at {place}" if place else ""
    return f"`{name}` {did} {validation.describe(culprits[0])}{at}"


def _loses_digits(tensor: Tensor) -> bool:
    """Whether a narrow tensor has digits beyond half precision, so that it is no mask or count."""
    if tensor.dtype in DOUBLE or tensor.layout is not torch.strided:
        return False
    values = real(tensor)
    mantissa, _ = torch.frexp(values.detach().double())
    return bool((values.isfinite() & ((mantissa * 2**11).frac() != 0)).any())


# The dtype to judge a function in: float64, unless fn refuses float64 or computes in less anyway.

LINE_POINTS = 6  # the points on the line are 1 to 5
# Bounds of second differences, in units of rounding, for a staircase of roundings: smaller ones are
# noise of float64, larger ones are a jump of the function itself.
STEP_SIZES = (1 / 60, 840.0)
NEGLIGIBLE = 1e-4  # relative to the largest element; smaller elements may be left by cancellation


class Precision(NamedTuple):
    """The precision in which a function is judged, if not in float64."""

    refused: str = ""  # why not in float64
    computes_narrow: bool = False  # computes in float32 or less, whatever dtype the inputs have
    half: torch.dtype | None = None  # the working dtype, if it is half precision


def choose_map(fn: Any, inputs: Sequence[Any], *, own_dtype: bool = False) -> tuple[Map, Precision]:
    """The map in float64. In the inputs' own dtypes if only with these the second derivative is
    reached; in float32 if fn computes in float32 anyway. Raises the error of fn if it does not run at
    all.

    Args:
        fn: The function, as for `verify`.
        inputs: Its arguments.
        own_dtype: Keep the dtypes of the inputs, because fn casts, or runs code other than torch's.
    """
    given = map_of(fn, inputs, None if own_dtype else torch.float64).scaled()
    validation.something_to_differentiate_by(given.names, given.point)
    if own_dtype:
        return _in_own_dtype(given.adapted(), "it is taken as it is given")
    with HalfWatch() as half, PrecisionWatch() as watch:
        f, reached, error = run_derivatives(given)
    # the error may come from float64: prefer the inputs' own dtypes if they get further
    own = given.in_dtype(None)
    given_double = any(x.dtype == torch.float64 for x in own.point)
    if error is not None and any(x.dtype != torch.float64 for x in own.point):
        own, further, _ = run_derivatives(own)
        if further > reached:
            return _in_own_dtype(own, format_error(error))
    if error is not None:
        if reached == 0:
            raise error
        return f, Precision()
    if (found := _in_half(f, half)) is not None:
        return f, found
    # a narrow tensor is a fault only if results show it: they move in steps, in float64 they do not
    met = watch.rounded or watch.met or watch.foreign
    if not (met and _moves_in_steps(f)):
        return f, Precision()
    narrow, as_far, _ = run_derivatives(f.in_dtype(torch.float32))
    if as_far < reached:
        return f, Precision()
    if given_double and not _second_derivatives_agree(f, narrow):
        # fn casts float64 inputs only, and the cast cuts its graph: judge it in float64
        return f, Precision()
    return narrow, Precision(f"it computes in float32: {met}", computes_narrow=True)


def _in_own_dtype(f: Map, why: str) -> tuple[Map, Precision]:
    """The map in the dtypes of its inputs. Half-precision inputs become float64 numbers that are
    rounded inside, because differences at half-precision points would see nothing but steps."""
    half = next((x.dtype for x in f.point if is_half(x)), None)
    if half is not None:
        return f.rounded(), Precision(why, half=half)
    return f, _in_half(f) or Precision(why)


def _in_half(f: Map, watch: HalfWatch | None = None) -> Precision | None:
    """The precision of a function that rounds to half precision, if its values or gradients show it;
    None if not. The inputs keep their dtype. watch: of an earlier run."""
    if watch is None:
        with HalfWatch() as watch:
            run_derivatives(f)
    if watch.dtype is None or not _moves_in_steps(f, torch.finfo(watch.dtype).eps):
        return None
    name = str(watch.dtype).removeprefix("torch.")
    at = f" at {watch.where}" if watch.where else ""
    return Precision(f"it computes in {name}{at}", computes_narrow=True, half=watch.dtype)


def run_derivatives(f: Map) -> tuple[Map, int, Exception | None]:
    """The adapted map; how far it gets (0: not even the values, 1: values, 2: first derivatives, 3:
    second derivatives); and the error that stopped it."""
    reached = 0
    try:
        f = f.adapted()
        reached = 1
        leaves, values = at_leaves(f.differentiable, f.point)
        grads = grad(values, leaves, create_graph=True, unhandled=True)
        reached = 2
        grad(grads, leaves)
    except Exception as error:
        return f, reached, error
    return f, 3, None


def _second_derivatives_agree(wide: Map, narrow: Map) -> bool:
    """Whether the second derivatives agree, apart from rounding in the narrow dtype."""
    found = []
    for f in (wide, narrow):
        leaves, values = at_leaves(f.differentiable, f.point)
        grads = grad(values, leaves, create_graph=True)
        random = torch.Generator().manual_seed(11)
        found.append(grad(grads, leaves, [random_like(g, random) for g in grads]))
    pairs = zip(*found, strict=True)
    least = 1e-6 * max(map(max_abs, found[0]), default=0.0)
    return all(max_abs(a - b) <= 0.03 * max(max_abs(a), max_abs(b)) + least for a, b in pairs)


def _moves_in_steps(f: Map, eps: float = torch.finfo(torch.float32).eps) -> bool:
    """Whether values or gradients move in steps of the size of eps, where float64 results are smooth.

    At points less than eps apart on a line, second differences of a smooth function are rounding noise.
    For a smooth function they grow fourfold with twice the distance, for a staircase they do not. The
    incoming gradients move, too: a backward may round only these.
    """
    random = torch.Generator().manual_seed(7)
    v = [random_like(x, random) * element_scales(x) * eps / 2 for x in f.point]

    def at(k: int) -> Map:
        return f.seeded().at([x + k * d for x, d in zip(f.point, v, strict=True)])

    try:
        ends = [_values_and_gradients(at(k), k * eps / 2) for k in range(1, LINE_POINTS)]
    except Exception:  # reported by the derivative checks
        return False
    for line in zip(*ends, strict=True):
        size = torch.stack([y.abs() for y in line]).amax(0)
        counts = size > NEGLIGIBLE * max(map(max_abs, line))
        near, far = _second_difference(line, 1), _second_difference(line, 2)
        least, most = eps * STEP_SIZES[0], min(eps * STEP_SIZES[1], 0.5)
        steps = (least * size < near) & (near < most * size) & (far < 2.5 * near)
        if bool((steps & counts).any()):
            return True
    return False


def _second_difference(line: Tensors, stride: int) -> Tensor:
    """The largest second difference of each element."""
    triples = zip(line, line[stride:], line[2 * stride :], strict=False)
    return torch.stack([(a - 2 * b + c).abs() for a, b, c in triples]).amax(0)


def _values_and_gradients(f: Map, moved: float) -> list[Tensor]:
    """Values and gradients, in float64, at a point of the line. moved: the relative move of the
    incoming gradients."""
    leaves, values = at_leaves(f.differentiable, f.point)
    random = torch.Generator().manual_seed(8)  # not ones: they give a softmax the gradient zero
    # pairs: the incoming gradient, and its direction
    incoming = [(random_like(y, random), random_like(y, random)) for y in values]
    grads = grad(values, leaves, [u * (1 + moved * r) for u, r in incoming])
    return [t.detach().double() for t in (*values, *grads)]
