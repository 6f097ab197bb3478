"""A learner's way back: a state that is held, or the updates since one that is held, done again bit for bit.

Both engines that train have it. What holds a state is the engine's own: tensors in memory or in a file (local), a folder that
all ranks see (FSDP). What updates since then cost is the batches that they learned from.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.base.errors import EngineError
from workbench.dataproto.core import DataProto
from workbench.engines.protocol import Loss, LossCounts, Snapshot, SnapshotCost

MOST_UPDATES = 8
"""Updates that going back does again at most; after so many a state is held anew, so that a way back stays short."""


def new_id() -> str:
    """A unique name for a state of the weights: twelve hex digits."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Learned:
    """An optimizer step that can be taken again: the arguments of `learn`, and the generators' states before it."""

    batch: DataProto
    loss: Loss
    loss_counts: LossCounts
    temperature: float
    rng: tuple[torch.Tensor, ...]
    """Of the CPU, and where the model is on a GPU of this process also of it."""
    settings: Any
    """The engine's: how a mini-batch is cut changes rounding."""


def rng_of(device: torch.device) -> tuple[torch.Tensor, ...]:
    """States of torch's random generators of the CPU and, where it is a GPU, of a device."""
    return torch.get_rng_state(), *((torch.cuda.get_rng_state(device),) if device.type == "cuda" else ())


def set_rng(states: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Set what `rng_of` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


class Replay:
    """A state to go back to by `updates` that lead to it from a held state, `base`."""

    kind = "replay"

    def __init__(self, base: Any, updates: Sequence[Learned], *, version: int, state_id: str) -> None:
        self.base, self.updates, self.version, self.state_id = base, tuple(updates), version, state_id

    @property
    def nbytes(self) -> int:
        """Bytes of this process's memory: of the held state, and the batches of the updates."""
        return sum(one.nbytes for one in self.tensors().values())

    def tensors(self) -> dict[int, torch.Tensor]:
        """The held state's tensors in memory and those of the batches, by address."""
        batches = {one.data_ptr(): one for each in self.updates for one in each.batch.batch.values()}
        return {**batches, **self.base.tensors()}

    def on_disk(self) -> dict[Any, int]:
        """Bytes of the held state's files by a name of each."""
        found: dict[Any, int] = self.base.on_disk()
        return found

    def __getitem__(self, name: str) -> Any:
        """`version`, `state_id`, `steps`; its weights are made by `restore` alone."""
        if name in ("version", "state_id"):
            return getattr(self, name)
        if name == "steps":
            return self.base["steps"] + len(self.updates)
        raise EngineError(f"the {name} of a snapshot by replay", do="restore() it: they are made by its updates")

    def __repr__(self) -> str:
        return f"Replay({self.state_id}, version {self.version}, {len(self.updates)} updates since {self.base!r})"


class Rewinding:
    """Base class of engines that train: `snapshot` and `restore`, and the record of updates between them."""

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
        """Whether updates are recorded: as long as somebody can go back to where they begin, and going back stays short."""
        last = self._latest
        if last is None or len(_updates(last)) + len(self._since or ()) >= MOST_UPDATES:
            self._since = None
        return self._since is not None

    def _record(self, batch: DataProto, loss: Loss, counts: LossCounts, temperature: float, rng: Any) -> None:
        """An optimizer step was taken; without `rng`, the states of before, it is one that is not recorded."""
        if self._since is not None and rng:
            self._since.append(Learned(batch, loss, counts, temperature, rng, self._settings))
        else:
            self._since = None

    def snapshot(self, kind: str = "", folder: str | Path | None = None) -> Any:
        """Return the present weights, optimizer, schedule and version, for `restore`.

        `kind` says where they are held: `memory`; `disk`, a file in `folder`; or `replay`: the updates since the last snapshot
        are recorded instead, and `restore` does them again. Where none is kept, or after eight updates, one is held. Without a
        kind it is the engine's own.
        """
        last = self._latest
        if kind == "replay" and last is not None and self._since is not None:
            base = last.base if isinstance(last, Replay) else last
            named: dict[str, Any] = {"version": self.version, "state_id": self.state_id}
            made: Any = Replay(base, [*_updates(last), *self._since], **named)
        else:
            made = self._hold(kind, folder)
        if kind or self._since is None:  # one that is only looked at ends no record
            self._keep_up(made, recording=kind == "replay")
        return made

    def restore(self, snapshot: Any) -> None:
        """Restore weights, optimizer, schedule and version of a snapshot, bit for bit.

        Raises `EngineError`, with nothing changed, where files that have weights of it were written to since.
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

    def _again(self, one: Learned) -> None:
        self._apply(one.settings)
        device = self._model.device
        with torch.random.fork_rng([device] if len(one.rng) > 1 else []):
            set_rng(one.rng, device)
            self.learn(one.batch, one.loss, one.loss_counts, one.temperature)

    def snapshot_cost(self, kind: str = "memory") -> SnapshotCost:
        """What a snapshot of this kind takes now, at most."""
        if kind == "replay" and self._since is not None and self._latest is not None:
            return SnapshotCost(updates=len(_updates(self._latest)) + len(self._since))
        return self._full_cost(kind)

    def _keep_up(self, snapshot: Snapshot, recording: bool) -> None:
        """The engine is in the state of this snapshot; `recording`: updates from here on are kept as long as it is."""
        base = snapshot.base if isinstance(snapshot, Replay) else snapshot
        free = recording and not base.nbytes and not base.on_disk()
        self._last = (lambda: snapshot) if free else weakref.ref(snapshot)
        self._since = [] if recording else None


def _updates(snapshot: Any) -> tuple[Learned, ...]:
    return snapshot.updates if isinstance(snapshot, Replay) else ()
