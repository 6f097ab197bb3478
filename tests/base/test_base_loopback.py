"""Servers of this machine: what half a request, a crowd, another user or a strange request can do to them."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import patience, within

from workbench.base import loopback
from workbench.base.loopback import HttpRequest, Text, from_another_user, serving
from workbench.jobs.viewer import viewing


def greet(asked: HttpRequest) -> tuple[int, Any]:
    if asked.path == "/broken":
        raise RecursionError("maximum depth")
    if asked.path == "/odd":
        return 200, object()
    return 200, {"path": asked.path}


def get(address: str, path: str = "/", method: str = "GET", body: Any = None, **headers: str) -> tuple[int, Any, str]:
    connection = http.client.HTTPConnection(address, timeout=patience(10))
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read().decode()
    finally:
        connection.close()


def half(address: str) -> socket.socket:
    host, port = address.split(":")
    one = socket.create_connection((host, int(port)), timeout=patience(10))
    one.sendall(b"GET / HTTP/1.1\r\nHost: localhost")
    return one


def handlers() -> int:
    """Connections that this process holds as a server, by their threads."""
    return sum("process_request_thread" in one.name for one in threading.enumerate())


def test_a_crowd_of_half_requests_leaves_the_server_answerable_and_its_connections_few() -> None:
    before = handlers()
    with serving(greet, name="crowd") as address, ExitStack() as crowd:
        for number in range(3 * loopback.CONNECTIONS):
            crowd.enter_context(half(address))
            if number % 50 == 0:
                assert get(address)[0] == 200
        assert get(address)[0] == 200
        assert within(lambda: handlers() - before <= loopback.CONNECTIONS)


def test_half_a_request_and_an_idle_connection_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback._Handler, "timeout", 0.2)
    with serving(greet, name="slow") as address:
        assert half(address).recv(1) == b""
        idle = http.client.HTTPConnection(address, timeout=patience(10))
        idle.request("GET", "/")
        assert idle.getresponse().read() and idle.sock is not None and idle.sock.recv(1) == b""


def test_an_answer_that_takes_longer_than_a_silent_connection_may_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback._Handler, "timeout", 0.1)

    def slow(asked: HttpRequest) -> tuple[int, Any]:
        time.sleep(0.3)
        return 200, {"gone": asked.gone()}

    with serving(slow, name="slow") as address:
        assert json.loads(get(address)[2]) == {"gone": False}


def test_where_every_connection_is_being_answered_a_further_one_is_told_to_come_again() -> None:
    go, entered = threading.Event(), threading.Semaphore(0)

    def waits(asked: HttpRequest) -> tuple[int, Any]:
        entered.release()
        go.wait(patience(20))
        return 200, "done"

    with serving(waits, name="full", connections=2) as address:
        two = [http.client.HTTPConnection(address, timeout=patience(20)) for _ in range(2)]
        for one in two:
            one.request("GET", "/")
            assert entered.acquire(timeout=patience(20))
        status, headers, _ = get(address)
        assert status == 503 and headers["Retry-After"]
        go.set()
        assert [one.getresponse().read() for one in two] == [b'"done"', b'"done"']


def test_whatever_an_answer_raises_is_a_status_and_no_stack_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(greet, name="broken") as address:
        assert get(address, "/broken")[0] == 500
        with pytest.raises((http.client.HTTPException, OSError)):  # it cannot be sent as JSON
            get(address, "/odd")
        assert get(address)[0] == 200
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "host", ["localhost:evil.com", "127.0.0.1:80@evil.com", "evil.com", "localhost:80:80", "localhost:"]
)
def test_a_host_is_a_name_of_this_machine_and_a_port_or_it_is_refused(host: str) -> None:
    with serving(greet, name="named") as address:
        assert get(address, Host=host)[0] == 403
        status, headers, _ = get(address, Host="localhost")
        assert status == 200 and "Python" not in headers["Server"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump") / "1.jsonl"
    path.write_text(json.dumps({"input": "2 + 2", "output": "4", "score": 1.0, "step": 1}) + "\n")
    return path


@contextmanager
def viewer(dump: Path) -> Iterator[tuple[str, str]]:
    with viewing(dump) as url:
        yield url.removeprefix("http://").partition("/")[0], url.partition("token=")[2]


def test_the_viewer_refuses_hosts_sends_nobody_elsewhere_and_survives_deep_json(
    dump: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with viewer(dump) as (address, token):
        for host in ("localhost:evil.com", "127.0.0.1:80@evil.com"):
            assert get(address, f"/?token={token}", Host=host)[0] == 403
        for path in ("/\\evil.com/", "//evil.com/", "/%5Cevil.com/", "/%2F/evil.com/", "/\\/\\evil.com/x"):
            status, headers, _ = get(address, f"{path}?token={token}")
            place = headers.get("Location", "/")
            assert status in (302, 403, 404) and place.startswith("/") and place[1:2] not in ("/", "\\"), (path, place)
        cookie = get(address, f"/?token={token}")[1]["Set-Cookie"].partition(";")[0]
        for body in ("[" * 100_000, "{", "[]", "3"):
            status, _, text = get(address, "/-/ask/x", "POST", body, Cookie=cookie)
            assert 400 <= status < 600 and "Traceback" not in text
        assert get(address, "/-/ask/x", "POST", "[" * 100_000, Cookie=cookie)[0] == 400
    assert "Traceback" not in "".join(capfd.readouterr())


ASKS = """
import os, sys, http.client, socket, encodings.idna
one = http.client.HTTPConnection(sys.argv[1])
os.setuid(int(sys.argv[2]))
one.request("GET", "/x")
print(one.getresponse().status)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_server_of_programs_refuses_another_user_of_the_machine_and_answers_its_own() -> None:
    def code(address: str, user: int) -> str:
        done = subprocess.run([sys.executable, "-I", "-c", ASKS, address, str(user)], capture_output=True, check=True)
        return done.stdout.decode().strip()

    with serving(greet, name="mine", guard=from_another_user) as address:
        assert code(address, 0) == "200"
        assert code(address, 65534) == "403"
    with serving(lambda asked: (200, Text("x", "text/plain")), name="anybody") as address:
        assert code(address, 65534) == "200"  # a health page: Prometheus is another user


def test_a_client_of_ipv6_is_known_for_its_own_user() -> None:
    with serving(greet, name="mine", guard=from_another_user) as address, socket.socket(socket.AF_INET6) as one:
        one.settimeout(patience(10))
        try:
            one.connect(("::ffff:127.0.0.1", int(address.rpartition(":")[2])))
        except OSError:
            pytest.skip("no IPv6 here")
        one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in one.recv(100)
