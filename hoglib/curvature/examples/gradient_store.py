"""Projected gradients of the examples of a data set, in a file that answers queries later."""

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.messages.files import ScoreFile, digest
from hoglib._core.messages.progress import ProgressBar
from hoglib._core.substrate.fingerprint import sums_and_norms
from hoglib._core.torch_api import pytree
from hoglib.curvature.algebra.vector_space import Space, Tree, groups_of
from hoglib.curvature.batches.data import constants_of, in_fixed_order
from hoglib.curvature.examples.example_gradients import (
    Examples,
    check_same,
    gradient_rows,
    warn_of_other_values,
)
from hoglib.curvature.kronecker.kfac_operator import KFACOperator
from hoglib.verification.entry_points import examined_functions

CALLER = "gradient_store"


class _Projection(NamedTuple):
    """S [K, P], a sparse matrix with one entry, 1 or -1, in each column."""

    places: Tensor  # [P], the row of each column's entry
    signs: Tensor  # [P], the entries
    modules: dict[str, slice]  # the rows of S for the parameters of each module

    @staticmethod
    def of(space: Space, project: int | None, by_module: bool, seed: int) -> "_Projection":
        """Draw S. For a module with at most `project` parameters S is the identity."""
        random = torch.Generator("cpu").manual_seed(seed)
        paths, numbers = pytree.paths(space.params), space.places()
        places, signs = torch.empty(2, space.size, dtype=torch.int64, device="cpu")
        modules, stop = {}, 0
        for group in groups_of("module" if by_module else None, space.params):
            own = torch.cat([numbers[i] for i in group])
            start, width = stop, len(own) if project is None else min(project, len(own))
            stop += width
            places[own], signs[own] = torch.arange(len(own), device="cpu") + start, 1
            if width < len(own):
                drawn = torch.randint(2 * width, own.shape, generator=random, device="cpu")
                places[own], signs[own] = drawn // 2 + start, drawn % 2 * 2 - 1
            modules[paths[group[0]].rpartition(".")[0] if by_module else ""] = slice(start, stop)
        return _Projection(places.to(space.device), signs.to(space.device, space.dtype), modules)

    @property
    def width(self) -> int:
        """K, the number of rows of S."""
        return max(part.stop for part in self.modules.values())

    def apply(self, rows: Tensor) -> Tensor:
        """S times each row: [n, P] -> [n, K]."""
        return rows.new_zeros(len(rows), self.width).index_add_(1, self.places, rows * self.signs)


@final
@validation.short_repr
class GradientStore(NamedTuple):
    """Projected gradients of the examples of a data set, from :func:`gradient_store`.

    Attributes:
        rows: S A^-1 g_n for each example, [N, K]; a memory map of the file, on the CPU.
        modules: The columns of each module; one entry "" for all parameters together.
        loss: The function.
        params: The parameters.
        projection: S.
        preconditioned: Whether A is a solver's matrix, not the identity.
        point: Sums and norms of the parameters and the model's constants: queries must have equal ones.
    """

    rows: Tensor
    modules: dict[str, slice]
    loss: Any
    params: Tree
    projection: _Projection
    preconditioned: bool
    point: Any

    def products(self, query: object, *, by_module: bool = False) -> Any:
        r"""Products of the gradients of queries with the stored gradients of the examples.

            p_nq = <S A^-1 g_n, S grad loss(query q)>

        Without a projection and a solver these are the products of gradients of TracIn. With a
        projection they are unbiased estimates over seeds, each with a standard deviation of at most
        sqrt(2 / K) times the norms of both gradients.

        Args:
            query: The queries: a batch, or batches.
            by_module: Return a dict with the part of each module; the parts add up to the product. The
                store must have ``by_module=True``.
        Returns:
            The products [N, queries], on the CPU; with by_module a dict: module name -> [N, queries].
        Raises:
            ArgumentValueError: if params or the model have changed since the store was made.
        References:
            Pruthi, Liu, Kale and Sundararajan, Estimating Training Data Influence by Tracing Gradient
            Descent, 2020.
        Example:
            >>> loss = lambda p, x: (x @ p).square().mean()
            >>> store = hog.gradient_store(loss, torch.ones(2), torch.eye(2), out="gradients.npy")
            >>> store.products(torch.tensor([[1.0, 1.0]]))
            tensor([[8.],
                    [8.]])
        """
        space = Space(self.params)
        if validation.boolean("by_module", by_module) and [*self.modules] != _modules_of(space):
            raise errors.ArgumentValueError(
                "by_module: expected a store that was made with by_module=True, got one that projects "
                "all parameters together."
            )
        if _values_of(self.loss, space) != self.point:
            raise errors.ArgumentValueError(
                f"{CALLER}: expected params, and a model, with the values of the stored gradients, got "
                "others; make another store, with another out=."
            )
        in_fixed_order("query", query)
        examples = Examples.of("query", self.loss, query, False)
        bar = ProgressBar(CALLER, False, "batch")
        with examined_functions(CALLER, first_order=True):
            parts = examples.parts(self.loss, space, bar, self._gradients, caller=CALLER)
            projected = torch.cat([self.projection.apply(g).to(self.rows) for _, g in parts])
        if not by_module:
            return self.rows @ projected.T
        return {name: self.rows[:, at] @ projected[:, at].T for name, at in self.modules.items()}

    def _gradients(self, batch: object, weights: Tensor | None) -> Any:
        return gradient_rows(self.loss, self.params, batch)

    def influence(self, query: object, *, by_module: bool = False) -> Any:
        """The influence of each example on the loss of each query, as `hoglib.influence` defines it.

            s_nq = -p_nq

        Args:
            query: The queries: a batch, or batches.
            by_module: As for :meth:`products`.
        Returns:
            The scores [N, queries], on the CPU; with by_module a dict: module name -> [N, queries].
        Raises:
            ArgumentValueError: for a store without a solver.
        """
        if not self.preconditioned:
            raise errors.ArgumentValueError(
                "influence: expected a store with the inverse of a matrix, got one of plain gradients; "
                "make it with solver=hog.KFACOperator(loss, params, data) and damping=, or take "
                "`products`."
            )
        return pytree.map_tensors(torch.neg, self.products(query, by_module=by_module))


def _modules_of(space: Space) -> list[str]:
    """The names of the modules with parameters, in order."""
    return [*dict.fromkeys(path.rpartition(".")[0] for path in pytree.paths(space.params))]


def _values_of(loss: object, space: Space) -> Any:
    """Sums and norms of the parameters and the constants of the model."""
    return sums_and_norms([*space.leaves(), *constants_of(loss, space.leaves())])


@validation.explain_arguments
def gradient_store(
    loss: object,
    params: Tree,
    data: object,
    *,
    out: str | os.PathLike[str],
    project: int | None = 512,
    by_module: bool = False,
    solver: KFACOperator | None = None,
    damping: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> GradientStore:
    r"""Write the projected gradients of the examples of a data set to a file, for queries to come.

        row n = S A^-1 g_n        g_n = d l_n / d params, as in `hoglib.per_example_gradients`

    with S a random matrix [K, P] that has a single entry, 1 or -1, in each column (a count sketch), so
    that <S u, S v> is an unbiased estimate of <u, v>, and A the identity, or K + damping I for a
    `hoglib.KFACOperator` K. A query then takes its own gradient and one product with the file:
    :meth:`GradientStore.products` and :meth:`GradientStore.influence`.

    Rows are written in order. A repeated call continues after the last written row, with batches of any
    size; if the file is complete, it returns after a pass that hashes the data. The last written row is
    computed again, and compared. The file ``<out>.call`` identifies the call.

    Args:
        loss: The function ``loss(params, batch)`` that returns a scalar, for instance from
            `hoglib.functional_loss`.
        params: Where the gradients are taken; any pytree of floating-point tensors.
        data: A batch, or a DataLoader or another re-iterable of batches, in a fixed order.
        out: The path of a ``.npy`` file, with K numbers for each example, in float32 at least. Needs
            NumPy.
        project: The number of rows of S, K, for each module with ``by_module``. Modules with fewer
            parameters are kept whole. None: no projection, K = P.
        by_module: Project the parameters of each module apart, so that scores can be split by modules.
        solver: A `hoglib.KFACOperator` of the training data, on params.
        damping: Added to the diagonal of the solver's matrix.
        seed: The seed of S.
        progress: Show a bar that counts batches (needs tqdm).
    Returns:
        A :class:`~hoglib.curvature.GradientStore`.
    Raises:
        ArgumentTypeError: if solver is not a KFACOperator.
        ArgumentValueError: for a DataLoader that shuffles, a solver without damping or on other
            parameters, and an existing file `out` of another call or loss, or a truncated file.
        OutputError: if `out` is not writable; raised before any computation.
        NonFiniteError: for an example with NaN or infinity in its gradient.
        UnsupportedError: for DTensor parameters.
    References:
        Charikar, Chen and Farach-Colton, Finding Frequent Items in Data Streams, 2002. Weinberger et
        al., Feature Hashing for Large Scale Multitask Learning, 2009. Park et al., TRAK: Attributing
        Model Behavior at Scale, 2023.
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> data = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])
        >>> K = hog.KFACOperator(loss, params, data)
        >>> store = hog.gradient_store(loss, params, data, out="rows.npy", solver=K, damping=0.0)
        >>> store.influence((torch.ones(1, 1), torch.tensor([[2.0]])))
        tensor([[ 2.],
                [-2.]])
    """
    space = Space(params)
    space.refuse_sharded(CALLER)
    validation.none_or_at_least("project", project, 1)
    validation.boolean("by_module", by_module)
    validation.boolean("progress", progress)
    in_fixed_order("data", data)
    if (solver is None) != (damping is None):
        raise errors.ArgumentValueError(
            f"{CALLER}: expected solver= and damping= together, got one without the other."
        )
    if solver is not None:
        if not isinstance(solver, KFACOperator):
            raise errors.ArgumentTypeError(
                f"solver: expected a hog.KFACOperator of the training data, got "
                f"{validation.describe(solver)}; EKFAC has eigenvalue_corrected=True."
            )
        validation.number("damping", damping, minimum=0)
        check_same(solver, space)
        warn_of_other_values(solver, space)
    examples = Examples.of("data", loss, data, True)
    projection = _Projection.of(space, project, by_module, validation.at_least("seed", seed, 0))
    w = examples.weights
    if not float(w.sum()):
        raise errors.ArgumentValueError(
            "data: expected examples that count, got labels that are all ignored, or weights of zero."
        )
    file = ScoreFile(Path(out), {
        "shape": [len(w), projection.width],
        "dtype": "float64" if space.dtype == torch.float64 else "float32",
        "params": digest([*space.leaves(), *constants_of(loss, space.leaves())]),
        "data": examples.digest, "project": project, "by_module": by_module, "seed": seed,
        "damping": damping and float(damping),
        "solver": solver and digest(pytree.leaves(solver.state_dict())),
    })  # fmt: skip
    solve = None if solver is None or damping is None else solver.inverse(damping).matvec
    bar, scale = ProgressBar(CALLER, progress, "batch"), len(w) / float(w.sum())
    rows: Any = partial(gradient_rows, loss, params)
    # The last nonzero row is computed again: the digests of the call do not contain the criterion.
    written = file.scores[: file.done].any(1).nonzero()
    start = int(written[-1]) if len(written) else file.done
    with examined_functions(CALLER, first_order=True):
        for at, g in examples.parts(loss, space, bar, rows, start, CALLER):
            preconditioned = g if solve is None else solve(g.T).T
            # float32 at least: half precision would round each addition of a long sum
            found = scale * projection.apply(preconditioned.to(file.scores.dtype)).to(file.scores)
            if at.start == start < file.done:
                _check_same_row(file.scores[start], found[0], space.precision, solver is None)
                found[0] = file.scores[start]  # bit for bit: other stores may map this file
            file.scores[at] = found
    point = _values_of(loss, space)
    return GradientStore(
        file.scores, projection.modules, loss, params, projection, solver is not None, point
    )


def _check_same_row(stored: Tensor, row: Tensor, precision: torch.dtype, plain: bool) -> None:
    """Raise unless a stored row agrees with the recomputed row. plain: without a solver; the inverse
    of a solver's matrix amplifies rounding."""
    allowed = torch.finfo(precision).eps ** 0.5 if plain else 0.1
    if float((stored - row).norm()) > allowed * float(stored.norm()):
        raise errors.ArgumentValueError(
            f"{CALLER}: expected the loss of the stored gradients, got one with another gradient of "
            "the last written example: another criterion, module or mode (train, eval). Name "
            "another file in out=, or delete this one and its .call."
        )
