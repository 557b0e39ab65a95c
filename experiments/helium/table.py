"""The table of the energy of helium, beside the exact one and simpler wave functions."""

from experiments.shared.layout import table

# of a nucleus at rest, without relativity: Pekeris, Phys. Rev. 115, 1216, 1959
EXACT = -2.903724375
HARTREE_FOCK = -2.861680
SCREENED = -((27 / 16) ** 2)  # the best product of two exponentials


def helium_table(
    energy: float, error: float, variance: float, samples: int, accepted: float
) -> str:
    """The energy with its standard error.

    Args:
        energy: Mean of the local energies.
        error: Its standard error.
        variance: Of the local energies.
        samples: Their number.
        accepted: Part of the Metropolis moves that was accepted.
    Returns:
        The table.
    """
    rows = [["wave function", "energy", "above exact"]]
    for name, value in (
        ("exact, Pekeris 1959", EXACT), ("this network", energy), ("Hartree-Fock", HARTREE_FOCK),
        ("two exponentials", SCREENED),
    ):  # fmt: skip
        digits = f"{value:.5f}" + (f" +- {error:.5f}" if name == "this network" else "")
        rows.append([name, digits, f"{1e3 * (value - EXACT):.2f}"])
    return table(
        "The ground state of helium, in hartree",
        rows,
        f"above exact: in millihartree. {samples} local energies, of variance {variance:.4f} (0 for "
        f"the exact wave function); {accepted:.0%} of the moves accepted.",
    )
