"""The tool `terminal`: shell commands in a file system of the episode's own, and tests of what the episode left there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from workbench.agents.protocol import ToolResponse
from workbench.agents.tools.base import BaseTool, Executed, broken, refused
from workbench.base.config import require
from workbench.base.errors import DataError, SandboxError, SettingError, describe, first_line
from workbench.base.shown import encodable
from workbench.datasets.files import read
from workbench.rewards.score import Score, Status
from workbench.sandbox.protocol import Result, Workspace, Workspaces

MAX_COMMAND = 100_000
"""Longest command, in characters: the system accepts no longer argument."""
_SHOWN = 10
"""Failed tests that a score names."""
_QUIET = {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}
"""Environment variables of the tests: settings that the episode left in its home folder have no effect on them."""
_OF_TESTS = ("files", "command", "fail_to_pass", "pass_to_pass", "seconds")


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The tests that judge an episode's file system. Raises `DataError` for fields that cannot be tests."""

    __test__: ClassVar[bool] = False  # pytest takes classes of this name for its own

    command: str
    """A shell command that exits with 0 where the tests pass; `{test}` in it stands for a test's name."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Relative path → content, written over what the episode left."""
    fail_to_pass: Sequence[str] = ()
    """Names of tests that the task makes pass."""
    pass_to_pass: Sequence[str] = ()
    """Names of tests that passed before the episode, and must still pass."""
    seconds: float = 60.0
    """Limit of the wall time of all tests together, in seconds."""

    def __post_init__(self) -> None:
        named = [*self.fail_to_pass, *self.pass_to_pass]
        if not isinstance(self.command, str) or not self.command.strip():
            raise DataError("command of tests", expected="a shell command", found=describe(self.command))
        if bool(named) != ("{test}" in self.command):
            expected = "one with {test}, which stands for each test's name" if named else "one without {test}"
            raise DataError("command of tests", expected=expected, found=self.command)
        if not self.seconds > 0:
            raise DataError("seconds of tests", expected="> 0", found=self.seconds)

    @classmethod
    def of(cls, given: Any) -> Tests:
        """Make tests from a mapping of these fields, or from its JSON text."""
        record = from_json(given)
        if not isinstance(record, Mapping) or not set(record) <= set(_OF_TESTS) or "command" not in record:
            expected = f"a mapping with {', '.join(_OF_TESTS)}"
            raise DataError("tests of a terminal", expected=expected, found=describe(record))
        kept = {key: value for key, value in record.items() if value is not None}
        for key in ("fail_to_pass", "pass_to_pass"):
            kept[key] = tuple(map(str, from_json(kept.get(key)) or ()))
        return cls(**{**kept, "files": files_of(kept.get("files"))})


class Terminal(BaseTool):
    """Tool `terminal`: runs shell commands in the episode's own file system; the row's tests judge what it left there.

    Each call is a new shell in the working folder: files stay from call to call, processes and variables do not. The model
    reads stdout and stderr as they came, and the exit code where it is not 0. There is no network. A call's record has
    `exit_code`, `seconds`, `limit` (which one it met) and `truncated`; a call has no reward of its own.

    `calc_reward` lays the row's hidden tests over a copy of the episode's files, runs them, and returns a `Score`
    (`rewards.episodes.by_tool` makes it the row's reward): 1 where all pass, else 0, with the parts `fail_to_pass` and
    `pass_to_pass` (the share that passes) where tests have names. Tests beyond their time are *timeout*, beyond another limit
    *crashed*; where the sandbox fails it is *infra_error*. A test is believed by its exit code: one that imports the episode's
    code should run it as a program, because imported code can end the test with 0.

    A row's `create_kwargs` are the same as `config`, and go before it; mappings may be JSON texts, as parquet needs them.

    Args:
        sandbox: `sandbox.local()`, or `sandbox.container()` for rows with an image.
        config: `files` (relative path → content) that an episode begins with; `setup`, a command that is run first; `image`;
            `tests` (see `Tests`); `timeout`, seconds of wall time of a command, 10 by default; `memory_limit_mb`, by default
            the sandbox's own.
        tool_schema: a schema in place of `SCHEMA`.
        settings: keys of `config`, as keyword arguments.
    """

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "terminal",
        "description": "Runs a shell command in your working folder, without network. Files stay from call to call.",
        "parameters": {"command": {"type": "string", "description": "The command, for bash"}},
    }
    seconds_per_call: ClassVar[float | None] = None
    """None: the agent's limit per call does not apply, as a command has its `timeout` and may wait for a free place."""

    def __init__(
        self, sandbox: Workspaces, config: Mapping[str, Any] | None = None, tool_schema: Any = None, **settings: Any
    ) -> None:
        super().__init__({**(config or {}), **settings}, tool_schema)
        if not callable(getattr(sandbox, "workspace", None)):
            do = "use sandbox.local() or sandbox.container()"
            raise SettingError(f"sandbox of tool {self.name!r}", expected="one with workspaces", found=sandbox, do=do)
        self.sandbox = sandbox
        self.timeout = float(self.config.get("timeout", 10.0))
        self.memory_limit_mb = int(self.config.get("memory_limit_mb", -1))
        require(self.timeout > 0, f"timeout of tool {self.name!r}", expected="seconds > 0", found=self.timeout)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Open the episode's file system. Raises `DataError` for bad arguments, `SandboxError` where it cannot be opened."""
        instance_id, response = await super().create(instance_id, **kwargs)
        settings = {**self.config, **self.instances.pop(instance_id)}
        tests = None if settings.get("tests") is None else Tests.of(settings["tests"])
        workspace = await self.sandbox.workspace(files_of(settings.get("files")), image=settings.get("image"))
        if setup := settings.get("setup"):
            result = await workspace.run(setup, seconds=max(self.timeout, 60.0))
            if result.status != "Success":
                await workspace.close()
                raise SandboxError(f"setup of tool {self.name!r}", expected="a command that succeeds", found=result.why)
        self.instances[instance_id] = {"workspace": workspace, "tests": tests}
        return instance_id, response

    def workspace(self, instance_id: str) -> Workspace:
        """Return the file system of the episode `instance_id`."""
        return self.instances[instance_id]["workspace"]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Run the command `parameters["command"]`; the model reads its output and exit code."""
        if wrong := self.refusal(parameters):
            return wrong
        command = encodable(parameters["command"])
        if "\0" in command or len(command) > MAX_COMMAND:
            return refused(f"Error: a command has at most {MAX_COMMAND} characters, and no NUL; write files in parts")
        limits: dict[str, Any] = {"seconds": self.timeout, "memory_mb": self.memory_limit_mb}
        try:
            result = await self.workspace(instance_id).run(f"exec 2>&1\n{command}", **limits)
        except SandboxError as cause:
            result = Result(status="SandboxError", message=first_line(cause))
        if result.status == "SandboxError" or result.run is None:
            return broken("Error: the command could not be run here. This was not its fault.", result.why)
        return self._answer(result)

    def _answer(self, result: Result) -> Executed:
        ran = result.run
        assert ran is not None
        printed = (ran.stdout + ran.stderr).rstrip()
        ended = f"[exit code {ran.return_code}]" if ran.return_code else ""
        if ran.limit not in (None, "output") or ran.return_code is None:
            ended = f"[ended: {ran.limit or 'time'} limit{f' ({self.timeout:g} s)' if ran.limit == 'time' else ''}]"
        text = "\n".join(filter(None, (printed, ended))) or "(no output)"
        status = {"time": Status.TIMEOUT, "memory": Status.CRASHED, "disk": Status.CRASHED}.get(
            ran.limit or "", Status.SCORED
        )
        record = {"exit_code": ran.return_code, "limit": ran.limit, "truncated": ran.truncated, "seconds": ran.seconds}
        why = {} if status is Status.SCORED else {"why": result.why}
        return ToolResponse(text=text), None, {"status": status.value, **record, **why}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Score | float:  # type: ignore[override]
        """Run the row's tests on a copy of the episode's files as they are now, and return their score; 0.0 where the
        row has no tests."""
        state = self.instances.get(instance_id)
        if state is None or state["tests"] is None:
            return 0.0
        try:
            copy = await state["workspace"].copy()
            try:
                return await judged(copy, state["tests"])
            finally:
                await copy.close()
        except SandboxError as cause:
            return Score(status=Status.INFRA_ERROR, why=f"the tests could not be run: {first_line(cause)}")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Remove the episode's file system; a second call does nothing."""
        if state := self.instances.pop(instance_id, None):
            await state["workspace"].close()

    async def snapshot(self, instance_id: str) -> Any:
        """Save the episode's file system; `restore` puts it back."""
        return await self.workspace(instance_id).snapshot()

    async def restore(self, instance_id: str, snapshot: Any) -> None:
        """Put the episode's file system back as it was when `snapshot` was taken, in this episode or another."""
        await self.workspace(instance_id).restore(snapshot)


async def judged(workspace: Workspace, tests: Tests) -> Score:
    """Write the tests' files over a workspace's files and run the tests. Raises `SandboxError` where the sandbox fails."""
    await workspace.write(tests.files)
    ran: dict[str, Result] = {}
    used = 0.0  # without the time that they wait for their turn
    for name in dict.fromkeys([*tests.fail_to_pass, *tests.pass_to_pass] or [""]):
        if used >= tests.seconds:
            break
        command = tests.command.replace("{test}", shlex.quote(name)) if name else tests.command
        ran[name] = await workspace.run(command, seconds=tests.seconds - used, environment=_QUIET)
        used += phase.seconds if (phase := ran[name].run) else 0.0
        if ran[name].status == "SandboxError":
            raise SandboxError(ran[name].message or "the sandbox could not run the tests of a terminal")
    return _score_of_tests(tests, ran, used)


def _score_of_tests(tests: Tests, ran: Mapping[str, Result], seconds: float) -> Score:
    """Make the score of the tests that ran (name → result); tests that did not run had no time left."""
    failed = {name: result for name, result in ran.items() if result.status != "Success"}
    passed = ran.keys() - failed.keys()
    kinds = {"fail_to_pass": tests.fail_to_pass, "pass_to_pass": tests.pass_to_pass}
    parts = {kind: sum(test in passed for test in names) / len(names) for kind, names in kinds.items() if names}
    count = len({*tests.fail_to_pass, *tests.pass_to_pass}) or 1
    facts: dict[str, Any] = {"parts": parts, "seconds": seconds}
    if len(ran) < count or any(one.limit == "time" for one in failed.values()):
        return Score(status=Status.TIMEOUT, why=f"the tests took more than {tests.seconds:g} s", **facts)
    if not failed:
        return Score(value=1.0, why="all tests pass" if parts else "the test passes", **facts)
    last = list(failed.values())[-1]
    what = f"{len(failed)} of {count} tests fail ({_failed_names(failed)}): " if parts else ""
    status = Status.SCORED if last.limit in (None, "output") else Status.CRASHED
    return Score(status=status, why=f"{what}{_exit(last)}", **facts)


def _failed_names(failed: Mapping[str, Any]) -> str:
    more = f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
    return ", ".join(list(failed)[:_SHOWN]) + more


def _exit(result: Result) -> str:
    """Describe how a test failed, in one line."""
    if result.limit or (result.run and result.run.stderr.strip()):
        return result.why.removeprefix("error while running: ")
    lines = (result.run.stdout if result.run else "").strip().splitlines()
    code = f"exit code {result.run.return_code if result.run else None}"
    return f"{lines[-1][:200]} ({code})" if lines else code


# --- rows ---------------------------------------------------------------------------------------

_INSTRUCTION = ("instruction", "problem_statement", "prompt", "question", "task")
_NAME = ("instance_id", "task_id", "id", "name")
_IMAGE = ("image", "docker_image", "image_name")
_TEST_COMMAND = ("test_command", "test_cmd")


def terminal_rows(
    tasks: Iterable[Mapping[str, Any]] | str | Path,
    *,
    tool: str = "terminal",
    system: str = "",
    agent_name: str = "tool_agent",
    data_source: str = "workbench/terminal",
) -> list[dict[str, Any]]:
    """Make rows in verl's schema for `Terminal`, from tasks with the field names of SWE-bench or of terminal tasks.

    A task has `instruction` (`problem_statement`), what its folder begins with (`files`: relative path → content;
    `image`; `setup`), and tests: `test_command` (`test_cmd`), `test_files`, `FAIL_TO_PASS`, `PASS_TO_PASS`,
    `test_seconds`; also an `instance_id` (`task_id`). Only the tool gets the tests; no prompt has them. Mappings and
    lists may be JSON texts.

    Args:
        tasks: the tasks, or a jsonl or parquet file of them.
        tool: the name of the `Terminal` of the agent.
        system: a system message before the instruction; empty: none.
        agent_name: the rows' `agent_name`.
        data_source: the rows' `data_source`.

    Raises `DataError`, which names the task, for one without instruction or tests, and for tests that are a patch.
    """
    rows = []
    for index, task in enumerate(read(Path(tasks)) if isinstance(tasks, str | Path) else tasks):
        name = str(_first_of(task, _NAME) or index)
        try:
            instruction, kwargs = _first_of(task, _INSTRUCTION), _create_kwargs(task)
            if not isinstance(instruction, str) or not instruction.strip():
                expected = f"a text as one of {', '.join(_INSTRUCTION)}"
                raise DataError("instruction of a terminal task", expected=expected, found=describe(instruction))
        except DataError as error:
            raise DataError(f"task {name!r}: {error}") from error
        chat = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": instruction}]
        extra = {"index": index, "need_tools_kwargs": True, "tools_kwargs": {tool: {"create_kwargs": kwargs}}}
        truth = {"style": "rule", "ground_truth": name}
        kept = {"data_source": data_source, "prompt": chat, "reward_model": truth, "extra_info": extra}
        rows.append({**kept, "agent_name": agent_name})
    return rows


def _create_kwargs(task: Mapping[str, Any]) -> dict[str, str]:
    """Make a task's `create_kwargs`; mappings become JSON texts, because those of different tasks have different keys."""
    files, command = files_of(task.get("files")), _first_of(task, _TEST_COMMAND)
    if task.get("test_patch") and not task.get("test_files"):
        do = "apply it to the repository, and give the files that it changes as test_files"
        what, expected = "tests of a terminal task", "test_files: relative path → content"
        raise DataError(what, expected=expected, found="a patch, test_patch", do=do)
    if command is None:
        expected = f"a shell command as one of {', '.join(_TEST_COMMAND)}"
        raise DataError("tests of a terminal task", expected=expected, found=sorted(map(str, task)))
    tests = {"command": command, "files": files_of(task.get("test_files")), "seconds": task.get("test_seconds")}
    tests |= {"fail_to_pass": _listed_tests(task, "fail_to_pass"), "pass_to_pass": _listed_tests(task, "pass_to_pass")}
    kept = {key: value for key, value in tests.items() if value}
    Tests.of(kept)
    fields = {
        "files": json.dumps(files),
        "tests": json.dumps(kept),
        "image": _first_of(task, _IMAGE),
        "setup": task.get("setup"),
    }
    return {key: value for key, value in fields.items() if value is not None}


def _listed_tests(task: Mapping[str, Any], name: str) -> list[str]:
    return list(map(str, from_json(task.get(name.upper(), task.get(name))) or ()))


def _first_of(task: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((task[name] for name in names if task.get(name) is not None), None)


def from_json(value: Any) -> Any:
    """Read a JSON text; return any other value unchanged. Raises `DataError` for a text that is no JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as cause:
        raise DataError("the text of a terminal task's field", expected="JSON", found=value[:100]) from cause


def files_of(value: Any) -> dict[str, str]:
    """Read files as relative path → text, from a mapping (keys whose value is None are left out) or its JSON text."""
    files = from_json(value) or {}
    if not isinstance(files, Mapping) or not all(isinstance(one, str | None) for one in files.values()):
        raise DataError("files of a terminal", expected="relative path → text", found=describe(files))
    return {str(name): text for name, text in files.items() if text is not None}
