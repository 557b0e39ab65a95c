r"""The terms of the penalties, one per sample: functions of an `InputVJP`, a function at its points.

    g = at.vjp(u)                 J^T u, differentiable again:  grad(y, x, u, create_graph=True)
    at.squared_norms(g)           |g_n|^2 over all entries of a sample, [N]

A term first checks the shape of the output. Afterwards :func:`~hoglib.penalties.evaluation.evaluate`
checks that the term's gradient reaches the parameters, and that samples do not depend on one another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hoglib._core.messages import validation
from hoglib._core.messages.closures import owner_of
from hoglib._core.modules.module_kinds import BATCH_NORMS
from hoglib._core.numerics.trust import memoize_on
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import Vector
from hoglib._core.torch_api import pytree
from hoglib.curvature.points.input_derivatives import depends_on_others
from hoglib.errors import ArgumentValueError
from hoglib.ops._distance import root
from hoglib.penalties.input_vjp import InputVJP

Term = Callable[[InputVJP], Tensor]  # [N]


def squared_slope(at: InputVJP) -> Tensor:
    """|g_n|^2"""
    check_one_number_a_sample(at)
    return at.squared_norms(at.vjp())


def half_squared_slope(at: InputVJP) -> Tensor:
    """|g_n|^2 / 2"""
    return squared_slope(at) / 2


def squared_distance(k: float, one_sided: bool) -> Term:
    """(|g_n| - k)^2, or one-sided max(0, |g_n| - k)^2"""

    def term(at: InputVJP) -> Tensor:
        check_one_number_a_sample(at)
        # `root` has the derivative 0 at 0, sqrt an infinite one
        above = root(at.squared_norms(at.vjp())) - k
        return (above.relu() if one_sided else above).square()

    return term


def squared_jacobian(projections: int | None, halved: bool = False, known: bool = False) -> Term:
    """C/P sum_p |v_p^T (J_n - D_n)|^2, with P unit vectors v_p in the space of the C outputs.

    halved: divide by 2. known: D is the first argument of the function; otherwise D = 0.
    """

    def term(at: InputVJP) -> Tensor:
        y = output_rows(at)
        v = _directions(at, y, projections)
        given = _check_derivatives(at) if known else []
        total = y.new_zeros(y.shape[0])
        for p, v_p in enumerate(v):
            g = at.vjp(v_p.view_as(at.y), retain_graph=p + 1 < len(v))
            if known:
                g = _minus_projections(at, g, given, v_p)
            total = total + at.squared_norms(g)
        return total * (y.shape[1] / max(len(v), 1)) / (2 if halved else 1)

    return term


def squared_excess(bound: float, iterations: int | None) -> Term:
    """max(0, |J_n|_2 - K)^2"""

    def term(at: InputVJP) -> Tensor:
        y = output_rows(at)
        if y.shape[1] == 1:
            norms = root(at.squared_norms(at.vjp()))
        elif iterations is None:
            norms = _spectral_norms(at, y)
        else:
            u = _leading_singular_vectors(at, y, iterations)
            norms = root(at.squared_norms(at.vjp(u.view_as(at.y))))
        return (norms - bound).relu().square()

    return term


def _directions(at: InputVJP, y: Tensor, count: int | None) -> list[Tensor]:
    """Orthonormal random directions of the C outputs for each sample; unit vectors if count >= C."""
    outputs = y.shape[1]
    if count is None or count >= outputs:
        return [e.expand_as(y) for e in torch.eye(outputs, dtype=y.dtype, device=y.device)]
    v = at.random(torch.randn, (y.shape[0], outputs, count))
    basis = torch.linalg.qr(v)[0] if count > 1 else F.normalize(v, dim=1)
    return list(basis.to(y).unbind(2))


def _check_derivatives(at: InputVJP) -> Vector:
    """D, after a check of its shapes: [N, *outputs, ...], or for one output per sample also x's."""
    y, given = at.y, pytree.leaves(at.problem.args[0])
    single = y.numel() == y.shape[0]
    for path, leaf, d in zip(pytree.paths(at.tree(at.leaves)), at.leaves, given, strict=True):
        rows = torch.Size((leaf.shape[0], *y.shape[1:], *leaf.shape[1:]))
        shapes = [rows, leaf.shape] if single else [rows]
        if d.shape not in shapes:
            raise ArgumentValueError(
                f"sobolev: derivatives{f'[{path!r}]' if path else ''}: expected shape "
                f"{tuple(shapes[-1])}, got {tuple(d.shape)}."
            )
    return given


def _minus_projections(at: InputVJP, g: Vector, derivatives: Vector, v: Tensor) -> Vector:
    """g - v^T D, for each row of a leaf."""
    assert at.samples is not None
    differences = []
    for a, d, index in zip(g, derivatives, at.samples.index, strict=True):
        u = (v if index is None else v[index]).to(a)
        rows = d.reshape(*u.shape, a.shape[1:].numel()).to(a)  # [rows, C, entries]
        differences.append(a - torch.einsum("nc,ncd->nd", u, rows).view_as(a))
    return differences


def _spectral_norms(at: InputVJP, y: Tensor) -> Tensor:
    """The largest singular value of each sample's Jacobian, from all of its rows."""
    units = torch.eye(y.shape[1], device="cpu").to(y)
    J = [at.vjp(e.expand_as(y).view_as(at.y), retain_graph=True) for e in units]
    samples = at.samples
    assert samples is not None
    # with batch= a sample has several rows of x: sum inner products of rows of J by sample
    if samples.has_index:
        gram = [[samples.sums([a * b for a, b in zip(p, q, strict=True)]) for q in J] for p in J]
        grams = torch.stack([torch.stack(row, -1) for row in gram], -2)
        return root(_norms_of_finite(lambda a: torch.linalg.eigvalsh(a)[:, -1], grams).clamp(min=0))
    whole = [torch.cat([g.reshape(g.shape[0], -1) for g in row], 1) for row in J]
    return _norms_of_finite(torch.linalg.matrix_norm, torch.stack(whole, 1), 2)


def _norms_of_finite(norm: Callable[..., Tensor], matrices: Tensor, *args: object) -> Tensor:
    """The norms of matrices; a matrix with infinity or NaN gets such a norm and gradient.

    LAPACK raises for such a matrix, but an overflow in half precision must reach the gradient scaler.
    """
    finite = matrices.detach().isfinite().flatten(1).all(1)
    norms = norm(torch.where(finite[:, None, None], matrices, 0), *args)
    return torch.where(finite, norms, matrices.abs().sum((1, 2)))


def _leading_singular_vectors(at: InputVJP, y: Tensor, steps: int) -> Tensor:
    """The leading left singular vector of each sample's Jacobian, [N, C], by power iteration."""
    u = F.normalize(at.random(torch.randn, tuple(y.shape)).to(y), dim=1)
    for _ in range(steps):
        # no graph: the norm is stationary at a singular vector, so its derivative by u is zero
        right = at.vjp(u.view_as(at.y), retain_graph=True, create_graph=False)
        u = F.normalize(at.jvp(right).reshape(y.shape), dim=1)
    return u


# Checks: the shape of a sample's output, and that it depends on this sample alone

USE_OTHER_NORM = (
    "Use LayerNorm, GroupNorm or InstanceNorm instead (Gulrajani et al., Improved Training of "
    "Wasserstein GANs, 2017, section 4)."
)
FIND_DEPENDENCE = (
    "Look for a mean, a standard deviation or attention along the batch, for batch_first=False, and "
    "for rows that belong to one sample (pass batch=). Where a statistic of the batch is intended, "
    "filter this warning."
)


def check_one_number_a_sample(at: InputVJP) -> None:
    """Raise unless y has one number per sample."""
    y, count = at.y, at.count()
    if y.numel() != count or (y.dim() and y.shape[0] != count):
        advice = (
            "this is one number for all samples: leave out the mean over the batch."
            if y.dim() == 0
            else "reduce the numbers of each sample, for instance with "
            "`output=lambda y: y.flatten(1).mean(1)`, select another output with output=, or, if "
            "rows of the points are parts of samples, pass batch=, the sample of each row."
        )
        raise ArgumentValueError(
            f"{at.options.name}: expected one number for each of {count} samples, [{count}] or "
            f"[{count}, 1], got {validation.describe(y)}; {advice.rstrip('.')}{_rank_hint(at)}."
        )


def output_rows(at: InputVJP) -> Tensor:
    """y as one row for each sample, [N, C], or an error."""
    y, count = at.y, at.count()
    if not y.dim() or y.shape[0] != count:
        raise ArgumentValueError(
            f"{at.options.name}: expected an output with one row for each of {count} samples, "
            f"got {validation.describe(y)}; leave out the mean over the batch, or select "
            f"another output with output={_rank_hint(at)}."
        )
    return y.reshape(count, -1)


def _rank_hint(at: InputVJP) -> str:
    """A hint for points [D]: perhaps one sample without a batch dimension; "" for other points."""
    return validation.OF_ONE.format("example") if any(x.dim() == 1 for x in at.leaves) else ""


def check_batch_dependence(at: InputVJP) -> None:
    """Warn if a sample's score depends on other samples.

    Layers that normalise by the batch are known by their class. Any other dependence is looked for by a
    gradient, once for each function.
    """
    loss, layers = at.problem.loss, []
    for module in at.modules:
        if isinstance(module, BATCH_NORMS) and (name := _batch_norm_name(module, loss)):
            layers.append(name)
    if not layers and not _recall_dependence(at):
        return
    how = f", through {', '.join(layers)}, which normalises by the whole batch" if layers else ""
    warn(
        f"{at.options.name}: expected each sample's score to depend on that sample alone, got "
        f"one that depends on the others{how}. The gradient by a sample then has parts of the "
        "scores of all samples, and its norm is not the slope of that sample's score. "
        f"{USE_OTHER_NORM if layers else FIND_DEPENDENCE}"
    )


def is_batch_dependent(at: InputVJP) -> bool | None:
    """Whether the output of the last or the first sample has a gradient by points of other samples;
    None if unknown.

    Both, because a recurrent or causal layer that takes samples for time steps makes only later samples
    depend on earlier ones, and a reversed one only earlier samples on later ones.
    """
    samples, y = at.samples, at.y
    if samples is None or y.is_meta or not y.requires_grad or at.count() < 2:
        return None
    rows = y.reshape(at.count(), -1)
    pairs = zip(at.leaves, samples.index, strict=True)
    of = [torch.arange(len(x), device=x.device) if i is None else i for x, i in pairs]
    found = [
        depends_on_others(rows[n].sum(), at.leaves, [index == n for index in of], at.options.name)
        for n in (at.count() - 1, 0)
    ]
    return any(found) or (None if None in found else False)


def _batch_norm_name(module: nn.Module, func: Callable[..., Any]) -> str:
    """The name of a layer that normalises by the batch; "" if it uses running statistics."""
    if not module.training and module.running_mean is not None:
        return ""
    owner = owner_of(func)
    named = owner.named_modules() if isinstance(owner, nn.Module) else ()
    name = next((f" {name!r}" for name, each in named if each is module), "")
    return f"{type(module).__name__}{name}{' in training mode' if module.training else ''}"


def _recall_dependence(at: InputVJP) -> bool:
    """`is_batch_dependent`, memoized.

    The key is a parameter, the function's owner and name, the option `output`, and the modes of the
    modules. The owner of a lambda is its code; critics may share code, so the parameter is part of the
    key. A freed owner's id may return, so its class is too.
    """
    func, output = at.problem.loss, at.options.output
    modes = tuple([module.training for module in at.modules])
    # not isinstance, which calls the slow metaclass of Parameter
    parameter = next((t for t in at.trainable if type(t) is nn.Parameter), at.trainable[0])
    # no getattr on a module: nn.Module.__getattr__ is slow for a missing name
    name = "" if isinstance(func, nn.Module) else getattr(func, "__name__", "")
    owner, selected = owner_of(func), id(owner_of(output)) if callable(output) else output
    key = id(owner), type(owner), name, selected, modes
    return memoize_on(parameter, key, lambda: is_batch_dependent(at)) or False
