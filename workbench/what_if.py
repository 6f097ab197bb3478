"""What if this batch were learnt from otherwise: the same rows, another loss, estimator or mask, on scratch weights.

On a batch that the policy has just written every clipped loss has the same first gradient (the ratio is 1), so the
comparison takes a few updates. The real weights, optimizer and version are put back, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.errors import PipelineError, message, unknown
from workbench.stages import Advantage, Pipeline, PolicyLoss, Reward, Update, validation_rollout
from workbench.stages.log_prob import SCORED_COLUMNS
from workbench.trace import perform


@dataclass(frozen=True)
class Side:
    """One way to learn from the batch."""

    name: str
    metrics: tuple[dict[str, float], ...] = field(repr=False)
    """One for each update."""
    new_log_probs: torch.Tensor = field(repr=False)
    """[B, T] under the weights after the last update, 0 outside the mask."""
    moved: torch.Tensor = field(repr=False)
    """The way that the weights went, flat float32."""
    probe: dict[str, float] = field(default_factory=dict)
    """What the held-out rows say: `log_prob` (mean per token), `reward`."""


@dataclass(frozen=True)
class WhatIf:
    """Both sides of the question."""

    changes: dict[str, str]
    actual: Side
    other: Side
    batch: DataProto = field(repr=False)
    before: dict[str, float] = field(default_factory=dict)
    """What the probe said before any update."""

    @property
    def cosine(self) -> float:
        """Between the ways that the weights went: 1 is the same direction. NaN where one did not move."""
        a, b = self.actual.moved.double(), self.other.moved.double()
        norm = float(a.norm() * b.norm())
        return float(a @ b) / norm if norm else float("nan")

    @property
    def difference(self) -> torch.Tensor:
        """[B, T]: log-prob of each token after the other updates, less that after the actual ones."""
        return self.other.new_log_probs - self.actual.new_log_probs

    def rows(self, number: int = 5) -> list[int]:
        """The rows whose tokens moved most apart."""
        apart = self.difference.abs().sum(-1)
        return apart.topk(min(number, len(apart))).indices.tolist()

    def __repr__(self) -> str:
        from workbench.views.replays import what_if_text

        return what_if_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.replays import what_if_html

        return what_if_html(self)


def what_if(
    pipeline: Pipeline,
    batch: DataProto,
    *,
    updates: int = 4,
    probe: Any = None,
    advantage: Callable[..., Any] | Advantage | None = None,
    rows: Sequence[int] | None = None,
    mask: torch.Tensor | None = None,
    **changes: Any,
) -> WhatIf:
    """Learn from `batch` `updates` times as the pipeline says, and `updates` times otherwise, and compare.

    `advantage` is another estimator; `rows` the rows to learn from alone; `mask` [B, T] the tokens to learn from; other
    names are settings of the policy loss (`clip_high`, `loss_mode`, `kl_coef`, `loss_agg_mode`, …). `probe` is a batch with responses (its mean log-prob per
    token is watched) or rows of a data set (they are sampled greedily and judged, which costs a rollout for each side).
    Raises `PipelineError` where the batch has no advantages yet, or nothing is changed.
    """
    update = next((stage for stage in pipeline if isinstance(stage, Update) and stage.role == "actor"), None)
    if update is None or not isinstance(update.made_with["loss"], PolicyLoss):
        raise PipelineError(message("what_if", expected="a pipeline with an update of the policy"))
    missing = [name for name in update.reads if name not in batch]
    if missing:
        raise PipelineError(
            message(
                "what_if",
                expected="a batch with advantages",
                found=f"no {', '.join(missing)}",
                do="run(until='advantage') first",
            )
        )
    loss: PolicyLoss = update.made_with["loss"]
    other_loss = loss.replace(**_settings(loss, changes))
    other = batch if advantage is None else _estimated(pipeline, batch, advantage)
    if rows is not None:
        other = other.with_columns({"scored": _only(other, rows)})
    if mask is not None:
        other = other.with_columns({"response_mask": batch["response_mask"] * mask.to(batch["response_mask"].dtype)})
    if other is batch and other_loss == loss:
        raise PipelineError(message("what_if changes nothing", do="give a setting, advantage=…, rows=… or mask=…"))
    named = {key: str(value) for key, value in changes.items()}
    if advantage is not None:
        named["advantage"] = getattr(advantage, "__name__", repr(advantage))
    if rows is not None:
        named["rows"] = f"{len(list(rows))} of {len(batch)}"
    if mask is not None:
        named["mask"] = f"{int(other['response_mask'].sum())} of {int(batch['response_mask'].sum())} tokens"
    bench = _Bench(pipeline, update, batch, probe)
    before = bench.probed()
    try:
        actual = bench.learnt("as it is", loss, batch, updates)
        changed = bench.learnt(", ".join(f"{key}={value}" for key, value in named.items()), other_loss, other, updates)
    finally:
        bench.restore()
    return WhatIf(named, actual, changed, batch, before)


def _settings(loss: PolicyLoss, changes: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in changes.items():
        own = loss.name_of(name)
        if own is None:
            raise PipelineError(unknown("setting of the policy loss", name, (*loss.field_names(), *loss.ALIASES)))
        found[own] = value
    return found


def _estimated(pipeline: Pipeline, batch: DataProto, advantage: Callable[..., Any] | Advantage) -> DataProto:
    """The batch with other advantages; a KL controller of the pipeline is not told about it."""
    old: Any = pipeline["advantage"]
    stage = advantage if isinstance(advantage, Advantage) else old.with_function(advantage)
    state = stage.state()
    kept = batch.without(*(name for name in stage.writes if name in batch))
    made = perform(stage, kept).batch
    if state:
        stage.load_state(state)
    return made


def _only(batch: DataProto, rows: Sequence[int]) -> torch.Tensor:
    chosen = torch.zeros(len(batch), dtype=torch.bool)
    chosen[list(rows)] = True
    return batch["scored"] & chosen if "scored" in batch else chosen


class _Bench:
    """Scratch weights, and the way back."""

    def __init__(self, pipeline: Pipeline, update: Update, batch: DataProto, probe: Any) -> None:
        self._pipeline, self._update, self._whole, self._probe = pipeline, update, batch, probe
        self._learner = update.learners()[0]
        self._start = self._learner.snapshot()

    def restore(self) -> None:
        """The real weights, optimizer and version."""
        self._learner.restore(self._start)

    def learnt(self, name: str, loss: PolicyLoss, batch: DataProto, updates: int) -> Side:
        """`updates` optimizer passes over the batch from the real weights, and what came of them."""
        self.restore()
        stage = Update(**{**self._update.made_with, "loss": loss, "allow_stale": True})
        metrics = tuple(perform(stage, batch).metrics for _ in range(updates))
        scored = self._learner.score(self._whole.select(list(SCORED_COLUMNS)), ("log_probs",), self._update.temperature)
        return Side(name, metrics, scored["log_probs"], self._moved(), self.probed())

    def _moved(self) -> torch.Tensor:
        now = self._learner.snapshot()["weights"]
        start = self._start["weights"]
        return torch.cat(
            [(now[key] - start[key]).flatten().float() for key in sorted(start) if start[key].is_floating_point()]
        )

    def probed(self) -> dict[str, float]:
        """Of the weights as they are in the engine now."""
        if self._probe is None:
            return {}
        if isinstance(self._probe, DataProto):
            found = self._learner.score(self._probe, ("log_probs",), self._update.temperature)["log_probs"]
            return {"log_prob": float(found.sum() / self._probe["response_mask"].sum().clamp(min=1))}
        rollout: Any = self._pipeline["rollout"]
        reward: Any = self._pipeline["reward"]
        greedy = validation_rollout(rollout, greedy=True)
        judge: Reward = reward
        parts = [judge(greedy(batch).batch).batch for batch in self._probe.in_order(256)]
        values = torch.cat([part["reward"][part["scored"]] for part in parts])
        return {"reward": float(values.mean())} if len(values) else {}
