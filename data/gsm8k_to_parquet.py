"""GSM8K's own jsonl to parquet in verl's schema.

python data/gsm8k_to_parquet.py train.jsonl gsm8k/train.parquet --split train
"""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.datasets.rows import INSTRUCTION, convert


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--split", default="train")
    parser.add_argument("--instruction", default=INSTRUCTION)
    options = parser.parse_args()
    options.target.parent.mkdir(parents=True, exist_ok=True)
    rows = convert(options.source, options.target, split=options.split, instruction=options.instruction)
    print(f"{rows} rows in {options.target}")


if __name__ == "__main__":
    main()
