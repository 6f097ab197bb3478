"""GSM8K's own jsonl (`question`, `answer` with `#### N`) as verl's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import DataError, message

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What the prepared data sets of the field append to every question."""


def to_row(
    record: dict[str, Any], *, index: int, split: str, data_source: str = "openai/gsm8k", instruction: str = ""
) -> dict[str, Any]:
    """One row: the ground truth follows the first `####`, its commas dropped."""
    question, answer = str(record["question"]), str(record["answer"])
    if "####" not in answer:
        raise DataError(message(f"row {index}", expected="an answer with '#### <number>'", found=repr(answer[-60:])))
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

    lines = [line for line in Path(source).read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [
        to_row(json.loads(line), index=index, split=split, instruction=instruction) for index, line in enumerate(lines)
    ]
    pq.write_table(pa.Table.from_pylist(rows), str(target), compression="zstd")
    return len(rows)
