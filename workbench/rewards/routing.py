"""The scorer by `data_source`, and a check of a whole data set before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from workbench.errors import DataError, message, unknown
from workbench.rewards.base import BaseReward
from workbench.rewards.code import Code
from workbench.rewards.files import load_function
from workbench.rewards.reward import Reward
from workbench.rewards.scorers.geometry3k import geometry3k
from workbench.rewards.scorers.gsm8k import gsm8k
from workbench.rewards.scorers.math_dapo import math_dapo
from workbench.rewards.scorers.math_string import math_string
from workbench.rewards.scorers.numeric import numeric
from workbench.rewards.scorers.search import search_em
from workbench.sandbox.protocol import Sandbox

_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_DAPO = ("math_dapo", "math", "math_dapo_reasoning", "aime", "aime24", "aime25")
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

SCORERS: Mapping[str, Callable[..., Any]] = {
    "openai/gsm8k": gsm8k,
    "gsm8k": gsm8k,
    "workbench/arith": gsm8k,
    **dict.fromkeys(_MATH, math_string),
    **dict.fromkeys(_DAPO, math_dapo),
    **{f"numina_{name}": numeric for name in _NUMINA},
    "hiyouga/geometry3k": geometry3k,
    **{f"searchR1_{name}": search_em for name in _SEARCH},
}
"""`data_source` → scorer, as verl routes. `gsm8k` without its owner is what many data sets write; verl refuses it."""
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
"""Sources whose rows are judged by running code: they need a sandbox."""


def scorer_for(
    data_source: Any, table: Mapping[str, Callable[..., Any]] = SCORERS, aliases: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Raises `DataError` for a source that no scorer is known for. `aliases` maps a data set's own names to known ones."""
    name = (aliases or {}).get(data_source, data_source)
    if isinstance(name, str) and name.startswith("aime") and name not in table:
        name = "aime"  # verl's rule: every year's
    if name in table:
        return table[name]
    if name in CODE_SOURCES:
        raise DataError(
            message(
                f"data_source {data_source!r} is judged by running code",
                expected="a sandbox",
                do="reward=rewards.by_data_source(sandbox=wb.sandbox.local()), or sandbox.remote(url)",
            )
        )
    known = (*table, *CODE_SOURCES, *(aliases or {}))
    raise DataError(
        unknown("data_source with a scorer", str(data_source), known)
        + "; pass your own: reward=my_function, or aliases={...} of by_data_source"
    )


def check_sources(
    sources: Iterable[Any],
    table: Mapping[str, Callable[..., Any]] = SCORERS,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Refuse a data set with a source that cannot be scored, before anything runs."""
    for source in dict.fromkeys(sources):
        scorer_for(source, table, aliases)


def by_data_source(
    table: Mapping[str, Callable[..., Any]] = SCORERS,
    *,
    aliases: Mapping[str, str] | None = None,
    sandbox: Sandbox | None = None,
    **options: Any,
) -> Reward:
    """A reward that asks each row's `data_source`. The scorers are ours and bounded, so it runs in this process; code
    runs in `sandbox`, and without one sources of code are refused before the run."""
    plain = table is SCORERS and not aliases and sandbox is None
    if sandbox is not None:
        table = {**dict.fromkeys(CODE_SOURCES, Code(sandbox)), **table}

    def scored(response: str, ground_truth: Any, data_source: Any, extra_info: Any = None) -> Any:
        scorer = scorer_for(data_source, table, aliases)
        return (
            scorer(response, ground_truth, extra_info) if isinstance(scorer, Code) else scorer(response, ground_truth)
        )

    def check(rows: Iterable[Mapping[str, Any]]) -> None:
        check_sources((row.get("data_source") for row in rows), table, aliases)

    chosen = {"in_process": True, "on_failure": "raise", "timeout": Code.row_timeout if sandbox else 30.0, **options}
    # a run can make the plain one again from its name; tables, aliases and sandboxes it does not write down
    name = "by data_source" if plain else "by data_source, its own table"
    return Reward(scored, name=name, check_rows=check, **chosen)


def as_reward(function: Any = None, **options: Any) -> BaseReward:
    """A reward from what people have.

    None: by `data_source`. A reward (`Reward`, `Rubric`, `Judge`, …): itself. `"file.py"` or `"file.py:function"`: loaded.
    A callable, or a module with a `compute_score` as verl's are (`rewards.gsm8k`): wrapped, with `options` of `Reward`;
    scorers of ours whose work is bounded run in this process.
    """
    if function is None:
        return by_data_source(**options)
    if isinstance(function, BaseReward):
        if options:
            raise DataError(message(f"{function!r} has its own settings", found=f"options {sorted(options)}"))
        return function
    if isinstance(function, str):
        path, _, name = function.partition(":")
        return Reward(load_function(path, name or "compute_score"), **options)
    if isinstance(function, ModuleType) and hasattr(function, "compute_score"):
        name = function.__name__.rpartition(".")[2]
        options = {"name": name, **options}
        # ours says more under the module's own name: what it extracted, and why
        function = getattr(function, name, function.compute_score)
    if getattr(function, "in_process", False) is True:
        return Reward(function, **{"in_process": True, "timeout": getattr(function, "row_timeout", 30.0), **options})
    return Reward(function, **options)
