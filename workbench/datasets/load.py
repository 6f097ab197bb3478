"""Files into `Rows`: parquet, json, jsonl; verl's rows, or questions and answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.datasets.report import has_answer
from workbench.datasets.rows import CHAT, Rows
from workbench.errors import DataError, boundary, message, unknown


def load(
    path: str | Path | Sequence[str | Path],
    *,
    max_prompt_length: int | None = None,
    prompt_key: str = CHAT,
    limit: int | None = None,
    require_answers: bool = True,
) -> Rows:
    """Rows of one file or several (`.parquet`, `.json`, `.jsonl`).

    A prompt may be a chat or a plain string (it becomes a user message); rows of `question` and `answer` are
    read as GSM8K's. `limit` takes the first rows. `max_prompt_length` (tokens) is checked when a model's
    tokenizer is there: by `rows.fitting`, by `train` before it starts, and by the rollout.
    Raises `DataError` for a missing, unreadable or empty file, a missing prompt column, and, unless
    `require_answers=False`, rows without a ground truth.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    raw = [row for one in paths for row in _read(one)]
    name = ", ".join(str(one) for one in paths)
    if not raw:
        raise DataError(message(f"no rows in {name}"))
    rows = [_normal(row, prompt_key, index, name) for index, row in enumerate(raw[:limit])]
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


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(
            message(f"no data file at {str(path)!r}", do="check the path; it starts where Python was started")
        )
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl":
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return [_json(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if path.suffix == ".json":
        rows = _json(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(rows, list):
            raise DataError(message(f"{path}", expected="a list of rows", found=type(rows).__name__))
        return rows
    raise DataError(unknown("suffix of a data file", path.suffix or "(none)", (".parquet", ".json", ".jsonl")))


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    with boundary(f"reading {str(path)!r} as parquet", DataError):
        return pq.read_table(path).to_pylist()


def _json(text: str, place: str) -> Any:
    """Strict JSON: NaN, infinity and 1e999 are refused, with the place."""

    def refuse(constant: str) -> Any:
        raise DataError(message(f"{place}: JSON has no {constant}"))

    def number(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise DataError(message(f"{place}: a number too large", found=digits))
        return value

    try:
        return json.loads(text, parse_constant=refuse, parse_float=number)
    except (json.JSONDecodeError, RecursionError) as cause:
        raise DataError(message(f"{place} is not JSON", found=str(cause))) from cause


def _normal(row: Any, prompt_key: str, index: int, name: str) -> dict[str, Any]:
    """verl's row, whatever it was."""
    if not isinstance(row, dict):
        raise DataError(message(f"row {index} of {name}", expected="an object", found=type(row).__name__))
    if prompt_key not in row and "question" in row and "answer" in row:
        from workbench.datasets.gsm8k import to_row

        return to_row(row, index=index, split="", data_source=row.get("data_source", "openai/gsm8k"))
    if prompt_key not in row:
        raise DataError(f"row {index} of {name}: " + unknown("column of it", prompt_key, sorted(row)))
    prompt = row[prompt_key]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    good = isinstance(prompt, list) and prompt and all(isinstance(turn, dict) and "content" in turn for turn in prompt)
    if not good:
        raise DataError(
            message(f"prompt of row {index} of {name}", expected="a chat or a text", found=repr(prompt)[:80])
        )
    rest = {key: value for key, value in row.items() if key != prompt_key}
    return {CHAT: prompt, "data_source": None, "reward_model": None, "extra_info": {}, **rest}
