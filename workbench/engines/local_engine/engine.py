"""The local engine: one transformers model in this process, on the CPU or one GPU, that samples, scores and learns.

`ModelEngine` is what it has in common with the FSDP engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch

from workbench.base import runtime
from workbench.base.activity import recorded
from workbench.base.config import shows_settings
from workbench.base.errors import EngineError, SettingError, unknown
from workbench.base.memory import estimated, share_arena
from workbench.base.metrics import Mean
from workbench.base.progress import present, working
from workbench.base.shown import Hinting
from workbench.dataproto.core import DataProto
from workbench.engines.generating import Generates
from workbench.engines.local_engine import loading, lora, memory, quantised, scoring
from workbench.engines.local_engine.caches import OWN_CACHE, SHARED, PicturedRows, cache_of, paths_of
from workbench.engines.local_engine.forward import Head, head_of, replay
from workbench.engines.local_engine.grammar import Grammar
from workbench.engines.local_engine.learning import Optimizer, backward, infinite_norm, learning_mode
from workbench.engines.local_engine.products import weights_laid_out
from workbench.engines.local_engine.sampling import HeldRows, Wave, Waves, casts_kept, decode, forced
from workbench.engines.local_engine.selfcheck import (
    WANT,
    ForcedSampling,
    Row,
    SelfCheck,
    check,
    check_pictures,
    unchecked,
)
from workbench.engines.local_engine.states import (
    LocalSnapshot,
    Rewinding,
    StateFiles,
    hold,
    read_optimizer,
    write_whole,
)
from workbench.engines.protocol import Loss, LossCounts, Request, Sample, SnapshotCost, StepResult, new_id
from workbench.engines.rehearsal import Opened, Shape, whole
from workbench.engines.settings import LocalSettings
from workbench.engines.weights import Entry, Pushing, layout_of

TRIED = ("micro_batch_tokens", "pack", "gradient_checkpointing", "offload")
"""Settings that can be changed while an engine is open: they change memory, time and rounding alone."""
_KINDS = ("log_probs", "entropy", "sum_pi_squared", "values")


class ModelEngine(Rewinding):
    """Base class of `LocalEngine` and `FsdpEngine`; `model` is a transformers model, or one on the meta device."""

    _scored: Callable[..., dict[str, torch.Tensor]]
    """`compute_log_probs`; with `base=True` the LoRA adapters are switched off."""
    _write: Callable[..., None]
    """Writes a model folder (`save`)."""
    tried: tuple[str, ...] = TRIED
    """Settings that can be changed while it is open."""
    as_loaded: Callable[[], bool]
    """Whether the weights are those of the path, as far as is known."""
    _copy: Callable[[], Any]
    """Another engine with the present weights."""
    _twin: Callable[[], Any]
    """Another engine with the present weights that can be moved (`mix`)."""
    _mix: Callable[[Any, float], None]
    """Moves all weights towards those of another engine."""

    def __init__(
        self, model: Any, tokenizer: Any, settings: LocalSettings, *, path: str, head: bool, **switches: Any
    ) -> None:
        self._model = model
        self._settings = settings
        self._critic = head
        self.tokenizer = tokenizer
        self.path = path
        self.template_switches = switches
        self.version = 0
        self.state_id = new_id()
        self.selfcheck = unchecked(model, settings)
        """How the engine computes, and how far that was from the model's own forward on a few tokens when it was opened."""

    def commit(self) -> int:
        """End an update: the policy version rises by one and is returned."""
        self.version += 1
        return self.version

    @property
    def _adapted(self) -> bool:
        return lora.config_in(self._model) is not None

    def compute_log_probs(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Score the response tokens of a batch: each of `want` as [B, T] float32 on the CPU, 0 outside `response_mask`.

        `want` out of `log_probs`, `entropy`, `sum_pi_squared` and, of a critic, `values`. Raises `EngineError` for another
        name, and for token ids that the model does not have.
        """
        return self._scored(batch, want, temperature)

    def _check_want(self, want: Sequence[str]) -> None:
        known = _KINDS if self._critic else _KINDS[:-1]
        if not set(want) <= set(known):
            have = ", ".join(known) + ("" if self._critic else " (values: make an engine.critic())")
            raise EngineError("want of compute_log_probs", expected=f"names out of {have}", found=", ".join(want))

    @contextmanager
    def trying(self, **changes: Any) -> Iterator[None]:
        """Context manager: inside it the engine computes with other values of the settings in `tried`; afterwards the
        old ones hold again.

        Weights and optimizer moments stay as they are. Raises `SettingError` for any other setting, and where the model
        cannot be computed with the new value.
        """
        for name in changes:
            if name not in self.tried:
                raise SettingError(unknown("setting that can be tried", name, self.tried))
        before = self._settings
        try:
            self._apply(before.replace(**changes))
            yield
        finally:
            self._apply(before)

    # --- frozen -----------------------------------------------------------------------------

    def reference(self) -> FrozenModel:
        """Return a frozen model that only scores: a copy of the weights, or with LoRA the base model without a copy."""
        if self._adapted:
            return FrozenModel(self, as_loaded=True, base=True)
        return FrozenModel(self._copy(), as_loaded=self.as_loaded())

    def twin(self) -> Self:
        """Make a second engine with a copy of these weights, such as a reference that follows the policy (`mix`); of a
        sharded engine it is on the same ranks. Raises `EngineError` with LoRA, whose reference is the base model."""
        if self._adapted:
            do = "leave out teacher_sync_steps and ref_sync_steps, which need a twin"
            raise EngineError("twin (copy) of an engine", expected="a model without LoRA", found="LoRA adapters", do=do)
        twin: Self = self._twin()
        return twin

    def mix(self, other: Self, alpha: float) -> None:
        """Move all weights towards those of the engine whose `twin` this is, w ← (1 − α)·w + α·w_other; the version rises
        by one."""
        self._mix(other, alpha)
        self._last = self._since = None
        self.state_id = new_id()
        self.commit()

    # --- weights ----------------------------------------------------------------------------

    def weight_layout(self) -> dict[str, Entry]:
        """Return the shape and dtype of each of the model's tensors by Hugging Face names, as if LoRA adapters were
        merged."""
        return layout_of(self._model)

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder (with LoRA a peft folder); a critic has `value_head.safetensors` beside the weights."""
        self._write(Path(path).absolute(), merged=False)

    def save_merged(self, path: str | Path) -> Path:
        """Write a plain Hugging Face folder with the LoRA adapters merged into the weights, in float32, or over a base kept in
        4 or 8 bits in float16."""
        self._write(Path(path).absolute(), merged=True)
        return Path(path)

    # --- what it is -------------------------------------------------------------------------

    @property
    def max_length(self) -> int | None:
        """Longest sequence that the model takes, in tokens: the smaller of its `max_position_embeddings` and its
        `rope_limit`; None where neither is known."""
        whole = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        return min(filter(None, (whole, loading.rope_limit(self._model))), default=None)

    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint, of all ranks together: weights (with LoRA the adapters alone) and Adam's two moments."""
        sizes = [(one.numel() * one.element_size(), one.requires_grad) for one in self._model.parameters()]
        trained = sum(size for size, changes in sizes if changes)
        moments = memory.moments_of(trained, self._settings)
        return (trained if self._adapted else sum(size for size, _ in sizes)) + moments

    def describe(self) -> dict[str, Any]:
        """Return the model's path and the settings by name, for a run's record."""
        return {"path": self.path, **self._settings.recorded()}

    def _place(self) -> str:
        return str(self._model.device)

    def __repr__(self) -> str:
        kind, size = "critic" if self._critic else "policy", quantised.parameters(self._model)
        what = f"{kind}, {type(self._model).__name__}, {size:,} parameters, {self._place()}"
        return f"{type(self).__name__}({self.path!r}: {what}, version {self.version}; {self.selfcheck})"


class FrozenModel:
    """A frozen reference model that only scores log-probs: a copy of an engine's weights, or its LoRA base."""

    def __init__(self, engine: ModelEngine, *, as_loaded: bool = False, base: bool = False) -> None:
        self._engine, self.save = engine, engine.save
        self._as_loaded, self._base = as_loaded, base

    def describe(self) -> dict[str, Any]:
        """Return the model's path and settings by name, and under `as_loaded` whether its weights are still those of
        the files at the path."""
        return {**self._engine.describe(), **({"lora_rank": 0} if self._base else {}), "as_loaded": self._as_loaded}

    def as_loaded(self) -> bool:
        """Whether the files at the model's path hold these weights; where they do not, `save` must write them to a
        folder of their own."""
        return self._as_loaded

    @property
    def packed(self) -> bool:
        """Whether rows go through the model without padding (see `scoring.packs`)."""
        return scoring.packs(self._engine._model, self._engine._settings)

    def trying(self, **changes: Any) -> AbstractContextManager[None]:
        """Context manager: inside it the model computes with other settings of memory and time (see
        `ModelEngine.trying`)."""
        return self._engine.trying(**changes)

    @contextmanager
    def model(self) -> Iterator[Any]:
        """Context manager: yields the transformers model; with LoRA the adapters are switched off inside."""
        with lora.switched_off(self._engine._model) if self._base else nullcontext():
            yield self._engine._model

    def compute_log_probs(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Score the response tokens of a batch with the frozen weights: each of `want` as [B, T] float32 on the CPU."""
        return self._engine._scored(batch, want, temperature, self._base)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def template_switches(self) -> Mapping[str, Any]:
        """Further arguments of the chat template."""
        return dict(self._engine.template_switches)

    def top_log_probs(self, batch: DataProto, k: int, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Score a batch with the frozen weights, as `LocalEngine.top_log_probs`. Raises `EngineError` for a sharded model."""
        return self._whole().top_log_probs(batch, k, temperature, base=self._base)

    def distributions(self, rows: DataProto, temperature: float = 1.0) -> Callable[[slice], torch.Tensor]:
        """Run the frozen model over a micro-batch, and return a function: of a slice of its N response tokens, in the rows'
        order, the log-probs of every next token, [n, V] float32. Raises `EngineError` for a sharded model."""
        self._whole()
        with self.model() as model, torch.no_grad():
            way: Any = scoring.layout(model, rows, scoring.packs(model, self._engine._settings, rows))
            states = way.spread.each(way.states(model, head_of(model)))
        space = states.new_empty(0, dtype=torch.float32)

        def log_probs(at: slice) -> torch.Tensor:
            nonlocal space
            with self.model() as model, torch.no_grad():
                logits = head_of(model).logits(states[at])
                logits = logits if temperature == 1 else logits / temperature
                if len(space) < len(logits):
                    space = torch.empty_like(logits)
                return torch.log_softmax(logits, -1, out=space[: len(logits)])

        return log_probs

    def _whole(self) -> LocalEngine:
        if isinstance(self._engine, LocalEngine):
            return self._engine
        do = "open the teacher by engines.local(…), or take estimator='sampled'"
        raise EngineError("all log-probs of a teacher", expected="a local engine", found=self._engine, do=do)

    def __repr__(self) -> str:
        return f"FrozenModel({self._engine!r})"


_SHARED: WeakValueDictionary[tuple[Any, ...], FrozenModel] = WeakValueDictionary()
"""Frozen models that have the weights of their files, by folder, its files' stamps, and settings: who asks for one again gets it."""


def shared_reference(path: str, settings: LocalSettings) -> FrozenModel | None:
    """The frozen model with a folder's own weights that is open in this process, if one is."""
    return _SHARED.get(_as_in_files(path, settings))


def _as_in_files(path: str, settings: LocalSettings) -> tuple[Any, ...]:
    """Return the key in `_SHARED` of a frozen model with the weights that the folder's files have now."""
    return path, tuple(loading.stamps(path)), settings


class LocalEngine(ModelEngine, Pushing, Generates, Hinting):
    """Samples, scores and trains one transformers model in this process, on the CPU or one GPU; made by `local`.

    It is a `Sampler`, a `LogProbModel` and a `Learner` of `engines.protocol`.
    """

    tried = (*TRIED, "dtype")
    streams = True
    elsewhere: ClassVar = {
        "save_pretrained": "call engine.save(path)",
        "push_to_hub": "publish a run's model: run.publish(name)",
        "to": "choose the device when it is opened: wb.engines.local(path, device=…)",
        "train": "train it: run = await wb.train(wb.recipes.grpo(engine), rows, steps=…)",
        "eval": "score its answers: wb.evaluate(engine, rows, reward)",
        "chat": "talk to it: wb.chat(engine); ask it once: engine.generate(text)",
    }
    _files = StateFiles(())
    """The files that the weights were loaded from."""
    _source: str | None = None
    """The folder whose files the weights were loaded from; None where they were loaded or copied from elsewhere since."""
    _stamps: Sequence[tuple[int, int]] = ()
    """Of those files then."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: LocalSettings,
        *,
        path: str = "",
        head: Any = None,
        checked: SelfCheck | None = None,
        **switches: Any,
    ) -> None:
        super().__init__(model, tokenizer, settings, path=path, head=head is not None, **switches)
        self._head = head
        self.selfcheck = checked or self.selfcheck
        self._optimizer: Optimizer | None = None
        self._waves = Waves(self._decode, settings.max_wave, "workbench-sampler")
        self._processor: loading.Processor | None = None
        self._pictured = Waves(self._decode, settings.max_wave, "workbench-pictures")
        self._eos = loading.eos_ids_of(
            getattr(model, "generation_config", None), model.config.get_text_config(), model.config, tokenizer
        )
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable()

    # --- Sampler ----------------------------------------------------------------------------

    @recorded
    async def sample(self, request: Request) -> Sample:
        """Sample one response. Concurrent requests are decoded as one batch; each returns as soon as its response ends.

        Raises `EngineError` for a prompt without tokens, or with token ids that the model does not have, and after a push of
        weights that broke off.
        """
        self.check_weights()
        count = self._model.get_input_embeddings().num_embeddings
        ids = (*request.ids, *request.settings.stop_token_ids)
        if not request.ids or not 0 <= min(ids) <= max(ids) < count:
            found = f"ids from {min(ids)} to {max(ids)}" if request.ids else "no token"
            what, expected = "the prompt or the stop_token_ids of a request", f"token ids from 0 to {count - 1}"
            raise EngineError(what, expected=expected, found=found)
        loading.check_length(self._model, len(request.ids) + request.settings.max_tokens)
        if request.schema is not None:
            self.check_schema(request.schema)
        return await (self._waves if request.pixels is None else self._pictured).ask(request)

    def check_schema(self, schema: str) -> None:
        """Raise `EngineError` without xgrammar, and `SettingError` for a JSON schema that it cannot read."""
        Grammar(schema, self.tokenizer, self._model.get_input_embeddings().num_embeddings, self._eos)

    def processor(self) -> loading.Processor | None:
        """The model's `Processor` for pictures; None where the model reads text alone, or where the self-check found
        that pictures are computed wrongly."""
        return self._processor

    @runtime.in_turn
    def _decode(self, wave: Wave[Request, Sample]) -> None:
        shape = f"{len(wave.questions)} rows of {max(len(request.ids) for request in wave.questions)} prompt tokens"
        self._model.eval()
        budget, pictured = self._budget, wave.questions[0].pixels is not None
        path = self.selfcheck.paths.decode or (OWN_CACHE if self._settings.decode == "auto" else self._settings.decode)
        if self._settings.routing_replay and path != SHARED:
            expected = f"decode={SHARED!r}, proven by the self-check: open the engine with decode='auto'"
            raise EngineError("sampling with routing_replay", expected=expected, found=path)
        tokens = max(request.settings.max_tokens for request in wave.questions)
        rows, going = HeldRows(self._eos, self.tokenizer, self._model.get_input_embeddings().num_embeddings), True
        while going:
            state, version = self.state_id, self.version
            caching: Any = cache_of(self._model, path, budget)
            if pictured:
                caching = nullcontext(PicturedRows(self._model, wave.questions))
            with (
                memory.memory_errors("sampling", shape, "max_wave", self._live),
                self._autocast(),
                casts_kept(self._model),
                weights_laid_out(self._model, len(wave.questions), tokens),
                caching as cache,
            ):
                given = (version, self._settings.max_wave, partial(self._still, state))
                pauses = (lambda: False) if pictured else partial(self._let_in, state)
                going = decode(cache, rows, wave, *given, pauses)

    def cards(self) -> list[str]:
        """Name of the GPU that the engine computes on, as a list of one text; the text is empty for a CPU."""
        device = self._model.device
        return [torch.cuda.get_device_name(device) if device.type == "cuda" else ""]

    # --- LogProbModel -----------------------------------------------------------------------

    @runtime.in_turn
    def _scored(
        self,
        batch: DataProto,
        want: Sequence[str],
        temperature: float,
        base: bool = False,
        compare: scoring.Compare | None = None,
    ) -> dict[str, torch.Tensor]:
        self._check_want([one for one in want if compare is None or one != "compared"])
        scoring.check_ids(self._model, batch)
        self._model.eval()
        guard = memory.memory_errors("scoring", f"micro-batches of {self._budget} tokens", holds=self._live)
        with guard, self._autocast(), lora.switched_off(self._model) if base else nullcontext():
            packed = self._packs(batch)
            found = self._outputs(want, temperature, packed, compare)
            return scoring.collect(self._passes(batch, packed), found, batch, want)

    def top_log_probs(
        self, batch: DataProto, k: int, temperature: float = 1.0, base: bool = False
    ) -> dict[str, torch.Tensor]:
        """Score a batch: `log_probs` [B, T], and at each place the k likeliest tokens, `top_ids`
        and `top_log_probs` [B, T, k]. With `base` LoRA adapters
        are switched off. Raises `EngineError` where there are not so many tokens."""

        def likeliest(rows: DataProto, temperature: float) -> Callable[[torch.Tensor, slice], torch.Tensor]:
            def tops(logits: torch.Tensor, at: slice) -> torch.Tensor:
                found = torch.log_softmax(logits.float(), -1).topk(k)
                return torch.cat([found.values, found.indices.float()], -1)  # exact below 2^24

            return tops

        size = self._model.get_input_embeddings().num_embeddings
        if k > size:
            raise EngineError("top_k of the teacher", expected=f"at most {size}, its vocabulary", found=k)
        found = self._scored(batch, ("log_probs", "compared"), temperature, base, likeliest)
        values, ids = found["compared"].split(k, -1)
        return {"log_probs": found["log_probs"], "top_log_probs": values.contiguous(), "top_ids": ids.long()}

    @runtime.in_turn
    def full_kl(self, batch: DataProto, reference: FrozenModel, temperature: float = 1.0) -> torch.Tensor:
        """Compute the exact KL(policy‖reference) of each response token, [B, T] in nats, over the whole vocabulary. It
        takes one forward pass of each model."""
        scoring.check_ids(self._model, batch)
        self._model.eval()

        packed = self._packs(batch) and reference.packed
        mine = head_of(self._model)

        def their_logits(states: torch.Tensor) -> torch.Tensor:
            with reference.model() as other:
                return head_of(other).logits(states)

        def found(rows: DataProto) -> dict[str, torch.Tensor]:
            way = scoring.layout(self._model, rows, packed)
            states = way.states(self._model, mine)
            with reference.model() as other:
                theirs = scoring.layout(other, rows, packed).states(other, head_of(other))
            return scoring.divergence(way, mine, (states, theirs), their_logits, temperature)

        guard = memory.memory_errors("the exact KL", f"micro-batches of {self._budget} tokens", holds=self._live)
        with guard, self._autocast():  # the very distributions that log-probs are of
            return scoring.collect(self._passes(batch, packed), found, batch, ("kl",))["kl"]

    # --- Learner ----------------------------------------------------------------------------

    @runtime.in_turn
    def learn(self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0) -> StepResult:
        """Take one optimizer step on one mini-batch. Raises `NonFinite`, weights unchanged, for a NaN or infinite loss."""
        optimizer = self._ready(batch)
        optimizer.zero()  # an interrupt may have left gradients of a step that was not taken
        rng = self._rng()
        learned = self._backward(batch, loss, loss_counts, temperature)
        norm = optimizer.clip()
        if not math.isfinite(norm) and optimizer.scale <= 1.0:
            error = infinite_norm(norm, [optimizer.broken()])
            optimizer.zero()
            raise error
        # while the weights move nobody may take them for the old ones: an interrupt can come between two of them
        self.state_id = new_id()
        since, self._since = self._since, None  # a step that stops half-way cannot be taken again
        with memory.memory_errors("the optimizer step", batch, holds=self._live):
            metrics = optimizer.step_scaled(norm)
        self._since = since
        optimizer.zero()
        self._record(batch, loss, loss_counts, temperature, rng)
        return StepResult({**learned.metrics, **metrics}, learned.columns)

    @runtime.in_turn
    def probe(
        self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0, per_row: bool = False
    ) -> StepResult:
        """Compute loss and gradient norm without an optimizer step; `per_row` adds the column `row_grad_norm` [B]."""
        optimizer = self._ready(batch)
        learned = self._gradients(batch, loss, loss_counts, temperature)
        norm = optimizer.clip()
        columns = dict(learned.columns)
        if per_row:
            norms = []
            for row in range(len(batch)):
                self._gradients(batch.slice(row, row + 1), loss, loss_counts, temperature)
                gradients = [p.grad.norm() for p in optimizer.named.values() if p.grad is not None]
                norms.append(torch.stack(gradients).norm() if gradients else torch.zeros((), device=self._model.device))
            columns["row_grad_norm"] = torch.stack(norms).cpu()
        optimizer.zero()
        return StepResult({**learned.metrics, "grad_norm": Mean(norm), "lr": Mean(optimizer.lr)}, columns)

    def _gradients(self, *given: Any) -> StepResult:
        """Compute gradients as `_backward`, from none, and in float16 at a loss scale at which they are finite."""

        def compute() -> StepResult:
            self._ready().zero()
            return self._backward(*given)

        return self._ready().finite(compute)

    def _backward(self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float) -> StepResult:
        scoring.check_ids(self._model, batch)
        packed, optimizer = self._packs(batch), self._ready()
        try:
            # autocast's casts, and their gradients, stay until a mini-batch ends; a layer that is computed again casts again
            kept = not self._settings.gradient_checkpointing
            with learning_mode(self._model, packed), self._autocast(kept):
                compare = getattr(loss, "compare", None)
                found, device = self._outputs(loss.want, temperature, packed, compare), self._model.device
                made = lambda rows: loss(found(rows), rows.to(device), loss_counts)  # noqa: E731
                learned = backward(self._passes(batch, packed), made, batch, self._live, optimizer.scale)
                optimizer.unscale()
                return learned
        except BaseException:
            optimizer.zero()
            raise

    def _ready(self, batch: DataProto | None = None) -> Optimizer:
        """Return the optimizer. It is created at the first call, after a memory check, because an engine that only
        samples needs none."""
        if batch is not None:
            scoring.check_routed(self._settings, batch)
        if self._optimizer is None:
            tokens = 0 if batch is None else batch["input_ids"].numel()
            if self._settings.check_memory:
                needed = lambda measured: self.memory_needed(tokens, measured)[1]  # noqa: E731
                check = lambda: memory.preflight(self._model.device, self.memory_free(), needed)  # noqa: E731
                estimated("the memory that learning takes", check, None)
            self._optimizer = Optimizer(self._parameters(), self._settings)
        return self._optimizer

    def _moments(self) -> dict[str, torch.Tensor]:
        return self._optimizer.tensors() if self._optimizer is not None else {}

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if self._head is not None:
            # a critic's language head takes no part in its loss unless it is tied to the embeddings
            named |= {f"value_head.{name}": p for name, p in self._head.named_parameters()}
        return named

    @runtime.in_turn
    def gradient(
        self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Compute the gradient of the loss and return copies by parameter name; no step is taken and nothing is
        clipped."""
        optimizer = self._ready(batch)
        self._gradients(batch, loss, loss_counts, temperature)
        found = {name: p.grad.detach().clone() for name, p in optimizer.named.items() if p.grad is not None}
        optimizer.zero()
        return found

    @contextmanager
    def perturbed(self, direction: Mapping[str, torch.Tensor], scale: float) -> Iterator[None]:
        """Context manager: moves the weights by `scale`·`direction`, and restores them bit for bit at the end."""
        named = self._parameters()
        held = {name: named[name].detach().clone() for name in direction}
        try:
            for name, values in direction.items():
                named[name].detach().add_(values, alpha=scale)
            yield
        finally:
            for name, values in held.items():
                named[name].detach().copy_(values)

    # --- what it needs ----------------------------------------------------------------------

    def peaks(self, begin: bool = False) -> dict[str, int]:
        """Peak memory in bytes since the last call with `begin=True`: `device` (tensors on the GPU), `total` (that
        GPU's size) and `host` (0)."""
        return memory.peaks(self._model.device.type, begin) | {"host": 0}

    def memory_needed(self, tokens: int | None = None, measured: bool = False) -> tuple[torch.device, dict[str, int]]:
        """Return the device, and how many bytes learning will allocate there beyond those in use now, by part (such as
        `gradients`, `activations`).

        `tokens` is the size of a mini-batch, padding included; None means a full micro-batch. The numbers are estimated
        from the model's sizes. With `measured` they come from a short rehearsal (`engines.rehearsal`, some seconds), or
        from the estimate where a rehearsal is not possible.
        """
        device, budget = self._model.device, self._budget
        each = budget if tokens is None else min(budget, tokens)
        parts = memory.learning_estimate(self._model, self._settings, each)
        if measured:
            settings = self._settings.replace(micro_batch_tokens=budget)
            model = (self._rehearsed, self._model.config, settings, Shape.of(budget, each, tokens))
            kind = {"gpu": device.type == "cuda", "head": self._critic}
            parts = estimated("the memory that learning takes, measured,", lambda: whole(*model, **kind).parts, parts)
        return device, {name: size for name, size in parts.items() if name != "optimizer" or not self._steps}

    def memory_free(self) -> int:
        """Bytes of the device that can still be allocated; memory that torch has cached for reuse counts as free."""
        return memory.available(self._model.device)

    def _live(self) -> memory.LiveTensors:
        return memory.live(self._model, self._optimizer, self._settings)

    def _rehearsed(self, folder: str, settings: LocalSettings) -> Opened:
        """Open an engine with the same architecture and settings for a model whose weights are uninitialised, to
        measure memory with."""
        model = loading.load_model(folder, settings, empty=True).to_empty(device="cpu")
        model.tie_weights()
        model.workbench_paths = getattr(self._model, "workbench_paths", None)
        twin = LocalEngine(model, self.tokenizer, settings, head=loading.value_head(model) if self._critic else None)
        return Opened(model, twin._ready(), twin.learn, twin.compute_log_probs)

    def _apply(self, settings: LocalSettings) -> None:
        if settings == self._settings:
            return
        if settings.gradient_checkpointing != self._settings.gradient_checkpointing:
            on = settings.gradient_checkpointing
            (self._model.gradient_checkpointing_enable if on else self._model.gradient_checkpointing_disable)()
        self._settings = settings
        if self._optimizer is not None:
            self._optimizer.apply(settings)

    # --- states -----------------------------------------------------------------------------

    @property
    def _steps(self) -> int:
        return int(self._optimizer.steps) if self._optimizer is not None else 0

    def _untouched(self) -> bool:
        return self.version == 0 and not self._steps

    def as_loaded(self) -> bool:
        """Whether the engine is still in the state of the files at its path: nothing was learned or loaded, and the
        files have not changed."""
        return self._untouched() and self._source == self.path and loading.stamps(self.path) == self._stamps

    def _hold(self, kind: str, folder: str | Path | None) -> LocalSnapshot:
        """Keep the present state as a `LocalSnapshot` in memory or on disk (`kind`); tensors equal to those in the
        model's files or the last snapshot are not copied."""
        last = getattr(self._latest, "held", {})
        disk = kind == "disk" or (kind == "replay" and folder is not None)
        named: dict[str, Any] = {"version": self.version, "state_id": self.state_id, "steps": self._steps}
        named["source"] = self._source
        return LocalSnapshot(hold(self._state(), last, self._files, folder, disk), **named)

    def _check(self, snapshot: LocalSnapshot) -> None:
        snapshot.check(self._weights())

    @torch.no_grad()
    def _return_to(self, snapshot: LocalSnapshot) -> None:
        """Copy a snapshot's weights and optimizer state into the engine, reading one tensor at a time from files."""
        mine = self._weights()
        self._source = snapshot.source
        self._optimizer = None  # its moments go before those of the snapshot come
        for name, tensor in snapshot.part("weights").items():
            mine[name].copy_(tensor)
        if state := snapshot.part("optimizer"):
            self._ready().load(state, snapshot.steps)

    def _state(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer moments without copies, by the keys of a snapshot: `weights/<name>` and
        `optimizer/<name>`."""
        named = {f"weights/{name}": tensor for name, tensor in self._weights().items()}
        return named | {f"optimizer/{name}": tensor for name, tensor in self._moments().items()}

    def _full_cost(self, kind: str) -> SnapshotCost:
        """Bytes that a snapshot of weights and moments takes at most; tensors that the model's own files hold cost
        nothing."""
        state = self._state()
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in state.values()}
        if self._untouched():
            for key, tensor in state.items():
                if self._files.shape(key.removeprefix("weights/")) == tensor.shape:
                    sizes.pop(tensor.data_ptr(), None)
        size = sum(sizes.values())
        return SnapshotCost(disk=size) if kind == "disk" else SnapshotCost(memory=size)

    # --- weights ----------------------------------------------------------------------------

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors that learning can change, by name: all weights, or with LoRA those of the adapters, and a
        critic's value head."""
        weights = lora.tensors(self._model) if self._adapted else dict(self._model.state_dict())
        if self._head is not None:
            weights |= {f"value_head.{name}": tensor for name, tensor in self._head.state_dict().items()}
        return weights

    @torch.no_grad()
    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return all weights by Hugging Face names, copied to the CPU: LoRA adapters are merged, and a tied output
        layer appears under both of its names."""
        held: Mapping[str, torch.Tensor] = quantised.Weights(self._model)
        if self._adapted:
            held = lora.merged(self._model, held)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in held.items()}

    def _reset(self) -> None:
        self._optimizer = self._last = self._since = None

    @working("saving the model")
    def _write(self, path: Path, merged: bool) -> None:
        loading.save_model(self._model, None if merged else self._head, self.tokenizer, path, merged=merged)
        if self._processor is not None:
            self._processor.save(path)
        loading.seal_model(path)

    def save_state(self, path: Path) -> None:
        """Write optimizer moments, number of steps, settings and policy version to a folder, as safetensors and JSON."""
        record = {"version": self.version, "steps": self._steps, "settings": self._settings.to_dict()}
        write_whole(Path(path), self._moments(), record)

    def load_state(self, model_path: Path, state_path: Path) -> None:
        """Load, bit for bit, the model and optimizer state that `save` and `save_state` of a local or FSDP engine
        wrote.

        Raises `CheckpointError` or `EngineError`, with nothing changed, where the files are incomplete or belong to
        another model.
        """
        tensors, record = read_optimizer(state_path)
        self._ready().check(tensors)
        loading.load_into(self._model, self._head, Path(model_path), self._settings)
        self._ready().load(tensors, record["steps"])
        self._last = self._since = self._source = None
        self.version, self.state_id = int(record["version"]), new_id()

    def reference(self) -> FrozenModel:
        """Return a frozen model that only scores, as `ModelEngine.reference` does; references to weights as loaded
        share one copy.
        """
        if self._adapted or not self.as_loaded():
            return super().reference()
        key = _as_in_files(self.path, self._settings)
        model = _SHARED.get(key) or super().reference()
        _SHARED[key] = model
        return model

    def _copy(self) -> LocalEngine:
        model = loading.duplicate(self._model).requires_grad_(False)
        loading.halve_frozen(model, self._settings)
        told: dict[str, Any] = {"path": self.path, "checked": self.selfcheck, **self.template_switches}
        return LocalEngine(model, self.tokenizer, self._settings, **told)

    def base(self) -> BasePolicy | None:
        """Return the model under the LoRA adapters as a sampler, without a copy; None where there are no adapters."""
        return BasePolicy(self) if self._adapted else None

    def critic(self, **changes: Any) -> LocalEngine:
        """Make a critic: a learner with a copy of these weights and a new value head whose outputs are 0. `changes` are
        settings that differ from this engine's."""
        settings = self._settings.replace(**{"routing_replay": False, **changes})
        head, model = loading.value_head(self._model), loading.duplicate(self._model)
        if not settings.routing_replay:  # the policy's experts are not the critic's
            model.workbench_routing = None
        critic = LocalEngine(model, self.tokenizer, settings, path=self.path, checked=self.selfcheck, head=head)
        return self._with_files(critic)

    def _twin(self) -> LocalEngine:
        told: dict[str, Any] = {"path": self.path, "checked": self.selfcheck, **self.template_switches}
        return self._with_files(LocalEngine(loading.duplicate(self._model), self.tokenizer, self._settings, **told))

    def _with_files(self, copied: LocalEngine) -> LocalEngine:
        """Return an engine with a copy of these weights, told which files they are of."""
        copied._stamps, copied._source = self._stamps, self._source if self._untouched() else None
        copied._files = self._files
        return copied

    @torch.no_grad()
    def _mix(self, other: LocalEngine, alpha: float) -> None:
        self._source = None
        for mine, theirs in zip(self._model.parameters(), other._model.parameters(), strict=True):
            mine.mul_(1 - alpha).add_(theirs, alpha=alpha)

    def examine(self, every: bool = False) -> SelfCheck:
        """Compare ways of scoring and sampling with the model's own forward on a few tokens, and return those that give
        the same numbers.

        The ways are tried from the fastest on until one is right; with `every` all are tried. Raises `EngineError`
        where no way is right, or where one that the settings demand is wrong.
        """
        everything = 1 << 30
        self._model.eval()

        def forward(ids: torch.Tensor) -> torch.Tensor:
            replay(self._model, None)
            found: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
            return found

        def score(head: Head, packed: bool, batch: DataProto) -> dict[str, torch.Tensor]:
            cut = scoring.passes(self._model, batch, everything, packed)
            found = lambda rows: scoring.outputs(self._model, None, rows, WANT, 1.0, packed, head)  # noqa: E731
            return scoring.collect(cut, found, batch, WANT)

        def sample(path: str, requests: Sequence[Request], rows: Sequence[Row]) -> dict[str, list[torch.Tensor]]:
            asked: Any = ForcedSampling(requests)
            with cache_of(self._model, path, everything) as cache:
                return forced(rows, lambda each: decode(cache, each, asked, 0, asked.size(cache)))

        tries: dict[str, Any] = {"precisions": self._precisions(), "every": every}
        decodes = paths_of(self._model, self._settings.decode)
        return check(self._model, self._settings, forward, score, sample=sample, decodes=decodes, **tries)

    def _precisions(self) -> dict[bool, Any]:
        """Return the precisions that the self-check tries: False (float32, where a difference shows best) and, where
        the engine computes in bfloat16, True; each with its autocast context manager."""
        device = self._model.device.type
        half = self._settings.half(device)
        kind = getattr(torch, self._settings.precision(device))
        return {one: partial(torch.autocast, device, kind, enabled=one) for one in (False, True)[: 1 + half]}

    def read_pictures(self, processor: loading.Processor | None) -> None:
        """Set the processor that lets rows have pictures. Where the self-check finds that pictures are computed wrongly
        it is not set, and `selfcheck.found` has the reason."""
        if not self._settings.self_check or processor is None:
            self._processor = processor
            return

        def score(batch: DataProto) -> dict[str, torch.Tensor]:
            return scoring.collect(self._passes(batch, False), self._outputs(WANT, 1.0, False), batch, WANT)

        def sample(requests: Sequence[Request], rows: Sequence[Row]) -> dict[str, list[torch.Tensor]]:
            wave: Any = ForcedSampling(requests)
            wave.join(len(requests))
            cache = PicturedRows(self._model, requests)
            return forced(rows, lambda each: decode(cache, each, wave, 0, len(requests)))

        right, found = check_pictures(self._model, processor, score, sample, self._precisions())
        self.selfcheck = replace(self.selfcheck, found={**self.selfcheck.found, **found})
        self._processor = processor if right else None

    # --- inside -----------------------------------------------------------------------------

    @property
    def _budget(self) -> int:
        return self._settings.micro_batch_tokens or self._usual

    @cached_property
    def _usual(self) -> int:
        """Tokens of a pass where the settings do not say: from its first pass on the same, so that rounding is, too."""
        return memory.pass_tokens(self._model, self._settings, self._model.device.type, self.memory_free())

    def _packs(self, batch: DataProto) -> bool:
        return scoring.packs(self._model, self._settings, batch)

    def _passes(self, batch: DataProto, packed: bool) -> Iterator[tuple[torch.Tensor, DataProto, int]]:
        return scoring.passes(self._model, batch, self._budget, packed)

    def _outputs(
        self, want: Sequence[str], temperature: float, packed: bool, compare: scoring.Compare | None = None
    ) -> Callable[[DataProto], dict[str, torch.Tensor]]:
        return lambda rows: scoring.outputs(self._model, self._head, rows, want, temperature, packed, compare=compare)

    def _autocast(self, kept: bool = True) -> Any:
        device = self._model.device.type
        kind = getattr(torch, self._settings.precision(device))
        return torch.autocast(device, dtype=kind, enabled=kind != torch.float32, cache_enabled=kept)


class BasePolicy(Generates):
    """Samples from the base model of a local engine with LoRA: its adapters are switched off while a response is sampled."""

    streams = True
    version = 0

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self.tokenizer = engine, engine.tokenizer
        self.path, self.max_length, self.template_switches = engine.path, engine.max_length, engine.template_switches
        self._waves = Waves(self._decode, 1, "workbench-base")

    async def sample(self, request: Request) -> Sample:
        """Sample one response from the base model; requests to the engine itself wait meanwhile."""
        return await self._waves.ask(request)

    @runtime.in_turn
    def _decode(self, wave: Wave[Request, Sample]) -> None:
        with lora.switched_off(self._engine._model):
            self._engine._decode(wave)

    def __repr__(self) -> str:
        return f"BasePolicy(of {self._engine!r})"


@shows_settings(LocalSettings)
@working("opening the model")
def local(
    path: str | Path, *, threads: int | None = None, template_switches: Any = None, **settings: Any
) -> LocalEngine:
    """Load a transformers model that samples, scores and trains in this process: `local("data/tiny-arith", lr=1e-3)`.

    `path` is a Hugging Face folder or name, a checkpoint folder (its `actor/`), or a run folder (its newest
    checkpoint). `threads` sets torch's CPU threads for the process. `template_switches` are passed to the chat template
    (`{"enable_thinking": False}`). Other settings: `LocalSettings`; unknown names are refused. Raises `EngineError`
    where there is no such model, where tokenizer and model do not fit, or where a way of computing that the settings
    ask for does not give the model's own numbers (the self-check on a few tokens, see `examine`).
    """
    chosen = LocalSettings.from_parameters(settings)
    share_arena()
    if threads is not None:
        torch.set_num_threads(threads)
    folder = loading.resolve(path)
    model = loading.load_model(folder, chosen, named=str(folder))
    tokenizer = loading.load_tokenizer(folder, model, chosen)
    engine = LocalEngine(model, tokenizer, chosen, path=str(folder), **(template_switches or {}))
    engine._files, engine._source, engine._stamps = StateFiles.of_model(folder), str(folder), loading.stamps(folder)
    if chosen.self_check:
        with working("self-check"):
            engine.selfcheck = engine.examine()
    model.workbench_paths = engine.selfcheck.paths
    engine.read_pictures(loading.open_processor(folder, model, tokenizer))
    size, kind = quantised.parameters(model), str(model.dtype).removeprefix("torch.")
    present().result = f"opened {Path(folder).name}: {size / 1e6:,.4g}M parameters, {engine._place()}, {kind}"
    return engine
