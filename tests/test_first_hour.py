"""The first hour with one's own things: own rows, own reward, GRPO, another reward beside it, in eight statements."""

from __future__ import annotations

import asyncio
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


@pytest.mark.slow
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
    before = wb.evaluate(engine, rows[:2], brief, max_tokens=2)  # as a recipe takes it
    assert "(Student's t, paired by prompt, n = 2)" in repr(wb.evaluate(engine, rows[:2], brief, max_tokens=2) - before)
    with pytest.raises(WorkbenchError, match=r"'mine' is not a data_source with a scorer.*reward=my_function"):
        wb.Stepper(wb.recipes.grpo(engine, group_size=2, max_tokens=4), rows.batch(2)).run(until="reward")
    with pytest.raises(RunError, match=r"step 3 cannot be opened at 'reward'.*trace_freq=1.* keeps every trace"):
        run.stepper(3, at="reward")


def test_a_folder_that_lies_above_is_named_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README's line in a notebook of notebooks/, where JupyterLab starts."""
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    (tmp_path / "data" / "tiny" / "config.json").write_text("{}")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    with pytest.raises(WorkbenchError, match=r"no model 'data/tiny'.*found this folder in .*; pass '.*data/tiny'"):
        wb.engines.local("data/tiny")


def test_what_is_handed_in_wrongly_is_named_at_the_door(tiny: str, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny, device="cpu")

    def mine(response: str) -> float:
        return float(len(response))

    with pytest.raises(WorkbenchError, match=r"combine them: wb.rewards.Rubric"):
        wb.recipes.grpo(engine, [mine, mine])
    pipe = wb.recipes.grpo(engine, mine, group_size=2, max_tokens=4)
    with pytest.raises(WorkbenchError, match=r"argument rows; expected Rows; found 'my.jsonl'; make them: wb.rows"):
        wb.train_blocking(pipe, "my.jsonl", steps=1, run=tmp_path / "r")  # type: ignore[arg-type]
    with pytest.raises(WorkbenchError, match=r"batch of a stepper; expected a DataProto"):
        wb.Stepper(pipe, [{"prompt": "1+1?"}])  # type: ignore[arg-type]
    with pytest.raises(WorkbenchError, match=r"pipeline of a stepper; expected a Pipeline.*make it: wb.recipes.grpo"):
        wb.Stepper(engine, wb.rows([{"prompt": "1+1?"}]).batch(1))  # type: ignore[arg-type]


@pytest.mark.slow
def test_rows_of_a_mix_that_lack_what_the_reward_reads_are_counted(
    tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_a = wb.rows([{"q": f"{n}+1?", "a": n + 1} for n in range(8)], prompt="q", answer="a")
    mixed = wb.datasets.mix({"a": with_a, "b": wb.rows([{"prompt": f"{n}+2?"} for n in range(8)])})
    pipe = wb.recipes.grpo(wb.engines.local(tiny, device="cpu"), lambda response, a: 1.0, group_size=2, max_tokens=4)
    wb.train_blocking(pipe, mixed, steps=1, batch_size=4, run=tmp_path / "r", trackers=(), display=None)
    assert "8 of 16 rows have no 'a'" in caplog.text


@pytest.mark.slow
def test_what_a_person_types_by_guess_works(tiny: str, mine: Path, tmp_path: Path) -> None:
    engine = wb.engines.local(tiny, device="cpu", lr=1e-2)
    question = "What is the capital of Japan?"
    answer = engine.generate(question, max_tokens=4)
    assert isinstance(answer, str) and answer == engine.generate([{"role": "user", "content": question}], max_tokens=4)
    both = engine.generate([question, "1+1?"], max_tokens=4)
    assert both[0] == answer and len(both) == 2
    assert engine.generate(question, max_tokens=8, temperature=1.0, seed=1) != answer
    chat = wb.engines.chat(engine)
    done = asyncio.run(chat.complete([{"role": "user", "content": question}], max_tokens=4, temperature=0.0))
    assert done.text == answer and str(chat) == f"SamplerChat({chat.describe()})"

    rows = wb.rows(mine, prompt="q", answer="a")
    before = wb.evaluate(engine, rows, reward=brief, max_tokens=4)
    s = wb.Stepper(wb.recipes.grpo(engine, reward=brief, group_size=4, max_tokens=4), rows.batch(4)).run()
    other = s.fork().back(to="reward").replace("reward", lambda response: -brief(response, "x")).run(until="advantage")
    compared = s.compare(other)
    assert compared.flips and len(compared.flips) == compared.sign_flips and all(row.flipped for row in compared.flips)

    after = wb.evaluate(engine, rows, reward=brief, max_tokens=4)
    gain = after - before
    assert gain == after.compare(before) and gain.value == pytest.approx(after.mean - before.mean) and gain.n == 12
    assert gain.low <= gain.value <= gain.high and (before - before).value == 0.0
    with pytest.raises(DataError, match="expected evaluations of the same rows; found 12 and 2 prompts, none in both"):
        after - wb.evaluate(engine, wb.rows([{"prompt": "a", "answer": "b"}] * 2), reward=brief, max_tokens=2)

    engine.save(tmp_path / "model")
    assert wb.engines.local(tmp_path / "model", device="cpu").generate(question, max_tokens=4) == engine.generate(
        question, max_tokens=4
    )
