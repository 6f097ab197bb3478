"""Every estimator through its stage at the borders; sessions of several rows; the mask without rejected tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.base.errors import PipelineError
from workbench.base.metrics import reduce
from workbench.dataproto import DataProto
from workbench.stages import Advantage
from workbench.steps.trace import describe_settings
from workbench.testing.stages import EstimatorContract, a_batch

STAGES: dict[str, Callable[[], Advantage]] = {
    **{
        one.__name__: lambda one=one: Advantage(one)
        for one in (
            F.grpo, F.grpo_passk, F.rloo, F.opo, F.gpg, F.maxrl, F.reinforce_plus_plus, F.reinforce_plus_plus_baseline, F.remax,
            F.gae, F.optimal_token_baseline, F.tir_optimal_token_baseline,
            F.tree_turn, F.tree_rl, F.arpo, F.tree_grpo,
        )
    },
    "dr_grpo": lambda: Advantage(F.grpo, norm_by_std=False),
    "grpo as in verl": lambda: Advantage(F.grpo, singleton="verl"),
    "gdpo": lambda: Advantage(F.gdpo, parts=("one",)),
    "kl in reward": lambda: Advantage(F.reinforce_plus_plus, gamma=0.9, kl_controller=F.FixedKL(0.1)),
}  # fmt: skip


class TestEstimators(EstimatorContract):
    @pytest.fixture(autouse=True, params=list(STAGES))
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param

    def make_stage(self) -> Any:
        return STAGES[self.name]()


def four(**columns: Any) -> DataProto:
    """Two prompts of two rows with scores 1 0 1 1, three tokens each."""
    scores = torch.zeros(4, 3)
    scores[:, -1] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    mask = torch.ones(4, 3, dtype=torch.long)
    scored = torch.ones(4, dtype=torch.bool)
    plain = {"response_mask": mask, "token_level_scores": scores, "reward": scores.sum(-1), "scored": scored}
    return DataProto.from_single_dict({**plain, "uid": ["a", "a", "b", "b"], **columns})


def test_maxrl_weighs_by_the_mean() -> None:
    """One of four is right: 3 and −1; three of four: 1/3 and −1; none: 0. Tajwar et al. 2026, algorithm 1."""
    scores = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    mask = torch.ones(10, 1, dtype=torch.long)
    expected = [3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0]
    assert F.maxrl(scores, groups, mask)[0][:, 0].tolist() == pytest.approx(expected)
    with pytest.raises(PipelineError, match="estimator maxrl.*scores of maxrl; expected ≥ 0.*found -1"):
        Advantage(F.maxrl)(four(token_level_scores=-four()["token_level_scores"]))


def test_a_row_alone_has_the_whole_batch_in_its_gpg() -> None:
    """One score of four is not 0: α is 4, for rows that are alone, too (verl)."""
    scores, mask = torch.tensor([1.0, 0, 0, 0]), torch.ones(4, 1, dtype=torch.long)
    alone, _ = F.gpg(scores, torch.arange(4), mask, singleton="verl", f_norm=2.0)
    assert alone[:, 0].tolist() == [2.0, 0, 0, 0]
    assert (F.gpg(scores, torch.arange(4), mask)[0] == 0).all()


def test_weights_enter_the_token_baselines_squared() -> None:
    """Two rows of one token, G = 1 and 0, energies 1 and 1, ρ = 3 and 1: the baseline is 9/10."""
    rewards, mask = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1, dtype=torch.long)
    groups, old, squared = torch.zeros(2, dtype=torch.long), torch.full((2, 1), -1e9), torch.zeros(2, 1)
    weights = torch.tensor([[3.0], [1.0]])
    for estimator in (F.optimal_token_baseline, F.tir_optimal_token_baseline):
        found, _ = estimator(rewards, groups, mask, old, squared, rollout_is_weights=weights)
        assert found[:, 0].tolist() == pytest.approx([0.1, -0.9])
        columns = {
            "old_log_probs": old,
            "sum_pi_squared": squared,
            "token_level_scores": rewards,
            "response_mask": mask,
        }
        batch = DataProto.from_single_dict(
            {**columns, "reward": rewards[:, 0], "uid": ["a", "a"], "rollout_is_weights": weights}
        )
        assert Advantage(estimator)(batch).batch["advantages"][:, 0].tolist() == pytest.approx([0.1, -0.9])
        bare = Advantage(estimator)(batch.without("rollout_is_weights")).batch["advantages"]
        assert bare[:, 0].tolist() == pytest.approx([0.5, -0.5])


def test_rejected_tokens_have_no_advantage_and_the_score_still_counts_once() -> None:
    mask = torch.ones(4, 3, dtype=torch.long)
    kept = mask.clone()
    kept[0] = 0  # the whole first row, whose score still stands in its group
    kept[2, 2] = 0  # the token that carries a score
    outcome = Advantage(F.grpo)(four(loss_mask=kept))
    plain = Advantage(F.grpo)(four()).batch["advantages"]
    assert torch.equal(outcome.batch["advantages"], plain * kept)
    metrics = reduce([outcome.metrics])
    assert metrics["critic/score/mean"] == 0.75 and metrics["critic/rewards/mean"] == 0.75
    assert metrics["critic/advantages/max"] == 0.0  # the row of the best advantage is rejected
    assert "loss_mask" not in Advantage(F.grpo).reads


def test_a_row_without_tokens_of_its_own_is_counted_once() -> None:
    """Its score may stand on tool text, as verl places it, or on no token at all."""
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    for scores in (torch.tensor([[0, 0, 1.0], [0, 0, 3.0]]), torch.tensor([[0, 0, 1.0], [0, 0, 0]])):
        columns = {"response_mask": mask, "token_level_scores": scores, "reward": torch.tensor([1.0, 3.0])}
        found = Advantage(F.rloo)(DataProto.from_single_dict({**columns, "uid": ["a", "a"]})).batch
        assert found["advantages"][0].tolist() == [-2.0] * 3


def test_only_the_last_row_of_a_session_is_compared() -> None:
    """verl's multi-trajectory: prompt a has sessions x (two rows, the last scores 0) and y (one row, 1)."""
    scores = torch.zeros(4, 2)
    scores[:, 0] = torch.tensor([9.0, 0.0, 1.0, 5.0])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
    batch = DataProto.from_single_dict(
        {
            **{"response_mask": mask, "token_level_scores": scores, "reward": scores.sum(-1)},
            **{"scored": torch.ones(4, dtype=torch.bool), "uid": ["a", "a", "a", "b"], "session": ["x", "x", "y", "x"]},
        }
    )
    found = Advantage(F.grpo, norm_by_std=False, sessions="session")(batch).batch
    assert found["advantages"].tolist() == [[-0.5, -0.5], [-0.5, 0], [0.5, 0.5], [0, 0]]
    assert torch.equal(Advantage(F.grpo, norm_by_std=False)(batch).batch["advantages"], found["advantages"])
    alone = Advantage(F.grpo, norm_by_std=False, sessions=None)
    assert alone(batch).batch["advantages"][0, 0] == pytest.approx(9 - 10 / 3)
    # the last row of x is rejected whole: its other row still has the session's advantage
    kept = batch.with_columns({"loss_mask": torch.tensor([[1, 1], [0, 0], [1, 1], [1, 1]])})
    rejected = Advantage(F.grpo, norm_by_std=False, sessions="session")(kept).batch
    assert rejected["advantages"].tolist() == [[-0.5, -0.5], [0, 0], [0.5, 0.5], [0, 0]]
    moved = Advantage(F.grpo, sessions="mine").with_function(F.rloo)
    assert moved.sessions == "mine" and moved.settings()["sessions"] == "mine"
    assert "sessions" not in Advantage(F.grpo).settings() and alone.settings()["sessions"] is None
    with pytest.raises(PipelineError, match="sessions='mine' with estimator gae; expected one that reads scores"):
        Advantage(F.gae, sessions="mine")


def test_empty_responses_and_rows_that_were_not_scored_are_in_no_critic_metric() -> None:
    batch = a_batch(8)
    rows = batch["scored"] & (batch["attention_mask"][:, 2:].sum(-1) > 0)
    assert 0 < int(rows.sum()) < int(batch["scored"].sum()) < 8
    metrics = reduce([Advantage(F.gae, whiten=False)(batch).metrics])
    assert metrics["critic/score/mean"] == pytest.approx(float(batch["token_level_scores"].sum(-1)[rows].mean()))
    assert metrics["reward/mean"] == pytest.approx(float(batch["reward"][batch["scored"]].mean()))
    own = batch["response_mask"].bool() & batch["scored"][:, None]
    assert metrics["critic/values/mean"] == pytest.approx(float(batch["values"][own].mean()))


def test_an_estimator_of_a_notebook_may_name_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(scores: torch.Tensor, mask: torch.Tensor, turns: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        return mine(scores, mask, turns - 1) if turns else (scores[:, None] * mask, scores[:, None] * mask)

    monkeypatch.setattr(mine, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    assert describe_settings(Advantage(mine))[1]["estimator"].count("def mine") == 1
    mine.__wrapped__ = mine  # type: ignore[attr-defined]
    with pytest.raises(PipelineError, match="estimator .* has no readable signature"):
        Advantage(mine)


def test_an_estimator_by_name_is_told_its_function() -> None:
    with pytest.raises(PipelineError, match=r"its name: Advantage\(wb.functional.grpo\)"):
        wb.stages.Advantage("grpo")  # type: ignore[arg-type]


def test_a_group_of_one_is_named_where_nothing_can_be_learnt(caplog: pytest.LogCaptureFixture) -> None:
    def said(estimator: Any, group_size: int, **settings: Any) -> str:
        caplog.clear()
        stages = wb.stages
        rollout = stages.Rollout(SimpleNamespace(tokenizer=None), group_size=group_size)
        pipe = wb.Pipeline([rollout, stages.Reward(lambda response: 1.0), stages.Advantage(estimator, **settings)])
        assert caplog.text.count("nothing is learnt") == bool(pipe.alone)
        return pipe.alone

    for one in (F.grpo, F.rloo, F.opo, F.reinforce_plus_plus_baseline):
        assert "group_size=1: advantage compares a prompt's responses" in said(one, 1)
        assert not said(one, 2)
        assert not said(one, 1, singleton="verl")
    assert not said(F.reinforce_plus_plus, 1)
