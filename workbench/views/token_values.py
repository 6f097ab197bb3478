"""Every number that a batch has for the tokens of one response, by the name that people ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workbench.columns import declared
from workbench.dataproto import DataProto
from workbench.engines.token_texts import open_tokenizer, token_texts
from workbench.errors import unknown
from workbench.views.sample_index import batch_of

Part = Callable[[str], torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A per-token number, and how it is coloured."""

    name: str
    what: str
    read: Callable[[Part], torch.Tensor | None]
    """From `part(column)`, [T] or None, to [T] or None."""
    centre: float | None = None
    """Signed around this; None: from the lowest to the highest."""
    inverted: bool = False
    """The low ones stand out."""


def _column(name: str) -> Callable[[Part], torch.Tensor | None]:
    return lambda part: part(name)


def _joined(one: str, two: str, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    def read(part: Part) -> torch.Tensor | None:
        a, b = part(one), part(two)
        return None if a is None or b is None else make(a.double(), b.double())

    return read


def _policy(part: Part) -> torch.Tensor | None:
    found = part("old_log_probs")
    return found if found is not None else part("rollout_log_probs")


def _rewards(part: Part) -> torch.Tensor | None:
    found = part("token_level_rewards")
    return found if found is not None else part("token_level_scores")


QUANTITIES: Mapping[str, Quantity] = {
    one.name: one
    for one in (
        Quantity(name="log_prob", what="log-prob under the policy, nats", read=_policy, inverted=True),
        Quantity(
            name="ref_log_prob", what="log-prob under the reference, nats", read=_column("ref_log_prob"), inverted=True
        ),
        Quantity(
            name="kl",
            what="log-prob under the policy less under the reference (k1), nats",
            read=_joined("old_log_probs", "ref_log_prob", lambda a, b: a - b),
            centre=0.0,
        ),
        Quantity(
            name="ratio",
            what="probability after the update over before",
            read=_joined("new_log_probs", "old_log_probs", lambda a, b: (a - b).exp()),
            centre=1.0,
        ),
        Quantity(name="clipped", what="whether the surrogate was clipped", read=_column("clipped")),
        Quantity(name="advantage", what="how much better than expected", read=_column("advantages"), centre=0.0),
        Quantity(name="return", what="return from the token on", read=_column("returns"), centre=0.0),
        Quantity(name="value", what="the critic's value", read=_column("values"), centre=0.0),
        Quantity(name="entropy", what="entropy of the next-token distribution, nats", read=_column("entropys")),
        Quantity(name="reward", what="reward on the token, KL penalty included", read=_rewards, centre=0.0),
        Quantity(name="mask", what="1: the model's own token", read=_column("response_mask")),
        Quantity(
            name="sampler_difference",
            what="log-prob by the sampler less by the trainer, nats",
            read=_joined("rollout_log_probs", "old_log_probs", lambda a, b: a - b),
            centre=0.0,
        ),
        Quantity(name="influence", what="influence on the probe", read=_column("influence"), centre=0.0),
    )
}
_SHOWN_ALREADY = {
    "responses", "response_mask", "rollout_log_probs", "old_log_probs", "new_log_probs", "ref_log_prob", "clipped", "advantages",
    "returns", "values", "entropys", "token_level_rewards", "token_level_scores", "influence",
}  # fmt: skip


class TokenRow:
    """The tokens of one row: texts, ids, which are the model's own, and every quantity there is.

    Only this row is read of a batch that lies on disk. Raises `IndexError` for a row that there is not, and
    `ValueError` where the batch has no token ids.
    """

    def __init__(self, thing: Any, row: int, tokenizer: Any = None) -> None:
        self.batch = batch_of(thing)
        self.row = row
        if not 0 <= row < len(self.batch):
            raise IndexError(f"row {row}: this batch has rows 0 to {len(self.batch) - 1}")
        if "responses" not in self.batch:
            raise ValueError(f"this batch has no token ids (`responses`), only {', '.join(self.batch.columns)}")
        tokenizer = tokenizer or _tokenizer_of(thing, self.batch)
        ids, real = self._part("responses"), self._real()
        assert ids is not None
        self.length = int(real.nonzero().max()) + 1 if real.any() else 0
        self.ids = ids[: self.length].tolist()
        own = self._part("response_mask")
        self.own = (own[: self.length] > 0).tolist() if own is not None else [True] * self.length
        self.texts = _texts(tokenizer, self.ids)
        prompt, mask = self._part("prompts"), self._part("prompt_mask")
        kept = [] if prompt is None else prompt[mask.bool()].tolist() if mask is not None else prompt.tolist()
        self.prompt = _texts(tokenizer, kept)
        self.values = self._values()

    def _part(self, name: str) -> torch.Tensor | None:
        if name not in self.batch.batch:
            return None
        return self.batch.batch.part(name, self.row, self.row + 1)[0]

    def _real(self) -> torch.Tensor:
        """[T]: not padding; tool text is real and not the model's own."""
        responses, attention = self._part("responses"), self._part("attention_mask")
        assert responses is not None
        if attention is not None:
            return attention[-len(responses) :].bool()
        mask = self._part("response_mask")
        return mask.bool() if mask is not None else torch.ones_like(responses, dtype=torch.bool)

    def _values(self) -> dict[str, list[float]]:
        found = {name: quantity.read(self._part) for name, quantity in QUANTITIES.items()}
        width = self.batch.batch.raw()["responses"].shape[1]
        for name, raw in self.batch.batch.raw().items():
            column = declared(name)
            if name not in _SHOWN_ALREADY and column is None and tuple(raw.shape[1:]) == (width,):
                found[name] = self._part(name)
        return {name: value[: self.length].double().tolist() for name, value in found.items() if value is not None}

    def quantity(self, name: str) -> Quantity:
        """How a name is read and coloured. Raises `ValueError` for one that this row does not have."""
        if name not in self.values:
            raise ValueError(unknown("per-token quantity", name, self.values))
        return QUANTITIES.get(name) or Quantity(name=name, what=name, read=_column(name), centre=0.0)


def _tokenizer_of(thing: Any, batch: DataProto) -> Any:
    """That of the model which the batch names, where its folder is still there; else a stepper's own. A recorded step's
    engine is not opened for it."""
    path = batch.meta_info.get("model")
    found = open_tokenizer(path) if isinstance(path, str) else None
    for stage in getattr(thing, "pipeline", None) or ():
        sampler = getattr(stage, "sampler", None)
        if found is None and getattr(sampler, "opened", True):
            found = getattr(sampler, "tokenizer", None)
    return found


def _texts(tokenizer: Any, ids: list[int]) -> list[str]:
    return token_texts(tokenizer, ids) if tokenizer is not None else [f"⟨{number}⟩" for number in ids]


def span_of_values(quantity: Quantity, rows: list[list[float]]) -> tuple[float, float]:
    """What the colours run over: lowest to highest, or as far from the centre on both sides; never empty."""
    values = [value for row in rows for value in row if math.isfinite(value)] or [0.0]
    low, high = min(values), max(values)
    if quantity.centre is not None:
        reach = max(abs(low - quantity.centre), abs(high - quantity.centre)) or 1.0
        return quantity.centre - reach, quantity.centre + reach
    return (low, high) if low < high else (low - 0.5, high + 0.5)


UP, DOWN, ONE_WAY = (46, 160, 67), (207, 80, 60), (130, 80, 223)


def colour_of(value: float, quantity: Quantity, span: tuple[float, float]) -> str:
    """A translucent rgba over the page's own background: green above the centre, red below, violet for one-way scales."""
    if not math.isfinite(value):
        return "rgba(255,0,255,0.6)"
    low, high = span
    if quantity.centre is not None:
        share = (value - quantity.centre) / (high - quantity.centre)
        shade = UP if share > 0 else DOWN
    else:
        share = (value - low) / (high - low)
        share = 1 - share if quantity.inverted else share
        shade = ONE_WAY
    return f"rgba({shade[0]},{shade[1]},{shade[2]},{min(abs(share), 1) * 0.65:.2f})"
