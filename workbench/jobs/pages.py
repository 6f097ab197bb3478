"""The pages over a folder of runs, a run or a dump: what `workbench view` serves and `workbench report --all` writes.

A page is named by its path in the written folder (`a/step_000010/index.html`), and links are relative, so that both have the
same. Its sections are views; one that has a widget is that widget where a server answers it, else its static form.

A run as one HTML file that shows everything without a kernel, a script or a network.

A run's or a dump's samples as text, for a look in a terminal: what `workbench show` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as quoted
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbench.base.errors import RunError, SettingError, WorkbenchError, first_line
from workbench.base.files import write_text
from workbench.base.shown import Shown, shows
from workbench.compat.dumps import read_dump
from workbench.replay.remote import is_address
from workbench.replay.run import Run, find_runs, load_run, table
from workbench.runs.folder import is_run, step_files
from workbench.runs.symptoms import Watch
from workbench.steps.compare import compare
from workbench.views import document as doc
from workbench.views.comparisons import metrics_beside
from workbench.views.curves import panel, png
from workbench.views.plots import Growing, Plots
from workbench.views.samples import samples
from workbench.views.tokens import tokens
from workbench.views.transcripts import transcript

DRAWN = 8
"""Runs whose curves are drawn over each other unless others are asked for: the newest."""
ROWS = 8
"""Samples of a step that have a page of their own in a written folder: the worst."""
Query = Mapping[str, Sequence[str]]
Below = Mapping[str, Sequence[tuple[str, str]]]
"""What they are → (words, path) of some pages."""


@dataclass(frozen=True)
class Section:
    """One part of a page under its title: static HTML, and on a served page a widget in its place."""

    title: str
    html: Callable[[], str | None]
    """Its static form: HTML in which all text is escaped."""
    shown: Shown | None = None
    """What a served page has in its place: the widget of this."""


@dataclass(frozen=True)
class Page:
    """One HTML page: its path, title, sections, and the links to the pages above it."""

    path: str
    title: str
    sections: Sequence[Section]
    trail: Sequence[tuple[str, str]] = ()
    """(words, path) of the pages above it."""
    below: Below = field(default_factory=dict)
    """The pages that it leads to."""
    live: Callable[[], str] | None = None
    """Of a page that may change: gives a text that changes with it, empty once it no longer will."""


class Pages:
    """Makes the pages over a run folder, a folder of runs, or a dump. Reads nothing outside that folder, and writes
    nothing.

    `written` holds the paths that links may lead to; None where a server makes every page on demand. Raises `RunError`
    where there is neither a run nor a dump, `DataError` for a dump that cannot be read.
    """

    def __init__(self, source: str | Path, written: set[str] | None = None) -> None:
        if is_address(source):
            do = f"wb.load_run({str(source)!r}).fetch() copies a run to this machine: open the copy"
            raise RunError(f"{source} is not a local folder", do=do)
        self.source, self.written = Path(source).resolve(), written
        self.dump: Any = None
        self._one = is_run(self.source)
        if not self._one and not (self.source.is_dir() and find_runs(self.source)):
            if not self.source.exists():
                raise RunError(f"nothing at {str(source)!r}", expected="a run, a folder of runs, or a dump of rollouts")
            self.dump = read_dump(self.source)

    def runs(self) -> dict[str, Path]:
        """Return name → folder of each run, the newest last. A run whose folder or links lead out of the folder is left
        out.
        """
        if self.dump is not None:
            return {}
        if self._one:
            return {self.source.name: self.source}
        found = find_runs(self.source)
        return {path.relative_to(self.source).as_posix(): path for path in found if self._inside(path)}

    def _inside(self, path: Path) -> bool:
        """Return whether a folder, and all links in it, stay within the folder that the pages are over."""
        links = (one for one in (path, *path.rglob("*")) if one.is_symlink())
        return all(one.resolve().is_relative_to(self.source) for one in links)

    # --- by path --------------------------------------------------------------------------------

    def page(self, path: str, query: Query | None = None) -> Page:
        """Make the page at a path, such as `a/step_000010/index.html`. Raises `LookupError` where there is none."""
        query = query or {}
        if path == "index.html":
            return self._dump() if self.dump is not None else self._index(query)
        if self.dump is not None:
            return self._row(path, self.dump, _asked_row(path, query), [("dump", "index.html")])
        runs = self.runs()
        name = next((one for one in sorted(runs, key=len, reverse=True) if path.startswith(f"{one}/")), None)
        if name is None:
            raise LookupError(f"no page {path}")
        return self._of_run(name, Run(runs[name]), path.removeprefix(f"{name}/"), query)

    def _of_run(self, name: str, run: Run, rest: str, query: Query) -> Page:
        trail = [("runs", "index.html"), (name, f"{name}/index.html")]
        path = f"{name}/{rest}"
        if rest == "index.html":
            return self._run(name, run, trail[:1])
        if rest == "diagnosis.html":
            return Page(path, f"{name}: diagnosis", [Section("diagnosis", lambda: run.diagnose()._repr_html_())], trail)
        if rest.startswith("val_"):
            step = _number(rest, "val_", ".html")
            return Page(path, f"{name}: held-out samples of step {step}", [self._table(run.val(step))], trail)
        folder, _, last = rest.partition("/")
        step = _number(folder, "step_", "")
        if step not in list(run.traces):
            raise LookupError(f"step {step} of {name} has no trace")
        if last == "index.html":
            return self._step(name, run, step, trail)
        trail.append((f"step {step}", f"{name}/{folder}/index.html"))
        if last == "compare.html":
            other = (query.get("with") or [""])[0] or f"{name}/{_before(run, step)}"
            return self._compare(path, (name, step), other, trail)
        return self._row(path, run.traces[step], _asked_row(last, query), trail)

    def _index(self, query: Query) -> Page:
        runs, page = self.runs(), "index.html"
        chosen = [name for name in query.get("run", ()) if name in runs] or list(runs)[-DRAWN:]
        opened = {name: Run(runs[name]) for name in reversed(chosen)}
        sections = [Section("", lambda: self._listed(page, runs, chosen))]
        if any(run.rows for run in opened.values()):
            sections.append(_curves(opened, {name: Run(path) for name, path in reversed(runs.items())}))
        below = {"runs": [(name, f"{name}/index.html") for name in reversed(runs)]}
        return Page(page, self.source.name, sections, (), below, lambda: "".join(map(_stamp, opened.values())))

    def _listed(self, page: str, runs: Mapping[str, Path], chosen: Sequence[str]) -> str:
        """Render the table of runs; on a served page with boxes that choose whose curves are drawn."""
        frame = table(runs)[::-1].dropna(axis=1, how="all")
        served = self.written is None
        right = ["", *(" class=number" if kind.kind in "if" else "" for kind in frame.dtypes)]
        lines = []
        for name, row in frame.iterrows():
            box = f'<input type="checkbox" name="run" value="{quoted(str(name))}"{" checked" * (name in chosen)} aria-label="draw its curves">'
            cells = [box * served + self._link(page, str(name), f"{name}/index.html"), *map(_cell, row)]
            lines.append("<tr>" + "".join(map("<td{}>{}</td>".format, right, cells)) + "</tr>")
        heads = "".join(map("<th{}>{}</th>".format, right, map(doc.escape, ("run", *frame.columns))))
        listed = f'<table class="runs"><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        if not served:
            return listed
        bar = '<input type="search" data-filter placeholder="filter runs" aria-label="filter runs"> <button>draw the chosen runs\' curves</button>'
        return f"<form><p>{bar}</p>{listed}</form>"

    def _run(self, name: str, run: Run, trail: Sequence[tuple[str, str]]) -> Page:
        page, steps = f"{name}/index.html", sorted(run.traces, reverse=True)
        held = sorted(step_files(run.path / "val"), reverse=True)
        below = {
            "diagnosis": [("what is probably wrong, and what to change", f"{name}/diagnosis.html")],
            "recorded steps": [(str(step), _step_path(name, step)) for step in steps],
            "held-out samples": [(f"after step {step}", f"{name}/val_{step:06d}.html") for step in held],
        }
        sections = [
            Section("run", run._repr_html_),
            self._look_at(page, below),
        ]
        if run.rows:
            sections.insert(1, _curves({name: run}))
        return Page(page, name, sections, trail, below, lambda: _stamp(run))

    def _step(self, name: str, run: Run, step: int, trail: Sequence[tuple[str, str]]) -> Page:
        page, trace = _step_path(name, step), run.traces[step]
        folder = page.removesuffix("index.html")
        worst = samples(trace).selected[:ROWS]
        before = _before(run, step)
        below = {
            "samples in full, with tokens": [(f"row {row}", f"{folder}row_{row}.html") for row in worst],
            "compare this step": [] if before is None else [(f"with step {before}", f"{folder}compare.html")],
        }
        further = self._look_at(page, below, lambda: self._choices(f"{name}/{step}"))
        sections = [Section("phases", trace._repr_html_), self._table(trace), further]
        return Page(page, f"{name}: step {step}", sections, trail, below)

    def _choices(self, here: str) -> str:
        """Render the forms of a served page that open any row of the step, or compare with any recorded step; "" in a
        written folder.
        """
        if self.written is not None:
            return ""
        steps = [f"{name}/{step}" for name, path in self.runs().items() for step in Run(path).traces]
        options = "".join(f"<option>{doc.escape(one)}</option>" for one in steps if one != here)
        row = '<form action="row.html"><label>row <input name="row" type="number" min="0" value="0" required></label> <button>open row</button></form>'
        other = f'<form action="compare.html"><label>with <select name="with">{options}</select></label> <button>compare</button></form>'
        return row + other * bool(options)

    def _compare(self, path: str, mine: tuple[str, int], other: str, trail: Sequence[tuple[str, str]]) -> Page:
        name, _, number = other.rpartition("/")
        runs = self.runs()
        if name not in runs or _number(number, "", "") not in list(Run(runs[name]).traces):
            raise LookupError(f"no recorded step {other}")
        first, second = Run(runs[name]).traces[int(number)], Run(runs[mine[0]]).traces[mine[1]]
        title = f"{other} → {mine[0]}/{mine[1]}"
        try:
            sections = [Section("the same rows, compared", compare(first, second)._repr_html_)]
        except WorkbenchError as error:
            why = doc.block(first_line(error, 400))
            sections = [
                Section("metrics", lambda: doc.html((why, metrics_beside(first.metrics, second.metrics)))),
                self._table(first, f"samples of {other}"),
                self._table(second, f"samples of {mine[0]}/{mine[1]}"),
            ]
        return Page(path, title, sections, trail)

    # --- samples --------------------------------------------------------------------------------

    def _dump(self) -> Page:
        worst = samples(self.dump).selected[:ROWS]
        below = {"samples in full": [(f"row {row}", f"row_{row}.html") for row in worst]}
        sections = [self._table(self.dump), self._look_at("index.html", below)]
        return Page("index.html", self.source.name, sections, below=below)

    def _table(self, thing: Any, title: str = "samples") -> Section:
        shown = samples(thing, rows=ROWS)
        return Section(title, shown.html, shown)

    def _row(self, path: str, thing: Any, row: int, trail: Sequence[tuple[str, str]]) -> Page:
        try:
            sections = [Section("sample", samples(thing).row(row).html)]
        except IndexError as error:
            raise LookupError(str(error)) from error
        try:
            shown = tokens(thing, row)
            sections.append(Section("tokens", shown.html, shown))
            sections.append(Section("episode, turn by turn", transcript(thing, row).html))
        except ValueError as error:  # a dump without token ids
            why = str(error)
            sections.append(Section("tokens", lambda: doc.html(doc.block(why))))
        return Page(path, f"row {row}", sections, trail)

    # --- links ----------------------------------------------------------------------------------

    def _link(self, page: str, words: str, path: str) -> str:
        there = self.written is None or path in self.written
        return link(page, words, path) if there else doc.escape(words)

    def _look_at(self, page: str, below: Below, forms: Callable[[], str] = str) -> Section:
        """Make the section of links to the pages below a page, and of forms."""

        def links() -> str:
            lines = [
                f"<p>{doc.escape(what)}: {' · '.join(self._link(page, *one) for one in paths)}</p>"
                for what, paths in below.items()
                if paths
            ]
            return "".join(lines) + forms()

        return Section("look at", links)


# --- a page as HTML ------------------------------------------------------------------------------


def files(*names: str) -> str:
    """Return the widgets' scripts or styles of these names as one text."""
    return "".join((resources.files("workbench.widgets") / "static" / name).read_text("utf-8") for name in names)


def rendered(page: Page, embed: Callable[[Any], str] | None = None, head: str = "") -> str:
    """Render a page as an HTML document. `embed` returns the HTML of a widget, whose scripts `head` names.

    Without `embed` the sections' static forms are shown, and the document needs no kernel, script or network.
    """
    parts = []
    for number, section in enumerate(page.sections):
        if embed is not None and section.shown is not None:
            inner = embed(shows(section.shown, "widget"))
        else:
            inner = f'<div id="part{number}">{contents(section)}</div>'
        heading = f"<h2>{doc.escape(section.title)}</h2>" * bool(section.title)
        parts.append(f"<section>{heading}{inner}</section>")
    trail = " › ".join(link(page.path, words, path) for words, path in page.trail)
    safe = (
        ""
        if embed
        else "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
    )
    return (
        f'<!doctype html><html lang="en" class="wb-page"><head><meta charset="utf-8">{safe}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{doc.escape(page.title)}</title>'
        f"<style>{files('tokens.css', 'page.css')}</style>{head}</head><body><nav>{trail}</nav><h1>{doc.escape(page.title)}</h1>"
        f"<main>{''.join(parts)}</main></body></html>"
    )


def contents(section: Section) -> str:
    """Render a section's static form, or the reason where it cannot be made."""
    try:
        return section.html() or ""
    except (WorkbenchError, ValueError, OSError) as error:
        return doc.html(doc.block(first_line(error, 1000)))


def link(page: str, words: str, path: str) -> str:
    """Render a link from the page at path `page` to the page at `path`."""
    return f'<a href="{"../" * page.count("/")}{quoted(quote(path))}">{doc.escape(words)}</a>'


def _curves(runs: Mapping[str, Run], known: Mapping[str, Run] | None = None) -> Section:
    """Make the section of the curves of `runs`, of those `known` that a served page lets one pick."""
    name, *others = runs

    def picture() -> bytes:
        beside = {one: runs[one].rows for one in others}
        title, marks = (name, ()) if others else (None, Watch(runs[name].rows).marks)
        return png(panel(runs[name].rows, title=title, others=beside or None, marks=marks, empty=False, listed=False))

    def read() -> Plots:  # the symptoms are looked for again each time
        every = known or runs
        return Plots(every, (), Watch(next(iter(every.values())).rows).marks, list(runs))

    return Section("curves", lambda: doc.html(doc.Image(picture, "curves")), Growing(read))


def _stamp(run: Run) -> str:
    """Return a text that changes whenever a running run has written something; "" for a run that has ended."""
    if run.state != "running":
        return ""
    size = (run.path / "metrics.jsonl").stat().st_size if (run.path / "metrics.jsonl").is_file() else 0
    return f"{run.path.name} {size} {len(run.traces)};"


def _cell(value: Any) -> str:
    return doc.escape(doc.number(value) if isinstance(value, float) else "–" if value is None else doc.cut(value, 80))


def _step_path(name: str, step: int) -> str:
    return f"{name}/step_{step:06d}/index.html"


def _before(run: Run, step: int) -> int | None:
    """Return the last recorded step before `step`; None where there is none."""
    return max((one for one in run.traces if one < step), default=None)


def _number(text: str, before: str, after: str) -> int:
    """Parse the number in a page's name, as 10 in `val_000010.html`. Raises `LookupError` where there is none."""
    digits = text.removeprefix(before).removesuffix(after)
    if not (
        text.startswith(before)
        and text.endswith(after)
        and digits.isascii()
        and digits.isdecimal()
        and len(digits) < 12
    ):
        raise LookupError(f"no page {text}")
    return int(digits)


def _asked_row(last: str, query: Query) -> int:
    return _number((query.get("row") or [""])[0], "", "") if last == "row.html" else _number(last, "row_", ".html")


LIMIT = 200
"""Megabytes of a written folder after which the pages of older steps are left out."""


def write_folder(source: str | Path, output: str | Path | None = None, *, limit: float = LIMIT) -> tuple[Path, str]:
    """Write the pages of `workbench view` as a folder of HTML files that need no server, script or network.

    There is a page for each run, each recorded step, its `ROWS` worst samples with their tokens, and its difference to
    the recorded step before. `output` is by default `report` in the folder (beside a dump's file). When `limit`
    megabytes are reached, older steps are left out. Returns the folder, and a sentence that says what was written and
    left out. Raises `RunError` for an output folder with other files, and as `Pages`.
    """
    written: set[str] = set()
    pages = Pages(source, written)
    inside = pages.source if pages.source.is_dir() else pages.source.with_suffix("")
    target = Path(output) if output is not None else inside / "report" if pages.source.is_dir() else inside
    if target.is_dir() and any(target.iterdir()) and not (target / "index.html").is_file():
        raise RunError(f"{target} has files, and is not a report", do="name another folder with -o")
    size, left, broken = 0, set[str](), list[str]()

    def write(path: str) -> None:
        """Write a page after those that it leads to, which it then links."""
        nonlocal size
        if size > limit * 1e6 and "/step_" in path:
            left.add(path.rpartition("/")[0])
            return
        try:
            page = pages.page(path)
            for _, further in chain(*page.below.values()):
                write(further)
            body = rendered(page)
        except (WorkbenchError, LookupError, ValueError) as error:
            broken.append(f"{path} ({first_line(error, 120)})")
            return
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        write_text(target / path, body)
        written.add(path)
        size += len(body.encode("utf-8", "replace"))

    write("index.html")
    summary = f"{len(written)} pages, {size / 1e6:.1f} MB, in {target}"
    if left:
        counted = doc.counted(len(left), "step")
        summary += f"; pages of older steps left out, because the limit is {limit:g} MB: {counted}"
    return target, summary + (f"; could not be made: {', '.join(broken)}" if broken else "")


def shown(
    source: str | Path,
    *,
    step: int | None = None,
    order: str = "worst",
    rows: int = 8,
    search: str = "",
    row: int | None = None,
    colour: str | None = None,
) -> str:
    """Return the text forms of `views.samples` and `views.tokens` for a recorded step, or for a dump of rollouts.

    Args:
        source: a run folder, or what `compat.read_dump` reads.
        step: a recorded step; None: the run itself (state, recorded steps, symptoms), or all steps of a dump.
        order, rows, search: which samples, as in `views.samples`.
        row: one sample in full; with `colour` (`advantage`, `kl`, …) its tokens, too.

    Raises `RunError` for a step without a trace, `SettingError` for an order, row or colour that does not exist.
    """
    record: Any
    if not is_address(source) and not is_run(Path(source)):
        record = read_dump(source, step=step)
    else:
        run = load_run(source)
        if step is None and row is None:
            return "\n\n".join(str(one) for one in (run, run.traces) if one)
        record = run.traces[max(run.traces, default=0) if step is None else step]
    try:
        if row is None:
            return str(samples(record, rows, order, search=search))
        parts = [str(samples(record).row(row)), *([str(tokens(record, row, colour))] if colour else [])]
    except (ValueError, IndexError) as error:
        raise SettingError(str(error)) from error
    return "\n\n".join(parts)
