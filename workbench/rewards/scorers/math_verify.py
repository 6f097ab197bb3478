"""MATH by equivalence: `math-verify` (sympy and a LaTeX grammar) in worker processes, because comparing some answers never ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.base.distribution import require_package
from workbench.rewards.base import row_view
from workbench.rewards.reward import Reward
from workbench.rewards.runner import START_SECONDS
from workbench.rewards.score import as_text, lint
from workbench.rewards.scorers.equivalence import limited

CHECKED = 64
"""About so many rows' truths are read before a run, each in a worker."""


def math_verify(*, strict: bool = False, timeout: float = 5.0, workers: int = 2, **options: Any) -> Reward:
    """A reward that is 1 where the answer is equivalent to the ground truth: `\\frac14` is `0.25`, `1,000` is `1000`.

    `strict` reads only a `\\boxed{…}`. A response that takes more than `timeout` seconds of processor time (a tower of powers) is
    *timeout* with 0, a row whose ground truth cannot be read as mathematics *not_applicable*. Raises
    `PackageMissing` without the package math-verify (extra `math`).
    """
    require_package("math_verify", "math", "the scorer math_verify")
    function = limited(timeout, strict)

    def check(rows: Iterable[Mapping[str, Any]]) -> str:
        held = list(rows)
        some = held[:: max(1, len(held) // CHECKED)]
        views = [row_view({**row, "raw_prompt": None}, "", ()) for row in some]
        boxed = [{**view, "response": f"\\boxed{{{as_text(view['ground_truth'])}}}"} for view in views]
        scores = reward.judge(boxed)
        whys = ["" if score.value > 0 else score.why or "it is not equal to itself" for score in scores]
        calls = [{"ground_truth": view["ground_truth"], "why": why} for view, why in zip(views, whys, strict=True)]
        return lint(calls, lambda why, ground_truth: why, f"math_verify ({len(some)} of {len(held)} rows read)")

    options = {"memory_limit_mb": 4096, "name": "math_verify", "check_rows": check, **options}
    # a busy machine takes many times the processor's time: beyond this it is the machine's fault
    reward = Reward(function, timeout=max(START_SECONDS, 20 * timeout), workers=workers, **options)
    return reward
