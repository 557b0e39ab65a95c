"""Which training examples raise or lower the loss of others."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from hoglib._core import validation
from hoglib.curvature.data import is_batch, to_device
from hoglib.curvature.example_gradients import gradient_rows
from hoglib.curvature.kfac_operator import KFACOperator
from hoglib.curvature.newton import refuse_unknown
from hoglib.curvature.operators import GGNOperator
from hoglib.curvature.vector_space import Space
from hoglib.errors import ArgumentValueError, NonFiniteError
from hoglib.verification.entry_points import examined_functions

Tree = Any
SOLVERS = ("cg", "kfac", "ekfac")


def influence(
    loss: Any,
    params: Tree,
    train: Any,
    query: Any,
    *,
    solver: str = "ekfac",
    damping: float,
    vmap: bool | None = None,
    tol: float | None = None,
    **options: Any,
) -> Tensor:
    r"""The influence of each training example on the loss of each query.

        s_nq = d loss(params(e), query q) / d e  at e = 0
             = -grad loss(query q)^T (G + damping I)^-1 grad loss(example n)

    where params(e) minimizes the mean loss of the training data plus e loss(example n) plus
    damping/2 |params|^2, and G is the Gauss-Newton matrix of the training data. A positive score: more
    weight on the example raises the loss of the query. To leave an example out is e = -1/N, so that the
    loss of the query changes by about -s_nq / N.

    Args:
        loss: From `hoglib.functional_loss`.
        params: The parameters as they were trained, a dict of tensors by name.
        train: The training data: a batch, or a DataLoader or another re-iterable of batches, in a fixed
            order.
        query: The queries, as train.
        solver: How the inverse is applied: "cg", exactly, by conjugate gradients; "kfac" or "ekfac", by
            a `hoglib.KFACOperator`, with corrected eigenvalues, for deep networks.
        damping: As above: the weight decay that the parameters were trained with, or more.
        vmap: As of `hoglib.per_example_gradients`.
        tol: Of "cg", as of `hoglib.curvature.cg`.
        **options: Of `hoglib.GGNOperator` or `hoglib.KFACOperator`, such as kind="mc" and
            progress=True.
    Returns:
        The scores [train, query], in the order of the data.
    Raises:
        ArgumentTypeError: for an option that the operator does not have.
        ArgumentValueError: for a DataLoader that shuffles, whose order nobody knows afterwards, for
            batch norm in train mode, and tol with another solver than "cg".
        NonFiniteError: for an example whose gradient is not finite.
    References:
        Koh and Liang, Understanding Black-box Predictions via Influence Functions, 2017, equation 2.
        Grosse et al., Studying Large Language Model Generalization with Influence Functions, 2023,
        section 3 (ekfac). Bae et al., If Influence Functions Are the Answer, Then What Is the
        Question?, 2022 (G and damping).
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.fill_(1.0)
        >>> loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
        >>> data = torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])
        >>> query = torch.ones(1, 1), torch.tensor([[2.0]])
        >>> hog.influence(loss, params, data, query, damping=0.0, solver="cg")
        tensor([[ 2.],
                [-2.]])
    """
    validation.one_of("solver", solver, SOLVERS)
    validation.number("damping", damping, minimum=0)
    for name, data in (("train", train), ("query", query)):
        _check_order(name, data)
    operator = GGNOperator if solver == "cg" else KFACOperator
    known = set(inspect.signature(operator).parameters) - {"loss", "params", "data"}
    refuse_unknown("influence", options, known - {"eigenvalue_corrected"}, operator.__name__)
    if tol is not None and solver != "cg":
        raise ArgumentValueError(
            f"tol: expected none with solver={solver!r}, which has a closed form, got {tol}; it "
            "is for solver='cg'."
        )
    space = Space(params)
    space.refuse_sharded("influence")

    def rows(name: str, data: Any) -> Iterable[Tensor]:
        for number, batch in enumerate([data] if is_batch(data) else data):
            moved = to_device(batch, space.device)
            for part in gradient_rows(loss, params, moved, vmap=vmap):
                if not bool(part.isfinite().all()):
                    raise NonFiniteError(
                        f"{name}: expected examples with finite gradients, got one with NaN or "
                        f"infinity in batch {number}; look for NaN in the data and in the parameters."
                    )
                yield part.to(space.dtype)

    with examined_functions("influence", first_order=solver != "cg"):
        asked = list(rows("query", query))
        if not asked:
            raise ArgumentValueError("query: expected at least one batch, got none.")
        queries = torch.cat(asked)
        if solver == "cg":
            directions = GGNOperator(loss, params, train, **options).solve(
                queries.T, damping=damping, tol=tol
            )
        else:
            K = KFACOperator(loss, params, train, eigenvalue_corrected=solver == "ekfac", **options)
            directions = K.solve(queries.T, damping=damping)
        return torch.cat([-(part @ directions) for part in rows("train", train)])


def _check_order(name: str, data: Any) -> None:
    if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
        raise ArgumentValueError(
            f"{name}: expected data in a fixed order, that of the scores, got a DataLoader that "
            "shuffles; make one with shuffle=False."
        )
