"""Tests that every advantage estimator must pass, and the metrics of the stage around it: inherit `EstimatorContract`::

    class TestMyEstimator(EstimatorContract):
        def make_stage(self):
            return wb.stages.Advantage(my_estimator)

A failing assertion says what is wrong.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from workbench.base.errors import WorkbenchError
from workbench.base.metrics import reduce
from workbench.dataproto.core import DataProto
from workbench.stages.measures import data_metrics
from workbench.testing.borders import answer

T = 6


def a_batch(rows: int = 8, *, group: int = 4, seed: int = 0, **changes: Any) -> DataProto:
    """Rows with every column that an estimator may read: tool text between tokens, an empty response, one row not
    scored; the first token of two neighbours is one node of a tree."""
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
    """Batches at the borders, by what is special in them."""
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
        """A new `Advantage` stage with the estimator."""
        raise NotImplementedError("override make_stage: return a new Advantage stage with the estimator")

    def test_at_the_borders_it_is_finite_or_refuses(self) -> None:
        """Each batch gets finite advantages and returns, 0 outside the mask and in rows that were not scored, or a refusal."""
        for name, batch in hostile_batches().items():
            found = answer(partial(self.make_stage(), batch))
            if isinstance(found, WorkbenchError):
                assert name in ("a NaN score", "endless scores", "negative scores"), f"{name}: refused, {found}"
                continue
            mask = batch["loss_mask" if "loss_mask" in batch else "response_mask"].bool()
            for column in ("advantages", "returns"):
                values = found.batch[column]
                assert values.shape == mask.shape, f"{name}: {column} have the mask's shape"
                assert values.isfinite().all(), f"{name}: {column} are finite"
            advantages = found.batch["advantages"]
            assert (advantages[~mask] == 0).all(), f"{name}: advantages are 0 outside the mask"
            assert (advantages[~batch["scored"]] == 0).all(), f"{name}: rows that were not scored have advantage 0"

    def test_a_metric_is_a_finite_number_or_absent(self) -> None:
        """At the same borders no metric of the stage, nor of the finished batch, is NaN or infinite."""
        for name, batch in hostile_batches().items():
            found = answer(partial(self.make_stage(), batch))
            if not isinstance(found, WorkbenchError):
                metrics = reduce([found.metrics]) | reduce([data_metrics(found.batch)])
                odd = [key for key, value in metrics.items() if not math.isfinite(value)]
                assert odd == [], f"{name}: a metric is a finite number or absent"

    def test_it_does_not_depend_on_the_order_of_rows(self) -> None:
        """Rows in another order get the same advantages."""
        batch = a_batch(12, seed=1)
        order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
        straight, shuffled = (self.make_stage()(one).batch["advantages"] for one in (batch, batch.select_idxs(order)))
        torch.testing.assert_close(shuffled, straight[order], msg="another order of rows, other advantages")
