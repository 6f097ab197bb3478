"""The Stepper runs one batch through a pipeline a phase at a time: go back, change one thing, run on, compare.

s = Stepper(pipeline, rows.batch(8)).run(until="advantage")
t = s.fork().back(to="reward").replace("reward", other_reward).run(until="advantage")
s.compare(t)

The weights that steppers can go back to are bounded by number and bytes and shared by forks; the price is said before.
"""

from __future__ import annotations

import functools
import inspect
import logging
import shutil
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol
from weakref import WeakSet

import torch

from workbench.agents.stepping import EpisodeStepper, EpisodeTree, only_sequence
from workbench.base import memory
from workbench.base.config import Settings, require, source_of
from workbench.base.errors import DataError, OutOfMemory, PipelineError, VersionMismatch, describe
from workbench.base.memory import estimated, forget_last_error, gib
from workbench.base.metrics import reduce
from workbench.base.progress import working
from workbench.base.shown import Shown
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import unchanged
from workbench.engines.local_engine.memory import memory_errors
from workbench.engines.protocol import Estimates, Late, Learner, Losable, Snapshot, SnapshotCost, Stateful
from workbench.stages.episodes import EpisodeRollout
from workbench.stages.pipeline import Pipeline
from workbench.stages.reward import Reward
from workbench.stages.stage import Stage, used
from workbench.steps.compare import Comparison, compare
from workbench.steps.trace import Phase, Trace, describe_settings, perform
from workbench.steps.what_if import WhatIf, update_with, what_if

log = logging.getLogger("workbench")


_STATE = "the size of a kept state"
_SMALL = 1 << 30
"""Largest state in bytes that `snapshots="auto"` copies to the disk for FSDP ranks; for a larger one the updates are
repeated."""


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings(Settings):
    """Where a stepper keeps the weights from before its updates, and how many of these states."""

    snapshots: Literal["auto", "memory", "disk", "replay"] = "auto"
    """`memory`; `disk`, a file in `snapshot_folder`; `replay`: the updates since an earlier state are done again; or `auto`:
    `memory` where `keep_snapshots` whole states fit into a quarter of the free memory, else `disk` where they fit into a quarter
    of what is free there, else `replay` (of FSDP ranks: up to 1 GiB each on the disk, else `replay`)."""
    keep_snapshots: int = 4
    """Most states that are kept of each learner; beyond that the oldest is dropped."""
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
    """What keeping a learner's present state costs and how much room there is, in memory, disk space or updates to
    repeat; as text, a phrase for a message."""

    kind: str
    cost: SnapshotCost
    free: SnapshotCost

    @property
    def fits(self) -> bool:
        """Whether there is room for the state."""
        return self.cost.memory <= self.free.memory and self.cost.disk <= self.free.disk

    def __bool__(self) -> bool:
        return any(self.cost[:3])

    def __str__(self) -> str:
        costs = [f"{gib(self.cost.memory)} of {gib(self.free.memory)} free"] if self.cost.memory else []
        if self.cost.disk:
            costs.append(f"{gib(self.cost.disk)} of {gib(self.free.disk)} free on the disk of {self.cost.folder}")
        if (count := self.cost.updates) or not costs:
            costs.append(f"no copy: going back does {count} update{'s' * (count != 1)} again")
        return " and ".join(costs)


class Holder(Protocol):
    """Protocol of objects that can go back to kept states: a stepper, or a fork of it."""

    def wanted_states(self) -> set[str]:
        """Return the `state_id` of each state that it can still go back to."""


class Snapshots:
    """Keeps the last few states of each learner, from which a stepper and its forks restore their own weights.

    All forks of a stepper share the learners; each fork remembers the `state_id` of its own weights. Before a stage runs,
    `align` restores those weights into the engine, or raises if they are no longer kept. A state that no fork can go back
    to is dropped.
    """

    def __init__(self, settings: SnapshotSettings | None = None) -> None:
        self._settings = settings or SnapshotSettings()
        self._held: dict[int, OrderedDict[str, Snapshot]] = {}
        self._holders: WeakSet[Holder] = WeakSet()
        self._lent: list[set[str]] = []
        self._kinds: dict[int, str] = {}

    def shared_with(self, holder: Holder) -> None:
        """Register a further stepper that restores its weights from here, so that its states are kept."""
        self._holders.add(holder)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that all kept states take together; tensors that they share count once."""
        sizes: dict[int, int] = {}
        for one in self._all():
            sizes |= {place: tensor.nbytes for place, tensor in one.tensors().items()}
        return sum(sizes.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk that the files of all kept states take together."""
        sizes: dict[Any, int] = {}
        for one in self._all():
            sizes |= one.on_disk()
        return sum(sizes.values())

    def price(self, learner: Learner, tokens: int = 0) -> Price:
        """Return what keeping the learner's present state would cost; nothing where it is kept already.

        Memory that learning from a batch of `tokens` will need does not count as free. An engine that is not open yet
        is not opened for this.
        """
        if (isinstance(learner, Late) and not learner.opened) or learner.state_id in self._of(learner):
            return Price("", SnapshotCost(), SnapshotCost())
        return self._priced(learner, self._kinds.get(id(learner)) or self._kind(learner, tokens), tokens)

    def take(self, learner: Learner, name: str = "learner", tokens: int = 0) -> None:
        """Keep the learner's present state, unless it is kept already.

        First, states that no stepper can go back to are dropped, and then the oldest ones beyond `keep_snapshots` or
        for which there is no room in memory or on the disk. Raises `OutOfMemory` where the state does not fit even
        then.
        """
        held = self._of(learner)
        if learner.state_id not in held:
            wanted = self._wanted()
            for each in self._held.values():
                for state_id in [one for one in each if one not in wanted]:
                    del each[state_id]
            while len(held) >= self._settings.keep_snapshots:
                held.popitem(last=False)
            held[learner.state_id] = self._take_snapshot(learner, name, tokens)
        held.move_to_end(learner.state_id)

    def align(self, role: str, learner: Learner, state_id: str) -> None:
        """Restore the weights `state_id` into the learner of a role; its present weights are kept first where a fork
        can go back to them.

        The state of a learner whose workers may die (`Losable`) is kept before every phase, and restored after a loss.
        Raises `VersionMismatch` where no kept state has these weights.
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
                "keep_snapshots and snapshot_memory set how many), or open a recorded step of a run: run.stepper(step)"
            )
            what = f"the weights of {role!r} have changed since this stepper used them"
            raise VersionMismatch(what, expected=f"state {state_id}", found=found, do=do)
        wanted = held[state_id]  # `take` may drop it
        with working("restoring the weights", passing=True):
            if not lost and learner.state_id in self._wanted():
                self.take(learner, role)
            learner.restore(wanted)

    @contextmanager
    def lending(self, present: Mapping[str, str]) -> Iterator[None]:
        """Context manager: inside it the states in `present` (role → state_id) are not dropped, so that they can be
        restored afterwards."""
        self._lent.append(set(present.values()))
        try:
            yield
        finally:
            self._lent.pop()

    # --- inside -----------------------------------------------------------------------------

    def _take_snapshot(self, learner: Learner, name: str, tokens: int) -> Snapshot:
        # once for all: a replay begins at a state from which updates were recorded
        kind = self._kinds[id(learner)] = self._kinds.get(id(learner)) or self._kind(learner, tokens)
        folder = self._settings.snapshot_folder
        price = self._priced(learner, kind, tokens)
        purpose = f"keeping the weights of {name!r} (version {learner.version}) takes"
        if not price.fits and folder is not None and price.cost.memory:
            kind = "disk" if kind == "memory" else kind  # a replay begins from a file
            price = self._priced(learner, kind, tokens, folder)
        while not price.fits and (oldest := self._oldest(price)) is not None:
            held, state_id = oldest
            log.warning("%s %s: the oldest kept state is dropped", purpose, price)
            del held[state_id]
            price = self._priced(learner, kind, tokens, price.cost.folder)
        if not price.fits:
            raise _no_room(name, price)
        if price:
            log.info("%s %s", purpose, price)
        with memory_errors(f"keeping the weights of {name!r}", gib(price.cost.memory), "snapshot_memory"):
            return learner.snapshot(kind, price.cost.folder)

    def _kind(self, learner: Any, tokens: int) -> str:
        """Choose the kind of snapshot for this learner: the setting, or what `auto` means for it."""
        chosen = self._settings.snapshots
        if chosen != "auto" or not isinstance(learner, Estimates):
            return "memory" if chosen == "auto" else chosen
        if isinstance(learner, Losable) and learner.lost is not None:  # in processes that may die: on the disk
            return "memory" if estimated(_STATE, learner.checkpoint_bytes, 0) <= _SMALL else "replay"
        whole = estimated(_STATE, learner.checkpoint_bytes, 0) * self._settings.keep_snapshots
        if 4 * whole <= self._free(learner, tokens) + self.nbytes:
            return "memory"
        return "disk" if 4 * whole <= self._free_disk(self._settings.snapshot_folder) else "replay"

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
        """Bytes that a further state may take on the disk of a folder."""
        there = shutil.disk_usage(folder or tempfile.gettempdir())
        free = max(there.free - there.total // 20, 0)
        if self._settings.snapshot_disk is None:
            return free
        return min(free, max(int(self._settings.snapshot_disk * 2**30) - self.disk_bytes, 0))

    def _oldest(self, price: Price) -> tuple[OrderedDict[str, Snapshot], str] | None:
        """Find the least recently used state among those that take memory, or disk space where that is short; returns
        (the learner's states, state_id), or None."""
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


def states(learners: Mapping[str, Any]) -> dict[str, str]:
    """Return each learner's present `state_id`, by role."""
    return {role: learner.state_id for role, learner in learners.items()}


@dataclass(frozen=True)
class StepState:
    """A stepper's state before a phase: each role's weights by `state_id`, and the state of each stage's controllers."""

    weights: dict[str, str]
    controllers: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Done:
    """A phase that has run and may be reused: its stage, the batch it read, and the weights (`state_id`) it used."""

    stage: Stage
    before: DataProto
    weights: tuple[str, ...]
    phase: Phase


class Stepper(Shown):
    """Runs one batch through a pipeline, one phase at a time. Most methods return a stepper, so that calls chain.

    Forks share the engines: before a stage runs, its stepper's own weights are restored. After `back`, a stage whose
    input columns have not changed is not run again, and its outputs are reused: rollout and log-probs after a change of
    reward or estimator.

    Before an update the weights are kept, to go back to. What that takes is shown before, in the repr and the log;
    `stepper.snapshots` lists what is kept. With a local engine, weights still as they were loaded cost nothing, and
    LoRA's adapters little.

    Args:
        pipeline: a `Pipeline`, or a list of stages, of which the first may read any column of the batch: a batch that was made
            by hand is stepped without a model by `Stepper([Advantage(functional.grpo)], batch)`.
        batch: the prompts of one step: `rows.batch(8)`.
        settings: of `SnapshotSettings`. `snapshots`: where weights are kept: `"memory"`, `"disk"`, or `"replay"` (the updates
            since an earlier state are done again, bit for bit: no copies, but the time of those updates); by default copies
            of what is small beside the free memory, and replay of the rest. `keep_snapshots=4`: most states of a learner;
            `snapshot_memory`, `snapshot_disk`: most GiB of all of them; `snapshot_folder`: where those on disk go.

    Raises `OutOfMemory` before an update whose weights cannot be kept.
    """

    elsewhere: ClassVar = {
        "samples": "show them: wb.views.samples(stepper.trace)",
        "tokens": "show a row's: wb.views.tokens(stepper.trace, row)",
        "metrics": "read stepper.trace.metrics",
        "undo": "go back: stepper.back()",
        "diff": "compare two: stepper.compare(other)",
        "step": "run the next phase: stepper.next()",
        "stages": "read stepper.pipeline",
    }

    _keeper: type[Snapshots] = Snapshots

    def __init__(self, pipeline: Pipeline | Sequence[Stage], batch: DataProto, **settings: Any) -> None:
        if not isinstance(batch, DataProto):
            do = "take one of rows: wb.rows(…).batch(8)"
            raise DataError("batch of a stepper", expected="a DataProto", found=describe(batch), do=do)
        if not isinstance(pipeline, Iterable):
            expected, do = "a Pipeline, or a list of stages", "make it: wb.recipes.grpo(engine, …)"
            raise PipelineError("pipeline of a stepper", expected=expected, found=describe(pipeline), do=do)
        self._pipeline = pipeline if isinstance(pipeline, Pipeline) else Pipeline(pipeline, given=batch.columns)
        self._pipeline.check(batch)
        self._trace = Trace(batch)
        self._snapshots = self._keeper(SnapshotSettings.from_parameters(settings))
        self._snapshots.shared_with(self)
        self._standings = [self._standing()]
        self._done: dict[str, Done] = {}

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline with all replacements so far, which `train` can run."""
        return self._pipeline

    @property
    def trace(self) -> Trace:
        """The record of the phases that have run, in order: batch, metrics and seconds after each."""
        return self._trace

    @property
    def batch(self) -> DataProto:
        """The batch after the last phase that has run."""
        return self._trace.batch

    @property
    def position(self) -> int:
        """How many phases have run."""
        return len(self._trace)

    @property
    def next_stage(self) -> str | None:
        """The stage that `next` will run; None after the last."""
        return self._pipeline.names[self.position] if self.position < len(self._pipeline) else None

    @property
    def snapshots(self) -> Snapshots:
        """The weights that this stepper and its forks can go back to, and what they take."""
        return self._snapshots

    def wanted_states(self) -> set[str]:
        """Return the `state_id` of all weights that this stepper can go back to."""
        return {state for standing in self._standings for state in standing.weights.values()}

    def prices(self) -> dict[str, Price]:
        """Return what keeping the weights before the next phase would cost, by role; empty where that phase is no
        update."""
        stage = self._pipeline[self.position] if self.next_stage is not None else None
        updated = stage.learners() if stage is not None and stage.updates else ()
        roles = self._pipeline.learners().items()
        return {
            role: self._snapshots.price(one, self._tokens())
            for role, one in roles
            if any(one is each for each in updated)
        }

    # --- forwards -------------------------------------------------------------------------

    def next(self) -> Stepper:
        """Run the next phase. Raises `PipelineError` where all phases have run."""
        if self.next_stage is None:
            found = f"all {len(self._pipeline)} phases have run"
            do = "go back with back(to=…), or make a Stepper of the next batch: rows.batch(n, step=2)"
            raise PipelineError("no next phase: this step is over", found=found, do=do)
        stage = self._pipeline[self.position]
        forget_last_error()  # an interrupted cell holds its locals, until here
        self._align()
        gradients = torch.is_grad_enabled()
        try:
            if (phase := self._reusable(stage)) is None:
                for learner in stage.learners() if stage.updates else ():
                    with working("keeping the weights"):
                        self._snapshots.take(learner, stage.name.removeprefix("update_"), self._tokens())
                phase = perform(stage, self.batch)
                if not stage.updates:
                    self._done[stage.name] = Done(stage, self.batch, self._weights(stage), phase)
            trace, standings = self._trace.add(phase), [*self._standings, self._standing()]
            # one statement without a call: an interrupt comes before both or after both
            self._trace, self._standings = trace, standings
        except BaseException:
            torch.set_grad_enabled(gradients)  # an interrupt at the end of a `no_grad` leaves them off
            # an update that stopped half-way has changed weights and controllers; workers that died are started again
            # when they are needed, not while their error waits to be raised
            self._align(lost=False)
            raise
        return self

    def run(self, until: str | None = None) -> Stepper:
        """Run the next phases up to and including `until`; without it, to the end of the step."""
        last = len(self._pipeline) if until is None else self._pipeline.index(until) + 1
        with working("step", max(last - self.position, 0), "phases") as work:
            while self.position < last:
                self.next()
                work.passed(1)
        return self

    def from_trace(self, trace: Trace) -> Stepper:
        """Continue from a trace of this batch whose phases ran elsewhere (rows that were sampled one step ahead).

        After `back` they are reused, as if this stepper had run them. Raises `PipelineError` for phases of other stages.
        """
        if trace.names != self._pipeline.names[: len(trace)]:
            expected, found = (", ".join(names) for names in (self._pipeline.names, trace.names))
            raise PipelineError("from_trace got phases of another pipeline", expected=expected, found=found)
        for stage, phase in zip(self._pipeline, trace, strict=False):
            self._done[stage.name] = Done(stage, trace.before(stage.name), self._weights(stage), phase)
        self._trace, self._standings = trace, [self._standings[0]] * (len(trace) + 1)
        return self

    # --- backwards ------------------------------------------------------------------------

    def back(self, to: str | None = None) -> Stepper:
        """Go back to before the phase `to` (without it: before the last one that ran).

        Weights, optimizer and controllers are restored to that moment. Raises `PipelineError` where `to` has not run yet.
        """
        position = self._pipeline.index(to) if to is not None else self.position - 1
        if not 0 <= position <= self.position:
            what, ran = f"cannot go back to {to or 'an earlier phase'}", ", ".join(self._trace.names) or "none has run"
            raise PipelineError(what, expected=f"a phase that has run ({ran})", do="use run(until=…) to go forwards")
        self._stand(position)
        self._align()
        return self

    def _stand(self, position: int) -> None:
        self._trace = self._trace.first(position)
        self._standings = self._standings[: position + 1]

    # --- what if --------------------------------------------------------------------------

    def replace(self, name: str, other: Any = None, **settings: Any) -> Stepper:
        """Replace a stage that has not run yet by another one, or give it another function or other settings.

        `s.back(to="reward").replace("reward", mine)`, `s.back().replace("advantage", kl_type="k3")`,
        `s.replace("update_actor", clip_ratio_high=0.28)`, `s.back(to="rollout").replace("rollout", temperature=0.7)`.

        Raises `PipelineError` where that phase has run already: go back first.
        """
        position = self._pipeline.index(name)
        if position < self.position:
            raise PipelineError(f"phase {name!r} has run already", do=f"back(to={name!r}).replace({name!r}, …)")
        self._pipeline = self._pipeline.with_stage(name, other, **settings)
        self._pipeline.check(self._trace.start)
        return self

    def fork(self) -> Stepper:
        """Make another stepper at the same position, which shares the batch, the weights and the snapshots."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._standings = list(self._standings)
        twin._done = dict(self._done)
        self._snapshots.shared_with(twin)
        return twin

    def compare(self, other: Stepper | Trace) -> Comparison:
        """Compare this step with another: columns and metrics that differ, and the rows that changed most."""
        return compare(self._trace, other.trace if isinstance(other, Stepper) else other)

    def what_if(self, *, updates: int = 4, probe: Any = None, **changes: Any) -> WhatIf:
        """Compare the update on this batch with one under another loss, advantage estimator, set of rows or mask.

        `s.what_if(clip_ratio_high=0.28, updates=4, probe=eval_rows)`: see `workbench.what_if` for what can be changed.
        Both start from the weights before the update. Afterwards the engines have their weights back, and the stepper
        has not moved.
        """
        update_with(self._pipeline, changes)
        with self._lent():
            if self.position > self._pipeline.index("update_actor"):
                return self.fork().back(to="update_actor").what_if(updates=updates, probe=probe, **changes)
            self._align()
            return what_if(self._pipeline, self.batch, updates=updates, probe=probe, **changes)

    # --- episodes -------------------------------------------------------------------------

    def episode(self, row: int) -> EpisodeStepper:
        """Return an `EpisodeStepper` on one row's episode, to run its turns, go back, or write a turn by hand.

        After the rollout it stands at the end of the sampled episode, before the rollout at the first turn. This stepper
        stays where it is; model turns are sampled with the rollout's weights, and the present ones are restored afterwards.
        Raises `PipelineError` where the rollout has no agent, and `IndexError` where the batch has no such row.
        """
        stage, fork = self._agents(), self.fork()
        if stage.name not in self._trace.names:
            return stage.episode(self.batch, row, lent=fork._lent)
        fork._stand(self._pipeline.index(stage.name))
        return stage.episode(fork.batch, row, recorded=self._trace[stage.name].batch, lent=fork._lent)

    def with_episodes(self, *episodes: EpisodeStepper) -> Stepper:
        """Return a fork, standing after the rollout, in which these episodes replace the sampled ones of their rows.

        An episode with more or fewer sequences than before moves the rows behind it. `t =
        s.with_episodes(s.episode(3).replace(1, "41").run()).run(); s.compare(t)`. Raises `PipelineError` before the
        rollout, for an episode that is not over, and for one of another batch.
        """
        stage = self._agents()
        if stage.name not in self._trace.names:
            raise PipelineError("no episodes yet: the rollout has not run", do=f"run(until={stage.name!r}) first")
        phase, before = self._trace[stage.name], self._trace.before(stage.name)
        numbers = [episode.number for episode in episodes if isinstance(episode, EpisodeStepper)]
        if len(set(numbers)) < len(episodes):
            expected = "episodes as s.episode(row) returns them, at most one for each row (or episode)"
            raise PipelineError("arguments of with_episodes", expected=expected, found=episodes)
        for episode in episodes:
            what = f"the episode of row {episode.row}"
            if episode.next_role is not None:
                raise PipelineError(f"{what} is not over", found=f"{episode.next_role} turn next", do="run() it first")
            if episode.row >= len(phase.batch) or episode.uid != phase.batch["uid"][episode.row]:
                raise PipelineError(f"{what} is of another batch", do=f"use this stepper's episode({episode.row})")
        outcome = stage.rewritten(before, phase.batch, {episode.number: episode.outputs for episode in episodes})
        settings = {**phase.settings, "edited_rows": ", ".join(str(episode.row) for episode in episodes)}
        metrics = {**phase.metrics, **reduce([outcome.metrics])}
        changed = replace(phase, batch=outcome.batch, metrics=metrics, settings=settings, rows=outcome.rows)
        position = self._trace.names.index(stage.name)
        return self.fork().back(to=stage.name).from_trace(self._trace.first(position).add(changed))

    def branch(
        self,
        row: int | EpisodeStepper,
        turn: int | None = None,
        n: int = 8,
        *,
        turns: Sequence[int] | str = (),
        reward: Any = None,
    ) -> EpisodeTree:
        """Draw `n` continuations of an episode from a turn, or from each of several, score them, and return the `EpisodeTree`.

        How much did that call help? `s.branch(3, turns="all").credit()` has the value before and after each turn of row 3's
        episode, and the difference, with standard errors. Turn `turn` is the first that is drawn again, with other seeds; at a
        tool's or user's turn these answer once more and the model's next turn is the first. Turns before are shared; tools are
        brought to their state by the earlier calls. This stepper stays where it is.

        Args:
            row: number of the row in the rollout's output, or an episode that `episode` returned, run to its end.
            turn: number of the turn; None: the first, unless `turns` are given.
            n: continuations of each turn.
            turns: several turns, or `"all"`: every turn of the model.
            reward: scores the continuations; None: the pipeline's reward. Rows that it cannot score leave the means.

        Raises `PipelineError` where the rollout has no agent or a turn is not there, `SettingError` for an agent that cannot be
        stepped.

        Example:
            >>> s.branch(0, turn=2, n=8)  # doctest: +SKIP
        """
        recorded = row if isinstance(row, EpisodeStepper) else self.episode(row)
        if recorded.next_role is not None:
            if recorded is row:
                what, found = "this episode is not over", f"{recorded.next_role} turn next"
                raise PipelineError(what, found=found, do="run() it first")
            recorded.run()
        model = [place for place, number in enumerate(recorded.turns) if number.role == "assistant"]
        if isinstance(turns, str):
            require(turns == "all", "turns", expected="numbers of turns, or 'all'", found=turns)
            turns = model
        chosen = [*turns, *([turn] if turn is not None else [])] or [0]
        drawn = {number: recorded.branch(number, n) for number in dict.fromkeys(chosen)}
        outputs = [
            (only_sequence(number.outputs),)
            for number in (recorded, *(number for place in sorted(drawn) for number in drawn[place]))
        ]
        stage = self._pipeline["reward"] if reward is None else Reward(reward)
        return EpisodeTree.of(recorded, drawn, stage(recorded.batch_of(outputs)).batch)

    def _agents(self) -> EpisodeRollout:
        for stage in self._pipeline:
            if isinstance(stage, EpisodeRollout):
                return stage
        found, do = None, "pass agent=… to the recipe that makes the pipeline"
        for stage in self._pipeline:
            if "turns" in stage.writes:
                found = f"recorded episodes of stage {stage.name!r}, whose agent is not in this process"
                do = f"give the agent: back(to={stage.name!r}).replace({stage.name!r}, agent=…)"
        what = "this pipeline has no episodes that can be stepped"
        raise PipelineError(what, expected="a rollout with an agent", found=found, do=do)

    # --- inside ---------------------------------------------------------------------------

    def _tokens(self) -> int:
        """Number of tokens of the batch, padding included; 0 before there are any."""
        return int(self.batch["input_ids"].numel()) if "input_ids" in self.batch else 0

    def _standing(self) -> StepState:
        return StepState(states(self._pipeline.learners()), self._pipeline.state())

    def _align(self, *, lost: bool = True) -> None:
        """Restore the weights and controllers of the present position; with `lost=False`, learners whose workers died
        are left out."""
        standing = self._standings[-1]
        for role, learner in self._pipeline.learners().items():
            if role in standing.weights and (lost or not (isinstance(learner, Losable) and learner.lost)):
                self._snapshots.align(role, learner, standing.weights[role])
        for name, values in standing.controllers.items():
            if self._pipeline[name].state().keys() == values.keys():
                self._pipeline[name].load_state(values)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Context manager: inside it the engines have the weights of this position; afterwards those that they had
        before."""
        learners = self._pipeline.learners()
        present = states(learners)
        with self._snapshots.lending(present):
            try:
                for role, state in self._standings[-1].weights.items():
                    self._snapshots.align(role, learners[role], state)
                yield
            finally:
                for role, state in present.items():
                    self._snapshots.align(role, learners[role], state)

    @staticmethod
    def _weights(stage: Stage) -> tuple[str, ...]:
        return tuple(one.state_id if isinstance(one, Stateful) else "" for one in stage.learners())

    def _reusable(self, stage: Stage) -> Phase | None:
        """Return the phase that running the stage again would give, if nothing that the stage reads has changed since
        it last ran; else None.

        A stage with a controller is always run, because the controller must see the batch.
        """
        done = self._done.get(stage.name)
        if done is None or done.stage is not stage or stage.state() or done.weights != self._weights(stage):
            return None
        if done.phase.source != describe_settings(stage)[1]:  # a helper that it calls was defined anew
            return None
        if not all(
            unchanged(name, done.before, self.batch) for name in {*used(stage, done.before), *used(stage, self.batch)}
        ):
            return None
        batch = done.phase.batch if done.phase.rows is not None else done.phase.written_into(self.batch)
        return replace(done.phase, batch=batch, seconds=0.0, reused=True)


# --- cells that have changed since -----------------------------------------------------------------

_DEPTH = 5


def outdated(pipeline: Pipeline) -> list[str]:
    """List, as sentences, the stages made with a function or class that a notebook cell has redefined since.

    Checked are each stage's class and the functions and objects among its settings, down into rewards and their parts.
    A cell that was run again unchanged, or whose name is gone, is not reported.
    """
    warnings = []
    for stage in pipeline:
        if _redefined(type(stage)):
            name = type(stage).__qualname__
            do = f"make a new {name}(…) and replace({stage.name!r}, …) with it"
            warnings.append(f"{stage.name} is of an earlier definition of {name}: {do}")
        settings = tuple(stage.settings().values())
        # a function that the stage is built around can replace it; a part of something needs that made anew
        around = list(_within(settings, 3))
        for one in filter(_redefined, _within(settings, _DEPTH + 1)):
            name = one.__qualname__
            by = name if inspect.isfunction(one) and any(each is one for each in around) else "…"
            do = f"replace({stage.name!r}, {by}) uses the new one"
            warnings.append(f"{stage.name} was made with an earlier definition of {name}: {do}")
    return list(dict.fromkeys(warnings))


def _within(value: Any, depth: int) -> Iterator[Any]:
    """Yield the functions and classes of `__main__` inside a value, down to `depth`: itself, what a partial or a method
    holds, members, attributes."""
    if depth == 0 or value is None or isinstance(value, str | int | float):
        return
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        for one in _inner(value):
            yield from _within(one, depth - 1)
    elif value.__module__ == "__main__":
        yield value


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if inspect.ismethod(value):
        return (value.__self__,)
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    kind = type(value)
    own = kind.__module__ == "__main__"
    members = getattr(value, "__dict__", {}).values() if own or kind.__module__.startswith("workbench.") else ()
    return *((kind,) * own), *members


def _redefined(held: Any) -> bool:
    """Whether `__main__` now has another definition, with another source text, under this function's or class's name."""
    if held.__module__ != "__main__":
        return False
    now: Any = sys.modules["__main__"]
    for part in held.__qualname__.split("."):
        now = getattr(now, part, None)  # one that was local to a function has no name to be found by
    if now is None or now is held:
        return False
    # a decorator of ours may have put an object around it: what counts is the function inside
    named = [candidate for candidate in _within(now, _DEPTH) if candidate.__qualname__ == held.__qualname__]
    if not named or any(candidate is held for candidate in named):
        return False
    text = source_of(held)
    return text is None or all(source_of(candidate) != text for candidate in named)
