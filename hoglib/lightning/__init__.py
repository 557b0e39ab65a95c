"""Lightning callbacks for second-order training. The only part of hoglib that imports lightning."""

from hoglib.lightning.annealing import MetaAnnealing
from hoglib.lightning.rng import RNGState

__all__ = ["MetaAnnealing", "RNGState"]
