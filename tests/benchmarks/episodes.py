"""What a slow tool costs: episodes of mixed lengths at once, in lock-step and one after another, and one tool that hangs.

The model is a script (10 ms a turn), so that what is measured is the waiting and our own work; the tool sleeps for 0.2 s.
`--sequential` really plays the episodes one by one (a minute and a half). `tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import workbench as wb
from workbench.agents import Episode, ToolAgent, function_tool, tool_parser
from workbench.engines.protocol import Request, Sample
from workbench.stages import EpisodeRollout

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "data" / "tiny-arith"
SAMPLING = wb.SamplingSettings(max_tokens=2000)
TURN = 0.01


class Scripted:
    """A model that calls the tool `asked` times, of which the prompt's first characters decide, and then answers."""

    version = 0

    def __init__(self, hangs: bool = False) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.hangs = hangs

    async def sample(self, request: Request) -> Sample:
        await asyncio.sleep(TURN)
        context = self.tokenizer.decode(list(request.ids))
        question, heard = context.split("user\n")[1][:20], context.count("<|im_start|>tool")
        asked, seconds = sum(map(ord, question)) % 6, SLOW
        if self.hangs and heard == 0 and asked:
            self.hangs, seconds = False, 600.0
        call = json.dumps({"name": "slow", "arguments": {"seconds": seconds}})
        text = f"<tool_call>{call}</tool_call>" if heard < asked else "done"
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return Sample(tuple(ids), (0.0,) * len(ids), "stop", 0)


SLOW = 0.2


@function_tool
async def slow(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "ok"


@function_tool(name="slow")
def blocking(seconds: float) -> str:
    """Waits in a thread."""
    time.sleep(seconds)
    return "ok"


def agent(tool: Any, limit: float = 30.0) -> ToolAgent:
    return ToolAgent([tool], parser=tool_parser("hermes"), seconds_per_call=limit)


def played(episodes: int, tool: Any, *, lock_step: bool = False, hangs: bool = False) -> tuple[float, Any]:
    """(Wall seconds, columns) of one rollout."""
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet")).batch(episodes // 4)
    stage = EpisodeRollout(
        Scripted(hangs),
        agent=agent(tool, 2.0 if hangs else 30.0),
        group_size=4,
        sampling=SAMPLING,
        deterministic=lock_step,
    )
    began = time.perf_counter()
    batch = stage(rows.with_meta(seed=1, step=1)).batch
    return time.perf_counter() - began, batch


def one_by_one(episodes: int) -> float:
    """Wall seconds of the same episodes, each after the other."""
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet")).batch(episodes // 4)
    model, loop = Scripted(), agent(slow)
    loop.prepare(model)

    async def play() -> None:
        for row in range(episodes):
            chat = rows["raw_prompt"][row // 4]
            await loop.bound(Episode(model, uid=str(row), row=row)).run(SAMPLING.to_dict(), raw_prompt=chat)

    began = time.perf_counter()
    asyncio.run(play())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sequential", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    played(16, slow)  # imports, the first connection of the loop
    found = [played(given.episodes, slow) for _ in range(given.repeats)]
    calls = found[0][1]["num_tool_calls"]
    total, most = sum(calls), max(calls)
    waits = sum(TURN * (n + 1) + SLOW * n for n in calls)
    say(f"{given.episodes} episodes, 0 to {most} calls each, {total} calls of {SLOW} s, {TURN * 1000:.0f} ms a turn")
    say(f"waiting alone: the slowest episode {TURN * (most + 1) + SLOW * most:.2f} s, one after another {waits:.1f} s")
    say(f"at once: {median(seconds for seconds, _ in found):.2f} s")
    bare = median(played(given.episodes, slow, lock_step=True)[0] for _ in range(given.repeats))
    say(f"in lock-step: {bare:.2f} s")
    threads = median(played(given.episodes, blocking)[0] for _ in range(given.repeats))
    say(f"a blocking function, in threads: {threads:.2f} s")
    seconds, batch = played(given.episodes, slow, hangs=True)
    late = sum(call["status"] == "late" for turns in batch["turns"] for turn in turns for call in turn["calls"])
    say(f"one call hangs, limit 2 s: {seconds:.2f} s, {late} late call")
    if given.sequential:
        say(f"really one after another: {one_by_one(given.episodes):.1f} s")


if __name__ == "__main__":
    main()
