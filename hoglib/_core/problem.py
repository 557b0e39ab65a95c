"""The input of every algorithm: the user's function as a pure function of a list of leaves, and the
leaves.

    problem = Problem.of(policy, loss, params, *args)
    f = problem(*problem.leaves)                 # a scalar, whatever module, batch or mesh is behind it
    tree = problem.tree(vector)                  # a vector in the structure of the user's params

`Policy` holds the options of the entry point, which were checked once.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, final

from torch import Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.messages.closures import STATE, ClosureWalker
from hoglib._core.messages.communication import is_sharded
from hoglib._core.numerics.finite_differences import to_double
from hoglib._core.remat.blocks import Remat, check_remat, find_blocks
from hoglib._core.runtime.source_location import entry_keywords, warn_once
from hoglib._core.substrate.autograd import Vector, clone_inference_tensors
from hoglib._core.substrate.placement import (
    UNSHARDED,
    Placement,
    Sharding,
    full_tensor,
    placement_of,
)
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_sharding import wrapped_attributes
from hoglib.errors import ArgumentTypeError, UnsupportedError


class EvaluationOptions(TypedDict, total=False):
    """The options of all entry points, and of learners: how a model is evaluated."""

    stand_ins: bool
    remat: Remat


class Options(EvaluationOptions, total=False):
    """The keyword options of every function that differentiates a user's function.

    Args:
        stand_ins: Run the function inside :func:`hoglib.second_order`, which replaces torch calls that
            lack a second derivative, or have a wrong one, by functions with a right one.
            Default: True.
        remat: Blocks of the model that :func:`hoglib.ops.remat` recomputes in backward, instead of
            keeping their intermediate values: True for the blocks that the model repeats, or names or
            globs of blocks, as "layers.*". It takes less memory and more time; results do not change.
            Default: False.
        compile: Capture the computation as a graph and compile it: True for inductor, "eager" to run
            the captured graph by torch, or a mode of ``torch.compile``, as "reduce-overhead" (CUDA
            graphs) and "max-autotune". Later calls with an equal signature reuse the graph, also if the
            function is created anew for each call. With remat, the passes of each block are compiled
            instead, once for all equal blocks. Default: False.
    Returns:
        A dict of options, to be passed as ``**options``.
    Example:
        >>> options = hog.Options(compile="eager")
        >>> p, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> hog.hvp(lambda p: p[0] ** 2 * p[1], p, v, **options)
        (tensor(2.), tensor([4., 2.]))
    """

    compile: bool | str


OPTION_NAMES = tuple(Options.__annotations__)


class Policy(NamedTuple):
    """The checked options of an entry point: how a user's function is evaluated and differentiated."""

    caller: str  # the public function or class, for messages
    create_graph: bool = False  # results can be differentiated again, as in torch.autograd.grad
    stand_ins: bool = True  # run the function inside `second_order`
    remat: Remat = False  # blocks of the model to be recomputed
    backend: str = ""  # that the option compile= names; "" for none
    strict: tuple[str, ...] | None = None  # leaf names; each must have a second derivative

    @classmethod
    def of(
        cls,
        caller: str,
        options: Mapping[str, Any],
        create_graph: bool = False,
        strict: tuple[str, ...] | None = None,
        names: Sequence[str] = OPTION_NAMES,
        functions: bool = False,
    ) -> "Policy":
        """The options with their defaults; an error names a wrong option.

        functions: Accept a function, which compiles a graph, as `compile`.
        """
        if not options:
            return cls(caller, create_graph, strict=strict)
        check_option_names(caller, options, names)
        chosen: Any = options.get("compile", False)
        if not (functions and callable(chosen)):
            chosen = validation.backend("compile", chosen)
        stand_ins = validation.boolean("stand_ins", options.get("stand_ins", True))
        remat = check_remat(options.get("remat", False))
        return cls(caller, create_graph, stand_ins, remat, chosen, strict)

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled: one graph of all, or the recomputed blocks."""
        return bool(self.backend)

    @property
    def one_graph(self) -> bool:
        """Whether the whole computation is captured as one graph."""
        return bool(self.backend) and self.remat is False

    @property
    def compiles_blocks(self) -> bool:
        """Whether only recomputed blocks are compiled: their passes, not the computation around
        them."""
        return bool(self.backend) and self.remat is not False

    def check_blocks(self, func: Callable[..., Any]) -> None:
        """Raise if `remat` names blocks that the function does not have."""
        if self.remat is not False:
            find_blocks(self.remat, func)


def check_option_names(
    caller: str, options: Mapping[str, Any], names: Sequence[str], advice: str = ""
) -> None:
    """Raise for a keyword that is not among the names."""
    for key in options:
        if key not in names:
            known = dict.fromkeys((*entry_keywords(), *names))
            raise ArgumentTypeError(
                f"{caller}: expected options among {', '.join(known)}, got {key!r}"
                f"{validation.did_you_mean(key, known)}{advice}"
            )


def refuse_wrapped_calls(caller: str, func: Callable[..., Any]) -> None:
    """Raise for a function that calls, by itself, a module with hooks that gather its parameters."""
    if getattr(func, "model", None) is None and any(
        isinstance(part, nn.Module) and wrapped_attributes(part, mixed_precision=True)
        for found in ClosureWalker(func, STATE).objects
        for part in (found.modules() if isinstance(found, nn.Module) else ())
    ):
        raise UnsupportedError(
            f"{caller}: expected `hoglib.functional_loss(model, criterion, forward=...)` of a "
            "module whose parameters are DTensors, got another function that calls it: its hooks would "
            "gather the module's own parameters."
        )


def warn_if_replaced(caller: str, loss: object, params: Tree) -> None:
    """Warn if `params` has a parameter that the model of a functional loss has replaced since."""
    find = getattr(loss, "_replaced_parameter", None)
    name = find(params) if find is not None else ""
    if name:
        warn_once(
            f"{caller}: params[{name!r}] was the model's parameter, and the model has another one now, "
            "as after `load_state_dict(assign=True)`: the derivative is at the values from before. "
            "Call `hoglib.trainable_params(model)` again, and make operators anew."
        )


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """A loss with its other arguments bound, at a point: f(p) = loss(params, *args) of the leaves p.

    Attributes:
        policy: The options of the entry point.
        loss: The user's function.
        structure: The structure of the user's params, from `pytree.flatten`.
        leaves: p; of sharded parameters, this process's shards.
        args: The arguments after params.
        placement: The distribution of the leaves over processes.
        call: The call of `loss`, for messages.
    """

    policy: Policy
    loss: Any
    structure: Any
    leaves: Vector
    args: tuple[Any, ...]
    placement: Placement = UNSHARDED
    call: str = "func(params, *args)"

    @classmethod
    def of(cls, policy: Policy, loss: object, params: Tree, *args: Any) -> "Problem":
        validation.not_the_model("func", loss, params)
        leaves, structure = validation.parameters(params)
        warn_if_replaced(policy.caller, loss, params)
        placement = placement_of(leaves, lambda: pytree.paths(params))
        return cls(policy, loss, structure, placement.local(leaves), args, placement)

    def __call__(self, *leaves: Tensor) -> Tensor:
        """f at these leaves; of sharded leaves, the mean over the processes."""
        params = pytree.unflatten(self.placement.gather(leaves), self.structure)
        return self.placement.mean_of(
            lambda: validation.scalar(self.call, self.loss(params, *self.args))
        )

    def params(self, leaves: Sequence[Tensor]) -> Any:
        """The user's params, whole, with these leaves."""
        return pytree.unflatten(self.placement.gather(leaves), self.structure)

    def tree(self, vector: Sequence[Tensor]) -> Any:
        """A vector with the structure and the placement of the user's params."""
        return pytree.unflatten(self.placement.wrap(vector), self.structure)

    def gathered(self) -> "Problem":
        """A copy at whole parameters on this process alone: its loss communicates nothing."""
        if not isinstance(self.placement, Sharding):
            return self
        loss, model = self.loss, getattr(self.loss, "model", None)
        own = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
        # sharded parameters of the model that params does not contain
        names = [n for n, p in own.items() if is_sharded(p) and n not in self.placement.names]
        with self.placement.together(self.policy.caller):
            if names and hasattr(loss, "with_parameters"):
                loss = loss.with_parameters({n: full_tensor(own[n]) for n in names})
            leaves = [x.detach() for x in self.placement.gather(self.leaves)]
        return replace(self, loss=loss, leaves=leaves, placement=UNSHARDED)

    def weighted_by_rows(self) -> "Problem":
        """The same, as the mean over the rows of the batches of processes that share parameters."""
        assert isinstance(self.placement, Sharding)
        rows = next((len(x) for x in pytree.tensors(self.args) if x.dim()), 1)
        return replace(self, placement=self.placement.weighted_by(rows))

    def with_args(self, *args: Any) -> "Problem":
        """A copy with other arguments."""
        return replace(self, args=args)

    def in_double(self) -> "Problem":
        """A copy in float64; the user's loss is not changed."""
        loss = self.loss
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).double()
        elif hasattr(loss, "double"):
            loss = loss.double()
        leaves, args = to_double((self.leaves, self.args))
        return replace(self, loss=loss, leaves=leaves, args=args)

    def entered(self, blocks: Sequence[Any]) -> "Problem":
        """A copy without inference tensors, which autograd refuses to save, in which recomputed blocks
        gather their sharded parameters when they run."""
        leaves, args = clone_inference_tensors((self.leaves, self.args))
        placement = self.placement
        if blocks:  # a short cut: looking for an attribute that a module lacks is slow
            placement = placement.defer(getattr(self.loss, "model", None), blocks)
        if leaves is self.leaves and args is self.args and placement is self.placement:
            return self
        return replace(self, leaves=leaves, args=args, placement=placement)
