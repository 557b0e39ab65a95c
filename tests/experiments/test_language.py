"""Language models on English text by topic: data, network, curvature, adaptation, runs end to end."""

import json
import re

import pytest
import torch
from torch.testing import assert_close

import hoglib as hog
from experiments.language.adaptation import ADAPTERS, AdapterMAML, fine_tuning
from experiments.language.experiment import LanguageModel
from experiments.language.table import perplexity_table
from experiments.language.topics import CHARACTERS, SPLITS, TopicTasks, encode, topics
from experiments.shared.gpt import CharacterGPT, add_adapters
from experiments.shared.learners import errors_after
from tests.experiments.command import COMMAND_LINE, DRAWN, checkpoint, run, smoke

LM, ADAPT = smoke("curvature/lm"), smoke("maml/lm_adapt")
pytestmark = COMMAND_LINE


def network(**options):
    torch.manual_seed(0)
    return CharacterGPT(
        len(CHARACTERS), **{"length": 16, "width": 8, "layers": 2, "heads": 2, **options}
    )


class TestText:
    def test_no_paragraph_is_in_two_topics(self):
        parts = [topics(split) for split in ("train", *SPLITS)]
        found = [
            {" ".join(p.split()) for p in re.split(r"\n\s*\n", one)}
            for part in parts
            for one in part.values()
        ]
        assert len(set.union(*found)) == sum(map(len, found)) > 1000
        assert {*parts[1], *parts[2]} == {name for names in SPLITS.values() for name in names}

    def test_a_task_is_a_stretch_of_one_topic_without_common_windows(self):
        data = TopicTasks(length=10, shots=3, queries=2, held_out=7, seed=0)
        support, query = next(iter(data.test_dataloader()))
        assert support.shape == (7, 3, 10)
        assert query.shape == (7, 2, 10)
        whole = {name: encode(part) for name, part in topics("test").items()}
        for i, (name, ids) in enumerate(list(whole.items()) + list(whole.items())[:1]):
            windows = {tuple(row) for row in torch.cat([support[i], query[i]]).tolist()}
            pieces = ids.unfold(0, 50, 1).reshape(-1, 5, 10).tolist()
            assert any({tuple(row) for row in piece} == windows for piece in pieces), name


class TestNetwork:
    def test_no_character_sees_a_later_one(self):
        model, ids = network(), torch.arange(10)
        changed = ids.clone()
        changed[6] = 50
        a, b = model(ids), model(changed)
        assert_close(a[:6], b[:6])
        assert (a[6:] != b[6:]).any(1).all()

    def test_adapters_begin_as_nothing_and_are_all_that_is_trained(self):
        model, ids = network(), torch.arange(10)
        before = model(ids)
        adapted = add_adapters(model, 3)
        assert_close(adapted(ids), before)
        names = list(hog.trainable_params(adapted))
        assert names == list(hog.trainable_params(adapted, ADAPTERS + "[AB]"))
        assert len(names) == 2 * 4 * 2


def test_curvature_along_a_direction_is_that_of_the_loss(monkeypatch):
    monkeypatch.setattr("experiments.language.experiment.SPAN", 0.01)
    torch.manual_seed(0)
    model = LanguageModel(width=8, heads=2, length=16, curvature_batch=4, directions=2).double()
    found = model.sharpest(torch.randint(90, (6, 16)))
    assert [one.name for one in found] == ["eigenvector 1", "eigenvector 2", "random"]
    assert found[0].curvature > found[1].curvature > abs(found[2].curvature)
    for one in found:
        assert sum(one.shares.values()) == pytest.approx(1)
        assert list(one.shares) == ["embedding", "block 1", "block 2", "head"]
        middle = len(one.steps) // 2
        left, here, right = one.losses[middle - 1 : middle + 2]
        second = (left - 2 * here + right) / one.steps[middle + 1] ** 2
        assert second == pytest.approx(one.curvature, rel=0.02, abs=1e-3)


def test_changes_of_perplexity_are_relative_to_the_language_model():
    base = torch.tensor([[1.0, 2.0], [0.9, 1.9]])
    better = base - torch.tensor([[0.0], [0.1]])
    table = perplexity_table({"MAML": better, "tuned": base}, [0, 5], "title")
    _, _, head, _, first, last, *_ = table.splitlines()
    assert head.split() == ["method", "steps", "perplexity", "change"]
    assert first.split()[:4] == ["MAML", "0", "4.48", "+0.0%"]
    assert last.split()[:4] == ["MAML", "5", "3.67", "-18.1%"]  # exp(-0.2) - 1


class TestFits:
    @DRAWN
    def test_a_language_model_ends_with_tables_picture_and_summary(self, trained):
        trained(LM.config)
        where = LM.folder()
        table = (where / "table.txt").read_text()
        history = checkpoint(where)["callbacks"]["CurvatureMonitor"]["history"]
        layers = ["embedding", "block 1", "block 2", "head"]
        assert [(one["batch"], one["name"]) for one in history] == [
            (batch, layer) for batch in (0, 4, 8) for layer in layers
        ]
        summary = json.loads((where / "summary.json").read_text())
        assert f"{summary['perplexity']:.2f}" in table
        assert len(summary["largest"]) == 2

    @DRAWN
    def test_adapters_of_a_trained_model(self, trained, capsys):
        trained(LM.config)
        args = ("--model.base", "runs/smoke/curvature/lm", "--model.layers", "2")
        ADAPT.fit(*args)
        where = ADAPT.folder()
        assert (where / "table.txt").read_text() in capsys.readouterr().out
        base = checkpoint(LM.folder())["state_dict"]
        own = checkpoint(where)["state_dict"]
        for name, value in base.items():
            assert_close(own[name.replace("network.", "base.", 1)], value, rtol=0, atol=0)
        moved = [name for name in own if name.startswith("maml.") and name.endswith(".B")]
        assert moved
        assert all(own[name].any() for name in moved)
        assert run("fit", "--config", ADAPT.config, *args[:2], "--model.layers", "1") == 2
        assert "base: expected a checkpoint of the same network" in capsys.readouterr().err


def test_fine_tuning_descends_by_what_matches():
    model = AdapterMAML(width=8, layers=1, heads=2, length=16, rank=2)
    ids = torch.randint(90, (1, 3, 16))
    before = {name: p.clone() for name, p in model.base.named_parameters()}
    learner = fine_tuning(model.base, 0.1, "*")
    losses = errors_after(learner, (ids, ids), [0, 5])
    assert losses[1] < losses[0]
    assert_close(dict(model.base.named_parameters()), before, rtol=0, atol=0)
    adapted = fine_tuning(model.start, 0.1, ADAPTERS).adapt(ids[0], steps=2)
    assert len(adapted) == 8
