"""Independent formulas for updates (losses, clipping and KL, token by token), and for rollout correction as in verl.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`. A row's own log-probs of its
last pass are recorded (`new_log_probs`), and those of the passes before (`new_log_probs/1`, …), so that an update is recomputed whole.
Of a run that was recorded without them only the last pass's `clipped` is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import pstdev, stdev
from typing import Any

from workbench.replay.audit_formulas import (
    HALF,
    MODEL,
    AuditView,
    Claim,
    Claims,
    Left,
    Ragged,
    averaged,
    beyond,
    bounded,
    clamp,
    counted_tokens,
    each,
    either,
    flat,
    gap,
    kl,
    left,
    mean,
    placed,
    sessions_of,
    share,
    size,
)  # fmt: skip
from workbench.replay.audit_stages import log_prob

Masks = list[list[int]]
UNKNOWN = "mini-batches are skipped, or passes before the last are not recorded"
LATER = "what the model gives in a later mini-batch, or pass, is not recorded"
"""Why a metric over the steps of an update is not recomputed."""


def update(v: AuditView) -> Claims:
    """Recompute loss, clipping and KL of an update stage's last pass over the batch."""
    role = v.stage.removeprefix("update_")
    yield from left(("grad_norm", "lr", "nonfinite", "loss_scale", "overflows"), "the optimizer's", role)
    yield Left(f"{role}/empty_mini_batches", "counted over all passes")
    yield from _own_scores(v, role)
    early = v.step < v.setting("from_step")
    if early or not any(map(any, counted_tokens(v.after))):
        if early:
            yield Claim(f"{role}/skipped", 1.0, "step < from_step")
        if "new_log_probs" in v.after:
            old = "rollout_log_probs" if any(name.startswith("bypass.") for name in v.settings) else "old_log_probs"
            for name in ("new_log_probs", *_earlier(v)):
                yield Claim(name, v.after[old], "nothing was updated", near=0.0)
            yield Claim("clipped", [[False] * len(row) for row in v.after.mask], "nothing was updated")
            for name in ("rollout_is_weights", "loss_mask") if old == "rollout_log_probs" else ():
                if name in v.after:
                    yield Claim(name, v.after.mask, "nothing was updated")
        return
    yield from {
        "ValueLoss": _critic,
        "CrossEntropy": _supervised,
        "BradleyTerry": _preferences,
        "Divergence": _distilled,
        "Preference": _preferred,
    }.get(str(v.settings.get("loss")), _policy)(v, role)
    for name in term_metrics(v.settings, v.metrics, role):
        if v.settings[f"{name}.loss"] == "Divergence" and v.settings.get("loss") != "Divergence":
            yield Left("divergence", MODEL)
        for metric in v.metrics:
            if metric == f"{role}/{name}" or metric.startswith(f"{role}/{name}_"):
                yield Left(metric, "a further term of the loss")


def term_metrics(settings: Mapping[str, Any], metrics: Mapping[str, float], role: str) -> dict[str, float]:
    """Return weight·value of every further term of an update's loss, by the term's name."""
    names = [key.removesuffix(".weight") for key in settings if key.endswith(".weight")]
    return {name: settings[f"{name}.weight"] * metrics[f"{role}/{name}"] for name in names}


def _own_scores(v: AuditView, role: str) -> Claims:
    """Recompute the old log-probs and entropies that the update itself computed, in its single pass or in a pass of its
    own before it.
    """
    if _one_pass(v):
        yield Claim("new_log_probs", v.after["old_log_probs"], "the old ones: of one pass", near=0.0, partial=True)
    if f"{role}/entropy" in v.metrics:
        made = {"column": "old_log_probs", "entropy": True, "temperature": v.setting("temperature")}
        yield from log_prob(replace(v, settings=made, version=v.after.batch.origins["old_log_probs"].policy_version))


def _one_pass(v: AuditView) -> bool:
    """Return whether old and new log-probs come from one pass: the update wrote both and took a single optimizer step
    or none.
    """
    made, prompts = v.after.batch.origins.get("old_log_probs"), v.setting("ppo_mini_batch_size")
    single = prompts is None or prompts * int(v.after.batch.meta_info.get("group_size", 1)) >= len(sessions_of(v.after))
    return made is not None and made.stage == v.stage and v.setting("ppo_epochs") == 1 and single


def _earlier(v: AuditView) -> list[str]:
    """Name the recorded columns of the passes before the last, in order; none where one is missing."""
    names = [f"new_log_probs/{number}" for number in range(1, int(v.setting("ppo_epochs")))]
    return names if all(name in v.after for name in names) else []


def minis(v: AuditView, role: str) -> list[Sequence[int]] | None:
    """Return the row numbers of each optimizer step; with several `ppo_epochs` an epoch's numbers follow those of the epoch
    before.

    None where some step's log-probs are not recorded: a step was skipped, or there were several passes
    without a column of each, except two passes of one step each whose first has the old log-probs.
    """
    total, prompts, epochs = len(v.after["uid"]), v.setting("ppo_mini_batch_size"), int(v.setting("ppo_epochs"))
    every = list(sessions_of(v.after).values())
    number = len(every) if prompts is None else prompts * int(v.after.batch.meta_info.get("group_size", 1))
    starts = range(0, len(every), max(number, 1))
    sampler = any(name.startswith("bypass.") for name in v.settings)  # its weights are those of the last pass
    known = epochs == 1 or (bool(_earlier(v)) and not sampler)
    known = known or (epochs == 2 and len(starts) == 1 and _begins_with_old(v))
    if not known or v.metrics.get(f"{role}/nonfinite"):
        return None
    orders = [_order(v, len(every), epoch) for epoch in range(epochs)]
    parts = [(epoch, order[start : start + number]) for epoch, order in enumerate(orders) for start in starts]
    return [[epoch * total + row for one in part for row in every[one]] for epoch, part in parts]


def _order(v: AuditView, episodes: int, epoch: int) -> list[int]:
    """Return the order in which a pass takes a batch's episodes; a shuffled one follows the run's seed."""
    if not v.setting("shuffle"):
        return list(range(episodes))
    meta = v.after.batch.meta_info
    return v.shuffled(episodes, meta.get("seed", 0), f"shuffle/{v.stage}", meta.get("step", 0), epoch)


def _begins_with_old(v: AuditView) -> bool:
    """Return whether the first optimizer step computes exactly `old_log_probs` again, with equal weights and
    temperature.
    """
    old = getattr(v.after.batch.origins.get("old_log_probs"), "policy_version", None)
    if _one_pass(v):
        return True
    learned = v.settings.get("loss") == "PolicyLoss" and not any(name.startswith("bypass.") for name in v.settings)
    same = v.scoring.get("temperature") == v.setting("temperature")
    return v.exact and learned and same and old is not None and old + 1 == v.version


def _of_steps(v: AuditView, cut: list[Sequence[int]] | None, name: str, mask: Masks) -> Ragged:
    """Return a column's values at the mask's tokens, one list per row of each pass. In a first pass without a column of its own
    the old log-probs stand in for the new ones.
    """
    passes = 1 if cut is None else sum(map(len, cut)) // max(len(mask), 1)
    names = [name] * passes
    if name == "new_log_probs" and passes > 1:
        names[:-1] = _earlier(v) or ["old_log_probs"]
    return [row for one in names for row in v.after.own(one, mask)]


def aggregated(rows: Ragged, mode: str, scale: float, counts: Ragged | None = None) -> float:
    """Reduce the token losses of a mini-batch to one number, as verl's loss aggregation `mode` does; rows without a
    token are left out.

    `counts` are the rows whose tokens are counted, by default `rows`; `scale` divides in the mode
    seq-mean-token-sum-norm.
    """
    counted = [row for row in (rows if counts is None else counts) if row]
    total = math.fsum(flat(rows))
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return total / max(len(flat(counted)), 1)
    if mode == "seq-mean-token-mean":
        return math.fsum(mean(row) for row in rows) / max(len(counted), 1)
    return total / max(len(counted), 1) / (scale if mode == "seq-mean-token-sum-norm" else 1)


def _critic(v: AuditView, role: str) -> Claims:
    """Recompute the value loss and its metrics for a single mini-batch, whose values are the recorded ones, so that
    nothing is clipped.
    """
    if (cut := minis(v, role)) is None or len(cut) > 1:
        yield from left(("vf_loss", "vf_clipfrac", "vpred_mean"), LATER, role)
    else:
        mask, mode = counted_tokens(v.after), v.setting("loss_agg_mode")
        guesses, returns = v.after.own("values", mask), v.after.own("returns", mask)
        gaps, width = each(gap, guesses, returns), float(len(mask[0]))
        ends = max((abs(x) for x in flat(guesses) + flat(returns)), default=0.0)
        noise = 20 * ends * aggregated(each(lambda x: abs(x) + 1e-6, gaps), mode, width)
        found = aggregated(each(lambda x: x * x / 2, gaps), mode, width)
        yield Claim(f"{role}/vf_loss", found, "½·(V − R)², aggregated: the first pass clips nothing", noise)
        yield Claim(f"{role}/vf_clipfrac", 0.0, "the first pass clips nothing")
        yield averaged(f"{role}/vpred_mean", flat(guesses), "mean value", 20 * size(flat(guesses)) + 1)
    if f"{role}/vf_loss" in v.metrics:
        yield Claim(f"{role}/loss", v.metrics[f"{role}/vf_loss"], "vf_loss")


def _own_log_probs(v: AuditView) -> Claims:
    """Check what is known of the log-probs of each pass without the model."""
    for name in ("new_log_probs", *_earlier(v)):
        yield Left(name, MODEL)
        yield from bounded(v.after, name)


def _supervised(v: AuditView, role: str) -> Claims:
    """Recompute the cross-entropy loss, from the recorded log-probs of the pass itself."""
    yield from _own_log_probs(v)
    if (cut := minis(v, role)) is None:
        yield from left(("loss", "nll"), UNKNOWN, role)
        return
    mask, mode = counted_tokens(v.after), v.setting("loss_agg_mode")
    rows, width = each(lambda x: -x, _of_steps(v, cut, "new_log_probs", mask)), float(len(mask[0]))
    steps = [step for one in cut if any(step := [rows[row] for row in one])]  # others were not taken
    losses = [aggregated(step, mode, width) for step in steps]
    further = [*term_metrics(v.settings, v.metrics, role).values()]
    found = mean(losses) + math.fsum(further)
    yield Claim(f"{role}/loss", found, "−log π of the target tokens, aggregated", size([*losses, *further]))
    yield averaged(f"{role}/nll", [mean(flat(step)) for step in steps], "mean −log π of the target tokens")


def _distilled(v: AuditView, role: str) -> Claims:
    """Recompute the distillation loss and its metrics, from the recorded divergences of the pass itself, and these from
    the log-probs where the sampled token alone decides them.
    """
    yield from _own_log_probs(v)
    mask, mode, kind = counted_tokens(v.after), v.setting("loss_agg_mode"), str(v.setting("estimator"))
    kind = "k1+" if kind == "sampled" else kind
    if kind == "full":
        yield Left("divergence", MODEL)
    else:
        mine, theirs = (v.after.own(name, mask) for name in ("new_log_probs", v.setting("against")))
        found = each(lambda x: kl(x, kind), each(gap, mine, theirs))
        yield Claim("divergence", placed(found, mask), f"{kind} of the last pass", 10.0)
    names = ("loss", "divergence", "divergence_max", "divergence_min")
    if (cut := minis(v, role)) is None or len(cut) > 1 or v.setting("ppo_epochs") > 1:
        yield from left(names, LATER, role)
        return
    rows, most, width = v.after.own("divergence", mask), v.setting("loss_max_clamp"), float(len(mask[0]))
    limited = rows if most is None else each(lambda x: clamp(x, -most, most), rows)
    further = [*term_metrics(v.settings, v.metrics, role).values()]
    total, every = aggregated(limited, mode, width) + math.fsum(further), flat(rows)
    noise = aggregated(each(abs, rows), mode, width) + size(further)
    yield Claim(f"{role}/loss", total, "the divergence, aggregated", noise)
    yield averaged(f"{role}/divergence", every, "mean divergence", size(every))
    for name, value in zip(names[2:], (max(every), min(every)), strict=True):
        yield Claim(f"{role}/{name}", value, "of all tokens")


def _preferred(v: AuditView, role: str) -> Claims:
    """Recompute TRL's metrics of preference pairs from the log-probs of the pass itself, and the loss where it is DPO's."""
    yield from _own_log_probs(v)
    names = [f"rewards/{one}" for one in ("chosen", "rejected", "margins", "accuracies")]
    names += ["logps/chosen", "logps/rejected"]
    mask, beta, kind = counted_tokens(v.after), v.setting("beta"), v.setting("loss_type")
    if (cut := minis(v, role)) is None or len(cut) > 1 or v.setting("ppo_epochs") > 1:
        yield from left((f"{role}/loss", *names), LATER)
        return
    mine = [math.fsum(row) for row in v.after.own("new_log_probs", mask)]
    theirs = [math.fsum(row) for row in v.after.own("ref_log_prob", mask)] if kind != "simpo" else [0.0] * len(mine)
    known = [row for row in range(0, len(mine), 2) if any(mask[row]) and any(mask[row + 1])]
    won, lost = ([beta * (mine[row + side] - theirs[row + side]) for row in known] for side in (0, 1))
    margins, noise = [x - y for x, y in zip(won, lost, strict=True)], 1 + beta * (size(mine) + size(theirs))
    values = [won, lost, margins, [float(x > 0) for x in margins]]
    values += [[mine[row + side] for row in known] for side in (0, 1)]
    for name, one in zip(names, values, strict=True):
        yield averaged(name, one, f"{name}: the mean over pairs", noise + size(mine) * name.startswith("logps"))
    if kind != "sigmoid":
        yield Left(f"{role}/loss", "only DPO's own is recomputed")
        return
    losses = [math.log1p(math.exp(-x)) if x > -30 else -x for x in margins]
    found = math.fsum(losses) / max(len(losses), 1) + math.fsum(term_metrics(v.settings, v.metrics, role).values())
    yield Claim(f"{role}/loss", found, "−log σ(margin), the mean over pairs", noise)


def _preferences(v: AuditView, role: str) -> Claims:
    """Recompute the Bradley–Terry loss and its metrics, from the recorded rewards of the pass itself."""
    yield Left("values", MODEL)
    names = ("loss", "bt_loss", "accuracy", "margin", "chosen", "rejected")
    if (cut := minis(v, role)) is None or len(cut) > 1:
        yield from left(names, UNKNOWN, role)
        return
    rewards, c = [math.fsum(row) for row in v.after["values"]], v.setting("center_rewards_coefficient")
    chosen, rejected = rewards[::2], rewards[1::2]
    gaps = [x - y for x, y in zip(chosen, rejected, strict=True)]
    lost = [math.log1p(math.exp(m - gap)) for gap, m in zip(gaps, v.after["pair_margin"][::2], strict=True)]
    losses = [x + c * (r + s) ** 2 for x, r, s in zip(lost, chosen, rejected, strict=True)]
    right = [(gap > 0) + (gap == 0) / 2 for gap in gaps]
    for name, values in zip(names, (losses, losses, right, gaps, chosen, rejected), strict=True):
        yield averaged(f"{role}/{name}", values, f"Bradley–Terry: {name}, the mean over pairs", 1 + size(rewards))


def _policy(v: AuditView, role: str) -> Claims:
    b, mask, cut = v.after, counted_tokens(v.after), minis(v, role)
    mode = _mode(v)
    yield from _own_log_probs(v)
    kept, sampler = mask, any(name.startswith("bypass.") for name in v.settings)
    yield from _first_step(v, cut)
    if sampler:  # weights and rejection come from this pass's own log-probs
        kept = counted_tokens(b, of_loss=True)
        yield from corrected(v, "new_log_probs", "bypass.", whole=cut is not None and len(cut) == 1)
    names = ("rollout_log_probs" if sampler else "old_log_probs", "new_log_probs", "advantages")
    whole = zip(*(_of_steps(v, cut, name, kept) for name in names), strict=True)
    tokens = [[token(mode, v, *x, rows=rows) for x in zip(*rows, strict=True)] for rows in whole]
    flags = each(lambda x: x[1] if mode in _TRL else either(x[1], x[2]), tokens[-len(kept) :])
    flags = placed(flags, kept, False)
    if mode == "kl_cov":
        yield Left("clipped", "kl_cov chooses in each micro-batch")
    elif mode == "clip_cov":
        yield Claim("clipped", each(lambda x: x or None, flags), "PPO's clip, and tokens drawn", partial=True)
    else:
        yield Claim("clipped", flags, f"{mode}: where the clip decides, in the last pass")
    yield from _of_minis(v, role, cut, tokens, (mask, kept))
    if v.setting("kl_coef"):
        yield Claim(f"{role}/kl_coef", v.setting("kl_coef"), "the setting")
    yield from _adaptive(v, role, cut, mask)
    yield _whole_loss(v, role, cut, mask)


_TRL = {
    **{f"trl {name}": "rows of token means" for name in ("grpo", "sapo")},
    **{f"trl {name}": "token-mean" for name in ("bnpo", "dapo", "cispo", "vespo")},
    "trl dr_grpo": "rows times longest",
    "trl luspo": "rows",
}
"""A `TrlLoss`'s mode → what its token losses are divided by; rows without a token count."""


def _mode(v: AuditView) -> str:
    """Return the name of the loss: verl's, or "trl <loss_type>"."""
    return f"trl {v.settings['loss_type']}" if "loss_type" in v.settings else str(v.setting("loss_mode"))


def _adaptive(v: AuditView, role: str, cut: list[Sequence[int]] | None, mask: Masks) -> Claims:
    """Recompute the metrics of an adaptive entropy bonus, where one optimizer step was taken."""
    names = (f"{role}/policy_entropy", f"{role}/entropy_coeff")
    if v.setting("entropy_target") is None or cut is None or len(cut) > 1:
        yield from left(names, LATER)
        return
    if "entropys" in v.after and v.setting("top_entropy_quantile", 1.0) == 1:
        yield averaged(names[0], flat(v.after.own("entropys", mask)), "mean entropy of own tokens", 100.0)
    else:
        yield Left(names[0], MODEL)
    if v.state is None and v.step != 1:
        yield Left(names[1], "the state of the stage before the step was not kept")
        return
    weight, last = _bonus(v)
    used = 0.0 if last is None or last > v.setting("entropy_target") else weight
    yield Claim(names[1], used, "the adapted weight where the last entropy was at most the target, else 0")


def _bonus(v: AuditView) -> tuple[float, float | None]:
    """Return weight and last entropy of an adaptive bonus before the step, by default as it begins."""
    state = v.state or {}
    return state.get("entropy_coeff", v.setting("entropy_coeff")), state.get("last_entropy")


def bonus(v: AuditView) -> Claims:
    """Recompute the weight of an adaptive entropy bonus after the optimizer step: up where the entropy is at most the target."""
    if (cut := minis(v, "actor")) is not None and len(cut) == 1 and "actor/policy_entropy" in v.metrics:
        if v.state is None and v.step != 1:
            return
        up = v.metrics["actor/policy_entropy"] <= v.setting("entropy_target")
        moved = _bonus(v)[0] + v.setting("entropy_delta", 0.005) * (1 if up else -1)
        ends = v.setting("entropy_coeff_min", 0.0), v.setting("entropy_coeff_max", 1.0)
        yield Claim("bonus", clamp(moved, *ends), "c ± entropy_delta, within its bounds", near=1e-9)


def _first_step(v: AuditView, cut: list[Sequence[int]] | None) -> Claims:
    """Check that the log-probs of the first mini-batch equal the old ones, because its weights are the same."""
    name = ("new_log_probs/1" if _earlier(v) else "new_log_probs") if cut and _begins_with_old(v) else ""
    if cut and name and (name != "new_log_probs" or v.setting("ppo_epochs") == 1):
        first = [row if at in cut[0] else [None] * len(row) for at, row in enumerate(v.after["old_log_probs"])]
        yield Claim(name, first, "of the first mini-batch the old ones: the same weights", 1e3, partial=True)


def _trl_logs(v: AuditView, old: list[float], new: list[float]) -> list[float]:
    """Compute log ρ of each token of a row, or with the level `sequence` their mean at each."""
    logs = [y - x for x, y in zip(old, new, strict=True)]
    logs = [mean(logs)] * len(logs) if v.setting("importance_sampling_level") == "sequence" else logs
    return [clamp(x, -20, 20) for x in logs]


def _whole_loss(v: AuditView, role: str, cut: list[Sequence[int]] | None, mask: Masks) -> Claim | Left:
    if v.setting("entropy_target") is not None and (cut is None or len(cut) > 1):
        return Left(f"{role}/loss", LATER)  # each step has another weight of the entropy
    weight = v.metrics.get(f"{role}/entropy_coeff", v.setting("entropy_coeff"))
    factors = {"pg_loss": 1.0, "entropy_loss": -weight, "kl_loss": v.setting("kl_coef")}
    terms = [factor * v.metrics[f"{role}/{name}"] for name, factor in factors.items() if factor]
    terms += term_metrics(v.settings, v.metrics, role).values()
    formula = "pg_loss − entropy_coeff·entropy_loss + kl_coef·kl_loss + Σ weight·term"
    several = cut is None or len(cut) > 1  # their losses may cancel
    hidden = size(flat(v.after.own("advantages", mask))) if several else 0.0
    return Claim(f"{role}/loss", math.fsum(terms), formula, math.fsum(map(abs, terms)) + hidden)


_OF_STEPS = (
    *("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_clipfrac", "ppo_kl", "kl_loss", "entropy_loss"),
    *("kl_unweighted", "off_policy_masked", "top_entropy_share"),
)
"""Metrics that are means over the optimizer steps of an update."""
_RANDOM = {"clip_cov": ("pg_loss", "pg_clipfrac"), "kl_cov": ("pg_loss", "kl_cov_frac")}
"""Loss → metrics that depend on how a mini-batch was cut, or on a draw."""


def _of_minis(
    v: AuditView, role: str, cut: list[Sequence[int]] | None, tokens: Any, masks: tuple[Masks, Masks]
) -> Claims:
    """Recompute the metrics of a pass, each as the mean over its mini-batches."""
    mode = _mode(v)
    yield from left(_RANDOM.get(mode, ()), f"{mode} chooses tokens in each micro-batch", role)
    if cut is None:
        yield from left(_OF_STEPS, UNKNOWN, role)
        return
    counts = _of_steps(v, cut, "advantages", masks[0])
    steps = [one for one in cut if any(counts[row] for row in one)]
    if len(steps) < len(cut):
        yield Claim(f"{role}/empty_mini_batches", len(cut) - len(steps), "mini-batches without a token to learn from")
    scale = v.setting("loss_scale_factor") or float(len(masks[0][0]))
    rounded = 10.0 * (len(counts) > len(masks[0]) and not _earlier(v))
    there = [bool(one) for one in v.after["scored"]] if "scored" in v.after else [True] * len(masks[0])
    over = _Over(role, steps, scale, counts, there, rounded)
    yield from _of_surrogate(v, mode, over, tokens, (cut, masks[1]))
    yield from _of_terms(v, role, cut, over, masks[0])


@dataclass(frozen=True)
class _Over:
    """Makes claims about metrics that are means over mini-batches."""

    role: str
    steps: list[Sequence[int]]
    scale: float
    counts: Ragged
    scored: list[bool]
    first: float = 0.0
    """Rounding of a token of a first pass that is not recorded, in 1e-6."""

    def __call__(self, name: str, rows: Any, formula: str, how: str = "", noise: Any = None) -> Claim:
        """Make the claim of one metric: in each mini-batch the token values reduced by the mode `how`, then the mean
        over mini-batches.

        With `how=""` it is the mean over the kept tokens, of those mini-batches that have some.
        """
        steps = [step for step in self.steps if how or any(rows[row] for row in step)]
        found = mean([self._one(step, rows, how) for step in steps]) if steps else math.nan
        rough = each(lambda x: abs(x) + self.first * (1 + abs(x)), rows if noise is None else noise)
        return Claim(f"{self.role}/{name}", found, formula, mean([self._one(step, rough, how) for step in steps]))

    def _one(self, step: Sequence[int], rows: Ragged, how: str) -> float:
        mine, number = [rows[row] for row in step], sum(self.scored[row % len(self.scored)] for row in step)
        if how.startswith("rows"):
            sums = [mean(row) if how == "rows of token means" else math.fsum(row) for row in mine]
            return math.fsum(sums) / max(number * (self.scale if how == "rows times longest" else 1.0), 1.0)
        counts = [self.counts[row] for row in step] if how else None
        return aggregated(mine, how or "token-mean", self.scale, counts)


def _of_surrogate(v: AuditView, mode: str, over: _Over, tokens: Any, places: Any) -> Claims:
    """Recompute the policy loss, the shares of clipped tokens, and `ppo_kl`."""
    known = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-sum", **_TRL}
    agg, far = known.get(mode, v.setting("loss_agg_mode")), each(lambda _: False, tokens)
    if v.setting("off_policy_mask_threshold") is not None:
        far = _off_rows(v, places)
        unsure = each(lambda x: HALF * (x is None) + float(bool(x)), far)
        yield over("off_policy_masked", each(share, far), "share of tokens in rows off policy", noise=unsure)
    if v.setting("top_entropy_quantile", 1.0) < 1:
        why = "tokens of high entropy are chosen in each micro-batch"
        yield from left(("pg_loss", "top_entropy_share"), why, over.role)
    elif mode == "trl vespo":
        yield Left(f"{over.role}/pg_loss", "a test holds it beside TRL's")
    elif mode not in _RANDOM:
        losses = each(lambda x: x[0], tokens)
        if v.setting("rollout_is"):
            weights = _of_steps(v, places[0], "rollout_is_weights", places[1])
            if mode == "geo_mean":
                logs = each(lambda w: math.log(w + 1e-10), weights)
                weights = [[math.exp(mean(row))] * len(row) for row in logs]
            losses = each(lambda x, w: x * w, losses, weights)
        noise = each(lambda x, out: abs(x) * (1 + HALF * (out is None)), losses, far)
        losses = each(lambda x, out: x * (1 - share(out)), losses, far)
        yield over("pg_loss", losses, f"{mode}, {agg}, mean over mini-batches", agg, noise)
    for name, place in (("ppo_clipfrac" if mode == "clip_cov" else "pg_clipfrac", 1), ("pg_clipfrac_lower", 2)):
        flags = each(lambda x, place=place: x[place], tokens)
        unsure = each(lambda x: HALF * (x is None) + float(bool(x)), flags)
        yield over(name, each(share, flags), "share of kept tokens", noise=unsure)
    yield over("ppo_kl", each(lambda x: x[3], tokens), "mean old − new; kl_cov: of magnitudes")


def _off_rows(v: AuditView, places: Any) -> list[list[bool | None]]:
    """Return for each token whether its row leaves the policy term: a negative advantage, and the mean of old − new
    log-probs, or of the sampler's − new, above the threshold."""
    sampled = "rollout_log_probs" if v.setting("off_policy_sampler", True) else "old_log_probs"
    logs = each(gap, *(_of_steps(v, places[0], name, places[1]) for name in (sampled, "new_log_probs")))
    out = [beyond(mean(row), v.setting("off_policy_mask_threshold")) for row in logs]
    gains = _of_steps(v, places[0], "advantages", places[1])
    return [[one if gain < 0 else False for gain in row] for one, row in zip(out, gains, strict=True)]


def _of_terms(v: AuditView, role: str, cut: list[Sequence[int]], over: _Over, mask: Masks) -> Claims:
    """Recompute the loss terms of KL to the reference and of entropy."""
    b, kind = v.after, v.setting("kl_type")
    agg = _TRL.get(_mode(v), v.setting("loss_agg_mode"))
    if v.setting("kl_coef"):
        bypass = any(name.startswith("bypass.") for name in v.settings)
        names = ("new_log_probs", "ref_log_prob", "rollout_log_probs" if bypass else "old_log_probs")
        new, ref, old = (_of_steps(v, cut, name, mask) for name in names)
        deltas = each(gap, new, ref)
        values = each(lambda x: math.expm1(-x) + x if _mode(v) in _TRL else kl(x, kind), deltas)
        if v.setting("use_bias_correction_kl"):
            if _mode(v) not in _TRL:
                yield over("kl_unweighted", values, f"{kind}, mean over own tokens", noise=deltas)
            ratios = [list(map(math.exp, _trl_logs(v, *row))) for row in zip(old, new, strict=True)]
            values, deltas = (each(lambda x, ratio: x * ratio, one, ratios) for one in (values, deltas))
        yield over("kl_loss", values, f"{kind}, {agg}", agg, deltas)
    if f"{role}/entropy_loss" in v.metrics and len(cut) == 1 and "entropys" in b:
        entropies = b.own("entropys", mask)
        how, rough = "token-mean" if _mode(v) in _TRL else agg, each(lambda _: 100.0, entropies)
        yield over("entropy_loss", entropies, f"entropies before the update, {how}", how, rough)
    else:
        yield Left(f"{role}/entropy_loss", LATER)


Token = tuple[float, bool | None, bool | None, float]
"""(loss, clipped, bounded by the dual clip, KL term) of a token."""


def token(mode: str, v: AuditView, old: float, new: float, adv: float, *, rows: Any) -> Token:
    """Compute the surrogate loss of one token from its definition; `rows` are the old and new log-probs and advantages
    of its whole row.
    """
    low, high = 1 - v.setting("clip_ratio_low"), 1 + v.setting("clip_ratio_high")
    top = (v.setting("delta") or math.inf) if mode in _TRL else v.setting("clip_ratio_c")
    log, raw = clamp(new - old, -20, 20), old - new
    if v.setting("importance_sampling_level") == "sequence":
        log, *_ = _trl_logs(v, *rows[:2])
    ratio = math.exp(log)
    if mode == "gspo":
        ratio = math.exp(min(mean(each(gap, [rows[1]], [rows[0]])[0]), 10))
    if mode in ("vanilla", "gspo", "clip_cov"):
        loss, clipped, lower = _clipped(adv, ratio, low, high, top if mode == "vanilla" else math.inf)
        return loss, clipped, lower, -log if mode == "vanilla" else raw
    if mode in ("sapo", "trl sapo"):
        tau = v.setting("tau_pos") if adv > 0 else v.setting("tau_neg")
        return -adv * 4 / tau / (1 + math.exp(-tau * (ratio - 1))), False, False, -log
    if mode == "trl cispo":  # the bound is of the ratio itself
        return -adv * min(ratio, high - 1) * new, beyond(ratio, high - 1), False, -log
    if mode == "cispo":
        return -adv * clamp(ratio, low, high) * new, either(beyond(ratio, high), beyond(-ratio, -low)), False, -log
    if mode in _TRL:  # vespo clips nothing, and its loss is not recomputed
        return *_two_sided(adv * (mode != "trl vespo"), ratio, low, high, top), -log
    if mode in ("dppo_tv", "dppo_kl"):
        out = _moved(mode, v, old, new, adv)
        return -adv * min(ratio, top) * new * (not out), out, False if out else beyond(ratio, top), -log
    if mode == "geo_mean":
        return (*_geo_mean(v, old, new, adv, rows), raw)
    plain = {"gpg": -new * adv, "dro": -(new * adv - v.setting("dro_beta") / 2 * raw**2), "kl_cov": 0.0}[mode]
    return plain, False, False, abs(raw) if mode == "kl_cov" else raw


def _clipped(adv: float, ratio: float, low: float, high: float, top: float) -> tuple[float, bool | None, bool | None]:
    """Apply PPO's clip and, for a negative advantage, the dual clip at `top`: returns (loss, clipped, limited by the
    dual clip).
    """
    worse = max(-adv * ratio, -adv * clamp(ratio, low, high))
    if adv > 0:
        return worse, beyond(ratio, high), False
    if adv < 0:
        return min(worse, -adv * top), beyond(-ratio, -low), beyond(max(ratio, low), top)
    return worse, False, False


def _two_sided(adv: float, ratio: float, low: float, high: float, top: float) -> tuple[float, bool | None, bool | None]:
    """Apply TRL's clip, which bounds the ratio at δ, `top`, and has no dual clip: returns as `_clipped`."""
    loss = -min(min(ratio, top) * adv, clamp(ratio, low, high) * adv)
    if adv > 0:
        return loss, beyond(ratio, high), False
    return (loss, beyond(-ratio, -low), beyond(ratio, top)) if adv < 0 else (loss, False, False)


def _moved(mode: str, v: AuditView, old: float, new: float, adv: float) -> bool | None:
    """Return whether a token's probability has moved further than the bound in its advantage's direction (DPPO)."""
    p, q, bound = math.exp(old), math.exp(new), v.setting("clip_ratio_high" if adv > 0 else "clip_ratio_low")
    if mode == "dppo_tv":
        return beyond(q - p if adv > 0 else p - q, bound)
    far = beyond(p * (old - new) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8)), bound)
    return far if (q > p if adv > 0 else q < p) else False


def _geo_mean(v: AuditView, old: float, new: float, adv: float, rows: Any) -> tuple[float, bool | None, bool | None]:
    """Compute GMPO's loss: one number per row, divided equally among its tokens.

    Returns (loss, clipped where the advantage is positive, clipped where it is negative).
    """
    low, high, logs = -v.setting("clip_ratio_low"), v.setting("clip_ratio_high"), []
    for o, n, a in zip(*rows, strict=True):
        x = clamp(n - o, -20, 20)
        logs.append(min(x, clamp(x, low, high)) if a > 0 else max(x, clamp(x, low, high)) if a < 0 else 0.0)
    loss = -mean(rows[2]) * math.exp(mean(logs)) / len(logs)
    out = either(beyond(new - old, high), beyond(old - new, -low))
    return loss, out if adv > 0 else False, out if adv < 0 else False


# --- rollout correction -------------------------------------------------------------------------------


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
