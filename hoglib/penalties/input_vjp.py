"""A function at points, and its derivatives by the points, with the guards of both."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hoglib._core import pytree, validation
from hoglib._core.autograd import (
    Vector,
    clone_inference_tensors,
    fresh_leaves,
    grad_enabled,
    materialize_grads,
    translate_errors,
)
from hoglib._core.gradient_graph import graph_summary, warn_detached
from hoglib._core.torch_internals import transforms_active, uncompiled
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.penalties import gradient_flow
from hoglib.penalties.critic_state import (
    as_parameters,
    autocast_on,
    frozen,
    modules_kept,
    parameters_of,
)
from hoglib.penalties.interpolation import drawn
from hoglib.penalties.options import Settings, picked
from hoglib.penalties.samples import Samples, inputs
from hoglib.stand_ins.mode import stand_ins_if

Function = Callable[..., Any]
# What torch says of a change in place of a leaf, of a view of one, and of expanded memory.
IN_PLACE = (
    "a leaf Variable that requires grad is being used in an in-place",
    "a view of a leaf Variable that requires grad is being used in an in-place",
    "more than one element of the written-to tensor refers to a single memory location",
)


class InputVJP:
    """A function at x: what it returned, and J^T u for cotangents u of the output that is meant.

    y: that output, [N, ...]; samples: which rows of x are whose; wanted: whether gradients of the
    penalty are, so that what is computed here has a graph.
    """

    def __init__(
        self, what: str, func: Function, x: Any, args: tuple[Any, ...], given: Settings,
        wanted: bool, per_sample: bool,
    ) -> None:  # fmt: skip
        self.what, self.func, self.args, self.output = what, func, args, given.output
        self.stand_ins = given.stand_ins
        self._given, self.structure = pytree.flatten(x)
        self.modules: list[nn.Module] = []  # those that ran
        self.samples: Samples | None = None
        self.draws: Callable[..., Tensor] | None = None  # in the place of a generator's
        if per_sample:
            self.samples = Samples(what, self._given, self.structure, given.batch)
        self._functional = transforms_active()
        self._pull: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        self._transposed: tuple[Tensor, list[Tensor | None]] | None = None
        if self._functional:
            self.wanted, self.own, self.trainable, self.tells = True, self._given, [], False
            self._pull = self._by_transform()
            return
        self.own = fresh_leaves(self._given, wanted)
        self.outputs = self._run()
        if not all(leaf.requires_grad for leaf in self.own):
            how = "the function detaches the points in place, by detach_() or requires_grad_(False)"
            raise gradient_flow.no_gradient_flow(what, how, func, self.at(self.own), args)
        self.y = self._tensor(picked(self.outputs, given.output))
        if self.samples is not None and self.samples.count == 1 and not self.y.dim():
            self.y = self.y.reshape(1)  # of one sample, squeezed
        self.graph = graph_summary(self.y)
        own = {id(leaf) for leaf in self.own}
        self.trainable = [leaf for key, leaf in self.graph.leaves.items() if key not in own]
        self.wanted = wanted and bool(self.trainable)
        self.tells = self.wanted and self.graph.has_user_code  # of what detaches the gradient
        if self.tells:
            gradient_flow.check_gradient_flow(what, self.graph)
        elif wanted and not self.y.requires_grad and not frozen(func):
            raise gradient_flow.no_gradient_flow(
                what, gradient_flow.OF_X, func, self.at(self.own), args
            )

    def at(self, leaves: Vector) -> Any:
        return pytree.unflatten(leaves, self.structure)

    def _run(self) -> Any:
        """What the function returns; at copies of the points if it changes them in place, which torch
        refuses of leaves. What has a graph behind it would be changed: always a copy."""
        with stand_ins_if(self.stand_ins):
            try:
                points = [leaf if leaf.is_leaf else leaf.clone() for leaf in self.own]
                return self.func(self.at(points), *self.args)
            except RuntimeError as error:
                self._explain_dtypes(error)
                if not any(said in str(error) for said in IN_PLACE):
                    raise
            return self.func(self.at([leaf.clone() for leaf in self.own]), *self.args)

    def _explain_dtypes(self, error: RuntimeError) -> None:
        """Says which points are in another dtype than the parameters, if torch stumbled over one."""
        dtypes = {p.dtype for p in parameters_of(self.func) if p.is_floating_point()}
        other = [leaf for leaf in self.own if len(dtypes) == 1 and leaf.dtype not in dtypes]
        if other and any(word in str(error) for word in ("dtype", "scalar type", "type (")):
            (wanted,) = dtypes
            raise ArgumentTypeError(
                f"{self.what}: expected points in the dtype of the parameters, {wanted}, got "
                f"{validation.describe(other[0])}; convert it with `.to({wanted})`, or stay inside the "
                "autocast region that made it."
            ) from error

    def standing_in(self) -> AbstractContextManager[None]:
        """The stand-ins, for backward passes that run Python which may need them."""
        return (
            stand_ins_if(True) if self.stand_ins and self.graph.needs_stand_ins else nullcontext()
        )

    def pull(
        self, cotangent: Tensor | None, keep: bool = False, graph: bool | None = None
    ) -> Vector:
        """J^T u, like the leaves of x; with a graph where one is wanted, or as `graph` says.

        cotangent None is one for every output. keep: another one follows.
        """
        if self._pull is not None:
            u = torch.ones_like(self.y) if cotangent is None else cotangent
            return list(self._pull(u))
        grads: list[Tensor | None] = [None] * len(self.own)
        if self.y.requires_grad:
            telling = warn_detached(self.graph, self.what) if self.tells else nullcontext()
            with self.standing_in(), translate_errors(self.what), telling:
                grads = list(
                    torch.autograd.grad(
                        # of a scalar torch asks no questions about shapes, which take their time
                        self.y.sum() if cotangent is None else self.y,
                        self.own,
                        cotangent,
                        create_graph=self.wanted if graph is None else graph,
                        retain_graph=True if keep else None,
                        allow_unused=True,
                    )
                )
        if self.wanted and all(g is None for g in grads):
            raise gradient_flow.no_gradient_flow(
                self.what, gradient_flow.OF_X, self.func, self.at(self.own), self.args
            )
        return materialize_grads(grads, self.own)

    def push(self, tangents: Vector) -> Tensor:
        """J t, like the output, without a graph: the transpose of the linear map u -> J^T u."""
        u = torch.zeros_like(self.y)
        if self._pull is not None:
            pulling: Any = torch.func.vjp(self._pull, u)
            return pulling[1](tuple(tangents))[0]
        if self._transposed is None:
            u.requires_grad_()
            with self.standing_in(), translate_errors(self.what):
                grads = torch.autograd.grad(
                    self.y, self.own, u, create_graph=True, allow_unused=True
                )
            self._transposed = u, list(grads)
        u, found = self._transposed
        pairs = [
            (g, t)
            for g, t in zip(found, tangents, strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:
            return torch.zeros_like(self.y)
        with self.standing_in(), translate_errors(self.what):
            (product,) = torch.autograd.grad(
                [g for g, _ in pairs], u, [t for _, t in pairs], retain_graph=True
            )
        return product

    def rows(self) -> Tensor:
        """The output as [N, C]."""
        y, count = self.y, self._count()
        if not y.dim() or y.shape[0] != count:
            raise ArgumentValueError(
                f"{self.what}: expected an output with a row for each of {count} samples, got "
                f"{validation.describe(y)}; leave out the mean over the batch, or name another output "
                "by output=."
            )
        return y.reshape(count, -1)

    def drawn(self, draw: Any, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """Random numbers like the output."""
        return (self.draws or drawn)(draw, shape, self.y, generator)

    def gradient(self) -> Vector:
        """The gradient of each sample's score by its own entries of x."""
        self._check_scores()
        return self.pull(None)

    def _check_scores(self) -> None:
        """The output must be one number a sample."""
        y, count = self.y, self._count()
        if y.numel() != count or (y.dim() and y.shape[0] != count):
            raise ArgumentValueError(
                f"{self.what}: expected one number for each of {count} samples, [{count}] or "
                f"[{count}, 1], got {validation.describe(y)}; "
                + (
                    "it is one for all of them: leave out the mean over the batch."
                    if y.dim() == 0
                    else "reduce what belongs to a sample, for instance with "
                    "`output=lambda y: y.flatten(1).mean(1)`, name another output by output=, or, if "
                    "rows of the points are parts of samples, say by batch= which sample each is of."
                )
            )

    def squares(self, grads: Vector) -> Tensor:
        assert self.samples is not None
        return self.samples.squares(grads)

    def _count(self) -> int:
        assert self.samples is not None
        if self.y.dim():
            self.samples.told(len(self.y))
        assert self.samples.count is not None
        return self.samples.count

    def _tensor(self, y: Any) -> Tensor:
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise ArgumentTypeError(
                f"{self.what}: expected a function that returns a real floating-point tensor, got "
                f"{validation.describe(y)}; name the output that is meant by output=."
            )
        return y

    def _by_transform(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Inside torch.func transforms, where autograd.grad sees nothing."""

        def function(*leaves: Tensor) -> tuple[Tensor, Any]:
            with stand_ins_if(self.stand_ins):
                outputs = self.func(self.at(list(leaves)), *self.args)
            y = self._tensor(picked(outputs, self.output))
            return y, outputs

        pulling: Any = torch.func.vjp(function, *self._given, has_aux=True)
        self.y, pull, self.outputs = pulling

        def back(u: Tensor) -> tuple[Tensor, ...]:
            with stand_ins_if(self.stand_ins):
                found: tuple[Tensor, ...] = pull(u)
            return found

        return back


@contextmanager
def input_vjp_at(
    what: str,
    func: Function,
    x: Any,
    args: tuple[Any, ...],
    given: Settings,
    per_sample: bool = True,
) -> Iterator[InputVJP]:
    """A function at x under the conditions of a penalty, which hold inside."""
    validation.function(f"{what}: the function", func)
    func = uncompiled(func)
    leaves = inputs(what, "the points", x)
    wanted = torch.is_grad_enabled()
    with ExitStack() as stack:
        if not wanted:
            stack.enter_context(grad_enabled())
        modules = stack.enter_context(modules_kept())
        for kind in () if given.autocast else autocast_on(leaves):
            stack.enter_context(torch.autocast(kind, enabled=False))
            x, args = as_parameters(parameters_of(func), (x, args))
        given_too = pytree.leaves(args) if args else ()
        if any(t.is_inference() for t in (*leaves, *given_too) if isinstance(t, Tensor)):
            x, args = clone_inference_tensors((x, args))
        point = InputVJP(what, func, x, args, given, wanted, per_sample)
        point.modules = modules
        yield point
