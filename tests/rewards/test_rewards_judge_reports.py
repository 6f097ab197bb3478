"""Reports on scripted judges: constant, length, position, perfect, random, broken; each is known for what it is."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from pydantic import Field
from support.lint import lint

import workbench as wb
from workbench.base.errors import DataError, SettingError
from workbench.dataproto import DataProto
from workbench.datasets.preferences import Answer, Sample, Samples
from workbench.engines.protocol import Classified, Completion
from workbench.rewards import Judge, PairwiseJudge, Pointwise, RewardModel, judge_report
from workbench.rewards.score import bounded

HOSTILE = "<script>alert(1)</script>\x1b[31m"
ASKED = re.compile(r"<<<(\w+)\n(.*?)\n\1>>>", re.DOTALL)


class Chat:
    """A chat model that answers by a function of the texts in its prompt (question and answers), and of the seed."""

    tokenizer = None

    def __init__(self, answer: Callable[[list[str], int], str]) -> None:
        self.answer, self.seeds = answer, set[int]()

    async def complete(self, messages: Any, *, max_tokens: int, temperature: float, seed: int) -> Completion:
        self.seeds.add(seed)
        texts = [text for _, text in ASKED.findall(messages[-1]["content"])]
        return Completion(self.answer(texts, seed), "", 10, 3)

    def describe(self) -> str:
        return "scripted"


def says(better: Callable[[str, str, int], str]) -> PairwiseJudge:
    """A pairwise judge by a function of two answers and the seed."""
    return PairwiseJudge(
        Chat(lambda texts, seed: f"<reason>{HOSTILE}</reason><better>{better(*texts[1:], seed)}</better>")
    )


def rates(score: Callable[[str, int], Any], **further: Any) -> Judge:
    """A pointwise judge by a function of an answer and the seed."""
    return Judge(Chat(lambda texts, seed: f"<reason>so</reason><score>{score(texts[1], seed)}</score>"), **further)


def pairs(n: int = 200, longer: float = 0.5, categories: tuple[str, ...] = ()) -> Samples:
    """Pairs of a `good` and a `bad` answer, the good one first, as data have them; the better is the longer in this share."""
    records = []
    for number in range(n):
        good, bad = (40, 10) if number < longer * n else (10, 40)
        record = {"id": f"q{number}", "prompt": f"question {number}?"}
        record |= {"chosen": f"good {number} " + "x" * good, "rejected": f"bad {number} " + "x" * bad}
        records.append(record | ({"subset": categories[number % len(categories)]} if categories else {}))
    return wb.datasets.samples(records)


def coin(*texts: Any) -> float:
    return Random("/".join(map(str, texts))).random()


PERFECT = says(lambda a, b, _: "A" if a.startswith("good") else "B")
LONG = says(lambda a, b, _: "A" if len(a) > len(b) else "B")
SHORT = says(lambda a, b, _: "A" if len(a) < len(b) else "B")
FIRST, SECOND, TIES = says(lambda a, b, _: "A"), says(lambda a, b, _: "B"), says(lambda a, b, _: "tie")
RANDOM = says(lambda a, b, seed: "A" if coin(a, b, seed) < 0.5 else "B")


# --- pairs ----------------------------------------------------------------------------------------


def test_a_perfect_judge() -> None:
    report = judge_report(PERFECT, pairs())
    figures = report.figures
    assert report.trusted and report.headline == "better than the constant (100.0% right, always A 50.0%)"
    assert (
        figures["accuracy"].value == figures["right in both orders"].value == figures["swap consistency"].value == 1.0
    )
    assert figures["says the first"].value == figures["prefers the longer"].value == 0.5
    assert figures["constant (always A)"].value == figures["the longer"].value == figures["the shorter"].value == 0.5
    assert (figures["accuracy"].low, figures["accuracy"].n) == (pytest.approx(1 / (1 + 3.841459 / 200)), 200)
    assert report.confusion.to_dict("index") == {"A": {"A": 600, "B": 0}, "B": {"A": 0, "B": 600}}
    assert (report.cost.calls, report.cost.tokens, report.cost.prompt_tokens) == (1200, 3600, 12000)
    assert len(report.asked) == 200 * 2 * 3 and report.statuses == {"scored": 1200}


def test_always_a_is_not_right_because_data_have_the_better_answer_first() -> None:
    report = judge_report(FIRST, pairs())
    assert not report.trusted
    assert report.findings == (
        "no better than the constant (50.0% right, always A 50.0%)", "follows position (prefers the first in 100.0%)", "always says A",
    )  # fmt: skip
    assert (
        report.figures["swap consistency"].value == 0.0
        and report.figures["says the first, of inconsistent pairs"].value == 1.0
    )
    assert report.figures["right in both orders"].value == 0.0
    once = judge_report(FIRST, pairs(), orders=False)
    assert 0.4 < once.figures["accuracy"].value < 0.6 and "swap consistency" not in once.figures
    assert "follows position (prefers the second in 100.0%)" in judge_report(SECOND, pairs()).findings


@pytest.mark.parametrize(
    ("judge", "rule"), [(LONG, "length (prefers the longer"), (SHORT, "brevity (prefers the shorter")]
)
def test_judges_of_length(judge: PairwiseJudge, rule: str) -> None:
    report = judge_report(judge, pairs())
    assert not report.trusted and f"follows {rule} in 100.0%)" in report.findings
    assert report.findings[0].startswith("no better than the constant")
    found = {name: report.figures[f"accuracy where the better is the {name}"].value for name in ("longer", "shorter")}
    assert found == ({"longer": 1.0, "shorter": 0.0} if judge is LONG else {"longer": 0.0, "shorter": 1.0})


def test_length_that_tells_quality_is_better_than_the_constant_and_still_length() -> None:
    report = judge_report(LONG, pairs(longer=0.8))
    assert report.figures["accuracy"].value == report.figures["the longer"].value == 0.8
    assert report.findings[0].startswith("better than the constant") and not report.trusted
    assert "follows length" in report.headline
    assert judge_report(PERFECT, pairs(longer=0.8)).trusted


def test_samples_in_which_length_tells_the_better_are_named() -> None:
    assert judge_report(PERFECT, pairs(longer=0.8), seeds=1).caveats == (
        "In these samples the longer answer is the better in 80.0%.",
    )
    assert judge_report(PERFECT, pairs(), seeds=1).caveats == ()


def test_a_random_judge() -> None:
    report = judge_report(RANDOM, pairs(), seeds=5)
    assert report.findings == (report.findings[0],) and report.findings[0].startswith("no better than the constant")
    assert abs(report.figures["Fleiss' kappa between seeds"].value) < 0.1
    assert abs(report.figures["identical between seeds"].value - 2 / 2**5) < 0.05
    assert abs(report.figures["swap consistency"].value - 0.5) < 0.06
    found = report.calibration
    assert found is not None and found.of == "votes" and sum(one.n for one in found.bins) == 200


def test_a_judge_of_ties_has_no_credit_but_for_ties() -> None:
    report = judge_report(TIES, pairs())
    assert report.figures["accuracy"].value == 0.0 and report.findings[0].startswith("worse than the constant")
    assert report.figures["no preference"].value == 1.0 and math.isnan(report.figures["says the first"].value)
    asked = [{"role": "user", "content": "?"}]
    tied = [Sample(f"{n}", tuple(asked), (Answer("one"), Answer("other")), (0, 1)) for n in range(3)]
    both = judge_report(TIES, [*tied, Sample("4", tuple(asked), (Answer("good"), Answer("bad")), (0,))], seeds=1)
    assert both.figures["accuracy"].value == both.figures["constant (always tie)"].value == 0.75


def test_no_verdict_is_no_credit_and_is_counted() -> None:
    def half(a: str, b: str, _: int) -> str:
        return "neither" if int(a.split()[1]) % 2 else "A" if a.startswith("good") else "B"

    report = judge_report(says(half), pairs(100), seeds=1)
    assert (report.figures["accuracy"].value, report.figures["accuracy among answered"].value) == (0.5, 1.0)
    assert report.figures["answered"].value == 0.5 and report.statuses == {"scored": 100, "infra_error": 100}
    assert "no verdict in 100 of 200" in report.findings and report.findings[0].startswith("no better")
    assert report.figures["right in both orders"].value == 0.5 and report.figures["swap consistency"].value == 1.0
    assert report.confusion["no verdict"].tolist() == [50, 50]
    assert report.cost.calls == 300  # what is no verdict is asked for twice
    assert "of 200 verdicts: 100 infra_error" in repr(report)
    assert judge_report(says(lambda *_: "?"), pairs(4)).findings == ("gives no verdict",)


def test_seeds_reach_the_model_and_never_meet() -> None:
    chat = Chat(lambda texts, _: "<reason>.</reason><better>A</better>")
    report = judge_report(PairwiseJudge(chat, temperature=1.0), pairs(2), seeds=[0, 7])
    assert chat.seeds == {0, 14} and report.seeds == (0, 7) and not report.notes
    assert "temperature 0" in judge_report(PairwiseJudge(chat), pairs(2)).notes[0]


# --- numbers --------------------------------------------------------------------------------------


class Scalar:
    tokenizer = None

    def __init__(self, value: Callable[[str], float]) -> None:
        self.value = value

    async def classify(self, text: str) -> Classified:
        return Classified(self.value(text.split("Answer: ")[1]), 7)

    def describe(self) -> str:
        return "scalar"


def test_a_reward_model_is_asked_once_and_calibrated_by_its_margin() -> None:
    """Margins of ln 3 are a probability of .75: right in three of four, the error is 0."""

    def value(text: str) -> float:
        right = int(text.split()[1]) % 4 > 0
        return math.log(3) if text.startswith("good") == right else 0.0

    report = judge_report(RewardModel(Scalar(value), template="question_answer"), pairs())
    assert report.seeds == (0,) and (report.cost.calls, report.cost.prompt_tokens) == (400, 2800)
    assert report.figures["accuracy"].value == 0.75 and report.trusted
    found = report.calibration
    assert found is not None and found.of == "margin" and found.error == pytest.approx(0.0, abs=1e-12)


@bounded
def same(response: str) -> float:
    return 1.0


@bounded
def length(response: str) -> float:
    return float(len(response))


@bounded
def starts_good(response: str) -> float:
    return float(response.startswith("good"))


def test_any_reward_scores_answers() -> None:
    constant = judge_report(same, pairs())
    assert constant.findings[0] == "no better than the constant (50.0% right, the same number 50.0%)"
    assert "gives every answer the same number" in constant.findings and not constant.trusted
    assert "follows length" in judge_report(length, pairs()).headline
    perfect = judge_report(starts_good, pairs())
    assert (
        perfect.trusted
        and perfect.confusion.empty
        and perfect.calibration is not None
        and perfect.calibration.of == "size"
    )


def test_four_answers_as_rewardbench_2_scores_them() -> None:
    asked = ({"role": "user", "content": "?"},)
    four = [Sample(f"{n}", asked, tuple(map(Answer, ("good", "b", "c", "d"))), (0,)) for n in range(8)]
    report = judge_report(same, four)
    assert report.figures["accuracy"].value == report.figures["constant (the same number)"].value == 0.25
    assert judge_report(starts_good, four).figures["accuracy"].value == 1.0


def test_sections_and_ties_of_rewardbench() -> None:
    subsets = ("alpacaeval-easy", "math-prm", "hep-cpp")

    @bounded
    def no_code(response: str) -> float:
        return float(response.startswith("good")) * (int(response.split()[1]) % 3 != 2)

    report = judge_report(no_code, pairs(30, categories=subsets))
    assert [(name, one.value) for name, one in report.categories.items()] == [
        ("alpacaeval-easy", 1),
        ("math-prm", 1),
        ("hep-cpp", 0.5),
    ]
    reasoning = (984 + 0.5 * 164) / (984 + 164)
    assert report.sections == pytest.approx({"Chat": 1.0, "Reasoning": reasoning, "score": (1 + reasoning) / 2})
    ties = [
        {"id": "ref:0", "prompt": "a colour?", "chosen": ["good 9"], "rejected": ["bad 1"], "subset": "Ties"},
        {"id": "tied:0", "prompt": "any?", "chosen": ["good 8", "good 7.5"], "rejected": ["bad 2"], "subset": "Ties"},
        {"id": "7", "prompt": "?", "chosen": ["good 4"], "rejected": ["b 1", "c 1", "d 4"], "subset": "Math"},
    ]

    @bounded
    def last(response: str) -> float:
        return float(response.split()[1])

    second = judge_report(last, wb.datasets.samples(ties))
    expected = 1 + 0.01 * math.tanh(5.5 / 0.5 - 1)
    assert second.categories["Ties"].value == pytest.approx(expected) and second.categories["Math"].value == 0.5
    assert second.sections["score"] == pytest.approx((expected + 0.5) / 2)
    assert second.figures["accuracy"].value == pytest.approx(2.5 / 3)


# --- grades ---------------------------------------------------------------------------------------


class Helpfulness(Pointwise):
    score: int = Field(ge=0, le=4)


def graded(n: int = 200) -> Samples:
    """Answers of grades 0 to 4, of which 2 is the most frequent (two fifths); length says nothing of them."""
    grades = [(0, 1, 2, 2, 2, 3, 4, 2, 1, 3)[number % 10] for number in range(n)]
    return wb.datasets.samples(
        [
            {
                "prompt": f"q {number}",
                "response": f"{grade} " + "x" * (number * 37 % 101),
                "helpfulness": grade,
                "verbosity": 1,
            }
            for number, grade in enumerate(grades)
        ]
    )


def test_grades_of_a_perfect_and_of_a_constant_judge() -> None:
    report = judge_report(rates(lambda text, _: int(text[0]), schema=Helpfulness), graded(), label="helpfulness")
    assert report.same_scale and report.trusted and report.figures["accuracy"].value == 1.0
    assert report.figures["constant (always 2)"].value == 0.4
    assert report.figures["mean absolute error"].value == 0.0
    assert report.figures["its constant (2)"].value == pytest.approx(0.8)  # (2·1·4 + 2·2)/... of ten: 2, 1, 1, 1, 1, 2
    assert report.figures["Spearman with the truth"].value == pytest.approx(1.0)
    constant = judge_report(rates(lambda *_: 2, schema=Helpfulness), graded(), label="helpfulness")
    assert constant.findings == ("no better than the constant (40.0% right, always 2 40.0%)", "always says 2")
    assert math.isnan(constant.figures["Spearman with the truth"].value) and not constant.trusted


def test_grades_by_length_and_at_random() -> None:
    long = judge_report(
        rates(lambda text, _: min(len(text) // 21, 4), schema=Helpfulness), graded(), label="helpfulness"
    )
    assert (
        "follows length" in long.headline and long.findings[0].startswith(("no better", "worse")) and not long.trusted
    )
    chance = judge_report(
        rates(lambda text, seed: int(5 * coin(text, seed)), schema=Helpfulness), graded(), label="helpfulness"
    )
    assert chance.findings[0].startswith(("no better", "worse")) and "length" not in chance.headline


def test_nearer_but_not_more_often_right() -> None:
    near = rates(lambda text, _: {0: 1, 1: 2, 2: 2, 3: 4, 4: 4}[int(text[0])], schema=Helpfulness)
    report = judge_report(near, graded(), label="helpfulness", seeds=1)
    assert report.figures["accuracy"].value == 0.5 and report.figures["mean absolute error"].value == 0.5
    shifted = rates(lambda text, _: {0: 1, 1: 1, 2: 3, 3: 3, 4: 3}[int(text[0])], schema=Helpfulness)
    found = judge_report(shifted, graded(), label="helpfulness", seeds=1)
    assert found.figures["accuracy"].value == 0.4 and found.figures["mean absolute error"].value == pytest.approx(0.6)
    assert (
        found.findings[0] == "nearer to the truth than the constant, not more often right (40.0% right, always 2 40.0%)"
    )


def test_another_unit_is_compared_by_rank_alone() -> None:
    report = judge_report(rates(lambda text, _: 2 * int(text[0]) + 2), graded(), label="helpfulness", seeds=1)
    assert (
        not report.same_scale
        and "accuracy" not in report.figures
        and report.confusion.empty
        and report.categories == {}
    )
    assert report.findings[0].startswith("ranks as the truth does (Spearman 1.00")
    assert repr(report) and report._repr_html_()


# --- the form -------------------------------------------------------------------------------------


def test_what_a_model_wrote_is_escaped_and_shown_safely() -> None:
    samples = wb.datasets.samples(
        [{"prompt": HOSTILE, "chosen": f"{HOSTILE} a", "rejected": HOSTILE, "subset": HOSTILE, "id": HOSTILE}] * 6
    )
    report = judge_report(says(lambda a, b, _: "A"), samples)
    page = report._repr_html_()
    assert page and "<script" not in page and "&lt;script&gt;" in page and "\x1b" not in page + repr(report)
    lint(page)
    assert "data:image/png;base64," in page


def test_the_figure_and_the_tables() -> None:
    report = judge_report(RANDOM, pairs(20, categories=("easy", "$hard_{")))
    figure = report.figure()
    assert len(figure.axes) == 4
    figure.savefig(io.BytesIO())
    frame = report.to_pandas()
    assert len(frame) == len(report) == 20 and list(frame["truth"]) == [[0]] * 20
    assert frame["accuracy"].mean() == pytest.approx(report.figures["accuracy"].value)
    assert set(frame["longer"]) == {29.0, -29.0, 31.0, -31.0} or frame["longer"].abs().between(28, 32).all()
    assert frame["tokens"].sum() == report.cost.tokens and json.loads(frame.to_json())
    text = repr(report)
    assert "right in both orders" in text and "expected calibration error" in text and "cost: 120 calls" in text


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(SettingError, match="argument label"):
        judge_report(same, graded())
    with pytest.raises(SettingError, match="rating 'wit'.*helpfulness"):
        judge_report(same, graded(), label="wit")
    with pytest.raises(SettingError, match="seeds"):
        judge_report(PERFECT, pairs(2), seeds=0)


def test_a_reasoning_judge_reads_the_prompts_that_it_was_trained_on() -> None:
    kit = wb.rewards.reasoning(wb.rewards.Pairwise)
    asked = list[str]()

    class Recorded(Chat):
        async def complete(self, messages: Any, **sampling: Any) -> Completion:
            asked.append(messages[-1]["content"])
            return Completion("<reason>so</reason><better>A</better>", "", 1, 1)

    samples = pairs(3)
    report = judge_report(kit.judge(Recorded(lambda *_: "")), samples, seeds=1)
    assert sorted(asked) == sorted(
        row["raw_prompt"][0]["content"] if "raw_prompt" in row else row["prompt"][0]["content"]
        for row in kit.rows(samples)
    )
    assert "follows position" not in report.findings[0] and report.figures["accuracy"].value == 0.5


def test_the_tiny_models_on_problems_that_they_never_saw() -> None:
    """Real engines: the reward model on pairs, the judge on the same answers as grades, 1 for a right one."""
    sys.path.insert(0, "data")
    from arith_world import careless, make_problem
    from make_judges import PROMPT, Check, is_right

    random, records = Random(5), list[dict[str, Any]]()
    while len(records) < 40:
        problem = make_problem(random)
        texts = {is_right(problem, text): text for text in (careless(problem, random) for _ in range(200))}
        if len(texts) == 2:
            records.append({"prompt": problem.question, "chosen": texts[True], "rejected": texts[False]})
    samples = wb.datasets.samples(records)
    model = judge_report(RewardModel(wb.engines.classifier("data/tiny-reward-model", device="cpu")), samples)
    assert model.trusted and model.figures["accuracy"].value > 0.9 and model.calibration is not None
    assert model.calibration.of == "margin" and model.calibration.error < 0.2
    rated = [
        {"prompt": one["prompt"], "response": one[name], "right": float(name == "chosen")}
        for one in records
        for name in ("chosen", "rejected")
    ]
    judge = Judge(wb.engines.chat(wb.engines.local("data/tiny-judge")), schema=Check, prompt=PROMPT, max_tokens=96)
    graded = judge_report(judge, wb.datasets.samples(rated), seeds=1)
    assert graded.same_scale and graded.trusted and graded.figures["accuracy"].value > 0.8
    assert graded.cost.calls >= 80 and graded.cost.prompt_tokens > 80 * 50


def test_a_win_rate_counts_pairs_whose_orders_agree() -> None:
    """Three questions: a win, a loss and a tie of the longer answer's judge; then one that always says A, which counts nowhere."""

    def batch(*responses: str) -> Any:
        prompts = np.empty(3, dtype=object)
        prompts[:] = [[{"role": "user", "content": f"q{n}"}] for n in range(3)]
        said = np.array(responses, dtype=object)
        return DataProto.from_dict(non_tensors={"raw_prompt": prompts, "response_text": said})

    longer = says(lambda a, b, seed: "tie" if len(a) == len(b) else "AB"[len(b) > len(a)])
    mine, theirs = batch("long one", "x", "same"), batch("short", "longer", "mesa")
    found = wb.rewards.win_rate(longer, mine, theirs)
    assert (found.value, found.n) == (0.5, 3)
    assert wb.rewards.win_rate(longer, batch("long one", "longest", "same"), theirs).value == pytest.approx(2.5 / 3)
    assert wb.rewards.win_rate(says(lambda a, b, seed: "A"), mine, theirs).n == 0
    with pytest.raises(DataError, match="the same prompts"):
        wb.rewards.win_rate(longer, mine, theirs[:2])
