"""The batches of processes that share the parameters: each has its own, and all go on together."""

from collections.abc import Iterator

import torch

from hoglib._core.sharding import Sharding
from hoglib.curvature.data import Batches, LocalBatch, fingerprint
from hoglib.errors import DistributedError

NUMBERS = 16  # of a batch's fingerprint, eight tensors, that are compared from pass to pass


# the batch of this process with the weight of all together, the sharding with its part in that weight,
# and numbers that change with any of the batches
SharedStep = tuple[LocalBatch, Sharding, tuple[float, ...]]


def in_step(name: str, batches: Batches, sharding: Sharding) -> Iterator[SharedStep]:
    """The batches of all processes, by one small all-reduce each.

    Raises in all of them where one has fewer, or an error while its data is read.
    """
    own, world = iter(batches), sharding.mesh.size()
    while True:
        local, weight, error = None, 0.0, None
        numbers = [0.0] * NUMBERS
        try:
            local = next(own, None)
            if local is not None:
                (piece,) = local.pieces
                weight = piece.weight
                found = fingerprint(piece.batch)[:NUMBERS]
                numbers[: len(found)] = found
        except Exception as caught:  # the other processes wait for this one
            error = caught
        mine = [float(error is not None), float(local is not None), weight, *numbers]
        sums = torch.tensor(mine, dtype=torch.float64, device=batches.device)
        failed, given, total, *every = sharding.sum(sums).tolist()
        if error is not None:
            raise error
        if failed:
            raise DistributedError(
                f"{name}: expected a batch from each of {world} processes, got an error in one while "
                "it read its data: look at its own output."
            )
        if not given:
            return
        if given < world or local is None:
            raise DistributedError(
                f"{name}: expected as many batches in each of {world} processes, whose parameters are "
                f"gathered together, got one more in {given:.0f} of them than in the others; give each "
                "the same number, of any size."
            )
        whole = local._replace(pieces=[piece._replace(weight=total)])
        yield whole, sharding.weighted(weight / total), tuple(every)
