"""One save of one model on one rank: planned by all ranks together, written by each alone, published by rank 0 when all have.

The plan is torch's distributed checkpoint's (`SavePlanner`, `StorageWriter`), made while the ranks wait for each other anyway;
after it no rank needs a collective, so that writing can go on beside learning. What is being written lies in
`.staging-<name>` beside its place; only rank 0 gives it its name, and not after the deadline.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from workbench.engines.agreement import together
from workbench.engines.sharded_files import write_record
from workbench.errors import CheckpointError, first_line, message

if TYPE_CHECKING:
    from workbench.engines.sharded import ShardedModel

STAGING = ".staging-"
_PAUSE = 0.02
"""Seconds between two looks at who has written."""


class Saving:
    """Made by all ranks at once. `run` writes and publishes, here or in a thread (`start`); `answer` says how it went.

    With `copy` the state is copied to host memory first, so that the model may learn on meanwhile.
    """

    def __init__(
        self,
        model: ShardedModel,
        folder: str,
        record: Mapping[str, Any],
        weights: bool,
        *,
        key: str,
        store: Any,
        seconds: float,
        copy: bool,
    ) -> None:
        self._path = Path(folder)
        self._staging = self._path.with_name(f"{STAGING}{self._path.name}")
        self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
        self._key, self._store = key, store
        self._seconds, self._end = seconds, time.monotonic() + seconds
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.told: str | None = None
        """What came of it: None while it goes on, empty where all is well, else what went wrong."""
        together(self._begin() if self._rank == 0 else None, CheckpointError)
        tensors, steps = state_of(model, weights)
        if copy:
            tensors = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
        self._record = {**record, "steps": model.steps, "adam_steps": steps, "weights": weights}
        self._planned = _planned(tensors, str(self._staging)) if tensors else None

    def _begin(self) -> str | None:
        """Rank 0: an empty staging folder, and nothing in the place where it will stand; what is wrong with it."""
        if self._path.is_dir() and any(self._path.iterdir()):
            return message("a saved state is never overwritten", found=self._path, do="save to another folder")
        try:
            if self._staging.exists():  # of a driver that was killed while it saved
                shutil.rmtree(self._staging)
            self._staging.mkdir(parents=True)
        except OSError as error:
            return first_line(error)
        return None

    def start(self) -> None:
        """`run` in a thread."""
        self._thread = threading.Thread(target=self.run, name="workbench-saving", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Write this rank's part, say so to the others; rank 0 waits for them and publishes."""
        told = "the worker was ended"
        try:
            told = self._written()
            self._store.set(self._name(self._rank), told)
            if self._rank == 0:
                told = self._published()
        except RuntimeError as error:  # the store went with rank 0
            told = first_line(error)
        finally:
            with self._lock:
                self.told = self.told or told

    def answer(self, seconds: float) -> str | None:
        """`told`, after at most `seconds` of waiting; past the deadline there is one, and nothing is published any more."""
        if self._thread is not None:
            self._thread.join(max(seconds, 0.0))
        with self._lock:
            if self.told is None and time.monotonic() > self._end:
                self.told = self._overdue([self._rank])
            return self.told

    # --- inside -----------------------------------------------------------------------------

    def _written(self) -> str:
        if self._planned is not None:
            writer, plan, planner = self._planned
            self._planned = None
            try:
                writer.write_data(plan, planner).wait()
            except Exception as error:  # noqa: BLE001 - said to all ranks, and raised by the driver
                return f"rank {self._rank} could not write: {first_line(error)}"
        return ""

    def _published(self) -> str:
        """Rank 0: when all have written, the record and then the name; else nothing is left."""
        names = [self._name(rank) for rank in range(self._size)]
        while not self._store.check(names) and time.monotonic() < self._end:
            time.sleep(_PAUSE)
        late = [rank for rank, name in enumerate(names) if not self._store.check([name])]
        if late:
            return self._failed(self._overdue(late))
        found = [self._store.get(name).decode() for name in names]
        for name in names:
            self._store.delete_key(name)
        if any(found):
            return self._failed("; ".join(filter(None, found)))
        try:
            write_record(self._staging, self._record)
            with self._lock:
                if self.told is not None or time.monotonic() > self._end:
                    return self._failed(self._overdue([self._rank]))
                os.rename(self._staging, self._path)
            _sync(self._path.parent)
        except OSError as error:
            return self._failed(f"rank 0 could not publish it: {first_line(error)}")
        return ""

    def _overdue(self, late: list[int]) -> str:
        return f"ranks {late} of {self._size} had not written after {self._seconds:g} seconds"

    def _failed(self, told: str) -> str:
        shutil.rmtree(self._staging, ignore_errors=True)
        return told

    def _name(self, rank: int) -> str:
        return f"saving/{self._key}/{rank}"


def state_of(model: ShardedModel, weights: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """(this rank's part of the optimizer's state, and of the weights where asked for, by name; Adam's steps)."""
    tensors: dict[str, Any] = {}
    steps: dict[str, float] = {}
    if weights:
        tensors |= {f"weights/{name}": value for name, value in model.stored.items()}
    for name, state in (model.optimizer.state if model.steps else {}).items():
        steps[name] = float(state["step"])
        tensors |= {f"optimizer/{name}|{key}": value for key, value in state.items() if key != "step"}
    return {name: value.detach() for name, value in tensors.items()}, steps


def _planned(tensors: dict[str, Any], folder: str) -> tuple[Any, Any, Any]:
    """All ranks: who writes what. torch's own steps of a save, up to the one that writes."""
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


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
