"""A quiet trainer on the CPU, and the advice of Lightning that the tests do without."""

from typing import Any

import lightning.pytorch as pl
import pytest

QUIET = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
]


def trainer(folder: Any, callbacks: Any = (), **options: Any) -> pl.Trainer:
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = {**dict.fromkeys(off, False), "accelerator": "cpu", **options}
    return pl.Trainer(callbacks=list(callbacks), default_root_dir=folder, **options)


def state(module: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in module.state_dict().items()}
