"""What a process notes of its work: queues counted by hand, bounded memory, requests of real samplers and their turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.base import activity, cards, runtime
from workbench.base.activity import Activity, recorded
from workbench.engines.protocol import Request, Sample, SamplingSettings


def test_a_queue_counts_who_waits_runs_and_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 11.0, 12.0, 14.0, 15.0, 16.0))
    monkeypatch.setattr("workbench.base.activity.time.time", lambda: next(clock))
    made = Activity()
    a, b, c = made.enter("s", 5), made.enter("s", 6), made.enter("s")  # at 10, 11, 12
    assert made.queues["s"].waiting == 3
    made.begin(a)  # at 14
    assert (made.queues["s"].waiting, made.queues["s"].running) == (2, 1)
    made.end(a, "done", 7, keep=True)  # at 15
    made.end(b, "done", 3, times=(13.0, 14.5), keep=True)  # at 16, begun at 13 by its worker
    found = made.queues["s"]
    assert (found.waiting, found.running, found.done, found.tokens, found.prompt_tokens) == (1, 0, 2, 10, 11)
    assert (found.begun, found.queue_seconds, found.seconds) == (2, 4.0 + 2.0, 5.0 + 5.0)
    assert [one.first for one in made.requests()] == [None, 14.5] and made.requests(since=11.0) == (b,)
    monkeypatch.undo()
    made.end(c, "given up")
    made.begin(c)  # too late: nothing changes
    assert (made.queues["s"].waiting, made.queues["s"].failed, made.queues["s"].running) == (0, 1, 0)


@given(st.lists(st.sampled_from(["enter", "begin", "end", "fail"]), max_size=60), st.integers(1, 5))
def test_nobody_is_lost_and_memory_is_bounded(moves: list[str], kept: int) -> None:
    made, open_ones = Activity(kept=kept), []
    for move in moves:
        if move == "enter":
            open_ones.append(made.enter("s"))
        elif open_ones and move == "begin":
            made.begin(open_ones[0])
        elif open_ones:
            made.end(open_ones.pop(), "done" if move == "end" else "raised", keep=True)
    one = made.queues.get("s", activity.Queue())
    assert one.waiting >= 0 and one.running >= 0 and one.waiting + one.running == len(open_ones)
    assert len(made.requests()) == min(kept, one.done + one.failed)
    assert made.left_out == max(0, one.done + one.failed - kept)


def test_phases_and_names() -> None:
    made = Activity()
    with made.doing("rollout"), made.doing("reward"):
        assert [name for name, _ in made.phases] == ["rollout", "reward"]
    assert made.phases == [] and made.idle < 60

    class Engine:
        name = "actor"

    first, second = Engine(), Engine()
    assert [made.name_of(one) for one in (first, second, first)] == ["actor", "actor-2", "actor"]


class Slow:
    """A sampler that answers after a turn of the loop, or fails."""

    @recorded
    async def sample(self, request: Request) -> Sample:
        await asyncio.sleep(0 if request.seed >= 0 else 60)
        if not request.ids:
            raise ValueError("no prompt")
        return Sample((1, 2), (0.0, 0.0), "stop", 0)


def test_every_request_is_noted_however_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Activity()
    monkeypatch.setattr(activity, "HERE", here)
    slow, settings = Slow(), SamplingSettings(max_tokens=4)

    async def all_of() -> list[Any]:
        asked = [slow.sample(Request(ids, settings, seed)) for ids, seed in (((1, 2, 3), 0), ((), 0), ((4,), -1))]
        tasks = [asyncio.ensure_future(one) for one in asked]
        await asyncio.wait(tasks[:2])
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    good, bad, gone = asyncio.run(all_of())  # in a loop of the caller's own
    assert good.ids == (1, 2) and isinstance(bad, ValueError) and isinstance(gone, asyncio.CancelledError)
    runtime.run(asyncio.sleep(0.01))
    assert sorted((one.outcome, one.prompt, one.tokens) for one in here.requests()) == [
        ("done", 3, 2), ("given up", 1, 0), ("raised", 0, 0),
    ]  # fmt: skip
    queue = here.queues["Slow"]
    assert (queue.waiting, queue.running, queue.done, queue.failed) == (0, 0, 1, 2)


def test_a_real_sampler_says_when_it_began_and_had_its_first_token(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Activity()
    for module in ("workbench.base.activity", "workbench.engines.local_engine.sampling"):
        monkeypatch.setattr(f"{module}.HERE", here)
    engine = wb.engines.local(tiny, device="cpu", max_wave=2)
    requests = [Request((1, 2, 3), SamplingSettings(max_tokens=n), n) for n in (2, 9, 3, 4, 5)]
    samples = engine.sample_many(requests)
    noted = here.requests()
    assert len(noted) == 5 and sum(one.tokens for one in noted) == sum(len(one.ids) for one in samples)
    for one in noted:
        assert one.began is not None and one.first is not None and one.ended is not None
        assert one.asked <= one.began <= one.first <= one.ended
    # two seats: somebody waited until another had ended
    assert max(one.began or 0 for one in noted) >= min(one.ended or 0 for one in noted)


def test_cards_are_known_by_the_names_that_drivers_say() -> None:
    for said, name in (
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H200", "H200"), ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA A10", "A10"), ("Tesla T4", "T4"),
    ):  # fmt: skip
        found = cards.card_of(said)
        assert found is not None and found.name == name, said
    assert cards.card_of("Tesla V100-SXM2-16GB") is None and cards.card_of("NVIDIA GH200 480GB") is None
