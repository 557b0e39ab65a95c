"""Each watcher of a pass over data by itself, and a fold with what it tells them."""

import re
import sys
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoglib as hog
from hoglib._core.messages.progress import ProgressBar
from hoglib._core.problem import Policy
from hoglib.curvature.algebra.vector_space import Space
from hoglib.curvature.batches.data import Batches, PassTotals, Piece, Processes
from hoglib.curvature.sums import watchers
from hoglib.curvature.sums.dataset_sum import CheckedDataOptions, DatasetSum
from hoglib.curvature.sums.term import Term
from hoglib.errors import ArgumentValueError, HoglibError, NondeterministicError
from tests.curvature.problems import F64, draw
from tests.rows import rows

PARAMS = {"w": draw(3), "idle": draw(2)}
BATCHES = [draw(4, 3, seed=seed) for seed in range(3)]


def square(p, x):
    return (x @ p["w"]).square().mean()


class Loader:
    """Batches, as a list of tensors is one batch."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def term_of(loss, params=None):
    if params is None:
        params = hog.trainable_params(loss.model) if hasattr(loss, "model") else PARAMS
    space = Space(params)
    return Term(Policy.of("Pass", {}), loss, space, ProgressBar("Pass", False), space.placement)


def show(watcher, *passes, changed=()):
    """Show a watcher the batches of each pass, as a fold does; before those numbered in `changed` the state
    changed."""
    for number, batches in enumerate(passes):
        watcher.before(number in changed)
        shares, values = [], []
        for batch in batches:
            piece = (
                batch if isinstance(batch, Piece) else Piece(batch, float(len(batch)), len(shares))
            )
            term = watcher.at._replace(piece=piece, share=piece.weight)
            values.append(term.value())
            watcher.saw(term, values[-1])
            shares.append(piece.weight)
        watcher.after(watchers.totals_of(shares, [float(value) for value in values]))
    return watcher


def told(show_it):
    """What it raises or warns, as text; "" for nothing."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            show_it()
        except (HoglibError, RuntimeError) as error:
            return "|".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return " | ".join(str(w.message) for w in found)


def noisy(p, x):
    return square(p, x + torch.rand_like(x))


def counting():
    calls = []
    return lambda p, x: square(p, x) * (1 + 0.1 * (calls.append(0) or len(calls)))


def determinism(loss, *passes, fixed=False, shared=False, changed=()):
    return lambda: show(
        watchers.Determinism(term_of(loss), fixed, shared), *passes, changed=changed
    )


NAN = draw(4, 3).index_fill(0, torch.tensor([1]), torch.nan)
SHUFFLED = [BATCHES[2], BATCHES[0], BATCHES[1]]
MODEL = nn.Sequential(nn.Linear(3, 2), nn.Dropout()).double()
DROPPED = hog.functional_loss(MODEL, lambda y, _: y.square().mean())


def labelled(*ignored):
    """Batches of four, with so many labels that are ignored."""
    every = [(draw(4, 3, seed=k), torch.arange(4) % 3) for k in range(len(ignored))]
    for (_, y), count in zip(every, ignored, strict=True):
        y[:count] = -100
    return [Piece(batch, 4.0, k) for k, batch in enumerate(every)]


def scores(p, x):
    return x * p["w"]


def entropy(p, batch):
    return F.cross_entropy(scores(p, batch[0]), batch[1])


def known(weight=None):
    """A loss with a criterion of the table."""
    return hog.functional_loss(nn.Linear(3, 3).double(), nn.CrossEntropyLoss(weight=weight))


def per_label(p, batch):
    """A mean over examples, of which those without a label have no loss."""
    return F.cross_entropy(scores(p, batch[0]), batch[1], reduction="none").mean()


def halves(batch):
    """A batch in two pieces."""
    return [Piece(batch[:2], 2.0, 0), Piece(batch[2:], 2.0, 1, whole=batch)]


def splits(loss, *passes, mean=True, shared=False, changed=()):
    def run():
        losses = watchers.Losses(term_of(loss))
        watcher = watchers.Splits(losses.at, losses, mean, shared)
        saw = watcher.saw
        # in the order of a pass
        watcher.saw = lambda term, value: [losses.saw(term, value), saw(term, value)]
        before = watcher.before
        watcher.before = lambda changed: [losses.before(changed), before(changed)]
        show(watcher, *passes, changed=changed)

    return run


NORM = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()


def batch_norm(train):
    def run():
        NORM.train(train)
        watcher = watchers.BatchNorm(term_of(square), [NORM])
        show(watcher, BATCHES, BATCHES)

    return run


def _double_products(v, double, _):
    return None if double is None else v.double() @ double.mT


def symmetry(loss, A, *, half=None, double=None, again=(), rows=None, changed=False):
    def run():
        watcher, v = watchers.Symmetry(term_of(loss)), draw(2, 5) if rows is None else rows
        for k, M in enumerate((A, *again)):
            watcher.before(changed)
            v = v if rows is None or k == 0 else v.flip(-1)
            exact = partial(_double_products, v, double)
            watcher.compare(v, v @ M.mT, lambda: half, exact)

    return run


def new_loss():
    return lambda p, x: square(p, x)


SYMMETRIC = draw(5, 5) + draw(5, 5).mT
SKEW = SYMMETRIC + 0.01 * draw(5, 5, seed=3)


def unused(*noted, used=None):
    def run():
        watcher = watchers.UnusedLeaves(term_of(square))
        for leaves in noted:
            watcher.note(leaves)
        if used is not None:
            watcher.keep(torch.tensor(used))
        watcher.after(PassTotals())
        watcher.after(PassTotals())

    return run


def drawn(loss, before=0):
    def run():
        watcher = watchers.Draws(term_of(loss))
        torch.rand(before)
        watcher.start()
        show(watcher, BATCHES[:1])

    return run


WATCHED = {
    # losses
    "finite": (lambda: show(watchers.Losses(term_of(square)), BATCHES), ""),
    "NaN in a batch": (lambda: show(watchers.Losses(term_of(square)), [BATCHES[0], NAN]), "NonFiniteError: loss: expected a finite number, got nan at batch 1, which holds NaN"),
    "NaN in the parameters": (lambda: show(watchers.Losses(term_of(square, {"w": torch.full((3,), torch.nan)})), [torch.ones(2, 3)]), r"got nan at batch 0\. Look"),
    "other losses, not compared": (lambda: show(watchers.Losses(term_of(counting())), BATCHES, BATCHES), ""),
    # determinism
    "the same": (determinism(square, BATCHES, BATCHES, fixed=True), ""),
    "a batch more": (determinism(square, BATCHES[:1], BATCHES), "NondeterministicError: data: .* the data differs from pass to pass"),
    "shuffled batches": (determinism(square, BATCHES, SHUFFLED), ""),
    "shuffled batches, with samples": (determinism(square, BATCHES, SHUFFLED, fixed=True), "expected the same batches at every pass, got another one for batch 0"),
    "shuffled examples": (determinism(square, [BATCHES[0], BATCHES[1]], [torch.cat([BATCHES[0][:2], BATCHES[1][:2]]), torch.cat([BATCHES[0][2:], BATCHES[1][2:]])]), ""),
    "examples that meet others": (determinism(lambda p, x: square(p, x.mean(0, keepdim=True)), [BATCHES[0], BATCHES[1]], [torch.cat([BATCHES[0][:2], BATCHES[1][:2]]), torch.cat([BATCHES[0][2:], BATCHES[1][2:]])]), "the same examples, shuffled, and the loss depends on which"),
    "random numbers": (determinism(noisy, BATCHES, BATCHES), r"at batch 0: random numbers are drawn at .*test_watchers\.py"),
    "random numbers once": (determinism(noisy, BATCHES), ""),
    "dropout": (determinism(DROPPED, BATCHES, BATCHES), r"at batch 0: 1 \(Dropout\) draws at random in train mode"),
    "a counter": (determinism(counting(), BATCHES, BATCHES), "draws random numbers outside of torch, or changes a state"),
    "other parameters": (determinism(counting(), BATCHES, BATCHES, changed=[1]), ""),
    # symmetry
    "symmetric": (symmetry(new_loss(), SYMMETRIC), ""),
    "not symmetric": (symmetry(new_loss(), SKEW), r"Pass: expected a symmetric matrix, got v\.Aw and w\.Av that differ by 0\.0"),
    "not symmetric, one vector": (symmetry(new_loss(), SKEW, rows=draw(1, 5)), ""),
    "not symmetric, one vector at a time": (symmetry(new_loss(), SKEW, rows=draw(1, 5), again=[SKEW]), "symmetric matrix"),
    "not symmetric later": (symmetry(new_loss(), SYMMETRIC, again=[SKEW]), ""),
    "not symmetric in another state": (symmetry(new_loss(), SYMMETRIC, again=[SKEW], changed=True), "symmetric matrix"),
    "not symmetric in half precision": (symmetry(new_loss(), SKEW, half=torch.bfloat16), ""),
    "rounding in float32": (symmetry(new_loss(), SKEW.float(), rows=draw(2, 5).float(), double=SYMMETRIC), ""),
    "not symmetric in float64 either": (symmetry(new_loss(), (SYMMETRIC + draw(5, 5, seed=3)).float(), rows=draw(2, 5).float(), double=SKEW + draw(5, 5, seed=3)), "symmetric matrix"),
    # denominators
    "a mean over examples": (lambda: show(watchers.Denominators(term_of(square)), BATCHES), ""),
    "a mean over labels": (lambda: show(watchers.Denominators(term_of(entropy)), labelled(0, 1)), r"ArgumentValueError: Pass: expected a loss that is the mean .*\(batch\[1\] != -100\)\.sum\(\)"),
    "a known mean over labels": (lambda: show(watchers.Denominators(term_of(known())), labelled(0, 1)), ""),
    "a mean over labels in the fourth batch": (lambda: show(watchers.Denominators(term_of(entropy)), labelled(0, 0, 0, 1, 0)), ""),  # 0, 1, 2, 4, ... only
    "a mean over labels in the last batch": (lambda: show(watchers.Denominators(term_of(entropy)), labelled(0, 0, 0, 1)), "the mean over the examples"),
    "a mean over labels in the fifth batch": (lambda: show(watchers.Denominators(term_of(entropy)), labelled(0, 0, 0, 0, 1)), "the mean over the examples"),
    "as many labels as examples": (lambda: show(watchers.ExampleCounts(term_of(known()), "do this"), labelled(0, 0)), ""),
    "as many labels in each batch": (lambda: show(watchers.ExampleCounts(term_of(known()), "do this"), labelled(2, 2)), ""),
    "other numbers of labels": (lambda: show(watchers.ExampleCounts(term_of(known()), "do this"), labelled(0, 1)), r"are not the mean over the data; do this\."),
    "class weights": (lambda: show(watchers.ExampleCounts(term_of(known(torch.tensor([1.0, 2.0, 3.0], dtype=F64))), "do this"), [*labelled(0), *labelled(1)]), "do this"),
    # ignored labels
    "labels of each example": (lambda: show(watchers.IgnoredLabels(term_of(per_label)), labelled(0, 0)), ""),
    "as many ignored": (lambda: show(watchers.IgnoredLabels(term_of(per_label)), labelled(1, 1)), ""),
    "others ignored": (lambda: show(watchers.IgnoredLabels(term_of(per_label)), labelled(0, 2)), r"got 0\.5 to 1 elements of batch\[1\] that are not -100.*batch: \(batch\[1\] != -100\)\.sum\(\)`, or"),
    "others ignored by a known criterion": (lambda: show(watchers.IgnoredLabels(term_of(known())), labelled(0, 2)), ""),
    "others ignored in the pass before": (lambda: [w := watchers.IgnoredLabels(term_of(per_label)), w.before(False), w.saw(w.at._replace(piece=labelled(2)[0]), torch.ones(())), show(w, labelled(0))], ""),
    # splits
    "pieces of a mean": (splits(square, halves(BATCHES[0])), ""),
    "pieces of two batches": (splits(square, [*halves(BATCHES[0]), *halves(BATCHES[1])]), ""),
    "pieces of a sum": (splits(lambda p, x: square(p, x) * len(x), halves(BATCHES[0])), "ArgumentValueError: micro_batch: expected a loss that is the mean over examples"),
    "pieces that mix": (splits(lambda p, x: square(p, x - x.mean(0)), halves(BATCHES[0])), "BatchNorm in train mode mixes examples.*couple them, as a ranking loss does"),
    "pieces that mix, in the second batch": (splits(lambda p, x: square(p, x - x.mean(0)), [Piece(BATCHES[1], 4.0, 0, whole=BATCHES[1]), *halves(BATCHES[0])]), "mixes examples"),
    "whole batches that mix": (splits(lambda p, x: square(p, x - x.mean(0)), [Piece(x, 4.0, k, whole=x) for k, x in enumerate(BATCHES)]), ""),
    "pieces with dropout": (splits(DROPPED, halves(BATCHES[0])), r"NondeterministicError: micro_batch: .* draws at random"),
    # BatchNorm
    "in train mode": (batch_norm(True), r"^Pass: expected the loss of each example to depend on that example alone[^|]*: 1 \(BatchNorm1d\) in train mode[^|]*$"),
    "in eval mode": (batch_norm(False), ""),
    # unused leaves
    "all are used": (unused((), ()), ""),
    "one is not used": (unused((1,)), r"^Pass: the loss does not depend on idle; [^|]*$"),
    "one is used by one batch": (unused((1,), (), (1,)), ""),
    "nobody knows": (unused(None, None), ""),
    "one is used by another process": (unused((0, 1), used=[1.0, 0.0]), "depend on idle;"),
    # draws
    "no draws": (drawn(square), ""),
    "draws": (drawn(noisy), "Pass: .* one whose factors are those of one draw: random numbers are drawn at"),
    "draws before the batch": (drawn(square, before=3), ""),
}  # fmt: skip


@rows("name", WATCHED)
def test_a_watcher_by_itself(name):
    run, words = WATCHED[name]
    found = told(run)
    assert bool(found) == bool(words), found
    assert re.search(words, found, re.DOTALL), found


def list_of(loss, *data, form=list):
    loss = hog.functional_loss(nn.Linear(3, 3, dtype=F64), loss)
    return lambda: hog.HessianOperator(
        loss, hog.trainable_params(loss.model), form(data)
    ).to_dense()


ONE_BATCH = r"read the list of two tensors as one batch, \(inputs, targets\): pass a tuple"
LISTS = {
    "two batches": (list_of(F.mse_loss, BATCHES[0], BATCHES[1]), ONE_BATCH),
    "two batches of a criterion": (list_of(lambda y, x: (y - x).abs().sum(), BATCHES[0], BATCHES[1]), ONE_BATCH),
    "a tuple": (list_of(F.mse_loss, BATCHES[0], BATCHES[1], form=tuple), ""),
    "batches of a loader": (list_of(F.mse_loss, BATCHES[0], BATCHES[1], form=Loader), ""),
    "labels": (list_of(F.cross_entropy, BATCHES[0], torch.arange(4) % 3), ""),
    "distributions, whose inputs are none": (list_of(F.cross_entropy, BATCHES[0], BATCHES[1].softmax(1)), ""),
    "three batches": (list_of(F.mse_loss, *BATCHES), r"ArgumentTypeError: .*a list of tensors is read as one batch; .*batch_size=None"),
    "one batch": (list_of(F.mse_loss, BATCHES[0]), r"got a list of 1.*a list of tensors is read as one batch"),
    "two batches of unlike sizes": (list_of(lambda y, x: (y - x).abs().sum(), BATCHES[0], BATCHES[1][:3]), r"size of tensor.*a list of tensors is read as one batch"),
    "a list of batches with an error": (list_of(F.mse_loss, (BATCHES[0][:, :2], BATCHES[1])), r"cannot be multiplied(?!.*a list of tensors)"),
}  # fmt: skip


@rows("name", LISTS)
def test_how_a_list_of_tensors_is_read_is_told(name):
    run, words = LISTS[name]
    found = told(run)
    assert bool(found) == bool(words), found
    assert re.search(words, found, re.DOTALL), found


def test_losses_are_those_of_the_last_pass():
    losses = show(watchers.Losses(term_of(square)), BATCHES, BATCHES[:2])
    assert losses.losses() == [float(square(PARAMS, x)) for x in BATCHES[:2]]
    assert losses.dtype is F64


def test_a_loss_is_computed_again_before_its_graph_is_kept():
    for loss in (square, noisy):
        calls = []
        term = term_of(lambda p, x: [calls.append(0), loss(p, x)][1])._replace(  # noqa: B023
            piece=Piece(BATCHES[0], 4.0, 0)
        )
        watcher = watchers.Determinism(term, False, False)
        watcher.before(False)
        first = term.value()
        again = watcher.before_keeping(term, first)
        assert len(calls) == 2
        if loss is square:
            assert again == first
            watcher.saw(term, again)
            watcher.after(watchers.totals_of([1.0], [float(again)]))
            assert watcher.before_keeping(term, first) is first  # an earlier pass has compared it
            assert len(calls) == 2
        else:
            with pytest.raises(NondeterministicError, match="random numbers are drawn"):
                watcher.saw(term, again)
    assert watchers.Losses(term).before_keeping(term, first) is first


def test_asymmetry_is_warned_of_once_for_each_loss():
    loss = new_loss()
    assert told(symmetry(loss, SKEW))
    assert not told(symmetry(loss, SKEW))


def test_pieces_of_several_processes_are_compared_with_their_batch():
    """Each process tells the others the loss of the whole; the pieces of all come with the totals."""
    losses = watchers.Losses(term_of(square))
    watcher = watchers.Splits(losses.at, losses, True, True)
    watcher.before(False)
    (_, mine), whole = halves(BATCHES[0]), float(square(PARAMS, BATCHES[0]))
    watcher.saw(watcher.at._replace(piece=mine), torch.ones(()))
    assert dict(watcher.totals()) == {"whole": whole, "shared": True}
    totals = PassTotals(pieces=2, weight=4, loss=4 * whole, largest=whole, shared=2, whole=whole)
    with pytest.raises(ArgumentValueError, match="processes: expected a loss that is the mean"):
        watcher.after(totals._replace(loss=5 * whole))
    watcher.after(totals)
    assert not watcher.totals()


def test_processes_tell_what_has_to_be_the_same():
    norm = nn.BatchNorm1d(3).double().eval()
    loss = hog.functional_loss(norm, lambda y, _: y.square().mean())
    processes = Processes("Pass", None, BATCHES)

    def totals(seed=0, kind="exact"):
        at = term_of(loss, hog.trainable_params(norm))
        batches = Batches(BATCHES, torch.device("cpu"), None, None, processes)
        call = {"kind": kind, "options": None, "criterion": loss}
        return dict(watchers.Agreement(at, batches, seed, call).totals())

    first = totals()
    assert totals() == first
    assert {k for k, x in totals(kind="empirical").items() if x != first[k]} == {"kind"}
    assert {k for k, x in totals(seed=1).items() if x != first[k]} == {"seed"}
    norm.running_mean += 1
    assert {k for k, x in totals().items() if x != first[k]} == {"model"}
    norm.running_mean -= 1
    with torch.no_grad():
        norm.weight *= 2
    assert {k for k, x in totals().items() if x != first[k]} == {"params"}


def test_draws_count_from_the_start():
    watcher = watchers.Draws(term_of(square))
    watcher.start()
    assert not watcher.drawn()
    torch.rand(1)
    assert watcher.drawn()
    watcher.start()
    assert not watcher.drawn()


def test_used_leaves_are_marked():
    watcher = watchers.UnusedLeaves(term_of(square))
    assert watcher.used(1).tolist() == [1, 1]
    watcher.note((1,))
    assert watcher.used(1).tolist() == [1, 0]
    assert watcher.used(0).tolist() == [0, 0]  # a process without a batch


# The fold


class Recording(watchers.Watcher):
    """Writes down what it is told."""

    def __init__(self, at):
        super().__init__(at)
        self.told = []

    def before(self, changed):
        self.told.append(("before", changed))

    def saw(self, term, value):
        self.told.append(("saw", term.piece.number, float(value)))

    def after(self, totals):
        self.told.append(("after", totals.pieces, totals.weight))


class Once(Recording):
    first_pass_only = True


def summed(loss, data, *further, **options):
    data = Loader(data) if isinstance(data, list) else data
    return DatasetSum(
        term_of(loss), data, CheckedDataOptions(**options), Processes("Pass", None, data), fixed_batches=False,
        further=further,
    )  # fmt: skip


def test_a_fold_adds_up_what_visits_add_and_tells_the_watchers():
    always, once = Recording(term_of(square)), Once(term_of(square))
    data = [BATCHES[0], BATCHES[1][:2]]
    sums, total = summed(square, data, always, once), torch.zeros(())
    firsts = []

    def visit(term):
        value = term.value()
        firsts.append(term.first)
        total.add_(value, alpha=term.share)
        return value

    totals = sums.fold(visit, total)
    losses = [float(square(PARAMS, x)) for x in data]
    assert (totals.pieces, totals.weight) == (2, 6)
    assert (
        totals.loss == pytest.approx(float(total)) == pytest.approx(4 * losses[0] + 2 * losses[1])
    )
    assert sums.number() == pytest.approx(totals.loss / 6)
    seen = [("before", True), *(("saw", k, loss) for k, loss in enumerate(losses)), ("after", 2, 6)]
    assert always.told == once.told == seen
    sums.fold(visit, total)
    assert once.told == seen
    assert always.told[4:] == [("before", False), *seen[1:]]
    assert firsts == [True, False] * 2


def test_a_watcher_raises_in_the_pass_that_it_looks_on_at():
    sums = summed(counting(), BATCHES)
    sums.value()
    with pytest.raises(NondeterministicError, match="expected the same value for the same batch"):
        sums.value()
    summed(counting(), BATCHES, check_deterministic=False).value()


@rows("options, names", [
    ({}, "Denominators IgnoredLabels BatchNorm Determinism UnusedLeaves"),
    ({"check_deterministic": False}, "Denominators IgnoredLabels BatchNorm Losses UnusedLeaves"),
    ({"micro_batch": 2}, "Denominators IgnoredLabels Determinism Splits UnusedLeaves"),
    ({"reduction": "sum"}, "BatchNorm Determinism UnusedLeaves"),
    ({"batch_size": len}, "BatchNorm Determinism UnusedLeaves"),
])  # fmt: skip
def test_what_looks_on_follows_from_the_options(options, names):
    found = summed(square, BATCHES, **options).watchers
    assert [type(watcher).__name__ for watcher in found] == names.split()
    single = summed(square, BATCHES[0]).watchers
    assert [type(watcher).__name__ for watcher in single] == ["Determinism", "UnusedLeaves"]


def test_a_failed_pass_keeps_no_graph():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1)).double()
    loss = hog.functional_loss(model, lambda y, _: y.pow(4).mean())
    operator = hog.HessianOperator(loss, hog.trainable_params(model), BATCHES[0])
    for _ in range(2):
        with pytest.raises(NondeterministicError, match="draws at random"):
            operator @ draw(operator.shape[0])


MODEL = nn.Linear(3, 2).to(F64)
PAIRS = [(draw(4, 3, seed=seed), draw(4, 2, seed=9 - seed)) for seed in range(2)]


def shuffled():
    """Other orders of the same batches, from the second pass on."""
    order = iter([PAIRS, *[PAIRS[::-1]] * 8])
    return type("Shuffled", (Loader,), {"__iter__": lambda self: iter(next(order))})(PAIRS)


# what is looked at, in which module of hoglib, the operator, and in how many of 9 products
LOOKED_AT = {
    "sums of the state: before each, after 1, 2, 4, 8": (
        "_core.substrate.fingerprint.sums_and_norms", hog.HessianOperator, lambda: PAIRS, 9 + 4),
    "batches: two, in the first pass": (
        "curvature.sums.watchers.numbers_of", hog.HessianOperator, lambda: PAIRS, 2),
    "batches whose loss differs": (
        "curvature.sums.watchers.fingerprint", hog.HessianOperator, shuffled, 8 * 2),
    "adjoint: calls 1, 2, 4, 8 and 16 of two batches a product": (
        "curvature.maps.jacobian_product._are_adjoint",
        partial(hog.GGNOperator, mode="reverse"), lambda: PAIRS, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_costs_as_much_as_a_small_product_is_not_done_for_each(name, monkeypatch):
    path, operator, data, count = LOOKED_AT[name]
    module, _, function = f"hoglib.{path}".rpartition(".")
    original, seen = getattr(sys.modules[module], function), []
    monkeypatch.setattr(f"hoglib.{path}", lambda *args: (seen.append(0), original(*args))[1])
    params = hog.trainable_params(MODEL)
    # a loss of its own: what is known of one is kept
    A = operator(hog.functional_loss(MODEL, F.mse_loss), params, data())
    for k in range(9):
        A @ draw(8, seed=k)
    assert len(seen) == count
