"""Snapshots of a local engine that cost what changed: tensors are held in memory, or where a file has the same bits, there.

A tensor is copied only where neither the last snapshot that is still kept nor the model's own safetensors files have the same
bits: weights as loaded cost nothing, frozen and tied tensors are held once, with LoRA the adapters alone are looked at.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.base.errors import EngineError, boundary
from workbench.engines.local_engine.loading import folder_of, stamps
from workbench.engines.protocol import SnapshotCost
from workbench.engines.rewinding import Rewinding
from workbench.engines.tensor_files import DTYPES, write_to

_LOOK = 4096
"""Elements that are compared before a whole tensor is read from a file."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Files:
    """Open safetensors files: their tensors by name, read one at a time. Deleting or replacing a file changes nothing here.

    A file that was written to in place is noticed by its size and time of change: `changed`.
    """

    own_bytes = 0
    """Bytes that were written for these files here; 0 of a model's."""

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
        return cls([file.open("rb", buffering=0) for file in sorted(folder_of(path).glob("*.safetensors"))])

    @classmethod
    def written(cls, tensors: Mapping[str, torch.Tensor], folder: str | Path | None) -> Files:
        """Write tensors to a file in a folder (None: the system's for temporary files). It has no name, and ends with this object."""
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


class LocalSnapshot:
    """A local engine's state that is held; made by `LocalEngine.snapshot`. `snapshot["weights"]` are tensors by name."""

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
        """The tensors that it holds in memory, by address, so that those shared by snapshots can be counted once."""
        return {one.data_ptr(): one for one in self.held.values() if isinstance(one, torch.Tensor)}

    def on_disk(self) -> dict[Any, int]:
        """Bytes of the files that were written for it, by a name of each; the model's own files are none of them."""
        return {id(one): one.own_bytes for one in self._files() if one.own_bytes}

    def _files(self) -> set[Files]:
        return {one.files for one in self.held.values() if isinstance(one, Stored)}

    @property
    def kind(self) -> str:
        """Where its tensors are: `memory`, `disk` (a file of its own or the model's), or `memory and disk`."""
        places = {"memory" if isinstance(one, torch.Tensor) else "disk" for one in self.held.values()}
        return " and ".join(sorted(places, reverse=True)) or "memory"

    def check(self, names: Iterable[str] = ()) -> None:
        """Raise `EngineError` where it lacks weights of these names, or a file that it needs was written to since."""
        if missing := [name for name in names if f"weights/{name}" not in self.held]:
            raise EngineError("a snapshot of another model", expected=f"weights of the name {missing[0]}", found="none")
        for files in self._files():
            if path := files.changed():
                do = "write models to folders of their own, and open a new engine"
                raise EngineError(f"the weights of a snapshot are in {path}, which was written to since", do=do)

    def part(self, part: str) -> Part:
        """The tensors of `weights` or `optimizer` by name."""
        return Part({key.removeprefix(f"{part}/"): one for key, one in self.held.items() if key.startswith(f"{part}/")})

    def __getitem__(self, name: str) -> Any:
        """`weights` and `optimizer` (tensors by name, read when they are asked for), `version`, `state_id`, `steps`."""
        if name in ("version", "state_id", "steps"):
            return getattr(self, name)
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


class Holding(Rewinding):
    """Base class of `LocalEngine`: how it holds a state."""

    _optimizer: Any
    _ready: Callable[[], Any]
    _weights: Callable[[], dict[str, torch.Tensor]]
    _moments: Callable[[], dict[str, torch.Tensor]]
    path: str

    _files = Files(())
    """The files that the weights were loaded from."""
    _source: str | None = None
    """The folder whose files the weights were loaded from; None where they were loaded or copied from elsewhere since."""
    _stamps: Sequence[tuple[int, int]] = ()
    """Of those files then."""

    @property
    def _steps(self) -> int:
        return int(self._optimizer.steps) if self._optimizer is not None else 0

    def _untouched(self) -> bool:
        return self.version == 0 and not self._steps

    def as_loaded(self) -> bool:
        """Whether opening the path again gives this very state."""
        return self._untouched() and self._source == self.path and stamps(self.path) == self._stamps

    def _hold(self, kind: str, folder: str | Path | None) -> LocalSnapshot:
        """What the model's files or the last kept snapshot have is not copied, the rest as `kind` says (`memory`)."""
        last = getattr(self._latest, "held", {})
        disk = kind == "disk" or (kind == "replay" and folder is not None)
        named: dict[str, Any] = {"version": self.version, "state_id": self.state_id, "steps": self._steps}
        named["source"] = self._source
        return LocalSnapshot(hold(self._state(), last, self._files, folder, disk), **named)

    def _check(self, snapshot: LocalSnapshot) -> None:
        snapshot.check(self._weights())

    @torch.no_grad()
    def _return_to(self, snapshot: LocalSnapshot) -> None:
        """One tensor at a time is read of a file."""
        mine = self._weights()
        self._source = snapshot.source
        self._optimizer = None  # its moments go before those of the snapshot come
        for name, tensor in snapshot.part("weights").items():
            mine[name].copy_(tensor)
        if snapshot.steps:
            self._ready().load(snapshot.part("optimizer"), snapshot.steps)

    def _state(self) -> dict[str, torch.Tensor]:
        """Weights and moments as they are, no copies, by the keys of a snapshot."""
        named = {f"weights/{name}": tensor for name, tensor in self._weights().items()}
        return named | {f"optimizer/{name}": tensor for name, tensor in self._moments().items()}

    def _full_cost(self, kind: str) -> SnapshotCost:
        """Bytes of weights and moments, those that the model's files have left out."""
        state = self._state()
        sizes = {tensor.data_ptr(): tensor.nbytes for tensor in state.values()}
        if self._untouched():
            for key, tensor in state.items():
                if self._files.shape(key.removeprefix("weights/")) == tensor.shape:
                    sizes.pop(tensor.data_ptr(), None)
        whole = sum(sizes.values())
        return SnapshotCost(disk=whole) if kind == "disk" else SnapshotCost(memory=whole)
