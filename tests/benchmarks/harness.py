"""A harness that nobody here wrote trains the tiny model with tools: OpenAI's Agents SDK, through the endpoint, as notebook 106 trains.

And what the endpoint costs: the episodes of `episodes.py`, asked for over HTTP and without it. The SDK is not a dependency: give
the folder of `pip install --target FOLDER openai-agents` as `--packages`. `tests/benchmarks/README.md` has the last figures.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import episodes
import torch

import workbench as wb
from workbench.agents import Harness, PolicySession
from workbench.agents.tools.shipped import CalculationError, calculate, shown
from workbench.stages import EpisodeRollout

CALLS = "agent_loop/num_tool_calls/mean"
SLOW = [{"type": "function", "function": {"name": "slow", "parameters": {"type": "object", "properties": {}}}}]


def with_the_sdk() -> Callable[..., Any]:
    """A harness's function: an agent of the SDK with a calculator plays a row."""
    sdk, openai, httpx = (importlib.import_module(name) for name in ("agents", "openai", "httpx"))
    sdk.set_tracing_disabled(True)
    connections = httpx.AsyncClient(timeout=120)

    @sdk.function_tool
    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression."""
        try:
            return shown(calculate(expression))
        except CalculationError as error:
            return f"error: {error}"

    async def play(policy: PolicySession, row: dict[str, Any]) -> dict[str, Any]:
        client = openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, http_client=connections)
        model = sdk.OpenAIChatCompletionsModel(policy.model, client)
        agent = sdk.Agent(name="policy", model=model, tools=[calculator])
        try:
            found = await sdk.Runner.run(agent, row["raw_prompt"][-1]["content"], max_turns=5)
        except sdk.ModelBehaviorError as error:  # the model's own fault: a call of a tool that there is not
            return {"said": None, "stopped": str(error)}
        return {"said": found.final_output}

    return play


def learn(seed: int, folder: Path, options: argparse.Namespace) -> str:
    """One run, as a row of the table."""
    agent = Harness(with_the_sdk(), parser="hermes", max_assistant_turns=4, name="openai-agents")
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    eval_rows = wb.rows("data/arith-tools/test.parquet", max_prompt_length=256)
    engine = wb.engines.local("data/tiny-arith-tools", lr=3e-4)
    pipe = wb.recipes.grpo(engine, agent=agent, group_size=8, kl_coef=0.001, max_tokens=96)

    def held_out() -> tuple[float, float]:
        found = wb.evaluate(engine, eval_rows, agent=agent, max_tokens=96, batch_size=256, seed=seed)
        return float(mean(found.batch["num_tool_calls"])), found.mean

    calls, reward = held_out()
    run = wb.train_blocking(pipe, rows, steps=options.steps, batch_size=16, seed=seed, run=folder / f"harness-{seed}")
    calls_after, reward_after = held_out()
    taken = run.rows[1:]
    asked = [row[CALLS] for row in taken]
    columns = [
        seed,
        f"{calls:.2f} → {calls_after:.2f}",
        f"{mean(asked[:3]):.2f} → {mean(asked[-3:]):.2f}",
        f"{reward:.3f} → {reward_after:.3f}",
        f"{median(row['timing_s/step'] for row in taken):.2f}",
        f"{run.summary['seconds']:.0f}",
    ]
    return "| " + " | ".join(map(str, columns)) + " |"


# --- what the endpoint costs ------------------------------------------------------------------------


class Wire:
    """The least HTTP client there is: one kept connection, so that what is measured is the endpoint."""

    def __init__(self, policy: PolicySession) -> None:
        place, _, self.path = policy.base_url.removeprefix("http://").partition("/")
        self.host, _, port = place.partition(":")
        self.port, self.key, self.streams = int(port), policy.api_key, None

    async def chat(self, **asked: Any) -> dict[str, Any]:
        self.streams = self.streams or await asyncio.open_connection(self.host, self.port)
        reader, writer = self.streams
        body = json.dumps({"model": "policy", **asked}).encode()
        head = (
            f"POST /{self.path}/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        length = int((await reader.readuntil(b"\r\n\r\n")).lower().partition(b"content-length: ")[2].split(b"\r")[0])
        return json.loads(await reader.readexactly(length))

    def close(self) -> None:
        if self.streams:
            self.streams[1].close()


def caller(over_http: bool) -> Callable[..., Any]:
    """A harness's function that does what the policy asks for until it asks no more."""

    async def play(policy: PolicySession, row: dict[str, Any]) -> None:
        client: Any = Wire(policy) if over_http else policy
        messages = [dict(one) for one in row["raw_prompt"]]
        while calls := (said := (await client.chat(messages=messages, tools=SLOW))["choices"][0]["message"]).get(
            "tool_calls"
        ):
            await asyncio.sleep(episodes.SLOW * len(calls))
            messages.append(said)
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
        if over_http:
            client.close()

    return play


def cost(number: int, over_http: bool) -> tuple[float, Any]:
    """(Wall seconds, the batch) of one rollout of `number` episodes."""
    rows = wb.rows(str(episodes.ROOT / "data" / "arith" / "train.parquet")).batch(number // 4)
    agent = Harness(caller(over_http), parser="hermes")
    stage = EpisodeRollout(episodes.Scripted(), agent=agent, group_size=4, sampling=episodes.SAMPLING)
    began = time.perf_counter()
    batch = stage(rows.with_meta(seed=1, step=1)).batch
    return time.perf_counter() - began, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--packages", type=Path, help="folder with openai-agents; without it only the costs are measured"
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    for over_http in (False, True):
        cost(16, over_http)
        found = [cost(options.episodes, over_http) for _ in range(options.repeats)]
        calls = found[0][1]["num_tool_calls"]
        alone = episodes.TURN * (max(calls) + 1) + episodes.SLOW * max(calls)
        seconds = median(one for one, _ in found)
        how = "over HTTP" if over_http else "without HTTP"
        say(
            f"{options.episodes} episodes, {sum(calls)} calls, {how}: {seconds:.2f} s, {seconds / alone:.2f} × the slowest"
        )
    if options.packages:
        sys.path.remove(str(Path(__file__).parent))  # `agents.py` there is another than the SDK's `agents`
        sys.path.append(str(options.packages))
        version = importlib.metadata.version("openai-agents")
        say(f"openai-agents {version}, {options.steps} steps")
        say(
            "| seed | calls an episode, held out | in training, first and last three steps | held-out reward | s a step | s in all |"
        )
        say("|---|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as folder:
            for seed in options.seeds:
                say(learn(seed, Path(folder), options))


if __name__ == "__main__":
    main()
