"""Curves: the right numbers in the right panel, gaps said, other runs overlaid."""

from __future__ import annotations

from pathlib import Path

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
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("not recorded") == 4
    save_png(figure, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes() == png(figure) and png(figure)[:4] == b"\x89PNG"


def test_other_runs_are_overlaid() -> None:
    figure = panel(ROWS, others={"other": ROWS[:3]})
    assert len(figure.axes[0].lines) >= 4
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["this run", "other"]


def test_the_running_mean_starts_unbiased() -> None:
    assert smooth([1.0, 1.0, 1.0]) == pytest.approx([1, 1, 1]) and smooth([2.0])[0] == 2
    assert smooth([0.0, 1.0], weight=0.5)[1] == pytest.approx(2 / 3)


def test_no_pyplot() -> None:
    import subprocess
    import sys

    code = "import sys, workbench.views.curves as c; c.panel([]); sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
