"""The contract of sandboxes: SandboxFusion's `/run_code` as values, a `Program` in and a `Result` out.

`Success`, `Failed` and `SandboxError` mean what they mean there: the program ran and ended with 0; it failed (an error of
its own, a limit); the sandbox could not run it, which says nothing about the program. Beyond the service's reply a
`Result` has the limit that ended the program (`limit`) and whether its output was cut (`truncated`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from workbench.base import runtime
from workbench.base.errors import SettingError
from workbench.base.shown import plain

LANGUAGES = (
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
)  # fmt: skip
"""The languages of the contract; `languages` of a sandbox are those that it runs."""

MAX_SECONDS = 3600.0
"""Longest time limit of a program's phase."""
Status = Literal["Success", "Failed", "SandboxError"]
PhaseStatus = Literal["Finished", "Error", "TimeLimitExceeded"]
Limit = Literal["time", "memory", "output", "disk"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to run, with its input and limits.

    Raises `SettingError` for a language outside the contract, a file outside its folder, or a time limit that is not
    above 0 and at most `MAX_SECONDS`.

    Example:
        >>> sandbox.local().run(Program(code="print(input())", stdin="hello"))  # doctest: +SKIP
    """

    code: str
    language: str = "python"
    stdin: str | None = None
    """The program's standard input; None is empty."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path → content, written beside the program before it starts."""
    fetch_files: tuple[str, ...] = ()
    """Relative paths to bring back; missing ones are left out."""
    compile_timeout: float = 10.0
    """Seconds of wall time."""
    run_timeout: float = 10.0
    """Seconds of wall time."""
    memory_limit_mb: int = -1
    """MiB of memory that all its processes together may hold; -1 is the sandbox's own limit."""

    def __post_init__(self) -> None:
        if self.language not in LANGUAGES:
            raise SettingError("language of a program", expected=f"one of {', '.join(LANGUAGES)}", found=self.language)
        for name in ("compile_timeout", "run_timeout"):
            seconds = getattr(self, name)
            if not 0 < seconds <= MAX_SECONDS:
                raise SettingError(f"{name} of a program", expected=f"> 0, at most {MAX_SECONDS:g} s", found=seconds)
        for name in (*self.files, *self.fetch_files):
            checked(name, "file of a program")

    def to_request(self) -> dict[str, Any]:
        """Return the program as the JSON body of SandboxFusion's `POST /run_code`."""
        body = {**vars(self), "files": _in_base64(self.files), "fetch_files": list(self.fetch_files)}
        body["memory_limit_MB"] = body.pop("memory_limit_mb")
        return body

    @classmethod
    def from_request(cls, body: Mapping[str, Any]) -> Program:
        """Make a program from the JSON body of a `POST /run_code`. Raises `SettingError` for a bad one (HTTP 422)."""
        code, stdin = body.get("code"), body.get("stdin")
        if not isinstance(code, str):
            raise SettingError("'code' of a /run_code request", expected="text", found=type(code).__name__)
        if not isinstance(stdin, str | None):
            raise SettingError("'stdin' of a /run_code request", expected="text or null", found=type(stdin).__name__)
        try:
            texts = {str(name): text for name, text in (body.get("files") or {}).items() if text is not None}
            files = {name: base64.b64decode(text, validate=True) for name, text in texts.items()}
            wanted = tuple(map(str, body.get("fetch_files") or ()))
            limits: dict[str, Any] = {name: float(body.get(name, 10.0)) for name in ("compile_timeout", "run_timeout")}
            limits["memory_limit_mb"] = int(body.get("memory_limit_MB", -1))
            language = str(body.get("language"))
            return cls(code=code, language=language, stdin=stdin, files=files, fetch_files=wanted, **limits)
        except (TypeError, ValueError, AttributeError, binascii.Error) as cause:
            expected = "timeouts in seconds, an integer memory_limit_MB, files as {name: base64}, a list fetch_files"
            raise SettingError("fields of a /run_code request", expected=expected, found=cause) from cause


def checked(name: str, what: str = "file of a sandbox") -> PurePosixPath:
    """Return a file's name as a relative path. Raises `SettingError` for one that leads out of the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise SettingError(what, expected="a relative path inside its folder", found=repr(name))
    return path


def _in_base64(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(body).decode() for name, body in files.items()}


@dataclass(frozen=True, kw_only=True)
class ProcessOutcome:
    """The outcome of compiling or of running a program: one process that has ended."""

    status: PhaseStatus
    return_code: int | None = None
    """Exit code; None where the sandbox ended the process at the time limit."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    """Wall time of the process, in seconds."""
    limit: Limit | None = None
    """The limit that ended the process, or None."""
    truncated: bool = False
    """Whether output beyond the limit was dropped."""
    left_behind: bool = False
    """Whether a child process is still running (possible only without isolation)."""

    def to_reply(self) -> dict[str, Any]:
        """Return the phase as it stands in a `/run_code` reply."""
        kept = {name: getattr(self, name) for name in ("return_code", "stdout", "stderr")}
        return {"status": self.status, "execution_time": self.seconds, **kept}


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of running one program in a sandbox."""

    status: Status
    run: ProcessOutcome | None = None
    compile: ProcessOutcome | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    message: str = ""
    """Reason of a `SandboxError`; else empty."""
    where: str = ""
    """The tier of isolation that ran the program, or the address of the service."""

    @property
    def stdout(self) -> str:
        """The program's stdout; "" where it did not run."""
        return self.run.stdout if self.run else ""

    @property
    def limit(self) -> Limit | None:
        """The limit that the program met while compiling or running, or None."""
        return next((phase.limit for phase in (self.compile, self.run) if phase and phase.limit), None)

    @property
    def truncated(self) -> bool:
        """Whether output of the run was dropped, beyond the limit."""
        return bool(self.run and self.run.truncated)

    @property
    def why(self) -> str:
        """The outcome in one line: `ran`, the limit that was met, or the error."""
        if self.status == "SandboxError":
            return f"sandbox error: {self.message}"
        phase = self.run or self.compile
        place = "compiling" if self.run is None else "running"
        if phase is None:
            return self.status
        if phase.limit or phase.status == "TimeLimitExceeded":
            return f"{phase.limit or 'time'} limit while {place}"
        if phase.return_code:
            lines = phase.stderr.strip().splitlines() or [f"exit code {phase.return_code}"]
            # a traceback's last line says it; a compiler's first error
            line = next((line for line in lines if "error:" in line), lines[-1]) if self.run is None else lines[-1]
            return f"error while {place}: {line[:200]}"
        return "ran, with its output cut" if phase.truncated else "ran"

    def to_reply(self) -> dict[str, Any]:
        """Return the result as a reply of SandboxFusion's `/run_code`, with two keys more: `limit` and `truncated`."""
        return {
            "status": self.status,
            "message": self.message,
            "compile_result": self.compile.to_reply() if self.compile else None,
            "run_result": self.run.to_reply() if self.run else None,
            "executor_pod_name": None,
            "files": _in_base64(self.files),
            "limit": self.limit,
            "truncated": self.truncated,
        }

    def __str__(self) -> str:
        return f"{self.status}: {plain(self.why)}"

    def __repr__(self) -> str:
        phase = self.run or self.compile
        lines = [f"{self} ({self.where}{f', {phase.seconds:.3f} s' if phase else ''})"]
        if phase:
            printed = {"stdout": phase.stdout, "stderr": phase.stderr}
            lines += [f"--- {name}\n{_shortened(text)}" for name, text in printed.items() if text]
        if self.files:
            lines.append("files " + ", ".join(f"{name} ({len(body)} bytes)" for name, body in self.files.items()))
        return "\n".join(lines)


def _shortened(text: str, limit: int = 2000) -> str:
    """Shorten a text for a terminal: control characters become visible, the middle of a long text is left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n… {len(text) - limit} characters …\n{text[-limit // 2 :]}"
    return plain(text.rstrip("\n"))


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank."""
    return text.strip().rpartition("\n")[2]


def ran_out_of_memory(stderr: str) -> bool:
    """Return whether the stderr of a failed program says that memory ran out, in the words of Python or C++."""
    last = last_line(stderr)
    return last.startswith("MemoryError") or "std::bad_alloc" in last


def status_of(*phases: ProcessOutcome | None) -> Status:
    """Return the status by SandboxFusion's rule: any Error gives SandboxError, any time-out or non-zero exit code
    Failed, else Success.

    A program that met a limit other than that of its output has failed, whatever its exit code.
    """
    there = [phase for phase in phases if phase is not None]
    if any(phase.status == "Error" for phase in there):
        return "SandboxError"
    good = all(
        phase.status == "Finished" and phase.return_code == 0 and phase.limit in (None, "output") for phase in there
    )
    return "Success" if good else "Failed"


@runtime_checkable
class Sandbox(Protocol):
    """Protocol of sandboxes, which run programs. A sandbox never raises for what a program does."""

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that the sandbox can run."""

    async def execute(self, program: Program) -> Result:
        """Run one program; a call waits while the sandbox runs as many as it allows."""

    def describe(self) -> str:
        """Describe where programs run and how they are isolated, in one line."""


class SyncSandbox(Sandbox):
    """Base class of sandboxes that adds the synchronous `run` and `run_many` to the async `execute`."""

    def run(self, program: Program | str, **fields: Any) -> Result:
        """Run one program and wait for its result. A str is the program's code, and `fields` are the other fields of
        `Program`."""
        return self.run_many([program if isinstance(program, Program) else Program(code=program, **fields)])[0]

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        """Run programs side by side, as many at a time as the sandbox allows; return the results in order."""
        return runtime.run_all(self.execute, programs)


@runtime_checkable
class Workspace(Protocol):
    """Protocol of workspaces: file systems in which commands run one at a time. No process of a command outlives it.

    Each method raises `SandboxError` where the sandbox fails, never for what a command does.
    """

    async def run(
        self, command: str, *, seconds: float = 10.0, memory_mb: int = -1, environment: Mapping[str, str] | None = None
    ) -> Result:
        """Run a shell command in the working folder, with `seconds` of wall time and `memory_mb` MiB (-1: the sandbox's)."""

    async def write(self, files: Mapping[str, bytes | str]) -> None:
        """Write files (relative path → content) into the working folder, in place of whatever has their names."""

    async def read(self, name: str) -> bytes | None:
        """Read a file of the working folder; None where there is no plain file of this name."""

    async def snapshot(self) -> Any:
        """Save the file system as it is now; the snapshot is dropped when nothing refers to it any more."""

    async def restore(self, snapshot: Any) -> None:
        """Put the file system back as it was when `snapshot` was taken, in this workspace or in another of its sandbox."""

    async def copy(self) -> Workspace:
        """Make a second workspace with the same files."""

    async def close(self) -> None:
        """Remove the workspace; a second call does nothing."""


W = TypeVar("W", bound=Workspace)


async def opened(workspace: W, files: Mapping[str, bytes | str] | None) -> W:
    """Write the first files into a new workspace and return it; where that fails it is closed."""
    try:
        await workspace.write(files or {})
    except BaseException:
        await workspace.close()
        raise
    return workspace


@runtime_checkable
class Workspaces(Protocol):
    """Protocol of sandboxes that can open workspaces: `LocalSandbox` and `Containers`."""

    async def workspace(self, files: Mapping[str, bytes | str] | None = None, *, image: str | None = None) -> Workspace:
        """Open a workspace with these files (relative path → content), in the container image `image` if one is given."""
