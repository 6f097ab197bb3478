"""A SandboxFusion service over HTTP: retried with jitter, within a deadline, never more at once than allowed."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from workbench import background
from workbench.config import require
from workbench.errors import first_line
from workbench.http_client import Client, Refused, Unreachable
from workbench.sandbox.protocol import LANGUAGES, Phase, Program, Result, SyncDoors

CUT = 219_000
"""The service cuts longer output silently, at 219,264 characters; so much of it is taken as cut."""


class RemoteSandbox(SyncDoors):
    """`sandbox.remote(url)`: the same contract at a service.

    Connection errors, time-outs, 429, 5xx and replies that are no reply are tried again, up to `attempts`
    times and `deadline` seconds a program, with growing, jittered waits (`Retry-After` is honoured). What
    still fails is a `SandboxError`, never a verdict on the program. `max_concurrent` holds for this process.
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
        parts = urlsplit(url)
        require(
            parts.scheme in ("http", "https") and bool(parts.netloc),
            "sandbox_fusion.url",
            expected="http(s)://host/run_code",
            found=url,
        )
        # the seed's URLs end in /run_code, SandboxFusion's own settings do not
        path = parts.path.rstrip("/").removesuffix("/run_code")
        self.url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self.memory_limit_mb = memory_limit_mb
        self.max_concurrent = max_concurrent
        self._client = Client(attempts=attempts, deadline=deadline, max_concurrent=max_concurrent, headers=headers)

    def describe(self) -> str:
        """Which service, and how many requests at a time."""
        return f"remote sandbox {urlsplit(self.url).netloc}, {self.max_concurrent} at a time"

    def __repr__(self) -> str:
        return f"RemoteSandbox({self.url!r}, max_concurrent={self.max_concurrent})"

    def ping(self) -> bool:
        """Whether the service answers."""
        try:
            return background.run(self._client.get(f"{self.url}/v1/ping", timeout=10.0)) == "pong"
        except (Unreachable, Refused):
            return False

    async def execute(self, program: Program) -> Result:
        """Post one program and read the reply."""
        if program.memory_limit_mb <= 0:
            program = replace(program, memory_limit_mb=self.memory_limit_mb)
        patience = program.compile_timeout + program.run_timeout + 10.0
        where = urlsplit(self.url).netloc
        try:
            return await self._client.post(
                f"{self.url}/run_code",
                program.to_request(),
                timeout=patience,
                read=lambda reply: replace(read_reply(reply), where=where),
            )
        except (Unreachable, Refused) as error:
            return Result(status="SandboxError", message=first_line(error), where=where)


def read_reply(reply: Any) -> Result:
    """A reply of the service as a `Result`. Raises `ValueError` for what is not one."""
    if not isinstance(reply, Mapping) or reply.get("status") not in ("Success", "Failed", "SandboxError"):
        raise ValueError(f"not a /run_code reply: {json.dumps(reply)[:200]}")
    files = {str(name): base64.b64decode(text) for name, text in (reply.get("files") or {}).items()}
    return Result(
        status=reply["status"],
        compile=_phase(reply.get("compile_result"), bool(reply.get("truncated"))),
        run=_phase(reply.get("run_result"), bool(reply.get("truncated"))),
        files=files,
        message=str(reply.get("message") or ""),
    )


def _phase(record: Any, cut: bool) -> Phase | None:
    if record is None:
        return None
    status, out, err = record["status"], str(record.get("stdout") or ""), str(record.get("stderr") or "")
    if status not in ("Finished", "Error", "TimeLimitExceeded"):
        raise ValueError(f"not a phase's status: {status!r}")
    truncated = cut or len(out) >= CUT or len(err) >= CUT
    last = err.strip().rsplit("\n", 1)[-1]
    memory = bool(record.get("return_code")) and (last.startswith("MemoryError") or "std::bad_alloc" in last)
    ended = "time" if status == "TimeLimitExceeded" else "memory" if memory else "output" if truncated else None
    return Phase(
        status=status,
        return_code=record.get("return_code"),
        stdout=out,
        stderr=err,
        seconds=float(record.get("execution_time") or 0.0),
        limit=ended,  # type: ignore[arg-type]
        truncated=truncated,
    )
