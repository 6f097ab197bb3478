"""The widgets over the views, and how one is displayed over the static form of the same object.

The static form (HTML and text, made by `views`) is an output of its own, and so is the widget, whose script hides the static
output above it. One mimebundle with both would be simpler, but a front end that trusts the notebook shows only the widget,
and without a kernel that is an error message in place of the table (docs/decisions/012).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from IPython.core.getipython import get_ipython
from IPython.display import display

from workbench.base import runtime
from workbench.base.distribution import optional
from workbench.base.errors import EngineError, first_line
from workbench.base.progress import shown_by
from workbench.base.shown import encodable, plain
from workbench.views import document as doc
from workbench.views.sample_table import LEFT_OUT, OF_ROW, counted_reasons, difference, object_at, same_row
from workbench.views.samples import group_line, samples
from workbench.views.tokens import ALIGNED, TokenRow, drawable, judged, shade, stops, strips, tokens, visible
from workbench.views.traces import chips, standing, step_groups
from workbench.views.transcripts import episode, transcript
from workbench.widgets.display import in_notebook

with optional("widgets", "live views"):
    import anywidget
    import traitlets

if TYPE_CHECKING:
    from workbench.cluster.status import ClusterStatus
    from workbench.dataproto.core import DataProto
    from workbench.steps.stepper import Stepper
    from workbench.views.curves import LiveFigure
    from workbench.views.samples import SampleIndex, SamplesView
    from workbench.views.tokens import Tokens
    from workbench.views.traces import StepGroup

MOST = 24
"""Most live widgets at once: each widget keeps its object in memory, for example a stepper with its snapshots."""
KEPT = 32
"""Most replies that a widget keeps, for questions that the page repeats."""
_alive: deque[Layer] = deque()


def show(thing: Any, widget: Callable[[], Any]) -> None:
    """Display an object's static form, and in a notebook that is not a job its widget, which hides the static form."""
    if not in_notebook():
        display({"text/plain": repr(thing)}, raw=True)
        return
    static = static_form(thing)
    if os.environ.get("WORKBENCH_JOB"):
        display(static, raw=True)
        return
    layer = widget()
    # for Colab it says in its metadata where the page finds the manager of such widgets
    made = layer._repr_mimebundle_()
    bundle, metadata = made if isinstance(made, tuple) else (made, {})
    # once there is a widget: where there is none IPython shows the static form
    layer.form = display(static, raw=True, **({"display_id": True} if layer.renews else {}))
    if (shell := get_ipython()) is not None:
        shell.events.register("post_run_cell", _follow)
        shell.events.register("pre_run_cell", _pressed)
    _alive.append(layer)
    if len(_alive) > MOST:
        _alive.popleft().close()  # its static form is shown again
    # no other form beside the view: a front end without widgets, or without this one's state, shows the static form above
    shown = {**bundle, "text/html": "", "text/plain": ""}
    display(shown, raw=True, **({"metadata": metadata} if metadata else {}))


def static_form(thing: Any) -> dict[str, Any]:
    """Return an object's static form by MIME type: its HTML, or its picture, and its text."""
    html = thing._repr_html_()
    # by this class the scripts find it
    seen = (
        {"text/html": f'<div class="workbench-static">{html}</div>'}
        if html is not None
        else {"image/png": thing._repr_png_()}
    )
    return {**seen, "text/plain": repr(thing)}


def _follow(_: Any = None) -> None:
    """After each cell and press, redraw the last widget of every object that was moved; earlier widgets keep showing
    what they showed, and say so.
    """
    faces = [face for face in _alive if isinstance(face, Face)]
    last = {id(face._stepped): face for face in faces}
    for face in faces:
        if face.face["stands"] != face._stands():
            then = {**face.face, "note": f"a later cell changed the {face.noun}; this shows it as its cell left it"}
            face.face = face._face() if face is last[id(face._stepped)] else then


_presses: list[Future[None]] = []
"""Work that clicked buttons have started."""


def _pressed(_: Any) -> None:
    """Before each cell, wait for what a button has begun; an interrupt of the wait stops that."""
    while _presses:
        try:
            wait([_presses[-1]])
            _presses.pop()
        except KeyboardInterrupt:
            runtime.interrupt()


_OWN = {"stepping", "curves", "chat"}
"""Scripts that have a part of the style sheet to themselves."""


def _written(name: str, script: str) -> str:
    """Read a script or style sheet for a script's widget: no parts of other scripts, no indentation, no comments. An
    executed notebook keeps this text once for each view.
    """
    first, *parts = re.split(r"/\* --- (\w+).* --- \*/\n", (Path(__file__).parent / "static" / name).read_text())
    pairs = zip(parts[::2], parts[1::2], strict=True)
    whole = first + "".join(part for title, part in pairs if title == script or title not in _OWN)
    return re.sub(r"^ *(//.*\n)?", "", whole, flags=re.MULTILINE)


class Layer(anywidget.AnyWidget):
    """Base of the widgets: the page's script sends messages, `answer` replies, and large data travels in the replies."""

    _esm: Any = ""
    _css: Any = ""
    script = library = ""
    """File names of the widget's script and of the library that the script needs. (Traitlets before 5.11 take no class
    keywords.)"""
    scripts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()
    """File names of the widget's style sheets."""
    renews = False
    """Whether it renews its static form."""
    form: Any = None
    """The display of the static form that it renews."""

    def __init_subclass__(cls, **options: Any) -> None:
        if "script" in vars(cls):
            cls.scripts = (*([f"{cls.library}.iife.min.js"] if cls.library else []), "common.js", f"{cls.script}.js")
            cls.styles = (*([f"{cls.library}.min.css"] if cls.library else []), "tokens.css", "style.css")
            cls._esm = "".join(_written(name, cls.script) for name in cls.scripts)
            cls._css = "".join(_written(name, cls.script) for name in cls.styles)
        super().__init_subclass__(**options)

    def __init__(self, **traits: Any) -> None:
        self._replies: dict[str, dict[str, Any]] = {}
        super().__init__(**traits)
        self.on_msg(self._on_message)

    def _on_message(self, _: Any, content: Any, buffers: Any) -> None:
        """Answer a message; one that may take long in a thread, so that the kernel hears of a stop meanwhile."""
        if content.get("kind") == "stop":
            if not all(one.done() for one in _presses):
                runtime.interrupt()
        elif self.work(content) and in_notebook():
            _presses[:] = [one for one in _presses if not one.done()]
            _presses.append(runtime.in_steps(self._at_work, content))
        else:
            self._answered(content)

    def _at_work(self, content: Any) -> None:
        """Answer a message that may take long, and send how far it is."""
        try:
            with shown_by(lambda line, *_: self.send({"kind": "progress", "text": line, "asked": content["asked"]})):
                self._answered(content)
        finally:
            runtime.clear()
            _follow()

    def _answered(self, content: Any) -> None:
        key = repr(content)
        if time.monotonic() - self._replies.get(key, {}).get("at", -math.inf) < 1:
            return  # copies that waited in one queue behind a cell: the reply has just gone out
        try:
            self.reply(content)
        finally:  # also where it was interrupted, so that the page does not wait
            self.send(self._replies[key])

    def reply(self, content: Any) -> dict[str, Any]:
        """Return the reply to a message from the page's script: the answer, or the error.

        A page that waits sends its message again under the same id (`asked`). The message is acted on once: a copy gets
        the reply that is kept or, while another thread is still working on the first one, a note that it is running.
        """
        request = content.get("asked")
        key = repr(content)
        running = {"kind": "running", "text": self.work(content), "asked": request}
        # one step: a front end may bring copies on two threads (kernel subshells)
        if request is not None and (known := self._replies.setdefault(key, running)) is not running:
            return known
        if len(self._replies) > KEPT:
            self._replies.pop(next(iter(self._replies)))
        if running["text"]:
            self.send(running)
        reply = {"kind": "error", "text": "interrupted"}
        try:
            reply = self.answer(dict(content))
        except Exception as error:  # noqa: BLE001 - shown in the widget
            reply = {"kind": "error", "text": first_line(error, 400)}
        finally:
            self._replies[key] = {**reply, "asked": request, "at": time.monotonic()}
        return self._replies[key]

    def work(self, request: dict[str, Any]) -> str:
        """Describe what a message makes the kernel do, where that may take long; "" for a message that only looks."""
        return ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a message from the page's script; both are dicts with a `kind`."""
        raise NotImplementedError(f"{type(self).__name__} has no method `answer`")


class Cover(Layer):
    """The first widget of a box of widgets. When the kernel has ended, its script shows the static form in place of the
    box.
    """

    script = "cover"

    renewed = traitlets.Int().tag(sync=True)
    """Counts how often the static form was displayed again."""
    again = traitlets.Unicode("").tag(sync=True)
    """What a person does where the kernel has ended, if it is not to run the cell again."""

    def __init__(self, _: Any) -> None:
        super().__init__()


def name_of(thing: Any, otherwise: str) -> str:
    """Return the name of the notebook's variable that holds an object; `otherwise` where there is none."""
    names = vars(sys.modules["__main__"]).items()
    return next((name for name, value in names if value is thing and not name.startswith("_")), otherwise)


# --- samples ---------------------------------------------------------------------------------------

_CELL = 160
_MOST = 200
_SIBLINGS = 32
_FIRST = (
    "row", "step", "reward", "response", "why", "advantage", "answer", "truth", "tokens", "finish", "status", "kept", "from_run",
)  # fmt: skip


class SamplesTable(Layer):
    """The widget of a `SamplesView`: a table whose script sends messages for a page of `rows`, for their `code`, and
    for one row.

    Of a row it asks for everything (`pick`), its `tokens`, `text` or `history`, the `diff` to another row, or to `pin`
    it. A message with the tab `left` is about the rows that were left out.
    """

    script = "samples"

    columns: Any = traitlets.List().tag(sync=True)
    """The columns that a person has chosen; [] for the usual ones."""
    known: Any = traitlets.List().tag(sync=True)
    statuses: Any = traitlets.List().tag(sync=True)
    query: Any = traitlets.Dict().tag(sync=True)
    headline = traitlets.Unicode().tag(sync=True)
    bins: Any = traitlets.List().tag(sync=True)
    strips: Any = traitlets.List().tag(sync=True)
    """The quantities that can colour the strips of tokens."""
    tabs: Any = traitlets.List().tag(sync=True)
    """(name, title) of the samples, and of the rows left out where there are any."""
    picked = traitlets.Int(None, allow_none=True).tag(sync=True)
    high = traitlets.Int().tag(sync=True)
    """Number of rows that are visible before the table scrolls."""
    rendered = traitlets.Bool().tag(sync=True)

    def __init__(self, samples: SamplesView) -> None:
        frame, index = samples.index.frame, samples.index
        counts = Counter(frame["status"]) if "status" in frame else {}
        self._samples, left = samples, samples.left_out
        self._spans: dict[str, tuple[float, float]] = {}
        self._rows = samples.selected
        tabs = [(f"samples ({len(frame)})", "the rows of the step")]
        if left is not None:
            tabs.append((f"left out ({len(left.index.frame)})", counted_reasons(left.index.frame[LEFT_OUT])))
        super().__init__(
            columns=samples.columns or [],
            known=["row", *frame],
            statuses=sorted([name, number] for name, number in counts.items()),
            query={"order": samples.order, "search": samples.search, "by_group": samples.by_group},
            headline=index.headline,
            bins=[list(one) for one in index.bins],
            strips=drawable(index.batch),
            tabs=[[plain(text) for text in one] for one in tabs],
            high=samples.rows,
            rendered=samples.rendered,
        )
        self.observe(lambda change: setattr(samples, change["name"], change["new"]), ["picked", "rendered"])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply: a page of rows, or the code for them; for one row its card, tokens, difference or history
        as HTML, its text, or a note that it was pinned.
        """
        left = self._samples.left_out
        view = left if request.get("tab") == "left" and left is not None else self._samples
        if request["kind"] == "rows":
            return self._page(view, request)
        if request["kind"] == "code":
            return {"kind": "text", "text": self._code(view, request)}
        row = int(request["row"])
        if request["kind"] == "pick":
            return self._card(view, row, bool(request.get("rendered")))
        if request["kind"] == "text":
            return {"kind": "text", "text": encodable(str(view.index.frame.iloc[row].get("response") or ""))}
        if request["kind"] == "pin":
            expected, note = (str(request.get(name, "")) for name in ("expected", "note"))
            return {"kind": "pinned", "text": _pin(view.index.batch, row, expected, note)}
        return {"kind": "card", "html": self._shown(view, row, request).html()}

    def _shown(self, view: SamplesView, row: int, request: dict[str, Any]) -> doc.View:
        """Return the view that replaces a row's card: its history, its tokens, or its difference to another row."""
        if request["kind"] == "history":
            made: doc.View = self._samples.against.history(view.row(row))
            return made
        if request["kind"] == "tokens":
            of_row = view.index.frame.iloc[row].get(OF_ROW, row)
            if of_row is None:
                raise ValueError("this row is no longer in the step: its text was kept, its tokens were not")
            episode = object_at(self._samples.batch, "turns", int(of_row))
            return (transcript if episode else tokens)(self._samples.thing, int(of_row))
        if request["kind"] == "beside":
            return same_row(view.index.batch, row, self._samples.against)
        return difference(view.index.frame, row, int(request["other"]))

    def _card(self, view: SamplesView, row: int, rendered: bool) -> dict[str, Any]:
        card, against = view.row(row, rendered, formulas=True), self._samples.against
        siblings = [[one, _cell(view.index.frame.iloc[one].get("reward"))] for one in card.siblings[:_SIBLINGS]]
        code = f"wb.views.samples({self._name(view)}).row({row})"
        more = [["history", "the run's other steps"]] if hasattr(against, "history") else []
        if against is not None and not more and view is self._samples:
            more = [["beside", f"row {row} of {name_of(against, 'the other side')}"]]
        shown = {"html": card._repr_html_(), "reward": _cell(card.values.get("reward"))}
        return {"kind": "card", **shown, "siblings": siblings, "code": code, "more": more}

    def _name(self, view: SamplesView) -> str:
        """Return the Python expression for what the samples belong to, such as `trace` or
        `wb.views.samples(trace).left_out`.
        """
        name = name_of(self._samples.thing, "batch")
        return name if view is self._samples else f"wb.views.samples({name}).left_out"

    def _code(self, view: SamplesView, request: dict[str, Any]) -> str:
        """Return the line of code that makes the DataFrame of what the page shows now."""
        page, where = _filters(request), view.where or {}
        if callable(where) or set(where) & set(page):
            rows = self._select(view, request).tolist()
            return f"wb.views.samples({self._name(view)}).index.frame.iloc[{rows}]"
        chosen = {"order": str(request["order"]), "by_group": bool(request.get("by_group")), "where": {**where, **page}}
        chosen["search"] = str(request.get("search") or "")
        usual = {"order": "worst", "by_group": False, "where": {}, "search": ""}
        options = "".join(f", {name}={value!r}" for name, value in chosen.items() if value != usual[name])
        return f"wb.views.samples({self._name(view)}{options}).to_pandas()"

    def _select(self, view: SamplesView, request: dict[str, Any]) -> np.ndarray:
        """Return the rows that pass the filters of Python and of the page, in the page's order."""
        order, search, by_group = str(request["order"]), str(request.get("search") or ""), bool(request.get("by_group"))
        rows = view.index.select(order, where=view.where, search=search, by_group=by_group)
        return rows[np.isin(rows, view.index.select("index", where=_filters(request)))]

    def _page(self, view: SamplesView, request: dict[str, Any]) -> dict[str, Any]:
        start = int(request["start"])
        if (names := request.get("choose")) is not None:
            self._samples.choose([name for name in self.known if name in names])
            self.columns = self._samples.columns or []
        if start == 0:  # later pages continue the same selection, also if the view has another one by then
            view.selected = self._rows = self._select(view, request)
        whole = view.index.frame
        frame = whole.iloc[self._rows[start : start + min(int(request["count"]), _MOST)]]
        columns = self._columns(view)
        records = frame.assign(row=frame.index)[columns].to_dict("records")
        wanted = str(request.get("strip") or "") or next(iter(self.strips), "")
        drawn = wanted in self.strips and "tokens" in columns and view is self._samples
        lines = strips(view.index.batch, frame.index, wanted, self._spans) if drawn else [None] * len(frame)
        rows = [
            {"row": int(row), "group": int(group), "cells": {name: _cell(one[name]) for name in one}, "strip": strip}
            for row, group, one, strip in zip(frame.index, frame["group"], records, lines, strict=True)
        ]
        grouped = frame["group"].unique() if request.get("by_group") or not self.columns else ()
        members = whole[whole["group"].isin(grouped)].groupby("group")
        page = {
            "groups": {str(group): _group(view.index, int(group), each) for group, each in members},
            "columns": columns,
        }
        folded = [] if self.columns else [f"{name} {_cell(value)}" for name, value in view.index.same.items() if value]
        page |= {"same": ", ".join(folded), "spans": view.index.spans}
        return {"kind": "rows", "rows": rows, "total": len(self._rows), "of": len(whole), **page}

    def _columns(self, view: SamplesView) -> list[str]:
        """Return the columns to show: the chosen ones, or the usual ones; for left-out rows the reason comes first."""
        known = ["row", *view.index.frame]
        first = [name for name in (LEFT_OUT, OF_ROW) if name in known]
        chosen = [name for name in self.columns if name in known and name not in first]
        left = {*view.index.same, *(["status"] if "why" in known and "why" not in view.index.same else [])}
        usual = [name for name in known[1:] if name.partition("/")[0] in _FIRST and name not in left]
        rest = sorted(usual, key=lambda name: _FIRST.index(name.partition("/")[0]))
        return [*first, *chosen] if chosen else ["row", *first, *rest]


def _filters(request: dict[str, Any]) -> dict[str, Any]:
    """Return the page's filters in the form that `where` takes."""
    filters: dict[str, Any] = {"status": request["status"]} if request.get("status") else {}
    if request.get("low") is not None or request.get("high") is not None:
        filters["reward"] = (request.get("low"), request.get("high"))
    return filters


def _group(index: SampleIndex, group: int, rows: Any) -> list[Any]:
    dots = [[int(row), _cell(one)] for row, one in rows.get("reward", {}).items()]
    return [_cell(rows["prompt"].iloc[0]) if "prompt" in rows else "", group_line(index, group), dots]


def _pin(batch: DataProto, row: int, expected: str, note: str) -> str:
    from workbench.rewards.trials import pins

    score: Any = expected.strip()  # `add` refuses a text other than `unscored`
    with contextlib.suppress(ValueError):
        score = float(expected)
    kept = pins()
    kept.add(batch, row=row, expected=score, note=note)
    return f"pinned, {len(kept)} in {kept.path}"


def _cell(value: Any) -> Any:
    """Return a cell's value as a number, or as text on one line; None for a value that is missing or not finite."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool | int | float):
        return value
    return plain(str(value)[:_CELL]).replace("\n", " ⏎ ")


# --- tokens ----------------------------------------------------------------------------------------

_PROMPT = 2000


class TokenView(Layer):
    """The widget of a `Tokens` view: its script asks for `tokens` (texts and all numbers) or `colours` (of one
    quantity).
    """

    script = "tokens"

    quantities: Any = traitlets.List().tag(sync=True)
    labels: Any = traitlets.List().tag(sync=True)
    judged: Any = traitlets.List().tag(sync=True)
    """Each row's reward, answer and truth in words."""
    colour = traitlets.Unicode().tag(sync=True)

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        words = [plain(" · ".join(judged(row))) for row in tokens.rows]
        super().__init__(quantities=tokens.quantities, labels=tokens.labels, judged=words, colour=tokens.colour)
        self.observe(lambda change: setattr(tokens, "colour", change["new"]), "colour")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply: the tokens of all shown rows, or their colours for one quantity with its range."""
        if request["kind"] == "tokens":
            pairs = [[same, *([one.start, one.stop] for one in sides)] for same, *sides in self._tokens.pairs()]
            rows = [_row(row) for row in self._tokens.rows]
            return {"kind": "tokens", "rows": rows, "pairs": pairs, "aligned": ALIGNED}
        quantity, span = self._tokens.quantity(str(request["colour"]))
        self._tokens.colour = quantity.name
        scale = {"what": quantity.what, "low": span[0], "high": span[1], "stops": stops(quantity, span)}
        colours = [[shade(row, place, quantity, span) for place in range(row.length)] for row in self._tokens.rows]
        return {"kind": "colours", **scale, "colours": colours}


def _row(row: TokenRow) -> dict[str, Any]:
    return {
        "prompt": visible("".join(row.prompt)[-_PROMPT:]) if row.prompt else "",
        "texts": [visible(text) for text in row.texts],
        "ids": row.ids,
        "own": row.own,
        "rejected": row.rejected,
        "clipped": [bool(value) for value in row.values.get("clipped", ())],
        "values": {name: [_short(value) for value in column] for name, column in row.values.items()},
    }


def _short(value: float) -> float | None:
    """Round a number to four digits for the page; None for NaN and infinities, which JSON does not have."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


# --- a step, an episode ----------------------------------------------------------------------------


class Face(Layer):
    """Base of the widgets whose buttons advance a `Stepper` or an episode. They act on the notebook's own object, not
    on a copy.
    """

    face: Any = traitlets.Dict().tag(sync=True)
    """The view to show: the present one, or the one when the cell ended."""
    noun = ""
    ahead = "next_stage"
    """Name of the stepped object's attribute that names the next phase or turn, and is None at the end."""

    def __init__(self, stepped: Any, **traits: Any) -> None:
        self._stepped = stepped
        super().__init__(face=self._face(), **traits)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Advance the stepped object as the clicked button asks, and return its new view.

        Where a cell or another widget has advanced the object meanwhile, the click only refreshes the view.
        """
        if request["kind"] != "look" and request.get("stands") != self._stands():
            return self._face(note=f"the {self.noun} had changed since; this view shows it as it is now")
        return self._face(self._move(request))

    def work(self, request: dict[str, Any]) -> str:
        """Return the name of the phase that the buttons next and run would run first; "" for other buttons."""
        moves = request.get("kind") in ("next", "run") and request.get("stands") == self._stands()
        return str(getattr(self._stepped, self.ahead) or "") if moves else ""

    def _face(self, code: str = "", note: str = "") -> dict[str, Any]:
        view = {"kind": "face", "html": self._html(), "code": code, "note": note}
        return {**view, "stands": self._stands(), "next_stage": getattr(self._stepped, self.ahead)}

    def _html(self) -> str:
        return str(self._stepped._repr_html_())

    def _stands(self) -> Any:
        """Return a value that differs between positions of the stepped object."""
        raise NotImplementedError(f"{type(self).__name__} has no method `_stands`")

    def _move(self, request: dict[str, Any]) -> str:
        """Do what the message asks, and return the line of code for it."""
        raise NotImplementedError(f"{type(self).__name__} has no method `_move`")


class StepperFace(Face):
    """The widget of a `Stepper`: buttons next, back, run until a phase, back to a phase. A pressed phase is shown
    without moving the stepper.
    """

    script = "stepping"

    names: Any = traitlets.List().tag(sync=True)
    noun = "stepper"
    _shown: str | None = None
    """The phase to show in place of the last one; None: the last one."""

    def __init__(self, stepper: Stepper) -> None:
        super().__init__(stepper, names=list(stepper.pipeline.names))

    def _face(self, code: str = "", note: str = "") -> dict[str, Any]:
        phases = [{name: plain(value) for name, value in one._asdict().items()} for one in chips(self._stepped)]
        names = self._stepped.trace.names
        shown = self._shown or (names[-1] if names else "")
        try:
            groups = step_groups(self._stepped.trace[shown].batch) if shown else []
            view = super()._face(code, note)
            return {**view, "chips": phases, "shown": shown, "groups": list(map(_group_of, groups))}
        finally:
            self._shown = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Advance the stepper; or return as HTML the samples of a phase, or one `row` of them in full, with the line of
        code that shows them.
        """
        if request["kind"] != "samples":
            return super().answer(request)
        phase, row = self._stepped.trace[str(request["phase"])], request.get("row")
        name = name_of(self._stepped, "s")
        view, code = samples(phase.batch), f'wb.views.samples({name}.trace["{phase.stage}"].batch)'
        if row is None:
            return {"kind": "samples", "html": view.html(), "code": code}
        return {"kind": "samples", "html": view.row(int(row)).html(), "code": f"{code}.row({int(row)})"}

    def _html(self) -> str:
        return doc.html(standing(self._stepped, self._shown))

    def _stands(self) -> int:
        return int(self._stepped.position)

    def _move(self, request: dict[str, Any]) -> str:
        kind, name = request["kind"], name_of(self._stepped, "s")
        if kind == "show":
            self._shown = self._stepped.trace[str(request["phase"])].stage
            return f'{name}.trace["{self._shown}"]'
        if kind not in ("next", "back", "run", "back to"):
            return ""
        method, argument = kind.split()[0], {"run": "until", "back to": "to"}.get(kind)
        options = {argument: str(request["phase"])} if argument else {}
        getattr(self._stepped, method)(**options)
        arguments = ", ".join(f'{option}="{value}"' for option, value in options.items())
        return f"{name}.{method}({arguments})"


def _group_of(group: StepGroup) -> dict[str, Any]:
    answers = [[row, reward, _cell(text)] for row, reward, text in group.answers]
    return {"words": group.words, "prompt": _cell(group.prompt), "dots": group.dots, "answers": answers}


class EpisodeFace(Face):
    """The widget of an `EpisodeStepper`: buttons next, back, run, and say (write the next turn by hand)."""

    script = "episodes"

    rendered = traitlets.Bool().tag(sync=True)
    noun = "episode"
    ahead = "next_role"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Advance the episode and return its new view; with `rendered` its texts are drawn as Markdown, LaTeX and code."""
        self.rendered = bool(request.get("rendered", self.rendered))
        return super().answer(request)

    def _html(self) -> str:
        return doc.html(episode(self._stepped, self.rendered, formulas=True))

    def _face(self, code: str = "", note: str = "") -> dict[str, Any]:
        turns = [{"role": turn.role, "text": turn.text} for turn in self._stepped.turns]
        return {**super()._face(code, note), "turns": turns}

    def _stands(self) -> str:
        episode = self._stepped
        return f"{episode.next_role} {hash(episode.output.response_ids)} {len(episode.turns)}"

    def _move(self, request: dict[str, Any]) -> str:
        episode, name, kind = self._stepped, name_of(self._stepped, "e"), request["kind"]
        if kind in ("next", "run"):
            getattr(episode, kind)()
            return f"{name}.{kind}()"
        if kind == "back":
            to = int(request["turn"])
            episode.back(to=to)
            return f"{name}.back(to={to})"
        if kind == "say":
            text, turn = str(request["text"]), request.get("turn")
            if turn is not None:
                episode.back(to=int(turn))
            # answers to several calls: a line each
            turns = text.split("\n") if len(episode.asked) > 1 else text
            episode.say(turns)
            return f"{name}.say({turns!r})" if turn is None else f"{name}.replace({turn}, {turns!r})"
        return ""


# --- a cluster -------------------------------------------------------------------------------------

EVERY = 2.0
"""Seconds between two reads of the cluster's status."""
CALM = 20
"""The pause after a read is at least this many times as long as the read: a slow cluster is read less often."""


class ClusterTable(Layer):
    """The widget of a cluster's `ClusterStatus`: a thread reads the status again every `every` seconds while a page shows it."""

    script = "cluster"

    face: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, status: ClusterStatus, every: float = EVERY) -> None:
        self._again = status.again
        self._every = every
        self._over = threading.Event()
        self._views: int | None = None
        super().__init__(face={"html": status._repr_html_(), "note": "", "live": True})
        self._thread = threading.Thread(target=self._work, name="workbench-cluster-table", daemon=True)
        self._thread.start()

    def look(self) -> bool:
        """Read the cluster's status once and show it; returns False where the cluster is closed. Never raises."""
        html, note, live = self.face["html"], "", self._again is not None
        try:
            if self._again is not None:
                html = self._again()._repr_html_()
        except EngineError:
            note, live = "the cluster is closed; this is its last state", False
        except Exception as error:  # noqa: BLE001 - a worker may be busy or dying: shown in the table, and tried again
            note = f"no answer: {first_line(error, 200)}"
        if not self._over.is_set():
            self.face = {"html": html, "note": note, "live": live}
        return live

    def _work(self) -> None:
        wait = self._every
        while not self._over.wait(wait):
            if self._views == 0:  # no view is open
                continue
            began = time.monotonic()
            if not self.look():
                self._over.set()
            wait = max(self._every, CALM * (time.monotonic() - began))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Count a page's view of the table as opened or closed; while none is open the cluster is not read."""
        self._views = max((self._views or 0) + (1 if request["kind"] == "opened" else -1), 0)
        return {"kind": "heard"}

    def close(self) -> None:
        """Stop the thread that reads the cluster, and close the widget."""
        self._over.set()
        super().close()


# --- a run's curves: uPlot draws them in the page, and a clicked point opens the step's samples -------


class CurvePlots(Layer):
    """The widget of a figure of curves: its script asks for the `columns` of the picked runs, again when `version` changes, and for a
    step's `samples`.
    """

    script = "curves"
    library = "uplot/uPlot"

    version = traitlets.Int().tag(sync=True)
    """Counts the updates of the curves; the page asks for the columns again when it changes."""
    alone = traitlets.Bool().tag(sync=True)
    """Whether the widget is displayed without a static form that it would hide."""

    def __init__(self, figure: LiveFigure) -> None:
        self._figure = figure
        super().__init__(alone=figure.alone)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply: the columns (with `keys` those of other metrics), or a step's samples as HTML with the code
        that shows them.
        """
        plots = self._figure.plots
        if request["kind"] == "columns":
            keys, names = (tuple(map(str, request.get(what) or ())) for what in ("keys", "names"))
            return {"kind": "columns", **plots.columns(keys, names)}
        number, step = int(request["run"]), int(request["step"])
        html = plots.samples(number, step)._repr_html_()
        code = f"wb.views.samples({name_of(list(plots.runs.values())[number], 'run')}.traces[{step}])"
        return {"kind": "samples", "html": html, "code": code}
