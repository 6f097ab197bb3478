"""Harnesses as agent loops: programs and functions that nobody changed play the rows, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_parts import Script, schema, tokenizers

import workbench as wb
from workbench.agents import Episode, Harness
from workbench.base import runtime
from workbench.base.errors import SettingError
from workbench.rewards import Reward
from workbench.rewards.base import broken_episode
from workbench.rewards.score import Status
from workbench.stages import EpisodeRollout

HELD = {"max_tokens": 400, "temperature": 1.0}
PLAIN = """
import json, os, sys, urllib.request

def ask(messages):
    body = json.dumps({"messages": messages, "model": os.environ["OPENAI_MODEL"]}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    to = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(to, body, head)) as reply:
        return json.load(reply)["choices"][0]["message"]

question = sys.stdin.read()
messages = [{"role": "user", "content": question}]
"""
"""The beginning of a program without any package."""


def program(tmp_path: Path, text: str, **changes: Any) -> Harness:
    file = tmp_path / "harness.py"
    file.write_text(PLAIN + text)
    return Harness([sys.executable, "-S", "-E", str(file)], **changes)


def script(tiny: str, write: Any = ("one", "two", "three"), seconds: float = 0.0) -> Script:
    return Script(tokenizers(tiny)["qwen"], write, seconds)


def played(agent: Harness, sampler: Any, question: str = "2 + 2?", **row: Any) -> Sequence[Any]:
    chat = [{"role": "user", "content": question}]
    episode = Episode(sampler, uid="a")
    found = runtime.run(agent.bound(episode).run(HELD, raw_prompt=chat, **row))
    return found if isinstance(found, list) else [found]


def why(output: Any) -> str:
    """Why a reward would not score it."""
    return broken_episode({"finish_reason": output.finish_reason, "agent_extra": output.extra})


def test_a_program_plays_and_gives_its_reward(tiny: str, tmp_path: Path) -> None:
    agent = program(
        tmp_path,
        """
row = json.load(open(os.environ["WORKBENCH_ROW"]))
assert question == row["raw_prompt"][-1]["content"] == "2 + 2?" and os.listdir(".") == []
for word in ("and?", "so?"):
    messages += [{"role": "assistant", **ask(messages)}, {"role": "user", "content": word}]
open("left", "w").write("behind")
print("some talk")
print(json.dumps({"reward": 0.5, "metrics": {"turns": 2}, "level": row["extra_info"]["level"]}))
""",
    )
    (output,) = played(agent, script(tiny), extra_info={"level": 3})
    assert [turn.text for turn in output.turns] == ["one", "and?", "two"] and output.finish_reason == "stop"
    assert output.extra["reward"] == 0.5 and output.extra["level"] == 3 and output.extra["errors"] == []
    score = wb.rewards.episodes.harness()(agent_extra=output.extra)
    assert score.value == 0.5 and score.parts == {"turns": 2.0}
    assert wb.rewards.episodes.harness()(agent_extra={}).status is Status.INFRA_ERROR


def test_a_result_may_be_a_file_or_a_number(tiny: str, tmp_path: Path) -> None:
    write = 'ask(messages)\nopen(os.environ["WORKBENCH_RESULT"], "w").write(\'{"reward": 2}\')\nprint(7)'
    assert played(program(tmp_path, write), script(tiny))[0].extra["reward"] == 2
    assert played(program(tmp_path, "ask(messages)\nprint(7)"), script(tiny))[0].extra["reward"] == 7.0
    assert "reward" not in played(program(tmp_path, "ask(messages)\nprint('seven')"), script(tiny))[0].extra


def test_places_in_the_command_are_filled_in(tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "harness.py"
    file.write_text(PLAIN.replace("sys.stdin.read()", "sys.argv[1]") + "ask(messages)\nprint(json.dumps(sys.argv[1:]))")
    agent = Harness([sys.executable, "-S", str(file), "{prompt}", "{model}", "--at={base_url}"], model="mine")
    (output,) = played(agent, script(tiny))
    assert [turn.text for turn in output.turns] == ["one"] and "2 + 2?" not in repr(agent)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ask(messages)\nsys.exit('it went wrong')", "exit code 1: it went wrong"),
        ("ask(messages)\nimport signal\nos.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        ("ask(messages)\nimport time\ntime.sleep(60)", "did not end within 2 s"),
        ("print(1)", "without an answer"),
        ("sys.exit(3)", "exit code 3"),
    ],
)
def test_a_harness_that_fails_is_that_rows_infra_error(tiny: str, tmp_path: Path, text: str, expected: str) -> None:
    (output,) = played(program(tmp_path, text, seconds=2.0 if "sleep" in text else 60.0), script(tiny))
    assert output.finish_reason == "abort" and expected in why(output)
    assert bool(output.response_ids) == ("ask" in text)


def test_its_processes_are_killed_with_the_episode(tiny: str, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"])
open({str(pid)!r}, "w").write(str(child.pid))
ask(messages)
"""
    played(program(tmp_path, text), script(tiny))
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.02)
    else:
        os.kill(int(pid.read_text()), signal.SIGKILL)
        pytest.fail("the harness's child is still there")


def test_who_ends_because_of_a_limit_is_scored(tiny: str, tmp_path: Path) -> None:
    text = "while True:\n    messages += [{'role': 'assistant', **ask(messages)}, {'role': 'user', 'content': 'and?'}]"
    (output,) = played(program(tmp_path, text, max_assistant_turns=3), script(tiny))
    assert output.finish_reason == "turns" and not why(output) and "400" in output.extra["stopped"]
    assert [turn.role for turn in output.turns].count("assistant") == 3


def test_who_goes_on_though_it_is_refused_is_ended(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.agents.harnesses._GRACE", 0.3)
    text = """
import time
messages += [{"role": "assistant", **ask(messages)}, {"role": "user", "content": "and?"}]
while True:
    try:
        ask(messages)
    except OSError:
        time.sleep(0.05)
"""
    (output,) = played(program(tmp_path, text, max_assistant_turns=1), script(tiny))
    assert output.finish_reason == "turns" and not why(output) and "did not end" in output.extra["stopped"]


def test_a_function_plays_with_and_without_http(tiny: str) -> None:
    async def within(policy: Any, row: dict[str, Any]) -> float:
        first = (await policy.chat(messages=row["raw_prompt"]))["choices"][0]["message"]
        await policy.chat(messages=[*row["raw_prompt"], first, {"role": "user", "content": "and?"}])
        return 1.0

    def blocking(policy: Any, row: dict[str, Any]) -> None:
        import urllib.request

        body = json.dumps({"messages": row["raw_prompt"]}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{policy.base_url}/chat/completions", body)).read()

    assert [turn.text for turn in played(Harness(within), script(tiny))[0].turns] == ["one", "and?", "two"]
    assert played(Harness(within), script(tiny))[0].extra["reward"] == 1.0
    assert [turn.text for turn in played(Harness(blocking), script(tiny))[0].turns] == ["one"]


def test_a_function_that_raises_or_waits_is_that_rows_infra_error(tiny: str) -> None:
    async def wrong(policy: Any, row: dict[str, Any]) -> None:
        raise KeyError("no such level")

    async def slow(policy: Any, row: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    def stuck(policy: Any, row: dict[str, Any]) -> None:
        time.sleep(30)

    assert "no such level" in why(played(Harness(wrong), script(tiny))[0])
    assert "within 0.2 s" in why(played(Harness(stuck, seconds=0.2), script(tiny))[0])
    assert "within 0.2 s" in why(played(Harness(slow, seconds=0.2), script(tiny))[0])


def test_what_the_engine_raises_ends_the_run(tiny: str) -> None:
    def broken(_: str) -> str:
        raise RuntimeError("the engine fell over")

    async def play(policy: Any, row: dict[str, Any]) -> None:
        await policy.chat(messages=row["raw_prompt"])

    with pytest.raises(RuntimeError, match="fell over"):
        played(Harness(play), script(tiny, broken))


def test_settings_that_cannot_work_are_refused(tiny: str) -> None:
    for given in ("python x.py", [], [1]):
        with pytest.raises(SettingError, match="play of a harness"):
            Harness(given)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="max_concurrent"):
        Harness(["true"], max_concurrent=0)
    with pytest.raises(SettingError, match="a program that can be started"):
        played(Harness(["/no/such/program"]), script(tiny))
    with pytest.raises(SettingError, match="tool parser"):
        Harness(["true"], parser="no such").prepare(script(tiny))


def test_at_most_so_many_programs_run_at_once(tiny: str, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    text = f"""
import time
mark = os.path.join({str(marks)!r}, str(os.getpid()))
open(mark, "w").close()
print(len(os.listdir({str(marks)!r})))
ask(messages)
time.sleep(0.2)
os.remove(mark)
print(json.dumps({{"reward": 1.0}}))
"""
    agent, sampler = program(tmp_path, text, max_concurrent=2), script(tiny)

    async def both() -> list[Any]:
        rows = [agent.bound(Episode(sampler, uid=str(row))) for row in range(5)]
        chat = [{"role": "user", "content": "x"}]
        return await asyncio.gather(*(one.run(HELD, raw_prompt=chat) for one in rows))

    assert all(one.extra["reward"] == 1.0 for one in runtime.run(both()))


# --- a whole pipeline ---------------------------------------------------------------------------

CALCULATOR = [schema("calculator", expression="string")]


async def branches(policy: Any, row: dict[str, Any]) -> float:
    """Asks the row's question, and for every other one at the same time another; the reward is the first answer's length."""

    async def one(messages: list[Any], again: str) -> str:
        answer = (await policy.chat(messages=messages, tools=CALCULATOR))["choices"][0]["message"]
        if again:
            await policy.chat(messages=[*messages, answer, {"role": "user", "content": again}], tools=CALCULATOR)
        return answer["content"] or ""

    question = row["raw_prompt"][0]["content"]
    others = [one([{"role": "user", "content": f"Well: {question}"}], "")] if len(question) % 2 else []
    first, *_ = await asyncio.gather(one(row["raw_prompt"], "Sure?"), *others)
    return len(first) / 40


def pipeline() -> Any:
    engine = wb.engines.local("data/tiny-arith-tools", lr=3e-4)
    reward = Reward(wb.rewards.episodes.harness(), in_process=True)
    agent = Harness(branches, parser="hermes")
    return wb.recipes.grpo(engine, reward, agent=agent, group_size=4, kl_coef=0.001, max_tokens=96)


def test_a_step_of_sequences_is_scored_by_episode_and_on_policy() -> None:
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    found = [wb.Stepper(pipeline(), rows.batch(6, seed=1)).run().batch for _ in range(2)]
    batch = found[0]
    assert len(batch) > 24 and sorted(set(map(int, batch["session"]))) == list(range(24))
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("responses", "response_mask", "reward"))
    gap = (batch["old_log_probs"] - batch["rollout_log_probs"])[batch["response_mask"].bool()].abs().max()
    assert gap < 1e-4
    for number in range(24):
        rows_of = [row for row, one in enumerate(batch["session"]) if int(one) == number]
        assert len({float(batch["reward"][row]) for row in rows_of}) == 1


def test_a_run_is_recorded_and_its_rows_step_again(tmp_path: Path) -> None:
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    run = wb.train_blocking(pipeline(), rows, steps=2, batch_size=4, seed=0, run=tmp_path / "run")
    again = run.stepper(2).run()
    assert "nothing differs" in repr(again.compare(run.traces[2]))
    recorded = wb.load_run(tmp_path / "run").stepper(step=2)
    recorded.replace("reward", Reward(wb.rewards.episodes.harness(), in_process=True)).run(until="advantage")
    assert torch.equal(recorded.batch["advantages"], run.traces[2].batch["advantages"])


def test_lock_step_is_refused() -> None:
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    stage = EpisodeRollout(
        wb.engines.local("data/tiny-arith-tools"), agent=Harness(branches, parser="hermes"), deterministic=True
    )
    with pytest.raises(SettingError, match="deterministic"):
        stage(rows.batch(2).with_meta(seed=1, step=1))
