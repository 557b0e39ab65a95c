"""Swaps the parameters and buffers of a module for other tensors, around any code that calls it.

`torch.func.functional_call` swaps around one call, and restores the module's own parameters when the
call returns. Code that backward runs again (a checkpointed block, a reversible layer, a solver with the
module on ctx) would then use these, and the derivative would be wrong without an error. Inside
`keep_swapped()`, parameters stay swapped until the derivatives have been taken.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hoglib._core.torch_internals import forward_mode_active, transforms_active
from hoglib.errors import UnsupportedError

NO_RUNNING_STATISTICS = {
    "track_running_stats": False, "running_mean": None, "running_var": None,
    "num_batches_tracked": None,
}  # fmt: skip
PatchState = list[tuple[dict[str, Any], str, Any]]
RNN_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")  # where an RNN repeats its parameters


class ModulePatch:
    """Replaces parameters, buffers and attributes of modules, and restores them."""

    def __init__(self) -> None:
        self._was: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._busy: list[nn.Module] = []

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        for store in (module._parameters, module._buffers, vars(module)):
            if name in store:
                if (id(store), name) not in self._was:
                    _claim(module, name, (id(store), name))
                    self._was[id(store), name] = store, store[name]
                store[name] = value
                return
        raise AttributeError(f"{type(module).__name__} has no {name}")

    def restore(self, model: nn.Module | None = None) -> None:
        """Restores what was replaced in one model, or in all."""
        ours = {
            id(store)
            for module in (() if model is None else model.modules())
            for store in (module._parameters, module._buffers, vars(module))
        }
        for (store_id, name), (store, value) in list(self._was.items()):
            if model is None or store_id in ours:
                store[name] = value
                del self._was[store_id, name]
                _release((store_id, name))

    def standing(self) -> PatchState:
        """The current values in the places that were replaced."""
        return [(store, name, store[name]) for (_, name), (store, _) in self._was.items()]

    def in_use(self, model: nn.Module) -> bool:
        """Whether a module of this model runs with replaced values now."""
        if not self._busy:
            return False
        ours = {id(module) for module in model.modules()}
        return any(id(module) in ours for busy in self._busy for module in busy.modules())

    @contextmanager
    def using(self, model: nn.Module) -> Iterator[None]:
        self._busy.append(model)
        try:
            yield
        finally:
            self._busy.pop()


NormPolicy = Callable[[ModulePatch, nn.Module], None]

# Places with a replaced value: the thread that replaced it, and how often. Of two threads in one model,
# each would save the value of the other one as the original.
_CLAIMED: dict[tuple[int, str], tuple[int, int]] = {}
_CLAIMING = threading.Lock()


def _claim(module: nn.Module, name: str, place: tuple[int, str]) -> None:
    me = threading.get_ident()
    with _CLAIMING:
        owner, times = _CLAIMED.get(place, (me, 0))
        if owner != me:
            raise UnsupportedError(
                f"{type(module).__name__}.{name}: expected one thread at a time to differentiate a "
                "model, got two; give each thread a copy.deepcopy of it."
            )
        _CLAIMED[place] = me, times + 1


def _release(place: tuple[int, str]) -> None:
    with _CLAIMING:
        owner, times = _CLAIMED[place]
        if times == 1:
            del _CLAIMED[place]
        else:
            _CLAIMED[place] = owner, times - 1


_KEPT: ContextVar[ModulePatch | None] = ContextVar("keep_swapped", default=None)


@contextmanager
def keep_swapped() -> Iterator[ModulePatch]:
    """Inside, a model keeps the parameters that it was called with until the next call or the end."""
    outer = _KEPT.get()
    if outer is not None:
        yield outer
        return
    places = ModulePatch()
    token = _KEPT.set(places)
    try:
        yield places
    finally:
        _KEPT.reset(token)
        places.restore()


@contextmanager
def restored(standing: PatchState) -> Iterator[None]:
    """Inside, places have the values of the time when a graph was built, for recomputation in
    backward."""
    before = [(store, name, store[name]) for store, name, _ in standing]
    try:
        for store, name, value in standing:
            store[name] = value
        yield
    finally:
        for store, name, value in before:
            store[name] = value


def use_batch_statistics(places: ModulePatch, layer: nn.Module) -> None:
    """Lets a normalisation layer use batch statistics and update none, in train and eval mode."""
    if isinstance(layer, _NormBase) and layer.track_running_stats:
        for name, value in NO_RUNNING_STATISTICS.items():
            places.put(layer, name, value)


def train_mode_batch_statistics(places: ModulePatch, layer: nn.Module) -> None:
    """Lets a normalisation layer in train mode use batch statistics and update none."""
    if layer.training:
        use_batch_statistics(places, layer)


@contextmanager
def swap_parameters(
    model: nn.Module,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    treat: NormPolicy = train_mode_batch_statistics,
) -> Iterator[None]:
    """Inside, the model has these parameters in the place of its own.

    The model is restored at the end. Buffers are copies, and normalisation layers in train mode use
    batch statistics and do not update their running averages, which torch cannot do under functional
    transforms. With `dtype`, the other floating-point parameters and buffers of the model are converted
    to it (complex ones to its complex dtype). `treat` may replace further values in each module. Inside
    `keep_swapped()`, everything stays swapped until the next swap in the model; but a swap inside
    another one of the same model ends with its block, so that the outer one continues with its own
    parameters.
    """
    kept = _KEPT.get()
    if kept is not None and not kept.in_use(model):
        kept.restore(model)
        with kept.using(model):
            _swap_in(kept, model, params, dtype, treat)
            yield
        return
    places = ModulePatch()
    try:
        _swap_in(places, model, params, dtype, treat)
        yield
    finally:
        places.restore()


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, normalisation layers in train mode use batch statistics and update none."""
    places = ModulePatch()
    try:
        for module in model.modules():
            train_mode_batch_statistics(places, module)
        yield
    finally:
        places.restore()


def _swap_in(
    places: ModulePatch,
    model: nn.Module,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    treat: NormPolicy,
) -> None:
    """Swaps parameters, and copies of buffers, into every place in the model that holds one.

    A tensor that is shared under two names is replaced by one tensor, except in an embedding with
    max_norm, which gets a copy because it changes its weight in place.
    """
    substitutes: dict[int, Tensor] = {}
    for name, value in params.items():
        path, _, own_name = name.rpartition(".")
        substitutes[id(getattr(model.get_submodule(path), own_name))] = value
    for prefix, module in model.named_modules():  # each module once, under its first name
        if isinstance(module, torch.jit.ScriptModule) and (
            transforms_active() or forward_mode_active()
        ):
            raise UnsupportedError(
                f"{type(model).__name__}: expected modules of Python in forward mode, "
                f"got {prefix or 'itself'}, which is scripted: torch gives zero for its second "
                "derivatives, without an error. Use the module that was scripted, or "
                "mode='reverse-over-reverse'."
            )
        shrinks = getattr(module, "max_norm", None) is not None
        for name, own in list(module._parameters.items()):
            if own is None:
                continue
            if id(own) not in substitutes:
                substitutes[id(own)] = _in_dtype(own, dtype)
            value = substitutes[id(own)]
            if value is not own or shrinks:
                places.put(module, name, value.clone() if shrinks else value)
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if id(buffer) not in substitutes:
                copy = _in_dtype(buffer, dtype)
                substitutes[id(buffer)] = buffer.clone() if copy is buffer else copy
            places.put(module, name, substitutes[id(buffer)])
        if isinstance(module, nn.RNNBase):
            for name in RNN_WEIGHT_LISTS:  # which its forward rebuilds
                if name in vars(module):
                    places.put(module, name, vars(module)[name])
        treat(places, module)


def _in_dtype(own: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not (own.is_floating_point() or own.is_complex()):
        return own
    return own.to(dtype.to_complex() if own.is_complex() else dtype)


Params = dict[str, Tensor]


def call_with(model: nn.Module, params: Params, *args: Any, **kwargs: Any) -> Any:
    """The output of a model with these parameters in the place of its own; see `swap_parameters`."""
    with swap_parameters(model, params):
        return model(*args, **kwargs)
