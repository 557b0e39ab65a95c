"""Meta-gradients in hoglib beside those by hand, in other libraries and in JAX."""
