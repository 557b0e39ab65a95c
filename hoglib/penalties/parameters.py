"""The penalty on the gradient of a loss by the parameters."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, clone_inference_tensors, grad_enabled, gradient_with_graph
from hoglib._core.mixed_precision import upcast_half
from hoglib._core.norms import root
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import transforms_active
from hoglib.penalties import gradient_flow
from hoglib.penalties.compiled import chosen, run
from hoglib.penalties.critic_state import as_parameters, autocast_on
from hoglib.penalties.distributed import averaged
from hoglib.penalties.options import backend
from hoglib.stand_ins.mode import stand_ins_if

WHAT = "parameter_gradient"
Func = Callable[..., Tensor]


def parameter_gradient(
    func: Func,
    params: Any,
    *args: Any,
    squared: bool = False,
    autocast: bool = False,
    stand_ins: bool = True,
    return_outputs: bool = False,
    compile: bool | str = False,
) -> Any:
    r"""The norm of a loss's gradient by the parameters.

        |grad_params f|        or |grad_params f|^2 with squared=True,  f = func(params, *args)

    over all parameters together; at a gradient of zero the norm's derivative is zero. f is a scalar,
    such as a `functional_loss`; params any tree of floating-point tensors, those of
    `trainable_params(model)` being the model's own, so that backward reaches them. It is not a mean
    over samples: the norm of a mean gradient. Split over processes or accumulated over batches it is
    the mean of the parts' norms, which is another number. It works under no_grad and in inference mode.
    autocast=False computes in the parameters' own dtype where the caller stands under autocast.
    compile=True computes it and its gradient as one graph, as for the penalties of inputs.
    With return_outputs=True it returns (penalty, f), of one forward.

    Raises TypeError and ValueError for params or a value of the wrong kind; RuntimeError where f does
    not depend on params, or its gradient does not (a loss linear in params, a cut).
    Source: norm: Zhao, Zhang and Hu, Penalizing Gradient Norm for Efficiently Improving Generalization,
    2022, eq. 2; squared: Barrett and Dherin, Implicit Gradient Regularization, 2021, eq. 1.
    """
    validation.function("func", func)
    validation.parameters(params)
    validation.flag("squared", squared)
    validation.flag("autocast", autocast)
    validation.flag("return_outputs", return_outputs)
    norm = Norm(func, squared, autocast, stand_ins, return_outputs)
    graph = chosen(backend(compile))
    if graph is None:
        return norm(params, args)
    found = run(
        WHAT, norm, (params, args), graph, None, not return_outputs,
        lambda draws: _requires_grad(norm(params, args)),
    )  # fmt: skip
    value, *outputs = found if return_outputs else (found,)
    value = averaged(WHAT, value, pytree.leaves(params), outputs)
    return (value, *outputs) if return_outputs else value


@final
class Norm:
    """The norm of a function's gradient by its first argument, as a function of its arguments."""

    def __init__(
        self, func: Func, squared: bool, autocast: bool, stand_ins: bool, return_outputs: bool
    ) -> None:
        self.func, self.squared, self.autocast = func, squared, autocast
        self.stand_ins, self.return_outputs = stand_ins, return_outputs

    def __call__(self, params: Any, args: tuple[Any, ...], numbers: Any = None) -> Any:
        leaves, structure = pytree.flatten(params)
        wanted = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        functional = transforms_active()

        def of_leaves(*own: Tensor) -> Tensor:
            with torch.enable_grad():
                value = self.func(pytree.unflatten(own, structure), *args)
                return validation.scalar("func(params, *args)", value)

        with ExitStack() as stack:
            for kind in () if self.autocast else autocast_on(leaves):
                stack.enter_context(torch.autocast(kind, enabled=False))
                args = as_parameters(leaves, args)
            for context in (grad_enabled(), keep_swapped(), stand_ins_if(self.stand_ins)):
                stack.enter_context(context)
            leaves, args = clone_inference_tensors((leaves, args))
            if functional:
                value, found = _by_transform(of_leaves, leaves)
            else:
                value, _, grads, _ = gradient_with_graph(of_leaves, leaves, WHAT, wanted)
                found = [g for g in grads if g is not None]
            norm = pytree.sum_scalars([(g * g.conj()).real.sum() for g in map(upcast_half, found)])
            norm = norm if self.squared else root(norm)
            if wanted and not functional and not norm.requires_grad:
                raise gradient_flow.no_gradient_flow(
                    WHAT,
                    "the gradient of func does not depend on the parameters",
                    lambda x: self.func(pytree.unflatten(x, structure), *args), leaves, (),
                )  # fmt: skip
        if wanted:
            norm = averaged(WHAT, norm, leaves, value)
        elif not functional:
            norm, value = norm.detach(), value.detach()
        return (norm, value) if self.return_outputs else norm


def _requires_grad(found: Any) -> bool:
    return any(x.requires_grad for x in pytree.leaves(found))


def _by_transform(func: Callable[..., Tensor], leaves: Vector) -> tuple[Tensor, Vector]:
    """Inside torch.func transforms, where autograd.grad sees nothing."""
    gradient: Any = torch.func.grad_and_value(func, argnums=tuple(range(len(leaves))))
    found, value = gradient(*leaves)
    return value, list(found)
