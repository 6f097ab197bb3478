"""`rows`: the one door for data of any kind; at the front it is `wb.rows`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.base.errors import DataError
from workbench.datasets.files import find, read
from workbench.datasets.records import CHAT, has_answer, rows_of
from workbench.datasets.rows import Rows, made_of


def rows(
    path: str | Path | Sequence[str | Path],
    *,
    max_prompt_length: int | None = None,
    prompt_key: str = CHAT,
    limit: int | None = None,
    without: Sequence[str] = (),
    require_answers: bool = True,
) -> Rows:
    """Rows of one file or several (`.parquet`, `.json`, `.jsonl`; a pattern such as `train-*.parquet` too).

    A prompt may be a chat, also as JSON text, or a plain string (it becomes a user message, and the row has
    `prompt_is_text`); rows of `question` and `answer` are read as GSM8K's. Engines read text only: rows with pictures, films
    or sounds are refused, and so is content that is not text. `limit` takes the first rows; `without` leaves columns out, for files with a column that a stage writes
    (`score`, `uid`, …). `max_prompt_length` (tokens) is checked when a model's tokenizer is there: by `rows.fitting`, by
    `train` before it starts, and by the rollout. Raises `DataError` for a missing, unreadable or empty file, a missing
    prompt column, a column whose name is reserved, and, unless `require_answers=False`, rows without a ground truth.
    """
    for name, number in (("limit", limit), ("max_prompt_length", max_prompt_length)):
        if number is not None and number < 1:
            raise DataError(name, expected="≥ 1, or None", found=number)
    paths = find(path)
    name = ", ".join(str(one) for one in paths)
    records: list[dict[str, Any]] = []
    for one in paths:
        left = None if limit is None else limit - len(records)
        records += rows_of(read(one)[:left], source=str(one), prompt_key=prompt_key, without=frozenset(without))
    if not records:
        raise DataError(f"no rows in {name or 'an empty list of files'}")
    unanswered = [index for index, row in enumerate(records) if not has_answer(row)]
    if unanswered and require_answers:
        expected, found = "reward_model.ground_truth in every row", f"none in rows {unanswered[:8]}"
        do = "add it, or load with require_answers=False and a reward that needs none"
        raise DataError(f"{len(unanswered)} rows of {name} have no ground truth", expected=expected, found=found, do=do)
    return made_of(records, max_prompt_length, name)
