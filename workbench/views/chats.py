"""A chat as text and as a table: each message, and beside each other what the models answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.views import document as doc
from workbench.views.tokens import tokens

if TYPE_CHECKING:
    from workbench.replay.chat import Answer, Chat


def chat(thing: Chat) -> doc.Part:
    """Build the display of a chat: who answers and how, the messages with the answers, and how many rows were kept."""
    settings = thing.sampling
    how = f"temperature {settings.temperature:g}, top_p {settings.top_p:g}, at most {settings.max_tokens} tokens"
    who = [f"{side} ({label})" if label else side for side, label in thing.labels.items()]
    system = [doc.line(doc.faint("system: "), thing.system)] if thing.system else []
    lines: list[doc.Part] = []
    for turn in thing.turns:
        lines.append(f"  you: {turn.text}")
        lines += [f"  {side}: {answer.text}  [{answer.note}]" for side, answer in turn.answers.items()]
    rows = [
        [doc.Span(turn.text, "white-space:pre-wrap"), *(_cell(turn.answers.get(side)) for side in thing.sides)]
        for turn in thing.turns
    ]
    kept = doc.counted(len(thing.kept), "row") + " kept: wb.rows(chat.kept)"
    return [
        doc.line(doc.bold("Chat"), f" with {' and '.join(who)} · {how}"),
        *system,
        *(doc.line(doc.faint(note)) for note in thing.notes),
        doc.Either(lines, doc.Table(["you", *thing.sides], rows))
        if rows
        else doc.line('no messages yet: chat.ask("…")'),
        *([doc.line(doc.small(kept))] if thing.kept else []),
    ]


def _cell(answer: Answer | None) -> doc.Part:
    return "–" if answer is None else [doc.wrapped(answer.text), doc.small(answer.note)]


def answer_tokens(answer: Answer, tokenizer: Any) -> doc.Part:
    """Show an answer's tokens, coloured by their log-probs, each with its numbers on hover, under a legend."""
    batch: Any = answer.batch
    return tokens(batch, len(batch) - 1, "log_prob", tokenizer=tokenizer).document()
