"""The SandboxFusion client: a live service's recorded replies, and a service that is slow, busy, broken or gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.patience import LONG
from support.web import served

from workbench.base.errors import SandboxError, SettingError
from workbench.base.http import _retry_after
from workbench.rewards import Reward, Status, code
from workbench.sandbox import LocalSandbox, Program, RemoteSandbox, serve
from workbench.sandbox.remote import read_reply
from workbench.testing.rewards import answered

EXCHANGES = Path(__file__).parents[3] / "shared" / "data" / "sandbox_fusion" / "exchanges.jsonl"
GOOD = {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {"status": "Finished", "execution_time": 0.2, "return_code": 0, "stdout": "42\n", "stderr": ""},
    "executor_pod_name": None,
    "files": {},
}


@contextmanager
def service(reply: Callable[[int], tuple[int, Any, dict[str, str]] | None]) -> Iterator[tuple[str, dict[str, int]]]:
    """A stub: `reply(call number)` is (status, body, headers), or None to drop the connection."""
    seen = {"calls": 0, "now": 0, "most": 0}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                seen["calls"] += 1
                number = seen["calls"]
                seen["now"] += 1
                seen["most"] = max(seen["most"], seen["now"])
            try:
                found = reply(number)
            finally:
                with lock:
                    seen["now"] -= 1
            if found is None:
                self.connection.close()
                return
            status, body, headers = found
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None: ...

    with served(Handler) as url:
        yield url, seen


def quick(url: str, **options: Any) -> RemoteSandbox:
    made = RemoteSandbox(url, **options)
    made._client.wait = 0.01
    return made


@pytest.mark.skipif(not EXCHANGES.exists(), reason="no recorded exchanges: ../shared/data is absent")
def test_the_replies_of_a_live_service_are_read_for_what_they_are() -> None:
    ran = 0
    for one in map(json.loads, EXCHANGES.read_text().splitlines()):
        if one["path"] != "/run_code" or one["status_code"] != 200:
            continue
        reply = one["response"]
        for phase in (reply["run_result"], reply["compile_result"]):
            for name in ("stdout", "stderr"):
                if phase and isinstance(phase[name], dict):  # put back what the recording left out
                    phase[name] = (phase[name]["head"] * phase[name]["length"])[: phase[name]["length"]]
        result = read_reply(reply)
        ran += 1
        assert result.status == reply["status"], one["name"]
        cut = one["name"] == "300 kB stdout"
        assert result.truncated is cut and (result.limit == "output") is cut
        assert (result.limit == "time") is (one["name"] in ("time limit", "busy loop"))
        assert (result.limit == "memory") is (one["name"] == "memory limit")
        assert result.stdout == (reply["run_result"] or {}).get("stdout", "")
        if one["name"] == "files in and out":
            assert result.files == {"out.txt": b"ABC"}
    assert ran == 21
    with pytest.raises(ValueError, match="status None in a /run_code reply"):
        read_reply({"status": "Success", "run_result": {"stdout": "x"}})


@pytest.mark.slow
def test_what_passes_is_tried_again_and_what_does_not_is_no_verdict() -> None:
    first: list[Any] = [(503, "", {}), None, (200, b"{cut", {}), (429, "", {"Retry-After": "0"}), (200, GOOD, {})]
    with service(lambda n: first[n - 1]) as (url, seen):
        assert quick(f"{url}/run_code", attempts=5).run("print(42)").stdout == "42\n" and seen["calls"] == 5
    with service(lambda n: (500, {"detail": "boom"}, {})) as (url, seen):
        result = quick(url, attempts=3).run("print(42)")
        assert result.status == "SandboxError" and "500" in result.why and "boom" in result.why and seen["calls"] == 3
    with service(lambda n: (422, {"detail": "language"}, {})) as (url, seen):
        result = quick(url).run("print(42)")
        assert result.status == "SandboxError" and "422" in result.why and seen["calls"] == 1
    for garbage in (b"<html>", b"[]", b'{"status": "Fine"}', json.dumps({**GOOD, "run_result": {}}).encode()):
        with service(lambda n, body=garbage: (200, body, {})) as (url, _):  # type: ignore[misc]
            assert quick(url, attempts=2).run("1").status == "SandboxError"
    gone = quick("http://127.0.0.1:9/run_code", attempts=2)
    assert gone.run("1").status == "SandboxError" and not gone.ping()


@pytest.mark.slow
def test_a_service_that_never_answers_costs_the_deadline_once() -> None:
    gate = threading.Event()
    with service(lambda n: gate.wait(LONG) and (200, GOOD, {})) as (url, seen):  # type: ignore[arg-type,return-value]
        result = quick(url, deadline=1.0).run("print(42)")
        assert result.status == "SandboxError" and "no reply" in result.why
        assert seen["calls"] == 1
        gate.set()


@pytest.mark.slow
def test_no_more_requests_at_once_than_allowed() -> None:
    with service(lambda n: time.sleep(0.1) or (200, GOOD, {})) as (url, seen):  # type: ignore[func-returns-value]
        results = quick(url, max_concurrent=3).run_many([Program(code=str(n)) for n in range(12)])
        assert all(result.stdout == "42\n" for result in results) and seen["most"] == 3


@pytest.mark.slow
def test_an_outage_is_machinery_never_a_zero() -> None:
    with service(lambda n: (503, "", {}) if n > 2 else (200, GOOD, {})) as (url, _):
        judge = Reward(code(quick(url, attempts=1, max_concurrent=1)), in_process=True)
        rows = answered(["```python\nprint(42)\n```"] * 4, [{"inputs": [""], "outputs": ["42"]}] * 4)
        scores = judge.score(rows)
    assert [score.status for score in scores] == [Status.SCORED] * 2 + [Status.INFRA_ERROR] * 2
    assert not scores[2].scored and "503" in scores[2].why


@pytest.mark.slow
def test_one_client_serves_both() -> None:
    try:
        box = LocalSandbox()
    except SandboxError as error:
        pytest.skip(str(error))
    with serve(box) as url:
        remote = RemoteSandbox(url)
        assert remote.ping()
        assert remote.run("print(input())", stdin="there").stdout == "there\n"
        cut = remote.run("print('a' * 2_000_000)")
        assert cut.truncated and cut.limit == "output" and cut.status == "Success"
        files = remote.run("open('o','w').write(open('i').read())", files={"i": b"x"}, fetch_files=("o",))
        assert files.files == {"o": b"x"}


def test_settings_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(SettingError, match=r"sandbox_fusion.url.*http"):
        RemoteSandbox("ftp://x/run_code")
    with pytest.raises(SettingError, match="max_concurrent"):
        RemoteSandbox("http://x/run_code", max_concurrent=0)
    assert RemoteSandbox("https://h.example/a/run_code").url == "https://h.example/a"


def test_retry_after_in_seconds_or_as_a_date() -> None:
    assert _retry_after("2") == 2 and _retry_after(None) == 0 and _retry_after("soon") == 0
    assert _retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0


NO_GO = {"status": "Finished", "execution_time": 0.1, "return_code": 127, "stdout": "", "stderr": "/bin/bash: line 1: go: command not found\n"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "language", "told"),
    [
        ({"compile_result": NO_GO}, "go", True), ({"run_result": NO_GO}, "go", True), ({"run_result": NO_GO}, "bash", False),
        ({"run_result": NO_GO}, "python", False), ({"run_result": {**NO_GO, "stdout": "x"}}, "go", False),
        ({"run_result": {**NO_GO, "return_code": 1}}, "go", False), ({"compile_result": NO_GO, "run_result": NO_GO}, "python", False),
        ({"compile_result": {**NO_GO, "stderr": "sh: 1: /usr/bin/rustc: not found"}}, "rust", True),
        ({"compile_result": {**NO_GO, "stderr": "main.go:3: x: command not found"}}, "go", False),
    ],
)  # fmt: skip
def test_a_compiler_that_the_service_lacks_is_machinery(phase: dict[str, Any], language: str, told: bool) -> None:
    reply = {**GOOD, "status": "Failed", "run_result": None, **phase}
    with service(lambda n: (200, reply, {})) as (url, _):
        result = quick(url).run("x", language=language)
    assert (result.status == "SandboxError") is told and (not told or f"cannot run {language}: it has no" in result.why)


@pytest.mark.slow
def test_the_server_bounds_time_limits_refuses_pages_and_says_what_was_wrong() -> None:
    import http.client

    class Ran:
        async def execute(self, program: Program) -> Any:
            return read_reply(GOOD)

    with serve(Ran()) as url:  # type: ignore[arg-type]
        host = url.removeprefix("http://")

        def asked(path: str, body: bytes, **headers: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection(host)
            connection.request("POST", path, body, headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

        for field in ("run_timeout", "compile_timeout"):
            for seconds in (-5, 0, 1e9, float("nan"), "soon", None):
                body = json.dumps({"code": "1", "language": "python", field: seconds}).encode()
                status, said = asked("/run_code", body)
                assert status == 422 and ("timeout" in said), (field, seconds, said)
        assert asked("/run_code", json.dumps({"code": "1", "language": "python", "run_timeout": 9}).encode())[0] == 200
        assert asked("/run", b"{}")[0] == 404 and "expected /run_code" in asked("/run", b"{}")[1]
        # E12: a page in a browser, from elsewhere or with a name that it has bound to loopback
        good = json.dumps({"code": "1", "language": "python"}).encode()
        for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example:8080"}, {"Host": "localhost.evil.example"}, {"Sec-Fetch-Site": "cross-site"}):  # fmt: skip
            status, said = asked("/run_code", good, **headers)
            assert status == 403 and "not for pages of a browser" in said, headers
        assert asked("/run_code", good, Host=f"localhost:{host.partition(':')[2]}")[0] == 200
        large = asked("/run_code", b"", **{"Content-Length": str(1 << 40)})
        assert large[0] == 413 and "bytes" in large[1] and asked("/run_code", b"", **{"Content-Length": "-1"})[0] == 400
    for seconds in (-1.0, 0.0, float("nan"), 1e9):
        with pytest.raises(SettingError, match="run_timeout.*at most 3600"):
            Program(code="1", run_timeout=seconds)
        with pytest.raises(SettingError, match="timeout"):
            code(Ran(), timeout=seconds)  # type: ignore[arg-type]
