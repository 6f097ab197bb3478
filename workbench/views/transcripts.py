"""What was said in one row: turn by turn, with each turn's tokens, its mask, its calls and what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.agents import Turn
from workbench.agents.stepping import call_text
from workbench.views.html import escape, fold, table, terminal, text_block
from workbench.views.sample_index import line
from workbench.views.token_values import TokenRow
from workbench.views.tokens import Tokens, legend, token_html

if TYPE_CHECKING:
    import pandas as pd

    from workbench.agents import EpisodeStepper

CAP = 1000
"""Tokens of one turn in a static form."""
_EDGES = {"assistant": "rgba(130,80,223,0.7)", "tool": "rgba(46,160,67,0.7)", "user": "rgba(212,140,30,0.8)"}
_OTHER = "rgba(128,128,128,0.5)"


class TranscriptView:
    """What `transcript(batch, row)` shows: a cell can end in it."""

    def __init__(self, tokens: Tokens, turns: Sequence[Turn], prompt: Sequence[Any]) -> None:
        self.tokens = tokens
        self.turns = tuple(turns)
        self.prompt = [one if isinstance(one, dict) else {"role": "user", "content": one} for one in prompt]
        self._row = tokens.rows[0]

    @property
    def frame(self) -> pd.DataFrame:
        """One line a turn."""
        return turns_frame(self.turns)

    def head(self) -> str:
        """Turns, calls, tokens and whose they are, in a line."""
        calls = [call for turn in self.turns for call in turn.calls]
        counted = [f"{len(self.turns)} turn" + "s" * (len(self.turns) != 1)]
        counted += [f"{len(calls)} call" + "s" * (len(calls) != 1)] if calls else []
        edited = [str(place) for place, turn in enumerate(self.turns) if turn.edited]
        counted += [f"{sum(self._row.own)} of {self._row.length} tokens are the model's own"]
        counted += [f"turn{'s' * (len(edited) > 1)} {', '.join(edited)} written by hand"] if edited else []
        return " · ".join(counted)

    def text(self) -> str:
        """For a terminal."""
        lines = [f"row {self._row.row}: {self.head()}"]
        lines += [f"  {one['role']:9} (prompt) {line(one['content'], 300)}" for one in self.prompt]
        for place, turn in enumerate(self.turns):
            lines.append(f"{place:3} {turn.role:9} {_facts(turn, self._row)}  {line(turn.text, 300)}")
            lines += [f"      {call_text(call)}" for call in turn.calls]
            lines += [f"      {line(note, 300)}" for note in (turn.cut, turn.error) if note]
        return terminal(lines)

    def html(self) -> str:
        """For a page; survives in an executed notebook."""
        quantity, span = self.tokens.quantity()
        parts = [f"<div><b>row {self._row.row}</b> · {escape(self.head())}</div>", legend(quantity, span)]
        parts += [_block(_OTHER, f"{escape(one['role'])} · prompt", text_block(one["content"])) for one in self.prompt]
        whole = "".join(self._row.prompt)
        parts.append(fold(f"the prompt as the model reads it: {len(self._row.prompt)} tokens", text_block(whole)))
        for place, turn in enumerate(self.turns):
            parts.append(self._turn_html(place, turn))
        return "".join(parts)

    def _turn_html(self, place: int, turn: Turn) -> str:
        quantity, span = self.tokens.quantity()
        shown = range(turn.first, min(turn.last + 1, turn.first + CAP, self._row.length))
        spans = "".join(token_html(self._row, one, quantity, span) for one in shown)
        left = turn.last + 1 - turn.first - len(shown)
        style = "white-space:pre-wrap;word-break:break-word;font-family:monospace;line-height:1.7;font-size:95%"
        body = f'<div style="{style}">{spans}</div>' if spans else text_block(turn.text)
        if left > 0:
            body += f'<div style="opacity:0.7">{left:,} more tokens</div>'
        notes = "".join(f'<div style="opacity:0.75">{escape(note)}</div>' for note in (turn.cut, turn.error) if note)
        title = f"{place} · <b>{escape(turn.role)}</b> · {escape(_facts(turn, self._row))}"
        return _block(_EDGES.get(turn.role, _OTHER), title, body + _calls_html(turn) + notes)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()


def transcript(thing: Any, row: int = 0, colour: str | None = None, *, tokenizer: Any = None) -> TranscriptView:
    """What was said in one row of a batch, trace, stepper or run (or in a stepped episode), turn by turn, in the tokens that `tokens` shows.

    Tokens are coloured by `colour` as there (a dotted line: mask 0, not the model's own), and have the same places. A row
    without `turns` is one turn of the model. `.frame` has a line a turn. Raises as `tokens` does.
    """
    shown = Tokens([TokenRow(thing, row, tokenizer)], [f"row {row}"], colour)
    one = shown.rows[0]
    batch = one.batch

    def part(name: str) -> Any:
        return batch.non_tensor_batch.part(name, row, row + 1)[0] if name in batch.non_tensor_batch else None

    said = part("turns")
    if not said:  # one response, or a loop that keeps no transcript
        turns = [Turn("assistant", str(part("response_text") or "".join(one.texts)), 0, one.length - 1)]
    else:
        turns = [Turn.from_dict(turn) for turn in said]
    prompt = part("raw_prompt")
    return TranscriptView(shown, turns, [] if prompt is None else [prompt] if isinstance(prompt, str) else list(prompt))


def turns_frame(turns: Sequence[Turn]) -> pd.DataFrame:
    """One line a turn: role, text, places of its first and last token, mask, calls, score, what was cut, by hand or not."""
    import pandas as pd

    return pd.DataFrame(
        [
            {
                "role": turn.role,
                "text": turn.text,
                "first": turn.first,
                "last": turn.last,
                "mask": int(turn.role == "assistant"),
                "calls": "; ".join(call_text(call) for call in turn.calls),
                "score": turn.score,
                "cut": turn.cut,
                "edited": turn.edited,
            }
            for turn in turns
        ],
        columns=["role", "text", "first", "last", "mask", "calls", "score", "cut", "edited"],
    )


def episode_text(episode: EpisodeStepper) -> str:
    """An episode that is stepped, for a terminal."""
    return f"{_view(episode).text()}\n{terminal([_upcoming(episode)])}"


def episode_html(episode: EpisodeStepper) -> str:
    """An episode that is stepped, for a page."""
    return f"{_view(episode).html()}<div><b>{escape(_upcoming(episode))}</b></div>"


def _view(episode: EpisodeStepper) -> TranscriptView:
    view = transcript(episode.batch, 0, tokenizer=episode.tokenizer)
    view._row.row = episode.row
    return view


def _upcoming(episode: EpisodeStepper) -> str:
    who = episode.upcoming
    if who is None:
        return f"over: {episode.output.finish_reason}"
    if who == "tool":
        return f"next: the tool, {'; '.join(f'{one.name}({line(one.arguments, 200)})' for one in episode.asked)}"
    return "next: the model" if who == "assistant" else "next: the user"


def _facts(turn: Turn, row: TokenRow) -> str:
    count = turn.last + 1 - turn.first
    places = f"tokens {turn.first} to {turn.last}" if count > 0 else "no tokens"
    own = row.own[turn.first : turn.last + 1]
    said = [places, *([f"mask {int(all(own))}" if len(set(own)) == 1 else "mask mixed"] if own else [])]
    said += [f"score {turn.score:g}"] if turn.score is not None else []
    said += ["written by hand"] if turn.edited else []
    return " · ".join(said)


def _calls_html(turn: Turn) -> str:
    if not turn.calls:
        return ""
    rows = [
        [
            escape(call.name),
            text_block(call.arguments),
            escape(call.status),
            text_block(call.result),
            "" if call.reward is None else f"{call.reward:g}",
            escape("; ".join(filter(None, (call.why, call.cut)))),
        ]
        for call in turn.calls
    ]
    return table(["call", "arguments", "status", "answer", "reward", "note"], rows)


def _block(edge: str, title: str, body: str) -> str:
    """`title` and `body` are HTML."""
    return (
        f'<div style="border-left:3px solid {edge};padding:1px 0 3px 8px;margin:5px 0">'
        f'<div style="opacity:0.8;font-size:90%">{title}</div>{body}</div>'
    )
