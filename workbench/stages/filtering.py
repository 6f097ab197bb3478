"""Stages that reshape or replace rows: DAPO's soft length penalty, dynamic sampling of groups, and reweighted resampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from workbench.base.config import require
from workbench.base.metrics import Count, Mean, Metric
from workbench.base.seeds import derive
from workbench.dataproto.columns import declared
from workbench.dataproto.core import DataProto, alike, is_last
from workbench.dataproto.value import apart
from workbench.functional.advantages import Groups
from workbench.functional.balancing import resampled
from workbench.rewards.base import response_lengths
from workbench.rewards.score import MISSING
from workbench.stages.advantage import group_numbers
from workbench.stages.measures import score_metrics
from workbench.stages.reward import on_last_token
from workbench.stages.stage import LEFT_OUT, BaseStage, Outcome, Stage


class Overlong(BaseStage):
    """DAPO's soft length penalty: responses that end in the last `buffer` tokens before `max_tokens` lose reward.

    They lose `penalty`·(length − (max_tokens − buffer)) / buffer, also written as `reward/overlong` (≤ 0); rows without a
    score lose 0. The length includes tool and user tokens, as in verl: `max_tokens` limits them all. Of an episode of several
    rows each loses by its own length; in an estimator of whole rows the last one's counts.
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13.
    """

    name = "overlong"
    reads = ("reward", "scored", "token_level_scores", "response_mask")
    writes = ("reward", "token_level_scores", "reward/overlong")

    def __init__(self, max_tokens: int, buffer: int, penalty: float = 1.0) -> None:
        require(0 < buffer <= max_tokens, "overlong buffer", expected=f"1 to {max_tokens} tokens", found=buffer)
        require(penalty >= 0, "overlong penalty", expected="≥ 0", found=penalty)
        self.max_tokens = max_tokens
        self.buffer = buffer
        self.penalty = penalty

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the same B rows with the penalty subtracted from their rewards."""
        mask = batch["response_mask"]
        beyond = (response_lengths(batch) - (self.max_tokens - self.buffer)).clamp(0, self.buffer).float() / self.buffer
        taken = torch.where(batch["scored"], -self.penalty * beyond, 0.0)
        columns = {
            "reward": batch["reward"] + taken,
            "token_level_scores": batch["token_level_scores"] + on_last_token(taken, mask),
            "reward/overlong": taken,
        }
        means = {"mean": taken.double().mean().item(), "share": (beyond > 0).double().mean().item()}
        metrics = {f"reward/overlong/{name}": Mean.of(value, len(batch)) for name, value in means.items()}
        written = self.written(batch, columns)
        return Outcome(written, {**score_metrics(written), **metrics})


class FilterGroups(BaseStage):
    """Dynamic sampling: drop groups whose rewards are all equal, and sample further prompts until the step is full again.

    Where no group has any signal the batch is left unchanged: its advantages are 0. The metrics count what was sampled and
    dropped. Yu et al. 2025, https://arxiv.org/abs/2503.14476, §3.2.

    Args:
        stages: those that made the batch (rollout, reward, …): further prompts go through the same ones.
        rows: the training rows, from which further prompts are drawn by (step, seed, attempt), so that a resumed step
            samples the same; None: groups are dropped and not replaced.
        max_num_gen_batches: how often prompts are sampled in all; then the step goes on with the groups that it has, where
            verl stops the run.
    """

    name = "filter_groups"

    def __init__(self, stages: Sequence[Stage], rows: Any = None, max_num_gen_batches: int = 4) -> None:
        require(max_num_gen_batches >= 1, "max_num_gen_batches", expected="≥ 1", found=max_num_gen_batches)
        self._stages = tuple(stages)
        self._rows = rows
        self.max_num_gen_batches = max_num_gen_batches
        written = [name for stage in self._stages for name in stage.writes]
        self.reads = ("uid", "reward", "scored")
        self.writes = tuple(dict.fromkeys(name for name in written if "/" not in name))

    def __call__(self, batch: DataProto) -> Outcome:
        """Keep the rows of groups whose rewards differ, at most as many groups as prompts came in; returns all rows
        where no group differs."""
        wanted, batches = len(set(batch["uid"])), 1
        rows = _with_signal(batch)
        kept, sampled = [batch.select_idxs(rows)], [_recorded(batch, rows)]
        while self._rows is not None and _prompts(kept) < wanted and batches < self.max_num_gen_batches:
            step, seed = batch.meta_info.get("step", 1), batch.meta_info.get("seed", 0)
            more = self._rows.further(wanted, step=step, seed=seed, attempt=batches)
            for stage in self._stages:
                more = stage(more).batch
            signal = _with_signal(more)
            kept.append(more.select_idxs(signal))
            sampled.append(_recorded(more, signal))
            batches += 1
        prompts = _prompts(kept)
        metrics: dict[str, Metric] = {
            "train/num_gen_batches": Count(batches),
            "filter_groups/kept": Count(min(prompts, wanted)),
            "filter_groups/dropped": Count(wanted * batches - prompts),
            "filter_groups/surplus": Count(max(prompts - wanted, 0)),
        }
        full = [part for part in kept if len(part)]
        if not full:
            return Outcome(batch, metrics, dropped=_join_records(sampled, batch["uid"]))
        if batches == 1:
            return Outcome(kept[0], metrics, None if len(rows) == len(batch) else rows)
        made = joined(list(_first_prompts(full, wanted))).with_meta(**batch.meta_info)
        return Outcome(made, metrics, dropped=_join_records(sampled, made["uid"]))


def _with_signal(batch: DataProto) -> torch.Tensor:
    """Return the numbers of rows in groups whose scored rows have different rewards, or that have a single scored row
    (or episode)."""
    groups = Groups(batch["reward"], group_numbers(batch["uid"]), batch["scored"] & is_last(batch))
    return ((groups.deviation() > 0) | (groups.count == 1)).nonzero()[:, 0]


_RECORDED = ("uid", "raw_prompt", "response_text", "reward_model", "reward", "scored", "score", "finish_reason")


def _recorded(batch: DataProto, signal: torch.Tensor) -> DataProto:
    """Build the record of a batch's rows for `Outcome.dropped`: texts and scores without tokens, and the reason why
    each would be left out; `signal` are the rows whose groups differ."""
    columns = {name: batch[name] for name in batch.columns if name in _RECORDED or name.startswith("reward/")}
    has = set(signal.tolist())
    return DataProto(*apart({**columns, LEFT_OUT: [SURPLUS if row in has else NO_SIGNAL for row in range(len(batch))]}))


def _join_records(parts: Sequence[DataProto], kept: Sequence[str]) -> DataProto | None:
    """Join the recorded rows whose prompts are not among `kept`; None where there are none."""
    staying = set(kept)
    left = [part.select_idxs([uid not in staying for uid in part["uid"]]) for part in parts]
    full = [part for part in left if len(part)]
    return DataProto.concat(_alike(full)) if full else None


NO_SIGNAL, SURPLUS = "all samples of its prompt have one reward", "drawn beyond what the step wanted"


def _prompts(parts: Sequence[DataProto]) -> int:
    return sum(len(set(part["uid"])) for part in parts)


def _first_prompts(parts: Sequence[DataProto], wanted: int) -> Iterator[DataProto]:
    """Yield the rows of the first `wanted` prompts, from several batches in order."""
    for part in parts:
        numbers = group_numbers(part["uid"])
        if wanted > 0:
            yield part.select_idxs(numbers < wanted)
        wanted -= int(numbers.max()) + 1


class Resample(BaseStage):
    """Resample the batch's rows with replacement, by weight: |reward|^p (`pow`), the best and the worst alone (`max_min`),
    or mostly the best (`max_random`).

    It belongs after the advantages: groups are not complete after it. verl's `algorithm.use_pf_ppo`.
    Shen et al. 2024, https://arxiv.org/abs/2409.06957.
    """

    name = "resample"
    reads = ("reward", "advantages")

    def __init__(self, *, reweight_method: str = "pow", weight_pow: float = 2.0) -> None:
        kinds = ("pow", "max_min", "max_random")
        expected = f"one of {', '.join(kinds)}"
        require(reweight_method in kinds, "reweight_method", expected=expected, found=reweight_method)
        self.reweight_method = reweight_method
        self.weight_pow = weight_pow

    def __call__(self, batch: DataProto) -> Outcome:
        """Return B rows drawn with replacement from the batch; the draw is seeded by run and step."""
        meta = batch.meta_info
        generator = torch.Generator().manual_seed(derive(meta.get("seed", 0), self.name, meta.get("step", 0)))
        rows = resampled(batch["reward"], method=self.reweight_method, weight_pow=self.weight_pow, generator=generator)
        share = len(rows.unique()) / max(len(rows), 1)
        return Outcome(batch.select_idxs(rows), {"resample/distinct": Mean.of(share, len(rows))}, rows)


def joined(parts: Sequence[DataProto]) -> DataProto:
    """Concatenate batches, padded to the largest widths S and T; `meta_info` is the first one's. The batches may lack
    prompts.

    A reward part or extra that only some batches have is NaN or `MISSING` in the others.
    """
    width_s = max((part["prompts"].shape[1] for part in parts if "prompts" in part), default=0)
    width_t = max(part["responses"].shape[1] for part in parts)
    first = parts[0].meta_info
    every = _alike(alike(parts))
    return DataProto.concat([_widened(part, width_s, width_t).with_meta(**first) for part in every])


def _alike(parts: Sequence[DataProto]) -> list[DataProto]:
    """Give each batch every reward part and extra column that any of the batches has."""
    columns = {
        name: part[name] for part in parts for name in part.columns if name.startswith(("reward/", "reward_extra/"))
    }
    return [part.with_columns(_empty_columns(part, columns)) for part in parts]


def _empty_columns(part: DataProto, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Make empty columns (NaN or `MISSING`) for those of `columns` that a batch lacks."""
    return {
        name: torch.full((len(part),), float("nan")) if isinstance(one, torch.Tensor) else [MISSING] * len(part)
        for name, one in columns.items()
        if name not in part
    }


def _widened(part: DataProto, width_s: int, width_t: int) -> DataProto:
    """Pad a batch with zeros to the widths S and T: prompts on the left, responses on the right."""
    s, t = width_s and width_s - part["prompts"].shape[1], width_t - part["responses"].shape[1]
    columns = {name: part[name] for name in part.columns}
    for name in part.batch if s or t else ():
        column = declared(name)
        dims = column.dims if column is not None else ()
        room = s * ("S" in dims or "S+T" in dims), t * ("T" in dims or "S+T" in dims)
        columns[name] = pad(part[name], (*(0, 0) * (len(dims) - 2), *room)) if any(room) else part[name]
    return DataProto(*apart(columns), part.meta_info, origins=part.origins)
