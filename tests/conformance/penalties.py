"""What every penalty does, whatever its formula: one call."""

import torch
from torch.testing import assert_close

from tests.oracles import gradient_by_differences
from tests.penalties.critics import build, draw, params_of, with_params
from tests.unchanged import unchanged


def check_penalty(
    penalty, make, real, fake, *args, critic=with_params, terms=True, variants=({},), further=True,
    oracle=None, **options,
):  # fmt: skip
    """The gradient of a penalty by the parameters is that of differences, also by torch.func; its terms are
    those of each sample alone; it is the same wherever it is called, and nothing that it is given is changed.

    Args:
        penalty: penalty(critic, real, fake, *args, **options), a scalar, the same at each call.
        make: Makes the model of the critic.
        real, fake, args: Trees of tensors, whose leading dimension is that of the samples.
        critic: critic(model, params), what the penalty is given for other parameters.
        terms: Whether it takes samples apart, and, at points between real and fake, where they are equal.
        variants: Options with which it is the same, such as those of compilation.
        further: Whether it is differentiated again, and at a gradient of zero.
        oracle: oracle(model, real, fake), the term of each sample by another formula.
        options: Of the penalty.
    """
    model, points = build(make), clone((real, fake, args))
    itself = model if critic is with_params else critic(model, dict(model.named_parameters()))

    def at(params, **more):
        given = itself if params is None else critic(model, params)
        return penalty(given, real, fake, *args, **options, **more)

    params = params_of(model)
    value, grads = value_and_gradients(model, at)
    if oracle is not None:
        assert_close(value, oracle(model, real, fake).mean().detach())
    expected = gradient_by_differences(at, params)
    size = max(float(g.abs().max()) for g in expected.values())
    assert size > 1e-4
    for name, g in grads.items():
        assert_close(g, expected[name], rtol=1e-5, atol=1e-6 * size, msg=name)
    assert_close(torch.func.grad(at)(params), grads)
    for more in variants:
        found, again = value_and_gradients(model, lambda p, more=more: at(p, **more))
        assert_close(found, value)
        assert_close(again, grads, rtol=1e-9, atol=1e-12)
        for context in (torch.inference_mode,) if more else (torch.no_grad, torch.inference_mode):
            with unchanged(model), context():
                own = clone((real, fake, args))
                found = penalty(itself, *own[:2], *own[2], **options, **more)
            assert not found.requires_grad
            assert_close(found, value)
    assert_close((real, fake, args), points, rtol=0, atol=0)
    if terms:
        check_terms(penalty, model, real, fake, args, options)
    if further:
        v = {name: draw(*p.shape, seed=9) for name, p in params.items()}

        def along(p):
            leaves = {name: t.detach().requires_grad_() for name, t in p.items()}
            grads = torch.autograd.grad(
                at(leaves), list(leaves.values()), create_graph=True, materialize_grads=True
            )
            slope = sum((g * d).sum() for g, d in zip(grads, v.values(), strict=True))
            return leaves, slope

        leaves, slope = along(params)
        again = torch.autograd.grad(slope, list(leaves.values()), materialize_grads=True)
        expected = gradient_by_differences(lambda p: along(p)[1].detach(), params)
        assert_close(dict(zip(leaves, again, strict=True)), expected, rtol=1e-5, atol=1e-7)
        torch.nn.init.zeros_(next(iter(model.parameters())))  # the function is a constant
        _, grads = value_and_gradients(model, at)
        assert all(g.isfinite().all() for g in grads.values())


def clone(tree):
    return torch.utils._pytree.tree_map(torch.clone, tree)


def value_and_gradients(model, at):
    """Of the model's own parameters."""
    model.zero_grad()
    with unchanged(model, grads=False):
        value = at(None)
        assert value.dim() == 0
        value.backward()
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return value.detach(), zeros | own


def jacobians(f, x):
    """Of each sample alone, [N, outputs, inputs], by torch.func."""
    return torch.func.vmap(torch.func.jacrev(lambda row: f(row[None]).reshape(-1)))(x).flatten(2)


def check_terms(penalty, model, real, fake, args, options):
    """reduction="none" gives the term of each sample, wherever it stands in the batch."""
    given = (real, fake, args)

    def of(rows, **more):
        real, fake, args = torch.utils._pytree.tree_map(lambda t: t[rows], given)
        return penalty(model, real, fake, *args, **options, **more)

    terms = of(slice(None), reduction="none")
    order = torch.randperm(len(terms))
    assert_close(of(order, reduction="none"), terms[order])
    assert_close(of(slice(None), reduction="sum"), terms.sum())
    assert_close(of(slice(None)), terms.mean())
    for n in range(len(terms)):
        assert_close(of(slice(n, n + 1)), terms[n])
