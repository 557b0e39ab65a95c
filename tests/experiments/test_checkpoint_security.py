"""What SECURITY.md says of checkpoints: none of them executes code."""

from pathlib import Path

import pytest
import torch

from tests.experiments.command import COMMAND_LINE, ROOT, run

pytestmark = COMMAND_LINE
CONFIG = ROOT / "configs/smoke/maml/sinusoid_joint.yaml"


class Payload:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.fixture
def hostile(in_an_empty_folder):
    path = Path("hostile.ckpt")
    torch.save({"state_dict": Payload(), "global_step": 1}, path)
    torch.load(path, weights_only=False)
    Path("executed").unlink()  # it does execute, where loading is not safe
    return path


@pytest.mark.parametrize("command", ["fit", "test", "verify", "spectrum"])
def test_a_command_refuses_it(command, hostile, capsys):
    assert run(command, "--config", CONFIG, "--ckpt_path", hostile) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not Path("executed").exists()
