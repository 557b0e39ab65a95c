"""Other parameters in a module: what is replaced, how long, and that it is restored."""

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

from hoglib._core.modules import swap
from hoglib._core.modules.swap import call_with, keep_swapped, reapply, swap_parameters


def params_of(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(p, value) for name, p in model.named_parameters()}


def test_parameters_are_replaced_inside_and_restored_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    own, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    params = params_of(model, 2.0)
    with pytest.raises(ValueError, match="Expected more than 1"):
        call_with(model, params, torch.ones(1, 2))
    with swap_parameters(model, params):
        assert model[0].weight is params["0.weight"]
        assert model[1].running_mean is None  # train mode uses the statistics of the batch
    assert all(p is own[name] for name, p in model.named_parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())


def test_a_shared_parameter_has_one_replacement() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    params = params_of(model, 3.0)
    with swap_parameters(model, params, torch.float64):
        assert model[1].weight is model[0].weight is params["0.weight"]
    with swap_parameters(model, {}, torch.float64):
        assert model[1].weight is model[0].weight
        assert model[0].weight.dtype is torch.float64


class Deeper(nn.Module):
    """Two equal layers in a part of a part, of which a test changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def tie(model: Deeper) -> None:
    model.inner[0][2].weight = model.inner[0][0].weight


def rename(model: Deeper) -> None:
    class Renamed(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.matrix = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.matrix

    model.inner[0][2] = Renamed(model.inner[0][2].weight)


def add_a_hook(model: Deeper) -> None:
    model.inner[0][2].register_forward_pre_hook(lambda module, args: (2 * args[0],))


def keep_statistics(model: Deeper) -> None:
    model.inner[0].append(nn.BatchNorm1d(2))


def take_another_class(model: Deeper) -> None:
    model.inner[0][2].__class__ = type("Doubled", (nn.Linear,), {"forward": lambda s, x: 2 * x})


def exchange(model: Deeper) -> None:
    model.inner[0][0], model.inner[0][2] = model.inner[0][2], model.inner[0][0]


CHANGES: list[Callable[[Deeper], object]] = [
    tie, exchange, rename, add_a_hook, keep_statistics, take_another_class,
    lambda model: setattr(model.inner[0], "2", nn.Linear(2, 3)),
    lambda model: model.inner[0].append(nn.Linear(2, 2)),
    lambda model: model.inner[0].pop(0),
    lambda model: setattr(model.inner[0][2], "bias", None),
    lambda model: model.inner[0][2].register_buffer("offset", torch.ones(2)),
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kept", [False, True])
def test_a_model_that_changed_between_two_swaps_is_looked_at_anew(
    change: Callable[[Deeper], object], kept: bool
) -> None:
    model, x = Deeper(), torch.randn(3, 2)
    with keep_swapped() if kept else swap_parameters(nn.Linear(1, 1), {}):
        for value in (1.0, 2.0):
            call_with(model, params_of(model, value), x)
    change(model)
    fresh = deepcopy(model)  # nothing is known of it
    own = dict(model.named_parameters())
    params = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    expected = call_with(fresh, params, x)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    with keep_swapped() if kept else swap_parameters(nn.Linear(1, 1), {}):
        for _ in range(2):
            torch.testing.assert_close(call_with(model, params, x), expected)
    assert all(p is own[name] for name, p in model.named_parameters())
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert not swap._CLAIMED


def test_places_of_parameters_are_found_once_and_keep_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, looked = Deeper(), torch.randn(3, 2), []
    find = swap._patch_model
    monkeypatch.setattr(swap, "_patch_model", lambda *given: [looked.append(1), find(*given)][1])
    for value in (1.0, 2.0, 3.0):
        call_with(model, params_of(model, value), x)
        with keep_swapped():
            call_with(model, params_of(model, value), x)
            call_with(model, params_of(model, value), x)
    assert len(looked) == 1
    model.load_state_dict(params_of(model, 1.0), assign=True)  # other tensors in the same places
    call_with(model, params_of(model, 2.0), x)
    assert len(looked) == 2
    gone, key = weakref.ref(model), id(model)
    del model
    gc.collect()
    assert gone() is None
    assert key not in swap._SLOTS


def test_swapped_parameters_are_kept_until_the_next_swap() -> None:
    model = nn.Linear(2, 1)
    own, (a, b) = model.weight, (params_of(model, value) for value in (1.0, 2.0))
    with keep_swapped() as patch:
        call_with(model, a, torch.ones(2))
        assert model.weight is a["weight"]
        with swap_parameters(model, b):
            call_with(model, a, torch.ones(2))  # inside another swap, this one ends at once
            assert model.weight is b["weight"]
        values = patch.values()
        call_with(model, a, torch.ones(2))
    assert model.weight is own
    with reapply(values):
        assert model.weight is b["weight"]
    assert model.weight is own
