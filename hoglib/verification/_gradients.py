"""The gradients that a Function returns: number, shape, dtype and device, and that they are linear."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hoglib import _tree
from hoglib.verification import _plain as plain
from hoglib.verification._application import Application
from hoglib.verification._call import is_float
from hoglib.verification._differences import largest
from hoglib.verification._plain import Run
from hoglib.verification.report import Row

UNSUMMED = (
    "Sum it back over the broadcast dimensions, `grad.sum_to_size({bare}.shape)`: autograd does so "
    "for gradients that are too large, but only where the shapes allow it, and after the full size "
    "was computed."
)


def gradients(app: Application) -> list[Row]:
    run = app.seeded()
    hidden = list(_outputs(run))
    if hidden:
        return hidden
    returned = plain.backward(app.function, run.record, run.incoming())
    number = _number(app, run, returned)
    if number.status == "fail":
        return [number]
    faults: dict[str, list[str]] = {"shape": [], "dtype": [], "device": []}
    for i, (x, grad) in enumerate(zip(run.inputs, returned, strict=False)):
        if i not in app.by or not isinstance(grad, Tensor):
            continue
        name = app.name(i)
        if grad.shape != x.shape:
            faults["shape"].append(_shape(name, x, grad))
        if grad.dtype != x.dtype:
            faults["dtype"].append(
                f"the gradient of {name} is {grad.dtype}, and {name} {x.dtype}: autograd casts it, "
                f"and what was rounded is gone. Make constants with `dtype={name.strip('`')}.dtype`."
            )
        if grad.device != x.device:
            faults["device"].append(
                f"the gradient of {name} is on {grad.device}, and {name} on {x.device}."
            )
    return [
        number,
        *_tangents(app, run),
        *(
            Row(f"gradients: {what}", "fail" if texts else "pass", None, " ".join(texts))
            for what, texts in faults.items()
        ),
    ]


def _outputs(run: Run) -> Iterator[Row]:
    """Tensors in a list or a dict, which autograd hands through as they are."""
    hidden = [
        type(y).__name__
        for y in run.outputs
        if not isinstance(y, Tensor) and any(isinstance(leaf, Tensor) for leaf in _tree.leaves(y))
    ]
    if hidden:
        yield Row(
            "outputs: type", "fail", None,
            f"forward returns tensors in a {hidden[0]}, into which autograd does not look: its "
            "backward is never run. Return a tensor, or a tuple of tensors.",
        )  # fmt: skip


def _tangents(app: Application, run: Run) -> Iterator[Row]:
    """Shapes and dtypes of what the jvp returns."""
    if not plain.offers_jvp(app.function):
        return
    tangents = [torch.ones_like(x) if i in app.by else None for i, x in enumerate(run.inputs)]
    try:
        returned = plain.jvp(app.function, run.record, tangents)
    except Exception:  # judged with the derivatives
        return
    faults = []
    if len(returned) != len(run.outputs):
        faults.append(f"jvp returns {len(returned)} tangents for {len(run.outputs)} outputs.")
    for k, (y, t) in enumerate(zip(run.outputs, returned, strict=False)):
        if isinstance(t, Tensor) and isinstance(y, Tensor):
            if t.shape != y.shape:
                shapes = f"{tuple(t.shape)}, and the output {tuple(y.shape)}"
                faults.append(f"the tangent of output {k} has shape {shapes}.")
            if t.dtype != y.dtype and is_float(y):
                faults.append(f"the tangent of output {k} is {t.dtype}, and the output {y.dtype}.")
    text = f"{' '.join(faults)} A tangent is like its output." if faults else ""
    yield Row("tangents: shape and dtype", "fail" if faults else "pass", None, text)


def _number(app: Application, run: Run, returned: Sequence[Any]) -> Row:
    name = "gradients: number"
    inputs, given = len(run.inputs), len(returned)
    extra = [grad for grad in returned[inputs:] if grad is not None]
    if given < inputs or extra:
        return Row(
            name, "fail", None,
            f"the wrong number of gradients: backward returns {given}, and forward has {inputs} "
            f"inputs. Return one for each input in their order, None for what has no gradient.",
        )  # fmt: skip
    for i, grad in enumerate(returned[:inputs]):
        x = run.inputs[i]
        if grad is not None and not isinstance(grad, Tensor):
            return Row(
                name, "fail", None,
                f"the gradient of {app.name(i)} is no tensor but a {type(grad).__name__}; return a "
                "tensor or None, and several gradients as a tuple.",
            )  # fmt: skip
        if grad is not None and not isinstance(x, Tensor):
            return Row(
                name, "fail", None,
                f"backward returns a gradient for {app.name(i)}, which is no tensor; return None in "
                "its place. Are the gradients in the order of the inputs?",
            )  # fmt: skip
    return Row(name, "pass")


def _shape(name: str, x: Tensor, grad: Tensor) -> str:
    bare = name.strip("`")
    text = f"the gradient of {name} has shape {tuple(grad.shape)}, and {name} {tuple(x.shape)}."
    if tuple(x.shape) != () and tuple(grad.shape) == tuple(reversed(x.shape)):
        return f"{text} It is transposed: return its transpose."
    if _expands(x.shape, grad.shape):
        return f"{text} The sum over broadcast dimensions is missing. " + UNSUMMED.format(bare=bare)
    if _expands(grad.shape, x.shape):
        return (
            f"{text} It was summed over too many dimensions; expand it, "
            f"`grad.expand({bare}.shape)`, or sum over fewer."
        )
    return f"{text} A gradient has the shape of its input."


def _expands(small: Sequence[int], large: Sequence[int]) -> bool:
    if len(small) > len(large):
        return False
    pairs = zip(reversed(small), reversed(large), strict=False)
    return all(a in (1, b) for a, b in pairs)


def linear(app: Application) -> list[Row]:
    """B(2 g) = 2 B(g): a gradient is linear in the incoming one."""
    name = "gradients: linear"
    run = app.seeded()
    grads = run.incoming()

    def returned(factor: float) -> list[Tensor]:
        torch.manual_seed(0)
        scaled = [None if g is None else factor * g for g in grads]
        found = plain.backward(app.function, app.seeded().record, scaled)
        return [g for g in found if is_float(g)]

    once, twice = returned(1.0), returned(-2.0)
    if all(_close(-2.0 * a, b) for a, b in zip(once, twice, strict=True)):
        return [Row(name, "pass")]
    text = (
        "backward is not linear in grad_output: twice the incoming gradient is not twice the result. "
        "Is grad_output ignored, or used twice? If it is clipped on purpose, pass surrogate=True."
    )
    return [Row(name, "fail", None, text)]


def _close(a: Tensor, b: Tensor) -> bool:
    size = max(largest(a), largest(b), 1e-300)
    return a.shape == b.shape and largest(a - b) <= torch.finfo(a.dtype).eps ** 0.5 * size
