"""Several rewards as one: weighted sums and gates of rules, models and sandboxes, every part its own column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from workbench.config import require
from workbench.errors import RewardError, message, unknown
from workbench.rewards.base import BaseReward
from workbench.rewards.routing import as_reward
from workbench.rewards.score import Score, Status


class Rubric(BaseReward):
    """`Rubric({"correct": gsm8k, "format": fmt}, weights={"format": 0.1}, gates={"safe": 0.5})`.

    The value is Σ weight · part over the parts that judged the row (weight 1 unless given), times nothing: a gate
    decides. Where a gate's part is below its threshold the value is `gated`, whatever the rest says; a gate without
    a weight adds nothing of its own. A part that does not apply to a row leaves the sum (`normalise=True` divides by
    the weights that are left); a part whose machinery failed, after its own policy, takes the row's judgement with
    it, for a sum without it would be another reward. Parts are judged side by side; what one part said about a row is in
    the extra `parts`, by name.

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

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        """What any part reads."""
        return tuple(dict.fromkeys(column for reward in self.parts.values() for column in reward.reads))

    @property
    def source(self) -> str:
        """The parts' sources, one after the other."""
        return "\n\n".join(f"# {part}\n{reward.source}" for part, reward in self.parts.items() if reward.source)

    def settings(self) -> dict[str, Any]:
        """Weights, gates, and each part's own."""
        return {
            **super().settings(),
            "weights": self.weights,
            "gates": self.gates,
            "gated": self.gated,
            "normalise": self.normalise,
            "parts": {part: reward.settings() for part, reward in self.parts.items()},
        }

    def check_signature(self, columns: Sequence[str]) -> None:
        """Every part's."""
        for reward in self.parts.values():
            reward.check_signature(columns)

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Every part's."""
        held = list(rows)
        for reward in self.parts.values():
            reward.check_rows(held)

    def close(self) -> None:
        """Every part's."""
        for reward in self.parts.values():
            reward.close()

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One record a row view; the parts run side by side."""
        threads = ThreadPoolExecutor(len(self.parts), thread_name_prefix="workbench-rubric")
        try:
            asked = {part: threads.submit(_settled, reward, rows) for part, reward in self.parts.items()}
            found = {part: future.result() for part, future in asked.items()}
        finally:
            threads.shutdown(wait=False)  # an interrupt does not wait for the slowest part
        return [self._joined({part: scores[row] for part, scores in found.items()}) for row in range(len(rows))]

    def _joined(self, scores: Mapping[str, Score]) -> Score:
        said = {part: _said(score) for part, score in scores.items()}
        columns = {part: score.value for part, score in scores.items() if score.scored}
        for part, score in scores.items():
            columns.update({f"{part}.{name}": value for name, value in score.parts.items() if name != part})
        shared: dict[str, Any] = {
            "parts": columns,
            "extra": {"parts": said},
            "answer": next((score.answer for score in scores.values() if score.answer is not None), None),
            "seconds": max(score.seconds for score in scores.values()),
        }
        broken = next((p for p, score in scores.items() if score.status is Status.MACHINERY_FAILED), None)
        if broken is not None:
            why = f"{broken}: {scores[broken].why}"
            return Score(status=Status.MACHINERY_FAILED, why=why, error=scores[broken].error, **shared)
        shut = [part for part, low in self.gates.items() if scores[part].scored and scores[part].value < low]
        if shut:
            return Score(value=self.gated, why=f"gated by {', '.join(shut)}: {scores[shut[0]].why}", **shared)
        judged = {part: score for part, score in scores.items() if score.scored and self.weights[part]}
        if not judged:
            return Score(status=Status.NOT_APPLICABLE, why="no part applies to this row", **shared)
        value = sum(self.weights[part] * score.value for part, score in judged.items())
        if self.normalise:
            total = sum(self.weights[part] for part in judged)
            if not total:
                raise RewardError(message("weights of a normalised rubric", expected="a sum ≠ 0", found=self.weights))
            value /= total
        failed = all(score.status is Status.MODEL_FAILED for score in judged.values())
        why = "; ".join(f"{part} {score.value:g}: {score.why}" for part, score in judged.items())
        return Score(value=value, why=why, status=Status.MODEL_FAILED if failed else Status.SCORED, **shared)

    def __repr__(self) -> str:
        from workbench.views.judgements import rubric_text

        return rubric_text(self)

    def _repr_html_(self) -> str:
        from workbench.views.judgements import rubric_html

        return rubric_html(self)


def _settled(reward: BaseReward, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
    """A part's policy holds for it; that it failed on all rows is the rubric's affair."""
    scores = reward.judge(rows)
    return reward.settle(scores) if reward.policy.raises or reward.policy.value is not None else scores


def _said(score: Score) -> dict[str, Any]:
    return {
        "value": score.value,
        "status": score.status.value,
        "answer": score.answer,
        "why": score.why,
        **({"extra": dict(score.extra)} if score.extra else {}),
    }
