"""Penalties on the Jacobian of a function by its inputs, and on the gradient of a loss by its
parameters."""

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from hoglib._core.messages import validation
from hoglib._core.problem import Problem
from hoglib._core.substrate.autograd import gradient_with_graph
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.mixed_precision import upcast_half
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_internals import transforms_active, uncompiled
from hoglib.errors import ArgumentValueError
from hoglib.ops._distance import root
from hoglib.penalties.evaluation import (
    captures,
    penalty,
    run_as_graph,
    traceable,
    traceable_at_first,
    with_outputs,
)
from hoglib.penalties.input_vjp import Function, no_gradient_flow, without_autocast
from hoglib.penalties.module import REAL, register
from hoglib.penalties.options import CheckedOptions, Options, check_options
from hoglib.penalties.samples import check_points
from hoglib.penalties.terms import half_squared_slope, squared_excess, squared_jacobian
from hoglib.ring import ring, warn_if_derivatives_not_finite

__all__ = ["input_gradient", "jacobian", "lipschitz", "parameter_gradient", "sobolev"]
# options of penalties that parameter_gradient does not take
OF_SAMPLES = ("reduction", "output", "batch", "micro_batch")


@register(REAL)
@traceable
def input_gradient(loss: Function, x: object, *args: Any, **options: Unpack[Options]) -> Tensor:
    r"""Double backpropagation: the squared gradient of each sample's loss by its inputs, halved.

        1/N sum_n |grad_x L(x_n)|^2 / 2

    Warns if the losses of samples depend on one another (BatchNorm).

    Args:
        loss: L, called as loss(x, *args); it returns one loss per sample: a criterion with
            reduction="none", for instance `lambda x, y: F.cross_entropy(model(x), y,
            reduction="none")`.
        x: Inputs: a tensor or any tree of tensors.
        *args: Further arguments of the loss, such as labels.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        losses) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - x: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - losses: [N] or [N, 1]
    References:
        Drucker and LeCun, Improving Generalization Performance Using Double Backpropagation, 1992.
    Example:
        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
        >>> loss = lambda x, y: F.mse_loss(x, y, reduction="none")  # its gradient is 2 x
        >>> hog.penalties.input_gradient(loss, x, y)
        tensor(10.)
    """
    return penalty(loss, x, args, half_squared_slope, check_options("input_gradient", options))


@register(REAL)
@traceable
def jacobian(
    func: Function,
    x: object,
    *args: Any,
    num_projections: int | None = 1,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""The squared Frobenius norm of the Jacobian of the outputs by the inputs, halved.

        1/N sum_n |J_n|_F^2 / 2                            exactly, num_projections=None: C passes
        1/N sum_n C/P sum_p |v_p^T J_n|^2 / 2              without bias, P = num_projections passes

    J_n = d func(x_n) / d x_n, with C outputs per sample; v_p are orthonormal random directions of the
    outputs, drawn for each sample. From P = C on it is exact. Warns if the outputs of samples depend on
    one another (BatchNorm).

    Args:
        func: A function that is called as func(x, *args) and returns one row per sample.
        x: Inputs: a tensor or any tree of tensors.
        *args: Further arguments of the function.
        num_projections: P, the number of random directions; None for the exact norm. Default: 1.
        generator: Draws the directions. Default: torch's own generator.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        outputs) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - x: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - outputs: [N, ...]
    References:
        Hoffman, Roberts and Yaida, Robust Learning with Jacobian Regularization, 2019, eq. 9, 12.
    Example:
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> hog.penalties.jacobian(torch.square, x, num_projections=None)  # (2^2 + 4^2) / 2
        tensor(10.)
    """
    validation.none_or_at_least("num_projections", num_projections, 1)
    term = squared_jacobian(num_projections, halved=True)
    return penalty(func, x, args, term, check_options("jacobian", options, generator))


@register(REAL, needs="derivatives")
@traceable_at_first
def sobolev(
    func: Function,
    x: object,
    derivatives: Tree,
    *args: Any,
    num_projections: int | None = None,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""Sobolev training: the squared distance of the derivatives by the inputs from known derivatives.

        1/N sum_n |J_n - D_n|_F^2                          J_n = d func(x_n) / d x_n
        1/N sum_n C/P sum_p |v_p^T (J_n - D_n)|^2          with P = num_projections directions v_p

    v_p are random directions, as in :func:`jacobian`. Warns if the outputs of samples depend on one
    another (BatchNorm).

    Args:
        func: A function that is called as func(x, *args) and returns one row per sample.
        x: Inputs: a tensor or any tree of tensors.
        derivatives: D, with the structure of x: for each tensor the layout of `torch.func.jacrev`
            of one sample, or the tensor's own layout if func returns one number per sample.
        *args: Further arguments of the function.
        num_projections: P, the number of random directions; None for the exact norm. Default: None.
        generator: Draws the directions. Default: torch's own generator.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        outputs) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - x: [N, ...]; outputs: [N, \*outputs]
        - derivatives: [N, \*outputs, ...], or [N, ...] for one output per sample
    References:
        Czarnecki et al., Sobolev Training for Neural Networks, 2017, eq. 1, 4.
    Example:
        >>> x = torch.tensor([[1.0], [2.0]])
        >>> hog.penalties.sobolev(torch.square, x, 2 * x)
        tensor(0.)
        >>> hog.penalties.sobolev(torch.square, x, torch.zeros(2, 1))
        tensor(10.)
    """
    validation.none_or_at_least("num_projections", num_projections, 1)
    checked = check_options("sobolev", options, generator)
    given, structure = check_points("sobolev", "derivatives", derivatives)
    if structure != pytree.flatten(x)[1]:
        raise ArgumentValueError(
            f"sobolev: expected derivatives with the structure of x ({len(pytree.leaves(x))} tensors), "
            f"got another one ({len(given)})."
        )

    func = uncompiled(func)

    # derivatives are an argument, so that micro-batches split them like x
    def ignoring_derivatives(x: object, derivatives: Tree, *rest: Any) -> Any:
        return func(x, *rest)

    # owner_of() follows __wrapped__, so that graphs and checks of earlier calls are found
    ignoring_derivatives.__wrapped__ = func  # type: ignore[attr-defined]

    term = squared_jacobian(num_projections, known=True)
    return penalty(ignoring_derivatives, x, (derivatives, *args), term, checked)


@register(REAL)
@traceable
def lipschitz(
    func: Function,
    x: object,
    *args: Any,
    bound: float = 1.0,
    num_iterations: int | None = 10,
    generator: torch.Generator | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""One-sided penalty on the spectral norm of the Jacobian: stretching by more than a bound.

        1/N sum_n max(0, s_n - K)^2        s_n = |J_n|_2,  J_n = d func(x_n) / d x_n

    With one output per sample s_n is the norm of the gradient. Otherwise power iteration on J^T J from
    a random start, two passes a step, estimates s_n from below; the estimate is better the further the
    second singular value lies below the first. Warns if the outputs of samples depend on one another
    (BatchNorm).

    Args:
        func: A function that is called as func(x, *args) and returns one row per sample.
        x: Inputs: a tensor or any tree of tensors.
        *args: Further arguments of the function.
        bound: K; a spectral norm of at most K has the penalty 0. Default: 1.
        num_iterations: Steps of power iteration; None for the exact norm from all C rows of J.
            Default: 10.
        generator: Draws the start of power iteration. Default: torch's own generator.
        **options: :class:`Options`: ``reduction`` ("mean", "sum" or "none"), ``output``
            (which of several outputs), ``batch`` (the sample of each row), ``autocast`` (leave it
            on), ``micro_batch`` (samples at once), ``stand_ins`` (run inside `second_order()`),
            ``remat`` (blocks to recompute), ``return_outputs`` (return the outputs too), ``compile``
            (run as one graph).
    Returns:
        The penalty, a scalar; [N] with ``reduction="none"``; :class:`PenaltyWithOutputs` (penalty,
        outputs) with ``return_outputs=True``.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or outputs of the wrong kind or shape.
        NoSecondDerivative: If the penalty has no effect on any parameter that requires grad; the
            message names the call or the Function that detaches the gradient.
    Shape:
        - x: [N, ...]; with ``batch=index`` [rows, ...], the rows being parts of samples
        - outputs: [N, ...]
    References:
        Yoshida and Miyato, Spectral Norm Regularization, 2017, section 3. One-sided: Petzka, Fischer
        and Lukovnikov, On the Regularization of Wasserstein GANs, 2018, eq. 8.
    Example:
        >>> scale = lambda x: x * torch.tensor([2.0, 3.0])
        >>> hog.penalties.lipschitz(scale, torch.ones(1, 2), num_iterations=None)  # (3 - 1)^2
        tensor(4.)
    """
    limit = validation.number("bound", bound, minimum=0.0)
    validation.none_or_at_least("num_iterations", num_iterations, 1)
    term = squared_excess(limit, num_iterations)
    return penalty(func, x, args, term, check_options("lipschitz", options, generator))


@register(REAL, without=OF_SAMPLES)
@traceable
def parameter_gradient(
    func: Function, params: Tree, *args: Any, squared: bool = False, **options: Unpack[Options]
) -> Tensor:
    r"""The norm of a loss's gradient by the parameters.

        |grad_params f|        or |grad_params f|^2 with squared=True,  f = func(params, *args)

    over all parameters together; at a gradient of zero the norm's derivative is zero. The penalty is
    the norm of a mean gradient, not a mean over samples: split over processes or accumulated over
    batches, the result is the mean of the parts' norms, a different number. Works under no_grad and in
    inference mode.

    Args:
        func: f, called as func(params, *args); it returns a scalar, such as a
            :func:`hoglib.functional_loss`.
        params: Any tree of floating-point tensors. The tensors of `trainable_params(model)` are the
            model's own, so that backward fills their .grad.
        *args: Further arguments of func, such as a batch.
        squared: Whether the squared norm is returned. Default: False.
        **options: Of :class:`Options`, except those about samples: ``autocast`` (leave it on),
            ``return_outputs`` (return f too, from one forward pass), ``stand_ins`` (run inside
            `second_order()`), ``remat`` (blocks to recompute), ``compile`` (run as one graph).
    Returns:
        The norm, a scalar; with ``return_outputs=True``, :class:`PenaltyWithOutputs` (norm, f).
    Raises:
        ArgumentTypeError, ArgumentValueError: For params or a value of the wrong kind.
        NoSecondDerivative: If f does not depend on params, or its gradient does not (f is linear in
            params, or the gradient is detached).
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
    validation.boolean("squared", squared)
    checked = check_options("parameter_gradient", options, without=OF_SAMPLES)
    validation.parameters(params)
    if captures(checked.policy):
        body = partial(_norm_and_value, func, squared, checked)
        found = run_as_graph(body, func, checked, (params, args))
    else:
        found = _norm_and_value(func, squared, checked, params, args)
    return with_outputs(checked, *found)


def _norm_and_value(
    func: Function,
    squared: bool,
    options: CheckedOptions,
    params: Tree,
    args: tuple[Any, ...],
    draws: object = None,
) -> tuple[Tensor, Tensor]:
    """|grad_params f| and f; no random numbers are drawn."""
    leaves, structure = pytree.flatten(params)
    in_transform, policy = transforms_active(), options.policy
    create_graph = policy.create_graph and any(leaf.requires_grad for leaf in leaves)
    devices, args = without_autocast(options, leaves, args)
    with ring(policy, func, autocast_off=devices) as blocks:
        problem = Problem(policy, func, structure, leaves, args).entered(blocks)
        if in_transform:  # autograd.grad does not see the levels of torch.func
            every = tuple(range(len(leaves)))
            grads, value = torch.func.grad_and_value(problem, argnums=every)(*problem.leaves)
        else:
            found = gradient_with_graph(problem, problem.leaves, "parameter_gradient", create_graph)
            value, grads = found.value, found.parts
        # squares of small numbers underflow in half precision
        g = [upcast_half(part) for part in grads if part is not None]
        norm = pytree.sum_scalars([(part * part.conj()).real.sum() for part in g])
        norm = norm if squared else root(norm)
        if create_graph and not in_transform and not norm.requires_grad:
            reason = "the gradient of func does not depend on the parameters"
            raise no_gradient_flow(problem, problem.leaves, reason)
    if not in_transform:
        warn_if_derivatives_not_finite(problem, value, [norm], problem, problem.leaves)
    return (norm, value) if create_graph or in_transform else (norm.detach(), value.detach())
