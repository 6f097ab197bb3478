"""One rank's part of a model that is cut over all ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Zhao et al. 2023, https://arxiv.org/abs/2304.11277. Every rank must make the same forward and backward passes in the same
order, because each gathers weights from all: a rank with fewer micro-batches than others makes empty passes to the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, distribute_tensor

from workbench import background
from workbench.dataproto import DataProto
from workbench.engines import lora
from workbench.engines.agreement import Account, agreed, largest, together
from workbench.engines.learning import Optimizer
from workbench.engines.memory import memory_errors
from workbench.engines.protocol import Loss, Normalisers
from workbench.engines.scoring import CHUNK_ELEMENTS, micro_batches, spread, trimmed
from workbench.engines.sharding import build, read_adapters, read_plain
from workbench.errors import EngineError, Interrupted, message
from workbench.functional import full_kl
from workbench.metrics import join


class ShardedOptimizer(Optimizer):
    """The local engine's optimizer over shards; with `offload="optimizer"` its moments wait in host memory."""

    def clip(self) -> float:
        """Clip over all shards; the global norm before that."""
        limit = self._settings.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> None:
        """One step at the scheduled rate."""
        away = self._settings.offload == "optimizer"
        if away:
            self._move(None)
        super().step()
        if away:
            self._move("cpu")

    def _move(self, device: str | None) -> None:
        for parameter, state in self._adam.state.items():
            for name, value in state.items():
                if isinstance(value, DTensor):
                    state[name] = value.to(device or parameter.device.type)

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """Name → Adam's state of that parameter, as it is."""
        return {name: self._adam.state[p] for name, p in self.named.items() if p in self._adam.state}

    def put(self, state: Mapping[str, Mapping[str, Any]], steps: int) -> None:
        """Take over what `state` gave after `steps` steps."""
        self.steps = steps
        self._adam.state.clear()
        for name, values in state.items():
            self._adam.state[self.named[name]] = dict(values)
        if self._settings.offload == "optimizer":
            self._move("cpu")


class ShardedModel:
    """One rank's part of one model: what a local engine does to a whole one, done by all ranks together."""

    def __init__(self, path: str, settings: Any, mesh: Any, head: bool) -> None:
        self.settings = settings
        self.path = path
        self.mesh = mesh
        self.whole = build(path, settings, mesh, head)
        self._optimizer: ShardedOptimizer | None = None
        self._held: dict[str, torch.Tensor] = {}

    @property
    def named(self) -> dict[str, DTensor]:
        """Parameters by the local engine's names, this rank's part of each."""
        found: Any = self.whole.named_parameters()
        return {name.removeprefix("causal."): parameter for name, parameter in found}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """What every rank has whole, with those that no file holds (rotary frequencies)."""
        return {name.removeprefix("causal."): buffer for name, buffer in self.whole.named_buffers()}

    @property
    def learning(self) -> dict[str, DTensor]:
        """Those of them that learn: all, or the adapters and a head."""
        return {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}

    @property
    def adapted(self) -> bool:
        """Whether it has LoRA adapters."""
        return lora.config_in(self.whole.causal) is not None

    @property
    def plain(self) -> dict[str, torch.Tensor]:
        """Its parameters, and those buffers that its own files have."""
        kept = self.whole.causal.state_dict().keys()
        return {**self.named, **{name: buffer for name, buffer in self.buffers.items() if name in kept}}

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """What a state holds of the model: what learning can change, so with adapters no more than those."""
        return dict(self.learning) if self.adapted else self.plain

    @property
    def optimizer(self) -> ShardedOptimizer:
        """Made when learning starts."""
        if self._optimizer is None:
            self._optimizer = ShardedOptimizer(self.learning, self.settings)  # type: ignore[arg-type]
        return self._optimizer

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer.steps if self._optimizer is not None else 0

    def forget(self) -> None:
        """No optimizer state, as before the first step."""
        self._optimizer = None

    # --- filling ----------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: str, adapters: bool = False) -> None:
        """A Hugging Face folder's weights: rank 0 reads them, every rank gets its part. A head's stand beside them, or are 0.

        With `adapters` those of a peft folder alone, into a model that has its base.
        """
        first, head = distributed.get_rank() == 0, self.whole.value_head is not None
        parameters, buffers = (self.learning, {}) if adapters else (self.named, self.buffers)
        plain, told = None, None
        if first:
            width = self.whole.causal.config.hidden_size if head else None
            plain, told = read_adapters(folder, width) if adapters else read_plain(folder, self.settings, head)
            told = told or _unlike(folder, plain or {}, {**parameters, **buffers})
        together(told)
        for name, parameter in parameters.items():
            source = plain[name] if plain is not None else torch.empty(parameter.shape)
            parameter.copy_(distribute_tensor(source, parameter.device_mesh, parameter.placements))
        for name, buffer in buffers.items():
            value = plain[name].clone() if plain is not None else torch.empty(buffer.shape, dtype=buffer.dtype)
            distributed.broadcast(value, 0)
            buffer.copy_(value)

    @torch.no_grad()
    def copy(self, other: ShardedModel) -> None:
        """Another model's weights, part by part; a head that it does not have starts at 0."""
        theirs = {**other.named, **other.buffers}
        mine = {**self.named, **self.buffers}
        wrong = [name for name in mine if name not in theirs and not name.startswith("value_head.")]
        if wrong:
            raise EngineError(message("a model on the same ranks", expected=wrong[0], found="other adapters"))
        for name, one in mine.items():
            source = theirs.get(name)
            one.copy_(source) if source is not None else one.zero_()

    @torch.no_grad()
    def weights(self, merged: bool = True) -> dict[str, torch.Tensor] | None:
        """Rank 0: all weights whole, on the CPU, by the local engine's names, adapters worked in; without `merged` what a state
        holds. Other ranks None, but they take part.
        """
        held: dict[str, torch.Tensor] = {}
        for name, value in (self.plain if merged else self.stored).items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if distributed.get_rank() == 0:
                held[name] = full.detach().cpu().clone()
        if merged and self.adapted and held:
            held = lora.worked_in(self.whole.causal, held)
        return held if distributed.get_rank() == 0 else None

    # --- passes -----------------------------------------------------------------------------

    @property
    def _packed(self) -> bool:
        flash = "flash" in str(getattr(self.whole.causal.config, "_attn_implementation", ""))
        return self.settings.pack == "yes" or (self.settings.pack == "auto" and flash)

    def _cut(self, share: DataProto) -> Iterator[tuple[torch.Tensor | None, DataProto, int]]:
        """(row numbers, rows, T) of each micro-batch, then (None, one short row, 1) until every rank has made as many.

        Before each the ranks agree to go on: an interrupt stops all of them at the same place.
        """
        device = self.mesh.device_type
        groups = micro_batches(share, self.settings.micro_batch_tokens, self._packed) if len(share) else []
        for number in range(int(largest(max(len(groups), 1)))):
            if agreed(_interrupted()):
                raise Interrupted("the work was interrupted; everything finished before is kept")
            if number < len(groups):
                rows, t = trimmed(share.select_idxs(groups[number]))
                yield groups[number], rows.to(device), t
            else:
                yield None, _nothing().to(device), 1

    @torch.no_grad()
    def score(self, share: DataProto, want: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        """As a local engine's `score`, of this rank's rows."""
        self.whole.eval()
        shape = share["response_mask"].shape
        result = {name: torch.zeros(shape) for name in want}
        try:
            for indices, rows, t in self._cut(share):
                with memory_errors("scoring", f"{len(rows)} rows × {rows['input_ids'].shape[1]} tokens"):
                    found = self.whole(rows, want, temperature, self._packed)
                for name, values in found.items() if indices is not None else ():
                    result[name][indices, :t] = values.cpu()
        finally:
            self.whole.reshard()  # type: ignore[operator]  # the root keeps what it gathered, and weights may change
        return result

    def score_base(self, share: DataProto, want: Sequence[str], temperature: float) -> dict[str, torch.Tensor]:
        """The same with the adapters switched off."""
        with lora.switched_off(self.whole.causal):
            return self.score(share, want, temperature)

    @torch.no_grad()
    def full_kl(self, share: DataProto, other: ShardedModel, base: bool, temperature: float) -> torch.Tensor:
        """As a local engine's `full_kl`, of this rank's rows: to another model here, or to this one without its adapters."""
        off: Any = lora.switched_off if base else nullcontext
        self.whole.eval()
        result = torch.zeros(share["response_mask"].shape)
        try:
            for indices, rows, t in self._cut(share):
                with memory_errors("the exact KL", f"{len(rows)} rows × {rows['input_ids'].shape[1]} tokens"):
                    mine = self.whole(rows, ("hidden",), temperature, self._packed)["hidden"]
                    with off(other.whole.causal):
                        theirs = other.whole(rows, ("hidden",), temperature, self._packed)["hidden"]
                    if indices is None:
                        continue
                    # the roots have kept their heads gathered after the forward
                    heads = [model.whole.causal.get_output_embeddings() for model in (self, other)]
                    size = max(CHUNK_ELEMENTS // self.whole.causal.config.vocab_size, 1)
                    values = []
                    for a, b in zip(mine.split(size), theirs.split(size), strict=True):
                        logits = heads[0](a).float()
                        with off(other.whole.causal):
                            values.append(full_kl(logits / temperature, heads[1](b).float() / temperature))
                    flat = torch.cat(values) if values else mine.new_zeros(0)
                result[indices, :t] = spread(flat, rows["response_mask"].bool()).cpu()
        finally:
            for model in (self, other):
                model.whole.reshard()  # type: ignore[operator]
        return result

    def backward(
        self, share: DataProto, loss: Loss, normalisers: Normalisers, temperature: float, seed: int
    ) -> dict[str, Any]:
        """Gradients of all ranks' rows together; this rank's metrics and columns, and what went wrong with whom.

        A loss that raises or is not finite on one rank must not leave the others waiting in a collective: its passes are
        made to the end with a loss of 0, and then all ranks know.
        """
        account = Account(len(share), share["response_mask"].shape[1])
        self.optimizer.zero()
        self.whole.train()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + distributed.get_rank())  # dropout is a function of the step and the rank
                for indices, rows, t in self._cut(share):
                    with memory_errors("learn", f"{len(rows)} rows × {rows['input_ids'].shape[1]} tokens"):
                        found = self.whole(rows, loss.want, temperature, self._packed)
                        value = account.loss(loss, found, rows, normalisers, indices, t)
                        value.backward()
        except BaseException:
            self.optimizer.zero()
            raise
        finally:
            self.whole.eval()
            self.whole.reshard()  # type: ignore[operator]
        trouble = agreed(account.trouble is not None)
        if trouble:
            self.optimizer.zero()
        return {
            "metrics": join(account.parts),
            "columns": account.columns,
            "trouble": account.trouble,
            "failed": trouble,
        }

    def learn(
        self, share: DataProto, loss: Loss, normalisers: Normalisers, temperature: float, seed: int
    ) -> dict[str, Any]:
        """One optimizer step by all ranks; `grad_norm` before clipping, `lr`. Nothing has changed where `failed` is true."""
        report = self.backward(share, loss, normalisers, temperature, seed)
        if report["failed"]:
            return report
        optimizer = self.optimizer
        norm, lr = optimizer.clip(), optimizer.lr
        report |= {"grad_norm": norm, "lr": lr, "failed": not math.isfinite(norm)}
        if not report["failed"]:
            optimizer.step()
        optimizer.zero()
        return report

    def probe(
        self, share: DataProto, loss: Loss, normalisers: Normalisers, temperature: float, seed: int
    ) -> dict[str, Any]:
        """`learn` without the step."""
        report = self.backward(share, loss, normalisers, temperature, seed)
        if not report["failed"]:
            report |= {"grad_norm": self.optimizer.clip(), "lr": self.optimizer.lr}
            self.optimizer.zero()
        return report

    def gradient(
        self, share: DataProto, loss: Loss, normalisers: Normalisers, temperature: float, seed: int
    ) -> dict[str, Any]:
        """`backward` with a `gradient`: on rank 0 by name, whole, on the CPU."""
        report = self.backward(share, loss, normalisers, temperature, seed)
        found = {name: p.grad.full_tensor().cpu() for name, p in self.named.items() if p.grad is not None}  # type: ignore[attr-defined]
        self.optimizer.zero()
        return {**report, "gradient": found if distributed.get_rank() == 0 else None}

    @torch.no_grad()
    def nudge(self, direction: Mapping[str, torch.Tensor], scale: float) -> None:
        """Move the weights by `scale`·direction (whole tensors by name) until `still`."""
        named = self.named
        self._held = {name: named[name].detach().clone() for name in direction}
        for name, values in direction.items():
            part = distribute_tensor(values, named[name].device_mesh, named[name].placements)
            named[name].add_(part, alpha=scale)

    @torch.no_grad()
    def still(self) -> None:
        """Back to where the weights were, bit for bit."""
        held, self._held = self._held, {}
        for name, values in held.items():
            self.named[name].copy_(values)

    def row_norms(
        self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float, seed: int
    ) -> list[float]:
        """Gradient norm of each row's share of the loss: every rank has the whole batch, and takes its turn."""
        norms = []
        size, rank = distributed.get_world_size(), distributed.get_rank()
        for row in range(len(batch)):
            mine = batch.slice(row, row + (1 if row % size == rank else 0))
            report = self.backward(mine, loss, normalisers, temperature, seed)
            gradients = [p.grad for p in self.named.values() if p.grad is not None]
            square = torch.tensor(sum(float(_local(one).double().square().sum()) for one in gradients))
            distributed.all_reduce(square)
            norms.append(math.nan if report["failed"] else math.sqrt(float(square)))
        self.optimizer.zero()
        return norms


def _interrupted() -> bool:
    try:
        background.check()
    except Interrupted:
        return True
    return False


def _nothing() -> DataProto:
    """One row of two tokens, for a pass that nobody counts."""
    one = torch.ones(1, 2, dtype=torch.long)
    columns = {"input_ids": one * 0, "attention_mask": one, "position_ids": torch.tensor([[0, 1]])}
    return DataProto({**columns, "response_mask": one[:, :1]})


def _unlike(folder: str, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str | None:
    """What a folder lacks for a model."""
    for name, one in wanted.items():
        if name not in found or found[name].shape != one.shape:
            there = tuple(found[name].shape) if name in found else "none such"
            return message(f"weights of {folder}", expected=f"{name} of {tuple(one.shape)}", found=there)
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
