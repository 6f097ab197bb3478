"""An episode turn by turn, its agent loop, and trees of continuations."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.agents.loop import AgentLoopBase
from workbench.agents.parsers import parser_names, tool_parser
from workbench.agents.protocol import ToolCall, Turn
from workbench.agents.stepping import call_text
from workbench.dataproto.core import row_name, sequence_of
from workbench.datasets.pictures import text_of
from workbench.views import document as doc
from workbench.views import prose
from workbench.views.sample_table import object_at
from workbench.views.tokens import BOX, TokenRow, Tokens, coloured, headline, judged, legend, rest

if TYPE_CHECKING:
    import pandas as pd

    from workbench.agents.stepping import EpisodeStepper, EpisodeTree, TreeNode, TurnValue

TURN_CAP = 1000
"""Most tokens of one turn in a static form."""
_OWN, _OTHER = "rgb(56,139,253)", "rgba(128,128,128,.5)"
_TURN = "max-width:90ch;box-sizing:border-box;padding:4px 10px 6px;margin:8px 0;border-left:3px solid"
_ASIDE = "float:right;margin-left:16px"


class TranscriptView(doc.View):
    """An episode turn by turn: prompt, turns with coloured tokens, and the episode's other sequences.
    `transcript(batch, row)` makes it.
    """

    def __init__(self, tokens: Tokens, row: TokenRow, turns: Sequence[Turn], prompt: Sequence[Any]) -> None:
        self.tokens = tokens
        self.sequences: tuple[TranscriptView, ...] = (self,)
        """The views of all sequences of the episode, in order, this one among them."""
        self.turns = tuple(turns)
        self.prompt = [one if isinstance(one, dict) else {"role": "user", "content": one} for one in prompt]
        self.rendered = self.formulas = False
        """Whether texts are drawn as Markdown and code, and formulas as MathML; else turns are coloured tokens."""
        self.label = row_name(row.batch, row.row)
        """The row's number, and for an episode of several rows the number of the sequence."""
        self.ended = str(object_at(row.batch, "finish_reason", row.row) or "")
        """Why the episode ended; "" where that is not known, and while it goes on."""
        self._row = row

    @property
    def frame(self) -> pd.DataFrame:
        """A DataFrame with a line for each turn: role, text, indices of its first and last token, mask, calls, score,
        cut, edited.

        For an episode of several sequences it has the turns of all, with the column `sequence`, from 1.
        """
        import pandas as pd

        if len(self.sequences) > 1:
            each = [one._frame().assign(sequence=number) for number, one in enumerate(self.sequences, 1)]
            return pd.concat(each, ignore_index=True)
        return self._frame()

    def _frame(self) -> pd.DataFrame:
        import pandas as pd

        columns = ["role", "text", "first", "last", "mask", "calls", "score", "cut", "edited"]
        rows = [vars(turn) for turn in self.turns]
        calls = ["; ".join(map(call_text, turn.calls)) for turn in self.turns]
        mask = [int(turn.role == "assistant") for turn in self.turns]
        return pd.DataFrame(rows).assign(mask=mask, calls=calls).reindex(columns=columns)

    def head(self) -> str:
        """Summarise the transcript in one line: how it was judged, how many turns, calls and tokens, and how many tokens are
        the model's own.
        """
        return " · ".join([*judged(self._row), *self._counts()])

    def _counts(self) -> list[str]:
        calls = sum(len(turn.calls) for turn in self.turns)
        parts = [doc.counted(len(self.turns), "turn"), *([doc.counted(calls, "call")] if calls else [])]
        return [*parts, f"{sum(self._row.own)} of {self._row.length} tokens are in the loss"]

    def document(self) -> doc.Part:
        """Build the display: the prompt and the turns of each sequence, in HTML with coloured tokens."""
        scale = legend(*self.tokens.quantity(), self.tokens.rows)
        return [*(one._alone() for one in self.sequences), doc.Either(page=() if self.rendered else scale)]

    def _alone(self) -> doc.Part:
        row, places = self._row, range(len(self.turns))
        lines = [f"  {one['role']:9} (prompt) {doc.one_line(text_of(one['content']), 300)}" for one in self.prompt]
        read = doc.Fold(f"the prompt as the model reads it: {len(row.prompt)} tokens", doc.block("".join(row.prompt)))
        end = [doc.chip(f"over: {self.ended}", -(self.ended != "stop"))] if self.ended else []
        page = headline(self.label, row, *self._counts(), more=end), [self._message(one) for one in self.prompt], read
        text = [f"{self.label}: {self.head()}", lines, *map(self._turn_lines, places)]
        return doc.Either(text, [page, self._pages])

    def _text(self, text: str) -> doc.Part:
        return prose.rendered(text, self.formulas) if self.rendered else doc.block(text)

    def _message(self, message: Mapping[str, Any]) -> doc.Part:
        """Show a message of the prompt; of a system message the beginning until it is unfolded."""
        text, role = text_of(message["content"]), str(message["role"])
        if role == "system":
            title = f"system · {_size(text)}: {doc.one_line(' '.join(text.split()), 60)}"
            return _block(role, "", doc.faint(doc.Fold(title, self._text(text))))
        return _block(role, (_aside("prompt"), doc.bold(role)), self._text(text))

    def _pages(self) -> list[doc.Part]:
        """Show the turns; what a tool answered stands in the turn that called it."""
        joined = list[list[int]]()
        for place, turn in enumerate(self.turns):
            if turn.role == "tool" and joined and self.turns[joined[-1][0]].calls:
                joined[-1].append(place)
            else:
                joined.append([place])
        return [self._turn(*places) for places in joined]

    def _pieces(self, turn: Turn) -> tuple[range, range]:
        """Return the indices of the tokens of a turn's own words: its reasoning, and the rest without calls. All others are
        the chat template's, or calls.
        """
        whole = "".join(self._row.texts[turn.first : turn.last + 1])
        words = turn.text.strip()
        start = max(whole.find(words), 0)
        end = start + len(words) if words in whole else len(whole)
        end = max(start, min(end, _calls_begin(whole, turn.calls))) if turn.calls else end
        thought = whole.rfind(REASONED, start, end) + len(REASONED) if REASONED in whole[start:end] else start
        ends = list(itertools.accumulate(map(len, self._row.texts[turn.first : turn.last + 1])))
        first, middle, last = (
            turn.first + find(ends, at)
            for find, at in ((bisect_right, start), (bisect_right, thought), (bisect_left, end))
        )
        return range(first, middle), range(middle, max(middle, last + (end > start)))

    def _tokens(self, places: Sequence[int]) -> doc.Part:
        shown = coloured(self._row, places[:TURN_CAP], *self.tokens.quantity())
        return doc.line(shown, style=BOX), rest(len(places) - TURN_CAP)

    def _turn(self, place: int, *answers: int) -> doc.Part:
        turn, folds = self.turns[place], list[doc.Part]()
        thought, words = self._pieces(turn)
        inside = self._all(place)
        if not turn.calls and inside.stop - words.stop == 1:  # the token that ends the turn
            words = range(words.start, inside.stop)
        others = [one for one in inside if one not in thought and one not in words]
        title = _aside(_facts(turn, self._row)), f"{place} · ", doc.bold(turn.role)
        score = doc.chip(f"reward {turn.score:g}", turn.score) if turn.score is not None else ()
        for name, places in (
            ("tool calls as sampled, template tokens" if turn.calls else "template tokens", others),
            *((f"{one} · tool · {_facts(self.turns[one], self._row)}", self._all(one)) for one in answers),
        ):
            folds += [doc.Fold(f"{name}: {doc.counted(len(places), 'token')}", self._tokens(places))] if places else []
        thinking = f"reasoning: {doc.counted(len(thought), 'token')}"
        body: list[doc.Part] = [
            doc.Fold(thinking, doc.Span(self._tokens(thought), "font-style:italic")) if thought else (),
            self._words(turn, words),
            [_call(call) for call in turn.calls],
            [doc.line(doc.faint(note)) for one in (place, *answers) for note in self._notes(one)],
            doc.Span([doc.small(one) for one in folds], _FOLDS, "div") if folds else (),
        ]
        return _block(turn.role, (title, " ", score), body)

    def _words(self, turn: Turn, places: range) -> doc.Part:
        """Show a turn's own words: its tokens, or with `rendered` their text; the whole text of a turn that has no tokens."""
        if turn.last < turn.first or (not (turn.calls or REASONED in turn.text) and self.rendered):
            return self._text(turn.text)
        if self.rendered:
            return self._text("".join(self._row.texts[place] for place in places))
        return self._tokens(places) if places else ()

    def _all(self, place: int) -> range:
        return range(self.turns[place].first, min(self.turns[place].last + 1, self._row.length))

    def _notes(self, place: int) -> list[str]:
        turn = self.turns[place]
        return [note for note in (turn.cut, turn.error) if note]

    def _turn_lines(self, place: int) -> list[str]:
        turn = self.turns[place]
        lines = [f"{place:3} {turn.role:9} {_facts(turn, self._row)}  {doc.one_line(turn.text, 300)}"]
        lines += [f"      {call_text(call)}" for call in turn.calls]
        return lines + [f"      {doc.one_line(note, 300)}" for note in self._notes(place)]


def transcript(
    thing: Any,
    row: int = 0,
    colour: str | None = None,
    *,
    tokenizer: Any = None,
    rendered: bool = False,
    formulas: bool = False,
) -> TranscriptView:
    """Show one row's episode turn by turn, with all its sequences, from a batch, trace, stepper, run or stepped
    episode.

    The tokens are coloured by `colour`, and have the same indices, as in `tokens`; a dotted underline means mask 0, not
    sampled by the model. A row without `turns` is one turn of the model. `.frame` has a line per turn. `rendered` draws
    the texts as Markdown and code in place of tokens, and with `formulas` LaTeX as MathML. Raises as `tokens` does.

    Example:
        >>> wb.views.transcript(s, 3, "advantage").frame  # doctest: +SKIP
    """
    first = TokenRow(thing, row, tokenizer)
    _, numbers = sequence_of(first.batch, row) or (row, [row])
    rows = [first if number == row else TokenRow(thing, number, tokenizer) for number in numbers]
    shown = Tokens(rows, [f"row {number}" for number in numbers], colour)
    main = [one for one in rows if "sub_agent" not in (object_at(one.batch, "agent_extra", one.row) or {})]
    # the prompts of later sequences and of sub-agents are not the row's
    views = tuple(_sequence(shown, one, prompted=one in main[:1]) for one in rows)
    for view in views:
        view.sequences, view.rendered, view.formulas = views, rendered, formulas
    return views[numbers.index(row)]


def _sequence(shown: Tokens, row: TokenRow, *, prompted: bool) -> TranscriptView:
    records, text, prompt = (object_at(row.batch, name, row.row) for name in ("turns", "response_text", "raw_prompt"))
    # without turns it is one response, or of a loop that keeps no transcript
    alone = Turn("assistant", str(text or "".join(row.texts)), 0, row.length - 1)
    turns = [Turn.from_dict(turn) for turn in records or ()] or [alone]
    chat = [] if prompt is None or not prompted else [prompt] if isinstance(prompt, str) else list(prompt)
    return TranscriptView(shown, row, turns, chat)


def episode(stepper: EpisodeStepper, rendered: bool = False, formulas: bool = False) -> doc.Part:
    """Build the display of an `EpisodeStepper`: the transcript so far, and whose turn is next."""
    view = transcript(stepper.batch, 0, tokenizer=stepper.tokenizer, rendered=rendered, formulas=formulas)
    for number, one in enumerate(view.sequences, 1):
        several = f"episode {stepper.number}, sequence {number} of {len(view.sequences)}"
        one.label = several if len(view.sequences) > 1 else f"row {stepper.row}"
        one.ended = "" if stepper.next_role else one.ended
    return view.document(), _upcoming(stepper)


def _upcoming(stepper: EpisodeStepper) -> doc.Part:
    if (who := stepper.next_role) is None:
        return doc.Either(f"The episode is over: {stepper.output.finish_reason}")
    if who == "tool":
        calls = (f"{one.name}({doc.one_line(one.arguments, 200)})" for one in stepper.asked)
        return f"next: the tool, {'; '.join(calls)}"
    return "next: the model" if who == "assistant" else "next: the user"


def _facts(turn: Turn, row: TokenRow) -> str:
    count = turn.last + 1 - turn.first
    places = f"tokens {turn.first} to {turn.last}" if count > 0 else "no tokens"
    own = row.own[turn.first : turn.last + 1]
    facts = [places, *([f"mask {int(all(own))}" if len(set(own)) == 1 else "mask mixed"] if own else [])]
    facts += ["written by hand"] if turn.edited else []
    return " · ".join(facts)


REASONED = "</think>"
_LONG, _TALL = 600, 12
"""Characters and lines of a tool's answer beyond which it is folded."""
_CALL = "border:1px solid rgba(128,128,128,.4);border-radius:4px;margin:6px 0;overflow:hidden"
_INSIDE = "padding:4px 10px"
_FOLDS = "display:flex;flex-wrap:wrap;gap:0 16px;opacity:0.85"


def _calls_begin(text: str, calls: Sequence[ToolCall]) -> int:
    """Return where the calls begin in a turn's text, by the first parser that reads these calls of it; its length where
    none does.
    """
    for name in parser_names():
        with contextlib.suppress(Exception):  # a user's parser, on a text of another format
            content, read = tool_parser(name).extract_tool_calls(text, ())
            if [one.name for one in read] == [one.name for one in calls]:
                behind = _common(content[::-1], text[::-1])
                return min(_common(content, text), len(content) - behind)
    return len(text)


def _common(first: str, second: str) -> int:
    """Return the length of the beginning that two texts share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(len(first), len(second)))


def _call(call: ToolCall) -> doc.Part:
    """Show a call and its result in a frame: name, arguments, how it went, and the text that the model read."""
    good = call.status == "ok"
    reward = doc.chip(f"reward {call.reward:g}", call.reward) if call.reward is not None else ()
    end = doc.Span((doc.faint("ok") if good else doc.chip(call.status, -1.0), " ", reward), _ASIDE)
    head = doc.wrapped(end, doc.bold(call.name), "(", _arguments_of(call), ")", style=f"{_INSIDE};{_HEAD}")
    notes = [doc.line(doc.faint(one), style=_INSIDE) for one in (call.why, call.cut) if one]
    result: doc.Part = doc.block(call.result)
    if len(call.result) > _LONG or call.result.count("\n") >= _TALL:
        result = doc.Fold(f"{doc.one_line(' '.join(call.result.split()), 80)} ({_size(call.result)})", result)
    body = doc.line(result, style=_INSIDE) if call.result else ()
    return doc.line(head, body, notes, style=_CALL + _WRONG * (not good))


_HEAD, _WRONG = "background:rgba(128,128,128,.12)", f";border-left:3px solid rgb({doc.DOWN})"


def _arguments_of(call: ToolCall) -> list[doc.Part]:
    """Show a call's arguments by name, long ones on lines of their own; as written where they are no JSON object."""
    try:
        values = json.loads(call.arguments)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return [call.arguments]
    parts = list[doc.Part]()
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        parts += [", "] if parts else []
        parts += [doc.faint(f"{name}: "), f"\n{text}\n" if "\n" in text else text]
    return parts


def _size(text: str) -> str:
    """Say how long a text is: its characters, and its lines if there are several."""
    lines = text.count("\n") + 1
    return f"{len(text):,} characters" + (f", {lines:,} lines" if lines > 1 else "")


def _aside(facts: str) -> doc.Part:
    return doc.Span(doc.faint(doc.small(facts)), _ASIDE)


def _block(role: str, title: doc.Part, body: doc.Part) -> doc.Part:
    """Show a message in a column as wide as is read with ease; the model's own have a blue edge, the prompt's a grey ground."""
    head = doc.line(title) if title else ()
    look = _OWN if role == "assistant" else f"{_OTHER};background:rgba(128,128,128,.08)"
    return doc.line(head, body, style=f"{_TURN} {look}")


def agent_loop(loop: AgentLoopBase) -> doc.Part:
    """Build the display of an agent loop: its tools with their arguments, simulated users, parser and limits."""
    settings = dict(loop.describe())
    tools = [one.get("function", {}) for one in settings.pop("tools", [])]
    rows = [[one.get("name", ""), _arguments(one), doc.block(one.get("description", ""))] for one in tools]
    users = settings.pop("interactions", [])
    return (
        doc.line(doc.bold(type(loop).__name__), " ", str(settings.pop("name", ""))),
        doc.Table(["tool", "arguments", "description"], rows),
        doc.line(f"users: {', '.join(users)}") if users else (),
        doc.Fold("settings", doc.pairs([(name, str(value)) for name, value in settings.items()])),
    )


def _arguments(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    needed = set(parameters.get("required") or ())
    kinds = {name: str(one.get("type", "any")) for name, one in (parameters.get("properties") or {}).items()}
    return ", ".join(f"{name}: {kind}" + ("" if name in needed else " (optional)") for name, kind in kinds.items())


# --- a tree of continuations ------------------------------------------------------------------------

_TURN_TEXT = 90
"""Most characters of a turn that are shown."""


def tree(tree: EpisodeTree) -> doc.Part:
    """Build the display of an `EpisodeTree`: what each stretch of the recorded episode was worth, then all nodes."""
    nodes = tree.nodes
    stretches = [
        [node.places, _turns_text(node), _number(before), _number(node.value), _signed(gained)]
        for node, before, gained in _gains(tree)
    ]
    rewards = [float(one) for one, scored in zip(tree.batch["reward"], tree.batch["scored"], strict=True) if scored]
    low, high = min((*rewards, 0.0)), max((*rewards, 1.0))
    left = len(tree.leaves) - len(rewards)
    points = ", ".join(map(str, tree.points))
    facts = [
        f"row {tree.leaves[0].row}: {doc.counted(len(tree.leaves) - 1, 'continuation')}",
        f"from turn{'s' * (len(tree.points) > 1)} {points}",
        *([f"{left} of {len(tree.leaves)} leaves have no score and are left out of the means"] if left else []),
    ]
    return (
        doc.line(doc.bold(" · ".join(facts))),
        doc.Table(["turns", "recorded", "value before", "value after", "advantage"], stretches),
        doc.Fold(
            f"the tree: {doc.counted(len(nodes), 'node')}, equal nodes joined",
            lambda: doc.Table(["turns", "leaves", "value", "credit", ""], _lines(nodes, low, high)),
            opened=True,
        ),
        doc.line(
            doc.faint("value: mean reward ± standard error · credit: value − mean of the turn's other continuations")
        ),
    )


def credit(tree: EpisodeTree) -> pd.DataFrame:
    """Make the DataFrame that `Tree.credit` returns: what each stretch of the recorded episode gained."""
    import pandas as pd

    lines = []
    for node, before, gained in _gains(tree):
        words = {"turns": node.places, "role": node.turns[0].role, "text": node.turns[0].text}
        values = {"before": before.mean, "before_error": before.error}
        values |= {"after": node.value.mean, "after_error": node.value.error}
        lines.append(words | values | {"advantage": gained.mean, "error": gained.error, "n": before.count})
    return pd.DataFrame(lines)


def frame(tree: EpisodeTree) -> pd.DataFrame:
    """Make the DataFrame that `Tree.to_pandas` returns: one line for each node."""
    import pandas as pd

    rows = [
        {
            "node": node.number,
            "parent": node.parent,
            "turns": node.places,
            "recorded": node.recorded,
            "text": " ⏎ ".join(turn.text for turn in node.turns),
            "leaves": len(node.leaves),
            "value": node.value.mean,
            "error": node.value.error,
            "credit": node.credit.mean,
            "credit_error": node.credit.error,
        }
        for node in tree.nodes
    ]
    return pd.DataFrame(rows).astype({"parent": "Int64"})


def _gains(tree: EpisodeTree) -> Iterator[tuple[TreeNode, TurnValue, TurnValue]]:
    """Yield (a stretch of the recorded episode, the value before it, what the stretch gained)."""
    for node in tree.nodes:
        if node.recorded and node.parent is not None:
            before = tree.value(node.first)
            yield node, before, node.value.minus(before)


def _lines(nodes: Sequence[TreeNode], low: float, high: float) -> list[list[doc.Part]]:
    depth: dict[int | None, int] = {None: -1}
    rows: list[list[doc.Part]] = []
    for node, count in _alike(nodes):
        level = depth[node.number] = depth[node.parent] + 1
        places = f"turn{'s' * (len(node.turns) != 1)} {node.places}" if node.places else "the prompt"
        name = doc.bold(places) if node.recorded else places
        shown = doc.Either(["  " * level, name], doc.Span(name, f"padding-left:{1.4 * level:g}em;white-space:nowrap"))
        share = (node.value.mean - low) / ((high - low) or 1.0)
        value = doc.bar(0.0 if math.isnan(share) else share, _number(node.value), node.value.mean >= 0)
        rows.append([shown, f"{count}", value, _signed(node.credit), _turns_text(node)])
    return rows


def _alike(nodes: Sequence[TreeNode]) -> list[tuple[TreeNode, int]]:
    """Return the nodes with their numbers of leaves; continuations with equal texts and equal rewards are joined into
    one.
    """
    groups: dict[object, tuple[TreeNode, int]] = {}
    for node in nodes:
        texts = tuple(turn.text for turn in node.turns)
        alike = node.number if node.recorded else (node.parent, texts, str(node.value.mean))
        first, count = groups.get(alike, (node, 0))
        groups[alike] = first, count + len(node.leaves)
    return list(groups.values())


def _turns_text(node: TreeNode) -> doc.Part:
    """Show the text of a node's turns, those of tools paler."""
    parts: list[doc.Part] = []
    for turn in node.turns:
        text = doc.one_line(" ".join(turn.text.split()), _TURN_TEXT)
        parts += [*([" ⏎ "] if parts else []), text if turn.role == "assistant" else doc.faint(text)]
    return doc.Either(parts, doc.wrapped(parts))


def _number(estimate: TurnValue, form: str = "") -> str:
    return doc.number(estimate.mean, form) + (f" ± {doc.number(estimate.error)}" if estimate.error > 0 else "")


def _signed(estimate: TurnValue) -> doc.Part:
    """Format a difference with its sign, coloured where it is beyond two standard errors."""
    shown, clear = _number(estimate, "+"), abs(estimate.mean) > 2 * estimate.error
    return doc.chip(shown, estimate.mean) if clear else doc.Span(shown, "white-space:nowrap")
