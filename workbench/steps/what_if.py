"""What another update would do with this batch: the same rows with another loss, estimator or mask, on a copy of the
weights.

On a batch that the present policy sampled every clipped loss has the same first gradient (the ratio is 1), so the
comparison takes a few updates. The real weights, optimizer and version are restored in any case.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.base.config import Settings, require
from workbench.base.errors import PipelineError, describe, refuse_unknown
from workbench.base.memory import is_large, release
from workbench.base.progress import present, working
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Estimates, Snapshot
from workbench.stages.advantage import Advantage
from workbench.stages.episodes import validation_rollout
from workbench.stages.log_prob import LogProb, scored_columns
from workbench.stages.pipeline import Pipeline
from workbench.stages.trl import MaskTruncated
from workbench.stages.update import Update
from workbench.steps.trace import perform


@dataclass(frozen=True)
class Side:
    """Result of the updates on a batch with one loss and one set of advantages."""

    name: str
    metrics: tuple[dict[str, float], ...] = field(repr=False)
    """Metrics of each update, in order."""
    new_log_probs: torch.Tensor = field(repr=False)
    """[B, T] under the weights after the last update, 0 outside the mask."""
    moved_norm: float = field(repr=False)
    """L2 norm of the change of all weights."""
    probe: dict[str, float] = field(default_factory=dict)
    """Value on held-out rows after the updates: `log_prob` (mean per token) or `reward`."""


@dataclass(frozen=True, repr=False)
class WhatIf(Shown):
    """Result of `what_if`: the updates as the pipeline makes them (`actual`) and with the changed settings (`other`)."""

    changes: dict[str, str]
    actual: Side
    other: Side
    batch: DataProto = field(repr=False)
    cosine: float = float("nan")
    """Cosine between the weight changes of both sides: 1 is the same direction; NaN where one side changed nothing."""
    before: dict[str, float] = field(default_factory=dict)
    """The probe's values before any update."""

    @property
    def difference(self) -> torch.Tensor:
        """[B, T]: log-prob of each token after the `other` updates minus its log-prob after the `actual` ones."""
        return self.other.new_log_probs - self.actual.new_log_probs

    def rows(self, number: int = 5) -> list[int]:
        """Numbers of the rows whose log-probs differ most between both sides, the largest difference first."""
        apart = self.difference.abs().sum(-1)
        return apart.topk(min(number, len(apart))).indices.tolist()


@working("what_if", unit="updates, first as they are, then changed")
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
    """Compare `updates` policy updates on a batch as the pipeline makes them with as many under changed settings.

    The weights are restored afterwards. `advantage` is another estimator; `rows` the only rows to train on; `mask` [B, T]
    the only tokens to train on; `mask_truncated=True` leaves truncated responses out; other names are settings of the loss
    (`clip_ratio_high`, `loss_mode`, `kl_coef`, `loss_agg_mode`, …), and `<term>.<setting>` one of a further term (`**{"distill.weight": 0}`). `probe` is a batch with responses (its mean log-prob per token is measured) or rows of a data set
    (their greedy responses are sampled and scored, which costs a rollout for each side). Raises `PipelineError` where the
    batch lacks columns that the update reads, or nothing is changed.
    """
    update, changed_update = update_with(pipeline, changes)
    if missing := [name for name in update.reads if name not in batch]:
        found, do = f"no {', '.join(missing)}", "run(until='advantage') first"
        raise PipelineError(
            "what_if cannot use this batch", expected="a batch as it is before the update", found=found, do=do
        )
    if "old_log_probs" not in batch:  # one update would take its own, and the ratio after is to them
        batch = perform(LogProb(update.learners()[0], temperature=update.temperature), batch).batch
    other, named = batch, {key: str(value) for key, value in changes.items()}
    if changes.get("mask_truncated"):
        fits = "loss_mask" not in update.writes
        require(
            fits, "mask_truncated", expected="a loss that rejects no tokens itself (bypass mode)", found=update.name
        )
        other = MaskTruncated()(other).batch
    if advantage is not None:
        other = _estimated(pipeline, other, advantage)
        named["advantage"] = getattr(advantage, "__name__", repr(advantage))
    if rows is not None:
        chosen = torch.zeros(len(batch), dtype=torch.bool)
        chosen[list(rows)] = True
        other = other.with_columns({"scored": batch["scored"] & chosen if "scored" in batch else chosen})
        named["rows"] = f"{len(list(rows))} of {len(batch)}"
    if mask is not None:
        whole = batch["response_mask"]
        other = other.with_columns({"response_mask": whole * mask.to(whole.dtype)})
        named["mask"] = f"{int(other['response_mask'].sum())} of {int(whole.sum())} tokens"
    if other is batch and changed_update.settings() == update.settings():
        raise PipelineError("what_if changes nothing", do="pass a setting of the loss, advantage=…, rows=… or mask=…")
    present().expect(2 * updates)
    bench = _Bench(pipeline, update, batch, probe)
    before = bench.probed()
    try:
        actual = bench.updated("actual", update, batch, updates)
        words = ", ".join(f"{key}={value}" for key, value in named.items())
        changed = bench.updated(words, changed_update, other, updates)
        norm = actual.moved_norm * changed.moved_norm
        cosine = bench.product() / norm if norm else float("nan")
    finally:
        bench.restore()
        del bench
        release()
    return WhatIf(named, actual, changed, batch, cosine, before)


def update_with(pipeline: Pipeline, changes: Mapping[str, Any]) -> tuple[Update, Update]:
    """Return a pipeline's policy update, and the same with the changed settings of `what_if`. Nothing is computed, so
    that a wrong name is refused before any work.
    """
    stages = pipeline if isinstance(pipeline, Pipeline) else ()
    update = next((stage for stage in stages if isinstance(stage, Update) and stage.role == "actor"), None)
    if update is None or not isinstance(loss := update.made_with["loss"], Settings):
        expected, found = "a Pipeline with a policy update", describe(pipeline)
        raise PipelineError("what_if cannot use this pipeline", expected=expected, found=found)
    of_terms = {name: value for name, value in changes.items() if "." in name}
    others = {"advantage", "rows", "mask", "mask_truncated", *of_terms}
    own = {name: value for name, value in changes.items() if name not in others}
    refuse_unknown("what_if", own, loss.field_names())
    return update, update.with_settings(**of_terms, loss=loss.replace(**own))


def _estimated(pipeline: Pipeline, batch: DataProto, advantage: Callable[..., Any] | Advantage) -> DataProto:
    """Return the batch with advantages by another estimator; the state of the pipeline's KL controller is not changed."""
    old: Any = pipeline["advantage"]
    stage = advantage if isinstance(advantage, Advantage) else old.with_function(advantage)
    state = stage.state()
    later = (name for one in pipeline if one.updates for name in one.writes)  # such as the update's own loss_mask
    estimated = perform(stage, batch.without(*(name for name in {*stage.writes, *later} if name in batch))).batch
    if state:
        stage.load_state(state)
    return estimated


class _Bench:
    """Makes updates on scratch weights: each run starts from the real weights, which `restore` puts back."""

    def __init__(self, pipeline: Pipeline, update: Update, batch: DataProto, probe: Any) -> None:
        self._pipeline, self._update, self._whole, self._probe = pipeline, update, batch, probe
        self._learner = update.learners()[0]
        size = self._learner.checkpoint_bytes() if isinstance(self._learner, Estimates) else 0
        self._kept = ("disk", tempfile.gettempdir()) if is_large(size) else ()
        self._start = self._learner.snapshot(*self._kept)
        self._ends: list[Snapshot] = []
        """The state after each side's updates."""

    def product(self) -> float:
        """Dot product of both sides' weight changes."""
        return sum(float(a @ b) for a, b in zip(*map(self._changes, self._ends), strict=True))

    def restore(self) -> None:
        self._learner.restore(self._start)

    def updated(self, name: str, update: Update, batch: DataProto, updates: int) -> Side:
        """Update `updates` times on the batch, starting from the real weights, and return what that changed."""
        self.restore()
        always = {"allow_stale": True, "recompute_old_log_probs": True}  # one set of old log-probs for all updates
        stage = Update(**{**update.made_with, **always})
        stage.load_state(update.state())
        metrics = []
        for _ in range(updates):
            metrics.append(perform(stage, batch).metrics)
            present().passed(1)
        self._ends.append(self._learner.snapshot(*self._kept))
        norm = math.sqrt(sum(float(change.square().sum()) for change in self._changes(self._ends[-1])))
        return Side(name, tuple(metrics), self._log_probs(self._whole), norm, self.probed())

    def _changes(self, end: Snapshot) -> Iterator[torch.Tensor]:
        """Yield the weights' changes since the start as float64 vectors of at most a million numbers, because together they
        are larger than the model.
        """
        now, start = end["weights"], self._start["weights"]
        for key in sorted(start):
            if (before := start[key]).is_floating_point():
                pieces = zip(now[key].flatten().split(1 << 20), before.flatten().split(1 << 20), strict=True)
                yield from (after.double() - before.double() for after, before in pieces)

    def _log_probs(self, batch: DataProto) -> torch.Tensor:
        chosen, temperature = batch.select(scored_columns(batch, policy=True)), self._update.temperature
        return torch.as_tensor(self._learner.compute_log_probs(chosen, ("log_probs",), temperature)["log_probs"])

    def probed(self) -> dict[str, float]:
        """Measure the probe (held-out log-prob or reward) with the weights that are in the engine now."""
        if self._probe is None:
            return {}
        if isinstance(self._probe, DataProto):
            tokens = self._probe["response_mask"].sum().clamp(min=1)
            return {"log_prob": float(self._log_probs(self._probe).sum() / tokens)}
        rollout: Any = self._pipeline["rollout"]
        reward: Any = self._pipeline["reward"]
        greedy = validation_rollout(rollout, greedy=True)
        parts = [reward(greedy(batch).batch).batch for batch in self._probe.in_order(256)]
        values = torch.cat([part["reward"][part["scored"]] for part in parts])
        return {"reward": float(values.mean())} if len(values) else {}
