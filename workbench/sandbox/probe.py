"""A tier of isolation counts when a program that tries to get out of it has failed to."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Protocol

from workbench.sandbox import tiers
from workbench.sandbox.protocol import Program, Result

_SECONDS = 20.0

ESCAPES = r"""
import json, os, socket, sys
found = {}
def attempt(name, action):
    try:
        found[name] = bool(action())
    except BaseException as error:
        found[name] = False
def connect(kind):
    s = socket.socket(socket.AF_INET, kind); s.settimeout(2)
    s.connect(("127.0.0.1", PORT)); s.send(b"out"); return kind == socket.SOCK_STREAM or not udp_is_alone()
def udp_is_alone():
    return [name for _, name in socket.if_nameindex()] == ["lo"]
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import time; time.sleep(3)
        os._exit(0)
    return False
def others():
    mine = os.getpid()
    return [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, mine)]
def environments():
    seen = b""
    for pid in ("1", "self"):
        seen += open("/proc/%s/environ" % pid, "rb").read()
    return CANARY.encode() in seen
def namespaces():
    import ctypes
    return ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0
attempt("it reads a file of the host", lambda: open(SECRET).read())
attempt("it sees the host's home folders", lambda: os.path.exists("/root") or os.path.exists("/home"))
attempt("it writes to the system", lambda: open("/usr/workbench-probe", "w"))
attempt("it reaches the host's network by TCP", lambda: connect(socket.SOCK_STREAM))
attempt("it reaches the host's network by UDP", lambda: connect(socket.SOCK_DGRAM))
attempt("it sees other processes", others)
attempt("it reads our environment", environments)
attempt("it makes namespaces of its own", namespaces)
attempt("it gains rights", lambda: int(open("/proc/self/status").read().split("CapEff:")[1].split()[0], 16))
attempt("it has no process limit", lambda: __import__("resource").getrlimit(__import__("resource").RLIMIT_NPROC)[1] > 4096 or __import__("resource").getrlimit(__import__("resource").RLIMIT_NPROC)[1] < 0)
attempt("a daemon", daemon)
print(json.dumps(found), flush=True)
"""


class _Runner(Protocol):
    python: str

    def execute_in(self, tier: str, program: Program) -> Result: ...


def failures(sandbox: Any, tier: str) -> list[str]:
    """What a tier does not hold against on this machine; empty where it passes. Asked once per interpreter."""
    lacking = tiers.missing(tier)
    if lacking:
        return [f"needs {', '.join(lacking)}"]
    key = (tier, sandbox.python, os.getpid())
    if key not in _known:
        _known[key] = _attempt(sandbox, tier)
    return _known[key]


_known: dict[tuple[str, str, int], list[str]] = {}


def _attempt(sandbox: _Runner, tier: str) -> list[str]:
    canary = f"workbench-{os.urandom(8).hex()}"
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # what hides the file must be the tier, not the file's rights
        secret = Path(folder) / "secret"
        secret.write_text(canary)
        settings = f"PORT={listener.getsockname()[1]}; SECRET={str(secret)!r}; CANARY={canary!r}\n"
        os.environ["WORKBENCH_PROBE"] = canary
        try:
            program = Program(code=settings + ESCAPES, run_timeout=_SECONDS)
            result = sandbox.execute_in(tier, program)
        finally:
            del os.environ["WORKBENCH_PROBE"]
    return _verdict(result)


def _verdict(result: Result) -> list[str]:
    if result.status != "Success":
        return [f"its probe did not run ({result.why})"]
    try:
        found = json.loads(result.stdout)
    except ValueError:
        return ["its probe said nothing that can be read"]
    leaks = [name for name, escaped in found.items() if escaped]
    if result.run and result.run.left_behind:
        leaks.append("a daemon outlives its program")
    return leaks
