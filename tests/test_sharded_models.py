"""Models whose parameters several processes share: products and penalties equal those of one process."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib._core.substrate import placement
from hoglib.errors import HoglibError, UnsupportedError
from hoglib.penalties import distributed
from tests.several_processes import Wire, assert_raised, found_by_each, raised_by


class Residual(nn.Module):
    """Sizes that no number of processes divides, a norm, and a parameter in two places."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.block = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7))
        self.last = nn.Linear(7, 3)
        self.again = self.last

    def forward(self, x):
        x = self.first(x).tanh()
        return self.again(x + self.block(self.norm(x)))


class Experts(nn.Module):
    """Two equal blocks, in an order of its own."""

    def __init__(self, order):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.last, self.order = nn.Linear(5, 3), order

    def forward(self, x):
        for i in self.order:
            x = self.experts[i](x).tanh()
        return self.last(x)


class Recomputing(nn.Module):
    """A block that checkpoints its own activations."""

    def __init__(self):
        super().__init__()
        self.block, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
        self.block.forward = partial(
            checkpoint, partial(nn.Linear.forward, self.block), use_reentrant=False
        )

    def forward(self, x):
        return self.last(self.block(x).tanh())


def model(dtype=torch.float64):
    torch.manual_seed(0)
    return Residual().to(dtype)


def data(dtype=torch.float64):
    x = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.to(dtype), torch.arange(12) % 3


def part(rank, count):
    """The rows of one of several processes."""
    return slice(rank * 12 // count, (rank + 1) * 12 // count)


def shard(net, **options):
    from torch.distributed.fsdp import fully_shard

    if hasattr(net, "block"):
        fully_shard(net.block, **options)
    return fully_shard(net, **options)


def fsdp(rank, world):
    return shard(model()), part(rank, world)


def fsdp_checkpointed(rank, world):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = model()
    net.block = checkpoint_wrapper(net.block)
    return shard(net, reshard_after_forward=False), part(rank, world)


def fsdp_frozen(rank, world):
    """Frozen parameters, which are gathered too, and some that every process holds."""
    net = model()
    net.first.requires_grad_(False)
    return shard(net, ignored_params=set(net.norm.parameters())), part(rank, world)


def grid(*names):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def hybrid(rank, world):
    return shard(model(), mesh=grid("replicate", "shard")), part(rank, world)


def parallelize(net, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"block.0": ColwiseParallel(), "block.2": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)


def tensor_parallel(rank, world):
    return parallelize(model(), grid("data", "tensor")["tensor"]), slice(0, 12)


def fsdp_and_tensor_parallel(rank, world):
    mesh = grid("data", "tensor")
    net = shard(parallelize(model(), mesh["tensor"]), mesh=mesh["data"])
    return net, part(mesh.get_local_rank("data"), 2)


LAYOUTS = {  # of two processes, and of four
    2: {"fsdp": fsdp, "fsdp, checkpointed": fsdp_checkpointed, "fsdp, frozen": fsdp_frozen},
    4: {"hybrid": hybrid, "tensor parallel": tensor_parallel, "fsdp and tensor parallel": fsdp_and_tensor_parallel},
}  # fmt: skip
MODES = {
    "hvp": hog.hvp,
    "hvp, forward": partial(hog.hvp, mode="forward-over-reverse"),
    "hvp, differences": partial(hog.hvp, mode="finite-differences"),
    "ggn_vp": hog.ggn_vp,
    "ggn_vp, reverse": partial(hog.ggn_vp, mode="reverse"),
    "ggn_vp, differences": partial(hog.ggn_vp, mode="finite-differences"),
    "fisher_vp": hog.fisher_vp,
    "fisher_vp, empirical": partial(hog.fisher_vp, kind="empirical"),
}
NO_FORWARD = ("fsdp, checkpointed", "hvp, forward")  # torch.func refuses saved-tensor hooks


def vectors(params, columns=()):
    """The same numbers in each process, spread as the parameters are."""
    found = {}
    for i, (name, p) in enumerate(params.items()):
        generator = torch.Generator().manual_seed(i)
        whole = torch.randn(*p.shape, *columns, dtype=p.dtype, generator=generator)
        found[name] = spread(whole, p)
    return found


def spread(whole, like):
    """A whole tensor as a DTensor like another, without communication."""
    if not placement.is_sharded(like):
        return whole
    local = like.detach().to_local()
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = DTensor.from_local(
        whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False
    )
    found = everywhere.redistribute(placements=like.placements)
    assert found.to_local().shape[: local.dim()] == local.shape
    return found


def gathered(tree):
    return {name: placement.full_tensor(p).detach() for name, p in tree.items()}


def plain_name(name):
    return name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")


def error_of(product, net, rows, dtype=torch.float64, columns=()):
    """The relative error of value and product of a wrapped model, beside those of one process."""
    x, y = data(dtype)
    params = hog.trainable_params(net)
    v = vectors(params, columns)
    value, found = product(hog.functional_loss(net, F.cross_entropy), params, v, (x[rows], y[rows]))
    one = model(dtype)
    own = dict(one.named_parameters())
    mine = {plain_name(name): own[plain_name(name)] for name in params}
    along = {plain_name(name): p for name, p in gathered(v).items()}
    expected_value, expected = product(
        hog.functional_loss(one, F.cross_entropy), mine, along, (x, y)
    )
    errors = [float((value - expected_value).abs())]
    for name, p in found.items():
        assert type(p) is type(params[name].data), name
        want = expected[plain_name(name)]
        errors.append(float((placement.full_tensor(p) - want).norm() / want.norm().clamp(min=1e-3)))
    return max(errors)


def products(rank, folder, found):
    world = dist.get_world_size()
    for layout, make in LAYOUTS[world].items():
        for mode, product in MODES.items():
            if (layout, mode) != NO_FORWARD and (layout == "fsdp" or mode in ("hvp", "ggn_vp")):
                found[f"{layout}: {mode}"] = error_of(product, *make(rank, world))
    for mode in ("hvp", "ggn_vp") if world == 2 else ():
        rows = slice(2, None) if rank else slice(2)
        found[f"uneven rows: {mode}"] = error_of(MODES[mode], fsdp(rank, world)[0], rows)
    by_block = partial(MODES["hvp"], remat=["block"])
    if world == 4:
        both = fsdp_and_tensor_parallel(rank, world)
        found["fsdp and tensor parallel: remat"] = error_of(by_block, *both)
        return
    found["fsdp, checkpointed: remat"] = error_of(by_block, *fsdp_checkpointed(rank, world))
    for mode in ("hvp", "hvp, forward", "hvp, differences", "ggn_vp", "ggn_vp, reverse"):
        by_block = partial(MODES[mode], remat=["block"])
        found[f"fsdp: remat, {mode}"] = error_of(by_block, *fsdp(rank, world))
    found["fsdp: a block"] = error_of(hog.hvp, *fsdp(rank, world), columns=(3,))
    for name, product in {"hvp": hog.hvp, "operator": by_operator}.items():
        wrapped = DistributedDataParallel(model()), slice(0, 12)
        found[f"DistributedDataParallel: {name}"] = error_of(product, *wrapped)
    found["mixed precision"] = mixed_precision(rank, world)
    found["penalties"] = penalties(rank, world)
    found["warned"] = [
        warned_of(rows) for rows in (part(rank, world), slice(2, None) if rank else slice(2))
    ]
    found["refused"] = refused(rank, world)
    found["messages"] = messages(rank, world)
    found["after"] = its_own_backward(rank, world)
    found["ended"] = one_process_ends(rank, world)


def by_operator(loss, params, v, batch):
    operator = hog.HessianOperator(loss, params, batch)
    return operator.value(), operator @ v


def mixed_precision(rank, world):
    """The error in the policy's bfloat16, and whether products are of the parameters' dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    net = shard(model(torch.float32), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return error_of(hog.hvp, net, part(rank, world), torch.float32)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 1)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.SiLU())

    def forward(self, x):
        return self.last(self.block(F.silu(self.first(x))))


def critic_loss(critic, x, step):
    real, fake = x, x.flip(1)
    loss = F.softplus(critic(fake) - critic(real)).mean()
    if step == 1:  # a penalty that is thrown away, in a step without one
        hog.penalties.r1(critic, real)
        return loss
    loss = loss + hog.penalties.r1_r2(critic, real, fake)
    return loss + hog.penalties.jacobian(critic, real, num_projections=None)


def penalties(rank, world):
    """The largest difference of gradients in training steps, with an optimizer's between them."""
    x, _ = data()
    errors = []
    for reshard_after_forward in (True, False):
        one = Critic().double()
        net = shard(Critic().double(), reshard_after_forward=reshard_after_forward)
        params = list(net.parameters()), list(one.parameters())
        optimizers = [torch.optim.SGD(p, 0.1) for p in params]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            critic_loss(net, x[part(rank, world)], step).backward()
            critic_loss(one, x, step).backward()
            errors += [
                float((p.grad.full_tensor() - q.grad).abs().max())
                for p, q in zip(*params, strict=True)
            ]
            assert not distributed._HELD
            assert all(map(placement.is_sharded, net.parameters()))
            for optimizer in optimizers:
                optimizer.step()
    return max(errors)


def warned_of(rows):
    """Warnings of a penalty of these rows in this process."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        hog.penalties.r1(shard(Critic().double()), data()[0][rows])
    return [str(one.message) for one in given]


def refused(rank, world):
    """What a call with sharded parameters raises, by its name."""
    net, rows = fsdp(rank, world)
    loss, params = hog.functional_loss(net, F.cross_entropy), hog.trainable_params(net)
    batch = data()[0][rows], data()[1][rows]
    v = vectors(params)

    def by_hand(p, batch):
        return F.cross_entropy(torch.func.functional_call(net, p, (batch[0],)), batch[1])

    other = dict(vectors(params))
    if rank == 0:
        other["norm.weight"] = other["norm.weight"] + 1
    frozen, _ = fsdp_frozen(rank, world)
    own = hog.trainable_params(frozen)
    seeds = {name: p + rank if name == "norm.bias" else p for name, p in vectors(own).items()}
    mean = hog.functional_loss(frozen, F.cross_entropy)
    maml = hog.MAML(net, F.cross_entropy, inner_lr=0.1, inner_steps=1)
    critic = shard(Critic().double())

    def wrong_label(outputs, targets):
        if rank == 0:
            raise ValueError("a wrong label")
        return F.cross_entropy(outputs, targets)

    def wrong_model(model, batch):
        return model(batch[0][:, : 4 if rank == 0 else 5])  # torch raises

    one = hog.functional_loss(net, wrong_label)
    other_model = hog.functional_loss(
        net, lambda y, b: F.cross_entropy(y, b[1]), forward=wrong_model
    )
    operator = hog.HessianOperator(one, params, [batch])
    experts = shard(Experts((0, 1) if rank == 0 else (1, 0)).double())
    routed, theirs = (hog.functional_loss(experts, F.cross_entropy), hog.trainable_params(experts))
    again = shard(Recomputing().double())
    recomputing, its = hog.functional_loss(again, F.cross_entropy), hog.trainable_params(again)
    calls = {
        **{f"an error in {name}": partial(MODES[name], one, params, v, batch) for name in FAILING},
        "an error in a model": lambda: hog.hvp(other_model, params, v, batch),
        "an error in outputs": lambda: hog.ggn_vp(other_model, params, v, batch),
        "an error with remat": lambda: hog.hvp(one, params, v, batch, remat=["block"]),
        "an error in an operator": lambda: operator @ v,
        "an error in value": operator.value,
        "an error in tasks": lambda: hog.MAML(net, wrong_label).loss([(batch, batch)]),
        "create_graph": lambda: hog.hvp(loss, params, v, batch, create_graph=True),
        "compile": lambda: hog.hvp(loss, params, v, batch, compile="eager"),
        "whole vectors": lambda: hog.hvp(loss, params, gathered(v), batch),
        "a function of the module": lambda: hog.hvp(by_hand, params, v, batch),
        "hessian": lambda: hog.hessian(loss, params, batch),
        "ggn": lambda: hog.ggn(loss, params, batch),
        "to_dense": lambda: hog.HessianOperator(loss, params, [batch]).to_dense(),
        "jvp": lambda: hog.jvp(lambda p: p, (params,), (v,)),
        "per_example_gradients": lambda: hog.per_example_gradients(loss, params, batch),
        "KFAC": lambda: hog.curvature.KFAC(loss, params),
        "a penalty of parameters": lambda: hog.penalties.parameter_gradient(loss, params, batch),
        "a compiled penalty": lambda: hog.penalties.r1(critic, data()[0][rows], compile="eager"),
        "MAML": lambda: maml.adapt(batch),
        "audit": lambda: hog.audit(loss, params, batch),
        "the loss itself": lambda: loss(params, batch),
        "other vectors": lambda: hog.hvp(mean, own, seeds, batch),
        "other blocks": lambda: hog.hvp(loss, params, vectors(params, (2 + rank,)), batch),
        "a checkpoint in a block": lambda: hog.hvp(
            recomputing, its, vectors(its), batch, remat=["block"]
        ),
        "other experts": lambda: hog.hvp(routed, theirs, vectors(theirs), batch, remat="experts.*"),
    }
    return raised_by(calls)


FAILING = ("hvp", "hvp, forward", "hvp, differences", "ggn_vp", "ggn_vp, reverse", "fisher_vp")
IN_ONE = "got an error in process 0: "
WHOLE = "expected params that each process holds whole"
REFUSED = {
    **{
        name: ("UnsupportedError", f"{name}: {WHOLE}")
        for name in ("hessian", "ggn", "to_dense", "per_example_gradients", "KFAC")
    },
    **dict.fromkeys(("a penalty of parameters", "MAML", "audit", "the loss itself"), ("UnsupportedError", WHOLE)),
    "create_graph": ("UnsupportedError", "hvp(create_graph=True): expected parameters that this process holds whole"),
    "compile": ("UnsupportedError", "leave compile out"),
    "whole vectors": ("ArgumentValueError", "expected a DTensor with the placements of its parameter"),
    "a function of the module": ("UnsupportedError", "expected `hoglib.functional_loss(model, criterion, forward=...)`"),
    "jvp": ("UnsupportedError", "jvp: expected primals that each process holds whole"),
    "a compiled penalty": ("UnsupportedError", "r1 and its gradient: expected a module whose parameters this process holds whole"),
    "other vectors": ("DistributedError", "expected the same vectors, where they are not sharded, in all"),
    "other blocks": ("DistributedError", "expected the same number of vectors in all"),
    "a checkpoint in a block": ("UnsupportedError", "leave torch.utils.checkpoint out of it"),
    "other experts": ("DistributedError", "expected the same blocks in the same order in all"),
    "ended": ("DistributedError", "processes to make the same calls"),
}  # fmt: skip


def messages(rank, world):
    """How often a product gathers and averages each parameter; what docs/how-to/sharded-models.md says."""
    net, rows = fsdp(rank, world)
    x, y = data()
    loss, params = hog.functional_loss(net, F.cross_entropy), hog.trainable_params(net)
    found = []
    for mode in ("hvp", "ggn_vp", "ggn_vp, reverse"):
        v = vectors(params)
        with Wire() as wire:
            MODES[mode](loss, params, v, (x[rows], y[rows]))
        found.append([wire.messages[kind] / len(params) for kind in ("gathers", "averages")])
    return found


def its_own_backward(rank, world):
    """The error of FSDP's own gradient after a product: hooks and parameters are as they were."""
    net, rows = fsdp(rank, world)
    x, y = data()
    error_of(hog.hvp, net, rows)
    F.cross_entropy(net(x[rows]), y[rows]).backward()
    one = model()
    F.cross_entropy(one(x), y).backward()
    pairs = zip(net.parameters(), one.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs)


def one_process_ends(rank, world):
    """What the others say where one makes no call and ends."""
    net, rows = fsdp(rank, world)
    if rank == world - 1:
        return ["DistributedError", "processes to make the same calls"]
    try:
        error_of(hog.hvp, net, rows)
    except HoglibError as error:
        return [type(error).__name__, str(error)]
    return ["", "nothing was raised"]


@pytest.mark.parametrize("count", LAYOUTS)
def test_processes_equal_one(count, tmp_path):
    for rank, found in enumerate(found_by_each(products, tmp_path, count)):
        if count == 2:
            raised = found.pop("refused")
            for name, got in raised.items():
                if name.startswith("an error"):
                    assert "a wrong label" in got[1] or "shapes" in got[1], (name, got)
                    assert (IN_ONE in got[1]) == (rank > 0), (rank, name, got)
            assert_raised(raised | {"ended": found.pop("ended")}, REFUSED, rank)
            even, (uneven,) = found.pop("warned")
            assert not even
            assert f"got 2 to {len(data()[0]) - 2}: fully_shard averages" in uneven
            assert 1e-4 < found.pop("mixed precision") < 5e-2, rank
            assert found.pop("messages") == [[2, 2], [2, 1], [2, 2]]
        for name, error in found.items():
            assert error < (1e-9 if "differences" in name else 1e-10), (rank, name, error)


def test_fsdp1_is_refused_by_name():
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it needs an accelerator
    nn.Module.__init__(wrapped)
    with pytest.raises(
        UnsupportedError, match=r"model.1: expected .* got FullyShardedDataParallel"
    ):
        hog.functional_loss(nn.Sequential(nn.Linear(1, 1), wrapped), F.mse_loss)
