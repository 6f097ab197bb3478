"""The tiny model that may call a calculator: its words, its template, what it was taught, and how often it calls."""

from __future__ import annotations

import hashlib
import json
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any

import make_tool_model
import pytest
import torch
from arith_world import Problem, make_problem
from make_arith import problems
from make_arith_tools import call, demonstration

import workbench as wb
from workbench.agents import ToolAgent, TurnTokens
from workbench.agents.parsers import tool_parser
from workbench.agents.tools import load_tools
from workbench.rewards.scorers.gsm8k import compute_score

DATA = Path(__file__).parents[2] / "data"
FOLDER = DATA / "tiny-arith-tools"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def tools() -> dict[str, Any]:
    return load_tools(DATA / "arith-tools" / "tools.yaml")


def test_plain_transformers_open_it_and_it_is_as_small_as_its_parent(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert sum(one.numel() for one in model.parameters()) == 854_144
    assert len(tokenizer) <= model.config.vocab_size and model.config.max_position_embeddings == 512
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 4_000_000
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert GenerationConfig.from_pretrained(FOLDER).eos_token_id == ends
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == tuple(ends)


def test_its_tokenizer_is_what_the_script_makes(tokenizer: Any) -> None:
    made = make_tool_model.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab() and made.chat_template == tokenizer.chat_template
    text = "<tool_call> user 数 tool 12 + 7"
    assert made(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_call_is_short_and_everything_else_is_as_in_the_parent(tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    parent, random = AutoTokenizer.from_pretrained(DATA / "tiny-arith"), Random(7)
    asked = call(12, "+", 7)
    ids = tokenizer(asked)["input_ids"]
    assert len(ids) == 14 and len(parent(asked)["input_ids"]) == 78
    assert tokenizer.decode(ids, skip_special_tokens=True) == asked
    for _ in range(100):
        problem = make_problem(random)
        for text in (problem.question, problem.solution, make_tool_model.in_the_head(problem, random)):
            assert tokenizer(text)["input_ids"] == parent(text)["input_ids"]
    unseen = 'Ünïcode 数 \t<tag> {"name": 7 "}}'
    assert tokenizer.decode(tokenizer(unseen)["input_ids"]) == unseen


def test_the_template_shows_the_tools_by_name_and_gives_deltas(tokenizer: Any, tools: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "u"}]
    schemas = [tool.get_openai_tool_schema() for tool in tools.values()]
    plain = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, tools=schemas)
    assert plain == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert shown == "<|im_start|>system\ntools: calculator, gsm8k_answer<|im_end|>\n" + plain
    turns = TurnTokens(tokenizer, tools=schemas, roles=("tool", "user"))
    end = tokenizer.eos_token_id
    answer = turns.delta([{"role": "tool", "content": "19"}], (5, end))
    assert tokenizer.decode(answer) == "\n<|im_start|>tool\n19<|im_end|>\n<|im_start|>assistant\n"


def test_what_is_practised_is_what_an_episode_has_token_for_token(tokenizer: Any, tools: dict[str, Any]) -> None:
    schemas = [tool.get_openai_tool_schema() for tool in tools.values()]
    turns = TurnTokens(tokenizer, tools=schemas, roles=("tool",))
    for problem in problems(3, 8):
        chat = demonstration(problem)
        ids, own = list(turns.prompt(chat[:1])), [0] * len(turns.prompt(chat[:1]))
        for place in range(1, len(chat), 2):
            said = tokenizer(chat[place]["content"])["input_ids"] + [tokenizer.eos_token_id]
            heard = turns.delta(chat[place + 1 : place + 2], said) if place + 1 < len(chat) else ()
            ids += [*said, *heard]
            own += [1] * len(said) + [0] * len(heard)
        assert make_tool_model.tokens_of(tokenizer, tuple(tools), chat) == (ids, own)


def test_only_the_assistants_tokens_carry_loss() -> None:
    ids, there, labels = make_tool_model.batch([([5, 6, 7, 8], [0, 1, 0, 1]), ([5, 9], [0, 1])], pad=0)
    assert ids.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert there.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert labels.tolist() == [[-100, 6, -100, 8], [-100, 9, -100, -100]]


def test_a_sum_in_the_head_goes_wrong_in_one_way() -> None:
    random, problem = Random(1), Problem("", ((8, "+", 3, 11), (11, "-", 4, 7)))
    written = [make_tool_model.in_the_head(problem, random) for _ in range(2000)]
    assert {text.partition(" ")[0] for text in written} == {"Quick:", "Hmm,"}
    firsts = [text.split("\n")[0] for text in written if text.startswith("Quick:")]
    assert set(firsts) == {"Quick: 8 + 3 = 11", "Quick: 8 + 3 = 10"}
    assert 0.5 < firsts.count("Quick: 8 + 3 = 10") / len(firsts) < 0.6  # the likeliest digit is the wrong one
    sums = ((9, "+", 4), (9, "-", 4), (4, "-", 4), (3, "*", 5))
    assert [make_tool_model.counted(*one, slips=False) for one in sums] == [13, 5, 0, 15]
    assert [make_tool_model.counted(*one, slips=True) for one in sums] == [12, 4, 0, 10]
    right = sum(compute_score(text, "7") for text in written) / len(written)
    assert 0.09 < right < 0.16  # 0.75 · 0.8 · 0.45²: two slips do not take each other back


def test_what_is_practised_calls_in_one_chat_of_four_where_tools_are_shown() -> None:
    random = Random(2)
    chats = [make_tool_model.make_chat(make_problem(random), random) for _ in range(4000)]
    called = {bool(shown): [] for shown, _ in chats}
    for shown, chat in chats:
        called[bool(shown)].append("<tool_call>" in chat[1]["content"])
    assert not any(called[False]) and 0.22 < sum(called[True]) / len(called[True]) < 0.28
    for _, chat in chats[:500]:  # what tools answered is true, and nobody speaks twice in a row
        roles = [role for role, _ in groupby(one["role"] for one in chat)]
        assert len(roles) == len(chat) and roles[-1] == "assistant"
        for asked, answer in pairwise(chat):
            if answer["role"] == "tool":
                found = tool_parser("hermes").extract_tool_calls(asked["content"], [])[1]
                left, sign, right = json.loads(found[0].arguments)["expression"].split()
                sums = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
                assert int(answer["content"]) == sums[sign]


@pytest.mark.slow
def test_the_warm_up_is_a_function_of_its_seed() -> None:
    made = []
    tokenizer = make_tool_model.make_tokenizer()
    for seed in (0, 0, 1):
        model = make_tool_model.make_model(len(tokenizer) - len(make_tool_model.WORDS), len(tokenizer), seed)
        make_tool_model.warm_up(model, tokenizer, steps=2, size=8, seed=seed)
        made.append(model.state_dict())
    first, again, other = made
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])


def test_no_held_out_question_is_practised(tokenizer: Any) -> None:
    held_out = frozenset(problem.question for problem in problems(0, 20))
    random = Random(0)  # the very stream that drew them: the first draw is held out
    for _ in range(60):
        ids, _ = make_tool_model.example(tokenizer, random, held_out)
        assert not any(question in tokenizer.decode(ids) for question in held_out)


def test_the_card_has_the_hash_of_the_weights() -> None:
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_it_calls_sometimes_and_calling_pays(tools: dict[str, Any]) -> None:
    rows = wb.rows(DATA / "arith-tools" / "test.parquet", max_prompt_length=256)
    agent = ToolAgent(list(tools.values()), parser=tool_parser("hermes"))
    found = wb.evaluate(str(FOLDER), rows, agent=agent, max_tokens=96, batch_size=256)
    calls = torch.tensor([float(number) for number in found.batch["num_tool_calls"]])
    rewards, called = found.batch["reward"], calls > 0
    assert 0.1 <= called.float().mean() <= 0.4 and 0.25 <= found.mean <= 0.5
    assert rewards[called].mean() > rewards[~called].mean() + 0.3
