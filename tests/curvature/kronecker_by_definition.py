"""Kronecker factors by their definitions: example by example, position by position, in plain autograd.

Inputs a_r of a layer are derivatives of one of its outputs by the weights of that output, and so share
no code with the extraction of patches.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn


class Rows(NamedTuple):
    """Of one example and one group: inputs a [R, into], gradients by the outputs g [columns, R, out]."""

    a: torch.Tensor
    g: torch.Tensor


@contextmanager
def recorded(modules):
    """Every call of the modules: (module, input, output)."""
    calls = []
    hooks = [
        m.register_forward_hook(lambda m, args, output: calls.append((m, args[0], output)))
        for m in modules
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def as_rows(module, output):
    """[R, outputs] of one example."""
    channels_first = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    rows = output[0].movedim(0, -1) if channels_first else output[0]
    return rows.reshape(-1, out_features(module))


def out_features(module):
    return next(
        getattr(module, name)
        for name in ("out_features", "out_channels", "embedding_dim", "nf")
        if hasattr(module, name)
    )


def by_output(module):
    """The weights of each output in rows, as a view of a tensor like the weight."""
    transposed = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
    return lambda weight: weight.T if transposed else weight.flatten(1)


def example_rows(loss, modules, x, columns, weight_of, joint, group, groups):
    """Rows of one example, of all calls of modules that share the weight."""
    with recorded(modules) as calls, torch.enable_grad():
        outputs = loss.model(x)
    a, g = [], []
    for module, given, _ in calls:
        rows = as_rows(module, module.forward(given.detach()))  # not through earlier calls
        out = rows.shape[1] // groups
        first = group * out
        of_rows = by_output(module)
        for r in range(len(rows)):
            (d,) = torch.autograd.grad(rows[r, first], weight_of(module), retain_graph=True)
            a.append(torch.cat([of_rows(d)[first], *([d.new_ones(1)] if joint else [])]))
    for column in columns:
        parts = []
        for module, _, output in calls:
            u = column.reshape(outputs.shape)
            (d,) = torch.autograd.grad(outputs, output, u, retain_graph=True)
            d = as_rows(module, d)
            out = d.shape[1] // groups
            parts.append(d[:, group * out : (group + 1) * out])
        g.append(torch.cat(parts))
    return Rows(torch.stack(a), torch.stack(g))


def hessian_columns(loss, outputs, targets):
    """The columns of a square root of the Hessian of the criterion of one example, with reduction
    "sum": symmetric, of its eigenvectors."""
    f = outputs.detach().reshape(-1)
    criterion = loss.user_criterion

    def of(f):
        return criterion(f.reshape(outputs.shape), targets)

    H = torch.func.hessian(of)(f)
    values, Q = torch.linalg.eigh(H)
    return list((Q * values.clamp(min=0).sqrt()).T)


def gradient_column(loss, outputs, targets):
    """The gradient of the criterion of one example."""
    f = outputs.detach().clone().requires_grad_()
    (d,) = torch.autograd.grad(loss.user_criterion(f, targets), f)
    return [d]


def block(every, approximation, corrected):
    """One block [out into, out into] of the rows of each example, in units of their sum."""
    if approximation == "expand":
        a = torch.cat([rows.a for rows in every])
        G = sum(torch.einsum("cri,crj->ij", rows.g, rows.g) for rows in every)
        A = a.T @ a / len(a)
    else:
        a = torch.stack([rows.a.mean(0) for rows in every])
        sums = [rows.g.sum(1) for rows in every]
        G = sum(g.T @ g for g in sums)
        A = a.T @ a / len(a)
    if not corrected:
        return torch.kron(G, A)
    Q = torch.kron(torch.linalg.eigh(G).eigenvectors, torch.linalg.eigh(A).eigenvectors)
    exact = exact_block(every)
    return Q @ torch.diag(torch.diagonal(Q.T @ exact @ Q)) @ Q.T


def exact_block(every):
    """The block of the matrix itself."""
    gradients = [torch.einsum("cri,rj->cij", rows.g, rows.a).flatten(1) for rows in every]
    return sum(d.T @ d for d in gradients)


def places(params, name, group, groups, transposed, bias):
    """The flat positions of a group's V [out, into], row by row."""
    starts, at = {}, 0
    for key, p in params.items():
        starts[key] = at
        at += p.numel()
    p = params[name]
    index = torch.arange(p.numel()).reshape(p.shape) + starts[name]
    index = index.T if transposed else index.flatten(1)
    out = index.shape[0] // groups
    index = index[group * out : (group + 1) * out]
    if bias is not None:
        index_of_bias = torch.arange(out) + starts[bias] + group * out
        index = torch.cat([index, index_of_bias[:, None]], 1)
    return index.reshape(-1)


def dense_kfac(loss, params, batch, layers, kind, approximation, corrected):
    """The matrix [P, P], with the mean criterion of its options made from that of "sum".

    layers: (weight's name, bias's name or None, module names that share it, groups).
    """
    x, y = batch
    total = sum(p.numel() for p in params.values())
    K = torch.zeros(total, total, dtype=x.dtype if x.is_floating_point() else torch.float64)
    find = {"exact": hessian_columns, "empirical": gradient_column}[kind]
    columns = [find(loss, loss.model(x[n : n + 1]), y[n : n + 1]) for n in range(len(x))]
    for weight, bias, names, groups in layers:
        modules = [loss.model.get_submodule(name) for name in names]
        for group in range(groups):
            every = [
                example_rows(
                    loss, modules, x[n : n + 1], columns[n], lambda m: m.weight, bias is not None,
                    group, groups,
                )
                for n in range(len(x))
            ]  # fmt: skip
            transposed = by_output(modules[0])(modules[0].weight).shape[0] != modules[0].weight.shape[0] or isinstance(modules[0], nn.Embedding) or type(modules[0]).__name__ == "Conv1D"  # fmt: skip
            at = places(params, weight, group, groups, transposed, bias)
            of = "expand" if isinstance(modules[0], nn.Embedding) else approximation
            K[at[:, None], at] = block(every, of, corrected)
    return K
