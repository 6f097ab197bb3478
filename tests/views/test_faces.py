"""The table of faces: its names are real, subclasses and copies are shown alike, and nothing below views knows of views."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from support.lint import lint

import workbench as wb
from workbench.base import shown
from workbench.base.shown import Shown, shows
from workbench.runs.symptoms import Symptom, Symptoms
from workbench.views.document import (
    BREAK,
    Either,
    Fold,
    Image,
    Part,
    Span,
    Table,
    bar,
    block,
    bold,
    html,
    line,
    number,
    pairs,
    text,
)
from workbench.views.faces import FACES
from workbench.widgets import layer

PACKAGE = Path(wb.__file__).parent
ABOVE = ("views", "widgets", "jobs", "cli.py", "__init__.py")
"""What may know of views."""


def named(name: str) -> Any:
    module, _, inside = name.partition(":")
    return getattr(import_module(module), inside)


# --- the table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", FACES)
def test_a_row_names_a_class_that_is_shown_and_functions_that_show_it(row: str) -> None:
    kind = named(row)
    assert inspect.isclass(kind) and issubclass(kind, Shown)
    for what, name in FACES[row].items():
        assert callable(named(name)) and name.startswith(("workbench.views.", "workbench.widgets.")), what
        needed = [
            one.name
            for one in inspect.signature(named(name)).parameters.values()
            if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        assert len(needed) == (2 if what in ("live", "history", "row") else 1), (
            f"{name}({', '.join(needed)}) gets the object"
        )


def subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def test_every_class_of_ours_that_is_shown_has_a_row_or_shows_itself() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "Shown" in path.read_text():
            import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"))
    made = [
        kind for kind in subclasses(Shown) if "<locals>" not in kind.__qualname__
    ]  # in a function: shown as its base
    rows = {f"{kind.__module__}:{kind.__qualname__}" for kind in made}
    ours = {row for row in rows if row.startswith("workbench.")}
    shows_itself = {row for row in ours if issubclass(named(row), wb.views.document.View)}
    inherits = {row for row in ours if any(f"{k.__module__}:{k.__qualname__}" in FACES for k in named(row).__mro__)}
    bases = {"workbench.cluster.holding:Session"}  # `Cluster` is what anybody has
    assert ours == shows_itself | inherits | bases


# --- who is shown as what -------------------------------------------------------------------------------


class Mine(wb.DataProto):
    """A subclass of somebody else's."""


def found() -> list[Any]:
    """Small objects of several rooms."""
    batch = wb.DataProto({"reward": torch.tensor([0.5, 1.0])}, {"uid": ["a", "b"]})
    return [batch, wb.Trace(batch), wb.Score(value=0.5, why="half"), Symptoms([Symptom("bad", "1", 2, "look")])]


@pytest.mark.parametrize("thing", found(), ids=lambda thing: type(thing).__name__)
def test_a_copy_out_of_a_pickle_looks_the_same(thing: Any) -> None:
    copy = pickle.loads(pickle.dumps(thing))
    assert repr(copy) == repr(thing) and copy._repr_html_() == thing._repr_html_()


def test_a_subclass_is_shown_as_its_base_and_its_own_repr_stays() -> None:
    columns, meta = {"reward": torch.tensor([0.5, 1.0])}, {"step": 3}
    mine, base = Mine(columns, {}, meta), wb.DataProto(columns, {}, meta)
    assert repr(mine) == repr(base) and mine._repr_html_() == base._repr_html_()

    class Own(wb.DataProto):
        def __repr__(self) -> str:
            return "mine"

    assert repr(Own(columns)) == "mine" and "f32[2]" in str(Own(columns)._repr_html_())


def test_what_is_in_no_row_has_a_plain_repr() -> None:
    class Nobody(Shown):
        """Not in the table."""

    assert repr(Nobody()) == "<Nobody>" and Nobody()._repr_html_() is None
    with pytest.raises(RuntimeError, match="no function is registered for 'curves' of a Nobody"):
        shows(Nobody(), "curves")
    data, _ = DisplayFormatter().format(Nobody())
    assert data == {"text/plain": "<Nobody>"}


def test_a_cell_shows_text_and_html_of_what_has_no_widget() -> None:
    thing = found()[0]
    data, _ = DisplayFormatter().format(thing)
    assert data == {"text/plain": repr(thing), "text/html": thing._repr_html_()}


def test_a_cell_shows_the_widget_over_the_static_form(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[dict[str, Any]] = []
    monkeypatch.setattr(layer, "display", lambda bundle, raw: displayed.append(bundle))
    view = wb.views.samples(wb.DataProto(None, {"response_text": ["one"]}))
    assert DisplayFormatter().format(view) == ({}, {}), "it has displayed itself"
    assert displayed == [{"text/plain": repr(view)}], "outside a notebook as text"
    displayed.clear()
    monkeypatch.setattr(layer, "in_notebook", lambda: True)
    DisplayFormatter().format(view)
    static, widget = displayed
    assert view._repr_html_() in static["text/html"] and static["text/plain"] == repr(view)
    assert "application/vnd.jupyter.widget-view+json" in widget
    layer._alive.pop().close()


def test_doors_are_real() -> None:
    assert set(shown._DOORS) == {"text", "html", "display", "cell"}
    assert all(callable(named(name)) for name in shown._DOORS.values())


@pytest.mark.slow
def test_faces_are_imported_when_somebody_looks() -> None:
    code = (
        "import sys; from workbench.rewards import Score; import workbench as wb;"
        "before = 'workbench.views.clusters' in sys.modules or 'ipywidgets' in sys.modules;"
        "said = repr(Score(value=1.0, why='right')); sys.exit(before or 'right' not in said)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- nothing below views names it ---------------------------------------------------------------------------


def below() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ABOVE]


def named_rooms(path: Path) -> list[str]:
    """Imports of views and widgets, and strings that name a module of them."""
    said = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            said += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            said += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            said += [word for word in node.value.split() if word.startswith("workbench.")]
    return [one for one in said if one.startswith(("workbench.views", "workbench.widgets"))]


@pytest.mark.slow
def test_nothing_below_views_names_views_or_widgets() -> None:
    assert {str(path.relative_to(PACKAGE)): named_rooms(path) for path in below() if named_rooms(path)} == {}


# --- the tree -------------------------------------------------------------------------------------------------

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


@pytest.mark.parametrize(
    "part",
    [
        HOSTILE,
        line(HOSTILE, bold(HOSTILE), title=HOSTILE),
        Span(HOSTILE, "opacity:0.5", title=HOSTILE),
        block(HOSTILE),
        bar(0.5, HOSTILE),
        Image(lambda: b"png", HOSTILE),
        pairs([(HOSTILE, HOSTILE)]),
        Table([HOSTILE, "b"], [[HOSTILE, Fold(HOSTILE, block(HOSTILE))]]),
        Fold(HOSTILE, (HOSTILE, BREAK), opened=True),
        Either(HOSTILE, HOSTILE),
        lambda: [HOSTILE, (HOSTILE, lambda: HOSTILE)],
    ],
    ids=lambda part: type(part).__name__,
)
def test_whatever_stands_in_a_part_is_text(part: Part) -> None:
    assert lint(html(part)) == [] and "<script" not in html(part)
    assert not set("\x1b\u202e") & set(html(part) + text(part))


def test_a_terminal_has_what_stands_open_and_columns_that_stand_under_each_other() -> None:
    table = Table(["name", "size"], [["a", "1"], [bold("long"), bar(0.5, "22")]], right=True, most=2)
    assert text((line("T ", bold("x")), table)) == "T x\n  name  size\n     a  1\n  long  22"
    assert text((Fold("closed", "inside"), Fold("open", "inside", opened=True))) == "open\ninside"
    assert text(Table(["a"], [["1"], ["2"]], most=1)).endswith("… and 1 more") and "1 more" in html(table) + html(
        Table(["a"], [["1"], ["2"]], most=1)
    )
    assert html(Either("terminal", "page")) == "<div>page</div>" and text(Either("terminal", "page")) == "terminal"


def test_a_long_cell_is_cut_and_one_line() -> None:
    assert len(text(Table(["a", "b"], [["x" * 10_000_000, "y\nz"]]))) < 5_000
    assert text(Table(["a"], [["y\nz"]])).splitlines()[1] == "  y ⏎ z"
    assert len(html(Table(["a"], [["x" * 10_000_000]]))) < 5_000


def test_numbers() -> None:
    assert [number(value) for value in (0.123456, None, float("nan"))] == ["0.1235", "–", "–"]
    assert number(0.5, "+.3f") == "+0.500"
