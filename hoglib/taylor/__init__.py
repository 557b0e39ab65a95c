"""Taylor mode: derivatives of any order by propagating the coefficients of Taylor expansions."""

from hoglib.taylor.jet import jet

__all__ = ["jet"]
