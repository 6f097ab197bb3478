"""Curves: the right numbers in the right panel, gaps said, other runs overlaid."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from workbench.views.curves import PANEL, panel, png, save_png, smooth

ROWS = [
    {"training/global_step": step, "critic/score/mean": step / 10, "actor/kl_loss": 0.1, "actor/grad_norm": None}
    for step in range(5)
]
ROWS[4] |= {"val/reward": 0.5, "val/reward_low": 0.4, "val/reward_high": 0.6}


def test_panels_show_what_was_recorded_and_say_what_was_not(tmp_path: Path) -> None:
    figure = panel(ROWS, title="mine")
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(PANEL)
    reward = figure.axes[0]
    assert list(reward.lines[0].get_ydata()) == [0, 0.1, 0.2, 0.3, 0.4] and len(reward.containers) == 1
    assert reward.get_title(loc="right") == "0.268"
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("not recorded") == 4
    save_png(figure, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes() == png(figure) and png(figure)[:4] == b"\x89PNG"


def test_other_runs_are_overlaid_each_in_its_colour() -> None:
    figure = panel(ROWS, others={"other": ROWS[:3]})
    assert len(figure.axes[0].lines) >= 4
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["this run", "other"]
    many = panel(ROWS, others={f"run {n}": ROWS for n in range(9)}, title="run 0")
    assert len(many.legends[0].get_texts()) == 10  # none is dropped, nor the one of the same name
    lengths = [line for line in many.axes[1].lines if line.get_linestyle() == "-" and line.get_alpha() is None]
    assert len(lengths) == 10 and len({line.get_color() for line in lengths[:8]}) == 8


def test_a_frame_and_chosen_metrics() -> None:
    figure = panel(pandas.DataFrame(ROWS), ["actor/kl_loss", "nothing/here"])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == ["actor/kl_loss", "nothing/here"]
    assert shown[0].get_title(loc="right") == "0.1"  # where the running mean ends
    assert [text.get_text() for text in shown[1].texts] == ["not recorded"]
    both = panel(ROWS, {"two": ("actor/kl_loss", "critic/score/mean")}).axes[0]
    assert [text.get_text() for text in both.get_legend().get_texts()][:2] == ["to the reference", "training batch"]


def test_both_kls_are_told_apart() -> None:
    axes = panel([{**row, "actor/ppo_kl": 0.01} for row in ROWS]).axes[1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["to the reference", "of the update"]
    alone = panel([{"training/global_step": 1, "actor/ppo_kl": 0.01}]).axes[1]
    assert [text.get_text() for text in alone.get_legend().get_texts()] == ["of the update"]


def test_numbers_that_are_none_leave_a_gap_and_no_interval_is_needed() -> None:
    values = [1.0, float("nan"), None, float("inf"), 2.0]
    rows = [{"training/global_step": step, "actor/grad_norm": value} for step, value in enumerate(values)]
    rows[0] |= {"val/reward": 0.5, "val/reward_low": None, "val/reward_high": None}
    axes = panel(rows).axes
    assert list(axes[5].lines[0].get_xdata()) == [0, 4] and axes[5].get_title(loc="right") == "1.59"
    assert len(axes[0].containers) == 1 and len(png(panel(rows))) > 1000


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, 0.0, 0.1), (2.0, 1.8, 2.2), (-1.0, -1.1, -0.9)])
def test_a_constant_has_a_band_around_it(value: float, low: float, high: float) -> None:
    rows = [{"training/global_step": step, "actor/entropy": value} for step in range(3)]
    bottom, top = panel(rows).axes[3].get_ylim()
    assert bottom < low + 1e-6 and top > high - 1e-6 and top - bottom == pytest.approx(1.1 * (high - low))


def test_ticks_are_short() -> None:
    axes = panel([{"training/global_step": n, "actor/lr": 2e-4 * (n + 1)} for n in range(3)], ["actor/lr"]).axes[0]
    formatter = axes.yaxis.get_major_formatter()
    found = [formatter(value) for value in (0, 0.25, 2.05e-4, -3e-5, 1234)]
    assert found == ["0", "0.25", "2.05e-4", "-3e-5", "1234"]
    assert all(tick == int(tick) for tick in panel(ROWS[:1]).axes[0].get_xticks())


def test_a_run_of_many_steps_is_no_larger_a_picture() -> None:
    sizes = []
    for steps in (50, 5000):
        rows = [{"training/global_step": n, **dict.fromkeys(sum(PANEL.values(), ()), n / steps)} for n in range(steps)]
        sizes.append(len(png(panel(rows))))
    assert sizes[1] < 2 * sizes[0] < 400_000


def test_the_running_mean_starts_unbiased() -> None:
    assert smooth([1.0, 1.0, 1.0]) == pytest.approx([1, 1, 1]) and smooth([2.0])[0] == 2
    assert smooth([0.0, 1.0], weight=0.5)[1] == pytest.approx(2 / 3)


def test_no_pyplot() -> None:
    import subprocess
    import sys

    code = "import sys, workbench.views.curves as c; c.panel([]); sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
