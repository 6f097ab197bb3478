"""Metrics of a finished step that no single stage can compute, under verl's names."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import torch

from workbench.base.metrics import reduce
from workbench.dataproto import DataProto
from workbench.functional.passes import expected_best, majority, pass_at_k, sizes
from workbench.stages.log_prob import version_lag
from workbench.stages.stage import spread

ALIASES = {
    "timing_s/gen": "timing_s/rollout",
    "timing_s/ref": "timing_s/ref_log_prob",
    "timing_s/adv": "timing_s/advantage",
    "reward/mean": "critic/score/mean",
}
"""Another name for a metric → its own; both are written."""
_PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of verl's `compute_data_metrics` that no stage (rollout, reward, values, advantage) reports itself.

    `response_length_non_aborted/*`: tokens of the responses that have any; `prompt_length/clip_ratio`: share of
    prompts that fill `max_prompt_length`. {} for a batch without a rollout.
    """
    if "response_mask" not in batch or "prompt_mask" not in batch:
        return {}
    lengths = batch["response_mask"].sum(-1)
    found = reduce([{**spread("response_length_non_aborted", lengths[lengths > 0])}])
    if (limit := batch.meta_info.get("max_prompt_length")) is not None:
        found["prompt_length/clip_ratio"] = (batch["prompt_mask"].sum(-1) >= limit).double().mean().item()
    return found


def lag_metrics(batch: DataProto, version: int | None) -> dict[str, float]:
    """`training/policy_lag/*`: policy versions that rows are behind `version`, the learner's at the start of the step."""
    if version is None or "policy_version" not in batch:
        return {}
    return reduce([version_lag(version, batch["policy_version"])])


def timing_metrics(metrics: Mapping[str, float], batch: DataProto) -> dict[str, float]:
    """Timings under verl's names: seconds per phase, milliseconds per token, throughput in tokens/s; and memory in GiB.

    Generation is counted per response token, everything else per token of prompt and response.
    """
    found = {alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}
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


def sample_metrics(batch: DataProto) -> dict[str, float]:
    """verl's validation metrics, per data source: `val-core/<source>/reward/` mean@N, best@N/mean and maj@N/mean for the
    largest N; `val-aux/…` std@N, best@n, worst@n, maj@n for n = 2, 4, 8 … and pass@k where all rewards are 0 or 1.

    Each is a mean over prompts. best and worst are exact expectations over n draws with replacement (verl draws 1000
    times); maj needs extracted answers. Rows that were not scored are left out.
    """
    found: dict[str, float] = {}
    prompts = {key: pair for key, pair in by_prompt(batch).items() if pair[0]}
    for source in dict.fromkeys(source for source, _ in prompts):
        pairs = [pair for key, pair in prompts.items() if key[0] == source]
        found |= _of_source(pairs, f"val-core/{source}/reward", f"val-aux/{source}/reward")
    return found


def _of_source(prompts: Sequence[tuple[list[float], list[Any]]], core: str, aux: str) -> dict[str, float]:
    rewards = [values for values, _ in prompts]
    most = max(map(len, rewards))
    found = {f"{core}/mean@{most}": fmean(map(fmean, rewards))}
    if most == 1:
        return found
    found[f"{aux}/std@{most}"] = fmean(map(pstdev, rewards))
    for n in sizes(most):
        found |= _of_draws(prompts, n, core if n == most else aux, aux)
    if {value for values in rewards for value in values} <= {0.0, 1.0}:
        for k in (1, *sizes(most)):
            enough = [values for values in rewards if len(values) >= k]
            found[f"{aux}/pass@{k}"] = fmean(pass_at_k(int(sum(values)), len(values), k) for values in enough)
    return found


def _of_draws(prompts: Sequence[tuple[list[float], list[Any]]], n: int, place: str, aux: str) -> dict[str, float]:
    """best, worst and majority of `n` samples of each prompt."""
    every = [(torch.tensor(values), answers) for values, answers in prompts]
    found = {
        f"{place}/best@{n}/mean": fmean(expected_best(values, n) for values, _ in every),
        f"{aux}/worst@{n}/mean": fmean(expected_best(values, n, worst=True) for values, _ in every),
    }
    if any(answer is not None for _, answers in prompts for answer in answers):
        found[f"{place}/maj@{n}/mean"] = fmean(majority(answers, values, n) for values, answers in every)
    return found


def by_prompt(batch: DataProto) -> dict[tuple[str, str], tuple[list[float], list[Any]]]:
    """Group rows by prompt: (data source, uid) → rewards and extracted answers of the prompt's scored rows."""
    sources: Sequence[Any] = batch["data_source"] if "data_source" in batch else [None] * len(batch)
    scores: Sequence[Any] = batch["score"] if "score" in batch else [None] * len(batch)
    groups: dict[tuple[str, str], tuple[list[float], list[Any]]] = {}
    rows = zip(sources, batch["uid"], batch["reward"].tolist(), batch["scored"].tolist(), scores, strict=True)
    for source, uid, value, scored, score in rows:
        values, answers = groups.setdefault((str(source), uid), ([], []))
        if scored:
            values.append(value)
            answers.append(getattr(score, "answer", None))
    return groups
