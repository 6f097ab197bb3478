"""SandboxFusion's `/run_code` over HTTP: `RemoteSandbox`, a client, and `serve`, which puts any sandbox behind the same API.

The client retries with jitter, within a deadline, and never sends more requests at once than allowed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from workbench.base import runtime
from workbench.base.errors import SettingError, first_line
from workbench.base.http import Client, Refused, Unreachable
from workbench.base.loopback import WORKING, HttpRequest, from_another_user, serving
from workbench.base.shown import bare_url
from workbench.sandbox.protocol import (
    LANGUAGES,
    Limit,
    ProcessOutcome,
    Program,
    Result,
    Sandbox,
    SyncSandbox,
    ran_out_of_memory,
)

INTERPRETERS: Mapping[str, tuple[str, ...]] = {
    "go": ("go",), "go_test": ("go",), "nodejs": ("node",), "jest": ("npx", "node"), "typescript": ("tsx", "ts-node", "npx"),
    "java": ("java",), "junit": ("java",), "php": ("php",), "csharp": ("dotnet", "mono"), "rust": ("cargo",),
    "lua": ("lua",), "R": ("Rscript",), "perl": ("perl",), "ruby": ("ruby",), "scala": ("scala",), "julia": ("julia",),
    "kotlin_script": ("kotlin", "kotlinc"), "verilog": ("vvp",), "lean": ("lean", "lake"), "swift": ("swift",),
    "racket": ("racket",), "sql": ("sqlite3",), "D_ut": ("rdmd", "dub"),
}  # fmt: skip
"""Language → interpreters and compilers whose absence is recognised in the shell's output. Python is left out: a
program could print such a message."""
_NOT_FOUND = re.compile(r"(?:/bin/)?(?:ba|da)?sh: (?:(?:line )?\d+: )?(?:exec: )?([\w+./-]+): (?:command )?not found")
CUT = 219_000
"""Output of at least this many characters counts as cut: the service cuts at 219,264 characters and does not report it.
"""


class RemoteSandbox(SyncSandbox):
    """`sandbox.remote(url)`: runs programs at a SandboxFusion service.

    Connection errors, time-outs, 429, 5xx and malformed replies are tried again, up to `attempts` times and `deadline`
    seconds per program, with growing, jittered waits (`Retry-After` is honoured). A call that still fails gives a
    result of status `SandboxError`, which says nothing about the program. `max_concurrent` limits the requests of this
    process.
    """

    languages = LANGUAGES

    def __init__(
        self,
        url: str,
        *,
        max_concurrent: int = 64,
        memory_limit_mb: int = 1024,
        attempts: int = 5,
        deadline: float = 300.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        what, do = "the sandbox service's URL (sandbox_fusion.url)", 'pass the key by headers={"Authorization": …}'
        # verl's scripts give URLs that end in /run_code, SandboxFusion's own settings do not
        self.url = bare_url(url, what, do, "http(s)://host/run_code").rstrip("/").removesuffix("/run_code")
        self.memory_limit_mb = memory_limit_mb
        self.max_concurrent = max_concurrent
        self._client = Client(attempts=attempts, deadline=deadline, max_concurrent=max_concurrent, headers=headers)

    def describe(self) -> str:
        """Describe the service's host and the limit of requests at a time in one line."""
        return f"remote sandbox {urlsplit(self.url).netloc}, {self.max_concurrent} at a time"

    def __repr__(self) -> str:
        return f"RemoteSandbox({self.url!r}, max_concurrent={self.max_concurrent})"

    def ping(self) -> bool:
        """Return whether the service answers within 10 seconds."""
        try:
            return runtime.run(self._client.get(f"{self.url}/v1/ping", timeout=10.0)) == "pong"
        except (Unreachable, Refused):
            return False

    async def execute(self, program: Program) -> Result:
        """Run one program at the service. If the service fails, the result has status `SandboxError`."""
        if program.memory_limit_mb <= 0:
            program = replace(program, memory_limit_mb=self.memory_limit_mb)
        seconds = program.compile_timeout + program.run_timeout + 10.0
        body = program.to_request()
        try:
            result = await self._client.post(f"{self.url}/run_code", body, timeout=seconds, read=read_reply)
        except (Unreachable, Refused) as error:
            result = Result(status="SandboxError", message=first_line(error))
        tool = missing_tool(result, program.language)
        if tool:
            result = Result(
                status="SandboxError", message=f"the service cannot run {program.language}: it has no {tool}"
            )
        return replace(result, where=urlsplit(self.url).netloc)


def missing_tool(result: Result, language: str) -> str:
    """Return the compiler or interpreter that the service's shell did not find, as this says nothing about the program;
    else "".

    A program's own output is not believed: in the run of an interpreted language only the name of its interpreter
    counts.
    """
    phase = result.compile if result.run is None else result.run
    if phase is None or phase.return_code != 127 or phase.stdout:
        return ""
    match = _NOT_FOUND.fullmatch(phase.stderr.strip())
    name = match[1].rsplit("/", 1)[-1] if match else ""
    return name if result.run is None or name in INTERPRETERS.get(language, ()) else ""


def read_reply(reply: Any) -> Result:
    """Convert a decoded JSON reply of `/run_code` to a `Result`. Raises `ValueError` for what is no such reply."""
    if not isinstance(reply, Mapping) or reply.get("status") not in ("Success", "Failed", "SandboxError"):
        raise ValueError(f"the service's answer is not a /run_code reply: {json.dumps(reply)[:200]}")
    files = {str(name): base64.b64decode(text) for name, text in (reply.get("files") or {}).items()}
    built, ran = (_phase(reply.get(f"{one}_result"), bool(reply.get("truncated"))) for one in ("compile", "run"))
    message = str(reply.get("message") or "")
    return Result(status=reply["status"], compile=built, run=ran, files=files, message=message)


def _phase(record: Any, cut: bool) -> ProcessOutcome | None:
    if record is None:
        return None
    status, code, seconds = record.get("status"), record.get("return_code"), float(record.get("execution_time") or 0.0)
    if status not in ("Finished", "Error", "TimeLimitExceeded"):
        raise ValueError(f"status {status!r} in a /run_code reply; expected Finished, Error or TimeLimitExceeded")
    out, err = str(record.get("stdout") or ""), str(record.get("stderr") or "")
    truncated = cut or len(out) >= CUT or len(err) >= CUT
    limit: Limit | None = "output" if truncated else None
    if status == "TimeLimitExceeded":
        limit = "time"
    elif code and ran_out_of_memory(err):
        limit = "memory"
    output: dict[str, Any] = {"stdout": out, "stderr": err, "limit": limit, "truncated": truncated}
    return ProcessOutcome(status=status, return_code=code, seconds=seconds, **output)


# --- the server -----------------------------------------------------------------------------------


def answer(sandbox: Sandbox, body: bytes) -> tuple[int, dict[str, Any]]:
    """Run the program in the body of a `POST /run_code`; returns (HTTP status, reply); the status is 200, or 422 for a
    bad request.
    """
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            raise SettingError("a /run_code request", expected="a JSON object", found=type(request).__name__)
        program = Program.from_request(request)
    except (ValueError, RecursionError) as error:
        return 422, {"detail": [{"type": "invalid", "loc": ["body"], "msg": str(error)}]}
    return 200, runtime.run(sandbox.execute(program)).to_reply()


@contextmanager
def serve(sandbox: Sandbox, *, port: int = 0) -> Iterator[str]:
    """Context manager: serves `/run_code` and `/v1/ping` at 127.0.0.1 while the block runs, and yields the URL.

    Who can reach it, and which requests are refused: see `base.loopback.serving`.
    """

    def answered(request: HttpRequest) -> tuple[int, Any]:
        if request.method == "GET":
            return (200, "pong") if request.path == "/v1/ping" else (404, {"detail": "Not Found"})
        if request.path != "/run_code":
            return 404, {"detail": f"no such path: {request.path[:100]!r}; expected /run_code"}
        return answer(sandbox, request.body)

    limits: Any = {"guard": from_another_user, "connections": WORKING}
    with serving(answered, name="workbench-sandbox", port=port, **limits) as address:
        yield f"http://{address}"
