"""The tool terminal: an episode's own files, hidden tests as the reward, states that stepping restores; what commands cannot do."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from agents_parts import Script, Tags, call
from support.patience import patience

import workbench as wb
from workbench.agents import Terminal, Tests, ToolAgent, load_tools, terminal_rows
from workbench.agents.tools.terminal import judged
from workbench.base.errors import DataError, SandboxError, SettingError
from workbench.dataproto import DataProto
from workbench.engines import SamplingSettings
from workbench.rewards import Score, Status
from workbench.rewards.scorers.episodes import by_tool
from workbench.sandbox import LocalSandbox, Workspace
from workbench.stages import EpisodeRollout

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "data" / "tiny-terminal" / "tasks.jsonl"
SAMPLING = SamplingSettings(max_tokens=400, temperature=1.0)
CHECK = {"command": "grep -q right answer.txt", "seconds": patience(20.0)}


@pytest.fixture(scope="module")
def sandbox() -> LocalSandbox:
    try:
        return LocalSandbox()
    except SandboxError as error:
        pytest.skip(f"no tier of isolation works here: {error}")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "data" / "tiny-arith")


@pytest.fixture
def clean() -> Any:
    before = folders()
    yield
    assert folders() <= before


def folders() -> set[Path]:
    return {*Path(tempfile.gettempdir()).glob("workbench-box-*"), *Path(tempfile.gettempdir()).glob("workbench-root-*")}


def in_episode(tool: Terminal, work: Any, **create: Any) -> Any:
    """What `work(instance)` gives in an episode of the tool."""

    async def played() -> Any:
        instance, _ = await tool.create(None, create_kwargs=create, **create)
        try:
            return await work(instance)
        finally:
            await tool.release(instance)
            await tool.release(instance)

    return asyncio.run(played())


def run(command: str) -> str:
    return call("terminal", command=command)


def rollout(
    tokenizer: Any, script: Any, tool: Terminal, rows: list[dict[str, Any]]
) -> tuple[EpisodeRollout, DataProto]:
    columns = {"uid": [str(n) for n in range(len(rows))], "raw_prompt": [row["prompt"] for row in rows]}
    columns["extra_info"] = [row["extra_info"] for row in rows]
    agent = ToolAgent([tool], parser=Tags(), max_tool_response_length=2000)
    stage = EpisodeRollout(Script(tokenizer, script), agent=agent, group_size=1, sampling=SAMPLING)
    return stage, DataProto.from_dict({}, columns, {"seed": 3, "step": 1})


# --- commands ----------------------------------------------------------------------------------


def test_files_stay_and_what_the_model_reads(sandbox: LocalSandbox, clean: None) -> None:
    async def work(instance: str) -> list[Any]:
        asked = (
            "cat a/in.txt; echo err >&2; echo x > out; exit 3",
            "cat out; cd /; V=1",
            "echo $V; pwd",
            "true",
            "sleep 60",
        )
        return [await tool.execute(instance, {"command": one}) for one in asked]

    tool = Terminal(sandbox, timeout=patience(1.0))
    first, second, third, fourth, late = in_episode(tool, work, files={"a/in.txt": "hi\n", "gone": None})
    assert first[0].text == "hi\nerr\n[exit code 3]" and first[2]["exit_code"] == 3 and first[2]["status"] == "scored"
    assert second[0].text == "x" and third[0].text == "\n/box" and fourth[0].text == "(no output)"
    assert late[0].text.startswith("[ended: time limit (") and late[2]["status"] == "timeout"


def test_what_is_no_command_is_refused_and_settings_are_checked(sandbox: LocalSandbox, clean: None) -> None:
    async def work(instance: str) -> list[Any]:
        return [
            await tool.execute(instance, one)
            for one in ({}, {"command": 1}, {"command": "a\0b"}, {"command": "#" * 200_000})
        ]

    tool = Terminal(sandbox)
    assert [found[2]["status"] for found in in_episode(tool, work)] == ["no_answer"] * 4
    with pytest.raises(SettingError, match=r"sandbox of tool 'terminal'; expected one with workspaces"):
        Terminal(wb.sandbox.remote("http://127.0.0.1:1"))  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match="image 'python:3' of a workspace"):
        in_episode(tool, None, image="python:3")
    with pytest.raises(SandboxError, match="setup of tool 'terminal'; expected a command that succeeds"):
        in_episode(tool, None, setup="exit 1")
    with pytest.raises(SettingError, match="a relative path inside its folder"):
        in_episode(tool, None, files={"../x": "y"})


def test_it_is_made_from_a_yaml_file(sandbox: LocalSandbox, tmp_path: Path, clean: None) -> None:
    (tmp_path / "tools.yaml").write_text("tools:\n  - name: terminal\n    config: {timeout: 7, files: {a: b}}\n")
    tool = load_tools(tmp_path / "tools.yaml", sandbox=sandbox)["terminal"]
    assert isinstance(tool, Terminal) and tool.timeout == 7

    async def work(instance: str) -> str | None:
        return (await tool.execute(instance, {"command": "cat a c"}))[0].text

    assert in_episode(tool, work) == "bcat: c: No such file or directory\n[exit code 1]"
    with pytest.raises(SettingError, match="a tool that runs code needs a sandbox"):
        load_tools(tmp_path / "tools.yaml")


# --- tests of an episode -----------------------------------------------------------------------


def scored(sandbox: LocalSandbox, commands: list[str], tests: dict[str, Any], **create: Any) -> Score:
    async def work(instance: str) -> Any:
        for command in commands:
            await tool.execute(instance, {"command": command})
        before = await tool.workspace(instance).read(".tests/check.py")
        found = await tool.calc_reward(instance)
        assert before == await tool.workspace(instance).read(".tests/check.py"), "tests run on a copy"
        return found

    tool = Terminal(sandbox, timeout=patience(10.0))
    return in_episode(tool, work, tests=json.dumps(tests), **create)


NAMED = {
    "command": "sh .tests/check.py {test}", "files": {".tests/check.py": 'grep -q "$1" answer.txt'},
    "fail_to_pass": ["a b", "c"], "pass_to_pass": ["d"], "seconds": patience(20.0),
}  # fmt: skip


def test_the_reward_is_what_the_hidden_tests_say(sandbox: LocalSandbox, clean: None) -> None:
    right = scored(sandbox, ["echo right > answer.txt"], CHECK)
    assert (right.value, right.why, right.status) == (1.0, "the test passes", Status.SCORED)
    wrong = scored(sandbox, [], CHECK)
    assert (wrong.value, wrong.status) == (0.0, Status.SCORED) and "No such file" in wrong.why
    half = scored(sandbox, ["echo a b, d > answer.txt"], NAMED)
    assert half.value == 0.0 and half.parts == {"fail_to_pass": 0.5, "pass_to_pass": 1.0}
    assert half.why == "1 of 3 tests fail (c): exit code 1"
    assert scored(sandbox, ["echo a b, c, d > answer.txt"], NAMED).value == 1.0
    broken = scored(sandbox, ["echo a b, c > answer.txt"], NAMED)
    assert broken.value == 0.0 and broken.parts == {"fail_to_pass": 1.0, "pass_to_pass": 0.0}
    late = scored(sandbox, [], {"command": "sleep 60", "seconds": 0.5})
    assert (late.status, late.scored) == (Status.TIMEOUT, True)
    full = scored(sandbox, [], {"command": "head -c 40M /dev/zero > big", "seconds": patience(20.0)})
    assert (full.status, full.value) == (Status.CRASHED, 0.0)


def test_tests_can_be_neither_seen_nor_changed_by_the_episode(
    sandbox: LocalSandbox, clean: None, tmp_path: Path
) -> None:
    for trick in (
        "mkdir .tests; echo exit 0 > .tests/check.py",
        "mkdir -p .tests/check.py; touch .tests/check.py/x; chmod 0 .tests/check.py",
        f"ln -s {tmp_path} .tests",
        "ln -s /etc/passwd .tests",
        "echo > .tests",
        "mkdir -p .tests; ln -s ../answer.txt .tests/check.py",
        "echo 'exit 0' > .bashrc; echo 'import os; os._exit(0)' > sitecustomize.py; mkdir -p .local/lib; chmod 0 .local",
        "(sleep 0.2; while true; do echo exit 0 > .tests/check.py; done) & disown",
    ):
        assert scored(sandbox, ["cat .tests/check.py", trick], NAMED).value == 0.0, trick
    assert list(tmp_path.iterdir()) == []
    hidden = scored(
        sandbox,
        ["find / -xdev -name check.py > answer.txt 2>&1; echo >> answer.txt"],
        {**CHECK, "command": "! grep -q check answer.txt"},
    )
    assert hidden.value == 1.0


def test_a_sandbox_that_fails_is_no_judgement(sandbox: LocalSandbox) -> None:
    async def work(instance: str) -> Any:
        await tool.workspace(instance).close()
        answer, reward, record = await tool.execute(instance, {"command": "ls"})
        assert record["status"] == "infra_error" and reward is None and "not its fault" in str(answer.text)
        return await tool.calc_reward(instance)

    tool = Terminal(sandbox)
    found = in_episode(tool, work, tests=CHECK)
    assert found.status is Status.INFRA_ERROR and "closed" in found.why


def test_the_rows_score_is_the_tools() -> None:
    scorer = by_tool()
    record = Score(value=1.0, parts={"fail_to_pass": 1.0}, why="all tests pass").to_json()
    assert scorer(agent_extra={"tool_scores": {"terminal": record}}) == Score(
        value=1.0, parts={"fail_to_pass": 1.0}, why="all tests pass"
    )
    assert scorer(agent_extra={"tool_totals": {"terminal": 0.5}}).value == 0.5
    assert scorer(turns=[]).status is Status.NO_ANSWER
    asked = [{"calls": [{"name": "terminal", "status": "error", "result": "it broke"}]}]
    assert scorer(turns=asked).status is Status.INFRA_ERROR and "it broke" in scorer(turns=asked).why
    gone = scorer(turns=asked, agent_extra={"errors": ["calc_reward of terminal: gone"]})
    assert "gone" in gone.why and not gone.scored


# --- rows --------------------------------------------------------------------------------------


def test_rows_of_tasks_hide_the_tests_and_bad_tasks_are_named() -> None:
    task = {"instance_id": "x-1", "problem_statement": "Mend it.", "files": {"a.py": "1"}, "test_cmd": "python -m t {test}",
            "test_files": {"t.py": "secret"}, "FAIL_TO_PASS": '["one"]', "PASS_TO_PASS": [], "image": "swe/x:1"}  # fmt: skip
    [row] = terminal_rows([task], system="You have a terminal.")
    assert "secret" not in json.dumps(row["prompt"]) and row["reward_model"]["ground_truth"] == "x-1"
    kwargs = row["extra_info"]["tools_kwargs"]["terminal"]["create_kwargs"]
    assert Tests.of(kwargs["tests"]) == Tests(
        command="python -m t {test}", files={"t.py": "secret"}, fail_to_pass=("one",)
    )
    assert json.loads(kwargs["files"]) == {"a.py": "1"} and kwargs["image"] == "swe/x:1"
    for change, why in (
        ({"problem_statement": None}, "task 'x-1': instruction"),
        ({"test_cmd": None}, "expected a shell command as one of test_command, test_cmd"),
        ({"test_cmd": "python -m t"}, "expected one with {test}"),
        ({"FAIL_TO_PASS": None}, "expected one without {test}"),
        ({"test_files": None, "test_patch": "--- a"}, "found a patch, test_patch"),
        ({"files": ["a.py"]}, "files of a terminal; expected relative path"),
        ({"FAIL_TO_PASS": "one"}, "expected JSON"),
    ):
        with pytest.raises(DataError, match="(?s)" + why.replace("{", r"\{").replace("}", r"\}")):
            terminal_rows([{**task, **change}])


# --- episodes ----------------------------------------------------------------------------------


def test_a_scripted_agent_solves_a_task_and_back_restores_the_files(
    sandbox: LocalSandbox, tokenizer: Any, clean: None
) -> None:
    [row] = [one for one in terminal_rows(TASKS) if one["reward_model"]["ground_truth"] == "tiny-1"]
    tool = Terminal(sandbox, timeout=patience(10.0))
    stage, batch = rollout(tokenizer, [""], tool, [row])
    e = stage.episode(batch, 0)
    e.say(run("sed -i 's/+ discount/- discount/' shop.py; date +%N > when; cat when")).next()
    first = e.turns[1].text
    e.say(run("rm shop.py; ls")).next()
    assert e.turns[3].text == "when"
    e.back(2).say(run("cat when; grep -c -- '- discount' shop.py")).next()
    assert e.turns[3].text == f"{first}\n1", "the files are those of that moment: the clock was not asked again"
    other = e.fork().back(2).say(run("rm -r *; ls")).next()
    assert other.turns[3].text == "(no output)"
    e.say("Done.")
    assert e.output.extra["tool_scores"]["terminal"]["value"] == 1.0
    assert by_tool()(turns=[one.to_dict() for one in e.turns], agent_extra=e.output.extra).why == "all tests pass"
    other.say("Done.")
    assert other.output.extra["tool_totals"] == {"terminal": 0.0}
    e.replace(1, "(by hand)").say(run("ls")).next()
    assert e.turns[3].text == "shop.py", "a call whose answer is by hand was not run"
    e.close()
    other.close()
    del e, other


def test_a_rollout_of_terminal_tasks_is_scored_and_leaves_nothing(
    sandbox: LocalSandbox, tokenizer: Any, clean: None
) -> None:
    rows = [row for row in terminal_rows(TASKS) if int(row["extra_info"]["index"]) in (0, 1)]
    tool = Terminal(sandbox, timeout=patience(10.0))

    def write(context: str) -> str:
        if "<|im_start|>tool" in context:
            return "Done."
        return run("awk '{s += $1} END {print s}' numbers.txt > answer.txt; sed -i 's/+ d/- d/' *.py")

    stage, batch = rollout(tokenizer, write, tool, rows)
    done = stage(batch).batch
    assert [extra["tool_totals"] for extra in done["agent_extra"]] == [{"terminal": 1.0}] * 2
    assert [one.value for one in wb.stages.Reward(by_tool())(done).batch["score"]] == [1.0, 1.0]


@pytest.mark.slow
def test_a_step_of_grpo_on_terminal_tasks(sandbox: LocalSandbox, clean: None) -> None:
    engine = wb.engines.local(str(ROOT / "data" / "tiny-arith-tools"))
    agent = ToolAgent([Terminal(sandbox)], parser="hermes", max_assistant_turns=2)
    pipeline = wb.recipes.grpo(engine, by_tool(), agent=agent, group_size=2, sampling=SamplingSettings(max_tokens=48))
    batch = wb.rows(terminal_rows(TASKS)).batch(2)
    done = wb.Stepper(pipeline, batch).run()
    scores = done.batch["score"]
    assert len(scores) == 4 and all(one.scored for one in scores) and engine.version == 1


# --- what commands cannot do ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "forbidden"),
    [
        ("cat {secret}; ls {folder}", "CANARY"),
        ("ln -s {secret} link; cat link", "CANARY"),
        ("exec 3<>/dev/tcp/127.0.0.1/{port} && echo CANARY", "CANARY"),
        ("ls /home /root /work /sys 2>/dev/null && echo CANARY", "CANARY"),
        ("touch /usr/escaped && echo CANARY", "CANARY"),
        ("kill -9 -1; ps aux | grep -c CANARY", "1\n"),
    ],
)
def test_no_way_out_of_a_workspace(
    sandbox: LocalSandbox, clean: None, tmp_path: Path, command: str, forbidden: str
) -> None:
    import socket

    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text("CANARY")

    async def work() -> str:
        workspace = await sandbox.workspace()
        with socket.create_server(("127.0.0.1", 0)) as server:
            names = {"secret": tmp_path / "secret", "folder": tmp_path, "port": server.getsockname()[1]}
            result = await workspace.run(command.format(**names), seconds=patience(5.0))
        await workspace.close()
        return result.stdout

    assert forbidden not in asyncio.run(work())


@pytest.mark.slow
def test_what_a_command_takes_is_bounded_and_the_next_one_runs(sandbox: LocalSandbox, clean: None) -> None:
    async def work() -> None:
        workspace = await sandbox.workspace()
        saved = await workspace.snapshot()
        for command, limit, seconds in (
            ("f() { f | f & }; f; while true; do f; done", "time", 1.0),
            ("while true; do :; done", "time", 0.5),
            ("head -c 3G /dev/zero | tail", "memory", patience(20.0)),
            ("for n in $(seq 20); do head -c 9M /dev/zero > f$n; done; sleep 60", "disk", patience(20.0)),
            ("yes", "output", patience(20.0)),
        ):
            result = await workspace.run(command, seconds=seconds)
            assert result.limit == limit, (command, result)
            await workspace.restore(saved)
            assert (await workspace.run("echo fine; ls")).stdout == "fine\n"
        await workspace.close()

    asyncio.run(work())


def test_judged_is_for_any_workspace(sandbox: LocalSandbox) -> None:
    async def work() -> Score:
        workspace = await sandbox.workspace({"answer.txt": "right"})
        assert isinstance(workspace, Workspace)
        found = await judged(workspace, Tests.of(CHECK))
        await workspace.close()
        return found

    assert asyncio.run(work()).value == 1.0
