"""The penalty on the gradient of a loss by the parameters."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import clone_inference_tensors, grad_enabled, gradient_with_graph
from hoglib._core.blocks import Remat, check_remat, rematerialized
from hoglib._core.mixed_precision import upcast_half
from hoglib._core.norms import root
from hoglib._core.swap import keep_swapped
from hoglib._core.torch_internals import transforms_active
from hoglib.penalties.compiled import backend_of, run_as_graph
from hoglib.penalties.distributed import averaged
from hoglib.penalties.input_vjp import (
    autocast_devices,
    cast_like_parameters,
    no_gradient_flow,
    without_autocast,
)
from hoglib.penalties.options import check_backend
from hoglib.penalties.terms import PenaltyWithOutputs
from hoglib.stand_ins.mode import stand_ins_if
from hoglib.verification.entry_points import examined_functions

NAME = "parameter_gradient"
Func = Callable[..., Tensor]


def parameter_gradient(
    func: Func,
    params: Any,
    *args: Any,
    squared: bool = False,
    autocast: bool = False,
    stand_ins: bool = True,
    return_outputs: bool = False,
    remat: bool | str | Sequence[str] = False,
    compile: bool | str = False,
) -> Any:
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
        autocast: With False, computed in the parameters' own dtype also where the caller is under
            autocast.
            Default: False.
        stand_ins: Whether func runs inside :func:`hoglib.second_order`. Default: True.
        return_outputs: Whether to return (penalty, f), from one forward pass. Default: False.
        remat: Blocks of func's module whose intermediate values are recomputed in backward, as in
            :class:`Options`. Default: False.
        compile: With True, the penalty and its gradient are computed by one compiled graph;
            "eager" runs the graph without compiling it. With remat, the passes of blocks are compiled
            instead. Default: False.
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
    validation.parameters(params)
    validation.flag("squared", squared)
    validation.flag("autocast", autocast)
    validation.flag("return_outputs", return_outputs)
    remat, backend = check_remat(remat), check_backend(compile)
    blocks = "" if remat is False else backend
    norm = GradientNorm(func, squared, autocast, stand_ins, return_outputs, remat, blocks)
    backend = backend_of(backend, remat)
    if backend is None:
        return norm(params, args)
    found = run_as_graph(
        NAME, norm, (params, args), backend, None, with_gradients=not return_outputs
    )
    value, *outputs = found if return_outputs else (found,)
    value = averaged(NAME, value, pytree.leaves(params), outputs)
    return PenaltyWithOutputs(value, *outputs) if return_outputs else value


@final
class GradientNorm:
    """The norm of a function's gradient by its first argument, as a function of tensors that depends on
    its attributes alone: what is compiled."""

    def __init__(
        self, func: Func, squared: bool, autocast: bool, stand_ins: bool, return_outputs: bool,
        remat: Remat = False, backend_of_blocks: Any = "",
    ) -> None:  # fmt: skip
        self.func, self.squared, self.autocast = func, squared, autocast
        self.stand_ins, self.return_outputs = stand_ins, return_outputs
        self.remat, self.backend_of_blocks = remat, backend_of_blocks

    def __call__(self, params: Any, args: tuple[Any, ...], draws: Any = None) -> Any:
        """The norm, and f where it is returned; no random numbers are drawn."""
        leaves, structure = pytree.flatten(params)
        create_graph = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        in_transform = transforms_active()

        def of_leaves(*own: Tensor) -> Tensor:
            with torch.enable_grad():
                value = self.func(pytree.unflatten(own, structure), *args)
                return validation.scalar("func(params, *args)", value)

        kinds = () if self.autocast else autocast_devices(leaves)
        if kinds:
            args = cast_like_parameters(leaves, args)
        with (
            without_autocast(kinds), examined_functions(NAME), grad_enabled(), keep_swapped(),
            stand_ins_if(self.stand_ins),
            rematerialized(self.remat, self.func, self.backend_of_blocks),
        ):  # fmt: skip
            leaves, args = clone_inference_tensors((leaves, args))
            if in_transform:
                # torch.func transforms, whose levels autograd.grad does not see
                gradient: Any = torch.func.grad_and_value(
                    of_leaves, argnums=tuple(range(len(leaves)))
                )
                found, value = gradient(*leaves)
            else:
                value, _, grads, _ = gradient_with_graph(of_leaves, leaves, NAME, create_graph)
                found = [g for g in grads if g is not None]
            norm = pytree.sum_scalars([(g * g.conj()).real.sum() for g in map(upcast_half, found)])
            norm = norm if self.squared else root(norm)
            if create_graph and not in_transform and not norm.requires_grad:
                raise no_gradient_flow(
                    NAME,
                    "the gradient of func does not depend on the parameters",
                    lambda x: self.func(pytree.unflatten(x, structure), *args), leaves, (),
                )  # fmt: skip
        if create_graph:
            norm = averaged(NAME, norm, leaves, value)
        elif not in_transform:
            norm, value = norm.detach(), value.detach()
        return PenaltyWithOutputs(norm, value) if self.return_outputs else norm
