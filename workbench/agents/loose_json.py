"""JSON as models write it: sound JSON as it is, and a stated, bounded set of slips mended."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_LENGTH = 1 << 16
"""Characters that are looked at for mending; sound JSON may be longer."""
MAX_DEPTH = 64
_FENCE = re.compile(r"\s*```(?:json)?\s*\n?(.*?)(?:```\s*)?\Z", re.S)
_WORD = re.compile(r"[A-Za-z_][\w-]*")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class _Broken(ValueError):
    """Beyond mending."""


def loose_json(text: str) -> Any:
    """The object or array that the text is, or None: never raises.

    Sound JSON is read by the standard library. Else these slips are mended, and no others: a ``` fence around it; strings
    in single quotes; a comma too many; brackets, and a last string, that are not closed; line breaks inside strings;
    `True`, `False`, `None`; keys without quotes; text after the end. Only up to `MAX_LENGTH` characters and `MAX_DEPTH`
    levels; time grows with the length alone.
    """
    fenced = _FENCE.match(text)
    text = (fenced[1] if fenced and text.lstrip().startswith("```") else text).strip()
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        if len(text) > MAX_LENGTH:
            return None
    try:
        return _Reader(text).value(0)
    except (_Broken, ValueError, RecursionError):
        return None


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while self.place < len(self.text) and self.text[self.place].isspace():
            self.place += 1
        return self.text[self.place : self.place + 1]

    def value(self, depth: int) -> Any:
        sign = self.peek()
        if depth > MAX_DEPTH or not sign:
            raise _Broken
        if sign == "{":
            return self.mapping(depth)
        if sign == "[":
            return self.sequence(depth)
        if sign in "\"'":
            return self.string(sign)
        if word := _WORD.match(self.text, self.place):
            if word[0] not in _WORDS:
                raise _Broken
            self.place = word.end()
            return _WORDS[word[0]]
        number = _NUMBER.match(self.text, self.place)
        if number is None:
            raise _Broken
        self.place = number.end()
        return float(number[0]) if set(number[0]) & set(".eE") else int(number[0])

    def mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.place += 1
        while self.more("}"):
            sign = self.peek()
            if sign in "\"'":
                key = self.string(sign)
            else:
                word = _WORD.match(self.text, self.place)
                if word is None:
                    raise _Broken
                key, self.place = word[0], word.end()
            if self.peek() != ":":
                raise _Broken
            self.place += 1
            found[key] = self.value(depth + 1)
        return found

    def sequence(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self.place += 1
        while self.more("]"):
            found.append(self.value(depth + 1))
        return found

    def more(self, close: str) -> bool:
        """Past commas and at another item; not past a close, one of another kind (it is missing here), or the end."""
        while self.peek() == ",":
            self.place += 1
        sign = self.peek()
        if sign == close:
            self.place += 1
        return bool(sign) and sign not in "}]"

    def string(self, quote: str) -> str:
        found = []
        self.place += 1
        while self.place < len(self.text):
            letter = self.text[self.place]
            self.place += 1
            if letter == quote:
                break
            found.append(self.escaped() if letter == "\\" else letter)
        return "".join(found)

    def escaped(self) -> str:
        letter = self.text[self.place : self.place + 1]
        self.place += 1
        if letter != "u":
            return _ESCAPES.get(letter, letter)
        digits = self.text[self.place : self.place + 4]
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            return "u"
        self.place += 4
        return chr(int(digits, 16))
