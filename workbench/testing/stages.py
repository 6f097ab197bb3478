"""The contract of a stage as tests: inherit `StageContract`, give `make_stage` and `make_batch`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from workbench.columns import declared
from workbench.dataproto import DataProto
from workbench.errors import ColumnMissing
from workbench.stages import Stage
from workbench.trace import describe_settings, perform


class StageContract:
    """What every stage must do. Override `make_stage` and `make_batch`."""

    def make_stage(self) -> Any:
        """A fresh stage, the same each time."""
        raise NotImplementedError

    def make_batch(self) -> DataProto:
        """A batch with everything that the stage reads, the same each time."""
        raise NotImplementedError

    def test_it_is_a_stage_and_says_what_it_reads_and_writes(self) -> None:
        """Known columns, or columns of the data."""
        stage = self.make_stage()
        assert isinstance(stage, Stage) and stage.name and isinstance(stage.reads, tuple)
        assert all(declared(name) is not None for name in stage.writes)

    def test_it_writes_what_it_promised_and_leaves_its_input_alone(self) -> None:
        """And signs it."""
        stage, batch = self.make_stage(), self.make_batch()
        before = pickle.dumps(batch)
        phase = perform(stage, batch)
        assert pickle.dumps(batch) == before
        for name in stage.writes:
            assert phase.batch.origins[name].stage == stage.name
        assert set(batch.columns) <= set(phase.batch.columns)

    def test_the_same_input_gives_the_same_output(self) -> None:
        """Bit for bit, in columns and metrics."""
        first, second = (perform(self.make_stage(), self.make_batch()) for _ in range(2))
        for name in first.wrote:
            a, b = first.batch[name], second.batch[name]
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else len(a) == len(b)
        assert first.metrics == second.metrics

    def test_a_missing_column_is_refused_before_it_runs(self) -> None:
        """By name, whichever it is."""
        stage, batch = self.make_stage(), self.make_batch()
        for name in stage.reads:
            with pytest.raises(ColumnMissing, match=name):
                perform(stage, batch.without(name))

    def test_its_settings_can_be_recorded(self) -> None:
        """Plain values, and the repr shows them."""
        stage = self.make_stage()
        plain, _ = describe_settings(stage)
        assert all(isinstance(value, int | float | str | bool | type(None)) for value in plain.values())
        assert type(stage).__name__ in repr(stage)

    def test_its_state_comes_back(self) -> None:
        """Controllers, where it has any."""
        stage = self.make_stage()
        state = stage.state()
        stage.load_state(state)
        assert stage.state() == state
