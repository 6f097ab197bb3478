"""Secrets among settings, known by their names: what is written to a file or shown has ••• in their place.

A setting is a secret by the words of its name (`api_key`, `hf_token`, `Authorization`, `DB_PASSWORD`): one that always says so, or
`key` or `token` after a word that makes it no ordinary one (`prompt_key` is a column, `pad_token` a token). Only texts are
secrets: `max_tokens` is a number. Addresses lose user and password, and secrets of their query.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from workbench.base.errors import SettingError

HIDDEN = "•••"
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""In the name of an environment variable: its value may be one. Settings are `is_secret`, which knows ordinary keys and tokens."""
_ALWAYS = re.compile(
    r"password|passwd|pwd|passphrase|secret|credential|auth|authorization|bearer|cookie|apikey|accesskey|signature|sig"
)
_PLACES = re.compile(r"env|var|file|path|folder|dir|id|ids|name|names|type|count|length|column|level|url|mean")
"""Last words of names that say where a secret is, or how much there is of it."""
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
    """Whether a setting of this name holds a secret; the last part of a dotted name counts."""
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    if not words or _PLACES.fullmatch(words[-1]):
        return False
    end = " ".join(words[-2:])
    by_kind = _KIND.fullmatch(end) and not _ORDINARY.fullmatch(end)
    return bool(by_kind) or any(_ALWAYS.fullmatch(word.removesuffix("s")) for word in words)


def without_secrets(value: Any, name: str = "") -> Any:
    """The value of a setting, of any depth, with ••• for secrets by name and for those of addresses; other values as they are."""
    if isinstance(value, Mapping):
        return {key: without_secrets(one, name if is_secret(name) else str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        inside = [without_secrets(one, name) for one in value]
        return inside if isinstance(value, list) else tuple(inside)
    if not isinstance(value, str):
        return value
    return HIDDEN if value and is_secret(name) else shown(value)


def shown(text: str) -> str:
    """A text whose addresses have ••• for user and password, and for secrets of their query."""
    text = _BEARER.sub(HIDDEN, _USER.sub(f"{HIDDEN}@", text))
    if "://" not in text:
        return text
    return _QUERY.sub(lambda one: f"{one[1]}={HIDDEN}" if is_secret(one[1]) else one[0], text)


def hidden_in(value: Any, name: str = "") -> list[str]:
    """The names of the settings whose values were left out of a record, of any depth."""
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else ((name, one) for one in value)
        return [each for key, one in pairs for each in hidden_in(one, str(key))]
    return [name] if isinstance(value, str) and HIDDEN in value else []


def bare_url(url: str, what: str, do: str, form: str = "http(s)://host[:port][/path]") -> str:
    """The URL of a service. Raises `SettingError` for what is none, and for a user, a password or a query, which would be shown."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise SettingError(what, expected=form, found=repr(shown(url)), do=do if parts.query else None)
    if "@" in parts.netloc:
        raise SettingError(what, expected="one without user or key", found="user@host", do=do)
    return url
