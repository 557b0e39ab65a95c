"""Parameters that torch.distributed shards (DTensor), as the whole tensors that a loss takes.

Process r computes the loss f_r of its own batch, and differentiates by its own shards x. With weights
w_r that add up to one,

    gather(x) = the whole tensors               average(a) = the shards of sum_r w_r a_r

are adjoint maps, for the inner product  <x, y> = sum over all shards  of shards and
<a, b> = sum_r w_r <a_r, b_r>  of whole tensors a_r, which differ between processes. The backward of
gather is average, and the backward of average is gather, so autograd gives derivatives of
sum_r w_r f_r of any order.
"""

import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat, zip_longest
from math import prod
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hoglib._core.messages.communication import is_sharded, mesh_of, tell, together, words_of_others
from hoglib._core.substrate.fingerprint import checksum_of_call, checksum_of_tensors
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.torch_internals import apply
from hoglib.errors import ArgumentValueError, DistributedError, UnsupportedError

Vector = list[Tensor]
ROUNDING = 1e-9  # allowed relative difference of checksums: machines may differ
# For messages: the four numbers that `Sharding.check_agreement` compares between processes.
AGREEMENT = (
    "call, with its options, criterion and parameters,",
    "number of vectors",
    "vectors, where they are not sharded,",
    "parameters, where they are not sharded,",
)
INSTEAD = "for anything else pass `p.full_tensor()` of each, or the model before it is sharded"


def any_sharded(values: Iterable[object]) -> bool:
    """Whether one of the values is a DTensor."""
    library: Any = sys.modules.get("torch.distributed.tensor")
    return library is not None and any(map(isinstance, values, repeat(library.DTensor)))


def full_tensor(value: Any) -> Any:
    """The whole tensor of a DTensor, without a graph; other values unchanged."""
    if not is_sharded(value):
        return value
    with torch_internals.without_transforms(), torch.no_grad():
        return value.full_tensor()


def refuse_sharded(
    caller: str, tensors: Iterable[Any], what: str = "params", instead: str = INSTEAD
) -> None:
    """Raise for DTensors, in a function that takes only whole tensors."""
    if any_sharded(tensors):
        raise UnsupportedError(
            f"{caller}: expected {what} that each process holds whole, got DTensors, as fully_shard "
            "(FSDP2) and parallelize_module make. `hoglib.hvp`, `ggn_vp`, `fisher_vp`, `influence` and "
            f"operators (`@`, eigsh, solve, trace, spectral_density) take them; {instead}."
        )


def refuse_fsdp1(model: nn.Module) -> None:
    """Raise for FullyShardedDataParallel: its parameters are slices of flat parameters."""
    library: Any = sys.modules.get("torch.distributed.fsdp")  # None: not imported
    for name, module in model.named_modules() if library is not None else ():
        if isinstance(module, library.FullyShardedDataParallel):
            raise UnsupportedError(
                f"{f'model.{name}' if name else 'model'}: expected a module whose parameters have "
                "their own shapes, got FullyShardedDataParallel (FSDP1), which flattens them; use "
                "`torch.distributed.fsdp.fully_shard`, or the module before it is wrapped."
            )


class Layout(NamedTuple):
    """The distribution of one tensor over the processes of a mesh.

    mesh: The DeviceMesh.
    placements: The placement in each dimension of the mesh.
    shape, stride: The shape and stride of the whole tensor.
    plain: The tensor is an ordinary tensor, whole in each process, not a DTensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    plain: bool = False

    @classmethod
    def of(cls, tensor: Any) -> "Layout":
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def wrap(self, local: Tensor) -> Any:
        """The DTensor of local shards. Trailing dimensions beyond `shape` are not sharded."""
        from torch.distributed.tensor import DTensor

        more = local.shape[len(self.shape) :]
        shape = torch.Size((*self.shape, *more))
        stride = torch.empty(shape, device="meta").stride() if more else self.stride
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )

    def part_of(self, whole: Tensor) -> Tensor:
        """This process's shard of a tensor that all processes hold whole; no communication."""
        from torch.distributed.tensor import DTensor, Replicate

        if self.plain:
            return whole
        layout = [Replicate()] * self.mesh.ndim
        everywhere = DTensor.from_local(whole, self.mesh, layout, run_check=False)
        return everywhere.redistribute(placements=self.placements).to_local()

    def average(self, value: Tensor, weight: float) -> Tensor:
        """The shards of sum_r weight_r value_r over the processes r."""
        from torch.distributed.tensor import DTensor, Partial

        # detached: `_Exchange` defines the derivative, not the operations below
        value = weight * value.detach()
        if self.copies() == self.mesh.size():
            return all_reduce(value, self.mesh)
        parts = [Partial()] * self.mesh.ndim
        partial = DTensor.from_local(value.contiguous(), self.mesh, parts, run_check=False)
        return partial.redistribute(placements=self.placements).to_local()

    def copies(self) -> int:
        """The number of processes of the mesh that hold each shard."""
        dims = zip(self.mesh.shape, self.placements, strict=True)
        return prod(size for size, placement in dims if placement.is_replicate())


class _Exchange(torch.autograd.Function):
    """gather (gathers=True): the whole tensor of shards; or average: the shards of a weighted mean.

    Both maps are linear, so jvp applies the map itself. They are adjoint, so backward applies the map
    with `gathers` negated.
    """

    @staticmethod
    def forward(value: Tensor, gathers: bool, layout: Layout, weight: float) -> Tensor:
        if gathers:
            return layout.wrap(value.detach().contiguous()).full_tensor()
        return layout.average(value, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.options = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gathers, *options = ctx.options
        return apply(_Exchange, grad, not gathers, *options), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return apply(_Exchange, tangent, *ctx.options)

    @staticmethod
    def vmap(info: object, in_dims: Any, value: Tensor, *options: Any) -> Any:
        # the batch dimension becomes a trailing dimension: `Layout.wrap` does not shard it
        return apply(_Exchange, value.movedim(in_dims[0], -1), *options), -1


@final
@dataclass(frozen=True)
class Unsharded:
    """The placement of ordinary tensors: :class:`Sharding` without communication."""

    is_sharded = False
    weight = 1.0
    mesh = None

    def local(self, tensors: Sequence[Tensor]) -> Vector:
        return list(tensors)

    def local_vector(self, what: str, tensors: Sequence[Tensor]) -> Vector:
        instead = "make the operator of the parameters as they are sharded"
        refuse_sharded(what, tensors, "vectors like params,", instead)
        return list(tensors)

    def wrap(self, shards: Sequence[Tensor]) -> Vector:
        return list(shards)

    def gather(self, shards: Sequence[Tensor]) -> Sequence[Tensor]:
        return shards

    def gather_named(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return params

    def defer(self, model: object, blocks: Sequence[Any]) -> "Placement":
        return self

    def owned(self, items: Sequence[Any], costs: Sequence[float]) -> Sequence[Any]:
        return items

    def copy_share(self, index: int) -> float:
        return 1.0

    def size(self, tensors: Vector) -> int:
        return pytree.size(tensors)

    def check_agreement(self, *given: object) -> bool:
        return False

    def norm(self, a: Sequence[Tensor]) -> Tensor:
        return pytree.norm(a)

    def mean_of(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    def sum(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, op: str) -> Tensor:
        return value

    def together(self, caller: str) -> AbstractContextManager[None]:
        return nullcontext()


UNSHARDED = Unsharded()


def placement_of(tensors: Sequence[Tensor], names: Callable[[], Sequence[str]]) -> "Placement":
    """The distribution of tensors over processes, with equal weights: UNSHARDED, or a Sharding."""
    if not any_sharded(tensors):
        return UNSHARDED
    from torch.distributed.tensor import Replicate

    mesh = mesh_of(tensors)  # the largest mesh; tensors may be on submeshes
    everywhere = tuple(Replicate() for _ in mesh.shape)
    layouts = tuple(
        Layout.of(t) if is_sharded(t) else Layout(mesh, everywhere, t.shape, t.stride(), True)
        for t in tensors
    )
    return Sharding(layouts, mesh, 1 / mesh.size(), tuple(names()))


@final
@dataclass(frozen=True)
class Sharding:
    """The distribution of several tensors over the processes of one mesh.

    Attributes:
        layouts: The layout of each tensor.
        mesh: The largest DeviceMesh of the tensors.
        weight: w_r of this process r.
        names: The qualified names of the tensors, if they are parameters of a module.
        deferred: Indices of tensors that remat blocks gather when they run, see `defer`.
        gathered: Indices of the tensors gathered so far for the current loss.
        order: The calls of `gather_one` for the current loss, as indices of tensors.
    """

    is_sharded = True
    layouts: tuple[Layout, ...]
    mesh: Any
    weight: float
    names: tuple[str, ...] = ()
    deferred: frozenset[int] = frozenset()
    gathered: set[int] = field(default_factory=set, compare=False)
    order: list[int] = field(default_factory=list, compare=False)

    def weighted(self, weight: float) -> "Sharding":
        """A copy with this weight of this process."""
        return replace(self, weight=weight)

    def weighted_by(self, rows: float) -> "Sharding":
        """A copy with the weight (rows of this process) / (rows of all processes)."""
        mine = torch.tensor(float(rows), dtype=torch.float64, device=self.mesh.device_type)
        return self.weighted(rows / max(float(self.sum(mine)), 1.0))

    def local(self, tensors: Sequence[Any]) -> Vector:
        """This process's shards, without a graph."""
        return [t.detach().to_local() if is_sharded(t) else t for t in tensors]

    def local_vector(self, what: str, tensors: Sequence[Any]) -> Vector:
        """This process's shards of vectors; raises if their placements differ from the parameters'."""
        for name, layout, x in zip(self.names, self.layouts, tensors, strict=True):
            expected = layout.mesh, layout.placements
            got = (x.device_mesh, x.placements) if is_sharded(x) else None
            held = not any(p.is_shard() for p in layout.placements)
            if got != expected and not (got is None and held):
                raise ArgumentValueError(
                    f"{what}[{name!r}]: expected a DTensor with the placements of its parameter, "
                    f"{layout.placements}, got "
                    + (f"{got[1]}" if got else "a tensor that is not sharded")
                    + "; `torch.randn_like(p)` makes one, and "
                    "`torch.distributed.tensor.distribute_tensor(x, p.device_mesh, p.placements)` "
                    "shards a whole tensor."
                )
        return self.local(tensors)

    def wrap(self, shards: Sequence[Tensor]) -> Vector:
        """The DTensors of local shards."""
        pairs = zip(self.layouts, shards, strict=True)
        return [x if layout.plain else layout.wrap(x) for layout, x in pairs]

    def gather(self, shards: Sequence[Tensor]) -> Vector:
        """The whole tensors, differentiable to any order by the shards; deferred ones stay shards."""
        return [x if i in self.deferred else self.gather_one(i, x) for i, x in enumerate(shards)]

    def gather_named(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """`gather` for some of the tensors, by their names in the module."""
        index = {name: i for i, name in enumerate(self.names)}
        return {
            name: x if index[name] in self.deferred else self.gather_one(index[name], x)
            for name, x in params.items()
        }

    def gather_one(self, index: int, shard: Tensor) -> Tensor:
        """A whole tensor, differentiable to any order by its shard."""
        layout = self.layouts[index]
        # rescaled, because a submesh sums over its own processes only
        weight = self.weight * self.mesh.size() / layout.mesh.size()
        whole: Tensor = apply(_Exchange, shard, True, layout, weight)
        self.gathered.add(index)
        # `_Mean` compares the order between processes: a full_tensor() of different parameters in two
        # processes would mix their shards.
        self.order.append(index)
        return whole

    def whole_rows(self, index: int, rows: Tensor) -> Tensor:
        """The whole tensors [k, *shape] of shards of k vectors, without a graph."""
        layout = self.layouts[index]
        if layout.plain:
            return rows
        return layout.wrap(rows.movedim(0, -1).contiguous()).full_tensor().movedim(-1, 0)

    def add_rows(self, index: int, rows: Tensor) -> Tensor:
        """The shards of the sum over the processes of whole tensors [k, *shape]."""
        layout, value = self.layouts[index], rows.movedim(0, -1).contiguous()
        if layout.mesh == self.mesh:
            return layout.average(value, 1.0).movedim(-1, 0)
        return layout.part_of(self.sum(value)).movedim(-1, 0)  # a layout on a submesh

    def owned(self, items: Sequence[Any], costs: Sequence[float]) -> Sequence[Any]:
        """The items of this process: by falling cost, each item goes to the least loaded process."""
        loads: dict[int, float] = dict.fromkeys(self.mesh.mesh.flatten().tolist(), 0.0)
        mine = []
        for i in sorted(range(len(items)), key=lambda i: -costs[i]):
            owner = min(loads, key=loads.__getitem__)
            loads[owner] += costs[i]
            mine += [items[i]] if owner == dist.get_rank() else []
        return mine

    def defer(self, model: object, blocks: Sequence[Any]) -> "Sharding":
        """A copy with deferred tensors: each block gathers, when it runs, the parameters of its own.

        blocks: From `hoglib._core.remat.blocks.rematerialized`.
        """
        if not isinstance(model, nn.Module) or not blocks:
            return self
        own = dict(model.named_parameters(remove_duplicate=False))
        index = {id(own[name]): i for i, name in enumerate(self.names) if name in own}
        # index of a tensor -> each (module, name) with module._parameters[name] = the tensor
        users: dict[int, list[Any]] = defaultdict(list)
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None and id(p) in index:
                    users[index[id(p)]].append((module, name))
        deferred: set[int] = set()
        for block in blocks:
            parts = {id(part) for part in block.module.modules()}
            for i, places in users.items():
                if all(id(module) in parts for module, _ in places):
                    block.gathers.append((partial(self.gather_one, i), places))
                    deferred.add(i)
        # block.gathers calls this object's gather_one, so the copy shares its records
        return replace(self, deferred=frozenset(deferred), gathered=self.gathered, order=self.order)

    def copy_share(self, index: int) -> float:
        """The weight of a shard in a sum over processes: all copies of one shard count as one."""
        layout = self.layouts[index]
        return layout.mesh.size() / (layout.copies() * self.mesh.size())

    def size(self, tensors: Vector) -> int:
        """The number of elements of the whole tensors."""
        return sum(layout.shape.numel() for layout in self.layouts)

    def check_agreement(
        self,
        caller: str,
        call: object,
        columns: int,
        vector: Vector,
        leaves: Vector,
        changed: bool = False,
    ) -> bool:
        """Raise in all processes if their calls, or the tensors that they all hold whole, differ.

        Takes one all-reduce. Returns whether `changed` is True in any process.
        """
        of_call = checksum_of_call(caller, call, [layout.shape for layout in self.layouts])
        numbers = [of_call, columns, *map(self.checksum_of_whole, (vector, leaves))]
        return bool(self.check_same(caller, AGREEMENT, numbers, leaves[0].device, float(changed)))

    def checksum_of_whole(self, shards: Vector) -> float:
        """A checksum of the tensors that every process holds whole."""
        pairs = zip(shards, self.layouts, strict=True)
        held = [x for x, at in pairs if at.copies() == at.mesh.size()]
        return checksum_of_tensors(held)

    def check_same(
        self,
        caller: str,
        what: Sequence[str],
        numbers: Sequence[float],
        device: torch.device,
        flag: float = 0.0,
        error: Exception | None = None,
    ) -> float:
        """Raise in all processes if a number differs between processes; return the largest flag.

        numbers: At most len(AGREEMENT). All calls send a message of one size: gloo aborts on a message
            of unexpected size.
        error: An error of this process, raised here; all other processes raise DistributedError.
        """
        local = torch.zeros(len(AGREEMENT), dtype=torch.float64, device=device)
        local[: len(numbers)] = local.new_tensor(numbers)
        flags = local.new_tensor([flag, error is not None])
        if error is not None:
            tell(error, self.mesh)  # before the all-reduce: then all processes read the store
        # the minimum is minus the maximum of the negatives: both in one all-reduce
        extremes = self.reduce(torch.cat([local, -local, flags]), "MAX")
        if error is not None:
            raise error
        if extremes[-1]:
            raise DistributedError(
                f"{caller}: expected the same call in all {self.mesh.size()} processes, got an error "
                f"in {words_of_others(self.mesh)}"
            )
        most, least = extremes[: len(local)], -extremes[len(local) : -2]
        differs = (most - least > ROUNDING * (1 + most.abs())).tolist()
        for wrong, name in zip_longest(differs, what, fillvalue=AGREEMENT[0]):
            if wrong:
                raise DistributedError(
                    f"{caller}: expected the same {name} in all {self.mesh.size()} processes, got "
                    "different ones. All processes have to make the same call; random numbers need a "
                    "generator with the same seed in each."
                )
        return float(extremes[-2])

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        """<a, b> of shards, in float64; all processes get an equal number."""
        total = torch.zeros((), dtype=torch.float64, device=a[0].device)
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            flat = x.detach().reshape(-1).double(), y.detach().reshape(-1).double()
            total += self.copy_share(i) * torch.dot(*flat)
        return self.sum(total)

    def norm(self, a: Sequence[Tensor]) -> Tensor:
        return self.dot(a, a).sqrt()

    def mean_of(self, compute: Callable[[], Tensor]) -> Tensor:
        """sum_r w_r compute()_r over the processes r, differentiable to any order.

        An error in one process raises in all processes. Exception: a process that fails before all
        deferred tensors are gathered raises alone, and the other processes wait in full_tensor().
        """
        self.gathered.clear()
        self.order.clear()
        try:
            value = compute()
        except Exception as error:
            tell(error, self.mesh)
            if self.deferred <= self.gathered:
                device = self.mesh.device_type
                # instead of the message of `_Mean`: (value, failed, order, order^2)
                failed = [0.0, 1.0, 0.0, 0.0]
                self.sum(torch.tensor(failed, dtype=torch.float64, device=device))
            raise
        return apply(_Mean, value, self)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the processes, in place if `value` is on a device of the mesh."""
        # NCCL reduces tensors on GPUs only
        return all_reduce(value.to(self.mesh.device_type), self.mesh).to(value.device)

    def together(self, caller: str) -> AbstractContextManager[None]:
        """Inside, an error of one process is reported to all processes of the mesh."""
        return together(caller, self.mesh)

    def reduce(self, value: Tensor, op: str) -> Tensor:
        """A reduction over the processes by dist.ReduceOp.`op`, in place."""
        return all_reduce(value, self.mesh, op)


Placement = Unsharded | Sharding


def all_reduce(value: Tensor, mesh: Any, op: str = "SUM") -> Tensor:
    """The sum, or the reduction dist.ReduceOp.`op`, over the processes of a mesh, in place."""
    everyone = mesh.size() == dist.get_world_size()  # one all-reduce, for any number of dimensions
    with together("all_reduce", mesh):
        for group in [None] if everyone else mesh.get_all_groups():
            # getattr, because a torch built without distributed has no ReduceOp
            dist.all_reduce(value, getattr(dist.ReduceOp, op), group=group)
    return value


class _Mean(torch.autograd.Function):
    """sum_r w_r value_r, equal in all processes. Backward passes the gradient on unchanged, because
    `_Exchange` applies the weights w_r."""

    @staticmethod
    def forward(value: Tensor, sharding: Sharding) -> Tensor:
        wide = sharding.weight * value.detach().reshape(-1).double()
        # below 2^20: float64 adds the squares of 2^13 processes without rounding
        order = float(zlib.crc32(repr(sharding.order).encode()) % 2**20)
        # n sum_r order_r^2 = (sum_r order_r)^2 if and only if all order_r are equal
        sums = sharding.sum(torch.cat([wide, wide.new_tensor([0.0, order, order**2])]))
        failed, total, squares = sums[-3:].tolist()
        if failed:
            raise DistributedError(
                f"loss: expected one from each of {sharding.mesh.size()} processes, got an error in "
                f"{words_of_others(sharding.mesh)}"
            )
        if sharding.mesh.size() * squares != total**2:
            raise DistributedError(
                f"loss: expected the same blocks in the same order in all {sharding.mesh.size()} "
                "processes, which gather their parameters together, got others in one; leave remat "
                "out, or name blocks that every batch runs, such as a layer with all of its experts."
            )
        return sums[:-3].view(value.shape).to(value.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.sharding = inputs[1]

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Any:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return apply(_Mean, tangent, ctx.sharding)

    @staticmethod
    def vmap(info: object, in_dims: Any, value: Tensor, sharding: Any) -> Any:
        return apply(_Mean, value, sharding), in_dims[0]
