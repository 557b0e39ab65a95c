"""MAML: sine waves, and glyphs of few examples."""

from experiments.few_shot.episodes import Episodes
from experiments.few_shot.experiment import FewShotClassification
from experiments.few_shot.maml import JointRegression, MAMLRegression
from experiments.few_shot.sinusoid import SinusoidTasks

__all__ = [
    "Episodes",
    "FewShotClassification",
    "JointRegression",
    "MAMLRegression",
    "SinusoidTasks",
]
