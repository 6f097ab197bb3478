"""The health page of a training: read over HTTP while a real job runs, stalled and not; metrics as Prometheus' own parser reads them."""

from __future__ import annotations

import functools
import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.lint import lint
from support.patience import LONG, within

import workbench as wb
from workbench import cli
from workbench.base.activity import HERE, Queue
from workbench.base.errors import SettingError
from workbench.base.runtime import Control
from workbench.cluster.status import WorkerLine
from workbench.jobs import health as page
from workbench.jobs import runner, train
from workbench.jobs.health import Watcher, exposition, peak
from workbench.jobs.runner import OK, run_notebook
from workbench.runs.folder import read_metrics


def free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
    try:
        link.request("GET", path, headers=headers)
        reply = link.getresponse()
        return reply.status, reply.getheader("Content-Type") or "", reply.read().decode()
    finally:
        link.close()


def families(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name → label values, in the order of the labels' names → value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, {})[tuple(one.labels.values())] = one.value
    return found


class Gate:
    """A reward that scores at once, until `closed` is set; then it waits for `again`."""

    def __init__(self) -> None:
        self.closed, self.inside, self.again = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, response: str) -> float:
        if self.closed.is_set():
            self.inside.set()
            assert self.again.wait(LONG)
        return float(len(response) % 2)


@pytest.fixture
def pipe(tiny: str) -> Iterator[tuple[Any, Gate]]:
    gate = Gate()
    engine = wb.engines.local(tiny, device="cpu")
    reward = wb.rewards.Reward(gate, in_process=True, timeout=LONG)
    yield wb.recipes.grpo(engine, reward=reward, group_size=2, max_tokens=8), gate
    gate.again.set()


ROWS = functools.partial(wb.rows, "data/arith/train.parquet", max_prompt_length=256, limit=12)
NAME = "<img src=x onerror=alert(1)>"


class Second:
    """Closes the gate when the first step is done."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_start(self, start: int, steps: int) -> None: ...

    def on_step(self, report: Any) -> None:
        if report.step == 1:
            self.gate.closed.set()

    def on_end(self, error: BaseException | None) -> None: ...


def test_a_job_is_read_while_it_runs_and_when_it_stalls(
    pipe: tuple[Any, Gate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2's reward hangs: running, then stalled with a 503, then running again, then done."""
    pipeline, gate = pipe
    port, patient = free(), {"least": LONG, "stalled": 5.0}
    made: list[Watcher] = []

    def watcher(*given: Any) -> Watcher:
        made.append(Watcher(*given, **patient))
        return made[-1]

    monkeypatch.setattr(train, "Watcher", watcher)
    done: list[Any] = []
    settings = {"steps": 3, "batch_size": 4, "run": tmp_path / NAME, "health": port, "observers": [Second(gate)]}
    job = threading.Thread(daemon=True, target=lambda: done.append(wb.train_blocking(pipeline, ROWS(), **settings)))
    job.start()
    assert gate.inside.wait(LONG / 2)
    status, kind, text = get(port, "/health.json")
    said = json.loads(text)
    assert (status, kind, said["state"], said["ok"]) == (200, "application/json", "running", True)
    assert (said["step"], said["steps"], said["run"]) == (1, 3, NAME)
    assert said["phases"][0]["stage"] == "reward" and said["trained"] > said["generated"] > 0 < said["mfu"] < 1
    status, kind, text = get(port, "/metrics")
    found = families(text)
    assert status == 200 and kind.startswith("text/plain; version=0.0.4")
    assert found["workbench_state"][("running",)] == 1 and sum(found["workbench_state"].values()) == 1
    assert found["workbench_step"][()] == 1 and found["workbench_steps"][()] == 3
    assert ("reward",) in found["workbench_phase_seconds"] and found["workbench_policy_version"][("actor",)] == 1
    rows = read_metrics(tmp_path / NAME / "metrics.jsonl")
    assert found["workbench_metric"][("critic/score/mean",)] == rows[-1]["critic/score/mean"]
    assert found["workbench_stage_seconds_total"][("update_actor",)] == pytest.approx(rows[-1]["timing_s/update_actor"])
    assert found["workbench_trained_tokens_total"][()] == rows[-1]["perf/total_num_tokens"]
    sampler = HERE.name_of(pipeline.learners()["actor"])
    assert found["workbench_requests_total"][("done", sampler)] == HERE.queues[sampler].done >= 16
    assert found["workbench_request_seconds_count"][(sampler,)] >= 16
    # a person in a browser sees it; another site's page and a name bound to loopback do not
    status, kind, text = get(port, "/health", **{"Sec-Fetch-Site": "none"})
    assert status == 200 and kind.startswith("text/html") and "<img" not in text and "onerror" in text
    assert lint(text[text.index("<body>") :]) == []
    assert get(port, "/health", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert get(port, "/health", Host="evil.example")[0] == 403 and get(port, "/other")[0] == 404
    trace = json.loads(get(port, "/timeline.json")[2])["traceEvents"]
    assert sum(one["ph"] == "b" and one["name"] == "request" for one in trace) >= 16
    # what goes wrong in the page is said to who asks
    with monkeypatch.context() as broken:
        broken.setattr(made[0], "look", lambda: 1 / 0)
        assert get(port, "/health.json")[0] == 500
    # nothing ends any more
    made[0].least, made[0].stalled = 0.05, 1e-9
    assert within(lambda: get(port, "/health.json")[0] == 503)
    stalled = json.loads(get(port, "/health.json")[2])
    assert stalled["state"] == "stalled" and "reward for" in stalled["why"]
    assert get(port, "/metrics")[0] == 200 and "stalled: " in get(port, "/health")[2]
    made[0].least = LONG
    assert get(port, "/health.json")[0] == 200
    gate.again.set()
    job.join(LONG)
    assert done[0].rows[-1]["training/global_step"] == 3 and made[0].look().state == "done"
    with pytest.raises(OSError):
        get(port, "/health")


def test_a_port_in_use_is_said_before_anything_is_done(
    pipe: tuple[Any, Gate], tmp_path: Path, make_notebook: Any
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        with pytest.raises(SettingError, match=rf"port {port} of 127.0.0.1 .* in use"):
            wb.train_blocking(pipe[0], ROWS(), steps=1, batch_size=4, run=tmp_path / "r", health=port)
        with pytest.raises(SettingError, match=f"port {port}"):
            run_notebook(make_notebook("1"), {"run": str(tmp_path / "r")}, health=port)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("wrong", [-1, 70000, "9464", 1.5])
def test_a_port_that_is_none(wrong: Any) -> None:
    with pytest.raises(SettingError, match="health"):
        page.port_of(wrong)


def test_the_argument_and_the_jobs_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [page.port_of(one) for one in (None, False, True, 0, 80)] == [None, None, page.PORT, 0, 80]
    monkeypatch.setenv("WORKBENCH_HEALTH", "9470")
    assert page.port_of(None) == 9470 and page.port_of(False) is None
    monkeypatch.setenv("WORKBENCH_HEALTH", "soon")
    with pytest.raises(SettingError, match="WORKBENCH_HEALTH"):
        page.port_of(None)


def test_a_job_hands_the_port_to_its_notebook(
    make_notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(
        runner, "_execute", lambda *given: (seen.append(os.environ.get("WORKBENCH_HEALTH")), OK, "")[1:]
    )
    monkeypatch.setattr(runner, "check_port", lambda port: None)
    path = make_notebook("1")
    for asked in ([], ["--health"], ["--health", "0"]):
        assert cli.main(["train", str(path), "-p", f"run={tmp_path / 'r'}", *asked]) == OK
    assert seen == [None, "9464", "0"] and "WORKBENCH_HEALTH" not in os.environ


def test_workers_symptoms_and_failures_are_shown(pipe: tuple[Any, Gate], tmp_path: Path) -> None:
    workers = [
        WorkerLine("actor", 0, 7, "a", "", "", 1 << 30, "learn", 0, seconds=3.5),
        WorkerLine("sampler", 1, 8, "a", "", "", None, "does not answer", 0),
    ]
    made = Watcher(tmp_path, pipe[0], Control(), workers=lambda: workers)
    assert made.look().state == "starting"
    made.on_start(1, 5)
    rows = [{"training/global_step": n, "actor/grad_norm": 100.0 if n == 5 else 1.0} for n in range(1, 6)]
    for row in rows:
        made._watch.look(row)
    made.control.stopping = True
    assert made.look().state == "stopping"
    made.control.stopping, made.control.holding = False, True
    assert made.look().state == "paused" and made.look().ok
    made.on_step(SimpleNamespace(step=1))  # type: ignore[arg-type] # it has no metrics: logged, and the training goes on
    made.on_end(ValueError("boom\nmore"))
    look = made.look()
    assert not look.ok and (look.state, look.why) == ("failed", "ValueError: boom") and look.mfu is None
    assert next((one["group"], one["doing"]) for one in look.to_dict()["workers"]) == ("actor", "learn")
    found = families(exposition(look).decode())
    assert found["workbench_worker_seconds"] == {("learn", "actor", "0"): 3.5, ("does not answer", "sampler", "1"): 0.0}
    assert found["workbench_worker_resident_bytes"] == {("actor", "0"): float(1 << 30)}
    assert found["workbench_symptom_since_step"] == {("the gradient jumps",): 5.0}
    assert "workbench_mfu_ratio" not in found  # unknown: no number is made up
    assert "the gradient jumps since step 5" in repr(look) and "does not answer" in look._repr_html_()


def test_what_is_left_and_how_long_questions_wait(pipe: tuple[Any, Gate], tmp_path: Path) -> None:
    """Six steps of 2.5 s are 15 s; 3 s in the queue over two questions, 10 s to the answers of four."""
    queue = Queue(waiting=2, running=1, done=4, failed=3, begun=2, queue_seconds=3.0, seconds=10.0)
    look = Watcher(tmp_path, pipe[0], Control()).look()
    text = str(replace(look, step=4, steps=10, median_seconds=2.5, queues={"actor": queue}))
    assert "step 4 of 10, 15 s to go" in text
    assert "to go" not in str(replace(look, step=10, steps=10, median_seconds=2.5))
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["actor"])
    assert row == ["actor", "2", "1", "4", "3", "1.50", "s", "2.50", "s"]
    unasked = str(replace(look, queues={"actor": Queue(waiting=1)}))
    assert ["actor", "1", "0", "0", "0", "–", "–"] in [line.split() for line in unasked.splitlines()]


def test_the_peak_of_a_processor_is_measured() -> None:
    rate, how = peak([""])
    assert rate is not None and rate > 1e8 and "CPU" in how


def test_the_peak_is_of_what_the_learner_computes_on(tmp_path: Path, pipe: tuple[Any, Gate]) -> None:
    """This process may have no GPU where its workers have some, or one that its learner does not use."""
    assert peak(["NVIDIA H100 80GB HBM3"] * 2) == (989e12, "H100's data sheet")
    assert peak(["Abacus 9", "Abacus 9"]) == (None, "no figures are known of Abacus 9")
    assert peak(["NVIDIA A100-SXM4-80GB", ""]) == (None, "ranks on different devices: CPU, NVIDIA A100-SXM4-80GB")
    assert peak([]) == (None, "the learner does not say what it computes on")
    made, learner = Watcher(tmp_path, pipe[0], Control()), pipe[0].learners()["actor"]
    assert learner.cards() == [""]
    learner.cards = lambda: ["NVIDIA H100 80GB HBM3"] * 8
    made.on_start(1, 5)
    look = made.look()
    assert (look.peak, look.peak_source) == (989e12, "H100's data sheet")
