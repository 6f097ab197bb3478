"""A chat as prompt tokens, by the model's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.errors import DataError, boundary


def encode(
    tokenizer: Any, chat: Sequence[dict[str, Any]] | str, *, add_generation_prompt: bool = True, **switches: Any
) -> list[int]:
    """Token ids of a chat (a list of {role, content}) or of a plain text.

    `switches` go to the template (`enable_thinking=False`). A tokenizer without a template gets the contents,
    one message a line: base models have seen plain text.
    """
    if isinstance(chat, str):
        return list(tokenizer(chat)["input_ids"])
    messages = [dict(turn) for turn in chat]
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n".join(str(turn["content"]) for turn in messages) + "\n")["input_ids"])
    with boundary("the chat template of the tokenizer", DataError):
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **switches
        )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
