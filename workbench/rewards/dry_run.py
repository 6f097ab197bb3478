"""`dry_run`: rewards on saved completions, without a model or a GPU, with the rows on which they disagree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from workbench.base.errors import DataError, RewardError, boundary, describe, first_line
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.datasets import files, records
from workbench.rewards.base import BaseReward, row_view, row_views
from workbench.rewards.reward import as_reward
from workbench.rewards.score import Score, Status, failed

if TYPE_CHECKING:
    import pandas as pd

RESPONSE = ("response_text", "response", "completion", "solution_str", "output", "text")
TRUTH = ("ground_truth", "gts", "answer", "label", "solution", "target")
PROMPT = ("raw_prompt", "prompt", "input", "question")
"""Column names that are understood, the likeliest first; `reward_model.ground_truth` comes before `TRUTH`."""


@dataclass(frozen=True)
class Judged:
    """One reward's score of one completion."""

    score: Score
    span: tuple[int, int] | None
    """(start, end) of the extracted answer in the response; None where it does not occur there."""


class DryRun(Shown):
    """The result of `dry_run`. Print it, or look at its tables `table`, `summary`, `disagreements` and `failures`."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        judged: Mapping[str, Sequence[Judged]],
        bindings: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self.rows = list(rows)
        self.judged = {name: list(found) for name, found in judged.items()}
        self.bindings = {name: dict(binding) for name, binding in bindings.items()}
        """Reward → its `binding`: argument → what it was filled from."""

    @property
    def table(self) -> pd.DataFrame:
        """One row per completion: `prompt`, `response`, `truth`; for each reward its value under the reward's name (NaN:
        not scored), and `<name>/answer`, `<name>/status`, `<name>/why`, `<name>/seconds`."""
        import pandas as pd

        shown = {"prompt": "prompt_text", "response": "response", "truth": "ground_truth"}
        columns: dict[str, Any] = {name: [row[key] for row in self.rows] for name, key in shown.items()}
        for name, found in self.judged.items():
            facts = [one.score.to_json() for one in found]
            columns[name] = [one.score.value if one.score.scored else float("nan") for one in found]
            columns |= {f"{name}/{key}": [one[key] for one in facts] for key in ("answer", "status", "why", "seconds")}
        return pd.DataFrame(columns)

    @property
    def summary(self) -> pd.DataFrame:
        """One row per reward: `mean` over scored rows; how many rows were scored (`judged`), had each status, and gave an
        answer (`extracted`); median and longest seconds of scoring a row."""
        import pandas as pd

        lines = {}
        for name, found in self.judged.items():
            scores = [one.score for one in found]
            values = [score.value for score in scores if score.scored]
            lines[name] = {
                "mean": sum(values) / len(values) if values else float("nan"),
                "judged": len(values),
                **{status: n for status, n in Counter(score.status.value for score in scores).items()},
                "extracted": sum(score.answer is not None for score in scores),
                "median s": median([score.seconds for score in scores]) if scores else 0.0,
                "longest s": max((score.seconds for score in scores), default=0.0),
            }
        return pd.DataFrame.from_dict(lines, orient="index").fillna(dict.fromkeys(map(str, Status), 0))

    @property
    def disagreements(self) -> pd.DataFrame:
        """The rows of `table` where rewards differ: two values, or one that scored the row and one that did not."""
        frame = self.table
        values = frame[list(self.judged)]
        return frame[values.nunique(axis=1, dropna=False) > 1]

    @property
    def as_batch(self) -> DataProto:
        """The completions as a batch, for `views.samples`: `score` and `reward` are the first reward's, `reward/<name>` each
        one's (NaN: not scored), and `reward/differs` is 1 where rewards differ (`where={"reward/differs": 1}`)."""
        frame = self.table
        first = [one.score for one in next(iter(self.judged.values()), [])]
        values = {f"reward/{name}": torch.tensor(frame[name].to_numpy(float)).float() for name in self.judged}
        differs = frame.index.isin(self.disagreements.index)
        return DataProto.from_single_dict(
            {
                "raw_prompt": [row["prompt"] for row in self.rows],
                "response_text": [row["response"] for row in self.rows],
                "reward_model": [{"ground_truth": row["ground_truth"]} for row in self.rows],
                "reward": torch.tensor([score.value for score in first]),
                "scored": torch.tensor([score.scored for score in first]),
                "score": first,
                **values,
                "reward/differs": torch.tensor(differs).float(),
            }
        )

    @property
    def failures(self) -> pd.DataFrame:
        """Why rows are not *scored*, and how often: one row per reason, most frequent first, one column per reward."""
        import pandas as pd

        counts = {
            name: Counter(f"{one.score.status.value}: {one.score.why}" for one in found if one.score.status != "scored")
            for name, found in self.judged.items()
        }
        frame = pd.DataFrame(counts).fillna(0).astype(int)
        return frame.loc[frame.sum(axis=1).sort_values(ascending=False, kind="stable").index] if len(frame) else frame


def dry_run(functions: Any, completions: Any, *, limit: int | None = None) -> DryRun:
    """Score saved completions by one or more rewards.

    `functions` is a reward, a list of them, or name → reward (whatever `as_reward` takes). `completions` is a DataFrame, a
    jsonl, json or parquet file, a batch, a trace, or a list of dicts; columns are known by the names that workbench,
    verl and TRL write (`RESPONSE`, `TRUTH`, `PROMPT`). `limit` keeps the first rows. Failures of a reward are part of the
    result, not exceptions. Raises `DataError` where no column holds responses.

    Example:
        >>> run = wb.rewards.dry_run([wb.rewards.gsm8k, my_function], "completions.jsonl")  # doctest: +SKIP
        >>> run.disagreements  # doctest: +SKIP
    """
    rows = _rows(completions)[:limit]
    rewards = _named(functions)
    judged = {name: _judge(reward, rows) for name, reward in rewards.items()}
    return DryRun(rows, judged, {name: reward.binding for name, reward in rewards.items()})


def _named(functions: Any) -> dict[str, BaseReward]:
    if isinstance(functions, Mapping):
        return {str(name): as_reward(function) for name, function in functions.items()}
    several = functions if isinstance(functions, list | tuple) else [functions]
    found: dict[str, BaseReward] = {}
    for reward in map(as_reward, several):
        same = sum(name.rstrip("'") == reward.name for name in found)
        found[reward.name + "'" * same] = reward
    return found


def _judge(reward: BaseReward, rows: Sequence[Mapping[str, Any]]) -> list[Judged]:
    try:
        if rows:
            reward.check_signature(list(dict.fromkeys(name for row in rows for name in row["columns"])))
        scores = reward.judged(rows)
    except (RewardError, DataError) as error:
        scores = [failed(first_line(error, 500)) for _ in rows]
    return [Judged(score, span_of(score.answer, row["response"])) for score, row in zip(scores, rows, strict=True)]


def span_of(answer: str | None, text: str) -> tuple[int, int] | None:
    """(start, end) of an answer's last occurrence in a text; None where it is not there literally (commas dropped, say)."""
    start = text.rfind(answer) if answer else -1
    return (start, start + len(answer or "")) if start >= 0 else None


def _rows(completions: Any) -> list[dict[str, Any]]:
    batch = completions if isinstance(completions, DataProto) else getattr(completions, "batch", None)
    if isinstance(batch, DataProto):
        return row_views(batch)
    if isinstance(completions, str | Path):
        found: Iterable[Any] = [record for path in files.find(completions) for record in files.read(path)]
    else:
        found = records.table_records(completions)
    return [_row(record, number) for number, record in enumerate(found)]


def _row(record: Any, number: int) -> dict[str, Any]:
    """The view of a record; its missing cells are None, its prompt a text or a chat of text, its response a text."""
    columns = records.cells_of(record, f"completion {number}")
    asked = next((name for name in PROMPT if columns.get(name) is not None), None)
    if asked is not None:
        chat = records.chat(columns[asked], f"{asked} of completion {number}")
        columns[asked] = columns[asked] if records.is_text(columns[asked], chat) else chat
    name = next((name for name in RESPONSE if isinstance(columns.get(name), str | list)), None)
    if name is None:
        if there := next((name for name in RESPONSE if name in columns), None):
            raise DataError(f"{there} of completion {number}", expected="a text", found=describe(columns[there]))
        expected = f"a column with responses, named one of {', '.join(RESPONSE)}"
        raise DataError(f"completion {number}", expected=expected, found=f"columns {', '.join(columns)}")
    columns[name] = records.spoken(columns[name], f"{name} of completion {number}")
    judged = columns.get("reward_model")
    if isinstance(judged, str):
        with boundary(f"reading reward_model of completion {number}", DataError):
            judged = json.loads(judged)
    if not isinstance(judged, Mapping):
        truth = next((columns[name] for name in TRUTH if columns.get(name) is not None), None)
        judged = {"ground_truth": truth}
    prompt = columns[asked] if asked else None
    plain = {**columns, "reward_model": dict(judged), "raw_prompt": prompt}
    if not isinstance(prompt, list | None):
        plain |= {"raw_prompt": [{"role": "user", "content": str(prompt)}], "prompt_is_text": True}
    ids = columns.get("response_ids", columns.get("completion_ids"))
    return row_view(plain, columns[name], () if ids is None else ids, columns.get("prompt_ids"))
