"""`BaseReward`, which every reward inherits: rows in, one `Score` a row out, and a policy for rows that could not be scored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.base.errors import RewardError, unknown
from workbench.dataproto.core import DataProto
from workbench.rewards.score import Score, Status, failed
from workbench.rewards.signatures import EPISODE

_POLICIES = re.compile(r"mask|raise|retry\((\d+)\)|value=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


class BaseReward:
    """Base of all rewards: subclasses implement `judge(rows)`, stages call `score(batch)`.

    `on_failure` says what becomes of a row that could not be scored (*infra_error*): `mask`, `raise`, `retry(n)` or
    `value=x`; see `Reward`. Raises `RewardError` for any other policy.
    """

    name: str = "reward"
    reads: tuple[str, ...] = ()
    in_process: bool = False
    """Whether it only runs bounded code of workbench in this process, so that the trial before a run is not needed."""
    streams: bool = True
    """Whether a row can be scored before the batch's other rows are there."""

    def __init__(self, name: str, on_failure: str = "mask") -> None:
        found = _POLICIES.fullmatch(on_failure)
        if found is None:
            raise RewardError(unknown("policy on failure", on_failure, ("mask", "raise", "retry(n)", "value=x")))
        self.name = name
        self.on_failure = on_failure
        self.retries = int(found[1] or 0)
        self.failed_value = float(found[2]) if found[2] else None

    @property
    def source(self) -> str | None:
        """Source text or prompt that scores; None where there is none."""
        return None

    def settings(self) -> dict[str, Any]:
        """What was chosen at construction, as plain values."""
        return {"on_failure": self.on_failure}

    def check_signature(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, before any work, where it needs a column that is not among `columns`."""

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raise `DataError`, before any work, for a data set that it cannot score."""

    def close(self) -> None:
        """End its processes and connections."""

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One `Score` for each row view, in order; a row's failure is its `Score`, not an exception."""
        raise NotImplementedError

    def judged(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """`judge`, but for agent episodes that broke through no fault of the model: those are *infra_error* unseen."""
        whys = [broken_episode(row["columns"]) for row in rows]
        asked = [row for row, why in zip(rows, whys, strict=True) if not why]
        scores = self.judge(asked) if asked or not rows else []
        if len(scores) != len(asked):
            raise RewardError(f"reward {self.name!r}", expected=f"{len(asked)} scores", found=len(scores))
        waiting = iter(scores)
        return [failed(f"the episode broke: {why}") if why else next(waiting) for why in whys]

    def settle(self, scores: Sequence[Score]) -> list[Score]:
        """The scores after the policy. Raises `RewardError` for `raise`, and where no row at all could be scored."""
        broken = [score for score in scores if score.status is Status.INFRA_ERROR]
        value = self.failed_value
        if broken and (self.on_failure == "raise" or (len(broken) == len(scores) and value is None)):
            what = "a row" if self.on_failure == "raise" else f"all {len(scores)} rows"
            do = broken[0].error or "repair what it names"
            raise RewardError(f"reward {self.name!r} failed on {what}", found=broken[0].why, do=do)
        if value is None:
            return list(scores)
        return [
            replace(score, value=value, status=Status.SCORED, why=f"counted as {value:g} by policy: {score.why}")
            if score.status is Status.INFRA_ERROR
            else score
            for score in scores
        ]

    def score(self, batch: DataProto) -> list[Score]:
        """One `Score` a row of a batch with `response_text`. Raises `RewardError` by policy, or for a broken function."""
        self.check_signature(batch.columns)
        return self.settle(self.judged(row_views(batch)))


def broken_episode(columns: Mapping[str, Any]) -> str:
    """Why an agent's episode ended before the model was done (its simulated user failed, say); "" where it did not."""
    extra = columns.get("agent_extra")
    errors = extra.get("errors") if isinstance(extra, Mapping) else None
    if not errors or columns.get("finish_reason") != "abort":
        return ""
    return errors if isinstance(errors, str) else "; ".join(map(str, errors))


def row_views(batch: DataProto) -> list[dict[str, Any]]:
    """Each row as plain values: what reward functions may ask for by name."""
    objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch if name != "score"}
    ids: list[list[int]] = [[]] * len(batch)
    if "response_mask" in batch:
        pairs = zip(batch["responses"].numpy(), response_lengths(batch).tolist(), strict=True)
        ids = [row[:length].tolist() for row, length in pairs]
    rows = [{name: values[number] for name, values in objects.items()} for number in range(len(batch))]
    return [row_view(columns, columns["response_text"], one) for columns, one in zip(rows, ids, strict=True)]


def response_lengths(batch: DataProto) -> torch.Tensor:
    """[B] int64: tokens of each response, up to the last one that was attended to.

    `response_mask` alone has holes where tool and user tokens stand; with `attention_mask` these count too.
    """
    mask = batch["response_mask"]
    if "attention_mask" in batch:
        mask = mask | batch["attention_mask"][:, -mask.shape[1] :].to(mask.dtype)
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * places).amax(-1)


def padded(rows: Sequence[Sequence[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """`responses` and `response_mask`, [B, T] each, of responses' token ids, padded at the end."""
    width = max(1, *map(len, rows))
    return {
        "responses": torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows]),
        "response_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


def row_view(columns: Mapping[str, Any], response: str, ids: Sequence[int]) -> dict[str, Any]:
    """One row's values under workbench's names, and all its object columns under `columns`."""
    chat = columns.get("raw_prompt")
    prompt = chat[-1]["content"] if isinstance(chat, list) and chat else chat
    episode = {name: columns[name] for name in EPISODE if name in columns}
    return {
        "response": response,
        "response_ids": list(ids),
        "prompt": chat,
        "prompt_text": prompt,
        "query": f"{prompt or ''}{response}",
        "ground_truth": (columns.get("reward_model") or {}).get("ground_truth"),
        "data_source": columns.get("data_source"),
        "extra_info": {**(columns.get("extra_info") or {}), **episode},
        "uid": columns.get("uid"),
        "columns": dict(columns),
    }
