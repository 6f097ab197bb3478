"""Prompt and response cut to limits of their own, in the judging model's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.config import require

CHARACTERS_A_TOKEN = 4
"""What a token is taken to be where the model's tokenizer is not here (an HTTP service)."""


@dataclass(frozen=True)
class Limits:
    """`tokenizer` may be None: then a token counts as four characters."""

    tokenizer: Any
    prompt: int
    response: int

    def __post_init__(self) -> None:
        require(self.prompt > 0, "prompt_length", expected="≥ 1", found=self.prompt)
        require(self.response > 0, "response_length", expected="≥ 1", found=self.response)

    def cut_prompt(self, text: str) -> tuple[str, bool]:
        """(the last `prompt` tokens, whether something went): a prompt's question stands at its end."""
        return self._cut(text, self.prompt, from_end=True)

    def cut_response(self, text: str) -> tuple[str, bool]:
        """(the first `response` tokens, whether something went)."""
        return self._cut(text, self.response, from_end=False)

    def _cut(self, text: str, limit: int, from_end: bool) -> tuple[str, bool]:
        if self.tokenizer is None:
            size = limit * CHARACTERS_A_TOKEN
            return (text, False) if len(text) <= size else (text[-size:] if from_end else text[:size], True)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text, False
        return self.tokenizer.decode(ids[-limit:] if from_end else ids[:limit]), True
