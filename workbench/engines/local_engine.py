"""One transformers model in this process, CPU or one GPU, behind all three protocols."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workbench import background
from workbench.dataproto import DataProto
from workbench.engines import lora
from workbench.engines.frozen import FrozenModel
from workbench.engines.learning import (
    Optimizer,
    backward,
    finish,
    load_optimizer,
    row_gradient_norms,
    save_optimizer,
)
from workbench.engines.loading import (
    eos_ids_of,
    load_into,
    load_model,
    load_tokenizer,
    resolve,
    save_model,
    value_head,
)
from workbench.engines.local_settings import LocalSettings
from workbench.engines.memory import learning_estimate, memory_errors, preflight
from workbench.engines.protocol import Learned, Loss, Normalisers, Request, Sample
from workbench.engines.sampling import decode_wave
from workbench.engines.scoring import check_ids, full_divergence, score
from workbench.engines.waves import Waves
from workbench.errors import EngineError, NonFinite, message
from workbench.metrics import Mean


class LocalEngine:
    """Sampler, LogProbModel and Learner over one set of weights; see `engines.protocol` for the contracts."""

    def __init__(
        self, model: Any, tokenizer: Any, settings: LocalSettings, *, path: str = "", head: Any = None, **switches: Any
    ) -> None:
        self._model = model
        self._head = head
        self._settings = settings
        self._optimizer: Optimizer | None = None
        self._waves = Waves(self._decode, lambda: settings.max_wave, "workbench-sampler")
        self._eos = eos_ids_of(model, tokenizer)
        self.tokenizer = tokenizer
        self.path = path
        self.template_switches = switches
        self.version = 0
        self.state_id = _new_id()
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable()

    # --- Sampler ----------------------------------------------------------------------------

    async def sample(self, request: Request) -> Sample:
        """One response. Requests that wait together are answered as one wave, each as soon as it is finished."""
        return await self._waves.ask(request)

    def _decode(self, requests: list[Request], finished: Callable[[int, Sample], None]) -> list[Sample]:
        longest = max(len(request.ids) for request in requests)
        with (
            memory_errors("sampling", f"{len(requests)} rows of {longest} prompt tokens", "max_wave"),
            self._autocast(),
        ):
            self._model.eval()
            held = (self._model, self.tokenizer, requests, self._eos, self.version)
            return decode_wave(*held, background.check, finished)

    def sample_many(self, requests: Sequence[Request]) -> list[Sample]:
        """All responses, in order: the synchronous door."""
        return background.run_all(self.sample, requests)

    # --- LogProbModel -----------------------------------------------------------------------

    def score(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Per response token, [B, T] float32 on the CPU, 0 outside the mask."""
        wrong = [name for name in want if name not in ("log_probs", "entropy", "sum_pi_squared", "values")]
        if wrong or ("values" in want and self._head is None):
            have = "log_probs, entropy, sum_pi_squared" + (
                ", values" if self._head is not None else "; values need engine.critic()"
            )
            raise EngineError(message("score", expected=have, found=", ".join(want)))
        check_ids(self._model, batch)
        self._model.eval()
        with memory_errors("scoring", f"micro-batches of {self._settings.micro_batch_tokens} tokens"), self._autocast():
            return score(self._model, self._head, batch, want, temperature, **self._cut())

    @contextmanager
    def model_of_base(self) -> Iterator[Any]:
        """The model with the LoRA adapter switched off meanwhile."""
        with lora.switched_off(self._model):
            yield self._model

    def score_base(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The same with the LoRA adapter switched off."""
        with lora.switched_off(self._model):
            return self.score(batch, want, temperature)

    def full_kl(self, batch: DataProto, reference: FrozenModel, temperature: float = 1.0) -> torch.Tensor:
        """[B, T] exact KL(policy‖reference) per response token, over the whole vocabulary: two forward passes."""
        check_ids(self._model, batch)
        self._model.eval()
        with memory_errors("the exact KL", f"micro-batches of {self._settings.micro_batch_tokens} tokens"):
            return full_divergence(self._model, reference.model, batch, temperature, **self._cut())

    # --- Learner ----------------------------------------------------------------------------

    def learn(self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0) -> Learned:
        """One optimizer step on one mini-batch; `NonFinite` leaves everything as it was."""
        optimizer = self._ready()
        optimizer.zero()  # an interrupt may have left gradients of a step that was not taken
        learned = self._backward(batch, loss, normalisers, temperature)
        # while the weights move nobody may take them for the old ones: an interrupt can come between two of them
        before, self.state_id = self.state_id, _new_id()
        try:
            return finish(optimizer, learned)
        except NonFinite:  # refused before any weight was touched
            self.state_id = before
            raise

    def commit(self) -> int:
        """The update is over: the next policy version."""
        self.version += 1
        return self.version

    def probe(
        self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0, per_row: bool = False
    ) -> Learned:
        """Loss and gradient norm without a step."""
        optimizer = self._ready()
        learned = self._backward(batch, loss, normalisers, temperature)
        norm = optimizer.clip()
        optimizer.zero()
        columns = dict(learned.columns)
        if per_row:
            columns["row_grad_norm"] = row_gradient_norms(
                lambda rows: self._backward(rows, loss, normalisers, temperature), optimizer, batch
            )
        return Learned({**learned.metrics, "grad_norm": Mean(norm), "lr": Mean(optimizer.lr)}, columns)

    def _backward(self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float) -> Learned:
        check_ids(self._model, batch)
        self._model.train()
        try:
            with self._autocast():
                return backward(
                    self._model, self._head, batch, loss, normalisers, temperature=temperature, **self._cut()
                )
        except BaseException:
            self._ready().zero()
            raise
        finally:
            self._model.eval()

    def _ready(self) -> Optimizer:
        """The optimizer, made when learning starts: engines that only sample do not pay for it."""
        if self._optimizer is None:
            preflight(self._model, self._settings.micro_batch_tokens, self._settings.gradient_checkpointing)
            self._optimizer = Optimizer(self._parameters(), self._settings)
        return self._optimizer

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        if self._head is not None:
            # a critic's language head takes no part in its loss unless it is tied to the embeddings
            named |= {f"value_head.{name}": p for name, p in self._head.named_parameters()}
        return named

    def gradient(
        self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Parameter → gradient of the loss, copies; no step is taken and nothing is clipped."""
        optimizer = self._ready()
        optimizer.zero()
        self._backward(batch, loss, normalisers, temperature)
        found = {name: p.grad.detach().clone() for name, p in optimizer.named.items() if p.grad is not None}
        optimizer.zero()
        return found

    @contextmanager
    def nudged(self, direction: Mapping[str, torch.Tensor], scale: float) -> Iterator[None]:
        """Inside, the weights are moved by `scale`·direction; after it they are what they were, bit for bit."""
        named = self._parameters()
        held = {name: named[name].detach().clone() for name in direction}
        try:
            with torch.no_grad():
                for name, values in direction.items():
                    named[name].add_(values, alpha=scale)
            yield
        finally:
            with torch.no_grad():
                for name, values in held.items():
                    named[name].copy_(values)

    # --- what it needs ----------------------------------------------------------------------

    @property
    def max_length(self) -> int | None:
        """Positions that the model has; None where its configuration does not say."""
        return getattr(self._model.config, "max_position_embeddings", None)

    def memory_needed(self) -> tuple[torch.device, dict[str, int]]:
        """(device, bytes by part) that learning will add to what is held now."""
        s = self._settings
        parts = learning_estimate(self._model, s.micro_batch_tokens, s.gradient_checkpointing)
        held = ("gradients", "optimizer") if self._optimizer is not None and self._optimizer.steps else ()
        return self._model.device, {name: size for name, size in parts.items() if name not in held}

    def checkpoint_bytes(self) -> int:
        """Weights and Adam's two moments."""
        return 3 * sum(one.numel() * one.element_size() for one in self._model.parameters())

    # --- weights ----------------------------------------------------------------------------

    def _weights(self) -> dict[str, torch.Tensor]:
        """What learning can change: with LoRA the adapter alone."""
        adapted = lora.config_in(self._model) is not None
        weights = lora.tensors(self._model) if adapted else dict(self._model.state_dict())
        if self._head is not None:
            weights |= {f"value_head.{name}": tensor for name, tensor in self._head.state_dict().items()}
        return weights

    @torch.no_grad()
    def full_weights(self) -> dict[str, torch.Tensor]:
        """All weights, copies on the CPU, by Hugging Face's names: adapters worked in, a tied head under both of its names."""
        held = self._model.state_dict()
        if lora.config_in(self._model) is not None:
            held = lora.worked_in(self._model, held)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in held.items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Another learner's `full_weights`, in place; the optimizer starts anew. Raises `EngineError` where they do not fit."""
        mine = self._model.state_dict()
        wrong = [name for name, one in mine.items() if name not in weights or weights[name].shape != one.shape]
        if wrong:
            shape = tuple(mine[wrong[0]].shape)
            found = tuple(weights[wrong[0]].shape) if wrong[0] in weights else "none such"
            raise EngineError(message("load_weights", expected=f"{wrong[0]} of {shape}", found=found))
        self.state_id = _new_id()  # half-way there is no state that anybody knows
        for name, tensor in mine.items():
            tensor.copy_(weights[name])
        self._optimizer = None
        self.version, self.state_id = version, _new_id()

    def snapshot(self) -> Any:
        """Weights, optimizer, schedule and version, copied to host memory."""
        return {
            "weights": {name: tensor.detach().cpu().clone() for name, tensor in self._weights().items()},
            "optimizer": self._optimizer.tensors() if self._optimizer is not None else None,
            "steps": self._optimizer.steps if self._optimizer is not None else 0,
            "version": self.version,
            "state_id": self.state_id,
        }

    @torch.no_grad()
    def restore(self, snapshot: Any) -> None:
        """Back to a snapshot, bit for bit."""
        self.state_id = _new_id()  # half-way there is no state that anybody knows
        for name, tensor in self._weights().items():
            tensor.copy_(snapshot["weights"][name])
        if snapshot["optimizer"] is None:
            self._optimizer = None
        else:
            self._ready().load(snapshot["optimizer"], snapshot["steps"])
        self.version = snapshot["version"]
        self.state_id = snapshot["state_id"]

    def save(self, path: Path) -> None:
        """A plain Hugging Face folder (with LoRA the adapter's); a critic has `value_head.safetensors` beside it."""
        save_model(self._model, self._head, self.tokenizer, Path(path))

    def save_merged(self, path: str | Path) -> Path:
        """A plain Hugging Face folder with the LoRA adapter worked into the weights."""
        plain = lora.merged(self._model) if lora.config_in(self._model) is not None else self._model
        save_model(plain, None, self.tokenizer, Path(path))
        return Path(path)

    def save_state(self, path: Path) -> None:
        """Optimizer, schedule and version; no pickle."""
        save_optimizer(self._optimizer, self._settings, self.version, Path(path))

    def load_state(self, model_path: Path, state_path: Path) -> None:
        """What `save` and `save_state` wrote, back into this engine, bit for bit."""
        load_into(self._model, self._head, Path(model_path), self._settings)
        self.version = load_optimizer(self._ready(), Path(state_path))
        self.state_id = _new_id()

    def reference(self) -> FrozenModel:
        """The weights as they are now, frozen: a LogProbModel and nothing else. With LoRA the base, and no second copy."""
        if lora.config_in(self._model) is not None:
            return FrozenModel(self, as_loaded=True, base=True)
        model = copy.deepcopy(self._model).requires_grad_(False)
        engine = LocalEngine(model, self.tokenizer, self._settings, path=self.path, **self.template_switches)
        stepped = self._optimizer is not None and self._optimizer.steps > 0
        return FrozenModel(engine, as_loaded=self.version == 0 and not stepped)

    def critic(self, **changes: Any) -> LocalEngine:
        """A learner of its own with these weights and a value head that starts at 0."""
        settings = self._settings.replace(**changes)
        head = value_head(self._model)
        return LocalEngine(copy.deepcopy(self._model), self.tokenizer, settings, path=self.path, head=head)

    # --- inside -----------------------------------------------------------------------------

    def _cut(self) -> dict[str, Any]:
        flash = "flash" in str(getattr(self._model.config, "_attn_implementation", ""))
        packed = self._settings.pack == "yes" or (self._settings.pack == "auto" and flash)
        return {"budget": self._settings.micro_batch_tokens, "packed": packed}

    def _autocast(self) -> Any:
        device = self._model.device.type
        half = self._settings.dtype == "bfloat16" or (self._settings.dtype == "auto" and device == "cuda")
        return torch.autocast(device, dtype=torch.bfloat16, enabled=half)

    def describe(self) -> dict[str, Any]:
        """Path and settings, for a run's record."""
        return {"path": self.path, **self._settings.to_dict()}

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self._model.parameters())
        kind = "critic" if self._head is not None else "policy"
        return (
            f"LocalEngine({self.path!r}: {kind}, {type(self._model).__name__}, {size:,} parameters, "
            f"{self._model.device}, version {self.version})"
        )


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def local(
    path: str | Path, *, threads: int | None = None, template_switches: Any = None, **settings: Any
) -> LocalEngine:
    """A transformers model in this process: `local("data/tiny-arith", lr=1e-3)`.

    `path` is a Hugging Face folder or name, a checkpoint folder (its `actor/`), or a run folder (its newest
    checkpoint). `threads` sets torch's CPU threads for the process. `template_switches` go to the chat
    template (`{"enable_thinking": False}`). Other settings: `LocalSettings`; unknown names are refused.
    Raises `EngineError` where there is no such model, or tokenizer and model do not fit.
    """
    chosen = LocalSettings.from_parameters(settings)
    if threads is not None:
        torch.set_num_threads(threads)
    folder = resolve(path)
    model = load_model(folder, chosen)
    if chosen.lora_rank and lora.config_in(model) is None:
        lora.add(model, lora.config_of(chosen, str(path)))
    tokenizer = load_tokenizer(folder, model, chosen)
    return LocalEngine(model, tokenizer, chosen, path=str(path), **(template_switches or {}))
