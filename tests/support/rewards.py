"""Two rewards that many tests judge by, and a chat model that answers by a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from workbench.engines.protocol import Completion
from workbench.rewards import gsm8k
from workbench.rewards.score import bounded


@bounded
def strict(response: str, ground_truth: str) -> Any:
    return gsm8k.gsm8k(response, ground_truth)


@bounded
def flexible(response: str, ground_truth: str) -> Any:
    return gsm8k.gsm8k(response, ground_truth, method="flexible")


class Says:
    """A chat model that answers by a function: for what no real model does on demand."""

    tokenizer = None

    def __init__(self, answer: Callable[[str, int], str]) -> None:
        self.answer, self.asked, self.now, self.most = answer, [], 0, 0

    async def complete(self, messages: Any, *, max_tokens: int, temperature: float, seed: int) -> Completion:
        text = messages[-1]["content"]
        self.asked.append(text)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return Completion(self.answer(text, seed), text, 3, 2)

    def describe(self) -> str:
        return "says"
