"""Products at one point: Hessian, Gauss-Newton, Fisher and Jacobian as linear maps."""
