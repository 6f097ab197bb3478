"""The worker's side of an FSDP group: one rank, with its part of each model by name, and its part of each save."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from workbench.base.errors import CheckpointError, EngineError, first_line, message
from workbench.base.files import fsync
from workbench.base.memory import separate_blocks
from workbench.engines.fsdp_engine.meshes import Mesh, Sizes, everyone, sizes_of
from workbench.engines.fsdp_engine.sharded import ShardedModel
from workbench.engines.local_engine.loading import chosen_device
from workbench.engines.local_engine.selfcheck import SelfCheck
from workbench.engines.local_engine.states import write_record
from workbench.engines.settings import FsdpSettings

STAGING = ".staging-"
_PAUSE = 0.02
"""Seconds between two looks at who has written."""


class Shards:
    """One rank of an FSDP group, in its worker process. Call `reserve` on rank 0, then `join` on all ranks, to form the
    process group.

    `host` is the address on which rank 0 waits for the others; `auto` takes the one that other machines see. `wait` is
    how many seconds a rank waits for another inside torch.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: str = "auto",
        threads: int = 1,
        host: str = "127.0.0.1",
        wait: float = FsdpSettings.group_deadline,
    ) -> None:
        self.rank = rank
        self.size = size
        self._host = host
        self._wait = datetime.timedelta(seconds=wait)
        self._store: Any = None
        self._models: dict[str, ShardedModel] = {}
        self._savings: dict[str, Saving] = {}
        self.device = chosen_device(device)
        if self.device == "cpu":
            separate_blocks()
        torch.set_num_threads(threads)
        self._gpu = rank % torch.cuda.device_count() if self.device == "cuda" else None
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)

    def reserve(self) -> tuple[str, int] | None:
        """Open, on rank 0, the `TCPStore` where all ranks meet, on a free port, and return its (host, port); on other
        ranks return None."""
        if self.rank:
            return None
        host = _own_address() if self._host == "auto" else self._host
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        # the store takes the socket over: it listens on that address alone
        taken: dict[str, Any] = {"is_master": True, "master_listen_fd": listening.detach()}
        self._store = distributed.TCPStore(host, port, timeout=self._wait, wait_for_workers=False, **taken)
        return host, port

    def join(self, host: str, port: int) -> dict[str, Any]:
        """Join the process group of all ranks; returns this worker's `rank`, `pid`, `host`, `device` and `card` (its
        GPU's name, empty for a CPU)."""
        if self._store is None:
            self._store = distributed.TCPStore(host, port, timeout=self._wait, wait_for_workers=False)
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        distributed.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.size, timeout=self._wait
        )
        self._meshes: dict[Sizes, Mesh] = {}
        where = {"host": socket.gethostname(), "device": self.device}
        card = "" if self._gpu is None else torch.cuda.get_device_name(self._gpu)
        return {"rank": self.rank, "pid": os.getpid(), **where, "card": card}

    def meet(self) -> None:
        """Let all ranks add up one number on their devices: NCCL makes its communicator here, on this rank's GPU.

        `init_process_group(device_id=…)` does so too, and has meshes split from that communicator, which groups with gloo beside
        NCCL cannot do in every torch. Raises `EngineError` where the sum is wrong.
        """
        everyone(None)  # over gloo: all are there
        one = torch.ones(1, device=self.device if self._gpu is None else f"cuda:{self._gpu}")
        distributed.all_reduce(one)
        if float(one) != self.size:
            raise EngineError("the first all-reduce over all ranks", expected=f"{self.size}", found=f"{float(one):g}")

    # --- models -----------------------------------------------------------------------------

    def open(self, name: str, path: str, settings: Mapping[str, Any], head: bool, source: str | None) -> SelfCheck:
        """Load the model folder `path` on this rank under `name`. With `source`, a loaded model's name or a saved
        state's folder, its weights come from there.

        Returns the result of the model's self-check.
        """
        chosen = FsdpSettings(**settings)
        sizes = sizes_of(chosen.mesh, self.size)
        if sizes not in self._meshes:
            self._meshes[sizes] = Mesh(self.device, sizes)
        model = ShardedModel(path, chosen, self._meshes[sizes], head, self._models)
        if source is None:
            model.load(path)
        elif source in self._models:
            model.copy(self._models[source])
        else:
            if model.adapted:
                model.load(path)  # a state has the adapters alone
            model.load_state(source, steps=False)
        if source in self._models:
            model.selfcheck = self._models[source].selfcheck
        elif model.settings.self_check:
            model.selfcheck = model.examine(path)
        model.whole.causal.workbench_paths = model.selfcheck.paths
        _ = model.packed  # refuses what cannot be
        self._models[name] = model
        return model.selfcheck

    def drop(self, name: str) -> None:
        """Free the memory of the model `name` on this rank."""
        self._models.pop(name, None)

    def on(self, mine: Any, name: str, method: str, *shared: Any) -> Any:
        """Call `method` of the model `name` with `(mine, *shared)`, where `mine` is this rank's own argument; None
        leaves it out."""
        return getattr(self._models[name], method)(*(() if mine is None else (mine,)), *shared)

    def save_shards(
        self, name: str, folder: str, record: Mapping[str, Any], weights: bool, seconds: float, wait: bool
    ) -> str | None:
        """Start saving a model's state to a new folder, to be done within `seconds`. With `wait` it is done at the
        return, which is the error text, empty after success; else None."""
        model = self._models[name]
        tensors, adam_steps = model.state(weights)
        whole = {
            **record,
            "steps": model.steps(),
            "adam_steps": adam_steps,
            "weights": weights,
            "scaling": model.scaling(),
        }
        self._savings[record["id"]] = Saving(tensors, folder, whole, self._store, seconds, copy=not wait, gpu=self._gpu)
        return self.save_answer(record["id"], seconds + 0.5) if wait else None

    def save_answer(self, key: str, seconds: float) -> str | None:
        """Wait up to `seconds` for the save with the id `key`; returns its error text, empty after success, or None
        while it still runs."""
        saving = self._savings.get(key)
        outcome = saving.answer(seconds) if saving is not None else ""
        if outcome is not None:
            self._savings.pop(key, None)
        return outcome


shards = Shards
"""The factory for `Ranks`: one rank that has not joined the others yet."""


def _own_address() -> str:
    if os.environ.get("WORKBENCH_ADDRESS"):  # who started this worker knows
        return os.environ["WORKBENCH_ADDRESS"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a documentation address; a datagram socket sends nothing to connect
        return str(probe.getsockname()[0])


class Saving:
    """One save of a model's state: planned by all ranks together, written by each in a thread, published by rank 0.

    The plan is that of torch's distributed checkpoint (`SavePlanner`, `StorageWriter`), made while the ranks wait for
    each other anyway. After it no rank needs a collective, so that files can be written while the model learns (with
    `copy`, from a copy in host memory). The files are written to `.staging-<name>` beside the folder. Rank 0 renames it
    when it is complete, and not after the deadline.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        folder: str,
        record: Mapping[str, Any],
        store: Any,
        seconds: float,
        *,
        copy: bool,
        gpu: int | None = None,
    ) -> None:
        self._path = Path(folder)
        self._staging = self._path.with_name(f"{STAGING}{self._path.name}")
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._store, self._record, self._gpu = store, record, gpu
        self._seconds, self._end = seconds, time.monotonic() + seconds
        self._lock = threading.Lock()
        self._outcome: str | None = None  # None while it goes on, empty after success, else what went wrong
        everyone(self._begin() if self._rank == 0 else None, CheckpointError)
        held = {name: value.to("cpu", copy=True) if copy else value for name, value in tensors.items()}
        self._plan = _plan_save(held, str(self._staging)) if held else None
        # in a thread even where it is waited for: a disk that hangs must not hold the rank beyond the deadline
        self._thread = threading.Thread(target=self._run, name="workbench-saving", daemon=True)
        self._thread.start()

    def _begin(self) -> str | None:
        """Make an empty staging folder, on rank 0; returns the text of an error, or None."""
        if self._path.is_dir() and any(self._path.iterdir()):
            return message("a saved state is never overwritten", found=f"files in {self._path}", do="use a new folder")
        try:
            shutil.rmtree(self._staging, ignore_errors=True)  # of a driver that was killed while it saved
            self._staging.mkdir(parents=True)
        except OSError as error:
            return first_line(error)
        return None

    def _run(self) -> None:
        """Write this rank's files and report the outcome to the other ranks; rank 0 then waits for all reports and
        publishes the folder."""
        outcome = "the worker was ended"
        try:
            if self._gpu is not None:  # torch waits for copies from the thread's GPU, and a new thread has the first
                torch.cuda.set_device(self._gpu)
            outcome = self._write()
            self._store.set(self._name(self._rank), outcome)
            if self._rank == 0:
                outcome = self._publish()
        except RuntimeError as error:  # the store went with rank 0
            outcome = first_line(error)
        finally:
            with self._lock:
                self._outcome = self._outcome or outcome

    def answer(self, seconds: float) -> str | None:
        """Wait at most `seconds` for the save; returns its error text, empty after success, or None while it still
        runs.

        Past the deadline the save has failed, and nothing is published any more.
        """
        self._thread.join(max(seconds, 0.0))
        with self._lock:
            if self._outcome is None and time.monotonic() > self._end:
                self._outcome = self._late_text([self._rank])
            return self._outcome

    # --- inside -----------------------------------------------------------------------------

    def _write(self) -> str:
        planned, self._plan = self._plan, None
        try:
            if planned is not None:
                writer, plan, planner = planned
                writer.write_data(plan, planner).wait()
        except Exception as error:  # noqa: BLE001 - sent to all ranks, and raised by the driver
            return f"rank {self._rank} could not write: {first_line(error)}"
        return ""

    def _publish(self) -> str:
        """Wait, on rank 0, until all ranks have written, then write the record and rename the folder. Where anything
        failed, remove the files; returns the error text, empty after success."""
        names = [self._name(rank) for rank in range(self._size)]
        while not self._store.check(names) and time.monotonic() < self._end:
            time.sleep(_PAUSE)
        late = [rank for rank, name in enumerate(names) if not self._store.check([name])]
        if late:
            return self._failed(self._late_text(late))
        outcomes = [self._store.get(name).decode() for name in names]
        for name in names:
            self._store.delete_key(name)
        if any(outcomes):
            return self._failed("; ".join(filter(None, outcomes)))
        try:
            write_record(self._staging, self._record)
            with self._lock:
                if self._outcome is not None or time.monotonic() > self._end:
                    return self._failed(self._late_text([self._rank]))
                os.rename(self._staging, self._path)
            fsync(self._path.parent)
        except OSError as error:
            return self._failed(f"rank 0 could not rename the finished folder: {first_line(error)}")
        return ""

    def _late_text(self, late: list[int]) -> str:
        return f"ranks {late} of {self._size} had not written after {self._seconds:g} seconds"

    def _failed(self, why: str) -> str:
        shutil.rmtree(self._staging, ignore_errors=True)
        return why

    def _name(self, rank: int) -> str:
        return f"saving/{self._record['id']}/{rank}"


def _plan_save(tensors: dict[str, Any], folder: str) -> tuple[Any, Any, Any]:
    """Plan, on all ranks together, which rank writes which tensors, by torch's own steps of a distributed save; returns
    (writer, this rank's plan, planner)."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    rank, size = distributed.get_rank(), distributed.get_world_size()
    planner, writer = DefaultSavePlanner(), HuggingFaceStorageWriter(folder, save_distributed=True)
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    writer.reset(folder)
    writer.set_up_storage_writer(rank == 0)
    plans: list[Any] = [None] * size
    distributed.all_gather_object(plans, writer.prepare_local_plan(planner.create_local_plan()))
    box: list[Any] = [None]
    if rank == 0:
        box[0] = writer.prepare_global_plan(planner.create_global_plan(plans)[0])
    distributed.broadcast_object_list(box, 0)
    return writer, planner.finish_plan(box[0][rank]), planner
