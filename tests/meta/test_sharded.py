"""Inner loops on parameters that several processes share: meta-gradients equal those of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import hoglib as hog
from hoglib._core.substrate import placement
from tests.long_tail import FULL
from tests.meta.networks import Scaled
from tests.several_processes import Wire, assert_raised, found_by_each, raised_by
from tests.test_sharded_models import LAYOUTS, fsdp, grid, model, part, plain_name, shard
from tests.test_sharded_operators import plan

OPTIONS = {
    "recomputed": {
        "rule": "adam", "rule_options": {"eps": 0.1}, "memory": "remat", "remat": ["block"],
    },
    "checkpoints": {"rule": "momentum", "memory": "checkpoint", "truncate": 1},
    "first order": {"first_order": True},
    "every step": {"step_weights": [0.2, 0.8], "inner_params": ["block", "norm"]},
}  # fmt: skip


def tasks(rows=slice(None), count=2):
    """Stacks of support and query sets; the rows of one process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, count, 12, 5, dtype=torch.float64, generator=generator)
    y = torch.arange(12).expand(count, 12) % 3
    return tuple((part[:, rows], y[:, rows]) for part in x)


def of_one(net):
    """The model of one process, of which the same parameters are trained."""
    one = model()
    trained = {plain_name(name) for name in hog.trainable_params(net)}
    for name, p in one.named_parameters():
        p.requires_grad_(name in trained)
    return one


def error(net, one):
    """The largest difference of gradients."""
    theirs = hog.trainable_params(one)
    errors = []
    for name, p in hog.trainable_params(net).items():
        assert type(p.grad) is type(p.data), name
        errors.append((placement.full_tensor(p.grad) - theirs[plain_name(name)].grad).abs().max())
    return float(max(errors))


def learned(kind, net, rows, **options):
    """The error of a meta-loss and its gradient."""
    one = of_one(net)
    ours, theirs = (
        kind(m, F.cross_entropy, inner_lr=0.3, inner_steps=2, **options) for m in (net, one)
    )
    value, expected = ours.loss(tasks(rows)), theirs.loss(tasks())
    (2 * value).backward()
    (2 * expected).backward()
    assert float(expected) > 0.1
    return max(float((value - expected).abs()), error(net, one))


def trained(net, rows):
    """The error after steps of an optimizer: of the loss without a gradient, and of adapted outputs."""
    one = of_one(net)
    makes = partial(
        hog.MAML, criterion=F.cross_entropy, inner_lr=0.3, inner_steps=2, remat=["block"]
    )
    ours, theirs = makes(net), makes(one)
    for maml, mine in ((ours, rows), (theirs, slice(None))):
        optimizer = torch.optim.Adam(maml.parameters(), 0.01)
        for _ in range(2):
            optimizer.zero_grad()
            maml.loss(tasks(mine)).backward()
            optimizer.step()
    (x, y), _ = tasks()
    with torch.no_grad():
        adapted = ours.adapt((x[0, rows], y[0, rows]))
        assert all(map(placement.is_sharded, adapted.values()))
        outputs = ours(x[1], params=adapted) - theirs(x[1], params=theirs.adapt((x[0], y[0])))
        values = ours.loss(tasks(rows)) - theirs.loss(tasks())
    return float(max(outputs.abs().max(), values.abs()))


def on_two_dimensions():
    """Tasks over one dimension of the mesh, of which one process has more, parameters over the other."""
    mesh = grid("tasks", "parameters")
    net = shard(model(), mesh=mesh["parameters"])
    one, every = of_one(net), tasks(count=3)
    half = part(mesh.get_local_rank("parameters"), 2)
    mine, weight = hog.meta.shard(tasks(half, 3), mesh=mesh["tasks"])
    assert len(mine[0][0]) == (1 if mesh.get_local_rank("tasks") else 2)
    makes = partial(hog.MAML, criterion=F.cross_entropy, inner_lr=0.3, inner_steps=2)
    (weight * makes(net).loss(mine)).backward()
    for p in net.parameters():
        grad = p.grad.to_local()
        dist.all_reduce(grad.div_(mesh["tasks"].size()), group=mesh["tasks"].get_group())
    makes(one).loss(every).backward()
    return error(net, one)


def messages(rank, world):
    """How often the meta-gradient of a task gathers and averages each parameter, for some inner steps."""
    net, rows = fsdp(rank, world)
    found = []
    for steps in (1, 3):
        maml = hog.MAML(net, F.cross_entropy, inner_steps=steps)
        maml.loss(tasks(rows, 1))  # which checks the derivatives of a model once
        with Wire() as wire:
            maml.loss(tasks(rows, 1))
        count = wire.messages["gathers"] + wire.messages["averages"]
        found.append(count / len(hog.trainable_params(net)))
    return found


def refused(rank, world):
    net, rows = fsdp(rank, world)
    params, mine = hog.trainable_params(net), tasks(rows)
    support = mine[0][0][0], mine[0][1][0]

    def maml(**options):
        return hog.MAML(net, F.cross_entropy, inner_steps=2, **options)

    def decay(p):
        return hog.meta.hypergradient(
            lambda params, hyper: hog.functional_loss(net, F.cross_entropy)(params, support),
            lambda params, hyper: hog.functional_loss(net, F.cross_entropy)(params, support),
            params, {"decay": torch.ones((), dtype=torch.float64)}, steps=1, rule=hog.meta.sgd(0.1),
        )  # fmt: skip

    empty = tuple(
        (x[:, : 0 if rank == 0 else None], y[:, : 0 if rank == 0 else None]) for x, y in mine
    )
    loss = hog.functional_loss(net, F.cross_entropy)
    calls = {
        "vmap": lambda: maml(over_tasks="vmap").loss(mine),
        "compile": lambda: maml(compile="eager").loss(mine),
        "mixed": lambda: maml(memory="mixed").loss(mine),
        "rates": lambda: maml(learn_lr="layer").loss(mine),
        "rule": lambda: maml(rule=hog.meta.sgd(0.1)).loss(mine),
        "rule options": lambda: maml(rule_options={"weight_decay": torch.ones(1)}).loss(mine),
        "learned loss": lambda: maml(inner_loss=Scaled()).loss(mine),
        "statistics": lambda: maml(batch_norm="per_step").loss(mine),
        "imaml": lambda: hog.meta.IMAML(net, F.cross_entropy).loss(mine),
        "adapt": lambda: maml().adapt(support),
        "call": lambda: maml()(support[0], params=params),
        "hypergradient": lambda: decay(params),
        "meta.adapt": lambda: hog.meta.adapt(loss, params, support, hog.meta.sgd(0.1), steps=1),
        "other tasks": lambda: maml().loss([tuple((x[0], y[0]) for x, y in mine)] * (1 + rank)),
        "other steps": lambda: hog.MAML(net, F.cross_entropy, inner_steps=1 + rank).loss(mine),
        "other rate": lambda: hog.MAML(net, F.cross_entropy, inner_lr=0.1 + rank).loss(mine),
        "nan": lambda: maml().loss(tuple((x * (torch.nan if rank else 1), y) for x, y in mine)),
        "empty": lambda: maml().loss(empty),
        "mesh": lambda: hog.meta.shard(mine, mesh="tasks"),
    }  # fmt: skip
    return raised_by(calls)


def refused_grid():
    hog.meta.shard(tasks(), mesh=grid("tasks", "parameters"))


WHOLE = "expected parameters that each process holds whole"
REFUSED = {
    "vmap": ("UnsupportedError", f"MAML(over_tasks='vmap'): {WHOLE}"),
    "compile": ("UnsupportedError", f"MAML(compile='eager'): {WHOLE}"),
    "mixed": ("UnsupportedError", f"MAML(memory='mixed'): {WHOLE}"),
    "rates": ("UnsupportedError", f"MAML(learn_lr=...): {WHOLE}"),
    "rule": ("UnsupportedError", f"MAML(rule=...): {WHOLE}"),
    "rule options": ("UnsupportedError", f"MAML(rule_options=...): {WHOLE}"),
    "learned loss": ("UnsupportedError", f"MAML(inner_loss=...): {WHOLE}"),
    "statistics": ("UnsupportedError", f"MAML(batch_norm='per_step'): {WHOLE}"),
    "imaml": ("UnsupportedError", "IMAML: expected params that each process holds whole"),
    "adapt": ("UnsupportedError", "MAML.adapt: expected params that each process holds whole"),
    "call": ("UnsupportedError", "MAML(params=...): expected params that each process holds whole"),
    "hypergradient": ("UnsupportedError", "expected params that each process holds whole"),
    "meta.adapt": ("UnsupportedError", "expected params that each process holds whole"),
    "other tasks": ("DistributedError", "expected the same number of tasks in all"),
    "other steps": ("DistributedError", "expected the same options and criterion in all"),
    "other rate": ("DistributedError", "expected the same options and criterion in all"),
    "nan": ("NonFiniteError", "inner loss: expected a finite number, got nan"),
    "mesh": ("ArgumentTypeError", "mesh: expected a torch DeviceMesh"),
}


def every(rank, folder, found):
    world = dist.get_world_size()
    for name, make in LAYOUTS[world].items():
        found[name] = learned(hog.MAML, *make(rank, world))
    if world == 4:
        found["two dimensions"] = on_two_dimensions()
        found["refused"] = raised_by({"two dimensions": refused_grid})
        return
    for name, options in OPTIONS.items():
        found[f"fsdp: {name}"] = learned(hog.MAML, *fsdp(rank, world), **options)
    found["reptile"] = learned(hog.meta.Reptile, *fsdp(rank, world))
    found["trained"] = trained(*fsdp(rank, world))
    found["messages"] = messages(rank, world)
    found["refused"] = refused(rank, world)


EMPTY = "support: expected at least one example, got an empty set"
OTHERS = (
    "MAML: expected the same call in all 2 processes, got an error in process 0: ArgumentValueError: "
    + EMPTY
)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=FULL)])
def test_processes_equal_one(count, tmp_path):
    """One test of all cases: to start processes takes longer than what they do."""
    for rank, found in enumerate(found_by_each(every, tmp_path, count)):
        raised = found.pop("refused")
        if count == 4:
            assert raised["two dimensions"][0] == "ArgumentValueError"
            assert "mesh: expected one dimension" in raised["two dimensions"][1]
        else:
            planned = [plan()("tasks", 1, 2, 1, steps=steps)["messages"] for steps in (1, 3)]
            assert found.pop("messages") == planned
            empty = ("DistributedError", OTHERS) if rank else ("ArgumentValueError", EMPTY)
            assert_raised(raised, REFUSED | {"empty": empty}, rank)
        for name, difference in found.items():
            assert difference < 1e-10, (rank, name, difference)
