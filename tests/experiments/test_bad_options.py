"""Options that an experiment refuses, and what it says: by its constructors, and by the command line in one paragraph."""

from importlib import import_module

import pytest
import yaml

from hoglib.errors import HoglibError
from tests.experiments.command import COMMAND_LINE, assert_refused, options_of, smoke

pytestmark = COMMAND_LINE

# By experiment, options of its smoke config, and at last what the error says: one for each check that is
# an experiment's own, and one for each kind of those in experiments.checks.
# fmt: off
REFUSED = {
    "curvature/digits": [
        ("model.loss=hinge", "loss: expected one of squared_error"),
        ("model.hidden=[0]", "hidden: .*at least 1"),
        ("model.lr=-1", "lr: expected a finite number greater than 0"),
        ("data.train=1700", "train, test: expected 1797 images in both, got 1700 and 500"),
        ("data.val=200", "train, test, val: .* in all"),
        ("data.batch=1298", "batch: expected at most the 1297 images of train, got 1298"),
    ],
    "curvature/lm": [("model.heads=3", "width: expected a multiple of the 3 heads")],
    "curvature/newton_cg": [
        ("model.optimizers=[sgd]", "optimizers: expected some of newton_cg"),
        ("model.optimizers=[adam, adam]", "optimizers: .*each once"),
    ],
    "flow/meanflow": [
        ("model.instant=1", "instant: expected a number of at least 0 and below 1"),
        ("model.power=-1", "power: expected a finite number of at least 0"),
    ],
    "gan/mixture": [
        ("model.penalty.kind=wgan-pg", "kind: expected one of .*wgan_gp"),
        ("model.betas=[0.5, 1.0]", "betas: expected a number of at least 0"),
    ],
    "gan/mnist": [
        ("data.train=4001", "train: expected at most 4000, got 4001"),
        ("data.batch=201", "batch: expected at most the 200 images"),
    ],
    "maml/glyphs_5w1s": [
        ("model.options={momentum: 1}", "options: expected arguments of MAML"),
        ("model.options={compile: true}", "options: expected arguments of MAML, .* got inner_lr, inner_steps, compile"),
        ("model.algorithm=prototypes", "model.options={learn_lr: model}", "options: expected none for prototypes"),
        ("model.algorithm=reptile", "model.compile=true", "compile: expected null or false for reptile, .* got True; leave it out"),
        ("model.compile=fast", "compile: expected one of inductor, eager.* got 'fast'"),
        ("data.queries=40", "ways: expected at most the 0 classes"),
        ("data.size=84", "expected 28 and 1"),
    ],
    "maml/lm_adapt": [("data.shots=5000", "shots, queries, length: expected a task of at most")],
    "meta/data_values": [
        ("data.noise=1", "noise: expected a number .* below 1, got 1"),
    ],
    "meta/reweight_digits": [
        ("data.noise=0.95", "noise: expected at most 0.9"),
        ("data.clean=25", "clean: expected a multiple of 10.*write 20"),
        ("data.clean=1790", "clean, test: expected images to be left"),
        ("data.batch=1198", "batch: expected at most the 1197 noisy"),
        ("model.against=[plain]", "against: expected one of noisy, clean"),
    ],
    "penalty/digits_robust": [
        ("model.weights={r1: [1]}", "weights: expected one of input_gradient"),
        ("model.epsilons=[]", "epsilons: expected at least one"),
        ("model.epsilons=[0.2, 0.1]", "epsilons: .*in ascending order"),
    ],
    "penalty/forces": [("data.batch=1000", "batch: expected at most the .* clusters of train, got 1000")],
}
# What is known only when all parts stand together, and a case of each kind of run.
REFUSED_BY_THE_COMMAND = {
    "curvature/digits": [
        ("trainer.callbacks.init_args.k=9999", "k: expected at most .* got 9999"),
        ("model.lr=1e30", "expected (a )?finite"),
    ],
    "curvature/newton_cg": [
        ("model.damping=0", "damping: expected a number greater than 0"),
        ("model.optimizers=[kfac]", "model.kfac={rate: 1}", "KFAC: expected options among"),
    ],
    "gan/mixture": [
        ("model.penalty.wieght=1", "wieght"),
        ("model.betas=null", "model.betas: expected tuple, got null"),  # an option of the base class
        ("trainer.accelerator=cpu", "trainer.devices=999", "trainer.devices: expected at most .* got 999"),
    ],
    "maml/glyphs_5w1s": [("model.ways=4", "ways: expected 5 outputs.*--model.ways 5")],
    "maml/lm_adapt": [("model.base=runs/nowhere", "base: expected a file, or a run folder")],
    "maml/sinusoid_joint": [
        ("model.compile=true", "compile: expected null or false for joint training"),
        ("seed_everything=-3", "seed_everything: expected an integer of at least 0, got -3"),
    ],
    "maml/sinusoid": [
        ("model.lr=null", "model.lr: expected float, got null"),
        ("data.iterations=99999999999999999999", "data.iterations: expected an integer of 64 bits"),
        ("trainer.val_check_interval=0", "val_check_interval: expected an integer of at least 1, got 0"),
        ("trainer.overfit_batches=1", "`val_check_interval` .10. must be less than or equal"),
        ("trainer.logger=TensorBoardLoger", r"expected false or a class, .* got 'TensorBoardLoger'\. Options"),
        ("trainer.callbacks=EarlyStopping", "trainer.callbacks.monitor=nope", "metric `nope` which is not available"),
    ],
    "meta/data_values": [("data.train=3950", "train, val, test: expected at most 4000")],
    "penalty/digits_robust": [("data.val=0", "val: expected images to choose a weight by")],
    "pinn/poisson": [("data.equation=tide", "equation: expected one of")],
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
    config = options_of(name)
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
