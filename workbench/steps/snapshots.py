"""Keeps the weights that steppers can go back to: bounded by number and bytes, shared by forks, each with its price said before."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from weakref import WeakSet

from workbench.base import memory
from workbench.base.config import Settings, require
from workbench.base.errors import OutOfMemory, VersionMismatch
from workbench.base.memory import gib
from workbench.engines.protocol import Estimates, Late, Learner, Losable, Snapshot

log = logging.getLogger("workbench")


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings(Settings):
    """Where a stepper keeps the weights of before its updates, and how many."""

    snapshots: Literal["memory", "disk", "replay"] = "memory"
    """`memory`; `disk`, a file in `snapshot_folder`; or `replay`: the updates since an earlier state are done again."""
    keep_snapshots: int = 4
    """Most states kept of each learner; beyond it the oldest is dropped."""
    snapshot_memory: float | None = None
    """GiB that all kept states may take in memory; None: what is free beyond what learning will need."""
    snapshot_folder: str | None = None
    """Folder for states on disk; None: the system's for temporary files. Where it is given, `memory` goes there when full."""

    def __post_init__(self) -> None:
        require(self.keep_snapshots >= 1, "keep_snapshots", expected="≥ 1", found=self.keep_snapshots)
        limit = self.snapshot_memory
        require(limit is None or limit >= 0, "snapshot_memory", expected="GiB ≥ 0, or None", found=limit)


class Holder(Protocol):
    """Protocol of who can go back to kept states: a stepper or a fork of it."""

    def wanted_states(self) -> set[str]:
        """The `state_id` of each state that it can still go back to."""


class Snapshots:
    """Keeps the last few states of each learner, from which a stepper and its forks restore their own weights.

    All forks of a stepper share the learners; each fork remembers the `state_id` of its own weights. Before a stage runs,
    `align` restores those weights into the engine, or raises. States that no stepper can go back to are dropped.
    """

    def __init__(self, settings: SnapshotSettings | None = None) -> None:
        self._settings = settings or SnapshotSettings()
        self._held: dict[int, OrderedDict[str, Snapshot]] = {}
        self._holders: WeakSet[Holder] = WeakSet()
        self._lent: list[set[str]] = []

    def shared_with(self, holder: Holder) -> None:
        """A further stepper restores its weights from here."""
        self._holders.add(holder)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all kept states take together; what they share is counted once."""
        found: dict[int, int] = {}
        for one in self._all():
            found |= {place: tensor.nbytes for place, tensor in one.tensors().items()}
        return sum(found.values())

    def price(self, learner: Learner, tokens: int = 0) -> tuple[int, int]:
        """(bytes of memory that the learner's present state would take, bytes that it may take); (0, …) where it is kept.

        What learning from a batch of `tokens` will need is not free. An engine that is not open yet is not opened for this.
        """
        if (isinstance(learner, Late) and not learner.opened) or not isinstance(learner, Estimates):
            return 0, self._free(None, tokens)
        need = 0 if learner.state_id in self._of(learner) else learner.snapshot_bytes(self._settings.snapshots)
        # what takes nothing needs no estimate, for which a learner in other processes would have to start them
        return need, self._free(learner if need else None, tokens)

    def take(self, learner: Learner, name: str = "learner", tokens: int = 0) -> None:
        """Keep the learner's present state, unless it is kept already.

        Before it is taken the states that nobody can go back to are dropped, and the oldest beyond `keep_snapshots`, or where
        it would not fit into memory. Raises `OutOfMemory` where it does not fit then and there is no `snapshot_folder`.
        """
        held = self._of(learner)
        if learner.state_id not in held:
            wanted = self._wanted()
            for each in self._held.values():
                for state_id in [one for one in each if one not in wanted]:
                    del each[state_id]
            while len(held) >= self._settings.keep_snapshots:
                held.popitem(last=False)
            held[learner.state_id] = self._taken(learner, name, tokens)
        held.move_to_end(learner.state_id)

    def align(self, role: str, learner: Learner, state_id: str) -> None:
        """Restore the weights `state_id` into the learner of a role; its present ones are kept where a fork can go back to them.

        A learner whose workers can be `lost` is kept before every phase, and restored after a loss. Raises
        `VersionMismatch` where no kept state has these weights.
        """
        lost = learner.lost if isinstance(learner, Losable) else None
        if learner.state_id == state_id and not lost:
            if lost is not None:
                self.take(learner, role)
            return
        held = self._of(learner)
        if state_id not in held:
            found = f"state {learner.state_id} (version {learner.version}), and no snapshot of the expected one"
            last = self._settings.keep_snapshots
            do = (
                f"make a Stepper of a new batch (it keeps the last {last} states of its own updates, none of training; "
            )
            do += (
                "keep_snapshots and snapshot_memory set how many), or open a recorded step of a run: run.stepper(step)"
            )
            what = f"the weights of {role!r} have moved on since this stepper used them"
            raise VersionMismatch(what, expected=f"state {state_id}", found=found, do=do)
        wanted = held[state_id]  # `take` may drop it
        if not lost and learner.state_id in self._wanted():
            self.take(learner, role)
        learner.restore(wanted)

    @contextmanager
    def lending(self, present: Mapping[str, str]) -> Iterator[None]:
        """Context manager: inside it the states of `present` (role → state_id) are kept, for whoever they are lent back to."""
        self._lent.append(set(present.values()))
        try:
            yield
        finally:
            self._lent.pop()

    # --- inside -----------------------------------------------------------------------------

    def _taken(self, learner: Learner, name: str, tokens: int) -> Snapshot:
        kind, folder = self._settings.snapshots, self._settings.snapshot_folder
        need, free = self.price(learner, tokens)
        said = f"keeping the weights of {name!r} (version {learner.version}) takes {gib(need)} of {gib(free)} free"
        while need > free and folder is None and (oldest := self._oldest()) is not None:
            held, state_id = oldest
            log.warning("%s: the oldest kept state is dropped", said)
            del held[state_id]
            free = self._free(learner, tokens)
        if need > free and folder is None:
            expected, do = (
                f"at most {gib(free)}",
                "make the Stepper with snapshots='disk' or 'replay', or snapshot_folder=…",
            )
            raise OutOfMemory(f"no room to keep the weights of {name!r}", expected=expected, found=gib(need), do=do)
        if need:
            log.info("%s%s", said, f": they go to {folder}" if need > free else "")
        if need > free and kind == "memory":
            kind = "disk"
        return learner.snapshot(kind, folder if kind == "disk" or need > free else None)

    def _free(self, learner: Any, tokens: int) -> int:
        """Bytes that a further state may take in memory."""
        if self._settings.snapshot_memory is not None:
            return max(int(self._settings.snapshot_memory * 2**30) - self.nbytes, 0)
        if not isinstance(learner, Estimates):
            return memory.available()
        device, parts = learner.memory_needed(tokens)
        return max(memory.available() - (sum(parts.values()) if device.type == "cpu" else 0), 0)

    def _oldest(self) -> tuple[OrderedDict[str, Snapshot], str] | None:
        """The state in memory that was used least lately, and of which learner."""
        found = ((held, state_id) for held in self._held.values() for state_id, one in held.items() if one.nbytes)
        return next(found, None)

    def _of(self, learner: Any) -> OrderedDict[str, Snapshot]:
        return self._held.setdefault(id(learner), OrderedDict())

    def _all(self) -> list[Snapshot]:
        return [one for held in self._held.values() for one in held.values()]

    def _wanted(self) -> set[str]:
        return set().union(*self._lent, *(holder.wanted_states() for holder in self._holders))

    def __repr__(self) -> str:
        kept = self._all()
        lines = [f"version {one.version}: {one.kind}, {gib(one.nbytes)}" for one in kept]
        return "\n".join([f"{len(kept)} kept states, {gib(self.nbytes)} of memory", *lines])
