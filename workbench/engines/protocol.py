"""Protocols of engines: Sampler, LogProbModel and Learner, their plain values, and what only some engines can do.

A *Sampler* turns prompt ids into response ids. A *LogProbModel* scores given tokens. A *Learner* changes weights. A frozen
reference is a LogProbModel, a critic a Learner whose outputs are values. Stages know these protocols and nothing else.

What only some engines can do is a protocol of its own at the end of this file, tested with `isinstance`, never by a method's
name. Since Python 3.12 `isinstance` looks at a class and an object's own attributes, not at `__getattr__`: an object that
represents another engine (a pair, a recorded step's learner) must have the names itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch

from workbench.base import runtime
from workbench.base.config import Settings, require
from workbench.base.metrics import Metric
from workbench.dataproto.core import DataProto


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How to sample one response: what its tokens are chosen from, and when to stop.

    Whatever limits or penalises the choice, the recorded log-probs are those of the policy: the full softmax of
    logits / `temperature`. `min_p`, `top_k` and `top_p` apply in this order, after penalties and temperature, as in vLLM.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    min_p: float = 0.0
    """Keep the tokens that are at least this share as likely as the likeliest one; 0 keeps all. https://arxiv.org/abs/2407.01082"""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that are in the prompt or the response so far, and multiplies negative ones; 1: none.
    https://arxiv.org/abs/1909.05858"""
    max_tokens: int = 128
    """Longest response, in tokens (EOS counts)."""
    min_tokens: int = 0
    """EOS and `stop_token_ids` are not sampled before the response has this many tokens, and stop texts in them do not count."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; the text itself is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the response, with `ignore_eos` too; the token itself is kept."""
    ignore_eos: bool = False
    """Go on after EOS, up to `max_tokens`."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of `response_text`, which rewards read; False keeps them, EOS too."""

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature", expected="a number ≥ 0", found=self.temperature)
        require(0 < self.top_p <= 1, "top_p", expected="a number in (0, 1]", found=self.top_p)
        require(self.top_k == -1 or self.top_k > 0, "top_k", expected="-1 (all) or ≥ 1", found=self.top_k)
        require(0 <= self.min_p <= 1, "min_p", expected="a number in [0, 1]", found=self.min_p)
        penalty = self.repetition_penalty
        require(penalty > 0, "repetition_penalty", expected="a number > 0 (1: none)", found=penalty)
        require(self.max_tokens > 0, "max_tokens", expected="≥ 1", found=self.max_tokens)
        least = f"0 to max_tokens, {self.max_tokens}"
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", expected=least, found=self.min_tokens)

    @property
    def filters(self) -> bool:
        """Whether `top_p`, `top_k` or `min_p` exclude tokens from sampling."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def alters(self) -> bool:
        """Whether `repetition_penalty` or `min_tokens` change the logits that tokens are chosen by."""
        return self.repetition_penalty != 1 or self.min_tokens > 0

    def within(self, room: int) -> Self:
        """These settings with `max_tokens` of at most `room` (≥ 1), and `min_tokens` of at most that."""
        most = min(self.max_tokens, room)
        return self.replace(max_tokens=most, min_tokens=min(self.min_tokens, most))


@dataclass(frozen=True)
class Request:
    """A request for one response to one prompt."""

    ids: tuple[int, ...]
    """Prompt token ids, no padding."""
    settings: SamplingSettings
    seed: int
    """Seed of this response alone; see `seeds.derive`."""
    pixels: Mapping[str, torch.Tensor] | None = field(default=None, compare=False)
    """What a `Multimodal` sampler's model reads of the prompt's pictures, by the names of its inputs."""
    tops: int = 0
    """How many of the likeliest tokens are wanted beside each token (`Sample.tops`)."""
    schema: str | None = None
    """JSON schema, as JSON text, that the response must follow where the sampler is one that `Constrains`; None: any text.
    Its log-probs remain those of the policy."""
    listen: Callable[[int], None] | None = field(default=None, compare=False, repr=False)
    """Called with each token as it is sampled, in a thread of the sampler's, where that is one that `Streams`."""


@dataclass(frozen=True)
class Sample:
    """One response as token ids; nothing is re-tokenised on the way."""

    ids: tuple[int, ...]
    """Response token ids, EOS included where the model wrote it."""
    log_probs: tuple[float, ...]
    """Log-prob of each token in nats, under logits / temperature, before anything limits or penalises the choice (greedy:
    temperature 1)."""
    finish_reason: str
    """`stop` (EOS or a stop text), `length` or `abort`."""
    version: int
    """Policy version of the weights that it was sampled with; where they changed on the way, those of its first token."""
    versions: tuple[int, ...] = ()
    """Policy version of each token, where the weights changed on the way; else empty."""
    experts: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """[S + T, L, k] int16: the experts that the layers' routers chose for each token of prompt and response, -1 where not known."""
    times: tuple[float, float] | None = field(default=None, compare=False, repr=False)
    """When work on it began and when its first token was there, in seconds since the epoch; None where nobody says."""
    tops: tuple[Mapping[int, float], ...] = field(default=(), compare=False, repr=False)
    """Where `Request.tops` wants them: at each token the likeliest and their log-probs, as in `log_probs`; else empty."""


@runtime_checkable
class Sampler(Protocol):
    """Samples responses to prompts, one request at a time."""

    @property
    def version(self) -> int:
        """Policy version: how many updates the weights have seen."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer (transformers' interface), chat template included."""

    async def sample(self, request: Request) -> Sample:
        """Sample one response; concurrent calls may be batched."""


@dataclass(frozen=True)
class Completion:
    """A chat model's answer, and the prompt that the model was given."""

    text: str
    prompt: str = ""
    """The text that the model was given, chat template included; empty where a service does not return it."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens of the answer."""
    finish_reason: str = "stop"


@runtime_checkable
class ChatModel(Protocol):
    """Answers chat messages with text: an LLM judge's engine, in this process or behind HTTP."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, or None where this process has none."""

    async def complete(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int, temperature: float, seed: int
    ) -> Completion:
        """Answer a chat's messages; may be called concurrently."""

    def describe(self) -> str:
        """Name of the model and of the place where it runs, for a record."""


@dataclass(frozen=True)
class Classified:
    """A sequence classifier's score of one text."""

    value: float
    """The scalar, before any activation."""
    tokens: int
    """Length of the text in tokens."""


@runtime_checkable
class Classifier(Protocol):
    """Scores a text with one scalar: a reward model's engine."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, or None where this process has none."""

    async def classify(self, text: str) -> Classified:
        """Score one text; concurrent calls may be batched."""

    def describe(self) -> str:
        """Name of the model and of the place where it runs, for a record."""


@runtime_checkable
class LogProbModel(Protocol):
    """Scores given tokens: log-probs, entropies and, of a critic, values."""

    def compute_log_probs(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Score the response tokens of a batch: each of `want` as [B, T] float32 on the CPU, 0 where `response_mask` is 0.

        `want` names outputs out of `log_probs`, `entropy`, `sum_pi_squared`, `values`. Reads `input_ids, attention_mask,
        position_ids, response_mask` of the batch, and of one with pictures (`Multimodal`) its `multi_modal_inputs`.
        """


@dataclass(frozen=True)
class LossCounts:
    """Counts over a whole mini-batch. Losses are divided by them, so that micro-batches and ranks do not change the sum."""

    tokens: float
    """Response tokens that are trained on: neither rejected nor of rows without a score."""
    sequences: float
    """Rows with at least one response token."""
    width: float | None = None
    """T of the mini-batch: what `seq-mean-token-sum-norm` divides by, whatever a micro-batch is trimmed to."""
    rows: float | None = None
    """Rows with a score, those without a token to learn from included: what TRL divides by."""


@dataclass(frozen=True)
class LossOutput:
    """A loss function's results for one micro-batch: the loss, metrics and columns."""

    loss: torch.Tensor
    """A scalar with gradient, divided by the mini-batch's `LossCounts`: losses of micro-batches are summed."""
    metrics: Mapping[str, Metric | float] = field(default_factory=dict)
    """Numbers may be tensors on the device (`Sum(loss.detach())`): `.item()` would make the host wait for each micro-batch."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Detached [b, T] tensors to keep per row, e.g. `new_log_probs`, `clipped`."""


class Loss(Protocol):
    """Protocol of a loss function that an update stage passes to a learner."""

    @property
    def want(self) -> tuple[str, ...]:
        """Names of the model outputs that the loss needs: out of `log_probs`, `entropy`, `values`."""

    def __call__(self, outputs: Mapping[str, torch.Tensor], rows: DataProto, loss_counts: LossCounts) -> LossOutput:
        """Loss of a micro-batch of b rows: `outputs` are [b, T] with gradient, `rows` on the same device."""


@dataclass(frozen=True)
class StepResult:
    """Metrics and columns of one optimizer step or one probe."""

    metrics: Mapping[str, Metric | float]
    """The loss's metrics over the mini-batch, and `grad_norm`, `lr`, `loss`."""
    columns: Mapping[str, torch.Tensor]
    """The loss's columns over the mini-batch, [B, T] on the CPU, in the rows' order."""


class SnapshotCost(NamedTuple):
    """The price of keeping a learner's present state: memory, disk space, or updates to repeat."""

    memory: int = 0
    """Bytes of this process's memory."""
    disk: int = 0
    """Bytes on the disk, of all ranks together."""
    updates: int = 0
    """Updates that going back will do again."""
    folder: str | None = None
    """Where the bytes on the disk go, whatever folder is asked for; None: there."""


@runtime_checkable
class Snapshot(Protocol):
    """A learner's saved state: weights, optimizer, schedule and version; `snapshot["weights"]` are tensors by name."""

    @property
    def state_id(self) -> str:
        """Unique name of the exact weights and optimizer state."""

    @property
    def version(self) -> int:
        """Policy version of the weights."""

    @property
    def kind(self) -> str:
        """Where the state is held: `memory`, `disk`, `memory and disk`, or `replay`."""

    @property
    def nbytes(self) -> int:
        """Bytes of this process's memory that the snapshot holds, including those that it shares with other snapshots."""

    def tensors(self) -> Mapping[int, torch.Tensor]:
        """The snapshot's tensors in this process's memory, by address, so that tensors shared by several snapshots can
        be counted once."""

    def on_disk(self) -> Mapping[Any, int]:
        """Sizes in bytes of the files written for the snapshot, by a key for each, so that files shared by several
        snapshots can be counted once."""

    def __getitem__(self, name: str) -> Any:
        """Return `weights` (tensors by name), `version`, `state_id` or `steps`."""


@runtime_checkable
class Learner(Protocol):
    """Trains a model: owns its weights, optimizer and learning-rate schedule."""

    @property
    def version(self) -> int:
        """Policy version: rises by one with each `commit`."""

    @property
    def state_id(self) -> str:
        """Unique name of the exact weights and optimizer state; it changes with every optimizer step."""

    def learn(self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0) -> StepResult:
        """Take one optimizer step on one mini-batch; its micro-batches save memory and change no result.

        Raises `NonFinite`, with the weights unchanged, where the loss or the gradient norm is NaN or infinite.
        """

    def commit(self) -> int:
        """End an update stage: the policy version rises by one and is returned."""

    def probe(
        self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0, per_row: bool = False
    ) -> StepResult:
        """Compute loss and gradient norm without an optimizer step; `per_row=True` adds a column `row_grad_norm` [B]."""

    def snapshot(self, kind: str = "", folder: str | Path | None = None) -> Snapshot:
        """Return the present state, for `restore`; tensors that did not change since the last snapshot are shared with
        it.

        `kind` says where it is held: `memory`; `disk`, in a file in `folder`; or `replay`, which stores the updates
        since the last snapshot, to be done again by `restore`. Without a kind it can be read, too
        (`snapshot["weights"]`). A learner with a single way ignores it.
        """

    def restore(self, snapshot: Any) -> None:
        """Restore weights, optimizer, schedule and version of a snapshot, bit for bit."""

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder with weights, configuration and tokenizer."""

    def save_state(self, path: Path) -> None:
        """Write what a resume needs beside the weights: optimizer, schedule and version. No pickle."""

    def load_state(self, model_path: Path, state_path: Path) -> None:
        """Load the weights that `save` wrote and the optimizer state that `save_state` wrote."""

    def reference(self) -> LogProbModel:
        """Return the present weights as a frozen model that only scores log-probs."""


class Critic(Learner, LogProbModel, Protocol):
    """A learner with a value head: `compute_log_probs(…, want=("values",))`."""


class Engine(Sampler, Learner, LogProbModel, Protocol):
    """What a recipe trains: it samples responses, computes log-probs and learns, as `engines.local` and `engines.fsdp` do."""

    def critic(self, *, lr: float) -> Critic:
        """Return a copy of the present model with a value head, trained at this learning rate."""


# --- what only some engines can do --------------------------------------------------------------


@runtime_checkable
class Stateful(Protocol):
    """Protocol of models whose exact state has a name: every learner, no frozen model."""

    @property
    def state_id(self) -> str:
        """Unique name of the exact weights and optimizer state; it changes with every optimizer step."""


@runtime_checkable
class Losable(Protocol):
    """Protocol of learners whose weights are in worker processes that may die (FSDP); steppers then restore the weights
    from a snapshot."""

    @property
    def lost(self) -> bool | None:
        """Whether the processes that held the weights are gone; None where there are no such processes."""


@runtime_checkable
class Late(Protocol):
    """Protocol of engines that load their model only when it is first used (a replayed step's learner)."""

    @property
    def opened(self) -> bool:
        """Whether the model is loaded."""


@runtime_checkable
class Differentiable(Protocol):
    """Protocol of learners that return gradients and can shift their weights (local, FSDP): for `stages.Influence`."""

    def gradient(
        self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Compute the gradient of the loss by parameter name; no step is taken and nothing is clipped."""

    def perturbed(self, direction: Mapping[str, torch.Tensor], scale: float) -> AbstractContextManager[None]:
        """Context manager: moves the weights by `scale`·`direction`, and restores them bit for bit at the end."""


@runtime_checkable
class WholeDistributions(Protocol):
    """Protocol of learners that compare whole next-token distributions (local, FSDP): for `stages.ExactKL`."""

    def full_kl(self, batch: DataProto, reference: Any, temperature: float = 1.0) -> torch.Tensor:
        """Compute the exact KL(policy‖reference) of each response token, [B, T] in nats; the reference is a
        `WholeModel`."""


@runtime_checkable
class WholeModel(Protocol):
    """Protocol of a frozen transformers model (the reference of a local or FSDP engine), for `stages.ExactKL`."""

    def model(self) -> AbstractContextManager[Any]:
        """Context manager: yields the frozen transformers model."""


@runtime_checkable
class GivesTops(Protocol):
    """Protocol of models that give their likeliest next tokens (a local engine, its reference): for
    `stages.TeacherLogProb`."""

    def top_log_probs(self, batch: DataProto, k: int, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Score a batch: `log_probs` [B, T] of its response tokens, and at each place the k likeliest tokens, `top_ids`
        [B, T, k] int64, and their `top_log_probs`, in nats."""


@runtime_checkable
class WholeTeacher(Protocol):
    """Protocol of frozen models that give whole next-token distributions (the reference of a local engine), for
    `stages.Divergence`."""

    def distributions(self, rows: DataProto, temperature: float = 1.0) -> Callable[[slice], torch.Tensor]:
        """Run the model over a micro-batch, and return a function. The function takes a slice of the micro-batch's N
        response tokens, in the rows' order, and returns the log-probs of every next token, [n, V] float32, which the
        caller overwrites."""


@runtime_checkable
class Estimates(Protocol):
    """Protocol of learners that estimate their memory and checkpoint size (local, FSDP), for the checks before a run."""

    def memory_needed(self, tokens: int | None = None, measured: bool = False) -> tuple[torch.device, dict[str, int]]:
        """Return the device, and how many bytes learning will allocate there beyond those in use now, by part.

        `tokens` is the size of a mini-batch, padding included; None means a full micro-batch. The numbers are estimated
        from the model's sizes. With `measured` they come from a short rehearsal (`engines.rehearsal`, some seconds), or
        from the estimate where a rehearsal is not possible.
        """

    def memory_free(self) -> int:
        """Bytes that can still be allocated on the learner's device, of the process that has the least; memory that
        torch has cached for reuse counts as free."""

    def checkpoint_bytes(self) -> int:
        """Bytes that one checkpoint takes on the disk: weights and optimizer."""

    def snapshot_cost(self, kind: str = "memory") -> SnapshotCost:
        """Return what a snapshot of this kind would take at most now."""


@runtime_checkable
class FromFiles(Protocol):
    """Protocol of learners and frozen models that know whether their weights are those of files (local, FSDP)."""

    def as_loaded(self) -> bool:
        """Whether opening the model's path again would give exactly the present state: nothing was learned or loaded,
        and the files have not changed."""


@runtime_checkable
class Adjustable(Protocol):
    """Protocol of models whose settings of memory and time can be changed for a trial while they are open (local, FSDP,
    their references)."""

    def trying(self, **changes: Any) -> AbstractContextManager[None]:
        """Context manager: inside it the model computes with other settings; weights and optimizer moments stay as they
        are."""


@runtime_checkable
class Tunable(Adjustable, Protocol):
    """Protocol of adjustable learners that measure their peak memory, for `tune`."""

    def peaks(self, begin: bool = False) -> dict[str, int]:
        """Peak memory in bytes since the last call with `begin=True`.

        `host` is the memory of all the learner's processes together, `device` that of tensors on the fullest GPU, and
        `total` the GPU's size.
        """


@runtime_checkable
class WeightSource(Protocol):
    """Protocol of learners that return their weights as tensors (local, FSDP), to push them to a sampler."""

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights by Hugging Face names, copied to the CPU: LoRA adapters are merged, and a tied output
        layer appears under both of its names."""


@runtime_checkable
class WeightSink(Sampler, Protocol):
    """Protocol of samplers that take weights from a learner (local, vLLM, a server, workers): for `engines.paired`."""

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> Any:
        """Load all weights of a model, given by their Hugging Face names; later samples carry the policy `version`."""


@runtime_checkable
class Restartable(Protocol):
    """Protocol of samplers in a process that may die (vLLM, a server, workers); pairs and replicas restart it."""

    @property
    def starts(self) -> int:
        """How often the sampler's process was started; a new process lacks the weights that were pushed to the old one."""

    def restart(self) -> None:
        """Start a new process with the weights in the model's folder, whatever state the old one is in."""


@runtime_checkable
class Sleeper(Protocol):
    """Protocol of samplers that can free their device memory (vLLM, workers): for a pair with `share_device`."""

    def sleep(self, level: int = 1) -> None:
        """Free the device memory, until `wake()`: level 1 keeps the weights in host memory, level 2 drops them."""

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the device memory again after `sleep()`: all of it, or with `tags` only that of `weights` or
        `kv_cache`."""


@runtime_checkable
class Caching(Protocol):
    """Protocol of learners whose torch keeps freed device memory for later (local, FSDP)."""

    def empty_cache(self) -> None:
        """Free the device memory that torch has cached, on every rank, because a sampler on the same device needs it."""


@runtime_checkable
class Lagging(Protocol):
    """Protocol of samplers that may serve weights older than the learner's (a remote server)."""

    @property
    def stale(self) -> bool:
        """Whether rows may be sampled with weights older than the learner's."""


@runtime_checkable
class Pairable(Protocol):
    """Protocol of samplers that may refuse to be paired with a learner; `paired` calls `check_paired` first."""

    def check_paired(self) -> None:
        """Raise `EngineError` where the sampler cannot be paired with a learner."""


@runtime_checkable
class Renewable(Protocol):
    """Protocol of samplers that take new weights between two tokens of the responses under way (local), for streamed
    rollouts."""

    sharing: bool
    """Whether sampling lets other work of this process in between two tokens."""

    def between_tokens(self) -> AbstractContextManager[None]:
        """Context manager: inside it no token is sampled. Responses under way go on after it, with the weights that are
        there then."""


class WeightPin(Protocol):
    """Protocol of weights kept in a sampler while the learner trains on, so that a whole batch is sampled with the same
    weights."""

    version: int
    """Policy version of the weights."""

    def drawing(self) -> AbstractContextManager[None]:
        """Context manager: inside it the engine samples with these weights."""

    def release(self) -> None:
        """Let the sampler take the learner's weights again; calling it twice does nothing more."""


@runtime_checkable
class PinnedWeights(Protocol):
    """Protocol of engines that can sample with weights older than the learner's (a pair): for pipelined rollout."""

    share_device: bool
    """Whether the sampler sleeps while the learner works: then no weights can be held."""

    @property
    def version(self) -> int:
        """Policy version: how many updates the weights that are sampled with have seen."""

    @property
    def sampler(self) -> Sampler:
        """The engine that samples."""

    def hold(self) -> WeightPin:
        """Keep the present weights in the sampler until `Pin.release()`."""


@runtime_checkable
class Closable(Protocol):
    """Protocol of engines with processes, files or connections to close; whoever opened one closes it."""

    def close(self) -> None:
        """End the engine's processes and free its files and connections; may be called twice."""


@runtime_checkable
class Described(Protocol):
    """Protocol of objects that describe themselves for a run's record (every engine here)."""

    def describe(self) -> Any:
        """Return path and settings by name for a run's record; for the engine of an LLM judge or reward model, one
        text."""


@runtime_checkable
class Located(Protocol):
    """Protocol of engines that know their model's folder or hub name; rollouts write it to the batch for viewers."""

    @property
    def path(self) -> str:
        """The model's folder or hub name, as it was given."""


@runtime_checkable
class Bounded(Protocol):
    """Protocol of samplers with a limit on the sequence length, for the checks before a run."""

    @property
    def max_length(self) -> int | None:
        """Longest prompt and response together, in tokens; None where the limit is not known."""


@runtime_checkable
class Constrains(Protocol):
    """Protocol of samplers that can constrain a response to a JSON schema (`Request.schema`)."""

    def check_schema(self, schema: str) -> None:
        """Raise `SettingError` or `EngineError` where responses cannot be constrained to this schema, a JSON text."""


@runtime_checkable
class Streams(Protocol):
    """Protocol of samplers that can report tokens while they are sampled (`Request.listen`)."""

    streams: bool
    """Whether it does."""


@runtime_checkable
class Templated(Protocol):
    """Protocol of samplers with extra arguments for their chat template; code that turns chats into prompts reads them."""

    @property
    def template_switches(self) -> Mapping[str, Any]:
        """Further arguments of the chat template, such as `enable_thinking`."""


@runtime_checkable
class Multimodal(Protocol):
    """Protocol of samplers whose model may read pictures (local); rows with pictures are refused for all others."""

    def processor(self) -> Any:
        """Return the processor that encodes a text with its pictures; None where the model reads text alone.

        It has `tokenizer`, `image_processor`, `token_id` (the token that stands for a picture's features) and
        `encode(text, images)`, which returns token ids and the model's inputs for the pictures.
        """


def processor_of(sampler: object) -> Any:
    """Return the processor of a `Multimodal` sampler; None for a sampler that reads text alone."""
    return sampler.processor() if isinstance(sampler, Multimodal) else None


def switches_of(sampler: object) -> dict[str, Any]:
    """Return a sampler's extra chat template arguments (`Templated`); empty where it has none."""
    return dict(sampler.template_switches) if isinstance(sampler, Templated) else {}


# --- shared implementations ---------------------------------------------------------------------


def new_id() -> str:
    """Make a unique name for a state of the weights: twelve hex digits."""
    return uuid.uuid4().hex[:12]


class SampleMany:
    """Base class of samplers: adds `sample_many`, which runs `sample` for many requests at once and waits for all."""

    def sample_many(self: Any, requests: Sequence[Request]) -> list[Sample]:
        """Sample all requests at once and wait; responses in order. For callers without an event loop."""
        return runtime.run_all(self.sample, requests)


class Closing:
    """Base class of context managers: the object is closed by its `close()` at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self: Any, *raised: object) -> None:
        self.close()
