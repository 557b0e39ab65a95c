"""Matrix products in full precision, and modes that notice where float64 numbers lose digits."""

from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hoglib._core import pytree, source_location, validation
from hoglib._core.mixed_precision import is_half
from hoglib._core.pytree import is_float
from hoglib._core.state import preserve_settings

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
