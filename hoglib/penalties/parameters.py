"""The penalty on the gradient of a loss by the parameters."""

from typing import Any, Unpack, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import gradient_with_graph
from hoglib._core.mixed_precision import upcast_half
from hoglib._core.problem import Problem
from hoglib._core.torch_internals import transforms_active
from hoglib.ops._distance import root
from hoglib.penalties.compiled import captures, run_as_graph
from hoglib.penalties.distributed import averaged
from hoglib.penalties.evaluation import PenaltyWithOutputs
from hoglib.penalties.gradient_flow import no_gradient_flow
from hoglib.penalties.input_vjp import Function, autocast_devices, cast_like_parameters
from hoglib.penalties.kinds import REAL, register
from hoglib.penalties.options import CheckedOptions, Options, check_options
from hoglib.ring import ring

__all__ = ["parameter_gradient"]
NAME = "parameter_gradient"
OF_SAMPLES = ("reduction", "output", "batch", "micro_batch")  # options that it does not have


@register(REAL, without=OF_SAMPLES)
def parameter_gradient(
    func: Function, params: Any, *args: Any, squared: bool = False, **options: Unpack[Options]
) -> Tensor:
    r"""The norm of a loss's gradient by the parameters.

        |grad_params f|        or |grad_params f|^2 with squared=True,  f = func(params, *args)

    over all parameters together; at a gradient of zero the norm's derivative is zero. It is not a mean
    over samples but the norm of a mean gradient: split over processes or accumulated over batches it is
    the mean of the parts' norms, which is another number. It works under no_grad and in inference mode.

    Args:
        func: f, called as func(params, *args); it returns a scalar, such as a
            :func:`hoglib.functional_loss`.
        params: Any tree of floating-point tensors; those of `trainable_params(model)` are the
            model's own, so that backward reaches them.
        *args: Further arguments of func, such as a batch.
        squared: Whether the squared norm is returned. Default: False.
        **options: Those of :class:`Options` that are not of samples: ``autocast`` (leave it on),
            ``return_outputs`` (return f too, from one forward pass), ``stand_ins`` (run inside
            `second_order()`), ``remat`` (blocks to recompute), ``compile`` (run as one graph).
    Returns:
        The norm, a scalar; with ``return_outputs=True``, :class:`PenaltyWithOutputs` (norm, f).
    Raises:
        ArgumentTypeError, ArgumentValueError: For params or a value of the wrong kind.
        NoSecondDerivative: If f does not depend on params, or its gradient does not (a loss that
            is linear in params, or a gradient that is detached).
    References:
        Norm: Zhao, Zhang and Hu, Penalizing Gradient Norm for Efficiently Improving
        Generalization, 2022, eq. 2. Squared: Barrett and Dherin, Implicit Gradient Regularization,
        2021, eq. 1.
    Example:
        >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> norm = hog.penalties.parameter_gradient(lambda w: w.square().sum() / 2, w)  # |w|
        >>> norm.backward()
        >>> norm.item(), w.grad
        (5.0, tensor([0.6000, 0.8000]))
    """
    validation.function("func", func)
    validation.flag("squared", squared)
    checked = check_options(NAME, options, without=OF_SAMPLES)
    validation.parameters(params)
    norm = GradientNorm(func, squared, checked)
    if captures(checked.policy):
        alone = not checked.return_outputs
        found = run_as_graph(norm, checked, (params, args), with_gradients=alone)
        value, outputs = (found, None) if alone else found
    else:
        value, outputs = norm.with_value(params, args)
    value = averaged(NAME, value, outputs)
    result: Any = PenaltyWithOutputs(value, outputs) if checked.return_outputs else value
    return result


@final
class GradientNorm:
    """The norm of a function's gradient by its first argument, as a function of tensors that depends on
    its attributes alone: what is compiled."""

    def __init__(self, func: Function, squared: bool, options: CheckedOptions) -> None:
        self.func, self.squared, self.options = func, squared, options

    def __call__(self, params: Any, args: tuple[Any, ...], draws: Any) -> Any:
        """The norm, and f where it is returned; no random numbers are drawn."""
        found = self.with_value(params, args)
        return found if self.options.return_outputs else found[0]

    def with_value(self, params: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """The norm and f."""
        leaves, structure = pytree.flatten(params)
        in_transform, policy = transforms_active(), self.options.policy
        create_graph = policy.create_graph and any(leaf.requires_grad for leaf in leaves)
        devices = () if self.options.autocast else autocast_devices(leaves)
        if devices:
            args = cast_like_parameters(leaves, args)
        with ring(policy, self.func, autocast_off=devices) as blocks:
            problem = Problem(policy, self.func, structure, leaves, args).entered(blocks)
            if in_transform:  # whose levels autograd.grad does not see
                every = tuple(range(len(leaves)))
                gradient: Any = torch.func.grad_and_value(problem, argnums=every)
                grads, value = gradient(*problem.leaves)
            else:
                found = gradient_with_graph(problem, problem.leaves, NAME, create_graph)
                value, grads = found.value, found.parts
            g = [upcast_half(part) for part in grads if part is not None]
            norm = pytree.sum_scalars([(part * part.conj()).real.sum() for part in g])
            norm = norm if self.squared else root(norm)
            if create_graph and not in_transform and not norm.requires_grad:
                reason = "the gradient of func does not depend on the parameters"
                raise no_gradient_flow(problem, problem.leaves, reason)
        return (norm, value) if create_graph or in_transform else (norm.detach(), value.detach())
