"""The simulator against schedules made by hand, against queueing theory, and against what must hold of any schedule."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lint import lint

import workbench as wb
from workbench.base.errors import RunError, SettingError
from workbench.cluster.simulating import Layout, Rates, Simulated, _Clock, _fitted, _Replica, _Servers, simulate


def one(rates: Rates, steps: int = 10, **layout: Any) -> Simulated:
    return simulate(Layout(**layout), rates=rates, steps=steps)[0]


# 4 rows of 50 tokens at 0.02 s: 1 s; a reward 0.5 s; 4 · (50 + 10) tokens at 1 ms and an update of 0.06 s: 0.3 s; a push 0.2 s
RATES = Rates(lengths=[50], prompt=10, token=0.02, rewards=[0.5], train_token=0.001, update=0.06, push=0.2)
SIZE = {"batch_size": 2, "group_size": 2, "slots": 4}


@pytest.mark.parametrize(
    ("layout", "seconds", "whole"),
    [
        # in order: 1 + 0.5 + 0.3, and a push before each rollout but the first
        ({}, 2.0, 10 * 2.0 - 0.2),
        # two reward workers serve four rows: 1 s
        ({"judges": 2}, 2.5, 10 * 2.5 - 0.2),
        # two slots serve four rows: 2 s of sampling
        ({"slots": 2}, 3.0, 10 * 3.0 - 0.2),
        # two samplers of two slots: a group each
        ({"slots": 2, "replicas": 2}, 2.0, 10 * 2.0 - 0.2),
        # two ranks share 0.24 s of tokens; three mini-batches cost 0.06 s each
        ({"ranks": 2, "mini_batches": 3}, 1 + 0.5 + 0.12 + 0.18 + 0.2, 10 * 2.0 - 0.2),
        # one step ahead: 0.3 s of learning are hidden behind 1.5 s of rows; the first step has nobody to hide behind
        ({"ahead": 1}, 1.7, 1.5 + 9 * 1.7 + 0.3 - 0.2 + 0.2 - 0.2),
    ],
)
def test_schedules_by_hand(layout: dict[str, Any], seconds: float, whole: float) -> None:
    found = one(RATES, **{**SIZE, **layout})
    if not layout.get("ahead"):
        assert found.whole == pytest.approx(whole)
    assert found.seconds == pytest.approx(seconds, rel=0.02 if layout.get("ahead") else 1e-9)
    assert found.tokens_per_second == pytest.approx(10 * 200 / found.whole)


def test_one_step_ahead_by_hand() -> None:
    """Three steps: rows at 1.5; no push, as the samplers have version 0; rows 2 from 1.5 to 3.0 beside the update to 1.8; a push to
    3.2; rows 3 to 4.7 beside the update to 3.5; a push to 4.9 for rows that nobody draws any more, then the update to 5.2."""
    found = one(RATES, steps=3, ahead=1, **SIZE)
    assert [round(end, 6) for _, _, end in found.spans["learner"]] == [1.8, 3.5, 5.2]
    assert [(round(a, 6), round(b, 6)) for _, a, b in found.spans["push"]] == [(3.0, 3.2), (4.7, 4.9)]
    assert found.lags == {0: pytest.approx(1 / 3), 1: pytest.approx(2 / 3)}
    assert found.whole == pytest.approx(5.2) and found.learner == pytest.approx(0.9 / 5.2)
    assert found.sampler == pytest.approx(3 / 5.2) and found.slots == pytest.approx(3 / 5.2)


def test_a_stream_by_hand() -> None:
    """One prompt a step, one row of 1 s, learning takes 0.4 s. With lag 1 two groups are out at first; a step's end lets one more in.

    Groups 0 and 1 from 0 to 1; step 1 to 1.4, group 2 from 1.4 to 2.4; step 2 to 1.8, group 3 from 1.8 to 2.8; step 3 from 2.4 …
    """
    rates = Rates(lengths=[50], token=0.02, update=0.4)
    found = one(rates, steps=4, batch_size=1, group_size=1, slots=4, max_lag=1)
    assert [(round(a, 6), round(b, 6)) for _, a, b in found.spans["learner"]] == [
        (1.0, 1.4),
        (1.4, 1.8),
        (2.4, 2.8),
        (2.8, 3.2),
    ]
    assert found.lags == {0: 0.25, 1: 0.75}  # group 2 began by version 1 and was learnt from by version 2


def test_rows_share_a_replica_as_tokens_say() -> None:
    """Rows of 10 and 30 tokens, 10 ms each and 10 ms for the neighbour: 10 rounds of 20 ms, then 20 of 10 ms."""
    clock, ends = _Clock(), list[float]()
    replica = _Replica(clock, 4, Rates(lengths=[1], token=0.01, per_request=0.01))
    for tokens in (30, 10):
        replica.ask((tokens, lambda: ends.append(clock.now)))
    clock.run()
    assert ends == pytest.approx([0.2, 0.4]) and replica.busy.seconds == pytest.approx(0.4)
    assert replica.busy.work == pytest.approx(0.6) and replica.busy.spans == [(0.0, pytest.approx(0.4))]
    # a row that comes later slows the first one down from then on, and waits for its first token
    clock, ends = _Clock(), []
    replica = _Replica(clock, 4, Rates(lengths=[1], token=0.01, per_request=0.01, first=0.05))
    replica.ask((30, lambda: ends.append(clock.now)))
    clock.after(0.10, lambda: replica.ask((5, lambda: ends.append(clock.now))))
    clock.run()
    # alone from 0.05 to 0.15: 10 tokens; together 5 rounds of 20 ms: to 0.25; then 15 of 10 ms
    assert ends == pytest.approx([0.25, 0.40])


def erlang(count: int, load: float) -> float:
    """The probability that a customer of M/M/c waits (Erlang's C)."""
    full = load**count / math.factorial(count) * count / (count - load)
    return full / (sum(load**n / math.factorial(n) for n in range(count)) + full)


@pytest.mark.parametrize(("count", "load"), [(1, 0.6), (2, 1.4), (4, 3.0)])
def test_the_mean_wait_of_a_queue_is_what_theory_says(count: int, load: float) -> None:
    """M/M/c: Poisson arrivals of rate `load`, exponential services of mean 1; the wait is C(c, a) / (c - a)."""
    clock, draw, number = _Clock(), random.Random(count), 120_000
    servers = _Servers(clock, count)

    def arrive(left: int) -> None:
        servers.ask(draw.expovariate(1.0), lambda: None)
        if left:
            clock.after(draw.expovariate(load), lambda: arrive(left - 1))

    arrive(number - 1)
    clock.run()
    assert servers.waited / number == pytest.approx(erlang(count, load) / (count - load), rel=0.08)
    assert servers.busy.work / clock.now == pytest.approx(load, rel=0.03)  # offered load = mean number at work


LAYOUTS = st.builds(
    lambda mode, **given: Layout(**given, ahead=int(mode == 1), max_lag=max(mode - 1, 0)),
    mode=st.integers(0, 4), batch_size=st.integers(1, 4), group_size=st.integers(1, 3), replicas=st.integers(1, 3),
    slots=st.integers(1, 5), judges=st.none() | st.integers(1, 3), mini_batches=st.integers(1, 2), ranks=st.integers(1, 2),
)  # fmt: skip
TIMES = st.builds(
    lambda lengths, rewards, tenth: Rates(
        lengths=lengths, rewards=rewards, prompt=5, token=0.01, per_request=0.001 * tenth, train_token=0.001 * tenth, push=0.1, update=0.01
    ),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    rewards=st.lists(st.integers(0, 9).map(lambda n: n / 10), min_size=1, max_size=3),
    tenth=st.integers(0, 4),
)  # fmt: skip


@settings(max_examples=60)
@given(LAYOUTS, TIMES, st.integers(0, 3))
def test_what_holds_of_every_layout(layout: Layout, rates: Rates, seed: int) -> None:
    """No work is lost or done twice, no bound is broken, and nothing is faster than its own parts."""
    steps = 6
    found = simulate(layout, rates=rates, steps=steps, seed=seed)[0]
    rows = [
        random.Random((seed * 1_000_003 + g) * 1_000_003 + s)
        for g in range(steps * layout.batch_size)
        for s in range(layout.group_size)
    ]
    drawn = [(draw.choice(rates.lengths), draw.choice(rates.rewards)) for draw in rows]
    assert found.tokens_per_second * max(found.whole, 1e-12) == pytest.approx(sum(tokens for tokens, _ in drawn))
    learning = rates.train_token * (sum(n for n, _ in drawn) + len(drawn) * rates.prompt) / layout.ranks
    learning += steps * rates.update * layout.mini_batches
    assert found.learner * found.whole == pytest.approx(learning)  # the learner's work is conserved
    if layout.judges is not None:
        assert found.judges * layout.judges * found.whole == pytest.approx(sum(one for _, one in drawn))
    least = sum(tokens for tokens, _ in drawn) * rates.token / layout.replicas / layout.slots
    assert found.whole >= max(learning, least, max(n for n, _ in drawn) * rates.token) - 1e-9
    assert all(0 <= share <= 1 + 1e-9 for share in (found.sampler, found.slots, found.learner, found.judges or 0.0))
    assert found.slots <= found.sampler + 1e-9
    assert sum(found.lags.values()) == pytest.approx(1) and max(found.lags) <= max(layout.ahead, layout.max_lag)
    assert found == simulate(layout, rates=rates, steps=steps, seed=seed)[0]  # the same again


@settings(max_examples=40)
@given(LAYOUTS.filter(lambda one: not one.max_lag), TIMES)
def test_in_order_more_samplers_rewards_and_ranks_are_never_slower(layout: Layout, rates: Rates) -> None:
    """Each of these alone. Slots and judges are list scheduling, where more of the one may give the other a worse order: so the cost
    of a further request is left out, and slots and a batch ahead are compared where every score has a judge at once."""
    rates = rates.replace(per_request=0.0)

    def whole(**changes: Any) -> float:
        return simulate(Layout(**{**vars(layout), **changes}), rates=rates, steps=4)[0].whole

    base = whole()
    assert whole(judges=None, slots=10_000) <= whole(judges=None) + 1e-9
    assert whole(judges=None) <= base + 1e-9 and whole(ranks=layout.ranks + 1) <= base + 1e-9
    if not layout.ahead:
        assert whole(judges=None, ahead=1) <= whole(judges=None) + rates.push + 1e-9


def test_streaming_rewards_begin_with_the_first_row() -> None:
    """Rows of 10 and 50 tokens, one reward worker of 0.4 s: 1 + 0.8 s in turn, 1 + 0.4 s beside each other."""
    rates = Rates(lengths=[10, 50], token=0.02, rewards=[0.4])
    seeds = [
        n
        for n in range(20)
        if simulate(Layout(batch_size=2, group_size=1, judges=1), rates=rates, steps=2, seed=n)[0].tokens_per_second
    ]
    mixed = {
        round(simulate(Layout(batch_size=2, group_size=1, judges=1, streaming_rewards=on), rates=rates, steps=2, seed=seed)[0].seconds, 6)
        for seed in seeds for on in (False, True)
    }  # fmt: skip
    assert mixed == {1.0, 1.4, 1.8}  # two of 10; one of each, streaming; both, or one of each in turn


def test_figures_from_a_data_sheet_by_hand() -> None:
    """7e9 parameters on an H100: 14 GB at 0.7 · 3.35 TB/s a token, 8 · 7e9 operations at 0.4 · 989e12 a trained one."""
    found = Rates.on("H100", 7e9, lengths=[100])
    assert found.token == pytest.approx(14e9 / 2.345e12) and found.train_token == pytest.approx(5.6e10 / 3.956e14)
    assert found.push == pytest.approx(14e9 / 450e9)
    assert found.per_request == pytest.approx(14e9 / 3.956e14)  # below it the card would compute faster than its peak
    assert Rates.on("H100", 7e9, lengths=[100], cache_bytes=1e9).per_request == pytest.approx(1e9 / 2.345e12)
    assert Rates.on("H100", 7e9, lengths=[100], push=3.0).push == 3.0
    with pytest.raises(RunError, match="card"):
        Rates.on("H1000", 7e9, lengths=[1])


def test_a_concurrent_request_is_told_from_a_token() -> None:
    points = [(100.0, 900.0, 100 * 0.02 + 900 * 0.001), (80.0, 300.0, 80 * 0.02 + 300 * 0.001)]
    token, per_request, said = _fitted(points)
    assert (token, per_request) == (pytest.approx(0.02), pytest.approx(0.001)) and "fitted" in said
    token, per_request, said = _fitted([(100.0, 900.0, 2.0)] * 3)  # alike: no telling
    assert (token, per_request) == (pytest.approx(0.02), 0.0) and "too alike" in said


def test_the_figures_of_a_real_run(tiny: str, tmp_path: Any) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    pipe = wb.recipes.grpo(engine, group_size=2, max_tokens=12)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=4)
    run = wb.train_blocking(pipe, rows, steps=2, batch_size=2, run=tmp_path / "r", trace_freq=1, keep_updates=0)
    found = Rates.of(run)
    assert len(found.lengths) == len(found.rewards) == 8 and max(found.lengths) <= 12 and found.prompt > 10
    last = run.rows[-1]
    seconds = found.token * last["response_length/max"]
    assert 0 < seconds <= 1.5 * max(row["timing_s/rollout"] for row in run.rows) and "measured in r" in found.notes[0]
    made = wb.cluster.simulate(Layout(batch_size=2, group_size=2), rates=found, steps=3)
    assert 0 < made[0].seconds < 3 * max(row["timing_s/step"] for row in run.rows)
    assert Rates.of(run, rewards=(1.0,)).rewards == (1.0,)


def test_what_it_looks_like() -> None:
    layouts = [
        Layout(name="<b>slow</b>$x$", judges=2, **SIZE),
        Layout(ahead=1, **SIZE),
        Layout(max_lag=2, replicas=5, **SIZE),
    ]
    made = wb.cluster.simulate(*layouts, rates=RATES.replace(notes=("by <i>hand</i>",)))
    frame, page = made.to_pandas(), made._repr_html_()
    assert frame.index.tolist()[1:] == [one.title for one in layouts[1:]] and frame["speed-up"].iloc[0] == 1
    assert frame["s/step"].iloc[0] == pytest.approx(2.5) and len(made) == 3
    assert "<b>slow" not in page and "<i>hand" not in page and not lint(page) and "max_lag=2" in repr(made)
    _, *charts = re.split(r" 0 to [\d.]+ s\n", repr(made))
    lanes = [sum("│" in line for line in chart.splitlines()) for chart in charts]
    assert lanes == [4, 4, 6]  # samplers (3 at most), rewards, learner, push
    assert len(re.findall(r"0 to ([\d.]+) s", page)) == 3 and len({*re.findall(r"0 to ([\d.]+) s", page)}) == 1, (
        "one axis"
    )
    assert made[0].idle["learner"] == pytest.approx((1 - made[0].learner) * made[0].seconds)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Layout(batch_size=0), lambda: Layout(judges=0), lambda: Layout(ahead=2), lambda: Layout(ahead=1, max_lag=1),
        lambda: Rates(lengths=[]), lambda: Rates(lengths=[1], token=-1.0), lambda: Rates(lengths=[1], rewards=[-1.0]),
        lambda: simulate(rates=RATES), lambda: simulate(Layout(), rates=RATES, steps=1),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(SettingError):
        wrong()
