"""GradientPenalty: kinds and options from a config, the lazy schedule, its counter."""

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hoglib as hog
from hoglib import penalties
from hoglib.penalties.module import KINDS
from tests.penalties.critics import CRITICS, build, draw, generator, plain
from tests.refused import refused

X, FAKE = draw(5, 3), draw(5, 3, seed=1)
smooth = lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))  # noqa: E731


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_that_registers_itself_is_exported_and_listed(kind):
    assert KINDS[kind].function is getattr(penalties, kind)
    assert kind in penalties.__all__
    parameters = inspect.signature(KINDS[kind].function).parameters.values()
    hidden = ("options", "generator")
    call = ", ".join(str(p).split(":")[0] + f"={p.default}" * (p.default is not p.empty)
                     for p in parameters if p.name not in hidden)  # fmt: skip
    assert f"| `{kind}({call})` |" in (ROOT / "docs/penalties.md").read_text()
    assert f"::: hoglib.penalties.{kind}\n" in (ROOT / "docs/reference/penalties.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_its_function_by_its_weight(kind):
    critic = build(smooth if kind in ("jacobian", "sobolev") else plain)
    function = getattr(penalties, kind)
    module = hog.GradientPenalty(kind, weight=3.0)
    random = kind in ("wgan_gp", "zero_centred", "dragan", "jacobian")
    draws = {"generator": generator()} if random else {}
    points, given = {
        "wgan_gp": ((X, FAKE), (X, FAKE)),
        "zero_centred": ((X, FAKE), (X, FAKE)),
        "r1_r2": ((X, FAKE), (X, FAKE)),
        "r2": ((FAKE,), (X, FAKE)),
        "sobolev": ((X, draw(5, 2, 3)), (X, None, draw(5, 2, 3))),
        "parameter_gradient": (
            (dict(critic.named_parameters()),), (dict(critic.named_parameters()),)
        ),
    }.get(kind, ((X,), (X, FAKE)))  # fmt: skip
    if kind == "parameter_gradient":
        model = critic
        critic = lambda p: torch.func.functional_call(model, p, X).square().mean()  # noqa: E731
    expected = function(critic, *points, **draws)
    draws = {"generator": generator()} if draws else {}
    assert_close(module(critic, *given, **draws), 3 * expected)


def test_options_go_to_the_function():
    critic = build(plain)
    module = hog.GradientPenalty("wgan-gp", 2.0, options={"target": 0.3, "one_sided": True})
    expected = penalties.wgan_gp(critic, X, FAKE, target=0.3, one_sided=True, generator=generator())
    assert_close(module(critic, X, FAKE, generator=generator()), 2 * expected)
    micro_batches = hog.GradientPenalty("r1", micro_batch=2, weight=1.0)
    with pytest.raises(RuntimeError, match="micro_batch"):
        micro_batches(critic, X).backward(create_graph=True)
    make, real, fake, args, options = CRITICS["two inputs and a dict"]
    named = hog.GradientPenalty("r1", 1.0, output="score")
    assert_close(named(build(make), real, fake, *args), penalties.r1(build(make), real, **options))
    make, real, fake, args, _ = CRITICS["labels and a tuple"]
    labelled = hog.GradientPenalty("r1", 1.0)(build(make), real, fake, *args)
    assert_close(labelled, penalties.r1(build(make), real, *args))


def test_lazily_the_mean_is_the_same():
    critic = build(plain)
    module, always = hog.GradientPenalty("r1", 10.0, every=4), hog.GradientPenalty("r1", 10.0)
    values = [module(critic, X) for _ in range(8)]
    full = always(critic, X)
    assert [bool(v) for v in values] == [True, False, False, False] * 2
    assert_close(torch.stack(values).mean(), full)
    for value in values:
        value.backward()
    lazy = [p.grad for p in critic.parameters() if p.grad is not None]
    again = build(plain)
    (8 * always(again, X)).backward()
    assert_close(lazy, [p.grad for p in again.parameters() if p.grad is not None])
    assert values[1].dtype == full.dtype


def test_evaluation_counts_nothing_and_skips_nothing():
    critic, module = build(plain), hog.GradientPenalty("r1", 10.0, every=3)
    full = 10 * penalties.r1(critic, X).detach()
    assert_close(module(critic, X).detach(), 3 * full)
    with torch.no_grad():
        for _ in range(2):
            assert_close(module(critic, X), full)
    module.eval()
    assert_close(module(critic, X).detach(), full)
    assert module.calls == 1
    module.train()
    assert [bool(module(critic, X)) for _ in range(3)] == [False, False, True]


def test_the_counter_is_in_the_state():
    critic, module = build(plain), hog.GradientPenalty("r1", every=3)
    holder = nn.ModuleDict({"critic": critic, "penalty": module})
    module(critic, X), module(critic, X)
    state = holder.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    other = nn.ModuleDict({"critic": build(plain), "penalty": hog.GradientPenalty("r1", every=3)})
    other.load_state_dict(state)
    for each in (other["penalty"], copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert [bool(each(critic, X)) for _ in range(2)] == [False, True]


def test_its_repr_says_what_it_is():
    module = hog.GradientPenalty("wgan_gp", 5, every=2, options={"target": 0.5})
    assert repr(module) == "GradientPenalty(kind='wgan_gp', weight=5, every=2, target=0.5)"


REFUSED = {
    "an unknown kind": (lambda: hog.GradientPenalty("wgangp"), ValueError, "kind: expected one of wgan_gp.*did you mean 'wgan_gp'"),
    "a negative weight": (lambda: hog.GradientPenalty(weight=-1), ValueError, "weight"),
    "a misspelt argument": (lambda: hog.GradientPenalty(weigth=1), TypeError, "options, got others .*did you mean 'weight'"),
    "never": (lambda: hog.GradientPenalty(every=0), ValueError, "every: .*at least 1"),
    "options in a list": (lambda: hog.GradientPenalty(options=["target"]), TypeError, "options: expected a dict"),
    "terms": (lambda: hog.GradientPenalty(options={"reduction": "none"}), ValueError, "reduction='none'"),
    "labels in the place of fake samples": (lambda: hog.GradientPenalty("r1")(lambda x, y: x, X, torch.arange(len(X))), TypeError, r"penalty\(critic, real, None, labels\)"),
    "no fake samples": (lambda: hog.GradientPenalty()(build(plain), X), TypeError, "got no fake"),
    "no derivatives": (lambda: hog.GradientPenalty("sobolev")(build(plain), X), TypeError, "derivatives after fake"),
    "a number in words": (lambda: hog.GradientPenalty("r1", micro_batch="2"), TypeError, "micro_batch"),
    "a flag for an output": (lambda: hog.GradientPenalty("r1", output=True), TypeError, "output"),
    "a flag in words": (lambda: hog.GradientPenalty("r1", autocast="yes"), TypeError, "autocast"),
    "another result of one call": (lambda: hog.GradientPenalty("r1")(nn.Linear(3, 1), torch.randn(4, 3), return_outputs=True), ValueError, "return_outputs"),
    "an option that its kind has not": (lambda: hog.GradientPenalty("r1", options={"target": 1.0}), TypeError, "target"),
    "an option without its hyphen": (lambda: hog.GradientPenalty(options={"onesided": True}), TypeError, "did you mean 'one_sided'"),
}  # fmt: skip


test_what_is_refused = refused(REFUSED)
