"""Two rewards that many tests judge by."""

from __future__ import annotations

from typing import Any

from workbench.rewards import gsm8k
from workbench.rewards.score import bounded


@bounded
def strict(response: str, ground_truth: str) -> Any:
    return gsm8k.gsm8k(response, ground_truth)


@bounded
def flexible(response: str, ground_truth: str) -> Any:
    return gsm8k.gsm8k(response, ground_truth, method="flexible")
