"""The second reading of trees: which tokens are shared and learnt once, and the advantages of their nodes.

As `audit_formulas`: plain Python floats from the definitions, nothing of `functional` and `stages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import stdev
from typing import Any

from workbench.replay.audit_formulas import (
    EXACT,
    Claim,
    Claims,
    Left,
    Lists,
    Ragged,
    View,
    groups_of,
    mean,
    row_sums,
    shares,
)

Key = tuple[Any, int]
"""A node by its `uid` and number."""


def _keys(b: Lists) -> list[list[Key | None]]:
    """[B, T] the node of each token; None outside the response."""
    return [[(uid, node) if node else None for node in row] for uid, row in zip(b["uid"], b["nodes"], strict=True)]


def _leaves(keys: Sequence[Sequence[Key | None]], counted: Sequence[bool]) -> dict[Key, list[int]]:
    """Node → the counted rows that have it."""
    found: dict[Key, list[int]] = {}
    for row, line in enumerate(keys):
        for key in dict.fromkeys(one for one in line if one is not None):
            found.setdefault(key, [])
            if counted[row]:
                found[key].append(row)
    return found


def _whole(keys: Sequence[Sequence[Key | None]]) -> list[list[int | None]]:
    """−1 at tokens that other rows have than the first token of their node; None elsewhere."""
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


def trees(v: View, *, counted: bool) -> Claims:
    """Rows that share a node have the same tokens there; if `counted`, how many tokens were sampled, each once."""
    b = v.after
    yield Left("nodes", "the rollout's own record; that shared tokens are equal, and the counts, are checked")
    keys, first = _keys(b), dict[tuple[Key, int], tuple[int, float]]()
    yield Claim("nodes", _whole(keys), "all tokens of a node are of the same rows", partial=True)
    seen: list[bool] = []
    branched, expected, log_probs = 0, [], []
    for row, line in enumerate(keys):
        told = [(one, place) for place, one in enumerate(line) if one is not None]
        branched += bool(told) and told[0] in first
        seen += [one in first for one in told if b.mask[row][one[1]]]
        for one in told:
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


def learnt_once(v: View) -> Claims:
    """Own tokens of each node in the first of its rows that was scored."""
    b, scored = v.after, list(map(bool, v.after["scored"]))
    keys = _keys(b)
    bearer = {key: rows[0] for key, rows in _leaves(keys, scored).items() if rows}
    kept = [
        [int(bool(own) and bearer.get(key) == row) for own, key in zip(mask, line, strict=True)]  # type: ignore[arg-type]
        for row, (mask, line) in enumerate(zip(b.mask, keys, strict=True))
    ]
    yield Claim("loss_mask", kept, "own tokens in the first scored row of their node")
    yield Claim("tree/learnt_tokens", sum(map(sum, kept)), "how many these are")


def _relative(v: View, scores: Sequence[float], mates: Sequence[int], row: int) -> float:
    """GRPO's advantage of a row among others."""
    of = [scores[one] for one in mates]
    if len(of) < 2:
        return 0.0
    return (scores[row] - mean(of)) / (stdev(of) + v.setting("eps", 1e-6) if v.setting("norm_by_std", True) else 1.0)


def _estimator(value: Callable[..., float]) -> Callable[..., Any]:
    """An estimator of nodes: `value(v, scores, rows below, rows below the node before, rows of the group, trees)`."""

    def estimate(v: View, mask: list[list[int]], rewards: Ragged, scored: list[bool]) -> Any:
        keys = _keys(v.after)
        worth = _worth(v, keys, scored, value)
        made = [
            [worth.get(key, 0.0) * ok for key, own in zip(line, inside, strict=True) if own]  # type: ignore[arg-type]
            for line, inside, ok in zip(keys, mask, scored, strict=True)
        ]
        top = max(map(abs, worth.values()), default=0.0)
        rough = max((math.fsum(map(abs, row)) for row in rewards), default=0.0)
        return made, made, 1e-6 * (rough + top), EXACT

    return estimate


def _worth(v: View, keys: list[list[Key | None]], scored: list[bool], value: Callable[..., float]) -> dict[Key, float]:
    """Node → its advantage, of nodes with a scored leaf."""
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


def _turn(v: View, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    spread = stdev([s[row] for row in group]) if len(group) > 1 else 0.0
    gained = mean([s[row] for row in below]) - mean([s[row] for row in before])
    return gained / (spread + v.setting("eps", 1e-6)) if v.setting("norm_by_std", True) else gained


def _tree_rl(v: View, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    own, parent, root = (mean([s[row] for row in rows]) for rows in (below, before, group))
    return ((own - root) + (own - parent)) / math.sqrt(len(below))


def _arpo(v: View, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    return mean([_relative(v, s, group, row) for row in below])


def _tree_grpo(v: View, s: Sequence[float], below: Any, before: Any, group: Any, tree: Any) -> float:
    return mean([_relative(v, s, group, row) + _relative(v, s, tree[row], row) for row in below])


TREES: Mapping[str, Callable[..., Any]] = {
    "tree_turn": _estimator(_turn),
    "tree_rl": _estimator(_tree_rl),
    "arpo": _estimator(_arpo),
    "tree_grpo": _estimator(_tree_grpo),
}
"""Estimator → its slow form, as in `audit_advantages`."""
