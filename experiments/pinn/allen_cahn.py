"""The Allen-Cahn equation by a spectral method, the reference for networks.

    u_t = D u_zz + 5 u - 5 u^3        u(z, 0) = z^2 cos(pi z),  periodic in z from -1 to 1

References:
    Kassam and Trefethen, Fourth-order Time-stepping for Stiff PDEs, 2005: ETDRK4, with the
    coefficients as means over a circle.
"""

from functools import cache
from typing import Any

import numpy as np

DIFFUSION = 1e-4
Array = Any


@cache
def allen_cahn_reference(grid: int, modes: int = 1024, steps: int = 20) -> Array:
    """u on the grid [z, t], the ends of z (-1 and 1) and of t (0 and 1) included.

    Args:
        grid: Points of each axis.
        modes: Fourier modes.
        steps: Steps of time between two points of the grid.
    """
    z = -1 + 2 * np.arange(modes) / modes
    k = np.fft.fftfreq(modes, 1 / modes)
    h = 1 / ((grid - 1) * steps)
    linear = h * (5 - DIFFUSION * (np.pi * k) ** 2)
    L = linear[:, None] + np.exp(1j * np.pi * (np.arange(32) + 0.5) / 32)
    whole, half = np.exp(linear), np.exp(linear / 2)
    Q = h * ((np.exp(L / 2) - 1) / L).real.mean(1)
    first = h * ((-4 - L + np.exp(L) * (4 - 3 * L + L**2)) / L**3).real.mean(1)
    middle = 2 * h * ((2 + L + np.exp(L) * (L - 2)) / L**3).real.mean(1)
    last = h * ((-4 - 3 * L - L**2 + np.exp(L) * (4 - L)) / L**3).real.mean(1)

    def nonlinear(v: Array) -> Array:
        return np.fft.fft(-5 * np.fft.ifft(v).real ** 3)

    v = np.fft.fft(z**2 * np.cos(np.pi * z))
    found = [v]
    for step in range(1, (grid - 1) * steps + 1):
        N = nonlinear(v)
        a = half * v + Q * N
        N_a = nonlinear(a)
        N_b = nonlinear(half * v + Q * N_a)
        N_c = nonlinear(half * a + Q * (2 * N_b - N))
        v = whole * v + first * N + middle * (N_a + N_b) + last * N_c
        if step % steps == 0:
            found.append(v)
    shifts = np.exp(2j * np.pi * np.outer(np.linspace(0, 1, grid), k)) / modes
    return (shifts @ np.stack(found, 1)).real
