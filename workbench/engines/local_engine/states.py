"""A learner's states: saved on disk, kept in memory, and restored bit for bit.

On disk a state is `engine.json`, and tensors in one file (local engine) or in one file a rank (FSDP engine):

    whole     optimizer.safetensors (`<parameter>|exp_avg` …), engine.json; the weights are in the model's folder
    sharded   shard-0000r-….safetensors, one a rank (weights/…, optimizer/…), engine.json

Both kinds of engine read both. Shards are torch's distributed checkpoint (DCP) with safetensors as its storage: DCP's
own file storage keeps its plan in a pickle, which is code to whoever opens it. `engine.json` of shards is written
last, by rank 0, and lists the files with their sizes.

Both engines go back to a state that is held, or by the updates since one that is held, done again: what those cost is
the batches that they learned from. What holds a state is the engine's own: a folder that all ranks see (FSDP), or,
here, tensors in memory or in a file. These cost what changed: a tensor is copied only where neither the last snapshot
that is still kept nor the model's own safetensors files have the same bits. Weights as loaded cost nothing, frozen
and tied tensors are held once, with LoRA the adapters alone are looked at.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.base.errors import CheckpointError, EngineError, boundary, describe
from workbench.base.files import FORMAT, check_format
from workbench.dataproto.core import DataProto
from workbench.engines.local_engine.loading import DTYPES, folder_of, write_to
from workbench.engines.protocol import Loss, LossCounts, Snapshot, SnapshotCost, new_id

RECORD, WHOLE = "engine.json", "optimizer.safetensors"
SCALE = "|loss_scale"
"""Name of the loss scale of float16, and of the finite gradients since it last changed, among an optimizer's tensors."""


# --- on disk --------------------------------------------------------------------------------------


def write_whole(path: Path, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
    """Write an optimizer's tensors to one safetensors file in a folder, and `record` to its `engine.json`."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), str(path / WHOLE))
    (path / RECORD).write_text(json.dumps({"format": FORMAT, **record, "tensors": len(tensors)}, default=str))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write `engine.json` for the safetensors shards in the folder, listing each file's size; it is flushed to the disk
    when this returns."""
    sizes = {file.name: file.stat().st_size for file in sorted(path.glob("*.safetensors"))}
    with open(path / RECORD, "w") as file:
        file.write(json.dumps({"format": FORMAT, **record, "files": sizes}, default=str, indent=1))
        file.flush()
        os.fsync(file.fileno())


def read_record(folder: str | Path) -> dict[str, Any]:
    """Read the `engine.json` of a learner's saved state; its `whole` is true where the optimizer is in one file.

    Raises `CheckpointError` where `engine.json`, or a file that it lists, is missing or of another size.
    """
    path = Path(folder)
    if not (path / RECORD).is_file():
        raise CheckpointError(f"no optimizer state at {path}", expected=f"{RECORD} there", found="no such file")
    record: dict[str, Any] = json.loads((path / RECORD).read_text())
    check_format(record.get("format"), f"the optimizer state at {path}", CheckpointError)
    for key in ("version", "steps"):
        if type(record.get(key)) is not int:
            what, value = f"{RECORD} of the optimizer state at {path}", describe(record.get(key))
            raise CheckpointError(what, expected=f"a whole number {key!r}", found=value, do="load another checkpoint")
    if (path / WHOLE).is_file():
        return {**record, "weights": False, "files": {}, "adam_steps": {}, "whole": True}
    if "adam_steps" not in record:
        expected, keys = f"{WHOLE}, or the key adam_steps in {RECORD}", f"the keys {', '.join(record)}"
        raise CheckpointError(f"no optimizer state at {path}", expected=expected, found=keys)
    for name, size in record["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            raise CheckpointError(f"a file of the sharded state, {path / name}", expected=f"{size} bytes", found=found)
    return {**record, "whole": False}


def read_optimizer(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read an optimizer's tensors, whole even where they were saved as shards (`<parameter>|exp_avg`, `|exp_avg_sq`,
    `|step`), and the record that belongs to them (`read_record`)."""
    from safetensors.torch import load_file

    record = read_record(folder)
    if record["whole"]:
        tensors = load_file(str(Path(folder) / WHOLE))
        if len(tensors) != record.get("tensors", len(tensors)):
            expected = f"the {record['tensors']} tensors that were written"
            raise CheckpointError(f"the optimizer state {Path(folder) / WHOLE}", expected=expected, found=len(tensors))
        return tensors, record
    steps = {f"{name}|step": torch.tensor(step) for name, step in record["adam_steps"].items()}
    return {**_put_together(folder, record, "optimizer/"), **steps, **scaling_of(record)}, record


def scaling_of(record: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the loss scale that the record of a sharded state has, as it is named among an optimizer's tensors."""
    return {name: torch.tensor(one, dtype=torch.float64) for name, one in record.get("scaling", {}).items()}


def read_weights(folder: str | Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read weights of a sharded state as whole tensors by name, in this process alone. `names` limits which are read;
    names that the state lacks are skipped."""
    record = read_record(folder)
    if not record["weights"]:
        raise CheckpointError(f"the sharded state at {folder} has no weights", do="read them from the model folder")
    return _put_together(folder, record, "weights/", names)


def _put_together(
    folder: str | Path, record: Mapping[str, Any], prefix: str, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    from torch.distributed import checkpoint as dcp  # half a second of imports
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if not record["files"]:  # no step was taken yet
        return {}
    reader = HuggingFaceStorageReader(str(folder))
    found: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    kept = {name: entry for name, entry in found.items() if name.startswith(prefix)}
    if names is not None:
        kept = {name: entry for name, entry in kept.items() if name.removeprefix(prefix) in names}
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in kept.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what is meant
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


# --- the way back --------------------------------------------------------------------------------

MOST_UPDATES = 8
"""Updates that going back does again at most; after so many a state is held anew, so that a way back stays short."""


@dataclass(frozen=True)
class Learned:
    """An optimizer step that was taken, with all that is needed to take it again: the arguments of `learn` and the
    states of the random generators before it."""

    batch: DataProto
    loss: Loss
    loss_counts: LossCounts
    temperature: float
    rng: tuple[torch.Tensor, ...]
    """Of the CPU, and where the model is on a GPU of this process also of it."""
    settings: Any
    """The engine's: how a mini-batch is cut changes rounding."""


class Replay:
    """A snapshot that stores an earlier state, `base`, and the optimizer steps (`updates`) that lead from `base` to the
    state of the snapshot."""

    kind = "replay"

    def __init__(self, base: Any, updates: Sequence[Learned], *, version: int, state_id: str) -> None:
        self.base, self.updates, self.version, self.state_id = base, tuple(updates), version, state_id

    @property
    def nbytes(self) -> int:
        """Bytes of this process's memory that the snapshot takes: the held state's tensors and the batches of its
        updates."""
        return sum(one.nbytes for one in self.tensors().values())

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors in memory, of the held state and of the updates' batches, by their address."""
        batches = {one.data_ptr(): one for each in self.updates for one in each.batch.batch.values()}
        return {**batches, **self.base.tensors()}

    def on_disk(self) -> dict[Any, int]:
        """Sizes in bytes of the files that hold the base state, by a key for each file."""
        return dict(self.base.on_disk())

    def __getitem__(self, name: str) -> Any:
        """Return `version`, `state_id` or `steps`. Weights cannot be read: only `restore` computes them."""
        if name in ("version", "state_id"):
            return getattr(self, name)
        if name == "steps":
            return self.base["steps"] + len(self.updates)
        raise EngineError(
            f"the {name} of a 'replay' snapshot", do="call restore() first: it does the recorded updates again"
        )

    def __repr__(self) -> str:
        return f"Replay({self.state_id}, version {self.version}, {len(self.updates)} updates since {self.base!r})"


class Rewinding:
    """Base class of engines that train: it adds `snapshot` and `restore`, and records the optimizer steps taken since
    the last snapshot."""

    version: int
    state_id: str
    learn: Callable[..., Any]
    _model: Any
    _settings: Any
    _apply: Callable[[Any], None]
    """Computes with these settings from here on."""
    _hold: Callable[[str, str | Path | None], Any]
    """Holds the present state as a kind says (`replay`: as one from which updates will be recorded); returns a `Snapshot`."""
    _return_to: Callable[[Any], None]
    """Restores what `_hold` returned; `version` and `state_id` are set by the caller."""
    _check: Callable[[Any], None]
    """Raises `EngineError` where it cannot be restored; nothing is changed yet."""
    _full_cost: Callable[[str], SnapshotCost]
    """What `_hold` would take."""

    _last: Callable[[], Any] | None = None
    """The last snapshot, as long as somebody keeps it; one that holds no copy of weights is kept here."""
    _since: list[Learned] | None = None
    """Updates since it, where they are recorded."""

    @property
    def _latest(self) -> Any:
        return self._last() if self._last is not None else None

    def _recording(self) -> bool:
        """Whether optimizer steps are being recorded: only while the last snapshot still exists and at most
        `MOST_UPDATES` steps lead away from it."""
        last = self._latest
        if last is None or len(_updates(last)) + len(self._since or ()) >= MOST_UPDATES:
            self._since = None
        return self._since is not None

    def _rng(self) -> tuple[torch.Tensor, ...]:
        """States of torch's random generators, of the CPU and of a GPU where the model is on one; empty where no steps
        are recorded."""
        device = self._model.device
        if not self._recording():
            return ()
        return torch.get_rng_state(), *((torch.cuda.get_rng_state(device),) if device.type == "cuda" else ())

    def _record(self, batch: DataProto, loss: Loss, counts: LossCounts, temperature: float, rng: Any) -> None:
        """Record an optimizer step that was just taken. Without `rng`, the generator states before it, the step cannot
        be repeated and recording ends."""
        if self._since is not None and rng:
            self._since.append(Learned(batch, loss, counts, temperature, rng, self._settings))
        else:
            self._since = None

    def snapshot(self, kind: str = "", folder: str | Path | None = None) -> Any:
        """Return the present weights, optimizer, schedule and version, for `restore`.

        `kind` says how they are held: `memory`; `disk`, in a file in `folder`; or `replay`, which stores the optimizer
        steps since the last snapshot, and `restore` repeats them. A `replay` snapshot is held in full where no earlier
        snapshot exists or eight steps have passed. Without a kind the engine chooses, and the snapshot can be read
        (`snapshot["weights"]`).
        """
        last = self._latest
        if kind == "replay" and last is not None and self._since is not None:
            base = last.base if isinstance(last, Replay) else last
            named: dict[str, Any] = {"version": self.version, "state_id": self.state_id}
            snapshot: Any = Replay(base, [*_updates(last), *self._since], **named)
        else:
            snapshot = self._hold(kind, folder)
        if kind or self._since is None:  # one that is only looked at ends no record
            self._keep_up(snapshot, recording=kind == "replay")
        return snapshot

    def restore(self, snapshot: Any) -> None:
        """Restore weights, optimizer, schedule and version of a snapshot, bit for bit.

        Raises `EngineError`, with nothing changed, where a file that holds some of the snapshot's weights was
        overwritten since.
        """
        base = snapshot.base if isinstance(snapshot, Replay) else snapshot
        self._check(base)
        recording = self._since is not None
        self.state_id, self._last, self._since = new_id(), None, None  # half-way there is no state that anybody knows
        self._return_to(base)
        present = self._settings
        try:
            for one in _updates(snapshot):
                self._again(one)
        finally:
            self._apply(present)
        self.version, self.state_id = snapshot.version, snapshot.state_id
        self._keep_up(snapshot, recording or isinstance(snapshot, Replay))

    def _again(self, update: Learned) -> None:
        self._apply(update.settings)
        device = self._model.device
        with torch.random.fork_rng([device] if len(update.rng) > 1 else []):
            torch.set_rng_state(update.rng[0])
            for state in update.rng[1:]:
                torch.cuda.set_rng_state(state, device)
            self.learn(update.batch, update.loss, update.loss_counts, update.temperature)

    def snapshot_cost(self, kind: str = "memory") -> SnapshotCost:
        """Return what a snapshot of this kind would take at most now: bytes in memory and on disk, or optimizer steps
        to repeat."""
        if kind == "replay" and self._since is not None and self._latest is not None:
            return SnapshotCost(updates=len(_updates(self._latest)) + len(self._since))
        return self._full_cost(kind)

    def _keep_up(self, snapshot: Snapshot, recording: bool) -> None:
        """Remember that the engine is in the state of this snapshot. With `recording`, the optimizer steps from here on
        are recorded for as long as the snapshot exists."""
        base = snapshot.base if isinstance(snapshot, Replay) else snapshot
        free = recording and not base.nbytes and not base.on_disk()
        self._last = (lambda: snapshot) if free else weakref.ref(snapshot)
        self._since = [] if recording else None


def _updates(snapshot: Any) -> tuple[Learned, ...]:
    return snapshot.updates if isinstance(snapshot, Replay) else ()


# --- held by a local engine ----------------------------------------------------------------------

_LOOK = 4096
"""Elements that are compared before a whole tensor is read from a file."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateFiles:
    """Open safetensors files whose tensors are read by name, one at a time. Files that are deleted or replaced
    meanwhile can still be read.

    `changed` notices a file that was overwritten in place, by its size and modification time.
    """

    own_bytes = 0
    """Bytes that were written for these files here; 0 of a model's."""

    def __init__(self, files: Iterable[Any]) -> None:
        self._files, self._places = [], dict[str, tuple[int, int, torch.dtype, list[int]]]()
        kinds = {text: dtype for dtype, text in DTYPES.items()}
        for file in files:
            handle = file.fileno()
            (length,) = struct.unpack("<Q", os.pread(handle, 8, 0))
            for name, entry in json.loads(os.pread(handle, length, 8)).items():
                if entry.get("dtype") in kinds:
                    offset = 8 + length + entry["data_offsets"][0]
                    self._places[name] = (handle, offset, kinds[entry["dtype"]], entry["shape"])
            self._files.append((file, _stamp(handle)))

    @classmethod
    def of_model(cls, path: str | Path) -> StateFiles:
        """Open the safetensors files of a model, by folder or hub name; without any where this machine has no such
        files."""
        return cls([file.open("rb", buffering=0) for file in sorted(folder_of(path).glob("*.safetensors"))])

    @classmethod
    def written(cls, tensors: Mapping[str, torch.Tensor], folder: str | Path | None) -> StateFiles:
        """Write tensors to an unnamed temporary file in a folder (None: the system's temporary folder), which is
        deleted with the returned object."""
        with boundary(f"writing a snapshot to {folder or tempfile.gettempdir()}", EngineError):
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this object
            write_to(file, tensors)
            made = cls([file])
            made.own_bytes = os.fstat(file.fileno()).st_size
            return made

    def shape(self, name: str) -> torch.Size | None:
        """Shape of a tensor; None where the files have no tensor of that name."""
        return torch.Size(self._places[name][3]) if name in self._places else None

    def read(self, name: str, most: int | None = None) -> torch.Tensor:
        """Read a tensor by name; with `most` only its first `most` elements, as a flat tensor."""
        handle, offset, dtype, shape = self._places[name]
        size = torch.Size(shape).numel()
        tensor = torch.empty(size if most is None else min(size, most), dtype=dtype)
        left = tensor.view(torch.uint8).numpy().data if len(tensor) else memoryview(b"")
        while left:  # one call reads 2 GiB at most
            count = os.preadv(handle, [left], offset)
            if not count:
                raise EngineError(f"a safetensors file ends inside its tensor {name}", do="load the model again")
            left, offset = left[count:], offset + count
        return tensor if most is not None else tensor.view(shape)

    def changed(self) -> str | None:
        """The path of the first file that was written to since it was opened; None where none was."""
        return next((str(file.name) for file, stamp in self._files if _stamp(file.fileno()) != stamp), None)


def _stamp(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a snapshot that is not in memory: its file, its name there, and the dtype to read it as."""

    files: StateFiles
    name: str
    dtype: torch.dtype
    """What it is read as: a model's file may have bfloat16 where the engine has float32."""

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether the file holds exactly the bits of this CPU tensor; False also where the file was overwritten since
        it was opened."""
        known = self.files.shape(self.name) == tensor.shape and not self.files.changed()
        if not known or not tensor.is_contiguous():
            return False
        flat = tensor.view(-1)
        if not _same(self.files.read(self.name, _LOOK).to(self.dtype), flat[:_LOOK]):
            return False
        return _same(self.read(), tensor)

    def read(self) -> torch.Tensor:
        """Read the tensor from its file, in the snapshot's dtype."""
        return self.files.read(self.name).to(self.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits. Compared by bits, -0 differs from 0, and a NaN equals
    itself."""
    if a.shape != b.shape or a.dtype != b.dtype or not (a.is_contiguous() and b.is_contiguous()):
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(-1).view(bits), b.view(-1).view(bits))


Held = torch.Tensor | Stored


class Part(Mapping[str, torch.Tensor]):
    """A mapping of a snapshot's tensors by name. A tensor that is in a file is read anew at each access."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = held

    def __getitem__(self, name: str) -> torch.Tensor:
        one = self._held[name]
        return one if isinstance(one, torch.Tensor) else one.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class LocalSnapshot:
    """A local engine's saved state, made by `LocalEngine.snapshot`; `snapshot["weights"]` is a mapping of tensors by
    name."""

    def __init__(
        self, held: Mapping[str, Held], *, version: int, state_id: str, steps: int, source: str | None = None
    ) -> None:
        self.version, self.state_id, self.steps, self.source = version, state_id, steps, source
        self.held = dict(held)
        """`weights/<name>` and `optimizer/<parameter>|<kind>` → a tensor in memory, or one that a file has."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds in memory; other snapshots may share them."""
        return sum(one.nbytes for one in self.tensors().values())

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that the snapshot holds in memory, by address, so that tensors shared by several snapshots can be
        counted once."""
        return {one.data_ptr(): one for one in self.held.values() if isinstance(one, torch.Tensor)}

    def on_disk(self) -> dict[Any, int]:
        """Sizes in bytes of the temporary files that were written for this snapshot, by a key for each; the model's own
        files do not count."""
        return {id(one): one.own_bytes for one in self._files() if one.own_bytes}

    def _files(self) -> set[StateFiles]:
        return {one.files for one in self.held.values() if isinstance(one, Stored)}

    @property
    def kind(self) -> str:
        """Where the snapshot's tensors are: `memory`, `disk` (in a temporary file or in the model's own files), or
        `memory and disk`."""
        places = {"memory" if isinstance(one, torch.Tensor) else "disk" for one in self.held.values()}
        return " and ".join(sorted(places, reverse=True)) or "memory"

    def check(self, names: Iterable[str] = ()) -> None:
        """Raise `EngineError` where the snapshot lacks one of these weights, or where a file that holds some of its
        tensors was overwritten since."""
        if missing := [name for name in names if f"weights/{name}" not in self.held]:
            raise EngineError("the snapshot is of another model", expected=f"a weight named {missing[0]}", found="none")
        for files in self._files():
            if path := files.changed():
                do = "write models to folders of their own, and open a new engine"
                raise EngineError(f"the weights of a snapshot are in {path}, which was written to since", do=do)

    def part(self, part: str) -> Part:
        """The snapshot's `weights` or `optimizer` tensors by name."""
        return Part({key.removeprefix(f"{part}/"): one for key, one in self.held.items() if key.startswith(f"{part}/")})

    def __getitem__(self, name: str) -> Any:
        """Return `weights` or `optimizer` (mappings of tensors, which are read at each access), `version`, `state_id`
        or `steps`."""
        if name in ("version", "state_id", "steps"):
            return getattr(self, name)
        self.check()
        return self.part(name)

    def __repr__(self) -> str:
        return f"LocalSnapshot({self.state_id}, version {self.version}, {self.kind}, {self.nbytes:,} bytes)"


def hold(
    live: Mapping[str, torch.Tensor], last: Mapping[str, Held], files: StateFiles, folder: str | Path | None, disk: bool
) -> dict[str, Held]:
    """Keep the present bits of the `live` tensors, each as a tensor in memory or as a place in a file, by the keys of
    `LocalSnapshot.held`.

    A tensor whose bits the `last` snapshot or the model's `files` already have is not copied. All others are copied to
    memory, or with `disk` written to one file in `folder`.
    """
    held: dict[str, Held] = {}
    first: dict[tuple[Any, ...], str] = {}
    tied, written = dict[str, str](), dict[str, torch.Tensor]()
    for key, tensor in live.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(place, key) != key:
            tied[key] = first[place]
            continue
        here = tensor.detach().cpu()
        known = (last.get(key), Stored(files, key.removeprefix("weights/"), here.dtype))
        found = next((candidate for candidate in known if candidate is not None and _has(candidate, here)), None)
        if found is not None:
            held[key] = found
        elif disk:
            written[key] = tensor
        else:
            held[key] = here if tensor.is_cuda else here.clone()
    if written:
        file = StateFiles.written(written, folder)
        held |= {key: Stored(file, key, one.dtype) for key, one in written.items()}
    return held | {key: held[one] for key, one in tied.items()}


def _has(one: Held, tensor: torch.Tensor) -> bool:
    return _same(one, tensor) if isinstance(one, torch.Tensor) else one.same(tensor)
