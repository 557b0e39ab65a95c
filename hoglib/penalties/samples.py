"""The points of a penalty: their checks, the sample of each row, and random points."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Generator, Tensor

from hoglib._core.messages import validation
from hoglib._core.torch_api import pytree
from hoglib._core.torch_api.mixed_precision import upcast_dtype, upcast_half
from hoglib._core.torch_api.pytree import Tree
from hoglib._core.torch_api.torch_internals import tracing
from hoglib.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

EMPTY = "{}: expected at least one sample, got none; skip empty batches."


def interpolate(name: str, real: Any, fake: Any, batch: Any, generator: Generator | None) -> Any:
    """x_n = e_n real_n + (1 - e_n) fake_n, e_n ~ U(0, 1): one e for all entries of a sample."""
    leaves, structure = check_points(name, "real", real)
    others, structure_of_fake = check_points(name, "fake", fake)
    if structure_of_fake != structure:
        raise ArgumentValueError(
            f"{name}: expected fake with the structure of real, {_describe_tree(real)}, got "
            f"{_describe_tree(fake)}."
        )
    _check_same_shapes(name, real, leaves, others)
    samples = Samples(name, leaves, structure, batch)
    if samples.count is None:
        raise UnsupportedError(
            f"{name}(batch=...): expected a call outside of compiled code, because the number of "
            "random coefficients depends on the values of batch; pass compile=True to the penalty "
            "instead, or use r1 at points that are drawn outside."
        )
    e = random_like(leaves[0], torch.rand, (samples.count or 0,), generator)
    mixed = []
    for a, b, index in zip(leaves, others, samples.index, strict=True):
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
        of_rows = (e if index is None else e[index]).to(a).reshape(-1, *[1] * (a.dim() - 1))
        mixed.append(torch.lerp(b, a, of_rows.expand_as(a)))
    return pytree.unflatten(mixed, structure)


def add_noise(name: str, real: Tree, std: float | None, generator: Generator | None) -> Any:
    """x = real + d, d ~ N(0, std^2) for each entry; std None: half the deviation of the batch."""
    leaves, structure = check_points(name, "real", real)
    moved = []
    for leaf in leaves:
        d = random_like(leaf, torch.randn, leaf.shape, generator).to(leaf)
        scale: Tensor | float = 0.0 if std is None else std
        if std is None and leaf.numel():
            scale = 0.5 * leaf.detach().std(correction=0)
        moved.append(leaf + scale * d)
    return pytree.unflatten(moved, structure)


def random_like(like: Tensor, sampler: Any, shape: Any, generator: Generator | None) -> Tensor:
    """Random numbers on the tensor's device, drawn on the generator's device."""
    device = like.device if generator is None else generator.device
    dtype = upcast_dtype(like.dtype)
    # with generator=, torch's samplers take no symbolic sizes
    given = {} if generator is None else {"generator": generator}
    return sampler(shape, **given, device=device, dtype=dtype).to(like.device)


def check_points(name: str, argument: str, tree: Tree) -> tuple[list[Tensor], Any]:
    """Leaves and structure of a tree of points, after checks: real floating-point, [N, ...], dense."""
    leaves, structure = pytree.flatten(tree)
    if not leaves:
        raise ArgumentValueError(f"{name}: expected {argument} with at least one tensor, got none.")
    for k, leaf in enumerate(leaves):
        real = isinstance(leaf, Tensor) and leaf.is_floating_point()
        if real and leaf.dim() and leaf.layout is torch.strided:
            continue
        where = validation.leaf_name(argument, pytree.paths(tree)[k])
        if isinstance(leaf, Tensor) and not real:
            raise ArgumentTypeError(
                f"{name}: {where}: expected a real floating-point tensor to differentiate by, got "
                f"{validation.describe(leaf)}; pass labels and other inputs without a derivative after "
                "the points, as further arguments of the function."
            )
        validation.tensor(f"{name}: {where}", leaf)
        if leaf.layout is not torch.strided:
            raise ArgumentTypeError(
                f"{name}: {where}: expected a dense tensor, got one of layout {leaf.layout}; pass its "
                "values as the points, and its indices after them as a further argument."
            )
        raise ArgumentValueError(
            f"{name}: {where}: expected a leading dimension of samples, got a scalar; unsqueeze it."
        )
    return leaves, structure


@final
class Samples:
    """The sample of each row of the inputs: the row itself, or by the option `batch`.

    index: for each leaf, the sample of each row, integers [rows]; None if each row is a sample.
    count: the number of samples; with `batch` while tracing, None until the outputs are known.
    has_index: whether `batch` was given.
    """

    def __init__(self, name: str, leaves: Sequence[Tensor], structure: Any, batch: Any) -> None:
        self.index = _indices(name, leaves, structure, batch)
        rows = zip(leaves, self.index, strict=True)
        counts = [leaf.shape[0] for leaf, index in rows if index is None]  # they may be symbols
        if any(count != counts[0] for count in counts[1:]):
            raise ArgumentValueError(
                f"{name}: expected inputs with one number of samples, got leading dimensions "
                f"{', '.join(map(str, sorted({*counts})))}; if rows are not samples, pass batch=, the "
                "index of the sample that each row belongs to."
            )
        self.count = counts[0] if counts else None
        if self.count is None and not tracing():
            # as many graphs as the index names; the outputs may name more, see `set_count`
            self.count = max(int(i.max()) + 1 if len(i) else 0 for i in self.index if i is not None)
        self.has_index = batch is not None and any(i is not None for i in self.index)
        if self.count == 0:
            raise ArgumentValueError(EMPTY.format(name))

    def set_count(self, count: int) -> None:
        """Take the number of samples from the outputs, since a sample (a graph) may have no rows."""
        if self.has_index and (self.count is None or count >= self.count):
            self.count = count

    def sums(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over each sample's entries, [N]; parts has a tensor like each leaf."""
        found = []
        for part, index in zip(parts, self.index, strict=True):
            rows = part.flatten(1).sum(1) if part.dim() > 1 else part
            if index is not None:
                assert self.count is not None
                rows = rows.new_zeros(self.count).index_add(0, index, rows)
            found.append(rows)
        return sum(found[1:], found[0])

    def squared_norms(self, grads: Sequence[Tensor]) -> Tensor:
        """|g_n|^2, the sum of squares over each sample's entries, [N]; half precision is upcast."""
        return self.sums([upcast_half(g).square() for g in grads])


def _indices(name: str, leaves: Sequence[Tensor], form: Any, batch: Any) -> list[Tensor | None]:
    """The option `batch`, checked, as an index for each leaf; None if each row is a sample."""
    if batch is None:
        return [None] * len(leaves)
    if isinstance(batch, Tensor):
        found: list[Any] = [batch] * len(leaves)
    else:
        found, came = pytree.flatten(batch)
        if came != form:
            raise ArgumentValueError(
                f"{name}: expected batch as one tensor, or as a tree with the structure of the "
                f"inputs and a tensor or None for each of them, got {validation.describe(batch)}."
            )
    for index, leaf in zip(found, leaves, strict=True):
        if index is None:
            continue
        validation.tensor(f"{name}: batch", index)
        whole = index.dtype in (torch.int64, torch.int32)
        if not whole or index.shape != leaf.shape[:1]:
            raise ArgumentValueError(
                f"{name}: batch: expected integers of shape ({len(leaf)},), one for each row, got "
                f"{validation.describe(index)}" + ("." if whole else "; convert it with `.long()`.")
            )
        if len(index) and not tracing() and int(index.min()) < 0:
            text = f"{name}: batch: expected integers of at least 0, got {int(index.min())}."
            raise ArgumentValueError(text)
    return found


def _check_same_shapes(name: str, real: Tree, leaves: list[Tensor], others: list[Tensor]) -> None:
    """Raise if the shapes or devices of fake and real differ."""
    for k, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if a.shape != b.shape or a.device != b.device:
            path = pytree.paths(real)[k]
            which = f"[{path!r}]" if path else ""
            raise ArgumentValueError(
                f"{name}: expected fake{which} like real{which}, {tuple(a.shape)} on {a.device}, got "
                f"{tuple(b.shape)} on {b.device}; generate as many fake samples as there are real ones "
                "(the last batch may be smaller; graphs need equal numbers of rows), on the same "
                "device."
            )


def _describe_tree(tree: Tree) -> str:
    paths = pytree.paths(tree)
    listed = f"a {type(tree).__name__} of {len(paths)} ({', '.join(paths[:5])})"
    return "one tensor" if paths == [""] else listed
