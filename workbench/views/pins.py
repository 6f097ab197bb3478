"""Pinned rows and how a reward stands to them: the broken ones first, each with its note and what the reward said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.views.html import escape, fold, pairs_table, table, terminal, text_block
from workbench.views.sample_index import line

if TYPE_CHECKING:
    from workbench.rewards.pins import Checked, Pin, PinCheck, Pins

_ROWS = 40
_CUT = 110
_BAD = "color:rgb(190,70,50)"


def pin_text(pin: Pin) -> str:
    """Its expectation, note, origin, and the response's start."""
    said = [f"pin {pin.id}", f"expected {_number(pin.expected)}", line(pin.note), line(_origin(pin))]
    return terminal(["  ".join(filter(None, said)), f"  → {line(pin.response)}"])


def pin_html(pin: Pin) -> str:
    """The same; all that it keeps is folded."""
    said = [f"expected {_number(pin.expected)}", pin.note, _origin(pin)]
    return f"<b>pin {escape(pin.id)}</b> {escape(' · '.join(filter(None, said)), 600)}<br>{_text(pin)}"


def pins_text(pins: Pins) -> str:
    """Two lines a pin: number, expectation, note, where it came from; the response's start."""
    lines = [f"{_count(len(pins), 'pin')} in {pins.path}"]
    for number, pin in list(enumerate(pins))[:_ROWS]:
        said = [f"{number:4d}  {pin.id}  expected {_number(pin.expected)}", line(pin.note), line(_origin(pin))]
        lines += ["  ".join(filter(None, said)), f"      → {line(pin.response)}"]
    return terminal(lines + _more(len(pins)))


def pins_html(pins: Pins) -> str:
    """A table; prompt, response, and everything else that a pin keeps are folded in each row."""
    rows = [
        [
            f"{number}<br><small>{escape(pin.id)}</small>",
            _text(pin),
            f"<b>{escape(_number(pin.expected))}</b>",
            escape(pin.ground_truth, 60) if pin.ground_truth is not None else "",
            escape(pin.note, 400),
            f"<small>{escape(_origin(pin), 160)}</small>",
        ]
        for number, pin in list(enumerate(pins))[:_ROWS]
    ]
    header = ["pin", "prompt → response", "expected", "truth", "note", "from"]
    more = "".join(f"<div>{escape(line)}</div>" for line in _more(len(pins)))
    head = f"<b>{escape(_count(len(pins), 'pin'))}</b> in {escape(pins.path, 200)}"
    return head + (table(header, rows) if rows else "") + more


def check_text(check: PinCheck) -> str:
    """How many pins hold; then each that breaks: expected, got, why, note."""
    lines = [_verdict(check)]
    for one in check.failed[:_ROWS]:
        lines.append(f"  pin {one.number} ({one.pin.id}): expected {_number(one.pin.expected)}, got {_got(one)}")
        lines += [f"    {line(text)}" for text in (one.why, one.pin.note) if text]
        lines.append(f"    → {line(one.pin.response)}")
    return terminal(lines + _more(len(check.failed)))


def check_html(check: PinCheck) -> str:
    """The same as a table, broken pins open, the others folded."""
    colour = "" if check else f' style="{_BAD}"'
    holding = [one for one in check.results if one.holds]
    parts = [f"<b{colour}>{escape(_verdict(check))}</b>"]
    if check.failed:
        parts.append(_results(check.failed))
    if holding:
        parts.append(
            fold(f"{_count(len(holding), 'pin')} that {'holds' if len(holding) == 1 else 'hold'}", _results(holding))
        )
    return "".join(parts)


def _results(results: Sequence[Checked]) -> str:
    rows = [
        [
            f"{one.number}<br><small>{escape(one.pin.id)}</small>",
            _text(one.pin),
            escape(_number(one.pin.expected)),
            f"<b>{escape(_got(one))}</b>",
            escape(one.why, 2 * _CUT),
            escape(one.pin.note, 400),
        ]
        for one in results[:_ROWS]
    ]
    header = ["pin", "prompt → response", "expected", "got", "why", "note"]
    more = "".join(f"<div>{escape(line)}</div>" for line in _more(len(results)))
    return table(header, rows) + more


def _verdict(check: PinCheck) -> str:
    total, broken = len(check), len(check.failed)
    if not total:
        return f"{check.reward}: no pins in {check.path}"
    if not broken:
        return (
            f"{check.reward}: all of {_count(total, 'pin')} hold" if total > 1 else f"{check.reward}: the one pin holds"
        )
    return f"{check.reward}: {broken} of {_count(total, 'pin')} {'breaks' if broken == 1 else 'break'}"


def _got(one: Checked) -> str:
    return f"no judgement ({one.status})" if one.got is None else _number(one.got)


def _number(value: Any) -> str:
    """A score as short as it can be told from its neighbours; 'unscored' as it is."""
    return value if isinstance(value, str) else f"{value:.9g}"


def _text(pin: Pin) -> str:
    start = pin.response.replace("\n", " ⏎ ")[:_CUT]
    further = {"reward_model": dict(pin.reward_model), "extra_info": pin.extra_info, **pin.columns}
    shown = [(name, str(value)) for name, value in further.items() if value]
    full = text_block(_question(pin.prompt)) + "<hr>" + text_block(pin.response) + (pairs_table(shown) if shown else "")
    return escape(_question(pin.prompt), _CUT) + fold(start, full)


def _question(prompt: Any) -> str:
    """The last text of a chat; a plain prompt as it is."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    said = last.get("content") if isinstance(last, dict) else last
    return "" if said is None else str(said)


def _origin(pin: Pin) -> str:
    return ", ".join(f"{name} {value}" for name, value in pin.origin.items() if name not in ("uid", "seed", "epoch"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _more(number: int) -> list[str]:
    return [f"… and {number - _ROWS} more"] if number > _ROWS else []
