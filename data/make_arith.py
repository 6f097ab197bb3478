"""Write data/arith/{train,test}.parquet: the same bytes from the same seed.

python data/make_arith.py [--seed 0] [--train 4096] [--test 512] [--folder data/arith]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
from arith_world import Problem, make_problem

SOURCE = "workbench/arith"


def row(problem: Problem, split: str, index: int) -> dict[str, object]:
    """One row in verl's schema."""
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "question": problem.question, "answer": problem.solution},
    }


def problems(seed: int, number: int) -> list[Problem]:
    """`number` problems with different questions."""
    random = Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < number:
        problem = make_problem(random)
        found.setdefault(problem.question, problem)
    return list(found.values())


def write(rows: list[dict[str, object]], path: Path) -> None:
    """Fixed writer settings, so that the bytes depend on the rows alone."""
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", row_group_size=1024, version="2.6")


def main() -> None:
    """Write both splits; they share no question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=4096)
    parser.add_argument("--test", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "arith")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    drawn = problems(options.seed, options.train + options.test)
    for split, part in (("train", drawn[: options.train]), ("test", drawn[options.train :])):
        write([row(problem, split, index) for index, problem in enumerate(part)], options.folder / f"{split}.parquet")


if __name__ == "__main__":
    main()
