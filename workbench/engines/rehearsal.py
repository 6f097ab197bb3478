"""What learning and scoring allocate, measured before anything starts: the engine's own code runs on tensors without data.

Weights, activations, gradients and moments are torch's fake tensors (`torch._subclasses.FakeTensorMode`): shapes without memory.
Rows, masks and plans of attention are small and real, because our code reads them. torch's own memory tracker
(`torch.distributed._tools.mem_tracker`) makes these fake, too, and stops at the first number that is read; so storages are
counted here. Ranks are those of a process group that sends nothing (`fake`), of which this process is rank 0.

Of a deep model two shallow ones are measured, and each part of a step is continued linearly to its depth: layers are alike.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from workbench.base.errors import EngineError, boundary
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.loading import load_model, resolve
from workbench.engines.local_engine.memory import AS_ON_GPU, learning_estimate, moments_of
from workbench.engines.local_engine.quantised import parameters
from workbench.engines.protocol import LossCounts, LossOutput
from workbench.engines.settings import FsdpSettings, LocalSettings
from workbench.engines.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    asks_for_shapes,
    fake_store,
    storage_id,
    tree_leaves,
)
from workbench.engines.transformers_internals import whole_blocks

SHALLOW = (3, 4)
"""Layers of the two models that are measured in place of a deeper one: more than FSDP has gathered at one time."""
PACKED = {"int8": 16, "nf4": 9}
"""Sixteenths of a byte for a number of a frozen matrix that is kept in 4 or 8 bits, scales of blocks included."""
_HEAD = {(2, True): 8, (2, False): 2, (4, True): 4, (4, False): 0}
"""(Bytes of a number in a pass, whether the head is trained) → bytes that learning keeps for each of its numbers."""
log = logging.getLogger("workbench")
_aten: Any = torch.ops.aten
_lock = threading.Lock()


@dataclass(frozen=True)
class Shape:
    """The batch that a rehearsal learns from: micro-batches of `rows` × `length` tokens, of which all but the first in
    each row are response; with `several`, two of them."""

    rows: int
    length: int
    several: bool = True

    @staticmethod
    def of(budget: int, length: int, tokens: int | None = None) -> Shape:
        """Choose the shape of micro-batches of at most `budget` tokens in rows of `length`, for a mini-batch of
        `tokens` in all (None: more than one micro-batch)."""
        length = max(length, 2)
        whole = budget + 1 if tokens is None else tokens
        return Shape(max(min(budget, whole) // length, 1), length, whole > budget)


@dataclass(frozen=True)
class Footprint:
    """Memory of one process in bytes: what a model holds (`weights`, `gradients`, `optimizer`), and its peaks while it
    learns and scores, which include that."""

    parameters: int
    """Number of the whole model's parameters, adapters included."""
    weights: int
    gradients: int
    optimizer: int
    learning: int
    scoring: int
    casts: int = 0
    """Bytes of the copies of weights in half precision that a local engine keeps while it samples (estimated)."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes that learning allocates beside the weights, by part; their sum is the peak."""
        return {"gradients": self.gradients, "optimizer": self.optimizer, "activations": self.activations}

    @property
    def activations(self) -> int:
        """Bytes that learning takes at its peak beside weights, gradients and moments: activations, logits and gathered
        layers."""
        return max(self.learning - self.weights - self.gradients - self.optimizer, 0)


def sharded(
    model: str | Path | Mapping[str, Any],
    settings: FsdpSettings,
    ranks: int,
    shape: Shape,
    *,
    gpu: bool,
    head: bool = False,
) -> Footprint:
    """Measure the memory footprint of one of `ranks` FSDP ranks, on GPUs or CPUs; `model` is a folder, a hub name, or a
    config as a mapping.

    Raises `EngineError` where the model cannot be measured: it is not a transformers model, or its code reads numbers
    from tensors.
    """
    config, settings = config_of(model, settings)
    chosen = _on_cpu(settings, gpu).replace(offload="none")
    found = _sharded(json.dumps(config, sort_keys=True), chosen, ranks, shape, gpu, head)
    return _away(found, settings.offload) if gpu else found


@lru_cache(maxsize=64)
def _sharded(config: str, chosen: FsdpSettings, ranks: int, shape: Shape, gpu: bool, head: bool) -> Footprint:
    from workbench.engines.fsdp_engine.meshes import Mesh, sizes_of
    from workbench.engines.fsdp_engine.sharded import ShardedModel

    def opened(folder: str) -> Opened:
        model = ShardedModel(folder, chosen, Mesh("cpu", sizes_of(chosen.mesh, ranks)), head, {})
        score = lambda rows, want, temperature: model.compute_log_probs(rows, want, temperature, False)  # noqa: E731
        return Opened(model.whole, model.optimizer, lambda *given: model.learn(*given, 0), score)

    with _fake_ranks(ranks):
        return measured(json.loads(config), opened, shape, gpu=gpu, head=head)


def whole(
    opened: Callable[[str, Any], Opened], config: Any, settings: Any, shape: Shape, *, gpu: bool, head: bool = False
) -> Footprint:
    """Measure the memory footprint of a model in one process, on a GPU or a CPU.

    `opened(folder, settings)` opens it; `config` is transformers' configuration. Raises `EngineError` where it cannot
    be measured.
    """
    plain: dict[str, Any] = {"offload": "none", "optimizer": "adamw", "check_memory": False, "self_check": False}
    chosen = _on_cpu(settings, gpu).replace(**plain)
    described = json.loads(config.to_json_string(use_diff=False))
    found = measured(described, lambda folder: opened(folder, chosen), shape, gpu=gpu, head=head)
    saved = found.optimizer - moments_of(found.optimizer // 2, settings)  # bitsandbytes' kernels need numbers
    found = replace(found, **{name: getattr(found, name) - saved for name in ("optimizer", "learning", "scoring")})
    return _away(found, settings.offload) if gpu else found


def unmeasured(model: str | Path | Mapping[str, Any], settings: LocalSettings, tokens: int, kind: str) -> Footprint:
    """Estimate the memory footprint of a local engine on a kind of device (`cpu`, `cuda`) in milliseconds, with passes of
    `tokens`: its parameters are laid out without memory, the rest is `learning_estimate`.

    Raises `EngineError` where the model's config is not one of transformers.
    """
    config, settings = config_of(model, settings)
    found = _unmeasured(json.dumps(config, sort_keys=True), settings.replace(offload="none"), tokens, kind)
    return _away(found, settings.offload) if kind == "cuda" else found


@lru_cache(maxsize=256)
def _unmeasured(config: str, settings: LocalSettings, tokens: int, kind: str) -> Footprint:
    again, width = settings.gradient_checkpointing, 2 if settings.half(kind) else 4
    model, plain = _laid_out(config, settings, "bfloat16" if width == 2 else "float32")
    weights, casts = _held(model, settings.base_dtype, width)
    text, head = model.config.get_text_config(), model.get_output_embeddings().weight
    parts, trained = learning_estimate(model, plain, tokens, kind), model.get_input_embeddings().weight.requires_grad
    # autocast keeps what it has cast, or of frozen matrices the backward pass does, unless layers are computed again
    kept = casts * (not again) + head.numel() * _HEAD[width, trained]
    stream = width * text.hidden_size * text.num_hidden_layers * tokens
    kept += 6 * stream * (width == 2 and trained and not again)  # norms and the residual stream stay in float32
    layer = parts["activations"] - stream if again else parts["activations"] // text.num_hidden_layers
    moments, gradients = parts["optimizer"], parts["gradients"]
    held, copies = weights + moments, casts + (4 - width) * head.numel()
    # one layer, computed again, is not there while logits are, and the residual stream is in float32
    passes = 4 // width * stream + max(layer, parts["logits"]) if again else parts["activations"] + parts["logits"]
    # at its end a pass has three gradients of rows that are the head, too: the head's, its own, their sum
    rows = 12 * head.numel() * (trained and head is model.get_input_embeddings().weight)
    learning = held + gradients + max(passes + kept, rows)
    scoring = held + max(layer, parts["logits"] + copies - casts) + casts * trained
    return Footprint(parameters(model), weights, gradients, moments, learning, scoring, copies)


def _held(model: Any, base: str, width: int) -> tuple[int, int]:
    """Count a model's (bytes of weights with its base kept as `base`, bytes of the casts of its matrices, the head's left out)."""
    rows, head = (part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    matrices = [one for one in model.parameters() if one.dim() > 1 and one is not rows and one is not head]
    weights = sum(one.nbytes for one in model.parameters())
    wide = sum(one.numel() for one in matrices if one.dtype == torch.float32)
    if base in PACKED:
        frozen = [one for one in matrices if not one.requires_grad]
        packed = sum(one.numel() for one in frozen if one.dim() == 2)
        experts = sum(one.numel() for one in frozen) - packed  # kept as passes are, as a head of its own is
        own = experts + (0 if head is rows else head.numel())
        weights += packed * PACKED[base] // 16 - packed * 4 - own * (4 - width)
        wide -= packed + experts
    return weights, (4 - width) * wide


def _laid_out(config: str, settings: LocalSettings, dtype: str) -> tuple[Any, LocalSettings]:
    """Lay out a model on the meta device, its frozen matrices not packed; returns it with the settings for that."""
    halved = settings.base_dtype not in ("float32", *PACKED)
    plain = settings.replace(dtype=settings.base_dtype if halved else dtype)
    plain = plain if halved else plain.replace(base_dtype="float32")
    with tempfile.TemporaryDirectory() as folder, boundary("laying a model out without memory", EngineError):
        Path(folder, "config.json").write_text(config, encoding="utf-8")
        return load_model(folder, plain, empty=True), plain


class Opened(NamedTuple):
    """A model that was opened to measure its memory: its module, its optimizer, and its functions to learn and to
    score."""

    module: torch.nn.Module
    optimizer: Any
    learn: Callable[..., Any]
    """(rows, loss, counts, temperature)."""
    score: Callable[..., Any]
    """(rows, want, temperature)."""


def _away(footprint: Footprint, offload: str) -> Footprint:
    """Correct a GPU's footprint for the parts that the setting `offload` keeps in host memory."""
    w, g, o = footprint.weights, footprint.gradients, footprint.optimizer
    if offload == "optimizer":
        learning = max(footprint.learning - o, w + g)
        return replace(footprint, optimizer=0, learning=learning, scoring=footprint.scoring - o)
    if offload == "all":
        held = {"weights": 0, "gradients": 0, "optimizer": 0}
        return replace(footprint, **held, learning=footprint.learning - w - o, scoring=footprint.scoring - w - o)
    return footprint


def measured(
    config: Mapping[str, Any], opened: Callable[[str], Opened], shape: Shape, *, gpu: bool, head: bool = False
) -> Footprint:
    """Measure the memory footprint of a model with this config, which `opened(folder)` opens. Deep models are measured
    at two smaller depths and extrapolated.

    Raises `EngineError` where it cannot be measured.
    """
    # GPT-2 has another name for it, and is measured as it is
    depth = int(language(config).get("num_hidden_layers") or 0)
    depths = (depth,) if depth <= SHALLOW[-1] + 1 else SHALLOW
    with (
        _lock,
        boundary("measuring a model's memory without its weights", EngineError),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch's, of hooks on a layer whose inputs are frozen
        try:
            rows = [_run(_shallow(config, one), opened, shape, gpu, head) for one in depths]
        except Exception:  # layers that need others (Gemma 3n's share keys of earlier ones): all of them
            log.debug("layers cannot be left out", exc_info=True)
            depths = (depth,)
            rows = [_run(config, opened, shape, gpu, head)]
    further = (depth - depths[-1]) / (SHALLOW[1] - SHALLOW[0])
    sizes = [round(b + further * (b - a)) for a, b in zip(rows[0], rows[-1], strict=True)]
    parameters, weights, gradients, optimizer, *learning, scoring = sizes
    return Footprint(parameters, weights, gradients, optimizer, max(learning), scoring)


def _run(config: Mapping[str, Any], opened: Callable[[str], Opened], shape: Shape, gpu: bool, head: bool) -> list[int]:
    """Run one rehearsal and return its sizes: parameters, then bytes of weights, gradients, moments, the peaks of three
    parts of a step, and the peak of scoring."""
    rows, want = _rows(shape, int(language(config).get("vocab_size") or 2)), ("values",) if head else _WANT
    with tempfile.TemporaryDirectory() as folder, Counting(gpu) as seen:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = opened(folder)
        weights = seen.live
        for parameter in model.optimizer.named.values():
            parameter.grad = torch.zeros_like(parameter)
        gradients = seen.live - weights
        model.optimizer.step()
        model.optimizer.zero()
        moments = seen.live - weights
        seen.series.clear()
        marks = _Marks(want, seen, model.module)
        model.learn(rows, marks, LossCounts(1.0, 1.0), 1.0)
        parts = marks.parts()
        seen.series.clear()
        model.score(rows, want, 1.0)
        return [parameters(model.module), weights, gradients, moments, *parts, max(seen.series)]


_WANT = ("log_probs", "entropy")


class _Marks:
    """A loss function that marks the moments of a step between which memory is compared: the end of the forward pass,
    the top layer's backward, and the lowest layer's.

    Between the last two a layer's activations are freed and its gradients allocated, so that the peak is at one of the
    ends.
    """

    def __init__(self, want: tuple[str, ...], seen: Counting, module: torch.nn.Module) -> None:
        self.want = want
        self._seen = seen
        self._at = {"loss": 0, "top": 0, "lowest": 0}
        if layers := layers_of(module):
            layers[-1].register_full_backward_hook(lambda *_: self._mark("top"))
            layers[0].register_full_backward_pre_hook(lambda *_: self._mark("lowest"))

    def _mark(self, name: str) -> None:
        self._at[name] = len(self._seen.series)

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        self._mark("loss")
        return LossOutput(torch.stack([one.sum() for one in outputs.values()]).sum(), {}, {})

    def parts(self) -> list[int]:
        """Return the peak bytes until the last micro-batch's loss, during the top layers' backward, and in the rest.

        The first number covers all earlier micro-batches, too.
        """
        series, (loss, top, lowest) = self._seen.series, self._at.values()
        if not loss < top < lowest:  # no layers that are known: the whole
            return [max(series)] * 3
        return [max(series[:loss]), max(series[loss:top]), max(series[lowest:])]


def layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder layers of a transformers model, from the lowest, also when FSDP has wrapped them."""
    kinds = {name for part in module.modules() for name in whole_blocks(part)}
    return [part for part in module.modules() if type(part).__name__.removeprefix("FSDP") in kinds]


def _rows(shape: Shape, vocabulary: int) -> DataProto:
    count = shape.rows * (2 if shape.several else 1)
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, max(vocabulary, 2), (count, shape.length), generator=drawn)
    ones = torch.ones_like(ids)
    columns = {"input_ids": ids, "attention_mask": ones, "position_ids": torch.arange(shape.length).repeat(count, 1)}
    return DataProto.from_dict({**columns, "responses": ids[:, 1:], "response_mask": ones[:, 1:]})


# --- counting -------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Dispatch mode that makes floating-point tensors fake (without data), leaves others real, and counts the bytes of
    live storages.

    With `gpu`, keys and values whose heads several queries share are counted once for each query head, as GPU attention
    kernels copy them, and logits are computed in a GPU's chunks.
    """

    def __init__(self, gpu: bool) -> None:
        super().__init__()
        from torch.distributed.tensor import DTensor

        self._fakes: Any = FakeTensor
        self._wrapped: Any = DTensor
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._gpu = gpu
        self._sizes: dict[int, int] = {}
        self.live = 0
        """Bytes that are alive now."""
        self.series: list[int] = []
        """`live` after each operation."""

    def __enter__(self) -> Any:
        self._plain = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized  # type: ignore[method-assign,assignment] # FSDP frees gathered weights by it
        self._chunks = AS_ON_GPU.set(self._gpu)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._plain  # type: ignore[method-assign]
        AS_ON_GPU.reset(self._chunks)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, self._wrapped) for kind in types):
            return NotImplemented  # its own operations on the local parts come here
        if asks_for_shapes():
            return func(*args, **kwargs)  # DTensor asks for shapes
        inputs = _tensors((args, kwargs))
        if any(isinstance(tensor, self._fakes) for tensor in inputs):
            if func is _aten._local_scalar_dense.default:
                return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
            if (
                func is _aten.linalg_vector_norm.default
            ):  # a number for each piece: torch's own way to its shape is slow
                return inputs[0].new_empty((), dtype=kwargs.get("dtype"))
            result = func(*_by_number(func, args), **kwargs)
        else:
            result = self._made(func, args, kwargs, inputs)
        for tensor in _tensors(result):
            if tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        # packed rows share heads on a GPU, too, and go without torch's autograd
        kept = self._gpu and torch.is_grad_enabled()
        if kept and func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            self._repeat(*args[:3])
        self.series.append(self.live)
        return result

    def _made(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """Run an operation without fake inputs. Floating-point results become fake or meta tensors; integers and
        scalars, which engine code reads, stay real."""
        if not inputs or any(one.device.type == "meta" for one in inputs):
            with self._mode:
                result = func(*args, **kwargs)
            made = next(iter(_tensors(result)), None)
            if made is None or (made.device.type != "meta" and (inputs or (made.is_floating_point() and made.dim()))):
                return result
        return func(*args, **kwargs)

    def _count(self, storage: Any) -> None:
        key = storage_id(storage)
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def _repeat(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for one in (key, value) if key.shape[1] < query.shape[1] else ():
            more = one.nbytes * (query.shape[1] // key.shape[1] - 1)
            self._sizes[storage_id(one.untyped_storage())] += more
            self.live += more

    @property
    def _resized(self) -> Callable[[Any, int], Any]:
        def resize_(storage: Any, size: int) -> Any:
            resized = self._plain(storage, size)
            if storage_id(storage) in self._sizes:
                self.live += storage.nbytes() - self._sizes[storage_id(storage)]
                self._sizes[storage_id(storage)] = storage.nbytes()
                self.series.append(self.live)
            return resized

        return resize_


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _by_number(func: Any, args: Any) -> Any:
    """Replace boolean masks that index a fake tensor by the numbers of the selected elements, so that the result has a
    known size."""
    if func is not _aten.index.Tensor or not isinstance(args[1], list | tuple):
        return args
    picked: list[Any] = []
    for one in args[1]:
        mask = type(one) is torch.Tensor and one.dtype == torch.bool
        picked += one.nonzero().unbind(1) if mask else [one]
    return (args[0], picked)


# --- the model ------------------------------------------------------------------------------------


@contextmanager
def _fake_ranks(size: int) -> Iterator[None]:
    """Context manager: makes this process rank 0 of a process group of `size` ranks that sends nothing."""
    if distributed.is_initialized():
        what, do = "a process group is in use in this process", "measure before it, or in another process"
        raise EngineError("cannot measure the memory of ranks", found=what, do=do)
    hook = sys.excepthook
    with ExitStack() as ends:
        distributed.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
        ends.callback(setattr, sys, "excepthook", hook)
        ends.callback(distributed.destroy_process_group)
        yield


def _on_cpu(settings: Any, gpu: bool) -> Any:
    """Return settings with which this process, on its CPU, computes as a GPU (or a CPU) would: in the same precision
    and micro-batch budget."""
    kind = "cuda" if gpu else "cpu"
    budget = settings.budget(kind)
    return settings.replace(
        device="cpu", dtype=settings.precision(kind), micro_batch_tokens=budget, attn_implementation=None
    )


def config_of(model: str | Path | Mapping[str, Any], settings: Any) -> tuple[Mapping[str, Any], Any]:
    """Return (config, settings) of a model; for a folder of LoRA adapters its base model's config, and settings with
    the adapters' rank."""
    if isinstance(model, Mapping):
        return model, settings
    folder = resolve(model)
    base = lora.base_of(Path(folder))
    if base is not None:
        rank = int(json.loads((Path(folder) / lora.CONFIG).read_text(encoding="utf-8"))["r"])
        return config_of(str(base), settings.replace(lora_rank=rank))
    from transformers import AutoConfig

    with boundary(f"reading the config of {str(model)!r}", EngineError):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=settings.trust_remote_code)
    return json.loads(config.to_json_string(use_diff=False)), settings


def language(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the language model."""
    return config.get("text_config") or config


def _shallow(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a config with this many layers, and its per-layer lists cut to that length."""
    text = language(config)
    depth = text.get("num_hidden_layers")
    if depth is None or depth == layers:
        return dict(config)
    cut = {name: one[:layers] if isinstance(one, list) and len(one) == depth else one for name, one in text.items()}
    cut["num_hidden_layers"] = layers
    return {**config, "text_config": cut} if text is not config else cut
