"""One contract for running a program that nobody trusts: SandboxFusion's `/run_code`, as values.

A `Program` is what is asked, a `Result` what came back. `Success`, `Failed` and `SandboxError` mean what
they mean there: the program ran and ended with 0; it did not (an error of its own, a limit); *we* could
not run it, and nothing is said about the program. What the service keeps silent about is said here:
which limit ended the program (`limit`) and whether its output was cut (`truncated`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol, runtime_checkable

from workbench import background
from workbench.errors import SettingError, message

LANGUAGES = (
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
)  # fmt: skip
"""The languages of the contract; which of them a sandbox runs, its `languages` says."""

Status = Literal["Success", "Failed", "SandboxError"]
PhaseStatus = Literal["Finished", "Error", "TimeLimitExceeded"]
Limit = Literal["time", "memory", "output", "disk"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is to be run. Raises `SettingError` for a language outside the contract or a file outside its folder."""

    code: str
    language: str = "python"
    stdin: str | None = None
    """What it reads; None is an empty input."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path → content, written beside the program before it starts."""
    fetch_files: tuple[str, ...] = ()
    """Relative paths to bring back; missing ones are left out."""
    compile_timeout: float = 10.0
    """Seconds of wall time."""
    run_timeout: float = 10.0
    """Seconds of wall time."""
    memory_limit_mb: int = -1
    """Address space of a process in MiB; -1 is the sandbox's own limit."""

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise SettingError(message("language", expected=f"one of {', '.join(LANGUAGES)}", found=self.language))
        for name in (*self.files, *self.fetch_files):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise SettingError(message("a file of a program", expected="a path inside its folder", found=name))

    def to_request(self) -> dict[str, Any]:
        """The body of `POST /run_code`."""
        return {
            "code": self.code,
            "language": self.language,
            "stdin": self.stdin,
            "files": {name: base64.b64encode(body).decode() for name, body in self.files.items()},
            "fetch_files": list(self.fetch_files),
            "compile_timeout": self.compile_timeout,
            "run_timeout": self.run_timeout,
            "memory_limit_MB": self.memory_limit_mb,
        }

    @classmethod
    def from_request(cls, body: Mapping[str, Any]) -> Program:
        """The reverse of `to_request`. Raises `SettingError` for what the service would answer with 422."""
        code = body.get("code")
        if not isinstance(code, str):
            raise SettingError(message("'code'", expected="text", found=type(code).__name__))
        stdin = body.get("stdin")
        if stdin is not None and not isinstance(stdin, str):
            raise SettingError(message("'stdin'", expected="text or null", found=type(stdin).__name__))
        try:
            files = {
                str(name): base64.b64decode(text, validate=True)
                for name, text in (body.get("files") or {}).items()
                if text is not None
            }
            return cls(
                code=code,
                language=str(body.get("language")),
                stdin=stdin,
                files=files,
                fetch_files=tuple(str(name) for name in body.get("fetch_files") or ()),
                compile_timeout=float(body.get("compile_timeout", 10.0)),
                run_timeout=float(body.get("run_timeout", 10.0)),
                memory_limit_mb=int(body.get("memory_limit_MB", -1)),
            )
        except (TypeError, ValueError, AttributeError, binascii.Error) as cause:
            raise SettingError(message("a /run_code request", found=cause)) from cause


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Compiling or running: one process that ended, or was ended."""

    status: PhaseStatus
    return_code: int | None = None
    """None where it was ended by us."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    """Wall time."""
    limit: Limit | None = None
    """Which limit it met."""
    truncated: bool = False
    """Whether output is missing."""
    left_behind: bool = False
    """Whether something that it started lives on (without isolation alone)."""

    def to_reply(self) -> dict[str, Any]:
        """As it stands in a `/run_code` reply."""
        return {
            "status": self.status,
            "execution_time": self.seconds,
            "return_code": self.return_code,
            "stdout": self.stdout,
            "stderr": self.stderr,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What came back for one program."""

    status: Status
    run: Phase | None = None
    compile: Phase | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    message: str = ""
    """Why, where it is a `SandboxError`."""
    where: str = ""
    """The tier of isolation, or the service."""

    @property
    def stdout(self) -> str:
        """What the program printed; empty where it did not run."""
        return self.run.stdout if self.run else ""

    @property
    def limit(self) -> Limit | None:
        """Which limit ended it, in either phase."""
        return next((phase.limit for phase in (self.compile, self.run) if phase and phase.limit), None)

    @property
    def truncated(self) -> bool:
        """Whether output of the run is missing."""
        return bool(self.run and self.run.truncated)

    @property
    def why(self) -> str:
        """One line: what happened."""
        if self.status == "SandboxError":
            return f"sandbox error: {self.message}"
        phase = self.run or self.compile
        place = "compiling" if self.run is None else "running"
        if phase is None:
            return self.status
        if phase.limit:
            return f"{phase.limit} limit while {place}"
        if phase.status == "TimeLimitExceeded":
            return f"time limit while {place}"
        if phase.return_code:
            lines = phase.stderr.strip().splitlines() or [f"exit code {phase.return_code}"]
            # a traceback's last line says it; a compiler's first error
            told = next((line for line in lines if "error:" in line), lines[-1]) if self.run is None else lines[-1]
            return f"error while {place}: {told[:200]}"
        return "ran, with its output cut" if phase.truncated else "ran"

    def to_reply(self) -> dict[str, Any]:
        """The service's reply, with our additions under names that it does not use."""
        return {
            "status": self.status,
            "message": self.message,
            "compile_result": self.compile.to_reply() if self.compile else None,
            "run_result": self.run.to_reply() if self.run else None,
            "executor_pod_name": None,
            "files": {name: base64.b64encode(body).decode() for name, body in self.files.items()},
            "limit": self.limit,
            "truncated": self.truncated,
        }

    def __str__(self) -> str:
        return f"{self.status}: {self.why}"

    def __repr__(self) -> str:
        phase = self.run or self.compile
        lines = [f"{self} ({self.where}{f', {phase.seconds:.3f} s' if phase else ''})"]
        if phase:
            told = (("stdout", phase.stdout), ("stderr", phase.stderr))
            lines += [f"--- {name}\n{_shortened(text)}" for name, text in told if text]
        if self.files:
            lines.append("files " + ", ".join(f"{name} ({len(body)} bytes)" for name, body in self.files.items()))
        return "\n".join(lines)


def _shortened(text: str, limit: int = 2000) -> str:
    """For a terminal: control characters made visible, the middle of long output left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n… {len(text) - limit} characters …\n{text[-limit // 2 :]}"
    shown = (letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text.rstrip("\n"))
    return "".join(shown)


def status_of(*phases: Phase | None) -> Status:
    """The service's rule: any Error is a SandboxError, any time-out or non-zero code Failed, else Success."""
    there = [phase for phase in phases if phase is not None]
    if any(phase.status == "Error" for phase in there):
        return "SandboxError"
    good = all(phase.status == "Finished" and phase.return_code == 0 for phase in there)
    return "Success" if good else "Failed"


@runtime_checkable
class Sandbox(Protocol):
    """Runs programs. It never raises for what a program does."""

    @property
    def languages(self) -> tuple[str, ...]:
        """What it can run."""

    async def execute(self, program: Program) -> Result:
        """Run one program; as many at a time as the sandbox allows."""

    def describe(self) -> str:
        """Where it runs and how it is isolated, in a line."""


class SyncDoors:
    """`run` and `run_many` for whatever has `execute`."""

    async def execute(self, program: Program) -> Result:
        """Run one program."""
        raise NotImplementedError

    def run(self, program: Program | str, **fields: Any) -> Result:
        """Run one program and wait. Text is the code, `fields` the rest of a `Program`."""
        return self.run_many([program if isinstance(program, Program) else Program(code=program, **fields)])[0]

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        """Run programs side by side, as many as the sandbox allows; results in order."""

        async def together() -> list[Result]:
            return list(await asyncio.gather(*(self.execute(program) for program in programs)))

        return background.run(together())
