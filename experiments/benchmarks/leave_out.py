"""Influence of a small language model of source code, beside training again without some sequences.

    python -m experiments.benchmarks.leave_out

predicted change of a query's loss without a set S of sequences: -sum_S s_nq / N. Printed is the rank
correlation with the actual change over random sets, its mean over the queries and one standard error
(the linear datamodelling score; Park et al., TRAK, 2023).
"""

import inspect
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import hoglib as hog
from experiments.benchmarks.timing import program
from experiments.shared.gpt import CharacterGPT
from hoglib.meta.hypergradient import spearman

Params = dict[str, Tensor]
SOLVERS: tuple[Literal["ekfac", "kfac"], ...] = ("ekfac", "kfac")
DECAY = 1e-3  # weight decay of the training, and damping
LENGTH = 24


def sequence_losses(model: nn.Module, params: Params, ids: Tensor) -> Tensor:
    logits = torch.func.functional_call(model, params, (ids[:, :-1],))
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def trained(model: nn.Module, start: Params, ids: Tensor, weights: Tensor, steps: int) -> Params:
    """The parameters after steps of Adam on the weighted mean loss, with weight decay."""
    params = {name: p.detach().clone().requires_grad_() for name, p in start.items()}
    optimizer = torch.optim.Adam(params.values(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (weights * sequence_losses(model, params, ids)).mean()
        (loss + DECAY / 2 * sum(p.square().sum() for p in params.values())).backward()
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in params.items()}


def rows(small: bool) -> list[str]:
    count, queries, subsets, steps = (8, 3, 3, 2) if small else (96, 16, 24, 300)
    generator = torch.Generator().manual_seed(0)
    source = torch.tensor([*inspect.getsource(F).encode("ascii", "replace")])
    windows = source[: len(source) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    ids = windows[torch.randperm(len(windows), generator=generator)[: count + queries]]
    train, query = ids.split([count, queries])
    model = CharacterGPT(128, LENGTH + 1, width=16, layers=1, heads=2)
    every = torch.ones(count)
    model.load_state_dict(trained(model, dict(model.named_parameters()), train, every, 6 * steps))
    loss = hog.language_model_loss(model, head="head", shift=True)
    params = hog.trainable_params(model)

    scores: dict[str, Tensor] = {}
    for solver in SOLVERS:
        scores[solver] = hog.influence(
            loss, params, train, query, solver=solver, damping=DECAY, generator=generator
        )
    gradients = [hog.per_example_gradients(loss, params, part)[1] for part in (train, query)]
    a, b = (torch.cat([g.flatten(1) for g in each.values()], 1) for each in gradients)
    scores["product of gradients"] = -a @ b.T

    def changes(weights: Tensor) -> Tensor:
        after = trained(model, params, train, weights, steps)
        with torch.no_grad():
            return sequence_losses(model, after, query)

    whole, actual, left_out = changes(every), [], []
    for _ in tqdm(range(subsets), desc="trainings without an eighth", disable=small):
        left_out.append(torch.randperm(count, generator=generator)[: count // 8])
        actual.append(changes(every.index_fill(0, left_out[-1], 0.0)) - whole)
    found = []
    for name, s in scores.items():
        predicted = torch.stack([-s[out].sum(0) / count for out in left_out])
        pairs = zip(predicted.unbind(1), torch.stack(actual).unbind(1), strict=True)
        each = torch.tensor([spearman(a, b) for a, b in pairs])
        error = float(each.std()) / len(each) ** 0.5
        found.append(f"{name:22}rank correlation {float(each.mean()):5.2f} ± {error:.2f}")
    return found


TABLES = {"": rows}


if __name__ == "__main__":
    program(__doc__, TABLES)
