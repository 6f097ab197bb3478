"""Records of any kind as rows in verl's schema: every prompt a chat, JSON text read, missing cells None.

The columns of verl, TRL, OpenAI's messages, GSM8K and plain tables are recognised by their names (`PROMPTS`, `ANSWERS`);
`Reading` names others. What cannot be read is refused with its row and column; nothing but text and pictures ever becomes a
prompt.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.base.config import check_nesting
from workbench.base.errors import DataError, describe, unknown
from workbench.dataproto.columns import COLUMNS
from workbench.datasets import pictures

CHAT = "prompt"
PROMPTS = (CHAT, "messages", "prompts", "question", "problem", "query", "instruction", "input")
"""Columns that are read as the prompt, the likeliest first."""
ANSWERS = (
    *("ground_truth", "answer", "final_answer", "expected_answer", "reference_answer", "completion", "solution"),
    *("target", "label"),
)
"""Columns that are read as the ground truth where there is no `reward_model`, the likeliest first."""
_STRUCTURED = ("reward_model", "extra_info", "data_source", "ability")
"""Columns of verl's schema that are never proposed as prompt or truth."""
_RESERVED = frozenset({"raw_prompt", "uid"} | {name for name, one in COLUMNS.items() if one.writer != "dataset"})
"""Names that a data set's columns may not have: stages or the batch write them (`prompt` becomes `raw_prompt`). A column that is
named as prompt or answer may: its cells go elsewhere."""
GSM8K = "openai/gsm8k"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that messages of a chat may have: chat templates leave out messages of other roles without an error."""
MEDIA = frozenset(
    kind + end for kind in ("image", "video", "audio") for end in ("s", "", "_path", "_paths", "_url", "_urls")
) | {"decoded_image", "pixel_values", "multi_modal_data", "multi_modal_inputs"}
"""Columns of pictures, films and sounds, by the names that verl, TRL and data sets of Hugging Face give them."""
_PLACEHOLDER = re.compile(r"<(image|video|audio)>")
_CHAT = re.compile(
    r"\s*(?:array\()?(?:\[\s*)?\{[^{}]{0,99}?['\"](?:role|content|messages|conversations|from['\"]:[^{}]*?['\"]value)['\"]\s*:"
)
"""Text that was meant as a chat: the keys of a first message, or of a chat inside a dict."""
_PARTS = ("text", "image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
_EXPECTED = "a chat (a list of {role, content}) or a text"
_TEXT_ONLY = "text: engines read text only"


# --- columns --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How records are read as rows: which columns are prompt and answer (None: found by their names), and what is
    added."""

    prompt: str | None = None
    answer: str | None = None
    system: str | None = None
    """A system message to put before every prompt."""
    raw: bool = False
    """Whether prompts are bare texts that the model reads without a chat template, as for base models."""
    data_source: str = "rows"
    """The `data_source` of rows that have none."""
    without: frozenset[str] = frozenset()
    """Columns to leave out."""
    code: str = "x"
    """The first argument of `wb.rows` as code, for the call that an error message proposes."""

    def read(self, records: Any, source: str = "") -> tuple[list[dict[str, Any]], str]:
        """Read each record as a row; returns (the rows, a description of which columns became what). `records` is an
        iterable of dicts, or a table.

        Raises `DataError`, naming `source` and the row, where a record is not a row; and where no column is known as a
        prompt, with the columns that there are and the line that names them.
        """
        if isinstance(records, str | bytes | Mapping) or not isinstance(records := table_records(records), Iterable):
            expected = "a list of dicts, a DataFrame, or another table"
            raise DataError(source or "rows", expected=expected, found=describe(records))
        where = f" of {source}" if source else ""
        cells = [cells_of(record, f"row {index}{where}") for index, record in enumerate(records)]
        if not cells:
            return [], ""
        columns = dict.fromkeys(name for row in cells for name in row if name not in self.without)
        roles = self._roles(list(columns), cells, where)
        rows = [roles.row(row, index, f"row {index}{where}") for index, row in enumerate(cells)]
        self._refuse_reserved(rows, where)
        return rows, roles.summary(rows)

    def _refuse_reserved(self, rows: Sequence[Mapping[str, Any]], where: str) -> None:
        if taken := [name for name in dict.fromkeys(name for row in rows for name in row) if name in _RESERVED]:
            what = f"columns{where or ' of the rows'} have names that are reserved for columns of stages and batches"
            do = f"rename them, or leave them out: {self.line(without=self.without.union(taken))}"
            raise DataError(what, found=", ".join(taken), do=do)

    def line(self, **changes: Any) -> str:
        """Write the call of `wb.rows` that reads in this way, with some settings changed, as code."""
        how = replace(self, **changes)
        settings: dict[str, Any] = {name: getattr(how, name) for name in ("prompt", "answer", "system", "raw")}
        settings["without"] = sorted(how.without)
        arguments = [f"{name}={value!r}" for name, value in settings.items() if value not in (None, False, [])]
        return f"wb.rows({', '.join([self.code, *arguments])})"

    def _roles(self, columns: list[str], cells: Sequence[Mapping[str, Any]], where: str) -> _Roles:
        prompt = self.prompt or _first_column(PROMPTS, columns)
        answer = self.answer
        if answer is None and "reward_model" not in columns:
            answer = _first_column(ANSWERS, [name for name in columns if name != prompt])
        missing = next((name for name in (prompt, answer) if name is not None and name not in columns), None)
        if prompt is None or missing:
            raise self._unknown(missing, columns, cells, where)
        if CHAT in columns and CHAT not in (prompt, answer):
            do = f"leave one out: {self.line(without=self.without | {CHAT})}"
            raise DataError(f"row 0{where} has two prompts", found=f"columns {CHAT!r} and {prompt!r}", do=do)
        answer = None if answer == "reward_model" else answer  # the truth is inside
        return _Roles(self, prompt, answer, (prompt, answer) == ("question", "answer") and _gsm8ks(cells, where))

    def _unknown(
        self, missing: str | None, columns: list[str], cells: Sequence[Mapping[str, Any]], where: str
    ) -> DataError:
        """Make the error for a column named `missing` that the records lack, or (None) for records of which no column
        is known as a prompt."""
        what, expected = f"{missing!r} is not a column{where}", None
        if not missing:
            what, expected = f"no column{where or ' of the rows'} is known as a prompt", f"one of {', '.join(PROMPTS)}"
        found = f"columns {', '.join(columns) or '(none)'}"
        return DataError(what, expected=expected, found=found, do=self._proposal(columns, cells))

    def _proposal(self, columns: list[str], cells: Sequence[Mapping[str, Any]]) -> str:
        """Write a call of `wb.rows` that would read these cells, with guessed columns.

        The column with the longest texts is taken for the prompt, and the last other column for the truth.
        """
        texts = {name: sum(len(row[name]) for row in cells if isinstance(row.get(name), str)) for name in columns}
        likely = _first_column((self.answer, *ANSWERS), columns)
        left = [name for name in columns if name != likely and name not in _STRUCTURED]
        for prompt in sorted(left, key=lambda name: (name != self.prompt, -texts[name])):
            others = [name for name in left if name != prompt and name not in _RESERVED]
            answer = likely or (None if "reward_model" in columns else next(reversed(others), None))
            taken = _RESERVED.intersection(columns).difference({prompt, answer})
            how = replace(self, prompt=prompt, answer=answer, without=self.without | taken)
            with contextlib.suppress(DataError):
                how.read(cells)
                return f"name them: {how.line()}"
        return f"write each row's prompt into a column {CHAT!r}: a text, or a list of {{role, content}}"


def _first_column(names: Iterable[str | None], columns: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _gsm8ks(cells: Sequence[Mapping[str, Any]], where: str) -> bool:
    """Return whether all answers have `####`. Raises `DataError` where some have it and others do not."""
    marked = ["####" in str(row.get("answer")) for row in cells]
    if any(marked) and not all(marked):
        what, found = f"row {marked.index(False)}{where}", f"none; row {marked.index(True)} has one"
        do = "leave such rows out, or write all truths without '####'"
        raise DataError(what, expected="an answer with '#### <number>', as in GSM8K", found=found, do=do)
    return all(marked)


@dataclass(frozen=True)
class _Roles:
    """Which columns of records are prompt and answer; with `gsm8k` the truth is the part of an answer after `####`."""

    how: Reading
    prompt: str
    answer: str | None
    gsm8k: bool

    def row(self, row: Mapping[str, Any], index: int, place: str) -> dict[str, Any]:
        """Convert a record to a row in verl's schema."""
        kept = {name: cell for name, cell in row.items() if name not in self.how.without}
        if self.prompt not in kept:
            raise DataError(f"{place}: " + unknown("column of this row", self.prompt, sorted(row)))
        extra = object_of(kept.pop("extra_info", None), f"extra_info of {place}") or {}
        gone = {CHAT, "completion"} if self.answer == "completion" else {CHAT}
        if self.gsm8k:
            built, gone = to_row(kept, index=index, split="", place=place), {"question", "answer"}
            kept = {"ability": built["ability"], "reward_model": built["reward_model"], **kept}
            extra = {**built["extra_info"], **extra}
        text = isinstance(row[self.prompt], str)
        prompt, kept = _with_pictures(row[self.prompt], kept, place)
        refuse_media(kept, place, self.how)
        turns, answer = self._chat_and_answer(prompt, "reward_model" in kept, f"{self.prompt} of {place}")
        _refuse_placeholders(turns, {**row, **extra}, place)
        judged = self._reward_model(kept, row, answer, place)
        if not text:
            gone.add(self.prompt)
        gone |= _RESERVED.intersection({self.prompt, self.answer or CHAT})
        built = {CHAT: prompt if self.how.raw else turns}
        built["data_source"] = self._source(kept.pop("data_source", None), place)
        built |= {} if judged is None else {"reward_model": judged}
        built |= {"extra_info": extra, **{name: cell for name, cell in kept.items() if name not in gone}}
        return built | ({"prompt_is_text": True} if not self.how.raw and is_text(prompt, turns[-1:]) else {})

    def _source(self, name: Any, place: str) -> str:
        if not isinstance(name, str | None):
            raise DataError(f"data_source of {place}", expected="a name (text)", found=describe(name))
        return name or (GSM8K if self.gsm8k else self.how.data_source)

    def _chat_and_answer(self, prompt: Any, judged: bool, place: str) -> tuple[list[dict[str, Any]], str | None]:
        """Return (the prompt as a chat, the assistant's answer that ends it, or None); `judged` rows keep that answer
        in the chat."""
        system, raw = self.how.system, self.how.raw
        if raw and (system is not None or not isinstance(prompt, str)):
            expected = "a text, and no system=: with raw=True there is no chat"
            raise DataError(place, expected=expected, found=describe(prompt))
        turns, answer = _turns(_message(prompt), place) if raw else chat(prompt, place), None
        if self.prompt != CHAT and self.answer is None and not judged and turns[-1]["role"] == "assistant":
            answer = turns.pop()["content"]
        if not any(
            turn.get("tool_calls") or isinstance(turn["content"], list) or turn["content"].strip() for turn in turns
        ):
            raise DataError(f"{place} is empty", expected=_EXPECTED, found=describe(prompt))
        return _after_system(system, turns, place), answer

    def _reward_model(
        self, kept: dict[str, Any], row: Mapping[str, Any], answer: str | None, place: str
    ) -> dict[str, Any] | None:
        """Return the row's `reward_model`, with the ground truth; None where the record has neither."""
        judged = object_of(kept.pop("reward_model", None), f"reward_model of {place}")
        truth = answer if self.answer is None else row.get(self.answer)
        if self.gsm8k or (self.answer is None and answer is None):
            return judged
        truth = spoken(truth, f"completion of {place}") if self.answer == "completion" and truth is not None else truth
        return {"style": "rule", **(judged or {}), "ground_truth": truth}

    def summary(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Describe which column became what: `question → prompt, answer → truth (plain columns)`."""
        judged = any("reward_model" in row for row in rows)
        truth = f"{self.answer} → truth" if self.answer else "reward_model → truth" if judged else "no truths"
        form = "plain columns"
        if self.gsm8k:
            form, truth = "GSM8K", "answer → truth, what follows ####"
        elif self.prompt == "messages":
            form, truth = "OpenAI's messages", "the last answer → truth" if judged and not self.answer else truth
        elif self.answer == "completion":
            form = "TRL's prompt and completion"
        elif self.prompt == CHAT and not self.answer:
            form = "verl's schema" if judged else "TRL's prompts"
        text = ", as bare text" if self.how.raw else ", after system=" if self.how.system is not None else ""
        return f"{self.prompt} → prompt{text}; {truth} ({form})"


def _after_system(system: str | None, turns: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Return a chat with the system message before it. Raises `DataError` where the chat has one already."""
    if system is None:
        return turns
    if turns[0]["role"] in ("system", "developer"):
        raise DataError(f"{place} has a system message", found=describe(turns[0]["content"]), do="leave system= out")
    return [{"role": "system", "content": system}, *turns]


def table_records(source: Any) -> Any:
    """Return a DataFrame (pandas, polars) or an Arrow table as a list of its rows; anything else unchanged."""
    for method in ("to_dicts", "to_pylist"):
        if hasattr(source, method):
            return getattr(source, method)()
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return source.to_dict("records")
    return source


def _with_pictures(prompt: Any, kept: dict[str, Any], place: str) -> tuple[Any, dict[str, Any]]:
    """Move a row's pictures into the column `images`, and mark their places in the prompt by parts: (prompt, the row's
    columns)."""
    cells = {name: kept[name] for name in pictures.COLUMNS if not _empty(kept.get(name))}
    if not cells and not pictures.mentioned(prompt):
        return prompt, kept
    beside = {
        name: [one for one in (cell if isinstance(cell, list) else [cell]) if not _empty(one)]
        for name, cell in cells.items()
    }
    turns, seen = pictures.placed(_read(prompt, place) if isinstance(prompt, str) else prompt, beside, place)
    others = {name: cell for name, cell in kept.items() if name not in pictures.COLUMNS}
    return (turns, {**others, pictures.IMAGES: seen}) if seen else (prompt, kept)


def refuse_media(columns: Mapping[str, Any], place: str, how: Reading | None = None) -> None:
    """Raise `DataError` where a row has films, sounds or pictures that were not read: a column in `MEDIA` that is not
    empty.

    `how` is the `Reading` that the error's remedy proposes to change.
    """
    for name in filter(MEDIA.__contains__, columns):
        if not pictures.are_pictures(cell := columns[name]) and not _empty(plain(cell)):
            how = how or Reading(code="…")
            line = how.line(without=how.without | {name})
            do = f"leave these rows out; or the column, where the text stands alone: {line}"
            raise DataError(f"column {name!r} of {place}", expected=_TEXT_ONLY, found=describe(columns[name]), do=do)


def text_fields(record: Mapping[str, Any], place: str, *names: str) -> list[str]:
    """Return these fields of a record. Raises `DataError`, naming the first field that is not a text, or is blank."""
    for name in names:
        if not isinstance(record.get(name), str) or not record[name].strip():
            found = describe(record[name]) if name in record else f"columns {', '.join(record)}"
            raise DataError(f"{name} of {place}", expected="a text", found=found)
    return [record[name] for name in names]


def to_row(
    record: Mapping[str, Any],
    *,
    index: int = 0,
    split: str,
    data_source: str = GSM8K,
    instruction: str = "",
    place: str | None = None,
) -> dict[str, Any]:
    """Convert a record of GSM8K (`question`, `answer`) to a row in verl's schema; the ground truth is the text after
    `####`, without commas.

    Raises `DataError`, at `place` (by default the row's index), where question, answer or `####` is missing or not
    text.
    """
    where = place or f"row {index}"
    if not isinstance(record, Mapping) or not {"question", "answer"} <= record.keys():
        found = ", ".join(sorted(record)) if isinstance(record, Mapping) else type(record).__name__
        raise DataError(f"GSM8K record at {where}", expected="question and answer", found=found)
    question, answer = text_fields(record, where, "question", "answer")
    if "####" not in answer:
        do = "for other answers, write rows with prompt and reward_model.ground_truth"
        raise DataError(where, expected="an answer with '#### <number>'", found=repr(answer[-60:]), do=do)
    truth = answer.split("####", 1)[1].strip().split("\n")[0].replace(",", "")
    content = f"{question} {instruction}" if instruction else question
    return {
        "data_source": data_source,
        "prompt": _turns(_message(content), f"question of {where}"),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


# --- cells ----------------------------------------------------------------------------------------


def plain(value: Any, what: str = "a cell") -> Any:
    """Convert a cell to plain Python values: arrays and NumPy scalars, also inside dicts and lists; pandas' NA becomes
    None.

    Raises `DataError`, naming `what`, for a cell that contains itself or is nested too deeply (`check_nesting`).
    """
    check_nesting(value, what, DataError)
    return _plain_value(value)


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, str | float | int):
        return value
    if isinstance(value, Mapping):
        return {name: _plain_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(one) for one in value]
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return _plain_value(value.tolist()) if hasattr(value, "tolist") else value


def cells_of(record: Any, place: str) -> dict[str, Any]:
    """Return the cells of a record by their columns, as plain values; missing ones are None. Raises `DataError` for
    what is not a record."""
    if not isinstance(record, Mapping):
        raise DataError(place, expected="an object (a dict)", found=type(record).__name__)
    cells = {str(name): plain(value, f"column {str(name)!r} of {place}") for name, value in record.items()}
    return {name: None if absent(cell) else cell for name, cell in cells.items()}


def absent(value: Any) -> bool:
    """Return whether a plain value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _empty(value: Any) -> bool:
    """Return whether a cell holds nothing: None, NaN, "", [], {}, or a list or dict of such values."""
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(inside, str | bytes) or not isinstance(inside, Iterable):
        return absent(value) or value in ("", b"")
    return all(map(_empty, inside))


def object_of(value: Any, place: str) -> dict[str, Any] | None:
    """Return a dict or None; JSON text of a dict, which some files have, is parsed. Raises `DataError` for anything
    else."""
    parsed = _parsed(value) if isinstance(value, str) else value
    if not isinstance(parsed, dict | None):
        raise DataError(place, expected="an object (a dict, or JSON text of one), or nothing", found=describe(value))
    return parsed


def _parsed(text: str) -> Any:
    """Parse a JSON text; return the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# --- chats ----------------------------------------------------------------------------------------


def chat(prompt: Any, place: str) -> list[dict[str, Any]]:
    """Convert a prompt to a chat of texts: a plain text becomes a user message, and JSON text of a chat becomes that
    chat.

    Parts of text (`{"type": "text", "text": …}`) become one text, with a part per line. Raises `DataError`, naming
    `place`, for anything else: parts that are not text, unknown roles, no content, text that looks like a chat and
    cannot be read as one.
    """
    prompt = _read(prompt, place) if isinstance(prompt, str) else plain(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(place, expected=_EXPECTED, found=describe(prompt))
    return _turns(prompt, place)


def _read(text: str, place: str) -> list[Any]:
    """Convert a text to a chat: the chat whose JSON it is, else a user's message."""
    parsed = _parsed(text) if text.lstrip()[:1] in ("[", "{") else text
    if text.lstrip()[:2] in ('"[', '"{') and text != (inner := _parsed(text)):
        return _read(inner, place)  # some data sets encode twice
    inside = [parsed] if isinstance(parsed, Mapping) else parsed
    if isinstance(inside, list) and inside and all(isinstance(part, Mapping) for part in inside):
        if all("role" in part for part in inside):
            return inside
        if all(part.get("type") in _PARTS for part in inside):
            return _message(inside)
    if _CHAT.match(text):
        do = "write it as JSON; to send this text as it is, write [{'role': 'user', 'content': …}]"
        expected = "JSON of a list of {role, content}"
        raise DataError(f"{place} looks like a chat", expected=expected, found=describe(text), do=do)
    return _message(text)


def is_text(prompt: Any, turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a prompt was a plain text that became this chat."""
    return isinstance(prompt, str) and turns == _message(prompt)


def spoken(response: Any, place: str) -> str:
    """Return a response as text; of a list of messages (TRL's conversational form) the contents, one per line."""
    if isinstance(response, str):
        return response
    return "\n".join(turn["content"] for turn in messages(response, place))


def messages(turns: Iterable[Any], place: str) -> list[dict[str, Any]]:
    """Return the messages of a chat, which may have none, each with its content as text. Raises `DataError`, as `chat`
    does."""
    if isinstance(turns := plain(turns), list):
        return _turns(turns, place)
    raise DataError(place, expected=_EXPECTED, found=describe(turns))


def _message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _turns(turns: Sequence[Any], place: str) -> list[dict[str, Any]]:
    return [_turn(turn, f"message {number} of {place}") for number, turn in enumerate(turns)]


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """Check one message of a chat and drop its empty fields, which parquet writes where another row's message has them."""
    if not isinstance(turn, Mapping) or "role" not in turn:
        raise DataError(place, expected=f"{_EXPECTED}; a message has a role", found=describe(turn))
    kept = {str(name): value for name, value in turn.items() if not absent(value)}
    if kept.get("role") not in ROLES:
        raise DataError(f"{place}: " + unknown("role", str(kept.get("role")), ROLES))
    if media := next((name for name in kept if name in MEDIA and not _empty(kept[name])), None):
        raise DataError(f"{media} in {place}", expected=_TEXT_ONLY, found=describe(kept[media]))
    calls = _check_calls(kept.pop("tool_calls", []), kept["role"], place)
    if calls and "content" not in kept:
        return {**kept, **calls, "content": None}
    return {**kept, **calls, "content": _content_text(kept.get("content"), f"content of {place}")}


def _check_calls(calls: Any, role: str, place: str) -> dict[str, Any]:
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        raise DataError(f"tool_calls of {place}", expected="a list of calls (dicts)", found=describe(calls))
    if calls and role != "assistant":
        raise DataError(f"tool_calls of {place}", expected="an assistant's message", found=f"role {role!r}")
    return {"tool_calls": calls} if calls else {}


def _content_text(content: Any, place: str) -> Any:
    """Return a message's content as one text; its parts are joined by newlines, as vLLM joins them for models that read
    text alone.

    Content with pictures (`pictures.is_parts`) stays a list of parts.
    """
    if pictures.is_parts(content):
        return [{**part, "text": _content_text(part["text"], place)} if "text" in part else part for part in content]
    if isinstance(content, list) and content:
        content = "\n".join(_part(part, f"part {number} of {place}") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise DataError(place, expected=f"{_EXPECTED}; content is text, or parts of text", found=describe(content))
    try:
        content.encode()
    except UnicodeEncodeError as cause:
        found = describe(content[cause.start : cause.end])
        raise DataError(place, expected="text that UTF-8 can hold", found=f"an unpaired surrogate, {found}") from cause
    return content


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    there = {name: value for name, value in part.items() if not absent(value)} if isinstance(part, Mapping) else {}
    text = there.pop("text", None)
    if isinstance(text, str) and there.pop("type", "text") == "text" and all(map(_empty, there.values())):
        return text
    raise DataError(place, expected=_TEXT_ONLY, found=describe(part), do="leave such rows out, or their parts")


def _refuse_placeholders(turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any], place: str) -> None:
    """Raise `DataError` for a prompt with `<image>`, `<video>` or `<audio>` whose row has a column of that kind without
    usable content."""
    named = {kind for turn in turns for kind in _PLACEHOLDER.findall(str(turn.get("content")))}
    missing = next(((kind, name) for kind in named for name in row if name in MEDIA and kind in name), None)
    if missing:
        what = f"the prompt of {place} has <{missing[0]}>, and its column {missing[1]!r} has nothing to show there"
        raise DataError(what, expected=_TEXT_ONLY, do="leave such rows out")


# --- truths ---------------------------------------------------------------------------------------


def truth_of(row: Mapping[str, Any]) -> Any:
    """Return the ground truth of a row: `reward_model.ground_truth`, else the `test_cases` beside it or in its
    `extra_info`."""
    judged, extra = row.get("reward_model") or {}, row.get("extra_info") or {}
    places = (judged.get("ground_truth"), judged.get("test_cases"), extra.get("test_cases"))
    return next((truth for truth in places if not absent(truth)), None)


def has_answer(row: Mapping[str, Any]) -> bool:
    """Return whether the row can be scored: it has a ground truth, or a model or a simulated user scores it.

    A model does where `reward_model.style` is "model", a simulated user where there are `interaction_kwargs`.
    """
    by_model = (row.get("reward_model") or {}).get("style") == "model"
    return _truth_kind(truth_of(row)) not in _NOTHING or by_model or has_user(row)


def has_user(row: Mapping[str, Any]) -> bool:
    """Return whether the row names a simulated user, by `interaction_kwargs` in the row or in its `extra_info`."""
    return not _empty([row.get("interaction_kwargs"), (row.get("extra_info") or {}).get("interaction_kwargs")])


def truth_kinds(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count the ground truths of each kind: `text`, `whole number`, …, `none`, `empty`; most frequent first."""
    return dict(Counter(_truth_kind(truth_of(row)) for row in rows).most_common())


_NOTHING = ("none", "empty")
_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", list: "list", dict: "object"}


def _truth_kind(truth: Any) -> str:
    if absent(truth):
        return "none"
    blank = isinstance(truth, str) and not truth.strip()
    return "empty" if blank or truth in ([], {}) else _KINDS.get(type(truth), type(truth).__name__)


def last_box(text: str) -> str | None:
    r"""Return the text in the last `\boxed{…}`, up to its matching brace; None without one, or where it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = start + len("\\boxed{")
    depth = 1
    for place in range(inside, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[inside:place]
    return None
