"""What a tool agent's context keeps: all of it, or sequences that begin anew where the template rewrites it or it is compacted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.agents.episode import Transcript
from workbench.agents.protocol import Turn
from workbench.base.config import require

HISTORIES = ("append", "template")
COMPACT_PROMPT = (
    "Your context ends here. Write down in a few sentences what has been asked, done and found so far: "
    "you will go on from the task and these sentences alone."
)
_ASKED = "compact"
"""Key of a turn's `extra`: the turn ends with the request for a summary, and the next one is the summary."""
_SUMMARY = "What has been done so far: "


@dataclass
class Part:
    """One sequence of an episode: the chat that its prompt is made of, and what followed."""

    messages: list[dict[str, Any]]
    transcript: Transcript


@dataclass(frozen=True)
class History:
    """When a tool agent's sequence ends and the next one begins; the settings are those of `ToolAgent`."""

    kind: str = "append"
    compact_at: int | None = None
    compact_prompt: str = COMPACT_PROMPT
    max_sequences: int = 16
    settings: Mapping[str, Any] = field(init=False)
    """Those that are not the default, by their names as the agent's."""

    def __post_init__(self) -> None:
        require(self.kind in HISTORIES, "history", expected=f"one of {HISTORIES}", found=self.kind)
        for name in ("compact_at", "max_sequences"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, expected="≥ 1", found=value)
        require(bool(self.compact_prompt), "compact_prompt", expected="a text", found=self.compact_prompt)
        own = {"compact_at": None, "compact_prompt": COMPACT_PROMPT, "max_sequences": 16}
        given = {name: getattr(self, name) for name, usual in own.items() if getattr(self, name) != usual}
        object.__setattr__(self, "settings", given | ({"history": self.kind} if self.kind != "append" else {}))

    def is_full(self, tokens: int) -> bool:
        """Whether a context of so many tokens is to be compacted."""
        return self.compact_at is not None and tokens >= self.compact_at

    def asking(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the request for a summary behind the last one's text, so that no template sees two in a row."""
        *others, last = map(dict, messages)
        return [*others, {**last, "content": f"{last['content']}{self._request}"}]

    def heard(self, turn: Turn) -> str:
        """A turn's text without the request for a summary."""
        return turn.text.removesuffix(self._request) if turn.extra.get(_ASKED) else turn.text

    @property
    def _request(self) -> str:
        return f"\n\n{self.compact_prompt}"


def mark_asked(said: Transcript) -> None:
    """Mark the last turn as one that ends with the request for a summary."""
    said.note(extra={**said.turns[-1].extra, _ASKED: True})


def is_asked(turns: Sequence[Turn]) -> bool:
    """Whether the next turn is a summary."""
    return bool(turns) and turns[-1].role != "assistant" and bool(turns[-1].extra.get(_ASKED))


def summaries(turns: Sequence[Turn]) -> list[bool]:
    """Whether each turn is a summary."""
    return [turn.role == "assistant" and is_asked(turns[:place][-1:]) for place, turn in enumerate(turns)]


def with_summary(messages: Sequence[Mapping[str, Any]], summary: str) -> list[dict[str, Any]]:
    """The first messages of an episode, with the summary of what followed behind them."""
    *others, last = map(dict, messages)
    text = _SUMMARY + summary
    if last["role"] == "user" and isinstance(last["content"], str):
        return [*others, {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*others, last, {"role": "user", "content": text}]


def cut(said: Iterable[Transcript], count: int) -> list[Transcript]:
    """The sequences of an episode that ends after `count` turns; behind a whole one the next has begun."""
    kept: list[Transcript] = []
    for one in said:
        inside = len(one.turns)
        kept.append(one.copy() if inside <= count else one.first(count))
        if inside > count:
            break
        count -= inside
    return kept
