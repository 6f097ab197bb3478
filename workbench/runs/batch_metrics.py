"""Metrics of a finished step that no single stage can compute, under verl's names."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import torch

from workbench.base.metrics import reduce
from workbench.dataproto.columns import REWARD_PREFIX
from workbench.dataproto.core import DataProto, is_last
from workbench.engines.protocol import Described
from workbench.functional.passes import best_of, majority, pass_at_k, sizes
from workbench.rewards.base import response_lengths
from workbench.stages.log_prob import version_lag
from workbench.stages.stage import spread

ALIASES = {
    "timing_s/gen": "timing_s/rollout",
    "timing_s/ref": "timing_s/ref_log_prob",
    "timing_s/adv": "timing_s/advantage",
}
"""Second name of a metric → the metric's own name; both are written."""
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of one unit of `ru_maxrss`."""
_PER_TOKEN = ("gen", "ref", "values", "adv", "update_critic", "update_actor")


def lag_metrics(batch: DataProto, version: int | None) -> dict[str, float]:
    """`training/policy_lag/*`: policy versions that rows are behind `version`, the learner's at the start of the step."""
    if version is None or "policy_version" not in batch:
        return {}
    return reduce([version_lag(version, batch["policy_version"])])


def devices_of(engines: Iterable[Any]) -> int:
    """Count the devices that engines use: the most ranks that a learner has, plus the samplers' devices that no learner
    shares.

    A learner of 4 ranks with a sampler of 2 replicas on other devices gives 6.
    """
    ranks, samplers = 1, 0
    for engine in engines:
        record = engine.describe() if isinstance(engine, Described) else {}
        ranks = max(ranks, int(record.get("ranks", 1)))
        its = record.get("sampler")
        if isinstance(its, Mapping) and not getattr(engine, "share_device", False):
            samplers = max(samplers, int(its.get("replicas", 1)) * int(its.get("tensor_parallel_size", 1)))
    return ranks + samplers


def push_metrics(engines: Iterable[Any]) -> dict[str, float]:
    """Metrics of the last push of weights from learners to samplers: `timing_s/update_weights` (verl's name) in
    seconds, `perf/update_weights_gb` for the GiB sent, and `perf/update_weights_host_gb` for the GiB of host memory
    used. {} without a push.
    """
    pushes = [push for one in engines if (push := getattr(one, "last_push", None)) is not None]
    if not pushes:
        return {}
    return {
        "timing_s/update_weights": sum(push.seconds for push in pushes),
        "perf/update_weights_gb": sum(push.bytes for push in pushes) / 2**30,
        "perf/update_weights_host_gb": max(push.host_bytes for push in pushes) / 2**30,
    }


def timing_metrics(metrics: Mapping[str, float], batch: DataProto, devices: int = 1) -> dict[str, float]:
    """Timings under verl's names: seconds per phase, milliseconds per token, tokens per second and device; memory in GiB.

    Generation is counted per response token, everything else per token of prompt and response. `perf/max_rss_gb` is the
    most memory that this process has had so far.
    """
    timings = {alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}
    if "attention_mask" not in batch:
        return timings
    total, responses = float(batch["attention_mask"].sum()), float(response_lengths(batch).sum())
    for name in _PER_TOKEN:
        seconds = timings.get(f"timing_s/{name}", metrics.get(f"timing_s/{name}"))
        tokens = responses if name == "gen" else total
        if seconds is not None and tokens:
            timings[f"timing_per_token_ms/{name}"] = 1000 * seconds / tokens
    seconds = max(metrics["timing_s/step"], 1e-9)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        timings["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        timings["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return {
        **timings,
        "perf/max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT / 2**30,
        "perf/total_num_tokens": total,
        "perf/time_per_step": seconds,
        "perf/throughput": total / seconds / devices,
    }


def part_metrics(batch: DataProto) -> dict[str, float]:
    """Metrics of each part of a `mix` in one step: `data/<part>/prompts`, its number of prompts, and
    `data/<part>/score`, their mean reward where rows were scored.
    """
    means: dict[str, float] = {}
    parts, counted = batch.non_tensor_batch.get("data_part", ()), is_last(batch).tolist()
    for part in dict.fromkeys(filter(None, parts)):
        rows = [row for row, name in enumerate(parts) if name == part and counted[row]]
        scored = [float(batch["reward"][row]) for row in rows if "reward" in batch and batch["scored"][row]]
        means[f"data/{part}/prompts"] = float(len({batch["uid"][row] for row in rows}))
        if scored:
            means[f"data/{part}/score"] = fmean(scored)
    return means


def sample_metrics(batch: DataProto) -> dict[str, float]:
    """Compute verl's validation metrics `val-core/<source>/<variable>/…` and `val-aux/…`: means over the prompts of
    each data source (of a `mix`: of each part).

    A variable is the reward or one of its named parts. The core variable is the part `acc` where there is one, else the
    reward. A prompt with N values has mean@N, std@N, and for n = 2, 4, 8, … N the mean and std of best@n, worst@n and,
    where every row has an extracted answer, maj@n. These are exact expectations over n draws with replacement, where
    verl draws 1000 times. Rows that were not scored have no value, except for `acc`, where they count as 0 as verl
    counts missing sessions (`acc_success_only` leaves them out). `reward/pass@k`, where all rewards of a source are 0
    or 1, is workbench's addition.
    """
    by_source: dict[str, list[dict[str, tuple[list[float], list[Any]]]]] = {}
    for (source, _), rows in by_prompt(batch).items():
        by_source.setdefault(source, []).append(_variables(batch, rows))
    metrics: dict[str, float] = {}
    for source, prompts in by_source.items():
        every = {name: [prompt[name] for prompt in prompts] for name in prompts[0]}
        if not any(values for values, _ in every.get("acc_success_only", [])):  # this source has no accuracy
            every = {name: values for name, values in every.items() if not name.startswith("acc")}
        for name, pairs in every.items():
            core = name == ("acc" if "acc" in every else "reward")
            metrics |= _of_variable(pairs, f"{source}/{name}", core)
        passes = pass_at_ks([values for values, _ in every["reward"]])
        metrics |= {f"val-aux/{source}/reward/pass@{k}": value for k, value in passes.items()}
    if "num_turns" in batch:
        metrics |= reduce([spread("val-aux/num_turns", torch.tensor([float(one) for one in batch["num_turns"]]))])
    return metrics


def by_prompt(batch: DataProto) -> dict[tuple[str, str], list[int]]:
    """Group row numbers by prompt: (part of a `mix`, else data source; uid) → rows. An episode of several rows counts
    by its last row.
    """
    counted = is_last(batch).tolist()
    sources, parts = (batch[name] if name in batch else [None] * len(batch) for name in ("data_source", "data_part"))
    groups: dict[tuple[str, str], list[int]] = {}
    for row, (part, source, uid) in enumerate(zip(parts, sources, batch["uid"], strict=True)):
        if not counted[row]:
            continue
        groups.setdefault((str(part or source), uid), []).append(row)
    return groups


def _variables(batch: DataProto, rows: Sequence[int]) -> dict[str, tuple[list[float], list[Any]]]:
    """Collect the values of one prompt's scored rows: variable (`reward`, or a part such as `acc`) → (values, extracted
    answers).
    """
    scored = [row for row in rows if batch["scored"][row]]
    answers = [getattr(batch["score"][row], "answer", None) for row in scored] if "score" in batch else []
    variables = {"reward": ([float(batch["reward"][row]) for row in scored], answers)}
    for column in batch.columns:
        if column.startswith(REWARD_PREFIX):
            every = [float(batch[column][row]) for row in scored]
            variables[column.removeprefix(REWARD_PREFIX)] = ([one for one in every if math.isfinite(one)], answers)
    if "acc" in variables:
        there, _ = variables["acc_success_only"] = variables["acc"]
        variables["acc"] = ([*there, *[0.0] * (len(rows) - len(there))], answers)
    return variables


def _of_variable(prompts: Sequence[tuple[list[float], list[Any]]], name: str, core: bool) -> dict[str, float]:
    """Average each metric of a variable over the prompts that have it, under `val-core/…` or `val-aux/…`.

    Of the core variable, the means, bests and majorities at the largest number of samples go to `val-core`; all others
    to `val-aux`.
    """
    each = [_of_prompt(*pair) for pair in prompts if pair[0]]
    most = max((len(values) for values, _ in prompts), default=0)
    metrics = {}
    for key in dict.fromkeys(key for one in each for key in one):
        place = "val-core" if core and key.startswith(("mean", "best", "maj")) and f"@{most}" in key else "val-aux"
        metrics[f"{place}/{name}/{key}"] = fmean(one[key] for one in each if key in one)
    return metrics


def _of_prompt(values: list[float], answers: list[Any]) -> dict[str, float]:
    """Compute mean@N, std@N, best@n, worst@n and maj@n of one prompt's N values; maj@n only where every sample has an
    answer.
    """
    statistics = {f"mean@{len(values)}": fmean(values)}
    if len(values) == 1:
        return statistics
    statistics[f"std@{len(values)}"] = pstdev(values)
    voted = len(answers) == len(values) and None not in answers
    tensor = torch.tensor(values, dtype=torch.float64)
    for n in sizes(len(values)):
        drawn = {"best": best_of(tensor, n), "worst": best_of(tensor, n, worst=True)}
        drawn |= {"maj": majority(answers, tensor, n)} if voted else {}
        statistics |= {
            f"{kind}@{n}/{what}": x
            for kind, pair in drawn.items()
            for what, x in zip(("mean", "std"), pair, strict=True)
        }
    return statistics


def pass_at_ks(rewards: Sequence[Sequence[float]]) -> dict[int, float]:
    """Compute the unbiased pass@k for several k: k → the mean over the prompts that have at least k samples.

    `rewards` holds one list of rewards for each prompt. {} where a reward is neither 0 nor 1, or no prompt has two
    samples.
    """
    most = max(map(len, rewards), default=0)
    if most < 2 or not {value for values in rewards for value in values} <= {0.0, 1.0}:
        return {}
    enough = {k: [values for values in rewards if len(values) >= k] for k in (1, *sizes(most))}
    return {k: fmean(pass_at_k(int(sum(one)), len(one), k) for one in many) for k, many in enough.items()}
