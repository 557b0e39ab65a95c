"""The Hessian, Gauss-Newton and Fisher matrices of a loss over data, as linear operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hoglib._core.autograd import Vector
from hoglib.curvature.data import Size
from hoglib.curvature.dataset_operator import LIMIT, OverData
from hoglib.curvature.kinds import FisherKind, GaussNewtonKind, HessianKind
from hoglib.curvature.routes import Call, LinearMap

Tree = Any


class HessianOperator(OverData):
    r"""The Hessian of a loss over data.

        H = sum_b n_b d^2 loss(params, batch_b) / d params^2 / sum_b n_b        reduction="mean"
        H = sum_b d^2 loss(params, batch_b) / d params^2                        reduction="sum"

    loss(params, batch) is a scalar, from `functional_loss` or any function. data: a batch (a tensor,
    mapping, tuple, list with a tensor in it, or an object that is not iterable), or a DataLoader or
    another re-iterable of batches, which are moved to the device of params. n_b: the leading dimension
    of the first tensor of a batch, or what `batch_size` gives for it; so an uneven last batch changes
    nothing. params are read at every product: an optimizer's steps in between count.

    mode: as in `hvp`. micro_batch: batches are split into pieces of so many examples, for memory; it
    is exact, and refused where the loss mixes examples. memory_limit: if data is one batch whose
    gradient graph holds less than so many bytes (estimated from the sizes of what its operations put
    out), the graph is kept between products, which then cost half; 0 keeps none.
    check_deterministic: the losses of a pass are compared with those of the first, and what differs
    raises, naming dropout, shuffling or augmentation; and the first two products are looked at for
    symmetry, v.Hw = w.Hv, without which a warning says so. stand_ins: as in `hvp`. progress: a bar that
    counts products (needs tqdm). compile: as in `hvp`, one graph for each shape of a batch; what is
    kept between products is then what the graph of a product takes from before the vector.

    processes: of torch.distributed, which each compute the sum over a part of the data; one all-reduce
    a product adds the sums up, and all have the product. None: this process by itself. "shard": all are
    given the same data, and each takes every so many-th batch, or its rows of the one batch (with
    micro_batch its pieces). "sharded": each is given its own part already, which may be none, []. All
    then have to make the same products, with the same vectors.

    See `LinearOperator` for `@` and the algebra; `.gradient()`, `.to_dense()`, `.to_scipy()`,
    `.solve()`, `.eigsh()`, `.trace()`, `.diagonal()`.
    Raises, beside what `hvp` raises, ValueError for no or empty batches and for a DistributedSampler
    that does not go with processes, FloatingPointError for losses and products that are not finite,
    RuntimeError for a loss that changes from pass to pass, and in all processes for vectors, parameters
    or buffers that differ between them, and where one of them failed.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        params: Tree,
        data: Any,
        *,
        reduction: str = "mean",
        mode: str = "auto",
        batch_size: Size | None = None,
        micro_batch: int | None = None,
        memory_limit: float = LIMIT,
        check_deterministic: bool = True,
        stand_ins: bool = True,
        progress: bool = False,
        compile: bool | str = False,
        processes: str | None = None,
    ) -> None:
        super().__init__(
            HessianKind(mode), loss, params, data, reduction, batch_size, micro_batch, memory_limit,
            check_deterministic, stand_ins, progress, compile, processes,
        )  # fmt: skip


class GGNOperator(OverData):
    r"""The generalised Gauss-Newton matrix of a loss over data.

        G = sum_b n_b J_b^T H_b J_b / sum_b n_b        or the sum without n_b, as reduction says

    with J and H as in `ggn_vp`, whose loss and mode it takes; everything else as `HessianOperator`.
    """

    def __init__(
        self,
        loss: Any,
        params: Tree,
        data: Any,
        *,
        reduction: str = "mean",
        mode: str = "auto",
        batch_size: Size | None = None,
        micro_batch: int | None = None,
        memory_limit: float = LIMIT,
        check_deterministic: bool = True,
        stand_ins: bool = True,
        progress: bool = False,
        compile: bool | str = False,
        processes: str | None = None,
    ) -> None:
        super().__init__(
            GaussNewtonKind(mode), loss, params, data, reduction, batch_size, micro_batch, memory_limit,
            check_deterministic, stand_ins, progress, compile, processes,
        )  # fmt: skip


class FisherOperator(OverData):
    r"""The Fisher information matrix of a model over data.

        F = sum_b n_b F_b / sum_b n_b        or the sum without n_b, as reduction says

    with F_b as in `fisher_vp`, whose kind, likelihood and num_samples it takes. The draws of kind "mc"
    are made by generator once, and are the same for every product; with None they are those of a
    seed from torch's global generator. A batch has the draws that belong to its number, or that of the
    piece, in whatever process. Everything else as `HessianOperator`.
    """

    def __init__(
        self,
        loss: Any,
        params: Tree,
        data: Any,
        *,
        kind: str = "exact",
        likelihood: Any = None,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        reduction: str = "mean",
        mode: str = "auto",
        batch_size: Size | None = None,
        micro_batch: int | None = None,
        memory_limit: float = LIMIT,
        check_deterministic: bool = True,
        stand_ins: bool = True,
        progress: bool = False,
        compile: bool | str = False,
        processes: str | None = None,
    ) -> None:
        matrix = FisherKind(mode, kind, likelihood, reduction, num_samples, generator)
        super().__init__(
            matrix, loss, params, data, reduction, batch_size, micro_batch, memory_limit,
            check_deterministic, stand_ins, progress, compile, processes,
        )  # fmt: skip
        self._fisher = matrix
        self._seed = matrix.draw_seed() if matrix.draws else 0

    def _at(self, leaves: Vector, batch: Any, index: int, call: Call, several: bool) -> LinearMap:
        self._fisher.seed = self._seed + index  # the same draws for a batch at every pass
        return super()._at(leaves, batch, index, call, several)
