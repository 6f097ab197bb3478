"""Several seeds: means, intervals and paired differences that were computed by hand, and a figure with bands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.base.errors import SettingError
from workbench.functional.passes import t95
from workbench.views.seeds import interval


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    """A function that makes a run's folder of a name, a seed and the scores of its steps."""

    def make(name: str, seed: int, *scores: float | None) -> Path:
        folder = tmp_path / f"{name}{seed}"
        folder.mkdir()
        (folder / "settings.json").write_text(json.dumps({"format": 4, "train": {"seed": seed, "steps": len(scores)}}))
        rows = [{"training/global_step": step, "critic/score/mean": score} for step, score in enumerate(scores, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def test_students_t_is_that_of_the_tables() -> None:
    wanted = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423, 200: 1.9719}
    assert {freedom: round(t95(freedom), 4) for freedom in wanted} == wanted


def test_means_and_differences_by_hand(runs: Any) -> None:
    a = [runs("a", seed, 0.0, value - 0.1, value + 0.1) for seed, value in enumerate((0.2, 0.4, 0.6))]
    b = [runs("b", seed, 0.0, value - 0.1, value + 0.1) for seed, value in enumerate((0.3, 0.5, 0.8))]
    found = wb.views.seeds({"grpo": a, "rloo": [*b, runs("b", 7, 0.9, 0.9)]}, last=2)
    table = found.table
    # a: 0.2, 0.4, 0.6 have mean 0.4 and deviation 0.2: 4.3027 · 0.2 / √3 = 0.49683
    assert table.loc["grpo", ["mean", "low", "high"]].tolist() == pytest.approx([0.4, -0.09683, 0.89683], abs=1e-5)
    # b − a, seed by seed: 0.1, 0.1, 0.2 have mean 0.13333 and deviation 0.057735: 4.3027 · 0.057735 / √3 = 0.14342
    pair = table.loc["rloo", ["difference", "difference low", "difference high"]].tolist()
    assert pair == pytest.approx([0.133333, -0.010088, 0.276755], abs=1e-5)
    assert table["seeds"].tolist() == [3, 4] and table["common seeds"].tolist() == [0, 3]
    assert "+0.1333" in str(found) and "[-0.01009, 0.2768]" in str(found) and "mean of the last 2 steps" in str(found)
    assert "data:image/png" in found._repr_html_()


def test_the_figure_has_a_line_and_a_band_for_each_name(runs: Any) -> None:
    a = [wb.load_run(runs("a", seed, 0.0, 0.1 * seed, None, 0.5)) for seed in range(3)]
    made = wb.views.seeds({"a <b>": a, "alone": [runs("c", 0, 0.3, 0.4)]}).figure()
    axes = made.axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 4], [1, 2]]  # step 3 has no number
    assert list(axes.lines[0].get_ydata()) == pytest.approx([0.0, 0.1, 0.5]) and len(axes.collections) == 1
    low, high = (band(axes.collections[0].get_paths()[0].vertices[:, 1]) for band in (min, max))
    # at step 2: 0, 0.1, 0.2 have deviation 0.1: 0.1 ± 4.3027 · 0.1 / √3
    assert (low, high) == pytest.approx((0.1 - 0.248414, 0.5), abs=1e-5)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a <b> (3 seeds)", "alone (1 seed)"]


def test_one_seed_has_no_interval_and_other_seeds_no_difference(runs: Any) -> None:
    found = wb.views.seeds({"a": [runs("a", 0, 0.3)], "<i>b": [runs("b", 1, 0.5)]})
    assert "no common seed" in str(found) and found.difference("<i>b", "a") is None and "<i>" not in found._repr_html_()
    assert interval([0.3]).low != interval([0.3]).low  # NaN


def test_what_cannot_be_compared_is_refused(runs: Any) -> None:
    one = runs("a", 0, 0.3)
    for groups, options, said in (
        ({}, {}, "nothing to compare"),
        ({"a": []}, {}, "nothing to compare"),
        ({"a": [one, one]}, {}, "two runs of seed 0"),
        ({"a": [one]}, {"metric": "critic/score/meen"}, "critic/score/mean"),
        ({"a": [one]}, {"last": 0}, "≥ 1"),
    ):
        with pytest.raises(SettingError, match=said):
            wb.views.seeds(groups, **options)


def test_intervals_of_rewards_between_0_and_1_stay_there_and_others_do_not(runs: Any) -> None:
    folders = [runs("a", seed, value, value) for seed, value in enumerate((0.9, 1.0, 1.0))]
    free = wb.views.seeds({"a": folders}).table.loc["a"]
    assert free["high"] > 1
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ends = {"critic/score/min": 0.0, "critic/score/max": 1.0}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line | ends) + "\n" for line in lines))
    bounded = wb.views.seeds({"a": folders})
    assert bounded.unit and bounded.table.loc["a"]["high"] == 1 and bounded.table.loc["a"]["low"] == free["low"]
    assert interval([0.5, -0.9], (-1.0, 1.0))[1:3] == (-1.0, 1.0)
