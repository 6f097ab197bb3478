"""The first hour with one's own things: own rows, own reward, GRPO, another reward beside it, in eight statements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench as wb
from workbench.base.errors import DataError, RunError, WorkbenchError


def brief(response: str, answer: str) -> float:
    return float(answer in response) - 0.01 * len(response)


def loud(response: str) -> float:
    return float("!" in response)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"q": f"Say {n} aloud, please.", "a": str(n)}) for n in range(12)]
    path.write_text("\n".join(lines))
    return path


def test_own_rows_own_reward_another_reward_beside_it(tiny: str, mine: Path, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny)
    with pytest.raises(
        DataError, match=r"found columns q, a; name them: wb.rows\('.*mine.jsonl', prompt='q', answer='a'\)"
    ):
        wb.rows(mine)
    rows = wb.rows(mine, prompt="q", answer="a")
    pipe = wb.recipes.grpo(engine, reward=brief, group_size=2, max_tokens=4)
    run = wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=tmp_path / "run", trace_freq=1, display=None)
    old = run.stepper(step=1).run(until="advantage")
    new = old.fork().back(to="reward").replace("reward", loud).run(until="advantage")
    assert old.compare(new).columns
    assert run.curves("reward") is not None

    with pytest.raises(WorkbenchError, match=r"'mine' is not a data_source with a scorer.*reward=my_function"):
        wb.evaluate(engine, rows[:2], max_tokens=2)
    with pytest.raises(WorkbenchError, match=r"'mine' is not a data_source with a scorer.*reward=my_function"):
        wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=4), rows.batch(2)).run(until="reward")
    with pytest.raises(RunError, match=r"step 3 cannot be opened at 'reward'.*trace_freq=1.* keeps every trace"):
        run.stepper(3, at="reward")
