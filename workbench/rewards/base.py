"""What every reward is to a stage: rows in, one record a row out, and a policy for what could not be judged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.errors import RewardError, message, unknown
from workbench.rewards.score import Score, Status, failed
from workbench.rewards.signatures import EPISODE


@dataclass(frozen=True)
class Policy:
    """What a failure of the machinery means: `mask`, `raise`, `retry(n)` or `value=x`."""

    text: str
    retries: int = 0
    value: float | None = None
    raises: bool = False

    @classmethod
    def read(cls, text: str) -> Policy:
        """Raises `RewardError` for another word, a negative count or a value that is no number."""
        if text in ("mask", "raise"):
            return cls(text, raises=text == "raise")
        try:
            if text.startswith("retry(") and text.endswith(")"):
                retries = int(text[6:-1])
                if retries < 0:
                    raise ValueError(text)
                return cls(text, retries=retries)
            if text.startswith("value="):
                value = float(text.removeprefix("value="))
                if not math.isfinite(value):
                    raise ValueError(text)
                return cls(text, value=value)
        except ValueError as cause:
            raise RewardError(message("on_failure", expected="a number in retry(n) or value=x", found=text)) from cause
        raise RewardError(unknown("policy on failure", text, ("mask", "raise", "retry(n)", "value=x")))

    def settle(self, name: str, scores: Sequence[Score]) -> list[Score]:
        """The scores as they count. Raises `RewardError` for `raise`, and where nothing at all could be judged."""
        broken = [score for score in scores if score.status is Status.MACHINERY_FAILED]
        if broken and (self.raises or (len(broken) == len(scores) and self.value is None)):
            what = "a row" if self.raises else f"all {len(scores)} rows"
            raise RewardError(
                message(f"reward {name!r} failed on {what}", found=broken[0].why, do=broken[0].error or "mend it")
            )
        return [self._counted(score) for score in scores]

    def _counted(self, score: Score) -> Score:
        if self.value is None or score.status is not Status.MACHINERY_FAILED:
            return score
        why = f"counted as {self.value:g} by policy: {score.why}"
        return replace(score, value=self.value, status=Status.MODEL_FAILED, why=why)


class BaseReward:
    """Leaves give `judge(rows)`. `score(batch)` is what stages call."""

    name: str = "reward"
    reads: tuple[str, ...] = ()
    in_process: bool = False
    """Whether it only runs bounded code of ours here, so that a trial before a run would tell nothing."""
    streams: bool = True
    """Whether a row can be judged before the others are there."""

    def __init__(self, name: str, on_failure: str = "mask") -> None:
        self.name = name
        self.on_failure = on_failure
        self.policy = Policy.read(on_failure)

    @property
    def source(self) -> str | None:
        """The text of what judges, where it has one."""
        return None

    def settings(self) -> dict[str, Any]:
        """What was chosen at construction, as plain values."""
        return {"on_failure": self.on_failure}

    def check_signature(self, columns: Sequence[str]) -> None:
        """Refuse, before any work, columns that lack what it asks for."""

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Refuse, before any work, a data set that it cannot judge."""

    def close(self) -> None:
        """End processes and connections."""

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One record a row view, in order; a failure is a record, not an exception."""
        raise NotImplementedError

    def judged(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """`judge`, not asked of episodes that broke through no fault of the model: they are *machinery failed*."""
        whys = [broken_episode(row["columns"]) for row in rows]
        asked = [row for row, why in zip(rows, whys, strict=True) if not why]
        found = self.judge(asked) if asked or not rows else []
        if len(found) != len(asked):
            raise RewardError(message(f"reward {self.name!r}", expected=len(asked), found=len(found)))
        told = iter(found)
        return [failed(f"the episode broke: {why}") if why else next(told) for why in whys]

    def settle(self, scores: Sequence[Score]) -> list[Score]:
        """The records as they count, by policy."""
        return self.policy.settle(self.name, scores)

    def score(self, batch: DataProto) -> list[Score]:
        """One record a row. Raises `RewardError` by policy, for a broken function, or a broken contract."""
        self.check_signature(batch.columns)
        return self.settle(self.judged(row_views(batch)))


def broken_episode(columns: Mapping[str, Any]) -> str:
    """What ended an agent's episode before the model was done: its simulated user failed. Empty where nothing did."""
    extra = columns.get("agent_extra")
    errors = extra.get("errors") if isinstance(extra, Mapping) else None
    if not errors or columns.get("finish_reason") != "abort":
        return ""
    return errors if isinstance(errors, str) else "; ".join(map(str, errors))


def row_views(batch: DataProto) -> list[dict[str, Any]]:
    """Each row as plain values: what reward functions may ask for by name."""
    objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch}
    lengths = response_lengths(batch).tolist() if "response_mask" in batch else None
    responses = batch["responses"].numpy() if lengths is not None else None
    objects.pop("score", None)
    rows = []
    for number in range(len(batch)):
        columns = {name: values[number] for name, values in objects.items()}
        ids = responses[number, : lengths[number]].tolist() if responses is not None and lengths is not None else []
        rows.append(row_view(columns, columns["response_text"], ids))
    return rows


def response_lengths(batch: DataProto) -> torch.Tensor:
    """[B] int64: tokens of each response, to the last that was attended to: tool and user tokens are among them.

    The mask of the model's own tokens has holes, and a batch without `attention_mask` has no more than that mask.
    """
    mask = batch["response_mask"]
    if "attention_mask" in batch:
        mask = mask | batch["attention_mask"][:, -mask.shape[1] :].to(mask.dtype)
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * places).amax(-1)


def row_view(columns: Mapping[str, Any], response: str, ids: Sequence[int]) -> dict[str, Any]:
    """One row's values under our names, and all its object columns under `columns`."""
    chat = columns.get("raw_prompt")
    judged = columns.get("reward_model") or {}
    return {
        "response": response,
        "response_ids": list(ids),
        "prompt": chat,
        "prompt_text": chat[-1]["content"] if isinstance(chat, list) and chat else chat,
        "query": f"{chat[-1]['content'] if isinstance(chat, list) and chat else chat or ''}{response}",
        "ground_truth": judged.get("ground_truth"),
        "data_source": columns.get("data_source"),
        "extra_info": {
            **(columns.get("extra_info") or {}),
            **{name: columns[name] for name in EPISODE if name in columns},
        },
        "uid": columns.get("uid"),
        "columns": dict(columns),
    }
