"""Pictures in rows: every spelling becomes chats with parts `{"type": "image"}`, and `Picture`s in the column `images`.

Read are verl's (`<image>` in texts, for a column of bytes, paths or PIL images), TRL's and OpenAI's parts
(`{"type": "image", "image": …}`, `{"type": "image_url", "image_url": {"url": "data:…"}}`) and a prompt of parts alone. A
picture is read when its row is, so that hashes of rows cover it; nothing is fetched from the network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.base.errors import DataError, describe, first_line
from workbench.dataproto.io import register_codec

IMAGES = "images"
"""The column of a row's pictures, in the order of their places in its prompt."""
COLUMNS = (IMAGES, "image")
"""Names under which data sets have the column of pictures."""
PLACE = "<image>"
"""A picture's place in a text, in verl's spelling."""
MOST_PIXELS = 1 << 25
"""Most pixels of a picture that is read, as pictures are decoded in this process."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_KINDS = ("image", "image_url")
_VALUES = ("image", "image_url", "url", "path", "bytes")
_URL = re.compile(r"\s*([a-zA-Z][a-zA-Z0-9+.-]+):")


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture as the bytes of its file; pictures with equal bytes are equal."""

    data: bytes
    """The file's bytes, in one of `FORMATS`."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""

    @classmethod
    def read(cls, value: Any, place: str) -> Picture:
        """Read a picture from bytes, a path, a `data:` URI, a PIL image, or a dict with one of these; `place` names it
        in errors.

        Raises `DataError` for an address on the network, for what is not a picture, and for one of more than
        `MOST_PIXELS`.
        """
        if isinstance(value, Picture):
            return value
        if isinstance(value, Mapping):
            there = [value[name] for name in _VALUES if value.get(name) is not None]
            inner = next((one for one in there if isinstance(one, bytes)), there[0] if there else None)
            if inner is not None:
                return cls.read(inner, place)
        if isinstance(value, str | Path):
            value = _file(str(value), place)
        elif hasattr(value, "convert") and hasattr(value, "save"):  # of PIL
            stored = io.BytesIO()
            value.save(stored, format="PNG")
            value = stored.getvalue()
        if not isinstance(value, bytes):
            expected = "a picture: bytes, a path, a data: URI, a PIL image, or {'bytes': …, 'path': …}"
            raise DataError(place, expected=expected, found=describe(value))
        return cls(value, *_size(value, place))

    def image(self, place: str = "a picture") -> Any:
        """Decode the picture as a PIL image, RGB. Raises `DataError` where the file is damaged."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(self.data), formats=FORMATS) as image:
                return image.convert("RGB")
        except Exception as cause:  # as many kinds of error as formats
            raise DataError(f"{place} cannot be decoded: {first_line(cause)}") from cause

    def thumbnail(self, side: int = 96) -> bytes:
        """Make a PNG of at most `side` × `side` pixels in 64 colours: a few kB."""
        image, stored = self.image(), io.BytesIO()
        image.thumbnail((side, side))
        image.quantize(64).save(stored, format="PNG")
        return stored.getvalue()

    @cached_property
    def digest(self) -> str:
        """Hash of the bytes: sixteen hex digits."""
        return hashlib.blake2b(self.data, digest_size=8).hexdigest()

    def __deepcopy__(self, memo: Any) -> Picture:
        return self

    def __repr__(self) -> str:
        return f"Picture({self.width}×{self.height}, {self.digest})"


def _decoded(text: str) -> Picture:
    data = base64.b64decode(text)
    return Picture(data, *_size(data, "a saved picture"))


register_codec("picture", Picture, lambda one: base64.b64encode(one.data).decode(), _decoded)


def _file(text: str, place: str) -> bytes:
    """Read the bytes that a path or a `data:` URI stands for."""
    scheme = found[1].lower() if (found := _URL.match(text)) else ""
    if scheme == "data":
        head, _, body = text.partition(",")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as cause:
            expected = "data:image/…;base64,…"
            raise DataError(place, expected=expected, found=describe(head), do="write its bytes in base64") from cause
    if scheme not in ("", "file"):
        do = "download the pictures first, and give their paths or bytes"
        expected = "no address on the network: nothing is fetched"
        raise DataError(f"{place} is at {text[:100]!r}", expected=expected, do=do)
    path = Path(text.removeprefix("file://")).expanduser()
    if not path.is_file():
        found_ = f"no file {str(path)!r}; relative paths start in {str(Path.cwd())!r}"
        raise DataError(place, expected="the path of a picture", found=found_)
    return path.read_bytes()


def _size(data: bytes, place: str) -> tuple[int, int]:
    """Read width and height from the file's header; checksums are verified where the format has them."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= MOST_PIXELS:
                image.verify()
                return width, height
    except Exception as cause:  # as many kinds of error as formats
        what, expected = f"{place} cannot be read", f"a picture ({', '.join(FORMATS)})"
        raise DataError(what, expected=expected, found=f"{len(data)} bytes: {first_line(cause)}") from cause
    expected = f"at most {MOST_PIXELS:,} pixels"
    raise DataError(f"size of {place}", expected=expected, found=f"{width} × {height}", do="scale the picture down")


# --- places in prompts --------------------------------------------------------------------------


def mentioned(prompt: Any) -> bool:
    """Return whether a prompt may have pictures among its parts."""
    if isinstance(prompt, str):
        return prompt.lstrip()[:1] in ("[", "{") and any(f'"{kind}"' in prompt for kind in _KINDS)
    turns = prompt if isinstance(prompt, list) else []
    return _pictured(turns) or any(isinstance(turn, Mapping) and _pictured(turn.get("content")) for turn in turns)


def _pictured(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(one, Mapping) and one.get("type") in _KINDS for one in content)


def are_pictures(cell: Any) -> bool:
    """Return whether a cell is a list of `Picture`s."""
    return isinstance(cell, list) and bool(cell) and all(isinstance(one, Picture) for one in cell)


def is_parts(content: Any) -> bool:
    """Return whether a message's content is a list of parts as `placed` makes them: texts, and at least one place of a
    picture."""
    return _pictured(content) and all(
        part == {"type": "image"} or (part.keys() == {"type", "text"} and isinstance(part["text"], str))
        for part in content
        if isinstance(part, Mapping)
    )


def as_parts(content: Any) -> Any:
    """Return a message's content as parts: a text becomes one part; other content is returned unchanged."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(content: Any) -> Any:
    """Return a message's content with pictures as one text, with `<image>` in their places; other content is returned
    unchanged."""
    if not is_parts(content):
        return content
    return "".join(part.get("text", PLACE) for part in content)


def placed(prompt: Any, beside: Mapping[str, Sequence[Any]], place: str) -> tuple[Any, list[Picture]]:
    """Put a part `{"type": "image"}` at each picture's place; returns (the chat, the pictures in that order).

    `beside` are the pictures of the row's columns; they stand where texts have `<image>`, or where a part has no
    picture itself. Raises `DataError`, naming `place`, where there are more or fewer places than pictures, and as
    `Picture.read` does.
    """
    if _pictured(prompt):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        return prompt, []
    values: list[Any] = []
    turns = [
        {**turn, "content": _parts(turn["content"], values, bool(beside))}
        if isinstance(turn, Mapping) and "content" in turn
        else turn
        for turn in prompt
    ]
    waiting = [
        (f"picture {number} of column {name!r} of {place}", picture)
        for name, many in beside.items()
        for number, picture in enumerate(many)
    ]
    if values.count(None) != len(waiting):
        columns = " and ".join(f"column {name!r}" for name in beside) or f"a column {IMAGES!r}"
        expected = f"one {PLACE} in a text, or one part {{'type': 'image'}}, for each picture"
        counts = f"{len(waiting)} pictures and {values.count(None)} places for them"
        raise DataError(f"{columns} of {place}", expected=expected, found=counts)
    column = iter(waiting)
    each = [
        next(column) if picture is None else (f"picture {number} of {place}", picture)
        for number, picture in enumerate(values)
    ]
    return turns, [Picture.read(picture, where) for where, picture in each]


def _parts(content: Any, values: list[Any], beside: bool) -> Any:
    """Return a message's content with its pictures as parts; the pictures are appended to `values`, None for those of a
    column."""
    if isinstance(content, str) and beside and PLACE in content:
        first, *rest = [{"type": "text", "text": text} for text in content.split(PLACE)]
        content = [first, *(part for text in rest for part in ({"type": "image"}, text))]
    if not _pictured(content):
        return content
    values += [_value(part) for part in content if _pictured([part])]
    clean = [{"type": "image"} if _pictured([part]) else _plain_part(part) for part in content]
    return [part for part in clean if part != {"type": "text", "text": ""}]


def _value(part: Mapping[str, Any]) -> Any:
    """Return the picture that a part holds; None for a part that only marks the place of a column's picture."""
    return next((part[name] for name in _VALUES if part.get(name) not in (None, "")), None)


def _plain_part(part: Any) -> Any:
    """Return a part without its empty fields, which parquet writes where another row's part has them."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {name: one for name, one in part.items() if one is not None} if isinstance(part, Mapping) else part


OPEN = "open a vision-language model with engines.local, or leave such rows out"


def refuse_pictures(rows: Iterable[Mapping[str, Any]], reader: str, first: int = 0, of: str = "") -> None:
    """Raise `DataError` for the first of these rows that has pictures, because `reader` reads text alone.

    `first` is the number of the first row, `of` where the rows come from.
    """
    for index, row in enumerate(rows, first):
        if row.get(IMAGES):
            what, count = f"column {IMAGES!r} of row {index}{of and f' of {of}'}", len(row[IMAGES])
            found = f"{count} picture{'s' * (count > 1)}"
            raise DataError(what, expected=f"text: {reader} reads no other", found=found, do=OPEN)
