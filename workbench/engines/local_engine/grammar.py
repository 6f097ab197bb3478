"""Responses held to a JSON schema: which tokens may come next, as xgrammar finds them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.base.errors import EngineError, SettingError, first_line

_SPACE = 16
"""Most white space characters between two parts of the JSON text: without a limit a weak model writes nothing else."""


@functools.lru_cache(16)
def _compiler(tokenizer: Any, vocabulary: int, eos: frozenset[int]) -> Any:
    try:
        import xgrammar
    except ImportError as cause:
        raise EngineError("constraining a response to JSON needs xgrammar", do="pip install xgrammar") from cause
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=sorted(eos))
    return xgrammar.GrammarCompiler(info, max_threads=1)


class Grammar:
    """The state of one response that follows a JSON schema (JSON text), for a model with logits of `vocabulary` tokens.

    Raises `EngineError` without xgrammar, and `SettingError` for a schema that xgrammar cannot read.
    """

    def __init__(self, schema: str, tokenizer: Any, vocabulary: int, eos: frozenset[int]) -> None:
        compiler = _compiler(tokenizer, vocabulary, eos)
        import xgrammar

        try:
            compiled = compiler.compile_json_schema(schema, max_whitespace_cnt=_SPACE)
        except RuntimeError as error:
            found = first_line(error).rpartition(".cc:")[2].partition(": ")[2]
            raise SettingError(
                "the JSON schema of a response", expected="one that xgrammar reads", found=found
            ) from error
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, vocabulary)

    def allowed(self, vocabulary: int) -> Tensor:
        """Return which tokens the schema allows next, as bools [V]; all of them after the end."""
        if self._matcher.is_terminated():
            return torch.ones(vocabulary, dtype=torch.bool)
        self._matcher.fill_next_token_bitmask(self._mask)
        bits = (self._mask[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return torch.nn.functional.pad(bits.flatten().bool(), (0, max(0, vocabulary - bits.numel())))[:vocabulary]

    def accept(self, token: int) -> None:
        """Advance the grammar's state by a token that was sampled."""
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token)
