"""Settings of the local and the FSDP engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.base.config import Settings, require


@dataclass(frozen=True, kw_only=True)
class LocalSettings(Settings):
    """Settings of a local engine: optimizer and schedule, memory, device and LoRA."""

    lr: float = 1e-6
    """AdamW learning rate."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """AdamW betas."""
    weight_decay: float = 0.01
    """AdamW weight decay."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    schedule: Literal["constant", "cosine"] = "constant"
    """`constant` or `cosine` (needs total_steps)."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    total_steps: int | None = None
    """Optimizer steps of the whole schedule."""
    micro_batch_tokens: int | None = None
    """Token budget of one forward pass, which changes memory and rounding alone; None: 16,384 on a GPU, 4,096 on the CPU, where
    more is no faster."""
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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`float32`, `bfloat16`, or `auto` (autocast to bfloat16 on a GPU, weights stay float32)."""
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
        """The settings for a run's record, by name; the newer ones only where they are in use, as in records of before."""
        newer = ("routing_replay", "mesh")
        return {name: one for name, one in self.to_dict().items() if name not in newer or one}

    def half(self, device: str) -> bool:
        """Whether forward passes on a kind of device run in bfloat16: as `dtype` says; with `auto` on a GPU only."""
        return self.dtype == "bfloat16" or (self.dtype == "auto" and device == "cuda")

    def budget(self, device: str) -> int:
        """Tokens of one forward pass on a kind of device, as `micro_batch_tokens` says."""
        return self.micro_batch_tokens or (4_096 if device == "cpu" else 16_384)

    def __post_init__(self) -> None:
        require(self.lr >= 0, "lr", expected="≥ 0", found=self.lr)
        least = self.micro_batch_tokens is None or self.micro_batch_tokens > 0
        require(least, "micro_batch_tokens", expected="≥ 1, or None", found=self.micro_batch_tokens)
        require(self.max_wave > 0, "max_wave", expected="≥ 1", found=self.max_wave)
        needs_total = self.schedule == "cosine" and not self.total_steps
        require(not needs_total, "total_steps with schedule='cosine'", expected="a number ≥ 1", found=self.total_steps)


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
        limit = self.deadline
        require(limit is None or limit > 0, "deadline", expected="seconds > 0, or None", found=limit)
        require(self.group_deadline > 0, "group_deadline", expected="seconds > 0", found=self.group_deadline)
        require(self.save_deadline > 0, "save_deadline", expected="seconds > 0", found=self.save_deadline)
