"""Rows C of the scorecard in a real kernel and a real JupyterLab: interrupts, held memory, redefined code, a server that dies."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import warm_starts
from support.lab import CHROMIUM, FLAGS, laboratory, page_running_all, put, until
from support.patience import LONG, within

import workbench as wb
from workbench.runs.folder import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Kernel:
    """A real ipykernel: cells in, what they printed and what they raised out."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(kernel_name="python3")
        self._manager.kernel_spec.argv[0] = sys.executable
        self._manager.start_kernel(cwd=str(ROOT), env={**os.environ, "OMP_NUM_THREADS": "1"})
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LONG)

    def start(self, code: str) -> str:
        """Begin a cell; its id, for `end`."""
        return str(self._client.execute(code, store_history=True))

    def end(self, cell: str, timeout: float = LONG) -> tuple[str, str]:
        """(what it printed or displayed as text, name of what it raised) when it is over and the prompt is back."""
        printed, raised = [], ""
        limit = time.monotonic() + timeout
        while True:
            message = self._client.get_iopub_msg(timeout=max(limit - time.monotonic(), 0.01))
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed.append(content["text"])
            elif kind in ("execute_result", "display_data"):
                printed.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                raised = content["ename"]
                printed.append("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(printed), raised

    def run(self, code: str, timeout: float = LONG) -> str:
        """What a cell printed. It must not raise."""
        printed, raised = self.end(self.start(code), timeout)
        assert not raised, printed
        return printed

    def interrupt(self) -> None:
        """What the stop button does: SIGINT to the kernel's process group."""
        self._manager.interrupt_kernel()

    def wait_for(self, cell: str, text: str) -> None:
        """Until a running cell has printed it."""
        while True:
            message = self._client.get_iopub_msg(timeout=LONG)
            mine = message["parent_header"].get("msg_id") == cell and message["msg_type"] == "stream"
            if mine and text in message["content"]["text"]:
                return

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def memory(self) -> int:
        """Bytes that are its own."""
        return int(self.process.memory_full_info().uss)

    def cpu(self, seconds: float) -> float:
        """Seconds of processor time that it takes meanwhile."""
        before = sum(self.process.cpu_times()[:2])
        time.sleep(seconds)
        return sum(self.process.cpu_times()[:2]) - before

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@contextmanager
def kernel(start: Callable[[], AbstractContextManager[None]] = warm_starts.cold) -> Iterator[Kernel]:
    with start():  # a fork's own memory grows with every page that it touches, and most of these tests measure it
        made = Kernel()
    try:
        yield made
    finally:
        made.close()


# --- C1: an interrupt in the middle of a stage ----------------------------------------------------

STEP = """
import hashlib, json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
import workbench as wb
torch.set_num_threads(1)
ROWS = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=64)

def fresh(max_tokens=96):
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu", micro_batch_tokens=512, max_wave=20)
    sampling = wb.SamplingSettings(max_tokens=max_tokens, ignore_eos=True)
    pipe = wb.recipes.grpo(engine, wb.rewards.math_string, group_size=8, sampling=sampling, ppo_epochs=2,
                           ppo_mini_batch_size=2)
    return wb.Stepper(pipe, ROWS.batch(4)), engine

def digest(s, engine):
    parts = {}
    def put(name, tensor):
        parts[name] = hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=8).hexdigest()
    for name in s.batch.batch:
        put(name, s.batch[name])
    for name in s.batch.non_tensor_batch:
        plain = [one.with_value(one.value).timed(0.0) if name == "score" else one for one in s.batch[name]]
        parts[name] = hashlib.blake2b(repr(plain).encode(), digest_size=8).hexdigest()
    state = engine.snapshot()
    for name, tensor in {**state["weights"], **(state["optimizer"] or {})}.items():
        put(name, tensor)
    parts |= {"version": state["version"], "steps": state["steps"], "at": list(s.trace.names)}
    return json.dumps(parts, sort_keys=True)
"""
DIGEST = "print(digest(s, engine))"
STAGES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """One kernel for the tests that leave it usable: each of them shows that it does."""
    with kernel() as made:
        made.run(STEP)
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[str, float]]:
    """Stage → (what stands after it, seconds it took) in a kernel that nobody interrupts."""
    found = {}
    with kernel(nullcontext) as quiet:
        quiet.run(STEP)
        quiet.run("s, engine = fresh()")
        for stage in STAGES:
            began = time.monotonic()
            quiet.run(f"s.run(until={stage!r});")
            seconds = time.monotonic() - began
            found[stage] = (quiet.run(DIGEST), seconds)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "moments"),
    [
        ("rollout", (0.5,)),
        ("update_actor", (0.3, 0.75)),
        pytest.param("rollout", (0.1, 0.5, 0.8), marks=pytest.mark.long),
        pytest.param("old_log_prob", (0.2, 0.6), marks=pytest.mark.long),
        pytest.param("update_actor", (0.2, 0.4, 0.6, 0.75, 0.9), marks=pytest.mark.long),
    ],
)
def test_C1_a_stage_interrupted_again_and_again_ends_in_the_very_same_numbers(
    shared: Kernel, undisturbed: dict[str, tuple[str, float]], stage: str, moments: tuple[float, ...]
) -> None:
    before = STAGES[: STAGES.index(stage)]
    shared.run("s, engine = fresh();" + (f"s.run(until={before[-1]!r});" if before else ""))
    stood, hit = shared.run(DIGEST), 0
    for moment in moments:
        cell = shared.start(f"s.run(until={stage!r});")
        time.sleep(moment * undisturbed[stage][1])
        shared.interrupt()
        printed, raised = shared.end(cell)
        if not raised:  # it was quicker this time
            shared.run(f"s.back(to={stage!r});")
            continue
        hit += 1
        assert raised == "KeyboardInterrupt", printed
        assert shared.run(DIGEST) == stood
        assert any(shared.cpu(0.5) < 0.25 for _ in range(3)), "work that was given up goes on"
    assert hit, "no interrupt came in time"
    shared.run(f"s.run(until={stage!r});")
    assert shared.run(DIGEST) == undisturbed[stage][0]


class InterruptAt:
    """A profiler that raises what an interrupt raises at the n-th call of Python code."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.seen += event == "call"
        if event == "call" and self.seen == self.at:
            raise KeyboardInterrupt

    def run(self, work: Any) -> bool:
        """Whether it came to that."""
        sys.setprofile(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def standing(s: wb.Stepper, engine: Any) -> list[Any]:
    state = engine.snapshot()
    tensors = {**s.batch.batch, **state["weights"], **(state["optimizer"] or {})}
    return [s.trace.names, state["version"], state["steps"], {name: one.clone() for name, one in tensors.items()}]


def equal(one: list[Any], two: list[Any]) -> bool:
    return one[:3] == two[:3] and all(torch.equal(tensor, two[3][name]) for name, tensor in one[3].items())


def test_C1_an_update_interrupted_at_any_call_stands_before_it_or_after_it(tiny: str) -> None:
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu", micro_batch_tokens=256)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(engine, wb.rewards.math_string, group_size=2, max_tokens=8, ppo_mini_batch_size=1)
    s = wb.Stepper(pipe, rows.batch(2)).run(until="advantage")
    before = standing(s, engine)
    after = standing(s.run(), engine)
    s.back()
    counted = InterruptAt(0)
    counted.run(s.run)  # not the first, which imports and builds
    s.back()
    places, raised = random.Random(0), 0
    for _ in range(12):
        interrupted = InterruptAt(places.randrange(1, counted.seen)).run(s.run)
        stood = standing(s, engine)
        # Python drops what is raised while a generator or an object is collected: then the update is whole
        assert equal(stood, after) or (interrupted and equal(stood, before))
        raised += interrupted
        assert torch.is_grad_enabled()
        s.run()
        assert equal(standing(s, engine), after)
        s.back()
        assert equal(standing(s, engine), before)
    assert raised >= 10


def test_C1_an_interrupt_between_two_weights_of_one_optimizer_step_is_taken_back(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: half of the weights have moved, nothing says so yet, and gradients are left."""
    engine = wb.engines.local(tiny, lr=1e-3, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    s = wb.Stepper(wb.recipes.grpo(engine, wb.rewards.math_string, group_size=2, max_tokens=8), rows.batch(2))
    before = standing(s.run(until="advantage"), engine)

    def half(adam: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            adam.param_groups[0]["params"][0].add_(1.0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", half)
        with pytest.raises(KeyboardInterrupt):
            s.run()
    assert equal(standing(s, engine), before)
    after = standing(s.run(), engine)
    fresh = wb.engines.local(tiny, lr=1e-3, device="cpu")
    quiet = wb.Stepper(wb.recipes.grpo(fresh, wb.rewards.math_string, group_size=2, max_tokens=8), rows.batch(2)).run()
    assert equal(after, standing(quiet, fresh))


# --- C2: an interrupt while a large local is held -------------------------------------------------

HOLDS = """
def holds(how):
    large = torch.ones(125_000_000)
    if how == "interrupted":
        print("held", flush=True)
        while True:
            time.sleep(0.01)
    raise ValueError("no")

def outer(how):
    try:
        holds(how)
    except ValueError as cause:
        raise RuntimeError("outer") from cause
"""
LOOKS = """
entry = sys.last_value.__cause__.__traceback__
while entry.tb_next is not None:
    entry = entry.tb_next
print(len(entry.tb_frame.f_locals["large"]))
del entry
"""
CURES = {
    "the next stage": "s.next();",
    "the helper": "import workbench.base.memory; workbench.base.memory.free_memory();",
}


@pytest.mark.parametrize(
    ("cure", "how"),
    [
        ("the next stage", "interrupted"),
        ("the helper", "raised"),
        pytest.param("the next stage", "raised", marks=pytest.mark.long),
        pytest.param("the helper", "interrupted", marks=pytest.mark.long),
    ],
)
def test_C2_what_an_error_held_is_given_back_by_the_next_stage_or_the_helper(
    shared: Kernel, how: str, cure: str
) -> None:
    shared.run("s, engine = fresh(max_tokens=16); s.run();" + HOLDS)  # everything that a stage loads is loaded
    shared.run(
        "import workbench.base.memory; s, engine = fresh(max_tokens=16); s.next(); workbench.base.memory.free_memory();"
    )
    baseline = shared.memory()
    cell = shared.start(f"outer({how!r})")
    if how == "interrupted":
        shared.wait_for(cell, "held")
        shared.interrupt()
    _, raised = shared.end(cell)
    assert raised == ("KeyboardInterrupt" if how == "interrupted" else "RuntimeError")
    shared.run("import gc; gc.collect()")
    assert shared.memory() > baseline + 450 * 2**20, "the fault was not there"
    if how == "raised":  # until then a debugger finds the locals, and looking holds them once more
        assert "125000000" in shared.run(LOOKS)
    shared.run(CURES[cure])
    assert shared.memory() < 1.05 * baseline, (shared.memory() >> 20, baseline >> 20)


def test_C2_frames_that_will_go_on_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.base import memory

    def goes_on() -> Iterator[int]:
        large = [1]
        try:
            raise ValueError("caught inside")
        except ValueError as error:
            monkeypatch.setattr(sys, "last_value", error, raising=False)
        yield len(large)
        large.append(2)
        yield len(large)

    def breaks() -> None:
        mine = [1]
        raise KeyError(len(mine))

    going = goes_on()
    assert next(going) == 1
    assert memory.forget_last_error() and not memory.forget_last_error()
    assert next(going) == 2
    with pytest.raises(KeyError) as caught:
        breaks()
    monkeypatch.setattr(sys, "last_value", caught.value)
    frame = caught.tb.tb_next.tb_frame  # type: ignore[union-attr]
    assert frame.f_locals == {"mine": [1]}
    assert memory.forget_last_error() and frame.f_locals == {} and going is not None
    assert memory.free_memory() >= 0


# --- C5: a function or a stage defined anew -------------------------------------------------------

DEFINED = """
def limit():
    return LIMIT

def long(response):
    return float(len(response) >= limit())

def short(response):
    return float(len(response) < LENGTH)

class Mine(wb.stages.Rollout):
    def __call__(self, batch):
        return super().__call__(batch)  # LENGTH
"""
MADE = """
engine = wb.engines.local("data/tiny-arith", device="cpu")
sampling = wb.SamplingSettings(max_tokens=8)
pipe = wb.recipes.grpo(engine, REWARD, group_size=2, max_tokens=8)
s = wb.Stepper(pipe.with_stage("rollout", Mine(engine, group_size=2, sampling=sampling)), ROWS.batch(2))
s.run(until="reward");
"""
TOLD = "reward was made with an earlier definition of short: replace('reward', BY) uses the new one"
HISTORY = "print(*[s.batch.origins[name].settings for name in ('reward', 'responses')])"


@pytest.mark.parametrize(
    ("reward", "by"),
    [("short", "short"), ("wb.rewards.Rubric({'a': short, 'b': wb.rewards.math_string})", "…")],
)
def test_C5_code_defined_anew_is_used_or_said_not_to_be(shared: Kernel, reward: str, by: str) -> None:
    told = TOLD.replace("BY", by)
    shared.run(DEFINED.replace("LENGTH", "1000"))
    shared.run(MADE.replace("REWARD", reward))
    first = shared.run(HISTORY).split()
    assert "earlier definition" not in shared.run("print(repr(s), s._repr_html_())")
    shared.run(DEFINED.replace("LENGTH", "1000"))  # the cell was run again, unchanged
    assert "earlier definition" not in shared.run("print(repr(s), s._repr_html_())")
    shared.run(DEFINED.replace("LENGTH", "0"))
    assert told in shared.run("print(repr(s))") and "earlier definition of short" in shared.run(
        "print(s._repr_html_())"
    )
    assert "rollout is of an earlier definition of Mine: make a new Mine(…)" in shared.run("print(repr(s))")
    shared.run("s.back(to='rollout').run(until='reward');")
    assert shared.run(HISTORY).split() == first and "1000" in shared.run("print(s.trace['reward'].source)")
    shared.run(f"s.back(to='rollout').replace('reward', {reward})")
    shared.run("s.replace('rollout', Mine(engine, group_size=2, sampling=sampling)).run(until='reward');")
    second = shared.run(HISTORY).split()
    assert second[0] != first[0] and second[1] != first[1]
    assert "1000" not in shared.run("print(s.trace['reward'].source, s.trace['rollout'].source)")
    assert "earlier definition" not in shared.run("print(repr(s), s._repr_html_())")
    if by == "short":
        assert shared.run("print(s.batch['reward'].sum().item())").strip() == "0.0"


@pytest.mark.parametrize("in_process", [True, False])
def test_C5_a_helper_defined_anew_is_in_the_history_and_used_or_said_not_to_be(
    shared: Kernel, in_process: bool
) -> None:
    """The function itself stays as it was; what it calls does not. Workers have what was sent to them."""
    shared.run(DEFINED.replace("LENGTH", "1000").replace("LIMIT", "0"))
    shared.run(MADE.replace("REWARD", f"wb.rewards.Reward(long, in_process={in_process})"))
    first = shared.run(HISTORY)
    assert shared.run("print(s.batch['reward'].sum().item())").strip() == "4.0"
    shared.run(DEFINED.replace("LENGTH", "1000").replace("LIMIT", "1000"))
    told = "reward was made with an earlier definition of limit: replace('reward', …) uses the new one"
    assert (told in shared.run("print(repr(s))")) is not in_process
    shared.run("s.back(to='reward').run(until='reward');")
    assert shared.run("print(s.batch['reward'].sum().item())").strip() == ("0.0" if in_process else "4.0")
    assert (shared.run(HISTORY) == first) is not in_process
    assert ("return 1000" if in_process else "return 0") in shared.run("print(s.trace['reward'].source)")
    shared.run("s.back(to='reward').replace('reward', long).run(until='reward');")
    assert shared.run("print(s.batch['reward'].sum().item())").strip() == "0.0"
    assert "earlier definition" not in shared.run("print(repr(s))") and shared.run(HISTORY) != first


# --- C10: the browser closed, the server gone -----------------------------------------------------

TRAINS = """
import os, time
os.chdir({root!r})
import workbench as wb

def score(response: str) -> float:
    time.sleep(0.05)  # the cores are the browser's meanwhile
    return float(len(response) % 3)

engine = wb.engines.local("data/tiny-arith", lr=1e-4, device="cpu")
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
pipe = wb.recipes.grpo(engine, score, group_size=2, max_tokens=32)
await wb.train(pipe, rows, steps=steps, batch_size=4, run=run, resume="auto", save_freq=5, trackers=())
"""
FOLLOWS = "import workbench as wb\nawait wb.load_run({run!r}).follow(0.5)"
ASKED = 'run: str = ""  # run folder\nsteps: int = 5000  # training steps'


def document(*cells: str) -> dict[str, Any]:
    made = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
        for n, source in enumerate(cells)
    ]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": made, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}


def steps_of(run: Path) -> list[int]:
    return [int(row["training/global_step"]) for row in read_metrics(run / "metrics.jsonl")]


def wait_until(ready: Callable[[], bool]) -> None:
    assert within(ready, every=0.2)


def step_on(page: Any) -> int:
    """The largest step that a page shows."""
    text = page.locator(".jp-Notebook").inner_text().replace("\xa0", " ")
    return max((int(found) for found in re.findall(r"step (\d+)/5000", text)), default=0)


@contextmanager
def page_of(lab: str, notebook: str) -> Iterator[Any]:
    """The page of a notebook of which no cell is run."""
    from playwright.sync_api import sync_playwright

    address, token = lab.split("|")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(1000 * LONG)
        page.goto(f"{address}/doc/workspaces/{os.urandom(4).hex()}/tree/notebooks/{notebook}?token={token}")
        page.get_by_text("| Idle").first.wait_for()
        yield page
        browser.close()


def kill_the_server(address: str) -> None:
    """SIGKILL to the JupyterLab that was started there, as a machine's memory killer would send it."""
    port = int(re.findall(r":(\d+)\|", address)[0])
    listening = [one for one in psutil.net_connections("tcp") if one.laddr.port == port and one.status == "LISTEN"]
    assert len({one.pid for one in listening}) == 1
    os.kill(listening[0].pid, signal.SIGKILL)


@pytest.fixture
def job(make_notebook: Any, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A job as a process of its own, and its run folder."""
    notebook = make_notebook(TRAINS.format(root=str(ROOT)), parameters=ASKED)
    run = tmp_path / "job"
    command = [sys.executable, "-m", "workbench.cli", "train", str(notebook), "-p", f"run={run}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, run
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (make browser installs one where apt can)")
def test_C10_a_closed_tab_and_a_server_that_dies_stop_no_job_and_the_disk_shows_it(
    job: tuple[subprocess.Popen[bytes], Path], cold: None, tmp_path: Path
) -> None:
    process, run = job
    cell = tmp_path / "cell"
    trains = f"run, steps = {str(cell)!r}, 5000\n" + TRAINS.format(root=str(ROOT))
    with laboratory(tmp_path / "first") as lab:
        (tmp_path / "first" / "root" / "notebooks" / "job").symlink_to(run)
        put(lab, "cell.ipynb", document(trains))
        with page_running_all(lab, "cell.ipynb") as page:
            until(page, lambda: len(steps_of(cell)) > 2)
        closed = len(steps_of(cell))
        wait_until(lambda: len(steps_of(cell)) > closed + 3)  # the tab is closed, the cell goes on
        wait_until(lambda: (run / "notebook.ipynb").exists() and len(steps_of(run)) > 2)
        with page_of(lab, "job/notebook.ipynb") as page:
            wait_until(lambda: "step " in (run / "notebook.ipynb").read_text())
            page.reload()
            page.wait_for_selector(".jp-Notebook .jp-Cell")
            until(page, lambda: step_on(page) > 0)
            seen = step_on(page)
        kill_the_server(lab)
    wait_until(lambda: len(steps_of(run)) > seen + 3)
    assert process.poll() is None
    wait_until(lambda: wb.load_run(cell).state == "died")  # a kernel goes with its server; what it did is on disk
    done = wb.load_run(cell).checkpoints[-1]
    with laboratory(tmp_path / "second") as lab:
        (tmp_path / "second" / "root" / "notebooks" / "job").symlink_to(run)
        with page_of(lab, "job/notebook.ipynb") as page:
            until(page, lambda: step_on(page) > seen)
        put(lab, "follow.ipynb", document(FOLLOWS.format(run=str(run))))
        with page_running_all(lab, "follow.ipynb") as page:
            until(page, lambda: step_on(page) > seen)
            followed = step_on(page)
            until(page, lambda: step_on(page) > followed)
            process.send_signal(signal.SIGTERM)
            until(page, lambda: "interrupted after step" in page.locator(".jp-Notebook").inner_text())
        assert process.wait(timeout=LONG) == 143
        put(lab, "again.ipynb", document(trains.replace("5000", str(done + 3))))
        with page_running_all(lab, "again.ipynb") as page:
            until(page, lambda: wb.load_run(cell).state == "finished")
    assert steps_of(cell) == list(range(1, done + 4))
