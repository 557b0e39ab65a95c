"""Every public update rule, with each of its options, beside torch.optim and differences."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch

import hoglib as hog
from hoglib.meta import RULES, GradientTransformation
from tests.conformance.rules import LR, NARROW, check_dtype, check_rule, number

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "radam": torch.optim.RAdam,
}
# by a name: the rule, its options, and, where torch's differ, torch's
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sgd": ("sgd", {}, {}),
    "sgd, decay": ("sgd", {"weight_decay": 0.1}, {}),
    "sgd, momentum": ("sgd", {"momentum": 0.9}, {}),
    "sgd, dampening": ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, {}),
    "sgd, nesterov": ("sgd", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}, {}),
    "momentum": ("momentum", {}, {"momentum": 0.9}),
    "momentum, all": ("momentum", {"momentum": 0.5, "weight_decay": 0.1, "nesterov": True}, {}),
    "momentum, dampening": ("momentum", {"dampening": 0.3}, {"momentum": 0.9, "dampening": 0.3}),
    "adam": ("adam", {}, {}),
    "adam, betas": ("adam", {"betas": (0.5, 0.9), "eps": 1e-3}, {}),
    "adam, betas of zero": ("adam", {"betas": (0.0, 0.0)}, {}),
    "adam, decay": ("adam", {"weight_decay": 0.1}, {}),
    "adam, amsgrad": ("adam", {"amsgrad": True, "betas": (0.9, 0.5), "weight_decay": 0.1}, {}),
    "adamw": ("adamw", {}, {}),
    "adamw, no decay": ("adamw", {"weight_decay": 0.0}, {}),
    "adamw, amsgrad": ("adamw", {"amsgrad": True, "betas": [0.9, 0.5], "weight_decay": 0.2}, {}),
    "rmsprop": ("rmsprop", {}, {}),
    "rmsprop, decay": ("rmsprop", {"alpha": 0.5, "eps": 1e-3, "weight_decay": 0.1}, {}),
    "rmsprop, momentum": ("rmsprop", {"momentum": 0.9}, {}),
    "rmsprop, centered": ("rmsprop", {"centered": True, "alpha": 0.9}, {}),
    "rmsprop, all": ("rmsprop", {"centered": True, "alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1}, {}),
    "adagrad": ("adagrad", {}, {}),
    "adagrad, all": ("adagrad", {"lr_decay": 0.3, "initial_accumulator_value": 0.2, "eps": 1e-3, "weight_decay": 0.1}, {}),
    "adadelta": ("adadelta", {}, {}),
    "adadelta, all": ("adadelta", {"rho": 0.5, "eps": 1e-3, "weight_decay": 0.1}, {}),
    "adamax": ("adamax", {}, {}),
    "adamax, all": ("adamax", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}, {}),
    "radam": ("radam", {}, {}),
    "radam, scaled at once": ("radam", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}, {}),
    "radam, decoupled": ("radam", {"betas": (0.5, 0.7), "weight_decay": 0.1, "decoupled_weight_decay": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_rule(case):
    kind, options, other = CASES[case]
    optimizer = partial(OPTIMIZERS[kind], lr=LR, **(other or options))
    check_rule(partial(RULES[kind], **options), optimizer)
    wide = {n: number(x) for n, x in options.items() if isinstance(x, float) and n != "dampening"}
    for dtype in NARROW:  # by options that are tensors of float64
        check_dtype(partial(RULES[kind], **{**options, **wide}), dtype)


def test_every_public_rule_is_checked():
    functions = {name: getattr(hog.meta, name) for name in hog.meta.__all__}
    public = {
        name for name, make in functions.items()
        if inspect.isfunction(make)
        and inspect.signature(make).return_annotation is GradientTransformation
    }  # fmt: skip
    assert public == set(RULES) == {kind for kind, *_ in CASES.values()}
    assert all(functions[name] is make for name, make in RULES.items())
