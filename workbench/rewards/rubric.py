"""Several rewards as one, each part a column of its own: `Rubric` by weighted sum and gates, `Ensemble` by mean or worst case."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from workbench.base.config import require
from workbench.base.errors import RewardError, unknown
from workbench.base.shown import Shown
from workbench.rewards.base import BaseReward
from workbench.rewards.reward import as_reward
from workbench.rewards.score import Score, Status, failed


class Rubric(BaseReward, Shown):
    """Several rewards as one: `Rubric({"correct": gsm8k, "safe": safe}, weights={"correct": 2.0}, gates={"safe": 0.5})`.

    The value is Σ weight · part over the parts that scored the row (weight 1 unless given); `normalise=True` divides it by
    the sum of their weights. Where a part is below its threshold in `gates` the value is `gated` instead; a part with a
    gate has weight 0 unless given. A part that is *not_applicable* is left out of the sum; a part that is *infra_error*
    after its own policy makes the row *infra_error*, because a sum without it would be another reward. Parts run
    concurrently; the score's extra `parts` has each part's score by name.

    Parts are whatever `as_reward` takes: functions, files, `Reward`, `Judge`, `RewardModel`, `code(sandbox)`, rubrics.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
        gates: Mapping[str, float] | None = None,
        gated: float = 0.0,
        normalise: bool = False,
        on_failure: str = "mask",
        name: str = "rubric",
    ) -> None:
        require(bool(parts), "parts", expected="at least one reward", found=dict(parts))
        super().__init__(name, on_failure)
        for label, given in (("weights", weights or {}), ("gates", gates or {})):
            for part in given:
                if part not in parts:
                    raise RewardError(f"{label}: " + unknown("part of this rubric", part, parts))
        self.parts = {part: as_reward(reward) for part, reward in parts.items()}
        self.gates = dict(gates or {})
        self.weights = {part: float((weights or {}).get(part, 0.0 if part in self.gates else 1.0)) for part in parts}
        self.gated = gated
        self.normalise = normalise
        self.streams = all(reward.streams for reward in self.parts.values())
        self.reads = tuple(dict.fromkeys(column for reward in self.parts.values() for column in reward.reads))

    @property
    def source(self) -> str:
        """The `source` of every part, one after the other."""
        return "\n\n".join(f"# {part}\n{reward.source}" for part, reward in self.parts.items() if reward.source)

    @property
    def binding(self) -> Mapping[str, str]:
        """The parts' bindings, each argument under `part.argument`."""
        each = self.parts.items()
        return {f"{part}.{name}": said for part, reward in each for name, said in reward.binding.items()}

    def settings(self) -> dict[str, Any]:
        """The rubric's settings as plain values: policy, weights, gates, and the settings of each part."""
        own = {name: getattr(self, name) for name in ("weights", "gates", "gated", "normalise")}
        parts = {part: reward.settings() for part, reward in self.parts.items()}
        return {**super().settings(), **own, "parts": parts}

    def check_signature(self, columns: Sequence[str]) -> None:
        """Raise `RewardError`, before anything is scored, if a part needs a column that `columns` (names) lack."""
        for reward in self.parts.values():
            reward.check_signature(columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Raise `DataError` if a part can score none of these rows; else what each says of them."""
        held = list(rows)
        notes = {part: reward.check_rows(held) for part, reward in self.parts.items()}
        return "; ".join(f"{part}: {note}" for part, note in notes.items() if note)

    def check_sampler(self, tokenizer: Any, switches: Mapping[str, Any]) -> None:
        """As each part checks it."""
        for reward in self.parts.values():
            reward.check_sampler(tokenizer, switches)

    def close(self) -> None:
        """End the worker processes and connections of every part."""
        for reward in self.parts.values():
            reward.close()

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One `Score` for each row, in order; the parts run concurrently."""
        threads = ThreadPoolExecutor(len(self.parts), thread_name_prefix="workbench-rubric")
        try:
            asked = {part: threads.submit(_settled, reward, rows) for part, reward in self.parts.items()}
            settled = {part: future.result() for part, future in asked.items()}
        finally:
            threads.shutdown(wait=False)  # an interrupt does not wait for the slowest part
        return [self._joined({part: scores[row] for part, scores in settled.items()}) for row in range(len(rows))]

    def _joined(self, scores: Mapping[str, Score]) -> Score:
        columns = {part: score.value for part, score in scores.items() if score.scored}
        for part, score in scores.items():
            columns.update({f"{part}.{name}": value for name, value in score.parts.items() if name != part})
        return replace(
            self._judged(scores),
            parts=columns,
            extra={"parts": {part: _summary(score) for part, score in scores.items()}},
            answer=next((score.answer for score in scores.values() if score.answer is not None), None),
            seconds=max(score.seconds for score in scores.values()),
        )

    def _divisor(self, parts: Iterable[str]) -> float:
        """The sum of the weights of the parts that judged a row, where the rubric is normalised; else 1."""
        total = sum(self.weights[part] for part in parts) if self.normalise else 1.0
        if not total:
            raise RewardError("weights of a normalised rubric", expected="a sum ≠ 0 in each row", found=self.weights)
        return total

    def _judged(self, scores: Mapping[str, Score]) -> Score:
        """Value, status and why of the parts' records together."""
        lost = [part for part, score in scores.items() if score.status is Status.INFRA_ERROR]
        if lost:
            broken = next((part for part in lost if scores[part].undecided), lost[0])
            return failed(f"{broken}: {scores[broken].why}", scores[broken].error)
        shut = [part for part, low in self.gates.items() if scores[part].scored and scores[part].value < low]
        if shut:
            return Score(value=self.gated, why=f"gated by {', '.join(shut)}: {scores[shut[0]].why}")
        judged = {part: score for part, score in scores.items() if score.scored and self.weights[part]}
        if not judged:
            return Score(status=Status.NOT_APPLICABLE, why="no part applies to this row")
        value = sum(self.weights[part] * score.value for part, score in judged.items()) / self._divisor(judged)
        statuses = {score.status for score in judged.values()}
        why = "; ".join(f"{part} {score.value:g}: {score.why}" for part, score in judged.items())
        return Score(value=value, why=why, status=statuses.pop() if len(statuses) == 1 else _joint(statuses))


COMBINED = ("mean", "worst", "uncertainty")
"""Ways in which an `Ensemble` makes one value of its members'."""


class Ensemble(Rubric):
    """Several reward models as one: `Ensemble([RewardModel(a), RewardModel(b), RewardModel(c)], combine="worst")`.

    The value of a row is the `mean` of its members' values, their minimum (`worst`), or with `uncertainty` the mean less
    `coef` times their variance: a policy that climbs one member's error is held by the others (Coste et al. 2023,
    https://arxiv.org/abs/2310.02743). The part `disagreement` is the members' standard deviation (over all of them), the other
    parts are their values by name; for the rest it is a `Rubric`. Members have one scale where they were trained alike.

    Args:
        members: whatever `as_reward` takes, two or more; a mapping names them, else they are `member_1`, `member_2`, …
        combine: `mean`, `worst` or `uncertainty`.
        coef: weight of the variance; with `uncertainty` alone.
    """

    def __init__(
        self,
        members: Mapping[str, Any] | Sequence[Any],
        *,
        combine: str = "mean",
        coef: float = 1.0,
        on_failure: str = "mask",
        name: str = "ensemble",
    ) -> None:
        named = members if isinstance(members, Mapping) else {f"member_{n}": one for n, one in enumerate(members, 1)}
        require(len(named) > 1, "members of an ensemble", expected="two or more", found=len(named))
        require(combine in COMBINED, "combine", expected=f"one of {', '.join(COMBINED)}", found=combine)
        require(coef >= 0, "coef", expected="≥ 0", found=coef)
        super().__init__(named, normalise=True, on_failure=on_failure, name=name)
        self.combine = combine
        self.coef = coef

    def settings(self) -> dict[str, Any]:
        """The ensemble's settings as plain values: policy, how values are combined, and the settings of each member."""
        given = super().settings()
        own = {"combine": self.combine, **({"coef": self.coef} if self.combine == "uncertainty" else {})}
        return {"on_failure": given["on_failure"], **own, "parts": given["parts"]}

    def _joined(self, scores: Mapping[str, Score]) -> Score:
        joined = super()._joined(scores)
        values = [score.value for score in scores.values() if score.scored]
        if not (joined.scored and values):
            return joined
        spread = pstdev(values)
        value = {"mean": fmean(values), "worst": min(values), "uncertainty": fmean(values) - self.coef * spread**2}
        return replace(joined, value=value[self.combine], parts={**joined.parts, "disagreement": spread})


def _settled(reward: BaseReward, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
    """A part's scores after its own policy; that it failed on all rows is left to the rubric's policy."""
    scores = reward.tried(rows)
    return reward.settle(scores) if reward.on_failure == "raise" or reward.failed_value is not None else scores


def _summary(score: Score) -> dict[str, Any]:
    facts = score.to_json()
    shown = {name: facts[name] for name in ("value", "status", "answer", "why")}
    return {**shown, "extra": facts["extra"]} if score.extra else shown


def _joint(statuses: Collection[Status]) -> Status:
    """Of parts that do not agree: counted where a part is, no answer where the response failed in all of them."""
    if Status.COUNTED in statuses:
        return Status.COUNTED
    return Status.NO_ANSWER if all(one.failed_by_model for one in statuses) else Status.SCORED
