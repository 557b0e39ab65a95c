"""A second look at the first product through a custom Function: one central difference of the gradient.

What a Function's backward leaves out of the second derivative cannot be seen in its graph in every
case (a NumPy number kept on ctx, a detach() on a saved tensor). So the first time that a product runs
through a Function of the user's it is compared, coarsely, with a difference of gradients; that costs
four gradients, once for each Function in a process, and says nothing of later inputs: `hoglib.verify`
does. A gradient that is stopped on purpose, all of it zero, is let be.
"""

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function

from hoglib import _tree
from hoglib._differences import Function as Differentiated
from hoglib._differences import distance, gradient_of, same_random_numbers, slopes
from hoglib._gradient_graph import gradient_graph, through
from hoglib._graph import users_functions
from hoglib._guarding import guarded
from hoglib._leaves import Vector, filled, own_leaves
from hoglib._warning import warn

STEPS = (1e-2, 1e-3)
OFF = 0.05  # of the product; a smooth function is off by a hundredth of that in float32
_SEEN: WeakSet[type[Function]] = WeakSet()


def new_functions(value: Tensor) -> list[type[Function]]:
    """The custom Functions that a value was computed by, and that no product ran through before."""
    if value.dtype not in (torch.float32, torch.float64) or not guarded():
        return []
    found = {function for _, function in users_functions(value)} - set(_SEEN)
    return sorted(found, key=lambda function: function.__qualname__)


def look_at_gradient(
    what: str,
    functions: list[type[Function]],
    func: Callable[..., Tensor],
    leaves: Vector,
    vector: Vector,
) -> None:
    """Warns where a product with the Hessian of func is not the difference of its gradients.

    The product is made anew, by the random numbers that the differences have.
    """
    with same_random_numbers(leaves), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to tell of a cut was told
        _, own, gradient = gradient_graph(func, leaves, what, create_graph=False)
        product = filled(through(gradient, own, vector, what), own)
    look(what, functions, gradient_of(func), func, leaves, vector, product)


def look(
    what: str,
    functions: list[type[Function]],
    function: Differentiated,
    func: Callable[..., Tensor],
    leaves: Vector,
    vector: Vector,
    product: Vector,
) -> None:
    """Warns where a product is not the difference, along the vector, of a function of the leaves.

    func: what the user wrote, of the same leaves, of which `function` holds first derivatives.
    """
    for seen in functions:
        _SEEN.add(seen)
    if not _tree.norm([v.detach() for v in vector]):
        return
    found = slopes(function, leaves, vector, STEPS)
    off = [distance(slope, product) for slope in found]
    apart = distance(*found)  # of two steps: by a kink, or by rounding
    scale = max(float(_tree.norm([x.detach() for x in parts])) for parts in (found[0], product))
    if min(off) > OFF * scale and min(off) > 5 * apart and not _stops(func, leaves):
        names = ", ".join(function.__qualname__ for function in functions)
        warn(
            f"{what}: the second derivative differs by {min(off) / scale:.0%} from a difference of "
            f"first ones. It runs through {names}, whose backward may be cut from its graph, or be no "
            f"derivative: `hoglib.verify({functions[0].__name__}, inputs)` tells.",
        )


def _stops(func: Callable[..., Tensor], leaves: Vector) -> bool:
    """Whether a custom Function gives zeros for a gradient."""
    own = own_leaves(leaves, False)
    value = func(*own)
    stopped: list[bool] = []

    def note(returned: Any, incoming: Any) -> None:
        given = [g for g in returned if isinstance(g, Tensor) and g.is_floating_point()]
        stopped.append(any(not bool(g.any()) for g in given))

    for node, _ in users_functions(value):
        node.register_hook(note)
    torch.autograd.grad(value, own, allow_unused=True)
    return any(stopped)
