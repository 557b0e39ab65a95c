"""The loss of a module as a function of parameters and a batch."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from hoglib._core.messages import validation
from hoglib._core.messages.call_errors import (
    binding_error,
    describe_argument,
    explain_call_error,
    explain_criterion,
    forward_hint,
    function_name,
    translate_batch_errors,
)
from hoglib._core.modules.swap import (
    NormPolicy,
    Params,
    is_swapped,
    swap_parameters,
    train_mode_batch_statistics,
)
from hoglib._core.numerics.trust import memoize_on
from hoglib._core.substrate.autograd import translate_hook_errors
from hoglib._core.substrate.gradient_graph import leaf_tensors
from hoglib._core.substrate.placement import refuse_fsdp1
from hoglib._core.torch_api import pytree, torch_internals
from hoglib._core.torch_api.pytree import Tree, in_dtype
from hoglib._core.torch_api.torch_modes import value_checks_on, without_stand_ins
from hoglib.errors import ArgumentTypeError, ArgumentValueError, NoSecondDerivative

__all__ = ["FunctionalLoss", "functional_loss", "trainable_params"]

Criterion = Callable[[Any, Any], Tensor]
Forward = Callable[[nn.Module, Any], Any]
# criteria of torch that broadcast outputs and targets of different shapes
ELEMENTWISE = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
               nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)  # fmt: skip
OF_CLASSES = {"cross_entropy", "CrossEntropyLoss"}
OF_PROBABILITIES = OF_CLASSES | {"binary_cross_entropy_with_logits", "BCEWithLogitsLoss"}
# id -> loss: graphs of torch.compile hold no Python objects, so they refer to a loss by its id
BY_ID: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


@validation.explain_arguments
def functional_loss(
    model: nn.Module,
    criterion: "Criterion | FunctionalLoss | None" = None,
    *,
    forward: Forward | None = None,
) -> "FunctionalLoss":
    r"""The loss of an unmodified module as a pure function of parameters and a batch of any kind.

        batch                              loss(params, batch), a scalar
        (x, y)                             criterion(model(x), y)
        (x1, x2, ..., y)                   criterion(model(x1, x2, ...), y)
        anything else                      criterion(model(batch), batch)
        anything, with forward=f           criterion(f(model, batch), batch)

    The first two are tuples (named tuples too) and lists; x may itself be a tuple or dict, and is
    passed to the model unchanged. Anything else is a tensor, a dict, a dataclass, a graph, or any other
    object. The outputs may be any object that the criterion takes.

    Without a criterion the model computes its own loss, as models of transformers do for batches with
    labels:

        batch                              outputs
        mapping (BatchEncoding too)        model(**batch)
        tuple or list                      model(*batch)
        anything else                      model(batch)
        anything, with forward=f           f(model, batch)

    and the loss is ``outputs["loss"]`` or ``outputs.loss`` if it exists, else the first element of a
    tuple, else the outputs. Such a loss has a Hessian; Gauss-Newton and Fisher matrices need outputs
    and criterion apart: :func:`language_model_loss`, or a criterion and
    ``forward=lambda model, batch: model(...).logits``.

    `params` is a dict by qualified name, as :func:`trainable_params` returns it; other parameters have
    the model's values. The model runs in its current mode (train or eval) and is not changed.

    Args:
        model: The module, unmodified.
        criterion: A function or module (outputs, targets) -> scalar; with `forward`, or unless the
            batch is a tuple or list, (outputs, batch) -> scalar. A :class:`FunctionalLoss` of the model
            is returned unchanged. Default: none, the model computes its own loss.
        forward: How the model is called on a batch, a function (model, batch) -> outputs:
            `lambda model, batch: model(**batch)`, several calls, or calls of submodules
            (`model.encoder(x)`). Default: as in the tables above.
    Returns:
        A :class:`FunctionalLoss`, to be called as `loss(params, batch)`. Its parts are
        `loss.outputs(params, batch)` and `loss.criterion(outputs, batch)`; `loss.double()` is the
        loss in float64.
    Raises:
        ArgumentTypeError: if the model is no module or the criterion or forward no function; when the
            loss is called, if the model does not take the batch's arguments.
        ArgumentValueError: when the loss is called, if the criterion's value is not a scalar, if the
            batch is a tuple or list with fewer than two elements or on another device than the
            parameters, or if there is no criterion and the model returned no loss.
    Example:
        >>> model = nn.Linear(2, 1)
        >>> loss = hog.functional_loss(model, F.mse_loss)
        >>> params = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
        >>> loss(params, (torch.ones(4, 2), torch.zeros(4, 1)))
        tensor(4.)
    """
    if not isinstance(criterion, FunctionalLoss):
        return FunctionalLoss(model, criterion, forward)
    if criterion.model is not model or forward is not None:
        raise ArgumentValueError(
            "criterion: expected a functional loss of this model, and no forward=, got "
            + ("one of another model." if criterion.model is not model else "both.")
        )
    return criterion


def trainable_params(model: nn.Module, *patterns: str) -> Params:
    """The parameters of a model that require grad, by qualified name.

    The dict holds the parameters themselves, not copies. A parameter that the model uses in two places
    (tied weights) appears once, under its first name.

    Args:
        model: The module.
        patterns: Patterns of whole names, with ``*``, ``?`` and ``[...]`` as in `fnmatch`, such as
            ``"*lora_*"`` or ``"head.weight"``: select parameters that match any. Default: all.
    Returns:
        A dict from names to parameters.
    Raises:
        ArgumentTypeError: if the model is not an `nn.Module`, or a pattern not a string.
        ArgumentValueError: if the model has no parameter that requires grad, or none matches a pattern.
    Example:
        >>> {name: tuple(p.shape) for name, p in hog.trainable_params(nn.Linear(2, 3)).items()}
        {'weight': (3, 2), 'bias': (3,)}
        >>> list(hog.trainable_params(nn.Linear(2, 3), "b*"))
        ['bias']
    """
    _check_module(model)
    params: Params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        total = sum(1 for _ in model.parameters())
        raise ArgumentValueError(
            f"model: expected at least one trainable parameter, got none in {type(model).__name__} "
            + (
                f"(all {total} are frozen). Call requires_grad_(True) on those to be trained."
                if total
                else "(it has no parameters). Pass the module that holds the weights."
            )
        )
    if not patterns:
        return params
    for pattern in patterns:
        _check_pattern(model, pattern, params)
    return {n: p for n, p in params.items() if any(fnmatchcase(n, one) for one in patterns)}


def _check_pattern(model: nn.Module, pattern: object, params: Params) -> None:
    """Raise unless a trainable parameter matches."""
    if not isinstance(pattern, str):
        text = f"patterns: expected strings such as '*lora_*', got {validation.describe(pattern)}."
        raise ArgumentTypeError(text)
    if any(fnmatchcase(name, pattern) for name in params):
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    others = [name for name in names if fnmatchcase(name, pattern)]
    if others:
        advice = (
            f"{others[0]!r} matches, and is frozen, or another name of a shared parameter; call "
            "requires_grad_(True) on it, or use its first name."
        )
    else:
        close = get_close_matches(pattern, names, n=1, cutoff=0.4) or names[:1]
        advice = f"a name is for instance {close[0]!r}; * stands for any part of a name."
    raise ArgumentValueError(
        f"patterns: expected one that a trainable parameter of {type(model).__name__} matches, got "
        f"{pattern!r}: {advice}"
    )


class FunctionalLoss:
    """The loss of a module as a function of parameters and a batch; :func:`functional_loss` makes it.

        loss(params, batch) = criterion(outputs, targets)

    Args:
        model: The module, unmodified.
        criterion: A function or module (outputs, targets) -> scalar. Default: none, the model computes
            its own loss.
        forward: How the model is called on a batch, (model, batch) -> outputs. The criterion then
            gets (outputs, batch). Default: `model(*inputs)` for a tuple or list (*inputs, targets), and
            `model(batch)` for any other batch; without a criterion `model(**batch)`, `model(*batch)`
            or `model(batch)`.
    Example:
        >>> model = nn.Linear(2, 1)
        >>> loss = hog.functional_loss(model, F.mse_loss)
        >>> batch = torch.ones(4, 2), torch.zeros(4, 1)
        >>> outputs = loss.outputs({}, batch)
        >>> torch.equal(loss.criterion(outputs, batch), loss({}, batch))
        True
    """

    def __init__(
        self, model: nn.Module, criterion: Criterion | None = None, forward: Forward | None = None
    ) -> None:
        _check_module(model)
        self.model = model
        self._criterion = None if criterion is None else check_instance("criterion", criterion)
        self._forward = None if forward is None else check_instance("forward", forward)
        reason = None if forward is None else binding_error(forward, (model, None))
        if reason is not None:
            raise ArgumentTypeError(
                f"forward: expected a function of two arguments, (model, batch), got "
                f"{validation.describe(forward)} ({reason}). Write for instance "
                "`forward=lambda model, batch: model(**batch)`."
            )
        self._dtype: torch.dtype | None = None  # float64 of double(); None: the model's own
        self._norm_policy: NormPolicy = train_mode_batch_statistics
        self._constants: Params = {}  # with_parameters(): values that replace the model's own
        # ids of the model and its parameters, to notice replaced parameters, also in a deepcopy
        self._made_with = id(model), {name: id(p) for name, p in model.named_parameters()}
        self._parameter_ids: set[tuple[int, str]] = set()  # (id, name) of the model's parameters
        self._names: set[str] = set()  # all names of the model's parameters
        # tuples of names that `_refuse_own_parameters` has passed
        self._searched: set[tuple[str, ...]] = set()
        self._compiled = False  # part of the model is torch.compile's; set at the first call
        if not torch.compiler.is_dynamo_compiling():
            BY_ID[id(self)] = self

    def __setstate__(self, state: dict[str, Any]) -> None:  # copy() and pickle call it
        self.__dict__.update(state)
        BY_ID[id(self)] = self

    def __call__(self, params: Params, batch: object, *more: Any) -> Tensor:
        if more:
            raise ArgumentTypeError(
                f"loss(params, batch): expected one batch, got {1 + len(more)} arguments in its place. "
                "Pass them as one tuple, (x, y)."
            )
        with self._swapped(params):  # around the criterion, too: it may read the model's parameters
            return self.criterion(self._outputs(params, batch), batch)

    def _replaced_parameter(self, params: Tree) -> str:
        """The name of the first parameter, if the model has replaced it since this loss was made.

        "" if the model still has the parameter, or never had the parameter.
        """
        if not isinstance(params, dict) or not params:
            return ""
        name, value = next(iter(params.items()))
        if self._made_with[0] != id(self.model) or self._made_with[1].get(name) != id(value):
            return ""
        path, _, own_name = name.rpartition(".")
        with suppress(AttributeError):
            module = self.model.get_submodule(path)
            own = module._parameters.get(own_name, value)
            return "" if own is value or is_swapped(module, own_name) else name
        return ""

    def outputs(self, params: Params, batch: object) -> Any:
        """The model's outputs on a batch.

        Args:
            params: Parameters by qualified name; missing ones have the model's values.
            batch: The batch, of any kind that the loss takes.
        Returns:
            The model's result: a tensor, tuple, dict or any other object.
        """
        with self._swapped(params):
            return self._outputs(params, batch)

    def criterion(self, outputs: object, batch: object) -> Tensor:
        """The criterion at given outputs of the model.

        Args:
            outputs: The result of :meth:`outputs`.
            batch: The batch; the criterion gets its targets, or the whole batch.
        Returns:
            A scalar.
        """
        if self._criterion is None:
            return _own_loss(self.model, outputs)
        targets = self.targets(batch)
        whole = targets is batch
        if whole and isinstance(batch, Tensor) and isinstance(outputs, Tensor):
            compares = self._criterion in ELEMENTWISE or type(self._criterion) in ELEMENTWISE
            if compares and outputs.shape != batch.shape:  # torch would broadcast them
                raise ArgumentValueError(
                    f"batch: expected targets for outputs of shape {tuple(outputs.shape)}, got one "
                    f"tensor, its own target, of shape {tuple(batch.shape)}; pass (inputs, targets)."
                )
            name = getattr(self._criterion, "__name__", type(self._criterion).__name__)
            unlike = outputs.shape != batch.shape or name not in OF_PROBABILITIES
            if not (unlike or _may_be_probabilities(batch, name)):
                raise ArgumentValueError(
                    f"batch: expected targets, got one tensor, its own target, whose rows are no "
                    f"probabilities, as {name} compares; pass (inputs, targets)."
                )
        converted: AbstractContextManager[None] = nullcontext()
        if isinstance(self._criterion, nn.Module) and (
            self._dtype is not None or _may_change_buffers(self._criterion)
        ):
            # class weights must have the dtype of the outputs; forward changes copies of buffers
            converted = swap_parameters(self._criterion, {}, self._dtype)
        try:
            with converted:
                value = self._criterion(outputs, targets)
        except Exception as error:
            explain = partial(explain_criterion, self._criterion, outputs, targets, whole)
            explain_call_error(error, self._criterion, (outputs, targets), {}, explain)
            translate_batch_errors(batch, outputs).explain(error)
            raise
        second = "batch" if whole else "targets"
        return validation.scalar(f"criterion(outputs, {second})", value)

    def call(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """The model's output for arguments of any kind.

        Args:
            params: Parameters by qualified name; missing ones have the model's values.
            args: Positional arguments of the model.
            kwargs: Keyword arguments of the model.
        Returns:
            The model's result.
        """
        with self._swapped(params):
            return self.model(*args, **kwargs)

    def double(self) -> "FunctionalLoss":
        """This loss in float64, for parameters in float64, for instance for finite differences.

        Each call converts the model's buffers, its parameters outside `params`, and the parameters and
        buffers of a module criterion: complex tensors to complex128, integers not at all. The model is
        not changed and not copied, so the loss follows a training of the model. (A deepcopy would also
        fail for a model that keeps an output.) The caller converts parameters and batch. Tensors in
        plain attributes, and dtypes that forward names, are not converted: torch raises if they do not
        combine with float64.

        Returns:
            The loss in float64.
        """
        loss = copy(self)
        loss._dtype = torch.float64
        return loss

    def with_norm_policy(self, policy: NormPolicy) -> "FunctionalLoss":
        """This loss with other batch statistics in the model's normalisation layers.

        Args:
            policy: A function (patch, model), called before each run; it replaces running statistics
                by `patch.put(layer, name, value)`.
        Returns:
            The loss with this policy.
        """
        loss = copy(self)
        loss._norm_policy = policy
        return loss

    def with_parameters(self, params: Params) -> "FunctionalLoss":
        """This loss with new values for parameters of the model; `params` of a call takes precedence.

        Args:
            params: The values, by qualified name.
        Returns:
            The loss at these parameters.
        """
        loss = copy(self)
        loss._constants = {**self._constants, **params}
        return loss

    def targets(self, batch: Any) -> Any:
        """The second argument of the criterion.

        Args:
            batch: The batch.
        Returns:
            The last element of a tuple or list; the whole batch otherwise, with `forward`, and without
            a criterion.
        """
        whole = self._forward is not None or self._criterion is None
        return batch[-1] if not whole and _is_sequence(batch) else batch

    @property
    def separates_outputs(self) -> bool:
        """Whether outputs and criterion are apart, as Gauss-Newton and Fisher matrices need."""
        return self._criterion is not None

    @property
    def user_criterion(self) -> Criterion | None:
        """The criterion that was passed to :func:`functional_loss`, or None."""
        return self._criterion

    def __repr__(self) -> str:
        parts = [type(self.model).__name__]
        if self._criterion is not None:
            parts.append(function_name(self._criterion))
        if self._forward is not None:
            parts.append(f"forward={function_name(self._forward)}")
        return f"functional_loss({', '.join(parts)})" + (".double()" if self._dtype else "")

    def _outputs(self, params: Params, batch: object) -> Any:
        """The model's outputs; the caller has swapped the parameters."""
        if isinstance(batch, DataLoader):
            raise ArgumentTypeError(
                "batch: expected one batch, got a DataLoader; pass next(iter(loader)), or for the mean "
                "over all batches use an operator: `hoglib.HessianOperator(loss, params, loader) @ v`."
            )
        args, keywords = self._arguments(batch)
        try:
            # eagerly: torch.compile's code has no second derivative
            with torch_internals.eagerly() if self._compiled else nullcontext():
                if self._forward is not None:
                    outputs = self._forward(self.model, batch)
                else:
                    outputs = self.model(*args, **keywords)
        except Exception as error:
            if self._forward is None:
                explain = partial(self._explain_call, args, keywords, batch)
                explain_call_error(error, self.model, args, keywords, explain)
            translate_batch_errors(batch, params or list(self.model.parameters())).explain(error)
            translate_hook_errors("loss(params, batch)").explain(error)
            raise
        if torch.compiler.is_dynamo_compiling():
            return outputs
        if (names := tuple(params)) not in self._searched:
            look = partial(self._refuse_own_parameters, params, outputs)
            # once for each model and names: the walk visits all nodes of the graph
            if memoize_on(self.model, ("parameters from elsewhere", names), look):
                self._searched.add(names)
        return outputs

    def _refuse_own_parameters(self, params: Params, outputs: object) -> bool | None:
        """Raise if the model reads a parameter from outside its modules, such as a list or a closure.

        A swap does not replace the parameter there, so derivatives would be wrong. Returns True if all
        parameters come from modules; None if the outputs have no graph to search.
        """
        unwrap = torch_internals.unwrap
        # unwrap torch.func's wrappers; the walk stops at `given`, which may depend on the model's own
        given = [unwrap(p) for p in params.values()]
        with without_stand_ins():
            values = [unwrap(y) for y in pytree.tensors(outputs)]
            if torch_internals.tracing() or not any(y.requires_grad for y in values):
                return None
            leaves = [*leaf_tensors(values, given)]
        known = {*map(id, given)}
        # ids from before the swap: inside it the model has the given parameters
        own = {at: name for at, name in self._parameter_ids if name in params}
        for leaf in leaves:
            name = own.get(id(leaf))
            if name is not None and id(leaf) not in known:
                raise NoSecondDerivative(
                    f"{type(self.model).__name__}: expected a model that finds its parameters in "
                    f"their modules, got one that uses {name} from elsewhere too (a list or dict "
                    "of weights, a closure): there the derivative by it is lost. Read it from its "
                    "module, or leave it out of params."
                )
        return True

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model; none if `forward` calls the model."""
        if self._forward is not None:
            return (), {}
        if self._criterion is None:
            return _whole_batch(batch)
        return tuple(batch[:-1]) if _is_sequence(batch) else (batch,), {}

    def _explain_call(
        self, args: tuple[Any, ...], keywords: Mapping[str, Any], batch: object, reason: str
    ) -> str:
        """The message if the model does not take the batch's arguments."""
        forward = self.model.forward
        given = (*args, *keywords.values())
        passed = ", ".join([*map(describe_argument, args), *keywords])
        criterion = "" if self._criterion is None else "criterion, "
        text = (
            f"model: expected the arguments of {type(self.model).__name__}.forward"
            f"({', '.join(inspect.signature(forward).parameters)}), got {len(given)} from the batch: "
            f"{passed} ({reason}). Say how the model is called: "
            f"`functional_loss(model, {criterion}forward={forward_hint(forward, args, batch)})`."
        )
        if not criterion:
            return text
        text += " The criterion then gets (outputs, batch)."
        if isinstance(batch, Mapping) and "labels" in batch and "**batch" in text:
            text += (
                " Without a criterion, `functional_loss(model)` passes a mapping as keywords, and "
                "takes the loss that the model returns."
            )
        return text

    def _swapped(self, params: Params) -> AbstractContextManager[None]:
        """A context that swaps these parameters into the model."""
        validation.named_tensors("params", params)
        if self._constants:
            dtype = self._dtype
            constants = self._constants.items()
            own = {n: in_dtype(x, dtype) if dtype is not None else x for n, x in constants}
            params = {**own, **params}
        # While Dynamo traces: torch's own swap of parameters and buffers, which it can trace
        if torch.compiler.is_dynamo_compiling() and self._is_plain():
            # clones: forward may write into buffers
            buffers = {name: x.clone() for name, x in self.model.named_buffers()}
            if params.keys() <= dict(self.model.named_parameters(remove_duplicate=False)).keys():
                given = {**buffers, **params}
                return torch_internals.reparametrize_module(self.model, given, tie_weights=True)
        # list the model's names only for new names
        if not params.keys() <= self._names:
            self._check_names(params)
        return swap_parameters(self.model, params, self._dtype, self._norm_policy)

    def _is_plain(self) -> bool:
        """Whether a swap only replaces parameters and buffers: no max_norm, norm policy or dtype."""
        renormalized = any(getattr(m, "max_norm", None) is not None for m in self.model.modules())
        own_norms = self._norm_policy is not train_mode_batch_statistics
        return not (renormalized or own_norms or self._dtype is not None)

    def _check_names(self, params: Params) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._parameter_ids = {(id(p), name) for name, p in parameters.items()}
        self._names = {*parameters}
        self._compiled = torch_internals.has_compiled(self.model)
        for name in params:
            if name not in self._names:
                raise ArgumentValueError(
                    f"params: expected names of parameters of {type(self.model).__name__}, got {name!r}"
                    f"{validation.did_you_mean(name, self._names)} "
                    "`hoglib.trainable_params(model)` returns those that require grad."
                )


def _may_change_buffers(criterion: nn.Module) -> bool:
    """Whether a criterion has buffers and code of its own; torch's criteria keep class weights."""
    if torch.compiler.is_dynamo_compiling() or type(criterion).__module__.startswith("torch.nn."):
        return False
    return next(criterion.buffers(), None) is not None


def _may_be_probabilities(x: Tensor, criterion: str) -> bool:
    """Whether targets are in [0, 1] and sum to 1 over classes; True if their values are unknown."""
    if not x.is_floating_point() or not value_checks_on() or torch_internals.tracing():
        return True
    if torch_internals.transforms_active():
        return True
    sums = x.sum(min(1, x.dim() - 1)) if criterion in OF_CLASSES else x.new_ones(())
    return bool(((x >= 0) & (x <= 1)).all() & ((sums - 1).abs() < 0.01).all())


def check_instance(what: str, value: object) -> Any:
    """The function or module; raise for a class instead of an instance."""
    validation.function(what, value)
    if isinstance(value, type):
        raise ArgumentTypeError(
            f"{what}: expected a function or module, got the class {value.__name__}; "
            f"make one: `{value.__name__}()`."
        )
    return value


def _check_module(model: object) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            f"model: expected a torch.nn.Module written in Python, got a {type(model).__name__}, whose "
            "parameters cannot be swapped; pass the module that was scripted."
        )
    if not isinstance(model, nn.Module):
        got = validation.describe(model)
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {got}.")
    refuse_fsdp1(model)
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ArgumentTypeError(
            "model: expected a module that runs in the calling thread, got a DataParallel, whose "
            "replicas run in other threads with copies of the parameters; pass `model.module`."
        )


def _whole_batch(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model that computes its own loss."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        return tuple(batch), {}
    return (batch,), {}


def _own_loss(model: nn.Module, outputs: object) -> Tensor:
    """The loss among the outputs of a model with its own loss."""
    what = type(model).__name__
    advice = (
        "Pass the labels in the batch, or a criterion: "
        "`functional_loss(model, criterion, forward=lambda model, batch: model(...).logits)`."
    )
    if isinstance(outputs, Mapping) and "loss" in outputs:
        found = outputs["loss"]
    elif hasattr(outputs, "loss"):
        found = outputs.loss
    else:
        found = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    # without labels, models of transformers return loss=None
    if found is None or isinstance(found, Mapping):
        got = "None" if found is None else f"{type(found).__name__} with {', '.join(found)}"
        raise ArgumentValueError(f"{what}: expected a loss among the outputs, got {got}. {advice}")
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ArgumentValueError(
            f"{what}: expected a loss that is a scalar among the outputs, got "
            f"{validation.describe(found)}. {advice}"
        )
    return validation.scalar(f"{what}(batch).loss", found)


def _is_sequence(batch: object) -> bool:
    """Whether a batch consists of inputs and targets."""
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence):
        return False
    if len(batch) < 2:
        raise ArgumentValueError(
            f"batch: expected a pair (inputs, targets), or (input, input, ..., targets), got a "
            f"{type(batch).__name__} of {len(batch)}; a tensor, a dict or an object of your own is "
            "passed to the model as it is" + (", so pass its one element." if batch else ".")
        )
    return True
