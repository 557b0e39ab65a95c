"""The loss of a language model without a tensor of all logits.

Gauss-Newton and Fisher products split the loss at its "outputs" (h, W, b). The criterion is the head
and the cross-entropy together, computed in chunks of rows:

    h [B, T, D]         the features, input of the head; a row is a position, [B T, D]
    W [V, D], b [V]     the head
    z [chunk, V]        the logits of some rows, computed and freed

so that no tensor of size B T V exists, in the loss or in any of its derivatives.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from hoglib._core.messages import validation
from hoglib._core.messages.call_errors import translate_batch_errors
from hoglib._core.modules.state import preserve_random_state
from hoglib._core.modules.swap import Params
from hoglib._core.numerics.trust import KERNELS, agree, largest
from hoglib._core.remat.block_parts import replaced_forwards
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.torch_modes import value_checks_on
from hoglib.errors import ArgumentTypeError, ArgumentValueError
from hoglib.functional import Forward, FunctionalLoss, check_instance
from hoglib.ops import _cross_entropy

__all__ = ["LanguageModelLoss", "language_model_loss"]

Vector = Sequence[Tensor]
NAMES = _cross_entropy.NAMES  # "h", "W" and "b", the outputs
Product = Callable[[Vector], list[Tensor]]


class Features(NamedTuple):
    """The outputs of the loss: logits are ``hidden @ weight.mT + bias``."""

    hidden: Tensor  # features [B, T, D] of the positions with a label
    weight: Tensor  # the head's weight, [V, D]
    bias: Tensor | None  # the head's bias, [V]


def language_model_loss(
    model: nn.Module,
    *,
    shift: bool | None = None,
    body: Forward | None = None,
    head: str | nn.Module | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> "LanguageModelLoss":
    r"""The cross-entropy of a language model as a function of parameters and a batch.

        z_t = W h_t + b        loss = 1/T sum_t (log sum_c exp(z_tc) - z_t,y(t))

    with h the features before the head, W and b the head's weight and bias, and the sum over the T
    labels of the batch other than ``ignore_index``: the loss that models of transformers return.
    The logits z exist for ``chunk_size`` rows at a time, in the loss, its gradient, and in products
    with Hessian, Gauss-Newton and Fisher matrices. Beside the memory of the model's body, these hold
    two tensors [chunk_size, V] and tensors of the size of W.

    The model runs unmodified up to its head, also with tied weights, adapters (LoRA) and gradient
    checkpointing. The first call compares the model's logits at two positions with the head of the
    features, because some models change logits after the head.

    A batch is a mapping of the model's keyword arguments with "labels" (BatchEncoding too); a tuple
    (input_ids, labels); or, if labels are shifted, a mapping without labels or a tensor of token
    indices: the labels are then the tokens with an attention_mask other than 0. Operators weight
    batches by their number of labels other than ``ignore_index``.

    Args:
        model: A causal, masked or sequence-to-sequence language model of transformers, also inside
            peft; or any module that has a linear head.
        shift: Whether the label of a position is the next token: features of all but the last position
            meet labels of all but the first. Default: by the name of a class of transformers, True for
            causal models.
        body: The features [B, T, D], a function (model, batch) -> features. Default: the input of the
            head when the model is called on the batch.
        head: The linear layer, or its name in the model. Default: ``model.get_output_embeddings()``.
        chunk_size: The rows of logits that exist at once. Default: rows with four million logits in
            total.
        ignore_index: The label of positions that do not count. Default: -100.
        label_smoothing: From 0 to 1. Default: 0.
    Returns:
        A :class:`~hoglib.functional.FunctionalLoss`, for products, operators, penalties and, instead
        of a criterion, for meta-learning.
    Raises:
        ArgumentTypeError: if the model is no module, the head no linear layer, or the body no function.
        ArgumentValueError: if the model has no head, or it is not known whether labels are shifted;
            when the loss is called, if labels are missing or do not fit the features, or if the model
            changes its logits after the head.
    References:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025 (logits in
        chunks, for the first derivative).
    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
        >>> loss = hog.language_model_loss(model, head="1", shift=True)
        >>> params, tokens = hog.trainable_params(model), torch.tensor([[0, 1, 2]])
        >>> value, product = hog.ggn_vp(loss, params, params, tokens)
        >>> torch.allclose(value, F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]))
        True
    """
    return LanguageModelLoss(
        model,
        shift=shift,
        body=body,
        head=head,
        chunk_size=chunk_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


@final
class LanguageModelLoss(FunctionalLoss):
    """The cross-entropy of a language model; :func:`language_model_loss` makes it and describes it.

    Args:
        model: The language model.
        shift: Whether the label of a position is the next token.
        body: The features, of the model and a batch.
        head: The linear layer, or its name.
        chunk_size: The rows of logits that exist at once.
        ignore_index: The label of positions that do not count.
        label_smoothing: From 0 to 1.
    Example:
        >>> model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
        >>> loss = hog.language_model_loss(model, head="1", shift=True)
        >>> loss.batch_size(torch.tensor([[0, 1, 2]]))
        2
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        shift: bool | None,
        body: Forward | None,
        head: str | nn.Module | None,
        chunk_size: int | None,
        ignore_index: int,
        label_smoothing: float,
    ) -> None:
        # no criterion of (outputs, targets): the method `criterion` takes features and head
        super().__init__(model, None, None if body is None else check_instance("body", body))
        self._head = _name_of_head(model, head)
        self._shift = _shifts_labels(model) if shift is None else validation.boolean("shift", shift)
        self._chunk_size = validation.none_or_at_least("chunk_size", chunk_size, 1)
        self._ignore_index = validation.integer("ignore_index", ignore_index)
        self._smoothing = validation.fraction("label_smoothing", label_smoothing)
        self._checked = False  # a first call has shown that the model does not change its logits

    @property
    def separates_outputs(self) -> bool:
        """That outputs and criterion are apart, as Gauss-Newton and Fisher matrices need."""
        return True

    def criterion(self, outputs: Any, batch: Any) -> Tensor:
        """The loss of features.

        Args:
            outputs: The result of :meth:`outputs`.
            batch: The batch, for its labels.
        Returns:
            A scalar.
        """
        with translate_batch_errors(batch, outputs):
            rows, counts, total = self._rows(outputs, batch)
            losses = _cross_entropy.row_losses(rows)
        return torch.where(counts, losses, 0).sum() / total

    def batch_size(self, batch: object) -> int:
        """The number of labels other than ignore_index, by which operators weight a batch.

        Args:
            batch: The batch.
        Returns:
            An integer.
        """
        return int((self._labels(batch) != self._ignore_index).sum())

    def gauss_newton(self, outputs: Features, batch: object) -> Product:
        """The Hessian of the cross-entropy by the logits, as a matrix on the features and the head.

            M = 1/T sum_t J_t^T (diag(p_t) - p_t p_t^T) J_t,  J_t the Jacobian of z_t by (h, W, b)

        Args:
            outputs: The outputs at which the matrix is taken.
            batch: The batch.
        Returns:
            The product with a list of tensors like the outputs, differentiable if grad mode is on.
        """
        rows, counts, total = self._rows(outputs, batch)
        g = counts.to(total.dtype) / total
        names = _varying_outputs(outputs)

        def product(vector: Vector) -> list[Tensor]:
            given = _parts_of(outputs, vector, names)
            with translate_batch_errors(batch, outputs):
                found = _cross_entropy.gauss_newton_product(rows, g, given, names)
            return _as_outputs(outputs, found)

        return product

    def fisher(
        self,
        outputs: Features,
        batch: object,
        kind: str,
        num_samples: int,
        generator: Generator | None,
    ) -> Product:
        """The Fisher matrix of the logits' categorical distribution, on the features and the head.

            exact       as the Gauss-Newton matrix
            mc          M = 1/(S T) sum over S draws and labels t of J_t^T r r^T J_t,  r = p - onehot(y)
            empirical   M = N sum over sequences n of d_n d_n^T,  d_n = dloss / d(h, W, b) of n

        Args:
            outputs: The outputs at which the matrix is taken.
            batch: The batch.
            kind: "exact", "mc" or "empirical".
            num_samples: S.
            generator: Draws the labels. Default: torch's own generator.
        Returns:
            The product with a list of tensors like the outputs.
        """
        # smoothed targets are no draws from a distribution, so that there is no Fisher matrix
        if self._smoothing and kind != "empirical":
            raise ArgumentValueError(
                "language_model_loss: expected label_smoothing=0, for which the loss is a likelihood, "
                f"got {self._smoothing}; use the GGN, or kind='empirical'."
            )
        if kind == "exact":
            return self.gauss_newton(outputs, batch)
        (rows, counts, total), names = self._rows(outputs, batch), _varying_outputs(outputs)
        share = counts.to(total.dtype)
        if kind == "mc":
            draws = list(_draw_labels(rows, num_samples, generator))
            # a share is 0 or 1 here: multiplying by it twice below is harmless
            scale = 1 / (num_samples * total)
            groups = None
        else:
            draws = [rows]
            # d_n is a gradient of the mean loss: both factors of d_n d_n^T have the share 1/T, and the
            # sum has the factor N
            share, groups = share / total, len(outputs.hidden)
            scale = total.new_tensor(float(groups))

        def product(vector: Vector) -> list[Tensor]:
            given = _parts_of(outputs, vector, names)
            result: Any = (None, None, None)
            with torch.no_grad(), translate_batch_errors(batch, outputs):
                for own in draws:
                    along = share * _cross_entropy.row_tangents(own, given)
                    # d_n d_n^T v: the slope along v of a whole sequence multiplies each of its rows
                    if groups is not None:
                        per_group = along.reshape(groups, -1)
                        along = per_group.sum(1, keepdim=True).expand_as(per_group).reshape(-1)
                    found = _cross_entropy.row_gradients(own, scale * share * along, names)
                    pairs = zip(result, found, strict=True)
                    result = tuple(y if x is None else x + y for x, y in pairs)
            return _as_outputs(outputs, result)

        return product

    def with_logits(self) -> FunctionalLoss:
        """This loss with all logits [B, V, T] as outputs, for Kronecker factors.

        Returns:
            The loss, with torch's cross-entropy as criterion.
        """
        return _OfLogits(self)

    def _outputs(self, params: Params, batch: object) -> Features:
        head = self.model.get_submodule(self._head)
        if self._forward is not None:
            hidden = super()._outputs(params, batch)
        else:
            with translate_batch_errors(batch, params or list(self.model.parameters())):
                hidden = _until_head(lambda: self._run(batch), head)
            if not self._checked and value_checks_on() and not torch_internals.transforms_active():
                # the check must not change dropout's draws in the loss
                with preserve_random_state(), torch.no_grad():
                    self._check_logits(batch, head)
                self._checked = True
        if not isinstance(hidden, Tensor) or hidden.dim() < 2:
            text = f"features: expected a tensor [B, T, D], got {validation.describe(hidden)}."
            raise ArgumentValueError(text)
        # the last position has no next token in the batch
        hidden = hidden[..., :-1, :] if self._shift else hidden
        return Features(hidden, head.weight, head.bias)  # type: ignore[arg-type]

    def _run(self, batch: object) -> Any:
        args, keywords = _model_arguments(self.model, batch)
        return self.model(*args, **keywords)

    def _check_logits(self, batch: object, head: nn.Module) -> None:
        """Raise unless the model's logits at two positions equal its head's outputs.

        A second comparison with large logits shows a bound such as tanh.
        """
        what, scale = type(self.model).__name__, 1.0
        for _ in range(2):
            found, expected = self._two_logits(batch, head, scale)
            if found is None or found.shape != expected.shape:
                got = "none" if found is None else str(tuple(found.shape))
                raise ArgumentValueError(
                    f"{what}: expected logits {tuple(expected.shape)} of two positions among the "
                    f"outputs, got {got}; {_INSTEAD}"
                )
            size = largest(expected)
            if not agree(found, expected, KERNELS):
                off = largest(found.double() - expected.double()) / size
                raise ArgumentValueError(
                    f"{what}: expected logits that are its head's outputs, got others (by {off:.1g} of "
                    f"the largest): the model scales, shifts or bounds them afterwards; {_INSTEAD}"
                )
            # a second run with large logits: a bound such as tanh does not change small ones
            scale = 100 / size if size else 1.0

    def _two_logits(self, batch: object, head: Any, scale: float) -> tuple[Tensor | None, Tensor]:
        """The model's returned logits, and its head's outputs, at two positions; scale: of the head."""
        seen: list[Tensor] = []

        def short(x: Tensor) -> Tensor:
            # run the head at two positions of the features only
            seen.append(scale * F.linear(x[..., :2, :], head.weight, head.bias))
            return seen[-1].clone()  # a copy, because models bound or scale logits in place

        with replaced_forwards([head], lambda _: short):
            outputs = self._run(batch)
        return _find_logits(outputs), seen[0]

    def _rows(self, outputs: Features, batch: object) -> tuple[_cross_entropy.Rows, Tensor, Tensor]:
        """The rows of the loss, the mask of rows that count, and the number of these rows."""
        hidden, weight, bias = outputs
        labels = self._labels(batch)
        if labels.shape != hidden.shape[:-1]:
            raise ArgumentValueError(
                f"labels: expected one for each position, {tuple(hidden.shape[:-1])}, got "
                f"{tuple(labels.shape)}; pass body=, the features of those positions."
            )
        classes = labels.reshape(-1)
        counts = classes != self._ignore_index
        if value_checks_on() and not labels.is_meta and not torch_internals.transforms_active():
            _check_classes(classes[counts], len(weight), self._ignore_index)
        # not in half precision, which counts only to 256 or 2048
        total = counts.sum().to(torch.promote_types(hidden.dtype, torch.float32))
        size = _cross_entropy.chunk_size_of(self._chunk_size, len(weight))
        # ignored rows need some valid class for gather; their losses are dropped
        h, own = hidden.reshape(-1, hidden.shape[-1]), torch.where(counts, classes, 0)
        return _cross_entropy.Rows(h, weight, bias, own, self._smoothing, size), counts, total

    def _labels(self, batch: object) -> Tensor:
        labels = _labels_of(batch, self._shift, self._ignore_index)
        return labels[..., 1:] if self._shift else labels


@final
class _OfLogits(FunctionalLoss):
    """The loss of a language model with its logits as outputs."""

    def __init__(self, loss: LanguageModelLoss) -> None:
        criterion = partial(
            F.cross_entropy, ignore_index=loss._ignore_index, label_smoothing=loss._smoothing
        )
        super().__init__(loss.model, criterion, None)
        self._constants = loss._constants
        self._loss, self.batch_size = loss, loss.batch_size

    def targets(self, batch: object) -> Tensor:
        return self._loss._labels(batch)

    def _outputs(self, params: Params, batch: object) -> Tensor:
        return F.linear(*self._loss._outputs(params, batch)).movedim(-1, 1)


_INSTEAD = (
    "use `functional_loss(model, criterion, forward=lambda model, batch: model(...).logits)`, whose "
    "logits exist as a whole."
)


def _draw_labels(
    rows: _cross_entropy.Rows, num_samples: int, generator: Generator | None
) -> Iterator[_cross_entropy.Rows]:
    """For each sample, the rows with labels drawn from the model's distribution."""
    drawn = []
    with torch.no_grad():
        for (part,) in _cross_entropy.row_chunks(rows):
            # in chunks: probabilities of all rows would be as large as all logits
            p = torch.softmax(F.linear(*part[:3]).float(), 1)
            drawn.append(torch.multinomial(p, num_samples, True, generator=generator))
    for classes in torch.cat(drawn).unbind(1):
        # a drawn label is one class, without smoothing
        yield rows._replace(targets=classes, smoothing=0.0)


def _varying_outputs(outputs: Features) -> str:
    """The NAMES of outputs that require grad; of all outputs if none does."""
    present = [(n, x) for n, x in zip(NAMES, outputs, strict=True) if x is not None]
    varying = "".join(name for name, x in present if x.requires_grad)
    return varying or "".join(name for name, _ in present)


def _parts_of(outputs: Features, vector: Vector, names: str) -> Any:
    """The parts of a vector for h, W and b; None for outputs that do not vary (not in names)."""
    given = iter(vector)
    parts = [None if x is None else next(given) for x in outputs]
    parts = [x if name in names else None for name, x in zip(NAMES, parts, strict=True)]
    width = outputs.hidden.shape[-1]
    return (None if parts[0] is None else parts[0].reshape(-1, width), *parts[1:])


def _as_outputs(outputs: Features, found: Sequence[Tensor | None]) -> list[Tensor]:
    """A product as a list of tensors like the outputs."""
    pairs = [(x, y) for x, y in zip(outputs, found, strict=True) if x is not None]
    # a constant output gets an expanded zero, which needs no memory: it may be as large as W
    return [
        x.new_zeros(()).expand_as(x) if y is None else y.reshape(x.shape).to(x.dtype)
        for x, y in pairs
    ]


class _HeadReached(BaseException):
    """Ends the run of a model at its head; a BaseException, because models may catch Exception."""


def _until_head(run: Callable[[], Any], head: nn.Module) -> Tensor:
    """The input of the head when the model runs; the run ends there."""
    reached: list[Tensor] = []

    def stop(x: Tensor) -> Tensor:
        reached.append(x)
        raise _HeadReached

    with replaced_forwards([head], lambda _: stop):
        try:
            run()
        except _HeadReached:
            return reached[0]
    raise ArgumentValueError(
        "head: expected a layer that the model calls on its features, got one that it does not call; "
        "pass body=, a function (model, batch) -> features."
    )


def _find_logits(outputs: object) -> Tensor | None:
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    else:
        found = getattr(outputs, "logits", outputs)
    found = found[0] if isinstance(found, tuple | list) and found else found
    return found if isinstance(found, Tensor) else None


def _name_of_head(model: nn.Module, head: str | nn.Module | None) -> str:
    if head is None:
        find = getattr(model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if head is None:
            raise ArgumentValueError(
                f"model: expected a language model with an output layer, got {type(model).__name__}, "
                "which has none; use the class with a head (AutoModelForCausalLM), or pass head=, the "
                "linear layer or its name. For a classifier write `hoglib.functional_loss(model, "
                "criterion, forward=lambda model, batch: model(...).logits)`."
            )
    named = dict(model.named_modules())
    if isinstance(head, str):
        if head not in named:
            text = f"head: expected the name of a layer of {type(model).__name__}, got {head!r}."
            raise ArgumentValueError(text)
        name, layer = head, named[head]
    else:
        found = [name for name, module in named.items() if module is head]
        if not found:
            raise ArgumentValueError(
                "head: expected a layer of the model, got "
                f"{validation.describe(head)}, which is not in {type(model).__name__}."
            )
        name, layer = found[0], head
    # a subclass, such as an adapter's, may compute other logits than W h + b
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ArgumentTypeError(
            f"head: expected a plain nn.Linear, got {type(layer).__name__} ({name}). Adapters of the "
            f"head have to be merged into it; else {_INSTEAD}"
        )
    return name


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the labels are the next tokens, by the name of a class of transformers."""
    inner = getattr(model, "get_base_model", None)
    name = type(inner() if callable(inner) else model).__name__
    # GPT2LMHeadModel is causal; XLMWithLMHeadModel may have learned masked tokens
    if "ForCausalLM" in name or (name.endswith("LMHeadModel") and "WithLMHead" not in name):
        return True
    if any(part in name for part in ("ForMaskedLM", "ForConditionalGeneration", "Seq2Seq")):
        return False
    raise ArgumentValueError(
        f"shift: expected True (the label of a position is the next token) or False for the model "
        f"{name}, whose name does not tell, got None."
    )


def _labels_of(batch: object, shift: bool, ignore_index: int) -> Tensor:
    """The labels of a batch, before they are shifted."""
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
        if labels is None and shift and isinstance(batch.get("input_ids"), Tensor):
            labels, mask = batch["input_ids"], batch.get("attention_mask")
            if isinstance(mask, Tensor) and mask.shape == labels.shape:
                labels = torch.where(mask != 0, labels, ignore_index)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        labels = batch[-1]
    else:
        labels = batch if shift else None
    if not isinstance(labels, Tensor) or not _is_integer(labels) or labels.dim() < 1:
        raise ArgumentValueError(
            'labels: expected a batch with integers as "labels", or (input_ids, labels), got '
            f"{validation.describe(batch if labels is None else labels)}."
        )
    return labels.long()


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _check_classes(classes: Tensor, count: int, ignore_index: int) -> None:
    """Raise for labels outside of the head's vocabulary."""
    if classes.numel() and not 0 <= (lowest := int(classes.min())) <= int(classes.max()) < count:
        got = lowest if lowest < 0 else int(classes.max())
        raise ArgumentValueError(
            f"labels: expected tokens from 0 to {count - 1}, those of the head, or ignore_index = "
            f"{ignore_index} for positions that do not count, got {got}."
        )


def _model_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the model, without labels, or the model would compute its own loss."""
    if isinstance(batch, Mapping):
        keywords = {name: value for name, value in batch.items() if name != "labels"}
        # a sequence-to-sequence model makes the decoder's inputs from labels only
        prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        given = any(name in batch for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        if callable(prepare) and not given and batch.get("labels") is not None:
            keywords["decoder_input_ids"] = prepare(labels=batch["labels"])
        args: tuple[Any, ...] = ()
    else:
        several = isinstance(batch, tuple | list) and len(batch) > 1
        args, keywords = tuple(batch[:-1]) if several else (batch,), {}
    if not any(isinstance(x, Tensor) for x in pytree.leaves((args, keywords))):
        raise ArgumentTypeError(
            "batch: expected a mapping with the model's keyword arguments, (input_ids, labels), or a "
            f"tensor of tokens, got {validation.describe(batch)}; make tensors, for instance by the "
            'tokenizer\'s return_tensors="pt".'
        )
    return args, keywords
