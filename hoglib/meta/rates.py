"""Learned inner learning rates: one number a model, a layer, a parameter or an element, and a
step."""

import torch
from torch import Tensor, nn

from hoglib._core import validation
from hoglib._core.swap import Params
from hoglib.errors import ArgumentValueError

GRANULARITIES = ("model", "layer", "parameter", "element")


class Rates(nn.Module):
    r"""Learning rates of an inner loop, as parameters.

        theta_{i+1} = theta_i - alpha_i * grad L(theta_i)

    of: "model": one alpha; "layer": one for each module; "parameter": one for each tensor;
    "element": one for each number. steps: one for each of so many steps as well (later ones use the
    last). params: the parameters that adapt; lr: the start of every rate.
    Sources: Li et al., Meta-SGD, 2017, eq. 2 ("element"); Antoniou, Edwards and Storkey, How to
    train your MAML, 2019, section 4, LSLR ("parameter" or "layer" with steps).
    """

    def __init__(self, params: Params, lr: float, *, of: str, steps: int | None = None) -> None:
        super().__init__()
        self.of = validation.one_of("learn_lr", of, GRANULARITIES)
        self.steps = steps
        lr = validation.positive("inner_lr", lr)
        self.values = nn.ParameterDict()
        for name, param in params.items():
            key = self._key(name)
            if key not in self.values:
                shape = (
                    *(() if steps is None else (steps,)),
                    *(param.shape if of == "element" else ()),
                )
                rate = torch.full(shape, lr, dtype=param.dtype, device=param.device)
                self.values[key] = nn.Parameter(rate)

    def forward(self, names: list[str], step: int) -> dict[str, Tensor]:
        """The rate of each of these parameters at a step, counted from 0."""
        at = None if self.steps is None else min(step, self.steps - 1)
        found = {}
        for name in names:
            key = self._key(name)
            if key not in self.values:
                raise ArgumentValueError(
                    "learn_lr: expected the parameters that adapted when the learner was made, got "
                    f"{name} as well, for which there is no learned rate; make a new learner."
                )
            rate = self.values[key]
            found[name] = rate if at is None else rate[at]
        return found

    def _key(self, name: str) -> str:
        """A name that a ParameterDict takes: without dots."""
        if self.of == "model":
            return "model"
        if self.of == "layer":
            name = name.rpartition(".")[0] or "model"
        return name.replace(".", "/")

    def extra_repr(self) -> str:
        return f"of={self.of!r}, steps={self.steps}"
