"""Files into `Rows`: verl's rows, or questions and answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.datasets.files import find, read
from workbench.datasets.gsm8k import to_row
from workbench.datasets.report import has_answer
from workbench.datasets.rows import CHAT, Rows
from workbench.errors import DataError, describe, message, unknown


def load(
    path: str | Path | Sequence[str | Path],
    *,
    max_prompt_length: int | None = None,
    prompt_key: str = CHAT,
    limit: int | None = None,
    without: Sequence[str] = (),
    require_answers: bool = True,
) -> Rows:
    """Rows of one file or several (`.parquet`, `.json`, `.jsonl`; a pattern such as `train-*.parquet` too).

    A prompt may be a chat or a plain string (it becomes a user message); rows of `question` and `answer` are
    read as GSM8K's. `limit` takes the first rows; `without` leaves columns out, for files with a column
    that a stage writes (`score`, `uid`, …). `max_prompt_length` (tokens) is checked when a model's
    tokenizer is there: by `rows.fitting`, by `train` before it starts, and by the rollout.
    Raises `DataError` for a missing, unreadable or empty file, a missing prompt column, a column whose name is
    reserved, and, unless `require_answers=False`, rows without a ground truth.
    """
    for name, number in (("limit", limit), ("max_prompt_length", max_prompt_length)):
        if number is not None and number < 1:
            raise DataError(message(name, expected="≥ 1, or None", found=number))
    paths = find(path)
    name = ", ".join(str(one) for one in paths)
    raw = [row for one in paths for row in read(one)]
    if not raw:
        raise DataError(message(f"no rows in {name or 'an empty list of files'}"))
    left_out = frozenset(without)
    rows = [_normal(row, prompt_key, left_out, index, name) for index, row in enumerate(raw[:limit])]
    unanswered = [index for index, row in enumerate(rows) if not has_answer(row)]
    if unanswered and require_answers:
        raise DataError(
            message(
                f"{len(unanswered)} rows of {name} have no ground truth",
                expected="reward_model.ground_truth in every row",
                found=f"none in rows {unanswered[:8]}",
                do="add it, or load with require_answers=False and a reward that needs none",
            )
        )
    return Rows(rows, max_prompt_length=max_prompt_length, source=name)


def _normal(row: Any, prompt_key: str, without: frozenset[str], index: int, name: str) -> dict[str, Any]:
    """verl's row, whatever it was."""
    place = f"row {index} of {name}"
    if not isinstance(row, dict):
        raise DataError(message(place, expected="an object", found=type(row).__name__))
    if prompt_key not in row and "question" in row and "answer" in row:
        return to_row(row, index=index, split="", data_source=row.get("data_source", "openai/gsm8k"), place=place)
    if prompt_key not in row:
        raise DataError(f"{place}: " + unknown("column of it", prompt_key, sorted(row)))
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not (isinstance(prompt, list) and prompt and all(_is_turn(turn) for turn in prompt)):
        expected = "a chat (a list of {role, content}) or a text"
        raise DataError(message(f"prompt of {place}", expected=expected, found=describe(prompt)))
    if not isinstance(row.get("reward_model"), dict | None):
        expected = "an object with ground_truth, or nothing"
        raise DataError(message(f"reward_model of {place}", expected=expected, found=describe(row["reward_model"])))
    rest = {key: value for key, value in row.items() if key != prompt_key and key not in without}
    return {CHAT: prompt, "data_source": None, "reward_model": None, "extra_info": {}, **rest}


def _is_turn(turn: Any) -> bool:
    """A message: who, and what (text, or parts of it; an assistant's call of a tool may have no text)."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        return False
    return isinstance(turn.get("content"), str | list) or bool(turn.get("tool_calls"))
