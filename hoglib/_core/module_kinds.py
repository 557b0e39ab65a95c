"""Kinds of modules that torch has no public class of: those of batches, of running statistics, and
dropout."""

from typing import Any

from torch import nn


def _kinds(*classes: type, but: type = nn.Module) -> tuple[type[Any], ...]:
    """What public classes are made of, from which users derive theirs, too; but for what another class
    is made of."""
    found = {base for kind in classes for base in kind.__mro__} - {*but.__mro__}
    return tuple(one for one in found if not found & {*one.__mro__[1:]})


_BATCH = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_INSTANCE = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_DROPOUT = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout

BATCH_NORMS = _kinds(*_BATCH, but=nn.InstanceNorm1d)
NORMS = _kinds(*_BATCH, *_INSTANCE)  # with running statistics
DROPOUTS = _kinds(*_DROPOUT, nn.FeatureAlphaDropout)
