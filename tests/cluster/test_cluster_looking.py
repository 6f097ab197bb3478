"""Looking at a cluster: what workers do now and did, in tables that live, pictures, traces, logs and profiles."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cluster_things as shared
import looking_things as things
import psutil
import pytest
from support.lint import lint
from support.patience import LONG, patience, within

from workbench import DataProto, Outcome
from workbench.base.activity import QueuedRequest
from workbench.base.errors import EngineError, SettingError
from workbench.cluster import Cluster, RayRanks, connect
from workbench.cluster.actor import _nvidia_smi
from workbench.cluster.pools import Node
from workbench.cluster.ranks import nsight_options
from workbench.cluster.status import MUTE, CallLine, ClusterStatus, Logs, Profile, WorkerLine
from workbench.cluster.timeline import Event, Timeline, ordered
from workbench.runs.loop import StepReport
from workbench.stages import Stage
from workbench.steps.trace import STAGE, Trace, perform
from workbench.views.document import DOWN
from workbench.widgets.layer import ClusterTable

GIB = 1 << 30
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m$"


# --- without Ray ------------------------------------------------------------------------------------------


def events() -> list[Event]:
    """Two steps of a rollout on one group and log-probs and an update on another; the second rollout overlaps the update."""
    return [
        Event("rollout", 0, "h", "generate", 10.0, 12.0, stage="rollout"),
        Event("rollout", 1, "h", "generate", 10.0, 11.5, stage="rollout"),
        Event("actor", 0, "h", "score", 12.0, 13.0, stage="old_log_prob"),
        Event("actor", 0, "h", "learn", 13.0, 15.0, stage="update_actor"),
        Event("rollout", 0, "h", "generate", 14.0, 16.0, stage="rollout"),
        Event("actor", 0, "h", HOSTILE, 16.0, 16.5, "lost"),
    ]


def test_stretches_of_stages_and_the_chrome_trace_that_says_them() -> None:
    made = ordered(events())
    assert made.stages() == [
        ("rollout", 10.0, 12.0),
        ("old_log_prob", 12.0, 13.0),
        ("update_actor", 13.0, 15.0),
        ("rollout", 14.0, 16.0),
    ]
    trace = made.chrome()["traceEvents"]
    stages = [one for one in trace if one.get("cat") == "stage"]
    assert [(one["name"], one["tid"], one["ts"], one["dur"]) for one in stages] == [
        ("rollout", 0, 0.0, 2e6),
        ("old_log_prob", 1, 2e6, 1e6),
        ("update_actor", 2, 3e6, 2e6),
        ("rollout", 0, 4e6, 2e6),
    ]
    learn = next(one for one in trace if one["name"] == "learn")
    assert learn["args"] == {"stage": "update_actor"} and learn["pid"] != stages[0]["pid"]
    # micro-batches of one stage are one stretch, and so are calls that overlap another stage's
    many = [Event("a", 0, "h", "score", n, n + 0.5, stage="ref") for n in range(50)]
    assert ordered(many).stages() == [("ref", 0, 49.5)]


def test_requests_are_spans_of_the_trace_and_a_lane_of_the_view() -> None:
    """Two overlapping requests to one sampler, one to another that does not say when it begins, one that failed."""
    asked = (
        QueuedRequest("actor", 7, 9.0, 10.0, 10.5, 12.0, 30, "done"),
        QueuedRequest("actor", 7, 9.0, 11.0, 11.5, 13.0, 20, "done"),
        QueuedRequest(HOSTILE, 5, 10.0, None, None, 11.0, 4, "done"),
        QueuedRequest("actor", 7, 9.5, None, None, 9.6, 0, "given up"),
    )
    made = Timeline(tuple(sorted(events(), key=lambda one: one.began)), asked, left_out=3)
    trace = made.chrome()
    found = [one for one in trace["traceEvents"] if one.get("cat") == "request"]
    first = [(one["ph"], one["name"], one["ts"]) for one in found if one["id"] == 0]
    assert first == [
        ("b", "request", 0.0), ("b", "waiting", 0.0), ("e", "waiting", 1e6), ("n", "first token", 1.5e6), ("e", "request", 3e6),
    ]  # fmt: skip
    assert [(one["ph"], one["ts"]) for one in found if one["id"] == 2] == [("b", 1e6), ("e", 2e6)]
    ends = [one["args"] for one in found if one["ph"] == "e" and one["name"] == "request"]
    assert sum(one["tokens"] for one in ends) == 54 and [one["outcome"] for one in ends].count("given up") == 1
    groups = {one["pid"] for one in trace["traceEvents"] if one.get("cat") != "request"}
    assert {one["pid"] for one in found}.isdisjoint(groups - {one["pid"] for one in found}) and made.start == 9.0
    assert trace["otherData"] == {"start": 9.0, "requests_left_out": 3}
    text, page = repr(made), made._repr_html_()
    assert "6 calls, 4 requests, 3 older requests are left out" in text and "waits 1.50 s, first token 2.00 s" in text
    assert "1 failed" in text and "\x1b" not in text and "<img src=x" not in page and not lint(page)
    assert page.count("<tr>") == 1 + 3 + 3 + 3  # stages, workers, samplers and the one whose waits are known
    assert "waiting for actor" in text and "waiting 3.00 s" in text
    assert "1 request in" in repr(Timeline((), asked[:1]))


def test_the_view_has_a_lane_for_each_stage_and_worker() -> None:
    made = ordered(events())
    text, page = repr(made), made._repr_html_()
    names = ["stage rollout", "stage old_log_prob", "stage update_actor", "actor 0", "rollout 0", "rollout 1"]
    assert [line.partition("│")[0].strip() for line in text.splitlines()[2:]] == names
    strips = dict(zip(names, re.findall(r"linear-gradient\(90deg,([^\"]+)\)", page), strict=True))
    pieces = [strip.count("rgba") for strip in strips.values()]
    assert pieces == [2, 1, 1, 3, 2, 1]
    start, end = (100 * seconds / 6.5 for seconds in (3, 5))  # learn, three seconds after the first call, two long
    _, learn, lost = re.findall(r"(rgba\([\d,.]+\)) ([\d.]+)% ([\d.]+)%", strips["actor 0"])
    assert abs(float(learn[1]) - start) < 1 and abs(float(learn[2]) - end) < 1
    assert lost[0] == f"rgba({DOWN},1)" != learn[0], "what failed has a colour that nothing else has"
    lane = text.splitlines()[-3].split("│")[1]
    assert abs(lane.index("█") - 60 * 2 / 6.5) <= 1 and lane.endswith("█") and len(lane) == 60
    assert not lint(page) and "<img src=x" not in page and "rollout 4.00 s" in text and "\x1b" not in text
    assert "nothing has run" in ordered([])._repr_html_()
    many = ordered([Event(f"g{n}", 0, "h", "m", n / 1e4, n / 1e4 + 1e-5) for n in range(5_000)])._repr_html_()
    assert many.count("<tr>") == 1 + 64 and "and 4936 more" in many


def status(again: Callable[[], ClusterStatus] | None = None) -> ClusterStatus:
    node = Node("a", "a", "127.0.0.1", True, 4, 1, 2, 0, 16 * GIB, GIB, GIB // 4)
    worker = WorkerLine("actor", 0, 7, "a", "global", "0", 3 * GIB, "learn", 1, (20 * GIB, 80 * GIB), 12.4)
    call = CallLine("actor", HOSTILE, "update_actor", 13.0)
    return ClusterStatus("here", (node,), (("global", 1, "a"),), (worker,), (), (call,), 1e9, again)


def test_a_status_says_gpu_memory_what_runs_for_how_long_and_what_is_out() -> None:
    text = repr(status())
    for words in ("2001-09-09 01:46:40 UTC", "20.00 GiB of 80.00 GiB", "learn", "12 s", "update_actor", "13 s"):
        assert words in text, words
    assert not lint(status()._repr_html_()) and "<img src" not in status()._repr_html_()


def test_the_live_table_looks_says_troubles_and_ends_with_its_cluster() -> None:
    asked: list[int] = []

    def again() -> ClusterStatus:
        asked.append(1)
        if len(asked) == 2:
            raise RuntimeError("half dead")
        if len(asked) == 4:
            raise EngineError("it was closed")
        return replace(status(), at=1e9 + len(asked))

    table = ClusterTable(status(again), every=0.02)
    thread = table._thread
    assert within(lambda: not thread.is_alive())
    assert len(asked) == 4 and "01:46:43" in table.face["html"], "the last table stays"
    assert table.face["note"].startswith("the cluster is closed") and not table.face["live"]
    table.close()


@pytest.mark.slow
def test_a_live_table_that_nobody_sees_asks_nothing_and_a_closed_one_ends() -> None:
    asked: list[int] = []

    def again() -> ClusterStatus:
        asked.append(1)
        return status()

    table = ClusterTable(status(again), every=0.02)
    assert within(lambda: len(asked) > 2)
    table.answer({"kind": "opened"})
    table.answer({"kind": "shut"})
    time.sleep(0.1)
    seen = len(asked)
    time.sleep(0.2)
    assert len(asked) == seen and table._thread.is_alive()
    table.answer({"kind": "opened"})
    assert within(lambda: len(asked) > seen)
    table.close()
    assert within(lambda: not table._thread.is_alive())


def test_logs_of_all_ranks_are_one_text_and_folds() -> None:
    one = Logs.of([("rank 0 (pid 7 on a)", "first\nsecond")])
    assert one == "first\nsecond" and one.splitlines()[-1] == "second"
    both = Logs.of([("rank 0", f"{HOSTILE}\nsecond"), ("rank 1", "")])
    assert "--- rank 1" in repr(both) and "(no output)" in repr(both) and "\x1b" not in repr(both)
    page = both._repr_html_()
    assert not lint(page) and page.count("<details") == 2 and "<img" not in page and "rank 0: 2 lines" in page


def test_gpu_memory_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ntest "$1" = --id=0,3 && echo "100, 81559" && echo "28, 81559"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert _nvidia_smi(["0", "3"]) == (128 << 20, 2 * 81559 << 20)
    program.write_text("#!/bin/sh\necho '[N/A], [N/A]'\n")
    assert _nvidia_smi(["0", "3"]) is None
    program.write_text("#!/bin/sh\nexit 9\n")
    assert _nvidia_smi(["0", "3"]) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert _nvidia_smi(["0"]) is None


def test_nsight_without_nsys_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.cluster.session._open", None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (lambda: nsight_options("default"), lambda: connect(runtime_env={"nsight": "default"})):
        with pytest.raises(
            SettingError, match="nsight=; expected nsys on the PATH of every node; found none on this one"
        ):
            ask()
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    with pytest.raises(
        SettingError, match="by the `python` of the PATH; expected .*; found none; activate the environment"
    ):
        nsight_options("default")
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}")
    assert nsight_options({"t": "cuda"}) == {"nsight": {"t": "cuda"}}
    with pytest.raises(SettingError, match="expected 'default' or options of nsys profile; found all"):
        nsight_options("all")


# --- with Ray ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Cluster:
    opened = connect(**shared.SETTINGS, start_seconds=patience(120))
    for group in list(opened.groups):  # what other files left
        group.close()
    return opened


@pytest.fixture(scope="module")
def pair(local: Cluster) -> Iterator[RayRanks]:
    with local.ranks(things.busy, 2, name="pair") as made:
        yield made


class Asks(Stage):
    """A stage whose work is a call to a group."""

    name = "old_log_prob"
    reads = ("x",)
    writes = ()

    def __init__(self, group: RayRanks) -> None:
        self.group = group

    def settings(self) -> dict[str, Any]:
        return {}

    def __call__(self, batch: DataProto) -> Outcome:
        self.group.call("sleep", 0.1)
        return Outcome(batch)


@pytest.mark.slow
def test_the_table_says_what_each_worker_does(local: Cluster, pair: RayRanks, tmp_path: Path) -> None:
    asked = STAGE.set("rollout")
    waits = [pair.submit("wait_for", str(tmp_path / "go")), pair.submit("sleep", 0.0)]
    STAGE.reset(asked)

    def busy() -> ClusterStatus | None:
        found = local.status()
        return found if [(one.state, one.waiting) for one in found.workers] == [("wait_for", 1)] * 2 else None

    now, later = within(busy), within(busy)
    assert now is not None and later is not None
    assert all((one.resident or 0) > 10 << 20 for one in now.workers)
    assert all(0 < (a.seconds or 0) < (b.seconds or 0) for a, b in zip(now.workers, later.workers, strict=True))
    assert all(one.gpu is None for one in now.workers), "no GPU was given to them"
    assert [(one.group, one.method, one.stage) for one in now.calls] == [
        ("pair", "wait_for", "rollout"),
        ("pair", "sleep", "rollout"),
    ]
    (tmp_path / "go").touch()
    for one in waits:
        one.result()
    assert [one.state for one in local.status().workers] == ["idle"] * 2 and not local.status().calls


@pytest.mark.slow
def test_a_mute_worker_is_said_soon_and_not_asked_again_and_again(
    local: Cluster, pair: RayRanks, tmp_path: Path
) -> None:
    wait = pair.submit("hold_the_interpreter", int(patience(3)), str(tmp_path))
    assert within(lambda: len(list(tmp_path.iterdir())) == 2)
    looks = [local.status(), local.status()]
    assert not wait.done, "it is said while the worker is mute"
    assert all(one.state == MUTE and one.resident is None for look in looks for one in look.workers)
    out = dict(local._unanswered)
    assert len(out) == 2 and local.status() and dict(local._unanswered) == out, "the same question is still out"
    wait.result()
    assert within(lambda: [one.state for one in local.status().workers] == ["idle"] * 2)


@pytest.mark.slow
def test_live_while_the_driver_waits_and_it_costs_next_to_nothing(
    local: Cluster, pair: RayRanks, tmp_path: Path
) -> None:
    table = ClusterTable(local.status(), every=0.2)
    seen: list[str] = []
    table.observe(lambda change: seen.append(change["new"]["html"]), "face")
    waits = pair.submit("wait_for", str(tmp_path / "go"))
    assert within(lambda: sum("wait_for" in one for one in seen) >= 2) and table.face["note"] == ""
    (tmp_path / "go").touch()
    waits.result()
    spent = []
    for _ in range(20):
        began = time.process_time(), time.perf_counter()
        table.look()
        spent.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    table.close()
    processor, wall = (sorted(one)[10] for one in zip(*spent, strict=True))
    print(f"a look: {1000 * processor:.1f} ms of this process, {1000 * wall:.1f} ms in all")
    assert within(lambda: not table._thread.is_alive())


@pytest.mark.slow
def test_calls_know_the_stage_that_made_them(local: Cluster, pair: RayRanks) -> None:
    perform(Asks(pair), DataProto({}, {"x": ["a"]}))
    last = [event for event in local.timeline.events if event.name == "sleep"][-2:]
    assert sorted((event.rank, event.stage) for event in last) == [(0, "old_log_prob"), (1, "old_log_prob")]
    pair.call("sleep", 0.0)
    assert local.timeline.events[-1].stage == "" and STAGE.get() == ""


def operations(path: Path) -> dict[str, int]:
    with gzip.open(path, "rt") as file:
        names = [one.get("name", "") for one in json.load(file)["traceEvents"]]
    return {name: names.count(name) for name in set(names)}


@pytest.mark.slow
def test_a_profile_of_a_block_is_a_chrome_trace_a_rank(local: Cluster, pair: RayRanks, tmp_path: Path) -> None:
    pair.call("multiply", 8)  # before: in no trace
    with local.profile("pair", tmp_path / "traces") as made:
        assert pair.call("multiply", 16) == [32.0] * 2
        assert pair.call("multiply", 16) == [32.0] * 2
    pair.call("multiply", 8)
    assert [file.name for file in made.files] == ["pair-rank0.json.gz", "pair-rank1.json.gz"]
    for file in made.files:
        counts = operations(file)
        # two products forward, four backward; the other thread's convolution is there, too
        assert counts["aten::mm"] == 6 and counts["aten::conv1d"] == 2, counts
    assert "2 traces" in repr(made) and not lint(made._repr_html_())
    with local.profile("pair", tmp_path / "traces") as again:
        pass
    assert [file.name for file in again.files] == ["pair-rank0-2.json.gz", "pair-rank1-2.json.gz"]


@pytest.mark.slow
def test_a_profile_of_chosen_steps_watches_a_job(local: Cluster, pair: RayRanks, tmp_path: Path) -> None:
    watch = local.profile(pair, tmp_path, steps=(2, 4))
    watch.on_start(1, 4)
    for step in range(1, 5):
        pair.call("multiply", 4)
        if step < 4:  # the fourth step ends the job from within
            watch.on_step(StepReport(step=step, epoch=0, metrics={}, trace=Trace(DataProto({}, {"x": ["a"]}))))
    watch.on_end(None)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"pair-rank{rank}-step{step}.json.gz" for rank in (0, 1) for step in (2, 4)]
    assert all(operations(path)["aten::mm"] == 3 for path in tmp_path.iterdir())
    with pytest.raises(SettingError, match="expected numbers from 1 on; found"):
        local.profile("pair", tmp_path, steps=(0,))
    with pytest.raises(SettingError, match="expected steps="):
        local.profile("pair", tmp_path).on_start(1, 4)
    gone = Profile(lambda: local._group("lost"), tmp_path, (1,))
    gone.on_start(1, 2)  # a warning, and the job goes on
    gone.on_end(None)
    assert not gone.files


@pytest.mark.slow
def test_logs_in_one_call(local: Cluster, pair: RayRanks) -> None:
    pair.call("say", "hello")
    both = local.logs("pair")
    assert ["hello 0" in text.splitlines() for _, text in both.parts] == [True, False]
    assert "--- rank 1 (pid" in both and "hello 1" in local.logs(pair, 1).splitlines()
    with pytest.raises(SettingError, match="no group 'actor'; expected one of pair"):
        local.logs("actor")


@pytest.mark.long
@pytest.mark.slow
def test_a_closed_cluster_ends_its_live_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster of its own, with a program in nsys's place."""
    program = tmp_path / "nsys"
    program.write_text(
        "#!/bin/sh\n# Ray gives `nsys profile … python …`; it takes whichever python the PATH has\n"
        'while [ $# -gt 0 ]; do case "$1" in python|*/python*) shift; '
        f'exec env UNDER_NSYS=1 {sys.executable} "$@";; esac; shift; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]))
    from workbench.cluster import session

    if session._open is not None:
        session._open.close()
    with connect(cpus=2, gpus=0, object_store_memory=100 << 20) as own:
        watched = own.ranks(things.busy, 1, name="watched", nsight={"t": "cuda,nvtx"}, start_timeout=LONG)
        plain = own.ranks(things.busy, 1, name="plain")
        environments = [psutil.Process(one.facts[0]["pid"]).environ() for one in (watched, plain)]
        assert ["UNDER_NSYS" in one for one in environments] == [True, False]
        table = ClusterTable(own.status(), every=0.05)
        assert within(lambda: table.look())
    assert within(lambda: not table._thread.is_alive())
    assert "is closed" in table.face["note"] and "watched" in table.face["html"]
