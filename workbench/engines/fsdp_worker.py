"""What one rank of an FSDP group holds: a process group, and its part of each model by name."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from workbench.engines.agreement import together
from workbench.engines.fsdp_settings import FsdpSettings
from workbench.engines.sharded import ShardedModel
from workbench.engines.sharded_files import load_shards, write_plain
from workbench.engines.sharded_saving import Saving
from workbench.errors import first_line


def shards(rank: int, size: int, **settings: Any) -> Shards:
    """The factory for `Ranks`: one rank that has not joined the others yet."""
    return Shards(rank, size, **settings)


class Shards:
    """One rank. `reserve` on rank 0 and then `join` on all make the group; `on` calls a model's method on all at once.

    `host` is the address on which rank 0 waits for the others; `auto` takes the one that other machines see. `seconds` is
    the longest that a rank waits for another inside torch.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        device: str = "auto",
        threads: int = 1,
        seconds: float = 600.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.rank = rank
        self.size = size
        self._host = host
        self._timeout = datetime.timedelta(seconds=seconds)
        self._store: Any = None
        self._models: dict[str, ShardedModel] = {}
        self._savings: dict[str, Saving] = {}
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
        torch.set_num_threads(threads)
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())

    def reserve(self) -> tuple[str, int] | None:
        """Rank 0 opens the store where all will meet, on a port that the system gives and nobody can take; where it is."""
        if self.rank:
            return None
        host = _own_address() if self._host == "auto" else self._host
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        # the store takes the socket over: it listens on that address alone
        self._store = distributed.TCPStore(
            host,
            port,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return host, port

    def join(self, host: str, port: int) -> dict[str, Any]:
        """All ranks meet; who this one is."""
        if self._store is None:
            self._store = distributed.TCPStore(host, port, timeout=self._timeout, wait_for_workers=False)
        backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
        distributed.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.size, timeout=self._timeout
        )
        self._mesh = distributed.init_device_mesh(self.device, (self.size,))
        return {"rank": self.rank, "pid": os.getpid(), "host": socket.gethostname(), "device": self.device}

    # --- models -----------------------------------------------------------------------------

    def open(self, name: str, path: str, settings: Mapping[str, Any], head: bool, source: str | None) -> None:
        """A model by name: the structure of `path` with its weights, with those of another model here (`source`), or of a
        sharded state (`source` is a folder).
        """
        model = ShardedModel(path, FsdpSettings(**settings), self._mesh, head)
        if source is None:
            model.load(path)
        elif source in self._models:
            model.copy(self._models[source])
        else:
            if model.adapted:
                model.load(path)  # a state has the adapters alone
            load_shards(model, source)
            model.forget()
        self._models[name] = model

    def drop(self, name: str) -> None:
        """Let a model go."""
        self._models.pop(name, None)

    def on(self, mine: Any, name: str, method: str, *shared: Any) -> Any:
        """`getattr(model, method)(mine, *shared)`; without `mine` where it is None."""
        found = getattr(self._models[name], method)
        return found(mine, *shared) if mine is not None else found(*shared)

    def full_kl(self, mine: Any, name: str, other: str, base: bool, temperature: float) -> torch.Tensor:
        """See `ShardedModel.full_kl`."""
        return self._models[name].full_kl(mine, self._models[other], base, temperature)

    def steps(self, name: str) -> int:
        """Optimizer steps that a model has taken."""
        return self._models[name].steps

    def load(self, name: str, folder: str) -> None:
        """A Hugging Face folder's weights into a model that is there."""
        model = self._models[name]
        model.load(folder, adapters=model.adapted)

    def save_shards(
        self, name: str, folder: str, record: Mapping[str, Any], weights: bool, key: str, seconds: float, wait: bool
    ) -> str | None:
        """A model's state to a new folder within `seconds`, see `sharded_saving`: what went wrong, or without `wait` None."""
        saving = Saving(
            self._models[name], folder, record, weights, key=key, store=self._store, seconds=seconds, copy=not wait
        )
        self._savings[key] = saving
        saving.start()
        # in a thread even where it is waited for: a disk that hangs must not hold the rank beyond the deadline
        return self.save_answer(key, seconds + 0.5) if wait else None

    def save_answer(self, key: str, seconds: float) -> str | None:
        """What came of a save that goes on beside, after at most `seconds`: None where it still goes on."""
        saving = self._savings.get(key)
        told = saving.answer(seconds) if saving is not None else ""
        if told is not None:
            self._savings.pop(key, None)
        return told

    def load_shards(self, name: str, folder: str) -> None:
        """See `sharded_files.load_shards`."""
        load_shards(self._models[name], folder)

    def save_plain(self, name: str, source: str, folder: str, shown: str, merged: bool) -> None:
        """A plain Hugging Face folder, or with adapters that are not to be `merged` a peft one, written by rank 0."""
        model = self._models[name]
        weights = model.weights(merged)
        told = None
        if weights is not None:
            try:
                write_plain(weights, source, folder, model.settings, shown)
            except Exception as error:  # noqa: BLE001 - all ranks raise it
                told = first_line(error)
        together(told)

    def memory(self, name: str) -> dict[str, int]:
        """Bytes of this rank: `weights` and `optimizer` of a model, and the device's `peak` so far (0 on a CPU)."""
        model = self._models[name]
        state = model.optimizer.state.values() if model.steps else ()
        tensors = [value for one in state for value in one.values() if isinstance(value, torch.Tensor)]
        return {
            "weights": sum(_bytes(one) for one in model.named.values()),
            "optimizer": sum(_bytes(one) for one in tensors),
            "peak": torch.cuda.max_memory_allocated() if self.device == "cuda" else 0,
        }

    def leave(self) -> None:
        """The end of the group."""
        self._models.clear()
        with contextlib.suppress(RuntimeError):  # a neighbour has gone already
            distributed.destroy_process_group()


def _own_address() -> str:
    if os.environ.get("WORKBENCH_ADDRESS"):  # who started this worker knows
        return os.environ["WORKBENCH_ADDRESS"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a documentation address; a datagram socket sends nothing to connect
        return str(probe.getsockname()[0])


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())
