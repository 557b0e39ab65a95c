"""A function at points, its vector-Jacobian products by them, and whether gradients flow through it.

    J^T u = d <func(x), u> / dx        with a graph: differentiable again by the parameters

This is where a penalty calls `torch.autograd.grad`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, final

import torch
from torch import Tensor, nn

from hoglib._core import mixed_precision, pytree, validation
from hoglib._core.autograd import (
    Vector,
    clone_inference_tensors,
    fresh_leaves,
    grad_enabled,
    materialize_grads,
    translate_errors,
)
from hoglib._core.blocks import rematerialized
from hoglib._core.closures import owner_of
from hoglib._core.detachment import DetachmentWatch
from hoglib._core.gradient_graph import (
    GraphSummary,
    check_custom_functions,
    graph_summary,
)
from hoglib._core.swap import restore_buffers
from hoglib._core.torch_internals import (
    gradients,
    transforms_active,
    uncompiled,
    watching_functions,
)
from hoglib.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NoSecondDerivative,
    UnsupportedError,
)
from hoglib.penalties.distributed import GatheredParameters
from hoglib.penalties.options import CheckedOptions, select_output
from hoglib.penalties.samples import Samples, check_points, random_like
from hoglib.stand_ins.mode import in_module, stand_ins_if
from hoglib.verification.entry_points import examined_functions

Function = Callable[..., Any]
# What torch says of an in-place operation on a leaf, on a view of one, and on expanded memory.
IN_PLACE_ERRORS = (
    "a leaf Variable that requires grad is being used in an in-place",
    "a view of a leaf Variable that requires grad is being used in an in-place",
    "more than one element of the written-to tensor refers to a single memory location",
)
NOT_OF_POINTS = "what it returns does not depend on the points"
NOT_OF_PARAMETERS = "its gradient by the points does not reach any parameter that requires grad"


@contextmanager
def input_vjp(
    func: Function,
    x: Any,
    args: tuple[Any, ...],
    options: CheckedOptions,
    per_sample: bool = True,
) -> Iterator["InputVJP"]:
    """Evaluates func(x, *args) with gradients on, autocast off and buffers restored at the end; the
    context holds inside, where the products are taken."""
    validation.function(f"{options.name}: the function", func)
    func = uncompiled(func)
    leaves = check_points(options.name, "the points", x)
    create_graph = torch.is_grad_enabled()
    recorded: Any = examined_functions(options.name) if create_graph else grad_enabled()
    kinds = () if options.autocast else autocast_devices(leaves)
    with (
        recorded,
        restore_buffers() as modules,
        without_autocast(kinds),
        rematerialized(options.remat, func, options.compile),
    ):
        if kinds:
            x, args = cast_like_parameters(parameters_of(func), (x, args))
        given = (*leaves, *(pytree.leaves(args) if args else ()))
        if any(t.is_inference() for t in given if isinstance(t, Tensor)):
            x, args = clone_inference_tensors((x, args))
        yield InputVJP(func, x, args, options, create_graph, per_sample, modules)


@final
class InputVJP:
    """A function at points x: its output, and J^T u for cotangents u of that output.

    leaves: what is differentiated by. outputs: all that the function returned; y: the output that the
    option `output` selects, [N, ...]. samples: which rows of x belong to which sample. create_graph:
    whether the products can be differentiated by `trainable`, the other leaf tensors that y depends on.
    """

    def __init__(
        self,
        func: Function,
        x: Any,
        args: tuple[Any, ...],
        options: CheckedOptions,
        create_graph: bool,
        per_sample: bool = True,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.func, self.args, self.options, self.modules = func, args, options, modules
        self.points, self.structure = pytree.flatten(x)
        self.samples: Samples | None = None
        if per_sample:
            self.samples = Samples(options.name, self.points, self.structure, options.batch)
        self.draws: Callable[..., Tensor] | None = None  # replaces random_like in compiled code
        self.transposed_graph: tuple[Tensor, list[Tensor | None]] | None = None
        self.transform_vjp: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        if transforms_active():
            self._evaluate_in_transform()
        else:
            self._evaluate(create_graph)

    def _evaluate(self, create_graph: bool) -> None:
        """Runs the function at fresh leaves, and raises if its gradient cannot flow."""
        self.leaves = fresh_leaves(self.points, create_graph)
        self.outputs = self._run()
        if not all(leaf.requires_grad for leaf in self.leaves):
            raise self.no_gradient_flow(
                "the function detaches the points in place, by detach_() or requires_grad_(False)"
            )
        self.y = self._select(self.outputs)
        if self.samples is not None and self.samples.count == 1 and not self.y.dim():
            self.y = self.y.reshape(1)  # the score of a single sample, squeezed
        self.graph = graph_summary(self.y)
        own = {id(leaf) for leaf in self.leaves}
        self.trainable = [leaf for key, leaf in self.graph.leaves.items() if key not in own]
        self.create_graph = create_graph and bool(self.trainable)
        self.gathered = GatheredParameters(self.modules if self.create_graph else ())
        if self.create_graph and self.graph.has_user_code:
            check_gradient_flow(self.options.name, self.graph)
        elif create_graph and not self.y.requires_grad:
            frozen = [not p.requires_grad for p in parameters_of(self.func)]
            if not (frozen and all(frozen)):
                raise self.no_gradient_flow(NOT_OF_POINTS)

    def _run(self) -> Any:
        """The outputs of the function; at copies of the points if it changes them in place, which torch
        refuses for leaves. Points that have a graph are always copied: the caller still needs them."""
        points = self.tree([leaf if leaf.is_leaf else leaf.clone() for leaf in self.leaves])
        with stand_ins_if(self.options.stand_ins):
            try:
                return self.func(points, *self.args)
            except RuntimeError as error:
                self._explain_dtypes(error)
                if not any(text in str(error) for text in IN_PLACE_ERRORS):
                    raise
            return self.func(self.tree([leaf.clone() for leaf in self.leaves]), *self.args)

    def _explain_dtypes(self, error: RuntimeError) -> None:
        """Raises an error that names the points in another dtype than the parameters, if torch's is one
        about dtypes."""
        dtypes = {p.dtype for p in parameters_of(self.func) if p.is_floating_point()}
        other = [leaf for leaf in self.leaves if len(dtypes) == 1 and leaf.dtype not in dtypes]
        if other and any(word in str(error) for word in ("dtype", "scalar type", "type (")):
            (wanted,) = dtypes
            raise ArgumentTypeError(
                f"{self.options.name}: expected points in the dtype of the parameters, {wanted}, got "
                f"{validation.describe(other[0])}; convert it with `.to({wanted})`, or call the "
                "penalty inside the autocast region that made it."
            ) from error

    def tree(self, leaves: Vector) -> Any:
        """The leaves in the structure of the points."""
        return pytree.unflatten(leaves, self.structure)

    def vjp(
        self,
        cotangent: Tensor | None,
        retain_graph: bool = False,
        create_graph: bool | None = None,
    ) -> Vector:
        """J^T u, like the leaves; without a cotangent for u = 1.

        create_graph: by default, where the penalty is differentiated.
        """
        if self.transform_vjp is not None:
            u = torch.ones_like(self.y) if cotangent is None else cotangent
            return list(self.transform_vjp(u))
        grads: list[Tensor | None] = [None] * len(self.leaves)
        if self.y.requires_grad:
            with self.backward_stand_ins(), translate_errors(self.options.name):
                grads = gradients(
                    [self.y],
                    self.leaves,
                    None if cotangent is None else [cotangent],
                    create_graph=self.create_graph if create_graph is None else create_graph,
                    retain_graph=True if retain_graph else None,
                )
        self.gathered.until_backward_of(grads)
        if self.create_graph and all(g is None for g in grads):
            raise self.no_gradient_flow(NOT_OF_POINTS)
        return materialize_grads(grads, self.leaves)

    def jvp(self, tangents: Vector) -> Tensor:
        """J t, like the output, without a graph: the transpose of the linear map u -> J^T u."""
        u = torch.zeros_like(self.y)
        if self.transform_vjp is not None:
            transposed: Any = torch.func.vjp(self.transform_vjp, u)
            return transposed[1](tuple(tangents))[0]
        name = self.options.name
        if self.transposed_graph is None:
            u.requires_grad_()
            with self.backward_stand_ins(), translate_errors(name):
                grads = torch.autograd.grad(
                    self.y, self.leaves, u, create_graph=True, allow_unused=True
                )
            self.transposed_graph = u, list(grads)
        u, found = self.transposed_graph
        pairs = [
            (g, t)
            for g, t in zip(found, tangents, strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:
            return torch.zeros_like(self.y)
        with self.backward_stand_ins(), translate_errors(name):
            (product,) = torch.autograd.grad(
                [g for g, _ in pairs], u, [t for _, t in pairs], retain_graph=True
            )
        return product

    def score_gradient(self) -> Vector:
        """The gradient of each sample's score by its own entries of x."""
        y, count = self.y, self.count()
        if y.numel() != count or (y.dim() and y.shape[0] != count):
            advice = (
                "this is one number for all samples: leave out the mean over the batch."
                if y.dim() == 0
                else "reduce the numbers of each sample, for instance with "
                "`output=lambda y: y.flatten(1).mean(1)`, select another output with output=, or, if "
                "rows of the points are parts of samples, pass batch=, the sample of each row."
            )
            raise ArgumentValueError(
                f"{self.options.name}: expected one number for each of {count} samples, [{count}] or "
                f"[{count}, 1], got {validation.describe(y)}; {advice}"
            )
        return self.vjp(None)

    def output_rows(self) -> Tensor:
        """The output as [N, C]."""
        y, count = self.y, self.count()
        if not y.dim() or y.shape[0] != count:
            raise ArgumentValueError(
                f"{self.options.name}: expected an output with one row for each of {count} samples, "
                f"got {validation.describe(y)}; leave out the mean over the batch, or select "
                "another output with output=."
            )
        return y.reshape(count, -1)

    def squared_norms(self, grads: Vector) -> Tensor:
        """|g_n|^2 of each sample: [N]."""
        assert self.samples is not None
        return self.samples.squared_norms(grads)

    def count(self) -> int:
        """The number of samples, N."""
        assert self.samples is not None
        if self.y.dim():
            self.samples.set_count(len(self.y))
        assert self.samples.count is not None
        return self.samples.count

    def random(self, sampler: Any, shape: tuple[int, ...]) -> Tensor:
        """Random numbers like the output, from the generator."""
        if self.draws is not None:
            return self.draws(self.y, sampler, shape, self.options.generator)
        return random_like(self.y, sampler, shape, self.options.generator)

    def backward_stand_ins(self) -> AbstractContextManager[None]:
        """The stand-ins, for backward passes that run Python code, which may call what they replace."""
        use = self.options.stand_ins and self.graph.needs_stand_ins
        return stand_ins_if(True) if use else nullcontext()

    def no_gradient_flow(self, reason: str) -> NoSecondDerivative:
        """The error of a penalty at these points that has no effect."""
        x = self.tree(self.leaves)
        return no_gradient_flow(self.options.name, reason, self.func, x, self.args)

    def _select(self, outputs: Any) -> Tensor:
        """The output that is differentiated, checked."""
        y = select_output(outputs, self.options.output)
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise ArgumentTypeError(
                f"{self.options.name}: expected a function that returns a real floating-point "
                f"tensor, got {validation.describe(y)}; select an output with output=."
            )
        return y

    def _evaluate_in_transform(self) -> None:
        """Inside torch.func transforms, whose levels autograd.grad does not see: by torch.func.vjp."""

        def function(*leaves: Tensor) -> tuple[Tensor, Any]:
            with stand_ins_if(self.options.stand_ins):
                outputs = self.func(self.tree(list(leaves)), *self.args)
            return self._select(outputs), outputs

        self.leaves, self.trainable = self.points, []
        self.create_graph = True
        evaluated: Any = torch.func.vjp(function, *self.points, has_aux=True)
        self.y, vjp, self.outputs = evaluated

        def vjp_with_stand_ins(u: Tensor) -> tuple[Tensor, ...]:
            with stand_ins_if(self.options.stand_ins):
                found: tuple[Tensor, ...] = vjp(u)
            return found

        self.transform_vjp = vjp_with_stand_ins


def check_gradient_flow(name: str, graph: GraphSummary) -> None:
    """Raises for a custom Function that detaches its gradient, and for compiled code, which has no
    second derivative; warns of a Function that may detach it."""
    if graph.has_compiled_code:
        raise UnsupportedError(
            f"{name}: expected operations that torch can differentiate twice, got a part that "
            "torch.compile made, which it cannot. Compile the critic as a whole (a penalty then "
            "runs its original code), or call that part inside "
            "`torch.compiler.set_stance('force_eager')`."
        )
    try:
        check_custom_functions(graph, name)
    except NoSecondDerivative as error:
        raise NoSecondDerivative(
            f"{name}: this penalty has no effect because its gradient is detached in a custom "
            f"Function. {error}"
        ) from error


def no_gradient_flow(
    name: str, reason: str, func: Function, x: Any, args: tuple[Any, ...]
) -> NoSecondDerivative:
    """The error of a penalty without effect, with the places where the gradient is detached."""
    places = _detached_places(func, x, args)
    where = (
        f"The gradient is detached by {'; by '.join(places)}."
        if places
        else "No call detaches it: the modules that the points go through are frozen, or the gradient "
        "by the points is the same for all values of the parameters."
    )
    return NoSecondDerivative(
        f"{name}: this penalty has no effect because {reason}. {where} Change that, or compute the "
        "penalty under torch.no_grad() if only its value is needed."
    )


def _detached_places(func: Function, x: Any, args: tuple[Any, ...]) -> list[str]:
    """Where a call of the function detaches; else its Functions, whose backward may."""
    with DetachmentWatch(module=in_module) as watch, suppress(Exception):
        with watching_functions(lambda function, given: None) as applying:
            watch.applying = applying
            result = func(x, *args)
        places = [str(detached) for detached in watch.detached]
        if not places and isinstance(result, Tensor):
            functions = [entry.function for entry in graph_summary(result).user_functions]
            places = [f"the backward of {f.__qualname__}" for f in functions if f is not None]
        return list(dict.fromkeys(places))
    return []


# Parameters and dtypes of the function


def autocast_devices(tensors: Sequence[Tensor]) -> list[str]:
    """The device types of the tensors for which autocast is on."""
    return [kind for kind in {x.device.type for x in tensors} if mixed_precision.autocast_on(kind)]


def without_autocast(kinds: Sequence[str]) -> AbstractContextManager[object]:
    """Inside, autocast is off on devices of these types."""
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def cast_like_parameters(params: Iterable[Tensor], tree: Any) -> Any:
    """The tree with half-precision tensors, as an autocast region returns them, in float32; and with
    all of them in half precision if the parameters are."""
    dtypes = {p.dtype for p in params if p.is_floating_point()}
    wanted = (
        dtypes.pop()
        if len(dtypes) == 1 and dtypes < set(mixed_precision.HALF_DTYPES)
        else torch.float32
    )
    others = {torch.float32, *mixed_precision.HALF_DTYPES}
    return pytree.map_tensors(lambda x: x.to(wanted) if x.dtype in others else x, tree)


def parameters_of(func: Callable[..., Any]) -> Iterable[Tensor]:
    """The parameters of the module that a function is, or is a method of."""
    owner = owner_of(func)
    return owner.parameters() if isinstance(owner, nn.Module) else ()
