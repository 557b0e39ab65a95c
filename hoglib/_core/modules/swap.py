"""Swap a module's parameters for others, while anything calls the module.

``torch.func.functional_call`` swaps for one call, and restores the module's own parameters when the
call returns. Code that backward runs again (a checkpointed block, a reversible layer, a solver that
keeps the module on ctx) would then find these, and silently differentiate at a wrong point. Inside
:func:`keep_swapped` swapped parameters stay in the module until derivatives have been taken.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import call
from typing import Any, NamedTuple, final
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from hoglib._core.modules.module_kinds import NORMS
from hoglib._core.runtime.ambient import AMBIENT, Items, logical_thread, replaced
from hoglib._core.substrate.placement import any_sharded, full_tensor, refuse_sharded
from hoglib._core.torch_api.pytree import in_dtype
from hoglib._core.torch_api.torch_internals import (
    exchange_parametrized,
    forward_mode_active,
    is_compiled,
    transforms_active,
)
from hoglib._core.torch_api.torch_sharding import computed_dtypes, wrapped_attributes
from hoglib.errors import UnsupportedError

Params = dict[str, Tensor]
NormPolicy = Callable[["ModulePatch", nn.Module], None]  # replaces more than parameters in a module
PatchState = Items  # (dict of a module, name, value)
# attributes in which an RNN keeps its parameters for its kernels
RNN_WEIGHT_LISTS = ("_flat_weights", "_flat_weight_refs")
_NO_RUNNING_STATISTICS = {
    "track_running_stats": False,
    "running_mean": None,
    "running_var": None,
    "num_batches_tracked": None,
}


def train_mode_batch_statistics(patch: "ModulePatch", layer: nn.Module) -> None:
    """In train mode, a normalization layer uses the statistics of the batch, and updates none."""
    if getattr(layer, "training", False):
        use_batch_statistics(patch, layer)


def use_batch_statistics(patch: "ModulePatch", layer: nn.Module) -> None:
    """In either mode, a normalization layer uses the statistics of the batch, and updates none."""
    if isinstance(layer, NORMS) and layer.track_running_stats:
        for name, value in _NO_RUNNING_STATISTICS.items():
            patch.put(layer, name, value)


@final
class swap_parameters:  # noqa: N801 a context manager
    """Inside, the model has given parameters instead of its own.

    The model is unchanged afterwards. A forward changes copies of its buffers, and train-mode
    normalization layers use the statistics of the batch without updating their running averages, which
    torch could not update under functional transforms anyway. Inside :func:`keep_swapped` the
    parameters stay until the next swap of the model; but a swap nested in another swap of one model
    ends with its block, so that the outer one continues with its own parameters. A class, because each
    evaluation of a model enters one: contextlib's generators take several times as long.

    Args:
        model: The module; anything may call it inside.
        params: Tensors by qualified name; parameters without one stay.
        dtype: The dtype for the model's other floating-point parameters and buffers (its complex
            counterpart for complex ones). Default: unchanged.
        norm_policy: Called with the patch and each module; may put other values into the module.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
        norm_policy: NormPolicy = train_mode_batch_statistics,
    ) -> None:
        self._given = model, params, dtype, norm_policy

    def __enter__(self) -> None:
        model, patch = self._given[0], AMBIENT.kept_swapped
        if patch is None or patch.is_over or (patch.running and patch.in_use(model)):
            patch = ModulePatch()
            self._end: Callable[[], object] = patch.restore
        else:  # `keep_swapped` restores the parameters
            patch.running.append(model)
            self._end = patch.running.pop
        # a new cache, so that parametrize.cached() keeps no weights computed from other parameters
        self._parametrized = exchange_parametrized({})
        try:
            patch.swap(*self._given)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        exchange_parametrized(self._parametrized)
        self._end()


def call_with(model: nn.Module, params: Params, *args: Any, **kwargs: Any) -> Any:
    """model(*args, **kwargs) with given parameters, see :func:`swap_parameters`."""
    with swap_parameters(model, params):
        return model(*args, **kwargs)


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, train-mode normalization layers of the model have no running statistics."""
    patch = ModulePatch()
    try:
        for module in model.modules():
            train_mode_batch_statistics(patch, module)
        yield
    finally:
        patch.restore()


@final
class keep_swapped:  # noqa: N801 a context manager
    """Inside, a model keeps swapped parameters until its next swap, or the end of the block."""

    def __enter__(self) -> "ModulePatch":
        self._own: ModulePatch | None = None  # the patch that this exit restores; None if nested
        outer: ModulePatch | None = AMBIENT.kept_swapped
        if outer is not None:
            return outer
        self._own = AMBIENT.kept_swapped = ModulePatch()
        return self._own

    def __exit__(self, *raised: object) -> None:
        if self._own is not None:
            AMBIENT.kept_swapped = None
            # a later backward, which restores this ambient state, reads it
            self._own.is_over = True
            self._own.restore()


def reapply(patches: PatchState) -> AbstractContextManager[None]:
    """Inside, modules have the values saved by :meth:`ModulePatch.values`, for a later backward."""
    return replaced(patches)


class _Slots(NamedTuple):
    """The places of a model's parameters, for a swap that replaces only these: no buffers or
    attributes.

    Finding them takes a look at each module. Most models are differentiated many times; checking that a
    model has not changed takes a tenth of the time. A _Slots keeps no model alive.

    names: The qualified names of the given parameters.
    modules: All submodules.
    seen: `_structure_of` the modules.
    own: `_own_of` the modules: modules may share parameters.
    slots: (index of a module, name in the module, qualified name) of each parameter to be swapped.
    """

    names: tuple[str, ...]
    modules: list["ref[nn.Module]"]
    seen: list[Any]
    own: list[Any]
    slots: list[tuple[int, str, str]]

    def if_unchanged(self, names: tuple[str, ...], swapped: bool) -> "list[_Slot] | None":
        """The slots; None if the model has changed.

        swapped: The model has swapped parameters now, so its own cannot be compared.
        """
        if names != self.names:
            return None
        modules: list[Any] = [*map(call, self.modules)]  # None for a deleted module
        if _structure_of(modules) != self.seen or not (swapped or _own_of(modules) == self.own):
            return None
        slots = []
        for i, own_name, name in self.slots:
            slots.append((modules[i]._parameters, own_name, name))
        return slots


# Modules in which a swap may replace more than parameters, see `_has_more`.
_MAY_HAVE_MORE = (NORMS, DistributedDataParallel, nn.RNNBase, torch.jit.ScriptModule)


def _has_more(module: Any) -> bool:
    # norms only if they have running statistics
    return not isinstance(module, NORMS) or module.track_running_stats


def _structure_of(modules: Sequence[Any]) -> list[Any] | None:
    """The class of each module (fully_shard changes it), and the names and ids of its submodules. None
    if a swap has more to replace than parameters, or if there are hooks, which may be fully_shard's."""
    found: list[Any] = []
    for module in modules:
        if (
            module is None
            or (isinstance(module, _MAY_HAVE_MORE) and _has_more(module))
            or (module._buffers and any(buffer is not None for buffer in module._buffers.values()))
            or module._forward_pre_hooks
            or module._forward_hooks
            or vars(module).get("max_norm") is not None
        ):
            return None
        parts = module._modules
        found.append(type(module))
        found += parts.keys()
        found += map(id, parts.values())
    return found


def _own_of(modules: Sequence[nn.Module]) -> list[Any]:
    """The names and ids of the parameters of each module."""
    found: list[Any] = []
    for module in modules:
        found += module._parameters.keys()
        found += map(id, module._parameters.values())
    return found


_Slot = tuple[dict[str, Any], str, str]  # (dict of a module, name in the module, qualified name)
# id of a model that was differentiated -> its slots, until the model is deleted. Not a
# WeakKeyDictionary, because a model may not be hashable.
_SLOTS: dict[int, _Slots] = {}


@final
class ModulePatch:
    """Records the values that it replaces in modules, and restores them.

    Attributes:
        running: The models that swaps inside `keep_swapped` run now, the innermost last.
        is_over: True after the exit of the `keep_swapped` that made this patch.
    """

    def __init__(self) -> None:
        # (id of a module's dict, name) -> (the dict, the value before)
        self._originals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self.running: list[nn.Module] = []
        self.is_over = False
        self._last: _Slots | None = None  # slots of the last swap

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Replace a parameter, a buffer or an attribute of a module."""
        for store in (module._parameters, module._buffers, vars(module)):
            if name in store:
                self._claim(module, [(store, name, name)])
                store[name] = value
                return
        raise AttributeError(f"{type(module).__name__} has no {name}")

    def swap(
        self, model: nn.Module, params: Params, dtype: torch.dtype | None, norm_policy: NormPolicy
    ) -> None:
        """Replace the model's parameters, its own or those of the last swap."""
        plain, names = dtype is None and norm_policy is train_mode_batch_statistics, tuple(params)
        known = _SLOTS.get(id(model)) if plain else None
        # the last swap filled these slots, so refilling them needs no restore
        again = known is not None and self._last is known
        if not again and (self._originals or self._last is not None):
            self.restore(model)
        slots = None if known is None else known.if_unchanged(names, again)
        if known is not None and slots is not None:
            if any_sharded(params.values()):
                refuse_sharded(type(model).__name__, params.values())
            self._claim(model, slots)
            for store, own_name, name in slots:
                store[own_name] = params[name]
            self._last = known
            return
        if again:
            self.restore(model)
        found = _patch_model(self, model, params, dtype, norm_policy)
        if plain and found is not None:
            if id(model) not in _SLOTS:
                finalize(model, _SLOTS.pop, id(model), None)
            _SLOTS[id(model)] = self._last = found

    def _claim(self, module: nn.Module, slots: Sequence[_Slot]) -> None:
        """Record the values to be replaced; raise if another thread has replaced one of them."""
        this = AMBIENT.in_place_of or threading.get_ident()  # `logical_thread`
        with _CLAIMING:
            for store, own_name, name in slots:
                key = id(store), own_name
                if key in self._originals:
                    continue
                owner, times = _CLAIMED.get(key, (this, 0))
                if owner != this:
                    raise UnsupportedError(
                        f"{type(module).__name__}.{name}: expected one thread at a time to "
                        "differentiate a model, got two; give each thread a copy.deepcopy of it."
                    )
                _CLAIMED[key] = this, times + 1
                self._originals[key] = store, store[own_name]

    def restore(self, model: nn.Module | None = None) -> None:
        """Restore the values of one model, or of all."""
        self._last = None
        if not self._originals:
            return
        own: set[int] = set()  # ids of the model's dicts
        for module in () if model is None else model.modules():
            own |= {id(module._parameters), id(module._buffers), id(vars(module))}
        with _CLAIMING:
            for key, (store, value) in list(self._originals.items()):
                if model is None or key[0] in own:
                    store[key[1]] = value
                    del self._originals[key]
                    owner, times = _CLAIMED[key]
                    if times == 1:
                        del _CLAIMED[key]
                    else:
                        _CLAIMED[key] = owner, times - 1

    def values(self) -> PatchState:
        """The present values of everything that was replaced."""
        return [(store, name, store[name]) for (_, name), (store, _) in self._originals.items()]

    def in_use(self, model: nn.Module) -> bool:
        """Whether the model shares a module with a model that runs with swapped parameters now."""
        own = {id(module) for module in model.modules()}
        return any(id(module) in own for running in self.running for module in running.modules())


def _patch_model(
    patch: ModulePatch, model: nn.Module, params: Params, dtype: Any, norm_policy: NormPolicy
) -> _Slots | None:
    """Replace parameters, and buffers by copies, in all modules that hold them.

    Modules that share a tensor share its replacement, except an embedding with max_norm, which changes
    its weight in place and so gets a copy.

    Returns the slots of the parameters, or None if a later swap has more to replace.
    """
    refuse_sharded(type(model).__name__, list(params.values()))
    replacements: dict[int, Tensor] = {}  # by id of the module's own tensor
    names: dict[int, str] = {}  # id of an own parameter -> its qualified name
    for name, value in params.items():
        path, _, own_name = name.rpartition(".")
        own_id = id(getattr(model.get_submodule(path), own_name))
        replacements[own_id], names[own_id] = value, name
    given = list(replacements.items())
    slots: list[tuple[int, str, str]] = []
    every = [*model.modules()]
    seen, owned = _structure_of(every), _own_of(every)  # before anything is replaced
    parameters_alone = len(names) == len(params)
    computed_in: dict[int, torch.dtype] = {}  # id of a parameter -> dtype of fully_shard's policy
    for k, (prefix, module) in enumerate(model.named_modules()):  # each once, under its first name
        if isinstance(module, DistributedDataParallel) and not _reaches_parameters(given):
            for name in ("require_backward_grad_sync", "require_forward_param_sync"):
                patch.put(module, name, False)  # DDP would wait for gradients that never arrive
        for name, attribute in wrapped_attributes(module, mixed_precision=dtype is None).items():
            patch.put(module, name, attribute)
        if dtype is None:
            computed_in.update(computed_dtypes(module))
        scripted = AMBIENT.stand_ins is None and isinstance(module, torch.jit.ScriptModule)
        if scripted and (transforms_active() or forward_mode_active()):
            raise UnsupportedError(
                f"{type(model).__name__}: expected modules of Python in forward mode, got "
                f"{prefix or 'itself'}, which is scripted: torch silently gives zero for its second "
                "derivatives. Use the module that was scripted, or mode='reverse-over-reverse'."
            )
        renormalized = getattr(module, "max_norm", None) is not None
        for name, own in list(module._parameters.items()):
            if own is None:
                continue
            if id(own) not in replacements:
                full = full_tensor(own)
                replacements[id(own)] = full if dtype is None else in_dtype(full, dtype)
            value = replacements[id(own)]
            if id(own) in computed_in:
                value = value.to(computed_in[id(own)])
            if value is not own or renormalized:
                patch.put(module, name, value.clone() if renormalized else value)
            if id(own) in names:
                slots.append((k, name, names[id(own)]))
            elif value is not own:  # a DTensor, replaced by its whole tensor
                parameters_alone = False
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if id(buffer) not in replacements:
                converted = buffer if dtype is None else in_dtype(buffer, dtype)
                replacements[id(buffer)] = buffer.clone() if converted is buffer else converted
            patch.put(module, name, replacements[id(buffer)])
        if isinstance(module, nn.RNNBase):
            for name in RNN_WEIGHT_LISTS:  # the RNN fills them again when its parameters change
                if name in vars(module):
                    patch.put(module, name, vars(module)[name])
        norm_policy(patch, module)
    if not parameters_alone or computed_in or seen is None:
        return None
    return _Slots(tuple(params), [*map(ref, every)], seen, owned, slots)


def _reaches_parameters(given: Sequence[tuple[int, Tensor]]) -> bool:
    """Whether a backward may reach the model's own parameters: None is replaced, or one is given, or a
    given tensor has a graph."""
    return not given or any(i == id(x) or x.grad_fn is not None for i, x in given)


# (id of a module's dict, name) -> (thread that replaced the value, number of its patches). If two
# threads swapped the parameters of one model, one thread would take the other's parameters for the
# model's own, and restore them for good.
_CLAIMED: dict[tuple[int, str], tuple[int, int]] = {}
_CLAIMING = threading.Lock()


def is_swapped(module: nn.Module, name: str) -> bool:
    """Whether a parameter of a module is swapped now, by any thread."""
    return (id(module._parameters), name) in _CLAIMED


@final
class restore_buffers:  # noqa: N801 a context manager
    """Collects the modules that run inside, in order, each once, and restores their buffers at exit.

    Modules in training mode run with copies of their buffers: running statistics, and the vectors of
    spectral norm, are updated by a training step and not by a penalty.

    Attributes:
        modules: The modules that have run.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def __enter__(self) -> list[nn.Module]:
        self._seen: set[int] = set()  # ids of modules that ran
        self._copied: set[int] = set()  # ids of modules with copies of their buffers
        self._copies: dict[int, Tensor] = {}  # id of a buffer, which modules may share -> its copy
        self._scripted: list[tuple[nn.Module, str, Tensor]] = []  # (module, name, own buffer)
        self._patch, self._thread = ModulePatch(), logical_thread()
        self._handle = register_module_forward_pre_hook(self._before_forward)
        return self.modules

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()
        self._patch.restore()
        for module, name, buffer in self._scripted:
            setattr(module, name, buffer)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # torch.compile cannot trace what follows
            return
        # `logical_thread`, inlined: a call for each module costs time
        this = AMBIENT.in_place_of or threading.get_ident()
        if id(module) in self._seen or this != self._thread:
            return
        self._seen.add(id(module))
        self.modules.append(module)
        attributes = vars(module)
        if isinstance(module, torch.jit.ScriptModule):
            # hooks of submodules of scripted modules are not called
            for part in module.modules():
                own = (
                    list(part.named_buffers(recurse=False))
                    if getattr(part, "training", False)
                    else []
                )
                for name, buffer in own:
                    self._scripted.append((part, name, buffer))
                    setattr(part, name, buffer.clone())
        elif "_orig_mod" in attributes["_modules"] or "forward" in attributes:
            # Hooks of submodules of a compiled module are not called. A recomputed block fixes the
            # buffers of its submodules before it runs them, so their hooks would copy too late.
            if is_compiled(module) or getattr(module.forward, "recomputes", False):
                for part in module.modules():
                    self._copy_buffers(part)
            else:
                self._copy_buffers(module)
        elif attributes["_buffers"]:  # most modules have none
            self._copy_buffers(module)

    def _copy_buffers(self, module: nn.Module) -> None:
        if id(module) in self._copied or not getattr(module, "training", False):
            return
        self._copied.add(id(module))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer.clone()
                self._patch.put(module, name, self._copies[id(buffer)])
