"""Verdicts of a judge on samples whose truth is known: the questions, their order and seeds, and the cost in calls,
tokens and seconds.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.base import progress, runtime
from workbench.base.errors import SettingError
from workbench.datasets.preferences import Sample, Samples
from workbench.rewards.base import BaseReward, row_view
from workbench.rewards.judge import Judge, PairwiseJudge, RewardModel, scale_of
from workbench.rewards.score import Score, Status

if TYPE_CHECKING:
    from workbench.engines.protocol import Completion


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question to a judge: a single answer with its true grade, or several answers with the numbers of the best."""

    id: str
    category: str
    prompt: str
    answers: tuple[str, ...]
    best: frozenset[int] = frozenset()
    """Numbers of the best answers; all of them: a tie."""
    grade: float = math.nan
    """The true grade of the one answer; NaN of several."""
    rows: tuple[Mapping[str, Any], ...] = field(repr=False)
    """A row for each answer, as rewards read them."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each answer, in characters."""
        return tuple(map(len, self.answers))


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One verdict of a judge on one item, in one order of the answers and under one seed."""

    item: int
    """The item's number."""
    order: tuple[int, ...]
    """Numbers of the answers in the order in which the judge read them; for a judge of single answers, the item's
    order."""
    seed: int
    verdict: Any
    """A grade; or the answers, by number, that won (all: a tie). None: no verdict."""
    status: str
    why: str = ""
    values: tuple[float | None, ...] = ()
    """The numbers that a judge of single answers gave them."""
    confidence: float = math.nan
    """Probability of the verdict, in [0, 1], where the judge states it or the reward model's margin gives it."""
    output: str = ""
    tokens: int = 0
    """Tokens that the judge wrote (of a reward model: read)."""
    seconds: float = 0.0
    cut: bool = False
    """Whether the prompt or an answer was cut before the judge read it."""


@dataclass(frozen=True)
class Cost:
    """The model calls, tokens and seconds that a judge's verdicts took."""

    calls: int = 0
    """Model calls, including repeated ones."""
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Wall time of all verdicts."""


# --- items ----------------------------------------------------------------------------------------


def items_of(samples: Samples, kind: str, label: str, whole: bool) -> list[Item]:
    """Make items of the samples whose truth is known.

    `kind` is `pairs` (two answers), `choices` (the best of several answers) or `grades` (one answer with a grade under
    `label`). With `whole` the question is the whole conversation, as a chat judge reads it; else its last message.
    """
    if kind == "pairs":
        return [
            _item(sample, range(2), whole, best=frozenset(sample.best or ())) for sample in samples.pairs(label or None)
        ]
    if kind == "choices":
        there = (sample for sample in samples if sample.best and len(set(sample.best)) < len(sample.answers))
        return [_item(sample, range(len(sample.answers)), whole, best=frozenset(sample.best or ())) for sample in there]
    graded = ((sample, at, answer.scores.get(label)) for sample in samples for at, answer in enumerate(sample.answers))
    return [_item(sample, [at], whole, grade=float(grade)) for sample, at, grade in graded if grade is not None]


def _item(sample: Sample, answers: Sequence[int], whole: bool, **truth: Any) -> Item:
    texts, facts = tuple(sample.answers[number].text for number in answers), dict(sample.metadata)
    columns = {
        "raw_prompt": [dict(turn) for turn in sample.prompt],
        "reward_model": {"ground_truth": facts.get("ground_truth")},
        "data_source": sample.source,
        "extra_info": facts,
        "uid": sample.id,
    }
    prompt = {"prompt_text": sample.question} if whole else {}
    rows = tuple({**row_view({**columns, "response_text": text}, text, ()), **prompt} for text in texts)
    return Item(id=sample.id, category=sample.category, prompt=sample.question, answers=texts, rows=rows, **truth)


# --- asking ---------------------------------------------------------------------------------------


class Metered:
    """Wraps a judge's engine: counts calls and tokens, and adds `shift` to the seed of each call."""

    def __init__(self, model: Any, shift: int = 0) -> None:
        self.model, self.shift = model, shift
        self.calls = self.prompt_tokens = self.tokens = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    async def complete(self, messages: Any, *, seed: int, **sampling: Any) -> Completion:
        """Complete messages with the wrapped chat model, and count the call and its tokens."""
        self.calls += 1
        answer: Completion = await self.model.complete(messages, seed=seed + self.shift, **sampling)
        self.prompt_tokens += answer.prompt_tokens
        self.tokens += answer.tokens
        return answer

    async def classify(self, text: str) -> Any:
        """Classify a text with the wrapped classifier, and count the call and its tokens."""
        self.calls += 1
        answer = await self.model.classify(text)
        self.prompt_tokens += answer.tokens
        return answer


def ask(
    reward: BaseReward, items: Sequence[Item], seeds: Sequence[int], orders: bool, label: str
) -> tuple[list[Vote], Cost]:
    """Collect a judge's verdicts on all items under each seed; returns (verdicts, their cost)."""
    began, answers, meters = time.perf_counter(), list[Vote](), list[Metered]()
    each = len(items) * (1 + orders) if isinstance(reward, PairwiseJudge) else sum(len(item.rows) for item in items)
    progress.present().expect(len(seeds) * each)
    for seed in seeds:
        judge, meter = seeded(reward, seed)
        meters.append(meter)
        if isinstance(judge, PairwiseJudge):
            answers += compared(judge, items, seed, orders)
        else:
            answers += scored(judge, items, seed, label)
    totals = {name: sum(getattr(one, name) for one in meters) for name in ("calls", "prompt_tokens", "tokens")}
    return answers, Cost(**totals, seconds=time.perf_counter() - began)


def seeded(reward: BaseReward, seed: int) -> tuple[Any, Metered]:
    """Copy a judge so that its engine is metered and its calls use seeds of their own; returns (copy, meter).

    A reward without an engine is returned itself, with a meter that stays at 0.
    """
    name = "model" if isinstance(reward, Judge) else "classifier" if isinstance(reward, RewardModel) else ""
    if not name:
        return reward, Metered(None)
    # an attempt has a seed of its own, too: attempts of two seeds never share one
    shift = seed * reward.asking.attempts if isinstance(reward, Judge) else 0
    meter, copied = Metered(getattr(reward, name), shift), copy.copy(reward)
    setattr(copied, name, meter)
    return copied, meter


def compared(judge: PairwiseJudge, items: Sequence[Item], seed: int, orders: bool) -> list[Vote]:
    """Ask a pairwise judge about pairs: in both orders, or, without `orders`, in one that is drawn, as data list the
    better answer first."""
    questions = []
    for number, item in enumerate(items):
        both = [(0, 1), (1, 0)]
        drawn = random.Random(f"{item.id}/{item.answers}").choice(both)
        questions += [(number, order) for order in (both if orders else [drawn])]
    pairs = [[items[number].rows[place] for place in order] for number, order in questions]
    scores = runtime.run_all(lambda rows: judge.compare(*rows), pairs)
    answers = []
    for (number, order), score in zip(questions, scores, strict=True):
        won = {1.0: order[:1], 0.0: order[1:], 0.5: (0, 1)}.get(score.value) if score.scored else None
        answers.append(_reply(number, order, seed, frozenset(won) if won else None, [score], confidence=_stated(score)))
    return answers


def scored(reward: BaseReward, items: Sequence[Item], seed: int, label: str) -> list[Vote]:
    """Score all answers of the items with a reward; of an item's answers the ones with the highest score win."""
    rows = [row for item in items for row in item.rows]
    scores = iter(reward.judged(rows))
    answers = []
    for number, item in enumerate(items):
        mine = list(itertools.islice(scores, len(item.rows)))
        values = tuple(score.value if _has_verdict(score) else None for score in mine)
        known: list[float] = [value for value in values if value is not None]
        verdict: Any = None
        confidence = math.nan
        if len(known) == len(values) and label:
            verdict, confidence = _grade(mine[0], label), _stated(mine[0])
        elif len(known) == len(values):
            verdict = frozenset(place for place, value in enumerate(known) if value == max(known))
            if isinstance(reward, RewardModel):  # Bradley–Terry: of two answers the margin's sigmoid
                confidence = 1 / sum(math.exp(value - max(known)) for value in known)
        order = tuple(range(len(item.rows)))
        answers.append(_reply(number, order, seed, verdict, mine, values=values, confidence=confidence))
    return answers


def _has_verdict(score: Score) -> bool:
    return score.scored and score.status is not Status.COUNTED and not score.status.failed_by_model


def _reply(item: int, order: tuple[int, ...], seed: int, verdict: Any, scores: Sequence[Score], **further: Any) -> Vote:
    lost = next((score for score in scores if not _has_verdict(score)), None)
    shown, extras = lost or scores[0], [score.extra for score in scores]
    output = "\n\n".join(str(extra["judge_output"]) for extra in extras if extra.get("judge_output"))
    tokens = sum(int(extra.get("judge_tokens") or extra.get("rm_tokens") or 0) for extra in extras)
    facts: dict[str, Any] = {"output": output, "tokens": tokens, "cut": any(one.get("truncated") for one in extras)}
    facts |= {"status": shown.status.value, "why": shown.why, "seconds": sum(score.seconds for score in scores)}
    return Vote(item=item, order=order, seed=seed, verdict=verdict, **facts, **further)


def _fields(score: Score) -> Mapping[str, Any]:
    verdict = score.extra.get("verdict")
    return verdict if isinstance(verdict, Mapping) else {}


def _grade(score: Score, label: str) -> float:
    """Return the grade in a verdict: the number in its field `label`, else in `score`, else the score's value."""
    fields = _fields(score)
    grade = fields.get(label, fields.get("score"))
    return float(grade) if isinstance(grade, int | float) else score.value


def _stated(score: Score) -> float:
    values = map(_fields(score).get, ("confidence", "probability"))
    confidence = next((value for value in values if value is not None), None)
    return float(confidence) if isinstance(confidence, int | float) and 0 <= confidence <= 1 else math.nan


def bounds(reward: BaseReward) -> tuple[float, float] | None:
    """Return the bounds of the field `score` in a judge's schema, which tell its unit; None where it has none."""
    schema = getattr(reward, "schema", None)
    try:
        return scale_of(schema) if schema is not None and "score" in schema.model_fields else None
    except SettingError:
        return None
