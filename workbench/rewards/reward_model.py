"""Discriminative reward models: a sequence classifier's scalar for (prompt, response)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from workbench import background
from workbench.config import require
from workbench.engines.protocol import Classifier
from workbench.errors import first_line
from workbench.rewards.base import BaseReward
from workbench.rewards.lengths import Limits
from workbench.rewards.score import Score, failed

TEMPLATES = ("question_answer", "chat")
QUESTION_ANSWER = "Question: {question}\nAnswer: {answer}"


class RewardModel(BaseReward):
    """`RewardModel(classifier)`: the classifier's raw scalar is the reward.

    `template` is `chat` (the model's own chat template over the whole conversation) or `question_answer`
    (`Question: …` and `Answer: …` of the last turn). The prompt keeps its last `prompt_length` tokens, the response its
    first `response_length`, by the reward model's own tokenizer. Extra: `rm_text`, `rm_tokens`, `truncated`.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        template: str = "chat",
        prompt_length: int = 2048,
        response_length: int = 2048,
        on_failure: str = "mask",
        name: str = "reward_model",
    ) -> None:
        super().__init__(name, on_failure)
        require(template in TEMPLATES, "template", expected=f"one of {', '.join(TEMPLATES)}", found=template)
        if template == "chat":
            there = getattr(classifier.tokenizer, "chat_template", None) is not None
            require(there, "template", expected="'question_answer': the model has no chat template", found=template)
        self.classifier = classifier
        self.template = template
        self.lengths = Limits(classifier.tokenizer, prompt_length, response_length)

    def settings(self) -> dict[str, Any]:
        """Model, template and limits."""
        return {
            **super().settings(),
            "model": self.classifier.describe(),
            "template": self.template,
            "prompt_length": self.lengths.prompt,
            "response_length": self.lengths.response,
        }

    def text_for(self, row: Mapping[str, Any]) -> tuple[str, bool]:
        """(what the model reads, whether something was cut)."""
        response, cut = self.lengths.cut_response(row["response"])
        chat = row["prompt"]
        if self.template == "question_answer" or not isinstance(chat, list):
            prompt, cut_prompt = self.lengths.cut_prompt(str(row["prompt_text"] or ""))
            return QUESTION_ANSWER.format(question=prompt, answer=response), cut or cut_prompt
        last, cut_prompt = self.lengths.cut_prompt(str(chat[-1]["content"]))
        messages = [*chat[:-1], {**chat[-1], "content": last}, {"role": "assistant", "content": response}]
        text = self.classifier.tokenizer.apply_chat_template(messages, tokenize=False)
        bos = getattr(self.classifier.tokenizer, "bos_token", None)
        # the tokenizer puts it there again
        return (text.removeprefix(bos) if bos else text), cut or cut_prompt

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One record a row view."""
        texts = [self.text_for(row) for row in rows]
        began = time.perf_counter()

        async def ask() -> list[Any]:
            asked = (self.classifier.classify(text) for text, _ in texts)
            return list(await asyncio.gather(*asked, return_exceptions=True))

        found = background.run(ask())
        seconds = (time.perf_counter() - began) / max(len(rows), 1)
        return [_record(answer, *text, seconds) for answer, text in zip(found, texts, strict=True)]

    def __repr__(self) -> str:
        return f"RewardModel({self.classifier.describe()}, {self.template})"


def _record(answer: Any, text: str, cut: bool, seconds: float) -> Score:
    extra = {"rm_text": text, "truncated": cut}
    if isinstance(answer, Exception):
        return failed(f"no reward: {first_line(answer)}", seconds=seconds).with_extra(extra)
    if isinstance(answer, BaseException):
        raise answer
    if not math.isfinite(answer.value):
        return failed(f"the reward model said {answer.value}", seconds=seconds).with_extra(extra)
    extra["rm_tokens"] = answer.tokens
    return Score(value=answer.value, parts={"rm": answer.value}, extra=extra, seconds=seconds)
