"""Whether a judge can be trusted: a `JudgeReport` as text, as HTML, and as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.views import document as doc
from workbench.views.curves import GREY, cell_figure, label, png
from workbench.views.rewards import BAD, CUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from workbench.rewards.judge_reports import Calibration, JudgeReport
    from workbench.rewards.judge_stats import Estimate
    from workbench.rewards.principle_search import Principle, Principles

_ROWS = 50
_PLAIN = ("mean absolute error", "its constant", "Spearman", "truth's", "Fleiss")
"""Names of figures that are not shares, by how they begin."""
_CONFIDENCE = {
    "stated": "as the judge states it",
    "margin": "the sigmoid of the difference between the two numbers",
    "votes": "the share of an item's verdicts that agree",
    "size": "the difference between the two highest numbers, which is not a probability",
}


def judge_report(report: JudgeReport) -> doc.Part:
    """Build the display of a `JudgeReport`: its verdict, then its figures, tables, drawing (HTML) and the items that it
    judged wrongly.
    """
    what = {"pairs": "pair", "grades": "graded answer", "choices": "choice"}[report.kind]
    seeds = f", {doc.counted(len(report.seeds), 'seed')}" if len(report.seeds) > 1 else ""
    title = f"{doc.one_line(report.judge, 160)} · {doc.counted(len(report), what)}{seeds}, {doc.counted(len(report.asked), 'verdict')}"
    shares = [
        [name, _value(name, one), _interval(name, one), f"{one.n}", one.how] for name, one in report.figures.items()
    ]
    return (
        doc.line(doc.bold(title)),
        doc.line(doc.bold(report.headline, style="" if report.trusted else BAD)),
        doc.Table(["", "value", "95 % interval", "items", "by"], shares),
        [doc.line(doc.faint(note)) for note in report.caveats],
        _missing(report),
        _cost(report),
        _categories(report),
        _confusion(report),
        _calibration(report.calibration) if report.calibration else (),
        doc.Image(lambda: png(judge_figure(report)), report.headline),
        doc.Either(page=doc.Fold(f"items without full credit, the first {_ROWS}", lambda: _wrong(report))),
    )


def _value(name: str, estimate: Estimate) -> str:
    return doc.number(estimate.value, ".3f" if name.startswith(_PLAIN) else ".1%")


def _interval(name: str, estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return "–"
    form = ".3f" if name.startswith(_PLAIN) else ".1%"
    return f"{estimate.low:{form}} to {estimate.high:{form}}"


def _missing(report: JudgeReport) -> doc.Part:
    lost = {name: n for name, n in report.statuses.items() if name != "scored"}
    cut = sum(one.cut for one in report.asked)
    parts = [f"{n} {name}" for name, n in lost.items()] + ([f"{cut} given on a shortened text"] if cut else [])
    first = next((one.why for one in report.asked if one.verdict is None and one.why), "")
    why = f": {doc.one_line(first, 160)}" if first else ""
    return doc.line(f"of {len(report.asked)} verdicts: {', '.join(parts)}{why}") if parts else ()


def _cost(report: JudgeReport) -> doc.Part:
    cost = report.cost
    calls = f"{cost.calls} calls, {cost.prompt_tokens:,} tokens read, {cost.tokens:,} written, " if cost.calls else ""
    return doc.line(f"cost: {calls}{doc.number(cost.seconds)} s")


def _categories(report: JudgeReport) -> doc.Part:
    rows: list[list[doc.Part]] = [
        [doc.cut(name, 80), doc.bar(one.value, f"{one.value:.1%}"), _interval(name, one), f"{one.n}", one.how]
        for name, one in report.categories.items()
    ]
    rows += [
        [doc.bold(name), doc.bar(value, f"{value:.1%}"), "–", "", "RewardBench"]
        for name, value in report.sections.items()
    ]
    return doc.Table(["category", "accuracy", "95 % interval", "items", "by"], rows) if rows else ()


def _confusion(report: JudgeReport) -> doc.Part:
    frame = report.confusion
    if frame.empty:
        return ()
    rows = [[f"truth {name}", *(f"{int(n)}" for n in counts)] for name, counts in frame.iterrows()]
    return doc.Table(["verdict", *map(str, frame.columns)], rows, right=True)


def _calibration(calibration: Calibration) -> doc.Part:
    rows = [
        [f"{one.low:.2f} to {one.high:.2f}", f"{one.n}", f"{one.confidence:.3f}", f"{one.accuracy:.1%}"]
        for one in calibration.bins
    ]
    error = "" if math.isnan(calibration.error) else f": expected calibration error {calibration.error:.3f}"
    table = doc.Table(["", "verdicts", "confidence", "accuracy"], rows, right=True)
    return doc.Fold(f"confidence ({_CONFIDENCE[calibration.of]}){error}", table, opened=True)


def _wrong(report: JudgeReport) -> doc.Part:
    frame = report.to_pandas()
    wrong = frame[~(frame["accuracy"] >= 1.0)].head(_ROWS)
    rows: list[list[doc.Part]] = []
    for number, row in wrong.iterrows():
        item, mine = report.items[int(str(number))], [one for one in report.asked if one.item == number]
        answers = [(f"answer {place}", text) for place, text in enumerate(item.answers)]
        says = [(f"seed {one.seed}, order {one.order}", one.output or one.why) for one in mine if one.output or one.why]
        full = doc.Fold("answers and what the judge wrote", doc.pairs([("prompt", item.prompt), *answers, *says]))
        verdict = doc.cut(row["verdicts"], CUT)
        rows.append([doc.cut(row["id"], 60), (doc.cut(item.prompt, CUT), full), f"{row['truth']}", verdict])
    return doc.Table(["item", "prompt", "truth", "verdicts"], rows, most=_ROWS)


def principles(search: Principles) -> doc.Part:
    """Build the display of `Principles`: those that were kept, how they change accuracy on other pairs, and those that
    were dropped.
    """
    kept = [candidate for candidate in search.candidates if candidate.kept]
    dropped = [candidate for candidate in search.candidates if not candidate.kept]
    parts = [doc.counted(len(kept), "principle"), f"of {doc.counted(len(search.candidates), 'candidate')}"]
    reports = {"without principles": search.plainly, "with the kept principles": search.together}
    facts = list[tuple[str, doc.Part]]()
    for name, report in reports.items():
        if report:
            right = report.figures["accuracy"]
            share = f"{_value('', right)} right of {len(report)} other pairs, {_interval('', right)}"
            facts.append((name, share))
    lost = (
        f"{len(search.failed)} pairs gave no proposal: {doc.one_line(search.failed[0], 160)}" if search.failed else ""
    )
    return (
        doc.line(doc.bold(" ".join(parts)), style="" if kept else BAD),
        _candidates(kept),
        doc.pairs(facts),
        doc.line(lost) if lost else (),
        doc.Fold(f"{len(dropped)} dropped: no gain, or too many", _candidates(dropped)) if dropped else (),
    )


def _candidates(principles: Sequence[Principle]) -> doc.Part:
    rows: list[list[doc.Part]] = [
        [
            doc.bar(principle.accuracy.value, f"{principle.accuracy.value:.1%}"),
            _interval("", principle.accuracy),
            f"{principle.proposals}",
            principle.text,
        ]
        for principle in principles
    ]
    return doc.Table(["accuracy", "95 % interval", "proposals", "principle"], rows)


# --- the figure -----------------------------------------------------------------------------------

_BLUE, _PALE = "#0969da", "#b8c4d0"


def judge_figure(report: JudgeReport) -> Figure:
    """Draw a `JudgeReport`: accuracy beside constant judges, confusion (or length), calibration, categories."""
    panels = [lambda axes: _bars(axes, _shares(report))]
    if not report.confusion.empty:
        panels.append(lambda axes: _matrix(axes, report))
    if report.calibration:
        panels.append(lambda axes: _curve(axes, report))
    if report.categories:
        panels.append(lambda axes: _bars(axes, dict(list(report.categories.items())[:12]), "accuracy by category"))
    figure = cell_figure(3.7 * len(panels), 0.8 + 0.23 * max(8, len(_shares(report))), layout="constrained")
    figure.suptitle(label(report.headline, 110), fontsize=10, x=0.01, ha="left", parse_math=False)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.tick_params(labelsize=8)
    return figure


def _shares(report: JudgeReport) -> Mapping[str, Estimate]:
    plain = "mean", "its", "Fleiss", "accuracy less"
    return {name: one for name, one in report.figures.items() if one.n and not name.startswith(plain)}


def _bars(axes: Axes, shares: Mapping[str, Estimate], title: str = "shares, with 95 % intervals") -> None:
    values = [share.value for share in shares.values()]
    missing = [[0.0 if math.isnan(share.low) else share.value - share.low for share in shares.values()]]
    missing.append([0.0 if math.isnan(share.high) else share.high - share.value for share in shares.values()])
    spans = [[max(span, 0.0) for span in side] for side in missing]
    colours = [
        _BLUE if name.startswith(("accuracy", "Spearman with the")) or "by" in title else _PALE for name in shares
    ]
    axes.barh(range(len(shares)), values, color=colours, xerr=spans, ecolor=GREY, error_kw={"lw": 1})
    axes.set_yticks(range(len(shares)), [label(name, 44) for name in shares], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(min([0.0, *(share.low for share in shares.values() if share.low < 0)]), 1)
    axes.set_title(title, fontsize=9, loc="left")


def _matrix(axes: Axes, report: JudgeReport) -> None:
    frame = report.confusion
    axes.imshow(frame.to_numpy(), cmap="Blues", aspect="auto", vmin=0)
    axes.set_xticks(range(len(frame.columns)), list(map(str, frame.columns)))
    axes.set_yticks(range(len(frame)), list(map(str, frame.index)))
    most = float(frame.to_numpy().max())
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for y, (_, counts) in enumerate(frame.iterrows()):
        for x, count in enumerate(counts):
            axes.text(x, y, f"{int(count)}", color="white" if count > most / 2 else "black", **middle)
    axes.set_xlabel("verdict", fontsize=8)
    axes.set_ylabel("truth", fontsize=8)
    axes.set_title("confusion", fontsize=9, loc="left")


def _curve(axes: Axes, report: JudgeReport) -> None:
    calibration: Any = report.calibration
    bins = calibration.bins
    axes.plot([one.confidence for one in bins], [one.accuracy for one in bins], "o-", color=_BLUE, ms=4, lw=1)
    if calibration.of != "size":
        axes.plot([0, 1], [0, 1], ":", color=GREY, lw=1)
        axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("difference of the numbers" if calibration.of == "size" else "confidence", fontsize=8)
    error = "" if math.isnan(calibration.error) else f", error {calibration.error:.3f}"
    axes.set_title(f"accuracy by confidence ({calibration.of}){error}", fontsize=9, loc="left")
