"""Whether a model fits: weights, gradients, optimizer, activations and KV cache of each process, before anything starts.

Everything is counted from the model folder's config (and the headers of its weights, where they are there): no weight is read.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.config import require
from workbench.base.errors import SettingError
from workbench.base.memory import gib
from workbench.base.shown import Shown
from workbench.cluster.pools import Node
from workbench.engines.local_engine.loading import resolve
from workbench.functional.logprobs import CHUNK_BYTES

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
LOGITS = 2 * CHUNK_BYTES
"""Bytes of logits and their gradients that exist at one time."""
SHARE = 0.9
"""Of a process's memory that may be planned for; the rest is the runtime's own."""


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that its memory depends on."""

    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    counted: str
    """Where the number of parameters comes from, in words."""


@dataclass(frozen=True)
class Part:
    """Bytes that one kind of data (`what`: weights, gradients, KV cache …) of one role takes in one process."""

    role: str
    what: str
    size: int


@dataclass(frozen=True, repr=False)
class Fit(Shown):
    """An estimate of each process's memory, by role and kind, beside what the process has; `bool(fit)`: whether it fits."""

    model: str
    shape: Shape
    parts: tuple[Part, ...]
    available: int
    """Bytes that one process has."""
    source: str
    """Where `available` comes from, in words."""
    ranks: int
    colocated: bool
    """Whether all roles share one process's memory."""

    @property
    def needed(self) -> int:
        """Bytes of memory that the fullest process needs: all roles (actor, reference, critic) if they share one, else the largest."""
        roles = self.by_role
        return sum(roles.values()) if self.colocated else max(roles.values())

    @property
    def by_role(self) -> dict[str, int]:
        """Role → estimated bytes in one process."""
        found: dict[str, int] = {}
        for part in self.parts:
            found[part.role] = found.get(part.role, 0) + part.size
        return found

    @property
    def fits(self) -> bool:
        """Whether `needed` is at most nine tenths of `available`; the rest is left to the runtime."""
        return self.needed <= SHARE * self.available

    def __bool__(self) -> bool:
        return self.fits


def fits(
    model: str | Path | Mapping[str, Any],
    *,
    tokens: int,
    nodes: Sequence[Node] = (),
    ranks: int | None = None,
    memory: int | None = None,
    roles: Sequence[str] = ("learner", "reference", "sampler"),
    sequences: int = 64,
    micro_batch_tokens: int = 16_384,
    tensor_parallel_size: int = 1,
    dtype: str = "bfloat16",
    gradient_checkpointing: bool = True,
    offload: bool = False,
    colocated: bool = True,
) -> Fit:
    """Estimate the bytes in each process of the roles of a training run.

    The roles are the `learner` (float32 weights, gradients and Adam's two moments, sharded over `ranks`; activations of one
    micro-batch), a frozen `reference` (`dtype`, sharded), a `critic` (a second learner), and the `sampler` (`dtype` weights and
    a KV cache of `sequences` × `tokens` at once, over `tensor_parallel_size`).

    `model`: a folder, or a config as a mapping. `tokens`: of one sequence, prompt and response. `ranks`: processes of the
    learner; None: one per GPU, else one per CPU. `memory`: bytes of one process; None: a node's memory divided by its CPUs
    (required with GPUs: Ray does not know their memory). `offload`: the learner's weights, gradients and moments stay in
    host memory. Raises `SettingError` for a role or a config that is unknown.
    """
    require(tokens > 0, "tokens", expected="≥ 1, prompt and response together", found=tokens)
    require(dtype in BYTES, "dtype", expected=f"one of {', '.join(BYTES)}", found=dtype)
    shape, width = _shape(model), BYTES[dtype]
    live = [node for node in nodes if node.alive]
    size = ranks or int(sum(node.gpus for node in live)) or int(sum(node.cpus for node in live)) or 1
    parts: list[Part] = []
    for role in roles:
        if role in ("learner", "critic"):
            sizes = _learner(shape, size, micro_batch_tokens, width, gradient_checkpointing, offload)
        elif role == "reference":
            sizes = {"weights": math.ceil(shape.parameters * width / size)}
        elif role == "sampler":
            cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * width * tokens * sequences
            weights = math.ceil(shape.parameters * width / tensor_parallel_size)
            sizes = {"weights": weights, "KV cache": math.ceil(cache / min(tensor_parallel_size, shape.kv_heads))}
        else:
            raise SettingError(f"role {role!r}", expected="learner, reference, critic or sampler")
        parts += [Part(role, what, number) for what, number in sizes.items()]
    have, source = (memory, "as given") if memory is not None else _memory(live)
    name = str(model) if not isinstance(model, Mapping) else str(model.get("model_type", "a config"))
    return Fit(name, shape, tuple(parts), have, source, size, colocated)


def _learner(shape: Shape, ranks: int, tokens: int, width: int, checkpointing: bool, offload: bool) -> dict[str, int]:
    """Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198, eq. 2): 34 bytes a token, layer and hidden unit in two-byte
    numbers without attention maps, one hidden state a layer when checkpointed (and one layer's in full, made again)."""
    shard = math.ceil(shape.parameters * 4 / ranks)
    full = 17 * shape.hidden * width * tokens
    # one layer's weights are gathered whole while it runs
    layer = math.ceil(shape.parameters / max(shape.layers, 1)) * width if ranks > 1 or offload else 0
    return ({} if offload else {"weights": shard, "gradients": shard, "optimizer": 2 * shard}) | {
        "activations": shape.hidden * width * shape.layers * tokens + full if checkpointing else full * shape.layers,
        "logits": min(LOGITS, 2 * 4 * shape.vocabulary * tokens),
        "gathered layer": layer,
    }


def _memory(nodes: Sequence[Node]) -> tuple[int, str]:
    if any(node.gpus for node in nodes):
        found = "None; Ray does not know the memory of a GPU"
        raise SettingError("memory", expected="bytes of one GPU", found=found, do="give it: fits(…, memory=80 << 30)")
    if not nodes:
        raise SettingError("memory", expected="bytes of one process", found="None, and no node that is alive")
    least = min(nodes, key=lambda node: node.memory / max(node.cpus, 1))
    return int(least.memory / max(least.cpus, 1)), f"{gib(least.memory)} of {least.host} for {least.cpus:g} processes"


# --- a model's shape ----------------------------------------------------------------------------------


def _shape(model: str | Path | Mapping[str, Any]) -> Shape:
    if isinstance(model, Mapping):
        counted, config = None, model
    else:
        folder = Path(resolve(model))
        if not (folder / "config.json").is_file():
            expected = "a local folder with config.json, or a config as a mapping"
            raise SettingError(f"model {str(model)!r}", expected=expected, do="download the model first")
        counted, config = _in_files(folder), json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        layers, vocabulary = int(config["num_hidden_layers"]), int(config["vocab_size"])
    except KeyError as error:
        expected = "hidden_size, num_hidden_layers, num_attention_heads, vocab_size"
        raise SettingError(f"config of model {str(model)[:80]!r}", expected=expected, found=f"no {error}") from error
    kv, width = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or hidden // heads)
    # a Llama-like decoder: attention, a gated MLP (each expert's), norms, embeddings (twice where untied)
    attention = 2 * hidden * heads * width + 2 * hidden * kv * width
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 1)
    inner = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden)
    body = layers * (attention + 3 * hidden * inner * experts + 2 * hidden) + hidden
    by_config = body + vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    source = "counted in the weights' headers" if counted else "estimated from the config"
    return Shape(counted or by_config, layers, hidden, kv, width, vocabulary, source)


def _in_files(folder: Path) -> int:
    """Parameters by the headers of safetensors files; 0 where there are none."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            require(length < 100 << 20, path.name, expected="a header below 100 MiB", found=f"{length} bytes")
            header = json.loads(file.read(length))
        total += sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
    return total
