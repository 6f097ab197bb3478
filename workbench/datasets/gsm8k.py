"""GSM8K's own jsonl (`question`, `answer` with `#### N`) as verl's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.datasets.files import read
from workbench.errors import DataError, message

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What the prepared data sets of the field append to every question."""


def to_row(
    record: dict[str, Any],
    *,
    index: int = 0,
    split: str,
    data_source: str = "openai/gsm8k",
    instruction: str = "",
    place: str | None = None,
) -> dict[str, Any]:
    """One row: the ground truth follows the first `####`, its commas dropped.

    Raises `DataError`, at `place` (by default the row's index), where question, answer or `####` is missing.
    """
    where = place or f"row {index}"
    if not isinstance(record, dict) or not {"question", "answer"} <= record.keys():
        found = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(message(where, expected="question and answer", found=found))
    question, answer = str(record["question"]), str(record["answer"])
    if "####" not in answer:
        raise DataError(
            message(
                where,
                expected="an answer with '#### <number>'",
                found=repr(answer[-60:]),
                do="for other answers, write rows with prompt and reward_model.ground_truth",
            )
        )
    truth = answer.split("####", 1)[1].strip().split("\n")[0].replace(",", "")
    content = f"{question} {instruction}" if instruction else question
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def convert(source: str | Path, target: str | Path, *, split: str, instruction: str = INSTRUCTION) -> int:
    """Write a jsonl file of GSM8K as parquet in verl's schema; the number of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = read(Path(source))
    rows = [
        to_row(record, index=index, split=split, instruction=instruction, place=f"row {index} of {source}")
        for index, record in enumerate(records)
    ]
    if not rows:
        raise DataError(message(f"no rows in {source}"))
    pq.write_table(pa.Table.from_pylist(rows), str(target), compression="zstd")
    return len(rows)
