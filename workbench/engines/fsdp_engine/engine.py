"""The FSDP engine: one transformers model sharded over ranks by FSDP2; this is the driver's side, over a `Ranks`.

Rows are shared out by their tokens and results come back in order; counts are global, so ranks and micro-batches change no
loss. The ranks are processes of this machine or Ray actors on a cluster.
"""

from __future__ import annotations

import logging
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from workbench.base.config import shows_settings
from workbench.base.errors import CheckpointError, EngineError, NonFinite, WorkerLost
from workbench.base.memory import estimated
from workbench.base.metrics import join
from workbench.base.progress import working
from workbench.dataproto.columns import EXPERTS, PIXELS
from workbench.dataproto.core import DataProto
from workbench.engines.fsdp_engine.group import Group, ShardedSnapshot, local_group, shared_out
from workbench.engines.fsdp_engine.meshes import ranks_of, sizes_of
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.engine import FrozenModel, ModelEngine
from workbench.engines.local_engine.learning import INFINITE_LOSS, infinite_norm
from workbench.engines.local_engine.loading import load_model, load_tokenizer, resolve, stamps
from workbench.engines.local_engine.memory import learning_estimate
from workbench.engines.local_engine.scoring import check_ids, check_routed
from workbench.engines.local_engine.states import read_record
from workbench.engines.protocol import Loss, LossCounts, SnapshotCost, StepResult, new_id
from workbench.engines.rehearsal import Shape, sharded
from workbench.engines.settings import FsdpSettings
from workbench.engines.vllm_server.process import Piece

log = logging.getLogger("workbench")
GRACE = 10.0
"""Seconds past a save's deadline that the ranks have to say so; who has not is hung, and the group is ended."""
_SCORED = ("input_ids", "attention_mask", "position_ids", "response_mask")


class FsdpEngine(ModelEngine):
    """Scores with and trains one transformers model that is sharded over ranks; made by `fsdp`.

    It is a `LogProbModel` and a `Learner` of `engines.protocol`. It does not sample: pair it with an engine that does.
    """

    def __init__(
        self,
        path: str,
        group: Group,
        settings: FsdpSettings,
        *,
        shown: str = "",
        head: bool = False,
        source: str | None = None,
        scratch: str | None = None,
        **switches: Any,
    ) -> None:
        # the kernels that attention needs are where it runs, not here
        self._sizes = sizes_of(settings.mesh, group.size)
        shape = load_model(path, settings.replace(attn_implementation=None), empty=True)
        if settings.mesh is not None:
            from workbench.engines.fsdp_engine.parallel import refuse  # torch's FSDP: half a second of imports

            refuse(shape, self._sizes)
        tokenizer = load_tokenizer(path, shape, settings)
        super().__init__(shape, tokenizer, settings, path=shown or path, head=head, **switches)
        self._settings: FsdpSettings = settings
        self._source, self._files = path, stamps(path)
        self._group = group
        self._start: ShardedSnapshot | None = None
        self._scratch = scratch
        self._name = new_id()
        self._trained = False
        self._saving: _Save | None = None
        self._open(source)
        weakref.finalize(self, group.let_go, self._name)

    # --- the ranks --------------------------------------------------------------------------

    def _open(self, source: str | None) -> None:
        """Load the model on all ranks, with the weights of `source` where it is given, and keep the self-check's
        result."""
        given = (self._name, self._source, self._settings.to_dict(), self._critic, source)
        self.selfcheck = self._group.call("open", *given, timeout=self._settings.deadline)[0]
        self._generation = self._group.generation

    @property
    def lost(self) -> bool:
        """Whether the worker processes that held the weights are gone."""
        return not self._group.alive or self._generation != self._group.generation

    def _call(
        self,
        method: str,
        *shared: Any,
        each: Any = None,
        seconds: float | None = None,
        like: tuple[str, int] | None = None,
    ) -> list[Any]:
        if self.lost:
            if self._trained:
                what = "the workers that held this engine's weights have ended"
                found = f"weights of version {self.version} (state {self.state_id}) are lost"
                do = "restore a snapshot or load a checkpoint; that starts new workers"
                raise EngineError(what, found=found, do=do)
            self._open(self._start.folder if self._start is not None else None)
        self._look_at_save()
        try:
            return self._group.call(method, *shared, each=each, timeout=seconds or self._settings.deadline, like=like)
        except (WorkerLost, TimeoutError) as error:
            self._save_lost(error)
            raise

    def _on(self, method: str, *shared: Any, each: Any = None, tokens: int = 0) -> list[Any]:
        """Call `method` of every rank's model and return the results by rank.

        `each` has further first arguments for each rank; `tokens` is the amount of work, from which the call's deadline
        follows.
        """
        given = (*(() if each is not None else (None,)), self._name, method, *shared)
        return self._call("on", *given, each=each, like=(f"{self._name}.{method}", tokens))

    def _on_rows(self, method: str, batch: DataProto, *shared: Any) -> tuple[list[Any], list[torch.Tensor]]:
        """Split a batch over the ranks by tokens and call `method` with each rank's rows; returns results and row
        numbers by rank. Ranks of one block (cp·tp) get the same rows."""
        check_ids(self._model, batch)
        if PIXELS in batch:
            raise EngineError("rows with pictures in an FSDP engine", expected="text", do="use engines.local")
        rows = DataProto(dict(batch.batch.items()), None, batch.meta_info)
        lengths = batch["attention_mask"].sum(-1).tolist()
        places = shared_out(lengths, self._sizes.blocks)
        each = [(share,) for share in map(rows.select_idxs, places) for _ in range(self._sizes.block)]
        found = self._on(method, *shared, each=each, tokens=sum(lengths))
        return found, [place for place in places for _ in range(self._sizes.block)]

    def _firsts(self, by_rank: list[Any]) -> list[Any]:
        """Keep the first of each block of ranks that computed the same rows."""
        return by_rank[:: self._sizes.block]

    # --- LogProbModel -----------------------------------------------------------------------

    def _collected(self, method: str, batch: DataProto, want: Sequence[str], *shared: Any) -> dict[str, torch.Tensor]:
        scored = batch.select([*_SCORED, *(EXPERTS,) * (EXPERTS in batch)], [])
        parts, places = map(self._firsts, self._on_rows(method, scored, *shared))
        back = torch.argsort(torch.cat(places))
        return {name: torch.cat([part[name] for part in parts])[back] for name in want}

    def _scored(
        self, batch: DataProto, want: Sequence[str], temperature: float, base: bool = False
    ) -> dict[str, torch.Tensor]:
        self._check_want(want)
        return self._collected("compute_log_probs", batch, want, tuple(want), temperature, base)

    def full_kl(self, batch: DataProto, reference: FrozenModel, temperature: float = 1.0) -> torch.Tensor:
        """Compute the exact KL(policy‖reference) of each response token, [B, T] in nats. Raises `EngineError` where the
        reference is not on the same ranks."""
        other = reference._engine
        if not isinstance(other, FsdpEngine) or other._group is not self._group:
            raise EngineError("full_kl (exact KL)", expected="a reference on the same ranks", found=repr(reference))
        other._steps()  # it is there, on new ranks, too
        return self._collected("full_kl", batch, ("kl",), other._name, reference._base, temperature)["kl"]

    # --- Learner ----------------------------------------------------------------------------

    def learn(self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0) -> StepResult:
        """Take one optimizer step on one mini-batch. Raises `NonFinite`, with nothing changed, for a NaN or infinite loss."""
        check_routed(self._settings, batch)
        steps, rng = self._steps(), self._rng()
        before, self.state_id = (self.state_id, self._trained), new_id()
        self._trained = True
        try:
            learned = self._backward("learn", batch, loss, loss_counts, temperature)
            self._record(batch, loss, loss_counts, temperature, rng)
            return learned
        except BaseException:
            # an interrupt may come before the step or after it: the ranks know, where they are still there
            with suppress(WorkerLost):
                if not self.lost and self._steps() == steps:
                    self.state_id, self._trained = before
                    raise
            self._since = None  # it may have been taken
            raise

    def _steps(self) -> int:
        return int(self._on("steps")[0])

    def probe(
        self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0, per_row: bool = False
    ) -> StepResult:
        """Compute loss and gradient norm without an optimizer step; `per_row` adds the column `row_grad_norm` [B], at
        the cost of one backward pass for each row."""
        check_routed(self._settings, batch)
        result = self._backward("probe", batch, loss, loss_counts, temperature)
        columns = dict(result.columns)
        if per_row:
            rows = DataProto(dict(batch.batch.items()), None, batch.meta_info)
            tokens = int(batch["attention_mask"].sum())
            norms = self._on("row_norms", rows, loss, loss_counts, temperature, _seed(), tokens=tokens)[0]
            columns["row_grad_norm"] = torch.tensor(norms)
        return StepResult(result.metrics, columns)

    def gradient(
        self, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """Gradient of the loss by parameter name, whole tensors on the CPU; no step is taken and nothing is clipped."""
        check_routed(self._settings, batch)
        reports, places = self._on_rows("gradient", batch, loss, loss_counts, temperature, _seed())
        _refuse(reports, places)
        return dict(reports[0]["gradient"])

    @contextmanager
    def perturbed(self, direction: Mapping[str, torch.Tensor], scale: float) -> Iterator[None]:
        """Context manager: moves the weights by `scale`·direction inside, and restores them bit for bit at the end."""
        self._on("nudge", dict(direction), scale)
        try:
            yield
        finally:
            self._on("still")

    def _backward(
        self, method: str, batch: DataProto, loss: Loss, loss_counts: LossCounts, temperature: float
    ) -> StepResult:
        reports, places = self._on_rows(method, batch, loss, loss_counts, temperature, _seed())
        _refuse(reports, places)
        reports, places = self._firsts(reports), self._firsts(places)
        columns: dict[str, torch.Tensor] = {}
        for report, place in zip(reports, places, strict=True):
            for name, part in report["columns"].items():
                if name not in columns:
                    columns[name] = torch.zeros(len(batch), part.shape[1], dtype=part.dtype)
                columns[name][place] = part
        return StepResult({**join(report["metrics"] for report in reports), **reports[0]["both"]}, columns)

    # --- weights ----------------------------------------------------------------------------

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Gather all weights as whole tensors on the CPU, by Hugging Face names: LoRA adapters are merged, and a tied
        output layer appears under both of its names."""
        weights = dict(self._on("weights")[0])
        every = self._model.named_parameters(remove_duplicate=False)
        named = [(name.replace(".base_layer.", "."), id(one)) for name, one in every if "lora_" not in name]
        first = {one: name for name, one in reversed(named)}
        return weights | {name: weights[first[one]] for name, one in named}

    def sends(self) -> dict[str, Any]:
        """Describe where the ranks are, for the choice of a way to push weights (see `WeightSender.sends`)."""
        machines, devices = zip(*self._on("sends"), strict=True)
        where = {"machines": sorted(set(machines)), "pid": None, "devices": [one for one in devices if one]}
        precision = self._settings.precision("cuda" if where["devices"] else "cpu")
        return {**where, "adapter": lora.adapter_of(self._model), "precision": precision}

    def send_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> Any:
        """Write pieces of tensors to `place` (see `Outbox.send`); where it is a file, each rank writes the rows that it
        holds."""
        found = self._on("send_weights", pieces, dict(place))
        return {name: handle for one in found for name, handle in one.items()} if "ipc" in place else found[0]

    def open_group(self, join: tuple[int, str] | None = None) -> Any:
        """Form the process group for a broadcast of weights: without `join`, open a port on rank 0 and return (host,
        port); then `join` = (number of processes, backend)."""
        return self._on("open_group", *(join or ()))[0]

    def empty_cache(self) -> None:
        """Free the device memory that torch has cached for reuse, on every rank."""
        self._on("empty_cache")

    def _hold(self, kind: str, folder: str | Path | None) -> ShardedSnapshot:
        """Save the present state to a new folder in the engine's `scratch`, one file for each rank; `folder` is not
        used, because all nodes must see the files.

        With the kinds `memory` and `replay`, a model still in the state of its own files is not saved: it can be loaded
        from them again.
        """
        named = self.state_id, self.version, self._trained
        if kind in ("memory", "replay") and self._as_loaded():
            return ShardedSnapshot("", *named)
        place = tempfile.mkdtemp(prefix="workbench-snapshot-", dir=self._scratch)
        snapshot = ShardedSnapshot(place, *named)
        self.save_sharded(Path(place))
        return snapshot

    def _as_loaded(self) -> bool:
        """Whether a snapshot needs no files, because the weights can be loaded again from the model's folder. With LoRA
        it always writes the adapters, which takes less than reading the base again."""
        return self._untouched() and not self._adapted and self._files == stamps(self._source)

    def _check(self, snapshot: ShardedSnapshot) -> None:
        if not snapshot.folder and self._files != stamps(self._source):
            what = f"the weights of a snapshot are in {self._source}, which was written to since"
            raise EngineError(what, do="write models to folders of their own, and open a new engine")

    def _return_to(self, snapshot: ShardedSnapshot) -> None:
        """Load a snapshot's weights and optimizer into the ranks, on new workers where the old ones are gone."""
        start = self._start.folder if self._start is not None else None
        if snapshot.folder:
            self.load_sharded(Path(snapshot.folder))
        elif self.lost:
            self._open(start)
        else:
            self._on("reload", self._source, start)
        self.version, self._trained = snapshot.version, snapshot.trained

    def _full_cost(self, kind: str) -> SnapshotCost:
        """Bytes on disk that a snapshot takes, as much as a checkpoint: with LoRA the adapters and their moments."""
        if kind in ("memory", "replay") and self._as_loaded():
            return SnapshotCost()
        return SnapshotCost(disk=self.checkpoint_bytes(), folder=self._scratch or tempfile.gettempdir())

    def save_sharded(self, path: Path, wait: bool = True) -> None:
        """Write weights, optimizer, schedule and version as a distributed checkpoint, each rank its part, to a new folder.

        The folder appears when all ranks have written all of it, or not at all. With `wait=False` the state is copied to host
        memory and written in the background; the next save, `finish_saving`, `close` and the interpreter's end wait for it,
        and the next call raises where it failed (setting `failed_save`). Raises `CheckpointError` where saving fails.
        """
        self._save_shards(Path(path), weights=True, wait=wait)

    def _save_shards(self, path: Path, *, weights: bool, wait: bool) -> None:
        self.finish_saving()
        key, seconds = new_id(), self._settings.save_deadline
        end = time.monotonic() + seconds
        record = {"version": self.version, "settings": self._settings.to_dict(), "path": self.path, "id": key}
        given = (self._name, str(path.absolute()), record, weights, seconds, wait)
        failure = self._call("save_shards", *given, seconds=seconds + GRACE)[0]
        if not wait:
            self._saving = _Save(path, key, end, self._group.generation)
            self._group.waits(self.finish_saving)
        elif failure:
            raise _failed(path, failure)

    def finish_saving(self) -> None:
        """Wait for a save in the background to end. If it failed, raise `CheckpointError` or log it (setting
        `failed_save`)."""
        if self._saving is not None:
            self._look_at_save(max(self._saving.end - time.monotonic(), 0.0) + 0.1)

    def _save_lost(self, error: BaseException) -> None:
        """Add a note to `error`, with which the ranks ended, that a background save was not finished."""
        save, self._saving = self._saving, None
        if save is not None and not save.is_there():
            error.add_note(f"the state that was being saved to {save.path} was not finished and is not there")

    def _look_at_save(self, seconds: float = 0.0) -> None:
        """Check the save in the background, waiting up to `seconds` for its end; a failure is raised or logged (setting
        `failed_save`)."""
        saving = self._saving
        if saving is None:
            return
        if not self._group.alive or self._group.generation != saving.generation:
            failure = "" if saving.is_there() else "the ranks ended before all of it was written"
        else:
            timeout = max(saving.end - time.monotonic(), 0.0) + GRACE
            try:
                # rank 0 publishes, and answers for all; it waits for the others
                failure = self._group.call("save_answer", saving.key, seconds, timeout=timeout)[0]
            except Exception as error:
                self._save_lost(error)
                raise
            if failure is None:
                return
            self._group.waits_no_more(self.finish_saving)
        self._saving = None
        if failure and self._settings.failed_save == "raise":
            raise _failed(saving.path, failure)
        if failure:
            log.warning("the state could not be saved to %s: %s; the run goes on", saving.path, failure)

    def load_sharded(self, path: Path) -> None:
        """Load a distributed checkpoint written by `save_sharded` with any number of ranks. Raises `CheckpointError`
        where it is incomplete."""
        self._fill(read_record(path), "load_state", path)

    def _write(self, path: Path, merged: bool) -> None:
        self._on("save", self._source, str(path), self.path, merged)

    def save_state(self, path: Path) -> None:
        """Save optimizer, schedule and version, without weights, as a distributed checkpoint in a new folder; no pickle."""
        self._save_shards(Path(path), weights=False, wait=True)

    def load_state(self, model_path: Path, state_path: Path) -> None:
        """Load the folders that `save` and `save_state` of a local or FSDP engine wrote, with any number of ranks."""
        record = read_record(state_path)
        self._fill(record, "load", model_path, True)
        self._fill(record, "load_state", state_path)

    def _fill(self, record: Mapping[str, Any], method: str, path: Path, *shared: Any) -> None:
        if self.lost:
            self._open(None)
        folder = str(Path(path).absolute())
        given = (None, self._name, method, folder, *shared)
        self._group.call("on", *given, timeout=self._settings.deadline, like=(method, 1))
        self.version, self.state_id, self._trained = int(record["version"]), new_id(), True
        self._last = self._since = None

    def critic(self, **changes: Any) -> FsdpEngine:
        """Make a critic on the same ranks: a learner with a copy of these weights and a new value head whose outputs
        are 0. `changes` are settings that differ."""
        return self._copy(self._settings.replace(**{"routing_replay": False, **changes}), head=True)

    def _untouched(self) -> bool:
        return self.version == 0 and not self._trained

    def as_loaded(self) -> bool:
        """Whether the engine is still in the state of the files at its path: nothing was learned or loaded, and the
        files have not changed."""
        return self._untouched() and self._start is None and self._files == stamps(self._source)

    def _copy(self, settings: FsdpSettings | None = None, head: bool = False) -> FsdpEngine:
        """Open another engine on the same ranks with a copy of these weights. A snapshot of them is kept, in case new
        workers must be started."""
        kept = None if self._untouched() else self.snapshot()
        if self.lost:
            self._steps()  # raises, or starts again from the path
        named: dict[str, Any] = {"shown": self.path, "source": self._name, "scratch": self._scratch, "head": head}
        copy = FsdpEngine(self._source, self._group, settings or self._settings, **named, **self.template_switches)
        copy._start = kept
        return copy

    def _twin(self) -> FsdpEngine:
        return self._copy()

    def _mix(self, other: FsdpEngine, alpha: float) -> None:
        self._trained = True
        self._on("mix", other._name, alpha)

    # --- what it is -------------------------------------------------------------------------

    def memory_needed(self, tokens: int | None = None, measured: bool = False) -> tuple[torch.device, dict[str, int]]:
        """Return the device, and the bytes by part that learning takes there: on one GPU, or on a CPU of all ranks of
        this machine together.

        `tokens` is the size of a mini-batch, which the ranks share; None means a full micro-batch on each. The numbers
        are estimated from the model's sizes. With `measured` they come from a short rehearsal (`engines.rehearsal`,
        some seconds), or from the estimate where a rehearsal is not possible.
        """
        here, sizes = self._group.here(), self._sizes
        device = torch.device(self._group.workers[0]["device"])
        sharing = len(here) if device.type == "cpu" else 1
        settings = self._settings.replace(micro_batch_tokens=min(self._on("pass_tokens")))
        budget, each = settings.budget(device.type), None if tokens is None else -(-tokens // sizes.blocks)
        most = budget if each is None else min(budget, each)
        if measured:
            shape, gpu = Shape.of(budget, most, each), device.type == "cuda"
            measure = lambda: sharded(self._source, settings, sizes.ranks, shape, gpu=gpu, head=self._critic)  # noqa: E731
            footprint = estimated("the memory that learning takes, measured,", measure, None)
            if footprint is not None:
                return device, {name: size * sharing for name, size in footprint.parts.items()}
        offload = self._settings.offload if device.type == "cuda" else "none"
        away = {"none": (), "optimizer": ("optimizer",), "all": ("gradients", "optimizer")}[offload]
        parts = learning_estimate(self._model, settings, most)
        cut = sizes.ranks // sizes.replicate
        ranks = {name: 1 if name in ("activations", "logits") else cut for name in parts}
        return device, {name: size // ranks[name] * sharing for name, size in parts.items() if name not in away}

    def memory_free(self) -> int:
        """Bytes that can still be allocated on a rank's device, of the rank that has the least."""
        return min(self._on("memory_free"))

    def _apply(self, settings: FsdpSettings) -> None:
        if settings != self._settings and not self.lost:  # new workers open with them
            self._on("apply", settings.to_dict())
        self._settings = settings

    def peaks(self, begin: bool = False) -> dict[str, int]:
        """Peak memory in bytes since the last call with `begin=True`.

        `host` is the memory of all ranks together, `device` that of tensors on the fullest GPU, and `total` the GPU's
        size.
        """
        found = self._on("peaks", begin)
        return {name: (sum if name == "host" else max)(one[name] for one in found) for name in found[0]}

    def cards(self) -> list[str]:
        """Name of each rank's GPU; "" for a CPU."""
        return [str(one["card"]) for one in self._group.workers]

    def memory(self) -> list[dict[str, int]]:
        """Bytes of each rank: `weights`, `optimizer`, and the device's `peak`."""
        return self._on("memory")

    def describe(self) -> dict[str, Any]:
        """Path, number of ranks and settings by name, for a run's record."""
        return {"path": self.path, "ranks": self._group.size, **self._settings.recorded()}

    def close(self) -> None:
        """Finish saves in the background and end the workers; other engines on the same group lose them, too."""
        self._group.close()

    def _place(self) -> str:
        return "ranks have ended" if self.lost else f"{self._group.size} ranks"


class _Save(NamedTuple):
    """A save that runs in the background: its folder, its id, its deadline, and the generation of workers that writes
    it."""

    path: Path
    key: str
    end: float
    generation: int

    def is_there(self) -> bool:
        """Whether this save, and no other, was published in its folder."""
        with suppress(CheckpointError):
            return bool(read_record(self.path).get("id") == self.key)
        return False


def _failed(path: Path, why: str) -> CheckpointError:
    do = "nothing of it was kept, and the engine is unchanged: save again, elsewhere or later"
    return CheckpointError(f"the state could not be saved to {path}", found=why, do=do)


def _seed() -> int:
    """Return the seed that the caller set torch's generator to for this step (`stages.update.seeded`); the generator is
    not advanced."""
    return torch.initial_seed() % 2**62


def _refuse(reports: Sequence[Mapping[str, Any]], places: Sequence[torch.Tensor]) -> None:
    """Raise `EngineError` where a loss function raised on a rank, and `NonFinite` where a loss or the gradient norm is
    NaN or infinite."""
    if not any(report["failed"] for report in reports):
        return
    for rank, (report, place) in enumerate(zip(reports, places, strict=True)):
        trouble = report["trouble"]
        if trouble is None:
            continue
        rows = place[torch.tensor(trouble["rows"])].tolist()[:8]
        if trouble["traceback"] is not None:
            raise EngineError(f"the loss raised on rank {rank}, rows {rows}: {trouble['what']}\n{trouble['traceback']}")
        raise NonFinite(INFINITE_LOSS, found=trouble["what"], do=f"look at rows {rows}")
    raise infinite_norm(reports[0]["grad_norm"], [report["broken"] for report in reports])


@shows_settings(FsdpSettings)
@working("opening the model")
def fsdp(
    path: str | Path,
    *,
    ranks: int | None = None,
    on: Group | None = None,
    threads: int | None = None,
    scratch: str | Path | None = None,
    template_switches: Any = None,
    **settings: Any,
) -> FsdpEngine:
    """Open a transformers model sharded over ranks by FSDP2: `fsdp("data/tiny-arith", ranks=2, lr=1e-3)`.

    `path` is as for `engines.local`. The `ranks` (None: as many as the `mesh` says, else 2) are processes of this
    machine, on its GPUs or (with gloo) its cores, or those of the `Group` passed as `on`; engines on one group share
    its workers. `threads` are torch's in each process. `scratch` is the folder for snapshots: with several machines one
    that all see. Other settings: `FsdpSettings`; unknown names are refused. Raises `EngineError` where there is no such
    model, or the workers cannot start.

    Two micro-batches on one rank and one on each of two ranks give the same numbers bit for bit; where gradients are
    added up in another order (more micro-batches than ranks) they agree to 1e-6 of the largest: see
    docs/determinism.md.
    """
    chosen = FsdpSettings.from_parameters(settings)
    folder = shown = str(resolve(path))
    if Path(folder).exists():
        folder = str(Path(folder).absolute())  # a worker may have another working directory
    size = ranks_of(chosen.mesh, ranks) or 2
    group = on or local_group(size, device=chosen.device, threads=threads, wait=chosen.group_deadline)
    place = str(scratch) if scratch is not None else None
    return FsdpEngine(folder, group, chosen, shown=shown, scratch=place, **(template_switches or {}))
