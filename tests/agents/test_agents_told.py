"""Tools that the model is never told of are refused before anything is sampled, or told by a stated choice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from agents_parts import Adder, Script, schema
from transformers import AutoTokenizer

import workbench as wb
from workbench.agents import AgentLoopBase, Episode, SubAgent, ToolAgent, TurnTokens, endpoint
from workbench.agents.parsers import calls_of, parser_names, tool_parser, tools_text
from workbench.base import runtime
from workbench.base.errors import SettingError
from workbench.engines.http.openai_form import Refusal
from workbench.engines.protocol import SamplingSettings

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As SmolLM2's: it writes any role, and no tools."""
FIRST = "{% if tools %}{{ 'tools: ' + tools[0].function.name + '\\n' }}{% endif %}" + CHATML
"""Writes the first tool alone."""
WITHOUT_SYSTEM = "{% if tools and messages[0].role != 'system' %}{{ tools | tojson }}{% endif %}" + CHATML
"""Writes the tools in the place of a system message, where there is none."""
ADD = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call>'
ASKED = [{"role": "user", "content": "2 and 3?"}]
TOOLS = [schema("add", numbers="array"), schema("address", street="string")]


class Address(Adder):
    name = "address"


def tokenizer(template: str | None) -> Any:
    kept = AutoTokenizer.from_pretrained("data/tiny-arith")
    kept.chat_template = template
    return kept


def play(agent: ToolAgent, sampler: Script, **row: Any) -> Any:
    agent.prepare(sampler)
    settings = SamplingSettings(max_tokens=400).to_dict()
    return asyncio.run(agent.bound(Episode(sampler, "u")).run(settings, **{"raw_prompt": ASKED, **row}))


@pytest.mark.parametrize(
    ("template", "left"),
    [(CHATML, "add, address"), (FIRST, "address"), (None, "add, address")],
    ids=["all", "one", "base"],
)
def test_a_template_that_leaves_tools_out_is_refused_by_their_names(template: str | None, left: str) -> None:
    """It trained, and the model never heard of its tools: a prompt with them was the prompt without."""
    sampler = Script(tokenizer(template), ["x"])
    agent = ToolAgent([Adder(), Address()], parser="hermes")
    with pytest.raises(SettingError, match=f"does not show the model the tools {left}; .*tools_in='system'"):
        agent.prepare(sampler)
    with pytest.raises(SettingError, match="does not show the model the tools add"):  # a sub-agent is an agent
        inner = ToolAgent([Adder()], parser="hermes")
        outer = ToolAgent([SubAgent(inner, name="helper", description="Adds.")], parser="hermes", tools_in="system")
        outer.prepare(Script(tokenizer(CHATML), []))
    assert not sampler.requests


def test_a_pipeline_with_such_an_agent_is_refused_when_it_is_built() -> None:
    engine = wb.engines.local("data/tiny-arith")
    engine.tokenizer.chat_template = CHATML
    with pytest.raises(SettingError, match="does not show the model the tools add"):
        wb.recipes.grpo(engine, lambda response_text: 1.0, agent=ToolAgent([Adder()], parser="hermes"))
    told = ToolAgent([Adder()], parser="hermes", tools_in="system")
    pipe = wb.recipes.grpo(engine, lambda response_text: 1.0, agent=told)
    assert "tools_in" in str(pipe["rollout"].settings()["agent"])


def test_tools_that_a_system_message_displaces_are_refused_in_the_row_that_has_one() -> None:
    sampler = Script(tokenizer(WITHOUT_SYSTEM), ["x", "y"])
    agent = ToolAgent([Adder()], parser="hermes")
    assert play(agent, sampler).turns[0].text == "x"
    with pytest.raises(
        SettingError, match="tools add; .*found none of that in a prompt that begins with a system message"
    ):
        play(agent, sampler, raw_prompt=[{"role": "system", "content": "Be brief."}, *ASKED])
    assert len(sampler.requests) == 1


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_the_system_message_tells_them_and_the_episode_is_the_same_in_all_else(system: str) -> None:
    sampler = Script(tokenizer(CHATML), [ADD, "It is 5."])
    agent = ToolAgent([Adder()], parser="hermes", tools_in="system")
    prompt = [*([{"role": "system", "content": system}] if system else []), *ASKED]
    output = play(agent, sampler, raw_prompt=prompt)
    text = sampler.tokenizer.decode(output.prompt_ids)
    instructions = tools_text("system", [Adder().get_openai_tool_schema()], tool_parser("hermes"))
    rest = f"\n\n{system}" if system else ""
    assert text == (
        f"<|im_start|>system\n{instructions}{rest}<|im_end|>\n<|im_start|>user\n2 and 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert json.dumps(Adder().get_openai_tool_schema()) in instructions and '{"name": "NAME"' in instructions
    own = [one for one, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    assert sampler.tokenizer.decode(own) == f"{ADD}<|im_end|>It is 5.<|im_end|>"
    assert (
        output.extra["num_tool_calls"] == 1 and sampler.requests[1].ids[: len(output.prompt_ids)] == output.prompt_ids
    )
    assert agent.describe()["tools_in"] == "system" and "tools_in" not in ToolAgent([Adder()]).describe()


def test_a_row_that_may_use_one_tool_is_told_of_that_one() -> None:
    sampler = Script(tokenizer(CHATML), ["x"])
    agent = ToolAgent([Adder(), Address()], parser="hermes", tools_in="system")
    output = play(agent, sampler, tool_config={"available_tools": ["address"]})
    text = sampler.tokenizer.decode(output.prompt_ids)
    assert '"name": "address"' in text and '"name": "add"' not in text


FORMS = [name for name in parser_names() if getattr(tool_parser(name), "call_form", "")]


@pytest.mark.parametrize("name", FORMS)
def test_a_call_in_the_form_that_a_parser_tells_is_one_that_it_reads(name: str) -> None:
    parser = tool_parser(name)
    arguments = json.dumps({"numbers": [2, 3]})
    written = parser.call_form.replace("NAME", "add").replace("ARGUMENTS", arguments)
    (one,) = calls_of(parser, written, TOOLS)
    assert (one.name, json.loads(one.arguments)) == ("add", {"numbers": [2, 3]})


def test_a_parser_without_a_form_is_refused_with_those_that_have_one() -> None:
    assert {"hermes", "llama3_json", "mistral", "deepseek_v3"} <= set(FORMS)
    with pytest.raises(SettingError, match="with KimiParser; expected .*call_form.*parser= one of hermes"):
        ToolAgent([Adder()], parser="kimi", tools_in="system").prepare(Script(tokenizer(CHATML), []))
    for place, agent in (("user", {"parser": "hermes"}), ("system", {"format": "react"})):
        with pytest.raises(SettingError, match="tools_in"):
            ToolAgent([Adder()], tools_in=place, **agent).prepare(Script(tokenizer(CHATML), []))
    ToolAgent([Adder()], format="react").prepare(Script(tokenizer(CHATML), []))  # its first message tells them


def test_a_clients_tools_are_refused_by_name_or_told_by_the_endpoints_choice() -> None:
    sampler = Script(tokenizer(CHATML), [ADD, "It is 5."])
    with endpoint(sampler, parser="hermes") as address, address.session() as session:
        with pytest.raises(Refusal, match="does not show the model the tools add, address") as caught:
            runtime.run(session.chat(messages=ASKED, tools=TOOLS))
        assert caught.value.status == 400 and caught.value.body["error"]["param"] == "tools" and not sampler.requests
        runtime.run(session.chat(messages=ASKED))
    sampler = Script(tokenizer(CHATML), [ADD, "It is 5."])
    with endpoint(sampler, parser="hermes", tools_in="system") as address, address.session() as session:
        reply = runtime.run(session.chat(messages=ASKED, tools=TOOLS))["choices"][0]["message"]
        answer = {"role": "tool", "content": "5", "tool_call_id": reply["tool_calls"][0]["id"]}
        runtime.run(session.chat(messages=[*ASKED, {"role": "assistant", **reply}, answer], tools=TOOLS))
        (output,) = session.sequences()
    assert tools_text("system", TOOLS, tool_parser("hermes")) in sampler.tokenizer.decode(output.prompt_ids)
    assert output.num_turns == 4


def test_a_loop_of_verls_that_shows_tools_is_refused_too() -> None:
    class Loop(AgentLoopBase):
        async def run(self, sampling_params: Any, **row: Any) -> Any:
            return await self.apply_chat_template(row["raw_prompt"], tools=TOOLS)

    with pytest.raises(SettingError, match="does not show the model the tools add, address"):
        asyncio.run(Loop().bound(Episode(Script(tokenizer(CHATML), []), "u")).run({}, raw_prompt=ASKED))


def test_a_name_inside_another_word_is_not_that_tool() -> None:
    """`add` in the description of `address`, say: it stands there as a word, or it was not told."""
    with pytest.raises(SettingError, match="the model the tools add;"):
        TurnTokens(tokenizer(FIRST), tools=list(reversed(TOOLS)))
