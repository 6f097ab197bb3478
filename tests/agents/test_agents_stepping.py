"""One episode turn by turn: the rollout's own, edited and run on, put back into the step; tools and users that know what was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_parts import Adder, Always, Script, Tags, User, call

import workbench as wb
from workbench.agents import AgentLoopBase, EpisodeStepper, FunctionCall, ToolAgent, ToolResponse
from workbench.base.errors import PipelineError, SettingError
from workbench.dataproto import DataProto
from workbench.engines import SamplingSettings, local
from workbench.recipes import grpo
from workbench.stages import EpisodeRollout
from workbench.stages.episodes import recorded_output

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingSettings(max_tokens=240, temperature=1.0)


class Counter(Adder):
    """Remembers what it was asked in this episode; answers with how often, and the sum of all."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        mine = self.seen.setdefault(instance_id, [])
        mine += parameters["numbers"]
        return ToolResponse(text=f"{len(mine)} numbers, {sum(mine)}"), float(len(mine)), {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(sum(self.seen[instance_id]))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "data" / "tiny-arith")


def prompts(**extra: Any) -> DataProto:
    columns: dict[str, Any] = {"uid": ["a", "b"], "raw_prompt": [[{"role": "user", "content": "Add."}]] * 2}
    columns["extra_info"] = [extra] * 2
    return DataProto.from_dict({}, columns, {"seed": 3, "step": 1})


def scripted(tokenizer: Any, texts: list[str], agent: ToolAgent, **extra: Any) -> tuple[EpisodeStepper, Script]:
    script = Script(tokenizer, texts)
    stage = EpisodeRollout(script, agent=agent, group_size=2, sampling=SAMPLING)
    return stage.episode(prompts(**extra), 1), script


def add(*numbers: int) -> str:
    return call(numbers=list(numbers))


class TestTools:
    def test_a_turn_at_a_time(self, tokenizer: Any) -> None:
        tool = Counter()
        e, script = scripted(tokenizer, [add(1, 2), add(3), "6"], ToolAgent([tool], parser=Tags()))
        assert e.next_role == "assistant" and e.turns == () and not script.requests
        e.next()
        assert e.next_role == "tool" and not tool.seen
        assert e.asked == (FunctionCall("add", '{"numbers": [1, 2]}'),)
        assert e.turns[0].text == add(1, 2) and e.turns[0].calls == ()
        e.next()
        assert [turn.role for turn in e.turns] == ["assistant", "tool"] and e.turns[1].text == "2 numbers, 3"
        assert e.turns[0].calls[0].reward == 2.0 and tool.open
        e.run()
        assert e.next_role is None and [turn.text for turn in e.turns[-2:]] == ["3 numbers, 6", "6"]
        assert e.output.extra["tool_totals"] == {"add": 6.0} and not tool.open
        assert e.output.extra["tool_rewards"] == [2.0, 3.0] and e.output.num_turns == 6
        with pytest.raises(PipelineError, match="over"):
            e.next()

    def test_the_same_as_the_rollouts_own(self, tokenizer: Any) -> None:
        texts = [add(1, 2), "3"]
        stage = EpisodeRollout(Script(tokenizer, texts * 2), agent=ToolAgent([Counter()], parser=Tags()), group_size=1,
                               sampling=SAMPLING)  # fmt: skip
        whole = stage(prompts().select_idxs([1])).batch
        e = EpisodeRollout(Script(tokenizer, texts), agent=ToolAgent([Counter()], parser=Tags()), group_size=1,
                           sampling=SAMPLING).episode(prompts().select_idxs([1]), 0).run()  # fmt: skip
        assert all(torch.equal(whole[name], e.batch[name]) for name in whole.batch)
        assert whole["turns"][0] == e.batch["turns"][0] and whole["agent_extra"][0] == e.batch["agent_extra"][0]

    def test_a_tools_answer_replaced_and_run_on(self, tokenizer: Any) -> None:
        tool = Counter()
        e, script = scripted(tokenizer, [add(1, 2), "3", "41"], ToolAgent([tool], parser=Tags()))
        e.run()
        kept = e.turns
        e.replace(1, "41")
        assert e.next_role == "assistant" and e.turns[1].text == "41" and e.turns[1].edited and not e.turns[0].edited
        assert e.turns[0].calls[0].result == "41" and e.turns[0].calls[0].reward is None
        e.run()
        assert e.turns[2].text == "41" and tokenizer.decode(script.requests[-1].ids).count("41") == 1
        assert script.requests[-1].seed == script.requests[-2].seed, "the turn's own seed"
        assert e.turns[:1] != kept[:1] and e.output.extra["num_tool_calls"] == 1

    def test_the_models_turn_replaced(self, tokenizer: Any) -> None:
        tool = Counter()
        e, _ = scripted(tokenizer, [add(1, 2), "3", "9"], ToolAgent([tool], parser=Tags()))
        e.run().replace(0, add(4, 5))
        assert e.next_role == "tool" and e.asked[0].arguments == '{"numbers": [4, 5]}'
        assert e.output.response_mask == (1,) * len(e.output.response_ids)
        e.run()
        assert [turn.text for turn in e.turns] == [add(4, 5), "2 numbers, 9", "9"]
        assert [turn.edited for turn in e.turns] == [True, False, False]
        assert e.output.extra["tool_totals"] == {"add": 9.0} and not tool.open

    def test_a_tool_that_remembers_is_told_what_it_was_asked(self, tokenizer: Any) -> None:
        """The second call's answer depends on the first, also after going back over it."""
        tool = Counter()
        e, _ = scripted(tokenizer, [add(1, 2), add(3), "6", "7"], ToolAgent([tool], parser=Tags()))
        e.run().replace(2, add(10))
        e.next()
        assert e.turns[3].text == "3 numbers, 13"
        e.run()
        assert e.output.extra["tool_totals"] == {"add": 13.0} and not tool.open
        assert e.back(3).next().turns[3].text == "3 numbers, 13"
        e.close()
        assert not tool.open

    def test_what_was_answered_by_hand_no_tool_hears_of(self, tokenizer: Any) -> None:
        tool = Counter()
        e, _ = scripted(tokenizer, [add(1, 2), add(3), "6"], ToolAgent([tool], parser=Tags()))
        e.next().say("by hand").next().next()
        assert e.turns[3].text == "1 numbers, 3"

    def test_several_calls_need_several_answers(self, tokenizer: Any) -> None:
        agent = ToolAgent([Counter()], parser=Tags(), max_parallel_calls=2)
        e, _ = scripted(tokenizer, [add(1) + add(2) + add(3), "6"], agent)
        e.next()
        assert len(e.asked) == 2
        with pytest.raises(SettingError, match="2 texts"):
            e.say("one")
        e.say(["one", "two"])
        assert [one.result for one in e.turns[0].calls] == ["one", "two", ""]
        assert e.turns[0].calls[2].status == "ignored" and e.turns[1].text == "one\ntwo"

    def test_a_fork_goes_its_own_way(self, tokenizer: Any) -> None:
        tool = Counter()
        e, _ = scripted(tokenizer, [add(1, 2), "a", "b"], ToolAgent([tool], parser=Tags()))
        e.next().next()
        f = e.fork().replace(1, "other")
        assert e.turns[1].text == "2 numbers, 3" and f.turns[1].text == "other"
        e.run()
        f.run()
        assert (e.turns[-1].text, f.turns[-1].text) == ("a", "b") and not tool.open

    def test_another_attempt_is_another_seed(self, tokenizer: Any) -> None:
        e, script = scripted(tokenizer, ["1", "2", "3"], ToolAgent([Counter()], parser=Tags()))
        e.next().back().next(attempt=1).back().next(temperature=0.5)
        first, again, cooler = script.requests
        assert first.seed != again.seed and first.seed == cooler.seed
        assert (again.settings.temperature, cooler.settings.temperature) == (1.0, 0.5)

    def test_refused(self, tokenizer: Any) -> None:
        e, _ = scripted(tokenizer, [add(1), "2"], ToolAgent([Counter()], parser=Tags()))
        with pytest.raises(PipelineError, match="at least one turn"):
            e.back()
        with pytest.raises(SettingError, match="1 to 239 tokens.*raise max_tokens"):
            e.say("7 " * 300)
        e.next()
        with pytest.raises(SettingError, match="the model's turns"):
            e.next(attempt=1)
        with pytest.raises(PipelineError, match="turns 0 to 0"):
            e.back(3)
        with pytest.raises(IndexError, match="rows 0 to 3"):
            EpisodeRollout(Script(tokenizer, []), agent=ToolAgent(), group_size=2).episode(prompts(), 4)

    def test_what_cannot_be_said_changes_nothing(self, tokenizer: Any) -> None:
        tool = Counter()
        agent = ToolAgent([tool], parser=Tags(), max_parallel_calls=2)
        e, _ = scripted(tokenizer, [add(1) + add(2), "3", "4"], agent)
        e.run()
        said = e.turns
        for turn, text, match in (
            (1, ["one"], "2 texts, one for each call"),
            (1, 99, "found 99"),
            (2, 99, "expected a text; found 99"),
            (2, ["a", "b"], "expected a text"),
            (0, "7 " * 300, "shorten it"),
        ):
            with pytest.raises(SettingError, match=match):
                e.replace(turn, text)  # type: ignore[arg-type]
            assert e.turns == said and e.next_role is None
        for turn in (7, "1", 1.5):
            with pytest.raises(PipelineError, match="turns 0 to 2"):
                e.back(turn)  # type: ignore[arg-type]
        for attempt in (-1, "a"):
            with pytest.raises(SettingError, match="whole number"):
                e.back().next(attempt)  # type: ignore[arg-type]
        fresh, _ = scripted(tokenizer, ["3"], agent)
        assert fresh.back(to=0) is fresh and fresh.next(max_tokens=1).turns[0].last == 0

    def test_a_turn_that_is_only_begun_by_hand(self, tokenizer: Any) -> None:
        e, script = scripted(tokenizer, ["9", " 7"], ToolAgent([Counter()], parser=Tags()))
        e.run().replace(0, "So 3 + 4 =", end=False)
        assert e.turns[0].text == "So 3 + 4 = 7" and e.turns[0].edited and e.next_role is None
        begun = tokenizer("So 3 + 4 =", add_special_tokens=False)["input_ids"]
        assert list(script.requests[-1].ids[-len(begun) :]) == begun and e.output.response_ids[: len(begun)] == tuple(
            begun
        )
        assert script.requests[-1].settings.max_tokens == 240 - len(begun) and len(e.output.response_logprobs) > len(
            begun
        )
        assert e.output.metrics["max_version"] == 3

    def test_a_loop_without_states_is_looked_at_as_a_whole(self, tokenizer: Any) -> None:
        class Mine(AgentLoopBase):
            async def run(self, sampling_params: Any, **row: Any) -> Any:
                raise AssertionError

        with pytest.raises(SettingError, match="views.transcript"):
            EpisodeRollout(Script(tokenizer, []), agent=Mine(), group_size=1).episode(prompts(), 0)


class TestUsers:
    def start(self, tokenizer: Any, texts: list[str]) -> tuple[EpisodeStepper, User]:
        user = User()
        agent = ToolAgent(interactions=[user])
        return scripted(tokenizer, texts, agent, interaction_kwargs={"name": "wants", "word": "yes"})[0], user

    def test_the_users_turn(self, tokenizer: Any) -> None:
        e, user = self.start(tokenizer, ["no", "yes"])
        e.next()
        assert e.next_role == "user" and e.turns[0].score is None
        e.next()
        assert e.turns[1].text == "say yes" and e.turns[0].score == 0.5
        e.run()
        assert e.turns[-1].score == 1.0 and not user.open and e.output.extra["turn_scores"] == [0.5, 1.0]

    def test_edited_and_asked_again(self, tokenizer: Any) -> None:
        e, user = self.start(tokenizer, ["no", "yes", "maybe", "yes"])
        e.run()
        heard = len(user.heard)
        e.replace(2, "still no")
        assert len(user.heard) == heard + 1, "told of the first answer anew"
        assert user.heard[-1][-1]["content"] == "no" and len(user.open) == 1
        e.next()
        assert [one["content"] for one in user.heard[-1]] == ["Add.", "no", "say yes", "still no"]
        assert e.turns[3].text == "say yes" and e.turns[2].score == 0.5
        e.say("yes").run() if e.next_role == "assistant" else e.run()
        assert not user.open and len(set(user.ended)) == len(user.ended)

    def test_the_users_words_by_hand(self, tokenizer: Any) -> None:
        e, user = self.start(tokenizer, ["no", "yes"])
        e.next().say("please say yes")
        assert not user.heard and e.turns[1].edited and e.turns[0].score is None
        e.run()
        assert e.turns[-1].score == 1.0

    def test_a_score_stays_where_the_words_beside_it_are_changed(self, tokenizer: Any) -> None:
        e, _ = self.start(tokenizer, ["no", "yes", "yes"])
        e.run().replace(1, "please").run()
        assert e.output.extra["turn_scores"] == [0.5, 1.0] and e.turns[0].extra == {"word": "yes"}


# --- in a step -------------------------------------------------------------------------------


def length(response: str) -> float:
    return float(len(response))


@pytest.fixture(scope="module")
def step(request: pytest.FixtureRequest) -> wb.Stepper:
    engine = local(request.getfixturevalue("tiny"), lr=1e-3)
    agent = ToolAgent([Adder(lambda given: ToolResponse(text="7"))], parser=Always(), max_assistant_turns=2,
                      max_tokens_per_turn=20)  # fmt: skip
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"))
    pipe = grpo(engine, length, agent=agent, group_size=2, sampling=SAMPLING)
    return wb.Stepper(pipe, rows.batch(2)).run()


@pytest.mark.slow
def test_a_recorded_episode_is_rebuilt_from_its_columns(step: wb.Stepper) -> None:
    batch = step.trace["rollout"].batch
    stage = step.pipeline["rollout"]
    for row in range(len(batch)):
        again = step.episode(row).batch
        mine = batch.select_idxs([row])
        assert again["turns"][0] == mine["turns"][0] and again["agent_extra"][0] == mine["agent_extra"][0]
        assert recorded_output(again, 0).response_ids == recorded_output(batch, row).response_ids
        assert recorded_output(again, 0).response_logprobs == recorded_output(batch, row).response_logprobs
    whole = stage.rewritten(step.trace.start, batch, {}).batch
    assert all(torch.equal(whole[name], batch[name]) for name in batch.batch)


@pytest.mark.slow
def test_going_back_and_on_gives_the_very_same_episode(step: wb.Stepper) -> None:
    """With the weights that it was sampled with, though the step has updated them since."""
    for row in (0, 3):
        e = step.episode(row)
        said = e.output.response_ids
        assert len(e.turns) == 3 and e.back(to=0).run().output.response_ids == said
        assert e.fork().back(to=1).run().output.response_ids == said
    assert step.next_stage is None and step.run().trace.names[-1] == "update_actor"


def test_what_the_tool_might_have_said_put_into_the_step(step: wb.Stepper) -> None:
    e = step.episode(1).replace(1, "500000")
    assert e.next_role == "assistant"
    with pytest.raises(PipelineError, match="not over; found assistant turn next"):
        step.with_episodes(e)
    e.run()
    for wrong in ((e, e), (e.batch,)):
        with pytest.raises(PipelineError, match="one for each row"):
            step.with_episodes(*wrong)
    t = step.with_episodes(e)
    assert t.next_stage == "reward" and t.batch["turns"][1][1]["edited"]
    assert t.trace["rollout"].settings["edited_rows"] == "1"
    t.run()
    before, after = step.trace["rollout"].batch, t.trace["rollout"].batch
    for name in ("responses", "response_mask", "rollout_log_probs"):
        width = min(before[name].shape[1], after[name].shape[1])
        rows = [0, 2, 3]
        assert torch.equal(before[name][rows][:, :width], after[name][rows][:, :width])
    assert before["response_text"][1] != after["response_text"][1]
    assert t.trace.metrics["actor/grad_norm"] != step.trace.metrics["actor/grad_norm"]
    assert "response_text" in repr(step.compare(t)) or "responses" in repr(step.compare(t))
    assert step.batch["turns"][1][1]["edited"] is False


def test_words_put_into_the_models_mouth_have_the_policys_log_probs(step: wb.Stepper) -> None:
    e = step.episode(2).replace(0, "I will call.")
    ids = e.output.response_ids
    assert e.tokenizer.decode(list(ids)) == "I will call.<|im_end|>" and set(e.output.response_mask) == {1}
    engine: Any = step.pipeline["rollout"].sampler
    step.fork().back(to="rollout")  # whose weights they are
    expected = engine.compute_log_probs(e.batch)["log_probs"][0]
    assert torch.allclose(torch.tensor(e.output.response_logprobs), expected, atol=1e-6) and (expected < 0).all()


@pytest.mark.slow
def test_looking_moves_no_weights_and_another_batch_is_refused(step: wb.Stepper) -> None:
    engine: Any = step.pipeline["rollout"].sampler
    step.fork().back(to="update_actor").run()
    stood = engine.state_id
    e = step.episode(0)
    said = e.output.response_ids
    assert repr(e) and wb.views.transcript(e) and engine.state_id == stood
    e.replace(0, "I will call.").run()
    assert e.output.version == step.trace["rollout"].batch["policy_version"][0] < engine.version
    assert e.back(to=0).run().output.response_ids == said and engine.state_id == stood, (
        "the rollout's weights were lent"
    )
    with pytest.raises(IndexError, match="rows 0 to 3"):
        step.episode("a")  # type: ignore[arg-type]
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"))
    other = wb.Stepper(step.pipeline, rows.batch(2, step=2)).run(until="rollout")
    with pytest.raises(PipelineError, match=r"of another batch; s|of another batch; use this stepper's episode\(0\)"):
        other.with_episodes(e)


def test_before_the_rollout(step: wb.Stepper) -> None:
    s = step.fork().back(to="rollout")
    with pytest.raises(PipelineError, match="no episodes yet"):
        s.with_episodes(step.episode(0))
    e = s.episode(3).run()
    assert e.output.response_ids == step.episode(3).output.response_ids and s.next_stage == "rollout"
    judged = s.pipeline["reward"](e.batch).batch
    assert float(judged["reward"][0]) == float(step.trace["reward"].batch["reward"][3])


@pytest.mark.slow
def test_a_pipeline_without_agents(tiny: str) -> None:
    engine = local(tiny, lr=1e-3)
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"))
    s = wb.Stepper(grpo(engine, wb.rewards.math_string, group_size=2, max_tokens=4), rows.batch(1))
    with pytest.raises(PipelineError, match="agent="):
        s.episode(0)


def test_views(step: wb.Stepper, tokenizer: Any) -> None:
    from support.lint import lint

    view = wb.views.transcript(step, 1)
    turns = step.batch["turns"][1]
    assert list(view.frame["role"]) == ["assistant", "tool", "assistant"] and list(view.frame["mask"]) == [1, 0, 1]
    assert list(view.frame["first"]) == [turn["first"] for turn in turns]
    html, text = view._repr_html_(), repr(view)
    assert not lint(html) and f"tokens {turns[1]['first']} to {turns[1]['last']} · mask 0" in text
    own = wb.views.tokens(step, 1).frame["own"]
    assert own.sum() == sum(turn["last"] + 1 - turn["first"] for turn in turns if turn["role"] == "assistant")
    assert f"{own.sum()} of {len(own)} tokens are in the loss" in text and "add(" in text
    assert "tool calls as sampled, template tokens" in html and "&lt;|im_end|&gt;" in html and "add</b>" in html
    e = step.episode(1).back(to=1)
    assert "next: the tool, add(" in repr(e) and not lint(e._repr_html_()) and "row 1" in repr(e)
    e.say("<b>hot</b>")
    assert "written by hand" in repr(e) and "<b>hot" not in e._repr_html_() and not lint(e._repr_html_())
    assert json.loads(wb.views.transcript(e).frame.to_json(orient="records"))[1]["edited"] is True


@pytest.mark.slow
def test_a_row_without_turns_is_one_turn(tiny: str) -> None:
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet"))
    s = wb.Stepper(grpo(local(tiny), wb.rewards.math_string, group_size=2, max_tokens=4), rows.batch(1)).run("rollout")
    view = wb.views.transcript(s, 1)
    assert list(view.frame["role"]) == ["assistant"] and view.frame["last"][0] == len(wb.views.tokens(s, 1).frame) - 1


def test_the_face_of_a_loop() -> None:
    from support.lint import lint

    @wb.agents.function_tool
    def hot(number: int, note: str = "") -> str:
        """Says <b>hot</b>."""
        return note * number

    html = ToolAgent([hot], parser=Tags(), interactions=[User()], max_assistant_turns=4)._repr_html_()
    assert not lint(html) and "number: integer, note: string (optional)" in html and "&lt;b&gt;hot" in html
    assert "users: wants" in html and "max_assistant_turns" in html and ">4<" in html
    assert "SingleTurn" in wb.agents.SingleTurn()._repr_html_()
