"""Steps by the inverse of a Kronecker-factored matrix, as an optimizer of torch."""

from math import nan, sqrt
from typing import Any, NamedTuple, final, get_args

import torch
from torch import Tensor

from hoglib._core import pytree, validation
from hoglib.curvature.dataset_sum import DATA_OPTIONS
from hoglib.curvature.fisher_metric import FisherKind
from hoglib.curvature.kfac_operator import KFACOperator, layout_of, saved_layout
from hoglib.curvature.kronecker import BlockLayout, InverseMethod, KroneckerBlock, KroneckerMatrix
from hoglib.curvature.model_run import USUAL
from hoglib.curvature.newton import (
    BatchOptimizer,
    finite_or_infinite,
    positive_damping,
    refuse_unknown,
)
from hoglib.curvature.operators import GGNOperator
from hoglib.errors import ArgumentValueError
from hoglib.verification.entry_points import examined_functions

GGN_OPTIONS = {*DATA_OPTIONS} - {"check_deterministic"}
OPTIONS = {"approximation", "joint_bias", "likelihood", "num_samples", *GGN_OPTIONS}
FACTORS = ("A", "G")
ADAPT_EVERY, ADAPTED = 5, 0.95**5
INVERSE = ("inverse_A", "inverse_G", "inverse_values")


class KFACStep(NamedTuple):
    """What a step of `KFAC` did.

    Attributes:
        loss: Before the step.
        slope: g^T d, the change of the loss to first order along the direction d; negative.
        length: |v|, of the change of the parameters.
        damping: After the step.
        ratio: Of the decrease to that of the quadratic model; nan where it was not computed.
        products: Of the Gauss-Newton matrix with a vector.
        values: Evaluations of the loss without a gradient; the gradient was computed once.
        factor_batches: Batches whose factors were computed, 1 or 0.
    """

    loss: float
    slope: float
    length: float
    damping: float
    ratio: float
    products: int
    values: int
    factor_batches: int


@final
class KFAC(BatchOptimizer):
    r"""Steps by the damped inverse of a Kronecker-factored Gauss-Newton or Fisher matrix.

        A <- decay A + (1 - decay) A_batch, also G                each factors_every steps
        d = -(G ⊗ A + damping I)^-1 (g + weight_decay params)     the inverse, each inverse_every steps
        v <- lr (a d + b v)               params <- params + v

    with the gradient g of the loss at a batch and the factors of `hoglib.KFACOperator`. a and b
    minimize the quadratic model g^T v + v^T (G + damping I) v / 2 of the batch, by two products of its
    Gauss-Newton matrix G; each five steps the damping is multiplied by 0.95^5 where the loss fell by
    more than 3/4 of what the model says, and divided by it for less than 1/4. With ``rescale=False``
    v <- momentum v + lr nu d, nu = min(1, sqrt(kl_clip / (lr^2 |g^T d|))), at a fixed damping.

    The moving averages are divided by 1 - decay^t, and so start with the first batch. The loss must not
    mix examples: batch norm has to be in eval mode. `.grad` is not used. ``info`` is the `KFACStep` of
    the last step; ``state_dict()`` has factors, inverses and v, so that a resumed run is the same run.

    Args:
        loss: From `hoglib.functional_loss`.
        params: The parameters to optimize, a dict of tensors by name; by default all trainable ones.
        lr: As above.
        damping: The first damping, which adapts by a factor of 0.77 in five steps at most: try powers
            of ten.
        rescale: Choose the step by the quadratic model, as above.
        momentum: As above, without rescaling.
        decay: Of the factors.
        weight_decay: The factor of the parameters in the gradient.
        kl_clip: Bound of lr^2 g^T K^-1 g without rescaling, which is twice the change of the outputs'
            distribution to second order; None for no bound.
        method: "exact", "pi" or "factors", as of ``KFACOperator.inverse``.
        factors_every: Steps from one update of the factors to the next.
        inverse_every: Steps from one inverse to the next.
        kind: As of `hoglib.KFACOperator`; "mc" takes one backward pass for the factors.
        seed: Of the draws of kind="mc".
        **options: Of `hoglib.KFACOperator`, such as approximation, joint_bias, num_samples, processes.
    Raises:
        ArgumentTypeError: for an option that there is not.
        UnsupportedError: for parameters of other layers, as `hoglib.KFACOperator`.
    References:
        Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate Curvature,
        2015, sections 6.4, 6.5 and 7. Ba, Grosse and Martens, Distributed Second-order Optimization
        using Kronecker-factored Approximations, 2017, section 5 (kl_clip).
    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> loss = hog.functional_loss(model, F.mse_loss)
        >>> optimizer = hog.curvature.KFAC(loss, damping=1e-6)
        >>> value = optimizer.step((torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])))
        >>> model.weight  # one step is enough for a quadratic loss
        Parameter containing:
        tensor([[3.0000]], requires_grad=True)
    """

    def __init__(
        self,
        loss: Any,
        params: dict[str, Tensor] | None = None,
        *,
        lr: float = 1.0,
        damping: float = 1.0,
        rescale: bool = True,
        momentum: float = 0.9,
        decay: float = 0.95,
        weight_decay: float = 0.0,
        kl_clip: float | None = 1e-2,
        method: InverseMethod = "exact",
        factors_every: int = 1,
        inverse_every: int = 1,
        kind: FisherKind = "mc",
        seed: int = 0,
        **options: Any,
    ) -> None:
        refuse_unknown("KFAC", options, OPTIONS, "KFACOperator")
        defaults: dict[str, Any] = {
            "lr": validation.positive("lr", lr),
            "damping": positive_damping(damping),
            "rescale": validation.flag("rescale", rescale),
            "momentum": validation.fraction("momentum", momentum, below_one=True, usual=0.9),
            "decay": validation.fraction("decay", decay, below_one=True, usual=0.95),
            "weight_decay": validation.number("weight_decay", weight_decay, minimum=0),
            "kl_clip": None if kl_clip is None else validation.positive("kl_clip", kl_clip),
            "method": validation.one_of("method", method, get_args(InverseMethod)),
            "factors_every": validation.at_least("factors_every", factors_every, 1),
            "inverse_every": validation.at_least("inverse_every", inverse_every, 1),
            "seed": validation.at_least("seed", seed, 0),
            "steps": 0,
            "averaged": 0,  # batches in the moving averages
            "layouts": [],
        }
        self._options = {**options, "kind": kind}
        self._checked, self._forms = False, USUAL
        self.info: KFACStep | None = None
        super().__init__(loss, params, defaults)

    def step(self, closure: Any = None) -> Tensor:  # type: ignore[override]
        """Take one step.

        Args:
            closure: A batch, or a re-iterable of batches, or a function without arguments that returns
                one, as Lightning's manual optimization passes it.
        Returns:
            The loss before the step.
        """
        with examined_functions("KFAC"):
            return self._step(self._batch(closure))

    def _step(self, batch: Any) -> Tensor:
        group = self.param_groups[0]
        device = next(iter(self._params.values())).device
        seeded = torch.Generator(device).manual_seed(group["seed"] + group["steps"])
        K = KFACOperator(self._loss, self._params, batch, generator=seeded, **self._options)
        K.checked, K.forms = self._checked, self._forms
        value, gradient = K.gradient()
        with torch.no_grad():
            g = K.ravel(gradient)
            new_factors = group["steps"] % group["factors_every"] == 0
            if new_factors:
                self._average(K)
            # layouts are there from the first step on
            layouts = [layout_of(one, list(self._params)) for one in group["layouts"]]
            if group["steps"] % group["inverse_every"] == 0:
                self._invert(K, layouts)
            inverse = KroneckerMatrix(K.space, [self._inverse_of(layout) for layout in layouts])
            step, slope, expected, products = self._move(K, batch, inverse, value, g)
            for name, part in K.unravel(step).items():
                self.state[self._params[name]]["direction"] = part.clone()
                self._params[name].add_(part)
        ratio, adapts = nan, group["rescale"] and group["steps"] % ADAPT_EVERY == 0 and expected < 0
        if adapts:
            ratio = (finite_or_infinite(K.value) - float(value)) / expected
            # by how much of the expected decrease there was
            if ratio > 0.75:
                group["damping"] *= ADAPTED
            elif ratio < 0.25:
                group["damping"] /= ADAPTED
        self._checked, self._forms = K.checked, K.forms
        group["steps"] += 1
        self.info = KFACStep(
            float(value), slope, float(step.norm()), group["damping"], ratio,
            products, int(adapts), int(new_factors),
        )  # fmt: skip
        return value

    def _average(self, K: KFACOperator) -> None:
        """Add the factors of a batch to the moving averages."""
        group = self.param_groups[0]
        decay, names = group["decay"], pytree.paths(K.space.params)
        blocks = {block.layout: block for block in K.blocks()}
        known = {layout_of(one, names) for one in group["layouts"]}
        if known and known != blocks.keys():
            raise ArgumentValueError(
                "step: expected the layers of the first step, got others: the model calls other "
                "layers, or parts of their weights, from batch to batch. Give only those that it "
                "always calls."
            )
        group["layouts"] = [saved_layout(layout, names) for layout in blocks]
        for layout, block in blocks.items():
            store, prefix = self._place(layout)
            for name in FACTORS:
                factor = getattr(block, name)
                before = store.get(prefix + name, torch.zeros_like(factor))
                store[prefix + name] = decay * before + (1 - decay) * factor
        group["averaged"] += 1

    def _invert(self, K: KFACOperator, layouts: list[BlockLayout]) -> None:
        """Compute the damped inverse of the moving averages."""
        group = self.param_groups[0]
        averages = KroneckerMatrix(K.space, [self._average_of(layout) for layout in layouts])
        inverse = averages.inverse(group["damping"], method=group["method"])
        for block in inverse.blocks():
            store, prefix = self._place(block.layout)
            for name, tensor in zip(INVERSE, (block.A, block.G, block.values), strict=True):
                if tensor is not None:
                    store[prefix + name] = tensor

    def _average_of(self, layout: BlockLayout) -> KroneckerBlock:
        group, (store, prefix) = self.param_groups[0], self._place(layout)
        correction = 1 - group["decay"] ** group["averaged"]
        A, G = (store[prefix + name] / correction for name in FACTORS)
        if layout.role.matrix == "diagonal":
            G = torch.ones_like(G)  # no average, but a constant
        return KroneckerBlock(layout, A, G)

    def _inverse_of(self, layout: BlockLayout) -> KroneckerBlock:
        store, prefix = self._place(layout)
        A, G, values = (store.get(prefix + name) for name in INVERSE)
        return KroneckerBlock(layout, A, G, values)  # type: ignore[arg-type]  # from the first step on

    def _place(self, layout: BlockLayout) -> tuple[dict[str, Any], str]:
        """The state of the parameter that a block begins with, and a prefix that tells apart the blocks
        of rows of one parameter."""
        region = layout.first
        store = self.state[list(self._params.values())[region.leaf]]
        return store, f"{region.start}:{region.stop} "

    def _move(
        self, K: KFACOperator, batch: Any, inverse: KroneckerMatrix, value: Tensor, g: Tensor
    ) -> tuple[Tensor, float, float, int]:
        """The change of the parameters, the slope along d, what the model expects, and products."""
        group = self.param_groups[0]
        if group["weight_decay"]:
            g = g + group["weight_decay"] * K.ravel(self._params)
        d = -(inverse @ g)
        slope = float(g @ d)
        last = {name: self.state[p].get("direction") for name, p in self._params.items()}
        before = None if any(part is None for part in last.values()) else K.ravel(last)
        if group["rescale"]:
            V = d[:, None] if before is None else torch.stack([d, before], 1)
            step, expected = self._minimizer(batch, V, g)
            return group["lr"] * step, slope, expected, V.shape[1]
        if group["kl_clip"] is not None and slope:
            d = d * min(1.0, sqrt(group["kl_clip"] / (group["lr"] ** 2 * abs(slope))))
        if before is not None:
            d = d + group["momentum"] * before / group["lr"]
        return group["lr"] * d, slope, nan, 0

    def _minimizer(self, batch: Any, V: Tensor, g: Tensor) -> tuple[Tensor, float]:
        """The minimizer of g^T s + s^T (G + damping I) s / 2 over the columns of V, and the minimum."""
        group = self.param_groups[0]
        options = {name: self._options[name] for name in GGN_OPTIONS & self._options.keys()}
        G = GGNOperator(self._loss, self._params, batch, **options)
        shift = group["damping"] + group["weight_decay"]
        M = (V.T @ (G @ V) + shift * V.T @ V).double()
        b = -(V.T @ g).double()
        # columns of any lengths, which may be parallel
        sizes = M.diagonal().clamp(min=torch.finfo(M.dtype).tiny).sqrt()
        scaled = M / sizes / sizes[:, None]
        c = torch.linalg.pinv(scaled, hermitian=True, rtol=1e-6) @ (b / sizes) / sizes
        return V @ c.to(V), float(-(b @ c) / 2)
