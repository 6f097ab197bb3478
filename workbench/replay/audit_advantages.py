"""The second reading of advantages: KL in the reward, every estimator, its metrics; which tokens trees share and learn once.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import stdev, variance
from typing import Any

from workbench.replay.audit_formulas import (
    EXACT,
    FLOAT32,
    AuditView,
    Claim,
    Claims,
    Left,
    Lists,
    Ragged,
    clamp,
    each,
    gap,
    groups_of,
    kl,
    mean,
    measured_advantages,
    measured_scores,
    placed,
    row_sums,
    sessions_of,
    shares,
    size,
)  # fmt: skip

Key = tuple[Any, int]
"""A node by its `uid` and number."""


def _keys(b: Lists) -> list[list[Key | None]]:
    """Return [B, T]: the tree node of each response token as (uid, number); None outside the response."""
    return [[(uid, node) if node else None for node in row] for uid, row in zip(b["uid"], b["nodes"], strict=True)]


def _leaves(keys: Sequence[Sequence[Key | None]], counted: Sequence[bool]) -> dict[Key, list[int]]:
    """Map each tree node to the indices of the counted rows whose path from the root has it; `keys[row]` is that path,
    with None for tokens of no node."""
    leaves: dict[Key, list[int]] = {}
    for row, line in enumerate(keys):
        for key in dict.fromkeys(one for one in line if one is not None):
            leaves.setdefault(key, [])
            if counted[row]:
                leaves[key].append(row)
    return leaves


def _whole(keys: Sequence[Sequence[Key | None]]) -> list[list[int | None]]:
    """Return [B, T]: −1 at each token whose set of rows differs from that of its node's first token, None elsewhere.
    All None means that every node's tokens belong to the same rows.
    """
    having: dict[tuple[Key, int], set[int]] = {}
    for row, line in enumerate(keys):
        for place, key in enumerate(line):
            if key is not None:
                having.setdefault((key, place), set()).add(row)
    rows: dict[Key, set[int]] = {}
    for (key, _), there in sorted(having.items(), key=lambda one: one[0][1]):
        rows.setdefault(key, there)
    return [
        [None if key is None or having[key, place] == rows[key] else -1 for place, key in enumerate(line)]
        for line in keys
    ]


def trees(v: AuditView, *, counted: bool) -> Claims:
    """Check that rows that share a tree node have equal tokens and log-probs there; with `counted` also how many tokens
    were sampled, shared ones counted once.
    """
    b = v.after
    yield Left("nodes", "the rollout's own record; that shared tokens are equal, and the counts, are checked")
    keys, first = _keys(b), dict[tuple[Key, int], tuple[int, float]]()
    yield Claim("nodes", _whole(keys), "all tokens of a node are of the same rows", partial=True)
    seen: list[bool] = []
    branched, expected, log_probs = 0, [], []
    for row, line in enumerate(keys):
        tokens = [(one, place) for place, one in enumerate(line) if one is not None]
        branched += bool(tokens) and tokens[0] in first
        seen += [one in first for one in tokens if b.mask[row][one[1]]]
        for one in tokens:
            first.setdefault(one, (b["responses"][row][one[1]], b["rollout_log_probs"][row][one[1]]))
        there = [first[one, place] if one is not None else (None, None) for place, one in enumerate(line)]
        expected.append([token for token, _ in there])
        log_probs.append([value for _, value in there])
    yield Claim("responses", expected, "the tokens of the node's first row", partial=True)
    yield Claim("rollout_log_probs", log_probs, "the log-probs of the node's first row", partial=True)
    if not counted:
        return
    yield Claim("tree/branched", branched, "rows whose first token is another row's")
    yield Claim("tree/sampled_tokens", seen.count(False), "own tokens, shared ones counted once")
    yield from shares("tree/shared_ratio", seen, "own tokens that are an earlier row's")


def learnt_once(v: AuditView) -> Claims:
    """Recompute the `loss_mask` with which each node's tokens are learnt from once: in the first scored row that has
    the node.
    """
    b, scored = v.after, list(map(bool, v.after["scored"]))
    keys = _keys(b)
    bearer = {key: rows[0] for key, rows in _leaves(keys, scored).items() if rows}
    kept = [
        [int(bool(own) and bearer.get(key) == row) for own, key in zip(mask, line, strict=True)]  # type: ignore[arg-type]
        for row, (mask, line) in enumerate(zip(b.mask, keys, strict=True))
    ]
    yield Claim("loss_mask", kept, "own tokens in the first scored row of their node")
    yield Claim("tree/learnt_tokens", sum(map(sum, kept)), "how many these are")


def _relative(v: AuditView, scores: Sequence[float], mates: Sequence[int], row: int) -> float:
    """Compute GRPO's advantage of a row relative to the rows `mates`: (score − mean) / (deviation + eps); 0 for fewer
    than two rows.
    """
    of = [scores[one] for one in mates]
    if len(of) < 2:
        return 0.0
    return (scores[row] - mean(of)) / (stdev(of) + v.setting("eps", 1e-6) if v.setting("norm_by_std", True) else 1.0)


def _estimator(value: Callable[..., float]) -> Callable[..., Any]:
    """Make a tree estimator from `value(v, scores, rows below a node, rows below its parent, rows of the group,
    trees)`, which returns the advantage of one node.
    """

    def estimate(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Any:
        keys = _keys(v.after)
        worth = _worth(v, keys, scored, value)
        advantages = [
            [worth.get(key, 0.0) * ok for key, own in zip(line, inside, strict=True) if own]  # type: ignore[arg-type]
            for line, inside, ok in zip(keys, mask, scored, strict=True)
        ]
        top = max(map(abs, worth.values()), default=0.0)
        rough = max((math.fsum(map(abs, row)) for row in rewards), default=0.0)
        return advantages, advantages, 1e-6 * (rough + top), EXACT

    return estimate


def _worth(
    v: AuditView, keys: list[list[Key | None]], scored: list[bool], value: Callable[..., float]
) -> dict[Key, float]:
    """Map each node that has a scored leaf to its advantage, computed by `value`."""
    scores, below = row_sums(v.after, "token_level_rewards"), _leaves(keys, scored)
    groups = {uid: [row for row in rows if scored[row]] for uid, rows in groups_of(v.after["uid"]).items()}
    tree = {row: below[line[0]] for row, line in enumerate(keys) if line and line[0] is not None}
    worth: dict[Key, float] = {}
    for uid, line in zip(v.after["uid"], keys, strict=True):
        before = groups[uid]
        for key in dict.fromkeys(one for one in line if one is not None):
            if below[key] and key not in worth:
                worth[key] = value(v, scores, below[key], before, groups[uid], tree)
            before = below[key]
    return worth


def _turn(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    spread = stdev([s[row] for row in group]) if len(group) > 1 else 0.0
    gained = mean([s[row] for row in below]) - mean([s[row] for row in before])
    return gained / (spread + v.setting("eps", 1e-6)) if v.setting("norm_by_std", True) else gained


def _tree_rl(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    own, parent, root = (mean([s[row] for row in rows]) for rows in (below, before, group))
    return ((own - root) + (own - parent)) / math.sqrt(len(below))


def _arpo(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    return mean([_relative(v, s, group, row) for row in below])


def _tree_grpo(v: AuditView, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    return mean([_relative(v, s, group, row) + _relative(v, s, tree[row], row) for row in below])


TREES: Mapping[str, Callable[..., Any]] = {
    "tree_turn": _estimator(_turn),
    "tree_rl": _estimator(_tree_rl),
    "arpo": _estimator(_arpo),
    "tree_grpo": _estimator(_tree_grpo),
}
"""Estimator → its slow form, as in `audit_advantages`."""


# --- advantages -----------------------------------------------------------------------------------------


def advantage(v: AuditView) -> Claims:
    """Recompute token rewards with their KL penalty, advantages, returns, and the metrics of all three."""
    b, mask = v.after, [list(map(bool, row)) for row in v.after.get("loss_mask", v.after.mask)]
    yield from _penalised(v)
    yield from _estimated(v, each(int, mask))
    zero = [not any(row) for row in b.own("advantages", mask)]
    group_sizes = Counter(uid for uid, _ in sessions_of(b, _column(v)))
    yield Claim("advantage/singleton_groups", list(group_sizes.values()).count(1), "groups of one row, or episode")
    yield Claim("advantage/zero_rows", sum(zero), "rows whose advantages are all 0")
    yield from shares("advantage/zero_share", zero, "their share")
    yield from measured_scores(b)
    yield from measured_advantages(b)


def _estimated(v: AuditView, mask: list[list[int]]) -> Claims:
    name, rewards, last = str(v.settings["estimator"]), v.after["token_level_rewards"], _last_of_session(v)
    if (estimate := ESTIMATORS.get(name)) is None:
        yield Left("advantages", f"foreign estimator {name}")
        yield Left("returns", f"foreign estimator {name}")
        return
    scored = v.after["scored"] if "scored" in v.after else [True] * len(mask)
    counted = [bool(ok) and last[row] == row for row, ok in enumerate(scored)]
    several = last != list(range(len(mask)))
    whole = [row_mask if any(row_mask) or not several else [1, *row_mask[1:]] for row_mask in mask]
    *columns, noise, near = estimate(v, whole, rewards, counted)
    if several:  # a row's advantage is one number: that of its session's last row
        numbers = [columns[0][row][0] for row in last]
        columns = [[[x] * sum(row_mask) for x, row_mask in zip(numbers, mask, strict=True)]] * 2
    for column, ragged in zip(("advantages", "returns"), columns, strict=True):
        yield Claim(column, placed(ragged, mask), f"{name}, from the token rewards", noise, near)


def _last_of_session(v: AuditView) -> list[int]:
    """Return for each row the last row of its session; the row itself without sessions, and for estimators that work by
    token.
    """
    rows = list(range(len(v.after["uid"])))
    for session in sessions_of(v.after, _column(v)).values() if v.setting("estimator") not in OF_TOKENS else ():
        for row in session:
            rows[row] = session[-1]
    return rows


def _column(v: AuditView) -> str:
    """Return the name of the column that numbers sessions; "" where each row is a session."""
    return str(v.setting("sessions", "session") or "")


def _penalised(v: AuditView) -> Claims:
    b, mask, scores = v.after, v.after.mask, v.before["token_level_scores"]
    if "kl_controller" not in v.settings:
        yield Claim("token_level_rewards", scores, "the token scores", near=0.0)
        return
    kind, controller = v.setting("kl_type"), str(v.settings["kl_controller"])
    deltas = each(gap, b.own("old_log_probs"), b.own("ref_log_prob"))
    penalties = each(lambda x: kl(x, kind), deltas)
    numbers = _numbers(v)
    beta = numbers.get("coef") if controller.startswith("FixedKL") else (v.state or {}).get("value")
    if beta is None and v.step == 1:
        beta = numbers.get("coef")
    if beta is None:
        beta = v.metrics["actor/reward_kl_penalty_coeff"]
        yield Left("actor/reward_kl_penalty_coeff", "the controller's state before the step was not kept")
    else:
        yield Claim("actor/reward_kl_penalty_coeff", beta, f"β of {controller}")
    rewards = each(lambda s, x: s - beta * x, scores, placed(penalties, mask))
    noise = [2 * abs(beta) * max(map(abs, row), default=0.0) for row in deltas]
    yield Claim("token_level_rewards", rewards, f"token scores − β·{kind}", noise, EXACT)
    rows, rough = ([mean(row) for row in penalties], mean([size(row) for row in deltas]))
    yield Claim("actor/reward_kl_penalty", mean(rows), "mean over rows of the row's mean KL", rough)


def controller(v: AuditView) -> Claims:
    """Recompute the adaptive KL coefficient after the step: β·(1 + clip(kl/target − 1, ±0.2)·rows/horizon)."""
    numbers = _numbers(v)
    error = clamp(v.metrics["actor/reward_kl_penalty"] / numbers["target"] - 1, -0.2, 0.2)
    beta = v.metrics["actor/reward_kl_penalty_coeff"]
    value = beta * (1 + error * len(v.after["uid"]) / numbers["horizon"])
    yield Claim("controller", value, "β·(1 + clip(kl/target − 1, ±0.2)·rows/horizon)", near=1e-9)


def _numbers(v: AuditView) -> dict[str, float]:
    """Parse the arguments of the KL controller from its repr, such as {"coef": 0.001, "target": 0.1}."""
    return {name: float(x) for name, x in re.findall(r"(\w+)=([-\d.e+]+)", str(v.settings["kl_controller"]))}


Estimate = tuple[Ragged, Ragged, Any, float]
"""Advantages and returns of own tokens, noise, relative tolerance."""


def _grouped(
    v: AuditView, mask: list[list[int]], scores: Sequence[float], counted: Sequence[bool], formula: Any
) -> list[float]:
    """Compute one number per row by `formula(v, scores, lengths)` over the counted rows of each group.

    A group of one row gets 0, or with `singleton="verl"` its score; rows that are not counted get 0.
    """
    values = [0.0] * len(mask)
    for rows in groups_of(v.after["uid"]).values():
        inside = [row for row in rows if counted[row]]
        of = [scores[row] for row in inside]
        found = formula(v, of, [sum(mask[row]) for row in inside]) if len(of) > 1 else of
        for row, value in zip(inside, found, strict=True):
            values[row] = value if len(of) > 1 or v.setting("singleton") == "verl" else 0.0
    return values


def _grpo(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [(x - mean(s)) / _deviation(v, s) for x in s]


def _deviation(v: AuditView, s: list[float]) -> float:
    return stdev(s) + v.setting("eps", 1e-6) if v.setting("norm_by_std", True) else 1.0


def _passk(v: AuditView, s: list[float], _: Any) -> list[float]:
    first, second = sorted(s)[-1], sorted(s)[-2]
    return [(first - second) / _deviation(v, s) if x == first else 0.0 for x in s]


def _rloo(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [x - (math.fsum(s) - x) / (len(s) - 1) for x in s]


def _opo(v: AuditView, s: list[float], lengths: list[int]) -> list[float]:
    weights = lengths if any(lengths) else [1] * len(s)
    return [x - math.fsum(w * y for w, y in zip(weights, s, strict=True)) / sum(weights) for x in s]


def _maxrl(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [(x - mean(s)) / (mean(s) if mean(s) > 0 else 1) for x in s]


def _centred(v: AuditView, s: list[float], _: Any) -> list[float]:
    return [x - mean(s) for x in s]


def _rowwise(
    one: Callable[[AuditView, Any, Any], list[float]], *, whiten: bool = False, alpha: bool = False
) -> Callable[..., Estimate]:
    """Make an estimator that puts one number per row on all its tokens; `one(v, scores, lengths)` computes the numbers
    of a group.

    `whiten` normalises the result over tokens, `alpha` multiplies it by GPG's factor.
    """

    def estimate(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
        scores = row_sums(v.after, "token_level_rewards")
        factor = _alpha(v, scores, scored) if alpha else 1.0
        values = [factor * x for x in _grouped(v, mask, scores, scored, one)]
        noise = _rounding(v, scores, rewards, values, scored)
        ragged = [[value] * sum(own) for value, own in zip(values, mask, strict=True)]
        return _white(ragged, scored, max(noise)) if whiten else (ragged, ragged, noise, EXACT)

    return estimate


def _alpha(v: AuditView, scores: Sequence[float], scored: Sequence[bool]) -> float:
    """Compute GPG's factor: the number of scored rows divided by those whose score is not 0, divided by `f_norm`."""
    counted = [x for x, ok in zip(scores, scored, strict=True) if ok]
    nonzero = len(counted) - counted.count(0)
    return (len(counted) / nonzero if nonzero else 1.0) / v.setting("f_norm", 1.0)


def _rounding(
    v: AuditView, scores: Sequence[float], rewards: Ragged, values: Sequence[float], scored: Sequence[bool]
) -> Any:
    """Bound the rounding error of each row's advantage: rewards that are summed are rounded, and dividing by the
    deviation enlarges that.
    """
    rough = [math.fsum(map(abs, row)) * (len(row) - row.count(0) > 1) for row in rewards]
    noise = [0.0] * len(scores)
    for rows in groups_of(v.after["uid"]).values():
        counted = [scores[row] for row in rows if scored[row]]
        below = max(stdev(counted), 1e-6) if len(counted) > 1 else 1.0
        worst = max(rough[one] for one in rows) * max(1 / below, 1)
        noise = [worst * (1 + abs(values[row])) if row in rows else x for row, x in enumerate(noise)]
    return noise


def _white(ragged: Ragged, scored: Sequence[bool], noise: float = 0.0) -> Estimate:
    """Whiten values over the tokens of scored rows: (x − mean) / √(variance + 1e-8); other rows get 0. Fewer than two
    values stay as they are.
    """
    inside = [x for row, ok in zip(ragged, scored, strict=True) for x in row if ok]
    middle, var = (mean(inside), variance(inside)) if len(inside) > 1 else (0.0, 1 - 1e-8)
    whitened = [
        [(x - middle) / math.sqrt(var + 1e-8) * ok for x in row] for row, ok in zip(ragged, scored, strict=True)
    ]
    top = max(map(abs, inside), default=0.0) + noise
    more = top / math.sqrt(var + 1e-8) * (1 + top / math.sqrt(var + 1e-8))
    return whitened, whitened, more, FLOAT32


def _to_go(rewards: Ragged, gamma: float, scored: Sequence[bool]) -> Ragged:
    """Compute the discounted reward-to-go of each response token; 0 in rows that were not scored."""
    sums = []
    for row, ok in zip(rewards, scored, strict=True):
        carried, backwards = 0.0, []
        for x in reversed(row):
            carried = x + gamma * carried
            backwards.append(carried * ok)
        sums.append(backwards[::-1])
    return sums


def _total(rewards: Ragged) -> float:
    return max((math.fsum(map(abs, row)) for row in rewards), default=0.0)


def _plus_plus(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    returns = _to_go(_inside(rewards, mask), v.setting("gamma", 1.0), scored)
    made, _, noise, near = _white(returns, scored, _total(rewards))
    return made, returns, noise, near


def _remax(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    returns = _to_go(_inside(rewards, mask), 1.0, scored)
    rows = zip(returns, v.after["reward_baselines"], scored, strict=True)
    return [[(x - base) * ok for x in row] for row, base, ok in rows], returns, 2 * _total(rewards), EXACT


def _gae(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    gamma, lam, advantages = v.setting("gamma", 1.0), v.setting("lam", 1.0), []
    guesses = v.after.own("values", mask)
    for row, guess in zip(_inside(rewards, mask), guesses, strict=True):
        after = next_value = 0.0
        backwards = []
        for r, value in zip(reversed(row), reversed(guess), strict=True):
            after = r + gamma * next_value - value + gamma * lam * after
            next_value = value
            backwards.append(after)
        advantages.append(backwards[::-1])
    advantages = [[a * ok for a in row] for row, ok in zip(advantages, scored, strict=True)]
    returns = [
        [a + value * ok for a, value in zip(*rows, strict=True)]
        for *rows, ok in zip(advantages, guesses, scored, strict=True)
    ]
    noise = _total(rewards) + 2 * _total(guesses)
    if not v.setting("whiten", True):
        return advantages, returns, noise, FLOAT32
    white, _, more, near = _white(advantages, scored, noise)
    return white, returns, more, near


def _inside(rows: Ragged, mask: list[list[int]]) -> Ragged:
    return [[x for x, own in zip(*pair, strict=True) if own] for pair in zip(rows, mask, strict=True)]


def _gdpo(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
    parts = [one.strip() for one in str(v.settings["parts"]).split(",")]
    totals = [0.0] * len(mask)
    for part, weight in zip(parts, v.setting("weights") or [1.0] * len(parts), strict=True):
        column = v.after[f"reward/{part}"]
        there = [ok and math.isfinite(x) for ok, x in zip(scored, column, strict=True)]
        found = _grouped(v, mask, column, there, _grpo)
        totals = [total + weight * x for total, x in zip(totals, found, strict=True)]
    return _white([[x] * sum(own) for x, own in zip(totals, mask, strict=True)], scored)


def _token_baseline(packed: bool) -> Callable[..., Estimate]:
    """Make the estimator with the optimal baseline of each position. With `packed` positions count only the model's own
    tokens.
    """

    def estimate(v: AuditView, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Estimate:
        returns, weights = _to_go(_inside(rewards, mask), 1.0, scored), _energies(v, mask, scored)
        places = [_places(own, packed) for own in mask]
        advantages: Ragged = [[] for _ in mask]
        for rows in groups_of(v.after["uid"]).values():
            lengths = sorted([sum(mask[row]) * scored[row] for row in rows] + [0, 0])
            longest, second = lengths[-1], lengths[-2]
            for row in rows:
                alone = second if sum(mask[row]) == longest > second else math.inf
                for place, n in places[row].items():
                    base = _base(rows, place, places, returns, weights, v.setting("eps", 1e-8))
                    advantages[row].append((returns[row][n] - (base if place < alone else 0.0)) * scored[row])
        return advantages, returns, 4 * _total(rewards), FLOAT32

    return estimate


def _energies(v: AuditView, mask: list[list[int]], scored: Sequence[bool]) -> Ragged:
    """Compute for each own token the cumulative sum of (1 − 2π + Σπ²)·ρ² up to it; 0 in rows that were not scored."""
    b = v.after
    ratios = (
        b.own("rollout_is_weights", mask)
        if "rollout_is_weights" in b
        else each(lambda _: 1.0, b.own("old_log_probs", mask))
    )
    steps = each(
        lambda x, s, r: (1 - 2 * math.exp(x) + s) * r * r,
        b.own("old_log_probs", mask),
        b.own("sum_pi_squared", mask),
        ratios,
    )
    return [[x * ok for x in itertools.accumulate(row)] for row, ok in zip(steps, scored, strict=True)]


def _places(own: Sequence[int], packed: bool) -> dict[int, int]:
    """Map the position of each own token to its number among the row's own tokens; with `packed` each number to itself."""
    found = [t for t, inside in enumerate(own) if inside]
    return {n if packed else t: n for n, t in enumerate(found)}


def _base(
    rows: Sequence[int], place: int, places: list[dict[int, int]], returns: Ragged, weights: Ragged, eps: float
) -> float:
    """Compute the baseline of a position, Σ G·W / (Σ W + eps), over those of the group's rows that have this position."""
    there = [
        (returns[row][places[row][place]], weights[row][places[row][place]]) for row in rows if place in places[row]
    ]
    return math.fsum(g * w for g, w in there) / (math.fsum(w for _, w in there) + eps)


OF_TOKENS = (
    "reinforce_plus_plus", "remax", "gae", "optimal_token_baseline", "tir_optimal_token_baseline"
)  # fmt: skip
ESTIMATORS: Mapping[str, Callable[[AuditView, list[list[int]], Ragged, list[bool]], Estimate]] = {
    "grpo": _rowwise(_grpo),
    "grpo_passk": _rowwise(_passk),
    "rloo": _rowwise(_rloo),
    "opo": _rowwise(_opo),
    "maxrl": _rowwise(_maxrl),
    "gpg": _rowwise(_centred, alpha=True),
    "reinforce_plus_plus_baseline": _rowwise(_centred, whiten=True),
    "reinforce_plus_plus": _plus_plus,
    "remax": _remax,
    "gae": _gae,
    "gdpo": _gdpo,
    "optimal_token_baseline": _token_baseline(packed=False),
    "tir_optimal_token_baseline": _token_baseline(packed=True),
    **TREES,
}
"""Estimator → its slow form: of the view, mask, token rewards and scored rows."""
