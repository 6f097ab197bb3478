"""Everything that can be refused before a model samples its first token, in one place; what was found, as a table.

`train` runs it before it writes anything; `workbench check NOTEBOOK` runs a notebook up to it and no further.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workbench import ahead
from workbench.config import require
from workbench.dataproto import DataProto
from workbench.datasets import Rows
from workbench.datasets.templates import encode
from workbench.engines.memory import available, gib
from workbench.errors import DataError, OutOfMemory, RunError, message
from workbench.runs.recorder import Plan
from workbench.stages import Pipeline

log = logging.getLogger("workbench")

PER_TOKEN = 30
"""Bytes of a recorded update for each token of prompt and response, measured with GRPO's columns."""


@dataclass(frozen=True)
class Preflight:
    """What a run will see: data that fits, and findings for people."""

    rows: Rows
    heldout: Rows | None
    findings: tuple[tuple[str, str], ...] = field(default=())

    def __repr__(self) -> str:
        width = max(len(what) for what, _ in self.findings)
        return "\n".join(f"{what:<{width}}  {found}" for what, found in self.findings)

    def _repr_html_(self) -> str:
        from workbench.views.html import pairs_table

        return pairs_table(list(self.findings))


class Checked(RunError):
    """`workbench check` got to the start of training: everything that can be checked has been. Carries the findings."""


def preflight(pipeline: Pipeline, rows: Rows, heldout: Rows | None, plan: Plan, path: Path) -> Preflight:
    """Check data, plan, lengths, routing, reward function, memory and disk. Nothing is written, no model is run.

    Raises `DataError`, `SettingError`, `RewardError`, `OutOfMemory` or `RunError` at the first thing that cannot be.
    """
    rollout: Any = pipeline["rollout"]
    reward: Any = pipeline["reward"]
    tokenizer = rollout.sampler.tokenizer
    switches = getattr(rollout.sampler, "template_switches", {})
    rows = rows.fitting(tokenizer, **switches)
    heldout = heldout.fitting(tokenizer, **switches) if heldout is not None else None
    first = rows.batch(plan.batch_size)
    blank = getattr(rollout, "blank", {})
    reward.function.check_signature((*first.columns, *blank))  # before the pipeline's check: it knows the nearest name
    pipeline.check(first)
    for part in (rows, heldout):
        if part is not None:
            reward.function.check_rows(part)
    prompt = _longest(rows, tokenizer, switches)
    findings = [
        ("data", _data(rows, heldout)),
        ("rewards", _routing(rows, reward)),
        ("batch", _batch(pipeline, rows, plan, rollout.group_size)),
        ("placement", _placement(pipeline, plan)),
        ("lengths", _lengths(rollout, prompt, lambda: max(rows.prompt_lengths(tokenizer, **switches)))),
        ("memory", _memory(pipeline)),
        ("disk", _disk(pipeline, plan, path, (prompt + rollout.sampling.max_tokens) * rollout.group_size)),
    ]
    tried = _tried(reward, first[:2], tokenizer, blank)
    return Preflight(rows, heldout, (*findings, ("reward function", tried)))


def _longest(rows: Rows, tokenizer: Any, switches: dict[str, Any]) -> int:
    """Tokens that a prompt may have: the limit, or where there is none the longest of the first rows."""
    longest = max(len(encode(tokenizer, row["prompt"], **switches)) for row in rows[:64])
    if not longest:
        raise DataError(message("the prompts are empty under the model's tokenizer", found="no token in the first 64"))
    return rows.max_prompt_length or longest


def _data(rows: Rows, heldout: Rows | None) -> str:
    held = f"; {len(heldout)} held out from {heldout.source or 'memory'}" if heldout is not None else "; none held out"
    return f"{len(rows)} rows from {rows.source or 'memory'}{held}"


def _routing(rows: Rows, reward: Any) -> str:
    sources = Counter(str(row.get("data_source")) for row in rows)
    return f"{reward.function.name}: " + ", ".join(f"{source} × {count}" for source, count in sources.most_common(6))


def _batch(pipeline: Pipeline, rows: Rows, plan: Plan, group: int) -> str:
    """An update cannot see more prompts at once than a step has."""
    for stage in pipeline:
        size = getattr(stage, "ppo_mini_batch_size", None)
        if size is not None:
            require(
                size <= plan.batch_size,
                f"ppo_mini_batch_size of {stage.name}",
                expected=f"≤ {plan.batch_size}, the prompts of a step",
                found=size,
            )
    per_epoch = len(rows) // plan.batch_size
    alone = "; a group of one has no advantage under group baselines" if group == 1 else ""
    return (
        f"{plan.batch_size} prompts × {group} samples, {plan.steps} steps, {plan.steps / per_epoch:.2f} epochs{alone}"
    )


def _placement(pipeline: Pipeline, plan: Plan) -> str:
    """Where rows are drawn beside the learner's work, and whether the loss knows that they are of older weights."""
    if not plan.ahead:
        return "each step's rows by its own weights"
    sampler = ahead.sampler_of(pipeline).sampler
    drawn = ", ".join(ahead.drawn_stages(pipeline).names)
    found = f"{drawn} one step ahead by {type(sampler).__name__}, one version behind; a step can be done again as far as that sampler repeats its tokens"
    how = ahead.correction(pipeline)
    if how is None:
        found += "; NOT corrected: PPO's ratio does not see how old the rows are, take recipes.corrected(pipeline)"
        log.warning("ahead=%d: %s", plan.ahead, found)
        return found
    return f"{found}; corrected: {how}"


def _lengths(rollout: Any, prompt: int, measured: Callable[[], int]) -> str:
    """What the limit allows fits into the model; where it does not, at least what there really is (`measured`)."""
    limit = getattr(rollout.sampler, "max_length", None)
    if limit is not None and prompt + rollout.sampling.max_tokens > limit:
        prompt = measured()
    if limit is not None and prompt + rollout.sampling.max_tokens > limit:
        raise DataError(
            message(
                "prompts and responses do not fit into the model",
                expected=f"at most {limit} positions",
                found=f"{prompt} prompt tokens + {rollout.sampling.max_tokens} response tokens",
                do="lower max_prompt_length or max_tokens",
            )
        )
    return f"{prompt} prompt tokens + {rollout.sampling.max_tokens} response tokens of {limit or 'no stated limit'}"


def _memory(pipeline: Pipeline) -> str:
    """Engines of one device share it, so their needs are added up."""
    needs: dict[torch.device, int] = {}
    for learner in pipeline.learners().values():
        if hasattr(learner, "memory_needed"):
            device, parts = learner.memory_needed()
            needs[device] = needs.get(device, 0) + sum(parts.values())
    for device, need in needs.items():
        free = available(device)
        if need > free:
            raise OutOfMemory(
                message(
                    f"training would need about {gib(need)} more on {device}",
                    expected=f"at most {gib(free)} that are free",
                    found=", ".join(pipeline.learners()),
                    do="lower micro_batch_tokens, switch on gradient_checkpointing, or take a smaller model",
                )
            )
    parts_text = [
        f"about {gib(need)} more on {device}, {gib(available(device))} free" for device, need in needs.items()
    ]
    return "; ".join(parts_text) or "the engines do not say"


def _disk(pipeline: Pipeline, plan: Plan, path: Path, tokens: int) -> str:
    """Room for the checkpoints that are kept and one that is being written, and for the recorded updates."""
    weights = sum(getattr(learner, "checkpoint_bytes", int)() for learner in pipeline.learners().values())
    between = plan.save_freq or plan.steps
    updates = min(plan.keep_updates << 20, tokens * plan.batch_size * PER_TOKEN * between * plan.keep_checkpoints)
    saved = 1 if not plan.save_freq else min(plan.keep_checkpoints + 1, plan.steps // plan.save_freq + 1)
    need = weights * saved + updates
    free = shutil.disk_usage(next(one for one in (path, *path.absolute().parents) if one.exists())).free
    if weights * saved > free:
        raise RunError(
            message(
                f"the disk of {path} has no room for the checkpoints",
                expected=f"about {gib(weights * saved)} ({saved} × {gib(weights)})",
                found=f"{gib(free)} free",
                do="free some, choose another run folder, or keep fewer checkpoints",
            )
        )
    return f"up to {gib(need)} ({saved} × {gib(weights)} checkpoint, updates {gib(updates)}); {gib(free)} free"


def _tried(reward: Any, prompts: DataProto, tokenizer: Any, blank: Mapping[str, Any]) -> str:
    """Score two made-up responses, as a step would: a broken function shows before the model has sampled for hours.
    `blank` are a row's further values, as the rollout gives them.

    A function that runs in this process is left alone: it may count its calls.
    """
    if reward.function.in_process:
        return f"{reward.function.name}: its signature fits"
    truths = [str((judged or {}).get("ground_truth", "")) for judged in prompts["reward_model"]]
    texts = truths if any(truths) else ["" for _ in truths]
    ids = [list(tokenizer.encode(text, add_special_tokens=False)) or [0] for text in texts]
    width = max(map(len, ids))
    padded = torch.tensor([one + [0] * (width - len(one)) for one in ids])
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in ids])
    more = {name: [value] * len(texts) for name, value in blank.items()}
    made = prompts.with_columns({"responses": padded, "response_mask": mask, "response_text": texts, **more})
    reward(made)
    return f"{reward.function.name}: its signature fits, and it judged two rows"
