"""What an engine promises: three small protocols, and the plain values that cross them.

A *Sampler* turns prompt ids into response ids, one request at a time by contract. A
*LogProbModel* scores given tokens. A *Learner* changes weights. A frozen reference is a
LogProbModel with another model behind it, a critic a Learner whose outputs are values; a
worker group is a way to place an engine. Stages know these protocols and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from workbench.config import Settings, require
from workbench.dataproto import DataProto
from workbench.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How to sample one response."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    max_tokens: int = 128
    """Longest response, in tokens (EOS counts)."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; the text itself is kept."""
    ignore_eos: bool = False
    """Go on after EOS, up to `max_tokens`."""

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", expected="a number ≥ 0", found=self.temperature)
        require(0 < self.top_p <= 1, "top_p", expected="a number in (0, 1]", found=self.top_p)
        require(self.top_k == -1 or self.top_k > 0, "top_k", expected="-1 (all) or ≥ 1", found=self.top_k)
        require(self.max_tokens > 0, "max_tokens", expected="≥ 1", found=self.max_tokens)


@dataclass(frozen=True)
class Request:
    """One response to one prompt."""

    ids: tuple[int, ...]
    """Prompt token ids, no padding."""
    settings: SamplingSettings
    seed: int
    """Seeds this response alone; see `seeds.derive`."""


@dataclass(frozen=True)
class Sample:
    """What came back: token-in-token-out, nothing is ever re-tokenised."""

    ids: tuple[int, ...]
    """Response token ids, EOS included where the model wrote it."""
    log_probs: tuple[float, ...]
    """Log-prob of each of them under the distribution it was drawn from before top-k and top-p
    (logits / temperature; for greedy, temperature 1), in nats."""
    finish_reason: str
    """`stop` (EOS or a stop text), `length` or `abort`."""
    version: int
    """Policy version of the weights that wrote it."""


@runtime_checkable
class Sampler(Protocol):
    """Writes responses."""

    @property
    def version(self) -> int:
        """Policy version: how many updates the weights have seen."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer (transformers' interface), chat template included."""

    async def sample(self, request: Request) -> Sample:
        """One response; many calls at once are gathered into waves."""


@dataclass(frozen=True)
class Completion:
    """What a chat model answered, and what it was really asked."""

    text: str
    prompt: str = ""
    """The text that the model read, template and all; empty where a service keeps it."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Of the answer."""
    finish_reason: str = "stop"


@runtime_checkable
class ChatModel(Protocol):
    """Answers messages with text: a judge's engine, here or behind HTTP."""

    @property
    def tokenizer(self) -> Any:
        """The model's own, or None where it is not here."""

    async def complete(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float, seed: int
    ) -> Completion:
        """One answer; many calls at once are welcome."""

    def describe(self) -> str:
        """Which model, where."""


@dataclass(frozen=True)
class Classified:
    """A sequence classifier's answer."""

    value: float
    """The scalar, before any activation."""
    tokens: int
    """Length of what it read."""


@runtime_checkable
class Classifier(Protocol):
    """A reward model's engine: text → scalar."""

    @property
    def tokenizer(self) -> Any:
        """The model's own, or None where it is not here."""

    async def classify(self, text: str) -> Classified:
        """One scalar; calls that wait together are batched."""

    def describe(self) -> str:
        """Which model, where."""


@runtime_checkable
class LogProbModel(Protocol):
    """Scores given tokens."""

    def score(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Per response token, each [B, T] float32 on CPU, 0 where `response_mask` is 0.

        `want` out of `log_probs`, `entropy`, `sum_pi_squared`, `values`. Reads `input_ids, attention_mask,
        position_ids, response_mask` of the batch.
        """


@dataclass(frozen=True)
class Normalisers:
    """Global counts of one mini-batch, so that micro-batches and ranks cannot change a loss."""

    tokens: float
    """Response tokens that count (Σ response_mask)."""
    sequences: float
    """Rows with at least one such token."""
    width: float | None = None
    """T of the mini-batch: what `seq-mean-token-sum-norm` divides by, whatever a micro-batch is trimmed to."""


@dataclass(frozen=True)
class LossOutput:
    """What a loss function makes of one micro-batch."""

    loss: torch.Tensor
    """A scalar; already divided by the global normalisers, so micro-batches are summed."""
    metrics: Mapping[str, Metric | float] = field(default_factory=dict)
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached [b, T] tensors to keep per row, e.g. `new_log_probs`, `clipped`."""


class Loss(Protocol):
    """The maths of an update, given by the stage."""

    @property
    def want(self) -> tuple[str, ...]:
        """The model outputs it needs: out of `log_probs`, `entropy`, `values`."""

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, normalisers: Normalisers) -> LossOutput:
        """`outputs` carry gradients and are [b, T]; `rows` are the micro-batch's b rows, on the same device."""


@dataclass(frozen=True)
class Learned:
    """What one optimizer step, or a probe, did."""

    metrics: Mapping[str, Metric | float]
    """The loss's metrics joined, and `grad_norm`, `lr`, `loss`."""
    columns: Mapping[str, torch.Tensor]
    """The loss's columns put together again, [B, T] on CPU, in the rows' order."""


@runtime_checkable
class Learner(Protocol):
    """Owns weights, an optimizer and a schedule, and changes them."""

    @property
    def version(self) -> int:
        """Policy version: rises by one when `commit` is called after an update."""

    @property
    def state_id(self) -> str:
        """Names the exact weights and optimizer state; changes with every optimizer step."""

    def learn(self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0) -> Learned:
        """One optimizer step on one mini-batch, cut into micro-batches (memory only).

        Raises `NonFinite`, with the weights unchanged, where the loss or gradient norm is NaN or infinite.
        """

    def commit(self) -> int:
        """An update stage is over: the weights get the next policy version, which is returned."""

    def probe(
        self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0, per_row: bool = False
    ) -> Learned:
        """Loss and gradient norm without a step; `per_row=True` adds a column `row_grad_norm` [B]."""

    def snapshot(self) -> Any:
        """Weights, optimizer, schedule, version, in host memory."""

    def restore(self, snapshot: Any) -> None:
        """Back to a snapshot, exactly."""

    def save(self, path: Path) -> None:
        """A plain Hugging Face folder with weights, config and tokenizer."""

    def save_state(self, path: Path) -> None:
        """Everything that a resume needs beside the weights: optimizer, schedule, version. No pickle."""

    def load_state(self, model_path: Path, state_path: Path) -> None:
        """What `save` and `save_state` wrote, back into this engine."""

    def reference(self) -> LogProbModel:
        """The weights as they are now, frozen."""
