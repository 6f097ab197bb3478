"""Random Qwen2 models with word-level tokenizers, for tests that need a real model and for measurements of a real shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # heads of 32 units: vLLM has no kernel for fewer on a CPU
    "tiny": {
        **{"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 1024},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    },
    # https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json
    "0.5b": {
        **{"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936, "max_position_embeddings": 32_768},
        **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1e6},
    },
}
"""Shapes that can be asked for by name: `0.5b` is Qwen2.5-0.5B's, 494,032,768 parameters."""


def make_random_model(folder: str | Path, *, vocabulary: int = 64, seed: int = 0) -> Path:
    """Write a random Qwen2 model of about 20,000 parameters and a word-level tokenizer to a folder, and return its path."""
    smaller = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": vocabulary}
    return _write(folder, {**SHAPES["tiny"], **smaller}, seed)


def make_shaped_model(folder: str | Path, shape: str = "0.5b", *, seed: int = 0) -> Path:
    """Write a random float32 Qwen2 model of a shape in `SHAPES` (`0.5b`: 2 GB) to a folder. `KeyError` for other names."""
    return _write(folder, SHAPES[shape], seed)


def _write(folder: str | Path, shape: dict[str, Any], seed: int) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    words = {f"w{number}": number for number in range(shape["vocab_size"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w2", pad_token="w0", unk_token="w3")
    config = Qwen2Config(**shape, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
