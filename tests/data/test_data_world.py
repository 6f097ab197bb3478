"""The data is a function of its seed, to the byte; nothing is shared between the splits; the cards are true."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random

import pytest
from arith_world import careless, make_problem
from make_arith import problems, row, write

import workbench as wb
from workbench.rewards.scorers.gsm8k import compute_score

ARITH = Path(__file__).parents[2] / "data" / "arith"


def test_the_files_are_what_the_script_makes_to_the_byte(tmp_path: Path) -> None:
    drawn = problems(0, 4096 + 512)
    for split, part in (("train", drawn[:4096]), ("test", drawn[4096:])):
        write([row(problem, split, index) for index, problem in enumerate(part)], tmp_path / f"{split}.parquet")
        assert (tmp_path / f"{split}.parquet").read_bytes() == (ARITH / f"{split}.parquet").read_bytes()


def test_the_card_has_the_hashes() -> None:
    card = (ARITH / "README.md").read_text()
    for split in ("train", "test"):
        assert hashlib.sha256((ARITH / f"{split}.parquet").read_bytes()).hexdigest() in card


@pytest.mark.slow
def test_the_splits_share_no_question_and_every_reference_scores_one() -> None:
    train, test = (wb.rows(ARITH / f"{split}.parquet") for split in ("train", "test"))
    assert len(train) == 4096 and len(test) == 512
    questions = [{row["extra_info"]["question"] for row in data} for data in (train, test)]
    assert not questions[0] & questions[1] and len(questions[1]) == 512
    for data in (train, test):
        assert all(compute_score(r["extra_info"]["answer"], r["reward_model"]["ground_truth"]) == 1.0 for r in data)


def test_most_of_what_people_write_is_careless() -> None:
    random = Random(5)
    made = [make_problem(random) for _ in range(2000)]
    right = sum(compute_score(careless(problem, random), str(problem.answer)) for problem in made) / len(made)
    assert 0.25 < right < 0.45
    assert all(0 <= one[3] <= 99 for problem in made for one in problem.sums)
