"""What a function's result depends on besides its arguments, so that it can be run again alike."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


class Autocast:
    """Autocast as it was when this was made."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *(tensor.device.type for tensor in tensors)}
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            yield


class Surroundings:
    """Random generators, autocast, and modes of modules, as they were when this was made."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        generators: Iterable[torch.Generator],
        modules: Iterable[nn.Module],
    ) -> None:
        devices = {tensor.device for tensor in tensors}
        every = [torch.default_generator, *map(_default_generator, devices), *generators]
        unique = {id(generator): generator for generator in every if generator is not None}
        self._generators = [(generator, generator.get_state()) for generator in unique.values()]
        self._modes = [(module, module.training) for module in modules]
        self.autocast = Autocast(tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Generators and modes as they were; afterwards, as they are now."""
        states = [generator.get_state() for generator, _ in self._generators]
        modes = [module.training for module, _ in self._modes]
        try:
            for generator, state in self._generators:
                generator.set_state(state)
            for module, training in self._modes:
                module.training = training
            yield
        finally:
            for (generator, _), state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            for (module, _), training in zip(self._modes, modes, strict=True):
                module.training = training


def _default_generator(device: torch.device) -> torch.Generator | None:
    if device.type in ("cpu", "meta"):
        return None
    generators = getattr(torch.get_device_module(device.type), "default_generators", ())
    return generators[device.index or 0] if generators else None
