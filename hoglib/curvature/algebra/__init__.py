"""Linear operators known by their products: sums, eigenvalues, traces, linear systems."""
