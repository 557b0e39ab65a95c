"""Other tensors in the places of a module's parameters and buffers, around anything that calls it.

`torch.func.functional_call` does this around one call, and puts a module's own parameters back when
the call returns. What backward runs again (a checkpointed block, a reversible layer, a solver that has
the module on ctx) would then find those, and differentiate by the wrong ones without an error: inside
`lingering()` the substitutes stay until derivatives have been taken.
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
RNN_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")  # a recurrent layer's, beside its places


class ModulePatch:
    """What stood in modules' places, so that it can be put back."""

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
        """Put back what stood in the places of one model, or everything."""
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
        """What stands in the places now."""
        return [(store, name, store[name]) for (_, name), (store, _) in self._was.items()]

    def in_use(self, model: nn.Module) -> bool:
        """Whether a module of this model runs with what stands in its places now."""
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

# Places that hold a substitute: the thread that put it there, and how often. Two threads at once
# in one
# model would each find the other's, and put it back for good.
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


_KEPT: ContextVar[ModulePatch | None] = ContextVar("lingering", default=None)


@contextmanager
def keep_swapped() -> Iterator[ModulePatch]:
    """Inside, a model keeps the parameters that it was called with until the next call, or the end."""
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
    """What stood in the places when a graph was made, for what its backward runs again."""
    before = [(store, name, store[name]) for store, name, _ in standing]
    try:
        for store, name, value in standing:
            store[name] = value
        yield
    finally:
        for store, name, value in before:
            store[name] = value


def use_batch_statistics(places: ModulePatch, layer: nn.Module) -> None:
    """A normalisation layer uses the batch's statistics and updates none, in train and eval mode."""
    if isinstance(layer, _NormBase) and layer.track_running_stats:
        for name, value in NO_RUNNING_STATISTICS.items():
            places.put(layer, name, value)


def train_mode_batch_statistics(places: ModulePatch, layer: nn.Module) -> None:
    """The same in train mode alone."""
    if layer.training:
        use_batch_statistics(places, layer)


@contextmanager
def swap_parameters(
    model: nn.Module,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    treat: NormPolicy = train_mode_batch_statistics,
) -> Iterator[None]:
    """The model with these parameters in the place of its own, whatever calls it inside.

    The model is left as it was: buffers that a forward changes are copies, and train-mode normalisation
    layers use the statistics of the batch and do not update their running averages, which torch could
    not do under functional transforms anyway. With `dtype`, the model's other floating-point parameters
    and buffers are in it too (complex ones in the complex one). `treat` puts into the places of each
    module what else is to stand there. Inside `lingering()` everything stays
    until the next substitution in the model; but one that is inside of another's ends with its block,
    so that the outer one goes on with its own.
    """
    lasting = _KEPT.get()
    if lasting is not None and not lasting.in_use(model):
        lasting.restore(model)
        with lasting.using(model):
            _substitute(lasting, model, params, dtype, treat)
            yield
        return
    places = ModulePatch()
    try:
        _substitute(places, model, params, dtype, treat)
        yield
    finally:
        places.restore()


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Train-mode normalisation layers without running statistics."""
    places = ModulePatch()
    try:
        for module in model.modules():
            train_mode_batch_statistics(places, module)
        yield
    finally:
        places.restore()


def _substitute(
    places: ModulePatch,
    model: nn.Module,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    treat: NormPolicy,
) -> None:
    """Parameters, and copies of the buffers, in every place in the model that holds one.

    What is shared is told by its identity: one tensor under two names gets one substitute, except in
    an embedding with max_norm, which changes its weight in place and so gets a copy.
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
            for name in RNN_WEIGHT_LISTS:  # which its forward makes anew
                if name in vars(module):
                    places.put(module, name, vars(module)[name])
        treat(places, module)


def _in_dtype(own: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not (own.is_floating_point() or own.is_complex()):
        return own
    return own.to(dtype.to_complex() if own.is_complex() else dtype)


# === Modules as pure functions of their parameters.

Params = dict[str, Tensor]


def call_with(model: nn.Module, params: Params, *args: Any, **kwargs: Any) -> Any:
    """The output of a model with these parameters in the place of its own; see `substituted`."""
    with swap_parameters(model, params):
        return model(*args, **kwargs)
