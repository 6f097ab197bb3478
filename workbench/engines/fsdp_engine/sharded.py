"""One rank's part of a model that is sharded over all ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

Zhao et al. 2023, https://arxiv.org/abs/2304.11277. Every rank must make the same forward and backward passes in the same
order, because each gathers weights from all: a rank with fewer micro-batches than others makes empty passes to the end.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from workbench.base import runtime
from workbench.base.errors import CheckpointError, EngineError, Interrupted, first_line
from workbench.base.metrics import Mean
from workbench.dataproto.core import DataProto
from workbench.engines.fsdp_engine.folders import (
    WeightReader,
    adapters_of,
    base_folder,
    named_beside,
    read_head,
    write_plain,
    write_together,
)
from workbench.engines.fsdp_engine.meshes import Mesh, agreed, box, largest, local, placed, together
from workbench.engines.fsdp_engine.parallel import build, sum_gradients, summed
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.forward import Head, head_of, hidden_size
from workbench.engines.local_engine.learning import Account, Optimizer, learning_mode
from workbench.engines.local_engine.loading import check_fit
from workbench.engines.local_engine.memory import LiveTensors, available, live, memory_errors, pass_tokens, peaks
from workbench.engines.local_engine.scoring import (
    collect,
    divergence,
    layout,
    micro_batches,
    packs,
    trimmed,
    why_padded,
)
from workbench.engines.local_engine.selfcheck import WANT, Paths, SelfCheck, check, narrowed, unchecked
from workbench.engines.local_engine.states import SCALE, read_optimizer, read_record, scaling_of
from workbench.engines.protocol import Loss, LossCounts, LossOutput
from workbench.engines.settings import FsdpSettings
from workbench.engines.vllm_server.process import Piece, device_name, mapped
from workbench.engines.weights import Outbox, machine, rows_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class RankAccount(Account):
    """Collects the results of one rank's micro-batches, and the first failure of its loss function."""

    trouble: dict[str, Any] | None = None

    def loss(self, make: Callable[[], LossOutput], indices: torch.Tensor | None, t: int) -> torch.Tensor | None:
        """Compute and record one micro-batch's loss by calling `make`; returns None for an empty pass, and after a loss
        has failed."""
        if indices is None or self.trouble is not None:
            return None
        try:
            result = make()
        except Exception as error:  # noqa: BLE001 - the driver raises it, when all ranks have come to the end
            text = "".join(traceback.format_exception(error))
            self.trouble = {"rows": indices.tolist(), "what": first_line(error), "traceback": text}
            return None
        self.add(result, indices, t)
        return result.loss

    def failed(self) -> bool:
        """Whether a loss on this rank raised or is not finite; `trouble` then has the rows and the error."""
        if wrong := self.infinite():  # it came before one that raised
            self.trouble = {"rows": wrong[1], "what": wrong[0], "traceback": None}
        return self.trouble is not None


# --- a model ------------------------------------------------------------------------------------


class ShardedOptimizer(Optimizer):
    """The local engine's optimizer, for parameters that are sharded over a mesh."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], settings: Any, mesh: Mesh) -> None:
        super().__init__(named, settings)
        self._mesh = mesh

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """AdamW's state tensors by parameter name, without copies."""
        return {name: self._adam.state[p] for name, p in self.named.items() if p in self._adam.state}

    def _gradients(self) -> dict[str, torch.Tensor]:
        """This rank's parts of the gradients by parameter name; empty where another rank counts the same part."""
        found: dict[str, Any] = super()._gradients()
        return {name: one.to_local() if self._mesh.counts(one) else one.to_local()[:0] for name, one in found.items()}

    def _together(self, parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Group parameters by their device mesh, because one call of torch's fused optimizer step takes tensors of a
        single mesh only."""
        by_mesh: dict[Any, list[torch.nn.Parameter]] = {}
        for one in parameters:
            by_mesh.setdefault(one.device_mesh, []).append(one)  # type: ignore[attr-defined]
        return list(by_mesh.values())

    def _total(self, square: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(square)
        return square

    @property
    def _kind(self) -> str:
        return self._mesh.device_type

    def _anywhere(self, mine: bool) -> bool:
        return agreed(mine)

    def _placed(self, parameter: Any, kind: str, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor):
            return value
        if kind == "step":
            return value.to(parameter.device)
        return placed(value, parameter)


class ShardedModel:
    """One rank's part of a sharded model. Each method must be called on all ranks together."""

    def __init__(self, path: str, settings: Any, mesh: Mesh, head: bool, siblings: Mapping[str, ShardedModel]) -> None:
        self.settings = settings
        self.mesh = mesh
        self._siblings = siblings
        self.whole = build(path, settings, mesh, head)
        self.selfcheck = unchecked(self.whole.causal, settings)
        self._optimizer: ShardedOptimizer | None = None
        self._summed = summed(self.whole.causal) if mesh.sizes.tp > 1 else []
        self._held: dict[str, torch.Tensor] = {}
        self._outbox = Outbox()

    @property
    def named(self) -> dict[str, DTensor]:
        """This rank's part of each parameter, by the names that a local engine has for them."""
        found: Any = self.whole.named_parameters()
        return {name.removeprefix("causal."): parameter for name, parameter in found}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers by name, whole on every rank, including those that model files do not hold (rotary frequencies)."""
        return {name.removeprefix("causal."): buffer for name, buffer in self.whole.named_buffers()}

    @property
    def learning(self) -> dict[str, DTensor]:
        """The trainable parameters by name: all of them, or with LoRA the adapters and a value head."""
        return {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}

    @property
    def adapted(self) -> bool:
        """Whether the model has LoRA adapters."""
        return lora.config_in(self.whole.causal) is not None

    @property
    def plain(self) -> dict[str, torch.Tensor]:
        """Parameters by name, and those buffers that model files hold."""
        kept = self.whole.causal.state_dict().keys()
        return {**self.named, **{name: buffer for name, buffer in self.buffers.items() if name in kept}}

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """The weights that a saved state holds: all, or with LoRA only the trainable ones, because the others never
        change."""
        return dict(self.learning) if self.adapted else self.plain

    @property
    def optimizer(self) -> ShardedOptimizer:
        """The optimizer of the trainable parameters; it is created at the first access."""
        if self._optimizer is None:
            self._optimizer = ShardedOptimizer(self.learning, self.settings, self.mesh)  # type: ignore[arg-type]
        return self._optimizer

    def steps(self) -> int:
        """Number of optimizer steps taken."""
        return self._optimizer.steps if self._optimizer is not None else 0

    def live(self) -> LiveTensors:
        """Count what this rank holds in memory, for the message of an out-of-memory error."""
        return live(self.whole, self._optimizer, self.settings)

    def peaks(self, begin: bool) -> dict[str, int]:
        """Peak memory in bytes of this rank since the last call with `begin=True` (see `memory.peaks`)."""
        return peaks(self.mesh.device_type, begin)

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Use other settings from here on, given as a dict."""
        self.settings = FsdpSettings(**settings)
        if self.settings.gradient_checkpointing:
            self.whole.causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.whole.causal.gradient_checkpointing_disable()
        if self._optimizer is not None:
            self._optimizer.apply(self.settings)

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds: `weights`, `optimizer`, and the device's `peak` so far (0 on a CPU)."""
        state = self.optimizer.state.values() if self.steps() else ()
        held = {"weights": self.named.values(), "optimizer": [value for one in state for value in one.values()]}
        peak = torch.cuda.max_memory_allocated() if self.mesh.device_type == "cuda" else 0
        return {**{name: sum(local(one).nbytes for one in tensors) for name, tensors in held.items()}, "peak": peak}

    def memory_free(self) -> int:
        """Bytes that this rank can still allocate on its device."""
        return available(torch.device(self.mesh.device_type))

    def pass_tokens(self) -> int:
        """Tokens of a pass (`memory.pass_tokens`): where the settings do not say, by what was free when it was first asked."""
        return self.settings.micro_batch_tokens or self._usual

    @functools.cached_property
    def _usual(self) -> int:
        """Tokens of a pass where the settings do not say."""
        cut = self.mesh.sizes.ranks // self.mesh.sizes.replicate
        return pass_tokens(self.whole.causal, self.settings, self.mesh.device_type, self.memory_free(), cut)

    # --- filling ----------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: str, again: bool = False) -> None:
        """Load the weights of a Hugging Face folder, each rank its own slices; a value head that the folder lacks is
        set to 0.

        With `again`, on a model that is loaded already, a model with LoRA reads only the adapters, from a peft folder.
        """
        adapters = again and self.adapted
        parameters = self.learning if adapters else self.named
        with together():
            small = adapters_of(folder, self.settings)
            if self.whole.value_head is not None:
                small |= read_head(folder, hidden_size(self.whole.causal))
            others = {} if adapters else {name: one for name, one in parameters.items() if not _apart(name)}
            check_fit(f"weights of {folder}", small | named_beside(small, others), parameters)
            for name in parameters.keys() - others.keys():
                local(parameters[name]).copy_(small[name][box(parameters[name])])
            if not adapters:
                whole = WeightReader.of(base_folder(folder), self.settings)
                for name, parameter in others.items():
                    local(parameter).copy_(whole.read(name.replace(".base_layer.", "."), box(parameter)))
                for name, buffer in self.buffers.items():
                    buffer.copy_(whole.buffer(name))

    @torch.no_grad()
    def copy(self, other: ShardedModel) -> None:
        """Copy the weights of another model on the same ranks; a value head that it lacks is set to 0."""
        theirs = {**other.named, **other.buffers}
        mine = {**self.named, **self.buffers}
        wrong = [name for name in mine if name not in theirs and not name.startswith("value_head.")]
        if wrong:
            what, do = "the model to copy has other LoRA layers", "keep its LoRA settings"
            raise EngineError(what, expected=f"weight {wrong[0]}", do=do)
        for name, one in mine.items():
            one.copy_(theirs[name]) if name in theirs else one.zero_()

    @torch.no_grad()
    def mix(self, sibling: str, alpha: float) -> None:
        """Move this rank's part of the weights towards that of the model named `sibling`: w ← (1 − α)·w + α·w_sibling."""
        theirs = self._siblings[sibling].named
        for name, mine in self.named.items():
            mine.mul_(1 - alpha).add_(theirs[name], alpha=alpha)

    @torch.no_grad()
    def weights(self, merged: bool = True) -> dict[str, torch.Tensor] | None:
        """Gather whole weights on rank 0's CPU, by Hugging Face names and with adapters merged; unless `merged`, the
        weights of `stored`. Other ranks get None."""
        held: dict[str, torch.Tensor] = {}
        for name, value in (self.plain if merged else self.stored).items():
            full = _full(value)
            if distributed.get_rank() == 0:
                held[name] = full.detach().cpu().clone()
        if merged and self.adapted and held:
            held = lora.merged(self.whole.causal, held)
        return held if distributed.get_rank() == 0 else None

    @torch.no_grad()
    def save(self, source: str, folder: str, shown: str, merged: bool) -> None:
        """Write a Hugging Face folder, gathering one tensor at a time. With LoRA, unless `merged`, rank 0 writes a peft
        folder."""
        heads: dict[str, Any] = {name: one for name, one in self.named.items() if name.startswith("value_head.")}
        head = {name: one.full_tensor().detach().cpu() for name, one in heads.items()}
        plain = merged or not self.adapted
        if plain and write_together(self.gathering(), head, source, folder, self.settings):
            return
        weights = self.weights(merged)
        with together():
            if weights is not None:
                write_plain(weights, source, folder, self.settings, shown)

    # --- states -----------------------------------------------------------------------------

    def state(self, weights: bool) -> tuple[dict[str, Any], dict[str, float]]:
        """Return what this rank saves: the optimizer's tensors and, with `weights`, the model's, by name; and Adam's
        step count of each parameter."""
        tensors: dict[str, Any] = {f"weights/{name}": value for name, value in self.stored.items()} if weights else {}
        steps: dict[str, float] = {}
        for name, state in (self.optimizer.state if self.steps() else {}).items():
            steps[name] = float(state["step"])
            tensors |= {f"optimizer/{name}|{key}": value for key, value in state.items() if key != "step"}
        return {name: value.detach() for name, value in tensors.items()}, steps

    def scaling(self) -> dict[str, list[float]]:
        """The loss scale of float16, for a saved state's record (see `Optimizer.scaling`)."""
        held = self._optimizer.scaling() if self._optimizer is not None else {}
        return {name: one.tolist() for name, one in held.items()}

    @torch.no_grad()
    def load_state(self, folder: str, steps: bool = True) -> None:
        """Load a saved state: a sharded one of any number of ranks, or a local engine's optimizer. Without `steps`,
        only its weights are loaded."""
        record = read_record(folder)
        tensors = read_optimizer(folder)[0] if record["whole"] else self._read_shards(folder, record)
        self._optimizer = None
        if steps and (record["steps"] or SCALE in tensors):
            self.optimizer.load(tensors, record["steps"])

    def reload(self, path: str, source: str | None) -> None:
        """Restore the weights that the model was opened with, from the model folder `path` or from the saved state
        `source`, and drop the optimizer."""
        self._optimizer = None
        if source is None:
            self.load(path)
        else:
            self.load_state(source, steps=False)

    def _read_shards(self, folder: str, record: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Load the weights of a sharded state in place, where it has any; returns this rank's part of the optimizer's
        tensors."""
        reader = HuggingFaceStorageReader(folder)
        there = reader.read_metadata().state_dict_metadata if record["files"] else {}
        tensors: dict[str, Any] = {}
        if record["weights"]:
            tensors |= {f"weights/{name}": value.detach() for name, value in self.stored.items()}
            for name in [name for name in tensors if name.startswith("weights/value_head.") and name not in there]:
                tensors.pop(name).zero_()  # a policy's state, into a critic
        named, steps = self.named, record["adam_steps"]
        moments = {f"{name}|{kind}": torch.zeros_like(named[name]) for name in steps for kind in _MOMENTS}
        tensors |= {f"optimizer/{key}": value for key, value in moments.items()}
        if tensors:
            try:
                dcp.load(tensors, storage_reader=reader)
            except dcp.api.CheckpointException as cause:  # no Exception: it would end the worker
                do = "load the checkpoint of another step: files of this one are missing or damaged"
                raise CheckpointError(f"the sharded state at {folder} could not be read: {cause}", do=do) from cause
        return {f"{name}|step": torch.tensor(step) for name, step in steps.items()} | moments | scaling_of(record)

    # --- passes -----------------------------------------------------------------------------

    def reshard(self) -> None:
        """Free gathered weights after a pass, also those of the root and of layers that would stay gathered, so that
        weights may change."""
        for module in self.whole.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def packed(self) -> bool:
        """Whether rows go through the model without padding. Raises `EngineError` where the settings demand it and the
        model cannot."""
        model, settings = self.whole.causal, self.settings
        if self.mesh.sizes.cp == 1:
            return packs(model, settings)
        if why := "pack='no'" if settings.pack == "no" else why_padded(model, settings):
            what, do = f"context parallelism (mesh cp) with {type(model).__name__}", "take cp=1 (more ranks in dp)"
            raise EngineError(what, expected="rows that may be packed", found=why, do=do)
        return True

    def _cut(self, share: DataProto, packed: bool) -> Iterator[tuple[torch.Tensor | None, DataProto, int]]:
        """Yield this rank's micro-batches as (row numbers, rows, T), then empty passes (None, one short row, 1) until
        every rank has made as many.

        Before each micro-batch the ranks agree to go on, so that an interrupt stops all of them at the same place. They
        are asked one micro-batch ahead, so that none waits for the answer.
        """
        budget = self.pass_tokens() * self.mesh.sizes.cp  # each rank has its part of the tokens
        groups = micro_batches(self.whole.causal, share, budget, packed) if len(share) else []
        most, stopping = int(largest(max(len(groups), 1))), _stops()
        for number in range(most):
            if stopping():
                raise Interrupted("the work was interrupted; everything finished before is kept")
            if number + 1 < most:
                stopping = _stops()
            if number < len(groups):
                rows, t = trimmed(share.select_idxs(groups[number]))
                yield groups[number], rows, t
            else:
                yield None, _nothing(), 1

    def compute_log_probs(
        self, share: DataProto, want: Sequence[str], temperature: float, base: bool
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs `want` [b, T] of this rank's rows, as a local engine does; with `base`, LoRA adapters are
        switched off."""
        self.whole.eval()
        try:
            with lora.switched_off(self.whole.causal) if base else nullcontext():
                packed = self.packed
                return collect(
                    self._cut(share, packed), lambda rows: self._scored(rows, want, temperature, packed), share, want
                )
        finally:
            self.reshard()

    def examine(self, path: str) -> SelfCheck:
        """Run the self-check: compare ways of scoring with the model's own forward on a few tokens, the same on all
        ranks.

        A model that computes in bfloat16, which hides small differences, is compared in float32, too, as a second copy
        loaded from the folder `path`.
        """
        half, present = self.settings.half(self.mesh.device_type), self
        exact = self
        if half:
            settings = self.settings.replace(dtype="float32")
            exact = ShardedModel(path, settings, self.mesh, self.whole.value_head is not None, {})
            exact.copy(self)

        @contextmanager
        def within(model: ShardedModel) -> Iterator[None]:
            nonlocal present
            present = model
            yield

        def forward(ids: torch.Tensor) -> torch.Tensor:
            rows = DataProto({"input_ids": ids.to(self.mesh.device_type)})
            found: torch.Tensor = present.whole(rows, ("own",), 1.0, False)["own"]
            return found

        def score(head: Head, packed: bool, batch: DataProto) -> dict[str, torch.Tensor]:
            present.whole.causal.workbench_paths = Paths(own_head=head.linear is None)
            found: dict[str, torch.Tensor] = present.whole(batch, WANT, 1.0, packed)
            return found

        models = (exact, self)[: 1 + half]
        precisions = {model is self and half: functools.partial(within, model) for model in models}
        try:
            with narrowed(exact.whole.causal):
                return check(self.whole.causal, self.settings, forward, score, precisions=precisions, agree=largest)
        finally:
            for model in models:
                model.reshard()

    def _scored(
        self, rows: DataProto, want: Sequence[str], temperature: float, packed: bool
    ) -> dict[str, torch.Tensor]:
        with memory_errors("scoring", rows, holds=self.live):
            return self.whole(rows, want, temperature, packed)

    def full_kl(self, share: DataProto, sibling: str, base: bool, temperature: float) -> dict[str, torch.Tensor]:
        """Compute the exact KL, `kl` [b, T] in nats, of this rank's rows to the model named `sibling`; with `base`,
        that model's adapters are switched off."""
        off: Any = lora.switched_off if base else nullcontext
        other = self._siblings[sibling]
        packed = self.packed and other.packed
        # the roots keep their heads gathered after the forward
        mine, theirs = head_of(self.whole.causal), head_of(other.whole.causal)

        def their_logits(states: torch.Tensor) -> torch.Tensor:
            with off(other.whole.causal):
                return theirs.logits(states)

        def found(rows: DataProto) -> dict[str, torch.Tensor]:
            states = self._scored(rows, ("hidden",), temperature, packed)["hidden"]
            with off(other.whole.causal):
                others = other._scored(rows, ("hidden",), temperature, packed)["hidden"]
            way = layout(self.whole.causal, rows, packed)
            return divergence(way, mine, (states, others), their_logits, temperature)

        self.whole.eval()
        try:
            return collect(self._cut(share, packed), found, share, ("kl",))
        finally:
            for model in (self, other):
                model.reshard()

    def backward(
        self, share: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float, seed: int
    ) -> dict[str, Any]:
        """Compute gradients over the rows of all ranks; returns this rank's metrics and columns, and whether and where
        a loss failed.

        A loss that raises on one rank must not leave the others waiting in a collective: that rank makes its remaining
        passes with a loss of 0. At the end `failed` is true on all ranks, as it is where a loss is not finite.
        """
        account = RankAccount(len(share), share["response_mask"].shape[1])
        self.optimizer.zero()
        packed = self.packed
        try:
            with learning_mode(self.whole, packed), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed + distributed.get_rank() // self.mesh.sizes.block)  # dropout: by step and rows
                for indices, rows, t in self._cut(share, packed):
                    with memory_errors("learn", rows, holds=self.live):
                        outputs = self.whole(rows, loss.want, temperature, packed)
                        make = functools.partial(loss, outputs, rows.to(self.mesh.device_type), loss_counts)
                        value = account.loss(make, indices, t)
                        if value is None:  # a pass with a gradient of 0, for the other ranks' sake
                            value = torch.stack([one.sum() for one in outputs.values()]).sum() * 0.0
                        (value * self.optimizer.scale).backward()
        except BaseException:
            self.optimizer.zero()
            raise
        finally:
            self.reshard()
        if self._summed:
            sum_gradients([self.named[name] for name in self._summed], self.mesh["tp"])
        self.optimizer.unscale()
        failed = agreed(account.failed())
        if failed:
            self.optimizer.zero()
        return {**vars(account.read()), "trouble": account.trouble, "failed": failed}

    def learn(self, share: DataProto, *arguments: Any) -> dict[str, Any]:
        """Run `backward`, then take one optimizer step unless it `failed`; adds what `step_scaled` returns to the
        report, as `both`."""
        report = self.backward(share, *arguments)
        if report["failed"]:
            return report
        norm = self.optimizer.clip()
        if math.isfinite(norm) or self.optimizer.scale > 1.0:
            with memory_errors("the optimizer step", share, holds=self.live):
                report["both"] = self.optimizer.step_scaled(norm)
        else:
            report |= {"failed": True, "grad_norm": norm, "broken": self.optimizer.broken()}
        self.optimizer.zero()
        return report

    def probe(self, share: DataProto, *arguments: Any) -> dict[str, Any]:
        """Run `backward` without an optimizer step; like `both`, adds `grad_norm` and `lr` to the report."""
        report = self._gradients(share, *arguments)
        if not report["failed"]:
            report["both"] = {"grad_norm": Mean(self.optimizer.clip()), "lr": Mean(self.optimizer.lr)}
            self.optimizer.zero()
        return report

    def _gradients(self, share: DataProto, *arguments: Any) -> dict[str, Any]:
        """Run `backward`, in float16 at a loss scale at which the gradients are finite."""
        return self.optimizer.finite(lambda: self.backward(share, *arguments))

    def gradient(self, share: DataProto, *arguments: Any) -> dict[str, Any]:
        """Run `backward`; adds `gradient` to the report: whole tensors on the CPU by name on rank 0, None on other
        ranks."""
        report = self._gradients(share, *arguments)
        found = {name: p.grad.full_tensor().cpu() for name, p in self.named.items() if p.grad is not None}  # type: ignore[attr-defined]
        self.optimizer.zero()
        return {**report, "gradient": found if distributed.get_rank() == 0 else None}

    @torch.no_grad()
    def nudge(self, direction: Mapping[str, torch.Tensor], scale: float) -> None:
        """Move the weights by `scale`·direction (whole tensors by name), until `still` restores them."""
        named = self.named
        self._held = {name: named[name].detach().clone() for name in direction}
        for name, values in direction.items():
            named[name].add_(placed(values, named[name]), alpha=scale)

    @torch.no_grad()
    def still(self) -> None:
        """Restore the weights that `nudge` moved, bit for bit."""
        held, self._held = self._held, {}
        for name, values in held.items():
            self.named[name].copy_(values)

    def row_norms(self, batch: DataProto, *arguments: Any) -> list[float]:
        """Compute the gradient norm of each row's part of the loss, NaN where the loss failed; every rank is passed the
        whole batch."""
        norms = []
        sizes, rank = self.mesh.sizes, distributed.get_rank()
        for row in range(len(batch)):
            mine = batch.slice(row, row + (1 if row % sizes.blocks == rank // sizes.block else 0))
            report = self._gradients(mine, *arguments)
            gradients: list[Any] = [p.grad for p in self.named.values() if p.grad is not None]
            squares = [one.to_local().double().square().sum() for one in gradients if self.mesh.counts(one)]
            square = torch.stack(squares).sum().cpu() if squares else torch.zeros((), dtype=torch.float64)
            distributed.all_reduce(square)
            norms.append(math.nan if report["failed"] else math.sqrt(float(square)))
        self.optimizer.zero()
        return norms

    # --- a push of weights ------------------------------------------------------------------

    # Into shared memory each rank writes its own part, and no rank ever has a whole tensor. Other ways gather one bucket at a
    # time, cast to the sampler's dtype before it is gathered.

    def sends(self) -> tuple[str, str]:
        """Return this rank's machine and GPU, by name."""
        return machine(), device_name(self._device())

    def _device(self) -> torch.device:
        kind = self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @torch.no_grad()
    def send_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> Any:
        """Write pieces of tensors to `place` (see `Outbox.send`): into a file each rank writes the part that it holds;
        elsewhere whole tensors are gathered, and of a broadcast rank 0 sends."""
        if "file" in place:
            held, layers = lora.by_plain_names(self.plain), lora.layers(self.whole.causal)
            memory = mapped(place["file"], place["nbytes"], write=True)
            for piece in (one for one in pieces if not one.tied):
                self._write(piece, piece.within(memory), held, layers.get(piece.name))
            return None

        whole = self.gathering()

        def value(piece: Piece) -> torch.Tensor:
            return rows_of(whole(piece.name, getattr(torch, piece.dtype)), piece)

        if "broadcast" in place and distributed.get_rank():
            for piece in pieces:
                value(piece) if not piece.tied else None  # its part of what rank 0 gathers
            return None
        sent = self._outbox.send(pieces, place, value, self._device())
        return sent if "data" not in place or distributed.get_rank() == 0 else None

    def gathering(self) -> Callable[..., torch.Tensor]:
        """Return a function that gathers one whole tensor on every rank, by its plain name and with adapters merged;
        `dtype` converts it first."""
        held, layers = lora.by_plain_names(self.plain), lora.layers(self.whole.causal)

        def whole(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            if name not in layers:
                return _full(held[name].to(dtype))
            base, a, b = (_full(one) for one in lora.parts(held, name))
            return base + lora.delta(layers[name], a, b)

        return whole

    def _write(self, piece: Piece, there: torch.Tensor, held: Mapping[str, Any], layer: Any) -> None:
        """Write the rows of a piece that this rank holds to `there`; rows that several ranks hold are written by the
        first of them."""
        base, *small = [held[piece.name]] if layer is None else lora.parts(held, piece.name)
        small = [_full(one) for one in small]  # by all ranks together
        if not self.mesh.counts(base):
            return
        mine = local(base)
        if not piece.shape:
            there.copy_(mine)
            return
        rows, *further = box(base)
        begin, end = max(rows.start, piece.first), min(rows.stop, piece.first + piece.rows)
        if begin < end:
            part = mine[begin - rows.start : end - rows.start]
            if layer is not None:
                part = part + lora.delta(layer, small[0], small[1], slice(begin, end))[:, *further]
            there[begin - piece.first : end - piece.first, *further].copy_(part)

    def open_group(self, size: int | None = None, backend: str = "") -> Any:
        """Form the process group of a broadcast on rank 0: without `size`, open its port and return (host, port); with
        it, join the group."""
        if distributed.get_rank():
            return None
        return self._outbox.listen() if size is None else self._outbox.join(size, backend)

    def empty_cache(self) -> None:
        """Free the device memory that torch has cached for reuse."""
        self._outbox.drop()
        if self.mesh.device_type == "cuda":
            torch.cuda.empty_cache()


def _full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _apart(name: str) -> bool:
    """Whether a parameter is stored in a file of its own: a LoRA adapter's, or a value head's."""
    return "lora_" in name or name.startswith("value_head.")


def _stops() -> Callable[[], bool]:
    """Start asking all ranks whether any was interrupted; returns a function that waits for the answer."""
    mine = torch.zeros(())
    try:
        runtime.check()
    except Interrupted:
        mine += 1
    work = distributed.all_reduce(mine, distributed.ReduceOp.MAX, async_op=True)

    def answer() -> bool:
        work.wait()
        return bool(mine)

    return answer


def _nothing() -> DataProto:
    """Make one row of two tokens, for a pass without rows of its own."""
    one = torch.ones(1, 2, dtype=torch.long)
    columns = {"input_ids": one * 0, "attention_mask": one, "position_ids": torch.tensor([[0, 1]])}
    return DataProto({**columns, "response_mask": one[:, :1]})
