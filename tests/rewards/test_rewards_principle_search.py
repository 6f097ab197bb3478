"""Principles from pairs, by a scripted chat model: what explains held-out pairs is kept, what is alike is one, the rest is not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.base.errors import DataError, RewardError, SettingError
from workbench.engines.protocol import Completion
from workbench.rewards import PairwiseJudge, principles
from workbench.rewards.principle_search import lines, merged

ASKED = re.compile(r"<<<(\w+)\n(.*?)\n\1>>>", re.DOTALL)
GOOD = "Prefer the answer that begins with a greeting to the reader."
LONG = "Prefer whichever text has more letters."
HOSTILE = "<script>alert(1)</script> {prompt} \x1b[31m the first"


class Finder:
    """Proposes a good principle (in two wordings), a bad one and a hostile one; judges by those that stand in its prompt."""

    tokenizer = None

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def complete(self, messages: Any, *, max_tokens: int, temperature: float, seed: int) -> Completion:
        text = messages[-1]["content"]
        self.prompts.append(text)
        return Completion(self.answer(text), "", 5, 4)

    def answer(self, text: str) -> str:
        _, one, other = (found for _, found in ASKED.findall(text))
        if "<principles>" in text:
            number = int(one.split()[1])
            other_wording = f"1. {GOOD[:-1]}, always." if number % 2 else f"- {GOOD}"
            return "no idea" if number % 7 == 0 else f"<principles>\n{other_wording}\n* {LONG}\n{HOSTILE}</principles>"
        if "begins with a greeting" in text:
            first = one.startswith("hello")
        elif LONG in text:
            first = len(one) > len(other)
        else:
            first = True
        return f"<reason>so</reason><better>{'A' if first else 'B'}</better>"

    def describe(self) -> str:
        return "finder"


def pairs(n: int = 120) -> Any:
    """The better answer greets; in half of the pairs it is the longer."""
    return wb.datasets.samples(
        [
            {
                "prompt": f"q {one}",
                "chosen": f"hello {one} " + "x" * (one % 2 * 9),
                "rejected": f"answer {one} " + "x" * 4,
            }
            for one in range(n)
        ]
    )


def test_what_explains_held_out_pairs_is_kept() -> None:
    model = Finder()
    found = principles(pairs(), model)
    assert [one.text for one in found] == [GOOD] or [one.text for one in found] == [f"{GOOD[:-1]}, always."]
    assert found[0].accuracy.value == 1.0 and found[0].kept and found[0].proposals >= 10
    others = {one.text: one for one in found.candidates[1:]}
    assert LONG in others and len(others) == 2 and not any(one.kept for one in others.values())
    assert abs(others[LONG].accuracy.value - 0.5) < 0.2 and others[LONG].gain.low <= 0
    assert found.plainly.figures["accuracy"].value == 0.5 and found.together is not None
    assert found.together.figures["accuracy"].value == 1.0 and found.together.trusted
    assert found.failed and "no idea" in found.failed[0]
    assert list(found.to_pandas()["kept"]) == [True, False, False]


def test_the_three_parts_share_no_question() -> None:
    model = Finder()
    found = principles(pairs(), model)
    proposed = {ASKED.findall(text)[0][1] for text in model.prompts if "<principles>" in text}
    checked = {ASKED.findall(text)[0][1] for text in model.prompts if "principle alone" in text}
    last = {item.prompt for item in found.plainly.items}
    assert len(proposed) == 16 and checked and last
    assert not proposed & checked and not checked & last and not proposed & last


def test_the_text_plugs_into_a_judges_prompt() -> None:
    model = Finder()
    found = principles(pairs(), model)
    assert found.text == f"Judge by these principles:\n1. {found[0].text}"
    report = wb.rewards.judge_report(PairwiseJudge(model, prompt=found.prompt()), pairs(20), seeds=1)
    assert report.figures["accuracy"].value == 1.0 and found.text in model.prompts[-1]
    pointwise = wb.rewards.Judge(model, prompt=found.prompt(wb.rewards.judge.POINTWISE))
    assert found.text in pointwise.source


def test_what_a_model_proposed_is_shown_escaped_and_cannot_fill_a_template() -> None:
    found = principles(pairs(), Finder())
    page = found._repr_html_()
    assert page and "<script" not in page and "&lt;script&gt;" in page and "\x1b" not in page + repr(found)
    assert all("{" not in one.text for one in found.candidates)
    assert "1 principle of 3 candidates" in repr(found) and "without principles: 50.0% right" in repr(found)


def test_none_is_kept_where_none_explains() -> None:
    class Blind(Finder):
        def answer(self, text: str) -> str:
            return (
                "<principles>Be kind.</principles>"
                if "<principles>" in text
                else "<reason>.</reason><better>A</better>"
            )

    found = principles(pairs(40), Blind())
    assert (
        len(found) == 0 and found.text == "" and found.together is None and found.prompt() == wb.rewards.judge.PAIRWISE
    )
    assert "0 principles of 1 candidate" in repr(found)


def test_bad_input_is_refused() -> None:
    class Mute(Finder):
        def answer(self, text: str) -> str:
            return ""

    with pytest.raises(RewardError, match="principles proposed"):
        principles(pairs(20), Mute())
    with pytest.raises(DataError, match="two questions"):
        principles(pairs(1), Finder())
    with pytest.raises(SettingError, match="checks"):
        principles(pairs(), Finder(), checks=0)


def test_lines_and_merging() -> None:
    assert list(lines("1. One {x}\n\n - two\n(3) three\n• four  ")) == ["One (x)", "two", "three", "four"]
    assert merged(["Be short and clear.", "be clear, and short", "Cite sources."]) == [
        ("Be short and clear.", 2),
        ("Cite sources.", 1),
    ]


@given(st.lists(st.text(max_size=20), max_size=12))
def test_merging_loses_nothing(texts: list[str]) -> None:
    found = merged(texts)
    assert sum(count for _, count in found) == len(texts) and {text for text, _ in found} <= set(texts)
    assert len(merged([text for text, _ in found])) == len(found)
