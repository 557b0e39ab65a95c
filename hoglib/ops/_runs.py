"""Products within runs of equal keys, by doubling: only multiplications, so right at factors of 0.

Dividing the product of all by one factor, as torch's derivatives do, needs cases for zeros, and cases
by values have no derivatives of their own.
"""

import torch
from torch import Tensor


def products_of_runs(x: Tensor, keys: Tensor, dim: int) -> Tensor:
    """Each entry times those before it in its run: y_i = prod_(j <= i, keys_j = keys_i) x_j.

    keys has the shape of x, and is sorted along dim. It takes log2(n) steps.
    """
    n, step = x.shape[dim], 1
    while step < n:
        before, after = x.narrow(dim, 0, n - step), x.narrow(dim, step, n - step)
        one_run = keys.narrow(dim, 0, n - step) == keys.narrow(dim, step, n - step)
        longer = after * torch.where(one_run, before, 1.0)
        x, step = torch.cat([x.narrow(dim, 0, step), longer], dim), 2 * step
    return x


def ends_of_runs(keys: Tensor, dim: int) -> Tensor:
    """Where a run of equal keys ends."""
    n = keys.shape[dim]
    if n == 0:
        return keys != keys
    changes = keys.narrow(dim, 0, n - 1) != keys.narrow(dim, 1, n - 1)
    return torch.cat([changes, torch.ones_like(keys.narrow(dim, 0, 1), dtype=torch.bool)], dim)


def products_by_key(x: Tensor, keys: Tensor, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The product of each key's entries, in the shape of like; and which keys there are.

    keys has the shape of x, and is sorted along dim.
    """
    products = torch.where(ends_of_runs(keys, dim), products_of_runs(x, keys, dim), 0.0)
    zeros = torch.zeros(like.shape, dtype=x.dtype, device=x.device)
    met = zeros.bool().scatter(dim, keys, True)
    return torch.where(met, zeros.scatter_add(dim, keys, products), 1.0), met
