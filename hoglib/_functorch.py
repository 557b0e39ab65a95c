"""The private functorch API that hoglib reads, all of it in this file.

torch.func keeps a stack of active transforms (`grad`, `jvp`, `vmap`), and torch exposes it only in
`torch._C`. `tests/test_functorch.py` notices when a torch release changes it.
"""

import torch
from torch._C import _functorch


def transforms_active() -> bool:
    """Whether the caller runs inside a `torch.func` transform."""
    return bool(torch._C._are_functorch_transforms_active())


def forward_levels() -> int:
    """How many `torch.func.jvp` transforms are active around the caller."""
    stack = _functorch.get_interpreter_stack() or ()
    return sum(level.key() == _functorch.TransformType.Jvp for level in stack)
