"""Two simulated nodes in another process: attached to, placed on, lost; and a local cluster beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_things as things
import psutil
import pytest
from support.patience import LONG, patience, within

from workbench.base.errors import EngineError, SettingError, WorkerLost
from workbench.cluster import connect, discovery, session

pytestmark = pytest.mark.slow
TOKEN = "0123456789abcdef" * 4


class Nodes:
    """The other process."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def tell(self, *words: object) -> None:
        """A command; its answer is still to be read."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(next(line for line in self.process.stdout if line.startswith("{"))))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    things.close()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    script = str(Path(__file__).parent / "two_nodes.py")
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        made = Nodes(process, "")
        made.address = made.answer()["address"]
        yield made
        process.stdin.close()
        process.wait(LONG)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)


def test_B13_what_does_not_answer_is_said_in_seconds(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"nothing answers at 127.0.0.1:1; .*running here: .*" + nodes.address):
        connect("127.0.0.1:1")
    with pytest.raises(EngineError, match="nothing answers at ray://127.0.0.1:1"):
        connect("ray://127.0.0.1:1")
    with pytest.raises(SettingError, match="a cluster that is started here; found address"):
        connect(nodes.address, cpus=2)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(EngineError, match="does not answer as a Ray head; found DEADLINE_EXCEEDED"):
            connect(f"127.0.0.1:{mute.getsockname()[1]}", connect_timeout=patience(2))


def test_E11_a_wrong_or_missing_token_is_said(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    with pytest.raises(
        EngineError, match="requires its authentication token; found a token that it does not know; put the cluster's"
    ):
        connect(nodes.address)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    for empty in (None, ""):
        if empty is not None:
            monkeypatch.setenv("RAY_AUTH_TOKEN", empty)
        with pytest.raises(EngineError, match="requires its authentication token; found no token here"):
            connect(nodes.address)
    (tmp_path / "none").write_text("")
    with pytest.raises(EngineError, match="requires its authentication token; found no token here"):
        connect(nodes.address)


SERVES = """
import sys, time
from ray.util.client.server.proxier import serve_proxier
server = serve_proxier("127.0.0.1", int(sys.argv[1]), None)
print("serves", flush=True)
sys.stdin.read()
"""


def test_E11_over_ray_client_a_token_that_is_wrong_or_not_there_is_said_and_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that `ray://` talks to, without a cluster behind it: it knows tokens by itself."""
    things.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVES, str(port)]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None and server.stdout.readline() == "serves\n"
        told = f"the cluster at ray://127.0.0.1:{port} requires its authentication token; found "
        for token, what in (
            ("f" * 64, "a token that it"),
            (TOKEN[:-1], "a token that it"),
            ("a\nb", "a token that it"),
        ):
            monkeypatch.setenv("RAY_AUTH_TOKEN", token)
            with pytest.raises(EngineError, match=told + what):
                connect(f"ray://127.0.0.1:{port}")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(EngineError, match=told + "no token here"):
            connect(f"ray://127.0.0.1:{port}")
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        session._probe(f"ray://127.0.0.1:{port}", patience(10))
        server.kill()
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(EngineError, match="does not answer as the server of ray://; found DEADLINE_EXCEEDED"):
            connect(f"ray://127.0.0.1:{mute.getsockname()[1]}", connect_timeout=patience(2))


def test_pools_are_placed_on_two_nodes_as_the_picture_says(nodes: Nodes, token: None) -> None:
    with connect(nodes.address) as attached:
        assert "attached" in repr(attached) and attached.link.record is None
        made = attached.plan({"global": [1, 1], "rollout": [1]}, roles={"global": ["actor"], "rollout": ["sampler"]})
        first, second = (seat.node for seat in made.of("global"))
        assert first != second
        pools = attached.hold(made)
        actor = attached.ranks(things.thing, 2, pool=pools["global"], name="actor")
        sampler = attached.ranks(things.thing, 1, pool="rollout", name="sampler")
        assert [fact["node"] for fact in actor.facts] == [first, second]
        assert [fact["node"] for fact in sampler.facts] == [seat.node for seat in made.of("rollout")]
        assert actor.call("who") == [(0, 2, "word"), (1, 2, "word")]
        now = attached.status()
        assert len(now.nodes) == 2 and sum(node.free_cpus for node in now.nodes) == 1
        assert len({line.split()[0] for line in repr(now).splitlines()[2:4]}) == 2, "nodes of one host are told apart"
        actor.call("say", "on the second node")
        assert attached.logs("actor", 1).endswith("on the second node")
        pids = [fact["pid"] for fact in (*actor.facts, *sampler.facts)]
    processes = [one for one in psutil.process_iter() if one.pid in pids]  # at most on their way out
    assert not psutil.wait_procs(processes, timeout=LONG)[1]
    assert discovery.answers(nodes.address) is None and nodes.process.poll() is None, "what was attached to runs on"
    with connect(nodes.address) as again:
        assert all(node.free_cpus == node.cpus for node in again.status().nodes), "everything was given back"


@pytest.mark.long
def test_B13_another_cluster_is_told_of_and_not_joined(
    nodes: Nodes, token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what a killed head has left: Ray's own file still names it."""
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    with tempfile.TemporaryDirectory(prefix="b13-", dir="/tmp") as folder:  # short: Ray's sockets are in it
        monkeypatch.setenv("RAY_TMPDIR", folder)
        left = Path(folder) / "ray" / "ray_current_cluster"
        left.parent.mkdir()
        left.write_text("127.0.0.1:1")
        with pytest.raises(EngineError, match=f"{left} names 127.0.0.1:1, where nothing answers"):
            connect("127.0.0.1:2")
        with connect(cpus=1, object_store_memory=100 << 20) as own:
            assert own.link.record and own.link.address not in (nodes.address, "127.0.0.1:1")
            told = f"a cluster runs at {nodes.address}; it was not joined: wb.cluster('{nodes.address}') would"
            assert told in own.notes and len(own.status().nodes) == 1
            assert any(f"{left} names 127.0.0.1:1; it was not joined" in note for note in own.notes)
            session = own.link.session
    assert not discovery.of_session(session)
    assert discovery.answers(nodes.address) is None, "closing our own did not touch it"


@pytest.mark.long
def test_B7_a_lost_node_is_a_lost_worker_in_seconds_and_a_new_one_takes_its_place(
    nodes: Nodes, token: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    with connect("auto") as attached:
        group = attached.ranks(things.thing, 2, pool=attached.hold({"global": [1, 1]})["global"])
        out = group.submit("sleep", 3600.0)
        time.sleep(0.5)
        nodes.tell("lose")
        with pytest.raises(WorkerLost, match="died in sleep"):
            out.result()
        assert nodes.answer() == {}
        nodes.tell("add", 2)
        raylet = nodes.answer()["raylet"]
        attached.release()
        again = attached.ranks(things.thing, 2, pool=attached.hold({"global": [1, 1]})["global"])
        assert again.call("who") == [(0, 2, "word"), (1, 2, "word")], "the run goes on, on the new node"
        assert sorted(node.alive for node in attached.status().nodes) == [False, True, True]
        # a node that hangs, as one behind a cut cable: its worker would still answer
        out = again.submit("sleep", 3600.0)
        time.sleep(0.5)
        os.kill(raylet, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="died in sleep"):
            out.result()
        os.kill(raylet, signal.SIGCONT)
        assert within(lambda: not _alive(raylet)), "the node that comes back is not trusted: it ends"
        assert sorted(node.alive for node in attached.status().nodes) == [False, False, True]
        assert attached.notes, "what Ray would have printed into the cell"
    assert "raylet" not in capfd.readouterr().out


@pytest.mark.long
def test_B11_a_worker_that_eats_memory_is_killed_for_it_by_name_and_once(nodes: Nodes, token: None) -> None:
    memory = psutil.virtual_memory()
    limit = memory.total - memory.available + (2 << 30)  # two workers have half a GiB
    nodes.tell("add", 4, round(limit / memory.total, 4))
    there = nodes.answer()["node"]
    with connect(nodes.address) as attached:
        attached.hold({"short": [3]}, colocated=2)
        eater = attached.ranks(things.thing, 1, pool="short", name="eater")
        other = attached.ranks(things.thing, 1, pool="short", name="other")
        assert [one.facts[0]["node"] for one in (eater, other)] == [there] * 2, "where memory is short"
        with pytest.raises(WorkerLost) as error:
            eater.call("eat", 4000)
        told = str(error.value)
        pid = eater.facts[0]["pid"]
        assert f"rank 0 (pid {pid} on " in told and "killed for memory: the node used " in told
        assert re.search(rf"most of it: .*\d GB by ray::Worker\S* \(pid {pid}\)", told), told
        assert not _alive(pid) and eater.closed == "rank 0 was lost in eat"
        time.sleep(1)
        assert not [one for one in psutil.process_iter(["name"]) if "Worker.call" in (one.info["name"] or "")], (
            "no retry"
        )
        # Ray may kill bystanders with it: they are named the same way, and made anew
        try:
            assert other.call("who") == [(0, 1, "word")]
        except WorkerLost as lost:
            assert "killed for memory" in str(lost)
            other = attached.ranks(things.thing, 1, pool="short", name="other")
        assert other.call("who") == [(0, 1, "word")]


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
