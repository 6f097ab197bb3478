"""Curves: the right numbers in the right panel, gaps said, other runs overlaid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import pytest

from workbench.runs.symptoms import Symptom, Symptoms, shown_by
from workbench.views.curves import PANEL, PHASES, label, panel, png, smooth, thin
from workbench.views.plots import Plots
from workbench.widgets.display import Progress

ROWS = [
    {"training/global_step": step, "critic/score/mean": step / 10, "actor/kl_loss": 0.1, "actor/grad_norm": None}
    for step in range(5)
]
ROWS[4] |= {"val/reward": 0.5, "val/reward_low": 0.4, "val/reward_high": 0.6}


@pytest.mark.slow
def test_panels_show_what_was_recorded_and_say_what_was_not() -> None:
    figure = panel(ROWS, title="mine")
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(PANEL)
    reward = figure.axes[0]
    assert list(reward.lines[0].get_ydata()) == [0, 0.1, 0.2, 0.3, 0.4] and len(reward.containers) == 1
    assert reward.get_title(loc="right") == "0.4", "the last step's own number, as in the live form"
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert texts.count("not recorded") == 6
    assert png(figure) == png(figure) and png(figure)[:4] == b"\x89PNG"


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
    assert shown[0].get_title(loc="right") == "0.1"
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
    assert list(axes[5].lines[0].get_xdata()) == [0, 4] and axes[5].get_title(loc="right") == "2"
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


@pytest.mark.slow
def test_a_run_of_many_steps_is_no_larger_a_picture() -> None:
    sizes = []
    for steps in (50, 5000):
        rows = [{"training/global_step": n, **dict.fromkeys(sum(PANEL.values(), ()), n / steps)} for n in range(steps)]
        sizes.append(len(png(panel(rows))))
    assert sizes[1] < 2 * sizes[0] < 400_000


def test_the_running_mean_starts_unbiased() -> None:
    assert smooth([1.0, 1.0, 1.0]) == pytest.approx([1, 1, 1]) and smooth([2.0])[0] == 2
    assert smooth([0.0, 1.0], weight=0.5)[1] == pytest.approx(2 / 3)


def steps_of(number: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows of steps 1, 2, …; a column is a constant or a function of the step."""
    names = {name.replace("__", "/"): value for name, value in columns.items()}
    return [
        {
            "training/global_step": step,
            **{key: value(step) if callable(value) else value for key, value in names.items()},
        }
        for step in range(1, number + 1)
    ]


def band(axes: Any) -> list[list[float]]:
    """(lower, upper) at each step of the only band."""
    area = axes.collections[0]
    vertices = area.get_paths()[0].vertices
    return [
        [float(f(vertices[vertices[:, 0] == x][:, 1])) for f in (np.min, np.max)] for x in sorted(set(vertices[:, 0]))
    ]


def test_a_mean_has_its_spread_beside_it() -> None:
    rows = steps_of(3, critic__score__mean=0.5, critic__score__min=0.0, critic__score__max=lambda step: float(step))
    axes = panel(rows, {"reward": ("critic/score/mean",)}).axes[0]
    assert band(axes) == [[0, 1], [0, 2], [0, 3]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training batch", "lowest to highest"]
    deviation = [{**row, "critic/score/std": 0.25} for row in rows]
    axes = panel(deviation, ["critic/score/mean"]).axes[0]
    assert band(axes) == [[0.25, 0.75]] * 3
    assert axes.get_legend().get_texts()[1].get_text() == "± one deviation"
    over = panel(rows, others={"other": rows}).axes[0]
    assert len(over.collections) == 0  # bands of several runs would hide each other


def test_a_wide_band_leaves_the_means_a_quarter_of_the_height() -> None:
    lengths = {"response_length__min": 1.0, "response_length__max": 2048.0}
    rows = steps_of(6, response_length__mean=lambda step: 300.0 + 10 * step, **lengths)
    bottom, top = panel(rows).axes[2].get_ylim()
    # the means span 310 … 360: 50 of at most 4·50 (and a margin of 5 % on both sides, and above them the two names' room), from 0 or near it never here
    assert (top - bottom) * (1 - 0.22) == pytest.approx(1.1 * 200) and bottom < 310 and top > 360
    assert len(panel(rows).axes[2].collections) == 8  # fading towards its ends, which are cut
    narrow = steps_of(6, response_length__mean=20.0, response_length__min=19.0, response_length__max=22.0)
    bottom, top = panel(narrow).axes[2].get_ylim()
    assert bottom == pytest.approx(19 - 0.15) and top == pytest.approx(bottom + 3.3 / (1 - 0.22))


@pytest.mark.slow
def test_each_phase_has_a_line_of_its_colour_and_says_its_name() -> None:
    seconds = {"timing_s__rollout": 1.0, "timing_s__reward": 0.5, "timing_s__update_actor": 2.0}
    rows = steps_of(4, **seconds, timing_s__step=3.5, timing_s__gen=1.0, timing_s__testing=9.0)
    axes = panel(rows).axes[7]
    drawn = {line.get_color(): line.get_ydata()[-1] for line in axes.lines}
    assert list(drawn.values()) == [1.0, 0.5, 2.0], "`gen` is `rollout` again; validation is in no step"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rollout", "reward", "update_actor"]
    sent = Plots({"mine": Progress(rows, {})}).columns()["plots"][-1]
    assert [line["colour"] for line in sent["lines"]] == list(drawn), "the page's lines have the picture's colours"
    both = panel(rows, others={"quick": steps_of(2, timing_s__step=1.0)}).axes[7]
    lasts = [line.get_ydata() for line in both.lines[1::2]]
    assert lasts[0] == pytest.approx([3.5] * 4) and lasts[1] == pytest.approx([1.0] * 2)
    only = panel([{"training/global_step": 7, "timing_s/gen": 2.0}], {"seconds": (PHASES,)}).axes[0]
    assert [text.get_text() for text in only.get_legend().get_texts()] == ["gen"]


@pytest.mark.slow
def test_the_metric_behind_a_symptom_has_a_plot() -> None:
    mark = Symptom("most groups teach nothing", "80%", 3, "raise the temperature", metric="advantage/zero_share")
    rows = steps_of(6, advantage__zero_share=lambda step: 0.7 + step / 20, actor__entropy=1.0)
    assert [axes.get_title(loc="left") for axes in panel(rows, marks=[mark]).axes][8] == "share with advantage 0"
    assert len(panel(rows).axes[:8]) == 8 and not [text for text in panel(rows, marks=[mark], listed=False).texts]
    sent = Plots({"mine": Progress(rows, {})}, marks=[mark]).columns()
    assert sent["plots"][-1]["lines"][0]["name"] == sent["marks"][0]["metric"] == "advantage/zero_share"
    (found,) = (one for one in shown_by(rows) if one.metric == mark.metric)
    assert found.course == "▁▂▄▅▇█" and found.course in repr(Symptoms([found]))


def test_a_run_keeps_its_colour_whatever_runs_are_picked() -> None:
    runs = {name: Progress(steps_of(3, actor__entropy=1.0), {}) for name in "abc"}
    plots = Plots(runs, drawn=["a"])
    first, picked = plots.columns(), plots.columns(names=["c", "b"])
    assert [one["name"] for one in first["runs"]] == ["a"] and first["names"] == ["a", "b", "c"]
    assert [(one["name"], one["place"], one["colour"]) for one in picked["runs"]] == [
        (name, place, first["known"][place]["colour"]) for name, place in (("b", 1), ("c", 2))
    ]


def test_slow_first_steps_do_not_flatten_the_others() -> None:
    rows = steps_of(30, timing_s__rollout=lambda step: 60.0 if step == 1 else 1.0)
    assert panel(rows).axes[7].get_ylim()[1] < 4


def test_a_learning_rate_is_shown_as_it_was_set() -> None:
    rows = steps_of(4, actor__lr=lambda step: 1e-4 * step)
    axes = panel(rows).axes[6]
    assert list(axes.lines[1].get_ydata()) == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])
    assert axes.get_title(loc="right") == "4e-4" and axes.get_legend() is None
    ppo = panel([{**row, "critic/lr": 1e-3} for row in rows]).axes[6]
    assert [text.get_text() for text in ppo.get_legend().get_texts()] == ["policy", "critic"]


@pytest.mark.slow
def test_symptoms_stand_on_the_time_axis_and_are_said_beneath() -> None:
    marks = [
        Symptom("entropy has collapsed", "1.2 → 0.05", 2, "raise clip_ratio_high"),
        Symptom("the gradient $jumps$", "norm 9", 4, "look"),
    ]
    figure = panel(ROWS, marks=marks, title="mine")
    for axes in figure.axes:
        upright = [line.get_xdata()[0] for line in axes.lines if line.get_transform() != axes.transData]
        assert upright == [2, 4]
        assert [text.get_text().strip() for text in axes.texts if text.get_text().strip().isdigit()] == ["1", "2"]
    said = [text.get_text() for text in figure.texts]
    assert said[1:] == [
        "1  entropy has collapsed (step 2 on): 1.2 → 0.05",
        "2  the gradient $jumps$ (step 4 on): norm 9",
    ]
    assert panel(ROWS, marks=[]).get_figheight() == panel(ROWS).get_figheight() < figure.get_figheight()


@pytest.mark.slow
def test_a_symptom_has_its_number_in_the_plot_of_its_metric_alone() -> None:
    mark = Symptom("reward has fallen", "0.4 → 0.1", 3, "look", metric="critic/score/mean")
    strong = {}
    for axes in panel(ROWS, marks=[mark]).axes:
        (line,) = [line for line in axes.lines if line.get_transform() != axes.transData]
        strong[axes.get_title(loc="left")] = (
            line.get_alpha() > 0.5,
            "1" in [text.get_text().strip() for text in axes.texts],
        )
    assert strong.pop("reward") == (True, True) and {*strong.values()} == {(False, False)}


def test_a_finished_run_leaves_out_what_it_has_not() -> None:
    figure = panel(ROWS, empty=False)
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()] == ["reward"]
    assert [text.get_text() for text in figure.texts] == ["the same at all steps: KL 0.1"]
    asked = panel(ROWS, ["actor/kl_loss"], empty=False)  # what is asked for is drawn
    assert [axes.get_title(loc="left") for axes in asked.axes if axes.get_visible()] == ["actor/kl_loss"]
    assert len(panel([], empty=False).axes) == len(PANEL)  # nothing at all: say so
    held_out = panel([{"training/global_step": 0, "val/reward": 0.5}], empty=False)
    assert [axes.get_title(loc="left") for axes in held_out.axes if axes.get_visible()] == ["reward"]


def test_thinned_lines_keep_their_ends_and_extremes() -> None:
    steps, values = np.arange(10_000), np.sin(np.arange(10_000) / 50.0)
    values[[3, 5000, 9998]] = 7, -7, 8
    few, kept = thin(steps, values, bins=100)
    assert len(few) <= 202 and {0, 3, 5000, 9998, 9999} <= set(few.tolist())
    assert (kept == values[few]).all() and (np.diff(few) > 0).all()
    same = thin(steps[:50], values[:50], bins=100)
    assert same[0] is not None and len(same[0]) == 50
    spike = steps_of(10_000, actor__grad_norm=lambda step: 50.0 if step == 7777 else 1.0, timing_s__rollout=1.0)
    axes = panel(spike).axes
    assert len(axes[5].lines[0].get_xdata()) < 1000 and axes[5].lines[0].get_ydata().max() == 50
    assert len(axes[7].lines[0].get_xdata()) < 2000


def test_a_long_run_is_smoothed_more() -> None:
    rows = steps_of(2000, actor__entropy=lambda step: float(step % 2))
    wide, narrow = (panel(rows[:number]).axes[3].lines[1].get_ydata()[-100:] for number in (2000, 60))
    assert np.ptp(wide) < 0.05 < np.ptp(narrow)


def test_hostile_names_are_shown_as_they_are() -> None:
    names = {"$\\frac{1$": "$\\frac{1$", "_hidden": "_hidden", "a\nb\x1b[31m": "a\\nb\\x1b[31m", "$x^2$": "$x^2$"}
    rows = [{**row, "actor/$\\bad{$": 1.0} for row in ROWS]
    figure = panel(rows, ["actor/$\\bad{$", "_mine"], others=dict.fromkeys(names, ROWS), title="$\\undefined$")
    assert png(figure)[:4] == b"\x89PNG"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["$\\undefined$", *names.values()]
    assert not any(text.get_parse_math() for text in [*figure.legends[0].get_texts(), *figure.texts])
    assert figure.axes[0].get_title(loc="left") == "actor/$\\bad{$"
    assert label("\udcff\u202e") == "\\udcff\\x202e" and len(label("x" * 99)) == 60


@pytest.mark.slow
def test_a_legend_has_room_for_every_name() -> None:
    others = {f"a run with a long name, number {n}": ROWS for n in range(20)}
    figure = panel(ROWS, others=others)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0
    lowest = min(axes.xaxis.label.get_window_extent().y0 for axes in figure.axes[4:])
    assert box.y1 <= lowest
    lines = figure.legends[0].get_lines()
    assert len({line.get_color() for line in lines}) == 21


def test_words_among_the_numbers_are_no_points() -> None:
    rows: list[dict[str, Any]] = [
        {"training/global_step": n, "actor/entropy": value} for n, value in enumerate([1, "x", 2.0])
    ]
    assert list(panel(rows).axes[3].lines[0].get_xdata()) == [0, 2]


@pytest.mark.slow
def test_no_pyplot() -> None:
    import subprocess
    import sys

    code = "# warm\nimport sys, workbench.views.curves as c; c.panel([]); sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
