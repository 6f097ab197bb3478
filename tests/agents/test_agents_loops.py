"""Loops by hand: one row each, with small tools, users and a scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents_parts import LLAMA, NO_SYSTEM, Adder, Script, Tags, User, call, tokenizers

from workbench.agents import (
    AgentLoopBase,
    AgentLoopOutput,
    AgentState,
    Episode,
    Loops,
    SingleTurn,
    ToolAgent,
    ToolResponse,
    Turn,
    agent_loop,
    register,
    register_agent_loop,
    truncate,
)
from workbench.base import runtime
from workbench.base.errors import DataError, SettingError
from workbench.base.seeds import derive
from workbench.engines.protocol import Sample, SamplingSettings

CHAT = [{"role": "user", "content": "what is 2+3?"}]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    return tokenizers(request.getfixturevalue("tiny"))


def play(loop: AgentLoopBase, sampler: Any, max_tokens: int = 400, **row: Any) -> AgentLoopOutput:
    loop.prepare(sampler)
    episode = Episode(sampler, uid="u", sample=1, run_seed=7, step=2)
    sampling = SamplingSettings(max_tokens=max_tokens).to_dict()
    return runtime.run(loop.bound(episode).run(sampling, raw_prompt=CHAT, **row))


def test_a_call_is_run_and_the_model_reads_the_answer(made: dict[str, Any]) -> None:
    tool, tokenizer = Adder(), made["own"]
    sampler = Script(tokenizer, ["so " + call(numbers=[2, 3]), "it is 5"])
    found = play(ToolAgent([tool], parser=Tags()), sampler)
    text = tokenizer.decode(found.prompt_ids + found.response_ids)
    asked = 'so <call>{"name": "add", "arguments": {"numbers": [2, 3]}}</call>'
    assert text == (
        "<|im_start|>system\ntools: add<|im_end|>\n<|im_start|>user\nwhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
        f"{asked}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\nit is 5<|im_end|>"
    )
    own = [one for one, mask in zip(found.response_ids, found.response_mask, strict=True) if mask]
    assert tokenizer.decode(own) == asked + "<|im_end|>it is 5<|im_end|>"
    assert all((p != 0) == bool(m) for p, m in zip(found.response_logprobs, found.response_mask, strict=True))
    assert found.num_turns == 4 and found.finish_reason == "stop" and found.version == 3
    said, heard, last = found.turns
    assert [one.role for one in found.turns] == ["assistant", "tool", "assistant"]
    assert (said.first, said.last + 1, heard.last + 1, last.last + 1) == (
        0,
        heard.first,
        last.first,
        len(found.response_ids),
    )
    assert said.calls[0].status == "ok" and said.calls[0].result == "5" == heard.text
    assert found.extra["tool_rewards"] == [0.25] and found.extra["tool_totals"] == {"add": 2.0}
    assert found.extra["num_tool_calls"] == 1 and not tool.open
    # the second turn was sampled after exactly what stands in the output, from the seed of turn 1
    assert sampler.requests[1].ids == found.prompt_ids + found.response_ids[: last.first]
    assert [one.seed for one in sampler.requests] == [derive(7, "rollout", 2, "u", 1, n, 0) for n in (0, 1)]
    assert sampler.requests[1].settings.max_tokens == 400 - last.first


BROKEN = {
    "unknown": (call("ad", numbers=[1]), "no tool named 'ad'; tools: add; did you mean add"),
    "invalid": ("<call>{numbers</call>", "not valid JSON"),
    "error": (call(wrong=1), "Error when executing tool add: KeyError: 'numbers'"),
    "late": (call(numbers=[1], seconds=60), "no answer within 0.1 s"),
}


@pytest.mark.parametrize("status", BROKEN)
def test_a_failing_tool_is_an_answer(made: dict[str, Any], status: str) -> None:
    tool = Adder()
    text, answer = BROKEN[status]
    loop = ToolAgent([tool], parser=Tags(), seconds_per_call=0.1, max_tool_response_length=200)
    found = play(loop, Script(made["own"], [text, "sorry"]))
    record = found.turns[0].calls[0]
    assert record.status == status and record.reward == 0.0 and answer in record.result
    assert answer in made["own"].decode(found.response_ids) and found.extra["tool_rewards"] == [0.0]
    assert found.turns[-1].text == "sorry" and found.finish_reason == "stop" and not tool.open


@pytest.mark.parametrize(
    "answer",
    [
        lambda given: (ToolResponse(text="x"), float("nan"), {}),
        lambda given: (1, 2),
        lambda given: ("x", "much", {}),
        lambda given: 1 / 0,
    ],
)
def test_what_no_tool_should_give_is_an_error_text(made: dict[str, Any], answer: Any) -> None:
    found = play(ToolAgent([Adder(answer)], parser=Tags()), Script(made["own"], [call(numbers=[1]), "well"]))
    assert found.turns[0].calls[0].status == "error" and found.extra["tool_rewards"] == [0.0]


@pytest.mark.slow
def test_a_tool_that_will_not_be_cancelled_costs_its_limit(made: dict[str, Any]) -> None:
    class Stubborn(Adder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            while not self.may_end:
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    self.most += 1
            return ToolResponse(text="late"), None, {}

        may_end = False

    tool = Stubborn()
    found = play(ToolAgent([tool], parser=Tags(), seconds_per_call=0.2), Script(made["own"], [call(), "ok"]))
    assert tool.most and found.turns[0].calls[0].status == "late"
    tool.may_end = True


def test_extra_calls_are_seen_and_not_run(made: dict[str, Any]) -> None:
    tool = Adder(seconds=0.05)
    three = call(numbers=[1]) + call(numbers=[2]) + call(numbers=[3])
    found = play(ToolAgent([tool], parser=Tags()), Script(made["own"], [three, "1"]))
    assert [one.status for one in found.turns[0].calls] == ["ok", "ignored", "ignored"]
    assert found.extra["num_tool_calls"] == 1 and found.turns[1].text == "1"
    found = play(ToolAgent([tool], parser=Tags(), max_parallel_calls=2), Script(made["qwen"], [three, "1"]))
    assert [one.result for one in found.turns[0].calls] == ["1", "2", ""] and tool.most == 2
    both = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert both in made["qwen"].decode(found.response_ids) and len(tool.created) == 2


def test_limits_of_turns(made: dict[str, Any]) -> None:
    for limit in ({"max_assistant_turns": 3}, {"max_user_turns": 2}):
        tool = Adder()
        found = play(ToolAgent([tool], parser=Tags(), **limit), Script(made["own"], [call(numbers=[1])]), 2000)
        assert [one.role for one in found.turns] == ["assistant", "tool"] * 2 + ["assistant"]
        assert found.finish_reason == "turns" and found.num_turns == 6
        assert found.turns[-1].calls[0].status == "not run" and found.extra["num_tool_calls"] == 2
    found = play(ToolAgent([Adder()], parser=Tags(), max_assistant_turns=1), Script(made["own"], ["5"]))
    assert found.finish_reason == "stop"


def test_the_response_is_never_longer_than_its_limit(made: dict[str, Any]) -> None:
    spoken = len(made["own"](call(numbers=[1]))["input_ids"]) + 1
    for room in (spoken - 5, spoken, spoken + 3, spoken + 30, 3 * spoken):
        found = play(ToolAgent([Adder()], parser=Tags()), Script(made["own"], [call(numbers=[1])]), room)
        assert len(found.response_ids) <= room and found.finish_reason == "length"
        assert found.response_mask[-1] == 1 or found.turns[-1].role == "assistant"
    found = play(ToolAgent([Adder()], parser=Tags()), Script(made["own"], [call(numbers=[1])]), spoken + 3)
    assert found.turns[-1].role == "tool" and found.turns[-1].last < found.turns[-1].first
    assert "left out" in found.turns[-1].cut and len(found.response_ids) == spoken and found.num_turns == 2
    found = play(ToolAgent([Adder()], parser=Tags(), max_tokens_per_turn=4), Script(made["own"], ["one two three"]))
    assert len(found.response_ids) == 4 and found.turns[0].cut == "cut short at 4 tokens"


def test_truncation_says_its_side(made: dict[str, Any]) -> None:
    text = "0123456789"
    assert truncate(text, 10, "left") == (text, "")
    assert truncate(text, 4, "left") == ("(truncated)...6789", "6 of 10 characters cut from the left")
    assert truncate(text, 4, "right") == ("0123...(truncated)", "6 of 10 characters cut from the right")
    assert truncate(text, 5, "middle") == ("012...(truncated)...89", "5 of 10 characters cut from the middle")
    assert truncate(text, 1, "middle")[0] == "0...(truncated)..."
    tool = Adder(lambda given: ToolResponse(text="a" * 100 + "b" * 100))
    loop = ToolAgent([tool], parser=Tags(), max_tool_response_length=6, tool_response_truncate_side="left")
    found = play(loop, Script(made["own"], [call(numbers=[]), "5"]))
    assert found.turns[1].text == "(truncated)...bbbbbb"
    assert found.turns[1].cut == "add: 194 of 200 characters cut from the left" and found.turns[0].calls[0].cut


def test_react(made: dict[str, Any]) -> None:
    tool = Adder(lambda given: ToolResponse(text=repr(given)))
    spoken = [
        'Thought: add\nAction: add\nAction Input: {"numbers": [2]}\nObservation:',
        "Thought: so\nAction: add\nAction Input: 2 + 2",
        "5",
    ]
    sampler = Script(made["no system"], spoken)
    found = play(ToolAgent([tool], format="react"), sampler)
    assert [one.text for one in found.turns if one.role == "tool"] == [
        "Observation: {'numbers': [2]}",
        "Observation: {'numbers': '2 + 2'}",
    ]
    prompt = made["no system"].decode(found.prompt_ids)
    assert prompt.startswith("<start_of_turn>user\nYou can use these tools:\n- add: adds.") and "2+3?" in prompt
    assert sampler.requests[0].settings.stop == ("Observation:",)
    assert "<end_of_turn>\n<start_of_turn>user\nObservation: " in made["no system"].decode(found.response_ids)


def test_a_simulated_user_answers_scores_and_is_let_go(made: dict[str, Any]) -> None:
    user = User()
    row = {"extra_info": {"interaction_kwargs": {"name": "wants", "word": "five"}}}
    found = play(ToolAgent(interactions=[user]), Script(made["own"], ["six", "five"]), **row)
    assert [(one.role, one.text) for one in found.turns] == [
        ("assistant", "six"),
        ("user", "say five"),
        ("assistant", "five"),
    ]
    assert found.extra["turn_scores"] == [0.5, 1.0] and [one.score for one in found.turns] == [0.5, None, 1.0]
    assert user.heard[1] == [
        *CHAT,
        {"role": "assistant", "content": "six"},
        {"role": "user", "content": "say five"},
        {"role": "assistant", "content": "five"},
    ]
    assert user.ended and not user.open and found.finish_reason == "stop"
    found = play(ToolAgent(interactions=[user], max_assistant_turns=2), Script(made["own"], ["six"]), **row)
    assert found.extra["turn_scores"] == [0.5, 0.5] and found.finish_reason == "turns"
    assert "the user's answer was left out: say five" in found.turns[-1].cut
    found = play(ToolAgent(interactions=[user]), Script(made["own"], ["six"]))
    assert found.extra["turn_scores"] == []  # the row names no user


def test_a_user_that_fails_ends_the_row_alone(made: dict[str, Any]) -> None:
    for word, why in (
        ("!", "the user hung up"),
        ("?", "the answer of interaction 'wants'; expected (stop: bool, text: str, sc"),
    ):
        user = User()
        found = play(
            ToolAgent(interactions=[user]),
            Script(made["own"], ["hm"]),
            extra_info={"interaction_kwargs": {"word": word}},
        )
        assert found.finish_reason == "abort" and why in found.turns[-1].error and why in found.extra["errors"][0]
        assert user.ended
    user = User()
    found = play(
        ToolAgent(interactions=[user]), Script(made["own"], ["hm"]), extra_info={"interaction_kwargs": {"no": 1}}
    )
    assert "start_interaction: KeyError" in found.extra["errors"][0] and user.ended and found.response_ids == ()
    told = r"row 0 \(uid u\): 'want' is not .*did you mean 'wants'.*; give interactions=\{'want': User\(\)\}"
    with pytest.raises(DataError, match=told):
        play(
            ToolAgent(interactions=[user]), Script(made["own"], []), extra_info={"interaction_kwargs": {"name": "want"}}
        )


@pytest.mark.parametrize(
    "answer",
    ["well done", (True, "good", 1.0), (True, "good", float("nan"), {}), (True, "x", "1", {}), (True, 3, 1.0, {}), 7],
)
def test_whatever_is_wrong_with_a_users_reply_the_record_says_what_one_is(made: dict[str, Any], answer: Any) -> None:
    class Wrong(User):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return answer

    row = {"extra_info": {"interaction_kwargs": {"word": "x"}}}
    found = play(ToolAgent(interactions=[Wrong()]), Script(made["own"], ["hm"]), **row)
    shape = "expected (stop: bool, text: str, score: a finite number, extra: dict); found " + type(answer).__name__
    assert found.extra["errors"][0].startswith(f"generate_response: the answer of interaction 'wants'; {shape}")
    assert found.finish_reason == "abort" and found.turns[-1].error == found.extra["errors"][0]


def test_of_several_users_a_row_names_one(made: dict[str, Any]) -> None:
    loop = ToolAgent(interactions={"a": User(), "b": User()})
    with pytest.raises(DataError, match=r"interaction_kwargs of row 0 \(uid u\) have no name; expected one of a, b"):
        play(loop, Script(made["own"], []), extra_info={"interaction_kwargs": {"word": "x"}})
    found = play(loop, Script(made["own"], ["x"]), extra_info={"interaction_kwargs": {"word": "x", "name": "b"}})
    assert found.extra["turn_scores"] == [1.0]


def test_a_user_may_give_no_score(made: dict[str, Any]) -> None:
    class Silent(User):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return True, "", None, None

    row = {"extra_info": {"interaction_kwargs": {"word": "x"}}}
    found = play(ToolAgent(interactions=[Silent()]), Script(made["own"], ["hm"]), **row)
    assert found.extra["turn_scores"] == [] and found.extra["errors"] == [] and found.finish_reason == "stop"


def test_tools_and_user_are_let_go_when_the_episode_is_cancelled_or_the_sampler_breaks(made: dict[str, Any]) -> None:
    class Broken(Script):
        async def sample(self, request: Any) -> Sample:
            if len(self.requests) == 1:
                raise RuntimeError("no more")
            return await super().sample(request)

    row = {"raw_prompt": CHAT, "extra_info": {"interaction_kwargs": {"word": "five"}}}
    tool, user = Adder(), User()
    loop = ToolAgent([tool], parser=Tags(), interactions=[user])
    with pytest.raises(RuntimeError, match="no more"):
        play(loop, Broken(made["own"], [call(numbers=[1])]), **{"extra_info": row["extra_info"]})
    assert tool.created and not tool.open and user.ended and not user.open

    async def cancelled() -> None:
        episode = Episode(Script(made["own"], [call(numbers=[1], seconds=3600)]))
        task = asyncio.create_task(loop.bound(episode).run(SamplingSettings(max_tokens=200).to_dict(), **row))
        while not (tool.open and user.open):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runtime.run(cancelled())
    assert not tool.open and not user.open and len(user.ended) == 2


def test_kwargs_of_the_row_reach_the_tools(made: dict[str, Any]) -> None:
    tool = Adder()
    row = {"extra_info": {"tools_kwargs": {"add": {"create_kwargs": {"ground_truth": "5"}}}}}
    play(ToolAgent([tool], parser=Tags()), Script(made["own"], [call(numbers=[1]), call(numbers=[2]), "3"]), **row)
    assert tool.created == [{"ground_truth": "5", "create_kwargs": {"ground_truth": "5"}}]  # one instance an episode


def test_stepping_an_episode_by_its_states(made: dict[str, Any]) -> None:
    loop = ToolAgent([Adder()], parser=Tags()).bound(Episode(Script(made["own"], [call(numbers=[4]), "4"])))

    async def stepped() -> list[AgentState]:
        standing = loop.start(SamplingSettings(max_tokens=200).to_dict(), raw_prompt=CHAT)
        seen = [standing.state]
        while standing.state is not AgentState.TERMINATED:
            seen.append(await loop.advance(standing))
        assert (await loop.finish(standing)).num_turns == 4
        return seen

    s = AgentState
    assert runtime.run(stepped()) == [s.PENDING, s.GENERATING, s.PROCESSING_TOOLS, s.GENERATING, s.TERMINATED]


def test_loops_by_name() -> None:
    assert (
        agent_loop("single_turn_agent")
        is SingleTurn
        is agent_loop("single_turn_agent_loop")
        is agent_loop("single_turn")
    )
    assert agent_loop("tool_agent_loop") is ToolAgent
    with pytest.raises(SettingError, match="did you mean 'tool_agent'"):
        agent_loop("tool_agnet")

    @register("echo")
    class Echo(AgentLoopBase):
        async def run(self, sampling_params: Any, **row: Any) -> AgentLoopOutput:
            return AgentLoopOutput([1], [2, 3], [1, 0], [-0.5, 0.0])  # type: ignore[arg-type]

    assert Loops("echo").named(None).name == "echo" and Loops(Echo()).named("echo")
    alone = ToolAgent([Adder()], parser=Tags(), name="calc")
    assert {Loops(alone).named(name) for name in ("tool_agent", "echo", "no such", None)} == {alone}
    with pytest.raises(SettingError, match=r"default_agent 'echo'; expected none: .*'calc'.* runs every row"):
        Loops(alone, default="echo")
    register_agent_loop("echo again", Echo)
    mine = ToolAgent(name="mine")
    loops = Loops({"mine": mine, "single_turn_agent": "single_turn"}, default="single_turn")
    assert loops.named("mine") is mine and isinstance(loops.named(None), SingleTurn) and loops.named("echo again")
    with pytest.raises(SettingError, match="did you mean 'mine'"):
        loops.named("mime")
    with pytest.raises(SettingError, match=r"agent_name of row 3 \(uid 7\): 'mime' is not a registered agent loop"):
        loops.named("mime", "row 3 (uid 7)")
    told = r"rows name agent 'tool_agent', which has no tools; .*give agent=\{'tool_agent': loop\}"
    with pytest.raises(SettingError, match=told):
        loops.named("tool_agent_loop", "row 3 (uid 7)")
    for bare in ("tool_agent", ToolAgent, {"tool_agent": "tool_agent"}, {"mine": ToolAgent}):
        with pytest.raises(SettingError, match=r"has no tools; .*give an object: agent=ToolAgent"):
            Loops(bare)
    assert Loops({"tool_agent": ToolAgent()}).named("tool_agent").lacks  # where it was meant
    for wrong in (object, AgentLoopBase, type("Sync", (AgentLoopBase,), {"run": lambda self: None})):
        with pytest.raises(SettingError, match="subclass of AgentLoopBase"):
            register_agent_loop("wrong", wrong)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="expected an agent loop"):
        Loops(object())


def test_what_cannot_work_is_refused(made: dict[str, Any]) -> None:
    with pytest.raises(
        SettingError, match="tools and no parser; expected a chat template .*; found one that writes none"
    ):
        ToolAgent([Adder()]).prepare(Script(made["own"], []))
    with pytest.raises(SettingError, match="unique names"):
        ToolAgent([Adder(), Adder()], parser=Tags())
    with pytest.raises(SettingError, match="truncate_side"):
        ToolAgent(tool_response_truncate_side="top")
    with pytest.raises(SettingError, match="max_parallel_calls"):
        ToolAgent(max_parallel_calls=0)
    with pytest.raises(DataError, match="one length"):
        AgentLoopOutput((1,), (2,), (1, 1), (0.0,))
    tokenizer = tokenizers("data/tiny-arith")["own"]
    tokenizer.chat_template = NO_SYSTEM.replace("message.content | trim", "''")
    with pytest.raises(SettingError, match="cannot append a turn of role 'tool'"):
        ToolAgent([Adder()], parser=Tags()).prepare(Script(tokenizer, []))
    assert LLAMA in made["llama"].chat_template


def test_a_parser_that_breaks_costs_the_row_its_calls(made: dict[str, Any]) -> None:
    class Breaks(Tags):
        def extract_tool_calls(self, text: str, tools: Any) -> Any:
            raise IndexError("deep")

    found = play(ToolAgent([Adder()], parser=Breaks()), Script(made["own"], [call(numbers=[1])]))
    assert found.turns[0].error == "the parser failed: IndexError: deep" and found.extra["num_tool_calls"] == 0


def test_what_a_tool_and_a_user_say_of_themselves_is_kept_as_plain_values(made: dict[str, Any]) -> None:
    for said, status in (("no_answer", "refused"), ("infra_error", "error"), ("scored", "ok")):
        record = {"status": said, "why": "no numbers", "seconds": 0.123}
        tool = Adder(lambda given, record=record: (ToolResponse(text="?"), None, record))
        found = play(ToolAgent([tool], parser=Tags()), Script(made["own"], [call(), "5"]))
        asked = found.turns[0].to_dict()["calls"][0]
        assert (asked["status"], asked["why"]) == (status, "no numbers") and "metrics" not in asked
        assert found.turns[0].calls[0].metrics == record and found.extra["tool_rewards"] == []
    turn = Turn("assistant", "x", 0, 0, extra={"info": {1: object, "list": (1, None, {2.5})}})
    assert turn.to_dict()["extra"] == {"info": {"1": "<class 'object'>", "list": [1, None, [2.5]]}}


def test_what_a_row_has_for_its_tools_reaches_each_of_their_methods(made: dict[str, Any]) -> None:
    """verl's four; keys that a parquet file made up for this row are left out; a total that is no number is an error."""
    heard: dict[str, Any] = {}

    class Hears(Adder):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
            heard["create"] = kwargs
            return await super().create(instance_id)

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            heard["execute"] = kwargs
            return await super().execute(instance_id, parameters)

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            heard["calc_reward"] = kwargs
            return float("nan")

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            heard["release"] = kwargs
            await super().release(instance_id)

    acts = ("create", "execute", "calc_reward", "release")
    given = {f"{act}_kwargs": {"mine": act, "another_rows": None} for act in acts}
    loop = ToolAgent([Hears()], parser=Tags())
    output = play(loop, Script(made["own"], [call(numbers=[1, 2]), "3"]), tools_kwargs={"add": given})
    assert heard == {"create": {"create_kwargs": {"mine": "create"}, "mine": "create"}} | {
        act: {"mine": act} for act in acts[1:]
    }
    assert output.extra["tool_totals"] == {} and "calc_reward of add" in output.extra["errors"][0]
