"""Taylor mode for any function: the derivatives of a function along a path."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor, nn

from hoglib import errors
from hoglib._core.messages import validation
from hoglib._core.messages.call_errors import translate_batch_errors
from hoglib._core.modules.state import GeneratorStates
from hoglib._core.modules.swap import call_with
from hoglib._core.numerics.finite_differences import fixed_random_numbers
from hoglib._core.numerics.trust import DIGITS, agree
from hoglib._core.problem import Options, Policy
from hoglib._core.runtime.device_reads import read_late
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.runtime.source_location import first_time, warn_once
from hoglib._core.substrate.autograd import clone_inference_tensors, fresh_leaves
from hoglib._core.substrate.gradient_graph import graph_summary
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.pytree import Tree
from hoglib.capture.within import when_compiled, within_compile
from hoglib.ring import ring, run
from hoglib.taylor.kinks import Kink, Kinks, along_paths, warn_if_linear, without_derivative
from hoglib.taylor.nested import along_path
from hoglib.taylor.propagation import Propagation
from hoglib.taylor.series import Algebra, NoRule, Parts, Univariate

Leaves = list[Tensor]
TaylorMode = Literal["auto", "taylor", "nested"]


def _like_jet(value: object, options: object, primals: Any, series: Any) -> Any:
    order = len(series if isinstance(primals, Tensor) else series[0])
    return value, pytree.map(lambda y: [y.clone() for _ in range(order)], value)


@when_compiled(
    within_compile(_like_jet, lambda xs, series: (xs,) if isinstance(xs, Tensor) else xs)
)
@validation.explain_arguments
def jet(
    func: Callable[..., Any],
    primals: Tree,
    series: Tree,
    *,
    mode: TaylorMode = "auto",
    create_graph: bool | None = None,
    **options: Unpack[Options],
) -> tuple[Any, Any]:
    r"""A function and its derivatives along a path, to any order: Taylor mode.

        x(t) = x_0 + sum_k x_k t^k / k!        y(t) = func(x(t)) = y_0 + sum_k y_k t^k / k! + ...

    The coefficients x_k and y_k are derivatives of the paths by t at 0, not divided by factorials, as
    in `jax.experimental.jet`. For the K-th derivative along a direction v pass x_1 = v, and None (zero)
    for x_2, ..., x_K.

    func runs once, and each operation of torch propagates all K coefficients, by the rule of Faà di
    Bruno or Leibniz; nested derivatives cost exponentially more in K. Constants of autograd
    (`.detach()`, `torch.no_grad`) are constant here. At a kink, as of a ReLU or |x|, the first
    derivative is torch's and higher ones are zero; but if the derivatives on both sides agree, as for
    |x|^2, the result is their common value.

    A UserWarning names the lines, once, if func is piecewise linear, so that all derivatives from the
    second on are zero; if a point lies exactly at a kink and the derivatives on its sides differ; and
    if the result is infinite. An operation without a rule is decomposed into operations with rules, as
    torch decomposes it. If that is impossible, as for a custom Function of yours, the whole function is
    differentiated by nested reverse mode, which is logged at the level DEBUG.

    Args:
        func: The function ``func(*primals)``, or an `nn.Module`; it returns tensors in any containers.
        primals: The arguments x_0, a tuple of real floating-point tensors; or one tensor.
        series: For each argument the list [x_1, ..., x_K], all of one length, tensors of the
            argument's shape or None for zero; for a single tensor its list.
        mode: "taylor", which raises if an operation has no rule; "nested"; or "auto": "taylor" if every
            operation has a rule, else "nested". Inside torch.func transforms: always nested.
        create_graph: Whether the results can be differentiated again, by parameters and primals.
            Default: whether gradients are enabled.
        **options: How func is evaluated, as :class:`hoglib.Options` describes it.
    Returns:
        The pair (y_0, series): the result of func, and a copy of its structure with a list
        [y_1, ..., y_K] in place of each tensor.
    Raises:
        ArgumentTypeError, ArgumentValueError: for arguments that do not fit together.
        UnsupportedError: with mode="taylor", for an operation without a rule, by name.
    References:
        Griewank and Walther, Evaluating Derivatives, 2008, chapter 13.
        Bettencourt, Johnson and Duvenaud, Taylor-Mode Automatic Differentiation for Higher-Order
        Derivatives in JAX, 2019.
    Example:
        >>> x, one = torch.tensor(0.0), torch.tensor(1.0)
        >>> y, (d1, d2, d3) = hog.jet(torch.sin, x, [one, None, None])
        >>> d1, d2, d3  # cos 0, -sin 0, -cos 0
        (tensor(1.), tensor(-0.), tensor(-1.))
    """
    given = TaylorOptions.of("jet", func, TaylorMode, mode, create_graph, options)
    single = isinstance(primals, Tensor)
    xs, lists = _check_series((primals,) if single else primals, (series,) if single else series)

    def body(xs: list[Tensor], lists: list[Parts]) -> tuple[Any, Any]:
        K, structure = len(lists[0]), None

        def call(*inputs: Tensor) -> list[Tensor]:
            nonlocal structure
            leaves, structure = pytree.flatten(given.run(func, *inputs))
            for leaf in leaves:
                validation.tensor("func(*primals)", leaf)
            return leaves

        found: Any = by_taylor(given, Univariate(K), xs, lists, call)
        leaves, series = found or along_path("jet", call, xs, lists, K)
        pairs = zip(leaves, series, strict=True)
        done = [[as_returned(given, y, d) for d in known] for y, known in pairs]
        values = [found[0][0] for found in done]
        coefficients = [[d for _, d in found] for found in done]
        return pytree.unflatten(values, structure), pytree.unflatten(coefficients, structure)

    return given.evaluate(func, body, None, xs, lists)


class TaylorOptions(NamedTuple):
    """The checked options of an entry point of Taylor mode."""

    caller: str  # the entry point's name in messages
    policy: Policy  # how func is evaluated (stand-ins, remat, compile, ...)
    mode: str  # "auto", "nested", or the entry point's name of Taylor mode ("taylor", "collapsed")
    keep: bool  # the results have a graph, so that they can be differentiated again
    always: bool  # create_graph=True was passed: keep the graph even if no input requires grad

    @classmethod
    def of(
        cls, caller: str, func: object, modes: object, mode: str, create_graph: Any, options: Any
    ) -> "TaylorOptions":
        validation.function("func", func)
        validation.choice("mode", mode, get_args(modes))
        if create_graph is not None:
            validation.boolean("create_graph", create_graph)
        keep = torch.is_grad_enabled() if create_graph is None else create_graph
        return cls(caller, Policy.of(caller, options), mode, keep, create_graph is True)

    def evaluate(self, func: Any, body: Callable[..., Any], key: Hashable, *inputs: Any) -> Any:
        """Runs body(*inputs), which evaluates and differentiates func, inside the ring; as one captured
        graph if the policy compiles.

        key: body's options beyond self; graphs are cached by (self, key).
        """
        entered = partial(_inside_ring, self.policy, func, body)
        return run(self.policy, func, entered, (self, key), *inputs)

    def run(self, func: Callable[..., Any], *args: Any) -> Any:
        """func(*args); a module runs with copies of its buffers, because forward may change them."""
        return call_with(func, {}, *args) if isinstance(func, nn.Module) else func(*args)


def _inside_ring(policy: Policy, func: Any, body: Callable[..., Any], *inputs: Any) -> Any:
    with ring(policy, func):
        return body(*clone_inference_tensors(inputs))


def by_taylor(
    options: TaylorOptions,
    algebra: Algebra,
    inputs: Sequence[Tensor],
    parts: Sequence[Parts],
    call: Callable[..., Leaves],
) -> tuple[Leaves, list[Parts]] | None:
    """The outputs of call(*inputs) and the coefficients of each.

    None if the caller must nest derivatives instead: mode="nested", an operation has no rule, or a
    torch.func transform is active.
    """
    if options.mode == "nested" or torch_internals.transforms_active():
        return None
    # leaves that require grad, because func may call autograd.grad by its input
    own = fresh_leaves(list(inputs), options.keep)
    generators = GeneratorStates({x.device for x in inputs})
    # a traced graph cannot restore the state of a generator
    drawn = None if torch_internals.tracing() else generators.now()
    run = Propagation(algebra, options.keep)
    try:
        # a dispatch mode: each torch call of func also propagates its arguments' coefficients
        with run, translate_batch_errors(inputs, call, "inputs"):
            for x, seed in zip(own, parts, strict=True):
                run.seed(x, seed)
            value = call(*own)
        series = [run.coefficients(y) for y in value]
        graph = graph_summary(value)
        # a Function in C++ runs its forward below the mode: its terms would be lost without an error
        if graph.cpp_functions:
            raise NoRule(f"the Function {', '.join(sorted(graph.cpp_functions))} in C++")
    except NoRule as reason:
        if options.mode != "auto":
            raise errors.UnsupportedError(
                f"{options.caller}: expected operations with a rule for Taylor coefficients, got "
                f"{reason}. Use mode='nested', or write it with operations of torch."
            ) from reason
        if drawn is not None:  # func will run again, and must draw equal random numbers
            generators.set(drawn)
        LOGGER.debug("%s: nested derivatives, for want of a rule for %s", options.caller, reason)
        return None
    finally:
        run.close()
    if value and all(known is None for known in series):
        raise errors.NoSecondDerivative(
            f"{options.caller}: func: expected a value that depends on its input, got one that does "
            "not; look for .detach(), .item(), .data or a torch.no_grad() in func, and for a func that "
            "uses others than those it is given."
        )
    LOGGER.debug("%s: Taylor coefficients to order %d", options.caller, algebra.order)
    if algebra.order > 1:
        warn_if_linear(options.caller, run.kinks, algebra, series)
        if not torch_internals.tracing():
            beside = _look_at_points(options, algebra, own, parts, call, run.kinks, (value, series))
            value, series = beside or (value, series)
    if options.keep and not (options.always or any(x.requires_grad for x in inputs)):
        ours = {id(x) for x in own}
        if all(key in ours for key in graph.leaves):  # backward would reach only our own copies
            value = [y.detach() for y in value]
            series = [known and [p if p is None else p.detach() for p in known] for known in series]
    return value, [algebra.zeros() if known is None else known for known in series]


def _look_at_points(
    options: TaylorOptions,
    algebra: Algebra,
    inputs: Sequence[Tensor],
    parts: Sequence[Parts],
    call: Callable[..., Leaves],
    kinks: Kinks,
    results: tuple[Leaves, Sequence[Parts | None]],
) -> tuple[Leaves, list[Parts | None]] | None:
    """Warns of points where a derivative does not exist; the corrected results, or None.

    If a point lies exactly at a kink, func runs three more times: for the derivatives before, at (by
    torch's rules) and after it. If all agree (relu(x)**3 at 0, to order 2) the results stand. If the
    sides agree with each other but not with torch's rules (|x|**2), the one-sided results are right and
    returned. Otherwise the derivative does not exist, and a warning says so. If a result is infinite or
    NaN, func runs again to find the operation at fault.
    """
    order, caller = algebra.order, options.caller
    detached = [x.detach() for x in inputs]

    def again(
        algebra: Algebra, parts: Sequence[Parts], keep: bool = False, **kwargs: Any
    ) -> tuple[Leaves, list[Parts], Kinks]:
        own = [x if keep else x.detach().requires_grad_() for x in inputs]
        run = Propagation(algebra, keep, **kwargs)
        try:
            # draws here must not move the user's generators
            with fixed_random_numbers(detached), run:
                for x, seed in zip(own, parts, strict=True):
                    run.seed(x, [p if p is None or keep else p.detach() for p in seed])
                values = call(*own)
            return values, [run.coefficients(y) or algebra.zeros() for y in values], run.kinks
        finally:
            run.close()

    # once per source line, because a look takes three runs of func
    new = [kink for kink in kinks.crossed if first_time(f"{caller}, order {order}: {kink}")]
    if new or kinks.even:
        paths, seeds = along_paths(algebra, parts)
        before, given, after = (again(paths, seeds, side=side)[1] for side in (-1, 0, 1))
        same = _coefficients_agree(before, after)
        # smooth, but torch's rules are wrong: the second derivative of |x|^2 at 0 is 2, not 0
        if same and isinstance(algebra, Univariate) and not _coefficients_agree(given, after):
            found, right, _ = again(algebra, parts, options.keep, side=1)
            return found, list(right)
        if not (same and _coefficients_agree(given, after)):
            warn_once(without_derivative(caller, order, new or kinks.crossed))
    values, series = results
    ends = [known[-1] for known in series if known is not None and known[-1] is not None]
    if _is_not_finite((caller, order), values, ends):
        where = again(algebra, parts, first_infinite=True)[2].not_finite
        if where is None and values[0].device.type != "cpu":
            where = Kink("an operation of an earlier call", None)
        if where is not None:
            warn_once(
                f"{caller}: expected points where func has a derivative of order {order}, got some "
                f"where it is infinite or NaN, first behind {where}. sqrt(x), x**1.5 and 1/x have none "
                "at 0: add a small constant inside, or move the points."
            )
    return None


def _is_not_finite(key: Hashable, values: Leaves, ends: Leaves) -> bool:
    """Whether a derivative is infinite or NaN although all values are finite.

    On a device the flags are read late: the answer is about an earlier call with these shapes.
    """
    if not ends:
        return False
    every = [*values, *ends]
    flags = torch.stack([x.isfinite().all().to(values[0].device) for x in every])
    found = read_late((key, *(x.shape for x in every)), flags)
    return found is not None and bool(found[: len(values)].all() and not found.all())


def _coefficients_agree(a: Sequence[Parts], b: Sequence[Parts]) -> bool:
    """Whether the coefficients are equal up to rounding."""
    for p, q in zip(chain(*a), chain(*b), strict=True):
        known = q if p is None else p
        if known is None:
            continue
        p, q = (torch.zeros_like(known) if part is None else part for part in (p, q))
        if not agree(p, q, DIGITS):
            return False
    return True


def as_returned(options: TaylorOptions, value: Tensor, d: Tensor | None) -> tuple[Tensor, Tensor]:
    """Value and derivative for the caller: with a graph if options.keep, else detached copies."""
    d = torch.zeros_like(value) if d is None else d
    if torch_internals.transforms_active():
        return value, d
    if not options.keep:
        return value.detach().clone(), d.detach().clone()
    if value.requires_grad and not d.requires_grad:
        # connect a zero derivative to the graph, so that a loss of it has a (zero) gradient
        d = d + value.masked_fill(torch.ones_like(value, dtype=torch.bool), 0)
    return value, d


def _check_series(primals: Any, series: Any) -> tuple[list[Tensor], list[Parts]]:
    """The checked arguments as a list, and for each its list of coefficients, all of one length."""
    for what, value in (("primals", primals), ("series", series)):
        if not isinstance(value, tuple | list):
            raise errors.ArgumentTypeError(
                f"{what}: expected a tuple with one entry for each argument of func, got "
                f"{validation.describe(value)}."
            )
    if not primals or len(primals) != len(series):
        raise errors.ArgumentValueError(
            f"series: expected one list for each of the {len(primals)} primals, at least one, got "
            f"{len(series)}."
        )
    lengths = set()
    for i, (x, parts) in enumerate(zip(primals, series, strict=True)):
        validation.real(f"primals[{i}]", x)
        if not isinstance(parts, tuple | list) or not parts:
            raise errors.ArgumentTypeError(
                f"series[{i}]: expected a list [x_1, ..., x_K] of at least one tensor, got "
                f"{validation.describe(parts)}."
            )
        lengths.add(len(parts))
        for k, part in enumerate(parts):
            if part is None:
                continue
            validation.tensor(f"series[{i}][{k}]", part)
            if (part.shape, part.dtype, part.device) != (x.shape, x.dtype, x.device):
                raise errors.ArgumentValueError(
                    f"series[{i}][{k}]: expected a tensor like primals[{i}], "
                    f"{validation.describe(x)}, got {validation.describe(part)} on {part.device}."
                )
    if len(lengths) > 1:
        raise errors.ArgumentValueError(
            f"series: expected lists of one length K, the order, got lengths {sorted(lengths)}; "
            "fill the shorter ones with None, which is zero."
        )
    if all(part is None for parts in series for part in parts):
        raise errors.ArgumentValueError(
            "series: expected at least one tensor, got None only: the path is a point; pass the "
            "direction as the first coefficient."
        )
    return list(primals), [list(parts) for parts in series]
