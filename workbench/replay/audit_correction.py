"""The second reading of rollout correction, as verl has it: importance weights, rejection, off-policy metrics.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import pstdev, stdev
from typing import Any

from workbench.replay.audit_formulas import (
    HALF,
    AuditView,
    Claim,
    Claims,
    Left,
    Ragged,
    averaged,
    beyond,
    clamp,
    each,
    either,
    flat,
    gap,
    mean,
    placed,
    share,
    size,
)  # fmt: skip


def correction(v: AuditView) -> Claims:
    """Recompute what the rollout correction stage writes: importance weights, rejected tokens, and the metrics of how
    far trainer and sampler are apart.
    """
    if v.setting("bypass_mode"):
        yield Claim("old_log_probs", v.after["rollout_log_probs"], "bypass: the sampler's", near=0.0)
    else:
        yield from corrected(v, "old_log_probs", "", whole=True)


def corrected(v: AuditView, column: str, prefix: str, *, whole: bool) -> Claims:
    """Recompute weights, rejections and metrics that follow from the trainer's log-probs in `column`.

    `prefix` begins the names of the correction's settings. `whole` is false where the log-probs come from several
    mini-batches, whose metrics cannot be recomputed.
    """
    b, mask = v.after, v.after.mask
    trainer, sampler = b.own(column), b.own("rollout_log_probs")
    logs = each(gap, trainer, sampler)
    claims = _off_policy(trainer, sampler, logs)
    if v.setting(f"{prefix}rollout_is"):
        claims = itertools.chain(claims, _weights(v, logs, mask, prefix))
    if v.setting(f"{prefix}rollout_rs"):
        claims = itertools.chain(claims, _rejections(v, logs, mask, prefix))
    normalised = ("_is_weights", "_norm_factor") * bool(v.setting(f"{prefix}rollout_is_batch_normalize"))
    of_parts = ("_std", "_sample_size", *normalised)
    for claim in claims:
        if prefix and claim.name.endswith(of_parts):
            yield Left(claim.name, "of each micro-batch, and their cut is not recorded")
        elif whole or isinstance(claim.value, list):
            yield claim
        else:
            yield Left(claim.name, "computed in several mini-batches")


def _off_policy(trainer: Ragged, sampler: Ragged, logs: Ragged) -> Iterator[Claim]:
    """Recompute verl's diagnostics of trainer against sampler log-probs: perplexities, KL, χ². A row without tokens has
    log-perplexity 0.
    """
    each_log = flat(logs)
    if not each_log:
        return
    mine, theirs = [-mean(row) for row in trainer], [-mean(row) for row in sampler]
    gaps, sums = [x - y for x, y in zip(mine, theirs, strict=True)], [clamp(math.fsum(row), -20, 20) for row in logs]
    metrics = {
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
    for name, value in metrics.items():
        noise = rough.get(name, max(map(abs, (*mine, *theirs))) if "diff" in name else 1.0)
        yield Claim(f"rollout_corr/{name}", value, "verl's off-policy diagnostics", noise)


def _band(given: Any) -> tuple[float | None, float]:
    """Parse a threshold into (lower bound or None, upper bound): 2.0, (0.5, 2.0), "2.0" or "0.5_2.0"."""
    parts = given.split("_") if isinstance(given, str) else given if isinstance(given, tuple | list) else [given]
    return (float(parts[0]) if len(parts) > 1 else None), float(parts[-1])


def _share(name: str, flags: Sequence[bool | None], formula: str) -> Claim:
    unsure = mean([HALF * (one is None) for one in flags])
    return Claim(name, mean(list(map(share, flags))), formula, 1 + unsure)


def _deviation(values: Sequence[float], name: str, formula: str) -> Claim:
    return Claim(name, pstdev(values) if len(values) > 1 else 0.0, formula, 1 + max(map(abs, values), default=0.0))


def _weights(v: AuditView, logs: Ragged, mask: list[list[int]], prefix: str) -> Iterator[Claim]:
    """Recompute the importance weights, of tokens or of whole rows; a row's weight is the product over its own tokens."""
    lower, upper = _band(v.setting(f"{prefix}rollout_is_threshold"))
    whole, sums = v.setting(f"{prefix}rollout_is") == "sequence", list(map(math.fsum, logs))
    exponents = [[total] * len(row) for row, total in zip(logs, sums, strict=True)] if whole else logs
    raw = each(lambda x: math.exp(clamp(x, -20, 20)), exponents)
    kept = each(lambda x: min(x, upper) if lower is None else x * (lower <= x <= upper), raw)
    if not flat(kept):
        return
    factor = 1.0
    if v.setting(f"{prefix}rollout_is_batch_normalize"):
        found = mean(list(map(mean, filter(None, kept)))) if whole else mean(flat(kept))
        factor = found if found > 1e-8 else 1.0
        yield Claim("rollout_corr/rollout_is_batch_norm_factor", factor, "mean weight of tokens, or of rows", 1.0)
    made = placed(each(lambda x: x / factor, kept), mask)
    yield Claim("rollout_is_weights", made, "trainer over sampler, truncated or in the band", 20.0)
    of_rows = each(lambda x: math.exp(min(x, 20)), [sums])[0]
    yield from _of_weights("rollout_corr/rollout_is", raw, kept, of_rows if whole else None, (lower, upper))


def _of_weights(p: str, raw: Ragged, kept: Ragged, of_rows: list[float] | None, band: Any) -> Iterator[Claim]:
    """Recompute verl's statistics of the importance weights. The largest and smallest of rows are those before
    truncation.
    """
    tokens, rows, (lower, upper) = flat(kept), list(map(mean, kept)), band
    low = 1 / upper if lower is None else lower
    ratios, extremes = (flat(raw), tokens) if of_rows is None else (of_rows, of_rows)
    high_of, low_of = each(lambda x: beyond(x, upper), [ratios]), each(lambda x: beyond(-x, -low), [ratios])
    yield averaged(f"{p}_mean", tokens, "mean weight of own tokens", 20 * size(tokens))
    yield Claim(f"{p}_max", max(extremes), "largest weight; of rows untruncated", 20 * max(extremes))
    yield Claim(f"{p}_min", min(extremes), "smallest weight; of rows untruncated", 20.0)
    yield _share(f"{p}_ratio_fraction_high", high_of[0], "share of ratios above")
    yield _share(f"{p}_ratio_fraction_low", low_of[0], "share of ratios below")
    if lower is not None:
        out = each(lambda x: either(beyond(x, upper), beyond(-x, -lower)), raw)
        yield _share(f"{p}_oob_ratio", flat(out), "share of tokens outside the band")
    yield _deviation(tokens, f"{p}_std", "deviation of the weights")
    squares = mean(flat(each(lambda x: x * x, kept)))
    yield Claim(f"{p}_eff_sample_size", mean(tokens) ** 2 / squares if squares else 0.0, "(mean w)² / mean w²", 20.0)
    yield from _of_rows(f"{p}_seq", rows, "rows' mean weights", 20.0)
    yield Claim(f"{p}_seq_max_deviation", max(abs(x - 1) for x in rows), "largest |row's mean weight − 1|", 20.0)
    means = list(map(mean, raw))
    yield _share(f"{p}_seq_fraction_high", each(lambda x: beyond(x, upper), [means])[0], "share of rows above")
    yield _share(f"{p}_seq_fraction_low", each(lambda x: beyond(-x, -low), [means])[0], "share of rows below")


def _of_rows(p: str, rows: list[float], what: str, noise: float) -> Iterator[Claim]:
    top = max(map(abs, rows))
    yield averaged(f"{p}_mean", rows, f"mean of {what}", noise * (1 + top))
    yield Claim(f"{p}_std", stdev(rows) if len(rows) > 1 else 0.0, f"deviation of {what} (n − 1)", noise * (1 + top))
    yield Claim(f"{p}_max", max(rows), f"largest of {what}", noise * (1 + top))
    yield Claim(f"{p}_min", min(rows), f"smallest of {what}", noise * (1 + top))


def _kinds(v: AuditView, prefix: str) -> dict[str, Any]:
    """Map each kind of rejection to its threshold, read from a mapping or from verl's two comma-separated texts."""
    kinds, thresholds = v.setting(f"{prefix}rollout_rs"), v.setting(f"{prefix}rollout_rs_threshold")
    if not isinstance(kinds, str):
        return dict(kinds)
    names = [one.strip() for one in kinds.split(",")]
    parts = thresholds.split(",") if isinstance(thresholds, str) else [thresholds]
    return dict(zip(names, parts * len(names) if len(parts) == 1 else parts, strict=True))


_STATISTICS: dict[str, Any] = {
    "k1": lambda x: -clamp(x, -20, 20),
    "k2": lambda x: clamp(x, -20, 20) ** 2 / 2,
    "k3": lambda x: math.expm1(clamp(x, -20, 20)) - clamp(x, -20, 20),
}
_OVER: dict[str, Any] = {"seq_sum": math.fsum, "seq_mean": mean, "seq_max": lambda row: max(row, default=0.0)}


def _rejections(v: AuditView, logs: Ragged, mask: list[list[int]], prefix: str) -> Iterator[Claim]:
    """Recompute which tokens and rows the loss leaves out.

    k1 = −log r must lie between the logarithms of the two bounds; k2 and k3 must not exceed one bound.
    """
    out: list[list[bool | None]] = each(lambda _: False, logs)
    for kind, bound in _kinds(v, prefix).items():
        lower, upper = _band(bound)
        level, _, k = kind.rpartition("_")
        if k == "k1":
            lower, upper = math.log(1 / upper if lower is None else lower), math.log(upper)
        stat = each(_STATISTICS[k], logs)
        if level in _OVER:
            stat = [[_OVER[level](row)] * len(row) for row in stat]
        high = each(lambda x, at=upper: beyond(x, at), stat)
        low = each(lambda x, at=lower: at is not None and beyond(-x, -at), stat)
        mine = each(either, high, low)
        yield from _of_kind(
            f"rollout_corr/rollout_rs_{kind}", level not in _OVER, stat, (high, low, mine), (lower, upper)
        )
        out = each(either, out, mine)
    kept = placed(each(lambda x: None if x is None else float(not x), out), mask)
    if "loss_mask" in v.before:
        kept = each(lambda x, inside: x if inside else 0.0, kept, v.before["loss_mask"])
    yield Claim("loss_mask", kept, "the response mask (or the loss mask before) without rejected tokens")
    yield _share("rollout_corr/rollout_rs_masked_fraction", flat(out), "share of own tokens rejected")
    rows = list(map(_any, out))
    yield _share("rollout_corr/rollout_rs_seq_masked_fraction", rows, "share of rows with a rejected token")


def _any(flags: Sequence[bool | None]) -> bool | None:
    return True if any(flags) else None if None in flags else False


def _of_kind(p: str, tokenwise: bool, stat: Ragged, flags: Any, bounds: Any) -> Iterator[Claim]:
    """Recompute verl's statistics of one kind of rejection."""
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
    yield from _of_rows(f"{p}_seq", rows, "rows", 1.0)
    yield Claim(f"{p}_seq_max_deviation", max(map(abs, rows)), "largest |row|", 1 + max(map(abs, rows)))
    yield _share(f"{p}_seq_fraction_high", [beyond(x, upper) for x in rows], "share of rows above")
    if lower is not None:
        yield _share(f"{p}_seq_fraction_low", [beyond(-x, -lower) for x in rows], "share of rows below")
