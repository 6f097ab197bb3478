"""Engines in workers and several as one: nothing is lost, doubled, or answered by weights that nobody pushed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import LONG, within

from workbench.base import runtime
from workbench.base.activity import HERE
from workbench.base.errors import EngineError, Interrupted, WorkerLost
from workbench.engines import Request, Sample, local
from workbench.engines.paired import paired
from workbench.engines.workers.hosted import BACK_OFF, FAILURES, RESTARTS, Hosted, Replicas, host
from workbench.engines.workers.processes import processes
from workbench.testing.engines import EngineContract

REQUESTS = EngineContract.requests(count=8)


def hosted(folder: Path, name: str = "one") -> Hosted:
    def make() -> Any:
        return processes(host, 1, kind="local", path=str(folder), settings={"device": "cpu"}, threads=1)

    return Hosted(make, name=name)


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Replicas]:
    with Replicas([hosted(folder, "one"), hosted(folder, "two")], name="pair") as made:
        yield made


def tokens(samples: list[Sample]) -> list[tuple[tuple[int, ...], int]]:
    return [(sample.ids, sample.version) for sample in samples]


def pid_of(member: Hosted) -> int:
    return member._ranks._workers[0].pid  # type: ignore[union-attr]


@pytest.mark.slow
class TestInProcesses:
    """Two real workers with the tiny random model."""

    def test_the_driver_notes_when_a_worker_began_and_had_the_first_token(self, two: Replicas) -> None:
        since = time.time()
        samples = two.sample_many(REQUESTS)
        noted = [one for one in HERE.requests(since) if one.queue.startswith(("one", "two"))]
        assert len(noted) == len(REQUESTS) and sum(one.tokens for one in noted) == sum(len(one.ids) for one in samples)
        assert {one.queue.partition("-")[0] for one in noted} == {"one", "two"}
        for one in noted:  # clocks of one machine
            assert one.began is not None and one.first is not None and one.ended is not None
            assert since <= one.asked <= one.began <= one.first <= one.ended

    def test_what_is_drawn_is_what_one_engine_draws(self, folder: Path, two: Replicas) -> None:
        learner = local(folder, lr=1e-2)
        engine = paired(learner, two)
        expected = tokens(learner.sample_many(REQUESTS))
        assert tokens(engine.sample_many(REQUESTS)) == expected
        assert engine.max_length == two.max_length == 128 and two.tokenizer.get_vocab() == learner.tokenizer.get_vocab()
        learner.commit()  # another version: pushed to both before they answer
        assert {sample.version for sample in engine.sample_many(REQUESTS)} == {1}
        assert [member.version for member in two.members] == [1, 1]

    def test_B3_a_killed_members_questions_go_to_the_other_and_it_comes_back_with_the_next_weights(
        self, folder: Path, two: Replicas
    ) -> None:
        learner = local(folder)
        engine = paired(learner, two)
        expected = tokens(engine.sample_many(REQUESTS))
        pid = pid_of(two.members[0])
        os.kill(pid, signal.SIGSTOP)  # its share is surely unfinished when it dies
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.warns(UserWarning, match="member 0 of pair was lost"):
            again = engine.sample_many(REQUESTS)
        assert tokens(again) == expected  # each once, in order, with the same seeds
        assert "1 of 2 serve" in repr(two)
        learner.commit()
        assert {sample.version for sample in engine.sample_many(REQUESTS)} == {1}
        assert "2 of 2 serve" in repr(two) and two.members[0].version == 1

    def test_an_interrupt_stops_what_is_out_and_the_workers_stay(self, folder: Path, two: Replicas) -> None:
        engine = paired(local(folder), two)
        engine.sample_many(REQUESTS[:2])
        pids = [pid_of(member) for member in two.members]
        threading.Timer(0.1, runtime.interrupt).start()
        long = EngineContract.requests(count=64, max_tokens=100, ignore_eos=True)
        with pytest.raises(Interrupted):
            engine.sample_many(long)
        runtime.clear()
        assert len(engine.sample_many(REQUESTS)) == len(REQUESTS) and [pid_of(one) for one in two.members] == pids

    def test_what_is_asked_when_an_interrupt_is_over_is_answered(
        self, two: Replicas, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An exchange that was interrupted takes along what was out when it began, and nothing that was asked since."""
        member: Any = two.members[0]
        real, late = member._do, []

        def interrupted_once(method: str, *args: Any) -> Any:
            if method != "exchange" or late:
                return real(method, *args)
            late.append(asyncio.run_coroutine_threadsafe(member.sample(REQUESTS[1]), runtime.loop()))
            assert within(lambda: len(member._out.numbers()) >= 2, every=0.01)
            raise Interrupted("stopped by hand")

        monkeypatch.setattr(member, "_do", interrupted_once)
        first = asyncio.run_coroutine_threadsafe(member.sample(REQUESTS[0]), runtime.loop())
        with pytest.raises(Interrupted):
            first.result(LONG)
        assert late[0].result(LONG).ids and member.sample_many(REQUESTS[:1])[0].ids

    def test_a_worker_whose_engine_raises_says_so_to_whoever_asked(self, folder: Path, two: Replicas) -> None:
        bad = Request((1, 2, 10_000), REQUESTS[0].settings, 0)
        with pytest.raises(EngineError, match="expected token ids from 0 to"):
            two.sample_many([bad])
        assert len(two.sample_many(REQUESTS[:2])) == 2

    def test_a_question_that_is_given_up_is_dropped(self, two: Replicas) -> None:
        async def ask_and_cancel() -> None:
            task = asyncio.ensure_future(two.sample(REQUESTS[0]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        runtime.run(ask_and_cancel())
        assert len(two.sample_many(REQUESTS[:3])) == 3
        within(lambda: not any(one._carrier for one in two.members))
        assert not any(one._out.numbers() or one._carrier for one in two.members)  # the thread ends when nothing is out


class Fake:
    """Answers with a version; fails as it is told."""

    tokenizer: Any = None
    template_switches: Mapping[str, Any] = {}
    max_length = 128

    def __init__(self, fail: Exception | None = None, deaf: bool = False) -> None:
        self.fail, self.deaf, self.starts, self.version, self.asked = fail, deaf, 1, 0, 0
        self.start_error: Exception | None = None

    async def sample(self, request: Request) -> Sample:
        self.asked += 1
        await asyncio.sleep(0)
        if self.fail is not None:
            raise self.fail
        return Sample((1,), (-1.0,), "stop", self.version)

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        if not self.deaf:
            self.version = version

    def restart(self) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.starts, self.version, self.fail = self.starts + 1, 0, None

    def describe(self) -> dict[str, Any]:
        return {"path": "fake"}


def requests(count: int) -> list[Request]:
    """One of a prompt of its own each."""
    return [Request((1, 2, n), REQUESTS[0].settings, n) for n in range(count)]


def test_prompts_are_dealt_out_in_turn_and_a_groups_rows_stay_together() -> None:
    first, second = Fake(), Fake()
    both = Replicas([first, second])
    both.sample_many([one for one in requests(4) for _ in range(3)])
    assert (first.asked, second.asked) == (6, 6) and both.describe() == {"path": "fake", "replicas": 2}


def test_B5_a_member_that_lives_and_fails_everything_is_condemned() -> None:
    good, bad = Fake(), Fake(fail=EngineError("no blocks left"))
    both = Replicas([bad, good], name="pair")
    with pytest.warns(UserWarning, match="member 0 of pair was lost: no blocks left"):
        assert len(both.sample_many(requests(12))) == 12  # every question was answered by the other
    asked = bad.asked
    assert asked >= FAILURES and len(both.sample_many(requests(12))) == 12 and bad.asked == asked
    both.load_weights({}, 3)  # started again, and given the weights, before it serves
    assert bad.starts == 2 and bad.version == good.version == 3
    assert {one.version for one in both.sample_many(requests(12))} == {3} and bad.asked > asked


class Busy:
    """A worker of one rank that takes questions, answers at once, and finishes nothing."""

    size, closed = 1, False

    def call(self, method: str, *shared: Any, each: Any = None, timeout: float | None = None) -> list[Any]:
        time.sleep(0.01)
        return [(None, {}, 128, {}, "")] if method == "about" else [[]]

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_B5_a_worker_that_answers_and_never_finishes_is_given_up() -> None:
    busy = Busy()
    lone = Hosted(lambda: busy, name="busy", deadline=0.3)
    with pytest.raises(WorkerLost, match="worker of engine 'busy' responds, but has finished nothing for 0.3 s"):
        lone.sample_many(requests(3))
    assert busy.closed and not lone.alive
    both = Replicas([Hosted(Busy, name="busy", deadline=0.3), Fake()])
    with pytest.warns(UserWarning, match="finished nothing"):
        assert len(both.sample_many(requests(4))) == 4


def test_a_question_that_all_refuse_is_its_own_fault() -> None:
    both = Replicas([Fake(fail=EngineError("too long")), Fake(fail=EngineError("too long"))])
    with pytest.raises(EngineError, match="too long"):
        both.sample_many(requests(1))


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("workbench.engines.workers.hosted.time", made)
    return made


def test_B6_the_only_member_is_started_ever_later_and_then_no_more(clock: Clock) -> None:
    """It dies in its constructor each time: the bound of all restarts together is that of their waits."""
    alone, starts = Fake(fail=WorkerLost("gone")), []
    both = Replicas([alone])
    with pytest.warns(UserWarning), pytest.raises(WorkerLost, match="gone"):
        both.sample_many(requests(1))
    alone.start_error = EngineError("RuntimeError: the constructor's own words")
    for version in range(1, RESTARTS + 1):
        with pytest.raises(EngineError, match="the constructor's own words"):
            both.load_weights({}, version)
        starts.append(clock.now)
    assert starts == [0.0, BACK_OFF, BACK_OFF * 4]
    with pytest.raises(EngineError, match=f"not started again; found it was lost {RESTARTS + 1} times"):
        both.load_weights({}, 9)
    assert clock.now == starts[-1]


def test_B6_a_member_that_is_lost_again_and_again_is_not_started_for_ever(clock: Clock) -> None:
    good, bad = Fake(), Fake()
    both = Replicas([bad, good], name="pair")
    for round_ in range(RESTARTS + 3):
        bad.fail = WorkerLost("gone")
        with pytest.warns(UserWarning) if round_ <= RESTARTS else _nothing():
            both.sample_many(requests(2))
        both.load_weights({}, round_)
        if 0 < round_ < RESTARTS:  # while another serves nobody waits for it
            assert bad.starts == 1 + round_
            clock.now += BACK_OFF * 4
            both.load_weights({}, round_)
    assert bad.starts == 1 + RESTARTS and len(both.sample_many(requests(4))) == 4
    both.restart()  # somebody has looked at it
    assert bad.starts == 2 + RESTARTS


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_B6_none_left_is_the_original_error() -> None:
    alone = Fake(fail=WorkerLost("gone"))
    both = Replicas([alone])
    with pytest.warns(UserWarning), pytest.raises(WorkerLost, match="gone"):
        both.sample_many(requests(1))
    alone.start_error = EngineError("CUDA error: out of memory")
    with pytest.raises(EngineError, match="CUDA error"):
        both.load_weights({}, 1)


def test_B4_weights_that_were_not_taken_are_not_served(folder: Path) -> None:
    """A missed sync: the version on every sample is held against the one that was pushed."""
    learner, stale = local(folder), Fake(deaf=True)
    stale.tokenizer = learner.tokenizer
    engine = paired(learner, stale)
    engine.sample_many(requests(1))  # version 0 is what it has
    learner.commit()
    with pytest.raises(EngineError, match="does not serve the weights that were pushed to it; expected policy version 1; found version 0"):  # fmt: skip
        engine.sample_many(requests(2))


@pytest.mark.slow
def test_a_lost_sampler_is_started_by_one_of_all_who_wait_and_given_the_weights(folder: Path) -> None:
    learner, fake = local(folder), Fake()
    fake.tokenizer = learner.tokenizer
    engine = paired(learner, fake)
    engine.sample_many(requests(1))
    learner.commit()
    fake.fail = WorkerLost("gone")
    assert {one.version for one in engine.sample_many(requests(6))} == {1} and fake.starts == 2
    fake.fail, fake.restart = WorkerLost("for good"), lambda: None  # type: ignore[method-assign]
    with pytest.raises(WorkerLost, match="for good"):
        engine.sample_many(requests(1))
