"""A dry run of rewards: a table of scorers, how they fail, where they disagree, and what each extracted, in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.views.html import bar, escape, fold, table, terminal

if TYPE_CHECKING:
    from workbench.rewards.dry_run import DryRun, Judged

_ROWS = 8
_AROUND = 160
_COLOURS = ("rgba(9,105,218,0.28)", "rgba(191,135,0,0.32)", "rgba(130,80,223,0.28)", "rgba(46,160,67,0.30)")


def dry_run_text(run: DryRun) -> str:
    """The table of scorers and how many rows they disagree on."""
    lines = [f"{len(run.rows)} completions"]
    for name, numbers in run.summary.iterrows():
        said = [f"mean {numbers['mean']:.3f}", f"{int(numbers['judged'])} judged"]
        said += [f"{int(numbers[key])} {key}" for key in run.summary if "failed" in key or "applicable" in key]
        said.append(f"median {_time(numbers['median s'])}, longest {_time(numbers['longest s'])}")
        lines.append(f"  {name:<20} {', '.join(said)}")
    if len(run.judged) > 1:
        lines.append(f"{len(run.disagreements)} rows are judged differently")
    for reason, counts in run.failures.head(5).iterrows():
        lines.append(f"  {int(counts.sum()):5d} × {str(reason)[:100]}")
    return terminal(lines)


def dry_run_html(run: DryRun) -> str:
    """Scorers, reasons, and the rows that they disagree on, each answer marked where it stands in the response."""
    parts = [_summary(run)]
    failures = run.failures
    if len(failures):
        rows = [
            [escape(reason, 160), *(f"{int(counts[name])}" for name in failures)]
            for reason, counts in failures.head(12).iterrows()
        ]
        parts.append(
            fold(f"why rows are not plainly judged ({len(failures)} reasons)", table(["reason", *failures], rows))
        )
    shown = list(run.disagreements.index) if len(run.judged) > 1 else list(range(len(run.rows)))
    what = "rows that the scorers judge differently" if len(run.judged) > 1 else "rows"
    if shown:
        parts.append(fold(f"{len(shown)} {what}", _rows(run, shown[:_ROWS]), opened=True))
    return "".join(parts)


def _summary(run: DryRun) -> str:
    frame = run.summary
    statuses = [key for key in frame if key in ("scored", "model failed", "machinery failed", "not applicable")]
    header = ["scorer", "mean", *statuses, "extracted", "median", "longest"]
    colours = dict(zip(run.judged, _cycle(len(run.judged)), strict=True))
    rows = []
    for name, numbers in frame.iterrows():
        mean = float(numbers["mean"])
        rows.append(
            [
                f'<span style="background:{colours[str(name)]};padding:0 4px">{escape(name)}</span>',
                bar(abs(mean), f"{mean:.3f}", good=mean >= 0) if mean == mean else "–",
                *(f"{int(numbers[key])}" for key in statuses),
                f"{int(numbers['extracted'])}",
                _time(numbers["median s"]),
                _time(numbers["longest s"]),
            ]
        )
    return f"<b>{len(run.rows)} completions</b>" + table(header, rows)


def _time(seconds: float) -> str:
    """In the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _cycle(number: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(number)]


def _rows(run: DryRun, numbers: list[int]) -> str:
    body = []
    for number in numbers:
        row = run.rows[number]
        found = {name: judged[number] for name, judged in run.judged.items()}
        body.append(
            [
                f"{number}",
                escape(row["ground_truth"], 60),
                _marked(row["response"], list(found.values())),
                "<br>".join(_verdict(name, one) for name, one in found.items()),
            ]
        )
    return table(["row", "truth", "response", "judged"], body)


def _verdict(name: str, one: Judged) -> str:
    value = f"{one.score.value:g}" if one.score.scored else "–"
    return f"<b>{escape(name)} {value}</b> <small>{escape(one.score.why, 120)}</small>"


def _marked(text: str, found: list[Any]) -> str:
    """The end of a response (where answers stand) with each scorer's answer on its colour."""
    coloured = [(one.span, colour) for one, colour in zip(found, _cycle(len(found)), strict=True) if one.span]
    spans = sorted(coloured, key=lambda pair: pair[0])
    first = min((span[0] for span, _ in spans), default=len(text))
    start = max(min(first - _AROUND // 2, len(text) - _AROUND), 0)
    end = max(max((span[1] for span, _ in spans), default=0) + _AROUND, start + _AROUND)
    out, place = ["…" if start else ""], start
    for (left, right), colour in spans:
        if left < place:  # two scorers read the same place: the first one's colour stands
            continue
        out.append(escape(text[place:left]))
        out.append(f'<span style="background:{colour}">{escape(text[left:right], 200)}</span>')
        place = right
    out += [escape(text[place:end]), "…" if end < len(text) else ""]
    return f'<div style="white-space:pre-wrap;word-break:break-word;max-width:520px">{"".join(out)}</div>'
