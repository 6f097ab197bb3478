"""Whether a placement fits: the memory of each process in each phase of a step, before anything starts.

`Cluster.place` starts what is measured, a `Placement`. What learning and scoring take is measured on the learner's
own code without its weights (`engines.rehearsal`). The phases take turns, so that a process needs the most of any of
them, not their sum; while the learner works, colocated vLLM sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from workbench.base.config import Settings, require
from workbench.base.errors import SettingError, unknown
from workbench.base.memory import gib
from workbench.base.progress import working
from workbench.base.shown import Shown
from workbench.cluster.pools import Node
from workbench.engines.fsdp_engine.meshes import ranks_of
from workbench.engines.local_engine.memory import pass_size
from workbench.engines.rehearsal import PACKED, Footprint, Shape, config_of, language, sharded, unmeasured
from workbench.engines.settings import FsdpSettings, LocalSettings, VllmSettings

CPU_RANKS = 2
"""Ranks of a learner where the cluster has no GPU and `ranks` is not given."""
ALONE = 0.9
"""`gpu_memory_utilization` of a sampler in a pool of its own."""
SAMPLERS: dict[str | None, type[Settings]] = {"vllm": VllmSettings, "local": LocalSettings}
"""Engines that can sample for a placed learner, and their settings."""


@dataclass(frozen=True)
class Placement:
    """How a model is placed: the learner's settings and ranks, and its samplers, whether they share the learner's
    devices or not.
    """

    learner: Any
    """`FsdpSettings`, or `LocalSettings` of one engine in one process, which `Cluster.place` does not start."""
    ranks: int
    gpus: bool
    """Whether each process has a GPU."""
    sampler: str | None = "vllm"
    tensor_parallel_size: int = 1
    apart: bool = False
    """Whether the samplers have a separate pool."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the sampler that the caller passed."""

    def __post_init__(self) -> None:
        tp, expected = self.tensor_parallel_size, "sampler='vllm'"
        if self.sampler is not None and self.sampler not in SAMPLERS:
            raise SettingError(unknown("sampler", self.sampler, tuple(filter(None, SAMPLERS))))
        require(tp > 0, "argument tensor_parallel_size", expected="≥ 1", found=tp)
        require(tp == 1 or self.sampler == "vllm", f"tensor_parallel_size={tp}", expected=expected, found=self.sampler)

    @property
    def alone(self) -> bool:
        """Whether the learner is a local engine, in one process."""
        return not isinstance(self.learner, FsdpSettings)

    @property
    def shared(self) -> bool:
        """Whether learner and samplers take turns on the same GPUs; the samplers then sleep while the learner works."""
        return self.gpus and not self.apart and self.sampler is not None

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings of the samplers: defaults of this placement, replaced by those that were passed."""
        usual: dict[str, Any] = {}
        if self.sampler == "vllm":
            usual = {"tensor_parallel_size": self.tensor_parallel_size, "sleep_mode": self.shared}
            usual |= {"gpu_memory_utilization": ALONE} if self.gpus and self.apart else {}
        return usual | dict(self.given)

    @property
    def sampler_settings(self) -> Any:
        """`sampling` as `VllmSettings` or `LocalSettings`; None without samplers."""
        return None if self.sampler is None else SAMPLERS[self.sampler].from_parameters(self.sampling)


def spread(there: Sequence[Node], size: int | None, gpus: int) -> list[int]:
    """Choose how many processes to put on each node, filling the nodes with most room first; returns the counts.

    `size=None` uses all GPUs, or without GPUs (`gpus=0`) `CPU_RANKS` processes. `gpus` is the number for each process.
    """
    room = [int(min(one.free_gpus // gpus, one.free_cpus) if gpus else one.free_cpus) for one in there]
    left = size if size is not None else sum(room) if gpus else min(CPU_RANKS, sum(room))
    counts: list[int] = []
    for free in sorted(room, reverse=True):
        if (taken := min(free, left)) > 0:
            counts.append(taken)
            left -= taken
    counts = counts or [0]
    counts[-1] += left  # more than there is: refused by the plan, in its words
    return counts if counts != [0] else [1]


# --- whether it fits --------------------------------------------------------------------------------

SHARE = 0.9
"""Share of a process's memory that a plan may use; the rest is for the GPU's context, buffers and fragments."""
PROCESS = 420 << 20
"""Bytes that Python, torch and transformers take in a process on the CPU, measured."""
GRAPHS = 2 << 30
"""Approximate bytes of vLLM's share that hold activations and compiled graphs."""
CPU_CACHE = 256 << 20
"""Bytes of vLLM's KV cache on a CPU, where the settings do not give them."""
GROUP = 8
"""Sequences that a local engine without a sampler beside it must have cache for: a group."""


@dataclass(frozen=True)
class MemoryPart:
    """The bytes of one kind of data (`what`: weights, gradients, KV cache …) of one role in a process."""

    role: str
    what: str
    size: int


@dataclass(frozen=True)
class MemoryPhase:
    """The most that one process holds in a phase of a step: `sample`, `score` or `learn`."""

    name: str
    parts: tuple[MemoryPart, ...]

    @property
    def size(self) -> int:
        """The bytes of all parts together."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Choice:
    """Another way to place the model: which arguments of `Cluster.place` to change, what that costs and how much it
    saves.
    """

    name: str
    arguments: Mapping[str, Any]
    cost: str
    """What the choice costs, as text (`about +30 % time of learning`)."""
    saved: int
    """Bytes that the choice saves in the fullest phase."""
    fits: bool


@dataclass(frozen=True, repr=False)
class Fit(Shown):
    """The memory of each process of a placement, by phase, and the memory that a process has; `bool(fit)` says whether
    it fits.
    """

    model: str | Path | Mapping[str, Any]
    asked: Mapping[str, Any]
    """The arguments of `fits`, without the model."""
    placement: Placement
    parameters: int
    phases: tuple[MemoryPhase, ...]
    available: int
    """Bytes of memory that one process has."""
    source: str
    """Where the number in `available` comes from, as text."""
    cached: int | None
    """Tokens that fit into a sampler's KV cache; None where that is not known before the start."""

    @property
    def name(self) -> str:
        """The model's path, or for a config its model type."""
        return str(self.model.get("model_type", "a config") if isinstance(self.model, Mapping) else self.model)

    @property
    def needed(self) -> int:
        """Bytes of memory that one process needs in its fullest phase."""
        return max(phase.size for phase in self.phases)

    @property
    def fits(self) -> bool:
        """Whether `needed` leaves a tenth of `available`, and the sampler's cache holds one sequence."""
        return self.needed <= SHARE * self.available and (self.cached is None or self.cached >= self.asked["tokens"])

    def __bool__(self) -> bool:
        return self.fits

    def _with(self, **changes: Any) -> Fit:
        return fits(self.model, **{**self.asked, **changes})

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """What each further setting that saves memory would save on its own; measured at the first access."""
        choices = []
        for name, arguments, cost in _further(self):
            other = self._with(**arguments)
            choices.append(Choice(name, arguments, cost, self.needed - other.needed, other.fits))
        return tuple(choices)

    @cached_property
    def proposal(self) -> Mapping[str, Any] | None:
        """Further arguments of `Cluster.place` with which the model fits: {} where it fits already, None where no known
        setting helps.
        """
        changes: dict[str, Any] = {}
        fit = self
        for _, arguments, _ in [("", {}, ""), *_further(self)]:
            changes |= arguments
            fit = self._with(**changes)
            if not fit and (share := fit.share) is not None:
                given = {**(fit.asked.get("sampler_settings") or {}), "gpu_memory_utilization": share}
                if other := self._with(**changes, sampler_settings=given):
                    changes, fit = {**changes, "sampler_settings": given}, other
            if fit:
                return changes
        return None

    @property
    def share(self) -> float | None:
        """The `gpu_memory_utilization` of a colocated vLLM that leaves the learner what it needs; None for other
        samplers.
        """
        if not self.placement.shared or self.placement.sampler != "vllm":
            return None
        held = next(phase for phase in self.phases if phase.name == "sample")
        beside = sum(part.size for part in held.parts if part.role != "sampler")
        return max(math.floor((SHARE - beside / self.available) * 20) / 20, 0.05)

    @property
    def advice(self) -> str:
        """The call of `Cluster.place`, or of a local engine, with which the model fits, to paste; "" where there is none."""
        if self.proposal is None:
            return ""
        if self.placement.alone:
            chosen = {**self.asked, **self.proposal}
            usual = LocalSettings().to_dict()
            mine = {name: chosen[name] for name, one in usual.items() if chosen.get(name, one) != one}
            engine = _call("local", self.name, mine)
            its = _call("vllm", self.name, chosen.get("sampler_settings") or {})
            return f"wb.engines.paired({engine}, {its})" if self.placement.sampler == "vllm" else engine
        kept = {name: one for name, one in self.asked.items() if name not in _NOT_PLACED and one is not None}
        options = "".join(f", {name}={one!r}" for name, one in {**kept, **self.proposal}.items())
        return f"c.place({self.name!r}{options})"


def _call(engine: str, path: str, settings: Mapping[str, Any]) -> str:
    return f"wb.engines.{engine}({path!r}{''.join(f', {name}={value!r}' for name, value in settings.items())})"


_NOT_PLACED = ("tokens", "nodes", "gpus", "memory", "reference", "critic", "learner")
"""Arguments of `fits` that `Cluster.place` does not have, or need not be told."""


Saving = tuple[str, dict[str, Any], str]
"""Name, arguments of `fits`, and cost in words of a setting that saves memory."""


def _further(fit: Fit) -> Iterator[Saving]:
    """Yield the settings that can save memory and are not set yet, the cheapest first."""
    settings, alone, gpus = fit.placement.learner, fit.placement.alone, fit.placement.gpus
    kind, length = "cuda" if gpus else "cpu", fit.asked["tokens"]
    if settings.budget(kind) > length:
        yield "micro-batches of one sequence", {"micro_batch_tokens": length}, "more, smaller passes"
    if not settings.gradient_checkpointing:
        yield "gradient checkpointing", {"gradient_checkpointing": True}, "about +30 % time of learning"
    if gpus and alone and not settings.lora_rank and settings.optimizer == "adamw":
        yield "moments in 8 bits", {"optimizer": "adamw8bit"}, "coarser moments; the extra `bits`"
    if gpus and settings.offload == "none":
        yield "moments in host memory", {"offload": "optimizer"}, "two copies of them over the bus a step"
    if gpus and not alone and settings.offload != "all":
        yield "all weights in host memory", {"offload": "all"}, "the step on the CPU: slow"
    yield from _adapters(settings, alone, alone and settings.half(kind))


def _adapters(settings: Any, alone: bool, halves: bool) -> Iterator[Saving]:
    lora = {"lora_rank": settings.lora_rank or 32, "offload": "none", **({"optimizer": "adamw"} if alone else {})}
    half = {"base_dtype": settings.precision("cuda")} if halves else {}
    if not settings.lora_rank:
        yield "adapter (LoRA r=32)", {**lora, **half}, "trains adapters alone"
    elif half and settings.base_dtype == "float32":
        yield "base in half precision", half, "none: products round it so already"
    for name in PACKED if alone and settings.base_dtype not in PACKED else ():
        yield f"adapter on a base in {name}", {**lora, "base_dtype": name}, "a rounded base"


@working("fits")
def fits(
    model: str | Path | Mapping[str, Any],
    *,
    tokens: int,
    nodes: Sequence[Node] = (),
    gpus: int = 0,
    memory: int | None = None,
    reference: bool = True,
    critic: bool = False,
    learner: str = "fsdp",
    ranks: int | None = None,
    sampler: str | None = "vllm",
    tensor_parallel_size: int = 1,
    rollout: str | None = None,
    sampler_settings: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Fit:
    """Measure, without weights, whether a model fits a placement: `wb.cluster.fits("my-7b", gpus=8, memory=80 << 30,
    tokens=4096)`.

    `model` is a folder, a hub name, or a config as a mapping. `tokens` is the length of one sequence, prompt and
    response. `gpus` is the number of GPUs, where there are no `nodes` (`c.fits` passes its own). `memory` is the bytes
    of one process; None means those of this machine's GPU, or without GPUs a node's memory divided by its CPUs.
    `reference` and `critic` say whether the recipe has these models in addition to the policy. All other arguments are
    those of `Cluster.place`, with its defaults. `learner="local"` is `engines.local(model, **settings)` in one process,
    estimated in a second, with `sampler="vllm"` on the same GPU or, with None, sampling itself.

    Raises `SettingError` for settings that `place` refuses, or where the memory of a GPU is not known; `EngineError`
    where the model cannot be measured.
    """
    require(tokens > 1, "argument tokens", expected="≥ 2, prompt and response together", found=tokens)
    arguments = {name: value for name, value in locals().items() if name not in ("model", "settings")} | settings
    live = [node for node in nodes if node.alive] or [Node("", "", "", True, gpus or 1, gpus, gpus or 1, gpus, 0)]
    there = any(node.gpus for node in live)
    whole = [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in live]
    for name in ("replicas", "pool", "threads", "scratch", "template_switches"):
        settings.pop(name, None)  # no matter of memory
    require(learner in ("fsdp", "local"), "argument learner", expected="'fsdp' or 'local'", found=repr(learner))
    chosen: Any = (LocalSettings if learner == "local" else FsdpSettings).from_parameters(settings)
    size = 1 if learner == "local" else ranks_of(chosen.mesh, ranks) or sum(spread(whole, None, int(there)))
    placed = Placement(chosen, size, there, sampler, tensor_parallel_size, rollout is not None, sampler_settings or {})
    have, source = (memory, "as given") if memory is not None else _memory(live if nodes else (), there)
    phases, parameters, cached = _phases(model, placed, tokens, have, reference, critic)
    return Fit(model, arguments, placed, parameters, phases, have, source, cached)


def _phases(
    model: Any, placement: Placement, tokens: int, have: int, reference: bool, critic: bool
) -> tuple[tuple[MemoryPhase, ...], int, int | None]:
    """Compute (the phases of a step with their bytes, the number of parameters, the tokens that a sampler's cache
    holds).
    """
    settings, budget = placement.learner, placement.learner.budget("cuda" if placement.gpus else "cpu")
    policy = _footprint(model, placement, settings, budget, tokens)
    room = (have - policy.weights - policy.gradients - policy.optimizer) // 2
    if settings.micro_batch_tokens is None and policy.activations > room:  # as the ranks' `pass_tokens`
        budget = pass_size(budget, policy.activations, room)
        settings = settings.replace(micro_batch_tokens=budget)
        policy = _footprint(model, placement, settings, budget, tokens)
    config, settings = config_of(model, settings)
    runtime = [] if placement.gpus else [MemoryPart("process", "Python and torch", PROCESS)]
    beside = list(runtime)
    if reference and not settings.lora_rank:
        beside.append(MemoryPart("reference", "weights", policy.weights))
    held = [*beside, *_held("policy", policy)]
    learn = [*beside, *_learning("policy", policy)]
    score = [*held, MemoryPart("policy", "activations", policy.scoring - policy.weights - policy.optimizer)]
    if critic:
        values = _footprint(model, placement, settings, budget, tokens, head=True)
        turns = [[*_held("policy", policy), *_learning("critic", values)], [*learn, *_held("critic", values)]]
        learn = max(([*beside, *turns[0]], turns[1]), key=lambda parts: sum(part.size for part in parts))
        score, held = [*score, *_held("critic", values)], [*held, *_held("critic", values)]
    room = int(SHARE * have) - sum(part.size for part in held) - policy.casts
    sampling, cached = _sampling(placement, config, policy, have, tokens, room)
    phases = [MemoryPhase("score", tuple(score)), MemoryPhase("learn", tuple(learn))]
    if sampling:
        beside_it = held if placement.shared or placement.sampler is None else runtime
        phases.insert(0, MemoryPhase("sample", (*beside_it, *sampling)))
    return tuple(phases), policy.parameters, cached


def _footprint(
    model: Any, placement: Placement, settings: Any, budget: int, tokens: int, head: bool = False
) -> Footprint:
    if placement.alone:
        return unmeasured(model, settings, max(budget, tokens), "cuda" if placement.gpus else "cpu")
    return sharded(model, settings, placement.ranks, Shape.of(budget, tokens), gpu=placement.gpus, head=head)


def _held(role: str, found: Footprint) -> list[MemoryPart]:
    return [MemoryPart(role, "weights", found.weights), MemoryPart(role, "optimizer", found.optimizer)]


def _learning(role: str, found: Footprint) -> list[MemoryPart]:
    more = [MemoryPart(role, "gradients", found.gradients), MemoryPart(role, "activations", found.activations)]
    return [*_held(role, found), *more]


def _sampling(
    placement: Placement, config: Mapping[str, Any], policy: Footprint, have: int, tokens: int, room: int
) -> tuple[list[MemoryPart], int | None]:
    """Compute (the parts that a sampler holds, the tokens of its cache). vLLM's cache is what its share leaves after
    weights and graphs; a local engine that samples itself has `room` bytes, and needs those of a group.
    """
    if placement.sampler is None and not placement.alone:
        return [], None
    if placement.sampler is None:
        token = _cached_token(language(config), 1) * (2 if policy.casts else 4)
        group = MemoryPart("policy", "KV cache", GROUP * tokens * token)
        parts = [MemoryPart("policy", "casts of weights", policy.casts), group]
        return parts, max(room, 0) // token if token else None
    chosen, tp = placement.sampler_settings, placement.tensor_parallel_size if placement.gpus else 1
    if placement.sampler == "local":
        return [MemoryPart("sampler", "weights", 4 * policy.parameters)], None
    width = 4 if chosen.dtype == "float32" or (chosen.dtype == "auto" and not placement.gpus) else 2
    weights = policy.parameters * width // tp
    cache = (chosen.kv_cache_memory_mb or 0) << 20
    if not cache:
        cache = int(chosen.gpu_memory_utilization * have) - weights - GRAPHS if placement.gpus else CPU_CACHE
    graphs = [MemoryPart("sampler", "graphs", GRAPHS)] if placement.gpus else []
    parts = [MemoryPart("sampler", "weights", weights), *graphs, MemoryPart("sampler", "KV cache", max(cache, 0))]
    token = _cached_token(language(config), tp) * width
    return parts, max(cache, 0) // token if token else None


def _cached_token(text: Mapping[str, Any], tp: int) -> int:
    """Count the numbers that one process caches for a token: keys and values of its heads in each layer; 0 where the
    config lacks them.
    """
    layers, heads, hidden = (text.get(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (layers and heads and hidden):
        return 0
    keys, width = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    return int(2 * layers * math.ceil(keys / tp) * width)


def _memory(nodes: Sequence[Node], gpus: bool) -> tuple[int, str]:
    if gpus and torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        return int(card.total_memory), f"of this machine's {card.name}"
    if gpus:
        found = "None: Ray does not report a GPU's memory"
        raise SettingError("argument memory", expected="bytes of one GPU", found=found, do="pass memory=80 << 30")
    if not nodes:
        raise SettingError("argument memory", expected="bytes of one process", found="None, and no node that is alive")
    least = min(nodes, key=lambda node: node.memory / max(node.cpus, 1))
    return int(least.memory / max(least.cpus, 1)), f"{gib(least.memory)} of {least.host} for {least.cpus:g} processes"
