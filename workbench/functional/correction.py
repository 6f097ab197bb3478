"""Rollout correction: the sampler's and the trainer's probabilities differ; weights, rejections and diagnostics for it.

Names, defaults, formulas and metrics are those of verl's `algorithm.rollout_correction`. log r = old − rollout per token:
trainer over sampler. All tensors [B, T]; values outside the mask are ignored; half precision is computed in float32.
Weights and rejection are independent of each other: both see the whole mask. Rows without a token count in metrics over
rows as verl counts them: weight 0, log r 0, perplexity 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.functional.masking import by_rows, kept, masked_mean, masked_sum

LEVELS = ("token", "sequence")
"""Levels of `importance_weights`."""
REJECTIONS = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""Kinds of `rejected`: a token's or a row's divergence, by k1 (−log r), k2 (½·log² r) or k3 (r − 1 − log r)."""
_FAR = 20.0
"""Bound of log r before it is exponentiated."""
Band = tuple[float | None, float]
"""(lower, upper) of a threshold; lower None: only the upper bound was given."""


def log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Log ratio of trainer to sampler per token, old − rollout: [B, T], at least float32, 0 outside the mask, no gradient."""
    given = (old_log_probs.detach(), rollout_log_probs.detach())
    old, rollout = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in given)
    return kept(old - rollout, mask)


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
) -> Tensor:
    """Importance weights [B, T]: trainer's over sampler's probability r of each token, or of its row (`level="sequence"`).

    r = exp(clamp(log r, ±20)); a row's log r is the sum over its tokens. Without `lower` weights are truncated at `upper`
    (TIS); with it, weights outside [lower, upper] are 0 (masked IS, IcePop). `batch_normalize` divides them by their mean,
    over all tokens, or for `sequence` over the rows that have a token, each counted once. 0 outside the mask. No gradient
    flows through them. Yao et al. 2025 (TIS); verl's `rollout_is`. Raises `ValueError` for another level or such bounds.
    """

    def formula(old: Tensor, rollout: Tensor, inside: Tensor) -> tuple[Tensor]:
        return (_limited(_raw_weights(log_ratio(old, rollout, inside), inside, level), lower, upper),)

    weights = by_rows(formula, old_log_probs.detach(), rollout_log_probs.detach(), mask)[0]
    return weights / _norm(weights, mask, level) if batch_normalize else weights


def _raw_weights(logs: Tensor, mask: Tensor, level: str) -> Tensor:
    if level not in LEVELS:
        raise ValueError(f"level of importance weights; expected 'token' or 'sequence'; found {level!r}")
    logs = logs.sum(-1, keepdim=True).expand_as(logs) if level == "sequence" else logs
    return logs.clamp(-_FAR, _FAR).exp() * mask.bool()


def _limited(raw: Tensor, lower: float | None, upper: float) -> Tensor:
    if not 0 < (upper if lower is None else lower) <= upper < math.inf:
        raise ValueError(f"bounds of importance weights; expected 0 < lower ≤ upper; found {lower} and {upper}")
    return raw.clamp(max=upper) if lower is None else torch.where((raw >= lower) & (raw <= upper), raw, 0.0)


def _norm(weights: Tensor, mask: Tensor, level: str) -> float:
    """Return the mean importance weight that `batch_normalize` divides by: over tokens with `level` "token", over rows with
    "sequence"; 1 where all weights are 0."""
    rows = mask.bool().any(-1)
    tokens = masked_mean(weights, mask)
    mean = float(masked_mean(weights, mask, dim=-1)[rows].mean() if level == "sequence" and rows.any() else tokens)
    return mean if mean > 1e-8 else 1.0


def rejected(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    kind: str,
    *,
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """Mark tokens (kinds `token_*`) or rows (`seq_*`) on which trainer and sampler differ too much: [B, T] bool.

    `kind` is one of `REJECTIONS`: per token k1 = −log r, k2 = ½·log² r or k3 = r − 1 − log r, with log r clamped to ±20;
    `seq_*` take a row's sum, mean or maximum of it. k2 and k3 are kept up to `upper`. k1 is kept between log `lower` and
    log `upper`, `lower` None meaning 1/upper. As in verl's code it is −log r that is tested: bounds (0.6, 1.4) keep
    r from 1/1.4 = 0.71 to 1/0.6 = 1.67, so that of r = 1.5 and r = 0.65 the second is rejected (verl's prose speaks of
    bounds of r itself; the same where lower = 1/upper). NaN is rejected. Raises `ValueError` for another kind, and for
    bounds that are not finite, positive and ordered.
    """

    def formula(old: Tensor, rollout: Tensor, inside: Tensor) -> tuple[Tensor]:
        values, bounds = _tested(log_ratio(old, rollout, inside), inside, kind, lower, upper)
        return (~_kept(values, bounds).expand_as(inside) & inside.bool(),)

    return by_rows(formula, old_log_probs.detach(), rollout_log_probs.detach(), mask)[0]


def _tested(
    logs: Tensor, mask: Tensor, kind: str, lower: float | None, upper: float
) -> tuple[Tensor, tuple[float | None, float]]:
    """Return the values that a kind of rejection tests, [B, T] or for rows [B, 1], and their bounds; for k1 these are
    the bounds' logarithms.
    """
    if kind not in REJECTIONS:
        raise ValueError(f"kind of rejection {kind!r}; expected one of {', '.join(REJECTIONS)}")
    over, _, estimator = kind.rpartition("_")
    if not 0 < (upper if lower is None else lower) < math.inf or (
        lower is not None and (lower > upper or estimator != "k1")
    ):
        raise ValueError(
            f"bounds of {kind}; expected 0 < lower ≤ upper, and an upper one alone but for k1; found {lower}, {upper}"
        )
    logs = logs.clamp(-_FAR, _FAR)
    values = {"k1": -logs, "k2": 0.5 * logs.square(), "k3": logs.exp() - 1 - logs}[estimator]
    if over == "seq_sum":
        values = masked_sum(values, mask, dim=-1)[:, None]
    elif over == "seq_mean":
        values = masked_mean(values, mask, dim=-1)[:, None]
    elif over == "seq_max":  # k2 and k3 are never negative, so that 0 stands for a row without a token
        values = torch.where(mask.bool(), values, 0.0).amax(-1, keepdim=True)
    if estimator != "k1":
        return values, (None, upper)
    return values, (-math.log(upper) if lower is None else math.log(lower), math.log(upper))


def _kept(values: Tensor, bounds: tuple[float | None, float]) -> Tensor:
    lower, upper = bounds
    return values <= upper if lower is None else (values >= lower) & (values <= upper)


@dataclass(frozen=True)
class Statistic:
    """A metric's value, and how it is joined with the values of other rows: as a weighted mean, a maximum or a minimum."""

    value: float
    weight: float = 1.0
    """Of a mean: how many tokens or rows it is over."""
    kind: str = "mean"
    """`mean`, `max` or `min`."""


@dataclass(frozen=True)
class Corrected:
    """Result of `corrected`: importance weights, the mask without rejected tokens, and metrics."""

    weights: Tensor | None
    """Importance weights [B, T]; None where none were asked for."""
    mask: Tensor
    """The mask without what was rejected: [B, T], of the mask's dtype."""
    metrics: dict[str, Statistic]
    """verl's names, without `rollout_corr/`."""


def corrected(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    level: str | None = None,
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
    rejections: Mapping[str, Band] | None = None,
) -> Corrected:
    """Importance weights, rejection and metrics of the gap between trainer (old) and sampler (rollout) log-probs [B, T].

    Weights are those of `importance_weights` (`level` None: none); the mask loses what any kind of `rejections`, kind →
    (lower, upper), marks: see `rejected`. Both are computed on the whole mask.
    """
    logs = log_ratio(old_log_probs, rollout_log_probs, mask)
    metrics = off_policy(old_log_probs, rollout_log_probs, mask)
    weights, inside = None, mask.bool()
    if level is not None:
        raw = _raw_weights(logs, mask, level)
        weights = _limited(raw, lower, upper)
        metrics |= _weight_metrics(weights, raw, logs, mask, level, (lower, upper))
        if batch_normalize:
            norm = _norm(weights, mask, level)
            metrics["rollout_is_batch_norm_factor"] = Statistic(norm, float(inside.sum()))
            weights = weights / norm
    out = torch.zeros_like(inside)
    for kind, band in (rejections or {}).items():
        values, bounds = _tested(logs, mask, kind, *band)
        mine = ~_kept(values, bounds).expand_as(inside) & inside
        metrics |= _rejection_metrics(kind, values, bounds, mine, mask)
        out |= mine
    if rejections and inside.any():
        metrics["rollout_rs_masked_fraction"] = _over_tokens(out, mask)
        metrics["rollout_rs_seq_masked_fraction"] = _over_rows(out.any(-1))
    return Corrected(weights, mask * (~out).to(mask.dtype), metrics)


# --- metrics --------------------------------------------------------------------------------------


def _over_tokens(values: Tensor, mask: Tensor) -> Statistic:
    return Statistic(float(masked_mean(values.expand_as(mask).double(), mask)), float(mask.sum()))


def _over_rows(values: Tensor) -> Statistic:
    return Statistic(float(values.double().mean()), len(values))


def _largest(values: Tensor) -> Statistic:
    return Statistic(float(values.max()), kind="max")


def _smallest(values: Tensor) -> Statistic:
    return Statistic(float(values.min()), kind="min")


def _spread(name: str, values: Tensor) -> dict[str, Statistic]:
    """Compute mean, standard deviation (n − 1; 0 for one row), maximum and minimum of one number per row: [B]."""
    std = float(values.double().std()) if len(values) > 1 else 0.0
    extremes = {f"{name}_max": _largest(values), f"{name}_min": _smallest(values)}
    return {f"{name}_mean": _over_rows(values), f"{name}_std": Statistic(std, len(values)), **extremes}


def _deviation(values: Tensor, mask: Tensor) -> Statistic:
    """Compute the standard deviation (÷ n) of values [B, T] over the mask."""
    inside = values.expand_as(mask)[mask.bool()].double()
    return Statistic(float(inside.std(unbiased=False)), len(inside))


def _weight_metrics(
    weights: Tensor, raw: Tensor, logs: Tensor, mask: Tensor, level: str, band: Band
) -> dict[str, Statistic]:
    """Compute verl's metrics `rollout_is_*`. Maximum and minimum of sequence weights are those before truncation. {}
    for an empty mask.
    """
    inside = mask.bool()
    if not inside.any():
        return {}
    lower, upper = band
    lowest = 1 / upper if lower is None else lower
    if level == "sequence":
        sums = logs.sum(-1)
        high, low = _over_rows(sums > math.log(upper)), _over_rows(sums < math.log(lowest))
        extremes = sums.clamp(max=_FAR).exp()
    else:
        high, low = _over_tokens(raw > upper, mask), _over_tokens(raw < lowest, mask)
        extremes = weights[inside]
    rows, raw_rows = masked_mean(weights, mask, dim=-1), masked_mean(raw, mask, dim=-1)
    outside = {} if lower is None else {"rollout_is_oob_ratio": _over_tokens((raw < lower) | (raw > upper), mask)}
    return {
        "rollout_is_mean": _over_tokens(weights, mask),
        "rollout_is_std": _deviation(weights, mask),
        "rollout_is_max": _largest(extremes),
        "rollout_is_min": _smallest(extremes),
        "rollout_is_eff_sample_size": Statistic(effective_sample_size(weights, mask), float(mask.sum())),
        "rollout_is_ratio_fraction_high": high,
        "rollout_is_ratio_fraction_low": low,
        **outside,
        **_spread("rollout_is_seq", rows),
        "rollout_is_seq_max_deviation": _largest((rows - 1).abs()),
        "rollout_is_seq_fraction_high": _over_rows(raw_rows > upper),
        "rollout_is_seq_fraction_low": _over_rows(raw_rows < lowest),
    }


def _rejection_metrics(
    kind: str, values: Tensor, bounds: tuple[float | None, float], out: Tensor, mask: Tensor
) -> dict[str, Statistic]:
    """Compute verl's metrics `rollout_rs_<kind>_*` of the tested values, per token [B, T] or per row [B, 1]. {} for an
    empty mask.

    `_seq_*` and the shares of rows are over rows that have a token.
    """
    inside, (lower, upper), name = mask.bool(), bounds, f"rollout_rs_{kind}"
    if not inside.any():
        return {}
    filled, of_tokens = inside.any(-1), kind.startswith("token")
    rows = (masked_mean(values, mask, dim=-1) if of_tokens else values[:, 0])[filled]
    tested = values[inside] if of_tokens else rows
    floor = 0.0 if lower is None else lower
    below = {} if lower is None else {f"{name}_seq_fraction_low": _over_rows(rows < lower)}
    return {
        f"{name}_mean": _over_tokens(values, mask),
        f"{name}_std": _deviation(values.clamp(floor, upper), mask),
        f"{name}_max": _largest(tested),
        f"{name}_min": _smallest(tested),
        f"{name}_fraction_high": _over_rows(tested > upper),
        f"{name}_fraction_low": _over_rows(tested < (-math.inf if lower is None else lower)),
        **_spread(f"{name}_seq", rows),
        f"{name}_seq_max_deviation": _largest(rows.abs()),
        f"{name}_seq_fraction_high": _over_rows(rows > upper),
        **below,
        f"{name}_masked_fraction": _over_tokens(out, mask),
        f"{name}_seq_masked_fraction": _over_rows(out.any(-1)[filled]),
    }


def effective_sample_size(weights: Tensor, mask: Tensor) -> float:
    """Effective sample size of weights w [B, T] over the mask, as a share of its tokens: (mean w)² / mean w² ≤ 1; 0 of none."""
    weights = weights.double()
    squares = float(masked_mean(weights.square(), mask))
    return float(masked_mean(weights, mask)) ** 2 / squares if squares > 0 else 0.0


def off_policy(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Statistic]:
    """Metrics of the gap between the trainer's (old) and the sampler's (rollout) log-probs [B, T]: verl's names → values.

    `kl` = mean(rollout − old) estimates KL(sampler‖trainer) in nats, `k3_kl` does so without negative values. Perplexities
    are means over rows of exp(−mean log-prob of the row); `log_ppl_diff` is trainer minus sampler. `chi2_*` are
    mean r² − 1 of tokens and of rows, with log r clamped to ±20. {} for an empty mask.
    """
    if not mask.any():
        return {}

    def of_rows(old: Tensor, rollout: Tensor, inside: Tensor) -> tuple[Tensor, ...]:
        logs = log_ratio(old, rollout, inside).double()
        means = (-masked_mean(one.double(), inside, dim=-1) for one in (old, rollout))
        tokens = (-logs, logs.expm1() - logs, (2 * logs.clamp(-_FAR, _FAR)).exp() - 1)
        return *means, logs.sum(-1), *(masked_sum(one, inside, dim=-1) for one in tokens)

    found = by_rows(of_rows, old_log_probs.detach(), rollout_log_probs.detach(), mask)
    trainer, sampler, logs, *tokens = found
    count = float(mask.sum())
    kl, k3, chi2_token = (Statistic(float(one.sum()) / count, count) for one in tokens)
    gap, sums = trainer - sampler, logs.clamp(-_FAR, _FAR)
    return {
        "training_ppl": _over_rows(trainer.exp()),
        "training_log_ppl": _over_rows(trainer),
        "rollout_ppl": _over_rows(sampler.exp()),
        "rollout_log_ppl": _over_rows(sampler),
        "kl": kl,
        "k3_kl": k3,
        "log_ppl_diff": _over_rows(gap),
        "log_ppl_abs_diff": _over_rows(gap.abs()),
        "log_ppl_diff_max": _largest(gap),
        "log_ppl_diff_min": _smallest(gap),
        "ppl_ratio": _over_rows(gap.exp()),
        "chi2_token": chi2_token,
        "chi2_seq": _over_rows((2 * sums).exp() - 1),
    }
