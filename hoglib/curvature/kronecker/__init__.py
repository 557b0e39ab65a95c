"""KFAC: the recorded layers of a model, their Kronecker factors, the operator."""
