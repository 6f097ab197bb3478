"""Samples of judged answers: every form that people have them in, what is refused, splits that share no question, pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.base.errors import DataError
from workbench.datasets import Sample, Samples

# records as the data sets have them, by their documentation
GALLERY = {
    "unique_id": "7",
    "input": [{"role": "user", "content": "2+2?", "name": None}],
    "output": [
        {"answer": {"role": "assistant", "content": "4", "label": {"helpfulness": 4, "verbosity": 1}, "reward": {"score": 0.0, "details": []}}},
        {"answer": {"role": "assistant", "content": "5", "label": {"helpfulness": 0, "verbosity": 2}}},
    ],
    "task_category": "math",
    "source": "helpsteer2",
    "created_at": "2025-06-01T00:00:00",
    "metadata": {"preferred": "A", "preference_strength": 2},
}  # fmt: skip
HELPSTEER2 = {
    "prompt": "2+2?",
    "response": "4",
    "helpfulness": 4,
    "correctness": 4,
    "coherence": 4,
    "complexity": 0,
    "verbosity": 1,
}
HELPSTEER3 = {
    "domain": "code",
    "context": [{"role": "user", "content": "2+2?"}],
    "response1": "5",
    "response2": "4",
    "overall_preference": 3,
}
ULTRA = {
    "source": "evol_instruct",
    "instruction": "2+2?",
    "completions": [
        {"model": "a", "response": "4", "annotations": {"helpfulness": {"Rating": "5", "Rationale": "right"}, "honesty": {"Rating": "N/A"}}, "overall_score": 9.0},
        {"model": "b", "response": "5", "annotations": {"helpfulness": {"Rating": "1"}}, "overall_score": 2.0},
    ],
}  # fmt: skip
TURNS = [{"role": "user", "content": "2+2?"}]
SAID = {name: [*TURNS, {"role": "assistant", "content": name}] for name in ("4", "5")}
HH = "\n\nHuman: 2+2?\n\nAssistant: "
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "TRL, explicit prompt": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, ("4", "5")),
    "TRL, implicit prompt": ({"chosen": "2+2? 4", "rejected": "2+2? 5"}, (" 4", " 5")),
    "TRL, conversations": ({"prompt": TURNS, "chosen": SAID["4"][1:], "rejected": SAID["5"][1:]}, ("4", "5")),
    "TRL, conversations, implicit": ({"chosen": SAID["4"], "rejected": SAID["5"]}, ("4", "5")),
    "UltraFeedback, binarized": ({"prompt": "2+2?", "prompt_id": "x", "chosen": SAID["4"], "rejected": SAID["5"], "score_chosen": 9, "score_rejected": 2}, ("4", "5")),
    "Anthropic's transcripts": ({"chosen": HH + "4", "rejected": HH + "5"}, ("4", "5")),
    "OpenRLHF, margin": ({"input": "2+2?", "chosen": "4", "rejected": "5", "margin": 1.5}, ("4", "5")),
    "RewardBench": ({"prompt": "2+2?", "chosen": "4", "chosen_model": "a", "rejected": "5", "rejected_model": "b", "subset": "math-prm", "id": 3}, ("4", "5")),
}  # fmt: skip


def one(record: dict[str, Any]) -> Sample:
    """The sample of one record."""
    (found,) = wb.datasets.samples([record])
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_read_in_every_form(name: str) -> None:
    """The chosen answer comes first and is preferred; the prompt is the same in all forms."""
    record, texts = PAIRS[name]
    found = one(record)
    assert found.question == "2+2?"
    assert tuple(answer.text for answer in found.answers) == texts
    assert found.best == (0,)


def test_what_pairs_say_beside_is_kept() -> None:
    """Scores and models are the answers', the subset is the category, the margin stays in the metadata."""
    binarized = one(PAIRS["UltraFeedback, binarized"][0])
    assert [answer.scores for answer in binarized.answers] == [{"score": 9.0}, {"score": 2.0}]
    bench = one(PAIRS["RewardBench"][0])
    assert (bench.id, bench.category, [answer.model for answer in bench.answers]) == ("3", "math-prm", ["a", "b"])
    assert one(PAIRS["OpenRLHF, margin"][0]).metadata["margin"] == 1.5


def test_reward_bench_2_has_several_of_each() -> None:
    """The chosen come first; with more than one they are tied for the best."""
    record = {
        "prompt": "2+2?",
        "chosen": ["4", "four"],
        "rejected": ["5", "6"],
        "subset": "Ties",
        "models": ["a", "b", "c", "d"],
    }
    found = one(record)
    assert [answer.text for answer in found.answers] == ["4", "four", "5", "6"]
    assert (found.best, [answer.model for answer in found.answers]) == ((0, 1), ["a", "b", "c", "d"])
    assert sorted(pair.id for pair in wb.datasets.samples([record]).pairs()) == ["0:0-2", "0:0-3", "0:1-2", "0:1-3"]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_data_sample_is_read_also_with_json_columns(as_text: bool, tmp_path: Path) -> None:
    """RM-Gallery writes parquet with `input`, `output` and `metadata` as JSON text. A reward without details is none."""
    record = dict(GALLERY)
    if as_text:
        record |= {name: json.dumps(record[name]) for name in ("input", "output", "metadata")}
    pd.DataFrame([record]).to_parquet(tmp_path / "x.parquet")
    (found,) = wb.datasets.samples(tmp_path / "x.parquet")
    assert (found.id, found.category, found.source, found.question) == ("7", "math", "helpsteer2", "2+2?")
    assert [answer.scores for answer in found.answers] == [
        {"helpfulness": 4.0, "verbosity": 1.0},
        {"helpfulness": 0.0, "verbosity": 2.0},
    ]
    assert (found.best, found.metadata["preference_strength"]) == ((0,), 2)


def test_ratings_and_preferences() -> None:
    """HelpSteer2 rates an answer, HelpSteer3 prefers the second above 0, UltraFeedback's ratings are numbers."""
    rated = one(HELPSTEER2)
    assert rated.answers[0].scores["helpfulness"] == 4 and rated.best is None
    assert (one(HELPSTEER3).best, one(HELPSTEER3).category) == ((1,), "code")
    assert one({"prompt": "?", "response_1": "a", "response_2": "b", "preference_strength": 0}).best == (0, 1)
    ultra = one(ULTRA)
    assert [answer.scores for answer in ultra.answers] == [
        {"helpfulness": 5.0, "overall_score": 9.0},
        {"helpfulness": 1.0, "overall_score": 2.0},
    ]
    assert (ultra.best, ultra.preferred("overall_score"), ultra.preferred("honesty")) == (None, (0,), None)


def test_what_is_no_sample_is_refused_by_file_and_row(tmp_path: Path) -> None:
    """The error names the fields that were found and the forms that are known."""
    with pytest.raises(DataError, match=r"row 0.*expected those of a known form.*found text, stars"):
        wb.datasets.samples([{"text": "x", "stars": 3}])
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(HELPSTEER2)}\n{json.dumps({'chosen': 'a', 'rejected': 'b'})}\n")
    with pytest.raises(DataError, match=r"x\.jsonl, row 1"):
        wb.datasets.samples(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="no samples in an empty list"):
        wb.datasets.samples([])
    with pytest.raises(DataError, match="nothing in common"):
        wb.datasets.samples([{"chosen": "yes", "rejected": "no"}])
    own: dict[str, Any] = dict(HELPSTEER2)
    own["prompt"] = own
    with pytest.raises(DataError, match="column 'prompt' of samples, row 0"):
        wb.datasets.samples([own])
    with pytest.raises(DataError, match=r"row 0.*expected those of a known form"):  # missing, as pandas has it
        wb.datasets.samples([{**HELPSTEER2, "response": float("nan")}])
    with pytest.raises(DataError, match="expected texts"):
        wb.datasets.samples([{**ULTRA, "completions": [{"model": "a", "response": 4}]}])


@given(
    st.lists(st.integers(0, 12), min_size=8, max_size=60).filter(lambda found: len(set(found)) > 1), st.integers(0, 5)
)
def test_a_split_shares_no_question(numbers: list[int], seed: int) -> None:
    """Nothing is lost, no question is on both sides, and the same call gives the same split."""
    all_of_them = wb.datasets.samples(
        [{"prompt": f"q{n}", "response": f"a{i}", "score": i} for i, n in enumerate(numbers)]
    )
    train, held = all_of_them.split(0.3, seed)
    assert {s.id for s in train} | {s.id for s in held} == {s.id for s in all_of_them}
    assert not {s.question for s in train} & {s.question for s in held}
    assert all_of_them.split(0.3, seed) == (train, held)


def test_samples_are_shown_and_become_a_table() -> None:
    """The repr counts; the table has a row per answer; text of the data is escaped in HTML."""
    found = wb.datasets.samples([{**GALLERY, "task_category": "<b>"}])
    assert "1 of 1 questions" in repr(found) and "helpfulness 0 to 4" in repr(found)
    assert "<b>:" not in str(found._repr_html_())
    table = found.to_pandas()
    assert list(table["preferred"]) == [True, False] and list(table["helpfulness"]) == [4.0, 0.0]
    assert isinstance(found[:1], Samples)
