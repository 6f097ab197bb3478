"""The ways in which the local engine can decode: the fastest that the self-check proves is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.base.errors import EngineError
from workbench.engines.local_engine.decode import Cache, PaddedRows
from workbench.engines.local_engine.forward import STAND_IN, pictured_inputs
from workbench.engines.local_engine.lean import lean_step
from workbench.engines.local_engine.prefix import shared_prefix
from workbench.engines.protocol import Request
from workbench.functional.logprobs import CHUNK_BYTES

LEAN, SHARED, OWN_CACHE, UNCACHED = PATHS = ("lean", "shared prompts", "own cache", "no cache")
"""The fastest first: prompts shared in attention, without the model's modules or with them, the model's own cache, the whole
row again for each token."""


def paths_of(model: Any, wanted: str) -> tuple[str, ...]:
    """The ways to try for a model: the one that the setting `decode` names, or with `auto` all that its structure allows."""
    return tuple(path for path in PATHS if path != LEAN or lean_step(model)) if wanted == "auto" else (wanted,)


@contextmanager
def cache_of(model: Any, path: str, budget: int) -> Iterator[Cache]:
    """Context manager: yields the cache of a wave by its name in `PATHS`; prompts are prefilled `budget` tokens at a time."""
    if path in (LEAN, SHARED):
        step = lean_step(model) if path == LEAN else None
        if path == LEAN and step is None:
            raise EngineError("decode='lean'", expected="a model shaped like Llama's", found=type(model).__name__)
        with shared_prefix(model, step, budget) as shared:
            yield shared
    else:
        yield Uncached(model) if path == UNCACHED else PaddedRows(model)


class Uncached:
    """A `Cache` that keeps token ids alone, for models with a memory of their own kind: right for any causal model, and slow."""

    refills = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: list[list[int]] = []

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Keep the rows of these seats, and the prompts of new rows."""
        held = self._rows
        self._rows = [list(prompts[seat][:-1]) if seat in prompts else list(held[of]) for seat, of in enumerate(order)]

    def step(self, tokens: Tensor) -> Tensor:
        """[n, V] logits after one more token [n] in each seat: a forward pass of all rows, padded at the right."""
        for row, token in zip(self._rows, tokens.tolist(), strict=True):
            row.append(token)
        vocabulary = self._model.config.get_text_config().vocab_size
        size = max(CHUNK_BYTES // (4 * vocabulary * max(map(len, self._rows))), 1)
        parts = [self._rows[start : start + size] for start in range(0, len(self._rows), size)]
        return torch.cat([self._logits(part) for part in parts])

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        device, width = self._model.device, max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = (torch.arange(width, device=device) < lengths[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        last: Tensor = logits[torch.arange(len(rows), device=device), lengths - 1]
        return last


class PicturedRows(PaddedRows):
    """The model's own cache over left-padded rows with pictures, which all enter at once."""

    def __init__(self, model: Any, requests: Sequence[Request]) -> None:
        super().__init__(model)
        self._requests = requests
        self._ahead: Tensor
        """How far each row's positions are from the number of tokens before."""

    def seat(self, order: Sequence[int], prompts: Mapping[int, tuple[int, ...]]) -> None:
        """Prefill each different prompt with its pictures once, or drop rows."""
        if prompts:
            order = self._prefill()
        super().seat(order, {})
        self._ahead = self._ahead[torch.tensor(order, device=self._ahead.device)]

    def _prefill(self) -> list[int]:
        """One forward pass of the different prompts; returns the number of each request's."""
        from transformers import DynamicCache

        device, keys = self._model.device, [(one.ids, id(one.pixels)) for one in self._requests]
        different = {key: one for key, one in zip(keys, self._requests, strict=True)}
        width = max(len(one.ids) for one in different.values())
        ids = torch.tensor([[0] * (width - len(one.ids)) + list(one.ids) for one in different.values()], device=device)
        rows = [[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in different.values()]
        self._mask, self._cache = torch.tensor(rows, device=device), DynamicCache(config=self._model.config)
        told = pictured_inputs(self._model, ids, self._mask, [one.pixels or {} for one in different.values()])
        last = told["position_ids"][..., -1]
        last = last.amax(0) if last.dim() > 1 else last
        self._ahead = last - (self._mask.sum(-1) - 1)
        self._logits = self._model(**told, **{self._name: self._cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
        places = {key: place for place, key in enumerate(different)}
        return [places[key] for key in keys]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        read = ids.masked_fill(ids == self._model.config.image_token_id, STAND_IN)
        return super()._forward(read, positions + self._ahead[:, None])
