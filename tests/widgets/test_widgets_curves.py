"""Curves in the page: names and patterns, the data that is sent, the samples that a point opens, and the script in Chromium."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from faults.test_faults_looking import alone
from support.hostile import HOSTILE
from support.lab import in_chromium, watched_page

import workbench as wb
from workbench.base.errors import RunError, SettingError
from workbench.views.curves import LiveFigure, memory, smooth
from workbench.views.plots import Plots
from workbench.widgets.display import Progress
from workbench.widgets.layer import CurvePlots


def folder(path: Path, rows: list[dict[str, Any]]) -> wb.Run:
    path.mkdir(parents=True)
    (path / "settings.json").write_text(json.dumps({"format": 4, "train": {"steps": len(rows)}}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return wb.load_run(path)


def rows(steps: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "training/global_step": step, "critic/score/mean": step / 10, "critic/score/max": 1.0, "actor/kl_loss": 0.1,
            "mine/len": 3.0 * step, "note": "text", **more,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    path = tmp_path_factory.mktemp("curves") / "trained"
    data = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    pipe = wb.recipes.grpo(wb.engines.local(tiny, lr=1e-3), group_size=2, max_tokens=12)
    return wb.train_blocking(pipe, data, steps=3, batch_size=2, run=path, trace_freq=2)


def titles(figure: Any) -> list[str]:
    return [one["title"] for one in figure.plots.columns()["plots"]]


def test_curves_are_chosen_by_title_name_and_pattern(tmp_path: Path) -> None:
    run = folder(tmp_path / "a", rows(6))
    figure = run.curves("KL", "critic/*", "mine/len")
    assert titles(figure) == ["KL", "critic/score/mean", "critic/score/max", "mine/len"]
    assert [axes.get_ylabel() for axes in figure.axes] == titles(figure)  # the static form has the same plots
    assert titles(run.curves("*/len")) == ["mine/len"] and titles(run.curves()) == ["reward", "KL"]
    named = folder(tmp_path / "b", rows(3, **{"odd[0]": 1.0}))
    assert titles(named.curves("odd[0]")) == ["odd[0]"]  # a name before a pattern
    assert "Shown size" in repr(run.curves())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("rewrad", "did you mean 'reward'?; expected one of reward, KL, a metric, or a pattern (actor/*, critic/*, mine/*"),
        ("mine/length", "did you mean 'mine/len'?"),
        ("theirs/*", "'theirs/*' is not a plot or metric of these runs"),
        ("note", "'note' is not a plot or metric of these runs"),
    ],
)  # fmt: skip
def test_a_name_that_no_run_has_is_refused_with_the_nearest(asked: str, said: str, tmp_path: Path) -> None:
    run = folder(tmp_path / "a", rows(4))
    with pytest.raises(SettingError, match=re.escape(said)):
        run.curves("reward", asked)


def test_runs_are_sent_as_columns_over_all_their_steps(tmp_path: Path) -> None:
    broken = rows(5)
    broken[1]["critic/score/mean"], broken[2]["critic/score/mean"], broken[3]["critic/score/mean"] = (
        math.nan,
        math.inf,
        1 / 3,
    )
    short = [row for row in rows(7) if row["training/global_step"] % 2]
    run, other = folder(tmp_path / "a", broken), folder(tmp_path / "b", short)
    sent = CurvePlots(run.curves("reward", short=other)).answer({"kind": "columns"})
    assert json.loads(json.dumps(sent, allow_nan=False)) == sent
    assert sent["steps"] == [1, 2, 3, 4, 5, 7] and [one["name"] for one in sent["runs"]] == ["a", "short"]
    first, second = sent["plots"][0]["lines"]
    assert first["values"] == [0.1, None, None, 0.333333, 0.5, None] and first["run"] == 0
    assert second["values"] == [0.1, None, 0.3, None, 0.5, 0.7] and second["colour"] != first["colour"]
    assert sent["smooth"] == memory([]) == 0.7
    alone_ = run.curves().plots.columns()["plots"][0]["lines"]
    assert [line["words"] for line in alone_] == ["training batch"] and alone_[0]["smoothed"]


def test_ten_thousand_steps_are_sent_as_about_a_megabyte(tmp_path: Path) -> None:
    more = {f"mine/{number}": math.pi * number for number in range(11)}
    sent = folder(tmp_path / "a", rows(10_000, **more)).curves("mine/*").plots.columns()
    assert len(sent["plots"]) == 12 and len(json.dumps(sent)) < 1_500_000


def test_a_point_opens_its_steps_samples_or_says_why_not(trained: wb.Run, tmp_path: Path) -> None:
    widget = CurvePlots(trained.curves(other=folder(tmp_path / "b", rows(3))))
    there = list(trained.traces)
    assert widget.answer({"kind": "columns"})["runs"][0]["traces"] == there and 1 not in there
    opened = widget.answer({"kind": "samples", "run": 0, "step": 2})
    assert opened["html"] == wb.views.samples(trained.traces[2])._repr_html_()
    assert opened["code"].endswith(".traces[2])")
    with pytest.raises(RunError, match=r"step 1 has no trace.*one of the steps \[2.*trace_freq=1"):
        widget.answer({"kind": "samples", "run": 0, "step": 1})
    with pytest.raises(RunError, match="a run that records its steps"):
        widget.answer({"kind": "samples", "run": 1, "step": 1})


class Told:
    """A widget whose errors are replies, as its `_on_message` makes them."""

    def __init__(self, widget: CurvePlots) -> None:
        self._esm, self._widget = widget._esm, widget

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        sent: list[dict[str, Any]] = []
        self._widget.send = sent.append
        self._widget._on_message(None, message, None)
        return sent[0]


def drawn(page: Any, widget: CurvePlots) -> None:
    """The widget alone in a page that has its style sheet, too."""
    alone(page, Told(widget), ())
    page.add_style_tag(content=widget._css)
    page.locator(".wb-canvas canvas").first.wait_for()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@in_chromium
def test_a_pointer_shows_values_and_a_click_opens_samples(trained: wb.Run) -> None:
    figure = trained.curves()
    widget = CurvePlots(figure)
    column = figure.plots.columns()["plots"][0]["lines"][0]["values"]
    with watched_page() as (page, asked, _):
        drawn(page, widget)
        over, said = page.locator(".u-over").first, page.get_by_role("status")
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
        mean = smooth(column, 0.7)[1]
        page.get_by_text("step 2 · reward").wait_for()
        shown = re.search(r"training batch (\S+) \(running mean (\S+)\)", said.inner_text())
        assert shown and float(shown[1]) == pytest.approx(column[1], rel=1e-3)
        assert float(shown[2]) == pytest.approx(mean, rel=1e-3)  # the script's running mean is that of `views`
        page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 40)
        page.get_by_text("4 samples").first.wait_for()
        assert ".traces[2])" in page.locator(".wb-code").inner_text()
        page.keyboard.press("Home")
        page.get_by_text("step 1 · reward").wait_for()
        page.keyboard.press("Enter")
        page.get_by_text("step 1 has no trace").wait_for()
        assert page.get_by_text("4 samples").count() == 0
        page.get_by_label("smoothing").fill("0")
        page.get_by_label("log scale").check()
        page.locator(".wb-canvas").first.press("End")
        page.get_by_text("step 3 · reward").wait_for()
        assert "mean" not in said.inner_text()
    assert [url for url in asked if not url.startswith(("about:", "data:", "blob:"))] == []


@in_chromium
def test_the_axis_follows_a_run_that_begins_with_one_step(tmp_path: Path) -> None:
    """Drawn at its first step and again at its ninth."""
    figure = LiveFigure()
    with watched_page() as (page, _, _):
        figure.plots = Plots({"this run": Progress(rows(1), {})})
        drawn(page, CurvePlots(figure))
        page.get_by_text("step 1 · reward").wait_for()
        figure.plots = Plots({"this run": Progress(rows(9), {})})
        page.evaluate("() => window['change:version']()")
        page.get_by_text("step 9 · reward").wait_for()
        box = page.locator(".u-over").first.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
        page.get_by_text("step 5 · reward").wait_for()  # the middle of steps 1 to 9


@in_chromium
def test_names_that_are_markup_are_drawn_as_text(tmp_path: Path) -> None:
    run = folder(tmp_path / "a", rows(12, **{HOSTILE: 1.0}))
    other = folder(tmp_path / "b", rows(12))
    widget = CurvePlots(run.curves("reward", "*script*", **{HOSTILE: other}))
    sent = json.dumps(widget.answer({"kind": "columns"}))
    assert not set(sent) & set("\x1b\x07\u202e\u202c")
    with watched_page() as (page, asked, dialogs):
        drawn(page, widget)
        page.locator(".wb-canvas canvas").nth(1).wait_for()
        assert "<script>" in page.locator(".wb-bar").inner_text()
        assert "<script>" in page.locator(".wb-plots").inner_text()
        assert page.locator("body script, body img, body svg, body a, body style").count() == 0
    assert dialogs == [] and [url for url in asked if not url.startswith(("about:", "data:", "blob:"))] == []
