"""What is verified: a call, its map, and the custom Functions that it runs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib import _tree
from hoglib.verification import _maps as maps
from hoglib.verification import _plain as plain
from hoglib.verification._application import applications, parameters
from hoglib.verification._call import Call, custom_functions, is_float
from hoglib.verification._triangles import one_triangle
from hoglib.verification._variables import call_of, constants_of, given_wide, marked
from hoglib.verification.report import Row


class Subject:
    """A call in float64, or in its own dtype if it refuses that, with what it is made of."""

    def __init__(self, fn: Any, inputs: Sequence[Any]) -> None:
        self.fn, self.inputs = fn, list(inputs)
        self.given_wide = given_wide(inputs)
        self.call, self.refused = call_of(fn, inputs)
        self.name = self.call.name
        asked = any(isinstance(x, Tensor) and x.requires_grad for x in _tree.leaves(tuple(inputs)))
        function = as_function(fn)
        own_names = () if function is None else parameters(function, len(inputs))
        constants = [] if asked else constants_of(self.call, own_names)
        self.constants = [self.call.names[j] for j in constants]
        if constants:
            self.inputs = marked(inputs, [self.call.slots[j] for j in constants])
            clone = self.call.clone
            self.call = Call(fn, self.inputs, self.call.dtype)
            self.call.clone = clone
        named = dict(zip(self.call.names, self.call.names, strict=True))
        for i, name in enumerate(own_names):
            named[f"inputs[{i}]"] = f"inputs[{i}] ({name})"
        self.call.symmetric = one_triangle(self.call)
        self.names = [named[name] for name in self.call.names]
        self.num_parameters = len(self.names) - self.call.num_inputs
        self.x = self.call.point
        self.dtype = max((x.dtype for x in self.x), key=lambda dtype: torch.finfo(dtype).eps)
        self.applications = applications(self.call.recorded)
        self.functions = custom_functions(self.call.recorded())
        self.random = torch.Generator().manual_seed(0)

    def look(self) -> None:
        """Find the outputs to differentiate; to be done again when the call was changed."""
        self.outputs = self.call.recorded()
        self.which = [
            i for i, y in enumerate(self.outputs) if is_float(y) and y.requires_grad and y.numel()
        ]
        self.map = self.call.map(self.which)
        self.rows = [f"output {i}" for i in self.which]

    def settle(self) -> Row | None:
        """Find out whether the call draws random numbers and changes its inputs, and allow for it."""
        call = self.call
        before = [x.clone() for x in self.x]
        call.leaves(*self.x)  # it may change its inputs, whether it says so or not
        pairs = zip(before, self.x, strict=True)
        call.clone |= any(not torch.equal(a, b) for a, b in pairs) or any(
            app.declares_changes() for app in self.applications
        )
        for x, value in zip(self.x, before, strict=True):
            x.copy_(value)
        self.look()
        if not self.which:
            return Row(
                "first derivative: reverse", "fail", None,
                "the first derivative is missing: no output with elements requires grad. Is it a "
                "constant, detached, marked non-differentiable, in a list or dict that a Function's "
                "forward returns, or in an object that is no tuple, list or dict?",
            )  # fmt: skip
        gradient = maps.gradient(self.map, len(self.x))

        def drawn(seed: int) -> tuple[list[Tensor], list[Tensor]]:
            torch.manual_seed(seed)
            values = self.map(*self.x)
            try:
                grads = gradient(*self.x, *(torch.ones_like(y) for y in values))
            except Exception:  # judged with the derivatives
                grads = []
            return [y.detach() for y in values], [g.detach() for g in grads]

        (a, da), (b, db) = drawn(1), drawn(2)
        generators = any(isinstance(x, torch.Generator) for x in _tree.leaves(tuple(self.inputs)))
        self.draws = generators or not _same(a, b)
        call.reseed = self.draws or not _same(da, db)
        if self.draws and not _same(self.map(*self.x), self.map(*self.x)):
            return Row(
                "deterministic", "fail", None,
                "the value is not the same twice, with the same seed of torch (hidden "
                "nondeterminism): does it count its calls, or draw numbers from NumPy or random? "
                "Nothing can be compared. Pass random numbers as inputs.",
            )  # fmt: skip
        again = self._again()
        return Row("deterministic", "fail", None, again) if again else None

    def _again(self) -> str:
        """What is wrong with a second backward pass through one graph, with the same seed."""
        leaves = [x.clone().requires_grad_() for x in self.x]
        values = self.map(*leaves)

        def once() -> list[Tensor]:
            torch.manual_seed(0)
            u = [torch.ones_like(y) for y in values]
            grads = torch.autograd.grad(
                values, leaves, u, retain_graph=True, materialize_grads=True
            )
            return [g.detach().clone() for g in grads]

        try:
            first = once()
        except Exception:  # judged with the derivatives
            return ""
        try:
            second, did = once(), "gives another gradient"
        except RuntimeError:  # a graph that allows one pass only says so
            return ""
        except Exception as error:
            second, did = [], f"raises {type(error).__name__}: {error}".splitlines()[0]
        if _same(first, second, 1e-6):
            return ""
        changed = {name for app in self.applications for name in plain.changed_by_backward(app)}
        why = (
            f"backward changes {', '.join(sorted(changed))}, which it must leave as it is."
            if changed
            else "it draws numbers from NumPy or random, counts its calls, or uses up what it reads."
        )
        return (
            f"a second backward pass through the same graph {did}: {why} Nothing can be compared."
        )

    def beside(self) -> list[Tensor]:
        """A point near the inputs, without their zeros; the inputs where fn is not defined there."""
        moved = []
        for x in self.x:
            part = torch.rand(x.shape, dtype=torch.float64, generator=self.random)
            part = part.to(x.device, x.dtype)
            moved.append(torch.where(x == 0, 0.005 * (1 + part), x * (1 - 0.02 * part)))
        try:
            pairs = zip(self.map(*moved), self.map(*self.x), strict=True)
            defined = all(bool((a.isfinite() | ~b.isfinite()).all()) for a, b in pairs)
        except Exception:  # whatever fn says of inputs it was not given
            defined = False
        return moved if defined else self.x

    @property
    def offers_forward(self) -> bool | None:
        """Whether forward mode is declared by every custom Function; None for torch's own functions."""
        if not self.functions:
            return None
        return all(map(plain.offers_jvp, self.functions))

    @property
    def offers_vmap(self) -> bool | None:
        if not self.functions:
            return None
        return all(map(plain.offers_vmap, self.functions))


def as_function(fn: Any) -> type[Function] | None:
    """The Function class that fn is, or is the `apply` of."""
    owner = fn if isinstance(fn, type) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None


def _same(a: Sequence[Tensor], b: Sequence[Tensor], rtol: float = 1e-12) -> bool:
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(torch.allclose(p, q, rtol=rtol, atol=0.0, equal_nan=True) for p, q in pairs)
