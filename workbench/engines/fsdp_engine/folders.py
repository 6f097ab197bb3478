"""Model folders read and written by all ranks: each reads its own slices of each tensor, and no rank ever has a whole model.

What transformers renames and fuses when it loads (and takes apart when it saves) is renamed and fused by its own rules, for one
tensor at a time; of experts that lie one by one in the files, a rank reads those that it has a part of."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from workbench.base.errors import CheckpointError, EngineError, first_line
from workbench.engines.fsdp_engine.meshes import everyone, together
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.loading import (
    HEAD,
    header,
    load_model,
    load_tokenizer,
    misfit,
    resolve,
    save_head,
    save_model,
    seal_model,
    tied,
    write_bytes,
)
from workbench.engines.local_engine.states import read_record, read_weights
from workbench.engines.settings import FsdpSettings
from workbench.engines.transformers_internals import may_have, may_lack, never_saved

FILE_BYTES = 5 << 30
"""Most bytes of one file of weights, but for a tensor that is larger."""
_NAMES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

Box = tuple[slice, ...]
"""A part of a tensor: one slice for each dimension."""


# --- reading --------------------------------------------------------------------------------------


class StoredTensors:
    """The tensors of a model folder's (or hub model's) weight files, by their names there; each is read only when it is
    asked for."""

    def __init__(self, path: str) -> None:
        self._parts: dict[str, Callable[[Box | None], torch.Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(path):
            self._open_safe(file) if file.endswith(".safetensors") else self._open_pickle(file)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read a tensor, or only the part that the slices of `box` select."""
        return self._parts[name](box)

    def _open_safe(self, file: str) -> None:
        from safetensors import safe_open

        opened: Any = safe_open(file, "pt")  # stays open, and mapped, as long as its slices
        for name in opened.keys():  # noqa: SIM118 - no mapping
            one = opened.get_slice(name)
            self.shapes[name] = tuple(one.get_shape())
            self._parts[name] = partial(_sliced, opened, name)

    def _open_pickle(self, file: str) -> None:
        for name, one in torch.load(file, map_location="cpu", mmap=True, weights_only=True).items():
            self.shapes[name] = tuple(one.shape)
            self._parts[name] = partial(_indexed, one)


def _sliced(opened: Any, name: str, box: Box | None) -> torch.Tensor:
    found: torch.Tensor = opened.get_slice(name)[box] if box else opened.get_tensor(name)
    return found


def _indexed(tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
    return tensor[box] if box else tensor


def _weight_files(path: str) -> list[str]:
    from transformers.utils import cached_file

    for name in _NAMES:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None and name.endswith(".index.json"):
            parts = sorted(set(json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"].values()))
            return [str(cached_file(path, one)) for one in parts]
        if file is not None:
            return [str(file)]
    raise EngineError(f"no weights at {path!r}", expected=f"one of {', '.join(_NAMES)}", found="none of them")


@dataclass
class _Source:
    """Where a model's tensor comes from: one tensor of the files, or several that a converter of transformers fuses
    into one."""

    names: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, by the converter's pattern; in the files' natural order."""
    converter: Any = None
    target: str = ""
    """The tensor that the converter names its results after."""

    def made(self, tensors: Mapping[str, Sequence[torch.Tensor]], model: Any) -> dict[str, torch.Tensor]:
        """Run the converter on tensors of the files and return the model's tensors, by name."""
        converter = copy.deepcopy(self.converter)
        for pattern, every in tensors.items():
            for name, tensor in zip(self.names[pattern], every, strict=False):
                converter.add_tensor(self.target, name, pattern, tensor)
        found = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def by_expert(self, count: int) -> bool:
        """Whether the model's tensor stacks one tensor of the files for each of its `count` experts, so that experts
        can be read one by one."""
        first = self.converter.operations[0]
        stacks = type(first).__name__ == "MergeModulelist" and first.dim == 0
        further = all(getattr(one, "dim", 1) > 0 for one in self.converter.operations[1:])
        return stacks and further and all(len(names) == count for names in self.names.values())


def base_folder(path: str) -> str:
    """Return the folder or hub name with a model's full weights: the path itself, or for a peft folder its base
    model's."""
    base = lora.base_of(Path(path))
    return path if base is None else base_folder(str(resolve(base)))


def adapters_of(path: str, settings: Any) -> dict[str, torch.Tensor]:
    """Return the LoRA adapter tensors with which `load_model` opens a model, whole and on the CPU: those of a peft
    folder, or newly initialised ones."""
    if lora.base_of(Path(path)) is not None:
        return lora.stored(Path(path))
    if not settings.lora_rank:
        return {}
    model = load_model(path, settings.replace(lora_rank=0, attn_implementation=None), empty=True)
    for name, one in list(model.named_parameters()):  # on the CPU, as new adapters have to be, and one number each
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(torch.zeros(()).expand(one.shape)))
    lora.add(model, lora.config_of(settings, path))
    return lora.tensors(model)


def named_beside(adapters: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rename a plain model's tensors to their names in a model with these adapters: `q_proj.weight` →
    `q_proj.base_layer.weight`."""
    layers = {name.partition(".lora_")[0] for name in adapters if ".lora_" in name}
    renamed = {}
    for name, one in tensors.items():
        owner, _, leaf = name.replace(".base_layer.", ".").rpartition(".")
        renamed[f"{owner}.base_layer.{leaf}" if owner in layers else f"{owner}.{leaf}"] = one
    return renamed


class WeightReader:
    """Reads the weights of a model folder in parts, under the model's own names; `model` has no adapters and is on the
    meta device.

    Raises `EngineError` where the files lack a tensor, have one in another shape, or have one with no place in the
    model.
    """

    def __init__(self, path: str, model: Any) -> None:
        self._files, self._model = StoredTensors(path), model
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._found: dict[str, tuple[int, ...]] = {}
        self._extra: list[str] = []
        self._sources = self._plan_sources()
        for name, first in tied(model).items():  # a file may have either name
            found = self._sources.get(first) or self._sources.get(name)
            self._sources |= {one: found for one in (name, first) if found is not None}
        self._check(path)

    @classmethod
    def of(cls, path: str, settings: Any) -> WeightReader:
        """Open a `WeightReader` for the weights of a folder or hub name, without adapters."""
        plain = settings.replace(lora_rank=0, attn_implementation=None)
        return cls(path, load_model(path, plain, empty=True, buffers=True))

    def buffer(self, name: str) -> torch.Tensor:
        """Return a whole buffer by name: from the files, or else as the model's configuration computes it."""
        if name in self._sources:
            return self.read(name, tuple(slice(0, size) for size in self._shapes[name]))
        return self._model.get_buffer(name)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read the part of a tensor that the slices of `box` select, in the files' dtype."""
        source, shape = self._sources[name], self._shapes[name]
        if any(side.start >= side.stop for side in box):
            return torch.empty([max(side.stop - side.start, 0) for side in box])
        if source.converter is None:
            return self._files.read(next(iter(source.names.values()))[0], box)
        few = box[:1] if source.by_expert(shape[0]) else (slice(None),)
        every = {pattern: [self._files.read(one) for one in names[few[0]]] for pattern, names in source.names.items()}
        found = source.made(every, self._model)[name]
        return found[(slice(None), *box[1:]) if box[:1] == few else box]

    # --- inside -----------------------------------------------------------------------------

    def _plan_sources(self) -> dict[str, _Source]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        rules = get_model_conversion_mapping(self._model)
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        of_model = (self._model.base_model_prefix, self._model.state_dict())  # by place: 5.5 names the first `prefix`
        sources: dict[str, _Source] = {}
        for name in sorted(self._files.shapes, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, *of_model)
            if target not in self._shapes and name in self._shapes:
                target, pattern = rename_source_key(name, [], [], *of_model)
            if target not in self._shapes:
                self._extra.append(target)
                continue
            source = sources.setdefault(target, _Source({}, by_pattern.get(pattern or ""), target))
            source.names.setdefault(pattern or name, []).append(name)
        return {name: one for target, source in sources.items() for name, one in self._made(target, source)}

    def _made(self, target: str, source: _Source) -> Iterator[tuple[str, _Source]]:
        """Yield (name, source) of each of the model's tensors that a source provides, and record their shapes; a
        converter is run on meta tensors for that."""
        if source.converter is None:
            shapes = {target: self._files.shapes[next(iter(source.names.values()))[0]]}
        else:
            empty = {
                pattern: [torch.empty(self._files.shapes[name], device="meta") for name in names]
                for pattern, names in source.names.items()
            }
            shapes = {name: tuple(one.shape) for name, one in source.made(empty, self._model).items()}
        for name, shape in shapes.items():
            self._found[name] = shape
            yield name, source

    def _check(self, path: str) -> None:
        model, begins = self._model, f"{self._model.base_model_prefix}."
        lacks = sorted(self._shapes.keys() - self._sources.keys())
        lacks = [name for name in lacks if not _matches(name, may_lack(model))]
        wrong = {name: shape for name, shape in self._found.items() if self._shapes.get(name, shape) != shape}
        shapes = [f"{name} of shape {wrong[name]} in place of {self._shapes[name]}" for name in sorted(wrong)]
        moved = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", *may_have(model))
        extra = [name for name in sorted(self._extra) if name.startswith(begins) and not _matches(name, moved)]
        misfit(path, lacks, shapes, extra)


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(one, name) for one in patterns)


# --- writing --------------------------------------------------------------------------------------


@dataclass
class WeightFile:
    """One weight file of a model folder: which of the model's tensors it holds, and their names and shapes in the file."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Name in the model → the tensors that are made of it by name in the file, on the meta device."""
    file: str = "model.safetensors"

    @property
    def nbytes(self) -> int:
        """Size in bytes of the file's tensors."""
        return sum(one.nbytes for made in self.tensors.values() for one in made.values())

    def write(self, folder: Path, whole: Callable[[str], Mapping[str, torch.Tensor]], mine: bool) -> str | None:
        """Write the file on the rank where it is `mine`, tensor by tensor; returns the text of an error, or None.

        `whole(name)` gathers a tensor of the model and returns it in the files' form. Every rank must call it for each
        tensor, because it is a collective.
        """
        failure, file = None, None
        try:
            file = open(folder / self.file, "wb") if mine else None  # noqa: SIM115 - closed below
            if file is not None:
                held = {
                    name: (one.shape, one.dtype) for stored in self.tensors.values() for name, one in stored.items()
                }
                file.write(header(held, __metadata__={"format": "pt"}))
        except OSError as error:
            failure = first_line(error)
        for tensor, stored in self.tensors.items():
            tensors = whole(tensor)
            try:
                for name in stored if file is not None and failure is None else ():
                    write_bytes(file, tensors[name].detach().cpu().contiguous())
            except OSError as error:
                failure = first_line(error)
        if file is not None:
            file.close()
        return failure


def planned(model: Any, limit: int = FILE_BYTES) -> list[WeightFile] | None:
    """Divide a model's tensors into weight files of at most `limit` bytes (a larger tensor has its own file); `model`
    has no adapters and is on the meta device.

    Returns None where transformers makes one tensor of the files out of several of the model's: these cannot be written
    one by one.
    """
    left_out = {*tied(model), *never_saved(model)}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    together = reverted(model, tensors)
    same = {name: tensor.shape for name, tensor in together.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
    each = {name: {name: tensor} if same else reverted(model, {name: tensor}) for name, tensor in tensors.items()}
    if together.keys() != {name for made in each.values() for name in made}:
        return None
    return _files_of(each, limit)


def _files_of(each: Mapping[str, dict[str, torch.Tensor]], limit: int) -> list[WeightFile]:
    """Fill files in the order of the tensors, each with at most `limit` bytes or a single larger tensor, and name them."""
    parts = [WeightFile()]
    for name, stored in each.items():
        if parts[-1].tensors and parts[-1].nbytes + sum(one.nbytes for one in stored.values()) > limit:
            parts.append(WeightFile())
        parts[-1].tensors[name] = stored
    for number, part in enumerate(parts, 1):
        if len(parts) > 1:
            part.file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
    return parts


def reverted(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert tensors of a model back to the names and shapes of its files, by transformers' rules."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def begin_folder(model: Any, folder: Path, parts: Sequence[WeightFile]) -> None:
    """Write the parts of a model folder that are neither tensors nor tokenizer: configuration, generation settings, and
    the index of weight files. Old weight files are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("model*.safetensors"), folder / _NAMES[1]):
        old.unlink(missing_ok=True)
    model.save_pretrained(folder, state_dict={})
    (folder / _NAMES[0]).unlink(missing_ok=True)
    if len(parts) > 1:
        places = {name: part.file for part in parts for made in part.tensors.values() for name in made}
        record = {"metadata": {"total_size": sum(part.nbytes for part in parts)}, "weight_map": places}
        (folder / _NAMES[1]).write_text(json.dumps(record, indent=1), encoding="utf-8")


_HEAD = ("value_head.weight", "value_head.bias")


def read_head(folder: str, hidden: int) -> dict[str, torch.Tensor]:
    """Read the value head's weights from a model folder; zeros where it has none, as for a new critic."""
    from safetensors.torch import load_file

    path = Path(folder) / HEAD
    start = {"weight": torch.zeros(1, hidden), "bias": torch.zeros(1)}
    return {f"value_head.{name}": tensor for name, tensor in (load_file(path) if path.is_file() else start).items()}


def write_plain(weights: Mapping[str, torch.Tensor], source: str, path: str, settings: Any, shown: str = "") -> None:
    """Write whole weights as a Hugging Face folder, or LoRA adapters as a peft folder, as a local engine's `save` does.

    Configuration and tokenizer are copied from `source`; a peft folder names `shown` as its base model.
    """
    adapted = any("lora_" in name for name in weights)
    model = _shell(source, settings, adapted)
    if adapted and lora.base_of(Path(source)) is None:
        model.workbench_lora["base_model_name_or_path"] = shown or source
    plain = {name: tensor for name, tensor in weights.items() if not name.startswith("value_head.")}
    model.load_state_dict(plain, strict=False, assign=True)
    if not adapted:
        model.tie_weights()
    save_model(model, _head(weights), load_tokenizer(source, model, settings), Path(path))
    seal_model(Path(path))


def write_together(
    whole: Callable[[str], torch.Tensor], head: Mapping[str, torch.Tensor], source: str, path: str, settings: Any
) -> bool:
    """Write a model without adapters as a Hugging Face folder, by all ranks together; returns whether that is possible.

    `whole(name)` gathers a whole tensor on all ranks. Tensors are gathered one at a time, and each rank writes some of
    the files. `head` has the weights of a value head. It is not possible where transformers makes one tensor of the
    files out of several of the model's.
    """
    model, folder = _shell(source, settings, False), Path(path)
    parts = planned(model)
    if parts is None:
        return False
    first = distributed.get_rank() == 0
    with together():
        if first:
            begin_folder(model, folder, parts)
    in_files = lambda name: reverted(model, {name: whole(name)})  # noqa: E731
    mine = [number % distributed.get_world_size() == distributed.get_rank() for number in range(len(parts))]
    failures = [part.write(folder, in_files, writes) for part, writes in zip(parts, mine, strict=True)]
    everyone(next(filter(None, failures), None))
    with together():
        if first:
            _end_folder(model, head, source, folder, settings)
    return True


def _end_folder(model: Any, head: Mapping[str, torch.Tensor], source: str, folder: Path, settings: Any) -> None:
    """Write the value head and the tokenizer into a model folder whose weight files are complete, and its manifest."""
    if (layer := _head(head)) is not None:
        save_head(layer, folder)
    load_tokenizer(source, model, settings).save_pretrained(folder)
    seal_model(folder)


def _shell(source: str, settings: Any, adapted: bool) -> Any:
    """Open the model of a folder or hub name on the meta device (no memory), with its generation settings; LoRA
    adapters only if `adapted`."""
    from transformers import GenerationConfig

    plain = settings.replace(attn_implementation=None)  # it runs no forward, and may be without the kernels
    folder = source if adapted else base_folder(source)
    model = load_model(folder, plain if adapted else plain.replace(lora_rank=0), empty=True)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _head(weights: Mapping[str, torch.Tensor]) -> torch.nn.Linear | None:
    """Build a value head layer from its weights among `weights`; None where they have none."""
    if _HEAD[0] not in weights:
        return None
    head = torch.nn.Linear(weights[_HEAD[0]].shape[1], 1)
    head.load_state_dict({key: weights[f"value_head.{key}"] for key in ("weight", "bias")})
    return head


def export(state: str | Path, path: str | Path, *, model: str | Path | None = None) -> Path:
    """Turn a distributed checkpoint (`FsdpEngine.save_sharded`) into a Hugging Face folder: `export("state", "model")`.

    Works in this process, without ranks, and holds the weights of one file of the folder (at most 5 GiB) at a time;
    adapters become a peft folder. Configuration and tokenizer are those of the model that was trained, or of `model`.
    Raises `CheckpointError` where the checkpoint is incomplete or has no weights.
    """
    record = read_record(state)
    settings = FsdpSettings.from_parameters(record["settings"])
    source = str(resolve(model or record["path"]))
    shell = None if settings.lora_rank or lora.base_of(Path(source)) else _shell(source, settings, False)
    parts = planned(shell) if shell is not None else None
    if parts is None:
        write_plain(read_weights(state), source, str(path), settings, record["path"])
    else:
        begin_folder(shell, Path(path), parts)
        for part in parts:
            _write_part(part, shell, state, Path(path))
        _end_folder(shell, read_weights(state, _HEAD), source, Path(path), settings)
    return Path(path)


def _write_part(part: WeightFile, shell: Any, state: str | Path, folder: Path) -> None:
    """Write one weight file of a model folder from a saved state. Raises `CheckpointError` where the state lacks a
    weight, or where writing fails."""
    held = read_weights(state, part.tensors)
    for name in part.tensors:
        if name not in held:
            what, do = f"the sharded state at {state}", "name the model that was trained: export(…, model=…)"
            raise CheckpointError(what, expected=f"weight {name}", found="no tensor of that name", do=do)
    if failure := part.write(folder, lambda name: reverted(shell, {name: held[name]}), True):
        raise CheckpointError(f"{folder / part.file} could not be written: {failure}")
