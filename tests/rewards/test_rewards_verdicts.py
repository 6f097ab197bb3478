"""A schema as a judge: prompts, parser and reward from one place; the seed's own listings; thinking asked for once."""

from __future__ import annotations

import math
import os
import random
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from support.rewards import Says

import workbench as wb
from workbench.base.errors import DataError, SettingError
from workbench.rewards import BasePromptTemplate
from workbench.rewards.judge import Judge, PairwiseJudge, Unparseable
from workbench.rewards.score import Score, Status
from workbench.rewards.verdicts import template_thinks


class Helpful(BaseModel):
    """A rating of 0 to 4 after the reasoning."""

    think: str = Field(description="your reasoning")
    score: int = Field(ge=0, le=4, description="0 to 4")


class Better(BaseModel):
    """Which of two."""

    reason: str
    better: Literal["A", "B", "tie"]


class Best(BaseModel):
    """Which of several, counted from 1 as RM-Gallery does."""

    reason: str
    best: int


RATED = wb.datasets.samples([{"prompt": f"q{n}", "response": f"a{n}", "helpfulness": n % 5} for n in range(10)])
PAIRS = wb.datasets.samples([{"prompt": f"q{n}", "chosen": f"yes{n}", "rejected": "no"} for n in range(4)])


def judged(reward: Any, output: str, truth: Any) -> Score:
    """The score of one output."""
    return reward.judge([{"response": output, "ground_truth": truth}])[0]


# --- the seed's listings --------------------------------------------------------------------------


class YourTemplate(BasePromptTemplate):
    score: int = Field(description="评分结果 (0-4分)")

    @classmethod
    def format(cls, desc: str, examples: str, query: str, answer: str, **kwargs: Any) -> str:
        """格式化提示模板"""
        return f"""# 任务描述
{desc}

# 参考示例
{examples}

# 用户查询
{query}

# 模型回答
{answer}

# 输出要求
{cls.schema(**kwargs)}
        """


@pytest.mark.parametrize("truth", range(5))
@pytest.mark.parametrize("said", range(5))
def test_rewards_are_those_of_the_seed(said: int, truth: int) -> None:
    """Both of its formulas (tests/compat/test_compat_seed_002.py runs its own text), over every pair of scores; errors 0..4 give 1, .6065, .3679, .2231, .1353."""
    judge = wb.rewards.reasoning(Helpful, label="helpfulness")
    output = f"<think>because</think><score>{said}</score>"
    score = judged(judge.reward(2.0), output, truth)
    assert score.value == pytest.approx(math.exp(-2 * abs(said - truth) / 4))
    assert score.value == pytest.approx([1, 0.6065, 0.3679, 0.2231, 0.1353][abs(said - truth)], abs=5e-5)
    assert judged(judge.reward("linear"), output, truth).value == pytest.approx(1 - abs(said - truth) / 4)
    assert judged(judge.reward("exact"), output, truth).value == (said == truth)
    assert score.parts == {"accuracy": float(said == truth), "format": 1.0, "error": abs(said - truth)}
    assert (score.answer, score.why) == (str(said), "because")


def test_the_seeds_template_runs_with_one_changed_import() -> None:
    """Its `format` writes the prompt; with the chat template's thinking the schema does not ask for a reason."""
    judge = wb.rewards.reasoning(YourTemplate, label="helpfulness", scale=(0, 4), desc="Rate it.", examples="none")
    text = judge.text("2+2?", ["4"])
    assert "# 用户查询\n2+2?\n" in text and "# 模型回答\n4\n" in text and "Rate it." in text
    assert "<score>评分结果 (0-4分)</score>" in text and "<reason>" in text
    thinking = wb.rewards.reasoning(YourTemplate, label="helpfulness", scale=(0, 4), think="template")
    assert "<reason>" not in thinking.text("2+2?", ["4"])
    made, said = thinking.read("<think>\n4 is right\n</think>\n\n<score>4</score>")
    assert (made.model_dump(), said) == ({"reason": "4 is right", "score": 4}, 4.0)
    assert YourTemplate.parse("<think>well</think><score>3</score>").score == 3
    with pytest.raises(SettingError, match="bounds"):
        wb.rewards.reasoning(YourTemplate, label="helpfulness")


# --- rows -----------------------------------------------------------------------------------------


def test_rows_of_ratings_are_prompts_with_their_truth() -> None:
    """A row per rated answer; what has no such rating is left out and counted; another label is refused with those there are."""
    judge = wb.rewards.reasoning(Helpful, label="helpfulness")
    rows = judge.rows(RATED)
    assert [row["reward_model"]["ground_truth"] for row in rows] == [n % 5 for n in range(10)]
    assert rows[3]["extra_info"] == {"sample": "3", "order": [0], "category": "", "lengths": [2]}
    assert "q3" in rows[3]["prompt"][0]["content"] and "a3" in rows[3]["prompt"][0]["content"]
    with pytest.raises(DataError, match="ratings: helpfulness"):
        wb.rewards.reasoning(Helpful, label="honesty").rows(RATED)
    with pytest.raises(SettingError, match="label"):
        wb.rewards.reasoning(Helpful)


def test_pairs_come_in_both_orders() -> None:
    """A and B change places, and so does the truth; ties only where the schema has them."""
    judge = wb.rewards.reasoning(Better)
    rows = judge.rows(PAIRS)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["A", "B"] * 4
    assert [row["extra_info"]["order"] for row in rows[:2]] == [[0, 1], [1, 0]]
    assert rows[1]["prompt"][0]["content"].index("no") < rows[1]["prompt"][0]["content"].index("yes0")
    tied = wb.datasets.samples([{"prompt": "?", "response_1": "a", "response_2": "b", "preference_strength": 0}])
    assert [row["reward_model"]["ground_truth"] for row in judge.rows(tied)] == ["tie", "tie"]

    class Strict(BaseModel):
        reason: str
        better: Literal["A", "B"]

    with pytest.raises(DataError, match="no sample says"):
        wb.rewards.reasoning(Strict).rows(tied)


def test_several_answers_turn_round() -> None:
    """A listwise row for each place that the best can have; a verdict of RM-Gallery's is its number from 1."""
    several = wb.datasets.samples([{"prompt": "?", "chosen": ["x"], "rejected": ["y", "z"]}])
    judge = wb.rewards.reasoning(Best)
    rows = judge.rows(several)
    assert [row["reward_model"]["ground_truth"] for row in rows] == [["A"], ["C"], ["B"]]
    reward = judge.reward()
    assert judged(reward, "<reason>r</reason><best>3</best>", ["C"]).value == 1.0
    assert judged(reward, "<reason>r</reason><best>1</best>", ["C"]).value == 0.0
    with pytest.raises(SettingError, match="listwise"):
        judge.judge(Says(lambda text, seed: ""))


def test_truths_of_no_use_are_refused_before_a_run() -> None:
    """All of them: an error; some: a word."""
    reward = wb.rewards.reasoning(Better).reward()
    with pytest.raises(DataError, match="A, B or tie"):
        reward.check_rows([{"reward_model": {"ground_truth": 3}}])
    said = reward.check_rows([{"reward_model": {"ground_truth": "A"}}, {"reward_model": {"ground_truth": None}}])
    assert said.startswith("1 of 2 rows")
    assert judged(reward, "<reason>r</reason><better>A</better>", None).status is Status.NOT_APPLICABLE


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("<think>if a < b and $x<y$ then\n```c++\nvector<int> v;\n```</think><score>3</score>", 3),
        ("a < b, so</think>\n<score>2</score>", 2),  # the chat template has opened <think> in the prompt
        ('{"think": "a < b", "score": 4}', 4),
        ("<think>first 1</think><score>9</score>", None),  # out of bounds is never clamped
        ("<think>x</think><score>3.5</score>", None),
        ("<think>x</think><score>3</score> or <score>4</score>", None),
        ("<think>it never ends", None),
        ("", None),
    ],
)
def test_verdicts_of_all_kinds(output: str, said: int | None) -> None:
    """Inequalities, LaTeX and code in the reasoning; anything else is no answer, with 0 and its format counted."""
    score = judged(wb.rewards.reasoning(Helpful, label="helpfulness").reward(), output, said or 0)
    if said is None:
        assert (score.status, score.value, score.parts) == (Status.NO_ANSWER, 0.0, {"accuracy": 0.0, "format": 0.0})
    else:
        assert (score.status, score.value) == (Status.SCORED, 1.0)


def test_ten_thousand_outputs_give_a_verdict_or_no_answer() -> None:
    """Pieces of verdicts, tags, JSON, control characters and surrogates in any order; no other exception comes out."""
    tags = ["think", "score", "reason", "better", "best"]
    pieces = [f"<{end}{tag}>" for tag in tags for end in ("", "/")] + [f"<{tag}>4</{tag}>" for tag in tags]
    pieces += [
        "<better>A</better>",
        "<best>1</best>",
        '{"think": "", "score": 2}',
        "0",
        "9",
        "-1",
        "3.0",
        "1e9",
        "NaN",
        "A",
        "tie",
    ]
    pieces += [
        "{",
        "}",
        '"score":',
        ",",
        "```json",
        "\n",
        " ",
        "a < b",
        "\x00",
        "\ud800",
        "[",
        "]" * 50,
        "{" * 50,
        "ⅳ",
        "９",
        "²",
    ]
    pieces += ["true", "null", "1" * 5000]
    drawn = random.Random(0)
    rewards = [
        (wb.rewards.reasoning(Helpful, label="x").reward(), 2.0),
        (wb.rewards.reasoning(Better).reward(), "A"),
        (wb.rewards.reasoning(Best).reward(), ["A"]),
        (wb.rewards.reasoning(YourTemplate, label="x", scale=(0, 4), think="template").reward(), 2.0),
    ]
    seen = set()
    for number in range(10_000):
        reward, truth = rewards[number % 4]
        score = judged(reward, "".join(drawn.choices(pieces, k=drawn.randint(0, 6))), truth)
        seen.add(score.status)
        assert score.scored and 0 <= score.value <= 1
    assert seen == {Status.SCORED, Status.NO_ANSWER}


# --- thinking -------------------------------------------------------------------------------------


class Templated:
    """A tokenizer with a chat template that thinks by a switch, as Qwen3's does."""

    chat_template = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"

    def apply_chat_template(self, turns: Any, *, enable_thinking: bool = True, **options: Any) -> str:
        """What the template renders."""
        return "user: ?\nassistant: " + ("" if enable_thinking else "<think>\n\n</think>\n\n")


class Engine:
    """An engine with that tokenizer."""

    def __init__(self, **switches: Any) -> None:
        self.tokenizer = Templated()
        self.template_switches = switches


def test_a_judge_reasons_once() -> None:
    """Exactly one of the chat template's thinking and the schema's field is on; else the error says what to change."""
    own = wb.rewards.reasoning(Helpful, label="helpfulness")
    other = wb.rewards.reasoning(Helpful, label="helpfulness", think="template")
    assert "<think>your reasoning</think>" in own.text("q", ["a"])
    assert "<think>" not in other.text("q", ["a"])
    own.check(Engine(enable_thinking=False))
    other.check(Engine())
    wb.rewards.reasoning(Helpful, label="helpfulness", think="none").check(Engine(enable_thinking=False))
    with pytest.raises(SettingError, match=r"by the schema, too.*think=\"template\".*enable_thinking"):
        own.check(Engine())
    with pytest.raises(SettingError, match=r"nothing asks.*enable_thinking"):
        other.rows(RATED, engine=Engine(enable_thinking=False))
    with pytest.raises(SettingError, match="by the schema, too"):  # as `train` checks it before it starts
        wb.rewards.Rubric({"verdict": own.reward()}).check_sampler(Templated(), {})


def test_real_templates_that_think() -> None:
    """Qwen3's own template thinks unless it is told not to; Qwen2.5's never does."""
    folder = os.environ.get("WORKBENCH_TOKENIZERS")
    if not folder:
        pytest.skip("WORKBENCH_TOKENIZERS is not set: see tests/agents/fetch_tokenizers.py")
    from transformers import AutoTokenizer

    qwen3 = AutoTokenizer.from_pretrained(Path(folder) / "qwen3")
    assert template_thinks(qwen3, {}) and not template_thinks(qwen3, {"enable_thinking": False})
    assert not template_thinks(AutoTokenizer.from_pretrained(Path(folder) / "qwen2_5"), {})


# --- back as a reward -----------------------------------------------------------------------------


def test_a_judge_goes_back_with_the_very_prompts_that_it_learned_from() -> None:
    """Pointwise: the value is the score on its scale. Pairwise: both orders are asked, with the prompts of both rows."""
    judge = wb.rewards.reasoning(Helpful, label="helpfulness")
    reward = judge.judge(Says(lambda text, seed: "<think>t</think><score>3</score>"))
    assert isinstance(reward, Judge)
    row = {"prompt": "q3", "prompt_text": "q3", "response": "a3", "ground_truth": None, "uid": 0, "columns": {}}
    (score,) = reward.judge([row])
    assert score.value == 0.75
    assert score.extra["judge_prompt"] == judge.rows(RATED)[3]["prompt"][0]["content"]

    pairwise = wb.rewards.reasoning(Better)
    better = re.compile(r"Answer A:\n<<<\w+\nyes")  # the first answer is the right one
    model = Says(lambda text, seed: f"<reason>r</reason><better>{'A' if better.search(text) else 'B'}</better>")
    reward = pairwise.judge(model)
    assert isinstance(reward, PairwiseJudge)
    both = [{**row, "prompt": "q0", "prompt_text": "q0", "response": text} for text in ("yes0", "no")]
    assert [score.value for score in reward.judge(both)] == [1.0, -1.0]
    assert set(model.asked) == {row["prompt"][0]["content"] for row in pairwise.rows(PAIRS)[:2]}


def test_a_judge_is_read_as_it_was_paid() -> None:
    """Reasoning by the chat template fills the schema's field, and a score outside the scale is no verdict, also later."""
    judge = wb.rewards.reasoning(YourTemplate, label="x", scale=(0, 4), think="template")
    asked = wb.rewards.reasoning(Better, think="template")
    row = {"prompt": "q", "prompt_text": "q", "response": "yes", "ground_truth": None, "uid": 0, "columns": {}}
    (score,) = judge.judge(Says(lambda text, seed: "thought</think><score>9</score>"), attempts=1).judge([row])
    assert score.status is Status.INFRA_ERROR and "0 to 4" in score.why
    better = re.compile(r"Answer A:\n<<<\w+\nyes")
    model = Says(lambda text, seed: f"so</think><better>{'A' if better.search(text) else 'B'}</better>")
    found = asked.judge(model).judge([row, {**row, "response": "no"}])
    assert [one.value for one in found] == [1.0, -1.0]
    assert asked.judge(model).source == asked.template


def test_a_step_of_training_shows_accuracy_error_and_format(tiny: str) -> None:
    """One GRPO step of the tiny model as a judge: the metrics are there from the first step on."""
    engine = wb.engines.local(tiny, lr=1e-4, threads=1)
    judge = wb.rewards.reasoning(Helpful, label="helpfulness")
    pipe = wb.recipes.grpo(engine, judge.reward(), group_size=2, max_tokens=8)
    step = wb.Stepper(pipe, judge.rows(RATED).batch(2)).run(until="advantage")
    metrics = step.trace.metrics
    assert {"reward/accuracy/mean", "reward/format/mean"} <= set(metrics)


def test_unparseable_says_what_was_expected() -> None:
    """A field's value that is no choice is named with those that there are."""
    with pytest.raises(Unparseable, match="A, B, … or tie"):
        wb.rewards.reasoning(Best).read("<reason>r</reason><best>99</best>")
