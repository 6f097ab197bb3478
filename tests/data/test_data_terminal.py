"""The tasks for a terminal: the same bytes from the seed, no task solved at its beginning, each by its solution."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import make_terminal
import pytest

from workbench.agents import Terminal, terminal_rows
from workbench.base.errors import SandboxError
from workbench.datasets.files import read
from workbench.sandbox import LocalSandbox

FOLDER = Path(__file__).parents[2] / "data" / "tiny-terminal"


def test_the_same_bytes_from_the_seed_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_terminal.py", "--folder", str(tmp_path)])
    make_terminal.main()
    made = (tmp_path / "tasks.jsonl").read_bytes()
    assert made == (FOLDER / "tasks.jsonl").read_bytes()
    assert hashlib.sha256(made).hexdigest() in (FOLDER / "README.md").read_text()


def test_rows_have_neither_tests_nor_solutions_in_their_prompts() -> None:
    tasks, rows = list(read(FOLDER / "tasks.jsonl")), terminal_rows(FOLDER / "tasks.jsonl")
    assert len(rows) == len(tasks) == 16
    for task, row in zip(tasks, rows, strict=True):
        shown, given = json.dumps(row["prompt"]), json.dumps(row)
        assert "check.py" not in shown and task["solution"] not in json.loads(given).values()
        assert json.dumps(task["solution"])[1:-1] not in given


@pytest.mark.slow
def test_no_task_is_solved_at_its_beginning_and_each_by_its_solution() -> None:
    try:
        tool = Terminal(LocalSandbox(), timeout=60.0)
    except SandboxError as error:
        pytest.skip(str(error))

    async def scores(task: dict[str, str], kwargs: dict[str, str]) -> list[float]:
        instance, _ = await tool.create(None, **kwargs)
        found = []
        for command in ("ls", task["solution"]):
            await tool.execute(instance, {"command": command})
            score = await tool.calc_reward(instance)
            assert not isinstance(score, float) and score.parts.get("pass_to_pass", 1.0) == 1.0, score
            found.append(score.value)
        await tool.release(instance)
        return found

    async def all_of_them() -> list[list[float]]:
        rows = [
            row["extra_info"]["tools_kwargs"]["terminal"]["create_kwargs"]
            for row in terminal_rows(FOLDER / "tasks.jsonl")
        ]
        return await asyncio.gather(
            *(scores(task, one) for task, one in zip(read(FOLDER / "tasks.jsonl"), rows, strict=True))
        )

    assert asyncio.run(all_of_them()) == [[0.0, 1.0]] * 16
