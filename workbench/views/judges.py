"""Whether a judge can be trusted: a `JudgeReport` as text, as HTML, and as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.views import document as doc
from workbench.views.curve_axes import GREY, label
from workbench.views.curves import cell_figure, png
from workbench.views.rewards import BAD, CUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbench.rewards.judge_reports import Calibration, JudgeReport
    from workbench.rewards.judge_stats import Estimate
    from workbench.rewards.principle_search import Principle, Principles

_ROWS = 50
_PLAIN = ("mean absolute error", "its constant", "Spearman", "truth's", "Fleiss")
"""Names of figures that are no shares, by how they begin."""
_CONFIDENCE = {
    "stated": "as the judge states it",
    "margin": "the margin of the numbers as a probability",
    "votes": "the share of an item's verdicts that agree",
    "size": "difference of the two highest numbers, no probability",
}


def judge_report(made: JudgeReport) -> doc.Part:
    """The view of a `JudgeReport`: what it means, then its figures, tables, the drawing (HTML) and items that it got wrong."""
    what = {"pairs": "pair", "grades": "graded answer", "choices": "choice"}[made.kind]
    seeds = f", {doc.counted(len(made.seeds), 'seed')}" if len(made.seeds) > 1 else ""
    title = f"{doc.one_line(made.judge, 160)} · {doc.counted(len(made), what)}{seeds}, {doc.counted(len(made.asked), 'verdict')}"
    shares = [
        [name, _value(name, one), _interval(name, one), f"{one.n}", one.how] for name, one in made.figures.items()
    ]
    return (
        doc.line(doc.bold(title)),
        doc.line(doc.bold(made.headline, style="" if made.trusted else BAD)),
        doc.Table(["", "value", "95 % interval", "items", "by"], shares),
        [doc.line(doc.faint(note)) for note in made.caveats],
        _missing(made),
        _cost(made),
        _categories(made),
        _confusion(made),
        _calibration(made.calibration) if made.calibration else (),
        doc.Image(lambda: png(judge_figure(made)), made.headline),
        doc.Either(page=doc.Fold(f"items without full credit, the first {_ROWS}", lambda: _wrong(made))),
    )


def _value(name: str, one: Estimate) -> str:
    return doc.number(one.value, ".3f" if name.startswith(_PLAIN) else ".1%")


def _interval(name: str, one: Estimate) -> str:
    if math.isnan(one.low):
        return "–"
    form = ".3f" if name.startswith(_PLAIN) else ".1%"
    return f"{one.low:{form}} to {one.high:{form}}"


def _missing(made: JudgeReport) -> doc.Part:
    lost = {name: n for name, n in made.statuses.items() if name != "scored"}
    cut = sum(one.cut for one in made.asked)
    said = [f"{n} {name}" for name, n in lost.items()] + ([f"{cut} of a text that was cut"] if cut else [])
    first = next((one.why for one in made.asked if one.verdict is None and one.why), "")
    why = f": {doc.one_line(first, 160)}" if first else ""
    return doc.line(f"of {len(made.asked)} verdicts {', '.join(said)}{why}") if said else ()


def _cost(made: JudgeReport) -> doc.Part:
    cost = made.cost
    calls = f"{cost.calls} calls, {cost.prompt_tokens:,} tokens read, {cost.tokens:,} written, " if cost.calls else ""
    return doc.line(f"cost: {calls}{cost.seconds:.3g} s")


def _categories(made: JudgeReport) -> doc.Part:
    rows: list[list[doc.Part]] = [
        [doc.cut(name, 80), doc.bar(one.value, f"{one.value:.1%}"), _interval(name, one), f"{one.n}", one.how]
        for name, one in made.categories.items()
    ]
    rows += [
        [doc.bold(name), doc.bar(value, f"{value:.1%}"), "–", "", "RewardBench"]
        for name, value in made.sections.items()
    ]
    return doc.Table(["category", "accuracy", "95 % interval", "items", "by"], rows) if rows else ()


def _confusion(made: JudgeReport) -> doc.Part:
    frame = made.confusion
    if frame.empty:
        return ()
    rows = [[f"truth {name}", *(f"{int(n)}" for n in counts)] for name, counts in frame.iterrows()]
    return doc.Table(["verdict", *map(str, frame.columns)], rows, right=True)


def _calibration(found: Calibration) -> doc.Part:
    rows = [
        [f"{one.low:.2f} to {one.high:.2f}", f"{one.n}", f"{one.confidence:.3f}", f"{one.accuracy:.1%}"]
        for one in found.bins
    ]
    error = "" if math.isnan(found.error) else f": expected calibration error {found.error:.3f}"
    table = doc.Table(["", "verdicts", "confidence", "accuracy"], rows, right=True)
    return doc.Fold(f"confidence ({_CONFIDENCE[found.of]}){error}", table, opened=True)


def _wrong(made: JudgeReport) -> doc.Part:
    frame = made.to_pandas()
    wrong = frame[~(frame["accuracy"] >= 1.0)].head(_ROWS)
    rows: list[list[doc.Part]] = []
    for number, row in wrong.iterrows():
        item, mine = made.items[int(str(number))], [one for one in made.asked if one.item == number]
        answers = [(f"answer {place}", text) for place, text in enumerate(item.answers)]
        said = [(f"seed {one.seed}, order {one.order}", one.output or one.why) for one in mine if one.output or one.why]
        full = doc.Fold("answers and what the judge wrote", doc.pairs([("prompt", item.prompt), *answers, *said]))
        verdict = doc.cut(row["verdicts"], CUT)
        rows.append([doc.cut(row["id"], 60), (doc.cut(item.prompt, CUT), full), f"{row['truth']}", verdict])
    return doc.Table(["item", "prompt", "truth", "verdicts"], rows, most=_ROWS)


def principles(made: Principles) -> doc.Part:
    """The view of `Principles`: the kept ones, what they change on pairs of their own, and those that were not kept."""
    kept, dropped = [one for one in made.candidates if one.kept], [one for one in made.candidates if not one.kept]
    said = [doc.counted(len(kept), "principle"), f"of {doc.counted(len(made.candidates), 'candidate')}"]
    reports = [("without principles", made.plainly), *([("with those kept", made.together)] if made.together else [])]
    facts = [
        (
            name,
            f"{_value('', one.figures['accuracy'])} right of {len(one)} other pairs, {_interval('', one.figures['accuracy'])}",
        )
        for name, one in reports
    ]
    lost = f"{len(made.failed)} pairs gave no proposal: {doc.one_line(made.failed[0], 160)}" if made.failed else ""
    return (
        doc.line(doc.bold(" ".join(said)), style="" if kept else BAD),
        _candidates(kept),
        doc.pairs(facts),
        doc.line(lost) if lost else (),
        doc.Fold(f"not better than a constant, or too many ({len(dropped)})", _candidates(dropped)) if dropped else (),
    )


def _candidates(found: Sequence[Principle]) -> doc.Part:
    rows: list[list[doc.Part]] = [
        [
            doc.bar(one.accuracy.value, f"{one.accuracy.value:.1%}"),
            _interval("", one.accuracy),
            f"{one.proposals}",
            one.text,
        ]
        for one in found
    ]
    return doc.Table(["accuracy", "95 % interval", "proposals", "principle"], rows)


# --- the figure -----------------------------------------------------------------------------------

_BLUE, _PALE = "#0969da", "#b8c4d0"


def judge_figure(made: JudgeReport) -> Figure:
    """Draw a `JudgeReport`: accuracy against the constants, confusion (or length), calibration, categories."""
    panels = [lambda axes: _bars(axes, _shares(made))]
    if not made.confusion.empty:
        panels.append(lambda axes: _matrix(axes, made))
    if made.calibration:
        panels.append(lambda axes: _curve(axes, made))
    if made.categories:
        panels.append(lambda axes: _bars(axes, dict(list(made.categories.items())[:12]), "accuracy by category"))
    figure = cell_figure(3.7 * len(panels), 0.8 + 0.23 * max(8, len(_shares(made))), layout="constrained")
    figure.suptitle(label(made.headline, 110), fontsize=10, x=0.01, ha="left", parse_math=False)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.tick_params(labelsize=8)
    return figure


def _shares(made: JudgeReport) -> Mapping[str, Estimate]:
    plain = "mean", "its", "Fleiss", "accuracy less"
    return {name: one for name, one in made.figures.items() if one.n and not name.startswith(plain)}


def _bars(axes: Axes, shares: Mapping[str, Estimate], title: str = "shares, with 95 % intervals") -> None:
    values = [one.value for one in shares.values()]
    missing = [[0.0 if math.isnan(one.low) else one.value - one.low for one in shares.values()]]
    missing.append([0.0 if math.isnan(one.high) else one.high - one.value for one in shares.values()])
    spans = [[max(span, 0.0) for span in side] for side in missing]
    colours = [
        _BLUE if name.startswith(("accuracy", "Spearman with the")) or "by" in title else _PALE for name in shares
    ]
    axes.barh(range(len(shares)), values, color=colours, xerr=spans, ecolor=GREY, error_kw={"lw": 1})
    axes.set_yticks(range(len(shares)), [label(name, 44) for name in shares], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(min([0.0, *(one.low for one in shares.values() if one.low < 0)]), 1)
    axes.set_title(title, fontsize=9, loc="left")


def _matrix(axes: Axes, made: JudgeReport) -> None:
    frame = made.confusion
    axes.imshow(frame.to_numpy(), cmap="Blues", aspect="auto", vmin=0)
    axes.set_xticks(range(len(frame.columns)), list(map(str, frame.columns)))
    axes.set_yticks(range(len(frame)), list(map(str, frame.index)))
    most = float(frame.to_numpy().max())
    for y, (_, counts) in enumerate(frame.iterrows()):
        for x, count in enumerate(counts):
            axes.text(
                x,
                y,
                f"{int(count)}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if count > most / 2 else "black",
            )
    axes.set_xlabel("verdict", fontsize=8)
    axes.set_ylabel("truth", fontsize=8)
    axes.set_title("confusion", fontsize=9, loc="left")


def _curve(axes: Axes, made: JudgeReport) -> None:
    found: Any = made.calibration
    axes.plot(
        [one.confidence for one in found.bins], [one.accuracy for one in found.bins], "o-", color=_BLUE, ms=4, lw=1
    )
    if found.of != "size":
        axes.plot([0, 1], [0, 1], ":", color=GREY, lw=1)
        axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("difference of the numbers" if found.of == "size" else "confidence", fontsize=8)
    error = "" if math.isnan(found.error) else f", error {found.error:.3f}"
    axes.set_title(f"accuracy by confidence ({found.of}){error}", fontsize=9, loc="left")
