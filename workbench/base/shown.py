"""How an object is displayed without importing `views`: a table of functions by class that `views` fills in.

Packages below `views` do not import it. Their classes inherit `Shown`; the table has the function that makes the document of a
class and its subclasses, from which text and HTML are rendered, and the one that makes its widget. The modules in the table
are imported when an object is displayed.

What is shown or written has ••• in place of secrets. A setting is a secret by the words of its name (`api_key`, `hf_token`,
`Authorization`, `DB_PASSWORD`): a word that always says so, or `key` or `token` after a word that makes it no ordinary one
(`prompt_key` is a column, `pad_token` a token). Only texts are secrets: `max_tokens` is a number. Addresses lose user and
password, and secrets of their query.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from workbench.base.errors import PackageMissing, SettingError, first_line, hinted, message

log = logging.getLogger("workbench")

TEXT_LIMIT = 20_000
"""Most characters of a text from outside that are shown; a note says how many were left out."""
_FACES: dict[str, Mapping[str, str]] = {}
_DOORS: dict[str, str] = {}


def register(faces: Mapping[str, Mapping[str, str]], **doors: str) -> None:
    """Register how classes are displayed: `"module:Class"` → {`document`, `widget` or another name:
    `"module:function"`}.

    `doors` name four more functions: `text` and `html` render a document, `display` shows a widget in a notebook (it
    gets the object and a function that makes its widget), `cell` opens the line of work that a cell waits for.
    """
    _FACES.update(faces)
    _DOORS.update(doors)


def door(name: str) -> Any:
    """Return the function registered by `register` under this keyword: `text`, `html`, `display` or `cell`."""
    return resolve_name(_DOORS[name])


def shows(thing: Any, what: str, *args: Any, **options: Any) -> Any:
    """Call the function that is registered as `what` for an object's class. Raises `RuntimeError` where there is none."""
    name = _named(thing, what)
    if name is None:
        kind = type(thing).__name__
        raise RuntimeError(f"no function is registered for {what!r} of a {kind}; `import workbench` registers all")
    return resolve_name(name)(thing, *args, **options)


def _named(thing: Any, what: str) -> str | None:
    """Return the name of the function registered as `what` for an object's class or the nearest base class; None where
    there is none.
    """
    rows = (_FACES.get(f"{kind.__module__}:{kind.__qualname__}", {}) for kind in type(thing).__mro__)
    return next((row[what] for row in rows if what in row), None)


def _rendered(thing: Any, form: str) -> str | None:
    known = _named(thing, "document") is not None
    return str(door(form)(shows(thing, "document"))) if known else None


class Hinting:
    """Base of classes that answer a name which people try, and which they do not have, with what to type in its place:
    the name of an attribute by `elsewhere`, that of a keyword argument of a method by `hinted`."""

    __slots__ = ()
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Name → what to type in its place."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            own = inspect.isfunction(method) and cls.__module__.startswith("workbench.")
            if own and not (name.startswith("_") or inspect.iscoroutinefunction(method)):
                setattr(cls, name, hinted(method))

    if not TYPE_CHECKING:  # to a type checker a class with this method has every attribute

        def __getattr__(self, name: str) -> Any:
            do = type(self).elsewhere.get(name)
            if do is None:
                return object.__getattribute__(self, name)  # raises again: Python's own error, or that of a property
            raise AttributeError(message(f"{type(self).__name__} has no {name!r}", do=do))


class Shown(Hinting):
    """Base of classes that are displayed as `register` sets it: text as `repr`, HTML and a widget in a notebook.

    A class that is not registered has a plain repr of its name.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        text = _rendered(self, "text")
        return f"<{type(self).__name__}>" if text is None else text

    def _repr_html_(self) -> str | None:
        return _rendered(self, "html")

    def _ipython_display_(self) -> None:
        if _named(self, "widget") is None:
            raise NotImplementedError("this object has no widget")  # IPython goes on with the HTML and the text
        try:
            door("display")(self, lambda: shows(self, "widget"))
        except Exception as error:
            if not os.environ.get("WORKBENCH_JOB"):  # whose notebook has no widgets
                colab = "google.colab" in sys.modules and not isinstance(error, PackageMissing)
                do = "; from google.colab import output; output.enable_custom_widget_manager()" if colab else ""
                log.warning("the widget cannot be shown, its static form is: %s%s", first_line(error), do)
            raise NotImplementedError("the widget cannot be shown") from error


def number(value: Any, form: str = "") -> str:
    """Format a number for people: four significant digits, whole numbers below a million in full, an exponent below
    0.001 and from a million on (`0.25`, `12346`, `2.05e-4`); `–` for None and NaN.

    The form `+` writes a sign also above 0; any other is a format of Python's own.
    """
    if value is None or value != value:
        return "–"
    if form.strip("+") or not math.isfinite(value):
        return f"{value:{form}}"
    if value and not 1e-3 <= abs(value) < 1e6:
        digits, power = f"{value:.3e}".split("e")
        return f"{float(digits):{form}g}e{int(power)}"
    return f"{(value if value == int(value) else float(f'{value:.4g}')) or 0:{form}.7g}"


def plain(text: str) -> str:
    """Make a text safe to show: control characters and direction overrides become visible; line ends and tabs stay.

    A text of more than `TEXT_LIMIT` characters is cut, and a note says how many are left out.
    """
    if len(text) > TEXT_LIMIT:
        text = f"{text[:TEXT_LIMIT]}… ({len(text) - TEXT_LIMIT:,} more characters)"
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]",
        lambda found: f"\\x{ord(found[0]):02x}",
        text,
    )


def encodable(text: str) -> str:
    """Make a text that UTF-8 can hold: each unpaired surrogate becomes `�`."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- secrets ----------------------------------------------------------------------------------


HIDDEN = "•••"
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""In the name of an environment variable: its value may be one. Settings are `is_secret`, which knows ordinary keys and tokens."""
_ALWAYS = re.compile(
    r"password|passwd|pwd|passphrase|secret|credential|auth|authorization|bearer|cookie|apikey|accesskey|signature|sig"
)
_PLACES = re.compile(r"env|var|file|path|folder|dir|id|ids|name|names|type|count|length|column|level|url|mean")
"""Last words of names that say where a secret is, or how many there are, and hold no secret."""
_ORDINARY = re.compile(
    r"(prompt|reward|fn|function|images?|videos?|audio|tools?|answer|response|label|text|sort|group|data|column|row|index|uid|"
    r"chosen|rejected|target|messages?|primary|foreign|public|metric|question|completion|input|output|source|split|score|cache|"
    r"chat|history|extra|info|meta|solution|truth|order|dict|json|value|agent|domain|task|query|state|by) keys?|"
    r"(pad|eos|bos|unk|sep|cls|mask|image|video|audio|vision|start|end|stop|begin|first|last|next|per|think|special|add|new|tool|"
    r"call|prompt|response|by|each|step|prefix|suffix|middle|fill|placeholder|separator|answer|action|box|eot|sot) token|keys?"
)
_KIND = re.compile(r"(\w+ )?(keys?|token)")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER = re.compile(r"(?<=://)[^/\s@?#]*@")
_QUERY = re.compile(r"(?<=[?&;])([\w.\-]+)=([^&;#\s]+)")
_BEARER = re.compile(r"(?<=Bearer )\S+")


def is_secret(name: str) -> bool:
    """Return whether a setting of this name holds a secret, such as `api_key`; of a dotted name the last part counts."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    if not words or _PLACES.fullmatch(words[-1]):
        return False
    end = " ".join(words[-2:])
    by_kind = _KIND.fullmatch(end) and not _ORDINARY.fullmatch(end)
    return bool(by_kind) or any(_ALWAYS.fullmatch(word.removesuffix("s")) for word in words)


def without_secrets(value: Any, name: str = "") -> Any:
    """Replace secrets in a setting's value by •••, at any depth: texts whose name says that they are secret, and
    secrets in addresses.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(one, name if is_secret(name) else str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        inside = [without_secrets(one, name) for one in value]
        return inside if isinstance(value, list) else tuple(inside)
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else shown(value)


def shown(text: str) -> str:
    """Replace user, password and secret query values in the addresses of a text by •••."""
    text = _BEARER.sub(HIDDEN, _USER.sub(f"{HIDDEN}@", text))
    if "://" not in text:
        return text
    return _QUERY.sub(lambda one: f"{one[1]}={HIDDEN}" if is_secret(one[1]) else one[0], text)


def hidden_in(value: Any, name: str = "") -> list[str]:
    """Return the names of the settings in a record, at any depth, whose values were replaced by •••."""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else ((name, one) for one in value)
        return [each for key, one in pairs for each in hidden_in(one, str(key))]
    return [name] if isinstance(value, str) and HIDDEN in value else []


def bare_url(url: str, what: str, do: str, form: str = "http(s)://host[:port][/path]") -> str:
    """Return the URL of a service unchanged. Raises `SettingError` where it is none, and for a user, a password or a
    query in it, which would be shown in records.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise SettingError(what, expected=form, found=repr(shown(url)), do=do if parts.query else None)
    if "@" in parts.netloc:
        raise SettingError(what, expected="an address without user or key", found="user@host", do=do)
    return url


_BLOCKS = "▁▂▃▄▅▆▇█"


def blocks(values: Sequence[float], most: int = 40) -> str:
    """Draw finite values as blocks of their height, `▁▃▆█`, from the lowest to the highest; of more than `most` an even
    choice. Others are left out."""
    values = [value for value in values if math.isfinite(value)]
    chosen = [values[at * (len(values) - 1) // (most - 1)] for at in range(most)] if len(values) > most else values
    low, span = min(chosen, default=0.0), max(chosen, default=0.0) - min(chosen, default=0.0) or 1.0
    return "".join(_BLOCKS[round((one - low) / span * (len(_BLOCKS) - 1))] for one in chosen)
