"""Settings of an engine in this process."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.config import Settings, require


@dataclass(frozen=True, kw_only=True)
class LocalSettings(Settings):
    """Settings of a local engine."""

    lr: float = 1e-6
    """AdamW learning rate."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """AdamW betas."""
    weight_decay: float = 0.01
    """AdamW weight decay."""
    grad_clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    schedule: str = "constant"
    """`constant` or `cosine` (needs total_steps)."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    total_steps: int | None = None
    """Optimizer steps of the whole schedule."""
    micro_batch_tokens: int = 16_384
    """Token budget of one forward pass: memory only."""
    max_wave: int = 256
    """Rows that are sampled together at most."""
    gradient_checkpointing: bool = False
    """Recompute activations on the way back: less memory, more time."""
    pack: str = "auto"
    """Padding-free rows: `yes`, `no`, or `auto` (with flash attention only: sdpa pays for the whole pack's square)."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    dtype: str = "auto"
    """`float32`, `bfloat16`, or `auto` (autocast to bfloat16 on a GPU, weights stay float32)."""
    attn_implementation: str | None = None
    """Passed to transformers."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    lora_rank: int = 0
    """Rank of LoRA adapters, the base being frozen; 0: all weights learn."""
    lora_alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapters."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the layers that get adapters."""

    def __post_init__(self) -> None:
        require(self.lr >= 0, "lr", expected="≥ 0", found=self.lr)
        require(self.schedule in ("constant", "cosine"), "schedule", expected="constant or cosine", found=self.schedule)
        require(self.pack in ("auto", "yes", "no"), "pack", expected="auto, yes or no", found=self.pack)
        require(self.micro_batch_tokens > 0, "micro_batch_tokens", expected="≥ 1", found=self.micro_batch_tokens)
        require(self.max_wave > 0, "max_wave", expected="≥ 1", found=self.max_wave)
        needs_total = self.schedule == "cosine" and not self.total_steps
        require(not needs_total, "total_steps", expected="a number with schedule='cosine'", found=self.total_steps)
