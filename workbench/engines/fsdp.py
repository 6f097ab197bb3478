"""Weights cut over ranks by FSDP2: the driver's side, which keeps the LogProbModel and Learner protocols over a `Ranks`.

Rows are shared out by their tokens and come back in order; counts are global, so ranks and micro-batches change no loss.
Where the ranks are (processes here, Ray actors on a cluster) the engine does not know.
"""

from __future__ import annotations

import tempfile
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from workbench.dataproto import DataProto
from workbench.engines import lora
from workbench.engines.agreement import learned, refuse
from workbench.engines.frozen import FrozenModel
from workbench.engines.fsdp_group import Group, ShardedSnapshot, local_group, memory_of, shared_out
from workbench.engines.fsdp_saving import Saves
from workbench.engines.fsdp_settings import FsdpSettings
from workbench.engines.loading import load_tokenizer, resolve
from workbench.engines.protocol import Learned, Loss, Normalisers
from workbench.engines.scoring import check_ids
from workbench.engines.sharded_files import read_record
from workbench.engines.sharding import empty_model
from workbench.errors import EngineError, WorkerLost, message

_SCORED = ("input_ids", "attention_mask", "position_ids", "response_mask")
_KINDS = ("log_probs", "entropy", "sum_pi_squared", "values")


class FsdpEngine:
    """LogProbModel and Learner over ranks; see `engines.protocol` for the contracts. Sampling is another engine's."""

    def __init__(
        self,
        path: str,
        group: Group,
        settings: FsdpSettings,
        *,
        shown: str = "",
        head: bool = False,
        source: str | ShardedSnapshot | None = None,
        scratch: str | None = None,
        **switches: Any,
    ) -> None:
        self._source = path
        self._group = group
        self._settings = settings
        self._head = head
        self._start = source
        self._scratch = scratch
        self._name = _new_id()
        self._taught = False
        self._shape = empty_model(path, settings)
        self.tokenizer = load_tokenizer(path, self._shape, settings)
        self.path = shown or path
        self.template_switches = switches
        self.version = 0
        self.state_id = _new_id()
        self._saves = Saves(group, self._name, settings)
        self._open(source)
        weakref.finalize(self, group.let_go, self._name)

    # --- the ranks --------------------------------------------------------------------------

    def _open(self, source: str | ShardedSnapshot | None) -> None:
        """Put the model on the ranks."""
        place = source.folder if isinstance(source, ShardedSnapshot) else source
        self._group.call(
            "open",
            self._name,
            self._source,
            self._settings.to_dict(),
            self._head,
            place,
            timeout=self._settings.deadline,
        )
        self._generation = self._group.generation

    @property
    def lost(self) -> bool:
        """Whether the ranks that held the weights are gone."""
        return not self._group.alive or self._generation != self._group.generation

    def _call(self, method: str, *shared: Any, each: Any = None, seconds: float | None = None) -> list[Any]:
        if self.lost:
            if self._taught:
                raise EngineError(
                    message(
                        "the ranks that held these weights have ended",
                        found=f"version {self.version}, state {self.state_id}",
                        do="restore a snapshot or load a checkpoint: new workers are started then",
                    )
                )
            self._open(self._start if isinstance(self._start, ShardedSnapshot) else None)
        self._saves.look()
        try:
            return self._group.call(method, *shared, each=each, timeout=seconds or self._settings.deadline)
        except (WorkerLost, TimeoutError) as error:
            self._saves.lost(error)
            raise

    def _on_rows(self, method: str, batch: DataProto, *shared: Any) -> tuple[list[Any], list[torch.Tensor]]:
        """`method` of each rank's model with its share of the rows: reports, and the row numbers of each share."""
        each, places = self._shares(batch)
        return self._call("on", self._name, method, *shared, each=each), places

    def _shares(self, batch: DataProto) -> tuple[list[tuple[Any, ...]], list[torch.Tensor]]:
        check_ids(self._shape, batch)
        rows = DataProto(dict(batch.batch.items()), None, batch.meta_info)
        places = shared_out(batch["attention_mask"].sum(-1).tolist(), self._group.size)
        return [(rows.select_idxs(place),) for place in places], places

    # --- LogProbModel -----------------------------------------------------------------------

    def score(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Per response token, [B, T] float32 on the CPU, 0 outside the mask."""
        return self._scored("score", batch, want, temperature)

    def score_base(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The same with the LoRA adapters switched off."""
        return self._scored("score_base", batch, want, temperature)

    def _scored(
        self, method: str, batch: DataProto, want: Sequence[str], temperature: float
    ) -> dict[str, torch.Tensor]:
        known = _KINDS if self._head else _KINDS[:-1]
        if not set(want) <= set(known):
            have = ", ".join(known) + ("" if self._head else "; values need engine.critic()")
            raise EngineError(message("score", expected=have, found=", ".join(want)))
        parts, places = self._on_rows(method, batch.select(list(_SCORED), []), tuple(want), temperature)
        result = {name: torch.zeros(batch["response_mask"].shape) for name in want}
        for part, place in zip(parts, places, strict=True):
            for name in want:
                result[name][place] = part[name]
        return result

    def full_kl(self, batch: DataProto, reference: FrozenModel, temperature: float = 1.0) -> torch.Tensor:
        """[B, T] exact KL(policy‖reference) per response token, over the whole vocabulary, to a reference on the same ranks."""
        other = reference._engine
        if not isinstance(other, FsdpEngine) or other._group is not self._group:
            raise EngineError(message("the exact KL", expected="a reference on the same ranks", found=repr(reference)))
        self._call("steps", self._name)
        other._call("steps", other._name)  # both are there, on new ranks, too
        each, places = self._shares(batch.select(list(_SCORED), []))
        parts = self._call("full_kl", self._name, other._name, reference._base, temperature, each=each)
        result = torch.zeros(batch["response_mask"].shape)
        for part, place in zip(parts, places, strict=True):
            result[place] = part
        return result

    # --- Learner ----------------------------------------------------------------------------

    def learn(self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0) -> Learned:
        """One optimizer step of all ranks on one mini-batch; `NonFinite` leaves everything as it was."""
        steps = self._steps()
        before, self.state_id = (self.state_id, self._taught), _new_id()
        self._taught = True
        try:
            return self._backward("learn", batch, loss, normalisers, temperature)
        except BaseException:
            # an interrupt may come before the step or after it: the ranks know, where they are still there
            with suppress(WorkerLost):
                if not self.lost and self._steps() == steps:
                    self.state_id, self._taught = before
            raise

    def _steps(self) -> int:
        return int(self._call("steps", self._name)[0])

    def commit(self) -> int:
        """The update is over: the next policy version."""
        self.version += 1
        return self.version

    def probe(
        self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0, per_row: bool = False
    ) -> Learned:
        """Loss and gradient norm without a step; per row, one backward pass a row."""
        found = self._backward("probe", batch, loss, normalisers, temperature)
        columns = dict(found.columns)
        if per_row:
            rows = DataProto(dict(batch.batch.items()), None, batch.meta_info)
            each = [(rows,)] * self._group.size
            shared = (loss, normalisers, temperature, torch.initial_seed() % 2**62)
            norms = self._call("on", self._name, "row_norms", *shared, each=each)[0]
            columns["row_grad_norm"] = torch.tensor(norms)
        return Learned(found.metrics, columns)

    def gradient(
        self, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Parameter → gradient of the loss, whole, on the CPU; no step is taken and nothing is clipped."""
        seed = torch.initial_seed() % 2**62
        reports, places = self._on_rows("gradient", batch, loss, normalisers, temperature, seed)
        refuse(reports, places)
        return dict(reports[0]["gradient"])

    @contextmanager
    def nudged(self, direction: Mapping[str, torch.Tensor], scale: float) -> Iterator[None]:
        """Inside, the weights are moved by `scale`·direction; after it they are what they were, bit for bit."""
        self._call("on", None, self._name, "nudge", dict(direction), scale)
        try:
            yield
        finally:
            self._call("on", None, self._name, "still")

    def _backward(
        self, method: str, batch: DataProto, loss: Loss, normalisers: Normalisers, temperature: float
    ) -> Learned:
        # the caller seeds torch's generator for the step (stages.update.seeded): looked at, not drawn from
        seed = torch.initial_seed() % 2**62
        return learned(*self._on_rows(method, batch, loss, normalisers, temperature, seed), len(batch))

    # --- weights ----------------------------------------------------------------------------

    def full_weights(self) -> dict[str, torch.Tensor]:
        """All weights, whole, on the CPU, by the local engine's names, adapters worked in; a tied one under both of its names."""
        found = dict(self._call("on", None, self._name, "weights")[0])
        every = self._shape.named_parameters(remove_duplicate=False)
        named = [(name.replace(".base_layer.", "."), id(one)) for name, one in every if "lora_" not in name]
        first = {one: name for name, one in reversed(named)}
        return found | {name: found[first[one]] for name, one in named}

    def snapshot(self) -> ShardedSnapshot:
        """Weights, optimizer, schedule and version, each rank's part in a file of a scratch folder."""
        folder = tempfile.mkdtemp(prefix="workbench-snapshot-", dir=self._scratch)
        snapshot = ShardedSnapshot(folder, self.state_id, self.version, self._taught)
        self.save_sharded(Path(folder))
        return snapshot

    def restore(self, snapshot: ShardedSnapshot) -> None:
        """Back to a snapshot, bit for bit; on new workers where the old ones are gone."""
        self.state_id = _new_id()  # half-way there is no state that anybody knows
        self.load_sharded(Path(snapshot.folder))
        self.state_id, self._taught = snapshot.state_id, snapshot.taught

    def save_sharded(self, path: Path, wait: bool = True) -> None:
        """Weights, optimizer, schedule and version as a distributed checkpoint in a new folder: each rank writes its part.

        With `wait=False` the state is copied to host memory and written while the engine goes on. The folder is there when
        all ranks have written all of it, or not at all. The next save, `finish_saving`, `close` and the interpreter's
        end wait for it; a failure is raised by the next call (`failed_save`). Raises `CheckpointError`.
        """
        self._saves.begin(self._call, Path(path), self._record(), weights=True, wait=wait)

    def finish_saving(self) -> None:
        """Wait for a save that goes on beside. Raises `CheckpointError` where it failed."""
        self._saves.finish()

    def _record(self) -> dict[str, Any]:
        return {"version": self.version, "settings": self._settings.to_dict(), "path": self.path}

    def load_sharded(self, path: Path) -> None:
        """What `save_sharded` wrote, on this number of ranks. Raises `CheckpointError` where it is incomplete."""
        record = read_record(path)
        self._ready()
        self._group.call("load_shards", self._name, str(Path(path).absolute()), timeout=self._settings.deadline)
        self.version, self.state_id, self._taught = int(record["version"]), _new_id(), True

    def save(self, path: Path) -> None:
        """A plain Hugging Face folder (with LoRA the adapter's), gathered and written by rank 0; a critic has
        `value_head.safetensors` beside it.
        """
        self._call("save_plain", self._name, self._source, str(Path(path).absolute()), self.path, False)

    def save_merged(self, path: str | Path) -> Path:
        """A plain Hugging Face folder with the LoRA adapter worked into the weights."""
        self._call("save_plain", self._name, self._source, str(Path(path).absolute()), self.path, True)
        return Path(path)

    def save_state(self, path: Path) -> None:
        """Optimizer (a distributed checkpoint), schedule and version; no pickle."""
        self._saves.begin(self._call, Path(path), self._record(), weights=False, wait=True)

    def load_state(self, model_path: Path, state_path: Path) -> None:
        """What `save` and `save_state` wrote, back into this engine, on whatever number of ranks it has."""
        record = read_record(state_path)
        self._ready()
        folder, deadline = str(Path(model_path).absolute()), self._settings.deadline
        self._group.call("load", self._name, folder, timeout=deadline)
        self._group.call("load_shards", self._name, str(Path(state_path).absolute()), timeout=deadline)
        self.version, self.state_id, self._taught = int(record["version"]), _new_id(), True

    def _ready(self) -> None:
        """Somewhere to load into."""
        if self.lost:
            self._open(None)

    def reference(self) -> FrozenModel:
        """The weights as they are now, frozen and cut over the same ranks: a LogProbModel and nothing else. With LoRA the base,
        and no second copy.
        """
        if lora.config_in(self._shape) is not None:
            return FrozenModel(self, as_loaded=True, base=True)
        as_loaded = self._untouched()
        engine = self._twin(self._settings, head=False, kept=None if as_loaded else self.snapshot())
        return FrozenModel(engine, as_loaded=as_loaded)

    def critic(self, **changes: Any) -> FsdpEngine:
        """A learner of its own with these weights and a value head that starts at 0, on the same ranks."""
        kept = None if self._untouched() else self.snapshot()
        return self._twin(self._settings.replace(**changes), head=True, kept=kept)

    def _untouched(self) -> bool:
        return self.version == 0 and not self._taught

    def _twin(self, settings: FsdpSettings, *, head: bool, kept: ShardedSnapshot | None) -> FsdpEngine:
        """Another engine on the same ranks with these weights; `kept` has them for the day when new ranks are needed."""
        if self.lost:
            self._call("steps", self._name)  # says so, or starts again from the path
        twin = FsdpEngine(
            self._source,
            self._group,
            settings,
            shown=self.path,
            head=head,
            source=self._name,
            scratch=self._scratch,
            **self.template_switches,
        )
        twin._start = kept
        return twin

    # --- what it is -------------------------------------------------------------------------

    @property
    def max_length(self) -> int | None:
        """Positions that the model has; None where its configuration does not say."""
        return getattr(self._shape.config, "max_position_embeddings", None)

    def memory_needed(self) -> tuple[torch.device, dict[str, int]]:
        """(device, bytes by part) that learning will add on one device of this machine; on a CPU all its ranks share one."""
        return memory_of(self._shape, self._settings, self._group)

    def checkpoint_bytes(self) -> int:
        """Weights and Adam's two moments, all ranks together."""
        return 3 * sum(one.numel() * one.element_size() for one in self._shape.parameters())

    def memory(self) -> list[dict[str, int]]:
        """Bytes of each rank: `weights`, `optimizer`, and the device's `peak`."""
        return self._call("memory", self._name)

    def describe(self) -> dict[str, Any]:
        """Path and settings, for a run's record."""
        return {"path": self.path, "ranks": self._group.size, **self._settings.to_dict()}

    def close(self) -> None:
        """Finish what is being saved, and end the workers, those of every engine on the same ranks."""
        self._group.close()

    def __repr__(self) -> str:
        count = sum(one.numel() for one in self._shape.parameters())
        kind = "critic" if self._head else "policy"
        state = "ranks have ended" if self.lost else f"{self._group.size} ranks"
        return f"FsdpEngine({self.path!r}: {kind}, {type(self._shape).__name__}, {count:,} parameters, {state}, version {self.version})"


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def fsdp(
    path: str | Path,
    *,
    ranks: int = 2,
    on: Group | None = None,
    threads: int | None = None,
    scratch: str | Path | None = None,
    template_switches: Any = None,
    **settings: Any,
) -> FsdpEngine:
    """A transformers model cut over ranks: `fsdp("data/tiny-arith", ranks=2, lr=1e-3)`.

    `path` as for `local`. The ranks are processes of this machine, on its GPUs or (gloo) its cores, unless `on` gives a
    `Group` that stands elsewhere; engines on one group share its workers. `scratch` is where snapshots go: on several machines
    a folder that all see. Other settings: `FsdpSettings`; unknown names are refused. Raises `EngineError` where there is no
    such model, or the workers cannot start.
    """
    chosen = FsdpSettings.from_parameters(settings)
    folder = str(resolve(path))
    if Path(folder).exists():
        folder = str(Path(folder).absolute())  # a worker may stand elsewhere
    group = on or local_group(ranks, device=chosen.device, threads=threads)
    place = str(scratch) if scratch is not None else None
    return FsdpEngine(folder, group, chosen, shown=str(path), scratch=place, **(template_switches or {}))
