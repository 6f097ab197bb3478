"""Independent formulas of a step's numbers: slow, row by row, in plain Python floats, from the definitions only.

One generator per kind of phase yields `Claim`s: what a recorded column or metric must be, given the other recorded columns.
Nothing of `functional` and `stages` is imported, so that a fault there is not repeated here. Formulas are those of the
papers and of verl, as the docstrings of stages and functions state them. `ragged` lists hold own tokens (mask 1) only: a
sum or a recursion over them skips tool text by itself.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pvariance, variance
from typing import Any

Ragged = list[list[float]]
FLOAT32 = 2e-6
"""Relative tolerance of numbers computed in float32: about thirty roundings of 6e-8."""
EXACT = 1.5e-7
"""Relative tolerance of numbers computed in float64 and stored as float32."""


@dataclass(frozen=True)
class Claim:
    """What a recorded column or metric must be according to a formula. None in place of a number means: no claim, or
    too close to a threshold to decide.
    """

    name: str
    value: Any
    """A number (metrics); a list with a value per row, or a list of values per row (columns)."""
    formula: str
    noise: Any = 0.0
    """Size of the terms whose rounding errors the value contains: a number, or one per row."""
    near: float = FLOAT32
    """Relative tolerance."""
    partial: bool = False
    """Whether the claim is only about bounds or positions: an agreement then does not count as recomputed."""


@dataclass(frozen=True)
class Left:
    """A recorded column or metric that cannot be recomputed, and why."""

    name: str
    why: str


Claims = Iterator[Claim | Left]


def left(names: Iterable[str], why: str, role: str = "") -> Claims:
    """Yield a `Left` with the same reason for each of the names; with a `role` they are names of that role's metrics."""
    yield from (Left(f"{role}/{name}" if role else name, why) for name in names)


MODEL = "needs the model; outside the mask it is 0"


class Lists(Mapping[str, list[Any]]):
    """A batch's columns as lists of Python values, each converted at its first use."""

    def __init__(self, batch: Any, **given: list[Any]) -> None:
        self.batch, self._made = batch, dict(given)

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._made:
            column = self.batch[name]
            self._made[name] = column.tolist() if hasattr(column, "tolist") else list(column)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._made or name in self.batch

    def __iter__(self) -> Iterator[str]:
        return iter(self.batch.columns)

    def __len__(self) -> int:
        return len(self.batch.columns)

    @property
    def mask(self) -> list[list[int]]:
        """[B, T] 0 or 1: 1 on the tokens that the model itself wrote."""
        return [[int(bool(x)) for x in row] for row in self["response_mask"]]

    @property
    def lengths(self) -> list[int]:
        """[B]: number of response tokens up to the last attended one, including those of tools and users."""
        width = len(self["responses"][0]) if self["responses"] else 0
        tails = [row[len(row) - width :] for row in self["attention_mask"]]
        return [max((place + 1 for place, x in enumerate(tail) if x), default=0) for tail in tails]

    def own(self, name: str, mask: Sequence[Sequence[float]] | None = None) -> Ragged:
        """Return a column [B, T] as one list per row, with only the tokens where the mask (by default the response
        mask) is 1.
        """
        pairs = zip(self[name], self.mask if mask is None else mask, strict=True)
        return [[x for x, inside in zip(row, own, strict=True) if inside] for row, own in pairs]


@dataclass(frozen=True)
class AuditView:
    """A phase as the audit's formulas read it: the batch before and after, settings, metrics, and further facts about
    the run.
    """

    stage: str
    before: Lists
    after: Lists
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]
    rows: list[int] | None
    step: int
    version: int | None = None
    """Version of the learner's weights that computed the phase's columns."""
    state: Mapping[str, float] | None = None
    """State of the stage's controller before the step; None where it was not recorded."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the rollout."""
    scoring: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the stage that computed `old_log_probs`."""
    exact: bool = False
    """Whether the learner is known to compute in float32 without dropout, so that equal weights give equal log-probs.
    """
    tokenizer: Any = None
    """Tokenizer of the sampler's model; None where the model's folder is not on this machine."""
    ends: frozenset[int] = frozenset()
    """Ids of tokens that end a response; empty where the model's folder is not here."""
    shuffled: Callable[..., list[int]] = field(default=lambda number, *name: list(range(number)), repr=False)
    """Function that returns the random order of a number of items, from the seed with a given name."""

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting's value. Tuples, lists and dicts, which are recorded as their repr, are parsed."""
        found = self.settings.get(name, default)
        return ast.literal_eval(found) if isinstance(found, str) and found[:1] in ("(", "[", "{") else found


def placed(ragged: Sequence[Sequence[Any]], mask: Sequence[Sequence[int]], outside: Any = 0.0) -> list[list[Any]]:
    """Build [B, T] from one list of values per row: the values at the places where the mask is 1, `outside` elsewhere."""
    rows = []
    for values, own in zip(ragged, mask, strict=True):
        left = iter(values)
        rows.append([next(left) if inside else outside for inside in own])
    return rows


def each(function: Callable[..., Any], *columns: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Apply a function to every token, reading the same place of each of the columns (lists of lists of one shape)."""
    return [[function(*values) for values in zip(*rows, strict=True)] for rows in zip(*columns, strict=True)]


def gap(x: float, y: float) -> float:
    """Return the difference x − y."""
    return x - y


def flat(ragged: Sequence[Sequence[Any]]) -> list[Any]:
    """Return all values of a list of lists as one list, row by row."""
    return [x for row in ragged for x in row]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values, 0 for no values."""
    return math.fsum(values) / len(values) if values else 0.0


def size(values: Sequence[float]) -> float:
    """Return the mean absolute value, by which rounding errors are scaled; 0 for no values."""
    return mean([abs(x) for x in values])


def clamp(x: float, low: float, high: float) -> float:
    """Limit x to the interval [low, high]."""
    return min(max(x, low), high)


def averaged(name: str, values: Sequence[float], formula: str, noise: float | None = None) -> Claim:
    """Make a claim that a metric is the mean of the values."""
    return Claim(name, mean(values), formula, size(values) if noise is None else noise)


def beyond(x: float, bound: float) -> bool | None:
    """Return whether x > bound; None where they are so close that rounding decides."""
    return None if abs(x - bound) <= 1e-5 * abs(bound) + 3e-7 else x > bound


def either(a: bool | None, b: bool | None) -> bool | None:
    """Return "a or b" of two flags, where None means unknown."""
    return True if a or b else None if a is None or b is None else False


def share(flag: bool | None) -> float:
    """Return 1.0 or 0.0 for a flag, and 0.5 for an unknown one, which differs from both by no more than the noise
    `HALF` allows.
    """
    return 0.5 if flag is None else float(flag)


HALF = 0.5e6
"""The noise of a claim whose value is ½ for an unknown flag."""


def spread(prefix: str, values: Sequence[float], what: str, noise: float = 0.0) -> Claims:
    """Yield claims of `<prefix>/mean`, `/max` and `/min` over the values; none for no values."""
    if values:
        yield averaged(f"{prefix}/mean", values, f"mean of {what}", noise + size(values))
        yield Claim(f"{prefix}/max", max(values), f"largest of {what}", noise)
        yield Claim(f"{prefix}/min", min(values), f"smallest of {what}", noise)


def groups_of(uids: Sequence[Any]) -> dict[Any, list[int]]:
    """Group row numbers by uid."""
    groups: dict[Any, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    return groups


def on_last(values: Sequence[float], mask: Sequence[Sequence[int]]) -> Ragged:
    """Build [B, T] with each row's value on its last own token, and 0 elsewhere."""
    lasts = [max((place for place, inside in enumerate(row_mask) if inside), default=-1) for row_mask in mask]
    return [
        [value if place == last else 0.0 for place in range(len(row_mask))]
        for value, last, row_mask in zip(values, lasts, mask, strict=True)
    ]


def kl(delta: float, kind: str) -> float:
    """Compute an estimate of KL(policy‖reference) for one token from Δ = log π − log π_ref; `kind` is k1, abs, k2 or
    k3.
    """
    base = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.removesuffix("+"), kind.removesuffix("+"))
    if base == "k3":
        back = clamp(-delta, -20, 20)
        return clamp(math.expm1(back) - back, 0, 10)
    return {"k1": delta, "abs": abs(delta), "k2": delta * delta / 2}[base]


def bounded(b: Lists, name: str, mask: Sequence[Sequence[int | None]] | None = None) -> Claims:
    """Check that the log-probs in column `name` are at most 0, and 0 outside the mask."""
    pairs = zip(b[name], b.mask if mask is None else mask, strict=True)
    limits = [[0.0 if not own or x > 1e-6 else None for x, own in zip(row, m, strict=True)] for row, m in pairs]
    yield Claim(name, limits, "at most 0; 0 outside the mask", partial=True)


# --- measures of a batch --------------------------------------------------------------------------------


def shares(name: str, flags: Sequence[bool], formula: str) -> Claims:
    """Yield the claim that a metric is the share of true flags; none for no flags."""
    if flags:
        yield averaged(name, [float(one) for one in flags], formula)


def measured_lengths(b: Lists) -> Claims:
    """Recompute verl's length metrics. A response's length counts all its tokens, including those of tools and users."""
    lengths, prompts, meta = b.lengths, [sum(row) for row in b["prompt_mask"]], b.batch.meta_info
    yield from shares("response/aborted_ratio", [n == 0 for n in lengths], "share of empty responses")
    there = [n for n in lengths if n]
    for name, values in (
        ("response_length", lengths),
        ("response_length_non_aborted", there),
        ("prompt_length", prompts),
    ):
        yield from spread(name, values, "tokens")
        if (limit := meta.get(f"max_{name.split('_')[0]}_length")) is not None:
            yield from shares(f"{name}/clip_ratio", [n >= limit for n in values], "share of the longest length")
    if "finish_reason" in b:
        yield from shares(
            "response/cut_ratio", [one == "length" for one in b["finish_reason"]], "share of finish reason length"
        )
    if "num_turns" in b:
        yield from spread("num_turns", b["num_turns"], "turns")
        yield from spread("tool_call_counts", b["num_tool_calls"], "calls")
        yield from spread("model_tokens", [sum(row) for row in b.mask], "own tokens")
    if "session" in b:
        yield from spread("agent_loop/sequences", list(map(len, sessions_of(b).values())), "rows of an episode")


def sessions_of(b: Lists, column: str = "session") -> dict[Any, list[int]]:
    """Group row numbers by episode: (uid, number of the episode) → rows. Without the column each row is an episode."""
    sessions: dict[Any, list[int]] = {}
    rows = range(len(b.mask))
    each = zip(rows, b.get("uid", [None] * len(rows)), b.get(column, rows), strict=True)
    for row, uid, number in each:
        sessions.setdefault((uid, number), []).append(row)
    return sessions


def lasts(b: Lists) -> list[bool]:
    """Return for each row whether it is the last of its episode; metrics count an episode by that row."""
    last = {rows[-1] for rows in sessions_of(b).values()}
    return [row in last for row in range(len(b.mask))]


def row_sums(b: Lists, column: str) -> list[float]:
    """Sum a row's token scores or rewards; a row without a token of the model's own has its reward instead."""
    rows = zip(b[column], b.mask, b["reward"], strict=True)
    return [math.fsum(row) if any(own) else reward for row, own, reward in rows]


def measured_scores(b: Lists) -> Claims:
    """Recompute verl's metrics of scores and rewards, over the scored rows whose response is not empty."""
    scored_rows = [bool(ok and counted) for ok, counted in zip(b.get("scored", lasts(b)), lasts(b), strict=True)]
    rows = [ok and n > 0 for ok, n in zip(scored_rows, b.lengths, strict=True)]
    for prefix, column in (("critic/score", "token_level_scores"), ("critic/rewards", "token_level_rewards")):
        if column in b:
            sums = [x for x, counted in zip(row_sums(b, column), rows, strict=True) if counted]
            rough = max((math.fsum(map(abs, row)) for row in b[column]), default=0.0)
            yield from spread(prefix, sums, f"sums of {column}", rough)
            if sums and prefix == "critic/score":
                yield Claim("critic/score/std", math.sqrt(pvariance(sums)), "√ of the mean squared deviation", rough)
    scored = [x for x, ok in zip(b["reward"], scored_rows, strict=True) if ok]
    if scored:
        yield averaged("reward/mean", scored, "mean reward of scored rows")


def counted_tokens(b: Lists, *, of_loss: bool = False) -> list[list[int]]:
    """Return [B, T]: 1 on the model's own tokens in scored rows, without those that a correction rejected.

    A `loss_mask` that the update itself wrote (bypass mode) is applied only with `of_loss`.
    """
    origin = b.batch.origins.get("loss_mask")
    rejected = "loss_mask" in b and (of_loss or origin is None or not origin.stage.startswith("update_"))
    kept = b["loss_mask"] if rejected else b.mask
    scored = b["scored"] if "scored" in b else [True] * len(kept)
    rows = zip(kept, b.mask, scored, strict=True)
    return [[int(bool(x and own and ok)) for x, own in zip(*pair, strict=True)] for *pair, ok in rows]


def measured_advantages(b: Lists) -> Claims:
    """Recompute verl's metrics of advantages, returns, values and explained variance, over the counted tokens."""
    mask = counted_tokens(b)
    for column in ("advantages", "returns", "values"):
        if column in b:
            yield from spread(f"critic/{column}", flat(b.own(column, mask)), f"{column} of counted tokens")
    if "values" in b and sum(map(sum, mask)) > 1:
        returns, guess = flat(b.own("returns", mask)), flat(b.own("values", mask))
        bottom = variance(returns) + 1e-5
        explained = 1 - variance([x - y for x, y in zip(returns, guess, strict=True)]) / bottom
        rough = (max(map(abs, returns)) ** 2 + max(map(abs, guess)) ** 2) / bottom
        yield Claim("critic/vf_explained_var", explained, "1 − Var(R − V) / (Var(R) + 1e-5)", 1 + rough)


def measured_batch(b: Lists) -> Claims:
    """Recompute all metrics of lengths, scores and advantages for which the batch has the columns; with several
    policies for the rows of the first one.
    """
    if "policy" in b:
        b = Lists(b.batch.select_idxs([name == b.batch.meta_info.get("policy") for name in b["policy"]]))
    for column, part in (
        ("prompt_mask", measured_lengths),
        ("token_level_scores", measured_scores),
        ("advantages", measured_advantages),
    ):
        if column in b:
            yield from part(b)


def whole_step(v: AuditView, trace: Any, row: Mapping[str, Any]) -> Claims:
    """Recompute what the training loop adds to a step's metrics: measures of the last batch, aliases, and sums of
    seconds.
    """
    b = v.after
    yield Claim("training/global_step", v.step, "the trace's step")
    yield Claim("training/epoch", b.batch.meta_info.get("epoch", 0), "the batch's epoch")
    for alias, name in (("gen", "rollout"), ("ref", "ref_log_prob"), ("adv", "advantage")):
        if f"timing_s/{name}" in row:
            yield Claim(f"timing_s/{alias}", row[f"timing_s/{name}"], f"another name of timing_s/{name}")
    yield from measured_batch(b)
    total, seconds = sum(map(sum, b["attention_mask"])), max(row.get("timing_s/step", 0.0), 1e-9)
    yield Claim("perf/total_num_tokens", total, "attended tokens")
    yield Claim("perf/time_per_step", seconds, "timing_s/step")
    devices = max(round(total / seconds / (row.get("perf/throughput") or 1e30)), 1)
    yield Claim("perf/throughput", total / seconds / devices, "tokens per second, by a whole number of devices")
    for name in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        tokens, took = (sum(b.lengths) if name == "gen" else total), row.get(f"timing_s/{name}")
        if took is not None and tokens:
            yield Claim(f"timing_per_token_ms/{name}", 1000 * took / tokens, "milliseconds per token")
    overlapped = sum(phase.metrics.get("timing_s/overlapped", 0.0) for phase in trace if not phase.reused)
    yield Claim("timing_s/step", sum(phase.seconds for phase in trace) - overlapped, "the phases' seconds")
    for phase in trace:
        yield Claim(f"timing_s/{phase.stage}", phase.seconds, "the phase's seconds")
    yield from _held_out(row)
    updated = v.metrics.get("actor/lr") is not None
    if v.version is not None and "training/policy_lag/max" not in trace.metrics and b.get("policy_version"):
        yield from policy_lag(v.version - updated, b["policy_version"])


def _held_out(row: Mapping[str, Any]) -> Claims:
    """Check how the metrics of a validation relate to each other; its rows are not recorded."""
    if row.get("val/reward") is None:
        return
    yield Claim("accuracy", row["val/reward"], "another name of val/reward", partial=True)
    if row.get("val/reward_low") is not None:
        inside = min(max(row["val/reward"], row["val/reward_low"]), row["val/reward_high"])
        yield Claim("val/reward", inside, "within its interval", partial=True)
    means = [name for name in row if name.startswith("val-core/") and "/reward/mean@" in name]
    first = [name for name in row if name.endswith("/reward/pass@1")]
    if len(means) == 1:
        yield Claim(means[0], row["val/reward"], "one data source: val/reward", 1.0, partial=True)
        for name in first:
            yield Claim(name, row[means[0]], "pass@1 is the mean of rewards of 0 and 1", 1.0, partial=True)


def policy_lag(version: int, rows: Sequence[int]) -> Claims:
    """Recompute how many versions the rows' weights are behind the learner's at the start of the step."""
    yield Claim("policy_version", [min(x, version) for x in rows], "at most the learner's", near=0.0, partial=True)
    yield averaged("training/policy_lag/mean", [version - x for x in rows], "learner's version − rows' versions")
    yield Claim("training/policy_lag/max", version - min(rows), "learner's version − oldest row's")
