"""The stages and the pipeline, with small fakes for engines and one literal batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from workbench import functional
from workbench.base.errors import ColumnMissing, DataError, PipelineError, RewardError, SettingError
from workbench.base.metrics import reduce
from workbench.dataproto import DataProto
from workbench.engines import LossCounts, LossOutput, Request, Sample, SamplingSettings, StepResult
from workbench.recipes import grpo, ppo
from workbench.rewards import Score, Status
from workbench.stages import Advantage, LogProb, Pipeline, PolicyLoss, Reward, Rollout, Update, ValueLoss, Values
from workbench.stages.advantage import group_numbers
from workbench.stages.reward import on_last_token, part_columns
from workbench.stages.stage import BaseStage, Outcome
from workbench.testing.stages import StageContract


class Tokenizer:
    chat_template = None
    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    def batch_decode(self, ids: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [" ".join(str(one) for one in row) for row in ids]


class Engine:
    """Writes the seed's digits, scores −0.5 a token, remembers what it was taught."""

    tokenizer = Tokenizer()
    version = 0
    state_id = "s0"

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.taught: list[tuple[int, LossCounts]] = []

    async def sample(self, request: Request) -> Sample:
        self.requests.append(request)
        ids = tuple(1 + request.seed // 7**n % 7 for n in range(request.seed % 4))
        return Sample(ids, tuple(-0.5 for _ in ids), "length" if len(ids) == 3 else "stop", self.version)

    def compute_log_probs(
        self, batch: DataProto, want: Sequence[str] = ("log_probs",), temperature: float = 1.0
    ) -> Any:
        return {name: -0.5 * temperature * batch["response_mask"].float() for name in want}

    def learn(self, batch: DataProto, loss: Any, loss_counts: LossCounts, temperature: float = 1.0) -> StepResult:
        self.taught.append((len(batch), loss_counts))
        outputs = {name: value.requires_grad_() for name, value in self.compute_log_probs(batch, loss.want).items()}
        result: LossOutput = loss(outputs, batch, loss_counts)
        return StepResult({**result.metrics, "loss": 1.0}, result.columns)

    def commit(self) -> int:
        self.version += 1
        return self.version

    def reference(self) -> Any:
        return Engine()

    def critic(self, **_: Any) -> Any:
        return Engine()


def prompts(number: int = 3, **meta: Any) -> DataProto:
    chats = [[{"role": "user", "content": "word " * (row + 1)}] for row in range(number)]
    return DataProto(
        None,
        {"raw_prompt": chats, "uid": [f"u{row}" for row in range(number)]},
        {"step": 1, "seed": 0, "epoch": 0, "max_prompt_length": None, **meta},
    )


def micro_case(**extra: Any) -> DataProto:
    """Four rows, two uids, rewards 1 0 1 0 on the last token: the seed guide's trace."""
    scores = torch.zeros(4, 3)
    scores[:, -1] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return DataProto.from_single_dict(
        {
            "response_mask": torch.ones(4, 3, dtype=torch.long),
            "token_level_scores": scores,
            "reward": scores.sum(-1),
            "uid": ["a", "a", "b", "b"],
            **extra,
        }
    )


def length_reward(response: str) -> float:
    return float(len(response))


class TestRollout(StageContract):
    def make_stage(self) -> Any:
        return Rollout(Engine(), group_size=2)

    def make_batch(self) -> DataProto:
        return prompts()


class TestReward(StageContract):
    def make_stage(self) -> Any:
        return Reward(length_reward, in_process=True)

    def make_batch(self) -> DataProto:
        return Rollout(Engine(), group_size=2)(prompts()).batch


class TestAdvantage(StageContract):
    def make_stage(self) -> Any:
        return Advantage(functional.grpo)

    def make_batch(self) -> DataProto:
        return micro_case()


class TestUpdate(StageContract):
    def make_stage(self) -> Any:
        return Update(Engine(), PolicyLoss(), ppo_mini_batch_size=1)

    def make_batch(self) -> DataProto:
        batch = TestReward().make_batch()
        for stage in (Reward(length_reward, in_process=True), LogProb(Engine()), Advantage(functional.grpo)):
            batch = stage(batch).batch
        return batch


# --- rollout ----------------------------------------------------------------------------------


def test_rollout_pads_repeats_and_seeds_every_row_apart() -> None:
    engine = Engine()
    outcome = Rollout(engine, group_size=3)(prompts(2))
    batch = outcome.batch
    assert list(batch["uid"]) == ["u0"] * 3 + ["u1"] * 3 and outcome.rows is not None
    assert outcome.rows.tolist() == [0, 0, 0, 1, 1, 1] and batch.meta_info["group_size"] == 3
    assert len({request.seed for request in engine.requests}) == 6
    assert batch["prompts"].tolist()[0] == [0, 4] and batch["prompt_mask"].tolist()[0] == [0, 1]
    lengths = batch["response_mask"].sum(-1)
    assert batch["responses"].shape[1] == max(int(lengths.max()), 1)
    for row, request in enumerate(engine.requests):
        assert int(lengths[row]) == request.seed % 4
        assert (batch["responses"][row, lengths[row] :] == 0).all()
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    first = batch["attention_mask"][3].nonzero()[0]
    assert batch["position_ids"][3, first] == 0
    again = Engine()
    Rollout(again, group_size=3)(prompts(2))
    assert [r.seed for r in again.requests] == [r.seed for r in engine.requests]
    other = Engine()
    Rollout(other, group_size=3)(prompts(2, step=2))
    assert not {r.seed for r in other.requests} & {r.seed for r in engine.requests}


def test_lengths_are_measured_against_what_was_allowed() -> None:
    """verl's clip_ratio is the share of responses that fill max_tokens, however they end; ours the share that was cut."""
    outcome = Rollout(Engine(), group_size=8, sampling=SamplingSettings(max_tokens=2))(prompts(4, max_prompt_length=4))
    lengths = outcome.batch["response_mask"].sum(-1)
    metrics = reduce([outcome.metrics])
    assert metrics["response_length/clip_ratio"] == pytest.approx(float((lengths >= 2).double().mean()))
    assert metrics["response/cut_ratio"] == pytest.approx(float((lengths == 3).double().mean()))
    assert metrics["response_length/clip_ratio"] > metrics["response/cut_ratio"] > 0
    assert metrics["response/aborted_ratio"] == pytest.approx(float((lengths == 0).double().mean()))
    assert metrics["response_length_non_aborted/min"] == 1.0 and metrics["prompt_length/clip_ratio"] == 0.25


def test_rollout_refuses_overlong_prompts_by_row() -> None:
    with pytest.raises(DataError, match=r"row 2 \(uid u2\).*1 to 2.*found 3"):
        Rollout(Engine())(prompts(3, max_prompt_length=2))


# --- reward -----------------------------------------------------------------------------------


def test_the_scalar_sits_on_the_last_valid_token() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 1]])
    placed = on_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert placed.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0], [0, 0, 4]]


def test_parts_are_the_union_with_nan_where_missing() -> None:
    columns = part_columns([Score(parts={"a": 1.0}), Score(parts={"b": 2.0})])
    assert columns["reward/a"][0] == 1 and columns["reward/a"][1].isnan() and columns["reward/b"][1] == 2


def test_rows_without_a_judgement_leave_everything() -> None:
    def picky(extra: int) -> float | None:
        return None if extra == 0 else float(extra)

    batch = micro_case(
        responses=torch.ones(4, 3, dtype=torch.long),
        response_text=list("abcd"),
        raw_prompt=["p"] * 4,
        extra=[1, 3, 0, 5],
    ).without("reward", "token_level_scores")
    outcome = Reward(picky, in_process=True)(batch)
    assert outcome.batch["scored"].tolist() == [True, True, False, True]
    assert outcome.batch["reward"].tolist() == [1, 3, 0, 5]
    assert outcome.batch["score"][2].status is Status.NOT_APPLICABLE
    metrics = reduce([outcome.metrics])
    assert metrics["critic/score/mean"] == 3 and metrics["reward/status/not_applicable"] == 1
    advantages = Advantage(functional.grpo)(outcome.batch).batch["advantages"]
    assert advantages[:2, 0].tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-4)
    assert (advantages[2:] == 0).all()  # row 3 is alone in its group now


# --- advantage --------------------------------------------------------------------------------


def test_the_micro_case_of_the_seed_guide() -> None:
    outcome = Advantage(functional.grpo)(micro_case())
    expected = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand(4, 3) * 0.70711
    torch.testing.assert_close(outcome.batch["advantages"], expected, atol=1e-5, rtol=0)


def test_an_estimator_gets_what_its_arguments_name() -> None:
    def mine(scores_B: torch.Tensor, mask_BT: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * scores_B[:, None] * mask_BT

    stage = Advantage(mine, scale=2.0)
    assert stage(micro_case()).batch["advantages"][0].tolist() == [2, 2, 2] and stage.settings()["scale"] == 2.0
    with pytest.raises(PipelineError, match="'skores'.*did you mean 'scores'"):
        Advantage(lambda skores: skores)
    with pytest.raises(PipelineError, match=r"\[B, T\] = \(4, 3\); found \(4,\)"):
        Advantage(lambda scores: scores)(micro_case())
    with pytest.raises(PipelineError, match=r"NaN or inf in rows \[0, 1, 2, 3\]"):
        Advantage(lambda mask: mask / 0.0)(micro_case())
    assert "values" in Advantage(functional.gae).reads


def test_kl_in_reward_and_its_controller() -> None:
    log_probs = torch.full((4, 3), -1.0)
    batch = micro_case(old_log_probs=log_probs, ref_log_prob=log_probs - 0.5)
    stage = Advantage(functional.grpo, kl_controller=functional.AdaptiveKL(0.1, target=0.1, horizon=100))
    outcome = stage(batch)
    torch.testing.assert_close(outcome.batch["token_level_rewards"], batch["token_level_scores"] - 0.05)
    metrics = reduce([outcome.metrics])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5) and metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert stage.state()["value"] == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    stage.load_state({"value": 0.3})
    assert stage.state() == {"value": 0.3}


def test_groups_are_numbered_in_order() -> None:
    assert group_numbers(["b", "a", "b"]).tolist() == [0, 1, 0]


# --- update -----------------------------------------------------------------------------------


def test_epochs_mini_batches_and_normalisers() -> None:
    engine = Engine()
    batch = TestUpdate().make_batch()
    stage = Update(engine, PolicyLoss(), ppo_epochs=2, ppo_mini_batch_size=2)
    outcome = stage(batch)
    assert [rows for rows, _ in engine.taught] == [4, 2, 4, 2]  # prompts × group_size, an uneven last one
    tokens = batch["response_mask"].sum().item()
    assert sum(loss_counts.tokens for _, loss_counts in engine.taught) == 2 * tokens
    assert engine.version == 1 and outcome.batch.origins["new_log_probs"].policy_version == 1
    assert torch.equal(outcome.batch["new_log_probs"], -0.5 * batch["response_mask"])


@pytest.mark.parametrize("mode", functional.AGGREGATIONS)
def test_every_aggregation_adds_up_over_trimmed_micro_batches(mode: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    rows = DataProto(
        {
            "response_mask": mask,
            "old_log_probs": torch.zeros(3, 4),
            "advantages": torch.tensor([1.0, -1.0, 0.5])[:, None].expand(3, 4),
            "scored": torch.tensor([True] * 3),
        }
    )
    counts = LossCounts(tokens=7, sequences=3, width=4)
    flat = {"log_probs": torch.full((3, 4), -0.1)}
    whole = PolicyLoss(loss_agg_mode=mode)(flat, rows, counts).loss.item()
    pieces = 0.0
    for index, width in ((slice(0, 2), 2), (slice(2, 3), 4)):
        cut = {name: rows[index][name][:, :width] for name in ("response_mask", "old_log_probs", "advantages")}
        batch = DataProto({**cut, "scored": rows[index]["scored"]})
        pieces += PolicyLoss(loss_agg_mode=mode)(
            {"log_probs": torch.full(cut["response_mask"].shape, -0.1)}, batch, counts
        ).loss.item()
    assert pieces == pytest.approx(whole, abs=1e-6)


def test_a_held_actor_writes_its_columns_all_the_same() -> None:
    engine = Engine()
    outcome = Update(engine, PolicyLoss(), from_step=5)(TestUpdate().make_batch())
    assert not engine.taught and engine.version == 0 and not outcome.batch["clipped"].any()
    assert reduce([outcome.metrics]) == {"actor/skipped": 1.0}


def test_shuffled_mini_batches_cover_every_row_and_come_back_in_order() -> None:
    batch = TestUpdate().make_batch()
    plain, shuffled = (Update(Engine(), PolicyLoss(), ppo_mini_batch_size=1, shuffle=flag) for flag in (False, True))
    orders = [torch.cat(stage._mini_batches(batch, 0)).tolist() for stage in (plain, shuffled)]
    assert orders[0] == list(range(6)) != orders[1] and sorted(orders[1]) == orders[0]
    assert torch.equal(shuffled(batch).batch["new_log_probs"], plain(batch).batch["new_log_probs"])


def test_policy_loss_adds_entropy_and_kl() -> None:
    loss = PolicyLoss(entropy_coeff=0.1, kl_coef=0.5, kl_type="k1")
    assert loss.want == ("log_probs", "entropy") and "ref_log_prob" in loss.reads
    rows = micro_case(
        old_log_probs=torch.zeros(4, 3),
        advantages=torch.ones(4, 3),
        ref_log_prob=torch.full((4, 3), -1.0),
        scored=torch.tensor([True] * 4),
    )
    outputs = {"log_probs": torch.zeros(4, 3), "entropy": torch.full((4, 3), 2.0)}
    result = loss(outputs, rows, LossCounts(12, 4))
    assert result.loss.item() == pytest.approx(-1.0 - 0.2 + 0.5)
    with pytest.raises(SettingError, match="clip_ratio_c"):
        PolicyLoss(clip_ratio_c=1.0)


def test_value_loss_reads_the_old_values() -> None:
    rows = micro_case(values=torch.zeros(4, 3), returns=torch.ones(4, 3))
    assert ValueLoss()({"values": torch.zeros(4, 3)}, rows, LossCounts(12, 4)).loss.item() == pytest.approx(0.5)


# --- pipelines --------------------------------------------------------------------------------


def test_a_chain_that_cannot_work_is_refused_and_says_which_stage_to_move() -> None:
    engine = Engine()
    rollout, reward, advantage = Rollout(engine), Reward(length_reward, in_process=True), Advantage(functional.grpo)
    with pytest.raises(PipelineError, match="stage 'reward' writes it: move it before 'advantage'"):
        Pipeline([rollout, advantage, reward])
    with pytest.raises(PipelineError, match="add the stage 'values'"):
        Pipeline([rollout, reward, Advantage(functional.gae)])
    with pytest.raises(PipelineError, match="the same name; found reward"):
        Pipeline([rollout, reward, reward])


def test_columns_of_the_data_are_asked_for_when_a_batch_arrives() -> None:
    def by_level(level: int) -> float:
        return float(level)

    pipeline = Pipeline([Rollout(Engine()), Reward(by_level, in_process=True)])
    with pytest.raises(ColumnMissing, match="'level'"):
        pipeline.check(prompts())
    pipeline.check(prompts().with_columns({"level": [1, 2, 3]}))


def test_replacing_and_indexing() -> None:
    pipeline = grpo(Engine(), length_reward, group_size=2)
    assert pipeline.names == ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")
    other = pipeline.with_stage("advantage", lambda scores, mask: scores[:, None] * mask)
    assert other["advantage"] is not pipeline["advantage"] and other["rollout"] is pipeline["rollout"]
    with pytest.raises(PipelineError, match="did you mean 'advantage'"):
        pipeline["advantages"]
    with pytest.raises(PipelineError, match="not built around a function"):
        pipeline.with_stage("rollout", length_reward)
    with pytest.raises(PipelineError, match="a stage of its name"):
        pipeline.with_stage("rollout", Reward(length_reward, in_process=True))
    assert "old_log_prob" in repr(pipeline) and "<table" in pipeline._repr_html_()
    assert pipeline.settings()["rollout"]["group_size"] == 2 and list(pipeline.settings()) == list(pipeline.names)


def test_the_old_name_of_with_stage_still_works() -> None:
    pipeline = grpo(Engine(), length_reward, group_size=2)
    with pytest.warns(
        FutureWarning, match="workbench.Pipeline.replace is deprecated since 0.16.0; use Pipeline.with_stage"
    ):
        copy = pipeline.replace("rollout", group_size=4)
    assert (copy.settings()["rollout"]["group_size"], pipeline.settings()["rollout"]["group_size"]) == (4, 2)


def test_a_stage_more() -> None:
    class Doubled(BaseStage):
        name = "doubled"
        reads = ("token_level_scores",)
        writes = ("token_level_scores",)

        def __call__(self, batch: DataProto) -> Outcome:
            return Outcome(self.written(batch, {"token_level_scores": 2 * batch["token_level_scores"]}), {})

    pipeline = grpo(Engine(), length_reward, group_size=2).streaming_rewards()
    more = pipeline.insert_after("reward", Doubled())
    assert more.names == ("rollout", "reward", "doubled", *pipeline.names[2:]) and more.overlap
    assert more["doubled"](pipeline["reward"](pipeline["rollout"](prompts()).batch).batch).batch["reward"].max() > 0
    with pytest.raises(PipelineError, match="did you mean 'reward'"):
        pipeline.insert_after("rewards", Doubled())
    with pytest.raises(PipelineError, match="no earlier stage writes it"):
        Pipeline([Rollout(Engine()), Reward(length_reward, in_process=True)]).insert_after("rollout", Doubled())
    with pytest.raises(PipelineError, match="two stages have the same name"):
        more.insert_after("doubled", Doubled())
    with pytest.raises(PipelineError, match=r"insert_after\('reward'\); expected a stage"):
        pipeline.insert_after("reward", Doubled)  # type: ignore[arg-type]


@pytest.mark.parametrize("column", ["num_tool_calls", "turns", "agent_extra"])
def test_what_an_agent_alone_writes_is_said_to_be_so(column: str) -> None:
    scope: dict[str, Any] = {"num_tool_calls": lambda response, num_tool_calls: 1.0}
    scope |= {"turns": lambda response, turns: 1.0, "agent_extra": lambda response, agent_extra: 1.0}
    told = f"reads '{column}' but no stage writes it; a rollout with agent=… writes it"
    with pytest.raises(PipelineError, match=told):
        grpo(Engine(), Reward(scope[column], in_process=True).function)
    with pytest.raises(
        RewardError, match=f"'{column}' is not a value that a row has.*a rollout with agent=… writes it"
    ):
        Reward(scope[column], in_process=True).check_columns(["responses"])


def test_ppo_has_the_eight_phases_of_the_guide() -> None:
    pipeline = ppo(Engine(), length_reward, critic_warmup=3, kl_target=0.1)
    assert pipeline.names == (
        "rollout", "reward", "old_log_prob", "ref_log_prob", "values", "advantage", "update_critic", "update_actor",
    )  # fmt: skip
    assert set(pipeline.learners()) == {"critic", "actor"} and pipeline.state() == {"advantage": {"value": 0.001}}
    assert "ref_log_prob" not in grpo(Engine(), length_reward, kl_coef=0).names
    with pytest.raises(SettingError, match="given twice"):
        grpo(Engine(), length_reward, sampling=SamplingSettings(), max_tokens=3)


def test_values_and_log_probs_carry_the_temperature() -> None:
    batch = Rollout(Engine(), group_size=2)(prompts()).batch
    assert LogProb(Engine(), temperature=2.0)(batch).batch["old_log_probs"].min() == -1
    assert "critic/values/mean" in Values(Engine())(batch).metrics
    metrics: Mapping[str, Any] = LogProb(Engine(), entropy=True)(batch).metrics
    assert reduce([metrics])["training/rollout_probs_diff_max"] == 0
