"""A saved model as other programs take it: adapters merged into the base, another dtype, an adapter alone, or one GGUF file.

GGUF is written by the package `gguf` for the architectures in `ARCHITECTURES` and byte-level BPE tokenizers whose way to split a
text is in `SPLITTERS`; llama.cpp splits by that name, so another tokenizer is refused rather than approximated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.base.distribution import optional
from workbench.base.errors import EngineError, SettingError, check_name, unknown
from workbench.engines.local_engine import loading, lora
from workbench.engines.settings import LocalSettings

DTYPES = ("float32", "bfloat16", "float16")
GGUF_KINDS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
"""Type of the matrices in a GGUF file → its name as the type of the file. Vectors are always f32."""
FORMS: Mapping[str, tuple[str, ...]] = {"merged": DTYPES, "adapter": DTYPES, "gguf": tuple(GGUF_KINDS)}
"""Form → the dtypes that it is written in."""
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""transformers' `model_type` → the architecture's name in `gguf`."""
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "vocab_size": "vocab_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads", "layer_norm_rms_eps": "rms_norm_eps",
}  # fmt: skip
"""A model's size in GGUF → in transformers' configuration."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITTERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_WORDS % "", "ByteLevel"): "qwen2",
    (_WORDS % "{1,3}", "ByteLevel"): "llama-bpe",
}
"""How a tokenizer splits a text before BPE (a pattern, or the kind of the step) → llama.cpp's name for it."""
_LARGEST = torch.finfo(torch.float16).max


def check_form(form: str, dtype: str | None) -> None:
    """Raise `SettingError` for an unknown form, or a dtype that the form is not written in."""
    check_name("form of a saved model", form, FORMS)
    if dtype is not None and dtype not in FORMS[form]:
        raise SettingError(unknown(f"dtype of form {form!r}", dtype, FORMS[form]))


def write_form(source: Path, target: Path, form: str, dtype: str | None, name: str, base_dtype: str) -> None:
    """Write the model folder `source`, of a model or of a LoRA adapter, to the folder `target` in another form.

    A GGUF file is called `name`-DTYPE.gguf. `base_dtype` is the one that a LoRA engine keeps its base in. Raises `EngineError`
    where the form cannot hold the model.
    """
    target.mkdir(parents=True, exist_ok=True)
    adapted = lora.base_of(source) is not None
    if form == "adapter" and not adapted:
        do = "form='merged' saves the whole model"
        raise EngineError(f"form 'adapter' of {source}", expected="a LoRA adapter", found="all weights", do=do)
    if form == "merged" and adapted:
        settings = LocalSettings.from_parameters({"device": "cpu", "base_dtype": base_dtype})
        model = loading.load_model(source, settings)
        loading.save_model(model, None, loading.load_tokenizer(source, model, settings), target, merged=True)
    elif form != "gguf":
        for path in (one for one in loading.model_files(source) if one.name != loading.HEAD):
            shutil.copy2(path, target / path.name)
    else:
        whole = target / "merged" if adapted else source
        if adapted:
            write_form(source, whole, "merged", None, name, base_dtype)
        kind = dtype or "f16"
        write_gguf(whole, target / f"{name}-{kind.upper()}.gguf", kind)
        shutil.rmtree(target / "merged", ignore_errors=True)
        return
    if dtype is not None:
        _recast(target, dtype)
    loading.seal_model(target)


def _recast(folder: Path, dtype: str) -> None:
    """Write the weights of a model folder again in another dtype, file by file."""
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.safetensors"):
        held = {name: _cast(name, one, dtype).contiguous() for name, one in load_file(path).items()}
        save_file(held, path, metadata={"format": "pt"})
    loading.note_dtype(folder, getattr(torch, dtype))


def _cast(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Convert a floating tensor. Raises `EngineError` for one whose numbers float16 cannot hold."""
    if dtype == "float16" and tensor.is_floating_point() and tensor.numel() and tensor.abs().max() > _LARGEST:
        found, do = f"{float(tensor.abs().max()):g}", "take bfloat16, or bf16 in GGUF"
        raise EngineError(f"{name} in float16", expected=f"numbers up to {_LARGEST:g}", found=found, do=do)
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


# --- GGUF ---------------------------------------------------------------------------------------


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write a model folder as one GGUF file, with its tokenizer and chat template; `kind` is one of `GGUF_KINDS`.

    Matrices whose rows are no multiple of 32 are f16 in a q8_0 file. Raises `EngineError` for an architecture, a tokenizer or a
    position encoding that the file could not describe.
    """
    with optional("gguf", "a GGUF file"):
        import gguf
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    if config.model_type not in ARCHITECTURES or getattr(config, "use_sliding_window", False):
        window = " with use_sliding_window" * getattr(config, "use_sliding_window", False)
        expected = f"{', '.join(ARCHITECTURES)}, without sliding-window attention"
        do = "save it with form='merged', then convert it with llama.cpp's convert_hf_to_gguf.py"
        raise EngineError("a GGUF file", expected=expected, found=config.model_type + window, do=do)
    arch = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[arch], use_temp_file=True)
    writer.add_name(file.stem)
    writer.add_file_type(gguf.LlamaFileType[GGUF_KINDS[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, tensor in (*_describe(writer, config), *_tensors(folder, config)):
        _add(writer, gguf, gguf.get_tensor_name_map(arch, config.num_hidden_layers), name, tensor, kind)
    _add_tokenizer(writer, gguf, folder, config.vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Write a model's sizes; yields the tensor that describes Llama 3's position encoding, where it has it."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{name}")(size)
    for name, known in _SIZES.items():
        getattr(writer, f"add_{name}")(getattr(config, known))
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        plain = rope["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)
        yield "rope_freqs.weight", plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    elif kind != "default":
        raise EngineError("a GGUF file", expected="rope of type default or llama3", found=kind)


def _tensors(folder: Path, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors under transformers' names, one after the other, in the order of llama.cpp's own heads."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        if path.name == loading.HEAD:
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name).float()
                heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
                count = heads.get(name.split(".")[-2])
                if count and config.model_type == "llama":  # it rotates neighbours, transformers halves
                    tensor = tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
                yield name, tensor


def _add(writer: Any, gguf: Any, names: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
    """Write a tensor in its type, under its name in GGUF."""
    there = name if name == "rope_freqs.weight" else names.get_name(name, try_suffixes=(".weight", ".bias"))
    if there is None:
        raise EngineError(f"tensor {name} in GGUF", expected="a tensor of the architecture", found="no name for it")
    if tensor.dim() == 1:
        kind = "f32"
    elif kind == "q8_0" and tensor.shape[-1] % 32:
        kind = "f16"
    values = _cast(name, tensor, "float16" if kind == "f16" else "float32").contiguous().numpy()
    dtype = gguf.GGMLQuantizationType[kind.upper()]
    writer.add_tensor(there, gguf.quants.quantize(values, dtype), raw_dtype=dtype)


def _add_tokenizer(writer: Any, gguf: Any, folder: Path, size: int) -> None:
    """Write a byte-level BPE tokenizer: its tokens, merges, special tokens and chat template."""
    table = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    before = table.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    splitter = SPLITTERS.get(tuple(one.get("pattern", {}).get("Regex", one.get("type")) for one in steps))
    if splitter is None or table["model"]["type"] != "BPE" or steps[-1].get("add_prefix_space"):
        expected = f"byte-level BPE that splits texts as {', '.join(SPLITTERS.values())} do"
        do = "form='merged', then llama.cpp's convert_hf_to_gguf.py"
        found = f"{table['model']['type']} after {json.dumps(before)[:200]}"
        raise EngineError("the tokenizer in a GGUF file", expected=expected, found=found, do=do)
    kinds, added = gguf.TokenType, {one["id"]: one for one in table["added_tokens"]}
    plain = {number: text for text, number in table["model"]["vocab"].items()}
    tokens = [added[at]["content"] if at in added else plain.get(at, f"[PAD{at}]") for at in range(size)]
    types = [kinds.NORMAL if at in plain else kinds.UNUSED for at in range(size)]
    for at, one in added.items():
        types[at] = kinds.CONTROL if one["special"] else kinds.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    special.add_special_token.setdefault("bos", False)
    special.add_to_gguf(writer, quiet=True)
