"""The one HTML sink: everything escaped, nothing that JupyterLab's sanitiser would remove."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.lint import lint

import workbench as wb
from workbench.rewards import Score, Status
from workbench.testing.rewards import answered
from workbench.views.document import Fold, Image, Table, bar, block, cut, escape, filled, html, pairs, text
from workbench.views.sample_table import samples_table
from workbench.views.samples import SampleIndex, samples

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)><svg onload=x>\u202eevil\x1b[31m"


@given(st.text())
def test_whatever_is_shown_stays_text(text: str) -> None:
    shown = html([block(text), Fold(text, ""), pairs([(text, text)]), bar(0.5, text), Table([text], [[text]])])
    assert lint(shown) == [] and shown.count("<script") == 0


@pytest.mark.parametrize(
    ("markup", "name"),
    [
        ("<style>a{}</style>", "<style"),
        ("<div id='x'>", "id="),
        ('<b onclick="x">', "an event handler"),
        ('<b style="color:var(--x)">', "var("),
        ('<b style="position:fixed">', "position"),
        ("<svg>", "<svg"),
    ],
)
def test_lint_names_what_would_be_removed(markup: str, name: str) -> None:
    assert name in lint(markup)


def test_escaping_makes_controls_visible_and_cuts() -> None:
    assert "\\x1b" in escape("\x1b") and "\\x202e" in escape("\u202e") and cut("abcdef", 4) == "abc…"
    assert lint(html(Image(lambda: b"png"))) == []


def judged() -> wb.DataProto:
    batch = answered([HOSTILE, "#### 4", "x"], ["1", "4", "2"], finish_reason=["stop", "length", "stop"])
    scores = [
        Score(value=0.0, why=HOSTILE, answer=HOSTILE),
        Score(value=1.0, parts={"format": 0.5}, answer="4", why="right"),
        Score(status=Status.INFRA_ERROR, why="it broke", error=f"Traceback: {HOSTILE}"),
    ]
    return batch.with_columns(
        {
            "score": scores,
            "reward": torch.tensor([0.0, 1.0, 0.0]),
            "reward/format": torch.tensor([float("nan"), 0.5, float("nan")]),
            "advantages": torch.ones(batch["response_mask"].shape),
            "uid": ["a", "a", "b"],
        }
    )


def test_samples_worst_first_with_what_the_reward_saw() -> None:
    frame = samples_table(judged())
    assert frame["group"].tolist() == [0, 0, 1] and frame["truth"].tolist() == ["1", "4", "2"]
    assert frame["advantage"].tolist() == [1, 1, 1] and frame["reward/format"][1] == 0.5
    page = samples(judged()).html()
    assert lint(page) == [] and "traceback" in page and "infra_error" in page and "truth" in page
    assert samples(judged(), order="best").text().splitlines()[1].startswith("row 1 (group 0)  reward 1")
    assert wb.views.samples(judged(), order="best").frame["reward"].iloc[0] == 1
    with pytest.raises(ValueError, match="did you mean 'worst'"):
        samples(judged(), order="wurst").html()


def test_groups() -> None:
    frame = SampleIndex(judged()).groups
    assert frame["samples"].tolist() == [2, 1] and frame["reward_mean"].tolist() == [0.5, 0.0]
    assert frame["reward_std"][0] == pytest.approx(0.7071, abs=1e-4)


def test_hostile_batches_stay_text() -> None:
    batch = judged().with_columns({HOSTILE: [HOSTILE] * 3}).with_meta(note=HOSTILE)
    page = batch._repr_html_()
    assert lint(page) == [] and "<script" not in page and "meta_info" in page
    assert "P=2" in page and "f32[3]" in page


def test_the_batchs_text_says_shape_writer_and_first_values() -> None:
    origin = wb.Origin(stage="reward")
    text = repr(wb.DataProto({"reward": torch.tensor([0.5, 1.0])}, {"uid": ["a", "b"]}, origins={"reward": origin}))
    assert text.splitlines()[0] == "DataProto of 2 rows (P=2 G=1 B=2)"
    assert text.splitlines()[1].split() == ["reward", "f32[2]", "reward", "0.5", "1"]


def test_a_table_names_its_empty_columns_in_a_line() -> None:
    workers = filled(["rank", "pool", "GPUs"], [["0", "–", "–"], ["1", "–", "–"]])
    assert text(workers).split() == ["rank", "0", "1", "no", "pool,", "GPUs"]
    assert text(filled(["rank"], [["0"]])).split() == ["rank", "0"] and text(filled(["rank"], [])) == ""
    assert html(workers).count("<th ") == 1
