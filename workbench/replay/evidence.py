"""What a diagnosis reads of a run: its metrics, symptoms and settings, the audit of a step, the last recorded samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from workbench.datasets.records import truth_of
from workbench.functional import masked_mean
from workbench.replay.audit import Audit
from workbench.rewards.score import Score
from workbench.runs.folder import STEP
from workbench.runs.symptoms import WINDOW, Rows, Symptom

TRACES, SAMPLES = 3, 1024
"""The last recorded steps that are read, and how many rows of each."""
AUDITED = 2048
"""The most rows of a step that is audited: the slow formulas take their time."""
ENOUGH = 8
"""Samples below which they show nothing."""


class Row(NamedTuple):
    """What is read of one sample. A reward of None: the row was not scored."""

    step: int
    group: str
    """The step and the prompt's uid."""
    prompt: str
    """The texts of all its messages."""
    text: str
    truth: Any
    reward: float | None
    tokens: int
    advantage: float | None
    status: str
    why: str


@dataclass(frozen=True)
class Evidence:
    """All that the causes read of a run."""

    rows: Rows
    """The metrics of the training steps."""
    held: Rows = ()
    """The rows that have a validation, that before training included."""
    samples: Sequence[Row] = ()
    symptoms: Sequence[Symptom] = ()
    audit: Audit | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def first(self, name: str) -> float | None:
        """The metric's mean over the first steps; None where it is not recorded."""
        return _mean(self.rows[:WINDOW], name)

    def last(self, name: str) -> float | None:
        """The metric's mean over the last steps; None where it is not recorded."""
        return _mean(self.rows[-WINDOW:], name)

    @property
    def step(self) -> int:
        """The last recorded step; 0 where none is."""
        return self.samples[-1].step if self.samples else 0

    @property
    def scored(self) -> list[Row]:
        """The samples that have a reward; none where they are too few to show anything."""
        found = [row for row in self.samples if row.reward is not None]
        return found if len(found) >= ENOUGH else []

    def groups(self) -> list[list[Row]]:
        """The scored samples by prompt and step, where a prompt has three or more."""
        found: dict[str, list[Row]] = {}
        for row in self.scored:
            found.setdefault(row.group, []).append(row)
        return [rows for rows in found.values() if len(rows) > 2]

    def look(self, order: str = "worst") -> str:
        """The line of code that shows the samples of the last recorded step."""
        return f'wb.views.samples(run.traces[{self.step}], order="{order}")' if self.samples else "run.curves()"


def _mean(rows: Rows, name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return fmean(values) if values else None


def gathered(rows: Rows, batches: Mapping[int, Any], **found: Any) -> Evidence:
    """The evidence in metrics rows and recorded batches by step, of which `SAMPLES` rows are read; `found` is the rest."""
    samples = [row for step, batch in sorted(batches.items()) for row in _samples(step, batch[:SAMPLES])]
    training = [row for row in rows if row[STEP] > 0]
    return Evidence(training, [row for row in rows if row.get("val/reward") is not None], samples, **found)


_READ = ("uid", "response_text", "score", "scored", "reward", "reward_model", "extra_info", "raw_prompt")
"""The columns of a batch that a `Row` is made of, besides its tokens' advantages."""


def _samples(step: int, batch: Any) -> list[Row]:
    nothing, found = [None] * len(batch), []
    columns = [batch[name].tolist() if name in batch else nothing for name in _READ]
    lengths, advantages = _of_tokens(batch)
    for row, (uid, text, score, scored, reward, judged, extra, chat) in enumerate(zip(*columns, strict=True)):
        truth = truth_of({"reward_model": judged, "extra_info": extra if isinstance(extra, Mapping) else None})
        value = None if scored is False or reward is None else float(reward)
        status, why = (score.status.value, score.why) if isinstance(score, Score) else ("", "")
        numbers = lengths[row], advantages[row]
        found.append(
            Row(step, f"{step} {uid}", _said(chat), str(text or ""), truth, value, *numbers, status, why or "")
        )
    return found


def _of_tokens(batch: Any) -> tuple[list[int], list[float | None]]:
    """Each row's length in tokens, and the mean of its advantages."""
    lengths: list[int] = [0] * len(batch)
    means: list[float | None] = [None] * len(batch)
    if "response_mask" in batch:
        lengths = batch["response_mask"].sum(-1).tolist()
        if "advantages" in batch:
            means = masked_mean(batch["advantages"].float(), batch["response_mask"], -1).tolist()
    return lengths, means


def _said(chat: Any) -> str:
    """All texts of a chat; other prompts as text."""
    if not isinstance(chat, list):
        return "" if chat is None else str(chat)
    return "\n".join(str(turn.get("content", "")) if isinstance(turn, Mapping) else str(turn) for turn in chat)
