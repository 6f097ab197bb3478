"""An ordered list of stages, checked when it is built: before any model is loaded or GPU asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from workbench.columns import COLUMNS, declared
from workbench.dataproto import DataProto
from workbench.errors import ColumnMissing, PipelineError, RewardError, describe, message, unknown
from workbench.rewards.signatures import EPISODE
from workbench.stages.stage import Stage


class Pipeline:
    """`Pipeline([rollout, reward, …])`: iterate it, index it by position or stage name, print it.

    Columns that the data set writes (see `columns.COLUMNS`) are there from the start; a column that is
    declared nowhere is taken to come with the data, and asked for when the first batch arrives.
    Raises `PipelineError` where a stage reads what only a later stage writes, or nobody; and where one changes a column that
    has been read by then and is read by nobody after it.
    """

    def __init__(self, stages: Sequence[Stage], *, overlap: bool = False) -> None:
        self._stages = tuple(stages)
        self.overlap = overlap
        names = [stage.name for stage in self._stages]
        doubled = {name for name in names if names.count(name) > 1}
        if doubled:
            raise PipelineError(message("two stages have one name", found=", ".join(sorted(doubled))))
        self._check_reads()
        self._check_changes()

    def overlapped(self) -> Pipeline:
        """The same stages for training jobs that judge while they work: rewards of finished rows begin while other rows
        still generate, and what does not read them goes on beside them. Numbers are the same; a stepper runs stages one
        by one all the same."""
        return Pipeline(self._stages, overlap=True)

    def _check_reads(self) -> None:
        present = {column.name for column in COLUMNS.values() if column.writer == "dataset"}
        for position, stage in enumerate(self._stages):
            for column in stage.reads:
                if column not in present:
                    self._refuse_unless_data(column, stage, self._stages[position + 1 :])
            present.update(stage.writes)

    def _check_changes(self) -> None:
        for position, stage in enumerate(self._stages):
            changed = set(stage.writes)
            if stage.updates or not changed or not changed <= set(stage.reads):
                continue
            readers = [other.name for other in self._stages[:position] if changed & set(other.reads)]
            if readers and not any(changed & set(other.reads) for other in self._stages[position + 1 :]):
                raise PipelineError(
                    f"stage {stage.name!r} changes {', '.join(sorted(changed))} and nobody reads that after it; "
                    f"stage {readers[0]!r} has read it before: move {stage.name!r} before {readers[0]!r}"
                )

    @staticmethod
    def _refuse_unless_data(column: str, stage: Stage, later: tuple[Stage, ...]) -> None:
        for other in later:
            if column in other.writes:
                raise PipelineError(
                    f"stage {stage.name!r} reads {column!r} but nothing before it writes that; "
                    f"stage {other.name!r} does: move it before {stage.name!r}"
                )
        known = declared(column)
        if column in (*EPISODE, "agent_extra"):
            raise PipelineError(
                f"stage {stage.name!r} reads {column!r} but no stage writes that; a rollout with agent=… writes it"
            )
        if known is not None:
            raise PipelineError(
                f"stage {stage.name!r} reads {column!r} but no stage writes that; "
                f"add the stage {known.writer!r} before {stage.name!r}"
            )

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

    def index(self, name: str) -> int:
        """Position of the stage called `name`."""
        if name not in self.names:
            raise PipelineError(unknown("stage of this pipeline", name, self.names))
        return self.names.index(name)

    def replace(self, name: str, other: Any = None, **settings: Any) -> Pipeline:
        """A pipeline with one stage replaced: by a stage, by the same stage around another function, or by the same with
        some settings changed (`replace("rollout", temperature=0.7)`).

        Where the sampling temperature of a rollout changes, the stages after it that score or learn at the old one go with
        it: log-probs are only those of the sampler at its own temperature. Raises `PipelineError` where nothing is
        changed, or a setting is unknown.
        """
        position = self.index(name)
        old = self._stages[position]
        if other is None and not settings:
            raise PipelineError(message(f"replace({name!r})", do="give a stage, a function, or settings by name"))
        new = old if other is None else other if isinstance(other, Stage) else old.with_function(other)
        new = new.with_settings(**settings) if settings else new
        if new.name != old.name:
            raise PipelineError(
                message(f"stage {old.name!r} can only be replaced by one of its name", found=repr(new.name))
            )
        later = [_at_the_same_heat(old, new, stage) for stage in self._stages[position + 1 :]]
        return Pipeline([*self._stages[:position], new, *later], overlap=self.overlap)

    def insert_after(self, name: str, stage: Stage) -> Pipeline:
        """A pipeline with one stage more, behind the one called `name`: `p.insert_after("reward", TurnScores())`.

        Raises `PipelineError` for an unknown name, a second stage of one name, and where a stage then lacks a column.
        """
        if isinstance(stage, type) or not isinstance(stage, Stage):
            raise PipelineError(message(f"insert_after({name!r})", expected="a stage", found=describe(stage)))
        place = self.index(name) + 1
        return Pipeline([*self._stages[:place], stage, *self._stages[place:]], overlap=self.overlap)

    # --- what lives in it -----------------------------------------------------------------

    def learners(self) -> dict[str, Any]:
        """Role → learner for every learner that a stage updates: `actor`, `critic`."""
        return {stage.name.removeprefix("update_"): stage.learners()[0] for stage in self._stages if stage.updates}

    def state(self) -> dict[str, dict[str, float]]:
        """Stage name → its controllers' state, for those that have any."""
        return {stage.name: stage.state() for stage in self._stages if stage.state()}

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Back to what `state` gave."""
        for name, values in state.items():
            self[name].load_state(values)

    def check(self, batch: DataProto) -> None:
        """Refuse a batch that lacks what the data set must bring."""
        written: set[str] = set()
        for stage in self._stages:
            missing = [name for name in stage.reads if name not in written and name not in batch]
            explain = getattr(stage, "check_columns", None)
            if missing and explain is not None:  # a reward says what its function may ask for
                try:
                    explain([*batch.columns, *written])
                except RewardError as error:
                    raise ColumnMissing(f"stage {stage.name!r}: {error}") from error
            if missing:
                raise ColumnMissing(
                    message(
                        f"stage {stage.name!r} reads {missing}, which no stage writes and the batch does not bring",
                        found=", ".join(batch.columns),
                        do="add the column to the data set, or name the one that it has",
                    )
                )
            written.update(stage.writes)

    # --- looking --------------------------------------------------------------------------

    def __repr__(self) -> str:
        lines = [f"Pipeline of {len(self)} stages"]
        for stage in self._stages:
            lines.append(f"  {stage.name:<14} {', '.join(stage.reads)} → {', '.join(stage.writes)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from workbench.views.pipelines import pipeline_html

        return pipeline_html(self)


def _at_the_same_heat(old: Any, new: Any, stage: Stage) -> Stage:
    """A stage that scored at the old rollout's temperature, at the new one's; greedy sampling is scored at 1."""
    before, after = (getattr(getattr(one, "sampling", None), "temperature", None) for one in (old, new))
    if None in (before, after) or getattr(stage, "temperature", None) != (before or 1.0):
        return stage
    return stage if (after or 1.0) == (before or 1.0) else stage.with_settings(temperature=after or 1.0)
