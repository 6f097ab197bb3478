"""Settings: frozen, keyword-only, typed; unknown names are refused with the nearest one.

A settings class is a dataclass that inherits `Settings`::

    @dataclass(frozen=True, kw_only=True)
    class SamplingSettings(Settings):
        temperature: float = 1.0
        \"\"\"Divides the logits; 0 is greedy.\"\"\"

`SamplingSettings.from_parameters({"temperature": "0.7"})` coerces by annotation and refuses
what it does not know. Checks of values go into `__post_init__` by `require`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from workbench.errors import SettingError, describe, message, unknown
from workbench.sources import source_of

_TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def require(condition: bool, what: str, *, expected: object, found: object, do: str | None = None) -> None:
    """Refuse a setting that cannot work."""
    if not condition:
        raise SettingError(message(what, expected=expected, found=describe(found), do=do))


def coerce(name: str, value: Any, annotation: Any) -> Any:
    """`value` as the annotated type: `"false"` → False, `"1e-6"` → 1e-6; refused where it cannot be.

    Understands int, float, bool, str, Optional and unions of these, and lists, tuples and dicts of them.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, str):
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(name, value, args)
    if origin is typing.Literal:
        if value not in args:
            raise SettingError(message(f"setting {name!r}", expected=f"one of {args}", found=describe(value)))
        return value
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise SettingError(message(f"setting {name!r}", expected="a list", found=describe(value)))
        kind = args[0] if args else Any
        return origin(coerce(name, item, kind) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise SettingError(message(f"setting {name!r}", expected="a dict", found=describe(value)))
        return {coerce(name, key, args[0]): coerce(name, item, args[1]) for key, item in value.items()}
    if annotation in (bool, int, float, str):
        return _coerce_scalar(name, value, annotation)
    return value


def _coerce_union(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    nothing = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if nothing and type(None) in kinds:
        return None
    refusal: SettingError | None = None
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return coerce(name, value, kind)
        except SettingError as error:
            refusal = error  # the next member of the union may take it
    kinds_text = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise SettingError(message(f"setting {name!r}", expected=kinds_text, found=describe(value))) from refusal


def _coerce_scalar(name: str, value: Any, kind: type) -> Any:
    if kind is bool and isinstance(value, str) and value.lower() in _TRUE:
        return _TRUE[value.lower()]
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError) as cause:
            raise SettingError(message(f"setting {name!r}", expected="a number", found=describe(value))) from cause
        if math.isnan(number):
            raise SettingError(message(f"setting {name!r}", expected="a number", found=describe(value)))
        return number
    if kind is int and isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)  # not through a float: seeds have more digits
    if kind is int and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as cause:
            raise SettingError(
                message(f"setting {name!r}", expected="a whole number", found=describe(value))
            ) from cause
        if number.is_integer():
            return int(value) if isinstance(value, int) else int(number)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise SettingError(message(f"setting {name!r}", expected=kind.__name__, found=describe(value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings classes."""

    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Other names that people know → the setting's own."""

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names it knows, in order."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def name_of(cls, name: str) -> str | None:
        """A setting's own name, for it or for one of the class's `ALIASES`; None for another word."""
        aliased = cls.ALIASES.get(name, name)
        return aliased if aliased in cls.field_names() else None

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        """Settings from loose names and values, as a notebook or a command line gives them."""
        hints = typing.get_type_hints(cls)
        values = {}
        for name, value in parameters.items():
            if name not in cls.field_names():
                raise SettingError(unknown(f"setting of {cls.__name__}", name, cls.field_names()))
            values[name] = coerce(name, value, hints[name])
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed; unknown names are refused."""
        return type(self).from_parameters({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Name → value, one level deep."""
        return {name: getattr(self, name) for name in self.field_names()}


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Eight hex digits that change when any setting does: values by their repr, functions and what holds them by name and
    source text, so that a function defined anew under its old name gives another hash."""
    text = json.dumps({key: _said(value) for key, value in settings.items()}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _said(value: Any) -> str:
    text = source_of(value)
    if text is None:
        return repr(value)
    # the repr of a function is an address: another one in every process
    name = getattr(value, "__qualname__", None)
    return f"{name if isinstance(name, str) else repr(value)}\n{text}"


def remembering(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that leaves its arguments by name in `_made_with`; starred keywords stand among them."""
    signature = inspect.signature(init)
    starred = [name for name, one in signature.parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(init)
    def remembers(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        extra = {key: value for name in starred for key, value in given.pop(name, {}).items()}
        self._made_with = dict([*given.items()][1:]) | extra

    return remembers
