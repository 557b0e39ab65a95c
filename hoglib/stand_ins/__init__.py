"""Replacements for torch calls with a missing or wrong second derivative.

    torch call  ->  its stand-in            inside `hoglib.second_order()`

`hoglib env` lists them; :func:`stand_in_table` returns the list.
"""

from hoglib.ops._stand_in import StandIn
from hoglib.stand_ins.mode import active, second_order, stand_in_table

__all__ = ["StandIn", "active", "second_order", "stand_in_table"]
