"""Operators whose data several processes share: their results, and wrong uses of them."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hoglib as hog
from tests.curvature.problems import draw, flat, problem, seeded
from tests.models import Fn

MC = partial(hog.FisherOperator, kind="mc", num_samples=2)
KINDS = {
    "Hessian": hog.HessianOperator,
    "Gauss-Newton": hog.GGNOperator,
    "exact": hog.FisherOperator,
    "empirical": partial(hog.FisherOperator, kind="empirical"),
    "mc": lambda *given, **options: MC(*given, **options, generator=seeded(5)),
}
BATCH = (draw(8, 3, seed=3), torch.arange(8) % 3)


def rows(start, end):
    return tuple(x[start:end] for x in BATCH)


def loader(**options):
    return DataLoader(TensorDataset(*BATCH), batch_size=options.pop("batch_size", 3), **options)


def shared(data, **options):
    """The same for all, each of which takes its part."""
    return lambda rank, world: (data(), {"processes": "shard" if world > 1 else None, **options})


def own(parts, **options):
    """A part for each; for one process all of them, one after the other. The last ones have none."""

    def given(rank, world):
        if world == 1:
            return [rows(*part) for part in parts], options
        mine = [rows(*part) for part in parts[rank::world]]
        # what is one batch is given as one, whose graph is kept
        return mine[0] if len(mine) == 1 else mine, {"processes": "sharded", **options}

    return given


def by_sampler(rank, world):
    if world == 1:
        return loader(batch_size=2), {}
    sampler = DistributedSampler(TensorDataset(*BATCH), shuffle=True, seed=1)  # 8 divide evenly
    return loader(sampler=sampler), {"processes": "sharded"}


# name -> what an operator is given as data, and how, in a process
DATA = {
    "one batch": shared(lambda: BATCH),
    "one batch, nothing kept": shared(lambda: BATCH, memory_limit=0),
    "one batch, smaller than the processes": shared(lambda: rows(0, 3)),
    "pieces of one batch": shared(lambda: BATCH, micro_batch=3),
    "a loader with an uneven last batch": shared(loader),
    "pieces of a loader's batches": shared(lambda: loader(batch_size=5), micro_batch=2),
    "a loader shuffled alike": shared(lambda: loader(shuffle=True, generator=seeded(0))),
    "fewer batches than processes": shared(lambda: [BATCH]),
    "parts of unlike sizes": own([(0, 5), (5, 6), (6, 8)]),
    "a sum over parts": own([(0, 5), (5, 6), (6, 8)], reduction="sum"),
    "one part in all": own([(0, 8)]),
    "a DistributedSampler": by_sampler,
}
# of every kind of matrix
FEW = ("pieces of one batch", "parts of unlike sizes")


def loss_and_params(name="layers of hoglib", reduction="mean", dtype=torch.float64):
    loss, _, _ = problem(name)
    model = loss.model.to(dtype)
    criterion = partial(F.cross_entropy, reduction=reduction)
    return hog.functional_loss(model, criterion), hog.trainable_params(model)


def products(kind, data, rank, world, **options):
    given, how = DATA[data](rank, world)
    loss, params = loss_and_params(reduction=how.get("reduction", "mean"))
    A = KINDS[kind](loss, params, given, **how, **options)
    size = A.shape[0]
    v, V = draw(size), draw(size, 3, seed=1)
    with torch.inference_mode():
        value, gradient = A.gradient()
        found = [value.reshape(1), A.value().reshape(1), flat(gradient)]
    found += [A @ v, (A @ V).reshape(-1), A @ v]
    with torch.no_grad():
        for p in params.values():
            p *= 0.9  # as an optimizer's step
    return torch.cat([*found, A @ v, A.gradient()[0].reshape(1)]).tolist()


def algorithms(rank, world):
    loss, params = loss_and_params()
    given, how = DATA["parts of unlike sizes"](rank, world)
    A = hog.GGNOperator(loss, params, given, **how)
    return torch.cat([
        A.solve(draw(A.shape[0]), damping=0.1),
        A.eigsh(2, which="LA").values,
        A.trace(4, generator=seeded(1)).reshape(1),
        A.diagonal(4, generator=seeded(1)),
        (A - 0.5 * A.block_diagonal("module")) @ draw(A.shape[0]),
    ]).tolist()  # fmt: skip


def drawn_for_pieces(rank, world):
    """A product by draws for one batch that is shared out, and by one process in as many pieces."""
    both = ({"processes": "shard"}, {"micro_batch": 8 // world})
    found = [KINDS["mc"](*loss_and_params(), BATCH, **how) for how in both]
    return [(A @ draw(A.shape[0])).tolist() for A in found]


def in_single_precision(rank, world):
    given, how = DATA["a loader with an uneven last batch"](rank, world)
    loss, params = loss_and_params(dtype=torch.float32)
    in_single = [(x.float(), y) for x, y in given]
    return (hog.HessianOperator(loss, params, in_single, **how) @ params)["2.bias"].tolist()


def kronecker_factors(data, rank, world):
    given, how = DATA[data](rank, world)
    found = []
    mc = {"kind": "mc", "joint_bias": False, "generator": seeded(5)}
    every = [{"eigenvalue_corrected": True}, mc]
    for options in every[:1] if data == "one batch" else every:  # pieces of it have other draws
        K = hog.KFACOperator(*loss_and_params("ReLU"), given, **how, **options)
        found.append(K.to_dense().reshape(-1))
    return torch.cat(found).tolist()


def kfac_steps(rank, world):
    given, how = DATA["parts of unlike sizes"](rank, world)
    loss, params = loss_and_params("ReLU")
    optimizer = hog.curvature.KFAC(loss, damping=0.1, kind="exact", **how)
    for _ in range(3):
        optimizer.step(given)
    return flat(params).tolist()


def newton_steps(rank, world):
    loss, params, batch = problem("LayerNorm")
    optimizer = hog.curvature.NewtonCG(loss, max_iter=5, processes="shard" if world > 1 else None)
    for _ in range(3):
        optimizer.step(batch)
    return flat(params).tolist()


def messages_of_a_product(rank, world):
    """All-reduces of one product, and of a gradient, with and without a graph that is kept."""
    counts = []
    reduce = dist.all_reduce

    def counted(*args, **options):
        counts[-1] += 1
        return reduce(*args, **options)

    dist.all_reduce = counted
    loss, params = loss_and_params()
    A = hog.HessianOperator(loss, params, BATCH, processes="shard")
    product, block = (lambda: A @ params), (lambda: A @ draw(A.shape[0], 3))
    for call in (product, product, A.gradient, block):
        counts.append(0)
        call()
    dist.all_reduce = reduce
    return counts


def halves():
    """Whose first examples reach one layer, and the others the other."""

    def run(net, x):
        return (net.a if x[0, 0] > 0 else net.b)(x)

    return Fn(run, a=nn.Linear(3, 3), b=nn.Linear(3, 3), none=nn.Linear(3, 3))


def warned_of_unused(rank, world):
    torch.manual_seed(0)
    model = halves().double()
    loss = hog.functional_loss(model, F.mse_loss)
    x = torch.ones(2, 3).double() * (1 if rank == 0 else -1)
    A = hog.HessianOperator(loss, hog.trainable_params(model), (x, x), processes="sharded")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            A @ draw(A.shape[0])
    return [str(one.message).partition(";")[0].partition("on ")[2] for one in told]


# What raises in every process alike: name -> what is done in a process of several


def operator(data=BATCH, processes="shard", make=hog.HessianOperator, **options):
    return make(*loss_and_params(), data, processes=processes, **options)


def a_failing_process(rank, world):
    loss, params = loss_and_params()

    def failing(params, batch):
        if rank == 1:
            raise ValueError("the disk is full")
        return loss(params, batch)

    hog.HessianOperator(failing, params, BATCH, processes="shard") @ params


def factors_that_fail(rank, world):
    loss, params = loss_and_params("ReLU")

    def failing(model, batch):
        if rank == 1:
            raise ValueError("the disk is full")
        return model(batch[0])

    def criterion(outputs, batch):
        return F.cross_entropy(outputs, batch[1])

    loss = hog.functional_loss(loss.model, criterion, forward=failing)
    hog.KFACOperator(loss, params, BATCH, processes="shard").update()


def other_vectors(rank, world):
    A = operator()
    A @ draw(A.shape[0], seed=rank)


def random_without_a_generator(rank, world):
    torch.manual_seed(rank)
    operator().trace(3)


def other_parameters(rank, world):
    loss, params = loss_and_params()
    with torch.no_grad():
        params["2.bias"] += rank * 1e-6
    hog.HessianOperator(loss, params, BATCH, processes="shard").gradient()


def other_statistics(rank, world):
    loss, params, batch = problem("CNN with BatchNorm in eval")
    loss.model[1].running_mean += rank
    hog.HessianOperator(loss, params, batch, processes="shard").gradient()


def norms_in_training(rank, world):
    loss, params, batch = problem("CNN with BatchNorm in train")
    loss.model[1].running_mean += rank  # which is not used
    hog.HessianOperator(loss, params, batch, processes="shard").gradient()


def shuffled_otherwise(rank, world):
    operator(loader(shuffle=True, generator=seeded(rank))).gradient()


def drawn_otherwise(rank, world):
    operator(make=MC, generator=seeded(rank)).gradient()


def no_data(rank, world):
    operator([], "sharded").gradient()


def other_data_later(rank, world):
    """Of the second process, the last one has none."""
    batches = [tuple(x.clone() for x in BATCH)] if rank < world - 1 else []
    A = operator(batches, "sharded")
    A.gradient()
    if rank == 0:
        batches[0][0].mul_(2)
    A.gradient()


def cannot_be_split(rank, world):
    operator(torch.ones(())).gradient()


def sampler(processes=None, **options):
    dataset = TensorDataset(*BATCH[:1])
    return operator(DataLoader(dataset, sampler=DistributedSampler(dataset, **options)), processes)


def seven_by_a_sampler(rank, world):
    dataset = TensorDataset(*rows(0, 7))
    operator(DataLoader(dataset, sampler=DistributedSampler(dataset)), "sharded")


def of_model(model):
    loss, params = hog.functional_loss(model, F.mse_loss), hog.trainable_params(model)
    hog.HessianOperator(loss, params, BATCH, processes="shard")


def by_fsdp2(rank, world):
    model = nn.Linear(2, 4)
    fully_shard(model)
    of_model(model)


def other_call(first, other):
    """A call in process 0, and another one in the others."""
    return lambda rank, world: (other if rank else first)()


def smoothed(label_smoothing, cls=hog.GGNOperator, **options):
    loss, params = loss_and_params()
    criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
    loss = hog.functional_loss(loss.model, criterion)
    return cls(loss, params, BATCH, processes="shard", **options)


def product(A):
    return A @ draw(A.shape[0])


def plain(reduction):
    loss, params = loss_and_params()
    of_batch = lambda params, batch: loss(params, batch)  # noqa: E731 (whose criterion is not known)
    return product(
        hog.HessianOperator(of_batch, params, BATCH, reduction=reduction, processes="shard")
    )


def curvature(cls, **options):
    return cls(*loss_and_params(), BATCH, processes="shard", **options)


MINE = "ValueError: the disk is full"
# name -> (function, the error, words of it)
REFUSED = {
    "a process fails": (a_failing_process, "DistributedError", "error in process 1: ValueError: the disk is full"),
    "factors of a process fail": (factors_that_fail, "DistributedError", "error in process 1: ValueError: the disk is full"),
    "other vectors": (other_vectors, "DistributedError", "expected the same vectors in all"),
    "random vectors": (random_without_a_generator, "DistributedError", "generator=torch.Generator().manual_seed(0)"),
    "other parameters": (other_parameters, "DistributedError", "expected the same params in all"),
    "other statistics": (other_statistics, "DistributedError", "expected the same model in all"),
    "statistics of batches": (norms_in_training, "ArgumentValueError", "BatchNorm in train mode mixes examples"),
    "other batches": (shuffled_otherwise, "DistributedError", "expected the same data in all"),
    "other draws": (drawn_otherwise, "DistributedError", "expected the same seed in all"),
    "another reduction": (other_call(lambda: plain("mean"), lambda: plain("sum")), "DistributedError", "expected the same options in all"),
    "another mode": (other_call(lambda: product(operator()), lambda: product(operator(mode="forward-over-reverse"))), "DistributedError", "expected the same kind in all"),
    "another matrix": (other_call(lambda: product(curvature(hog.HessianOperator)), lambda: product(curvature(hog.GGNOperator))), "DistributedError", "expected the same kind in all"),
    "another Fisher": (other_call(lambda: product(curvature(hog.FisherOperator)), lambda: product(curvature(hog.FisherOperator, kind="empirical"))), "DistributedError", "expected the same kind in all"),
    "other factors": (other_call(lambda: curvature(hog.KFACOperator).update(), lambda: curvature(hog.KFACOperator, kind="empirical").update()), "DistributedError", "expected the same kind in all"),
    "an approximation": (other_call(lambda: curvature(hog.KFACOperator).update(), lambda: curvature(hog.KFACOperator, joint_bias=False).update()), "DistributedError", "expected the same kind in all"),
    "another criterion": (other_call(lambda: product(smoothed(0.0)), lambda: product(smoothed(0.1))), "DistributedError", "expected the same criterion in all"),
    "as many samples": (other_call(lambda: operator().trace(4, generator=seeded(0)), lambda: operator().trace(6, generator=seeded(0))), "DistributedError", "expected the same shapes in all"),
    "a gradient here": (other_call(lambda: operator().gradient(), lambda: product(operator())), "DistributedError", "expected the same shapes in all"),
    "factors here": (other_call(lambda: curvature(hog.KFACOperator).update(), lambda: product(operator())), "DistributedError", "expected the same kind in all"),
    "another damping": (other_call(lambda: smoothed(0.0).solve(draw(51), damping=0.1), lambda: smoothed(0.0).solve(draw(51), damping=1.0)), "DistributedError", "expected the same"),
    "no data": (no_data, "ArgumentValueError", "expected at least one batch"),
    "other data later": (other_data_later, "NondeterministicError", "expected the same loss at every pass"),
    "a batch without rows": (cannot_be_split, "ArgumentTypeError", "processes: expected a batch of tensors that can be split"),
    "a sampler and None": (lambda *_: sampler(), "ArgumentValueError", "expected 'sharded' for a loader with a DistributedSampler"),
    "a sampler and 'shard'": (lambda *_: sampler("shard"), "ArgumentValueError", "expected 'sharded' for a loader with a DistributedSampler"),
    "another's sampler": (lambda *_: sampler("sharded", num_replicas=3, rank=2), "ArgumentValueError", "for process 2 of 3"),
    "a sampler that repeats": (seven_by_a_sampler, "ArgumentValueError", "they would count twice"),
    "FSDP2": (by_fsdp2, "UnsupportedError", "HessianOperator(processes=...): expected parameters that this process"),
}  # fmt: skip
