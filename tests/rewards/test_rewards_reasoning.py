"""What a reward reads of a response: the answer behind the reasoning, and special tokens where they are wanted."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import pytest

import workbench as wb
from workbench import rewards as r
from workbench.engines import Request, Sample, SamplingSettings
from workbench.rewards import Status
from workbench.rewards.code import Code
from workbench.runs.preflight import _prompts
from workbench.stages import Reward, Rollout
from workbench.stages.rollout import text_columns

CUT = "Let me try: maybe \\boxed{42}. Answer: 42\n#### 42"
SAMPLING = SamplingSettings()


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("data/tiny-arith")


class Says:
    """A sampler that answers every prompt with one text."""

    def __init__(self, text: str, *, thinks: bool = True, special: tuple[str, ...] = ()) -> None:
        self.tokenizer = copy.deepcopy(tokenizer())
        self.tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        self.template_switches = {"enable_thinking": True} if thinks else {}
        self.text = text
        self.version = 0

    async def sample(self, request: Request) -> Sample:
        ids = tuple(self.tokenizer(self.text, add_special_tokens=False)["input_ids"])
        return Sample(ids, (-1.0,) * len(ids), "length", 0)


def scored(text: str, reward: Any, *, source: str = "x", answer: Any = "42", **options: Any) -> wb.DataProto:
    rows = wb.rows([{"prompt": "6 * 7?", "answer": answer, "data_source": source}])
    sampling = options.pop("sampling", SAMPLING)
    sampler: Any = Says(text, **options)
    return Reward(reward)(Rollout(sampler, group_size=1, sampling=sampling)(rows.batch(1)).batch).batch


SCORERS = {"gsm8k": r.gsm8k, "math_string": r.math_string, "math_dapo": r.math_dapo, "numeric": r.numeric}


@pytest.mark.parametrize("name", [*SCORERS, "math_verify", "by data_source", "rubric"])
def test_reasoning_that_the_prompt_opened_and_the_limit_cut_is_no_answer(name: str) -> None:
    source = {"by data_source": "gsm8k"}.get(name, "x")
    others = {"math_verify": r.math_verify(timeout=60), "rubric": r.Rubric({"right": r.gsm8k}), "by data_source": None}
    reward = SCORERS.get(name, others.get(name))
    cut, ended = (scored(one, reward, source=source)["score"][0] for one in (CUT, f"hm</think>{CUT}"))
    plain = scored(CUT, reward, source=source, thinks=False)
    assert (cut.value <= 0, ended.value, plain["score"][0].value) == (True, 1, 1)
    assert name == "rubric" or cut.status in (Status.NO_ANSWER, Status.SCORED)
    assert "reasoning that its prompt opened" in cut.why
    assert "in_reasoning" not in plain


def test_a_program_in_reasoning_that_was_cut_is_not_run() -> None:
    tests, nowhere = json.dumps({"inputs": [""], "outputs": ["1"]}), object()
    batch = scored("```python\nprint(1)\n```", Code(nowhere), answer=tests)  # type: ignore[arg-type]
    assert batch["score"][0].status is Status.NO_ANSWER


def test_a_function_of_the_users_reads_the_text_and_may_ask_where_it_ended() -> None:
    def seen(response: str, in_reasoning: bool) -> dict[str, Any]:
        return {"score": float(in_reasoning), "answer": response}

    cut, ended = (scored(one, seen)["score"][0] for one in ("hm", "hm</think> yes"))
    assert (cut.value, cut.answer, ended.value, ended.answer) == (1, "hm", 0, "hm</think> yes")


def test_a_mention_in_the_prompt_opens_nothing_and_a_later_turn_may() -> None:
    read = tokenizer()
    ids: Any = lambda text: tuple(read(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    assert [*text_columns(read, [(ids("reason in <think> first\nassistant\n"), ids("6"))])] == ["response_text"]
    response = ids("a</think>call") + ids("tool<think>\n") + ids("still")
    turns = [{"role": "assistant", "first": 0}, {"role": "assistant", "first": len(response) - len(ids("still"))}]
    pairs = [(ids("go<think>\n"), response)]
    assert text_columns(read, pairs)["in_reasoning"] == [False]
    assert text_columns(read, pairs, turns=[turns])["in_reasoning"] == [True]


def test_special_tokens_reach_a_reward_that_wants_them() -> None:
    text, special = "<think>hm</think>4", ("<think>", "</think>")
    for wanted, skip in (("hm4", True), (text, False)):
        batch = scored(
            text,
            lambda response: 1.0,
            thinks=False,
            special=special,
            sampling=SAMPLING.replace(skip_special_tokens=skip),
        )
        assert batch["response_text"] == [wanted]


def test_tags_that_are_special_tokens_end_reasoning_too() -> None:
    special = ("<think>", "</think>")
    assert scored("hm</think>#### 42", r.gsm8k, special=special)["score"][0].value == 1
    assert scored("hm #### 42", r.gsm8k, special=special)["score"][0].status is Status.NO_ANSWER


def test_tags_that_no_reward_sees_are_said_before_a_run(caplog: pytest.LogCaptureFixture) -> None:
    rows = wb.rows([{"prompt": "6 * 7?", "answer": "42"}])
    sampler: Any = Says("x", special=("<think>", "</think>"))
    ((what, said),) = _prompts([rows], Rollout(sampler), ratios=True)
    assert what == "special tokens" and "<think>, </think> are special tokens" in said and said in caplog.text
    assert _prompts([rows], Rollout(sampler, sampling=SAMPLING.replace(skip_special_tokens=False)), ratios=True) == []
