"""Tests that every stage must pass, and every advantage estimator with the metrics of the stage around it.

Inherit `StageContract`, give `make_stage` and `make_batch`, or inherit `EstimatorContract`::

    class TestMyStage(StageContract):
        make_stage = staticmethod(MyStage)
        make_batch = staticmethod(lambda: wb.DataProto({"reward": torch.ones(4)}))

    class TestMyEstimator(EstimatorContract):
        def make_stage(self):
            return wb.stages.Advantage(my_estimator)

A failing assertion says what is wrong.
"""

from __future__ import annotations

import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch

from workbench.base.errors import ColumnMissing, WorkbenchError
from workbench.base.metrics import reduce
from workbench.dataproto.columns import declared
from workbench.dataproto.core import DataProto
from workbench.dataproto.value import How, same
from workbench.stages.measures import data_metrics
from workbench.stages.stage import Stage
from workbench.steps.trace import describe_settings, perform
from workbench.testing import answer

T = 6


def a_batch(rows: int = 8, *, group: int = 4, seed: int = 0, **changes: Any) -> DataProto:
    """Make a batch with every column that an estimator may read.

    It has tool text between tokens, an empty response and a row that was not scored; the first tokens of two
    neighbouring rows are one node of a tree.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    lengths = (torch.arange(rows) * 2 + 3) % (T + 1)
    there, number = (torch.arange(T) < lengths[:, None]).long(), torch.arange(rows)[:, None]
    mask = there * (torch.arange(T) != 1).long()
    last = (mask * torch.arange(T)).amax(-1, keepdim=True)
    reward = (random(rows) * 2).round()
    old = -random(rows, T) * 3
    columns = {
        "response_mask": mask,
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(rows, 2, dtype=torch.long), there], 1),
        "reward": reward,
        "reward/one": random(rows),
        "scored": torch.arange(rows) != 3,
        "token_level_scores": torch.zeros(rows, T).scatter_(1, last, reward[:, None]) * mask,
        "values": random(rows, T) * mask,
        "old_log_probs": old,
        "ref_log_prob": old + random(rows, T) - 0.5,
        "sum_pi_squared": old.exp().square() + random(rows, T) * (1 - old.exp()).square(),
        "rollout_is_weights": 2 * random(rows, T),
        "reward_baselines": random(rows),
        "nodes": there * torch.where(torch.arange(T) < 1, 1 + number // 2, 1 + rows + number),
        "uid": [f"u{row // group}" for row in range(rows)],
    }
    return DataProto.from_single_dict({**columns, **changes})


def hostile_batches() -> dict[str, DataProto]:
    """Make batches of extreme cases, by the name of what is special in each."""
    usual = a_batch()
    outside = usual["response_mask"] == 0
    tokens = [name for name in usual.batch if usual[name].shape == (8, T) and usual[name].is_floating_point()]
    last = usual["token_level_scores"]
    return {
        "usual": usual,
        "no rows": usual[:0],
        "one row": usual[:1],
        "one row that was not scored": usual[3:4],
        "no row was scored": a_batch(scored=torch.zeros(8, dtype=torch.bool)),
        "groups of one": a_batch(group=1),
        "no tokens at all": a_batch(
            response_mask=torch.zeros(8, T, dtype=torch.long), token_level_scores=torch.zeros(8, T)
        ),
        "one token in all": a_batch(response_mask=torch.eye(8, T, dtype=torch.long) * (torch.arange(8) == 0)[:, None]),
        "NaN outside the mask": usual.with_columns(
            {name: usual[name].masked_fill(outside, math.nan) for name in tokens}
        ),
        "a NaN score": a_batch(token_level_scores=last.masked_fill(last > 0, math.nan)),
        "equal scores": a_batch(reward=torch.full((8,), 0.1), token_level_scores=torch.where(last > 0, 0.1, 0.0)),
        "huge scores": a_batch(reward=1e37 * usual["reward"], token_level_scores=1e37 * last),
        "endless scores": a_batch(reward=3e38 * usual["reward"], token_level_scores=3e38 * (last + usual["values"])),
        "negative scores": a_batch(reward=-usual["reward"], token_level_scores=-last),
        "bfloat16": usual.with_columns({name: usual[name].bfloat16() for name in tokens}),
        "rejected tokens": a_batch(loss_mask=usual["response_mask"] * (torch.arange(8) % 2)[:, None]),
    }


class EstimatorContract:
    """Pytest tests of an advantage estimator: inherit this class and override `make_stage`."""

    def make_stage(self) -> Any:
        """Return a new `Advantage` stage with the estimator."""
        raise NotImplementedError("override make_stage: return a new Advantage stage with the estimator")

    def test_at_the_borders_it_is_finite_or_refuses(self) -> None:
        """Every extreme batch gets finite advantages and returns, or a refusal; advantages are 0 outside the mask and
        in unscored rows."""
        for name, batch in hostile_batches().items():
            outcome = answer(partial(self.make_stage(), batch))
            if isinstance(outcome, WorkbenchError):
                assert name in ("a NaN score", "endless scores", "negative scores"), f"{name}: refused, {outcome}"
                continue
            mask = batch["loss_mask" if "loss_mask" in batch else "response_mask"].bool()
            for column in ("advantages", "returns"):
                values = outcome.batch[column]
                assert values.shape == mask.shape, f"{name}: {column} have the mask's shape"
                assert values.isfinite().all(), f"{name}: {column} are finite"
            advantages = outcome.batch["advantages"]
            assert (advantages[~mask] == 0).all(), f"{name}: advantages are 0 outside the mask"
            assert (advantages[~batch["scored"]] == 0).all(), f"{name}: rows that were not scored have advantage 0"

    def test_a_metric_is_a_finite_number_or_absent(self) -> None:
        """For extreme batches no metric of the stage, nor of the finished batch, is NaN or infinite."""
        for name, batch in hostile_batches().items():
            found = answer(partial(self.make_stage(), batch))
            if not isinstance(found, WorkbenchError):
                metrics = reduce([found.metrics]) | reduce([data_metrics(found.batch)])
                odd = [key for key, value in metrics.items() if not math.isfinite(value)]
                assert odd == [], f"{name}: a metric is a finite number or absent"

    def test_it_does_not_depend_on_the_order_of_rows(self) -> None:
        """Rows in another order get equal advantages."""
        batch = a_batch(12, seed=1)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        straight, shuffled = (self.make_stage()(one).batch["advantages"] for one in (batch, batch.select_idxs(order)))
        torch.testing.assert_close(shuffled, straight[order], msg="another order of rows, other advantages")


class StageContract:
    """Pytest tests of a stage: inherit this class and override `make_stage` and `make_batch`."""

    def make_stage(self) -> Any:
        """Return a new stage, with equal settings each time."""
        raise NotImplementedError("override make_stage: return a new stage, with the same settings each time")

    def make_batch(self) -> DataProto:
        """Return a batch with every column that the stage reads, equal each time."""
        raise NotImplementedError("override make_batch: return a batch with every column that the stage reads")

    def test_it_is_a_stage_and_says_what_it_reads_and_writes(self) -> None:
        """A stage has a name and a tuple `reads`; a stage of this package writes only declared columns."""
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
        """Equal inputs give equal tensors, bit for bit, and equal metrics."""
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
