"""Random numbers by a counter: a part of a large array of them can be drawn by itself, and again.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011) in
torch operations on integers, which run on every device and in captured graphs.
"""

import torch
from torch import Tensor

WORDS = 2**32
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def draw_keys(count: int, device: torch.device) -> Tensor:
    """Keys for `count` arrays, [count, 2], from torch's generator of the device."""
    first, second = torch.randint(WORDS, (2,), device=device).unbind()
    return torch.stack([first.expand(count), second ^ torch.arange(count, device=device)], 1)


def random_words(keys: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Integers from 0 to 2^32 - 1, [N, R, columns], of the arrays of keys [N, 2], in rows [R]."""
    key = [keys[:, i, None, None] for i in (0, 1)]
    zero = torch.zeros_like(rows)[None, :, None]
    quads = torch.arange(-(-columns // 4), device=keys.device)[None, None, :]
    c = [quads + zero, rows[None, :, None] + 0 * quads, 0 * key[0], 0 * key[0]]
    for step in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(m, x) for m, x in zip(MULTIPLIERS, (c[0], c[2]), strict=True)
        )
        k_0, k_1 = ((k + step * s) & (WORDS - 1) for k, s in zip(key, KEY_STEPS, strict=True))
        c = [high_1 ^ c[1] ^ k_0, low_1, high_0 ^ c[3] ^ k_1, low_0]
    return torch.stack(torch.broadcast_tensors(*c), -1).flatten(-2)[..., :columns]


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of a product, whose 64 bits are those of the unsigned one."""
    product = x * factor
    return (product >> 32) & (WORDS - 1), product & (WORDS - 1)
