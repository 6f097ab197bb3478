"""The text of each token of a sequence, such that the pieces joined are the whole text."""

from __future__ import annotations

import itertools
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
    ids = list(ids)
    whole = _decoded(tokenizer, ids)
    single = {token: _decoded(tokenizer, [token]) for token in set(ids)}
    texts: list[str] = []
    for broken, run in itertools.groupby(ids, lambda token: _BROKEN in single[token]):
        # most tokens read alone as they do in the text; runs of parts of characters are read together
        tokens = list(run)
        texts += _step_by_step(tokenizer, tokens) if broken else [single[token] for token in tokens]
    return texts if "".join(texts) == whole else _step_by_step(tokenizer, ids)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _step_by_step(tokenizer: Any, ids: list[int]) -> list[str]:
    """What each token adds to the text before it: for vocabularies in which that depends on what came before."""
    texts: list[str] = []
    begin = done = 0  # decoding from `begin`, everything before `done` has been given out
    known = ""
    for place in range(len(ids)):
        fresh = _decoded(tokenizer, ids[begin : place + 1])[len(known) :]
        if fresh.endswith(_BROKEN) and place - done < _LONGEST:
            texts.append("")
            continue
        texts.append(fresh)
        # a few tokens of context stay, since what a token reads as can depend on the one before it
        begin, done = done, place + 1
        known = _decoded(tokenizer, ids[begin:done])
    if done < len(ids) and texts:
        texts[-1] = _decoded(tokenizer, ids[begin:])[len(known) :]
    return texts


@lru_cache(maxsize=4)
def open_tokenizer(path: str) -> Any | None:
    """The tokenizer of a model folder on this machine; None where there is none (any more)."""
    if not (Path(path) / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
