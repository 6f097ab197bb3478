"""What a recorded run says when the present code opens it, as plain values: written down once by the code that made the run
(`recorded/make.py`), said again by every later one (`recorded/test_recorded.py`)."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import workbench as wb

OUT = Path("tests/recorded/0.12.0")
"""Relative, as the runs were made: no machine is named in them."""
MODEL, DATA, TALKS = OUT / "model", OUT / "rows.jsonl", OUT / "talks.jsonl"
TOOLS = "data/tiny-arith-tools"
PLAN: dict[str, Any] = {
    "batch_size": 4,
    "seed": 5,
    "trace_freq": 1,
    "keep_traces": 9,
    "display": None,
    "trackers": (),
}


CLOCK = ("timing_", "perf/", "agent_loop/generate_sequences", "agent_loop/tool_calls")
"""Metrics of the clock and the machine: no two runs agree in them."""


def load(path: Path = DATA, longest: int = 256) -> Any:
    return wb.rows(str(path), max_prompt_length=longest)


# --- the pipelines of the runs, as people write them now ---------------------------------------------


def grpo() -> Any:
    engine = wb.engines.local(str(MODEL), lr=1e-3, device="cpu")
    return wb.recipes.grpo(
        engine, group_size=4, max_tokens=16, kl_coef=0.01, clip_ratio_high=0.28, ppo_epochs=2, ppo_mini_batch_size=2
    )


def ppo() -> Any:
    engine = wb.engines.local(str(MODEL), lr=1e-3, device="cpu")
    reward = wb.rewards.as_reward(str(OUT / "digits.py"), workers=1)
    settings: dict[str, Any] = {"critic_lr": 1e-3, "critic_warmup": 2, "kl_target": 0.1, "lam": 0.95}
    return wb.recipes.ppo(engine, reward, max_tokens=16, **settings)


def lora() -> Any:
    engine = wb.engines.local(str(MODEL), lr=1e-2, device="cpu", lora_rank=2, lora_alpha=4.0)
    return wb.recipes.grpo(engine, wb.rewards.gsm8k.gsm8k, group_size=4, max_tokens=16)


def agents() -> Any:
    engine = wb.engines.local(TOOLS, lr=1e-2, device="cpu", lora_rank=1, lora_targets=("q_proj",))
    agent = wb.agents.ToolAgent(
        [wb.agents.Calculator()],
        parser=wb.agents.HermesParser(),
        interactions=[wb.agents.Gsm8kInteraction()],
        max_assistant_turns=3,
    )
    reward = wb.rewards.episodes.episode(turn_weight=0.5)
    pipeline = wb.recipes.grpo(engine, reward, group_size=4, agent=agent, max_tokens=120)
    pipeline = pipeline.insert_after("reward", wb.stages.TurnScores())
    return pipeline.with_stage("rollout", deterministic=True)


def ahead() -> Any:
    learner = wb.engines.local(str(MODEL), lr=1e-3, device="cpu")
    both = wb.engines.paired(learner, wb.engines.local(str(MODEL), device="cpu"))
    return wb.recipes.with_rollout_correction(wb.recipes.grpo(both, group_size=4, max_tokens=16), "decoupled_token_is")


def dapo() -> Any:
    engine = wb.engines.local(str(MODEL), lr=1e-3, device="cpu")
    return wb.recipes.dapo(engine, rows=load(), group_size=4, max_tokens=16, overlong_buffer=4)


PIPELINES = {"grpo": grpo, "ppo": ppo, "lora": lora, "agents": agents, "ahead": ahead}
PLANS: dict[str, dict[str, Any]] = {
    "grpo": {"steps": 3, "test_freq": 3, "val_samples": 2},
    "ppo": {"steps": 3, "save_freq": 2},
    "lora": {"steps": 2},
    "agents": {"steps": 2, "batch_size": 2},
    "ahead": {"steps": 3, "save_freq": 2, "ahead": 1, "seed": 8},
}
STEPS = {"grpo": 2, "ppo": 3, "lora": 2, "agents": 2, "ahead": 3}
"""The step that is done again."""


def train(name: str, run: Path, **changes: Any) -> Any:
    data = load(TALKS, 600) if name == "agents" else load()
    eval_rows = {"eval_rows": data[:4]} if name == "grpo" else {}
    return wb.train_blocking(PIPELINES[name](), data, run=str(run), **{**PLAN, **eval_rows, **PLANS[name], **changes})


# --- what is said of them ------------------------------------------------------------------------------


def numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics less those of the clock; NaN as None, as on disk."""
    kept = {name: value for name, value in metrics.items() if not name.startswith(CLOCK)}
    return {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in kept.items()}


def of_tensor(values: torch.Tensor) -> dict[str, Any]:
    """dtype, shape, the sum of what is a number, and a sum in which every place has a weight of its own."""
    flat = torch.nan_to_num(values.detach().double().reshape(-1))
    weights = torch.arange(len(flat), dtype=torch.float64) % 97 + 1
    kind = str(values.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": list(values.shape), "sum": float(flat.sum()), "placed": float(flat @ weights)}


def leaves(value: Any) -> Iterator[str]:
    """Every plain value in an object but seconds, as text. Names of keys and fields are left out: they may change."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        value = [one for name, one in value.items() if name != "seconds"]
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        yield f"{value:.6g}" if isinstance(value, float) else str(value)
        return
    for one in value:
        yield from leaves(one)


def of_objects(values: Any) -> dict[str, Any]:
    """How many, and a crc32 over what is in them."""
    found = sorted(f"{row} {leaf}" for row, value in enumerate(values) for leaf in leaves(value))
    return {"objects": len(values), "crc32": zlib.crc32("\n".join(found).encode())}


def column(batch: Any, name: str) -> dict[str, Any]:
    """What a column holds, and who wrote it."""
    values = batch[name]
    held = of_tensor(values) if isinstance(values, torch.Tensor) else of_objects(values)
    made = batch.origins.get(name)
    return held if made is None else {**held, "stage": made.stage, "version": made.policy_version}


def of_batch(batch: Any) -> dict[str, Any]:
    """All columns of a batch."""
    return {name: column(batch, name) for name in batch.columns}


def of_trace(trace: Any) -> dict[str, Any]:
    """The batch that a step began with, and what each phase wrote and measured."""
    phases = [
        {
            "stage": phase.stage,
            "columns": list(phase.batch.columns),
            "wrote": {name: column(phase.batch, name) for name in phase.wrote},
            "metrics": numbers(phase.metrics),
            "settings": len(phase.settings),
        }
        for phase in trace
    ]
    return {"start": of_batch(trace.start), "phases": phases, "facts": dict(trace.batch.meta_info)}


def of_weights(engine: Any) -> dict[str, Any]:
    """Every tensor that the engine learns."""
    return {name: of_tensor(values) for name, values in engine.snapshot()["weights"].items()}


def opened(folder: Path) -> dict[str, Any]:
    """A run as it lies there: nothing is written."""
    run = wb.load_run(folder)
    rows = run.rows
    return {
        "state": run.state,
        "steps": len(rows),
        "last": rows[-1],
        "names": sorted({name for row in rows for name in row}),
        "checkpoints": run.checkpoints,
        "reachable": run.restorable_steps,
        "summary": {name: value for name, value in run.summary.items() if name != "paths"},
        "symptoms": [one.name for one in run.symptoms],
        "why": {str(step): str(kept) for step, kept in run.traces.reasons().items()},
        "traces": {str(step): of_trace(trace) for step, trace in run.traces.items()},
    }


def replayed(folder: Path, step: int, at: str | None = None) -> dict[str, Any]:
    """A recorded step done again on the weights that it had, from the phase `at` on, and only its estimates without any model."""
    run = wb.load_run(folder)
    again = run.stepper(step, at=at).run()
    judged = run.stepper(step, at="advantage").run(until="advantage")
    return {
        "step": step,
        "stages": list(again.trace.names),
        "metrics": numbers(again.trace.metrics),
        "columns": of_batch(again.batch),
        "weights": {role: of_weights(engine) for role, engine in again.pipeline.learners().items()},
        "judged": of_batch(judged.batch),
    }


def kept(folder: Path) -> dict[str, Any]:
    """Weights of the newest checkpoint, and what it scores on a few prompts without sampling."""
    run = wb.load_run(folder)
    settings, step = run.settings, max(run.checkpoints)
    found = {"step": step, "weights": {role: of_weights(run.engine(step, role)) for role in settings["engines"]}}
    if folder.name == "agents":  # episodes are not sampled as plain rows
        return found
    scored = wb.evaluate(run, load(), temperature=0.0, limit=4)
    texts = zlib.crc32("\n".join(scored.batch["response_text"]).encode())
    return {**found, "evaluated": {"mean": scored.mean, "prompts": scored.prompts, "crc32": texts}}


def resumed(folder: Path) -> dict[str, Any]:
    """A run that goes on: one step more, or the one whose checkpoint is gone. The folder is written to."""
    name = folder.name
    steps = PLANS[name]["steps"] + (name != "ahead")
    run = train(name, folder, steps=steps, resume="auto")
    weights = {role: of_weights(run.engine(steps, role)) for role in run.settings["engines"]}
    return {"steps": steps, "last": numbers(run.rows[-1]), "weights": weights}


def of_pins(path: Path) -> dict[str, Any]:
    """Pinned rows, and what the reward by source says of them."""
    pins = wb.rewards.pins(path)
    found = [{"expected": one.expected, "note": one.note, "id": one.id} for one in pins]
    return {"pins": found, "held": [one.holds for one in pins.check(wb.rewards.gsm8k).results]}
