"""Rollouts as a stream: no row is too old, every prompt of the order is learnt from once, tokens know their weights."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import LONG
from support.remote import Server, serving
from transformers import AutoTokenizer

import workbench as wb
from workbench.base.errors import EngineError, SettingError, VersionMismatch, WorkerLost
from workbench.engines import Request, Sample
from workbench.engines.paired import Draw
from workbench.rewards import Reward
from workbench.runs.preflight import preflight
from workbench.runs.settings import TrainPlan
from workbench.runs.streaming import Stream, Waiting, chosen, room
from workbench.runs.symptoms import symptoms

ROWS = "data/arith/train.parquet"


def digits(response: str) -> float:
    return sum(letter.isdigit() for letter in response) / 10


def rows_of(limit: int = 64) -> wb.datasets.Rows:
    return wb.rows(ROWS, max_prompt_length=256, limit=limit)


def two(tiny: str) -> Any:
    return wb.engines.paired(wb.engines.local(tiny, lr=1e-3, device="cpu"), wb.engines.local(tiny, device="cpu"))


def make(engine: Any, reward: Any = None, **settings: Any) -> wb.Pipeline:
    chosen: dict[str, Any] = {"group_size": 2, "max_tokens": 24, **settings}
    pipe = wb.recipes.grpo(engine, reward or Reward(digits, in_process=True), **chosen)
    return wb.recipes.with_rollout_correction(pipe, "decoupled_token_is")


def train(pipe: Any, run: Path, **settings: Any) -> wb.Run:
    chosen: dict[str, Any] = {
        "steps": 4, "batch_size": 4, "trace_freq": 1, "keep_traces": 9, "max_lag": 2, "seed": 3, "trackers": (),
    }  # fmt: skip
    return wb.train_blocking(pipe, rows_of(), run=run, **{**chosen, **settings})


def learnt_from(run: wb.Run) -> list[str]:
    return [uid for step in sorted(run.traces) for uid in dict.fromkeys(run.traces[step].batch["uid"])]


def order(steps: int, size: int = 4, seed: int = 3) -> list[str]:
    return [uid for step in range(1, steps + 1) for uid in rows_of().batch(size, step=step, seed=seed)["uid"]]


# --- the bound ------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_whoever_is_quick_no_group_is_too_old_and_no_step_waits_for_ever(
    data: st.DataObject, lag: int, size: int, pushes: bool
) -> None:
    """The counting alone: groups end in any order, and weights are pushed after every update or as late as may be."""
    born: dict[int, int] = {}
    ended: list[int] = []
    used: list[int] = []
    step, fresh, begun, steps = 1, 0, 0, 6
    while step <= steps:
        for _ in range(min(room(len(born), step, fresh + lag + 1, size), steps * size - begun)):
            born[begun] = fresh
            begun += 1
        deadlines = [born[one] + lag + 1 for one in ended]
        places = chosen(deadlines, [first + lag + 1 for first in born.values()], step, size)
        if places is None:
            going = sorted(born.keys() - set(ended))
            assert going, "a step waits, and nothing is under way"
            ended.append(data.draw(st.sampled_from(going)))
            continue
        taken = [ended[place] for place in places]
        assert all(step - 1 - born[one] <= lag for one in taken)
        used += taken
        for one in taken:
            ended.remove(one)
            del born[one]
        fresh = step if pushes or step - fresh >= lag else fresh
        step += 1
    assert sorted(used) == list(range(steps * size))


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny: str) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


class Learner:
    """What a pair needs of a learner that is never asked to learn."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.version = tokenizer, 0

    @property
    def state_id(self) -> str:
        return f"state {self.version}"

    def full_weights(self) -> dict[str, torch.Tensor]:
        return {}


class Sampler:
    """Answers after a time of its own, with the version that it has then; it takes weights when nothing is out."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.version, self.out = tokenizer, 0, 0
        self.dice = random.Random(seed)

    async def sample(self, request: Request) -> Sample:
        self.out += 1
        try:
            await asyncio.sleep(self.dice.choice((0, 0, 0.001, 0.004)))
        finally:  # it may be cancelled
            self.out -= 1
        return Sample((65, 66), (-1.0, -1.0), "stop", self.version)

    def load_weights(self, weights: Any, version: int) -> None:
        assert not self.out, "weights pushed under a request that is out"
        self.version = version


def stream_of(
    pair: Any, rows: Any, done: int, last: int, size: int, pending: Path | None = None, **told: Any
) -> Stream:
    rollout = wb.stages.Rollout(pair, group_size=2)
    reward = wb.stages.Reward(Reward(digits, in_process=True))
    pipe = wb.Pipeline([rollout, reward], given=("raw_prompt", "uid"))
    return Stream(
        pipe, lambda step: rows.batch(size, step=step), done=done, last=last, size=size, pending=pending, **told
    )


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from(("keep", "cancel")), st.integers(0, 99),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=3),
)  # fmt: skip
def test_killed_at_any_moment_nothing_is_lost_or_doubled(
    tiny_tokenizer: Any, lag: int, size: int, stale: str, seed: int, kills: list[tuple[int, bool]]
) -> None:
    """Kills after a step's rows are taken, or after its update; checkpoints every second step, as a run writes them."""
    rows, last = rows_of(40), 6
    used: dict[int, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved, pending, step = 0, None, 1
        pair = wb.engines.paired(Learner(tiny_tokenizer), Sampler(tiny_tokenizer, seed))  # type: ignore[arg-type]
        told: dict[str, Any] = {"max_lag": lag, "stale": stale}
        source = stream_of(pair, rows, 0, last, size, **told)
        waiting = list(kills)
        while step <= last:
            batch = source.take(rows.batch(size, step=step))
            versions = batch.batch["policy_version"]
            assert int(pair.learner.version - versions.min()) <= lag and len(versions) == 2 * size
            used[step] = list(dict.fromkeys(batch.batch["uid"]))
            dies = next((one for one in waiting if one[0] == step), None)
            if dies is None or dies[1]:
                pair.learner.version = step  # type: ignore[misc]
                source.learnt(step)
                if step % 2 == 0:
                    saved, pending = step, Path(folder) / f"{step}-{len(waiting)}"
                    source.pending(step).save(pending)
            step += 1
            if dies is not None:
                waiting.remove(dies)
                source.close()
                pair = wb.engines.paired(Learner(tiny_tokenizer), Sampler(tiny_tokenizer, seed))  # type: ignore[arg-type]
                pair.learner.version, step = saved, saved + 1  # type: ignore[misc]
                used = {number: uids for number, uids in used.items() if number <= saved}
                source = stream_of(pair, rows, saved, last, size, pending, **told)
        source.close()
    every = [uid for number in sorted(used) for uid in used[number]]
    assert sorted(every) == sorted(uid for one in range(1, last + 1) for uid in rows.batch(size, step=one)["uid"])


def test_what_waits_is_saved_and_read_again(tiny_tokenizer: Any, tmp_path: Path) -> None:
    rows = rows_of(40)
    pair = wb.engines.paired(Learner(tiny_tokenizer), Sampler(tiny_tokenizer, 1))  # type: ignore[arg-type]
    source = stream_of(pair, rows, 0, 9, 3, max_lag=1)
    first = source.take(rows.batch(3, step=1))
    assert source.take(rows.batch(3, step=1)) is first  # again, after workers were lost
    held = source.pending(0)
    assert {one.place for one in held.groups} >= {0, 1, 2} - held.again.keys()  # not learnt from yet
    while len(source._finished) < 3:
        time.sleep(0.005)
    held = source.pending(1)
    held.save(tmp_path / "pending")
    source.close()
    again = Waiting.load(tmp_path / "pending")
    assert (again.next, again.again) == (held.next, held.again)
    for mine, theirs in zip(again.groups, held.groups, strict=True):
        assert (mine.place, mine.born, mine.scores) == (theirs.place, theirs.born, theirs.scores)
        assert list(mine.batch["uid"]) == list(theirs.batch["uid"]) and mine.metrics == theirs.metrics  # type: ignore[index]
        assert torch.equal(mine.batch["responses"], theirs.batch["responses"])  # type: ignore[index]


# --- a real training ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    pipe = make(two(tiny))
    told: dict[str, Any] = {"eval_rows": rows_of()[:4], "test_freq": 2}
    return train(pipe, tmp_path_factory.mktemp("stream") / "r", save_freq=1, keep_checkpoints=9, **told)


def test_every_prompt_is_learnt_from_once_within_the_bound(run: wb.Run) -> None:
    found = learnt_from(run)
    assert sorted(found) == sorted(order(4)) and len(set(found)) == 16
    for row in run.rows[1:]:
        assert row["training/policy_lag/max"] <= 2 and row["streaming/groups"] == 4
        assert row["streaming/cancelled"] == 0 and row["timing_s/trainer_wait"] >= 0 <= row["timing_s/sampler_wait"]
    assert max(row["training/policy_lag/max"] for row in run.rows[1:]) >= 1
    assert run.settings["train"]["max_lag"] == 2 and "stream by LocalEngine" not in run.notes


def test_each_token_is_of_the_weights_that_its_version_names(run: wb.Run) -> None:
    """The sampler's log-probs of a row's tokens are those of its versions' weights, though these changed in its middle."""
    moved = 0
    for step in (2, 3):
        batch = run.traces[step].batch
        versions, own = batch["token_versions"], batch["response_mask"].bool()
        assert torch.equal(versions[:, 0], batch["policy_version"])
        for version in versions[own].unique().tolist():
            found = run.engine(version).compute_log_probs(batch)["log_probs"]
            mine = own & (versions == version)
            assert torch.allclose(found[mine], batch["rollout_log_probs"][mine], atol=1e-4)
        moved += int(((versions != versions[:, :1]) & own).any(-1).sum())
    assert moved, "no response went on under new weights: the test shows nothing"


def test_the_recorded_rows_are_read_again_and_stepped(run: wb.Run) -> None:
    audit = run.audit()
    assert audit.agrees and not audit.unaudited and "later phases" in audit.left["token_versions"]
    stepper = run.stepper(3, at="advantage").run()
    assert any("drawn in a stream, by weights up to 2 versions old" in note for note in stepper.notes)
    assert torch.allclose(stepper.batch["advantages"], run.traces[3].batch["advantages"])
    again = run.stepper(3).run(until="reward")
    assert torch.equal(again.batch["responses"], run.traces[3].batch["responses"])


def test_a_run_goes_on_from_what_its_checkpoint_holds(run: wb.Run, tiny: str, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "r")
    shutil.rmtree(tmp_path / "r/checkpoints/step_000004")
    told: dict[str, Any] = {"eval_rows": rows_of()[:4], "test_freq": 2}
    on = train(make(two(tiny)), tmp_path / "r", resume="auto", save_freq=2, steps=6, **told)
    assert sorted(learnt_from(on)) == sorted(order(6))
    assert (on.checkpoint(4) / "pending/stream.json").is_file()


def test_a_reward_that_never_ends_soon_is_waited_for_or_cancelled(tiny: str, tmp_path: Path) -> None:
    """One prompt's reward stands until the trainer has nothing else: `keep` waits for it, `cancel` draws it again."""
    slow = rows_of().batch(4, step=1, seed=3)["uid"][0]
    for stale in ("keep", "cancel"):
        times: list[str] = []
        free = threading.Event()

        async def judged(response: str, uid: str, free: Any = free, times: Any = times) -> float:
            if uid == slow:
                times.append(uid)
                while len(times) <= 2 and not free.is_set():  # the two rows of the first try
                    await asyncio.sleep(0.01)
            return digits(response)

        def met(metrics: Any, free: Any = free, stale: str = stale) -> bool:
            if stale == "keep" and metrics["training/policy_lag/max"] >= 0:
                threading.Timer(0.5, free.set).start()
            return False

        pipe = make(two(tiny), Reward(judged, in_process=True), max_tokens=6)
        found = train(pipe, tmp_path / stale, max_lag=1, stale=stale, break_if=met)
        assert sorted(learnt_from(found)) == sorted(order(4))
        assert [row["training/policy_lag/max"] <= 1 for row in found.rows] == [True] * 4
        cancelled = sum(row["streaming/cancelled"] for row in found.rows)
        assert cancelled == (stale == "cancel") and len(times) == (4 if cancelled else 2)
        assert (
            bool(sum(row["streaming/tokens_cancelled"] for row in found.rows)) == (stale == "cancel") or not free.set()
        )
        free.set()


class Dying(Sampler):
    """A sampler in a process that dies at chosen requests."""

    def __init__(self, path: str, at: range) -> None:
        self.engine = wb.engines.local(path, device="cpu")
        self.tokenizer, self.at, self.asked, self.starts = self.engine.tokenizer, at, 0, 1

    async def sample(self, request: Request) -> Sample:
        self.asked += 1
        if self.asked in self.at:
            raise WorkerLost("the worker of the engine 'rollout' is gone", exit="SIGKILL")
        return await self.engine.sample(request)

    def load_weights(self, weights: Any, version: int) -> None:
        self.engine.load_weights(weights, version)

    def restart(self) -> None:
        self.starts += 1

    def describe(self) -> dict[str, Any]:
        return {"kind": "dying"}


def test_a_lost_sampler_is_started_again_and_its_prompts_are_drawn(tiny: str, tmp_path: Path) -> None:
    sampler = Dying(tiny, range(9, 15))
    pair = wb.engines.paired(wb.engines.local(tiny, lr=1e-3, device="cpu"), sampler)  # type: ignore[arg-type]
    found = train(make(pair, max_tokens=6), tmp_path / "r", max_lag=1)
    assert sampler.starts > 1 and (tmp_path / "r/recoveries.jsonl").is_file()
    assert sorted(learnt_from(found)) == sorted(order(4))


def test_episodes_go_on_between_turns(tiny: str, tmp_path: Path) -> None:
    class Twice(wb.agents.AgentLoopBase):
        """Two turns; between them the weights may change."""

        async def run(self, sampling_params: Any, **columns: Any) -> Any:
            said = wb.agents.Transcript(wb.agents.TurnTokens(self.tokenizer).prompt(columns["raw_prompt"]), 8)
            for wait in (0.2, 0.0):
                sample = await self.generate(said.context, {**sampling_params, "max_tokens": 4, "ignore_eos": True})
                said.say(sample, self.tokenizer.decode(sample.ids, skip_special_tokens=True))
                await asyncio.sleep(wait)
            return said.output(self.episode)

    pipe = wb.recipes.grpo(two(tiny), Reward(digits, in_process=True), group_size=2, max_tokens=8, agent=Twice())
    found = train(wb.recipes.with_rollout_correction(pipe, "decoupled_token_is"), tmp_path / "r", steps=5)
    moved = [found.traces[step].batch for step in range(1, 6)]
    assert any((one["token_versions"].amax(1) > one["policy_version"]).any() for one in moved)
    assert sorted(learnt_from(found)) == sorted(order(5)) and found.audit().agrees


def test_data_that_grow_are_drawn_by_what_was_known_when_their_prompts_began(tiny: str, tmp_path: Path) -> None:
    def judged(response: str, uid: str) -> dict[str, Any]:
        number = sum(map(ord, uid)) % 9
        return {
            "score": digits(response),
            "new_row": {"prompt": f"{number} + 1 =", "reward_model": {"ground_truth": "1"}},
        }

    grown = wb.datasets.growing(rows_of(24), max_rows=24)
    told: dict[str, Any] = {"steps": 6, "batch_size": 4, "max_lag": 1, "seed": 3, "trace_freq": 1, "keep_traces": 9}
    pipe = make(two(tiny), Reward(judged, in_process=True), max_tokens=4)
    found = wb.train_blocking(pipe, grown, run=tmp_path / "r", trackers=(), **told)
    now = [uid for step in range(1, 7) for uid in grown.batch(4, step=step, seed=3)["uid"]]
    assert sorted(learnt_from(found)) == sorted(now)
    assert now != [uid for step in range(1, 7) for uid in rows_of(24).batch(4, step=step, seed=3)["uid"]]


def test_a_server_finishes_what_is_out_before_it_takes_weights(tiny: str, tmp_path: Path) -> None:
    """The tests' server, as SGLang speaks: it serves fixed logits, so how far it is off is not judged."""
    with serving(Server()) as server:
        sampler = wb.engines.remote(
            server.url, tiny, weights="sglang", timeout=LONG, ask_seconds=LONG, push_seconds=LONG
        )
        pair = wb.engines.paired(wb.engines.local(tiny, lr=1e-3, device="cpu"), sampler)
        found = train(make(pair, max_tokens=6), tmp_path / "r", max_rollout_kl=None)
    assert sorted(learnt_from(found)) == sorted(order(4)) and found.checkpoints == [4]
    for step in range(1, 5):
        batch = found.traces[step].batch
        own = batch["response_mask"].bool()
        same = batch["token_versions"] == batch["policy_version"][:, None]
        assert same[own].all() and step - 1 - int(batch["policy_version"].min()) <= 2
    assert 1 <= len(server.folders) <= 4


def test_a_request_that_comes_while_weights_are_pushed_waits(tiny: str) -> None:
    pair = two(tiny)
    flow, pushing, go_on = pair.flow(4), threading.Event(), threading.Event()
    plain = pair.sampler.end_weights

    def slowly(version: int) -> int:
        pushing.set()
        assert go_on.wait(LONG)
        return plain(version)

    pair.sampler.end_weights = slowly
    pair.learner.commit()
    threads = [threading.Thread(target=flow.renew)]
    threads[0].start()
    assert pushing.wait(LONG)
    found: list[Sample] = []
    ask = Request(tuple(pair.tokenizer.encode("1+1=")), wb.engines.SamplingSettings(max_tokens=3), 7)

    def asked() -> None:
        with flow.drawing(Draw()):
            found.extend(pair.sample_many([ask]))

    threads.append(threading.Thread(target=asked))
    threads[1].start()
    time.sleep(0.1)
    assert not found
    go_on.set()
    for thread in threads:
        thread.join(LONG)
    assert [one.version for one in found] == [1]
    flow.close()


# --- refused before work --------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_written(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"max_lag=2.*LocalEngine, which samples with the weights.*engines.paired"):
        train(make(wb.engines.local(tiny, device="cpu")), tmp_path / "r")
    pair = two(tiny)
    pair.share_device = True
    with pytest.raises(SettingError, match="share_device=True"):
        train(make(pair), tmp_path / "r")
    pair.share_device = False
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(SettingError, match="max_lag"):
            train(make(pair), tmp_path / "r", max_lag=wrong)
    with pytest.raises(SettingError, match="ahead and max_lag"):
        train(make(pair), tmp_path / "r", ahead=1)
    with pytest.raises(SettingError, match="'stale'; expected 'keep' or 'cancel'"):
        train(make(pair), tmp_path / "r", stale="drop")
    assert not (tmp_path / "r").exists()
    flow = pair.flow(4)
    with pytest.raises(EngineError, match="another stream"):
        pair.flow(4)
    flow.close()


def test_the_preflight_says_how_rows_are_drawn(tiny: str, tmp_path: Path) -> None:
    plan = TrainPlan(steps=2, batch_size=4, run=tmp_path / "r", max_lag=3)
    found = dict(preflight(make(two(tiny)), rows_of(), plan).findings)["placement"]
    assert found.startswith("rollout, reward in a stream by LocalEngine, at most 3 versions behind")
    assert "in the middle of responses" in found and "corrected: token weights" in found
    assert "max_lag" not in TrainPlan(**{**vars(plan), "max_lag": None}).record() and plan.record()["stale"] == "keep"


def test_rows_that_are_too_old_are_never_learnt_from(tiny_tokenizer: Any) -> None:
    rows = rows_of(40)
    pair = wb.engines.paired(Learner(tiny_tokenizer), Sampler(tiny_tokenizer, 1))  # type: ignore[arg-type]
    source = stream_of(pair, rows, 0, 9, 3, max_lag=1)
    source.take(rows.batch(3, step=1))
    pair.learner.version = 5  # type: ignore[misc]
    with pytest.raises(VersionMismatch, match="older than max_lag=1 allows"):
        source.take(rows.batch(3, step=2))
    source.close()


def test_a_cancelled_draw_asks_no_more(tiny_tokenizer: Any) -> None:
    from workbench.base import runtime
    from workbench.base.errors import Interrupted

    pair = wb.engines.paired(Learner(tiny_tokenizer), Sampler(tiny_tokenizer, 1))  # type: ignore[arg-type]
    flow, draw = pair.flow(2), Draw()
    ask = Request((65,), wb.engines.SamplingSettings(max_tokens=2), 1)
    with flow.drawing(draw):
        assert pair.sample_many([ask])[0].version == 0 and draw.tokens == 2 and pair.version == 0
        draw.cancel()
        with pytest.raises(Interrupted, match="too old"):
            pair.sample_many([ask])
    flow.close()
    runtime.run(asyncio.sleep(0))


def test_a_push_that_is_given_up_while_it_waits_lets_later_requests_in(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt in `renew`, while a sampler that takes no weights between two tokens still answers."""
    from workbench.base import runtime

    pair = wb.engines.paired(Learner(tiny_tokenizer), Sampler(tiny_tokenizer, 1))  # type: ignore[arg-type]
    flow, plain = pair.flow(2), pair.sampler.sample
    ask = Request((65,), wb.engines.SamplingSettings(max_tokens=2), 1)

    async def cut() -> list[Sample]:
        answering = asyncio.Event()

        async def late(request: Request) -> Sample:
            await answering.wait()
            return await plain(request)

        monkeypatch.setattr(pair.sampler, "sample", late)
        with flow.drawing(Draw()):
            first = asyncio.ensure_future(pair.sample(ask))
            await asyncio.sleep(0.05)
            push = asyncio.ensure_future(flow.between(lambda: None))
            await asyncio.sleep(0.05)
            assert flow.waits and not push.done()
            push.cancel()
            with pytest.raises(asyncio.CancelledError):
                await push
            second = asyncio.ensure_future(pair.sample(ask))
            answering.set()
            return [await asyncio.wait_for(one, LONG) for one in (first, second)]

    assert len(runtime.run(cut())) == 2
    flow.close()


def test_many_cancelled_rollouts_are_a_symptom() -> None:
    rows = [{"training/global_step": n, "streaming/cancelled": 3.0, "streaming/groups": 8.0} for n in range(1, 5)]
    assert [one.name for one in symptoms(rows)] == ["a stream cancels many rollouts"]
    assert not symptoms([{**row, "streaming/cancelled": 1.0} for row in rows])


# --- real kills -----------------------------------------------------------------------------------


DRIVER = """# warm
import os, signal, sys, threading, time
import workbench as wb
from workbench.rewards import Reward

def digits(response):
    return sum(letter.isdigit() for letter in response) / 10

tiny, run, after = sys.argv[1], sys.argv[2], float(sys.argv[3])
pair = wb.engines.paired(wb.engines.local(tiny, lr=1e-3, device="cpu"), wb.engines.local(tiny, device="cpu"))
pipe = wb.recipes.grpo(pair, Reward(digits, in_process=True), group_size=2, max_tokens=16)
pipe = wb.recipes.with_rollout_correction(pipe, "decoupled_token_is")
rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=64)

class Clock:
    def on_start(self, start, steps):
        if after:
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    def on_step(self, report):
        time.sleep(0.05)
    def on_end(self, error):
        pass

wb.train_blocking(pipe, rows, run=run, steps=8, batch_size=4, max_lag=2, seed=3, trace_freq=1, keep_traces=99, save_freq=2,
                  trackers=(), resume="auto", observers=[Clock()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.long)])
def test_a_process_killed_at_random_loses_and_doubles_nothing(tiny: str, tmp_path: Path, times: int) -> None:
    dice, killed = random.Random(times), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    (tmp_path / "stream_driver.py").write_text(DRIVER)
    for number in range(times + 1):
        after = 0.0 if number == times else dice.uniform(0.3, 3.0)
        command = [sys.executable, str(tmp_path / "stream_driver.py"), tiny, str(tmp_path / "r"), str(after)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False, env=environment)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        killed += done.returncode != 0
    assert killed
    found = wb.load_run(tmp_path / "r")
    assert sorted(learnt_from(found)) == sorted(order(8)) and len(found.rows) == 8
    assert max(row["training/policy_lag/max"] for row in found.rows) <= 2
