"""Scores of one row and of pinned rows, rubrics, and dry runs of several scorers with the rows they disagree on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from workbench.datasets.pictures import is_parts, text_of
from workbench.rewards.base import told
from workbench.rewards.score import Status
from workbench.views import document as doc

if TYPE_CHECKING:
    from workbench.rewards.reward import Reward, Rubric
    from workbench.rewards.score import Score
    from workbench.rewards.trials import DryRun, Judged, Pin, PinCheck, PinResult, Pins

CUT = 110
"""Characters of a prompt or a response before it is unfolded."""
BAD = "color:rgb(190,70,50)"
_EXTRA = 4000


def score(score: Score) -> doc.Part:
    """Build the display of a `Score`: one line in a terminal; in HTML a table, with extra values and traceback folded."""
    parts = ", ".join(f"{name} {value:g}" for name, value in score.parts.items())
    summary = f"Score({score}{f'; parts {parts}' if parts else ''})"
    facts = [("reward", f"{score.value:g}" if score.scored else "no judgement"), *verdict(score)]
    left = [doc.Fold(name, doc.block(text)) for name, text in [*extras(score), *traceback(score)]]
    return doc.Either(summary, (doc.pairs(facts), left))


def verdict(score: Score) -> list[tuple[str, str]]:
    """Return the status, explanation, answer and parts of a score, as (name, text)."""
    facts = [("status", score.status.value)]
    facts += [("why", score.why)] if score.why else []
    facts += [("answer", score.answer)] if score.answer is not None else []
    return facts + [(f"part {name}", f"{part:g}") for name, part in score.parts.items()]


def traceback(score: Score) -> list[tuple[str, str]]:
    """Return the traceback of a failed score as [("traceback", text)]; [] for any other score."""
    return [("traceback", score.error)] if score.error else []


def extras(score: Score) -> list[tuple[str, str]]:
    """Return the extra values of a score as (name, text), long texts cut; lists and dicts have one line per item."""
    return [(name, _shown(value)) for name, value in score.extra.items()]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        value = "\n".join(f"{key}: {one}" for key, one in value.items())
    elif isinstance(value, list):
        value = "\n".join(str(one) for one in value)
    return str(value)[:_EXTRA]


def question(chat: Any) -> str:
    """Return the text of a chat's last user message; a prompt that is not a chat is returned as text."""
    if not isinstance(chat, list) or not chat:
        return "" if chat is None else str(chat)
    users = [turn for turn in chat if turn.get("role") == "user"]
    body = (users or chat)[-1].get("content", "")
    if isinstance(body, list) and not is_parts(body):  # parts: text, and a name in brackets for a film or the like
        body = " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in body)
    return str(text_of(body))


def unfolding(prompt: str | None, response: str, *further: doc.Part) -> doc.Part:
    """Show the start of a prompt, and the start of a response that unfolds to both in full and to `further` parts."""
    full: list[doc.Part] = [doc.block(prompt), doc.RULE] if prompt is not None else []
    return doc.cut(prompt or "", CUT), doc.Fold(
        doc.cut(response.replace("\n", " ⏎ "), CUT), [*full, doc.block(response), *further]
    )


def rubric(rubric: Rubric) -> doc.Part:
    """Build the display of a `Rubric` or an `Ensemble`: its formula in one line; in HTML a table of its parts with
    weights and gates.
    """
    terms = " + ".join(f"{rubric.weights[part]:g}·{part}" for part in rubric.parts if rubric.weights[part])
    gates = f", gated by {', '.join(f'{part} ≥ {low:g}' for part, low in rubric.gates.items())}" if rubric.gates else ""
    top = max((abs(weight) for weight in rubric.weights.values()), default=0.0) or 1.0
    rows: list[list[doc.Part]] = []
    for part, reward in rubric.parts.items():
        weight = rubric.weights[part]
        name = doc.bold(part), doc.BREAK, doc.small(f"column reward/{part}")
        bar = doc.bar(abs(weight) / top, f"{weight:g}", weight >= 0) if weight else "–"
        gate = f"≥ {rubric.gates[part]:g}, else {rubric.gated:g}" if part in rubric.gates else ""
        kept = {**reward.settings(), **reward.binding}
        settings = doc.Fold("settings", doc.pairs([(key, str(value)) for key, value in kept.items()]))
        rows.append([name, bar, gate, f"{type(reward).__name__} {doc.cut(reward.name, 80)}", settings])
    kind, combine = type(rubric).__name__, getattr(rubric, "combine", "")
    what = combine or ("weighted mean" if rubric.normalise else "weighted sum")
    title = doc.line(doc.bold(kind), f" · {what} of {len(rubric.parts)} parts")
    formula = f"{combine} of {', '.join(rubric.parts)}" if combine else f"{terms}{gates}"
    return doc.Either(f"{kind}({formula})", (title, doc.Table(["part", "weight", "gate", "scored by", ""], rows)))


# --- a dry run --------------------------------------------------------------------------------

_ROWS = 50
_AROUND = 160
_FILLED = "what each argument of the function gets"
_COLOURS = ("rgba(9,105,218,0.28)", "rgba(191,135,0,0.32)", "rgba(130,80,223,0.28)", "rgba(46,160,67,0.30)")


def dry_run(dry_run: DryRun) -> doc.Part:
    """Build the display of a `DryRun`: numbers per scorer; in HTML also the rows that scorers disagree on, answers
    marked.
    """
    several, failures = len(dry_run.judged) > 1, list(dry_run.failures.iterrows())
    rows = list(dry_run.disagreements.index) if several else list(range(len(dry_run.rows)))
    what = f"{len(rows)} rows" + (" that the scorers score differently" if several else "")
    if len(rows) > _ROWS:
        what += f", the first {_ROWS}" + ": views.samples(run, where={'reward/differs': 1}) has all" * several
    text = [f"{len(rows)} rows are scored differently"] if several else []
    text += [f"  {int(counts.sum()):5d} × {doc.cut(reason, 100)}" for reason, counts in failures[:5]]
    cells = [[doc.cut(reason, 160), *(f"{int(count)}" for count in counts)] for reason, counts in failures]
    reasons = doc.Table(["reason", *dry_run.failures], cells, most=12)
    calls = [(name, told(binding)) for name, binding in dry_run.bindings.items() if binding]
    return (
        doc.line(doc.bold(f"{len(dry_run.rows)} completions")),
        _scorers(dry_run),
        doc.Either(
            [f"  {name}({filled})" for name, filled in calls], doc.Fold(_FILLED, doc.pairs(calls)) if calls else ()
        ),
        doc.Either(text),
        doc.Fold(f"rows without a score: {doc.counted(len(failures), 'reason')}", reasons) if cells else (),
        doc.Either(page=doc.Fold(what, lambda: _rows(dry_run, rows[:_ROWS]), opened=True) if rows else ()),
    )


def reward(reward: Reward) -> doc.Part:
    """Build the display of a `Reward`: where it runs and its policy, then each argument of its function and what fills
    it.
    """
    where = "in this process" if reward.in_process else f"{reward.workers} workers, {reward.timeout:g} s a row"
    line = f"Reward({reward.name}: one call per {reward.per}, {where}, on failure {reward.on_failure}"
    return doc.Either(
        f"{line}; {told(reward.binding)})", (doc.line(doc.bold(f"{line})")), doc.pairs(list(reward.binding.items())))
    )


def _scorers(dry_run: DryRun) -> doc.Part:
    frame = dry_run.summary
    statuses = [key for key in frame if key in tuple(Status)]
    rows = []
    for (name, numbers), colour in zip(frame.iterrows(), cycle(_COLOURS), strict=False):
        mean, times = float(numbers["mean"]), [_time(numbers["median s"]), _time(numbers["longest s"])]
        counts = [f"{int(numbers[key])}" for key in (*statuses, "extracted")]
        bar = doc.bar(abs(mean), doc.number(mean), mean >= 0) if mean == mean else "–"
        rows.append([doc.Span(str(name), f"background:{colour};padding:0 4px"), bar, *counts, *times])
    return doc.Table(["scorer", "mean", *statuses, "extracted", "median", "longest"], rows)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{doc.number(seconds / size)} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _rows(dry_run: DryRun, numbers: list[int]) -> doc.Part:
    body = []
    for row in numbers:
        kept, found = dry_run.rows[row], {name: judged[row] for name, judged in dry_run.judged.items()}
        verdicts = doc.stacked([_verdict(name, one) for name, one in found.items()])
        response = _marked(kept["response"], list(found.values()))
        body.append([f"{row}", doc.cut(kept["ground_truth"], 60), response, verdicts])
    return doc.Table(["row", "truth", "response", "scores"], body)


def _verdict(name: str, judgement: Judged) -> doc.Part:
    value = f"{judgement.score.value:g}" if judgement.score.scored else "–"
    return doc.bold(f"{name} {value}"), " ", doc.small(doc.cut(judgement.score.why, 120))


def _marked(text: str, found: list[Any]) -> doc.Part:
    """Show a response around the scorers' answers, each on its scorer's colour; without an answer the end of the
    response.
    """
    coloured = [(one.span, colour) for one, colour in zip(found, cycle(_COLOURS), strict=False) if one.span]
    spans = sorted(coloured, key=lambda pair: pair[0])
    first = min((span[0] for span, _ in spans), default=len(text))
    start = max(min(first - _AROUND // 2, len(text) - _AROUND), 0)
    end = max(max((span[1] for span, _ in spans), default=0) + _AROUND, start + _AROUND)
    out: list[doc.Part] = ["…" if start else ""]
    place = start
    for (left, right), colour in spans:
        if left < place:  # two scorers read the same place: it has the colour of the first
            continue
        out += [text[place:left], doc.Span(doc.cut(text[left:right], 200), f"background:{colour}")]
        place = right
    return doc.wrapped(*out, text[place:end], "…" if end < len(text) else "", style="max-width:520px")


# --- pins -------------------------------------------------------------------------------------

_PINS = 40


def pin(pin: Pin) -> doc.Part:
    """Build the display of a `Pin`: expected score, note, origin, and the start of the response; in HTML the rest is
    folded.
    """
    facts = [one for one in (f"expected {_expected(pin.expected)}", pin.note, _origin(pin)) if one]
    text = ["  ".join([f"pin {pin.id}", *map(doc.one_line, facts)]), f"  → {doc.one_line(pin.response)}"]
    return doc.Either(text, (doc.line(doc.bold(f"pin {pin.id}"), " ", doc.cut(" · ".join(facts), 600)), _kept(pin)))


def pins(pins: Pins) -> doc.Part:
    """Build the display of `Pins`: for each pin its number, expected score, note, origin and start of the response."""
    lines, rows = list[str](), list[list[doc.Part]]()
    for place, pin in enumerate(pins):
        expected, origin = _expected(pin.expected), _origin(pin)
        head = [f"{place:4d}  {pin.id}  expected {expected}", doc.one_line(pin.note), doc.one_line(origin)]
        lines += ["  ".join(filter(None, head)), f"      → {doc.one_line(pin.response)}"]
        truth = doc.cut(pin.ground_truth, 60) if pin.ground_truth is not None else ""
        further = doc.bold(expected), truth, doc.cut(pin.note, 400), doc.small(doc.cut(origin, 160))
        rows.append([_name(place, pin), _kept(pin), *further])
    header = ["pin", "prompt → response", "expected", "truth", "note", "from"]
    more = [f"… and {len(pins) - _PINS} more"] if len(pins) > _PINS else []
    return (
        doc.line(doc.bold(doc.counted(len(pins), "pin")), f" in {doc.cut(pins.path, 200)}"),
        doc.Either([*lines[: 2 * _PINS], *more], doc.Table(header, rows, most=_PINS)),
    )


def pin_check(check: PinCheck) -> doc.Part:
    """Build the display of a `PinCheck`: how many pins got their expected score, then each that did not, and why."""
    lines: list[str] = []
    for case in check.failed[:_PINS]:
        lines.append(f"  pin {case.number} ({case.pin.id}): expected {_expected(case.pin.expected)}, got {_got(case)}")
        lines += [f"    {doc.one_line(text)}" for text in (case.why, case.pin.note) if text]
        lines.append(f"    → {doc.one_line(case.pin.response)}")
    lines += [f"… and {len(check.failed) - _PINS} more"] if len(check.failed) > _PINS else []
    holding = [case for case in check.results if case.holds]
    title = f"{doc.counted(len(holding), 'pin')} that {'holds' if len(holding) == 1 else 'hold'}"
    return (
        doc.line(doc.bold(_holds(check), style="" if check else BAD)),
        doc.Either(lines, _results(check.failed)),
        doc.Fold(title, _results(holding)) if holding else (),
    )


def _results(results: Sequence[PinResult]) -> doc.Part:
    rows: list[list[doc.Part]] = []
    for one in results:
        further = doc.bold(_got(one)), doc.cut(one.why, 2 * CUT), doc.cut(one.pin.note, 400)
        rows.append([_name(one.number, one.pin), _kept(one.pin), _expected(one.pin.expected), *further])
    return doc.Table(["pin", "prompt → response", "expected", "got", "why", "note"], rows, most=_PINS)


def _name(number: int, pin: Pin) -> doc.Part:
    return f"{number}", doc.BREAK, doc.small(pin.id)


def _holds(check: PinCheck) -> str:
    total, broken = len(check), len(check.failed)
    if not total:
        return f"{check.reward}: no pins in {check.path}"
    if broken:
        return f"{check.reward}: {broken} of {doc.counted(total, 'pin')} {'breaks' if broken == 1 else 'break'}"
    return f"{check.reward}: " + (f"all {total} pins get their score" if total > 1 else "the pin gets its score")


def _got(result: PinResult) -> str:
    return f"no judgement ({result.status})" if result.got is None else _expected(result.got)


def _expected(value: Any) -> str:
    """Format a score with at most nine digits; the text 'unscored' is returned unchanged."""
    return value if isinstance(value, str) else f"{value:.9g}"


def _kept(pin: Pin) -> doc.Part:
    further = {"reward_model": dict(pin.reward_model), "extra_info": pin.extra_info, **pin.columns}
    kept = [(name, str(value)) for name, value in further.items() if value]
    return unfolding(question(pin.prompt), pin.response, doc.pairs(kept) if kept else ())


def _origin(pin: Pin) -> str:
    return ", ".join(f"{name} {value}" for name, value in pin.origin.items() if name not in ("uid", "seed", "epoch"))
