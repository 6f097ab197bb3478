"""Score a policy on prompts: held-out validation, or any checkpoint by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.datasets import Rows
from workbench.engines import SamplingSettings, local
from workbench.errors import DataError, describe, message
from workbench.runs.checkpoint import verify
from workbench.runs.run import Run, load_run
from workbench.stages import EpisodeRollout, Reward, Rollout


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Rewards of a policy on some prompts."""

    mean: float
    """Mean reward over prompts (the mean of a prompt's samples), rows without a judgement left out."""
    interval: tuple[float, float]
    """95 % interval of that mean: normal approximation over prompts, mean ± 1.96·s/√n; NaN for one prompt."""
    prompts: int
    samples: int
    greedy: bool
    """Temperature 0."""
    unscored: int
    """Rows that have no judgement."""
    by_source: dict[str, float]
    """data_source → mean."""
    batch: DataProto = field(repr=False)
    """Every row with its response and score."""

    def __repr__(self) -> str:
        low, high = self.interval
        text = f"Evaluation: mean reward {self.mean:.4f}, 95 % in [{low:.4f}, {high:.4f}] (normal, over {self.prompts} prompts × {self.samples} {'greedy' if self.greedy else 'sampled'})"
        if len(self.by_source) > 1:
            text += "; " + ", ".join(f"{source} {mean:.4f}" for source, mean in self.by_source.items())
        return text + (f", {self.unscored} rows not scored" if self.unscored else "")

    def _repr_html_(self) -> str:
        from workbench.views.html import escape
        from workbench.views.samples import samples_html

        return f"<div><b>{escape(repr(self))}</b></div>" + samples_html(self.batch, rows=6, order="worst")


def evaluate(
    model: Any,
    rows: Rows,
    *,
    reward: Any = None,
    samples: int = 1,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
    limit: int | None = None,
    agent: Any = None,
) -> Evaluation:
    """Sample and score every row, or the first `limit`. `temperature=0` is greedy; with an `agent` every sample is an episode.

    `model` is an engine, a model or checkpoint folder, a run folder, or a `Run` (its newest checkpoint and its
    longest response, unless `max_tokens` says another; 128 elsewhere). A checkpoint is verified first: a damaged one raises `CheckpointError`. A row's seed is derived from (seed, "validation", uid, sample): the same rows give the same
    prompts' seeds at every step, and nothing that training uses is drawn from.
    """
    engine, longest = _engine(model)
    sampling = SamplingSettings(temperature=temperature, max_tokens=max_tokens or longest or 128)
    drawn: dict[str, Any] = {"group_size": samples, "sampling": sampling, "purpose": "validation"}
    rollout = Rollout(engine, **drawn) if agent is None else EpisodeRollout(engine, agent=agent, **drawn)
    chosen = rows if limit is None else rows[:limit]
    stage = reward if isinstance(reward, Reward) else Reward(reward)
    return score_rows(rollout, stage, chosen.in_order(batch_size, seed))


def _engine(model: Any) -> tuple[Any, int | None]:
    """The engine to sample from, and the longest response that its run sampled."""
    if hasattr(model, "sample"):
        return model, None
    if isinstance(model, str | Path):
        folder = Path(model)
        if (folder / "settings.json").is_file():
            return _engine(load_run(folder))
        if (folder / "manifest.json").is_file():
            verify(folder)
        return local(model), None
    if isinstance(model, Run):
        rollout = model.settings.get("stages", {}).get("rollout", {})
        return local(model.checkpoint()), rollout.get("max_tokens")
    raise DataError(message("evaluate", expected="an engine, a folder or a Run", found=describe(model)))


def score_rows(rollout: Rollout, reward: Reward, batches: Iterable[DataProto]) -> Evaluation:
    """Roll out and score batches. Raises `DataError` where there are none."""
    parts = [reward(rollout(batch).batch).batch for batch in batches]
    if not parts:
        raise DataError(message("nothing to evaluate", found="no rows"))
    values, scored, uids, sources = [], [], [], []
    for part in parts:
        values += part["reward"].tolist()
        scored += part["scored"].tolist()
        uids += list(part["uid"])
        sources += list(part["data_source"]) if "data_source" in part else [None] * len(part)
    means = _prompt_means(values, scored, uids)
    by_source = {
        str(source): _mean(
            list(
                _prompt_means(
                    values, [ok and s == source for ok, s in zip(scored, sources, strict=True)], uids
                ).values()
            )
        )
        for source in dict.fromkeys(sources)
    }
    center = _mean(list(means.values()))
    half = _half_width(list(means.values()))
    return Evaluation(
        mean=center,
        interval=(center - half, center + half),
        prompts=len(set(uids)),
        samples=rollout.group_size,
        greedy=rollout.sampling.temperature == 0,
        unscored=scored.count(False),
        by_source=by_source,
        batch=DataProto.concat([_padded(part, parts) for part in parts]),
    )


def _prompt_means(values: list[float], counts: list[bool], uids: list[str]) -> dict[str, float]:
    groups: dict[str, list[float]] = {}
    for value, count, uid in zip(values, counts, uids, strict=True):
        if count:
            groups.setdefault(uid, []).append(value)
    return {uid: _mean(group) for uid, group in groups.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _half_width(values: list[float]) -> float:
    if len(values) < 2:
        return float("nan")
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return 1.96 * math.sqrt(variance / len(values))


def _padded(part: DataProto, parts: list[DataProto]) -> DataProto:
    """Only what a viewer needs, [b, T] columns padded to the longest T, so that batches can be joined."""
    width = max(one["response_mask"].shape[1] for one in parts)
    objects = [name for name in part.non_tensor_batch]
    kept = part.select(["responses", "response_mask", "reward", "scored"], objects)
    extra = width - part["response_mask"].shape[1]
    if not extra:
        return kept
    return kept.without("responses", "response_mask").with_columns(
        {name: torch.nn.functional.pad(part[name], (0, extra)) for name in ("responses", "response_mask")}
    )
