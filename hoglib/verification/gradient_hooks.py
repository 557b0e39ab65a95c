"""Detect gradient hooks that change the gradient.

    y.register_hook(watched(hook, changed, 0, name))      # calls changed(text) for `lambda g: g / 2`

Such a hook is no part of the function. It runs in each backward pass, in the second pass on gradients
of the gradient, and never in forward mode. So the modes disagree on second derivatives.
"""

from collections.abc import Callable
from traceback import walk_stack
from typing import Any

import torch
from torch.utils.hooks import BackwardHook

from hoglib._core.messages.closures import name_of
from hoglib._core.runtime.source_location import SourceLine
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.torch_internals import unwrap, without_transforms
from hoglib._core.torch_api.torch_modes import value_checks_on, without_stand_ins

Hook = Callable[..., Any]
Changed = Callable[[str], None]
CHANGES = (
    "{hook} returns another gradient than it gets. The second backward pass runs it again, and forward "
    "mode does not run it: the second derivative is not that of the function. Use an op instead: "
    "`hog.ops.clip_gradient`, `hog.ops.scale_gradient`, or for the solution of an equation "
    "`hog.meta.fixed_point`."
)


def wrap_hook(hook: Hook, changed: Changed, position: int, name: str) -> Hook:
    """Wrap a hook: call changed(text) if it returns something else than its argument at `position`.
    name: of the hook, with which the text begins."""

    def run(*args: Any) -> Any:
        returned = hook(*args)
        if returned is not None and _differ(args[position], returned):
            changed(CHANGES.format(hook=name))
        return returned

    run.is_watched = True  # type: ignore[attr-defined]
    return run


def watch_module_hooks(changed: Changed) -> None:
    """Watch the backward hooks of a module, while torch applies its BackwardHookFunction. They are
    found in the frame of the BackwardHook, which is on the stack."""
    frames = (frame.f_locals.get("self") for frame, _ in walk_stack(None))
    calling: Any = next((owner for owner in frames if isinstance(owner, BackwardHook)), None)
    for hooks in (calling.user_hooks, calling.user_pre_hooks) if calling is not None else ():
        for i, hook in enumerate(hooks):
            code = getattr(hook, "__code__", None)
            at = f", {SourceLine(code.co_filename, code.co_firstlineno)}," if code else ""
            name = f"the backward hook `{name_of(hook)}` of a {type(calling.module).__name__}{at}"
            # applied to the inputs and again to the outputs: wrap a hook once
            if not hasattr(hook, "is_watched"):
                hooks[i] = wrap_hook(hook, changed, 1, name)


def _differ(given: object, returned: object) -> bool:
    """Whether any gradient has other values; a hook that returns equal values does no harm."""
    if not value_checks_on():
        return False
    both = zip(pytree.tensors(given), pytree.tensors(returned), strict=False)
    pairs = [(unwrap(a), unwrap(b)) for a, b in both if a is not b]
    with without_transforms(), torch.no_grad(), without_stand_ins():
        return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs if not a.is_meta)
