"""`python -m experiments.benchmarks.tracers`: what takes a model, the trace of `hog.compile` or Dynamo.

A Hessian-vector product of each model is captured by both: the trace runs the function once on tensors
without values, Dynamo reads its code inside `torch.compile(fullgraph=True)`. Both graphs then run one
operation at a time, so that no compiler is timed: the seconds of the first call, the microseconds of
later ones (guards included), and the relative difference to the product outside of a graph, in float64.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hoglib as hog
from experiments.benchmarks.timing import interleaved, once, program

BATCH = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Cube(Function):
    """x^3, with a right second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Cubes(nn.Module):
    """The custom Function, between layers."""

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x)


class Branching(nn.Module):
    """A layer whose branch depends on values of the input, or on its shape alone."""

    def __init__(self, by_values: bool) -> None:
        super().__init__()
        self.layer, self.by_values = nn.Linear(8, 8), by_values

    def forward(self, x: Tensor) -> Tensor:
        positive = bool(x.sum() > 0) if self.by_values else len(x) > 2
        return self.layer(x).tanh() if positive else self.layer(x)


class Checkpointed(nn.Module):
    """Two layers whose values are computed again in backward."""

    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.run = wrap(self.block)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def _checkpoint(block: nn.Module) -> Any:
    return lambda x: checkpoint(block, x, use_reentrant=False)


def _published(name: str) -> nn.Module:
    """A small encoder or decoder of transformers at random weights."""
    import transformers

    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        **size, num_key_value_heads=2, intermediate_size=12, vocab_size=9
    )
    model: nn.Module = getattr(transformers, f"{name}Model")(config).eval()
    return model


def output(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])


def first_output(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])[0]


def of_embeddings(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(inputs_embeds=batch[0])[0]


Forward = Callable[[nn.Module, Any], Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), output),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(6, 6, 3), nn.SiLU(), nn.Conv1d(6, 6, 3)),
        output,
    ),
    "batch norm": (lambda: nn.Sequential(nn.Conv1d(6, 6, 3), nn.BatchNorm1d(6)), output),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        output,
    ),
    "LSTM": (lambda: nn.LSTM(8, 8, batch_first=True), first_output),
    "GRU": (lambda: nn.GRU(8, 8, batch_first=True), first_output),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), output),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), output),
    "a custom Function": (lambda: nn.Sequential(nn.Linear(8, 8), Cubes(), nn.Linear(8, 8)), output),
    "checkpoint": (lambda: Checkpointed(_checkpoint), output),
    "hog.ops.remat": (lambda: Checkpointed(hog.ops.remat), output),
    "a branch by shape": (lambda: Branching(False), output),
    "a branch by values": (lambda: Branching(True), output),
    **{
        name: (partial(_published, name), of_embeddings)
        for name in ("Bert", "Roberta", "GPTNeoX", "Llama", "Mistral", "Qwen2", "Qwen3", "Phi")
    },
}


def row(name: str, model: nn.Module, forward: Forward, repeats: int) -> str:
    """The row of the table: of each tracer the seconds of its first call and the time of a later one,
    or why it does not take the model."""
    model = model.double()
    loss = hog.functional_loss(model, lambda y, _: F.softplus(y).mean(), forward=forward)
    params = hog.trainable_params(model)
    v = {name: torch.randn_like(p) for name, p in params.items()}

    def product(v: dict[str, Tensor]) -> list[Tensor]:
        return list(hog.hvp(loss, params, v, (BATCH, BATCH))[1].values())

    tracers: dict[str, Callable[..., Any]] = {
        "hog.compile": hog.compile(product, backend="eager"),
        "Dynamo": torch.compile(product, backend="aot_eager", fullgraph=True),
    }
    expected, cells, calls = product(v), [], {}
    for tracer, run in tracers.items():
        try:
            seconds = once(lambda run=run: run(v), time.process_time)  # type: ignore[misc]
            found = run(v)
        except Exception as error:
            cells.append(f"no: {type(error).__name__}")
            continue
        distance = sum(float((a - b).norm()) for a, b in zip(expected, found, strict=True))
        cells.append(
            f"{seconds:.1f} s, error {distance / sum(float(x.norm()) for x in expected):.0e}"
        )
        calls[tracer] = lambda run=run: run(v)
    timed = interleaved({"": lambda: product(v), **calls}, repeats, time.process_time)
    times = [f"{1e6 * timed[key]:.0f}" if key in timed else "" for key in ("", *tracers)]
    return f"| {name} | {' | '.join(cells)} | {' | '.join(times)} |"


def rows(small: bool) -> Iterator[str]:
    for name, (make, forward) in islice(MODELS.items(), 1 if small else None):
        torch.manual_seed(0)
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused, the cell says
            yield row(name, make(), forward, 1 if small else 50)


TABLES = {
    "| a product of | hog.compile: first call | Dynamo | uncompiled, us | hog.compile | Dynamo |": rows
}


if __name__ == "__main__":
    program(__doc__, TABLES)
