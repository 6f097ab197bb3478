"""Foreign values, such as what a tool returns, as JSON types and as text that a file can hold."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

from workbench.base.config import check_nesting
from workbench.base.errors import SettingError, describe
from workbench.base.shown import encodable

Otherwise = Callable[[Any], Any] | None


def plain(value: Any, otherwise: Otherwise = None) -> Any:
    """A value as JSON types: None, bool, int, float, str, list and dict.

    Arrays, tensors and their scalars become lists and numbers; sets sorted lists; bytes their UTF-8 text, else base64; dates
    and times ISO texts; enums their values; dataclasses objects; `Decimal`, `Fraction`, `UUID` and paths texts. Unpaired
    surrogates, which no file can hold, become `�`. Any other value becomes `otherwise(value)`; without it `TypeError` names
    its type, as one of them, `SettingError`, does for what contains itself or is nested too deep.
    """
    check_nesting(value, f"a value of type {type(value).__name__}", SettingError)
    return _plain(value, otherwise)


def _plain(value: Any, otherwise: Otherwise) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, otherwise)
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        named = {_name(name): _plain(one, otherwise) for name, one in value.items()}
        if len(named) < len(value):
            raise TypeError(f"two keys of a {type(value).__name__} have the same text: {describe(list(value))}")
        return named
    if isinstance(value, list | tuple):
        return [_plain(one, otherwise) for one in value]
    if isinstance(value, Set):
        listed = [_plain(one, otherwise) for one in value]
        try:
            return sorted(listed)
        except TypeError:  # of several kinds
            return sorted(listed, key=lambda one: (type(one).__name__, str(one)))
    return _unusual(value, otherwise)


def _unusual(value: Any, otherwise: Otherwise) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | Fraction | UUID | PurePath):
        return encodable(str(value))
    if not isinstance(value, type):
        if is_dataclass(value):
            return {one.name: _plain(getattr(value, one.name), otherwise) for one in fields(value)}
        if callable(getattr(value, "tolist", None)):  # of numpy or torch; numpy's dates are numbers there
            dated = getattr(getattr(value, "dtype", None), "kind", None) in ("m", "M")
            found = (value.astype(str) if dated else value).tolist()
            if type(found) is not type(value):
                return _plain(found, otherwise)
        if isinstance(value, int | float):
            return value
    if otherwise is None:
        raise TypeError(f"a value of type {type(value).__name__} has no form in JSON: {describe(value)}")
    return otherwise(value)


def _name(key: Any) -> str:
    found = plain(key, describe)
    return found if isinstance(found, str) else json.dumps(found)


def as_text(value: Any) -> str:
    """A value as a model reads it: a text as it is, anything else as JSON (`plain`)."""
    found = plain(value)
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
