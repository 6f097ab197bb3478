"""Tests that every stage must pass: inherit `StageContract`, give `make_stage` and `make_batch`::

    class TestMyStage(StageContract):
        make_stage = staticmethod(MyStage)
        make_batch = staticmethod(lambda: wb.DataProto({"reward": torch.ones(4)}))

A failing assertion says what is wrong.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from workbench.base.errors import ColumnMissing
from workbench.dataproto.columns import declared
from workbench.dataproto.core import DataProto
from workbench.dataproto.same import How, same
from workbench.stages.stage import Stage
from workbench.steps.trace import describe_settings, perform


class StageContract:
    """Pytest tests of a stage: inherit this class and override `make_stage` and `make_batch`."""

    def make_stage(self) -> Any:
        """A new stage, with the same settings each time."""
        raise NotImplementedError("override make_stage: return a new stage, with the same settings each time")

    def make_batch(self) -> DataProto:
        """A batch with every column that the stage reads, the same each time."""
        raise NotImplementedError("override make_batch: return a batch with every column that the stage reads")

    def test_it_is_a_stage_and_says_what_it_reads_and_writes(self) -> None:
        """A stage has a name and a tuple `reads`; a stage of this package writes declared columns alone."""
        stage = self.make_stage()
        assert isinstance(stage, Stage), "it has the protocol's members"
        assert stage.name and isinstance(stage.reads, tuple), "it has a name and a tuple of reads"
        ours = type(stage).__module__.startswith("workbench.")
        assert not ours or all(map(declared, stage.writes)), "every column that it writes is declared"

    def test_it_writes_what_it_promised_and_leaves_its_input_alone(self) -> None:
        """A stage writes the columns in `writes`, signs each with its name, and leaves its input unchanged."""
        stage, batch = self.make_stage(), self.make_batch()
        before = pickle.dumps(batch)
        phase = perform(stage, batch)
        assert pickle.dumps(batch) == before, "it leaves its input alone"
        for name in stage.writes:
            assert phase.batch.origins[name].stage == stage.name, "what it writes is signed with its name"
        assert set(batch.columns) <= set(phase.batch.columns), "it keeps the other columns"

    def test_the_same_input_gives_the_same_output(self) -> None:
        """The same input gives the same tensors, bit for bit, and the same metrics."""
        first, second = (perform(self.make_stage(), self.make_batch()) for _ in range(2))
        for name in first.wrote:
            a, b = first.batch[name], second.batch[name]
            assert same(a, b, How(kinds=True)), "the same columns the second time"
        assert first.metrics == second.metrics, "the same metrics the second time"

    def test_a_missing_column_is_refused_before_it_runs(self) -> None:
        """A batch without a column that the stage reads raises `ColumnMissing` with the column's name."""
        stage, batch = self.make_stage(), self.make_batch()
        for name in stage.reads:
            with pytest.raises(ColumnMissing, match=name):
                perform(stage, batch.without(name))

    def test_its_settings_can_be_recorded(self) -> None:
        """A stage's settings are plain values, and its repr names its class."""
        stage = self.make_stage()
        plain = describe_settings(stage)[0].values()
        assert all(isinstance(value, int | float | str | bool | None) for value in plain), "settings are plain values"
        assert type(stage).__name__ in repr(stage), "the repr names the class"

    def test_its_state_comes_back(self) -> None:
        """Loading a stage's own state leaves that state unchanged."""
        stage = self.make_stage()
        state = stage.state()
        stage.load_state(state)
        assert stage.state() == state, "load_state(state()) leaves the state as it is"
