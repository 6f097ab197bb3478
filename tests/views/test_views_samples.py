"""Samples and groups: what is shown of each row, in which order, and what is said of rows without a judgement."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.lint import lint

import workbench as wb
from workbench.rewards import Score, Status
from workbench.testing.rewards import answered
from workbench.views import document as doc
from workbench.views.sample_table import difference, samples_table
from workbench.views.samples import SampleIndex, samples

NAN = float("nan")


def judged() -> wb.DataProto:
    """Three prompts of two samples: one right of two, one that our side failed to judge, one not applicable."""
    scores = [
        Score(value=1.0, answer="1", why="right", parts={"format": 1.0}),
        Score(value=0.25, answer="7", why="wrong"),
        Score(value=0.5, why="half"),
        Score(status=Status.INFRA_ERROR, why="it <broke>", error="Traceback: <boom>"),
        Score(value=-1.0, why="rude"),
        Score(status=Status.NOT_APPLICABLE, why="no truth"),
    ]
    batch = answered(["a", "bb", "ccc", "d", "<i>e</i>", "f"], uid=["x", "x", "y", "y", "z", "z"])
    return batch.with_columns(
        {
            "score": scores,
            "scored": torch.tensor([score.scored for score in scores]),
            "reward": torch.tensor([score.value for score in scores]),
            "advantages": torch.tensor([1.0, -1, 0, 0, 0.5, 0])[:, None] * batch["response_mask"],
            "finish_reason": ["stop", "length", "stop", "stop", "stop", "stop"],
        }
    )


def test_a_row_without_a_judgement_has_no_reward() -> None:
    frame = samples_table(judged())
    assert frame["reward"].tolist()[:3] == [1.0, 0.25, 0.5]
    assert [row for row in frame.index if math.isnan(frame["reward"][row])] == [3, 5]
    assert frame["tokens"].tolist() == [1, 2, 3, 1, 8, 1] and frame["finish"][1] == "length"
    assert frame["answer"].tolist()[:2] == ["1", "7"] and frame["status"][3] == "infra_error"


@pytest.mark.parametrize(
    ("order", "by_group", "expected"),
    [
        ("index", False, [0, 1, 2, 3, 4, 5]),
        ("worst", False, [3, 4, 1, 2, 0, 5]),  # what broke, then the judged, then what nobody judges
        ("best", False, [0, 2, 1, 4, 3, 5]),
        ("worst", True, [4, 5, 3, 2, 1, 0]),  # group means −1, 0.5, 0.625
        ("best", True, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_orders(order: str, by_group: bool, expected: list[int]) -> None:
    assert wb.views.samples(judged(), order=order, by_group=by_group).frame.index.tolist() == expected


def test_groups_of_equal_means_stay_together() -> None:
    batch = answered(["a"] * 4, uid=["x", "y", "x", "y"]).with_columns({"reward": torch.tensor([0.0, 1, 1, 0])})
    assert wb.views.samples(batch, by_group=True).frame["group"].tolist() == [0, 0, 1, 1]


def test_groups_count_only_what_was_scored() -> None:
    frame = wb.views.groups(judged())
    assert frame["samples"].tolist() == [2, 2, 2] and frame["scored"].tolist() == [2, 1, 1]
    assert frame["reward_mean"].tolist() == [0.625, 0.5, -1.0]
    assert frame["reward_std"].tolist()[0] == pytest.approx(0.5303) and math.isnan(frame["reward_std"][1])
    assert frame["reward_min"].tolist() == [0.25, 0.5, -1.0] and frame["reward_max"].tolist() == [1.0, 0.5, -1.0]
    assert frame["advantage_range"].tolist() == [2.0, 0.0, 0.5]


def test_before_the_reward_there_is_something_to_look_at() -> None:
    batch = answered(["a\x1b[31m\nb", "c"])
    assert "reward" not in samples_table(batch) and SampleIndex(batch).groups["samples"].tolist() == [1, 1]
    assert lint(samples(batch).html()) == [] and lint(samples(batch, by_group=True).html()) == []
    assert samples(batch).text().splitlines()[:3] == ["row 0 (group 0)  8 tokens", "  question 0", "  → a\\x1b[31m\\nb"]


def test_text_says_what_html_says() -> None:
    text = samples(judged(), rows=2).text()
    assert text.splitlines()[0] == "6 samples · mean reward 0.1875 (-1 to 1) · 1 infra error · 1 not applicable"
    assert text.splitlines()[1] == "row 3 (group 1)  not scored  it <broke>  1 tokens, stop"
    assert text.splitlines()[4] == "row 4 (group 2)  reward -1  rude  8 tokens, stop"
    assert repr(wb.views.samples(judged(), rows=2)) == text


def test_html_folds_tracebacks_and_counts_what_was_not_judged() -> None:
    html = samples(judged(), rows=2).html()
    assert lint(html) == [] and "<details><summary" in html and "Traceback: &lt;boom&gt;" in html
    assert "1 infra error · 1 not applicable</b>" in html and "2 of 6 samples, worst first" in html
    assert "<i>e</i>" not in html and "&lt;i&gt;e&lt;/i&gt;" in html
    assert wb.views.samples(judged(), rows=2)._repr_html_() == html


def test_a_bar_of_the_static_table_is_measured_by_all_rows_as_in_the_live_one() -> None:
    html = samples(judged(), rows=1, where={"reward": 0.25})._repr_html_()
    assert ".75) 0% 25%," in html and "100%," not in html


def test_by_group_says_the_prompt_once() -> None:
    html = samples(judged(), order="best", by_group=True).html()
    assert lint(html) == [] and [html.count(f"question {row}") for row in (0, 1, 2)] == [1, 0, 1]
    assert "2 samples · reward mean 0.625, std 0.5303 · advantage range 2" in html
    assert "nan" not in html
    assert html.index("group 0") < html.index("group 1") < html.index("group 2")


@pytest.mark.parametrize(
    ("chat", "question"),
    [
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "a"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}], "<image>what?"),
        ([{"role": "system", "content": "s"}], "s"),
        ("plain", "plain"),
        (None, ""),
    ],
)
def test_the_question_is_the_last_thing_a_user_said(chat: object, question: str) -> None:
    batch = answered(["a"]).without("raw_prompt").with_columns({"raw_prompt": [chat]})
    assert samples_table(batch)["prompt"].tolist() == [question]


def rewarded(values: list[float], texts: list[str] | None = None) -> wb.DataProto:
    batch = answered(texts or [f"text {value}" for value in values])
    scores = [
        Score(value=value) if value == value else Score(status=Status.INFRA_ERROR, why="down") for value in values
    ]
    reward = torch.tensor(values).nan_to_num(0.0)
    made = {"reward": reward, "scored": torch.tensor([one.scored for one in scores]), "score": scores}
    return batch.with_columns({**made, "uid": [f"p{row // 2}" for row in range(len(values))]})


def test_a_headline_says_what_the_batch_is() -> None:
    assert SampleIndex(answered(["a"])).headline == "" and SampleIndex(answered(["a"])).bins == []
    said = SampleIndex(rewarded([1.0, 0.0, 0.0, 0.0])).headline
    assert said == "4 samples · 1 right · 3 wrong · 1 of 2 groups have equal rewards"
    said = SampleIndex(rewarded([0.25, 0.75, float("nan"), -1.0])).headline
    assert said == "4 samples · mean reward 0 (-1 to 0.75) · 1 infra error"
    assert SampleIndex(rewarded([float("nan")])).headline == "1 sample · none scored · 1 infra error"
    made = samples(rewarded([1.0, 0.0]))
    assert made.text().splitlines()[0] == "2 samples · 1 right · 1 wrong" and "1 right · 1 wrong</b>" in made.html()


def test_the_bins_count_every_scored_sample_once() -> None:
    assert SampleIndex(rewarded([1.0, 0.0, 0.0, float("nan")])).bins == [(0.0, 0.0, 2), (1.0, 1.0, 1)]
    many = SampleIndex(rewarded([row / 40 for row in range(40)])).bins
    assert len(many) == 12 and sum(one[2] for one in many) == 40
    assert all(one[1] == other[0] for one, other in itertools.pairwise(many))


def test_two_responses_are_laid_over_each_other() -> None:
    batch = rewarded([1.0, 0.0], ["6 - 2 = 4 <b>", "6 - 2 = 5 <b>"])
    found = difference(SampleIndex(batch).frame, 0, 1).document()
    assert doc.text(found).splitlines()[-1].strip() == "6 - 2 = [-4-]{+5+} <b>"
    page = doc.html(found)
    assert lint(page) == [] and "<s " in page and "&lt;b&gt;" in page


def test_a_response_that_thinks_shows_its_conclusion() -> None:
    page = samples(rewarded([1.0], ["<think>\none two three\n</think>\nIt is 4."])).row(0).html()
    assert lint(page) == [] and "thinking, 4 words" in page
    assert page.index("reward 1") < page.index("prompt") < page.index("thinking, 4 words") < page.index("It is 4.")
