"""The loss of a language model without its logits: the features before the head, and the head.

Its "outputs", which Gauss-Newton and Fisher products are split at, are (h, W, b), and its criterion is
head and cross-entropy together, computed by rows:

    h [B, T, D]         what the head is given; its rows are the positions, [B T, D]
    W [V, D], b [V]     the head
    z [chunk, V]        the logits of some rows, made and dropped again

so that nothing of size B T V exists, in the loss or in any of its derivatives.
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
NAMES = _cross_entropy.NAMES  # of what the loss is computed from: h, W and b
Product = Callable[[Vector], list[Tensor]]


class Features(NamedTuple):
    """What the loss is computed from: logits are ``hidden @ weight.mT + bias``."""

    hidden: Tensor  # [B, T, D], the positions that have a label
    weight: Tensor  # [V, D], of the head
    bias: Tensor | None


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
    labels of the batch that are not ``ignore_index``: the loss that models of transformers return.
    The logits z exist for ``chunk_size`` rows at a time, in the loss, its gradient, and in products
    with Hessian, Gauss-Newton and Fisher matrices, which hold two tensors [chunk_size, V] beside what
    the body of the model holds and tensors of the size of W.

    The model is run as it is up to its head, also with tied weights, adapters (LoRA) and gradient
    checkpointing. The first call compares the logits that it makes of two positions with those of
    features and head, because some models change them afterwards.

    A batch is a mapping of the model's keyword arguments with "labels" (BatchEncoding too); a tuple
    (input_ids, labels); or, where labels are shifted, a mapping without labels or a tensor of token
    indices: the labels are then the tokens, without those whose attention_mask is 0. Operators weight
    batches by the number of labels that count.

    Args:
        model: A causal, masked or sequence-to-sequence language model of transformers, also inside
            peft; or any module that has a linear head.
        shift: Whether the label of a position is the next token: features of all but the last position
            meet labels of all but the first. Default: by the name of a class of transformers, True for
            causal models.
        body: The features [B, T, D], a function (model, batch) -> features. Default: what the head
            is given when the model is called on the batch.
        head: The linear layer, or its name in the model. Default: ``model.get_output_embeddings()``.
        chunk_size: The rows of the logits that exist at once. Default: as many as have four million
            logits.
        ignore_index: The label of positions that do not count. Default: -100.
        label_smoothing: From 0 to 1. Default: 0.
    Returns:
        A :class:`~hoglib.functional.FunctionalLoss`, for products, operators, penalties and, in the
        place of a criterion, for meta-learning.
    Raises:
        ArgumentTypeError: if the model is no module, the head no linear layer, or the body no function.
        ArgumentValueError: if the model has no head, or it is not known whether labels are shifted;
            when the loss is called, if labels are missing or do not fit the features, or if the model
            changes its logits after the head.
    References:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025 (logits that
        never exist as a whole, for the first derivative).
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
        chunk_size: The rows of the logits that exist at once.
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
        # no criterion of outputs and targets: `criterion` below takes features, and the head with
        # them
        super().__init__(model, None, None if body is None else check_instance("body", body))
        self._head = _name_of_head(model, head)
        self._shift = _shifts_labels(model) if shift is None else validation.boolean("shift", shift)
        self._chunk_size = validation.none_or_at_least("chunk_size", chunk_size, 1)
        self._ignore_index = validation.integer("ignore_index", ignore_index)
        self._smoothing = validation.fraction("label_smoothing", label_smoothing)
        self._checked = False  # a model that leaves its logits as they are does so at every call

    @property
    def separates_outputs(self) -> bool:
        """That outputs and criterion are apart, as Gauss-Newton and Fisher matrices need."""
        return True

    def criterion(self, outputs: Any, batch: Any) -> Tensor:
        """The loss of features.

        Args:
            outputs: What :meth:`outputs` returned.
            batch: The batch, of which the labels are read.
        Returns:
            A scalar.
        """
        with translate_batch_errors(batch, outputs):
            rows, counts, total = self._rows(outputs, batch)
            losses = _cross_entropy.row_losses(rows)
        return torch.where(counts, losses, 0).sum() / total

    def batch_size(self, batch: object) -> int:
        """The number of labels of a batch that count, by which operators weight it.

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
            outputs: Where it is taken.
            batch: The batch.
        Returns:
            The product with a list of tensors like the outputs, differentiable where grad mode is on.
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
        """The Fisher matrix of the categorical distribution of the logits, likewise.

            exact       as the Gauss-Newton matrix
            mc          M = 1/(S T) sum over S draws and labels t of J_t^T r r^T J_t,  r = p - onehot(y)
            empirical   M = N sum over sequences n of d_n d_n^T,  d_n = dloss / d(h, W, b) of n

        Args:
            outputs: Where it is taken.
            batch: The batch.
            kind: "exact", "mc" or "empirical".
            num_samples: S.
            generator: Of the draws. Default: torch's.
        Returns:
            The product with a list of tensors like the outputs.
        """
        # smoothed targets are no draws of a distribution, whose Fisher matrix would be asked for
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
            # a share is 0 or 1 here, so that both factors of it below are one
            scale = 1 / (num_samples * total)
            groups = None
        else:
            draws = [rows]
            # d_n is of the mean loss, so that the share is in both factors of d_n d_n^T, and N in
            # front
            share, groups = share / total, len(outputs.hidden)
            scale = total.new_tensor(float(groups))

        def product(vector: Vector) -> list[Tensor]:
            given = _parts_of(outputs, vector, names)
            result: Any = (None, None, None)
            with torch.no_grad(), translate_batch_errors(batch, outputs):
                for own in draws:
                    along = share * _cross_entropy.row_tangents(own, given)
                    # d_n d_n^T v: the slope of a whole sequence multiplies each of its rows
                    if groups is not None:
                        per_group = along.reshape(groups, -1)
                        along = per_group.sum(1, keepdim=True).expand_as(per_group).reshape(-1)
                    found = _cross_entropy.row_gradients(own, scale * share * along, names)
                    pairs = zip(result, found, strict=True)
                    result = tuple(y if x is None else x + y for x, y in pairs)
            return _as_outputs(outputs, result)

        return product

    def with_logits(self) -> FunctionalLoss:
        """The same loss of logits [B, V, T] that exist as a whole, as Kronecker factors need them.

        Returns:
            The loss, whose criterion is torch's cross-entropy.
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
                # the check must not change what dropout draws in the loss
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
        """Raise unless the logits of the model are those of its head, at two positions; also where they
        are large, which shows a bound on them."""
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
            # a second run with large logits: a bound such as tanh leaves small ones as they are
            scale = 100 / size if size else 1.0

    def _two_logits(self, batch: object, head: Any, scale: float) -> tuple[Tensor | None, Tensor]:
        """The logits that the model returns, and its head, at two positions and times a number."""
        seen: list[Tensor] = []

        def short(x: Tensor) -> Tensor:
            # two positions of the features that the model has just computed, instead of logits of
            # all
            seen.append(scale * F.linear(x[..., :2, :], head.weight, head.bias))
            return seen[-1].clone()  # models bound or scale them in place

        with replaced_forwards([head], lambda _: short):
            outputs = self._run(batch)
        return _find_logits(outputs), seen[0]

    def _rows(self, outputs: Features, batch: object) -> tuple[_cross_entropy.Rows, Tensor, Tensor]:
        """The arguments of the loss by rows, which of them count, and the number of these."""
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
        # half precision counts to 256 or 2048 only
        total = counts.sum().to(torch.promote_types(hidden.dtype, torch.float32))
        size = _cross_entropy.chunk_size_of(self._chunk_size, len(weight))
        # rows that do not count need some class to gather by; their losses are dropped
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
    """The rows with labels from the model's distribution, for each sample."""
    drawn = []
    with torch.no_grad():
        for (part,) in _cross_entropy.row_chunks(rows):
            # by chunks, as everywhere: probabilities of all rows would be as large as the logits
            p = torch.softmax(F.linear(*part[:3]).float(), 1)
            drawn.append(torch.multinomial(p, num_samples, True, generator=generator))
    for classes in torch.cat(drawn).unbind(1):
        # a drawn label is one class, without smoothing
        yield rows._replace(targets=classes, smoothing=0.0)


def _varying_outputs(outputs: Features) -> str:
    """The names, of NAMES, of the outputs that depend on parameters; all if none says so."""
    present = [(n, x) for n, x in zip(NAMES, outputs, strict=True) if x is not None]
    varying = "".join(name for name, x in present if x.requires_grad)
    return varying or "".join(name for name, _ in present)


def _parts_of(outputs: Features, vector: Vector, names: str) -> Any:
    """The parts of a vector by h, W and b, None for what does not vary."""
    given = iter(vector)
    parts = [None if x is None else next(given) for x in outputs]
    parts = [x if name in names else None for name, x in zip(NAMES, parts, strict=True)]
    width = outputs.hidden.shape[-1]
    return (None if parts[0] is None else parts[0].reshape(-1, width), *parts[1:])


def _as_outputs(outputs: Features, found: Sequence[Tensor | None]) -> list[Tensor]:
    """A product as a list of tensors like the outputs."""
    pairs = [(x, y) for x, y in zip(outputs, found, strict=True) if x is not None]
    # what does not vary has a zero, without memory of its own: it may be as large as W
    return [
        x.new_zeros(()).expand_as(x) if y is None else y.reshape(x.shape).to(x.dtype)
        for x, y in pairs
    ]


class _HeadReached(BaseException):
    """Ends the run of a model at its head; no Exception, which models may catch."""


def _until_head(run: Callable[[], Any], head: nn.Module) -> Tensor:
    """What the head is given where the model runs."""
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
                "linear layer or its name."
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
    # a subclass, as of adapters, may compute other logits than W h + b
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ArgumentTypeError(
            f"head: expected a plain nn.Linear, got {type(layer).__name__} ({name}). Adapters of the "
            f"head have to be merged into it; else {_INSTEAD}"
        )
    return name


def _shifts_labels(model: nn.Module) -> bool:
    """Whether the labels of a class of transformers are the next tokens."""
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
    """Raise for labels that are no token of the head."""
    if classes.numel() and not 0 <= (lowest := int(classes.min())) <= int(classes.max()) < count:
        got = lowest if lowest < 0 else int(classes.max())
        raise ArgumentValueError(
            f"labels: expected tokens from 0 to {count - 1}, those of the head, or ignore_index = "
            f"{ignore_index} for positions that do not count, got {got}."
        )


def _model_arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the model, without labels, of which it would compute its own loss."""
    if isinstance(batch, Mapping):
        keywords = {name: value for name, value in batch.items() if name != "labels"}
        # without labels a sequence-to-sequence model does not make the decoder's inputs itself
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
