"""Metrics of a finished step that no single stage can give, under verl's names."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import torch

from workbench.dataproto import DataProto
from workbench.metrics import Metric, reduce
from workbench.stages.off_policy import version_lag
from workbench.stages.stage import spread

TIMING = {
    "timing_s/gen": "timing_s/rollout",
    "timing_s/ref": "timing_s/ref_log_prob",
    "timing_s/adv": "timing_s/advantage",
}
"""verl's name of a phase's seconds → ours; both are written."""
ALIASES = {"reward/mean": "critic/score/mean"}
"""The seed guide's name → verl's; both are written."""
_PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")


def data_metrics(batch: DataProto) -> dict[str, float]:
    """What verl's `compute_data_metrics` has beyond what the stages report (rollout, reward, values, advantage).

    `response_length_non_aborted/*`: tokens of the responses that have any; `prompt_length/clip_ratio`: share of
    prompts that fill `max_prompt_length`. {} for a batch without a rollout.
    """
    if "response_mask" not in batch or "prompt_mask" not in batch:
        return {}
    lengths = batch["response_mask"].sum(-1)
    prompts = batch["prompt_mask"].sum(-1)
    metrics: dict[str, Metric] = {**spread("response_length_non_aborted", lengths[lengths > 0])}
    found = reduce([metrics])
    limit = batch.meta_info.get("max_prompt_length")
    if limit is not None:
        found["prompt_length/clip_ratio"] = (prompts >= limit).double().mean().item()
    return found


def lag_metrics(batch: DataProto, version: int | None) -> dict[str, float]:
    """`version_lag` for a pipeline without a stage that measures it; `version` is the learner's at the step's beginning."""
    if version is None or "policy_version" not in batch:
        return {}
    return reduce([version_lag(version, batch["policy_version"])])


def timing_metrics(metrics: Mapping[str, float], batch: DataProto) -> dict[str, float]:
    """verl's names of the phases' seconds, milliseconds per token, and throughput in tokens per second.

    Generation is counted per response token, everything else per token of prompt and response.
    """
    found = {name: metrics[ours] for name, ours in TIMING.items() if ours in metrics}
    if "attention_mask" not in batch:
        return found
    total, responses = float(batch["attention_mask"].sum()), float(batch["response_mask"].sum())
    for name in _PER_TOKEN:
        seconds = found.get(f"timing_s/{name}", metrics.get(f"timing_s/{name}"))
        tokens = responses if name == "gen" else total
        if seconds is not None and tokens:
            found[f"timing_per_token_ms/{name}"] = 1000 * seconds / tokens
    seconds = max(metrics["timing_s/step"], 1e-9)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        found["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return {
        **found,
        "perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / seconds,
    }


def aliases(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seed guide's names for what is there."""
    return {alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}
