"""The statistics used by batch norm layers in an inner loop: four policies."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from hoglib._core.modules import swap
from hoglib._core.modules.module_kinds import BATCH_NORMS, NORMS
from hoglib.errors import ArgumentValueError

NormKind = Literal["by_mode", "transductive", "per_step", "frozen"]
Statistics = dict[str, tuple[Tensor, Tensor]]  # name of a layer -> (mean, variance)
BatchNorms = dict[str, Any]  # layers by name


def find_batch_norms(model: nn.Module) -> BatchNorms:
    """The model's batch norms with running statistics, by name. Call it while no layer is swapped."""
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, BATCH_NORMS) and m.track_running_stats}


def freeze_statistics(patch: swap.ModulePatch, layer: nn.Module) -> None:
    """A policy: the layer uses the model's running statistics in train mode, too."""
    if isinstance(layer, NORMS) and layer.track_running_stats and layer.training:
        patch.put(layer, "training", False)


FIXED_POLICIES: dict[str, swap.NormPolicy] = {
    "by_mode": swap.train_mode_batch_statistics,
    "transductive": swap.use_batch_statistics,
    "frozen": freeze_statistics,
}


@final
class PerStepStatistics(nn.Module):
    """Running statistics for each number of inner steps, because they differ from step to step.

    In train mode a layer uses the batch's statistics, and these buffers average them over meta-steps
    and tasks. In eval mode the layer uses the buffers. Entry i belongs to the parameters after i steps;
    the last entry also serves all later steps.

    References:
        Antoniou, Edwards and Storkey, How to train your MAML, 2019, section 4, BNRS.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self._names: dict[str, str] = {}  # name of a layer -> its name in the buffers' names
        for name, layer in find_batch_norms(model).items():
            # a buffer's name must not contain dots
            self._names[name] = name.replace(".", "/")
            for kind in ("mean", "var"):
                # steps + 1 entries: entry 0 belongs to the initial parameters
                value = layer.get_buffer(f"running_{kind}").expand(steps + 1, -1).clone()
                self.register_buffer(f"{kind}/{self._names[name]}", value)

    def at(self, step: int, layers: BatchNorms) -> swap.NormPolicy:
        """The policy for the parameters after `step` steps."""
        if layers.keys() != self._names.keys():
            raise ArgumentValueError(
                f"batch_norm='per_step': expected the layers {', '.join(self._names)}, got "
                f"{', '.join(layers) or 'none'}; make a new learner for another model."
            )
        names = {id(layer): name for name, layer in layers.items()}

        def policy(patch: swap.ModulePatch, layer: nn.Module) -> None:
            name = names.get(id(layer))
            # train mode: batch statistics, which `record_statistics` collects for `update`
            if name is None or layer.training:
                swap.train_mode_batch_statistics(patch, layer)
                return
            mean, var = self._of(name)
            i = min(step, self.steps)
            patch.put(layer, "running_mean", mean[i])
            patch.put(layer, "running_var", var[i])

        return policy

    @torch.no_grad()
    def update(self, found: list[Statistics], layers: BatchNorms) -> None:
        """Move the running statistics toward the tasks' mean. found: for each step, [tasks,
        channels]."""
        for i, statistics in enumerate(found[: self.steps + 1]):
            for name, of_tasks in statistics.items():
                momentum = layers[name].momentum
                for own, new in zip(self._of(name), of_tasks, strict=True):
                    own[i].lerp_(new.mean(0).to(own.dtype), 0.1 if momentum is None else momentum)

    def _of(self, name: str) -> tuple[Tensor, Tensor]:
        key = self._names[name]
        return self.get_buffer(f"mean/{key}"), self.get_buffer(f"var/{key}")


@contextmanager
def record_statistics(layers: BatchNorms) -> Iterator[Statistics]:
    """Collect mean and unbiased variance of the input of each train-mode layer, without graphs."""
    found: Statistics = {}

    def record(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        # a pre-hook on the layer's input: a layer that uses batch statistics stores none itself
        x = args[0].detach()
        dims = [0, *range(2, x.dim())]
        # unbiased, like torch's running variance
        found[name] = x.mean(dims), x.var(dims)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            if layer.training:
                hooks.enter_context(layer.register_forward_pre_hook(partial(record, name)))
        yield found
