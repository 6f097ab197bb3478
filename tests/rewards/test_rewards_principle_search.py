"""Principles out of pairs: proposed from some, kept where they explain others; near copies are one; what cannot be read is counted."""

from __future__ import annotations

import re

import pytest
from tests_rewards import Says

import workbench as wb
from workbench.base.errors import DataError
from workbench.rewards.principle_search import _merged

PAIRS = wb.datasets.samples(
    [{"prompt": f"question {n}?", "chosen": f"yes{'!' * n}", "rejected": "no" * (n + 20)} for n in range(20)]
)


def annotator(text: str, seed: int) -> str:
    """A model that proposes brevity, politeness and once nothing; judging, it can follow brevity alone."""
    if "People prefer the first answer" in text:
        if "question 3?" in text:
            return "I cannot say."
        number = int(re.search(r"question (\d+)", text)[1])  # type: ignore[index]
        said = (
            "1. Shorter answers are better.\n" if number % 2 else "- Shorter answers are better!\n* Be polite to all."
        )
        return f"<reason>it is short</reason><principles>{said}</principles>"
    first = "Answer A:\n<<<" in text and re.search(r"Answer A:\n<<<\w+\nyes", text)
    if "Shorter" in text:
        return f"<reason>by length</reason><better>{'A' if first else 'B'}</better>"
    return "<reason>both are polite</reason><better>A</better>"


def test_principles_are_kept_where_they_explain_other_pairs() -> None:
    """Brevity is right on all held-out pairs, politeness on the half whose better answer stands first."""
    found = wb.rewards.principles(PAIRS, Says(annotator), most=5, check=6)
    assert [one.text for one in found] == ["Shorter answers are better."] or [one.text for one in found] == [
        "Shorter answers are better!"
    ]
    assert found[0].accuracy.value == 1.0 and found[0].proposed >= 8
    assert [(one.text, one.accuracy.value) for one in found.dropped] == [("Be polite to all.", 0.5)]
    assert found.pairs == (10, 6) and "1 of 2 proposed" in repr(found)
    judge = wb.rewards.reasoning(
        wb.rewards.Pairwise, template="{prompt}{answer_a}{answer_b}{principles}{instructions}", principles=found.text
    )
    assert "1. Shorter answers are better" in judge.text("q", ["a", "b"])


def test_proposals_that_cannot_be_read_are_counted() -> None:
    """A model that proposes nothing leaves nothing, and the object says so."""
    found = wb.rewards.principles(PAIRS, Says(lambda text, seed: "hm"), check=2)
    assert (len(found), found.lost, found.text) == (0, 10, "")
    assert "10 of 10 pairs" in repr(found)


def test_near_copies_are_one() -> None:
    """Punctuation, case and one further word of many do not make another principle."""
    said = ["Answers name their sources.", "answers name their sources", "Answers are short."]
    assert _merged(said) == [("Answers name their sources.", 2), ("Answers are short.", 1)]


def test_one_question_is_too_few() -> None:
    """A principle is checked on questions that it was not proposed from."""
    with pytest.raises(DataError, match="two questions"):
        wb.rewards.principles(PAIRS[:1], Says(annotator))
