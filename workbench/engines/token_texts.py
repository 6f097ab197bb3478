"""The text of each token of a sequence, such that the pieces joined are the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_BROKEN = "\ufffd"
_LONGEST = 12
"""Tokens after which a piece that is no text yet is given up: invalid bytes stay invalid."""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text a token, special tokens as they are written.

    A token that is a part of a character (byte-level vocabularies) gives the empty text, and the token that ends the
    character gives it whole; bytes that never become one give the replacement character.
    """
    texts: list[str] = []
    begin = done = 0  # decoding from `begin`, everything before `done` has been given out
    known = ""
    for place in range(len(ids)):
        whole = tokenizer.decode(list(ids[begin : place + 1]), skip_special_tokens=False)
        fresh = whole[len(known) :]
        if fresh.endswith(_BROKEN) and place - done < _LONGEST:
            texts.append("")
            continue
        texts.append(fresh)
        # a few tokens of context stay, since what a token reads as can depend on the one before it
        begin, done = done, place + 1
        known = tokenizer.decode(list(ids[begin:done]), skip_special_tokens=False)
    if done < len(ids) and texts:
        left = tokenizer.decode(list(ids[begin:]), skip_special_tokens=False)
        texts[-1] = left[len(known) :]
    return texts


@lru_cache(maxsize=4)
def open_tokenizer(path: str) -> Any | None:
    """The tokenizer of a model folder on this machine; None where there is none (any more)."""
    if not (Path(path) / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
