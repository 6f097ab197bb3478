"""Models and tokenizers from folders, and what their own files say about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from workbench.engines import lora
from workbench.errors import EngineError, boundary, message


def resolve(path: str | Path) -> str | Path:
    """A local model folder: the path itself, a checkpoint's `actor/`, a run's newest checkpoint; else a hub name."""
    folder = Path(path)
    for inside in (folder, folder / "actor"):
        if (inside / "config.json").is_file() or (inside / lora.CONFIG).is_file():
            return inside
    checkpoints = sorted(folder.glob("checkpoints/step_*/actor/*config.json"))
    if checkpoints:
        return checkpoints[-1].parent
    looks_local = folder.exists() or folder.is_absolute() or str(path).startswith(".") or str(path).count("/") != 1
    if looks_local or Path(str(path).split("/")[0]).is_dir():
        raise EngineError(
            message(
                f"no model at {str(path)!r}",
                expected="a folder with config.json, or one that holds actor/ or checkpoints/",
                found="a folder without" if folder.is_dir() else "no such folder",
                do="check the path; relative paths start where Python was started",
            )
        )
    return str(path)


def load_model(path: str | Path, settings: Any) -> Any:
    """The causal model in float32 on its device, in eval mode; an adapter's folder is its base with the adapter."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    base = lora.base_of(Path(path))
    if base is not None:
        model = load_model(resolve(base), settings)
        lora.add(model, json.loads((Path(path) / lora.CONFIG).read_text(encoding="utf-8")))
        lora.load(model, Path(path))
        return model
    extra = {"attn_implementation": settings.attn_implementation} if settings.attn_implementation else {}
    with boundary(f"loading the model {str(path)!r}", EngineError):
        model = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, trust_remote_code=settings.trust_remote_code, **extra
        )
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval()


def load_tokenizer(path: str | Path, model: Any, settings: Any) -> Any:
    """The model's own tokenizer; refused where it can write ids that the model does not have."""
    from transformers import AutoTokenizer

    with boundary(f"loading the tokenizer {str(path)!r}", EngineError):
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=settings.trust_remote_code)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise EngineError(
            message(
                f"tokenizer and model of {str(path)!r} do not fit",
                expected=f"at most {rows} token ids, the model's embeddings",
                found=f"{len(tokenizer)} in the tokenizer",
                do="use the tokenizer that came with the model",
            )
        )
    return tokenizer


def eos_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a response, by the model's generation config, its config and the tokenizer."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def value_head(model: Any) -> torch.nn.Linear:
    """[H] → 1, zero weights: a critic that starts by expecting nothing."""
    head = torch.nn.Linear(model.config.hidden_size, 1).to(model.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def save_model(model: Any, head: torch.nn.Module | None, tokenizer: Any, path: Path) -> None:
    """A plain Hugging Face folder, or an adapter's; a critic has `value_head.safetensors` beside it."""
    from safetensors.torch import save_file

    if lora.config_in(model) is not None:
        lora.save(model, path)
    else:
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if head is not None:
        save_file({k: v.contiguous() for k, v in head.state_dict().items()}, str(path / "value_head.safetensors"))


@torch.no_grad()
def load_into(model: Any, head: torch.nn.Module | None, path: Path, settings: Any) -> None:
    """What `save_model` wrote, into a model that is there already."""
    from safetensors.torch import load_file

    if lora.config_in(model) is not None:
        lora.load(model, path)
    else:
        loaded = load_model(path, settings).state_dict()
        for name, tensor in model.state_dict().items():
            tensor.copy_(loaded[name])
    if head is not None:
        head.load_state_dict(load_file(str(path / "value_head.safetensors")))
