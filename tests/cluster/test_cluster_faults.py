"""Faults of workers and of the driver, injected for real on one local cluster."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster_things as things
import httpx
import numpy as np
import psutil
import pytest
import torch
from support.patience import LONG, patience, within

from workbench import DataProto
from workbench.base import runtime
from workbench.base.errors import EngineError, Interrupted, NonFinite, SettingError, WorkerLost
from workbench.cluster import Cluster, RayRanks, connect, discovery, ray_internals, session
from workbench.cluster.ranks import Environment
from workbench.cluster.session import HEAD
from workbench.engines.workers.processes import Ranks

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def pids(group: RayRanks) -> list[int]:
    return [fact["pid"] for fact in group.facts]


def gone(group: RayRanks) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids(group))


# --- the contract --------------------------------------------------------------------------------------


def test_calls_answer_by_rank(pair: RayRanks) -> None:
    assert isinstance(pair, Ranks)
    assert pair.call("who") == [(0, 2, "w"), (1, 2, "w")]
    assert pair.call("who", "shared", each=[(1,), (2,)]) == [(0, 2, "w", 1, "shared"), (1, 2, "w", 2, "shared")]
    assert pair.call("pid") == pids(pair) and len(set(pids(pair))) == 2
    with pytest.raises(SettingError, match="values in each= of who; expected 2, one a rank; found 1"):
        pair.call("who", each=[(1,)])


def test_rows_are_shared_out_and_come_back_in_order(pair: RayRanks) -> None:
    ids = torch.arange(35).reshape(7, 5)
    batch = DataProto({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"uid": [*"abcdefg"]})
    for pad in (False, True):
        got = pair.map("doubled", batch, pad=pad)
        assert torch.equal(got["twice"], 2 * ids)
        assert sorted(got["rows"].tolist()) == ([4] * 7 if pad else [3] * 3 + [4] * 4)
        same = pair.map("same", batch, pad=pad)
        assert torch.equal(same["input_ids"], ids) and list(same["uid"]) == [*"abcdefg"]
    assert torch.equal(pair.map("doubled", batch[:1])["twice"], 2 * ids[:1])


def test_B15_a_worker_writes_into_its_own_copy_alone(pair: RayRanks) -> None:
    batch = DataProto({"x": torch.full((64, 1024), 5.0)}, {"uid": [f"u{row}" for row in range(64)]})
    assert pair.call("scribble", batch) == [(5.0, -1.0), (5.0, -1.0)]
    assert float(batch["x"][0, 0]) == 5.0 and batch["uid"][0] == "u0"
    one, two = pair.submit("scribble", batch), pair.submit("first", batch)
    assert one.result() == [(5.0, -1.0)] * 2 and two.result() == [(5.0, "u0")] * 2


def test_groups_work_side_by_side_and_results_are_futures(local: Cluster, pair: RayRanks, tmp_path: Path) -> None:
    with local.ranks(things.thing, 1, name="third") as other:
        assert repr(other).startswith("Group 'third': 1 workers, idle")
        first = pair.submit("meet", str(tmp_path), 3)
        assert pair.out == ["meet"] and "meet" in repr(local.status())
        assert other.call("meet", str(tmp_path), 3) == [3] and first.result() == [3, 3]
    assert gone(other) and other.closed == "it was closed"
    with pytest.raises(EngineError, match="group 'third' ended; found it was closed; start it again"):
        other.call("who")


def test_status_logs_and_the_timeline(local: Cluster, pair: RayRanks, tmp_path: Path) -> None:
    pair.call("say", "hello from a worker", timeout=LONG)
    assert local.logs("pair", 1).splitlines()[-1] == "hello from a worker"
    assert within(lambda: local.status().nodes[0].free_cpus == 2)
    now = local.status()
    assert [(line.group, line.rank, line.pid, line.state) for line in now.workers] == [
        ("pair", 0, pids(pair)[0], "idle"),
        ("pair", 1, pids(pair)[1], "idle"),
    ]
    assert now.nodes[0].cpus == 4 and now.nodes[0].store > 250 << 20
    assert all(line.resident and line.resident > 10 << 20 for line in now.workers)
    named = [event for event in local.timeline.events if event.name == "say"][-2:]
    assert sorted((event.group, event.rank) for event in named) == [("pair", 0), ("pair", 1)]
    assert local.timeline.save(tmp_path / "trace.json").stat().st_size > 200
    # nothing of any session's variables is in Ray's files
    assert (Path.home() / ".ray" / "auth_token").stat().st_mode & 0o077 == 0, "nobody else reads the token"
    text = repr(local) + repr(now) + local._repr_html_() + repr(pair)
    assert things.CANARY not in text and "TEST_API_KEY=•••" in text
    logs = Path(tempfile.gettempdir()) / "ray" / local.link.session
    assert not [path for path in logs.rglob("*") if path.is_file() and things.CANARY.encode() in path.read_bytes()]
    assert pair.call("env", "TEST_API_KEY") == [things.CANARY] * 2 and pair.call("env", "OMP_NUM_THREADS") == ["1"] * 2


def test_workers_without_gpus_see_none(pair: RayRanks) -> None:
    """Else torch would take those of another worker."""
    assert pair.call("env", "CUDA_VISIBLE_DEVICES") == [""] * 2


def test_B8_too_much_is_refused_at_once(local: Cluster, pair: RayRanks) -> None:
    with pytest.raises(
        SettingError, match=r"3 workers of 1 CPUs and 0 GPUs; expected at most 2 of them; found .* has 2 of 4"
    ):
        local.ranks(things.thing, 3)
    with pytest.raises(SettingError, match="needs 5 CPUs on one node"):
        local.hold({"global": [5]})
    with pytest.raises(SettingError, match="at most 0 of them"):
        local.ranks(things.thing, 1, gpus=1)


def test_pools_hold_groups_side_by_side_on_the_same_seats(local: Cluster, pair: RayRanks) -> None:
    pool = local.hold({"global": [2]}, colocated=2)["global"]
    assert local.status().nodes[0].free_cpus == 0
    with pytest.raises(SettingError, match="is held already"):
        local.hold({"global": [1]})
    with local.ranks(things.thing, 2, pool="global", name="actor"), local.ranks(things.thing, 1, pool=pool) as one:
        assert one.call("who") == [(0, 1, "word")] and len(local.status().workers) == 5
        with pytest.raises(SettingError, match="at most 2 ranks and 2 groups on it; found groups actor, thing"):
            local.ranks(things.thing, 1, pool="global")
        local.release("global")
        assert one.closed is not None
    with pytest.raises(SettingError, match="pool 'global' is not held; expected one of"):
        local.release("global")
    assert within(lambda: local.status().nodes[0].free_cpus == 2)
    with pytest.raises(SettingError, match="pool 'global' is not held; expected one of"):
        local.ranks(things.thing, 1, pool="global")


# --- faults ----------------------------------------------------------------------------------------------


def test_B1_a_killed_worker_is_named_in_seconds_and_the_group_is_made_anew(local: Cluster, pair: RayRanks) -> None:
    with pytest.raises(WorkerLost) as error:
        pair.call("die_on", 1)
    told = str(error.value)
    assert f"rank 1 (pid {pids(pair)[1]} on " in told and "of group 'pair' died in die_on" in told
    assert error.value.rank == 1 and error.value.log.endswith("my last words") and "my last words" in told
    assert gone(pair), "the rank that waited is ended, too"
    with pytest.raises(EngineError, match="group 'pair' ended; found rank 1 was lost in die_on"):
        pair.call("who")
    again = local.ranks(things.thing, 2, name="again")
    assert again.call("who") == [(0, 2, "word"), (1, 2, "word")]
    # from outside, while a call is out
    out = again.submit("sleep", 3600.0)
    time.sleep(0.5)
    os.kill(pids(again)[0], signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rank 0"):
        out.result()


def test_B2_a_call_past_its_deadline_says_what_the_ranks_were_doing(pair: RayRanks) -> None:
    with pytest.raises(TimeoutError) as error:
        pair.call("sleep", 3600.0, timeout=1.0)
    told = str(error.value)
    assert (
        "sleep of group 'pair'; expected an answer in 1 s; found none from rank 0 (pid" in told
        and "rank 1 (pid" in told
    )
    assert "time.sleep(seconds)" in told
    assert gone(pair)


def test_B2_a_stopped_rank_and_one_in_c_code_do_not_answer(local: Cluster) -> None:
    group = local.ranks(things.thing, 2, name="stuck")
    os.kill(pids(group)[0], signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="does not answer: stopped, or in C code") as error:
        group.call("hold_the_interpreter", 3600, timeout=1.0)
    assert str(error.value).count("does not answer") == 2
    assert gone(group)


def test_one_rank_raises_while_others_work(local: Cluster, pair: RayRanks) -> None:
    with pytest.raises(EngineError) as error:
        pair.call("fail_on", 1, 3600.0)
    told = str(error.value)
    assert f"fail_on on rank 1 (pid {pids(pair)[1]} on " in told and "ValueError: the secret is •••" in told
    assert "cluster_things.py" in told and things.CANARY not in told
    assert pair.call("who") == [(0, 2, "w"), (1, 2, "w")], "nobody was left waiting, so the group lives"
    with pytest.raises(NonFinite, match="not_finite on rank [01]"):
        pair.call("not_finite")
    with pytest.raises(EngineError, match="unsendable on rank [01] .*generator"):
        pair.call("unsendable")
    with pytest.raises(EngineError, match="no attribute 'nothing'"):
        pair.call("nothing")
    assert pair.call("work", 0.0) == ["worked"] * 2


def test_B6_a_factory_that_raises_or_dies(local: Cluster, pair: RayRanks) -> None:
    with pytest.raises(EngineError, match=r"broken on rank 0 .*RuntimeError: rank 0 cannot"):
        local.ranks(things.broken, 1)
    with pytest.raises(WorkerLost, match="rank 0"):
        local.ranks(things.dies, 1)
    assert [group.name for group in local.groups] == ["pair"]


def when_out(group: RayRanks, interrupt: Callable[[], None]) -> None:
    """From a thread, as soon as a call is out."""

    def wait() -> None:
        if within(lambda: group.out):
            time.sleep(0.2)  # it is in the workers, too
            interrupt()

    threading.Thread(target=wait, daemon=True).start()


def by_hand() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_C1_an_interrupt_stops_the_work_and_keeps_ranks_that_all_stopped(pair: RayRanks) -> None:
    when_out(pair, by_hand)
    with pytest.raises(KeyboardInterrupt):
        pair.call("work", 3600.0)
    assert pair.closed is None
    assert pair.call("work", 0.1) == ["worked"] * 2
    # the flag of this process, from another thread: how a stage is stopped
    when_out(pair, runtime.interrupt)
    try:
        with pytest.raises(Interrupted):
            pair.call("work", 3600.0)
    finally:
        runtime.clear()
    assert pair.call("work", 0.1) == ["worked"] * 2


def test_C1_an_interrupt_before_the_wait_has_begun_stops_the_work_too(
    pair: RayRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []

    def check() -> None:
        looked.append(True)
        if len(looked) == 2:  # the call is in the workers, nobody waits yet
            raise KeyboardInterrupt

    monkeypatch.setattr(pair, "check", check)
    with pytest.raises(KeyboardInterrupt):
        pair.call("work", 3600.0)
    assert not pair.out and pair.call("work", 0.1) == ["worked"] * 2

    class Reached:
        """Rank 1, which an interrupt keeps from getting the call that rank 0 has."""

        def __getattr__(self, name: str) -> Any:
            if name == "call":
                raise KeyboardInterrupt
            return getattr(actors[1], name)

    actors = pair.actors
    monkeypatch.setattr(pair, "actors", [actors[0], Reached()])
    with pytest.raises(KeyboardInterrupt):
        pair.call("work", 3600.0)
    monkeypatch.undo()
    assert not pair.out and pair.call("work", 0.1) == ["worked"] * 2


def test_C1_an_interrupt_leaves_no_actor_that_does_not_let_go(local: Cluster, pair: RayRanks) -> None:
    when_out(pair, by_hand)
    with pytest.raises(KeyboardInterrupt):
        pair.call("sleep", 3600.0)
    assert gone(pair) and pair.closed == "sleep was interrupted, and the ranks did not all stop"
    assert within(lambda: local.status().nodes[0].free_cpus == 4)


def test_B14_two_hundred_steps_take_no_more_memory_than_twenty(local: Cluster, pair: RayRanks) -> None:
    batch = DataProto({"x": torch.zeros(256, 1024)})  # 1 MiB, there and back: 600 MiB in all through a store of 300
    processes = [psutil.Process(), *(psutil.Process(pid) for pid in pids(pair))]
    looks: list[list[int]] = []
    for step in range(1, 221):
        pair.call("same", batch)
        if step % 20 == 0:
            looks.append([one.memory_full_info().uss >> 20 for one in processes])  # their own: not the store's pages
    slopes = [np.polyfit(range(20, 220, 20), column, 1)[0] for column in zip(*looks[1:], strict=True)]
    assert max(slopes) < 0.05, f"MiB a step, driver and ranks: {slopes}; {looks}"
    assert within(lambda: local.status().nodes[0].store_used < 20 << 20), "nobody holds what was sent"
    left = pair.submit("same", batch).result(copy=False)
    assert float(left[0]["x"].sum()) == 0.0


def test_the_same_cell_again_is_the_same_cluster_and_close_leaves_no_process(local: Cluster) -> None:
    assert connect(**things.SETTINGS) is local
    with pytest.raises(EngineError, match="a cluster is open in this process already"):
        connect(cpus=2)
    members = discovery.of_session(local.link.session)
    assert len(members) >= 4 and local.link.record is not None and local.link.record.path.exists()
    local.close()
    assert not discovery.of_session(local.link.session) and not any(one.alive() for one in members)
    assert not local.link.record.path.exists()
    local.close()
    with pytest.raises(EngineError, match="was closed"):
        local.status()


KERNEL = """
import sys, os
os.umask(0)
sys.path.insert(0, sys.argv[1])
import cluster_things as things
from training import group, grpo
from workbench.cluster import connect
c = connect(cpus=2, object_store_memory=100 << 20, start_seconds=float(sys.argv[3]))
where = group(c, 1)
learner, pipe = grpo(where, sys.argv[2])
where.start()
g = c.ranks(things.thing, 1)
print(c.link.session, flush=True)
g.call("sleep", 3600)
"""


@pytest.mark.long
def test_C3_E10_a_first_start_listens_on_loopback_with_a_token_of_its_own_and_a_killed_kernel_leaves_nothing(
    local: Cluster, tmp_path: Path
) -> None:
    """A kernel in a home where nobody has had a token, with no umask; beside another cluster, which is not touched (B18)."""
    home = tmp_path / "home"
    home.mkdir()
    kept = "RAY_prestart_worker_first_driver"
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") or name == kept}
    command = [sys.executable, "-c", KERNEL, str(HERE), str(tmp_path), str(patience(120))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**without, "HOME": str(home)}) as kernel:
        assert kernel.stdout is not None
        session = kernel.stdout.readline().strip()
        assert session, "the kernel ended without a cluster; its error stands in this test's output"
        members = discovery.of_session(session)
        assert len(members) >= 6
        token = home / ".ray" / "auth_token"
        assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
        assert [one.name for one in token.parent.iterdir()] == ["auth_token"]
        listening = {
            (one.name, link.laddr.ip, link.laddr.port)
            for one in [*members, discovery.process(kernel.pid)]
            for link in psutil.Process(one.pid).net_connections("inet")
            if link.status == psutil.CONN_LISTEN
        }
        assert len(listening) >= 6 and {ip for _, ip, _ in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert {"gcs_server", "raylet"} <= {name for name, *_ in listening}
        head = next(f"127.0.0.1:{port}" for name, _, port in listening if name == "gcs_server")
        assert head in ray_internals.heads_here() and _says(head) == "UNAUTHENTICATED", "loopback, and a token besides"
        kernel.kill()
    time.sleep(3)
    notes = discovery.clear_left()
    assert within(lambda: not discovery.of_session(session))
    assert not [record for record in discovery.records() if record.session == session]
    assert all("a killed kernel" in note for note in notes)
    assert discovery.of_session(local.link.session) and local.status().nodes[0].alive, (
        "only what it had started is gone"
    )


def _says(head: str) -> str:
    """What a head answers to one without a token."""
    import grpc
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    with grpc.insecure_channel(head) as channel, pytest.raises(grpc.RpcError) as error:
        gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).GetAllNodeInfo(
            gcs_service_pb2.GetAllNodeInfoRequest(), timeout=patience(10)
        )
    return str(error.value.code().name)


def test_E10_the_line_that_we_tell_starts_no_cluster_without_a_token(tmp_path: Path) -> None:
    assert HEAD == "RAY_AUTH_MODE=token ray start --head"
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environment.pop(name, None)
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--port=0", "--num-cpus=1", "--include-dashboard=false"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode != 0 and "no authentication token was found" in done.stdout + done.stderr


# --- E12: a page in a browser ---------------------------------------------------------------------------


def test_E12_a_dashboard_without_its_packages_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "opencensus" else real(name))
    with pytest.raises(SettingError, match=r"dashboard=True; .*opencensus.*; pip install 'ray\[default\]"):
        session.start(Environment(), None, 1, None, True, 30.0)


@pytest.mark.skipif(not importlib.util.find_spec("opencensus"), reason="no packages of Ray's dashboard: ray[default]")
def test_E12_the_dashboard_refuses_what_a_page_sends(local: Cluster) -> None:
    local.close()
    with connect(cpus=1, object_store_memory=100 << 20, dashboard=True) as own:
        url = next(note for note in own.notes if note.startswith("the dashboard is at ")).split(" at ")[1]
        assert url.startswith("http://127.0.0.1:")
        token = {"Authorization": f"Bearer {session.known_token()}"}
        page = {"Origin": "http://evil.example", "User-Agent": "Mozilla/5.0", "Sec-Fetch-Site": "cross-site"}
        rebound = {
            "Host": "evil.example:8265",
            "User-Agent": "Mozilla/5.0",
        }  # DNS rebinding: no foreign origin, no token
        job = {"entrypoint": "touch /tmp/workbench-was-here"}
        with httpx.Client(base_url=url, timeout=LONG) as client:
            assert within(lambda: client.get("/api/version", headers=token).status_code == 200)
            for headers, codes in (
                ({}, (401, 403)),
                (page, (401, 403, 405)),
                (rebound, (401, 403, 405)),
                (page | token, (403, 405)),
            ):
                assert client.post("/api/jobs/", json=job, headers=headers).status_code in codes, headers
            for headers in ({}, page, rebound):
                for path in ("/api/version", "/api/jobs/", "/nodes?view=summary", "/api/v0/actors"):
                    assert client.get(path, headers=headers).status_code in (401, 403), (path, headers)
            assert "Access-Control-Allow-Origin" not in client.get("/", headers=page).headers
            assert [one for one in client.get("/api/jobs/", headers=token).json() if one["type"] != "DRIVER"] == []
