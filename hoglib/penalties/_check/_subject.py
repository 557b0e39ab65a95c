"""Somebody's penalty, run so that nothing of theirs is changed and all that it does is seen."""

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hoglib import _arguments as arguments
from hoglib.penalties._check._critics import Critic
from hoglib.penalties._check._kinds import Kind
from hoglib.verification._cuts import Cut, Watch

DIFFER = "not judged: equal calls differ; its random numbers are not of torch, NumPy or Python."
FLAG = "requires_grad_"  # the watch takes it for an operation without a derivative


class Outcome(NamedTuple):
    """What `every` calls in a row gave: the mean of their values, where the critic was called in each,
    and where the graph ended."""

    mean: Tensor
    calls: list[list[Tensor]]
    cuts: list[Cut]

    @property
    def number(self) -> float:
        return float(self.mean.detach())

    @property
    def active(self) -> list[list[Tensor]]:
        """The calls in which the critic was run: a lazy penalty does nothing in others."""
        return [xs for xs in self.calls if xs]


class Returned(Exception):
    """What came is not one number; the text says what came."""


class Subject:
    """A penalty as a function of (critic, real, fake)."""

    def __init__(self, penalty: Callable[..., Any], kind: Kind, every: int) -> None:
        self.penalty, self.kind, self.every = penalty, kind, every
        self.attached = False  # whether fake comes with a graph, as from a generator
        self._both = kind.at in ("between", "both") or _takes_fake(penalty)

    def __call__(self, critic: nn.Module, real: Tensor, fake: Tensor) -> Outcome:
        """As many calls as a lazy penalty needs, always with the same random numbers."""
        values, calls, cuts = [], [], []
        seed(real.device)
        if isinstance(critic, Critic):
            critic.requires_grad_()  # what one call froze is not the next one's fault
        for _ in range(self.every):
            if isinstance(critic, Critic):
                critic.calls = []
            with Watch() as watch:
                returned = self.once(critic, real, fake)
            cuts += [cut for cut in watch.cuts if cut.place is not None and FLAG not in cut.how]
            values.append(number(returned, real))
            calls.append(critic.calls if isinstance(critic, Critic) else [])
        mean = torch.stack([v.to(real.dtype) for v in values]).mean()
        return Outcome(mean, calls, list({str(cut): cut for cut in cuts}.values()))

    def once(self, critic: nn.Module, real: Tensor, fake: Tensor) -> Any:
        if self.attached:
            fake = fake.detach().requires_grad_().clone()
        if self._both:
            return self.penalty(critic, real, fake)
        return self.penalty(critic, fake if self.kind.at == "fake" else real)


def number(returned: Any, like: Tensor) -> Tensor:
    """A scalar tensor: a Python number, as lazy penalties return where they do nothing, is one too."""
    if isinstance(returned, bool | int | float):
        return torch.tensor(float(returned), dtype=like.dtype, device=like.device)
    if isinstance(returned, Tensor) and returned.numel() == 1 and returned.is_floating_point():
        return returned.reshape(())
    raise Returned(arguments.describe(returned))


def _takes_fake(penalty: Callable[..., Any]) -> bool:
    """Whether a penalty at one set of points is called with both, by its signature."""
    function = penalty.forward if isinstance(penalty, nn.Module) else penalty
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) < 3:
        return False
    third = plain[2]
    return third.default is third.empty or "fake" in third.name.lower()


@contextmanager
def untouched(penalty: Callable[..., Any], device: torch.device) -> Iterator[Callable[..., Any]]:
    """The penalty, or a copy of one that counts its calls; inside, random numbers are nobody's."""
    owner: Any = getattr(penalty, "__self__", penalty)
    state = copy.deepcopy(owner.state_dict()) if isinstance(owner, nn.Module) else None
    if state is None and not inspect.isroutine(penalty):
        penalty = _copied(penalty)
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield penalty
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(arrays)
            if state is not None:
                owner.load_state_dict(state)


def _copied(penalty: Any) -> Any:
    try:
        return copy.deepcopy(penalty)
    except Exception:  # it holds what cannot be copied; then it counts our calls
        return penalty


def seed(device: torch.device) -> None:
    """The same random numbers from here on, of all libraries, inside `untouched`."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(0)
