"""Episodes of several sequences: stripped reasoning, compaction, sub-agents; as rows, scored and compared once, stepped."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_parts import Adder, Script, Tags, User, call
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.patience import examples
from transformers import AutoTokenizer

import workbench as wb
from workbench.agents import AgentLoopOutput, SubAgent, ToolAgent, TurnTokens
from workbench.agents.episode import Episode
from workbench.agents.protocol import sequences
from workbench.agents.tools import load_tools
from workbench.base.errors import SettingError
from workbench.dataproto import DataProto
from workbench.dataproto.core import episodes
from workbench.engines import SamplingSettings
from workbench.stages import EpisodeRollout, Reward

TINY = "data/tiny-arith"
STRIPPING = """{% if tools %}{{ '<|im_start|>system\\ntools: ' + tools[0].function.name + '<|im_end|>\\n' }}{% endif %}{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
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


@pytest.mark.skipif(not os.environ.get("WORKBENCH_TOKENIZERS"), reason="WORKBENCH_TOKENIZERS: see fetch_tokenizers.py")
@pytest.mark.parametrize(("name", "sequences"), [("qwen3", 2), ("qwen2_5", 1), ("llama3_1", 1)])
def test_original_templates_decide_where_a_sequence_ends(name: str, sequences: int) -> None:
    """Qwen3's keeps the reasoning between tool calls, and strips it when the user speaks."""
    made = AutoTokenizer.from_pretrained(Path(os.environ["WORKBENCH_TOKENIZERS"]) / name)
    asks = '<tool_call>\n{"name": "add", "arguments": {"numbers": [2, 3]}}\n</tool_call>'
    says = ["<think>\nhm\n</think>\n\n" + asks, "<think>\nso\n</think>\n\nno", "<think>\nwell\n</think>\n\nyes"]
    agent = ToolAgent([Adder()], parser="hermes", interactions=[User()], history="template")
    found = play(agent, Script(made, says), limit=2000, **of_word())
    assert len(found) == sequences
    whole = read(made, found[-1].prompt_ids) + read(made, found[-1].response_ids)
    assert whole.endswith(says[-1] + made.eos_token) and ("hm" in whole) == (sequences == 1)
    if sequences == 2:
        assert says[0] in read(made, found[0].response_ids) and says[1] in read(made, found[0].response_ids)


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
    assert found[1].prompt_ids == TurnTokens(made, tools=[Adder().get_openai_tool_schema()]).prompt(chat)
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


WORDS = st.lists(
    st.sampled_from(["<think>a</think>", "no", "<think>", call(numbers=[1, 2]), "\n", " ö", "</think>yes"]), max_size=3
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(WORDS.map("".join), min_size=1, max_size=7),
    st.sampled_from(["append", "template"]),
    st.sampled_from([None, 25, 60]),
)
@example(["<think>a</think>" + call(numbers=[1, 2]) * 2] * 3, "append", None)
def test_whatever_is_said_nothing_is_tokenised_again(says: list[str], history: str, compact_at: int | None) -> None:
    made = tokenizer(STRIPPING)
    script = Script(made, [*says, "yes"])
    agent = compacting(
        history=history, compact_at=compact_at, interactions=[User()], max_assistant_turns=6, max_sequences=5
    )
    found = play(agent, script, limit=4000, **of_word())  # room for seven turns of three calls: none is cut
    own = [token for one in found for token, mine in zip(one.response_ids, one.response_mask, strict=True) if mine]
    asked = [request.ids for request in script.requests]
    texts = [[*says, "yes"][min(n, len(says))] for n in range(len(asked))]
    assert own == [t for text in texts for t in [*made(text, add_special_tokens=False)["input_ids"], made.eos_token_id]]
    begun = [ids for one in found for ids in asked if ids == one.prompt_ids]
    assert len(begun) >= len({one.prompt_ids for one in found}) and len(found) <= 5
    for one in found:  # each turn was sampled after exactly what stands before it
        for turn in one.turns:
            if turn.role == "assistant":
                assert (*one.prompt_ids, *one.response_ids[: turn.first]) in asked


def leading(inner: ToolAgent | None = None, **settings: Any) -> ToolAgent:
    inner = inner or ToolAgent([Adder()], parser=Tags())
    tool = SubAgent(inner, name="helper", description="Does a sum.", system="You add.")
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
        "<|im_start|>system\ntools: add<|im_end|>\n<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\nadd 2 and 3"
    )
    assert [turn.role for turn in theirs.turns] == ["assistant", "tool", "assistant"]
    assert len({request.seed for request in script.requests}) == 4
    assert leading().describe()["sub_agents"]["helper"]["system"] == "You add."
    with pytest.raises(SettingError, match="loop of a sub-agent"):
        SubAgent("tool_agent", name="x", description="y")  # type: ignore[arg-type]


# --- stepping -----------------------------------------------------------------------------------------


def stepper_on(agent: ToolAgent, script: Script, **row: Any) -> wb.Stepper:
    columns = {
        "raw_prompt": [[{"role": "user", "content": "2 and 3?"}]],
        "uid": ["a"],
        **{k: [v] for k, v in row.items()},
    }
    batch = DataProto.from_single_dict(columns)
    sampling = SamplingSettings(max_tokens=200)
    return wb.Stepper([EpisodeRollout(script, agent=agent, group_size=2, sampling=sampling), Reward(last_text)], batch)


def last_text(response: str) -> float:
    return float(len(response))


AGENTS = {
    "compacted": (compacting(compact_at=40), lambda text: compact_says(text), {}),
    "stripped": (ToolAgent(interactions=[User()], history="template"), lambda text: strip_says(text), of_word()),
    "sub-agent": (leading(), by_prompt, {}),
}


def compact_says(text: str) -> str:
    last = text.rpartition("<|im_start|>")[0].rpartition("<|im_start|>")[2]
    return "sum 5" if "Sum up." in last else "6" if "sum 5" in text else call(numbers=[2, 3])


def strip_says(text: str) -> str:
    return "<think>well</think>\n\nyes" if "say yes" in text else "<think>hm</think>\n\nno"


@pytest.mark.parametrize("name", AGENTS)
def test_an_episode_of_several_sequences_is_stepped_and_put_back(name: str) -> None:
    agent, says, row = AGENTS[name]
    s = stepper_on(agent, Script(tokenizer(STRIPPING), says), **row).run()
    assert list(s.batch["session"]) == [0, 0, 1, 1] and list(s.batch["uid"]) == ["a"] * 4
    whole, part = s.episode(1), s.episode(0)
    assert whole.number == part.number == 0 and len(whole.outputs) == 2 and s.episode(2).number == 1
    for place, one in enumerate(whole.outputs):
        assert torch.equal(whole.batch["responses"][place], s.batch["responses"][place])
        assert one.response_ids == tuple(
            s.batch["responses"][place][
                s.batch["attention_mask"][place, -s.batch["responses"].shape[1] :].bool()
            ].tolist()
        )
    fresh = stepper_on(agent, Script(tokenizer(STRIPPING), says), **row).episode(0).run()
    assert [one.response_ids for one in fresh.outputs] == [one.response_ids for one in whole.outputs]
    for count in range(len(whole.turns)):  # from every place the same episode comes out
        again = s.episode(1).back(to=count)
        assert len(again.turns) == count
        twin = again.fork().run()
        again.run()
        for made in (twin, again):
            assert [(one.prompt_ids, one.response_ids, one.response_mask) for one in made.outputs] == [
                (one.prompt_ids, one.response_ids, one.response_mask) for one in whole.outputs
            ]
            assert made.turns == whole.turns
    same = s.with_episodes(s.episode(1).back().run())
    assert all(
        torch.equal(same.batch[key], s.trace["rollout"].batch[key]) for key in ("responses", "prompts", "response_mask")
    )
    short = s.episode(1).back(to=0).say("yes").run()
    assert short.next_role is None and len(short.outputs) == 1
    t = s.with_episodes(short).run()
    assert list(t.batch["session"]) == [0, 1, 1] and t.trace["rollout"].rows.tolist() == [0] * 3
    shown = wb.views.transcript(s, 1)
    assert len(shown.sequences) == 2 and list(shown.frame["sequence"].unique()) == [1, 2]
    assert len(shown.frame) == sum(len(one.turns) for one in whole.outputs)
    for text in (repr(shown), repr(wb.views.samples(s)), repr(wb.views.tokens(s, 1))):
        assert "episode 0, sequence 2 of 2" in text
    assert "row 0 (episode 0, sequence 1 of 2)" in repr(shown) and "episode 0, sequence 2 of 2" in repr(whole)
    frame = wb.views.samples(s, order="index").frame
    assert list(frame["episode"]) == [0, 0, 1, 1] and wb.views.groups(s)["samples"].tolist() == [2]


# --- learning -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compacting_agent_learns_with_a_clean_audit(tmp_path: Path) -> None:
    """GRPO on the tiny tool world: contexts are compacted, sequences of one episode share its reward."""
    tools = load_tools("data/arith-tools/tools.yaml")
    agent = ToolAgent(
        list(tools.values()), parser="hermes", max_assistant_turns=4, compact_at=70, compact_prompt="Sum up.",
        max_tokens_per_turn=40,
    )  # fmt: skip
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    engine = wb.engines.local("data/tiny-arith-tools", lr=3e-4)
    pipe = wb.recipes.grpo(engine, agent=agent, group_size=4, kl_coef=0.001, max_tokens=160, ppo_mini_batch_size=4)
    run = wb.train_blocking(pipe, rows, steps=3, batch_size=8, run=tmp_path / "run", trace_freq=1, display=None)
    found = run.audit()
    assert found.agrees and not found.unaudited, found.disagreements[:3]
    batch = run.traces[3].batch
    assert len(episodes(batch)) == 32 < len(batch)
    for one in episodes(batch):
        own = [batch["advantages"][row][batch["response_mask"][row].bool()].unique().tolist() for row in one]
        assert len({number for numbers in own for number in numbers}) == 1
    assert run.metrics["agent_loop/sequences/max"].max() > 1


def test_sub_agents_in_lock_step_are_the_same_every_time() -> None:
    """Parallel sub-agents of a row, each with turns of its own, share waves with the other rows; none waits for ever."""
    tool = SubAgent(
        ToolAgent([Adder(seconds=0.01)], parser=Tags()), name="helper", description="Does a sum.", system="You add."
    )
    agent = ToolAgent([tool], parser=Tags(), max_parallel_calls=2)

    def says(text: str) -> str:
        if "You add." in text:
            return by_prompt(text)
        return "done" if "it is 5" in text else call("helper", task="one") + call("helper", task="two")

    found = []
    for _ in range(2):
        sampling = SamplingSettings(max_tokens=400)
        stage = EpisodeRollout(
            Script(tokenizer(STRIPPING), says), agent=agent, group_size=3, sampling=sampling, deterministic=True
        )
        asked = DataProto.from_single_dict({"raw_prompt": [[{"role": "user", "content": "?"}]] * 2, "uid": ["a", "b"]})
        found.append(stage(asked).batch)
    assert list(found[0]["session"]) == [n // 3 for n in range(18)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0].batch)
    marks = [extra.get("sub_agent") for extra in found[0]["agent_extra"][:3]]
    assert [mark and mark["number"] for mark in marks] == [0, 1, None]
