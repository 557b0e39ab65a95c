"""The option ``remat=``: finds the repeated blocks of a model and recomputes them in backward.

    remat=True       blocks that the model repeats, see `repeated_blocks`
    remat="h.*"      modules by name or glob, or a list of these

Inside :func:`rematerialized` the forward of each block runs through `recompute`. Hooks of a block run
once, around the recomputation; hooks of its parts run again with each recomputation.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial
from operator import call
from types import FunctionType, MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from hoglib._core.messages import closures, validation
from hoglib._core.messages.closures import STATE, ClosureWalker, is_plain
from hoglib._core.remat.block_parts import replaced_forwards
from hoglib._core.remat.call import refuse_changed
from hoglib._core.runtime.ambient import replaced
from hoglib._core.torch_api import pytree
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

Remat = bool | str | Sequence[str]  # the value of the option
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward
NAMED = "Name modules, as in `remat='layers.*'`, or call a block by `hoglib.ops.remat(block)(...)`."


def check_remat(remat: object) -> Remat:
    """The option, checked: a bool, or a tuple of patterns."""
    if isinstance(remat, bool):
        return remat
    patterns = (remat,) if isinstance(remat, str) else remat
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise ArgumentTypeError(
            "remat: expected True, False, a name or glob of modules such as 'layers.*', or a list of "
            f"these, got {validation.describe(remat)}."
        )
    if not patterns or not all(patterns):
        text = "remat: expected at least one name, got none; use remat=False for no recomputation."
        raise ArgumentValueError(text)
    return tuple(patterns)


@contextmanager
def rematerialized(remat: Remat, func: Any, recomputed: Any) -> Iterator[list["BlockForward"]]:
    """Inside, forwards of the chosen blocks, in modules that a function reaches, are recomputed in
    backward, also in a backward after the exit. Entering returns the forwards.

    recomputed: `recompute`, with its options.
    """
    chosen = find_blocks(remat, func)
    # an outer context recomputes the blocks that have a BlockForward
    blocks = [x for x in chosen if not isinstance(vars(x).get("forward"), BlockForward)]
    with replaced_forwards(blocks, lambda one: BlockForward(one, one.forward, recomputed)) as found:
        yield found


def find_blocks(remat: Remat, func: Callable[..., Any]) -> list[nn.Module]:
    """The modules that the option chooses, each once, without modules nested in a chosen one."""
    roots = _modules_of(func)
    if not roots:
        raise ArgumentValueError(
            f"remat={remat!r}: expected a function of a module, from `hoglib.functional_loss` or one "
            f"that closes over its module, got `{closures.name_of(func)}`, which reaches none. Call a "
            "part of it by `hoglib.ops.remat(part)(...)`."
        )
    if remat is True:
        found = [block for root in roots for block in repeated_blocks(root).values()]
        if not found:
            raise ArgumentValueError(
                "remat=True: expected repeated blocks, modules of one class with parts of their own in "
                "a ModuleList, Sequential, ModuleDict or attributes, found none in "
                f"{_class_names(roots)}. {NAMED}"
            )
    else:
        patterns: Any = (remat,) if isinstance(remat, str) else remat
        found = [block for pattern in patterns for block in _modules_matching(roots, pattern)]
    # remat recomputes only the outermost of nested blocks
    found = _drop_nested(list({id(block): block for block in found}.values()))
    for block in found:
        closures.refuse_hidden("remat", block)
    return found


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a model repeats, by name: outermost ones, each once.

    - Children of a container (ModuleList, Sequential, ModuleDict): two of equal class, parameter names
      and shapes are blocks. All modules of this class are then blocks, also with other shapes: the
      first block of each stage of a ResNet.
    - Children that share only the class, plain containers, and attributes with equal class and shapes
      may be stages. They are blocks only if nothing inside them is repeated.
    - Lists in a container have no forward. The parts that these lists have in common are blocks.
    """
    found: dict[str, nn.Module] = {}
    _add_blocks(model, "", found, set())
    kinds = {type(block) for block in found.values()} - {nn.Sequential}
    chosen = {id(block) for block in found.values()}
    named = model.named_modules()
    every = {name: x for name, x in named if id(x) in chosen or (name and type(x) in kinds)}
    outermost = {id(block) for block in _drop_nested(list(every.values()))}
    return {name: block for name, block in every.items() if id(block) in outermost}


def _add_blocks(
    module: nn.Module, prefix: str, found: dict[str, nn.Module], seen: set[int]
) -> bool:
    """Adds the blocks inside a module; whether there are any."""
    if id(module) in seen:
        return False
    seen.add(id(module))
    in_container = isinstance(module, (*CONTAINERS, nn.Sequential))
    groups: dict[Any, list[tuple[str, nn.Module]]] = defaultdict(list)
    children = [(name, child) for name, child in module._modules.items() if child is not None]
    for name, child in children:
        if _may_be_block(child, in_container):
            kind = type(child) if in_container else (type(child), _shapes(child))
            groups[kind].append((prefix + name, child))
    any_found, searched = False, set()
    for group in groups.values():
        if len(group) < 2:
            continue
        most = max(Counter(_shapes(child) for _, child in group).values())
        # children that share only the class may be stages: blocks if nothing inside is repeated
        if not (in_container and most > 1 and not isinstance(group[0][1], nn.Sequential)):
            inner = [_add_blocks(child, f"{name}.", found, seen) for name, child in group]
            searched |= {id(child) for _, child in group}
            if any(inner):
                any_found = True
                continue
        found.update(group)
        any_found = True
    blocks = {id(block) for block in found.values()}
    for name, child in children:
        if id(child) not in blocks and id(child) not in searched:
            any_found = _add_blocks(child, f"{prefix}{name}.", found, seen) or any_found
    lists = [(name, child) for name, child in children if isinstance(child, CONTAINERS)]
    if in_container and len(lists) > 1 and not any_found:
        # layers are lists such as [attention, feed-forward]: their parts with equal names and shapes
        alike: dict[Any, dict[str, nn.Module]] = defaultdict(dict)
        for outer, child in lists:
            for name, part in child.named_children():
                if _may_be_block(part, True):
                    alike[name, type(part), _shapes(part)][f"{prefix}{outer}.{name}"] = part
        repeated = [parts for parts in alike.values() if len(parts) > 1]
        for parts in repeated:
            found.update(parts)
        any_found = bool(repeated)
    return any_found


def _may_be_block(module: nn.Module, in_container: bool) -> bool:
    """Whether a module may run several operations, judged by its class and children."""
    # containers have no forward, and scripted code cannot be recomputed
    if isinstance(module, (*CONTAINERS, torch.jit.ScriptModule)):
        return False
    if next(module.parameters(), None) is None:
        return False
    of_torch = type(module).__module__.startswith("torch.nn.")
    return next(module.children(), None) is not None or (in_container and not of_torch)


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, p.shape) for name, p in module.named_parameters(remove_duplicate=False))


def _modules_of(func: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function runs: itself, a functional loss's model, or those that it reaches."""
    if isinstance(func, nn.Module):
        return [func]
    model = getattr(func, "model", None)
    if isinstance(model, nn.Module):
        return [model]
    return [x for x in ClosureWalker(func, STATE).objects if isinstance(x, nn.Module)]


def _modules_matching(roots: list[nn.Module], pattern: str) -> list[nn.Module]:
    """The modules that a pattern names; for a ModuleList or ModuleDict, the elements."""
    found: list[nn.Module] = []
    for root in roots:
        for name, module in root.named_modules(remove_duplicate=False):
            if name and fnmatchcase(name, pattern):
                found += _with_forward(module)
    scripted = [x for x in found if isinstance(x, torch.jit.ScriptModule)]
    if found and not scripted:
        return found
    own = [block for root in roots for block in repeated_blocks(root)]
    parts = _quote_names([name for root in roots for name, _ in root.named_modules() if name])
    reason = "names scripted code, which cannot be recomputed" if scripted else "none has"
    instead = (
        f"Repeated blocks, which remat=True takes: {_quote_names(own)}"
        if own
        else f"It has {parts}"
    )
    raise ArgumentValueError(
        f"remat={pattern!r}: expected a name or glob of modules of {_class_names(roots)}, got one that "
        f"{reason}. {instead}."
    )


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """A module, or the elements of containers that have no forward."""
    if not isinstance(module, CONTAINERS):
        return [module]
    return [part for child in module.children() for part in _with_forward(child)]


def _drop_nested(blocks: list[nn.Module]) -> list[nn.Module]:
    inside = {id(part) for block in blocks for part in list(block.modules())[1:]}
    return [block for block in blocks if id(block) not in inside]


def _class_names(roots: Iterable[nn.Module]) -> str:
    return " and ".join(dict.fromkeys(type(root).__name__ for root in roots))


def _quote_names(names: list[str]) -> str:
    shown = names if len(names) < 8 else [*names[:3], "...", names[-1]]
    return ", ".join(name if name == "..." else repr(name) for name in shown)


@final
class BlockForward:
    """The forward of a block, run by `recompute`.

    Attributes:
        module: The block.
        gathers: (function from a shard to the whole parameter, places of the parameter as (module,
            name)) of each parameter that a run gathers. Between runs only shards are kept.
    """

    recomputes = True

    def __init__(self, block: nn.Module, forward: Any, recomputed: Callable[..., Any]) -> None:
        self.module, self._forward, self._recomputed = block, forward, recomputed
        self.gathers: list[tuple[Callable[[Tensor], Tensor], list[tuple[nn.Module, str]]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(self._run_whole, self._forward) if self.gathers else self._forward
        return self._recomputed(partial(call_forward, forward), self.module, args, kwargs)

    def _run_whole(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # turn off checkpoints inside: the block is recomputed anyway
        items: Any = [(vars(x), "checkpoint_fn", call) for x in _checkpoint_wrappers(self.module)]
        try:
            for gather, places in self.gathers:
                (first, own_name), *_ = places
                whole = gather(first._parameters[own_name])  # type: ignore[arg-type]
                items += [(module._parameters, name, whole) for module, name in places]
            with replaced(items), disable_saved_tensors_hooks(RECOMPUTES_SHARDS):
                return forward(*args, **kwargs)
        except RuntimeError as error:
            if RECOMPUTES_SHARDS in str(error):
                raise UnsupportedError(RECOMPUTES_SHARDS) from error
            raise


RECOMPUTES_SHARDS = (
    "remat=...: expected blocks that keep their tensors, where processes share the parameters, got "
    "one with saved-tensor hooks, as torch.utils.checkpoint has: backward would recompute it with the "
    "shards. The block is recomputed anyway: leave torch.utils.checkpoint out of it, as by "
    "`model.gradient_checkpointing_disable()`."
)


def _checkpoint_wrappers(block: nn.Module) -> list[Any]:
    """The modules of a block that torch's `checkpoint_wrapper` made."""
    library: Any = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    kind = () if library is None else library.CheckpointWrapper
    return [module for module in block.modules() if isinstance(module, kind)]


def call_forward(forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> Any:
    """One run of a block, with copies of the objects among its arguments.

    Otherwise a run that fills a cache of keys and values would leave the cache full for the next run,
    and the cached tensors would have no gradient.
    """
    leaves, structure = pytree.flatten((args, kwargs))
    args, kwargs = given = pytree.unflatten([_own_copy(leaf) for leaf in leaves], structure)
    outputs = forward(*args, **kwargs)
    refuse_changed(forward, given, structure)
    return outputs


_SHARED = (Tensor, nn.Module, torch.Generator, FunctionType, MethodType, partial)


def _own_copy(leaf: object) -> Any:
    if is_plain(leaf) or isinstance(leaf, _SHARED):
        return leaf
    try:
        return deepcopy(leaf)
    except Exception:  # a lock, a file or a handle cannot be copied
        return leaf
