"""Snapshots of a local engine that cost what changed: tensors are held in memory, or where a file has the same bits, there.

A tensor is copied only where neither the last snapshot that is still kept nor the model's own safetensors files have the same
bits: weights as loaded cost nothing, frozen and tied tensors are held once, with LoRA the adapters alone are looked at.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.base.errors import EngineError, boundary
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Loss, LossCounts
from workbench.engines.weights import DTYPES, write_to

_LOOK = 4096
"""Elements that are compared before a whole tensor is read from a file."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def new_id() -> str:
    """A unique name for a state of the weights: twelve hex digits."""
    return uuid.uuid4().hex[:12]


class Files:
    """Open safetensors files: their tensors by name, read one at a time. Deleting or replacing a file changes nothing here.

    A file that was written to in place is noticed by its size and time of change: `changed`.
    """

    def __init__(self, files: Iterable[Any]) -> None:
        self._files, self._places = [], dict[str, tuple[int, int, torch.dtype, list[int]]]()
        kinds = {text: dtype for dtype, text in DTYPES.items()}
        for file in files:
            handle = file.fileno()
            (length,) = struct.unpack("<Q", os.pread(handle, 8, 0))
            for name, one in json.loads(os.pread(handle, length, 8)).items():
                if one.get("dtype") in kinds:
                    self._places[name] = (
                        handle,
                        8 + length + one["data_offsets"][0],
                        kinds[one["dtype"]],
                        one["shape"],
                    )
            self._files.append((file, _stamp(handle)))

    @classmethod
    def of_model(cls, path: str | Path) -> Files:
        """The files of a model by folder or hub name; none where it has no safetensors files on this machine."""
        folder = Path(path)
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(str(path), "config.json")
            folder = Path(cached).parent if isinstance(cached, str) else folder
        return cls([file.open("rb", buffering=0) for file in sorted(folder.glob("*.safetensors"))])

    @classmethod
    def written(cls, tensors: Mapping[str, torch.Tensor], folder: str | Path | None) -> Files:
        """Write tensors to a file in a folder (None: the system's for temporary files). It has no name, and ends with this object."""
        with boundary(f"writing a snapshot to {folder or tempfile.gettempdir()}", EngineError):
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this object
            write_to(file, tensors)
            return cls([file])

    def shape(self, name: str) -> torch.Size | None:
        """Shape of a tensor; None where the files have no tensor of that name."""
        return torch.Size(self._places[name][3]) if name in self._places else None

    def read(self, name: str, most: int | None = None) -> torch.Tensor:
        """Read a tensor, or its first `most` elements, flat."""
        handle, offset, dtype, shape = self._places[name]
        size = torch.Size(shape).numel()
        found = torch.empty(size if most is None else min(size, most), dtype=dtype)
        left = found.view(torch.uint8).numpy().data if len(found) else memoryview(b"")
        while left:  # one call reads 2 GiB at most
            count = os.preadv(handle, [left], offset)
            if not count:
                raise EngineError(f"a file of tensors ends before {name}", do="load the model again")
            left, offset = left[count:], offset + count
        return found if most is not None else found.view(shape)

    def changed(self) -> str | None:
        """The path of a file that was written to since it was opened; None where none was."""
        return next((str(file.name) for file, stamp in self._files if _stamp(file.fileno()) != stamp), None)


def _stamp(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of a snapshot that a file has."""

    files: Files
    name: str
    dtype: torch.dtype
    """What it is read as: a model's file may have bfloat16 where the engine has float32."""

    def same(self, tensor: torch.Tensor) -> bool:
        """Whether the file, as it was opened, has the bits of a tensor on the CPU."""
        known = self.files.shape(self.name) == tensor.shape and not self.files.changed()
        if not known or not tensor.is_contiguous():
            return False
        flat = tensor.view(-1)
        if not _same(self.files.read(self.name, _LOOK).to(self.dtype), flat[:_LOOK]):
            return False
        return _same(self.read(), tensor)

    def read(self) -> torch.Tensor:
        """The tensor."""
        return self.files.read(self.name).to(self.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits: -0 is not 0, and a NaN is itself."""
    if a.shape != b.shape or a.dtype != b.dtype or not (a.is_contiguous() and b.is_contiguous()):
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(-1).view(bits), b.view(-1).view(bits))


Held = torch.Tensor | Stored


@dataclass(frozen=True)
class Learned:
    """An optimizer step that can be taken again: the arguments of `learn`, and the generators' states before it."""

    batch: DataProto
    loss: Loss
    loss_counts: LossCounts
    temperature: float
    rng: tuple[torch.Tensor, ...]
    """Of the CPU, and where the model is on a GPU also of it."""


class Part(Mapping[str, torch.Tensor]):
    """Tensors of a snapshot by name; those that a file has are read each time they are asked for, one at a time."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = held

    def __getitem__(self, name: str) -> torch.Tensor:
        one = self._held[name]
        return one if isinstance(one, torch.Tensor) else one.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def rng_of(device: torch.device) -> tuple[torch.Tensor, ...]:
    """States of torch's random generators of the CPU and, where it is a GPU, of a device."""
    return torch.get_rng_state(), *((torch.cuda.get_rng_state(device),) if device.type == "cuda" else ())


def set_rng(states: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Set what `rng_of` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


class LocalSnapshot:
    """A local engine's state to go back to; made by `LocalEngine.snapshot`. `snapshot["weights"]` are tensors by name."""

    def __init__(
        self,
        held: Mapping[str, Held],
        *,
        version: int,
        state_id: str,
        steps: int,
        since: LocalSnapshot | None = None,
        updates: Sequence[Learned] = (),
    ) -> None:
        self.version, self.state_id, self.steps = version, state_id, steps
        self.held = dict(held)
        """`weights/<name>` and `optimizer/<parameter>|<kind>` → a tensor in memory, or one that a file has."""
        self.since = since
        """The snapshot from which `updates` lead here; None where this one has its own tensors."""
        self.updates = tuple(updates)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds in memory, batches of its updates included; other snapshots may share them."""
        return sum(one.nbytes for one in self.tensors().values())

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that it holds in memory, by address, so that those shared by snapshots can be counted once."""
        mine = [one for one in self.held.values() if isinstance(one, torch.Tensor)]
        mine += [one for each in self.updates for one in each.batch.batch.values()]
        found = {one.data_ptr(): one for one in mine}
        return found | self.since.tensors() if self.since is not None else found

    @property
    def kind(self) -> str:
        """Where its tensors are: `memory`, `disk` (a file of its own or the model's), `memory and disk`, or `replay`."""
        if self.since is not None:
            return "replay"
        places = {"memory" if isinstance(one, torch.Tensor) else "disk" for one in self.held.values()}
        return " and ".join(sorted(places, reverse=True)) or "memory"

    def check(self, names: Iterable[str] = ()) -> None:
        """Raise `EngineError` where it lacks weights of these names, or a file that it needs was written to since."""
        if self.since is not None:
            return self.since.check(names)
        if missing := [name for name in names if f"weights/{name}" not in self.held]:
            raise EngineError("a snapshot of another model", expected=f"weights of the name {missing[0]}", found="none")
        for files in {one.files for one in self.held.values() if isinstance(one, Stored)}:
            if path := files.changed():
                do = "write models to folders of their own, and open a new engine"
                raise EngineError(f"the weights of a snapshot are in {path}, which was written to since", do=do)
        return None

    def part(self, part: str) -> Part:
        """The tensors of `weights` or `optimizer` by name."""
        return Part({key.removeprefix(f"{part}/"): one for key, one in self.held.items() if key.startswith(f"{part}/")})

    def __getitem__(self, name: str) -> Any:
        """`weights` and `optimizer` (tensors by name, read when they are asked for), `version`, `state_id`, `steps`."""
        if name in ("version", "state_id", "steps"):
            return getattr(self, name)
        if self.since is not None:
            raise EngineError(f"the {name} of a snapshot by replay", do="restore() it: they are made by its updates")
        self.check()
        return self.part(name)

    def __repr__(self) -> str:
        return f"LocalSnapshot({self.state_id}, version {self.version}, {self.kind}, {self.nbytes:,} bytes)"


def hold(
    live: Mapping[str, torch.Tensor], last: Mapping[str, Held], files: Files, folder: str | Path | None, disk: bool
) -> dict[str, Held]:
    """Hold the present bits of `live` tensors, by the keys of `LocalSnapshot.held`.

    Tensors whose bits the `last` snapshot or the model's `files` have are not copied; others are, or written to a file in
    `folder` (`disk`).
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
        found = next((one for one in known if one is not None and _has(one, here)), None)
        if found is not None:
            held[key] = found
        elif disk:
            written[key] = tensor
        else:
            held[key] = here if tensor.is_cuda else here.clone()
    if written:
        file = Files.written(written, folder)
        held |= {key: Stored(file, key, one.dtype) for key, one in written.items()}
    return held | {key: held[one] for key, one in tied.items()}


def _has(one: Held, tensor: torch.Tensor) -> bool:
    return _same(one, tensor) if isinstance(one, torch.Tensor) else one.same(tensor)


class Rewinding:
    """Base class of `LocalEngine`: its snapshots."""

    version: int
    state_id: str
    learn: Callable[..., Any]
    _model: Any
    _optimizer: Any
    _ready: Callable[[], Any]
    _weights: Callable[[], dict[str, torch.Tensor]]
    _moments: Callable[[], dict[str, torch.Tensor]]
    _untouched: Callable[[], bool]

    _files = Files(())
    """The files that the weights were loaded from."""
    _last: weakref.ref[LocalSnapshot] | None = None
    """The last snapshot, as long as it is kept: tensors that have not changed since are not copied."""
    _since: list[Learned] | None = None
    """Updates since it, where they are recorded."""

    @property
    def _steps(self) -> int:
        return int(self._optimizer.steps) if self._optimizer is not None else 0

    def _recording(self) -> bool:
        """Whether updates are recorded: as long as somebody can go back to where they begin."""
        if self._last is None or self._last() is None:
            self._since = None
        return self._since is not None

    def snapshot(self, kind: str = "memory", folder: str | Path | None = None) -> LocalSnapshot:
        """Return the present weights, optimizer, schedule and version, for `restore`: what the model's files or the last kept
        snapshot have is not copied.

        `kind` says where the rest goes: `memory`, `disk` (a file in `folder`), or `replay`: only the updates since the last
        snapshot are kept, and `restore` does them again; the first such snapshot is one in memory, or with `folder` on disk.
        """
        last = self._last() if self._last is not None else None
        known: dict[str, Any] = {"version": self.version, "state_id": self.state_id, "steps": self._steps}
        if kind == "replay" and last is not None and self._since is not None:
            made = LocalSnapshot({}, since=last, updates=self._since, **known)
        else:
            held = last.held if last is not None else {}
            disk = kind == "disk" or (kind == "replay" and folder is not None)
            made = LocalSnapshot(hold(self._state(), held, self._files, folder, disk), **known)
        self._keep_up(made, recording=kind == "replay")
        return made

    def restore(self, snapshot: LocalSnapshot) -> None:
        """Restore weights, optimizer, schedule and version of a snapshot, bit for bit; one tensor at a time is read of a file.

        Raises `EngineError`, with nothing changed, where a file that has weights of it was written to since.
        """
        snapshot.check(self._weights())
        recording = self._since is not None
        self.state_id, self._last = new_id(), None  # half-way there is no state that anybody knows
        if snapshot.since is None:
            self._fill(snapshot)
        else:
            self.restore(snapshot.since)
            for one in snapshot.updates:
                with torch.random.fork_rng([self._model.device] if len(one.rng) > 1 else []):
                    set_rng(one.rng, self._model.device)
                    self.learn(one.batch, one.loss, one.loss_counts, one.temperature)
        self.version, self.state_id = snapshot.version, snapshot.state_id
        self._keep_up(snapshot, recording)

    @torch.no_grad()
    def _fill(self, snapshot: LocalSnapshot) -> None:
        mine = self._weights()
        self._optimizer = None  # its moments go before those of the snapshot come
        for name, tensor in snapshot.part("weights").items():
            mine[name].copy_(tensor)
        if snapshot.steps:
            self._ready().load(snapshot.part("optimizer"), snapshot.steps)

    def _state(self) -> dict[str, torch.Tensor]:
        """Weights and moments as they are, no copies, by the keys of a snapshot."""
        named = {f"weights/{name}": tensor for name, tensor in self._weights().items()}
        return named | {f"optimizer/{name}": tensor for name, tensor in self._moments().items()}

    def _keep_up(self, snapshot: LocalSnapshot, recording: bool) -> None:
        """The engine is in the state of this snapshot; `recording`: updates from here on are kept as long as it is."""
        self._last, self._since = weakref.ref(snapshot), [] if recording else None

    def snapshot_bytes(self, kind: str = "memory") -> int:
        """Bytes of memory that a snapshot takes: of weights and moments, those that the model's files have left out."""
        if kind == "disk" or (kind == "replay" and self._recording()):
            return 0
        state = self._state()
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in state.values()}
        if self._untouched():
            for key, tensor in state.items():
                if self._files.shape(key.removeprefix("weights/")) == tensor.shape:
                    sizes.pop(tensor.data_ptr(), None)
        return sum(sizes.values())
