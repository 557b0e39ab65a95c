"""What stands around every evaluation of a user's function: once, and in one order.

    with ring(policy, loss) as blocks:           # whatever the options ask for holds inside
        value, product = algorithm(problem.entered(blocks))

From outside to inside:

    compilation            nothing else is entered around what is captured as a whole, which enters a
                           ring itself
    errors                 of the communication between processes that share parameters
    examination            custom Functions of the user's that are applied are examined at the end,
                           also where one of the others raises
    torch.compile          what the user compiled runs uncompiled
    gradients              inference mode is off, and autograd records
    swapped parameters     stay in their modules until the end, for a backward that recomputes
    buffers                are restored at the end
    autocast               is off, for penalties
    stand-ins              replace torch calls that have no right second derivative
    recomputation          of blocks: innermost, so that it replays all of the others

Algorithms are functions of a :class:`~hoglib._core.problem.Problem` and import nothing of this.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core.messages.call_errors import explain_kind_of_tensor
from hoglib._core.messages.closures import name_of, owner_of
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import keep_swapped, restore_buffers
from hoglib._core.numerics.trust import found_once
from hoglib._core.problem import Policy, Problem
from hoglib._core.remat.blocks import BlockForward, rematerialized
from hoglib._core.remat.recomputation import recompute
from hoglib._core.runtime.ambient import AMBIENT, Examiner
from hoglib._core.runtime.source_location import warn_once
from hoglib._core.substrate import autograd
from hoglib._core.substrate.placement import WHOLE, Placement
from hoglib._core.torch_api.torch_internals import after_backward, eagerly, has_dynamo
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib._core.torch_api.torch_version import NEWEST, TORCH_VERSION
from hoglib.capture.api import Compiled
from hoglib.capture.capturing import CacheSlot, in_other_tracer
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.entry_points import examined_functions

IS_NEW_TORCH = TORCH_VERSION > NEWEST
NEW_TORCH = (
    f"hoglib was run on torch up to {NEWEST[0]}.{NEWEST[1]}, and not on torch {torch.__version__}. "
    "`hoglib check` says whether second derivatives are right there, and what private names of torch "
    "have gone."
)


@final
class ring:  # noqa: N801 a context manager
    """Inside, a user's function is evaluated and differentiated as a policy says.

    A class, as it stands around each derivative: generators of contextlib take several times as long
    to enter and to leave.

    Args:
        policy: The options of the entry point.
        func: The user's function, whose blocks are recomputed.
        examine: Whether custom Functions are examined.
        first_order: Whether only first derivatives are taken; see `examined_functions`.
        gradients: What decides whether autograd records. Default: it does.
        placement: Of parameters over processes.
        buffers: Whether the buffers of modules are restored.
        autocast_off: The devices for which autocast is off.
        around_graph: Whether what is inside is captured as a whole where the policy says so, and then
            enters a ring of its own.
    Attributes:
        captures: Whether what is inside is captured as one graph here.
        modules: Those that ran inside, of a ring that restores their buffers.
    Returns:
        From entering, the blocks that are recomputed.
    """

    def __init__(
        self,
        policy: Policy,
        func: Any = None,
        *,
        examine: bool = True,
        first_order: bool = False,
        gradients: Callable[[], AbstractContextManager[None]] = autograd.grad_enabled,
        placement: Placement = WHOLE,
        buffers: bool = False,
        autocast_off: Iterable[str] = (),
        around_graph: bool = False,
    ) -> None:
        if IS_NEW_TORCH:
            warn_once(NEW_TORCH)
        self._caller = policy.caller
        self.captures = around_graph and bool(policy.backend) and is_captured(policy)
        self._examiner: Examiner | None = None
        self._entered: list[AbstractContextManager[Any]] = []
        self._recomputes = policy.remat is not False
        contexts: list[AbstractContextManager[Any]] = []
        self._contexts = contexts
        if self.captures:
            # what is captured enters a ring of its own: nothing is swapped or watched around a graph
            contexts.append(autograd.outside_inference_mode())
            return
        if placement.is_sharded:
            contexts.append(placement.translate_errors(policy.caller))
        if examine:
            contexts.append(examined_functions(policy.caller, first_order=first_order))
        # compiled code has no second derivative, and one with a custom Function a wrong one; what a
        # backward runs again (checkpoints, solvers) has to find the parameters of this run
        if has_dynamo():
            contexts.append(eagerly())
        contexts += (gradients(), keep_swapped())
        if buffers:
            # a training step updates running statistics, a penalty does not
            contexts.append(restored := restore_buffers())
            self.modules = restored.modules
        for device in autocast_off:
            # under bfloat16 autocast the gradient of a penalty is off by 4e-3
            contexts.append(torch.autocast(device, enabled=False))
        contexts.append(stand_ins_if(policy.stand_ins))
        if self._recomputes:
            recomputed = partial(recompute, backend=policy.backend)
            # the last one: what is recomputed later runs inside of all the others again
            contexts.append(rematerialized(policy.remat, func, recomputed))

    def __enter__(self) -> list[BlockForward]:
        found: Any = None
        try:
            # noted one by one: where entering one of them raises, those before it are left
            for context in self._contexts:
                found = context.__enter__()
                self._entered.append(context)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self._examiner = AMBIENT.examination.examiner
        return found if self._recomputes else []

    def note_gradient(self, gradient: autograd.Gradient | None) -> None:
        """Tells the examination of a gradient that is differentiated: where a custom Function has cut
        its graph, a product of zero is wrong."""
        if gradient is not None and gradient.graph.functions and self._examiner is not None:
            self._examiner.note_gradient(gradient)

    def __exit__(self, *raised: Any) -> None:
        while self._entered:
            try:
                self._entered.pop().__exit__(*raised)
            except BaseException as error:  # the outer ones are left with it
                self.__exit__(type(error), error, error.__traceback__)
                raise
        if raised[0] is not None:
            explain_kind_of_tensor(self._caller, raised[1])


def warn_if_derivatives_not_finite(
    problem: Problem,
    loss: Tensor,
    parts: Iterable[Tensor],
    func: object = None,
    by: Sequence[Tensor] = (),
) -> None:
    """Warns of derivatives at a problem's leaves that are not finite where the loss is.

    func: the loss as a function of the leaves, where it is not the problem itself. by: leaves that the
    user's own backward may differentiate finite parts by; the first such backward of each signature is
    watched, and its gradients are warned of if they are not finite.
    """
    caller, parts = problem.policy.caller, list(parts)
    if autograd.is_not_finite(caller, loss, parts):
        _explain_not_finite(problem, func)
    elif by and value_checks_on() and not by[0].is_meta:
        shapes = [x.shape for x in problem.leaves]
        known: Any = found_once(by[0], (caller, *shapes), list)
        explain = partial(_explain_not_finite, problem, func, list(by))
        for part in parts if not known else ():
            if not part.requires_grad:
                continue
            # the hook holds this number, not the tensor that it is on
            finite = part.detach().isfinite().all()  # which is not read yet
            part.register_hook(partial(_watch_gradients, by, known, finite, explain))


def _watch_gradients(by: Any, known: Any, finite: Tensor, explain: Any, _: object) -> None:
    """Watches the gradients by leaves in the backward that begins, and explains those that are not
    finite. known: not empty once such a backward was watched.
    """
    grads: list[Any] = []
    hooks: dict[int, Any] = {}

    def note(i: int, g: Tensor) -> None:
        hooks.pop(i).remove()  # here: a backward that raises has no end
        grads.append(g)

    def ended() -> None:
        for hook in hooks.values():
            hook.remove()
        # sparse gradients, and those that processes share, are not looked at
        plain = [g for g in grads if type(g) is Tensor and g.layout is torch.strided]
        if finite and not all(bool(g.isfinite().all()) for g in plain):
            explain()

    for i, x in enumerate(by if not known else ()):
        if x.requires_grad:
            hooks[i] = x.register_hook(partial(note, i))
    known.append(True)
    after_backward(ended)


def _explain_not_finite(problem: Problem, func: Any, by: autograd.Vector | None = None) -> None:
    """Warns of the operation behind such numbers, which one more evaluation of the loss finds."""
    caller, leaves = problem.policy.caller, problem.leaves
    again = Policy(caller, stand_ins=problem.policy.stand_ins)

    @contextmanager
    def around() -> Iterator[None]:
        with preserve_random_state(), ring(again, examine=False, buffers=True):
            yield

    func = func or (lambda *own: problem.entered([])(*own))
    autograd.warn_of_not_finite(caller, func, leaves, around, by)


def is_captured(policy: Policy) -> bool:
    """Whether a computation is captured here as a whole: not as a part of something that is
    transformed or captured around it."""
    return policy.one_graph and not in_other_tracer()


def run(policy: Policy, func: Any, body: Callable[..., Any], key: Hashable, *inputs: Any) -> Any:
    """body(*inputs), with a function of tensors that is made of the user's; by its graph where the
    policy compiles.

    key: the options of body, which enters the ring itself.
    """
    if not is_captured(policy):
        return body(*inputs)
    name = f"{policy.caller} of {name_of(func)}"
    # a function that is made anew for each call shares its graphs by its code
    owner = owner_of(func) if isinstance(func, FunctionType | partial) else func
    place = CacheSlot.of(owner, name, key)
    graph = Compiled(body, backend=policy.backend, name=name, place=place, precheck=body)
    return graph(*inputs)
