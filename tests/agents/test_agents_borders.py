"""What is at the borders of an episode: reasoning, cut turns, parallel calls, rows that say nothing, cancellation, odd values."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
import inspect
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
from agents_parts import QWEN, Adder, Script, Tags, User, call, tokenizers
from test_agents_loops import play

import workbench as wb
from workbench.agents import (
    AgentLoopBase,
    AgentLoopOutput,
    BaseInteraction,
    BaseTool,
    Calculator,
    FunctionCall,
    Gsm8kInteraction,
    ToolAgent,
    ToolResponse,
    Transcript,
    TurnTokens,
    function_tool,
    register,
)
from workbench.agents.calls import Toolbox
from workbench.agents.parsers import calls_of, outside_reasoning
from workbench.agents.protocol import plain
from workbench.base.errors import DataError, SettingError


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    return tokenizers(request.getfixturevalue("tiny"))


@pytest.fixture
def thinking(request: pytest.FixtureRequest) -> Any:
    """A tokenizer whose template opens the model's reasoning."""
    tokenizer = tokenizers(request.getfixturevalue("tiny"))["qwen"]
    opened = "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    tokenizer.chat_template = QWEN.replace("{{- '<|im_start|>assistant\\n' }}", opened)
    return tokenizer


def hermes(expression: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': {'expression': expression}})}</tool_call>"


def asked(output: AgentLoopOutput) -> list[tuple[str, str]]:
    return [(one.status, json.loads(one.arguments)["expression"]) for turn in output.turns for one in turn.calls]


# --- C5: reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turn",
    [
        f"<think>I could {hermes('6 * 6')}</think>{hermes('2 + 3')}",
        f"<think>a</think><think>{hermes('6 * 6')}</think>{hermes('2 + 3')}",
        f"{hermes('6 * 6')}</think>{hermes('2 + 3')}",
        f"{hermes('2 + 3')}<think>or {hermes('6 * 6')}",
        f"<reasoning>{hermes('6 * 6')}</reasoning>{hermes('2 + 3')}",
    ],
)
def test_the_call_is_run_and_not_the_one_that_was_considered(made: dict[str, Any], turn: str) -> None:
    found = play(ToolAgent([Calculator()], parser="hermes"), Script(made["own"], [turn, "5"]))
    assert asked(found) == [("ok", "2 + 3")] and found.turns[1].text == "5"


def test_a_prompt_that_opens_the_reasoning_is_known(made: dict[str, Any], thinking: Any) -> None:
    assert TurnTokens(thinking).reasoning and not any(TurnTokens(one).reasoning for one in made.values())
    agent = ToolAgent([Calculator()], parser="hermes")
    texts = [
        f"hm {hermes('6 * 6')} no</think>{hermes('2 + 3')}",
        f"so {hermes('7 * 7')}",
    ]  # the second is cut off by its end
    found = play(agent, Script(thinking, texts))
    assert asked(found) == [("ok", "2 + 3")] and [one.role for one in found.turns] == ["assistant", "tool", "assistant"]


def test_a_parser_of_yours_is_given_the_text_without_reasoning(made: dict[str, Any], thinking: Any) -> None:
    texts = [f"<think>{call(numbers=[9])}</think>so {call(numbers=[2, 3])}", f"<think>{call(numbers=[8])}"]
    found = play(ToolAgent([Adder()], parser=Tags()), Script(made["own"], texts))
    assert [one.arguments for turn in found.turns for one in turn.calls] == ['{"numbers": [2, 3]}']
    found = play(ToolAgent([Adder()], parser=Tags()), Script(thinking, [call(numbers=[9])]))
    assert not any(turn.calls for turn in found.turns)
    assert outside_reasoning("a<think>b</think>c</think>d<think>e") == "d"


# --- turns that were cut, parsers that are wrong --------------------------------------------------------


def test_a_call_that_was_cut_short_is_not_run(made: dict[str, Any]) -> None:
    whole = hermes("2 + 34")
    agent = ToolAgent([Calculator()], parser="hermes", max_tokens_per_turn=10_000)
    length = len(made["own"](whole, add_special_tokens=False)["input_ids"])
    statuses = set()
    for limit in range(1, length + 2):
        agent.max_tokens_per_turn = limit
        found = play(agent, Script(made["own"], [whole, "5"]))
        calls = asked(found)
        assert calls in ([], [("ok", "2 + 34")]), (limit, calls)
        statuses.add(len(calls))
    assert statuses == {0, 1}


def test_a_parser_must_read_texts_and_return_calls(made: dict[str, Any]) -> None:
    class Verls:
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any) -> Any:
            return "", []

    with pytest.raises(SettingError, match="parser Verls; .*which is not async.*reads text and is not async"):
        ToolAgent([Adder()], parser=Verls())  # type: ignore[arg-type]

    class Returns:
        def __init__(self, found: Any) -> None:
            self.found = found

        def extract_tool_calls(self, text: str, tools: Any) -> Any:
            return self.found

    for wrong in (None, ("", [{"name": "add"}]), ("", [FunctionCall("add", {"numbers": []})]), ("", "add")):
        found = play(ToolAgent([Adder()], parser=Returns(wrong)), Script(made["own"], ["hm"]))
        assert found.extra["errors"][0].startswith("the parser failed: TypeError"), wrong
    bare = ("", [FunctionCall("add", None)])  # type: ignore[arg-type] # a call without arguments, as OpenAI's clients write it
    (call,) = calls_of(Returns(bare), "hm", [])  # type: ignore[arg-type]
    assert (call.name, call.arguments) == ("add", "{}")


# --- C6: parallel calls -----------------------------------------------------------------------------


class Counter(BaseTool):
    """Counts its calls in a state that takes its time to be made."""

    SCHEMA = {"name": "count", "parameters": {}}  # noqa: RUF012 - read only

    def __init__(self) -> None:
        super().__init__()
        self.created: list[str | None] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.created.append(instance_id)
        await asyncio.sleep(0.001)
        return await super().create(instance_id, count=0)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.instances[instance_id]["count"] += 1
        return ToolResponse(text=str(self.instances[instance_id]["count"])), None, {}


def test_parallel_calls_of_a_stateful_tool_share_its_state(made: dict[str, Any]) -> None:
    tool = Counter()
    turn = '<tool_call>{"name": "count", "arguments": {}}</tool_call>' * 3
    found = play(ToolAgent([tool], parser="hermes", max_parallel_calls=3), Script(made["own"], [turn, "3"]))
    assert [one.result for one in found.turns[0].calls] == ["1", "2", "3"]
    assert len(tool.created) == 1 and tool.instances == {}


class Opening(Adder):
    """Fails or is slow when it is first created; a second instance beside one that was not released is an error."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first = first

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        made = await super().create(instance_id, **kwargs)
        if len(self.created) == 1:
            await self.first()
        return made if len(self.created) % 2 else instance_id  # the id alone: verl's up to 0.4


async def breaks() -> None:
    raise RuntimeError("no room")


@pytest.mark.parametrize(
    ("first", "status"), [(breaks, "error"), (lambda: asyncio.sleep(60), "late"), (lambda: asyncio.sleep(0), "ok")]
)
def test_a_tool_whose_creation_fails_is_released_and_created_anew(first: Any, status: str) -> None:
    tool = Opening(first)
    box = Toolbox([tool], seconds_per_call=0.2, max_tool_response_length=99, truncate_side="middle")

    async def run() -> list[str]:
        tools = box.opened("e", {})
        call = FunctionCall("add", '{"numbers": [1]}')
        found = [await tools.call(call), await tools.call(call)]
        found += await asyncio.gather(*(tools.call(call) for _ in range(3)))
        await tools.close()
        assert tools.errors == []
        return [one.status for one in found]

    assert asyncio.run(run()) == [status, "ok", "ok", "ok", "ok"]
    assert len(tool.created) == 1 + (status != "ok") and not tool.open


def test_a_tool_with_a_method_that_is_not_async_is_refused() -> None:
    class Plain(Adder):
        def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
            return instance_id, ToolResponse()

    with pytest.raises(SettingError, match="tool 'add'; expected `async def create`.*found a method that is not async"):
        ToolAgent([Plain()], parser=Tags())


def test_a_cancelled_close_releases_every_tool() -> None:
    """One that is slow to be released does not keep the others."""

    class Slow(Adder):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            await asyncio.sleep(0.01)
            return 1.0

    listed = [Slow("a"), Slow("b"), Slow("c")]
    box = Toolbox(listed, seconds_per_call=30, max_tool_response_length=99, truncate_side="middle")

    async def run() -> None:
        tools = box.opened("e", {})
        for tool in listed:
            await tools.call(FunctionCall(tool.name, '{"numbers": []}'))
        assert all(tool.open for tool in listed)
        closing = asyncio.ensure_future(tools.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not any(tool.open for tool in listed) and tools.errors == []
        assert await tools.close() == {}

    asyncio.run(run())


# --- C11: rows without interaction_kwargs ------------------------------------------------------------


class Nods(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return True, "yes", 1.0, {"info": np.float32(0.5)}


def test_the_only_user_speaks_in_every_row(made: dict[str, Any]) -> None:
    for row in ({}, {"extra_info": {}}, {"extra_info": None}, {"extra_info": {"interaction_kwargs": None}}):
        found = play(ToolAgent(interactions={"nods": Nods()}), Script(made["own"], ["5"]), **row)
        assert found.extra["turn_scores"] == [1.0] and found.turns[0].to_dict()["extra"] == {"info": 0.5}, row
    found = play(ToolAgent(interactions=[Gsm8kInteraction()]), Script(made["own"], ["5"]))
    assert found.finish_reason == "abort" and "ground_truth" in found.extra["errors"][0]
    two = ToolAgent(interactions={"a": User(), "b": User()})
    with pytest.raises(DataError, match=r"interaction_kwargs of row 0 \(uid u\) have no name; expected one of a, b"):
        play(two, Script(made["own"], ["5"]))
    asks = {"extra_info": {"interaction_kwargs": {"name": "nods"}}}
    with pytest.raises(DataError, match="'nods' is not a simulated user of the agent"):
        play(ToolAgent([Adder()], parser=Tags()), Script(made["own"], ["5"]), **asks)


# --- C12: the sampler's longest sequence ---------------------------------------------------------------


class Short(Script):
    """Refuses what is longer than its longest sequence, as vLLM does."""

    max_length = 160

    async def sample(self, request: Any) -> Any:
        assert 0 < request.settings.max_tokens <= self.max_length - len(request.ids)
        return await super().sample(request)


class Talks(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return False, "and then? " * 3, 0.5, {}


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        (ToolAgent([Calculator()], parser="hermes"), hermes("2 + 3")),
        (ToolAgent([Calculator(), Adder(lambda given: "1 " * 99)], parser="hermes", max_parallel_calls=2),
         hermes("2 + 3") + '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        (ToolAgent(interactions=[Talks()]), "so "),
        (ToolAgent(interactions=[Talks()]), "so " * 200),
    ],
)  # fmt: skip
def test_an_episode_ends_where_the_samplers_longest_sequence_does(made: dict[str, Any], agent: Any, text: str) -> None:
    found = play(agent, Short(made["own"], [text]), max_tokens=5000)
    assert found.finish_reason == "length" and len(found.prompt_ids) + len(found.response_ids) <= Short.max_length


def test_a_loop_that_asks_on_beyond_it_gets_nothing_once(made: dict[str, Any]) -> None:
    class Talker(AgentLoopBase):
        name, heeds = "talker", True

        async def run(self, sampling_params: Any, **row: Any) -> AgentLoopOutput:
            said = Transcript(tuple(made["own"]("2 + 2?")["input_ids"]), sampling_params["max_tokens"])
            while said.reason != "length" or not self.heeds:
                sample = await self.generate(said.context, sampling_params)
                said.say(sample, "")
                said.reason = sample.finish_reason
            return said.output(self.episode)

    found = play(Talker(), Short(made["own"], ["so it is "]), max_tokens=5000)
    assert len(found.prompt_ids) + len(found.response_ids) == Short.max_length
    Talker.heeds = False
    with pytest.raises(
        DataError,
        match=r"row 0 \(uid u\): its loop samples too much; .*end at finish_reason 'length'",
    ):
        play(Talker(), Short(made["own"], ["so it is "]), max_tokens=5000)
    shorter = Short(made["own"], ["so"])
    shorter.max_length = 5
    with pytest.raises(DataError, match="prompt of row 0 .*expected 1 to 4 tokens"):
        play(ToolAgent(interactions=[Talks()]), shorter)


# --- C10: a loop as verl's users write it ---------------------------------------------------------------


@register("as_verls_users_write")
class Pasted(AgentLoopBase):
    """It reads the configuration, renders by the base class, samples twice and fills in verl's fields."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length
        assert self.rollout_config.prompt_length > 10**6

    async def run(self, sampling_params: Any, **kwargs: Any) -> AgentLoopOutput:
        messages, metrics = list(kwargs["raw_prompt"]), dict[str, Any]()
        media = await self.process_vision_info(messages)
        prompt_ids = await self.apply_chat_template(messages, tools=[], images=media.get("images"), videos=None)
        first = await self.server_manager.generate(
            request_id="a", prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=media.get("images")
        )
        new = [{"role": "user", "content": "sure?"}]
        more = await self.apply_chat_template(new, remove_system_prompt=True)
        ids = first.token_ids + more
        last = await self.server_manager.generate("a", prompt_ids=prompt_ids + ids, sampling_params=sampling_params)
        metrics["num_preempted"] = first.num_preempted if first.num_preempted is not None else -1
        mask = [1] * len(first.token_ids) + [0] * len(more) + [1] * len(last.token_ids)
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(prompt_ids + ids))
        made = AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=(ids + last.token_ids)[: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=(first.log_probs + [0.0] * len(more) + last.log_probs)[: self.response_length],
            routed_experts=first.routed_experts,
            multi_modal_data=media,
            num_turns=4,
            metrics=metrics,
            extra_fields={"read": text},
        )
        made.extra_fields.update({"turn_scores": [], "tool_rewards": []})
        return made


def test_a_loop_of_verls_needs_a_new_import_line_alone(tiny: str) -> None:
    batch = wb.rows("data/arith/train.parquet").batch(2).with_meta(seed=3, step=1)
    for agent in ("as_verls_users_write", Pasted):
        stage = wb.stages.EpisodeRollout(
            wb.engines.local(tiny), agent=agent, group_size=2, sampling=wb.SamplingSettings(max_tokens=50)
        )
        found = stage(batch).batch
        read = found["agent_extra"][0]["read"]
        assert read.endswith("<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"), read
        assert (found["rollout_log_probs"] < 0).any() and set(found["num_turns"]) == {4}
    with pytest.raises(SettingError, match="constructor of Pasted reads verl's configuration.*agent=Pasted"):
        Pasted()
    with pytest.raises(DataError, match="multi_modal_data of an agent loop's output; expected none: text alone"):
        AgentLoopOutput((1,), (2,), (1,), multi_modal_data={"images": ["x"]})


# --- D7: a row's own tools ----------------------------------------------------------------------------


def test_a_row_may_have_some_of_the_tools(made: dict[str, Any]) -> None:
    def twice(number: int) -> int:
        """Doubles."""
        return 2 * number

    agent = ToolAgent([Calculator(), function_tool(twice)], parser="hermes")
    turns = [hermes("2 + 3"), "5"]
    for row, names in (
        ({}, {"calculator", "twice"}),
        ({"tool_config": {"available_tools": ["calculator"], "tool_format": "function_calling"}}, {"calculator"}),
        ({"extra_info": {"tool_config": {"available_tools": ["twice"], "tool_format": None}}}, {"twice"}),
        ({"tool_config": {"available_tools": None}}, {"calculator", "twice"}),
    ):
        sampler = Script(made["qwen"], turns)
        found = play(agent, sampler, **row)
        prompt = made["qwen"].decode(found.prompt_ids)
        assert {name for name in ("calculator", "twice") if f'"{name}"' in prompt} == names
        assert found.turns[0].calls[0].status == ("ok" if "calculator" in names else "unknown")
    nothing = play(agent, Script(made["qwen"], turns), tool_config={"available_tools": []})
    assert [one.calls for one in nothing.turns] == [()]
    for wrong, why in (
        (
            {"available_tools": ["calculater"]},
            r"row 0 \(uid u\): 'calculater' is not a tool .*did you mean 'calculator'",
        ),
        ({"tool_format": "react"}, "tool_format in tool_config of row 0 .*expected function_calling; found 'react'"),
        ({"max_tool_calls": 5}, "'max_tool_calls' is not a key of tool_config"),
        ({"available_tools": "calculator"}, "expected a list of names; found 'calculator'"),
        (["calculator"], "tool_config of row 0 .*expected {available_tools"),
    ):
        with pytest.raises(DataError, match=why):
            play(agent, Script(made["qwen"], turns), tool_config=wrong)


# --- N9: what a tool returns ---------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: Any


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "0.5"),
        (np.int64(7), "7"),
        (np.bool_(True), "true"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        (np.datetime64("2024-05-01"), "2024-05-01"),
        (np.array(["2024-05-01"], "M8[ns]"), '["2024-05-01T00:00:00.000000000"]'),
        (torch.tensor(3), "3"),
        (torch.tensor([0.5], requires_grad=True), "[0.5]"),
        (Decimal("1.10"), "1.10"),
        (Fraction(1, 3), "1/3"),
        (datetime.date(2024, 5, 1), "2024-05-01"),
        ({"at": datetime.datetime(2024, 5, 1, 12)}, '{"at": "2024-05-01T12:00:00"}'),
        ({10, 9, 1}, "[1, 9, 10]"),
        (frozenset({"b", 1, None}), '[null, 1, "b"]'),
        ({2: {1.5}, "a": (1, b"x")}, '{"2": [1.5], "a": [1, "x"]}'),
        ({"a": 1}.keys(), '["a"]'),
        (b"\xc3\xa9", "é"),
        (b"\xff\x00", "/wA="),
        (Colour.RED, "red"),
        (Point(1, {Decimal(2)}), '{"x": 1, "y": ["2"]}'),
        (UUID(int=0), "00000000-0000-0000-0000-000000000000"),
        (PurePosixPath("a/b"), "a/b"),
        ("a\ud800b", "a\ufffdb"),
        ([None], "[null]"),
        (True, "true"),
        ({"é": [1, None]}, '{"é": [1, null]}'),
    ],
)
def test_what_a_tool_returns_is_read_as_json(value: Any, text: str) -> None:
    """A function's value, and a foreign tool's response, are converted by one rule."""

    def gives() -> Any:
        return value

    for tool in (function_tool(gives), Adder(lambda given: (value, None, {}))):
        record = one_call(tool)
        assert (record.result, record.status) == (text, "ok")


def one_call(tool: Any) -> Any:
    box = Toolbox([tool], seconds_per_call=30, max_tool_response_length=999, truncate_side="middle")
    return asyncio.run(box.opened("e", {}).call(FunctionCall(tool.name, "{}")))


def test_what_has_no_form_in_json_is_named() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value, why in (
        (object(), "a value of type object has no form in JSON"),
        ([1, {"a": 1j}], "a value of type complex has no form in JSON: 1j"),
        ({1: "a", "1": "b"}, "two keys of a dict have the same text"),
        (int, "a value of type type has no form in JSON"),
        (iter([]), "a value of type list_iterator has no form in JSON"),
        (loop, "one that contains itself"),
    ):

        def gives(value: Any = value) -> Any:
            return value

        gives.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        record = one_call(function_tool(gives))
        assert record.status == "error" and why in record.result, record
    with pytest.raises(DataError, match="text of a tool's response; expected a text, or None; found 5"):
        ToolResponse(text=5)  # type: ignore[arg-type]
    assert math.isnan(plain({"a": [float("nan")]})["a"][0])


# --- Kimi's ids, and an episode's faults ------------------------------------------------------------------


def test_a_calls_own_id_comes_back_with_its_answer(made: dict[str, Any]) -> None:
    tokenizer = made["qwen"]
    tokenizer.chat_template = QWEN.replace(
        "{{- message.content }}{{- '\\n</tool_response>",
        "{{- '[' ~ message.tool_call_id ~ ']' ~ message.content }}{{- '\\n</tool_response>",
    )
    assert "tool_call_id" in tokenizer.chat_template
    ids = [f"functions.calculator:{number}" for number in range(2)]
    section = "".join(
        f'<|tool_call_begin|>{one}<|tool_call_argument_begin|>{{"expression": "1 + {n}"}}<|tool_call_end|>'
        for n, one in enumerate(ids)
    )
    turn = f"<|tool_calls_section_begin|>{section}<|tool_calls_section_end|>"
    try:
        agent = ToolAgent([Calculator()], parser="kimi", max_parallel_calls=2)
        found = play(agent, Script(tokenizer, [turn, "so"]), max_tokens=900)
    finally:
        tokenizer.chat_template = QWEN
    text = tokenizer.decode(found.response_ids)
    assert [one.tool_call_id for one in found.turns[0].calls] == ids
    assert f"[{ids[0]}]1\n" in text and f"[{ids[1]}]2\n" in text
    assert [one["tool_call_id"] for one in found.turns[0].to_dict()["calls"]] == ids


def test_each_fault_of_an_output_has_its_own_sentence() -> None:
    good: dict[str, Any] = {
        "prompt_ids": (1,),
        "response_ids": (2,),
        "response_mask": (1,),
        "response_logprobs": (0.0,),
    }
    assert AgentLoopOutput(**good).response_ids == (2,)
    for changes, why in (
        ({"prompt_ids": ()}, "prompt_ids of an agent loop's output; expected at least one token id"),
        ({"response_mask": (1, 1)}, "of one length; found 1 response ids, 2 mask values, 1 log-probs"),
        ({"response_mask": (2,)}, "response_mask of .*expected 0 or 1 for each response id; found 2 at index 0"),
        (
            {"response_logprobs": (float("nan"),)},
            "response_logprobs of .*expected finite numbers; found nan at index 0",
        ),
        ({"response_logprobs": (None,)}, "response_logprobs of .*found None at index 0"),
        ({"response_ids": None}, "response_ids of an agent loop's output; expected a sequence; found None"),
        ({"response_mask": "1"}, "response_mask of an agent loop's output; expected a sequence; found '1'"),
    ):
        with pytest.raises(DataError, match=why):
            AgentLoopOutput(**{**good, **changes})


def test_a_text_that_no_file_can_hold_does_not_end_the_step(made: dict[str, Any]) -> None:
    """The model writes an unpaired surrogate into a call, the tool and the user say it back."""
    turn = '<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>'

    def echo(text: str) -> str:
        return text

    class Echoes(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return True, "\ud800", 1.0, {"\ud800": "\ud800"}

    agent = ToolAgent([function_tool(echo)], parser="hermes", interactions={"e": Echoes()})
    found = play(agent, Script(made["own"], [turn, "so"]))
    assert found.turns[0].calls[0].result == "\ufffd"
    for one in found.turns:
        json.dumps(one.to_dict(), ensure_ascii=False).encode()
