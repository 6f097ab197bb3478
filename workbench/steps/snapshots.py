"""Keeps the weights that steppers can go back to: bounded by number and bytes, shared by forks, each with its price said before."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from weakref import WeakSet

from workbench.base import memory
from workbench.base.config import Settings, require
from workbench.base.errors import OutOfMemory, VersionMismatch
from workbench.base.memory import estimated, gib
from workbench.engines.local_engine.memory import memory_errors
from workbench.engines.protocol import Estimates, Late, Learner, Losable, Snapshot, SnapshotCost

log = logging.getLogger("workbench")


_STATE = "the size of a kept state"
_SMALL = 1 << 30
"""Bytes of a state that is copied to the disk without being asked for; the updates that lead to a larger one are done again."""


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings(Settings):
    """Where a stepper keeps the weights of before its updates, and how many."""

    snapshots: Literal["auto", "memory", "disk", "replay"] = "auto"
    """`memory`; `disk`, a file in `snapshot_folder`; `replay`: the updates since an earlier state are done again; or `auto`: copies
    where `keep_snapshots` whole states fit into half of the free memory (of FSDP ranks: up to 1 GiB each, on the disk), else
    `replay`."""
    keep_snapshots: int = 4
    """Most states kept of each learner; beyond it the oldest is dropped."""
    snapshot_memory: float | None = None
    """GiB that all kept states may take in memory; None: what is free beyond what learning will need."""
    snapshot_disk: float | None = None
    """GiB that all kept states may take on the disk; None: what is free there but for a twentieth of the disk."""
    snapshot_folder: str | None = None
    """Folder for states on disk; None: the system's for temporary files. Where it is given, `memory` goes there when full. FSDP
    ranks have a `scratch` folder of their own."""

    def __post_init__(self) -> None:
        require(self.keep_snapshots >= 1, "keep_snapshots", expected="≥ 1", found=self.keep_snapshots)
        for name in ("snapshot_memory", "snapshot_disk"):
            limit = getattr(self, name)
            require(limit is None or limit >= 0, name, expected="GiB ≥ 0, or None", found=limit)


@dataclass(frozen=True)
class Price:
    """What keeping a learner's present state takes, and what it may take; as text a phrase of a sentence."""

    kind: str
    cost: SnapshotCost
    free: SnapshotCost

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.cost.memory <= self.free.memory and self.cost.disk <= self.free.disk

    def __bool__(self) -> bool:
        return any(self.cost[:3])

    def __str__(self) -> str:
        told = [f"{gib(self.cost.memory)} of {gib(self.free.memory)} free"] if self.cost.memory else []
        if self.cost.disk:
            told.append(f"{gib(self.cost.disk)} of {gib(self.free.disk)} free on the disk of {self.cost.folder}")
        if (count := self.cost.updates) or not told:
            told.append(f"no copy: going back does {count} update{'s' * (count != 1)} again")
        return " and ".join(told)


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
        self._kinds: dict[int, str] = {}

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

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files of all kept states together."""
        found: dict[Any, int] = {}
        for one in self._all():
            found |= one.on_disk()
        return sum(found.values())

    def price(self, learner: Learner, tokens: int = 0) -> Price:
        """What keeping the learner's present state would take; nothing where it is kept.

        What learning from a batch of `tokens` will need is not free. An engine that is not open yet is not opened for this.
        """
        if (isinstance(learner, Late) and not learner.opened) or learner.state_id in self._of(learner):
            return Price("", SnapshotCost(), SnapshotCost())
        return self._priced(learner, self._kinds.get(id(learner)) or self._kind(learner, tokens), tokens)

    def take(self, learner: Learner, name: str = "learner", tokens: int = 0) -> None:
        """Keep the learner's present state, unless it is kept already.

        Before it is taken the states that nobody can go back to are dropped, and the oldest beyond `keep_snapshots`, or where
        it would not fit into memory or on the disk. Raises `OutOfMemory` where it does not fit then.
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
        # once for all: a replay begins at a state from which updates were recorded
        kind = self._kinds[id(learner)] = self._kinds.get(id(learner)) or self._kind(learner, tokens)
        folder = self._settings.snapshot_folder
        price = self._priced(learner, kind, tokens)
        said = f"keeping the weights of {name!r} (version {learner.version}) takes"
        if not price.fits and folder is not None and price.cost.memory:
            kind = "disk" if kind == "memory" else kind  # a replay begins from a file
            price = self._priced(learner, kind, tokens, folder)
        while not price.fits and (oldest := self._oldest(price)) is not None:
            held, state_id = oldest
            log.warning("%s %s: the oldest kept state is dropped", said, price)
            del held[state_id]
            price = self._priced(learner, kind, tokens, price.cost.folder)
        if not price.fits:
            raise _no_room(name, price)
        if price:
            log.info("%s %s", said, price)
        with memory_errors(f"keeping the weights of {name!r}", gib(price.cost.memory), "snapshot_memory"):
            return learner.snapshot(kind, price.cost.folder)

    def _kind(self, learner: Any, tokens: int) -> str:
        """What `auto` means for this learner."""
        chosen = self._settings.snapshots
        if chosen != "auto" or not isinstance(learner, Estimates):
            return "memory" if chosen == "auto" else chosen
        if isinstance(learner, Losable) and learner.lost is not None:  # in processes that may die: on the disk
            return "memory" if estimated(_STATE, learner.checkpoint_bytes, 0) <= _SMALL else "replay"
        whole = estimated(_STATE, learner.checkpoint_bytes, 0) * self._settings.keep_snapshots
        return "memory" if 2 * whole <= self._free(learner, tokens) + self.nbytes else "replay"

    def _priced(self, learner: Any, kind: str, tokens: int, folder: str | None = None) -> Price:
        if not isinstance(learner, Estimates):
            return Price(kind, SnapshotCost(), SnapshotCost())
        cost = estimated(_STATE, lambda: learner.snapshot_cost(kind), SnapshotCost())
        if folder is not None or (cost.disk and cost.folder is None):
            where = cost.folder or folder or self._settings.snapshot_folder or tempfile.gettempdir()
            cost = SnapshotCost(0, cost.memory + cost.disk, cost.updates, where)
        # what takes nothing needs no estimate, for which a learner in other processes would have to start them
        free = self._free(learner, tokens) if cost.memory else 0
        return Price(kind, cost, SnapshotCost(free, self._free_disk(cost.folder) if cost.disk else 0))

    def _free(self, learner: Any, tokens: int) -> int:
        """Bytes that a further state may take in memory."""
        if self._settings.snapshot_memory is not None:
            return max(int(self._settings.snapshot_memory * 2**30) - self.nbytes, 0)
        nowhere: dict[str, int] = {}
        needed = estimated("the memory that learning takes", lambda: learner.memory_needed(tokens), (None, nowhere))
        taken = sum(needed[1].values()) if str(needed[0]) == "cpu" else 0
        return max(memory.available() - taken, 0)

    def _free_disk(self, folder: str | None) -> int:
        """Bytes that a further state may take on the disk."""
        there = shutil.disk_usage(folder or tempfile.gettempdir())
        free = max(there.free - there.total // 20, 0)
        if self._settings.snapshot_disk is None:
            return free
        return min(free, max(int(self._settings.snapshot_disk * 2**30) - self.disk_bytes, 0))

    def _oldest(self, price: Price) -> tuple[OrderedDict[str, Snapshot], str] | None:
        """The state that was used least lately of those which take what is short, and of which learner."""
        short: Callable[[Snapshot], Any] = (
            (lambda one: one.on_disk()) if price.cost.disk > price.free.disk else (lambda one: one.nbytes)
        )
        found = ((held, state_id) for held in self._held.values() for state_id, one in held.items() if short(one))
        return next(found, None)

    def _of(self, learner: Any) -> OrderedDict[str, Snapshot]:
        return self._held.setdefault(id(learner), OrderedDict())

    def _all(self) -> list[Snapshot]:
        return [one for held in self._held.values() for one in held.values()]

    def _wanted(self) -> set[str]:
        return set().union(*self._lent, *(holder.wanted_states() for holder in self._holders))

    def __repr__(self) -> str:
        kept = self._all()
        lines = [
            f"version {one.version}: {one.kind}, {gib(one.nbytes)}"
            + (f", on disk {gib(size)}" if (size := sum(one.on_disk().values())) else "")
            for one in kept
        ]
        disk = f", {gib(self.disk_bytes)} on the disk" if self.disk_bytes else ""
        return "\n".join([f"{len(kept)} kept states, {gib(self.nbytes)} of memory{disk}", *lines])


def _no_room(name: str, price: Price) -> OutOfMemory:
    if price.cost.disk > price.free.disk:
        free, need, where = price.free.disk, price.cost.disk, f" on the disk of {price.cost.folder}"
        do = "free some, set snapshot_disk, or make the Stepper with another snapshot_folder (FSDP: scratch=… of the engine)"
        if price.kind != "replay":
            do = f"make the Stepper with snapshots='replay', or {do}"
    else:
        free, need, where = price.free.memory, price.cost.memory, ""
        do = "make the Stepper with snapshots='disk' or 'replay', or snapshot_folder=…"
        if price.kind == "replay":  # it has to begin somewhere
            do = "make the Stepper with snapshot_folder=…, or snapshots='disk'"
    what = f"no room to keep the weights of {name!r}{where}"
    return OutOfMemory(what, expected=f"at most {gib(free)}", found=gib(need), do=do)
