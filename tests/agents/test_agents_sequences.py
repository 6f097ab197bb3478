"""Episodes of several sequences: stripped reasoning, compaction, sub-agents; as rows, scored and compared once, stepped."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from agents_parts import Adder, Script, Tags, User, call
from transformers import AutoTokenizer

from workbench.agents import AgentLoopOutput, ToolAgent, TurnTokens, sub_agent
from workbench.agents.episode import Episode
from workbench.agents.protocol import sequences
from workbench.base.errors import SettingError
from workbench.engines import SamplingSettings

TINY = "data/tiny-arith"
STRIPPING = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% set text = m.content %}
{%- if m.role == 'assistant' and loop.index0 < ns.last %}{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3's: the reasoning of turns before the last user message is left out."""


def tokenizer(template: str | None = None) -> Any:
    made = AutoTokenizer.from_pretrained(TINY)
    if template:
        made.chat_template = template
    return made


def play(agent: ToolAgent, sampler: Script, limit: int = 400, **row: Any) -> tuple[AgentLoopOutput, ...]:
    agent.prepare(sampler)
    asked = {"raw_prompt": [{"role": "user", "content": "2 and 3?"}], **row}
    found = asyncio.run(agent.bound(Episode(sampler, "u")).run(SamplingSettings(max_tokens=limit).to_dict(), **asked))
    return sequences(found, "the agent")


def read(made: Any, ids: tuple[int, ...]) -> str:
    return str(made.decode(list(ids)))


def of_word(word: str = "yes") -> dict[str, Any]:
    return {"extra_info": {"interaction_kwargs": {"name": "wants", "word": word}}}


# --- the tool agent --------------------------------------------------------------------------------


def test_stripped_reasoning_begins_a_new_sequence_with_what_the_template_writes() -> None:
    made = tokenizer(STRIPPING)
    says = ["<think>hm</think>\n\nno", "<think>well</think>\n\nyes"]
    alone = play(ToolAgent(interactions=[User()]), Script(made, says), **of_word())
    assert len(alone) == 1
    first, second = play(ToolAgent(interactions=[User()], history="template"), Script(made, says), **of_word())
    chat = [
        {"role": "user", "content": "2 and 3?"},
        {"role": "assistant", "content": says[0]},
        {"role": "user", "content": "say yes"},
    ]
    assert second.prompt_ids == TurnTokens(made).prompt(chat) and "hm" not in read(made, second.prompt_ids)
    assert read(made, first.response_ids) == says[0] + made.eos_token and set(first.response_mask) == {1}
    assert [turn.role for turn in first.turns] == ["assistant", "user"] and first.turns[1].last < first.turns[1].first
    assert read(made, second.response_ids).startswith(says[1])
    assert second.response_logprobs[:2] == (-1 / 8, -2 / 8)


def test_a_template_that_keeps_the_history_is_one_sequence_of_the_same_tokens() -> None:
    made = tokenizer(STRIPPING)
    says = [call(numbers=[2, 3]), "no", "yes"]
    for one in (says, ["<think>a</think>" + says[0], "yes"]):  # no user message between: nothing is stripped
        plain = play(ToolAgent([Adder()], parser=Tags(), interactions=[User()]), Script(made, one), **of_word())
        kept = ToolAgent([Adder()], parser=Tags(), interactions=[User()], history="template")
        found = play(kept, Script(made, one), **of_word())
        assert [replace(a, metrics={}) for a in found] == [replace(a, metrics={}) for a in plain]


def compacting(**settings: Any) -> ToolAgent:
    return ToolAgent([Adder()], parser=Tags(), compact_prompt="Sum up.", **settings)


def test_a_full_context_is_summed_up_and_the_next_sequence_goes_on_from_the_summary() -> None:
    made = tokenizer(STRIPPING)
    says = [call(numbers=[2, 3]), "<think>so</think>the sum is 5", call(numbers=[5, 1]), "it was 6", "6"]
    script = Script(made, says)
    found = play(compacting(compact_at=40), script)
    assert [[turn.role for turn in one.turns] for one in found] == [["assistant", "tool", "assistant"]] * 2 + [
        ["assistant"]
    ]
    assert read(made, found[0].response_ids).endswith(
        "5\n\nSum up.<|im_end|>\n<|im_start|>assistant\n" + says[1] + made.eos_token
    )
    chat = [{"role": "user", "content": "2 and 3?\n\nWhat has been done so far: the sum is 5"}]
    assert found[1].prompt_ids == TurnTokens(made).prompt(chat)
    assert sum(found[0].response_mask) == sum(len(made(one)["input_ids"]) + 1 for one in says[:2])
    assert [len(one.turns[0].calls) for one in found] == [1, 1, 0] and found[2].turns[0].text == "6"
    assert [one.finish_reason for one in found] == ["stop"] * 3
    assert [request.ids for request in script.requests[2:3]] == [found[1].prompt_ids]


def test_limits_hold_for_the_episode_and_sequences_are_bounded() -> None:
    made = tokenizer(STRIPPING)
    says = [call(numbers=[2, 3]), "so far 5"] * 30
    found = play(compacting(compact_at=20, max_sequences=3), Script(made, says))
    assert len(found) == 3 and found[-1].finish_reason == "turns"
    turns = play(compacting(compact_at=20, max_assistant_turns=2), Script(made, says))  # summaries are not counted
    assert (
        sum(turn.role == "assistant" for one in turns for turn in one.turns) == 3 and turns[-1].finish_reason == "turns"
    )
    calls = play(compacting(compact_at=20, max_tool_calls=2), Script(made, says))
    assert sum(one.ran for part in calls for turn in part.turns for one in turn.calls) == 2
    usual = ToolAgent([Adder()], parser=Tags()).describe()
    assert not {"history", "compact_at", "compact_prompt", "max_sequences"} & usual.keys()
    assert compacting(compact_at=20).describe()["compact_at"] == 20
    for wrong in ({"history": "strip"}, {"compact_at": 0}, {"max_sequences": 0}, {"compact_prompt": ""}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            ToolAgent(**wrong)


def leading(inner: ToolAgent | None = None, **settings: Any) -> ToolAgent:
    inner = inner or ToolAgent([Adder()], parser=Tags())
    tool = sub_agent(inner, name="helper", description="Does a sum.", system="You add.")
    return ToolAgent([tool], parser=Tags(), **settings)


def by_prompt(text: str) -> str:
    """The sub-agent, which has a system prompt, adds; the other one asks it."""
    last = text.rpartition("<|im_start|>user\n")[2]
    if "You add." in text:
        return "<think>x</think>it is 5" if "tool" in last else call(numbers=[2, 3])
    return "done" if "it is 5" in text else call("helper", task="add 2 and 3")


def test_a_sub_agents_sequences_come_first_and_its_answer_is_read() -> None:
    made = tokenizer(STRIPPING)
    script = Script(made, by_prompt)
    theirs, mine = play(leading(), script)
    assert theirs.extra["sub_agent"] == {"name": "helper", "turn": 1, "number": 0} and "sub_agent" not in mine.extra
    assert [turn.text for turn in mine.turns[1:]] == ["it is 5", "done"]
    assert read(made, theirs.prompt_ids).startswith(
        "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\nadd 2 and 3"
    )
    assert [turn.role for turn in theirs.turns] == ["assistant", "tool", "assistant"]
    assert len({request.seed for request in script.requests}) == 4
    assert leading().describe()["sub_agents"]["helper"]["system"] == "You add."
    with pytest.raises(SettingError, match="loop of a sub-agent"):
        sub_agent("tool_agent", name="x", description="y")  # type: ignore[arg-type]
