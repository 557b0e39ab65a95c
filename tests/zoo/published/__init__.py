"""Functions in the manner of published code, right and wrong, in our own words."""

from tests.zoo.published import activations, algebra, norms, solvers, sparse, surrogates
from tests.zoo.published.specimen import Specimen

PUBLISHED: list[Specimen] = [
    specimen
    for theme in (surrogates, norms, activations, sparse, algebra, solvers)
    for specimen in theme.SPECIMENS
]

__all__ = ["PUBLISHED", "Specimen"]
