"""`python`: the model's code, run in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workbench.agents.tools.base import BaseTool, Executed, answered, broken
from workbench.config import require
from workbench.errors import first_line
from workbench.rewards.score import Status
from workbench.sandbox.protocol import Program, Result, Sandbox

NOTHING = "(no output; print what you want to see)"


class PythonTool(BaseTool):
    """`PythonTool(sandbox)`: runs a program in a fresh process of the sandbox and answers with its stdout and stderr.

    `config`: `timeout` (or verl's `default_timeout`), seconds of wall time for a program, 10; `memory_limit_mb`, the
    sandbox's own where it is not given; `language` (`default_language`), python. The time limit is the program's own, and
    counts from its start: waiting for a place in the sandbox does not use it up.

    The record has `ran` (it ended with exit code 0), `seconds`, `limit` (which one it met) and `truncated`. A program that
    fails is an answer like any other, of which `status` says *model failed*. A sandbox that could not run it is *machinery
    failed*, and says nothing about the model. No step has a reward of its own, as in verl.
    """

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {"code": {"type": "string", "description": "The program; print what you want to see"}},
    }

    def __init__(
        self, sandbox: Sandbox, config: Mapping[str, Any] | None = None, tool_schema: Any = None, **settings: Any
    ) -> None:
        super().__init__({**(config or {}), **settings}, tool_schema)
        self.sandbox = sandbox
        self.timeout = float(self.config.get("timeout", self.config.get("default_timeout", 10.0)))
        self.language = str(self.config.get("language", self.config.get("default_language", "python")))
        self.memory_limit_mb = int(self.config.get("memory_limit_mb", -1))
        require(self.timeout > 0, "timeout", expected="seconds > 0", found=self.timeout)
        require(self.language in sandbox.languages, "language", expected=sandbox.languages, found=self.language)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """What the program printed."""
        if wrong := self.refusal(parameters):
            return wrong
        program = Program(
            code=parameters["code"],
            language=self.language,
            run_timeout=self.timeout,
            memory_limit_mb=self.memory_limit_mb,
        )
        try:
            result = await self.sandbox.execute(program)
        except Exception as cause:  # noqa: BLE001 - a sandbox of anybody's; the record says what it raised
            result = Result(status="SandboxError", message=first_line(cause))
        if result.status == "SandboxError":
            return broken("Error: the program could not be run here. This was not its fault.", result.why, ran=False)
        return _told(result, self.timeout)


def _told(result: Result, seconds: float) -> Executed:
    phase = result.run or result.compile
    printed = (phase.stdout + phase.stderr) if phase else ""
    if result.limit or (phase and phase.status == "TimeLimitExceeded"):
        ended = f"[ended: {result.why}{f' ({seconds:g} s)' if result.limit in (None, 'time') else ''}]"
        printed = f"{printed.rstrip()}\n{ended}" if printed.strip() else ended
    good = result.status == "Success"
    record = {
        "status": (Status.SCORED if good else Status.MODEL_FAILED).value,
        "why": result.why,
        "ran": good,
        "seconds": phase.seconds if phase else 0.0,
        "limit": result.limit,
        "truncated": result.truncated,
    }
    return answered(printed if printed.strip() else NOTHING, None, **record)
