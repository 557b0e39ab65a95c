"""The norms, and which of torch's functions they replace."""

from collections.abc import Callable
from typing import Any

from hoglib.ops import _batch_norm, _instance_norm, _layer_norm, _weight_norm

REPLACES: dict[Callable[..., Any], Callable[..., Any]] = {
    **_layer_norm.REPLACES,
    **_batch_norm.REPLACES,
    **_instance_norm.REPLACES,
    **_weight_norm.REPLACES,
}
