"""The operators over data: Hessian, Gauss-Newton, Fisher, Jacobian."""
