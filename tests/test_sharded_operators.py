"""Operators on parameters that several processes share: every algorithm equals that of one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib._core.substrate import placement
from hoglib._core.torch_api import pytree
from tests.long_tail import FULL
from tests.several_processes import Wire, assert_raised, found_by_each, raised_by
from tests.test_docs import DOCS, blocks
from tests.test_sharded_models import (
    data,
    fsdp,
    fsdp_and_tensor_parallel,
    fsdp_frozen,
    gathered,
    hybrid,
    model,
    plain_name,
    tensor_parallel,
    vectors,
)

LAYOUTS = {"fsdp": fsdp, "fsdp, frozen": fsdp_frozen}
ON_A_GRID = {
    "hybrid": hybrid, "tensor parallel": tensor_parallel,
    "fsdp and tensor parallel": fsdp_and_tensor_parallel,
}  # fmt: skip
KINDS = {
    "hessian": hog.HessianOperator,
    "hessian, remat": partial(hog.HessianOperator, remat=["block"]),
    "ggn": hog.GGNOperator,
    "fisher, empirical": partial(hog.FisherOperator, kind="empirical"),
}


def seeded():
    return torch.Generator().manual_seed(3)


def uneven(rows, several=True):
    """Two batches of the rows of one process, of other sizes in each; or one."""
    x, y = (part[rows] for part in data())
    if not several:
        return x, y
    first = 1 + (rows.start > 0)
    return [(x[:first], y[:first]), (x[first:], y[first:])]


class Pair:
    """An operator on the parameters of a wrapped model, and that of one process with the whole data."""

    def __init__(self, kind, net, rows, several=True):
        self.params = hog.trainable_params(net)
        self.loss = hog.functional_loss(net, F.cross_entropy)
        self.shared = kind(self.loss, self.params, uneven(rows, several))
        one = model()
        own = dict(one.named_parameters())
        self.own = {plain_name(name): own[plain_name(name)] for name in self.params}
        self.own_loss = hog.functional_loss(one, F.cross_entropy)
        self.single = kind(self.own_loss, self.own, [data()])

    def vectors(self, columns=()):
        v = vectors(self.params, columns)
        return v, {plain_name(name): p for name, p in gathered(v).items()}

    def error(self, found, expected):
        """Of trees; of scalars and lists."""
        if not isinstance(found, dict):
            found, expected = (torch.as_tensor(x) for x in (found, expected))
            return float((found - expected).norm() / expected.norm().clamp(min=1e-3))
        errors = []
        for name, p in found.items():
            assert type(p) is type(self.params[name].data), name
            errors.append(self.error(placement.full_tensor(p), expected[plain_name(name)]))
        return max(errors)


def products(net, rows, kind):
    """A product with a vector and with a block, the value and the gradient."""
    pair = Pair(kind, net, rows)
    errors = []
    for columns in ((), (2,)):
        v, along = pair.vectors(columns)
        errors.append(pair.error(pair.shared @ v, pair.single @ along))
    (value, gradient), (expected, slope) = pair.shared.gradient(), pair.single.gradient()
    errors += [pair.error(gradient, slope), pair.error(value, expected)]
    errors.append(pair.error(pair.shared.value(), expected))
    return max(errors)


def algorithms(net, rows, all_of_them):
    pair = Pair(hog.GGNOperator, net, rows, several=False)
    A, B = pair.shared, pair.single
    v, along = pair.vectors()
    x, y = (op.solve(b, damping=30.0, tol=1e-12) for op, b in ((A, v), (B, along)))
    found = {"solve": pair.error(x, y)}
    if not all_of_them:
        return found
    found["trace"] = pair.error(
        *(op.trace(4, method="hutchinson", generator=seeded()) for op in (A, B))
    )
    eigen, expected = (op.eigsh(2, which="LA", generator=seeded()) for op in (A, B))
    found["eigenvalues"] = pair.error(eigen.values, expected.values)
    if dist.get_world_size() == 4:
        there = A.eigsh(2, which="LA", basis_device="cpu")
        found["eigenvalues, a basis elsewhere"] = pair.error(there.values, expected.values)
    projections = A.space.dots((eigen.vectors.T, A.ravel(v)[None].expand_as(eigen.vectors.T)))[
        0
    ].abs()
    found["eigenvectors"] = pair.error(projections, (expected.vectors.T @ B.ravel(along)).abs())
    found["residuals"] = 1e-3 * float((eigen.residuals / eigen.values).max())
    for name, options in {
        "solve, started": {"x0": True, "preconditioner": True},
        "solve, stagnation": {"stagnation_tol": 1e-3},
    }.items():  # fmt: skip
        x, y = (
            op.solve(
                b, damping=3.0, return_info=True, tol=1e-4,
                **{key: b if key == "x0" else squares(b) if value is True else value
                   for key, value in options.items()},
            )
            for op, b in ((A, v), (B, along))
        )  # fmt: skip
        found[name] = pair.error(x[0], y[0])
        assert x[1].iterations == y[1].iterations, name
        assert bool(x[1].converged) == bool(y[1].converged), name
    for name, estimate in {
        "density": lambda A: A.spectral_density(2, steps=5, generator=seeded(), width=0.1).density,
        "frobenius": lambda op: op.squared_frobenius(2, generator=seeded()),
    }.items():
        found[name] = pair.error(estimate(A), estimate(B))
    found["diagonal"] = pair.error(
        A.unravel(A.diagonal(2, generator=seeded())), B.unravel(B.diagonal(2, generator=seeded()))
    )
    found["function"] = pair.error(
        *(op.matrix_function(b, torch.exp, steps=4) for op, b in ((A, v), (B, along)))
    )
    twice, expected = 2 * A - A.damped(0.5), 2 * B - B.damped(0.5)
    found["algebra"] = pair.error(twice @ v, expected @ along)
    return found


def squares(tree):
    return {name: 0.02 * p * p + 1 for name, p in tree.items()}


def newton(net, rows):
    """Steps of Newton's method with a warm start; the parameters, and the state."""
    pair = Pair(hog.GGNOperator, net, rows)
    ours = hog.curvature.NewtonCG(pair.loss, pair.params, damping=1.0, max_iter=5)
    theirs = hog.curvature.NewtonCG(pair.own_loss, pair.own, damping=1.0, max_iter=5)
    errors = []
    for _ in range(2):
        values = ours.step(uneven(rows)), theirs.step([data()])
        errors.append(pair.error(*values))
        assert ours.info[4:] == theirs.info[4:], (ours.info, theirs.info)  # lengths and counts
    errors.append(pair.error({n: p.data for n, p in pair.params.items()}, pair.own))
    return max(errors)


def checkpointed(make, rank, world, folder):
    """The errors of a state that torch.distributed.checkpoint saved, in a new optimizer and operator."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trained():
        net, rows = make(rank, world)
        loss = hog.functional_loss(net, F.cross_entropy)
        # few iterations: where they start, from the saved direction, decides where they end
        return net, hog.curvature.NewtonCG(loss, max_iter=3), uneven(rows)

    net, optimizer, batches = trained()
    optimizer.step(batches)
    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "state": state}, checkpoint_id=folder / "newton")
    again, resumed, _ = trained()
    found = dict(zip(("model", "state"), get_state_dict(again, resumed), strict=True))
    dcp.load(found, checkpoint_id=folder / "newton")
    names = {"model_state_dict": found["model"], "optim_state_dict": found["state"]}
    set_state_dict(again, resumed, **names)
    for one in (optimizer, resumed):
        one.step(batches)
    pairs = zip(net.parameters(), again.parameters(), strict=True)
    errors = [float((p - q).detach().full_tensor().abs().max()) for p, q in pairs]
    params = hog.trainable_params(net)
    K = hog.KFACOperator(hog.functional_loss(net, F.cross_entropy), params, batches, kind="exact")
    v = vectors(params)
    expected = K @ v
    dcp.save(K.state_dict(), checkpoint_id=folder / "factors")
    state = K.state_dict()
    for tensor in pytree.tensors(state):
        tensor.zero_()
    dcp.load(state, checkpoint_id=folder / "factors")
    K.load_state_dict(state)
    errors += [float((x - expected[n]).full_tensor().abs().max()) for n, x in (K @ v).items()]
    return max(errors)


def factored(net, rows, corrected):
    """Kronecker factors, of which each process has some, and what is computed by them."""
    pair = Pair(partial(hog.KFACOperator, eigenvalue_corrected=corrected), net, rows)
    K, R, query = pair.shared, pair.single, tuple(x[:3] for x in data())
    given, whole = (pair.loss, pair.params, uneven(rows)), (pair.own_loss, pair.own)
    held = K.space.all_sum(torch.tensor(float(len(K.blocks()))))
    assert len(K.blocks()) < held == len(R.blocks())
    (v, along), (V, Along) = pair.vectors(), pair.vectors((2,))
    loaded = hog.KFACOperator(*given, eigenvalue_corrected=corrected)
    loaded.load_state_dict(K.state_dict())
    for name, p in pair.params.items():
        p.grad = v[name].clone()
    K.precondition_(net, damping=0.1)
    steps = {name: p.grad for name, p in pair.params.items()}
    found = {
        "@": (K @ v, R @ along), "loaded": (loaded @ V, R @ Along),
        "precondition": (steps, R.solve(along, damping=0.1)),
        "root": (K.damped(0.1).sqrt() @ V, R.damped(0.1).sqrt() @ Along),
        "diagonal": (K.unravel(K.diagonal()), R.unravel(R.diagonal())),
        "trace": (K.trace(), R.trace()), "logdet": (K.damped(0.1).logdet(), R.damped(0.1).logdet()),
    }  # fmt: skip
    solvers = {"factors": (K, R)}
    if not corrected:
        found["pi"] = [A.solve(x, damping=0.1, method="pi") for A, x in ((K, v), (R, along))]
        solvers["cg"] = "cg", "cg"
        mc = hog.KFACOperator(*given, kind="mc", generator=seeded())
        same = {"kind": "mc", "generator": seeded(), "processes": "sharded"}
        found["mc"] = mc @ v, hog.KFACOperator(*whole, given[2], **same) @ along
    for name, (ours, theirs) in solvers.items():
        scores = hog.influence(*given, query, solver=ours, damping=1.0)
        expected = hog.influence(*whole, data(), query, solver=theirs, damping=1.0)[rows]
        found[f"influence, {name}"] = scores, expected
    return {name: pair.error(*both) for name, both in found.items()}


def every(rank, folder, found):
    world = dist.get_world_size()
    for layout, make in (LAYOUTS | (ON_A_GRID if world == 4 else {})).items():
        for name, kind in KINDS.items():  # of other modes test_sharded_models.py has the products
            if layout in ("fsdp", "fsdp and tensor parallel") or name == "hessian":
                found[f"{layout}: {name}"] = products(*make(rank, world), kind)
        thorough = layout in ("fsdp", "hybrid", "fsdp and tensor parallel")
        for name, error in algorithms(*make(rank, world), thorough).items():
            found[f"{layout}: {name}"] = error
        if thorough:
            found[f"{layout}: newton"] = newton(*make(rank, world))
        for corrected in (True, False)[: 1 + (layout == "fsdp")]:
            for name, error in factored(*make(rank, world), corrected).items():
                found[f"{layout}: corrected {corrected}, {name}"] = error
    if world == 2:
        found["checkpoints"] = checkpointed(fsdp, rank, world, folder)
    found["refused"] = refused(rank, world)
    found["sent"] = sent()


BLOCKS = 3


def even():
    """A model whose parameters all numbers of processes divide, and its parameters."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(BLOCKS)]
    net = nn.Sequential(*blocks).double()
    for block in blocks:
        fully_shard(block)
    fully_shard(net)
    return net, hog.trainable_params(net)


def plan():
    """The function of docs/distributed.md that says what a product sends."""
    namespace = {}
    (code,) = (block for block in blocks(DOCS / "distributed.md", "python") if "def plan" in block)
    exec(code, namespace)
    return namespace["plan"]


def sent():
    """What a product, an iteration of conjugate gradients and a step of Lanczos send, beside what
    docs/how-to/sharded-models.md and docs/distributed.md say."""
    net, params = even()
    x = torch.ones(2, 64, dtype=torch.float64)
    loss = hog.functional_loss(net, F.mse_loss)
    H = hog.HessianOperator(loss, params, (x, x))
    R = hog.HessianOperator(loss, params, (x, x), remat=True)
    v = vectors(params)
    for _ in range(2):
        H @ v
        R @ v
    found = {}
    A = H.damped(1e3)
    whole = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
    D = hog.HessianOperator(
        hog.functional_loss(whole, F.mse_loss), hog.trainable_params(whole), [(x, x)],
        processes="sharded",
    )  # fmt: skip
    w = {name: torch.ones_like(p) for name, p in hog.trainable_params(whole).items()}
    for name, call in {
        "data": lambda: D @ w,
        "product": lambda: H @ v,
        "product, remat": lambda: R @ v,
        "1 iteration": lambda: A.solve(v, max_iter=1, return_info=True),
        "3 iterations": lambda: A.solve(v, max_iter=3, tol=0.0, return_info=True),
        "4 steps": lambda: H.spectral_density(1, steps=4, generator=seeded()),
        "5 steps": lambda: H.spectral_density(1, steps=5, generator=seeded()),
    }.items():
        with Wire() as wire:
            call()
        found[name] = dict(wire.messages), dict(wire.bytes)
    return found


def refused(rank, world):
    net, rows = fsdp(rank, world)
    loss, params = hog.functional_loss(net, F.cross_entropy), hog.trainable_params(net)
    batches, v = uneven(rows), vectors(params)
    H = hog.HessianOperator(loss, params, batches)
    make = partial(hog.HessianOperator, loss, params)
    nan = [(batches[0][0] * (torch.nan if rank == 0 else 1), batches[0][1])]
    frozen, _ = fsdp_frozen(rank, world)
    own = hog.trainable_params(frozen)
    other = hog.functional_loss(frozen, F.cross_entropy)
    noisy = vectors(own)
    noisy["norm.weight"] = noisy["norm.weight"] + rank
    seed = torch.Generator().manual_seed(rank)
    score = partial(hog.influence, loss, params, batches, damping=1.0)
    K = Pair(hog.KFACOperator, net, rows).single
    failing = [(x if rank else x[:, :2], y) for x, y in batches]
    calls = {
        "processes": lambda: make(batches, processes="sharded"),
        "reduction": lambda: make(batches, reduction="sum"),
        "micro_batch": lambda: make(batches, micro_batch=2),
        "compile": lambda: make(batches, compile="eager"),
        "kind": lambda: hog.FisherOperator(loss, params, batches, kind="mc"),
        "kfac": hog.KFACOperator(loss, params, batches).exact_diagonal,
        "mixed": lambda: score(data(), solver=K),
        "mixed, product": lambda: K @ v,
        "queries": lambda: score([batches[rank % 2]]),
        "self": lambda: score(None),
        "damping": lambda: score(data(), damping=1.0 if rank else -1.0),
        "failing": hog.KFACOperator(loss, params, failing).update,
        "to_dense": H.to_dense,
        "to_scipy": H.to_scipy,
        "block_diagonal": lambda: H.block_diagonal("parameter"),
        "xtrace": lambda: H.trace(8, method="xtrace"),
        "xdiag": lambda: H.diagonal(8, method="xdiag"),
        "low_rank": lambda: H.low_rank(2),
        "whole vectors": lambda: H @ gathered(v),
        "flat vectors": lambda: H @ torch.ones(H.shape[0], dtype=torch.float64),
        "batches": lambda: make(batches[: 1 + (rank > 0)]) @ v,
        "data": lambda: make(nan) @ v,
        "vectors": lambda: hog.HessianOperator(other, own, batches) @ noisy,
        "columns": lambda: H @ vectors(params, (2 + rank,)),
        "seed": lambda: H.trace(2, generator=seed),
        "tolerance": lambda: H.damped(1e3).solve(v, tol=1e-2 if rank else 1e-12),
        "another damping": lambda: H.solve(v, damping=1e3 + rank),
        "eigenvalues": lambda: H.eigsh(1 + rank),
        "another algorithm": lambda: H.eigsh(1) if rank else H.trace(1, generator=seeded()),
        "another call": lambda: H.eigsh(1) if rank else H @ v,
        "another product": lambda: (hog.ggn_vp if rank else hog.hvp)(loss, params, v, batches[0]),
        "another matrix": lambda: (
            (hog.GGNOperator if rank else hog.HessianOperator)(loss, params, batches) @ v
        ),
        "another criterion": lambda: hog.hvp(
            hog.functional_loss(net, nn.CrossEntropyLoss(label_smoothing=0.1 * rank)),
            params,
            v,
            batches[0],
        ),
        "iterating": lambda: make(Broken(batches, rank)) @ v,
    }
    return raised_by(calls)


class Broken:
    """Data that one process cannot read."""

    def __init__(self, batches, rank):
        self.batches, self.rank = batches, rank

    def __iter__(self):
        yield self.batches[0]
        if self.rank == 0:
            raise OSError("no such file")
        yield self.batches[1]


WHOLE = "that each process holds whole"
REFUSED = {
    **{
        name: ("UnsupportedError", f"HessianOperator({name}=...): expected parameters that this")
        for name in ("processes", "reduction")
    },
    "micro_batch": ("UnsupportedError", "pass smaller batches"),
    "compile": ("UnsupportedError", "gathers are not captured"),
    "kind": ("UnsupportedError", "FisherOperator(kind=...): expected parameters that this"),
    "kfac": ("UnsupportedError", "for anything else pass `p.full_tensor()` of each"),
    "mixed": ("ArgumentValueError", "names, shapes, dtypes and placements, got one on first.weight"),
    "mixed, product": ("UnsupportedError", f"v: expected vectors like params, {WHOLE}"),
    "queries": ("DistributedError", "expected the same queries, and options, in all"),
    "self": ("UnsupportedError", "pass some examples at a time as queries"),
    **{
        name: ("UnsupportedError", f"{name}: expected params {WHOLE}")
        for name in ("to_dense", "to_scipy", "block_diagonal", "xtrace", "xdiag", "low_rank")
    },
    "whole vectors": ("ArgumentValueError", "expected a DTensor with the placements of its parameter"),
    "flat vectors": ("ArgumentValueError", "A flat vector is the part of this process"),
    "batches": ("DistributedError", "expected as many batches in each of"),
    "data": ("NonFiniteError", "expected a finite number, got nan"),
    "vectors": ("DistributedError", "expected the same vectors, where they are not sharded, in all"),
    "columns": ("DistributedError", "expected the same number of vectors in all"),
    **dict.fromkeys(("tolerance", "another damping"), ("DistributedError", "solve: expected the same algorithm, and its options, in all")),
    "eigenvalues": ("DistributedError", "eigsh: expected the same algorithm, and its options, in all"),
    "another algorithm": ("DistributedError", "expected the same algorithm, and its options, in all"),
    "another call": ("DistributedError", "All processes have to make the same call"),
    **dict.fromkeys(("another product", "another matrix", "another criterion"), ("DistributedError", "expected the same call, with its options, criterion and")),
    "seed": ("DistributedError", "expected the same random numbers in all"),
}  # fmt: skip


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=FULL)])
def test_operators_of_several_processes_equal_those_of_one(count, tmp_path):
    """One test of all cases: to start processes takes longer than what they do."""
    for rank, found in enumerate(found_by_each(every, tmp_path, count)):
        check_sent(found.pop("sent"), count)
        got = found.pop("refused")
        assert got.pop("iterating") == (
            ["OSError", "no such file"] if rank == 0 else ["DistributedError", got_iterating(count)]
        )
        assert ("got an error in process 0: " in got.pop("failing")[1]) == (rank > 0)
        assert got.pop("damping")[0] == ("DistributedError" if rank else "ArgumentValueError")
        assert_raised(got, REFUSED, rank)
        for name, error in found.items():
            assert error < 1e-10, (rank, name, error)


def check_sent(found, count):
    """The arithmetic of docs/how-to/sharded-models.md, and that of docs/distributed.md."""
    params, size = 2 * BLOCKS, 8 * BLOCKS * (64 * 64 + 64)
    of = plan()
    for name, remat in (("product", False), ("product, remat", True)):
        messages, bytes_sent = found[name]
        planned = of("parameters", size / 8, count, params, b=8, remat=remat)
        assert messages["gathers"] + messages["averages"] == planned["messages"]
        large = bytes_sent["gathers"] + bytes_sent["averages"]
        assert large == pytest.approx(planned["sent"], rel=1e-12)
    messages, bytes_sent = found["data"]
    planned = of("data", 2 * 65 * 64, count, 4, b=8)
    assert messages == {"sums": planned["messages"]}
    assert 0 < bytes_sent["sums"] - planned["sent"] < 2 * 8 * (4 + 20 * count)  # checksums
    messages, bytes_sent = found["product"]
    assert messages == {"gathers": 2 * params, "averages": 2 * params, "sums": 5}
    repeated, _ = found["product, remat"]
    assert repeated == {"gathers": 5 * params, "averages": 4 * params, "sums": 5}
    large = bytes_sent["gathers"] + bytes_sent["averages"]
    assert large == 4 * size * (count - 1) / count
    assert bytes_sent["sums"] < 1000
    # a further iteration, or step: its product, and inner products
    for first, then, times, sums in (
        ("1 iteration", "3 iterations", 2, 3),
        ("4 steps", "5 steps", 1, 3),
    ):
        (a, _), (b, _) = found[first], found[then]
        assert b["gathers"] - a["gathers"] == times * 2 * params, then
        assert b["sums"] - a["sums"] == times * (5 + sums), then


def got_iterating(count):
    return (
        f"HessianOperator: expected a batch from each of {count} processes, got an error in process 0: "
        "OSError: no such file"
    )
