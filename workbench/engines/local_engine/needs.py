"""What a local engine needs of memory, has of it, and has taken."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from workbench.base.errors import EngineError
from workbench.engines import rehearsal
from workbench.engines.local_engine.memory import Live, available, learning_estimate, live, peaks
from workbench.engines.rehearsal import Shape
from workbench.engines.settings import LocalSettings


class Needs:
    """What a local engine says of its memory."""

    _model: Any
    _settings: LocalSettings
    _optimizer: Any
    _critic: bool
    _rehearsed: Any

    @property
    def _steps(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not say how many updates it has taken")

    def peaks(self, begin: bool = False) -> dict[str, int]:
        """Most bytes since the last call with `begin`: `device`, of tensors on the GPU, which has `total`."""
        return peaks(self._model.device.type, begin) | {"host": 0}

    def memory_needed(self, tokens: int | None = None, measured: bool = False) -> tuple[torch.device, dict[str, int]]:
        """The device, and the bytes by part that learning will allocate there beyond those in use now.

        `tokens` of a mini-batch, padding included; None: a full micro-batch. Estimated from the model's sizes, or `measured` by
        `engines.rehearsal`, in seconds; where that cannot be, the estimate.
        """
        device, budget = self._model.device, self._settings.budget(self._model.device.type)
        parts = learning_estimate(self._model, self._settings, tokens)
        if measured:
            with suppress(EngineError):
                shape = Shape.of(budget, budget if tokens is None else min(budget, tokens), tokens)
                kind = {"gpu": device.type == "cuda", "head": self._critic}
                parts = rehearsal.whole(self._rehearsed, self._model.config, self._settings, shape, **kind).parts
        return device, {name: size for name, size in parts.items() if name != "optimizer" or not self._steps}

    def memory_free(self) -> int:
        """Bytes of the device that can still be allocated; what torch keeps for reuse counts as free."""
        return available(self._model.device)

    def _live(self) -> Live:
        return live(self._model, self._optimizer, self._settings)
