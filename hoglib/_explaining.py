"""Errors of torch about derivatives that it lacks, in words that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from hoglib import _arguments as arguments

# What torch says of an operation that it cannot differentiate.
NO_WAY = (
    "not implemented", "forward AD", "does not currently support double backward",
    "don't support automatic differentiation", "saved tensor hooks", "incompatible with .grad()",
    "setup_context", "doesn't have storage",
    "for sparse tensors", "Sparse division",
)  # fmt: skip


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Names the operation that torch has no derivative of."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, arguments.Explained) or not any(word in str(error) for word in NO_WAY):
            raise
        raise arguments.NotSupported(
            f"{what}: expected operations that torch can differentiate twice, got one that it cannot: "
            f"{str(error).splitlines()[0]}. Write it by other operations; `hoglib env` lists those "
            "that are replaced by themselves (stand_ins=True)."
        ) from error
