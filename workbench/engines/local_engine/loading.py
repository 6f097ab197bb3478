"""Models and tokenizers from folders and the Hugging Face hub, and models written as folders; tensors as files.

Safetensors are written tensor by tensor, so that no second copy of a model is held."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from workbench.base.distribution import check_packages
from workbench.base.errors import EngineError, SettingError, boundary, first_line
from workbench.base.files import FORMAT, MANIFEST, check_manifest, memory_file, record_of, write_manifest
from workbench.base.hub import HUB_SECONDS, is_hub_name, why
from workbench.dataproto.io import DTYPES
from workbench.engines.local_engine import lora, quantised
from workbench.engines.local_engine.forward import Routing, hidden_size
from workbench.engines.local_engine.products import use_faster_products
from workbench.engines.transformers_internals import opens_pictures, opens_text

log = logging.getLogger("workbench")


def resolve(path: str | Path, *, elsewhere: bool = False) -> str | Path:
    """Find the model folder of a path: the path itself, a checkpoint's `actor/` or `reward_model/`, or that of a run's
    newest checkpoint; else the text is a hub name.

    A hub name is checked (`check_hub`), unless the model is loaded on another machine (`elsewhere`). Raises
    `EngineError` where there is no such model, or where a file differs from what an engine's `save` wrote.
    """
    folder = Path(path)
    saved = (one for role in ROLES for one in folder.glob(f"checkpoints/step_*/{role}/*config.json"))
    checkpoints = (one.parent for one in sorted(saved, reverse=True))
    for inside in (folder, *(folder / role for role in ROLES), *checkpoints):
        if (inside / "config.json").is_file() or (inside / lora.CONFIG).is_file():
            check_manifest(inside, EngineError, "save the model again, or take another checkpoint")
            return inside
    if folder.exists() or not is_hub_name(str(path)):
        expected = "a folder with config.json, or one that holds actor/ or checkpoints/"
        found = "a folder without them" if folder.is_dir() else "no such folder"
        do = "check the path; relative paths start where Python was started"
        raise EngineError(f"no model at {str(path)!r}", expected=expected, found=found, do=do)
    if not elsewhere:
        check_hub(str(path))
    return str(path)


def folder_of(path: str | Path) -> Path:
    """Return the folder with a model's files: the path itself, or for a hub name its folder in the local cache, where
    it has been downloaded."""
    if path and not Path(path).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(path), "config.json") if is_hub_name(str(path)) else None
        return Path(cached).parent if isinstance(cached, str) else Path(path)
    return Path(path)


ROLES = ("actor", "reward_model")
"""Folders of a checkpoint that hold the model that was trained."""


def check_hub(name: str) -> None:
    """Raise `EngineError`, with the reason, if a model is neither in the local cache nor on the Hugging Face hub.

    Sends one request without retries (transformers itself tries for more than a minute), and none for what is cached or where `HF_HUB_OFFLINE` is set.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError

    if any(isinstance(hub.try_to_load_from_cache(name, file), str) for file in ("config.json", "adapter_config.json")):
        return
    if above := next((folder for folder in Path.cwd().parents if (folder / name / "config.json").is_file()), None):
        expected, found = f"a path that starts in {str(Path.cwd())!r}", f"this folder in {str(above)!r}"
        raise EngineError(f"no model {name!r}", expected=expected, found=found, do=f"pass {str(above / name)!r}")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except EntryNotFoundError:
        return  # an adapter alone, or weights in another form: transformers says what it can do with them
    except Exception as error:
        found, do = why(error)
        expected = f"a folder with config.json (paths start in {str(Path.cwd())!r}), or a name on the Hugging Face hub"
        error.__cause__ = error.__context__ = error.__traceback__ = None  # 200 lines of sockets
        raise EngineError(f"no model {name!r}", expected=expected, found=found, do=do) from error


def chosen_device(device: str) -> str:
    """Resolve a device's name: `auto` becomes `cuda` where torch finds a GPU, else `cpu`; other names are returned
    unchanged."""
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    path: str | Path,
    settings: Any,
    *,
    named: str = "",
    empty: bool = False,
    buffers: bool = False,
    adapted: bool = False,
) -> Any:
    """Load a causal model by folder or hub name, in float32, on its device and in eval mode. Of a peft folder the base
    model and its adapters are loaded.

    With the setting `lora_rank` new adapters are added, whose configuration has `named` as the base model. With `empty`
    the model is on the meta device, without memory for weights; with `buffers` its buffers are real, on the CPU. A base
    in codes (`base_dtype`) is refused, by `SettingError`, unless it is `adapted` or will be.
    """
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    base, there = lora.base_of(Path(path)), torch.device("meta") if empty else nullcontext()
    coded = _is_coded(settings, adapted=bool(base or adapted or settings.lora_rank))
    if base is not None:
        model = load_model(resolve(base), settings.replace(lora_rank=0), empty=empty, buffers=buffers, adapted=True)
        with there:
            lora.add(model, json.loads((Path(path) / lora.CONFIG).read_text(encoding="utf-8")))
        if not empty:
            _fill(lora.tensors(model), lora.stored(Path(path)), f"the adapter at {path}")
        halve_frozen(model, settings)
        return model
    trust = {"trust_remote_code": settings.trust_remote_code}
    options = trust | ({"attn_implementation": settings.attn_implementation} if settings.attn_implementation else {})
    with boundary(f"loading the model {str(path)!r}", EngineError):
        try:
            config = AutoConfig.from_pretrained(str(path), **trust)
            if empty:
                with parameters_on_meta() if buffers else there, torch.random.fork_rng(devices=[]):
                    model = _kind(config).from_config(config, dtype=torch.float32, **options)
            else:
                read = _streamed(config, path, settings, adapted, options)
                model = read or pretrained(_kind(config), path, **options)
        except Exception:
            check_packages("", "loading a model", sys.modules)  # an old version may be why
            raise
    device = "meta" if empty else chosen_device(settings.device)
    if coded:
        quantised.quantise(model, settings.base_dtype, device)
    if settings.lora_rank:  # before it goes to its device, where a base in float32 may not fit
        with there:
            lora.add(model, lora.config_of(settings, named or str(path)))
        halve_frozen(model, settings)
    if not buffers:
        model = model.to(device)
    if getattr(settings, "routing_replay", False):
        model.workbench_routing = Routing(model)
    if model.device.type == "cpu":
        use_faster_products(model)
    return model.eval()


def _is_coded(settings: Any, adapted: bool) -> bool:
    """Whether linear layers are to be kept in codes. Raises `SettingError` where they would have no adapters."""
    coded = settings.base_dtype in quantised.KINDS
    if coded and not adapted:
        what = f"base_dtype={settings.base_dtype!r} without LoRA"
        do = "set lora_rank=16: adapters can be trained, quantised weights cannot"
        raise SettingError(what, expected="lora_rank ≥ 1, or a folder of adapters", found="lora_rank=0", do=do)
    return coded


def _streamed(config: Any, path: str | Path, settings: Any, adapted: bool, options: Mapping[str, Any]) -> Any:
    """Load the base of adapters, kept as `base_dtype` says, without ever having it in float32. Returns None where it is to
    be in float32, and where its files have other names than the model."""
    # in half precision only the base of adapters that are there: peft draws new ones in the base's precision
    if settings.base_dtype not in quantised.KINDS and (settings.base_dtype == "float32" or not adapted):
        return None
    from huggingface_hub import snapshot_download
    from transformers import GenerationConfig

    kept = ["*.safetensors", "*.json"]
    folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(str(path), allow_patterns=kept))
    with parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model = _kind(config).from_config(config, dtype=torch.float32, **options)
    device = chosen_device(settings.device)
    half, files = getattr(torch, settings.precision(device)), sorted(folder.glob("*.safetensors"))
    if not quantised.fill(model, files, settings.base_dtype, half, device):
        return None
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def halve_frozen(model: Any, settings: Any) -> None:
    """Convert the frozen matrices of a model to the precision of its forward passes, if `base_dtype` says so.
    Embeddings are not converted, because no matrix product rounds their rows."""
    whole = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    kind = getattr(torch, settings.precision(chosen_device(settings.device)))
    for parameter in model.parameters() if settings.base_dtype != "float32" else ():
        if not parameter.requires_grad and parameter.dim() > 1 and id(parameter) not in whole:
            parameter.data = parameter.data.to(kind)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context manager: modules created inside have their parameters on the meta device (no memory), and real buffers on
    the CPU."""
    plain = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":  # one that is there already may be tied
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = plain  # type: ignore[method-assign]


def _kind(config: Any) -> Any:
    """Choose the transformers class that opens a model: the causal language model, or where there is none the
    image-text-to-text model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # a model with code of its own names its class in `auto_map`
    causal = opens_text(config) or hasattr(config, "auto_map")
    return AutoModelForImageTextToText if opens_pictures(config) and not causal else AutoModelForCausalLM


def open_processor(path: str | Path, model: Any, tokenizer: Any) -> Processor | None:
    """Open the processor of a vision-language model's text and pictures; None for any other model.

    Its part for videos, which needs torchvision, is left out. Pictures are resized by Pillow, which gives the same
    pixels on every machine.
    """
    import transformers

    # from its module: up to 5.15 `transformers.AutoImageProcessor` asks for torchvision
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = model.config.model_type
    if type(model).__name__ != MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(name):
        return None
    try:
        images = AutoImageProcessor.from_pretrained(str(path), backend="pil", trust_remote_code=False)
        whole: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[name])
        record, _ = whole.get_processor_dict(str(path))
        stills: Any = type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda cls: list(_PARTS))})
        processor = stills.from_args_and_dict([images, tokenizer], record)
    except (OSError, ImportError, LookupError, AttributeError, TypeError, ValueError) as error:
        # text is read without it
        log.warning("%s reads text alone: no processor of pictures: %s", type(model).__name__, first_line(error))
        return None
    if not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    settings = {name: value for name, value in record.items() if name != "chat_template"}
    return Processor(processor, settings, model.config.image_token_id)


_PARTS = ("image_processor", "tokenizer")
_BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns for each token; all else is of the pictures."""


class Processor:
    """transformers' processor of a vision-language model, for a text and its pictures; made by `open_processor`."""

    def __init__(self, whole: Any, record: Mapping[str, Any], token_id: int) -> None:
        self._whole, self._record = whole, record
        self.token_id = token_id
        """The token that stands for each of a picture's features."""
        self.tokenizer = whole.tokenizer
        self.image_processor = whole.image_processor

    @property
    def place(self) -> str:
        """The text that stands for a picture in a prompt, such as `<image>`."""
        # transformers 5.5 has Gemma 3's tokens of features as `image_token`, and reads this in a text, as later versions do
        name = "boi_token" if type(self._whole).__name__ == "Gemma3Processor" else "image_token"
        return str(getattr(self._whole, name))

    def encode(self, text: str, images: Sequence[Any]) -> tuple[list[int], dict[str, torch.Tensor]]:
        """Tokenize a text with pictures; returns (token ids, the model's inputs for the pictures). `images` are PIL
        images in the order of their places."""
        made = self._whole(text=[text], images=list(images), add_special_tokens=False, return_tensors="pt")
        return made["input_ids"][0].tolist(), {name: one for name, one in made.items() if name not in _BY_TOKEN}

    def save(self, path: Path) -> None:
        """Write the image processor and its configuration to a model folder."""
        self.image_processor.save_pretrained(path)
        if self._record:
            (path / "processor_config.json").write_text(json.dumps(self._record, indent=2), encoding="utf-8")


def pretrained(kind: Any, path: str | Path, begins: Sequence[str] = (), **options: Any) -> Any:
    """Load a model of a transformers class (`kind`) in float32, with every tensor of it read from the files.

    transformers fills tensors that the files lack, or have in another shape, with random numbers, and leaves out those
    that the configuration has no place for. Here these are an `EngineError` with their names; heads of other kinds in the
    files are left out, and tensors named in `begins` may be missing.
    """
    model, info = kind.from_pretrained(
        str(path), dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    shapes = {
        name: f"{name} of shape {tuple(there)} in place of {tuple(own)}" for name, there, own in info["mismatched_keys"]
    }
    inside = f"{model.base_model_prefix}."
    lacks = sorted(set(info["missing_keys"]) - shapes.keys() - {*begins})
    extra = sorted(one for one in info["unexpected_keys"] if one.startswith(inside))
    misfit(path, lacks, [shapes[name] for name in sorted(shapes)], extra)
    return model


def misfit(path: str | Path, lacks: Sequence[str], shapes: Sequence[str], extra: Sequence[str]) -> None:
    """Raise `EngineError` where a model's files lack tensors (`lacks`), have them in other shapes (`shapes`), or have
    tensors with no place in it (`extra`)."""
    wrong = {"lack": lacks, "have": shapes, "have, with no place in the model,": extra}
    problems = [
        f"the files {verb} {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}"
        for verb, names in wrong.items()
        if names
    ]
    if problems:
        expected, do = "every tensor of the model, and no other", "copy or save the model again; check config.json"
        raise EngineError(f"the weights of {str(path)!r}", expected=expected, found="; ".join(problems), do=do)


_PROBE = "Is 12345 + 0.5 really 6?\n\n  def f(x):\n\treturn x  # naïve, 中文, привет 🙂"
"""A text that tells tokenizers apart."""


def auto_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Open the tokenizer of a folder or hub name, and make sure that it tokenizes as its `tokenizer.json` does.

    transformers 5 rebuilds some tokenizers by the class that their configuration names, not by their file: DeepSeek's,
    as a `LlamaTokenizerFast`, then lose all spaces. Where a test text gets other ids than by the file, the tokenizer is
    built from the file.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or type(tokenizer) is PreTrainedTokenizerFast:
        return tokenizer
    file = cached_file(str(path), "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return tokenizer
    theirs = Tokenizer.from_file(file).encode(_PROBE, add_special_tokens=False).ids
    same = theirs == tokenizer.encode(_PROBE, add_special_tokens=False)
    return tokenizer if same else PreTrainedTokenizerFast.from_pretrained(str(path))


def load_tokenizer(path: str | Path, model: Any, settings: Any) -> Any:
    """Load a tokenizer by folder or hub name. Raises `EngineError` where it has more ids than the model embeddings."""
    with boundary(f"loading the tokenizer {str(path)!r}", EngineError):
        tokenizer = auto_tokenizer(path, trust_remote_code=settings.trust_remote_code)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        what, found = f"tokenizer and model of {str(path)!r} do not fit", f"{len(tokenizer)} in the tokenizer"
        expected = f"at most {rows} token ids, the model's embeddings"
        raise EngineError(what, expected=expected, found=found, do="use the tokenizer that came with the model")
    return tokenizer


@lru_cache(maxsize=4)
def open_tokenizer(path: str) -> Any | None:
    """The tokenizer of a model folder on this machine; None where the folder has none."""
    if not (Path(path) / "tokenizer_config.json").is_file():
        return None
    return auto_tokenizer(path)


def eos_ids_of(*sources: Any) -> frozenset[int]:
    """Collect all token ids that end a response from `sources`: generation config, model configs and tokenizer."""
    ends: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        ends.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(ends)


def rope_limit(model: Any) -> int | None:
    """Row length in tokens up to which a row's outputs do not depend on the other rows of its batch; None where there
    is no such limit.

    Rotary embeddings of the kinds `longrope` and `dynamic` change the frequencies of a whole batch once one row of it
    is longer.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [one for one in rope.values() if isinstance(one, dict)]
    limits = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits, default=None)


def check_length(model: Any, length: int) -> None:
    """Raise `EngineError` for a row with more tokens than the model's `rope_limit`."""
    limit = rope_limit(model)
    if limit is not None and length > limit:
        expected, do = f"at most {limit}, the model's original length", "shorten prompts or max_tokens"
        what = f"a row of {length} tokens: one so long changes the rotary positions of its whole batch in {type(model).__name__}"
        raise EngineError(what, expected=expected, do=do)


def duplicate(model: Any) -> Any:
    """Return a deep copy of a model with its weights. States that layers keep of their last pass (Recurrent Gemma) are
    detached first."""
    for part in model.modules():
        for name, one in vars(part).items():
            if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                setattr(part, name, one.detach())
    return copy.deepcopy(model)


def tied(model: torch.nn.Module) -> dict[str, str]:
    """Return the parameters that are tied to another (such as an output layer that is the embeddings): each one's name
    → the first name of the same parameter."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(id(one), name) for name, one in named}
    return {name: other for name, other in found.items() if name != other}


def tie(model: torch.nn.Module, ties: Mapping[str, str]) -> None:
    """Tie parameters to each other again, by the names that `tied` returned."""
    for name, first in ties.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


HEAD = "value_head.safetensors"
"""The file of a critic's value head, beside the model's own."""


def value_head(model: Any) -> torch.nn.Linear:
    """Make a critic's value head: a linear layer from [H] to a scalar with zero weights, so that it predicts 0, on the
    model's device."""
    head = torch.nn.Linear(hidden_size(model), 1).to(model.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def save_model(model: Any, head: torch.nn.Module | None, tokenizer: Any, path: Path, *, merged: bool = False) -> None:
    """Write a model to a Hugging Face folder, with its tokenizer; with LoRA a peft folder, unless `merged`. A value
    head goes to `value_head.safetensors`. Merged weights are float16 over a base in codes, else float32."""
    if lora.config_in(model) is None:
        model.save_pretrained(path)
    elif merged:
        weights = quantised.Weights(model)
        dtype = torch.float16 if weights.coded else torch.float32
        held = lora.merged(model, weights, dtype)
        held |= {name: held[first] for name, first in tied(model).items() if {name, first} <= held.keys()}
        model.save_pretrained(path, state_dict=held)
        note_dtype(path, dtype)
    else:
        lora.save(model, path)
    tokenizer.save_pretrained(path)
    if head is not None:
        save_head(head, path)


def note_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Write the dtype of a model folder's weights into its config.json, where it has one."""
    if (config := folder / "config.json").is_file():
        facts = {**json.loads(config.read_text("utf-8")), "dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(facts, indent=2), "utf-8")


def save_head(head: torch.nn.Module, path: Path) -> None:
    """Write a critic's value head to its file in a model folder."""
    from safetensors.torch import save_file

    save_file({name: one.contiguous() for name, one in head.state_dict().items()}, str(path / HEAD))


MODEL_FILES = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Ends of the names of a model's weight, config and tokenizer files."""


def model_files(folder: Path) -> list[Path]:
    """List the weight, config and tokenizer files of a model folder, sorted by name."""
    named = (path for path in sorted(folder.iterdir()) if path.suffix in MODEL_FILES and path.name != MANIFEST)
    return [path for path in named if path.is_file()]


def stamps(folder: str | Path) -> list[tuple[int, int]]:
    """Return (size, modification time in ns) of each safetensors file in a model folder, to notice later changes."""
    files = [one.stat() for one in sorted(Path(folder).glob("*.safetensors"))]
    return [(one.st_size, one.st_mtime_ns) for one in files]


def seal_model(folder: Path) -> None:
    """Write the `manifest.json` (sizes and hashes) of a model folder whose files are complete."""
    write_manifest(folder, {path.name: record_of(path) for path in model_files(folder)}, format=FORMAT)


def is_classifier(model: Any) -> bool:
    """Whether a model is a sequence classifier, as reward models are: it has a layer `score` and no language-model
    head."""
    return model.get_output_embeddings() is None and hasattr(model, "score")


def load_into(model: Any, head: torch.nn.Module | None, path: Path, settings: Any) -> None:
    """Load what `save_model` wrote into an existing model and value head. Raises `EngineError`, with nothing changed,
    where it does not fit."""
    from safetensors.torch import load_file

    adapted = lora.config_in(model) is not None
    mine = lora.tensors(model) if adapted else model.state_dict()
    if adapted:
        stored = lora.stored(path)
    elif is_classifier(model):
        stored = pretrained(type(model), path).state_dict()
    else:
        stored = load_model(path, settings).state_dict()
    pairs = [(mine, stored, f"the weights at {path}")]
    if head is not None:
        if not (path / HEAD).is_file():
            raise EngineError(f"the critic at {path}", expected=HEAD, found="no such file")
        pairs.append((head.state_dict(), load_file(str(path / HEAD)), f"the value head at {path}"))
    for mine, found, what in pairs:  # all of it fits, or nothing is changed
        check_fit(what, found, mine)
    for pair in pairs:
        _fill(*pair)


@torch.no_grad()
def _fill(mine: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], what: str) -> None:
    check_fit(what, stored, mine)
    for name, tensor in mine.items():
        tensor.copy_(stored[name])


def check_fit(what: str, stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise `EngineError` about `what` for the first tensor of `wanted` that `stored` lacks or has in another shape."""
    for name, tensor in wanted.items():
        if name not in stored or stored[name].shape != tensor.shape:
            there = f"shape {tuple(stored[name].shape)}" if name in stored else "no tensor of that name"
            raise EngineError(what, expected=f"a tensor {name} of shape {tuple(tensor.shape)}", found=there)


# --- files of tensors ----------------------------------------------------------------------------


@contextmanager
def in_memory(data: torch.Tensor) -> Iterator[str]:
    """Context manager: writes the bytes of a tensor to a file in memory (`files.memory_file`) and yields its path."""
    with memory_file("workbench-weights") as (file, path):
        write_bytes(file, data)
        yield path


def write_bytes(file: Any, tensor: torch.Tensor) -> None:
    """Write the bytes of a contiguous tensor on the CPU to an open file."""
    data = tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b""
    while data:  # one call writes 2 GiB at most
        data = data[file.write(data) :]


def write_to(file: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """Write weights to an open file as safetensors, tensor by tensor; floating-point ones are converted to `dtype`, if
    it is given."""
    kinds = {name: (dtype or one.dtype) if one.is_floating_point() else one.dtype for name, one in weights.items()}
    file.write(header({name: (one.shape, kinds[name]) for name, one in weights.items()}))
    for name, tensor in weights.items():
        write_bytes(file, tensor.detach().to("cpu", kinds[name]).contiguous())


def header(tensors: Mapping[str, tuple[torch.Size, torch.dtype]], **facts: Any) -> bytes:
    """Build the header of a safetensors file for tensors of these shapes and dtypes; `facts` are further entries of the
    header."""
    begin = 0
    for name, (shape, dtype) in tensors.items():
        end = begin + shape.numel() * dtype.itemsize
        facts[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(facts).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors' bytes are aligned
    return struct.pack("<Q", len(text)) + text


def parameters(folder: str | os.PathLike[str]) -> int | None:
    """Count the parameters of a model folder from the headers of its safetensors files; None where it has none."""
    total, files = 0, sorted(Path(folder).glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total += sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    return total if files else None
