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

import ast
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import linecache
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from workbench.base.errors import (
    SettingError,
    WorkbenchError,
    describe,
    first_line,
    nearest,
    refuse_unknown,
)

P = ParamSpec("P")
T = TypeVar("T")
_TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def require(condition: bool, what: str, *, expected: object, found: object, do: str | None = None) -> None:
    """Raise `SettingError` unless the condition holds; the message shows the repr of `found`."""
    if not condition:
        raise SettingError(what, expected=expected, found=describe(found), do=do)


DEPTH, SIZE = 100, 10_000_000
"""Most levels of nested lists and dicts in a user's value, and most values in them."""
_FLAT = frozenset({str, int, float, bool, bytes, type(None)})


def check_nesting(value: Any, what: str, error: type[WorkbenchError]) -> None:
    """Raise `error`, naming `what`, where lists, dicts or dataclasses contain themselves, or exceed `DEPTH` or `SIZE`.

    A value that passes can be walked, compared, copied, shown and saved by recursion. A part that occurs twice counts
    twice.
    """
    size = _size(value, {}, 0)
    if size > SIZE:
        expected = f"lists and dicts nested at most {DEPTH} deep, with at most {SIZE:,} values"
        found = f"{size:,} values" if size < math.inf else "one that contains itself, or is nested deeper"
        raise error(what, expected=expected, found=found, do="store it as a text, or only the part that is needed")


def _size(value: Any, sizes: dict[int, float], depth: int) -> float:
    """Count the values in `value`, itself included; infinite where it contains itself or is nested too deep. `sizes`
    caches by id.
    """
    parts: Any = None
    if type(value) not in _FLAT:
        if isinstance(value, Mapping):
            parts = value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            parts = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        elif str(getattr(value, "dtype", "")) == "object":  # NumPy's array of objects
            parts = value.ravel().tolist()
    if parts is None:
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = math.inf  # while it is measured: only what contains itself is met again meanwhile
        if _FLAT.issuperset(map(type, parts)):
            sizes[id(value)] = 1 + len(parts)
        elif depth < DEPTH:
            sizes[id(value)] = 1 + sum(_size(one, sizes, depth + 1) for one in parts)
    return sizes[id(value)]


def parameters_of(function: Any, what: str, error: type[WorkbenchError] = SettingError) -> Mapping[str, Any]:
    """Return the parameters of a user's function by name. Raises `error`, naming `what`, where its signature cannot be
    read.
    """
    if not callable(function):
        raise error(what, expected="a function", found=describe(function), do="pass the function itself, not its name")
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError, RecursionError) as cause:  # a builtin; a wrapper or a partial that holds itself
        do = "wrap it in a function with named arguments: def f(…): …"
        raise error(f"{what} has no readable signature", found=first_line(cause), do=do) from cause


def coerce(name: str, value: Any, annotation: Any) -> Any:
    """Convert `value` to the annotated type: `"false"` → False, `"1e-6"` → 1e-6. Raises `SettingError` where it does
    not fit.

    Supports int, float, bool, str, Literal, Optional and unions of these, and lists, tuples and dicts of them.
    """
    what = f"setting {name!r}"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, str):
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(name, value, args)
    if origin is typing.Literal:
        close = None if value in args else nearest(str(value), map(str, args), 0.5)
        do = f"did you mean {close!r}?" if close else None
        require(value in args, what, expected=_kind_text(annotation), found=value, do=do)
        return value
    if origin in (list, tuple):
        require(isinstance(value, list | tuple), what, expected="a list", found=value)
        kind = args[0] if args else Any
        return origin(coerce(name, item, kind) for item in value)
    if origin is dict:
        require(isinstance(value, dict), what, expected="a dict", found=value)
        return {coerce(name, key, args[0]): coerce(name, item, args[1]) for key, item in value.items()}
    if annotation not in (bool, int, float, str):
        return value
    if (found := _scalar(value, annotation)) is None:
        raise SettingError(what, expected=_kind_text(annotation), found=describe(value))
    return found


def _coerce_union(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    nothing = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if nothing and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is not type(None):
            with contextlib.suppress(SettingError):  # the next member of the union may take it
                return coerce(name, value, kind)
    raise SettingError(f"setting {name!r}", expected=" or ".join(map(_kind_text, kinds)), found=describe(value))


def _kind_text(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return {float: "a number", int: "a whole number", type(None): "None"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)  # not through a float: seeds have more digits
    return int(float(value)) if float(value).is_integer() else None  # "1e3" is a whole number


def _scalar(value: Any, kind: type) -> Any:
    """Convert a value to a bool, int, float or str; None where that is impossible."""
    if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):  # to Python a bool is an int
        return None if value != value else value
    if kind is bool and isinstance(value, str):
        return _TRUE.get(value.lower())
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if kind is int and not isinstance(value, bool):
            return _whole(value)
        if kind is float and isinstance(value, int | str) and not (isinstance(value, bool) or math.isnan(float(value))):
            return float(value)
    return None


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn settings with dotted names (`"algorithm.gamma"`) into nested dicts; plain and nested ones may be mixed."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        place = tree
        *parents, last = str(key).split(".")
        for name in parents:
            place = place.setdefault(name, {})
        if isinstance(place.get(last), dict) and isinstance(value, Mapping):
            place[last].update(value)
        else:
            place[last] = dict(value) if isinstance(value, Mapping) else value
    return tree


def read_yaml(path: str | Path, *, most: int = 1 << 20) -> dict[str, Any]:
    """Read a YAML (or JSON) file of at most `most` bytes: a mapping of names to plain values.

    Raises `SettingError`, with the line, for what YAML would silently read as something else: keys that are not text
    (`on:` is True), repeated keys, whole numbers of another base (`010` is 8, `1:30` is 90), and aliases, which let 300
    bytes expand to gigabytes. `1e-6`, a text in YAML, becomes a number where a setting is one.
    """
    import yaml

    file, what = Path(path), f"YAML file {str(path)!r}"
    if not file.is_file():
        raise SettingError(f"no file at {str(path)!r}", do="check the path")
    if file.stat().st_size > most:
        raise SettingError(
            f"{what} is too large", expected=f"at most {most} bytes", found=f"{file.stat().st_size} bytes"
        )
    try:
        text = file.read_text(encoding="utf-8")
        if alias := next((one for one in yaml.parse(text, yaml.SafeLoader) if isinstance(one, yaml.AliasEvent)), None):
            place = f"{what}, line {alias.start_mark.line + 1}"
            raise SettingError(
                place, expected="no aliases (*name)", found=f"*{alias.anchor}", do="write each value out"
            )
        for line, wrong, do in _misread(yaml.compose(text, yaml.SafeLoader)):
            raise SettingError(f"{what}, line {line + 1}", found=wrong, do=do)
        document = yaml.safe_load(text)
    except SettingError:
        raise
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as cause:
        raise SettingError(f"{what} cannot be read", found=first_line(cause)) from cause
    require(isinstance(document, dict), f"content of {what}", expected="lines `name: value`", found=document)
    return document


_TEXT, _NUMBER = "tag:yaml.org,2002:str", "tag:yaml.org,2002:int"


def _misread(node: Any) -> Iterator[tuple[int, str, str]]:
    """Yield (line, what stands there, what to do) for everything that YAML reads otherwise than it is written."""
    if node is None or isinstance(node.value, str):
        if node is not None and node.tag == _NUMBER and not re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", node.value):
            yield (
                node.start_mark.line,
                f"{node.value}, a whole number of another base",
                "write it in plain digits, or quote it",
            )
        return
    seen = set[str]()
    for item in node.value:
        if isinstance(item, tuple):
            key, item = item
            if key.tag != _TEXT:
                yield key.start_mark.line, f"the key {key.value!r}, which YAML takes for no text", "quote it"
            elif key.value in seen:
                yield key.start_mark.line, f"the key {key.value!r} a second time", "leave one of them out"
            else:
                seen.add(key.value)
        yield from _misread(item)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a class's settings. They are cached because evaluating annotations takes half a millisecond a
    class.
    """
    return typing.get_type_hints(kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings classes, which are frozen, keyword-only dataclasses."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Raise `SettingError` for an unknown name."""
        refuse_unknown(cls.__name__, settings, cls.field_names())
        return super().__new__(cls)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the settings of this class, in the order of their definition."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Self:
        """Make the settings from names and values as a notebook or a command line gives them (`"1e-6"` for a number).

        Raises `SettingError` for an unknown name, and for a value that does not fit the setting's type.
        """
        hints = _hints(cls)  # type: ignore[arg-type] # mypy does not take a class for hashable
        refuse_unknown(cls.__name__, parameters, cls.field_names())
        return cls(**{name: coerce(name, value, hints[name]) for name, value in parameters.items()})

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed. Raises `SettingError` for an unknown name."""
        return type(self).from_parameters({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dict, name → value; values are not converted."""
        return {name: getattr(self, name) for name in self.field_names()}


def shows_settings(settings_class: type[Settings]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: the signature of a function shows the fields of a settings class in place of its parameter `settings`."""

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function, eval_str=True)
        parameters = dict(signature.parameters)
        del parameters["settings"]
        shown = {**parameters, **inspect.signature(settings_class, eval_str=True).parameters, **parameters}
        function.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        return function

    return decorated


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return eight hex digits that change when any setting changes.

    A value counts by its repr, an object with `settings()` by its class and these, a function or class by its name and
    source text, so that a function that is defined again under its old name with other text changes the hash.
    """

    def written(value: Any) -> str:
        text, name = source_of(value), getattr(value, "__qualname__", None)
        nested = getattr(value, "settings", None)  # what such an object shows is for readers, and may be worded anew
        if not isinstance(name, str):  # the repr of a function is an address: another one in every process
            name = f"{type(value).__qualname__} {nested()!r}" if callable(nested) else repr(value)
        return name if text is None else f"{name}\n{text}"

    text = json.dumps({key: written(value) for key, value in settings.items()}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class Remembering:
    """Base of classes whose constructors keep their arguments, so that a run can record how to make an object again."""

    _made_with: Mapping[str, Any] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(vars(cls)["__init__"])  # type: ignore[method-assign]

    @property
    def made_with(self) -> Mapping[str, Any]:
        """The arguments that this object was constructed with, by name, those of `**keywords` among them; defaults are
        left out.
        """
        return self._made_with


def _remembering(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it also keeps its arguments by name in `_made_with` (those of `**settings` one by
    one).
    """
    signature = inspect.signature(init)
    mine, *others = signature.parameters.values()
    starred = [one.name for one in others if one.kind is inspect.Parameter.VAR_KEYWORD]

    @functools.wraps(init)
    def remembers(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments[mine.name]
        extra = arguments.pop(starred[0], {}) if starred else {}
        self._made_with = arguments | extra

    return remembers


def source_of(value: Any) -> str | None:
    """Return the source text of a function, a partial, a class, or an object whose `source` is a string; None where
    there is none.

    For a callable object of a user's class it is the source of the class. What was defined in a notebook is followed by
    the source of the notebook's functions and classes that it uses, so that a changed helper counts as a change.
    """
    text = getattr(value, "source", None)
    if isinstance(text, str):
        return text
    if isinstance(value, functools.partial):
        return source_of(value.func)
    if not isinstance(value, Callable):  # type: ignore[arg-type]
        return None
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        value = type(value)
        if value.__module__.startswith("workbench."):
            return None
    texts = [_text_of(one) for one in (value, *helpers(value))]
    return None if texts[0] is None else "\n".join(text for text in texts if text)


def _text_of(value: Any) -> str | None:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError, ValueError):  # a builtin, a wrapper of itself, or a cell whose text is gone
        return _class_in_a_cell(value) if inspect.isclass(value) else None


def helpers(value: Any) -> list[Any]:
    """Return the functions and classes of `__main__` that a function or class of `__main__` uses by name, directly or
    indirectly.
    """
    known: dict[int, Any] = {id(value): value}
    waiting = [value]
    while waiting:
        function = _unwrapped(waiting.pop())
        function = getattr(function, "__func__", function)
        if not (inspect.isfunction(function) or inspect.isclass(function)):
            function = type(function)
        if function.__module__ != "__main__":
            continue
        functions = [function] if inspect.isfunction(function) else filter(inspect.isfunction, vars(function).values())
        used = [vars(sys.modules["__main__"]).get(name) for each in functions for name in _names(each.__code__)]
        waiting += [
            each for each in used if (inspect.isfunction(each) or inspect.isclass(each)) and id(each) not in known
        ]
        known |= {id(each): each for each in waiting if each.__module__ == "__main__"}
    return list(known.values())[1:]


def _unwrapped(value: Any) -> Any:
    """Return the function inside decorators; a wrapper that claims to wrap itself is returned unchanged."""
    with contextlib.suppress(ValueError):
        return inspect.unwrap(value)
    return value


def _names(code: types.CodeType) -> list[str]:
    """Return the global names that code uses, including those in comprehensions and inner functions; each once."""
    inner = [name for one in code.co_consts if isinstance(one, types.CodeType) for name in _names(one)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _class_in_a_cell(kind: type) -> str | None:
    """Find the source text of a class defined in a notebook, through the cell that its methods come from; None where it
    is not found.
    """
    found = [_unwrapped(one) for one in vars(kind).values() if inspect.isfunction(one)]
    own = [one.__code__ for one in found if one.__qualname__.rpartition(".")[0] == kind.__qualname__]
    for code in own:
        lines = linecache.getlines(code.co_filename)
        with contextlib.suppress(SyntaxError):  # a cell with magics
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                    first, last = node.lineno, node.end_lineno or node.lineno
                    if first <= code.co_firstlineno <= last:
                        return "".join(lines[first - 1 : last])
    return None
