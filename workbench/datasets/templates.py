"""A chat as prompt tokens, by the model's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.datasets.rendering import render


def encode(
    tokenizer: Any, chat: Sequence[dict[str, Any]] | str, *, add_generation_prompt: bool = True, **switches: Any
) -> list[int]:
    """Token ids of a chat (a list of {role, content}) or of a plain text.

    `switches` go to the template (`enable_thinking=False`), which is rendered in a process of its own, in bounded time and
    memory: it came with the model. A tokenizer without a template gets the contents,
    one message a line: base models have seen plain text.
    """
    if isinstance(chat, str):
        return list(tokenizer(chat)["input_ids"])
    messages = [dict(turn) for turn in chat]
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n".join(str(turn["content"]) for turn in messages) + "\n")["input_ids"])
    text = render(tokenizer, messages, add_generation_prompt=add_generation_prompt, **switches)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
