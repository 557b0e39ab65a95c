"""Least squares by Levenberg and Marquardt's method, as an optimizer that takes batches."""

from collections.abc import Callable
from math import frexp, inf, isfinite, nan, sqrt
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import Tensor, nn

from hoglib import errors
from hoglib._core.messages import results, validation
from hoglib._core.problem import check_option_names
from hoglib._core.runtime.logger import LOGGER
from hoglib._core.substrate.placement import refuse_sharded
from hoglib._core.torch_api import pytree
from hoglib.curvature.algebra.vector_space import Space
from hoglib.curvature.operators.jacobian_operator import OPTIONS as JACOBIAN_OPTIONS
from hoglib.curvature.operators.jacobian_operator import JacobianOperator
from hoglib.curvature.training.optimizers import BatchOptimizer, positive_damping, read_numbers
from hoglib.functional import functional_loss


def _norm(x: Tensor) -> Tensor:
    """The norm in float64: squares of float32 numbers may overflow."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _gradient(J: JacobianOperator, r: Tensor) -> Tensor:
    """J^T r."""
    return J.T.apply(r[None])[0].to(r)


ONE = "params"  # the name of a single parameter tensor
TRIES = 12  # at most so many dampings in one step: the last is 2^78 times the first
HIDDEN = 100  # a smaller relative difference of losses, in units of eps, is rounding
ACCELERATED = 0.1  # h: the second derivative is a difference between r(p) and r(p + h d)
MOST_ACCELERATION = 0.75  # the bound of 2 |a| / |d| (Transtrum and Sethna, 2012, section 3.2)
LARGEST_JACOBIAN = 2**30  # method="auto": the most bytes of a Jacobian in memory
LARGEST_FACTORED = 8192  # method="auto": the most rows of a matrix to factor
LeastSquaresMethod = Literal["auto", "normal", "samples", "lsmr"]
Directions = Callable[[Tensor, float], tuple[Tensor, int]]  # (r, mu) -> d, iterations


@results.result
class LevenbergMarquardtStep(NamedTuple):
    """The record of a step of `LevenbergMarquardt`.

    Attributes:
        loss: Half the sum of squares before the step.
        loss_after: Half the sum of squares after the step.
        gradient: |J^T r| before the step.
        ratio: The decrease of the loss over the decrease of the model with the last damping; nan if
            rounding hides it.
        damping: mu after the step.
        accepted: Whether the parameters moved.
        method: How directions were computed.
        tries: The number of dampings tried.
        iterations: Iterations of LSMR.
        residuals: Evaluations of the residual without a derivative; the Jacobian was taken once.
    """

    loss: float
    loss_after: float
    gradient: float
    ratio: float
    damping: float
    accepted: bool
    method: str
    tries: int
    iterations: int
    residuals: int


class _NoBatch(NamedTuple):
    """Stands for the batch in a step without data: operators need a batch with a tensor."""

    unused: Tensor


OF_MODEL = (
    "of a model and targets write `lambda params, batch: loss.outputs(params, batch) - batch[1]`, "
    "with loss = hoglib.functional_loss(model, criterion) and `params=hoglib.trainable_params(model)`"
)


@final
class _Residual:
    """A residual as a loss(params, batch); its outputs are the weighted residual."""

    def __init__(self, given: Any, weights: object, one_tensor: bool) -> None:
        if hasattr(given, "criterion"):
            raise errors.ArgumentTypeError(
                "residual: expected a module or a function that returns the residual, got a loss of "
                f"outputs and targets; {OF_MODEL}."
            )
        self.model = given if isinstance(given, nn.Module) else None
        of_model = functional_loss(given).outputs if self.model is not None else given
        self._given, self._one_tensor = validation.function("residual", of_model), one_tensor
        self._weights = weights

    def outputs(self, params: Any, batch: Any) -> Any:
        """The residual, each term times the root of its weight."""
        params = params[ONE] if self._one_tensor else params
        alone = isinstance(batch, _NoBatch)
        of_model = self.model is not None
        args = () if alone and not of_model else ((),) if alone else (batch,)
        try:
            found = self._given(params, *args)
        except errors.ArgumentTypeError as error:
            if of_model:
                error.add_note(
                    f"residual: a module takes the batch and returns the residual; {OF_MODEL}."
                )
            raise
        for name, part in zip(pytree.paths(found), pytree.leaves(found), strict=True):
            validation.real(validation.leaf_name("residual", name), part)
        if self._weights is None:
            return found
        terms, structure = pytree.flatten(found)
        names = pytree.paths(found)
        weights = dict(zip(pytree.paths(self._weights), pytree.leaves(self._weights), strict=True))
        if set(names) != set(weights):
            wanted, given = (validation.listing([n or "one" for n in x]) for x in (names, weights))
            raise errors.ArgumentValueError(
                f"weights: expected a number for each term of the residual, {wanted}, got {given}."
            )
        scaled = [
            sqrt(validation.number(validation.leaf_name("weights", n), weights[n], minimum=0)) * y
            for n, y in zip(names, terms, strict=True)
        ]
        return pytree.unflatten(scaled, structure)

    def __call__(self, params: Any, batch: Any) -> Tensor:
        return self.criterion(self.outputs(params, batch), batch)

    def criterion(self, outputs: Any, batch: object) -> Tensor:
        """Half the sum of squares."""
        return pytree.sum_scalars([y.square().sum() / 2 for y in pytree.leaves(outputs)])


@final
class LevenbergMarquardt(BatchOptimizer):
    r"""Least squares by Levenberg and Marquardt's method, for residuals of networks and of functions.

        loss = |r|^2 / 2        r(params, batch) [M], J = d r / d params [M, P]
        (J^T J + mu D^2) d = -J^T r        params <- params + d,  if it lowers the loss
        ratio = (loss - loss after) / (-r^T J d - |J d|^2 / 2)
        mu <- mu max(1/3, 1 - (2 ratio - 1)^3)  if accepted;  else mu times 2, 4, 8, ... until it is

    mu starts at damping |J g|^2 / |g|^2, g = J^T r, in the units of J^T J. If no damping lowers the
    loss by more than rounding, the parameters and mu stay. Where rounding hides the loss, a step is
    accepted if it lowers the gradient.

    - method="normal": J in memory, and a Cholesky factor of J^T J + mu D^2 [P, P].
    - "samples": J in memory, and a factor of J D^-2 J^T + mu I [M, M]; an equal step, by
      d = -D^-2 J^T (J D^-2 J^T + mu I)^-1 r.
    - "lsmr": products with J and J^T only, by `RectangularOperator.lstsq`.
    - "auto": "normal" if M >= P, else "samples"; "lsmr" if J is larger than 1 GiB or both sides are
      larger than 8192.

    J is computed by vmap over examples if the residual has a row for each example of the batch and no
    row depends on another example, which the step checks; else by min(M, P) products. Give the points
    of an equation as the batch, not in a closure.

    `.grad` is neither read nor written. ``info`` is the `LevenbergMarquardtStep` of the last step; a
    run resumed from ``state_dict()`` makes equal steps.

    Args:
        residual: A module that takes a batch (a tuple is its arguments) and returns the residual, a
            function ``residual(params, batch)``, or ``residual(params)`` for steps without a batch.
            The residual is a real tensor of any shape, or a pytree of such terms.
        params: A dict of tensors by name, or one tensor; by default all trainable parameters of the
            module.
        weights: A number for each term of the residual, in its structure: loss = sum of w |r|^2 / 2.
        damping: The first mu, relative to J^T J along the gradient. After a change of the damping in
            ``param_groups``, mu starts again from the new damping.
        method: As above.
        scaling: D is the largest norm of each column of J so far, for parameters of different units;
            else D = I. Not for "lsmr".
        geodesic: Add half the geodesic acceleration a, (J^T J + mu D^2) a = -J^T r'', with the second
            derivative r'' of r along d by a difference; a step with 2 |D a| > 0.75 |D d| is rejected.
            It takes one more evaluation of r for each damping, and helps in narrow valleys.
        tol: The tolerance of "lsmr".
        max_iter: The most iterations of "lsmr".
        **options: Options of `hoglib.JacobianOperator`, such as memory_limit, remat and progress.
    Raises:
        ArgumentTypeError: unless the residual is a real floating-point tensor; for a loss.
        ArgumentValueError: for a second parameter group, and if the terms of weights and residual
            differ.
        NonFiniteError: for NaN or infinity in the residual before the step; after the step they only
            reject it.
        UnsupportedError: for DTensor parameters.
    References:
        Madsen, Nielsen and Tingleff, Methods for Non-linear Least Squares Problems, 2004, section 3.2
        (mu). Transtrum and Sethna, Improvements to the Levenberg-Marquardt Algorithm for Nonlinear
        Least-squares Minimization, 2012 (geodesic). More, The Levenberg-Marquardt Algorithm:
        Implementation and Theory, 1978 (scaling). Chen and Heyl, Empowering Deep Neural Quantum
        States through Efficient Optimization, 2024 (samples).
    Example:
        >>> t = torch.arange(4.0)
        >>> p = torch.tensor([1.0, 0.5], requires_grad=True)
        >>> fit = lambda p: p[0] * torch.exp(-p[1] * t) - 3 * torch.exp(-t)
        >>> optimizer = hog.curvature.LevenbergMarquardt(fit, p)
        >>> losses = [optimizer.step() for _ in range(10)]
        >>> p
        tensor([3.0000, 1.0000], requires_grad=True)
    """

    info: LevenbergMarquardtStep | None = None

    def __init__(
        self,
        residual: object,
        params: dict[str, Tensor] | Tensor | None = None,
        *,
        weights: object = None,
        damping: float = 1e-3,
        method: LeastSquaresMethod = "auto",
        scaling: bool = False,
        geodesic: bool = False,
        tol: float | None = None,
        max_iter: int | None = None,
        **options: Any,
    ) -> None:
        check_option_names("LevenbergMarquardt", options, JACOBIAN_OPTIONS)
        defaults = {
            "damping": positive_damping(damping),
            "method": validation.choice("method", method, get_args(LeastSquaresMethod)),
            "scaling": validation.boolean("scaling", scaling),
            "geodesic": validation.boolean("geodesic", geodesic),
            "tol": None if tol is None else validation.number("tol", tol, minimum=0),
            "max_iter": validation.none_or_at_least("max_iter", max_iter, 1),
            "steps": 0,
            "mu": 0.0,
            "started": 0.0,  # the value of "damping" that mu started from
            "raise": 2.0,  # the factor of mu at the next rejection
            "by_examples": True,  # False after vmap over examples gave a wrong J
        }
        if scaling and method == "lsmr":
            raise errors.ArgumentValueError(
                "scaling: expected False with method='lsmr', which does not have the columns of J, got "
                "True; use method='normal' or 'samples', or scale the parameters in the residual."
            )
        one = isinstance(params, Tensor)
        own = _Residual(residual, weights, one)
        if params is None and own.model is None:
            raise errors.ArgumentTypeError(
                "params: expected a dict of tensors by name, or one tensor, for a residual that is no "
                "module, got None; pass the parameters that the function is given."
            )
        named: Any = {ONE: params} if one else params
        super().__init__(own, named, defaults, options)
        refuse_sharded("LevenbergMarquardt", self._params.values())
        Space(self._params)  # raises for integers, and for parameters on several devices
        self._keep_direction({name: torch.zeros_like(p) for name, p in self._params.items()})

    def step(self, closure: object = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches (all of the data), or a function without
                arguments that returns the batch, as Lightning's manual optimization passes it.
                Default: no batch, for a residual of the parameters alone.
        Returns:
            The loss before the step.
        """
        none = _NoBatch(torch.zeros(1, device="cpu"))
        with self._step_of_all("LevenbergMarquardt"):
            return self._step(self._batch(none if closure is None else closure))

    @torch.no_grad()
    def _step(self, batch: object) -> Tensor:
        group = self.param_groups[0]
        J = JacobianOperator(self._loss, self._params, batch, **self._options)
        with J._algorithm("step"):
            r = J.outputs()
            r = r.to(torch.promote_types(torch.promote_types(r.dtype, J.dtype), torch.float32))
            (square,) = read_numbers(r.double().square().sum())
            loss, length = square / 2, sqrt(square) or 1.0
            # The gradient for r / |r|: squares below stay in the range of float32.
            g = _gradient(J, r / length)
            size = length * float(_norm(g))
            if not size:
                stays = loss, loss, size, nan, group["mu"], False, group["method"], 0, 0, 1
                self.info = LevenbergMarquardtStep(*stays)
                return r.new_tensor(loss)
            method = self._method(J)
            dense = method != "lsmr"
            A = self._dense(J, r, g, length, isinstance(batch, _NoBatch)) if dense else None
            D, unit = self._scale(J, A, r), 1.0
            if A is not None:
                A = A / D
                unit = 2.0 ** frexp(float(torch.linalg.vector_norm(A, inf)))[1]
                A, D = A.div_(unit), D * unit
            image = (lambda v: J.apply(v[None])[0].to(r)) if A is None else (lambda v: A @ v)
            if group["started"] != group["damping"]:
                Jg = image((g / D / _norm(g / D)).to(r))
                group["mu"] = group["damping"] * (unit * float(_norm(Jg))) ** 2
                group["started"] = group["damping"]
            solve = self._directions(J, A, method, unit)
            self._search(J, r, g / D, D, loss, size, method, solve, image)
        group["steps"] += 1
        return r.new_tensor(loss)

    def _method(self, J: JacobianOperator) -> str:
        """The method of this step: the option, or for "auto" by the shape of J."""
        (M, P), chosen = J.shape, self.param_groups[0]["method"]
        if chosen != "auto":
            return str(chosen)
        large = M * P * J.dtype.itemsize > LARGEST_JACOBIAN or min(M, P) > LARGEST_FACTORED
        if large and not self.param_groups[0]["scaling"]:
            return "lsmr"
        return "normal" if M >= P else "samples"

    def _dense(
        self, J: JacobianOperator, r: Tensor, g: Tensor, length: float, alone: bool
    ) -> Tensor:
        """J in memory: by vmap over examples if the result reproduces the outputs r and
        g = J^T r / length, else by products."""
        group = self.param_groups[0]
        if group["by_examples"] and not alone:
            try:
                values, rows = J._by_examples()
            except (RuntimeError, NotImplementedError, errors.HoglibError):
                values, rows = r[:0], g[None, :0]
            if rows.shape == J.shape:
                near = sqrt(torch.finfo(J.space.precision).eps)
                rows = rows.to(r)
                off = torch.stack([_norm(values - r), _norm(rows.T @ (r / length) - g)])
                if bool((off <= near * torch.stack([_norm(r), _norm(rows)])).all()):
                    return rows
            group["by_examples"] = False
            LOGGER.debug("LevenbergMarquardt: J by %d products, not by examples", min(J.shape))
        return J.to_dense().to(r)

    def _scale(self, J: JacobianOperator, A: Tensor | None, r: Tensor) -> Tensor:
        """D, a flat vector; with scaling its parts are kept in the optimizer's state."""
        if A is None or not self.param_groups[0]["scaling"]:
            return r.new_ones(())
        D = torch.linalg.vector_norm(A, dim=0, dtype=torch.float64).to(r)
        states = [self.state[p] for p in self._params.values()]
        if all("scale" in state for state in states):
            D = torch.maximum(D, torch.cat([state["scale"].reshape(-1) for state in states]))
        for state, part in zip(states, J.space.split(D), strict=True):
            state["scale"] = part.clone()
        return torch.where(D > 0, D, 1)

    def _directions(
        self, J: JacobianOperator, A: Tensor | None, method: str, unit: float
    ) -> Directions:
        """A function (r, mu) -> the minimizer d of |r + A d|^2 + mu / unit^2 |d|^2, and the iterations.

        The function raises NotPositiveDefiniteError if rounding made the matrix singular.
        """
        group = self.param_groups[0]
        if A is None:

            def by_products(r: Tensor, mu: float) -> tuple[Tensor, int]:
                limits = {"tol": group["tol"], "max_iter": group["max_iter"]}
                b = -r.to(J.target.dtype)
                d, info = J.lstsq(b, damping=mu, return_info=True, **limits)
                return d.to(r), info.iterations

            return by_products
        gram = A.T @ A if method == "normal" else A @ A.T
        # A smaller mu vanishes in the rounding of the diagonal.
        least = torch.finfo(A.dtype).eps * float(gram.diagonal().max())

        def by_factor(r: Tensor, mu: float) -> tuple[Tensor, int]:
            scaled = max(mu / unit / unit, least)
            group["mu"] = scaled * unit * unit
            damped = gram.clone()
            damped.diagonal().add_(scaled)
            factor, failed = torch.linalg.cholesky_ex(damped)
            if failed:
                raise errors.NotPositiveDefiniteError(f"damping: {group['mu']:.3g} is not enough.")
            right = A.T @ r if method == "normal" else r
            y = -torch.cholesky_solve(right[:, None], factor)[:, 0]
            return (y if method == "normal" else A.T @ y), 0

        return by_factor

    def _search(
        self,
        J: JacobianOperator,
        r: Tensor,
        g: Tensor,
        D: Tensor,
        loss: float,
        size: float,
        method: str,
        solve: Directions,
        image: Callable[[Tensor], Tensor],
    ) -> None:
        """Raise mu until a step lowers the loss.

        Vectors on the parameters are in units of D. g: the gradient for the residual r / |r|.
        """
        group, norm = self.param_groups[0], sqrt(2 * loss)
        start = torch.cat([p.detach().reshape(-1).to(r) for p in self._params.values()])
        eps = max(torch.finfo(space.precision).eps for space in (J.space, J.target))
        rounding = HIDDEN * eps * loss
        first, iterations, residuals = group["mu"], 0, 1
        accepted, ratio, after = False, nan, loss
        try:
            for tried in range(1, TRIES + 1):
                try:
                    d, count = solve(r, group["mu"])
                except errors.NotPositiveDefiniteError:  # mu is too small beside rounding errors
                    self._reject()
                    continue
                iterations += count
                Jd = image(d)
                along, square, length = read_numbers(g @ d, Jd.double().square().sum(), _norm(d))
                model = -norm * along - square / 2
                if tried > 1 and model <= rounding:
                    break  # for shorter steps rounding hides the decrease of the loss
                step, bends, ratio = d, False, nan
                if group["geodesic"]:
                    h = ACCELERATED
                    near = self._residual_at(J, start + h * d / D)
                    self._set_params(J.space, start)  # products of "lsmr" read the parameters
                    residuals += 1
                    bends = near is None
                    if near is not None:
                        a, count = solve(2 / h * ((near - r) / h - Jd), group["mu"])
                        iterations += count
                        bends = not 2 * float(_norm(a)) <= MOST_ACCELERATION * length
                        step = d + a / 2
                if not bends:
                    moved = self._residual_at(J, start + step / D)
                    residuals += 1
                    if moved is not None:
                        trial = float(moved.double().square().sum()) / 2
                        if model > rounding:
                            ratio = (loss - trial) / model
                            accepted = trial < loss
                        elif trial <= loss + rounding:  # the gradient is less rounded than the loss
                            accepted = self._is_flatter(J, moved / norm, D, g)
                        after = trial if accepted else loss
                if accepted:
                    if isfinite(ratio):
                        group["mu"] *= max(1 / 3, 1 - (2 * min(ratio, 1.0) - 1) ** 3)
                    group["raise"] = 2.0
                    self._keep_direction(J.space.tree(step / D))
                    break
                self._set_params(J.space, start)
                self._reject()
        finally:  # also if the residual raised
            if not accepted:
                self._set_params(J.space, start)
                group["mu"], group["raise"] = first, 2.0
        found = loss, after, size, ratio, group["mu"], accepted, method
        self.info = LevenbergMarquardtStep(*found, tried, iterations, residuals)

    def _reject(self) -> None:
        group = self.param_groups[0]
        group["mu"] *= group["raise"]
        group["raise"] *= 2

    def _residual_at(self, J: JacobianOperator, vector: Tensor) -> Tensor | None:
        """Write a flat vector into the parameters; the residual there, or None if not finite."""
        self._set_params(J.space, vector)
        try:
            r = J.outputs()
        except errors.NonFiniteError:
            return None
        return r.to(vector) if bool(r.isfinite().all()) else None

    def _is_flatter(self, J: JacobianOperator, r: Tensor, D: Tensor, g: Tensor) -> bool:
        """Whether the gradient at the current parameters is shorter than g, and finite."""
        try:
            return float(_norm(_gradient(J, r) / D)) < float(_norm(g))
        except errors.NonFiniteError:
            return False
