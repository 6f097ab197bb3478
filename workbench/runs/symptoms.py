"""What a run's numbers say is wrong, and what people do about it: a short list, from its metrics and its last trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from workbench.runs.folder import STEP

Rows = Sequence[Mapping[str, Any]]
WINDOW = 5
"""Steps that a check looks at: the last ones, beside the first ones."""
LOOKS = 5000
"""Looks at the rows that there are: every one of them in most runs, in less than half a second."""
SEEN = 64
"""Rows that are looked at after every step, beside the first ones: what a look costs does not grow with the run."""


@dataclass(frozen=True)
class Symptom:
    """One thing that looks wrong."""

    name: str
    found: str
    """The numbers."""
    since: int
    """The first step of the window that it was seen in."""
    do: str
    """What is usually behind it, and what to try."""
    steps: tuple[int, ...] = ()
    """The very steps that have it; empty where it is of a stretch of steps."""

    def __str__(self) -> str:
        return f"{self.name} (step {self.since} on): {self.found}; {self.do}"


def symptoms(rows: Rows, batch: Any = None) -> list[Symptom]:
    """Checks over metrics rows (`run.rows`), the gravest first; `batch` is the last recorded one, for causes.

    Nothing is said of fewer than three steps, nor of metrics that a run does not have.
    """
    steps = [row for row in rows if row[STEP] > 0]
    if len(steps) < 3:
        return []
    return [found for check in CHECKS for found in check(steps, batch)]


def _series(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _last(rows: Rows, name: str) -> float | None:
    values = _series(rows[-WINDOW:], name)
    return fmean(values) if values else None


def _first(rows: Rows, name: str) -> float | None:
    values = _series(rows[:WINDOW], name)
    return fmean(values) if values else None


def _since(rows: Rows) -> int:
    return int(rows[-WINDOW:][0][STEP])


def _flat_reward(rows: Rows, batch: Any) -> Iterator[Symptom]:
    values = _series(rows[-WINDOW:], "critic/score/max")
    if len(values) < 3 or any(value > 0 for value in values):
        return
    causes = []
    if (_last(rows, "response_length/clip_ratio") or 0) > 0.8:
        causes.append("nearly all responses are cut off: raise max_tokens")
    if (_last(rows, "reward/scored_ratio") or 1) < 0.5:
        causes.append("most rows have no judgement: the reward function fails, see the traceback in views.samples")
    if batch is not None:
        causes += _causes(batch)
    do = "; ".join(causes) or "look at views.samples(…): is the function wrong, the ground truth, or the format?"
    yield Symptom("reward is flat at 0", f"no reward above 0 in {len(values)} steps", _since(rows), do)


def _causes(batch: Any) -> Iterator[str]:
    """What the last batch itself tells."""
    judged = list(batch["reward_model"]) if "reward_model" in batch else []
    without = sum(1 for one in judged if not (one or {}).get("ground_truth"))
    if without:
        yield f"{without} of {len(judged)} rows have no ground truth"
    scores = list(batch["score"]) if "score" in batch else []
    unread = sum(1 for score in scores if getattr(score, "answer", None) is None and score.scored)
    if scores and unread > len(scores) / 2:
        yield f"no answer could be read out of {unread} of {len(scores)} responses: the format is not what the scorer reads"


def _dull_groups(rows: Rows, _: Any) -> Iterator[Symptom]:
    shares = _series(rows[-WINDOW:], "advantage/zero_share")
    if shares and fmean(shares) > 0.7:
        yield Symptom(
            "most groups teach nothing",
            f"{fmean(shares):.0%} of the rows have advantage 0",
            _since(rows),
            "prompts are too easy or too hard: recipes.dapo draws others, or raise group_size or the temperature",
        )


def _far_from_reference(rows: Rows, _: Any) -> Iterator[Symptom]:
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        value = _last(rows, name)
        if value is not None and value > 1.0:
            yield Symptom(
                "KL to the reference is large",
                f"{name} {value:.3g} nats a token",
                _since(rows),
                "outputs may get strange: raise kl_coef, or lower lr",
            )


def _collapsed_entropy(rows: Rows, _: Any) -> Iterator[Symptom]:
    first, last = _first(rows, "actor/entropy"), _last(rows, "actor/entropy")
    if first is not None and last is not None and last < 0.1 * first:
        yield Symptom(
            "entropy has collapsed",
            f"{first:.3g} → {last:.3g} nats a token",
            _since(rows),
            "the policy repeats itself and groups lose their spread: raise clip_high, entropy_coeff or the temperature, lower lr",
        )


def _clipped(rows: Rows, _: Any) -> Iterator[Symptom]:
    value = _last(rows, "actor/pg_clipfrac")
    if value is not None and value > 0.3:
        yield Symptom(
            "much of the update is clipped",
            f"{value:.0%} of the tokens",
            _since(rows),
            "the policy moves too far in one step: lower lr or ppo_epochs, or enlarge the mini-batch",
        )


def _drifting_length(rows: Rows, _: Any) -> Iterator[Symptom]:
    first, last = _first(rows, "response_length/mean"), _last(rows, "response_length/mean")
    cut = _last(rows, "response_length/clip_ratio") or 0.0
    if first and last is not None and (last > 2 * first or last < 0.5 * first):
        tail = f", {cut:.0%} cut off at the limit" if cut > 0.1 else ""
        yield Symptom(
            "responses change their length",
            f"{first:.0f} → {last:.0f} tokens{tail}",
            _since(rows),
            "the reward may pay for length: dr_grpo's normalisation, dapo's overlong penalty, or look at the best rewards",
        )


def _two_policies(rows: Rows, _: Any) -> Iterator[Symptom]:
    value = _last(rows, "training/rollout_probs_diff_mean")
    late = _last(rows, "training/policy_lag/max")
    if late and _last(rows, "rollout_corr/rollout_is_mean") is not None:
        return  # rows of older weights, as they were asked for, and the loss knows it
    if value is not None and value > 0.02:
        yield Symptom(
            "sampler and trainer differ",
            f"probabilities are {value:.3g} apart on average",
            _since(rows),
            "rows are of older weights (ahead=1): take recipes.corrected(pipeline)"
            if late
            else "training is off-policy: check weights' sync and precision, or add stages.RolloutCorrection",
        )


def _falling_reward(rows: Rows, _: Any) -> Iterator[Symptom]:
    values = _series(rows, "critic/score/mean")
    if len(values) < 3 * WINDOW:
        return
    means = [fmean(values[start : start + WINDOW]) for start in range(len(values) - WINDOW + 1)]
    best, last = max(means), means[-1]
    spread = max(values) - min(values)
    if best - last > 0.3 * spread and best - last > 0.05:
        yield Symptom(
            "reward has fallen",
            f"running mean {best:.3f} → {last:.3f}",
            int(rows[means.index(best)][STEP]),
            "KL too far from the start, or lr too high: go back to a checkpoint, raise kl_coef, lower lr",
        )


def _jumping_gradient(rows: Rows, _: Any) -> Iterator[Symptom]:
    values = _series(rows, "actor/grad_norm")
    usual = median(values) if values else 0.0
    jumps = [
        row for row in rows if row.get("actor/grad_norm") is not None and usual and row["actor/grad_norm"] > 20 * usual
    ]
    if jumps:
        steps = tuple(int(row[STEP]) for row in jumps)
        yield Symptom(
            "the gradient jumps",
            f"norm {jumps[0]['actor/grad_norm']:.3g}, usually {usual:.3g}, at steps {list(steps)[:5]}",
            steps[0],
            "look at that step: run.stepper(step); lower grad_clip or lr",
            steps,
        )


_NUMBERS = ("critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "critic/vf_loss")


def _no_numbers(rows: Rows, _: Any) -> Iterator[Symptom]:
    """NaN and infinities stand as null in a run's rows."""
    bad = [(int(row[STEP]), [name for name in _NUMBERS if name in row and row[name] is None]) for row in rows]
    bad = [(step, names) for step, names in bad if names]
    if bad:
        steps = tuple(step for step, _ in bad)
        yield Symptom(
            "a metric is no number",
            f"{', '.join(bad[0][1])} at steps {list(steps)[:5]}",
            steps[0],
            "look at that step: run.stepper(step, at='update_actor'); is a reward huge, or an advantage NaN?",
            steps,
        )


CHECKS: tuple[Callable[[Rows, Any], Iterator[Symptom]], ...] = (
    _no_numbers,
    _flat_reward,
    _two_policies,
    _falling_reward,
    _far_from_reference,
    _collapsed_entropy,
    _jumping_gradient,
    _dull_groups,
    _clipped,
    _drifting_length,
)


class Watch:
    """Follows a run's rows: which symptoms begin with a row, and all that it has shown. Each look reads a few rows: the
    first ones and the last `SEEN`.

    `rows` are those that there are already, looked at up to `looks` times, evenly and at the last one: a resumed run says
    nothing again that had begun in them. NaN and infinities must be None in rows (`folder.strict`).
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = (), looks: int = LOOKS) -> None:
        self._first: list[Mapping[str, Any]] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=SEEN)
        self._seen: dict[str, Symptom] = {}
        self._there: set[str] = set()
        rows = list(rows)
        looks = min(looks, len(rows))
        places = {len(rows) * number // looks for number in range(1, looks + 1)}
        for number, row in enumerate(rows, 1):
            self._take(row)
            if number in places:
                self._update()

    def _take(self, row: Mapping[str, Any]) -> None:
        if row[STEP] > 0:
            (self._first if len(self._first) < WINDOW else self._last).append(row)

    def _update(self) -> list[Symptom]:
        """Look at the window; what was not there at the last look. Of what single steps have, those of the last step."""
        rows = [*self._first, *self._last]
        found = {one.name: one for one in symptoms(rows) if not one.steps or rows[-1][STEP] in one.steps}
        begun = [one for name, one in found.items() if name not in self._there]
        for name, one in found.items():
            # what single steps have says itself which; of the rest the window moves on while they last
            self._seen[name] = one if one.steps else replace(one, since=self._seen.get(name, one).since)
        self._there = set(found)
        return begun

    def look(self, row: Mapping[str, Any]) -> list[Symptom]:
        """Symptoms that this row has and the one before did not."""
        self._take(row)
        return self._update()

    @property
    def marks(self) -> list[Symptom]:
        """All that were seen, each from where it was first seen, in that order; of one that has gone it is said, with its
        last numbers."""
        return [
            one if one.steps or name in self._there else replace(one, found=f"{one.found} (gone by now)")
            for name, one in self._seen.items()
        ]


def shown_by(rows: Rows, batch: Any = None) -> list[Symptom]:
    """The symptoms that the rows have at their end, each since it was first seen; `batch` is the last recorded one."""
    since = {one.name: one.since for one in Watch(rows).marks}
    return [replace(one, since=since.get(one.name, one.since)) for one in symptoms(rows, batch)]


class Symptoms(list[Symptom]):
    """A list of symptoms, with a face."""

    def __repr__(self) -> str:
        from workbench.views.html import terminal

        return terminal(f"· {one}" for one in self) if self else "no symptoms"

    def _repr_html_(self) -> str:
        from workbench.views.html import escape, table

        if not self:
            return "<div>no symptoms</div>"
        cells = [[f"<b>{escape(one.name)}</b>", str(one.since), escape(one.found), escape(one.do)] for one in self]
        return table(("symptom", "since step", "found", "what people do"), cells)
