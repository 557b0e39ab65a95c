"""Forces, and matrices of force constants: derivatives of energies by positions."""

from functools import partial
from typing import Any, Literal, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from hoglib._core.messages import results, validation
from hoglib._core.runtime.source_location import warn
from hoglib._core.substrate.autograd import Vector, materialize_grads, vjp
from hoglib._core.substrate.gradient_graph import depends_on_any, graph_bytes
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib.capture.within import when_compiled, within_compile
from hoglib.curvature.maps.rows import Chunk, Rows, unit_rows
from hoglib.errors import ArgumentValueError
from hoglib.penalties.distributed import average_gradients
from hoglib.penalties.evaluation import captures, run_as_graph
from hoglib.penalties.input_vjp import Function, InputVJP, input_vjp
from hoglib.penalties.options import CheckedOptions, Options, check_options, select_output
from hoglib.penalties.samples import Samples
from hoglib.penalties.terms import check_batch_dependence, is_batch_dependent

OF_PENALTIES = ("reduction", "micro_batch", "return_outputs")  # options that forces do not have


def _like_forces(value: object, options: dict[str, Any], positions: Tree, *args: Any) -> Any:
    y = select_output(value, options.get("output"))
    forces = pytree.map(lambda x: x.detach() * y.sum(), positions)
    if not options.get("hessian"):
        return EnergyForces(y, forces)
    batched = int(y.dim() > 0 and pytree.tensors(positions)[0].dim() > 1)

    def blocks(f: Tensor) -> Any:
        return pytree.map(lambda x: f.sum().expand(*f.shape, *x.shape[batched:]), positions)

    return EnergyForcesHessian(y, forces, pytree.map(blocks, forces))


@overload
def forces(
    energy: Function,
    positions: Any,
    *args: Any,
    hessian: Literal[True],
    chunk_size: int | None = None,
    **options: Unpack[Options],
) -> "EnergyForcesHessian": ...
@overload
def forces(
    energy: Function,
    positions: Any,
    *args: Any,
    hessian: Literal[False] = False,
    chunk_size: int | None = None,
    **options: Unpack[Options],
) -> "EnergyForces": ...


@when_compiled(within_compile(_like_forces, select=select_output))
def forces(
    energy: Function,
    positions: Any,
    *args: Any,
    hessian: bool = False,
    chunk_size: int | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Energies and forces, for losses of both.

        E = energy(x)        F = -dE/dx        H = d^2 E / dx^2, with hessian=True

    E and F (and H) can be differentiated again by the parameters if gradients are on; under no_grad and
    in inference mode they have no graph, so that one call serves training and prediction. The energy
    is computed once. Warns if the forces reach no parameter that requires grad.

    Args:
        energy: E, called as energy(positions, *args); it returns one energy per structure.
        positions: x, a tensor or any tree of tensors (positions and cell). Structures of a batch
            must not act on one another.
        *args: Further arguments of the energy, such as species.
        hessian: Whether H is computed too; for graphs (``batch``) positions must be one tensor.
            Default: False.
        chunk_size: Rows of H at once, for each structure, as in `hoglib.hessian`. Default: by memory.
        **options: Of :class:`Options`: ``output`` (which of several outputs), ``batch`` (the structure
            that each row belongs to), ``autocast`` (leave autocast on), ``stand_ins`` (run inside
            `second_order()`), ``compile`` (run as one graph; not for the Hessian of graphs: its size
            depends on the values of batch).
    Returns:
        :class:`EnergyForces` (E, F), or :class:`EnergyForcesHessian` (E, F, H): E as energy returned
        it (with several outputs, the selected one), F like x.
    Raises:
        ArgumentTypeError, ArgumentValueError: For arguments or energies of the wrong kind or shape.
        NoSecondDerivative: If energies do not depend on positions; the message names the call that
            detaches the gradient.
    Shape:
        - one structure: x [...], E [], H [\*x.shape, \*x.shape]; of a tree
          ``H[a][b]``, ``[*x[a].shape, *x[b].shape]``, for instance of positions and strain: force
          constants, internal strain and elastic constants times the volume
        - a batch of structures: x [B, ...], E [B] or [B, 1], H [B, ..., ...]
        - graphs, ``batch=index``: x [atoms, ...], E [G] or [G, 1], index [atoms], H a list of G
          tensors [n, ..., n, ...]
    References:
        Behler and Parrinello, Generalized Neural-Network Representation of High-Dimensional
        Potential-Energy Surfaces, 2007; Schuett et al., SchNet, 2017, eq. 3.
    Example:
        >>> spring = lambda x: x.square().sum() / 2
        >>> E, F, H = hog.penalties.forces(spring, torch.tensor([1.0, 2.0]), hessian=True)
        >>> E, F
        (tensor(2.5000), tensor([-1., -2.]))
        >>> H
        tensor([[1., 0.],
                [0., 1.]])
    """
    validation.boolean("hessian", hessian)
    validation.none_or_at_least("chunk_size", chunk_size, 1)
    checked = check_options("forces", options, without=OF_PENALTIES)
    body = partial(_energies_and_forces, energy, hessian, chunk_size, checked._replace(batch=None))
    inputs = positions, args, checked.batch
    if not captures(checked.policy):
        return body(*inputs)
    energies, found, *rest = run_as_graph(body, energy, checked, inputs, needs_outputs=True)
    found = pytree.map(lambda f: average_gradients("forces", f, energies), found)
    return _as_result(energies, found, *rest)


@results.result
@validation.short_repr
class EnergyForces(NamedTuple):
    """The result of :func:`forces`; it can be unpacked.

    Attributes:
        energy: E, as the energy function returned it.
        forces: F, like the positions.
    """

    energy: Tensor
    forces: Any


@results.result
@validation.short_repr
class EnergyForcesHessian(NamedTuple):
    """The result of :func:`forces` with ``hessian=True``; it can be unpacked.

    Attributes:
        energy: E, as the energy function returned it.
        forces: F, like the positions.
        hessian: H, a tree of trees of blocks for a tree, or a list of the Hessians of graphs.
    """

    energy: Tensor
    forces: Any
    hessian: Any


def _as_result(energy: Tensor, forces: object, hessian: object = None) -> Any:
    found = energy, forces
    return EnergyForces(*found) if hessian is None else EnergyForcesHessian(*found, hessian)


def _energies_and_forces(
    func: Function,
    with_hessian: bool,
    chunk_size: int | None,
    options: CheckedOptions,
    positions: Tree,
    args: tuple[Any, ...],
    batch: object,
    draws: object = None,
) -> Any:
    """(E, F) or (E, F, H), as a function of tensors; no random numbers are drawn."""
    with input_vjp(func, positions, args, options._replace(batch=batch), per_sample=False) as at:
        check = at.create_graph and not at.in_transform and value_checks_on()
        if not at.in_transform:
            at.samples = _structure_rows(at, batch)
            # with the Hessian it is an error, see `_hessian`
            if check and at.samples is not None and not with_hessian:
                check_batch_dependence(at)
        # with a graph if H is wanted, a derivative of the gradient, even if the result needs none
        gradient = at.vjp(create_graph=True if with_hessian else None)
        forces = [-g for g in gradient]
        hessian = _hessian(at, gradient, batch, chunk_size) if with_hessian else None
        if check and not any(f.requires_grad and depends_on_any(f, at.trainable) for f in forces):
            warn(
                "forces: expected forces that depend on parameters that require grad, got forces "
                "that do not: a loss of them trains nothing. Look for detach() or no_grad in "
                "energy, and for frozen layers."
            )
    at.warn_if_not_finite([*forces, *pytree.tensors(hessian)] if with_hessian else forces)
    energy = at.y
    if at.create_graph:
        # like a penalty's, the gradient of a loss of forces is averaged over DDP's processes
        forces = [average_gradients("forces", f, at.outputs) for f in forces]
    else:
        energy, forces, hessian = pytree.map_tensors(Tensor.detach, (energy, forces, hessian))
    return _as_result(energy, at.tree(forces), hessian)


def _hessian(at: InputVJP, gradient: Vector, index: Any, chunk_size: int | None) -> Any:
    """H of each structure: [B, ..., ...]; for a tree its blocks; for graphs a list."""
    validation.refuse_transforms("forces(hessian=True)", "use `torch.func.hessian(energy)` there.")
    if index is not None and len(gradient) != 1:
        raise ArgumentValueError(
            "forces(hessian=True, batch=...): expected one tensor of positions, got a tree of "
            f"{len(gradient)}; pass the others after it, as arguments of energy, or one graph a call."
        )
    # a pass gives one row for every structure, wrong if structures act on one another
    if at.samples is not None and value_checks_on() and is_batch_dependent(at):
        raise ArgumentValueError(
            f"forces(hessian=True): expected {at.y.numel()} energies of structures that do not act "
            "on one another, got one that depends on the positions of others. Energies of atoms: add "
            "them up by structure, and pass batch= for several."
        )
    if index is not None:
        x, (g,) = at.leaves[0], gradient
        return _hessians_of_graphs(at, g, x, index, chunk_size)
    batched = int(at.samples is not None)  # 1 for a batch [B, ...], else 0
    pairs = zip(gradient, at.leaves, strict=True)
    return at.tree([at.tree(_hessian_blocks(at, g, x, batched, chunk_size)) for g, x in pairs])


def _hessian_blocks(
    at: InputVJP, g: Tensor, x: Tensor, batched: int, chunk_size: int | None
) -> Vector:
    """The blocks d<g, unit> / dy of H for the rows of x, one block for each leaf y."""
    shape = x.shape[batched:]
    count = shape.numel()

    def units(start: int, stop: int) -> Vector:
        each = unit_rows(x, shape, start, stop).view(stop - start, *[1] * batched, *shape)
        return [each.expand(stop - start, *x.shape)]

    whole = _products_with(at, g, at.leaves, units, count, chunk_size)
    pairs = zip(at.leaves, whole, strict=True)
    return [r.movedim(0, batched).reshape(*x.shape, *y.shape[batched:]) for y, r in pairs]


def _structure_rows(at: InputVJP, index: object) -> Samples | None:
    """The structure of each row, with one structure per energy; None for a single structure."""
    y, count = at.y, at.leaves[0].shape[0]
    if index is None:
        if not y.dim() or (y.numel() == 1 and count != 1):
            return None
        if y.numel() != count or y.shape[0] != count:
            raise ArgumentValueError(
                f"forces: expected one energy, or one for each of {count} structures, got "
                f"{validation.describe(y)}; add up energies of atoms, and where rows of positions are "
                "atoms of several structures, pass batch=, the structure of each row."
            )
    samples = Samples("forces", at.leaves, at.problem.structure, index)
    if samples.count is not None and samples.count > y.numel():
        raise ArgumentValueError(
            f"forces: batch: expected indices below the number of energies, {y.numel()}, got "
            f"{samples.count - 1}."
        )
    # the index does not name graphs without atoms
    samples.set_count(y.numel())
    return samples


def _hessians_of_graphs(
    at: InputVJP, g: Tensor, x: Tensor, index: Tensor, chunk_size: int | None
) -> Vector:
    """The Hessian of each structure; a pass computes one row for all, as they do not interact."""
    structures = [(index == k).nonzero().reshape(-1) for k in range(at.y.numel())]
    width, each = x.shape[1:].numel(), x.shape[1:]
    # the number of each entry of x in its own structure
    number = torch.arange(len(x) * width, device=x.device).reshape(x.shape)
    for atoms in structures:
        own = torch.arange(len(atoms) * width, device=x.device)
        number[atoms] = own.reshape(len(atoms), *each)

    def units(start: int, stop: int) -> Vector:
        rows = torch.arange(start, stop, device=x.device).reshape(-1, *[1] * x.dim())
        return [(number == rows).to(x)]

    count = max(map(len, structures), default=0) * width
    (rows,) = _products_with(at, g, [x], units, count, chunk_size)
    return [
        rows[: len(atoms) * width, atoms].reshape(len(atoms), *each, len(atoms), *each)
        for atoms in structures
    ]


def _products_with(
    at: InputVJP, g: Tensor, by: Vector, units: Chunk, count: int, chunk_size: int | None
) -> Vector:
    """d <g, unit> / dy for each y in `by` and each of `count` units, [count, *y.shape]."""
    if not count or not g.requires_grad:
        return [y.new_zeros(count, *y.shape) for y in by]

    def product(unit: Vector) -> Vector:
        return materialize_grads(vjp([g], by, unit, "forces", True, at.create_graph), by)

    name = (len(by), *(x.shape for x in (g, at.y)), *at.graph.names)
    with at.backward_stand_ins():
        rows = Rows(at.problem, name, product, partial(graph_bytes, [g]), product)
        return rows.map(units, count, chunk_size)
