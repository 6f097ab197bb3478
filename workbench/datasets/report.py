"""`Report`: the check of a data set before a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.base.errors import DataError
from workbench.base.shown import Shown
from workbench.datasets.pictures import IMAGES, text_of
from workbench.datasets.records import CHAT, has_answer, truth_kinds, truth_of


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Shown):
    """Check of a data set before a run: rows, missing answers, repeated prompts, prompt lengths."""

    rows: int
    columns: tuple[str, ...]
    data_sources: dict[str, int]
    missing_answers: tuple[int, ...]
    """Rows without a ground truth, where rewards are rules."""
    truths: dict[str, int]
    """Number of ground truths of each kind: `text`, `whole number`, `number`, `list`, `object`, `none`, `empty`, …"""
    duplicates: tuple[int, ...]
    """Rows whose prompt is in an earlier row too."""
    characters: dict[str, float]
    """Prompt length in characters: min, mean, median, p95, max."""
    pictures: int
    """Pictures in all rows (columns `images` and `image`)."""
    examples: tuple[tuple[str, str], ...]
    """(which, its prompt and ground truth) of the first rows, and of those with the shortest and the longest prompt."""
    lengths: dict[str, float]
    """Prompt length in tokens: min, mean, median, p95, max; {} without a tokenizer."""
    over_limit: int
    """Prompts above `max_prompt_length`."""
    limit: int | None
    """`max_prompt_length`, in tokens."""
    read_as: str = ""
    """Which columns became prompt and truth, and in whose schema they were recognised."""
    first: str = ""
    """The first prompt exactly as the model reads it; "" without a tokenizer."""
    template: str = ""
    """The chat template that renders prompts; "" without a tokenizer."""
    scorable: str = ""
    """How many truths can ever be right under the reward that was named."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Of a `mix`: the number of rows of each part."""

    def lines(self) -> list[tuple[str, str]]:
        """(label, value) pairs, as text and HTML show them."""
        pairs = [
            ("rows", str(self.rows)),
            ("read as", self.read_as),
            ("columns", ", ".join(self.columns)),
            ("data sources", ", ".join(f"{name}: {count}" for name, count in self.data_sources.items())),
            ("missing answers", _named(self.missing_answers)),
            ("ground truths", ", ".join(f"{kind}: {count}" for kind, count in self.truths.items())),
            ("right under the reward", self.scorable),
            ("repeated prompts", _named(self.duplicates)),
            ("prompt characters", "  ".join(f"{name} {value:g}" for name, value in self.characters.items())),
            *([("pictures", str(self.pictures))] if self.pictures else []),
            *self.examples,
        ]
        if self.parts:
            pairs.insert(1, ("parts", ", ".join(f"{name}: {count}" for name, count in self.parts.items())))
        if self.lengths:
            pairs.append(("prompt tokens", "  ".join(f"{name} {value:g}" for name, value in self.lengths.items())))
            pairs.append(("over the limit", f"{self.over_limit} (limit {self.limit})" if self.limit else "no limit"))
        first_read = repr(self.first) if self.first else ""
        pairs += [("chat template", self.template), ("first prompt as the model reads it", first_read)]
        return [(label, value) for label, value in pairs if value]


def report(
    rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...], lengths: Sequence[int] = (), limit: int | None = None
) -> Report:
    """Make the `Report` of rows; `lengths` are the prompts' lengths in tokens, where known, `limit` the largest allowed."""
    return Report(
        rows=len(rows),
        columns=columns,
        data_sources=dict(Counter(str(row.get("data_source")) for row in rows)),
        missing_answers=tuple(index for index, row in enumerate(rows) if not has_answer(row)),
        truths=truth_kinds(rows),
        characters=_statistics([len(_said(row)) for row in rows]),
        pictures=sum(len(row.get(IMAGES) or ()) for row in rows),
        examples=_examples(rows),
        duplicates=_repeated(rows),
        lengths=_statistics(lengths),
        parts=dict(Counter(str(row["data_part"]) for row in rows if row.get("data_part"))),
        over_limit=sum(length > limit for length in lengths) if limit is not None else 0,
        limit=limit,
    )


def _repeated(rows: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    first: dict[str, int] = {}
    prompts = [str((row["prompt"], row.get(IMAGES))) for row in rows]
    return tuple(index for index, prompt in enumerate(prompts) if first.setdefault(prompt, index) != index)


def _named(rows: Sequence[int]) -> str:
    return f"{len(rows)} (rows {[*rows[:5]]})" if rows else "none"


def _said(row: Mapping[str, Any]) -> str:
    """The texts of a row's prompt, a message a line."""
    chat = row[CHAT]
    return chat if isinstance(chat, str) else "\n".join(str(text_of(turn.get("content")) or "") for turn in chat)


def _examples(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    by_length = sorted(range(len(rows)), key=lambda index: len(_said(rows[index])))
    chosen = {0: "first row", 1: "second row"} if len(rows) > 1 else {0: "first row"} if rows else {}
    for name, index in (("shortest prompt", by_length[:1]), ("longest prompt", by_length[-1:])):
        chosen |= {one: f"{name} (row {one})" for one in index if one not in chosen}
    return tuple((name, f"{_cut(_said(rows[one]))}  → {_cut(truth_of(rows[one]))}") for one, name in chosen.items())


def _cut(value: Any, most: int = 200) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def _statistics(lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {}
    ordered = sorted(lengths)
    median, p95 = statistics.median(ordered), ordered[int(0.95 * len(ordered))]
    mean = round(sum(ordered) / len(ordered), 1)
    return {"min": ordered[0], "mean": mean, "median": median, "p95": p95, "max": ordered[-1]}


def scorable(rows: Sequence[Mapping[str, Any]], reward: Any) -> str:
    """How many truths can ever be right under a reward, in words.

    `reward` is a reward (`check_rows`), or a rule or its module (`rewards.gsm8k`); of other functions nothing is known.
    Raises `DataError` where none can.
    """
    rule = getattr(reward, str(getattr(reward, "__name__", "")).rpartition(".")[2], reward)
    if hasattr(reward, "check_rows"):
        return reward.check_rows(rows) or f"{reward.name} refuses none of {len(rows)} rows"
    if not hasattr(rule, "unscorable"):
        return "unknown: only workbench's own rules can be asked beforehand"
    truths = [truth_of(row) for row in rows]
    bad = {index: why for index, truth in enumerate(truths) if (why := rule.unscorable(ground_truth=truth))}
    said = f"{len(truths) - len(bad)} of {len(truths)} truths can score 1 by {rule.__name__}"
    first = "".join(f"; row {index}: {why}" for index, why in list(bad.items())[:1])
    if bad and len(bad) == len(truths):
        raise DataError(said, found=first.removeprefix("; "), do="name the truths' column: wb.rows(…, answer='column')")
    return said + first
