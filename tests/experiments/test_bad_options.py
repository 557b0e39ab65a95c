"""Options that an experiment refuses, and what it says: by its constructors, and by the command line in one paragraph."""

from importlib import import_module

import pytest
import yaml

from hoglib.errors import HoglibError
from tests.experiments.command import COMMAND_LINE, assert_refused, smoke

pytestmark = COMMAND_LINE

# By experiment, options of its smoke config, and at last what the error says.
# fmt: off
REFUSED = {
    "curvature/digits": [
        ("model.loss=hinge", "loss: expected one of squared_error"),
        ("model.hidden=[0]", "hidden: .*at least 1"),
        ("model.act=gelu", "act: expected one of relu"),
        ("model.lr=-1", "lr: expected a finite number greater than 0"),
        ("data.train=1700", "train, test: expected 1797 images"),
    ],
    "curvature/influence": [
        ("model.leave_out=0", "leave_out: expected a whole number"),
        ("model.damping=0", "damping: expected a finite number greater than 0"),
    ],
    "curvature/lm": [
        ("model.layers=0", "layers: expected .*at least 1"),
        ("model.heads=3", "width: expected a multiple of the 3 heads"),
    ],
    "curvature/newton_cg": [
        ("model.curvature_batch=0", "curvature_batch: .*at least 1"),
        ("model.adam_lr=0", "adam_lr"),
        ("model.adam_batch=0", "adam_batch"),
        ("model.optimizers=[sgd]", "optimizers: expected some of newton_cg"),
        ("model.optimizers=[adam, adam]", "optimizers: .*each once"),
        ("model.hidden=[0]", "hidden"),
    ],
    "flow/meanflow": [
        ("model.instant=1", "instant: expected a number of at least 0 and below 1"),
        ("model.power=-1", "power: expected a finite number of at least 0"),
        ("model.frequencies=0", "frequencies: expected a whole number of at least 1"),
        ("model.lr=0", "lr: expected a finite number greater than 0"),
    ],
    "gan/mixture": [
        ("model.penalty.kind=wgan-pg", "kind: expected one of .*wgan_gp"),
        ("model.penalty.weight=-1", "weight: expected a number of at least 0"),
        ("model.loss=hinge", "loss: expected one of relativistic, wasserstein"),
        ("model.critic_steps=0", "critic_steps: .*at least 1"),
        ("model.ema=1", "ema: expected a number of at least 0 and below 1"),
        ("model.betas=[0.5, 1.0]", "betas: expected a number of at least 0"),
        ("model.critic_scale=0", "critic_scale: expected a finite number"),
        ("model.latent=0", "latent: expected a whole number of at least 1"),
        ("data.kind=moons", "kind: expected one of gaussians, swiss_roll"),
        ("data.batch=1", "batch: expected a whole number of at least 2"),
    ],
    "gan/mnist": [
        ("model.channels=0", "channels: expected a whole number of at least 1"),
        ("model.latent=0", "latent: expected a whole number of at least 1"),
        ("model.act=gelu", "act: expected one of .*swish"),
        ("model.loss=hinge", "loss: expected one of relativistic, wasserstein"),
        ("model.ema=1", "ema: expected a number of at least 0 and below"),
        ("data.train=4001", "train: expected at most 4000, got 4001"),
        ("data.test=1001", "test: expected at most 1000, got 1001"),
        ("data.batch=1", "batch: expected a whole number of at least 2"),
        ("data.batch=201", "batch: expected at most the 200 images"),
    ],
    "maml/glyphs_5w1s": [
        ("model.ways=1", "ways: expected a whole number of at least 2"),
        ("model.algorithm=snail", "algorithm: expected one of maml, reptile"),
        ("model.options={momentum: 1}", "options: expected arguments of MAML"),
        ("model.algorithm=prototypes", "model.options={learn_lr: model}", "options: expected none for prototypes"),
        ("model.channels=0", "channels: .*at least 1"),
        ("model.algorithm=reptile", "model.compile=true", "compile: expected null or false"),
        ("data.queries=40", "ways: expected at most the 0 classes"),
    ],
    "maml/lm_adapt": [
        ("data.shots=5000", "shots, queries, length: expected a task of at most"),
    ],
    "meta/data_values": [
        ("data.noise=1", "noise: expected a number .* below 1, got 1"),
        ("data.kind=pairs", "kind: expected one of"),
        ("model.subsets=2", "subsets: expected a whole number of at least 3"),
        ("model.damping=0", "damping: expected a finite number greater than 0"),
        ("model.compile=true", "null or false for hypergradient"),
    ],
    "meta/reweight_digits": [
        ("data.kind=pairs", "kind: expected one of uniform, background"),
        ("data.noise=1", "noise: expected a number .* below 1, got 1"),
        ("data.noise=-0.1", "noise: expected a number of at least 0"),
        ("data.noise=0.95", "noise: expected at most 0.9"),
        ("data.clean=25", "clean: expected a multiple of 10.*write 20"),
        ("data.clean=0", "clean: expected a whole number of at least 10"),
        ("data.clean=1790", "clean, test: expected images to be left"),
        ("data.test=1797", "clean, test: expected images to be left"),
        ("data.batch=1198", "batch: expected at most the 1197 noisy"),
        ("data.batch=0", "batch: expected a whole number of at least 1"),
        ("model.against=[plain]", "against: expected one of noisy, clean"),
        ("model.hidden=[8, 0]", "hidden: .*at least 1"),
        ("model.act=gelu", "act: expected one of relu"),
        ("model.lr=-1", "lr: expected a finite number greater than 0"),
    ],
    "penalty/digits_robust": [
        ("model.weights={r1: [1]}", "weights: expected one of input_gradient"),
        ("model.weights={jacobian: [0]}", "weights.jacobian: expected a finite"),
        ("model.hidden=[0]", "hidden: .*at least 1"),
        ("model.lr=0", "lr: expected a finite number greater than 0"),
        ("model.epsilons=[]", "epsilons: expected at least one"),
        ("model.epsilons=[0, 0.1]", "epsilons: expected a finite number greater than 0"),
        ("model.epsilons=[0.2, 0.1]", "epsilons: .*in ascending order"),
        ("model.steps=0", "steps: expected a whole number of at least 1"),
        ("model.restarts=0", "restarts: .*at least 1"),
        ("data.val=1500", "train, test, val: expected 1797 images in all"),
    ],
    "penalty/forces": [
        ("model.weight=0", "weight: expected a finite number greater than 0"),
        ("model.hidden=[0]", "hidden: .*at least 1"),
        ("model.features=1", "features: expected a whole number of at least 2"),
        ("model.lr=0", "lr: expected a finite number greater than 0"),
        ("model.act=sine", "act: expected one of"),
    ],
    "pinn/helium": [
        ("model.moves=0", "moves: .*at least 1"),
        ("model.lr=0", "lr: expected a finite number greater than 0"),
    ],
    "pinn/poisson": [
        ("model.hidden=[0]", "hidden: .*at least 1"),
        ("model.adam_lr=0", "adam_lr: expected a finite number greater than 0"),
        ("model.warm_up=-1", "warm_up: expected a whole number"),
        ("model.solver=lu", "solver: expected one of cg, dense"),
        ("model.dense_cost=-1", "dense_cost: expected a finite number of at least 0"),
    ],
}
# What is known only when all parts stand together, and a case of each experiment.
REFUSED_BY_THE_COMMAND = {
    "curvature/digits": [
        ("trainer.callbacks.init_args.every=0", "every: expected .*at least 1"),
        ("trainer.callbacks.init_args.k=9999", "k: expected at most .* got 9999"),
        ("model.lr=1e30", "expected (a )?finite"),
    ],
    "curvature/influence": [("model.errors=1", "errors: expected a whole number of at least 2")],
    "curvature/lm": [("data.length=1", "length: expected .*at least 2")],
    "curvature/newton_cg": [
        ("model.damping=0", "damping: expected a number greater than 0"),
        ("model.optimizers=[kfac]", "model.kfac={rate: 1}", "KFAC: expected options of KFACOperator"),
        ("model.max_iter=0", "max_iter: expected a whole number of at least 1"),
    ],
    "flow/meanflow": [("model.heads=3", "width: expected a multiple of the 3 heads")],
    "gan/mixture": [("model.penalty.wieght=1", "wieght")],
    "gan/mnist": [("data.test=201", "test: expected at most the 200 images")],
    "maml/glyphs_5w1s": [("model.ways=4", "ways: expected 5 outputs.*--model.ways 5")],
    "maml/lm_adapt": [("model.base=runs/nowhere", "checkpoint: expected a file, or a run folder")],
    "meta/data_values": [("data.train=3950", "train, val, test: expected at most 4000")],
    "meta/reweight_digits": [("model.lrr=1", "no option 'lrr'.*Did you mean 'lr'")],
    "penalty/digits_robust": [("data.val=0", "val: expected images to choose a weight by")],
    "penalty/forces": [("data.atoms=1", "atoms: expected a whole number of at least 2")],
    "pinn/helium": [("model.walkers=1", "walkers: .*at least 2")],
    "pinn/poisson": [("data.equation=wave", "equation: expected one of")],
}
# fmt: on


def cases(table):
    return [
        pytest.param(name, options, message, id=" ".join((name, *options)))
        for name, rows in table.items()
        for *options, message in rows
    ]


def build(part):
    """What a part of a config stands for, as the command line makes it."""
    if not isinstance(part, dict):
        return part
    if "class_path" not in part:
        return {name: build(value) for name, value in part.items()}
    module, _, kind = part["class_path"].rpartition(".")
    return getattr(import_module(module), kind)(**build(part.get("init_args", {})))


@pytest.mark.parametrize(("name", "options", "message"), cases(REFUSED))
def test_options_are_refused(name, options, message):
    config = yaml.safe_load(smoke(name).config.read_text())
    for option in options:
        (part, *names, last), value = option.partition("=")[0].split("."), option.partition("=")[2]
        given = config[part]["init_args"]
        for one in names:
            given = given[one].get("init_args", given[one])
        given[last] = yaml.safe_load(value)
    with pytest.raises(HoglibError, match=message):
        build({part: config[part] for part in ("model", "data")})


@pytest.mark.parametrize(("name", "options", "message"), cases(REFUSED_BY_THE_COMMAND))
def test_the_command_says_so_in_one_paragraph_before_training(name, options, message, capsys):
    assert_refused(smoke(name).config, [f"--{option}" for option in options], message, capsys)
