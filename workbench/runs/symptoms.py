"""Finds what usually goes wrong in RL training in a run's metrics and its last trace, with advice for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from workbench.base.shown import Shown, blocks, number
from workbench.runs.folder import STEP

Rows = Sequence[Mapping[str, Any]]
Check = Callable[[Rows, Any], Iterator["Symptom"]]
WINDOW = 5
"""Number of steps that a check averages: the last ones, compared with as many first ones."""
LOOKS = 5000
"""The most rows of an existing run after which the checks are made: all rows of most runs, in under half a second."""
SEEN = 64
"""Last rows that are checked after every step, beside the first ones, so that the cost does not grow with the run."""


@dataclass(frozen=True)
class Symptom:
    """One problem seen in a run's metrics, such as "entropy has collapsed": the numbers, since which step, and what to
    try.
    """

    name: str
    found: str
    """The numbers that show the problem."""
    since: int
    """The first step of the window of steps in which the symptom was seen."""
    do: str
    """The usual cause of the problem, and what to try."""
    steps: tuple[int, ...] = ()
    """The steps that have the symptom; empty for a symptom of a range of steps."""
    metric: str = ""
    """The metric that shows the problem, which is drawn beside it."""
    course: str = ""
    """That metric from the first step to the last as blocks, `▁▃▆█`, where the run's rows are at hand."""

    def __str__(self) -> str:
        return f"{self.name} (step {self.since} on): {self.found}; {self.do}"


def symptoms(rows: Rows, batch: Any = None) -> list[Symptom]:
    """List the problems that show in metrics rows (`run.rows`), the worst first; `batch`, the last recorded one, shows
    causes.

    Fewer than three steps are not checked, nor are metrics that a run does not have.
    """
    steps = [row for row in rows if step_of(row) > 0]
    if len(steps) < 3:
        return []
    return [found for check in CHECKS for found in check(steps, batch)]


def step_of(row: Mapping[str, Any]) -> int:
    """Return the row's step; 0, as before training, for a row of another program that names none."""
    return int(row.get(STEP) or 0)


def series(rows: Rows, name: str) -> list[float]:
    """Return the metric's values, of the rows where it is a number."""
    return [value for row in rows if isinstance(value := row.get(name), int | float) and value == value]


def running(rows: Rows, name: str) -> list[float]:
    """Return the metric's means over each `WINDOW` steps in turn; the mean of all where there are fewer."""
    values = series(rows, name)
    return [fmean(values[at : at + WINDOW]) for at in range(max(len(values) - WINDOW + 1, min(len(values), 1)))]


def mean_of(rows: Rows, name: str) -> float | None:
    """Return the metric's mean over the rows where it is a number; None where there is none."""
    values = series(rows, name)
    return fmean(values) if values else None


def _last(rows: Rows, name: str) -> float | None:
    return mean_of(rows[-WINDOW:], name)


def _cut(rows: Rows) -> float:
    """Return the share of responses that were cut off at the token limit, averaged over the last steps; 0 where it is
    not measured.
    """
    return _last(rows, "response/cut_ratio") or 0.0


def _lately(rows: Rows, name: str, found: str, do: str, metric: str) -> Symptom:
    """Make a symptom of the last `WINDOW` steps."""
    return Symptom(name, found, int(rows[-WINDOW:][0][STEP]), do, metric=metric)


def _flat_reward(rows: Rows, batch: Any) -> Iterator[Symptom]:
    values = series(rows[-WINDOW:], "critic/score/max")
    if len(values) < 3 or any(value > 0 for value in values):
        return
    causes = []
    if _cut(rows) > 0.8:
        causes.append("nearly all responses are cut off: raise max_tokens")
    if (_last(rows, "reward/scored_ratio") or 1) < 0.5:
        causes.append("most rows were not scored: the reward function fails, see the traceback in views.samples")
    if batch is not None:
        causes += _causes(batch)
    do = "; ".join(causes) or "look at views.samples(…): is the function wrong, the ground truth, or the format?"
    found = f"no reward above 0 in {len(values)} steps"
    yield _lately(rows, "reward is flat at 0", found, do, "critic/score/max")


def _causes(batch: Any) -> Iterator[str]:
    truths = list(batch["reward_model"]) if "reward_model" in batch else []
    without = sum(1 for one in truths if not (one or {}).get("ground_truth"))
    if without:
        yield f"{without} of {len(truths)} rows have no ground truth"
    scores = list(batch["score"]) if "score" in batch else []
    unread = sum(1 for score in scores if getattr(score, "answer", None) is None and score.scored)
    if scores and unread > len(scores) / 2:
        yield f"no answer could be read out of {unread} of {len(scores)} responses: the format is not what the scorer reads"


def _above(name: str, metrics: Sequence[str], limit: float, found: str, do: str) -> Check:
    """Make a check that the recent mean of each metric is at most `limit`; `found` is a text to be formatted with
    `metric` and `value`.
    """

    def check(rows: Rows, _: Any) -> Iterator[Symptom]:
        for metric in metrics:
            value = _last(rows, metric)
            if value is not None and value > limit:
                yield _lately(rows, name, found.format(metric=metric, value=value, number=number(value)), do, metric)

    return check


def _collapsed_entropy(rows: Rows, _: Any) -> Iterator[Symptom]:
    first, last = mean_of(rows[:WINDOW], "actor/entropy"), _last(rows, "actor/entropy")
    if first is not None and last is not None and last < 0.1 * first:
        do = "the policy repeats itself and groups lose their spread: raise clip_ratio_high, entropy_coeff or the temperature, lower lr"
        found = f"{number(first)} → {number(last)} nats a token"
        yield _lately(rows, "entropy has collapsed", found, do, "actor/entropy")


def _drifting_length(rows: Rows, _: Any) -> Iterator[Symptom]:
    first, last = mean_of(rows[:WINDOW], "response_length/mean"), _last(rows, "response_length/mean")
    cut = _cut(rows)
    if first and last is not None and (last > 2 * first or last < 0.5 * first):
        tail = f", {cut:.0%} cut off at the limit" if cut > 0.1 else ""
        do = "the reward may pay for length: dr_grpo's normalisation, dapo's overlong penalty, or look at the best rewards"
        found = f"{first:.0f} → {last:.0f} tokens{tail}"
        yield _lately(rows, "responses change their length", found, do, "response_length/mean")


def _more_cut_off(rows: Rows, _: Any) -> Iterator[Symptom]:
    first, last = mean_of(rows[:WINDOW], "response/cut_ratio"), _last(rows, "response/cut_ratio")
    if first is not None and last is not None and last > 0.3 and last - first > 0.2:
        do = "cut responses are scored without their end: raise max_tokens, or use dapo's overlong penalty"
        found = f"{first:.0%} → {last:.0%} of the responses"
        yield _lately(rows, "more and more responses are cut off", found, do, "response/cut_ratio")


def _idle_groups(rows: Rows, _: Any) -> Iterator[Symptom]:
    first, last = mean_of(rows[:WINDOW], "advantage/zero_share"), _last(rows, "advantage/zero_share")
    grown = len(rows) > 2 * WINDOW and first is not None and last is not None and last > 0.5 and last - first > 0.2
    if last is not None and (last > 0.7 or grown):
        before = f", {first:.0%} at first" if grown else ""
        do = "prompts are too easy or too hard: use recipes.dapo, which samples others, or raise group_size or the temperature"
        found = f"{last:.0%} of the rows have advantage 0{before}"
        yield _lately(rows, "most groups teach nothing", found, do, "advantage/zero_share")


def _diverging_critic(rows: Rows, _: Any) -> Iterator[Symptom]:
    """Find a critic that has become worse than a constant while its loss grew; at first it may be that bad."""
    explained, losses = running(rows, "critic/vf_explained_var"), running(rows, "critic/vf_loss")
    if len(rows) <= WINDOW or not explained or not losses:
        return
    if explained[-1] < 0 and max(explained) - explained[-1] > 0.3 and losses[-1] > 1.5 * min(losses):
        variance = f"explained variance {max(explained):.2f} → {explained[-1]:.2f}"
        found = f"{variance}, loss {number(min(losses))} → {number(losses[-1])}"
        do = "advantages become noise: lower the critic's lr, raise its warm-up (critic_warmup), clip its gradient"
        yield _lately(rows, "the critic diverges", found, do, "critic/vf_explained_var")


def _two_policies(rows: Rows, _: Any) -> Iterator[Symptom]:
    value = _last(rows, "training/rollout_probs_diff_mean")
    late = _last(rows, "training/policy_lag/max")
    if late and _last(rows, "rollout_corr/rollout_is_mean") is not None:
        return  # rows of older weights were asked for, and the loss corrects for them
    if value is not None and value > 0.02:
        do = "training is off-policy: check the push of weights and the precision, or add stages.RolloutCorrection"
        if late:
            do = "rows come from older weights (ahead, max_lag): use recipes.with_rollout_correction(pipeline, 'decoupled_token_is')"
        found = f"token probabilities differ by {number(value)} on average"
        yield _lately(rows, "sampler and trainer differ", found, do, "training/rollout_probs_diff_mean")


def _cancelled_rollouts(rows: Rows, _: Any) -> Iterator[Symptom]:
    lost, size = (mean_of(rows[-WINDOW:], f"streaming/{name}") for name in ("cancelled", "groups"))
    if lost and size and lost > 0.25 * size:
        do = "set stale='keep' to wait for late groups, or a larger max_lag to allow older ones"
        found = f"{number(lost)} of {number(size)} groups per step"
        yield _lately(rows, "a stream cancels many rollouts", found, do, "streaming/cancelled")


def _falling_reward(rows: Rows, _: Any) -> Iterator[Symptom]:
    values = series(rows, "critic/score/mean")
    if len(values) < 3 * WINDOW:
        return
    means = running(rows, "critic/score/mean")
    best, last = max(means), means[-1]
    spread = max(values) - min(values)
    if best - last > 0.3 * spread and best - last > 0.05:
        since = [int(row[STEP]) for row in rows if series([row], "critic/score/mean")][means.index(best)]
        do = "the policy may be too far from the reference, or lr too high: go back to a checkpoint, raise kl_coef, lower lr"
        found = f"running mean {best:.3f} → {last:.3f}"
        yield Symptom("reward has fallen", found, since, do, metric="critic/score/mean")


def _jumping_gradient(rows: Rows, _: Any) -> Iterator[Symptom]:
    norms = {step_of(row): value for row in rows for value in series([row], "actor/grad_norm")}
    usual = median(norms.values()) if norms else 0.0
    if steps := tuple(step for step, norm in norms.items() if usual and norm > 20 * usual):
        found = f"norm {number(norms[steps[0]])}, usually {number(usual)}, {_at(steps)}"
        do = "look at that step with run.stepper(step); lower grad_clip or lr"
        yield Symptom("the gradient jumps", found, steps[0], do, steps, "actor/grad_norm")


def _at(steps: Sequence[int]) -> str:
    return f"at step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[:5]))}"


_NUMBERS = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "critic/vf_loss")


def _not_finite(rows: Rows, _: Any) -> Iterator[Symptom]:
    """Find the steps in which a metric was NaN or infinite; such a value is stored as null in a run's rows."""
    every = {step_of(row): [name for name in _NUMBERS if name in row and row[name] is None] for row in rows}
    if steps := tuple(step for step, names in every.items() if names):
        found = f"{', '.join(every[steps[0]])} {_at(steps)}"
        do = "look at that step with run.stepper(step, at='update_actor') for a huge reward or an advantage that is NaN"
        yield Symptom("a metric is NaN or infinite", found, steps[0], do, steps, every[steps[0]][0])


CHECKS: tuple[Check, ...] = (
    _not_finite,
    _flat_reward,
    _two_policies,
    _falling_reward,
    _above(
        "KL to the reference is large",
        ("actor/kl_loss", "actor/reward_kl_penalty"),
        1.0,
        "{metric} {number} nats a token",
        "the policy is far from the reference: raise kl_coef, or lower lr",
    ),
    _collapsed_entropy,
    _cancelled_rollouts,
    _jumping_gradient,
    _idle_groups,
    _above(
        "much of the update is clipped",
        ("actor/pg_clipfrac",),
        0.3,
        "{value:.0%} of the tokens",
        "the policy moves too far in one step: lower lr or ppo_epochs, or enlarge the mini-batch",
    ),
    _drifting_length,
    _more_cut_off,
    _diverging_critic,
)


class Watch:
    """Follows a run's rows as they come: `look` returns the symptoms that begin with a row, `marks` all symptoms seen
    so far.

    Each check reads the first rows and the last `SEEN`. `rows` are the earlier rows of a resumed run. They are checked
    at up to `looks` evenly spaced rows and at the last one, so that symptoms that began there are not reported again.
    NaN and infinities must be None in rows (`folder.strict`).
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), looks: int = LOOKS) -> None:
        self._first: list[Mapping[str, Any]] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=SEEN)
        self._seen: dict[str, Symptom] = {}
        self._there: set[str] = set()
        rows = list(rows)
        every = -(-len(rows) // looks)
        for place, row in enumerate(rows, 1 - len(rows)):
            self.look(row, check=place % every == 0)

    def look(self, row: Mapping[str, Any], *, check: bool = True) -> list[Symptom]:
        """Add one row and return the symptoms that begin with it. A symptom of single steps (a gradient that jumps) is
        returned with the first row that shows it, and then only with the row of such a step."""
        if step_of(row) > 0:
            (self._first if len(self._first) < WINDOW else self._last).append(row)
        if not check:
            return []
        rows = [*self._first, *self._last]
        present = {
            symptom.name: symptom
            for symptom in symptoms(rows)
            if not symptom.steps or symptom.name not in self._seen or step_of(rows[-1]) in symptom.steps
        }
        begun = [symptom for name, symptom in present.items() if name not in self._there]
        for name, symptom in present.items():
            # a symptom of single steps names them; of the others the window moves on while they last
            self._seen[name] = symptom if symptom.steps else replace(symptom, since=self._seen.get(name, symptom).since)
        self._there = set(present)
        return begun

    @property
    def marks(self) -> list[Symptom]:
        """All symptoms seen so far, in order; `since` is the step where each was first seen. A symptom that has ended
        is marked "(gone by now)".
        """
        return [
            one if one.steps or name in self._there else replace(one, found=f"{one.found} (gone by now)")
            for name, one in self._seen.items()
        ]


def shown_by(rows: Rows, batch: Any = None) -> list[Symptom]:
    """List the symptoms in the last rows of a run, with `since` the step where each was first seen; `batch` as in
    `symptoms`.
    """
    since = {one.name: one.since for one in Watch(rows).marks}
    return [
        replace(one, since=since.get(one.name, one.since), course=blocks(series(rows, one.metric)))
        for one in symptoms(rows, batch)
    ]


class Symptoms(Shown, list[Symptom]):
    """A list of symptoms, displayed as a table."""
