"""The second reading of rollout correction: weights, rejections and diagnostics, as verl's `rollout_correction` has them.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import pstdev, stdev
from typing import Any

from workbench.replay.audit_formulas import (
    FLOAT32,
    Claim,
    Claims,
    Left,
    Ragged,
    View,
    averaged,
    beyond,
    clamp,
    each,
    either,
    flat,
    gap,
    mean,
    placed,
    size,
)  # fmt: skip


def correction(v: View) -> Claims:
    """The stage: weights on the full mask, rejected tokens, and the gap between sampler and trainer."""
    if v.setting("bypass_mode"):
        yield Claim("old_log_probs", v.after["rollout_log_probs"], "bypass: the sampler's", near=0.0)
    else:
        yield from corrected(v, "old_log_probs", "", whole=True)


def corrected(v: View, column: str, prefix: str, *, whole: bool) -> Claims:
    """Weights, rejection and metrics from the trainer's log-probs of a column. `prefix` is that of the settings' names. Not
    `whole`: they were computed in several mini-batches, and their metrics cannot be put together again."""
    b, mask = v.after, v.after.mask
    trainer, sampler = b.own(column), b.own("rollout_log_probs")
    logs = each(gap, trainer, sampler)
    claims = _off_policy(trainer, sampler, logs)
    if v.setting(f"{prefix}rollout_is"):
        claims = itertools.chain(claims, _weights(v, logs, mask, prefix))
    if v.setting(f"{prefix}rollout_rs"):
        claims = itertools.chain(claims, _rejections(v, logs, mask, prefix))
    for claim in claims:
        column_of = isinstance(claim.value, list)
        if whole or (column_of and not v.setting(f"{prefix}rollout_is_batch_normalize")):
            yield claim
        else:
            yield Left(claim.name, "computed in several mini-batches")


def _off_policy(trainer: Ragged, sampler: Ragged, logs: Ragged) -> Iterator[Claim]:
    """verl's diagnostics; a row without a token has log-perplexity 0."""
    each_log = flat(logs)
    if not each_log:
        return
    mine, theirs = [-mean(row) for row in trainer], [-mean(row) for row in sampler]
    gaps, sums = [x - y for x, y in zip(mine, theirs, strict=True)], [clamp(math.fsum(row), -20, 20) for row in logs]
    found = {
        "training_ppl": mean([math.exp(x) for x in mine]),
        "training_log_ppl": mean(mine),
        "rollout_ppl": mean([math.exp(x) for x in theirs]),
        "rollout_log_ppl": mean(theirs),
        "kl": -mean(each_log),
        "k3_kl": mean([math.expm1(x) - x for x in each_log]),
        "log_ppl_diff": mean(gaps),
        "log_ppl_abs_diff": size(gaps),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "ppl_ratio": mean([math.exp(x) for x in gaps]),
        "chi2_token": mean([math.expm1(2 * clamp(x, -20, 20)) for x in each_log]),
        "chi2_seq": mean([math.expm1(2 * x) for x in sums]),
    }
    rough = {"k3_kl": size(each_log), "kl": size(each_log), "chi2_token": size(each_log), "chi2_seq": size(sums)}
    for name, value in found.items():
        noise = rough.get(name, max(map(abs, (*mine, *theirs))) if "diff" in name else 1.0)
        yield Claim(f"rollout_corr/{name}", value, "verl's off-policy diagnostics", noise)


def _band(given: Any) -> tuple[float | None, float]:
    """(lower, upper) of a threshold: 2.0, (0.5, 2.0), "2.0" or "0.5_2.0"."""
    parts = given.split("_") if isinstance(given, str) else given if isinstance(given, tuple | list) else [given]
    return (float(parts[0]) if len(parts) > 1 else None), float(parts[-1])


def _share(name: str, flags: Sequence[bool | None], formula: str) -> Claim:
    unsure = sum(one is None for one in flags) / max(len(flags), 1)
    return Claim(name, mean([float(bool(one)) for one in flags]), formula, 1 + unsure / FLOAT32)


def _deviation(values: Sequence[float], name: str, formula: str) -> Claim:
    return Claim(name, pstdev(values) if len(values) > 1 else 0.0, formula, 1 + max(map(abs, values), default=0.0))


def _weights(v: View, logs: Ragged, mask: list[list[int]], prefix: str) -> Iterator[Claim]:
    """Importance weights of tokens or rows; a row's is the product over its own tokens."""
    lower, upper = _band(v.setting(f"{prefix}rollout_is_threshold"))
    whole, formula, p = v.setting(f"{prefix}rollout_is") == "sequence", "verl's rollout_is", "rollout_corr/rollout_is"
    sums = [math.fsum(row) for row in logs]
    raw = [
        [math.exp(clamp(total if whole else x, -20, 20)) for x in row] for row, total in zip(logs, sums, strict=True)
    ]
    kept = [[min(x, upper) if lower is None else x * (lower <= x <= upper) for x in row] for row in raw]
    rows, tokens = [mean(row) for row in kept], flat(kept)
    if not tokens:
        return
    factor = 1.0
    if v.setting(f"{prefix}rollout_is_batch_normalize"):
        found = mean([x for x, own in zip(rows, kept, strict=True) if own]) if whole else mean(tokens)
        factor = found if found > 1e-8 else 1.0
        yield Claim(f"{p}_batch_norm_factor", factor, "mean weight of tokens, or of rows", 1.0)
    yield Claim("rollout_is_weights", placed([[x / factor for x in row] for row in kept], mask), formula, 20.0)
    low = 1 / upper if lower is None else lower
    wide: Sequence[float] = [math.exp(min(x, 20)) for x in sums] if whole else flat(raw)
    yield averaged(f"{p}_mean", tokens, "mean weight of own tokens", 20 * size(tokens))
    yield Claim(f"{p}_max", max(wide if whole else tokens), "largest weight; of rows untruncated", 20 * max(wide))
    yield Claim(f"{p}_min", min(wide if whole else tokens), "smallest weight; of rows untruncated", 20.0)
    yield _share(f"{p}_ratio_fraction_high", [beyond(x, upper) for x in wide], "share of ratios above")
    yield _share(f"{p}_ratio_fraction_low", [beyond(-x, -low) for x in wide], "share of ratios below")
    if lower is not None:
        out = [a if a is None else a or beyond(-x, -low) for x in flat(raw) for a in [beyond(x, upper)]]
        yield _share(f"{p}_oob_ratio", out, "share of tokens outside the band")
    yield _deviation([clamp(x, 0, upper) for x in tokens], f"{p}_std", "deviation of the weights")
    normal = [x / (mean(tokens) + 1e-8) for x in tokens]
    yield Claim(f"{p}_eff_sample_size", 1 / mean([x * x for x in normal]), "1 / mean((w / mean w)²)", 20.0)
    yield averaged(f"{p}_seq_mean", rows, "mean of rows' mean weights", 20 * size(rows))
    yield Claim(f"{p}_seq_std", stdev(rows) if len(rows) > 1 else 0.0, "their deviation (n − 1)", 20 * max(rows))
    yield Claim(f"{p}_seq_max", max(rows), "the largest", 20 * max(rows))
    yield Claim(f"{p}_seq_min", min(rows), "the smallest", 20.0)
    yield Claim(f"{p}_seq_max_deviation", max(abs(x - 1) for x in rows), "largest |row's mean weight − 1|", 20.0)
    means = [mean(row) for row in raw]
    yield _share(f"{p}_seq_fraction_high", [beyond(x, upper) for x in means], "share of rows above")
    yield _share(f"{p}_seq_fraction_low", [beyond(-x, -low) for x in means], "share of rows below")


def _rejections(v: View, logs: Ragged, mask: list[list[int]], prefix: str) -> Iterator[Claim]:
    """Tokens and rows that the loss leaves out: k1 = −log r between the bounds' logarithms, k2 and k3 up to one bound."""
    given, thresholds = v.setting(f"{prefix}rollout_rs"), v.setting(f"{prefix}rollout_rs_threshold")
    if isinstance(given, str):
        names = [one.strip() for one in given.split(",")]
        parts = thresholds.split(",") if isinstance(thresholds, str) else [thresholds]
        given = dict(zip(names, parts * len(names) if len(parts) == 1 else parts, strict=True))
    out: list[list[bool | None]] = [[False] * len(row) for row in logs]
    for kind, bound in given.items():
        lower, upper = _band(bound)
        level, _, k = kind.rpartition("_")
        if k == "k1":
            lower, upper = math.log(1 / upper if lower is None else lower), math.log(upper)
        stats = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.expm1(x) - x}
        one = each(lambda x, of=stats[k]: of(clamp(x, -20, 20)), logs)
        whole = {"seq_sum": math.fsum, "seq_mean": mean, "seq_max": lambda row: max(row, default=0.0)}.get(level)
        stat = one if whole is None else [[whole(row)] * len(row) for row in one]
        high = [[beyond(x, upper) for x in row] for row in stat]
        low = [[lower is not None and beyond(-x, -lower) for x in row] for row in stat]
        mine = each(either, high, low)
        yield from _of_kind(f"rollout_corr/rollout_rs_{kind}", whole is None, stat, (high, low, mine), (lower, upper))
        out = each(either, out, mine)
    kept = placed([[None if x is None else float(not x) for x in row] for row in out], mask)
    yield Claim("loss_mask", kept, "the response mask without rejected tokens")
    yield _share("rollout_corr/rollout_rs_masked_fraction", flat(out), "share of own tokens rejected")
    rows = [_any(row) for row in out]
    yield _share("rollout_corr/rollout_rs_seq_masked_fraction", rows, "share of rows with a rejected token")


def _any(flags: Sequence[bool | None]) -> bool | None:
    return True if any(flags) else None if None in flags else False


def _of_kind(p: str, tokenwise: bool, stat: Ragged, flags: Any, bounds: Any) -> Iterator[Claim]:
    """verl's statistics of one kind of rejection."""
    (high, low, out), (lower, upper) = flags, bounds
    tokens, rows = flat(stat), [mean(row) for row in stat if row]
    if not tokens:
        return
    here = tokens if tokenwise else rows
    yield averaged(f"{p}_mean", tokens, "mean over own tokens", 1 + size(tokens))
    yield Claim(f"{p}_max", max(here), "the largest", 1 + abs(max(here)))
    yield Claim(f"{p}_min", min(here), "the smallest", 1 + abs(min(here)))
    ends = (flat(high), flat(low)) if tokenwise else ([row[0] for row in high if row], [row[0] for row in low if row])
    yield _share(f"{p}_fraction_high", ends[0], "share above")
    yield _share(f"{p}_fraction_low", ends[1], "share below")
    yield _deviation([clamp(x, lower or 0.0, upper) for x in tokens], f"{p}_std", "deviation within the bounds")
    yield _share(f"{p}_masked_fraction", flat(out), "share of own tokens rejected")
    yield _share(f"{p}_seq_masked_fraction", [_any(row) for row in out if row], "share of rows with a rejected token")
    yield averaged(f"{p}_seq_mean", rows, "mean over rows", 1 + size(rows))
    yield Claim(f"{p}_seq_std", stdev(rows) if len(rows) > 1 else 0.0, "deviation over rows (n − 1)", 1 + size(rows))
    yield Claim(f"{p}_seq_max", max(rows), "largest row", 1 + abs(max(rows)))
    yield Claim(f"{p}_seq_min", min(rows), "smallest row", 1 + abs(min(rows)))
    yield Claim(f"{p}_seq_max_deviation", max(map(abs, rows)), "largest |row|", 1 + max(map(abs, rows)))
    yield _share(f"{p}_seq_fraction_high", [beyond(x, upper) for x in rows], "share of rows above")
    if lower is not None:
        yield _share(f"{p}_seq_fraction_low", [beyond(-x, -lower) for x in rows], "share of rows below")
