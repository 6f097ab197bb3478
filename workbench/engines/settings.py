"""Settings of the local, the FSDP and the vLLM engine, and what vLLM calls them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from workbench.base.config import Settings, require
from workbench.base.errors import SettingError

_MEBI = 1 << 20
_HALVES = ("bfloat16", "float16")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""
_OURS = {
    "model": "the first argument", "dtype": "the setting dtype", "max_model_len": "the setting max_model_len",
    "tensor_parallel_size": "the setting tensor_parallel_size", "gpu_memory_utilization": "the setting gpu_memory_utilization",
    "kv_cache_memory_bytes": "the setting kv_cache_memory_mb", "enforce_eager": "the setting enforce_eager",
    "max_num_seqs": "the setting max_num_seqs", "enable_sleep_mode": "the setting sleep_mode", "enable_lora": "the setting lora_rank",
    "max_lora_rank": "the setting lora_rank", "trust_remote_code": "the setting trust_remote_code", "logprobs_mode": "", "generation_config": "",
    "seed": "",
}  # fmt: skip
"""Arguments of vLLM's engine that workbench sets, and by which setting; the others go through `engine_args`."""


@dataclass(frozen=True, kw_only=True)
class LocalSettings(Settings):
    """Settings of a local engine: optimizer and schedule, memory, device and LoRA."""

    lr: float = 1e-6
    """AdamW learning rate."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """AdamW betas."""
    weight_decay: float = 0.01
    """AdamW weight decay."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps the moments in 8 bits, a quarter of the memory: bitsandbytes' (the extra `bits`). It rounds otherwise."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """`constant`; or `cosine` or `linear`, which go down to 0 and need total_steps."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    total_steps: int | None = None
    """Optimizer steps of the whole schedule."""
    micro_batch_tokens: int | None = None
    """Token budget of one forward pass, which changes memory and rounding alone. None: as many as half of the free memory holds the
    activations of, at most 16,384 on a GPU, and on a CPU 4,096 or 0.75 GiB of activations, where more is no faster."""
    max_wave: int = 256
    """Most rows that are sampled together."""
    decode: Literal["auto", "lean", "shared prompts", "own cache", "no cache"] = "auto"
    """How to sample: `shared prompts` attends each prompt once, `lean` also leaves out the modules of a Llama-shaped model; `auto`:
    the first that the self-check proves. Each rounds in its own way."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    offload: Literal["none", "optimizer"] = "none"
    """`optimizer` keeps Adam's moments in host memory; a step brings those of one parameter at a time to its device. The weights
    are the same bit for bit. On the CPU it saves nothing."""
    pack: Literal["auto", "yes", "no"] = "auto"
    """Rows without padding, and what they have in common (a group's prompt, earlier turns) once: `auto` where that is proven to
    give the model's own numbers, `yes` to refuse the model where it is not, `no` for padded rows. Float32 rounds otherwise."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What forward passes are cast to; weights stay float32. `auto`: bfloat16 on a GPU, float16 on one without it (below sm_80: T4,
    V100), float32 on a CPU. With `float16` the loss is scaled while it learns (metric `loss_scale`)."""
    base_dtype: Literal["float32", "bfloat16", "float16", "nf4", "int8"] = "float32"
    """How frozen matrices are kept, those of a LoRA base and of a reference: `bfloat16` or `float16` takes half the memory, makes
    `dtype="auto"` the same on a CPU, too, and gives that `dtype`'s numbers, whose products round weights so. `nf4` (4.5 bits a
    weight) and `int8` (8 bits) round the weights of a LoRA base (QLoRA). Embeddings stay float32, a separate output head as `dtype`."""
    check_memory: bool = True
    """Refuse to learn where that is measured to take more memory than is free; False: try it."""
    attn_implementation: str | None = None
    """Passed to transformers (`sdpa`, `flash_attention_2` …)."""
    head: Literal["auto", "linear", "model"] = "auto"
    """How logits are made: `linear` from the last hidden states (fast), `model` by the model's own forward, or `auto` (the first
    that the self-check proves)."""
    routing_replay: bool = False
    """Of a mixture of experts: return the experts that its routers choose when it samples (column `routed_experts`), and use those
    of the rows, where they have them, to score and to learn."""
    self_check: bool = True
    """Compare every way of computing with the model's own forward on a few tokens at load, and use none that differs."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora_rank: int = 0
    """Rank of LoRA adapters on a frozen base; 0 trains all weights."""
    lora_alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapters."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the layers that get adapters."""

    def recorded(self) -> dict[str, Any]:
        """Return the settings by name for a run's record. Newer settings are left out unless they are in use, so that
        records compare with those of earlier releases."""
        newer = {"routing_replay": False, "mesh": None, "base_dtype": "float32", "optimizer": "adamw"}
        return {name: one for name, one in self.to_dict().items() if name not in newer or one != newer[name]}

    def precision(self, device: str) -> str:
        """The dtype of forward passes on a kind of device (`cpu`, `cuda`): `float32`, `bfloat16` or `float16`, from
        `dtype` and `base_dtype`; with `auto` on a GPU, what its compute capability supports.
        """
        asked = next((one for one in (self.dtype, self.base_dtype) if one in _HALVES), "float32")
        if self.dtype != "auto" or asked != "float32" or device != "cuda":
            return asked
        # `is_bf16_supported` is true of cards that emulate it; a card that is only planned for has it
        old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
        return "float16" if old else "bfloat16"

    def half(self, device: str) -> bool:
        """Whether forward passes on a kind of device (`cpu`, `cuda`) run in bfloat16 or float16 (see `precision`)."""
        return self.precision(device) != "float32"

    def budget(self, device: str) -> int:
        """Token budget of one forward pass on a kind of device (`cpu`, `cuda`): `micro_batch_tokens`, or the largest
        default."""
        return self.micro_batch_tokens or (4_096 if device == "cpu" else 16_384)

    def __post_init__(self) -> None:
        require(self.lr >= 0, "lr", expected="≥ 0", found=self.lr)
        least = self.micro_batch_tokens is None or self.micro_batch_tokens > 0
        require(least, "micro_batch_tokens", expected="≥ 1, or None", found=self.micro_batch_tokens)
        require(self.max_wave > 0, "max_wave", expected="≥ 1", found=self.max_wave)
        apart = self.base_dtype in _HALVES and self.dtype not in ("auto", self.base_dtype)
        expected = f"dtype 'auto' or {self.base_dtype!r}"
        require(not apart, f"base_dtype={self.base_dtype!r}", expected=expected, found=self.dtype)
        needs_total = self.schedule != "constant" and not self.total_steps
        what = f"total_steps with schedule={self.schedule!r}"
        require(not needs_total, what, expected="a number ≥ 1", found=self.total_steps)


@dataclass(frozen=True, kw_only=True)
class FsdpSettings(LocalSettings):
    """Settings of an FSDP engine: those of a local engine (`max_wave` has no effect), and sharding, offload and saving."""

    offload: Literal["none", "optimizer", "all"] = "none"  # type: ignore[assignment]
    """What is kept in host memory: `none`, `optimizer` (Adam's moments between steps), or `all` (weights, gradients and
    moments; the step is done on the CPU)."""
    mesh: dict[str, int] | None = field(default=None, hash=False)
    """How the ranks are laid out: `{"replicate": 1, "dp": 2, "cp": 1, "tp": 2}`, whose product is the number of ranks, and `ep`, which
    divides dp·cp. `dp` shards the weights (FSDP), `replicate` copies all shards (HSDP), `tp` cuts tensors, `cp` sequences; `ep`
    spreads experts. None: `dp` over all ranks."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward, and gather them again in the backward: less memory, more traffic."""
    deadline: float | None = None
    """Seconds that any one call on the ranks may take; after that the group is ended, and the error has each rank's stack. None:
    half an hour, and once such calls have been made ten times their median, at least 30 s."""
    group_deadline: float = 3600.0
    """Seconds that a rank waits for another inside torch: longer than rank 0 takes to read the weights while the others wait."""
    save_deadline: float = 600.0
    """Seconds that a sharded save may take; after that nothing of it is published."""
    failed_save: Literal["raise", "warn"] = "raise"
    """A background save (`wait=False`) that failed is raised by the next call (`raise`), or logged (`warn`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.base_dtype == "float32", "base_dtype of an FSDP engine", expected="'float32'", found=self.base_dtype
        )
        require(self.optimizer == "adamw", "optimizer of an FSDP engine", expected="'adamw'", found=self.optimizer)
        limit = self.deadline
        require(limit is None or limit > 0, "deadline", expected="seconds > 0, or None", found=limit)
        require(self.group_deadline > 0, "group_deadline", expected="seconds > 0", found=self.group_deadline)
        require(self.save_deadline > 0, "save_deadline", expected="seconds > 0", found=self.save_deadline)


@dataclass(frozen=True, kw_only=True)
class VllmSettings(Settings):
    """Settings of `engines.vllm` and `engines.vllm_classifier`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`float32`, `bfloat16`, `float16`, or `auto` (float32 on a CPU; on a GPU the model's own, float16 where it has no bfloat16)."""
    max_model_len: int | None = None
    """Longest prompt and response together, in tokens; None: the model's own limit."""
    tensor_parallel_size: int = 1
    """GPUs (on a CPU: processes) that share one model."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU's memory for weights and cache, beside a learner; `Cluster.place` and `serve` take 0.9 where vLLM is alone."""
    kv_cache_memory_mb: int | None = None
    """MiB of key-value cache; None: by `gpu_memory_utilization`, on a CPU 256."""
    enforce_eager: bool | None = None
    """True: no compiled graphs, which is slower on a GPU and starts sooner. None: True on a CPU only."""
    max_num_seqs: int = 256
    """Rows that are sampled together at most."""
    multiprocess: bool | None = None
    """True: scheduler and model run in a process beside the one that answers. None: True on a GPU only."""
    sleep_mode: bool | None = None
    """Whether `sleep()` can give the GPU's memory back. None: True where this process sees one GPU alone, which a pair then shares."""
    lora_rank: int = 0
    """Largest rank of LoRA adapters that are pushed alone, over the base in the model's folder; 0: merged weights are pushed."""
    seeds: Literal["rows", "engine"] = "rows"
    """`rows`: each request has a random generator of its own, so that a row can be sampled again alone; on a GPU that is one kernel a
    row and token. `engine`: one for all, one kernel a token; a row then depends on those that were sampled beside and before it."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """vLLM's own engine arguments by its names (`max_num_batched_tokens`, `quantization` …), passed through."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    python: str | None = None
    """Interpreter that has vLLM; None: WORKBENCH_VLLM_PYTHON, or this one."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for its processes, over ours and the defaults."""
    start_seconds: float = 900.0
    """Longest time to start: compiling a large model takes minutes."""
    stall_seconds: float = 300.0
    """A process that should work and reports nothing for so long counts as dead."""

    @property
    def sleeps(self) -> bool:
        """Whether vLLM is started so that it can sleep: `sleep_mode`, and by default where this process sees one GPU."""
        return torch.cuda.device_count() == 1 if self.sleep_mode is None else self.sleep_mode

    def __post_init__(self) -> None:
        require(self.max_model_len is None or self.max_model_len > 1, "max_model_len", expected="≥ 2", found=self.max_model_len)  # fmt: skip
        require(self.tensor_parallel_size > 0, "tensor_parallel_size", expected="≥ 1", found=self.tensor_parallel_size)
        share = self.gpu_memory_utilization
        require(0 < share <= 1, "gpu_memory_utilization", expected="a share in (0, 1]", found=share)
        require(self.max_num_seqs > 0, "max_num_seqs", expected="≥ 1", found=self.max_num_seqs)
        rank = self.lora_rank
        require(0 <= rank <= _LORA_RANKS[-1], "lora_rank", expected="0 to 512, vLLM's largest", found=rank)
        ours = sorted(set(self.engine_args) & (set(_OURS) | {"worker_extension_cls", "disable_log_stats", "runner"}))
        if ours:
            instead = [f"{name}: {_OURS.get(name) or 'set by workbench'}" for name in ours]
            expected = "arguments that workbench does not set"
            raise SettingError("engine_args", expected=expected, found="; ".join(instead))


def arguments_of(folder: str | Path, s: VllmSettings) -> dict[str, Any]:
    """Build the arguments of vLLM's engine on a GPU from the settings."""
    rank = next(one for one in _LORA_RANKS if one >= s.lora_rank)
    return {
        "model": str(folder),
        "dtype": s.dtype,
        "max_model_len": s.max_model_len,
        "tensor_parallel_size": s.tensor_parallel_size,
        "gpu_memory_utilization": s.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if s.kv_cache_memory_mb is None else s.kv_cache_memory_mb * _MEBI,
        "enforce_eager": bool(s.enforce_eager),
        "max_num_seqs": s.max_num_seqs,
        "enable_sleep_mode": s.sleeps,
        "trust_remote_code": s.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # each request says which ids end a response
        "seed": 0,
        **({"enable_lora": True, "max_lora_rank": rank} if s.lora_rank else {}),
        **s.engine_args,
    }


def on_cpu_of(s: VllmSettings) -> dict[str, Any]:
    """Build the arguments of vLLM's engine that replace those of `arguments_of` on a CPU."""
    return {
        "dtype": "float32" if s.dtype == "auto" else s.dtype,
        "enforce_eager": True if s.enforce_eager is None else s.enforce_eager,
        "kv_cache_memory_bytes": (s.kv_cache_memory_mb or 256) * _MEBI,
        "enable_sleep_mode": False,
        # a seeded request whose prompt is read in two pieces kills 0.32's CPU engine ("CPU Generator does not use offset")
        "enable_chunked_prefill": False,
        **s.engine_args,
    }


def environment_of(folder: str | Path, s: VllmSettings) -> dict[str, str]:
    """Build the environment variables to set for vLLM's processes, in addition to this process's own."""
    gpu = torch.cuda.is_available()
    many = gpu if s.multiprocess is None else s.multiprocess
    eager = not gpu if s.enforce_eager is None else s.enforce_eager
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(many)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # 2 alone returns experts; the sampler of 1 gives log-probs before top-k and top-p
        "VLLM_USE_V2_MODEL_RUNNER": str(int(bool(s.engine_args.get("enable_return_routed_experts")))),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its workers must not fight for the same cores
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **({"TORCHDYNAMO_DISABLE": "1"} if eager else {}),  # eager does not cover the sampler
        **({"HF_HUB_OFFLINE": "1"} if Path(folder).is_dir() else {}),
        **s.env,
    }
