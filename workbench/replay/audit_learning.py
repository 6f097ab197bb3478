"""The second reading, continued: KL in the reward, advantages and losses, row by row.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import stdev, variance
from typing import Any

from workbench.replay.audit_formulas import (
    EXACT,
    FLOAT32,
    MODEL,
    Claim,
    Claims,
    Left,
    Lists,
    Ragged,
    View,
    averaged,
    beyond,
    bounded,
    clamp,
    each,
    either,
    flat,
    gap,
    groups_of,
    kl,
    mean,
    placed,
    size,
    spread,
)  # fmt: skip

# --- advantages -----------------------------------------------------------------------------------------


def advantage(v: View) -> Claims:
    """Token rewards with the KL penalty, advantages, returns, and their metrics."""
    b, mask = v.after, v.after.mask
    yield from _penalised(v)
    name, rewards = str(v.settings["estimator"]), b["token_level_rewards"]
    if (estimate := ESTIMATORS.get(name)) is None:
        for column in ("advantages", "returns"):
            yield Left(column, f"foreign estimator {name}")
    else:
        scored = [bool(x) for x in b["scored"]] if "scored" in b else [True] * len(mask)
        *found, noise, near = estimate(v, mask, rewards, scored)
        for column, ragged in zip(("advantages", "returns"), found, strict=True):
            yield Claim(column, placed(ragged, mask), f"{name}, from the token rewards", noise, near)
    sums = [math.fsum(row) for row in rewards]
    rounding = max((math.fsum(map(abs, row)) for row in rewards), default=0.0)
    yield from spread("critic/rewards", sums, "rows' token rewards", rounding)
    for column in ("advantages", "returns"):
        yield from spread(f"critic/{column}", flat(b.own(column)), f"{column} of own tokens")
    groups = groups_of(b["uid"])
    yield Claim("advantage/singleton_groups", sum(len(rows) == 1 for rows in groups.values()), "groups of one row")
    zero = [not any(row) for row in b.own("advantages")]
    yield Claim("advantage/zero_rows", sum(zero), "rows whose advantages are all 0")
    yield averaged("advantage/zero_share", [float(x) for x in zero], "their share")
    if "values" in b and len(flat(b.own("values"))) > 1:
        returns, guess = flat(b.own("returns")), flat(b.own("values"))
        rest = variance([x - y for x, y in zip(returns, guess, strict=True)])
        bottom = variance(returns) + 1e-5
        explained = 1 - rest / bottom
        rounding = (max(map(abs, returns)) ** 2 + max(map(abs, guess)) ** 2) / bottom
        yield Claim("critic/vf_explained_var", explained, "1 − Var(R − V) / (Var(R) + 1e-5)", 1 + rounding)


def _penalised(v: View) -> Claims:
    b, mask, scores = v.after, v.after.mask, v.before["token_level_scores"]
    if "kl_controller" not in v.settings:
        yield Claim("token_level_rewards", scores, "the token scores", near=0.0)
        return
    kind, made = v.setting("kl_type"), str(v.settings["kl_controller"])
    deltas = each(gap, b.own("old_log_probs"), b.own("ref_log_prob"))
    penalties = each(lambda x: kl(x, kind), deltas)
    numbers = _numbers(v)
    beta = numbers.get("coef") if made.startswith("FixedKL") else (v.state or {}).get("value")
    if beta is None and v.step == 1:
        beta = numbers.get("coef")
    if beta is None:
        beta = v.metrics["actor/reward_kl_penalty_coeff"]
        yield Left("actor/reward_kl_penalty_coeff", "the controller's state before the step was not kept")
    else:
        yield Claim("actor/reward_kl_penalty_coeff", beta, f"β of {made}")
    rewards = each(lambda s, x: s - beta * x, scores, placed(penalties, mask))
    noise = [2 * abs(beta) * max(map(abs, row), default=0.0) for row in deltas]
    yield Claim("token_level_rewards", rewards, f"token scores − β·{kind}", noise, EXACT)
    rows, rough = ([mean(row) for row in penalties], mean([size(row) for row in deltas]))
    yield Claim("actor/reward_kl_penalty", mean(rows), "mean over rows of the row's mean KL", rough)


def controller(v: View) -> Claims:
    """The state after the step: β·(1 + clip(kl/target − 1, ±0.2)·rows/horizon)."""
    numbers = _numbers(v)
    error = clamp(v.metrics["actor/reward_kl_penalty"] / numbers["target"] - 1, -0.2, 0.2)
    beta = v.metrics["actor/reward_kl_penalty_coeff"]
    value = beta * (1 + error * len(v.after["uid"]) / numbers["horizon"])
    yield Claim("controller", value, "β·(1 + clip(kl/target − 1, ±0.2)·rows/horizon)", near=1e-9)


def _numbers(v: View) -> dict[str, float]:
    """Arguments of the KL controller, from its repr."""
    return {name: float(x) for name, x in re.findall(r"(\w+)=([-\d.e+]+)", str(v.settings["kl_controller"]))}


Estimate = tuple[Ragged, Ragged, Any, float]
"""Advantages and returns of own tokens, noise, relative tolerance."""


def _grouped(v: View, mask: list[list[int]], scores: Sequence[float], counted: Sequence[bool], one: Any) -> list[float]:
    """A number per row: `one(scores, lengths)` of each group's counted rows; a row alone gets 0, or its score ("verl")."""
    values = [0.0] * len(mask)
    for rows in groups_of(v.after["uid"]).values():
        inside = [row for row in rows if counted[row]]
        of = [scores[row] for row in inside]
        found = one(of, [sum(mask[row]) for row in inside]) if len(of) > 1 else of
        for row, value in zip(inside, found, strict=True):
            values[row] = value if len(of) > 1 or v.setting("singleton") == "verl" else 0.0
    return values


def _grpo(v: View) -> Any:
    eps, normed = v.setting("eps", 1e-6), v.setting("norm_by_std", True)
    return lambda s, _: [(x - mean(s)) / (stdev(s) + eps if normed else 1) for x in s]


def _passk(v: View) -> Any:
    def one(s: list[float], _: Any) -> list[float]:
        first, second = sorted(s)[-1], sorted(s)[-2]
        below = stdev(s) + v.setting("eps", 1e-6) if v.setting("norm_by_std", True) else 1.0
        return [(first - second) / below if x == first else 0.0 for x in s]

    return one


def _rloo(v: View) -> Any:
    return lambda s, _: [x - (math.fsum(s) - x) / (len(s) - 1) for x in s]


def _opo(v: View) -> Any:
    def one(s: list[float], lengths: list[int]) -> list[float]:
        weights = lengths if any(lengths) else [1] * len(s)
        return [x - math.fsum(w * y for w, y in zip(weights, s, strict=True)) / sum(weights) for x in s]

    return one


def _maxrl(v: View) -> Any:
    return lambda s, _: [(x - mean(s)) / (mean(s) if mean(s) > 0 else 1) for x in s]


def _rowwise(make: Callable[[View], Any], *, whiten: bool = False, alpha: bool = False) -> Callable[..., Estimate]:
    """An estimator that gives each row one number on all its tokens."""

    def estimate(v: View, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
        # an empty response has no token for its reward, which still counts in its group
        scores = [
            math.fsum(row) + x * (not any(own)) for row, own, x in zip(rewards, mask, v.after["reward"], strict=True)
        ]
        values = _grouped(v, mask, scores, scored, make(v))
        if alpha:
            told = [x for x, ok in zip(scores, scored, strict=True) if ok]
            factor = len(told) / max(sum(x != 0 for x in told), 1) if any(told) else 1.0
            values = [factor / v.setting("f_norm", 1.0) * x for x in values]
        rough = [math.fsum(map(abs, row)) * (sum(x != 0 for x in row) > 1) for row in rewards]  # sums that were rounded
        noise = [0.0] * len(mask)
        for rows in groups_of(v.after["uid"]).values():
            spread_of = [scores[row] for row in rows if scored[row]]
            below = max(stdev(spread_of), 1e-6) if len(spread_of) > 1 else 1.0
            for row in rows:
                noise[row] = max(rough[one] for one in rows) * (1 + abs(values[row])) * max(1 / below, 1)
        ragged = [[value] * sum(own) for value, own in zip(values, mask, strict=True)]
        return _white(ragged, scored, max(noise)) if whiten else (ragged, ragged, noise, EXACT)

    return estimate


def _white(ragged: Ragged, scored: Sequence[bool], noise: float = 0.0, returns: Ragged | None = None) -> Estimate:
    """Whitened over own tokens of scored rows, (x − mean) / √(variance + 1e-8); other rows 0. Fewer than two: as they are."""
    inside = [x for row, ok in zip(ragged, scored, strict=True) for x in row if ok]
    middle, var = (mean(inside), variance(inside)) if len(inside) > 1 else (0.0, 1 - 1e-8)
    made = [[(x - middle) / math.sqrt(var + 1e-8) * ok for x in row] for row, ok in zip(ragged, scored, strict=True)]
    top = max(map(abs, inside), default=0.0) + noise
    more = top / math.sqrt(var + 1e-8) * (1 + top / math.sqrt(var + 1e-8))
    return made, made if returns is None else returns, more, FLOAT32


def _to_go(rewards: Ragged, gamma: float, scored: Sequence[bool]) -> Ragged:
    """Discounted reward-to-go of own tokens; 0 in rows that were not scored."""
    made = []
    for row, ok in zip(rewards, scored, strict=True):
        carried, found = 0.0, []
        for x in reversed(row):
            carried = x + gamma * carried
            found.append(carried * ok)
        made.append(found[::-1])
    return made


def _total(rewards: Ragged) -> float:
    return max((math.fsum(map(abs, row)) for row in rewards), default=0.0)


def _plus_plus(v: View, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    returns = _to_go(_inside(rewards, mask), v.setting("gamma", 1.0), scored)
    made, _, noise, near = _white(returns, scored, _total(rewards))
    return made, returns, noise, near


def _remax(v: View, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    returns = _to_go(_inside(rewards, mask), 1.0, scored)
    rows = zip(returns, v.after["reward_baselines"], scored, strict=True)
    return [[(x - base) * ok for x in row] for row, base, ok in rows], returns, 2 * _total(rewards), EXACT


def _gae(v: View, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    gamma, lam, made = v.setting("gamma", 1.0), v.setting("lam", 1.0), []
    guesses = v.after.own("values")
    for row, guess in zip(_inside(rewards, mask), guesses, strict=True):
        after = next_value = 0.0
        found = []
        for r, value in zip(reversed(row), reversed(guess), strict=True):
            after = r + gamma * next_value - value + gamma * lam * after
            next_value = value
            found.append(after)
        made.append(found[::-1])
    returns = each(lambda a, value: a + value, made, guesses)
    noise = _total(rewards) + 2 * _total(guesses)
    if not v.setting("whiten", True):
        return made, returns, noise, FLOAT32
    white, _, more, near = _white(made, [True] * len(mask), noise)
    return white, returns, more, near


def _inside(rows: Ragged, mask: list[list[int]]) -> Ragged:
    return [[x for x, own in zip(*pair, strict=True) if own] for pair in zip(rows, mask, strict=True)]


def _gdpo(v: View, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    parts = [one.strip() for one in str(v.settings["parts"]).split(",")]
    totals = [0.0] * len(mask)
    for part, weight in zip(parts, v.setting("weights") or [1.0] * len(parts), strict=True):
        column = v.after[f"reward/{part}"]
        there = [ok and math.isfinite(x) for ok, x in zip(scored, column, strict=True)]
        found = _grouped(v, mask, column, there, _grpo(v))
        totals = [total + weight * x for total, x in zip(totals, found, strict=True)]
    return _white([[x] * sum(own) for x, own in zip(totals, mask, strict=True)], scored)


def _token_baseline(packed: bool) -> Callable[..., Estimate]:
    """The optimal baseline of each position; `packed`: positions count own tokens alone."""

    def estimate(v: View, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
        returns = _to_go(_inside(rewards, mask), 1.0, scored)
        probabilities, squares = v.after.own("old_log_probs"), v.after.own("sum_pi_squared")
        ratios = v.after.own("rollout_is_weights") if "rollout_is_weights" in v.after else None
        made: Ragged = [[] for _ in mask]
        for rows in groups_of(v.after["uid"]).values():
            above: dict[int, float] = {}
            below: dict[int, float] = {}
            counted = [*sorted((sum(mask[row]) for row in rows if scored[row]), reverse=True), 0, 0]
            places = {
                row: list(range(sum(mask[row]))) if packed else [t for t, own in enumerate(mask[row]) if own]
                for row in rows
            }
            for row in rows:
                energy = 0.0
                for n, place in enumerate(places[row] if scored[row] else ()):
                    ratio = ratios[row][n] if ratios else 1.0
                    energy += (1 - 2 * math.exp(probabilities[row][n]) + squares[row][n]) * ratio**2
                    above[place] = above.get(place, 0.0) + returns[row][n] * energy
                    below[place] = below.get(place, 0.0) + energy
            for row in rows:
                longest = counted[0] > counted[1] and sum(mask[row]) == counted[0] and scored[row]
                for n, place in enumerate(places[row]):
                    alone = not scored[row] or (longest and place >= counted[1])
                    base = 0.0 if alone else above[place] / (below[place] + v.setting("eps", 1e-8))
                    made[row].append(returns[row][n] - base)
        return made, returns, 4 * _total(rewards), FLOAT32

    return estimate


ESTIMATORS: Mapping[str, Callable[[View, list[list[int]], Ragged, list[bool]], Estimate]] = {
    "grpo": _rowwise(_grpo),
    "grpo_passk": _rowwise(_passk),
    "rloo": _rowwise(_rloo),
    "opo": _rowwise(_opo),
    "maxrl": _rowwise(_maxrl),
    "gpg": _rowwise(lambda v: lambda s, _: [x - mean(s) for x in s], alpha=True),
    "reinforce_plus_plus_baseline": _rowwise(lambda v: lambda s, _: [x - mean(s) for x in s], whiten=True),
    "reinforce_plus_plus": _plus_plus,
    "remax": _remax,
    "gae": _gae,
    "gdpo": _gdpo,
    "optimal_token_baseline": _token_baseline(packed=False),
    "tir_optimal_token_baseline": _token_baseline(packed=True),
}
"""Estimator → its slow form: of the view, mask, token rewards and scored rows."""


# --- updates --------------------------------------------------------------------------------------------


def loss_mask(b: Lists) -> list[list[int]]:
    """1 on own tokens that no correction rejected, of scored rows."""
    kept = b.get("loss_mask", b.mask)
    scored = b["scored"] if "scored" in b else [True] * len(kept)
    return [
        [int(bool(x and own and ok)) for x, own in zip(*rows, strict=True)]
        for *rows, ok in zip(kept, b.mask, scored, strict=True)
    ]


def minis(v: View) -> list[range] | None:
    """Rows of each optimizer step of a single pass; None where rows were shuffled or passed several times."""
    total, prompts = len(v.after["uid"]), v.setting("ppo_mini_batch_size")
    if v.setting("ppo_epochs") != 1 or (v.setting("shuffle") and prompts) or v.setting("skip_nonfinite"):
        return None
    number = total if prompts is None else prompts * int(v.after.batch.meta_info.get("group_size", 1))
    return [range(start, min(start + number, total)) for start in range(0, total, number)]


def aggregated(rows: Ragged, mode: str, scale: float) -> float:
    """Token losses of a mini-batch as one number; rows without a token are left out."""
    there = [row for row in rows if row]
    total = math.fsum(flat(there))
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        return total / max(len(flat(there)), 1)
    if mode == "seq-mean-token-mean":
        return mean([mean(row) for row in there])
    return total / max(len(there), 1) / (scale if mode == "seq-mean-token-sum-norm" else 1)


def update(v: View) -> Claims:
    """Loss, clipping and KL of the update's last pass."""
    role = v.stage.removeprefix("update_")
    for name in ("grad_norm", "lr"):
        yield Left(f"{role}/{name}", "the optimizer's")
    yield Left(f"{role}/nonfinite", "mini-batches that were skipped are not recorded")
    if v.step < v.setting("from_step"):
        yield Claim(f"{role}/skipped", 1.0, "step < from_step")
        if "new_log_probs" in v.after:
            yield Claim("new_log_probs", v.before["old_log_probs"], "nothing was updated", near=0.0)
            yield Claim("clipped", [[False] * len(row) for row in v.after.mask], "nothing was updated")
        return
    yield from _critic(v, role) if v.settings.get("loss") == "ValueLoss" else _policy(v, role)


def _critic(v: View, role: str) -> Claims:
    """One mini-batch begins with the recorded values, so that nothing is clipped yet."""
    names = ("vf_loss", "vf_clipfrac", "vpred_mean", "loss")
    if (cut := minis(v)) is None or len(cut) > 1:
        for name in names:
            yield Left(f"{role}/{name}", "the values of a later mini-batch are not recorded")
        return
    mask = loss_mask(v.after)
    guesses, returns = v.after.own("values", mask), v.after.own("returns", mask)
    gaps = each(gap, guesses, returns)
    width = float(len(mask[0])) if mask else 1.0
    found = aggregated([[x * x / 2 for x in row] for row in gaps], v.setting("loss_agg_mode"), width)
    ends = max((abs(x) for x in flat(guesses) + flat(returns)), default=0.0)
    noise = 20 * ends * aggregated([[abs(x) + 1e-6 for x in row] for row in gaps], v.setting("loss_agg_mode"), width)
    yield Claim(f"{role}/vf_loss", found, "½·(V − R)², aggregated: the first pass clips nothing", noise)
    yield Claim(f"{role}/vf_clipfrac", 0.0, "the first pass clips nothing")
    yield averaged(f"{role}/vpred_mean", flat(guesses), "mean value", 20 * size(flat(guesses)) + 1)
    yield Claim(f"{role}/loss", v.metrics[f"{role}/vf_loss"], "vf_loss")


def _policy(v: View, role: str) -> Claims:
    b, mask, mode = v.after, loss_mask(v.after), str(v.setting("loss_mode"))
    yield Left("new_log_probs", MODEL)
    yield from bounded(b, "new_log_probs")
    own = [b.own(name, mask) for name in ("old_log_probs", "new_log_probs", "advantages")]
    tokens = [[token(mode, v, *x, rows=rows) for x in zip(*rows, strict=True)] for rows in zip(*own, strict=True)]
    random = {"clip_cov": "clip_cov draws its tokens at random", "kl_cov": "kl_cov chooses in each micro-batch"}.get(
        mode
    )
    if random is None:
        flags = [[either(x[1], x[2]) for x in row] for row in tokens]
        yield Claim("clipped", placed(flags, mask, False), f"{mode}: where the clip decides, in the last pass")
    cut, why = minis(v), random
    if cut is None:
        why = "passes before the last are not recorded"
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_loss", "entropy_loss")
    if random:
        yield Left("clipped", random)
    if cut is None or random:
        for name in names:
            yield Left(f"{role}/{name}", str(why))
    else:
        yield from _of_minis(v, role, cut, tokens, mask)
    if v.setting("kl_coef"):
        yield Claim(f"{role}/kl_coef", v.setting("kl_coef"), "the setting")
    total, parts = v.metrics.get(f"{role}/pg_loss", 0.0), [f"{role}/pg_loss"]
    for name, factor in (("entropy_loss", -v.setting("entropy_coeff")), ("kl_loss", v.setting("kl_coef"))):
        total += factor * v.metrics.get(f"{role}/{name}", 0.0)
        parts += [f"{role}/{name}"] * bool(factor)
    yield Claim(
        f"{role}/loss",
        total,
        "pg_loss − entropy_coeff·entropy_loss + kl_coef·kl_loss",
        sum(abs(v.metrics.get(name, 0.0)) for name in parts),
    )


def _of_minis(v: View, role: str, cut: list[range], tokens: list[list[Any]], mask: list[list[int]]) -> Claims:
    """Metrics of a single pass: each the mean over mini-batches of the mini-batch's own number."""
    b, settings = v.after, v.setting
    scale = settings("loss_scale_factor") or float(len(mask[0]))
    fixed = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-sum"}.get(str(settings("loss_mode")))
    mode = fixed or settings("loss_agg_mode")
    weights = b.own("rollout_is_weights", mask) if settings("rollout_is") else [[1.0] * len(row) for row in tokens]
    losses = each(lambda x, w: x[0] * w, tokens, weights)

    def over(name: str, rows: Any, how: str, formula: str, noise: Any = None, more: float = 0.0) -> Claim:
        each = [aggregated([rows[row] for row in one], how, scale) for one in cut]
        rough = rows if noise is None else noise
        size_of = mean([aggregated([[abs(x) for x in rough[row]] for row in one], how, scale) for one in cut])
        return Claim(f"{role}/{name}", mean(each), formula, size_of + more)

    yield over("pg_loss", losses, mode, f"{settings('loss_mode')}, {mode}, mean over mini-batches", more=mean([0.0]))
    for name, place in (("pg_clipfrac", 1), ("pg_clipfrac_lower", 2)):
        flags = [[float(bool(x[place])) for x in row] for row in tokens]
        unsure = sum(x[place] is None for row in tokens for x in row) / max(len(flat(tokens)), 1)
        yield over(name, flags, "token-mean", "share of own tokens", more=len(cut) * unsure / FLOAT32)
    old, new = b.own("old_log_probs", mask), b.own("new_log_probs", mask)
    gaps = each(gap, old, new)
    yield over("ppo_kl", gaps, "token-mean", "mean old − new")
    if settings("kl_coef"):
        deltas = each(gap, new, b.own("ref_log_prob", mask))
        kls = each(lambda x: kl(x, settings("kl_type")), deltas)
        yield over("kl_loss", kls, settings("loss_agg_mode"), f"{settings('kl_type')}, aggregated", deltas)
    if settings("entropy_coeff"):
        if len(cut) == 1 and "entropys" in b:
            entropies = b.own("entropys", mask)
            yield over("entropy_loss", entropies, settings("loss_agg_mode"), "entropies before the update, aggregated", [[100.0] * len(row) for row in entropies])  # fmt: skip
        else:
            yield Left(f"{role}/entropy_loss", "entropies of a later mini-batch are not recorded")


Token = tuple[float, bool | None, bool | None]
"""(loss, clipped, bounded by the dual clip) of a token."""


def token(mode: str, v: View, old: float, new: float, adv: float, *, rows: Any) -> Token:
    """The surrogate loss of one token, from its definition; `rows` are its row's old, new and advantages."""
    low, high = 1 - v.setting("clip_ratio_low"), 1 + v.setting("clip_ratio_high")
    top, ratio = v.setting("clip_ratio_c"), math.exp(clamp(new - old, -20, 20))
    if mode == "gspo":
        ratio = math.exp(min(mean([x - y for x, y in zip(rows[1], rows[0], strict=True)]), 10))
    if mode in ("vanilla", "gspo"):
        clipped = beyond(ratio, high) if adv > 0 else beyond(-ratio, -low) if adv < 0 else False
        worse = max(-adv * ratio, -adv * clamp(ratio, low, high))
        if mode == "gspo" or adv >= 0:
            return worse, clipped, False
        return min(worse, -adv * top), clipped, beyond(max(ratio, low), top)
    if mode == "sapo":
        tau = v.setting("tau_pos") if adv > 0 else v.setting("tau_neg")
        return -adv * 4 / tau / (1 + math.exp(-tau * (ratio - 1))), False, False
    if mode == "gpg":
        return -adv * new, False, False
    if mode == "cispo":
        return -adv * clamp(ratio, low, high) * new, either(beyond(ratio, high), beyond(-ratio, -low)), False
    if mode in ("dppo_tv", "dppo_kl"):
        out = _moved(mode, v, old, new, adv, ratio)
        return -adv * min(ratio, top) * new * (not out), out, False
    if mode == "dro":
        return -(new * adv - v.setting("dro_beta") / 2 * (new - old) ** 2), False, False
    return _geo_mean(v, old, new, adv, rows) if mode == "geo_mean" else (0.0, None, None)


def _moved(mode: str, v: View, old: float, new: float, adv: float, ratio: float) -> bool | None:
    """Whether a token's probability has moved too far in its advantage's direction."""
    p, q, bound = math.exp(old), math.exp(new), v.setting("clip_ratio_high" if adv > 0 else "clip_ratio_low")
    if mode == "dppo_tv":
        return beyond(q - p if adv > 0 else p - q, bound)
    p, q = clamp(p, 1e-8, 1 - 1e-7), clamp(q, 1e-8, 1 - 1e-7)
    far = beyond(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), bound)
    return far if (ratio > 1 if adv > 0 else ratio < 1) else False


def _geo_mean(v: View, old: float, new: float, adv: float, rows: Any) -> Token:
    """GMPO: one number per row, shared out here over its tokens so that their sum is it."""
    low, high, number = -v.setting("clip_ratio_low"), v.setting("clip_ratio_high"), len(rows[0])
    logs = []
    for o, n, a in zip(*rows, strict=True):
        x = clamp(n - o, -20, 20)
        logs.append(min(x, clamp(x, low, high)) if a > 0 else max(x, clamp(x, low, high)) if a < 0 else 0.0)
    loss = -mean(rows[2]) * math.exp(mean(logs)) / number
    out = either(beyond(new - old, high), beyond(old - new, -low))
    return loss, out if adv > 0 else False, out if adv < 0 else False
