"""Validation with several samples a prompt, under verl's names, and the unbiased pass@k that verl lacks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.functional.passes import expected_best, majority, pass_at_k, sizes


def sample_metrics(batch: DataProto) -> dict[str, float]:
    """Per data source, means over prompts: `val-core/<source>/reward/` mean@N, best@N/mean and maj@N/mean for the largest N;
    `val-aux/…` std@N, best@n, worst@n, maj@n for n = 2, 4, 8 … and pass@k where all rewards are 0 or 1.

    best and worst are exact expectations over draws with replacement (verl draws 1000 times); maj needs extracted answers.
    Rows without a judgement are left out; a prompt counts with the samples that it has.
    """
    found: dict[str, float] = {}
    for source, prompts in _by_source(batch).items():
        most = max(len(values) for values, _ in prompts)
        core, aux = f"val-core/{source}/reward", f"val-aux/{source}/reward"
        found[f"{core}/mean@{most}"] = fmean(fmean(values) for values, _ in prompts)
        if most == 1:
            continue
        found[f"{aux}/std@{most}"] = fmean(pstdev(values) for values, _ in prompts)
        answered = any(answer is not None for _, answers in prompts for answer in answers)
        for n in sizes(most):
            place = core if n == most else aux
            tensors = [torch.tensor(values) for values, _ in prompts]
            found[f"{place}/best@{n}/mean"] = fmean(expected_best(values, n) for values in tensors)
            found[f"{aux}/worst@{n}/mean"] = fmean(expected_best(values, n, worst=True) for values in tensors)
            if answered:
                pairs = zip(tensors, prompts, strict=True)
                found[f"{place}/maj@{n}/mean"] = fmean(majority(answers, values, n) for values, (_, answers) in pairs)
        if all(value in (0.0, 1.0) for values, _ in prompts for value in values):
            for k in (1, *sizes(most)):
                enough = [values for values, _ in prompts if len(values) >= k]
                found[f"{aux}/pass@{k}"] = fmean(pass_at_k(int(sum(values)), len(values), k) for values in enough)
    return found


def _by_source(batch: DataProto) -> dict[str, list[tuple[list[float], list[Any]]]]:
    """Source → (rewards, answers) of each prompt that has a judgement."""
    sources: Sequence[Any] = batch["data_source"] if "data_source" in batch else [None] * len(batch)
    scores: Sequence[Any] = batch["score"] if "score" in batch else [None] * len(batch)
    groups: dict[tuple[str, str], tuple[list[float], list[Any]]] = {}
    rows = zip(sources, batch["uid"], batch["reward"].tolist(), batch["scored"].tolist(), scores, strict=True)
    for source, uid, value, scored, score in rows:
        if scored:
            values, answers = groups.setdefault((str(source), uid), ([], []))
            values.append(value)
            answers.append(getattr(score, "answer", None))
    found: dict[str, list[tuple[list[float], list[Any]]]] = {}
    for (source, _), pair in groups.items():
        found.setdefault(source, []).append(pair)
    return found
