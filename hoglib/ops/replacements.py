"""What each family of ops replaces: tables of torch's callables and the functions that stand in.

`hoglib.stand_ins` builds `second_order()` from them. A function that stands in has the signature of
the callable that it replaces; where torch names the same computation twice with two signatures, the
second one is an adapter (`torch_...`) of the family.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hoglib import ops
from hoglib.ops._ctc_loss import torch_ctc_loss
from hoglib.ops._embedding_bag import torch_embedding_bag
from hoglib.ops._grid_sample import torch_grid_sampler
from hoglib.ops._linalg import torch_triangular_solve
from hoglib.ops._norms import (
    torch_batch_norm,
    torch_instance_norm,
    torch_layer_norm,
    torch_weight_norm_interface,
)

Replacements = dict[Callable[..., Any], Callable[..., Any]]


def _of_input(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with its first argument called input, as torch calls it outside of torch.linalg."""

    def adapter(input: Tensor, *args: Any, **options: Any) -> Any:
        return op(input, *args, **options)

    return adapter


_det, _slogdet = _of_input(ops.det), _of_input(ops.slogdet)
_cholesky_inverse = _of_input(ops.cholesky_inverse)


ATTENTION: Replacements = {F.scaled_dot_product_attention: ops.scaled_dot_product_attention}
BATCH_NORM: Replacements = {F.batch_norm: ops.batch_norm, torch.batch_norm: torch_batch_norm}
CHOLESKY_INVERSE: Replacements = {
    torch.cholesky_inverse: _cholesky_inverse,
    Tensor.cholesky_inverse: _cholesky_inverse,
}
CTC_LOSS: Replacements = {F.ctc_loss: ops.ctc_loss, torch.ctc_loss: torch_ctc_loss}
DETERMINANT: Replacements = {
    torch.linalg.det: ops.det,
    torch.det: _det,
    Tensor.det: _det,
    torch.linalg.slogdet: ops.slogdet,
    torch.slogdet: _slogdet,
    Tensor.slogdet: _slogdet,
    torch.logdet: ops.logdet,
    Tensor.logdet: ops.logdet,
}
DISTANCE: Replacements = {
    torch.cdist: ops.cdist,
    torch.pdist: ops.pdist,  # also torch.nn.functional.pdist
    torch.pairwise_distance: ops.pairwise_distance,  # also torch.nn.functional.pairwise_distance
}
EMBEDDING_BAG: Replacements = {
    F.embedding_bag: ops.embedding_bag,
    torch.embedding_bag: torch_embedding_bag,
}
GLU: Replacements = {F.glu: ops.glu}
GRID_SAMPLE: Replacements = {
    F.grid_sample: ops.grid_sample,
    torch.grid_sampler: torch_grid_sampler,
    torch.grid_sampler_2d: torch_grid_sampler,
    torch.grid_sampler_3d: torch_grid_sampler,
}
HARDSIGMOID: Replacements = {F.hardsigmoid: ops.hardsigmoid}
INSTANCE_NORM: Replacements = {
    F.instance_norm: ops.instance_norm,
    torch.instance_norm: torch_instance_norm,
}
LAYER_NORM: Replacements = {F.layer_norm: ops.layer_norm, torch.layer_norm: torch_layer_norm}
LINEAR_CROSS_ENTROPY: Replacements = {}
if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and newer
    LINEAR_CROSS_ENTROPY[F.linear_cross_entropy] = ops.linear_cross_entropy
MARGIN_LOSS: Replacements = {
    F.multi_margin_loss: ops.multi_margin_loss,
    F.multilabel_margin_loss: ops.multilabel_margin_loss,
}
REGRESSION_LOSS: Replacements = {F.mse_loss: ops.mse_loss, F.huber_loss: ops.huber_loss}
SCATTER_REDUCE: Replacements = {
    torch.scatter_reduce: ops.scatter_reduce,
    Tensor.scatter_reduce: ops.scatter_reduce,
    torch.index_reduce: ops.index_reduce,
    Tensor.index_reduce: ops.index_reduce,
}
SEGMENT_REDUCE: Replacements = {torch.segment_reduce: ops.segment_reduce}
SOFT_MARGIN_LOSS: Replacements = {F.soft_margin_loss: ops.soft_margin_loss}
SOLVE: Replacements = {
    torch.linalg.solve: ops.solve,
    torch.linalg.solve_ex: ops.solve_ex,
    torch.linalg.tensorsolve: ops.tensorsolve,
}
SPARSE_MM: Replacements = {torch.sparse.mm: ops.sparse_mm}
TRIANGULAR_SOLVE: Replacements = {
    torch.triangular_solve: torch_triangular_solve,
    Tensor.triangular_solve: torch_triangular_solve,
}
WEIGHT_NORM: Replacements = {
    torch._weight_norm: ops.weight_norm,
    torch._weight_norm_interface: torch_weight_norm_interface,
}
