"""Random Qwen2 models with word-level tokenizers, for tests that need a real model and for measurements of a real shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # heads of 32 units: vLLM has no kernel for fewer on a CPU
    "tiny": {
        **{"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 1024},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    },
    "60m": {
        **{"hidden_size": 640, "intermediate_size": 1728, "vocab_size": 32_000, "max_position_embeddings": 4096},
        **{"num_hidden_layers": 10, "num_attention_heads": 10, "num_key_value_heads": 2},
    },
    # https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json
    "0.5b": {
        **{"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936, "max_position_embeddings": 32_768},
        **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rope_theta": 1e6},
    },
    # https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json
    "7b": {
        **{"hidden_size": 3584, "intermediate_size": 18_944, "vocab_size": 152_064, "max_position_embeddings": 32_768},
        **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rope_theta": 1e6},
        **{"tie_word_embeddings": False},
    },
}
"""Shapes by name: `0.5b` and `7b` are those of Qwen2.5, 494,032,768 and 7,615,616,512 parameters."""


def make_random_model(folder: str | Path, *, vocabulary: int = 64, seed: int = 0) -> Path:
    """Write a random Qwen2 model of about 20,000 parameters and a word-level tokenizer to a folder, and return its path."""
    smaller = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": vocabulary}
    return _write(folder, {**SHAPES["tiny"], **smaller}, seed)


def make_shaped_model(
    folder: str | Path,
    shape: str = "0.5b",
    *,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    chat: bool = False,
) -> Path:
    """Write a random Qwen2 model of a shape in `SHAPES` (`0.5b`: 2 GB) to a folder. `KeyError` for other names.

    Its weights are drawn on `device` in a dtype. With `chat` its tokenizer is of Qwen2's class, with bytes as tokens,
    Qwen's special tokens (under Qwen's ids where the vocabulary is large enough), and the chat template; else it knows
    the words w0, w1 ….
    """
    return _write(folder, SHAPES[shape], seed, dtype, device, chat)


def _write(
    folder: str | Path,
    shape: dict[str, Any],
    seed: int,
    dtype: str = "float32",
    device: str = "cpu",
    chat: bool = False,
) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    if chat:
        shape = {**shape, "vocab_size": max(shape["vocab_size"], 260)}
    tokenizer = _bytes(shape["vocab_size"]) if chat else _words(shape["vocab_size"])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(**{"tie_word_embeddings": True, **shape, **ids})
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def _words(count: int, marks: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Make a tokenizer of the words w0, w1 …, with further special tokens by the names of their attributes
    (`image_token`)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(count)}, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named: dict[str, Any] = {"eos_token": "w2", "pad_token": "w0", "unk_token": "w3"}
    if marks:
        named["extra_special_tokens"] = dict(marks)
    return PreTrainedTokenizerFast(tokenizer_object=inner, **named)


_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _bytes(count: int) -> Any:
    """Make a tokenizer of Qwen2's class for a vocabulary of `count` rows: a token for each byte, unused tokens, and the
    ChatML template."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    first = min(count - 4, 151_643)
    known = [*sorted(ByteLevel.alphabet()), *(f"<unused {number}>" for number in range(256, first))]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate([*known, *special])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], pad_token=special[0], eos_token=special[2])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = _CHAT
    return tokenizer


VISION = ("qwen2_5_vl", "gemma3")
"""Kinds of models that `make_vision_model` makes: one with any number of patches and 3D positions, one of fixed squares."""
# no signs of regular expressions: transformers 5.5 searches for the first as one
_MARKS = {
    **{"boi_token": "<vision_start>", "eoi_token": "<vision_end>"},
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
}
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def make_vision_model(folder: str | Path, kind: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """Write a random vision-language model (a kind in `VISION`, below 1 MB) with its processor to a folder; return its
    path.

    Its tokenizer knows the words w0 to w63. `KeyError` for other kinds.
    """
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _words(64, _MARKS)
    config, images, place = {"qwen2_5_vl": _qwen, "gemma3": _gemma}[kind](
        dict(zip(_MARKS.values(), range(64, 68), strict=True))
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for one in model.parameters():  # as wide as trained ones: a picture changes what is said
            if one.dim() > 1:
                one.normal_(0, 0.16)
    model.save_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE.replace("PLACE", place)
    tokenizer.save_pretrained(folder)
    images.save_pretrained(folder)
    if kind == "gemma3":
        (Path(folder) / "processor_config.json").write_text('{"image_seq_length": 4}')
    return Path(folder)


_TEXT: dict[str, Any] = {
    **{"vocab_size": 68, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0},
    **{"bos_token_id": None},
}


def _qwen(marks: dict[str, int]) -> tuple[Any, Any, str]:
    """Make the parts of a small Qwen2.5-VL: (configuration, image processor, the text that stands for a picture)."""
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    sizes = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 16}
    seen = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [1]}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": rope},
        vision_config={**sizes, **seen, "out_hidden_size": 32},
        tie_word_embeddings=True,
        vision_start_token_id=marks["<vision_start>"],
        vision_end_token_id=marks["<vision_end>"],
        image_token_id=marks["<|image_pad|>"],
        video_token_id=marks["<|video_pad|>"],
    )
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    return config, images, "<vision_start><|image_pad|><vision_end>"


def _gemma(marks: dict[str, int]) -> tuple[Any, Any, str]:
    """Make the parts of a small Gemma 3: (configuration, image processor, the text that stands for a picture)."""
    from transformers import Gemma3Config
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**_TEXT, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**seen, "image_size": 16, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=marks["<vision_start>"],
        eoi_token_index=marks["<vision_end>"],
        image_token_index=marks["<|image_pad|>"],
    )
    return config, Gemma3ImageProcessorPil(size={"height": 16, "width": 16}), "<vision_start>"
