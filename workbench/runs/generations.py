"""Generations on disk: every prompt with a sampled response, its score and why, as one parquet table.

    val/step_000010.parquet      held-out samples of a validation, sampled ones first, then greedy ones

Columns: `prompt` (a chat), `response`, `score` (empty where not scored), `score/status`, `score/why`, `score/answer` (extracted
from the response), `reward/<part>`, `uid` (the prompt), `sample` (its number within the prompt), `greedy`, `response_ids`,
and those of the data: `data_source`, `reward_model`, `extra_info`, … `compat.read_dump` reads such a file, and
`evaluate_file` scores it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.base.config import require
from workbench.dataproto import DataProto
from workbench.dataproto.columns import REWARD_PREFIX
from workbench.dataproto.sessions import episodes
from workbench.datasets import files
from workbench.rewards.base import response_lengths
from workbench.runs.folder import step_file, step_files


def table(batch: DataProto, greedy: bool) -> dict[str, list[Any]]:
    """The columns of a scored batch, one cell per row; of the data's columns those that have no name of ours."""
    rewards, scored, scores = batch["reward"].tolist(), batch["scored"].tolist(), batch["score"]
    found: dict[str, list[Any]] = {
        "prompt": list(batch["raw_prompt"]) if "raw_prompt" in batch else [None] * len(batch),
        "response": list(batch["response_text"]),
        "score": [value if there else None for value, there in zip(rewards, scored, strict=True)],
        "score/status": [one.status.value for one in scores],
        "score/why": [one.why for one in scores],
        "score/answer": [one.answer for one in scores],
        **{name: batch[name].tolist() for name in batch.batch if name.startswith(REWARD_PREFIX)},
        "uid": list(batch["uid"]),
        "sample": _samples(batch),
        "greedy": [greedy] * len(batch),
    }
    if "response_mask" in batch:
        pairs = zip(batch["responses"], response_lengths(batch).tolist(), strict=True)
        found["response_ids"] = [ids[:length].tolist() for ids, length in pairs]
    left_out = {*found, "raw_prompt", "response_text"}
    others = [name for name in batch.non_tensor_batch if name not in left_out and not name.startswith("reward_extra/")]
    return {**found, **{name: list(batch[name]) for name in others}}


def _samples(batch: DataProto) -> list[int]:
    """Each row's number among the samples of its prompt; the rows of an episode have one."""
    seen: Counter[str] = Counter()
    numbers = [0] * len(batch)
    for rows in episodes(batch):
        uid = batch["uid"][rows[0]]
        for row in rows:
            numbers[row] = seen[uid]
        seen[uid] += 1
    return numbers


def joined(tables: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """Several tables below each other; a cell that one lacks is None."""
    names = dict.fromkeys(name for one in tables for name in one)
    return {name: [cell for one in tables for cell in one.get(name, [None] * len(one["uid"]))] for name in names}


def save(path: str | Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write a table atomically, and return its path; cells that no file can hold (pictures) are left out with their column."""
    target = Path(path).expanduser()
    require(target.suffix == ".parquet", "file of generations", expected="a name ending in .parquet", found=str(path))
    files.write(target, columns)
    return target


def keep(folder: Path, step: int, columns: Mapping[str, Sequence[Any]], newest: int) -> None:
    """Write a validation's table into `folder`, and delete all but the `newest` ones."""
    save(step_file(folder, step), columns)
    for path in list(step_files(folder).values())[:-newest]:
        path.unlink()
