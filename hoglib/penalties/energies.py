"""Forces, and matrices of force constants: derivatives of energies by positions."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Unpack, final

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib._core.autograd import Vector, materialize_grads, translate_errors
from hoglib._core.gradient_graph import depends_on_any
from hoglib._core.source_location import warn
from hoglib._core.torch_internals import transforms_active
from hoglib._core.torch_modes import value_checks_off, value_checks_on
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from hoglib.penalties import batch_dependence
from hoglib.penalties.compiled import chosen, leaves_of, run
from hoglib.penalties.distributed import averaged
from hoglib.penalties.input_vjp import InputVJP, input_vjp_at
from hoglib.penalties.options import Options, Settings, settings
from hoglib.penalties.samples import Samples


def forces(
    energy: Callable[..., Any],
    positions: Any,
    *args: Any,
    hessian: bool = False,
    **options: Unpack[Options],
) -> tuple[Any, ...]:
    r"""Energies and forces, for losses of both.

        E = energy(x)        F = -dE/dx        H = d^2 E / dx^2, with hessian=True

    Shapes: positions x and what energy(positions, *args) returns are one of

        one structure          x [...]              E ()                 H [*x.shape, *x.shape]
        structures in a batch  x [B, ...]           E [B] or [B, 1]      H [B, ..., ...]
        graphs, batch=index    x [atoms, ...]       E [G] or [G, 1]      list of G: [n, ..., n, ...]

    x may be a tree (positions and cell), F is like it; hessian wants one tensor. Structures of a batch
    must not act on one another. index: the structure [atoms] that each row belongs to.

    E and F (and H) can be differentiated again by the parameters where gradients are on, and come
    without a graph under no_grad and in inference mode: the same call trains and predicts. The energy
    is computed once. Options: `output`, `batch`, `autocast`, `stand_ins`, `compile` of
    `Options`; with compile the Hessian of graphs, whose size is read from batch=, is refused.
    Returns (E, F) or (E, F, H), E as energy returned it (of several outputs the one that is meant).

    Raises TypeError and ValueError for arguments of the wrong kind; RuntimeError where energies do not
    depend on positions, naming the cut. Warns where the forces reach no parameter that learns.
    Source: Behler and Parrinello, 2007; Schütt et al., SchNet, 2017, eq. 3.
    """
    validation.flag("hessian", hessian)
    given = settings("forces", _only(options))
    at = Forces(energy, hessian, given._replace(batch=None))
    backend = chosen(given.compile)
    if backend is None:
        return at(positions, args, given.batch)
    found = run(
        "forces", at, (positions, args, given.batch), backend, None, False,
        lambda draws: _learn(at(positions, args, given.batch)),
    )  # fmt: skip
    watched = pytree.map(lambda f: averaged("forces", f, leaves_of(f), found[0]), found[1])
    return (found[0], watched, *found[2:])


@final
class Forces:
    """Energies and forces, as a function of tensors and of nothing but these attributes."""

    def __init__(self, func: Callable[..., Any], hessian: bool, given: Settings) -> None:
        self.func, self.hessian, self.given = func, hessian, given

    def __call__(
        self, positions: Any, args: tuple[Any, ...], batch: Any, numbers: Any = None
    ) -> tuple[Any, ...]:
        """numbers: none are drawn; where they are given, what is computed was looked at before."""
        with nullcontext() if numbers is None else value_checks_off():
            return self._computed(positions, args, batch)

    def _computed(self, positions: Any, args: tuple[Any, ...], batch: Any) -> tuple[Any, ...]:
        given = self.given._replace(batch=batch)
        with input_vjp_at("forces", self.func, positions, args, given, per_sample=False) as point:
            functional = transforms_active()
            if not functional:
                point.samples = _structures(point, batch)
                look = point.wanted and point.samples is not None and not self.hessian
                if look and value_checks_on():
                    batch_dependence.check_batch_dependence(point)
            gradient = point.pull(None, graph=True if self.hessian else None)
            found: tuple[Any, ...] = (point.y, point.at([-g for g in gradient]))
            if self.hessian:
                found = (*found, _hessian(point, gradient, batch))
            if (
                point.wanted
                and not functional
                and value_checks_on()
                and not _reach(gradient, point)
            ):
                warn(
                    "forces: expected forces that depend on parameters that learn, got forces that do "
                    "not: a loss of them trains nothing. Look for detach() or no_grad in energy, and "
                    "for frozen layers."
                )
        if functional:
            return found
        if point.wanted:
            watched = [averaged("forces", -g, point.trainable, point.outputs) for g in gradient]
            return (found[0], point.at(watched), *found[2:])
        return tuple(pytree.map_tensors(Tensor.detach, part) for part in found)


def _learn(found: tuple[Any, ...]) -> bool:
    return any(x.requires_grad for x in pytree.leaves(found) if isinstance(x, Tensor))


def _only(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("reduction", "micro_batch", "return_outputs"):
        if name in options:
            raise ArgumentTypeError(
                "forces: expected options among output, batch, autocast, stand_ins, compile; got "
                f"{name!r}, which belongs to penalties."
            )
    return dict(options)


def _reach(gradient: Vector, point: InputVJP) -> bool:
    return any(g.requires_grad and depends_on_any(g, point.trainable) for g in gradient)


def _hessian(point: InputVJP, gradient: Vector, index: Any) -> Tensor | list[Tensor]:
    if transforms_active():
        raise UnsupportedError(
            "forces(hessian=True): expected to run outside of torch.func transforms, got a call "
            "inside; use `torch.func.hessian(energy)` there."
        )
    if len(gradient) != 1:
        raise ArgumentValueError(
            f"forces(hessian=True): expected one tensor of positions, got a tree of {len(gradient)}; "
            "pass the others after it, as arguments of energy."
        )
    x, (g,) = point.own[0], gradient
    if point.samples is not None:
        _apart(point)
    if index is not None:
        rows = _rows_by_structure(point, g, x, index)
        none = x.new_zeros(0, *x.shape[1:], 0, *x.shape[1:])
        return [torch.stack(r).reshape(*r[0].shape, *r[0].shape) if r else none for r in rows]
    if point.samples is not None:  # structures in a batch: one row of each in every pass
        shape = x.shape[1:]
        units = torch.eye(shape.numel(), dtype=x.dtype, device=x.device)
        found = [_product(point, g, x, u.reshape(shape).expand_as(x)) for u in units]
        return torch.stack(found, 1).reshape(len(x), *shape, *shape)
    units = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
    found = [_product(point, g, x, u.reshape(x.shape)) for u in units]
    return (torch.stack(found) if found else x).reshape(*x.shape, *x.shape)


def _structures(point: InputVJP, index: Any) -> Samples | None:
    """Which rows are of which structure, as many as there are energies; None where all are of one."""
    y, count = point.y, len(point.own[0])
    if index is None:
        if not y.dim() or (y.numel() == 1 and count != 1):
            return None
        if y.numel() != count or len(y) != count:
            raise ArgumentValueError(
                f"forces: expected one energy, or one for each of {count} structures, got "
                f"{validation.describe(y)}; add up energies of atoms, and where rows of positions are "
                "atoms of several structures, pass batch=, the structure of each."
            )
    samples = Samples("forces", point.own, point.structure, index)
    if samples.count is not None and samples.count > y.numel():
        raise ArgumentValueError(
            f"forces: batch: expected numbers below that of the energies, {y.numel()}, got "
            f"{samples.count - 1}."
        )
    samples.told(y.numel())
    return samples


def _apart(point: InputVJP) -> None:
    """Structures do not act on one another."""
    if value_checks_on() and batch_dependence.is_batch_dependent(point):
        raise ArgumentValueError(
            f"forces(hessian=True): expected {point.y.numel()} energies of structures that do not act "
            "on one another, got one that depends on the positions of others. Energies of atoms: add "
            "them up by structure, and pass batch= for several."
        )


def _rows_by_structure(point: InputVJP, g: Tensor, x: Tensor, index: Tensor) -> list[list[Tensor]]:
    """For each structure the rows of its Hessian, one of every structure in each pass."""
    structures = [(index == k).nonzero().reshape(-1) for k in range(point.y.numel())]
    width = x.shape[1:].numel()
    rows: list[list[Tensor]] = [[] for _ in structures]
    for j in range(max(map(len, structures), default=0) * width):
        atom, entry = divmod(j, width)
        among = [k for k, atoms in enumerate(structures) if atom < len(atoms)]
        unit = torch.zeros_like(x).reshape(len(x), -1)
        for k in among:
            unit[structures[k][atom], entry] = 1
        product = _product(point, g, x, unit.reshape(x.shape))
        for k in among:
            rows[k].append(product[structures[k]])
    return rows


def _product(point: InputVJP, g: Tensor, x: Tensor, unit: Tensor) -> Tensor:
    """d <g, unit> / dx."""
    if not g.requires_grad:
        return torch.zeros_like(x)
    with point.standing_in(), translate_errors("forces"):
        found = torch.autograd.grad(
            g, [x], unit, retain_graph=True, create_graph=point.wanted, allow_unused=True
        )
    return materialize_grads(list(found), [x])[0]
