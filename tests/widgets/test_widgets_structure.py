"""No screen breaks the rules of docs/design.md at any width: nothing cut, covered, too small or beyond the page; and its tokens agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.lab import in_chromium, watched_page
from support.screens import first_click, screens, show
from support.structure import FAULTS, OUTLINE, WIDTHS

from workbench.views import document
from workbench.widgets import layer

STATIC = Path(layer.__file__).parent / "static"


@in_chromium
def test_no_screen_is_cut_covered_or_wider_than_its_page(tmp_path: Path) -> None:
    found = {}
    with watched_page() as (page, _, _):
        for name, screen in screens(tmp_path).items():
            for width in WIDTHS:
                show(page, screen, "light", width)
                first_click(page)
                found[f"{name}, {width}"] = page.evaluate(FAULTS, "#screen")
    assert {where: faults for where, faults in found.items() if faults} == {}


@in_chromium
def test_what_is_broken_is_named() -> None:
    with watched_page() as (page, _, _):
        page.set_viewport_size({"width": 360, "height": 400})
        page.set_content(
            '<main id="screen"><div style="overflow:hidden;width:40px"><b style="white-space:nowrap">cut off here</b></div>'
            '<div style="width:900px;text-align:right">beyond</div><small style="font-size:9px">tiny</small>'
            '<p style="margin:0">under</p><p style="margin:-20px 0 0">over</p><p class="wb-x">a <i>b</i></p></main>'
        )
        said = "\n".join(page.evaluate(FAULTS, "#screen"))
        for words in ("wide", "cut: div", "beyond the page: div", "text of 9px", "covered: p"):
            assert words in said, said
        assert any(re.fullmatch(r"\s*p\.wb-x \d+,\d+ \d+x\d+ a", line) for line in page.evaluate(OUTLINE, "#screen"))


def test_python_and_the_style_sheet_have_one_set_of_scales() -> None:
    tokens = (STATIC / "tokens.css").read_text()
    for name, value in (("up", document.UP), ("down", document.DOWN), ("much", document.MUCH)):
        assert f"--wb-{name}: {value.replace(',', ', ')};" in tokens


@pytest.mark.parametrize("file", ["style.css", "page.css"])
def test_every_token_that_is_used_exists_and_no_colour_of_the_scales_is_written_out(file: str) -> None:
    text, tokens = (STATIC / file).read_text(), (STATIC / "tokens.css").read_text()
    assert {*re.findall(r"var\((--wb-[a-z-]+)", text)} <= {*re.findall(r"(--wb-[a-z-]+):", tokens)}
    assert not re.search(r"46, ?160, ?67|207, ?80, ?60|130, ?80, ?223", text)
