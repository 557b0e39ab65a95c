"""The Laplacian of a network in its inputs: what PINNs and score matching differentiate."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hoglib import _arguments as arguments
from hoglib import _functorch
from hoglib._functional import call_with
from hoglib._recording import recordable, recording
from hoglib._substitution import lingering
from hoglib.curvature._pointwise import by_forward, by_reverse
from hoglib.stand_ins import stand_ins_if


def laplacian(
    func: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    num_projections: int | None = None,
    generator: torch.Generator | None = None,
    create_graph: bool | None = None,
    stand_ins: bool = True,
) -> tuple[Tensor, Tensor]:
    r"""The value of a function at many points, and its Laplacian by their coordinates.

        f_n = func(x, *args)_n        L_n = sum_i d^2 f_n / d x_{n,i}^2
        with num_projections = k:     L_n ~ 1/k sum_v v^T (d^2 f_n / d x_n^2) v,  v_i = -1 or 1

    Shapes: x [N, ...], N points that func treats each by itself; f and L [N] or [N, ...outputs]. If
    func gives a scalar, x is one point of any shape. func may be an `nn.Module`; per-point data
    (a time, a class) go into args.

        u, lap = hoglib.laplacian(net, x)                  # x [N, 2], net(x) [N, 1]
        loss = (lap + source).square().mean()              # Poisson's equation
        loss.backward()

    Exact: a gradient with its graph, and a backward pass for each of the D elements of a point;
    several outputs take the passes of one. The estimate takes k passes; its mean is L, its variance
    2/k sum_{i != j} H_ij^2, and for a diagonal H it is exact.
    create_graph: whether f and L can be differentiated again, by parameters, x or args. By default
    they can where gradients are enabled and something needs one; then all D passes stay in memory
    until backward. Inside torch.func transforms they always can, and the route is forward-over-reverse,
    with a run of func for each element. stand_ins: as in `hvp`.

    The inputs are not changed, and it works under no_grad and inference_mode. A network of ReLUs has
    Laplacian zero: take tanh, SiLU or sine.
    Raises TypeError and ValueError for an x, a value or an option of the wrong kind, and where
    train-mode batch norm makes points depend on each other; RuntimeError where the value does not
    depend on x; NotImplementedError where torch has no derivative.
    Source: Raissi, Perdikaris and Karniadakis, 2019; the estimate: Hutchinson, 1989, and Song et al.,
    Sliced Score Matching, 2019.
    """
    arguments.function("func", func)
    _points(x)
    if create_graph is not None:
        arguments.flag("create_graph", create_graph)
    keep = torch.is_grad_enabled() if create_graph is None else create_graph
    signs = None if num_projections is None else _signs(x, num_projections, generator)
    with recording(), lingering(), stand_ins_if(stand_ins):
        x, inputs = recordable((x, args))
        # a module's own parameters, but copies of the buffers, which its forward may change
        call = partial(call_with, func, {}) if isinstance(func, nn.Module) else func

        def values(points: Tensor) -> Tensor:
            with _BatchNorms() as norms:
                value = _value(call(points, *inputs), points)
            if value.dim() and norms.in_training:
                raise arguments.WrongValue(
                    "func(x, *args): expected each point's value to depend on that point alone, got "
                    "a batch norm in training mode, whose mean and variance come from all points. "
                    "Call `.eval()` on the model, or use LayerNorm or GroupNorm in its place."
                )
            return value

        if _functorch.transforms_active():
            value, total = by_forward(values, x, signs)
        else:
            value, total = by_reverse(values, x, signs, keep, always=create_graph is True)
    return value, total if num_projections is None else total / num_projections


class _BatchNorms(TorchFunctionMode):
    """Sees whether a batch norm took its statistics from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.in_training = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm or func is torch.batch_norm:
            self.in_training |= bool(args[5] if len(args) > 5 else kwargs.get("training", False))
        return func(*args, **kwargs)


def _points(x: Any) -> None:
    arguments.differentiable("x", x)
    if x.is_complex():
        raise arguments.WrongType(
            f"x: expected real coordinates, got {arguments.describe(x)}, whose Laplacian is not one "
            "thing; pass its real view, `torch.view_as_real(x)`, and rebuild it in func."
        )


def _signs(x: Tensor, number: Any, generator: Any) -> list[Tensor]:
    """Rademacher vectors: -1 or 1 at each element of each point."""
    arguments.at_least("num_projections", number, 1)
    if arguments.generator(generator) is not None and generator.device.type != x.device.type:
        raise arguments.WrongValue(
            f"generator: expected one on {x.device.type}, as x, got one on {generator.device.type}; "
            f"make it with `torch.Generator({x.device.type!r})`."
        )
    shape = (number, *x.shape)
    signs = torch.randint(0, 2, shape, generator=generator, device=x.device)
    return list((2 * signs - 1).to(x.dtype))


def _value(value: Any, x: Tensor) -> Tensor:
    arguments.tensor("func(x, *args)", value)
    if not value.is_floating_point():
        raise arguments.WrongType(
            f"func(x, *args): expected a real floating-point tensor, got {arguments.describe(value)}."
        )
    if value.dim() and (x.dim() == 0 or value.shape[0] != x.shape[0]):
        raise arguments.WrongValue(
            f"func(x, *args): expected one value for each point, [{len(x) if x.dim() else 'N'}, ...], "
            f"or a scalar for one point, got {arguments.describe(value)} for x of shape "
            f"{tuple(x.shape)}; the points are the first dimension of x, `x[:, None]` for numbers."
        )
    return value
