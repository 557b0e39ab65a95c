"""Parts of recomputed blocks: forward over reverse gives what it gives without, and holds little."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from hoglib._core.remat import block_parts, recomputation
from tests.memory import peak_bytes
from tests.models import Fn

FORWARD = "forward-over-reverse"


class Attention(nn.Module):
    """By torch's function, or by its formula."""

    def __init__(self, width: int, by_formula: bool = False) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.by_formula = by_formula

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.joint(x).chunk(3, -1))
        if self.by_formula:
            y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attention = Attention(width) if attention is None else attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def product(make: Callable[[], nn.Module], x: Tensor, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).to(x.dtype)
    params = hog.trainable_params(model)
    v = {name: torch.randn_like(p) for name, p in params.items()}
    loss = hog.functional_loss(model, lambda y, x: (y - x).square().mean())
    torch.manual_seed(1)
    return hog.hvp(loss, params, v, x, **options)


def agree(make: Callable[[], nn.Module], x: Tensor) -> None:
    got, expected = product(make, x, mode=FORWARD, remat=True), product(make, x, mode=FORWARD)
    torch.testing.assert_close(got, expected)
    if all(not isinstance(m, nn.Dropout) for m in make().modules()):
        torch.testing.assert_close(got, product(make, x))


@pytest.fixture
def part_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the parts that are recomputed alone."""
    seen, run = list[str](), recomputation._recompute_part

    def counted(part: nn.Module, *args: Any) -> Any:
        seen.append(type(part).__name__)
        return run(part, *args)

    monkeypatch.setattr(recomputation, "_recompute_part", counted)
    return seen


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def test_each_part_is_recomputed_once_in_a_product(part_runs: list[str]) -> None:
    agree(lambda: Block(4), inputs(3, 5, 4))
    assert part_runs == ["Attention", "Gated"] * 2


def test_a_part_with_all_parameters_gives_its_own(part_runs: list[str]) -> None:
    agree(lambda: nn.Sequential(nn.ModuleList([Block(4)])[0], nn.Tanh()), inputs(3, 5, 4))
    assert part_runs == ["Attention", "Gated"] * 2


class Unfit(Attention):
    """A part that is no function of its tensors: `what` says why."""

    def __init__(self, width: int, what: str) -> None:
        super().__init__(width)
        self.what, self.extra = what, nn.Sequential(nn.Linear(width, width))
        self.register_buffer("count", torch.zeros((), dtype=torch.double))
        self.seen: Any = None

    def forward(self, x: Tensor, stash: Any = None) -> Any:
        if self.what == "changes its input":
            x.mul_(1.5)
        if self.what == "changes a buffer":
            self.count += 1
            x = x * self.count
        if self.what == "holds a tensor":
            x = x * self.seen
        if self.what == "changes a list" and stash is not None:
            stash.append(x.sin())
        if self.what == "is given an object" and stash is not None:
            x = x * stash.value
        y = self.extra(super().forward(x))
        return Holder(y) if self.what == "returns an object" else y


class Holder:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class AroundUnfit(Block):
    def __init__(self, width: int, what: str) -> None:
        super().__init__(width, Unfit(width, what))

    def forward(self, x: Tensor) -> Tensor:
        what = self.attention.what
        h, stash = self.norms[0](x) * 1.0, None
        if what == "holds a tensor":
            self.attention.seen = x.cos()
        if what == "changes a list":
            stash = []
        if what == "is given an object":
            stash = Holder(x.exp())
        y = self.attention(h, stash)
        if what == "changes a list":
            y = y * stash.pop()
        if what == "holds a tensor":
            self.attention.seen = None
        if what == "returns an object":
            y = y.value
        return x + self.mlp(self.norms[1](y))


UNFIT = (
    "changes its input", "changes a buffer", "holds a tensor", "changes a list", "is given an object",
    "returns an object",
)  # fmt: skip


@pytest.mark.parametrize("what", UNFIT)
def test_a_part_that_cannot_run_alone_runs_with_the_block(what: str, part_runs: list[str]) -> None:
    agree(lambda: AroundUnfit(4, what), inputs(3, 5, 4))
    assert set(part_runs) == {"Gated"}


def test_dropout_inside_parts() -> None:
    def make() -> nn.Module:
        attention = nn.Sequential(Attention(4), nn.Dropout(0.5), nn.Linear(4, 4))
        return nn.Sequential(Block(4, attention), nn.Dropout(0.3))

    agree(make, inputs(3, 5, 4))


def test_batch_norm_inside_parts() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Tanh(),
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)),
        )  # fmt: skip

    agree(make, inputs(5, 4))


def test_a_part_that_is_called_twice_and_weights_that_are_tied() -> None:
    class Twice(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.mlp.up.weight = self.mlp.gate.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x)) + self.mlp(x)

    agree(lambda: Twice(4), inputs(3, 5, 4))


# Operations on slices.

SLICED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "module": nn.Mish(),
    "method": lambda x: x.tanh() + torch.sigmoid(x),
    "in place": lambda x: F.silu(x * 2, inplace=True) + F.elu(x * 3, 0.5, True),
    "options": lambda x: F.softplus(x, 2.0) + F.elu(x, alpha=0.5),
    "transposed": lambda x: F.gelu(x.mT).mT.contiguous().view(-1).view(x.shape),
    "softmax of rows": lambda x: x.softmax(-1) + F.log_softmax(x, dim=2),
    "softmax of columns": lambda x: torch.softmax(x, 0).log_softmax(1),
}


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors of any size are sliced; the numbers of slices."""
    seen, cat = list[int](), torch.cat

    def counted(parts: Any, dim: int = 0) -> Tensor:
        seen.append(len(parts))
        return cat(parts, dim)

    monkeypatch.setattr(block_parts, "_FEWEST_ELEMENTS", 1)
    monkeypatch.setattr(block_parts.torch, "cat", counted)
    return seen


@pytest.mark.parametrize("name", SLICED)
def test_operations_on_slices(name: str, any_size: list[int]) -> None:
    def make() -> nn.Module:
        return Fn(lambda net, x: net.act(net.linear(x)), linear=nn.Linear(4, 4), act=SLICED[name])

    agree(make, inputs(3, 5, 4))
    assert bool(any_size) == (name not in ("in place", "transposed"))


@pytest.mark.parametrize("mask", ["none", "one", "of each sample"])
def test_attention_on_slices(mask: str, any_size: list[int]) -> None:
    masks = {
        "none": None, "one": torch.ones(5, 5, dtype=torch.bool).tril(),
        "of each sample": inputs(3, 2, 5, 5).sin(),
    }  # fmt: skip

    class Masked(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(self.norms[0](x), masks[mask])

    agree(lambda: Masked(4), inputs(3, 5, 4))
    agree(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), inputs(3, 5, 4))
    assert any_size


def test_attention_with_dropout_draws_in_one_order(any_size: list[int]) -> None:
    agree(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True), inputs(3, 5, 4))
    assert not any_size


# Memory, beside parameters, vectors and data.

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (
        lambda: nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True), (8, 64, 64),
    ),
    "gated": (lambda: Block(64), (8, 64, 64)),
    "attention by its formula": (lambda: Block(64, Attention(64, True)), (8, 64, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_at_most_twice_the_memory_of_a_checkpointed_gradient(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    blocks, x = nn.Sequential(*(make() for _ in range(6))), torch.randn(*shape)
    params = hog.trainable_params(blocks)
    v = {key: torch.randn_like(p) for key, p in params.items()}
    loss = hog.functional_loss(blocks, lambda y, x: y.square().mean())

    def gradient() -> None:
        h = x
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=False)
        torch.autograd.grad(h.square().mean(), list(blocks.parameters()))

    def forward_over_reverse() -> None:
        hog.hvp(loss, params, v, x, mode=FORWARD, remat=True)

    first, ours = (peak_bytes(run, x.device) for run in (gradient, forward_over_reverse))
    assert ours <= 2 * first
