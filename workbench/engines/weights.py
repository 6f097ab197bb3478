"""Weights that go from a learner to a sampler, in buckets of bounded size, under Hugging Face names; never pickled.

A learner that is a `WeightSender` writes the rows of its tensors, in the sampler's dtype, to where the sampler reads them; a
sampler that is a `WeightReceiver` loads one bucket after the other, and serves nothing before all have arrived. Who sends and who
receives decides the way (`WAYS`); `sync_of` chooses it. A local engine is both (`Pushing`)."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch

from workbench.base import runtime
from workbench.base.errors import EngineError, WorkerLost, check_name, first_line
from workbench.base.files import memory_file
from workbench.base.memory import resident
from workbench.engines.local_engine import lora
from workbench.engines.local_engine.loading import check_fit, load_model
from workbench.engines.local_engine.quantised import Weights
from workbench.engines.protocol import Learner, SampleMany, WeightSource, new_id
from workbench.engines.settings import LocalSettings
from workbench.engines.vllm_server.process import Piece, broadcast, device_name, ipc_handle, joined, mapped, received

BUCKET_BYTES = 128 << 20
"""Usual size of a bucket. A tensor that a sampler must have whole may be larger."""
WAYS = ("in place", "shared memory", "object store", "CUDA IPC", "broadcast", "adapter", "whole")
"""`in place`: both in one process. `shared memory`: buckets that every replica on the machine reads. `object store`: buckets
through the driver, between machines. `CUDA IPC`: buckets on the GPU that both use. `broadcast`: buckets from GPU to GPU by NCCL (on
CPUs by gloo). `adapter`: the LoRA adapter alone, over the base that the sampler has. `whole`: one call with all tensors.
What each costs, and why it stays: tests/benchmarks/README.md."""
_ON_GPUS = ("CUDA IPC", "broadcast")
UNVERIFIED = "not verified on a GPU yet: run workbench doctor"


# --- what is sent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of one of a learner's tensors, and the name of the tensor that it is tied to."""

    shape: tuple[int, ...]
    dtype: str
    tied: str = ""
    """Another name of the same tensor, which comes before this one; else empty."""


def layout_of(model: Any) -> dict[str, Entry]:
    """List the tensors of a model, as if LoRA adapters were merged, by Hugging Face names and in the model's order. The
    model may be on the meta device."""
    layout: dict[str, Entry] = {}
    first: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    held = dict(Weights(model, shapes=True))  # all of them at once: `tied` goes by which tensor it is
    for name, tensor in held.items():
        if "lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        tied = first.setdefault(id(parameters.get(name, tensor)), plain)
        layout[plain] = Entry(tuple(tensor.shape), str(tensor.dtype)[6:], tied if tied != plain else "")
    return layout


def buckets_of(
    layout: Mapping[str, Entry], dtype: str | None, limit: int, *, split: bool
) -> Iterator[tuple[list[Piece], int]]:
    """Divide tensors into buckets of at most `limit` bytes; yields (pieces, bytes). Floating-point tensors are
    converted to `dtype`; None keeps their own.

    With `split`, the rows of a tensor larger than `limit` are divided over several buckets; without it such a tensor
    has a bucket to itself. A tied tensor takes no bytes of its own.
    """
    pieces: list[Piece] = []
    used = 0
    for piece in _pieces(layout, dtype, limit if split else None):
        if pieces and not piece.tied and used + piece.nbytes > limit:
            yield pieces, used
            pieces, used = [], 0
        pieces.append(replace(piece, offset=pieces[-1].offset if piece.tied else used))
        used += 0 if piece.tied else -(-piece.nbytes // 64) * 64  # views need aligned bytes
    if pieces:
        yield pieces, used


def _pieces(layout: Mapping[str, Entry], dtype: str | None, limit: int | None) -> Iterator[Piece]:
    """Yield every tensor in pieces of at most `limit` bytes, each followed by pieces for the tensors that are tied to
    it."""
    tied: dict[str, list[str]] = {}
    for name, entry in layout.items():
        tied.setdefault(entry.tied, []).append(name)
    for name in tied.get("", ()):
        entry = layout[name]
        kind = dtype if dtype and getattr(torch, entry.dtype).is_floating_point else entry.dtype
        count = entry.shape[0] if entry.shape else 1
        row = max(Piece(name, entry.shape, kind, 0, 1, 0).nbytes, 1)
        step = max(count, 1) if limit is None else max(limit // row, 1)
        for first in range(0, max(count, 1), step):
            for each in (name, *tied.get(name, ())):
                yield Piece(each, entry.shape, kind, first, min(step, count - first), 0, each != name)


def rows_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the rows of a whole tensor that a piece stands for."""
    return tensor[piece.first : piece.first + piece.rows] if piece.shape else tensor


class Outbox:
    """The sending end of a push in a learner's process: writes pieces of tensors to where samplers read them."""

    def __init__(self) -> None:
        self._kept: Any = None
        self._listening: socket.socket | None = None
        self._group: Any = None

    @torch.no_grad()
    def send(
        self, pieces: Sequence[Piece], place: Mapping[str, Any], value: Callable[[Piece], torch.Tensor], device: Any
    ) -> Any:
        """Write `value(piece)` for each piece to `place`; returns what the sampler needs to read them there (see
        `received`)."""
        if "here" in place:
            return [value(piece) for piece in pieces]
        memory = mapped(place["file"], place["nbytes"], write=True) if "file" in place else None
        if memory is None:
            memory = torch.empty(place["nbytes"], dtype=torch.uint8, device="cpu" if "data" in place else device)
        for piece in pieces:
            if not piece.tied:
                piece.within(memory).copy_(value(piece))
        if "ipc" in place:
            torch.cuda.synchronize(device)  # the other process does not wait for this one's stream
            self._kept = memory  # until the next one: who has opened it keeps its own reference
            return {device_name(device): ipc_handle(memory)}
        if "broadcast" in place:
            broadcast(self._group[0], memory)
        return memory if "data" in place else None

    def listen(self) -> tuple[str, int]:
        """Open a port where the processes of a broadcast meet, and return (host, port): on loopback, or on the address
        that a cluster gave this worker."""
        host = os.environ.get("WORKBENCH_ADDRESS", "127.0.0.1")
        self._listening = socket.create_server((host, 0))
        return host, int(self._listening.getsockname()[1])

    def join(self, size: int, backend: str) -> None:
        """Join the process group of a broadcast as rank 0, the sender."""
        assert self._listening is not None
        host, port = self._listening.getsockname()[:2]
        self._group = joined(host, port, 0, size, backend, listen=self._listening.detach())

    def drop(self) -> None:
        """Free the memory of the last bucket that was sent."""
        self._kept = None


def machine() -> str:
    """Return a name of this machine that two processes share exactly if they can open each other's files in memory (one
    boot id and process id namespace)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@runtime_checkable
class WeightSender(Protocol):
    """Protocol of learners that send their weights in buckets (local, FSDP)."""

    def weight_layout(self) -> dict[str, Entry]:
        """Return the learner's tensors by Hugging Face names, with shapes and dtypes."""

    def sends(self) -> dict[str, Any]:
        """Describe where the learner is: `machines`, `pid` (None: in worker processes), `devices` (names of its GPUs),
        `adapter` (its LoRA rank and its base model's folder, or None) and `precision` (optional: the dtype of its forward
        passes)."""

    def send_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> Any:
        """Write pieces of tensors to `place` (see `Outbox.send`)."""

    def open_group(self, join: tuple[int, str] | None = None) -> Any:
        """Form the process group for a broadcast: without `join`, open a port and return (host, port); then `join` =
        (number of processes, backend)."""

    def empty_cache(self) -> None:
        """Free the device memory that torch has cached for reuse, on every rank: a sampler on the same device needs it."""


@runtime_checkable
class WeightReceiver(Protocol):
    """Protocol of samplers that take weights in buckets (local, vLLM, workers). Between `begin_weights` and
    `end_weights` they refuse to sample, and also after a push that was not completed."""

    def receives(self) -> dict[str, Any] | None:
        """Describe where the sampler is and what it takes; None where it takes no buckets.

        The keys are `machines`, `pids`, `devices` of its processes; `processes`, how many can join a broadcast
        (`join_group`); `dtype` (None: the sender's); `split`, whether a tensor may come in parts; `adapter_rank`, the
        largest rank of a LoRA adapter that it takes alone (`load_adapter`), over the base model in `folder`; `sleeps`
        (optional), whether it can free its GPU's memory; `precision` (optional), the dtype of its forward passes.
        """

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes. Raises `EngineError`, with nothing changed, where the model's own
        shapes are different."""

    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket: the `pieces` that were written to `place`."""

    def end_weights(self, version: int) -> int:
        """End a push: serve the new weights as policy `version`, and return the version served. Raises `EngineError`
        where a tensor has not arrived."""

    def cancel_weights(self) -> None:
        """End a push that failed: requests are refused until another push has succeeded."""


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Return all weights of a learner by Hugging Face names: from its `full_weights()`, or where it has none from a
    model folder that it saves."""
    if isinstance(learner, WeightSource):
        return dict(learner.full_weights())
    with tempfile.TemporaryDirectory(prefix="workbench-weights-") as folder:
        learner.save(Path(folder))
        return dict(load_model(folder, LocalSettings(device="cpu")).state_dict())


class Sending:
    """Base class of learners in this process that send their weights in buckets (`WeightSender`)."""

    @cached_property
    def _outbox(self) -> Outbox:
        return Outbox()

    def open_group(self, join: tuple[int, str] | None = None) -> Any:
        """Form the process group for a broadcast: without `join`, open a port and return (host, port); then `join` =
        (number of processes, backend)."""
        return self._outbox.listen() if join is None else self._outbox.join(*join)


class Tensors(Sending):
    """A `WeightSender` made from tensors by name, in this process."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights

    def weight_layout(self) -> dict[str, Entry]:
        """Return the names, shapes and dtypes of the tensors."""
        return {name: Entry(tuple(one.shape), str(one.dtype)[6:]) for name, one in self._weights.items()}

    def sends(self) -> dict[str, Any]:
        """Describe where the tensors are: in this process, on the CPU."""
        return {"machines": [machine()], "pid": os.getpid(), "devices": [], "adapter": None}

    def send_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> Any:
        """Write pieces of the tensors to `place` (see `Outbox.send`)."""
        return self._outbox.send(pieces, place, lambda piece: rows_of(self._weights[piece.name], piece), "cpu")

    def empty_cache(self) -> None:
        """Do nothing: the tensors belong to the caller."""


# --- a push -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Push:
    """Figures of one push of weights from a learner to a sampler: its way, size, time and memory."""

    way: str
    """One of `WAYS`."""
    version: int
    """Policy version that every replica has confirmed."""
    bytes: int
    """Bytes that were sent, once for all replicas."""
    seconds: float
    host_bytes: int
    """Most host memory that it took at once beyond the two models: buckets, and what this process grew by."""
    dtype: str | None = None
    """Of the sampler's floating weights, where it is known."""
    note: str = ""
    """What to know about this way."""
    gap: float | None = None
    """Largest difference of a sampled token's log-prob from the learner's own, in nats; only `check_push` looks."""

    def __str__(self) -> str:
        size = (
            f"{self.bytes / 2**20:,.1f} MiB in {self.seconds:.2f} s, {self.host_bytes / 2**20:,.0f} MiB of host memory"
        )
        gap = "" if self.gap is None else f"log-probs within {self.gap:.1g}"
        notes = ", ".join(filter(None, (self.note, gap)))
        return f"{self.way}: {size}{f' ({notes})' if notes else ''}"


class WeightSync(Protocol):
    """Protocol of one way to bring a learner's weights to its sampler (in place, by shared memory, by broadcast …);
    made by `sync_of`."""

    way: str
    """One of `WAYS`."""

    def push(self, version: int) -> Push:
        """Push the learner's present weights, to be served as policy `version` by every replica.

        Raises `EngineError` where the sampler refuses them; after a push that failed half-way the sampler refuses to
        sample.
        """


class WholeSync:
    """Pushes all tensors in one call of `load_weights`, on the CPU: for samplers and learners that do not take buckets."""

    way = "whole"

    def __init__(self, learner: Any, sampler: Any) -> None:
        self._learner, self._sampler = learner, sampler

    def push(self, version: int) -> Push:
        """Push all tensors at once."""
        began, before = time.perf_counter(), resident()
        weights = weights_of(self._learner)
        self._sampler.load_weights(weights, version)
        size = sum(one.nbytes for one in weights.values())
        return Push(self.way, version, size, time.perf_counter() - began, max(resident() - before, size))


class AdapterSync:
    """Pushes a LoRA adapter alone, as a peft folder in host memory; every replica loads it over the base model that it
    has."""

    way = "adapter"

    def __init__(self, learner: Any, sampler: Any) -> None:
        self._learner, self._sampler = learner, sampler

    def push(self, version: int) -> Push:
        """Write the adapter to a temporary folder and let the sampler load it."""
        began, before = time.perf_counter(), resident()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="workbench-adapter-", dir=memory) as folder:
            self._learner.save(Path(folder))
            size = (Path(folder) / "adapter_model.safetensors").stat().st_size
            _confirmed(self._sampler.load_adapter(folder, version), version)
        takes = self._sampler.receives()
        seconds = time.perf_counter() - began
        return Push(
            self.way, version, size, seconds, max(resident() - before, size), takes["dtype"], _note(self.way, takes)
        )


class BucketSync:
    """Pushes weights in buckets of bounded size, one after the other: the learner's process writes each, and every
    replica reads it."""

    def __init__(self, learner: Any, sampler: Any, way: str, limit: int = BUCKET_BYTES) -> None:
        self.way = way
        self._learner, self._sampler, self._limit = learner, sampler, limit
        self._group: tuple[Any, ...] | None = None
        self._open: tuple[BinaryIO, str] | None = None

    def push(self, version: int) -> Push:
        """Push all tensors, bucket by bucket, and check that the sampler serves them."""
        began, before, sent, most = time.perf_counter(), resident(), 0, 0
        takes, layout = self._sampler.receives(), self._learner.weight_layout()
        dtype = None if self.way == "in place" else takes["dtype"]
        plan = buckets_of(layout, dtype, self._limit, split=takes["split"])
        self._form_group(takes)
        try:
            self._sampler.begin_weights({name: one.shape for name, one in layout.items()})
            with ExitStack() as files:
                for pieces, nbytes in plan:
                    self._push_bucket(pieces, nbytes, files, again=takes["split"])
                    sent += nbytes
                    held = 0 if self.way in ("in place", *_ON_GPUS) else nbytes
                    most = max(most, held, resident() - before)
            _confirmed(self._sampler.end_weights(version), version)
        except BaseException:
            self._group = None  # made anew: who was lost is not in it
            with ThreadPoolExecutor(1) as cancelling:  # also where this thread is being interrupted
                cancelling.submit(self._sampler.cancel_weights)
            raise
        return Push(self.way, version, sent, time.perf_counter() - began, most, takes["dtype"], _note(self.way, takes))

    def _push_bucket(self, pieces: list[Piece], nbytes: int, files: ExitStack, again: bool) -> None:
        if self.way == "shared memory":
            place = {"file": self._file(nbytes, files, again), "nbytes": nbytes}
            self._learner.send_weights(pieces, place)
            self._sampler.take_weights(pieces, place)
            return
        kind = {"in place": "here", "object store": "data", "CUDA IPC": "ipc", "broadcast": "broadcast"}[self.way]
        place = {kind: None, "nbytes": nbytes}
        if kind == "broadcast":  # both at once
            with ThreadPoolExecutor(1) as pool:
                sending = pool.submit(self._learner.send_weights, pieces, place)
                self._sampler.take_weights(pieces, place)
                sending.result()
            return
        sent = self._learner.send_weights(pieces, place)
        self._sampler.take_weights(pieces, {kind: sent, "nbytes": nbytes})

    def _file(self, nbytes: int, files: ExitStack, again: bool) -> str:
        """Return the path of a file in memory for a bucket: the last one where `again`, else a new one, because the
        sampler may still refer to the last."""
        if self._open is None or not again:
            files.close()
            self._open = files.enter_context(memory_file("workbench-weights"))
            files.callback(setattr, self, "_open", None)
        file, path = self._open
        file.truncate(max(nbytes, os.fstat(file.fileno()).st_size))
        return path

    def _form_group(self, takes: Mapping[str, Any]) -> None:
        """Form the process group of a broadcast, again where a sampler's process was restarted."""
        which = (takes["processes"], tuple(map(str, takes["pids"])))
        if self.way != "broadcast" or self._group == which:
            return
        size = 1 + takes["processes"]
        backend = "nccl" if takes["devices"] else "gloo"
        host, port = self._learner.open_group()
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(self._learner.open_group, (size, backend))
            self._sampler.join_group(host, port, 1, size, backend)
            joining.result()
        self._group = which


class FallbackSync:
    """Pushes by a way that was chosen automatically and has not been verified on this GPU; where it fails, by another
    way (such as shared memory)."""

    def __init__(self, first: BucketSync, other: BucketSync) -> None:
        self.way, self._first, self._other = first.way, first, other

    def push(self, version: int) -> Push:
        """Push by the first way; where that fails, warn and push by the other way, from then on."""
        if self.way == self._first.way:
            try:
                return self._first.push(version)
            except WorkerLost:
                raise
            except EngineError as error:
                self.way = self._other.way
                why = f"weights are pushed through {self.way}, since {self._first.way} failed"
                warnings.warn(f"{why}: {first_line(error)}", stacklevel=2)
        return self._other.push(version)


def sync_of(learner: Any, sampler: Any, way: str = "auto", bucket_bytes: int = BUCKET_BYTES) -> WeightSync:
    """Choose how a learner's weights get to a sampler, from where both are; `way` is one of `WAYS`, or `auto`.

    Raises `EngineError` for a way that these two cannot go.
    """
    check_name("way of weights", way, ("auto", *WAYS), EngineError)
    ways = possible(learner, sampler)
    makers: dict[str, Callable[[], Any]] = {
        name: partial(BucketSync, learner, sampler, name, bucket_bytes) for name in ways
    }
    makers |= {"adapter": partial(AdapterSync, learner, sampler)} if "adapter" in ways else {}
    makers["whole"] = partial(WholeSync, learner, sampler)
    if way != "auto" and way not in makers:
        what = f"weights cannot go from {learner!r} to {sampler!r} by {way!r}"
        raise EngineError(what, expected=f"one of {', '.join(makers)}", found=repr(way))
    chosen = way if way != "auto" else next(iter(makers))
    if way == "auto" and chosen in _ON_GPUS and chosen not in proven():
        other = next(one for one in ways if one in ("shared memory", "object store"))
        return FallbackSync(makers[chosen](), makers[other]())
    sync: WeightSync = makers[chosen]()
    return sync


def possible(learner: Any, sampler: Any) -> list[str]:
    """List the ways by which weights can go from this learner to this sampler, the best first; `whole`, which is always
    possible, is left out."""
    if not isinstance(learner, WeightSender) or not isinstance(sampler, WeightReceiver):
        return []
    here, there = learner.sends(), sampler.receives()
    if there is None:
        return []
    one_machine = len({machine(), *here["machines"], *there["machines"]}) == 1
    adapter, folder = here["adapter"], os.path.realpath(there["folder"])
    fits = adapter and adapter["rank"] <= there["adapter_rank"] and os.path.realpath(adapter["base"]) == folder
    ways = ["adapter"] if fits and one_machine else []
    if here["pid"] == os.getpid() and there["pids"] == [os.getpid()]:
        return [*ways, "in place"]
    ways += _between_gpus(here["devices"], there["devices"])
    ways += ["shared memory", "object store"] if one_machine else ["object store"]
    # by gloo: no faster, but the same code as between GPUs
    return [*ways, "broadcast"] if there["processes"] and not here["devices"] and not there["devices"] else ways


def share_a_card(learner: Any, sampler: Any) -> bool:
    """Whether a learner and a sampler work on the same GPU, whose memory the sampler can free while the learner works."""
    if not isinstance(learner, WeightSender) or not isinstance(sampler, WeightReceiver):
        return False
    there = sampler.receives() or {}
    return bool(there.get("sleeps")) and not set(there["devices"]).isdisjoint(learner.sends()["devices"])


def _proofs_path() -> Path:
    """Path of this user's file with the ways that were verified on this machine's GPU under this version of torch."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    name = re.sub(r"\W+", "-", f"weights {gpu} torch {torch.__version__}")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "workbench", name)


def proven() -> set[str]:
    """The ways to push weights that `check_push` (run by the doctor, too) has verified on this machine."""
    with suppress(OSError, RuntimeError):  # a user without a home
        return set(_proofs_path().read_text().splitlines())
    return set()


def prove(way: str) -> None:
    """Remember that a way to push weights was verified here. Where the home folder cannot be written the way stays
    unverified, without an error."""
    with suppress(OSError, RuntimeError):
        path = _proofs_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(sorted({*proven(), way})))


def _between_gpus(here: Sequence[str], there: Sequence[str]) -> list[str]:
    if not here or not there:
        return []
    if set(there) <= set(here):
        return ["CUDA IPC"]
    return [] if set(there) & set(here) else ["broadcast"]  # NCCL takes each GPU once


def _note(way: str, takes: Mapping[str, Any]) -> str:
    """Return a remark on a push by this way to a sampler that `takes` weights so: that it is unverified on a GPU, or
    nothing."""
    return UNVERIFIED if takes["devices"] and way not in proven() else ""


def _confirmed(served: int, version: int) -> None:
    if served != version:
        what = "the sampler does not serve the weights that were pushed to it"
        raise EngineError(what, expected=f"policy version {version}", found=f"version {served}", do="push again")


# --- the receiving end --------------------------------------------------------------------------


def check_shapes(what: str, shapes: Mapping[str, Sequence[int]], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise `EngineError` about `what` for the first tensor of `wanted` that `shapes` lacks or has in another shape."""
    check_fit(what, {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}, wanted)


class Receiving(SampleMany):
    """Base class of samplers that take weights in buckets (`WeightReceiver`): adds `load_weights` and `sync`."""

    def load_weights(self: Any, weights: Mapping[str, torch.Tensor], version: int) -> float:
        """Load all weights of a model, given by their Hugging Face names, and serve them as policy `version`; returns
        the seconds taken.

        Requests made before are answered with the old weights, later ones with the new. Raises `EngineError` where a
        tensor of the model is missing, and where the push fails: the engine then refuses to sample until another one
        succeeds.
        """
        return sync_of(Tensors(weights), self).push(version).seconds

    def sync(self: Any, learner: Learner) -> float:
        """Load a learner's weights into the sampler under the learner's version, by the best way; returns the seconds
        taken."""
        return sync_of(learner, self).push(learner.version).seconds


def pieces_in(
    pieces: Sequence[Piece], place: Mapping[str, Any], device: Any, group: Any
) -> Iterable[tuple[Piece, torch.Tensor]]:
    """Return pairs of (piece, its rows as a tensor) of a bucket that was sent to `place`."""
    if "here" in place:
        return zip(pieces, place["here"], strict=True)
    memory = place["data"] if "data" in place else received(place, device, group)
    return ((piece, piece.within(memory)) for piece in pieces)


# --- a local engine ------------------------------------------------------------------------------


class Pushing(Sending, Receiving):
    """Base class of the local engine: it can both send its weights to a sampler and receive a learner's
    (`WeightSender`, `WeightReceiver`)."""

    _model: Any
    _settings: LocalSettings
    version: int
    state_id: str
    path: str
    _group: Any = None
    _missing: dict[str, int] | None = None
    """Rows by name that a push has not brought yet; None outside of one."""
    sharing: bool = False
    """Whether sampling lets other work of this process in between two tokens (`Renewable`)."""
    _between: int = 0

    # --- sending ----------------------------------------------------------------------------

    def sends(self) -> dict[str, Any]:
        """Describe where the engine is as a sender of weights (see `WeightSender.sends`)."""
        name = device_name(self._model.device)
        here = {"machines": [machine()], "pid": os.getpid(), "devices": [name] if name else []}
        return {**here, "adapter": lora.adapter_of(self._model), "precision": self._precision()}

    def send_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> Any:
        """Write pieces of the model's tensors, with LoRA adapters merged, to `place` (see `Outbox.send`)."""
        held, layers = Weights(self._model), lora.layers(self._model)

        def value(piece: Piece) -> torch.Tensor:
            layer = layers.get(piece.name)
            if layer is None:
                return rows_of(held[piece.name], piece)
            base, a, b = lora.parts(held, piece.name)
            rows = slice(piece.first, piece.first + piece.rows)
            return base[rows] + lora.delta(layer, a, b, rows)

        return self._outbox.send(pieces, place, value, self._model.device)

    def empty_cache(self) -> None:
        """Free the device memory that torch has cached for reuse."""
        self._outbox.drop()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- receiving --------------------------------------------------------------------------

    def receives(self) -> dict[str, Any]:
        """Describe where the engine is as a receiver of weights, and what it takes (see `WeightReceiver.receives`)."""
        name = device_name(self._model.device)
        kind = str(next(self._model.parameters()).dtype)[6:]
        where = {"machines": [machine()], "pids": [os.getpid()], "devices": [name] if name else [], "processes": 1}
        takes = {"dtype": kind, "split": True, "adapter_rank": 0, "folder": self.path}
        return {**where, **takes, "precision": self._precision()}

    def _precision(self) -> str:
        return self._settings.precision(self._model.device.type)

    def begin_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Begin a push of tensors of these shapes; until it ends the engine refuses to sample."""
        mine = self._model.state_dict()
        check_shapes("the tensors passed to load_weights", shapes, mine)
        self.state_id = new_id()  # half-way there is no state that anybody knows
        self._missing = {name: tensor.shape[0] if tensor.dim() else 1 for name, tensor in mine.items()}

    @torch.no_grad()
    def take_weights(self, pieces: Sequence[Piece], place: Mapping[str, Any]) -> None:
        """Load one bucket: the `pieces` that were written to `place`."""
        mine, missing = self._model.state_dict(), self._missing
        if missing is None:
            raise EngineError("a bucket of weights outside of a push", expected="begin_weights() before it")
        for piece, rows in pieces_in(pieces, place, self._model.device, self._group):
            if piece.name in mine:
                rows_of(mine[piece.name], piece).copy_(rows)
                missing[piece.name] -= piece.rows

    def end_weights(self, version: int) -> int:
        """End a push: the new weights become policy `version`, and the optimizer starts anew."""
        lacks = [name for name, rows in (self._missing or {"every tensor": 1}).items() if rows]
        if lacks:
            raise EngineError("a push of weights is incomplete", expected=f"all rows of {lacks[0]}", found="fewer")
        self._reset()
        self._missing = None
        self.version, self.state_id = version, new_id()
        return version

    def _reset(self) -> None:
        """Forget the optimizer and snapshots of the old weights; does nothing in this class."""

    def cancel_weights(self) -> None:
        """End a push that failed; the engine keeps refusing to sample."""

    def check_weights(self) -> None:
        """Raise `EngineError` while a push of weights is under way, and after one that failed."""
        if self._missing is not None:
            what, do = "this engine has some old and some new weights", "push again"
            raise EngineError(what, found="a push that is under way, or one that broke off", do=do)

    def load_adapter(self, folder: str, version: int) -> int:
        """Raise `EngineError`: a local engine takes merged weights, not a LoRA adapter alone."""
        raise EngineError("a push to a local engine", expected="merged weights", found=f"adapter {Path(folder).name}")

    def join_group(self, host: str, port: int, first: int, size: int, backend: str) -> None:
        """Join the process group of a broadcast of weights as rank `first`."""
        self._group = joined(host, port, first, size, backend)

    # --- while responses are under way -------------------------------------------------------

    def _still(self, state: str) -> bool:
        """Whether the weights are still those of the state named `state`."""
        return self.state_id == state

    def _let_in(self, state: str) -> bool:
        """Called between two tokens: let other work of this process run, where some waits and the engine shares its
        time; returns whether the weights have changed since `state`."""
        while self.sharing and (self._between or runtime.wanted()):
            with runtime.waiting():
                time.sleep(0.001)
        return self.sharing and self.state_id != state

    @contextmanager
    def between_tokens(self) -> Iterator[None]:
        """Context manager: inside it no token is sampled.

        Responses under way go on after it with the weights present then. What they have so far is prefilled again, so
        that each token is sampled with weights of one policy version.
        """
        self._between += 1
        try:
            with runtime.alone(runtime.check):
                yield
        finally:
            self._between -= 1
