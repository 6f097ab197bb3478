"""The scorer by `data_source`, and a check of a whole data set before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from workbench.errors import DataError, unknown
from workbench.rewards.gsm8k import gsm8k
from workbench.rewards.reward import Reward, load_function

SCORERS: Mapping[str, Callable[..., Any]] = {
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "workbench/arith": gsm8k,
}
"""`data_source` → scorer. `gsm8k` without its owner is what many data sets write; verl refuses it."""


def scorer_for(data_source: Any, table: Mapping[str, Callable[..., Any]] = SCORERS) -> Callable[..., Any]:
    """Raises `DataError` for a source that no scorer is known for."""
    if data_source not in table:
        raise DataError(
            unknown("data_source with a scorer", str(data_source), table) + "; pass your own: reward=my_function"
        )
    return table[data_source]


def check_sources(sources: Iterable[Any], table: Mapping[str, Callable[..., Any]] = SCORERS) -> None:
    """Refuse a data set with a source that cannot be scored, before anything runs."""
    for source in dict.fromkeys(sources):
        scorer_for(source, table)


def by_data_source(table: Mapping[str, Callable[..., Any]] = SCORERS, **options: Any) -> Reward:
    """A reward that asks each row's `data_source`. The scorers are ours and bounded, so it runs in this process."""

    def scored(response: str, ground_truth: Any, data_source: Any) -> Any:
        return scorer_for(data_source, table)(response, ground_truth)

    def check(rows: Iterable[Mapping[str, Any]]) -> None:
        check_sources((row.get("data_source") for row in rows), table)

    chosen = {"in_process": True, "on_failure": "raise", **options}
    return Reward(scored, name="by data_source", check_rows=check, **chosen)


def as_reward(function: Any = None, **options: Any) -> Reward:
    """A `Reward` from what people have.

    None: by `data_source`. A `Reward`: itself. `"file.py"` or `"file.py:function"`: loaded. A callable: wrapped, with
    `options` of `Reward`.
    """
    if function is None:
        return by_data_source(**options)
    if isinstance(function, Reward):
        return function
    if isinstance(function, str):
        path, _, name = function.partition(":")
        return Reward(load_function(path, name or "compute_score"), **options)
    if function is gsm8k:
        return Reward(function, **{"in_process": True, **options})
    return Reward(function, **options)
