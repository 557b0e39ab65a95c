"""A function at points x, and its vector-Jacobian products by x.

    y = func(x, *args)        J^T u = d <y, u> / dx        differentiable again by the parameters

Penalties run the user's function, inside the ring, and call autograd only here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import NoneType
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.messages.call_errors import translate_batch_errors
from hoglib._core.messages.closures import STATE, ClosureWalker, owner_of
from hoglib._core.problem import Problem
from hoglib._core.substrate import autograd
from hoglib._core.substrate.detachment import DetachmentWatch
from hoglib._core.substrate.gradient_graph import (
    GraphSummary,
    check_custom_functions,
    graph_summary,
)
from hoglib._core.torch_api import function_watch, mixed_precision, pytree, torch_internals
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_modes import without_stand_ins
from hoglib.errors import ArgumentTypeError, NoSecondDerivative
from hoglib.penalties.distributed import GatheredParameters, warn_of_uneven_samples
from hoglib.penalties.options import CheckedOptions, select_output
from hoglib.penalties.samples import Samples, check_points, random_like
from hoglib.ring import ring, warn_if_derivatives_not_finite
from hoglib.stand_ins.mode import in_module

Function = Callable[..., Any]
NOT_OF_POINTS = "what it returns does not depend on the points"
NOT_OF_PARAMETERS = "its gradient by the points does not reach any parameter that requires grad"
# torch's errors for an in-place operation on a leaf, on a view of a leaf, and on expanded memory.
IN_PLACE_ERRORS = (
    "a leaf Variable that requires grad is being used in an in-place",
    "a view of a leaf Variable that requires grad is being used in an in-place",
    "more than one element of the written-to tensor refers to a single memory location",
)


@contextmanager
def input_vjp(
    func: Function, x: Any, args: tuple[Any, ...], options: CheckedOptions, per_sample: bool = True
) -> Iterator["InputVJP"]:
    """Run func(x, *args) inside the ring; the ring stays entered while the caller takes products.

    Autocast is off, and buffers are restored at the end. Stand-ins are on while func runs, and in
    backward passes that need them.
    """
    policy = options.policy
    validation.function(f"{policy.caller}: the function", func)
    # compiled code has no second derivative
    func = torch_internals.uncompiled(func)
    leaves, structure = check_points(policy.caller, "the points", x)
    devices, (leaves, args) = without_autocast(options, leaves, (leaves, args), func)
    around = ring(policy, func, buffers=True, autocast_off=devices)
    # the mode of stand-ins costs a microsecond per torch call: enter it only while func runs, and for
    # backward passes that may need stand-ins
    with around as blocks, without_stand_ins() as suspended:
        problem = Problem(policy, func, structure, leaves, args).entered(blocks)
        yield InputVJP(problem, options, around.modules, suspended, per_sample)


@final
class InputVJP:
    """A function at points x: its output y, and J^T u for cotangents u of y.

    problem: the function and the points.
    modules: the modules that ran.
    leaves: the points, as leaf tensors to differentiate by.
    outputs: everything that the function returned.
    y: the output that the option `output` selects, [N, ...].
    samples: the sample of each row of x; None for functions of other inputs than samples.
    graph: a summary of y's autograd graph.
    trainable: the leaf tensors that y depends on, without the points.
    create_graph: whether products get a graph, to be differentiated by `trainable`.
    draws: replaces `random_like` in compiled code.
    """

    def __init__(
        self,
        problem: Problem,
        options: CheckedOptions,
        modules: Sequence[nn.Module],
        suspended: torch_internals.SuspendedMode,
        per_sample: bool = True,
    ) -> None:
        self.problem, self.options, self.modules = problem, options, modules
        self._suspended = suspended
        self.samples: Samples | None = None
        if per_sample:
            self.samples = Samples(options.name, problem.leaves, problem.structure, options.batch)
        self.draws: Callable[..., Tensor] | None = None
        # a cotangent u, and J^T u with a graph to it: its transpose gives J t
        self._transposed: tuple[Tensor, list[Tensor | None]] | None = None
        # u -> J^T u by torch.func.vjp, inside a transform of torch.func
        self._transform_vjp: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        if torch_internals.transforms_active():
            self._evaluate_in_transform()
        else:
            self._evaluate()

    @property
    def in_transform(self) -> bool:
        """Whether the function ran inside a transform of torch.func, where everything has a graph."""
        return self._transform_vjp is not None

    def _evaluate(self) -> None:
        """Run the function at fresh leaves; raise if its gradient cannot reach the parameters."""
        wanted = self.problem.policy.create_graph
        self.leaves = autograd.fresh_leaves(self.problem.leaves, wanted)
        self.outputs = self._run()
        if not all(leaf.requires_grad for leaf in self.leaves):
            raise self.no_gradient_flow(
                "the function detaches the points in place, by detach_() or requires_grad_(False)"
            )
        self.y = self._select(self.outputs)
        if self.samples is not None and self.samples.count == 1 and not self.y.dim():
            self.y = self.y.reshape(1)  # the score of a single sample, squeezed
        self.graph = graph_summary(self.y)
        own = {*map(id, self.leaves)}
        self.trainable = [leaf for key, leaf in self.graph.leaves.items() if key not in own]
        # without a parameter that requires grad there is nothing to train
        self.create_graph = wanted and bool(self.trainable)
        self._gathered = GatheredParameters(self.modules if self.create_graph else ())
        if self._gathered.sharded and self.samples is not None:
            warn_of_uneven_samples(self.options.name, self.modules, self.count())
        if self.create_graph and self.graph.functions and self.graph.has_user_code:
            check_gradient_flow(self.options.name, self.graph)
        elif wanted and not self.y.requires_grad:
            frozen = [not p.requires_grad for p in parameters_of(self.problem.loss)]
            if not (frozen and all(frozen)):
                raise self.no_gradient_flow(NOT_OF_POINTS)

    def loses_parameters(self) -> bool:
        """Whether the function reads parameters that require grad, but detaches them: the graph of y
        has no parameter then, as if the function had none."""
        if self.trainable or not self.problem.policy.create_graph:
            return False
        reached = ClosureWalker(self.problem.loss, STATE).objects
        modules = [x for x in reached if isinstance(x, nn.Module)]
        tensors = [x for x in reached if isinstance(x, Tensor)]
        tensors += [p for module in modules for p in module.parameters()]
        read = any(x.requires_grad and x.is_leaf for x in tensors)
        return read and bool(_detached_places(self.problem, self.leaves))

    def _run(self) -> Any:
        """The outputs of the function.

        If the function changes the points in place, which torch refuses for leaves, it runs again at
        copies. Points with a graph are always copied, because the caller still needs them.
        """
        try:
            return self._call([leaf if leaf.is_leaf else leaf.clone() for leaf in self.leaves])
        except (RuntimeError, TypeError) as error:
            points = self.tree(self.leaves)
            translate_batch_errors(points, self.problem.loss, "points").explain(error)
            if not any(text in str(error) for text in IN_PLACE_ERRORS):
                raise
        return self._call([leaf.clone() for leaf in self.leaves])

    def _call(self, leaves: Sequence[Tensor]) -> Any:
        points = self.tree(leaves)
        self._suspended.__exit__()  # the stand-ins are on while the function runs
        try:
            return self.problem.loss(points, *self.problem.args)
        finally:
            self._suspended.__enter__()

    def _evaluate_in_transform(self) -> None:
        """Run by torch.func.vjp, because autograd.grad does not see the levels of torch.func."""

        def function(*leaves: Tensor) -> tuple[Tensor, Any]:
            outputs = self._call(leaves)
            return self._select(outputs), outputs

        self.leaves, self.trainable = self.problem.leaves, []
        self.create_graph = True
        evaluated: Any = torch.func.vjp(function, *self.leaves, has_aux=True)
        self.y, self._transform_vjp, self.outputs = evaluated

    def tree(self, leaves: Sequence[Tensor]) -> Any:
        """The leaves in the structure of the points."""
        return self.problem.params(leaves)

    def vjp(
        self, u: Tensor | None = None, retain_graph: bool = False, create_graph: bool | None = None
    ) -> autograd.Vector:
        """J^T u, one tensor for each leaf; by default for u = 1, the gradient of the sum of y.

        create_graph: whether the product gets a graph. Default: self.create_graph.
        """
        u = torch.ones_like(self.y) if u is None else u
        if self._transform_vjp is not None:
            with self._suspended.resumed():
                return list(self._transform_vjp(u))
        grads: list[Tensor | None] = [None] * len(self.leaves)
        if self.y.requires_grad:
            create_graph = self.create_graph if create_graph is None else create_graph
            keep = retain_graph or create_graph
            try:
                with self.backward_stand_ins():
                    grads = torch_internals.gradients(
                        [self.y], self.leaves, [u], retain_graph=keep, create_graph=create_graph
                    )
            except Exception as error:
                autograd.translate_errors(self.options.name).explain(error)
                raise
        self._gathered.until_backward_of(grads)
        if self.create_graph and {*map(type, grads)} <= {NoneType}:  # all gradients are None
            raise self.no_gradient_flow(NOT_OF_POINTS)
        return autograd.materialize_grads(grads, self.leaves)

    def jvp(self, tangents: autograd.Vector) -> Tensor:
        """J t, with the shape of y, without a graph: the transpose of the linear map u -> J^T u."""
        u = torch.zeros_like(self.y)
        if self._transform_vjp is not None:
            with self._suspended.resumed():
                return torch.func.vjp(self._transform_vjp, u)[1](tuple(tangents))[0]
        name = self.options.name
        with self.backward_stand_ins():
            # u -> J^T u is linear, so that its graph at u = 0 serves all tangents
            if self._transposed is None:
                grads = autograd.vjp(
                    [self.y], self.leaves, [u.requires_grad_()], name, create_graph=True
                )
                self._transposed = u, grads
            u, grads = self._transposed
            (product,) = autograd.vjp(grads, [u], tangents, name, retain_graph=True)
        return torch.zeros_like(self.y) if product is None else product

    def squared_norms(self, grads: autograd.Vector) -> Tensor:
        """|g_n|^2 of each sample: [N]."""
        assert self.samples is not None
        return self.samples.squared_norms(grads)

    def count(self) -> int:
        """The number of samples, N."""
        assert self.samples is not None
        if self.y.dim():
            self.samples.set_count(self.y.shape[0])
        assert self.samples.count is not None
        return self.samples.count

    def random(self, sampler: object, shape: tuple[int, ...]) -> Tensor:
        """Random numbers on the device of y, from the generator."""
        return (self.draws or random_like)(self.y, sampler, shape, self.options.generator)

    def backward_stand_ins(self) -> AbstractContextManager[object]:
        """A context with stand-ins for a backward pass that runs Python code (custom Functions)."""
        needed = self.graph.functions and self.graph.needs_stand_ins
        return self._suspended.resumed() if needed else nullcontext()

    def warn_if_not_finite(self, parts: autograd.Vector) -> None:
        """Warn of infinite or NaN parts if y is finite, now and in the user's backward of the parts."""

        def total(*leaves: Tensor) -> Tensor:
            return self._select(self.problem.loss(self.tree(leaves), *self.problem.args)).sum()

        warn_if_derivatives_not_finite(self.problem, self.y, parts, total, self.trainable)

    def no_gradient_flow(self, reason: str) -> Exception:
        """The error for a penalty without effect at these points."""
        return no_gradient_flow(self.problem, self.leaves, reason)

    def _select(self, outputs: object) -> Tensor:
        """The checked output that the option `output` selects."""
        y = select_output(outputs, self.options.output)
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise ArgumentTypeError(
                f"{self.options.name}: expected a function that returns a real floating-point "
                f"tensor, got {validation.describe(y)}; select an output with output=."
            )
        return y


# Whether a gradient flows through the function, and what detaches it


def check_gradient_flow(name: str, graph: GraphSummary) -> None:
    """Raises for a custom Function that detaches its gradient."""
    try:
        check_custom_functions(graph, name)
    except NoSecondDerivative as error:
        raise NoSecondDerivative(
            f"{name}: this penalty has no effect because its gradient is detached in a custom "
            f"Function. {error}"
        ) from error


def no_gradient_flow(problem: Problem, leaves: Sequence[Tensor], reason: str) -> NoSecondDerivative:
    """The error of a penalty without effect at these leaves, with the places that detach."""
    places = _detached_places(problem, leaves)
    where = (
        f"The gradient is detached by {'; by '.join(places)}."
        if places
        else "No call detaches it: the modules that the points go through are frozen, or the gradient "
        "by the points is the same for all values of the parameters."
    )
    return NoSecondDerivative(
        f"{problem.policy.caller}: this penalty has no effect because {reason}. {where} Change that, "
        "or compute the penalty under torch.no_grad() if only its value is needed."
    )


def _detached_places(problem: Problem, leaves: Sequence[Tensor]) -> list[str]:
    """The places where the function detaches; if there are none, its custom Functions' backwards."""
    # a search for the text of a message: its own errors are dropped
    with DetachmentWatch(module=in_module) as watch, suppress(Exception):
        with function_watch.watching_functions(lambda function, given: None) as applying:
            watch.applying = applying
            result = problem.loss(problem.params(leaves), *problem.args)
        places = [str(detached) for detached in watch.detached]
        if not places and isinstance(result, Tensor):
            functions = [entry.function for entry in graph_summary(result).user_functions]
            places = [f"the backward of {f.__qualname__}" for f in functions if f is not None]
        return list(dict.fromkeys(places))
    return []


# Parameters and dtypes of the function


def without_autocast(
    options: CheckedOptions, leaves: Sequence[Tensor], tree: Tree, func: Any = None
) -> tuple[list[str], Any]:
    """The device types to disable autocast on, and the tree in the dtype of the parameters.

    float32 and half-precision tensors of the tree become float32; or half precision, if all parameters
    of func (without func: all leaves) are in one half precision. float64 tensors stay.
    """
    kinds = {} if options.autocast else {x.device.type for x in leaves}
    devices = [kind for kind in kinds if mixed_precision.autocast_on(kind)]
    if not devices:
        return devices, tree
    params = leaves if func is None else parameters_of(func)
    dtypes = {p.dtype for p in params if p.is_floating_point()}
    half = len(dtypes) == 1 and dtypes < set(mixed_precision.HALF_DTYPES)
    wanted = dtypes.pop() if half else torch.float32
    others = {torch.float32, *mixed_precision.HALF_DTYPES}
    return devices, pytree.map_tensors(lambda x: x.to(wanted) if x.dtype in others else x, tree)


def parameters_of(func: Callable[..., Any]) -> Iterable[Tensor]:
    """The parameters of the module that func is, or is a method of."""
    owner = owner_of(func)
    return owner.parameters() if isinstance(owner, nn.Module) else ()
