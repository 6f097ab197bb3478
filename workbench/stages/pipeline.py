"""An ordered list of stages, checked when it is built: before a model is loaded or a GPU is used."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from workbench.base.distribution import deprecated
from workbench.base.errors import ColumnMissing, PipelineError, RewardError, check_name, describe
from workbench.base.shown import Shown
from workbench.dataproto.columns import COLUMNS, declared, provided
from workbench.dataproto.core import DataProto
from workbench.rewards.base import EPISODE
from workbench.stages.advantage import Advantage
from workbench.stages.filtering import FilterGroups, Resample
from workbench.stages.log_prob import LogProb
from workbench.stages.reward import Reward
from workbench.stages.rollout import Baseline, Rollout
from workbench.stages.stage import BaseStage, FunctionStage, Outcome, Stage
from workbench.stages.update import Update

log = logging.getLogger("workbench")
_WIDE = (Reward, FilterGroups, Resample, Baseline)
"""Stages that see whole rows, or change which rows there are."""


class Pipeline(Shown):
    """The stages of a training step in order: `Pipeline([rollout, reward, …])`. Iterate it, index it by name, print it.

    A class that `wb.stage` made stands for a stage with its default settings.

    Columns of the data set (see `columns.COLUMNS`) exist from the start, and so do those in `given`. A column that is
    declared nowhere must come with the data, which is checked when the first batch arrives.

    Raises `PipelineError` if a stage reads a column that no earlier stage writes, if a stage changes a column that only
    earlier stages read, and if two stages have the same name. `overlap`: see `streaming_rewards`.

    Training skips a log-prob stage (`in_training`) where the update's own pass computes its columns (see `Update`) and
    no stage in between reads or changes them. A `Stepper` runs it all the same, so that its numbers can be looked at;
    the weights in the end are the same.
    """

    elsewhere: ClassVar = {
        "stages": "take list(pipeline), or the names: pipeline.names",
        "run": "step one batch: wb.Stepper(pipeline, rows.batch(8)).run()",
        "train": "call await wb.train(pipeline, rows, steps=…), in a script wb.train_blocking(…)",
    }

    def __init__(
        self, stages: Sequence[Stage | type[FunctionStage]], *, overlap: bool = False, given: Collection[str] = ()
    ) -> None:
        self._stages = tuple(_as_stage("a stage of a pipeline", one) for one in stages)
        self.overlap = overlap
        self.given = frozenset(given)
        """Columns that the batches bring along: a pipeline need not begin with the rollout."""
        names = [stage.name for stage in self._stages]
        doubled = {name for name in names if names.count(name) > 1}
        if doubled:
            found, do = ", ".join(sorted(doubled)), "give each stage a name of its own, or leave one out"
            raise PipelineError("two stages have the same name", found=found, do=do)
        self._check_reads()
        self._check_changes()
        if self.alone:
            log.warning("%s", self.alone)
        self._left = _left_to_update(self._stages)

    @property
    def alone(self) -> str:
        """Why no response can be better than another of its prompt (`group_size` 1 and an estimator of groups); "" where it can."""
        size = next((one.group_size for one in self._stages if isinstance(one, Rollout)), 0)
        lonely = [one.name for one in self._stages if isinstance(one, Advantage) and one.compares_groups]
        if size != 1 or not lonely or any("nodes" in one.writes for one in self._stages):
            return ""
        do = "pass group_size=8, or take recipes.reinforce_plus_plus or ppo, which compare no group"
        return (
            f"group_size=1: {lonely[0]} compares a prompt's responses, and its only one gets 0: nothing is learnt; {do}"
        )

    @property
    def left_out(self) -> str | None:
        """Name of the log-prob stage that training skips because the update computes its columns; None where no stage
        is skipped."""
        return None if self._left is None else self._left[0].name

    def in_training(self) -> list[Stage]:
        """Return the stages as training runs them.

        A log-prob stage whose columns the update computes is replaced by a stand-in, which runs the stage only for a
        batch whose update takes several optimizer steps, or none.
        """
        if self._left is None:
            return list(self._stages)
        return [LeftToUpdate(*self._left) if one is self._left[0] else one for one in self._stages]

    def streaming_rewards(self) -> Pipeline:
        """A copy of the pipeline that, in training jobs, scores finished rows while others are still being sampled.

        Stages that do not read rewards run meanwhile. Results are the same. A `Stepper` still runs the stages one by one.
        """
        return Pipeline(self._stages, overlap=True, given=self.given)

    def _check_reads(self) -> None:
        present = {*self.given, *(column.name for column in COLUMNS.values() if column.writer == "dataset")}
        for position, stage in enumerate(self._stages):
            for column in stage.reads:
                if not provided(column, present):
                    self._refuse_unless_data(column, stage, self._stages[position + 1 :])
            present.update(stage.writes)

    def _check_changes(self) -> None:
        for position, stage in enumerate(self._stages):
            if stage.updates:
                self._check_lost(stage, self._stages[:position])
                continue
            changed = set(stage.writes)
            if not changed or not changed <= set(stage.reads):
                continue
            readers = [other.name for other in self._stages[:position] if changed & set(other.reads)]
            if readers and not any(changed & set(other.reads) for other in self._stages[position + 1 :]):
                what = f"stage {stage.name!r} changes {', '.join(sorted(changed))}, but no later stage reads it"
                do = f"stage {readers[0]!r} reads it earlier: move {stage.name!r} before {readers[0]!r}"
                raise PipelineError(what, do=do)

    @staticmethod
    def _check_lost(update: Stage, before: tuple[Stage, ...]) -> None:
        for stage in before:
            lost = {*stage.writes} & {*update.writes} - {*update.reads, *getattr(update, "optional", ())}
            if lost and not stage.updates:
                what = f"stage {update.name!r} computes {', '.join(sorted(lost))} anew"
                do = "reject tokens in a stage before the update: rollout correction without bypass mode"
                raise PipelineError(what, expected=f"no stage {stage.name!r}, whose values would be lost", do=do)

    def _refuse_unless_data(self, column: str, stage: Stage, later: tuple[Stage, ...]) -> None:
        for other in later:
            if column in other.writes:
                what = f"stage {stage.name!r} reads {column!r}, but no earlier stage writes it"
                raise PipelineError(what, do=f"stage {other.name!r} writes it: move it before {stage.name!r}")
        known = declared(column)
        if column in (*EPISODE, "agent_extra"):
            do = "a rollout with agent=… writes it"
        elif known is not None and known.writer in self.names:
            do = f"change the settings of {known.writer!r}, which does not write it now, or of {stage.name!r}"
        elif known is not None:
            do = f"add the stage {known.writer!r} before {stage.name!r}"
        else:
            return
        raise PipelineError(f"stage {stage.name!r} reads {column!r} but no stage writes it", do=do)

    # --- a sequence of stages -------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    def __getitem__(self, key: int | str) -> Stage:
        return self._stages[self.index(key) if isinstance(key, str) else key]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    @property
    def names(self) -> tuple[str, ...]:
        """Stage names in order."""
        return tuple(stage.name for stage in self._stages)

    def settings(self) -> dict[str, dict[str, Any]]:
        """The settings of every stage, by its name: `pipe.settings()["rollout"]["group_size"]`."""
        return {stage.name: stage.settings() for stage in self._stages}

    @property
    def first(self) -> Stage:
        """The stage that writes the responses: `rollout`, or in supervised training `targets`."""
        writers = (stage for stage in self._stages if "responses" in stage.writes)
        return next(writers, None) or self["rollout"]

    def index(self, name: str) -> int:
        """Return the position of the stage called `name`, from 0. Raises `PipelineError` for an unknown name."""
        check_name("stage of this pipeline", name, self.names, PipelineError)
        return self.names.index(name)

    def with_stage(self, name: str, other: Any = None, **settings: Any) -> Pipeline:
        """Return a copy with one stage changed: `p.with_stage("advantage", my_estimator)`, `p.with_stage("rollout", temperature=0.7)`.

        Where the sampling temperature of the rollout changes, later stages that used the old one get the new one, too.

        Args:
            name: the name of the stage to change.
            other: a stage to put there, or a function (estimator, reward) for the present one; None: neither.
            settings: settings of the stage to change, by name.

        Raises `PipelineError` where nothing is changed, or a setting is unknown.
        """
        position = self.index(name)
        old = self._stages[position]
        if other is None and not settings:
            raise PipelineError(f"with_stage({name!r}) changes nothing", do="give a stage, a function or settings")
        if inspect.isclass(other) and issubclass(other, BaseStage):
            other = _as_stage(f"with_stage({name!r})", other)
        new = old if other is None else other if isinstance(other, Stage) else old.with_function(other)
        new = new.with_settings(**settings) if settings else new
        if new.name != old.name:
            raise PipelineError(f"stage {old.name!r} can only be replaced by a stage of its name", found=repr(new.name))
        later = [_at_new_temperature(old, new, stage) for stage in self._stages[position + 1 :]]
        return Pipeline([*self._stages[:position], new, *later], overlap=self.overlap, given=self.given)

    def replace(self, name: str, other: Any = None, **settings: Any) -> Pipeline:
        """Deprecated name of `with_stage`: unlike `Stepper.replace` it returns a copy."""
        deprecated("workbench.Pipeline.replace")
        return self.with_stage(name, other, **settings)

    def insert_after(self, name: str, stage: Stage | type[FunctionStage]) -> Pipeline:
        """Return a copy with a stage added after the one called `name`: `p.insert_after("reward", TurnScores())`.

        Raises `PipelineError` for an unknown name, for two stages with the same name, and where a stage would lack a
        column.
        """
        stage = _as_stage(f"insert_after({name!r})", stage)
        place = self.index(name) + 1
        return Pipeline([*self._stages[:place], stage, *self._stages[place:]], overlap=self.overlap, given=self.given)

    # --- learners, state, checks ----------------------------------------------------------

    def learners(self) -> dict[str, Any]:
        """Return the engines that the pipeline trains, by role: `actor`, `critic`."""
        return {stage.name.removeprefix("update_"): stage.learners()[0] for stage in self._stages if stage.updates}

    def state(self) -> dict[str, dict[str, float]]:
        """Return the state of the stages for a checkpoint: stage name → its state, for stages that have any."""
        return {stage.name: stage.state() for stage in self._stages if stage.state()}

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore the stages from a dict that `state` returned."""
        for name, values in state.items():
            self[name].load_state(values)

    def check(self, batch: DataProto) -> None:
        """Raise `ColumnMissing` if the batch lacks a column that a stage reads and no earlier stage writes."""
        written: set[str] = set()
        for stage in self._stages:
            missing = [name for name in stage.reads if not provided(name, written) and name not in batch]
            explain = getattr(stage, "check_columns", None)
            if missing and explain is not None:  # a reward says what its function may ask for
                try:
                    explain([*batch.columns, *written])
                except RewardError as error:
                    raise ColumnMissing(f"stage {stage.name!r}: {error}") from error
            if missing:
                what = f"stage {stage.name!r} reads {missing}, which neither the batch has nor an earlier stage writes"
                do = "add the column to the data set, or make the stage read one that it has"
                raise ColumnMissing(what, found=f"columns {', '.join(batch.columns)}", do=do)
            written.update(stage.writes)

    def __repr__(self) -> str:
        lines = [f"  {one.name:<14} {', '.join(one.reads)} → {', '.join(one.writes)}" for one in self._stages]
        left = [f"  in training the update's own forward pass computes {self.left_out}"] if self.left_out else []
        return "\n".join([f"Pipeline of {len(self)} stages", *lines, *left])


class LeftToUpdate(BaseStage):
    """Stand-in, in training, for a log-prob stage whose columns the update's own pass computes."""

    def __init__(self, stage: LogProb, update: Update) -> None:
        self.name, self.reads, self._stage, self._update = stage.name, stage.reads, stage, update

    def settings(self) -> dict[str, Any]:
        """Return the settings of the log-prob stage."""
        return self._stage.settings()

    def __call__(self, batch: DataProto) -> Outcome:
        """Return the batch unchanged; where its update is not a single optimizer step, run the log-prob stage after
        all."""
        return Outcome(batch) if self._update.is_on_policy(batch) else self._stage(batch)


def _as_stage(what: str, stage: Any) -> Stage:
    """Return a stage unchanged, and for a class made by `wb.stage` an instance with its default settings. Raises
    `PipelineError` for anything else."""
    do: str | None = None
    if inspect.isclass(stage):
        if issubclass(stage, FunctionStage):
            return stage()
        do = f"construct it: {stage.__name__}(…)"
    elif isinstance(stage, Stage):
        return stage
    elif inspect.isfunction(stage):
        do = f"put this line above `def {stage.__name__}`: @wb.stage(reads=(…,), writes=(…,))"
    raise PipelineError(what, expected="a stage object", found=describe(stage), do=do)


def _left_to_update(stages: Sequence[Stage]) -> tuple[LogProb, Update] | None:
    """Find the log-prob stage whose columns an update computes itself; returns (stage, update), or None where there is
    none."""
    for place, update in enumerate(stages):
        for early, stage in enumerate(stages[:place]):
            if isinstance(update, Update) and isinstance(stage, LogProb) and update.replaces(stage):
                between, columns = stages[early + 1 : place], {*stage.writes, "sampler_logprob_diff"}
                touched = {*_used(update)} - {"old_log_probs"} | {
                    x for member in between for x in (*_used(member), *member.writes)
                }
                moved = any(member.updates and update.learners()[0] in member.learners() for member in between)
                if not (columns & touched or moved or any(isinstance(member, _WIDE) for member in between)):
                    return stage, update
    return None


def _used(stage: Stage) -> tuple[str, ...]:
    return (*stage.reads, *getattr(stage, "optional", ()))


def _at_new_temperature(old: Any, new: Any, stage: Stage) -> Stage:
    """Give a stage that used the old rollout's temperature the new rollout's, because log-probs must be those of the
    sampler. Greedy sampling counts as temperature 1."""
    found = [getattr(getattr(one, "sampling", None), "temperature", None) for one in (old, new)]
    before, after = (one or 1.0 for one in found)
    same = None in found or before == after or getattr(stage, "temperature", None) != before
    return stage if same else stage.with_settings(temperature=after)
