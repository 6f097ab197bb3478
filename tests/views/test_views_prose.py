"""What a model wrote, drawn as Markdown, LaTeX and code: what is drawn, what stays as written, and that no markup of it gets in."""

from __future__ import annotations

import re
import sys
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import HOSTILE, HOSTILE_PROSE
from support.lint import lint

import workbench as wb
from workbench.base.shown import TEXT_LIMIT
from workbench.rewards import Score
from workbench.testing.rewards import answered
from workbench.views import document as doc
from workbench.views.prose import LANGUAGES, TAGS, coloured, formula, rendered


def page(text: str, formulas: bool = True) -> str:
    return doc.html(rendered(text, formulas))


def bare(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html)


def test_markdown_is_drawn() -> None:
    made = page("# Title\n\n**bold** *it* ~~no~~ `x`\n\n3. three\n4. four\n\n> said\n\n| a | b |\n|---|---|\n| 1 | 2 |")
    for part in (
        ">Title<",
        "<b>bold</b>",
        "<i>it</i>",
        "<s>no</s>",
        ">x</code>",
        "<span>3.</span>",
        ">four<",
        ">said<",
    ):
        assert part in made, part
    assert made.count("<th ") == 2 and made.count("<td ") == 2 and lint(made) == []
    assert "one<br>two" in page("one\ntwo"), "a model that ends a line means it"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"a \(x^2\) b", 1), ("a $x^2$ b", 1), ("$$x^2$$", 1), ("\\[\n= x\n- y\n\\]", 1), (r"so \boxed{\frac{1}{2}} it is", 1),
        ("\\begin{align*}\na &= b \\\\\nc &= d\n\\end{align*}", 1), ("costs $5 and $6", 0), ("`$x$`", 0), ("```\n$x$\n```", 0),
        (r"\$x\$", 0), ("$x", 0), (r"\(x", 0), ("US$5-$10", 0),
    ],
)  # fmt: skip
def test_formulas_are_found_between_the_signs_that_models_write(text: str, found: int) -> None:
    made = page(text)
    assert made.count("<math") == found and "\ue000" not in made
    assert "<li>" not in made and "•" not in made, "a line of a formula is no list"
    assert page(text, formulas=False).count("<math") == 0


def test_a_formula_is_mathml_and_its_numbers_are_right() -> None:
    assert doc.html(formula(r"\frac{1}{2}")) == (
        "<math><mrow><mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac></mrow></math>"
    )
    assert 'linethickness="0"' in doc.html(formula(r"\binom{n}{k}")), "no line, or it would be a fraction"
    table = doc.html(formula(r"\begin{aligned}a &= b\\ c &= d\end{aligned}"))
    assert table.count("<mtr>") == 2 and "&amp;" not in table and "(1)" not in table
    assert "border:1px solid" in doc.html(formula(r"\boxed{42}"))
    assert page(r"$\frac12$", formulas=False) == page(r"$\frac12$", formulas=False).replace("<math", "")
    assert r"$\frac12$" in bare(page(r"$\frac12$", formulas=False)), "where a sanitiser would leave 12"


@pytest.mark.parametrize(
    "latex", [r"\frac{1}{", "{" * 3000 + "x" + "}" * 3000, "{" * 200 + "x" + "}" * 200, r"\left( x"]
)
def test_a_broken_formula_stands_as_it_was_written_and_that_is_said(latex: str) -> None:
    made = page(f"so \\[{latex[:1000]}\\] it is")
    assert "1 formula cannot be drawn, as written" in made and latex[:1000] in bare(made) and "it is" in made


@pytest.mark.parametrize(
    ("package", "lost", "kept"),
    [
        ("latex2mathml", "<math", ("<b>", "wb-k-keyword")),
        ("pygments", "wb-k-keyword", ("<b>", "<math")),
        ("markdown_it", "<b>", ()),
    ],
)
def test_without_a_package_of_prose_its_part_alone_is_as_written_and_the_extra_is_named(
    package: str, lost: str, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "**bold** $x$\n\n```python\ndef f(): pass\n```\n"
    whole = page(text)
    assert all(part in whole for part in (lost, *kept)) and "pip install" not in whole
    for module in [one for one in sys.modules if one.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type] # its import raises ModuleNotFoundError
    made = page(text)
    assert lost not in made and all(part in made for part in kept) and "def f(): pass" in bare(made)
    assert f"expected the package {package}; pip install 'rl-workbench[prose]'" in unescape(bare(made))


def test_a_text_that_is_too_long_stands_as_it_was_written_and_that_is_said() -> None:
    made = page("**a** " * (TEXT_LIMIT // 6 + 1))
    assert "too long to be drawn" in made and "**a**" in made


def test_code_has_colours_and_loses_nothing() -> None:
    assert '<span style="font-weight:600" class="wb-k-keyword">def</span>' in page("```py\ndef f(): pass\n```")
    for language in (*LANGUAGES, "py", "no such", ""):
        for code in ("x = f('a')  # so\n\tif (1) {}\n\n", "<b>\x1b", "'''"):
            assert doc.text(coloured(code, language)).replace("\n", "") == doc.text(code).replace("\n", ""), language


def test_links_and_pictures_are_words() -> None:
    made = page("[a](http://evil.example/x) ![p](http://evil.example/y.png)")
    assert "<a" not in made and "<img" not in made
    assert "(http://evil.example/x)" in made and "[picture: p, http://evil.example/y.png]" in made


class Tags(HTMLParser):
    """Collects elements and attributes that a page must not get from a text."""

    known = {"b", "br", "code", "div", "hr", "i", "s", "small", "span", "table", "td", "th", "tr"} | TAGS

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.wrong += [tag] if tag not in self.known else []
        for name, value in attributes:
            word = {"style": r"[-a-z0-9:;,.%() ]*", "title": r"(?s).*", "class": r"wb-k-[a-z]+"}.get(
                name, r"[a-z0-9.]{1,8}"
            )
            risky = name == "style" and re.search(r"url|position|z-index|fixed|-\d", value or "")
            if name.startswith("on") or name in ("href", "src", "id") or risky or not re.fullmatch(word, value or ""):
                self.wrong.append(f"{tag} {name}={value}")


PIECES = [
    "$", "$$", r"\(", r"\)", r"\[", r"\]", "`", "```", "```python\n", "\n", "\n\n", "- ", "1. ", "> ", "| a |", "|---|", "[", "](", ")", "![", "<", ">",
    "**", "_", "~~", "#", "\\", "{", "}", "&", "&lt;", "javascript:", "http://evil.example", "<script>", "<img src=x onerror=alert(1)>",
    r"\frac", r"\text{<b>}", r"\href{javascript:x}{y}", r"\style{position:fixed}{y}", r"\begin{align}", r"\end{align}", r"\boxed{", r"\hspace{-9em}",
    "\ue000", "\ue0000\ue001", "\x1b[31m", "\u202e", "</math>", "x", "1",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=40).map("".join))
def test_no_markup_of_a_text_gets_into_a_page(text: str) -> None:
    for formulas in (True, False):
        made = page(text, formulas)
        parsed = Tags()
        parsed.feed(made)
        assert parsed.wrong == [] and lint(made) == [], text
        assert not set(made) & set("\x1b\x07\u202e\u202c")
        assert formulas or "<math" not in made
    assert doc.text(rendered(text)) == doc.text(text), "a terminal shows what was written"


@pytest.mark.parametrize("text", [HOSTILE, HOSTILE_PROSE])
def test_hostile_texts_are_words(text: str) -> None:
    parsed = Tags()
    parsed.feed(page(text))
    assert parsed.wrong == []


def test_a_sample_is_plain_unless_asked_and_its_thinking_stays_folded() -> None:
    said = "<think>**hm** $x$</think>\nso **it** is $\\frac{1}{2}$ #### 7"
    batch = answered([said]).with_columns(
        {"reward": torch.tensor([1.0]), "score": [Score(value=1.0, answer="7", why="so")]}
    )
    view = wb.views.samples(batch)
    plain, drawn, live = (
        view.row(0).html(),
        view.row(0, rendered=True).html(),
        view.row(0, rendered=True, formulas=True).html(),
    )
    assert "so **it** is" in plain and ">7</span>" in plain, "marked where it stands"
    assert "<b>it</b>" in drawn and "<math" not in drawn and "frac{1}{2}" in drawn and "response, rendered" in drawn
    assert live.count("<math") == 2
    assert all("<details><summary" in one and "thinking" in one for one in (plain, drawn, live))
    assert repr(view.row(0)) == repr(view.row(0, rendered=True))


def test_turns_are_drawn_in_place_of_tokens() -> None:
    batch = answered(["**a** $x$"])
    tokens = wb.views.transcript(batch, 0, tokenizer=Letters()).html()
    drawn = wb.views.transcript(batch, 0, tokenizer=Letters(), rendered=True, formulas=True).html()
    assert "<b>a</b>" in drawn and "<math" in drawn and "<b>a</b>" not in tokens


class Letters:
    """A tokenizer whose every token is a letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "x" * len(ids)
