"""The contexts around every evaluation of a user's function, each entered once, in a fixed order.

    with ring(policy, loss) as blocks:           # inside, all options of the policy hold
        value, product = algorithm(problem.entered(blocks))

From outside to inside:

    compilation            if the call is captured as one graph, skip all below: the captured body
                           enters its own ring
    errors                 of processes with sharded parameters are told to all of them
    examination            examine the user's custom Functions at exit, also after an exception
    torch.compile          modules and functions that the user compiled run uncompiled
    gradients              turn inference mode off; autograd records
    swapped parameters     stay in their modules until exit, for a backward that recomputes
    buffers                restored at exit, for penalties
    autocast               turned off, for penalties
    stand-ins              replace torch calls without a right second derivative
    recomputation          of blocks: innermost, so that a recomputation runs under all contexts above

Algorithms are functions of a :class:`~hoglib._core.problem.Problem`, and do not import this module.
"""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core.messages import communication
from hoglib._core.messages.call_errors import explain_kind_of_tensor
from hoglib._core.messages.closures import name_of, owner_of
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import keep_swapped, restore_buffers
from hoglib._core.numerics.trust import memoize_on
from hoglib._core.problem import Policy, Problem
from hoglib._core.remat.blocks import BlockForward, rematerialized
from hoglib._core.remat.recomputation import recompute
from hoglib._core.runtime.ambient import AMBIENT, Examiner
from hoglib._core.runtime.source_location import warn_once
from hoglib._core.substrate import autograd
from hoglib._core.substrate.placement import UNSHARDED, Placement
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
    """A context manager: inside, a user's function runs and is differentiated as the policy says.

    A class, because a generator of contextlib takes several times as long, around each derivative.

    Args:
        policy: The options of the entry point.
        func: The user's function; its modules have the blocks that policy.remat names.
        examine: Whether custom Functions are examined.
        first_order: Whether only first derivatives are taken; see `examined_functions`.
        gradients: The context that sets grad mode. Default: gradients are enabled.
        placement: How parameters are sharded over processes.
        buffers: Whether the buffers of modules are restored at exit.
        autocast_off: The device types for which autocast is turned off.
        around_graph: Whether the body is captured as one graph if the policy compiles; the captured
            body then enters its own ring.
    Attributes:
        captures: Whether the body is captured as one graph here.
        modules: The modules that ran inside; only with ``buffers=True``.
    Returns:
        On entering, the blocks to recompute.
    """

    def __init__(
        self,
        policy: Policy,
        func: Any = None,
        *,
        examine: bool = True,
        first_order: bool = False,
        gradients: Callable[[], AbstractContextManager[None]] = autograd.grad_enabled,
        placement: Placement = UNSHARDED,
        buffers: bool = False,
        autocast_off: Iterable[str] = (),
        around_graph: bool = False,
    ) -> None:
        if IS_NEW_TORCH:
            warn_once(NEW_TORCH)
        self._caller = policy.caller  # for messages
        self.captures = around_graph and bool(policy.backend) and is_captured(policy)
        self._examiner: Examiner | None = None  # the innermost examination of custom Functions
        self._entered: list[AbstractContextManager[Any]] = []  # to be left, in reverse
        self._recomputes = policy.remat is not False
        contexts: list[AbstractContextManager[Any]] = []
        self._contexts = contexts
        if self.captures:
            # the captured body enters its own ring: nothing is swapped or watched around a graph
            contexts.append(autograd.outside_inference_mode())
            return
        if placement.is_sharded:
            contexts.append(placement.together(policy.caller))
        if examine:
            contexts.append(examined_functions(policy.caller, first_order=first_order))
        # compiled code has no second derivative, or with a custom Function a wrong one
        if has_dynamo():
            contexts.append(eagerly())
        # keep_swapped: checkpoints and solvers that run again in backward need this run's parameters
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
            # innermost: a later recomputation enters all contexts above again
            contexts.append(rematerialized(policy.remat, func, recomputed))

    def __enter__(self) -> list[BlockForward]:
        found: Any = None
        try:
            # note each context: if entering one raises, the earlier ones must be left
            for context in self._contexts:
                found = context.__enter__()
                self._entered.append(context)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self._examiner = AMBIENT.examination.examiner
        return found if self._recomputes else []

    def note_gradient(self, gradient: autograd.Gradient | None) -> None:
        """Tell the examination which gradient is differentiated.

        If a custom Function has cut the gradient's graph, a product of zero is wrong.
        """
        if gradient is not None and gradient.graph.functions and self._examiner is not None:
            self._examiner.note_gradient(gradient)

    def __exit__(self, *raised: Any) -> None:
        while self._entered:
            try:
                self._entered.pop().__exit__(*raised)
            except BaseException as error:  # leave the outer contexts with this error
                self.__exit__(type(error), error, error.__traceback__)
                raise
        if raised[0] is not None:
            communication.translate(self._caller, raised[1])
            explain_kind_of_tensor(self._caller, raised[1])


def warn_if_derivatives_not_finite(
    problem: Problem,
    loss: Tensor,
    parts: Iterable[Tensor],
    func: object = None,
    by: Sequence[Tensor] = (),
) -> None:
    """Warn of infinite or NaN derivatives at a problem's leaves, if the loss is finite.

    func: the loss as a function of the leaves. Default: the problem.
    by: leaves by which the user may differentiate finite parts again; the first such backward of each
        signature is watched for infinite or NaN gradients.
    """
    caller, parts = problem.policy.caller, list(parts)
    if autograd.is_not_finite(caller, loss, parts):
        _explain_not_finite(problem, func)
    elif by and value_checks_on() and not by[0].is_meta:
        shapes = [x.shape for x in problem.leaves]
        known: Any = memoize_on(by[0], (caller, *shapes), list)
        explain = partial(_explain_not_finite, problem, func, list(by))
        for part in parts if not known else ():
            if not part.requires_grad:
                continue
            # a flag on the device, not read yet; the hook holds the flag instead of the whole tensor
            finite = part.detach().isfinite().all()
            part.register_hook(partial(_watch_gradients, by, known, finite, explain))


def _watch_gradients(by: Any, known: Any, finite: Tensor, explain: Any, _: object) -> None:
    """Watch the gradients by leaves in the backward that begins; explain infinite or NaN gradients.

    known: a list that is not empty once a backward was watched.
    """
    grads: list[Any] = []
    hooks: dict[int, Any] = {}

    def note(i: int, g: Tensor) -> None:
        hooks.pop(i).remove()  # here, because a backward that raises never reaches `ended`
        grads.append(g)

    def ended() -> None:
        for hook in hooks.values():
            hook.remove()
        # sparse gradients and DTensors are not examined
        plain = [g for g in grads if type(g) is Tensor and g.layout is torch.strided]
        if finite and not all(bool(g.isfinite().all()) for g in plain):
            explain()

    for i, x in enumerate(by if not known else ()):
        if x.requires_grad:
            hooks[i] = x.register_hook(partial(note, i))
    known.append(True)
    after_backward(ended)


def _explain_not_finite(problem: Problem, func: Any, by: autograd.Vector | None = None) -> None:
    """Evaluate the loss once more to find the operation that makes infinity or NaN, and warn."""
    caller, leaves = problem.policy.caller, problem.leaves
    again = Policy(caller, stand_ins=problem.policy.stand_ins)

    @contextmanager
    def around() -> Iterator[None]:
        with preserve_random_state(), ring(again, examine=False, buffers=True):
            yield

    func = func or (lambda *own: problem.entered([])(*own))
    autograd.warn_of_not_finite(caller, func, leaves, around, by)


def is_captured(policy: Policy) -> bool:
    """Whether a call is captured as one graph here; not inside an outer transform or capture."""
    return policy.one_graph and not in_other_tracer()


def run(policy: Policy, func: Any, body: Callable[..., Any], key: Hashable, *inputs: Any) -> Any:
    """body(*inputs), by a captured graph if the policy compiles; body enters the ring itself.

    func: the user's function, which owns the graphs.
    body: a function of tensors that calls func.
    key: the options of body; together with its caller and func it identifies a graph.
    """
    if not is_captured(policy):
        return body(*inputs)
    name = f"{policy.caller} of {name_of(func)}"
    # functions that are created anew for each call share graphs by their code
    owner = owner_of(func) if isinstance(func, FunctionType | partial) else func
    place = CacheSlot.of(owner, name, key)
    graph = Compiled(body, backend=policy.backend, name=name, place=place, precheck=body)
    return graph(*inputs)
