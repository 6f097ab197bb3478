"""Figures for papers: sizes, fonts, names that are refused, files that are whole or not there."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pandas
import pytest

from workbench.base.errors import SettingError
from workbench.runs.symptoms import Symptom
from workbench.views.curves import figure, save_figure, smooth

ROWS = [
    {"training/global_step": step, "critic/score/mean": step / 10, "actor/kl_loss": 0.1, "timing_s/rollout": 1.0}
    for step in range(1, 9)
]


def labels(made: Any) -> list[str]:
    return [axes.get_ylabel() for axes in made.axes]


@pytest.mark.slow
def test_one_call_makes_a_figure_of_the_columns_width() -> None:
    made = figure(ROWS, ["reward", "KL"], name="GRPO", others={"DAPO": ROWS[:4]})
    assert made.get_figwidth() == 3.25 and labels(made) == ["reward", "KL"] and made.get_suptitle() == ""
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["GRPO", "DAPO"]
    assert [len(line.get_xdata()) for line in made.axes[0].lines] == [8, 8, 4, 4]
    assert [axes.get_xlabel() for axes in made.axes] == ["", "step"]  # under each other
    sizes = {text.get_fontsize() for axes in made.axes for text in [*axes.get_xticklabels(), axes.yaxis.label]}
    assert sizes == {7, 8}
    page = figure(ROWS, ["reward", "KL", "seconds per phase"], width="page", height=2.0)
    assert list(page.get_size_inches()) == [6.75, 2.0] and [axes.get_xlabel() for axes in page.axes] == ["step"] * 3
    assert [text.get_text() for text in page.axes[2].get_legend().get_texts()] == ["rollout"]
    assert figure(pandas.DataFrame(ROWS), "actor/kl_loss", width=4).get_figwidth() == 4


def test_words_of_ones_own_and_smoothing() -> None:
    values = [row["critic/score/mean"] for row in ROWS]
    raw = figure(ROWS, {"accuracy": ("critic/score/mean",)}, smooth=0)
    assert labels(raw) == ["accuracy"] and list(raw.axes[0].lines[1].get_ydata()) == values
    heavy = figure(ROWS, smooth=0.9)
    assert list(heavy.axes[0].lines[1].get_ydata()) == pytest.approx(smooth(values, 0.9))
    marked = figure(ROWS, marks=[Symptom("reward has fallen", "1 → 0", 3, "look")])
    assert [text.get_text() for text in marked.axes[0].texts] == [" 1"] and marked.texts == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"keys": "rewards"}, "did you mean 'reward'"),
        ({"keys": ["reward", "entropy"]}, "'entropy (nats)' is not a plot or metric of these runs"),
        ({"keys": []}, "argument keys of a figure"),
        ({"width": "colum"}, "did you mean 'column'"),
        ({"width": 325}, "width of a figure"),
        ({"smooth": 1.0}, "0 ≤ smooth < 1"),
        ({"path": "curves.docx"}, "one of pdf, svg, png"),
        ({"path": "curves"}, "one of pdf, svg, png"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_nothing_written(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"path": "curves.pdf", **arguments}
    with pytest.raises(SettingError, match=re.escape(said)):
        figure(ROWS, **{**given, "path": tmp_path / given["path"]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_pdf_embeds_its_fonts_and_files_are_the_same_on_any_day(tmp_path: Path) -> None:
    for suffix in ("pdf", "svg", "png"):
        written = [tmp_path / f"{name}.{suffix}" for name in "ab"]
        for path in written:
            made = figure(ROWS, ["reward", "KL"], path=path, name="$x_1$")
        assert written[0].read_bytes() == written[1].read_bytes()
    content = (tmp_path / "a.pdf").read_bytes()
    assert b"/FontFile2" in content and b"/Type3" not in content
    box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", content)
    assert box is not None and float(box[1]) == 3.25 * 72
    streams = [zlib.decompress(part) for part in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.DOTALL)]
    assert any(b" Tf" in stream for stream in streams)  # text is text
    assert b"<path" in (tmp_path / "a.svg").read_bytes()
    png = (tmp_path / "a.png").read_bytes()
    assert png[:4] == b"\x89PNG" and int.from_bytes(png[16:20]) == round(3.25 * 300)
    assert made._repr_png_()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_an_error_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "curves.pdf"
    made = figure(ROWS, path=path)
    before = path.read_bytes()
    made.axes[0].lines[0].set_data([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="shape"):
        save_figure(made, path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["curves.pdf"]
    (tmp_path / "taken.pdf").mkdir()
    with pytest.raises(IsADirectoryError):
        save_figure(figure(ROWS), tmp_path / "taken.pdf")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["curves.pdf", "taken.pdf"]
    with pytest.raises(FileNotFoundError):
        save_figure(figure(ROWS), tmp_path / "nowhere" / "c.pdf")


@pytest.mark.slow
def test_no_pyplot_and_no_lasting_style() -> None:
    import subprocess
    import sys

    code = (
        "# warm\nimport sys, matplotlib as m; from workbench.views.curves import figure; figure([{'critic/score/mean': 1.0}]);"
        "sys.exit('matplotlib.pyplot' in sys.modules or m.rcParams['pdf.fonttype'] == 42)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
