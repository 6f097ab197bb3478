"""Records of any kind as rows in verl's schema: every prompt a chat, JSON text read, missing cells None.

What cannot be read as that is refused with its row and column; nothing but text and pictures ever becomes a prompt.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from workbench.base.errors import DataError, describe, unknown
from workbench.datasets import pictures

CHAT = "prompt"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Who may speak in a chat. Templates pass over other roles without a word."""
MEDIA = (
    *(kind + end for kind in ("image", "video", "audio") for end in ("s", "", "_path", "_paths", "_url", "_urls")),
    *("decoded_image", "pixel_values", "multi_modal_data", "multi_modal_inputs"),
)
"""Columns of pictures, films and sounds, by the names that verl, TRL and data sets of Hugging Face give them."""
_PLACEHOLDER = re.compile(r"<(image|video|audio)>")
_CHAT = re.compile(
    r"\s*(?:array\()?(?:\[\s*)?\{[^{}]{0,99}?['\"](?:role|content|messages|conversations|from['\"]:[^{}]*?['\"]value)['\"]\s*:"
)
"""Text that was meant as a chat: the keys of a first message, or of a chat inside a dict."""
_PARTS = ("text", "image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
_EXPECTED = "a chat (a list of {role, content}) or a text"
_TEXT_ONLY = "text: the engines here read no other"


def rows_of(
    records: Any, *, source: str = "", prompt_key: str = CHAT, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Each record as a row. `records` is an iterable of dicts, or a DataFrame; errors name `source` and the row."""
    if not isinstance(records := table_records(records), Iterable):
        raise DataError(source or "rows", expected="a list of dicts, or a DataFrame", found=describe(records))
    where = f" of {source}" if source else ""
    return [_row(record, f"row {index}{where}", index, prompt_key, without) for index, record in enumerate(records)]


def table_records(source: Any) -> Any:
    """A DataFrame as a list of its rows; anything else as it is."""
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return source.to_dict("records")
    return source


def _row(record: Any, place: str, index: int, prompt_key: str, without: Collection[str]) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise DataError(place, expected="an object (a dict)", found=type(record).__name__)
    row = {str(name): None if absent(cell := plain(value)) else cell for name, value in record.items()}
    kept = {name: cell for name, cell in row.items() if name not in without and name != prompt_key}
    if prompt_key in row:
        row[prompt_key], kept = _with_pictures(row[prompt_key], kept, place)
    refuse_media(kept, place)
    if not isinstance(kept.get("data_source"), str | None):
        raise DataError(f"data_source of {place}", expected="a name (text)", found=describe(kept["data_source"]))
    if prompt_key in row:
        made = _as_verls(row[prompt_key], kept, prompt_key, place)
    elif "question" in row and "answer" in row:
        made = to_row(row, index=index, split="", data_source=kept.get("data_source") or "openai/gsm8k", place=place)
    else:
        raise DataError(f"{place}: " + unknown("column of this row", prompt_key, sorted(row)))
    _refuse_placeholders(made[CHAT], {**row, **made["extra_info"]}, place)
    return made


def _with_pictures(prompt: Any, kept: dict[str, Any], place: str) -> tuple[Any, dict[str, Any]]:
    """A prompt and its row's other columns; where there are pictures their places are parts, and they are in `images`."""
    cells = {name: kept[name] for name in pictures.COLUMNS if not _empty(kept.get(name))}
    if not cells and not pictures.mentioned(prompt):
        return prompt, kept
    beside = {
        name: [one for one in (cell if isinstance(cell, list) else [cell]) if not _empty(one)]
        for name, cell in cells.items()
    }
    said, found = pictures.placed(_read(prompt, place) if isinstance(prompt, str) else prompt, beside, place)
    others = {name: cell for name, cell in kept.items() if name not in pictures.COLUMNS}
    return (said, {**others, pictures.IMAGES: found}) if found else (prompt, kept)


def refuse_media(columns: Mapping[str, Any], place: str) -> None:
    """Raise `DataError` where a row has films, sounds or unread pictures: a column of `MEDIA` that is not empty, nor holds
    `Picture`s."""
    for name in MEDIA:
        if not pictures.are(cell := columns.get(name)) and not _empty(plain(cell)):
            do = f"leave these rows out; or the column, where the text stands alone: wb.rows(…, without=[{name!r}])"
            raise DataError(f"column {name!r} of {place}", expected=_TEXT_ONLY, found=describe(columns[name]), do=do)


def _as_verls(prompt: Any, kept: dict[str, Any], prompt_key: str, place: str) -> dict[str, Any]:
    if CHAT in kept:
        do = f"leave one out: wb.rows(…, without=[{CHAT!r}])"
        raise DataError(f"{place} has two prompts", found=f"columns {CHAT!r} and {prompt_key!r}", do=do)
    said = chat(prompt, f"{prompt_key} of {place}")
    if not any(turn.get("tool_calls") or isinstance(turn["content"], list) or turn["content"].strip() for turn in said):
        raise DataError(f"{prompt_key} of {place} is empty", expected=_EXPECTED, found=describe(prompt))
    judged = object_of(kept.pop("reward_model", None), f"reward_model of {place}")
    extra = object_of(kept.pop("extra_info", None), f"extra_info of {place}") or {}
    if is_text(prompt, said):
        kept["prompt_is_text"] = True
    return {CHAT: said, "data_source": None, "reward_model": judged, "extra_info": extra, **kept}


def to_row(
    record: Mapping[str, Any],
    *,
    index: int = 0,
    split: str,
    data_source: str = "openai/gsm8k",
    instruction: str = "",
    place: str | None = None,
) -> dict[str, Any]:
    """A record of GSM8K (`question`, `answer`) as a row in verl's schema; ground truth: what follows `####`, less commas.

    Raises `DataError`, at `place` (by default the row's index), where question, answer or `####` is missing or not text.
    """
    where = place or f"row {index}"
    if not isinstance(record, Mapping) or not {"question", "answer"} <= record.keys():
        found = ", ".join(sorted(record)) if isinstance(record, Mapping) else type(record).__name__
        raise DataError(f"GSM8K record at {where}", expected="question and answer", found=found)
    question, answer = record["question"], record["answer"]
    for name, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{name} of {where}", expected="a text", found=describe(value))
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


def plain(value: Any) -> Any:
    """A cell as plain Python values: arrays and NumPy scalars converted, also inside dicts and lists; pandas' NA is None."""
    if value is None or isinstance(value, str | float | int):
        return value
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def absent(value: Any) -> bool:
    """Whether a plain value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _empty(value: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, "", [], {}, or a list or dict of such."""
    inside = value.values() if isinstance(value, Mapping) else value
    if isinstance(inside, str | bytes) or not isinstance(inside, Iterable):
        return absent(value) or value in ("", b"")
    return all(map(_empty, inside))


def object_of(value: Any, place: str) -> dict[str, Any] | None:
    """A dict, or None; some files have it as JSON text."""
    found = _parsed(value) if isinstance(value, str) else value
    if not isinstance(found, dict | None):
        raise DataError(place, expected="an object (a dict, or JSON text of one), or nothing", found=describe(value))
    return found


def _parsed(text: str) -> Any:
    """The value that a JSON text stands for; the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# --- chats ----------------------------------------------------------------------------------------


def chat(prompt: Any, place: str) -> list[dict[str, Any]]:
    """A prompt as a chat of text: a plain text is a user message, and JSON text of a chat is that chat.

    Parts of text (`{"type": "text", "text": …}`) become one text, a part a line. Raises `DataError`, naming `place`, for
    anything else: parts that are no text, unknown roles, no content, text that looks like a chat and cannot be read as one.
    """
    prompt = _read(prompt, place) if isinstance(prompt, str) else plain(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(place, expected=_EXPECTED, found=describe(prompt))
    return _turns(prompt, place)


def _read(text: str, place: str) -> list[Any]:
    """A text as a chat: the one whose JSON it is, else a user's message."""
    found = _parsed(text) if text.lstrip()[:1] in ("[", "{") else text
    if text.lstrip()[:2] in ('"[', '"{') and text != (inner := _parsed(text)):
        return _read(inner, place)  # some data sets encode twice
    inside = [found] if isinstance(found, Mapping) else found
    if isinstance(inside, list) and inside and all(isinstance(one, Mapping) for one in inside):
        if all("role" in one for one in inside):
            return inside
        if all(one.get("type") in _PARTS for one in inside):
            return _message(inside)
    if _CHAT.match(text):
        do = "write it so; or, where this very text is meant, as [{'role': 'user', 'content': …}]"
        expected = "JSON of a list of {role, content}"
        raise DataError(f"{place} looks like a chat", expected=expected, found=describe(text), do=do)
    return _message(text)


def is_text(prompt: Any, said: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt was a plain text that became this chat."""
    return isinstance(prompt, str) and said == _message(prompt)


def spoken(response: Any, place: str) -> str:
    """A response as text; of a list of messages (TRL's conversational form) the contents, one a line."""
    if isinstance(response, str):
        return response
    return "\n".join(turn["content"] or "" for turn in messages(response, place))


def messages(turns: Iterable[Any], place: str) -> list[dict[str, Any]]:
    """The messages of a chat, each with its content as text. Raises `DataError`, as `chat` does; there may be none."""
    if isinstance(turns := plain(turns), list):
        return _turns(turns, place)
    raise DataError(place, expected=_EXPECTED, found=describe(turns))


def _message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _turns(turns: Sequence[Any], place: str) -> list[dict[str, Any]]:
    return [_turn(turn, f"message {number} of {place}") for number, turn in enumerate(turns)]


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """A message without its empty fields, which parquet writes where another row's message has them."""
    if not isinstance(turn, Mapping) or "role" not in turn:
        raise DataError(place, expected=f"{_EXPECTED}; a message has a role", found=describe(turn))
    kept = {str(name): value for name, value in turn.items() if not absent(value)}
    if kept.get("role") not in ROLES:
        raise DataError(f"{place}: " + unknown("role", str(kept.get("role")), ROLES))
    if media := next((name for name in MEDIA if not _empty(kept.get(name))), None):
        raise DataError(f"{media} in {place}", expected=_TEXT_ONLY, found=describe(kept[media]))
    calls = _calls(kept.pop("tool_calls", []), kept["role"], place)
    if calls and "content" not in kept:
        return {**kept, **calls, "content": None}
    return {**kept, **calls, "content": _text(kept.get("content"), f"content of {place}")}


def _calls(calls: Any, role: str, place: str) -> dict[str, Any]:
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        raise DataError(f"tool_calls of {place}", expected="a list of calls (dicts)", found=describe(calls))
    if calls and role != "assistant":
        raise DataError(f"tool_calls of {place}", expected="an assistant's message", found=f"role {role!r}")
    return {"tool_calls": calls} if calls else {}


def _text(content: Any, place: str) -> Any:
    """Content as one text; its parts are joined by newlines, as vLLM joins them for models that read text alone. Parts
    with pictures (`pictures.is_parts`) stay parts."""
    if pictures.is_parts(content):
        return [{**part, "text": _text(part["text"], place)} if "text" in part else part for part in content]
    if isinstance(content, list) and content:
        content = "\n".join(_part(part, f"part {number} of {place}") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise DataError(place, expected=f"{_EXPECTED}; content is text, or parts of text", found=describe(content))
    try:
        content.encode()
    except UnicodeEncodeError as cause:
        found = describe(content[cause.start : cause.end])
        raise DataError(f"{place}: half a character", expected="text that UTF-8 can hold", found=found) from cause
    return content


def _part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    there = {name: value for name, value in part.items() if not absent(value)} if isinstance(part, Mapping) else {}
    text = there.pop("text", None)
    if isinstance(text, str) and there.pop("type", "text") == "text" and all(map(_empty, there.values())):
        return text
    raise DataError(place, expected=_TEXT_ONLY, found=describe(part), do="leave such rows out, or their parts")


def _refuse_placeholders(said: Sequence[Mapping[str, Any]], row: Mapping[str, Any], place: str) -> None:
    """A text that points at a picture of its row is wrong without it, also where the cell is empty or left out."""
    named = {kind for turn in said for kind in _PLACEHOLDER.findall(str(turn.get("content")))}
    missing = next(((kind, name) for kind in named for name in row if name in MEDIA and kind in name), None)
    if missing:
        what = f"the prompt of {place} has <{missing[0]}>, for its column {missing[1]!r}"
        raise DataError(what, expected=_TEXT_ONLY, do="leave such rows out")


# --- truths ---------------------------------------------------------------------------------------


def truth_of(row: Mapping[str, Any]) -> Any:
    """The ground truth of a row: `reward_model.ground_truth`, else the test cases in its `extra_info`."""
    truth = (row.get("reward_model") or {}).get("ground_truth")
    return (row.get("extra_info") or {}).get("test_cases") if absent(truth) else truth


def has_answer(row: Mapping[str, Any]) -> bool:
    """Whether the row can be scored: it has a ground truth, or a model judges it (`reward_model.style` is "model")."""
    return _kind(truth_of(row)) not in _NOTHING or (row.get("reward_model") or {}).get("style") == "model"


def truth_kinds(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many ground truths are of each kind: `text`, `whole number`, …, `none`, `empty`; the most frequent first."""
    return dict(Counter(_kind(truth_of(row)) for row in rows).most_common())


_NOTHING = ("none", "empty")
_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", list: "list", dict: "object"}


def _kind(truth: Any) -> str:
    if absent(truth):
        return "none"
    blank = isinstance(truth, str) and not truth.strip()
    return "empty" if blank or truth in ([], {}) else _KINDS.get(type(truth), type(truth).__name__)
