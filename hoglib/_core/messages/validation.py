"""Checks of arguments. Every message states the expected value, the passed value, and the remedy."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from inspect import getfullargspec
from math import isfinite
from numbers import Integral, Number, Real
from textwrap import shorten
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hoglib import errors
from hoglib._core.messages.communication import tell_sharers
from hoglib._core.runtime.device_reads import read_late
from hoglib._core.torch_api import pytree, torch_internals

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def describe(value: object) -> str:
    """A tensor's dtype and shape, or another value's type and repr, for messages."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a {dtype} tensor of shape {tuple(value.shape)}"
    text, name = " ".join(repr(value).split()), type(value).__name__
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.startswith(name) else f"{name} {text}"  # a repr may have the type


def short_repr(kind: type[T]) -> type[T]:
    """Give a NamedTuple class a repr with a description in place of more than ten numbers."""

    def text(self: Any) -> str:
        parts = [f"{name}={shortened(x)}" for name, x in zip(self._fields, self, strict=True)]
        return f"{kind.__name__}({', '.join(parts)})"

    kind.__repr__ = text  # type: ignore[method-assign]
    return kind


def shortened(value: object) -> str:
    """The repr of a value; a description of more than ten numbers."""
    count = sum(x.numel() for x in pytree.tensors(value))
    if count <= 10:
        return shorten(repr(value), 200)
    several = f"{type(value).__name__} of {count:,} numbers"
    return f"<{describe(value) if isinstance(value, Tensor) else several}>"


def package(name: str, caller: str, install: str) -> Any:
    """Import an optional package, or a module of one."""
    try:
        return import_module(name)
    except ImportError as error:
        raise errors.MissingDependencyError(
            f"{caller}: expected the package {name.partition('.')[0]} to be installed, and it is not; "
            f"{install}."
        ) from error


def tensor(what: str, value: object, advice: str = "make one with `torch.as_tensor`") -> Tensor:
    if not isinstance(value, Tensor):
        raise errors.ArgumentTypeError(
            f"{what}: expected a torch.Tensor, got {describe(value)}; {advice}."
        )
    return value


def differentiable(what: str, value: Any) -> Tensor:
    """Checks for a tensor of a floating-point or complex dtype."""
    tensor(what, value)
    if not (value.is_floating_point() or value.is_complex()):
        raise errors.ArgumentTypeError(
            f"{what}: expected a floating-point or complex tensor, got {describe(value)}, which has "
            f"no derivatives; convert it first, for instance with "
            f"`{what if what.isidentifier() else ''}.float()`."
        )
    return value


def real(what: str, value: Any) -> Tensor:
    """Checks for a tensor of a real floating-point dtype, for functions that compare values."""
    differentiable(what, value)
    if value.is_complex():
        raise errors.ArgumentTypeError(
            f"{what}: expected a real floating-point tensor, got {describe(value)}. Apply it to the "
            f"real and imaginary parts, `torch.view_as_real({what})`; of a module by "
            "torch.nn.utils.parametrize, `register_parametrization(module, name, P())`, "
            "P a module with forward = torch.complex and right_inverse = lambda p: (p.real, p.imag)."
        )
    return value


def number(what: str, value: object, *, minimum: float | None = None) -> float:
    """Checks for a real Python number of at least `minimum`, not NaN. An int stays an int."""
    if isinstance(value, bool) or not isinstance(value, Real):
        advice = "; take one out of a tensor with `.item()`" if isinstance(value, Tensor) else ""
        text = f"{what}: expected a real Python number, got {describe(value)}{advice}."
        raise errors.ArgumentTypeError(text)
    result = int(value) if isinstance(value, Integral) else float(value)
    if result != result or (minimum is not None and result < minimum):
        bound = "" if minimum is None else f" of at least {minimum:g}"
        raise errors.ArgumentValueError(f"{what}: expected a number{bound}, got {value}.")
    return result


def fraction(what: str, value: object, *, below_one: bool = False, usual: object = None) -> float:
    """Checks for a real Python number from 0 to 1, or to less than 1. `usual` is named in the error."""
    result = number(what, value)
    if not 0 <= result <= 1 or (below_one and result == 1):
        bound = "less than 1" if below_one else "1"
        hint = "" if usual is None else f"; {usual:g} is usual"
        text = f"{what}: expected a number from 0 to {bound}, got {value}{hint}."
        raise errors.ArgumentValueError(text)
    return result


def tensor_or_number(what: str, value: object) -> None:
    """Checks for a differentiable tensor, or a Python number, which is a constant."""
    if isinstance(value, Tensor):
        differentiable(what, value)
    elif isinstance(value, bool) or not isinstance(value, Number):
        raise errors.ArgumentTypeError(
            f"{what}: expected a tensor or a Python number, got {describe(value)}; "
            f"make it a tensor, for instance with `torch.as_tensor({what})`."
        )


def dim(what: str, value: object, rank: int) -> int:
    """A dimension of a tensor with `rank` dimensions, counted from 0; rank 0 has dimension 0, as in
    torch."""
    extent, number = max(rank, 1), integer(what, value)
    if not -extent <= number < extent:
        raise errors.ArgumentIndexError(
            f"{what}: expected a dimension from {-extent} to {extent - 1}, got {number}; "
            f"the tensor has {rank} dimensions."
        )
    return number % extent


def dims(what: str, value: Any, rank: int) -> tuple[int, ...]:
    """One or several dimensions, sorted; None and an empty tuple mean all dimensions, as in torch."""
    several = value is None or isinstance(value, tuple | list)
    result = {dim(what, entry, rank) for entry in ((value or ()) if several else (value,))}
    if several and value and len(result) < len(value):
        text = f"{what}: expected each dimension once, got {describe(value)}."
        raise errors.ArgumentValueError(text)
    return tuple(sorted(result)) if result else tuple(range(max(rank, 1)))


def positive(what: str, value: object) -> float:
    """Checks for a finite real number greater than zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        text = f"{what}: expected a positive number, got {describe(value)}."
        raise errors.ArgumentTypeError(text)
    number = float(value)
    if not (isfinite(number) and number > 0):
        raise errors.ArgumentValueError(
            f"{what}: expected a finite number greater than 0, got {value}; a step of that size "
            f"cannot learn. Typical values are 0.001 to 0.1."
        )
    return number


def integer(what: str, value: object) -> int:
    """Checks for an integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise errors.ArgumentTypeError(f"{what}: expected an integer, got {describe(value)}.")
    return int(value)


def at_least(what: str, value: Any, minimum: int) -> int:
    """Checks for an integer of at least `minimum`."""
    if integer(what, value) < minimum:
        raise errors.ArgumentValueError(
            f"{what}: expected an integer of at least {minimum}, got {value}; "
            f"set {what} to {minimum} or more."
        )
    return int(value)


def none_or_at_least(what: str, value: object, minimum: int) -> int | None:
    return None if value is None else at_least(what, value, minimum)


# torch.compile's compiler; the captured graph, not compiled; torch.compile's modes
BACKENDS = ("inductor", "eager", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def backend(name: str, value: object) -> str:
    """The backend that an option compile= names; "" if it is False."""
    if isinstance(value, str):
        return choice(name, value, BACKENDS)
    return "inductor" if boolean(name, value) else ""


def choice(what: str, value: object, options: Iterable[str], hint: str = "") -> str:
    known = list(options)
    if value not in known:
        text = f"{what}: expected one of {', '.join(known)}; got {value!r}.{hint}"
        raise errors.ArgumentValueError(text)
    return str(value)


def boolean(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise errors.ArgumentTypeError(f"{what}: expected True or False, got {describe(value)}.")
    return value


def generator(value: object) -> torch.Generator | None:
    """Checks for a torch.Generator, or None for the default generator."""
    if value is not None and not isinstance(value, torch.Generator):
        raise errors.ArgumentTypeError(
            f"generator: expected a torch.Generator or None, got {describe(value)}; make one with "
            "`torch.Generator().manual_seed(0)`."
        )
    return value


def function(what: str, value: object) -> Any:
    if not callable(value):
        text = f"{what}: expected a function, got {describe(value)}; pass the callable itself."
        raise errors.ArgumentTypeError(text)
    return value


def loss_function(what: str, value: object) -> Any:
    """Checks for a function of (params, batch)."""
    if isinstance(value, nn.Module):
        raise errors.ArgumentTypeError(
            f"{what}: expected a function (params, batch) -> scalar, got the module "
            f"{type(value).__name__}; make one with `hoglib.functional_loss(model, criterion)`."
        )
    return function(what, value)


def not_the_model(what: str, value: object, params: object) -> None:
    """Checks that a function of params is not the module that has these params."""
    if isinstance(value, nn.Module) and isinstance(params, Mapping):
        names = {name for name, _ in value.named_parameters(remove_duplicate=False)}
        if params.keys() <= names:
            loss_function(what, value)


def something_to_differentiate_by(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Checks for at least one tensor, and that no tensor is empty."""
    if not tensors:
        raise errors.ArgumentValueError(
            "inputs: expected at least one floating-point or complex tensor, got none; there is "
            "nothing to differentiate by. Make tensors of arrays by `torch.as_tensor`."
        )
    for name, x in zip(names, tensors, strict=True):
        if not x.numel():
            raise errors.ArgumentValueError(
                f"{name}: expected at least one element, got shape {tuple(x.shape)}; there is "
                "nothing to differentiate by. Give it a size."
            )


def parameters(params: object, what: str = "params") -> tuple[list[Tensor], Any]:
    """Leaves and structure of a pytree of at least one tensor, all floating-point or complex."""
    if isinstance(params, Iterator | nn.Module):
        named_tensors(what, params)
    leaves, structure = pytree.flatten(params)
    if not leaves:
        raise errors.ArgumentValueError(
            f"{what}: expected at least one tensor, got none; a model whose parameters are all "
            "frozen has nothing to differentiate: call requires_grad_(True) on what should learn."
        )
    for x in leaves:
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
            continue
        # only for the message: paths are slow
        for name, leaf in zip(pytree.paths(params), leaves, strict=True):
            if not isinstance(leaf, Tensor):
                advice = (
                    "`hoglib.trainable_params(model)` returns a dict of a model's own, and "
                    '`hoglib.trainable_params(model, "head.*")` those with such names'
                )
                number = isinstance(leaf, Number) or hasattr(leaf, "__array__")
                tensor(leaf_name(what, name), leaf, *([] if number else [advice]))
            differentiable(leaf_name(what, name), leaf)
    return leaves, structure


def named_tensors(what: str, params: object) -> None:
    """Raise unless params is a dict."""
    if not isinstance(params, dict):
        raise errors.ArgumentTypeError(
            f"{what}: expected a dict of tensors by qualified name, got {describe(params)}. Make one "
            "with `hoglib.trainable_params(model)`."
        )


def other_structure(
    what: str, tree: object, params: object, leaf: str = "...", like: str = "params"
) -> errors.ArgumentValueError:
    """The error for a tree with a structure unlike params; `leaf` describes an expected leaf."""
    names, came = pytree.paths(params), pytree.paths(tree)
    missing = [name for name in names if name and name not in set(came)]
    extra = sorted(set(came) - {*names, ""})
    return errors.ArgumentValueError(
        f"{what}: expected the structure of {like} ({type(params).__name__} of {len(names)}), got "
        f"another one ({type(tree).__name__} of {len(came)})"
        + (f"; missing: {listing(missing)}" if missing else "")
        + (f"; not in {like}: {listing(extra)}" if extra else "")
        + f". Build {what} from {like}, "
        + (
            f"for instance `{{name: {leaf} for name, p in {like}.items()}}`."
            if isinstance(params, Mapping) or like == "params"
            else f"with {leaf} in the place of each tensor."
        )
    )


def _in_order_of(params: Any, tree: Any) -> Any:
    """The tree with its mappings in the types and key order of params: neither has to match."""
    if isinstance(tree, Mapping) and isinstance(params, Mapping) and tree.keys() == params.keys():
        same: Any = copy(params)
        for name, part in params.items():
            same[name] = _in_order_of(part, tree[name])
        return same
    alike = type(tree) is type(params) and isinstance(tree, tuple | list)
    if alike and len(tree) == len(params):
        make = getattr(tree, "_make", type(tree))  # a namedtuple is made by _make
        return make(map(_in_order_of, params, tree))
    return tree


def vectors(
    what: str,
    tree: object,
    params: object,
    like: str = "params",
    blocks: bool = True,
    flat: tuple[list[Tensor], Any] | None = None,
) -> tuple[list[Tensor], bool]:
    """The leaves of a vector with the structure of params, or of a block with a trailing dimension.

    Returns the leaves, and whether they are a block.
    like: The name of params in messages.
    blocks: Accept a block.
    flat: pytree.flatten(params), if the caller has computed it.
    """
    leaves, structure = pytree.flatten(tree)
    expected, expected_structure = flat or pytree.flatten(params)
    if structure != expected_structure:
        leaves, structure = pytree.flatten(_in_order_of(params, tree))
        if structure != expected_structure:
            raise other_structure(what, tree, params, "torch.randn_like(p)", like)
    first: Any = leaves[0]
    columns: Any = ()
    if blocks and isinstance(first, Tensor) and first.dim() == expected[0].dim() + 1:
        columns = first.shape[-1:]
    if _all_like(leaves, expected, columns) and 0 not in columns:
        return leaves, bool(columns)
    names = pytree.paths(params)  # only for messages: paths are slow
    for name, leaf, x in zip(names, leaves, expected, strict=True):
        where = leaf_name(what, name)
        tensor(where, leaf)
        if leaf.shape != (*x.shape, *columns):
            hint = (
                f"all leaves of a block have {columns[0]} columns, as the first."
                if columns
                else "it must have the shape of its parameter, or that and a trailing dimension for a "
                "block."
                if blocks
                else f"it must have the shape of its place in {like}."
            )
            text = f"{where}: expected {(*x.shape, *columns)}, got {tuple(leaf.shape)}; {hint}"
            raise errors.ArgumentValueError(text)
        if leaf.dtype != x.dtype:
            raise errors.ArgumentTypeError(
                f"{where}: expected {x.dtype} as in {like}, got {leaf.dtype}; "
                f"convert it with `.to({x.dtype})`."
            )
        if leaf.device != x.device:
            raise errors.ArgumentValueError(
                f"{where}: expected device {x.device} as in {like}, got {leaf.device}; "
                f"move it with `.to({str(x.device)!r})`."
            )
    raise errors.ArgumentValueError(f"{what}: expected at least one vector in the block, got none.")


def _all_like(leaves: list[Any], expected: list[Tensor], columns: Any) -> bool:
    """Whether leaves are tensors with the dtypes, devices and shapes (plus columns) of `expected`."""
    for leaf, like in zip(leaves, expected, strict=True):
        if not (
            isinstance(leaf, Tensor)
            and leaf.shape == ((*like.shape, *columns) if columns else like.shape)
            and leaf.dtype is like.dtype
            and leaf.device == like.device
        ):
            return False
    return True


def scalar(what: str, value: Any) -> Tensor:
    """Checks for a real floating-point tensor without dimensions."""
    if isinstance(value, Tensor):
        # else an active TorchFunctionMode intercepts each of the calls below
        with torch_internals.without_functions_seen():
            if value.dim() == 0 and value.is_floating_point():
                return value
    tensor(what, value, "return that tensor alone, with its graph, without `.item()`")
    if value.dim() != 0:
        how = "reduce it, for instance with `.mean()`"
        if value.numel() == 1:
            how = "take its one number with `.squeeze()`"
        raise errors.ArgumentValueError(
            f"{what}: expected a scalar, got {describe(value)}; {how}, or use a "
            "criterion with reduction='mean'."
        )
    text = f"{what}: expected a real floating-point scalar, got {describe(value)}."
    raise errors.ArgumentTypeError(text)


def finite(what: str, values: Tensor, advice: str, *, late: bool = False) -> Tensor:
    """Checks for NaN and infinity; the message names their first positions.

    late: Do not wait for a device. The check may then report the values of the previous call.
    """
    late = late and values.device.type != "cpu"
    if late:
        # of this call if it is the first call, else of an earlier call; None: still on the device
        found = read_late((what, values.shape), torch.isfinite(values.detach()).all())
        if found is None or found:
            return values
    bad = (~torch.isfinite(values.detach())).reshape(-1).nonzero().reshape(-1).tolist()
    if bad:
        which = f" at {listing([str(i) for i in bad])} of {values.numel()}" if values.dim() else ""
        raise errors.NonFiniteError(
            f"{what}: expected a finite number, got {values.reshape(-1)[bad[0]].item()}{which}. "
            f"{advice}"
        )
    if late:
        text = f"{what}: expected finite numbers, got others one call ago. {advice}"
        raise errors.NonFiniteError(text)
    return values


def of_eigenvalues(
    function: Callable[[Tensor], Tensor], values: Tensor, present: Tensor | None = None
) -> Tensor:
    """function(values), checked to be finite and to have the shape of values.

    present: Mask of the eigenvalues; where it is False the result is 0.
    """
    found = function(values)
    if not isinstance(found, Tensor) or found.shape != values.shape:
        raise errors.ArgumentValueError(
            f"function: expected a tensor of shape {tuple(values.shape)} for eigenvalues of that "
            f"shape, got {describe(found)}; apply it element by element."
        )
    found = found if present is None else torch.where(present, found, 0)
    bad = ~found.isfinite()
    if bool(bad.any()):
        raise errors.NonFiniteError(
            f"function: expected finite values, got {float(found[bad][0])} at the eigenvalue "
            f"{float(values[bad][0]):.3g}; clamp the eigenvalues, `lambda x: f(x.clamp(min=...))`, or "
            "add damping, `A.damped(...)`."
        )
    return found


def leaf_name(what: str, name: str) -> str:
    """A leaf's name for messages: ``params['w']``, ``primals[0]``."""
    return f"{what}{name}" if name.startswith("[") else f"{what}[{name!r}]" if name else what


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: a suggestion, or a full stop."""
    known = [*known]
    longer = [one for one in known if str(name).startswith(f"{one}_")]  # every_n_steps for every
    found = dict.fromkeys([*get_close_matches(str(name), known, n=1), *longer[:1]])
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else "."


OF_ONE = "; a single {} is a batch of one: `x[None]`"  # advice where a batch is expected
OF_PARTS = ("inputs", "batch", "data", "query")  # arguments that may be tuples of tensors


def as_one(name: str, more: Sequence[Any]) -> str:
    """The end of a sentence about arguments to be passed as one tuple."""
    several = ", ".join(["...", *("..." for _ in more)])
    return f"; pass the last {len(more) + 1} as one, `{name}=({several})`."


def explain_arguments(function: F) -> F:
    """A decorator: unexpected arguments raise an error with advice on the call."""
    form = getfullargspec(function)
    names, options = [name for name in form.args if name != "self"], form.kwonlyargs

    @wraps(function)
    def checked_call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except BaseException as error:
            entered = error.__traceback__ is None or error.__traceback__.tb_next is not None
            if entered or not isinstance(error, TypeError):
                tell_sharers(error, (args, keywords), keywords.get("processes"))
                raise
            reason = re.sub(r"^\S+ ", "", str(error))
        caller = function.__qualname__.removesuffix(".__init__").split(".")[-1]
        more = args[len(form.args) :]
        advice = next((did_you_mean(k, [*names, *options]) for k in keywords if k in reason), ".")
        if advice == "." and more and names[-1] in OF_PARTS and all(map(pytree.tensors, more)):
            advice = as_one(names[-1], more)
        by_name = f", and {listing(options) or 'options'} by name" if options or form.varkw else ""
        raise errors.ArgumentTypeError(
            f"{caller}: expected {', '.join(names)}{by_name}, got others ({reason}){advice}"
        )

    return cast(F, checked_call)


def listing(names: Sequence[str], limit: int = 5) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def refuse_transforms(caller: str, advice: str) -> None:
    """Raise inside torch.func transforms."""
    if torch_internals.transforms_active():
        raise errors.UnsupportedError(
            f"{caller}: expected a call outside of torch.func transforms, got one inside; {advice}"
        )


# torch raises RuntimeError for the arguments below, so these errors are RuntimeErrors, too.


class TorchValueError(errors.ArgumentValueError, RuntimeError):
    """An ArgumentValueError, for arguments on which torch raises RuntimeError."""


class TorchTypeError(errors.ArgumentTypeError, RuntimeError):
    """An ArgumentTypeError, for arguments on which torch raises RuntimeError."""


def torch_real(what: str, value: object) -> Tensor:
    """:func:`real`, for stand-ins of functions that raise RuntimeError for other dtypes."""
    try:
        return real(what, value)
    except errors.ArgumentTypeError as error:
        if not isinstance(value, Tensor):  # torch raises TypeError too
            raise
        raise TorchTypeError(str(error)) from None


def indices(what: str, value: Tensor, expected: str = "int64 or int32") -> None:
    if value.dtype not in (torch.int64, torch.int32):
        text = f"{what}: expected {expected}, got {describe(value)}; use `.long()`."
        raise TorchTypeError(text)


def same_dtype(like: str, other: Tensor, what: str, value: Tensor) -> None:
    """Checks that value.dtype is other.dtype; `like` is the name of `other`."""
    if value.dtype != other.dtype:
        raise TorchTypeError(
            f"{what}: expected {other.dtype} as in {like}, got {value.dtype}; convert one of them."
        )
