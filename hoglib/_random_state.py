"""The state of the random generators that everybody shares: Python's, NumPy's, torch's, each GPU's."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """NumPy's is None where nobody has imported it, those of GPUs are none where none was used."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """As `random_state()` gave it, here or in another process, which may have had more GPUs.

    Its tensors are on the CPU, and not copied: inside of a torch.func transform a copy has no storage.
    """
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Random generators are afterwards as they were."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
