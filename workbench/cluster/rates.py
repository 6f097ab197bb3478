"""How long the parts of a training take, for `simulate`: given, measured in a run, or estimated from a card's data sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from workbench.base.cards import CARDS
from workbench.base.config import require
from workbench.base.errors import RunError, unknown

SHARE = 0.4
"""Of a card's peak that updates reach where nobody says: what large dense models are reported to reach."""
READS = 0.7
"""Of a card's memory bandwidth that decoding reaches where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How long things take: given, measured in a run (`Rates.of`), or from a card's data sheet (`Rates.on`)."""

    lengths: Sequence[int]
    """Response lengths, in tokens: one of them is drawn for each row."""
    prompt: float = 0.0
    """Tokens of a prompt, the mean."""
    token: float = 0.02
    """Seconds between two tokens of a request that decodes alone."""
    per_request: float = 0.0
    """Seconds that each further request of the same replica adds."""
    first: float = 0.0
    """Seconds in a slot before the first token."""
    rewards: Sequence[float] = (0.0,)
    """Seconds of a reward: one of them is drawn for each row."""
    train_token: float = 0.0
    """Seconds of one learner rank per token of prompt and response: log-probs and update together."""
    update: float = 0.0
    """Seconds of each mini-batch beyond its tokens."""
    step: float = 0.0
    """Seconds of each step beyond all that: other stages, records."""
    push: float = 0.0
    """Seconds that new weights take to the samplers."""
    notes: tuple[str, ...] = ()
    """Where the figures are from, in words."""

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("rewards", self.rewards)):
            require(len(values) > 0 and min(values) >= 0, name, expected="some numbers ≥ 0", found=values)
        for name in ("prompt", "token", "per_request", "first", "train_token", "update", "step", "push"):
            require(getattr(self, name) >= 0, name, expected="≥ 0", found=getattr(self, name))

    def token_seconds(self, n: int) -> float:
        """Seconds between two tokens of each of `n` requests that a replica decodes together."""
        return self.token + self.per_request * max(n - 1, 0)

    def replace(self, **changes: Any) -> Rates:
        """The same with other figures."""
        return replace(self, **changes)

    @staticmethod
    def of(run: Any, **known: Any) -> Rates:
        """Measure the figures in a run (`wb.load_run(…)`) whose stages ran in order, with a recorded trace; `known` are given
        instead. Raises `RunError` where it has none.

        The fit of `token` and `per_request` needs steps of unlike lengths; where one will not do, `per_request` is 0, and `notes` say so.
        """
        settings = run.settings
        if settings["train"].get("ahead") or settings["train"].get("max_lag"):
            raise RunError(
                f"run {run.path.name} did not run in order", expected="ahead=0", do="measure such a run first"
            )
        rows = [row for row in run.rows if row.get("timing_s/rollout") and row.get("response_length/max")]
        rows = rows[1:] or rows  # the first step warms up
        count = int(settings["train"]["batch_size"]) * int(settings["stages"]["rollout"]["group_size"])
        push = median(row.get("timing_s/update_weights") or 0.0 for row in rows) if rows else 0.0
        points = []
        for row in rows:
            rounds, seconds = row["response_length/max"], max(row["timing_s/rollout"] - push, 0.0)
            points.append((rounds, row["response_length/mean"] * count - rounds, seconds))
        token, per_request, how = _fitted(points)
        notes = (
            f"measured in {run.path.name}, {len(rows)} steps: {how}",
            "training is taken as proportional to its tokens",
        )
        found = {"token": token, "per_request": per_request, "push": push, "train_token": _learning(rows)}
        return Rates(**{**_of_traces(run), **found, "notes": notes, **known})

    @staticmethod
    def on(
        card: str,
        parameters: float,
        *,
        lengths: Sequence[int],
        tensor_parallel: int = 1,
        share: float = SHARE,
        reads: float = READS,
        cache_bytes: float = 0.0,
        active: float | None = None,
        **known: Any,
    ) -> Rates:
        """Estimate the figures for a model of so many parameters in bfloat16 on a card of `base.cards`.

        Decoding reads all weights once a token (divided by `tensor_parallel`) and each request's `cache_bytes` (of keys and
        values, at its mean length), at `reads` of the card's bandwidth; a token trained is 8 operations per `active` parameter
        (a pass for the old log-probs, forward, backward), at `share` of its peak. The push sends the weights over one link.
        """
        if card not in CARDS:
            raise RunError(unknown("card", card, CARDS))
        one, weights = CARDS[card], 2 * parameters
        speed = reads * one.bandwidth * tensor_parallel
        notes = (
            f"{one.name}: {one.flops / 1e12:.0f} TFLOP/s, {one.bandwidth / 1e12:.2f} TB/s ({one.source})",
            f"updates reach {share:.0%} of the peak, decoding {reads:.0%} of the bandwidth",
        )
        found = {
            "token": (2 * (active or parameters) + cache_bytes) / speed,
            "per_request": max(cache_bytes / speed, 2 * (active or parameters) / (share * one.flops * tensor_parallel)),
            "train_token": 8 * (active or parameters) / (share * one.flops),
            "push": weights / one.link,
        }
        return Rates(lengths=lengths, notes=notes, **(found | known))


# --- measuring a run --------------------------------------------------------------------------------

_APART = (
    "timing_s/rollout", "timing_s/reward", "timing_s/step", "timing_s/update_weights", "timing_s/testing",
    "timing_s/gen", "timing_s/ref", "timing_s/adv", "timing_s/overlapped",
)  # fmt: skip
"""Times of a metrics row that are no stage of the learner, or another name of one."""


def _learning(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a step's stages that are the learner's, per token: the median."""
    names = {key for row in rows for key in row if key.startswith("timing_s/")} - set(_APART)
    return median(sum(row.get(name) or 0.0 for name in names) / row["perf/total_num_tokens"] for row in rows)


def _of_traces(run: Any) -> dict[str, Any]:
    """Response lengths, mean prompt and reward seconds of the rows of a run's recorded traces."""
    traces = [run.traces[step] for step in run.traces]
    batches = [trace.batch for trace in traces if "response_mask" in trace.batch]
    if not batches:
        do = "train with trace_freq=1, so that response lengths are known"
        raise RunError(f"run {run.path.name} has no recorded trace", expected="at least one", do=do)
    lengths = [int(n) for one in batches for n in one["attention_mask"][:, -one["responses"].shape[1] :].sum(1)]
    scores = [score.seconds for one in batches if "score" in one for score in one["score"]]
    prompt = fmean(float(n) for one in batches for n in one["prompt_mask"].sum(1))
    return {"lengths": lengths, "prompt": prompt, "rewards": scores or (0.0,)}


def _fitted(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, str]:
    """(token, per_request, in words) by least squares of seconds = token · rounds + per_request · (tokens - rounds), neither negative.

    One wave of n requests takes `token + per_request · (n - 1)` for each round, so that both sums are known without its schedule.
    """
    aa, ab, bb = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    ac, bc = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-6 * aa * bb:
        token, per_request = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
        if token > 0 and per_request >= 0:
            return token, per_request, "the seconds of a token and of each concurrent request are fitted to all steps"
    how = "the steps are too alike to tell what a concurrent request costs: nothing is assumed"
    return ac / max(aa, 1e-12), 0.0, how
