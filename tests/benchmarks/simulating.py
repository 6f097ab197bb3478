"""The simulator's predictions beside real trainings: one run is measured (`Rates.of`), the others are predicted from it.

`python tests/benchmarks/simulating.py [--steps 5] [--repeats 1] [--only 0 3]` trains the tiny policy on the CPU. Its sampler holds
each response back for 100 ms a token, of long-tailed lengths, in slots; a stage holds the learner up for 5 ms a token; slow
rewards sleep for 0.5 s in two processes: waits that other work on the machine hardly changes. Measured are the wall seconds from
one step's end to the next, without the first two, and the median over repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import workbench as wb
from workbench.cluster import Layout, Rates
from workbench.engines.local_engine.engine import LocalEngine
from workbench.engines.protocol import Request, Sample
from workbench.engines.workers.hosted import Replicas
from workbench.stages import Outcome, Stage

TOKEN, LEARN, JUDGE = 0.1, 0.005, 0.5
SLOW = "slow reward"


class Slow(LocalEngine):
    """A local engine whose responses have long-tailed lengths, and take their time in one of `slots`."""

    slots: asyncio.Semaphore

    async def sample(self, request: Request) -> Sample:
        """As `Sampler.sample`; the engine's own work is hidden behind the wait."""
        length = min(60, max(4, round(random.Random(request.seed).lognormvariate(2.7, 0.7))))
        settings = request.settings.replace(max_tokens=length, ignore_eos=True)
        async with self.slots:
            asked = super().sample(Request(request.ids, settings, request.seed))
            sample, _ = await asyncio.gather(asked, asyncio.sleep(length * TOKEN))
        return sample


def slow(slots: int) -> Any:
    """A sampler with so many slots."""
    engine: Any = wb.engines.local("data/tiny-arith", device="cpu")
    engine.__class__ = Slow
    engine.slots = asyncio.Semaphore(slots)
    return engine


class Learning(Stage):
    """Holds the learner up for `LEARN` seconds a token."""

    name, reads, writes = "wait", ("attention_mask",), ()

    def __call__(self, batch: wb.DataProto) -> Outcome:
        time.sleep(LEARN * int(batch["attention_mask"].sum()))
        return Outcome(batch)


def at_once(response: str) -> float:
    """A reward."""
    return float(len(response) % 2)


def late(response: str) -> float:
    """A slow reward."""
    import time

    time.sleep(0.5)
    return float(len(response) % 2)


class Clock:
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_start(self, start: int, steps: int) -> None:
        """As `Observer`."""

    def on_step(self, report: Any) -> None:
        """As `Observer`."""
        self.ends.append(time.perf_counter())

    def on_end(self, error: BaseException | None) -> None:
        """As `Observer`."""


def trained(layout: Layout, steps: int, folder: Path) -> tuple[float, Any]:
    """(wall seconds a step, the run) of a real training with this layout."""
    members = [slow(layout.slots) for _ in range(layout.replicas)]
    learner = wb.engines.local("data/tiny-arith", device="cpu", lr=1e-6)
    engine = wb.engines.paired(learner, members[0] if len(members) == 1 else Replicas(members))
    reward = wb.rewards.Reward(late, workers=2) if layout.judges else wb.rewards.Reward(at_once, in_process=True)
    pipe = wb.recipes.grpo(engine, reward=reward, group_size=layout.group_size, kl_coef=0.0)
    if layout.ahead or layout.max_lag:
        pipe = wb.recipes.with_rollout_correction(pipe, "decoupled_token_is")
    stages = list(pipe)
    place = next(number for number, stage in enumerate(stages) if stage.updates)
    pipe = wb.Pipeline([*stages[:place], Learning(), *stages[place:]])
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    clock = Clock()
    more: dict[str, Any] = {"max_lag": layout.max_lag} if layout.max_lag else {"ahead": layout.ahead}
    run = wb.train_blocking(
        pipe, rows, steps=steps, batch_size=layout.batch_size, run=folder, trace_freq=1, keep_traces=steps, keep_updates=0,
        trackers=[], display=None, observers=[clock], max_rollout_kl=None, **more,
    )  # fmt: skip
    ends = clock.ends[1:]
    return (ends[-1] - ends[0]) / (len(ends) - 1), run


COMMON: dict[str, Any] = {"group_size": 2, "slots": 16}
LAYOUTS = (
    Layout(name="in order, 8 prompts (measured)", batch_size=8, **COMMON),
    Layout(name="in order, 16 prompts: two waves", batch_size=16, **COMMON),
    Layout(name="in order, 8 prompts, 4 slots", batch_size=8, group_size=2, slots=4),
    Layout(name="in order, 8 prompts, two samplers of 4 slots", batch_size=8, group_size=2, slots=4, replicas=2),
    Layout(name=f"in order, 8 prompts, {SLOW}", batch_size=8, judges=2, **COMMON),
    Layout(name="ahead=1, 8 prompts", batch_size=8, ahead=1, **COMMON),
    Layout(name=f"ahead=1, 16 prompts, {SLOW}", batch_size=16, ahead=1, judges=2, **COMMON),
    Layout(name="max_lag=2, 8 prompts", batch_size=8, max_lag=2, **COMMON),
)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*")
    given = parser.parse_args()
    measured: dict[str, list[float]] = {}
    rates: Rates | None = None
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(given.repeats):
            for number, layout in enumerate(LAYOUTS):
                if number and given.only and number not in given.only:
                    continue
                seconds, run = trained(layout, given.steps + 2 * (not number), Path(folder) / f"{number}-{repeat}")
                measured.setdefault(layout.title, []).append(seconds)
                if rates is None:
                    beside = seconds - fmean(row["timing_s/step"] for row in run.rows[2:])  # records, between two steps
                    rates = Rates.of(run, step=max(beside, 0.0))
                    print(f"token {rates.token:.4f} s, per_request {rates.per_request:.5f} s, learning {1e3 * rates.train_token:.3f} ms a token, "
                          f"push {rates.push:.3f} s, beside {beside:.3f} s, {len(rates.lengths)} lengths of mean {fmean(rates.lengths):.1f}")  # fmt: skip
                told = predicted(layout, rates, given.steps)
                parts = {
                    name.removeprefix("timing_s/"): round(fmean(row.get(name) or 0.0 for row in run.rows[1:]), 2)
                    for name in (
                        "timing_s/step",
                        "timing_s/rollout",
                        "timing_s/reward",
                        "timing_s/wait",
                        "timing_s/update_actor",
                    )
                }
                print(f"{layout.title}: measured {seconds:.2f} s a step, predicted {told:.2f}; {parts}", flush=True)
    assert rates is not None
    print("\n| layout | predicted s a step | measured, median | predicted / measured |\n|---|---|---|---|")
    for layout in LAYOUTS:
        if times := measured.get(layout.title):
            told, real = predicted(layout, rates, given.steps), median(times)
            print(f"| {layout.title} | {told:.2f} | {real:.2f} | {told / real:.2f} |")


def predicted(layout: Layout, rates: Rates, steps: int) -> float:
    """Seconds a step by the simulator: the mean over 40 draws of so many steps."""
    known = rates.replace(rewards=(JUDGE,) if layout.judges else (0.0,))
    runs = [wb.cluster.simulate(layout, rates=known, steps=steps, seed=seed)[0] for seed in range(40)]
    ends = [[end for _, _, end in one.spans["learner"]][1:] for one in runs]
    return fmean((each[-1] - each[0]) / (len(each) - 1) for each in ends)


if __name__ == "__main__":
    main()
