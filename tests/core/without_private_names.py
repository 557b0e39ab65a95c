"""What a user gets of a torch that lacks one private name: `python -m tests.core.without_private_names
NAME ...` prints a line of JSON for each.

torch is imported once. For each name a child process takes it away, imports hoglib, puts it back (torch
itself needs it, and a torch without it would not), and runs a little of everything.
"""

import json
import os
import sys
import traceback
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn

LATE = ("torch._dynamo.", "torch._inductor.")  # resolved where it is used: they stay away
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
W, V = torch.linspace(-1, 1, 4), torch.tensor([1.0, -2.0, 0.5, 3.0])


def cubes(w, *_):
    return (w**3).sum()


class Cut(torch.autograd.Function):
    """w^3, whose backward leaves the graph."""

    @staticmethod
    def forward(w):
        return w**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (w,) = ctx.saved_tensors
        return 3 * g * w.detach() ** 2


def cut(w, *_):
    return Cut.apply(w).sum() + (w**2).sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(self.linear(x)).tanh()


def network(hog):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    params = hog.trainable_params(model)
    v = {name: torch.cos(torch.arange(p.numel())).view_as(p) for name, p in params.items()}
    loss = F.mse_loss(model(x), y)
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    inner = sum((g * u).sum() for g, u in zip(grads, v.values(), strict=True))
    expected = torch.autograd.grad(inner, [*model.parameters()])
    return (
        hog.functional_loss(model, F.mse_loss),
        params,
        v,
        (x, y),
        torch.cat([g.flatten() for g in expected]),
    )


def flat(tree):
    return torch.cat([x.detach().flatten() for x in tree.values()])


def hvp(hog, **options):
    loss, params, v, batch, expected = network(hog)
    return flat(hog.hvp(loss, params, v, batch, **options)[1]), expected


def operator(hog):
    loss, params, v, batch, expected = network(hog)
    return flat(hog.HessianOperator(loss, params, [batch]) @ v), expected


def r1(hog):
    critic = nn.Linear(3, 1)
    penalty = hog.penalties.r1(critic, torch.ones(2, 3))
    (found,) = torch.autograd.grad(penalty, critic.weight)
    return found, critic.weight.detach() * float(
        penalty.detach() / critic.weight.detach().square().sum()
    ) * 2


def maml(hog):
    model, lr, a, b = nn.Linear(1, 1, bias=False), 0.1, 2.0, -1.0
    one = torch.ones(1, 1, 1)
    hog.MAML(model, F.mse_loss, inner_lr=lr, inner_steps=1).loss(
        ((one, a * one), (one, b * one))
    ).backward()
    w = model.weight.detach()
    return model.weight.grad, 2 * (w - 2 * lr * (w - a) - b) * (1 - 2 * lr)


def around(hog):
    return torch.func.grad(lambda w: hog.hvp(cubes, w, V)[1].sum())(W), 6 * V


def library(hog):
    @torch.library.custom_op("hoglib_without::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.register_autograd(
        lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return hog.hvp(lambda w: cube(w).sum(), W, V)[1], 6 * W * V


CALLS = {
    "hvp": hvp,
    "hvp forward over reverse": partial(hvp, mode="forward-over-reverse"),
    "hvp remat": partial(hvp, remat=True),
    "hvp of a wrong Function": lambda hog: (hog.hvp(cut, W, V)[1], 6 * W * V + 2 * V),
    "hvp of a wrong Function, forward": lambda hog: (
        hog.hvp(cut, W, V, mode="forward-over-reverse")[1], 6 * W * V + 2 * V,
    ),
    "operator": operator,
    "r1": r1,
    "MAML": maml,
    "torch.func around": around,
    "jvp around": lambda hog: (torch.func.jvp(lambda w: hog.hvp(cubes, w, V)[1], (W,), (V,))[1], 6 * V * V),
    "a wrong Function inside torch.func": lambda hog: (
        torch.func.grad(lambda w: hog.hvp(cut, w, V, mode="reverse-over-reverse")[1].sum())(W), 6 * V,
    ),
    "compile": lambda hog: (hog.compile(lambda w, v: hog.hvp(cubes, w, v)[1], backend="eager")(W, V), 6 * W * V),
    "laplacian": lambda hog: (hog.laplacian(lambda x: (x**3).sum(-1), W[None])[-1], 6 * W.sum()[None]),
    "operator of torch.library": library,
    "verify": lambda hog: (torch.tensor(float(hog.verify(Cut, (W,)).ok)), torch.tensor(0.0)),
}  # fmt: skip


def outcome(call, hog):
    """ "" for a right result; a warning of a Function; the first words of an error; or "WRONG"."""
    import_module(
        "hoglib._core.runtime.source_location"
    ).forget_warned()  # what each process is told once
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            found, expected = call(hog)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:400]
    if found.shape == expected.shape and torch.allclose(found, expected, atol=1e-8, rtol=0):
        return ""
    said = [
        str(w.message) for w in given if "Cut" in str(w.message) or "not examined" in str(w.message)
    ]
    return f"warns: {said[0]}"[:400] if said else f"WRONG: {found.tolist()}"


def run(name):
    """Without a name of torch: what hoglib says of each call."""
    owner = attribute = kept = None
    if name:
        path, _, attribute = name.rpartition(".")
        owner = torch
        for i, part in enumerate(path.split(".")[1:]):
            if not hasattr(owner, part):
                import_module(".".join(path.split(".")[: i + 2]))
            owner = getattr(owner, part)
        if not hasattr(owner, attribute):
            import_module(name)
        kept = getattr(owner, attribute)
        if sys.modules.get(name) is kept:
            return {"untried": ""}  # a module, which torch itself imports
        try:
            delattr(owner, attribute)
        except (AttributeError, KeyError, TypeError):
            return {"untried": ""}  # Python does not let it be taken away
    try:
        import hoglib as hog
    except BaseException as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__)):
            return {"untried": ""}  # torch itself has to have it while hoglib is imported
        return {"import": f"{type(error).__name__}: {error}"[:400]}
    finally:
        if name and not name.startswith(LATE):
            setattr(owner, attribute, kept)
    return {key: outcome(call, hog) for key, call in CALLS.items()}


def in_child(run):
    """What a function returns in a process of its own; None if that ends."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.close(receive)
        with os.fdopen(send, "w") as pipe:
            try:
                json.dump(run(), pipe)
            except BaseException as error:
                json.dump({"crash": repr(error)}, pipe)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"crash": "the process ended"}


def modules_of_torch():
    import hoglib  # noqa: F401

    return [
        name
        for name in sys.modules
        if name.startswith("torch.") and not name.startswith("torch.ops")
    ]


def main(names):
    # those that hoglib has torch import, which may import the name themselves
    for name in in_child(modules_of_torch):
        with suppress(ImportError):
            import_module(name)
    # torch scripts its decompositions at the first use of forward mode: here, for all
    torch.func.jvp(torch.func.grad(lambda x: F.layer_norm(x, (4,)).tanh().sum()), (W,), (V,))
    for name in names:
        print(json.dumps({"name": name, **in_child(partial(run, name))}), flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    main(sys.argv[1:])
