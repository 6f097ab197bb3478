"""MATH by equivalence: `math-verify` (sympy and a LaTeX grammar) in killable workers."""

from __future__ import annotations

from functools import partial
from typing import Any

from workbench.rewards.reward import Reward
from workbench.rewards.scorers.equivalence_worker import equivalence


def math_verify(*, strict: bool = False, timeout: float = 5.0, workers: int = 2, **options: Any) -> Reward:
    """A reward that is 1 where the answer is equivalent to the ground truth: `\\frac14` is `0.25`, `1,000` is `1000`.

    `strict` wants a box. An answer that cannot be decided within `timeout` seconds (a tower of powers) loses its
    own row: it has no judgement and is counted. Needs the package math-verify, which is installed with workbench.
    """
    function = partial(equivalence, strict=True) if strict else equivalence
    chosen: dict[str, Any] = {"memory_limit_mb": 4096, "name": "math_verify", **options}
    given = ("strict",) if strict else ()
    return Reward(function, timeout=timeout, workers=workers, given=given, **chosen)
