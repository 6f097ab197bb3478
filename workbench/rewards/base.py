"""`BaseReward`, which every reward inherits: rows in, one `Score` per row out, and a policy for rows that fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from workbench.base.errors import RewardError, unknown
from workbench.dataproto.core import DataProto
from workbench.dataproto.sessions import episodes
from workbench.datasets.pictures import text_of
from workbench.rewards.score import Score, Status, failed
from workbench.rewards.signatures import EPISODE

Judging = Callable[[Sequence[Mapping[str, Any]]], list[Score]]
_POLICIES = re.compile(r"mask|raise|retry\((\d+)\)|value=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


class BaseReward:
    """Base class of all rewards: subclasses implement `judge(rows)`; the reward stage calls `score(batch)`.

    `on_failure` is the policy for rows that could not be scored (*infra_error*): `mask`, `raise`, `retry(n)` or
    `value=x`; see `Reward`. It holds for every reward: `tried` judges again, `settle` does the rest. Raises `RewardError` for
    any other policy.
    """

    name: str = "reward"
    reads: tuple[str, ...] = ()
    in_process: bool = False
    """Whether the reward runs in this process. The check before a run does not call such a reward."""
    streams: bool = True
    """Whether a row can be scored before the other rows of its batch have been sampled."""
    block: Mapping[str, Any] | None = None
    """The settings of `reward_from` that make an equal reward, as plain values; None where they alone do not."""

    def __init__(self, name: str, on_failure: str = "mask") -> None:
        found = _POLICIES.fullmatch(on_failure)
        if found is None:
            raise RewardError(unknown("policy for on_failure", on_failure, ("mask", "raise", "retry(n)", "value=x")))
        self.name = name
        self.on_failure = on_failure
        self.retries = int(found[1] or 0)
        self.failed_value = float(found[2]) if found[2] else None

    @property
    def source(self) -> str | None:
        """The source code of the reward function, or a judge's prompt; None where there is neither."""
        return None

    @property
    def binding(self) -> Mapping[str, str]:
        """Argument of the reward function → what it is filled from, in words; {} where there is no function."""
        return {}

    def settings(self) -> dict[str, Any]:
        """The reward's settings as plain values, for the run's record."""
        return {"on_failure": self.on_failure}

    def check_signature(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, before anything is scored, if the reward needs a column that `columns` (names) lack."""

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Raise `DataError`, before anything is scored, if the reward can score none of these rows of a data set, whatever
        the responses are (their ground truths are missing or unreadable); else say how many it cannot, or ""."""
        return ""

    def check_sampler(self, tokenizer: Any, switches: Mapping[str, Any]) -> None:
        """Raise, before anything is scored, if responses of a model with this tokenizer and these switches of its chat template
        cannot be what the reward expects."""

    def close(self) -> None:
        """End the reward's worker processes and connections."""

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score rows from `row_views`: one `Score` each, in order. A row that fails gets an *infra_error* `Score`."""
        raise NotImplementedError

    def judged(self, rows: Sequence[Mapping[str, Any]], judge: Judging | None = None) -> list[Score]:
        """Like `tried`, but rows of broken agent episodes (`broken_episode`) are *infra_error* and not judged."""
        whys = [broken_episode(row["columns"]) for row in rows]
        scores = iter(self.tried([row for row, why in zip(rows, whys, strict=True) if not why], judge))
        return [failed(f"the episode broke: {why}") if why else next(scores) for why in whys]

    def tried(self, rows: Sequence[Mapping[str, Any]], judge: Judging | None = None) -> list[Score]:
        """Like `judge` (or the given function in its place), but rows that fail are judged up to `retries` more times, with
        those that they are judged together with. Raises `RewardError` for a wrong number of scores."""
        found, waiting = dict[int, Score](), list(range(len(rows)))
        for _ in range(1 + self.retries):
            if not waiting:
                break
            scores = (judge or self.judge)([rows[number] for number in waiting])
            if len(scores) != len(waiting):
                what, expected = f"result of reward {self.name!r}", f"{len(waiting)} scores"
                raise RewardError(what, expected=expected, found=len(scores))
            new = zip(waiting, scores, strict=True)
            found.update((number, score) for number, score in new if number not in found or _broken(found[number]))
            waiting = self._again(rows, [number for number in found if _broken(found[number])])
        return [found[number] for number in range(len(rows))]

    def _again(self, rows: Sequence[Mapping[str, Any]], lost: list[int]) -> list[int]:
        """The rows to judge once more: the `lost` ones, and those that they are judged together with."""
        per = getattr(self, "per", "row" if self.streams else "group" if "uid" in self.reads else "batch")
        if not lost or per == "row":
            return lost
        uids = {rows[number].get("uid") for number in lost}
        return [number for number, row in enumerate(rows) if per == "batch" or row.get("uid") in uids]

    def settle(self, scores: Sequence[Score]) -> list[Score]:
        """Apply `on_failure` to scores. Raises `RewardError` under `raise`, or if every row failed or one is `undecided`
        (unless `value=x`)."""
        broken = sorted((score for score in scores if _broken(score)), key=lambda score: not score.undecided)
        value = self.failed_value
        one = bool(broken) and (self.on_failure == "raise" or (broken[0].undecided and value is None))
        if one or (broken and len(broken) == len(scores) and value is None):
            what = "a row" if one else f"all {len(scores)} rows"
            do = broken[0].error or "fix the failure that was found"
            raise RewardError(f"reward {self.name!r} failed on {what}", found=broken[0].why, do=do)
        if value is None:
            return list(scores)
        return [
            replace(score, value=value, status=Status.COUNTED, why=f"counted as {value:g} by policy: {score.why}")
            if _broken(score)
            else score
            for score in scores
        ]

    def score(self, batch: DataProto) -> list[Score]:
        """Score a batch with `response_text`: one `Score` per row. Raises `RewardError` where `on_failure` says so."""
        self.check_signature(batch.columns)
        return self.settle(self.judged(row_views(batch)))


def _broken(score: Score) -> bool:
    return score.status is Status.INFRA_ERROR


def broken_episode(columns: Mapping[str, Any]) -> str:
    """Why the agent episode of a row was aborted (its simulated user failed, say); "" where it was not."""
    extra = columns.get("agent_extra")
    errors = extra.get("errors") if isinstance(extra, Mapping) else None
    if not errors or columns.get("finish_reason") != "abort":
        return ""
    return errors if isinstance(errors, str) else "; ".join(map(str, errors))


def whole_episode(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of an episode of several sequences, for its reward: the last row's, with the turns of all of them."""
    found = dict(rows[-1])
    for name in EPISODE:
        if name in found and len(rows) > 1:
            each = [row[name] for row in rows]
            if all(isinstance(one, int) for one in each):
                found[name] = sum(each) - (len(rows) - 1) * (name == "num_turns")  # each counts its beginning
            elif all(isinstance(one, list) for one in each):
                found[name] = [one for many in each for one in many]
    return found


def whole_episodes(batch: DataProto) -> DataProto:
    """A batch with one row for each episode (see `whole_episode`); the same batch where every row is one."""
    every = episodes(batch)
    if len(every) == len(batch):
        return batch
    columns = {name: list(batch[name]) for name in EPISODE if name in batch}
    made = [whole_episode([{name: cells[row] for name, cells in columns.items()} for row in rows]) for rows in every]
    last = batch.select_idxs([rows[-1] for rows in every])
    return last.with_columns({name: [one[name] for one in made] for name in columns})


def row_views(batch: DataProto) -> list[dict[str, Any]]:
    """The rows of a batch as dicts of plain values (see `row_view`), which reward functions take as arguments."""
    objects = {name: list(batch.non_tensor_batch[name]) for name in batch.non_tensor_batch if name != "score"}
    ids: list[list[int]] = [[]] * len(batch)
    asked: list[list[int] | None] = [None] * len(batch)
    if "prompt_mask" in batch:
        pairs = zip(batch["prompts"].numpy(), batch["prompt_mask"].bool().numpy(), strict=True)
        asked = [row[mask].tolist() for row, mask in pairs]
    if "response_mask" in batch:
        pairs = zip(batch["responses"].numpy(), response_lengths(batch).tolist(), strict=True)
        ids = [row[:length].tolist() for row, length in pairs]
    rows = [{name: values[number] for name, values in objects.items()} for number in range(len(batch))]
    each = zip(rows, ids, asked, strict=True)
    return [row_view(columns, columns["response_text"], one, prompt) for columns, one, prompt in each]


def response_lengths(batch: DataProto) -> torch.Tensor:
    """[B] int64: the number of tokens of each response, up to its last attended token.

    `response_mask` is 0 at tool and user tokens; with `attention_mask` those after the last 1 count, too.
    """
    mask = batch["response_mask"]
    if "attention_mask" in batch:
        mask = mask | batch["attention_mask"][:, -mask.shape[1] :].to(mask.dtype)
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask.bool() * places).amax(-1)


def padded(rows: Sequence[Sequence[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Right-pad the token ids of responses with `pad`: tensors `responses` and `response_mask`, [B, T] each."""
    width = max(1, *map(len, rows))
    return {
        "responses": torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows]),
        "response_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }


def row_view(
    columns: Mapping[str, Any], response: str, ids: Sequence[int], prompt_ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """The dict that rewards get for a row: response, prompt, ground truth, …, and all object columns as `columns`.

    `prompt_ids` is in it where the prompt's tokens are known.
    """
    chat = columns.get("raw_prompt")
    prompt = text_of(chat[-1]["content"]) if isinstance(chat, list) and chat else chat
    judged = columns.get("reward_model") or {}
    beside = {name: one for name, one in judged.items() if name not in ("ground_truth", "style")}
    episode = {name: columns[name] for name in EPISODE if name in columns}
    return {
        "response": response,
        "response_ids": list(ids),
        "prompt": chat,
        "prompt_text": prompt,
        "query": f"{prompt or ''}{response}",
        "ground_truth": judged.get("ground_truth"),
        "data_source": columns.get("data_source"),
        "extra_info": {**beside, **(columns.get("extra_info") or {}), **episode},
        "uid": columns.get("uid"),
        "columns": dict(columns),
        **({} if prompt_ids is None else {"prompt_ids": list(prompt_ids)}),
    }
