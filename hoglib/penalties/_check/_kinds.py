"""The penalties that can be examined: what their term is, and at which points."""

from typing import NamedTuple


class Kind(NamedTuple):
    """factor mean_n T(|g_n|), at points `at`: T is (|g| - target)^2 or, without a target, |g|^2."""

    name: str
    at: str  # "between" real and fake, "real", "fake", "both", or "beside" real
    target: bool
    factor: float
    formula: str

    @property
    def sets(self) -> int:
        """How many sets of points it sums over."""
        return 2 if self.at == "both" else 1


KINDS = {
    kind.name: kind
    for kind in (
        Kind("wgan_gp", "between", True, 1.0, "mean_n (|g_n| - target)^2 between real and fake"),
        Kind("zero_centred", "between", False, 1.0, "mean_n |g_n|^2 between real and fake"),
        Kind("r1", "real", False, 0.5, "mean_n |g_n|^2 / 2 at real"),
        Kind("r2", "fake", False, 0.5, "mean_n |g_n|^2 / 2 at fake"),
        Kind(
            "r1_r2", "both", False, 0.5, "mean_n |g_n|^2 / 2 at real, and the same at fake, summed"
        ),
        Kind("dragan", "beside", True, 1.0, "mean_n (|g_n| - target)^2 at real and noise"),
    )
}
