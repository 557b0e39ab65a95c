"""`python -m experiments.benchmarks.language_models`: products of a language model, whose logits exist
in chunks or all at once, and their errors in half precision.

Peak memory is what torch's allocator had given, in tensors of logits; time is that of the processor,
the median of five.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoglib as hog
from experiments.benchmarks.memory import peak_allocated
from experiments.benchmarks.timing import interleaved, program, relative_error
from experiments.shared.gpt import CharacterGPT

Product = Callable[..., Any]
TOKENS, VOCABULARY, CHUNKS = 512, 20_000, (256, 64)
WIDTHS = (64, 512)
PRODUCTS: dict[str, Product] = {"hvp": hog.hvp, "ggn_vp": hog.ggn_vp}
MODES: dict[str, tuple[Product, tuple[str, ...]]] = {
    "`hvp`": (hog.hvp, ("reverse-over-reverse", "forward-over-reverse")),
    "`ggn_vp`": (hog.ggn_vp, ("reverse", "forward")),
    '`hvp`, `mode="finite-differences"`': (hog.hvp, ("finite-differences",)),
}
HALVES = (torch.float32, torch.float16, torch.bfloat16)


def all_logits(model: nn.Module) -> Any:
    """The loss of the logits of all positions, which are compared with the next token."""

    def criterion(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    return hog.functional_loss(model, criterion, forward=lambda model, ids: model(ids))


def in_chunks(model: nn.Module, size: int | None = None) -> Any:
    """The same by chunks of so many positions."""
    return hog.language_model_loss(model, head="head", shift=True, chunk_size=size)


def memory_rows(small: bool) -> list[str]:
    tokens, vocabulary = (64, 50) if small else (TOKENS, VOCABULARY)
    lines = []
    for width in (16,) if small else WIDTHS:
        torch.manual_seed(0)
        model = CharacterGPT(vocabulary, tokens // 4, width, 2, 4).eval()
        ids = torch.randint(vocabulary, (4, tokens // 4))
        params = hog.trainable_params(model)
        v = {name: torch.randn_like(p) for name, p in params.items()}
        losses = [all_logits(model), *(in_chunks(model, size) for size in CHUNKS)]
        for name, product in PRODUCTS.items():
            runs = {str(i): partial(product, loss, params, v, ids) for i, loss in enumerate(losses)}
            first, *others = (run()[1] for run in runs.values())
            for other in others:
                torch.testing.assert_close(other, first, rtol=1e-2, atol=1e-4)
            seconds = interleaved(runs, 1 if small else 5, time.process_time)
            logits = 4 * tokens * vocabulary
            cells = [
                f"{peak_allocated(run) / logits:.1f}, {seconds[key]:.2f} s"
                for key, run in runs.items()
            ]
            lines.append(f"| `{name}` | {width} | {' | '.join(cells)} |")
    return lines


def trained(width: int, layers: int, steps: int) -> tuple[nn.Module, Tensor]:
    """A model in float64 that has learned to count; its weights are numbers of bfloat16."""
    torch.manual_seed(0)
    model = CharacterGPT(64, 32, width, layers, 4)
    ids = (torch.randint(64, (16, 1)) + torch.arange(32) * torch.randint(1, 4, (16, 1))) % 64
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=3e-3), all_logits(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss({}, ids).backward()
        optimizer.step()
    return model.eval().bfloat16().double(), ids


def error_rows(small: bool) -> list[str]:
    """The largest error over the modes of each product, relative to float64."""
    model, ids = trained(16, 1, 2) if small else trained(64, 4, 60)

    def applied(product: Product, mode: str, dtype: torch.dtype) -> Tensor:
        cast = copy.deepcopy(model).to(dtype)
        params = hog.trainable_params(cast)
        torch.manual_seed(1)
        v = {n: torch.randn(p.shape).bfloat16().to(dtype) for n, p in params.items()}
        _, found = product(in_chunks(cast), params, v, ids, mode=mode)
        return torch.cat([x.flatten().double() for x in found.values()])

    lines = []
    for name, (product, modes) in MODES.items():
        exact = applied(product, "auto", torch.float64)
        worst = [
            max(relative_error(applied(product, mode, dtype), exact) for mode in modes)
            for dtype in HALVES
        ]
        lines.append(f"| {name} | {' | '.join(f'{error:.0e}' for error in worst)} |")
    return lines


TABLES = {
    "peak in tensors of all logits, and CPU time\n\n"
    f"| | width D | all logits | {' | '.join(f'chunks of {size}' for size in CHUNKS)} |": memory_rows,
    "largest relative error over the modes\n\n| | float32 | float16 | bfloat16 |": error_rows,
}


if __name__ == "__main__":
    program(__doc__, TABLES)
