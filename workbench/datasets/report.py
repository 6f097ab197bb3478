"""The check before a run: what is in a data set, and what is wrong with it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.datasets.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counts of one data set."""

    rows: int
    columns: tuple[str, ...]
    data_sources: dict[str, int]
    missing_answers: tuple[int, ...]
    """Rows without a ground truth, where rewards are rules."""
    duplicates: int
    """Rows whose prompt stands in an earlier row too."""
    lengths: dict[str, float]
    """Prompt length in tokens: min, mean, median, p95, max; {} without a tokenizer."""
    over_limit: int
    """Prompts above `max_prompt_length`."""
    limit: int | None

    def lines(self) -> list[tuple[str, str]]:
        """(what, value) pairs: what text and HTML show."""
        missing = (
            f"{len(self.missing_answers)} (rows {list(self.missing_answers[:5])})" if self.missing_answers else "none"
        )
        pairs = [
            ("rows", str(self.rows)),
            ("columns", ", ".join(self.columns)),
            ("data sources", ", ".join(f"{name}: {count}" for name, count in self.data_sources.items())),
            ("missing answers", missing),
            ("repeated prompts", str(self.duplicates)),
        ]
        if self.lengths:
            pairs.append(("prompt tokens", "  ".join(f"{name} {value:g}" for name, value in self.lengths.items())))
            pairs.append(("over the limit", f"{self.over_limit} (limit {self.limit})" if self.limit else "no limit"))
        return pairs

    def __repr__(self) -> str:
        from workbench.views.html import terminal

        return terminal(f"{what:<17} {value}" for what, value in self.lines())

    def _repr_html_(self) -> str:
        from workbench.views.html import pairs_table

        return pairs_table(self.lines())


def report(rows: Rows, tokenizer: Any = None) -> Report:
    """Look at every row once; with a tokenizer, encode every prompt."""
    seen = [(str(row["prompt"]), str(row.get("data_source")), has_answer(row)) for row in rows]
    prompts = {prompt for prompt, _, _ in seen}
    lengths = rows.prompt_lengths(tokenizer) if tokenizer is not None else []
    limit = rows.max_prompt_length
    return Report(
        rows=len(rows),
        columns=rows.columns,
        data_sources=dict(Counter(source for _, source, _ in seen)),
        missing_answers=tuple(index for index, (_, _, answered) in enumerate(seen) if not answered),
        duplicates=len(rows) - len(prompts),
        lengths=_statistics(lengths),
        over_limit=sum(length > limit for length in lengths) if limit is not None else 0,
        limit=limit,
    )


def has_answer(row: dict[str, Any]) -> bool:
    """Whether a rule can judge it: a ground truth, or a reward that is a model."""
    judged = row.get("reward_model") or {}
    truth = judged.get("ground_truth")
    missing = truth is None or truth == "" or (isinstance(truth, float) and math.isnan(truth))
    return not missing or judged.get("style") == "model"


def _statistics(lengths: list[int]) -> dict[str, float]:
    if not lengths:
        return {}
    ordered = sorted(lengths)

    def at(share: float) -> int:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    mean = round(sum(ordered) / len(ordered), 1)
    return {"min": ordered[0], "mean": mean, "median": at(0.5), "p95": at(0.95), "max": ordered[-1]}
