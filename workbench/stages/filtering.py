"""DAPO's two stages between reward and update: a soft penalty for length, and groups without signal replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.config import require
from workbench.dataproto import DataProto
from workbench.functional.groups import Groups
from workbench.metrics import Count, Mean, Metric
from workbench.rewards.base import response_lengths
from workbench.stages.advantage import group_numbers
from workbench.stages.joining import joined
from workbench.stages.reward import on_last_token
from workbench.stages.stage import BaseStage, Outcome, Stage


class Overlong(BaseStage):
    """Take off `penalty`·(length − (max_tokens − buffer)) / buffer for responses in the last `buffer` tokens before the limit.

    A part of the reward of its own, `reward/overlong` (≤ 0); rows without a judgement have none. An episode's length is all
    of its response, tool and user tokens among them, as verl counts: that is what `max_tokens` cuts.
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
        """B rows in, B rows out."""
        mask = batch["response_mask"]
        beyond = (response_lengths(batch) - (self.max_tokens - self.buffer)).clamp(0, self.buffer).float() / self.buffer
        taken = torch.where(batch["scored"], -self.penalty * beyond, 0.0)
        columns = {
            "reward": batch["reward"] + taken,
            "token_level_scores": batch["token_level_scores"] + on_last_token(taken, mask),
            "reward/overlong": taken,
        }
        share = (beyond > 0).double().mean().item()
        metrics: dict[str, Metric] = {
            "reward/overlong/mean": Mean.of(taken.double().mean().item(), len(batch)),
            "reward/overlong/share": Mean.of(share, len(batch)),
        }
        return Outcome(self.written(batch, columns), metrics)


class FilterGroups(BaseStage):
    """Dynamic sampling: drop groups whose rewards are all equal, and draw further prompts until the step is full again.

    `stages` are those that made the batch (rollout, reward, …): further prompts go through the very same ones. `rows`
    gives them, as a function of (step, seed, attempt), so that a resumed step draws the same; None only drops. After
    `max_num_gen_batches` draws in all the step goes on with the groups that it has; verl stops the run there. Where no
    group has any signal the batch stays as it is: its advantages are 0. What was drawn and dropped is in the metrics.
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, §3.2.
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
        """P·G rows in, at most as many out, all of groups with signal."""
        group = batch.meta_info.get("group_size", 1)
        wanted, drawn = len(set(batch["uid"])), 1
        rows = _with_signal(batch)
        kept = [batch.select_idxs(rows)]
        while self._rows is not None and _prompts(kept) < wanted and drawn < self.max_num_gen_batches:
            more = self._drawn(batch, wanted, drawn)
            kept.append(more.select_idxs(_with_signal(more)))
            drawn += 1
        found = _prompts(kept)
        metrics: dict[str, Metric] = {
            "train/num_gen_batches": Count(drawn),
            "filter_groups/kept": Count(min(found, wanted)),
            "filter_groups/dropped": Count(wanted * drawn - found),
            "filter_groups/surplus": Count(max(found - wanted, 0)),
        }
        full = [part for part in kept if len(part)]
        if not full:
            return Outcome(batch, metrics)
        if drawn == 1:
            return Outcome(kept[0], metrics, None if len(rows) == len(batch) else rows)
        return Outcome(joined(full)[: wanted * group].with_meta(**batch.meta_info), metrics)

    def _drawn(self, batch: DataProto, prompts: int, attempt: int) -> DataProto:
        meta = batch.meta_info
        more = self._rows.further(prompts, step=meta.get("step", 1), seed=meta.get("seed", 0), attempt=attempt)
        for stage in self._stages:
            more = stage(more).batch
        return more


def _with_signal(batch: DataProto) -> torch.Tensor:
    """Rows of groups in which judged rewards differ, or of one judged row alone."""
    groups = Groups(batch["reward"], group_numbers(batch["uid"]), batch["scored"])
    return ((groups.deviation() > 0) | (groups.count == 1)).nonzero()[:, 0]


def _prompts(parts: Sequence[DataProto]) -> int:
    return sum(len(set(part["uid"])) for part in parts)
