"""A language model of characters, and its adaptation to topics by MAML."""

from experiments.language.adaptation import AdapterMAML
from experiments.language.experiment import LanguageModel
from experiments.language.topics import TopicTasks, Windows

__all__ = ["AdapterMAML", "LanguageModel", "TopicTasks", "Windows"]
